"""This project's docstrings as reStructuredText.

They are written to be read in the source: plain paragraphs, `code` in single backticks, indented
blocks for code and tables, and lines such as "rows: how many" for fields and arguments.
"""

import re

FIELD = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")
CODE = re.compile(r"^ *(from |import |with |for |if |>>>|[\w.]+ = |[\w.]+\()", re.M)


def process(app, what, name, obj, options, lines):
    """The event of sphinx.ext.autodoc: changes `lines` in place."""
    lines[:] = converted("\n".join(lines)).split("\n")


def converted(text: str) -> str:
    return (
        "\n\n".join(
            _block(part) for part in re.split(r"\n[ ]*\n", text.strip("\n")) if part.strip()
        )
        + "\n"
    )


def _block(part: str) -> str:
    if part.startswith("    "):
        language = "python" if CODE.search(part) else "text"
        return f".. code-block:: {language}\n\n{part}"
    lines = part.split("\n")
    return (
        "\n".join(_item(line) for line in _joined(lines))
        if _has_fields(lines)
        else "\n".join(map(_inline, lines))
    )


def _has_fields(lines: list[str]) -> bool:
    return bool(FIELD.fullmatch(lines[0])) and not lines[0].startswith("http")


def _joined(lines: list[str]) -> list[str]:
    """A field's further lines joined to its first; several on one line, after a semicolon, stay
    together.
    """
    found = []
    for line in lines:
        if FIELD.fullmatch(line) or not found:
            found.append(line)
        else:
            found[-1] += " " + line.strip()
    return found


def _item(line: str) -> str:
    match = FIELD.fullmatch(line)
    return f"- ``{match[1]}``: {_inline(match[2])}" if match else f"- {_inline(line)}"


def _inline(line: str) -> str:
    """Literals in double backticks; elsewhere nothing is markup."""
    parts = line.strip().split("`")
    if len(parts) % 2 == 0:  # a literal that goes on in the next line
        return re.sub(r"([\\*|`_])", r"\\\1", line.strip())
    plain = [re.sub(r"([\\*|])|_(?=\W|$)", lambda m: "\\" + m[0], part) for part in parts[::2]]
    return "".join(a + (f"``{b}``" if b else "") for a, b in zip(plain, [*parts[1::2], ""]))
