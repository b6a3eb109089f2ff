"""Seconds of one transformer block, and of the head, on one rank: forward, backward, recompute."""

from __future__ import annotations

from utils.catalog import DEVICES, ModelShape
from utils.planner import calibration
from utils.planner.batch import Batch
from utils.planner.cluster import Cluster
from utils.planner.layout import Plan
from utils.planner.plan_context import ClusterPlanContext, PlanContext
from utils.planner.step_seconds.adapter_time import adapted
from utils.planner.step_seconds.collectives import Group, all_gather_seconds, all_reduce_seconds
from utils.planner.step_seconds.expert_time import expert_seconds
from utils.planner.step_seconds.kernels import (
    flash_flops_per_second,
    matmul_seconds,
    memory_seconds,
)
from utils.planner.step_seconds.pass_seconds import BlockTime, PassSeconds

# Bytes moved per attention score when scores are kept: written by the product, read and written by
# softmax (and by dropout, with its mask), read by the next product; backward the same gradients.
SCORE_FORWARD, SCORE_BACKWARD, SCORE_DROPOUT = 8, 14, 5
# Bytes moved per logit from the head's output to its gradient: cast, maximum, subtraction,
# exponential, sum and division in float32, then the gradient and its cast back.
LOGIT_FORWARD, LOGIT_BACKWARD = 36, 14
FUSED_LOGIT_FORWARD, FUSED_LOGIT_BACKWARD = 4, 4  # 16-bit logits read twice; read and overwritten
# Flash attention skips what is masked, half the scores; its backward makes the scores again, five
# products for the forward's two (Dao 2023, arXiv:2307.08691, section 3).
CAUSAL_SHARE, FLASH_BACKWARD = 0.5, 2.5

Products = list[tuple[float, float, float]]  # (m, n, k) of each


def block_time(
    model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch, experts: bool = False
) -> BlockTime:
    """Seconds of one block for one micro-batch; `experts`: of one that has some."""
    return _block(ClusterPlanContext(model, plan, batch, cluster), experts)


def block_times(context: ClusterPlanContext) -> tuple[BlockTime, BlockTime | None]:
    """Seconds of a block without experts and, where the model has them, of one with."""
    return _block(context, False), _block(context, True) if context.model.num_experts else None


def _block(context: ClusterPlanContext, experts: bool) -> BlockTime:
    check_precision(context.plan, context.cluster)
    plan, dense = context.plan, context.shared if experts else context.model
    products = _products(context, dense)
    attention = _attention(context)
    passes = attention + _matrices(context, dense, products)
    if experts:
        passes += expert_seconds(context)
    if plan.lora is not None and context.conventions.launches is not None:
        passes += adapted(context)
    scores = (
        PassSeconds() if plan.attention == "flash" else attention.forward
    )  # flash always makes them
    again = {"none": PassSeconds(), "selective": scores, "full": passes.forward}[plan.recompute]
    if plan.recompute == "full" and context.conventions.recompute_stops_early and not experts:
        again += _not_made_again(context, products[-1], passes.forward).times(-1)
    return BlockTime(passes.forward, passes.backward, again)


def _not_made_again(
    context: ClusterPlanContext, last: tuple[float, float, float], forward: PassSeconds
) -> PassSeconds:
    """What follows the last tensor that a block keeps: its last product, and the sum over ranks.

    That is one of two all-reduces of tensor parallelism, or of four collectives where sequences are
    split. Experts keep what they sum, weighted, at their end: nothing of theirs is left out.
    """
    summed = forward.communication - _exchanged(context)[2]
    share = 1 / 4 if context.plan.sequence_parallel else 1 / 2
    return PassSeconds(matmul_seconds(context.gpu, *last), communication=share * summed)


