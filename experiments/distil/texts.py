"""Real text in three parts that share no block: to pretrain on, to retrain and calibrate on, and to score."""

import dataclasses
import json
import pathlib
import random
import sysconfig
from collections.abc import Iterable

from ladder_jax import files
from ladder_jax.config import RunConfig
from ladder_jax.errors import UserError

BLOCK = 4096  # bytes, up to the next end of a line
OTHERS = 0.3  # the share of the texts that are not Python source, where they suffice
PRETRAIN, RETRAIN, RECORD = "pretrain.txt", "retrain.txt", "texts.json"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Two files, both with the same held-out text at their end; held_out: that share of each."""

    pretrain: pathlib.Path
    retrain: pathlib.Path
    held_out: dict[str, float]

    def settings(self, file: pathlib.Path) -> list[str]:
        """Of a run on `file`: overrides of its configuration."""
        return [f"data.path={file}", f"data.validation_fraction={self.held_out[file.name]!r}"]


def prepare(config: RunConfig, *, texts: list[str], python: str | None, share: float, folder: pathlib.Path) -> Corpus:
    """The corpus in `folder`, made if it is not there: as many bytes as `config` pretrains on, once, and `share` of
    that to retrain on. The same texts give the same corpus.

    Raises UserError for texts that cannot be read or do not suffice, and where the folder has another corpus.
    """
    train = config.train
    row = train.batch * train.sequence
    sizes = {"pretrain": train.steps * row + 1, "retrain": int(train.steps * row * share) + 1}
    sizes["held out"] = train.evaluation_batches * row + 1
    of = [pathlib.Path(text).name for text in texts] + [pathlib.Path(python or "the standard library").name]
    asked, record = {"texts": of, "bytes": sizes}, folder / RECORD
    if record.is_file():
        before = json.loads(record.read_text())
        if before["asked"] != asked:
            raise UserError(
                f"{str(folder)!r} was made from other texts or of another size: choose another --runs folder"
            )
        return Corpus(folder / PRETRAIN, folder / RETRAIN, before["held_out"])
    parts = _parts(sizes, texts=texts, python=python)
    folder.mkdir(parents=True, exist_ok=True)
    held_out = {}
    for name, part in ((PRETRAIN, parts["pretrain"]), (RETRAIN, parts["retrain"])):
        whole = part + parts["held out"]
        held_out[name] = (len(parts["held out"]) + 0.5) / len(whole)  # half a byte against rounding
        files.write_atomically(str(folder / name), lambda path, whole=whole: pathlib.Path(path).write_bytes(whole))
    content = json.dumps({"asked": asked, "held_out": held_out}, indent=1) + "\n"
    files.write_atomically(str(record), lambda path: pathlib.Path(path).write_text(content))
    return Corpus(folder / PRETRAIN, folder / RETRAIN, held_out)


def _parts(sizes: dict[str, int], *, texts: list[str], python: str | None) -> dict[str, bytes]:
    chance, needed = random.Random(0), sum(sizes.values()) + (BLOCK + 1000) * len(sizes)
    others = [block for text in texts for block in _blocks(_read(text))]
    source = [block for text in _python(python) for block in _blocks(text)]
    for blocks in (others, source):
        chance.shuffle(blocks)
    chosen = _first(others, int(OTHERS * needed))
    chosen += _first(source, needed - sum(map(len, chosen)))
    if (found := sum(map(len, chosen))) < needed - BLOCK * len(sizes):
        raise UserError(f"the texts have {found:,} bytes; {needed:,} are needed: name more by --text or --python")
    chance.shuffle(chosen)
    left, parts = iter(chosen), {}
    for name, size in sizes.items():
        parts[name] = b"".join(_first(left, size))
        if len(parts[name]) < size:
            raise UserError(f"the texts suffice for {len(parts[name]):,} of the {size:,} bytes of the part {name!r}")
    return parts


def _first(blocks: Iterable[bytes], size: int) -> list[bytes]:
    """As many of the first blocks as make `size` bytes, or all."""
    taken, total = [], 0
    if size <= 0:
        return taken
    for block in blocks:
        taken.append(block)
        total += len(block)
        if total >= size:
            break
    return taken


def _blocks(text: str) -> list[bytes]:
    blocks, block = [], bytearray()
    for line in text.splitlines(keepends=True):
        block += line.encode("utf-8")
        if len(block) >= BLOCK:
            blocks.append(bytes(block))
            block.clear()
    return [*blocks, bytes(block)] if block else blocks


def _read(path: str) -> str:
    """A text file; of JSON lines (.jsonl) the values of each line, a line each."""
    try:
        text = pathlib.Path(path).expanduser().read_text(encoding="utf-8")
        if not path.endswith(".jsonl"):
            return text
        return "\n\n".join("\n".join(map(str, json.loads(line).values())) for line in text.splitlines() if line.strip())
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"cannot read --text {path!r}: {getattr(error, 'strerror', None) or error}") from None


def _python(folder: str | None) -> list[str]:
    """The Python files below a folder, tests included, packages that are installed there not."""
    root, found = pathlib.Path(folder or sysconfig.get_path("stdlib")).expanduser(), []
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                found.append(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError):  # some tests of the standard library are not text
                continue
    return found
