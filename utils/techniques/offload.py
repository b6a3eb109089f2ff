"""Optimizer offload: states and step in host memory, one copy each way per step.

Ren and others 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv:2101.06840.
Per parameter of b bytes the device keeps parameter and gradient; the host holds a copy of both
and the states, and the link carries b bytes of gradient down and b bytes of parameter up. The
paper also hides both copies behind backward and step; this form does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from utils.memory.host import host_memory


class OffloadedOptimizer(torch.optim.Optimizer):
    """Runs another optimizer on copies of its parameters in host memory.

    `OffloadedOptimizer(torch.optim.AdamW(model.parameters()))`. The update is the inner
    optimizer's own, on the host, so on a CPU it is the plain one to the bit. Learning rates and
    other options stand in `param_groups` as ever; saved states are the inner optimizer's.

    Raises:
        ValueError: the optimizer has already made a step, whose states are on the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state:
            raise ValueError(
                "This optimizer has already stepped, so its states are on the device. "
                "Offload it before the first step."
            )
        groups = [dict(group) for group in optimizer.param_groups]
        super().__init__(groups, optimizer.defaults)
        self.inner = optimizer
        for group in optimizer.param_groups:
            group["params"] = [_host_copy(parameter) for parameter in group["params"]]
        self.state = optimizer.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Gradients to the host, the inner step there, parameters back to the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, host in zip(self.param_groups, self.inner.param_groups, strict=True):
            # Which kernels suit is the host's matter, all else the caller's.
            host.update({k: group[k] for k in group if k not in ("params", "foreach", "fused")})
            for parameter, copy in zip(group["params"], host["params"], strict=True):
                _send_gradient(parameter, copy)
        with host_memory():
            self.inner.step()
        self._send_parameters()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the inner optimizer, in host memory, and take over its options."""
        with host_memory():
            self.inner.load_state_dict(state_dict)
        self.state = self.inner.state
        for group, host in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({k: host[k] for k in host if k != "params"})

    @torch.no_grad()
    def _send_parameters(self) -> None:
        for group, host in zip(self.param_groups, self.inner.param_groups, strict=True):
            for parameter, copy in zip(group["params"], host["params"], strict=True):
                if copy.grad is not None:
                    parameter.copy_(copy)


@torch.no_grad()
def _host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory; pinned beside a GPU, so that the link runs at its full speed."""
    with host_memory():
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        copy.copy_(tensor)
        return copy.requires_grad_(tensor.requires_grad)


@torch.no_grad()
def _send_gradient(parameter: Tensor, copy: Tensor) -> None:
    if parameter.grad is None:
        copy.grad = None
    elif copy.grad is None:
        copy.grad = _host_copy(parameter.grad)
    else:
        copy.grad.copy_(parameter.grad)
