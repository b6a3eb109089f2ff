"""The set-up's checks and sentences, without installing anything."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils import install
from utils.install import ROOT, Setup, SetupError


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    """A set-up of a small stand-in repository, whose .venv looks finished."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["a>=1"]\n[project.optional-dependencies]\ntest = ["b>=2"]\n'
    )
    (tmp_path / "constraints.txt").write_text("a==1.5\n")
    made = Setup(tmp_path)
    made.python.parent.mkdir(parents=True)
    made.python.symlink_to(sys.executable)
    (made.venv / "pyvenv.cfg").write_text("version = 3.11.7\n")
    return made


@pytest.fixture
def steps_done(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the steps by ones that only note that they ran."""
    done: list[str] = []

    def step(name: str) -> str:
        done.append(name)
        return "ok"

    names = [name for name, _ in setup.steps()]
    monkeypatch.setattr(setup, "steps", lambda: [(n, lambda n=n: step(n)) for n in names])
    return done


def test_old_python_is_a_sentence() -> None:
    with pytest.raises(SetupError, match=r"needs Python 3\.11 or newer and this is 3\.9"):
        install.check_python((3, 9))


def test_python_without_venv_names_the_package() -> None:
    with pytest.raises(SetupError, match=r"apt install python3\.12-venv"):
        install.check_python((3, 12), modules=["no_such_module"])


def test_the_source_parses_in_python_3_6() -> None:
    source = (ROOT / "utils/install.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 6))
    assert "from __future__ import annotations" not in source  # Python 3.7


def test_an_old_python_hands_over_to_a_newer_one(tmp_path: Path) -> None:
    (tmp_path / "python-broken").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "python-broken").chmod(0o755)
    assert not install.is_adequate(str(tmp_path / "python-broken"))
    assert not install.is_adequate(str(tmp_path / "missing"))
    names = [str(tmp_path / "missing"), str(tmp_path / "python-broken"), sys.executable]
    assert install.newer_python(names) == sys.executable
    assert install.newer_python(names[:2]) is None


def test_a_full_disk_is_a_sentence() -> None:
    with pytest.raises(
        SetupError, match=r"12 GB are needed here and 2\.5 GB are free.*TORCH_INDEX"
    ):
        install.check_space(free=int(2.5e9), needed=install.SPACE_FOR_CUDA)
    assert "13 GB free" in install.check_space(free=13 * 10**9, needed=install.SPACE_FOR_CUDA)


@pytest.mark.parametrize(
    ("output", "way_out"),
    [
        ("[Errno -3] Temporary failure in name resolution\nNo matching distribution", "network"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: No matching distribution found for torch==2.15.0", "Try another Python"),
        ("ERROR: ResolutionImpossible: for help visit", "do not go together"),
        ("SSLError(SSLCertVerificationError(1, 'CERTIFICATE_VERIFY_FAILED", "PIP_CERT"),
        ("PermissionError: [Errno 13] Permission denied", "folder of your own"),
        ("something new", "last lines stand above"),
    ],
)
def test_failures_of_pip_have_a_way_out(output: str, way_out: str) -> None:
    assert way_out in install.explain(output)


def test_the_end_of_pips_output_is_short() -> None:
    output = "\n".join(["Collecting a", *["WARNING: noise"] * 9, "Installing " + "b, " * 500])
    assert [len(line) for line in install.last_words(output)] == [12, 160]


def test_pip_without_a_network_ends_in_its_sentence(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real pip, against a port of this machine where nothing listens.
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(setup, "python", Path(sys.executable))
    monkeypatch.setattr(setup, "requirements", lambda: ["no-such-package"])
    with pytest.raises(SetupError, match=r"cannot be reached.*build/setup\.log"):
        setup.packages()
    assert "no-such-package" in setup.log.read_text()


def test_a_failing_step_names_itself(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise SetupError("Do this.")

    monkeypatch.setattr(setup, "steps", lambda: [("first", lambda: "ok"), ("second", fail)])
    with pytest.raises(SetupError, match=r"stopped at step 2, second\. Do this\."):
        setup.run()
    assert not setup.is_complete()


def test_a_second_call_does_no_work(
    setup: Setup, steps_done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "Setup", lambda **_: setup)
    assert install.main() == 0
    assert len(steps_done) == 7
    assert install.main() == 0
    assert len(steps_done) == 7


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt", ".venv/pyvenv.cfg"])
def test_a_change_of_what_is_asked_for_sets_up_again(
    setup: Setup, steps_done: list[str], changed: str
) -> None:
    setup.run()
    assert setup.is_complete()
    (setup.root / changed).write_text("# changed\n")
    assert not setup.is_complete()


def test_an_interrupted_call_is_not_complete(
    setup: Setup, steps_done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.run()

    def interrupt() -> str:
        raise KeyboardInterrupt

    (setup.root / "constraints.txt").write_text("a==1.6\n")
    monkeypatch.setattr(setup, "steps", lambda: [("packages", interrupt)])
    monkeypatch.setattr(install, "Setup", lambda **_: setup)
    assert install.main() == 130
    assert not setup.is_complete()


def test_half_installed_packages_are_forgotten(setup: Setup) -> None:
    site = setup.venv / "lib/python3.11/site-packages"
    for name in ("whole-1.dist-info", "half-1.dist-info"):
        (site / name).mkdir(parents=True)
    (setup.venv / "lib64").symlink_to("lib")  # as Python makes it on Linux
    (site / "whole-1.dist-info/INSTALLER").write_text("pip\n")
    assert "1 half-installed" in setup.without_half_installed()
    assert [path.name for path in site.iterdir()] == ["whole-1.dist-info"]


def test_torch_and_torchvision_go_through_one_command(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(setup, "logged", lambda c: commands.append(c) or (0, ""))
    setup.torch_index = "https://example.org/cpu"
    setup.packages()
    assert len(commands) == 1
    assert commands[0][-2:] == ["a>=1", "b>=2"]
    assert commands[0][commands[0].index("-c") + 1] == str(setup.root / "constraints.txt")
    assert commands[0][commands[0].index("--extra-index-url") + 1] == "https://example.org/cpu"


def test_only_large_downloads_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "Collecting torch==2.15.0",
        "  Downloading torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl (812.4 MB)",
        "  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)",
        "Installing collected packages: six, torch",
    ):
        install.show(line + "\n")
    assert capsys.readouterr().out.split("\n") == [
        "      fetching torch 2.15.0, 812.4 MB",
        "      installing 2 packages",
        "",
    ]


def test_make_says_which_command_is_missing() -> None:
    done = subprocess.run(
        ["make", "setup", "PYTHON=no-such-python"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "No no-such-python on this machine" in done.stdout
