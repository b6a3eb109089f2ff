"""Installing from package indexes on this machine: with pip's settings, and when they fail."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from index_cases import add_wheel, served
from loopback import server

from utils.installation import packages as packages_module
from utils.installation import ways_out
from utils.installation.environment import Environment, is_whole
from utils.installation.packages import UVS_NAMES, Packages, in_uvs_words, show
from utils.installation.setup import COURSE
from utils.installation.ways_out import SetupError

pytest.importorskip("uv")
ROOT = Path(__file__).resolve().parents[2]
TORCH = {"torch": "2.15.0", "torchvision": "0.29.2"}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of this machine reaches pip or uv; nothing goes through a proxy."""
    for words in (*UVS_NAMES.values(), "UV_INDEX_STRATEGY"):
        for word in words.split():
            monkeypatch.delenv(word, raising=False)
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "CERT", "DEFAULT_TIMEOUT"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of three indexes: all packages, PyTorch's small builds, one of a company."""
    folder = tmp_path_factory.mktemp("indexes")
    add_wheel(folder / "all", "torch", "2.15.0", ["helper"])
    add_wheel(folder / "all", "torchvision", "0.29.2", ["torch==2.15.0"])
    add_wheel(folder / "all", "helper", "1.0")
    add_wheel(folder / "all", "old", "1.0", tag="cp39-cp39-linux_x86_64")
    add_wheel(folder / "cpu", "torch", "2.15.0+cpu", ["helper", "companion"])
    add_wheel(folder / "cpu", "torchvision", "0.29.2+cpu", ["torch==2.15.0"])
    add_wheel(folder / "cpu", "helper", "3.0")
    add_wheel(folder / "all", "companion", "1.0")
    add_wheel(folder / "company", "helper", "2.0")
    with served(folder) as address:
        yield address


