"""Modules under the names that they had: labs that somebody copied last year still import them.

`utils.labs.budget_17` was what is `utils.lessons.lesson_17.budget` now. One finder, asked last, says
where a module is today.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OF_A_LESSON = re.compile(r"utils\.labs\.(?P<what>\w+)_(?P<number>\d\d)(?P<rest>(\.\w+)*)")
_RENAMED = {"lab": "checks", "ranks": "workers", "slurm": "job"}
_PATIENTS = "utils.labs.cases_10"  # the capstone examines them too
_OTHERS = {
    "utils.labs.wards_10": "utils.clinic.lab_ward",
    "utils.labs.sitting": "utils.lessons.lesson_99.sitting",
    "utils.labs.results_page": "utils.lessons.lesson_99.results_page",
    "utils.labs.hand_ins": "utils.lessons.lesson_99.hand_ins",
}


def today(name: str) -> str:
    """The name that a module of an earlier version has today; "" for one that is not known."""
    if name in _OTHERS:
        return _OTHERS[name]
    if name.startswith(_PATIENTS):
        return name.replace(_PATIENTS, "utils.clinic.lab_patients")
    if not (old := _OF_A_LESSON.fullmatch(name)):
        return ""
    what = _RENAMED.get(old["what"], old["what"])
    return f"utils.lessons.lesson_{old['number']}.{what}{old['rest']}"


class _Today(Loader):
    """Hands out the module of today in place of the one that was asked for."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(today(module.__name__))


class Finder(MetaPathFinder):
    """Finds modules by their earlier names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec where the module has another name today."""
        return ModuleSpec(fullname, _Today()) if today(fullname) else None


def find_by_earlier_names() -> None:
    """From now on, imports of earlier names find the modules of today."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
