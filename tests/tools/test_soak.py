"""`make soak`: each setting is tried, and one that fails is named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import soak  # noqa: E402

SHOWS = "import os\ndef test_shows(): assert os.environ.get('ONEDNN_MAX_CPU_ISA') != 'AVX2'\n"


def test_every_setting_meets_every_number_of_threads() -> None:
    found = list(soak.cases({"sse4_1", "avx2"}))
    assert len(found) == len({case.name for case in found}) == 7 * 3
    assert {case.environment["OMP_NUM_THREADS"] for case in found} == {"1", "2", "8"}
    lacking = {case.environment.get("ONEDNN_MAX_CPU_ISA") for case in found if case.missing}
    assert lacking == {"AVX512_CORE", "AVX512_CORE_BF16"}


def test_flags_are_read_where_the_system_tells_them(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: one\nflags\t\t: sse4_1 avx2\nflags\t\t: sse4_1 avx2\n")
    assert {"sse4_1", "avx2"} <= soak.cpu_flags(file)
    assert soak.cpu_flags(tmp_path / "none") == set()


def test_the_byte_asserting_tests_are_there() -> None:
    assert all((ROOT / "tests" / name).is_file() for name in soak.BYTE_TESTS)


@pytest.mark.slow  # it starts pytest five times, for what runs in `make soak` alone
def test_a_kernel_that_fails_is_named_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
    test = tmp_path / "test_shows.py"
    test.write_text(SHOWS)
    wanted = [case for case in soak.cases({"sse4_1", "avx2"}) if "8 threads" in case.name]
    assert soak.kernels([test], wanted) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED     ONEDNN_MAX_CPU_ISA=AVX2, 8 threads" in lines
    assert (
        "not tried  ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, 8 threads: this CPU lacks avx512_bf16"
        in lines
    )
    assert sum(line.startswith("passed") for line in lines) == 4


def test_lessons_run_one_size_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_SCALE", "tiny")
    for name, code in [
        ("00_start", "import os; assert os.environ['COURSE_SCALE'] == 'small'"),
        ("01_wrong", "assert False, 'too small'"),
    ]:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
        path = tmp_path / "notebooks" / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(book, path)
    assert soak.main(["lessons"], tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("00_start  passed")
    assert lines[1].endswith("01_wrong  AssertionError: too small")
