"""Runs the blocks of lesson 03's last cell on something small, and asserts what they promise."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import math
import os
import tempfile
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from utils.lessons.blocks import run_block, small_llama
from utils.ranks import run_ranks

from .network import FEATURES, network

CPU = torch.device("cpu")


class Overflows(nn.Module):
    """A module that makes an infinity of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape, returned with infinities."""
        return x / torch.zeros_like(x)


class ByKeyword(nn.Module):
    """Calls and answers as modules of transformers do: by keyword, with a dict inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Overflows()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape, returned with infinities."""
        return self.inner(x=x)


def block_1(text: str) -> None:
    """The hooks name the module that made the first infinity, the input that brought a NaN, and zeros."""
    for layer, sick, said in [
        (Overflows(), 1.0, "output of 1 (Overflows)"),
        (ByKeyword(), 1.0, "output of 1.inner (Overflows)"),
        (nn.ReLU(), math.nan, "input of 0 (Linear)"),
    ]:
        model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2))
        hooks = run_block(text, model=model)["hooks"]
        told = _raised(model, torch.full((2, 4), sick))
        assert said in told, f"the hooks say {told!r}, not {said!r}"
        for each in hooks:
            each.remove()
        model(torch.full((2, 4), sick))  # without hooks nothing raises
    _names_a_gradient(text)
    _names_whose_backward(text)
    _lets_masks_pass(text)
    _names_what_is_dead(text)


def _names_a_gradient(text: str) -> None:
    """Forward is finite, backward is not: from the loss on, also in a step after a good one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    run_block(text, model=model)
    model(torch.ones(2, 4)).sum().backward()
    told = _raised_back(model(torch.ones(2, 4)).sum() * math.inf)
    assert "the gradient of the output of 1 (Linear) is not finite" in told, told
    assert "that of the loss was" in told, f"a second step begins anew, and the hooks say {told!r}"


class Norm(nn.Module):
    """The lesson's RMSNorm: x**2 overflows in fp16, and its backward makes NaN."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) -> the same."""
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _names_whose_backward(text: str) -> None:
    """Fault (b): `3` made the NaN, for its input, while its own parameter's gradient is finite."""
    model = network(Norm)
    hooks = run_block(text, model=model)["hooks"]
    generator = torch.Generator().manual_seed(1)
    inputs = 1000 * torch.randn(64, FEATURES, generator=generator)
    with contextlib.redirect_stdout(io.StringIO()), torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), torch.zeros(64, dtype=torch.long))
    told = _raised_back(2.0**16 * loss)
    wanted = "the gradient of the output of 2 (Block) is not finite, and that of the output of 3 (Norm) was"
    assert wanted in told, f"the backward of 3 makes the NaN, and the hooks say {told!r}"
    grad = model.get_submodule("3").get_parameter("weight").grad
    assert grad is not None and grad.isfinite().all(), "3's own gradient is finite"
    for each in hooks:
        each.remove()


def _raised_back(loss: torch.Tensor) -> str:
    """What the hooks say of a backward, "" if they let it pass."""
    try:
        loss.backward()
    except FloatingPointError as error:
        return str(error)
    return ""


def _lets_masks_pass(text: str) -> None:
    """An attention mask holds -inf, and the model is healthy."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    run_block(text, model=encoder)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    assert encoder(torch.randn(2, 5, 8), mask=mask).isfinite().all()
    padding = torch.tensor([[False] * 4 + [True]] * 2)
    assert encoder(torch.randn(2, 5, 8), src_key_padding_mask=padding).isfinite().all()


def _names_what_is_dead(text: str) -> None:
    """Weights that are NaN are told before any hook; a module that puts out zeros is named."""
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.ReLU())
    nn.init.constant_(first.bias, -9.0)
    run_block(text, model=model)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        model(torch.zeros(2, 4))
    assert "output of 1 (ReLU) is all zeros" in told.getvalue()
    nn.init.constant_(first.bias, math.nan)
    try:
        run_block(text, model=model)
    except FloatingPointError as error:
        assert "0.bias first" in str(error)
        return
    raise AssertionError("weights with a NaN pass")


def block_2(text: str) -> None:
    """The twins differ where fp16 overflows, and repeat what the run did: state, clip, scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    inputs, labels = 1e5 * torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
    make = functools.partial(torch.optim.SGD, lr=1e-9)
    low, full = _twins(text, model, [(inputs, labels)] * 2, make, F.cross_entropy)
    assert all(math.isnan(loss) for loss, _ in low) and len(low) == 2
    assert all(math.isfinite(loss) for loss, _ in full) and len(full) == 2
    assert all(p.grad is None for p in model.parameters()), "the twins are copies"
    _goes_on_as_the_run(text)
    _lives_by_its_clip(text)
    _finds_its_scale(text)
    _explodes_with_its_rate(text)


