"""What PyTorch's checkpoint makes again of a tensor-parallel block: counted on ranks, and planned."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from plan_cases import BATCH, LLAMA, NODE, estimated
from torch.distributed.tensor.debug import CommDebugMode

from utils.catalog import model_shape
from utils.models import Transformer, TransformerConfig
from utils.parallel import ParallelDims, apply_tp, device_mesh, recompute
from utils.planner import Plan, framework
from utils.planner.step_seconds.block_time import block_time
from utils.ranks import run_ranks

BLOCKS = 2
CONFIG = TransformerConfig(vocabulary=32, hidden=32, layers=BLOCKS, heads=4, feedforward=48)
LATE = replace(framework("fsdp"), name="all again", recompute_stops_early=False)


def _sent(sequence: bool, again: bool) -> Counter[str]:
    """Collectives of a step on one of two ranks."""
    part = Transformer(CONFIG)
    apply_tp(part, device_mesh(ParallelDims(tp=2), "cpu")["tp"], sequence=sequence)
    if again:
        recompute(part)
    with CommDebugMode() as sent:
        logits = part(torch.randint(32, (1, 16)))
        logits.to_local().sum().backward()
    return Counter({str(name).split(".")[-1]: n for name, n in sent.get_comm_counts().items()})


def _made_again(sequence: bool) -> dict[str, int]:
    more = _sent(sequence, True)
    more.subtract(_sent(sequence, False))
    return {name: count for name, count in more.items() if count}


@pytest.mark.parametrize("sequence", [False, True])
def test_the_sum_that_ends_a_block_is_not_made_again(sequence):
    made_again = run_ranks(_made_again, 2, sequence)[0]
    gathered = {"all_gather_into_tensor": 2 * BLOCKS, "reduce_scatter_tensor": BLOCKS}
    assert made_again == (gathered if sequence else {"all_reduce": BLOCKS})

    plan = Plan(tp=2, framework="fsdp", recompute="full", sequence_parallel=sequence)
    block = block_time(LLAMA, NODE, plan, BATCH)
    whole = 4 if sequence else 2  # collectives of a forward pass
    share = sum(made_again.values()) / (whole * BLOCKS)
    assert block.recompute.communication == pytest.approx(share * block.forward.communication)


def test_a_ring_around_attention_is_made_again_whole():
    plan = Plan(cp=4, framework="fsdp", recompute="full")
    block = block_time(LLAMA, NODE, plan, BATCH)
    assert block.recompute.communication == block.forward.communication > 0


def test_of_experts_nothing_is_left_out():
    model = model_shape("qwen3-30b-a3b")
    early, late = (
        block_time(model, NODE, Plan(dp=8, ep=8, recompute="full", framework=rules), BATCH, True)
        for rules in (framework("fsdp"), LATE)
    )
    assert early.recompute == late.recompute == early.forward


def test_pytorchs_checkpoint_does_not_make_the_last_product_again():
    early, late = (
        estimated(dp=8, zero_stage=3, recompute="full", framework=rules).time.recompute
        for rules in (framework("fsdp"), LATE)
    )
    assert 0.65 < early / late < 0.85  # a third of the block's products
