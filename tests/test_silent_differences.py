"""What a simulated GPU does otherwise than this machine: right, or said in a note."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from utils.memory import Category
from utils.shims.torch_autocast import autocast_operators
from utils.simulation import SimulationError, cuda_autocast, simulate
from utils.units import MIB

A100 = "A100 80GB"


def peak(build: Any, step: Any, **how: Any) -> int:
    return simulate(build, step, device=A100, **how).peak_bytes


def linear(width: int = 1024) -> tuple[nn.Module, None]:
    return nn.Linear(width, width), None


def on_cuda(width: int = 1024) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(width, width).to("cuda")
    return model, torch.optim.AdamW(model.parameters())


def infers() -> nn.Module:
    return nn.Linear(1024, 1024).to("cuda")


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


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


# --- autocast


def cast(dtype: torch.dtype, call: Any) -> torch.dtype:
    found: list[torch.dtype] = []

    def step(model: nn.Module, _: Any) -> None:
        x = model(torch.randn(8, 8, device="cuda")).to(dtype)
        with torch.autocast("cuda", dtype=dtype):
            found.append(call(x).dtype)

    simulate(lambda: nn.Linear(8, 8).cuda(), step, device=A100)
    return found[-1]


HIGH = {
    "softmax": lambda x: x.softmax(-1),
    "F.softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "pow": lambda x: x.pow(2),
    "**": lambda x: x**2,
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(-1),
    "exp": lambda x: x.exp(),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: x.norm(dim=-1),
    "F.softplus": F.softplus,
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.long, device="cuda")),
    "cumsum": lambda x: x.cumsum(0),
    "rsqrt": lambda x: x.rsqrt(),
    "cdist": lambda x: torch.cdist(x, x),
}
LOW = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x),
    "relu": lambda x: x.relu(),
    "mean": lambda x: x.mean(),
    "gelu": F.gelu,
    "silu": F.silu,
    "mv": lambda x: x.mv(x[0]),
    "avg_pool3d": lambda x: F.avg_pool3d(x.view(1, 1, 4, 4, 4), 2),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*HIGH, *LOW])
def test_autocast_as_on_cuda(name: str, dtype: torch.dtype) -> None:
    call, wanted = (HIGH[name], torch.float32) if name in HIGH else (LOW[name], dtype)
    assert cast(dtype, call) is wanted


def listed(header: str, macro: str) -> set[str]:
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", header, re.DOTALL)
    assert body, f"PyTorch has no list {macro} any more"
    rows = re.findall(r"_\(\s*(?:ADD_NS\()?(\w+)\)?(?:,\s*\"?([\w.]+))?", body[1])
    return {".".join(filter(None, row)) for row in rows}


def test_the_lists_are_pytorchs_own() -> None:
    """aten/src/ATen/autocast_mode.h, which PyTorch installs, and the dispatcher's own table."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    assert listed(header, "AT_FORALL_FP32") == set(cuda_autocast.FLOAT32)
    assert listed(header, "AT_FORALL_FP32_SET_OPT_DTYPE") == set(cuda_autocast.FLOAT32_RESULT)
    assert listed(header, "AT_FORALL_PROMOTE") == set(cuda_autocast.WIDEST)
    on_cuda, on_cpu = map(autocast_operators, ("AutocastCUDA", "AutocastCPU"))
    lower = listed(header, "AT_FORALL_LOWER_PRECISION_FP")
    assert lower - on_cpu == set(cuda_autocast.LOWER) & lower, "CPU's autocast lowers the rest"
    mine = {
        *cuda_autocast.LOWER,
        *cuda_autocast.FLOAT32,
        *cuda_autocast.FLOAT32_RESULT,
        *cuda_autocast.FLOAT32_NORMS,
        *cuda_autocast.WIDEST,
        cuda_autocast.BANNED,
    }
    cudnn = {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"}
    assert on_cuda - on_cpu - mine == cudnn, "CUDA's autocast knows an operator that is not here"


def test_a_method_keeps_what_the_function_keeps() -> None:
    def keeps(call: Any) -> int:
        def step(model: nn.Module, _: Any) -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                call(model(torch.randn(512, 1024, device="cuda"))).sum().backward()

        return peak(lambda: nn.Linear(1024, 1024).cuda(), step)

    assert keeps(lambda x: x.softmax(-1)) == keeps(lambda x: F.softmax(x, -1))


def test_binary_cross_entropy_is_refused_under_autocast_as_on_cuda() -> None:
    with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        cast(torch.float16, lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)))


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


