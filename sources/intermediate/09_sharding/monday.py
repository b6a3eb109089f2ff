"""The last cell's blocks: ranks that shard as their reader's would, beside one process."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from utils.lessons.blocks import run_block, small_llama
from utils.models import Transformer, TransformerConfig
from utils.ranks import run_ranks
from utils.techniques.deepspeed import load_deepspeed
from utils.traffic.counter import traffic

SMALL = TransformerConfig(vocabulary=64, hidden=32, layers=2, heads=2, feedforward=64)
RANKS, ROWS, STEPS = 2, 16, 4
NODES, GPUS, MICRO_BATCHES = 2, 2, 2
RATE = 1e-3  # ten times the block's: a step that is lost shows in the next loss
SECONDS = 200.0
BF16 = '"out", bf16=True'
OVERLAP = '"overlap_comm": True'


def block_1(text: str) -> None:
    """HSDP: ranks of a node share states; four ranks save, two go on with twice the micro-batches, all as one process."""
    half = STEPS // 2
    with tempfile.TemporaryDirectory() as folder:
        first = run_ranks(_sharded, NODES * GPUS, text, folder, NODES)
        assert (Path(folder) / "out/last/.metadata").is_file(), "nothing was saved in out/last"
        second = run_ranks(_sharded, GPUS, text, folder, 1)
    whole = 3 * sum(p.numel() for p in Transformer(SMALL).parameters())
    losses, norms = _alone()
    for found, steps in ((first, slice(half)), (second, slice(half, STEPS))):
        for rank, run in enumerate(found):
            assert run.held <= 0.51 * whole, f"rank {rank} holds {run.held:,} of {whole:,} numbers"
            assert run.steps == steps.stop, f"{run.steps} steps"
            torch.testing.assert_close(run.norms, norms[steps], rtol=2e-2, atol=0)
        mean = torch.tensor([run.losses for run in found]).unflatten(1, (half, -1))
        torch.testing.assert_close(
            mean.mean((0, 2)), torch.tensor(losses[steps]), rtol=2e-3, atol=0
        )


def block_2(text: str) -> None:
    """HSDP by Trainer: ranks of a node share the parameters, gradients are reduced in fp32, once a step between nodes."""
    found = run_ranks(_hsdp_by_trainer, NODES * GPUS, text, timeout_seconds=SECONDS)
    for run in found:
        assert run.share <= 0.51, f"a rank holds {run.share:.2f} of the parameters"
        assert run.parameters == "float32", f"parameters are in {run.parameters}"
        assert run.reduced == {"float32"}, f"gradients are reduced in {run.reduced}"
        assert run.all_reduces % run.steps == 0, f"{run.all_reduces} calls in {run.steps} steps"
        assert run.saved or run is not found[0], "rank 0 saved no model"
        torch.testing.assert_close(run.norm, found[0].norm)


def block_3(text: str) -> None:
    """Trainer by DeepSpeed: the optimizer's moments are divided, the weights are the same."""
    found = run_ranks(_by_trainer, RANKS, text, timeout_seconds=SECONDS)
    engine, count, moments, weights = found[0]
    assert engine == "DeepSpeedEngine", f"{engine} trained, and not DeepSpeed"
    assert moments <= 0.55 * 2 * count, f"a rank holds {moments:,} numbers of {2 * count:,} moments"
    assert torch.equal(weights, found[1][3]), "the ranks hold different weights"


def _tokens() -> Tensor:
    return torch.arange(ROWS * 17).reshape(ROWS, 17) % 61


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class _Run(NamedTuple):
    """Of a rank: losses of micro-batches, gradient norms of steps, numbers held, steps done."""

    losses: list[float]
    norms: list[float]
    held: int
    steps: int


def _model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(SMALL)


