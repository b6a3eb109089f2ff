"""Lesson 05's own choices: how many blocks fit, and what a compiled model keeps."""

from __future__ import annotations

import pytest
import torch

from utils.lessons.lesson_05.block_choice import fewest_blocks
from utils.lessons.lesson_05.compiled import compiled
from utils.lessons.lesson_05.step_costs import kept_bytes
from utils.models import Transformer, TransformerConfig

SMALL = TransformerConfig(vocabulary=64, hidden=64, layers=3, heads=4, feedforward=176)


@pytest.mark.parametrize(
    ("limit", "freed", "blocks"),
    [(100, 5, 0), (99, 5, 1), (90, 5, 2), (89, 5, 3), (85, 10, 3), (50, 5, 10)],
)
def test_the_fewest_blocks_that_fit(limit: int, freed: int, blocks: int):
    """Each gives back 5 of 100; where more was promised, the search goes on from the division."""
    assert fewest_blocks(lambda n: 100 - 5 * n, limit, freed, depth=10) == blocks


def test_a_step_that_fits_with_no_choice_is_refused():
    with pytest.raises(ValueError, match="all 10 blocks"):
        fewest_blocks(lambda n: 100 - 5 * n, 49, 5, depth=10)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # torch.compile looks at an input of a block
def test_a_budget_and_a_graph_for_each_block_keep_less_and_the_loss_stays():
    torch.manual_seed(0)
    tokens, found = torch.randint(64, (4, 64)), {}
    state = Transformer(SMALL).state_dict()
    for budget, by_block in ((1.0, False), (0.0, False), (0.0, True)):
        model = Transformer(SMALL)
        model.load_state_dict(state)
        with compiled(model, budget, by_block=by_block) as body:
            loss = float(body(tokens).square().mean().detach())
            kept = kept_bytes(model, lambda body=body: body(tokens).square().mean())
        found[budget, by_block] = kept
        assert loss == pytest.approx(float(eager_loss(state, tokens)), rel=1e-5)
    assert found[0.0, False] < found[1.0, False] / 2
    assert found[0.0, True] < found[1.0, False] / 2
    assert found[0.0, False] < found[0.0, True], "one graph keeps its inputs alone"


def eager_loss(state, tokens):
    model = Transformer(SMALL)
    model.load_state_dict(state)
    return model(tokens).square().mean().detach()


def test_a_budget_is_a_share():
    with (
        pytest.raises(ValueError, match=r"0\.0 to 1\.0"),
        compiled(Transformer(SMALL), 2.0, by_block=True),
    ):
        pass
