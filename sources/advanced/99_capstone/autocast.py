"""What `torch.autocast` keeps until backward, beyond a policy that casts a block and its input."""

from __future__ import annotations

from utils.catalog import ModelShape

# Of a block of Hugging Face's OPT, a token and hidden unit: its two norms keep fp32 inputs (2 x 2
# bytes more), and q, k and v a cast each where they shared one input (2 x 2).
BYTES_A_BLOCK = 8


def autocast_adds(model: ModelShape, tokens: int) -> tuple[float, float]:
    """Bytes that autocast keeps more: bf16 copies of the weights, and activations of `tokens`."""
    return 2 * model.parameter_count, BYTES_A_BLOCK * model.hidden * model.layers * tokens
