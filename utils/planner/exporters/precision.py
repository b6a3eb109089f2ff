"""Which precision a plan's framework computes in, in one word that every target understands."""

from __future__ import annotations

from utils.planner.cluster import Cluster
from utils.planner.layout import Plan

# Frameworks of `utils.planner` whose conventions are the target's own.
OWN = {
    "deepspeed": ("deepspeed", "megatron-deepspeed-fp16", "megatron-deepspeed-bf16"),
    "python": ("fsdp", "fp32", "bf16"),
    "megatron": ("megatron", "megatron-bridge"),
}
TITLES = {
    "deepspeed": "DeepSpeed",
    "python": "PyTorch",
    "megatron": "Megatron-LM",
}


def precision(plan: Plan, cluster: Cluster) -> str:
    """ "fp32", "bf16" (all of it, optimizer state too), "bf16-mixed" or "fp16-mixed".

    Mixed is a 16-bit model with float32 master parameters. It is fp16 where the framework says so
    or the device has no bfloat16 of its own.
    """
    conventions = plan.conventions
    if conventions.gathered_bytes == 4:
        return "fp32"
    if conventions.parameter_bytes == 2 and conventions.master_bytes == 0:
        return "bf16"
    return (
        "fp16-mixed"
        if "fp16" in conventions.name or not cluster.device.bf16_native
        else "bf16-mixed"
    )


def convention_notes(target: str, plan: Plan) -> list[str]:
    """Says so where the plan was estimated by another framework's conventions."""
    if plan.conventions.name in OWN[target]:
        return []
    return [
        f"The plan counts bytes and seconds as {plan.conventions.name!r} does; {TITLES[target]} keeps its "
        f"own precision and buffers. For its own figures estimate with framework={OWN[target][0]!r}."
    ]
