"""The verb `bench`, and its result: as JSON, for a terminal, and as a picture."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ladder_jax import files, python, terminal
from ladder_jax.bench import request as requests
from ladder_jax.bench.request import Request, Variant
from ladder_jax.terminal import Table, number

if TYPE_CHECKING:
    from ladder_jax.bench.measure import Samples
    from ladder_jax.predict.measure import Ceiling

PACKAGES = ("ladder-jax", "jax", "jaxlib", "flax")
# a CPU's is jaxlib
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}
SETTINGS = ("tensor", "share", "prompt_length", "new_tokens", "warmup", "repeats")
COLUMNS = (
    "batch",
    "residual",
    "prefill ms",
    "step ms",
    "tokens/s",
    "range",
    "GB/s",
    "of copy",
    "TFLOP/s",
    "of matmul",
)


def run(args: dict) -> None:
    """Print the result. An invalid argument raises UserError before anything is measured or
    written.
    """
    files.check_writable("out", args["out"])
    files.check_picture("plot", args["plot"])
    request = requests.make(**{name: args[name] for name in requests.OPTIONS})

    import jax  # after the arguments are checked, because it takes seconds

    from ladder_jax.bench import measure
    from ladder_jax.decode import memory
    from ladder_jax.parallel import make_mesh
    from ladder_jax.predict import measure as limits

    request = requests.on_devices(request, count=jax.device_count())
    mesh = make_mesh(tensor=request.tensor)
    samples = measure.samples(request, mesh=mesh)
    device = mesh.devices.flat[0]
    free = memory.free_memory(device, devices=mesh.size)
    answer = Result(
        request=request,
        copy=limits.copy_bandwidth(device, free=free),
        matmul=limits.matmul_peak(device, dtype=request.shape.dtype.value),
        samples=samples,
        device=f"{platform.machine()} CPU" if device.platform == "cpu" else device.device_kind,
        devices=jax.device_count(),
        versions={
            "python": platform.python_version(),
            **python.versions(*PACKAGES, *COMPILERS.get(device.platform, ())),
        },
        platform=device.platform,
    )
    terminal.answer(answer, as_json=args["json"], out=args["out"])
    if args["plot"]:
        _plot(answer, file=args["plot"])


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """copy, matmul: the device's limits. device: its kind. devices: their number on this machine.
    versions: of Python, packages and compilers, by name.
    """

    request: Request
    copy: Ceiling
    matmul: Ceiling
    samples: Sequence[Samples]
    device: str
    devices: int
    versions: dict[str, str]
    platform: str

    @property
    def title(self) -> str:
        request = self.request
        split = f"tensor {request.tensor}"
        if request.share:
            split = f"one of {request.share} ranks alone"
        return f"{request.model}, {request.depth} layers, {split} on {self.device}"

    @property
    def notices(self) -> list[str]:
        """Notes that a reader needs to interpret the numbers."""
        share = self.request.share
        if self.request.tensor == 1:
            what = (
                f", and computes a rank's share of tensor parallelism over {share}" if share else ""
            )
            return [
                f"one device communicates nothing{what}: a ratio here is a topology's overhead, not its speed-up"
            ]
        if self.platform == "cpu":
            return [
                "these are simulated devices on one CPU, which never overlaps communication:"
                " ratios of topologies mean nothing here, and all devices share the measured limits"
            ]
        return []

    @property
    def rows(self) -> list[dict]:
        return [_row(self, one) for one in self.samples]

    @property
    def ratios(self) -> list[dict]:
        """Speed-ups over the baseline (`Request.baseline`): median and range over the rounds of the
        baseline's seconds over the variant's.
        """
        baseline = self.request.baseline
        of_baseline = {one.batch: one for one in self.samples if one.variant == baseline}
        found = []
        for one in self.samples:
            if one.variant == baseline:
                continue
            row = {
                **dataclasses.asdict(one.variant),
                "against": baseline.name,
                "batch": one.batch,
            }
            for phase in ("prefill", "decode", "total"):
                of_phase = np.array(getattr(of_baseline[one.batch], phase))
                each = of_phase / np.array(getattr(one, phase))
                row |= _spread(f"{phase}_ratio", np.median(each), each)
            found.append(row)
        return found

    @property
    def verdict(self) -> list[str]:
        """One line per variant: its decoding, or of two halves in turn its prefill."""
        parts = {}  # by the beginning of the line
        for ratio in self.ratios:
            phase = "prefill" if ratio["interleave"] == 2 else "decode"
            name = Variant(ratio["residual"], ratio["interleave"]).name
            median, *ends = (ratio[f"{phase}_ratio{end}"] for end in ("", "_min", "_max"))
            span = ", ".join(f"{end:.2f}" for end in ends)
            said = f"{median:.2f}x {ratio['against']} [{span}] at batch {ratio['batch']}"
            parts.setdefault(f"{name} {phase}s", []).append(said)
        return [f"{begin} {', '.join(said)}" for begin, said in parts.items()]

    def as_dict(self) -> dict:
        """The JSON object. Seconds, bytes and FLOPs are of one device. `_row` defines medians and
        ranges.
        """
        request = self.request
        return {
            "model": request.model,
            "device": self.device,
            "devices": self.devices,
            "versions": self.versions,
            "layers": request.depth,
            **{name: getattr(request, name) for name in SETTINGS},
            "verdict": self.verdict,
            "notices": self.notices,
            "copy": self.copy.as_dict("bytes_per_second"),
            "matmul": self.matmul.as_dict("flops_per_second"),
            "rows": self.rows,
            "ratios": self.ratios,
        }

    def lines(self) -> list[str | Table]:
        """For `terminal.show`: the verdict, a table, the device's limits."""
        request = self.request
        shape = f"prompt {request.prompt_length}, {request.new_tokens} new tokens, {request.repeats} repeats in turns"
        return [
            *self.verdict,
            *(f"note: {notice}" for notice in self.notices),
            f"{self.title}; {shape}",
            _table(self.rows),
            f"copy      {number(self.copy.best / 1e9)} GB/s: {self.copy.array}",
            f"matmul    {number(self.matmul.best / 1e12)} TFLOP/s: {self.matmul.array}",
            "versions  "
            + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        ]


