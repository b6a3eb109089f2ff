# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 10: Seven unknown patients
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 4 of 5 | 75 | lesson 10; any laptop |
#
# Seven scripts go over their budgets. They have the causes of the
# [lesson](../../notebooks/intermediate/10_oom_clinic.ipynb), one each, with other sizes and in other places. For each
# you give four things, and one `check` grades them:
#
# | part | what |
# |---|---|
# | `cause` | `"kept graph"`, `"large logits"`, `"fragmentation"`, `"optimizer step"`, `"missing no_grad"`, `"forgotten reference"` or `"large input"` |
# | `category` | evidence: what fills the memory at the peak, a category of the breakdown, or `"reserved, not alive"` |
# | `line` | evidence: the number of a line that makes or keeps it |
# | `cure` | a function: `patient.edited({old: new, ...})`, as in the lesson |
#
# A cure is right if the patient stays under its budget with the same losses (within 1e-5). **Your score is its bytes**,
# beside a par. Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/intermediate/10")

# %%
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from utils import check, draw_timeline, format_bytes, show
from utils.clinic import examine
from utils.lessons.lesson_10.round import Round
from utils.clinic.lab_ward import case_file, lab_patient


def admit(number):
    """Show a patient's script with line numbers, its complaint, and what an examination finds."""
    found = examine(lab_patient(number))
    print(case_file(number), "\n")
    print(found)
    print(f"peak {format_bytes(found.run.peak_bytes)} in {found.run.peak_phase}")
    print(found.run.breakdown)
    return found


# %% [markdown]
# An examination has more: `found.run.timeline`, `found.replayed().summary()`, `draw_timeline(found.run)`. `edited`
# replaces text that stands in the script exactly once. What your new text uses beside the script's own names goes in by
# name: `patient.edited({...}, checkpoint=checkpoint, my_function=my_function)`.
#
# ## Patient 1

# %%
found = admit(1)

# %%
# BEGIN SOLUTION
def cure_1(patient):
    return patient.edited({"skipped.append(error)": "skipped.append(str(error))"})


diagnosis_1 = {"cause": "forgotten reference", "category": "activations", "line": 43}
# END SOLUTION
# STUB: def cure_1(patient):
# STUB:     ...
# STUB:
# STUB:
# STUB: diagnosis_1 = {"cause": ..., "category": ..., "line": ...}

check("10.patient_1", {**diagnosis_1, "cure": cure_1})

# %% [markdown]
# <details><summary>Hint 1</summary>Memory grows in some steps only. In which?</details>
# <details><summary>Hint 2</summary>What does an exception object hold, beside its text? Look at
# <code>error.__traceback__</code>.</details>
#
# ## Patient 2

# %%
found = admit(2)

# %%
# BEGIN SOLUTION
def by_rows(texts, images, rows=128):
    def summed(part, wanted):
        return F.cross_entropy(part @ images.T / 0.07, wanted, reduction="sum")

    pairs = zip(texts.split(rows), torch.arange(len(texts)).split(rows), strict=True)
    return sum(checkpoint(summed, *pair, use_reentrant=False) for pair in pairs) / len(texts)


def cure_2(patient):
    return patient.edited({"loss = pair_loss(texts, images)": "loss = by_rows(texts, images)"}, by_rows=by_rows)


diagnosis_2 = {"cause": "large logits", "category": "logits and loss", "line": 26}
# END SOLUTION
# STUB: def cure_2(patient):
# STUB:     ...
# STUB:
# STUB:
# STUB: diagnosis_2 = {"cause": ..., "category": ..., "line": ...}

check("10.patient_2", {**diagnosis_2, "cure": cure_2})

# %% [markdown]
# <details><summary>Hint 1</summary>2,304 x 2,304 numbers of four bytes are 20.25 MiB. Count how many tensors of that size the
# loss makes.</details>
# <details><summary>Hint 2</summary>Rows may be taken a few at a time. Columns may not: the softmax runs over all of
# them.</details>
# <details><summary>Hint 3</summary>Sums of losses can be added up: <code>reduction="sum"</code>. And
# <code>checkpoint(function, ..., use_reentrant=False)</code> keeps no scores.</details>
#
# ## Patient 3

# %%
found = admit(3)
print(found.replayed().summary())

# %%
# BEGIN SOLUTION
def cure_3(patient):
    return patient.edited({
        "losses, history = [], []": "losses, mean = [], torch.zeros_like(weight)",
        "history.append(weight.detach().clone())": "mean.add_(weight.detach(), alpha=1 / STEPS)",
        "        weight.zero_()\n        for kept in history:\n            weight.add_(kept, alpha=1 / STEPS)":
        "        weight.copy_(mean)"})


diagnosis_3 = {"cause": "fragmentation", "category": "reserved, not alive", "line": 35}
# END SOLUTION
# STUB: def cure_3(patient):
# STUB:     ...
# STUB:
# STUB:
# STUB: diagnosis_3 = {"cause": ..., "category": ..., "line": ...}

