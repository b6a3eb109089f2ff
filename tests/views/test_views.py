"""Figures say what they show: bars and stacks add up, axes have units, evidence is printed."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from view_cases import (
    FORMULA,
    SIZES,
    bars_of,
    evidence_of,
    legend_of,
    measured,
    texts,
    top_at,
)

from utils.lessons.lesson_02.curves import draw_losses, draw_memory_by_batch, draw_peaks
from utils.lessons.lesson_05.tradeoff import draw_tradeoff, worth_taking
from utils.memory import Measurement, MemoryTimeline
from utils.memory.events import Allocation, Category, Mark, Phase
from utils.units import GIB, KIB, MIB, Evidence
from utils.views import draw_breakdown, draw_timeline
from utils.views.breakdown import as_bar
from utils.views.images import image_html, png_bytes, show

LONG_NAME = "ResNet-50, AMP bf16, checkpointed x3"

FIGURES = {
    "breakdown": lambda: draw_breakdown([FORMULA, *SIZES]),
    "timeline": lambda: draw_timeline(SIZES[0]),
    "by batch": lambda: draw_memory_by_batch(SIZES, predicted_bytes={4: 5e8, 64: 2e9}),
    "trade-off": lambda: draw_tradeoff(SIZES, limit_bytes=1e9),
}


# What every figure has


@pytest.mark.parametrize("kind", FIGURES)
def test_axes_have_labels_with_units(kind: str) -> None:
    (axes,) = FIGURES[kind]().axes
    quantity = r".+ \((B|KiB|MiB|GiB|ms|images)\)"
    assert re.fullmatch(quantity, axes.get_xlabel()), axes.get_xlabel()
    if kind == "breakdown":  # a bar for each name
        assert "a step" in axes.get_yticklabels()[-1].get_text()
    else:
        assert re.fullmatch(quantity, axes.get_ylabel()), axes.get_ylabel()
    assert axes.get_title(loc="left")


@pytest.mark.parametrize("kind", FIGURES)
def test_evidence_is_printed(kind: str) -> None:
    told = evidence_of(FIGURES[kind]())
    with_prediction = kind in ("breakdown", "by batch")
    assert told == "measured on the test's card" + (", predicted" if with_prediction else "")


def test_every_kind_of_evidence_is_printed() -> None:
    mixed = [measured(evidence=kind, name=str(kind)) for kind in Evidence]
    told = evidence_of(draw_breakdown(mixed))
    assert all(str(kind) in told for kind in Evidence)
    assert all(f"({kind})" in texts(draw_breakdown(mixed)) for kind in Evidence)
    assert evidence_of(draw_breakdown([FORMULA])) == "predicted", "a formula has no device"


@pytest.mark.parametrize("kind", FIGURES)
def test_a_picture_needs_words(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    figure = FIGURES[kind]()
    assert image_html(figure, 'a "bar" < 3').startswith('<img alt="a &quot;bar&quot; &lt; 3" ')
    for empty in ("", "  "):
        with pytest.raises(ValueError, match="Say in alt= what the figure shows"):
            show(figure, empty)
    assert png_bytes(figure).startswith(b"\x89PNG")


# Bars


def test_widths_of_bars_add_up_to_the_total() -> None:
    items = [FORMULA, *SIZES]
    for item, patches in zip(items, bars_of(draw_breakdown(items)), strict=True):
        breakdown = as_bar(item).breakdown
        sizes = [breakdown[category] / GIB for category in breakdown]
        assert [patch.get_width() for patch in patches] == pytest.approx(sizes)
        assert patches[0].get_x() == 0
        ends = [patch.get_x() + patch.get_width() for patch in patches]
        assert [patch.get_x() for patch in patches[1:]] == pytest.approx(ends[:-1])
        assert ends[-1] == pytest.approx(breakdown.total_bytes / GIB)


def test_the_legend_of_bars_names_what_is_seen() -> None:
    assert legend_of(draw_breakdown(SIZES)) == [
        "parameters",
        "gradients",
        "optimizer state",
        "activations",
        "temporaries",
    ]


def test_the_limit_is_drawn_to_scale() -> None:
    for limit, place in (("2GiB", 2.0), ("512MiB", 0.5)):
        (axes,) = draw_breakdown(SIZES, limit=limit).axes
        assert [line.get_xdata()[0] for line in axes.lines] == [place]
        assert axes.get_xlim()[1] >= place
    far = draw_breakdown([measured(unit_bytes=KIB)], limit="16GiB")
    numbers = [text.get_text().strip() for text in far.axes[0].texts]
    assert numbers == ["530.00 KiB", "16GiB"], "no room for numbers inside the bar"


def test_long_names_leave_room_for_the_bars() -> None:
    figure = draw_breakdown([measured(name=f"{LONG_NAME} {i}") for i in range(5)])
    figure.canvas.draw()
    box = figure.axes[0].get_position()
    assert box.width > 0.4
    lines = "\n".join(label.get_text() for label in figure.axes[0].get_yticklabels())
    assert max(map(len, lines.splitlines())) <= 22


# The timeline


def test_the_stack_reaches_what_is_alive() -> None:
    step = SIZES[0]
    figure = draw_timeline(step)
    (axes,) = figure.axes
    highest = max(path.get_paths()[0].vertices[:, 1].max() for path in axes.collections)
    assert highest == pytest.approx(step.peak_bytes / MIB)
    moments_ns = (500, 1200, 3200, 3700, 9000)
    tops = [top_at(axes, moment / 1e6) for moment in moments_ns]
    alive = [step.timeline.at(moment).total_bytes / MIB for moment in moments_ns]
    assert tops == pytest.approx(alive)


def test_a_long_timeline_keeps_its_peak() -> None:
    blocks = [
        Allocation(i, 1000 + (i == 7780), 10 * i + 5, 10 * i + 9, Category.OTHER, Phase.FORWARD, "")
        for i in range(10_000)
    ]
    timeline = MemoryTimeline(blocks, [Mark(0, Phase.FORWARD)], 0, 10**5 + 10)
    step = Measurement("long", timeline, Evidence.MEASURED, "")
    (axes,) = draw_timeline(step).axes
    (area,) = axes.collections
    assert len(area.get_paths()[0].vertices) < 10_000
    assert area.get_paths()[0].vertices[:, 1].max() == 1001
    assert "peak 1,001 B in forward" in texts(draw_timeline(step))


def test_phases_are_named_and_the_peak_is_marked() -> None:
    told = texts(draw_timeline(SIZES[0]))
    assert all(name in told for name in ("forward", "backward", "optimizer step"))
    assert "peak 530.00 MiB in backward" in told
    assert legend_of(draw_timeline(SIZES[0])) == [
        "temporaries",
        "activations",
        "optimizer state",
        "gradients",
        "parameters",
    ]


def test_a_phase_named_by_hand_is_named_however_short() -> None:
    marks = [Mark(0, Phase.FORWARD), Mark(5000, Phase.BACKWARD), Mark(5010, Phase.BACKWARD, "clip")]
    figure = draw_timeline(measured(marks=[*marks, Mark(5020, Phase.OPTIMIZER_STEP)]))
    assert "clip" in texts(figure)


def test_recompute_in_slices_gets_one_name() -> None:
    kinds = itertools.cycle([Phase.BACKWARD, Phase.RECOMPUTE])
    slices = [Mark(3000 + 100 * i, next(kinds)) for i in range(40)]
    figure = draw_timeline(measured(marks=[Mark(0, Phase.FORWARD), *slices]))
    names = [text.get_text() for text in figure.axes[0].texts]
    assert [name for name in names if "peak" not in name] == ["backward with recompute", "forward"]


@pytest.mark.parametrize("width", [300, 700, 1200, 2000])
def test_names_of_phases_do_not_overlap(width: int) -> None:
    phases = itertools.cycle(Phase)
    marks = [Mark(at, next(phases), "by hand" * (at % 3 == 0)) for at in range(0, 10_000, width)]
    figure = draw_timeline(measured(marks=marks))
    figure.canvas.draw()
    names = [text for text in figure.axes[0].texts if "peak" not in text.get_text()]
    boxes = [name.get_window_extent() for name in names]
    assert names
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]


# Curves


def test_the_curve_over_batch_sizes_adds_up() -> None:
    figure = draw_memory_by_batch(SIZES[::-1])
    (axes,) = figure.axes
    (line,) = axes.lines
    assert list(line.get_xdata()) == [4, 8, 32]
    assert line.get_ydata() == pytest.approx([m.peak_bytes / GIB for m in SIZES])
    corners = np.concatenate([area.get_paths()[0].vertices for area in axes.collections])
    for m in SIZES:
        top = corners[corners[:, 0] == m.items][:, 1].max()
        assert top == pytest.approx(m.peak_bytes / GIB)
    assert legend_of(figure) == [
        "total",
        "temporaries",
        "activations",
        "optimizer state",
        "gradients",
        "parameters",
    ]


def test_peaks_are_lines_with_a_card_and_a_prediction() -> None:
    simulated = [measured(size, evidence=Evidence.SIMULATED) for size in (64, 128)]
    figure = draw_peaks(
        {"fp32": SIZES, "mixed": simulated},
        limits={"a card": 2 * GIB},
        predicted_bytes={"a formula": {4: GIB, 128: 3 * GIB}},
    )
    (axes,) = figure.axes
    fp32, mixed, line, card = axes.lines
    assert fp32.get_ydata() == pytest.approx([m.peak_bytes / GIB for m in SIZES])
    assert list(mixed.get_xdata()) == [64, 128]
    assert [each.get_markerfacecolor() == "white" for each in (fp32, mixed)] == [False, True]
    assert list(line.get_ydata()) == [1, 3] and list(card.get_ydata()) == [2, 2]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["fp32", "mixed", "a formula (predicted)", "a card"]
    assert axes.get_ylim()[0] == 0
    assert "simulated" in evidence_of(figure) and "predicted" in evidence_of(figure)
    with pytest.raises(ValueError, match="two sizes or more"):
        draw_peaks({"fp32": SIZES[:1]})


def test_numbers_in_bars_have_one_decimal() -> None:
    numbers = [text.get_text() for text in draw_breakdown(SIZES).axes[0].texts]
    inside = [number for number in numbers if not number.startswith(" ")]
    assert inside and all(re.fullmatch(r"\d+\.\d", number) for number in inside), inside


def test_curves_that_hide_each_other_are_drawn_as_differences() -> None:
    curves = {"fp32": [3.0, 2.0, 1.0], "fp16": [3.0, 2.5, 0.5]}
    (axes,) = draw_losses(curves, minus="fp32").axes
    assert list(axes.lines[0].get_ydata()) == [0.0, 0.5, -0.5]
    assert axes.get_ylabel() == "loss minus that of fp32"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fp16"]
    with pytest.raises(ValueError, match="needs a curve of that name"):
        draw_losses(curves, minus="bf16")


def test_ticks_of_batch_sizes_keep_apart() -> None:
    figure = draw_memory_by_batch([measured(2**power) for power in range(11)])
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert not [pair for pair in itertools.pairwise(boxes) if pair[0].overlaps(pair[1])]
    assert {64, 1024} <= set(axes.get_xticks())


def test_a_trade_off_joins_the_points_that_no_other_beats():
    assert worth_taking([(1, 5), (2, 6), (2, 3), (3, 3), (4, 1)]) == [(1, 5), (2, 3), (4, 1)]
    figure = draw_tradeoff(SIZES, [3, 2, 1])
    points = [tuple(c.get_offsets()[0]) for c in figure.axes[0].collections]
    assert [x for x, _ in points] == [3, 2, 1]
    assert [y / points[0][1] for _, y in points] == pytest.approx(
        [m.peak_bytes / SIZES[0].peak_bytes for m in SIZES]
    )


def test_a_trade_off_in_time_shows_ranges_and_ranks_nothing():
    runs = [measured(seconds=(0.03, 0.01, 0.02)), measured(64, seconds=(0.05, 0.04))]
    axes = draw_tradeoff(runs).axes[0]
    medians = [c.get_offsets()[0][0] for c in axes.collections]
    assert medians == pytest.approx([20, 45])
    ranges = [list(line.get_xdata()) for line in axes.lines]
    assert ranges == [pytest.approx([10, 30]), pytest.approx([40, 50]), []]
    (entry,) = axes.get_legend().get_texts()
    assert entry.get_text() == "range of 2 to 3 steps", "no line of those worth taking"
    assert len({tuple(c.get_facecolor()[0]) for c in axes.collections}) == 1


def test_names_in_a_trade_off_keep_apart():
    figure = draw_tradeoff(SIZES + SIZES[:1], [0.0, 30.0, 60.0, 0.5])
    (axes,) = figure.axes
    names = [text for text in axes.texts if text.get_text()]
    boxes = [name.get_window_extent() for name in names]
    assert len(names) == 4
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    assert -4 < axes.get_xlim()[0] < 0, "the axis of a cost begins at nothing"
    assert axes.get_ylabel().startswith("measured peak")
    assert max(box.y1 for box in boxes) < axes.get_window_extent().y1, "no name on the title"


def test_a_trade_off_needs_a_cost_for_each():
    with pytest.raises(ValueError, match="2 costs do not belong to 3"):
        draw_tradeoff(SIZES, [1, 2])
    with pytest.raises(ValueError, match="two measurements"):
        draw_tradeoff(SIZES[:1])
    with pytest.raises(ValueError, match="none were timed"):
        draw_tradeoff([measured(seconds=()), measured()])
