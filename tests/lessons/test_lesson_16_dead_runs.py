"""Three dead runs: whole, of real ranks, and with evidence of what was planted in each."""

from __future__ import annotations

import json
import re

import pytest
import torch.distributed as dist

from utils.lessons.lesson_16.dead_runs import CAUSES, FILE, PLANTED, SCRIPT, dead_run
from utils.lessons.lesson_16.records.dead_runs import anonymous
from utils.ranks import run_ranks
from utils.ranks.calls import Call, call_from, recorded_calls, write_calls


def steps(lines: tuple[str, ...]) -> list[int]:
    return [int(m[1]) for line in lines if (m := re.search(r"step +(\d+): loss [\d.]+$", line))]


def test_a_rank_that_skipped_a_collective_is_one_behind() -> None:
    run, planted = dead_run("A"), PLANTED["A"]
    last = {rank: calls[-1].number for rank, calls in run.traces.items()}
    assert sorted(last) == [0, 1, 2, 3], "every rank left its trace"
    behind = [rank for rank, number in last.items() if number < max(last.values())]
    assert behind == [planted.culprit]
    assert planted.step not in steps(run.logs[planted.culprit])
    assert all(planted.step in steps(run.logs[rank]) for rank in last if rank not in behind)


def test_a_killed_host_says_nothing_more() -> None:
    run, host = dead_run("B"), PLANTED["B"].culprit
    lost = (2 * host, 2 * host + 1)
    assert not set(lost) & set(run.traces) and set(run.traces) == {0, 1}
    for rank in lost:
        assert steps(run.logs[rank]) and "Error" not in " ".join(run.logs[rank])
    assert not [line for line in run.agents[host] if "exitcode" in line]
    assert all("Connection closed by peer" in " ".join(run.logs[rank]) for rank in (0, 1))


def test_a_rank_without_memory_grew_and_was_killed() -> None:
    run, rank = dead_run("C"), PLANTED["C"].culprit
    held = [int(m[1]) for line in run.logs[rank] if (m := re.search(r" (\d+) MB  step", line))]
    others = [int(m[1]) for line in run.logs[0] if (m := re.search(r" (\d+) MB  step", line))]
    assert held == sorted(held) and held[-1] - held[0] > 150 > 30 > others[-1] - others[0]
    assert "exitcode: -9) local_rank: 1" in " ".join(run.agents[0])
    assert rank not in run.traces and set(run.traces) == {0, 2, 3}


def test_they_tell_nothing_of_the_machine() -> None:
    text = FILE.read_text()
    assert not re.search(r"/(work|home|root|tmp)/", text), "a path of a machine"
    assert anonymous("see /tmp/x/y.log", "/tmp/x") == "see /job/y.log"
    assert {p.cause for p in PLANTED.values()} <= set(CAUSES)
    for name in PLANTED:
        for calls in dead_run(name).traces.values():
            line = SCRIPT.splitlines()[calls[-1].line - 1]
            assert "all_reduce" in line, f"line {calls[-1].line} of the script is {line!r}"


def test_a_run_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no dead run 'D'; there are A, B, C"):
        dead_run("D")


def calls_here() -> list[Call]:
    import torch

    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(2, 2), 0)
    return recorded_calls()


def test_calls_know_their_line_and_survive_a_file(tmp_path) -> None:
    for calls in run_ranks(calls_here, 2):
        assert [(c.kind, c.sizes) for c in calls] == [
            ("all_reduce", ((3,),)),
            ("broadcast", ((2, 2),)),
        ]
        assert [c.function for c in calls] == ["calls_here"] * 2
        assert calls[1].line == calls[0].line + 1
    write_calls(tmp_path / "calls.json", calls)
    rows = json.loads((tmp_path / "calls.json").read_text(encoding="utf-8"))
    assert [call_from(row) for row in rows] == calls
