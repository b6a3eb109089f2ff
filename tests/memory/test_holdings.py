"""`reachable_storages`: every storage once, by its shortest path, whatever keeps it."""

import torch
from torch import nn

from utils.memory import Category, measure, reachable_storages
from utils.memory.measurement import Measurement


def test_parameters_gradients_and_moments_have_names():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    rows = reachable_storages(model=model, optimizer=optimizer)
    assert ("model._parameters['weight']", "float32", 48) in rows
    assert ("model._parameters['weight'].grad", "float32", 48) in rows
    assert sum(row.bytes for row in rows) == 4 * 4 * 15 + 2 * 4  # and two step counters


def test_views_and_cycles_count_once_and_meta_not_at_all():
    base = torch.zeros(100, dtype=torch.bfloat16)
    keeper = {"views": [base[:10], base[20:]], "meta": torch.zeros(5, device="meta")}
    keeper["self"] = keeper
    (row,) = reachable_storages(keeper=keeper)
    assert row == ("keeper['views'][0]", "bfloat16", 200)
    assert "200 B" in str(row) and "keeper['views'][0]" in str(row)


def measured_with_master() -> Measurement:
    model = nn.Linear(64, 64, bias=False).bfloat16()
    master = model.weight.detach().float().requires_grad_()
    optimizer = torch.optim.SGD([master], lr=0.1, momentum=0.9)

    def step() -> None:
        model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
        master.grad, model.weight.grad = model.weight.grad.float(), None
        optimizer.step()
        master.grad = None

    return measure(step, model=model, optimizer=optimizer, timed_steps=0)


def test_the_meter_knows_master_copies_and_their_gradients():
    """While the optimizer steps: which kernels run, and so where the peak lies, differs by CPU."""
    timeline = measured_with_master().timeline
    stepping = next(span for span in timeline.spans if span.name == "optimizer step")
    found, size = timeline.at(stepping.end_ns - 1), 64 * 64
    assert found[Category.PARAMETERS] == 2 * size
    assert found[Category.OPTIMIZER_STATE] == (4 + 4) * size
    assert found[Category.GRADIENTS] == 4 * size
