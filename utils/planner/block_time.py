"""Seconds of one transformer block, and of the head, on one rank: forward, backward, recompute."""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog import ModelShape
from utils.planner import calibration
from utils.planner.adapter_time import adapter_seconds, unpack_seconds
from utils.planner.cluster import Cluster
from utils.planner.collectives import Group, all_gather_seconds, all_reduce_seconds
from utils.planner.experts import expert_work, shared_model
from utils.planner.kernels import flash_flops_per_second, matmul_seconds, memory_seconds
from utils.planner.layout import Batch, Plan
from utils.planner.stages import padded_vocabulary

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


@dataclass(frozen=True)
class Parts:
    """Seconds of one pass through one block or head.

    Attributes:
        matmul: Matrix products, attention's included.
        memory: Kernels that only move data.
        communication: Tensor- and context-parallel collectives, which nothing hides.
    """

    matmul: float = 0.0
    memory: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        """All of it, one after another."""
        return self.matmul + self.memory + self.communication

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            self.matmul + other.matmul,
            self.memory + other.memory,
            self.communication + other.communication,
        )

    def times(self, factor: float) -> Parts:
        """Every part, so many times."""
        return Parts(factor * self.matmul, factor * self.memory, factor * self.communication)


@dataclass(frozen=True)
class BlockTime:
    """One block, one micro-batch, one rank.

    Attributes:
        forward, backward: The passes; the backward one without recomputation.
        recompute: What backward computes again first, by the plan.
    """

    forward: Parts
    backward: Parts
    recompute: Parts

    @property
    def total(self) -> float:
        """Seconds of all three."""
        return self.forward.total + self.backward.total + self.recompute.total


def block_time(
    model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch, experts: bool = False
) -> BlockTime:
    """Seconds of one block for one micro-batch; `experts`: of one that has some."""
    s, tokens = batch.sequence_length, _tokens(plan, batch)
    check_precision(plan, cluster)
    dense = shared_model(model) if experts else model
    products = _products(dense, plan, tokens)[: 2 if dense.feedforward == 1 else None]
    gpu, kind = cluster.device, plan.precision
    forward_matmul = sum(matmul_seconds(gpu, m, n, k, 1, kind) for m, n, k in products)
    backward_matmul = sum(
        matmul_seconds(gpu, m, k, n, 1, kind)
        + (matmul_seconds(gpu, k, n, m, 1, kind) if plan.lora is None else 0.0)
        for m, n, k in products  # a frozen matrix gets no gradient of its own
    )
    attention_forward, attention_backward = _attention(model, cluster, plan, tokens, s)
    moved = [memory_seconds(gpu, tokens * per_token) for per_token in _moved_bytes(dense, plan)]
    if kind != "bf16":
        moved = [seconds + cast for seconds, cast in
                 zip(moved, _cast_seconds(cluster, products), strict=True)]  # fmt: skip
    passed, passed_back = _tensor_parallel(model, cluster, plan, tokens)
    if plan.overlap_tp:
        passed = _behind(passed, forward_matmul, plan.tp)
        passed_back = _behind(passed_back, backward_matmul, plan.tp)
    around = _context_parallel(model, cluster, plan, tokens)
    if experts and not model.shared_feedforward:
        passed, passed_back = passed / 2, passed_back / 2  # the experts' own exchange comes below
    forward = attention_forward + Parts(forward_matmul, moved[0], passed + around)
    backward = attention_backward + Parts(backward_matmul, moved[1], passed_back + 2 * around)
    if experts:
        work = expert_work(model, cluster, plan, tokens)
        forward += Parts(work.matmul, work.forward_memory, work.communication)
        backward += Parts(2 * work.matmul, work.backward_memory, work.communication)
    if plan.lora is not None and plan.rules.launches is not None:
        adapters = [Parts(*part) for part in adapter_seconds(gpu, model, plan.lora, tokens)]
        unpacked = Parts(memory=unpack_seconds(gpu, model, plan.lora))
        forward += adapters[0] + unpacked
        backward += adapters[1] + unpacked
    recompute = {"none": Parts(), "selective": attention_forward, "full": forward}[plan.recompute]
    if plan.recompute == "full" and plan.rules.recompute_stops_early:
        last = Parts(matmul=matmul_seconds(gpu, *products[-1]))
        recompute += last.times(-1)
    if plan.recompute == "selective" and plan.attention == "flash":
        recompute = Parts()
    return BlockTime(forward, backward, recompute)


