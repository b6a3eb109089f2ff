"""Makes the folder of a new lesson: `python tools/new_lesson.py 21 advanced "Title of it"`.

It holds lesson.py, lab.py with one exercise, checks.py, mistakes.py and monday.py (a second half, such
as 21a, the first and the last), copied from `sources/_template/`. They
run as they are: write your own words and code over them. CONTRIBUTING.md says how to go on.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from _folders import lesson_folders

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "sources/_template"
OF_A_LAB = ("lab.py", "checks.py", "mistakes.py")  # a second half, such as 21a, has none
TIERS = ("beginner", "intermediate", "advanced")
USAGE = 'Write: python tools/new_lesson.py NUMBER TIER TITLE, such as 21 advanced "Title of it".'
GO_ON = """{folder}/ is made. Give README.md's table of lessons its row:

| [{number} {title}](notebooks/{tier}/{name}.ipynb) <!-- badges: notebooks/{tier}/{name}.ipynb --><!-- /badges --> \
| 60 | 45 | TODO |

Then write, build and test, as often as you like:

.venv/bin/python tools/build.py {folder}
.venv/bin/python tools/build.py --check
.venv/bin/python -m pytest -k "{number} or lesson" tests/labs/test_exercises.py tests/labs/test_lab_hostile.py {tests}
.venv/bin/python tools/style.py
"""
TESTS = (
    "tests/lessons/test_lesson_texts.py tests/tools/test_repository.py tests/tools/test_workshop.py"
)


class Refused(ValueError):
    """A lesson that cannot be made; its text says what to write instead."""


def make(number: str, tier: str, title: str, root: Path = ROOT) -> Path:
    """Make the folder of a lesson; returns it.

    Raises:
        Refused: the number is taken or is none, there is no such tier, or the title has no words.
    """
    words = re.findall(r"[a-z0-9]+", title.lower())
    if not re.fullmatch(r"\d\d[a-z]?", number):
        raise Refused(f"{number!r} is no number of a lesson: write two digits, as 21, or 05a.")
    if tier not in TIERS:
        raise Refused(f"There is no tier {tier!r}: write one of {', '.join(TIERS)}.")
    if not words or re.search(r'[\n"\\|\[\]]', title):
        raise Refused(
            f"The title {title!r} has no word, or marks that tables cannot hold: write words."
        )
    if taken := [f.name for f in lesson_folders(root) if f.name.startswith(f"{number}_")]:
        raise Refused(f"{number} is the number of {taken[0]}: write one that is free.")
    folder = root / "sources" / tier / f"{number}_{'_'.join(words)}"
    values = {"NUMBER": number, "TIER": tier, "TITLE": title.strip(), "FOLDER": folder.name}
    left_out = ("__pycache__", *OF_A_LAB * number[2:].isalpha())
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns(*left_out))
    for file in folder.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        text = re.sub("|".join(values), lambda found: values[found[0]], text)
        file.write_text(text, encoding="utf-8")
    return folder


def main(arguments: Sequence[str]) -> int:
    """Make the lesson that the arguments name, and say how to go on; 0 if it was made."""
    if len(arguments) != 3:
        print(USAGE, file=sys.stderr)
        return 1
    number, tier, title = arguments
    try:
        folder = make(number, tier, title)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1
    place = {"folder": folder.relative_to(ROOT), "name": folder.name, "tests": TESTS}
    print(GO_ON.format(**place, number=number, tier=tier, title=title.strip()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
