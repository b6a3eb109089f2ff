"""Checks of lesson and lab 17, "On a real cluster, within a budget"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from utils.labs.cases import Question, takes
from utils.labs.checking import starts_ranks
from utils.labs.kinds import Kind, WrongKind, keys, whole
from utils.labs.verdict import Verdict, correct, not_yet, shown

from . import repairs, stubs
from .budget import cheapest_run, matrix_reviewed, training_share  # noqa: F401
from .clusters import slurm_problem

TIMEOUT_SECONDS = 20.0  # of a training script's ranks
WARNED_SECONDS = 120
STARTS = 12  # of a job that fails in each: one that counts them, in a file perhaps, has given up

steps_twice = Question(
    "Lesson 17: steps that a job computes twice after a node died.",
    whole("a number of steps"),
    right=2,
    wrong={
        6: "That would be without any save. Which steps are in the save of step 4?",
        4: "Those are in the save: they are not computed again.",
        1: "The save holds the states after steps 0 to 3. Which of 0 to 5 are not in it?",
        0: "Their losses were printed, and their states died with the ranks.",
    },
    nudge="The save of step 4 holds the states after four steps: 0 to 3.",
    note="steps 4 and 5 ran again; with `--every 100` it would be up to 100",
    expected="steps",
)


def _read_script(value: Any) -> str:
    if not isinstance(value, str):
        raise WrongKind("Write the whole text in triple quotes.")
    return value.lstrip("\n")


_SCRIPT = Kind("the text of a script", _read_script)


@starts_ranks
@takes(keys({"job.slurm": _SCRIPT, "train.py": _SCRIPT}))
def repaired_job(answer: Mapping[str, Any]) -> Verdict:
    """Exercise 1: a job that meets, saves when it is told to, and goes on."""
    job, train = answer["job.slurm"], answer["train.py"]
    verdict = _header(job) or _ranks(job) or _codes(job) or _signalled(job) or _training(train)
    if verdict:
        return verdict
    if problem := slurm_problem():
        return correct(f"by a reading of both and a run with stubs. {problem.partition(':')[0]}.")
    return _for_real(job, train)


def _header(job: str) -> Verdict | None:
    if not job.startswith("#!"):
        return not_yet(
            "job.slurm: the first line",
            got=shown(job.partition("\n")[0]),
            nudge="sbatch takes no script without an interpreter: #!/bin/bash.",
        )
    if late := repairs.late_options(job):
        return not_yet(
            "job.slurm: a line that sbatch does not read",
            got=late[0],
            nudge="sbatch stops reading its options at the first command. Which command is the first?",
        )
    options = repairs.options_of(job)
    wanted = {"--nodes": "2", "--ntasks-per-node": "1"}
    changed = [
        f"{name}={options.get(name)}"
        for name, value in wanted.items()
        if options.get(name) != value
    ]
    if changed:
        return not_yet(
            "job.slurm: its size",
            got=", ".join(changed),
            expected="2 nodes, one task on each",
            nudge="One task a node stays, and starts two ranks.",
        )
    if "--requeue" not in options:
        return not_yet(
            "job.slurm: a node dies",
            nudge="Without #SBATCH --requeue Slurm does not start the job "
            "again when a node is lost.",
        )
    warned = re.match(r"(?:B:)?(?:SIG)?USR1@(\d+)", options.get("--signal", ""))
    if warned and int(warned[1]) < WARNED_SECONDS:
        return not_yet(
            "job.slurm: its time is over",
            got=options["--signal"],
            expected="two minutes before",
            nudge="The number behind @ is in seconds. A save takes longer than a warning of a moment.",
        )
    if not warned:
        return not_yet(
            "job.slurm: its time is over",
            got=options.get("--signal", "no --signal"),
            nudge="Ask Slurm to warn the job before it kills it: #SBATCH --signal=USR1@120.",
        )
    if options.get("--output") != "out.txt":
        return not_yet(
            "job.slurm: its output",
            got=options.get("--output", "no --output"),
            nudge="Leave the name out.txt: the check reads it.",
        )
    if options.get("--open-mode") != "append":
        return not_yet(
            "job.slurm: the second start",
            nudge="Where does the output of the first start go, when Slurm "
            "opens the file again? See --open-mode.",
        )
    return None


def _try(job: str, **case: Any) -> stubs.Tried:
    return stubs.try_script(job, tasks=stubs.NODES, **case)


def _ranks(job: str) -> Verdict | None:
    found = _try(job)
    if found.is_endless:
        return not_yet(
            "job.slurm does not end, though all ranks do", nudge="What does it wait for?"
        )
    ranks = [row[0] for row in found.ranks]
    if len(ranks) != stubs.RANKS:
        return not_yet(
            "job.slurm: what it starts",
            got=found.said.strip()[-200:] or f"python train.py {len(ranks)} times",
            expected="python -u train.py, twice on each node",
            nudge="srun starts one shell a node, and each shell two ranks.",
        )
    if ranks != ["0", "1", "2", "3"]:
        return not_yet(
            "job.slurm: RANK on both nodes",
            got=", ".join(ranks),
            expected="0, 1, 2, 3",
            nudge="Four ranks need four numbers. Which two does the second node's shell give out? And is $ filled in by the "
            "batch script, which is one process, or by each node's shell?",
        )
    sizes = {row[1] for row in found.ranks}
    if sizes != {"4"}:
        return not_yet(
            "job.slurm: WORLD_SIZE",
            got=", ".join(sorted(sizes)),
            expected="4",
            nudge="SLURM_NTASKS counts tasks, and here a task is not a rank.",
        )
    addresses = {row[2] for row in found.ranks}
    if addresses != {found.ranks[0][4]}:
        nudge = (
            "Each node has its own localhost."
            if addresses & {"localhost", "127.0.0.1"}
            else "All ranks must name the same node, the one on which rank 0 listens. Who can know it: each node's shell, or the "
            "batch script?"
        )
        return not_yet(
            "job.slurm: MASTER_ADDR on n1 and n2",
            got=", ".join(sorted(addresses)),
            expected=f"{found.ranks[0][4]}, the node of rank 0, on all",
            nudge=nudge,
        )
    if len({row[3] for row in found.ranks}) != 1:
        return not_yet(
            "job.slurm: MASTER_PORT differs from rank to rank",
            nudge="Compute it once, from the job's number.",
        )
    if found.requeued:
        return not_yet(
            "job.slurm: all ranks ended well, and it was requeued",
            nudge="Look at the exit code of srun first.",
        )
    if found.patience_seconds < repairs.SAVING_SECONDS:
        return not_yet(
            "job.slurm: a rank ended with code 75 a minute before the others",
            got=f"srun ends the others after {found.patience_seconds:g} s",
            expected=f"{repairs.SAVING_SECONDS} s or more",
            nudge="They still save. To srun the first 75 is a failure: with --kill-on-bad-exit=1 it ends all others at once, and "
            "itself with 143. See the lesson's job.slurm, and --wait.",
        )
    return None


def _codes(job: str) -> Verdict | None:
    every = range(stubs.RANKS)
    for failed in (0, 1):
        found = _try(job, codes={failed: 1})
        if not found.ended or not found.ended[0]:
            return not_yet(
                f"job.slurm: rank {failed} ended with code 1, and its node's task",
                got="with code 0",
                expected="another code than 0",
                nudge="`wait` alone forgets how processes ended; `wait $pid` tells it of one. Keep each number ($!), and "
                "the code of whichever failed.",
            )
    saved = _try(job, codes=dict.fromkeys(every, repairs.STOPPED))
    if set(saved.ended) != {repairs.STOPPED}:
        return not_yet(
            "job.slurm: both ranks of a node ended with code 75",
            got=f"its task ended with {saved.ended[0]}",
            expected="75",
            nudge="Hand the ranks' own code on: `exit` of the node's shell.",
        )
    if [word.strip() for word in saved.requeued] != [stubs.JOB_NUMBER]:
        piped = re.search(r"\|\s*tee\b", job) and not re.search("pipefail|PIPESTATUS", job)
        nudge = (
            "What is `$?` after a pipe: the code of its first command, or of its last? `tee` always ends well."
            if piped
            else "The ranks saved and wait to be started again: `scontrol requeue $SLURM_JOB_ID`. Keep srun's code before another "
            "command replaces $?."
        )
        return not_yet(
            "job.slurm: srun ended with code 75",
            got=shown(saved.requeued) if saved.requeued else "no requeue",
            expected="scontrol requeue of this job, once",
            nudge=nudge,
        )
    if len(_try(job, codes={0: 1}, restarts=50, starts=STARTS).requeued) == STARTS:
        return not_yet(
            "job.slurm: a rank failed with code 1 on the 51st start, and was requeued then and at all later ones",
            nudge="A job whose code is wrong would run for ever. Count its failures, in a file perhaps.",
        )
    if not _try(job, codes=dict.fromkeys(every, repairs.STOPPED), restarts=50).requeued:
        return not_yet(
            "job.slurm: the ranks saved and ended with code 75 on the 51st start",
            got="no requeue",
            nudge="A job that saves when it is told to gets on. Limit those alone that fail.",
        )
    failed = _try(job, codes={0: 1}, restarts=50)
    if not failed.requeued and failed.patience_seconds < repairs.LOST_SECONDS:
        return not_yet(
            "job.slurm: node n2 died on the 51st start; rank 0 found its connection closed and ended with code 1",
            got=f"srun waited {failed.patience_seconds:g} s more, and the script did not requeue",
            expected=f"a requeue, or an srun that waits the {repairs.LOST_SECONDS} s until Slurm itself has seen it",
            nudge="$SLURM_RESTART_COUNT counts all starts, those after a save and after a dead node, too. Count failures alone."
            if "SLURM_RESTART_COUNT" in job
            else "Once the script has ended by itself, Slurm requeues no more for the dead node. So requeue here, up to a limit.",
        )
    return None


def _signalled(job: str) -> Verdict | None:
    found = _on_signal(job, "every process of every task", children=True)
    return found or _on_signal(
        job, "the first process of every task, Slurm's default", children=False
    )


def _on_signal(job: str, heard_by: str, children: bool) -> Verdict | None:
    to_script = "B:" in repairs.options_of(job)["--signal"]
    found = _try(job, signal_to="script" if to_script else "tasks", children=children)
    if found.is_endless or found.ended == [0, 0] or (to_script and not found.ended):
        return not_yet(
            f"job.slurm: SIGUSR1 came to {'the script' if to_script else heard_by}, and no rank saw it",
            nudge=_HAND_ON if to_script else _ALONE,
        )
    if found.ended != [repairs.STOPPED] * 2 or len(found.saved) < stubs.RANKS:
        got = f"the tasks ended with {', '.join(map(str, found.ended))}, and {len(found.saved)} ranks had saved by then"
        return not_yet(
            f"job.slurm: SIGUSR1 came to {heard_by}; ranks save, and end with 75",
            got=got,
            expected="75, 75, and 4 ranks that saved",
            nudge=_SHELL,
        )
    if not found.requeued:
        return not_yet(
            "job.slurm: SIGUSR1 came, the ranks saved, and nothing was requeued",
            nudge="A handler interrupts `wait`, which then returns 138: wait once more for srun's own code.",
        )
    return None


_HAND_ON = (
    "`--signal=B:USR1@...` sends the signal to the script alone, which must catch it and hand it on while "
    "srun runs; without B: it goes to the tasks."
)
_ALONE = (
    "The first process of a task is the node's shell, and here Slurm signals it alone. Its ranks hear the signal only if "
    "the shell hands it on: `kill -USR1` with their numbers."
)
_SHELL = (
    "A task's first process is the shell: the signal comes to it on every cluster. Without a `trap` it dies of it (138). "
    "With one it lives, but its `wait` returns 138 at once: wait for that rank once more."
)


def _training(train: str) -> Verdict | None:
    try:
        compile(train, "train.py", "exec")
    except SyntaxError as error:
        return not_yet(
            f"train.py, line {error.lineno}: {error.msg}", nudge="Python cannot read it."
        )
    found = repairs.try_training(train, TIMEOUT_SECONDS)
    stopped = (repairs.STOPPED, repairs.STOPPED)
    last = found.said.strip().splitlines()[-1:] or [""]
    says = "train.py: two ranks, of which rank 1 alone got SIGUSR1"
    apart = "Signals do not reach all ranks at the same step. Ask `ranks.any(...)` on every rank, in every step."
    if None in found.codes[:2]:
        return not_yet(f"{says}: a rank hangs", got=last[0], nudge=apart)
    if found.codes[:2] != stopped:
        killed = -10 in found.codes[:2] or 138 in found.codes[:2]
        nudge = (
            "Nothing catches the signal, so it kills the rank. See signal.signal(signal.SIGUSR1, ...)."
            if killed
            else apart
            if repairs.STOPPED in found.codes[:2]
            else "All ranks save after the same step, and end with code 75: raise SystemExit(75)."
        )
        return not_yet(
            says,
            got=f"exit codes {found.codes[0]} and {found.codes[1]}: {last[0]}",
            expected="75 and 75",
            nudge=nudge,
        )
    done = [step for step in range(repairs.STEPS) if found.steps.count(step) != 1]
    if done or found.codes[2:] != (0, 0):
        nudge = "Save `step + 1`, the number of steps that are done, and go on from there."
        return not_yet(
            f"{says}, then both were started again: steps done twice or never",
            got=shown(done) if found.codes[2:] == (0, 0) else last[0],
            nudge=nudge,
        )
    return None


def _for_real(job: str, train: str) -> Verdict:
    found = repairs.run_for_real(job, train)
    to_script = "B:" in repairs.options_of(job)["--signal"]
    if found.state != "COMPLETED":
        return not_yet(
            f"under Slurm the job is {found.state} after {found.restarts} restarts",
            got=found.said.strip()[-200:],
            nudge=_HAND_ON if to_script else "The end of out.txt stands above.",
        )
    wrong = [step for step in range(repairs.STEPS) if found.steps.count(step) != 1]
    if wrong or not found.restarts:
        return not_yet(
            "under Slurm, with a signal after step 8: steps done twice or never",
            got=shown(wrong) if wrong else "no restart",
            nudge=_HAND_ON
            if to_script
            else "Compare the steps in out.txt with what save.json held.",
        )
    return correct(f"under a real Slurm: signalled, requeued, {repairs.STEPS} steps, each once")
