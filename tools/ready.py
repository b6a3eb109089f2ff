"""Says whether this machine is ready for a course day: `make ready`. Standard library alone.

Each line begins with "ok", "NOT READY" or "optional"; only the second makes it fail. Run it the day
before, with a network, and once more in the room.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.installation.environment import Environment  # noqa: E402
from utils.installation.setup import GB, SPACE_FOR_CPU, SPACE_FOR_CUDA, Installation  # noqa: E402
from utils.installation.torch_build import has_nvidia_gpu  # noqa: E402

GIB = 2**30
LESSON_BYTES = int(2.1 * GIB)  # the largest lesson, 04: docs/instructor/index.md has all
JUPYTER_PORT = 8888
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CIFAR = "cifar-10-batches-py"
IMPORTS = "import torch, jupyterlab.labapp; print(torch.__version__)"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it will do, whether the day depends on it."""

    what: str
    good: bool
    told: str
    needed: bool = True

    def __str__(self) -> str:
        state = "ok" if self.good else "NOT READY" if self.needed else "optional"
        return f"{state:<10} {self.what + ':':<12} {self.told}"


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """The interpreter that would build .venv."""
    found = ".".join(map(str, version))
    has_venv, has_ensurepip, has_pip = map(PathFinder.find_spec, ("venv", "ensurepip", "pip"))
    lacking = not (has_venv and (has_ensurepip or has_pip))
    if version < (3, 11):
        told = f"{found} is older than 3.11; install a newer one, then make ready PYTHON=python3.12"
    elif lacking:
        told = (
            f"{found} came without its venv module; on Debian and Ubuntu: apt install python3-venv"
        )
    else:
        told = found
    return Finding("Python", version >= (3, 11) and not lacking, told)


def disk(root: Path, free: int | None = None) -> Finding:
    """Room for what is still to come."""
    free = shutil.disk_usage(root).free if free is None else free
    done = Installation(root).is_done()
    needed = GB // 2 if done else SPACE_FOR_CUDA if has_nvidia_gpu() else SPACE_FOR_CPU
    told = f"{free / GB:.1f} GB free, {needed / GB:.1f} GB needed"
    told += "" if done or has_nvidia_gpu() else " (7 GB where PyTorch's own index does not answer)"
    return Finding("disk", free >= needed, told)


def memory(total: int | None = None, free: int | None = None) -> Finding:
    """What a lesson may take."""
    found_total, found_free = memory_bytes()
    total, free = found_total if total is None else total, found_free if free is None else free
    if not total:
        return Finding("memory", True, "this system does not tell; a lesson takes up to 2.1 GiB")
    told = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free; a lesson takes up to 2.1 GiB"
    return Finding(
        "memory",
        free >= LESSON_BYTES,
        told + ("" if free >= LESSON_BYTES else ". Close other programs (a browser takes most)"),
    )


def memory_bytes() -> tuple[int, int]:
    """All memory and what is free; 0, 0 where the system does not tell."""
    table = Path("/proc/meminfo")
    if table.is_file():
        rows = dict(line.split(":", 1) for line in table.read_text().splitlines())
        return tuple(int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]
    if sys.platform == "darwin":
        done = subprocess.run(["sysctl", "-n", "hw.memsize"], capture_output=True, text=True)
        total = int(done.stdout or 0)
        return total, total // 2  # macOS gives up caches and compresses: half is a safe guess
    return 0, 0


def processors() -> Finding:
    """Two cores are what the minutes were measured on."""
    count = os.cpu_count() or 1
    told = f"{count}" + ("" if count > 1 else "; the lessons' minutes are those of two")
    return Finding("processors", count > 1, told, needed=False)


def loopback() -> Finding:
    """Kernels and ranks talk over ports of this machine's own address."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=5).close()
    except OSError as error:
        told = f"127.0.0.1 refuses ({error.strerror or error}); a firewall or VPN may forbid it"
        return Finding("ports", False, told)
    return Finding("ports", True, "programs on this machine reach each other")


def jupyter_port() -> Finding:
    """JupyterLab takes the next one where this is in use."""
    try:
        socket.create_server(("127.0.0.1", JUPYTER_PORT)).close()
    except OSError:
        told = f"{JUPYTER_PORT} is in use; JupyterLab will take the next, and prints which"
        return Finding("JupyterLab", False, told, needed=False)
    return Finding("JupyterLab", True, f"its port {JUPYTER_PORT} is free", needed=False)


def download(root: Path) -> Finding:
    """Whether `make setup` has finished, and what it installed can be imported."""
    if not Installation(root).is_done():
        return Finding("download", False, "run make setup now, while there is a network")
    command = [str(Environment(root / ".venv").python), "-c", IMPORTS]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        return Finding("download", False, "torch cannot be imported: delete .venv, make setup")
    return Finding("download", True, f"set-up is complete, torch {done.stdout.strip()}")


def writable(root: Path) -> Finding:
    """Lessons write scoreboards and builds."""
    good = os.access(root, os.W_OK)
    return Finding("folder", good, str(root) + ("" if good else " cannot be written to; copy it"))


def home(folder: Path | None = None) -> Finding:
    """JupyterLab keeps the addresses of its kernels below it, and does not start without."""
    folder = Path.home() if folder is None else folder
    there = next(place for place in (folder, *folder.parents) if place.exists())
    good = there.is_dir() and os.access(there, os.W_OK)
    told = f"{folder} cannot be written to, and JupyterLab keeps files there; name another with "
    told += "HOME=$PWD/build/home make ready, and start with HOME=$PWD/build/home make lab"
    return Finding("home", good, str(folder) if good else told)


def images(root: Path) -> Finding:
    """CIFAR-10; lessons 02 and 04 draw images of their own without it."""
    places = (Path(os.environ.get("CIFAR10_ROOT", root / "data")) / CIFAR, root / "data" / CIFAR)
    good = any(place.is_dir() for place in places)
    told = "CIFAR-10 is there" if good else "no CIFAR-10; lessons 02 and 04 draw their own images"
    return Finding("images", good, told, needed=False)


def compiler() -> Finding:
    """Builds the counting allocator; the profiler counts in its place."""
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    told = found or "none; the meter uses PyTorch's profiler instead"
    return Finding("compiler", bool(found), told, needed=False)


def chromium() -> Finding:
    """Only tests open pages in it."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    told = found or "none; only the tests of pages need it"
    return Finding("Chromium", bool(found), told, needed=False)


def findings(root: Path = ROOT) -> list[Finding]:
    """Everything, in the order of a day."""
    checks: list[Callable[[], Finding]] = [
        python,
        lambda: writable(root),
        home,
        lambda: disk(root),
        memory,
        processors,
        loopback,
        jupyter_port,
        lambda: download(root),
        lambda: images(root),
        compiler,
        chromium,
    ]
    return [check() for check in checks]


def main(root: Path = ROOT) -> int:
    """Print what was found; 0 if the day can begin."""
    found = findings(root)
    for finding in found:
        print(finding, flush=True)
    missing = [finding.what for finding in found if finding.needed and not finding.good]
    print(f"\nNot ready: {', '.join(missing)}." if missing else "\nReady. Start with: make lab")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
