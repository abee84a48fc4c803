"""The verb `tokenize`: files of text to a token store."""

import os
import pathlib
import re
from collections.abc import Sequence

from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.store import sources
from ladder_jax.data.store.build import build
from ladder_jax.data.store.manifest import Manifest
from ladder_jax.data.store.reader import Store
from ladder_jax.data.store.tables import HUB
from ladder_jax.errors import UserError

SHARD_TOKENS = 2**28
BYTES_A_TOKEN = 4
"""Of most texts and tokenizers, about."""


def run(args: dict) -> None:
    """Make the store, or go on with it, and say what it holds. Raises UserError for what cannot be
    done.
    """
    out = pathlib.Path(args["out"]).expanduser()
    share = _share(args["part"]) if args["part"] is not None else None
    workers = os.cpu_count() if args["workers"] is None else args["workers"]
    shard_tokens = SHARD_TOKENS if args["shard_tokens"] is None else args["shard_tokens"]
    for name, value in (("workers", workers), ("shard-tokens", shard_tokens)):
        if value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}")
    if args["verify"] and share:
        raise UserError("--verify reads a finished store: give it without --part")
    for name in ("subset", "split"):
        if args[name] is not None and not any(source.startswith(HUB) for source in args["source"]):
            raise UserError(f"--{name} is for data sets of the Hub, {HUB}OWNER/NAME")
    _check_apart(args["source"], out)
    tokenizer = tokenizers.load(args["tokenizer"])
    most = shard_tokens * (1 if tokenizer.name == tokenizers.BYTES else BYTES_A_TOKEN)
    plan = sources.plan(
        args["source"], subset=args["subset"], split=args["split"] or "train", most=most
    )
    given = dict(tokenizer=tokenizer, source=args["tokenizer"], field=args["field"])
    made = build(plan, out=out, **given, workers=workers, share=share)
    if args["verify"]:
        Store(out).verify()
    print(_summary(made, f"{out}, part {args['part']}" if share else str(out)))


def _share(part: str) -> slice:
    """The shards of the part I/N: every N-th from the I-th on."""
    numbers = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", part)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise UserError(f"--part {part} must be I/N with I from 1 to N, such as 2/8")
    return slice(int(numbers[1]) - 1, None, int(numbers[2]))


def _summary(made: Manifest, name: str) -> str:
    counts = {
        "empty documents": sum(shard.empty for shard in made.shards),
        "files that are not text": sum(shard.skipped for shard in made.shards),
    }
    left_out = " and ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    more = f"; left out {left_out}" if left_out else ""
    return f"{name}: {made.documents:,} documents, {made.tokens:,} tokens of {made.tokenizer}{more}"


def _check_apart(given: Sequence[str], out: pathlib.Path) -> None:
    for source in given:
        real, into = pathlib.Path(source).expanduser().resolve(), out.resolve()
        if real.is_dir() and into.is_relative_to(real):
            raise UserError(
                f"--out {out} lies in the source {source!r}: it would become a source itself"
            )
        if real.exists() and real.is_relative_to(into):
            raise UserError(f"the source {source!r} lies in --out {out}: name a new folder")
