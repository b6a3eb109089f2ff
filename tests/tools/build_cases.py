"""A course of one lesson and one lab, for the tests of the builder."""

import shutil
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
START = """# %% [markdown]
# # Start
#
# {{badges}}

# %% tags=["setup"]
here = setup("00")

# %%
print(6 * 7)
"""
LAB = """# %% [markdown]
# # Lab 01

# %% tags=["setup"]
here = setup("labs/beginner/01")

# %%
def double(x):
    # BEGIN SOLUTION
    y = 2 * x
    return y
    # END SOLUTION


# BEGIN SOLUTION
answer = double(21)
# END SOLUTION
# STUB: answer = ...
print(answer)

# %% [markdown]
# <details><summary>Hint 1</summary>Twice.</details>
"""


def make_course(root: Path) -> Path:
    """Write the sources of the course, with a `utils` that knows `setup` alone."""
    (root / "utils").mkdir()
    (root / "utils/units.py").touch()
    (root / "utils/__init__.py").write_text("def setup(name): print('lesson', name)\n")
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    address = 'Repository = "https://github.com/someone/course"'
    (root / "pyproject.toml").write_text(
        f"{settings.partition('[project.urls]')[0]}[project.urls]\n{address}\n"
    )
    (root / "sources/beginner/01_x").mkdir(parents=True)
    (root / "sources/00_start").mkdir()
    shutil.copy(ROOT / "sources/bootstrap.py", root / "sources")
    (root / "sources/00_start/lesson.py").write_text(START)
    (root / "sources/beginner/01_x/lab.py").write_text(LAB)
    return root


def change(path: Path, old: str, new: str) -> None:
    """Replace a text that must be there."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def read(path: Path) -> nbformat.NotebookNode:
    """A notebook."""
    return nbformat.read(path, as_version=4)
