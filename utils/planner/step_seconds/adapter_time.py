"""Seconds of adapters as peft runs them, one plain operation after another, and of unpacking."""

from __future__ import annotations

from utils.catalog import Device, ModelShape
from utils.planner import calibration
from utils.planner.adapters import Lora, matrix_shapes
from utils.planner.plan_context import ClusterPlanContext
from utils.planner.step_seconds.kernels import matmul_seconds, memory_seconds
from utils.planner.step_seconds.pass_seconds import BlockTime, PassSeconds

# Bytes that one adapter of (in, out) moves per token, by its type's width w, beside the products'
# own (peft, tuners/lora/layer.py, Linear.forward): the input is cast (2 + w per in), B's output is
# written, scaled and added to the result (w, 2w, w + 2 + w), which is cast back (w + 2); in 16
# bits nothing is cast. Under autocast the input goes to float32 for the dropout and back. Backward
# does the same to gradients, and adds to that of the input.
CAST = 2


def adapted(context: ClusterPlanContext) -> BlockTime:
    """Adapters of a block, and unpacking the matrices that they stand beside, once a pass."""
    gpu, model, lora = context.gpu, context.model, context.plan.lora
    assert lora is not None
    unpacked = PassSeconds(memory=unpack_seconds(gpu, model, lora))
    forward, backward = adapter_seconds(gpu, model, lora, context.rank_tokens)
    return BlockTime(PassSeconds(*forward) + unpacked, PassSeconds(*backward) + unpacked)


def adapter_seconds(
    gpu: Device, model: ModelShape, lora: Lora, tokens: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(products, memory) of a block's adapters, forward and backward."""
    shapes, width = matrix_shapes(model), lora.product_bytes
    forward = backward = moved_forward = moved_backward = 0.0
    casts = width > CAST
    there_and_back = 2 * (CAST + lora.adapter_bytes) * (lora.adapter_bytes > width)
    for inner, outer in (shapes[name] for name in lora.targets):
        sizes = (lora.rank, inner), (outer, lora.rank)
        both = sum(_product(gpu, tokens, n, k, width) for n, k in sizes)
        forward, backward = forward + both, backward + 2 * both
        turned = (CAST + width) * casts
        moved_forward += inner * (turned + there_and_back) + outer * (5 * width + CAST + turned)
        moved_backward += inner * (turned + there_and_back + 3 * CAST) + outer * (
            3 * width + turned
        )
    dropped = 1 + lora.adapter_bytes if there_and_back else 3
    masks = dropped * lora.adapter_dropout * sum(shapes[name][0] for name in lora.targets)
    memory = [
        memory_seconds(gpu, tokens * (one + masks)) for one in (moved_forward, moved_backward)
    ]
    return (forward, memory[0]), (backward, memory[1])


def _product(gpu: Device, m: float, n: float, k: float, width: int) -> float:
    """In 32 bits without tf32, PyTorch's default, it runs on the vector units."""
    if width == CAST:
        return matmul_seconds(gpu, m, n, k)
    rate = gpu.fp32_tflops * 1e12 * calibration.VECTOR_SUSTAINED
    return max(2 * m * n * k / rate, memory_seconds(gpu, width * (m * k + k * n + m * n)))


def unpack_seconds(gpu: Device, model: ModelShape, lora: Lora) -> float:
    """Unpacking a block's matrices once: read as stored, written in 16 bits."""
    if lora.base == "bf16":
        return 0.0
    count = sum(rows * columns for rows, columns in matrix_shapes(model).values())
    return memory_seconds(gpu, count * (lora.base_bytes + CAST))
