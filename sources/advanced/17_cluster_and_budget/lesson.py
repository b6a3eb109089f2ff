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
# **The question.** A node dies under your job, and later its time limit comes. What makes the job go on, and are its losses those of
# a run without trouble?
#
# In this run its losses agree to a millionth with those of a run without trouble. Without the optimizer's states they do not.
#
# You run one script on a real Slurm, whose three nodes share your machine. You kill a node, and send the job the signal that
# comes before a time limit. [Lesson 17a](17a_what_a_run_costs.ipynb) asks what a run costs.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60, and 75 for the lab | any laptop; Slurm needs Linux, root and its packages, else you see a recorded run | two to four minutes on two CPU cores, most of it Slurm's; beyond Binder's 1 GB |
#
# ## A bet
#
# After `sbatch` one of a job's two nodes dies, and later its time limit comes. How many commands must you type until the job has trained
# to its end?

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

from utils import Batch, Cluster, Evidence, Plan, check, export, run_torchrun, scratch_folder, show
from utils.catalog import ModelShape
from utils.parallel import Saves
from utils.lessons.lesson_17.cluster_lanes import draw_troubles
from utils.lessons.lesson_17.cluster_runs import account, next_save, past_save, restarted, uneven_ends
from utils.lessons.lesson_17.clusters import Slurm, losses_of, ray_problem, run_ray, slurm_problem
from utils.lessons.lesson_17.signal_figure import draw_signal
from evidence.record import recorded

stored = {row["quantity"]: (row, record) for name in ("cluster_runs", "cluster_troubles")
          for record in recorded(name) for row in record.rows}

# %% [markdown]
# ## 1. One script, whoever starts it
#
# A **launcher** starts a job's ranks. The ranks find each other by five environment variables, each rank's number and where all meet:
# `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.
#
# `export` writes a plan as one training script and a file for each launcher. The plan is a tiny model under ZeRO-3, on two nodes of
# one rank each. The first launcher is **Slurm**, the [queue](../00_glossary.ipynb) of a shared cluster. A *job* is a script with the nodes
# that it wants. The cell starts a real one here: a controller, and three nodes with networks of their own and pretended GPUs.

# %%
tiny = ModelShape(name="tiny", family="llama", layers=2, hidden=32, heads=4, kv_heads=2, feedforward=96,
                  vocabulary=64, max_sequence=16)
cluster = Cluster(gpu="A100-80GB", nodes=2, gpus_per_node=1)
plan = Plan(dp=2, zero_stage=3, micro_batch=2, framework="fp32")
job = export(tiny, cluster, plan, Batch(sequences=16, sequence_length=16))
folder = scratch_folder("lesson-17")
print(*(path.name for path in job.write(folder) if path.parent == folder))
script = (folder / "train.py").read_text()
print("train.py from its training on:", script[script.index("def train(") :], job.slurm, sep="\n" + "-" * 80 + "\n")

problem = slurm_problem()
slurm = None if problem else Slurm(nodes=3, lost_after_seconds=2)
print(problem or f"{slurm.run('sinfo', '--version').strip()} up after {slurm.up_seconds:.1f} s:",
      ", ".join(map(" ".join, slurm.nodes().items())) if slurm else "")

# %% [markdown]
# **Read it.** `train.py` names no launcher: `run`, in its last line, reads the five variables and joins the ranks. `job.slurm` fills
# them in. `srun` starts the ranks. `RANK` differs from rank to rank, so it is set inside. `Saves` loads the newest save, if there is one.
# Exit code 75 is an agreement of the two files: "I have saved, start me again."
#
# ## 2. A node dies, and the job comes back by itself
#
# The job saves after every fifth step, and the cell makes two troubles:
#
# 1. Two steps after a save it kills every process of node `n2`, Slurm's own too.
# 2. After the next save it sends the job the signal `USR1`. That stands for the time limit: with `--signal=USR1@120` Slurm sends it 120 s
#    before the limit, or up to a minute earlier ([sbatch](https://slurm.schedmd.com/sbatch.html)).
#
# In the picture, find the two times when `n1` is empty after start 1. What ends each?

# %%
if slurm:
    if slurm.nodes()["n2"] != "idle":  # this cell ran before
        slurm.start_node("n2")
    slurm.history.clear()
    training = slurm.submit(folder / "job.slurm", "--steps", "30", "--every", "5")
    trains = [next_save(slurm, training, folder)]  # when its first start had saved
    killed = past_save(slurm, training, folder)  # it has done two steps since
    slurm.kill_node("n2")
    trains.append(next_save(slurm, training, folder))  # its second start
    slurm.run("scancel", "--signal=USR1", str(training))
    signalled = slurm.seconds
    restarted(slurm, training, times=2)
    trains.append(next_save(slurm, training, folder))
    slurm.wait(training, timeout_seconds=400)
    seen = account(slurm, training, folder, killed=killed, signalled=signalled, trains=trains)
    evidence, device = Evidence.MEASURED, "this machine"