check("10.patient_3", {**diagnosis_3, "cure": cure_3})

# %% [markdown]
# <details><summary>Hint 1</summary>Where does the allocator put a copy that is made right after backward? What was there
# before?</details>
# <details><summary>Hint 2</summary>Long-lived tensors are best made before the loop.</details>
# <details><summary>Hint 3</summary>An average needs no list.</details>
#
# ## Patient 4

# %%
found = admit(4)

# %%
# BEGIN SOLUTION
def in_backward(model):
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3, fused=True) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def cure_4(patient):
    return patient.edited({
        "return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)": "return model, in_backward(model)",
        "        optimizer.zero_grad()\n": "", "        optimizer.step()\n": ""}, in_backward=in_backward)


diagnosis_4 = {"cause": "optimizer step", "category": "optimizer state", "line": 22}
# END SOLUTION
# STUB: def cure_4(patient):
# STUB:     ...
# STUB:
# STUB:
# STUB: diagnosis_4 = {"cause": ..., "category": ..., "line": ...}

check("10.patient_4", {**diagnosis_4, "cure": cure_4})

# %% [markdown]
# <details><summary>Hint 1</summary>Weights, gradients and two moments are four times the parameters. The budget has less.
# Which of the four need not exist all at once?</details>
# <details><summary>Hint 2</summary>AdamW's step looks at one parameter at a time. Who tells you that a gradient is ready?</details>
# <details><summary>Hint 3</summary><code>parameter.register_post_accumulate_grad_hook(f)</code>, and one optimizer for each
# parameter. <code>build</code> may return a list of optimizers.</details>
#
# ## Patient 5

# %%
found = admit(5)

# %%
# BEGIN SOLUTION
def cure_5(patient):
    return patient.edited({
        '        wanted = model["teacher"](tokens).softmax(-1)':
        '        with torch.no_grad():\n            wanted = model["teacher"](tokens).softmax(-1)'})


diagnosis_5 = {"cause": "missing no_grad", "category": "activations", "line": 34}
# END SOLUTION
# STUB: def cure_5(patient):
# STUB:     ...
# STUB:
# STUB:
# STUB: diagnosis_5 = {"cause": ..., "category": ..., "line": ...}

check("10.patient_5", {**diagnosis_5, "cure": cure_5})

# %% [markdown]
# <details><summary>Hint 1</summary>Whose activations are they? The allocations of the timeline have a <code>module</code>.</details>
# <details><summary>Hint 2</summary>Is it enough to cut the graph after the forward?</details>
#
# ## Patient 6

# %%
found = admit(6)

# %%
# BEGIN SOLUTION
def cure_6(patient):
    return patient.edited({
        "            total = total + loss / PARTS":
        "            (loss / PARTS).backward()\n            total = total + loss.detach() / PARTS",
        "        total.backward()\n": ""})


diagnosis_6 = {"cause": "kept graph", "category": "activations", "line": 36}
# END SOLUTION
# STUB: def cure_6(patient):
# STUB:     ...
# STUB:
# STUB:
# STUB: diagnosis_6 = {"cause": ..., "category": ..., "line": ...}

check("10.patient_6", {**diagnosis_6, "cure": cure_6})

# %% [markdown]
# <details><summary>Hint 1</summary>When does the first small batch's graph end?</details>
# <details><summary>Hint 2</summary>Gradients add up over several calls of <code>backward()</code>.</details>
#
# ## Patient 7

# %%
found = admit(7)

# %%
# BEGIN SOLUTION
def cure_7(patient):
    return patient.edited({
        "        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)\n": "",
        "scores.softmax(-1) @ value": "F.scaled_dot_product_attention(query, key, value)"})


diagnosis_7 = {"cause": "large input", "category": "activations", "line": 28}
# END SOLUTION
# STUB: def cure_7(patient):
# STUB:     ...
# STUB:
# STUB:
# STUB: diagnosis_7 = {"cause": ..., "category": ..., "line": ...}

check("10.patient_7", {**diagnosis_7, "cure": cure_7})

# %% [markdown]
# <details><summary>Hint 1</summary>Which tensor grows with the square of the context?</details>
# <details><summary>Hint 2</summary>PyTorch has one function for scores, softmax and mixture, and its kernel never holds that tensor.</details>
#
# ## A timed round, for workshops
#
# `Round` deals the seven patients in an order of its own, shows the minutes left and keeps count. The same seed
# deals one order. `round_1.next()` shows a patient, `round_1.answer(3, cause=..., category=..., line=..., cure=...)`
# checks it, and `print(round_1)` is the table. Time is shown, and never graded.

# %%
round_1 = Round(minutes=35, seed=1)
print(round_1)

# %% [markdown]
# Here is the [solution](../../solutions/intermediate/10_oom_clinic.ipynb) of this lab, with its outputs.
