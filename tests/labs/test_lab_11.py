"""Lab 11's slow jobs: what each is slow by, and that its rings leave no process behind."""

from __future__ import annotations

import itertools
import os

import pytest
from lab_answers import solution
from rank_cases import nothing_left

from utils.labs.slow_jobs import SlowJob, lesson_job, unknown_job
from utils.labs.verdict import Status
from utils.lessons.lesson_11 import checks as lab_11
from utils.lessons.lesson_11.mistakes import all_send_first
from utils.ranks import run_ranks


def test_rings_and_trees_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_11, "TIMEOUT_SECONDS", 3.0)
    run_ranks(os.getpid, 1)  # the server is meant to stay
    with nothing_left():
        lab_11.ordered_ring(all_send_first)
        assert lab_11.tree_broadcast(solution("11.tree_broadcast")).status is Status.CORRECT


def test_each_job_has_one_cause_that_matters() -> None:
    for name in "ABC":
        job, healthy = unknown_job(name), SlowJob().step().step_seconds
        gains = {
            cause: job.step().step_seconds - job.fixed(cause).step().step_seconds
            for cause in (
                "slow_nodes",
                "weak_ports",
                "bucket_bytes",
                "reduced_passes",
                "load_seconds",
            )
        }
        largest, second = sorted(gains.values(), reverse=True)[:2]
        assert largest > 0.1 * healthy, f"job {name}: nothing is slow"
        assert second < 0.1 * largest, f"job {name}: a second cause matters: {gains}"


def test_a_bucket_smaller_than_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="DDP splits no tensor"):
        SlowJob(bucket_bytes=2**18)


def test_the_lessons_job_is_cured_cause_by_cause() -> None:
    job = lesson_job()
    for cause in ("slow_nodes", "reduced_passes", "network", "load_seconds"):
        before, job = job.step().step_seconds, job.fixed(cause)
        assert job.step().step_seconds < before, f"curing {cause} gains nothing"
    assert job == SlowJob()
    trace = lesson_job().step()
    last = trace.seconds("waiting for a node")
    assert last.index(min(last)) == 5, "the straggler waits least"
    for number, row in enumerate(trace.stretches):
        assert all(a.end_seconds == b.start_seconds for a, b in itertools.pairwise(row)), number
