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
# | 60, and 75 for the lab | any laptop; Slurm needs Linux, root and its packages, else you see a recorded run | about a minute on two CPU cores, half of it Slurm's; beyond Binder's 1 GB |
#
# ## A bet
#
# A job runs on two nodes. One of them loses power. How many commands must you type until the job trains again, on a
# node that lives?

# %%
my_bet_commands = 2

# %% tags=["setup"]
here = setup("advanced/17")

# %%
import contextlib
import inspect
import io
import os
import shutil
import tempfile

import torch
import torch.distributed as dist

from utils import Batch, Cluster, Evidence, Plan, RankError, check, export, run_ranks, run_torchrun
from utils import scratch_folder, show
from utils.catalog import ModelShape
from utils.parallel import Saves, check_versions, saved_steps
from utils.lessons.lesson_17.cluster_lanes import draw_cluster
from utils.lessons.lesson_17.cluster_runs import write_shards
from utils.lessons.lesson_17.clusters import JobSpan, ManifestError, MissingToolError, Slurm, SlurmError
from utils.lessons.lesson_17.clusters import check_kubernetes, check_skypilot, check_train_job, kubectl_says
from utils.lessons.lesson_17.clusters import losses_of, ray_problem, read_yaml, run_ray, slurm_problem
from evidence.record import recorded

stored = {row["quantity"]: (row, record) for record in recorded("cluster_runs") for row in record.rows}

# %% [markdown]
# ## 1. One folder, every launcher
#
#
# A launcher starts processes and tells each its number and where to meet. The script should not know which launcher it
# was. So a plan is exported once: a tiny model, ZeRO-3 over two nodes of one rank each. Every file of the folder comes
# from this one object; you see the training script, and the one for Slurm.
#
# The cell also starts a Slurm: a controller, its authentication and three nodes. Each node is a host of its own, made
# of namespaces as in lesson 11. Nothing of it can be reached from outside.
#
# New words stand in the [glossary](../00_glossary.ipynb).

# %%
tiny = ModelShape(name="tiny", family="llama", layers=2, hidden=32, heads=4, kv_heads=2, feedforward=96,
                  vocabulary=64, max_sequence=16)
cluster = Cluster(gpu="A100-80GB", nodes=2, gpus_per_node=1)
plan = Plan(dp=2, zero_stage=3, micro_batch=2, framework="fp32")
job = export(tiny, cluster, plan, Batch(sequences=16, sequence_length=16))
folder = scratch_folder("lesson-17")
print(*(path.name for path in job.write(folder) if path.parent == folder))
print((folder / "train.py").read_text(), job.slurm, sep="\n" + "-" * 80 + "\n")

problem = slurm_problem()
slurm = None if problem else Slurm(nodes=3, lost_after_seconds=2)
print(problem or f"{slurm.run('sinfo', '--version').strip()} up after {slurm.up_seconds:.1f} s:",
      ", ".join(map(" ".join, slurm.nodes().items())) if slurm else "")
write_shards(folder)  # and checksums.slurm, one script for four tasks

# %% [markdown]
# **Read it.** `train.py` names no launcher: `run` reads the variables, joins the ranks, and parses `--steps`, `--saves` and `--every`. Put
# your data into `batch`. In `job.slurm` Slurm numbers its tasks, and the numbers are handed on under the names that PyTorch reads. `RANK`
# must be filled in *inside* `srun`, once in each rank; `MASTER_ADDR` *outside*, once for all. Exit code 75 means "saved, call me again".
#
# Submit the job, and kill node `n2` after the save of step 4: every process on it at once, Slurm's own too. Meanwhile
# an **array**, one script as four tasks, takes checksums of the data on the node that is idle.

