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
# **Four forms of the answer.** **a.** Free bytes in pieces too small. **b.** Something outside of this process's PyTorch.
# **c.** Something kept from step to step. **d.** One moment that is too large. The error's sizes show whether to suspect a or b; the bytes alive
# after each step tell c from d.
#
# **Promise.** You say which letter each of seven training runs, our *patients*, has; then each is brought under its
# budget, patient 3 on a simulated card, with the same losses.
# New words stand in the [glossary](../00_glossary.ipynb).
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop | about a minute on two CPU cores |
#
# ## A bet
#
# "Out of memory? Make the batch smaller." Each training batch of the seven is cut in up to eight parts, with accumulated
# gradients. For how many does that save more than a tenth of the memory? Section 6 counts.

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

from utils import MIB, Evidence, check, format_bytes, recorded_table, score, show
from utils.clinic import LOSS_TOLERANCE, examine, examine_over_budget, replay
from utils.lessons.lesson_10 import cures as general_cures
from utils.lessons.lesson_10.death import death_of, more_on_the_card, named_segments
from utils.lessons.lesson_10.listing import loops, script
from utils.lessons.lesson_10.messages import PUBLISHED
from utils.lessons.lesson_10.one_segment import expandable_bytes
from utils.lessons.lesson_10.over_time import draw_alive, draw_stacked, draw_steps
from utils.lessons.lesson_10.pages import write_snapshot_page, write_trace_page
from utils.lessons.lesson_10.seven import LENGTHS, seven
from utils.lessons.lesson_10.snapshot import read_snapshot, write_snapshot
from utils.lessons.lesson_10.steps import by_step, step_ends
from utils.lessons.lesson_10.views import FullCard, PatientBytes, Pieces, draw_four_ways, draw_peak, draw_segments, draw_ward

# %% [markdown]
# ## 1. Read the error, then count between steps
#
# PyTorch's error names sizes and no tensor. `parts_of` reads them, here from six published errors:

# %%
print(*PUBLISHED, sep="\n\n")
SIZE = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
FIELDS = {"asked for": r"allocate ([\d.]+) (\w+)", "card": r"(?:capaci?ty of|device has) ([\d.]+) (\w+)",
          "tensors": r"([\d.]+) (\w+) (?:is|are) allocated", "in pieces": r"([\d.]+) (\w+) (?:is|are) reserved",
          "free": r"([\d.]+) (\w+) is free", "process": r"this process has ([\d.]+) (\w+)"}
PARTS = {"tensors": "", "in pieces": "a", "this process, else": "b1", "other processes": "b2", "no process named": "b1 or b2", "free": ""}


def parts_of(text):
    """Bytes of the request, the card and its parts."""
    size = {name: float(n) * SIZE[unit] for name, field in FIELDS.items() for n, unit in re.findall(field, text)[:1]}
    if missing := {"asked for", "card", "tensors", "in pieces"} - size.keys():
        raise ValueError(f"The error does not say: {', '.join(sorted(missing))}. PyTorch before 2.1 words it otherwise.")
    ours = size["tensors"] + size["in pieces"]
    numbered = sorted((float(n) * SIZE[unit] for n, unit in re.findall(r"Process \d+ has ([\d.]+) (\w+)", text)))
    # "this process"; in a container none is called so, and the smallest that can hold our bytes is taken for it
    process = next((held for held in ([size["process"]] if "process" in size else numbered) if held >= ours), None)
    free = size.get("free", size["card"] - ours)
    rest, own = size["card"] - free - ours, process - ours if process else 0
    named = {"this process, else": own, "other processes": max(rest - own, 0), "no process named": 0}
    unnamed = {"this process, else": 0, "other processes": 0, "no process named": rest}
    return size | {"free": free} | (named if process else unnamed)


# %% [markdown]
# A patient is a script with `build()` and `train(model, optimizer)`, and a budget. `examine` runs it to the end and measures the
# peak of what is alive; for patient 3, the smallest GPU on which a simulated allocator serves every request.
#
# Look for white pieces (a), another process (b), a staircase (c), one tooth (d):

