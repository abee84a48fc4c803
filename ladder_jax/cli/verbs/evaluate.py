import argparse

SUMMARY = "Measure perplexity, multiple choice or written answers of a model, as lm-evaluation-harness does."
EXAMPLE = "ladder-jax evaluate runs/tiny --text book.txt --window 512 --stride 256"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="MODEL", help="a run's folder, a Hugging Face folder, a GGUF file, or org/name of the Hub"
    )
    for option, text in (
        (
            "text",
            "perplexity of a text file; of .jsonl, .jsonl.gz, .parquet, .csv or a folder, each document by itself",
        ),
        ("multiple-choice", 'JSON lines such as {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}'),
        ("generation", 'JSON lines such as {"question": "2 + 2 =", "answer": "#### 4"}; greedy'),
        ("out", "a JSON line as each window or question is done; a second run goes on with it"),
        ("shots-file", "questions with answers to put before each question, in the file's own form"),
    ):
        parser.add_argument(f"--{option}", metavar="FILE", help=text)
    for option, letter, text in (
        ("window", "N", "the most tokens that the model reads at once (default: as it was trained)"),
        ("stride", "N", "of --text: tokens that each later window scores (default: all of it)"),
        ("shots", "N", "the first N questions of --shots-file stand before each question (default 0)"),
        ("limit", "N", "only the first N questions"),
        ("max-new-tokens", "N", "of --generation: the longest answer (default 256)"),
        ("slots", "N", "of --generation: answers that are written at the same time (default 8)"),
        ("batch-tokens", "N", "tokens a batch, padding included (default 4096; halved where memory does not suffice)"),
        (
            "prefix-token",
            "ID",
            "the token before a text's first (default: the tokenizer's BOS, or EOS; a newline byte)",
        ),
        ("tensor", "N", "tensor-parallel devices (default: as trained, if there are as many)"),
        ("data", "N", "copies of the model, each with its share of a batch (default 1)"),
        ("ranks", "N", "for --residual ladder-fresh: the tensor-parallel ranks it is for"),
    ):
        parser.add_argument(f"--{option}", type=int, metavar=letter, help=text)
    parser.add_argument(
        "--ladder-layers", metavar="WHICH", help="make these ladder layers, in memory: N (the last N), i,j or all"
    )
    parser.add_argument("--residual", metavar="NAME", help="the kind of those layers (default ladder)")
    parser.add_argument("--field", metavar="NAME", help="where --text's JSON lines and tables hold it (default: text)")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends an answer; may be given again (default: GSM8K's)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    from ladder_jax.evaluate import command

    command.run(vars(args))