# %%
if slurm:
    if slurm.nodes()["n2"] != "idle":  # this cell ran before
        slurm.start_node("n2")
    shutil.rmtree(folder / "saves", ignore_errors=True)
    training = slurm.submit(folder / "job.slurm", "--steps", "30", "--every", "2")
    killed = slurm.watch(training, until=lambda: saved_steps(folder / "saves") >= 4)
    slurm.kill_node("n2")
    slurm.wait(training, slurm.submit(folder / "checksums.slurm"), timeout_seconds=400)
    history, evidence, device = slurm.history, Evidence.MEASURED, "this machine"
    losses = losses_of((folder / f"tiny-{training}.out").read_text())
    accounting = slurm.accounting()
else:
    row, record = stored["slurm"]
    history, evidence, device = [JobSpan(**span) for span in row["history"]], Evidence.RECORDED, f"{record.device}, {record.date}"
    killed, losses, accounting = row["killed_at_seconds"], dict(enumerate(row["losses"])), row["accounting"]
figure = draw_cluster(history, ["n1", "n2", "n3"], killed={"n2": killed}, evidence=evidence, device=device,
                      title="A job loses a node, and goes on with another")
show(figure, alt="The job runs on n1 and n2; n2 dies; the array runs on n3; the job waits in the queue, then starts on n1 and n3.")

# %%
anew = next(span.start_seconds for span in history if span.state == "RUNNING" and span.restarts)
print(f"your bet: {my_bet_commands} commands; it took none. From the kill to the new start {anew - killed:.0f} s ({evidence}, {device})")

# %% [markdown]
# **Read it.** The rank of `n1` saw a closed connection at once. (A real power cut closes none: ranks hang until a
# timeout.) Yet Slurm lists the job as running until it declares the silent node down: its controller calls every node
# again and again; no answer for `SlurmdTimeout` (2 s here, 300 by default), and the node is lost.
# (On a real network a call to a dead host takes seconds, and two must fail. Ours refuses at
# once.) The array needed only `n3`. In the queue the job waits until its old credential has expired: `cred_expire`, 5 s
# here, the least that Slurm takes, 120 by default. On your cluster expect minutes. The bars of the job include the
# import of PyTorch.
#
# What did Slurm write down, and is anything lost?

# %%
print(accounting)
print("steps with a loss:", len(losses), "of 30")

# %% [markdown]
# `sacct` shows the job twice: `NODE_FAIL` on `n1` and `n2`, then `COMPLETED` on `n1` and `n3`. (A cluster's accounts
# live in a database; without one, `sacct --completion` reads what Slurm wrote of ended jobs.)
#
# **Question.** The job saved every 2 steps, and the save made after four steps was whole. Say it had printed the
# losses of steps 0 to 5 when the node died. How many steps were computed twice?

# %%
steps_twice = ...
check("17.steps_twice", steps_twice)

# %% [markdown]
# ### Its time is over: a signal, a save, 75
#
# A dead node gives no warning. A time limit does: `--signal=USR1@120` sends `SIGUSR1` to every task of `srun` before the end. What the
# job must do then is here by hand, in one task that has no model. Its fourth step is long: it lasts until the signal comes.

# %%
_ = (folder / "loop.py").write_text("""import os, pathlib, signal, sys, time

asked, save = [], pathlib.Path("loop.saved")
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))  # note it, and no more: a step is under way
first = int(save.read_text()) if save.exists() else 0
print("start number", int(os.environ.get("SLURM_RESTART_COUNT", 0)) + 1, flush=True)
for step in range(first, 8):
    signal.pause() if step == 3 else time.sleep(0.1)  # forward, backward, optimizer
    print("step", step, flush=True)
    if asked:
        save.write_text(str(step + 1))
        print("asked to stop: saved", step + 1, "steps", flush=True)
        sys.exit(75)
""")
_ = (folder / "loop.slurm").write_text("""#!/bin/bash
#SBATCH --requeue --open-mode=append --signal=USR1@120 --output=loop.txt
srun python -u loop.py
code=$?
if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
""")

