"""A real Slurm on this machine: jobs run, nodes die, nothing stays behind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from export_cases import TINY, one_process, start_weights, tiny

from utils.lessons.lesson_17.clusters import JobSpan, Slurm, SlurmError, losses_of, slurm_problem
from utils.lessons.lesson_17.clusters.jobs import node_names, read_jobs
from utils.parallel import saved_steps

needs_slurm = pytest.mark.skipif(bool(slurm_problem()), reason=slurm_problem())
SECONDS = 120.0
SUMS = """\
#SBATCH --array=0-3
#SBATCH --output=checksum-%a.txt
sha256sum shard-$SLURM_ARRAY_TASK_ID.bin
sleep 1
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    found = Slurm(nodes=2)
    yield found
    found.stop()


def script(folder: Path, text: str, name: str = "job.slurm") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}", encoding="utf-8")
    return path


@needs_slurm
def test_all_nodes_are_idle_and_hosts_of_their_own(slurm, tmp_path):
    assert slurm.nodes() == {"n1": "idle", "n2": "idle"}
    number = slurm.submit(
        script(tmp_path, "srun -N2 bash -c 'hostname; ls /sys/class/net | xargs'\n"),
        options=["-N2", "--output=out.txt"],
    )
    [job] = slurm.wait(number, timeout_seconds=SECONDS)
    assert (job.state, job.restarts, node_names(job.nodes)) == ("COMPLETED", 0, ["n1", "n2"])
    said = (tmp_path / "out.txt").read_text().split("\n")
    assert {"n1", "n2"} <= set(said), said
    assert not any(
        "10.78" in str(a.address) for each in psutil.net_if_addrs().values() for a in each
    ), "the hosts' addresses lie in namespaces alone"


@needs_slurm
def test_an_array_runs_its_tasks_and_the_accounts_have_them(slurm, tmp_path):
    for shard in range(4):
        (tmp_path / f"shard-{shard}.bin").write_bytes(bytes([shard]) * 2**20)
    number = slurm.submit(script(tmp_path, SUMS))
    tasks = slurm.wait(number, timeout_seconds=SECONDS)
    assert [task.label for task in sorted(tasks, key=lambda task: task.label)] == [
        f"{number}_{i}" for i in range(4)
    ]
    for task in range(4):
        right = hashlib.sha256((tmp_path / f"shard-{task}.bin").read_bytes()).hexdigest()
        assert (tmp_path / f"checksum-{task}.txt").read_text().startswith(right), (
            "a task's own shard"
        )
    assert slurm.accounting().count("COMPLETED") >= 4, slurm.accounting()


@needs_slurm
def test_exported_scripts_are_accepted_by_sbatch(slurm, tmp_path):
    found = tiny(dp=4, zero_stage=3, micro_batch=2)
    found.write(tmp_path)
    slurm.run(
        "sbatch",
        "--test-only",
        "--nodes=1",
        "--ntasks-per-node=2",
        "--gpus-per-node=2",
        str(tmp_path / "job.slurm"),
    )
    with pytest.raises(SlurmError, match="sbatch refused: .*(node|Node|configuration)"):
        slurm.run("sbatch", "--test-only", "--nodes=99", str(tmp_path / "job.slurm"))


@needs_slurm
def test_a_job_that_ends_with_75_is_called_again_and_one_that_is_done_is_not(slurm, tmp_path):
    """The exported script around a Python that saves at its first start, and at each gets its rank."""
    tiny(dp=4, zero_stage=3, micro_batch=2).write(tmp_path)
    text = (tmp_path / "job.slurm").read_text().replace("ntasks-per-node=4", "ntasks-per-node=2")
    path = script(tmp_path, text.replace("gpus-per-node=4", "gpus-per-node=2").partition("\n")[2])
    (tmp_path / "train.py").write_text(
        "import os, pathlib, sys, time\n"
        "print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')), *sys.argv[1:], flush=True)\n"
        "again = os.environ.get('SLURM_RESTART_COUNT', '')\n"
        "here = pathlib.Path(__file__).parent\n"
        "here.joinpath(f'printed{again}-{os.environ[\"RANK\"]}').touch()\n"
        "while len(list(here.glob(f'printed{again}-*'))) < 2:  # both are there before one ends\n"
        "    time.sleep(0.05)\n"
        "sys.exit(0 if again else 75)\n"
    )
    number = slurm.submit(path, "--steps", "a b; touch stolen", options=["--output=out.txt"])
    [job] = slurm.wait(number, timeout_seconds=SECONDS)
    assert (job.state, job.restarts) == ("COMPLETED", 1)
    assert f"Requeuing JobId={number}" in slurm.decisions(number)
    assert slurm.decisions(number + 1) == "", "what befell another job is not told"
    lines = [line for line in (tmp_path / "out.txt").read_text().splitlines() if "--saves" in line]
    wanted = [
        f"{rank} 2 n1 --saves saves-{number} --every 100 --steps a b; touch stolen"
        for rank in (0, 1)
    ]
    assert sorted(lines) == sorted(2 * wanted), lines
    assert not (tmp_path / "stolen").exists(), "an argument is a word, not a command"


