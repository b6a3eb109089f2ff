# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 13 Pipelines
#
# {{badges}}
#
# **Promise.** You write a program of 25 lines that runs *any* pipeline schedule on four real ranks: GPipe, 1F1B,
# interleaved, zero bubble. Seven of PyTorch's schedules, and DeepSpeed's engine without clipping, then reach the same
# losses. You predict bubble, memory and messages, and measure all three.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# GPipe runs all forward passes, then all backward passes. 1F1B alternates as soon as it can. On four stages and
# eight micro-batches, by how many percent does 1F1B shorten the idle time of GPipe? Write your guess. Section 1 draws it.

# %%
my_bet_percent = 50

# %% tags=["setup"]
here = setup("advanced/13")

# %%
import contextlib
import datetime
import io
import itertools
import os
import statistics
from dataclasses import replace

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from utils import Batch, Cluster, Evidence, Plan, RankError, Transformer, TransformerConfig, check, draw_over_time, draw_ranks
from utils import draw_schedules, estimate, format_bytes, model_shape, run_ranks, score, scoreboard, show, simulate, traffic
from utils.parallel import DeadlockError, ParallelDims, check_program, chunks_of, cut
from utils.parallel import device_mesh, even_blocks, pipeline_passes, read_program, stage_owners
from utils.planner import framework
from utils.planner.schedules import bubble_closed, in_flight, order, run, sends, timed
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.views import Panel
from utils.lessons.lesson_13.timed import SleepingStage

# %% [markdown]
# ## What you will be able to do
#
# - Read a schedule as lists of actions, and predict its bubble, its memory and its messages.
# - Run it with `send` and `recv`, with `torch.distributed.pipelining` and with DeepSpeed, and compare losses.
# - Find a deadlock in the lists, and in a job that hangs.
#
# A pipeline saves **memory**: each rank holds a part of the layers. It sends little, and pays with **idle compute**, the
# *bubble*: without micro-batches one rank works while all others wait, and four are no faster than one. New words stand in the
# [glossary](../00_glossary.ipynb).
#
# ## 1. A schedule is a program
#
# A pipeline cuts the model into **stages** of layers, one or more on each rank. A batch is cut into $m$
# **micro-batches**, which follow each other through the $p$ ranks. `2F0` is an **action**: stage 2, forward, micro-batch
# 0. `B` is its backward. A schedule is nothing but one list of actions for each rank:

# %% tags=["nbval-check-output"]
RANKS, MICRO_BATCHES = 4, 8
deepspeed_is_missing = deepspeed_problem()
print(deepspeed_is_missing or f"DeepSpeed {load_deepspeed().__version__}")

for rank, row in enumerate(order("1f1b", RANKS, MICRO_BATCHES)):
    print(f"rank {rank}:", *row)

# %% [markdown]
# An action starts when its rank is free and its input is there. That is all a drawing needs. Here are five programs.
# A backward takes twice a forward; **zero bubble** schedules cut it in two: `I` gives the gradient of the stage's input,
# which the neighbour waits for, and `W` that of its weights, which nobody waits for. DualPipeV's program is PyTorch's own:

# %%
def pytorch_program(name, chunks):
    rank = dist.get_rank()
    stages = [PipelineStage(nn.Linear(1, 1), stage, chunks, torch.device("cpu"))
              for stage in chunks_of(name, rank, RANKS, chunks)]
    schedule = get_schedule_class(name)(stages, n_microbatches=MICRO_BATCHES)
    return [[str(action or "") for action in schedule.pipeline_order[rank]] for rank in range(RANKS)]


programs = {
    "GPipe": order("gpipe", RANKS, MICRO_BATCHES),
    "1F1B": order("1f1b", RANKS, MICRO_BATCHES),
    "interleaved 1F1B": order("1f1b", RANKS, MICRO_BATCHES, virtual_stages=2),
    "ZB-H1": order("zb-h1", RANKS, MICRO_BATCHES),
    "DualPipeV": read_program(run_ranks(pytorch_program, RANKS, "DualPipeV", 2 * RANKS)[0]),
}

# %%
def drawn(rows, forward=1.0, transfer=0.0, launch=0.0):
    check_program(rows, MICRO_BATCHES)  # every action once, and no deadlock
    share = RANKS / len(stage_owners(rows))  # with two stages on a rank, each has half of the layers
    return run(rows, forward * share, 2 * forward * share, transfer, launch=launch)


