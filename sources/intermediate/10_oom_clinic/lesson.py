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
# **Promise.** Seven training runs go over their memory budget, each for a reason of its own, and an eighth fills the
# host. You find each cause from evidence, cure it in a few lines with the same losses, and learn which instrument
# sees what. At the end one table holds what every cure saves on every patient.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (section 6 measures on Linux) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# "Out of memory? Make the batch smaller." Seven patients follow. Each batch is cut in two parts, with accumulated
# gradients. How many of the seven then stay within their budget? Write your guess; section 8 counts.

# %%
my_bet = 5

# %% tags=["setup"]
here = setup("intermediate/10")

# %%
import gc
import sys
import weakref
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from IPython.display import Code
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from utils import MIB, Evidence, Span, check, draw_breakdown, draw_lanes, draw_over_time
from utils import draw_timeline, format_bytes, recorded_table, score, scoreboard, show
from utils import UNet, simulate
from utils.clinic import PATIENTS, admit, examine, sick
from utils.lessons.lesson_10.host import run_loader
from utils.lessons.lesson_10.pages import write_snapshot_page, write_trace_page
from utils.lessons.lesson_10.snapshot import SnapshotError, write_snapshot
from utils.lessons.lesson_10.views import PatientBytes, Segment, draw_segments, draw_ward
from utils.techniques import checkpoint_blocks

files = here.root / "build" / "clinic"  # git ignores this folder

# %% [markdown]
# ## What you will be able to do
#
# - Sort a run that dies of **memory** into one of three kinds, by two questions.
# - Find what holds the bytes, cure it, and prove that no loss has changed.
# - Choose the instrument that can see the fault, and open a snapshot and a trace without a network.
#
# New words stand in the [glossary](../00_glossary.ipynb).
#
# ## 1. The ward
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

# %%
for name, found in before.items():
    print(f"{name}: \"{patients[name].complaint}\"\n   {found.complaint}\n")

# %% [markdown]
# ## 2. Read the error, then count between steps
#
# The meter's error names a *phase* and a *category*: that is where the last drop fell. It does not say who filled the
# bucket, and a GPU's own error, as `fragmentation` shows it, names neither. One more number tells: the bytes alive
# right after each optimizer step. By then the activations of the step should be gone.

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
#    (`fragmentation` grows too; what it keeps, it keeps on purpose.)
# 3. *Else* one moment is too large, and phase and category point at it: the other four.
#
# ## 3. Something is kept
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
# it costs next to nothing: `backward()` has freed the tensors that this graph had saved, and only its empty nodes stay.
# The other sum never sees a backward, so each step's logits wait for one. A sum is dangerous if its graph was *not* run
# backward: a metric, a validation loss, a penalty that is logged and not trained.
#
# The cure is `.detach()` or `.item()`. Detach both, and compare the losses.

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
# A list in a hook, a closure, an attribute: anything that can be reached stays. Two such places are the **notebook's
# own**: `Out[]` keeps what a cell's last line shows, and `sys.last_traceback` keeps the frames of the last error, with
# every local variable in them. Here a function makes a tensor of 64 MiB, and fails:

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
# still there ([PyTorch issue 27600](https://github.com/pytorch/pytorch/issues/27600): "the exception holds on to the
# frame"). `empty_cache()` cannot help, nor can `gc.collect()`. Drop the traceback, or restart the kernel.
#
# ## 4. One moment is too large
#
# ### validation
#
# "It dies in `model.eval()`." The mode changes dropout and batch norm. It does not tell autograd to stop.

# %%
show(draw_timeline(before["validation"].run, title="Small steps, and a validation that keeps everything"),
     alt="Timeline: low hills of training, then a forward that climbs five times as high.")

# %%
cures["validation"] = patients["validation"].edited({
    "    losses.append(loss_of(model, held_out).item())":
    "    with torch.no_grad():\n        losses.append(loss_of(model, held_out).item())"})
treat("validation")

