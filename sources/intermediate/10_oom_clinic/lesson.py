# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 The out-of-memory clinic
#
# {{badges}}
#
# **One question.** A training run is out of memory: *what filled it?*
#
# **Promise.** Seven runs go over their memory budget, each for a reason of its own. You find each cause from evidence,
# cure it in a few lines with the same losses, and learn which instrument sees what. Words that are new to you
# stand in the [glossary](../00_glossary.ipynb).
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (the loader of section 4 is measured on Linux) | about a minute on two CPU cores |
#
# ## A bet
#
# "Out of memory? Make the batch smaller." Seven patients follow. Each batch is cut in two parts, with accumulated
# gradients. How many of the seven then stay within their budget? Section 6 counts.

# %%
my_bet = 5

# %% tags=["setup"]
here = setup("intermediate/10")

# %% jupyter={"source_hidden": true}
import gc
import sys
import weakref
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from IPython.display import Code
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from utils import MIB, Evidence, check, draw_breakdown, draw_lanes, draw_over_time
from utils import draw_timeline, format_bytes, recorded_table, score, scoreboard, show
from utils.clinic import PATIENTS, admit, examine, sick
from utils.lessons.lesson_10 import cures as general_cures
from utils.lessons.lesson_10.host import run_loader
from utils.lessons.lesson_10.pages import write_snapshot_page, write_trace_page
from utils.lessons.lesson_10.snapshot import write_snapshot
from utils.lessons.lesson_10.views import PatientBytes, Segment, draw_segments, draw_ward
from utils.techniques import checkpoint_blocks

files = here.root / "build" / "clinic"  # git ignores this folder

# %% [markdown]
# ## 1. Read the error, then count between steps
#
# A patient is a script with `build()`, which makes model and optimizer, and `train(model, optimizer)`, which runs all
# of its steps and gives the losses. `examine` runs it once under the meter, from its very first step.

# %%
patients = {name: admit(name) for name in PATIENTS}
before = {name: sick(patient) for name, patient in patients.items()}
kinds = [Evidence.MEASURED, Evidence.SIMULATED]  # of fragmentation: the smallest GPU that would do
rows = {name: PatientBytes(found.bytes, patients[name].limit_bytes) for name, found in before.items()}
show(draw_ward(rows, title="Seven patients, each over its budget", evidence=kinds),
     alt="Bars of seven training runs: every one of them reaches beyond the line of its budget.")
for name, found in before.items():
    print(f"{name}: \"{patients[name].complaint}\"\n   {found.complaint}\n")

# %% [markdown]
# The meter's error names a *phase* and a *category*: that is where the last drop fell. It does not say who filled the
# bucket, and a GPU's own error, as `fragmentation` shows it, names neither. One more number tells: the bytes alive
# right after each optimizer step, when the step's activations should be gone.

# %%
def after_steps(found):
    ends = [span.end_ns for span in found.run.timeline.spans if span.name == "optimizer step"]
    return [found.run.timeline.at(ns).total_bytes for ns in ends]


