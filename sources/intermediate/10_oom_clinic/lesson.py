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
# **Promise.** Seven runs go over their memory budget, each for its own reason. You read PyTorch's error field by
# field, find each cause from evidence, and cure it with the same losses. Words that are new to you stand in the
# [glossary](../00_glossary.ipynb).
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop | about a minute on two CPU cores |
#
# ## A bet
#
# "Out of memory? Make the batch smaller." Seven patients follow. Each training batch is cut in eight parts, with accumulated
# gradients. In how many of the seven does the peak fall by more than a tenth? Section 6 counts.

# %%
my_bet = 6

# %% tags=["setup"]
here = setup("intermediate/10")

# %% jupyter={"source_hidden": true}
import gc
import re
from collections import Counter

import pandas as pd
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from utils import MIB, Evidence, check, draw_timeline, format_bytes, recorded_table, score, show
from utils.clinic import LOSS_TOLERANCE, examine, examine_over_budget
from utils.lessons.lesson_10 import cures as general_cures
from utils.lessons.lesson_10.death import death_of, named_segments
from utils.lessons.lesson_10.host import batch_bytes, run_loader
from utils.lessons.lesson_10.kernel import FAILS, run_cells
from utils.lessons.lesson_10.listing import script
from utils.lessons.lesson_10.messages import PUBLISHED
from utils.lessons.lesson_10.one_segment import one_segment_bytes
from utils.lessons.lesson_10.pages import write_snapshot_page, write_trace_page
from utils.lessons.lesson_10.seven import LENGTHS, seven
from utils.lessons.lesson_10.snapshot import read_snapshot, write_snapshot
from utils.lessons.lesson_10.steps import by_step, step_ends
from utils.lessons.lesson_10.views import (FullCard, PatientBytes, draw_alive, draw_four_ways, draw_peak, draw_segments,
                                           draw_steps, draw_ward)

# %% [markdown]
# ## 1. Read the error, then count between steps
#
# PyTorch's error names sizes and no tensor. Five people's errors (published), and the lines that read them:

# %%
for message in PUBLISHED:
    print(f"{message.url}\n{message.text.partition(' If reserved')[0]}\n")
SIZE = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
FIELDS = {"asked for": r"allocate ([\d.]+) (\w+)", "card": r"(?:capaci?ty of|device has) ([\d.]+) (\w+)",
          "tensors": r"([\d.]+) (\w+) (?:is|are) allocated", "in pieces": r"([\d.]+) (\w+) (?:is|are) reserved",
          "free": r"([\d.]+) (\w+) is free", "process": r"this process has ([\d.]+) (\w+)"}
PARTS = {"tensors": "", "in pieces": "a", "this process, else": "b1", "other processes": "b2", "free": ""}


def parts_of(text):
    """Bytes of the request, the card and its parts."""
    size = {name: float(n) * SIZE[unit] for name, field in FIELDS.items() for n, unit in re.findall(field, text)[:1]}
    ours = size["tensors"] + size["in pieces"]
    numbered = [float(n) * SIZE[unit] for n, unit in re.findall(r"Process \d+ has ([\d.]+) (\w+)", text)]
    process = size.get("process", max((held for held in numbered if held >= ours), default=ours))
    free = size.get("free", size["card"] - process)
    return size | {"free": free, "this process, else": process - ours, "other processes": size["card"] - free - process}


def verdict(parts, least=0.1):
    """What the parts say; one with a share below `least` of the card is not the cause."""
    found = [letter for name, letter in PARTS.items() if letter and parts[name] > least * parts["card"]]
    if parts["in pieces"] + parts["free"] < parts["asked for"]:  # whole, they would not do either
        found = [letter for letter in found if letter != "a"]
    return ", ".join(found) or "c or d"


# %% [markdown]
# A patient is a script: `build()` makes model and optimizer, `train(model, optimizer)` runs all steps and returns their
# losses. `examine` runs it under the meter, beyond its budget too. What counts is the peak of what is alive; for
# `fragmentation`, the smallest GPU on which a simulated allocator serves every request.

