"""A kit for machines without a network; slow: it is packed and used in a network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import wheelhouse  # noqa: E402

# Loopback alone, as on a laptop with its network off.
AS_ROOT = () if os.name == "nt" or os.geteuid() == 0 else ("--map-root-user", "--user")
ALONE = ("unshare", *AS_ROOT, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
LESSON = "notebooks/beginner/01_where_memory_goes.ipynb"
NBVAL = ("-m", "pytest", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=300")


def test_the_course_goes_along_without_what_git_ignores(tmp_path: Path) -> None:
    wheelhouse.copy_course(ROOT, tmp_path)
    for name in (
        "Makefile",
        "utils/install.py",
        "constraints.txt",
        LESSON,
        "docs/vendor/README.md",
    ):
        assert (tmp_path / name).is_file(), f"{name} is part of the kit"
    assert not (tmp_path / ".venv").exists() and not (tmp_path / "build").exists()


def small_course(folder: Path, with_git: bool) -> Path:
    """A copy of a course, with what learners and others leave in it."""
    for name in (
        "Makefile",
        "labs/01.ipynb",
        "utils/labs/a.py",
        "labs/__pycache__/a.pyc",
        ".env",
        "labs/.env",
        "my_labs/scoreboard.json",
        "handed_in/anna.json",
        "data/cifar",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".gitignore").write_text("__pycache__/\n")
    secret = folder.parent / "secret.txt"
    secret.write_text("secret")
    for name, place in (
        ("labs/out.ipynb", secret),
        ("labs/gone.ipynb", "nowhere"),
        ("labs/env.ipynb", "../.env"),
        ("labs/same.ipynb", "01.ipynb"),
        ("utils/folder", folder / "my_labs"),
    ):
        (folder / name).symlink_to(place)
    if with_git:
        links = [f"labs/{name}.ipynb" for name in ("out", "gone", "env", "same")]
        for command in (
            ["init", "-q"],
            ["add", "Makefile", ".gitignore", "labs/01.ipynb", "utils/labs/a.py", *links],
        ):
            subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such links")
@pytest.mark.parametrize("with_git", [True, False])
def test_nothing_goes_along_that_is_not_the_courses(
    with_git: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, kit = small_course(tmp_path / "in", with_git), tmp_path / "kit"
    wheelhouse.copy_course(root, kit)
    packed = {path.relative_to(kit).as_posix() for path in kit.rglob("*") if path.is_file()}
    assert packed == {
        ".gitignore",
        "Makefile",
        "labs/01.ipynb",
        "labs/same.ipynb",
        "utils/labs/a.py",
    }
    assert not any(path.is_symlink() for path in kit.rglob("*"))
    assert ("This copy is no clone" in capsys.readouterr().out) is not with_git


def test_a_copy_without_git_packs_the_same_as_a_clone() -> None:
    tracked, problem = wheelhouse.tracked_files(ROOT)
    if problem:
        pytest.skip(problem)
    assert {name.partition("/")[0] for name in tracked} == set(wheelhouse.COURSE)


def test_all_that_set_up_installs_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command))
    wheelhouse.collect(ROOT, tmp_path, "https://index")
    pair, rest = asked
    assert "--no-deps" in pair and any(need.startswith("torch==") for need in pair), pair
    assert any(need.startswith("uv>=") for need in rest), "set-up installs uv first"
    assert any(need.startswith("nbval") for need in rest), "the first lesson is tested by nbval"
    assert str(ROOT / "constraints.txt") in rest, "in the versions that were tried"


def test_a_path_with_spaces_is_refused_in_a_sentence(tmp_path: Path) -> None:
    kit = tmp_path / "my kit"
    kit.mkdir()
    (kit / "setup.sh").write_text(wheelhouse.SET_UP)
    done = subprocess.run(["sh", str(kit / "setup.sh")], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.startswith("Put this folder where its path has no spaces"), done.stdout


def test_a_failed_download_says_that_the_kit_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise subprocess.CalledProcessError(1, ["pip", "wheel"])

    monkeypatch.setattr(wheelhouse, "copy_course", lambda *_: None)
    monkeypatch.setattr(wheelhouse, "collect", fail)
    assert wheelhouse.main(["--to", str(tmp_path), "--torch-index", "https://index"]) == 1
    assert "The kit is not whole" in capsys.readouterr().err


@pytest.mark.slow
def test_set_up_and_the_first_lesson_without_a_network(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs Linux with unshare and ip")
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("this system allows no network namespace")
    kit = tmp_path / "kit"
    done = subprocess.run([sys.executable, "tools/wheelhouse.py", "--to", str(kit)], cwd=ROOT)
    assert done.returncode == 0, "the kit was packed"
    run_alone(kit, "sh", "setup.sh")
    python = kit / "course/.venv/bin/python"
    run_alone(kit / "course", str(python), *NBVAL, LESSON)


def run_alone(folder: Path, *command: str) -> None:
    """Run a command without a network; it must succeed, and have had none."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    links = subprocess.run([*ALONE, "ip", "-o", "link"], capture_output=True, text=True)
    assert [line.split(": ")[1] for line in links.stdout.splitlines() if "LOWER_UP" in line] == [
        "lo"
    ], f"there is no network but this machine's own: {links.stdout}"
    done = subprocess.run(
        [*ALONE, *command],
        cwd=folder,
        env=environment | {"UV_CACHE_DIR": str(folder / "build/uv")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
