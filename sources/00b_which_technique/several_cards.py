"""Over how many cards the states of a model have to be shared: the planner's formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from utils.catalog import device
from utils.checked import check_public
from utils.fitting.recipe import Recipe
from utils.fitting.seconds import GPUS_PER_NODE, MATRICES, shape_of
from utils.fitting.verdict import MARGIN, usable_bytes
from utils.planner import Batch, Cluster, Estimate, Lora, Plan, estimate
from utils.planner.frameworks import framework
from utils.units import GB, GIB, Category

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from utils.catalog import ModelShape

__all__ = ["Shared", "least_cards", "parameters_of", "parts_of_a_card", "slower_links"]

MOST_CARDS = 256
SPLITS = (1, 2, 4, GPUS_PER_NODE)  # tensor-parallel ranks, all in one node
# Bytes per second that a node of eight sends to others, and the kind of network, where they were published:
# 1,600 Gb/s of RoCE between A100s (MosaicML, evidence/validation/published/llm_foundry.csv). No such figure
# stands in the catalog or the evidence for nodes of RTX 4090s or T4s.
BETWEEN_NODES = {"A100-80GB": (200 * GB, "RoCE")}
# FSDP2 with AdamW(fused=True), as the steps on one card have it: the planner's own takes four bytes a parameter
# more while AdamW steps, for the roots of the second moments.
FUSED = replace(framework("fsdp"), step_gradient_bytes=0)


@dataclass(frozen=True)
class Shared:
    """Cards that hold a model together.

    Attributes:
        cards: How many.
        how: In words.
        a_card_bytes: What each of them holds at most, predicted.
        texts: That a step takes, one for each part of the data.
        step_seconds: Of such a step, predicted; None for a card without bf16, on which no step was checked,
            and where no link between its nodes was published.
    """

    cards: int
    how: str
    a_card_bytes: float
    texts: int
    step_seconds: float | None


def parameters_of(config: PreTrainedConfig) -> int:
    """How many parameters a Llama or one of its relatives has.

    Raises:
        ValueError: another architecture.
    """
    return _shape(config).parameter_count


def least_cards(config: PreTrainedConfig, recipe: Recipe, card: str) -> Shared | None:
    """The fewest cards that hold a model with room to spare, every block recomputed.

    Tried are 2 to 8 in one node, then whole nodes of eight. FSDP2 alone gathers a block, and the
    embedding, whole. Where fewer cards are enough if each matrix is also split over 2, 4 or 8 of a
    node, whole heads to each, that is the answer. Each must leave what a simulated step must
    leave, `MARGIN`. None if 256 are too few.

    Args:
        config: The model's.
        recipe: Its method, rank and tokens.
        card: A GPU of the catalog.

    Raises:
        ValueError: the planner has no formula for the model, or no such card.
    """
    shape = _shape(config)
    splits = [ranks for ranks in SPLITS if shape.heads % ranks == 0]
    ways = (_least(shape, recipe, card, ranks) for ranks in splits)
    return min(filter(None, ways), key=lambda found: found.cards, default=None)


def _least(shape: ModelShape, recipe: Recipe, card: str, tensor_ranks: int) -> Shared | None:
    for cards in _counts(tensor_ranks):
        found = _estimate(shape, recipe, card, cards, tensor_ranks)
        if found.peak.reserved_bytes * (1 + MARGIN) <= usable_bytes(card):
            texts = cards // tensor_ranks
            words = _words(cards, tensor_ranks)
            seconds = found.step_seconds if _has_seconds(card, cards) else None
            return Shared(cards, words, found.peak.reserved_bytes, texts, seconds)
    return None


def _counts(tensor_ranks: int) -> Iterator[int]:
    """Within a node each number that holds whole groups, then whole nodes."""
    yield from range(max(2, tensor_ranks), GPUS_PER_NODE, tensor_ranks)
    yield from range(GPUS_PER_NODE, MOST_CARDS + 1, GPUS_PER_NODE)


def _has_seconds(card: str, cards: int) -> bool:
    return device(card).bf16_native and (cards <= GPUS_PER_NODE or card in BETWEEN_NODES)


def parts_of_a_card(
    config: PreTrainedConfig, recipe: Recipe, card: str, counts: tuple[int, ...]
) -> list[dict[str, str]]:
    """What a card of so many holds at its fullest, for each tensor-parallel degree: rows of a table."""
    shape = _shape(config)
    rows = []
    for cards, ranks in ((n, r) for n in counts for r in SPLITS if shape.heads % r == n % r == 0):
        peak = _estimate(shape, recipe, card, cards, ranks).peak
        states = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
        held = sum(peak.bytes_by_category.get(part, 0.0) for part in states)
        fits = peak.reserved_bytes * (1 + MARGIN) <= usable_bytes(card)
        rows.append({
            "cards": str(cards),
            "tensor parallel": str(ranks),
            "states": f"{held / GIB:.1f} GiB",
            "all else": f"{(peak.reserved_bytes - held) / GIB:.1f} GiB",
            f"together, and {MARGIN:.0%}": f"{peak.reserved_bytes * (1 + MARGIN) / GIB:.1f} GiB",
            "fits": "yes" if fits else "no",
        })  # fmt: skip
    return rows


def slower_links(
    config: PreTrainedConfig, recipe: Recipe, card: str, shares: tuple[float, ...]
) -> list[dict[str, str]]:
    """The fewest cards' predicted step with that share of the published link between nodes: rows of a table."""
    found = least_cards(config, recipe, card)
    if found is None or card not in BETWEEN_NODES:
        return []
    ranks = found.cards // found.texts
    rows = []
    for share in shares:
        seconds = _estimate(_shape(config), recipe, card, found.cards, ranks, share).step_seconds
        rows.append({
            "GB/s between nodes, a card": f"{share * BETWEEN_NODES[card][0] / GPUS_PER_NODE / GB:.2f}",
            "seconds a step": f"{seconds:.1f}",
            "card-seconds of 1,000 tokens": f"{1000 * seconds * found.cards / found.texts / recipe.tokens:.1f}",
        })  # fmt: skip
    return rows


