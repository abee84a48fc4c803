"""The model's two fidelities beside each other: from the configuration, and from compiled schedules.

    python -m experiments.predict.compiled        # needs the compilers for TPUs and GPUs; minutes a target

Llama-3-70B over 8 devices, 16 rows, prompt 1024, 512 new tokens, this library's programs. Writes compiled.json;
`python -m experiments.predict` then puts it into the README.
"""

import argparse
import json

from experiments.predict.published import HERE
from ladder_jax.predict import compiled, request, result
from ladder_jax.predict.program import Opponents

TARGETS = ("h100:8", "v5p:2x2x2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    rows = []
    for target in parser.parse_args().targets:
        words = dict(model="llama-3-70b", hardware=None, tensor=None, batch=16, residual=None, implementation=None)
        asked = request.make(**compiled.with_defaults(words, target))
        plain = dict(opponents=Opponents.FITTED)  # rings and trees, which the constants are fitted to
        pairs = zip(result.predict(asked, **plain).rows, compiled.predict(asked, target=target, **plain).rows)
        for analytic, scheduled in pairs:
            found = {"analytic": analytic, "compiled": scheduled}
            row = {"target": target, "hardware": asked.machine.name, "residual": analytic.residual}
            rows.append(row | {name: _numbers(one) for name, one in found.items()})
            print(json.dumps(rows[-1]))
    (HERE / "compiled.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def _numbers(row: result.Row) -> dict:
    return {
        "prefill_seconds": row.speed.prefill_seconds,
        "step_seconds": row.speed.step.seconds,
        "step_exposed_seconds": row.speed.step.exposed,
        "speedup": row.speedup,
    }


if __name__ == "__main__":
    main()