# %%
gc.freeze()  # each examination ends with gc.collect(): what the imports made need not be searched again
patients = seven()
before = {name: examine_over_budget(patient) for name, patient in patients.items()}
errors = {message.source: parts_of(message.text) for message in PUBLISHED}
number = {name: f"patient {place}" for place, name in enumerate(patients, 1)}
errors[f"{number['fragmentation']} (simulated)"] = parts_of(before["fragmentation"].complaint)
death = death_of(before["fragmentation"])
pieces = Pieces(death.segments, death.asked_bytes, patients["fragmentation"].limit_bytes, {"logits and loss": "kept features"})
shared = FullCard({name: size for name in PARTS if (size := errors[PUBLISHED[0].source][name])},
                  PUBLISHED[0].source.partition("/")[2], [*PARTS][2:5])
show(draw_four_ways(pieces, shared, before["kept_graph"], before["long_batch"]),
     alt="Four panels. a: segments half full, none with room for the request. b: a card of which another process holds most. "
         "c: a staircase, on which each step's peak is marked; from the fifth on the peaks are over the budget. d: low teeth, and "
         "one that towers over the budget.")

# %%
def verdict(parts, least=0.1):
    """Letters of the parts with a share of `least` of the card or more, the largest first; a only if pieces and free would serve."""
    serves = parts["in pieces"] + parts["free"] >= parts["asked for"]
    large = [name for name, letter in PARTS.items() if letter and parts[name] >= least * parts["card"] and (serves or letter != "a")]
    return ", ".join(PARTS[name] for name in sorted(large, key=parts.get, reverse=True)) or "c or d"


print(f"{number['fragmentation']}:", before["fragmentation"].complaint)
shares = {source: {name: f"{parts[name] / parts['card']:.0%}" for name in ("asked for", *PARTS)}
          | {"(pieces + free) / asked": f"{(parts['in pieces'] + parts['free']) / parts['asked for']:.2f}"}
          | {f"verdict at {least:.0%}": verdict(parts, least) for least in (0.05, 0.1, 0.2)} for source, parts in errors.items()}
pd.DataFrame(shares).T

# %% [markdown]
# **Read it.** Shares are of the card. The error raises two suspicions:
#
# - **a.** *In pieces* is a tenth or more, and with *free* it would have served the request.
# - **b.** Something beside this process's PyTorch holds a tenth or more: **b1** this process (a library, NCCL, the CUDA
#   context), **b2** others.
#
# Neither? Then look at the run:
#
# - **c.** *Do the bytes alive after each step grow,* though no later step needs them?
# - **d.** *If not,* one moment is too large.
#
# The two causes that are told fit (returnn, EveryVoice). The tenth is our choice.
#
# **Your turn.** No patient has b. Here are the owners' complaints and the loops (without `zero_grad` and each step's
# loss; 2 does not checkpoint yet), then what the meter found. Which letter is each, patient 3 by its error?

# %%
def after_steps(found):
    return [found.run.timeline.at(ns).total_bytes for ns in step_ends(found)]


longer = {"large_vocabulary": examine(patients["large_vocabulary"].edited({"STEPS = 2": "STEPS = 3"}))}
triage = {}
display(loops(patients.values()))
for name, found in (before | longer).items():
    alive = after_steps(found)  # the first step makes the optimizer's state: count from the second
    triage[number[name]] = {"largest": str(max(found.run.breakdown, key=found.run.breakdown.get)).replace("logits", "model's output"),
                            "grows per step (MiB)": (alive[-1] - alive[1]) / (len(alive) - 2) / MIB,
                            "peak alive (MiB)": found.run.peak_bytes / MIB, "budget (MiB)": patients[name].limit_bytes / MIB}
pd.DataFrame.from_dict(triage, orient="index").round(2)

# %%
letters = {"patient 1": ..., "patient 2": ..., "patient 3": ..., "patient 4": ..., "patient 5": ..., "patient 6": ..., "patient 7": ...}
check("10.letters", letters)

# %% [markdown]
# **Read it.** Patients 1 and 6 grow, and no later step needs what they keep: c. So does patient 3, by this
# test: its first features and a number per step would do. Its error raises a, which section 4 treats. The others do not
# grow from the second step to the last: d. From here each has a name.
#
# ## 2. Something is kept
#
# Which line keeps the bytes?
#
# ### kept_graph
#
# The training loop adds up two sums over the steps:

# %%
script(patients["kept_graph"], "        for tokens in", "    return")

