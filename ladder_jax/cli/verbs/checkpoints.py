import argparse

SUMMARY = "List a run's checkpoints, verify them, prune them."
EXAMPLE = "ladder-jax checkpoints runs/tiny --verify"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    parser.add_argument("--verify", action="store_true", help="compare every file with what was written")
    parser.add_argument("--prune", metavar="RULES", help="verify, and keep only these: last=3,every=1000,best=1")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    from ladder_jax.checkpoint import command

    command.run(vars(args))
