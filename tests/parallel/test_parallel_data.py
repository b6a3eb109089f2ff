"""What a rank reads, and what a token weighs."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.parallel import ParallelDims, local_positions, local_rows, token_weight
from utils.parallel.data import IGNORED, summed_loss
from utils.parallel.mesh import axes_of, device_mesh, ranks_along, sum_over
from utils.ranks import run_ranks


def test_ranks_of_one_replica_read_the_same_rows():
    dims, rows = ParallelDims(pp=2, replicate=2, shard=2, tp=2), torch.arange(8)
    for rank in range(dims.ranks):
        (mine,) = local_rows(dims, rank, rows)
        assert mine.tolist() == [2 * dims.data_rank(rank), 2 * dims.data_rank(rank) + 1]


def test_rows_that_do_not_divide_are_refused():
    for rows, advice in ((6, "Take 4 rows"), (3, "Take 4 rows"), (9, "Take 8 rows")):
        with pytest.raises(ValueError, match=re.escape(advice)):
            local_rows(ParallelDims(shard=4), 0, torch.zeros(rows))


@settings(deadline=None)
@given(cp=st.integers(1, 4), pieces=st.integers(1, 3))
def test_positions_part_the_sequence_and_its_work(cp, pieces):
    length, dims = 2 * cp * pieces, ParallelDims(cp=cp, tp=2)
    held = [local_positions(dims, 2 * place, length) for place in range(cp)]
    assert sorted(torch.cat(held).tolist()) == list(range(length))
    # A query attends to its own position and all before it: the same work on every rank.
    assert len({int((positions + 1).sum()) for positions in held}) == 1
    assert local_positions(dims, 1, length).tolist() == held[0].tolist()  # tp shares positions


def test_sequences_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=re.escape("Take a multiple of 8, such as 24")):
        local_positions(ParallelDims(cp=4), 0, 20)
    assert local_positions(ParallelDims(), 0, 7).tolist() == list(range(7))


def test_a_masked_target_adds_nothing():
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, 2, IGNORED], [IGNORED, IGNORED, 4]])
    kept = torch.stack([logits[0, 0], logits[0, 1], logits[1, 2]])
    wanted = torch.nn.functional.cross_entropy(kept, torch.tensor([1, 2, 4]), reduction="sum")
    torch.testing.assert_close(summed_loss(logits, targets), wanted)


def _on_a_mesh():
    mesh = device_mesh(ParallelDims(replicate=2, tp=2), "cpu")
    rank = torch.distributed.get_rank()
    targets = torch.zeros(2, 3, dtype=torch.long)
    targets[0, : rank // 2] = IGNORED  # the second replica has a target less
    found = [token_weight(targets, mesh), ranks_along(mesh, ["replicate", "pp"])]
    found += [sum_over(mesh, ["tp"], torch.tensor(rank)).item()]
    found += [
        sum_over(mesh, ["pp"], torch.tensor(rank)).item(),
        axes_of(mesh, ["tp", "shard", "cp"]),
    ]
    with pytest.raises(ValueError, match="No rank has a token to learn from"):
        token_weight(torch.full((2, 3), IGNORED), mesh)
    with pytest.raises(ValueError, match="needs 8 ranks, and 4 are here"):
        device_mesh(ParallelDims(shard=8), "cpu")
    return found


def test_a_token_weighs_the_same_on_all_ranks():
    found = run_ranks(_on_a_mesh, 4)
    assert [row[0] for row in found] == [2 / 11] * 4
    assert [row[1] for row in found] == [2] * 4
    assert [row[2] for row in found] == [1, 1, 5, 5]
    assert [row[3] for row in found] == [0, 1, 2, 3]
    assert found[0][4] == ("shard", "tp")
