"""`python -m utils.lessons.lesson_16.records.dead_runs`: three jobs that die, for lab 16; their logs and traces are kept.

Each is a real job of four ranks on two hosts under torchrun (network namespaces where the system
allows), with one planted cause. Paths, names of the machine and C++ stacks are taken out of what it wrote.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import sysconfig
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from utils.files import scratch
from utils.ranks.elastic import run_elastic
from utils.ranks.recovery import Fault

from ..dead_runs import FILE, SCRIPT

HOSTS, RANKS_PER_HOST = 2, 2
PER_RANK = re.compile(r"^\[rank (\d+)\] (.*)$")
# What PyTorch's C++ adds to its messages: stacks, and that hosts of namespaces have no names.
NOISE = re.compile(
    r"^(frame #|Exception raised from|<omitting python)|hostname of the client socket"
)
MOST_BYTES = 850_000_000
# What each run is started with: the fault in its data, or what happens to it.
RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "A": (("--bad-row", "2:7"), {}),
    "B": ((), {"faults": [Fault("kill a host", 8)]}),
    "C": (("--long-rows", "1"), {"most_bytes": MOST_BYTES}),
}


def main() -> None:
    """Run all three and write the file."""
    runs = {name: one(*given) for name, given in RUNS.items()}
    origin = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "torch": torch.__version__}
    FILE.write_text(json.dumps({**origin, "runs": runs}, indent=0) + "\n", encoding="utf-8")
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes")


def one(arguments: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """A run's logs by rank, what its agents wrote by host, and its traces by rank."""
    with scratch("dead") as folder:
        script = folder / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        run = run_elastic(
            script,
            folder,
            *arguments,
            hosts=HOSTS,
            ranks_per_host=RANKS_PER_HOST,
            least_hosts=HOSTS,
            restarts=0,
            timeout_seconds=150,
            **given,
        )
        traces = {
            path.stem.partition("_")[2]: json.loads(path.read_text())
            for path in sorted(Path(folder).glob("trace_*.json"))
        }
        logs: dict[str, list[str]] = {str(rank): [] for rank in range(HOSTS * RANKS_PER_HOST)}
        agents: dict[str, list[str]] = {str(host): [] for host in range(HOSTS)}
        for host, text in sorted(run.output.items()):
            for line in anonymous(text, str(folder)).splitlines():
                found = PER_RANK.match(line)
                if found and NOISE.search(found[2]):
                    continue
                if found:
                    logs[found[1]].append(found[2])
                elif line.strip() and not NOISE.search(line):
                    agents[str(host)].append(line)
    return {"logs": logs, "agents": agents, "traces": traces}


def anonymous(text: str, folder: str) -> str:
    """The text without this machine's paths and name."""
    root = str(Path(__file__).resolve().parents[2])
    places = {folder: "/job", root: "/course", socket.gethostname(): "host"}
    for name in ("purelib", "platlib", "stdlib"):
        places[sysconfig.get_path(name)] = "/python"
    for file in (torch.__file__, sys.executable):
        places[str(Path(file).resolve().parents[1])] = "/python"
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    return re.sub(r"/tmp/[\w.-]+", "/logs", text)


if __name__ == "__main__":
    main()
