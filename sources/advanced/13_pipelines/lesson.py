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
# **The question.** Every schedule of a pipeline runs the same forward and backward passes. What does their *order*
# decide?
#
# **Promise.** You run *any* order on four real ranks, with an interpreter of 25 lines. You predict idle time, memory and
# messages, and find a deadlock before it runs.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (Windows: WSL2) | about two minutes of computing on two CPU cores |
#
# ## A bet
#
# GPipe runs all forward passes, then all backward passes. 1F1B alternates as soon as it can. On four stages and
# eight micro-batches, by how many percent does 1F1B shorten the idle time of GPipe?

# %%
my_bet_percent = 50

# %% tags=["setup"]
here = setup("advanced/13")

# %% jupyter={"source_hidden": true}
import contextlib
from dataclasses import replace

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from utils import Batch, Cluster, Evidence, Plan, check, draw_breakdown, estimate, format_bytes
from utils import model_shape, run_ranks, show, traffic
from utils.parallel import DeadlockError, check_program, chunks_of, read_program, stage_owners
from utils.planner import framework
from utils.planner.schedules import count_messages, in_flight, run_schedule, schedule_actions
from utils.planner.step_seconds.collectives import hops_across_nodes, send_seconds
from utils.views import Panel
from utils.lessons.lesson_13.chunks_figure import draw_chunks
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
# the stage before it waits. `W` computes the gradient of the weights, for which no rank waits, so it may come later.

# %% tags=["nbval-check-output"]
RANKS, MICRO_BATCHES, STEPS = 4, 8, 5
orders = {"GPipe": ("gpipe", 1), "1F1B": ("1f1b", 1), "interleaved 1F1B": ("1f1b", 2), "ZB-H1": ("zb-h1", 1)}
programs = {name: schedule_actions(order, RANKS, MICRO_BATCHES, v) for name, (order, v) in orders.items()}
for rank, row in enumerate(programs["1F1B"]):
    print(f"1F1B, rank {rank}:", *row)

# %%
def drawn(rows, forward=1.0, transfer=0.0):
    """An action starts when its rank is free and its input is there: that is all a drawing needs."""
    check_program(rows, MICRO_BATCHES)  # every action once, and no deadlock
    share = RANKS / len(stage_owners(rows))  # with two stages on a rank, each has half of the layers
    return run_schedule(rows, forward * share, 2 * forward * share, transfer)


show(draw_orders({name: Panel(rows, drawn(rows)) for name, rows in programs.items()},
                 title="4 ranks, 8 micro-batches, equal stages, backward twice as long as forward, messages free",
                 unit="time, in forward passes of a rank"),
     alt="Four schedules on four ranks: GPipe and 1F1B end at the same time; interleaved and ZB-H1 end earlier.")
idle = [drawn(programs[name]).total - drawn(programs[name]).busy for name in ("GPipe", "1F1B")]
print(f"your bet: {my_bet_percent}%; 1F1B idles {100 * (1 - idle[1] / idle[0]):.0f}% less than GPipe (predicted)")

# %% [markdown]
# **Read it.** GPipe and 1F1B end at the same moment: while messages are free, 1F1B saves **memory, not idle time**. In both,
# the last rank waits for $p - 1$ forwards at the start and $p - 1$ backwards at the end. It works for $m$ of each, so idle
# time over work is $(p-1)/m$. What 1F1B lowers is the number of micro-batches **in flight**, whose activations wait for their
# backward.
#
# With **interleaving**, a rank holds $v$ **chunks** of layers, and waits for passes that are $v$ times shorter. **ZB-H1** is
# 1F1B with split backwards: a `W` that was put off fills a wait at the end.
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
# | with free messages | idle / work | most in flight on rank 0 |
# |---|---|---|
# | GPipe | $(p-1)/m$ | $m$ |
# | 1F1B | $(p-1)/m$ | $\min(m, p)$ |
# | interleaved, $p$ divides $m$ | $(p-1)/(vm)$ | $\min(m, p + (p-1)/v)$ |
# | ZB-H1, $m \ge p$, F, I and W equally long | $(p-1)/(3m)$ | $p$ |
#
# **Question.** Eight stages, 1F1B, free messages. How many micro-batches keep idle over work at 10%?

# %%
micro_batches_for_10_percent = ...
check("13.micro_batches", micro_batches_for_10_percent)

