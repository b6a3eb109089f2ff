"""Published runs like the one that is planned, beside the planner: Ampere, 175B to 530B parameters.

No constant of the planner was set on any of these rows. Narayanan's ZeRO-3 is left out: that
DeepSpeed uses one port was read off it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from evidence.validation import bloom, scale, table
from evidence.validation.comparison import Comparison
from evidence.validation.times import narayanan_table_2
from utils.catalog import model_shape
from utils.planner import Batch, Cluster, Plan, estimate
from utils.planner.estimate import BYTES_INTERVAL, SECONDS_INTERVAL
from utils.planner.flops import hardware_flops
from utils.units import GB, Evidence
from utils.views.style import course_style, print_evidence

# Zhao et al. 2023 (arXiv:2304.11277), section 5.4: TFLOP/s of a GPU, recomputation counted, by
# micro-batch. minGPT-175B on up to 512 A100 with 2 Tb/s of RoCE a node, 50,000 words, 2,048 tokens.
FSDP_TFLOPS = {1: 173.0, 2: 186.0}
FSDP_GPUS = 512

# On that day BLOOM's nodes were tuned ("all TFLOPs have changed for the better (1-5%)"): the source
# says not to compare runs across it.
TUNED = "02-25"
NOISE = 0.01  # repeats of one layout lie up to 0.6% apart; what lies closer than this has no order

__all__ = ["Pair", "Relative", "draw_relatives", "megatron_ratios", "ranked_pairs", "relatives"]

DOT, BAND = "#1a5c94", "#d9d9d9"
SPREAD = (-0.2, 0.0, 0.2, -0.1, 0.1)


class Relative(NamedTuple):
    """One published table beside the planner.

    Attributes:
        name: Whose runs.
        interval: Which multiples of a prediction the planner says that a run may take.
        ratios: Published over predicted, run by run: above 1 the planner said too little.
        tp_4: Which of them cut each matrix in 4; empty where none does.
        outside: What each run outside the interval was; empty where it is not told.
    """

    name: str
    interval: tuple[float, float]
    ratios: tuple[float, ...]
    tp_4: tuple[bool, ...] = ()
    outside: tuple[str, ...] = ()

    @property
    def inside(self) -> int:
        """Runs within the interval."""
        low, high = self.interval
        return sum(low <= ratio <= high for ratio in self.ratios)


class Pair(NamedTuple):
    """Two layouts of one model on the same GPUs, both run and both predicted.

    Attributes:
        layouts: (tp, pp, micro-batch) of both.
        published, predicted: Seconds of the second over those of the first.
        fitted: A constant of the planner was set on one of them.
    """

    layouts: tuple[tuple[str, str, str], tuple[str, str, str]]
    published: float
    predicted: float
    fitted: bool

    @property
    def agrees(self) -> bool:
        """Whether the planner names the faster one."""
        return (self.published < 1) == (self.predicted < 1)


def relatives() -> list[Relative]:
    """Seconds first, then bytes."""
    rates = [row for row in narayanan_table_2() if row.scheme == "PTD"]
    # rates: the planner's over the published ones are the times' the other way
    narayanan = tuple(row.predicted / row.published for row in rates)
    dates = {row["line"]: row["note"][:5] for row in table("bloom_prequel")}
    steps = _unfitted(bloom.seconds_comparisons())
    before = [row for row in steps if dates[_line(row)] < TUNED]
    after = [row for row in steps if dates[_line(row)] >= TUNED]
    megascale = _unfitted(scale.megascale_comparisons())
    fsdp = tuple(_fsdp_tflops(b) / rate for b, rate in FSDP_TFLOPS.items())
    return [
        Relative("Narayanan 2021, Megatron-LM: seconds", SECONDS_INTERVAL, narayanan),
        _relative("MegaScale 2024, Megatron-LM: seconds", SECONDS_INTERVAL, megascale),
        _relative("BLOOM to 24 February 2022: seconds", SECONDS_INTERVAL, before),
        _relative("BLOOM from 25 February 2022: seconds", SECONDS_INTERVAL, after),
        Relative("FSDP 2023, ZeRO-3: seconds", SECONDS_INTERVAL, fsdp),
        _relative("BLOOM 2022: bytes", BYTES_INTERVAL, _unfitted(bloom.memory_comparisons()), True),
    ]


def megatron_ratios(rows: Sequence[Relative]) -> list[float]:
    """Published over predicted seconds of all of Megatron-LM's runs."""
    return [ratio for row in rows if "Megatron-LM" in row.name for ratio in row.ratios]


def ranked_pairs() -> list[Pair]:
    """BLOOM's layouts of one model after its nodes were tuned, two by two, where they differ."""
    runs: dict[tuple[str, ...], tuple[dict[str, str], bool]] = {}
    shape = ("nhidden", "nlayers", "nheads", "gbs", "grad_mode", "n_gpus")
    for place, row in enumerate(table("bloom_prequel")):
        if row["sec_per_it"] and row["note"][:5] >= TUNED:
            key = tuple(row[name] for name in (*shape, "tp", "pp", "mbs"))
            runs.setdefault(key, (row, place % 2 == 0))  # the first note of a layout; see bloom
    pairs = []
    for (one, (a, seen)), (other, (b, known)) in combinations(runs.items(), 2):
        published = float(b["sec_per_it"]) / float(a["sec_per_it"])
        if one[: len(shape)] == other[: len(shape)] and abs(published - 1) >= NOISE:
            layouts = (one[-3], one[-2], one[-1]), (other[-3], other[-2], other[-1])
            pairs.append(
                Pair(layouts, published, bloom.seconds(b) / bloom.seconds(a), seen or known)
            )
    return pairs


def _unfitted(rows: Sequence[Comparison]) -> list[Comparison]:
    return [row for row in rows if not row.fitted]


def _line(row: Comparison) -> str:
    return row.case.removeprefix("line ").partition(":")[0]


def _relative(
    name: str, interval: tuple[float, float], rows: Sequence[Comparison], told: bool = False
) -> Relative:
    ratios = tuple(row.published / row.predicted for row in rows)
    tp_4 = tuple(" tp4 " in row.case for row in rows)
    low, high = interval
    outside = [
        " ".join(row.case.split()[-4:-1])
        for row, ratio in zip(rows, ratios, strict=True)
        if told and not low <= ratio <= high
    ]
    return Relative(name, interval, ratios, tp_4, tuple(outside))


def _fsdp_tflops(micro_batch: int) -> float:
    """The planner's TFLOP/s of a GPU for FSDP's runs."""
    model = replace(model_shape("megatron-175b"), name="minGPT-175B", vocabulary=50_000)
    cluster = Cluster(
        gpu="A100-80GB",
        nodes=FSDP_GPUS // 8,
        network_bytes_per_second=250 * GB,
        network_kind="RoCE",
    )
    plan = Plan(
        dp=FSDP_GPUS, zero_stage=3, recompute="full", micro_batch=micro_batch, framework="fsdp"
    )
    batch = Batch(sequences=FSDP_GPUS * micro_batch, sequence_length=2048)
    found = estimate(model, cluster, plan, batch)
    return hardware_flops(model, plan, batch) / found.step_seconds / FSDP_GPUS / 1e12


def draw_relatives(rows: Sequence[Relative]) -> Figure:
    """Every run as a mark, over the interval that the planner promises.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("draw_relatives() needs rows; relatives() gives them.")
    with course_style():
        figure = Figure(figsize=(10.5, 1.9 + 0.55 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for height, row in enumerate(rows):
            _draw_row(axes, height, row)
        axes.axvline(1.0, color="black", lw=1, zorder=2)
        names = [f"{row.name}\n{_count(row)}" for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=9)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set_xlabel("published / predicted; right of 1 the planner promised too much")
        axes.set_title("Published Ampere runs that no constant was set on")
        figure.legend(handles=_marks(), loc="outside lower center", ncols=3, fontsize=9)
        print_evidence(figure, [Evidence.PREDICTED, Evidence.PUBLISHED])
    return figure


def _draw_row(axes: Axes, height: int, row: Relative) -> None:
    low, high = row.interval
    axes.barh(height, high - low, left=low, height=0.7, color=BAND, zorder=1)
    fours = row.tp_4 or (False,) * len(row.ratios)
    ordered = sorted(zip(row.ratios, fours, strict=True))
    for place, (ratio, four) in enumerate(
        ordered
    ):  # spread so that neighbours do not hide each other
        y = height + SPREAD[place % len(SPREAD)]
        fill = "white" if four else DOT
        axes.plot(ratio, y, "D" if four else "o", ms=5, mfc=fill, mec=DOT, mew=1.2, zorder=3)
    beyond = [ratio for ratio in row.ratios if not low <= ratio <= high]
    for ratio, words in zip(beyond, row.outside, strict=False):
        axes.text(ratio, height - 0.42, words, fontsize=7.5, ha="center", va="bottom", zorder=4)


def _count(row: Relative) -> str:
    right = sum(ratio > 1 for ratio in row.ratios)
    return f"{row.inside} of {len(row.ratios)} runs inside, {right} right of 1"


def _marks() -> list[Patch | Line2D]:
    fine = {"marker": "o", "ls": "", "ms": 5, "mec": DOT, "mew": 1.2}
    return [
        Patch(color=BAND, label="the planner's interval"),
        Line2D([], [], **{**fine, "mfc": DOT}, label="a run; its height means nothing"),
        Line2D(
            [],
            [],
            **{**fine, "marker": "D", "mfc": "white"},
            label="a run with TP 4, as the winner",
        ),
    ]