# %% [markdown]
# ### large_vocabulary
#
# "I checkpointed every block." Here that saves next to nothing; section 8 counts it. The breakdown of the peak says
# why.

# %%
found = before["large_vocabulary"].run
show(draw_breakdown([found], title="The peak of large_vocabulary"),
     alt="One bar: logits, loss and their gradients' temporaries fill most of it; activations are thin.")
print("logits of one batch:", format_bytes(8 * 48 * 24_000 * 4), "(predicted)")

# %% [markdown]
# **Read it.** Most of the bar is four tensors of the size just printed: the logits, their log-softmax, and a gradient
# of each. No block owns them, so a checkpoint around blocks cannot drop them. The cure of lesson 05: compute the logits
# for a few tokens at a time, and again in backward.

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

# %%
cures["optimizer_doubles"] = patients["optimizer_doubles"].edited({"foreach=True": "fused=True"})
treat("optimizer_doubles")
print(after["optimizer_doubles"].run.breakdown)

# %% [markdown]
# **Read it.** The moments had to come, and they stay: only from the *second* step on do activations lie on top of them.
# So a first step that fits proves little. The temporary is what a fused kernel does without. The lab has a patient for
# whom that is not enough.
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

# %%
cures["resolution"] = resolution.edited(
    {"return model, torch": "return checkpoint_blocks(model), torch"}, checkpoint_blocks=checkpoint_blocks)
treat("resolution")

# %% [markdown]
# At a real size the story is the same: the larger images do not fit, and checkpointed they do. A larger U-Net, two
# images, AdamW, bf16, on a simulated card of 24 GB:

