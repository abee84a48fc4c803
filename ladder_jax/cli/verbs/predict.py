import argparse

SUMMARY = "Say how fast each residual topology would be on a machine that need not be here, and which to take."
EXAMPLE = "ladder-jax predict --model llama-3-70b --hardware h100-nvlink --tensor 8 --batch 16"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help="a preset, such as llama-3-70b, or any model")
    parser.add_argument("--hardware", metavar="NAME", help="h100-nvlink, h100-no-nvlink, v5e, ... or a YAML file")
    parser.add_argument("--residual", metavar="NAME[,NAME]", help="standard, ladder, ... (default: all)")
    parser.add_argument("--ladder-layers", metavar="WHICH", help="hybrids: N (the last N layers), i,j or all")
    parser.add_argument("--implementation", metavar="NAME", help="ours (the default), or authors: the paper's")
    parser.add_argument("--phase", metavar="NAME", help="generate (the default), prefill or train")
    parser.add_argument(
        "--launch", metavar="NAME", help="how hidden all-reduces are launched: explicit, chained, or auto (the default)"
    )
    parser.add_argument(
        "--interleave",
        metavar="N",
        help="of prefill and training: 1 (the whole batch), 2 (two halves in turn), or auto (the default): the faster",
    )
    parser.add_argument(
        "--experts", metavar="FORM", help="with --phase prefill or train: reduce (the default) or exchange"
    )
    parser.add_argument(
        "--capacity", type=float, metavar="C", help="of --experts exchange: an expert's rows, at most, over the mean"
    )
    for option, letter, text in (
        ("tensor", "N", "tensor-parallel devices (default: all of the hardware's)"),
        ("batch", "B", "rows at once (default 1)"),
        ("prompt-length", "P", "tokens a row in the prompt (default 1024)"),
        ("new-tokens", "G", "tokens a row to generate (default 512)"),
        ("sequence", "T", "tokens a row with --phase train (default 2048)"),
        ("layers", "N", "layers (default: the preset's)"),
    ):
        parser.add_argument(f"--{option}", type=int, metavar=letter, help=text)
    parser.add_argument(
        "--sweep", nargs="+", metavar="AXIS=A,B", help="vary tensor, batch, link: tensor=1,2,4,8 batch=1,16 link=0.5,1"
    )
    parser.add_argument("--from-schedule", metavar="TARGET", help="from compiled programs: v5p:2x2x2, h100:8, ...")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE", help="draw where the time goes, or the sweep (PNG, SVG, PDF)")


def run(args: argparse.Namespace) -> None:
    from ladder_jax.predict import command

    command.run(vars(args))
