"""Published figures of mixtures of experts that the planner's tables do not hold, each with its source."""

from __future__ import annotations

# Parameters in units of 1e9, held and used for a token, as their authors print them.
PARAMETERS = {
    "Mixtral-8x7B": (47.0, 13.0, "arXiv:2401.04088, abstract"),
    "Qwen3-30B-A3B": (30.5, 3.3, "model card of Qwen/Qwen3-30B-A3B"),
    "DeepSeek-V3": (671.0, 37.0, "arXiv:2412.19437, abstract"),
}

# Whole steps of Qwen3-30B-A3B on 8 H100 in bf16, experts over all eight, micro-batches of four sequences of 4,096 tokens:
# tokens and 1e12 products per second of a GPU. What is recomputed is not counted in the products, and is done: the row's
# examples/benchmark/configs/qwen3_moe_30b_te_deepep.yaml sets activation_checkpointing, and a loss without fp32 copies.
# It sets fake_balanced_gate, too: FakeBalancedGate (components/moe/layers.py) numbers all rows from 0, and deals them to
# experts in turn, so a token's eight experts are neighbours, and on one rank of eight.
STEP_TOKENS, STEP_TFLOPS, STEP_MICRO_BATCH = 12040.0, 277.0, 4 * 4096
STEP_SOURCE = "NeMo AutoModel, docs/performance-summary.md, October 2025"

# 1e12 model FLOP/s of a GPU: Llama 3 405B in bf16 (arXiv:2407.21783, table 4). This is the least of three: on 16,384 H100 with
# sequences of 131,072 tokens. With 8,192 tokens it reached 400 on as many, and 430 on 8,192 H100.
LLAMA_3_TFLOPS = 380