else:
    seen, record = stored["slurm"]
    evidence, device = Evidence.RECORDED, f"{record.device}, {record.date}"
show(draw_troubles(seen, evidence=evidence, device=device),
     alt="The job runs on n1 and n2; n2 dies; it waits, starts on n1 and n3, saves at a signal, waits, and starts a third time.")

# %%
print(f"your bet: {my_bet_commands} commands; it took none (the notebook's scancel stands for the time limit).\n"
      f"From the kill to the first new save {seen['trains'][1] - seen['killed']:.0f} s ({evidence}, {device})")

# %% [markdown]
# **Read it.** From 1 to 2 no step runs: the rank on `n1` has lost its peer, and Slurm lets a node be silent for `SlurmdTimeout`, 2 s here.
# Then `n1` is empty, because a requeued job must wait for `cred_expire`, 5 s here. It waits again after the signal.
#
# **By Slurm's defaults 1 to 3 takes minutes, and then comes the queue.** `SlurmdTimeout` is 300 s, and `cred_expire` 120 s
# ([slurm.conf](https://slurm.schedmd.com/slurm.conf.html)).
#
# Who put the job back into the queue? First Slurm's log and accounting:

# %%
print(seen["decisions"], seen["accounting"], sep="\n\n")

# %% [markdown]
# The first time it was Slurm itself, for the dead node; `--requeue` allows that. The second time (`PENDING` here) the log names no failure. The
# job's own output, below, has the reason: `srun` reports exit code 75, for which `job.slurm` calls `scontrol requeue`.
#
# A third trouble, not run here, is a rank that fails on a healthy node. `srun` gives up 60 s after the first rank has ended
# (`--wait=60`), and the `elif` requeues, at most three times after the same save. If a dead node's connections close, this may come
# before Slurm's 300 s are over, unless it is the job's first node: `job.slurm` runs there.
#
# Is anything lost? This is what the job printed around its restarts (steps and errors alone):

# %%
lines = seen["log"].splitlines()
near = [any("srun" in line for line in lines[max(0, i - 3) : i + 4]) for i in range(len(lines))]
print(*(line if near[i] else "..." for i, line in enumerate(lines) if near[i] or i == 0 or near[i - 1]), sep="\n")
done = re.findall(r"step (\d+) loss ([\d.]+)", seen["log"])
twice = sorted({int(step) for i, (step, _) in enumerate(done) if step in dict(done[:i])})
print(f"\n{len(dict(done))} of 30 steps have a loss; done twice: {twice}, with {len(set(done)) - len(dict(done))} other losses")

# %% [markdown]
# After the dead node the steps since the last save ran again, with the same losses. After the signal no step ran twice. The
# losses do not fall: the tokens are random.
#
# **Question.** Another job's last whole save was made after four steps. It had printed the losses of steps 0 to 5 when its node died. How
# many steps are computed twice?

# %%
steps_twice = ...
check("17.steps_twice", steps_twice)

# %% [markdown]
# ## 3. The time limit: a signal, a save, exit code 75
#
# A time limit gives a warning, but the right process must hear it. In the middle `srun` starts a rank itself, as in `job.slurm`. On the
# right it starts torchrun, which starts the rank.

# %%
show(draw_signal(), alt="Slurm signals the first process of srun's tasks: a rank, or a torchrun, which dies of it; torchrun's rank and the batch shell hear nothing.")

# %% [markdown]
# By default Slurm signals only the first process of a task ([cgroup.conf](https://slurm.schedmd.com/cgroup.conf.html)). In `job.slurm` that
# is python, because `exec` puts it in the shell's place. Under `srun torchrun` it is torchrun, and the rank ends without a save ("On
# Monday" mends it). The right side is not run here: this notebook's Slurm signals all processes of a task.
#
# Ranks may hear the signal in different steps. If each saved at once, some would wait in a save and others in a step. So the handler only
# notes the signal, in `_asked`. After each step the ranks ask each other whether anyone has heard it, and all save after the same step:

# %%
print(inspect.getsource(Saves.kept))

# %% [markdown]
# `_any_rank` is one all-reduce a step, and the host waits for its answer. The seconds in `--signal` must cover a step, a save and the end
# of all processes.
#
# ### Break it: ranks that do not end together
#
# Two `sleep`s stand for two ranks that have saved; the second ends 10 s after the first. What does `srun` do with it under
# `--kill-on-bad-exit=1`, and what under the flags of `job.slurm`?

