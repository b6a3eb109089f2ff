"""The lessons' own code by number: `from utils.lessons.lesson_09.plans import CARDS`.

A lesson is a folder of `sources/`, with a name that Python cannot import, such as `09_sharding`. As
`utils.lessons.lesson_09` it can be, in ranks and other processes too: they find a function by the
name of its module, and with that name comes this package.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "sources"


def folders(sources: Path = SOURCES) -> dict[str, Path]:
    """Folder of each lesson by its number: "09", "05a".

    Raises:
        ValueError: two lessons have one number.
    """
    found: dict[str, Path] = {}
    whole_course = (p.parent for p in sources.glob("[0-9][0-9]*_*/lesson.py"))  # of no tier
    for folder in sorted([*whole_course, *sources.glob("*/[0-9][0-9]*_*")], key=lambda p: p.name):
        if not folder.is_dir():
            continue
        number = folder.name.split("_")[0]
        if number in found:
            raise ValueError(
                f"Two lessons have the number {number}: {found[number]} and {folder}. Rename one."
            )
        found[number] = folder
    return found


def announce(number: str, folder: Path) -> None:
    """Make a lesson's folder a package, whose modules are found in the usual way."""
    name = f"{__name__}.lesson_{number}"
    spec = ModuleSpec(name, None, origin=str(folder), is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[name] = module_from_spec(spec)
    setattr(sys.modules[__name__], f"lesson_{number}", sys.modules[name])


for _number, _folder in folders().items():
    announce(_number, _folder)