# %%
gc.freeze()  # each examination ends with gc.collect(): what the imports made need not be searched again
patients = seven()
before = {name: examine_over_budget(patient) for name, patient in patients.items()}
errors = {message.source: parts_of(message.text) for message in PUBLISHED}
errors["fragmentation (simulated)"] = parts_of(before["fragmentation"].complaint)
death = death_of(before["fragmentation"])
shared = FullCard({name: errors["chatdoc-com/OCRFlux issue 42"][name] for name in PARTS}, "OCRFlux issue 42", [*PARTS][2:4])
show(draw_four_ways(death.segments, death.asked_bytes, shared, before["kept_graph"], before["long_batch"]),
     alt="Four panels. a: segments half full, none with room for the request. b: a card of which other processes hold a fifth. "
         "c: a staircase, on which each step's peak is marked; from the fifth on the peaks are over the budget. d: low teeth, and "
         "one that towers over the budget.")

# %%
print("fragmentation:", before["fragmentation"].complaint)
shares = {source: {name: f"{parts[name] / parts['card']:.0%}" for name in ("asked for", *PARTS)}
          | {f"verdict at {least:.0%}": verdict(parts, least) for least in (0.05, 0.1, 0.2)} for source, parts in errors.items()}
pd.DataFrame(shares).T

# %% [markdown]
# **Read it.** Shares are of the card. Four questions, in this order:
#
# - **a.** *Would "free" and "in pieces" together have served the request, and are the pieces a tenth of the card or more?* The
#   bytes are there, in pieces too small.
# - **b.** *Does something beside PyTorch hold a tenth?* **b1**: this process: a library, NCCL, the CUDA context. **b2**: other
#   processes; `nvidia-smi` names them. OCRFlux ran in a container, where no process is called "this": the largest is ours.
# - **c.** *If not, tensors fill the card. Do they grow from step to step?* Something is kept. Count what is alive after each step.
# - **d.** *If not, one moment is too large*, such as CADS' single request for 72% of its card.

# %%
def after_steps(found):
    return [found.run.timeline.at(ns).total_bytes for ns in step_ends(found)]


longer = {"large_vocabulary": examine(patients["large_vocabulary"].edited({"STEPS = 2": "STEPS = 3"}))}
triage = {}
for name, found in (before | longer).items():
    print(f"{name}: \"{patients[name].complaint}\"")
    alive = after_steps(found)  # the first step makes the optimizer's state: count from the second
    triage[name] = {"peak in": found.run.peak_phase, "largest": max(found.run.breakdown, key=found.run.breakdown.get),
                    "grows per step (MiB)": (alive[-1] - alive[1]) / (len(alive) - 2) / MIB,
                    "peak alive (MiB)": found.run.peak_bytes / MIB, "budget (MiB)": patients[name].limit_bytes / MIB}
pd.DataFrame.from_dict(triage, orient="index").round(2)

# %% [markdown]
# **Read it.** `kept_graph` and `forgotten_reference` grow: c. `fragmentation` is a *and* c: it keeps 10.62 MiB a step on
# purpose, and dies with 81.21 MiB in pieces. The other four stand still: d.
#
# ## 2. Something is kept
#
# ### kept_graph
#
# The script adds up two numbers for its log.

# %%
script(patients["kept_graph"], "        for tokens in", "    return")

# %% [markdown]
# Neither sum is detached. **Question.** Which of the two keeps megabytes alive? Answer `"total_loss"`, `"total_size"`
# or `"both"` before you look at the next cell.

# %%
which_sum = ...
check("10.which_sum", which_sum)

# %%
half_cures = {"detach total_loss": {"total_loss + loss": "total_loss + loss.detach()"},
              "detach total_size": {"logits.logsumexp": "logits.detach().logsumexp"}}
for name, changes in half_cures.items():
    found = examine(patients["kept_graph"].edited(changes))
    print(f"{name}: {format_bytes(found.bytes)} of {format_bytes(found.patient.limit_bytes)}, {'fits' if found.fits else 'over'}")

