"""Lab 17's Slurm script run by stand-ins: `srun`, `scontrol`, `scancel` and ranks that note what they see.

Bash runs the learner's script as Slurm would, on two nodes. Each rank notes what it was told, and ends
with the code that the case asks for; a signal comes to the script, or to its tasks: to the first process of
each, as by Slurm's default, or to all of them.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.files import scratch

NODES, RANKS = 2, 4
JOB_NUMBER = "4711"
SECONDS = 20.0
# For a shell that sets its trap once its ranks run: on a busy machine they may come first.
READY_SECONDS = 0.5

STUBS = {
    # Starts the tasks of all nodes at once, as Slurm would; a signal goes to each task's first process or group.
    "srun": """#!/bin/bash
waits=0 kills=
while [ $# -gt 0 ]; do
  case "$1" in
    -K0 | --kill-on-bad-exit=0) kills= ;;
    -K* | --kill-on-bad-exit*) kills=1 ;;
    --wait=*) waits=${1#--wait=} ;;
    -W | --wait) waits=$2; shift ;;
    -W*) waits=${1#-W} ;;
    -*) ;;
    *) break ;;
  esac
  shift
done
words=("$@")
echo "${kills:-0} $waits" > "$STUB_NOTES/srun"
set -m
trap ': > "$STUB_NOTES/signal"' USR1
per_node=$((SLURM_NTASKS / SLURM_NNODES)) tasks=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
  node=$((task / per_node))
  SLURM_PROCID=$task SLURM_LOCALID=$((task % per_node)) SLURM_NODEID=$node SLURMD_NODENAME=n$((node + 1)) "${words[@]}" &
  tasks+=($!)
done
while [ "$STUB_SIGNAL" ] && [ ! -e "$STUB_NOTES/signal" ] && [ "$(jobs -pr)" ]; do sleep 0.05; done
[ -e "$STUB_NOTES/signal" ] && for task in "${tasks[@]}"; do kill -USR1 -- "$STUB_GROUP$task"; done
most=0
for task in "${tasks[@]}"; do
  wait "$task"; code=$?
  kill -KILL -- "-$task" 2> /dev/null  # what a task leaves behind ends with it
  echo "$code" >> "$STUB_NOTES/ended"
  [ "$code" -gt "$most" ] && most=$code
done
exit "$most"
""",
    "scontrol": """#!/bin/bash
case "$1 $2" in
  "show hostname"*) printf 'n1\\nn2\\n' ;;
  "requeue "*) echo "${@:2}" >> "$STUB_NOTES/requeued" ;;
esac
""",
    "scancel": '#!/bin/bash\n: > "$STUB_NOTES/signal"\n',
    "hostname": "#!/bin/bash\necho ${SLURMD_NODENAME:-n1}\n",
}
# In place of a training script: notes what it was told, and ends with the code that the case asks for.
RANK_STUB = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
told = [os.environ.get(name, "none") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURMD_NODENAME")]
with open(os.environ["STUB_NOTES"] + "/ranks", "a") as notes:
    notes.write(";".join(told) + "\\n")
deadline = time.monotonic() + 4
while os.environ["STUB_SIGNAL"] and not asked and time.monotonic() < deadline:
    time.sleep(0.02)
if asked:
    time.sleep(0.4 if told[0] in "02" else 0.05)  # it saves, and one takes longer
    with open(os.environ["STUB_NOTES"] + "/saved", "a") as notes:
        notes.write(told[0] + "\\n")
    sys.exit(75)
codes = dict(pair.split(":") for pair in os.environ["STUB_CODES"].split())
sys.exit(int(codes.get(told[0], 0)))
"""


@dataclass(frozen=True)
class Tried:
    """What stubs saw of one run of a script.

    Attributes:
        ranks: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and node of each rank, in order of RANK.
        ended: exit codes of the tasks.
        saved: ranks that came to their end after a signal.
        requeued: what `scontrol requeue` was given.
        said: what the script printed, errors included.
        patience_seconds: how long its last srun lets tasks go on when one has failed; without end where it says nothing.
        is_endless: it did not end.
    """

    ranks: list[tuple[str, ...]]
    ended: list[int]
    saved: list[str]
    requeued: list[str]
    said: str
    patience_seconds: float = math.inf
    is_endless: bool = False


