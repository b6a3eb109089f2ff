"""Each axis by itself on real ranks: what it computes, what it sends, and what it refuses."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

from utils.models import Transformer, TransformerConfig
from utils.parallel import (
    ParallelDims,
    accumulated_passes,
    adamw,
    apply_fsdp,
    apply_tp,
    chunks_of,
    clip_grad_norm,
    device_mesh,
    gathered_attention,
    keep_chunk,
    keep_scores,
    local_positions,
    local_rows,
    materialise,
    pipeline_passes,
    recompute,
    reduce_on_last_micro_batch,
    summed_loss,
    token_weight,
)
from utils.parallel.data import IGNORED, Passes
from utils.ranks import run_ranks
from utils.simulation import simulate
from utils.traffic.counter import traffic

CONFIG = TransformerConfig(vocabulary=32, hidden=32, layers=8, heads=4, kv_heads=2, feedforward=48)
ROWS, LENGTH, MICRO_BATCH = 8, 16, 1


def model() -> Transformer:
    """The same weights everywhere."""
    torch.manual_seed(0)
    return Transformer(CONFIG)


def tokens(masked: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole batch; with masked targets, unequally many a row."""
    torch.manual_seed(1)
    inputs, targets = torch.randint(32, (2, ROWS, LENGTH))
    for row in range(ROWS * masked):
        targets[row, : 2 * row] = IGNORED
    return inputs, targets