# %%
def diffusion(checkpointed):
    with torch.device("meta"):
        model = UNet((256, 512, 1024, 1024), blocks_per_level=2)
    model = model.to_empty(device="cpu")
    checkpoint_blocks(model, every=1 if checkpointed else 0)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def diffusion_step(side):
    def step(model, optimizer):
        with torch.autocast("cpu", torch.bfloat16):
            F.mse_loss(model(torch.randn(2, 3, side, side), torch.zeros(2)), torch.randn(2, 3, side, side)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


for side, checkpointed in ((256, False), (512, False), (512, True)):
    run = simulate(lambda: diffusion(checkpointed), diffusion_step(side), device="RTX 3090", name=f"{side}")
    print(f"{side} x {side}, checkpointed {checkpointed!s:<5} {format_bytes(run.peak_bytes):>10} (simulated); {run.notes[0]}")

# %% [markdown]
# ## 5. Alive is not reserved: fragmentation
#
# PyTorch asks the driver for *segments* and hands out *blocks* of them. A segment goes back only when all of its blocks
# are free. So three numbers stand for "memory in use": what tensors hold (*allocated*), what PyTorch took (*reserved*),
# and what `nvidia-smi` shows (reserved, and the context). On a GPU `torch.cuda.memory_summary()` prints the first two.
# Here the same requests go through a simulated caching allocator:

# %%
fragmented = before["fragmentation"]
print(fragmented.replayed().summary())
print("\non a GPU of the budget's size:", fragmented.complaint)

# %% [markdown]
# **Read it.** *Non-releasable* bytes are free and lie in segments in which something else lives. The map below the next
# cell shows what: each step keeps its features, 10.6 MiB, and they were put where a large activation had just been
# freed. The rest of such a segment is too small for the next activation, which asks for a new one.

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
# The cure makes room for all features *before* the loop: one long-lived block instead of ten scattered ones. Wrong
# cures: `empty_cache()` gives back only segments that are wholly free (the replay has done so before it failed), and
# training on half a batch leaves the kept features as large as they were. On a GPU there is a switch,
# `PYTORCH_ALLOC_CONF=expandable_segments:True` (`PYTORCH_CUDA_ALLOC_CONF` in older versions): segments then grow by
# pages that can be given back one by one. It helps, and it hides the cause.
#
# ## 6. No leak at all: full_loader
#
# "The job is killed, there is no error, and `nvidia-smi` shows an almost empty GPU." Each worker of a `DataLoader`
# prepares `prefetch_factor` batches ahead, in shared memory of the *host*:
# `waiting bytes = workers x prefetch_factor x bytes of a batch`.

# %%
loaders = {"4 workers, 8 ahead, fp32": (4, 8, "float32"), "4 workers, 8 ahead, bytes": (4, 8, "uint8")}
host = {name: run_loader(*settings) for name, settings in loaders.items()}
for name, found in host.items():
    print(f"{name:<28}{found}   mean of all images {found.mean}")

# %% [markdown]
# **Read it.** Four moments of a run, and the number stays: the host is full, and nothing leaks. The measured bytes hold
# one batch more than the predicted ones: the one that the loop still refers to. The script's budget is 128 MiB of
# shared memory. The second line sends the bytes that the images are stored in, and converts them after the loader: a
# quarter, with the same mean. Fewer workers or a smaller `prefetch_factor` help as well.
#
# A list of Python objects in the data set is another story: counting references copies pages in each worker
# ([PyTorch issue 13246](https://github.com/pytorch/pytorch/issues/13246)).
#
# ## 7. Instruments, and what each cannot see
#
# ### A snapshot, in PyTorch's own viewer
#
# On a GPU three calls of private functions record it:
#
# ```python
# torch.cuda.memory._record_memory_history(max_entries=100_000)
# try:
#     step()  # the one that dies
# except torch.OutOfMemoryError:
#     torch.cuda.memory._dump_snapshot("oom.pickle")
# torch.cuda.memory._record_memory_history(enabled=None)
# ```
#
# You drop the file onto [pytorch.org/memory_viz](https://pytorch.org/memory_viz). Here a metered run writes the same
# format, and the course carries PyTorch's viewer, so that the page opens without a network. A picture of it:

# %%
snapshot = write_snapshot(files / "fragmentation.pickle", fragmented.replayed())
for view in ("Active Memory Timeline", "Allocator State History"):
    page = write_snapshot_page(files / f"{view.split()[0].lower()}.html", snapshot, view)
    print(f"{page.relative_to(here.root)}: {page.stat().st_size // 1024} KiB; open it in a browser")
show(here.root / "docs" / "memory_viz.png", alt="PyTorch's memory viewer with the patient's snapshot.")

# %% [markdown]
# *Active Memory Timeline*: time to the right, each band one block; hover for its stack (here category, phase and
# module). A band that never ends is something kept. *Allocator State History*: click an event, see the segments at that
# moment.
#
# ### The profiler, in a trace viewer
#
# `torch.profiler` knows operations, and with `profile_memory=True` the bytes each of them took and gave back.

# %%
from torch.profiler import ProfilerActivity, profile

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
# **Read it.** The last three operations take one tensor of the logits' size in each call. The page holds Chromium's
# trace viewer. `ui.perfetto.dev` and `chrome://tracing` read the same file. For TensorBoard there is
# `on_trace_ready=torch.profiler.tensorboard_trace_handler("runs")`; its plugin, `torch-tb-profiler`, is deprecated.
#
# ### Nsight Systems
#
# `nsys profile --trace=cuda,nvtx --cuda-memory-usage=true python train.py` records the *driver's* view. This timeline
# is **made up for reading**: two steps, and in the second the card is full.

# %%
lanes = {
    "CPU: PyTorch": [Span("launches", 0, 0.004), Span("launches", 0.006, 0.009), Span("waits", 0.009, 0.016), Span("launches", 0.016, 0.02)],
    "CUDA API": [Span("cudaFree", 0.009, 0.013), Span("cudaMalloc", 0.013, 0.016)],
    "GPU: kernels": [Span("kernels", 0.001, 0.006), Span("kernels", 0.0065, 0.0095), Span("kernels", 0.0165, 0.021)],
}
show(draw_lanes(lanes, title="A made trace, not a recorded one: cudaFree in mid-step", evidence=None),
     alt="Three lanes over time: kernels stop while cudaFree and cudaMalloc run, then go on.")

# %% [markdown]
# **Read it.** `cudaMalloc` belongs in the first steps. Later on, `cudaFree` and `cudaMalloc` say that the allocator ran
# dry, gave its cache back and asked anew; the GPU waits meanwhile. It is the last sign before the error, and it looks
# like a *slow* step.
#
# | instrument | sees | cannot see |
# |---|---|---|
# | `nvidia-smi` | the whole card, every process, the context | what PyTorch has free in its cache; which tensor; what happens between two samples |
# | `memory_summary()` | allocated, reserved, their peaks | which tensor, which line; other processes and libraries |
# | snapshot | each block, its stack, segments, over time | what PyTorch did not allocate (NCCL, the context); the stacks of what was there before it began |
# | `torch.profiler` | operations, their bytes and time | who *holds* a tensor; hours (traces grow fast) |
# | Nsight Systems | driver calls, kernels, copies, all libraries | tensors; categories |
# | the meter | every byte by category, phase, module | lines of code; other processes |
# | `psutil`, `/proc` | the host, workers included | the GPU |
#
# None of them names a Python reference. `gc.get_referrers(tensor)` does, once you know the tensor.

# %%
if torch.cuda.is_available():
    model, optimizer = patients["fragmentation"].build()
    patients["fragmentation"].train(model.to("cuda"), optimizer)
    print(torch.cuda.memory_summary(abbreviated=True))
else:
    print("No GPU here: memory_summary() and nvidia-smi have nothing to show.")
recorded_table("oom_fragmentation", columns=["cured", "peak_bytes", "reserved_peak_bytes"])

# %% [markdown]
# ## 8. In which order?
#
# *A job runs out of memory: what do you do?* Profile first. Then the general cures, from the cheap to the dear:
# precision, accumulation, checkpointing, a smaller optimizer, offload or quantization, more cards. Those for one card
# are a few lines around the patient:

# %%
def to_bytes(tensor):
    """A saved tensor as Python bytes: host memory, which the device's allocator does not count."""
    if tensor.numel() < 2**14 or isinstance(tensor, torch.nn.Parameter):
        return tensor
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return bytearray(flat.numpy()), tensor.dtype, tensor.shape


def from_bytes(kept):
    return kept if torch.is_tensor(kept) else torch.frombuffer(kept[0], dtype=kept[1]).view(kept[2]).clone()


def to_host():
    return torch.autograd.graph.saved_tensors_hooks(to_bytes, from_bytes)


def bf16():
    return torch.autocast("cpu", torch.bfloat16)

# %%
def under(make_context, train):
    def run(*args):
        with make_context():
            return train(*args)

    return run


def with_optimizer(build, kind):
    def build_both():
        model, _ = build()
        return model, kind(model.parameters())

    return build_both


def checkpointed(build):
    def build_both():
        model, optimizer = build()
        return checkpoint_blocks(model), optimizer

    return build_both

# %%
general = {
    "precision": lambda p: p.treated(train=under(bf16, p.train)),
    "accumulation": lambda p: p.treated(train=lambda *both: p.train(*both, 2)),
    "checkpointing": lambda p: p.treated(build=checkpointed(p.build)),
    "smaller optimizer": lambda p: p.treated(build=with_optimizer(p.build, torch.optim.Adafactor)),
    "offload": lambda p: p.treated(train=under(to_host, p.train)),
}

# %% [markdown]
# Which is cheaper, accumulation or checkpointing? Time on a busy laptop does not tell; the number of operations does.

# %%
def flops(patient):
    model, optimizer = patient.build()
    with FlopCounterMode(display=False) as counter:
        patient.train(model, optimizer)
    return counter.get_total_flops()


plain = flops(patients["kept_graph"])
times = {cure: flops(general[cure](patients["kept_graph"])) / plain for cure in ("accumulation", "checkpointing")}
for cure, factor in times.items():
    print(f"kept_graph with {cure}: {factor:.2f} times the operations of the run without (counted)")
assert times["accumulation"] == 1 < times["checkpointing"], "two halves are the whole; a recomputed forward comes on top"

# %% [markdown]
# **Read it.** Two halves of a batch are the same arithmetic. A checkpointed block runs its forward twice. The order turns
# round where a half batch no longer keeps the card busy, and where each micro-batch gathers its parameters anew
# ([lesson 09](09_sharding.ipynb)).

# %%
def entry(name, found):
    """What a cure saved, + or - of the sick run's bytes, and whether the losses stayed."""
    saved = (before[name].bytes - found.bytes) / before[name].bytes
    mark = "fits" if found.fits else "over"
    same = "" if found.same_losses(before[name]) else ", other losses"
    return f"{mark}: {saved:+.0%}{same}"


table = {name: {"its own cure": entry(name, after[name])} for name in patients}
for name, patient in patients.items():
    for cure, apply in general.items():
        table[name][cure] = entry(name, examine(apply(patient)))
pd.DataFrame(table).T

# %%
fits = {cure: sum(row[cure].startswith("fits") for row in table.values()) for cure in ("its own cure", *general)}
same = {cure: sum(row[cure].startswith("fits") and "other" not in row[cure] for row in table.values()) for cure in fits}
for cure in fits:
    print(f"{cure:<20} brings {fits[cure]} of 7 under their budget, {same[cure]} of them with the same losses")
print(f"your bet on accumulation, in two parts: {my_bet}; counted: {fits['accumulation']}")
for parts in (4, 8):
    healed = [name for name, patient in patients.items()
              if examine(patient.treated(train=lambda *both, p=patient: p.train(*both, parts))).fits]
    print(f"accumulation in {parts} parts brings under their budget: {', '.join(healed) or 'nobody'}")
assert fits["its own cure"] == same["its own cure"] == 7, "each patient has a cure that changes no loss"
assert max(same[cure] for cure in general) < 7, "no general cure should heal the whole ward"

# %% [markdown]
# **Read it.** Percentages are the bytes saved, as a share of the sick run's. The usual advice, half a batch, heals nobody
# here; more parts heal whom the last lines name. It does not shrink a validation, a state, a batch of one, or what is kept (both halves are), and half of the
# logits of `large_vocabulary` is still too much. Checkpointing makes
# `forgotten_reference` worse: its hook runs again in the recomputation, and what it keeps there holds a graph that no
# backward visits. Precision and offload rescue `kept_graph`, and offload `forgotten_reference`, for the few steps of
# these runs. The leak goes on, on the host or under a lower peak, and the run dies later. So measure first.

# %%
def path(name):
    """The order of the lesson, filled in with what was measured for this patient."""
    rows = [f"{name}, {format_bytes(before[name].bytes)} over {format_bytes(patients[name].limit_bytes)}"]
    rows += [f"  profile            peak in {before[name].run.peak_phase}; its own cure {table[name]['its own cure']}"]
    rows += [f"  {cure:<18} {table[name][cure]}" for cure in general]
    enough = next((cure for cure in general if table[name][cure].startswith("fits")), "more cards")
    return "\n".join([*rows, f"  without a diagnosis you would have stopped at: {enough}"])


print(path("kept_graph"), path("resolution"), sep="\n\n")

# %%
cases = {name: PatientBytes(before[name].bytes, patients[name].limit_bytes, after[name].bytes) for name in patients}
show(draw_ward(cases, title="The ward, before and after", evidence=kinds),
     alt="Two bars for each patient: the first beyond the line of its budget, the second short of it.")
for name in patients:
    score("10", name, peak_bytes=after[name].bytes, evidence=kinds[name == "fragmentation"])
scoreboard("10")

# %% [markdown]
# **Question.** A loader has 6 workers and `prefetch_factor=8`; an epoch has 10,000 batches. How many batches can wait
# in shared memory?

# %%
waiting_batches = ...
check("10.waiting_batches", waiting_batches)

# %% [markdown]
# ## When to use which
#
# | cure | use when | costs | does not help |
# |---|---|---|---|
# | profile | always, first | minutes | |
# | precision (02) | activations are large | other losses (fp16: a loss scale) | states; a leak only slows down |
# | accumulation | the batch is more than one item | smaller kernels | batch 1, states, anything kept |
# | checkpointing (05) | activations of blocks are the peak | up to a forward | logits, states, the last block |
# | smaller optimizer (06) | states are the peak | other losses | activations |
# | offload (07), quantize (06, 08) | nothing else is left on one card | the link's time | a leak stays, or moves to the host |
# | more cards (09) | states do not fit one | traffic, money | a leak: it dies on all of them |
#
# ## Break it, diagnose it
#
# Three things that a clinic meets as well: a patient that is well, a snapshot that was cut short when the job was
# killed, and one of an old PyTorch.

# %%
import pickle

damaged = {"cut short": snapshot.read_bytes()[:5000], "old": pickle.dumps([{"address": 1, "blocks": []}])}
for name, content in damaged.items():
    file = files / f"{name.replace(' ', '_')}.pickle"
    file.write_bytes(content)
    try:
        write_snapshot_page(files / "never.html", file)
    except SnapshotError as refusal:
        print(f"{name}: {refusal}")
    file.unlink()
try:
    sick(cures["validation"])
except ValueError as refusal:
    print(f"well: {refusal}")
print("left on disk by the refusals:", [entry.name for entry in files.glob("never*")])

# %% [markdown]
# **Diagnose it.** A job that is killed while it dumps leaves half a pickle: dump in an
# `except torch.OutOfMemoryError`, not at the end. The course's reader takes plain values only, since a pickle from a
# stranger could run any code.
#
# ## Recap
#
# - The error names the last drop. Ask: is it alive or reserved, does it grow between steps, which moment is too large?
# - `total_loss += loss` leaks no tensor after its backward; a sum whose graph no backward visits keeps all of it.
# - Hooks, lists, exceptions and the notebook itself hold tensors; `empty_cache()` and `gc.collect()` free none of those.
# - No general cure heals the whole ward, and some make a patient worse. Diagnose, then choose.
#
# ### Test yourself
#
# Training runs for two hours and dies. `nvidia-smi` showed 79 of 80 GB since the first minute. Is it a leak?
#
# <details><summary>Answer</summary>
#
# You cannot know from that: `nvidia-smi` shows what PyTorch reserved, and the cache grows to the largest step and
# stays. Log `torch.cuda.memory_allocated()` after each optimizer step. If it grows, something is kept; if not, the step
# that died was larger than all before (a long sequence, a validation), or the cache is in pieces: compare allocated
# with reserved in the error.
#
# </details>
#
# A job runs out of memory: what do you do, in which order?
#
# <details><summary>Answer</summary>
#
# Read phase and category, count after each step, compare alive with reserved. Cure what is kept or misplaced. Only
# then: precision, accumulation, checkpointing, a smaller optimizer, offload or quantization, more cards.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/intermediate/10_oom_clinic.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/intermediate/10_oom_clinic.ipynb).
#
# **References.** PyTorch,
# [Understanding CUDA memory usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html),
# [CUDA semantics, memory management](https://docs.pytorch.org/docs/stable/notes/cuda.html),
# [profiler](https://docs.pytorch.org/docs/stable/profiler.html). NVIDIA,
# [Nsight Systems user guide](https://docs.nvidia.com/nsight-systems/UserGuide/index.html). The viewers in
# `viewers/`, in this lesson's folder of `sources/`, are PyTorch's, d3's and Chromium's, under their own licences.
