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
# **The question.** Whatever its schedule, a pipeline runs the same forward and backward passes. What does their *order*
# decide?
#
# **Promise.** You write a program of 25 lines that runs *any* schedule on four real ranks. You predict bubble, memory and
# messages, and measure all three; and you find a deadlock before it runs.
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

# %% jupyter={"source_hidden": true}
import contextlib
import datetime
import itertools
from dataclasses import replace

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from utils import Batch, Cluster, Evidence, Plan, RankError, check, draw_over_time, draw_schedules, estimate, format_bytes
from utils import model_shape, run_ranks, score, scoreboard, show, traffic
from utils.parallel import DeadlockError, check_program, chunks_of, read_program, stage_owners
from utils.planner import framework
from utils.planner.schedules import bubble_closed, in_flight, schedule_actions, run_schedule, count_messages
from utils.views import Panel
from utils.lessons.lesson_13.saved import saved_for_backward
from utils.lessons.lesson_13.small_model import batch, farthest, layers_of, one_process
from utils.lessons.lesson_13.timed import fastest, launch_and_message, sleep_through

# %% [markdown]
# ## 1. A schedule is a program
#
# A pipeline cuts the model into **stages** of layers, one or more on each rank. That saves memory and sends little, but
# one rank works while all others wait. So a batch is cut into $m$ **micro-batches**, which follow each other through the
# $p$ ranks, and what is still idle is the *bubble*. New words stand in the [glossary](../00_glossary.ipynb).
#
# `2F0` is an **action**: stage 2, forward, micro-batch 0. `B` is its backward, twice as long as a forward. **Zero bubble** schedules
# cut it in two: `I` gives the gradient of the stage's input, which the neighbour waits for, and `W` that of its weights, which
# nobody waits for. A schedule is nothing but a list of actions for each rank:

# %% tags=["nbval-check-output"]
RANKS, MICRO_BATCHES = 4, 8
programs = {
    "GPipe": schedule_actions("gpipe", RANKS, MICRO_BATCHES),
    "1F1B": schedule_actions("1f1b", RANKS, MICRO_BATCHES),
    "interleaved 1F1B": schedule_actions("1f1b", RANKS, MICRO_BATCHES, virtual_stages=2),
    "ZB-H1": schedule_actions("zb-h1", RANKS, MICRO_BATCHES),
}
for rank, row in enumerate(programs["1F1B"]):
    print(f"1F1B, rank {rank}:", *row)

# %%
def drawn(rows, forward=1.0, transfer=0.0, launch=0.0):
    """An action starts when its rank is free and its input is there: that is all a drawing needs."""
    check_program(rows, MICRO_BATCHES)  # every action once, and no deadlock
    share = RANKS / len(stage_owners(rows))  # with two stages on a rank, each has half of the layers
    return run_schedule(rows, forward * share, 2 * forward * share, transfer, launch=launch)


show(draw_schedules({name: Panel(rows, drawn(rows)) for name, rows in programs.items()},
                    title="4 ranks, 8 micro-batches, backward twice as long as forward"),
     alt="Four schedules on four ranks: GPipe and 1F1B end at the same time; interleaved and ZB-H1 end earlier.")
idle = [drawn(programs[name]).total - drawn(programs[name]).busy for name in ("GPipe", "1F1B")]
print(f"your bet: {my_bet_percent}%; 1F1B idles {100 * (1 - idle[1] / idle[0]):.0f}% less than GPipe (predicted)")

# %% [markdown]
# **Read it.** 1F1B saves **memory, not bubble**: GPipe and 1F1B end at the same moment. What falls is *in flight*, the
# micro-batches whose activations wait for their backward: stage $i$ holds $\min(m, p - i)$ of them, not $m$. (Not $p$
# either, as is often said: the last stage holds one.) The others shorten the bubble, each for another price:
#
# | schedule | idle / work | in flight on rank $i$ | messages in a step |
# |---|---|---|---|
# | GPipe | $(p-1)/m$ | $m$ | $2(p-1)m$ |
# | 1F1B | $(p-1)/m$ | $\min(m, p-i)$ | $2(p-1)m$ |
# | interleaved, $v$ chunks | $(p-1)/(vm)$ | more: the drawing counts (a chunk is $1/v$) | $2(vp-1)m$ |
# | ZB-H1, with F, I and W equally long | $(p-1)/(3m)$ | $\min(m, p)$, until `W` | $2(p-1)m$ |
#
# **Question.** Eight stages, 1F1B. How many micro-batches keep idle over work at 10%?

# %%
micro_batches_for_10_percent = ...
check("13.micro_batches", micro_batches_for_10_percent)

