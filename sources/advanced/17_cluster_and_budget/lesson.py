# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17 On a real cluster, within a budget
#
# {{badges}}
#
# **Promise.** You start one training script by torchrun and a real Slurm, see it under Ray, and compare losses.
# A node dies in the middle, and the job goes on without you. You write its files for Kubernetes and SkyPilot. Then you
# price the run, per token and by the deadline.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 90, and 75 for the lab | any laptop; Slurm needs Linux, root and its packages, else you see a recorded run | about a minute on two CPU cores, half of it Slurm's; beyond Binder's 1 GB |
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
import io
import os
import shutil
import tempfile
import time

import pandas as pd
import torch
import torch.distributed as dist

from utils import Batch, Cluster, Evidence, Plan, RankError, check, export, run_ranks, run_torchrun
from utils import scratch_folder, show
from utils.catalog import ModelShape
from utils.parallel import check_versions, saved_steps
from utils.lessons.lesson_17.cluster_lanes import draw_cluster
from utils.lessons.lesson_17.clusters import JobSpan, ManifestError, MissingToolError, Slurm, SlurmError
from utils.lessons.lesson_17.clusters import check_kubernetes, check_skypilot, check_train_job, kubectl_says
from utils.lessons.lesson_17.clusters import losses_of, ray_problem, read_yaml, run_ray, slurm_problem
from evidence.record import recorded

stored = {row["quantity"]: (row, record) for record in recorded("cluster_runs") for row in record.rows}

# %% [markdown]
# ## What you will be able to do
#
# - Start a job on a cluster, and keep it alive through dead nodes and time limits.
# - Write files for five launchers from one plan, and check the YAML before it costs money.
# - Price a run by the token, and decide between offers with the deadline in it.
#
# New words stand in the [glossary](../00_glossary.ipynb).
#
# ## One folder, every launcher
#
# A launcher starts processes and tells each its number and where to meet. The script should not know which launcher it
# was. So a plan is exported once: a tiny model, ZeRO-3 over two nodes of one rank each. Every file of the folder comes
# from this one object.
#
# The cell also starts a Slurm: a controller, its authentication and three nodes. Each node is a host of its own, made
# of namespaces as in lesson 11. Nothing of it can be reached from outside.

# %%
tiny = ModelShape(name="tiny", family="llama", layers=2, hidden=32, heads=4, kv_heads=2, feedforward=96,
                  vocabulary=64, max_sequence=16)
cluster = Cluster(gpu="A100-80GB", nodes=2, gpus_per_node=1)
plan = Plan(dp=2, zero_stage=3, micro_batch=2, framework="fp32")
job = export(tiny, cluster, plan, Batch(sequences=16, sequence_length=16))
folder = scratch_folder("lesson-17")
print(*(path.name for path in job.write(folder) if path.parent == folder))
print(job.slurm)

problem = slurm_problem()
slurm = None if problem else Slurm(nodes=3, lost_after_seconds=2)
print(problem or f"{slurm.run('sinfo', '--version').strip()} up after {slurm.up_seconds:.1f} s:",
      ", ".join(map(" ".join, slurm.nodes().items())) if slurm else "")
array = folder / "checksums.slurm"  # one script, four tasks, which need not run at once
for number in range(4):
    (folder / f"shard-{number}.bin").write_bytes(bytes([number]) * 2**20)
_ = array.write_text("#!/bin/bash\n#SBATCH --job-name=checksums --array=0-3 --output=checksum-%a.txt\n"
                     "sha256sum shard-$SLURM_ARRAY_TASK_ID.bin; sleep 1\n")

# %% [markdown]
# **Read it.** Slurm numbers its tasks; the script hands the numbers on under the names that PyTorch reads. `RANK` must
# be filled in *inside* `srun`, once in each rank; `MASTER_ADDR` *outside*, once for all. Exit code 75 means "saved,
# call me again".
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
    slurm.wait(training, slurm.submit(array), timeout_seconds=120)
    history, evidence, device = slurm.history, Evidence.MEASURED, "this machine"
    losses = losses_of((folder / f"tiny-{training}.out").read_text())
    accounting = slurm.accounting()
else:
    row, record = stored["slurm"]
    history, evidence, device = [JobSpan(**span) for span in row["history"]], Evidence.RECORDED, f"{record.device}, {record.date}"
    killed, losses, accounting = row["killed_at_seconds"], dict(enumerate(row["losses"])), row["accounting"]

# %%
figure = draw_cluster(history, ["n1", "n2", "n3"], killed={"n2": killed}, evidence=evidence, device=device,
                      title="A job loses a node, and goes on with another")
show(figure, alt="The job runs on n1 and n2; n2 dies; the array runs on n3; the job waits in the queue, then starts on n1 and n3.")
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
# ## The same losses
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
# batches depend on the *step* alone, and a save holds all states (lesson 16). A launcher that changes a loss has
# changed the number of ranks, or the data.
#
# <div class="alert alert-warning"><b>Trap.</b> Training runs of one array that share a <code>--saves</code> folder go
# on from each other's saves. Put <code>$SLURM_ARRAY_TASK_ID</code> into the path.</div>
#
# ## Kubernetes, SkyPilot, containers
#
# On Kubernetes a job is YAML. `kubernetes.yaml` needs built-in kinds alone: an indexed Job, a headless Service that
# gives pods names, a volume for saves. `trainjob.yaml` is Kubeflow's. **SkyPilot** looks for spot nodes in any cloud,
# and starts again elsewhere when they are taken. Each file is checked against its tool's own schema or types. Where
# these are not installed, the cell says so:

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
# ## What to watch
#
# Losses go to files that survive the job. TensorBoard writes to a folder. So does W&B (Weights & Biases) with
# `mode="offline"`, on nodes without internet; `wandb sync` sends the folder later.

# %%
try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder / "board") as board:
        for step, loss in losses.items():
            board.add_scalar("loss", loss, step)
    read = EventAccumulator(str(folder / "board")).Reload().Scalars("loss")
    print(f"TensorBoard: {len(read)} losses read back, the last {read[-1].value:.6f}")
    assert abs(read[-1].value - losses[29]) < 1e-6, "TensorBoard keeps float32"
except ImportError:
    print('TensorBoard is not installed: .venv/bin/python -m pip install ".[clusters]"')

# %%
os.environ |= dict.fromkeys(("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"), str(folder))  # not your home
tempfile.tempdir = str(folder)
try:
    import wandb

    run = wandb.init(mode="offline", project="lesson-17", dir=folder, settings=wandb.Settings(silent=True))
    for step, loss in losses.items():
        run.log({"loss": loss}, step=step)
    run.finish()
    print("W&B offline wrote", *(path.suffix for path in folder.glob("wandb/offline-run-*/*.wandb")))
except ImportError:
    print('W&B is not installed: .venv/bin/python -m pip install ".[clusters]"')
tempfile.tempdir = None

# %% [markdown]
# ## Where you outgrow one machine
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
#
# ## Break it, diagnose it
#
# Four errors that you may meet on a cluster. Read each sentence, and say what you would do.

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
for attempt in (lambda: run_ranks(on_an_older_node, 2), stopped_slurm, lambda: read_yaml("spec:\n\tnodes: 2"),
                lambda: check_kubernetes("apiVersion: v1\nkind: Podd\n")):
    try:
        attempt()
    except (RankError, SlurmError, ManifestError, MissingToolError) as error:
        print("-", str(error).split("\n\n")[0])

# %% [markdown]
# **Diagnose it.** Different PyTorch versions may *seem* to work: the exported script compares them before the first
# step. A tab looks like spaces in most editors. `Podd` is a typing
# error.

