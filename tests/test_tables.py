"""Documents from tables: Parquet, CSV, Arrow, WebDataset and the Hub, read by `datasets`; nothing
is left elsewhere.
"""

import io
import json
import tarfile
from importlib.util import find_spec

import pytest

from ladder_jax.data.store import sources
from tests import hub
from tests.refusals import refused
from tests.test_tokens import make, texts_in

pytestmark = pytest.mark.skipif(
    find_spec("datasets") is None,
    reason="datasets is not installed: pip install 'ladder-jax[data]'",
)

TEXTS = ["001", "null", 'a, "quoted"\nsecond line é', "NA", "1.50"]


def texts(path, *, field="text", **how):
    return [
        text
        for part in sources.plan([str(path)], **how)
        for text in sources.read(part, field=field)
    ]


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_csv(tmp_path, ending):
    """Digits stay digits, and "null" is a word; a folder's name may have brackets."""
    import csv

    folder = tmp_path / "a[b]*c"
    folder.mkdir()
    path = folder / f"a{ending}"
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, delimiter="\t" if ending == ".tsv" else ",")
        rows.writerows([["id", "text"], *enumerate(TEXTS), ["9", ""]])
    assert texts(path) == [*TEXTS, ""]
    assert texts(path, field="id") == ["0", "1", "2", "3", "4", "9"]
    made = make([folder], tmp_path / "out")
    assert texts_in(tmp_path / "out") == TEXTS
    assert made.shards[0].empty == 1


def test_arrow(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"n": range(5), "text": TEXTS}).save_to_disk(str(tmp_path / "a"))
    (file,) = (tmp_path / "a").glob("*.arrow")
    assert texts(file) == TEXTS


def test_webdataset(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for index, text in enumerate(TEXTS):
            for ending, content in ((".txt", text.encode()), (".json", b'{"n": 1}')):
                entry = tarfile.TarInfo(f"{index:03d}{ending}")
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
    assert texts(path, field="txt") == TEXTS
    with refused("no column 'text' .*: there is 'txt', 'json'"):
        texts(path)
    with refused("the column 'json' holds .*, not text"):
        texts(path, field="json")


BROKEN = {
    "a.csv": (b"id,text\n1,a\n1,2,3,4\n", "cannot be read: .*Expected 2 fields in line 3"),
    "a2.csv": (b"text\na, b\n", "cannot be read: Length of header .* not match length of data"),
    "b.csv": (b"id,text\n1,caf\xe9\n", "cannot be read: .*utf-8"),
    "c.csv": (b"", "cannot be read: No columns to parse"),
    "d.csv": (b"id,body\n1,a\n", "no column 'text' .*: there is 'id', 'body'"),
    "e.tar": (b"no" * 1000, "cannot be read"),
    "f.arrow": (b"ARROW1 nothing", "cannot be read"),
    "g.parquet": (b"PAR1", "cannot be read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_table(tmp_path, name):
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with refused(f"{name}: {message}"):
        texts(tmp_path / name)


def test_damage_in_the_middle(tmp_path):
    """Named by its row, as is a row without text, wherever the part begins."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    rows = [f"{index:08d}" * 200 for index in range(40)]
    parquet.write_table(pyarrow.table({"text": [*rows, None]}), path, row_group_size=10)
    plan = sources.plan([str(path)], most=1)
    assert [(part.begin, part.end) for part in plan] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    with refused("a.parquet: row 1 of shard 5 has no text in 'text'"):
        list(sources.read(plan[-1], field="text"))
    content = bytearray(path.read_bytes())
    middle = content.index(b"\x00" * 3, len(content) // 3)
    content[middle : middle + 600] = b"\xff" * 600
    path.write_bytes(content)
    with refused("a.parquet: cannot be read"):
        texts(path)


@pytest.fixture
def pages(tmp_path):
    """A data set of two splits, in files, and one of CSV."""
    import datasets

    folder = tmp_path / "pages"
    for name, index in (("train", 0), ("train", 1), ("train", 2), ("test", 0)):
        rows = datasets.Dataset.from_dict({"text": [f"{name} {index} {row}" for row in range(4)]})
        rows.to_parquet(folder / "data" / f"{name}-{index:05d}.parquet")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv/train.csv").write_text("id,text\n1,001\n2,null\n")
    return folder


READ = """
import json, sys
from ladder_jax.data.store import sources
from ladder_jax.errors import UserError

def read(source, **how):
    try:
        plan = sources.plan([source], **how)
        assert [part.digest for part in plan] == [part.digest for part in sources.plan([source], **how)]
        return [list(sources.read(part, field="text")) for part in plan]
    except UserError as error:
        return str(error)

print(json.dumps([read(source, **how) for source, how in json.loads(sys.argv[1])]))
"""


def test_the_hub(pages, tmp_path, run_python):
    """Streamed in order; in the user's folders only the Hub client's notes of small files are
    left.
    """
    home = tmp_path / "home"
    where = "hf://datasets/someone/pages"
    home.mkdir()
    # of its name, below what will be the current folder: not what is meant
    local = tmp_path / "someone/pages"
    local.mkdir(parents=True)
    for name in ("train.csv", "pages.py"):
        (local / name).write_text("text\nnot the Hub's\n")
    with (
        hub.served(pages) as (url, asked),
        hub.served(tmp_path / "csv", name="someone/csv") as (other, _),
    ):
        there = dict(
            HOME=str(home),
            HF_HUB_OFFLINE="0",
            HF_HOME=str(home / "hf"),
            HF_HUB_DISABLE_TELEMETRY="1",
        )

        def read(*ask, url=url):
            how = dict(there, HF_ENDPOINT=url, cwd=tmp_path, check_status=0)
            return json.loads(run_python("-c", READ, json.dumps(ask), **how).stdout)

        train = [[f"train {index} {row}" for row in range(4)] for index in range(3)]
        found = read(
            (f"{where}@main", {}),
            (where, {"split": "test"}),
            (where, {"split": "tset"}),
            (where, {"subset": "en"}),
            ("hf://datasets/someone/nothing", {}),
            ("hf://datasets/pages", {}),
        )
        assert found[:2] == [train, [[f"test 0 {row}" for row in range(4)]]]
        for error, message in zip(found[2:], (
            "Bad split: tset. Available splits: ['train', 'test']",
            "BuilderConfig 'en' not found. Available: ['default']",
            "Repository Not Found",
            "a data set of the Hub is hf://datasets/OWNER/NAME or",
        )):  # fmt: skip
            assert message in error
            assert "\n" not in error
        assert read(("hf://datasets/someone/csv", {}), url=other) == [[["001", "null"]]]
    assert any(hub.COMMIT in one for one in asked)
    assert not any(path.suffix in (".parquet", ".arrow", ".csv") for path in home.rglob("*"))
    assert sum(path.stat().st_size for path in home.rglob("*") if path.is_file()) < 1000
    (nothing,) = read((where, {}), url="http://127.0.0.1:9")
    assert nothing.startswith(f"{where}: cannot be read: ")


def test_nothing_is_left_behind(run_cli, tmp_path):
    """No cache and no lock, at home or in the system's temporary folder."""
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    here = dict(
        HOME=str(tmp_path / "home"),
        TMPDIR=str(tmp_path / "temporary"),
        HF_HOME=str(tmp_path / "home/hf"),
    )
    run_cli(
        "tokenize", "a.csv", "--out", "out", "--workers", "1", cwd=tmp_path, check_status=0, **here
    )
    assert texts_in(tmp_path / "out") == ["one", "two"]
    assert not list((tmp_path / "home").rglob("*"))
    assert not list((tmp_path / "temporary").rglob("*"))