def block_times(
    model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch
) -> tuple[BlockTime, BlockTime | None]:
    """Seconds of a block without experts and, where the model has them, of one with."""
    dense = block_time(model, cluster, plan, batch)
    return dense, block_time(model, cluster, plan, batch, True) if model.num_experts else None


def check_precision(plan: Plan, cluster: Cluster) -> None:
    """The device has units for the plan's products. Raises ValueError with one that has."""
    gpu = cluster.device
    native = {"bf16": True, "fp8": gpu.fp8_native, "mxfp8": gpu.mxfp8_native}
    if native[plan.precision]:
        return
    nearest = [name for name in ("bf16", "fp8") if native[name]][-1]
    has_it = "H100, H200 or B200" if plan.precision == "fp8" else "B200, B300, GB200 or GB300"
    raise ValueError(
        f"precision is {plan.precision!r}, and {gpu.name} (capability {gpu.capability[0]}."
        f"{gpu.capability[1]}) has no units for it. Write precision={nearest!r}, or take {has_it}."
    )


def _behind(passed: float, products: float, pieces: int) -> float:
    """Collectives in `pieces` that run behind the products they feed: one shows, and what is longer."""
    return passed / pieces + max(0.0, passed * (1 - 1 / pieces) - products)


def _cast_seconds(
    cluster: Cluster, products: list[tuple[float, float, float]]
) -> tuple[float, float]:
    """Reading inputs (backward: gradients) in 16 bits, writing them in fp8 as they are and turned."""
    forward = sum(4 * m * k for m, _, k in products)
    backward = sum(4 * m * n for m, n, _ in products)
    return memory_seconds(cluster.device, forward), memory_seconds(cluster.device, backward)


def head_time(model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch) -> BlockTime:
    """Seconds of the head for one micro-batch."""
    tokens, columns = _tokens(plan, batch), padded_vocabulary(model, plan) / plan.tp
    gpu, h = cluster.device, model.hidden
    product = matmul_seconds(gpu, tokens, columns, h)
    back = matmul_seconds(gpu, tokens, h, columns) + matmul_seconds(gpu, h, columns, tokens)
    shared = all_reduce_seconds(cluster, Group(plan.tp), 2 * tokens * h)
    return BlockTime(Parts(matmul=product), Parts(back, communication=shared), Parts())


def loss_time(model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch) -> BlockTime:
    """Seconds of the loss for one micro-batch, which only moves data."""
    logits = _tokens(plan, batch) * padded_vocabulary(model, plan) / plan.tp
    fused = plan.loss == "fused"
    moved = (
        (FUSED_LOGIT_FORWARD, FUSED_LOGIT_BACKWARD) if fused else (LOGIT_FORWARD, LOGIT_BACKWARD)
    )
    forward, backward = (memory_seconds(cluster.device, logits * each) for each in moved)
    return BlockTime(Parts(memory=forward), Parts(memory=backward), Parts())


def _tokens(plan: Plan, batch: Batch) -> float:
    return plan.micro_batch * batch.sequence_length / plan.cp


