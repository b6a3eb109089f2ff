"""Which lessons use which module of `utils`, read off the imports; nothing is run.

python tools/uses.py     a line for each module: its lines, and the lessons that it serves

A lesson uses a module where its notebooks or its folder's files import a name that the module defines,
or where a module that it uses does. A package's `__init__` only says where names lie, so it is no use of
all that it offers. Tests and `evidence` count for no lesson.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/architecture.md")
MOST_ENTRIES = 20
_ENTRY = re.compile(r"^\| `(?P<name>[\w.]+)` \|.*\|.*\S.*\|$")
_IMPORT = re.compile(r"^ *from (utils[\w.]*) import ([\w, ]+)", re.MULTILINE)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


class Uses:
    """The imports of a course's folder."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        found = [path for house in ("utils", "evidence") for path in (root / house).rglob("*.py")]
        self._files = {self._dotted(path): path for path in sorted(found)}
        self._packages = {n for n, path in self._files.items() if path.name == "__init__.py"}
        modules = {n: p for n, p in self._files.items() if n.startswith("utils.")}
        self.modules = {n: p for n, p in modules.items() if n not in self._packages}

    def file(self, module: str) -> Path:
        """Where a module stands."""
        return self._files[module]

    @cached_property
    def lessons(self) -> dict[str, list[Path]]:
        """The files of each lesson by its number: "09", "05a". Every notebook begins with one cell."""
        found: dict[str, list[Path]] = {}
        for notebook in sorted((self.root / "sources").rglob("lesson.py")):
            files = [*notebook.parent.rglob("*.py"), self.root / "sources/bootstrap.py"]
            found[notebook.parent.name.partition("_")[0]] = [p for p in files if p.is_file()]
        return found

    @cached_property
    def served(self) -> dict[str, set[str]]:
        """The lessons that each module of `utils` serves."""
        reached = {number: self._reach(paths) for number, paths in self.lessons.items()}
        return {m: {n for n, found in reached.items() if m in found} for m in self.modules}

    def entered(self, entries: Iterable[str]) -> set[str]:
        """The modules that are reached from entry points; a package stands for all that it holds.

        Raises:
            KeyError: there is no such module or package.
        """
        names = [n for entry in entries for n in self._held(entry)]
        return {*names, *self._reach(self._files[name] for name in names)}

    def _held(self, entry: str) -> list[str]:
        if entry not in self._files:
            raise KeyError(f"{PAGE} lists the entry point {entry}, and there is no such module.")
        return [n for n in self._files if n == entry or n.startswith(f"{entry}.")]

    def _reach(self, paths: Iterable[Path]) -> set[str]:
        found: set[str] = set()
        waiting = [name for path in paths for name in self._used(path)]
        while waiting:
            if (name := waiting.pop()) not in found:
                found.add(name)
                waiting += self._used(self._files[name])
        return found

    @cache  # noqa: B019 (a run makes one of these)
    def _used(self, path: Path) -> frozenset[str]:
        """The modules whose names a file takes."""
        return frozenset(
            name for node in ast.walk(_tree(path)) for name in self._of_node(node, path)
        )

    def _of_node(self, node: ast.AST, path: Path) -> Iterator[str]:
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield from self._defining(node.module or "", alias.name)
                if (whole := f"{node.module}.{alias.name}") in self._packages:
                    yield from self._by_attribute(whole, alias.asname or alias.name, path)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in self.modules)
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            yield from self._beginning_with(str(node.values[0].value), path)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from self._of_text(node.value, path)

    def _of_text(self, text: str, path: Path) -> Iterator[str]:
        """A module's name, its file's, or the imports of a script that is written out."""
        name = text.removesuffix(".py").replace("/", ".")
        names = [name, f"{self._dotted(path.parent)}.{name}"] if text.endswith(".py") else [text]
        yield from (n for n in names if n in self.modules)
        for module, names in _IMPORT.findall(text):
            for name in names.split(","):
                yield from self._defining(module, name.split()[0])

    def _beginning_with(self, text: str, path: Path) -> Iterator[str]:
        """The modules that a name such as f"utils.clinic.patients.{name}" may mean."""
        start = self._dotted(path.parent) + text if text.startswith(".") else text
        if start.startswith("utils.") and start.count(".") > 1:
            yield from (name for name in self.modules if name.startswith(start))

    def _by_attribute(self, package: str, name: str, path: Path) -> Iterator[str]:
        """What is taken from a package that was imported whole, or written out as a call."""
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Attribute):
                if isinstance(node.value, ast.Name) and node.value.id == name:
                    yield from self._defining(package, node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                for called in set(re.findall(r"\b(\w+)\(", node.value)) & {*self._offered(package)}:
                    yield from self._defining(package, called)

    def _defining(self, module: str, name: str) -> Iterator[str]:
        """The module that defines a name which is imported from `module`."""
        if module in self._packages:
            home = self._offered(module).get(name, f"{module}.{name}")
            yield from self._defining(home, name) if home != module else ()
        elif module in self._files:
            yield module

    @cache  # noqa: B019
    def _offered(self, package: str) -> dict[str, str]:
        """The names that a package hands out, each with where it takes it from."""
        found: dict[str, str] = {}
        file = self._files[package]
        stub = file.with_suffix(".pyi")
        for node in _tree(stub if stub.is_file() else file).body:
            if isinstance(node, ast.ImportFrom):
                found |= {a.asname or a.name: node.module or "" for a in node.names}
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                pairs = ast.literal_eval(node.value)
                found |= {n: h if "." in h else f"{package}.{h}" for n, h in pairs.items()}
        return found

    def _dotted(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def entry_points(page: str) -> list[str]:
    """The first column of the table under "Entry points"."""
    section = page.partition("\n## Entry points\n")[2].partition("\n## ")[0]
    return [found["name"] for line in section.splitlines() if (found := _ENTRY.match(line))]


def problems(uses: Uses) -> list[str]:
    """A sentence for each module of `utils` that serves one lesson alone, or none."""
    entries = entry_points((uses.root / PAGE).read_text(encoding="utf-8"))
    if len(entries) > MOST_ENTRIES:
        return [
            f"{PAGE} lists {len(entries)} entry points, more than {MOST_ENTRIES}: take one out."
        ]
    entered = uses.entered(entries)
    return [
        _sentence(module, *lessons)
        for module, lessons in uses.served.items()
        if len(lessons) < 2 and module not in entered
    ]


def _sentence(module: str, lesson: str = "") -> str:
    if lesson:
        return (
            f"{module} serves lesson {lesson} alone. Move it to that lesson's folder, where it is "
            f"utils.lessons.lesson_{lesson}.{module.rpartition('.')[2]}, and give utils/moved.py its name of "
            "before."
        )
    return (
        f"{module} serves no lesson. Take it out with its test, move it to evidence/ if that needs it, or list "
        f"the way in to it under Entry points in {PAGE}, with a reason."
    )


def main() -> int:
    """Print the table, then what is wrong; 1 where something is."""
    uses = Uses()
    for module, lessons in uses.served.items():
        lines = len(uses.file(module).read_text(encoding="utf-8").splitlines())
        print(f"{lines:>5} {module:<45} {' '.join(sorted(lessons))}")
    found = problems(uses)
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
