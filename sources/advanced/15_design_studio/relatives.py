"""Published runs like the one that is planned, beside the planner: A100 and H100, 2B to 1T parameters.

Constants of the planner were set on Korthikanti's rows, which say so, and on no other row that is
given here: BLOOM's rows that they were set on are dropped. Narayanan's ZeRO-3 is left out: that
DeepSpeed uses one port was read off it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from evidence.validation import bloom, scale, table
from evidence.validation.comparison import Comparison
from evidence.validation.tables import whole
from evidence.validation.times import korthikanti_comparisons, narayanan_table_2
from utils.catalog import ModelShape, link, model_shape
from utils.planner import Batch, Cluster, Plan, estimate
from utils.planner.flops import hardware_flops
from utils.planner.plan_estimate import BYTES_INTERVAL, SECONDS_INTERVAL
from utils.units import GB, Evidence
from utils.views.style import course_style, print_evidence

# Zhao et al. 2023 (arXiv:2304.11277), section 5.4: TFLOP/s of a GPU, recomputation counted, by
# micro-batch. minGPT-175B on up to 512 A100 with 2 Tb/s of RoCE a node, 50,000 words, 2,048 tokens.
FSDP_TFLOPS = {1: 173.0, 2: 186.0}
FSDP_GPUS = 512

# Megatron-Core's table of GPT on H100 names neither micro-batch nor chunks a stage.
UNSTATED_MICRO_BATCHES, UNSTATED_CHUNKS = (1, 2, 4), (1, 2, 4)

# On that day BLOOM's nodes were tuned ("all TFLOPs have changed for the better (1-5%)"): the source
# says not to compare runs across it.
TUNED = "02-25"

__all__ = [
    "Move",
    "Relative",
    "draw_relatives",
    "halved_slices",
    "megatron_ratios",
    "relatives",
]

DOT, BAND, SEEN, ROOM = "#1a5c94", "#d9d9d9", "#777777", "#bd1f01"
SPREAD = (-0.2, 0.0, 0.2, -0.1, 0.1)


class Relative(NamedTuple):
    """One published table beside the planner.

    Attributes:
        name: Whose runs.
        interval: Which multiples of a prediction the planner says that a run may take.
        ratios: Published over predicted, run by run: above 1 the planner said too little.
        tp_4: Which of them cut each matrix in 4; empty where none does.
        outside: What each run outside the interval was; empty where it is not told.
        fitted: Constants of the planner were set on these runs.
    """

    name: str
    interval: tuple[float, float]
    ratios: tuple[float, ...]
    tp_4: tuple[bool, ...] = ()
    outside: tuple[str, ...] = ()
    fitted: bool = False

    @property
    def inside(self) -> int:
        """Runs within the interval."""
        low, high = self.interval
        return sum(low <= ratio <= high for ratio in self.ratios)


class Move(NamedTuple):
    """One layout and the same with TP halved and DP doubled, on one side of the tuning.

    Attributes:
        name: Layers, stages and micro-batch.
        published, predicted: Seconds of the second over those of the first, minus 1.
        fitted: A constant of the planner was set on one of them.
    """

    name: str
    published: float
    predicted: float
    fitted: bool


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
    korthikanti = tuple(row.published / row.predicted for row in korthikanti_comparisons())
    core = tuple(_core_ratio(row) for row in table("megatron_core_h100"))
    return [
        Relative("Korthikanti 2022, Megatron-LM, A100", SECONDS_INTERVAL, korthikanti, fitted=True),
        Relative("Narayanan 2021, Megatron-LM, A100", SECONDS_INTERVAL, narayanan),
        _relative("MegaScale 2024, Megatron-LM, Ampere", SECONDS_INTERVAL, megascale),
        _relative("BLOOM to 24 February 2022, A100", SECONDS_INTERVAL, before),
        _relative("BLOOM from 25 February 2022, A100", SECONDS_INTERVAL, after),
        Relative("FSDP 2023, ZeRO-3, A100", SECONDS_INTERVAL, fsdp),
        Relative("Megatron-Core 2024, GPT on H100", SECONDS_INTERVAL, core),
        _relative("BLOOM 2022: bytes", BYTES_INTERVAL, _unfitted(bloom.memory_comparisons()), True),
    ]


def megatron_ratios(rows: Sequence[Relative]) -> list[float]:
    """Published over predicted seconds of Megatron-LM's runs that no constant was set on."""
    free = [row for row in rows if "Megatron-LM" in row.name and not row.fitted]
    return [ratio for row in free for ratio in row.ratios]


def halved_slices() -> list[Move]:
    """BLOOM's pairs with TP 8 to 4, DP doubled, and stages, micro-batch and heads kept.

    A layout that is noted more than once counts once, with the mean of its seconds.
    """
    rows = table("bloom_prequel")
    seen = {row["line"] for place, row in enumerate(rows) if place % 2 == 0}
    kept = ("nhidden", "nlayers", "nheads", "gbs", "grad_mode", "n_gpus", "pp", "mbs")
    runs: dict[str, dict[tuple[str, ...], list[dict[str, str]]]] = {"8": {}, "4": {}}
    for row in [*rows, *table("bloom_prequel_held_back")]:
        if row["sec_per_it"] and row["note"][:5] >= TUNED and row["tp"] in runs:
            runs[row["tp"]].setdefault(tuple(row[name] for name in kept), []).append(row)
    moves = []
    for layout in runs["8"].keys() & runs["4"].keys():
        old, new = runs["8"][layout], runs["4"][layout]
        told, said = (
            _mean_seconds(new) / _mean_seconds(old),
            bloom.seconds(new[0]) / bloom.seconds(old[0]),
        )
        name = "{nlayers} layers, PP {pp}, micro-batch {mbs}".format(**old[0])
        fitted = any(row["line"] in seen for row in (*old, *new))
        moves.append(Move(name, told - 1, said - 1, fitted))
    return sorted(moves, key=lambda move: move.published)


