# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 Where does the memory go?
#
# {{badges}}
#
# **The question.** A training step runs out of memory. Who holds it?
#
# **Promise.** You account for one training step of ResNet-50 on this machine: every byte that model, optimizer, images
# and the step itself hold, in named categories, at every moment.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 45, and 60 for the lab | any laptop; a GPU if you have one; beyond Binder's 1 GB | under a minute on two idle CPU cores |

# %% [markdown]
# ## A bet
#
# You train ResNet-50, an image network, with Adam on a few images of 32 x 32 pixels. Memory rises and falls
# during a step. Its highest moment is the **peak**. Which share of it is the *parameters*? Write your guess, in percent, in
# place of the 50.

# %%
my_bet_percent = 50

# %% tags=["setup"]
here = setup("beginner/01")

# %%
import re
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
import torch.nn.functional as F

from evidence.record import recorded
from utils import Evidence, check, compare, draw_over_time, draw_timeline, explore, format_bytes
from utils import measure, model_shape, show
from utils.lessons.lesson_01.beside import predicted_beside_measured
from utils.lessons.lesson_01.by_phase import draw_by_phase, highest_bytes
from utils.lessons.lesson_01.counters import Counters, draw_counters
from utils.models import Transformer, TransformerConfig, resnet

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# ## 1. One step in one picture
#
# What this lesson measures is fp32, 4 bytes a number. `measure`
# runs the step once to warm up, then once with every allocation recorded.

# %%
batch = {"tiny": 6, "small": 64, "full": 256}[here.scale]


def make_step(model, optimizer, batch_size, micro_batches=1):
    images = torch.randn(batch_size, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (batch_size,), device=device)

    def step():
        optimizer.zero_grad()
        for some, answers in zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            loss = F.cross_entropy(model(some), answers) / micro_batches
            loss.backward()
        optimizer.step()

    return step


# %%
model = resnet(50, stem="cifar").to(device)
optimizer = torch.optim.Adam(model.parameters(), foreach=False)  # one tensor at a time; section 3 compares
first = measure(make_step(model, optimizer, batch), model=model, optimizer=optimizer, items=batch,
                unit="images", name=f"ResNet-50, batch {batch}, Adam one by one", timed_steps=0)
show(draw_timeline(first), alt="Stacked memory over one training step: activations rise through forward, "
     "gradients replace them during backward, and the peak lies between the two.")

# %% [markdown]
# **Read it.** The height is the memory of all tensors, the colours say what for, the background names the phase. Forward
# builds *activations* up. Backward walks from the last layer to the first, frees activations and makes *gradients*. Who is
# alive at the peak:

# %%
found = first.breakdown
print(first)
print(f"\nparameters are {100 * found['parameters'] / found.total_bytes:.0f}% of the peak; your bet was {my_bet_percent}%")

# %% [markdown]
# **Read it.** *Buffers* are tensors of the model that are not trained. *Temporaries* are what one operation
# borrows. *Logits* come in section 6. New words stand in the [glossary](../00_glossary.ipynb).

# %% [markdown]
# ## 2. Whose count is it?
#
# A GPU has one large memory for your tensors: **HBM** (high-bandwidth memory), or GDDR on many cards. PyTorch's
# `OutOfMemoryError` means that one. Three counters look at it, each at more than the one before:
#
# | who counts | what it adds |
# |---|---|
# | `torch.cuda.memory_allocated()` | living tensors, in blocks of whole 512 bytes, and cuBLAS's workspaces |
# | `torch.cuda.memory_reserved()` | free pieces of segments that PyTorch took from the driver and keeps |
# | `nvidia-smi` | the rest: CUDA context (driver, code of kernels), NCCL's buffers, libraries, other processes |
#
# [An error that somebody met](https://github.com/kerrj/lerf/issues/73) (published) and section 1's model on an H200
# (recorded): which number of the error is the cause?

# %%
error = ("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacty of 23.65 GiB of which 1.66 GiB is "
         "free. Including non-PyTorch memory, this process has 20.81 GiB memory in use. Of the allocated memory 12.09 "
         "GiB is allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated.")
