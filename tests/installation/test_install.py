"""The set-up's order, its mark of completion and its sentences, without installing anything."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils import install
from utils.installation import environment, ways_out
from utils.installation import setup as steps
from utils.installation.environment import Environment
from utils.installation.programs import start
from utils.installation.setup import GB, Installation
from utils.installation.torch_build import TorchBuild
from utils.installation.ways_out import SetupError

ROOT = install.ROOT
SOURCES = [ROOT / "utils/install.py", *sorted((ROOT / "utils/installation").glob("*.py"))]


@pytest.fixture
def setup(tmp_path: Path) -> Installation:
    """A set-up of a small stand-in repository, whose .venv looks finished."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["a>=1"]\n[project.optional-dependencies]\ntest = ["b>=2"]\n'
    )
    (tmp_path / "constraints.txt").write_text("a==1.5\n")
    command = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(tmp_path / ".venv")]
    subprocess.run(command, check=True)
    made = Installation(tmp_path)
    (made.venv.sites()[0] / "einops").mkdir()
    (made.venv.sites()[0] / "einops/__init__.py").touch()
    return made


@pytest.fixture
def steps_done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the steps by ones that only note that they ran."""
    done: list[str] = []

    def note(name: str) -> str:
        done.append(name)
        return "ok"

    real = Installation.steps
    monkeypatch.setattr(
        Installation, "steps", lambda self: {name: lambda n=name: note(n) for name in real(self)}
    )
    return done


def test_old_python_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "newer_python", lambda: None)
    assert install.main((3, 9)) == 1
    assert "needs Python 3.11 or newer and this is 3.9." in capsys.readouterr().err


def test_the_oldest_python_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = ".".join(map(str, install.OLDEST_PYTHON))
    assert project["requires-python"] == f">={oldest}"
    assert f"< {install.OLDEST_PYTHON}" in environment.VERSION
    assert f"Python {oldest} or newer" in install.TOO_OLD


def test_python_without_venv_names_the_package(
    setup: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda _name: None)
    package = "python{}.{}-venv".format(*sys.version_info)
    with pytest.raises(SetupError, match=f"apt install {package}"):
        setup.venv.make()


def test_the_first_file_parses_in_python_3_6() -> None:
    source = SOURCES[0].read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 6))
    assert "from __future__ import annotations" not in source  # Python 3.7


def test_an_old_python_hands_over_to_a_newer_one(tmp_path: Path) -> None:
    (tmp_path / "python-broken").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "python-broken").chmod(0o755)
    names = [str(tmp_path / "missing"), str(tmp_path / "python-broken"), sys.executable]
    assert install.newer_python(names) == sys.executable
    assert install.newer_python(names[:2]) is None


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_it_needs_nothing_but_python(source: Path) -> None:
    own = "utils.installation."
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert f"{name}.".startswith(own) or name.split(".")[0] in sys.stdlib_module_names


def test_it_starts_where_no_package_is_installed() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import utils.installation.setup"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("small", "free_bytes", "told"),
    [
        (False, int(2.5e9), r"7 GB are needed here and 2\.5 GB are free\..*make setup TORCH_INDEX"),
        (
            True,
            10**9,
            r"2 GB are needed here and 1\.0 GB are free\. Free some space and run [^_]*$",
        ),
    ],
)
def test_a_disk_that_would_be_full_is_a_sentence(
    setup: Installation, monkeypatch: pytest.MonkeyPatch, small: bool, free_bytes: int, told: str
) -> None:
    """The advice does not name what was chosen."""
    setup.build = TorchBuild("", small)
    free = SimpleNamespace(free=13 * GB)
    monkeypatch.setattr(steps.shutil, "disk_usage", lambda _place: free)
    assert "13 GB free" in setup.space()
    free.free = free_bytes
    with pytest.raises(SetupError, match=told):
        setup.space()


def test_a_failing_step_names_itself(setup: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise SetupError("Do this.")

    monkeypatch.setattr(setup, "steps", lambda: {"first": lambda: "ok", "second": fail})
    with pytest.raises(SetupError, match=r"stopped at step 2, second\. Do this\."):
        setup.run()
    assert not setup.is_done()


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (OSError(28, "No space left on device"), "The disk is full"),
        (PermissionError(13, "Permission denied"), ".*folder of your own"),
        (OSError(30, "Read-only file system"), ".*folder of your own"),
        (OSError(5, "Input/output error"), "The system refused: .*Input/output"),
    ],
)
def test_what_the_system_refuses_is_a_sentence(
    setup: Installation, monkeypatch: pytest.MonkeyPatch, error: OSError, way_out: str
) -> None:
    def fail() -> str:
        raise error

    monkeypatch.setattr(setup, "steps", lambda: {"packages": fail})
    with pytest.raises(SetupError, match=rf"step 1, packages\. {way_out}"):
        setup.run()


def test_a_mark_that_cannot_be_written_is_a_sentence(
    setup: Installation,
    steps_done: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_setup: Installation) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Installation, "leave_mark", fail)
    assert steps.install(setup.root) == 1
    assert "Set-up stopped. The disk is full." in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is full")
def test_a_full_disk_leaves_no_half_mark(setup: Installation, steps_done: list[str]) -> None:
    setup.leave_mark()
    before = setup.mark.read_bytes()
    setup.mark.with_name("course-stamp.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        setup.leave_mark()
    assert setup.mark.read_bytes() == before
    assert sorted(path.name for path in setup.venv.folder.glob("course-stamp*")) == ["course-stamp"]


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe", b"0" * 64])
def test_a_mark_that_cannot_be_read_is_none(
    setup: Installation, steps_done: list[str], content: bytes
) -> None:
    setup.mark.write_bytes(content)
    assert not setup.is_done()
    assert steps.install(setup.root) == 0
    assert len(steps_done) == 8 and setup.is_done()


def test_a_second_call_does_no_work(
    setup: Installation, steps_done: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert steps.install(setup.root) == 0
    assert len(steps_done) == 8
    assert steps.install(setup.root) == 0
    assert len(steps_done) == 8
    assert capsys.readouterr().out.splitlines()[-1].startswith("Set-up is complete.")


@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "constraints.txt", "utils/memory/counting.cpp"]
)
def test_a_change_of_what_is_asked_for_sets_up_again(
    setup: Installation, steps_done: list[str], changed: str
) -> None:
    setup.run()
    assert setup.is_done()
    (setup.root / changed).parent.mkdir(parents=True, exist_ok=True)
    with (setup.root / changed).open("a") as file:
        file.write("# changed\n")
    assert not setup.is_done()


def test_a_renamed_folder_sets_up_again(setup: Installation, steps_done: list[str]) -> None:
    setup.run()
    moved = setup.root.with_name("a new name")
    setup.root.rename(moved)
    assert not Installation(moved).is_done()
    Installation(moved).run()
    assert Installation(moved).is_done()


@pytest.mark.parametrize("lost", ["einops/__init__.py", "einops"])
def test_a_lost_package_sets_up_again_and_a_new_one_does_not(
    setup: Installation, steps_done: list[str], lost: str
) -> None:
    site = setup.venv.sites()[0]
    setup.run()
    (site / "added.py").touch()
    assert setup.is_done()
    path = site / lost
    if path.is_file():
        path.unlink()
    else:
        path.rename(site / "einops-lost")
    assert not setup.is_done()


def test_an_interpreter_that_broke_sets_up_again(
    setup: Installation, steps_done: list[str]
) -> None:
    setup.run()
    setup.venv.python.unlink()
    setup.venv.python.symlink_to("/no/such/python")
    assert not setup.is_done()


def test_an_interrupted_call_is_not_complete(
    setup: Installation, steps_done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.run()

    def interrupt() -> str:
        raise KeyboardInterrupt

    (setup.root / "constraints.txt").write_text("a==1.6\n")
    monkeypatch.setattr(Installation, "steps", lambda self: {"packages": interrupt})
    assert steps.install(setup.root) == 130
    assert not setup.is_done()


def test_an_extension_that_failed_is_not_called_ready(setup: Installation) -> None:
    def said(code: str) -> str:
        with start([sys.executable, "-c", code], setup.root) as setup.compiler:
            return setup.extension()

    assert said("print('compiled')") == "ready"
    note = said("import sys; sys.exit('No compiler.\\nFAILED: shm.o')")
    assert note.startswith("not built") and note.endswith("No compiler.\nFAILED: shm.o")


def test_the_way_out_prefers_no_warnings_and_short_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ways_out.show_end("\n".join(["Collect a", *["WARNING: noise"] * 9, "Install " + "b, " * 500]))
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [0, 9, 160]


def test_make_says_which_command_is_missing() -> None:
    done = subprocess.run(
        ["make", "setup", "PYTHON=no-such-python"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "No no-such-python on this machine" in done.stdout


def test_the_makefile_starts_jupyter_by_the_environments_own_python() -> None:
    done = subprocess.run(["make", "-n", "lab"], cwd=ROOT, capture_output=True, text=True)
    assert ".venv/bin/python -m jupyterlab --ip=127.0.0.1" in done.stdout
    assert Environment(ROOT / ".venv").python == ROOT / ".venv/bin/python"