# %%
print(uneven_ends(slurm, folder) if slurm else seen["uneven_ends"], f"({evidence}, {device})")
if slurm:
    slurm.stop()

# %% [markdown]
# Under `1`, `srun` takes the first 75 for a failure, and ends the second task by a signal. The script sees 128 + the signal's number, and
# counts a failure. The flags of `job.slurm` give the second task 60 s, and the script sees 75.
#
# ## 4. The losses agree to a millionth
#
# The reference is the same folder under `torchrun`, without any trouble. Three runs are compared with it:
#
# - the job of section 2;
# - a run under **Ray Train**, recorded on another day, so its gap may not be the launcher's: one worker was killed after the save of
#   step 4, and all start anew;
# - a planted fault: after four steps it goes on from its save without Adam's moments and step count.

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
rows = {"Slurm, both troubles": (seen["losses"], f"{evidence}, {device}"),
        "Ray, a worker lost": (ray["losses"], f"recorded, {ray_record.device}, {ray_record.date}")}
run_ray_here = False  # True: takes a minute and more
if run_ray_here and not ray_problem():
    shutil.rmtree(folder / "saves", ignore_errors=True)  # where ray_train.py saves
    rows["Ray here"] = run_ray(folder, "--steps", "30", "--every", "2", kill_after=4).losses, "measured"

# %%
def largest_gap(found: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(found, alone, strict=True))

print(f"{'torchrun':<21} step 29 {alone[29]:.7f}, the reference (measured)")
for name, (found, kind) in rows.items():
    print(f"{name:<21} step 29 {found[29]:.7f}, relative gap at most {largest_gap(found):.0e} ({kind})")
    assert largest_gap(found) < 1e-6, f"{name} computes something else"
print(f"{'Adam states lost':<21} step 29 {faulty[29]:.7f}, relative gap at most {largest_gap(faulty):.0e} (measured)")

# %% [markdown]
# **Read it.** Under Slurm and Ray the losses agree to a millionth with those of the run without trouble. Without the optimizer's states
# they do not.
#
# These runs also share what no fault tests here: a batch depends on its step alone, and the number of ranks stays. With dropout, save
# the random generators' states, too, and with a `DataLoader` its place.
#
# <div class="alert alert-warning"><b>Trap.</b> Jobs that share a folder of saves go on from each other's. So <code>job.slurm</code> puts
# the job's number into the folder's name: a requeue keeps it, and a new <code>sbatch</code> begins from nothing.</div>
#
# ## 5. Kubernetes, Ray and SkyPilot
#
# On **Kubernetes**, `kubernetes.yaml` makes a Job of numbered **pods**, one for each node, each with a *container* that
# runs torchrun. (`trainjob.yaml` is for Kubeflow's trainer.) The `Dockerfile` builds it on NVIDIA's image, which has its own PyTorch, CUDA
# and NCCL: install no other torch over it. **SkyPilot** rents nodes in many clouds. Neither runs here. These
# lines start a job again:

# %%
ANSWERS = {
    "kubernetes.yaml": {
        "restartPolicy": "a container that ends is not started again in its pod",
        "backoffLimitPerIndex": "the Job makes a new pod instead, at most this often for each number",
        "node-rank": "the new pod has the old one's number, and gives it to torchrun",
    },
    "ray_train.py": {"max_failures": "all workers start anew, at most this often"},
    "skypilot.yaml": {
        "strategy": "nodes are gone: look in another region at once",
        "max_restarts": "the script failed: start it again, at most this often",
    },
}
for name, meanings in ANSWERS.items():
    print(name)
    for word, meaning in meanings.items():
        line = next(line for line in (folder / name).read_text().splitlines() if word in line)
        print(f"  {line.strip().removesuffix('),'):<46} {meaning}")

# %% [markdown]
# They differ in how they look for a dead node (published defaults of recent versions):
#
# | launcher | looks for a dead node |
# |---|---|
# | Slurm | gives it up after `SlurmdTimeout`, 300 s, or somewhat later |
# | [Kubernetes](https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/) | notices it after 50 s; the new pod waits until the old one has failed, as when its node is deleted |
# | [Ray Train](https://github.com/ray-project/ray/blob/master/src/ray/common/ray_config_def.h) | asks every 3 s, five failures are a death |
# | [SkyPilot](https://github.com/skypilot-org/skypilot/blob/master/sky/jobs/utils.py) | asks every 15 s |
#
# When Kubernetes drains a node, it sends SIGTERM 30 s before the kill, and `train.py` saves at SIGTERM, too.
#
# **What to watch.** The losses, in files that outlive the job: TensorBoard writes a folder, and so does W&B with `mode="offline"`. And the
# log's age: a peer that hangs closes no connection, nor does a node that loses power. NCCL's watchdog ends the collective only after 10
# minutes (`timeout` of `init_process_group`).
#
# <details><summary>What changes on TPUs</summary>
#
# You rent a *slice* of a **pod**: all chips that share one network, 8,960 of a
# [TPU v5p](https://docs.cloud.google.com/tpu/docs/v5p).
# [TorchTPU](https://docs.cloud.google.com/tpu/docs/pytorch-on-tpu) makes `"tpu"` a device of PyTorch. The older
# [PyTorch/XLA](https://docs.pytorch.org/xla/release/r2.8/perf/spmd_basic.html) compiles whole graphs, again for each new shape: pad.
#
# </details>

