"""The course's modules that a script imports, and theirs, as text: what runs without the course.

They keep their places, `utils/parallel/...` and `utils/models/...`, so that no line is rewritten:
what a folder holds is, letter by letter, what the tests have tried. The packages that they lie in
import more of the course, so their `__init__.py` are replaced; `utils.parallel` imports lazily and
keeps its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from utils import parallel

ROOT = Path(__file__).parents[3]
COURSE = "utils"
LAZY = "utils.parallel"
LIGHT = '"""Copied from the course Big Models, Small Memory: what train.py imports."""\n'


def modules(script: str) -> dict[str, str]:
    """Texts by path, such as "utils/parallel/shard.py", in the order of paths.

    Raises:
        ValueError: something imports a package of the course as a whole, which would bring it all.
    """
    found: dict[str, str] = {}
    waiting = list(_imported(script))
    while waiting:
        name = waiting.pop()
        path = name.replace(".", "/") + ".py"
        if path not in found:
            found[path] = _text(name, path)
            waiting += _imported(found[path])
    packages = {parent.as_posix() for path in found for parent in Path(path).parents} - {"."}
    for package in packages:
        own = package.replace("/", ".") == LAZY
        path = f"{package}/__init__.py"
        found[path] = (ROOT / path).read_text(encoding="utf-8") if own else LIGHT
    return dict(sorted(found.items()))


def _text(name: str, path: str) -> str:
    if not (ROOT / path).is_file():
        raise ValueError(f"{name} is no module of its own; import from the file that defines it.")
    return (ROOT / path).read_text(encoding="utf-8")


def _imported(text: str) -> Iterator[str]:
    """Modules of the course that run when the text does."""
    for node in _running(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == LAZY:
            yield from (f"{LAZY}.{parallel.HOME[alias.name]}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and _of_course(node.module or ""):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _of_course(alias.name))


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _running(node)


def _of_course(module: str) -> bool:
    return module.split(".")[0] == COURSE
