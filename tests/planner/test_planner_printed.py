"""What one sees of a figure: an estimate as text, and a table's worst rows."""

from __future__ import annotations

import pytest

from evidence.validation import report
from evidence.validation.comparison import Comparison
from utils.planner import Batch, Cluster, Plan, estimate


def test_an_estimate_prints_the_plan_its_bytes_and_its_seconds_by_part() -> None:
    plan = Plan(dp=4, zero_stage=3, framework="fsdp")
    found = estimate("llama-3.2-1b", Cluster(gpu="H100", nodes=1, gpus_per_node=4), plan,
                     Batch(sequences=8, sequence_length=2048))  # fmt: skip
    plan_line, bytes_line, seconds_line = str(found).splitlines()
    assert plan_line == "llama-3.2-1b, Plan(dp=4, zero_stage=3, framework='fsdp')"
    assert f"{found.peak.allocated_bytes / 2**30:.2f} GiB at the peak" in bytes_line
    assert "fits" in bytes_line and "optimizer state" in bytes_line
    assert f"matmul {found.time.matmul:.4g}" in seconds_line and "pipeline" not in seconds_line


def test_the_worst_rows_of_a_table_come_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        Comparison("table", "seconds", "near", 10, 11),
        Comparison("table", "seconds", "far", 10, 5, fitted=True),
        Comparison("table", "seconds", "farther", 10, 20),
    ]
    monkeypatch.setitem(report.SOURCES, "table", lambda: rows)
    report.print_worst(("table",), 2)
    printed = capsys.readouterr().out
    assert printed.index("+100.0%  farther") < printed.index("-50.0%  far  (a constant was set on")
    assert "near" not in printed