def head_time(context: ClusterPlanContext) -> BlockTime:
    """Seconds of the head for one micro-batch."""
    gpu, h, tokens = context.gpu, context.model.hidden, context.rank_tokens
    columns = context.vocabulary / context.plan.tp
    product = matmul_seconds(gpu, tokens, columns, h)
    back = matmul_seconds(gpu, tokens, h, columns) + matmul_seconds(gpu, h, columns, tokens)
    shared = all_reduce_seconds(context.cluster, Group(context.plan.tp), 2 * tokens * h)
    return BlockTime(PassSeconds(matmul=product), PassSeconds(back, communication=shared))


def loss_time(context: ClusterPlanContext) -> BlockTime:
    """Seconds of the loss for one micro-batch, which only moves data."""
    there, back = LOGIT_FORWARD, LOGIT_BACKWARD
    if context.plan.loss == "fused":
        there, back = FUSED_LOGIT_FORWARD, FUSED_LOGIT_BACKWARD
    forward, backward = (
        memory_seconds(context.gpu, context.logits * each) for each in (there, back)
    )
    return BlockTime(PassSeconds(memory=forward), PassSeconds(memory=backward))


def check_precision(plan: Plan, cluster: Cluster) -> None:
    """The device has units for the plan's products. Raises ValueError with one that has."""
    gpu = cluster.device
    native = {"bf16": True, "fp8": gpu.fp8_native, "mxfp8": gpu.mxfp8_native}
    if native[plan.precision]:
        return
    nearest = [name for name in ("bf16", "fp8") if native[name]][-1]
    has_it = " or ".join(
        row.name
        for row in DEVICES.values()
        if (row.fp8_native if plan.precision == "fp8" else row.mxfp8_native)
    )
    raise ValueError(
        f"precision is {plan.precision!r}, and {gpu.name} (capability {gpu.capability[0]}."
        f"{gpu.capability[1]}) has no units for it. Write precision={nearest!r}, or take {has_it}."
    )


