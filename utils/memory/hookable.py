"""Which modules of a model the meter may hang its hooks on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from utils.shims.torch_ import is_compiled, is_compiled_in_place


def hookable(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules that can carry hooks without changing what a compiler makes of them.

    Raises:
        ValueError: the model itself was compiled in place, or is a scripted one.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "A TorchScript model takes no hooks, so its phases cannot be told apart. "
            "Measure the Python module that it was made from."
        )
    if is_compiled_in_place(model):
        raise ValueError(
            "model.compile() would pull the meter's hooks into the compiled code. "
            "Measure `compiled = torch.compile(model)` instead, and call `compiled` in the step."
        )
    seen: set[nn.Module] = set()
    pending = [(model, "")]
    while pending:
        module, path = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module, path
        if is_compiled(module):
            continue  # inside is compiled code
        for name, child in module.named_children():
            scripted = isinstance(child, torch.jit.ScriptModule)  # refuses hooks
            if not scripted and not is_compiled_in_place(child):
                pending.append((child, f"{path}.{name}" if path else name))
