import argparse

SUMMARY = "Compile for a target that need not be here, and say how much of the communication is hidden."
EXAMPLE = "ladder-jax overlap --model llama-3-70b --target v5p:2x2x2 --phase decode --residual ladder --layers 4"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help="a preset, such as llama-3-70b, or any model")
    parser.add_argument("--target", required=True, help="v5e:2x4, v5p:2x2x2, v6e:2x4, tpu7x:2x2x1, h100:8, b200:8")
    parser.add_argument("--phase", required=True, metavar="PHASE", help="prefill, decode or train")
    parser.add_argument("--residual", required=True, metavar="NAME", help="standard, ladder, ladder-fresh, ...")
    parser.add_argument("--ladder-layers", metavar="WHICH", help="a hybrid: N (the last N layers), i,j or all")
    parser.add_argument("--loop", help="scan or unrolled (default: unrolled; scan for train)")
    parser.add_argument("--remat", help="for train: none (the default), full or save-matmuls")
    parser.add_argument("--launch", help="for prefill and decode: explicit, chained, or auto (the default)")
    parser.add_argument("--quantize", help="for prefill and decode: int8, the weights in 8 bits; none (the default)")
    for option, letter, text in (
        ("layers", "N", "layers (default: the preset's)"),
        ("tensor", "N", "tensor-parallel devices (default: all of the target's)"),
        ("fsdp", "N", "for train: split every parameter over N devices more (default 1)"),
        ("batch", "B", "rows, on each of the fsdp devices (default: 16 for decode, else 1)"),
        ("prompt-length", "P", "tokens a row in prefill and train (default 1024)"),
        ("context", "S", "cache positions a row (default: 2048 in decode, the prompt's in prefill)"),
    ):
        parser.add_argument(f"--{option}", type=int, metavar=letter, help=text)
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="for train and prefill: split the stream along the sequence"
    )
    parser.add_argument(
        "--collective-matmul", metavar="FORM", help="with --sequence-parallel: none (the default), compiler or ring"
    )
    parser.add_argument(
        "--interleave", type=int, metavar="N", help="for train and prefill: 2 takes two halves of the rows in turn"
    )
    parser.add_argument("--experts", metavar="FORM", help="with --sequence-parallel: reduce (the default) or exchange")
    parser.add_argument(
        "--capacity", type=float, metavar="C", help="of --experts exchange: an expert's rows, at most, over the mean"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE", help="draw two layers' timeline, Standard above NAME (PNG, SVG, PDF)")
    parser.add_argument("--trace", metavar="FILE", help="write the timelines for https://ui.perfetto.dev")


def run(args: argparse.Namespace) -> None:
    from ladder_jax.overlap import command

    command.run(vars(args))
