"""Documents that are rows of a table: Parquet, CSV, Arrow and WebDataset files, and data sets of
the Hub.

The library `datasets` reads them, streaming: nothing is converted or copied to the disk first. A
table is one shard or more, which can be read apart: a Parquet file's row groups, a Hub data set's
files; other files are one shard.
"""

import contextlib
import functools
import glob
import re
import tempfile
import urllib.parse
import warnings
from collections.abc import Iterable, Iterator

from ladder_jax.errors import UserError, needed, refused

HUB = "hf://datasets/"
BATCH = 1024  # rows
BUILDERS = {
    ".parquet": dict(path="parquet"),
    ".csv": dict(path="csv", sep=","),
    ".tsv": dict(path="csv", sep="\t"),
    ".arrow": dict(path="arrow"),
    ".tar": dict(path="webdataset"),
}
"""Arguments of `datasets.load_dataset_builder` by a file's ending."""


def address(source: str, *, subset: str | None, split: str) -> str:
    """Resolve hf://datasets/OWNER/NAME or hf://datasets/OWNER/NAME@REVISION to the present commit,
    so that all workers read the same files. Raises UserError where the Hub has no such data set, or
    does not answer.
    """
    given = re.fullmatch(r"([^/@?]+/[^/@?]+)(?:@([^?]+))?", source.removeprefix(HUB))
    if not given:
        raise UserError(
            f"{source!r}: a data set of the Hub is {HUB}OWNER/NAME or {HUB}OWNER/NAME@REVISION"
        )
    name, revision = given.groups()
    with refused(f"{source}: cannot be read"):
        import huggingface_hub

        found = huggingface_hub.HfApi().dataset_info(name, revision=revision)
    query = {"split": split}
    if subset:
        query["subset"] = subset
    return f"{HUB}{name}@{found.sha}?{urllib.parse.urlencode(query)}"


def shards(table: str) -> int:
    """The number of a table's shards. Raises UserError where it cannot be read."""
    with refused(f"{table}: cannot be read"):
        return _open(table).num_shards


def read(table: str, begin: int, end: int, *, field: str, modified: int) -> Iterator[str]:
    """The texts of the shards begin..end-1, in order. Raises UserError for rows without text in
    `field`.

    modified: the file's time; a table that this process has opened before is opened again when it
        has changed.
    """
    with refused(f"{table}: cannot be read"):
        with _whole_rows():
            whole = _column(table, field, modified)
        count = whole.num_shards
        for shard in range(begin, end):
            number = 0
            batches = whole.shard(count, shard).with_format("arrow").iter(BATCH)
            while True:
                with _whole_rows():  # of a batch: the caller's warnings are its own
                    batch = next(batches, None)
                if batch is None:
                    break
                for text in batch[field].to_pylist():
                    number += 1
                    if text is None:
                        raise UserError(
                            f"{table}: row {number} of shard {shard + 1} has no text in {field!r}"
                        )
                    yield text


@contextlib.contextmanager
def _whole_rows() -> Iterator[None]:
    """Of a CSV file whose rows are longer than its header, the rest would be lost."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Length of header or names does not match")
        yield


@functools.lru_cache(maxsize=8)
def _column(table: str, field: str, modified: int):
    """The column `field` alone. Raises UserError where there is no such column, or it does not hold
    text.
    """
    library = _library()
    text = library.Value("string")
    whole = _open(table)
    # A CSV file has no schema: pandas would guess one, and read "001" as a number.
    features = whole.features
    if not features:
        features = dict.fromkeys(_header(table, whole), text)
    if field not in features:
        names = ", ".join(map(repr, features))
        raise UserError(f"{table}: no column {field!r} (--field names it): there is {names}")
    feature = features[field]
    kind = getattr(feature, "dtype", feature)
    if kind not in ("string", "large_string", "string_view"):
        raise UserError(f"{table}: the column {field!r} holds {kind}, not text")
    if whole.features is None:
        features = library.Features({field: text})
        return _open(table, features=features)
    return _open(table, columns=[field]).select_columns([field])


def _header(table: str, whole) -> Iterable[str]:
    """The names of a CSV file's columns."""
    if table.startswith(HUB):
        return next(iter(whole))
    import pandas

    return pandas.read_csv(table, nrows=0, sep=_builder(table)["sep"])


def _builder(file: str) -> dict:
    return next(made for ending, made in BUILDERS.items() if file.lower().endswith(ending))


def _open(table: str, *, features=None, columns: list[str] | None = None):
    """An IterableDataset over the table's shards.

    features: the schema, for a format that has none. columns: the columns to read, in formats that
        can skip others.
    """
    on_hub = table.startswith(HUB)
    if on_hub:
        parts = urllib.parse.urlsplit(table.removeprefix(HUB))
        query = dict(urllib.parse.parse_qsl(parts.query))
        name, _, commit = parts.path.partition("@")
        # By its name alone `datasets` would take a local folder, if there is one.
        where = dict(path=HUB + name, name=query.get("subset"), revision=commit)
        split = query["split"]
    else:
        split = "train"
        # A path with brackets would be a pattern, which matches nothing.
        where = dict(data_files=glob.escape(table), **_builder(table))
    with tempfile.TemporaryDirectory() as cache:  # else a lock file stays in the user's cache
        builder = _library().load_dataset_builder(cache_dir=cache, features=features, **where)
        # pandas would read the texts "null" and "NA" as missing, and the first column of rows that are
        # longer than the header as their names
        options = dict(columns=columns, batch_size=BATCH, keep_default_na=False, index_col=False)
        for name, value in options.items():
            if hasattr(builder.config, name):
                setattr(builder.config, name, value)
        rows = builder.as_streaming_dataset(split=split)
    if on_hub:
        # Reading the row groups of all Parquet files would take a request a file.
        return rows
    return rows.reshard()


def _library():
    with needed(f"reading {', '.join(BUILDERS)} and {HUB} needs datasets", extra="data"):
        import datasets
    # errors are reported once, by `refused`
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets
