"""Speed, tables, widgets, grey print, and what the views say to bad input."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from view_cases import FORMULA, SIZES, bars_of, measured

from evidence.record import recorded_table
from evidence.record.store import PROVENANCE, Record, RecordError, write
from utils.lessons.lesson_02.curves import draw_memory_by_batch
from utils.units import MIB, Category, Evidence
from utils.views import (
    compare,
    draw_breakdown,
    explore,
    predicted,
    reconcile,
)
from utils.views.style import LOOKS

# Speed


@pytest.mark.parametrize(
    ("items", "text"), [(1, "5 images/s"), (247, "1,240 images/s"), (24_680, "123,000 images/s")]
)
def test_throughput_has_three_digits_and_no_exponent(items: int, text: str) -> None:
    assert measured(items).throughput == text
    assert text in str(measured(items))
    assert measured(items, seconds=()).throughput == ""


# Grey print


def lightness(color: str) -> float:
    """CIE L*, 0 to 100: what is left of a colour in grey."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance


def test_any_two_categories_differ_in_grey() -> None:
    assert set(LOOKS) == set(Category)
    alike = [
        (str(one), str(two))
        for one, two in itertools.combinations(Category, 2)
        if LOOKS[one].hatch == LOOKS[two].hatch
        and abs(lightness(LOOKS[one].color) - lightness(LOOKS[two].color)) < 12
    ]
    assert not alike


def test_bars_are_filled_as_the_legend_says() -> None:
    figure = draw_breakdown([FORMULA])
    first, second = bars_of(figure)[0]
    handles = figure.legends[0].get_patches()
    for patch, handle in zip((first, second), handles, strict=True):
        assert patch.get_facecolor() == handle.get_facecolor()
        assert patch.get_hatch() == handle.get_hatch()


# Tables


def test_compare() -> None:
    shown = compare([FORMULA, SIZES[0], measured(8, "untimed", seconds=())], title="Three")
    assert list(shown.table["name"]) == ["my formula", "a step", "untimed"]
    assert list(shown.table["evidence"]) == ["predicted", "measured", "measured"]
    assert list(shown.table["peak"]) == ["220.00 MiB", "530.00 MiB", "650.00 MiB"]
    assert list(shown.table["states"]) == ["100.00 MiB", "400.00 MiB", "400.00 MiB"]
    assert list(shown.table["activations"]) == ["120.00 MiB", "120.00 MiB", "240.00 MiB"]
    assert list(shown.table["peak in"]) == ["", "backward", "backward"]
    assert list(shown.table["median step"]) == ["", "200 ms", ""]
    assert list(shown.table["throughput"]) == ["", "20 images/s", ""]
    assert shown.alt.startswith("Three,") and "a step 530.00 MiB" in shown.alt
    page = shown._repr_mimebundle_()
    assert "<table" in page["text/html"] and 'alt="Three,' in page["text/html"]
    assert page["text/plain"] == str(shown)


def test_reconcile_at_the_peak() -> None:
    shown = reconcile({"parameters": 100 * MIB, "gradients": 200 * MIB}, SIZES[0])
    table = shown.table.set_index("category")
    assert table.loc["parameters", "measured / predicted"] == "1.000"
    assert table.loc["gradients", "measured / predicted"] == "0.500"
    assert table.loc["optimizer state", "measured / predicted"] == "not predicted"
    assert table.loc["total", "measured"] == "530.00 MiB"
    assert table.loc["total", "measured / predicted"] == f"{530 / 300:.3f}"
    assert list(shown.table["category"])[-1] == "total"


def test_reconcile_at_another_moment_and_with_other_evidence() -> None:
    simulated = measured(evidence=Evidence.SIMULATED)
    shown = reconcile(FORMULA, simulated, at_ns=500)
    table = shown.table.set_index("category")
    assert table.loc["activations", "simulated"] == "0 B"
    assert table.loc["total", "simulated"] == "300.00 MiB"
    assert "simulated" in shown.alt and "measured" not in shown.alt


# Recorded rows


def put(root: Path, device: str, device_type: str, rows: list[dict[str, Any]]) -> None:
    known = dict.fromkeys(PROVENANCE, "known") | {"device": device, "device_type": device_type}
    known |= {"date": "2026-03-01T10:00:00+00:00"}
    write(Record("resnet50", known, {}, rows), root)


ROWS = [
    {
        "batch": 64,
        "completed": True,
        "peak_bytes": 3 * MIB,
        "median_step_seconds": 0.25,
        "images_per_second": 256.0,
        "breakdown": {"parameters": 3},
    },
    {"batch": 128, "completed": False, "failed_in": "backward"},
]


def test_without_a_gpu_row_the_table_says_how_to_make_one(tmp_path: Path) -> None:
    put(tmp_path, "CPU x86_64", "cpu", ROWS)
    shown = recorded_table("resnet50", root=tmp_path)
    assert shown.table.empty
    assert str(shown) == (
        "No GPU row of resnet50 exists yet: a machine with a GPU makes one with "
        "`python -m evidence.record resnet50`."
    )
    assert shown._repr_mimebundle_()["text/html"] == f"<p>{shown}</p>"


def test_recorded_rows_carry_evidence_gpu_and_date(tmp_path: Path) -> None:
    put(tmp_path, "NVIDIA H200", "cuda", ROWS)
    put(tmp_path, "NVIDIA A100", "cuda", ROWS[:1])
    table = recorded_table("resnet50", root=tmp_path).table
    assert list(table["GPU"]) == ["NVIDIA A100", "NVIDIA H200", "NVIDIA H200"]
    assert set(table["evidence"]) == {"recorded"} and set(table["date"]) == {"2026-03-01"}
    assert list(table["peak"]) == ["3.00 MiB", "3.00 MiB", ""]
    assert list(table["median step"]) == ["250 ms", "250 ms", ""]
    assert list(table["completed"]) == ["True", "True", "False"]
    assert list(table["failed in"]) == ["", "", "backward"]
    assert "breakdown" not in table


def test_recorded_rows_by_setting_and_column(tmp_path: Path) -> None:
    put(tmp_path, "NVIDIA H200", "cuda", ROWS)
    shown = recorded_table("resnet50", where={"batch": 64}, columns=["peak_bytes"], root=tmp_path)
    assert list(shown.table.columns) == ["peak", "evidence", "GPU", "date"]
    assert len(shown.table) == 1 and "<table" in shown._repr_mimebundle_()["text/html"]
    none = recorded_table("resnet50", where={"batch": 7}, root=tmp_path)
    assert str(none).startswith("No GPU row of resnet50 with batch 7 exists yet")
    with pytest.raises(ValueError, match="No recorded row of resnet50 has speed"):
        recorded_table("resnet50", columns=["speed"], root=tmp_path)
    with pytest.raises(RecordError, match="Did you mean resnet50"):
        recorded_table("resnet5", root=tmp_path)


# Widgets


def test_moving_a_control_changes_the_picture() -> None:
    def draw(batch: int, model: str) -> tuple[Figure, str]:
        return draw_breakdown([measured(batch, model)]), f"{model} at batch {batch}"

    box = explore(draw, batch=[4, 8, 32], model=["small", "large"])
    slider, menu, picture = box.children
    assert isinstance(slider, widgets.SelectionSlider) and isinstance(menu, widgets.Dropdown)
    seen = [picture.value]
    slider.value = 32
    seen.append(picture.value)
    menu.value = "large"
    seen.append(picture.value)
    assert [
        f'alt="{words}"' in value
        for words, value in zip(
            ("small at batch 4", "small at batch 32", "large at batch 32"),
            seen,
            strict=True,
        )
    ] == [True] * 3
    assert len({value.partition("base64,")[2] for value in seen}) == 3
    slider.value = 4
    menu.value = "small"
    assert picture.value == seen[0], "the same choice draws the same picture"


# Bad input


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: draw_breakdown([]), "needs at least one measurement or prediction"),
        (lambda: compare([]), "needs a list of measurements"),
        (lambda: draw_memory_by_batch([]), "measurements of two sizes or more"),
        (lambda: draw_memory_by_batch([measured(4)] * 2), "measurements of two sizes or more"),
        (lambda: predicted("mine", {"gradient": 1}), "'gradient' is no category; use one of"),
        (lambda: predicted("mine", {"gradients": -1}), "cannot be negative; 'gradients' is -1"),
        (lambda: reconcile({"weights": 1}, SIZES[0]), "'weights' is no category"),
        (lambda: draw_breakdown(SIZES, limit="16 gigs"), "'16 gigs' is not a size"),
        (lambda: explore(lambda: None), "at least one control"),
        (lambda: explore(lambda batch: None, batch=[]), "at least one control"),
    ],
)
def test_bad_input_is_a_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
