# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17 On a real cluster
#
# {{badges}}
#
# **The question.** What makes a job go on with nobody at the keyboard, when a node dies or its time is over, and are its losses still
# the same? You start one script by torchrun and a real Slurm, and see it under Ray. The same plan becomes files for Kubernetes and
# SkyPilot. [Lesson 17a](17a_what_a_run_costs.ipynb) asks what it costs.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 75 for the lab | any laptop; Slurm needs Linux, root and its packages, else you see a recorded run | two to four minutes on two CPU cores, most of it Slurm's; beyond Binder's 1 GB |
#
# ## A bet
#
# A job runs on two nodes, and one of them dies. Later the job is warned that its time is nearly over. How many commands must you type
# until it has trained to its end?

# %%
my_bet_commands = 2

# %% tags=["setup"]
here = setup("advanced/17")

# %%
import contextlib
import inspect
import io
import re
import shutil

import torch
import torch.distributed as dist

from utils import Batch, Cluster, Evidence, Plan, RankError, check, export, run_ranks, run_torchrun
from utils import scratch_folder, show
from utils.catalog import ModelShape
from utils.parallel import Saves, check_versions
from utils.lessons.lesson_17.cluster_lanes import draw_troubles
from utils.lessons.lesson_17.cluster_runs import account, next_save, past_save, restarted, uneven_ends, write_shards
from utils.lessons.lesson_17.clusters import Slurm, losses_of, ray_problem, run_ray, slurm_problem
from utils.lessons.lesson_17.signal_figure import draw_signal
from evidence.record import recorded

stored = {row["quantity"]: (row, record) for name in ("cluster_runs", "cluster_troubles")
          for record in recorded(name) for row in record.rows}

# %% [markdown]
# ## 1. One folder, every launcher
#
# A launcher starts processes and tells each its number and where to meet. The script should not know which launcher it
# was. So a plan is exported once: a tiny model, ZeRO-3 over two nodes of one rank each. You see the training
# script, the one for Slurm, and `checksums.slurm`: an **array**, one script that Slurm runs as four tasks.
#
# The cell also starts a Slurm: a controller and three nodes. Each node is a host of its own, made of namespaces as in lesson 11.
# New words stand in the [glossary](../00_glossary.ipynb).

# %%
tiny = ModelShape(name="tiny", family="llama", layers=2, hidden=32, heads=4, kv_heads=2, feedforward=96,
                  vocabulary=64, max_sequence=16)
cluster = Cluster(gpu="A100-80GB", nodes=2, gpus_per_node=1)
plan = Plan(dp=2, zero_stage=3, micro_batch=2, framework="fp32")
job = export(tiny, cluster, plan, Batch(sequences=16, sequence_length=16))
folder = scratch_folder("lesson-17")
print(*(path.name for path in job.write(folder) if path.parent == folder))
write_shards(folder)
print((folder / "train.py").read_text(), job.slurm, (folder / "checksums.slurm").read_text(), sep="\n" + "-" * 80 + "\n")

problem = slurm_problem()
slurm = None if problem else Slurm(nodes=3, lost_after_seconds=2)
print(problem or f"{slurm.run('sinfo', '--version').strip()} up after {slurm.up_seconds:.1f} s:",
      ", ".join(map(" ".join, slurm.nodes().items())) if slurm else "")

# %% [markdown]
# **Read it.** `train.py` names no launcher: `run` reads the variables and joins the ranks. Put your data into `batch`. In `job.slurm`
# Slurm numbers its tasks, and the numbers are handed on under the names that PyTorch reads. `RANK` must be filled in *inside* `srun`,
# once in each rank; `MASTER_ADDR` *outside*, once for all. Exit code 75 means "saved, call me again".
#
# Now the job gets both troubles. It saves every 5 steps. Two steps after a save, node `n2` is killed: every process on it, Slurm's own
# too. When the job has saved again, the notebook plays the time limit: `scancel` sends the `USR1` that `--signal=USR1@120` sends 120 s
# before it, or up to a minute earlier ([sbatch](https://slurm.schedmd.com/sbatch.html)). In between, the array runs on the idle node.