# %% [markdown]
# **Read it.** [PyTorch's FAQ](https://docs.pytorch.org/docs/stable/notes/faq.html) warns of `total_loss += loss`. Here
# it costs next to nothing: `backward()` has freed what this graph had saved. No backward visits the other sum, so each
# step's logits wait for one.

# %%
cures = {"kept_graph": patients["kept_graph"].edited(
    {"total_loss + loss": "total_loss + loss.detach()", "logits.logsumexp": "logits.detach().logsumexp"})}
after = {}


def treat(name):
    after[name] = examine(cures[name])
    print(cures[name].diff)
    apart = max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(before[name].losses, after[name].losses, strict=True))
    print(f"{before[name].bytes / MIB:.1f} MiB before, {after[name].bytes / MIB:.1f} after, budget",
          f"{patients[name].limit_bytes / MIB:.0f}; losses apart by {apart:.0e} at most (tolerance {LOSS_TOLERANCE:.0e})")
    assert after[name].fits and not before[name].fits, f"the cure of {name} should bring it under its budget"
    assert after[name].same_losses(before[name]), f"the cure of {name} should leave its losses alone"


treat("kept_graph")

# %% [markdown]
# ### forgotten_reference
#
# This hook keeps the output of every norm. After twelve steps the script returns the losses, and the largest number among the
# last outputs.

# %%
script(patients["forgotten_reference"], "    norms =", "    for _ in")

# %%
cures["forgotten_reference"] = patients["forgotten_reference"].edited({
    "seen.append(result)": "seen.append(result.detach().abs().max())"})
treat("forgotten_reference")

# %% [markdown]
# ### Break it, diagnose it
#
# Cure it as `kept_graph` was cured: keep `result.detach()`. Predict what that saves.

# %%
detached = examine(patients["forgotten_reference"].edited({"seen.append(result)": "seen.append(result.detach())"}))
print(f"{before['forgotten_reference'].bytes / MIB:.1f} MiB before, {detached.bytes / MIB:.1f} with .detach() alone, "
      f"{after['forgotten_reference'].bytes / MIB:.1f} with .detach().abs().max()")
assert detached.bytes == before["forgotten_reference"].bytes, "a detached tensor has the same storage"

# %% [markdown]
# **Diagnose it.** Not a byte. `.detach()` lets go of the graph and keeps the tensor; here the tensors fill the memory. A
# maximum is 4 bytes (512 on a GPU). Read it with `.item()` every hundred steps: each one makes the CPU wait for the GPU.
#
# Two places are the **notebook's own**: `Out[]` keeps what a cell's last line shows, and a failed cell's traceback keeps
# its frames with every local variable. In a real kernel a step makes 64 MiB and fails; then folk cures:

# %%
folk = ["gc.collect()", "sys.last_type = sys.last_value = sys.last_traceback = None",
        "traceback.clear_frames(sys.last_traceback)", "sys.last_traceback.tb_next = None", "raise ValueError('the next error')"]
printed = run_cells([FAILS, *(cell for cure in folk for cell in ("step_that_fails()", cure, "tell()"))])
for cure, state in zip(folk, printed[3::3], strict=True):
    print(f"{state:<6} after {cure}")
assert printed[-1] == "gone", "another error should push the failed step's traceback out of the kernel"

# %% [markdown]
# **Trap.** After an out-of-memory error a smaller batch may fail as well: IPython holds the traceback in several places. A
# cell with `1/0` replaces it everywhere. In a script, retry *outside* of the `except` block: inside, the error holds the
# frame ([FAQ](https://docs.pytorch.org/docs/stable/notes/faq.html#my-out-of-memory-exception-handler-can-t-allocate-memory)).
#
# ## 3. One moment is too large
#
# ### validation
#
# "It dies in `model.eval()`." The mode does not tell autograd to stop, and the held-out batch has 32 rows where a
# step has 4.

# %%
cures["validation"] = patients["validation"].edited({
    "    losses.append(loss_of(model, held_out).item())":
    "    with torch.no_grad():\n        losses.append(loss_of(model, held_out).item())"})