show(draw_schedules({name: Panel(rows, drawn(rows)) for name, rows in programs.items()}),
     alt="Five schedules on four ranks: GPipe and 1F1B end at the same time; interleaved, ZB-H1 and DualPipeV end "
     "earlier, in this order.")
idle = [drawn(programs[name]).total - drawn(programs[name]).busy for name in ("GPipe", "1F1B")]
print(f"your bet: {my_bet_percent}%; 1F1B idles {100 * (1 - idle[1] / idle[0]):.0f}% less than GPipe (predicted)")

# %% [markdown]
# **Read it.** 1F1B saves **memory, not bubble**: GPipe and 1F1B end at the same moment. What falls is *in flight*, the
# micro-batches whose activations wait for their backward: stage $i$ holds $\min(m, p - i)$ of them, not $m$. (Not $p$
# either, as is often said: the last stage holds one.) The other three shorten the bubble, each for another price:
#
# | schedule | idle / work | in flight on rank $i$ | messages in a step |
# |---|---|---|---|
# | GPipe | $(p-1)/m$ | $m$ | $2(p-1)m$ |
# | 1F1B | $(p-1)/m$ | $\min(m, p-i)$ | $2(p-1)m$ |
# | interleaved, $v$ chunks | $(p-1)/(vm)$ | more: the drawing counts (a chunk is $1/v$) | $2(vp-1)m$ |
# | ZB-H1 | $(p-1)/(3m)$ | $\min(m, p)$, until `W` | $2(p-1)m$ |
#
# ZB-H1's third holds where F, I and W take equally long. DualPipeV (from DeepSeek's DualPipe) sends data down the
# ranks and up again, so that each rank holds a stage and its mirror; it was made to overlap the messages of experts with
# computing, which this drawing leaves out.
#
# **Question.** Eight stages, 1F1B. How many micro-batches keep idle over work at 10%?

# %%
micro_batches_for_10_percent = ...
check("13.micro_batches", micro_batches_for_10_percent)

# %% [markdown]
# ## 2. Run it by hand
#
# The model: eight equal residual blocks. Every rank draws the same weights, and keeps its own stages.

# %%
WIDTH, ROWS, LENGTH, LAYERS = 64, 2, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def layers_of(stage, stages):
    torch.manual_seed(0)
    layers, each = [Block() for _ in range(LAYERS)], LAYERS // stages
    return nn.Sequential(*layers[stage * each : (stage + 1) * each])


def batch(step):
    torch.manual_seed(1 + step)
    return [[size * torch.randn(ROWS, LENGTH, WIDTH) for _ in range(MICRO_BATCHES)] for size in (1, 8)]  # inputs, targets


# %% [markdown]
# Two rules keep neighbours from waiting for each other without need. A send does not wait to be fetched (`isend`), and a receive names
# the message that it wants, by a *tag*. (Tags are gloo's. With NCCL the order of sends and receives must match.) A
# stage whose neighbour is on the same rank sends nothing.

# %%
class Mail:
    """Messages between stages."""

    def __init__(self, owners, like, seconds=30):
        self.owners, self.like, self.limit = owners, like, datetime.timedelta(seconds=seconds)
        self.here, self.sent = {}, []

    def put(self, tensor, source, target, k):
        tag = 1000 * (2 * max(source, target) + (source < target)) + k
        if self.owners.get(target) == dist.get_rank():
            self.here[tag] = tensor
        elif target in self.owners:  # nobody stands before stage 0
            self.sent.append(dist.isend(tensor.contiguous(), self.owners[target], tag=tag))

    def take(self, source, target, k):
        tag = 1000 * (2 * max(source, target) + (source < target)) + k
        if self.owners[source] == dist.get_rank():
            return self.here.pop(tag)
        tensor = torch.empty_like(self.like)
        dist.irecv(tensor, self.owners[source], tag=tag).wait(self.limit)
        return tensor

    def close(self):
        for work in self.sent:  # a message that is dropped before it is fetched breaks the connection
            work.wait()


# %% [markdown]
# And here is the interpreter. It knows no schedule; it runs its rank's list, action by action.

