"""Which build of PyTorch a machine gets, with PyTorch's index played by one on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from index_cases import add_wheel, served
from loopback import server

from utils.installation import torch_build
from utils.installation.packages import Packages

pytest.importorskip("uv")
TORCH = {"torch": "2.15.0", "torchvision": "0.29.2"}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address above an index of small builds."""
    folder = tmp_path_factory.mktemp("indexes")
    for name, version in TORCH.items():
        add_wheel(folder / "cpu", name, f"{version}+cpu")
        add_wheel(folder / "other", name, f"{version}+cpu", tag="cp39-cp39-linux_x86_64")
    with served(folder) as address:
        yield address


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "has_nvidia_gpu", lambda: False)


def course(
    folder: Path, index: str = "https://unused", versions: dict[str, str] = TORCH
) -> Packages:
    """A repository whose small builds lie at an index; pip has no settings there."""
    table = f'[[tool.uv.index]]\nname = "torch"\nurl = "{index}"\nexplicit = true\n'
    (folder / "pyproject.toml").write_text(table)
    pins = "".join(f"{name}=={version}\n" for name, version in versions.items())
    (folder / "constraints.txt").write_text(pins)
    made = Packages(folder, sys.executable)
    made.settings = {}
    return made


def test_without_a_gpu_the_small_build_is_taken_where_it_answers(
    no_gpu: None, index: str, tmp_path: Path
) -> None:
    build = torch_build.choose(course(tmp_path, f"{index}/cpu"), system="linux")
    assert (build.index_url, build.small) == (f"{index}/cpu", True)
    assert "small CPU build" in build.reason and "no NVIDIA GPU" in build.reason


@pytest.mark.parametrize(
    ("path", "versions", "why"),
    [
        ("nothing", TORCH, "torch was not found in the package registry"),
        ("cpu", {**TORCH, "torchvision": "0.30.0"}, "no version of torchvision==0.30.0"),
        ("cpu", {"torch": "1.0"}, "no version of torch==1.0"),
        ("other", TORCH, "only found wheels for `torch`"),
    ],
)
def test_where_it_does_not_fit_the_registrys_is_taken_and_why(
    no_gpu: None, index: str, tmp_path: Path, path: str, versions: dict[str, str], why: str
) -> None:
    build = torch_build.choose(course(tmp_path, f"{index}/{path}", versions), system="linux")
    assert (build.index_url, build.small) == ("", False)
    assert why in build.reason and "the registry's" in build.reason


def test_an_index_that_hangs_or_is_not_there_is_given_up(tmp_path: Path) -> None:
    with server(answers=False) as (url, _):
        why = course(tmp_path).why_not(url, torch_build.PAIR, seconds=0.3)
    assert why == f"{url}: no answer within 0.3 s"
    # Long enough for uv, which asks a port that refuses again and again before it says so.
    for url, word in (("http://127.0.0.1:9", "refused"), ("no address", "")):
        why = course(tmp_path).why_not(url, torch_build.PAIR, seconds=60)
        assert why.startswith(f"{url}: ") and word in why
    assert torch_build.PROBE_SECONDS == 5.0


def test_the_learners_index_wins_and_nothing_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = course(tmp_path)
    monkeypatch.setattr(Packages, "why_not", None)
    monkeypatch.setattr(torch_build, "has_nvidia_gpu", lambda: True)
    build = torch_build.choose(packages, "https://example.org/cpu", system="linux")
    assert (build.index_url, build.small) == ("https://example.org/cpu", True)
    assert "CUDA build" in torch_build.choose(packages, system="linux").reason
    assert torch_build.choose(packages, system="darwin").small


def test_a_gpu_is_seen_by_its_driver_or_its_tool(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA T4 (UUID: x)'\n")
    tool.chmod(0o755)
    nothing = [str(tmp_path / "none")]
    assert torch_build.has_nvidia_gpu(nothing, [str(tool)])
    assert torch_build.has_nvidia_gpu([str(tool)], nothing)
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert not torch_build.has_nvidia_gpu(nothing, [str(tool)])
    assert not torch_build.has_nvidia_gpu(nothing, nothing)


@pytest.mark.parametrize(
    ("wheel", "small"), [("nvidia_cublas-1-py3.whl", False), ("a-1.whl", True)]
)
def test_a_folder_of_wheels_is_asked_in_place_of_the_network(
    wheel: str, small: bool, tmp_path: Path
) -> None:
    (tmp_path / wheel).touch()
    packages = course(tmp_path)
    packages.settings = {"no-index": "1", "find-links": f"/none {tmp_path}"}
    found = torch_build.choose(packages, system="linux")
    assert (found.small, found.index_url) == (small, ""), "CUDA's libraries are there or not"
    assert "lies with the wheels" in found.reason, found.reason
