"""Optimizer offload: states and step in host memory, one copy each way per step.

Ren and others 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv:2101.06840.
Per parameter of b bytes the host holds a copy of parameter and gradient and the states; the link
carries b bytes of gradient down and b bytes of parameter up. The device keeps parameter and
gradient, or the parameter alone where gradients leave during backward, as in the paper. The paper
also hides both copies behind backward and step; this form does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from utils.memory.host import host_memory


class OffloadedOptimizer(torch.optim.Optimizer):
    """Runs another optimizer on copies of its parameters in host memory.

    `OffloadedOptimizer(torch.optim.AdamW(model.parameters()))`. The update is the inner
    optimizer's own, on the host, so on a CPU it is the plain one to the bit. Learning rates and
    other options stand in `param_groups` as ever; saved states are the inner optimizer's.

    Args:
        optimizer: the inner one, before its first step.
        gradients_leave: in backward each gradient is added to the host's as soon as it is made, and
            is gone from the device: of all gradients only one is there at a time. Then nothing on
            the device can clip them. Else they stay until the step.
        master_dtype: of the host's copies; float32 beside a model in 16 bits, as the updates are
            too small for those. None keeps the model's.

    Raises:
        ValueError: the optimizer has already made a step, whose states are on the device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        gradients_leave: bool = False,
        master_dtype: torch.dtype | None = None,
    ) -> None:
        if optimizer.state:
            raise ValueError(
                "This optimizer has already stepped, so its states are on the device. "
                "Offload it before the first step."
            )
        groups = [dict(group) for group in optimizer.param_groups]
        super().__init__(groups, optimizer.defaults)
        self.inner = optimizer
        for group in optimizer.param_groups:
            group["params"] = [_host_copy(one, master_dtype) for one in group["params"]]
        self.state = optimizer.state
        self._gradients_leave = gradients_leave
        if gradients_leave:
            for parameter, copy in self._pairs():
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, copy))

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its copy on the host."""
        for group, host in zip(self.param_groups, self.inner.param_groups, strict=True):
            yield from zip(group["params"], host["params"], strict=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, the host's as well where they have left."""
        super().zero_grad(set_to_none)
        if self._gradients_leave:
            self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Gradients to the host, the inner step there, parameters back to the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, host in zip(self.param_groups, self.inner.param_groups, strict=True):
            # Which kernels suit is the host's matter, all else the caller's.
            host.update({k: group[k] for k in group if k not in ("params", "foreach", "fused")})
        for parameter, copy in () if self._gradients_leave else self._pairs():
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
        for parameter, copy in self._pairs():
            if copy.grad is not None:
                parameter.copy_(copy)


@torch.no_grad()
def _host_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy in host memory; pinned beside a GPU, so that the link runs at its full speed."""
    with host_memory():
        copy = torch.empty_like(tensor, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
        copy.copy_(tensor)
        return copy.requires_grad_(tensor.requires_grad)


@torch.no_grad()
def _send_gradient(parameter: Tensor, copy: Tensor) -> None:
    if parameter.grad is None:
        copy.grad = None
    elif copy.grad is None:
        copy.grad = _host_copy(parameter.grad, copy.dtype)
    else:
        copy.grad.copy_(parameter.grad)


@torch.no_grad()
def _move_gradient(copy: Tensor, parameter: Tensor) -> None:
    """Add a gradient to the host's, and drop it here."""
    if parameter.grad is None:
        return
    arrived = _host_copy(parameter.grad, copy.dtype)
    with host_memory():
        copy.grad = arrived if copy.grad is None else copy.grad.add_(arrived)
    parameter.grad = None
