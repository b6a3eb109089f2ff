"""A step of DDP taken apart: each part tells its own fault, from the same steps of all ranks."""

from __future__ import annotations

import pytest
import torch

from utils.lessons.lesson_04.taking_apart import (
    WARM_UP,
    moment,
    parts_of,
    parts_of_times,
    table_of_parts,
)
from utils.ranks import run_ranks

FAULTS = {  # where 50 ms are planted, and what the table says of it
    "loading": "loading",
    "rank 1 loads": "waiting for rank 1's loading",
    "computing": "computing",
    "rank 1 computes": "waiting for rank 1's computing",
    "link": "DDP's part",
    "fixed": "fixed part",
}


def times(fault: str = "", seconds: float = 0.05, steps: int = 9, ranks: int = 2) -> torch.Tensor:
    """Ranks that load for 1 ms, compute for 8 ms, half a share for 4 ms, and send for 2 ms."""
    rows = []
    for number in range(2 * steps):
        halved, row = number >= steps, []
        for rank in range(ranks):
            loads = fault == "loading" or (fault == "rank 1 loads" and rank == 1)
            loaded = 0.0 if halved else 0.001 + seconds * loads
            computing = 0.008 + seconds * (fault == "computing")
            full = loaded + (computing / 2 if halved else computing)
            full += seconds * (fault == "fixed" or (fault == "rank 1 computes" and rank == 1))
            row.append([0.0, loaded, full, full])
        end = max(each[2] for each in row) + 0.002 + seconds * (fault == "link")
        rows.append([[*each[:3], each[3] if halved else end] for each in row])
    return torch.tensor(rows, dtype=torch.float64)


def test_the_parts_of_a_step_without_a_fault() -> None:
    parts = parts_of_times(times())
    for found, seconds in zip(parts[:5], (0.001, 0.008, 0.0, 0.0, 0.002), strict=True):
        assert len(found) == 9 - WARM_UP
        torch.testing.assert_close(found, torch.full_like(found, seconds), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("fault", "answers"), FAULTS.items())
def test_a_fault_shows_in_its_own_part_and_in_no_other(fault: str, answers: str) -> None:
    clean, found = parts_of_times(times()), parts_of_times(times(fault))
    table = table_of_parts({"clean": clean, fault: found}, 1)
    assert table.loc[fault, "grew most"] == f"{answers}, by 50"
    assert table.loc["clean", "grew most"] == ""
    grown = [float((b - a).median()) for a, b in zip(clean[:5], found[:5], strict=True)]
    assert sorted(round(each, 9) for each in grown) == [0.0, 0.0, 0.0, 0.0, 0.05]


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_the_parts_of_each_step_add_up_to_it(fault: str) -> None:
    uneven = times(fault)
    uneven[..., 1:] *= torch.linspace(1, 2, len(uneven), dtype=torch.float64)[:, None, None]
    parts = parts_of_times(uneven)
    step = uneven[WARM_UP:9, :, 3].amax(1)
    torch.testing.assert_close(sum(parts[:5]), step, rtol=0, atol=1e-12)


def test_one_process_is_the_measure_by_the_share_that_a_rank_takes() -> None:
    one, two = parts_of_times(times(ranks=1)), parts_of_times(times("fixed"))
    table = table_of_parts({"one": one, "two": two}, 0.5)
    assert str(table.loc["one", "step"]).startswith("5.5 ") and table.loc["one", "grew most"] == ""
    assert str(table.loc["two", "step"]).startswith("61.0 ")
    assert table.loc["two", "grew most"] == "fixed part, by 50"


def test_the_sleep_of_the_slow_rank_is_no_fixed_part() -> None:
    found = parts_of_times(times("rank 1 computes"))
    assert (found.slowest_rank, found.late_by) == (1, "computing")
    assert found.fixed.abs().max() < 1e-12, "read on the first rank"


def test_a_disturbed_step_leaves_the_median_and_widens_the_spread() -> None:
    disturbed = times()
    disturbed[5, :, 3] = 1.0
    parts = parts_of_times(disturbed)
    assert float(parts.ddps_part.median()) == pytest.approx(0.002)
    assert float(parts.ddps_part.max()) > 0.9


def gathered() -> list[float]:
    device = torch.device("cpu")
    begin = moment(device)
    assert isinstance(begin, float)
    rows = [[0.0, 0.1, 0.2, 0.3] for _ in range(2 * WARM_UP + 2)]
    return [*(float(part.median()) for part in parts_of(rows)[:5])]


def test_all_ranks_have_the_same_parts() -> None:
    for found in run_ranks(gathered, 2):
        assert found == pytest.approx([0.1, 0.0, 0.1, 0.0, 0.1])
