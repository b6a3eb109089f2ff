"""`python -m evidence.fit_peers`: the peaks of fine-tunes that one H200 recorded, by other tools too.

accelerate's `estimate-memory` knows a model's size alone: of a full fine-tune its training step counts
here, of a frozen model the weights, which is the kindest reading. The usual formula adds to the
states 34 bytes a token, layer and unit of width (Korthikanti et al. 2022, arXiv:2205.05198, equation
2, without attention's scores), or 2 with each block recomputed. PyTorch's MemTracker refuses each of
these programs on a machine without a GPU, or takes no frozen weights; small steps that it does take
are in `python -m evidence.validation`.
"""

from __future__ import annotations

import torch
from accelerate.commands.estimate import estimate_training_usage

from evidence.recorded import RecordedFit, recorded_fine_tunes
from evidence.validation.peers import PeerError, error_of
from utils.fitting import Recipe, training_program
from utils.fitting.model_configs import auto_class, model_config

WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}
NF4_BYTES = 0.5 + 1 / 64  # four bits, and a byte for each block of 64 (double quantization)
MOMENT_BYTES = {"adafactor": 0.0, "sgd": 0.0, "adamw-8bit": 2.0, "paged-adamw-8bit": 0.0}
KEPT_BYTES, RECOMPUTED_BYTES = 34, 2


def sizes(row: RecordedFit) -> tuple[int, int]:
    """Parameters of the model, and those that are trained."""
    config, recipe = model_config(row.model), row.recipe
    with torch.device("meta"):
        model = auto_class(config).from_config(config)  # type: ignore[attr-defined]
        count = sum(parameter.numel() for parameter in model.parameters())
        if not recipe.is_frozen:
            return count, count
        model = training_program.add_adapters(model, recipe.rank, recipe.targets)
    return count, sum(p.numel() for p in model.parameters() if p.requires_grad)


def accelerate_bytes(row: RecordedFit) -> float:
    """What `accelerate estimate-memory` says of a model of this size."""
    count, _ = sizes(row)
    if row.recipe.is_frozen:
        return count * _weight_bytes(row.recipe)
    return max(estimate_training_usage(4 * count, "float32").values())


def formula_bytes(row: RecordedFit) -> float:
    """States by the byte, activations by Korthikanti's count."""
    config, recipe = model_config(row.model), row.recipe
    count, trained = sizes(row)
    width = WEIGHT_BYTES["fp32" if recipe.is_frozen else recipe.weights]
    gradients = 0.0 if recipe.step_in_backward else width
    states = trained * (width + gradients + MOMENT_BYTES.get(recipe.optimizer, 2 * width))
    frozen = count * _weight_bytes(recipe) if recipe.is_frozen else 0.0
    each = RECOMPUTED_BYTES if recipe.checkpointing else KEPT_BYTES
    tokens = recipe.tokens * recipe.micro_batch
    return states + frozen + each * tokens * config.hidden_size * config.num_hidden_layers


def _weight_bytes(recipe: Recipe) -> float:
    return NF4_BYTES if recipe.method == "qlora" else WEIGHT_BYTES[recipe.weights]


TOOLS = {
    "this simulator": lambda row: row.simulated().peak_bytes,
    "accelerate estimate-memory": accelerate_bytes,
    "the usual formula": formula_bytes,
}


def peers(rows: list[RecordedFit]) -> list[PeerError]:
    """Each tool's error on the allocated peak, of full fine-tunes and of adapters."""
    kinds = {"full fine-tunes, H200": False, "adapters, H200": True}
    return [
        error_of(
            kind,
            tool,
            [ask(row) / row.peak_bytes for row in rows if row.recipe.is_frozen is frozen],
        )
        for kind, frozen in kinds.items()
        for tool, ask in TOOLS.items()
    ]


if __name__ == "__main__":
    print(f"{'allocated peak':<28}{'tool':<28}{'rows':>5}{'median':>8}{'bias':>8}")
    for found in peers(recorded_fine_tunes()):
        line = f"{found.source:<28}{found.tool:<28}{found.rows:>5}"
        print(f"{line}{found.median:>8.1%}{found.bias:>8.1%}")
