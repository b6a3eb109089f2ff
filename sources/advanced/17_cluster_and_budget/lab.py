# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 17: On a real cluster, within a budget
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 4 of 5 | 75 | lessons 17 and 17a; any laptop (Linux, macOS, WSL2) |
#
# Three exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check`
# that says *not attempted*, *not yet* with a nudge, or *correct*. Hints are folded away: click one
# to open it. The first exercise follows [lesson 17](../../notebooks/advanced/17_cluster_and_budget.ipynb), the others
# [17a](../../notebooks/advanced/17a_what_a_run_costs.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/advanced/17")

# %%
from utils import check
from utils.lessons.lesson_17.repairs import broken

# %% [markdown]
# ## Exercise 1: a job that must not lose a step
#
# A colleague's job trains on two nodes. On this cluster a node's container starts once, so Slurm starts **one task a
# node**, a shell that starts two ranks. The ranks never meet, and the job would survive neither its time limit nor a
# rank that fails. `train.py` stands for a training script: its ranks meet as PyTorch's do, by `RANK`, `WORLD_SIZE`,
# `MASTER_ADDR` and `MASTER_PORT`, but start in a tenth of a second. `ranks.wait()` waits for all ranks;
# `ranks.any(flag)` tells every rank whether the flag of any rank is true.

# %%
print(broken("job.slurm"))
print("-" * 80)
print(broken("train.py"))

# %% [markdown]
# **Spec.** Repair both, as texts. Keep two nodes, one task on each, two ranks in a task, `out.txt`, and
# `python -u train.py`, started by `srun`. There are ten mistakes; lines that worked in the lesson may be wrong here.
#
# - All four ranks meet, also when the nodes do not share a network name such as `localhost`.
# - Slurm warns the job with `SIGUSR1` two minutes before its time is over. Then the job saves, ends with code 75, and is
#   requeued, however often.
# - By Slurm's default the signal comes to the first process of each task alone; with `SignalChildrenProcesses=yes` it comes
#   to every process. The job saves on both kinds of cluster. Ranks may hear it at different moments, some not at all, and
#   one rank may end a minute after another.
# - A job whose node dies is started again, also where the ranks of the other node end before Slurm has seen it, which
#   may take 500 s. A job that fails every time is not started again for ever.
# - A task ends with 0 only if both of its ranks did. `out.txt` shows every step once, also after a signal.
#
# The check runs both texts with stand-ins, for each kind of cluster. Where a Slurm can be started, it runs them under
# one, too, which signals every process.

# %%
# BEGIN SOLUTION
repaired_job = """#!/bin/bash
#SBATCH --job-name=lab-17 --nodes=2 --ntasks-per-node=1 --time=5
#SBATCH --output=out.txt --open-mode=append --requeue
#SBATCH --signal=USR1@120
export MASTER_PORT=29517 WORLD_SIZE=$((2 * SLURM_NTASKS))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
set -o pipefail
srun --kill-on-bad-exit=0 --wait=60 bash -c '
  for i in 0 1; do RANK=$((2 * SLURM_PROCID + i)) python -u train.py & ranks+=($!); done
  trap "kill -USR1 ${ranks[*]}" USR1  # it may come to this shell alone: hand it on
  for rank in "${ranks[@]}"; do
    wait $rank; ended=$?; [ $ended -le 128 ] || { wait $rank; ended=$?; }  # the signal ended the wait, not the rank
    [ $ended = 0 ] || code=$ended
  done
  exit ${code:-0}
' | tee -a losses.txt
code=$?
if [ $code = 75 ]; then
  scontrol requeue $SLURM_JOB_ID
elif [ $code != 0 ]; then  # a rank failed: try again, 3 times after the same save
  echo "after $(cat save.json 2>/dev/null)" >> failures.txt
  if [ $(grep -cxF "$(tail -n 1 failures.txt)" failures.txt) -le 3 ]; then scontrol requeue $SLURM_JOB_ID; fi
fi
exit $code
"""
# END SOLUTION
# STUB: repaired_job = ...

