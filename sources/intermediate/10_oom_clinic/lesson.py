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
# **Promise.** Seven runs go over their memory budget, each for a reason of its own. You read PyTorch's error field by
# field, find each cause from evidence, and cure it in a few lines with the same losses. Words that are new to you
# stand in the [glossary](../00_glossary.ipynb).
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop | about a minute on two CPU cores |
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
import re
from collections import Counter

import pandas as pd
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from utils import MIB, Evidence, check, draw_over_time, draw_timeline, format_bytes, recorded_table, score, show
from utils.clinic import LOSS_TOLERANCE, PATIENTS, admit, examine, examine_over_budget
from utils.lessons.lesson_10 import cures as general_cures
from utils.lessons.lesson_10.death import death_of, named_segments
from utils.lessons.lesson_10.host import run_loader
from utils.lessons.lesson_10.kernel import FAILS, run_cells
from utils.lessons.lesson_10.listing import script
from utils.lessons.lesson_10.messages import PUBLISHED
from utils.lessons.lesson_10.pages import write_snapshot_page, write_trace_page
from utils.lessons.lesson_10.snapshot import read_snapshot, write_snapshot
from utils.lessons.lesson_10.views import PatientBytes, draw_blocks, draw_segments, draw_ward
from utils.simulation.cuda_allocator import requests
from utils.techniques import checkpoint_blocks

files = here.root / "build" / "clinic"  # git ignores this folder

# %% [markdown]
# ## 1. Read the error, then count between steps
#
# A patient is a script: `build()` makes model and optimizer, `train(model, optimizer)` runs all steps and returns their
# losses. `examine` runs it under the meter and lets it go beyond its budget. What counts is the peak of what is alive; for
# `fragmentation`, the smallest GPU that would do.

# %%
patients = {name: admit(name) for name in PATIENTS}
before = {name: examine_over_budget(patient) for name, patient in patients.items()}
kinds = [Evidence.MEASURED, Evidence.SIMULATED]
labels = {name: f"{name}, reserved (simulated)" if patients[name].fragments else name for name in patients}
rows = {labels[name]: PatientBytes(found.bytes, patients[name].limit_bytes) for name, found in before.items()}
show(draw_ward(rows, title="Seven patients, each over its budget", evidence=kinds),
     alt="Bars of seven training runs: every one of them reaches beyond the line of its budget.")
for name, found in before.items():
    print(f"{name}: \"{patients[name].complaint}\"\n   {found.complaint.partition(' Try')[0]}\n")

# %% [markdown]
# The meter's error names a *phase* and a *category*: where the last drop fell, not who filled the bucket. A GPU's error
# has sizes alone. Here is PyTorch's for four people (published), and the lines that read it:

# %%
print(PUBLISHED[-1].text, "\n")
SIZE = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
FIELDS = {"asked for": r"allocate ([\d.]+) (\w+)", "card": r"(?:capaci?ty of|device has) ([\d.]+) (\w+)",
          "tensors": r"([\d.]+) (\w+) (?:is|are) allocated", "pieces": r"([\d.]+) (\w+) (?:is|are) reserved",
          "free": r"([\d.]+) (\w+) is free"}


def read_oom(text, least=0.1):
    """Shares of the card, and what they say; a share below `least` is not the cause."""
    size = {name: float(n) * SIZE[unit] for name, field in FIELDS.items() for n, unit in re.findall(field, text)[:1]}
    rest = size["card"] - size["tensors"] - size["pieces"]
    share = {name: size[name] / size["card"] for name in ("asked for", "tensors", "pieces")}
    share["outside"] = (rest - size.get("free", rest)) / size["card"]
    found = ["a: in pieces"] if size["pieces"] > size["asked for"] and share["pieces"] > least else []
    found += ["b: outside of PyTorch"] if share["outside"] > least else []
    return {name: f"{part:.0%}" for name, part in share.items()} | {"verdict": ", ".join(found) or "c or d: tensors"}


