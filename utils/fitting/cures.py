"""What would make a step need less: each change by itself, and what it costs otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from utils.fitting.model_configs import auto_class
from utils.fitting.recipe import Recipe
from utils.fitting.sharing import shared_states, shared_texts
from utils.fitting.tried_cures import Cure

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LEAST_TOKENS = 256  # shorter texts are not tried
CAUSAL = "AutoModelForCausalLM"
# AdamW of bitsandbytes by the recipe's name: in words, its class, what it costs.
PACKED = {
    "adamw-8bit": ("8-bit AdamW", "AdamW8bit", "moments rounded to a byte"),
    "paged-adamw": (
        "paged AdamW",
        "PagedAdamW",
        "pages of moments that do not fit cross PCIe in each step",
    ),
    "paged-adamw-8bit": (
        "paged 8-bit AdamW",
        "PagedAdamW8bit",
        "moments rounded to a byte; pages that do not fit cross PCIe",
    ),
}


# CachingHostAllocatorImpl.h of PyTorch, `allocate`: the size of a pinned block is a power of two.
OFFLOAD_COSTS = (
    "copies stop the stream that computes; each pinned block is rounded up to a power of two"
)


def single_cures(config: PreTrainedConfig, recipe: Recipe, cards: int = 2) -> Iterator[Cure]:
    """The changes that can be tried on a recipe, cheap ones first."""
    yield from _batch(recipe)
    yield from _activations(config, recipe)
    yield from _states(recipe)
    yield from shared_states(recipe, cards)
    yield from shared_texts(config, recipe, cards)


def shorter(recipe: Recipe) -> Iterator[Cure]:
    """Half the tokens in a sequence, a quarter, and so on: another step, not the same one for less."""
    tokens = recipe.tokens // 2
    while recipe.micro_batch == 1 and tokens >= LEAST_TOKENS:
        yield Cure(
            f"{tokens:,} tokens in place of {recipe.tokens:,}",
            {"tokens": tokens},
            f"TOKENS = {tokens}",
            "shorter texts: another step",
        )
        tokens //= 2


def _batch(recipe: Recipe) -> Iterator[Cure]:
    if recipe.micro_batch > 1 and recipe.micro_batch % 2 == 0 and not recipe.step_in_backward:
        half, twice = recipe.micro_batch // 2, 2 * recipe.accumulation
        yield Cure(
            f"micro-batch {half}, {twice} times accumulated",
            {"micro_batch": half, "accumulation": twice},
            f"MICRO_BATCH, ACCUMULATION = {half}, {twice}",
            "smaller products; the same step",
        )


def _activations(config: PreTrainedConfig, recipe: Recipe) -> Iterator[Cure]:
    if recipe.checkpointing != 1:
        yield checkpointing_of(1)
    if not recipe.checkpointing:
        yield checkpointing_of(2)
    if recipe.loss == "whole" and takes_chunked_loss(config):
        yield Cure(
            "chunked loss",
            {"loss": "chunked"},
            "chunk_loss(model)",
            "model(**batch) hands out no logits; needs PyTorch 2.13 or later",
        )
    if not recipe.offload_activations:
        yield Cure(
            "activations to the host",
            {"offload_activations": True},
            "with torch.autograd.graph.save_on_cpu(pin_memory=True): ...",
            OFFLOAD_COSTS,
        )


def checkpointing_of(every: int, spared: int = 0) -> Cure:
    """Recomputing each `every`-th block, or all but each `spared`-th: 2 to 4, or every=1 alone."""
    blocks, share = {
        (1, 0): ("all blocks", "each block's"),
        (1, 3): ("all but every third block", "two thirds of the blocks'"),
        (1, 4): ("all but every fourth block", "three quarters of the blocks'"),
        (2, 0): ("every second block", "half of the blocks'"),
        (3, 0): ("every third block", "a third of the blocks'"),
        (4, 0): ("every fourth block", "a quarter of the blocks'"),
    }[every, spared]
    given = f"every={every}" + f", spared={spared}" * bool(spared)
    hint = "  # or model.gradient_checkpointing_enable()" * (every == 1 and not spared)
    return Cure(
        f"checkpointing of {blocks}",
        {"checkpointing": every, "spared": spared},
        f"checkpoint_each(model, {given}){hint}",
        f"{share} forward runs twice",
    )


def takes_chunked_loss(config: PreTrainedConfig) -> bool:
    """Whether the loss is the plain next token's, of a head without a cap on its logits."""
    scaled = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    plain = config.get_text_config() is config and not any(getattr(config, n, None) for n in scaled)
    return plain and auto_class(config).__name__ == CAUSAL


def _states(recipe: Recipe) -> Iterator[Cure]:
    if recipe.optimizer == "adamw-foreach":
        line = "optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)"
        yield Cure("fused AdamW", {"optimizer": "adamw"}, line, "nothing")
    if recipe.optimizer in ("adamw", "adamw-foreach") and not recipe.offload_states:
        for optimizer, (name, kind, costs) in PACKED.items():
            line = f"optimizer = bnb.optim.{kind}(trained, lr=LEARNING_RATE)"
            yield Cure(name, {"optimizer": optimizer}, line, costs)
    if recipe.method == "full":
        yield Cure(
            "adapters in place of all weights",
            {"method": "lora"},
            'model = add_adapters(model, rank=16, targets="all-linear")',
            "another model is trained: LoRA learns less",
        )
        if recipe.precision == "bf16-mixed":
            yield Cure(
                "weights and moments in bf16",
                {"precision": "bf16"},
                "from_pretrained(SOURCE, dtype=torch.bfloat16), no autocast",
                "small updates are rounded away, unless rounded at random",
            )
        if not recipe.step_in_backward and recipe.accumulation == 1 and not recipe.is_sharded:
            yield Cure(
                "step in backward",
                {"step_in_backward": True},
                "step_in_backward(model, OPTIMIZER, LEARNING_RATE)",
                "no clipping by the global norm, no accumulation",
            )
    if recipe.method == "lora" and recipe.precision == "bf16-mixed" and not recipe.is_sharded:
        yield Cure(
            "frozen weights in four bits",
            {"method": "qlora"},
            "from_pretrained(SOURCE, quantization_config=FOUR_BITS)",
            "rounded weights; merging needs 16 bits",
        )
