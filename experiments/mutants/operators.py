"""Small changes of Python source, one at a time: what a slip of the hand could have made of it."""

import ast
import dataclasses
import itertools
from collections.abc import Iterator

SWAPS = dict(
    Lt="LtE",
    LtE="Lt",
    Gt="GtE",
    GtE="Gt",
    Eq="NotEq",
    NotEq="Eq",
    In="NotIn",
    NotIn="In",
    Is="IsNot",
    IsNot="Is",
    Add="Sub",
    Sub="Add",
    Mult="FloorDiv",
    Div="Mult",
    FloorDiv="Mult",
    Mod="FloorDiv",
    Pow="Mult",
    And="Or",
    Or="And",
    BitAnd="BitOr",
    BitOr="BitAnd",
)


@dataclasses.dataclass(frozen=True, order=True)
class Mutant:
    """file: below the repository's root. start, stop: its bytes that `text` replaces. lines: where
    they stand.
    """

    file: str
    start: int
    stop: int
    text: str
    lines: tuple[int, ...]

    def of(self, source: str) -> str:
        content = source.encode()
        return (content[: self.start] + self.text.encode() + content[self.stop :]).decode()


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of the functions in `source`, in order; annotations and what an error says are
    left alone.
    """
    lines = source.encode().splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    found = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in below(ast.Module(function.body, [])):
            for old, text in changes(node):
                start = starts[old.lineno - 1] + old.col_offset
                stop = starts[old.end_lineno - 1] + old.end_col_offset
                found.add(
                    Mutant(file, start, stop, text, tuple(range(node.lineno, node.end_lineno + 1)))
                )
    return sorted(found)


def below(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below `tree` but annotations, decorators and what an error says."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise):
                yield child
                yield from below(child)


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """What a slip changes in a node: which node is replaced, by which source."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=others):
            yield node, bracketed(ast.Compare(left, [swapped(op)], others))
        case ast.BinOp(left=left, op=op, right=right) if type(op).__name__ in SWAPS:
            yield node, bracketed(ast.BinOp(left, swapped(op), right))
        case ast.BoolOp(op=op, values=values):
            yield node, bracketed(ast.BoolOp(swapped(op), values))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, bracketed(operand)
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.Constant(value=float(value)):
            yield node, str(2 * value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, bracketed(ast.UnaryOp(ast.Not(), test))
        case ast.keyword(arg=str(), value=ast.Name() | ast.Attribute() as value):
            yield value, "None"
        case ast.Expr(value=ast.Call()):
            yield node, "pass"


def swapped(operator: ast.AST) -> ast.AST:
    return getattr(ast, SWAPS[type(operator).__name__])()


def bracketed(node: ast.AST) -> str:
    return f"({ast.unparse(node)})"