# %% [markdown]
# **Question.** Which of the two keeps megabytes alive? Answer `"total_loss"`, `"total_size"`
# or `"both"`.

# %%
which_sum = ...
check("10.which_sum", which_sum)

# %%
half_cures = {"detach total_loss": {"total_loss + loss": "total_loss + loss.detach()"},
              "detach total_size": {"logits.logsumexp": "logits.detach().logsumexp"}}
for name, changes in half_cures.items():
    found = examine(patients["kept_graph"].edited(changes))
    print(f"{name}: {format_bytes(found.bytes)} of {format_bytes(found.patient.limit_bytes)}, {'fits' if found.fits else 'over'}")

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
# **Read it.** [PyTorch's FAQ](https://docs.pytorch.org/docs/stable/notes/faq.html) warns of `total_loss += loss`. Here
# that sum costs next to nothing: `backward()` has freed what its graphs had saved. No backward visits the graphs of `total_size`:
# each keeps its step's logits.
#
# ### forgotten_reference
#
# A hook keeps the output of every norm.

# %%
cures["forgotten_reference"] = patients["forgotten_reference"].edited({
    "seen.append(result)": "seen.append(result.detach().abs().max())"})
treat("forgotten_reference")

# %% [markdown]
# ### Break it, diagnose it
#
# Now cure it as `kept_graph` was cured: keep `result.detach()`. Predict what that saves.

# %%
detached = examine(patients["forgotten_reference"].edited({"seen.append(result)": "seen.append(result.detach())"}))
print(f"{before['forgotten_reference'].bytes / MIB:.1f} MiB before, {detached.bytes / MIB:.1f} with .detach() alone, "
      f"{after['forgotten_reference'].bytes / MIB:.1f} with .detach().abs().max()")
assert detached.bytes == before["forgotten_reference"].bytes, "a detached tensor has the same storage"

# %% [markdown]
# **Diagnose it.** Not a byte: `.detach()` lets go of the graph and keeps the tensor. Keep a number instead.
#
# ## 3. One moment is too large
#
# Which moment, and what is alive in it?
#
# ### validation
#
# `model.eval()` does not tell autograd to stop, and the held-out batch has 32 rows where a step has 4.

# %%
cures["validation"] = patients["validation"].edited({
    "    losses.append(loss_of(model, held_out).item())":
    "    with torch.no_grad():\n        losses.append(loss_of(model, held_out).item())"})
treat("validation")
pair = {"before": before["validation"], "with no_grad": after["validation"]}
show(draw_alive(pair, title="Three steps, then a validation of a larger batch (drawn wider)", after_last="validation"),
     alt="Left: three low hills, then a climb far over the budget. Right: the same hills, then a low climb that stays within it.")

# %% [markdown]
# ### large_vocabulary
#
# This is alive at the peak:

# %%
timeline = before["large_vocabulary"].run.timeline
now = [a for a in timeline.allocations if a.born_ns <= timeline.peak_ns and (a.died_ns is None or a.died_ns > timeline.peak_ns)]
four = sorted(sorted(now, key=lambda a: -a.bytes)[:4], key=lambda a: a.born_ns)
names = ("logits", "log-softmax of 1", "gradient of 2", "gradient of 1")
parts = {f"{number}. {name}, from {a.born_in}": a.bytes for number, (name, a) in enumerate(zip(names, four, strict=True), 1)}
parts["all else"] = timeline.peak_bytes - sum(parts.values())
show(draw_peak(parts, patients["large_vocabulary"].limit_bytes, title="The peak of large_vocabulary"),
     alt="One bar in five parts: four as large as the logits, any three of which are over the budget, and all else.")
print("logits of one batch:", format_bytes(8 * 48 * 24_000 * 4), "(predicted)")

# %% [markdown]
# **Read it.** Four tensors have the logits' size; no block makes them, so checkpointing the blocks spares none. The cure is lesson
# 05's: compute the logits for a few tokens at a time, and again in backward.

# %%
def in_chunks(model, tokens, parts, chunks=8):
    """The mean loss of next tokens, with the logits of one chunk alive at a time."""
    def summed(hidden, wanted):
        return F.cross_entropy(head(hidden), wanted, reduction="sum")

    head, model.head = model.head, None  # the model then gives its hidden states; not for a sharded or compiled one
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
# Adam makes its two moments in the first `optimizer.step()`. With `foreach=True`,
# [PyTorch's default on a GPU](https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html), a temporary comes on top.

