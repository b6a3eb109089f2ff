"""DeepSpeed's JSON: batch, precision, ZeRO and offload. Its model code says the rest.

Keys: https://www.deepspeed.ai/docs/config-json/, checked with DeepSpeed 0.19.8's own class.
"""

from __future__ import annotations

import math
from typing import Any

from utils.catalog import ModelShape
from utils.planner.exporters.precision import convention_notes, precision
from utils.planner.layout import Plan
from utils.planner.plan_context import ClusterPlanContext

# Learning rates of GPT-3's sizes, by millions of parameters (Brown et al. 2020, arXiv:2005.14165,
# Table 2.1): the larger the model, the smaller the steps.
LEARNING_RATES = {125: 6e-4, 350: 3e-4, 760: 2.5e-4, 1_300: 2e-4, 2_700: 1.6e-4, 6_700: 1.2e-4,
                  13_000: 1e-4, 175_000: 6e-5}  # fmt: skip
CLIP = 1.0


def learning_rate(model: ModelShape) -> float:
    """The peak rate of the GPT-3 nearest in size: where to begin, not what to end with."""
    millions = model.active_parameter_count / 1e6
    return LEARNING_RATES[min(LEARNING_RATES, key=lambda size: abs(math.log(size / millions)))]


def deepspeed_config(context: ClusterPlanContext) -> dict[str, Any] | None:
    """The configuration as a dictionary that `json.dump` writes; None where DeepSpeed runs no such plan.

    train_batch_size = micro batch * accumulation * dp, where dp counts replicas of the data: ranks
    that share a sequence or a layer read the same rows.
    """
    plan = context.plan
    if refused(plan):
        return None
    return {
        **batch_keys(plan.dp, plan.micro_batch, context.micro_batches),
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate(context.model)}},
        "zero_optimization": _zero(plan),
        **precision_keys(precision(plan, context.cluster)),
    }


def batch_keys(replicas: int, micro_batch: int, accumulation: int) -> dict[str, int]:
    """The three sizes of a batch, which DeepSpeed wants to multiply out."""
    return {
        "train_batch_size": replicas * micro_batch * accumulation,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
    }


def precision_keys(kind: str) -> dict[str, Any]:
    """How DeepSpeed says one of the words of `precision`."""
    if kind == "fp32":
        return {}
    if kind == "fp16-mixed":
        return {"fp16": {"enabled": True}}
    whole = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {"bf16": {"enabled": True, **(whole if kind == "bf16" else {})}}


def refused(plan: Plan) -> bool:
    """DeepSpeed would stop at the plan, or run another one."""
    stages = plan.pp > 1 and (plan.zero_stage >= 2 or plan.virtual_stages > 1)
    return stages or plan.cp > 1 or plan.precision != "bf16" or plan.optimizer_in_backward


def _stage(plan: Plan) -> int:
    """DeepSpeed offloads, and keeps optimizer state in 16 bits, with ZeRO alone."""
    needs_zero = plan.offload != "none" or plan.conventions.name == "bf16"
    return max(plan.zero_stage, int(needs_zero))


def _zero(plan: Plan) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": _stage(plan)}  # overlap_comm stays DeepSpeed's own choice
    host = {"device": "cpu", "pin_memory": True}
    if plan.offload != "none":
        zero["offload_optimizer"] = host
    if plan.offload == "parameters":
        zero["offload_param"] = dict(host)
    return zero


def deepspeed_notes(plan: Plan) -> list[str]:
    """What this JSON cannot say, or says otherwise than the plan."""
    notes = [text for applies, text in _said_elsewhere(plan) if applies]
    if refused(plan):
        return ["No ds_config.json: DeepSpeed does not run this plan.", *notes]
    if _stage(plan) != plan.zero_stage:
        notes.append(
            "The plan has zero_stage 0; DeepSpeed offloads, and keeps optimizer state in 16 bits, "
            "only from stage 1 on, so the JSON has stage 1, which also shards optimizer state."
        )
    return notes + convention_notes("deepspeed", plan)


def _said_elsewhere(plan: Plan) -> list[tuple[bool, str]]:
    return [
        (plan.precision != "bf16",
         f"DeepSpeed has no key for {plan.precision}: products in fp8 are Transformer Engine's."),
        (plan.optimizer_in_backward, "DeepSpeed steps after backward, never in it."),
        (plan.ep > 1,
         f"Experts (ep {plan.ep}) are not in the JSON: the model has deepspeed.moe.layer.MoE(..., "
         f"ep_size={plan.ep})."),
        (plan.offload_activations,
         "Activations are offloaded by deepspeed.checkpointing with cpu_checkpointing, inputs alone."),
        (plan.tp > 1,
         f"Tensor parallelism (tp {plan.tp}) is not in the JSON: the model splits its own layers, as "
         "Megatron-DeepSpeed's does. For Hugging Face models DeepSpeed has tensor_parallel."),
        (plan.sequence_parallel,
         "Sequence parallelism of the norms is the model's own work too; DeepSpeed has no key."),
        (plan.cp > 1,
         f"Context parallelism (cp {plan.cp}) is not in the JSON. DeepSpeed's own way to divide a "
         "sequence, Ulysses, exchanges heads instead of keys and values."),
        (plan.pp > 1,
         f"Pipeline stages (pp {plan.pp}) are not in the JSON: the model is a "
         f"deepspeed.pipe.PipelineModule(layers, num_stages={plan.pp})."),
        (plan.pp > 1 and plan.partition != "even",
         f"partition={plan.partition!r} has no counterpart; see PipelineModule's partition_method."),
        (plan.virtual_stages > 1,
         f"DeepSpeed's pipeline does not interleave; virtual_stages {plan.virtual_stages} is lost."),
        (plan.pp > 1 and plan.schedule == "gpipe",
         "DeepSpeed's pipeline runs 1F1B; the gpipe schedule is lost."),
        (plan.pp > 1 and plan.zero_stage >= 2,
         f"DeepSpeed refuses ZeRO-{plan.zero_stage} with pipeline stages; take zero_stage=1 there."),
        (plan.shard_group < plan.dp * plan.cp and plan.zero_stage > 0,
         f"Sharding over {plan.shard_group} of {plan.dp * plan.cp} ranks (HSDP) is lost: DeepSpeed "
         "shards over all data-parallel ranks. zero_hpz_partition_size keeps a second copy instead."),
        (plan.recompute != "none",
         f"recompute={plan.recompute!r} is not in the JSON: the model calls "
         "deepspeed.checkpointing.checkpoint itself, or PipelineModule gets "
         "activation_checkpoint_interval."),
        (plan.attention == "unfused" or plan.dropout,
         "Attention kernel and dropout are the model's; the JSON does not say them."),
        (plan.lora is not None,
         "Adapters and the quantized base are the model's: wrap it with PEFT before "
         "deepspeed.initialize."),
    ]  # fmt: skip
