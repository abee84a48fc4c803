"""Parse scheduled HLO text (`compiled.as_text()`) into computations, each with its instructions in
issue order.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping

from ladder_jax.errors import UserError

INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(?:, ([\w\-]+=.*))?$"
)
"""Name, shape, opcode, operands (or literal), attributes."""
SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
"""Of an array: its element type, its sizes and its layout."""
LINES = re.compile(
    r"\n(?= +(?:ROOT )?%[\w.\-]+ = |\}(?:,|$)|(?:ENTRY )?%?[\w.\-]+ \(.*\{$)", re.MULTILINE
)
"""Between instructions, and the ends of computations: a string of backend_config may have line breaks
of its own.
"""


@dataclasses.dataclass(frozen=True)
class Array:
    """One of an instruction's results. kind: element type. on_chip: whether it is in on-chip
    memory, by its layout.
    """

    kind: str
    dims: tuple[int, ...]
    on_chip: bool = dataclasses.field(default=False, compare=False)

    @property
    def bytes(self) -> int:
        """Without the padding of a device's layout."""
        if self.kind in ("token", "opaque"):
            return 0
        bits = 8 if self.kind == "pred" else int(re.search(r"\d+", self.kind)[0])
        return math.ceil(bits * math.prod(self.dims) / 8)

    @property
    def in_memory(self) -> int:
        """Its bytes in main memory."""
        return 0 if self.on_chip else self.bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line: `%name = shape opcode(operands), attributes`. computations: all of the program, by
    name.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple["Instruction", ...] = dataclasses.field(repr=False)
    attributes: str
    literal: str = ""  # the value of a constant, the number of a parameter
    computations: Mapping[str, "Computation"] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def op_name(self) -> str:
        """The name of its jax operation, with named scopes; empty for an instruction that the
        compiler generated.
        """
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @functools.cached_property
    def _unquoted(self) -> str:
        """The attributes without what is in quotation marks: names may hold any characters."""
        return re.sub(r'"[^"\\]*(?:\\.[^"\\]*)*"', '""', self.attributes)

    @functools.cached_property
    def calls(self) -> tuple["Computation", ...]:
        """The computations that it runs, including the body of a `while` but no condition or
        reducer.
        """
        if self.opcode.startswith(
            ("all-reduce", "reduce", "scatter", "sort", "select-and-scatter", "map")
        ):
            return ()
        named = re.findall(
            r"\b(?:calls|to_apply|body|called_computations|branch_computations|(?:true|false)_computation)"
            r"=(\{[^}]*\}|%?[\w.\-]+)",
            self._unquoted,
        )
        return tuple(self.computations[name] for name in re.findall(r"[\w.\-]+", " ".join(named)))

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Of the result, or of each array of a tuple."""
        return arrays(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """Of the first of them."""
        return self.arrays[0].dims

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def in_memory(self) -> int:
        return sum(array.in_memory for array in self.arrays)

    def attribute(self, name: str) -> str:
        """The text after `name=`: a group in braces, or up to the next comma or space; "" if there
        is none.
        """
        match = re.search(rf"(?:^|[\s,]){name}=(\{{[^}}]*\}}|[^\s,]+)", self._unquoted)
        return match[1] if match else ""

    def computation(self, attribute: str) -> "Computation | None":
        """The one that an attribute names, such as `condition=%name`."""
        return self.computations.get(self.attribute(attribute).lstrip("%"))

    def behind(self, opcodes: Collection[str]) -> "Instruction":
        """The instruction that made the array which those of `opcodes` only pass on: itself, or a
        first operand's.
        """
        return self.operands[0].behind(opcodes) if self.opcode in opcodes else self


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]
    entry: bool

    @property
    def root(self) -> Instruction:
        return self.instructions[-1]


@dataclasses.dataclass(frozen=True)
class Program:
    computations: dict[str, Computation]

    @property
    def entry(self) -> Computation:
        return next(c for c in self.computations.values() if c.entry)

    @property
    def instructions(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions


def parse(text: str) -> Program:
    """Raises UserError if `text` is not one HLO module, whole and scheduled, or has a line that is
    no instruction.
    """
    if not text.startswith("HloModule"):
        raise UserError(f"not the text of an HLO module: it begins with {text[:40]!r}")
    if "\nHloModule " in text:
        raise UserError("the text of several HLO modules: read one after the other")
    if "is_scheduled=true" not in text[:2000]:
        raise UserError(
            "the program has not been scheduled: pass compiled.as_text(), not lowered.as_text()"
        )
    computations = {}
    header = None
    found = {}
    for line in LINES.split(text):
        if opened := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            header = opened
            found = {}
        elif line.startswith("}") and header:
            computations[header[2]] = Computation(
                header[2], tuple(found.values()), entry=bool(header[1])
            )
            header = None
        elif header:
            one = _instruction(line.replace("\n", ""), found, computations)
            found[one.name] = one
    if not any(computation.entry for computation in computations.values()):
        raise UserError("the HLO module has no ENTRY computation")
    return Program(computations)


def arrays(shape: str) -> tuple[Array, ...]:
    """Of each array in a shape's text, such as `(f32[8,128], s32[])`. A layout with S(1), or more,
    is on the chip.
    """
    found = []
    for kind, sizes, layout in SHAPE.findall(shape):
        dims = tuple(int(size) for size in sizes.split(",") if size)
        found.append(Array(kind, dims, on_chip=bool(re.search(r"S\([1-9]\d*\)", layout))))
    return tuple(found)


def _instruction(line: str, before: dict[str, Instruction], computations: Mapping) -> Instruction:
    """before: the computation's instructions above it, by name."""
    parts = INSTRUCTION.match(line)
    if parts is None:
        raise UserError(f"not an instruction of HLO: {line.strip()[:120]!r}")
    name, shape, opcode, inside, attributes = parts.groups(default="")
    if opcode in ("constant", "parameter"):
        return Instruction(name, shape, opcode, (), attributes, literal=inside)
    operands = tuple(_named(one, before) for one in re.findall(r"%([\w.\-]+(?:#\d+)?)", inside))
    return Instruction(name, shape, opcode, operands, attributes, computations=computations)


def _named(name: str, before: dict[str, Instruction]) -> Instruction:
    """The instruction of that name. `x#1`, in XLA's own dumps, is an element of x's tuple: it joins
    those before as the `get-tuple-element` that `as_text` writes.
    """
    source, _, index = name.partition("#")
    if name not in before:
        whole = before[source]
        shape = [*SHAPE.finditer(whole.shape)][int(index)][0]
        before[name] = Instruction(name, shape, "get-tuple-element", (whole,), f"index={index}")
    return before[name]
