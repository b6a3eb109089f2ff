# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 01: Where does the memory go?
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 2 of 5 | 60 | lesson 01; any laptop |
#
# Six exercises. Each asks you to put code or answers in place of the `...`, and ends in a `check`
# that says *not attempted*, *not yet* with a nudge, or *correct*. Hints are folded away: click one
# to open it. The exercises follow the
# [lesson](../../notebooks/beginner/01_where_memory_goes.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/beginner/01")

# %%
import torch
import torch.nn.functional as F
from torch import nn

from utils import check, draw_timeline, format_bytes, measure, show

device = here.meter_device

# %% [markdown]
# ## Exercise 1: predict the states
#
# **Spec.** `state_bytes(parameter_count, optimizer)` returns the bytes of parameters, gradients and
# optimizer state together, for fp32 training. `optimizer` is `"sgd"`, `"momentum"` (SGD with
# momentum) or `"adam"`. Leave out Adam's step counters.

# %%
def state_bytes(parameter_count: int, optimizer: str) -> int:
    # BEGIN SOLUTION
    numbers_per_parameter = {"sgd": 2, "momentum": 3, "adam": 4}[optimizer]
    return 4 * numbers_per_parameter * parameter_count
    # END SOLUTION


check("01.state_bytes", state_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>Weights and gradients are always there: two numbers per parameter.</details>
# <details><summary>Hint 2</summary>Momentum keeps one running sum of the gradients. Adam keeps a running mean of them,
# and one of their squares.</details>
# <details><summary>Hint 3</summary>Every number is fp32: 4 bytes.</details>

# %% [markdown]
# ## Exercise 2: the saved-tensor ledger
#
# **Spec.** `saved_bytes(model, inputs)` runs one forward and returns how many bytes *this forward adds*: what
# autograd keeps for backward and what was not there before. Each *storage* counts once and whole, however
# many tensors view it. Neither the model's parameters and buffers count nor the inputs. Use
# `torch.autograd.graph.saved_tensors_hooks`.

# %%
def saved_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
    # BEGIN SOLUTION
    before = [*model.parameters(), *model.buffers(), inputs]
    own = {t.untyped_storage().data_ptr() for t in before}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(inputs)
    del output
    return sum(kept.values())
    # END SOLUTION


check("01.saved_bytes", saved_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>The pack hook gets each saved tensor and must return what unpack
# will get back. Return <code>tensor.detach()</code>: the tensor itself would keep the graph alive.</details>
# <details><summary>Hint 2</summary><code>tensor.untyped_storage()</code> has <code>data_ptr()</code> and
# <code>nbytes()</code>. A view shares its storage.</details>
# <details><summary>Hint 3</summary>A dictionary from address to bytes counts each storage once. A storage
# that nothing holds is freed while forward goes on, and its address is used again: what pack returns
# is what holds it.</details>

# %% [markdown]
# ## Exercise 3: the largest batch under a budget
#
# **Spec.** `largest_batch(peak_bytes_at, limit_bytes)` returns the largest batch size whose peak stays
# within the limit, or 0 if not even 1 fits. `peak_bytes_at(batch)` measures a step, and measuring
# is slow: **your score is the number of calls**. The peak never falls as the batch grows. Trying
# 1, 2, 3, ... takes too many. Do not begin with a huge batch: the machine has four times the limit,
# and a step that needs more runs out of memory before it can be measured.

# %%
def largest_batch(peak_bytes_at, limit_bytes: int) -> int:
    # BEGIN SOLUTION
    fits, too_large = 0, 1
    while peak_bytes_at(too_large) <= limit_bytes:
        fits, too_large = too_large, 2 * too_large
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if peak_bytes_at(middle) <= limit_bytes:
            fits = middle
        else:
            too_large = middle
    return fits
    # END SOLUTION


check("01.largest_batch", largest_batch)

# %% [markdown]
# <details><summary>Hint 1</summary>Double until it no longer fits. Now you have a size that fits and one
# that does not.</details>
# <details><summary>Hint 2</summary>Halve the distance between the two until it is 1.</details>
# <details><summary>Hint 3</summary>Even batch 1 may fail.</details>

# %% [markdown]
# ### Use it
#
# Here your function meets a real step. Its peak is measured, and the budget is 40 MB, which is
# 38.15 MiB. Until your function returns a number, the cell prints nothing.

# %%
def peak_of_a_real_step(batch_size: int) -> int:
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 10)).to(device)
    inputs = torch.randn(batch_size, 64, device=device)

    def step():
        model.zero_grad()
        model(inputs).sum().backward()

    return measure(step, model=model, items=batch_size, timed_steps=0).peak_bytes


found = largest_batch(peak_of_a_real_step, 40_000_000)
if isinstance(found, int):
    print(f"batch {found} fits: {format_bytes(peak_of_a_real_step(found))},",
          f"batch {found + 1} does not: {format_bytes(peak_of_a_real_step(found + 1))}")

