import argparse

SUMMARY = "Continue prompts with a trained checkpoint."
EXAMPLE = 'ladder-jax generate runs/tiny --prompt "def main(" --temperature 0.8 --seed 1'


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run's folder, or one checkpoint in it")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be given again")
    parser.add_argument("--prompts", metavar="FILE", help='JSON lines such as {"prompt": "Once", "temperature": 0.8}')
    parser.add_argument(
        "--out", metavar="FILE", help="for --prompts: a JSON line as each finishes; a second run goes on with it"
    )
    parser.add_argument("--chat", action="store_true", help="a conversation, or one answer to standard input")
    parser.add_argument("--stream", action="store_true", help="print one prompt's text as it comes")
    for option, kind, letter, text in (
        ("max-new-tokens", int, "N", "how many tokens to add (default 128)"),
        ("temperature", float, "T", "0 is greedy (the default)"),
        ("top-k", int, "K", "only the K most probable tokens (default 0: all)"),
        ("top-p", float, "P", "only the most probable tokens that together reach P (default 1: all)"),
        ("min-p", float, "P", "only tokens at least P times as probable as the best (default 0: all)"),
        ("repetition-penalty", float, "R", "above 1, what was there before becomes less likely (default 1)"),
        ("seed", int, "S", "the same seed gives the same text (default 0)"),
        ("slots", int, "N", "prompts that are continued at the same time (default 8)"),
        ("context", int, "S", "for --chat: tokens of history and answer together (default 2048)"),
    ):
        parser.add_argument(f"--{option}", type=kind, metavar=letter, help=text)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    parser.add_argument(
        "--tensor", type=int, metavar="N", help="tensor-parallel devices (default: as trained, if there are as many)"
    )
    parser.add_argument("--quantize", help="int8: the weights in 8 bits; none (the default)")


def run(args: argparse.Namespace) -> None:
    from ladder_jax.decode import command

    command.run(vars(args))
