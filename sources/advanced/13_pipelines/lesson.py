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
# **The question.** GPipe, 1F1B, interleaved 1F1B and ZB-H1 do the same work, some in smaller pieces. What does its
# *order* decide?
#
# **Promise.** You run four orders on four processes, with one interpreter of 25 lines. You predict their idle time, memory
# and messages, and find a deadlock before you run it. All stages here are equally long.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# GPipe runs all forward passes, then all backward passes. 1F1B alternates as soon as it can. On four stages, with eight
# micro-batches and messages that take no time, by how many percent does 1F1B shorten the idle time of GPipe?

# %%
my_bet_percent = 50

# %% tags=["setup"]
here = setup("advanced/13")

# %% jupyter={"source_hidden": true}
import contextlib
import itertools

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from utils import Batch, Cluster, Evidence, Plan, check, draw_breakdown, estimate, format_bytes
from utils import model_shape, run_ranks, show, traffic
from utils.parallel import DeadlockError, check_program, chunks_of, read_program, stage_owners
from utils.planner.schedules import count_messages, in_flight, run_schedule, schedule_actions
from utils.planner.step_seconds.collectives import hops_across_nodes, send_seconds
from utils.views import Panel
from utils.lessons.lesson_13.mail import Mail
from utils.lessons.lesson_13.older_torch import results_or_skip
from utils.lessons.lesson_13.orders_figure import draw_orders
from utils.lessons.lesson_13.placement_figure import draw_placements
from utils.lessons.lesson_13.saved import saved_for_backward
from utils.lessons.lesson_13.small_model import batch, farthest, layers_of, one_process
from utils.lessons.lesson_13.timed import launch_and_message, rounds_of, sleep_through

# %% [markdown]
# ## 1. A schedule is a program
#
# **Pipeline parallelism** cuts a model into **stages** of layers, and each of $p$ ranks holds one or more. The batch is cut
# into $m$ **micro-batches**, so that ranks can work on different ones at once. The time in which ranks wait is the
# **bubble** ([glossary](../00_glossary.ipynb)).
#
# A schedule is a list of **actions** for each rank. `2F0` is the forward pass of micro-batch 0 on stage 2, and `2B0` its
# backward pass. **Zero bubble** schedules cut a backward in two. `I` computes the gradient of the stage's input, for which
# the stage before it waits. `W` computes the gradient of the weights, for which no other rank waits, so it may come later.

# %% tags=["nbval-check-output"]
RANKS, MICRO_BATCHES, STEPS = 4, 8, 5
orders = {"GPipe": ("gpipe", 1), "1F1B": ("1f1b", 1), "interleaved 1F1B": ("1f1b", 2), "ZB-H1": ("zb-h1", 1)}
programs = {name: schedule_actions(order, RANKS, MICRO_BATCHES, v) for name, (order, v) in orders.items()}
for rank, row in enumerate(programs["1F1B"]):
    print(f"1F1B, rank {rank}:", *row)

# %%
def drawn(rows, forward=1.0, transfer=0.0, launch=0.0):
    """An action starts when its rank is free and its input is there: that is all a drawing needs."""
    check_program(rows, MICRO_BATCHES)  # every action once, and no deadlock
    share = RANKS / len(stage_owners(rows))  # with two stages on a rank, each has half of the layers
    return run_schedule(rows, forward * share, 2 * forward * share, transfer, launch=launch)


show(draw_orders({name: Panel(rows, drawn(rows)) for name, rows in programs.items()},
                 title="4 ranks, 8 micro-batches, equal stages, backward twice as long as forward, messages free",
                 unit="time, in forward passes of a rank"),
     alt="Four schedules on four ranks: GPipe and 1F1B end at the same time; interleaved and ZB-H1 end earlier.")
idle = [drawn(programs[name]).total - drawn(programs[name]).busy for name in ("GPipe", "1F1B")]
print(f"your bet: {my_bet_percent}%; 1F1B idles {100 * (1 - idle[1] / idle[0]):.0f}% less than GPipe (predicted)")

