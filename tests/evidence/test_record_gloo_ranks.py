"""Two ranks on one device: the experiment on the CPU, and what a GPU would be asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from evidence.record import __main__ as command
from evidence.record import gloo_ranks
from evidence.record.store import recorded
from utils.models import small_resnet
from utils.ranks import run_ranks

HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_two_ranks_and_one_process_on_the_cpu(tmp_path: Path) -> None:
    assert command.main(["gloo_ranks", "--commit", HASH], root=tmp_path) == 0
    (record,) = recorded("gloo_ranks", tmp_path)
    (row,) = record.rows
    assert (row["ranks"], row["backend"], row["completed"]) == (2, "gloo", True)
    assert row["largest_relative_difference"] < 1e-4
    assert len(row["losses"]) == gloo_ranks.STEPS and row["losses"][-1] < row["losses"][0]
    assert row["all_reduced_bytes"] == 4 * sum(p.numel() for p in small_resnet().parameters())
    assert row["peak_bytes"] < row["one_process_peak_bytes"], "half of the activations each"
    assert sum(row["breakdown"].values()) == row["peak_bytes"]
    assert row["images_per_second"] == pytest.approx(64 / row["median_step_seconds"])


def where_a_rank_trains() -> tuple[str, set[str]]:
    training = gloo_ranks.ShareOfTheBatch(torch.device("meta", 0))
    backend = dist.get_backend(training._group)
    return backend, {str(p.device) for p in training.model.parameters()}


def test_a_rank_trains_where_it_is_told_to_and_talks_by_gloo() -> None:
    """One rank: DistributedDataParallel itself cannot wrap a model without data."""
    assert run_ranks(where_a_rank_trains, 1) == [("gloo", {"meta"})]
    (trial,) = gloo_ranks.trials(torch.device("cuda", 0))
    assert trial.run.args == (torch.device("cuda", 0),)