def _words(cards: int, tensor_ranks: int) -> str:
    """Of the layout."""
    over = cards // tensor_ranks
    split = f"tensor parallel {tensor_ranks}"
    sharded = f"FSDP2 over {over}"
    parts = [split] * (tensor_ranks > 1) + [sharded] * (over > 1)
    return " x ".join(parts) + ", all blocks recomputed"


def _estimate(
    shape: ModelShape, recipe: Recipe, card: str, cards: int, tensor_ranks: int,
    link_share: float = 1.0,
) -> Estimate:  # fmt: skip
    replicas, in_a_node = cards // tensor_ranks, min(cards, GPUS_PER_NODE)
    plan = Plan(
        framework=FUSED,
        dp=replicas,
        tp=tensor_ranks,
        sequence_parallel=tensor_ranks > 1,
        zero_stage=3 if replicas > 1 else 0,
        recompute="full",
        attention="flash",  # on a T4 PyTorch's memory-efficient kernel: no scores are kept either
        lora=_lora(recipe),
    )
    network, kind = BETWEEN_NODES.get(card, (200 * GB, "RoCE"))
    cluster = Cluster(
        gpu=card, nodes=cards // in_a_node, gpus_per_node=in_a_node,
        network_bytes_per_second=link_share * network, network_kind=kind,
    )  # fmt: skip
    batch = Batch(sequences=replicas, sequence_length=recipe.tokens)
    return estimate(shape, cluster, plan, batch)


def _lora(recipe: Recipe) -> Lora | None:
    if not recipe.is_frozen:
        return None
    base = "nf4-dq" if recipe.method == "qlora" else "bf16"
    return Lora(rank=recipe.rank, targets=tuple(MATRICES.values()), base=base, autocast=True)


def _shape(config: PreTrainedConfig) -> ModelShape:
    shape = shape_of(config)
    if shape is None:
        raise ValueError(
            f"The planner has no formula for a {config.model_type}. Take a Llama, Mistral or Qwen."
        )
    return shape


check_public(globals())
