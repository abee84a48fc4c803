import argparse

SUMMARY = "Divide examples into stages by a score, for training on one after another."
EXAMPLE = "ladder-jax split records.jsonl --by score --out stages"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FILE", help="JSON lines (.jsonl, .jsonl.gz), each with a score")
    parser.add_argument("--by", required=True, metavar="FIELD", help="the score's name, a number in each record")
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder, with a file a stage and stages.yaml")
    parser.add_argument(
        "--stages", default="easy,medium,hard", metavar="A,B,...", help="their names, in order (easy,medium,hard)"
    )
    parser.add_argument(
        "--at", metavar="X,Y,...", help="the scores between the stages, ascending (default: equal numbers of records)"
    )
    parser.add_argument("--descending", action="store_true", help="the first stage has the highest scores")


def run(args: argparse.Namespace) -> None:
    from ladder_jax.data import split

    split.run(vars(args))
