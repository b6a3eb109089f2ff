"""What holds for the code of every lesson and lab."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jupytext
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from _folders import lesson_folders  # noqa: E402

SCRIPTS = [
    script
    for folder in lesson_folders(ROOT)
    for script in sorted(folder.glob("l[ae]*.py"))
    if script.name in ("lesson.py", "lab.py")
]
LEAST_WORDS = 3


def bare_asserts(text: str) -> Iterator[str]:
    """The asserts of a percent script that say nothing, or too little, to whom they stop."""
    for cell in jupytext.reads(text, fmt="py:percent").cells:
        tree = ast.parse(cell.source) if cell.cell_type == "code" else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert) and len(words(node.msg)) < LEAST_WORDS:
                yield ast.unparse(node)


def words(message: ast.expr | None) -> list[str]:
    """The words of a text, formatted or not."""
    if message is None:
        return []
    parts = [node.value for node in ast.walk(message) if isinstance(node, ast.Constant)]
    return " ".join(part for part in parts if isinstance(part, str)).split()


@pytest.mark.parametrize("script", SCRIPTS, ids=[str(p.relative_to(ROOT)) for p in SCRIPTS])
def test_every_assert_says_what_to_do(script: Path) -> None:
    assert list(bare_asserts(script.read_text(encoding="utf-8"))) == []


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 40


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("assert x < 3", 1),
        ('assert x < 3, ""', 1),
        ('assert x < 3, "too large"', 1),
        ("assert x < 3, x", 1),
        ('assert x < 3, "too large: lower x"', 0),
        ('assert x < 3, f"{x} is too large"', 0),
        ("def f():\n    for i in x:\n        assert i", 1),
    ],
)
def test_asserts_that_say_nothing_are_found(code: str, count: int) -> None:
    text = f"# %% [markdown]\n# assert nothing\n\n# %%\n{code}\n"
    assert len(list(bare_asserts(text))) == count


# What pyproject.toml calls optional, by the name it is imported by.
OPTIONAL = {"torchft", "kubernetes_validate", "kubeflow", "kubeflow_trainer_api", "wandb", "tensorboard",
            "sphinx", "myst_nb", "sphinx_book_theme", "sphinx_copybutton", "latex2mathml", "axe_playwright_python", "megatron", "ray",
            "sky"}  # fmt: skip


def imported(text: str) -> set[str]:
    """The packages that a module names in its import statements."""
    nodes = list(ast.walk(ast.parse(text)))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in (*plain, *named)}


def test_types_come_out_alike_with_and_without_optional_packages() -> None:
    """The checker of types cannot resolve the import of what is not installed."""
    files = [*(ROOT / "utils").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    found = {path.name: imported(path.read_text(encoding="utf-8")) & OPTIONAL for path in files}
    assert {name: names for name, names in found.items() if names} == {}
    assert imported("def f():\n    import a.b\n    from c.d import e") == {"a", "c"}


def test_every_optional_package_is_known_here() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["optional-dependencies"]
    needs = [
        Requirement(need).name for name in ("megatron", "clusters", "site") for need in groups[name]
    ]
    unknown = {
        name for name in needs if name.replace("-", "_").removesuffix("_core") not in OPTIONAL
    }
    assert unknown == set(), "name what they are imported by in OPTIONAL"
