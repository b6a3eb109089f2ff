"""Runs the stages of a command of the Makefile: `python tools/stages.py test`.

Each stage runs even when one before it failed: one failure must not hide another. Stages that keep
one processor busy run side by side. What a stage prints is shown, and kept in build/logs/. At the
end each stage has a line with its seconds, and each that failed its command and its log.

python tools/stages.py test      rules and types first, then tests, then notebooks
python tools/stages.py quick     rules, types and the short tests that start no process
python tools/stages.py optional  what `test` skipped, with the optional packages in .venv
python tools/stages.py soak      what takes too long for each change
python tools/stages.py record    what a new device is measured by
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).resolve().parents[1]
LOGS = Path("build/logs")
SKIPPED = Path("build/skipped-tests.txt")
END_SECONDS = 30.0
LAST_WORDS_SECONDS = 5.0
LOOK_SECONDS = 0.1
# Three files at a time, also on two processors: tests and lessons wait a good part of their time, for
# ranks that hang on purpose, for schedulers and for time limits.
THREE_AT_A_TIME = ("-n", "3", "--dist", "loadfile")
PYTEST = ("-m", "pytest")
NBVAL = (
    *PYTEST,
    *THREE_AT_A_TIME,
    "--nbval-lax",
    "--nbval-current-env",
    "--nbval-cell-timeout=600",
)
OPS = ("-m", "utils.techniques.deepspeed_ops", "--if-it-can")
ALWAYS = {"KINETO_LOG_LEVEL": "99"}  # or the profiler writes its start lines into outputs of cells
NO_BARS = {"TQDM_DISABLE": "1"}  # on a slow machine one could stand in an output that is compared
REQUIRED = {"COURSE_REQUIRE_ALL": "1"}
# Tests mean the same on every machine: no GPU, no network, a scoreboard of their own. Threads of a
# kernel that wait for work sleep: by default they spin, and where several kernels share the
# processors they take them from those that work, 3 to 10 times slower on two cores.
ALIKE = {
    "CUDA_VISIBLE_DEVICES": "",
    "COURSE_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "COURSE_SCOREBOARD": "build/test-scoreboard.json",
}
# They show more where the optional packages and schedulers are; labs do not.
OPTIONAL_LESSONS = ("16a_when_a_run_breaks", "17_cluster_and_budget")


@dataclass(frozen=True)
class Stage:
    """A name, the arguments of a Python that runs it, and what it finds in its environment.

    A stage of `one_processor` runs beside its neighbours that are alike.
    """

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    one_processor: bool = False


def _lessons(*names: str) -> tuple[str, ...]:
    found = (ROOT / "notebooks").rglob("*.ipynb")
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in found if path.stem in names))


STYLE = Stage("style", ("tools/style.py",), one_processor=True)
SOURCES = Stage("sources", ("tools/build.py", "--check"), one_processor=True)
STAGES: dict[str, tuple[Stage, ...]] = {
    "test": (
        STYLE,
        Stage("libraries", (*PYTEST, "tests/shims/test_shims.py"), one_processor=True),
        Stage("offload", (*OPS, "cpu-adam"), one_processor=True),
        SOURCES,
        Stage(
            "tests",
            (
                *PYTEST,
                *THREE_AT_A_TIME,
                "--durations=40",
                "-m",
                "not slow",
                "tests",
                "--ignore=tests/shims/test_shims.py",
            ),
            {"COURSE_SKIPPED": str(SKIPPED)},
        ),
        Stage("notebooks", (*NBVAL, "notebooks", "labs", "solutions"), NO_BARS),
    ),
    "quick": (
        STYLE,
        SOURCES,
        Stage(
            "quick-tests",
            (
                *PYTEST,
                *THREE_AT_A_TIME,
                "-m",
                "not slow and not long",
                "--without-processes",
                "tests",
            ),
        ),
    ),
    "optional": (
        Stage("packages", ("tools/extra.py", "clusters", "site")),
        STYLE,
        Stage("offload", (*OPS, "cpu-adam"), REQUIRED, one_processor=True),
        Stage("skipped", (*PYTEST, *THREE_AT_A_TIME, "-m", "not slow", f"@{SKIPPED}"), REQUIRED),
        Stage("lessons", (*NBVAL, *_lessons(*OPTIONAL_LESSONS)), NO_BARS),
    ),
    "soak": (
        Stage("offload", (*OPS, "cpu-adam", "async-io")),
        Stage("slow-tests", (*PYTEST, "tests", "-m", "slow")),
        Stage("mutants", ("tools/mutants.py",)),
        Stage("kernels", ("tools/soak.py", "kernels")),
        Stage("lessons", ("tools/soak.py", "lessons")),
        Stage("fresh", ("tools/fresh.py",)),
    ),
    "record": (
        Stage("records", ("-m", "evidence.record", "--minutes", "12")),
        Stage("gpu-tests", (*PYTEST, "-m", "gpu", "tests")),
        Stage("lessons", ("tools/course.py",)),
    ),
}


class Running:
    """A stage that has started: `status` is its exit status once it has ended, `seconds` what it took."""

    def __init__(
        self, stage: Stage, root: Path, python: str, settings: Mapping[str, str], *, alone: bool
    ) -> None:
        """Start it in `root`. What it prints is kept in its log, and shown as it comes if it is alone."""
        self.stage, self.log = stage, root / LOGS / f"{stage.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.status: int | None = None
        self.seconds, self._started, self._alone = 0.0, time.monotonic(), alone
        self.command = [python, *stage.command]
        self._process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=root,
            env={**os.environ, **settings, **stage.settings, "PYTHONUNBUFFERED": "1"},
        )
        arguments = self._process.stdout, self.log.open("wb"), alone
        self._shown = threading.Thread(target=_keep, args=arguments, daemon=True)
        self._shown.start()

    def has_ended(self, within_seconds: float) -> bool:
        """Wait a little; what a stage beside others has printed is shown when it has ended."""
        try:
            self.status = self._process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            return False
        self.seconds = time.monotonic() - self._started
        self._shown.join(LAST_WORDS_SECONDS)  # what it left running could hold the pipe for ever
        if not self._alone:
            _print(self.log.read_bytes())
        return True


def _keep(pipe: IO[bytes], file: IO[bytes], shown: bool) -> None:
    with pipe, file:
        while block := os.read(pipe.fileno(), 1 << 16):
            file.write(block)
            file.flush()
            if shown:
                _print(block)


def _print(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def run(
    stages: Sequence[Stage], root: Path, python: str, settings: Mapping[str, str]
) -> Iterator[Running]:
    """Run stages side by side; each as it ends."""
    alone = len(stages) == 1
    running: list[Running] = []
    try:
        for stage in stages:
            running.append(Running(stage, root, python, settings, alone=alone))
        while running:
            for one in running[:]:
                if one.has_ended(LOOK_SECONDS):
                    running.remove(one)
                    yield one
    except (KeyboardInterrupt, GeneratorExit):  # also one that came while a stage was starting
        _end_children()
        raise


def _end_children() -> None:
    """An interrupted stage has its own time to end: pytest ends what its tests started."""
    _, still = psutil.wait_procs(psutil.Process().children(), END_SECONDS)
    for process in still:
        process.kill()
    psutil.wait_procs(still)


def run_all(target: str, root: Path = ROOT, python: str = sys.executable) -> int:
    """Run the stages of a target and print what came of each; 0 if all passed."""
    settings = ALWAYS | (ALIKE if target != "record" else {})
    lines, failed = [], []
    for stages in _side_by_side(STAGES[target]):
        print(f"\n--- {target}: {', '.join(stage.name for stage in stages)}", flush=True)
        for done in run(stages, root, python, settings):
            verdict = "FAILED" if done.status else "passed"
            lines.append(f"{verdict}  {done.seconds:6.0f} s  {done.stage.name}")
            print(lines[-1], flush=True)
            if done.status:
                failed.append(
                    f"  {done.stage.name}\n    command: {shlex.join(done.command)}\n"
                    f"    log:     {LOGS / done.stage.name}.log"
                )
    print("", *lines, sep="\n", flush=True)
    if failed:
        print("Failed:", *failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


def _side_by_side(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Neighbours of one processor together, each other stage by itself."""
    numbered = list(enumerate(stages))
    groups = groupby(numbered, key=lambda pair: -1 if pair[1].one_processor else pair[0])
    return [[stage for _, stage in group] for _, group in groups]


def _ready(target: str) -> str:
    """Why a target cannot start, as a sentence; "" if it can."""
    if target == "optional" and not (ROOT / SKIPPED).is_file():
        return "There is no list of skipped tests yet: run `make test` first."
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a target by its name; 0 if nothing failed, 130 after an interrupt."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 1 or given[0] not in STAGES:
        print(f"Name one of: {', '.join(STAGES)}.", file=sys.stderr)
        return 2
    if problem := _ready(given[0]):
        print(problem, file=sys.stderr)
        return 1
    try:
        return run_all(given[0])
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