# %%
def run_by_hand(actions, stages, mail, inputs, targets, log):
    last, kept, losses = max(mail.owners), {}, []
    for s, kind, k in actions:
        log.append(f"{s}{kind}{k}")
        if kind == "F":
            x = inputs[k].detach() if s == 0 else mail.take(s - 1, s, k)
            y = stages[s](x.requires_grad_())
            if s == last:
                y = F.mse_loss(y, targets[k]) / len(inputs)
                losses.append(y.item())
            else:
                mail.put(y.detach(), s, s + 1, k)
            kept[s, k] = x, y, None
        elif kind in "BI":  # both need the gradient of the stage behind
            x, y, _ = kept[s, k]
            g = None if s == last else mail.take(s + 1, s, k)
            torch.autograd.backward(y, g, retain_graph=kind == "I", inputs=None if kind == "B" else [x])
            kept[s, k] = x, y, g
            mail.put(x.grad, s, s - 1, k)
        if kind == "W":
            torch.autograd.backward(kept[s, k][1], kept[s, k][2], inputs=list(stages[s].parameters()))
        if kind in "BW":
            del kept[s, k]  # the graph goes, and the activations with it
    mail.close()
    return losses


# %% [markdown]
# Three training steps on four ranks, for each of the five programs, beside one process that accumulates the same
# micro-batches. While a rank runs, `saved_for_backward` counts the bytes that autograd keeps, as your ledger of lesson 01
# did; section 3 needs them.

# %%
from utils.lessons.lesson_13.saved import saved_for_backward


def train_by_hand(rows, steps=3, micro_batches=MICRO_BATCHES):
    rank, owners = dist.get_rank(), stage_owners(rows)
    stages = {s: layers_of(s, len(owners)) for s, owner in owners.items() if owner == rank}
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for step in range(steps):
        inputs, targets = (part[:micro_batches] for part in batch(step))
        optimizer.zero_grad()
        with saved_for_backward(parameters) as saved, traffic() as sent:
            losses.append(sum(run_by_hand(rows[rank], stages, Mail(owners, inputs[0]), inputs, targets, [])))
        if step == 0:
            first = {s: torch.cat([p.grad.flatten() for p in stage.parameters()]) for s, stage in stages.items()}
        optimizer.step()
    messages = sum(row.calls for row in sent.rows if row.collective == "send")
    return {"losses": losses, "gradients": first, "kept": saved.peak_bytes, "messages": messages}


# %%
def one_process(steps=3, clip_by=None):
    model = layers_of(0, 1)
    optimizer, losses, first = torch.optim.SGD(model.parameters(), lr=0.1), [], None
    for step in range(steps):
        optimizer.zero_grad()
        for x, y in zip(*batch(step), strict=True):
            loss = F.mse_loss(model(x), y) / MICRO_BATCHES
            loss.backward()
            losses.append(loss.item())
        if step == 0:
            first = torch.cat([p.grad.flatten() for p in model.parameters()])
        if clip_by:  # section 6: the norm of these layers decides for all
            norm = nn.utils.get_total_norm([p.grad for p in model[clip_by].parameters()])
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
    return [sum(losses[i : i + MICRO_BATCHES]) for i in range(0, len(losses), MICRO_BATCHES)], first


def same_as_one_process(results):
    """Largest difference of a loss over it, and of the first gradients over their norm."""
    losses = [max(pair) for pair in zip(*(result["losses"] for result in results), strict=True)]
    parts = {s: g for result in results for s, g in result["gradients"].items()}
    gradients = torch.cat([parts[s] for s in sorted(parts)])
    return max(abs(a - b) / b for a, b in zip(losses, right, strict=True)), (gradients - wanted).norm() / wanted.norm()


# %%
right, wanted = one_process()
by_hand = {name: run_ranks(train_by_hand, RANKS, rows) for name, rows in programs.items()}
for name, results in by_hand.items():
    loss_gap, gradient_gap = same_as_one_process(results)
    print(f"{name:<17} losses {loss_gap:.1e} and gradients {gradient_gap:.1e} away from one process",
          f"  {sum(result['messages'] for result in results):>3} messages a step (counted)")
    assert loss_gap < 1e-5 and gradient_gap < 1e-6, f"{name} computes something else"
    assert sum(r["messages"] for r in results) == sends(programs[name]), "messages as the program says"

# %% [markdown]
# **Read it.** One interpreter ran all five. Order changes when things happen, and nothing else. **Interleaving's price**
# is in the last column: with $v = 2$ the pipeline has $vp - 1 = 7$ borders in place of 3, and each micro-batch crosses
# all of them twice. Each message is as large as before. DualPipeV crosses 6: at the turn, two stages share a rank.
#
# ## 3. What a stage holds
#
# **Predict.** One micro-batch alone says what a stage keeps for it. Times *in flight*, that should be the peak, to the
# byte: 4 : 3 : 2 : 1 for 1F1B, eight everywhere for GPipe.

