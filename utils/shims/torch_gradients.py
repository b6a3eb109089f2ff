"""PyTorch: which gradient is being worked out, and who else holds a tensor meanwhile."""

from __future__ import annotations

from typing import Any

import torch

from utils.shims.shim import Library, Shim
from utils.shims.torch_ import storage_key

TORCH = Library("torch", "2.15.0", "utils/shims/torch_gradients.py")

_NODE = Shim(
    TORCH,
    "torch._C:_current_autograd_node",
    "gradient_node",
    "nothing public says which function of autograd's is running",
)
_USES = Shim(
    TORCH,
    "torch:Tensor._use_count",
    "uses",
    "autograd's engine adds in place to what nobody else holds, and counts by it",
)
_STORAGE_USES = Shim(TORCH, "torch._C:_storage_Use_Count", "uses", "as for the tensor")
SHIMS = (_NODE, _USES, _STORAGE_USES)


def gradient_node() -> str:
    """The name of the function of autograd's that is running, such as "MulBackward0"; else ""."""
    node: Any = _NODE.get()()
    return "" if node is None else str(node.name())


def uses(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold a tensor in C++, and how many its storage."""
    storage = storage_key(tensor.untyped_storage())
    return int(_USES.get()(tensor)), int(_STORAGE_USES.get()(storage))
