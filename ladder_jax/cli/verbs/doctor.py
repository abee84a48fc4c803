import argparse
import json

SUMMARY = "Say what this machine has, and what is missing."
EXAMPLE = "ladder-jax doctor --json"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    from ladder_jax import doctor

    report = doctor.examine()
    print(json.dumps(report.as_dict()) if args.json else report.as_text())