# %%
alone = run_ranks(train_by_hand, RANKS, order("gpipe", RANKS, 1), 1, 1)
for name in ("GPipe", "1F1B", "ZB-H1"):
    row = []
    for rank, (result, one) in enumerate(zip(by_hand[name], alone, strict=True)):
        count = in_flight(programs[name][rank])
        assert result["kept"] == count * one["kept"], f"{name}, rank {rank}: not {count} micro-batches"
        row.append(f"{result['kept'] / one['kept']:.0f} x {format_bytes(one['kept'])}")
    print(f"{name:<6} kept for backward at the peak, by rank (measured):  ", ",  ".join(row))

# %% [markdown]
# **Read it.** Exact on every rank. That is what 1F1B is for: with GPipe, more micro-batches (a smaller bubble) mean more
# memory; with 1F1B memory stays at $p - i$, so $m$ may grow until the bubble is small. ZB-H1 fills the later ranks up to
# $p$: it spends memory that 1F1B leaves unused there. In a real model the last stage also holds the logits.
#
# **Question.** 1F1B, 8 stages, 4 micro-batches. How many does stage 2 (counted from 0) hold at its peak?

# %%
held_by_stage_2 = ...
check("13.held", held_by_stage_2)

# %% [markdown]
# ## 4. The timeline, measured
#
# Two cores are not four devices. But a process that *sleeps* needs no core. `SleepingStage` sleeps 20 ms in place of
# each forward, 20 for the input's gradient and 20 for the weights' (half as long where a rank holds two stages), and notes
# when. The interpreter stays as it is.
#
# **Predict.** Two small times come on top: a *launch*, between two passes of a rank that need not wait, and a *message*
# between ranks. A GPipe run of four micro-batches measures both, for all five drawings. Of three runs
# we keep the shortest: what else the machine does can only make one longer.

# %%
NAP = 0.02


def sleep_through(rows, micro_batches, rounds=3):
    rank, owners, found = dist.get_rank(), stage_owners(rows), []
    nap = NAP * RANKS / len(owners)
    inputs = [torch.ones(1) for _ in range(micro_batches)]
    for _ in range(rounds):
        stages = {s: SleepingStage(s, nap, nap, nap) for s, owner in owners.items() if owner == rank}
        dist.barrier()
        run_by_hand(rows[rank], stages, Mail(owners, inputs[0]), inputs, inputs, [])
        found.append({action: span for stage in stages.values() for action, span in stage.spans.items()})
    return found


def measured(rows, micro_batches=MICRO_BATCHES):
    by_rank = run_ranks(sleep_through, RANKS, rows, micro_batches)
    rounds = [timed(rows, {a: span for spans in one for a, span in spans.items()}) for one in zip(*by_rank, strict=True)]
    return min(rounds, key=lambda one: one.total)  # other programs can only make a round longer


_ = measured(programs["1F1B"])  # once for nothing: the first run of a process loads what it needs

# %%
def calibrated():
    found = measured(order("gpipe", RANKS, 4), 4)
    start, end = found.starts, found.ends
    launches = [start[0][k + 1] - end[0][k] for k in range(3)] + [start[-1][k + 1] - end[-1][k] for k in (4, 5, 6)]
    transfers = [start[rank + 1][0] - end[rank][0] for rank in range(3)]
    return statistics.median(launches), statistics.median(transfers)


launch, transfer = calibrated()
print(f"a launch {1e3 * launch:.1f} ms, a message {1e3 * transfer:.1f} ms (measured)")

# %%
uncut = measured(order("gpipe", RANKS, 1), 1)  # one micro-batch: the whole batch goes through at once
idle_share = 1 - uncut.busy / uncut.total
print(f"a model cut over {RANKS} ranks, its batch uncut: each rank idle {idle_share:.0%} of the step (measured)")

# %%
panels = {}
for name, rows in programs.items():
    expected, found = drawn(rows, NAP, transfer, launch), measured(rows)
    if name in ("1F1B", "ZB-H1"):
        panels[name] = Panel(rows, expected)
        panels[f"{name} on four ranks"] = Panel(rows, found, Evidence.MEASURED)
    print(f"{name:<17} bubble / work: {drawn(rows).bubble_ratio:.3f} in theory, {expected.bubble_ratio:.3f} drawn, "
          f"{found.bubble_ratio:.3f} measured")

# %%
show(draw_schedules(panels, unit="seconds"),
     alt="1F1B and ZB-H1 as drawn from calibrated times and as four sleeping processes ran them: nearly the same picture.")

