"""The verb `tokenize`: files of text to a token store."""

import contextlib
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.store import sources
from ladder_jax.data.store.build import build, build_portion
from ladder_jax.data.store.portion import Portion
from ladder_jax.data.store.reader import Store
from ladder_jax.data.store.rows import HUB
from ladder_jax.errors import UserError

SHARD_TOKENS = 2**28
LINE_EVERY = 10.0  # seconds between lines where there is no terminal


def run(args: dict) -> None:
    """Make the store, or go on with it, and say what it holds. Raises UserError for what cannot be done."""
    out = pathlib.Path(args["out"]).expanduser()
    portion = Portion.parse(args["part"]) if args["part"] is not None else None
    workers = os.cpu_count() if args["workers"] is None else args["workers"]
    shard_tokens = SHARD_TOKENS if args["shard_tokens"] is None else args["shard_tokens"]
    for name, value in (("workers", workers), ("shard-tokens", shard_tokens)):
        if value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}")
    _check_options(args)
    _check_apart(args["source"], out)
    tokenizer = tokenizers.load(args["tokenizer"])
    plan = sources.plan(args["source"], subset=args["subset"], split=args["split"] or "train")
    settings = dict(tokenizer=tokenizer, source=args["tokenizer"], field=args["field"], shard_tokens=shard_tokens)
    make = functools.partial(build_portion, portion) if portion else build
    with _progress(total=sum(part.size for part in (portion.of(plan) if portion else plan))) as advance:
        made = make(plan, out=out, workers=workers, advance=advance, **settings)
    if args["verify"]:
        with Store(out) as store:
            store.verify()
    print(_summary(made, out / portion.name if portion else out))


def _summary(made, out: pathlib.Path) -> str:
    count = lambda name: sum(getattr(shard, name) for shard in made.shards)
    left_out = [f"{count('empty'):,} empty documents"] if count("empty") else []
    left_out += [f"{count('skipped'):,} files that are not text"] if count("skipped") else []
    more = f"; left out {' and '.join(left_out)}" if left_out else ""
    return f"{out}: {made.documents:,} documents, {made.tokens:,} tokens of {made.tokenizer}{more}"


def _check_options(args: dict) -> None:
    if args["verify"] and args["part"] is not None:
        raise UserError("--verify reads a finished store: give it without --part")
    for name in ("subset", "split"):
        if args[name] is not None and not any(source.startswith(HUB) for source in args["source"]):
            raise UserError(f"--{name} is for data sets of the Hub, {HUB}OWNER/NAME")


def _check_apart(given: Sequence[str], out: pathlib.Path) -> None:
    for source in given:
        folder = pathlib.Path(source).expanduser()
        if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"--out {out} lies in the source {source!r}: it would become a source itself")


@contextlib.contextmanager
def _progress(*, total: int) -> Iterator[Callable[[int], None]]:
    """Gives `advance(size)`, to be called when so many more bytes of the sources are done. Any thread may."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _lines(total)
        return
    columns = TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda size: bar.advance(task, size)


def _lines(total: int) -> Callable[[int], None]:
    began = spoke = time.monotonic()
    done = 0

    def advance(size: int) -> None:
        nonlocal done, spoke
        done += size
        now = time.monotonic()
        if now - spoke > LINE_EVERY:
            spoke = now
            print(f"{done / 1e6:,.0f}/{total / 1e6:,.0f} MB in {now - began:.0f} s", file=sys.stderr, flush=True)

    return advance
