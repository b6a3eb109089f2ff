"""Which layers, and how many parameters, each pipeline stage holds on each tensor-parallel rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from utils.catalog import ModelShape
from utils.planner.experts import rank_parameters
from utils.planner.layout import Plan, changed

Kind = tuple[int, int, bool, bool, bool]
BLOCK_TENSORS = 6  # four matrices and two norms
# What stages do not depend on: with it left out, thousands of plans are one.
NEUTRAL = {
    **dict.fromkeys(("dp", "cp", "micro_batch"), 1),
    **dict.fromkeys(("shard_ranks", "recompute_layers")),
    "zero_stage": 0,
    "recompute": "none",
    "offload": "none",
    "precision": "bf16",
    "schedule": "1f1b",
}


@dataclass(frozen=True)
class Stage:
    """One pipeline stage.

    Attributes:
        index: Its place, from 0.
        layers: Transformer blocks it holds, over all its chunks.
        embedding: It holds the embedding, so it is the first.
        head: It holds the last norm and the head.
        loss: It computes the loss; the head's stage, but for nanotron's rule.
        expert_layers: Those of its blocks that have experts.
        one_expert_block, one_block_experts: Parameters of such a block on one of its ranks: all of
            it, and its experts alone, which other ranks share than the rest.
        one_block, embedding_parameters, head_parameters: Of each of its blocks, of the embedding,
            and of last norm and head; on one of its ranks, before ZeRO shards them.
    """

    index: int
    layers: int
    embedding: bool
    head: bool
    loss: bool
    one_block: float
    embedding_parameters: float
    head_parameters: float
    expert_layers: int = 0
    one_expert_block: float = 0.0
    one_block_experts: float = 0.0

    @property
    def block_parameters(self) -> float:
        """Parameters of all its blocks on one rank, before ZeRO shards them."""
        dense = (self.layers - self.expert_layers) * self.one_block
        return dense + self.expert_layers * self.one_expert_block

    @property
    def expert_parameters(self) -> float:
        """Parameters of all its experts on one rank, before ZeRO shards them."""
        return self.expert_layers * self.one_block_experts

    @property
    def widest_block(self) -> float:
        """Parameters of its largest block on one rank."""
        dense = self.one_block * (self.expert_layers < self.layers)
        return max(dense, self.one_expert_block * (self.expert_layers > 0))

    @property
    def parameters(self) -> float:
        """Parameters on one rank of the stage, before ZeRO shards them."""
        return self.block_parameters + self.embedding_parameters + self.head_parameters

    @property
    def tensors(self) -> int:
        """Matrices and norms of its blocks, embedding, last norm and head."""
        return BLOCK_TENSORS * self.layers + self.embedding + 2 * self.head

    @property
    def kind(self) -> Kind:
        """What two stages must share to hold and do the same, but for what is in flight."""
        return self.layers, self.expert_layers, self.embedding, self.head, self.loss


def stages(model: ModelShape, plan: Plan) -> tuple[Stage, ...]:
    """The plan's stages, first to last, each with its parameter counts."""
    return _placed(model, plan)[0]


def distinct(model: ModelShape, plan: Plan) -> tuple[Stage, ...]:
    """The first stage of each kind: of alike stages it has most in flight, so it holds most."""
    return _placed(model, plan)[1]


def _placed(model: ModelShape, plan: Plan) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    chunks = {} if model.dense_layers else {"virtual_stages": 1}
    return _walked(model, changed(plan, NEUTRAL | chunks))


@lru_cache(maxsize=10_000)
def _walked(model: ModelShape, plan: Plan) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    if plan.partition == "compute":
        counts, head = _compute(model, plan.pp)
    else:
        counts, head = _dealt(model, plan), plan.pp - 1
    loss = min(head + 1, plan.pp - 1) if plan.partition == "compute" else head
    block, table = block_parameters(model, plan.tp), table_parameters(model, plan)
    first, last = _embedding_parameters(model, table), _head_parameters(model, table, head == 0)
    mixed = _with_experts(model, plan, counts)
    rows = tuple(
        Stage(
            i, n, i == 0, i == head, i == loss, block, (i == 0) * first, (i == head) * last, *more
        )
        for i, (n, more) in enumerate(zip(counts, mixed, strict=True))
    )
    first_of: dict[Kind, Stage] = {}
    for stage in rows:
        first_of.setdefault(stage.kind, stage)
    return rows, tuple(first_of.values())


