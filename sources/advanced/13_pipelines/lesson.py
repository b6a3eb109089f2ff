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
# **Promise.** You read a program of 25 lines that runs *any* schedule on four real ranks. You predict bubble, memory and
# messages, and measure all three; and you find a deadlock before it runs.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 75 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# GPipe runs all forward passes, then all backward passes. 1F1B alternates as soon as it can. On four stages and
# eight micro-batches, by how many percent does 1F1B shorten the idle time of GPipe? Write your guess.

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
from utils.planner.schedules import bubble_closed, in_flight, in_flight_closed, schedule_actions, run_schedule, count_messages
from utils.views import Panel
from utils.lessons.lesson_13.saved import saved_for_backward
from utils.lessons.lesson_13.small_model import batch, farthest, layers_of, one_process
from utils.lessons.lesson_13.step_figure import draw_steps
from utils.lessons.lesson_13.timed import launch_and_message, rounds_of, sleep_through

# %% [markdown]
# ## 1. A schedule is a program
#
# A pipeline cuts the model into **stages** of layers, one or more on each rank. So that ranks need not wait for each
# other, a batch is cut into $m$ **micro-batches**, which follow each other through the $p$ ranks. What is still idle is the
# *bubble*. New words stand in the [glossary](../00_glossary.ipynb).
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
                    title="4 ranks, 8 micro-batches, equal stages, backward twice as long as forward, messages free",
                    unit="time, in forward passes of a rank"),
     alt="Four schedules on four ranks: GPipe and 1F1B end at the same time; interleaved and ZB-H1 end earlier.")
idle = [drawn(programs[name]).total - drawn(programs[name]).busy for name in ("GPipe", "1F1B")]
print(f"your bet: {my_bet_percent}%; 1F1B idles {100 * (1 - idle[1] / idle[0]):.0f}% less than GPipe (predicted)")

# %% [markdown]
# **Read it.** 1F1B saves **memory, not bubble**: GPipe and 1F1B end at the same moment. The last rank waits for $p - 1$
# forwards before it begins, and in the end the first rank waits for $p - 1$ backwards. So each rank works for $m$
# forwards and backwards, and idles for $p - 1$ of each. What 1F1B lowers is *in flight*: the micro-batches whose activations
# wait for their backward. In the last panel dark boxes are `I`. Who holds which of eight layers?

# %%
for name in ("1F1B", "interleaved 1F1B"):
    owners = stage_owners(programs[name])
    each = 8 // len(owners)  # layers of a stage
    held = [[n for s, owner in owners.items() if owner == rank for n in range(s * each, (s + 1) * each)] for rank in range(RANKS)]
    print(f"{name:<17}", *(f"rank {rank}: layers {layers}  " for rank, layers in enumerate(held)))

# %% [markdown]
# **Interleaving** gives rank $r$ the stages $r$, $r + p$, $r + 2p$, ...: $v$ **chunks**, each with $1/v$ of its layers. A
# micro-batch goes around all ranks $v$ times. The last rank still waits for $p - 1$ passes, but each is that of one
# chunk and $1/v$ as long: the bubble divides by $v$. **ZB-H1** (the first of two schedules that Qi and others wrote by
# hand) runs each `W` where a rank would have to wait.
#
# | schedule | idle / work | in flight on rank $i$ | messages in a step |
# |---|---|---|---|
# | GPipe | $(p-1)/m$ | $m$ | $2(p-1)m$ |
# | 1F1B | $(p-1)/m$ | $\min(m, p-i)$ | $2(p-1)m$ |
# | interleaved, $v > 1$ chunks | $(p-1)/(vm)$ | $((v-1)p + 2(p-1-i) + 1)/v$, at most $m$ | $2(vp-1)m$ |
# | ZB-H1, with F, I and W equally long | $(p-1)/(3m)$ | $\min(m, p)$, until `W` | $2(p-1)m$ |
#
# **Question.** Eight stages, 1F1B. How many micro-batches keep idle over work at 10%?

# %%
micro_batches_for_10_percent = ...
check("13.micro_batches", micro_batches_for_10_percent)

