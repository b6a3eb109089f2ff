"""DeepSpeed's extension: built in a folder with a space, and honest when it cannot be."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils import cpp_extension

from utils.memory.compile import CompilerError, find_compiler
from utils.shims.torch_ import quote_library_path
from utils.techniques import deepspeed as loading
from utils.techniques import deepspeed_ops as ops

NINJA = """Error building extension 'deepspeed_shm_comm': [1/3] c++ -MMD -c shm.cpp -o shm.o
FAILED: [code=1] shm.o
c++ -MMD -MF shm.o.d {flags} -c shm.cpp -o shm.o
shm.cpp:3:10: fatal error: immintrin.h: No such file or directory
compilation terminated.
ninja: build stopped: subcommand failed."""


def no_compiler() -> bool:
    try:
        find_compiler()
    except CompilerError:
        return True
    return False


@pytest.mark.skipif(no_compiler(), reason="needs a C++ compiler")
def test_an_extension_links_where_torch_lies_in_a_folder_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "with spaces and ümlauts"
    packages.mkdir()
    (packages / "torch").symlink_to(Path(torch.__file__).parent)
    monkeypatch.setattr(torch, "__file__", str(packages / "torch/__init__.py"))
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(packages / "torch/lib"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(packages / "extensions"))
    source = packages / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    quote_library_path()
    built = cpp_extension.load("answer", [str(source)], is_python_module=False)
    assert Path(built).is_file()
    assert f"-L'{packages}/torch/lib'" in (Path(built).parent / "build.ninja").read_text()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails as ninja reports it."""

    def load(verbose: bool) -> None:
        raise RuntimeError(NINJA.format(flags="-I/include " * 500))

    builder = SimpleNamespace(is_compatible=lambda: True, load=load)
    accelerator = SimpleNamespace(device_name=lambda: "cpu", create_op_builder=lambda _: builder)
    fake = SimpleNamespace(get_accelerator=lambda: accelerator)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", fake)
    monkeypatch.setattr(loading, "load_deepspeed", lambda _: None)
    monkeypatch.setattr(loading, "deepspeed_missing", lambda _: None)
    loading.deepspeed_problem.cache_clear()
    yield
    loading.deepspeed_problem.cache_clear()


def test_a_failed_build_shows_ninjas_failed_lines_and_the_error(broken: None) -> None:
    problem = loading.deepspeed_problem()
    assert problem is not None
    first, *rest = problem.splitlines()
    assert "could not be compiled, so cells that run ZeRO are skipped" in first
    assert "FAILED: [code=1] shm.o" in rest
    assert any("fatal error: immintrin.h" in line for line in rest)
    assert max(map(len, rest)) <= 160 and len(rest) <= 6


def test_a_failed_build_is_no_success_of_the_command(
    broken: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        loading.main()
    assert ended.value.code and "FAILED" in str(ended.value.code)
    code = "import sys; sys.exit('FAILED: shm.o')"  # what Python makes of such an end
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "FAILED: shm.o\n")


@pytest.fixture
def no_op_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """DeepSpeed is there, and none of its helpers is built."""
    monkeypatch.setattr(ops, "EXTENSIONS", tmp_path)
    monkeypatch.setattr(ops, "deepspeed_problem", lambda: None)
    monkeypatch.setattr(ops, "load_deepspeed", lambda: None)
    ops.op_problem.cache_clear()
    yield tmp_path
    ops.op_problem.cache_clear()


@pytest.mark.parametrize(
    ("name", "how"),
    [("cpu-adam", "`make offload` builds"), ("async-io", "`make offload OPS=async-io` builds")],
)
def test_a_helper_that_is_not_built_says_what_is_skipped(
    no_op_yet: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    monkeypatch.setattr(ops, "build", lambda *_: pytest.fail("compiled to answer a question"))
    problem = ops.op_problem(name)
    assert problem and "is not built here, so cells" in problem and how in problem


def test_a_helper_of_other_versions_is_not_used(
    no_op_yet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "op_builder", lambda _: object())
    monkeypatch.setattr(ops, "build", lambda *_: None)
    folder = no_op_yet / "cpu_adam"
    folder.mkdir()
    (folder / "cpu_adam.so").write_bytes(b"")
    assert ops.build_op("cpu-adam") is None and ops.op_problem("cpu-adam") is None
    (folder / "built_for.txt").write_text("torch 1.0")
    ops.op_problem.cache_clear()
    assert "was built for other versions" in (ops.op_problem("cpu-adam") or "")


def test_a_helper_that_was_copied_with_the_course_is_not_used(
    no_op_yet: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its build file names the old folder, so the first use would compile all of it."""
    monkeypatch.setattr(ops, "op_builder", lambda _: object())
    monkeypatch.setattr(ops, "build", lambda *_: None)
    folder = no_op_yet / "cpu_adam"
    folder.mkdir()
    (folder / "cpu_adam.so").write_bytes(b"")
    assert ops.build_op("cpu-adam") is None, "built in this folder"
    shutil.copytree(no_op_yet, tmp_path / "copy")
    monkeypatch.setattr(ops, "EXTENSIONS", tmp_path / "copy")
    ops.op_problem.cache_clear()
    assert "or in another folder" in (ops.op_problem("cpu-adam") or ""), "built in another folder"


def test_building_says_so_before_and_after(
    no_op_yet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "op_builder", lambda _: None)
    monkeypatch.delenv("COURSE_REQUIRE_ALL", raising=False)
    with pytest.raises(SystemExit, match=r"needs libaio with its headers"):
        ops.main(["async-io"])
    ops.main(["--if-it-can", "async-io"])
    said = capsys.readouterr().out
    assert said.count("Building DeepSpeed's async I/O, once: one to three minutes") == 2
    assert "cannot be built here" in said
    monkeypatch.setenv("COURSE_REQUIRE_ALL", "1")
    with pytest.raises(SystemExit, match="cannot be built here"):
        ops.main(["--if-it-can", "cpu-adam"])


def test_helpers_have_names() -> None:
    with pytest.raises(ValueError, match="cpu-adam, async-io"):
        ops.op_problem("gpu-adam")