# %% [markdown]
# **Read it.** GPipe and 1F1B end at the same moment: while messages are free, 1F1B saves **memory, not idle time**. In both,
# the last rank waits for $p - 1$ forwards at the start and $p - 1$ backwards at the end. It works for $m$ of each, so idle
# time over work is $(p-1)/m$. What 1F1B lowers is what is **in flight**: micro-batches whose activations wait for their
# backward, each counted by the part of the rank's layers that it has passed.
#
# With **interleaving**, a rank holds $v$ **chunks** of layers, and waits for passes that are $v$ times shorter. Here $v$ is
# 2, so rank 0 holds up to eleven halves, or 5.5. **ZB-H1** is 1F1B with split backwards: a `W` that was put off fills a wait at
# the end.
#
# The **placement** says which rank holds which stage.

# %%
placements = {"one stage on a rank: GPipe, 1F1B, ZB-H1": [0, 1, 2, 3], "ring: interleaved": [0, 1, 2, 3, 0, 1, 2, 3],
              "V: ZBV, DualPipeV": [0, 1, 2, 3, 3, 2, 1, 0]}
show(draw_placements(placements, MICRO_BATCHES),
     alt="Stages on four ranks: in a row with 3 borders, as a ring with 7, as a V with 6 borders between ranks.")

# %% [markdown]
# **Read it.** Each micro-batch crosses each red arrow twice, as activations and as their gradient. So the placement decides
# the number of messages.
#
# | with free messages, $m \ge p$ | idle / work | most in flight on rank 0 |
# |---|---|---|
# | GPipe | $(p-1)/m$ | $m$ |
# | 1F1B | $(p-1)/m$ | $p$ |
# | interleaved, $p$ divides $m$ | $(p-1)/(vm)$ | $\min(m, p + (p-1)/v)$ |
# | ZB-H1, F, I and W equally long | $(p-1)/(3m)$ | $p$ |

# %%
cases = [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("zb-h1", 1)]
for p, times, (order, v) in itertools.product(range(2, 9), (1, 2, 4), cases):
    m = times * p
    rows = schedule_actions(order, p, m, v)
    ratio = (p - 1) / (3 * m if order == "zb-h1" else v * m)
    held = {"gpipe": m, "zb-h1": p}.get(order, min(m, p + (p - 1) / v) if v > 1 else p)
    assert abs(run_schedule(rows, 1 / v, 2 / v).bubble_ratio - ratio) < 1e-9, f"{order}, {p} ranks: it idles otherwise"
    assert abs(in_flight(rows[0]) / v - held) < 1e-9, f"{order}, {p} ranks: rank 0 holds another number"
print("the table holds for 2 to 8 ranks, p, 2p or 4p micro-batches, and up to 3 chunks (predicted)")

# %% [markdown]
# **Question.** Eight stages, 1F1B, free messages. How many micro-batches keep idle over work at 10%?

# %%
micro_batches_for_10_percent = ...
check("13.micro_batches", micro_batches_for_10_percent)

# %% [markdown]
# ## 2. Four orders, the same gradients
#
# The interpreter knows no schedule: it runs its rank's list. `mail.put` sends and goes on at once, `mail.take` waits for the
# message that it names by a *tag*.

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
        if kind == "W":  # walks the graph from its end again; PyTorch's goes on from what its I has kept
            torch.autograd.backward(kept[s, k][1], kept[s, k][2], inputs=list(stages[s].parameters()))
        if kind in "BW":
            del kept[s, k]  # the graph goes, and the activations with it
    mail.close()
    return losses


# %% [markdown]
# Each program trains five steps of eight equal layers in fp64 on four ranks, beside one process that accumulates the same
# micro-batches. The fifth program has a **planted fault**: one `W` of ZB-H1 is missing.

