"""A run's time: where its wall time went (goodput), tokens a second, model FLOPs utilisation, and
profiles.

Goodput counts over all restarts, and only steps that stayed. Every checkpoint stores the account of
its moment; a run that resumes from it continues that account, and all time since then, for steps
that are made again, for standing still and for starting, is lost.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from ladder_jax.config import Json, RunConfig
from ladder_jax.config.fields import natural
from ladder_jax.errors import UserError, error_text
from ladder_jax.hardware import PEAKS
from ladder_jax.nn import ModelDef, matrix_elements
from ladder_jax.terminal import Say

PARTS = {
    "steps": "steps",
    "data": "waiting for data",
    "evaluation": "evaluation",
    "saving": "saving",
    "compile": "compiling",
    "start": "starting",
    "lost": "lost to restarts",
}


class TimeAccount:
    """Seconds by part. `with account.time("saving")` inside of `account.time("steps")` counts as
    saving alone.
    """

    def __init__(self):
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.restarts = 0
        self.began = time.time()
        self._open = ["start"]
        self._mark = time.perf_counter()

    @contextlib.contextmanager
    def time(self, part: str) -> Iterator[None]:
        self._charge()
        self._open.append(part)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def as_dict(self) -> Json:
        """For a checkpoint; `go_back` takes it."""
        return {"time": time.time(), "seconds": self.now(), "restarts": self.restarts}

    def go_back(self, saved: Json | None) -> None:
        """Continue the account of a checkpoint (None: of the run's beginning); all time since then
        is lost.
        """
        self._mark = time.perf_counter()
        saved = saved or {"time": self.began, "seconds": {}}
        self.seconds = {part: float(saved["seconds"].get(part, 0.0)) for part in PARTS}
        self.seconds["lost"] += max(0.0, time.time() - saved["time"])

    def now(self) -> dict[str, float]:
        """Seconds so far, by part."""
        self._charge()
        return dict(self.seconds)

    def summary(self) -> Json:
        """began (since 1970), wall_seconds, goodput (their share in steps), seconds and shares by
        part, restarts.
        """
        seconds = self.now()
        total = sum(seconds.values())
        shares = {part: of_part / total for part, of_part in seconds.items()}
        return {
            "began": self.began,
            "wall_seconds": total,
            "goodput": shares["steps"],
            "seconds": seconds,
            "shares": shares,
            "restarts": self.restarts,
        }

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._mark
        self._mark = now


def goodput_text(summary: Json) -> str:
    shares = summary["shares"]
    parts = [f"{words} {shares[part]:.1%}" for part, words in PARTS.items() if shares[part] > 0]
    wall = f"{summary['wall_seconds']:,.0f} s, restarts: {summary['restarts']}"
    return f"goodput {summary['goodput']:.1%} of {wall}: {', '.join(parts)}"


def mfu(
    config: RunConfig, *, definition: ModelDef, mesh: Mesh
) -> tuple[Callable[[float], float] | None, str]:
    """Model FLOPs utilisation, from 0 to 1, of tokens a second: the FLOPs that training needs, over
    the devices' peak.

        MFU = tokens/s x FLOPs a token / (devices x peak FLOP/s of one)
        FLOPs a token = 3 x (2 x elements of all matrices + 2 L n H (T + 1))

    Twice an element is its multiply-add, the embedding's lookup is none; attention is n heads of
    size H in L layers, scores and values, over the (T + 1) / 2 positions that a token sees in the
    mean (causal, so half of PaLM's count: arXiv 2204.02311, appendix B); the backward pass is twice
    the forward. Rematerialisation, the vocabulary's padding and copies of key/value heads are not
    counted.

    None where the peak is unknown. The text has the formula and the peak, or says why there is
    none.
    """
    side = config.model.side is not None
    if side or config.train.freeze or config.lora.rank or config.distill.teacher:
        return None, "no MFU: its formula is of training all weights on the data alone"
    kind = mesh.devices.flat[0].device_kind
    peak = peak_of(kind)
    source = f"{kind}, bfloat16"
    if config.train.peak_tflops:
        peak = config.train.peak_tflops * 1e12
        source = "train.peak_tflops"
    if peak is None:
        why = f"the peak of {kind!r} devices is not known (train.peak_tflops=... gives it)"
        return None, f"no MFU: {why}"
    work = flops_a_token(definition, length=config.train.sequence)
    text = (
        f"MFU = tokens/s x {work:.4g} FLOPs a token / ({mesh.size} x {peak / 1e12:g} TFLOP/s, {source}),"
        " nothing recomputed counted"
    )
    return lambda tokens_per_second: tokens_per_second * work / (mesh.size * peak), text


def flops_a_token(definition: ModelDef, *, length: int) -> int:
    """Forward and backward, in sequences of `length` tokens.

    Of attention 2 H for a score and as many for a value, of the (T + 1) / 2 positions that one of T
    sees in the mean. What a kernel computes of the masked half is not counted.
    """
    config = definition.config
    attention = 2 * config.num_heads * config.head_dim * (length + 1) * config.num_layers
    return 3 * (2 * matrix_elements(definition) + attention)


def peak_of(device_kind: str) -> float | None:
    """FLOP/s of a device of this kind (`jax.Device.device_kind`), None for one that the table does
    not have.
    """
    kinds = [kind for kind in PEAKS if device_kind.startswith(kind)]
    return PEAKS[max(kinds, key=len)] if kinds else None


@dataclasses.dataclass
class Throughput:
    """A run's speed between logged steps; only time in steps and in waiting for data counts.

    mfu: of tokens a second, where the peak is known.
    """

    account: TimeAccount
    tokens_a_step: int
    mfu: Callable[[float], float] | None

    def __post_init__(self):
        self.restart(0)

    def restart(self, step: int) -> None:
        """Measure from the end of `step`."""
        self._step = step
        self._seconds = self.account.now()

    def left_out(self) -> None:
        """A step was not made, so that its tokens have no speed."""
        self._step += 1

    def since_last(self, step: int) -> Json:
        """tokens (of the whole run), tokens_per_second, data_wait (a share of time), mfu where the
        peak is known.
        """
        before = self._seconds
        count = step - self._step
        self.restart(step)
        stepping = self._seconds["steps"] - before["steps"]
        waiting = self._seconds["data"] - before["data"]
        total = max(stepping + waiting, 1e-9)
        rate = count * self.tokens_a_step / total
        row = {
            "tokens": step * self.tokens_a_step,
            "tokens_per_second": rate,
            "data_wait": waiting / total,
        }
        if self.mfu:
            row["mfu"] = self.mfu(rate)
        return row


def row_text(row: Json) -> str:
    """A logged row for the progress bar."""
    loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
    parts = [f"loss {loss}", f"{row['tokens_per_second']:,.0f} tokens/s"]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    if row.get("expert_load") is not None:
        parts.append(f"expert load {row['expert_load']:.1f}")
    parts.append(f"data wait {row['data_wait']:.1%}")
    return "  ".join(parts)


def parse_profile(words: str) -> range:
    """`10:13` is the steps 10 to 13, both included; `10` is that step alone. Raises UserError for
    anything else.
    """
    first, colon, last = words.partition(":")
    if not colon:
        last = first
    steps = range(natural(first), natural(last) + 1)
    if not steps or steps[0] < 1:
        raise UserError(f"--profile {words}: not FIRST:LAST with 1 <= FIRST <= LAST, such as 10:13")
    return steps


@dataclasses.dataclass
class Profiler:
    """Traces `steps`, where this process makes them, into `folder`, for xprof, TensorBoard or
    Perfetto.

    A full disk costs the profile, never the run.
    """

    steps: range
    folder: pathlib.Path
    say: Say = print
    _running: bool = False

    def before(self, step: int, *, pending: object) -> None:
        """Start with this step, if it is the first. Earlier ones (`pending`, which is waited for)
        stay outside.
        """
        if step in self.steps and not self._running:
            jax.block_until_ready(pending)
            jax.profiler.start_trace(self.folder)
            self._running = True

    def after(self, step: int, *, pending: object) -> bool:
        """End with this step, if it is the last; returns whether the profile was written then."""
        if not self._running or step < self.steps[-1]:
            return False
        jax.block_until_ready(pending)
        return self.close()

    def close(self) -> bool:
        if not self._running:
            return False
        self._running = False
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:  # jax's own is a RuntimeError
            self.say(f"the profile cannot be written: {error_text(error)}")
            self.steps = range(0)  # jax 0.11 could begin none again
            return False
        return True
