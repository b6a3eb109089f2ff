"""What a simulated GPU does otherwise than this machine: right, or said in a note."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from silent_cases import A100, linear, on_cuda, peak, train
from torch import nn
from torch.distributed.fsdp import fully_shard

from utils.memory import Category
from utils.simulation import simulate
from utils.units import MIB

# --- what build() keeps


def test_a_kept_tensor_is_in_the_peak_and_in_a_note() -> None:
    def build() -> Any:
        model, optimizer = on_cuda()
        model.kept = [torch.zeros(64 * MIB, device="cuda")]
        return model, optimizer

    alone, found = simulate(on_cuda, train), simulate(build, train)
    assert found.peak_bytes - alone.peak_bytes == 256 * MIB
    assert found.breakdown[Category.KEPT] == 256 * MIB
    assert any("256.00 MiB in 1 tensors that build() keeps" in note for note in found.notes)
    allocated = found.allocator_bytes["allocated peak"]
    assert allocated == pytest.approx(found.peak_bytes, rel=0.02), "two counts of one step"
    assert (
        "Does not fit" in simulate(build, train, device="T4").notes[0] or found.peak_bytes < 2**33
    )


def test_a_copied_tensor_has_a_gradient_and_attributes_of_its_own() -> None:
    def step(model: nn.Module, _: Any) -> None:
        model(torch.ones(1, 4)).sum().backward()
        model.weight.mine = "here"
        twin = copy.deepcopy(model)
        assert isinstance(twin.weight, nn.Parameter) and twin.weight.requires_grad
        assert twin.weight.grad is not None and twin.weight.grad is not model.weight.grad
        assert twin.weight.mine == "here"
        tied = copy.deepcopy([model.weight, model.weight])
        assert tied[0] is tied[1], "a shared weight became two"

    simulate(lambda: (nn.Linear(4, 4), None), step, device="cpu")


# --- kernels


def test_dropout_in_attention_keeps_no_scores() -> None:
    def build() -> Any:
        return nn.MultiheadAttention(512, 8, dropout=0.1, batch_first=True), None

    def step(model: nn.Module, _: Any) -> None:
        x = torch.randn(4, 1024, 512)
        model(x, x, x, need_weights=False)[0].sum().backward()

    scores = 4 * 8 * 1024 * 1024 * 4
    assert peak(build, step) < scores, "the matrix of scores was made"


def test_a_boolean_mask_is_copied_as_numbers() -> None:
    """aten/src/ATen/native/transformers/attention.cpp, convert_boolean_attn_mask."""

    def with_mask(mask: Any) -> int:
        def step(model: nn.Module, _: Any) -> None:
            q = model(torch.randn(2, 4, 512, 64)).bfloat16()
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask()).sum().backward()

        timeline = simulate(lambda: (nn.Linear(64, 64), None), step, device=A100).timeline
        start = next(span.start_ns for span in timeline.spans if span.name == "backward")
        return timeline.at(start).total_bytes

    shape = (2, 1, 512, 512)
    boolean = with_mask(lambda: torch.ones(shape, dtype=torch.bool))
    numbers = with_mask(lambda: torch.zeros(shape, dtype=torch.bfloat16))
    assert boolean == numbers, "either is kept as numbers"


def test_grouped_keys_with_a_mask_go_through_plain_operations() -> None:
    def step(model: nn.Module, _: Any) -> None:
        q = model(torch.randn(1, 8, 256, 64))
        F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True).sum().backward()

    assert peak(lambda: (nn.Linear(64, 64), None), step) > 2 * 8 * 256 * 256 * 4


# --- cuda by name


def test_cuda_is_the_simulated_device() -> None:
    seen: dict[str, Any] = {}

    def step(model: nn.Module, optimizer: Any) -> None:
        x = torch.randn(64, 1024).to("cuda")
        seen["x"] = (x.device, x.is_cuda, x.get_device(), x.cpu().device, x.cpu().is_cuda)
        seen["card"] = (
            torch.cuda.is_available(),
            torch.cuda.device_count(),
            torch.cuda.get_device_name(),
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = torch.empty(MIB, device="cuda")
        seen["rise"] = torch.cuda.max_memory_allocated() - before
        torch.cuda.synchronize()
        del y
        train(model, optimizer)

    found = simulate(on_cuda, step, device=A100)
    assert seen["x"] == (torch.device("cuda", 0), True, 0, torch.device("cpu"), False)
    assert seen["card"] == (True, 1, "a simulated A100-80GB")
    assert seen["rise"] == 4 * MIB
    assert found.host_bytes > 0, "the batch was made on the host"
    assert not torch.cuda.is_available() or torch.version.cuda, "torch.cuda is itself again"


def test_what_stays_on_the_host_is_not_on_the_device() -> None:
    def build() -> Any:
        model, optimizer = on_cuda()
        model.images = [torch.zeros(16 * MIB)]
        return model, optimizer

    found, alone = simulate(build, train), simulate(on_cuda, train)
    assert found.peak_bytes == alone.peak_bytes
    assert found.host_bytes - alone.host_bytes == 64 * MIB


def test_an_optimizer_made_before_the_move_holds_the_same_parameters() -> None:
    def build() -> Any:
        model = nn.Linear(1024, 1024)
        optimizer = torch.optim.AdamW(model.parameters())
        return model.to("cuda"), optimizer

    assert simulate(build, train).peak_bytes == simulate(on_cuda, train).peak_bytes


def test_a_model_left_on_the_host_is_said() -> None:
    def build() -> Any:
        torch.ones(1).to("cuda")
        return linear()

    found = simulate(build, lambda model, _: model(torch.randn(4, 1024)))
    assert found.breakdown["parameters"] > 4 * MIB
    assert any("leaves the model's parameters on 'cpu'" in note for note in found.notes)


def test_fsdp_in_a_world_of_one_is_on_the_device() -> None:
    def build() -> Any:
        model = fully_shard(nn.Linear(1024, 1024, bias=False).to("cuda"))
        return model, torch.optim.AdamW(model.parameters())

    found, sizes = simulate(build, train), {"parameters": 4, "optimizer state": 8}
    assert {name: found.breakdown[name] // MIB for name in sizes} == sizes
    assert found.host_bytes == 0
    assert any("FSDP in a simulated world of one" in note for note in found.notes)


def test_another_device_than_the_ranks_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'cuda:1' is not there.*world=n"):
        simulate(on_cuda, lambda model, _: model.to("cuda:1"))


def test_x_cpu_is_said_where_cpu_is_the_device() -> None:
    found = simulate(linear, lambda model, _: model(torch.randn(4, 1024)).cpu())
    assert any("x.cpu() leaves tensors on the device" in note for note in found.notes)


# --- another program than the one written


def repeated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = model(x)
    return x.sum()


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("build", [on_cuda, lambda: linear()])
def test_save_on_cpu_takes_host_memory_and_no_more_of_the_device(
    build: Any, pin_memory: bool
) -> None:
    def step(model: nn.Module, _: Any) -> None:
        x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
            repeated(model, x).backward()
        model.zero_grad()

    def plain(model: nn.Module, _: Any) -> None:
        repeated(model, torch.randn(4096, 1024, device="cuda", requires_grad=True)).backward()
        model.zero_grad()

    found, without = simulate(build, step), simulate(build, plain)
    assert found.peak_bytes < 0.7 * without.peak_bytes
    assert found.host_bytes >= 3 * 16 * MIB


def test_the_default_grad_scaler_scales() -> None:
    scales: list[bool] = []

    def step(model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler()
        scales.append(scaler.is_enabled())
        with torch.autocast("cuda"):
            loss = model(torch.randn(64, 1024, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    found = simulate(on_cuda, step)
    assert scales == [True, True]
    assert found.breakdown["optimizer state"] > 0, "the optimizer never stepped"
    assert any("no gradient overflows" in note for note in found.notes)


def test_compiled_code_is_said_to_run_without() -> None:
    def build() -> Any:
        return torch.compile(nn.Linear(1024, 1024).cuda()), None

    found = simulate(build, lambda model, _: model(torch.randn(4, 1024, device="cuda")))
    assert any(note.startswith("torch.compile is left out") for note in found.notes)


def test_the_state_of_a_paged_optimizer_is_on_the_host() -> None:
    from bitsandbytes.optim import PagedAdamW32bit

    def build() -> Any:
        model = nn.Linear(1024, 1024).cuda()
        return model, PagedAdamW32bit(model.parameters())

    found = simulate(build, train)
    assert found.host_bytes >= 2 * 4 * MIB
    assert found.breakdown["optimizer state"] < MIB
    assert any("paged optimizer" in note for note in found.notes)