# %%
show(draw_stacked(before["optimizer_doubles"], title="optimizer_doubles: the first two of three steps"),
     alt="Memory more than doubles in the first optimizer step and goes over the budget; the next one shows the same tooth.")
cures["optimizer_doubles"] = patients["optimizer_doubles"].edited({"foreach=True": "fused=True"})
treat("optimizer_doubles")

# %% [markdown]
# **Read it.** The moments (purple) stay within the budget. The temporary (grey) goes over it in both steps; the fused kernel does
# without.
#
# ### long_batch
#
# Look for the tallest bar. On the right the longest batch is *rehearsed*
# ([tuning guide](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html)) after the first step, when the optimizer's
# state is there.

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
     alt="Left: low bars, and one at 512 tokens over the budget; the reserved line rises at 128, 160 and 512. Right: the second bar is as high.")
cures["long_batch"] = late.edited({"batch.chunk(parts)": "batch.chunk(max(parts, -(-batch.numel() // 1024)))"})
treat("long_batch")

# %% [markdown]
# **Read it.** Of what is alive, only the batch of 512 tokens is over the budget; the rehearsal shows it in the second bar.
# Reserved (red, on a simulated card without limit) is over 32 MiB from 160 tokens on; what a card of 32 MiB does there is
# not shown here. The cure caps the *tokens* of a micro-batch, here at 1,024.
#
# ## 4. Alive is not reserved: fragmentation
#
# PyTorch asks the driver for *segments* and hands out *blocks* of them. A segment goes back only when all of its blocks are free.
# Tensors hold the *allocated* bytes, PyTorch took the *reserved* ones. A simulated caching allocator serves the patient's
# requests, first with room without end:

# %%
fragmented = before["fragmentation"]
print(fragmented.replayed().summary())
print(f"\non a GPU of {format_bytes(fragmented.patient.limit_bytes)} it dies after {death.steps_done} steps, asking for",
      f"{format_bytes(death.asked_bytes)}: the largest of {len(death.holes)} holes has {format_bytes(death.holes[0])},",
      f"{format_bytes(fragmented.patient.limit_bytes - death.reserved_bytes)} lie outside of segments,",
      f"and {sum(not any(name for _, name in segment.blocks) for segment in death.segments)} segments are wholly free")

# %% [markdown]
# *Non-releasable* bytes are free, in a segment where something else lives. The cure makes room for all features *before*
# the loop:

# %%
cures["fragmentation"] = patients["fragmentation"].edited({
    "losses, kept = [], []": "losses, kept = [], []\n    room = iter(torch.empty(STEPS, ROWS, FEATURES, device=device))",
    "kept.append(model(probe))": "kept.append(next(room).copy_(model(probe)))"})
treat("fragmentation")
cured = after["fragmentation"]
maps = {(dies := f"before: dies after {death.steps_done} steps"): death.segments,
        "after the cure: all ten steps": named_segments(cured, cured.replayed().allocator)}
show(draw_segments(maps, title="Reserved on a GPU of 216 MiB", asked={dies: death.asked_bytes},
                   names={**pieces.names, "inputs": "inputs, room for features"}),
     alt="Left: segments half full, none with a hole as long as the dashed request. Right: one long block that holds all features.")

# %% [markdown]
# **Read it.** Left, at the request that fails: beside each of the eight kept features lies a hole that is too short. With no
# segment wholly free `empty_cache()` gives nothing back. Right, at the end: all features lie in one block.
#
# A switch needs no edit: with `PYTORCH_ALLOC_CONF=expandable_segments:True`, set before CUDA starts, segments grow by pages.
# Here is a model of it, then the edit, recorded on a real card:

# %%
arms = {"as it came": (fragmented.bytes, fragmented.run), "room made before the loop": (cured.bytes, cured.run),
        "expandable segments": (expandable_bytes(fragmented.run.timeline), fragmented.run)}
for name, (size, run) in arms.items():
    print(f"{name:<28}{format_bytes(size):>12} (simulated); alive at the peak {format_bytes(run.peak_bytes)}")
