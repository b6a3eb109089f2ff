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
# | 3 of 5 | 90 | lesson 02; any laptop |
#
# Seven exercises: you predict the peak, measure it, and find which tensors did not halve. Each asks you to put
# code or answers in place of the `...`, and ends in a `check` that says *not attempted*, *not yet* with a nudge, or *correct*. Hints are folded away: click one
# to open it. The exercises follow the
# [lesson](../../notebooks/beginner/02_mixed_precision.ipynb). Work in a copy (`make my-labs`).

# %% tags=["setup"]
here = setup("labs/beginner/02")

# %%
import torch
import torch.nn.functional as F
from torch import nn

from utils import check, measure, resnet, simulate
from utils.lessons.lesson_02.ledger import small_network

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
# ## Exercise 2: predict the peak
#
# **Spec.** `predicted_peak(parameters, per_image, batch, mixed, state)` returns the peak bytes of any step but
# the first. The lesson did it for Adam; here the optimizer keeps `state` bytes for each
# parameter: 0 (SGD), 4 (momentum) or 8 (Adam). `per_image` are the bytes of activations that one image takes in
# fp32. `mixed` is True for mixed precision. Take it that every weight is cast, that all activations halve,
# that there are no gradients when backward begins, and neither activations nor copies at the optimizer
# step. Leave buffers, inputs and temporaries out.

# %%
def predicted_peak(parameters: int, per_image: int, batch: int, mixed: bool, state: int) -> float:
    # BEGIN SOLUTION
    kept, copies = per_image * batch, 0
    if mixed:
        kept, copies = kept / 2, 2 * parameters
    backward_begins = (4 + state) * parameters + copies + kept
    optimizer_step = (4 + 4 + state) * parameters
    return max(backward_begins, optimizer_step)
    # END SOLUTION


check("02.predicted_peak", predicted_peak)

# %% [markdown]
# <details><summary>Hint 1</summary>Weights and the optimizer's state are there at both moments, in fp32.</details>
# <details><summary>Hint 2</summary>At the optimizer step the gradients are added. Nothing of it depends on
# <code>mixed</code> or on the batch.</details>
# <details><summary>Hint 3</summary>When backward begins, mixed precision halves one term and adds a 16-bit copy
# of each weight.</details>

# %% [markdown]
# ## Exercise 3: measure the peak
#
# **Spec.** `measured_peak(build, batch, dtype)` returns the peak bytes of a training step, as `measure` finds
# them. `build()` gives a model and its optimizer. The step trains on random images of shape
# `(batch, 3, 32, 32)` with ten classes, from `zero_grad` to `optimizer.step`, on the CPU: forward and loss
# under autocast in `dtype`, or in fp32 if `dtype` is `None`. A scaler is not needed.

# %%
def measured_peak(build, batch: int, dtype: torch.dtype | None) -> int:
    # BEGIN SOLUTION
    model, optimizer = build()
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def step():
        optimizer.zero_grad()
        with torch.amp.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return measure(step, model=model, optimizer=optimizer, items=batch, timed_steps=0).peak_bytes
    # END SOLUTION


check("02.measured_peak", measured_peak)

# %% [markdown]
# <details><summary>Hint 1</summary><code>measure(step, model=..., optimizer=...)</code> runs a function without
# arguments; the answer has <code>peak_bytes</code>.</details>
# <details><summary>Hint 2</summary><code>torch.amp.autocast("cpu", dtype=dtype, enabled=...)</code>: with
# <code>enabled=False</code> it does nothing.</details>

# %% [markdown]
# ### Use it
#
# Your prediction beside your measurement, for ResNet-18. At which batch do the two precisions part? Until both
# functions return numbers, the cell prints nothing.

# %%
def build_resnet18():
    model = resnet(18, stem="cifar")
    return model, torch.optim.Adam(model.parameters())


# %%
P, PER_IMAGE = 11_173_962, 4_720_000  # ResNet-18: parameters, and bytes per image by lesson 01's ledger
if isinstance(predicted_peak(P, PER_IMAGE, 1, False, 8), (int, float)) and isinstance(
        measured_peak(build_resnet18, 1, None), int):
    for batch in (2, 10):
        for name, dtype in [("fp32", None), ("mixed", torch.bfloat16)]:
            guess = predicted_peak(P, PER_IMAGE, batch, dtype is not None, 8)
            found = measured_peak(build_resnet18, batch, dtype)
            print(f"batch {batch:>2}, {name:<5} predicted {guess / 2**20:6.1f} MiB, measured {found / 2**20:6.1f} MiB")

