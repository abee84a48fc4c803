"""Damaged and hostile variants of valid files, each a function of a random number generator
alone.
"""

import copy
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
OPENERS = [b"[", b"{", b'{"a":', b" ", b"\n", b"\x00"]
Mutation = Callable[[random.Random, bytes], bytes]


def octets(rng, content):
    """Up to four pieces, inserted or in place of others."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at, other = (rng.randrange(len(data) + 1) for _ in range(2))
        size = 1 << rng.randrange(8)
        number = (rng.choice(NUMBERS) % 2**64).to_bytes(8, "little")
        pieces = [
            b"",
            bytes(bit ^ 1 << rng.randrange(8) for bit in data[at : at + 1]),
            rng.randbytes(size),
            bytes(data[other : other + size]) * rng.choice([1, 2, 100]),
            rng.choice(WORDS),
            number[: rng.choice([1, 2, 4, 8])],
            rng.choice(OPENERS) * rng.choice([10, 2000, 100_000]),
        ]
        piece = rng.choice(pieces)
        data[at : rng.choice([at, at + len(piece), at + size, len(data)])] = piece
    return bytes(data)


def value(rng, depth=0):
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


def tree(rng, content):
    """Up to three changes of a parsed JSON value."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.randint(1, 3)):
        nodes = list(_nodes(content))
        parent, key = rng.choice(nodes)
        if parent is None:
            content = value(rng) if rng.random() < 0.1 else content
            continue
        before, (above, name) = parent[key], rng.choice(nodes)
        changed = [value(rng), before if above is None else above[name], [before], str(before)]
        if isinstance(before, int | float):
            changed += [-before, before + 1, before - 1, before * 2]
        new = copy.deepcopy(rng.choice(changed))  # it may hold `parent`
        if isinstance(parent, list):
            parent[key : key + rng.randrange(2)] = [new] * rng.choice([0, 1, 1, 3, 300])
        elif rng.random() < 0.2:
            del parent[key]
        else:
            parent[rng.choice([key, rng.choice([*parent, *TEXTS])])] = new
    return content


def json_text(rng, content):
    if rng.random() < 0.25:
        return octets(rng, content)
    return json.dumps(tree(rng, json.loads(content))).encode()


def json_lines(rng, content):
    lines = content.split(b"\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        if lines[at].strip():
            try:
                lines[at] = json_text(rng, lines[at])
            except ValueError:
                pass  # changed before
    return b"\n".join(lines)


def zipped(rng, content):
    """Either the lines are changed, or the gzip file of them."""
    if rng.random() < 0.5:
        return gzip.compress(json_lines(rng, content), 1)
    return octets(rng, gzip.compress(content, 1))


# 9^11 ones, where somebody writes them out
BOMB = [
    b"a0: &a0 [1]",
    *(b"a%d: &a%d [%s]" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 12)),
]


def yaml_text(rng, content):
    lines = content.split(b"\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        word = rng.choice(YAML_WORDS)
        name, colon, _ = lines[at].partition(b":")
        changed = [
            name + colon + b" " + word,
            name + colon + b" " + json.dumps(value(rng)).encode(),
            word + b": " + rng.choice(YAML_WORDS),
            b" " * rng.randrange(9) + rng.choice(lines),
            lines[at] + b" *a11",
        ]
        lines[at : at + rng.randrange(2)] = [rng.choice(changed)]
    if rng.random() < 0.3:
        lines = [*BOMB, *lines]
    text = b"\n".join(lines)
    return octets(rng, text) if rng.random() < 0.2 else text


def safetensors(rng, content):
    """The header is changed as JSON, or as bytes."""
    if rng.random() < 0.4:
        return octets(rng, content)
    length = int.from_bytes(content[:8], "little")
    header = json_text(rng, content[8 : 8 + length])
    stated = rng.choice([len(header)] * 9 + NUMBERS) % 2**64
    return stated.to_bytes(8, "little") + header + content[8 + length :]


def gguf(rng, content):
    """Mostly the header, where all lengths, types and names are."""
    if rng.random() < 0.1:
        return octets(rng, content)
    return octets(rng, content[:12_000]) + content[12_000:]