treat("validation")
pair = {"before": before["validation"], "with no_grad": after["validation"]}
show(draw_alive(pair, title="Three steps, then a validation of a larger batch", after_last="validation"),
     alt="Left: three low hills, then a climb far over the budget. Right: the same hills, then next to nothing.")

# %% [markdown]
# ### large_vocabulary
#
# Checkpointing every layer saves next to nothing. This is alive at the peak:

# %%
timeline = before["large_vocabulary"].run.timeline
now = [a for a in timeline.allocations if a.born_ns <= timeline.peak_ns and (a.died_ns is None or a.died_ns > timeline.peak_ns)]
four = sorted(sorted(now, key=lambda a: -a.bytes)[:4], key=lambda a: a.born_ns)
parts = {f"{number}. {a.category}, from {a.born_in}": a.bytes for number, a in enumerate(four, 1)}
parts["all else"] = timeline.peak_bytes - sum(parts.values())
show(draw_peak(parts, patients["large_vocabulary"].limit_bytes, title="The peak of large_vocabulary"),
     alt="One bar in five parts: four of 35.16 MiB each, which alone are over the budget, and all else.")
print("logits of one batch:", format_bytes(8 * 48 * 24_000 * 4), "(predicted)")

# %% [markdown]
# **Read it.** Four tensors of the logits' size: the logits, their log-softmax, and the gradients of both. The cure
# of lesson 05: compute the logits for a few tokens at a time, and again in backward.

# %%
def in_chunks(model, tokens, parts, chunks=8):
    """The mean loss of next tokens, with the logits of one chunk alive at a time."""
    def summed(hidden, wanted):
        return F.cross_entropy(head(hidden), wanted, reduction="sum")

    head, model.head = model.head, None  # without its head the model gives its stream
    try:
        hidden = model.norm(model(tokens[:, :-1])).flatten(0, 1)
    finally:
        model.head = head
    wanted = tokens[:, 1:].flatten()  # no padding here: else divide by the number of real targets
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
# Adam makes its two moments in the very first `optimizer.step()`, and `foreach=True`, PyTorch's own choice on a GPU, holds
# a temporary as large as all parameters besides.

# %%
figure = draw_timeline(before["optimizer_doubles"].run, title="optimizer_doubles: three steps")
figure.axes[0].set_xlabel("time in the metered run (ms)")
figure.axes[0].texts[-1].set_ha("right")  # the peak's words, off the second step
show(figure, alt="Timeline: memory more than doubles in the first optimizer step; each later one shows the same tooth.")
cures["optimizer_doubles"] = patients["optimizer_doubles"].edited({"foreach=True": "fused=True"})
treat("optimizer_doubles")

# %% [markdown]
# **Read it.** The moments (purple) come in the first step and stay: later activations lie on top of them. The temporary (grey)
# is `foreach`'s, in every step; a fused kernel does without.
#
# ### long_batch
#
# "With another seed it dies at another step." Texts of like length share a batch. On the right the longest batch is
# *rehearsed* after the first step, when the optimizer's state is there:

# %%
def rehearse(model, rows=8, length=512):
    """Forward and backward of the longest batch; no optimizer step, so nothing is learned."""
    tokens = torch.zeros(rows, length + 1, dtype=torch.long)
    logits = model(tokens[:, :-1]).flatten(0, 1)
    F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
    model.zero_grad()


late = patients["long_batch"]
early = examine(late.edited({"        optimizer.step()\n": "        optimizer.step()\n        if len(losses) == 1:\n            rehearse(model)\n"},
                            rehearse=rehearse))
assert early.same_losses(before["long_batch"]), "a rehearsal should change no loss"
lengths = [str(length) for length in LENGTHS]
runs = {"as it came": before["long_batch"], "rehearsed after step 1": early}
show(draw_steps({name: by_step(found) for name, found in runs.items()},
                {"as it came": lengths, "rehearsed after step 1": [lengths[0], f"512,\n{lengths[1]}", *lengths[2:]]},
                limit_bytes=late.limit_bytes, title="long_batch: each step's peak follows its texts"),
     alt="Left: low bars, and one at 512 tokens over the budget; the reserved line jumps there. Right: the second bar is as high.")

