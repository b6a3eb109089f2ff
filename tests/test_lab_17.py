"""Exercise 1 of lab 17: the repaired job, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

import shutil

import pytest
from lab_cases import answers, nudged, solved_lab

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_17 import checks as lab_17
from utils.lessons.lesson_17 import repairs
from utils.lessons.lesson_17.clusters import slurm_problem
from utils.lessons.lesson_17.stubs import try_script

LAB = solved_lab("advanced/17_cluster_and_budget")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")


@pytest.fixture(scope="module")
def solved() -> dict[str, str]:
    starts = ("# BEGIN SOLUTION\nrepaired_job", "# BEGIN SOLUTION\nchanges")
    return answers(LAB, *starts, broken=repairs.broken)["repaired_job"]


@pytest.fixture
def without_slurm(monkeypatch):
    monkeypatch.setattr(lab_17, "slurm_problem", lambda: "Slurm is not installed here: recorded.")


def changed(solved: dict[str, str], name: str, *changes: tuple[str, str]) -> dict[str, str]:
    text = solved[name]
    for old, new in changes:
        assert old in text, f"the case changes nothing: {old!r}"
        text = text.replace(old, new)
    return {**solved, name: text}


def test_the_solution_is_correct_by_stubs(solved, without_slurm):
    verdict = lab_17.repaired_job(solved)
    assert verdict.status is Status.CORRECT, verdict
    assert "stubs" in verdict.note


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm_problem()), reason=slurm_problem())
def test_the_solution_is_correct_under_a_real_slurm(solved):
    verdict = lab_17.repaired_job(solved)
    assert verdict.status is Status.CORRECT and "a real Slurm" in verdict.note, verdict


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm_problem()), reason=slurm_problem())
def test_a_script_that_hands_the_signal_on_is_correct_under_a_real_slurm(solved):
    verdict = lab_17.repaired_job(changed(solved, "job.slurm", *HANDED_ON))
    assert verdict.status is Status.CORRECT and "a real Slurm" in verdict.note, verdict


def test_an_untouched_lab_is_not_attempted():
    untouched = {"job.slurm": ..., "train.py": ...}
    assert check("17.repaired_job", untouched).verdict.status is Status.NOT_ATTEMPTED


def test_the_handed_out_job_is_broken_in_all_ways():
    text, train = repairs.broken("job.slurm"), repairs.broken("train.py")
    nudged(lab_17.repaired_job({"job.slurm": text, "train.py": train}), "first command")
    assert repairs.options_of(text) == {
        "--job-name": "lab-17", "--nodes": "2", "--ntasks-per-node": "1", "--time": "5", "--output": "out.txt",
    }  # fmt: skip
    found = try_script(text, codes={0: 75, 1: 75}, tasks=2)
    assert [row[:3] for row in found.ranks] == [
        ("0", "2", "n1"), ("1", "2", "n1"), ("1", "2", "n2"), ("2", "2", "n2"),
    ]  # fmt: skip
    assert (found.ended, found.requeued) == ([0, 0], []), "its shells forget how their ranks ended"
    assert try_script(text, signal_to="tasks", tasks=2).ended == [138, 138]
    codes = repairs.try_training(train).codes
    assert codes[:2] != (75, 75), "ranks are told at different moments"


SHELL = "RANK=$((2 * SLURM_PROCID + i))"
ADDRESS = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
REQUEUE = 'if [ $code = 75 ] || { [ $code != 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; }; then'
EACH = """  code=0
  for rank in "${ranks[@]}"; do wait $rank || code=$?; done
  exit $code
