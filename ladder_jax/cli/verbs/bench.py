import argparse

SUMMARY = "Time prefill and decode of residual topologies in turns, and hold them to the device's own limits."
EXAMPLE = "ladder-jax bench --model llama-3.2-1b --residual standard,ladder --batch 1,16 --plot speed.png"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help="a preset, or any model; weights are random")
    parser.add_argument("--residual", required=True, metavar="NAME[,NAME]", help="standard, ladder, ladder-fresh, ...")
    parser.add_argument("--batch", metavar="B[,B]", help="rows at once (default 1,4,16,64)")
    parser.add_argument(
        "--interleave", metavar="N[,N]", help="1,2 times each prefill as a whole batch and in two halves (default 1)"
    )
    for option, letter, text in (
        ("prompt-length", "P", "tokens a row in the prompt (default 1024)"),
        ("new-tokens", "G", "tokens a row to generate (default 512)"),
        ("tensor", "N", "tensor-parallel devices (default: all)"),
        ("share", "N", "on one device: a rank's share of tensor parallelism over N, without the wire"),
        ("warmup", "W", "generations before those that are timed (default 5)"),
        ("repeats", "R", "generations that are timed (default 10)"),
        ("layers", "N", "layers (default: the preset's)"),
    ):
        parser.add_argument(f"--{option}", type=int, metavar=letter, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", metavar="FILE", help="write that object to a file")
    parser.add_argument("--plot", metavar="FILE", help="draw tokens/s and bandwidth by batch (PNG, SVG, PDF)")


def run(args: argparse.Namespace) -> None:
    from ladder_jax.bench import command

    command.run(vars(args))
