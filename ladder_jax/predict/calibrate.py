"""The verb `calibrate`: measure and fit the constants, and write a YAML file that `predict` reads."""

import datetime
import json
import pathlib
import platform

from ladder_jax import files
from ladder_jax.errors import UserError
from ladder_jax.predict import machine

WARMUP = 3
REPEATS = 10
UNSTEADY = 0.5  # spread (interquartile range over median) from which a timing gets a note
SIMULATED = "Simulated devices share one processor: these constants describe it and no accelerator."


def run(args: dict) -> None:
    """Write `--out`. An invalid argument or a failed measurement raises UserError, and nothing is written."""
    files.check_writable("out", args["out"], endings=(".yaml", ".yml"))
    for name in ("tensor", "warmup", "repeats"):
        value = args[name]
        if value is not None and value < (0 if name == "warmup" else 1):
            raise UserError(f"--{name} must {'not be negative' if name == 'warmup' else 'be positive'}, not {value}")
    repeats = REPEATS if args["repeats"] is None else args["repeats"]
    warmup = WARMUP if args["warmup"] is None else args["warmup"]

    import jax  # after the arguments are checked, because it takes seconds

    device = jax.devices()[0]
    count = jax.device_count()
    tensor = args["tensor"] or count
    if tensor > count:
        raise UserError(f"--tensor {tensor} is more than this machine's {count} devices")
    from ladder_jax.predict import measure

    sections, samples = measure.constants(tensor, warmup=warmup, repeats=repeats)
    text = as_yaml(sections, device)
    files.write_atomically(args["out"], lambda path: _write_checked(path, text))
    calibrated = machine.load(args["out"])
    if args["json"]:
        print(json.dumps({"hardware": str(args["out"]), "constants": flat(sections), "all_reduces": samples}))
        return
    _print(calibrated, args["out"], samples, simulated=device.platform == "cpu")


def as_yaml(sections: dict, device) -> str:
    """The file's text, with four significant digits."""
    import jax
    import yaml

    def rounded(tree: object) -> object:
        if isinstance(tree, dict):
            return {name: rounded(value) for name, value in tree.items()}
        return float(f"{tree:.4g}") if isinstance(tree, float) else tree

    kind = f"{platform.machine()} CPU" if device.platform == "cpu" else device.device_kind
    today = datetime.date.today().isoformat()
    head = f"# {kind}, measured by ladder-jax calibrate on {today} with jax {jax.__version__}.\n"
    if device.platform == "cpu":
        head += f"# {SIMULATED}\n"
    return head + yaml.safe_dump(rounded(sections), sort_keys=False, width=200)


def _write_checked(path: str, text: str) -> None:
    """Write the file, and raise UserError if `predict` could not read it."""
    pathlib.Path(path).write_text(text)
    machine.load(path)


def flat(sections: dict, prefix: str = "") -> dict[str, float]:
    """The measured constants by dotted name."""
    constants = {}
    for name, value in sections.items():
        if isinstance(value, dict):
            constants |= {prefix + name: value["value"]} if "value" in value else flat(value, f"{prefix}{name}.")
    return constants


def _print(calibrated: machine.Machine, out: str, samples: list[dict], *, simulated: bool) -> None:
    print(f"{out}: {calibrated.devices} devices")
    if simulated:
        print(f"note: {SIMULATED}")
    if any(one["spread"] > UNSTEADY for one in samples):
        print("note: some all-reduces took very different times: measure again when nothing else runs")
    print(f"  memory bandwidth  {calibrated.bandwidth / 1e9:,.1f} GB/s, matmul {calibrated.flops / 1e12:,.2f} TFLOP/s")
    print(f"  a kernel's start  {calibrated.launch * 1e6:.2f} µs; contention {calibrated.contention:.2f}")
    if link := calibrated.link:
        latency = link.latency * 1e6
        step = link.step * 1e6
        bandwidth = link.bandwidth / 1e9
        print(f"  all-reduce        {latency:.1f} µs, {step:.2f} µs a step, {bandwidth:,.2f} GB/s")
        if kernel := link.one_shot:
            print(f"  in one kernel     {kernel.latency * 1e6:.1f} µs, {kernel.bandwidth / 1e9:,.2f} GB/s (one-shot)")
        for one in samples:
            fitted = link.all_reduce(one["bytes"], ranks=one["ranks"])
            print(
                f"    {one['ranks']:3} ranks {one['bytes'] // 1024:6} KiB  {one['seconds'] * 1e6:9.1f} µs"
                f"  spread {one['spread']:4.0%}, fitted {fitted * 1e6:9.1f} µs"
            )