asked, card, free, process, allocated, pieces = map(float, re.findall(r"([\d.]+) GiB", error))
bars = {"the error (published)": Counters(allocated, allocated + pieces, process, card - free, card)}
record = next(record for record in recorded("resnet50") if record.device == "NVIDIA H200")
for row in record.rows[:2]:
    assert (row["precision"], row["image_size"]) == ("fp32", 32), "the record no longer begins with fp32 at 32 x 32"
    bars[f"H200, batch {row['batch']} (recorded)"] = Counters.of_row(row)
if device.type == "cuda":
    bars["section 1, here (measured)"] = Counters.of_measurement(first)
show(draw_counters(bars, title="What three counters see (H200: Adam by foreach)"),
     alt="Stacked bars: of the card of the error, half is allocated, a fifth is reserved and unallocated, another fifth lies "
     "outside of PyTorch, little is free. On the H200 the part outside stays the same while the batch grows fourfold.")
print(f"the error: {asked} GiB found no place; free or in free pieces {free + pieces:.2f}; outside of PyTorch in this process "
      f"{process - allocated - pieces:.2f}, in others {card - free - process:.2f}")
print(f"{record.evidence}: {record.device}, {record.date}, PyTorch {record.provenance['torch']}, peaks of ResNet-50's second step in fp32")

# %% [markdown]
# **Read it.** Your own error's numbers, in this table:
#
# | in the error | first action |
# |---|---|
# | "tried to allocate" is most of the card | one operation is too large: batch, length, resolution |
# | "free" + "unallocated" would have served the request | it is free in pieces: `PYTORCH_ALLOC_CONF=expandable_segments:True` (once `PYTORCH_CUDA_ALLOC_CONF`) |
# | card - "free" - "this process has" is large | other processes: `nvidia-smi` |
# | "this process has" - "allocated" - "unallocated" is large | this process, outside of PyTorch: NCCL, a library |
# | else: "allocated by PyTorch" | tensors: sections 3 to 6 |
#
# Here two rows hold: the pieces would have served, and this process keeps a sixth of the card outside, more than a context
# takes. Try the setting first ([lesson 10](../intermediate/10_oom_clinic.ipynb)). Compare techniques by
# `max_memory_allocated()`. The same run *fits* where `max_memory_reserved()` and what lies outside fit, and hardly ever where
# `max_memory_allocated()` and what lies outside do not. Between the two, try it
# ([notes on CUDA memory](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management)).

# %% [markdown]
# ## 3. The states: a formula without surprises
#
# Some tensors are there when a step ends. For $P$ parameters in fp32 (4 bytes each):
#
# $$\underbrace{4P}_{\text{parameters}} + \underbrace{4P}_{\text{gradients}} +
# \underbrace{4P + 4P}_{\text{Adam: running means}} = 16P \ \text{bytes}$$
#
# Adam keeps two running means for each parameter: of its gradient, and of the gradient's square.
# All of these together are the **model states**.

# %% tags=["nbval-check-output"]
P = sum(parameter.numel() for parameter in model.parameters())


def adam_states(parameter_count: int) -> dict[str, int]:
    weights = 4 * parameter_count
    return {"parameters": weights, "gradients": weights, "optimizer state": 2 * weights}


print(f"P = {P:,} parameters, so the states take {format_bytes(16 * P)}")