# %% [markdown]
# ## Exercise 4: which module keeps what
#
# "Activations halve" is a sum over many tensors. Take it apart: a ledger by module.
#
# **Spec.** `kept_by_module(model, inputs, dtype)` runs one forward on the CPU, under autocast in `dtype`, or
# without if `dtype` is `None`. It returns a dictionary: for each child of the model
# (`model.named_children()`), how many bytes autograd keeps for backward while that child runs. Each *storage*
# counts once and whole, for the child that keeps it first. The model's own parameters and buffers do not
# count, and what is kept between two children counts for neither. Children that keep nothing may be left out. No hook
# stays on the model.

# %%
def kept_by_module(model: nn.Module, inputs: torch.Tensor, dtype: torch.dtype | None) -> dict[str, int]:
    # BEGIN SOLUTION
    seen = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept, running, hooks = {}, [""], []
    for name, module in model.named_children():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept[running[-1]] = kept.get(running[-1], 0) + storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.amp.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            output = model(inputs)  # holds the graph, so no address is used again
    del output
    for hook in hooks:
        hook.remove()
    return kept
    # END SOLUTION


check("02.kept_by_module", kept_by_module)

# %% [markdown]
# <details><summary>Hint 1</summary>Begin with the ledger of lab 01: <code>saved_tensors_hooks</code>, a set of
# addresses that were seen, <code>tensor.detach()</code> from pack.</details>
# <details><summary>Hint 2</summary><code>register_forward_pre_hook</code> and <code>register_forward_hook</code>
# are called before and after a module runs: they can note which one it is. A hook that returns something
# replaces the output, so return <code>None</code>.</details>
# <details><summary>Hint 3</summary>In a loop, <code>lambda *_, name=name: ...</code> keeps each name. Remove the
# hooks at the end.</details>

# %% [markdown]
# ## Exercise 5: which tensors did not halve
#
# Here your ledger meets a small vision network, eight images, in both precisions. Until it returns a
# dictionary, the cell prints nothing.

# %%
network, eight = small_network(), torch.randn(8, 3, 32, 32)
print(network)

# %%
found = {name: kept_by_module(network, eight, dtype) for name, dtype in [("fp32", None), ("mixed", torch.bfloat16)]}
if isinstance(found["mixed"], dict):
    for name, _ in network.named_children():
        print(f"{name:<6} fp32 {found['fp32'].get(name, 0):>8,} bytes, mixed {found['mixed'].get(name, 0):>8,}")

# %% [markdown]
# **Spec.** For four of its modules, write what became of their bytes: `"halves"`, `"stays"` or `"grows"`. Can
# you say why?

# %%
# BEGIN SOLUTION
relu, pool, gelu, wide = "halves", "stays", "halves", "grows"
# END SOLUTION
# STUB: relu = ...
# STUB: pool = ...
# STUB: gelu = ...
# STUB: wide = ...

check("02.did_not_halve", {"relu": relu, "pool": pool, "gelu": gelu, "wide": wide})

# %% [markdown]
# <details><summary>Hint 1</summary>Max-pooling keeps where each maximum was. Is that a floating-point
# number?</details>
# <details><summary>Hint 2</summary>A linear layer keeps its input and its weight. The parameter does not count; is
# it the parameter that was used?</details>

# %% [markdown]
# ## Exercise 6: the largest batch on a card, in few simulations
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
# ## Exercise 7: break it, diagnose it
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
              f"zero: {100 * (grads == 0).float().mean():.0f}%, weights finite after: {weights}")


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
# STUB: run_a = ...
# STUB: run_b = ...
# STUB: run_c = ...

check("02.diagnose", {"run A": run_a, "run B": run_b, "run C": run_c})

# %% [markdown]
# <details><summary>Hint 1</summary>In which run do finite gradients make weights that are not finite?</details>
# <details><summary>Hint 2</summary>In which run do the gradients overflow again and again, at a scale that
# never falls?</details>
# <details><summary>Hint 3</summary>In which run is nearly every gradient exactly 0?</details>
#
# Here is the [solution](../../solutions/beginner/02_mixed_precision.ipynb) of this lab, with its
# outputs.
