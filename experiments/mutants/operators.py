"""Small changes of Python source, one at a time: what a slip of the hand could have made of it."""

import ast
import dataclasses
import re
from collections.abc import Iterator

SWAPS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"), ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "//"),
    ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.Pow: (r"\*\*", "*"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.BitAnd: ("&", "|"), ast.BitOr: (r"\|", "&"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str  # below the repository's root
    start: int  # characters of the file that are replaced
    stop: int
    text: str  # what replaces them
    lines: tuple[int, ...]  # on which what is changed stands

    def of(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.stop :]


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of the functions in `source`, in order; annotations and what an error says are left alone.

    A few are no programs (`is_program`): an operator in the text of a comment, say.
    """
    tree, offsets = ast.parse(source), _offsets(source)
    found = []
    for node, in_function in _walk(tree, inside=False):
        if not in_function:
            continue
        place = lambda of: (offsets(of.lineno, of.col_offset), offsets(of.end_lineno, of.end_col_offset))
        for start, stop, text in _changes(node, source, place):
            found.append(Mutant(file, start, stop, text, tuple(range(node.lineno, node.end_lineno + 1))))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.stop, mutant.text))


def _changes(node: ast.AST, source: str, place) -> Iterator[tuple[int, int, str]]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) | ast.BinOp(left=left, op=op, right=right):
            yield from _swapped(op, place(left)[1], place(right)[0], source)
        case ast.BoolOp(op=op, values=[left, right, *_]):
            yield from _swapped(op, place(left)[1], place(right)[0], source)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield place(node)[0], place(operand)[0], ""
        case ast.Constant(value=bool(value)):
            yield *place(node), str(not value)
        case ast.Constant(value=int(value)):
            yield *place(node), str(value + 1)
        case ast.Constant(value=float(value)):
            yield *place(node), repr(2 * value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            start, stop = place(test)
            yield start, stop, f"(not ({source[start:stop]}))"
        case ast.keyword(arg=str(), value=ast.Name() | ast.Attribute() as value):
            yield *place(value), "None"
        case ast.Expr(value=ast.Call()):
            yield *place(node), "pass"


def _swapped(op: ast.AST, start: int, stop: int, source: str) -> Iterator[tuple[int, int, str]]:
    """Of the operator between two operands; brackets and ends of lines may stand beside it."""
    before, after = SWAPS.get(type(op), (None, None))
    if before and (match := re.search(rf"(?<!\w){before}(?!\w)", source[start:stop])):
        yield start + match.start(), start + match.end(), after


def _walk(node: ast.AST, *, inside: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node that has a place, and whether it stands in a function's body."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                within = inside or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body")
                if hasattr(child, "lineno"):
                    yield child, within
                yield from _walk(child, inside=within)


def _offsets(source: str):
    """(line, column in bytes of UTF-8), as ast counts, to characters from the start."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    return lambda line, column: starts[line - 1] + len(lines[line - 1].encode()[:column].decode())


def is_program(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