@needs_slurm
def test_a_rank_that_ends_first_with_75_leaves_the_other_time_to_save(slurm, tmp_path):
    """The exported script; rank 1 needs a second more. With --kill-on-bad-exit the code is 143."""
    tiny(dp=4, zero_stage=3, micro_batch=2).write(tmp_path)
    text = (tmp_path / "job.slurm").read_text().replace("ntasks-per-node=4", "ntasks-per-node=1")
    text = text.replace("gpus-per-node=4", "gpus-per-node=1").replace("nodes=1\n", "nodes=2\n")
    (tmp_path / "train.py").write_text(
        "import os, pathlib, sys, time\n"
        "if 'SLURM_RESTART_COUNT' in os.environ: sys.exit(0)\n"
        "time.sleep(int(os.environ['RANK']))\n"
        "pathlib.Path('saved-' + os.environ['RANK']).touch()\n"
        "sys.exit(75)\n"
    )
    codes = {}
    for flag in ("--kill-on-bad-exit=0", "--kill-on-bad-exit=1"):
        (tmp_path / "saved-1").unlink(missing_ok=True)
        once = text.replace("--kill-on-bad-exit=0", flag).replace("scontrol requeue", "true")
        path = script(tmp_path, once.partition("\n")[2], "once.slurm")
        [job] = slurm.wait(
            slurm.submit(path, options=["--output=out.txt"]), timeout_seconds=SECONDS
        )
        codes[flag] = (job.exit_code, (tmp_path / "saved-1").exists())
    assert codes == {"--kill-on-bad-exit=0": (75, True), "--kill-on-bad-exit=1": (143, False)}


@needs_slurm
@pytest.mark.slow
@pytest.mark.parametrize("requeues", [True, False])
def test_a_step_may_fail_before_slurm_has_seen_the_dead_node(tmp_path, requeues):
    """The script's requeue holds, and waits for Slurm to give the node up; without it the job has failed."""
    again = "scontrol requeue $SLURM_JOB_ID" if requeues else "true"
    text = (
        "#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --output=out.txt --open-mode=append\n"
        "[ $SLURM_RESTART_COUNT ] && exit 0\n"
        "touch started\n"
        "srun --kill-on-bad-exit=0 --wait=1 bash -c '[ $SLURM_PROCID = 1 ] && sleep 300; sleep 3; exit 1'\n"
        f"code=$?; {again}; exit $code\n"
    )
    slurm = Slurm(nodes=3, lost_after_seconds=15)
    try:
        number = slurm.submit(script(tmp_path, text))
        while not (tmp_path / "started").exists():
            assert slurm.seconds < SECONDS
            time.sleep(0.05)
        slurm.kill_node("n2")
        [job] = slurm.wait(number, timeout_seconds=SECONDS)
        states = [(span.state, span.restarts) for span in slurm.history]
        log = (slurm.folder / "log" / "slurmctld").read_text()
    finally:
        slurm.stop()
    if requeues:
        assert (job.state, job.restarts, job.nodes) == ("COMPLETED", 1, "n[1,3]"), states
        assert ("COMPLETING", 1) in states, states
    else:
        assert (job.state, job.restarts) == ("FAILED", 0), states
    assert f"requeue job JobId={number} due to failure" not in log, "it is Slurm's no more"