print("more on the card, as it came:", ", ".join(f"{format_bytes(size)} {name}" for name, size in more_on_the_card(fragmented)))
recorded_table("oom_fragmentation", columns=["cured", "peak_bytes", "reserved_peak_bytes", "replayed_reserved_peak_bytes"])

# %% [markdown]
# **Read it.** The edit holds all ten rooms from the start: its peak is higher, and still less is reserved. The switch reserves
# least in the model; on a card it was not tried here.
#
# On the H200 more is alive, and both scripts reserve more than 216 MiB, the cured one less. The simulated allocator, given
# the card's own requests, reserves what the card did.
#
# ## 5. Instruments, and what each cannot see
#
# **A snapshot** holds each block, on a GPU with its Python stack (`file.py:line function`). Here a metered run writes the format
# with *module:0 category* instead, for a feed-forward so wide that the states outweigh the leak. First one snapshot, then what
# grew *between* two:

# %%
def made_by(snapshot):
    """Bytes still alive by the place outside of PyTorch that made them."""
    made = Counter()
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] == "active_allocated"):
        frames = block["frames"] or [{"filename": "no Python stack", "line": 0, "name": "backward, or before recording"}]
        place = next((f for f in frames if "/torch/" not in f["filename"]), frames[0])
        made[f"{place['filename']}:{place['line']} {place['name']}"] += block["size"]
    return made


files = here.root / "build" / "clinic"  # git ignores this folder
wide = examine(patients["forgotten_reference"].edited({"feedforward=352": "feedforward=3520"}))
third, last = (made_by(read_snapshot(write_snapshot(files / f"step{n}.pickle", replay(wide.run.timeline, until_ns=step_ends(wide)[n - 1]))))
               for n in (3, 12))
for title, made in {"alive after step 12": last, "made since step 3": last - third}.items():
    print(f"forgotten_reference, feed-forward ten times as wide: {title}")
    print(*(f"   {format_bytes(size):>12}  {place}" for place, size in made.most_common(3)), sep="\n")
write_snapshot_page(files / "fragmentation.html", write_snapshot(files / "fragmentation.pickle", before["fragmentation"].replayed()))
show(here.root / "docs" / "memory_viz.png",
     alt="Allocator State History of PyTorch's viewer: segments of fragmentation, most with one block and a hole beside it.")

# %% [markdown]
# **Read it.** One snapshot's largest bytes are the states'. The difference names norms, whose outputs the hook keeps. The viewer
# [memory_viz](https://pytorch.org/memory_viz) opens such files: a row is a segment, white is
# free, the hole too small for 20 MiB.
#
# **Who holds it?** Python knows some of what refers to a tensor:

# %%
def holders(device, least_bytes=2**16):
    """Bytes of the tensors that Python reaches, by shape and the types that refer to them; a view counts as a tensor."""
    large = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.device.type == device and t.nbytes >= least_bytes]
    found = Counter()
    for tensor in large:
        types = sorted({type(one).__name__ for one in gc.get_referrers(tensor) if one is not large})
        found[f"{tuple(tensor.shape)}, held by {', '.join(types) or 'nothing that Python knows'}"] += tensor.nbytes
    return found


for name, line in {"forgotten_reference": "    for hook in hooks:\n", "kept_graph": "    return [*losses, total_loss"}.items():
    told = []
    examine(patients[name].edited({line: f"    told.append(holders('cpu'))\n{line}"}, holders=holders, told=told))
    print(f"{name}:", *(f"{format_bytes(size)} {what}" for what, size in told[0].most_common(2)), sep="\n   ")

# %% [markdown]
# **Read it.** A *list* holds what `forgotten_reference` keeps. For `kept_graph` Python names no holder.
#
# **The profiler** tells each operation's bytes, here of `large_vocabulary` over two steps:

# %%
model, optimizer = patients["large_vocabulary"].build()
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    patients["large_vocabulary"].train(model, optimizer)
for row in sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_memory_usage)[:4]:
    print(f"{row.key:<34} {row.count:>4} calls   {row.self_cpu_memory_usage / MIB:7.1f} MiB more than it freed")
profiler.export_chrome_trace(str(trace := files / "large_vocabulary.json"))
print(f"{write_trace_page(files / 'large_vocabulary_trace.html', trace).relative_to(here.root)} opens in a browser")

