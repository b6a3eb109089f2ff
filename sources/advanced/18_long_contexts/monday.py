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
from torch.distributed.tensor.experimental._context_parallel import _attention as masks
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_mask
from torch.optim.optimizer import register_optimizer_step_pre_hook

from utils.lessons.blocks import run_block
from utils.models import Transformer, TransformerConfig
from utils.ranks import run_ranks

RANKS, CP, WORDS, LENGTH, LAYERS = 4, 2, 64, 256, 2  # 128 tokens a rank: one block of the mask
DOCUMENTS = ((100, 40, 117), (257,))  # of each row, whose last token is a target alone
BF16 = 2**-7  # rounds at 2**-8, and more than once


def block_1(text: str) -> None:
    """A packed row and a whole one, each on two of four ranks: one process's loss and clipped gradients; states come back."""
    with tempfile.TemporaryDirectory() as folder:
        for found in run_ranks(_shared, RANKS, text, folder):
            assert found.loss_gap < BF16, "the shared sequences give another loss"
            assert found.gradient_gap < 5 * BF16, "their gradients are others"
            assert found.leak > 50 * BF16, "documents that leak would not be noticed"
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
    model.init_weights(std=0.2)
    tokens = torch.randint(WORDS, (RANKS // CP, LENGTH + 1))
    rows = [(row, torch.tensor(of)) for row, of in zip(tokens, DOCUMENTS, strict=True)]
    leaky, alone = copy.deepcopy(model), copy.deepcopy(model)
    _learn(leaky, [(row, torch.tensor((LENGTH + 1,))) for row in tokens])
    wanted = _learn(alone, rows)
    leak = max(
        _apart(a.grad, b.grad) for a, b in zip(leaky.parameters(), alone.parameters(), strict=True)
    )
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    assert norm > 1, "these gradients are not clipped: the comparison would say nothing of it"
    held: list[int] = []

    def dense(q: Any, k: Any, v: Any, *, block_mask: Any, enable_gqa: bool) -> Any:
        held.append(
            q.shape[2]
        )  # CUDA's kernel alone learns; this stands in, on the mask that it is given
        seen = create_mask(block_mask.mask_mod, 1, 1, q.shape[2], k.shape[2], device="cpu")
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=enable_gqa)

    gaps: list[float] = []
    given: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    on_host: list[int] = []

    def look(*_: Any) -> None:  # at the gradients, before the optimizer takes them
        for p, w in zip(model.parameters(), alone.parameters(), strict=True):
            gaps.append(_apart(p.grad.full_tensor(), w.grad))

    looking = register_optimizer_step_pre_hook(look)
    names = {"model": model, "rows": rows, "cp": CP, "folder": folder}
    with _without_cuda(on_host.append, dense) as said:
        made = run_block(_on_cpu(text), **names)
    looking.remove()
    kept = {name: value.full_tensor() for name, value in made["states"]["model"].items()}
    now = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return SimpleNamespace(
        loss_gap=abs(made["total"].item() / wanted.item() - 1),
        gradient_gap=max(gaps),
        leak=leak,
        share=max(p.to_local().numel() / p.numel() for p in model.parameters()),
        places=max(held),
        passes=len(held),
        reloaded=all(torch.equal(kept[name], value) for name, value in now.items()),
        moments=all("exp_avg" in state for state in made["states"]["optimizer"]["state"].values()),
        on_host=sum(tensor.data_ptr() in on_host for tensor in given),
        rank=dist.get_rank(),
        told="loss" in said.getvalue(),
    )


def _learn(model: Any, rows: Any) -> torch.Tensor:
    """One process: each document by itself; the loss, whose gradients are then there."""
    documents = [part for row, lengths in rows for part in row.split(lengths.tolist())]
    kept = sum(len(part) - 1 for part in documents)
    sums = [model(part[None, :-1], part[None, 1:]) for part in documents]
    loss = torch.stack(sums).sum() / kept
    loss.backward()
    return loss.detach()


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def _on_cpu(text: str) -> str:
    """The script without its one word that names CUDA, and with tiles that a small MLP has several of."""
    on_gpu = 'torch.device("cuda", int(os.environ["LOCAL_RANK"]))'
    assert text.count(on_gpu) == 1, "the script names its GPU otherwise"
    assert text.count("split(8192, 1)") == 1, "the script tiles its MLP otherwise"
    return text.replace(on_gpu, 'torch.device("cpu")').replace("8192", str(LENGTH // CP // 2))


@contextlib.contextmanager
def _without_cuda(note: Callable[[int], None], dense: Callable[..., Any]) -> Iterator[io.StringIO]:
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
        stack.enter_context(mock.patch.object(flex, "flex_attention", dense))
        stack.enter_context(mock.patch.object(torch, "compile", lambda made: made))
        stack.enter_context(
            mock.patch.object(masks, "_compiled_create_block_mask", flex.create_block_mask)
        )
        yield stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    chosen.assert_called_once()
    started.assert_called_once_with("nccl")