# %% [markdown]
# ## The account of a run
#
# What does the job cost, and is the money well spent? Two shares answer the
# second question. **MFU** (model FLOP utilization) counts what the model needs. **HFU** (hardware FLOP
# utilization) counts what was computed, recomputation included. Both divide by what the devices could
# have computed in that time:
#
# $$\text{MFU} = \frac{\text{FLOP that the model needs}}{\text{seconds} \times \text{GPUs} \times \text{peak}}$$
#
# First forward and backward of a small model, with and without checkpointing. The peak is here the speed of a large
# matrix product on the same cores. PyTorch counts the FLOP of every operation, and the planner's formula predicts them.
# Checkpointing every block should add a forward of the blocks.

# %%
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from utils import Transformer, TransformerConfig, checkpoint_blocks
from utils.planner.flops import hardware_flops, model_flops

small = ModelShape(name="small", family="llama", layers=4, hidden=256, heads=8, feedforward=704,
                   vocabulary=256, max_sequence=128, positions="rotary", tied=False)
batch = Batch(sequences=8, sequence_length=128)
needed = model_flops(small, batch)
tokens_in = torch.randint(0, 256, (8, 128), generator=torch.Generator().manual_seed(0))


def step(model):
    logits = model(tokens_in).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, tokens_in.flatten()).backward()


# %%
square = torch.randn(2048, 2048)


