"""The verb `calibrate`: measure and fit the constants, and write a YAML file that `predict`
reads.
"""

import dataclasses
import datetime
import json
import pathlib
import platform
from collections.abc import Sequence

from ladder_jax import files
from ladder_jax.config.fields import check
from ladder_jax.predict import machine

REPEATS = 10
UNSTEADY = 0.5  # spread (interquartile range over median) from which a timing gets a note
SIMULATED = "Simulated devices share one processor: these constants describe it and no accelerator."


def run(args: dict) -> None:
    """Write `--out`. An invalid argument or a failed measurement raises UserError, and nothing is
    written.
    """
    out = args["out"]
    files.check_writable("out", out, endings=(".yaml", ".yml"))
    check(args["warmup"] >= 0, f"--warmup must not be negative, not {args['warmup']}")

    import jax  # after the arguments are checked, because it takes seconds

    device = jax.devices()[0]
    count = jax.device_count()
    tensor = args["tensor"] or count
    check(tensor <= count, f"--tensor {tensor} is more than this machine's {count} devices")
    from ladder_jax.predict import measure

    sections, reduced = measure.constants(
        tensor, warmup=args["warmup"], repeats=args["repeats"] or REPEATS
    )
    text = as_yaml(sections, device)
    files.write_atomically(out, lambda path: _write_checked(path, text))
    calibrated = machine.load(out)
    if args["json"]:
        found = calibrated.constants()
        named = {name: found[name]["value"] for name in found if name in calibrated.sources}
        samples = [dataclasses.asdict(one) for one in reduced]
        print(json.dumps({"hardware": str(out), "constants": named, "all_reduces": samples}))
        return
    _print(calibrated, out, reduced, simulated=device.platform == "cpu")


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


def _write_checked(path: str, text: str) -> None:
    """Raises UserError for what `predict` could not read: the file that is there stays."""
    pathlib.Path(path).write_text(text)
    machine.load(path)


def _print(calibrated: machine.Machine, out: str, reduced: Sequence, *, simulated: bool) -> None:
    """reduced: `measure.Reduced`, of each all-reduce."""
    print(f"{out}: {calibrated.devices} devices")
    if simulated:
        print(f"note: {SIMULATED}")
    if any(one.spread > UNSTEADY for one in reduced):
        print(
            "note: some all-reduces took very different times: measure again when nothing else runs"
        )
    print(
        f"  memory bandwidth  {calibrated.bandwidth / 1e9:,.1f} GB/s, matmul {calibrated.flops / 1e12:,.2f} TFLOP/s"
    )
    print(
        f"  a kernel's start  {calibrated.launch * 1e6:.2f} µs; contention {calibrated.contention:.2f}"
    )
    link = calibrated.link
    if link is None:
        return
    times = f"{link.latency * 1e6:.1f} µs, {link.step * 1e6:.2f} µs a step"
    print(f"  all-reduce        {times}, {link.bandwidth / 1e9:,.2f} GB/s")
    if kernel := link.one_shot:
        print(
            f"  in one kernel     {kernel.latency * 1e6:.1f} µs, {kernel.bandwidth / 1e9:,.2f} GB/s (one-shot)"
        )
    for one in reduced:
        fitted = link.all_reduce(one.bytes, ranks=one.ranks)
        print(
            f"    {one.ranks:3} ranks {one.bytes // 1024:6} KiB  {one.seconds * 1e6:9.1f} µs"
            f"  spread {one.spread:4.0%}, fitted {fitted * 1e6:9.1f} µs"
        )
