"""The verb `calibrate`: measure and fit the constants, and write a YAML file that `predict`
reads.
"""

import dataclasses
import datetime
import json
import pathlib
import platform

from ladder_jax import files, terminal
from ladder_jax.config.fields import check
from ladder_jax.predict import machine

SIMULATED = "Simulated devices share one processor: these constants describe it and no accelerator."


def run(args: dict) -> None:
    """Write `--out`. An invalid argument or a failed measurement raises UserError, and nothing is
    written.
    """
    out = args["out"]
    files.check_writable("out", out, endings=(".yaml", ".yml"))

    import jax  # after the arguments are checked, because it takes seconds

    device = jax.devices()[0]
    count = jax.device_count()
    tensor = args["tensor"] or count
    check(tensor <= count, f"--tensor {tensor} is more than this machine's {count} devices")
    from ladder_jax.predict import measure

    sections, reduced = measure.constants(tensor)
    calibrated = machine.made(sections, name=pathlib.Path(out).stem, where="measured here")
    files.write(pathlib.Path(out), [as_yaml(sections, device).encode()])
    constants = calibrated.constants()
    if args["json"]:
        named = {name: one["value"] for name, one in constants.items()}
        samples = [dataclasses.asdict(one) for one in reduced]
        print(json.dumps({"hardware": str(out), "constants": named, "all_reduces": samples}))
    else:
        terminal.show(_lines(out, constants))


def as_yaml(sections: dict, device) -> str:
    """The file's text."""
    import jax
    import yaml

    kind = f"{platform.machine()} CPU" if device.platform == "cpu" else device.device_kind
    today = datetime.date.today().isoformat()
    head = f"# {kind}, measured by ladder-jax calibrate on {today} with jax {jax.__version__}.\n"
    if device.platform == "cpu":
        head += f"# {SIMULATED}\n"
    return head + yaml.safe_dump(sections, sort_keys=False, width=200)


def _lines(out: str, constants: dict[str, dict]) -> list:
    rows = [(name, f"{one['value']:.4g}", one["source"]) for name, one in constants.items()]
    return [
        f"{out}: {len(constants)} constants",
        terminal.Table(("constant", "value", "source"), rows, left=("constant", "source")),
    ]