def share_of_peak(work, flop, rounds=7):
    shares = []  # each step beside a large product of the same moment; other programs do not count
    for _ in range(rounds):
        began = time.process_time()
        torch.mm(square, square)
        between = time.process_time()
        work()
        product, step_seconds = between - began, time.process_time() - between
        shares.append(flop / step_seconds / (2 * 2048**3 / product))
    return sorted(shares)[rounds // 2]


# %%
computed = {}
for again in (False, True):
    model = Transformer(TransformerConfig.from_shape(small))
    model = checkpoint_blocks(model, every=int(again))
    with FlopCounterMode(display=False) as counter:
        step(model)
    computed[again] = counter.get_total_flops()
    mfu = share_of_peak(lambda model=model: step(model), needed)
    formula = hardware_flops(small, Plan(recompute="full" if again else "none", attention="unfused"), batch)
    print(f"checkpointing {again!s:<6} needs {needed / 1e9:.1f} GFLOP, formula {formula / 1e9:.1f}, counted "
          f"{computed[again] / 1e9:.1f}; MFU {mfu:.0%}, HFU {mfu * computed[again] / needed:.0%} "
          f"({Evidence.MEASURED})")

# %% tags=["nbval-check-output"]
counts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
too_old = "" if counts else f" (not counted on a CPU: PyTorch {torch.__version__} is too old)"
scores, last = (2 * width * 256 * batch.tokens for width in (128, 704))  # queries times keys, and the last product
print(f"without: counted - needed = {(computed[False] - needed) / 1e9:.2f} GFLOP; "
      f"flash computes the scores again: {4 * scores / 1e9:.2f}{too_old}")
added, forward = computed[True] - computed[False], needed / 3 - 2 * 256 * 256 * batch.tokens
print(f"with: {added / 1e9:.2f} more; a forward pass of the blocks {forward / 1e9:.2f}, less the last "
      f"product of each block {4 * last / 1e9:.2f}")
assert too_old or computed[False] - needed == 4 * scores, "the counter should see the scores computed twice"
assert too_old or added == forward - 4 * last, "recomputation should stop before each block's last product"

# %% [markdown]
# **Read it.** Counter and formula differ, and the last cell accounts for every FLOP between them. The attention kernel
# recomputes its scores even without checkpointing. And PyTorch stops recomputing as soon as it has what backward
# needs, so the last product of each block is spared. HFU flatters: it pays you for doing work twice. Compare runs by
# MFU.
#
# Now published runs: GPU hours of [Llama 2](https://arxiv.org/abs/2307.09288) and
# [LLaMA](https://arxiv.org/abs/2302.13971), at a dated price. Energy is GPU hours x board
# power x **PUE** (power of the building over that of its machines), 1.1 as in the LLaMA paper. The
# hosts draw more on top of it.

# %%
from utils.catalog import device, model_shape, old_prices, price
from utils.lessons.lesson_17.account import Account
from evidence.validation import table

a100 = price("A100-80GB", "Lambda")
print(f"A100-80GB ${a100.usd_per_gpu_hour} ({a100.origin()}, age in days {a100.age_days()}); "
      f"{device('A100-80GB').board_watts} W (read {device('A100-80GB').as_of})")
rows = []
for row in table("gpu_hours"):
    if not row["model"].startswith(("LLaMA-65B", "Llama2")):
        continue
    n, d = float(row["params_b"]) * 1e9, float(row["tokens"].rstrip("T")) * 1e12
    run = Account(gpu="A100-80GB", seconds=3600 * float(row["gpu_hours"]), tokens=d, model_flops=6 * n * d,
                  usd_per_gpu_hour=a100.usd_per_gpu_hour)
    rows.append({"model": row["model"], "GPU hours (published)": f"{run.gpu_hours:,.0f}", "MFU": f"{run.mfu:.0%}",
                 "million $": f"{run.usd / 1e6:.2f}", "$ a million tokens": f"{run.usd_per_million_tokens:.2f}",
                 "MWh": f"{run.kwh() / 1000:,.0f}"})
display(pd.DataFrame(rows).style.hide().set_caption("Published GPU hours, at the price and the power above"))
print("older than a year:", ", ".join(f"{p.gpu} at {p.provider}" for p in old_prices()) or "none")

# %% [markdown]
# **Read it.** The LLaMA paper's Table 15 prints 449 MWh for its 65B model: the same arithmetic. MFU here
# counts 6 FLOP per parameter and token and leaves attention out. A price without a date is refused,
# and one older than a year is flagged wherever it appears.
#
# ## How many tokens does the money buy?
#
# The loss of a model with $N$ parameters after $D$ tokens follows a law
# ([Hoffmann and others 2022](https://arxiv.org/abs/2203.15556)):
#
# $$L(N, D) = E + \frac{A}{N^\alpha} + \frac{B}{D^\beta}, \qquad C = 6 N D$$
#
# Fit one yourself. Five tiny models read 8 bytes and guess the ninth; a token is a byte. The learning
# rate is constant, so each point of a run is like the end of a shorter one. The largest model is kept
# out of the fit.

# %%
from utils import text_tokens
from utils.lessons.lesson_17.scaling_figures import draw_runs
from utils.lessons.lesson_17.scaling_fit import fit_law, leave_one_out

windows = text_tokens(3_200_000).long().unfold(0, 9, 9)
windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
unseen, seen = windows[:20_000], windows[20_000:]


# %%
def train(width, steps=320, batch=1024):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 16), torch.nn.Flatten(), torch.nn.Linear(128, width),
                                torch.nn.ReLU(), torch.nn.Linear(width, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0, fused=True)
    for i in range(1, steps + 1):
        rows = seen[(i - 1) * batch : i * batch]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1]).backward()
        optimizer.step()
        if i in (80, 110, 160, 220, steps):
            with torch.no_grad():
                loss = torch.nn.functional.cross_entropy(model(unseen[:, :-1]), unseen[:, -1])
            yield 384 * width, i * batch, loss.item()  # parameters of the matrices


# %%
runs = [row for width in (8, 16, 32, 64) for row in train(width)]
larger = list(train(128))
law = fit_law(runs)
alt = "Loss falls with tokens and with size; lines of the fit run through four sizes and near the fifth."
show(draw_runs(runs, law, held_out=larger, title="A scaling law from four small models, and a fifth"), alt=alt)
foretold = law.loss(*larger[-1][:2])
print(f"the model kept out: {larger[-1][2]:.3f} {Evidence.MEASURED}, {foretold:.3f} {Evidence.PREDICTED}")
for row in [law, *leave_one_out(runs)]:
    print(f"{row.source:<15} E {row.e:.2f}  alpha {row.alpha:.2f}  beta {row.beta:.2f}")
assert abs(foretold - larger[-1][2]) < 0.1, "twice the size should lie near the fitted law"