def _dealt(model: ModelShape, plan: Plan) -> list[int]:
    if isinstance(plan.partition, tuple):
        return list(plan.partition)
    return (_even if plan.partition == "even" else _ends)(model, plan.pp)


def _with_experts(
    model: ModelShape, plan: Plan, counts: list[int]
) -> list[tuple[int, float, float]]:
    """Of each stage: blocks with experts, parameters of one such block, and of its experts."""
    if not model.num_experts:
        return [(0, 0.0, 0.0)] * len(counts)
    experts, beside = rank_parameters(model, plan)
    whole = block_parameters(model, plan.tp, feedforward=False) + experts + beside
    v, starts, rows = plan.virtual_stages, [0], []
    for count in counts:
        starts.append(starts[-1] + count // v)
    for stage, count in enumerate(counts):
        begins = [chunk * starts[-1] + starts[stage] for chunk in range(v)]
        dense = sum(min(max(model.dense_layers - begin, 0), count // v) for begin in begins)
        rows.append((count - dense, whole, experts))
    return rows


def _even(model: ModelShape, p: int) -> list[int]:
    whole, extra = divmod(model.layers, p)
    return [whole + (i < extra) for i in range(p)]


def _ends(model: ModelShape, p: int) -> list[int]:
    """Embedding and head count as a layer each: (L + 2) / p a stage."""
    whole, extra = divmod(model.layers + 2, p)
    counts = [whole + (i < extra) for i in range(p)]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def _compute(model: ModelShape, p: int) -> tuple[list[int], int]:
    """nanotron's rule (models/base.py): a stage is full once it passes its share of products.

    The head goes where the last block left off, which need not be the last stage, and fills it, so
    that the loss comes after it.
    """
    block = sum(model.layer_parameter_counts().values()) - 2 * model.norm_parameters
    total = model.layers * block + model.vocabulary * model.hidden
    counts, stage, passed = [0] * p, 0, 0
    for _ in range(model.layers):
        counts[stage] += 1
        passed += block
        if passed * p >= total * (stage + 1):
            stage += 1
    return counts, stage


def padded_vocabulary(model: ModelShape, plan: Plan) -> int:
    """Rows of the embedding after padding, so that tp divides them."""
    multiple = plan.conventions.vocabulary_multiple * plan.tp
    return math.ceil(model.vocabulary / multiple) * multiple


def block_parameters(model: ModelShape, tp: int, feedforward: bool = True) -> float:
    """Parameters of one block on one tp rank, with or without its dense feed-forward layer.

    Matrices and the biases of column-parallel ones are divided; norms and the biases of
    row-parallel ones are on every rank, and so are key-value heads where there are fewer than tp.
    """
    counts = model.layer_parameter_counts()
    row_biases = (1 + feedforward) * model.hidden if model.family == "gpt" else 0
    copies = max(1, tp // model.key_value_heads)
    key_value = 2 * model.hidden * model.key_value_heads * model.head_dim * (copies - 1)
    split = counts["attention"] + counts["mlp"] * feedforward - row_biases + key_value
    return split / tp + row_biases + counts["norms"]


def table_parameters(model: ModelShape, plan: Plan) -> float:
    """Parameters of embedding or head on one tp rank, its rows padded."""
    return padded_vocabulary(model, plan) * model.hidden / plan.tp


def _embedding_parameters(model: ModelShape, table: float) -> float:
    positions = (model.max_sequence + model.extra_positions) * (model.positions == "learned")
    return table + model.embedding_norm * model.norm_parameters + positions * model.hidden


def _head_parameters(model: ModelShape, table: float, beside_embedding: bool) -> float:
    """A tied head on another stage than the embedding is a second copy (Megatron-LM, nanotron)."""
    return model.norm_parameters + (0.0 if model.tied and beside_embedding else table)