# %% [markdown]
# **Read it.** Log-softmax, its backward and the loss's have each made the logits' bytes once a step; `mm` made the logits and
# other products.
#
# **[Nsight Systems](https://docs.nvidia.com/nsight-systems/UserGuide/index.html)** (not run here):
# `nsys profile --trace=cuda,nvtx --cuda-memory-usage=true python train.py`.
#
# | instrument | sees | cannot see |
# |---|---|---|
# | `nvidia-smi` | the whole card | PyTorch's free bytes, tensors |
# | `memory_summary()` | allocated, reserved, their peaks | tensors, lines |
# | snapshot | blocks, stacks, segments | NCCL, the context; stacks of what was there before |
# | `torch.profiler` | operations, their bytes and time | segments |
# | Nsight Systems | CUDA calls, kernels, libraries | tensors |
#
# ## 6. In which order?
#
# The cause first. What would a general cure save? Two are tried on all: each batch in eight parts (`parts=8` in the loops of
# section 1; four rows in four), and each layer computed again in backward. What they cost in time is not shown here.

# %%
def outcome(name, found):
    """The share of the bytes that a cure saves, and whether all losses stay."""
    return (before[name].bytes - found.bytes) / before[name].bytes, found.same_losses(before[name])


general = {"eight parts": general_cures.accumulated, "checkpointing": general_cures.checkpointed}
treated = {cure: {name: examine(apply(patients[name])) for name in patients} for cure, apply in general.items()}
tried = {cure: {name: outcome(name, found) for name, found in row.items()} for cure, row in ({"its own cure": after} | treated).items()}
table = pd.DataFrame({cure: {name: f"{share:+.0%}" for name, (share, _) in row.items()} for cure, row in tried.items()})
display(table.loc[list(patients)].rename({"fragmentation": "fragmentation (reserved, simulated)"}).rename_axis("peak saved"))
apart = [f"{name} with {cure}" for cure, row in tried.items() for name, (_, same) in row.items() if not same]
print(f"losses over {LOSS_TOLERANCE:.0e} apart:", ", ".join(apart) or "none")
counts = {least: {cure: sum(share > least for share, _ in row.values()) for cure, row in tried.items()} for least in (0.05, 0.1, 0.2)}
for least, count in counts.items():
    print(f"saved more than {least:.0%}:", ", ".join(f"{cure} {many} of 7" for cure, many in count.items()))
for cure, row in treated.items():
    print(f"under its budget with {cure}:", ", ".join(name for name, found in row.items() if found.fits) or "none")
for name in ("kept_graph", "forgotten_reference"):
    growth = {"as it came": after_steps(before[name]), "in eight parts": after_steps(treated["eight parts"][name])}
    print(f"{name} grows per step:", ", ".join(f"{way} {(a[-1] - a[1]) / (len(a) - 2) / MIB:.2f} MiB" for way, a in growth.items()))
print(f"your bet: {my_bet}; counted: {counts[0.1]['eight parts']}")
assert counts[0.1]["its own cure"] == 7 > counts[0.1]["eight parts"], "no general cure should help all seven"

# %% jupyter={"source_hidden": true}
bars = {name + " (reserved, simulated)" * patients[name].fragments: PatientBytes(before[name].bytes, patients[name].limit_bytes, after[name].bytes) for name in patients}
show(draw_ward(bars, title="Seven patients and their own cures", evidence=[Evidence.MEASURED, Evidence.SIMULATED]),
     alt="Two bars a patient: the first beyond the line of its budget, the second, after its own cure, short of it.")
for name in patients:
    score("10", name, peak_bytes=after[name].bytes, evidence=Evidence.SIMULATED if patients[name].fragments else Evidence.MEASURED)