# %% [markdown]
# **Read it.** Twice the size is foretold well. The floor $E$ is not: leave one size out and it moves,
# and $\alpha$ moves with it. Each of these floors lies below every loss that was measured. A fit
# predicts near its data. The published laws rest on hundreds of runs, and still:

# %%
from utils.lessons.lesson_17.scaling import CHINCHILLA, REPLICATION, UNROUNDED
from utils.lessons.lesson_17.scaling_figures import draw_purchase

budget_usd, mfu = 1_000_000, 0.45
flop = budget_usd / a100.usd_per_gpu_hour * 3600 * device("A100-80GB").peak_flops_per_second("bf16") * mfu
laws = {"replication 2024": REPLICATION, "as printed 2022": CHINCHILLA, "not rounded 2022": UNROUNDED}
for name, one in laws.items():
    n, d = one.best_parameters(flop), one.best_tokens(flop)
    print(f"{name:<17} {n / 1e9:5.1f}B on {d / 1e9:6,.0f}B tokens, {d / n:4.0f} a parameter")
quality = REPLICATION.loss(13e9, 260e9)
served = [10.0**k for k in (9, 10, 11, 12, 13, 14)]
figure = draw_purchase(laws, flop, served, quality, title=f"What ${budget_usd:,} buys, and for whom")
alt = "Left: each law's valley is flat and wide, and their floors lie at different sizes. "
show(figure, alt=alt + "Right: the more tokens are served, the more training tokens a parameter pay.")

# %% [markdown]
# **Read it.** One experiment, three answers. Rounding its constants moves 53 tokens a parameter to 83; the rest is the fit.
# [Besiroglu and others 2024](https://arxiv.org/abs/2404.10102) fitted again and found the 20 that the paper's other
# two methods gave. The valley (left) is flat: twice or half the best size costs less than 0.01 nats. That is why
# over-training is cheap. Right: the cheapest way, in FLOP, to the loss of 13B on 260B. A served token costs $2N$,
# so a model with many users should be smaller and train longer ([Sardana and others
# 2023](https://arxiv.org/abs/2401.00448)): total $6ND + 2N D_{served}$.
#
# **Question.** A model reads as many tokens in service as it was trained on. What share of its
# life's FLOP was training?

# %%
training_share = ...
check("17.training_share", training_share)

# %% [markdown]
# ## Spot, and what it really costs
#
# A spot node is cheap and taken back at will. All nodes are needed, so each loss costs a restart and the
# work since the last checkpoint. A useful hour costs the price over the **goodput** (the share of time
# that is lasting work). Here are 8 nodes of H100 at two dated prices, with the simulated runs of lesson 16
# as points and Daly's formula as lines.

# %%
from utils.planner.failing_runs import RunPlan, failing_runs
from utils.planner.goodput import DAY, best_interval_seconds, working_share
from utils.lessons.lesson_17.decision_figures import draw_spot

firm, spot = price("H100", "Nebius", kind="on demand"), price("H100", "Nebius", kind="spot")
nodes, broken, restart = 8, 6.5e-3, 300.0  # failures of a node and day: published for RSC-1


def goodputs(taken_a_day, save):
    mean = DAY / (nodes * (broken + taken_a_day))
    every = max(best_interval_seconds(save, mean), 1.0)
    plan = RunPlan(DAY, every, save, restart, nodes, 1000 * (broken + taken_a_day))
    return working_share(every, save, restart, mean), failing_runs(plan, 100).goodput.mean()


# %%
lines, points = {}, {}
for save in (10, 60, 600):
    name, kept = f"checkpoint {save} s", goodputs(1e-9, save)[0]
    ratio = spot.usd_per_gpu_hour / firm.usd_per_gpu_hour * kept
    found = {rate: goodputs(rate, save) for rate in (0.1, 1, 3, 6, 10, 15, 20, 30)}
    lines[name] = [(rate, ratio / line) for rate, (line, _) in found.items()]
    points[name] = [(rate, ratio / runs) for rate, (_, runs) in found.items()]
    worst = max(abs(line / runs - 1) for line, runs in found.values() if runs > 0.5)
    print(f"{name}: formula and simulation within {worst:.1%} where half of the time is work")
