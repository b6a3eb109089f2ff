"""Published figures of mixtures of experts that the planner's tables do not hold, each with its source."""

from __future__ import annotations

# Parameters in units of 1e9, held and used for a token, as their authors print them.
PARAMETERS = {
    "Mixtral-8x7B": (47.0, 13.0, "arXiv:2401.04088, abstract"),
    "Qwen3-30B-A3B": (30.5, 3.3, "model card of Qwen/Qwen3-30B-A3B"),
    "DeepSeek-V3": (671.0, 37.0, "arXiv:2412.19437, abstract"),
}

# Whole steps of Qwen3-30B-A3B on one node, its experts shared by all 8 GPUs: (layout, tokens per second of
# a GPU, TFLOP/s by its authors' count or None, their sequences' length or None, source). Neither source counts
# what is recomputed. Where tokens alone were published, products follow from the length of sequences, or from
# another line of the same source.
DEEPEP_TOKENS, DEEPEP_TFLOPS = 14796.0, 341.0
STEPS = (
    ("8 H100, outputs all-reduced", 3485.0, None, 2048, "transformers, expert_parallelism.md"),
    ("8 B200, all-to-all", 9930.0, None, None, "torchtitan, deepep/README.md"),
    ("8 B200, DeepEP", DEEPEP_TOKENS, DEEPEP_TFLOPS, None, "torchtitan, deepep/README.md"),
)