# %%
cures["long_batch"] = late.edited({"batch.chunk(parts)": "batch.chunk(max(parts, -(-batch.numel() // 1024)))"})
treat("long_batch")

# %% [markdown]
# **Read it.** Nothing leaks: what is reserved follows the longest batch *so far*. Log each batch's shape beside its peak. A
# rehearsal ([tuning guide](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html)) cures nothing here; it tells in the first minute. The cure caps the *tokens* of a micro-batch, here at about 1,024. Each part's loss is a sum over the whole
# batch's number of targets, so parts of any size add up to the same.
#
# ## 4. Alive is not reserved: fragmentation
#
# PyTorch asks the driver for *segments* and hands out *blocks* of them. A segment goes back only when all of its blocks
# are free. So there are what tensors hold (*allocated*), what PyTorch took (*reserved*), and what `nvidia-smi` shows
# (reserved, and the context). A simulated caching allocator serves the patient's requests:

# %%
display(script(patients["fragmentation"], "    for _ in range(STEPS):", "    return"))
fragmented = before["fragmentation"]
print(fragmented.replayed().summary())
print(f"\non a GPU of {format_bytes(fragmented.patient.limit_bytes)} it dies after {death.steps_done} steps, asking for",
      f"{format_bytes(death.asked_bytes)}; the largest of {len(death.holes)} holes has {format_bytes(death.holes[0])}")

# %% [markdown]
# *Non-releasable* bytes are free, in a segment where something else lives. The cure makes room for all features *before*
# the loop.

# %%
cures["fragmentation"] = patients["fragmentation"].edited({
    "losses, kept = [], []": "losses, kept = [], []\n    room = iter(torch.empty(STEPS, ROWS, FEATURES, device=device))",
    "kept.append(model(probe))": "kept.append(next(room).copy_(model(probe)))"})
treat("fragmentation")
cured = after["fragmentation"]
maps = {"before: the moment it dies": death.segments, "after the cure: last step": named_segments(cured, cured.replayed().allocator)}
show(draw_segments(maps, title="Reserved on a GPU of 216 MiB", asked={"before: the moment it dies": death.asked_bytes}),
     alt="Left: segments half full, none with a hole as long as the dashed request. Right: one long block, whole segments free.")

# %% [markdown]
# **Read it.** On the left each step's features took half of a segment in which a large activation had just been freed. No
# hole serves the request, and no segment is wholly free, so `empty_cache()` gives nothing back.
#
# With `PYTORCH_ALLOC_CONF=expandable_segments:True` one segment grows by pages. A model of it (`one_segment.py`), and the
# edit on a real card:

# %%
arms = {"as it came": (fragmented.bytes, fragmented.run), "room made before the loop": (cured.bytes, cured.run),
        "expandable segment": (one_segment_bytes(fragmented.run.timeline), fragmented.run)}
for name, (size, run) in arms.items():
    print(f"{name:<28}{format_bytes(size):>12} (simulated); alive at the peak {format_bytes(run.peak_bytes)}")
recorded_table("oom_fragmentation", columns=["cured", "peak_bytes", "reserved_peak_bytes", "replayed_reserved_peak_bytes"])

# %% [markdown]
# **Read it.** In this model the switch needs no edit (the card was not recorded with it). Set it before CUDA starts.
#
# The edit holds ten rooms where nine features were alive: its peak is higher, and still less is reserved. Given the H200's
# own requests, the replay reserves what the card did.
#
# ### No CUDA error at all: the host
#
# | the log says | what is full |
# |---|---|
# | `DataLoader worker is killed by signal: Bus error` ([5040](https://github.com/pytorch/pytorch/issues/5040)) | `/dev/shm`, by waiting batches; in Docker 64 MB without `--shm-size` |
# | nothing, exit code 137 (by torchrun -9); of a worker: `killed by signal: Killed` | RAM or the container's limit. Often it *grows*: workers copy the pages of a Python list ([13246](https://github.com/pytorch/pytorch/issues/13246)) |
#
# First row: each worker prepares `prefetch_factor` batches ahead, in shared memory. Here a batch has 6 MiB:

