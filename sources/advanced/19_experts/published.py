"""Published figures of mixtures of experts that the planner's tables do not hold, each with its source."""

from __future__ import annotations

# Parameters in units of 1e9, held and used for a token, as their authors print them.
PARAMETERS = {
    "Mixtral-8x7B": (47.0, 13.0, "arXiv:2401.04088, abstract"),
    "Qwen3-30B-A3B": (30.5, 3.3, "model card of Qwen/Qwen3-30B-A3B"),
    "DeepSeek-V3": (671.0, 37.0, "arXiv:2412.19437, abstract"),
}

# Seconds of a step of Qwen3-235B-A22B on 256 H100, 4,096 tokens a sequence, 2,048 sequences: all five rows of the
# table. EP, PP, TP, FSDP, dispatcher, recomputed, seconds, TFLOP/s a GPU.
LAYOUTS_SOURCE = "Megatron-MoE-ModelZoo, best_practice/Qwen3/readme.md at c1ad0b5"
LAYOUTS = (
    (32, 8, 2, "no", "DeepEP", "norms, activations", 19.7, 245),
    (32, 8, 2, "no", "DeepEP", "the same; exchanges overlapped (1F1B)", 17.6, 276),
    (8, 1, 2, "yes", "DeepEP", "all", 17.6, 276),
    (8, 32, 2, "no", "all-to-all", "norms, activations", 24.2, 200),
    (8, 8, 4, "no", "DeepEP", "nothing", 29.0, 167),
)