def _mean_seconds(notes: Sequence[dict[str, str]]) -> float:
    return mean(float(row["sec_per_it"]) for row in notes)


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


def _core_ratio(row: dict[str, str]) -> float:
    """Published over predicted seconds of one of Megatron-Core's runs.

    Of the micro-batches and chunks that the table leaves open, the fastest that fits is taken: no
    other choice makes the planner promise more.
    """
    hidden, tp, pp = whole(row["hidden"]), whole(row["tp"]), whole(row["pp"])
    model = ModelShape(
        name=row["size"],
        family="gpt",
        layers=whole(row["layers"]),
        hidden=hidden,
        heads=whole(row["heads"]),
        feedforward=4 * hidden,
        vocabulary=131_072,
        max_sequence=4096,
        positions="learned",
    )
    port = link("InfiniBand NDR").link_bytes_per_second
    nodes = whole(row["n_gpus"]) // 8
    cluster = Cluster(gpu="H100", nodes=nodes, network_bytes_per_second=8 * port)
    batch = Batch(sequences=whole(row["batch"]), sequence_length=4096)
    found = [
        estimate(
            model,
            cluster,
            Plan(
                dp=whole(row["dp"]),
                tp=tp,
                pp=pp,
                virtual_stages=chunks,
                micro_batch=micro_batch,
                sequence_parallel=tp > 1,
                overlap_tp=tp > 1,
                zero_stage=1,
            ),
            batch,
        )
        for micro_batch in UNSTATED_MICRO_BATCHES
        for chunks in (UNSTATED_CHUNKS if pp > 1 else (1,))
        if model.layers % (pp * chunks) == 0
    ]
    return max(plan.mfu for plan in found if plan.fits) / (float(row["mfu_pct"]) / 100)


def draw_relatives(rows: Sequence[Relative], *, room: float | None = None) -> Figure:
    """Every run as a mark, over the interval that the planner promises; bytes have their own axis.

    Args:
        rows: Of `relatives()`.
        room: Which multiple of its predicted bytes the plan in question has on its card.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("draw_relatives() needs rows; relatives() gives them.")
    by_unit = {
        "seconds of a step: published / predicted; right of 1 the run took longer": [
            row for row in rows if "bytes" not in row.name
        ],
        "bytes: published / predicted; right of 1 the run held more": [
            row for row in rows if "bytes" in row.name
        ],
    }
    panels = {label: part for label, part in by_unit.items() if part}
    with course_style():
        figure = Figure(figsize=(10.5, 2.6 + 0.52 * len(rows)), layout="constrained")
        heights = [len(part) + 0.6 * ("bytes" in label) for label, part in panels.items()]
        column = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (label, part) in zip(column, panels.items(), strict=True):
            _draw_panel(axes, part)
            axes.set_xlabel(label, fontsize=10)
            if room and "bytes" in label:
                axes.axvline(room, color=ROOM, ls="--", lw=1.8)
        figure.suptitle("Published runs beside the planner's prediction of the same runs", x=0.01,
                        ha="left", fontweight="bold")  # fmt: skip
        handles = [*_marks(), *_room_mark(room)]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
        print_evidence(figure, [Evidence.PREDICTED, Evidence.PUBLISHED])
    return figure


def _draw_panel(axes: Axes, rows: Sequence[Relative]) -> None:
    for height, row in enumerate(rows):
        _draw_row(axes, height, row)
    axes.axvline(1.0, color="black", lw=1, zorder=2)
    names = [f"{row.name}\n{_count(row)}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5 - 0.35 * any(row.outside for row in rows))
    axes.grid(False, axis="y")
    axes.margins(x=0.09)


def _draw_row(axes: Axes, height: int, row: Relative) -> None:
    low, high = row.interval
    axes.barh(height, high - low, left=low, height=0.7, color=BAND, zorder=1)
    fours = row.tp_4 or (False,) * len(row.ratios)
    ordered = sorted(zip(row.ratios, fours, strict=True))
    for place, (ratio, four) in enumerate(
        ordered
    ):  # spread so that neighbours do not hide each other
        y = height + SPREAD[place % len(SPREAD)]
        mark, fill, edge = ("D", "white", DOT) if four else ("o", DOT, DOT)
        if row.fitted:
            mark, fill, edge = "X", SEEN, SEEN
        axes.plot(ratio, y, mark, ms=5, mfc=fill, mec=edge, mew=1.2, zorder=3)
    beyond = [ratio for ratio in row.ratios if not low <= ratio <= high]
    for ratio, words in zip(beyond, row.outside, strict=False):
        axes.text(ratio, height - 0.4, words, fontsize=8.5, ha="center", va="bottom", zorder=4)


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
        Line2D(
            [], [], marker="X", ls="", ms=5, color=SEEN, label="in-sample: constants were set on it"
        ),
    ]


def _room_mark(room: float | None) -> list[Line2D]:
    if room is None:
        return []
    words = f"room on the card for the winner: x {room:.2f}"
    return [Line2D([], [], color=ROOM, ls="--", lw=1.8, label=words)]
