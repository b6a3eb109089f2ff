"""Arguments of Megatron-LM's pretrain_gpt.py.

Names: megatron/training/arguments.py, the whole list in validation/published/megatron_arguments.csv.
"""

from __future__ import annotations

from itertools import chain

from utils.catalog import ModelShape
from utils.planner.experts import expert_tp
from utils.planner.exporters.deepspeed import learning_rate
from utils.planner.exporters.precision import OWN, convention_notes, precision
from utils.planner.fp8 import kept_in_fp8
from utils.planner.goodput import goodput
from utils.planner.layout import Plan
from utils.planner.plan_context import ClusterPlanContext
from utils.planner.plan_estimate import estimated

Arguments = dict[str, object]  # True: a flag without a value; None and False: left out


def megatron_arguments(context: ClusterPlanContext) -> tuple[str, ...] | None:
    """One token each; None for adapters, which Megatron-LM does not train."""
    model, plan = context.model, context.plan
    if plan.lora is not None:
        return None
    groups = (
        _model(context),
        _layout(context),
        _data_parallel(plan),
        _experts(model, plan),
        _memory(plan),
        _training(context),
    )
    given = chain.from_iterable(group.items() for group in groups)
    return tuple(chain.from_iterable(_tokens(name, value) for name, value in given))


def _tokens(name: str, value: object) -> list[str]:
    if value is None or value is False:
        return []
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def _model(context: ClusterPlanContext) -> Arguments:
    model, length = context.model, context.batch.sequence_length
    llama, grouped = model.family == "llama", model.key_value_heads != model.heads
    positions = {"learned": "learned_absolute", "rotary": "rope", "alibi": "none"}
    longest = max(model.max_sequence, length) + model.extra_positions
    return {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.feedforward,
        "num-attention-heads": model.heads,
        "kv-channels": model.head_width,
        "qk-layernorm": model.qk_norm,
        "group-query-attention": grouped,
        "num-query-groups": model.key_value_heads if grouped else None,
        "seq-length": length,
        "max-position-embeddings": longest,
        "position-embedding-type": positions[model.positions],
        "normalization": "RMSNorm" if llama else "LayerNorm",
        "swiglu": llama,
        "disable-bias-linear": llama,
        "add-qkv-bias": model.qkv_bias,
        "untie-embeddings-and-output-weights": not model.tied,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": model.vocabulary,
        "make-vocab-size-divisible-by": context.conventions.vocabulary_multiple,
    }


def _layout(context: ClusterPlanContext) -> Arguments:
    plan = context.plan
    return {
        "tensor-model-parallel-size": plan.tp,
        "sequence-parallel": plan.sequence_parallel,
        "pipeline-model-parallel-size": plan.pp,
        "num-virtual-stages-per-pipeline-rank": plan.virtual_stages if _interleaved(plan) else None,
        "pipeline-model-parallel-layout": _stage_layout(context),
        "account-for-embedding-in-pipeline-split": _interleaved(plan) and plan.partition == "ends",
        "account-for-loss-in-pipeline-split": _interleaved(plan) and plan.partition == "ends",
        "context-parallel-size": plan.cp,
        "tp-comm-overlap": plan.overlap_tp,
    }


def _experts(model: ModelShape, plan: Plan) -> Arguments:
    if model.num_experts is None:
        return {}
    layers = f"([0]*{model.dense_layers}+[1]*{model.expert_layers})"
    return {
        "num-experts": model.num_experts,
        "moe-router-topk": model.experts_per_token,
        "moe-ffn-hidden-size": model.expert_width,
        "moe-shared-expert-intermediate-size": model.shared_feedforward or None,
        "moe-layer-freq": layers if model.dense_layers else None,
        "expert-model-parallel-size": plan.ep,
        "expert-tensor-parallel-size": expert_tp(plan),
        "moe-token-dispatcher-type": "alltoall",
        "moe-grouped-gemm": True,
        "moe-router-load-balancing-type": "aux_loss",
        "moe-aux-loss-coeff": 0.01,
    }


def _interleaved(plan: Plan) -> bool:
    return plan.virtual_stages > 1


def _stage_layout(context: ClusterPlanContext) -> str | None:
    """Embedding E, layers t and loss L by stage, "Et*3|t*4L"; None where all stages are alike."""
    places = context.stages
    if len(places) == 1 or _interleaved(context.plan):
        return None
    if len({stage.layers for stage in places}) == 1 and places[-1].head:
        return None
    blocks = (f"t*{stage.layers}" if stage.layers else "" for stage in places)
    return "|".join(
        "E" * stage.embedding + text + "L" * stage.loss
        for stage, text in zip(places, blocks, strict=True)
    )


def _data_parallel(plan: Plan) -> Arguments:
    replicas, shards = plan.dp * plan.cp > 1, plan.zero_stage >= 2
    strategy = {2: "optim_grads", 3: "optim_grads_params"}.get(plan.zero_stage)
    groups = plan.dp * plan.cp // plan.shard_group if plan.zero_stage else 1
    return {
        "use-distributed-optimizer": plan.zero_stage >= 1,
        "use-megatron-fsdp": shards,
        "data-parallel-sharding-strategy": strategy,
        "ckpt-format": "fsdp_dtensor" if shards else None,
        "no-gradient-accumulation-fusion": shards,
        "num-distributed-optimizer-instances": groups if groups > 1 else None,
        "grad-reduce-in-bf16": plan.conventions.name in OWN["megatron"] and plan.conventions.reduce_bytes == 2,
        "overlap-grad-reduce": replicas and plan.conventions.overlap_gradients,
        "overlap-param-gather": replicas and plan.zero_stage >= 1
        and plan.conventions.overlap_gradients and plan.conventions.overlap_parameters,
    }  # fmt: skip