def plain(masked: bool = False) -> tuple[float, dict[str, torch.Tensor], float]:
    """Loss, gradients and their norm in one process, the mean over all targets."""
    whole, (inputs, targets) = model(), tokens(masked)
    loss = F.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    grads = {name: p.grad for name, p in whole.named_parameters()}
    return loss.item(), grads, torch.stack([g.norm() for g in grads.values()]).norm().item()


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The norm of the difference over the norm."""
    norm = torch.stack([wanted[name].norm() for name in found]).norm()
    return (torch.stack([(g - wanted[n]).norm() for n, g in found.items()]).norm() / norm).item()


# --- tensor --------------------------------------------------------------------------------------


def _tensor(sequence: bool) -> tuple[float, float, dict[str, int]]:
    mesh, whole, (inputs, targets) = device_mesh(ParallelDims(tp=2), "cpu"), model(), tokens()
    apply_tp(whole, mesh["tp"], sequence=sequence)
    with loss_parallel(), CommDebugMode() as sent:
        loss = summed_loss(whole(inputs), targets) / targets.numel()
        forward = {str(name).split(".")[-1]: n for name, n in sent.get_comm_counts().items()}
        loss.backward()
    _, wanted, _ = plain()
    held = {n: p.grad for n, p in whole.named_parameters()}
    found = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in held.items()}
    return loss.item(), apart(found, wanted), forward


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_is_the_whole_model(sequence):
    loss, error, forward = run_ranks(_tensor, 2, sequence)[0]
    assert loss == pytest.approx(plain()[0], rel=1e-6)
    assert error < 1e-6
    # Attention and feed-forward of 8 blocks; the embedding; three of the loss (maximum, sum, pick).
    if sequence:
        assert forward["reduce_scatter_tensor"] == 2 * 8 + 1
        assert forward["all_gather_into_tensor"] == 2 * 8 + 1
        assert forward["all_reduce"] == 3
    else:
        assert forward["all_reduce"] == 2 * 8 + 1 + 3
        assert "all_gather_into_tensor" not in forward


def _too_many_heads() -> None:
    apply_tp(model(), device_mesh(ParallelDims(tp=4), "cpu")["tp"])


def test_heads_must_come_out_whole():
    with pytest.raises(Exception, match="2 key heads do not divide over 4 ranks"):
        run_ranks(_too_many_heads, 4)


# --- context -------------------------------------------------------------------------------------


def _context(kv_heads: int) -> list[float]:
    dims, rank = ParallelDims(cp=4), dist.get_rank()
    torch.manual_seed(2)
    whole = [torch.randn(2, heads, LENGTH, 8) for heads in (4, kv_heads, kv_heads)]
    weight = torch.randn(2, 4, LENGTH, 8)
    leaves = [tensor.clone().requires_grad_() for tensor in whole]
    wanted = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=kv_heads != 4)
    (wanted * weight).sum().backward()
    here = local_positions(dims, rank, LENGTH)
    mine = [tensor[:, :, here].clone().requires_grad_() for tensor in whole]
    found = gathered_attention(*mine, mesh=device_mesh(dims, "cpu")["cp"])
    (found * weight[:, :, here]).sum().backward()
    pairs = [(found, wanted)] + [(m.grad, w.grad) for m, w in zip(mine, leaves, strict=True)]
    return [(one - other[:, :, here]).abs().max().item() for one, other in pairs]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_over_ranks_is_attention(kv_heads):
    assert max(max(row) for row in run_ranks(_context, 4, kv_heads)) < 1e-5


# --- pipeline; what its schedules compute: test_pipelines.py ------------------------------------


def test_chunks_go_around_or_up_again():
    assert chunks_of("1F1B", 2, 4, 4) == (2,)
    assert chunks_of("Interleaved1F1B", 1, 4, 12) == (1, 5, 9)
    assert chunks_of("ZBVZeroBubble", 1, 4, 8) == (1, 6)


@pytest.mark.parametrize(
    ("schedule", "chunks", "message"),
    [
        ("1F1B", 8, "1F1B runs 1 chunks on each of 4 ranks"),
        ("Interleaved1F1B", 4, "runs 2 or more chunks"),
        ("Interleaved1F1B", 9, "9 chunks are given"),
        ("DualPipeV", 12, "DualPipeV runs 2 chunks"),
        ("2F2B", 4, "Unknown schedule name '2F2B'"),
    ],
)
def test_schedules_that_cannot_run_so_many_chunks(schedule, chunks, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chunks_of(schedule, 0, 4, chunks)


def test_a_cut_keeps_names_and_needs_blocks_that_add_up():
    parts = [keep_chunk(model(), (3, 4, 1), chunk) for chunk in range(3)]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model().named_parameters())
    inputs, _ = tokens()
    stream = inputs
    for part in parts:
        stream = part(stream, torch.arange(LENGTH))
    torch.testing.assert_close(stream, model()(inputs))
    with pytest.raises(ValueError, match=re.escape("hold 7 blocks, and the model has 8")):
        keep_chunk(model(), (3, 4), 0)
    tied = Transformer(TransformerConfig(vocabulary=32, hidden=32, layers=2, heads=4, tied=True))
    with pytest.raises(ValueError, match=re.escape("Build the model with tied=False")):
        keep_chunk(copy.deepcopy(tied), (1, 1), 0)
    assert keep_chunk(tied, (2,), 0).head.weight is tied.embed.weight


def _simulated_stage() -> tuple[nn.Module, torch.optim.Optimizer, Passes]:
    mesh = device_mesh(ParallelDims(pp=2, shard=2, tp=2), "cpu")
    (chunk,) = chunks_of("1F1B", mesh.get_local_rank("pp"), 2, 2)
    with torch.device("meta"):
        part = keep_chunk(Transformer(CONFIG), (5, 3), chunk)
    apply_tp(part, mesh["tp"], sequence=True)
    apply_fsdp(part, mesh, zero_stage=1)
    materialise([part], mesh, torch.device("cpu"))
    stream = torch.empty(MICRO_BATCH, LENGTH // 2, CONFIG.hidden, device="meta")
    passes = pipeline_passes(
        [part], mesh, torch.arange(LENGTH), stream, chunks=2, schedule="1F1B", micro_batches=4
    )
    return part, adamw([part], 1e-3), passes


def test_a_stage_runs_in_a_simulated_world():
    found = {}

    def build():
        part, optimizer, found["passes"] = _simulated_stage()
        return part, optimizer

    def step(part, optimizer):
        rows = torch.zeros(4, LENGTH, dtype=torch.long)
        with loss_parallel():
            found["passes"](rows, rows, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seen = simulate(build, step, device="A100 80GB", world=8, rank=0)
    sent = {row.collective: row for row in seen.traffic if row.axis == "pp"}
    assert set(sent) == {"send", "receive", "all-reduce"}  # streams, their gradients, the loss
    for name in ("send", "receive"):
        assert sent[name].calls == 4
        assert sent[name].payload_bytes == 4 * (LENGTH // 2) * CONFIG.hidden * 4
    assert {row.axis for row in seen.traffic} == {"pp", "shard", "tp"}


# --- shard, and all together ---------------------------------------------------------------------


def _sharded() -> dict[str, tuple[float, float, float]]:
    found = {}
    for stage, dims in [
        (0, ParallelDims(replicate=4)),
        (1, ParallelDims(shard=4)),
        (3, ParallelDims(replicate=2, shard=2)),
    ]:
        mesh, whole = device_mesh(dims, "cpu"), model()
        keep_scores(whole)
        recompute(whole)
        apply_fsdp(whole, mesh, zero_stage=stage)
        inputs, targets = local_rows(dims, dist.get_rank(), *tokens(masked=True))
        passes = accumulated_passes(
            whole,
            MICRO_BATCH,
            torch.arange(LENGTH),
            reduce_on_last_micro_batch(mesh, zero_stage=stage),
        )
        loss = passes(inputs, targets, token_weight(targets, mesh))
        dist.all_reduce(loss)
        grads = {n: p.grad.full_tensor() for n, p in whole.named_parameters()}
        error = apart(grads, plain(masked=True)[1])
        norm = clip_grad_norm(adamw([whole], 0.1), mesh, 1e-3).item()
        clipped = torch.stack([p.grad.full_tensor().norm() for p in whole.parameters()]).norm()
        found[str(stage)] = (loss.item() / 4, error, norm, clipped.item())
    return found


def test_sharded_ranks_weigh_every_token_alike():
    """The rows hold unequal numbers of targets, so a mean of means would be another loss."""
    loss, _, norm = plain(masked=True)
    for found in run_ranks(_sharded, 4, timeout_seconds=180)[0].values():
        assert found[0] == pytest.approx(loss, rel=1e-6)
        assert found[1] < 1e-6
        assert found[2] == pytest.approx(norm, rel=1e-5)
        assert found[3] == pytest.approx(1e-3, rel=1e-3)


def _gathered() -> dict[int, int]:
    found, dims = {}, ParallelDims(shard=2)
    for stage in (1, 2, 3):
        mesh, whole = device_mesh(dims, "cpu"), model()
        apply_fsdp(whole, mesh, zero_stage=stage)
        passes = accumulated_passes(
            whole,
            MICRO_BATCH,
            torch.arange(LENGTH),
            reduce_on_last_micro_batch(mesh, zero_stage=stage),
        )
        rows = local_rows(dims, dist.get_rank(), *tokens())
        with traffic() as sent:
            passes(*rows, token_weight(rows[1], mesh))
        found[stage] = sum(row.calls for row in sent.rows if row.collective == "all-gather")
    return found


def test_a_stage_gathers_as_often_as_it_gives_up():
    """Once a step, once a micro-batch, or for forward and for backward; the root of ZeRO-3, too."""
    groups, passes = CONFIG.layers + 1, ROWS // 2 // MICRO_BATCH
    wanted = {1: groups, 2: groups * passes, 3: 2 * groups * passes}
    assert run_ranks(_gathered, 2) == [wanted, wanted]


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match=re.escape("zero_stage is 4; write 0, 1, 2 or 3")):
        apply_fsdp(model(), None, zero_stage=4)


def test_parts_must_have_blocks_and_be_sharded():
    with pytest.raises(ValueError, match="Linear has no `blocks`, an nn.ModuleList"):
        recompute(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="call shard_states on its part first"):
        adamw([model()], 0.1)