# %% [markdown]
# ## Exercise 4: read a timeline
#
# This network has a large embedding, a table of 20,000 rows, and a small batch. A step uses only a
# few of the rows. Look at the timeline, then fill in the three answers below it.

# %%
torch.manual_seed(0)
network = nn.Sequential(nn.Embedding(20_000, 64), nn.Flatten(), nn.Linear(16 * 64, 10)).to(device)
optimizer = torch.optim.Adam(network.parameters(), foreach=False)
tokens = torch.randint(0, 20_000, (8, 16), device=device)
labels = torch.randint(0, 10, (8,), device=device)


def step():
    optimizer.zero_grad()
    F.cross_entropy(network(tokens), labels).backward()
    optimizer.step()


wide = measure(step, model=network, optimizer=optimizer, items=8, name="wide and short")
show(draw_timeline(wide), alt="Timeline of the step; the questions below ask where its peak is.")

# %% [markdown]
# 1. In which phase is the peak? Write its name as in the figure, in quotes.
# 2. How large are the temporaries at the peak, as a multiple of the parameters? Read both heights
#    off the figure.
# 3. Would half the batch lower the peak by a tenth or more? Write `True` or `False`.

# %%
# BEGIN SOLUTION
peak_phase = "optimizer step"
temporaries_over_parameters = 2
half_the_batch_helps = False
# END SOLUTION
# STUB: peak_phase = ...
# STUB: temporaries_over_parameters = ...
# STUB: half_the_batch_helps = ...

check("01.read_timeline", {
    "phase of the peak": peak_phase,
    "temporaries / parameters at the peak": temporaries_over_parameters,
    "half the batch lowers the peak by a tenth or more": half_the_batch_helps,
})

# %% [markdown]
# <details><summary>Hint 1</summary>The triangle marks the peak; the background names the phase.</details>
# <details><summary>Hint 2</summary>The temporaries are the grey block below the triangle. The parameters
# are the blue block at the bottom.</details>
# <details><summary>Hint 3</summary>What depends on the batch here: which colours would shrink?</details>

# %% [markdown]
# ## Exercise 5: break it, diagnose it
#
# This training step works, and its loss falls. It also keeps more and more memory. First look at the
# measurement: what is alive when the step is over that should not be?

# %%
def leaking_step(model, optimizer, inputs, labels, history):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward(retain_graph=True)
    optimizer.step()
    history.append(loss)


# %%
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(512, 64, device=device)
labels = torch.randint(0, 10, (512,), device=device)
history = []
leak = measure(lambda: leaking_step(model, sgd, inputs, labels, history),
               model=model, optimizer=sgd, items=512, name="leaking")
print(leak.timeline.at(leak.timeline.end_ns))
show(draw_timeline(leak), alt="Timeline of the leaking step: activations do not go away in backward.")

# %% [markdown]
# **Spec.** `cured_step` does the same training, appends the same loss values to `history` (as Python
# numbers), and leaves nothing behind but the model, its gradients and the optimizer.

# %%
def cured_step(model, optimizer, inputs, labels, history):
    # BEGIN SOLUTION
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    # END SOLUTION


check("01.cured_step", cured_step)

# %% [markdown]
# <details><summary>Hint 1</summary>Two lines make the leak together: one keeps what backward would have
# freed, the other keeps the graph from step to step.</details>
# <details><summary>Hint 2</summary><code>retain_graph=True</code> is for a second backward through the same
# graph. Is there one?</details>
# <details><summary>Hint 3</summary>A loss in a list brings its graph along. <code>loss.item()</code> is a
# Python number without a history.</details>

# %% [markdown]
# ## Exercise 6: the leanest step
#
# **Spec.** `lean_step` trains exactly like the step below: the same parameters after it, from the mean loss
# over all of the inputs. Its peak is at most that step's divided by 1.35. **Your score is the peak in bytes.** You may
# reorder, free, split and rewrite anything. Give `wasteful_step` itself to the check to see the peak that
# you have to beat.

# %%
def wasteful_step(model, optimizer, inputs, labels):
    outputs = model(inputs)
    loss = F.cross_entropy(outputs, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# %%
def lean_step(model, optimizer, inputs, labels):
    # BEGIN SOLUTION
    optimizer.zero_grad()  # before forward: old gradients and new activations never meet
    parts = 32
    for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
        (F.cross_entropy(model(x), y) / parts).backward()  # frees this part's activations
    optimizer.step()
    # END SOLUTION


check("01.lean_step", lean_step)

# %% [markdown]
# <details><summary>Hint 1</summary>When do the gradients of the <i>last</i> step die? What is alive at that
# time? That alone is not enough.</details>
# <details><summary>Hint 2</summary><code>backward()</code> adds to the gradients that are there. So the batch
# may come in parts, one forward and one backward each.</details>
# <details><summary>Hint 3</summary>The mean over the batch is the mean of the parts' means, if the parts are
# equal: divide each loss by their number.</details>
#
# Here is the [solution](../../solutions/beginner/01_where_memory_goes.ipynb) of this lab, with its
# outputs.
