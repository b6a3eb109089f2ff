"""What holds for all tests of this folder.

With COURSE_REQUIRE_ALL set, as in continuous integration, a test that is skipped has failed. On a
user's machine tests are skipped without a browser, a compiler or DeepSpeed; where all of that is
meant to be there, a skip would lose the evidence in silence. COURSE_SKIPPED names a file that takes
the ids of what was skipped, so that `make optional` can run just that.

With --without-processes, as in `make quick`, a file that names what starts ranks, kernels or programs
is left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Timings are never asserted: on a busy machine an example takes as long as it takes.
settings.register_profile("course", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("course")

PRELOADED = (
    "hypothesis",
    "utils.planner",
    "utils.simulation",
    "utils.labs",
    "utils.views",
    "evidence.validation",
)
SETTING = "COURSE_REQUIRE_ALL"
LIST = "COURSE_SKIPPED"
FREE = ("gpu", "large")  # marks of what may be skipped where nothing else may
WITHOUT = "--without-processes"
STARTS_PROCESSES = re.compile(
    r"\b(run_(ranks|torchrun|elastic|hosts|loader|killable)|subprocess|Popen|playwright|killable|"
    r"nbclient|multiprocessing|forkserver|solved_lab|importorskip|pytest\.mark\.deepspeed|"
    r"export_cases|capstone_cases|import (soak|scores)|evidence\.record)\b"  # those start some, too
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a contributor leaves out before each commit."""
    parser.addoption(WITHOUT, action="store_true", help="leave out files that start processes")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True for a test file that starts processes, where those are not wanted."""
    if not config.getoption(WITHOUT) or not collection_path.match("test_*.py"):
        return None
    return starts_processes(collection_path) or None


def starts_processes(file: Path) -> bool:
    """Whether a test file names something that starts ranks, kernels or programs."""
    return STARTS_PROCESSES.search(file.read_text(encoding="utf-8")) is not None


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> None:
    """A shell has its background jobs ignore interrupts, and some tests here send themselves one."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_verdict_of_a_test_is_a_learners() -> None:
    """`check` keeps what it says on the scoreboard of whoever runs it."""
    os.environ.setdefault("COURSE_SCOREBOARD", "build/test-scoreboard.json")


@pytest.fixture(scope="session", autouse=True)
def what_test_files_ask_for_is_imported_once() -> None:
    """By the server of ranks and checks: half a second in each of them that runs a test file's function."""
    if importlib.util.find_spec("utils") is not None:
        server = importlib.import_module("utils.ranks.server")
        server.LIBRARIES["pytest"] = PRELOADED


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels' scratch memory depends on the number of threads; in theirs the profiler sees nothing."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def counting() -> None:
    """What a test that compares with the CPU's allocator needs."""
    import torch

    from utils.memory.source import CountingSource, source_for

    if not isinstance(source_for(torch.device("cpu")), CountingSource):
        pytest.skip("needs the counting allocator, and so a C++ compiler")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that load DeepSpeed come last: simulations patch it from then on, as they would for a
    learner who uses it, and the others are to run as they do for one who does not."""
    if "deepspeed" in sys.modules:
        raise pytest.UsageError(
            "A test file loads DeepSpeed when it is imported. Load it in a test."
        )
    files = {item.path for item in items if item.get_closest_marker("deepspeed")}
    items.sort(key=lambda item: item.path in files)


@pytest.fixture(autouse=True)
def deepspeed_stays_out(request: pytest.FixtureRequest) -> Iterator[None]:
    """But for tests that are marked `deepspeed`."""
    was_there = "deepspeed" in sys.modules
    yield
    if not request.node.get_closest_marker("deepspeed") and not was_there:
        assert "deepspeed" not in sys.modules, (
            "this test loads DeepSpeed: mark its file `deepspeed`"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Only tests that need a GPU, or a package that the course does not install, may be skipped."""
    report = yield
    free = any(item.get_closest_marker(mark) for mark in FREE)
    return report if free else required(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole file that is skipped, as by `importorskip`."""
    return required((yield))


def required(
    report: pytest.TestReport | pytest.CollectReport,
) -> pytest.TestReport | pytest.CollectReport:
    """The report, as a failure if it is a skip and none is allowed."""
    if report.skipped and os.environ.get(SETTING) and not hasattr(report, "wasxfail"):
        *_, reason = report.longrepr if isinstance(report.longrepr, tuple) else (report.longrepr,)
        report.outcome = "failed"
        report.longrepr = f"{SETTING} is set, and this was skipped: {reason}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the ids of tests, and of whole files, that were skipped."""
    if file := os.environ.get(LIST):
        reports = terminalreporter.stats.get("skipped", [])
        ids = [report.nodeid for report in reports if not set(FREE) & set(_marks(report))]
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("".join(f"{name}\n" for name in dict.fromkeys(ids)))


def _marks(report: pytest.TestReport | pytest.CollectReport) -> Iterable[str]:
    """The keywords of a test; a file that was skipped as it was read has none."""
    return getattr(report, "keywords", ())
