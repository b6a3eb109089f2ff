"""How near layouts come to the fastest while an assumption moves: ranges, a picture, and pairs that ran."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evidence.validation import ultrascale
from utils.checked import check_public
from utils.planner import Cluster, Estimate, Plan, step_time
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

__all__ = [
    "Pair", "draw_ratios", "every_layout", "halved_and_doubled", "nearness", "ranked_pairs", "verdict",
]  # fmt: skip

# petroff10 (Petroff 2021, arXiv:2107.02270); the words beside the bars say it again.
COLORS = {"tie": "#3f90da", "open": "#ffa90e", "loses": "#bd1f01"}
FURTHEST = 3.0  # where the axis ends
MICRO_BATCHES, CHUNKS = (1, 2, 4, 6, 8, 16, 48), (1, 2, 5)  # rows of one, layers' parts of a stage


class Pair(NamedTuple):
    """Two layouts of one model, batch and number of GPUs.

    `predicted` is the longer predicted step over the shorter, `published` the same two, measured:
    below 1 the planner has them the wrong way round.
    """

    predicted: float
    published: float


def verdict(ratios: Sequence[float], tie: float) -> str:
    """ "tie" where no assumption takes the row to `tie` times the fastest, "loses" where all do.

    Raises:
        ValueError: no ratios.
    """
    if not ratios:
        raise ValueError("verdict() takes one ratio or more; got none.")
    if max(ratios) < tie:
        return "tie"
    return "loses" if min(ratios) >= tie else "open"


def halved_and_doubled(cluster: Cluster) -> list[Cluster]:
    """The cluster as it is, then with its ports, NVLink and products at half and at twice their rate.

    Raises:
        ValueError: its device has no NVLink, or nobody measured its products.
    """
    gpu, found = cluster.device, [cluster]
    if gpu.gpu_link is None or gpu.matmul_ceiling_tflops is None or gpu.bf16_tflops is None:
        raise ValueError(f"{gpu.name} has no NVLink, or no product of it was measured.")
    for times in (0.5, 2.0):
        rate = times * gpu.gpu_link.link_bytes_per_second
        inside = replace(gpu, gpu_link=replace(gpu.gpu_link, link_bytes_per_second=rate))
        products = replace(
            gpu,
            bf16_tflops=times * gpu.bf16_tflops,
            matmul_ceiling_tflops=times * gpu.matmul_ceiling_tflops,
        )
        ports = times * cluster.network_bytes_per_second
        found.append(replace(cluster, network_bytes_per_second=ports))
        found += [replace(cluster, gpu=other) for other in (inside, products)]
    return found


def nearness(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Of steps by layout and assumption: each over the fastest one's under the same assumption."""
    fastest = [min(column) for column in zip(*seconds.values(), strict=True)]
    return {
        name: [s / best for s, best in zip(row, fastest, strict=True)]
        for name, row in seconds.items()
    }


def every_layout(estimated: Callable[..., Estimate], *, ranks: int = 64) -> list[Estimate]:
    """Every split of `ranks` into TP up to 8, PP up to 16 and DP: recomputed or not, in chunks or not.

    Args:
        estimated: of (tp, pp, dp, recompute, rows of a micro-batch, chunks of a stage). Those that
            it refuses with a ValueError, as rows that no replica has, are left out.
        ranks: in all.
    """
    found: dict[Plan, Estimate] = {}
    sizes = itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8, 16), ("none", "full"), MICRO_BATCHES, CHUNKS
    )
    for tp, pp, recompute, rows, chunks in sizes:
        if tp * pp <= ranks and (pp > 1 or chunks == 1):
            with contextlib.suppress(ValueError):
                each = estimated(tp, pp, ranks // (tp * pp), recompute, rows, chunks)
                found[each.plan] = each  # a plan that two sizes lead to counts once
    return list(found.values())


def ranked_pairs(*, held_out: bool = False) -> list[Pair]:
    """Every two layouts of the Ultra-Scale sweep that ran the same model, GPUs and batch.

    With `held_out` only of the odd lines: on the even ones constants of the planner were set.

    Runs under 15% of the peak, and plans within the allocator's reach, are left out: there the
    network failed, and the planner promises no speed.
    """
    groups: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for line, row in ultrascale.measured():
        fitted = line % 2 == 0
        if (held_out and fitted) or float(row["mfu_pct"]) < 15 or ultrascale.tight(row):
            continue
        model, plan, batch = ultrascale.setup(row)
        published = batch.tokens / plan.ranks / float(row["tok_s_gpu"])
        predicted = step_time(model, ultrascale.cluster(plan.ranks), plan, batch).total
        same = row["model"], plan.ranks, batch.sequences
        groups.setdefault(same, []).append((predicted, published))
    return [_pair(a, b) for rows in groups.values() for a, b in itertools.combinations(rows, 2)]


def _pair(a: tuple[float, float], b: tuple[float, float]) -> Pair:
    (slow, slow_ran), (fast, fast_ran) = max(a, b), min(a, b)
    return Pair(slow / fast, slow_ran / fast_ran)


def draw_ratios(
    ratios: Mapping[str, Mapping[str, Sequence[float]]], *, tie: float, title: str = ""
) -> Figure:
    """A panel for each batch: for each layout its step over the fastest one's.

    Args:
        ratios: by batch, then by layout: the ratio as things are, then under other assumptions.
        tie: ratios below it are shaded.
        title: of the figure.

    Raises:
        ValueError: nothing to draw, or other layouts in another batch.
    """
    names = [list(rows) for rows in ratios.values()]
    if not names or not names[0] or any(other != names[0] for other in names):
        raise ValueError(f"draw_ratios() takes the same layouts for each batch; got {names}.")
    with course_style():
        figure = Figure(figsize=(10.5, 1.6 + 0.38 * len(names[0])), layout="constrained")
        panels = figure.subplots(1, len(ratios), sharey=True, squeeze=False)[0]
        for axes, (batch, rows) in zip(panels, ratios.items(), strict=True):
            _draw_rows(axes, rows, tie)
            axes.set_title(batch, fontsize=11, fontweight="normal")
        panels[0].set_yticks(range(len(names[0])), names[0])
        panels[0].set_ylim(len(names[0]) - 0.5, -0.5)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _draw_rows(axes: Axes, rows: Mapping[str, Sequence[float]], tie: float) -> None:
    axes.axvspan(1.0, tie, color="#dcebf8", zorder=0)
    for place, found in enumerate(rows.values()):
        least, most, word = min(found), max(found), verdict(found, tie)
        # A cap that projects would draw the bar past its numbers.
        axes.plot([least, min(most, FURTHEST)], [place, place], color=COLORS[word], lw=7,
                  solid_capstyle="butt")  # fmt: skip
        axes.plot([min(found[0], FURTHEST)], [place], "|", color="black", ms=13, mew=2, zorder=3)
        span = f"{least:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f} to {most:.2f}"
        said = "always the fastest" if most == 1 else word
        axes.annotate(f"{span}: {said}", (min(most, FURTHEST), place), xytext=(8, 0),
                      textcoords="offset points", va="center", fontsize=10)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(0.97, FURTHEST)
    axes.set_xticks([1, 1.2, 1.5, 2, 3], ["1", "1.2", "1.5", "2", "3"])
    axes.minorticks_off()
    axes.grid(False, axis="y")
    axes.set_xlabel("step / that of the fastest")


check_public(globals())