def try_script(
    text: str,
    *,
    codes: Mapping[int, int] | None = None,
    restarts: int = 0,
    signal_to: str = "",
    children: bool = True,
    tasks: int = RANKS,
    starts: int = 1,
) -> Tried:
    """Run a Slurm script with stubs, on two nodes.

    Args:
        text: The script.
        codes: The exit code of each rank; 0 where nothing is said.
        restarts: How often Slurm has started it again.
        signal_to: SIGUSR1 comes to the "script", or by Slurm to the "tasks", once all ranks run.
        children: Of a task all processes get the signal (SignalChildrenProcesses=yes), not the first alone.
        tasks: Of srun, on both nodes together.
        starts: How often it is started in one folder, as long as it requeues itself.
    """
    with scratch("stubs") as folder:
        _write_stubs(folder)
        (folder / "job.slurm").write_text(text, encoding="utf-8")
        pairs = " ".join(f"{rank}:{code}" for rank, code in (codes or {}).items())
        for start in range(starts):
            known = _environment(folder, tasks, restarts + start) | {
                "STUB_CODES": pairs,
                "STUB_SIGNAL": signal_to,
                "STUB_GROUP": "-" if children else "",
            }
            if not _ran_to_its_end(folder, known, signal_to):
                return Tried([], [], [], [], "", is_endless=True)
            if len(_lines(folder / "requeued")) <= start:
                break
        ranks = sorted(tuple(line.split(";")) for line in _lines(folder / "ranks"))
        ended = [int(line) for line in _lines(folder / "ended")]
        return Tried(
            ranks,
            ended,
            sorted(_lines(folder / "saved")),
            _lines(folder / "requeued"),
            (folder / "said").read_text(errors="replace"),
            _patience_seconds(_lines(folder / "srun")),
        )


def _patience_seconds(noted: list[str]) -> float:
    """Of srun's options: 0 with --kill-on-bad-exit, else what --wait says, of which 0 is without end."""
    kills, _, waits = (noted or ["0 0"])[-1].partition(" ")
    if kills == "1":
        return 0.0
    return float(waits) if waits.isdigit() and int(waits) else math.inf


def _ran_to_its_end(folder: Path, known: dict[str, str], signal_to: str) -> bool:
    with (folder / "said").open("wb") as said:
        script = subprocess.Popen(
            ["bash", "job.slurm"], cwd=folder, env=known, stdout=said, stderr=subprocess.STDOUT
        )
    try:
        _send(signal_to, script, folder)
        script.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return False
    finally:
        script.kill()
        script.wait()
    return True


def _write_stubs(folder: Path) -> None:
    (folder / "bin").mkdir()
    (folder / "rank.py").write_text(RANK_STUB, encoding="utf-8")
    rank = f'#!/bin/bash\nexec "{sys.executable}" -IS "{folder}/rank.py"\n'
    for stub, body in {**STUBS, "python": rank, "python3": rank}.items():
        (folder / "bin" / stub).write_text(body, encoding="utf-8")
        (folder / "bin" / stub).chmod(0o755)


def _environment(folder: Path, tasks: int, restarts: int) -> dict[str, str]:
    """What Slurm tells a batch script; its restarts it tells from the second start on."""
    again = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    return again | {
        "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', '')}",
        "HOME": str(folder),
        "STUB_NOTES": str(folder),
        "SLURM_JOB_ID": JOB_NUMBER,
        "SLURM_JOBID": JOB_NUMBER,
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_NNODES": str(NODES),
        "SLURM_JOB_NUM_NODES": str(NODES),
        "SLURM_NTASKS_PER_NODE": str(tasks // NODES),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NODELIST": "n[1-2]",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }


def _send(signal_to: str, script: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while signal_to and script.poll() is None and time.monotonic() < deadline:
        if len(_lines(folder / "ranks")) == RANKS:
            time.sleep(READY_SECONDS)
            if signal_to == "script":
                script.send_signal(signal.SIGUSR1)
            else:
                (folder / "signal").touch()
            return
        time.sleep(0.02)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
