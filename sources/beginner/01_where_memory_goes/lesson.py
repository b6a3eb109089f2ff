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
# **Promise.** You account for one training step of ResNet-50 on this machine: 100% of the bytes of its tensors, in
# named categories, at every moment of the step.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 45, and 60 for the lab | any laptop; a GPU if you have one; beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# You train ResNet-50, an image network, with Adam on a few images of 32 x 32 pixels. Memory rises and falls
# during a step. Its highest moment is the **peak**. Which share of the memory, at the peak, is the *parameters*? Write
# your guess, in percent, in place of the 50.

# %%
my_bet_percent = 50

# %% tags=["setup"]
here = setup("beginner/01")

# %%
import subprocess
from dataclasses import replace
from functools import partial

import pandas as pd
import psutil
import torch
import torch.nn.functional as F

from utils import Evidence, check, compare, draw_timeline, explore, format_bytes
from utils import measure, model_shape, score, scoreboard, show
from utils.lessons.lesson_01.beside import predicted_beside_measured
from utils.lessons.lesson_01.by_phase import draw_by_phase
from utils.models import Transformer, TransformerConfig, resnet

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# ## 1. One step in one picture
#
# Random images will do: only their shapes matter for memory. `measure` runs the step once to warm up, once with every
# allocation recorded, and a few times for the clock.

# %%
batch = {"tiny": 6, "small": 64, "full": 256}[here.scale]


def make_step(model, optimizer, batch_size):
    images = torch.randn(batch_size, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (batch_size,), device=device)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


# %%
model = resnet(50, stem="cifar").to(device)
optimizer = torch.optim.Adam(model.parameters())
first = measure(make_step(model, optimizer, batch), model=model, optimizer=optimizer, items=batch,
                unit="images", name=f"ResNet-50, batch {batch}")
show(draw_timeline(first), alt="Stacked memory over one training step: activations rise through forward, "
     "gradients replace them during backward, and the peak lies between the two.")

# %% [markdown]
# **Read it.** The height is the memory of all tensors; the colours say
# what they are for, the background names the phase. Parameters and Adam's state are there the whole time.
# Forward builds *activations* up. Backward walks from the last layer to the first: it frees activations
# and makes *gradients*. The optimizer step changes the weights. (The thin spike at the left edge is
# the last step's gradients.) The triangle marks the peak. Who is alive then:

# %%
found = first.breakdown
print(first)
print(f"\nparameters are {100 * found['parameters'] / found.total_bytes:.0f}% of the peak; your bet was {my_bet_percent}%")
for counter, size_bytes in first.allocator_bytes.items():
    print(f"another counter, {counter}: {format_bytes(size_bytes)}")

# %% [markdown]
# **Read it.** *Buffers* are tensors of the model that are not trained. *Temporaries* are what one operation
# borrows. The categories add up to all tensors of the model and optimizer that `measure` is given, and all that the step
# allocates. Another model with its Adam would fill a card as well, and is not in this sum. The last line counts
# everything, libraries, too. (*Logits*: section 6.)
#
# New words stand in the [glossary](../00_glossary.ipynb).

# %% [markdown]
# ## 2. Whose count is it?
#
# A GPU has small memories beside its arithmetic and one large one, the **HBM** (high-bandwidth memory), which holds your
# tensors. An A100 with "40 GB" on its box: 27 MiB of registers and 60 MiB of caches (NVIDIA's whitepaper of 2020), and
# 39.49 GiB of HBM, as CUDA reports it. "Out of memory" always means the large one.
#
# A tensor lives there from the moment it is allocated to the moment its last reference is gone. Three
# counters know about that, each in its own way:
#
# | who counts | what it counts |
# |---|---|
# | `torch.cuda.memory_allocated()` | bytes of tensors that are alive |
# | `torch.cuda.memory_reserved()` | what PyTorch took from the driver, in large segments, and keeps for reuse |
# | `nvidia-smi` | reserved, plus the CUDA context (what the driver and the code of the kernels take), plus other processes |
#
# On a CPU, PyTorch keeps no reserve.

