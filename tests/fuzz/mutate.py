"""Damaged and hostile variants of valid files, each a function of a random number generator
alone.
"""

import gzip
import json
import random
from collections.abc import Callable

NUMBERS = [
    0,
    1,
    -1,
    7,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63,
    2**64,
    -(2**63),
    10**30,
]
FLOATS = [0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")]
TEXTS = [
    "",
    " ",
    "a",
    "\x00",
    "\x1b[2J",
    "\ud800",
    "é東🙂",
    "../../x",
    "/dev/zero",
    "a" * 5000,
    "{% for",
    "{{ 1/0 }}",
]
WORDS = b'null true false NaN -Infinity 1e999 "" "\\ud800" {} [] [[[ {{{ }} ]] \xff \x00 \xed\xa0\x80 0x10 1_0'.split()
YAML_WORDS = [
    b"&a [*a, *a]",
    b"*b",
    b"!!python/object/apply:os.system [id]",
    b"2020-99-99",
    b"1" * 5000,
    b"!!binary x",
    b"? [1]",
    b"? {a: b}\n: c",
    b"<<: 1",
    b"!!set {1}",
    b"!!timestamp x",
    b"0b2",
    b"1:99:99",
    b"---",
    b"...",
    b"%YAML 9.9",
    b"|",
    b"!!int x",
    b"!!float x",
    b"!!omap [1]",
    b"- -" * 5,
    b"{" * 3000,
    b"[" * 3000,
    b"- " * 3000,
    b".nan",
    b"~",
]
Mutation = Callable[[random.Random, bytes], bytes]


def octets(rng: random.Random, content: bytes) -> bytes:
    """Up to four changes of bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(data) + 1), 1 << rng.randrange(8)
        match rng.randrange(9):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + size] = rng.randbytes(size)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + size]
            case 4:
                data[at:at] = data[at : at + size] * rng.choice([1, 2, 100])
            case 5:
                other = rng.randrange(len(data) + 1)
                data[at:at] = data[other : other + size]
            case 6:
                data[at:at] = rng.choice(WORDS)
            case 7:
                width = rng.choice([1, 2, 4, 8])
                data[at : at + width] = (rng.choice(NUMBERS) % 256**width).to_bytes(width, "little")
            case 8:
                data[at:at] = rng.choice([b"[", b"{", b'{"a":', b" ", b"\n", b"\x00"]) * rng.choice(
                    [10, 2000, 100_000]
                )
    return bytes(data)


def value(rng: random.Random, depth: int = 0):
    """A JSON value that no reader expects."""
    kinds = [
        lambda: rng.choice([None, True, False]),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(FLOATS),
        lambda: rng.choice(TEXTS),
        lambda: [value(rng, depth + 1) for _ in range(rng.randrange(4))],
        lambda: {rng.choice(TEXTS): value(rng, depth + 1) for _ in range(rng.randrange(3))},
    ]
    return rng.choice(kinds[: 4 if depth > 3 else 6])()


def _nodes(tree, parent=None, key=None):
    yield parent, key
    below = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for name, child in below:
        yield from _nodes(child, tree, name)


def tree(rng: random.Random, content):
    """Up to three changes of a parsed JSON value."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.randint(1, 3)):
        parent, key = rng.choice(list(_nodes(content)))
        if parent is None:
            content = value(rng) if rng.random() < 0.1 else content
            continue
        before = parent[key]
        change = rng.randrange(6)
        if change == 0:
            del parent[key]
        elif change == 1 and isinstance(before, int | float):
            parent[key] = rng.choice(
                [-before, before + 1, before - 1, before * 2, str(before), [before]]
            )
        elif change == 2 and isinstance(parent, dict):
            parent[rng.choice([*parent, *TEXTS])] = before
        elif change == 3 and isinstance(parent, list):
            parent[key:key] = [before] * rng.choice([1, 3, 300])
        elif change == 4:
            parent[key] = rng.choice([rng.choice(list(_siblings(parent))), value(rng)])
        else:
            parent[key] = value(rng)
    return content


def _siblings(parent):
    return list(parent.values() if isinstance(parent, dict) else parent)


def json_text(rng: random.Random, content: bytes) -> bytes:
    if rng.random() < 0.25:
        return octets(rng, content)
    return json.dumps(tree(rng, json.loads(content))).encode()


def json_lines(rng: random.Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        if lines[at].strip():
            try:
                lines[at] = json_text(rng, lines[at])
            except ValueError:
                pass  # changed before
    return b"\n".join(lines)


def zipped(rng: random.Random, content: bytes) -> bytes:
    """Either the lines are changed, or the gzip file of them."""
    if rng.random() < 0.5:
        return gzip.compress(json_lines(rng, content), 1)
    return octets(rng, gzip.compress(content, 1))


def yaml_text(rng: random.Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        name, colon, _ = lines[at].partition(b":")
        match rng.randrange(6):
            case 0:
                lines[at] = name + colon + b" " + rng.choice(YAML_WORDS)
            case 1:
                lines[at] = name + colon + b" " + json.dumps(value(rng)).encode()
            case 2:
                lines.insert(at, rng.choice(YAML_WORDS) + b": " + rng.choice(YAML_WORDS))
            case 3:
                lines.insert(at, b" " * rng.randrange(9) + lines[rng.randrange(len(lines))])
            case 4:
                doubled = [
                    b"a%d: &a%d [%s]" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9))
                    for i in range(1, 12)
                ]
                # 9^11 ones, where somebody writes them out
                lines = [b"a0: &a0 [1]", *doubled, *lines]
                lines[rng.randrange(len(lines))] += b" *a11"
            case 5:
                return octets(rng, b"\n".join(lines))
    return b"\n".join(lines)


def safetensors(rng: random.Random, content: bytes) -> bytes:
    """The header is changed as JSON, or as bytes."""
    if rng.random() < 0.4:
        return octets(rng, content)
    length = int.from_bytes(content[:8], "little")
    header = json_text(rng, content[8 : 8 + length])
    stated = rng.choice([len(header)] * 9 + NUMBERS) % 2**64
    return stated.to_bytes(8, "little") + header + content[8 + length :]


def gguf(rng: random.Random, content: bytes) -> bytes:
    """Mostly the header, where all lengths, types and names are."""
    if rng.random() < 0.1:
        return octets(rng, content)
    header = content[:12_000]
    return (
        octets(rng, header[: rng.randrange(24, len(header))] if rng.random() < 0.02 else header)
        + content[12_000:]
    )