alt = "Spot costs less than half while nodes stay; the curves rise with interruptions and cross 1, first "
show(draw_spot(lines, points, title=f"8 nodes of H100, spot at {spot.usd_per_gpu_hour / firm.usd_per_gpu_hour:.0%} of the firm price"),
     alt=alt + "with slow checkpoints.")
print(spot.origin(), "|", firm.origin())

# %% [markdown]
# **Read it.** Spot pays where a curve lies under 1: up to a few losses per node and day with checkpoints of ten
# minutes, more than ten with quick ones. Two things are not in the dollars. The run takes longer by a factor of one
# over goodput, which a deadline may forbid. And a provider takes nodes back in crowds, when everybody wants them: then
# no other node is at hand.
#
# ## The scenario as asked: A100s or A10s
#
# *13B parameters: A100s at 45% MFU with 3D parallelism, or cheaper A10s at 38% with data parallelism and
# checkpointing?* Before weighing anything, check that both can run, and price the useful FLOP.

# %%
from utils import cost, estimate, search
from utils.catalog import link
from utils.planner import Lora
from utils.lessons.lesson_17.decision import Option, decide, winners
from utils.lessons.lesson_17.decision_figures import draw_decision

thirteen, tokens, deadline = model_shape("llama-2-13b"), 260e9, 30
train_batch = Batch(sequences=1024, sequence_length=2048)
hourly = {name: price(name, "Lambda").usd_per_gpu_hour for name in ("A100-80GB", "A10")}
for name, share in (("A100-80GB", 0.45), ("A10", 0.38)):
    useful = device(name).bf16_tflops * share
    print(f"{name:<10} ${hourly[name]:.2f} for {useful:.0f} useful TFLOP/s: ${1e3 * hourly[name] / useful:.1f} for 1,000 of them, an hour")
h100 = Cluster(gpu="H100", nodes=4, usd_per_gpu_hour=firm.usd_per_gpu_hour,
               network_bytes_per_second=8 * link("InfiniBand NDR").link_bytes_per_second)
llama_3_mfu = min(float(row["bf16_mfu_pct"]) for row in table("llama3_table4")) / 100
hundred = link("Ethernet 100G")  # one port a node, of RoCE, for all A10s
a10s = Cluster(gpu="A10", nodes=16, gpus_per_node=8, network_bytes_per_second=hundred.link_bytes_per_second, usd_per_gpu_hour=hourly["A10"])
plain = estimate(thirteen, a10s, Plan(dp=128, recompute="full", framework="zero-paper"), train_batch)
print(f"weights {2 * thirteen.parameter_count / 1e9:.0f} GB, with Adam's states {plain.peak.state_bytes / 1e9:.0f} GB, on a card of 24")

# %% [markdown]
# **Read it.** The A10 is cheaper an hour and dearer a FLOP. And plain data parallelism cannot start on
# it: the weights alone overflow the card, checkpointing or not. Checkpointing shrinks activations, and
# those are not the problem. What *could* run on A10s? Each way gets the lower of the MFU that was
# claimed and the one that the planner predicts. A mark is the best value over the option's own, times the
# weight; so one more option changes marks only where it is best at something. The weeks of work are a judgement.

