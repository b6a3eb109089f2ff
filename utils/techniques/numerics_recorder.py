"""A recorder of a mixed-precision run: what it says before it breaks, and where it breaks first.

A tool for finding faults, not for every run: it looks at each output and each gradient of each
module, and on a GPU it waits for the device every time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

MOST_ROWS = 8
OUTLIER = 1000.0  # times the largest element of the batch's median row


@dataclass(frozen=True)
class NonFinite:
    """The first infinity or NaN of a step, or the finite outlier that it came from.

    Attributes:
        kind: "input": it came into the module, or what came into the model had rows a thousand
            times larger than the others; "output": the module made it of finite inputs;
            "loss": all modules were finite, the loss is not; "incoming gradient": it came back
            from what follows the module; "gradient": the module's backward made it.
        module: The module's name; "" for the whole model and for the loss.
        rows: The first places of the batch (dim 0) that have it; empty for a parameter's gradient.
        largest: Of a finite outlier, its size; None for an infinity or NaN.
    """

    kind: str
    module: str
    rows: tuple[int, ...] = ()
    largest: float | None = None

    def __str__(self) -> str:
        where = f" of {self.module or 'the model'}" if self.kind != "loss" else ""
        size = "" if self.largest is None else f": finite, but {self.largest:.2g}"
        named = [str(row) for row in self.rows]
        if len(named) == MOST_ROWS:  # there may be more of them than were kept
            named = [*named[:3], "..."]
        return f"{self.kind}{where}" + (f", rows [{', '.join(named)}]" if named else "") + size


@dataclass(frozen=True)
class Shares:
    """What the low precision makes of a layer's scaled gradients: shares of 0 to 1.

    `zero` holds exact zeros too: those of dropped or unused weights are no underflow.
    """

    zero: float
    subnormal: float
    overflowed: float


@dataclass(frozen=True)
class StepRecord:
    """One step of a run.

    Attributes:
        step: From 0.
        loss: As given, without its scale.
        scale: That multiplied this step's loss; None without a scaler.
        skipped: The scaler left the parameters as they were.
        grad_norm: Of all gradients as backward left them, without the scale; NaN or infinite where
            a gradient is.
        step_norm: Of the gradients that the optimizer stepped with; None if it was not called.
        layers: Shares by name of the module that owns the parameters, in the model's order.
        first: The first infinity or NaN, or the outlier it came from; None if all is finite.
    """

    step: int
    loss: float
    scale: float | None
    skipped: bool
    grad_norm: float
    step_norm: float | None
    layers: dict[str, Shares] = field(default_factory=dict)
    first: NonFinite | None = None


class NumericsRecorder:
    """Records a training run through PyTorch's public hooks; the run computes what it did.

    Call `record(loss)` as the last line of each step, after `scaler.update()`. Use it in a `with`
    statement or call `close()`, which takes the hooks off. With several backward calls per step
    the shares and norms are those of the accumulated gradients.

    A fused optimizer divides by the scale inside its kernel: call `scaler.unscale_` before it, or
    `step_norm` is that of the scaled gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        *,
        low: torch.dtype = torch.float16,
    ) -> None:
        """Attach to a run.

        Args:
            model: its parameters' gradients are recorded as backward leaves them, so scaled.
            optimizer: of these parameters.
            scaler: the run's scaler; a disabled one counts as none.
            low: the precision whose zeros, subnormals and overflows are counted.

        Raises:
            ValueError: nothing in the model is trained, or `low` is no 16-bit floating type.
        """
        if low not in (torch.float16, torch.bfloat16):
            raise ValueError(f"low is {low}; take torch.float16 or torch.bfloat16.")
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("No parameter of this model requires a gradient: nothing to record.")
        self.records: list[StepRecord] = []
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._low = low
        self._scale = self._scale_now()
        self._forget()
        self._owners: dict[Tensor, str] = {}
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_optimizer_step)
        ]
        self._watch_parameters(model)
        self._watch_modules(model)

    def __enter__(self) -> NumericsRecorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off. The records stay."""
        for handle in self._handles:
            handle.remove()

    def record(self, loss: Tensor) -> StepRecord:
        """End a step; `loss` is the unscaled one. Call it after `scaler.update()`.

        Raises:
            ValueError: no backward ran since the last call.
        """
        if not self._squares:
            raise ValueError("No gradient arrived in this step: call record after loss.backward().")
        value, after = float(loss.detach()), self._scale_now()
        if not math.isfinite(value) and (self._first is None or "gradient" in self._first.kind):
            self._first = self._outlier or NonFinite("loss", "")
        skipped = after is not None and self._scale is not None and after < self._scale
        done = StepRecord(
            step=len(self.records),
            loss=value,
            scale=self._scale,
            skipped=skipped,
            grad_norm=math.sqrt(sum(self._squares.values())) / (self._scale or 1.0),
            step_norm=None if skipped else self._step_norm,
            layers=self._shares_by_layer(),
            first=self._first,
        )
        self.records.append(done)
        self._forget()
        self._scale = after
        return done

    def _forget(self) -> None:
        self._first: NonFinite | None = None
        self._outlier: NonFinite | None = None
        self._step_norm: float | None = None
        self._squares: dict[Tensor, float] = {}
        self._counts: dict[Tensor, list[int]] = {}

    def _scale_now(self) -> float | None:
        return self._scaler.get_scale() if self._scaler else None

    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self._step_norm = math.sqrt(sum(_square(g) for g in gradients if g is not None))

    # Gradients of parameters

    def _watch_parameters(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:

                    def arrived(p: Tensor, name: str = name) -> None:
                        self._gradient_arrived(p, name)

                    self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))
                    self._owners.setdefault(parameter, name)

    def _gradient_arrived(self, parameter: Tensor, module: str) -> None:
        assert parameter.grad is not None  # the hook runs after it was accumulated
        gradient = parameter.grad.detach()
        self._squares[parameter] = _square(gradient)
        small = gradient.to(self._low)
        zero, normal = small == 0, small.abs() >= torch.finfo(self._low).tiny
        finite = small.isfinite()
        counts = [zero.sum(), (~zero & ~normal & finite).sum(), (~finite).sum()]
        self._counts[parameter] = torch.stack(counts).tolist()
        if not math.isfinite(self._squares[parameter]):
            self._note("gradient", module)

    def _shares_by_layer(self) -> dict[str, Shares]:
        shares = {}
        for layer in dict.fromkeys(self._owners.values()):
            arrived = [p for p in self._counts if self._owners[p] == layer]
            if arrived:
                total = sum(p.numel() for p in arrived)
                counts = zip(*(self._counts[p] for p in arrived), strict=True)
                shares[layer] = Shares(*(sum(count) / total for count in counts))
        return shares

    # Inputs and outputs of modules, and the gradients that pass through them

    def _watch_modules(self, model: nn.Module) -> None:
        for name, module in model.named_modules():

            def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> Any:
                kwargs = {key: self._entering(value, name) for key, value in kwargs.items()}
                return tuple(self._entering(value, name) for value in args), kwargs

            def after(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                for tensor in _tensors(output):
                    self._leaving(tensor, name)

            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ]

    def _entering(self, value: Any, module: str) -> Any:
        if not _is_training(value):
            return value
        self._look("input", module, value)
        if module == "":
            self._outlier = self._outlier or _outlier(value)
        if not value.requires_grad:
            return value
        # A copy of its own: its gradient is what this module alone sends back.
        own = value.clone()
        own.register_hook(lambda gradient: self._look("gradient", module, gradient))
        return own

    def _leaving(self, tensor: Tensor, module: str) -> None:
        if _is_training(tensor):
            self._look("output", module, tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda g: self._look("incoming gradient", module, g))

    def _look(self, kind: str, module: str, tensor: Tensor) -> None:
        if self._first is None and not bool(tensor.isfinite().all()):
            self._note(kind, module, _rows(tensor))

    def _note(self, kind: str, module: str, rows: tuple[int, ...] = ()) -> None:
        self._first = self._first or self._outlier or NonFinite(kind, module, rows)


def _square(tensor: Tensor) -> float:
    """The sum of the squares, in fp64: the squares of large gradients overflow fp32."""
    return float(tensor.detach().double().square().sum())


def _is_training(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and torch.is_grad_enabled()


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of a module's output: alone, in a tuple or list, or in a dictionary."""
    values = output.values() if isinstance(output, dict) else output
    values = values if isinstance(output, (tuple, list, dict)) else [output]
    return [value for value in values if isinstance(value, Tensor)]


def _outlier(inputs: Tensor) -> NonFinite | None:
    """Rows of a batch that are finite and far larger than the others."""
    if inputs.dim() < 2 or not inputs.numel() or not bool(inputs.isfinite().all()):
        return None
    sizes = inputs.detach().abs().flatten(1).amax(1).double()
    typical = sizes.median()
    large = (sizes > OUTLIER * typical) & (typical > 0)
    rows = tuple(large.nonzero().flatten()[:MOST_ROWS].tolist())
    return NonFinite("input", "", rows, float(sizes.max())) if rows else None


def _rows(tensor: Tensor) -> tuple[int, ...]:
    if tensor.dim() < 2:
        return ()
    bad = (~tensor.isfinite()).flatten(1).any(1)
    return tuple(bad.nonzero().flatten()[:MOST_ROWS].tolist())