# %% [markdown]
# **Read it.** A smaller batch saves more than a tenth for four of the seven. Two of these are leaks, and grow in each step as
# before. "Saved" is not "fits": the lines "under its budget" tell, for these few steps.
#
# ## Recap
#
# *What filled it?* In this order:
#
# 1. The error's sizes show whether to suspect **a** or **b**.
# 2. The bytes alive after each step tell **c** from **d**.
# 3. Cure that cause. A smaller batch saved more than a tenth for four of the seven; two of these are leaks, and grew in each step
#    as before.
# 4. Where all that is alive is needed: for activations precision (02), accumulation and checkpointing (05); for states a smaller
#    optimizer (06) and more cards (09); for either offload (07).
#
# **Test yourself.** A job runs out of memory after two hours: what do you do, in which order? `nvidia-smi` showed 79 of 80 GB
# since the first minute: is it a leak?
#
# <details><summary>Answer</summary>
#
# `nvidia-smi` cannot tell: it counts PyTorch's cache as used. Read the error's sizes: a and b. Then the log of bytes alive:
# a climb is c. Else one moment was too large, such as a long batch or a validation: d.
#
# </details>
#
# **Where next.** Do the [lab](../../labs/intermediate/10_oom_clinic.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/intermediate/10_oom_clinic.ipynb).
#
# **References.** PyTorch, [Understanding CUDA memory usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html). The
# viewers are PyTorch's, d3's and Chromium's, under their own licences.

# %% [markdown]
# ## On Monday
#
# Log the bytes alive. **Once, before the model is built:**
#
# ```python
# import os
# import torch
#
# rank = os.environ.get("RANK", 0)
#
# def dump(name):
#     torch.cuda.memory._dump_snapshot(f"{name}_rank{rank}.pickle")
#
# def save(device, asked_bytes, device_bytes, free_bytes):
#     dump("oom")  # at the request that fails: the cache is given back by then, the frames still hold their tensors
#
# def log(when):
#     alive, most, stats = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()
#     idle, pieces = torch.cuda.memory_reserved() - alive, stats["inactive_split_bytes.all.current"]
#     print(f"rank {rank}, {when}: {alive >> 20:,} MiB alive, {most >> 20:,} at the peak, {idle >> 20:,} reserved and idle, "
#           f"{pieces >> 20:,} of it in pieces, {stats['num_alloc_retries']} retries")
#     torch.cuda.reset_peak_memory_stats()
#
# # On to the end, for the snapshot of the request that fails. Each allocation then walks its Python stack; where that is too
# # slow, stop after the second snapshot below: _record_memory_history(enabled=None)
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
#     if step in (3, 53):  # beside the states only the batch and what is kept are alive
#         dump(f"step{step}")
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
#         if state.global_step in (3, 53):
#             dump(f"step{state.global_step}")
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
# ```
#
# **Who made what grew**, with `made_by` of section 5, for the rank that died (torchrun ends the others). After a death read
# its `oom` file in place of `step53`; it holds that step's activations and gradients too:
#
# ```python
# import pickle
# from collections import Counter  # for made_by
#
# def made(name):
#     with open(name, "rb") as file:
#         return made_by(pickle.load(file))
#
# died = 0  # its rank
# grown = made(f"step53_rank{died}.pickle") - made(f"step3_rank{died}.pickle")
# print(*grown.most_common(10), sep="\n")
# ```
#
# | what you see | cure |
# |---|---|
# | no CUDA error: `Bus error`, or exit code 137 | not the card: `/dev/shm` ([5040](https://github.com/pytorch/pytorch/issues/5040)), or the machine's RAM ([13246](https://github.com/pytorch/pytorch/issues/13246)); not shown here |
# | a. *in pieces* is large, *retries* rise | `PYTORCH_ALLOC_CONF=expandable_segments:True` (in older PyTorch `PYTORCH_CUDA_ALLOC_CONF`); then *in pieces* counts nothing: read *reserved and idle* |
# | b1. this process, else | the library's own limit; fewer process groups (NCCL) |
# | b2. other processes | end them; `torch.cuda.set_device(local_rank)` |
# | c. *alive* trends upwards | `grown` names the maker; `holders("cuda")` of section 5 the keeper, where Python knows it |
# | d. the peak's batch is the longest | cap its tokens; `train_sampling_strategy="group_by_length"` (transformers 4: `group_by_length=True`) shows the longest first, but before Adam's states |
# | d. logits | `use_liger_kernel=True`, `LigerFusedLinearCrossEntropyLoss` |
# | d. optimizer step | a fused optimizer (Trainer's AdamW is, from PyTorch 2.8 on) |
# | d. evaluation | `torch.no_grad()` in your own loop; in Trainer `per_device_eval_batch_size`, and `preprocess_logits_for_metrics`: for `compute_metrics` it gathers all logits |
# | d. a save of FSDP's weights | `StateDictOptions(full_state_dict=True, cpu_offload=True)` |
# | d. activations | `gradient_checkpointing=True` |
