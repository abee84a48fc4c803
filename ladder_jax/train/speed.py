"""How fast a run is, from one logged step to the next: only time in steps and in waiting for data counts."""

from typing import Any

from ladder_jax.train.goodput import Account
from ladder_jax.train.mfu import Mfu


class Speed:
    """`since_last(step)` is called at each logged step."""

    def __init__(self, account: Account, *, tokens_a_step: int, mfu: Mfu, step: int):
        self._account, self._tokens, self._mfu = account, tokens_a_step, mfu
        self.restart(step)

    def restart(self, step: int) -> None:
        """Measure from here, after `step`."""
        self._step, self._seconds = step, self._account.working()

    def since_last(self, step: int) -> dict[str, Any]:
        """tokens (of the whole run), tokens_per_second, data_wait (a share of time), mfu where the peak is known."""
        before, count = self._seconds, step - self._step
        self.restart(step)
        spent = {part: self._seconds[part] - before[part] for part in before}
        total = max(sum(spent.values()), 1e-9)
        rate = count * self._tokens / total
        row = {"tokens": step * self._tokens, "tokens_per_second": rate, "data_wait": spent["data"] / total}
        share = self._mfu.of(rate)
        return row if share is None else {**row, "mfu": share}


def as_text(row: dict[str, Any]) -> str:
    """A logged row for the progress bar."""
    loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
    parts = [f"loss {loss}", f"{row['tokens_per_second']:,.0f} tokens/s"]
    parts += [f"MFU {row['mfu']:.1%}"] if "mfu" in row else []
    return "  ".join([*parts, f"data wait {row['data_wait']:.1%}"])