# %%
if slurm:
    for old in ("loop.txt", "loop.saved"):  # where this cell ran before
        (folder / old).unlink(missing_ok=True)
    looped = slurm.submit(folder / "loop.slurm")
    slurm.watch(looped, until=lambda: (folder / "loop.txt").exists() and "step 2" in (folder / "loop.txt").read_text())
    slurm.run("scancel", "--signal=USR1", str(looped))  # the same signal, sooner than the time limit's
    [ended] = slurm.wait(looped, timeout_seconds=200)
    print((folder / "loop.txt").read_text())
    print(f"job {ended.number}: {ended.state}; starts after the first, each by its own scontrol requeue: {ended.restarts} ({Evidence.MEASURED})")
else:
    print(f"{problem} Without one: start loop.py, send it `kill -USR1`, look at its exit code, and start it again.")

# %% [markdown]
# **Read it.** The step under way was finished, the save came after it, and the next start did no step twice. `train.py` has the same
# lines in `saves.kept`, for all ranks at once: a signal comes to them at different moments, so they agree on the step first.

# %%
print(inspect.getsource(Saves.kept))

# %% [markdown]
# ## 2. The same losses
#
# Now the same folder under `torchrun`, without any fault, and under Ray. **Ray Train** starts workers anew when one
# dies (`max_failures`). It is a large download, so you see a stored run, which lost a worker after step 4. Where Ray is
# installed, `run_ray_here` runs it.

# %%
with contextlib.redirect_stdout(io.StringIO()):
    alone = losses_of(run_torchrun(folder / "train.py", 2, "--steps", "30"))
rows = {"torchrun": (list(alone.values()), Evidence.MEASURED), "Slurm, a node lost": (list(losses.values()), evidence)}
if "ray" in stored:
    rows["Ray, a worker lost"] = stored["ray"][0]["losses"], Evidence.RECORDED
run_ray_here = False  # True: a minute and more, 3 GB
if run_ray_here and not ray_problem():
    shutil.rmtree(folder / "saves", ignore_errors=True)
    rows["Ray here"] = run_ray(folder, "--steps", "30", "--every", "2", kill_after=4).losses, Evidence.MEASURED

# %%
for name, (found, kind) in rows.items():
    gap = max(abs(a - b) / b for a, b in zip(found, alone.values(), strict=True))
    print(f"{name:<20} step 0 {found[0]:.6f}, step 29 {found[29]:.6f}; at most {gap:.0e} from torchrun ({kind})")
    assert gap < 1e-6, f"{name} computes something else"

# %% [markdown]
# **Read it.** Three launchers, one script, equal losses, through a dead node and a dead worker. Two things make it so:
# batches depend on the *step* alone, and a save holds all states (lesson 16). A launcher that changes a loss by more than
# rounding has changed the number of ranks, or the data. (The tokens are random, so the loss does not fall.)
#
# <div class="alert alert-warning"><b>Trap.</b> Training runs of one array that share a <code>--saves</code> folder go
# on from each other's saves. Put <code>$SLURM_ARRAY_TASK_ID</code> into the path.</div>
#
# ## 3. Kubernetes, SkyPilot, containers
#
# On Kubernetes a job is YAML. `kubernetes.yaml` needs built-in kinds alone: an indexed Job, a headless Service that
# gives pods names, a volume for saves. `trainjob.yaml` is Kubeflow's. **SkyPilot** looks for spot nodes in any cloud,
# and starts again elsewhere when they are taken. A file counts as good when its tool's own schema
# or types accept it. The output says which tools are installed here, and so which files were checked:

# %%
print(job.kubernetes.rpartition("containers:")[2].partition("env:")[0])
for name, checks in (("kubernetes.yaml", check_kubernetes), ("trainjob.yaml", check_train_job)):
    try:
        print(f"{name}: accepted,", ", ".join(checks((folder / name).read_text()) or ["TrainJob"]))
    except MissingToolError as error:
        print(error)

# %%
try:
    print("skypilot.yaml: accepted,", check_skypilot(folder / "skypilot.yaml"))
except MissingToolError as error:
    print(error)
print(kubectl_says(folder / "kubernetes.yaml"))