def _row(answer: Result, one: Samples) -> dict:
    """The JSON row: figures of the median seconds, and their _min and _max over the repeats."""
    tokens = answer.request.new_tokens

    def figures(prefill: np.ndarray, decode: np.ndarray) -> dict[str, np.ndarray]:
        step = decode / (tokens - 1)
        bytes_per_second = one.step_bytes / step
        flops_per_second = one.prefill_flops / prefill
        return {
            "prefill_seconds": prefill,
            "decode_seconds": decode,
            "step_seconds": step,
            "tokens_per_second": one.batch * tokens / (prefill + decode),
            "tokens_per_second_per_user": tokens / (prefill + decode),
            "bytes_per_second": bytes_per_second,
            "bandwidth_share": bytes_per_second / answer.copy.best,
            "prefill_flops_per_second": flops_per_second,
            "matmul_share": flops_per_second / answer.matmul.best,
        }

    each = figures(np.array(one.prefill), np.array(one.decode))
    median = figures(np.median(one.prefill), np.median(one.decode))
    row = {
        **dataclasses.asdict(one.variant),
        "batch": one.batch,
        "prompt_length": answer.request.prompt_length,
        "new_tokens": tokens,
        "bytes_per_step": one.step_bytes,
        "prefill_flops": one.prefill_flops,
        "prefill_seconds_each": list(one.prefill),
        "decode_seconds_each": list(one.decode),
    }
    for name, values in each.items():
        row |= _spread(name, median[name], values)
    return row


def _spread(name: str, median: np.ndarray, values: np.ndarray) -> dict[str, float]:
    ends = {f"{name}_min": float(min(values)), f"{name}_max": float(max(values))}
    return {name: float(median), **ends}


def _table(rows: list[dict]) -> Table:
    cells = [
        (
            str(row["batch"]),
            Variant(row["residual"], row["interleave"]).name,
            number(row["prefill_seconds"] * 1e3),
            number(row["step_seconds"] * 1e3),
            number(row["tokens_per_second"]),
            f"{number(row['tokens_per_second_min'])} - {number(row['tokens_per_second_max'])}",
            number(row["bytes_per_second"] / 1e9),
            f"{row['bandwidth_share']:.1%}",
            number(row["prefill_flops_per_second"] / 1e12),
            f"{row['matmul_share']:.1%}",
        )
        for row in rows
    ]
    return Table(COLUMNS, cells, left=("residual",))


def _plot(answer: Result, *, file: str) -> None:
    """Tokens per second, one panel a batch. Bars are medians, error bars the range over the
    repeats. The file's ending sets the format.
    """
    request = answer.request
    columns = len(request.batches)
    names = [one.name for one in request.variants]
    size = (1.6 + columns * max(1.8, 0.8 * len(names)), 3.5)
    figure, axes = files.panels(1, columns, size=size)
    for axis, batch in zip(axes, request.batches):
        rows = [row for row in answer.rows if row["batch"] == batch]
        keys = ("tokens_per_second", "tokens_per_second_min", "tokens_per_second_max")
        heights, *ends = (np.array([row[key] for row in rows]) for key in keys)
        bars = axis.bar(names, heights, yerr=np.abs(ends - heights), capsize=4)
        axis.bar_label(bars, map(number, heights), padding=2)
        axis.margins(y=0.15)
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axis.set_title(f"batch {batch}")
    axes[0].set_ylabel("tokens/s")
    shape = f"prompt {request.prompt_length}, {request.new_tokens} new tokens"
    figure.suptitle(f"{answer.title}: {shape}")
    files.write_picture(file, figure)