def _products(model: ModelShape, plan: Plan, tokens: float) -> list[tuple[float, float, float]]:
    """(m, n, k) of a block's matrices on one tensor-parallel rank."""
    h, f, t = model.hidden, model.feedforward / plan.tp, plan.tp
    kv = max(1, model.key_value_heads // t) * model.head_dim
    up = 2 * f if model.family == "llama" else f
    q = model.attention_width / t
    return [(tokens, q + 2 * kv, h), (tokens, h, q), (tokens, up, h), (tokens, h, f)]


def _attention(
    model: ModelShape, cluster: Cluster, plan: Plan, tokens: float, s: int
) -> tuple[Parts, Parts]:
    """Scores and their product with the values, forward and backward."""
    gpu, heads, d = cluster.device, model.heads / plan.tp, model.head_dim
    if plan.attention == "flash":
        flops = CAUSAL_SHARE * 4 * tokens * s * heads * d
        one = flops / flash_flops_per_second(gpu, plan.rules.flash_generation, s)
        return Parts(matmul=one), Parts(matmul=FLASH_BACKWARD * one)
    count = max(1, int(plan.micro_batch * heads))
    queries = s / plan.cp
    two = matmul_seconds(gpu, queries, s, d, count) + matmul_seconds(gpu, queries, d, s, count)
    scores, dropout = tokens * s * heads, SCORE_DROPOUT * plan.dropout
    forward = memory_seconds(gpu, scores * (SCORE_FORWARD + dropout))
    backward = memory_seconds(gpu, scores * (SCORE_BACKWARD + dropout))
    return Parts(two, forward), Parts(2 * two, backward)


def _moved_bytes(model: ModelShape, plan: Plan) -> tuple[float, float]:
    """Bytes per token that kernels without products move, forward and backward.

    In units of two bytes an element, reads and writes counted one by one: norms (2 forward, 3
    backward each), residual additions (3, and 3 to add gradients), dropouts with one-byte masks;
    GELU (2, 3) or SwiGLU (3, 5; unfused 5, 12); splitting, rotating and laying out heads (8; 18
    where each is a kernel of its own).
    """
    h, f, rules = model.hidden, model.feedforward, plan.rules
    norms = 3 if rules.eager_norm and model.family == "llama" else 1
    dropout = 2 * plan.dropout
    stream = (8 * norms + 12 + dropout) * h, (12 * norms + 12 + 5 * dropout) * h
    if model.family == "gpt":
        inner = 4 * f + 12 * h, 6 * f + 12 * h
    elif rules.fused_gate:
        inner = 6 * f + 16 * h, 10 * f + 16 * h
    else:
        inner = 10 * f + 36 * h, 24 * f + 36 * h
    split = plan.tp if plan.sequence_parallel else 1
    forward, backward = (a / split + b / plan.tp for a, b in zip(stream, inner, strict=True))
    return forward, backward


def _tensor_parallel(
    model: ModelShape, cluster: Cluster, plan: Plan, tokens: float
) -> tuple[float, float]:
    """Forward and backward: two all-reduces each, which sequence parallelism cuts in two halves.

    In backward what follows a column-parallel matrix can run beside the product of its weight's
    gradient (Megatron-LM's async all-reduce), and loses its share to it. With sequence parallelism
    the inputs of these matrices are gathered once more, unless they were kept.
    """
    group, whole = Group(plan.tp), 2 * tokens * model.hidden
    beside = calibration.CONTENTION if plan.rules.overlap_tensor else 1.0
    if not plan.sequence_parallel:
        one = all_reduce_seconds(cluster, group, whole)
        return 2 * one, 2 * one * beside
    one = all_gather_seconds(cluster, group, whole)
    again = 1 - plan.rules.gathered_inputs
    return 4 * one, 2 * one + 2 * one * (1 + again) * beside


def _context_parallel(model: ModelShape, cluster: Cluster, plan: Plan, tokens: float) -> float:
    """Keys and values of the other ranks of the sequence."""
    kv = max(1, model.key_value_heads // plan.tp) * model.head_dim
    group = Group(plan.cp, stride=plan.tp)
    return all_gather_seconds(cluster, group, plan.cp * tokens * 2 * kv * 2)
