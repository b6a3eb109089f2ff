"""Predicted seconds of a step, for models that the planner's shapes can say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from utils.catalog import ModelShape, device
from utils.catalog.hub_models import shape_of_config
from utils.fitting.recipe import Recipe
from utils.planner import Batch, Cluster, Lora, Plan, estimate
from utils.planner.adapters import adapter_parameters
from utils.planner.frameworks import framework
from utils.planner.step_seconds.collectives import (
    Group,
    all_gather_seconds,
    all_to_all_seconds,
    bandwidth_in_training,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The planner's names of a Llama's matrices, which Qwen, Mistral, SmolLM and OLMo share.
MATRICES = {f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down")}
GPUS_PER_NODE = 8
WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def shape_of(config: PreTrainedConfig) -> ModelShape | None:
    """The planner's shape of a Llama or one of its relatives; None for another architecture."""
    return shape_of_config(config.to_dict(), getattr(config, "name_or_path", ""))


def predicted_seconds(
    config: PreTrainedConfig, recipe: Recipe, card: str, sent_bytes: float | None = None
) -> tuple[float, float, float] | None:
    """(low, middle, high) of one optimizer step: 80% of measured steps lie between.

    None where no formula is known: another architecture, a card or precision without bf16,
    adapters on layers that a Llama's block lacks, or on experts.

    Args:
        config: The model's.
        recipe: How it is trained.
        card: A GPU of the catalog.
        sent_bytes: What a micro-batch sends to the host with `offload_activations`, as it was
            simulated; by the planner's formula if None, which counts a shared tensor once.
    """
    shape, lora = shape_of(config), _lora(recipe)
    if shape is None or (recipe.is_frozen and (lora is None or shape.num_experts)):
        return None
    if not device(card).bf16_native or recipe.precision == "fp32":
        return None
    shape = replace(shape, max_sequence=max(recipe.tokens, shape.max_sequence))
    batch = Batch(
        sequences=recipe.micro_batch * recipe.accumulation * recipe.texts_at_once,
        sequence_length=recipe.tokens,
    )
    cluster, plan = _cluster(card, recipe.cards), _plan(recipe, lora, shape.layers)
    found = estimate(shape, cluster, plan, batch)
    low, high = found.step_seconds_interval
    besides = _waiting_seconds(shape, recipe, lora, card)
    more = 1 + (besides + _exchange_seconds(shape, recipe, cluster)) / found.step_seconds
    if not recipe.offload_activations:
        return low * more, found.step_seconds * more, high * more
    if sent_bytes is None:
        away = estimate(shape, cluster, replace(plan, offload_activations=True), batch)
        sent_bytes = (away.host_bytes - found.host_bytes) / cluster.gpus_per_node
    copies = _copy_seconds(sent_bytes * recipe.accumulation, card)
    steps = low * more, found.step_seconds * more, high * more
    return steps[0] + copies[0], steps[1] + copies[1], steps[2] + copies[2]


def _copy_seconds(sent_bytes: float, card: str) -> tuple[float, float, float]:
    """To send activations to pinned memory and back, beside the compute: at the link's line rate, at
    what such links sustain, and at what they carry beside other kernels.

    `torch.autograd.graph.save_on_cpu` copies without waiting for the host, but on the stream that
    computes: the next kernel starts after the copy, so that none of it is hidden.
    """
    link, both_ways = device(card).host_link, 2 * sent_bytes
    return (
        both_ways / link.link_bytes_per_second,
        both_ways / link.sustained_bytes_per_second,
        both_ways / bandwidth_in_training(link),
    )