# %%
if slurm:
    if slurm.nodes()["n2"] != "idle":  # this cell ran before
        slurm.start_node("n2")
    slurm.history.clear()
    shutil.rmtree(folder / "saves", ignore_errors=True)
    training = slurm.submit(folder / "job.slurm", "--steps", "30", "--every", "5")
    trains = [next_save(slurm, training, folder)]  # when its first start had saved
    killed = past_save(slurm, training, folder)  # it has done two steps since
    slurm.kill_node("n2")
    array = slurm.submit(folder / "checksums.slurm")
    trains.append(next_save(slurm, training, folder, array))  # its second start
    slurm.run("scancel", "--signal=USR1", str(training))
    signalled = slurm.seconds
    restarted(slurm, training, times=2)
    trains.append(next_save(slurm, training, folder))
    slurm.wait(training, array, timeout_seconds=400)
    seen = account(slurm, training, folder, killed=killed, signalled=signalled, trains=trains)
    evidence, device = Evidence.MEASURED, "this machine"
else:
    seen, record = stored["slurm"]
    evidence, device = Evidence.RECORDED, f"{record.device}, {record.date}"
show(draw_troubles(seen, evidence=evidence, device=device),
     alt="The job runs on n1 and n2; n2 dies; it waits, starts on n1 and n3, saves at a signal, waits, and starts a third time.")

# %%
print(f"your bet: {my_bet_commands} commands; it took none. From the kill to the first new save "
      f"{seen['trains'][1] - seen['killed']:.0f} s ({evidence}, {device})")

# %% [markdown]
# **Read it. 1:** the rank of `n1` has lost its peer; no step runs any more. **2:** Slurm still lists the job as running, until `n2` has
# not answered for `SlurmdTimeout`: 2 s here, 300 by default ([slurm.conf](https://slurm.schedmd.com/slurm.conf.html)). There it looks
# every 100 s: a death may be 500 s old. **3:** each start gets a *credential*, the controller's signed permission to run this job on
# these nodes. The next start waits until the old one has expired (`cred_expire`): 5 s here, 120 by default. So on your cluster expect
# 5 to 10 minutes, and then the queue: a third node must be free. **4:** the signal comes. The job finishes its step, saves and ends;
# where the bar ends it is requeued. **5:** this restart waits for the credential alone.
#
# Who put the job back into the queue? Slurm's log and accounting say it of the first time only:

# %%
print(seen["decisions"], seen["accounting"], sep="\n\n")

# %% [markdown]
# First Slurm did it, for the dead node: `--requeue` allows that. Here its 2 s were over before `srun`'s `--wait=60`. By default Slurm
# takes longer: where ranks end by themselves, the step fails first. Then the script requeues, up to three times after the same save.
#
# The second time (`PENDING`) no node failed: `scontrol requeue` in `job.slurm` did it, as `srun` ended with 75. What did the job print
# around its restarts (steps and `srun`'s lines alone), and is anything lost?

# %%
lines = seen["log"].splitlines()
print(*(line for i, line in enumerate(lines) if any("srun" in near for near in lines[max(0, i - 3) : i + 4])), sep="\n")
done = re.findall(r"step (\d+) loss ([\d.]+)", seen["log"])
twice = sorted({int(step) for i, (step, _) in enumerate(done) if step in dict(done[:i])})
print(f"\n{len(dict(done))} of 30 steps have a loss; done twice: {twice}, with {len(set(done)) - len(dict(done))} other losses")

# %% [markdown]
# After the dead node the steps since the last whole save ran again, with the same losses; after the signal none.
#
# **Question.** Another job saves every 2 steps. The save made after four steps was its last whole one, and it had printed the losses
# of steps 0 to 5 when its node died. How many steps are computed twice?

# %%
steps_twice = ...
check("17.steps_twice", steps_twice)

# %% [markdown]
# ### Its time is over: a signal, a save, 75
#
# A dead node gives no warning; a time limit does. The drawing shows who hears it in this notebook's Slurm.

# %%
show(draw_signal(), alt="Slurm signals each process of srun's tasks, also a torchrun, which dies of it; the batch shell hears nothing.")

