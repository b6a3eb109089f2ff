"""What a block keeps for its backward pass, tensor by tensor.

For the GPT family the table is Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1: with
dropout, unfused attention and GELU its sum is s*b*h*(34 + 5*a*s/h), their equation 1; with tensor
parallelism 10 + 24/t + 5*a*s/(h*t), equation 2; with sequence parallelism all is divided by t,
equation 4. For the Llama family the same count with RMSNorm, grouped queries and SwiGLU gives

    s*b * (4h [norm inputs] + 4h [norm outputs] + 2h + 2h [q, attention output]
           + 4*h*g/a [k, v] + 4f [gate, up] + 2f [their product] (+ 2f [silu, where unfused]))

in two bytes an element, g the key-value heads, f the feed-forward width. Flash attention keeps
its output and one float32 per head and token in place of the scores (Dao et al. 2022,
arXiv:2205.14135, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from utils.catalog import ModelShape
from utils.planner.adapters import Lora, kept_inputs
from utils.planner.experts import expert_tp, shared_model
from utils.planner.fp8 import FP8_SHARE
from utils.planner.layout import Plan


@dataclass(frozen=True)
class Saved:
    """One tensor that a block keeps.

    Attributes:
        name: What it is.
        bytes_per_token: Over all tp ranks together.
        split: "tp": divided by tp; "sequence": divided by tp only under sequence parallelism;
            "gathered": as "sequence", unless the framework keeps it gathered; "routed": tokens at
            their experts, divided by the tp ranks that do not share an expert.
        scores: It is part of the attention scores, which selective recompute drops.
        for_weights: It is kept only for the gradient of the matrix that reads it, so not under
            LoRA, where that matrix is frozen.
        of_norm: It belongs to a norm, whose weights are never quantized.
    """

    name: str
    bytes_per_token: float
    split: str = "tp"
    scores: bool = False
    for_weights: bool = False
    of_norm: bool = False


def saved_tensors(
    model: ModelShape, plan: Plan, sequence_length: int, experts: bool = False
) -> tuple[Saved, ...]:
    """Every tensor that one block keeps without recomputation; `experts`: a block that has some."""
    if experts:
        feedforward = _experts(model, plan)
    else:
        feedforward = _gelu(model, plan) if model.family == "gpt" else _swiglu(model, plan)
    tensors = _attention(model, plan, sequence_length) + feedforward
    lora = plan.lora
    if lora is None:
        return _in_fp8(tensors, plan) if plan.precision != "bf16" else tensors
    inputs_kept = lora.keeps_inputs and lora.base != "bf16"
    tensors = tuple(t for t in tensors if not t.for_weights or (inputs_kept and not t.of_norm))
    return tensors + _adapters(model, plan, lora)


def _norm(model: ModelShape, plan: Plan, number: int) -> tuple[Saved, ...]:
    """A fused norm keeps its input; RMSNorm in plain PyTorch a float32 copy and the normalized."""
    h, width = model.hidden, plan.conventions.residual_bytes
    if model.family == "gpt" or not plan.conventions.eager_norm:
        if number == 2 and model.parallel_residual:
            return ()  # its input is the first one's
        return (Saved(f"norm {number} input", width * h, "sequence"),)
    return (
        Saved(f"norm {number} input in float32", 4 * h, "sequence"),
        Saved(f"norm {number} normalized", width * h, "sequence", for_weights=True, of_norm=True),
    )


def _attention(model: ModelShape, plan: Plan, s: int) -> tuple[Saved, ...]:
    h, a, width = model.hidden, model.heads, plan.conventions.residual_bytes
    kv = model.key_value_heads * model.head_dim
    q = model.attention_width
    tensors = [
        *_norm(model, plan, 1),
        Saved("q, k, v input", width * h, "gathered", for_weights=True),
        Saved("q, k, v", width * (q + 2 * kv)),
        Saved("attention output", width * q),
    ]
    if model.qk_norm:
        tensors.append(Saved("q, k before their norms", width * (q + kv)))
    if plan.attention == "flash":
        tensors.append(Saved("softmax statistics", 4 * a, scores=True))
    else:
        tensors.append(Saved("softmax output", width * a * s, scores=True))
        if plan.dropout:
            tensors.append(Saved("attention dropout mask", a * s, scores=True))
            tensors.append(Saved("dropped-out scores", width * a * s, scores=True))
    if plan.dropout:
        tensors.append(Saved("dropout 1 mask", h, "sequence"))
    return tuple(tensors)


def _gelu(model: ModelShape, plan: Plan) -> tuple[Saved, ...]:
    h, f, width = model.hidden, model.feedforward, plan.conventions.residual_bytes
    mask = (Saved("dropout 2 mask", model.hidden, "sequence"),) if plan.dropout else ()
    return (
        *_norm(model, plan, 2),
        Saved("feed-forward input", width * h, "gathered", for_weights=True),
        Saved("GELU input", width * f),
        Saved("GELU output", width * f, for_weights=True),
        *mask,
    )


def _swiglu(model: ModelShape, plan: Plan) -> tuple[Saved, ...]:
    h, f, width = model.hidden, model.feedforward, plan.conventions.residual_bytes
    unfused = () if plan.conventions.fused_gate else (Saved("silu(gate)", width * f),)
    return (
        *_norm(model, plan, 2),
        Saved("feed-forward input", width * h, "gathered", for_weights=True),
        Saved("gate and up", 2 * width * f),
        *unfused,
        Saved("gated product", width * f, for_weights=True),
    )


def _experts(model: ModelShape, plan: Plan) -> tuple[Saved, ...]:
    """Router, experts and shared experts (megatron/core/transformer/moe, read at d98e8a6).

    Each token's row is kept once for every expert it goes to: as it arrives, after the first
    matrix, and with the router's probability, which the activation multiplies in. The router keeps
    its input's float32 logits and probabilities.
    """
    h, width, k = model.hidden, plan.conventions.residual_bytes, model.experts_per_token or 0
    f = k * model.expert_width / expert_tp(plan)
    sides, names = (2, "gate and up") if model.family == "llama" else (1, "GELU input")
    weighted = model.family == "gpt"  # SwiGLU and the probability are one kernel, GELU is not
    beside: tuple[Saved, ...] = ()
    if model.shared_feedforward:
        dense = (_gelu if model.family == "gpt" else _swiglu)(shared_model(model), plan)
        beside = dense[len(_norm(model, plan, 2)) :]
    mask = (Saved("dropout 2 mask", h, "sequence"),) if plan.dropout and not beside else ()
    return (
        *_norm(model, plan, 2),
        Saved("router input", width * h, "sequence"),
        Saved("router logits and probabilities", 3 * 4 * (model.num_experts or 0), "sequence"),
        Saved("expert input", width * k * h, "routed", for_weights=True),
        Saved(f"experts' {names}", width * sides * f, "routed"),
        Saved("experts' product", width * f, "routed", for_weights=True),
        *((Saved("GELU output before its weight", width * f, "routed"),) if weighted else ()),
        *(tensor for tensor in beside if tensor.name != "feed-forward input"),
        *mask,
    )


def _in_fp8(tensors: tuple[Saved, ...], plan: Plan) -> tuple[Saved, ...]:
    """Inputs of matrices are kept in fp8 alone, the attention's output in both types."""
    share = FP8_SHARE[plan.precision]
    smaller = tuple(
        replace(t, bytes_per_token=t.bytes_per_token * share)
        if t.for_weights and not t.of_norm
        else t
        for t in tensors
    )
    output = next(t for t in tensors if t.name == "attention output")
    return (*smaller, Saved(f"{output.name} in fp8", output.bytes_per_token * share))


