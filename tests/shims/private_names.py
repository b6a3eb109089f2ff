"""Private names of other libraries, as they stand in the syntax tree of a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# What a name may stand for although it begins with an underscore: methods of named tuples.
PUBLIC = frozenset({"_replace", "_asdict", "_fields", "_make"})
# Functions that take a name as a string: of an attribute, or of a module.
BY_ATTRIBUTE = frozenset({"getattr", "hasattr", "setattr", "delattr", "object"})
BY_MODULE = frozenset({"import_module", "patch", "__import__"})


class Found(NamedTuple):
    """A private name: where it stands, what it is, and whether it is reached at import."""

    place: str
    name: str
    at_import: bool


def is_private(name: str) -> bool:
    """One underscore, and no named tuple's method."""
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def private_names(path: Path) -> Iterator[Found]:
    """Imports, attributes and strings of a file that name what is private to another library."""
    tree = ast.parse(path.read_text())
    own, aliases = _defined_in(tree), _operator_aliases(tree)
    for node, at_import in _walk(tree, True):
        if isinstance(node, ast.Attribute) and _under_ops(_dotted(node), aliases):
            continue
        for name in _names(node):
            if name not in own:
                yield Found(f"{path.name}:{getattr(node, 'lineno', 0)}", name, at_import)


def operators(path: Path) -> set[str]:
    """Private names under `torch.ops`: registered operators, whose names are part of saved models."""
    tree = ast.parse(path.read_text())
    aliases = _operator_aliases(tree)
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    found = {_under_ops(_dotted(node), aliases) for node in nodes}
    return {".".join(name.split(".")[:2]) for name in found if "._" in f".{name}" and "." in name}


def _walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    inside = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield child, at_import
        yield from _walk(child, at_import and not isinstance(child, inside))


def _names(node: ast.AST) -> Iterator[str]:
    if (
        isinstance(node, ast.ImportFrom)
        and node.module
        and not node.module.startswith(("utils", "__"))
    ):
        for alias in node.names:
            if any(map(is_private, [*node.module.split("."), alias.name])):
                yield f"{node.module}:{alias.name}"
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if any(map(is_private, alias.name.split("."))):
                yield f"{alias.name}:"
    elif isinstance(node, ast.Attribute) and is_private(node.attr):
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            yield node.attr
    elif isinstance(node, ast.Call):
        yield from _named_by_string(node)


def _named_by_string(call: ast.Call) -> Iterator[str]:
    function = _dotted(call.func).rpartition(".")[2]
    for argument in call.args:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            parts = argument.value.split(".")
            if function in BY_ATTRIBUTE and is_private(argument.value):
                yield argument.value
            if function in BY_MODULE and any(map(is_private, parts)):
                yield f"{argument.value}:"


def _defined_in(tree: ast.AST) -> set[str]:
    """Names that the file itself gives to functions, classes, fields and attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def _operator_aliases(tree: ast.AST) -> dict[str, str]:
    """`aten = torch.ops.aten`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _dotted(node.value).startswith("torch.ops."):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = _dotted(node.value).removeprefix("torch.ops.")
    return found


def _under_ops(name: str, aliases: dict[str, str]) -> str:
    if name.startswith("torch.ops."):
        return name.removeprefix("torch.ops.")
    first, _, rest = name.partition(".")
    return f"{aliases[first]}.{rest}" if first in aliases and rest else ""


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""
