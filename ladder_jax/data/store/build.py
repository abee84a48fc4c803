"""Make a token store from text, in parallel. After a kill the next call resumes.

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
    """Make the store, or join its portions, and return the manifest. A finished store is only compared with the plan.

    source: the argument of `tokenizers.load` that gives `tokenizer`, for the workers.
    shard_tokens: a shard ends before the part with which it would have more.
    advance: called with the bytes of each part when its tokens are written.

    Raises UserError where `out` holds other files, or a store of other sources or settings; where another process
    writes to it; and where portions are missing.
    """
    settings = Manifest.of(tokenizer, field=field, shard_tokens=shard_tokens)
    resume.check_folder(out, plan)
    with resume.locked(out):
        if (out / MANIFEST).exists():
            finished = resume.compare(out, settings, plan)
            if (out / JOURNAL).exists():  # killed after the manifest was written, before temporary files were removed
                resume.tidy(out, finished.shards)
            return finished
        portions = portion_of.folders(out, settings, plan)
        folder_of = _folder_of(portions, plan, out / PARTS, settings.dtype)
        shards = resume.still_valid(resume.journal(out, settings), plan)
        (out / PARTS).mkdir(exist_ok=True)
        tokenizers.save(tokenizer, out / tokenizers.FOLDER)
        left = list(plan[sum(len(shard.parts) for shard in shards) :])
        advance(sum(part.size for part in plan) - sum(part.size for part in left))
        with contextlib.ExitStack() as stack:
            for folder in portions:
                stack.enter_context(resume.locked(folder))
            submit = stack.enter_context(_pool(workers, out / PARTS, source, settings))
            counted = _counted(left, submit, folder_of, settings, advance)
            for group, counts in _groups(counted, shard_tokens):
                shards.append(join(group, counts, folder_of=folder_of, index=len(shards), out=out))
                manifests.write(dataclasses.replace(settings, shards=tuple(shards)), out / JOURNAL)
                for part in group:
                    parts.remove(part, folder=folder_of(part))
        finished = dataclasses.replace(settings, shards=tuple(shards))
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
    """Write a portion of the store into its own folder in `out`, and return its manifest. `build` joins portions.

    The arguments and errors are those of `build`.
    """
    settings = Manifest.of(tokenizer, field=field, shard_tokens=shard_tokens)
    resume.check_folder(out, plan)
    portion_of.check_no_store(out)
    folder, mine = out / portion.name, portion.of(plan)
    resume.check_folder(folder, plan)
    with resume.locked(folder):
        resume.journal(folder, settings)
        with _pool(workers, folder, source, settings) as submit:
            counts = [done for _, done in _counted(mine, submit, lambda part: folder, settings, advance)]
        resume.remove_parts(folder, keep=mine)
        return portion_of.finish(folder, settings, mine, counts)


def _folder_of(
    portions: Sequence[pathlib.Path], plan: Sequence[Part], own: pathlib.Path, dtype: str
) -> Callable[[Part], pathlib.Path]:
    """A function from a part to the folder of its tokens: the portion's folder if its files are whole, else `own`, into
    which the part is then written again."""
    folders = {part: portions[index % len(portions)] for index, part in enumerate(plan)} if portions else {}

    def folder_of(part: Part) -> pathlib.Path:
        folder = folders.get(part)
        return folder if folder and parts.find(part, folder=folder, dtype=dtype) else own

    return folder_of


def _counted(left, submit, folder_of, settings, advance) -> Iterator[tuple[Part, Done]]:
    """Yield each part with its counts, in order, once its tokens are written."""
    waiting = {}
    for part in left:
        waiting[part] = parts.find(part, folder=folder_of(part), dtype=settings.dtype) or submit(part)
        if isinstance(waiting[part], concurrent.futures.Future):
            waiting[part].add_done_callback(lambda future, size=part.size: _succeeded(future) and advance(size))
        else:
            advance(part.size)
    for part in left:
        counts = waiting.pop(part)
        yield part, counts if isinstance(counts, Done) else counts.result()


def _groups(counted: Iterable[tuple[Part, Done]], shard_tokens: int) -> Iterator[tuple[list[Part], list[Done]]]:
    """Yield the parts of each shard, as soon as all of them are written."""
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
def _pool(workers: int, folder: pathlib.Path, source: str, settings: Manifest) -> Iterator[Callable]:
    """Yield `submit(part)`. Processes are spawned when they are needed, because a fork would copy locked threads."""
    with python.safe_path():
        pool = concurrent.futures.ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=Worker.start,
            initargs=(folder, source, settings.dtype, settings.field),
        )
        try:
            yield lambda part: pool.submit(Worker.run, part)
        except BrokenProcessPool:
            message = "a worker was killed, perhaps for its memory: run the same command again to go on"
            raise UserError(message) from None
        finally:
            pool.shutdown(cancel_futures=True)
