"""The verb `calibrate`: measures, fits, and writes a YAML file that `predict` reads."""

import dataclasses
import datetime
import json
import pathlib
import platform

from ladder_jax import files
from ladder_jax.errors import UserError
from ladder_jax.predict import machine

WARMUP, REPEATS = 3, 10
UNSTEADY = 0.5  # a spread, of the middle half of the samples over their median, that says so
SIMULATED = "Simulated devices share one processor: these constants describe it and no accelerator."


def run(args: dict) -> None:
    """Write `--out`; raises UserError, and writes nothing, for what cannot be asked or was not measured well."""
    files.check_writable("out", args["out"], endings=(".yaml", ".yml"))
    for name in ("tensor", "warmup", "repeats"):
        value = args[name]
        if value is not None and value < (0 if name == "warmup" else 1):
            raise UserError(f"--{name} must {'not be negative' if name == 'warmup' else 'be positive'}, not {value}")
    repeats = REPEATS if args["repeats"] is None else args["repeats"]
    warmup = WARMUP if args["warmup"] is None else args["warmup"]

    import jax  # only now: mistakes are answered at once

    count = jax.device_count()
    tensor = args["tensor"] or count
    if tensor > count:
        raise UserError(f"--tensor {tensor} is more than this machine's {count} devices")
    from ladder_jax.predict.calibrate import constants

    sections, samples = constants.constants(tensor, warmup=warmup, repeats=repeats)
    text = _yaml(sections, jax.devices()[0])
    files.write_atomically(args["out"], lambda path: _checked(path, text))
    found = machine.load(args["out"])
    if args["json"]:
        print(json.dumps({"hardware": str(args["out"]), "constants": _flat(sections), "all_reduces": samples}))
        return
    _say(found, args["out"], samples, simulated=jax.devices()[0].platform == "cpu")


def _yaml(sections: dict, device) -> str:
    import jax
    import yaml

    kind = f"{platform.machine()} CPU" if device.platform == "cpu" else device.device_kind
    today = datetime.date.today().isoformat()
    plain = lambda pair: {
        "value": float(f"{pair[0]:.4g}") if isinstance(pair[0], float) else pair[0],
        "source": pair[1],
    }
    tree = {name: plain(value) if isinstance(value, tuple) else value for name, value in sections.items()}
    if tree["link"]:
        tree["link"] = {name: plain(v) if isinstance(v, tuple) else v for name, v in tree["link"].items()}
    head = f"# {kind}, measured by ladder-jax calibrate on {today} with jax {jax.__version__}.\n"
    if device.platform == "cpu":
        head += f"# {SIMULATED}\n"
    return head + yaml.safe_dump(tree, sort_keys=False, width=200)


def _checked(path: str, text: str) -> None:
    """Nothing is kept that `predict` would not read."""
    pathlib.Path(path).write_text(text)
    machine.load(path)


def _flat(sections: dict) -> dict[str, float]:
    found = {name: value[0] for name, value in sections.items() if isinstance(value, tuple)}
    link = sections["link"] or {}
    return found | {f"link.{name}": value[0] for name, value in link.items() if isinstance(value, tuple)}


def _say(found: machine.Machine, out: str, samples: list[dict], *, simulated: bool) -> None:
    print(f"{out}: {found.devices} devices")
    if simulated:
        print(f"note: {SIMULATED}")
    if any(one["spread"] > UNSTEADY for one in samples):
        print("note: some all-reduces took very different times: measure again when nothing else runs")
    print(f"  memory bandwidth  {found.bandwidth / 1e9:,.1f} GB/s, matmul {found.flops / 1e12:,.2f} TFLOP/s")
    print(f"  a kernel's start  {found.launch * 1e6:.2f} µs; contention {found.contention:.2f}")
    if found.link:
        link = dataclasses.asdict(found.link)
        print(
            f"  all-reduce        {link['latency'] * 1e6:.1f} µs, {link['step'] * 1e6:.2f} µs a step,"
            f" {link['bandwidth'] / 1e9:,.2f} GB/s"
        )
        for one in samples:
            fitted = found.link.all_reduce(one["bytes"], ranks=one["ranks"])
            print(
                f"    {one['ranks']:3} ranks {one['bytes'] // 1024:6} KiB  {one['seconds'] * 1e6:9.1f} µs"
                f"  spread {one['spread']:4.0%}, fitted {fitted * 1e6:9.1f} µs"
            )