# %%
zero_3 = {"zero_stage": 3, "recompute": "full", "framework": "fsdp"}
ways = {  # name: (cards of 8 a node, network, plan, MFU claimed, effort in weeks: a judgement)
    "64 A100, 3D": ("A100-80GB", 8, None, Plan(dp=8, tp=4, pp=2, zero_stage=1, sequence_parallel=True), 0.45, 3),
    "128 A10, plain DP": ("A10", 16, hundred, Plan(dp=128, recompute="full", framework="zero-paper"), 0.38, 1),
    "128 A10, ZeRO-3, 100G": ("A10", 16, hundred, Plan(dp=128, micro_batch=8, **zero_3), 0.38, 2),
    "256 A10, ZeRO-3, 100G": ("A10", 32, hundred, Plan(dp=256, micro_batch=4, **zero_3), 0.38, 2),
    "192 A10, PP 6, 100G": ("A10", 24, hundred, Plan(dp=32, pp=6, zero_stage=1, recompute="full"), 0.38, 4),
    "256 A10, TP 2 PP 8, 100G": ("A10", 32, hundred, Plan(dp=16, tp=2, pp=8, zero_stage=1), 0.38, 5),
}
signed = export(thirteen, Cluster(gpu="A100-80GB", nodes=8), ways["64 A100, 3D"][3], train_batch)
print(f"# written to build/lesson-17: {len(signed.write(here.root / 'build' / 'lesson-17'))} files for 64 A100")


def found(card, nodes, network, plan, claimed, weeks, usd=None):
    fast = {} if network is None else {"network_bytes_per_second": network.link_bytes_per_second, "network_kind": network.kind}
    machines = Cluster(gpu=card, nodes=nodes, usd_per_gpu_hour=usd or hourly[card], **fast)
    row = estimate(thirteen, machines, plan, train_batch)
    return row, row.mfu / min(row.mfu, claimed), weeks


# %%
def matrix(a10_usd=None):
    rows = []
    for name, way in ways.items():
        row, slower, weeks = found(*way, usd=a10_usd if way[0] == "A10" else None)
        if not row.fits:
            full = f"states of {row.peak.state_bytes / 1e9:.0f} GB on a card of 24"
            rows.append(Option(name, {}, obstacle=full))
            continue
        bill = cost(row, tokens)
        rows.append(Option(name, {"usd": bill.usd * slower, "days": bill.days * slower, "weeks": weeks}))
    return rows


weights, limits = {"usd": 3, "days": 1, "weeks": 1}, {"days": deadline}
ranked = decide(matrix(), weights, limits)
rows = [{"": row.option.name, **row.option.values, "marks": row.score, "out, because": row.struck} for row in ranked]
display(pd.DataFrame(rows).style.format({"usd": "{:,.0f}", "days": "{:.1f}", "weeks": "{:.0f}", "marks": "{:.2f}"}, na_rep="")
        .hide().set_caption(f"13B on {tokens / 1e9:.0f}B tokens in {deadline} days ({Evidence.PREDICTED})"))

# %%
prices = [hourly["A10"] * k / 20 for k in range(4, 27)]
shares = [k / 24 for k in range(25)]
grid = winners(matrix, prices, lambda usd: {"usd": usd, "days": (1 - usd) / 2, "weeks": (1 - usd) / 2}, shares, limits)
even = hourly["A100-80GB"] * device("A10").bf16_tflops * 0.38 / (device("A100-80GB").bf16_tflops * 0.45)
print(f"per useful FLOP an A10 breaks even at ${even:.2f} an hour, {even / hourly['A10'] - 1:.0%}")
alt = f"Left: {ranked[0].option.name} leads; plain DP is out for memory, 128 A10 for the deadline. Right: A10s win "
figure = draw_decision(ranked, grid, shares, prices, title=f"13B on {tokens / 1e9:.0f}B tokens in {deadline} days",
                       weight_label="weight of dollars (rest: days and weeks alike)",
                       price_label="A10, $ an hour", now=(0.6, hourly["A10"]))
show(figure, alt=alt + "only where they cost far less than listed.")

# %% [markdown]
# **Read it.** Memory and deadline come first: no weight makes up for a run that cannot start or comes
# too late. Then see how far the cross, today's price and weights, is from a border. A decision near one
# is no decision.
#
# What would let A10s win? A price well under the break-even *and* a fast network. Or
# another task: adapters.