triage = []
for name, found in before.items():
    alive = after_steps(found)
    growth = (alive[-1] - alive[1]) / (len(alive) - 2) if len(alive) > 2 else float("nan")  # two steps tell nothing
    triage.append({"patient": name, "peak in": found.run.peak_phase, "largest": max(found.run.breakdown, key=found.run.breakdown.get),
                   "grows per step (MiB)": round(growth / MIB, 2), "peak (MiB)": found.run.peak_bytes // MIB,
                   "budget (MiB)": patients[name].limit_bytes // MIB})
pd.DataFrame(triage).set_index("patient").style.format(na_rep="-", precision=2)

# %% [markdown]
# **Read it.** Two questions sort the ward.
#
# 1. *Is the peak below the budget, and it still died?* Then what is alive is not the trouble: `fragmentation`.
# 2. *Does it grow from step to step?* Then something keeps what a step made: `kept_graph`, `forgotten_reference`.
#    (`fragmentation` keeps features on purpose.) *Else* one moment is too large: the other four.
#
# ## 2. Something is kept
#
# ### kept_graph
#
# The script adds up two numbers for its log.

# %%
def script(name, start, end):
    text = Path(sys.modules[f"utils.clinic.patients.{name}"].__file__).read_text()
    return Code(start + text.partition(start)[2].partition(end)[0], language="python")


script("kept_graph", "        for tokens in", "    return")

# %% [markdown]
# Neither sum is detached. **Question.** Which of the two keeps megabytes alive? Answer `"total_loss"`, `"total_size"`
# or `"both"` before you look at the next cell.

# %%
which_sum = ...
check("10.which_sum", which_sum)

# %%
half_cures = {
    "detach total_loss": {"total_loss + loss": "total_loss + loss.detach()"},
    "detach total_size": {"logits.logsumexp": "logits.detach().logsumexp"},
}
for name, changes in half_cures.items():
    print(f"{name}: {examine(patients['kept_graph'].edited(changes))}\n")

# %% [markdown]
# **Read it.** [PyTorch's FAQ](https://docs.pytorch.org/docs/stable/notes/faq.html) warns of `total_loss += loss`. Here
# it costs next to nothing: `backward()` has freed what this graph had saved. No backward ever visits the other sum, so each
# step's logits wait for one. Beware of a metric, a validation loss, a penalty that is logged and not trained. The cure is
# `.detach()` or `.item()`:

# %%
cures = {"kept_graph": patients["kept_graph"].edited(
    {"total_loss + loss": "total_loss + loss.detach()", "logits.logsumexp": "logits.detach().logsumexp"})}
after = {}


def treat(name):
    after[name] = examine(cures[name])
    print(cures[name].diff)
    print(f"{before[name].bytes / MIB:.1f} MiB before, {after[name].bytes / MIB:.1f} after, budget",
          f"{patients[name].limit_bytes / MIB:.0f}; same losses: {after[name].same_losses(before[name])}")
    assert after[name].fits and not before[name].fits, f"the cure of {name} should bring it under its budget"
    assert after[name].same_losses(before[name]), f"the cure of {name} should leave its losses alone"


treat("kept_graph")

# %%
figure = draw_over_time({"before": before["kept_graph"].run, "after": after["kept_graph"].run}, "logits and loss",
                        title="A staircase is the sign of something kept")
show(figure, alt="Logits and loss over eight steps: before the cure a staircase, after it a comb of equal teeth.")

# %% [markdown]
# ### forgotten_reference
#
# "I added three lines of monitoring." The hook of this patient appends the output of every norm to a list. Only those
# of the last forward are used.

# %%
script("forgotten_reference", "    norms =", "    for _ in")

# %%
cures["forgotten_reference"] = patients["forgotten_reference"].edited({
    "seen.append(result)": "seen.append(result.abs().max().item())",
    "result.abs().max().item() for result": "result for result"})
treat("forgotten_reference")

# %% [markdown]
# ### Break it, diagnose it
#
# Cure it as `kept_graph` was cured: keep `result.detach()`. Predict what that saves.

# %%
detached = examine(patients["forgotten_reference"].edited({"seen.append(result)": "seen.append(result.detach())"}))
print(f"{before['forgotten_reference'].bytes / MIB:.1f} MiB before, {detached.bytes / MIB:.1f} with .detach(), "
      f"{after['forgotten_reference'].bytes / MIB:.1f} with .item()")
assert detached.bytes == before["forgotten_reference"].bytes, "a detached tensor has the same storage"

# %% [markdown]
# **Diagnose it.** Not a byte. `.detach()` lets go of the graph and keeps the tensor; here the tensors fill the memory.
# `.item()` copies one number out.
#
# A list in a hook, a closure, an attribute: what can be reached stays. Two such places are the **notebook's
# own**: `Out[]` keeps what a cell's last line shows, and `sys.last_traceback` keeps the frames of the last error, with
# every local variable. Here a function makes a tensor of 64 MiB, and fails:

# %%
def step_that_fails():
    global witness
    activations = torch.ones(16, 1024, 1024)
    witness = weakref.ref(activations)
    raise RuntimeError("out of memory, say")


try:
    step_that_fails()
except RuntimeError as error:  # what a notebook does with an error that ends a cell
    sys.last_value, sys.last_traceback = error, error.__traceback__
gc.collect()
print("after the error, and gc.collect():", "alive" if witness() is not None else "gone")
frames = [frame for frame in gc.get_referrers(witness()) if hasattr(frame, "f_code")]
print("held by:", *(f"the frame of {frame.f_code.co_name}()" for frame in frames))
del frames
sys.last_value.__traceback__ = sys.last_traceback = None
gc.collect()
print("without the traceback:", "alive" if witness() is not None else "gone")

# %% [markdown]
# **Trap.** After an out-of-memory error in a notebook, a smaller batch may fail as well: the failed step's tensors are
# still there ([PyTorch issue 27600](https://github.com/pytorch/pytorch/issues/27600)). `empty_cache()` cannot help, nor
# can `gc.collect()`. Drop the traceback, or restart the kernel.
#
# ## 3. One moment is too large
#
# ### validation
#
# "It dies in `model.eval()`." The mode changes dropout and batch norm. It does not tell autograd to stop.

# %%
show(draw_timeline(before["validation"].run, title="Small steps, and a validation that keeps everything"),
     alt="Timeline: low hills of training, then a forward that climbs five times as high.")
cures["validation"] = patients["validation"].edited({
    "    losses.append(loss_of(model, held_out).item())":
    "    with torch.no_grad():\n        losses.append(loss_of(model, held_out).item())"})
treat("validation")

# %% [markdown]
# ### large_vocabulary
#
# "I checkpointed every block." Here that saves next to nothing. The breakdown of the peak says why.

# %%
found = before["large_vocabulary"].run
show(draw_breakdown([found], title="The peak of large_vocabulary"),
     alt="One bar: logits, loss and their gradients' temporaries fill most of it; activations are thin.")
print("logits of one batch:", format_bytes(8 * 48 * 24_000 * 4), "(predicted)")

# %% [markdown]
# **Read it.** Most of the bar is four tensors of that size: the logits, their log-softmax, and a gradient of each. No
# block owns them. The cure of lesson 05: compute the logits for a few tokens at a time, and again in backward.

# %%
def in_chunks(model, tokens, parts, chunks=8):
    """The mean loss of next tokens, with the logits of one chunk alive at a time."""
    def summed(hidden, wanted):
        return F.cross_entropy(head(hidden), wanted, reduction="sum")

    head, model.head = model.head, None  # without its head the model gives its stream
    hidden = model.norm(model(tokens[:, :-1])).flatten(0, 1)
    model.head, wanted = head, tokens[:, 1:].flatten()
    pairs = zip(hidden.chunk(chunks), wanted.chunk(chunks), strict=True)
    return sum(checkpoint(summed, *pair, use_reentrant=False) for pair in pairs) / len(wanted) / parts


cures["large_vocabulary"] = patients["large_vocabulary"].edited({
    "            logits = model(tokens[:, :-1])\n": "",
    "F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / parts": "in_chunks(model, tokens, parts)",
    "del logits, loss": "del loss"}, in_chunks=in_chunks)
treat("large_vocabulary")

# %% [markdown]
# ### optimizer_doubles
#
# "Forward and backward pass. The very first `optimizer.step()` kills it." Adam makes its two moments in that call, and
# `foreach=True`, PyTorch's own choice on a GPU, holds a temporary as large as all parameters besides.

# %%
show(draw_timeline(before["optimizer_doubles"].run, title="The first step makes the states, and a temporary"),
     alt="Timeline: memory more than doubles during the first optimizer step and shows the same tooth in each later one.")
cures["optimizer_doubles"] = patients["optimizer_doubles"].edited({"foreach=True": "fused=True"})
treat("optimizer_doubles")
print(after["optimizer_doubles"].run.breakdown)

# %% [markdown]
# **Read it.** The moments had to come, and they stay: only from the *second* step on do activations lie on top of them.
# So a first step that fits proves little. The temporary is what a fused kernel does without.
#
# ### resolution
#
# A U-Net that was trained at 128 x 128 gets 256 x 256, in a batch of one. Activations grow with the pixels.

# %%
resolution = patients["resolution"]
by_side = {128: examine(resolution.edited({"SIDE = 256": "SIDE = 128"})), 256: before["resolution"]}
for side, found in by_side.items():
    print(f"{side}: {found}")
pixels = by_side[256].run.breakdown["activations"] / by_side[128].run.breakdown["activations"]
print(f"twice the side, four times the pixels, {pixels:.2f} times the activations at the peak (measured)")
cures["resolution"] = resolution.edited(
    {"return model, torch": "return checkpoint_blocks(model), torch"}, checkpoint_blocks=checkpoint_blocks)
treat("resolution")

# %% [markdown]
# ## 4. Alive is not reserved: fragmentation
#
# PyTorch asks the driver for *segments* and hands out *blocks* of them. A segment goes back only when all of its blocks
# are free. So three numbers stand for "memory in use": what tensors hold (*allocated*), what PyTorch took (*reserved*),
# and what `nvidia-smi` shows (reserved, and the context). `torch.cuda.memory_summary()` prints the first two; here a
# simulated caching allocator does, for the same requests:

# %%
fragmented = before["fragmentation"]
print(fragmented.replayed().summary())
print("\non a GPU of the budget's size:", fragmented.complaint)

# %% [markdown]
# **Read it.** *Non-releasable* bytes are free and lie in segments in which something else lives. Each step keeps its
# features, 10.6 MiB, put where a large activation had just been freed. The rest of such a segment is too small for the
# next activation, which asks for a new one.

# %%
cures["fragmentation"] = patients["fragmentation"].edited({
    "losses, kept = [], []": "losses, kept = [], []\n    room = iter(torch.empty(STEPS, ROWS, FEATURES, device=device))",
    "kept.append(model(probe))": "kept.append(next(room).copy_(model(probe)))"})
treat("fragmentation")
maps = {name: [Segment(blocks) for blocks in found.replayed().segments()]
        for name, found in {"before": fragmented, "after": after["fragmentation"]}.items()}
show(draw_segments(maps, title="What the allocator has reserved after the last step"),
     alt="Segments as bars. Before: many bars, half of each free, some of them whole. After: few bars.")

# %% [markdown]
# The cure makes room for all features *before* the loop: one long-lived block instead of ten scattered ones.
# `empty_cache()` is none: it gives back only segments that are wholly free, and the replay has done so before it failed.
# On a GPU `PYTORCH_ALLOC_CONF=expandable_segments:True` lets segments grow by pages that can be given back one by one. It
# helps, most where lengths vary from step to step, and it hides the cause.
#
# ### No error at all: the host
#
# "The job is killed (exit code 137), and `nvidia-smi` shows an almost empty GPU." Each worker of a `DataLoader`
# prepares `prefetch_factor` batches ahead, in shared memory of the *host*:
# `waiting bytes = workers x prefetch_factor x bytes of a batch`.

# %%
loaders = {"4 workers, 8 ahead, fp32": (4, 8, "float32"), "4 workers, 8 ahead, bytes": (4, 8, "uint8")}
host = {name: run_loader(*settings) for name, settings in loaders.items()}
for name, found in host.items():
    print(f"{name:<28}{found}   mean of all images {found.mean}")

# %% [markdown]
# **Read it.** Four moments of a run, and the number stays: nothing leaks, it is full at once. (The batch in the loop comes on
# top of the prediction.) The second line sends images as the bytes that they are stored in: a quarter, with the same mean.
# Docker gives a container 64 MB of shared memory unless `--shm-size` says otherwise.
#
# **Question.** 6 workers, `prefetch_factor=8`, 10,000 batches an epoch. How many batches can wait in shared memory?

# %%
waiting_batches = ...
check("10.waiting_batches", waiting_batches)

# %% [markdown]
# ## 5. Instruments, and what each cannot see
#
# **A snapshot** holds each block with its Python stack. On a GPU private functions record it (see On Monday), and you drop
# the file onto [pytorch.org/memory_viz](https://pytorch.org/memory_viz). Here a metered run writes the same format, and
# PyTorch's viewer opens without a network. A picture of it:

# %%
snapshot = write_snapshot(files / "fragmentation.pickle", fragmented.replayed())
for view in ("Active Memory Timeline", "Allocator State History"):
    page = write_snapshot_page(files / f"{view.split()[0].lower()}.html", snapshot, view)
    print(f"{page.relative_to(here.root)}: {page.stat().st_size // 1024} KiB; open it in a browser")
show(here.root / "docs" / "memory_viz.png", alt="PyTorch's memory viewer with the patient's snapshot.")

# %% [markdown]
# *Active Memory Timeline*: time to the right, each band one block; hover for its stack (here category, phase, module). A
# band that never ends is something kept.
#
# **The profiler** knows operations, and with `profile_memory=True` the bytes each of them took and gave back.

# %%
model, optimizer = patients["large_vocabulary"].build()
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    patients["large_vocabulary"].train(model, optimizer)
rows = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_memory_usage)
for row in rows[:4]:
    print(f"{row.key:<34} {row.count:>4} calls   {row.self_cpu_memory_usage / MIB:7.1f} MiB more than it freed")
trace = files / "large_vocabulary.json"
profiler.export_chrome_trace(str(trace))
page = write_trace_page(files / "large_vocabulary_trace.html", trace)
print(f"{page.relative_to(here.root)}: {page.stat().st_size // 1024} KiB; open it in a browser")

# %% [markdown]
# **Read it.** The last three operations take one tensor of the logits' size in each call. `ui.perfetto.dev` reads the
# file, and TensorBoard what `on_trace_ready=torch.profiler.tensorboard_trace_handler("runs")` writes (its plugin is
# deprecated).
#
# **Nsight Systems** records the *driver's* view: `nsys profile --trace=cuda,nvtx --cuda-memory-usage=true python train.py`.
# This timeline is **made up for reading**: two steps, and in the second the card is full.

# %%
show(draw_lanes(general_cures.nsight_lanes(), title="A made trace, not a recorded one: cudaFree in mid-step", evidence=None),
     alt="Three lanes over time: kernels stop while cudaFree and cudaMalloc run, then go on.")

# %% [markdown]
# **Read it.** `cudaMalloc` belongs in the first steps. Later, `cudaFree` and `cudaMalloc` say that the allocator ran
# dry, gave its cache back and asked anew, while the GPU waits. Before the error it looks like a *slow* step.
#
# | instrument | sees | cannot see |
# |---|---|---|
# | `nvidia-smi` | the whole card, every process, the context | what is free in PyTorch's cache; which tensor |
# | `memory_summary()` | allocated, reserved, their peaks | which tensor, which line |
# | snapshot | blocks, stacks, segments, over time | NCCL, the context; stacks of what was there before |
# | `torch.profiler` | operations, their bytes and time | who *holds* a tensor; hours of training |
# | Nsight Systems | driver calls, kernels, copies, all libraries | tensors; categories |
# | the meter | every byte by category, phase, module | lines of code; other processes |
# | `psutil`, `/proc` | the host, workers included | the GPU |
#
# None of them names a Python reference; `gc.get_referrers(tensor)` does.

# %%
if torch.cuda.is_available():
    model, optimizer = patients["fragmentation"].build()
    patients["fragmentation"].train(model.to("cuda"), optimizer)
    print(torch.cuda.memory_summary(abbreviated=True))
else:
    print("No GPU here: memory_summary() and nvidia-smi have nothing to show.")
recorded_table("oom_fragmentation", columns=["cured", "peak_bytes", "reserved_peak_bytes"])

# %% [markdown]
# ## 6. In which order?
#
# *A job runs out of memory: what do you do?* Profile first. And if you do not? Here are the general cures for one card,
# from the cheap to the dear, each a wrapper around any patient (`cures.py`):

# %%
general = {
    "precision": general_cures.under_bf16,
    "accumulation": general_cures.accumulated,
    "checkpointing": general_cures.checkpointed,
    "smaller optimizer": general_cures.smaller_optimizer,
    "offload": general_cures.offloaded,
}
plain = general_cures.flops(patients["kept_graph"])
times = {cure: general_cures.flops(general[cure](patients["kept_graph"])) / plain for cure in ("accumulation", "checkpointing")}
for cure, factor in times.items():
    print(f"kept_graph with {cure}: {factor:.2f} times the operations of the run without (counted)")
assert times["accumulation"] == 1 < times["checkpointing"], "two halves are the whole; a recomputed forward comes on top"

# %% [markdown]
# **Read it.** Accumulation repeats no arithmetic; a checkpointed block runs its forward twice. The order turns
# round where half a batch no longer keeps the card busy, and where each micro-batch gathers its parameters anew
# ([lesson 09](09_sharding.ipynb)).

# %%
def entry(name, found):
    """What a cure saved, + or - of the sick run's bytes, and whether the losses stayed."""
    saved = (before[name].bytes - found.bytes) / before[name].bytes
    mark = "fits" if found.fits else "over"
    same = "" if found.same_losses(before[name]) else ", other losses"
    return f"{mark}: {saved:+.0%}{same}"


def try_out(*cures):
    for cure in cures:
        for name, patient in patients.items():
            table[name][cure] = entry(name, examine(general[cure](patient)))


table = {name: {"its own cure": entry(name, after[name])} for name in patients}
try_out("precision", "accumulation")

# %%
try_out("checkpointing", "smaller optimizer", "offload")
pd.DataFrame(table).T

# %%
fits = {cure: sum(row[cure].startswith("fits") for row in table.values()) for cure in ("its own cure", *general)}
same = {cure: sum(row[cure].startswith("fits") and "other" not in row[cure] for row in table.values()) for cure in fits}
for cure in fits:
    print(f"{cure:<20} brings {fits[cure]} of 7 under their budget, {same[cure]} of them with the same losses")
print(f"your bet on accumulation, in two parts: {my_bet}; counted: {fits['accumulation']}")
healed = [name for name, patient in patients.items() if examine(general_cures.accumulated(patient, 8)).fits]
print(f"accumulation in 8 parts brings under their budget: {', '.join(healed)}")
assert fits["its own cure"] == same["its own cure"] == 7, "each patient has a cure that changes no loss"
assert max(same[cure] for cure in general) < 7, "no general cure should heal the whole ward"

# %% [markdown]
# **Read it.** Percentages are the bytes saved, as a share of the sick run's. Half a batch heals nobody
# here; eight parts heal whom the last line names. It does not shrink a validation, a state, or a batch of one.
# Checkpointing makes `forgotten_reference` worse: its hook runs again in the recomputation, and what it keeps there holds a
# graph that no backward visits. Precision and offload rescue `kept_graph`, and offload `forgotten_reference`, for the few
# steps of these runs: the leak goes on, and the run dies later. So measure first.

# %%
cases = {name: PatientBytes(before[name].bytes, patients[name].limit_bytes, after[name].bytes) for name in patients}
show(draw_ward(cases, title="The ward, before and after", evidence=kinds),
     alt="Two bars for each patient: the first beyond the line of its budget, the second short of it.")
for name in patients:
    score("10", name, peak_bytes=after[name].bytes, evidence=kinds[name == "fragmentation"])
scoreboard("10")

# %% [markdown]
# ## Recap
#
# - The error names the last drop. Ask: alive or reserved, does it grow between steps, which moment is too large?
# - A sum whose graph no backward visits, a hook, a list, an exception keep tensors; `empty_cache()` frees none of those.
# - Precision (02), accumulation and checkpointing (05) shrink activations; a smaller optimizer (06) and more cards (09) states;
#   offload (07) moves either. None heals the whole ward, and some make a patient worse. Diagnose, then choose.
#
# **Test yourself.** A job runs out of memory after two hours: what do you do, in which order? `nvidia-smi` showed 79 of 80 GB
# since the first minute: is it a leak?
#
# <details><summary>Answer</summary>
#
# You cannot know from that: `nvidia-smi` shows what PyTorch reserved, and the cache grows to the largest step and
# stays. Read phase and category, and log what is alive after each optimizer step. If it grows, something is kept; if not,
# the step that died was larger than all before (a long sequence, a validation), or the cache is in pieces: compare
# alive with reserved. Cure that. Only then: precision, accumulation, checkpointing, a smaller optimizer, offload or
# quantization, more cards.
#
# </details>
#
# **Where next.** Do the [lab](../../labs/intermediate/10_oom_clinic.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/intermediate/10_oom_clinic.ipynb).
#
# **References.** PyTorch,
# [Understanding CUDA memory usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html),
# [profiler](https://docs.pytorch.org/docs/stable/profiler.html). NVIDIA,
# [Nsight Systems](https://docs.nvidia.com/nsight-systems/UserGuide/index.html). The viewers are PyTorch's, d3's and
# Chromium's, under their own licences.

# %% [markdown]
# ## On Monday
#
# **Plain PyTorch.** You have `model`, `optimizer`, `loader` and a function of your own that gives the loss, `loss_of`:
#
# ```python
# import torch
#
# torch.cuda.memory._record_memory_history(max_entries=100_000)
# try:
#     for step, batch in enumerate(loader):
#         optimizer.zero_grad()
#         loss_of(model, batch).backward()
#         optimizer.step()
#         alive, most, reserved = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
#         print(f"step {step}: {alive >> 20:,} MiB alive, {most >> 20:,} at the peak, {reserved >> 20:,} reserved")
#         torch.cuda.reset_peak_memory_stats()
# except torch.OutOfMemoryError:
#     torch.cuda.memory._dump_snapshot("oom.pickle")
#     raise
# ```
#
# **transformers.** The same around your `trainer`:
#
# ```python
# import torch
# from transformers import TrainerCallback
#
# class AliveAfterStep(TrainerCallback):
#     def on_step_end(self, args, state, control, **kwargs):
#         alive, most, reserved = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
#         print(f"step {state.global_step}: {alive >> 20:,} MiB alive, {most >> 20:,} at the peak, {reserved >> 20:,} reserved")
#         torch.cuda.reset_peak_memory_stats()
#
# trainer.add_callback(AliveAfterStep())
# torch.cuda.memory._record_memory_history(max_entries=100_000)
# try:
#     trainer.train()
# except torch.OutOfMemoryError:
#     torch.cuda.memory._dump_snapshot("oom.pickle")
#     raise
# ```
#
# **Look at** *alive*: from the second step on it must not grow. A *peak* that jumps in one step is one moment too large. *Reserved*
# far above the peak is fragmentation. Then open `oom.pickle`. With several ranks write one file each; look at the one that
# died first.
