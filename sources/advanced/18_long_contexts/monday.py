"""Runs the script of lesson 18's last cell, and asserts what that cell promises of it."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from utils.lessons.blocks import run_block
from utils.models import Transformer, TransformerConfig
from utils.ranks import run_ranks

from .ring import ring_attention

RANKS, CP, WORDS, LENGTH, LAYERS = 4, 2, 64, 32, 2
BF16 = 2**-7  # rounds at 2**-8, and more than once


def block_1(text: str) -> None:
    """Two sequences, each on two of four ranks: one process's loss and clipped gradients; states come back."""
    with tempfile.TemporaryDirectory() as folder:
        for found in run_ranks(_shared, RANKS, text, folder):
            assert found.loss_gap < BF16, "the shared sequences give another loss"
            assert found.gradient_gap < 5 * BF16, "their gradients are others"
            assert found.places == LENGTH // CP, "a rank holds more than its share of the tokens"
            assert found.passes == 2 * LAYERS, "a checkpoint does not call its block again"
            assert found.share == 1 / RANKS, "a rank keeps more than its share of the states"
            assert found.reloaded, "what was loaded is not what was saved"
            assert found.moments, "the optimizer's state was not saved"
            assert found.on_host == LAYERS, "a block's input does not go to the host"
            assert found.told == (found.rank == 0), "rank 0 alone tells the loss"


class Summed(Transformer):
    """Tokens, targets and positions to the sum of the tokens' losses."""

    def forward(self, tokens: Any, targets: Any, positions: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The sum of losses of (B, S) tokens."""
        logits = super().forward(tokens, positions).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")


def _shared(text: str, folder: str) -> Any:
    torch.manual_seed(0)
    shape = TransformerConfig(vocabulary=WORDS, hidden=32, layers=LAYERS, heads=4, kv_heads=2, feedforward=96)  # fmt: skip
    model: Any = Summed(shape)
    model.init_weights(std=0.1)
    rows = torch.randint(WORDS, (RANKS // CP, LENGTH + 1))
    alone = copy.deepcopy(model)
    wanted = alone(rows[:, :-1], rows[:, 1:]) / (len(rows) * LENGTH)
    wanted.backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    assert norm > 1, "these gradients are not clipped: the comparison would say nothing of it"
    mesh = init_device_mesh("cpu", (RANKS // CP, CP), mesh_dim_names=("dp", "cp"))
    group = mesh["cp"].get_group()
    held: list[int] = []

    def attend(q: Any, k: Any, v: Any) -> Any:
        held.append(q.shape[2])
        return ring_attention(q, k, v, group=group)  # CUDA's kernels alone share; its own stands in

    for block in model.blocks:
        block.attention.attend = attend
    gaps: list[float] = []
    given: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    on_host: list[int] = []

    def look(*_: Any) -> None:  # at the gradients, before the optimizer takes them
        for p, w in zip(model.parameters(), alone.parameters(), strict=True):
            gaps.append(((p.grad.full_tensor() - w.grad).norm() / w.grad.norm()).item())

    looking = register_optimizer_step_pre_hook(look)
    names = {"model": model, "rows": rows, "cp": CP, "folder": folder}
    with _without_cuda(on_host.append) as said:
        made = run_block(_on_cpu(text), **names)
    looking.remove()
    kept = {name: value.full_tensor() for name, value in made["states"]["model"].items()}
    now = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return SimpleNamespace(
        loss_gap=abs(made["total"].item() / wanted.item() - 1),
        gradient_gap=max(gaps),
        share=max(p.to_local().numel() / p.numel() for p in model.parameters()),
        places=max(held),
        passes=len(held),
        reloaded=all(torch.equal(kept[name], value) for name, value in now.items()),
        moments=all("exp_avg" in state for state in made["states"]["optimizer"]["state"].values()),
        on_host=sum(tensor.data_ptr() in on_host for tensor in given),
        rank=dist.get_rank(),
        told="loss" in said.getvalue(),
    )


def _on_cpu(text: str) -> str:
    """The script without its one word that names CUDA, and with tiles that a small MLP has several of."""
    on_gpu = 'torch.device("cuda", int(os.environ["LOCAL_RANK"]))'
    assert text.count(on_gpu) == 1, "the script names its GPU otherwise"
    assert text.count("split(8192, 1)") == 1, "the script tiles its MLP otherwise"
    return text.replace(on_gpu, 'torch.device("cpu")').replace("8192", str(LENGTH // CP // 2))


@contextlib.contextmanager
def _without_cuda(note: Callable[[int], None]) -> Iterator[io.StringIO]:
    """The script's calls for CUDA do nothing, what it saves on the host is noted, and so is what it prints."""

    class Noting(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory=pin_memory)
            pack = self.pack_hook

            def noted(tensor: torch.Tensor) -> Any:
                note(tensor.data_ptr())
                return pack(tensor)

            self.pack_hook = noted

    with contextlib.ExitStack() as stack:
        chosen = stack.enter_context(mock.patch.object(torch.cuda, "set_device"))
        started = stack.enter_context(mock.patch.object(dist, "init_process_group"))
        stack.enter_context(mock.patch.object(torch.autograd.graph, "save_on_cpu", Noting))
        yield stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    chosen.assert_called_once()
    started.assert_called_once_with("nccl")