# %% [markdown]
# **Read it.** No shell stands between the YAML and `torchrun`: `command` is a list, and Kubernetes fills in
# `$(NODE_RANK)`. Libraries that check YAML often *warn* about a kind that they do not know; here that is an error. The
# `Dockerfile` builds on NVIDIA's image, which brings PyTorch, CUDA and NCCL as one set: install nothing over it.
#
# ### A name that bites
#
# Job names come from people. Written into a script as they are, they could run as commands. `export` keeps plain words:

# %%
biting = "run'; touch stolen; echo $(touch taken) \"\n#SBATCH --nodes=99"
bitten = export(tiny, cluster, plan, Batch(sequences=16, sequence_length=16), name=biting)
print(bitten.slurm.splitlines()[1])
print(bitten.notes["slurm"][0])

# %% [markdown]
# ## 4. What to watch
#
# Losses go to files that survive the job. TensorBoard writes to a folder. So does W&B (Weights & Biases) with
# `mode="offline"`, on nodes without internet; `wandb sync` sends the folder later.

# %%
os.environ |= dict.fromkeys(("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"), str(folder))  # not your home
tempfile.tempdir = str(folder)
try:
    import wandb
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder / "board") as board:
        run = wandb.init(mode="offline", project="lesson-17", dir=folder, settings=wandb.Settings(silent=True))
        for step, loss in losses.items():
            board.add_scalar("loss", loss, step)
            run.log({"loss": loss}, step=step)
        run.finish()
    print("wrote", *(path.name for path in (*folder.glob("board/*"), *folder.glob("wandb/offline-run-*/*.wandb"))))
except ImportError as error:
    print(f'{error.name} is not installed: .venv/bin/python -m pip install ".[clusters]"')
tempfile.tempdir = None

# %% [markdown]
# ## Break it, diagnose it
#
# Three errors that you may meet on a cluster. Read each sentence, and say what you would do.

# %%
def on_an_older_node():
    if dist.get_rank() == 1:
        torch.__version__ = "2.11.0"  # this node was not updated
    check_versions()


def stopped_slurm():
    raise SlurmError(slurm_problem()) if slurm is None else slurm.run("sinfo")


# %%
if slurm:
    slurm.stop()
for attempt in (lambda: run_ranks(on_an_older_node, 2), stopped_slurm, lambda: read_yaml("spec:\n\tnodes: 2")):
    try:
        attempt()
    except (RankError, SlurmError, ManifestError) as error:
        print("-", str(error).split("\n\n")[0])

# %% [markdown]
# **Diagnose it.** Different PyTorch versions may *seem* to work: the exported script compares them before the first
# step. Where no controller answers, no command works: ask its owner. A tab looks like spaces in most editors.

# %% [markdown]
# ## 5. When to use which
#
# | launcher | use when | costs | does not help |
# |---|---|---|---|
# | torchrun | one machine, or a handful that you own | you restart, you find the nodes | queues, sharing |
# | Slurm | a shared cluster with a queue; most GPU clusters for research | root sets it up; one environment on all nodes | services, spot |
# | Kubernetes, Kubeflow | your company runs on it | images, volumes, an operator | a queue with fair shares: add Kueue |
# | Ray Train | preprocessing, tuning and training in one program | a cluster inside a cluster | plain static jobs |
# | SkyPilot | prices decide; spot in several clouds | saves in a bucket, restarts | machines that you own |
#
# ### From this course to a cluster
#
# | from this course | on a cluster |
# |---|---|
# | `run_ranks(worker, 4)` in a cell | a script: `export(...).write(folder)`, or your own with `joined_ranks()` |
# | `run_torchrun("train.py", 4)` | `sbatch job.slurm`, `python ray_train.py`, `kubectl apply -f kubernetes.yaml` |
# | `.venv` on your disk | one environment that all nodes see, or one image |
# | a folder | a shared file system: all ranks write a save together |
#
# Owners of clusters find modules, offline wheels and a shared home in
# `docs/cluster_owners.md`.

