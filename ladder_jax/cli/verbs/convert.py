import argparse

SUMMARY = "Convert a pretrained model to a checkpoint, with ladder layers where they are asked for."
EXAMPLE = "ladder-jax convert SmolLM2-135M.gguf runs/smollm2 --ladder-layers 15 --calibration text.txt"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a Hugging Face folder, a GGUF file, or a checkpoint")
    parser.add_argument("destination", metavar="DESTINATION", help="the folder to write, which must not be there yet")
    parser.add_argument(
        "--ladder-layers",
        metavar="WHICH",
        help="N: the last N; i,j: 0-based layers; all; auto:N: chosen by what they cost on --calibration",
    )
    parser.add_argument("--residual", metavar="NAME", help="the kind of those layers (default ladder)")
    parser.add_argument("--ranks", type=int, metavar="N", help="for ladder-fresh: the tensor-parallel ranks it is for")
    parser.add_argument(
        "--dtype", help="compute in bfloat16 or float32 (default: as the source; values stay as stored)"
    )
    parser.add_argument("--to", default="checkpoint", metavar="FORMAT", help="checkpoint (the default) or huggingface")
    parser.add_argument(
        "--calibration",
        action="append",
        metavar="FILE[:WEIGHT]",
        help="a text to refit the layers on (for auto:N, to choose them by, too); may be given again, and WEIGHT"
        " (default 1) is its share of the tokens",
    )
    parser.add_argument(
        "--calibration-tokens", type=int, metavar="N", help="how many of its tokens (default 16384; to choose 2048)"
    )
    parser.add_argument(
        "--refit",
        metavar="WHAT",
        help="inputs: fit the converted layers' first projections; both: their output projections, too (the default"
        " with 8 tokens for each of their features, else inputs); none",
    )
    parser.add_argument("--ridge", type=float, metavar="X", help="of the refit: how near it stays (default 0.001)")
    parser.add_argument("--search", metavar="HOW", help="for auto:N: ranked, or greedy too (the default, and slower)")
    parser.add_argument("--tensor", type=int, metavar="N", help="for --calibration: tensor-parallel devices to use")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    from ladder_jax.pretrained import convert

    convert.run(vars(args))