# %% [markdown]
# ## 2. Every order computes the same gradients
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
        with saved_for_backward(parameters) as saved, traffic() as sent:  # counts what autograd keeps
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
# At work a stage, a schedule and `step` suffice. PyTorch's orders should compute the same as well.

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
# The gradients do not tell the orders apart. Memory does.
#
# **Predict.** A rank's peak should be its micro-batches in flight, times what one of them keeps. Under 1F1B rank $i$ has
# $\min(m, p - i)$ in flight, here 4, 3, 2 and 1. Under GPipe each rank has eight. On the last rank the loss keeps some more.

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
    print(f"{name:<17} in flight (by its list) and bytes at the peak (measured), by rank:  ", ",  ".join(row))

# %% [markdown]
# **Read it.** The measured bytes are exactly as predicted. More micro-batches *of the same size* raise GPipe's peak and leave
# 1F1B's as it is. Rank 0 of interleaving holds more than 1F1B's. With ZB-H1 every rank holds as many as 1F1B's first.
#
# **Question.** 1F1B, 8 stages, 4 micro-batches. How many does the third stage hold at its peak?

# %%
held_by_stage_2 = ...
check("13.held", held_by_stage_2)

# %% [markdown]
# ### More stages do not lower the first rank's activations
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
     alt="Stacked memory of three ranks: with two stages in place of four, all but the activations nearly doubles.")
one = stages[0].timeline.series()["activations"].max()  # 4 micro-batches of 8 layers each
inputs_only = llama.layers * 2 * 2048 * llama.hidden  # each layer keeps its input, 2 bytes an element
print(f"one micro-batch, 32 layers: {format_bytes(one)} of activations (simulated), {format_bytes(inputs_only)} of inputs (predicted)")

# %% [markdown]
# **Read it.** Compare the red parts of the first bar and the last. The first of four stages holds
# 4 micro-batches of 8 layers, the first of two holds 2 of 16: either way as much as one micro-batch of all 32 layers. If activations do not fit, *recompute* them and keep the layers'
# inputs alone ([lesson 05](../intermediate/05_checkpointing.ipynb)).
#
# ## 4. Four ranks keep nearly the predicted times
#
# Memory followed the lists. Does time? A process that *sleeps* needs no core, so two cores can stand for four devices. Here each pass only sleeps.

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
table = []
for name, rows in programs.items():
    predicted, step = drawn(rows, NAP).total, ran[name].total
    table.append({"": name, "predicted, s": predicted, "measured, s": step, "measured / predicted": step / predicted})
display(pd.DataFrame(table).style.format(precision=3).hide().set_caption("a step; measured is the shortest of three rounds"))
launch, transfer = launch_and_message(ran["GPipe"])
print(f"not in the prediction: {1e3 * launch:.1f} ms to start a pass, {1e3 * transfer:.1f} ms for a message (measured, GPipe)")

# %%
show(draw_orders({"ZB-H1, drawn": Panel(programs["ZB-H1"], drawn(programs["ZB-H1"], NAP)),
                  "ZB-H1, on four ranks": Panel(programs["ZB-H1"], ran["ZB-H1"], Evidence.MEASURED)},
                 title="ZB-H1: 30 ms for each F, I and W", unit="seconds"),
     alt="ZB-H1 as drawn, and as four sleeping processes ran it: nearly the same, a little longer.")

# %% [markdown]
# **Read it.** The measured steps are a little longer than predicted. Starting passes and sending messages is a part of that.
# So a drawing predicts time, *while messages are nearly free*.
#
# ## 5. Messages cost 1F1B time in each micro-batch
#
# Now each message is under way for half a forward, while its sender goes on. Real ones are far shorter, but these let you see
# the waits.

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
# starts another when the first is back. That one took $p$ forwards, $p$ backwards and $2(p-1)$ messages. So every $p$
# micro-batches pay for $2(p-1)$ messages, however large $m$ is. GPipe pays for them once in a step.
#
# How long is a real message? The planner predicts one for 175 billion parameters on 64 A100s: 8 stages, one in each node,
# and micro-batches of one sequence. The table returns to four ranks, and makes the message longer from column to column.