"""
TRAP = '  trap "" USR1  # for the ranks, not for this shell\n'
JOBS = [
    ("options after a command", [("#SBATCH --signal", "export LC_ALL=C\n#SBATCH --signal")], "first command"),
    ("no requeue", [(" --requeue", "")], "--requeue"),
    ("no signal", [("#SBATCH --signal=USR1@120\n", "")], "--signal=USR1@120"),
    ("the output is opened anew", [("--open-mode=append ", "")], "--open-mode"),
    ("a task for each rank", [("--ntasks-per-node=1", "--ntasks-per-node=2")], "One task a node stays"),
    ("one rank a node", [("for i in 0 1;", "for i in 0;")], "each shell two ranks"),
    ("the numbers overlap", [("2 * SLURM_PROCID", "SLURM_PROCID")], "Four ranks need four numbers"),
    ("numbers of the script", [(SHELL, "RANK='$((2 * SLURM_PROCID))'")], "Four ranks need four numbers"),
    ("the lesson's size", [("WORLD_SIZE=$((2 * SLURM_NTASKS))", "WORLD_SIZE=$SLURM_NTASKS")], "a task is not a rank"),
    ("localhost", [(ADDRESS, "export MASTER_ADDR=localhost")], "its own localhost"),
    ("each its own name", [(SHELL, f"MASTER_ADDR=$(hostname) {SHELL}")], "same node"),
    ("rank 0 elsewhere", [("2 * SLURM_PROCID + i", "(2 * SLURM_PROCID + i + 2) % 4")], "on which rank 0 listens"),
    ("wait forgets", [(EACH, "  wait\n")], "forgets how processes ended"),
    ("only the last one counts", [(EACH, '  for rank in "${ranks[@]}"; do wait $rank; done\n')], "whichever failed"),
    ("a code of its own", [("wait $rank || code=$?", "wait $rank || code=1")], "own code on"),
    ("the pipe hides it", [("set -o pipefail\n", "")], "after a pipe"),
    ("the code is lost", [("' | tee -a losses.txt\n", "'\necho done\n")], "replaces $?"),
    ("no requeue at 75", [("scontrol requeue $SLURM_JOB_ID", "true")], "wait to be started again"),
    ("for ever", [(REQUEUE, "if [ $code != 0 ]; then")], "for ever"),
    ("limited in all cases", [(REQUEUE, 'if [ $code != 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then')], "Limit those alone"),
    ("always", [(REQUEUE, "if true; then")], "exit code of srun first"),
    ("the shell dies", [(TRAP, "")], "The shell dies of it"),
    ("the shell stops waiting", [(TRAP, "  trap : USR1\n")], "returns 138 at once"),
    ("to the script alone", [("--signal=USR1", "--signal=B:USR1")], "hand it on"),
    ("no interpreter", [("#!/bin/bash\n", "")], "#!/bin/bash"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"), [case[1:] for case in JOBS], ids=[case[0] for case in JOBS]
)
def test_a_wrong_script_gets_its_own_words(changes, words, solved, without_slurm):
    nudged(lab_17.repaired_job(changed(solved, "job.slurm", *changes)), words)


HANDED_ON = [
    ("--signal=USR1", "--signal=B:USR1"),
    ("set -o pipefail\nsrun", "trap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\nsrun"),
    (
        "' | tee -a losses.txt\ncode=$?",
        "' &\nwait $!; code=$?\n[ $code = 138 ] && { wait $!; code=$?; }",
    ),
]
OTHER_WAYS = [
    [("--nodes=2", "-N 2"), ("--time=5\n", "--time=5\n\n# meet\n")],
    [("2 * SLURM_PROCID", "2 * SLURM_NODEID"), ("python -u", "exec python3 -u"), (ADDRESS, "export MASTER_ADDR=$(hostname)")],
    [("$((2 * SLURM_NTASKS))", "4"), ("set -o pipefail\n", ""), ("code=$?\n\nif", "code=${PIPESTATUS[0]}\n\nif")],
    [(REQUEUE, "if [ $code = 75 ]; then"), (" | tee -a losses.txt", "")],
    HANDED_ON,
]  # fmt: skip


@pytest.mark.parametrize("changes", OTHER_WAYS, ids=["short", "names", "numbers", "no pipe", "by B:"])  # fmt: skip
def test_a_right_script_in_another_way_passes(changes, solved, without_slurm, monkeypatch):
    monkeypatch.setattr(lab_17, "_training", lambda train: None)
    verdict = lab_17.repaired_job(changed(solved, "job.slurm", *changes))
    assert verdict.status is Status.CORRECT, verdict


TRAININGS = [
    ("no handler", [("signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))\n", "")], "kills the rank"),
    ("in the handler", [("lambda number, frame: asked.append(number)", "lambda number, frame: (save(step), exit(75))")], "ranks.any"),
    ("each for itself", [("ends = ranks.any(bool(asked))  # waits for the gradients, too", "ranks.wait()\n    ends = bool(asked)")], "ranks.any"),
    ("another code", [("SystemExit(75)", "SystemExit(1)")], "code 75"),
    ("one step too few", [("    if ends or (step + 1) % 6 == 0:\n        save(step + 1)", "    if ends or (step + 1) % 6 == 0:\n        save(step)")], "step + 1"),
    ("no save", [("if ends or (step + 1)", "if (step + 1)")], "step + 1"),
    ("no Python", [("import json", "import json,")], "cannot read it"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), [case[1:] for case in TRAININGS], ids=[case[0] for case in TRAININGS])  # fmt: skip
def test_a_wrong_training_script_gets_its_own_words(changes, words, solved, monkeypatch):
    monkeypatch.setattr(repairs, "SECONDS", 6.0)
    verdict = lab_17._training(changed(solved, "train.py", *changes)["train.py"])
    assert verdict is not None, "a wrong script passed"
    nudged(verdict, words)


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [(2, Status.CORRECT, ""), (4, Status.NOT_YET, "not computed again"), (6, Status.NOT_YET, "without any save"),
     (0, Status.NOT_YET, "died with the ranks"), (3, Status.NOT_YET, "after four steps")],
)  # fmt: skip
def test_steps_that_are_done_twice(answer, status, words):
    verdict = lab_17.steps_twice(answer)
    assert verdict.status is status and words in verdict.nudge