# %%
# BEGIN SOLUTION
changes = {
    "def leave(number, frame):\n    save(step)\n    raise SystemExit(75)\n\n\nsignal.signal(signal.SIGUSR1, leave)\n":
        "asked = []\nsignal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))\n",
    "    ranks.wait()  # gradients\n": "    ends = ranks.any(bool(asked))  # waits for the gradients, too\n",
    "    if (step + 1) % 6 == 0:\n        save(step + 1)\n":
        "    if ends or (step + 1) % 6 == 0:\n        save(step + 1)\n    if ends:\n        raise SystemExit(75)\n",
}
repaired_train = broken("train.py")
for old, new in changes.items():
    repaired_train = repaired_train.replace(old, new)
# END SOLUTION
# STUB: repaired_train = ...

check("17.repaired_job", {"job.slurm": repaired_job, "train.py": repaired_train})

# %% [markdown]
# <details><summary>Hint 1</summary>Who fills in each <code>$</code>, how often, and on which node? The batch script
# runs once, on the first node. What stands in single quotes is filled in by each node's shell.</details>
# <details><summary>Hint 2</summary>Follow one number: a rank ends with 75. Who is told, and what does that one end
# with? <code>wait</code>, the shell, <code>srun</code>, <code>tee</code>, <code>$?</code>. And what does
# <code>srun</code> do with the tasks that have not ended yet?</details>
# <details><summary>Hint 3</summary>A signal handler runs in the middle of a step, on some ranks. It should note the
# signal and no more. In the loop, all ranks ask <code>ranks.any(...)</code> once a step, so that they save after the
# same one. And what does the signal do to the shell, the first process of its task: to one that has no <code>trap</code>,
# and to the <code>wait</code> of one that has?</details>

# %% [markdown]
# ## Exercise 2: the cheapest way to a loss by a deadline
#
# You get a scaling law, a loss to reach, a deadline, offers of machines, and how many tokens the model
# will serve in its life. **Spec.** `cheapest_run(law, loss, days, offers, served_tokens)` returns
# `{"offer": name, "nodes": ..., "parameters": ...}`, or `None` where there is no way. It must
#
# - reach the loss: `law.tokens_for(loss, parameters)` tokens, at 6 FLOP per parameter and token;
# - be in time: `offer.days(nodes, train_flop) <= days`. Serving has no deadline;
# - fit: `offer.holds(nodes, parameters)`;
# - cost at most 1% more than the best of all: `offer.usd(nodes, train_flop, serve_flop)`, with 2 FLOP per
#   parameter and token served.
#
# A node has 8 GPUs. The last number below is the share of speed lost each time the nodes double. The check
# tries everything and compares. Your score is the dollars of all its markets together.

# %%
import math

from utils.lessons.lesson_17.budget import lab_offers
from utils.lessons.lesson_17.scaling import REPLICATION

offers = lab_offers()
for offer in offers:
    print(f"{offer.name:<5} ${offer.usd_per_gpu_hour} an hour ({offer.as_of}), {offer.flops_per_second / 1e12:.0f} useful "
          f"TFLOP/s, up to {offer.most_nodes} nodes, -{offer.lost_per_doubling:.0%} a doubling")


# %%
def cheapest_run(law, loss, days, offers, served_tokens):
    # BEGIN SOLUTION
    if loss <= law.e:
        return None
    best, found = math.inf, None
    sizes = [law.least_parameters(loss) * 1.001 * 100 ** (k / 200) for k in range(201)]
    for offer in offers:
        for nodes in range(1, offer.most_nodes + 1):
            for size in sizes:
                flop = 6 * size * law.tokens_for(loss, size)
                usd = offer.usd(nodes, flop, 2 * size * served_tokens)
                if usd < best and offer.holds(nodes, size) and offer.days(nodes, flop) <= days:
                    best, found = usd, {"offer": offer.name, "nodes": nodes, "parameters": size}
    return found
    # END SOLUTION