# --- values


def asks(how: Any) -> Any:
    def step(model: nn.Module, _: Any) -> Any:
        loss = model(torch.randn(4, 1024, device="cuda")).sum()
        return how(loss)

    return step


QUESTIONS = {
    "item": lambda loss: loss.item(),
    "float": float,
    "format": lambda loss: f"{loss:.3f}",
    "branch": lambda loss: 1 if loss > 0 else 2,
    "list": lambda loss: loss.view(1).tolist(),
    "nonzero": lambda loss: loss.view(1).nonzero(),
    "mask": lambda loss: loss.view(1)[loss.view(1) > 0],
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_names_its_line_and_takes_a_stand_in(name: str) -> None:
    step = asks(QUESTIONS[name])
    with pytest.raises(SimulationError, match=r"test_silent_differences.py, line \d+ \(`.*values="):
        simulate(infers, step)
    for values in (True, {"loss": 1.0}):
        found = simulate(infers, step, values=values)
        assert any(note.startswith("Assumed at test_silent") for note in found.notes)


def test_a_stand_in_of_another_name_is_none() -> None:
    step = asks(lambda loss: loss.item())
    with pytest.raises(SimulationError, match="asks for the value"):
        simulate(infers, step, values={"accuracy": 1.0})


def test_numbers_of_the_program_are_known() -> None:
    seen: list[Any] = []

    def step(model: nn.Module, _: Any) -> None:
        rates = torch.linspace(0, 0.5, 6)
        seen.append([round(r.item(), 2) for r in rates.split(2)[1]])
        seen.append((torch.tensor([3, 1, 2]) * 2).tolist())

    simulate(infers, step)
    assert seen[:2] == [[0.2, 0.3], [6, 2, 4]]


def test_what_was_written_to_is_known_no_more() -> None:
    def step(model: nn.Module, _: Any) -> None:
        numbers = torch.zeros(3)
        numbers += model(torch.randn(1, 1024, device="cpu").to("cuda")).sum().cpu()
        numbers.tolist()

    with pytest.raises(SimulationError, match=r"numbers.tolist\(\)"):
        simulate(infers, step)


# --- bad input


def test_build_may_return_the_model_alone() -> None:
    assert (
        simulate(lambda: nn.Linear(4, 4), lambda model, _: model(torch.ones(1, 4))).peak_bytes > 0
    )


def test_build_may_not_return_three_things() -> None:
    with pytest.raises(ValueError, match=r"must return \(model, optimizer\).*several"):
        simulate(lambda: (nn.Linear(4, 4), None, 3), lambda model, _: None)  # type: ignore[arg-type,return-value]


def test_several_models_and_optimizers() -> None:
    def build() -> Any:
        models = {"first": nn.Linear(64, 64).cuda(), "second": nn.Linear(64, 64).cuda()}
        return models, [torch.optim.Adam(m.parameters()) for m in models.values()]

    def step(models: Any, optimizers: Any) -> None:
        x = torch.randn(4, 64, device="cuda")
        models["second"](models["first"](x)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    found = simulate(build, step)
    assert found.breakdown["parameters"] == 2 * (64 * 64 * 4 + 512)
    assert found.breakdown[Category.KEPT] == 0


def test_an_extension_without_a_form_is_named_with_the_way_out() -> None:
    @torch.library.custom_op("silent_tests::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(SimulationError, match=r"line \d+.*silent_tests.*register_fake"):
        simulate(infers, asks(opaque))


def test_a_module_that_the_step_replaces_is_not_kept() -> None:
    def step(model: nn.Module, _: Any) -> None:
        with torch.no_grad():
            model[0] = nn.Linear(1024, 1024).cuda()
            model(torch.ones(1, 1024, device="cuda"))

    found = simulate(lambda: nn.Sequential(nn.Linear(1024, 1024)).cuda(), step, device=A100)
    assert found.breakdown[Category.KEPT] == 0, "the meter itself keeps the old module"