# %%
found = run_loader(workers=4, prefetch=8, dtype="float32")
print(f"4 workers, 8 ahead, batches of {format_bytes(batch_bytes('float32'))}: {found}")
print(f"the same images as stored bytes: {format_bytes(4 * 8 * batch_bytes('uint8'))} (predicted)")

# %% [markdown]
# **Question.** 6 workers, `prefetch_factor=8`, 10,000 batches an epoch. How many batches can
# wait in shared memory, beside the one in the loop?

# %%
waiting_batches = ...
check("10.waiting_batches", waiting_batches)

# %% [markdown]
# ## 5. Instruments, and what each cannot see
#
# **A snapshot** holds each block with its Python stack; On Monday records one. Here a metered run writes the format, with
# category and module in place of the stack. Drop it onto [pytorch.org/memory_viz](https://pytorch.org/memory_viz), or ask
# who *made* what is alive:

# %%
def made_by(snapshot, most=3):
    """The places outside of PyTorch that made the blocks still alive, the largest sum first."""
    made = Counter()
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        if block["state"] == "active_allocated" and (frames := block["frames"]):
            place = next((f for f in frames if "/torch/" not in f["filename"]), frames[0])
            made[f"{place['filename']}:{place['line']} {place['name']}"] += block["size"]
    return made.most_common(most)


files = here.root / "build" / "clinic"  # git ignores this folder
for name in ("kept_graph", "fragmentation"):
    page = write_snapshot_page(files / f"{name}.html", path := write_snapshot(files / f"{name}.pickle", before[name].replayed()))
    print(f"{name}, after its last step ({page.relative_to(here.root)} opens in a browser)")
    for where, size in made_by(read_snapshot(path)):
        print(f"   {format_bytes(size):>12}  {where}")
show(here.root / "docs" / "memory_viz.png",
     alt="Allocator State History of PyTorch's viewer: segments of fragmentation, each with one block and a hole beside it.")

# %% [markdown]
# **Read it.** 32 MiB, all made by `head`: the logits that `total_size` keeps. A real snapshot has `file.py:line function` there.
# The picture is the viewer's *Allocator State History*: a row is a segment, white in it a hole.
#
# **The profiler** knows operations, and with `profile_memory=True` the bytes each of them took and gave back.

# %%
model, optimizer = patients["large_vocabulary"].build()
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    patients["large_vocabulary"].train(model, optimizer)
for row in sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_memory_usage)[:4]:
    print(f"{row.key:<34} {row.count:>4} calls   {row.self_cpu_memory_usage / MIB:7.1f} MiB more than it freed")
profiler.export_chrome_trace(str(trace := files / "large_vocabulary.json"))
page = write_trace_page(files / "large_vocabulary_trace.html", trace)
print(f"{page.relative_to(here.root)}: {page.stat().st_size // 1024} KiB; open it in a browser")

# %% [markdown]
# **Read it.** The last three operations take one tensor of the logits' size in each call.
#
# **Nsight Systems** shows the *driver's* calls: `nsys profile --trace=cuda,nvtx --cuda-memory-usage=true python train.py`.
# `cudaFree` in later steps says that the allocator ran dry: a *slow* step before the error, which `num_alloc_retries` counts.
#
# | instrument | sees | cannot see |
# |---|---|---|
# | `nvidia-smi` | the whole card, every process, the context | what is free in PyTorch's cache; which tensor |
# | `memory_summary()` | allocated, reserved, their peaks | which tensor, which line |
# | snapshot | blocks, stacks, segments, over time | NCCL, the context; stacks of what was there before |
# | `torch.profiler` | operations, their bytes and time | hours of training |
# | Nsight Systems | driver calls, kernels, all libraries | tensors |
#
# None names who *holds* a tensor. `gc.get_referrers(tensor)` names a list, a dict or a traceback's frame, and nothing for what autograd saved.

