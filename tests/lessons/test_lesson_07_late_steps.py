"""Steps that wait for each part's next forward: the same numbers, and only what is due steps."""

from __future__ import annotations

import torch
from torch import nn

from utils.lessons.lesson_07.late_steps import clipped_losses, step_before_use


def test_late_steps_are_the_plain_ones_to_the_bit() -> None:
    late = clipped_losses(late=True)
    assert late == clipped_losses(late=False)
    assert late[-1] < late[0], "nothing was learned"


def test_a_part_steps_once_and_only_where_it_is_due() -> None:
    torch.manual_seed(0)
    model, due = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), set[nn.Module]()
    step_before_use(model, due, lr=0.1)
    before = [part.weight.detach().clone() for part in model.children()]
    model(torch.ones(1, 3)).sum().backward()
    due.add(model[1])
    for _ in range(2):
        model(torch.ones(1, 3))
    assert torch.equal(model[0].weight, before[0]) and model[0].weight.grad is not None
    assert not torch.equal(model[1].weight, before[1]) and model[1].weight.grad is None
    assert not due
