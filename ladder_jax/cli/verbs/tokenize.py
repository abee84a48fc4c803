import argparse

SUMMARY = "Turn text into a token store for training, or go on with one."
EXAMPLE = "ladder-jax tokenize books/ web.jsonl.gz --out stores/books --tokenizer SmolLM2-135M"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="a text file, .jsonl, .jsonl.gz, .parquet, .csv, .tsv, .arrow, .tar (WebDataset), a folder of them,"
        " or hf://datasets/OWNER/NAME[@REVISION]",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the store's folder")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (the default), or a folder with tokenizer.json")
    parser.add_argument("--field", default="text", help="where JSON lines and tables hold the text (default: text)")
    parser.add_argument("--subset", metavar="NAME", help="of a data set of the Hub (default: its only one)")
    parser.add_argument("--split", metavar="NAME", help="of a data set of the Hub (default: train)")
    parser.add_argument(
        "--part", metavar="I/N", help="make the I-th of N parts; the command without --part then joins all of them"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--shard-tokens", type=int, metavar="N", help="tokens a file, about (default 268,435,456)")
    parser.add_argument("--verify", action="store_true", help="read the finished store, and compare its checksums")


def run(args: argparse.Namespace) -> None:
    from ladder_jax.data.store import command

    command.run(vars(args))
