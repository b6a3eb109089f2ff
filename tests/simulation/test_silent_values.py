"""Values that a simulated program asks for, and what a build function may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from silent_cases import A100, infers
from torch import nn

from utils.memory import Category
from utils.simulation import SimulationError, simulate

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
    with pytest.raises(SimulationError, match=r"test_silent_values.py, line \d+ \(`.*values="):
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
