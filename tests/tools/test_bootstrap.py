"""The first cell of every notebook, run as a process of its own in places where it may stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CELL = ROOT / "sources/bootstrap.py"
# Colab's kernel has imported google.colab before the first cell runs.
COLAB = "import sys, types; sys.modules['google.colab'] = types.ModuleType('google.colab')\n"
REPORT = "\nimport sys; print('ROOT', sys.path[0])\n"
FAKE_GIT = """#!/bin/sh
for target in "$@"; do :; done
echo "$@" > git-arguments
mkdir -p "$target/utils"
cp "{root}/pyproject.toml" "$target/"
cp "{root}/utils/units.py" "{root}/utils/moved.py" "{root}/utils/colab.py" "{root}/utils/__init__.py" "{root}/utils/__init__.pyi" "$target/utils/"
"""


ADDRESS = "https://github.com/someone/big-models-small-memory"


def run_cell(
    folder: Path, before: str = "", python: str = sys.executable, address: str = ADDRESS, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the cell in a folder, and print which folder it put on the path."""
    cell = re.sub('repository="[^"]*"', f'repository="{address}"', CELL.read_text(encoding="utf-8"))
    code = before + cell + REPORT
    command = [python, "-I", "-c", code]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.fixture
def fake_git(tmp_path: Path) -> str:
    """A PATH whose git copies what the cell looks for instead of fetching it."""
    git = tmp_path / "bin/git"
    git.parent.mkdir()
    git.write_text(FAKE_GIT.format(root=ROOT))
    git.chmod(0o755)
    return f"{git.parent}:/usr/bin:/bin"


def test_the_cell_is_small_and_needs_nothing() -> None:
    text = CELL.read_text(encoding="utf-8")
    imports = [line.split()[1].split(".")[0] for line in text.split("\n") if "import " in line[:7]]
    assert len(text.splitlines()) <= 25
    assert imports
    assert set(imports) <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "folder", [".", "sources", "tools", "tests", "utils/memory", ".github/workflows"]
)
def test_finds_the_course_from_any_folder_in_it(folder: str) -> None:
    done = run_cell(ROOT / folder)
    assert done.stdout == f"ROOT {ROOT}\n", done.stderr


def test_outside_the_course_it_says_what_to_do(tmp_path: Path) -> None:
    done = run_cell(tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"RuntimeError: The course was not found above {tmp_path}. Open this")
    assert "git clone" in last


def test_a_folder_that_only_looks_alike_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils/units.py").touch()
    assert "was not found" in run_cell(tmp_path).stderr


def test_a_kernel_without_torch_says_which_to_choose() -> None:
    hide = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
    done = run_cell(ROOT, before=hide)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"RuntimeError: This kernel ({sys.executable}) lacks what the course")
    assert "Choose the kernel of the course's .venv" in last


def test_colab_clones_once(tmp_path: Path, fake_git: str) -> None:
    done = run_cell(tmp_path, before=COLAB, PATH=fake_git)
    assert done.stdout == f"ROOT {tmp_path / 'big-models-small-memory'}\n", done.stderr
    arguments = tmp_path / "git-arguments"
    assert arguments.read_text().startswith("clone --quiet --depth=1 https://")
    arguments.unlink()
    run_cell(tmp_path, before=COLAB, PATH=fake_git)
    assert not arguments.exists()


def test_without_an_address_colab_uses_what_was_put_there(tmp_path: Path, fake_git: str) -> None:
    done = run_cell(tmp_path, before=COLAB, address="", PATH=fake_git)
    assert not (tmp_path / "git-arguments").exists()
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith("inside a copy of the repository: clone or download it, then make lab.")
    run_cell(tmp_path, before=COLAB, PATH=fake_git)  # puts a copy there
    done = run_cell(tmp_path, before=COLAB, address="", PATH=fake_git)
    assert done.stdout == f"ROOT {tmp_path / 'big-models-small-memory'}\n", done.stderr


def test_colab_without_a_network_says_what_to_do(tmp_path: Path, fake_git: str) -> None:
    (tmp_path / "bin/git").write_text("#!/bin/sh\nexit 128\n")
    done = run_cell(tmp_path, before=COLAB, PATH=fake_git)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: The course was not found")