# %% [markdown]
# ## 2. Run it by hand
#
# Eight equal residual blocks: `layers_of(stage, stages)` gives a stage's share. Two rules keep neighbours from waiting
# for each other without need. A send does not wait to be fetched (`isend`), and a receive names
# the message that it wants, by a *tag*. (Tags are gloo's. With NCCL the order of sends and receives must match.) A
# stage whose neighbour is on the same rank sends nothing.

# %%
class Mail:
    def __init__(self, owners, like, seconds=30):
        self.owners, self.like, self.limit = owners, like, datetime.timedelta(seconds=seconds)
        self.here, self.sent = {}, []

    def put(self, tensor, source, target, k):
        tag = 1000 * (2 * max(source, target) + (source < target)) + k  # of a border, a direction, a micro-batch
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
# Three training steps on four ranks, for each program, beside one process that accumulates the same
# micro-batches. `saved_for_backward` counts the bytes that autograd keeps meanwhile, as your ledger of lesson 01
# did; section 3 needs them.

# %%
def train_by_hand(rows, steps=3, micro_batches=MICRO_BATCHES):
    rank, owners, losses = dist.get_rank(), stage_owners(rows), []
    stages = {s: layers_of(s, len(owners)) for s, owner in owners.items() if owner == rank}
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
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
whole = one_process()
by_hand = {name: run_ranks(train_by_hand, RANKS, rows) for name, rows in programs.items()}
for name, results in by_hand.items():
    loss_gap, gradient_gap = farthest(results, whole)
    print(f"{name:<17} losses {loss_gap:.1e} and gradients {gradient_gap:.1e} away from one process",
          f"  {sum(result['messages'] for result in results):>3} messages a step (counted)")
    assert loss_gap < 1e-5 and gradient_gap < 1e-6, f"{name} computes something else"
    assert sum(r["messages"] for r in results) == count_messages(programs[name]), "messages as the program says"

# %% [markdown]
# **Read it.** One interpreter ran all four. Order decides when things happen, and nothing of what is computed.
# **Interleaving's price** is in the last column: with $v = 2$ the pipeline has $vp - 1 = 7$ borders in place of 3, and each
# micro-batch crosses all of them twice. Each message is as large as before.
#
# ## 3. What a stage holds
#
# **Predict.** One micro-batch alone says what a stage keeps for it. Times *in flight*, that should be the peak, to the
# byte: 4 : 3 : 2 : 1 for 1F1B, eight everywhere for GPipe.

# %%
alone = run_ranks(train_by_hand, RANKS, schedule_actions("gpipe", RANKS, 1), 1, 1)
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
# $p$: it spends memory that 1F1B leaves unused there.
#
# **Question.** 1F1B, 8 stages, 4 micro-batches. How many does stage 2 (counted from 0) hold at its peak?

# %%
held_by_stage_2 = ...
check("13.held", held_by_stage_2)

# %% [markdown]
# ### At real size
#
# Seven billion parameters in Llama-2's shape, on four simulated A100s; PyTorch's own schedule runs each stage.
# Sequences of 2,048 tokens, eight micro-batches, bf16, no optimizer.

# %% jupyter={"source_hidden": true}
from utils import Transformer, TransformerConfig, simulate
from utils.parallel import ParallelDims, keep_chunk, device_mesh, even_blocks, pipeline_passes

llama = TransformerConfig(vocabulary=32_000, hidden=4096, layers=32, heads=32, feedforward=11_008)


def simulated_stage(schedule, rank):
    found = {}

    def build():
        with torch.device("meta"):
            part = keep_chunk(Transformer(llama).to(torch.bfloat16), even_blocks(llama.layers, 4), rank)
        sent = torch.empty(1, 2048, llama.hidden, dtype=torch.bfloat16, device="meta")
        found["passes"] = pipeline_passes([part.to_empty(device="cpu")], device_mesh(ParallelDims(pp=4), "cpu"),
                                          torch.arange(2048), sent, chunks=4, schedule=schedule, micro_batches=8)
        return part, None

    def step(part, optimizer):
        rows = torch.zeros(8, 2048, dtype=torch.long)
        found["passes"](rows, rows, 1.0)
        part.zero_grad()

    return simulate(build, step, device="A100 80GB", world=4, rank=rank, name=f"{schedule}, stage {rank}")


# %%
stages = [simulated_stage(*which) for which in (("GPipe", 0), ("1F1B", 0), ("1F1B", 3))]
for run_of_stage in stages:
    top = run_of_stage.timeline.series()["activations"].max()
    print(f"{run_of_stage.name:<15} activations at their top {format_bytes(top):>9}; peak of all memory "
          f"{format_bytes(run_of_stage.peak_bytes):>9}, {format_bytes(run_of_stage.breakdown['activations']):>9} of it activations (simulated)")
