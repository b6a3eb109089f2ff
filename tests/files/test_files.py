"""Temporary folders: gone with their block, their process, or at the next one's start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from utils.files import scratch, scratch_folder

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import os, signal, sys
sys.path.insert(0, {root!r})
from utils.files import scratch, scratch_folder

kept = scratch_folder("lesson")
(kept / "data").write_text("x")
if {fork} and os.fork() == 0:
    sys.exit()
{wait}
with scratch("launch") as folder:
    print(folder, flush=True)
    {end}
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def holder(end: str, fork: bool = False) -> subprocess.Popen[str]:
    wait = "os.wait()" if fork else ""
    text = HOLDER.format(root=str(ROOT), end=end, fork=fork, wait=wait)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)


def test_a_folder_is_gone_after_its_block(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad batch"):
        with scratch("launch") as folder:
            assert (folder.name, folder.stat().st_mode & 0o777) == ("launch", 0o700)
            (folder / "log").write_text("x")
            raise ValueError("bad batch")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", ".", "..", " ", "a/b", "a\\b", "a\0b", "x" * 61])
def test_what_cannot_name_a_folder_is_a_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a folder"):
        scratch_folder(name)
    with pytest.raises(ValueError, match="there is no folder"), scratch("run", tmp_path / "none"):
        pass
    assert os.listdir(tmp_path) == []


def test_folders_go_when_their_process_ends(tmp_path: Path) -> None:
    with holder(end="pass", fork=True) as process:
        assert process.communicate(timeout=60)[0].strip().endswith("launch")
    assert process.returncode == 0 and os.listdir(tmp_path) == []


def test_what_a_killed_process_left_goes_at_the_next_start(tmp_path: Path) -> None:
    with holder(end="os.kill(os.getpid(), signal.SIGKILL)") as process:
        left = Path(process.communicate(timeout=60)[0].strip())
    assert process.returncode == -signal.SIGKILL and left.is_dir()
    assert len(os.listdir(tmp_path)) == 2
    with scratch("next"):
        assert len(os.listdir(tmp_path)) == 1 and not left.exists()


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    with holder(end="signal.pause()") as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        mine = scratch_folder("mine")
        with scratch("next"):
            assert held.is_dir() and mine.is_dir()
        process.kill()
    with scratch("next"):
        assert not held.exists() and mine.is_dir()


def test_nothing_else_is_swept(tmp_path: Path) -> None:
    """Folders without the lock's file, and links to what is not ours."""
    with holder(end="os.kill(os.getpid(), signal.SIGKILL)") as process:
        left = Path(process.communicate(timeout=60)[0].strip()).parent
    (tmp_path / "elsewhere").mkdir()
    elsewhere = left.rename(tmp_path / "elsewhere" / left.name)
    (tmp_path / "bigmodels-link").symlink_to(elsewhere)
    (tmp_path / "bigmodels-notes").mkdir()
    with scratch("next"):
        assert (tmp_path / "bigmodels-link").is_symlink() and elsewhere.is_dir()
        assert (tmp_path / "bigmodels-notes").is_dir()
