"""Shares of data sets: the same items for any number of ranks, and refusals that help."""

import pytest
import torch
from torch.utils.data import TensorDataset

from utils.lessons.lesson_04.sharding import sharded_loader
from utils.ranks import RankError, run_ranks

WORLD = 4


def shares(items, batch, drop_last):
    loader = sharded_loader(TensorDataset(torch.arange(items)), batch, seed=3, drop_last=drop_last)
    loader.sampler.set_epoch(1)
    return [step.tolist() for (step,) in loader]


@pytest.mark.parametrize("drop_last", [False, True])
def test_step_k_of_four_ranks_holds_what_step_k_of_one_does(drop_last):
    together = run_ranks(shares, WORLD, 24, 8, drop_last)
    (alone,) = run_ranks(shares, 1, 24, 8, drop_last)
    for step, items in enumerate(alone):
        assert sorted(item for rank in together for item in rank[step]) == sorted(items)


def test_an_uneven_last_batch_is_padded_or_left_out():
    padded = run_ranks(shares, WORLD, 10, 4, False)
    items = [item for rank in padded for step in rank for item in step]
    assert len(items) == 12 and len(set(items)) == 10
    dropped = run_ranks(shares, WORLD, 10, 4, True)
    assert [len(rank) for rank in dropped] == [2] * WORLD
    assert len({item for rank in dropped for step in rank for item in step}) == 8


@pytest.mark.parametrize(
    ("items", "batch", "drop_last", "message"),
    [
        (3, 4, False, "Take 4 items or more, or at most 3 ranks"),
        (40, 10, False, "choose 8 or 12"),
        (40, 2, False, "choose 4"),
        (40, 0, False, "needs 4 items or more"),
        (10, 16, True, "at most 8"),
    ],
)
def test_shares_that_cannot_be(items, batch, drop_last, message):
    with pytest.raises(RankError, match=message):
        run_ranks(shares, WORLD, items, batch, drop_last)
