"""The design studio: a layout chosen by controls, drawn as memory, schedule, speed and cost."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from utils.catalog import ModelShape, model_shape
from utils.catalog import link as find_link
from utils.checked import check_public
from utils.planner import (
    Batch,
    Cluster,
    Estimate,
    Plan,
    cost,
    estimate,
    network,
    plan_name,
    why_it_does_not_fit,
)
from utils.planner.goodput import Goodput
from utils.rules import whole
from utils.units import Evidence, format_bytes, format_seconds
from utils.views.explorer import explore
from utils.views.plan_figures import stack_stages
from utils.views.schedule import draw_rows, drawn_micro_batches
from utils.views.style import course_style, print_evidence

MODELS = ("gpt-3-175b", "llama-2-70b", "llama-2-13b", "llama-2-7b")
CONTROLS: dict[str, list[Any]] = {
    "gpu": ["A100-80GB", "A100-40GB", "H100", "H200", "B200", "B300", "A10"],
    "nodes": [1, 2, 4, 8, 16, 32, 64, 128],
    "link": [
        "InfiniBand HDR x 8",
        "InfiniBand HDR x 4",
        "InfiniBand NDR x 8",
        "InfiniBand XDR x 8",
        "Ethernet 100G x 1",
        "Ethernet 10G x 1",
    ],
    "tp": [1, 2, 4, 8, 16],
    "pp": [1, 2, 4, 8, 12, 16, 24, 32],
    "cp": [1, 2, 4, 8],
    "virtual_stages": [1, 2, 3, 6],
    "zero_stage": [0, 1, 2, 3],
    "recompute": ["none", "selective", "full"],
    "offload": ["none", "optimizer", "parameters"],
    "micro_batch": [1, 2, 4, 8],
    "sequences": [64, 256, 512, 1024, 1536, 2048],
    "sequence_length": [2048, 4096, 8192, 16_384, 32_768, 131_072],
}
START = {"nodes": 8, "tp": 8, "pp": 8, "zero_stage": 0, "sequences": 1536}
LONGEST_SENTENCE = 92  # characters in a line of the figure


def design(
    model: ModelShape,
    *,
    gpu: str,
    nodes: int,
    link: str,
    tp: int,
    pp: int,
    virtual_stages: int,
    zero_stage: int,
    recompute: str,
    offload: str,
    micro_batch: int,
    sequences: int,
    cp: int = 1,
    sequence_length: int = 2048,
    usd_per_gpu_hour: float | None = None,
) -> Estimate:
    """The estimate of what the controls say; dp is what the GPUs leave.

    Without a price, the lowest in the list counts.

    Raises:
        ValueError: the choices do not go together; the sentence says why.
    """
    name, _, ports = link.rpartition(" x ")
    if not ports.isdecimal():
        raise ValueError(f"link is {link!r}; write name and ports, such as 'InfiniBand HDR x 8'.")
    cluster = Cluster(
        gpu=gpu,
        nodes=nodes,
        usd_per_gpu_hour=usd_per_gpu_hour,
        network_bytes_per_second=network(name, int(ports)),
        network_ports=min(8, int(ports)),
        network_kind=find_link(name).kind,
    )
    whole("design", tp=tp, pp=pp, cp=cp)
    plan = Plan(
        dp=max(1, cluster.gpus // (tp * pp * cp)),
        tp=tp,
        pp=pp,
        cp=cp,
        virtual_stages=virtual_stages,
        zero_stage=zero_stage,
        recompute=recompute,
        offload=offload,
        micro_batch=micro_batch,
        sequence_parallel=tp > 1,
    )
    return estimate(
        model, cluster, plan, Batch(sequences=sequences, sequence_length=sequence_length)
    )


def draw_design(
    found: Estimate, *, tokens: float = 300e9, failures: Goodput | None = None
) -> tuple[Figure, str]:
    """Memory of each stage and the schedule, under a line of speed and cost; and its words.

    Args:
        found: The design.
        tokens: Of the run whose days and dollars are said.
        failures: What they leave; by default with a node at hand for each that fails.
    """
    with course_style():
        figure = Figure(figsize=(10.5, 7.6), layout="constrained")
        top, bottom = figure.subplots(2, 1)
        handles = stack_stages(top, found) + draw_rows(bottom, found)
        bottom.set_title(_schedule_title(found))
        sentence = summary(found, tokens, failures)
        figure.suptitle(_lines(sentence), x=0.01, ha="left", fontsize=11)
        top.set_title(f"{found.model.name}, {plan_name(found)}: one GPU of each stage")
        figure.legend(handles=handles, loc="outside right upper")
        print_evidence(figure, [found.evidence])
    return figure, f"{plan_name(found)}. {sentence}"


def _schedule_title(found: Estimate) -> str:
    """What is drawn, since a step of hundreds of micro-batches would be lines too thin to see."""
    m, drawn = found.plan.micro_batches(found.batch), drawn_micro_batches(found)
    if drawn == m:
        return f"The step's {m} micro-batches, without sends"
    return f"The same schedule with {drawn} micro-batches; the step has {m}, and idles less"


def summary(found: Estimate, tokens: float, failures: Goodput | None = None) -> str:
    """Fit, speed and cost of a design, in a sentence or two."""
    fit = f"Fits, {format_bytes(found.peak.needed_bytes)} needed."
    if found.tight:
        fit = f"{fit[:-1]}, but within the allocator's reach: it may run many times slower."
    if not found.fits:
        fit = why_it_does_not_fit(found)
    spent = cost(found, tokens, failures)
    low, high = spent.days_interval
    return (
        f"{fit} {found.cluster.gpus} GPUs, {format_seconds(found.step_seconds)} a step, MFU "
        f"{found.mfu:.0%}, bubble and sends {found.bubble:.1%}. {tokens / 1e9:,.0f}B tokens: {low:,.0f} to "
        f"{high:,.0f} days; ${spent.usd / 1e6:,.2f}M at ${spent.usd_per_gpu_hour} a GPU hour "
        f"({spent.price_source})."
    )


def refused(sentence: str) -> tuple[Figure, str]:
    """A figure that holds nothing but the planner's sentence."""
    with course_style():
        figure = Figure(figsize=(10.5, 1.6), layout="constrained")
        figure.suptitle("No such plan", x=0.01, ha="left", fontweight="bold")
        figure.text(0.01, 0.7, _lines(sentence), va="top", fontsize=11)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure, f"No such plan. {sentence}"