# %% [markdown]
# **By Slurm's default fewer hear it:** a task's first process alone, unless `SignalChildrenProcesses` is set
# ([cgroup.conf](https://slurm.schedmd.com/cgroup.conf.html)). A rank under torchrun then hears nothing, and ends without a save. With
# `exec` in `job.slurm` python takes the shell's place as first process.
#
# The signal comes to ranks at different moments, in the middle of a step. So a handler only notes it, and after each step all ranks
# ask each other whether anyone has: they save after the same step. In `train.py`:

# %%
print(inspect.getsource(Saves.kept))

# %% [markdown]
# Asking costs one all-reduce a step; the host waits for it, as for the loss. `--signal`'s seconds must cover a step, a save and the end of
# all processes.
#
# ## 2. The same losses
#
# Now the same folder under `torchrun`, without any fault, and under Ray. **Ray Train** starts workers anew when one dies. You see a
# stored run, which lost a worker after the save of step 4.
#
# One more run has a planted fault: after four steps it goes on from its save without Adam's moments.

# %%
_ = (folder / "forgets.py").write_text('''import train
from utils.parallel import Saves, run

def two_starts(device, steps, weights, saves, every):
    train.train(device, 4, weights, saves, every)
    kept = Saves.kept

    def forgets(self, losses):
        self.optimizer.state.clear()  # the moments and the step count
        yield from kept(self, losses)

    Saves.kept = forgets
    train.train(device, steps, weights, saves)

run(two_starts)
''')

# %%
def by_torchrun(script: str, *words: str) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        return list(losses_of(run_torchrun(folder / script, 2, "--steps", "30", *words)).values())

shutil.rmtree(folder / "forgotten", ignore_errors=True)
alone, faulty = by_torchrun("train.py"), by_torchrun("forgets.py", "--saves", str(folder / "forgotten"), "--every", "4")
ray, ray_record = stored["ray"]
rows = {"torchrun": (alone, "measured"), "Slurm, both troubles": (seen["losses"], f"{evidence}, {device}"),
        "Ray, a worker lost": (ray["losses"], f"recorded, {ray_record.device}, {ray_record.date}")}
run_ray_here = False  # True: takes a minute and more
if run_ray_here and not ray_problem():
    shutil.rmtree(folder / "saves", ignore_errors=True)
    rows["Ray here"] = run_ray(folder, "--steps", "30", "--every", "2", kill_after=4).losses, "measured"

# %%
def largest_gap(found: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(found, alone, strict=True))

for name, (found, kind) in rows.items():
    print(f"{name:<21} step 29 {found[29]:.7f}, relative gap at most {largest_gap(found):.0e} ({kind})")
    assert largest_gap(found) < 1e-6, f"{name} computes something else"
print(f"{'moments lost':<21} step 29 {faulty[29]:.7f}, relative gap at most {largest_gap(faulty):.0e} (measured)")

# %% [markdown]
# **Read it.** Three launchers, one script: through two restarts and a dead worker the losses agree with torchrun's, the reference, to a
# millionth. The tokens are random, so the loss does not fall; yet the fault stands out. Two things make losses equal: a save holds all
# states (lesson 16), and a batch depends on the *step* alone. With a `DataLoader` seed the shuffle by the epoch and skip used batches,
# or save its place (torchdata's `StatefulDataLoader`). Where losses differ by more, look at the data, the state, then the numerics
# (TF32, another GPU, dropout).
#
# <div class="alert alert-warning"><b>Trap.</b> Runs that share <code>saves</code> go on from each other's: tasks of an array, or a
# second <code>sbatch</code> here. Put <code>$SLURM_JOB_ID</code>, which a requeue keeps, into both paths in <code>job.slurm</code>.</div>
#
# ## 3. Kubernetes, SkyPilot, containers
#
# On Kubernetes a job is YAML: `kubernetes.yaml` makes a Job of numbered **pods**, as many as the plan has nodes, each with one container
# that runs torchrun. **SkyPilot** rents nodes in any cloud, spot ones where `use_spot` is true, and starts again elsewhere when they are
# taken. What makes a job go on there? These lines of the exported files:

