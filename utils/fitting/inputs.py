"""One micro-batch of a model's kind, with shapes as its training has them and values that do not matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from utils.fitting.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WHISPER_FRAMES_PER_POSITION = 2  # its first convolution halves them
SPECTROGRAM, PIXELS = "input_features", "pixel_values"
TEXT_ONLY = (
    "The step has text alone: each image would add its tokens to the text, and the activations of "
    "the vision part."
)


def micro_batch(config: PreTrainedConfig, recipe: Recipe, device: str = "cuda") -> dict[str, Any]:
    """What `model(**batch)` takes: token numbers, images or spectrograms, and labels.

    Args:
        config: The model's, which says what it takes.
        recipe: Gives `micro_batch` and `tokens` (of the text; of an encoder's and a decoder's each).
        device: Where it lies.
    """
    count, text = recipe.micro_batch, config.get_text_config()
    if (bins := getattr(config, "num_mel_bins", None)) and config.is_encoder_decoder:
        frames = WHISPER_FRAMES_PER_POSITION * config.max_source_positions
        return {
            SPECTROGRAM: torch.zeros(count, bins, frames, device=device),
            "labels": _tokens(count, min(recipe.tokens, config.max_target_positions), device),
        }
    if (size := getattr(config, "image_size", None)) and not hasattr(text, "vocab_size"):
        side = (size, size) if isinstance(size, int) else tuple(size)
        return {
            PIXELS: torch.zeros(count, config.num_channels, *side, device=device),
            "labels": torch.zeros(count, dtype=torch.long, device=device),
        }
    tokens = _tokens(count, recipe.tokens, device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _tokens(count: int, length: int, device: str) -> torch.Tensor:
    return torch.zeros(count, length, dtype=torch.long, device=device)


def not_trained(config: PreTrainedConfig) -> str:
    """What a micro-batch of this kind does not show; "" for nothing."""
    return (
        TEXT_ONLY
        if config.get_text_config() is not config and hasattr(config, "vision_config")
        else ""
    )