# %%
if torch.cuda.is_available():
    print(torch.cuda.memory_summary(abbreviated=True))
    print(subprocess.getoutput("nvidia-smi"))
else:
    print("No CUDA device here, so torch.cuda.memory_summary() has nothing to say.")
    print("This Python process holds", format_bytes(psutil.Process().memory_info().rss), "now: tensors, interpreter, libraries")

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> <code>nvidia-smi</code> shows a high number and the step seems to fill the
# card. Often much of it is only <i>reserved</i>, and free for the next tensor. Judge a technique by the peak of allocated
# bytes, <code>torch.cuda.max_memory_allocated()</code>
# (<a href="https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management">notes on CUDA memory</a>).</div>

# %% [markdown]
# ## 3. The states: a formula without surprises
#
# Some tensors are there when a step ends. For $P$ parameters in fp32 (4 bytes each):
#
# $$\underbrace{4P}_{\text{parameters}} + \underbrace{4P}_{\text{gradients}} +
# \underbrace{4P + 4P}_{\text{Adam: running means}} = 16P \ \text{bytes}$$
#
# Adam keeps two running means for each parameter: of its gradient, and of the gradient's square.
# All of these together are the **model states**. Nothing in the formula knows the batch.

# %% tags=["nbval-check-output"]
P = sum(parameter.numel() for parameter in model.parameters())


def adam_states(parameter_count: int) -> dict[str, int]:
    weights = 4 * parameter_count
    return {"parameters": weights, "gradients": weights, "optimizer state": 2 * weights}


print(f"P = {P:,} parameters, so the states take {format_bytes(16 * P)}")

# %% [markdown]
# The formula speaks of what stays, so compare it with what is alive when the step is over.

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
# **Read it.** Parameters and gradients equal the formula, to the byte. Adam holds a step counter of 4 bytes more
# for each tensor. Not predicted are the buffers (batch norm's running statistics) and the inputs, which are small.
#
# ### Which optimizer, which states
#
# ResNet-18's peaks at batch 2, where states fill most of the picture. `foreach` is Adam's default on CUDA: each operation
# runs over all tensors at once.

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
# grey temporaries: one by one two of the largest tensor, by `foreach` of *all*, a copy of the parameters. So its peak lies
# in the optimizer step, when activations are gone. `fused=True` borrows nothing there.
#
# **Question.** How many bytes per parameter do the states of SGD *with momentum* take, in fp32:
# weights, gradients and optimizer state together? Put a number in place of the dots.

# %%
momentum_bytes_per_parameter = ...
check("01.momentum_bytes", momentum_bytes_per_parameter)

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> Adam creates its state inside the <i>first</i>
# <code>optimizer.step()</code>. So a script can pass its first forward and backward, and fail in the second.
# <a href="https://github.com/pytorch/pytorch/issues/9439">A user of a VGG model</a> met this.</div>
#
# ### A folklore formula
#
# "Training takes 18 x parameters x bytes per parameter" counts bytes twice: 18 already is bytes. 16 is the sum above, 18
# one count of *mixed precision*, with a 16-bit copy of the weights: 2 + 4 + 4 + 8 bytes ([who keeps which copy](../advanced/15_design_studio.ipynb#2.-On-paper)).
# For Llama-2-7B:

# %% tags=["nbval-check-output"]
llama = model_shape("llama-2-7b")
count = llama.parameter_count
assert count == llama.published_count, "the shape no longer gives the published count"
print(f"P = {count:,}   ({llama.source})")
rows = {"fp32 with Adam, 16 bytes": 16 * count, "mixed precision, fp32 gradients, 18 bytes": 18 * count,
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
        return tensor.detach()  # kept, so its address is not used again; itself, it would hold the graph: a leak

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(inputs)
    assert output.requires_grad, "nothing is saved without gradients: call it outside of no_grad"
    return sum(ledger.values())


# %% [markdown]
# Compare it with the meter when backward begins: all activations live then.

# %%
def when(measurement, phase):
    return next(span.start_ns for span in measurement.timeline.spans if span.name == phase)


images = torch.randn(batch, 3, 32, 32, device=device)
mine = saved_for_backward(model, images)
metered = first.timeline.at(when(first, "backward"))
print("your ledger                ", format_bytes(mine))
print("the meter: activations     ", format_bytes(metered["activations"]))
print("the meter: inputs          ", format_bytes(metered["inputs"]))
ratio = mine / (metered["activations"] + metered["inputs"])
print(f"ledger / (activations + inputs) = {ratio:.4f}")
assert abs(ratio - 1) < 0.01, "over 1% apart: did model or batch change since the measurement?"

# %% [markdown]
# **Read it.** Two meters that share no code agree: your ledger asks autograd, the meter the allocator. The inputs count
# because the first layer keeps the images.
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


small, large = sweep[0], sweep[-1]
per_image = (activation_bytes(large) - activation_bytes(small)) / (large.items - small.items)
print(f"activations per image: {per_image / 1e6:.2f} MB")

# %%
figure = draw_by_phase(sweep, {size: 16 * P + per_image * size for size in sizes}, title="ResNet-50 with Adam: the highest moment of each phase")
show(figure, alt="Memory against batch size, a line a phase: backward's highest moment grows with the batch, the optimizer "
     "step's is flat and above it at the smallest batch, and the dashed formula lies above both.")
print("peak in:", *(f"{m.name}, {m.peak_phase};" for m in sweep))
alive = {m.name: dict(m.timeline.at(when(m, "backward"))) for m in sweep}
(pd.DataFrame(alive).fillna(0) / 2**20).round(1).rename_axis("MiB, backward begins")

# %% [markdown]
# **Read it.** Where backward begins, activations double with the batch, and no state grows. The *peak* is the highest of
# the lines: for one image it lies in the optimizer step, which no image changes, from two on in backward. The dashed
# formula adds *all* gradients to *all* activations. The step never holds both at once.
#
# **Question.** A step at batch $b$ peaks at 6 GiB, of which 2 GiB are states. About how much does
# it need at batch $2b$, in GiB?

# %%
doubled_batch_gib = ...
check("01.doubled_batch", doubled_batch_gib)

# %% [markdown]
# ### Break it, diagnose it: activations that stay
#
# A validation loop adds up its losses. It never calls `backward`, so nothing should stay. What is alive when the step is
# over? (`model.eval()` would not stop autograd.)

# %%
total_loss = torch.zeros((), device=device)


def validate():
    global total_loss
    total_loss = total_loss + F.cross_entropy(model(images), labels)


labels = torch.randint(0, 10, (batch,), device=device)
leak = measure(validate, model=model, name="validation, as written", timed_steps=0)
kept = leak.timeline.at(leak.timeline.end_ns)
print(kept)
adam = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
print("alive as well, and not told to the meter: Adam's", format_bytes(adam))

# %% [markdown]
# **Diagnose it.** Activations are alive after the step, and "other" holds those of the warm-up step. `total_loss` has a
# history, and it holds the graph with the activations of every batch so far. The cure is one line.

# %%
total_loss = torch.zeros((), device=device)


@torch.no_grad()
def validate_without_history():
    global total_loss
    total_loss = total_loss + F.cross_entropy(model(images), labels)


clean = measure(validate_without_history, model=model, name="validation, cured", timed_steps=0)
alive_after = [m.timeline.at(m.timeline.end_ns).total_bytes for m in (leak, clean)]
print("alive after the step:", *map(format_bytes, alive_after))
assert alive_after[0] - alive_after[1] > kept["activations"], "the history is still held: does no_grad wrap the step?"
compare([leak, clean], title="A validation step, before and after the cure")

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> A ResNet-50 example of a well-known framework averaged a loss
# <i>with</i> its history and <a href="https://github.com/horovod/horovod/pull/641">ran out of memory</a>.</div>

# %% [markdown]
# ## 5. Why the peak is where it is
#
# A peak is one moment. To lower it you must know who is alive *then*. Compare the peak of section 1 with the sum of
# what each category holds at its own highest.

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
# ### Predict beside measure
#
# Move the controls (in a running notebook): each change predicts by section 3's formula and the ledger, then measures. A
# batch of 16 is kept as a picture.

# %%
both = partial(predicted_beside_measured, device=device)
explore(both, batch_size=[1, 2, 4, 8, 16], model=["ResNet-18", "ResNet-50"], optimizer=["Adam", "SGD, momentum", "SGD"])

# %%
figure, alt = both(16, "ResNet-18", "Adam")
show(figure, alt)

# %% [markdown]
# **Read it.** The formula says too much, because it adds all gradients to all activations, and too little, because it
# knows no temporaries. Here the first error is the larger. Try batch 1: the prediction is too low.

# %% [markdown]
# ## 6. A transformer: the last layer can be the largest
#
# A language model ends in one score for each token of its vocabulary, at each position: the **logits**. For a batch of
# $B$ texts of $T$ tokens and a vocabulary of $V$ that is, in fp32,
#
# $$4 \cdot B \cdot T \cdot V \ \text{bytes}$$
#
# and loss and backward make more tensors of the same shape. Predict: in a small transformer with the
# vocabulary of Llama 2, how many such tensors are alive at the peak, and what share of it are they?

# %%
optimizer = None  # Adam's state of ResNet-50: make room first
model.zero_grad()
B, T, V = 2, 128, 32_000
language_model = Transformer(TransformerConfig(
    vocabulary=V, hidden=128, layers=4, heads=4, feedforward=352)).to(device)
language_optimizer = torch.optim.AdamW(language_model.parameters())
tokens = torch.randint(0, V, (B, T + 1), device=device)


def language_step():
    language_optimizer.zero_grad()
    logits = language_model(tokens[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, V), tokens[:, 1:].reshape(-1))
    loss.backward()
    language_optimizer.step()


text = measure(language_step, model=language_model, optimizer=language_optimizer,
               items=B * T, unit="tokens", name="small transformer", timed_steps=0)
show(draw_timeline(text), alt="Memory over one step of a small transformer: logits and loss appear at the end of "
     "forward; where backward begins two temporaries of the same size stand on them, and that is the peak.")
P_text = sum(parameter.numel() for parameter in language_model.parameters())
del language_model, language_optimizer, language_step  # or they stay for the rest of the notebook

# %%
after = text.timeline.at(text.timeline.end_ns)
states = sum(after[category] for category in adam_states(P_text))
print(f"states: predicted {format_bytes(16 * P_text)}, measured {format_bytes(states)}")
one = 4 * B * T * V
print("one tensor of logits:", format_bytes(one))
kinds = ("logits and loss", "temporaries")
for moment, at_ns in [("backward is called", when(text, "backward")), ("peak", text.timeline.peak_ns)]:
    alive = text.timeline.at(at_ns)
    print(f"{moment + ', such tensors:':<36}", ", ".join(f"{alive[kind] / one:.2f} {kind}" for kind in kinds))
spike = sum(text.breakdown[kind] for kind in kinds)
print(f"both kinds are {100 * spike / text.peak_bytes:.0f}% of the peak, which is in {text.peak_phase}")

# %% [markdown]
# **Read it.** When backward is called, two tensors of the logits' shape are alive: the logits and their
# log-probabilities. Backward begins with a gradient of each, counted as temporaries; these four are the spike. Fewer
# activations lower only their thin band, SGD only Adam's broad one: the technique has to fit the category.
#
# <div class="alert alert-warning"><b>Trap.</b> One line, <code>logits = logits.float()</code>, makes
# an fp32 copy of 16-bit logits. <a href="https://github.com/huggingface/transformers/pull/33902">Removing it</a> from a
# popular library took the peak of sharded (FSDP2) Llama 3.1 8B inference from 18.5 to 10.6 GiB (published by the
# author).</div>

# %%
score("01", first)
score("01", text)
scoreboard("01")

# %% [markdown]
# ## Recap
#
# - The peak is a moment. Only what is alive then counts.
# - States do not depend on the batch: 16 bytes per parameter for fp32 with Adam.
# - Activations are proportional to the batch, logits to batch, length and vocabulary.
# - A formula is a prediction. Measure, then explain the ratio.
#
# **Test yourself.** Name a technique for each category, then compare; what it costs stands in brackets.
#
# | category | grows with | what shrinks it | what does not |
# |---|---|---|---|
# | parameters | model | sharding (communication), quantization (accuracy) | a smaller batch |
# | gradients | model | sharding (communication), freeing each one early (other code) | a smaller batch |
# | optimizer state | model, optimizer | SGD or 8-bit states (perhaps accuracy), sharding (communication), offload (transfers) | mixed precision |
# | activations | batch, sequence, depth | checkpointing (compute), mixed precision (digits or range), smaller micro-batch (speed) | sharding the states |
# | logits and loss | batch, sequence, vocabulary | chunked loss (a little compute), smaller micro-batch (speed) | checkpointing the layers |
# | temporaries | operation, size of its tensors | fused kernels (not there for every operation) | checkpointing |
#
# Do the [lab](../../labs/beginner/01_where_memory_goes.ipynb), in a copy (`make my-labs`), then compare with the
# [solution](../../solutions/beginner/01_where_memory_goes.ipynb). Lesson [02](02_mixed_precision.ipynb) halves the
# activations, and finds how many images fill a card.
#
# **References.** Rajbhandari and others, *ZeRO: Memory Optimizations Toward Training Trillion
# Parameter Models*, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), section 3 and Figure 1. PyTorch,
# [Understanding CUDA memory usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html).

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** You have `model`, `optimizer` and `train_step`, one whole step that ends with its gradients still there.
# Take two, and ask who holds what:
#
# ```python
# import torch
#
# def held_bytes(tensors):
#     storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
#     return sum(storages.values())
#
# train_step()  # Adam makes its state here
# cuda = torch.cuda.is_available()
# if cuda:
#     torch.cuda.reset_peak_memory_stats()
#     torch.cuda.memory._record_memory_history(max_entries=100_000)
# train_step()
# states = {
#     "parameters": held_bytes(model.parameters()),
#     "gradients": held_bytes(p.grad for p in model.parameters()),
#     "optimizer state": held_bytes(t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)),
# }
# print({name: f"{size / 2**30:.2f} GiB" for name, size in states.items()})
# if cuda:
#     peak = torch.cuda.max_memory_allocated()
#     lasting = states["parameters"] + states["optimizer state"]  # alive at every moment; gradients come and go
#     print(f"peak {peak / 2**30:.2f} GiB, above what lasts {(peak - lasting) / 2**30:.2f} GiB")
#     torch.cuda.memory._dump_snapshot("step.pickle")
#     torch.cuda.memory._record_memory_history(enabled=None)  # stop: it costs time
# ```
#
# Halve the batch and run it again: what fell is activations, logits and temporaries. If hardly anything fell, the states
# decide. On a GPU `step.pickle` says who allocated each byte, with its stack: drop it on
# [memory_viz](https://docs.pytorch.org/memory_viz).
#
# **transformers.** You have `model` and `dataset`. The `Trainer` keeps the account itself, for short runs:
#
# ```python
# from transformers import Trainer, TrainingArguments
#
# settings = TrainingArguments(output_dir="out", max_steps=2, skip_memory_metrics=False)
# trainer = Trainer(model=model, args=settings, train_dataset=dataset)
# metrics = trainer.train().metrics
# print({name: size for name, size in metrics.items() if "_mem_" in name})
# ```
#
# Look at `train_mem_gpu_alloc_delta` (what stayed: optimizer state) and `train_mem_gpu_peaked_delta` (what rose above that
# and went: gradients, activations, temporaries).
