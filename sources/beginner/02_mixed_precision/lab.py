# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 02: Mixed precision on a vision model
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 2 of 5 | 45 | lesson 02; any laptop |
#
# Six exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check`
# that says *not attempted*, *not yet* with a nudge, or *correct*. Hints are folded away: click one
# to open it. The exercises follow the
# [lesson](../../notebooks/beginner/02_mixed_precision.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/beginner/02")

# %%
import torch
import torch.nn.functional as F
from torch import nn

from utils import check, resnet, simulate

# %% [markdown]
# ## Exercise 1: convert a step
#
# **Spec.** `amp_step` is the fp32 step below in fp16 mixed precision: forward and loss under autocast in
# `torch.float16`, on `"cpu"`, and everything else through the `scaler`, a `torch.amp.GradScaler`. It
# returns the loss, unscaled, as a Python number.

# %%
def fp32_step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


# %%
def amp_step(model, optimizer, scaler, inputs, labels):
    # BEGIN SOLUTION
    optimizer.zero_grad()
    with torch.amp.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()
    # END SOLUTION


check("02.amp_step", amp_step)

# %% [markdown]
# <details><summary>Hint 1</summary>Only forward and loss go inside the <code>with</code>.</details>
# <details><summary>Hint 2</summary>Three calls on the scaler: one makes the loss large, one replaces
# <code>optimizer.step()</code>, one adapts the scale.</details>
# <details><summary>Hint 3</summary><code>scaler.scale(loss)</code> returns a new tensor. Backward starts there;
# <code>loss</code> itself stays as it is.</details>

# %% [markdown]
# ## Exercise 2: predict the bytes
#
# **Spec.** `bytes_at_backward(parameters, per_image, batch, mixed)` returns the bytes that are alive when
# backward begins, in training with Adam from its second step on. `per_image` are the bytes of
# activations that one image takes in fp32. `mixed` is True for mixed precision. Take it that every
# weight is cast, that all activations halve, and that there are no gradients yet. Leave buffers and
# inputs out.

# %%
def bytes_at_backward(parameters: int, per_image: int, batch: int, mixed: bool) -> float:
    # BEGIN SOLUTION
    states = 4 * parameters + 8 * parameters
    if mixed:
        return states + 2 * parameters + per_image * batch / 2
    return states + per_image * batch
    # END SOLUTION


check("02.bytes_at_backward", bytes_at_backward)

# %% [markdown]
# <details><summary>Hint 1</summary>Weights and Adam's two means are there in both, in fp32.</details>
# <details><summary>Hint 2</summary>Mixed precision halves one term and adds another.</details>
# <details><summary>Hint 3</summary>The added term is a 16-bit copy of each weight.</details>

# %% [markdown]
# ## Exercise 3: the break-even batch
#
# **Spec.** `break_even_batch(parameters, per_image)` returns the smallest whole batch at which mixed
# precision holds *less* than fp32 when backward begins, by the formula of exercise 2.

# %%
def break_even_batch(parameters: int, per_image: int) -> int:
    # BEGIN SOLUTION
    return 2 * parameters * 2 // per_image + 1
    # END SOLUTION


check("02.break_even_batch", break_even_batch)

# %% [markdown]
# <details><summary>Hint 1</summary>Set what is added against what is saved.</details>
# <details><summary>Hint 2</summary>Added: 2 bytes per parameter. Saved: half of an image's activations, times the
# batch.</details>
# <details><summary>Hint 3</summary>At equality nothing is saved yet. Whole-number division and + 1.</details>

# %% [markdown]
# ## Exercise 4: the largest batch on a card, in few simulations
#
# **Spec.** `largest_on_card(simulated_peak_bytes, limit_bytes)` returns the largest batch whose peak stays
# within the limit. `simulated_peak_bytes(batch)` costs seconds a call: **your score is the number of
# calls**, and 8 are allowed. For large batches the peak is nearly a straight line; for small ones it
# is flat, since it lies in the optimizer step. Batch 1 always
# fits, batch 2048 never. Nothing runs out of memory in a simulation, so
# you may try large sizes.

# %%
def largest_on_card(simulated_peak_bytes, limit_bytes: int) -> int:
    # BEGIN SOLUTION
    low, high = 0, 2048
    low_bytes, high_bytes = None, simulated_peak_bytes(high)
    while high - low > 1:
        per_image = (high_bytes - (low_bytes or 0)) / (high - low)
        guess = high - int((high_bytes - limit_bytes) / per_image) - (high_bytes == limit_bytes)
        guess = min(max(guess, low + 1), high - 1)
        found = simulated_peak_bytes(guess)
        if found <= limit_bytes:
            low, low_bytes = guess, found
        else:
            high, high_bytes = guess, found
    return low
    # END SOLUTION


