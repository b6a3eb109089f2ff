"""Where a record comes from: device, driver, versions, date, command and commit."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from evidence.record.store import RecordError
from utils.start import ROOT, memory_of

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def provenance(device: torch.device, command: str, commit: str = "") -> dict[str, Any]:
    """All of `store.PROVENANCE`, read from this machine.

    Args:
        device: where the experiment runs.
        command: what a reader types to run it again.
        commit: the commit of a copy without git; else git is asked.

    Raises:
        RecordError: the driver or the commit cannot be found out.
    """
    commit, tree = (commit, "not checked") if commit else git_state()
    return {
        "device": device_title(device),
        "device_type": device.type,
        "memory_bytes": memory_of(device),
        **(_cuda(device) if device.type == "cuda" else _cpu()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit,
        "tree": tree,
    }


def device_title(device: torch.device) -> str:
    """The name that a record carries, and its folder."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}"


def git_state() -> tuple[str, str]:
    """The commit that is checked out, and whether the tree is "clean" or "dirty".

    Records themselves do not make it dirty: the code that wrote them is as committed.

    Raises:
        RecordError: the course's folder is no git checkout.
    """
    commit = _output(["git", "rev-parse", "HEAD"])
    changes = _output(["git", "status", "--porcelain", "--", ".", ":(exclude)evidence/results"])
    if commit is None or changes is None:
        raise RecordError(
            "A record names the commit that made it, and this folder is no git checkout (or git "
            "is not installed). Clone the course with git, or name the commit of this copy: "
            "python -m evidence.record --commit HASH"
        )
    return commit, "dirty" if changes else "clean"


def driver_version() -> str:
    """The version of the NVIDIA driver.

    Raises:
        RecordError: neither nvidia-smi nor the kernel tells.
    """
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = (_output(query) or "").splitlines()
    if told:
        return told[0].strip()
    text = _DRIVER_FILE.read_text() if _DRIVER_FILE.is_file() else ""
    match = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)
    if match is None:
        raise RecordError(
            "The driver's version cannot be found out: nvidia-smi does not answer. Put it on "
            "the PATH and run again; a record without it could not be compared."
        )
    return match[1]


def _cuda(device: torch.device) -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "compute_capability": f"{major}.{minor}",
        "driver": driver_version(),
        "cuda": torch.version.cuda or f"ROCm {torch.version.hip}",
        "cudnn": str(torch.backends.cudnn.version()),
    }


def _cpu() -> dict[str, Any]:
    return {
        "driver": "none",
        "cuda": "none",
        "cudnn": "none",
        "threads": torch.get_num_threads(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
    }


def _output(command: Sequence[str]) -> str | None:
    """What a command prints; None if it is not there or fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