def studio(
    models: Sequence[ModelShape | str] = MODELS,
    *,
    tokens: float = 300e9,
    prices: Mapping[str, float] | None = None,
    start: Mapping[str, Any] | None = None,
) -> widgets.VBox:
    """Controls for model, machines and layout over a figure that follows them.

    Args:
        models: Shapes, or names of the catalog, to choose from.
        tokens: Of the run whose days and dollars are said.
        prices: Dollars of a GPU hour, by GPU; the lowest in the list where none is given.
        start: Values to begin with, by control.

    Raises:
        ValueError: no model, or an unknown one, or a start that no control offers.
    """
    shapes = [model_shape(model) if isinstance(model, str) else model for model in models]
    by_name = {shape.name: shape for shape in shapes}

    def draw(model: str, **choices: Any) -> tuple[Figure, str]:
        try:
            usd = (prices or {}).get(choices["gpu"])
            found = design(by_name[model], **choices, usd_per_gpu_hour=usd)
            return draw_design(found, tokens=tokens)
        except ValueError as sentence:
            return refused(str(sentence))

    begin = {**START, **(start or {})}
    *controls, picture = explore(draw, begin, model=list(by_name), **CONTROLS).children
    grid = widgets.Layout(grid_template_columns="repeat(2, 430px)")
    return widgets.VBox([widgets.GridBox(controls, layout=grid), picture])


def _lines(sentence: str) -> str:
    """Lines for a figure; a dollar sign would begin a formula."""
    return textwrap.fill(sentence, LONGEST_SENTENCE).replace("$", r"\$")


__all__ = ["design", "draw_design", "studio"]

check_public(globals())