# %% jupyter={"source_hidden": true}
model, waits = model_shape("megatron-175b"), replace(framework("megatron"), name="sends wait", hides_sends=False)
common = {"tp": 8, "pp": 8, "sequence_parallel": True, "recompute": "selective", "attention": "unfused", "dropout": True}


def estimated(sequences, v, cluster, rules="megatron"):
    plan = Plan(**common, virtual_stages=v, framework=rules)
    return estimate(model, cluster, plan, Batch(sequences=sequences, sequence_length=2048))


def message_seconds(cluster):
    return send_seconds(cluster, True, 2 * 2048 * model.hidden / 8)  # bf16, an eighth on each port


# %%
PORTS = 8 * 25e9  # a node's bytes per second: eight ports of InfiniBand HDR
cluster = Cluster(gpu="A100-80GB", nodes=8, network_bytes_per_second=PORTS)
parts, message = estimated(64, 1, cluster).time, message_seconds(cluster)
forward = (parts.total - parts.pipeline - parts.optimizer) / 64 / 3  # a micro-batch's work, of which backward is two thirds
print(f"a message {1e3 * message:.2f} ms, a forward {1e3 * forward:.0f} ms: {message / forward:.1%} of it (predicted)")
table = []
for name, (order, v) in {"GPipe": ("gpipe", 1), "1F1B": ("1f1b", 1), "interleaved, v = 2": ("1f1b", 2),
                         "interleaved, v = 4": ("1f1b", 4), "ZB-H1": ("zb-h1", 1)}.items():
    rows = schedule_actions(order, RANKS, 64, v)
    runs = {f"{part:.0%} of a forward": run_schedule(rows, 1 / v, 2 / v, part) for part in (0, 0.01, 0.25, 0.5, 1)}
    table.append({"": name, **{part: f"{run.bubble_ratio:.1%}" for part, run in runs.items()}})
display(pd.DataFrame(table).style.hide().set_caption(
    "idle / work on 4 ranks with 64 micro-batches, by the length of a message (predicted)"))

# %% [markdown]
# **Read it.** At 1%, more than the real message takes, no schedule loses more than about half a point. Now follow the two
# interleaved rows to where they jump: with $v = 2$ after 50%, with $v = 4$ after 25%.
#
# **Interleaving hides a message** *while it is no longer than a chunk's forward*, which is $1/v$ of a rank's: the receiver
# computes another micro-batch meanwhile. A longer one is waited for again and again. ZB-H1 hides messages of up to half a
# forward. 1F1B hides none, so its row rises from the start.
#
# ### More chunks pay while messages are hidden
#
# A schedule that *can* hide messages needs a framework that computes while it sends. How many chunks should this 175B use? On
# the blue line the framework does so, where $v > 1$, as Megatron-LM by default. On the others it does not: each message is
# waited for, at half, once and twice its cost.

# %%
CHUNKS = (1, 2, 3, 4, 6, 12)
arms = {"messages hidden where v > 1": (cluster, "megatron")}
for speed in (2, 1, 0.5):
    network = replace(cluster, network_bytes_per_second=speed * PORTS)
    arms[f"each message waits {1e3 * message_seconds(network):.2f} ms"] = network, waits
steps = {m: {name: [estimated(m, v, *arm).step_seconds for v in CHUNKS] for name, arm in arms.items()} for m in (64, 512)}
show(draw_chunks(steps, CHUNKS, {64: (3, 13.75)}, title="175B on 64 A100-80GB, 8 stages x TP 8, by the cost of a message"),
     alt="Step time over chunks: falling while messages are hidden; with waits it turns up, sooner for the large batch.")

# %%
for name in arms:
    best = {m: min(range(len(CHUNKS)), key=steps[m][name].__getitem__) for m in steps}
    gains = [f"{m} sequences v = {CHUNKS[k]}, by {1 - steps[m][name][k] / steps[m][name][0]:.1%}" for m, k in best.items()]
    print(f"{name}: fastest at", ", at ".join(gains), "(predicted)")
print(f"here all 7 hops leave a node; with TP 4 x 16 stages {sum(hops_across_nodes(8, 4, 16)[:-1])} of 15 hops leave a node")

