# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 03: When numbers break
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 3 of 5 | 80 | lesson 03; any laptop |
#
# Six exercises: you read bits, write a loss scaler, clip in the right place, keep a layer in fp32, find bad
# data, and name five faults from their records alone. Each ends in a `check`. Hints are folded away. The exercises follow
# the [lesson](../../notebooks/beginner/03_when_numbers_break.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/beginner/03")

# %%
import math

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from utils import check, explore, show
from utils.labs.faulty_runs import FAULTS, mystery_runs, spoiled_run
from utils.lessons.lesson_03.flight import draw_flight
from utils.lessons.lesson_03.format_figures import draw_bits

# %% [markdown]
# ## Exercise 1: read the bits
#
# **Spec.** `decode_float(bits, exponent_bits, mantissa_bits)` returns the value of a bit pattern, a
# string of "0"s and "1"s: sign, exponent, mantissa. The bias is $2^{x-1} - 1$ for $x$ exponent bits.
# An exponent of all zeros means a subnormal number (or zero), one of all ones means infinity
# (mantissa zero) or NaN. It must work for any split: fp16 is 5 and 10, bf16
# is 8 and 7. (fp8 e4m3, without infinity, is left out.) Look at some patterns first:

# %% jupyter={"source_hidden": true}
show(*draw_bits("bf16", 0.1, "first exponent bit"))
explore(draw_bits, format=["fp32", "tf32", "bf16", "fp16"],
        value=[0.1, 1.0, 1.001, 2049.0, 65504.0, 70000.0, 1e-7, 2e-8, 1e-40],
        flip=["no bit", "sign bit", "first exponent bit", "last exponent bit", "first mantissa bit", "last mantissa bit"])

# %%
def decode_float(bits: str, exponent_bits: int, mantissa_bits: int) -> float:
    # BEGIN SOLUTION
    sign = -1.0 if bits[0] == "1" else 1.0
    exponent = int(bits[1 : 1 + exponent_bits], 2)
    fraction = int(bits[1 + exponent_bits :], 2) / 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 2**exponent_bits - 1:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * 2.0 ** (1 - bias) * fraction
    return sign * 2.0 ** (exponent - bias) * (1 + fraction)
    # END SOLUTION


check("03.decode_float", decode_float)

# %% [markdown]
# <details><summary>Hint 1</summary><code>int("0101", 2)</code> is 5. Cut the string into three parts.</details>
# <details><summary>Hint 2</summary>A normal number is 2^(e - bias) times (1 + f / 2^m), a subnormal one
# 2^(1 - bias) times f / 2^m.</details>
# <details><summary>Hint 3</summary>Both kinds of zero, both infinities and NaN come out of the same three
# cases. Python has <code>math.inf</code> and <code>math.nan</code>.</details>

# %% [markdown]
# ## Exercise 2: a loss scaler by hand
#
# **Spec.** `LossScaler(scale, growth_interval)` has an attribute `scale` and a method
# `step(optimizer)`, which is called after the backward of the *scaled* loss. It divides all gradients by
# the scale. If one of them is not finite, it leaves the parameters alone and halves the scale. If all
# are finite, it calls `optimizer.step()`; after `growth_interval` good steps in a row it doubles the
# scale and counts anew. It returns whether it stepped. The check compares with `torch.amp.GradScaler`.

# %%
class LossScaler:
    def __init__(self, scale: float, growth_interval: int) -> None:
        # BEGIN SOLUTION
        self.scale = scale
        self.growth_interval = growth_interval
        self.good_steps = 0
        # END SOLUTION

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        # BEGIN SOLUTION
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        for gradient in gradients:
            gradient.div_(self.scale)
        if not all(gradient.isfinite().all() for gradient in gradients):
            self.scale, self.good_steps = self.scale / 2, 0
            return False
        optimizer.step()
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0
        return True
        # END SOLUTION


check("03.loss_scaler", LossScaler)

# %% [markdown]
# <details><summary>Hint 1</summary><code>optimizer.param_groups</code> holds the parameters; their
# <code>.grad</code> can be divided in place with <code>div_</code>.</details>
# <details><summary>Hint 2</summary>A skipped step sets the count of good steps back to zero.</details>
# <details><summary>Hint 3</summary>Divide by the scale that the loss was multiplied with, and change it only
# afterwards.</details>

# %% [markdown]
# ## Exercise 3: clip in the right place
#
# **Spec.** `clipped_step(loss, parameters, optimizer, scaler, max_norm)` does everything from the
# backward to the update of the scale: the gradients that the optimizer steps with have a norm of at
# most `max_norm`, whatever the scale is, and a step whose gradients overflowed is skipped. `loss` is
# not scaled yet, and old gradients are cleared already. `parameters` is a list, `scaler` a `torch.amp.GradScaler`.

# %%
def clipped_step(loss, parameters, optimizer, scaler, max_norm):
    # BEGIN SOLUTION
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, max_norm)
    scaler.step(optimizer)
    scaler.update()
    # END SOLUTION


