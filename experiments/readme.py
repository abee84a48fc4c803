"""The tables of a README, made anew from results."""

import pathlib
import re


def fill(text: str, tables: dict[str, str]) -> str:
    """`text` with each table between `<!-- table: NAME -->` and `<!-- end -->` made anew."""
    for name, table in tables.items():
        block = re.compile(rf"(<!-- table: {name} -->\n).*?(\n<!-- end -->)", re.S)
        text, count = block.subn(lambda found: f"{found[1]}\n{table}\n{found[2]}", text)
        if count != 1:
            raise ValueError(f"the README has {count} places for the table {name!r}")
    return text


def write(folder: pathlib.Path, tables: dict[str, str]) -> None:
    """`folder`/README.md, filled."""
    file = folder / "README.md"
    file.write_text(fill(file.read_text(), tables))