# %% [markdown]
# **Read it.** The pictures agree but for gaps of milliseconds. *Theory* knows no launch and no message; *drawn* knows both. So
# *drawn* lies above *theory*, and furthest where a rank holds two stages: twice the passes and messages, or more.
# Other programs on your machine lengthen what is *measured*.
#
# ## 5. PyTorch's own
#
# In production you write no interpreter. A stage, a schedule and `step` are all:
#
# ```python
# stage = PipelineStage(module, stage_index, num_stages, device)        # this rank's layers
# schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=F.mse_loss)
# schedule.step(inputs)                       # the first stage
# schedule.step()                             # those between
# schedule.step(target=targets, losses=found)  # the last
# ```

# %%
SEVEN = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
         "DualPipeV": 2}  # with the stages of a rank


def train_pytorch(name, each, steps=3):
    rank, count = dist.get_rank(), RANKS * each
    parts = {s: layers_of(s, count) for s in chunks_of(name, rank, RANKS, count)}
    stages = [PipelineStage(part, s, count, torch.device("cpu")) for s, part in parts.items()]
    schedule = get_schedule_class(name)(stages if each > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=F.mse_loss)
    optimizer, losses = torch.optim.SGD([p for part in parts.values() for p in part.parameters()], lr=0.1), []
    for step in range(steps):
        x, y = (torch.cat(part) for part in batch(step))
        ends = {"target": y, "losses": (found := [])} if count - 1 in parts else {}
        optimizer.zero_grad()
        with traffic() as sent:
            schedule.step(*([x] if 0 in parts else []), **ends)
        losses.append(sum(loss.item() for loss in found) / MICRO_BATCHES if ends else 0.0)
        if step == 0:
            first = {s: torch.cat([p.grad.flatten() for p in part.parameters()]) for s, part in parts.items()}
        optimizer.step()
    messages = sum(row.calls for row in sent.rows if row.collective == "send")
    return {"losses": losses, "gradients": first, "messages": messages}


# %%
for name, each in SEVEN.items():
    try:
        results = run_ranks(train_pytorch, RANKS, name, each)
    except RankError as error:  # an older PyTorch lets a rank that holds two neighbours send to itself
        if "Pair is not connected" not in str(error):
            raise
        print(f"{name:<22} skipped: PyTorch {torch.__version__} cannot run it over gloo")
        continue
    loss_gap, gradient_gap = same_as_one_process(results)
    print(f"{name:<22} losses {loss_gap:.1e}, gradients {gradient_gap:.1e} from one process; {sum(r['messages'] for r in results)} messages (counted)")
    assert loss_gap < 1e-5 and gradient_gap < 1e-6, f"{name} computes something else"

# %% [markdown]
# **Read it.** Seven schedules, one result. (LoopedBFS takes micro-batches backward in reverse, so its sums round
# differently.) By default the gradients are divided by $m$ (`scale_grads=True`), which suits a loss that is a mean. A
# zero-bubble schedule gains only where `I` and `W` share no work. PyTorch cuts the graph at each weight, so that they share
# none. Our `W` walks the whole graph a second time, which is right, but slow.
#
# **Question.** Interleaved 1F1B on eight ranks, three stages on each, sixteen micro-batches. How many messages does a
# step send?

# %%
messages_of_a_step = ...
check("13.messages", messages_of_a_step)

# %% [markdown]
# ### Where it comes from
#
# Old tutorials import `Pipe`. Kakao Brain's `torchgpipe` (2020) brought GPipe to PyTorch; FairScale forked it as
# `fairscale.nn.Pipe`; PyTorch [pulled that in](https://github.com/pytorch/pytorch/pull/44090) as
# `torch.distributed.pipeline.sync.Pipe`. It drove all devices from one process, and GPipe was its only schedule. PiPPy
# took its place, and is today's `torch.distributed.pipelining`. The old name is gone:

# %%
try:
    from torch.distributed.pipeline.sync import Pipe  # noqa: F401
except ModuleNotFoundError as error:
    print(error)

# %% [markdown]
# ## 6. DeepSpeed's engine
#
# DeepSpeed's engine takes the whole list of layers, cuts it, and runs 1F1B. Micro-batches are its *accumulation steps*.

# %%
def train_deepspeed(settings, steps=3):
    deepspeed = load_deepspeed()
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    net = PipelineModule(layers=list(layers_of(0, 1)), num_stages=RANKS, loss_fn=F.mse_loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config={
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **settings})
    data = (pair for step in range(steps) for pair in zip(*batch(step), strict=True))
    return [engine.train_batch(data).item() for _ in range(steps)]


def quietly(settings):
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its layers on every start
        return train_deepspeed(settings)