# %% [markdown]
# ## 2. Run it by hand
#
# Eight equal residual blocks: `layers_of(stage, stages)` gives a stage's share. A send does not wait to be fetched
# (`isend`), and a receive names the message that it wants, by a *tag*. (Both are true of gloo, the backend on CPUs. NCCL
# ignores tags: there order alone counts. Section 6 has more.) A stage whose neighbour is on the same rank sends nothing.

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
# The interpreter knows no schedule. It runs its rank's list, action by action:

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
# micro-batches. `saved_for_backward` counts the bytes that autograd keeps meanwhile.

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
# **Read it.** One interpreter ran all four. Order decides when things happen, and up to rounding
# nothing of what is computed.
# **Interleaving's price** is in the last column: $vp - 1 = 7$ borders in place of 3, each crossed twice by each
# micro-batch.
#
# ## 3. What a stage holds
#
# **Predict.** One micro-batch alone says what a stage keeps for it. Times *in flight*, that should be the peak, to the
# byte: 4 : 3 : 2 : 1 for 1F1B, eight everywhere for GPipe.

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
    print(f"{name:<17} in flight and bytes at the peak, by rank (measured):  ", ",  ".join(row))

# %% [markdown]
# **Read it.** Exact on every rank. With GPipe, more micro-batches *of the same size* (a smaller bubble) mean more memory;
# with 1F1B it stays at $p - i$, so $m$ may grow up to what the global batch allows. Interleaving holds more than 1F1B, and
# ZB-H1 $p$ everywhere. This counts what autograd keeps: the gradient that ZB-H1's `kept` holds from `I` to `W` comes on top.
#
# **Question.** 1F1B, 8 stages, 4 micro-batches. How many does stage 2 (counted from 0) hold at its peak? (Our
# interpreter runs that; PyTorch's `Schedule1F1B` wants $m \ge p$ and raises a `ValueError`.)

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
# memory falls less far: each stage also holds its weights and, once backward has begun, their gradients.
#
# ## 4. The timeline, measured
#
# A process that *sleeps* needs no core, so two cores can stand for four devices: here stages sleep 40 ms in place of
# each forward, 40 for the input's gradient and 40 for the weights' (half as long where a rank holds two stages), and note
# when.
#
# **Predict.** Two small delays come on top: a *launch*, between two passes of a rank that need not wait, and a *message*
# between ranks. The shortest of three GPipe runs of four micro-batches measures both, for all drawings.

# %%
NAP = 0.04


def naps(actions, stages, owners, inputs):
    run_by_hand(actions, stages, Mail(owners, inputs[0]), inputs, inputs, [])


def measured(rows, micro_batches=MICRO_BATCHES):
    """Three rounds, the shortest first."""
    return rounds_of(rows, run_ranks(sleep_through, RANKS, naps, rows, micro_batches, NAP))


# %%
_ = measured(programs["1F1B"])  # once for nothing: the first run of a process loads what it needs
launch, transfer = launch_and_message(measured(schedule_actions("gpipe", RANKS, 4), 4)[0])
print(f"a launch {1e3 * launch:.1f} ms, a message {1e3 * transfer:.1f} ms (measured)")

# %%
uncut = run_schedule(schedule_actions("gpipe", RANKS, 1), MICRO_BATCHES * NAP, 2 * MICRO_BATCHES * NAP)
table, steps, panels = [{"": "batch not cut", "idle / work, theory": uncut.bubble_ratio, "step, theory": uncut.total}], {}, {}
for name, rows in programs.items():
    theory, expected, rounds = drawn(rows, NAP), drawn(rows, NAP, transfer, launch), measured(rows)
    steps[name] = (theory.total, expected.total, [one.total for one in rounds])
    panels |= {name: Panel(rows, expected), f"{name} on four ranks": Panel(rows, rounds[0], Evidence.MEASURED)}
    table.append({"": name, "idle / work, theory": theory.bubble_ratio, "drawn": expected.bubble_ratio,
                  "step, theory": theory.total, "step, drawn": expected.total, "shortest": rounds[0].total,
                  "longest": rounds[-1].total, "shortest / drawn": rounds[0].total / expected.total})
display(pd.DataFrame(table).style.format(precision=3, na_rep="").hide().set_caption(
    "steps in seconds: theory and drawn (predicted), shortest and longest of three rounds (measured)"))
show(draw_steps(steps, title="A step of 8 micro-batches: passes of 40 ms on four ranks"),
     alt="Steps of four schedules: in theory, drawn with launches and messages, and three measured rounds of each.")

# %%
show(draw_schedules({name: panels[name] for name in panels if name.startswith("inter")}, unit="seconds",
                    title="Sleeps of 20 ms for a chunk's forward, 40 for its backward"),
     alt="Interleaved 1F1B as drawn, and the shortest of three rounds of four sleeping processes.")