# %%
def train_by_hand(rows, steps=STEPS, micro_batches=MICRO_BATCHES):
    rank, owners, losses = dist.get_rank(), stage_owners(rows), []
    stages = {s: layers_of(s, len(owners)) for s, owner in owners.items() if owner == rank}
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(steps):
        inputs, targets = (part[:micro_batches] for part in batch(step))
        optimizer.zero_grad()
        with saved_for_backward(parameters) as saved, traffic() as sent:  # counts what autograd saves for backward
            losses.append(sum(run_by_hand(rows[rank], stages, Mail(owners, inputs[0]), inputs, targets, [])))
        optimizer.step()
    last = {s: torch.cat([p.grad.flatten() for p in stage.parameters()]) for s, stage in stages.items()}
    messages = sum(row.calls for row in sent.rows if row.collective == "send")
    return {"losses": losses, "gradients": last, "kept": saved.peak_bytes, "messages": messages}


# %%
whole = one_process(STEPS)
faulty = [[action for action in row if str(action) != "1W3"] for row in programs["ZB-H1"]]
by_hand = {name: run_ranks(train_by_hand, RANKS, rows) for name, rows in {**programs, "without 1W3": faulty}.items()}
for name, results in by_hand.items():
    loss_gap, gradient_gap = farthest(results, whole)
    print(f"{name:<17} losses {loss_gap:.1e}, last gradients {gradient_gap:.1e} from one process;",
          f"{sum(result['messages'] for result in results):>3} messages a step (counted)")
    if name in programs:
        assert loss_gap < 1e-12 and gradient_gap < 1e-12, f"{name} computes something else"
        assert sum(r["messages"] for r in results) == count_messages(programs[name]), "messages as the program says"

# %% [markdown]
# **Read it.** All four orders compute what one process does, up to the rounding of fp64. The missing `W` shows.
#
# ### Seven schedules of PyTorch compute the same
#
# At work a stage, a schedule and `step` suffice. Model, data and optimizer are as above.

# %%
SEVEN = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
         "DualPipeV": 2}  # with the stages of a rank