# %%
ANSWERS = {
    "kubernetes.yaml": {
        "restartPolicy": "a container that ends is not started again in its pod",
        "backoffLimitPerIndex": "the Job makes a new pod instead, so often for each number",
        "action": "an end that fits this rule is not counted:",
        "type: Disr": "the pod was ended from outside, as by a drain of its node",
        "node-rank": "the new pod has the old one's number, and gives it to torchrun",
    },
    "ray_train.py": {"max_failures": "all workers start anew, so often"},
    "skypilot.yaml": {
        "strategy": "nodes are gone: look in another region at once",
        "max_restarts": "the script failed: start it again, so often",
    },
}
for name, meanings in ANSWERS.items():
    print(name)
    for word, meaning in meanings.items():
        line = next(line for line in (folder / name).read_text().splitlines() if word in line)
        print(f"  {line.strip():<46} {meaning}")

# %% [markdown]
# | | who notices a dead node, and when (defaults) | who starts anew | warning before the end |
# |---|---|---|---|
# | Slurm | its controller, within 500 s | itself; after 75, your script | the signal and seconds you choose; at a preemption SIGTERM, where `GraceTime` is set |
# | Kubernetes | its node controller: 50 s, and 300 s until it evicts the pods | the Job, once the old pod is gone. A dead node's pods go when the node is deleted: by the cloud, else by you | SIGTERM at a drain, 30 s before the kill |
# | Ray Train | its health checks, one in 3 s; five must fail | itself, `max_failures` times | none |
# | SkyPilot | its controller, which asks every 15 s | itself, on new nodes | none |
#
# (Published: Kubernetes, [nodes](https://kubernetes.io/docs/reference/command-line-tools-reference/kube-controller-manager/),
# [eviction](https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/) and
# [jobs](https://kubernetes.io/docs/concepts/workloads/controllers/job/);
# [Ray](https://github.com/ray-project/ray/blob/master/src/ray/common/ray_config_def.h);
# [SkyPilot](https://github.com/skypilot-org/skypilot/blob/master/sky/jobs/utils.py).) A drained pod is not counted, but its
# neighbours are: warned by it they save and end with 75, which torchrun turns into 1. If a save takes more than 30 s, set `terminationGracePeriodSeconds`. The `Dockerfile` builds on NVIDIA's image, which brings PyTorch,
# CUDA and NCCL as one set: install no other torch over it.
#
# ## 4. What to watch
#
# - **Losses,** in files that survive the job: TensorBoard writes a folder; so does W&B with `mode="offline"`, and `wandb sync` sends it.
# - **Silence.** A peer that hangs, or has no power, closes no connection. NCCL's watchdog ends a collective after 10 minutes (`timeout` of
#   `init_process_group`), later than Slurm's 500 s. A slow job still prints steps; a hung one does not: watch the log's age.
# - **A node that fails twice.** Have it drained, or `--exclude` it.
#
# ## Break it, diagnose it
#
# Two faults: say what you would do. In the first, two tasks end with 75, and one needs a second more to save.

# %%
print(uneven_ends(slurm, folder) if slurm else seen["uneven_ends"], f"({evidence}, {device})")

# %%
def on_an_older_node():
    if dist.get_rank() == 1:
        torch.__version__ = "2.11.0"  # this node was not updated
    check_versions()


try:
    run_ranks(on_an_older_node, 2)
except RankError as error:
    print(str(error).split("\n\n")[0])
if slurm:
    slurm.stop()

# %% [markdown]
# **Diagnose it.** With `--kill-on-bad-exit=1` the first 75 counts as a failure: `srun` terminates the rank that still saves, and the
# script sees 143 (128 + SIGTERM). `job.slurm` gives the others 60 s instead. Different PyTorch versions may *seem* to work: the exported
# script compares them before the first step.
#
# ## 5. When to use which
#
# | launcher | use when | costs | does not help |
# |---|---|---|---|
# | torchrun | one machine, or a handful that you own | you start it on each node; `--max-restarts` brings back ranks, no node | queues, sharing |
# | Slurm | a shared cluster with a queue | root sets it up; one environment on all nodes | services; prices across clouds |
# | Kubernetes, Kubeflow | your company runs on it | images, volumes, an operator | a queue with fair shares: add Kueue |
# | Ray Train | preprocessing, tuning and training in one program | a cluster inside a cluster | plain static jobs |
# | SkyPilot | prices decide; spot in several clouds | saves in a bucket, restarts | one cluster with a queue already |

