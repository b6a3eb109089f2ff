"""Lesson 19 at real size: what a rank of Qwen3-30B-A3B keeps, sends and takes, and the tables that say so."""

from __future__ import annotations

from typing import Any

import pytest

from utils.lessons.lesson_19 import at_size
from utils.lessons.lesson_19.figures_at_size import draw_loads, peak_parts
from utils.lessons.lesson_19.published import STEP_TFLOPS, STEP_TOKENS
from utils.lessons.lesson_19.small_run import printed_by_script, script
from utils.lessons.lesson_19.tables import print_break_even, print_seconds, print_step
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
    chunked = at_size.qwen3_30b_a3b(layers_again=True, sequences=4, chunk=1024)
    assert chunked.peak_bytes < three.peak_bytes, "no fp32 logits of all tokens lie at once"


def test_published_products_are_those_of_a_token_without_what_is_recomputed() -> None:
    rest, experts = at_size.token_flops()
    assert STEP_TOKENS * (rest + experts) / 1e12 == pytest.approx(STEP_TFLOPS, rel=0.005)
    assert at_size.token_flops(2048)[1] == experts
    assert at_size.token_flops(2048)[0] < rest, "attention is less in shorter sequences"


def test_layers_run_forward_twice_and_the_output_once() -> None:
    (rest, experts), (again, experts_again) = (at_size.token_flops(forwards=n) for n in (1, 2))
    output = 6.0 * 151936 * 2048
    assert experts_again == pytest.approx(experts * 4 / 3)
    assert again - output == pytest.approx((rest - output) * 4 / 3)


def test_loads_stand_with_their_least_and_most(capsys: pytest.CaptureFixture[str]) -> None:
    def load_of(tokens: int, more: float = 0.0, by: float = 1.0) -> float:
        return (4096 / tokens + more) * by

    constants = [{"by": 0.5}, {"by": 2.0}]
    print_break_even(
        "EP 8 is faster", load_of, (512, 2048, 16_384), {"a": {}, "b": {"more": 8.0}}, constants, 8
    )
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "predicted: EP 8 is faster; columns: tokens a rank and micro-batch"
    assert " ".join(said[2].split()) == "a 8.0 (4.0 to >8) 2.0 (1.0 to 4.0) <1"
    assert " ".join(said[3].split()) == "b >8 (8.0 to >8) >8 (5.0 to >8) >8 (4.1 to >8)"


def test_exposed_seconds_are_a_step_less_its_computing(capsys: pytest.CaptureFixture[str]) -> None:
    def parts(tokens: int, layout: str) -> tuple[float, float, float, float]:
        ours = layout == "EP 8"
        return tokens / 1e4, tokens / 2e4, 0.01 * ours, 0.4 * (not ours)

    def seconds(tokens: int, layout: str, overlap: bool = True) -> float:
        rest, experts, rows, weights = parts(tokens, layout)
        busy = rest + experts + rows
        return max(busy, weights) if overlap else busy + weights

    print_seconds(parts, seconds, (1000, 4000), "as assumed")
    found = [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[2:]]
    assert found == [
        ["0.10", "0.40"], ["0.05", "0.20"], ["0.01", "0.01"], ["0.40", "0.40"], ["0.25", "0.00"],
        ["0.40", "0.40"], ["0.16", "0.61"], ["0.40", "0.60"], ["0.55", "1.00"],
    ]  # fmt: skip


def test_the_script_of_the_last_cell_prints_a_line_for_each_step() -> None:
    assert script().startswith("# Before: name = ") and "optimizer.step()" in script()
    said = printed_by_script(ranks=2, ep_size=2, steps=2).splitlines()
    assert len(said) == 2 and all(line.startswith("loss 4.") for line in said), said
    assert all("busiest EP rank over the mean: 1." in line for line in said)


def test_a_predicted_step_stands_beside_the_published_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_step({190.0: STEP_TOKENS / 2}, 190.0, evenly=5000.0)
    said = capsys.readouterr().out
    assert "190 TFLOP/s:  6,020 tokens/s; predicted / published 0.50" in said
    assert "190 TFLOP/s with experts drawn evenly: 5,000" in said


def test_a_band_and_two_lines_for_each_way_weights_travel() -> None:
    asked = set()

    def load_of(tokens: float, overlap: bool, speed: float = 20.0, slower: int = 1) -> float:
        asked.add((overlap, speed, slower))
        return 4096 * slower * speed / 20 / tokens

    figure = draw_loads(load_of, [{"speed": 10.0}, {"speed": 40.0}], "20 TFLOP/s")
    cases = {(20.0, 1), (10.0, 1), (40.0, 1), (20.0, 2)}
    assert asked == {(overlap, *case) for overlap in (True, False) for case in cases}
    assert figure.get_suptitle().count("20 TFLOP/s") == 1
    band = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert band.y0 == pytest.approx(4096 * 0.5 / 2**14) and band.y1 == pytest.approx(16)