def _twins(
    text: str,
    model: nn.Module,
    recorded: list[Any],
    make: Callable[..., torch.optim.Optimizer],
    loss_function: Callable[..., torch.Tensor],
    **changes: Any,
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The block's losses and norms, of the fp16 twin and of the fp32 one."""
    names = {"model": model, "recorded": recorded, "dtype": torch.float16, "device": CPU}
    names |= {"make_optimizer": make, "loss_function": loss_function, "clip": math.inf}
    names["optimizer_state"] = make(model.parameters()).state_dict()
    names["scaler_state"] = torch.amp.GradScaler("cpu", init_scale=2.0**16).state_dict()
    with contextlib.redirect_stdout(io.StringIO()) as told:
        run_block(text, **(names | changes))
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for line in told.getvalue().splitlines():
        words = line.split()
        found[words[0] == "fp32"].append((float(words[4]), float(words[-1])))
    return found[False], found[True]


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(64, FEATURES, generator=generator) for _ in range(count)]
    return [(x, (x[:, :8]).argmax(-1)) for x in rows]


def _goes_on_as_the_run(text: str) -> None:
    """An fp32 run with Adam, a clip and a decayed rate: its twin repeats its losses to the digit."""
    model, batches = network(Norm), _batches(16)
    make = functools.partial(torch.optim.Adam, lr=0.02)
    optimizer = make(model.parameters())
    losses: list[float] = []
    kept: dict[str, Any] = {}
    for step, (x, y) in enumerate(batches):
        if step == 10:
            kept = {"model": copy.deepcopy(model)}
            kept["optimizer_state"] = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    model = kept.pop("model")
    low, full = _twins(text, model, batches[10:], make, F.cross_entropy, clip=0.5, **kept)
    assert _apart(full, losses[10:]) < 1e-5, "the fp32 twin is not the run"
    assert _apart(low, losses[10:]) < 0.1, "the fp16 twin is far from it"
    _, fresh = _twins(text, model, batches[10:], make, F.cross_entropy, clip=0.5)
    assert _apart(fresh, losses[10:]) > 1e-3, "without its moments it is another run"


def _apart(twin: list[tuple[float, float]], losses: list[float]) -> float:
    """The largest relative difference of a twin's losses from a run's."""
    return max(abs(a - b) / b for (a, _), b in zip(twin, losses, strict=True))


def _lives_by_its_clip(text: str) -> None:
    """Steps are too long but for the clip: with it both twins live, without it both explode."""
    batches = [(10 * torch.ones(8, 4), torch.zeros(8, 1))] * 40
    for clip, lives in [(1.0, True), (math.inf, False)]:
        torch.manual_seed(0)
        model, make = nn.Linear(4, 1), functools.partial(torch.optim.SGD, lr=0.1)
        _, full = _twins(text, model, batches, make, F.mse_loss, clip=clip)
        assert (full[-1][0] < 1e6) == lives, f"clip {clip}: {full[-1]}"


def _finds_its_scale(text: str) -> None:
    """From a scale that is too large the fp16 twin backs off, and steps."""
    state = torch.amp.GradScaler("cpu", init_scale=2.0**24).state_dict()
    make = functools.partial(torch.optim.SGD, lr=0.1)
    model = network(Norm)
    low, full = _twins(text, model, _batches(20), make, F.cross_entropy, scaler_state=state)
    assert not math.isfinite(low[0][1]), "2^24 is too large for these gradients"
    assert math.isfinite(low[-1][1]) and low[-1][0] < low[0][0], "the twin never stepped"
    assert full[-1][0] < full[0][0]


def _explodes_with_its_rate(text: str) -> None:
    """Fault (d), with Adam: the fp32 twin explodes, too."""
    make = functools.partial(torch.optim.Adam, lr=3.0)
    _, full = _twins(text, network(Norm), _batches(20), make, F.cross_entropy)
    worst = max((loss for loss, _ in full if math.isfinite(loss)), default=math.inf)
    assert worst > 10 * full[0][0], "too large a rate is no fault of the format"


