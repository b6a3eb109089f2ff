"""Which way a program goes where it asks a tensor for a truth value, read off its own source.

A check that raises changes no memory, so it passes. A way that leaves early, by `return`, `break`
or `continue`, does less than the way on, so it is not taken: random skips do not skip, and loops run
their most. What the way on takes is then simulated; that no other way takes more is not proven.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import Any

PASSES = "the check there passes"
GOES_ON, AGAIN = "the way that leaves early is not taken", "the loop goes on"
_Parents = dict[ast.AST, ast.AST]
_Span = tuple[int | None, int | None, int | None, int | None]  # lines, then columns
# Instructions that take a truth value. Where they stand themselves Python 3.11 does not tell well.
_TAKES, _FILLERS = ("POP_JUMP", "TO_BOOL", "UNARY_NOT"), ("CACHE", "EXTENDED_ARG", "NOT_TAKEN")
_LEAVES = (ast.Return, ast.Break, ast.Continue)


@dataclass(frozen=True)
class Way:
    """What to answer, and what that means."""

    truth: bool
    meaning: str


def way_at(frames: Iterable[FrameType]) -> Way | None:
    """The answer where these frames, innermost first, ask for a truth value.

    None where neither answer is a check's or an early end's. A function that returns what it was
    asked for is followed to the line that called it.
    """
    for frame in frames:
        parents, node = _asked(frame)
        if node is None:
            return None
        top, is_true = _whole(node, parents)
        holder = parents.get(top)
        if not isinstance(holder, ast.Return):
            return _of_statement(holder, top, is_true, parents)
        if not is_true:
            return None
    return None


def _of_statement(
    holder: ast.AST | None, top: ast.AST, is_true: bool, parents: _Parents
) -> Way | None:
    if isinstance(holder, ast.Assign) and len(holder.targets) == 1:
        target = holder.targets[0]
        return _later(holder, target.id, is_true, parents) if isinstance(target, ast.Name) else None
    found = _of_test(holder, top, parents)
    return found and Way(found.truth == is_true, found.meaning)


def _of_test(holder: ast.AST | None, top: ast.AST, parents: _Parents) -> Way | None:
    """Which way a test goes, as a whole."""
    if isinstance(holder, ast.Assert) and holder.test is top:
        return Way(True, PASSES)
    if isinstance(holder, ast.While) and holder.test is top:
        return Way(True, AGAIN)
    if not isinstance(holder, ast.If) or holder.test is not top:
        return None
    otherwise = holder.orelse or _after(holder, parents)
    if _ends_in(holder.body, (ast.Raise,)):
        return Way(False, PASSES)
    if _ends_in(otherwise, (ast.Raise,)):
        return Way(True, PASSES)
    if _ends_in(holder.body, _LEAVES):
        return Way(False, GOES_ON)
    return Way(True, GOES_ON) if _ends_in(holder.orelse, _LEAVES) else None


def _later(assignment: ast.AST, name: str, is_true: bool, parents: _Parents) -> Way | None:
    """The same for `bad = x.isnan().any().item()`, by the first test of that name after it."""
    for statement in _after(assignment, parents):
        for test in ast.walk(statement):
            if isinstance(test, ast.Name) and test.id == name and isinstance(test.ctx, ast.Load):
                top, is_plain = _whole(test, parents)
                if found := _of_test(parents.get(top), top, parents):
                    return Way((found.truth == is_plain) == is_true, found.meaning)
    return None


def _after(statement: ast.AST, parents: _Parents) -> list[ast.stmt]:
    """The statements after one, in its own block."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(parents.get(statement), field, None)
        if isinstance(block, list) and statement in block:
            return block[block.index(statement) + 1 :]
    return []


def _ends_in(block: list[ast.stmt], kinds: tuple[type[ast.stmt], ...]) -> bool:
    return bool(block) and isinstance(block[-1], kinds)


def _whole(node: ast.AST, parents: _Parents) -> tuple[ast.AST, bool]:
    """The largest expression that follows from a value alone, and whether it is true where that is."""
    is_true, parent = True, parents.get(node)
    while parent is not None and _passes_on(parent, node):
        is_true ^= isinstance(parent, ast.UnaryOp)
        node, parent = parent, parents.get(parent)
    return node, is_true


def _passes_on(parent: ast.AST, node: ast.AST) -> bool:
    if isinstance(parent, ast.UnaryOp):
        return isinstance(parent.op, ast.Not)
    if isinstance(parent, ast.Attribute):
        return parent.attr == "item"
    if isinstance(parent, ast.Call):
        is_bool = isinstance(parent.func, ast.Name) and parent.func.id == "bool"
        return parent.func is node or is_bool
    return isinstance(parent, (ast.BoolOp, ast.NamedExpr))


def _asked(frame: FrameType) -> tuple[_Parents, ast.AST | None]:
    """The expression whose value a frame asks for, and who holds whom in its file."""
    file, code = frame.f_code.co_filename, frame.f_code
    parents, places = _tree(file, "".join(linecache.getlines(file, frame.f_globals)))
    at = frame.f_lasti // 2
    if _name(code, at).startswith(_TAKES):  # what they take the instruction before them has made
        at = next(i for i in range(at - 1, -1, -1) if _name(code, i) not in _FILLERS)
    return parents, places.get(next(islice(code.co_positions(), at, None)))


def _name(code: CodeType, at: int) -> str:
    return dis.opname[code.co_code[2 * at]]


@functools.lru_cache(maxsize=64)
def _tree(file: str, source: str) -> tuple[_Parents, dict[_Span, ast.AST]]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell with magics
        return {}, {}
    parents: _Parents = {}
    places: dict[_Span, ast.AST] = {}
    for node in ast.walk(tree):
        parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
        if isinstance(node, ast.expr):
            places.setdefault(_span(node), node)
    return parents, places


def _span(node: Any) -> _Span:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
