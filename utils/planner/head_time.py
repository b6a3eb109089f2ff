"""Seconds of the head and of the loss on one rank, for one micro-batch."""

from __future__ import annotations

from utils.planner.collectives import Group, all_reduce_seconds
from utils.planner.kernels import matmul_seconds, memory_seconds
from utils.planner.parts import BlockTime, Parts
from utils.planner.setup import ClusterSetup

# Bytes moved per logit from the head's output to its gradient: cast, maximum, subtraction,
# exponential, sum and division in float32, then the gradient and its cast back.
LOGIT_FORWARD, LOGIT_BACKWARD = 36, 14
FUSED_LOGIT_FORWARD, FUSED_LOGIT_BACKWARD = 4, 4  # 16-bit logits read twice; read and overwritten


def head_time(setup: ClusterSetup) -> BlockTime:
    """Seconds of the head for one micro-batch."""
    gpu, h, tokens, columns = setup.gpu, setup.model.hidden, setup.tokens, setup.columns
    product = matmul_seconds(gpu, tokens, columns, h)
    back = matmul_seconds(gpu, tokens, h, columns) + matmul_seconds(gpu, h, columns, tokens)
    shared = all_reduce_seconds(setup.cluster, Group(setup.plan.tp), 2 * tokens * h)
    return BlockTime(Parts(matmul=product), Parts(back, communication=shared), Parts())


def loss_time(setup: ClusterSetup) -> BlockTime:
    """Seconds of the loss for one micro-batch, which only moves data."""
    there, back = LOGIT_FORWARD, LOGIT_BACKWARD
    if setup.plan.loss == "fused":
        there, back = FUSED_LOGIT_FORWARD, FUSED_LOGIT_BACKWARD
    forward, backward = (memory_seconds(setup.gpu, setup.logits * each) for each in (there, back))
    return BlockTime(Parts(memory=forward), Parts(memory=backward), Parts())
