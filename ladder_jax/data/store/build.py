"""Make a token store from text, in parallel: the verb `tokenize`. After a kill the next call
resumes.

A shard holds one part of the sources. Workers write shards in any order, so the store is the same
for any number of workers, and also for several commands, on one machine or on many: each makes a
share of the shards, and the last command, for all of them, makes what is missing and writes the
manifest.
"""

import array
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from ladder_jax import files, python
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.store import manifest as manifests, sources
from ladder_jax.data.store.manifest import MANIFEST, Manifest, Shard
from ladder_jax.data.store.reader import Store
from ladder_jax.data.store.sources import Part
from ladder_jax.data.store.tables import HUB
from ladder_jax.errors import UserError
from ladder_jax.files import PARTIAL
from ladder_jax.terminal import progress

LOCK = ".lock"
OURS = re.compile(rf"[0-9]{{5,}}\.(tokens|offsets|digests|json)|{re.escape(PARTIAL)}.*")
"""Files of shards, in this version and before; and what a kill leaves of any file."""
BYTES_A_TOKEN = 4  # of most texts and tokenizers, about


def run(args: dict) -> None:
    """Make the store, or go on with it, and say what it holds. Raises UserError for what cannot be
    done.
    """
    out = files.on_disk(args["out"])
    name = str(out)
    share = None
    if args["part"] is not None:
        share = _share(args["part"])
        name += f", part {args['part']}"
    if args["verify"] and share:
        raise UserError("--verify reads a finished store: give it without --part")
    given = args["source"]
    from_hub = any(source.startswith(HUB) for source in given)
    for option in ("subset", "split"):
        if args[option] is not None and not from_hub:
            raise UserError(f"--{option} is for data sets of the Hub, {HUB}OWNER/NAME")
    for source in given:
        if out.resolve().is_relative_to(files.local_path(source).resolve()):
            raise UserError(
                f"--out {out} lies in the source {source!r}: it would become a source itself"
            )
    tokenizer = tokenizers.load(args["tokenizer"])
    most = args["shard_tokens"]
    if tokenizer.name != tokenizers.BYTES:
        most *= BYTES_A_TOKEN
    split = args["split"] or "train"
    plan = sources.plan(given, subset=args["subset"], split=split, most=most)
    made = build(
        plan,
        out=out,
        tokenizer=tokenizer,
        source=args["tokenizer"],
        field=args["field"],
        workers=args["workers"] or _cores(),
        share=share,
    )
    if args["verify"]:
        Store(out).verify()
    summary = f"{name}: {made.documents:,} documents, {made.tokens:,} tokens of {made.tokenizer}"
    left_out = sum(shard.empty + shard.skipped for shard in made.shards)
    if left_out:
        summary += f"; left out {left_out:,} that are empty or no text"
    print(summary)


def _cores() -> int:
    """That this process may use, of which Slurm gives a task one of the machine's."""
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    return len(affinity(0)) if affinity else os.cpu_count()


def _share(part: str) -> slice:
    """The shards of the part I/N: every N-th from the I-th on."""
    number, _, parts = part.partition("/")
    numbers = number.isdecimal() and parts.isdecimal()
    if not numbers or not 1 <= int(number) <= int(parts):
        raise UserError(f"--part {part} must be I/N with I from 1 to N, such as 2/8")
    return slice(int(number) - 1, None, int(parts))


def build(
    plan: Sequence[Part],
    *,
    out: pathlib.Path,
    tokenizer: tokenizers.Tokenizer,
    source: str,
    field: str,
    workers: int,
    share: slice | None = None,
) -> Manifest:
    """Make the store, and return its manifest. A finished store is only compared with the plan.

    source: the argument of `tokenizers.load` that gives `tokenizer`, for the workers.
    share: make these shards alone, and return a manifest of them, which is not written.

    Raises UserError where `out` holds other files, or a store of other sources or settings; and
    where another process writes to it.
    """
    _check_folder(out)
    settings = Manifest(tokenizer.name, tokenizer.vocab_size, field)
    mine = share or slice(None)
    with _locked(out, shared=share is not None):
        if not (out / MANIFEST).exists():
            manifests.write(settings, out / MANIFEST)
        made = manifests.read(out / MANIFEST)
        is_begun = share is not None or any(path.name != MANIFEST for path in out.glob("*.json"))
        if not is_begun and not made.shards:  # the sources may have been a mistake
            made = settings
            manifests.write(settings, out / MANIFEST)
        if dataclasses.replace(made, shards=()) != settings:
            raise UserError(
                f"{str(out)!r} was begun with the tokenizer {made.tokenizer!r} and the field {made.field!r}:"
                " change them back, or name another --out"
            )
        if made.shards:
            if [shard.source for shard in made.shards] != [part.digest for part in plan]:
                raise UserError(
                    f"{str(out)!r} holds a finished store of other sources or another --shard-tokens,"
                    " or they have changed: name another --out"
                )
            kept = out / tokenizers.FOLDER
            # of one tokenizer.json, by the files beside it
            if kept.is_dir() and tokenizers.load(kept).stop_ids[:1] != tokenizer.stop_ids[:1]:
                raise UserError(
                    f"{str(out)!r} holds a finished store whose documents end with another token than those of"
                    f" --tokenizer {source}, or with none: name another --out"
                )
        else:
            numbered = list(enumerate(plan))[mine]
            shards = _shards(numbered, out, settings, source, workers)
            made = dataclasses.replace(settings, shards=shards)
            if share:
                return made
            if not made.tokens:
                raise UserError("the sources hold no text")
            tokenizers.save(tokenizer, out / tokenizers.FOLDER)
            manifests.write(made, out / MANIFEST)
        # what the sources were before, and the shards' own manifests
        kept = made.sizes()
        for path in list(out.iterdir()):
            if OURS.fullmatch(path.name) and path.name not in kept:
                path.unlink()
        return dataclasses.replace(made, shards=made.shards[mine])


