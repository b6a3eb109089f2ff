"""`python -m evidence.record [EXPERIMENT ...]`: measure on this machine's device, write evidence/results/."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: else the profiler writes lines

import torch

from evidence.record.agreement import disagreements
from evidence.record.experiment import Experiment, run_trials
from evidence.record.provenance import device_title, provenance
from evidence.record.registry import EXPERIMENTS, load
from evidence.record.store import Record, RecordError, check_writable, read, write
from utils.memory.source import prepare

LEFT_OUT = "rows left out"  # of a configuration: how many there was no time for


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Run the experiments that are named, or all that suit the device; return the exit code."""
    options = _parser().parse_args(arguments)
    device = find_device()
    try:
        if options.list:
            print(_listing(device))
            return 0
        if device.type == "cpu":
            prepare()  # before any tensor: memory that is older is never seen to be freed
        chosen = _chosen(options.experiments, device)
        return _record_all(chosen, device, options.commit, options.minutes, root)
    except RecordError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped. Nothing of the experiment that was running is kept.", file=sys.stderr)
        return 130


def _record_all(
    experiments: Sequence[Experiment],
    device: torch.device,
    commit: str,
    minutes: float,
    root: Path | None,
) -> int:
    """Run them while time is left, then print what disagrees; the exit code."""
    ends, problems = time.monotonic() + 60 * minutes, []
    for number, experiment in enumerate(experiments):
        if time.monotonic() > ends:
            left = ", ".join(e.name for e in experiments[number:])
            print(f"The {minutes:g} minutes are over; not begun: {left}.")
            break
        path = record(experiment, device, commit, root, ends)
        found = read(path)
        left_out = found.configuration.get(LEFT_OUT, 0)
        missing = f", without {left_out} rows: the minutes were over" if left_out else ""
        print(f"{experiment.name}: wrote {'/'.join(path.parts[-3:])}{missing}")
        problems += disagreements(found)
    for problem in problems:
        print(f"DISAGREES  {problem}")
    if problems:
        print("The meter was never proved on this GPU: please report these lines.")
    return 1 if problems else 0


def record(
    experiment: Experiment,
    device: torch.device,
    commit: str = "",
    root: Path | None = None,
    ends: float = math.inf,
) -> Path:
    """Run one experiment and write what it found; return the file.

    Of an experiment that `ends`, a time of `time.monotonic`, cuts short, the rows that ran are
    written, and the configuration counts the others.

    Raises:
        RecordError: the result could not be written or would not say where it comes from.
            Both are found out before the experiment runs.
    """
    origin = provenance(device, f"python -m evidence.record {experiment.name}", commit)
    check_writable(experiment.name, origin["device"], root)
    trials, title = experiment.trials(device), f"{experiment.name} on {origin['device']}"
    rows = run_trials(trials, device, title, ends)
    configuration = dict(experiment.configuration)
    if len(rows) < len(trials):
        configuration[LEFT_OUT] = len(trials) - len(rows)
    return write(Record(experiment.name, origin, configuration, rows), root)


def find_device() -> torch.device:
    """The device whose memory can be measured: a CUDA GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _chosen(names: Sequence[str], device: torch.device) -> list[Experiment]:
    experiments = [load(name) for name in names or EXPERIMENTS]
    suited = [experiment for experiment in experiments if experiment.trials(device)]
    left_out = [e.name for e in experiments if e not in suited]
    if names and left_out:
        raise RecordError(f"{', '.join(left_out)}: nothing to measure on {device_title(device)}.")
    return suited


def _listing(device: torch.device) -> str:
    lines = [f"Experiments, with their rows on {device_title(device)}:"]
    for experiment in map(load, EXPERIMENTS):
        count = len(experiment.trials(device))
        lines.append(f"  {experiment.name:<16}{count:>4} rows  {experiment.summary}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evidence.record", description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="none: all")
    parser.add_argument("--list", action="store_true", help="list the experiments and stop")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no row after this time"
    )
    parser.add_argument("--commit", default="", help="the commit of a copy that has no git")
    return parser


if __name__ == "__main__":
    sys.exit(main())
