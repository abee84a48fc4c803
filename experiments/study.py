"""What studies share: how one ends and goes on, what is kept of it, and the tables of its
README.
"""

import argparse
import json
import pathlib
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from ladder_jax import files
from ladder_jax.errors import RunFailed, UserError, described, one_line


def ended(work: Callable[[], object], *, name: str) -> int:
    """The exit status of `work`, a study that the same command goes on with. Only a bug shows a
    traceback.
    """
    try:
        work()
    except (UserError, RunFailed) as error:
        print(f"{name}: {one_line(str(error))}", file=sys.stderr)
        return error.status if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:  # between two runs; within one it is a RunFailed, and saved
        print(f"{name}: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def parser(doc: str, *, name: str) -> argparse.ArgumentParser:
    """Of the arguments of `python -m experiments.NAME`, whose module says `doc`."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=f"python -m experiments.{name}", description=doc, formatter_class=form
    )


def add_overrides(to: argparse.ArgumentParser, *, of: str) -> None:
    """Settings, as `ladder-jax train` takes them, in place of a file's."""
    to.add_argument(
        "overrides", nargs="*", metavar="path.to.field=value", help=f"settings that replace {of}"
    )


# Results.


def seconds(call: Callable[[], object]) -> float:
    """What a call takes, with all that it computes on devices."""
    import jax

    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def environment() -> dict[str, str]:
    """The device and the versions that figures are of."""
    import flax
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else f"{platform.machine()} CPU",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
    }


def load(file: pathlib.Path) -> dict:
    """Results. Raises UserError where there are none, or what is there is damaged."""
    if not file.is_file():
        raise UserError(f"there is no {str(file)!r}: run the study first, without --tables")
    try:
        with files.explained(file, "read"):
            results = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{str(file)!r} is not JSON: {error}") from None
    if not isinstance(results, dict):
        raise UserError(f"{str(file)!r} must hold a study's results, not {described(results)}")
    return results


def keep(results: dict, *, file: pathlib.Path) -> None:
    write(json.dumps(results, indent=1) + "\n", file=file)


def write(text: str, *, file: pathlib.Path) -> None:
    with files.explained(file.parent, "write into"):
        file.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(
        str(file), lambda path: pathlib.Path(path).write_text(text, encoding="utf-8")
    )


def asked(file: pathlib.Path, *, found: Sequence[str]) -> list[dict]:
    """What the rows of `file` were asked, without what was found."""
    return [
        {key: value for key, value in row.items() if key not in found} for row in load(file)["rows"]
    ]


def resumed(
    asked: Sequence[dict], measure: Callable[[dict], dict], *, file: pathlib.Path, about: dict
) -> list[dict]:
    """The rows of `file`, after those of `asked` that it lacked were measured; each is kept as soon
    as it is.

    measure: from what a row is asked to what was found, which is added to it. about: what `file`
        says of all rows.
    """
    rows = load(file)["rows"] if file.is_file() else []
    for number, row in enumerate(asked, start=1):
        if any(row.items() <= done.items() for done in rows):
            continue
        print(f"[{number}/{len(asked)}] {json.dumps(row)}", flush=True)
        rows.append(row | measure(row))
        keep({**about, "rows": rows}, file=file)
    return rows


# Tables.


def spread(values: Sequence[float]) -> str:
    """Mean and, of several, the sample's standard deviation."""
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.3f}"


def difference(values: Sequence[float]) -> str:
    """Mean and, of several, the least and the greatest; of none "-"."""
    if not any(values):
        return "0" if values else "-"
    mean = f"{statistics.fmean(values):+.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):+.3f} to {max(values):+.3f})"


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Markdown. head: the columns' names, as "a | b"."""
    columns = head.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def fill(text: str, tables: dict[str, str]) -> str:
    """`text` with each table between `<!-- table: NAME -->` and `<!-- end -->` made anew."""
    for name, content in tables.items():
        block = re.compile(rf"(<!-- table: {name} -->\n).*?(\n<!-- end -->)", re.S)
        text, count = block.subn(lambda found: f"{found[1]}\n{content}\n{found[2]}", text)
        if count != 1:
            raise ValueError(f"the README has {count} places for the table {name!r}")
    return text


def show(tables: dict[str, str], *, folder: pathlib.Path) -> None:
    """Prints the tables, and puts them into `folder`/README.md if there is one."""
    print("\n\n".join(f"{name}\n\n{content}" for name, content in tables.items()))
    readme = folder / "README.md"
    if readme.is_file():
        write(fill(readme.read_text(encoding="utf-8"), tables), file=readme)