def _check_folder(out: pathlib.Path) -> None:
    """Raises UserError unless `out` is new, empty but for what a kill leaves at first, or a store.
    All other files in a store may be the user's.
    """
    if (out / MANIFEST).is_file():
        manifests.read(out / MANIFEST)
    elif os.path.lexists(out):
        names = os.listdir(out) if out.is_dir() else [""]
        # another command may have written the manifest just now
        if not all(name in (LOCK, MANIFEST) or name.startswith(PARTIAL) for name in names):
            raise UserError(f"--out {out}: something else is there; name a new folder")


@contextlib.contextmanager
def _locked(out: pathlib.Path, *, shared: bool) -> Iterator[None]:
    """Hold the folder's lock. Raises UserError where another process holds it, or the folder cannot
    be written to.
    """
    with files.explained(out, "write into", kind=UserError):
        out.mkdir(parents=True, exist_ok=True)
        busy = f"another `ladder-jax tokenize` is at work in {str(out)!r}"
        with files.locked(out / LOCK, busy=busy, shared=shared):
            yield


def _shards(
    numbered: Sequence[tuple[int, Part]],
    out: pathlib.Path,
    settings: Manifest,
    source: str,
    workers: int,
) -> tuple[Shard, ...]:
    """The shards of these parts, in order. Those that an earlier call wrote are not written
    again.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy locked threads
    shown = progress(len(numbered), label="{done}/{total} shards")
    with shown as update, contextlib.ExitStack() as stack:
        try:
            with python.starting():
                theirs, ours = context.Pipe(duplex=False)
                with files.explained("/dev/shm", "make semaphores in", kind=UserError):
                    pool = concurrent.futures.ProcessPoolExecutor(
                        workers, mp_context=context, initializer=_begin_worker, initargs=(theirs,)
                    )
                stack.callback(pool.shutdown, cancel_futures=True)
                stack.callback(ours.close)  # which ends workers, as a shard may take an hour
                futures = [pool.submit(_shard, *one, out, settings, source) for one in numbered]
            for done, made in enumerate(concurrent.futures.as_completed(futures), start=1):
                made.result()
                update(done, "")
        except BrokenProcessPool:
            message = (
                "a worker was killed, perhaps for its memory: run the same command again to go on"
            )
            raise UserError(message) from None
    return tuple(made.result() for made in futures)


def _shard(index: int, part: Part, out: pathlib.Path, settings: Manifest, source: str) -> Shard:
    """In a worker: the shard of a part, which an earlier call may have written."""
    name = f"{index:05d}"
    about = (name, part, out, settings, source)
    return _written(*about) or _write(*about)


def _written(
    name: str, part: Part, out: pathlib.Path, settings: Manifest, source: str
) -> Shard | None:
    """The shard that an earlier call wrote; None where its files are missing or cut short, or the
    part has changed, or documents end with another token now.
    """
    file = out / f"{name}.json"
    if not file.is_file():
        return None
    found = manifests.read(file)
    (shard,) = found.shards
    expected = dataclasses.replace(shard, source=part.digest)
    if found != dataclasses.replace(settings, shards=(expected,)):
        return None
    for path, size in found.sizes().items():
        if not (out / path).is_file() or (out / path).stat().st_size != size:
            return None
    ends = _tokenizer(source).stop_ids[:1]
    if ends and shard.tokens:
        before = (shard.tokens - 1) * np.dtype(settings.dtype).itemsize
        if np.fromfile(out / f"{name}.tokens", settings.dtype, offset=before)[0] != ends[0]:
            return None
    return shard


def _write(name: str, part: Part, out: pathlib.Path, settings: Manifest, source: str) -> Shard:
    """Killed at any moment, it leaves nothing that counts."""
    tokenizer = _tokenizer(source)
    offsets = array.array("Q", [0])
    left_out = collections.Counter()
    digest = hashlib.sha256()

    def documents() -> Iterator[bytes]:
        for text in sources.read(part, field=settings.field):
            if text is None:
                left_out["skipped"] += 1
                continue
            tokens = encode(text, tokenizer)
            count = len(tokens)
            if not count:
                left_out["empty"] += 1
                continue
            offsets.append(offsets[-1] + count)
            content = tokens.astype(settings.dtype).tobytes()
            digest.update(content)
            yield content

    files.write(out / f"{name}.tokens", documents(), sync=True)
    content = np.array(offsets, "<u8").tobytes()
    digest.update(content)
    files.write(out / f"{name}.offsets", [content], sync=True)
    shard = Shard(
        name,
        tokens=offsets[-1],
        documents=len(offsets) - 1,
        sha256=digest.hexdigest(),
        source=part.digest,
        **left_out,
    )
    made = dataclasses.replace(settings, shards=(shard,))
    manifests.write(made, out / f"{name}.json")
    return shard


def encode(text: str, tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """A document's tokens: its text's, and the token that ends a document, where the tokenizer has
    one.
    """
    if tokenizer.name == tokenizers.BYTES:
        return np.frombuffer(text.encode("utf-8"), np.uint8)
    tokens = tokenizer.encode(text) if text else []
    ends = tokenizer.stop_ids[:1]
    if tokens and ends and tokens[-1] != ends[0]:
        tokens = [*tokens, *ends]
    return np.array(tokens, np.uint32)


_tokenizer = functools.cache(tokenizers.load)


def _begin_worker(parent: multiprocessing.connection.Connection) -> None:
    """Ends the worker where its parent closes the other end, or is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

    def watch():
        multiprocessing.connection.wait([parent])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
