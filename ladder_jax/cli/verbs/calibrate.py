import argparse

SUMMARY = "Measure this machine's constants, and write them as hardware for predict."
EXAMPLE = "ladder-jax calibrate --out mine.yaml && ladder-jax predict --model llama-3-8b --hardware mine.yaml"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="FILE", help="the YAML file to write")
    for option, letter, text in (
        ("tensor", "N", "devices whose all-reduces are measured (default: all)"),
        ("warmup", "W", "runs before those that are timed (default 3)"),
        ("repeats", "R", "runs that are timed (default 10)"),
    ):
        parser.add_argument(f"--{option}", type=int, metavar=letter, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    from ladder_jax.predict import calibrate

    calibrate.run(vars(args))
