"""COURSE_REQUIRE_ALL: where everything is meant to be installed, no test is skipped in silence."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest

@pytest.mark.skipif(True, reason="DeepSpeed is not installed")
def test_marked(): ...

def test_skips_itself():
    pytest.skip("no compiler")

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="no GPU")
def test_of_a_gpu(): ...

@pytest.mark.xfail
def test_that_may_fail():
    assert False

def test_runs(): ...
"""
WHOLE_FILE = 'import pytest\npytest.importorskip("no_such_library")\n'


def outcomes(folder: Path, name: str, text: str, required: str, **more: str) -> str:
    """What pytest says of one file of tests, beside the course's conftest.py."""
    shutil.copy(CONFTEST, folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", name]
    settings = {"COURSE_REQUIRE_ALL": required, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **more}
    settings = os.environ | {"COURSE_SKIPPED": ""} | settings
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True).stdout


def test_a_skip_is_a_failure_where_all_is_required(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "test_some.py", TESTS, "1")
    assert "COURSE_REQUIRE_ALL is set, and this was skipped: " in found
    assert "DeepSpeed is not installed" in found and "no compiler" in found
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error in" in found


def test_elsewhere_it_stays_a_skip(tmp_path: Path) -> None:
    assert "1 passed, 3 skipped, 1 xfailed in" in outcomes(tmp_path, "test_some.py", TESTS, "")


@pytest.mark.parametrize(("required", "words"), [("1", "1 error in"), ("", "1 skipped in")])
def test_whole_files(tmp_path: Path, required: str, words: str) -> None:
    found = outcomes(tmp_path, "test_file.py", WHOLE_FILE, required)
    assert words in found and "no_such_library" in found


def test_what_was_skipped_is_listed(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(WHOLE_FILE)
    listed = tmp_path / "build" / "skipped.txt"
    outcomes(tmp_path, "test_some.py", TESTS, "", COURSE_SKIPPED=str(listed))
    tests = ["test_some.py::test_marked", "test_some.py::test_skips_itself"]
    assert listed.read_text().splitlines() == tests, "what needs a GPU waits for one"
    outcomes(tmp_path, "test_file.py", WHOLE_FILE, "", COURSE_SKIPPED=str(listed))
    assert listed.read_text().splitlines() == ["test_file.py"]


def test_a_kernel_that_does_not_start_is_started_once_more() -> None:
    spec = importlib.util.spec_from_file_location("for_notebooks", ROOT / "conftest.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    calls: list[int] = []

    def start(fails: int) -> str:
        calls.append(fails)
        if len(calls) <= fails:
            raise RuntimeError("Kernel died before replying to kernel_info")
        return "started"

    assert module.retried(start)(1) == "started" and len(calls) == 2
    calls.clear()
    with pytest.raises(RuntimeError, match="Kernel died"):
        module.retried(start)(2)


def test_files_that_start_processes_are_left_out_where_those_are_not_wanted(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_plain.py").write_text("def test_adds(): assert 1 + 1 == 2\n")
    (tmp_path / "test_ranks.py").write_text(
        "from utils import run_ranks\ndef test_no(): assert 0\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--without-processes"]
    settings = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COURSE_SKIPPED": ""}
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)
    assert "1 passed in" in done.stdout, done.stdout + done.stderr