def _memory(plan: Plan) -> Arguments:
    full, offloaded = plan.recompute == "full", plan.offload != "none"
    some = plan.recompute_layers is not None
    return {
        "recompute-granularity": plan.recompute if plan.recompute != "none" else None,
        "recompute-method": ("block" if some else "uniform") if full else None,
        "recompute-num-layers": (plan.recompute_layers or 1) if full else None,
        "cross-entropy-loss-fusion": plan.loss == "fused",
        "fp8-format": {"fp8": "hybrid", "mxfp8": "e4m3"}.get(plan.precision),
        "fp8-recipe": {"fp8": "tensorwise", "mxfp8": "mxfp8"}.get(plan.precision),
        "fp8-param-gather": kept_in_fp8(plan),
        "reuse-grad-buf-for-mxfp8-param-ag": kept_in_fp8(plan) and plan.precision == "mxfp8",
        "attention-backend": plan.attention,
        "attention-dropout": 0.1 if plan.dropout else 0.0,
        "hidden-dropout": 0.1 if plan.dropout else 0.0,
        "optimizer-cpu-offload": offloaded,
        "optimizer-offload-fraction": 1.0 if offloaded else None,
        "use-precision-aware-optimizer": offloaded,
    }


def save_interval(context: ClusterPlanContext) -> int:
    """Steps between two checkpoints: Daly's interval at the high rate of failures."""
    seconds = goodput(context.cluster).checkpoint_interval_seconds[0]
    return max(1, round(seconds / estimated(context).step_seconds))


def _training(context: ClusterPlanContext) -> Arguments:
    kind, rate = precision(context.plan, context.cluster), learning_rate(context.model)
    return {
        "micro-batch-size": context.plan.micro_batch,
        "global-batch-size": context.batch.sequences,
        "bf16": kind.startswith("bf16"),
        "fp16": kind.startswith("fp16"),
        "lr": rate,
        "min-lr": rate / 10,
        "lr-decay-style": "cosine",
        "lr-warmup-fraction": 0.01,
        "train-iters": 10,
        "mock-data": True,
        "save": "checkpoints",
        "load": "checkpoints",
        "save-interval": save_interval(context),
    }


def megatron_notes(context: ClusterPlanContext) -> list[str]:
    """What these arguments cannot say, or say otherwise than the plan."""
    model, plan = context.model, context.plan
    if plan.lora is not None:
        return ["No arguments: Megatron-LM trains every parameter. Adapters are Megatron Bridge's."]
    notes = [
        "Data, tokenizer and length stand in for yours: --mock-data, NullTokenizer, 10 iterations.",
        f"--lr {learning_rate(model):g} is that of the GPT-3 nearest in size (arXiv:2005.14165, Table "
        "2.1), down to a tenth of it: where to begin.",
        "--save-interval is Daly's for failures at the high end of the published range; --save and "
        "--load must be a folder that all nodes see.",
    ]
    notes += [text for applies, text in _said_otherwise(model, plan) if applies]
    if precision(plan, context.cluster) == "bf16":
        notes.append("Megatron-LM keeps float32 masters; the plan keeps none.")
    return notes + convention_notes("megatron", plan)


def connections(plan: Plan) -> str:
    """CUDA_DEVICE_MAX_CONNECTIONS: Megatron-LM demands 1 of TP and CP, and refuses it of FSDP."""
    return "8" if plan.zero_stage >= 2 else "1"


def _said_otherwise(model: ModelShape, plan: Plan) -> list[tuple[bool, str]]:
    return [
        (True,
         f"Set CUDA_DEVICE_MAX_CONNECTIONS={connections(plan)} first, as megatron.sh does."),
        (plan.pp > 1 and plan.schedule == "gpipe",
         "Megatron-LM's pipeline runs 1F1B; the gpipe schedule is lost."),
        (_interleaved(plan) and plan.partition not in ("even", "ends"),
         f"partition={plan.partition!r} is lost: interleaved chunks are alike."),
        (plan.zero_stage >= 2 and plan.pp > 1,
         "Megatron-FSDP with pipeline stages gathers and reduces for every micro-batch."),
        (plan.offload != "none" and plan.zero_stage == 0,
         "Megatron-LM offloads the optimizer through its distributed one; take zero_stage=1."),
        (plan.offload != "none" and plan.zero_stage >= 2,
         "The optimizer's offload is not tested with Megatron-FSDP; take zero_stage=1."),
        (plan.offload == "parameters",
         "Megatron-LM offloads optimizer state alone; the parameters stay on the device."),
        (plan.offload_activations,
         "--cpu-offloading moves activations without pipeline stages and recomputation alone; check it."),
        (plan.optimizer_in_backward, "Megatron-LM steps after backward, never in it."),
        (plan.loss == "chunked", "Megatron-LM does not chunk the loss; --cross-entropy-loss-fusion."),
        (model.positions == "alibi",
         "ALiBi has no argument; the model has no positions instead, at the same size."),
        (model.embedding_norm, "The norm on the embedding has no argument and is left out."),
    ]  # fmt: skip
