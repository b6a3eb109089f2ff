"""Which models' texts several cards can share by heads (`sequence_program`), and over how many cards.

Tests hold each of these kinds equal to one process that has the whole text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from utils.fitting.recipe import Recipe

PROVED = (
    "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "gpt_neox",
)  # fmt: skip
# transformers' modeling_rope_utils, `dynamic_rope_update`: their angles depend on the last position
# that a forward sees, which is another one on each card.
BY_LENGTH = ("dynamic", "longrope")
RING = "torch.distributed.tensor.experimental.context_parallel, a ring, does not look at heads"


def config_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """(query heads, key-value heads) of each layer."""
    heads: int = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def why_not_shared(config: PreTrainedConfig) -> str:
    """Why no number of cards can share a text of this model here; "" where some can."""
    if config.model_type not in PROVED:
        known = ", ".join(PROVED)
        return f"texts over several cards are proved equal for {known}, not for {config.model_type}"
    kinds = {*(getattr(config, "layer_types", None) or ["full_attention"])}
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        return (
            "texts over several cards are proved equal where all layers attend to all tokens before"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type", "default")) in BY_LENGTH:
        return f"angles of rope_type {kind!r} depend on the last token that a card sees"
    if getattr(config, "output_router_logits", False):
        return "the loss of the router counts each card's tokens alone"
    return ""


def shares_evenly(config: PreTrainedConfig, cards: int) -> bool:
    """Whether each card gets whole query heads, and whole key-value heads or a copy of one."""
    heads, pairs = config_heads(config)
    return heads % cards == 0 and (pairs % cards == 0 or cards % pairs == 0)


def most_cards(config: PreTrainedConfig, recipe: Recipe, cards: int) -> int:
    """Over how many of `cards` a text can be shared: the most that divide heads and tokens; 1 for none."""
    if why_not_shared(config):
        return 1
    whole = (n for n in range(cards, 0, -1) if cards % n == 0 and recipe.tokens % n == 0)
    return next(n for n in whole if shares_evenly(config, n))


def check_sequence_cards(config: PreTrainedConfig, recipe: Recipe) -> None:
    """Refuse a recipe whose texts cannot be shared as it says.

    Raises:
        ValueError: with the number of cards that can.
    """
    cards = recipe.sequence_cards
    if cards == 1:
        return
    if why := why_not_shared(config):
        raise ValueError(f"{why[0].upper()}{why[1:]}. Choose sequence_cards=1.")
    if not shares_evenly(config, cards):
        heads, pairs = config_heads(config)
        raise ValueError(
            f"{heads} query heads and {pairs} key-value heads are no whole heads for {cards} cards "
            f"({RING}). Choose sequence_cards={most_cards(config, recipe, recipe.cards)}."
        )
