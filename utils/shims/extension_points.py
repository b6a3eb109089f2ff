"""What other files may import from PyTorch's private modules: to subclass it, or to walk trees.

Nothing public stands in for these, and PyTorch's own guides on dispatch modes name them.
"""

from __future__ import annotations

from utils.shims.shim import Library, Shim

TORCH = Library("torch", "2.15.0", "utils/shims/extension_points.py")
_FAKE, _TREE = "torch._subclasses.fake_tensor:", "torch.utils._pytree:"


def _point(target: str, why: str) -> Shim:
    return Shim(TORCH, target, "EXTENSION_POINTS", why)


EXTENSION_POINTS = (
    _point(
        "torch.utils._python_dispatch:TorchDispatchMode", "the watchers of operators subclass it"
    ),
    _point(_FAKE + "FakeTensorMode", "a simulation is one"),
    _point(_FAKE + "FakeTensor", "simulated tensors are of this class"),
    _point(_FAKE + "DataDependentOutputException", "a step that asks for values raises it"),
    _point(_FAKE + "DynamicOutputShapeException", "a step that asks for values raises it"),
    _point(_FAKE + "UnsupportedFakeTensorException", "a step that cannot be simulated raises it"),
    _point(_FAKE + "UnsupportedOperatorException", "a step that cannot be simulated raises it"),
    _point(_TREE + "tree_flatten", "which arguments a kernel was asked with"),
    _point(_TREE + "tree_leaves", "arguments and results are nested"),
    _point(_TREE + "tree_map_only", "arguments and results are nested"),
)
