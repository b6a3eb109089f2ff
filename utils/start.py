"""The first call of every lesson: what machine is this, and what follows for the lesson."""

from __future__ import annotations

import inspect
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from utils.units import GIB, format_bytes

ROOT = Path(__file__).resolve().parents[1]
SCALES = ("tiny", "small", "full")
SMALL_GPU_BYTES = 16 * GIB
_LESSON = re.compile(r"(labs/)?((beginner|intermediate|advanced)/\d\d[a-z]?|00[ab]?|99)")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Here:
    """The machine as a lesson sees it.

    Attributes:
        lesson: The name that `setup` was called with.
        device: Where models run: "cuda", "mps" or "cpu".
        memory_bytes: The device's whole memory; a container's limit where that is less.
        dtype: The 16-bit type that suits the device.
        dtype_reason: Why that one.
        scale: "tiny", "small" or "full": how large a lesson's models and batches are.
        root: The repository's folder.
    """

    lesson: str
    device: torch.device
    memory_bytes: int
    dtype: torch.dtype
    dtype_reason: str
    scale: str
    root: Path

    @property
    def meter_device(self) -> torch.device:
        """Where memory is measured: Apple's GPU is used for speed, its bytes are not counted."""
        return torch.device("cpu") if self.device.type == "mps" else self.device

    def write_script(self, name: str, *parts: str | Callable[..., object]) -> None:
        """Write a script that runs without the course into `build/lesson-NN/`, and print it.

        Args:
            name: Of the file, such as "finetune.py".
            parts: In their order: text as it is, or a function, of which the source is taken.

        Raises:
            SyntaxError: the parts together are no Python.
            OSError: a function has no source (it was not defined in a cell or a file), or the
                folder cannot be written to.
        """
        source = "\n\n".join(
            part if isinstance(part, str) else inspect.getsource(part) for part in parts
        )
        compile(source, name, "exec")
        path = self.root / "build" / f"lesson-{self.lesson.rpartition('/')[2]}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        print(f"# written to {path.relative_to(self.root)}\n{source}")


def setup(lesson: str) -> Here:
    """Look at the machine, print what was found and return it.

    Seeds PyTorch with 0, and starts the count of CPU memory. Set `COURSE_SCALE` to "tiny",
    "small" or "full" to choose the scale yourself.

    Raises:
        ValueError: the lesson's name or `COURSE_SCALE` is none that the course knows.
    """
    check_lesson(lesson)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes into cells
    from utils.memory.source import prepare  # here: after the line above

    device = find_device()
    if device.type != "cuda":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed searches, and warns
    memory = memory_of(device)
    dtype, reason = choose_dtype(device)
    here = Here(lesson, device, memory, dtype, reason, choose_scale(device, memory), ROOT)
    torch.manual_seed(0)
    print(describe(here, prepare()))
    return here


def check_lesson(lesson: str) -> None:
    """Refuse a name that is no lesson's."""
    if not isinstance(lesson, str) or not _LESSON.fullmatch(lesson):
        raise ValueError(
            f"{lesson!r} names no lesson. Write tier and number, such as "
            "setup('beginner/01'), setup('labs/beginner/01') or setup('00')."
        )


def find_device() -> torch.device:
    """The fastest device that this PyTorch can use."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def memory_of(device: torch.device) -> int:
    """The whole memory of a device in bytes. Apple's GPU shares the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = psutil.virtual_memory().total
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return min(machine, int(limit)) if limit.isdigit() else machine


def choose_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """The 16-bit type for mixed precision on a device, and why that one."""
    if device.type == "cuda":
        return _cuda_dtype(device)
    if device.type == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):
        return torch.float16, "bfloat16 on Apple's GPU needs macOS 14; float16 needs loss scaling"
    reason = "same range as float32, so no loss scaling"
    if device.type == "cpu":
        reason += "; saves memory on every CPU, time only on those with bfloat16 instructions"
    return torch.bfloat16, reason


def _cuda_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    # The plain is_bf16_supported() also says True where bfloat16 is only emulated, as on a T4.
    properties = torch.cuda.get_device_properties(device)
    capability = f"compute capability {properties.major}.{properties.minor}"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, f"{capability} computes it; same range as float32, no loss scaling"
    return torch.float16, (
        f"{capability} has no bfloat16 units (8.0 has), PyTorch would emulate them; "
        "float16 needs loss scaling"
    )


def choose_scale(device: torch.device, memory_bytes: int) -> str:
    """One dial for the size of all models: "tiny" without CUDA, "small" up to 16 GiB."""
    wish = os.environ.get("COURSE_SCALE", "")
    if wish:
        if wish not in SCALES:
            raise ValueError(f"COURSE_SCALE is {wish!r}. Set it to one of {', '.join(SCALES)}.")
        return wish
    if device.type != "cuda":
        return "tiny"
    return "small" if memory_bytes <= SMALL_GPU_BYTES else "full"


def describe(here: Here, meter: str) -> str:
    """The block that `setup` prints."""
    rows = {
        "device": device_name(here.device),
        "memory": format_bytes(here.memory_bytes),
        "dtype": f"{str(here.dtype).removeprefix('torch.')}: {here.dtype_reason}",
        "scale": f"{here.scale} (COURSE_SCALE=tiny, small or full overrides it)",
        "meter": meter,
        "seed": "torch.manual_seed(0): a second run draws the same numbers",
        "versions": f"Python {platform.python_version()}, PyTorch {torch.__version__}",
    }
    if platform.system() == "Windows":
        rows["ranks"] = "Windows cannot start them: lessons with several ranks need WSL2"
    lines = [f"  {name:<9}{text}" for name, text in rows.items()]
    return "\n".join([f"Lesson {here.lesson} on this machine", *lines])


def device_name(device: torch.device) -> str:
    """What a reader calls the device."""
    if device.type == "cuda":
        return f"CUDA GPU, {torch.cuda.get_device_name(device)}"
    if device.type == "mps":
        return "Apple GPU (MPS), used for speed; memory is measured on the CPU"
    kernels = torch.backends.cpu.get_cpu_capability()
    count = torch.get_num_threads()
    return f"CPU, {count} {'thread' if count == 1 else 'threads'}, {kernels} kernels"