# %% [markdown]
# ## Recap
#
# A job goes on by three parts. Under Slurm:
#
# | trouble | the save | who notices | who starts it again |
# |---|---|---|---|
# | a node dies | the last one | Slurm, by the node's silence | Slurm, by `--requeue`; or `job.slurm`, if its node lives and `srun` ends first |
# | a rank fails (not run here) | the last one | `srun`, by its exit code | `job.slurm`, three times after the same save |
# | the time limit comes (here its signal) | a new one, after the same step on all ranks | the ranks, by `USR1` | `job.slurm`, at exit code 75 |
#
# In this run its losses agree to a millionth with those of a run without trouble. Without the optimizer's states they do not.
#
# **Test yourself.** Under `srun torchrun` your job ends at the signal, without a save. Who heard the signal?
#
# <details><summary>Answer</summary>
#
# torchrun alone, and it died of it. `--signals-to-handle` makes it hand the signal to its ranks.
#
# </details>
#
# Do exercise 1 of the [lab](../../labs/advanced/17_cluster_and_budget.ipynb), in a copy (`make my-labs`); the others are about
# [lesson 17a](17a_what_a_run_costs.ipynb). Then compare with the [solution](../../solutions/advanced/17_cluster_and_budget.ipynb).
#
# **References.** [srun](https://slurm.schedmd.com/srun.html), [Kubeflow Trainer](https://www.kubeflow.org/docs/components/trainer/).

# %% [markdown]
# ## On Monday
#
# Below your own `#SBATCH` lines, these requeue as `job.slurm` does:
#
# ```bash
# #SBATCH --requeue --open-mode=append --signal=USR1@120
# export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
# saves=saves-$SLURM_JOB_ID  # a requeue keeps the number
# # exec: Slurm signals a task's first process, which must be python and no shell.
# srun --kill-on-bad-exit=0 --wait=60 bash -c '
#   export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
#   exec python -u train.py "$@"' rank --saves "$saves"
# code=$?
# if [ "$code" = 75 ]; then  # saved, because Slurm asked for it
#   scontrol requeue "$SLURM_JOB_ID"
# elif [ "$code" != 0 ]; then  # a rank failed or a node died: again, three times after the same save
#   echo "after $(ls -t "$saves" 2>/dev/null | head -n 1)" >> "failures-$SLURM_JOB_ID"
#   failures=$(grep -cxF "$(tail -n 1 "failures-$SLURM_JOB_ID")" "failures-$SLURM_JOB_ID")
#   if [ "$failures" -le 3 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
# fi
# exit "$code"
# ```
#
# In your loop the signal sets a flag, and all ranks agree on it. The loop goes on from the newest save in the folder `--saves`:
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
#         save(step + 1)  # so many steps are done
#     if stop:
#         barrier()  # torch.distributed.barrier: no rank leaves while another saves
#         sys.exit(75)
# ```
#
# **With torchrun.** Under `srun torchrun` add `--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1`. torchrun then hands `USR1` to
# its ranks, gives them 30 s, and ends with 1. The script's `elif` requeues that.
#
# **With a `Trainer`** of transformers 5, on one rank, write `--signal=TERM@120`, set `enable_jit_checkpoint=True`, and save into `$saves`:
# `--output_dir "$saves"` for `--saves "$saves"`, logs elsewhere. At SIGTERM it saves and ends with 0, finished or not; these lines make
# "not finished" 75. On several ranks use the loop above. With early stopping test for that, too, or a job that is done starts again.
#
# ```python
# import os, pathlib, shutil, sys
# from transformers.trainer_utils import get_last_checkpoint
#
# out = trainer.args.output_dir
# os.makedirs(out, exist_ok=True)
# for save in pathlib.Path(out).glob("checkpoint-*"):
#     if (save / "checkpoint-is-incomplete.txt").exists() or not (save / "trainer_state.json").exists():
#         shutil.rmtree(save)  # cut off: trainer_state.json comes last
# trainer.train(resume_from_checkpoint=get_last_checkpoint(out))
# if trainer.state.global_step < trainer.state.max_steps:
#     sys.exit(75)
# ```
