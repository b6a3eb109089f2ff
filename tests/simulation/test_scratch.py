"""What CUDA's kernels take and give back inside one operation, by the sizes in their sources."""

from __future__ import annotations

import pytest
import torch

from utils.simulation.scratch import cpu_scratch, cuda_scratch

BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


@pytest.mark.parametrize(
    ("rows", "width", "kv_heads", "taken"),
    [
        # fp32 for the query's gradient and one more a row: 2 x 8 heads x 128 rows x (64 + 1).
        (128, 64, 8, 4 * 2 * 8 * 128 * 65),
        # Rows are padded to 128, the width to 32.
        (100, 40, 8, 4 * 2 * 8 * 128 * 65),
        (129, 64, 8, 4 * 2 * 8 * 256 * 65),
        # Two shared heads: gradients of keys and values for all eight, in bf16.
        (128, 64, 2, 4 * 2 * 8 * 128 * 65 + 2 * (2 * 8 * 128 * 64 * 2)),
    ],
)
def test_flash_attention_s_backward(rows, width, kv_heads, taken) -> None:
    query = torch.empty(2, 8, rows, width, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, kv_heads, rows, width, dtype=torch.bfloat16, device="meta")
    found = cuda_scratch(BACKWARD, (query, query, key, key), None)
    assert found == taken, f"{rows} rows of width {width}, {kv_heads} key-value heads"


def test_other_operations_take_nothing() -> None:
    assert cuda_scratch(torch.ops.aten.mm.default, (), None) == 0, "matmuls have no scratch here"


def test_operands_of_several_types_are_copied_to_the_common_one_on_a_cpu() -> None:
    """aten/src/ATen/TensorIterator.cpp, compute_types."""
    aten, wide, low = torch.ops.aten, torch.empty(8, 4), torch.empty(8, 4, dtype=torch.bfloat16)
    taken = {
        "one operand": (aten.add.Tensor, (wide, low), wide, 4 * 32),
        "one that is broadcast": (aten.mul.Tensor, (wide, low[0]), wide, 4 * 4),
        "into the wider": (aten.add_.Tensor, (wide, low), wide, 4 * 32),
        "operand and result": (aten.mul_.Tensor, (low, wide), low, 2 * 4 * 32),
        "one type": (aten.div.Tensor, (wide, wide), wide, 0),
        "a number": (aten.add.Tensor, (low, 1.5), low, 0),
    }
    for name, (func, args, out, size) in taken.items():
        assert cpu_scratch(func, args, out) == size, name
        assert cuda_scratch(func, args, out) == 0, f"{name}: CUDA's kernels convert on their way"
