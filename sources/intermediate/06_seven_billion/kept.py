"""What one block of a Llama keeps for backward, by what it keeps it for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from utils.checked import check_public
from utils.rules import some
from utils.simulation import simulate
from utils.units import Evidence
from utils.views.style import course_style, empty_figure, print_evidence

from .packing import pack

if TYPE_CHECKING:
    from transformers import LlamaConfig

PARTS = {  # what a tensor is kept for, and how it is filled
    "norms": ("#94a4a2", ""),
    "attention": ("#3f90da", ""),
    "activation function and product": ("#ffa90e", "//"),
    "inputs of trained linear layers": ("#bd1f01", "\\\\"),
    "inputs of adapters": ("#832db6", ""),
    "input of the block": ("black", ""),
}
LENGTH = 1024
NARROWEST = 12  # KB a token that a number inside of a bar needs


def kept_by_block(
    config: LlamaConfig,
    targets: Sequence[str] | str = (),
    *,
    packed: bool = False,
    checkpointed: bool = False,
    autocast: bool = True,
) -> dict[str, float]:
    """Bytes per token that the second of two blocks keeps for backward, simulated.

    Args:
        config: the Llama, of two layers.
        targets: which matrices get adapters, as `LoraConfig` takes them; none: all weights train.
        packed: the frozen matrices are in four bits.
        checkpointed: the block is computed again in backward.
        autocast: to bf16, as `Trainer(bf16=True)` has it.
    """
    kept: dict[str, float] = {}

    def step(model: Any, _: object) -> None:
        kept.update(dict.fromkeys(PARTS, 0.0))  # a simulation takes the step more than once
        block = [part for part in model.modules() if type(part).__name__ == "LlamaDecoderLayer"][-1]
        cast = torch.autocast("cuda", torch.bfloat16, enabled=autocast)
        with _Ledger(model, block, kept), cast:
            model(input_ids=torch.zeros(1, LENGTH, dtype=torch.long, device="cuda"))

    simulate(lambda: (_built(config, targets, packed, checkpointed), None), step, device="RTX 4090")
    return kept


def draw_kept(arms: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """A bar for each way to train, KB per token, by what it is kept for.

    Raises:
        ValueError: there is no way, or one lacks a part of `PARTS`.
    """
    some("draw_kept", arms=arms)
    for name, kept in arms.items():
        if lacking := [part for part in PARTS if part not in kept]:
            raise ValueError(
                f"draw_kept: {name} has no {', '.join(lacking)}; take kept_by_block()'s."
            )
    with course_style():
        figure, axes = empty_figure(height=1.9 + 0.62 * len(arms))
        left = dict.fromkeys(arms, 0.0)
        for part, (color, hatch) in PARTS.items():
            for row, (name, kept) in enumerate(arms.items()):
                width = kept[part] / 1000
                axes.barh(
                    row,
                    width,
                    left=left[name],
                    height=0.62,
                    color=color,
                    hatch=hatch,
                    edgecolor="white",
                    label=part if row == 0 else None,
                )
                if width >= NARROWEST:
                    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0}
                    middle = left[name] + width / 2
                    axes.text(middle, row, f"{width:.0f}", ha="center", va="center", bbox=box)
                left[name] += width
        for row, total in enumerate(left.values()):
            axes.text(total, row, f"  {total:.0f} KB", va="center")
        axes.set_yticks(range(len(arms)), list(arms))
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(left.values()))
        axes.grid(False, axis="y")
        axes.set_xlabel("kept until backward, KB per token")
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=3, fontsize=10)
        print_evidence(figure, [Evidence.SIMULATED])
    return figure


def _built(
    config: LlamaConfig, targets: Sequence[str] | str, packed: bool, checkpointed: bool
) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if targets else torch.float32
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if packed:
        pack(model)
    model = model.to("cuda")
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if targets:
        model = get_peft_model(
            model,
            LoraConfig(r=16, target_modules=targets if isinstance(targets, str) else [*targets]),
        )
    return model.train()


class _Ledger:
    """Inside, each tensor of the block that autograd saves is counted once, for the layer that ran."""

    def __init__(self, model: nn.Module, block: nn.Module, kept: dict[str, float]) -> None:
        self.kept = kept
        self.running: list[str] = []  # parts of the layers that are running, the innermost last
        self.seen: dict[int, torch.UntypedStorage] = {}
        for weight in [*model.parameters(), *model.buffers()]:
            self._is_new(weight)
        self.handles = []
        for path, layer in block.named_modules():
            part = _part(path, layer)
            self.handles += [
                layer.register_forward_pre_hook(lambda *_, part=part: self.running.append(part)),
                layer.register_forward_hook(lambda *_: self._leave()),
            ]
        self.saving = torch.autograd.graph.saved_tensors_hooks(self._count, lambda saved: saved)

    def _leave(self) -> None:
        self.running.pop()

    def _is_new(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        known = storage._cdata in self.seen
        self.seen[storage._cdata] = storage  # alive, so that no other gets its address
        return not known

    def _count(self, tensor: Tensor) -> Tensor:
        # What has no token's place in its shape is a copy of a weight, whatever the text.
        if self.running and LENGTH in tensor.shape and self._is_new(tensor):
            self.kept[self.running[-1]] += tensor.untyped_storage().nbytes() / LENGTH
        return tensor

    def __enter__(self) -> None:
        self.saving.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.saving.__exit__(*error)
        for handle in self.handles:
            handle.remove()


def _part(path: str, layer: nn.Module) -> str:
    if "lora_" in path:
        return "inputs of adapters"
    if not path:
        return "input of the block"
    if "norm" in path:
        return "norms"
    if path.endswith(("_proj", "base_layer")):
        adapted = hasattr(layer, "base_layer")
        return "inputs of adapters" if adapted else "inputs of trained linear layers"
    return "attention" if path.startswith("self_attn") else "activation function and product"


__all__ = ["PARTS", "draw_kept", "kept_by_block"]

check_public(globals())