show(draw_over_time({run.name: run for run in stages}, "activations", title="7B in 4 stages, 8 micro-batches of 2,048 tokens"),
     alt="Activations of simulated stages: GPipe's first climbs highest, 1F1B's first half as far, 1F1B's last least.")

# %% [markdown]
# **Read it.** The tops hold the activations of eight micro-batches, of four and of one, as you counted. The *peak* of all
# memory does not fall as far: each stage also holds its weights and, once backward has begun, their gradients. GPipe's comes
# after the top: the first gradients are there, and some activations gone.
#
# ## 4. The timeline, measured
#
# Two cores are not four devices. But a process that *sleeps* needs no core: here stages sleep 20 ms in place of
# each forward, 20 for the input's gradient and 20 for the weights' (half as long where a rank holds two stages), and note
# when. The interpreter stays as it is.
#
# **Predict.** Two small times come on top: a *launch*, between two passes of a rank that need not wait, and a *message*
# between ranks. A GPipe run of four micro-batches measures both, for all drawings. Of three runs
# we keep the shortest: what else the machine does can only make one longer.

# %%
NAP = 0.02


def naps(actions, stages, owners, inputs):
    run_by_hand(actions, stages, Mail(owners, inputs[0]), inputs, inputs, [])


def measured(rows, micro_batches=MICRO_BATCHES):
    return fastest(rows, run_ranks(sleep_through, RANKS, naps, rows, micro_batches, NAP))


_ = measured(programs["1F1B"])  # once for nothing: the first run of a process loads what it needs
launch, transfer = launch_and_message(measured(schedule_actions("gpipe", RANKS, 4), 4))
print(f"a launch {1e3 * launch:.1f} ms, a message {1e3 * transfer:.1f} ms (measured)")
uncut = measured(schedule_actions("gpipe", RANKS, 1), 1)  # one micro-batch: the whole batch goes through at once
print(f"a model cut over {RANKS} ranks, its batch uncut: each rank idle {1 - uncut.busy / uncut.total:.0%} of the step (measured)")

# %%
panels = {}
for name, rows in programs.items():
    expected, found = drawn(rows, NAP, transfer, launch), measured(rows)
    if name in ("1F1B", "ZB-H1"):
        panels[name] = Panel(rows, expected)
        panels[f"{name} on four ranks"] = Panel(rows, found, Evidence.MEASURED)
    print(f"{name:<17} bubble / work: {drawn(rows).bubble_ratio:.3f} in theory, {expected.bubble_ratio:.3f} drawn, "
          f"{found.bubble_ratio:.3f} measured")
show(draw_schedules(panels, unit="seconds"),
     alt="1F1B and ZB-H1 as drawn from calibrated times and as four sleeping processes ran them: nearly the same picture.")

# %% [markdown]
# **Read it.** A batch that is not cut leaves each rank idle three quarters of the time; the schedules bring that down as
# drawn. *Theory* knows no launch and no message; *drawn* knows both, and so lies
# above.
#
# ### The price of a message
#
# GPT-3's 175 billion parameters on 64 A100s, tensor parallel over 8, 8 stages; every GPU has a network port of 25 GB/s.
# A message between nodes makes the next stage wait, unless it is sent while
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

# %%
node_of = [stage * 4 // 8 for stage in range(16)]  # TP 4 and 16 stages: two stages share a node of eight
out = sum(a != b for a, b in itertools.pairwise(node_of))
message = 2 * 2048 * model.hidden  # bf16, one sequence
for v in (1, 3, 6):
    leaves = v * out + (v - 1) * (node_of[0] != node_of[-1])
    print(f"v = {v}: {leaves:>2} of {16 * v - 1} hops leave a node; {format_bytes(2 * leaves * 64 * message)} in a step of 64 (predicted)")

# %% [markdown]
# **Read it.** Interleaving pays where the bubble is large, so at small batches: with its messages hidden, 12 chunks save
# nearly a tenth of the small batch's step (Narayanan and others 2021 report "10+%"; published), and under 2% of the
# large one's. Not hidden, 12 chunks are slower than 4 in the small batch, and slower than none in the large one. And with
# TP 4 and 16 stages every second hop leaves its node, which $v$ chunks multiply by a little more than $v$.
#
# ## 5. PyTorch's own
#
# In production you write no interpreter: a stage, a schedule and `step` are all.

# %%
SEVEN = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
         "DualPipeV": 2}  # with the stages of a rank


