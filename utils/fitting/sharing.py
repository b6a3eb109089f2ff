"""Cures that FSDP2 has a part in: states on the host or over several cards, and texts over several cards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from utils.fitting.recipe import Recipe
from utils.fitting.sequence_rules import most_cards, why_not_shared
from utils.fitting.tried_cures import Cure

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def shared_states(recipe: Recipe, cards: int) -> Iterator[Cure]:
    """Parameters, gradients and moments on the host, or over that many cards."""
    shardable = not _not_shardable(recipe)
    if shardable and _leaves_to_the_host(recipe):
        yield Cure(
            "states to the host (FSDP2)",
            {"offload_states": True},
            f"shard(model{_gathered(recipe)}, offload=True), or CPUOffloadPolicy() for each fully_shard",
            "weights cross PCIe in each pass; the CPU steps, in pinned memory",
        )
    if recipe.cards == 1 and cards > 1 and shardable:
        yield Cure(
            f"FSDP2 over {cards} cards",
            {"cards": cards},
            f"shard(model{_gathered(recipe)}), under torchrun --nproc-per-node {cards}",
            f"{cards} cards; weights cross their link in each pass",
        )


def shared_texts(config: PreTrainedConfig, recipe: Recipe, cards: int) -> Iterator[Cure]:
    """The tokens of each text over as many of the cards as divide it, states over all of them."""
    over = max(recipe.cards, cards)
    if over == 1 or recipe.sequence_cards > 1 or _not_shareable(config, recipe, over):
        return
    sharing = most_cards(config, recipe, over)
    of_more = f" of {over}" * (sharing < over)
    yield Cure(
        f"one sequence over {sharing}{of_more} cards",
        {"cards": over, "sequence_cards": sharing},
        f"share_heads(model, {sharing}); shard(model{_gathered(recipe)}); share_tokens(model, {sharing})"
        f", under torchrun --nproc-per-node {over}",
        f"{over} cards, whose seconds are added up; in each layer and pass queries, keys, values and results cross their link, "
        "by all-to-alls that nothing hides",
    )


def _gathered(recipe: Recipe) -> str:
    """The second argument of the script's `shard`, as it is written."""
    names = {"bf16": ", torch.bfloat16", "fp16": ", torch.float16"}
    return names[recipe.autocast] if recipe.autocast else ""


def _leaves_to_the_host(recipe: Recipe) -> bool:
    """Whether FSDP2 can keep the states there, and does not yet."""
    is_fit = recipe.precision != "fp16-mixed" and not recipe.needs_bitsandbytes
    return is_fit and not recipe.offload_states


def not_simulated(config: PreTrainedConfig, recipe: Recipe, cards: int) -> dict[str, str]:
    """What is left out for this recipe, and why, by the names of `candidates`."""
    over = max(recipe.cards, cards)
    if over < 2:
        return {}
    said = {}
    if recipe.cards == 1 and (why := _not_shardable(recipe)):
        said[f"FSDP2 over {cards} cards"] = why
    if recipe.sequence_cards == 1 and (why := _not_shareable(config, recipe, over)):
        said[f"one sequence over {over} cards"] = why
    return said


def _not_shardable(recipe: Recipe) -> str:
    if recipe.method == "qlora":
        return (
            "not simulated for weights in four bits. FSDP can share them where "
            "bnb_4bit_quant_storage is the type of the other weights; try method='lora' here"
        )
    return "not simulated together with the step in backward" * recipe.step_in_backward


def _not_shareable(config: PreTrainedConfig, recipe: Recipe, cards: int) -> str:
    if _not_shardable(recipe):
        return "it shares states by FSDP2, which is not simulated for this recipe"
    if recipe.precision == "fp16-mixed":
        return "not simulated in fp16"
    if why := why_not_shared(config):
        return why
    divides = most_cards(config, recipe, cards) > 1
    return "" if divides else f"its heads or tokens are no equal parts for {cards} cards, or some"