def _products(context: PlanContext, dense: ModelShape) -> Products:
    """Of a block's matrices on one tensor-parallel rank; of attention alone without feed-forward."""
    tokens, t = context.rank_tokens, context.plan.tp
    h, f, q = dense.hidden, dense.feedforward / t, dense.attention_width / t
    kv = max(1, dense.key_value_heads // t) * dense.head_dim
    up = 2 * f if dense.family == "llama" else f
    products = [(tokens, q + 2 * kv, h), (tokens, h, q), (tokens, up, h), (tokens, h, f)]
    return products[:2] if dense.feedforward == 1 else products


def _matrices(context: ClusterPlanContext, dense: ModelShape, products: Products) -> BlockTime:
    """Matrices, what moves data between them, and what ranks exchange around them."""
    plan, gpu, kind = context.plan, context.gpu, context.plan.precision
    forward = sum(matmul_seconds(gpu, m, n, k, 1, kind) for m, n, k in products)
    backward = sum(
        matmul_seconds(gpu, m, k, n, 1, kind)
        + (matmul_seconds(gpu, k, n, m, 1, kind) if plan.lora is None else 0.0)
        for m, n, k in products  # a frozen matrix gets no gradient of its own
    )
    moved = [memory_seconds(gpu, context.rank_tokens * each) for each in _moved_bytes(dense, plan)]
    if kind != "bf16":
        casts = _cast_bytes(products)
        moved = [one + memory_seconds(gpu, cast) for one, cast in zip(moved, casts, strict=True)]
    passed, passed_back, around = _exchanged(context)
    if plan.overlap_tp:
        passed = _behind(passed, forward, plan.tp)
        passed_back = _behind(passed_back, backward, plan.tp)
    if dense.feedforward == 1:  # attention alone: experts have an exchange of their own
        passed, passed_back = passed / 2, passed_back / 2
    there = PassSeconds(forward, moved[0], passed + around)
    return BlockTime(there, PassSeconds(backward, moved[1], passed_back + 2 * around))


def _behind(passed: float, products: float, pieces: int) -> float:
    """Collectives in `pieces` that run behind the products they feed: one shows, and what is longer."""
    return passed / pieces + max(0.0, passed * (1 - 1 / pieces) - products)


def _cast_bytes(products: Products) -> tuple[float, float]:
    """Reading inputs (backward: gradients) in 16 bits, writing them in fp8 as they are and turned."""
    return sum(4 * m * k for m, _, k in products), sum(4 * m * n for m, n, _ in products)


def _attention(context: ClusterPlanContext) -> BlockTime:
    """Scores and their product with the values."""
    plan, gpu, tokens, s = (
        context.plan,
        context.gpu,
        context.rank_tokens,
        context.batch.sequence_length,
    )
    heads, d = context.model.heads / plan.tp, context.model.head_dim
    if plan.attention == "flash":
        flops = CAUSAL_SHARE * 4 * tokens * s * heads * d
        one = flops / flash_flops_per_second(gpu, context.conventions.flash_generation, s)
        return BlockTime(PassSeconds(matmul=one), PassSeconds(matmul=FLASH_BACKWARD * one))
    count, queries = max(1, int(plan.micro_batch * heads)), s / plan.cp
    two = matmul_seconds(gpu, queries, s, d, count) + matmul_seconds(gpu, queries, d, s, count)
    scores, dropout = tokens * s * heads, SCORE_DROPOUT * plan.dropout
    forward = memory_seconds(gpu, scores * (SCORE_FORWARD + dropout))
    backward = memory_seconds(gpu, scores * (SCORE_BACKWARD + dropout))
    return BlockTime(PassSeconds(two, forward), PassSeconds(2 * two, backward))


def _moved_bytes(model: ModelShape, plan: Plan) -> tuple[float, float]:
    """Bytes per token that kernels without products move, forward and backward.

    In units of two bytes an element, reads and writes counted one by one: norms (2 forward, 3
    backward each), residual additions (3, and 3 to add gradients), dropouts with one-byte masks;
    GELU (2, 3) or SwiGLU (3, 5; unfused 5, 12); splitting, rotating and laying out heads (8; 18
    where each is a kernel of its own).
    """
    h, f, conventions = model.hidden, model.feedforward, plan.conventions
    norms = 3 if conventions.eager_norm and model.family == "llama" else 1
    dropout = 2 * plan.dropout
    stream = (8 * norms + 12 + dropout) * h, (12 * norms + 12 + 5 * dropout) * h
    if model.family == "gpt":
        inner = 4 * f + 12 * h, 6 * f + 12 * h
    elif conventions.fused_gate:
        inner = 6 * f + 16 * h, 10 * f + 16 * h
    else:
        inner = 10 * f + 36 * h, 24 * f + 36 * h
    split = plan.tp if plan.sequence_parallel else 1
    forward, backward = (a / split + b / plan.tp for a, b in zip(stream, inner, strict=True))
    return forward, backward


def _exchanged(context: ClusterPlanContext) -> tuple[float, float, float]:
    """Of tensor parallelism forward and backward; of context parallelism, keys and values.

    Two all-reduces a pass, which sequence parallelism cuts in two halves. In backward what follows a
    column-parallel matrix can run beside the product of its weight's gradient (Megatron-LM's async
    all-reduce), and loses its share to it. With sequence parallelism the inputs of these matrices
    are gathered once more, unless they were kept.
    """
    plan, model, cluster = context.plan, context.model, context.cluster
    kv = max(1, model.key_value_heads // plan.tp) * model.head_dim
    others = plan.cp * context.rank_tokens * 2 * kv * 2
    around = all_gather_seconds(cluster, Group(plan.cp, stride=plan.tp), others)
    group, whole = Group(plan.tp), 2 * context.rank_tokens * model.hidden
    beside = calibration.CONTENTION if context.conventions.overlap_tensor else 1.0
    if not plan.sequence_parallel:
        one = all_reduce_seconds(cluster, group, whole)
        return 2 * one, 2 * one * beside, around
    one = all_gather_seconds(cluster, group, whole)
    again = 1 - context.conventions.gathered_inputs
    return 4 * one, 2 * one + 2 * one * (1 + again) * beside, around
