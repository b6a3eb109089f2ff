"""Parameters, gradients and optimizer state: the bytes that last from step to step.

ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054, section 5 and Table 1): with 2 + 2 + K bytes per
parameter, K = 12, N ranks hold 4 + 12/N, 2 + 14/N and 16/N bytes per parameter at stages 1, 2, 3.
"""

from __future__ import annotations

from utils.planner.conventions import Framework
from utils.planner.experts import expert_replicas, expert_tp
from utils.planner.fp8 import quantized_bytes
from utils.planner.layout import Plan
from utils.planner.plan_context import PlanContext
from utils.planner.stages import Stage
from utils.units import Category


def state_bytes(
    parameters: float, conventions: Framework, zero_stage: int, ranks: int, offload: str = "none"
) -> dict[Category, float]:
    """Bytes of one rank's "parameters", "gradients" and "optimizer state".

    Args:
        parameters: Parameters that the rank computes with, before ZeRO shards them.
        conventions: The framework's bytes per parameter.
        zero_stage: 0 to 3.
        ranks: N, over which ZeRO shards.
        offload: "none", "optimizer" or "parameters", see `Plan`.
    """
    share = {level: parameters / (ranks if zero_stage >= level else 1) for level in (1, 2, 3)}
    leave = gradients_leave(conventions, zero_stage, offload)
    return {
        Category.PARAMETERS: share[3] * conventions.parameter_bytes * (offload != "parameters"),
        Category.GRADIENTS: share[2] * conventions.gradient_bytes * (not leave),
        Category.OPTIMIZER_STATE: share[1] * conventions.optimizer_bytes * (offload == "none"),
    }


def gradients_leave(conventions: Framework, zero_stage: int, offload: str) -> bool:
    """Whether gradients go to the host as they are reduced, so that none lasts on the device."""
    return offload != "none" and zero_stage >= 2 and conventions.offloaded_gradient_bytes > 0


def states(context: PlanContext, stage: Stage) -> dict[Category, float]:
    """`state_bytes` of one rank of a stage."""
    plan, conventions = context.plan, context.conventions
    if plan.lora is not None:
        return _adapter_states(context, stage, plan.offload)
    experts = stage.expert_parameters
    held = state_bytes(
        stage.parameters - experts, conventions, plan.zero_stage, plan.shard_group, plan.offload
    )
    if experts:
        theirs = state_bytes(
            experts, conventions, plan.zero_stage, expert_replicas(plan), plan.offload
        )
        held = {name: size + theirs[name] for name, size in held.items()}
    if plan.optimizer_in_backward:
        held[Category.GRADIENTS] = 0.0
    held[Category.PARAMETERS] += quantized_bytes(plan, stage.block_parameters)
    return held


def host_bytes(context: PlanContext, stage: Stage) -> float:
    """Bytes of one rank of a stage that offload puts into its node's memory: states alone.

    Master copy and moments, with the gradients that the host steps with; with "parameters" these
    too. Of adapters the moments alone: their gradients stay on the card.
    """
    plan, conventions = context.plan, context.conventions
    if plan.offload == "none":
        return 0.0
    if plan.lora is not None:
        on_card = _adapter_states(context, stage, "none")
        return sum(on_card.values()) - sum(_adapter_states(context, stage, plan.offload).values())
    leave = gradients_leave(conventions, plan.zero_stage, plan.offload)
    gradients = conventions.offloaded_gradient_bytes if leave else conventions.gradient_bytes
    each = conventions.optimizer_bytes + gradients
    each += conventions.parameter_bytes * (plan.offload == "parameters")
    return each * stepped_parameters(plan, stage)


def stepped_parameters(plan: Plan, stage: Stage) -> float:
    """Parameters of a stage whose optimizer's step one rank computes."""
    experts = stage.expert_parameters
    ranks = (plan.shard_group, expert_replicas(plan)) if plan.zero_stage else (1, 1)
    return (stage.parameters - experts) / ranks[0] + experts / ranks[1]


def buffer_bytes(plan: Plan, stage: Stage) -> float:
    """Lasting communication buffers: of the data-parallel ranks, or on the way to the host."""
    leave = gradients_leave(plan.conventions, plan.zero_stage, plan.offload)
    if (plan.dp * plan.cp == 1 and not leave) or plan.lora is not None:
        return 0.0
    copies = plan.conventions.bucket_bytes if plan.zero_stage < 2 else 0.0
    return stage.parameters * copies + plan.conventions.fixed_buffer_bytes


def dummy_gradient_bytes(context: PlanContext) -> float:
    """Gradients that autograd is handed where the true ones are added up inside the products.

    Transformer Engine keeps one for each shape of a block's matrices (module/base.py,
    get_dummy_wgrad).
    """
    model, plan = context.model, context.plan
    if not context.conventions.dummy_gradients or plan.lora is not None:
        return 0.0
    h, f, kv = model.hidden, model.feedforward, model.key_value_heads * model.head_dim
    sides, q = 2 if model.family == "llama" else 1, model.attention_width / plan.tp
    shapes = {(h, q + 2 * kv / plan.tp), (q, h)}
    if model.expert_layers < model.layers:
        shapes |= {(h, sides * f / plan.tp), (f / plan.tp, h)}
    if model.num_experts:
        width = model.expert_width / expert_tp(plan)
        shapes |= {(h, sides * width), (width, h)}
    return context.conventions.residual_bytes * sum(rows * columns for rows, columns in shapes)


def _adapter_states(context: PlanContext, stage: Stage, offload: str) -> dict[Category, float]:
    """Frozen base in its own type, adapters with gradients and moments in theirs."""
    plan, lora = context.plan, context.plan.lora
    assert lora is not None
    norms = stage.layers * 2 * context.model.norm_parameters
    matrices = stage.block_parameters - norms + stage.head_parameters * lora.quantized_head
    plain = stage.parameters - matrices
    base = matrices * lora.base_bytes + plain * context.conventions.parameter_bytes
    adapters = context.trained[stage.kind] * lora.adapter_bytes
    n = {level: plan.shard_group if plan.zero_stage >= level else 1 for level in (1, 2, 3)}
    return {
        Category.PARAMETERS: (base + adapters) / n[3] * (offload != "parameters"),
        Category.GRADIENTS: adapters / n[2],
        Category.OPTIMIZER_STATE: 2 * adapters / n[1] * (offload == "none"),
    }


def step_bytes(plan: Plan, stage: Stage) -> float:
    """What the optimizer's step takes besides; on the host where the optimizer is there."""
    if plan.lora is not None or plan.offload != "none":
        return 0.0
    return stepped_parameters(plan, stage) * plan.conventions.step_gradient_bytes
