"""The out-of-memory clinic: patients over their budgets, their cures, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from evidence.record import oom_fragmentation
from evidence.record.experiment import run_trial
from utils.clinic import (
    PATIENTS,
    Examination,
    NothingToCureError,
    Patient,
    admit,
    examine,
    examine_over_budget,
    pinned_bytes,
    replay,
    smallest_capacity,
)
from utils.lessons.lesson_10 import full_loader
from utils.lessons.lesson_10.death import death_of, more_on_the_card
from utils.lessons.lesson_10.host import batch_bytes, run_loader
from utils.lessons.lesson_10.listing import loops
from utils.lessons.lesson_10.messages import PUBLISHED
from utils.lessons.lesson_10.one_segment import expandable_bytes
from utils.lessons.lesson_10.seven import seven
from utils.memory import MemoryTimeline, OverBudgetError
from utils.memory.events import Allocation
from utils.techniques import checkpoint_blocks
from utils.units import MIB, Category, Phase

# Bytes beside the line of the budget: what a kernel's scratch memory may add or take away.
MARGIN = 0.03
ONE_MORE_STEP = {
    "kept_graph": "logits and loss",
    "forgotten_reference": "activations",
}  # what grows from step to step, and only in these


def in_chunks(model: torch.nn.Module, tokens: torch.Tensor, parts: int) -> torch.Tensor:
    """The chunked loss of lesson 10."""

    def summed(hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(hidden), wanted, reduction="sum")

    head, model.head = model.head, None
    hidden = model.norm(model(tokens[:, :-1])).flatten(0, 1)
    model.head, wanted = head, tokens[:, 1:].flatten()
    pairs = zip(hidden.chunk(8), wanted.chunk(8), strict=True)
    return (
        sum(checkpoint(summed, *pair, use_reentrant=False) for pair in pairs) / len(wanted) / parts
    )


CURES: dict[str, Callable[[Patient], Patient]] = {
    "kept_graph": lambda p: p.edited({"logits.logsumexp": "logits.detach().logsumexp"}),
    "large_vocabulary": lambda p: p.edited(
        {
            "            logits = model(tokens[:, :-1])\n": "",
            "F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / parts": (
                "in_chunks(model, tokens, parts)"
            ),
            "del logits, loss": "del loss",
        },
        in_chunks=in_chunks,
    ),
    "fragmentation": lambda p: p.edited(oom_fragmentation.CURE),
    "optimizer_doubles": lambda p: p.edited({"foreach=True": "fused=True"}),
    "validation": lambda p: p.edited(
        {
            "    losses.append(loss_of(model, held_out).item())": (
                "    with torch.no_grad():\n        losses.append(loss_of(model, held_out).item())"
            )
        }
    ),
    "forgotten_reference": lambda p: p.edited(
        {"seen.append(result)": "seen.append(result.detach().abs().max())"}
    ),
    "resolution": lambda p: p.edited(
        {"return model, torch": "return checkpoint_blocks(model), torch"},
        checkpoint_blocks=checkpoint_blocks,
    ),
}


@pytest.fixture(scope="module")
def before() -> dict[str, Examination]:
    return {name: examine_over_budget(admit(name)) for name in PATIENTS}


@pytest.mark.parametrize("name", PATIENTS)
def test_a_patient_is_over_its_budget_and_its_cure_is_not(
    name: str, before: dict[str, Examination]
) -> None:
    patient, found = admit(name), before[name]
    after = examine(CURES[name](patient))
    limit = patient.limit_bytes
    assert found.bytes > (1 + MARGIN) * limit, f"{name} is clearly over its budget before"
    assert after.bytes < (1 - MARGIN) * limit, f"{name} stays clearly under it after its cure"
    assert after.same_losses(found), f"the cure of {name} leaves the losses alone"
    assert found.complaint.startswith("Out of memory"), "the sick one gets the device's error"
    assert after.complaint == "", "and the cured one gets none"


@pytest.mark.parametrize("name", PATIENTS)
def test_a_script_has_thirty_to_sixty_lines(name: str) -> None:
    import inspect

    lines = inspect.getsource(inspect.getmodule(admit(name).train)).splitlines()
    assert 30 <= len(lines) <= 60, f"{name} has {len(lines)} lines"
    assert admit(name).complaint, f"{name} says what it complains of"


def test_one_other_loss_is_another_run(before: dict[str, Examination]) -> None:
    found = before["kept_graph"]
    first, *rest = found.losses
    assert found.same_losses(replace(found, losses=(first + 1e-9, *rest))), "rounding is no other"
    for losses in ((1.01 * first, *rest), found.losses[:-1], (math.nan, *rest)):
        assert not found.same_losses(replace(found, losses=losses)), f"{losses} are others"


def test_what_is_kept_shows_after_each_step(before: dict[str, Examination]) -> None:
    for name, found in before.items():
        timeline = found.run.timeline
        ends = [span.end_ns for span in timeline.spans if span.name == "optimizer step"]
        last, second = (timeline.at(ends[index]) for index in (-1, 1))
        grown = {key: last[key] - second[key] for key in last if last[key] - second[key] > 4 * MIB}
        if name in ONE_MORE_STEP:
            assert list(grown) == [ONE_MORE_STEP[name]], f"{name} grows by {grown}"
        elif name != "fragmentation":  # keeps its features on purpose
            assert grown == {}, f"{name} grows by {grown}"


def test_fragmentation_lies_in_reserved_bytes(before: dict[str, Examination]) -> None:
    found = before["fragmentation"]
    assert found.run.peak_bytes < found.patient.limit_bytes, "what is alive would fit"
    at_end = found.replayed()  # at the last step
    assert at_end.idle_bytes > 50 * MIB, "much is reserved and not allocated"
    assert pinned_bytes(at_end.allocator) > at_end.allocator.allocated_bytes + 50 * MIB, (
        "and cannot be given back"
    )
    with pytest.raises(OverBudgetError, match="reserved but unallocated"):
        replay(found.run.timeline, found.patient.limit_bytes)
    assert "GPU reserved memory" in at_end.summary(), "the summary has PyTorch's own rows"


def test_where_fragmentation_dies_no_hole_serves(before: dict[str, Examination]) -> None:
    found = before["fragmentation"]
    death = death_of(found)
    assert death.holes[0] < death.asked_bytes < sum(death.holes), "enough is free, in pieces"
    assert 0 < death.steps_done < 10, "it dies in mid-run"
    with pytest.raises(ValueError, match="serves every request"):
        death_of(found, capacity_bytes=found.bytes)


def test_a_long_batch_is_over_its_budget_and_its_tokens_in_parts_are_not() -> None:
    patient = seven()["long_batch"]
    found = examine_over_budget(patient)
    cure = {"batch.chunk(parts)": "batch.chunk(max(parts, -(-batch.numel() // 1024)))"}
    after = examine(patient.edited(cure))
    assert found.bytes > (1 + MARGIN) * patient.limit_bytes, "clearly over"
    assert after.bytes < (1 - MARGIN) * patient.limit_bytes, "clearly under"
    assert after.same_losses(found), "parts of any size have the same losses"
    assert patient.complaint.startswith("It ran for hours")


def test_expandable_segments_hold_what_is_alive_and_less_than_many(
    before: dict[str, Examination],
) -> None:
    found = before["fragmentation"]
    size = expandable_bytes(found.run.timeline)
    assert found.run.peak_bytes <= size < found.bytes, "in whole pages, without the small holes"
    assert size % (20 * MIB) == 2 * MIB, "its small tensors take a page of their own pool"


def test_pages_come_by_pool_and_a_hole_is_used_again() -> None:
    def at(start: int, end: int | None, size: int) -> Allocation:
        return Allocation(0, size, start, end, Category.ACTIVATIONS, Phase.FORWARD, "")

    whole = (at(1, 4, 12 * MIB), at(2, None, 12 * MIB), at(3, None, 1024))
    again = (*whole, at(5, None, 8 * MIB))
    for allocations in (whole, again):
        size = expandable_bytes(MemoryTimeline(allocations, (), 0, 9))
        assert size == (40 + 2) * MIB, "24 MiB take two large pages, and the hole serves 8 MiB"
    large = (*whole, at(5, None, 17 * MIB))
    assert expandable_bytes(MemoryTimeline(large, (), 0, 9)) == (60 + 2) * MIB, "no hole of 12 does"


def test_the_recorded_card_has_more_alive_than_the_run(before: dict[str, Examination]) -> None:
    more = dict(more_on_the_card(before["fragmentation"]))
    assert more["other"] == 32 * MIB and all(size >= MIB for size in more.values())


def test_a_loop_is_shown_without_what_all_have() -> None:
    shown = loops(seven().values()).data
    for number, (name, patient) in enumerate(seven().items(), 1):
        assert f'# patient {number}: "{patient.complaint}"' in shown and name not in shown
    assert "AdamW(model.parameters(), lr=1e-3, foreach=True)" in shown, "its optimizer"
    assert "logits.logsumexp" in shown and "seen.append" in shown, "the lines of the faults"
    assert "zero_grad" not in shown and "generator = " not in shown and "def " not in shown


def test_a_published_message_says_where_it_can_be_read() -> None:
    assert PUBLISHED[1].url == "https://github.com/kerrj/lerf/issues/73"
    assert PUBLISHED[-1].url == PUBLISHED[-2].url == "https://github.com/murong-xu/CADS/issues/4"
    assert "told there" in str(PUBLISHED[0]) and "told there" not in str(PUBLISHED[1])


def test_the_smallest_capacity_serves_and_one_segment_less_does_not(
    before: dict[str, Examination],
) -> None:
    timeline = before["validation"].run.timeline
    least = smallest_capacity(timeline)
    assert replay(timeline, least).allocator.reserved_peak_bytes <= least, "it serves every request"
    with pytest.raises(OverBudgetError):
        replay(timeline, least - 2 * MIB)


def test_only_one_of_two_sums_leaks(before: dict[str, Examination]) -> None:
    patient = admit("kept_graph")
    harmless = examine(patient.edited({"total_loss + loss": "total_loss + loss.detach()"}))
    assert abs(harmless.bytes - before["kept_graph"].bytes) < MIB, (
        "backward has freed what the other sum's graph had saved"
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("validation", {"    model.eval()\n": "    model.eval()\n    torch.manual_seed(0)\n"}),
        (
            "kept_graph",
            {
                "            losses[-1] += loss.item()\n": "            losses[-1] += loss.item()\n            del logits, loss\n"
            },
        ),
    ],
)
def test_folk_cures_do_not_help(
    name: str, wrong: dict[str, str], before: dict[str, Examination]
) -> None:
    found = examine(admit(name).edited(wrong))
    assert not found.fits, f"{name} stays over its budget"
    assert found.same_losses(before[name]), "and nothing else changes"


@pytest.mark.slow
def test_the_experiment_has_a_row_before_and_one_after_the_cure() -> None:
    sick_row, cured_row = map(run_trial, oom_fragmentation.trials(torch.device("cpu")))
    reserved = "replayed_reserved_peak_bytes"
    assert sick_row[reserved] > cured_row[reserved], "the cure reserves less"
    assert sick_row["last_loss"] == pytest.approx(cured_row["last_loss"], rel=1e-6)
    assert sick_row["peak_bytes"] < admit("fragmentation").limit_bytes, "what is alive would fit"


# Bad input --------------------------------------------------------------------------------------


def test_a_patient_that_is_cured_already() -> None:
    cured = CURES["validation"](admit("validation"))
    with pytest.raises(NothingToCureError, match="there is nothing to cure") as caught:
        examine_over_budget(cured)
    assert "validation" in str(caught.value), "the sentence names the patient"


def test_an_unknown_patient_and_an_edit_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="There are kept_graph"):
        admit("kept_grph")
    patient = admit("validation")
    with pytest.raises(ValueError, match="stands 0 times"):
        patient.edited({"no such text": ""})
    with pytest.raises(ValueError, match="times in the script, not once"):
        patient.edited({"losses": ""})
    with pytest.raises(ValueError, match="as it came in"):
        patient.treated(train=lambda *both: [0.0]).edited({"model.eval()": ""})


# The host ---------------------------------------------------------------------------------------


def test_waiting_batches_fill_the_host_and_stay() -> None:
    found = run_loader(workers=2, prefetch=3)
    assert found.waiting_bytes == 2 * 3 * batch_bytes("float32"), "the formula"
    if not found.is_measured:
        pytest.skip("this system has no /proc to tell what waits")
    assert all(
        0.8 * found.waiting_bytes <= size <= 1.4 * found.waiting_bytes
        for size in found.shared_bytes
    ), f"what waits is the same at each moment: {found}"


def test_the_host_is_over_its_budget_before_and_under_it_after() -> None:
    assert (
        4 * 8 * batch_bytes("float32") > full_loader.BUDGET_BYTES > 4 * 2 * batch_bytes("float32")
    )
    images = [full_loader.Images(dtype)[300] for dtype in (torch.float32, torch.uint8)]
    assert torch.equal(images[0], images[1].float()), "bytes hold the same images"


def test_a_loader_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=1, stderr="Traceback\nOSError: no room", stdout="")
    monkeypatch.setattr("subprocess.run", lambda *args, **settings: done)
    with pytest.raises(RuntimeError, match="OSError: no room"):
        run_loader()