# %% [markdown]
# **Read it.** A batch that is not cut makes each rank idle three times as long as it works.
# *Theory* knows no launch and no message. *Drawn* knows both and decides: GPipe and 1F1B end nearly together, interleaved
# earlier, ZB-H1 first. The delays cost the interleaved step most: its passes are half as long and twice as many, and it
# sends 112 messages in place of 48.
#
# The measured rounds keep this order, and end later than drawn: sleepers wake late, which no drawing has.
#
# ### The price of a message
#
# GPT-3's 175 billion parameters on 64 A100s, tensor parallel over 8, 8 stages; every GPU has a network port of 25 GB/s.
# A message between nodes makes the next stage wait, unless it is sent while
# the stage computes its next chunk. Megatron-LM does that in interleaved schedules, by default in their steady phase alone;
# in warm-up (the column counts rank 0's forwards) and flush only with `--overlap-p2p-communication-warmup-flush`.

# %%
model, cluster = model_shape("megatron-175b"), Cluster(gpu="A100-80GB", nodes=8)
common = {"tp": 8, "pp": 8, "sequence_parallel": True, "recompute": "selective"}
plain, rows = replace(framework("megatron"), name="no overlap of sends", hides_sends=False), []
for m, v in itertools.product((64, 512), (1, 2, 4, 12)):  # m micro-batches of one sequence
    sequences = Batch(sequences=m, sequence_length=2048)
    found = estimate(model, cluster, Plan(**common, virtual_stages=v), sequences)
    waits = estimate(model, cluster, Plan(**common, virtual_stages=v, framework=plain), sequences)
    rows.append({"batch": m, "v": v, "bubble / work": f"{bubble_closed(8, m, v):.2%}", "messages": f"{2 * (8 * v - 1) * m:,}",
                 "warm-up": f"{(in_flight_closed('1f1b', 0, 8, m, v) - 1) / (m * v):.0%}", "all sends hidden, s": found.step_seconds, "no sends hidden, s": waits.step_seconds})
display(pd.DataFrame(rows).style.format(precision=2).hide().set_caption(
    f"175B, 8 stages on 64 A100-80GB; a message is {format_bytes(2 * 2048 * model.hidden)}, an eighth on each port (predicted)"))