# %% [markdown]
# ### What changes on TPUs
#
# - **The chip.** A TPU v5p has 459 TFLOP/s in bf16 and 95 GB, and up to 8,960 of them form one **pod**,
#   joined by links of their own in a 3D torus
#   ([Google's page](https://docs.cloud.google.com/tpu/docs/v5p)). You do not rent nodes but a
#   *slice* of a pod, and mesh axes should match its shape. Between slices runs the data-center network.
# - **The program.** [TorchTPU](https://docs.cloud.google.com/tpu/docs/pytorch-on-tpu), open source, makes `"tpu"` a
#   device of PyTorch: one process a chip, eager or `torch.compile`, `torch.distributed` and DTensor as on GPUs. Before
#   it there was [PyTorch/XLA](https://docs.pytorch.org/xla/release/r2.8/perf/spmd_basic.html): you write for one
#   large device and mark how tensors are split, `xs.mark_sharding(weight, mesh, ("fsdp", "model"))`, and the XLA
#   compiler inserts the collectives. In JAX the same is `jit` with shardings.
# - **The traps.** `torch_xla` records operations and compiles whole graphs: each new shape compiles again, so pad to
#   fixed shapes. Reading a value on the host (`.item()`) cuts the graph.
# - **What stays.** Bytes per parameter, MFU, scaling laws, goodput, the decision matrix. Take the
#   chip's own peak, and a dated price.

# %% [markdown]
# ## Recap
#
# - One script, many launchers: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are the contract,
#   and equal losses the test.
# - A job survives by four things: requeue, a signal before the end, a save, an exit code that means "again".
#
# ### Test yourself
#
# Slurm kills your job at its time limit, and no save is there. Which two things are missing?
#
# <details><summary>Answer</summary>
#
# `--signal=USR1@120` in the script, and a handler in the ranks that saves after the step. (And `--requeue`, to go on.)
#
# </details>
#
# Do the [lab](../../labs/advanced/17_cluster_and_budget.ipynb), in a copy (`make my-labs`): its first exercise is about such a
# job, the others about [lesson 17a](17a_what_a_run_costs.ipynb). Then compare with the
# [solution](../../solutions/advanced/17_cluster_and_budget.ipynb).
#
# **References.** [Slurm's sbatch](https://slurm.schedmd.com/sbatch.html),
# [Ray Train](https://docs.ray.io/en/latest/train/train.html),
# [Kubernetes Jobs](https://kubernetes.io/docs/concepts/workloads/controllers/job/),
# [Kubeflow Trainer](https://www.kubeflow.org/docs/components/trainer/),
# [SkyPilot managed jobs](https://docs.skypilot.co/en/latest/examples/managed-jobs.html).

# %% [markdown]
# ## On Monday
#
# Submit with `sbatch --requeue --open-mode=append --signal=USR1@120 job.slurm`: a lost node brings the job back, and every rank that is
# a task of `srun` gets a signal two to three minutes before the time limit (choose more than a step and a save take; through `torchrun` it
# does not pass). In your loop the signal sets a flag, and the step after it saves and ends with 75; a script
# that sees 75 calls `scontrol requeue`. All ranks must agree on that step, so the flag is reduced over them.
#
# ```python
# import signal, sys
#
# asked = []
# signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
# for step in range(first_step, steps):
#     train_step(step)
#     stop = any_rank(bool(asked))  # torch.distributed.all_reduce of the flag, with ReduceOp.MAX
#     if stop or (step + 1) % every == 0:
#         save(step)
#     if stop:
#         sys.exit(75)
# ```
#
# `Trainer` saves and stops at SIGTERM, so `--signal=TERM@120`. It ends with 0 then: let the script requeue until your run is done.
# At the first start there is no checkpoint:
#
# ```python
# from transformers.trainer_utils import get_last_checkpoint
#
# args.enable_jit_checkpoint = True  # TrainingArguments, before the Trainer is made
# last = get_last_checkpoint(args.output_dir)  # None in an empty folder, which must be there
# # trainer.train(resume_from_checkpoint=last)
# ```
