"""Make a token store from files of text: in parallel, and whatever kills it, the next call goes on.

Workers write parts, in any order, into `parts/`. Parts are joined to shards in the order of the sources, so
the store is the same for any number of workers. A shard counts once the journal names it.
"""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool

from ladder_jax import python
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.store import manifest as manifests
from ladder_jax.data.store import part as parts
from ladder_jax.data.store import resume
from ladder_jax.data.store.manifest import JOURNAL, MANIFEST, Manifest
from ladder_jax.data.store.part import Done, Worker
from ladder_jax.data.store.shard import PARTS, join
from ladder_jax.data.store.sources import Part
from ladder_jax.errors import UserError


def build(
    plan: Sequence[Part],
    *,
    out: pathlib.Path,
    tokenizer: tokenizers.Tokenizer,
    source: str,
    field: str,
    shard_tokens: int,
    workers: int,
    advance: Callable[[int], None] = lambda size: None,
) -> Manifest:
    """The finished store's manifest; a store that is finished already is only compared.

    source: what `tokenizers.load` makes `tokenizer` of, in the workers.
    shard_tokens: a shard ends before the part with which it would have more.
    advance: told the bytes of the sources as they are done.

    Raises UserError where `out` holds something else, or a store of other sources or settings, or is at work.
    """
    wanted = Manifest(
        tokenizer.name, tokenizer.vocab_size, manifests.dtype_for(tokenizer.vocab_size), field, shard_tokens
    )
    resume.check_folder(out, plan)
    with resume.locked(out):
        if (out / MANIFEST).exists():
            return resume.compare(out, wanted, plan)
        shards = resume.still_valid(resume.journal(out, wanted), plan)
        (out / PARTS).mkdir(exist_ok=True)
        tokenizers.save(tokenizer, out / tokenizers.FOLDER)
        left = list(plan[sum(len(shard.parts) for shard in shards) :])
        advance(sum(part.size for part in plan) - sum(part.size for part in left))
        with _pool(workers, out / PARTS, source, wanted) as submit:
            for group, counts in _groups(left, submit, out / PARTS, wanted, advance):
                shards.append(join(group, counts, index=len(shards), out=out))
                manifests.write(dataclasses.replace(wanted, shards=tuple(shards)), out / JOURNAL)
                for part in group:
                    parts.remove(part, folder=out / PARTS)
        finished = dataclasses.replace(wanted, shards=tuple(shards))
        if not finished.tokens:
            raise UserError("the sources hold no text")
        manifests.write(finished, out / MANIFEST)
        resume.tidy(out, shards)
        return finished


def _groups(left, submit, folder, wanted, advance) -> Iterator[tuple[list[Part], list[Done]]]:
    """The parts of each shard, as soon as all of them are there."""
    waiting = {}
    for part in left:
        waiting[part] = parts.find(part, folder=folder, dtype=wanted.dtype) or submit(part)
        if isinstance(waiting[part], concurrent.futures.Future):
            waiting[part].add_done_callback(lambda future, size=part.size: _succeeded(future) and advance(size))
        else:
            advance(part.size)
    group, counts = [], []
    for part in left:
        found = waiting.pop(part)
        done = found if isinstance(found, Done) else found.result()
        if group and sum(one.tokens for one in counts) + done.tokens > wanted.shard_tokens:
            yield group, counts
            group, counts = [], []
        group.append(part)
        counts.append(done)
    if group:
        yield group, counts


def _succeeded(future: concurrent.futures.Future) -> bool:
    return not future.cancelled() and future.exception() is None


@contextlib.contextmanager
def _pool(workers: int, folder: pathlib.Path, source: str, wanted: Manifest) -> Iterator[Callable]:
    """Gives `submit(part)`. Processes are started as they are needed, afresh and not by a fork of threads."""
    with python.safe_path():
        pool = concurrent.futures.ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=Worker.start,
            initargs=(folder, source, wanted.dtype, wanted.field),
        )
        try:
            yield lambda part: pool.submit(Worker.run, part)
        except BrokenProcessPool:
            message = "a worker was killed, perhaps for its memory: run the same command again to go on"
            raise UserError(message) from None
        finally:
            pool.shutdown(cancel_futures=True)