@pytest.fixture
def course(tmp_path: Path, indexes: str) -> Packages:
    """A repository that needs torch, and an environment that has uv and nothing else."""
    root = tmp_path / "ein Kurs für alle"
    root.mkdir()
    (root / "pyproject.toml").write_text(
        '[project]\nname = "a"\nversion = "1"\ndependencies = ["torch>=2.11", "torchvision>=0.26"]\n'
        '[project.optional-dependencies]\ntest = ["helper"]\nsmall = ["torch", "torchvision"]\n'
        f'[[tool.uv.index]]\nname = "torch"\nurl = "{indexes}/cpu"\nexplicit = true\n'
        + (ROOT / "pyproject.toml")
        .read_text()
        .partition("explicit = true\n")[2]
        .partition("[tool.s")[0]
    )
    pins = "".join(f"{name}=={version}\n" for name, version in TORCH.items())
    (root / "constraints.txt").write_text(pins)
    made = Environment(root / ".venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made.folder)], check=True)
    (made.python.parent / "uv").symlink_to(shutil.which("uv", path=sysconfig.get_path("scripts")))
    (made.sites()[0] / "uv").symlink_to(Path(sysconfig.get_path("purelib")) / "uv")
    return Packages(root, str(made.python))


def install(course: Packages, settings: dict[str, str], *more: str, torch_index: str = "") -> None:
    """Install what a course needs, where pip has these settings."""
    course.settings = settings
    course.install(*COURSE, *more, torch_index=torch_index)


def has(course: Packages) -> dict[str, str | None]:
    """The version of each of the packages that the indexes hold."""
    made = Environment(course.root / ".venv")
    names = ("torch", "torchvision", "helper", "companion")
    return {name: version for name in names if (version := made.installed(name))}


def test_all_come_from_the_index_that_pip_knows(course: Packages, indexes: str) -> None:
    install(course, {"index-url": f"{indexes}/all"})
    assert has(course) == {**TORCH, "helper": "1.0"}
    assert "torch==2.15.0" in course.log.read_text()
    assert all(map(is_whole, Environment(course.root / ".venv").records()))


def test_a_folder_of_wheels_is_enough_without_an_index(course: Packages, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    add_wheel(wheels, "torch", "2.15.0", ["helper"])
    add_wheel(wheels, "torchvision", "0.29.2", ["torch==2.15.0"])
    add_wheel(wheels, "helper", "1.0")
    folders = " ".join(str(folder) for folder in wheels.iterdir())
    settings = {"no-index": "1", "find-links": folders, "index-url": "http://127.0.0.1:9/gone"}
    install(course, settings)
    assert has(course) == {**TORCH, "helper": "1.0"}, "all from the folder, no index was asked"


def test_a_second_index_counts_like_the_first(course: Packages, indexes: str) -> None:
    settings = {"index-url": f"{indexes}/all", "extra-index-url": f"\n{indexes}/company"}
    install(course, settings)
    assert has(course) == {**TORCH, "helper": "2.0"}


def test_the_small_build_brings_torch_and_torchvision_alone(course: Packages, indexes: str) -> None:
    install(course, {"index-url": f"{indexes}/all"}, "--extra", "small")
    small = {name: f"{version}+cpu" for name, version in TORCH.items()}
    assert has(course) == {**small, "helper": "1.0", "companion": "1.0"}


def test_a_small_build_that_is_there_is_kept(course: Packages, indexes: str) -> None:
    install(course, {"index-url": f"{indexes}/all"}, "--extra", "small")
    install(course, {"index-url": f"{indexes}/all"})
    assert has(course)["torch"] == "2.15.0+cpu"


def test_the_learners_own_index_may_bring_what_its_build_needs(
    course: Packages, indexes: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rocm")
    add_wheel(folder, "torch", "2.15.0+rocm", ["tritonrocm"])
    add_wheel(folder, "torchvision", "0.29.2+rocm", ["torch==2.15.0"])
    add_wheel(folder, "tritonrocm", "1.0")
    with served(folder) as own:
        install(course, {"index-url": f"{indexes}/all"}, "--extra", "small", torch_index=own)
    assert has(course)["torch"] == "2.15.0+rocm"
    assert Environment(course.root / ".venv").installed("tritonrocm") == "1.0"


@pytest.mark.parametrize(
    ("settings", "needs", "way_out"),
    [
        ({"index-url": "{}/nothing"}, "helper", "it has no such package.*PIP_INDEX_URL"),
        ({"index-url": "{}/all"}, "helper==9", r"lacks a version that constraints\.txt names"),
        ({"index-url": "{}/all"}, "old", "no build for this Python"),
        ({"index-url": "{}/all"}, 'helper==1.0", "helper==2.0', "do not go together"),
    ],
)
def test_uvs_failures_end_in_a_sentence(
    course: Packages, indexes: str, settings: dict[str, str], needs: str, way_out: str
) -> None:
    settings = {name: value.format(indexes) for name, value in settings.items()}
    text = (course.root / "pyproject.toml").read_text().replace('["helper"]', f'["{needs}"]')
    (course.root / "pyproject.toml").write_text(text)
    with pytest.raises(SetupError, match=rf"{way_out}.*build/setup\.log"):
        install(course, settings)


def test_the_learners_index_without_torch_is_said_to_be_wrong(
    course: Packages, indexes: str
) -> None:
    own = f"{indexes}/nothing"
    with pytest.raises(
        SetupError, match=r"no such package: its address may be wrong\. Check TORCH_"
    ):
        install(course, {"index-url": f"{indexes}/all"}, "--extra", "small", torch_index=own)


def test_an_index_that_hangs_or_refuses_ends_in_a_sentence(course: Packages) -> None:
    settings = {"retries": "0", "default-timeout": "1"}
    with server(answers=False) as (url, _), pytest.raises(SetupError, match="cannot be reached"):
        install(course, {**settings, "index-url": url})
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        with pytest.raises(SetupError, match="cannot be reached"):
            install(course, {**settings, "index-url": url})


@pytest.mark.parametrize(
    ("index", "way_out"),
    [
        ("http://127.0.0.1:9/simple", "cannot be reached"),  # nothing listens there
        ("{}/nothing", "it has no such package"),
        ("{}/all", r"lacks a version that constraints\.txt names"),
    ],
)
def test_pips_failures_end_in_a_sentence(
    course: Packages, indexes: str, monkeypatch: pytest.MonkeyPatch, index: str, way_out: str
) -> None:
    # The real pip, asked for what is not installed here.
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index.format(indexes))
    with (course.root / "constraints.txt").open("a") as file:
        file.write("helper==9\n")
    pip = Packages(course.root, sys.executable)
    monkeypatch.setattr(packages_module, "PIP", (*packages_module.PIP, "--retries=1"))
    with pytest.raises(SetupError, match=rf"{way_out}.*build/setup\.log"):
        pip.install_by_pip("helper")
    assert "helper==9" in pip.log.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's disk that is full")
def test_a_log_that_cannot_be_written_is_an_error_of_the_system(course: Packages) -> None:
    course.log.parent.mkdir()
    course.log.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        course.run(["-c", "print('x' * 100_000)"], os.environ)


@pytest.mark.parametrize(
    ("output", "way_out"),
    [
        ("[Errno -3] Temporary failure in name resolution\nNo matching distribution", "network"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("failed to write to file `a`: No space left on device (os error 28)", "disk is full"),
        ("ERROR: No matching distribution found for uv (from versions: none)", "no such package"),
        ("ERROR: ResolutionImpossible: for help visit", "do not go together"),
        ("SSLError(SSLCertVerificationError(1, 'CERTIFICATE_VERIFY_FAILED", "PIP_CERT"),
        ("  cause: invalid peer certificate: UnknownIssuer", "PIP_CERT"),
        ("error sending request for url (x)\n  cause: dns error", "cannot be reached"),
        ("HTTP status client error (403 Forbidden) for url (x)", "refused access"),
        ("  ╰─▶ Because a was not found in the package\n      registry", "no such package"),
        ("Failed to initialize cache at `/a`\n Permission denied (os error 13)", "UV_CACHE_DIR"),
        ("PermissionError: [Errno 13] Permission denied", "folder of your own"),
        ("something new", "last lines stand above"),
    ],
)
def test_every_failure_has_a_way_out(output: str, way_out: str) -> None:
    assert way_out in ways_out.explain(output)


def test_only_large_downloads_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "Resolved 174 packages in 4.33s",
        "Downloading torch (514.2MiB)",
        "Downloading nvidia-all (1.2GiB)",
        "Downloading six (9.9MiB)",
        " Downloaded torch",
        "Installed 174 packages in 3.2s",
    ):
        show(line + "\n")
    assert capsys.readouterr().out.split("\n") == [
        "",
        "      Downloading torch (514.2MiB)",
        "      Downloading nvidia-all (1.2GiB)",
        "      Installed 174 packages: ",
    ]


def test_pips_own_files_and_variables_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://a.example/simple\ntimeout = 7.5\n"
        "[install]\nextra-index-url =\n    https://b.example/simple\n    https://c.example/simple\n"
        "[download]\nno-index = true\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:it's@d.example/simple")
    monkeypatch.setenv("PIP_CERT", str(file))
    course = Packages(tmp_path, sys.executable)
    words = course.environment()
    assert words["UV_DEFAULT_INDEX"] == "https://me:it's@d.example/simple"
    assert words["UV_INDEX"] == "https://b.example/simple https://c.example/simple"
    assert words["SSL_CERT_FILE"] == str(file)
    assert words["UV_HTTP_TIMEOUT"] == "8"
    assert words["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert not course.asks_no_index, "that is for pip download"


def test_each_setting_has_its_word(tmp_path: Path) -> None:
    links = f"{tmp_path} {tmp_path / 'missing'} https://e.example/wheels file://{tmp_path}/none"
    settings = {"find-links": links, "proxy": "http://p:1", "no-index": "1", "trusted-host": "h\ni"}
    assert in_uvs_words(settings) == {
        "UV_FIND_LINKS": f"{tmp_path},https://e.example/wheels",
        "HTTPS_PROXY": "http://p:1",
        "HTTP_PROXY": "http://p:1",
        "UV_INSECURE_HOST": "h i",
    }


def test_what_the_learner_set_for_uv_stays(
    course: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://mine.example")
    monkeypatch.setenv("SSL_CERT_FILE", "/system")
    course.settings = {"index-url": "https://pip.example", "cert": "/company"}
    words = course.environment("https://torch.example")
    assert words["UV_DEFAULT_INDEX"] == "https://mine.example"
    assert words["SSL_CERT_FILE"] == "/company"
    assert words["UV_INDEX"] == "torch=https://torch.example"


def test_an_address_with_a_password_is_no_argument(course: Packages) -> None:
    secret = "https://me:secret@example.org/simple"
    course.settings = {"index-url": secret}
    assert not [word for word in course.uv() if "secret" in word]
    assert course.environment()["UV_DEFAULT_INDEX"] == secret


def test_a_version_that_was_tried_is_asked_for(course: Packages) -> None:
    assert course.pinned("torch") == f"torch=={TORCH['torch']}" and course.pinned("uv") == "uv"
    course.constraints.unlink()
    assert course.pinned("torch") == "torch"