errors = {m.source: m.text for m in PUBLISHED} | {"fragmentation (simulated)": before["fragmentation"].complaint}
pd.DataFrame({source: read_oom(text) for source, text in errors.items()}).T

# %% [markdown]
# **Read it.** Shares are of the card. Four questions:
#
# - **a.** *Is more "reserved but unallocated" than was asked for?* The bytes are there, in pieces too small. (At
#   1% of the card, as QAnything's, curing them buys one request.)
# - **b.** *Is much neither free nor PyTorch's?* Another process, NCCL, a library: see `nvidia-smi`.
# - **c.** *Else tensors fill it. Do they grow from step to step?* Something is kept. Count what is alive after each step.
# - **d.** *Else one moment is too large*, such as CADS' single request for 72% of its card.

# %%
def after_steps(found):
    ends = [span.end_ns for span in found.run.timeline.spans if span.name == "optimizer step"]
    return [found.run.timeline.at(ns).total_bytes for ns in ends]


longer = {name: examine(patients[name].edited({"STEPS = 2": "STEPS = 3"})) for name in ("large_vocabulary", "resolution")}
triage = {}
for name, found in (before | longer).items():
    alive = after_steps(found)  # the first step makes the optimizer's state: count from the second
    triage[name] = {"peak in": found.run.peak_phase, "largest": max(found.run.breakdown, key=found.run.breakdown.get),
                    "grows per step (MiB)": (alive[-1] - alive[1]) / (len(alive) - 2) / MIB,
                    "peak alive (MiB)": found.run.peak_bytes / MIB, "budget (MiB)": patients[name].limit_bytes / MIB}
display(pd.DataFrame(triage).T.style.format(precision=2))
pair = {"kept_graph (c)": before["kept_graph"].run, "large_vocabulary (d)": longer["large_vocabulary"].run}
show(draw_over_time(pair, "logits and loss", title="c is a staircase, d the same tall tooth in every step"),
     alt="Left, eight steps, each 4 MiB above the last one. Right, three equal teeth that return to the ground.")

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
script("kept_graph", "        for tokens in", "    return")

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
# step's logits wait for one. Beware of a metric, a validation loss, a penalty that is logged and not trained.

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
# This hook keeps the output of every norm. The last ones' maximum is returned after the twelve losses.

# %%
script("forgotten_reference", "    norms =", "    for _ in")

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
# maximum is 4 bytes. Read it with `.item()` every hundred steps: each one makes a GPU wait.
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
# "It dies in `model.eval()`." The mode changes dropout and batch norm. It does not tell autograd to stop.

# %%
cures["validation"] = patients["validation"].edited({
    "    losses.append(loss_of(model, held_out).item())":
    "    with torch.no_grad():\n        losses.append(loss_of(model, held_out).item())"})
treat("validation")
pair = {"before": before["validation"].run, "with no_grad": after["validation"].run}
show(draw_over_time(pair, "activations", title="Three steps, then a validation"),
     alt="Left: three low hills, then a climb eight times as high. Right: the same hills, then next to nothing.")

# %% [markdown]
# ### large_vocabulary
#
# "I checkpointed every block." Here that saves next to nothing. These are the blocks alive at the peak:

# %%
timeline = before["large_vocabulary"].run.timeline
now = [a for a in timeline.allocations if a.born_ns <= timeline.peak_ns and (a.died_ns is None or a.died_ns > timeline.peak_ns)]
four = sorted(sorted(now, key=lambda a: -a.bytes)[:4], key=lambda a: a.born_ns)
names = ("logits", "their log-softmax", "gradient of the log-softmax", "gradient of the logits")
blocks = {f"{name}\n(born in {a.born_in})": a.bytes for name, a in zip(names, four, strict=True)}
blocks["all else"] = timeline.peak_bytes - sum(blocks.values())
show(draw_blocks(blocks, title="The peak of large_vocabulary"), alt="Five bars: four of 35.16 MiB each, and all else, shorter.")
print("logits of one batch:", format_bytes(8 * 48 * 24_000 * 4), "(predicted)")