def train_pytorch(name, each, steps=3):
    rank, count, losses = dist.get_rank(), RANKS * each, []
    parts = {s: layers_of(s, count) for s in chunks_of(name, rank, RANKS, count)}
    stages = [PipelineStage(part, s, count, torch.device("cpu")) for s, part in parts.items()]
    schedule = get_schedule_class(name)(stages if each > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD([p for part in parts.values() for p in part.parameters()], lr=0.1)
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
    return {"losses": losses, "gradients": first, "messages": sum(r.calls for r in sent.rows if r.collective == "send")}


# %%
for name, each in SEVEN.items():
    try:
        results = run_ranks(train_pytorch, RANKS, name, each)
    except RankError as error:  # an older PyTorch lets a rank that holds two neighbours send to itself
        if "Pair is not connected" not in str(error):
            raise
        print(f"{name:<22} skipped: PyTorch {torch.__version__} cannot run it over gloo")
        continue
    loss_gap, gradient_gap = farthest(results, whole)
    print(f"{name:<22} losses {loss_gap:.1e}, gradients {gradient_gap:.1e} from one process; {sum(r['messages'] for r in results)} messages (counted)")
    assert loss_gap < 1e-5 and gradient_gap < 1e-6, f"{name} computes something else"

# %% [markdown]
# **Read it.** Seven schedules, one result. (LoopedBFS takes micro-batches backward in reverse, so its sums round
# differently.) By default gradients are divided by $m$ (`scale_grads=True`), which suits a loss that is a mean. A
# zero-bubble schedule gains only where `I` and `W` share no work: PyTorch cuts the graph at each weight, so that they share
# none. Our `W` walks the whole graph again, which is right, but slow. The last two fold the pipeline to a V: a rank
# holds a stage and its mirror, and at the turn two stages share a rank.
#
# **Question.** Interleaved 1F1B on eight ranks, three stages on each, sixteen micro-batches. How many messages does a
# step send?

# %%
messages_of_a_step = ...
check("13.messages", messages_of_a_step)

# %% [markdown]
# ### Where it comes from
#
# Old tutorials import `Pipe`: GPipe in one process that drove all devices. It came from `torchgpipe` by way of FairScale.
# `torch.distributed.pipelining` took its place, and the old name is gone:

# %%
try:
    from torch.distributed.pipeline.sync import Pipe  # noqa: F401
except ModuleNotFoundError as error:
    print(error)

# %% [markdown]
# ## 6. Break it, diagnose it: an order that never ends
#
# A colleague took 1F1B's lists and counted the ranks from the wrong end: the first rank got the list of the last. Each
# list alone looks like 1F1B. The job hangs. Our interpreter's `log` has each action that a rank began:

# %%
def fly(rows, post=Mail):
    rank, owners, log = dist.get_rank(), stage_owners(rows), []
    inputs, targets = batch(0)
    with contextlib.suppress(RuntimeError):  # what gloo raises when a message takes too long
        run_by_hand(rows[rank], {rank: layers_of(rank, RANKS)}, post(owners, inputs[0], seconds=2), inputs, targets, log)
    return log


lists = reversed(programs["1F1B"])
hung = read_program([[f"{rank}{kind}{k}" for _, kind, k in row] for rank, row in enumerate(lists)])
for rank, log in enumerate(run_ranks(fly, RANKS, hung)):
    print(f"rank {rank} began {', '.join(log[-3:]):<15} and stands there; its list: {' '.join(map(str, hung[rank][:6]))} ...")
try:
    check_program(hung)
except DeadlockError as error:
    print(error)

# %% [markdown]
# **Diagnose it.** Read the last action of each rank, and ask what it waits for. `0B0` waits for rank 1's backward. Rank
# 1 wants a second forward first. Rank 0 sends that only after `0B0`: a circle. The lists alone say so, before any
# rank starts: `check_program` walks them, and stops where nobody can move. In warm-up, *earlier* stages must run *ahead*.
#
# The other classic: the lists are right, and each send waits until the neighbour has fetched it.

# %%
class PoliteMail(Mail):
    def put(self, *message):
        super().put(*message)
        for work in self.sent:
            work.wait(self.limit)  # what dist.send does
        self.sent = []


print("last actions:", [log[-1] for log in run_ranks(fly, RANKS, programs["1F1B"], PoliteMail)])

# %% [markdown]
# **Read it.** Rank 2 hands the activations of `2F1` down while rank 3 hands the gradient of `3B0` up. Each waits for the
# other to fetch, and nobody fetches; ranks 0 and 1 wait behind them. So Megatron-LM and PyTorch's 1F1B send one way and
# receive the other *in one call*; our `isend` does not wait to be fetched.

# %%
for name in programs:
    score("13", f"{name}, kept for backward, 4 ranks", peak_bytes=max(r["kept"] for r in by_hand[name]))
scoreboard("13")

# %% [markdown]
# ## Recap
#
# - Order decides idle time, memory, messages, and whether the step ends at all; never the result.
# - 1F1B saves memory, not bubble: stage $i$ holds $\min(m, p - i)$ micro-batches.
# - Interleaving divides the bubble by $v$ and multiplies the messages; zero bubble spends memory.
# - A deadlock stands in the lists: walk them before you rent the machines.
#
# | schedule | use when | costs |
# |---|---|---|
# | 1F1B | the default; $m$ at least $4p$ (Huang and others 2018) | in flight $p$ on the first stage |
# | interleaved | small batch, fast links | over $v$ times the messages, more in flight |
# | zero bubble | bubbles matter, later ranks have room | memory up to $p$ everywhere, split backward |
# | no pipeline | the model fits with ZeRO and TP | |
#
# **Test yourself.** You double $m$ at a fixed batch. What happens to the bubble, to the memory of 1F1B, to the messages?
#
# <details><summary>Answer</summary>
#
# The bubble halves. Micro-batches halve, and equally many are in flight: activations halve (for $m \ge p$). Twice as many messages,
# each half as large.
#
# </details>
#
# Do the [lab](../../labs/advanced/13_pipelines.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/13_pipelines.ipynb). Next, [lesson 14](14_three_dimensions.ipynb): tensor, pipeline and
# data parallelism together.
#
# **References.** Huang and others 2018, *GPipe*, [arXiv:1811.06965](https://arxiv.org/abs/1811.06965). Narayanan and
# others 2021, [arXiv:2104.04473](https://arxiv.org/abs/2104.04473). Qi and others 2023, *Zero Bubble Pipeline
# Parallelism*, [arXiv:2401.10241](https://arxiv.org/abs/2401.10241). PyTorch,
# [pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html).

# %% [markdown]
# ## On Monday
#
# Use it when a model does not fit by ZeRO and tensor parallelism inside a node. You have its `layers` in order, `device` is
# this rank's, `dist.init_process_group()` has run; start with `torchrun --nproc-per-node 4`. Every rank reads the same batches.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.pipelining import PipelineStage, Schedule1F1B
#
# rank, stages = dist.get_rank(), dist.get_world_size()
# first, end = (len(layers) * r // stages for r in (rank, rank + 1))
# part = nn.Sequential(*layers[first:end]).to(device)
# stage = PipelineStage(part, rank, stages, device)
# schedule = Schedule1F1B(stage, n_microbatches=4 * stages, loss_fn=loss_fn)  # must divide the batch
# optimizer = torch.optim.AdamW(part.parameters())  # of its own layers
# losses = []
# for inputs, targets in loader:
#     optimizer.zero_grad()
#     if rank == 0:
#         schedule.step(inputs)
#     elif rank < stages - 1:
#         schedule.step()
#     else:
#         found = []
#         schedule.step(target=targets, losses=found)
#         losses.append(sum(loss.item() for loss in found) / len(found))
#     norm = torch.nn.utils.get_total_norm([p.grad for p in part.parameters()])
#     dist.all_reduce(square := norm**2)  # over all stages: else each would clip by a norm of its own
#     torch.nn.utils.clip_grads_with_norm_(part.parameters(), 1.0, square.sqrt())
#     optimizer.step()
# ```
#
# **Look at** the last rank's losses: those of one process. Then at `torch.cuda.max_memory_allocated()` of rank 0: put
# `ScheduleGPipe` in, and it rises. With DeepSpeed, after `deepspeed.init_distributed()`; micro-batches are its
# *accumulation steps*:
#
# ```python
# from deepspeed.pipe import PipelineModule
#
# net = PipelineModule(layers=layers, num_stages=stages, loss_fn=loss_fn, partition_method="uniform")
# engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config={
#     "train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": micro_batches,
#     "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
#     "gradient_clipping": 0.0,
# })
# losses = [engine.train_batch(data).item() for _ in range(steps)]  # data: an iterator over micro-batches
# ```
#
# **Look at** the losses again. Without the line `gradient_clipping` they part: since June 2026 DeepSpeed clips to a norm of 1.0
# unless told otherwise ([8068](https://github.com/deepspeedai/DeepSpeed/pull/8068)), and its fp32 pipeline takes the first
# stage's norm for the model's.