# %% [markdown]
# ## 6. In which order?
#
# Two general cures, without a question: each batch in eight parts (a batch of four rows in four), and each layer computed again in
# backward (`cures.py`). Both compute what the script computes, up to rounding.

# %%
def outcome(name, found):
    """The share of the bytes that a cure saves, whether its budget holds, and whether all losses stay."""
    share = (before[name].bytes - found.bytes) / before[name].bytes
    return share, found.fits, found.same_losses(before[name])


general = {"eight parts": general_cures.accumulated, "checkpointing": general_cures.checkpointed}
tried = {"its own cure": {name: outcome(name, after[name]) for name in patients}}
tried |= {cure: {name: outcome(name, examine(apply(patients[name]))) for name in patients} for cure, apply in general.items()}
table = {cure: {name: f"{share:+.0%}, {'fits' if fits else 'over'}" for name, (share, fits, _) in row.items()} for cure, row in tried.items()}
display(pd.DataFrame(table).rename_axis("saved bytes"))
apart = [f"{name} with {cure}" for cure, row in tried.items() for name, (_, _, same) in row.items() if not same]
print(f"losses over {LOSS_TOLERANCE:.0e} apart:", ", ".join(apart) or "none")
counts = {least: {cure: sum(share > least for share, _, _ in row.values()) for cure, row in tried.items()} for least in (0.05, 0.1, 0.2)}
for least, count in counts.items():
    print(f"saved more than {least:.0%}:", ", ".join(f"{cure} {number} of 7" for cure, number in count.items()))
print("fit:", ", ".join(f"{cure} {sum(fits for _, fits, _ in row.values())} of 7" for cure, row in tried.items()))
print(f"your bet: {my_bet}; counted: {counts[0.1]['eight parts']}")
assert counts[0.1]["its own cure"] == 7 > counts[0.1]["eight parts"], "no general cure should help all seven"

# %%
bars = {name: PatientBytes(before[name].bytes, patients[name].limit_bytes, after[name].bytes) for name in patients}
show(draw_ward(bars, title="Seven patients and their own cures", evidence=[Evidence.MEASURED, Evidence.SIMULATED]),
     alt="Two bars a patient: the first beyond the line of its budget, the second, after its own cure, short of it.")
for name in patients:
    score("10", name, peak_bytes=after[name].bytes, evidence=Evidence.SIMULATED if patients[name].fragments else Evidence.MEASURED)

# %% [markdown]
# **Read it.** A smaller batch shrinks the logits and the long batch, which it helps even more than its own cure does. Two leaks
# it postpones: more steps fill the budget again. A validation's own batch, an optimizer's state and kept features it
# leaves alone. A minus is a patient made worse. In
# recomputation the hook of `forgotten_reference` runs again, and keeps a graph that no backward visits; in `fragmentation` what
# is recomputed stands beside what is kept anyway.

# %% [markdown]
# ## Recap
#
# - Ask in this order: a. in pieces? b. outside of PyTorch? c. growing between steps? d. which moment is too large?
# - Then the general cures: precision (02), accumulation and checkpointing (05) shrink activations; a smaller optimizer (06)
#   and more cards (09) states; offload (07) either.
#
# **Test yourself.** A job runs out of memory after two hours: what do you do, in which order? `nvidia-smi` showed 79 of 80 GB
# since the first minute: is it a leak?
#
# <details><summary>Answer</summary>
#
# `nvidia-smi` shows what PyTorch reserved, and the cache stays at the largest step: it cannot tell. Read the error's sizes:
# a and b. Then the log of bytes alive: a climb is c. Else the step that died was larger than all before, a long batch or a
# validation: d. Cure that, and only then take the general cures.
#
# </details>
#
# **Where next.** Do the [lab](../../labs/intermediate/10_oom_clinic.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/intermediate/10_oom_clinic.ipynb).
#
# **References.** PyTorch, [Understanding CUDA memory usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html). NVIDIA,
# [Nsight Systems](https://docs.nvidia.com/nsight-systems/UserGuide/index.html). The viewers are PyTorch's, d3's and
# Chromium's, under their own licences.

