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
# **The answer.** Parameters, gradients and optimizer state follow a formula. Activations grow with the batch, a language
# model's logits too. Only what is alive at the highest moment, the **peak**, counts.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 45, and 60 for the lab | any laptop; a GPU if you have one; beyond Binder's 1 GB | under a minute on two idle CPU cores |

# %% [markdown]
# ## A bet
#
# You account for every byte of one step: ResNet-50, an image network, with Adam on a few images of 32 x 32 pixels. Which
# share of the peak is the *parameters*? Guess, in percent:

# %%
my_bet_percent = 50

# %% tags=["setup"]
here = setup("beginner/01")

# %% jupyter={"source_hidden": true}
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
import torch.nn.functional as F

from evidence.record import recorded
from utils import check, compare, explore, format_bytes
from utils import measure, model_shape, show
from utils.lessons.lesson_01.beside import predicted_beside_measured
from utils.lessons.lesson_01.by_batch import draw_batches
from utils.lessons.lesson_01.by_phase import draw_by_phase, highest_bytes
from utils.lessons.lesson_01.counters import Counters, draw_counters, error_sizes
from utils.lessons.lesson_01.from_before import draw_from_before
from utils.lessons.lesson_01.holders import alive_tensors, draw_holders
from utils.models import Transformer, TransformerConfig, resnet

device = here.meter_device  # where the meter can count: CUDA or CPU

# %% [markdown]
# ## 1. One step in one picture
#
# All that is measured here is fp32, 4 bytes a number. `measure` runs the step once to warm up, then once with every
# allocation recorded. It knows the tensors of model and optimizer by address. Any other block it sorts by the phases in
# which it was made and freed. Look under the black mark:

# %%
batch = {"tiny": 6, "small": 64, "full": 256}[here.scale]


def make_step(model, optimizer, batch_size, micro_batches=1):
    images = torch.randn(batch_size, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (batch_size,), device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)  # the default: drops the old gradients
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
show(draw_from_before(first), alt="Stacked memory over one training step: zero_grad drops the old gradients, activations rise "
     "through forward, new gradients replace them during backward, and the peak lies between the two.")

# %% [markdown]
# **Read it.** The background names the phase. `zero_grad` drops the *gradients* of the step before. Forward builds
# *activations* up. Backward walks from the last layer to the first, frees activations and makes new gradients. Who is alive
# at the peak:

# %%
found = first.breakdown
print(f"{first.evidence}: peak {format_bytes(first.peak_bytes)} in {first.peak_phase}\n{found}")
print(f"\nparameters are {100 * found['parameters'] / found.total_bytes:.0f}% of the peak; your bet was {my_bet_percent}%")

# %% [markdown]
# **Read it.** *Buffers* are tensors of the model that are not trained. *Temporaries* live within one phase: what an operation
# borrows, what backward hands from layer to layer. *Logits* come in section 6. New words:
# [glossary](../00_glossary.ipynb).

# %% [markdown]
# ## 2. Whose count is it?
#
# Section 1 counted tensors. On a GPU they lie in **HBM** (high-bandwidth memory) or GDDR, which an `OutOfMemoryError` is
# about. (Registers and caches hold what a kernel works on.) PyTorch takes *segments* of it from the driver, and cuts them
# into blocks. Three counters, each wider than the one before (`torch.cuda.memory_summary()` prints the first two):
#
# | who counts | what it adds |
# |---|---|
# | `torch.cuda.memory_allocated()` | blocks of tensors, and workspaces of libraries such as cuBLAS |
# | `torch.cuda.memory_reserved()` | free pieces of segments, which PyTorch keeps |
# | `nvidia-smi` | CUDA context (driver, code of kernels), NCCL's buffers, other libraries, other processes |
#
# Who is to blame in [this error](https://github.com/kerrj/lerf/issues/73) (published)? Paste yours.