# %%
for card, base in (("A10", "bf16"), ("A10", "nf4-dq"), ("A100-80GB", "bf16")):
    plan = Plan(dp=8, recompute="full", lora=Lora(base=base))
    one = Cluster(gpu=card, nodes=1, usd_per_gpu_hour=hourly[card])
    row = estimate(thirteen, one, plan, Batch(sequences=64, sequence_length=2048))
    usd = f"${cost(row, 1e9).usd_per_million_tokens:.2f} a million tokens" if row.fits else "does not fit"
    print(f"LoRA, base in {base:<7} on 8 {card:<10} plain DP: {row.peak.needed_bytes / 1e9:4.0f} GB, {usd} ({Evidence.PREDICTED})")
best, claimed = search(thirteen, h100, train_batch).best, llama_3_mfu
bill, slower = cost(best, tokens), best.mfu / min(best.mfu, claimed)
print(f"nobody asked for 32 H100: MFU {best.mfu:.0%} ({Evidence.PREDICTED}), {claimed:.0%} for Llama 3 405B ({Evidence.PUBLISHED}); "
      f"by the lower {bill.days * slower:.1f} days, ${bill.usd * slower:,.0f} ({firm.origin()})")

# %% [markdown]
# **Read it.** With a 4-bit base, plain data parallelism runs on A10s, and a token still costs more than
# on A100s (both at the planner's MFU). A good answer also asks which card is missing from the question. H100s
# follow the matrix's rule, the lower of a claimed MFU and the planner's: the claim is the lowest in Llama 3's table, of
# a far larger run. The price is another provider's.
#
# ## What changes on TPUs
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
# - **The traps.** `torch_xla` records operations and compiles whole graphs, as `torch.compile` does: a new shape
#   compiles again, so pad to fixed shapes. Reading a value on the host (`.item()`) cuts the graph.
# - **What stays.** Bytes per parameter, MFU, scaling laws, goodput, the decision matrix. Take the
#   chip's own peak, and a dated price.

# %% [markdown]
# ## When to use which
#
# | launcher | use when | costs | does not help |
# |---|---|---|---|
# | torchrun | one machine, or a handful that you own | you restart, you find the nodes | queues, sharing |
# | Slurm | a shared cluster with a queue; most GPU clusters for research | root sets it up; one environment on all nodes | services, spot |
# | Kubernetes, Kubeflow | your company runs on it | images, volumes, an operator | a queue with fair shares: add Kueue |
# | Ray Train | preprocessing, tuning and training in one program | a cluster inside a cluster | plain static jobs |
# | SkyPilot | prices decide; spot in several clouds | saves in a bucket, restarts | machines that you own |

# %% [markdown]
# ## Recap
#
# - One script, many launchers: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are the contract,
#   and equal losses the test.
# - A job survives by four things: requeue, a signal before the end, a save, an exit code that means "again".
# - MFU, price and goodput give dollars per token. Memory and deadline come before any weight.
#
# ### Test yourself
#
# 1. Slurm kills your job at its time limit, and no save is there. Which two things are missing?
# 2. An offer has half the price an hour and 40% of the useful FLOP/s. Take it?
#
# <details><summary>Answers</summary>
#
# 1. `--signal=USR1@120` in the script, and a handler in the ranks that saves after the step. (And `--requeue`, to go on.)
# 2. No: a useful FLOP costs 1.25 times as much. Only if memory and deadline leave nothing else.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/advanced/17_cluster_and_budget.ipynb), in a copy: `make my-labs` makes one. Then compare with
# the [solution](../../solutions/advanced/17_cluster_and_budget.ipynb). The [capstone](99_capstone.ipynb) asks for all of it.
#
# **References.** [Slurm's sbatch](https://slurm.schedmd.com/sbatch.html),
# [Ray Train](https://docs.ray.io/en/latest/train/train.html),
# [Kubernetes Jobs](https://kubernetes.io/docs/concepts/workloads/controllers/job/),
# [Kubeflow Trainer](https://www.kubeflow.org/docs/components/trainer/),
# [SkyPilot managed jobs](https://docs.skypilot.co/en/latest/examples/managed-jobs.html). The papers of the budget stand
# where they are used; Daly's stands in lesson 16.
