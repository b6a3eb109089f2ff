"""Exported scripts train on four real ranks, and lose what one process loses."""

from __future__ import annotations

import pytest
from export_cases import (
    CASES,
    DEEP,
    EVERY,
    IN_BF16,
    TIED,
    TINY,
    on_real_ranks,
    one_process,
    start_weights,
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """What every run of a model starts from."""
    folder = tmp_path_factory.mktemp("weights")
    return {model.name: start_weights(model, folder) for model in (TINY, TIED, DEEP)}


@pytest.fixture(scope="module")
def plain(weights):
    """What one process loses, by model."""
    return {m.name: one_process(m, weights[m.name]) for m in (TINY, TIED, DEEP)}


@pytest.fixture(scope="module")
def parallel(weights):
    """What each script loses; one launch of ranks for them all."""
    return on_real_ranks(weights)


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_those_of_one_process(name, parallel, plain):
    assert parallel[name] == pytest.approx(plain[CASES[name].model.name], rel=1e-6)


@pytest.mark.parametrize("name", IN_BF16)
def test_losses_in_bf16_are_near(name, parallel, plain):
    losses, exact = parallel[name], plain[EVERY[name].model.name]
    assert losses == pytest.approx(exact, rel=5e-4)
    assert losses != pytest.approx(exact, rel=1e-6)  # so it did compute in bfloat16