# %%
node_of = [stage * 4 // 8 for stage in range(16)]  # TP 4 and 16 stages: two stages share a node of eight
out = sum(a != b for a, b in itertools.pairwise(node_of))
message = 2 * 2048 * model.hidden  # bf16, one sequence
for v in (1, 3, 6):
    leaves = v * out + (v - 1) * (node_of[0] != node_of[-1])
    print(f"v = {v}: {leaves:>2} of {16 * v - 1} hops leave a node; {format_bytes(2 * leaves * 64 * message)} in a step of 64 (predicted)")

# %% [markdown]
# **Read it.** Interleaving pays where the bubble is large, so at small batches: with all its messages hidden, 12 chunks save
# nearly a tenth of the small batch's step (Narayanan and others 2021 report "10+%"; published), and under 2% of the
# large one's. Not hidden, 12 chunks are slower than 4 in the small batch, and slower than none in the large one. Megatron's
# default lies between the columns. With TP 4 every second hop leaves a node.
#
# ## 5. PyTorch's own
#
# At work you need only a stage, a schedule and `step`.

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
# **Read it.** One result. (LoopedBFS takes micro-batches backward in reverse, so its sums round
# differently.) By default gradients are divided by $m$ (`scale_grads=True`), which suits a loss that is a mean. Zero bubble
# gains only where `I` and `W` share no work. PyTorch cuts the graph at each weight for that; our `W` walks it all again.
#
# **Question.** Interleaved 1F1B on eight ranks, three stages on each, sixteen micro-batches. How many messages does a
# step send?

# %%
messages_of_a_step = ...
check("13.messages", messages_of_a_step)

# %% [markdown]
# ### Where it comes from
#
# Old tutorials import `Pipe`, from `torch.distributed.pipeline.sync`. It is gone: `torch.distributed.pipelining` has its place.

# %% [markdown]
# ## 6. Break it, diagnose it: an order that never ends
#
# A colleague gave 1F1B's lists to the ranks from the wrong end: the first got the list of the last. The job hangs. Our
# interpreter's `log` has each action that a rank began:

# %%
def fly(rows, post=Mail):
    rank, owners, log = dist.get_rank(), stage_owners(rows), []
    inputs, targets = batch(0)
    with contextlib.suppress(RuntimeError):  # what gloo raises when a message takes too long
        run_by_hand(rows[rank], {rank: layers_of(rank, RANKS)}, post(owners, inputs[0], seconds=2), inputs, targets, log)
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
# **Diagnose it.** Read the last action of each rank, and ask what it waits for. `0B0` waits for rank 1's backward. Rank
# 1 wants a second forward first. Rank 0 sends that only after `0B0`: a circle. `check_program` walks the lists before any
# rank starts, and stops where nobody can move.
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
# other to fetch; ranks 0 and 1 wait behind them. Our `Mail` does not hang, because with gloo an `isend` needs no receiver
# to go on. **With NCCL `Mail` hangs, too**, once a message is larger than NCCL's buffers: sends and receives between two
# ranks run in order, and a send may block until it is received ([NCCL 783](https://github.com/NVIDIA/nccl/issues/783)). So
# Megatron-LM and PyTorch's 1F1B send and receive *in one call*:

# %%
def swap(elements=2**20):
    other = 1 - dist.get_rank()
    mine, theirs = torch.full((elements,), float(dist.get_rank())), torch.empty(elements)
    both = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
    for work in dist.batch_isend_irecv(both):  # neither waits for the other
        work.wait()
    return theirs[0].item()


print("ranks 0 and 1 received", run_ranks(swap, 2))

# %%
for name in programs:
    score("13", f"{name}, kept for backward, 4 ranks", peak_bytes=max(r["kept"] for r in by_hand[name]))
scoreboard("13")

# %% [markdown]
# ## Recap
#
# - Order decides idle time, memory, and whether the step ends at all; never the result, up to rounding. Which rank holds which
#   stage decides the messages.
# - 1F1B saves memory, not bubble.
# - Interleaving divides the bubble by $v$ and multiplies the messages; zero bubble spends memory.
# - A deadlock stands in the lists: walk them before you rent the machines.
#
# | schedule | use when | costs |
# |---|---|---|
# | 1F1B | the default; $m = (p-1)$ / the idle share that you accept ($4p$ leaves nearly a quarter) | in flight $p$ on the first stage |
# | interleaved | small batch, fast links | over $v$ times the messages, more in flight |
# | zero bubble | bubbles matter, later ranks have room | ZB-H1: in flight $p$ on every rank (ZB-H2: up to $2p - 1$), split backward |
#
# **Test yourself.** You double $m$ at a fixed batch. What happens to the bubble, to the memory of 1F1B, to the messages?
#
# <details><summary>Answer</summary>
#
# The bubble halves, activations halve (micro-batches are half as large; for $m \ge p$), and twice as many messages are each
# half as large.
#
# </details>
#
# Do the [lab](../../labs/advanced/13_pipelines.ipynb), in a copy: `make my-labs`; then compare with the
# [solution](../../solutions/advanced/13_pipelines.ipynb). Next: [lesson 14](14_three_dimensions.ipynb).
#
# **References.** Huang and others 2018, *GPipe*, [arXiv:1811.06965](https://arxiv.org/abs/1811.06965). Narayanan and
# others 2021, [arXiv:2104.04473](https://arxiv.org/abs/2104.04473). Qi and others 2023, *Zero Bubble Pipeline
# Parallelism*, [arXiv:2401.10241](https://arxiv.org/abs/2401.10241). PyTorch,
# [pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html).

# %% [markdown]
# ## On Monday
#
# Use it when a model does not fit by ZeRO and tensor parallelism inside a node. You have its `layers` in order, `device` is
# this rank's and set (`torch.cuda.set_device`), `dist.init_process_group()` has run; start with `torchrun --nproc-per-node 4`.
# Every rank reads the same batches, with `drop_last=True`. `folder` is one that all ranks see.
#
# ```python
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
# dist.barrier()
# if rank == 0:
#     parts = [torch.load(f"{folder}/part_{r}.pt", map_location="cpu") for r in range(stages)]
#     whole = {name: value for state in parts for name, value in state.items()}
#     nn.Sequential(*layers).load_state_dict(whole)  # strict: nothing is missing
# ```
#
# The slowest stage sets the pace, and the last also has the logits and the loss: give it fewer layers. If embedding and head
# share a weight, two ranks hold it: sum its gradients over both each step.
#
# **Look at** the last rank's losses: those of one process. Then at `torch.cuda.max_memory_allocated()` of rank 0: put
# `ScheduleGPipe` in, and it rises. With DeepSpeed, after `deepspeed.init_distributed()`
# (micro-batches are its *accumulation steps*):
#
# ```python
# import deepspeed
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
# **Look at** the losses again. Leave `gradient_clipping` out, and they part: since June 2026 DeepSpeed clips to a norm of 1.0
# ([8068](https://github.com/deepspeedai/DeepSpeed/pull/8068)), and its fp32 pipeline takes the first
# stage's norm for the model's.