# %% [markdown]
# **Read it.** With 64 sequences the bubble is large, and the right $v$ saves several percent. With 512 there is little to
# save. Where messages are waited for, the fastest $v$ falls as their cost rises: profile whether your sends are hidden,
# before you raise it. Stages that share a node make more hops cheap, as the last line counts.
#
# So far each order came to its end. The next does not.
#
# ## 6. Break it, diagnose it: an order that never ends
#
# 1F1B's lists were handed out from the wrong end. The interpreter's `log` has each action that a rank began:

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
for rank, log in enumerate(run_ranks(fly, RANKS, hung)):
    print(f"rank {rank} began {', '.join(log[-3:]):<15} and stands there; its list: {' '.join(map(str, hung[rank][:6]))} ...")
try:
    check_program(hung)
except DeadlockError as error:
    print(error)

# %% [markdown]
# **Diagnose it.** Ranks 0 and 1 wait for each other, and `check_program` finds this circle in the lists.
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
# **Read it.** PyTorch's 1F1B posts such pairs, and so does Megatron-LM with `batch_p2p_comm`.
#
# **NCCL ignores tags** ([PyTorch 125079](https://github.com/pytorch/pytorch/issues/125079)): equally shaped messages in a
# wrong order can give wrong numbers, and no hang.
#
# **On GPUs** a watchdog ends a job that hangs. Started with `TORCH_FR_BUFFER_SIZE=2000` and `TORCH_NCCL_DUMP_ON_TIMEOUT=1`,
# each rank writes its last sends and receives to a file for `torchfrtrace`
# ([Flight Recorder](https://docs.pytorch.org/tutorials/prototype/flight_recorder_tutorial.html)).

# %% [markdown]
# ## Recap
#
# - Order decides idle time, memory, and whether the step ends. It left the gradients as they were.
# - Placement decides the number of messages.
# - 1F1B saves memory, not idle time.
# - Interleaving hides a message that is no longer than a chunk's forward, where the framework computes while it sends. 1F1B
#   hides none. At 1% of a forward that hardly matters.
# - Two deadlocks had two causes. Lists wait in a circle: check them before you run. Sends wait for their receivers: post each
#   together with the next receive.
#
# **Choose in this order.**
#
# 1. Take the smallest micro-batch that keeps your kernels fast. Then $m$ is the global batch over (data-parallel ranks times
#    micro-batch).
# 2. Take 1F1B, if you can bear $(p-1)/m$.
# 3. Else interleave, with $m$ a multiple of $p$ and messages shorter than $1/v$ of a forward. Rank 0 then holds more.
# 4. If your ranks still idle too long, take a zero bubble schedule, such as PyTorch's `ZBVZeroBubble`. It costs memory on the
#    later ranks: all hold what 1F1B's first does, and `I`'s gradients until `W`. PyTorch refuses stages wrapped by
#    `torch.compile` there.
#
# Do the [lab](../../labs/advanced/13_pipelines.ipynb) in a copy (`make my-labs`), then compare with the
# [solution](../../solutions/advanced/13_pipelines.ipynb). Next: [lesson 14](14_three_dimensions.ipynb).
#
# **References.** [GPipe](https://arxiv.org/abs/1811.06965), 2018. [Interleaving](https://arxiv.org/abs/2104.04473), 2021.
# [The published run](https://arxiv.org/abs/2205.05198), Table 5, 2022. [Zero bubble](https://arxiv.org/abs/2401.10241), 2023.

# %% [markdown]
# ## On Monday
#
# Use a pipeline when a model does not fit by ZeRO and tensor parallelism inside a node. The script needs PyTorch
# 2.11 or newer.
#
# ```python
# # train.py. Try it on one node: torchrun --nproc-per-node 4 train.py
# # Beyond one, on each of 2: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py
# # Before: torch.cuda.set_device(device), where device is this rank's, and dist.init_process_group().
# # layers: the model's, in order. loss_fn: a mean. folder: one that all ranks see.
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
# If padding differs, pass `scale_grads=False`, let `loss_fn` divide its sum by the whole batch's count, and add up `found`.
# Then look at `torch.cuda.max_memory_allocated()` of rank 0: with `ScheduleGPipe` it rises.
#
# For interleaving, build the stages as `train_pytorch` does. The last stage also has the logits: give it fewer layers. If
# embedding and head share a weight, start both copies equal, sum their gradients, and count one in `square`
# ([lesson 14](14_three_dimensions.ipynb)). With DeepSpeed, after `deepspeed.init_distributed()`:
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
