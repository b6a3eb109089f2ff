"""Floating-point operations of a step, in the two conventions that papers use.

MFU, model FLOP utilization (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), counts what the
model needs: one forward pass and a backward pass of twice that. HFU counts recomputation as well.
Both are counted here as Megatron-LM counts them: 2 FLOP a multiply-add, the head once, the
embedding look-up nothing, and attention over all s keys of each query, although a causal model
needs half. For a GPT block that is 24*b*s*h^2 + 4*b*s^2*h forward (Korthikanti et al. 2022,
arXiv:2205.05198, appendix A).
"""

from __future__ import annotations

from utils.catalog import ModelShape, model_shape
from utils.planner.batch import Batch
from utils.planner.layout import Plan


def block_forward_flops(model: ModelShape, sequence_length: int) -> dict[str, float]:
    """FLOP per token of one block's forward pass: "matrices" and "attention".

    In a mixture of experts, of an average block, each token through its k experts.
    """
    h, key_value = model.hidden, model.key_value_heads * model.head_dim
    feedforward = (3 if model.family == "llama" else 2) * h * model.feedforward
    if model.num_experts:
        counts, chosen = model.expert_parameter_counts(), model.experts_per_token or 0
        routed = counts["experts"] * chosen / model.num_experts
        mixed = routed + counts["router"] + counts["shared"]
        share = model.expert_layers / model.layers
        feedforward = share * mixed + (1 - share) * feedforward
    width = model.attention_width
    weights = 2 * h * width + 2 * h * key_value + feedforward
    return {"matrices": 2.0 * weights, "attention": 4.0 * sequence_length * width}


def head_forward_flops(model: ModelShape) -> float:
    """FLOP per token of the head."""
    return 2.0 * model.vocabulary * model.hidden


def model_flops(model: ModelShape | str, batch: Batch) -> float:
    """FLOP of one step by the MFU convention, over all GPUs."""
    model = model_shape(model)
    block = sum(block_forward_flops(model, batch.sequence_length).values())
    return 3 * batch.tokens * (model.layers * block + head_forward_flops(model))


def hardware_flops(model: ModelShape | str, plan: Plan, batch: Batch) -> float:
    """FLOP of one step by the HFU convention: with what is recomputed.

    Full recomputation adds one forward pass of the blocks, selective one of the attention.
    """
    model = model_shape(model)
    block = block_forward_flops(model, batch.sequence_length)
    again = {"none": 0.0, "selective": block["attention"], "full": sum(block.values())}
    if plan.recompute_layers is not None:
        again["full"] *= min(1.0, plan.recompute_layers * plan.pp / model.layers)
    selective_flash = plan.recompute == "selective" and plan.attention == "flash"
    extra = 0.0 if selective_flash else again[plan.recompute]
    return model_flops(model, batch) + batch.tokens * model.layers * extra
