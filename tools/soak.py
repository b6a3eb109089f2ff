"""What takes too long for each change, beside the slow tests: `make soak`.

python tools/soak.py bytes            tests of bytes, with the kernels that are chosen outside
python tools/soak.py kernels          the same under every choice of CPU kernels
python tools/soak.py lessons          every lesson one size up, COURSE_SCALE=small
python tools/soak.py lessons PATH ... only these notebooks

Which kernels a CPU has decides how much scratch memory they take, and so where a peak lies. What
the course asserts about bytes must hold for all of them. Pages of the lessons go to build/soak/.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import course  # noqa: E402

from utils.units import format_bytes, format_seconds  # noqa: E402

BYTE_TESTS = (
    "memory/test_meter.py",
    "memory/test_meter_breakdown.py",
    "memory/test_meter_input.py",
    "memory/test_meter_threads.py",
    "memory/test_holdings.py",
    "memory/test_timeline.py",
    "techniques/test_techniques.py",
    "techniques/test_checkpointing_memory.py",
)
THREADS = (1, 2, 8)
CELL_SECONDS = 3600  # models of a small GPU, on whatever CPU is there
# oneDNN takes a ceiling, PyTorch's own kernels one of three names; beside each the flags that a
# CPU must show. Without them the setting would only repeat another one.
SETTINGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("", "", ()),
    ("ONEDNN_MAX_CPU_ISA", "SSE41", ("sse4_1",)),
    ("ONEDNN_MAX_CPU_ISA", "AVX2", ("avx2",)),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", ("avx512f", "avx512bw", "avx512dq", "avx512vl")),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", ("avx512_bf16",)),
    ("ATEN_CPU_CAPABILITY", "default", ()),
    ("ATEN_CPU_CAPABILITY", "avx2", ("avx2",)),
)
CPU_FLAGS = Path("/proc/cpuinfo")  # Linux; elsewhere only what needs no flag is tried


@dataclass(frozen=True)
class KernelChoice:
    """One choice of kernels and threads; `missing` are the flags that this CPU lacks."""

    name: str
    environment: dict[str, str]
    missing: tuple[str, ...] = ()


def cases(flags: set[str]) -> Iterator[KernelChoice]:
    """Every setting with every number of threads, for a CPU that shows these flags."""
    for variable, value, needed in SETTINGS:
        missing = tuple(flag for flag in needed if flag not in flags)
        chosen = {variable: value} if variable else {}
        label = f"{variable}={value}" if variable else "the CPU's own kernels"
        for threads in THREADS:
            counts = {"OMP_NUM_THREADS": str(threads)}
            yield KernelChoice(f"{label}, {threads} threads", chosen | counts, missing)


def cpu_flags(file: Path = CPU_FLAGS) -> set[str]:
    """What the CPU says that it can do; nothing where the system does not tell."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def kernels(tests: Sequence[Path], found: Iterable[KernelChoice]) -> int:
    """Run the tests for each case, and print a line for each; the number that failed."""
    failed = 0
    for case in found:
        if case.missing:
            print(f"not tried  {case.name}: this CPU lacks {', '.join(case.missing)}", flush=True)
            continue
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, tests)]
        done = subprocess.run(
            command, env=os.environ | case.environment, cwd=ROOT, capture_output=True, text=True
        )
        failed += done.returncode != 0
        print(f"{'FAILED' if done.returncode else 'passed':<11}{case.name}", flush=True)
        if done.returncode:
            print(done.stdout + done.stderr, flush=True)
    return failed


def lessons(paths: Sequence[Path], folder: Path) -> int:
    """Run notebooks one size up, and print a line for each; the number that failed."""
    os.environ["COURSE_SCALE"] = "small"
    failed = 0
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        page, board = folder / f"{path.stem}.html", folder / "scoreboard.json"
        result = course.run(path, page, board, CELL_SECONDS)
        failed += bool(result.error)
        numbers = f"{format_seconds(result.seconds):>8}  {format_bytes(result.peak_bytes):>10}"
        print(f"{numbers}  {path.stem}  {result.error or 'passed'}", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Soak; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("bytes", "kernels", "lessons"))
    parser.add_argument("paths", nargs="*", type=Path, help="tests or notebooks; default: all")
    options = parser.parse_args(arguments)
    tests = options.paths or [root / "tests" / name for name in BYTE_TESTS]
    if options.what == "bytes":
        return subprocess.call([sys.executable, "-m", "pytest", *map(str, tests)], cwd=root)
    if options.what == "kernels":
        return 1 if kernels(tests, cases(cpu_flags())) else 0
    found = [path for path in course.notebooks(root) if root / "notebooks" in path.parents]
    return 1 if lessons(options.paths or found, root / "build" / "soak") else 0


if __name__ == "__main__":
    sys.exit(main())
