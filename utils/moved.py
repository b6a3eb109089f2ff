"""Modules under the names that they had: labs that somebody copied last year still import them.

`utils.labs.budget_17` was what is `utils.lessons.lesson_17.budget` now, and `utils.validation` what
is `evidence.validation`. One finder says where a module is today, and runs it for `python -m` too.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

_OF_A_LESSON = re.compile(r"utils\.labs\.(?P<what>\w+)_(?P<number>\d\d)(?P<rest>(\.\w+)*)")
_RENAMED = {"lab": "checks", "ranks": "workers", "slurm": "job"}
# Modules and packages; what lies in a package moved with it.
_OTHERS = {
    "utils.labs.cases_10": "utils.clinic.lab_patients",  # the capstone examines them too
    "utils.labs.wards_10": "utils.clinic.lab_ward",
    "utils.labs.sitting": "utils.lessons.lesson_99.sitting",
    "utils.labs.results_page": "utils.lessons.lesson_99.results_page",
    "utils.labs.hand_ins": "utils.lessons.lesson_99.hand_ins",
    "utils.record": "evidence.record",
    "utils.validation": "evidence.validation",
}


def today(name: str) -> str:
    """The name that a module of an earlier version has today; "" for one that is not known."""
    package, inner = name, ""
    while package.count("."):
        if package in _OTHERS:
            return _OTHERS[package] + inner
        package, _, last = package.rpartition(".")
        inner = f".{last}{inner}"
    if not (old := _OF_A_LESSON.fullmatch(name)):
        return ""
    what = _RENAMED.get(old["what"], old["what"])
    return f"utils.lessons.lesson_{old['number']}.{what}{old['rest']}"


class _Today(InspectLoader):
    """Hands out the module of today in place of the one that was asked for."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(today(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        """What `python -m` runs."""
        spec = importlib.util.find_spec(today(fullname))
        return spec.loader.get_code(spec.name) if spec and spec.loader else None  # type: ignore[attr-defined]

    def get_source(self, fullname: str) -> str | None:
        return None


class Finder:
    """Finds modules by their earlier names."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec where the module has another name today."""
        there = importlib.util.find_spec(name) if (name := today(fullname)) else None
        if there is None:
            return None
        is_package = there.submodule_search_locations is not None
        return ModuleSpec(fullname, _Today(), origin=there.origin, is_package=is_package)


def find_by_earlier_names() -> None:
    """From now on, imports of earlier names find the modules of today.

    Asked first: in a package of today, Python's own finder would make a second module of a file.
    """
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