def train_pytorch(name, each):
    rank, count, losses = dist.get_rank(), RANKS * each, []
    parts = {s: layers_of(s, count) for s in chunks_of(name, rank, RANKS, count)}
    stages = [PipelineStage(part, s, count, torch.device("cpu")) for s, part in parts.items()]
    schedule = get_schedule_class(name)(stages if each > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD([p for part in parts.values() for p in part.parameters()], lr=0.1)
    for step in range(STEPS):
        x, y = (torch.cat(part) for part in batch(step))
        ends = {"target": y, "losses": (found := [])} if count - 1 in parts else {}
        optimizer.zero_grad()
        with traffic() as sent:
            schedule.step(*([x] if 0 in parts else []), **ends)
        losses.append(sum(loss.item() for loss in found) / MICRO_BATCHES if ends else 0.0)
        optimizer.step()
    last = {s: torch.cat([p.grad.flatten() for p in part.parameters()]) for s, part in parts.items()}
    return {"losses": losses, "gradients": last, "messages": sum(r.calls for r in sent.rows if r.collective == "send")}


# %%
for name, each in SEVEN.items():
    if results := results_or_skip(train_pytorch, RANKS, name, each):  # skips what an older PyTorch cannot run
        loss_gap, gradient_gap = farthest(results, whole)
        print(f"{name:<22} losses {loss_gap:.1e}, last gradients {gradient_gap:.1e} from one process;",
              f"{sum(r['messages'] for r in results):>3} messages (counted)")
        assert loss_gap < 1e-12 and gradient_gap < 1e-12, f"{name} computes something else"

# %% [markdown]
# **Read it.** All agree with one process, and they send the 48, 112 or 96 messages of their placements.
#
# **Question.** Interleaved 1F1B on eight ranks, three stages on each, sixteen micro-batches. How many messages does a
# step send?

# %%
messages_of_a_step = ...
check("13.messages", messages_of_a_step)

# %% [markdown]
# ## 3. A rank holds what is in flight
#
# The gradients do not tell the four orders apart. Memory does.
#
# **Predict.** What autograd saves on a rank should peak at its micro-batches in flight, times what one of them saves. Under
# 1F1B rank $i$ has $\min(m, p - i)$ in flight, here 4, 3, 2 and 1. Under GPipe each rank has eight. On the last rank the
# loss saves some more.

# %%
alone = run_ranks(train_by_hand, RANKS, schedule_actions("gpipe", RANKS, 1), 1, 1)
one, loss = alone[0]["kept"], alone[-1]["kept"] - alone[0]["kept"]  # the last stage also keeps what its loss needs
print(f"one micro-batch: {format_bytes(one)} on every rank, and {format_bytes(loss)} more on the last (measured)")
for name, rows in programs.items():
    chunks, row = len(stage_owners(rows)) // RANKS, []
    for rank, result in enumerate(by_hand[name]):
        count = in_flight(rows[rank]) / chunks  # a chunk is a part of a stage
        losses = in_flight([action for action in rows[rank] if action.stage == RANKS * chunks - 1])
        assert result["kept"] == count * one + losses * loss, f"{name}, rank {rank}: not {count} micro-batches"
        row.append(f"{count:g} x: {format_bytes(result['kept'])}")
    print(f"{name:<17} in flight (by its list) and bytes saved at the peak (measured), by rank:  ", ",  ".join(row))

# %% [markdown]
# **Read it.** The measured bytes are exactly as predicted. Every rank of interleaving holds 1.5 more than under 1F1B. With
# ZB-H1 every rank holds as many as 1F1B's first. Beside what autograd saves, ZB-H1 keeps the stage's output gradient from
# `I` to `W`: this meter does not count it.
#
# **Question.** 1F1B, 8 stages, 4 micro-batches. How many does the third stage hold at its peak?

# %%
held_by_stage_2 = ...
check("13.held", held_by_stage_2)

# %% [markdown]
# ### Two stages or four: the same activations on 1F1B's first rank
#
# The bars show what one rank of a 7B pipeline holds at its peak, on a simulated A100.

# %% jupyter={"source_hidden": true}
from utils import Transformer, TransformerConfig, simulate
from utils.parallel import ParallelDims, keep_chunk, device_mesh, even_blocks, pipeline_passes

llama = TransformerConfig(vocabulary=32_000, hidden=4096, layers=32, heads=32, feedforward=11_008)


def simulated_stage(schedule, ranks, rank):
    found = {}

    def build():
        with torch.device("meta"):
            part = keep_chunk(Transformer(llama).to(torch.bfloat16), even_blocks(llama.layers, ranks), rank)
        sent = torch.empty(1, 2048, llama.hidden, dtype=torch.bfloat16, device="meta")
        found["passes"] = pipeline_passes([part.to_empty(device="cpu")], device_mesh(ParallelDims(pp=ranks), "cpu"),
                                          torch.arange(2048), sent, chunks=ranks, schedule=schedule, micro_batches=8)
        return part, torch.optim.AdamW(part.parameters())

    def step(part, optimizer):
        rows = torch.zeros(8, 2048, dtype=torch.long)
        found["passes"](rows, rows, 1.0)
        optimizer.step()
        part.zero_grad()

    return simulate(build, step, device="A100 80GB", world=ranks, rank=rank, name=f"{schedule}, stage {rank} of {ranks}")


# %%
stages = [simulated_stage(*which) for which in (("1F1B", 4, 0), ("1F1B", 4, 3), ("1F1B", 2, 0))]
show(draw_breakdown(stages, title="7B in bf16, AdamW, 8 micro-batches x 2,048 tokens,\nflash attention, no recomputation"),
     alt="Memory of three ranks: with two stages in place of four, the first holds nearly twice the states, and as much activations.")
for stage in (stages[0], stages[2]):
    print(f"{stage.name}: {format_bytes(stage.timeline.series()['activations'].max())} of activations at most (simulated)")

# %% [markdown]
# **Read it.** The first of four stages holds 4 micro-batches of 8 layers, the first of two holds 2 of 16: either way as much
# as one micro-batch of all 32 layers. Under 1F1B more stages lower that only where $p$ exceeds $m$.
# [Lesson 05](../intermediate/05_checkpointing.ipynb) recomputes activations.
#
# ## 4. Four ranks beside the drawing
#
# Memory followed the lists. Does time? A process that *sleeps* needs no core, so two cores can stand for four devices. Here
# each pass only sleeps.

# %%
NAP = 0.03  # seconds of F, I and W, and half of those of B; where a rank holds two stages, each is half as long


def naps(actions, stages, owners, inputs, post=Mail):
    run_by_hand(actions, stages, post(owners, inputs[0]), inputs, inputs, [])


def measured(rows, execute=naps, rounds=3):
    """The shortest of a few rounds."""
    return rounds_of(rows, run_ranks(sleep_through, RANKS, execute, rows, MICRO_BATCHES, NAP, rounds))[0]


# %%
_ = measured(programs["1F1B"], rounds=1)  # the warm-up: the first run of a process loads what it needs
ran = {name: measured(rows) for name, rows in programs.items()}
launch, transfer = launch_and_message(ran["GPipe"])
table = []
for name, rows in programs.items():
    free, costly, step = drawn(rows, NAP).total, drawn(rows, NAP, transfer, launch).total, ran[name].total
    table.append({"": name, "predicted, s": free, "with launches and messages, s": costly, "measured, s": step,
                  "measured / predicted": step / free})
display(pd.DataFrame(table).style.format(precision=3).hide().set_caption("a step; measured is the shortest of three rounds"))
gains = [1 - table[2][column] / table[1][column] for column in ("predicted, s", "measured, s")]
print(f"interleaved against 1F1B: {gains[0]:.1%} shorter (predicted), {gains[1]:.1%} (measured)")
print(f"with {1e3 * launch:.1f} ms to start a pass, {1e3 * transfer:.1f} ms for a message (measured on GPipe's run)")

# %% [markdown]
# **Read it.** Every order takes longer than drawn, in this run interleaving most, and so it loses a part of its gain. It runs
# twice as many passes, each half as long. Launches and messages explain only a part of the excess; the rest is not explained
# here. A drawing is what an order *could* reach, not what it will take.
#
# ## 5. With more micro-batches, 1F1B waits for more messages
#
# Now each message is under way for half a forward, while its sender goes on.

# %%
from threading import Timer


class SlowMail(Mail):
    under_way = ()

    def send(self, tensor, rank, tag):
        self.under_way = [*self.under_way, Timer(NAP / 2, super().send, (tensor, rank, tag))]
        self.under_way[-1].start()

    def close(self):
        for message in self.under_way:
            message.join()
        super().close()


def slow_naps(*given):
    naps(*given, post=SlowMail)


# %%
slow = {name: measured(programs[name], slow_naps) for name in ("GPipe", "1F1B")}
show(draw_orders({name: Panel(programs[name], run, Evidence.MEASURED) for name, run in slow.items()},
                 title="messages of 15 ms, forwards of 30 ms, backwards of 60 ms", unit="seconds"),
     alt="Two measured schedules: with messages of half a forward, 1F1B waits between its passes and ends later than GPipe.")
for name, run in slow.items():
    print(f"{name:<5} {drawn(programs[name], NAP, NAP / 2).total:.2f} s (predicted), {run.total:.2f} s (measured)")

# %% [markdown]
# **Read it.** Now 1F1B waits between its passes and ends later than GPipe. Follow its rank 0. It holds $p$ micro-batches, and
# starts another when the first is back. That one took $p$ forwards, $p$ backwards and $2(p-1)$ messages. So $p$ more
# micro-batches add $2(p-1)$ messages to the step. Count for all orders what messages add:

# %%
def waited(order, v, ranks, micro_batches, part):
    """What messages of `part` of a forward add to a step, in messages."""
    rows = schedule_actions(order, ranks, micro_batches, v)
    free, slow = (run_schedule(rows, 1 / v, 2 / v, transfer).total for transfer in (0, part))
    return (slow - free) / part


table = []
for name, (order, v) in {"GPipe": ("gpipe", 1), "1F1B": ("1f1b", 1), "interleaved, v = 2": ("1f1b", 2),
                         "interleaved, v = 4": ("1f1b", 4), "ZB-H1": ("zb-h1", 1)}.items():
    cases = [(8, 0.1), (64, 0.1), (64, 0.25), (64, 0.5), (64, 1)]
    table.append({"": name, **{f"m = {m}, {part:.0%}": f"{waited(order, v, RANKS, m, part):.0f}" for m, part in cases}})
display(pd.DataFrame(table).style.hide().set_caption(
    "messages that a step on 4 ranks waits for, by micro-batches and a message's length in forwards of a rank (predicted)"))

# %% [markdown]
# **Read it.** A step of GPipe waits for $2(p-1)$ messages, here 6. Interleaving waits for $2(pv-1)$, here 14 or 30, *while a
# message is no longer than a chunk's forward*: 50% with $v = 2$, 25% with $v = 4$. At 10% only 1F1B waits for more as $m$
# grows. In all of this a sender computes on.
#
# ### A message between nodes
#
# The planner predicts one for 175 billion parameters on 64 A100s: 8 stages, one in each node, and micro-batches of one
# sequence.

# %%
model = model_shape("megatron-175b")
cluster = Cluster(gpu="A100-80GB", nodes=8, network_bytes_per_second=8 * 25e9)  # eight ports of InfiniBand HDR a node
plan = Plan(tp=8, pp=8, sequence_parallel=True, recompute="selective", attention="unfused", dropout=True, framework="megatron")
parts = estimate(model, cluster, plan, Batch(sequences=64, sequence_length=2048)).time
message = send_seconds(cluster, True, 2 * 2048 * model.hidden / 8)  # bf16, an eighth on each port
work = parts.total - parts.pipeline - parts.optimizer
forward = work / 64 / 3  # a micro-batch's work, of which backward is two thirds
print(f"a message {1e3 * message:.2f} ms, a forward {1e3 * forward:.0f} ms: {message / forward:.1%} of it (predicted)")
count = waited("1f1b", 1, 8, 64, message / forward)
print(f"1F1B waits for {count:.0f} of them in a step: {count * message / work:.1%} of its work (predicted)")
for tp, pp in ((8, 8), (4, 16)):
    print(f"TP {tp} x {pp} stages: {sum(hops_across_nodes(8, tp, pp)[:-1])} of {pp - 1} hops leave a node (predicted)")

# %% [markdown]
# **Read it.** In this plan messages add less than a hundredth to 1F1B's work. With 16 stages as many hops leave a node.
#
# ## 6. Break it, diagnose it: an order that never ends
#
# 1F1B's lists were handed out from the wrong end. `check_program` starts no rank: it walks down all lists, and stops where no
# rank's next action has its input. Then the ranks run them. The interpreter's `log` has each action that a rank began:

# %%
def fly(rows, post=Mail, seconds=2):
    rank, owners, log = dist.get_rank(), stage_owners(rows), []
    inputs, targets = batch(0)
    with contextlib.suppress(RuntimeError):  # what gloo raises when a message takes too long
        run_by_hand(rows[rank], {rank: layers_of(rank, RANKS)}, post(owners, inputs[0], seconds), inputs, targets, log)
    return log


# %%
lists = reversed(programs["1F1B"])
hung = read_program([[f"{rank}{kind}{k}" for _, kind, k in row] for rank, row in enumerate(lists)])
try:
    check_program(hung)
except DeadlockError as error:
    print(error)
for rank, log in enumerate(run_ranks(fly, RANKS, hung)):
    print(f"rank {rank} began {', '.join(log[-3:]):<15} and stands there; its list: {' '.join(map(str, hung[rank][:6]))} ...")

# %% [markdown]
# **Diagnose it.** Ranks 0 and 1 stand at the two actions that `check_program` named.
#
# Next the lists are right, but each send waits until the neighbour has fetched it.

# %%
class PoliteMail(Mail):
    def send(self, tensor, rank, tag):
        dist.isend(tensor, rank, tag=tag).wait(self.limit)  # what dist.send does over gloo


print("last actions:", [log[-1] for log in run_ranks(fly, RANKS, programs["1F1B"], PoliteMail)])

# %% [markdown]
# **Read it.** Rank 2 sends the activations of `2F1` while rank 3 sends the gradient of `3B0`, and each waits for the other
# to fetch. **With NCCL this can happen** where a message is larger than its buffers: the send then holds its stream
# until it is received ([NCCL 1025](https://github.com/NVIDIA/nccl/issues/1025)). The
# [cure](https://github.com/NVIDIA/nccl/issues/479) is to post a send *together with* the next receive:

# %%
class PairedMail(Mail):
    held = ()  # a send that waits for the next receive

    def send(self, tensor, rank, tag):
        self.post()  # the first of two sends in a row goes alone
        self.held = [dist.P2POp(dist.isend, tensor, rank, tag=tag)]

    def receive(self, tensor, rank, tag):
        self.post(dist.P2POp(dist.irecv, tensor, rank, tag=tag))

    def post(self, *receive):
        both, self.held = [*self.held, *receive], ()
        for work in dist.batch_isend_irecv(both) if both else ():
            work.wait(self.limit)  # for the send, too

    close = post


ended = [log[-1] for log in run_ranks(fly, RANKS, programs["1F1B"], PairedMail, 30)]
print("last actions:", ended)
assert ended == [str(row[-1]) for row in programs["1F1B"]], "a rank did not come to the end of its list"

# %% [markdown]
# **Read it.** PyTorch's `Schedule1F1B` posts such pairs, too. Here each rank also waits for its own sends, so a step waits for
# more messages than section 5 counts.
#
# **On GPUs** a watchdog ends a job that hangs. Started with `TORCH_FR_BUFFER_SIZE=2000` and `TORCH_NCCL_DUMP_ON_TIMEOUT=1`,
# each rank writes its last sends and receives to a file for `torchfrtrace`
# ([Flight Recorder](https://docs.pytorch.org/tutorials/prototype/flight_recorder_tutorial.html)).
#
# ## Recap
#
# - Order decides idle time, memory, and whether the step ends. In eleven runs it left the gradients as they were.
# - Placement decides the number of messages.
# - While messages are free, 1F1B saves memory, not idle time.
# - Where senders compute on, $p$ more micro-batches add $2(p-1)$ messages to 1F1B's step. Interleaving waits for $2(pv-1)$,
#   however large $m$ is, while a message is no longer than a chunk's forward.
# - A drawing is what an order could reach, not what it will take.
# - Two deadlocks had two causes. Lists wait in a circle: check them before you run. Sends wait for their receivers: under
#   1F1B, post each together with the next receive.
#
# **Choose in this order.**
#
# 1. Know $m$: the global batch over (data-parallel ranks times micro-batch). Not shown here: how small a micro-batch keeps
#    kernels fast.
# 2. Take 1F1B, if you can bear $(p-1)/m$.
# 3. Else try interleaving, with $m$ a multiple of $p$ and messages no longer than $1/v$ of a forward. In section 3
#    every rank then held more. Measure whether the gain arrives.
# 4. A zero bubble schedule can idle less: ZB-H1 did when drawn and when run with sleeping ranks. PyTorch has
#    `InterleavedZeroBubble` and `ZBVZeroBubble` instead, whose time and memory are not shown here.
#
# Do the [lab](../../labs/advanced/13_pipelines.ipynb) in a copy (`make my-labs`), then compare with the
# [solution](../../solutions/advanced/13_pipelines.ipynb). Next: [lesson 14](14_three_dimensions.ipynb).
#
# **References.** [GPipe](https://arxiv.org/abs/1811.06965), 2018. [Interleaving](https://arxiv.org/abs/2104.04473), 2021.
# [Zero bubble](https://arxiv.org/abs/2401.10241), 2023.

# %% [markdown]
# ## On Monday
#
# Use a pipeline when a model does not fit by ZeRO and tensor parallelism inside a node. This script is a pipeline alone;
# [lesson 14](14_three_dimensions.ipynb) adds the other dimensions. It needs PyTorch 2.11 or newer.
#
# ```python
# # train.py. Try it on one node: torchrun --nproc-per-node 4 train.py
# # Beyond one, on each of 2: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py
# # Before: torch.cuda.set_device(device), where device is this rank's, and dist.init_process_group().
# # layers: the model's, in order, whole in each process's memory at first. loss_fn: a mean. folder: one that all ranks see.
# # loader: gives every rank the same batches, with drop_last=True.
# from collections import OrderedDict
#
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.pipelining import PipelineStage, Schedule1F1B
#
# rank, stages = dist.get_rank(), dist.get_world_size()
# first, end = (len(layers) * r // stages for r in (rank, rank + 1))
# named = OrderedDict((str(n), layers[n]) for n in range(first, end))  # names as in the whole model
# part = nn.Sequential(named).to(device)
# stage = PipelineStage(part, rank, stages, device)
# # with 4 * stages micro-batches, equal stages idle (stages - 1) / (4 * stages) of their work, messages aside
# schedule = Schedule1F1B(stage, n_microbatches=4 * stages, loss_fn=loss_fn)  # must divide the batch
# optimizer = torch.optim.AdamW(part.parameters())  # of its own layers
# losses = []
# for inputs, targets in loader:
#     optimizer.zero_grad()
#     if rank == 0:
#         schedule.step(inputs.to(device))
#     elif rank < stages - 1:
#         schedule.step()
#     else:
#         found = []  # return_outputs=False: else it keeps the logits of all micro-batches
#         schedule.step(target=targets.to(device), losses=found, return_outputs=False)
#         losses.append(sum(loss.item() for loss in found) / len(found))
#     norm = torch.nn.utils.get_total_norm([p.grad for p in part.parameters()])
#     dist.all_reduce(square := norm**2)  # over all stages: else each would clip by a norm of its own
#     torch.nn.utils.clip_grads_with_norm_(part.parameters(), 1.0, square.sqrt())
#     optimizer.step()
# torch.save(part.state_dict(), f"{folder}/part_{rank}.pt")
# torch.save(optimizer.state_dict(), f"{folder}/optimizer_{rank}.pt")  # to go on, each rank loads its own
# dist.barrier()
# if rank == 0:
#     parts = [torch.load(f"{folder}/part_{r}.pt", map_location="cpu") for r in range(stages)]
#     whole = {name: value for state in parts for name, value in state.items()}
#     model = nn.Sequential(*layers).cpu()  # rank 0's own layers are on its device
#     model.load_state_dict(whole)  # strict: nothing is missing
# ```
#
# **Look at** the last rank's losses: those of one process that clips to 1.0, if all micro-batches count equally many targets.
# `ScheduleGPipe` in its place keeps the activations of all micro-batches on rank 0, and here 1F1B those of `stages`.
#
# For interleaving, build the stages as `train_pytorch` does. The last stage also computes the head and the loss: time your
# stages, and move layers off the slowest. With DeepSpeed, after `deepspeed.init_distributed()`:
#
# ```python
# import deepspeed
# from deepspeed.pipe import PipelineModule
#
# net = PipelineModule(layers=layers, num_stages=stages, loss_fn=loss_fn, partition_method="uniform")
# engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config={
#     "train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": micro_batches,
#     "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},  # as PyTorch's; its own default is 0
#     "gradient_clipping": 0.0,
# })
# losses = [engine.train_batch(data).item() for _ in range(steps)]  # data: an iterator over micro-batches
# ```
#
# **Look at** the losses: those of one process that does *not* clip. Always write `gradient_clipping`: without it, releases
# since [8068](https://github.com/deepspeedai/DeepSpeed/pull/8068) clip to 1.0. In fp32, as here, DeepSpeed 0.19.8 clips by the
# first stage's norm alone.
