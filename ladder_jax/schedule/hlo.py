"""Parse scheduled HLO text (`compiled.as_text()`) into computations, each with its instructions in issue order."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""  # the value of a constant, the number of a parameter

    @functools.cached_property
    def op_name(self) -> str:
        """The name of its jax operation, with named scopes; empty for an instruction that the compiler generated."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that it runs, including the body of a `while` but no condition or reducer."""
        if self.opcode.startswith(("all-reduce", "reduce", "scatter", "sort", "select-and-scatter", "map")):
            return ()
        single = re.findall(r"\b(?:calls|to_apply|body)=%?([\w.\-]+)", self.attributes)
        several = re.findall(r"\b(?:called_computations|branch_computations)=\{([^}]*)\}", self.attributes)
        return (*single, *re.findall(r"%([\w.\-]+)", " ".join(several)))

    @functools.cached_property
    def arrays(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(element type, dimensions) of the result, or of each array of a tuple."""
        return arrays(self.shape)

    @functools.cached_property
    def on_chip(self) -> tuple[bool, ...]:
        """Of each of these arrays, whether it is in on-chip memory: a layout's space; none or S(0) is main memory."""
        layouts = re.findall(r"\b[a-z]\w*\[[\d,]*\](\{[^}]*\})?", self.shape)
        return tuple(bool(re.search(r"S\([1-9]\d*\)", layout)) for layout in layouts)

    def attribute(self, name: str) -> str | None:
        """The text after `name=`: a group in braces, or up to the next comma or space; None if there is none."""
        match = re.search(rf"(?:^|[\s,]){name}=(\{{[^}}]*\}}|[^\s,]+)", self.attributes)
        return match[1] if match else None


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]
    entry: bool

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}


@dataclasses.dataclass(frozen=True)
class Program:
    computations: dict[str, Computation]
    scheduled: bool

    @property
    def entry(self) -> Computation:
        return next(c for c in self.computations.values() if c.entry)


def parse(text: str) -> Program:
    """Raises UserError if `text` is not an HLO module."""
    if not text.startswith("HloModule"):
        raise UserError(f"not the text of an HLO module: it begins with {text[:40]!r}")
    computations, header, lines = {}, None, []
    for line in _logical_lines(text):
        if opened := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            header, lines = opened, []
        elif re.match(r"\}(,|$)", line) and header:
            name = header[2]
            computations[name] = Computation(name, tuple(map(_instruction, lines)), entry=bool(header[1]))
            header = None
        elif header:
            lines.append(line)
    if not any(computation.entry for computation in computations.values()):
        raise ValueError("the HLO module has no ENTRY computation")
    return Program(computations, scheduled="is_scheduled=true" in text[:2000])


def arrays(shape: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(element type, dimensions) of each array in a shape's text, such as `(f32[8,128], s32[])`."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    return tuple((kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in found)


def size_in_bytes(arrays: tuple[tuple[str, tuple[int, ...]], ...]) -> int:
    """Bytes of the arrays, without the padding of a device's layout."""
    return sum(math.ceil(_bits(kind) * math.prod(dims) / 8) for kind, dims in arrays)


def _bits(kind: str) -> int:
    if kind in ("pred", "token", "opaque"):
        return 8 if kind == "pred" else 0
    return int(re.search(r"\d+", kind)[0])


def _logical_lines(text: str) -> Iterator[str]:
    """One line per instruction: a line break inside a string of backend_config is removed."""
    pending = None
    for line in text.splitlines():
        if re.match(r"\s+(ROOT )?%[\w.\-]+ = |\}(,|$)|(ENTRY )?%?[\w.\-]+ \(.*\{$", line):
            if pending is not None:
                yield pending
            pending = line
        elif pending is not None and not pending.startswith("}") and line:
            pending += line
    if pending is not None:
        yield pending


def _instruction(line: str) -> Instruction:
    name, rest = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)", line).groups()
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:shape_end], rest[shape_end:].lstrip()
    opened = rest.index("(")
    closed = _closing(rest, opened)
    inside, attributes = rest[opened + 1 : closed], rest[closed + 1 :].lstrip(", ")
    if rest[:opened] in ("constant", "parameter"):
        return Instruction(name, shape, rest[:opened], (), attributes, literal=inside)
    return Instruction(name, shape, rest[:opened], tuple(re.findall(r"%([\w.\-]+)", inside)), attributes)


def _closing(text: str, opened: int) -> int:
    """Position of the parenthesis that closes the one at `opened`."""
    depth = 0
    for parenthesis in re.finditer(r"[()]", text[opened:]):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return opened + parenthesis.start()
    raise ValueError(f"unbalanced parentheses in HLO: {text[:120]!r}")