# %% [markdown]
# ## On Monday
#
# **Once, in either case:**
#
# ```python
# import os
# import torch
#
# def save(device, asked_bytes, device_bytes, free_bytes):  # at the request that fails: the cache is given back by then, no tensor yet
#     torch.cuda.memory._dump_snapshot(f"oom_rank{os.environ.get('RANK', 0)}.pickle")
#
# def log(when):
#     alive, most, stats = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()
#     idle, pieces = torch.cuda.memory_reserved() - alive, stats["inactive_split_bytes.all.current"]
#     print(f"{when}: {alive >> 20:,} MiB alive, {most >> 20:,} at the peak, {idle >> 20:,} reserved and idle, "
#           f"{pieces >> 20:,} of it in pieces, {stats['num_alloc_retries']} retries")
#     torch.cuda.reset_peak_memory_stats()
#
# torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
# torch._C._cuda_attach_out_of_memory_observer(save)
# ```
#
# **Plain PyTorch.** You have `model`, `optimizer`, `loader` and `loss_of(model, batch)`:
#
# ```python
# for step, batch in enumerate(loader):
#     loss_of(model, batch).backward()
#     optimizer.step()
#     optimizer.zero_grad()
#     log(f"step {step}, batch {tuple(batch.shape)}")
#     if step == 3:  # beside the states only the batch and what is kept are alive
#         torch.cuda.memory._dump_snapshot("kept.pickle")
# torch.cuda.memory._record_memory_history(enabled=None)  # stop: each allocation costs a stack trace
# ```
#
# **transformers.** Around your `trainer`:
#
# ```python
# import math
# from transformers import TrainerCallback
#
# class LogMemory(TrainerCallback):
#     def on_step_end(self, args, state, control, **kwargs):
#         log(f"step {state.global_step}, batches {shapes}")
#         shapes.clear()
#         if state.global_step == 3:
#             torch.cuda.memory._dump_snapshot("kept.pickle")
#
#     def on_evaluate(self, args, state, control, **kwargs):  # a validation's peak has a line of its own
#         log(f"validation after step {state.global_step}, largest batch {max(shapes, key=math.prod)}")
#         shapes.clear()
#
# shapes = []
# trainer.model.register_forward_pre_hook(
#     lambda model, given, named: shapes.append(tuple(next(iter(named.values())).shape)), with_kwargs=True)
# trainer.add_callback(LogMemory())
# trainer.train()
# torch.cuda.memory._record_memory_history(enabled=None)
# ```
#
# **Who made what is alive**, with `made_by` of section 5:
#
# ```python
# import pickle
# from collections import Counter  # for made_by
#
# with open("kept.pickle", "rb") as file:
#     print(*made_by(pickle.load(file), most=10), sep="\n")
# ```
#
# | what you see | cure |
# |---|---|
# | a. *in pieces* is large, *retries* rise | `PYTORCH_ALLOC_CONF=expandable_segments:True` (in older PyTorch `PYTORCH_CUDA_ALLOC_CONF`) |
# | b1. this process, else | the library's own limit; fewer process groups (NCCL) |
# | b2. other processes | end them; `torch.cuda.set_device(local_rank)` |
# | c. *alive* trends upwards | `made_by` names the maker; search what keeps it |
# | d. the peak's batch is the longest | cap its tokens; `train_sampling_strategy="group_by_length"` (transformers 4: `group_by_length=True`) shows the longest first |
# | d. logits | `use_liger_kernel=True`, `LigerFusedLinearCrossEntropyLoss` |
# | d. optimizer step | a fused optimizer (Trainer's AdamW is, from PyTorch 2.8 on) |
# | d. evaluation | `preprocess_logits_for_metrics`: for `compute_metrics` Trainer gathers all logits |
# | d. activations | `gradient_checkpointing=True` |
#
# With several ranks one dies first, and torchrun ends the others: read that one's snapshot. Each cure for your own model, with
# what it saves on your card: [this page](../00a_your_model.ipynb).