check("17.cheapest_run", cheapest_run)

# %% [markdown]
# <details><summary>Hint 1</summary>Three loops are enough: offers, nodes, sizes. Strike out first what is late or
# does not fit, then compare dollars.</details>
# <details><summary>Hint 2</summary>Sizes begin a little above <code>law.least_parameters(loss)</code>, which raises
# where no model reaches the loss. Space them evenly in the logarithm, over a factor of 100.</details>
# <details><summary>Hint 3</summary>The size that trains cheapest is not the one that lives cheapest.</details>
#
# Then ask your search: the loss of 7B parameters on 140B tokens (`REPLICATION.loss(7e9, 140e9)`), in 30 days, with no
# token served and with 5e12. What changes?

# %%
# BEGIN SOLUTION
target = REPLICATION.loss(7e9, 140e9)
for served in (0, 5e12):
    found = cheapest_run(REPLICATION, target, 30, offers, served)
    print(f"{served:.0e} tokens served: {found['parameters'] / 1e9:.1f}B on {8 * found['nodes']} {found['offer']}")
# END SOLUTION

# %% [markdown]
# ## Exercise 3: a decision matrix, reviewed
#
# A colleague's matrix prefers 256 A100 to 128 H100, for 30B parameters on 600B tokens. Review it.

# %%
from utils.lessons.lesson_17.matrix import KINDS, matrix_text

print(matrix_text())
print("kinds:", ", ".join(KINDS))

# %% [markdown]
# **Spec.** `lines` says of each line, by its number as text, which kind it is: `"right"`, `"forward only"`
# (too few passes counted), `"sparsity"` (a peak that dense products do not reach), `"no date"`, `"HFU"`
# (taken for MFU), `"memory"` (ignored) or `"units"`. Take one repeated block as a whole forward pass.
# Then repair the matrix, with `device` and `price` of `utils.catalog` (`price("A100-80GB", "Lambda")`,
# `price("H100", "Nebius")`). Where states do not fit they are sharded, at the same MFU. `days` and `usd` are
# dictionaries with the keys `"A100"` and `"H100"`; `winner` is one of these.

# %%
# BEGIN SOLUTION
from utils.catalog import device, price

wrong = {1: "forward only", 2: "sparsity", 5: "no date", 6: "HFU", 8: "memory", 9: "units"}
lines = {str(n): wrong.get(n, "right") for n in range(1, 13)}
days, usd = {}, {}
for card, name, provider, gpus, mfu in (("A100", "A100-80GB", "Lambda", 256, 0.54 * 6 / 8),
                                        ("H100", "H100", "Nebius", 128, 0.40)):
    speed = gpus * device(name).peak_flops_per_second("bf16") * mfu
    days[card] = 6 * 30e9 * 600e9 / speed / 86_400 / 0.95
    usd[card] = days[card] * 24 * gpus * price(name, provider).usd_per_gpu_hour
winner = "H100"
print({card: f"{days[card]:.1f} days, ${usd[card]:,.0f}" for card in days})
# END SOLUTION
# STUB: lines = ...
# STUB: days = ...
# STUB: usd = ...
# STUB: winner = ...

check("17.matrix_reviewed", {"lines": lines, "days": days, "usd": usd, "winner": winner})

# %% [markdown]
# <details><summary>Hint 1</summary>Six lines are right. Check each number that has a source against the catalog:
# <code>device(...)</code>, <code>price(...)</code>.</details>
# <details><summary>Hint 2</summary>With every block recomputed a step makes four passes' worth of work where the
# model needs three.</details>
# <details><summary>Hint 3</summary>A GiB is 2**30 bytes, a GB 10**9.</details>
#
# Here is the [solution](../../solutions/advanced/17_cluster_and_budget.ipynb) of this lab, with its
# outputs.