def block_3(text: str) -> None:
    """A NaN in the data and an overflow of gradients leave weights and statistics finite, and are counted."""
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        before = [p.clone() for p in model.parameters()]
        spoiled = torch.randn(32, 8).index_fill(0, torch.tensor(3), math.nan)
        rows = [torch.randn(32, 8) for _ in range(4)]
        batches = [(x, (x[:, 0] > 0).long()) for x in (rows[0], spoiled, *rows[1:])]
        with contextlib.redirect_stdout(io.StringIO()) as told:
            names = _guarded(text, model, batches, dtype, sick={1})
        first, second = told.getvalue().splitlines()
        assert first == "rank 0, batch 1: rows [3] are not finite", first
        assert second == "rank 0, batch 2: its own loss is inf", second
        assert names["bad_batches"] == 1, (
            "one batch has a NaN, and the block counts what it leaves out"
        )
        assert names["skipped_steps"] == 1, "one of four steps had gradients that are not finite"
        assert names["in_a_row"] == 0, "the last step was fine"
        kept = [*model.parameters(), *model.buffers()]
        assert all(t.isfinite().all() for t in kept), f"{dtype}: a NaN went into the model"
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved, f"{dtype}: the good batches should have changed the weights"
        if dtype is torch.float16:
            assert names["scaler"].get_scale() == 2.0**15, "the skipped step halved the scale"
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                _guarded(text, model, batches[:1] * 20, dtype, sick=set(range(20)))
        except FloatingPointError as error:
            count = 17 if dtype is torch.float16 else 10  # from 2^16 to below 1
            assert f"{count} steps in a row" in str(error)
        else:
            raise AssertionError(f"{dtype}: a run that never steps goes on")

    assert run_ranks(_with_ranks, 2, text) == [
        (1, 1, []),
        (
            1,
            1,
            ["rank 1, batch 1: rows [3] are not finite", "rank 1, batch 2: its own loss is inf"],
        ),
    ], "both ranks leave the batch and the step out, and rank 1 says why"


def _with_ranks(text: str) -> tuple[int, int, list[str]]:
    """Rank 1 has a NaN in batch 1, and its loss overflows in batch 2; what this rank counts and says."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 2)
    model = nn.parallel.DistributedDataParallel(layer)
    batches = [(torch.randn(4, 8), torch.tensor([0, 1, 0, 1])) for _ in range(4)]
    second = torch.distributed.get_rank() == 1
    if second:
        batches[1][0][3, 0] = math.nan
    with contextlib.redirect_stdout(io.StringIO()) as told:
        names = _guarded(text, model, batches, torch.bfloat16, sick={1} if second else set())
    assert all(p.isfinite().all() for p in layer.parameters()), "a NaN went into the model"
    return names["bad_batches"], names["skipped_steps"], told.getvalue().splitlines()


def _guarded(
    text: str, model: nn.Module, batches: list[Any], dtype: torch.dtype, sick: set[int]
) -> dict[str, Any]:
    """The guarded loop on some batches; steps in `sick` have gradients that are not finite."""
    calls = itertools.count()

    def loss_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels) * (math.inf if next(calls) in sick else 1.0)

    return run_block(
        text,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_function=loss_function,
        batches=batches,
        device=CPU,
        dtype=dtype,
    )


def block_4(text: str) -> None:
    """transformers: each step is in the log; a NaN ends the run, and no checkpoint holds it."""
    from safetensors.torch import load_file

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    here = text.replace("bf16=True", "bf16=True, use_cpu=True, save_steps=1")  # tests hide the GPU
    assert here != text, "the block says bf16=True"
    for sick in (False, True):
        given = torch.randn(24, 8)
        given[0] = math.nan if sick else given[0]
        dataset = [{"inputs": x, "labels": torch.tensor(n % 2)} for n, x in enumerate(given)]
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            rows = _trained(here, dataset)
            saved = [load_file(path) for path in Path("out").rglob("model.safetensors")]
        assert all(t.isfinite().all() for kept in saved for t in kept.values()), "a NaN was saved"
        assert (rows is None) == sick, f"data {'with' if sick else 'without'} NaN: {rows}"
        assert sick or (rows is not None and len(rows) == len(saved) == 3), f"three steps: {rows}"
    _loads_as_it_was_saved()


def _trained(text: str, dataset: list[Any]) -> list[Any] | None:
    """The log of the steps, None if the run was ended."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = run_block(text, model=Labelled(), dataset=dataset)["trainer"]
    except FloatingPointError as error:
        assert "step " in str(error) and "nan" in str(error), error
        return None
    rows = [row for row in trainer.state.log_history if "grad_norm" in row]
    assert all(math.isfinite(row["loss"]) for row in rows)
    return rows


def _loads_as_it_was_saved() -> None:
    """What section 3 says of transformers 5: a bf16 checkpoint stays bf16, unless one asks."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        saved: Any = small_llama(num_hidden_layers=1)
        saved.to(torch.bfloat16).save_pretrained(folder)
        for asked, held in [({}, torch.bfloat16), ({"dtype": torch.float32}, torch.float32)]:
            model = AutoModelForCausalLM.from_pretrained(folder, **asked)
            assert {p.dtype for p in model.parameters()} == {held}, asked


def _raised(model: nn.Module, given: torch.Tensor) -> str:
    """What the hooks say of a forward, "" if they let it pass."""
    try:
        model(given)
    except FloatingPointError as error:
        return str(error)
    return ""


class Labelled(nn.Module):
    """A classifier as the Trainer wants one: it returns its loss when it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """(rows, 8) and (rows,) -> the mean loss and (rows, 2) logits."""
        logits = self.layer(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}
