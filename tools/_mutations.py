"""One small fault at a time in the statements of a solution."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable, Iterator, Sequence

from utils.lessons import folders

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.And: ast.Or,
    ast.Or: ast.And, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
Inside = Callable[[ast.AST], bool]
Named = tuple[str, Callable[[ast.AST], None]]  # a fault; its name, if what changes does not say it


@functools.cache
def _solution_lines(number: str) -> frozenset[int]:
    text = (folders()[number] / "lab.py").read_text(encoding="utf-8").splitlines()
    lines, is_inside = set[int](), False
    for at, line in enumerate(text, 1):
        is_inside = (is_inside or "# BEGIN SOLUTION" in line) and "# END SOLUTION" not in line
        if is_inside:
            lines.add(at)
    return frozenset(lines)


def in_solution(number: str) -> Inside:
    """Whether a node of a lab's script belongs to a solution."""
    lines = _solution_lines(number)
    return lambda node: getattr(node, "lineno", 0) in lines


def mutations(
    statements: Sequence[ast.stmt], inside: Inside
) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Each fault by its name, and the statements with it: "before => after", or "without ..."."""
    sites = [*_sites(ast.Module([*statements], []))]
    for index, (node, _, faults) in enumerate(sites):
        for number in range(len(faults) if inside(node) else 0):
            tree = copy.deepcopy(ast.Module([*statements], []))
            twin, statement, twins = [*_sites(tree)][index]
            name, fault = twins[number]
            before = _text(statement)
            fault(twin)
            name = name or f"{before} => {_text(statement)}"
            yield name, ast.fix_missing_locations(tree).body


def _sites(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST, list[Named]]]:
    """Each node that has faults, with the statement it stands in, in an order that a copy keeps."""

    def visit(node: ast.AST, statement: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, list[Named]]]:
        statement = node if isinstance(node, ast.stmt) else statement
        if found := [*_faults(node), *_left_out(node)]:
            yield node, statement, found
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue  # of two that are as long
            yield from visit(child, statement)

    yield from visit(tree, tree)


def _faults(node: ast.AST) -> list[Named]:
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            return [_put(op=OPERATORS[type(op)]())]
        case ast.Compare(ops=[op, *others]) if type(op) in OPERATORS:
            return [_put(ops=[OPERATORS[type(op)](), *others])]
        case ast.Constant(value=bool(value)):
            return [_put(value=not value)]
        case ast.Constant(value=int() | float() as value):
            return [_put(value=value + 1)]
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            return [_put(test=ast.UnaryOp(ast.Not(), test))]
        case ast.Call(ast.Name("max" | "min")):
            return []  # in either order
        case ast.Call(args=[first, second, *others]):
            return [_put(args=[second, first, *others])]
    return []


def _left_out(node: ast.AST) -> list[Named]:
    body = getattr(node, "body", None)
    if not isinstance(body, list) or isinstance(node, ast.Module | ast.ClassDef):
        return []
    return [_without(at, line) for at, line in enumerate(body) if not _is_idle(line)]


def _is_idle(line: ast.stmt) -> bool:
    is_text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    return is_text or isinstance(line, ast.Pass)


def _put(**fields: object) -> Named:
    def fault(node: ast.AST) -> None:
        for name, value in copy.deepcopy(fields).items():
            setattr(node, name, value)

    return "", fault


def _without(place: int, line: ast.stmt) -> Named:
    def fault(node: ast.AST) -> None:
        node.body[place] = ast.copy_location(ast.Pass(), line)  # type: ignore[attr-defined]

    return f"without {_text(line)}", fault


def _text(statement: ast.AST) -> str:
    """A statement in one line; of one with a body its first line."""
    if not isinstance(statement, ast.stmt):
        return ""
    return ast.unparse(ast.fix_missing_locations(statement)).partition("\n")[0]