# %% [markdown]
# **Read it.** Four tensors of the logits' size, and no block of the model owns them. The cure of lesson 05: compute the
# logits for a few tokens at a time, and again in backward.

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
# "Forward and backward pass. The very first `optimizer.step()` kills it." Adam makes its two moments in that call, and
# `foreach=True`, PyTorch's own choice on a GPU, holds a temporary as large as all parameters besides.

# %%
figure = draw_timeline(before["optimizer_doubles"].run, title="optimizer_doubles: three steps")
figure.axes[0].set_xlabel("time in the metered run (ms)")
show(figure, alt="Timeline: memory more than doubles in the first optimizer step; each later one shows the same tooth.")
cures["optimizer_doubles"] = patients["optimizer_doubles"].edited({"foreach=True": "fused=True"})
treat("optimizer_doubles")

# %% [markdown]
# **Read it.** The moments (purple) come in the first step and stay: from the second on, activations lie on top, and a
# later step may peak higher. The temporary (grey) is `foreach`'s, in every step; a fused kernel does without.
#
# ### resolution
#
# A U-Net that was trained at 128 x 128 gets 256 x 256, in a batch of one. Activations grow with the pixels.

# %%
resolution = patients["resolution"]
activations = [found.run.breakdown["activations"] for found in (before["resolution"], examine(resolution.edited({"SIDE = 256": "SIDE = 128"})))]
print(f"twice the side, four times the pixels, {activations[0] / activations[1]:.2f} times the activations at the peak (measured)")
change = {"return model, torch": "return checkpoint_blocks(model), torch"}
cures["resolution"] = resolution.edited(change, checkpoint_blocks=checkpoint_blocks)
treat("resolution")

# %% [markdown]
# ## 4. Alive is not reserved: fragmentation
#
# PyTorch asks the driver for *segments* and hands out *blocks* of them. A segment goes back only when all of its blocks
# are free. So there are what tensors hold (*allocated*), what PyTorch took (*reserved*), and what `nvidia-smi` shows
# (reserved, and the context). A simulated caching allocator serves the patient's requests:

# %%
display(script("fragmentation", "    for _ in range(STEPS):", "    return"))
fragmented = before["fragmentation"]
print(fragmented.replayed().summary())
death = death_of(fragmented)
print(f"\non a GPU of {format_bytes(fragmented.patient.limit_bytes)} it dies after {death.steps_done} steps, asking for",
      f"{format_bytes(death.asked_bytes)}; the largest of {len(death.holes)} holes has {format_bytes(death.holes[0])}")

# %% [markdown]
# *Non-releasable* bytes are free, in a segment where something else lives. The cure makes room for all features *before*
# the loop. (The meter counts features as *logits and loss*, what a forward returns, and the room as *inputs*.)

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
# With `PYTORCH_ALLOC_CONF=expandable_segments:True` one segment grows by pages, and holes side by side join:

# %%
def one_segment(timeline, page_bytes=20 * MIB):
    """Bytes that one growing segment takes for a run's requests, each served by the smallest hole that holds it."""
    existing, events = requests(timeline)
    holes, taken, end_bytes = [(0, 2**60)], {}, 0
    for name, size in [*existing, *((name, size) for _, name, size in events)]:
        if size > 0:
            size = -(-size // 512) * 512
            start, room = min((hole for hole in holes if hole[1] >= size), key=lambda hole: hole[1])
            holes.remove((start, room))
            holes += [(start + size, room - size)] if room > size else []
            taken[name], end_bytes = (start, size), max(end_bytes, start + size)
        else:
            start, size = taken.pop(name)
            for hole in [h for h in holes if sum(h) == start or h[0] == start + size]:
                holes.remove(hole)
                start, size = min(start, hole[0]), size + hole[1]
            holes.append((start, size))
    return -(-end_bytes // page_bytes) * page_bytes


arms = {"as it came": (fragmented.bytes, fragmented.run), "room made before the loop": (cured.bytes, cured.run),
        "expandable segment": (one_segment(fragmented.run.timeline), fragmented.run)}
for name, (size, run) in arms.items():
    print(f"{name:<28}{format_bytes(size):>12} (simulated); alive at the peak {format_bytes(run.peak_bytes)}")
recorded_table("oom_fragmentation", columns=["cured", "peak_bytes", "reserved_peak_bytes", "replayed_reserved_peak_bytes"])

# %% [markdown]
# **Read it.** The switch brings as much as the edit. Set it before CUDA starts (its older name:
# `PYTORCH_CUDA_ALLOC_CONF`).
#
# Given the H200's own requests, the replay reserves what the card did. Those are larger (cuBLAS keeps a
# workspace, among others), so this budget says nothing of that card. The slack there falls from 118 to 48 MiB with the cure.
#
# ### No CUDA error at all: the host
#
# | the log says | what is full |
# |---|---|
# | `DataLoader worker is killed by signal: Bus error` ([5040](https://github.com/pytorch/pytorch/issues/5040)) | `/dev/shm`, by waiting batches; in Docker 64 MB without `--shm-size` |
# | nothing, exit code 137 (SIGKILL) | RAM or the container's limit. Often it *grows*: workers copy the pages of a Python list ([13246](https://github.com/pytorch/pytorch/issues/13246)) |
#
# First row: each worker prepares `prefetch_factor` batches ahead, in shared memory.

# %%
loaders = {"4 workers, 8 ahead, fp32": (4, 8, "float32"), "4 workers, 8 ahead, bytes": (4, 8, "uint8")}
for name, settings in loaders.items():
    found = run_loader(*settings)
    print(f"{name:<28}{found}   mean of all images {found.mean}")

# %% [markdown]
# **Read it.** `workers x prefetch_factor x bytes of a batch`, and the batch in the loop. It stays: full at once, no leak. Images
# as stored bytes take a quarter.
#
# **Question.** 6 workers, `prefetch_factor=8`, 10,000 batches an epoch. How many batches can wait in shared memory?

# %%
waiting_batches = ...
check("10.waiting_batches", waiting_batches)

# %% [markdown]
# ## 5. Instruments, and what each cannot see
#
# **A snapshot** holds each block with its Python stack; On Monday records one. Here a metered run writes the format, with
# category and module in place of the stack. Drop it onto [pytorch.org/memory_viz](https://pytorch.org/memory_viz), or ask
# who holds what is alive:

# %%
def holders(snapshot, most=3):
    """The places in your code that made the blocks still alive, the largest sum first."""
    held = Counter()
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        if block["state"] == "active_allocated" and (frames := block["frames"]):
            own = next((f for f in frames if "site-packages" not in f["filename"]), frames[0])
            held[f"{own['filename']}:{own['line']} {own['name']}"] += block["size"]
    return held.most_common(most)


for name in ("kept_graph", "fragmentation"):
    page = write_snapshot_page(files / f"{name}.html", path := write_snapshot(files / f"{name}.pickle", before[name].replayed()))
    print(f"{name}, after its last step ({page.relative_to(here.root)} opens in a browser)")
    for where, size in holders(read_snapshot(path)):
        print(f"   {format_bytes(size):>12}  {where}")
show(here.root / "docs" / "memory_viz.png", alt="PyTorch's memory viewer with the snapshot of fragmentation: a staircase of yellow bands.")

# %% [markdown]
# **Read it.** 32 MiB, all made by `head`: the logits that `total_size` keeps. In the viewer (here `fragmentation`) a band is
# a block. One that never ends is kept: the yellow stairs are the features (*parameters*, a hairline, has the same yellow).
# Click a band for its stack.
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
# **Read it.** The last three operations take one tensor of the logits' size in each call. On a GPU sort by
# `self_device_memory_usage`. `ui.perfetto.dev` opens the file; TensorBoard's plugin is deprecated.
#
# **Nsight Systems** shows the *driver's* calls: `nsys profile --trace=cuda,nvtx --cuda-memory-usage=true python train.py`.
# `cudaMalloc` belongs in the first steps. `cudaFree` in later ones, the kernels idle around it, says that the allocator ran
# dry (or somebody called `empty_cache()`): a *slow* step before the error. `num_alloc_retries` counts those.
#
# | instrument | sees | cannot see |
# |---|---|---|
# | `nvidia-smi` | the whole card, every process, the context | what is free in PyTorch's cache; which tensor |
# | `memory_summary()` | allocated, reserved, their peaks | which tensor, which line |
# | snapshot | blocks, stacks, segments, over time | NCCL, the context; stacks of what was there before |
# | `torch.profiler` | operations, their bytes and time | who *holds* a tensor; hours of training |
# | Nsight Systems | driver calls, kernels, copies, all libraries | tensors; categories |
#
# None names who holds a tensor. `gc.get_referrers(tensor)` names a list, a dict or a traceback's frame, and nothing for what autograd saved.

# %% [markdown]
# ## 6. In which order?
#
# And if you skip the questions? General cures for one card, as wrappers around any patient (`cures.py`): bf16
# autocast; half a batch at a time; each block again in backward; Adafactor; saved tensors on the host until backward.

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
# **Read it.** Accumulation costs time where half a batch leaves the card idle. Checkpointing looks cheap because this head is
# not recomputed: a large model's blocks pay forward 1, backward 2, forward 1, so 4/3 = 1.33 (predicted). Offload pays in
# PCIe time ([lesson 07](07_offload.ipynb)).

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
            tried[cure, name] = examine(general[cure](patient))  # what lies on the host is not counted, as on a GPU
            table[name][cure] = entry(name, tried[cure, name])


tried, table = {}, {name: {"its own cure": entry(name, after[name])} for name in patients}
try_out("precision", "accumulation")

# %%
try_out("checkpointing", "smaller optimizer", "offload")
display(pd.DataFrame(table).T)
fits = {cure: sum(row[cure].startswith("fits") for row in table.values()) for cure in ("its own cure", *general)}
same = {cure: sum(row[cure].startswith("fits") and "other" not in row[cure] for row in table.values()) for cure in fits}
for cure in fits:
    print(f"{cure:<20} brings {fits[cure]} of 7 under their budget, {same[cure]} of them with the same losses")
print(f"your bet on accumulation, in two parts: {my_bet}; counted: {fits['accumulation']}")
assert fits["its own cure"] == same["its own cure"] == 7, "each patient has a cure that changes no loss"
assert max(same[cure] for cure in general) < 7, "no general cure should heal the whole ward"

# %% [markdown]
# **Read it.** Percentages are saved bytes. A minus is a patient made worse: autocast adds bf16 copies of the weights,
# recomputation asks in another order, and the hook of `forgotten_reference` runs again there and keeps a graph that no
# backward visits. Precision and offload only *postpone* the leaks.
#
# Does the count hang on the budgets? A quarter lower and higher, and eight parts:

# %%
eighths = {name: examine(general_cures.accumulated(patient, 8)).bytes for name, patient in patients.items()}
bytes_in = {1: {n: before[n].bytes for n in patients}, 2: {n: tried["accumulation", n].bytes for n in patients}, 8: eighths}
display(pd.DataFrame({f"in {parts} (MiB)": sizes for parts, sizes in bytes_in.items()}).div(MIB).round(1))
for factor in (0.75, 1, 1.25):
    limit = {name: factor * patient.limit_bytes for name, patient in patients.items()}
    ill = [name for name in patients if bytes_in[1][name] > limit[name]]
    counts = [sum(bytes_in[parts][name] <= limit[name] for name in ill) for parts in (2, 8)]
    print(f"budgets x {factor:<4}: {len(ill)} sick, two parts bring {counts[0]} of them under it, eight parts {counts[1]}")
for name in patients:
    score("10", name, peak_bytes=after[name].bytes, evidence=kinds[name == "fragmentation"])

# %% [markdown]
# **Read it.** The counts move with the budgets, the rows do not: a smaller batch shrinks `large_vocabulary` and postpones two
# leaks. A validation, an optimizer's state, a batch of one and kept features it cannot shrink, in any number of parts.

# %% [markdown]
# ## Recap
#
# - Ask in this order: a. in pieces? b. outside of PyTorch? c. growing between steps? d. which moment is too large?
# - Precision (02), accumulation and checkpointing (05) shrink activations; a smaller optimizer (06) and more cards (09) states;
#   offload (07) either.
#
# **Test yourself.** A job runs out of memory after two hours: what do you do, in which order? `nvidia-smi` showed 79 of 80 GB
# since the first minute: is it a leak?
#
# <details><summary>Answer</summary>
#
# `nvidia-smi` shows what PyTorch reserved, and the cache stays at the largest step: it cannot tell. Read the error's sizes:
# a and b. Then the log of bytes alive: a climb is c. Else the step that died was larger than all before, a long sequence or a
# validation: d. Cure that. Only then precision, accumulation, checkpointing, a smaller optimizer, offload, more cards.
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
# **Plain PyTorch.** You have `model`, `optimizer`, `loader` and `loss_of(model, batch)`:
#
# ```python
# import os
# import torch
#
# def save(device, asked_bytes, device_bytes, free_bytes):  # at the request that fails: the cache is given back by then, no tensor yet
#     torch.cuda.memory._dump_snapshot(f"oom_rank{os.environ.get('RANK', 0)}.pickle")
#
# torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
# torch._C._cuda_attach_out_of_memory_observer(save)
# for step, batch in enumerate(loader):
#     optimizer.zero_grad()
#     loss_of(model, batch).backward()
#     optimizer.step()
#     alive, most, stats = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()
#     print(f"step {step}: {alive >> 20:,} MiB alive, {most >> 20:,} at the peak, "
#           f"{stats['inactive_split_bytes.all.current'] >> 20:,} in pieces, {stats['num_alloc_retries']} retries")
#     torch.cuda.reset_peak_memory_stats()
# torch.cuda.memory._record_memory_history(enabled=None)  # stop: each allocation costs a stack trace
# ```
#
# **transformers.** Around your `trainer`:
#
# ```python
# import os
# import torch
# from transformers import TrainerCallback
#
# class AliveAfterStep(TrainerCallback):
#     def on_step_end(self, args, state, control, **kwargs):
#         alive, most, stats = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()
#         print(f"step {state.global_step}: {alive >> 20:,} MiB alive, {most >> 20:,} at the peak, "
#               f"{stats['inactive_split_bytes.all.current'] >> 20:,} in pieces, {stats['num_alloc_retries']} retries")
#         torch.cuda.reset_peak_memory_stats()
#
#     on_evaluate = on_step_end  # a validation's peak has a line of its own
#
# def save(device, asked_bytes, device_bytes, free_bytes):
#     torch.cuda.memory._dump_snapshot(f"oom_rank{os.environ.get('RANK', 0)}.pickle")
#
# trainer.add_callback(AliveAfterStep())
# torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
# torch._C._cuda_attach_out_of_memory_observer(save)
# trainer.train()
# ```
#
# | what you see | cure |
# |---|---|
# | a. *in pieces*, *retries* rise | `PYTORCH_ALLOC_CONF=expandable_segments:True` |
# | b. outside | end the other process; `torch.cuda.set_device(local_rank)` |
# | c. *alive* trends upwards | `holders` of the snapshot names the line |
# | d. logits | `use_liger_kernel=True`, `LigerFusedLinearCrossEntropyLoss` |
# | d. optimizer step | a fused optimizer (Trainer's AdamW is, from PyTorch 2.8 on) |
# | d. evaluation | `preprocess_logits_for_metrics`: for `compute_metrics` Trainer gathers all logits |
# | d. activations | `gradient_checkpointing=True` |
#
# With several ranks read the snapshot of the one that died.
#
# *Does your own model fit, and what would make it fit? [Ask here](../00a_your_model.ipynb).*
