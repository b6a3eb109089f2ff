"""Which build of PyTorch: the registry's, or the small one without CUDA's libraries."""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from utils.installation.packages import Packages
from utils.installation.programs import output_of

PROBE_SECONDS = 5.0
PAIR = ("torch", "torchvision")
DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/nvidia/version")
TOOLS = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")


class TorchBuild(NamedTuple):
    """Which one and why; whether it is without CUDA's libraries; its own index, if it has one."""

    reason: str
    small: bool
    index_url: str = ""


def choose(packages: Packages, torch_index: str = "", system: str = sys.platform) -> TorchBuild:
    """The build for this machine; without a GPU it asks the network, `PROBE_SECONDS` at most.

    `torch_index`, the learner's own choice, wins over all else.
    """
    if torch_index:
        return TorchBuild(f"from {torch_index} (TORCH_INDEX)", "cpu" in torch_index, torch_index)
    if packages.asks_no_index:
        return from_folders(packages.settings.get("find-links", "").split())
    if not system.startswith("linux"):
        return TorchBuild("the registry's, which holds no CUDA libraries on this system", True)
    if has_nvidia_gpu():
        return TorchBuild("the registry's CUDA build, for this machine's NVIDIA GPU", False)
    project = tomllib.loads((packages.root / "pyproject.toml").read_text(encoding="utf-8"))
    index = project["tool"]["uv"]["index"][0]["url"]
    problem = packages.why_not(index, PAIR, PROBE_SECONDS)
    if not problem:
        why = f"the small CPU build from {index}, as no NVIDIA GPU was found"
        return TorchBuild(why, True, index)
    why = f"no NVIDIA GPU was found, but the small CPU build cannot be had: {problem}"
    return TorchBuild(f"the registry's, with 4 GB of CUDA libraries ({why})", False)


def from_folders(folders: Sequence[str]) -> TorchBuild:
    """The build that lies in pip's folders of wheels."""
    small = not any(any(Path(folder).glob("nvidia_*.whl")) for folder in folders)
    kind = "without CUDA's libraries" if small else "with CUDA's libraries"
    return TorchBuild(f"the build {kind} that lies with the wheels (PIP_NO_INDEX)", small)


def has_nvidia_gpu(drivers: Sequence[str] = DRIVERS, tools: Sequence[str] = TOOLS) -> bool:
    """Whether a driver is loaded, or NVIDIA's tool lists a GPU."""
    if any(Path(driver).is_file() for driver in drivers):
        return True
    tool = next(filter(None, map(shutil.which, tools)), None)
    status, listed = output_of([tool, "-L"], Path(), seconds=20) if tool else (1, "")
    return status == 0 and "GPU 0" in listed
