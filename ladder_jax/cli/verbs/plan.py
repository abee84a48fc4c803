import argparse

SUMMARY = (
    "Say which meshes, remat policies and microbatches of a training step fit a target's memory, the fastest first."
)
EXAMPLE = "ladder-jax plan --model llama-3-70b --target v5p:4x4x4 --tokens 4194304 --sequence 8192"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="MODEL", help="a preset, such as llama-3-70b, a config file, or any model"
    )
    parser.add_argument("--target", required=True, help="v5p:4x4x4, v6e:4x4, tpu7x:2x2x1, h100:8, b200:16, cpu:8, ...")
    parser.add_argument(
        "--tokens", required=True, type=int, metavar="N", help="of one optimizer step, over all devices"
    )
    parser.add_argument("--sequence", type=int, default=2048, metavar="T", help="tokens a sequence (default 2048)")
    parser.add_argument("--residual", metavar="NAME", help="standard, ladder, ... (default: the model's)")
    parser.add_argument("--layers", type=int, metavar="N", help="layers (default: the model's)")
    parser.add_argument(
        "--capacity",
        type=float,
        metavar="C",
        help="an expert's rows, at most, over the mean (default: the model's); exchanging rows (mesh.experts) needs it",
    )
    parser.add_argument(
        "--confirm",
        type=int,
        default=1,
        metavar="N",
        help="compile the training step of the N best that fit, for the target (default 1; 0: estimate only)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    from ladder_jax.plan import command

    command.run(vars(args))