# %%
after = first.timeline.at(first.timeline.end_ns)
tensors = len(list(model.parameters()))
grain = 512 if device.type == "cuda" else 1  # CUDA's allocator hands out whole multiples of it
whole = sum(-(-4 * p.numel() // grain) * grain for p in model.parameters())
assert after["parameters"] == after["gradients"] == whole, "4 P each: is every parameter fp32?"
counters = 4 * tensors if grain == 1 else 0  # of steps, which stay on the CPU
assert after["optimizer state"] == 2 * whole + counters, "8 P, with Adam: is that the optimizer?"
print(f"optimizer state - 8 P = {after['optimizer state'] - 8 * P} bytes for {tensors} tensors")
beside = {str(Evidence.PREDICTED): adam_states(P), str(Evidence.MEASURED): dict(after)}
pd.DataFrame(beside).fillna(0).astype(int).rename_axis("bytes at the end of the step")

# %% [markdown]
# **Read it.** Parameters and gradients equal the formula to the byte. Adam holds a step counter of 4 bytes more
# for each tensor.
#
# ### Which optimizer, which states
#
# ResNet-18 at batch 2, where states fill most of the picture. `foreach` is Adam's default on CUDA: each operation runs over
# all tensors at once.

# %%
def with_optimizer(name, build):
    model = resnet(18, stem="cifar").to(device)
    optimizer = build(model.parameters())
    return measure(make_step(model, optimizer, 2), model=model, optimizer=optimizer,
                   items=2, unit="images", name=name, timed_steps=0)


arms = [
    with_optimizer("SGD", lambda p: torch.optim.SGD(p, lr=0.1)),
    with_optimizer("SGD, momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    with_optimizer("Adam, one by one", partial(torch.optim.Adam, foreach=False)),
    with_optimizer("Adam, foreach", partial(torch.optim.Adam, foreach=True)),
    with_optimizer("Adam, fused", partial(torch.optim.Adam, fused=True)),
]
for arm in arms:
    print(f"{arm.name:<17} peak in {arm.peak_phase}")
compare(arms, title="ResNet-18 in fp32, batch 2, each at its own peak")

# %% [markdown]
# **Read it.** The optimizer state is nothing, one copy of the parameters, or two. Adam's arithmetic borrows memory, the
# grey temporaries. One by one it borrows two of the largest tensor; `foreach` borrows as much as *all* parameters, so its peak
# lies in the optimizer step, when activations are gone. `fused=True` borrows nothing there.
#
# **Question.** How many bytes per parameter do the states of SGD *with momentum* take, in fp32:
# weights, gradients and optimizer state together? Put a number in place of the dots.

# %%
momentum_bytes_per_parameter = ...
check("01.momentum_bytes", momentum_bytes_per_parameter)

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> Adam creates its state inside the <i>first</i>
# <code>optimizer.step()</code>. So a script can pass its first backward, and fail in that call or in the next
# iteration. <a href="https://github.com/pytorch/pytorch/issues/9439">A user of a VGG model</a> met this.</div>
#
# ### A folklore formula
#
# "18 bytes a parameter" ([Hugging Face](https://huggingface.co/docs/transformers/model_memory_anatomy), for mixed precision)
# is often multiplied by the bytes of a parameter once more. *Mixed precision* by DeepSpeed or Megatron has a 16-bit copy of
# the weights beside fp32 weights (4) and Adam's means (8): 2 + 2 + 12 = 16 with 16-bit gradients, as in the ZeRO paper, and 2 + 4 + 12 = 18 with fp32
# gradients ([who keeps which copy](../advanced/15_design_studio.ipynb#2.-On-paper)). For Llama-2-7B:

# %% tags=["nbval-check-output"]
llama = model_shape("llama-2-7b")
count = llama.parameter_count
assert count == llama.published_count, "the shape no longer gives the published count"
print(f"P = {count:,}   ({llama.source})")
rows = {"fp32, or mixed with 16-bit gradients, 16": 16 * count, "mixed precision, fp32 gradients, 18": 18 * count,
        "the folklore, 18 x 4 bytes": 72 * count}
for name, total_bytes in rows.items():
    print(f"{name:<44}{total_bytes / 1e9:8.1f} GB   {Evidence.PREDICTED}")

# %% [markdown]
# ## 4. Activations: what grows with the batch
#
# Backward needs the inputs or the outputs of most operations again. Autograd therefore keeps them
# from forward until backward has used them: the **activations**. `saved_tensors_hooks` calls your function with
# every tensor that autograd keeps, so a ledger of a dozen lines is a meter already. It counts each *storage* once:
# the block of bytes behind a tensor, which several tensors can share. Parameters do not count: they exist anyway.

# %%
def saved_for_backward(model, inputs):
    """Bytes that autograd keeps from a forward, each storage once, without the model's own."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    ledger = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            ledger[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that its own graph holds would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(inputs)
    assert output.requires_grad, "nothing is saved without gradients: call it outside of no_grad"
    return sum(ledger.values())


# %% [markdown]
# The meter, when backward begins: all activations live then.

# %%
def when(measurement, phase):
    return next(span.start_ns for span in measurement.timeline.spans if span.name == phase)


images = torch.randn(batch, 3, 32, 32, device=device)
metered = first.timeline.at(when(first, "backward"))
print("your ledger                ", format_bytes(mine := saved_for_backward(model, images)))
print("the meter: activations     ", format_bytes(metered["activations"]))
print("the meter: inputs          ", format_bytes(metered["inputs"]))
ratio = mine / (metered["activations"] + metered["inputs"])
print(f"ledger / (activations + inputs) = {ratio:.4f}")
assert abs(ratio - 1) < 0.01, "over 1% apart: did model or batch change since the measurement?"

# %% [markdown]
# **Read it.** Your ledger asks autograd, the meter the allocator: a block that was born in forward and lives when
# backward begins is an *activation*.
#
# ### One batch after the other
#
# Predict: double the batch, and which categories double? The smallest and the largest of four batches give the
# activations per image.

# %%
def at_batch(batch_size):
    return measure(make_step(model, optimizer, batch_size), model=model, optimizer=optimizer,
                   items=batch_size, unit="images", name=f"batch {batch_size}", timed_steps=0)


sizes = [batch // 6, batch // 3, 2 * batch // 3, batch]
sweep = [*(at_batch(size) for size in sizes[:-1]), replace(first, name=f"batch {batch}")]


def activation_bytes(measurement):
    return measurement.timeline.at(when(measurement, "backward"))["activations"]


per_image = (activation_bytes(sweep[-1]) - activation_bytes(sweep[0])) / (sizes[-1] - sizes[0])
print(f"activations per image: {format_bytes(per_image)}")
optimizer.param_groups[0]["foreach"] = True  # what Adam does on CUDA if you say nothing
all_at_once = {size: highest_bytes(at_batch(size), "optimizer step") for size in (sizes[0], batch)}
optimizer.param_groups[0]["foreach"] = False

# %%
formula = {size: 16 * P + per_image * size for size in sizes}
figure = draw_by_phase(sweep, formula, {"optimizer step by foreach": all_at_once},
                       title="ResNet-50 with Adam, one by one: the highest moment of each phase")
show(figure, alt="Memory against batch size, a line a phase: backward's highest moment grows with the batch. The optimizer step's "
     "is flat: one by one it lies above backward at the smallest batch alone, by foreach at all but the largest.")
top = max(all_at_once.values())
print("by foreach the optimizer step is higher up to batch", max(m.items for m in sweep if m.peak_bytes < top))
print("formula over peak: " + "; ".join(f"batch {m.items}: {formula[m.items] / m.peak_bytes:.2f} one by one, "
                                        f"{formula[m.items] / max(m.peak_bytes, top):.2f} by foreach" for m in sweep))
print("on the H200:", *(f"batch {row['batch']}: {(16 * P + per_image * row['batch']) / row['allocated_peak_bytes']:.2f};" for row in record.rows[:2]))
alive = {m.name: dict(m.timeline.at(when(m, "backward"))) for m in sweep}
for m in sweep:
    alive[m.name] |= {f"highest in {phase}": highest_bytes(m, phase) for phase in ("backward", "optimizer step")}
(pd.DataFrame(alive).fillna(0) / 2**20).round(1).rename_axis("MiB, where backward begins, and highest")

# %% [markdown]
# **Read it.** Activations double with the batch, and no state grows. The optimizer step's line does
# not depend on the images: one by one it decides at the smallest batch alone, by `foreach`, CUDA's default, at all but the
# largest. The dashed formula adds *all* gradients to *all* activations, which this step never holds at once, and no
# temporaries. So it is a little too high here where backward decides, too low for few images by `foreach`, and too low on the
# H200's large batch, whose temporaries grow with it. Keep a tenth free.
#
# **Question.** A step at batch $b$ peaks at 6 GiB, of which 2 GiB are states. About how much does
# it need at batch $2b$, in GiB?

# %%
doubled_batch_gib = ...
check("01.doubled_batch", doubled_batch_gib)

# %% [markdown]
# ### Break it, diagnose it: activations that stay
#
# A validation loop adds up its losses. It never calls `backward`. (`model.eval()` would not stop autograd.) How many bytes
# does each batch leave? Does the same sum do it in a training loop?

# %%
few, labels = images[:2], torch.randint(0, 10, (2,), device=device)


history = []

def four_batches(train=False):
    total = torch.zeros((), device=device)
    for _ in range(4):
        loss = F.cross_entropy(model(few), labels)
        if train:
            loss.backward()
        total = total + loss  # not loss.detach(), not loss.item()
    history.append(total)  # as a log keeps it


loops = {"validation": four_batches, "validation, no_grad": torch.no_grad()(four_batches), "training": partial(four_batches, train=True)}
runs = {name: measure(loop, model=model, warmup_steps=0, timed_steps=0) for name, loop in loops.items()}
show(draw_over_time(runs, "activations", title="Four batches of two images, and the sum of their losses"),
     alt="Left a staircase of four steps, in the middle nothing, right four hills that return to the ground.")
history.clear()
highest = {name: int(max(run.timeline.series().get("activations", [0]))) for name, run in runs.items()}
print(*(f"{name}: at most {format_bytes(most)};" for name, most in highest.items()))
assert highest["validation"] > 3 * highest["training"], "the history is not held: does the sum keep its losses?"

# %% [markdown]
# **Diagnose it.** The sum has a history, which holds every batch's graph with what autograd saved. In training `backward` has
# freed what was saved. A loss that no backward visits keeps all: validation, a metric, a penalty that is only logged. Validate
# under `torch.no_grad()`, and add up `loss.detach()`.

# %% [markdown]
# ## 5. Why the peak is where it is
#
# To lower a peak you must know who is alive *then*. Compare the peak of section 1 with the sum of what each category
# holds at its own highest.

# %%
maxima = {str(category): int(curve.max()) for category, curve in first.timeline.series().items()}
print(f"peak {format_bytes(first.peak_bytes)} in {first.peak_phase}")
print(f"sum of the categories' own maxima {format_bytes(sum(maxima.values()))},",
      f"{100 * sum(maxima.values()) / first.peak_bytes - 100:.0f}% more than the peak")
share = {"at the peak": {name: found[name] / 2**20 for name in maxima}, "at its own highest": {n: b / 2**20 for n, b in maxima.items()}}
pd.DataFrame(share).round(1).rename_axis("MiB")

# %% [markdown]
# **Read it.** A ResNet's last layers have the most weights and the smallest activations. So backward
# begins by making large gradients and freeing little. The peak holds *part* of the gradients and *most* of the activations.
#
# **Question.** You halve the activations of this step, and nothing else. Does the peak fall by half of its
# activations, or by less? Think of where the peak can move. Answer `"half"` or `"less"`.

# %%
peak_moves = ...
check("01.peak_moves", peak_moves)

# %% [markdown]
# Many cut the batch in two *micro-batches* (batch norm then sees half): forward and backward twice, then one optimizer step. How
# far does the peak fall?

# %%
accumulated = measure(make_step(model, optimizer, batch, micro_batches=2), model=model, optimizer=optimizer, items=batch,
                      unit="images", name="two micro-batches", timed_steps=0)
for run in (first, accumulated):
    print(f"{run.name:<35} peak {format_bytes(run.peak_bytes)} in {run.peak_phase}, with activations of "
          f"{format_bytes(run.breakdown['activations'])}, gradients of {format_bytes(run.breakdown['gradients'])}")
print(f"formula over peak, two micro-batches: {(16 * P + per_image * batch / 2) / accumulated.peak_bytes:.2f}")

# %% [markdown]
# **Read it.** Half of the activations are gone, and *all* gradients of the first micro-batch stand through the second forward
# and backward. With **gradient accumulation** the formula of section 4 lacks the temporaries alone.
#
# ### Predict beside measure
#
# Move the controls (in a running notebook). Each change predicts by section 3's formula and the ledger of two images, scaled
# to the batch; then it measures.

# %%
optimizer = None  # Adam's state of ResNet-50, and its gradients: make room first
model.zero_grad()
both = partial(predicted_beside_measured, device=device)
explore(both, batch_size=[1, 2, 4, 8, 16], model=["ResNet-18", "ResNet-50"], optimizer=["Adam, one by one", "SGD, momentum", "SGD"])

# %%
figure, alt = both(16, "ResNet-18", "Adam, one by one")
show(figure, alt)

# %% [markdown]
# ## 6. A transformer: the last layer can be the largest
#
# A language model ends in one score for each token of its vocabulary, at each position: the **logits**. For a batch of
# $B$ texts of $T$ tokens and a vocabulary of $V$ that is, in fp32 as here,
#
# $$4 \cdot B \cdot T \cdot V \ \text{bytes}$$
#
# and loss and backward make more of them. Predict: in a small transformer with the vocabulary of Llama 2, how many such
# tensors are alive at the peak? Which of them does `del` free?

# %%
B, T, V = 2, 128, 32_000
language_model = Transformer(TransformerConfig(
    vocabulary=V, hidden=128, layers=4, heads=4, feedforward=352)).to(device)
language_optimizer = torch.optim.AdamW(language_model.parameters(), foreach=False)
tokens = torch.randint(0, V, (B, T + 1), device=device)


def language_step(keeps_name):
    language_optimizer.zero_grad()
    logits = language_model(tokens[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, V), tokens[:, 1:].reshape(-1))
    if not keeps_name:
        del logits  # autograd needs their log-probabilities, not them: the name alone holds them
    loss.backward()
    language_optimizer.step()


# %%
watch = partial(measure, model=language_model, optimizer=language_optimizer, items=B * T, unit="tokens", timed_steps=0)
text = watch(partial(language_step, keeps_name=True), name="small transformer")
lean = watch(partial(language_step, keeps_name=False), name="with del logits")
show(draw_timeline(text, title="Small transformer, AdamW one by one: one step"),
     alt="Memory over one step of a small transformer: logits and loss appear at the end of forward; where backward begins two "
     "temporaries of the same size stand on them, and that is the peak. One tensor of logits stays through the optimizer step.")
P_text = sum(parameter.numel() for parameter in language_model.parameters())
del language_model, language_optimizer, watch  # or they stay for the rest of the notebook

# %% [markdown]
# **Read it.** The spike stands where backward begins. A band of the logits' size goes on through the *optimizer step*, which
# needs no logits. Who holds it? Count with and without `del`:

# %%
after = text.timeline.at(text.timeline.end_ns)
states = sum(after[category] for category in adam_states(P_text))
print(f"states: predicted {format_bytes(16 * P_text)}, measured {format_bytes(states)}")
one, kinds = 4 * B * T * V, ("logits and loss", "temporaries")
for run in (text, lean):
    at_peak = ", ".join(f"{run.breakdown[kind] / one:.2f} {kind}" for kind in kinds)
    share = sum(run.breakdown[kind] for kind in kinds) / run.peak_bytes
    print(f"{run.name}: at the peak, in {run.peak_phase}, tensors of {format_bytes(one)}: {at_peak}; {share:.0%} of it")
assert text.peak_bytes - lean.peak_bytes > 0.9 * one, "del saves one tensor of logits: does another name hold them?"
llama = model_shape("llama-3-8b")
at_work = 4 * llama.max_sequence * llama.vocabulary
kept, inputs = (each * llama.max_sequence * llama.hidden * llama.layers for each in (41, 2))  # norms 8, q 2, k and v 1, attention 2, four of 3.5 widths 28
print(f"Llama 3 8B, one text of {llama.max_sequence:,} tokens (predicted): logits {format_bytes(at_work)} in fp32, {format_bytes(4 * at_work)} "
      f"for four; its layers in bf16, with flash attention, keep about {format_bytes(kept)}, checkpointed {format_bytes(inputs)}")
compare([text, lean], title="Who holds the logits? Before and after one line")

# %% [markdown]
# **Read it.** Alive at the peak: the logits, their log-probabilities, and a gradient of each, counted as temporaries.
# Backward needs three of the four. The variable `logits` alone holds the fourth. The same line went into torchtitan
# ["to save 3.9G"](https://github.com/pytorch/torchtitan/pull/391) (published). This net is narrow for its
# vocabulary. In Llama 3 8B the layers hold more than the logits, until they are checkpointed: then the last layer is the
# largest. The technique has to fit the category.

# %% [markdown]
# ## Recap
#
# The peak is a moment: measure, then ask of each large block who holds it.
#
# **Test yourself.** Name a technique for each category, then compare. Brackets have the cost.
#
# | category | grows with | what shrinks it | what does not |
# |---|---|---|---|
# | parameters | model | sharding (communication), quantization (accuracy) | a smaller batch |
# | gradients | model | LoRA (fewer trained weights), sharding (communication), freeing each one early (other code) | a smaller batch |
# | optimizer state | model, optimizer | LoRA, SGD or 8-bit states (perhaps accuracy), sharding (communication), offload (transfers) | mixed precision |
# | activations | batch, sequence, width, depth | checkpointing (compute), mixed precision (digits or range), smaller micro-batch (speed) | sharding the states |
# | logits and loss | batch, sequence, vocabulary | `del logits` (nothing), chunked loss (a little compute), smaller micro-batch (speed) | checkpointing the layers |
# | temporaries of backward | batch, operation | fused kernels, chunked loss, smaller micro-batch | checkpointing |
# | temporaries of the optimizer | model | `fused=True` | a smaller batch |
#
# Do the [lab](../../labs/beginner/01_where_memory_goes.ipynb), in a copy (`make my-labs`), then compare with the
# [solution](../../solutions/beginner/01_where_memory_goes.ipynb). Lesson [02](02_mixed_precision.ipynb) makes activations
# smaller.
#
# **References.** Rajbhandari and others, *ZeRO: Memory Optimizations Toward Training Trillion
# Parameter Models*, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), section 3. PyTorch,
# [Understanding CUDA memory usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** You have `build`, which makes `model`, `optimizer` and `train_step`, one whole step that ends with its
# gradients still there. Record from the start, or parameters have no stack:
#
# ```python
# import torch
#
# def held_bytes(tensors):
#     mine = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None]  # FSDP2: this rank's part
#     storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in mine}
#     return sum(storages.values())
#
# cuda = torch.cuda.is_available()
# if cuda:
#     torch.cuda.memory._record_memory_history()
# try:
#     model, optimizer, train_step = build()
#     train_step()  # Adam makes its state here
#     if cuda:
#         torch.cuda.reset_peak_memory_stats()
#     train_step()
# finally:  # out of memory, too
#     if cuda:
#         torch.cuda.memory._dump_snapshot("step.pickle")
#         torch.cuda.memory._record_memory_history(enabled=None)  # stop: it costs time
# states = {
#     "parameters": held_bytes(model.parameters()),
#     "gradients": held_bytes(p.grad for p in model.parameters()),
#     "optimizer state": held_bytes(t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)),
# }
# print({name: f"{size / 2**30:.2f} GiB" for name, size in states.items()})
# if cuda:
#     peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
#     lasting = states["parameters"] + states["optimizer state"]  # alive at every moment; gradients come and go
#     print(f"peak {peak / 2**30:.2f} GiB, above what lasts {(peak - lasting) / 2**30:.2f}, reserved {reserved / 2**30:.2f}")
# ```
#
# Halve the batch and run it again: about half of activations, logits and backward's temporaries goes, less where the peak
# moves. If hardly anything fell, try `fused=True`, then shrink the states. Drop `step.pickle` on
# [memory_viz](https://docs.pytorch.org/memory_viz): every block, and who allocated it.
#
# **transformers.** You have `model` and `dataset`. The `Trainer` keeps the account itself, for short runs:
#
# ```python
# from transformers import Trainer, TrainingArguments
#
# settings = TrainingArguments(output_dir="out", max_steps=2, save_strategy="no", skip_memory_metrics=False)
# trainer = Trainer(model=model, args=settings, train_dataset=dataset)
# metrics = trainer.train().metrics
# print({name: size for name, size in metrics.items() if "_mem_" in name})
# ```
#
# Look at `train_mem_gpu_alloc_delta` (what stayed: optimizer state) and `train_mem_gpu_peaked_delta` (what rose above that
# and went: gradients, activations, temporaries).