@needs_slurm
def test_what_cannot_be_is_a_sentence(slurm, tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no script"):
        slurm.submit(tmp_path / "nothing.slurm")
    with pytest.raises(SlurmError, match="sbatch refused"):
        slurm.submit(script(tmp_path, "#SBATCH --nodes=many\n"))
    with pytest.raises(ValueError, match=r"There is no node 'n9'; there are n1, n2\."):
        slurm.kill_node("n9")
    waiting = slurm.submit(script(tmp_path, "true\n", "later.slurm"), options=["--begin=now+1hour"])
    with pytest.raises(SlurmError, match="is PENDING"):
        slurm.wait(waiting, timeout_seconds=0.5)
    slurm.run("scancel", str(waiting))


@needs_slurm
def test_nothing_stays_behind():
    before = {process.pid for process in psutil.process_iter()}
    slurm = Slurm(nodes=1)
    held = set(psutil.Process().children(recursive=True))
    slurm.stop()
    slurm.stop()
    assert not slurm.folder.exists(), "the folder goes with it"
    left = [
        p.name()
        for p in psutil.process_iter()
        if p.pid not in before and p in held and p.is_running()
    ]
    assert left == [], "no daemon outlives its Slurm"
    with pytest.raises(SlurmError, match="has been stopped"):
        slurm.run("sinfo")


@needs_slurm
def test_it_ends_with_the_process_that_started_it(tmp_path):
    code = (
        "import os, sys; from utils.lessons.lesson_17.clusters import Slurm; s = Slurm(nodes=1)\n"
        "print(s._inside, s.folder, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=SECONDS,
    )
    inside, folder = done.stdout.split()
    ends = time.monotonic() + 20
    while psutil.pid_exists(int(inside)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(inside)), "its first process ends with its input"
    subprocess.run(["rm", "-rf", folder], check=True)


@needs_slurm
@pytest.mark.slow
def test_a_job_that_loses_a_node_loses_no_step(tmp_path):
    """Two nodes of two ranks, one killed: the spare takes over, and losses are those of one process."""
    from utils.lessons.lesson_17.cluster_runs import saves_of, tiny_job

    tiny_job(ranks_per_node=2).write(tmp_path)
    weights = start_weights(TINY, tmp_path)
    slurm = Slurm(nodes=3)
    try:
        number = slurm.submit(
            tmp_path / "job.slurm", "--steps", "12", "--every", "2", "--weights", str(weights)
        )
        while not saved_steps(saves_of(number, tmp_path)):
            assert slurm.seconds < SECONDS, (tmp_path / f"tiny-{number}.out").read_text()
            time.sleep(0.05)
        slurm.kill_node("n2")
        [job] = slurm.wait(number, timeout_seconds=SECONDS)
        text = (tmp_path / f"tiny-{number}.out").read_text()
        accounts = slurm.accounting(number)
    finally:
        slurm.stop()
    assert (job.state, job.nodes) == ("COMPLETED", "n[1,3]"), text
    assert list(losses_of(text)) == list(range(12)), text
    plain = one_process(TINY, weights, steps=12)
    assert list(losses_of(text).values()) == pytest.approx(plain, rel=1e-6)
    assert "NODE_FAIL" in accounts or "REQUEUED" in accounts or accounts.count("tiny") == 2, (
        accounts
    )


def test_where_there_is_no_slurm_a_sentence_says_what_to_install(monkeypatch):
    from utils.lessons.lesson_17.clusters import slurm as module

    monkeypatch.setattr(module.shutil, "which", lambda tool: None)
    slurm_problem.cache_clear()
    try:
        assert "apt-get install" in slurm_problem() and "recorded run" in slurm_problem()
        with pytest.raises(SlurmError, match="Slurm is not installed here"):
            Slurm()
        monkeypatch.undo()
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        slurm_problem.cache_clear()
        assert "root" in slurm_problem() or "not installed" in slurm_problem()
    finally:
        monkeypatch.undo()
        slurm_problem.cache_clear()


def test_jobs_are_read_as_scontrol_prints_them():
    line = (
        "JobId=7 ArrayJobId=6 ArrayTaskId=1 JobName=a b JobState=PENDING Reason=Priority "
        "Dependency=(null) Restarts=2 ExitCode=75:0 NodeList=(null) StdOut=/tmp/a=b.txt"
    )
    [job] = read_jobs(f"{line}\nNo jobs in the system\n")
    assert asdict(job) == {
        "number": 7,
        "array": 6,
        "label": "6_1",
        "name": "a b",
        "state": "PENDING",
        "reason": "Priority",
        "restarts": 2,
        "nodes": "",
        "exit_code": 75,
    }
    assert node_names("n[1-3,7]") == ["n1", "n2", "n3", "n7"]
    assert JobSpan("1", "x", "RUNNING", "n2", 0, 0.0, 1.0).node_names == ["n2"]
    assert losses_of("(pid=3) step 0 loss 4.5\nstep 1 loss 4.25\nstep 0 loss 4.75") == {
        0: 4.75,
        1: 4.25,
    }
