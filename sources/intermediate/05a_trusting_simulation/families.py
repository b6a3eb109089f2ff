"""What an H200's allocator counted of 126 programs beside what the simulator says, by family."""

from __future__ import annotations

import csv
import re
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evidence.recorded import CARD, FOLDER, recorded_fine_tunes
from utils.views.style import course_style, empty_figure

# The first pattern that is found in a program's name decides.
FAMILIES = {
    r"gpt1b|llama7b": "GPT of 1.3B, Llama-2-7B",
    r"^fit ": "fine-tunes, transformers",
    r"peft|QLoRA": "peft's adapters",
    r"rcnn|fcos|retinanet|ssd|deeplab|fcn|SegFormer": "detection, segmentation",
    r"ViT|vit_|[Ss]win|DINO|CLIP|maxvit": "vision transformers",
    r"torchvision|ConvNeXt|GAN|U-Net": "convolutional networks",
    r"LSTM|GRU|RNN|Whisper|Wav2Vec": "recurrent networks, speech",
    r"GPT-2|OPT|BLOOM|T5|BART|BERT|Marian|ELECTRA|Transformer": "other language models",
    r"": "loops and optimizers",
}
# Three first steps overflowed on the card, so that its optimizer had no state; LBFGS is simulated with
# one iteration; what a detector finds is assumed.
ANOTHER_STEP = re.compile(
    r"^torchvision (resnet50|resnet152|googlenet)$|LBFGS|rcnn|fcos|retinanet|ssd"
)
CLOSE, NEAR, FAR = 0.005, 0.029, 0.2
# By what a card reserves beside what the simulator replays.
PLAIN, PACKED = "weights of 16 or 32 bits", "weights packed to 4 bits on the card"
ADAFACTOR = "Adafactor"
LOWEST, HIGHEST = "recorded / simulated, lowest", "recorded / simulated, highest"
_FILLED: dict[str, Any] = {"s": 36, "c": "#3f90da", "edgecolors": "#1f4e79"}
_HOLLOW: dict[str, Any] = _FILLED | {"c": "none"}
_LABELS = re.compile(r"^fit \d+: [^/]*/|^torchvision |^torch\.optim\.|_resnet50|_fpn")


def recorded_ratios() -> pd.DataFrame:
    """A row a program: its family, simulated over recorded peak, and whether both ran the same step."""
    with open(FOLDER / "simulated.csv", newline="", encoding="utf-8") as lines:
        found = [
            {
                "program": row["program"],
                "family": next(
                    f for pattern, f in FAMILIES.items() if re.search(pattern, row["program"])
                ),
                "ratio": int(row["simulated_peak_bytes"]) / int(row["recorded_peak_bytes"]),
                "same step": not ANOTHER_STEP.search(row["program"]),
            }
            for row in csv.DictReader(lines)
        ]
    return pd.DataFrame(found)


def reserved_margins() -> pd.DataFrame:
    """A row a kind of program: how many ran, and the least and the most of recorded over simulated reserved bytes."""
    found = pd.read_csv(FOLDER / "simulated_reserved.csv")
    ratio = found["recorded_reserved_bytes"] / found["simulated_reserved_bytes"]
    by_kind = ratio.groupby(found["kind"])
    return pd.DataFrame(
        {"programs": by_kind.size(), LOWEST: by_kind.min(), HIGHEST: by_kind.max()}
    ).sort_values(HIGHEST)


def draw_ratios(ratios: Any) -> Figure:  # a DataFrame, of whose results pandas gives several types
    """One point a program in a row a family; named are those off by over 2.9%, by over 20% where another step ran."""
    families = [family for family in FAMILIES.values() if (ratios["family"] == family).any()]
    with course_style():
        figure, axes = empty_figure(height=5.4)
        axes.axvspan(1 - CLOSE, 1 + CLOSE, color="#dcebf8", label=f"within {CLOSE:.1%}")
        for height, family in enumerate(reversed(families)):
            _points(axes, ratios[ratios["family"] == family], height)
        axes.scatter([], [], **_HOLLOW, label="not quite the step that ran")
        axes.set_yticks(range(len(families)), [_counted(ratios, f) for f in reversed(families)])
        axes.set_ylim(-0.7, len(families) - 0.4)
        axes.margins(x=0.08)
        axes.set_xlabel(
            "simulated / recorded peak\n(in brackets: within 0.5%, of those that ran the same step)"
        )
        axes.set_title(f"{len(ratios)} programs, simulated and recorded on an {CARD}")
        axes.legend(loc="upper left")
    return figure


def _points(axes: Axes, rows: Any, height: int) -> None:
    for same, look in [(True, _FILLED), (False, _HOLLOW)]:
        found = rows.loc[rows["same step"] == same, "ratio"]
        axes.scatter(found, [height] * len(found), zorder=3, **look)
    off = (rows["ratio"] - 1).abs()
    far = rows[(off > FAR) | ((off > NEAR) & rows["same step"])].sort_values("ratio")
    for turn, (_, row) in enumerate(far.iterrows()):
        name, up = _label(str(row["program"])), 7 if turn % 2 == 0 else -14
        place = (float(row["ratio"]), height)
        axes.annotate(
            name, place, xytext=(0, up), textcoords="offset points", ha="center", fontsize=8
        )


def _label(program: str) -> str:
    """Its short name; of a fine-tune the optimizer too, where that is none of the usual."""
    name = _LABELS.sub("", program)
    if fit := re.match(r"fit (\d+)", program):
        optimizer = recorded_fine_tunes()[int(fit.group(1))].recipe.optimizer
        name += "" if "adamw" in optimizer else f", {optimizer.capitalize()}"
    return name


def _counted(ratios: Any, family: str) -> str:
    found = ratios.loc[(ratios["family"] == family) & ratios["same step"], "ratio"]
    return f"{family} ({((found - 1).abs() < CLOSE).sum()} of {len(found)})"