check("02.largest_on_card", largest_on_card)

# %% [markdown]
# <details><summary>Hint 1</summary>Keep one size that fits and one that does not, as in lab 01.</details>
# <details><summary>Hint 2</summary>Instead of the middle, try the size at which the straight line between the two
# crosses the limit.</details>
# <details><summary>Hint 3</summary>A guess must lie strictly between the two. Stop when they are neighbours.</details>

# %% [markdown]
# ### Use it
#
# Here your function meets 4 GB of a simulated card and ResNet-18 in mixed precision. Each call is a whole
# simulated step. Until your function returns a number, the cell prints nothing.

# %%
def build():
    model = resnet(18, stem="cifar")
    return model, torch.optim.Adam(model.parameters())


def simulated_peak(batch: int) -> int:
    calls.append(batch)

    def step(model, optimizer):
        optimizer.zero_grad()
        with torch.amp.autocast("cpu", dtype=torch.float16):
            outputs = model(torch.randn(batch, 3, 32, 32))
            loss = F.cross_entropy(outputs, torch.randint(0, 10, (batch,)))
        loss.backward()
        optimizer.step()

    return simulate(build, step, device="V100 16GB", items=batch, unit="images").peak_bytes


calls = []
found = largest_on_card(simulated_peak, 4 * 10**9)
if isinstance(found, int):
    print(f"ResNet-18, mixed precision, 4 GB: batch {found}, {len(calls)} simulations: {calls}")

# %% [markdown]
# ## Exercise 5: the learning rate
#
# **Spec.** `scaled_rate(rate, old_batch, new_batch, optimizer)` returns the learning rate for the new batch:
# by the linear rule for `"sgd"`, by the square-root rule for `"adam"`.

# %%
def scaled_rate(rate: float, old_batch: int, new_batch: int, optimizer: str) -> float:
    # BEGIN SOLUTION
    ratio = new_batch / old_batch
    return rate * (ratio if optimizer == "sgd" else ratio**0.5)
    # END SOLUTION


check("02.scaled_rate", scaled_rate)

# %% [markdown]
# <details><summary>Hint 1</summary>Both rules depend on <code>new_batch / old_batch</code> alone.</details>
# <details><summary>Hint 2</summary>Both rules also hold when the batch shrinks.</details>

# %% [markdown]
# ## Exercise 6: break it, diagnose it
#
# Three runs that do not train. Their code is in one function on purpose: read the *measurements* first,
# not the code. Each run has one of three faults:
#
# - `"no scaler"`: fp16 under autocast, with a very small loss, and nothing that scales it.
# - `"new scaler each step"`: the scaler is made inside of the loop, with too large a first scale.
# - `"half with Adam"`: `model.half()`, trained by Adam.

# %%
def watched(fault, steps=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 10))
    inputs, labels = torch.randn(64, 24), torch.randint(0, 10, (64,))
    if fault == 0:
        model, inputs = model.half(), inputs.half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for number in range(steps):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, enabled=fault == 1)
        optimizer.zero_grad()
        with torch.amp.autocast("cpu", dtype=torch.float16, enabled=fault != 0):
            loss = F.cross_entropy(model(inputs), labels) * (1e-7 if fault == 2 else 1)
        scaler.scale(loss).backward()
        grads = torch.cat([p.grad.flatten().float() for p in model.parameters()])
        before = scaler.get_scale()  # 1 without a scaler
        scaler.step(optimizer)
        scaler.update()
        weights = all(p.isfinite().all() for p in model.parameters())
        print(f"step {number}: loss {loss.item():.4g}, scale {before:.4g}, gradients finite: {bool(grads.isfinite().all())},",
              f"zero: {100 * (grads == 0).float().mean():.0f}%, weights finite after: {weights}")  # fmt: skip


for number, name in enumerate(["run A", "run B", "run C"]):
    print(name)
    watched(number)

# %% [markdown]
# **Spec.** Name the cause of each run: one of the three texts above, in quotes.

# %%
# BEGIN SOLUTION
run_a = "half with Adam"
run_b = "new scaler each step"
run_c = "no scaler"
# END SOLUTION
# STUB: run_a = run_b = run_c = ...

check("02.diagnose", {"run A": run_a, "run B": run_b, "run C": run_c})

# %% [markdown]
# <details><summary>Hint 1</summary>In which run do finite gradients make weights that are not finite?</details>
# <details><summary>Hint 2</summary>In which run do the gradients overflow again and again, at a scale that
# never falls?</details>
# <details><summary>Hint 3</summary>In which run is nearly every gradient exactly 0?</details>
#
# Here is the [solution](../../solutions/beginner/02_mixed_precision.ipynb) of this lab, with its
# outputs.
