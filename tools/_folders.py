"""What is wrong with the lessons' folders, before anything is built: each a sentence with its cure.

Files are read, none is run: a folder that cannot be imported is to be told too.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

_NOTEBOOKS = {"lesson.py", "lab.py", "page.py"}
_LESSONS = "utils.lessons.lesson_"
_DECLARE_MISTAKES = {"mistake", "mistakes"}


def two_of_one_number(root: Path) -> str:
    """The sentence on two lessons of one number; "" if there are none."""
    found: dict[str, Path] = {}
    for folder in lesson_folders(root):
        other = found.setdefault(_number(folder), folder)
        if other != folder:
            return (
                f"Two lessons have the number {_number(folder)}: {_short(other, root)} and "
                f"{_short(folder, root)}. Rename one."
            )
    return ""


def folder_problems(root: Path, chosen: Collection[Path]) -> list[str]:
    """A sentence for each fault of the chosen folders, which are relative to the root."""
    twins = two_of_one_number(root)
    return ([twins] if twins else []) + [
        f"{_short(folder, root)}/{problem}"
        for folder in lesson_folders(root)
        if folder.relative_to(root) in chosen
        for problem in _problems_of(folder)
    ]


def _problems_of(folder: Path) -> Iterator[str]:
    try:
        yield from _wrong_lab(folder)
        yield from _foreign_imports(folder)
    except SyntaxError as error:
        name = Path(error.filename or "").name
        yield f"{name}:{error.lineno}: Python cannot read this line: {error.msg}. Mend it."


def lesson_folders(root: Path) -> list[Path]:
    """The folders of all lessons, in the order of their numbers: of a tier, or of the whole course."""
    sources = root / "sources"
    of_no_tier = [path.parent for path in sources.glob("[0-9][0-9]*_*/lesson.py")]
    folders = [path for path in sources.glob("*/[0-9][0-9]*_*") if path.is_dir()]
    return sorted([*of_no_tier, *folders], key=lambda path: path.name)


def _number(folder: Path) -> str:
    return folder.name.partition("_")[0]


def _short(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _wrong_lab(folder: Path) -> Iterator[str]:
    """Exercises of a lab that no check judges, or whose mistakes nobody names."""
    number, exercises = _number(folder), _exercises(folder / "lab.py")
    if not exercises:
        return
    if elsewhere := [name for name in exercises if name.partition(".")[0] != number]:
        yield f'lab.py: check("{elsewhere[0]}", ...) is of another lesson. Write "{number}." before the exercise.'
        return
    names = [name.partition(".")[2] for name in exercises]
    if not (folder / "checks.py").is_file():
        yield f"checks.py is missing, and lab.py asks for {names[0]!r}. Write its check: a Question, an Exercise or a function."
        return
    judged = _defined(folder / "checks.py")
    for name in names:
        if name not in judged:
            yield f"checks.py has no {name!r}, for which lab.py asks. Write its check, or mend the name."
    yield from _without_mistakes(folder, names)


def _without_mistakes(folder: Path, names: list[str]) -> Iterator[str]:
    path = folder / "mistakes.py"
    if not path.is_file():
        yield "mistakes.py is missing. Write `known = KnownAnswers()`, and a wrong answer for each exercise."
        return
    told = _with_mistakes(path)
    for name in names:
        if name not in told:
            yield (
                f"mistakes.py has no mistake of {name!r}. Name one, with words of the sentence that it "
                f'earns: known.mistakes("{name}", name=(answer, "words")).'
            )


def _foreign_imports(folder: Path) -> Iterator[str]:
    """Imports by which a lesson's folder leaves it: of another's, or upwards out of itself."""
    for path in sorted(folder.rglob("*.py")):
        if path.name in _NOTEBOOKS:
            continue
        deepest = len(path.relative_to(folder).parts)
        for name in _imported(path):
            dots = len(name) - len(name.lstrip("."))
            own = f"{_LESSONS}{_number(folder)}."
            if name.startswith(own):
                yield (
                    f"{path.relative_to(folder).as_posix()} imports {name}, which is this lesson's own. "
                    f"Write it with dots: {'.' * deepest}{name.removeprefix(own)}."
                )
            elif name.startswith(_LESSONS) or dots > deepest:
                yield (
                    f"{path.relative_to(folder).as_posix()} imports {name}, which is no part of this lesson. "
                    "Move what both use to utils/, and import it from there."
                )


def _imported(path: Path) -> list[str]:
    """The modules that a file names in its import statements; relative ones with their dots."""
    found: list[str] = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [
                f"{module}.{alias.name}" if module == "utils.lessons" else module
                for alias in node.names
            ]
    return sorted(set(found))


def _exercises(lab: Path) -> list[str]:
    """What a lab checks, in its order: "01.state_bytes"."""
    if not lab.is_file():
        return []
    calls = [node for node in ast.walk(_tree(lab)) if isinstance(node, ast.Call)]
    named = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "check" and c.args]
    texts = [c.args[0].value for c in named if isinstance(c.args[0], ast.Constant)]
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))


def _defined(path: Path) -> set[str]:
    """The names that a module has of its own or by an import."""
    found: set[str] = set()
    for node in _tree(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found


def _with_mistakes(path: Path) -> set[str]:
    """The exercises of which a file of mistakes declares one."""
    calls = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]
    declared = [
        c
        for c in calls
        if isinstance(c.func, ast.Attribute)
        and c.func.attr in _DECLARE_MISTAKES
        and c.args
        and isinstance(c.args[0], ast.Constant)
    ]
    return {str(call.args[0].value) for call in declared if isinstance(call.args[0], ast.Constant)}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))