check("03.clipped_step", clipped_step)

# %% [markdown]
# <details><summary>Hint 1</summary>The scaler has four methods that matter here: <code>scale</code>,
# <code>unscale_</code>, <code>step</code> and <code>update</code>.</details>
# <details><summary>Hint 2</summary>If you do not unscale, <code>scaler.step</code> does it: after your clip.</details>

# %% [markdown]
# ## Exercise 4: keep a layer in fp32
#
# **Spec.** `InFp32(layer)` is an `nn.Module` that runs `layer` in fp32, whatever autocast is at work around it:
# its fp16 input is lifted, and nothing inside is cast down again. It returns fp32, its parameters are the
# layer's, and autocast goes on after it. Everything runs on the CPU.

# %%
class InFp32(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # BEGIN SOLUTION
        self.layer = layer
        # END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # BEGIN SOLUTION
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float())
        # END SOLUTION


check("03.in_fp32", InFp32)

# %% [markdown]
# <details><summary>Hint 1</summary><code>torch.autocast("cpu", enabled=False)</code> switches it off inside of the
# <code>with</code>.</details>
# <details><summary>Hint 2</summary>Switched off, autocast lifts nothing either: the input is still fp16.</details>

# %% [markdown]
# ## Exercise 5: find bad data
#
# This run was recorded in fp16. Its scale starts too large, so a few steps are skipped for no fault of
# the data. Somewhere later, one element of one input row is NaN. Look at the record first.

# %%
records = spoiled_run()
show(draw_flight(records, title="A run with a NaN in its data"),
     alt="A run of 16 steps with some skipped; the task is to find which skipped step is a fault.")
record = records[0]
print(f"records[0]: .step {record.step}, .loss {record.loss:.2f}, .scale {record.scale:,.0f}, .skipped {record.skipped}")
print(f"its .first: .kind {record.first.kind!r}, .module {record.first.module!r}, .rows {record.first.rows}")

# %% [markdown]
# **Spec.** `find_bad_data(records)` returns the step and the row of the first bad input as a tuple, such
# as `(3, 17)`, or `None` if all inputs were fine. `record.step` counts from 0; `record.first` is
# `None` or has `kind`, `module` and `rows`. The lesson's section 3 lists the kinds. The check tries it on other runs, too.

# %%
def find_bad_data(records):
    # BEGIN SOLUTION
    for record in records:
        if record.first is not None and record.first.kind == "input":
            return record.step, record.first.rows[0]
    return None
    # END SOLUTION


check("03.find_bad_data", find_bad_data)

# %% [markdown]
# <details><summary>Hint 1</summary>A skipped step is no proof: which kind do the first skipped steps have?</details>
# <details><summary>Hint 2</summary><code>kind == "input"</code> means: it came in from outside.</details>
# <details><summary>Hint 3</summary>Not every record has a <code>first</code>. Ask for that before its kind.</details>

# %% [markdown]
# ## Exercise 6: break it, diagnose it
#
# Five runs, "A" to "E". Each was recorded in fp16 and once more in fp32, with the same fault. You do
# not see their code. Name the fault of each from the evidence.

# %%
runs, rows = mystery_runs(), []
for name, twins in runs.items():
    for dtype, run in twins.items():
        first = next((record for record in run if record.first), None)
        rows.append({"run": name, "dtype": dtype, "first loss": run[0].loss, "last loss": run[-1].loss,
                     "largest finite loss": max((r.loss for r in run if math.isfinite(r.loss)), default=math.nan),
                     "skipped": sum(r.skipped for r in run),
                     "first not finite": f"step {first.step}: {first.first}" if first else "none"})
print("the faults:", ", ".join(FAULTS))
pd.DataFrame(rows).set_index(["run", "dtype"]).style.format("{:.3g}", subset=["first loss", "last loss", "largest finite loss"])

# %% [markdown]
# Change the letter and the dtype to see another record:

# %%
show(draw_flight(runs["A"]["fp16"], title="Run A, fp16"),
     alt="The four panels of the flight recorder for the chosen run.")

# %% [markdown]
# **Spec.** Write one of the names in `FAULTS` for each run.

# %%
# BEGIN SOLUTION
diagnosis = {"A": "learning rate", "B": "no unscale", "C": "NaN in the data", "D": "loss overflows",
             "E": "norm in fp16"}
# END SOLUTION
# STUB: diagnosis = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ...}

check("03.diagnosis", diagnosis)

# %% [markdown]
# <details><summary>Hint 1</summary>Which fp32 twins fail, too? These two faults are not about precision.</details>
# <details><summary>Hint 2</summary>Of the others, one has no tensor that is not finite. Compare its two norms.</details>
# <details><summary>Hint 3</summary>Of the last two, ask the first tensor that is not finite for its kind.</details>
#
# Here is the [solution](../../solutions/beginner/03_when_numbers_break.ipynb) of this lab, with its
# outputs.
