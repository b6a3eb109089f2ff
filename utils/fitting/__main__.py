"""Does a model fit a card? `python -m utils.fitting Qwen/Qwen2.5-7B --card "RTX 4090" --method qlora`.

The exit code is 0 where it fits, 1 where it does not, and 2 for input that cannot be understood.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from utils.catalog.devices import DEVICES
from utils.fitting.recipe import (
    LOSSES,
    METHODS,
    OPTIMIZERS,
    PRECISIONS,
    Recipe,
    mixed_precision,
)

FITS, DOES_NOT_FIT, NOT_UNDERSTOOD = 0, 1, 2
LISTED = 100  # characters of a cure's name and line


def main(arguments: list[str] | None = None) -> int:
    """Print the answer and return the exit code."""
    asked = _parser().parse_args(arguments)
    from utils.fitting.model_configs import ModelConfigError, auto_class, model_config
    from utils.fitting.model_fit import fit_model
    from utils.fitting.train_script import script
    from utils.simulation import SimulationError

    try:
        found = fit_model(
            asked.model, _recipe(asked), card=asked.card, cures=asked.cures, cards=asked.over
        )
        text = ""
        if asked.script:
            text = script(found.runs, auto_class(model_config(asked.model)), asked.model)
            Path(asked.script).write_text(text, encoding="utf-8")
    except (ModelConfigError, SimulationError, ValueError, OSError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return NOT_UNDERSTOOD
    if asked.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print(_answer(found))
        if text:
            print(f"\nwrote {asked.script}: {found.runs.recipe}")
    return FITS if found.fits else DOES_NOT_FIT


def _answer(found: Any) -> str:
    from utils.fitting.answer_table import lesser, not_tried, rows

    lines = [str(found.verdict)]
    if found.cures:
        lines += ["", "What would make it need less, what fits first, then the quickest:"]
        lines += [_row(row) for row in rows(found)]
        lines += [line for line in (lesser(found), *not_tried(found)) if line]
    if found.together:
        chosen = found.together.verdict
        lines += ["", "Together:", _row(found.together.row()), chosen.sentence, chosen.speed]
        lines += [f"    {cure.line}" for cure in found.together.cures]
    return "\n".join(lines)


def _row(row: dict[str, str]) -> str:
    fits = {"yes": "fits", "just": "just fits", "no": "does not fit"}[row["fits"]]
    return (
        f"  {row['needed']:>11}, {row['saved']:>11} less, time {row['added a step']:>12}  "
        f"{row['cure']} ({fits}; {row['costs']})"
    )


def _recipe(asked: argparse.Namespace) -> Recipe:
    names = {field.name for field in dataclasses.fields(Recipe)}
    given = {name: value for name, value in vars(asked).items() if name in names}
    if given["precision"] is None:
        given["precision"] = mixed_precision(asked.card)
    if given["targets"] != "all-linear":
        given["targets"] = tuple(given["targets"].split(","))
    return Recipe(**given)


def _parser() -> argparse.ArgumentParser:
    default = Recipe()
    parser = argparse.ArgumentParser(prog="python -m utils.fitting", description=__doc__)
    add = parser.add_argument
    add("model", help="a name such as Qwen/Qwen2.5-7B, a folder, or a config.json")
    add("--card", default="RTX 4090", help=f"one of {', '.join(DEVICES)}")
    add("--method", default=default.method, choices=METHODS)
    add("--precision", choices=PRECISIONS, help="bf16-mixed, and fp16-mixed on a card without bf16")
    add("--optimizer", default=default.optimizer, choices=OPTIMIZERS)
    add("--loss", default=default.loss, choices=LOSSES)
    add("--rank", type=int, default=default.rank, help="of the adapters")
    add(
        "--targets",
        default="all-linear",
        help='names of layers with commas between, or "all-linear"',
    )
    add("--tokens", type=int, default=default.tokens, help="in a sequence")
    add("--micro-batch", type=int, default=default.micro_batch, help="sequences at a time")
    add("--accumulation", type=int, default=default.accumulation, help="micro-batches of a step")
    add(
        "--checkpointing",
        type=int,
        default=default.checkpointing,
        help="each n-th block; 0 for none",
    )
    add("--offload-activations", action="store_true", help="keep them in host memory")
    add("--offload-states", action="store_true", help="keep them in host memory (FSDP2)")
    add("--step-in-backward", action="store_true", help="update each weight as its gradient comes")
    add("--cards", type=int, default=default.cards, help="how many share the states (FSDP2)")
    add(
        "--sequence-cards",
        type=int,
        default=default.sequence_cards,
        help="how many of them share the tokens of each text (Ulysses)",
    )
    add(
        "--over",
        type=int,
        default=2,
        metavar="CARDS",
        help="over how many cards states, and the tokens of each text, are tried as cures",
    )
    add("--no-cures", dest="cures", action="store_false", help="the verdict alone")
    add("--json", action="store_true", help="plain data, bytes and seconds as numbers")
    add("--script", metavar="FILE", help="write the training program there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
