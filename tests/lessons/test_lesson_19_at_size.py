"""Lesson 19 at real size: what a rank of Qwen3-30B-A3B keeps, sends and takes, and the tables that say so."""

from __future__ import annotations

from typing import Any

import pytest

from utils.lessons.lesson_19 import at_size
from utils.lessons.lesson_19.figures_at_size import draw_loads, peak_parts
from utils.lessons.lesson_19.published import STEP_TFLOPS, STEP_TOKENS
from utils.lessons.lesson_19.tables import (
    print_across,
    print_choice,
    print_loads,
    print_seconds,
    print_step,
)
from utils.simulation.devices import simulated_device


def test_a_busy_rank_keeps_what_its_rows_need() -> None:
    even, busy = (at_size.qwen3_30b_a3b(load=load) for load in (1.0, 1.25))
    a_row = 2 * (2048 + 4 * 768)  # in bf16: the vector, gate and up, and two tensors made of these
    a_row += 2 * 8  # its place among rows sorted by expert, and back
    more = 0.25 * 48 * 8 * at_size.TOKENS * a_row
    assert busy.peak_bytes - even.peak_bytes == pytest.approx(more, rel=1e-6)
    rows = [
        {row.collective: row.payload_bytes for row in found.traffic}["all-to-all"]
        for found in (even, busy)
    ]
    assert rows[0] == 48 * 4 * 8 * at_size.TOKENS * 2048 * 2
    assert rows[1] == 1.125 * rows[0], "what it puts in follows what came, in two of four exchanges"


def test_recomputed_experts_keep_the_vector_alone() -> None:
    kept, again = (at_size.qwen3_30b_a3b(recompute=recompute) for recompute in (False, True))
    saved = kept.peak_bytes - again.peak_bytes
    assert saved == pytest.approx(48 * 8 * at_size.TOKENS * 2 * 4 * 768, rel=0.05)
    assert again.traffic == kept.traffic, "no row travels twice"


def test_fsdp_alone_sends_no_rows_and_gathers_all_experts() -> None:
    shared, alone = (
        at_size.qwen3_30b_a3b(expert_ranks=ranks, layers_again=True) for ranks in (8, 1)
    )
    assert _put_in(shared, "all-to-all") == 48 * 6 * 8 * at_size.TOKENS * 2048 * 2, "six exchanges"
    assert _put_in(alone, "all-to-all") == 0
    experts = (
        48 * 128 * 3 * 2048 * 768
    )  # of 30.5 billion; an eighth is put into each of two gathers, in bf16
    assert _put_in(alone, "all-gather") == pytest.approx(experts * 2 * 2 / 8, rel=0.1)
    assert _put_in(alone, "reduce-scatter") == pytest.approx(experts * 4, rel=0.1)
    assert alone.peak_bytes > shared.peak_bytes


def _put_in(run: Any, collective: str) -> int:
    return sum(row.payload_bytes for row in run.traffic if row.collective == collective)


def test_parts_of_a_peak_add_up() -> None:
    sizes = {
        "parameters": 4,
        "gradients": 2,
        "optimizer state": 8,
        "activations": 30,
        "temporaries": 1,
    }
    in_gib = {name: size * 2**30 for name, size in sizes.items()}
    assert peak_parts(in_gib, 12 * 2**30, 9 * 2**30) == [4, 8, 2, 12, 9, 9, 1]
    assert peak_parts(in_gib, 22 * 2**30, 9 * 2**30) == [4, 8, 2, 0, 0, 30, 1]


def test_three_sequences_fit_a_card_and_a_fourth_does_not() -> None:
    usable = simulated_device("H100").usable_bytes
    three, four = (at_size.qwen3_30b_a3b(layers_again=True, sequences=n) for n in (3, 4))
    assert three.peak_bytes < usable < four.peak_bytes


def test_published_products_are_those_of_a_token_without_what_is_recomputed() -> None:
    rest, experts = at_size.token_flops()
    assert STEP_TOKENS * (rest + experts) / 1e12 == pytest.approx(STEP_TFLOPS, rel=0.005)
    assert at_size.token_flops(2048)[1] == experts
    assert at_size.token_flops(2048)[0] < rest, "attention is less in shorter sequences"


def test_loads_that_no_run_has_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    loads = {(1024, True): 8.0, (4096, True): 0.99, (1024, False): 7.94, (4096, False): 1.0}

    def load_of(tokens: int, overlap: bool, more: float = 0.0) -> float:
        return loads[tokens, overlap] + more

    print_loads("EP 8 is faster", load_of, (1024, 4096), {"a": {}, "b": {"more": 0.2}}, worst=8)
    said = capsys.readouterr().out.splitlines()
    assert [line.split() for line in said[4:]] == [
        ["a", "always", "never", "7.9", "1.0"],
        ["b", "always", "1.2", "always", "1.2"],
    ]


def test_weights_that_overlap_are_exposed_where_computing_is_shorter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_seconds((1024, 4096), 380, rows=1e-4, weights=sum(at_size.step_parts(1024, 380)) + 0.1)
    said = [line.split()[-2:] for line in capsys.readouterr().out.splitlines()]
    assert said[-2] == ["0.10", "0.00"], "computing 4,096 tokens takes longer than these weights"
    assert said[-1] == said[-3] and said[-4] == ["0.10", "0.41"]


def test_two_nodes_change_one_assumption_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def load_of(tokens: int, overlap: bool, **case: float | str) -> float:
        asked.append(case)
        return 2.0

    print_across(load_of, (1024,), 380, 48.0, plain="plain")
    assert all(len(case) <= 1 for case in asked)
    assert {"ndr": 24.0} in asked and {"ndr": 96.0} in asked and {"layout": "plain"} in asked
    assert len(capsys.readouterr().out.splitlines()) == 4 + 7


def test_a_predicted_step_stands_beside_the_published_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_step({190.0: STEP_TOKENS / 2}, evenly=5000.0)
    said = capsys.readouterr().out
    assert "190 TFLOP/s:  6,020 tokens/s; predicted / published 0.50" in said
    assert "190 TFLOP/s with experts drawn evenly: 5,000" in said


def test_the_choice_changes_one_assumption_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def load_of(tokens: int, **case: float) -> float:
        asked.append((tokens, case))
        return 2.0

    print_choice(load_of, (1024, 4096), 6.0, 4.0, 380)
    for _, case in asked:
        assert len(case.keys() - {"overlap"}) <= 1
    assert (1024, {"overlap": True, "rows": 3.0}) in asked
    assert (4096, {"overlap": False, "speed": 760}) in asked
    last = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[-2:] for line in last] == [["64", "256"], ["197", "637"]], "3,350 GB/s"


def test_a_step_in_parts_is_its_products_and_a_third_more() -> None:
    rest, experts = at_size.step_parts(2 * at_size.TOKENS, 380)
    products = 4 / 3 * sum(at_size.token_flops()) * 2 * at_size.TOKENS
    assert (rest + experts) * 380e12 == pytest.approx(products)


def test_the_band_and_its_lines_are_drawn_from_the_function_given() -> None:
    asked = []

    def load_of(tokens: float, speed: float = 20.0, slower: int = 1) -> float:
        asked.append((speed, slower))
        return 4096 * slower * speed / 20 / tokens

    figure = draw_loads(load_of, {"a": {}, "b": {"slower": 2}, "c": {"slower": 3}}, (10, 40), 370e0)
    assert set(asked) == {(10, 1), (40, 1), (20.0, 1), (20.0, 2), (20.0, 3)}
    assert "20 TFLOP/s" in figure.axes[0].get_title("left")
