"""Make a token store from files of text: in parallel, and whatever kills it, the next call goes on.

Workers write parts, in any order, into `parts/`. Parts are joined to shards in the order of the sources, so
the store is the same for any number of workers. A shard counts once the journal names it.
"""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool

from ladder_jax import python
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.store import manifest as manifests
from ladder_jax.data.store import part as parts
from ladder_jax.data.store import portion as portion_of
from ladder_jax.data.store import resume
from ladder_jax.data.store.manifest import JOURNAL, MANIFEST, Manifest
from ladder_jax.data.store.part import Done, Worker
from ladder_jax.data.store.portion import Portion
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

    Raises UserError where `out` holds something else, or a store of other sources or settings, or is at work; and where
    it holds portions, but not all.
    """
    wanted = Manifest.of(tokenizer, field=field, shard_tokens=shard_tokens)
    resume.check_folder(out, plan)
    with resume.locked(out):
        if (out / MANIFEST).exists():
            found = resume.compare(out, wanted, plan)
            if (out / JOURNAL).exists():  # a kill came between the manifest and the end
                resume.tidy(out, found.shards)
            return found
        portions = portion_of.joinable(out, wanted, plan)
        folder_of = _finder(portions, plan, out / PARTS, wanted.dtype)
        shards = resume.still_valid(resume.journal(out, wanted), plan)
        (out / PARTS).mkdir(exist_ok=True)
        tokenizers.save(tokenizer, out / tokenizers.FOLDER)
        left = list(plan[sum(len(shard.parts) for shard in shards) :])
        advance(sum(part.size for part in plan) - sum(part.size for part in left))
        with contextlib.ExitStack() as stack:
            for folder in portions:
                stack.enter_context(resume.locked(folder))
            submit = stack.enter_context(_pool(workers, out / PARTS, source, wanted))
            counted = _counted(left, submit, folder_of, wanted, advance)
            for group, counts in _groups(counted, shard_tokens):
                shards.append(join(group, counts, folder_of=folder_of, index=len(shards), out=out))
                manifests.write(dataclasses.replace(wanted, shards=tuple(shards)), out / JOURNAL)
                for part in group:
                    parts.remove(part, folder=folder_of(part))
        finished = dataclasses.replace(wanted, shards=tuple(shards))
        if not finished.tokens:
            raise UserError("the sources hold no text")
        manifests.write(finished, out / MANIFEST)
        resume.tidy(out, shards)
        return finished


def build_portion(
    portion: Portion,
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
    """The manifest of a portion of the store, finished in its own folder in `out`. See `build`, which joins them."""
    wanted = Manifest.of(tokenizer, field=field, shard_tokens=shard_tokens)
    resume.check_folder(out, plan)
    portion_of.check_separate(out)
    folder, mine = out / portion.name, portion.of(plan)
    resume.check_folder(folder, plan)
    with resume.locked(folder):
        resume.journal(folder, wanted)
        with _pool(workers, folder, source, wanted) as submit:
            counts = [done for _, done in _counted(mine, submit, lambda part: folder, wanted, advance)]
        resume.remove_parts(folder, keep=mine)
        return portion_of.finish(folder, wanted, mine, counts)


def _finder(portions: Sequence[pathlib.Path], plan: Sequence[Part], own: pathlib.Path, dtype: str) -> Callable:
    """Gives the folder of a part's tokens: its portion's, or `own` where the store is not made in portions or a power
    failure has damaged the portion's."""
    folders = {part: portions[index % len(portions)] for index, part in enumerate(plan)} if portions else {}

    def folder_of(part: Part) -> pathlib.Path:
        folder = folders.get(part)
        return folder if folder and parts.find(part, folder=folder, dtype=dtype) else own

    return folder_of


def _counted(left, submit, folder_of, wanted, advance) -> Iterator[tuple[Part, Done]]:
    """Each part in order, once its tokens are in its folder."""
    waiting = {}
    for part in left:
        waiting[part] = parts.find(part, folder=folder_of(part), dtype=wanted.dtype) or submit(part)
        if isinstance(waiting[part], concurrent.futures.Future):
            waiting[part].add_done_callback(lambda future, size=part.size: _succeeded(future) and advance(size))
        else:
            advance(part.size)
    for part in left:
        found = waiting.pop(part)
        yield part, found if isinstance(found, Done) else found.result()


def _groups(counted: Iterable[tuple[Part, Done]], shard_tokens: int) -> Iterator[tuple[list[Part], list[Done]]]:
    """The parts of each shard, as soon as all of them are there."""
    group, counts = [], []
    for part, done in counted:
        if group and sum(one.tokens for one in counts) + done.tokens > shard_tokens:
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