# %%
rows = {"one process": right, "clipped by its whole norm": one_process(clip_by=slice(0, LAYERS))[0],
        "by the norm of stage 0": one_process(clip_by=slice(0, LAYERS // RANKS))[0]}
if not deepspeed_is_missing:
    rows["DeepSpeed, clipping 0.0"] = run_ranks(quietly, RANKS, {"gradient_clipping": 0.0})[0]
    rows["DeepSpeed as it comes"] = run_ranks(quietly, RANKS, {})[0]
    gap = max(abs(a - b) / b for a, b in zip(rows["DeepSpeed, clipping 0.0"], right, strict=True))
    assert gap < 1e-5, "without clipping DeepSpeed trains as one process does"
for name, losses in rows.items():
    print(f"{name:<26}", *(f"{loss:.5f}" for loss in losses))
norms = [part.norm().item() for part in wanted.chunk(RANKS)]
print(f"norm of the first gradient {wanted.norm():.2f}; by stage", *(f"{norm:.2f}" for norm in norms))

# %% [markdown]
# <div class="alert alert-warning"><b>Trap.</b> Since June 2026 DeepSpeed clips gradients to a norm of 1.0 unless you say
# otherwise (<a href="https://github.com/deepspeedai/DeepSpeed/pull/8068">its pull request 8068</a>). A norm above 1 is cut
# down without a word, and the losses part. Its fp32 pipeline takes the norm of the <i>first stage</i> for that of the
# model: compare the last row with the second and the third. When you compare two engines, write
# <code>"gradient_clipping": 0.0</code>.</div>
#
# ## 7. Break it, diagnose it: a schedule that never ends
#
# A colleague took 1F1B's lists and counted the ranks from the wrong end: the first rank got the list of the last. Each
# list alone looks like 1F1B. The job hangs. PyTorch's *flight recorder* keeps the last calls of each rank for such a
# moment; under NCCL it holds sends and receives, too. Under gloo it does not (the cell counts). So our interpreter keeps
# its own: `log`, to which it adds each action that it begins.

# %%
def colleague(p, m):
    rows = reversed(order("1f1b", p, m))
    return read_program([[f"{rank}{kind}{k}" for _, kind, k in row] for rank, row in enumerate(rows)])


def fly(rows):
    from utils.shims.torch_distributed import recorded_collectives

    rank, owners, log = dist.get_rank(), stage_owners(rows), []
    inputs, targets = batch(0)
    with contextlib.suppress(RuntimeError):  # what gloo raises when a receive takes too long
        run_by_hand(rows[rank], {rank: layers_of(rank, RANKS)}, Mail(owners, inputs[0], seconds=2), inputs, targets, log)
    return log, len(recorded_collectives())


# %%
hung = colleague(RANKS, MICRO_BATCHES)
for rank, (log, entries) in enumerate(run_ranks(fly, RANKS, hung)):
    print(f"rank {rank} began {', '.join(log[-3:]):<15} and stands there; its list: {' '.join(map(str, hung[rank][:6]))} ...",
          f"  ({entries} entries in PyTorch's recorder)")
try:
    check_program(hung)
except DeadlockError as error:
    print(error)

# %% [markdown]
# **Diagnose it.** Read the last action of each rank, and ask what it waits for. `0B0` waits for rank 1's backward. Rank
# 1 wants a second forward first. Rank 0 sends that only after `0B0`: a circle. The lists alone say so, before any
# rank starts: `check_program` walks them, and stops where nobody can move. In warm-up, *earlier* stages must run *ahead*.
#
# ### Right lists, and it hangs
#
# The other classic: the lists are right, and each send waits until the neighbour has fetched it.

# %%
class PoliteMail(Mail):
    def put(self, *message):
        super().put(*message)
        for work in self.sent:
            work.wait(self.limit)  # what dist.send does
        self.sent = []


def fly_politely(rows):
    rank, owners, log = dist.get_rank(), stage_owners(rows), []
    inputs, targets = batch(0)
    mail = PoliteMail(owners, inputs[0], seconds=2)
    with contextlib.suppress(RuntimeError):
        run_by_hand(rows[rank], {rank: layers_of(rank, RANKS)}, mail, inputs, targets, log)
    return log[-1]


print("last actions:", run_ranks(fly_politely, RANKS, programs["1F1B"]))

# %% [markdown]
# **Read it.** Rank 2 hands the activations of `2F1` down while rank 3 hands the gradient of `3B0` up. Each waits for the
# other to fetch, and nobody fetches; ranks 0 and 1 wait behind them. So Megatron-LM and PyTorch's 1F1B send one way and
# receive the other *in one call*; our `isend` does not wait to be fetched.
#
# ### A rank that dies
#
# To its neighbours it looks the same: a message that never goes through. The launcher says which one it was.

# %%
def dies(rows):
    if dist.get_rank() == 2:
        os.kill(os.getpid(), 9)
    return train_by_hand(rows)


try:
    run_ranks(dies, RANKS, programs["1F1B"], timeout_seconds=20)
except RankError as error:
    print(error)

# %% [markdown]
# What cannot run is refused with a sentence, before any rank starts:

# %%
lists = programs["1F1B"]
missing, doubled = [lists[0][:-1], *lists[1:]], [[*lists[0], lists[0][2]], *lists[1:]]
for attempt in (
    lambda: check_program(missing), lambda: check_program(doubled),
    lambda: order("1f1b", RANKS, 6, virtual_stages=2), lambda: even_blocks(LAYERS, 3),
):
    try:
        attempt()
    except ValueError as error:
        print(error)

# %% [markdown]
# ## 8. Scale up
#
# Seven billion parameters in Llama-2's shape, on four simulated A100s: `cut` leaves a stage of the course's Transformer,
# and PyTorch's own schedule runs it. Sequences of 2,048 tokens, eight micro-batches, bf16, no optimizer.

# %%
llama = TransformerConfig(vocabulary=32_000, hidden=4096, layers=32, heads=32, feedforward=11_008)


def simulated_stage(schedule, rank):
    found = {}

    def build():
        mesh = device_mesh(ParallelDims(pp=4), "cpu")
        with torch.device("meta"):
            part = cut(Transformer(llama).to(torch.bfloat16), even_blocks(llama.layers, 4), rank)
        sent = torch.empty(1, 2048, llama.hidden, dtype=torch.bfloat16, device="meta")
        found["passes"] = pipeline_passes([part.to_empty(device="cpu")], mesh, torch.arange(2048), sent, chunks=4,
                                          schedule=schedule, micro_batches=8)
        return part, None

    def step(part, optimizer):
        rows = torch.zeros(8, 2048, dtype=torch.long)
        found["passes"](rows, rows, 1.0)
        part.zero_grad()

    return simulate(build, step, device="A100 80GB", world=4, rank=rank, name=f"{schedule}, stage {rank}")


# %%
stages = [simulated_stage(*which) for which in (("GPipe", 0), ("1F1B", 0), ("1F1B", 3))]
for run_of_stage in stages:
    print(f"{run_of_stage.name:<15} peak {format_bytes(run_of_stage.peak_bytes):>9}, "
          f"{format_bytes(run_of_stage.breakdown['activations']):>9} of it activations (simulated)")
show(draw_over_time({run.name: run for run in stages}, "activations", title="A stage of 7B through one step"),
     alt="Activations of simulated stages: GPipe's first climbs highest, 1F1B's first half as far, 1F1B's last least.")

# %% [markdown]
# **Read it.** The three tops hold the activations of eight micro-batches, of four and of one, as you counted, now at
# real size. The *peak* does not fall as far: each stage also holds its weights and, once backward has begun, their
# gradients. The last stage has the head and the logits of its micro-batch on top.
#
# ### The price of a message
#
# GPT-3's 175 billion parameters on 64 A100s, tensor parallel over 8, 8 stages; every GPU has a network port of 25 GB/s.
# The planner knows the time of the blocks. A message between nodes makes the next stage wait, unless it is sent while
# the stage computes its next chunk. Megatron-LM does that by default, in interleaved schedules alone; its option
# `--no-overlap-p2p-communication` shows what it saves.

# %%
model, cluster = model_shape("megatron-175b"), Cluster(gpu="A100-80GB", nodes=8)
common = {"tp": 8, "pp": 8, "sequence_parallel": True, "recompute": "selective"}
plain, rows = replace(framework("megatron"), name="no overlap of sends", hides_sends=False), []
for m, v in itertools.product((64, 512), (1, 2, 4, 12)):  # m micro-batches of one sequence
    sequences = Batch(sequences=m, sequence_length=2048)
    found = estimate(model, cluster, Plan(**common, virtual_stages=v), sequences)
    waits = estimate(model, cluster, Plan(**common, virtual_stages=v, framework=plain), sequences)
    rows.append({"batch": m, "v": v, "bubble / work": f"{bubble_closed(8, m, v):.2%}", "messages": f"{2 * (8 * v - 1) * m:,}",
                 "whole step, s": found.step_seconds, "sends not hidden, s": waits.step_seconds})
display(pd.DataFrame(rows).style.format(precision=2).hide().set_caption("175B, 8 stages on 64 A100-80GB (predicted)"))

# %% [markdown]
# **Read it.** Interleaving pays where the bubble is large, so at small batches: with its messages hidden, 12 chunks save
# nearly a tenth of the small batch's step (Megatron-LM's authors report "10+%" in Narayanan and others 2021, abstract;
# published), and hardly anything of the large one. What hides the messages is software, not the schedule. In the last column
# they show: 12 chunks are slower than 4 in the small batch, and slower than none in the large one.
#
# How many hops leave a node? With TP 4 and 16 stages, two stages share a node of eight:

# %%
plan = Plan(tp=4, pp=16, sequence_parallel=True, recompute="selective")
found = estimate(model, cluster, plan, Batch(sequences=64, sequence_length=2048))
show(draw_ranks(found, title="175B, TP 4, 16 stages"), alt="TP 4 with 16 stages on 8 nodes: every second hop of the pipeline leaves its node.")
node_of = [stage * plan.tp // 8 for stage in range(plan.pp)]
out = sum(a != b for a, b in itertools.pairwise(node_of))
message = 2 * 2048 * model.hidden  # bf16, one sequence
for v in (1, 3, 6):
    leaves = v * out + (v - 1) * (node_of[0] != node_of[-1])
    print(f"v = {v}: {leaves:>2} of {16 * v - 1} hops leave a node; {format_bytes(2 * leaves * 64 * message)} in a step (predicted)")

# %% [markdown]
# **Read it.** Every second hop leaves a node, and $v$ chunks a rank multiply that by a little more than $v$.
# Tensor-parallel ranks may share a message (each sends its part), which divides the bytes per rank, not the number of
# messages.
#
# ## When to use which
#
# | schedule | use when | costs | does not help |
# |---|---|---|---|
# | GPipe | teaching; with recomputed activations | $m$ in flight | |
# | 1F1B | the default; $m$ at least $4p$ (Huang and others 2018) | in flight $p$ on the first stage | bubbles |
# | interleaved | small batch, fast links | over $v$ times the messages, more in flight | slow networks |
# | zero bubble | bubbles matter, later ranks have room | memory up to $p$ everywhere, split backward | where W is short |
# | DualPipeV | experts, whose messages overlap | two stages a rank | |
# | no pipeline | the model fits with ZeRO and TP | | |

# %%
for name in programs:
    score("13", f"{name}, 4 ranks, 8 micro-batches", peak_bytes=max(r["kept"] for r in by_hand[name]))
scoreboard("13")

# %% [markdown]
# ## Recap
#
# - A schedule is a list of actions for each rank; one interpreter runs them all, to the same losses.
# - 1F1B saves memory, not bubble: stage $i$ holds $\min(m, p - i)$ micro-batches.
# - Interleaving divides the bubble by $v$ and multiplies the messages; zero bubble spends memory.
# - A deadlock stands in the lists: walk them before you rent the machines.
#
# ### Test yourself
#
# 1. You double $m$ at a fixed batch. What happens to the bubble, to the memory of 1F1B, to the messages?
# 2. Why can ZB-H1 not do better than $(p-1)/(3m)$ with F, I and W alike?
#
# <details><summary>Answers</summary>
#
# 1. The bubble halves. Micro-batches halve, and equally many are in flight: activations halve (for $m \ge p$). Twice as many messages,
#    each half as large.
# 2. The last stage's first forward starts after $p - 1$ passes, and then it has $3m$ passes to run.
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/advanced/13_pipelines.ipynb), in a copy: `make my-labs` makes one. Then compare with the
# [solution](../../solutions/advanced/13_pipelines.ipynb). Next: [lesson 14](14_three_dimensions.ipynb), where
# tensor, pipeline and data parallelism meet.
#
# **References.** Huang and others 2018, *GPipe*, [arXiv:1811.06965](https://arxiv.org/abs/1811.06965). Narayanan and
# others 2021, [arXiv:2104.04473](https://arxiv.org/abs/2104.04473). Qi and others 2023, *Zero Bubble Pipeline
# Parallelism*, [arXiv:2401.10241](https://arxiv.org/abs/2401.10241). Kim and others 2020, *torchgpipe*,
# [arXiv:2004.09910](https://arxiv.org/abs/2004.09910). DeepSeek-AI 2024,
# [arXiv:2412.19437](https://arxiv.org/abs/2412.19437). PyTorch,
# [pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html).
