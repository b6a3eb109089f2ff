"""The state formulas against ZeRO's Table 1, and Korthikanti's Figure 1."""

from __future__ import annotations

from dataclasses import dataclass

from evidence.validation.comparison import Comparison
from evidence.validation.tables import table
from utils.catalog import model_shape
from utils.planner import Batch, Plan, memory
from utils.planner.frameworks import framework
from utils.planner.stage_bytes.states import state_bytes
from utils.units import GB, GIB, Category

PARAMETERS = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
COLUMNS = {"pos_gb": 1, "pos_g_gb": 2, "pos_g_p_gb": 3}


@dataclass(frozen=True)
class Cell:
    """One cell of ZeRO's Table 1: what is printed, what we print."""

    model: str
    dp: int
    zero_stage: int
    printed: str
    ours: str


def printed(gigabytes: float) -> str:
    """A number as that table prints it: from 100 on cut to whole GB, below it rounded to three
    digits, at most two after the point."""
    if gigabytes >= 100:
        return str(int(gigabytes))
    digits = 2 if gigabytes < 10 else 1
    return f"{int(gigabytes * 10**digits + 0.5 + 1e-9) / 10**digits:.{digits}f}".rstrip("0").rstrip(
        "."
    )


def zero_cells() -> list[Cell]:
    """Every cell of ZeRO's Table 1 beside the planner's."""
    rules, cells = framework("zero-paper"), []
    for row in table("zero_table1"):
        for column, stage in COLUMNS.items():
            held = state_bytes(PARAMETERS[row["model"]], rules, stage, int(row["dp"]))
            ours = printed(sum(held.values()) / GB)
            cells.append(Cell(row["model"], int(row["dp"]), stage, row[column], ours))
    return cells


FIGURE_1 = {
    "22B": ("megatron-22b", 1, 1),
    "175B": ("megatron-175b", 8, 3),
    "530B": ("megatron-530b", 35, 3),
    "1T": ("megatron-1t", 64, 1),
}
QUANTITIES = {
    "fig1_param_opt_gib": "states GiB",
    "fig1_act_none_gib": "activations GiB",
    "fig1_act_seqsel_gib": "activations, selective",
}
BATCHES = {"22B": (4, 4), "175B": (64, 1), "530B": (280, 1), "1T": (512, 1)}


def korthikanti_comparisons() -> list[Comparison]:
    """Figure 1: state of an average rank, activations of the first stage, in GiB."""
    rows = []
    for row in table("korthikanti_figure1"):
        name = row["model"]
        plain = korthikanti_plan(name, optimized=False)
        optimized = korthikanti_plan(name, optimized=True)
        model = model_shape(FIGURE_1[name][0])
        average = 18 * model.parameter_count / plain.ranks / GIB
        found = {"fig1_param_opt_gib": average}
        for column, plan in (("fig1_act_none_gib", plain), ("fig1_act_seqsel_gib", optimized)):
            batch = Batch(sequences=BATCHES[name][0], sequence_length=2048)
            first = memory(model, plan, batch)[0]
            found[column] = first.bytes_by_category[Category.ACTIVATIONS] / GIB
        rows += [
            Comparison("Korthikanti Figure 1", QUANTITIES[column], name, float(row[column]), value)
            for column, value in found.items()
        ]
    return rows


def korthikanti_plan(name: str, optimized: bool) -> Plan:
    """The plan of Table 3 of Korthikanti et al. 2022, without or with their two techniques."""
    _, pp, interleave = FIGURE_1[name]
    return Plan(
        tp=8,
        pp=pp,
        virtual_stages=interleave,
        micro_batch=BATCHES[name][1],
        dropout=True,
        attention="unfused",
        sequence_parallel=optimized,
        framework="megatron",
        recompute="selective" if optimized else "none",
    )