# %% [markdown]
# ### What changes on TPUs
#
# A [TPU v5p](https://docs.cloud.google.com/tpu/docs/v5p) has 459 TFLOP/s in bf16 and 95 GiB. 8,960 of them form one **pod**. You
# rent a *slice*, and mesh axes should match its shape.
# [TorchTPU](https://docs.cloud.google.com/tpu/docs/pytorch-on-tpu) makes `"tpu"` a device of PyTorch. The older
# [PyTorch/XLA](https://docs.pytorch.org/xla/release/r2.8/perf/spmd_basic.html) compiles whole graphs, again for each new shape: pad.

# %% [markdown]
# ## Recap
#
# - One script, many launchers: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are the contract,
#   and equal losses the test.
# - A job survives by four things: requeue, a signal, a save, an exit code that means "again".
#
# ### Test yourself
#
# Slurm kills your job at its time limit, and no save is there. Which two things are missing?
#
# <details><summary>Answer</summary>
#
# `--signal=USR1@120` in the script, and a handler in the ranks that saves after the step. (Saves every few steps would
# have left one, too. To go on, the script needs `scontrol requeue` on 75.)
#
# </details>
#
# Do the [lab](../../labs/advanced/17_cluster_and_budget.ipynb), in a copy (`make my-labs`): its first exercise is about such a
# job, the others about [lesson 17a](17a_what_a_run_costs.ipynb). Then compare with the
# [solution](../../solutions/advanced/17_cluster_and_budget.ipynb).
#
# **References.** [srun](https://slurm.schedmd.com/srun.html), [Kubeflow Trainer](https://www.kubeflow.org/docs/components/trainer/).

# %% [markdown]
# ## On Monday
#
# With these lines a lost node brings the job back, and each task of `srun` is warned 120 s or more before the limit. For other
# failures add the `elif` of `job.slurm`:
#
# ```bash
# #SBATCH --requeue --open-mode=append --signal=USR1@120
# export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
# # 75 alone is requeued below. So --wait is longer than Slurm takes to see a dead node (by default up to 500 s): Slurm must
# # requeue before the step ends. Without exec the shell is the task's first process: by default it alone gets the signal, and dies of it.
# srun --kill-on-bad-exit=0 --wait=600 bash -c '
#   export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
#   exec python -u train.py'
# code=$?
# if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
# exit "$code"
# ```
#
# In your loop the signal sets a flag, and all ranks agree on it:
#
# ```python
# import signal, sys
#
# asked = []
# signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
# for step in range(first_step, steps):  # first_step: the number in your last save, or 0
#     train_step(step)
#     stop = any_rank(bool(asked))  # torch.distributed.all_reduce of the flag, with ReduceOp.MAX
#     if stop or (step + 1) % every == 0:
#         save(step + 1)  # so many steps are done; into a folder of this job: $SLURM_JOB_ID, which a requeue keeps, in its name
#     if stop:
#         barrier()  # torch.distributed.barrier: no rank leaves while another saves
#         sys.exit(75)
# ```
#
# Under `srun torchrun` add `--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1`, or USR1 ends the launcher. With it
# torchrun hands USR1 to its ranks, gives them 30 s (newer versions have `--shutdown-timeout`) and ends with 1: requeue where a new save
# is there.
#
# With `enable_jit_checkpoint` a `Trainer` saves and stops at SIGTERM (`--signal=TERM@120`), and ends with 0, finished or not. A save that
# was cut off keeps a marker. Each rank decides for itself when to stop: on several ranks use the loop above. Early stopping, too, ends
# before the last step: test for it, or a job that is done starts again.
#
# ```python
# import os, pathlib, shutil, sys
# from transformers.trainer_utils import get_last_checkpoint
#
# out = trainer.args.output_dir  # of a Trainer with TrainingArguments(..., enable_jit_checkpoint=True)
# os.makedirs(out, exist_ok=True)
# for marker in pathlib.Path(out).glob("checkpoint-*/checkpoint-is-incomplete.txt"):
#     shutil.rmtree(marker.parent)
# trainer.train(resume_from_checkpoint=get_last_checkpoint(out))
# if trainer.state.global_step < trainer.state.max_steps:
#     sys.exit(75)
# ```