# %%
error = error_sizes(
    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacty of 23.65 GiB of which 1.66 GiB is free. "
    "Including non-PyTorch memory, this process has 20.81 GiB memory in use. Of the allocated memory 12.09 GiB is allocated "
    "by PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated.")
signs = {  # what the error says, in GiB; above which bound to suspect it (rules of thumb); what to do
    "free + unallocated": (error.free + error.pieces, error.asked, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    "card - free - this process has": (error.card - error.free - error.process, 1, "end other processes, which nvidia-smi lists"),
    "this process has - allocated - unallocated": (error.outside, 1, "lower the limit of the library that holds it"),
    "tried to allocate": (error.asked, error.card / 2, "find it in the traceback; cut batch or length"),
    "allocated": (error.allocated, error.card / 2, "have smaller tensors: sections 3 to 6"),
}
pd.DataFrame([{"the error says": sign, "GiB": f"{size:.2f}", "large above": f"{bound:.2f}", "so": do if size > bound else "-"}
              for sign, (size, bound, do) in signs.items()])

# %% jupyter={"source_hidden": true}
bars = {"the error (published)": Counters.of_error(error)}
record = next(record for record in recorded("resnet50") if record.device == "NVIDIA H200")
h200 = [row for row in record.rows if row["quantity"] == "step" and (row["precision"], row["image_size"]) == ("fp32", 32)]
assert [row["batch"] for row in h200] == [128, 512, 2048], "the record has other batches of fp32 at 32 x 32"
for row in h200[:2]:
    bars[f"H200, batch {row['batch']} (recorded)"] = Counters.of_row(row)
if device.type == "cuda":
    bars["section 1, here (measured)"] = Counters.of_measurement(first)
show(draw_counters(bars, title="What three counters see"),
     alt="Stacked bars: of the card of the error, half is allocated, a fifth is reserved and unallocated, another fifth lies "
     "outside of PyTorch, little is free. On the H200 the part outside stays the same while the batch grows fourfold.")
print(f"{record.evidence}: {record.device}, {record.date}, PyTorch {record.provenance['torch']}, section 1's model in fp32, Adam by foreach;",
      "allocated and reserved each at its own peak")

# %% [markdown]
# **Read it.** Twice the request was free, mostly between PyTorch's own blocks: no piece was large enough. Try
# `expandable_segments` first. (PyTorch 2.9.1 [ignores it](https://github.com/pytorch/pytorch/issues/183387) in the newer
# `PYTORCH_ALLOC_CONF`.) This process holds 3.88 GiB outside of PyTorch, where the H200 had 0.75. LERF's tiny-cuda-nn
# allocates by itself: a likely holder.

# %% [markdown]
# ## 3. The states: a formula without surprises
#
# Which of section 1's bytes could you have known beforehand? The **model states**: what a step leaves for the next. For $P$
# parameters in fp32 (4 bytes each):
#
# $$\underbrace{4P}_{\text{parameters}} + \underbrace{4P}_{\text{gradients}} +
# \underbrace{4P + 4P}_{\text{Adam: running means}} = 16P \ \text{bytes}$$
#
# Adam keeps two running means for each parameter: of its gradient, and of the gradient's square. With `zero_grad` after
# `optimizer.step()`, $12P$ stay, and the peak is the same.

# %% tags=["nbval-check-output"]
P = sum(parameter.numel() for parameter in model.parameters())


def adam_states(parameter_count: int) -> dict[str, int]:
    weights = 4 * parameter_count
    return {"parameters": weights, "gradients": weights, "optimizer state": 2 * weights}


print(f"P = {P:,} parameters, so the states take {format_bytes(16 * P)}")

# %%
after, by_formula = first.timeline.at(first.timeline.end_ns), adam_states(P)
tensors = len(list(model.parameters()))
print(f"optimizer state - 8 P = {after['optimizer state'] - 8 * P} bytes for {tensors} tensors")
# On CUDA a block is a whole multiple of 512 bytes.
assert all(0 <= after[name] - by_formula[name] < 1024 * tensors for name in by_formula), "is it Adam, is all of it fp32?"
sides = {"predicted": {name: by_formula.get(name, "") for name in after}, "measured": dict(after)}
pd.DataFrame(sides).rename_axis("bytes at the end of the step")

# %% [markdown]
# **Read it.** Parameters and gradients equal the formula to the byte. Adam holds a step counter of 4 bytes more
# for each tensor.
#
# ### Which optimizer, which states
#
# ResNet-18 at batch 2, where states fill most of the picture: compare the purple and the grey. `foreach` is Adam's default
# on CUDA: each operation runs over all tensors at once.

# %%
def when(measurement, phase):
    return next(span.start_ns for span in measurement.timeline.spans if span.name == phase)


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
    before = arm.timeline.at(when(arm, "optimizer step")).total_bytes
    print(f"{arm.name:<17} peak in {arm.peak_phase:<15} optimizer step borrows {format_bytes(highest_bytes(arm, 'optimizer step') - before)}")
compare(arms, title="ResNet-18 in fp32, batch 2, each at its own peak")

# %% [markdown]
# **Read it.** The optimizer state is nothing, one copy of the parameters, or two. Adam's arithmetic borrows the grey
# temporaries: one by one two of the largest tensor, by `foreach` as much as *all* parameters. `fused=True` borrows next to
# nothing. At this small batch what is borrowed decides where the peak lies.
#
# **Question.** How many bytes per parameter do the states of SGD *with momentum* take, in fp32:
# weights, gradients and optimizer state together?

# %%
momentum_bytes_per_parameter = ...
check("01.momentum_bytes", momentum_bytes_per_parameter)

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> Adam creates its state inside the <i>first</i>
# <code>optimizer.step()</code>. So a script can pass its first backward, and fail there or in the second batch, as
# <a href="https://github.com/pytorch/pytorch/issues/9439">a user of a VGG model</a> did.</div>
#
# ### A folklore formula
#
# [18 bytes a parameter](https://huggingface.co/docs/transformers/model_memory_anatomy) are right for one kind of *mixed
# precision*. The folklore multiplies them by the 4 bytes of a parameter once more. Llama-2-7B with Adam
# ([who keeps which copy](../advanced/15_design_studio.ipynb#2.-On-paper)):

# %% tags=["nbval-check-output"]
llama = model_shape("llama-2-7b")
assert llama.parameter_count == llama.published_count, "the shape no longer gives the published count"
print(f"P = {llama.parameter_count:,}   ({llama.source})\nparameter, gradient, optimizer; predicted; you have this if")
kinds = {
    (2, 2, 4): "all is 16-bit, as transformers 5 loads weights from a 16-bit file",
    (4, 4, 8): "weights are fp32, also under autocast and TrainingArguments(bf16=True), which cast copies in forward",
    (2, 2, 4 + 8): "DeepSpeed or Megatron keep fp32 weights beside bf16 ones, as in the ZeRO paper",
    (2, 4, 4 + 8): "the same, with fp32 gradients",
    (72,): "never: this is the folklore, 18 x 4 bytes",
}
for parts, case in kinds.items():
    print(f"{' + '.join(map(str, parts)):>10} = {sum(parts):>2} bytes {sum(parts) * llama.parameter_count / 1e9:6.1f} GB   {case}")

# %% [markdown]
# ## 4. Activations: what grows with the batch
#
# No state depends on the batch. What does? Backward needs the inputs or outputs of most operations again, so autograd keeps
# them until then: the **activations**. `saved_tensors_hooks` calls your function with every tensor that autograd keeps, so a
# dozen lines make a meter. They count each *storage* once: the bytes behind a tensor, which several can share.

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


# %%
images = torch.randn(batch, 3, 32, 32, device=device)
metered = first.timeline.at(when(first, "backward"))  # all activations live then
print("your ledger                ", format_bytes(mine := saved_for_backward(model, images)))
print("the meter: activations     ", format_bytes(metered["activations"]))
print("the meter: inputs          ", format_bytes(metered["inputs"]))
ratio = mine / (metered["activations"] + metered["inputs"])
print(f"ledger / (activations + inputs) = {ratio:.4f}")
assert abs(ratio - 1) < 0.01, "over 1% apart: did model or batch change since the measurement?"

# %% [markdown]
# **Read it.** Your ledger asks autograd. The meter asks the allocator: *activations* are blocks born in forward and alive
# when backward begins.
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
by_foreach = [at_batch(size) for size in sizes]
optimizer.param_groups[0]["foreach"] = False

# %% [markdown]
# Two moments compete for the peak. By `foreach` the optimizer step stands at $20P$: the states, and $4P$ of temporaries.
# Backward is near $16P + ab$: the states, and $a$ bytes of activations for each of $b$ images. Look where the red line
# crosses the purple ones:

# %%
def predicted_peak(batch_size):
    return max(16 * P + per_image * batch_size, 20 * P)


rows = {}
for one, many in zip(sweep, by_foreach, strict=True):
    bytes_of = {"activations, where backward begins": activation_bytes(one), "highest in backward": highest_bytes(many, "backward"),
                "highest in optimizer step, one by one": highest_bytes(one, "optimizer step"),
                "highest in optimizer step, foreach": highest_bytes(many, "optimizer step"), "predicted, foreach": predicted_peak(one.items)}
    rows[one.name] = {name: count / 2**20 for name, count in bytes_of.items()}
    rows[one.name]["predicted / measured peak, foreach"] = predicted_peak(one.items) / many.peak_bytes
pd.DataFrame(rows).round(2).rename_axis("MiB")

# %% jupyter={"source_hidden": true}
figure = draw_by_phase(sweep, {size: predicted_peak(size) for size in sorted([*sizes, 4 * P / per_image])},
                       {"optimizer step by foreach": {m.items: highest_bytes(m, "optimizer step") for m in by_foreach}},
                       title="ResNet-50, Adam one by one (dotted: by foreach): highest of each phase")
show(figure, alt="Memory against batch size, a line a phase: backward's highest moment grows with the batch. The optimizer step's "
     "is flat: one by one it lies above backward at the smallest batch alone, by foreach at all but the largest.")

# %% [markdown]
# **Read it.** Activations double with the batch, and no state grows. By `foreach` the optimizer step decides at all but the
# largest batch. $16P + ab$ adds *all* gradients to *all* activations, which this step never holds at once, and leaves
# temporaries out.
#
# ### Does it fit?
#
# The same prediction for larger batches, beside the H200 (recorded, Adam by `foreach`). Look at the two capped batches and
# the last row:

# %%
rows = {}
for row in h200:
    of_peak = {f"{name}, % of the peak": 100 * row["breakdown"][name] / row["peak_bytes"]
               for name in ("parameters", "activations", "temporaries")}
    against = {"allocated": row["allocated_peak_bytes"], "used on the card": row["used_on_the_device_bytes"]}
    ratios = {f"{name} / predicted": size / predicted_peak(row["batch"]) for name, size in against.items()}
    rows[f"batch {row['batch']}"] = of_peak | {"predicted, GiB": predicted_peak(row["batch"]) / 2**30} | ratios
capped = next(row for row in record.rows if row["quantity"] == "largest batch" and row["precision"] == "fp32")
for size, fits in capped["tried"]:
    if size in (capped["batch"], min(size for size, fits in capped["tried"] if not fits)):
        print(f"PyTorch capped at 16 GB, batch {size}: predicted {predicted_peak(size) / 16e9:.2f} of it; fits: {fits}")
for name, row in {"batch 512": h200[1], "batch 2048": h200[2], f"batch {capped['batch']}, capped": capped}.items():
    sizes_bytes = {"temporaries": row["breakdown"]["temporaries"], "peak reserved - peak allocated": row["reserved_peak_bytes"] - row["allocated_peak_bytes"],
                   "used on the card": row["used_on_the_device_bytes"]}
    print(f"{name}, peak in {row['peak_phase']}:", ", ".join(f"{kind} {size / 2**30:.2f} GiB" for kind, size in sizes_bytes.items()))
pd.DataFrame(rows).round(2)

# %% [markdown]
# **Read it.** The bet's answer hangs on the batch: at 2,048 parameters are 0.17% of the peak. At 512 and 2,048 that peak lay
# in *forward*, with temporaries on the activations. Without a cap the card's use was up to 1.36 times the prediction. Not
# all was needed: capped at 16 GB, batch 576 used less than 512 had.
#
# **Verdict.** Take from the card what lies outside of PyTorch. This network fitted where the prediction was 0.94 of the rest,
# and not at 0.99. One network, one cap: plan with nine tenths, then measure yours.
#
# **Question.** A step at batch $b$ peaks at 6 GiB, of which 2 GiB are states. About how much does
# it need at batch $2b$, in GiB?

# %%
doubled_batch_gib = ...
check("01.doubled_batch", doubled_batch_gib)

# %% [markdown]
# ### Break it, diagnose it: activations that stay
#
# A validation loop adds up its losses and never calls `backward`. (`model.eval()` would not stop autograd.) How many bytes does
# each batch leave? Does the same sum do it in training?

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
history.clear()
for name, run in runs.items():
    print(f"{name}: at most {format_bytes(int(max(run.timeline.series().get('activations', [0]))))} of activations")

# %% jupyter={"source_hidden": true}
show(draw_batches(runs, "activations", title="Four batches of two images, and the sum of their losses"),
     alt="Left a staircase of four steps, in the middle nothing, right four hills that return to the ground.")
highest = {name: max(run.timeline.series().get("activations", [0])) for name, run in runs.items()}
assert highest["validation"] > 3 * highest["training"], "the history is not held: does the sum keep its losses?"

# %% [markdown]
# **Diagnose it.** The sum's history holds every batch's graph, with all that autograd saved. In training `backward` has freed
# that. Validate under `torch.no_grad()`, and add up `loss.detach()`.

# %% [markdown]
# ## 5. Why the peak is where it is
#
# To lower a peak you must know who is alive *then*. Section 1's peak, beside each category's own highest moment:

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
# **Question.** You halve the activations of this step, and nothing else. Does the peak fall by half of its activations, or by
# less? Answer `"half"` or `"less"`.

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
    parts = (f"{name} {format_bytes(run.breakdown[name])}" for name in ("activations", "gradients", "temporaries"))
    print(f"{run.name}: peak {format_bytes(run.peak_bytes)} in {run.peak_phase}, with", ", ".join(parts))
print(f"peak of the second - (16P + ab/2): {format_bytes(accumulated.peak_bytes - 16 * P - per_image * batch / 2)}")
print(f"the same cut at batch 512 (predicted): {per_image * 256 / 2**30:.1f} of {h200[1]['allocated_peak_bytes'] / 2**30:.1f} GiB (recorded, H200)")

# %% [markdown]
# **Read it.** This is **gradient accumulation**. Half of the activations are gone, but *all* gradients of the first
# micro-batch stand through the second. So the peak falls little: more than half of what activations save goes to gradients
# and temporaries. Now section 4's formula lacks little but the temporaries. At batch 512 the same cut is predicted to take
# nearly half.
#
# ### Predict beside measure
#
# Move the controls (in a running notebook). Section 3's formula predicts states, the ledger of two images activations.
# Compare part by part:

# %%
optimizer = None  # Adam's state of ResNet-50, and its gradients: make room first
model.zero_grad()
both = partial(predicted_beside_measured, device=device)
explore(both, batch_size=[1, 2, 4, 8, 16], model=["ResNet-18", "ResNet-50"], optimizer=["Adam, one by one", "SGD, momentum", "SGD"])

# %%
figure, alt = both(16, "ResNet-18", "Adam, one by one")
show(figure, alt)

# %% [markdown]
# **Read it.** Totals agree better than parts: the peak lacks some gradients and activations, the formulas lack temporaries.
#
# ## 6. A transformer: the last layer can be the largest
#
# A language model ends in one score for each token of its vocabulary, at each position: the **logits**. For a batch of
# $B$ texts of $T$ tokens and a vocabulary of $V$ that is, in fp32 as here,
#
# $$4 \cdot B \cdot T \cdot V \ \text{bytes}$$
#
# and loss and backward make more of them. Predict, for the vocabulary of Llama 2: how many such tensors are alive at the peak?
# Which of them does `del` free?

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
show(draw_from_before(text, title="Small transformer, AdamW one by one: one step"),
     alt="Memory over one step of a small transformer: logits and loss appear at the end of forward; where backward begins two "
     "temporaries of the same size stand on them, and that is the peak. One tensor of logits stays through the optimizer step.")
P_text = sum(parameter.numel() for parameter in language_model.parameters())

# %% [markdown]
# **Read it.** The unnamed strip before backward is the loss. A band of the logits' size outlives backward. Who holds it?

# %%
after, one = text.timeline.at(text.timeline.end_ns), 4 * B * T * V
print(f"states: predicted {format_bytes(16 * P_text)}, measured {format_bytes(sum(after[kind] for kind in adam_states(P_text)))}")
names = ["logits (held by\n    their variable)", "log-probabilities\n    (by autograd)", "gradient of 2\n    (by backward)", "gradient of 1\n    (by backward)"]
for run in (text, lean):
    count = len(alive_tensors(run, one))
    print(f"{run.name}: at the peak, in {run.peak_phase}, {count} tensors of {format_bytes(one)}, {count * one / run.peak_bytes:.0%} of it")
assert text.peak_bytes - lean.peak_bytes > 0.9 * one, "del saves one tensor of logits: does another name hold them?"
show(draw_holders([text, lean], one, names, title="Small transformer, with and without one line"),
     alt="Two bars. In the first, four equal tensors stand beside parameters, optimizer state and activations. In the second "
     "the logits are missing, and log-probabilities and two gradients are left.")

# %% [markdown]
# **Read it.** Backward needs three of the four tensors. The variable `logits` alone holds the other, and `del` frees it.
# torchtitan does so ["to save 3.9G"](https://github.com/pytorch/torchtitan/pull/391) (published).
#
# This net is narrow for its vocabulary. Take Llama 3 8B in bf16, with fused norms, flash attention and one text of 8,192
# tokens. A layer keeps these bytes, times tokens, times width:

# %%
llama = model_shape("llama-3-8b")
wider, fewer = llama.feedforward / llama.hidden, llama.kv_heads / llama.heads
layer = {"inputs and outputs of two norms": 2 * 2 * 2, "queries": 2, "keys and values": 2 * 2 * fewer, "output of attention": 2,
         "four tensors of feed-forward": 4 * 2 * wider}
print(*(f"{size:4.0f} bytes: {name}" for name, size in layer.items()), f"{sum(layer.values()):4.0f} together", sep="\n")
width_bytes = llama.max_sequence * llama.hidden * llama.layers
logits_bytes = 4 * llama.max_sequence * llama.vocabulary
sizes_bytes = {"logits in fp32": logits_bytes, "four such tensors": 4 * logits_bytes,
               "what layers keep": sum(layer.values()) * width_bytes, "what they keep if checkpointed: their inputs": 2 * width_bytes}
pd.DataFrame({"GiB (predicted)": {name: size / 2**30 for name, size in sizes_bytes.items()}}).round(2)

# %% [markdown]
# **Read it.** The layers keep more than four tensors of logits, until they are
# [checkpointed](../intermediate/05_checkpointing.ipynb): then the logits outweigh them.

# %% [markdown]
# ## Recap
#
# **The answer.** Parameters, gradients and optimizer state follow a formula. Activations grow with the batch, a language
# model's logits too. Only what is alive at the peak counts: measure it, then ask of each large block who holds it.
#
# **Test yourself.** Name a technique for each category, and what it costs.
#
# <details><summary>Answer</summary>
#
# | category | grows with | what shrinks it (cost) | what does not |
# |---|---|---|---|
# | parameters | model | [sharding](../intermediate/09_sharding.ipynb) (communication), [quantization](../intermediate/06_seven_billion.ipynb) (accuracy) | a smaller batch |
# | gradients | model | [LoRA](../intermediate/06_seven_billion.ipynb) (fewer trained weights), sharding | a smaller batch |
# | optimizer state | model, optimizer | LoRA, 8-bit states (perhaps accuracy), sharding, [offload](../intermediate/07_offload.ipynb) (transfers) | mixed precision |
# | activations | batch, sequence, width, depth | checkpointing (compute), [mixed precision](02_mixed_precision.ipynb) (digits), smaller micro-batch (speed) | sharding the states |
# | logits and loss | batch, sequence, vocabulary | `del logits` (nothing), [loss in chunks](../intermediate/05_checkpointing.ipynb#5.-Logits-are-activations-too) (compute) | checkpointing the layers |
# | temporaries | batch; of the optimizer: model | smaller micro-batch (speed); `fused=True` | checkpointing |
#
# </details>
#
# Do the [lab](../../labs/beginner/01_where_memory_goes.ipynb), in a copy (`make my-labs`), then compare with the
# [solution](../../solutions/beginner/01_where_memory_goes.ipynb). Lesson [02](02_mixed_precision.ipynb) makes activations
# smaller.

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** You have `build`, which makes `model`, `optimizer` and `train_step`: one whole step, `zero_grad` first.
# After an `OutOfMemoryError` this prints the account, too:
#
# ```python
# import torch
#
# def held_bytes(tensors):
#     mine = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None]  # FSDP2: this rank's part
#     storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in mine}
#     return sum(storages.values())
#
# cuda, model, states = torch.cuda.is_available(), None, {}
# if cuda:  # from the start, or parameters have no stack
#     torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
# try:
#     model, optimizer, train_step = build()
#     train_step()  # Adam makes its state here
#     if cuda:
#         torch.cuda.reset_peak_memory_stats()
#     train_step()
# finally:
#     if cuda:
#         torch.cuda.memory._dump_snapshot("step.pickle")
#         torch.cuda.memory._record_memory_history(enabled=None)  # stop: it costs time
#     if model is not None:
#         states = {
#             "parameters": held_bytes(model.parameters()),
#             "gradients": held_bytes(p.grad for p in model.parameters()),
#             "optimizer state": held_bytes(t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)),
#         }
#         print({name: f"{size / 2**30:.2f} GiB" for name, size in states.items()})
#     if cuda:
#         peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
#         lasting = states.get("parameters", 0) + states.get("optimizer state", 0)  # at every moment; gradients come and go
#         print(f"peak {peak / 2**30:.2f} GiB, above what lasts {(peak - lasting) / 2**30:.2f}, reserved {reserved / 2**30:.2f}")
# ```
#
# Halve the batch and run it again: about half of activations, logits and backward's temporaries goes, less where the peak
# moves. If little fell, try `fused=True`, then shrink the states. Drop `step.pickle` on
# [memory_viz](https://docs.pytorch.org/memory_viz). Bands from end to end last, the hill is forward and backward. A click on
# a band names the line that made it. Most of backward's name none: another thread makes them.
# ([Lesson 10](../intermediate/10_oom_clinic.ipynb#5.-Instruments,-and-what-each-cannot-see) shows the page.)
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
# and went: gradients, activations, temporaries). For a large vocabulary, `use_liger_kernel=True` (package
# `liger-kernel`) computes the loss in chunks.
