"""What a pre-flight check says, and that only what the day depends on makes it fail."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import ready  # noqa: E402
from ready import GIB, Finding  # noqa: E402


def test_it_runs_on_a_python_without_packages() -> None:
    code = (
        "import runpy, sys; sys.path = [p for p in sys.path if 'site-packages' not in p];"
        f"runpy.run_path({str(ROOT / 'tools/ready.py')!r})"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("finding", "good", "told"),
    [
        (ready.python((3, 10, 1)), False, "older than 3.11; install a newer one"),
        (ready.python((3, 12, 0)), True, "3.12.0"),
        (ready.memory(8 * GIB, ready.LESSON_BYTES), True, "8.0 GiB, 2.1 GiB free"),
        (ready.memory(8 * GIB, ready.LESSON_BYTES - 1), False, "Close other programs"),
        (ready.disk(ROOT, 10**8), False, "0.1 GB free"),
        (ready.disk(ROOT, 10**10), True, "10.0 GB free"),
        (ready.home(ROOT), True, str(ROOT)),
        (ready.home(ROOT / "not made yet"), True, "not made yet"),
        (ready.home(ROOT / "README.md"), False, "start with HOME=$PWD/build/home make lab"),
        (ready.loopback(), True, "reach each other"),
    ],
)
def test_each_check_knows_good_from_bad(finding: Finding, good: bool, told: str) -> None:
    assert (finding.good, told in finding.told) == (good, True), str(finding)


def test_a_port_in_use_is_said_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(ready, "JUPYTER_PORT", server.getsockname()[1])
        found = ready.jupyter_port()
    assert not found.good and not found.needed, "JupyterLab takes the next port by itself"
    assert "is in use; JupyterLab will take the next" in found.told, found.told


def test_a_folder_without_set_up_is_not_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("")
    assert ready.main(tmp_path) == 1, "without packages the day cannot begin"
    said = capsys.readouterr().out
    assert "NOT READY  download:    run make setup now, while there is a network" in said, said
    assert "download" in said.splitlines()[-1], "the last line names what is missing"


def test_only_what_is_needed_makes_it_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ready, "findings", lambda _: [Finding("browser", False, "none", False)])
    assert ready.main() == 0, "an optional part does not stop the day"
    assert "optional   browser:" in capsys.readouterr().out
