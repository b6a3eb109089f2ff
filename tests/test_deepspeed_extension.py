"""DeepSpeed's extension: built in a folder with a space, and honest when it cannot be."""

from __future__ import annotations

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
