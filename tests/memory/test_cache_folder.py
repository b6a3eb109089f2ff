"""Where the compiled allocator lies: it is loaded as code, so nobody else may have put it there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from utils.memory import compile as compiling
from utils.memory.compile import CompilerError, cache_folder, compile_library, library_path

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such owners and modes")


@pytest.fixture(autouse=True)
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that cannot be written, so that the shared temporary folder is what is left."""
    (tmp_path / "home").write_text("in the way")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The libraries that would have been compiled."""
    built: list[Path] = []

    def build(_compiler: str, target: Path) -> None:
        built.append(target)
        target.write_bytes(b"compiled")
        target.chmod(0o700)

    monkeypatch.setattr(compiling, "_build", build)
    monkeypatch.setattr(compiling, "find_compiler", lambda: "c++")
    return built


def mine(tmp_path: Path) -> Path:
    return tmp_path / f"shared/big-models-small-memory-{os.geteuid()}"


def test_in_a_shared_folder_it_is_the_users_own_and_closed(tmp_path: Path) -> None:
    assert cache_folder() == mine(tmp_path)
    assert mine(tmp_path).stat().st_mode & 0o777 == 0o700
    mine(tmp_path).chmod(0o777)
    assert cache_folder().stat().st_mode & 0o777 == 0o700


def test_a_folder_of_someone_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda real=os.geteuid(): real + 1)  # noqa: B008
    mine(tmp_path).mkdir()  # by the real user: for this one, a stranger
    with pytest.raises(CompilerError, match=r"yours alone.*XDG_CACHE_HOME"):
        cache_folder()


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    mine(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CompilerError, match="yours alone"):
        cache_folder()


def test_a_planted_library_is_not_loaded(tmp_path: Path, builds: list[Path]) -> None:
    for folder in ("big-models-small-memory", mine(tmp_path).name):
        (tmp_path / "shared" / folder).mkdir(exist_ok=True)
        planted = tmp_path / "shared" / folder / library_path().name
        planted.write_bytes(b"planted")
        planted.chmod(0o777)  # anyone could have written it
    assert compile_library() == planted
    assert builds == [planted]
    assert planted.read_bytes() == b"compiled"
    assert compile_library() == planted
    assert len(builds) == 1  # its own work is kept


@pytest.mark.parametrize("kind", ["link", "stranger"])
def test_a_library_that_is_no_file_of_the_user_is_built_anew(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    target = library_path()
    if kind == "link":
        (tmp_path / "elsewhere.so").write_bytes(b"planted")
        target.symlink_to(tmp_path / "elsewhere.so")
    else:
        target.write_bytes(b"planted")
        target.chmod(0o700)
        monkeypatch.setattr(compiling, "library_path", lambda: target)
        monkeypatch.setattr(os, "geteuid", lambda real=os.geteuid(): real + 1)  # noqa: B008
    compile_library()
    assert builds == [target]