def _waiting_seconds(shape: ModelShape, recipe: Recipe, lora: Lora | None, card: str) -> float:
    """Seconds of a step for what FSDP2 sends up from the host beside the planner's own terms.

    The planner counts the trained weights in 16 bits, once for each pass. FSDP2 copies its shards as they
    are held, frozen ones too, and casts them on the card (FSDPParam.all_gather_inputs).
    """
    if not recipe.offload_states:
        return 0.0
    trained = adapter_parameters(shape, lora) if lora else shape.parameter_count
    held_bytes = WEIGHT_BYTES[recipe.weights] * shape.parameter_count
    more_bytes = held_bytes - framework("fsdp").gathered_bytes * trained
    passes = 2 * recipe.accumulation
    return (
        passes * max(0.0, more_bytes) / recipe.cards / bandwidth_in_training(device(card).host_link)
    )


def exchanged_bytes(shape: ModelShape, recipe: Recipe) -> tuple[float, ...]:
    """What a card puts into each all-to-all of one layer and pass: queries, keys, values and results.

    Two bytes a number of its own tokens (Jacobs et al. 2023, arXiv:2309.14509, section 3.2). Key-value
    heads are copied where they are fewer than the cards.
    """
    pairs = max(shape.key_value_heads, recipe.sequence_cards)
    own_tokens = recipe.micro_batch * recipe.tokens / recipe.sequence_cards
    heads = (shape.heads, pairs, pairs, shape.heads)
    return tuple(2 * own_tokens * shape.head_dim * count for count in heads)


def _exchange_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster) -> float:
    """Seconds of a step for all-to-alls of heads, beside the planner's own term, which gathers keys.

    They are in forward, in backward, and in forward again where it is recomputed. The planner's gathers
    are twice as long in backward (`block_time`).
    """
    if recipe.sequence_cards == 1:
        return 0.0
    group = Group(recipe.sequence_cards)
    sent_bytes = exchanged_bytes(shape, recipe)
    exchanged = sum(all_to_all_seconds(cluster, group, each) for each in sent_bytes)
    keys = recipe.micro_batch * recipe.tokens * shape.key_value_heads * shape.head_dim
    gathered = all_gather_seconds(cluster, group, 2 * 2 * keys)
    again = _recomputed_blocks(recipe, shape.layers)
    seconds = (2 * shape.layers + again) * exchanged - (3 * shape.layers + again) * gathered
    return recipe.accumulation * seconds


def _recomputed_blocks(recipe: Recipe, layers: int) -> int:
    some = _recomputed(recipe, layers)
    return (layers if recipe.checkpointing else 0) if some is None else some


def _plan(recipe: Recipe, lora: Lora | None, layers: int) -> Plan:
    one_card = "peft" if recipe.is_frozen else "transformers"
    return Plan(
        framework="fsdp" if recipe.is_sharded else one_card,
        dp=recipe.texts_at_once,
        cp=recipe.sequence_cards,
        zero_stage=3 if recipe.is_sharded else 0,
        micro_batch=recipe.micro_batch,
        recompute="full" if recipe.checkpointing else "none",
        recompute_layers=_recomputed(recipe, layers),
        loss=recipe.loss,
        offload="parameters" if recipe.offload_states else "none",
        optimizer_in_backward=recipe.step_in_backward,
        lora=lora,
    )


def _recomputed(recipe: Recipe, layers: int) -> int | None:
    """How many blocks, where that is not all or none."""
    if recipe.checkpointing > 1:
        return -(-layers // recipe.checkpointing)
    return layers - layers // recipe.spared if recipe.spared else None


def _cluster(card: str, cards: int) -> Cluster:
    in_a_node = min(cards, GPUS_PER_NODE)
    return Cluster(gpu=card, nodes=-(-cards // in_a_node), gpus_per_node=in_a_node)


def _lora(recipe: Recipe) -> Lora | None:
    if not recipe.is_frozen:
        return None
    asked = MATRICES if recipe.targets == "all-linear" else recipe.targets
    if isinstance(asked, str) or not set(asked) <= set(MATRICES):
        return None
    base = "nf4-dq" if recipe.method == "qlora" else "bf16"
    targets = tuple(MATRICES[name] for name in asked)
    return Lora(rank=recipe.rank, targets=targets, base=base, autocast=recipe.autocast is not None)