def _adapters(model: ModelShape, plan: Plan, lora: Lora) -> tuple[Saved, ...]:
    """An adapter keeps its input in its own type, the mask of its dropout, and A(x)."""
    values, masks = kept_inputs(model, lora, plan.conventions.residual_bytes)
    inner = lora.product_bytes * lora.rank * len(lora.targets)
    return (
        Saved("adapter inputs", values),
        Saved("adapter dropout masks", masks),
        Saved("adapter inner", inner),
        *(_fused_adapters(model, plan, lora) if lora.fused else ()),
    )


def _fused_adapters(model: ModelShape, plan: Plan, lora: Lora) -> tuple[Saved, ...]:
    """What litgpt's one matrix for q, k and v keeps besides (lit_gpt/model.py, lora.py at 8641822).

    Values are a view of the whole product and hold all of it; grouped keys and values are expanded
    to all heads and copied instead. Where one of the three has no adapter, `index_copy` puts the
    update among zeros and keeps its source.
    """
    width, q = plan.conventions.residual_bytes, model.attention_width
    kv = model.key_value_heads * model.head_dim
    beside = q + kv if kv == q else 2 * (q - kv)
    widths = {"q": q, "k": kv, "v": kv}
    placed = [size for name, size in widths.items() if name in lora.targets]
    updates = sum(placed) * (len(placed) < len(widths))
    return (
        Saved("q, k, v of which the values are a view", width * beside),
        Saved("adapters' updates before zeros", lora.product_bytes * updates),
    )


def on_rank(tensor: Saved, plan: Plan) -> float:
    """Bytes per token of one tensor on one tp rank."""
    if tensor.split == "routed":
        return tensor.bytes_per_token * expert_tp(plan) / plan.tp
    if tensor.split != "tp" and not plan.sequence_parallel:
        return tensor.bytes_per_token
    whole = plan.conventions.gathered_inputs if tensor.split == "gathered" else 0.0
    return tensor.bytes_per_token * (whole + (1 - whole) / plan.tp)