def _alone() -> tuple[list[float], list[float]]:
    """Losses and gradient norms of one process."""
    model, tokens, losses, norms = _model(), _tokens(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        loss = _loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def _sharded(text: str, folder: str, nodes: int) -> _Run:
    model, losses, norms = _model(), [], []
    place = next(model.parameters()).device
    for told, there in (('"cuda"', f'"{place.type}"'), ("lr=1e-4", f"lr={RATE}")):
        assert text.count(told) == 1, f"the block has no {told} to be told beside"
        text = text.replace(told, there)
    g = MICRO_BATCHES * NODES // nodes  # fewer ranks, more micro-batches of a step
    parts = _tokens().chunk(dist.get_world_size())[dist.get_rank()].to(place).chunk(g)
    batches = [(part[:, :-1], part[:, 1:]) for part in parts] * (STEPS // 2)

    def note_loss(_: Any, given: tuple[Tensor], logits: Tensor) -> None:
        part = next(part for part in parts if torch.equal(part[:, :-1], given[0]))
        losses.append(_loss(logits, part).item())

    def note_norm(*given: Any) -> None:
        norms.append(clip(*given).full_tensor().item())

    model.register_forward_hook(note_loss)
    clip: Any = torch.nn.utils.clip_grad_norm_  # gives a DTensor here
    with contextlib.chdir(folder), mock.patch.object(torch.nn.utils, "clip_grad_norm_", note_norm):
        names = run_block(text, model=model, batches=batches, nodes=nodes, gpus=GPUS, g=g)
    moments = [v for state in names["optimizer"].state.values() for v in state.values()]
    tensors = [*names["model"].parameters(), *moments]
    held = sum(t.to_local().numel() for t in tensors if isinstance(t, DTensor))
    return _Run(losses, norms, held, names["steps"])


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": _tokens()[index], "labels": _tokens()[index]}


class _Hybrid(NamedTuple):
    """Of a rank: its share of the parameters and their type, reductions, steps, and what came of it."""

    share: float
    parameters: str
    reduced: set[str]
    all_reduces: int
    steps: int
    saved: bool
    norm: Tensor


def _hsdp_by_trainer(text: str) -> _Hybrid:
    with contextlib.ExitStack() as room:
        if not torch.cuda.is_available():  # accelerate's FSDP asks for GPUs, gloo has none
            room.enter_context(_fsdp_on_cpu())
            text = _on_cpu(text)
        model = small_llama()
        count = sum(p.numel() for p in model.parameters())
        room.enter_context(contextlib.chdir(room.enter_context(tempfile.TemporaryDirectory())))
        with traffic() as sent:
            names = run_block(text, model=model, dataset=_Rows(), nodes=NODES, gpus=GPUS)
        trainer, mine = names["trainer"], list(names["trainer"].model_wrapped.parameters())
        sums = [row for row in sent.rows if row.collective in ("reduce-scatter", "all-reduce")]
        large = [row for row in sums if row.payload_bytes > 64 * row.calls]
        between = [row for row in large if row.axis.endswith("replicate")]
        norm = torch.stack([p.full_tensor().float().norm() for p in mine]).norm()
        return _Hybrid(
            sum(p.to_local().numel() for p in mine) / count,
            str(mine[0].dtype).removeprefix("torch."),
            {row.dtype for row in large},
            sum(row.calls for row in between),
            trainer.state.global_step,
            Path("out/last/model.safetensors").is_file(),
            norm.detach(),
        )


def _on_cpu(text: str) -> str:
    assert text.count(BF16) == 1, f"the block has no {BF16!r} to be told beside"
    return text.replace(BF16, f"{BF16}, use_cpu=True")


@contextlib.contextmanager
def _fsdp_on_cpu() -> Iterator[None]:
    """accelerate takes ranks on a CPU for ranks with GPUs, whose FSDP2 it allows."""
    import accelerate.state as state
    from accelerate.utils import DistributedType

    def set_device(process: Any) -> None:
        process.device = torch.device("cpu")

    kinds = {
        "_prepare_backend": lambda *_, **__: ("gloo", DistributedType.MULTI_GPU),
        "set_device": set_device,
    }
    with mock.patch.multiple(state.PartialState, **kinds):
        yield


def _by_trainer(text: str) -> tuple[str, int, int, Tensor]:
    """The engine's name, its parameters, the moments' numbers on this rank, and the weights."""
    load_deepspeed()
    dist.destroy_process_group()  # the reader's script begins without one
    if not torch.cuda.is_available():  # transformers takes bfloat16 on a CPU only when told
        text = _on_cpu(text)
        assert text.count(OVERLAP) == 1, f"the block has no {OVERLAP!r} to be told beside"
        text = text.replace(OVERLAP, OVERLAP.replace("True", "False"))  # it needs a stream
    model = small_llama()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        trainer = run_block(text, model=model, dataset=_Rows())["trainer"]
    engine = trainer.model_wrapped
    states = engine.optimizer.state.values()
    moments = sum(
        v.numel() for state in states for name, v in state.items() if name.startswith("exp_avg")
    )
    weights = torch.cat([p.detach().float().flatten() for p in engine.parameters()])
    return type(engine).__name__, len(weights), moments, weights
