# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17a What a run costs, and which offer to take
#
# {{badges}}
#
# **Promise.** You price a run by the token, say how many tokens a budget buys, and decide between offers with the deadline in it:
# *13B parameters on 260B tokens within 30 days: A100s at 45% MFU with 3D parallelism, or cheaper A10s at 38% with data
# parallelism and checkpointing?*
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60 | any laptop | under a minute on two CPU cores |
#
# ## A bet
#
# An A10 rents for less than half of an A100-80GB. A *useful* FLOP counts what the model needs, at the MFU that each offer claims.
# How much more does one cost on A10s, in percent? (Less is a negative number.)

# %%
my_bet_percent = 0

# %% tags=["setup"]
here = setup("advanced/17a")

# %%
import time

import pandas as pd
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from evidence.validation import table
from utils import Batch, Cluster, Evidence, Plan, Transformer, TransformerConfig, check, checkpoint_blocks
from utils import cost, estimate, export, search, show, text_tokens
from utils.catalog import ModelShape, device, link, model_shape, price
from utils.lessons.lesson_17.account import Account
from utils.lessons.lesson_17.decision import Option, decide, winners
from utils.lessons.lesson_17.decision_figures import draw_decision, draw_spot
from utils.lessons.lesson_17.scaling import CHINCHILLA, REPLICATION, UNROUNDED
from utils.lessons.lesson_17.scaling_figures import draw_purchase, draw_runs
from utils.lessons.lesson_17.scaling_fit import fit_law, leave_one_out
from utils.planner.failing_runs import RunPlan, failing_runs
from utils.planner.flops import hardware_flops, model_flops
from utils.planner.goodput import DAY, best_interval_seconds, goodput, working_share

# %% [markdown]
# ## 1. How many tokens does the money buy?
#
# The loss of a model with $N$ parameters after $D$ tokens follows a law
# ([Hoffmann and others 2022](https://arxiv.org/abs/2203.15556)):
#
# $$L(N, D) = E + \frac{A}{N^\alpha} + \frac{B}{D^\beta}, \qquad C = 6 N D$$
#
# Money buys seconds, seconds buy FLOP, and the law says how to divide them. How many FLOP is a matter of the **MFU** (model FLOP
# utilization), the share of the peak that goes into what the model needs:
#
# $$\text{MFU} = \frac{\text{FLOP that the model needs}}{\text{seconds} \times \text{GPUs} \times \text{peak}}$$
#
# Needed are, forward and backward, 6 FLOP a parameter and token, and for attention 12 x layers x width x length a token
# ([PaLM](https://arxiv.org/abs/2204.02311), appendix B). Every MFU on this page counts so; the law's $C$ leaves attention out. 45% is
# assumed here. New words stand in the [glossary](../00_glossary.ipynb).

# %%
a100 = price("A100-80GB", "Lambda")
budget_usd, mfu = 1_000_000, 0.45
flop = budget_usd / a100.usd_per_gpu_hour * 3600 * device("A100-80GB").peak_flops_per_second("bf16") * mfu
laws = {"replication 2024": REPLICATION, "as printed 2022": CHINCHILLA, "not rounded 2022": UNROUNDED}
for name, one in laws.items():
    n, d = one.best_parameters(flop), one.best_tokens(flop)
    off = max(one.loss(k * n, d / k) for k in (0.5, 2)) - one.loss(n, d)
    print(f"{name:<17} {n / 1e9:5.1f}B on {d / 1e9:6,.0f}B tokens, {d / n:4.0f} a parameter; half or twice the size: +{off:.4f} nats at most")
quality = REPLICATION.loss(13e9, 260e9)
served = [10.0**k for k in (9, 10, 11, 12, 13, 14)]
figure = draw_purchase(laws, flop, served, quality, title=f"What ${budget_usd:,} buys on A100s at {mfu:.0%} MFU, and for whom")
alt = "Left: each law's valley is flat and wide, and their floors lie at different sizes. "
show(figure, alt=alt + "Right: the more tokens are served, the more training tokens a parameter pay.")

# %% [markdown]
# **Read it.** One experiment, three answers. Rounding its constants moves 53 tokens a parameter to 83; the rest is the fit.
# [Besiroglu and others 2024](https://arxiv.org/abs/2404.10102) fitted again and found the 20 that the paper's other
# two methods gave. The valley (left) is flat: twice or half the best size costs less than 0.01 nats. That is why
# over-training is cheap. Right: the cheapest way, in FLOP, to the loss of 13B on 260B. A served token costs $2N$,
# so a model with many users should be smaller and train longer ([Sardana and others
# 2023](https://arxiv.org/abs/2401.00448)): total $6ND + 2N D_{served}$.

# %% [markdown]
# Where does such a law come from? Fit one yourself. Five tiny models read 8 bytes and guess the ninth; a token is a byte. The learning
# rate is constant, so each point of a run is like the end of a shorter one. The largest model is kept out of the fit.

# %%
windows = text_tokens(3_200_000).long().unfold(0, 9, 9)
windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
unseen, seen = windows[:20_000], windows[20_000:]


# %%
def train(width, steps=320, batch=1024):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 16), torch.nn.Flatten(), torch.nn.Linear(128, width),
                                torch.nn.ReLU(), torch.nn.Linear(width, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0, fused=True)
    for i in range(1, steps + 1):
        rows = seen[(i - 1) * batch : i * batch]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1]).backward()
        optimizer.step()
        if i in (80, 110, 160, 220, steps):
            with torch.no_grad():
                loss = torch.nn.functional.cross_entropy(model(unseen[:, :-1]), unseen[:, -1])
            yield 384 * width, i * batch, loss.item()  # parameters of the matrices


# %%
runs = [row for width in (8, 16, 32, 64) for row in train(width)]
larger = list(train(128))
law = fit_law(runs)
alt = "Loss falls with tokens and with size; lines of the fit run through four sizes and near the fifth."
show(draw_runs(runs, law, held_out=larger, title="A scaling law from four small models, and a fifth"), alt=alt)
foretold = law.loss(*larger[-1][:2])
print(f"the model kept out: {larger[-1][2]:.3f} {Evidence.MEASURED}, {foretold:.3f} {Evidence.PREDICTED}")
for row in [law, *leave_one_out(runs)]:
    print(f"{row.source:<15} E {row.e:.2f}  alpha {row.alpha:.2f}  beta {row.beta:.2f}")
assert abs(foretold - larger[-1][2]) < 0.1, "twice the size should lie near the fitted law"

# %% [markdown]
# **Read it.** Twice the size is foretold well. The floor $E$ is not: leave one size out and it moves,
# and $\alpha$ moves with it. Each of these floors lies below every loss that was measured. A fit
# predicts near its data.
#
# **Question.** A model reads as many tokens in service as it was trained on. What share of its
# life's FLOP was training?

# %%
training_share = ...
check("17.training_share", training_share)

# %% [markdown]
# ## 2. The account of a run
#
# MFU counts what the model needs. **HFU** (hardware FLOP utilization) counts what was computed, recomputation included, over the same
# seconds, GPUs and peak.
#
# First forward and backward of a small model, with and without checkpointing. A processor has no data sheet's peak: the speed of a
# large matrix product on the same cores stands for it. PyTorch counts the FLOP of products and attention, and the planner's formula
# predicts them. Seconds are the processor's here, since other programs run beside; a cluster's MFU takes the clock's.
# Checkpointing every block should add a forward of the blocks.

# %%
small = ModelShape(name="small", family="llama", layers=4, hidden=256, heads=8, feedforward=704,
                   vocabulary=256, max_sequence=128, positions="rotary", tied=False)
batch = Batch(sequences=8, sequence_length=128)
needed = model_flops(small, batch)
tokens_in = torch.randint(0, 256, (8, 128), generator=torch.Generator().manual_seed(0))


def step(model):
    logits = model(tokens_in).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, tokens_in.flatten()).backward()


# %%
square = torch.randn(2048, 2048)


def share_of_peak(work, flop, rounds=7):
    shares = []  # each step beside a large product of the same moment; other programs do not count
    for _ in range(rounds):
        began = time.process_time()
        torch.mm(square, square)
        between = time.process_time()
        work()
        product, step_seconds = between - began, time.process_time() - between
        shares.append(flop / step_seconds / (2 * 2048**3 / product))
    return sorted(shares)[rounds // 2]


# %%
computed = {}
for again in (False, True):
    model = Transformer(TransformerConfig.from_shape(small))
    model = checkpoint_blocks(model, every=int(again))
    with FlopCounterMode(display=False) as counter:
        step(model)
    computed[again] = counter.get_total_flops()
    mfu = share_of_peak(lambda model=model: step(model), needed)
    formula = hardware_flops(small, Plan(recompute="full" if again else "none", attention="unfused"), batch)
    print(f"checkpointing {again!s:<6} needs {needed / 1e9:.1f} GFLOP, formula {formula / 1e9:.1f}, counted "
          f"{computed[again] / 1e9:.1f}; MFU {mfu:.0%}, HFU {mfu * computed[again] / needed:.0%} "
          f"({Evidence.MEASURED})")

# %% tags=["nbval-check-output"]
counts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
too_old = "" if counts else f" (not counted on a CPU: PyTorch {torch.__version__} is too old)"
scores, last = (2 * width * 256 * batch.tokens for width in (128, 704))  # queries times keys, and the last product
print(f"without: counted - needed = {(computed[False] - needed) / 1e9:.2f} GFLOP; "
      f"flash computes the scores again: {4 * scores / 1e9:.2f}{too_old}")
added, forward = computed[True] - computed[False], needed / 3 - 2 * 256 * 256 * batch.tokens
print(f"with: {added / 1e9:.2f} more; a forward pass of the blocks {forward / 1e9:.2f}, less the last "
      f"product of each block {4 * last / 1e9:.2f}")
assert too_old or computed[False] - needed == 4 * scores, "the counter should see the scores computed twice"
assert too_old or added == forward - 4 * last, "recomputation should stop before each block's last product"

# %% [markdown]
# **Read it.** Counter and formula differ, and the last cell accounts for every FLOP between them. The attention kernel
# recomputes its scores even without checkpointing. And PyTorch stops recomputing as soon as it has what backward
# needs, so the last product of each block is spared. HFU flatters: it pays you for doing work twice. Compare runs by
# MFU.
#
# Now published runs: GPU hours of [Llama 2](https://arxiv.org/abs/2307.09288) and
# [LLaMA](https://arxiv.org/abs/2302.13971), at a dated price.

# %%
print(f"A100-80GB ${a100.usd_per_gpu_hour} ({a100.origin()}, age in days {a100.age_days()})")

# %%
published, rows = {row["model"]: row for row in table("gpu_hours")}, []
for name, shape, length in (("LLaMA-65B", "llama-65b", 2048), ("Llama2-7B", "llama-2-7b", 4096),
                            ("Llama2-70B", "llama-2-70b", 4096), ("Llama2-13B", "llama-2-13b", 4096)):
    hours, d = float(published[name]["gpu_hours"]), float(published[name]["tokens"].rstrip("T")) * 1e12
    needs = model_flops(shape, Batch(sequences=1, sequence_length=length)) / length * d
    run = Account(gpu="A100-80GB", seconds=3600 * hours, tokens=d, model_flops=needs, usd_per_gpu_hour=a100.usd_per_gpu_hour)
    plain = run.mfu * 6 * model_shape(shape).parameter_count * d / needs
    rows.append({"model": name, "GPU hours (published)": f"{hours:,.0f}", "MFU": f"{run.mfu:.0%}", "without attention": f"{plain:.0%}",
                 "million $": f"{run.usd / 1e6:.2f}", "$ a million tokens": f"{run.usd_per_million_tokens:.2f}"})
llama_2_mfu = run.mfu  # of the 13B
display(pd.DataFrame(rows).style.hide().set_caption("Published GPU hours, at the price above"))

# %% [markdown]
# **Read it.** These are billed hours, with every restart in them. The same run of 13B is 42% with attention and 38% without: ask which
# an offer means.

# %% [markdown]
# ## 3. Spot, and what it really costs
#
# A spot node is cheap and taken back at will. All nodes are needed, so each loss costs a restart and the
# work since the last checkpoint. A useful hour costs the price over the **goodput** (the share of time
# that is lasting work). Here are 8 nodes of H100 at two dated prices, with the simulated runs of lesson 16
# as points and Daly's formula as lines.

# %%
firm, spot = price("H100", "Nebius", kind="on demand"), price("H100", "Nebius", kind="spot")
nodes, broken, restart = 8, 6.5e-3, 300.0  # failures of a node and day: published for RSC-1


def goodputs(taken_a_day, save):
    mean = DAY / (nodes * (broken + taken_a_day))
    every = max(best_interval_seconds(save, mean), 1.0)
    plan = RunPlan(DAY, every, save, restart, nodes, 1000 * (broken + taken_a_day))
    return working_share(every, save, restart, mean), failing_runs(plan, 100).goodput.mean()


# %%
lines, points = {}, {}
for save in (10, 60, 600):
    name, kept = f"checkpoint {save} s", goodputs(1e-9, save)[0]
    ratio = spot.usd_per_gpu_hour / firm.usd_per_gpu_hour * kept
    found = {rate: goodputs(rate, save) for rate in (0.1, 1, 3, 6, 10, 15, 20, 30)}
    lines[name] = [(rate, ratio / line) for rate, (line, _) in found.items()]
    points[name] = [(rate, ratio / runs) for rate, (_, runs) in found.items()]
    worst = max(abs(line / runs - 1) for line, runs in found.values() if runs > 0.5)
    most = max(rate for rate, price_ratio in points[name] if price_ratio < 1)
    print(f"{name}: spot is cheaper up to {most} losses a node and day, and dearer at the next point; "
          f"formula and simulation within {worst:.1%} where half of the time is work")

# %%
alt = "Spot costs less than half while nodes stay; the curves rise with interruptions and cross 1, first "
show(draw_spot(lines, points, title=f"8 nodes of H100, all needed: spot at {spot.usd_per_gpu_hour / firm.usd_per_gpu_hour:.0%} of the firm price, restarts of {restart:.0f} s"),
     alt=alt + "with slow checkpoints.")
print(spot.origin(), "|", firm.origin())

# %% [markdown]
# **Read it.** Spot pays where a curve lies under 1: up to a few losses per node and day where a checkpoint stops training for ten
# minutes, more than ten with quick ones. Two things are not in the dollars. The run takes longer by a factor of one
# over goodput, which a deadline may forbid. And a provider takes nodes back in crowds, when everybody wants them: then
# no other node is at hand.
#
# ## The scenario as asked: A100s or A10s
#
# *13B parameters: A100s at 45% MFU with 3D parallelism, or cheaper A10s at 38% with data parallelism and
# checkpointing?* Before weighing anything, check that both can run, and price the useful FLOP.

# %%
thirteen, tokens, deadline = model_shape("llama-2-13b"), 260e9, 30
train_batch = Batch(sequences=1024, sequence_length=2048)
hourly = {name: price(name, "Lambda").usd_per_gpu_hour for name in ("A100-80GB", "A10")}
usd_each = {}
for name, share in (("A100-80GB", 0.45), ("A10", 0.38)):
    useful = device(name).bf16_tflops * share
    usd_each[name] = hourly[name] / useful
    print(f"{name:<10} ${hourly[name]:.2f} for {useful:.0f} useful TFLOP/s: ${1e3 * usd_each[name]:.1f} for 1,000 of them, an hour")
print(f"a useful FLOP costs {usd_each['A10'] / usd_each['A100-80GB'] - 1:+.0%} on A10s; your bet was {my_bet_percent:+d}%")

# %%
h100 = Cluster(gpu="H100", nodes=4, usd_per_gpu_hour=firm.usd_per_gpu_hour,
               network_bytes_per_second=8 * link("InfiniBand NDR").link_bytes_per_second)
llama_3_mfu = min(float(row["bf16_mfu_pct"]) for row in table("llama3_table4")) / 100
hundred = link("Ethernet 100G")  # one port a node, of RoCE, for all A10s
a10s = Cluster(gpu="A10", nodes=16, gpus_per_node=8, network_bytes_per_second=hundred.link_bytes_per_second, usd_per_gpu_hour=hourly["A10"])
plain = estimate(thirteen, a10s, Plan(dp=128, recompute="full", framework="zero-paper"), train_batch)
print(f"weights {2 * thirteen.parameter_count / 1e9:.0f} GB, with Adam's states {plain.peak.state_bytes / 1e9:.0f} GB, on a card of 24")

# %% [markdown]
# **Read it.** The A10 is cheaper an hour and dearer a FLOP. And plain data parallelism cannot start on
# it: the weights alone overflow the card, checkpointing or not. Checkpointing shrinks activations, and
# those are not the problem. What *could* run on A10s? Each way gets the lower of the MFU that was
# claimed and the one that the planner predicts. A mark is the best value over the option's own, times the
# weight; one more option changes the others' marks where it is best at something. The weeks of work are a judgement. The second row
# gives the A100s what Llama 2's 13B reached on them, in section 2. Days and dollars are divided by the goodput, by Daly's formula at 3.5
# to 25 failures in 1,000 node-days, with checkpoints of 10 s.

# %%
zero_3 = {"zero_stage": 3, "recompute": "full", "framework": "fsdp"}
ways = {  # name: (cards of 8 a node, network, plan, MFU claimed, effort in weeks: a judgement)
    "64 A100, 3D": ("A100-80GB", 8, None, Plan(dp=8, tp=4, pp=2, zero_stage=1, sequence_parallel=True), 0.45, 3),
    "64 A100, 3D, as Llama 2": ("A100-80GB", 8, None, Plan(dp=8, tp=4, pp=2, zero_stage=1, sequence_parallel=True), llama_2_mfu, 3),
    "128 A10, plain DP": ("A10", 16, hundred, Plan(dp=128, recompute="full", framework="zero-paper"), 0.38, 1),
    "128 A10, ZeRO-3, 100G": ("A10", 16, hundred, Plan(dp=128, micro_batch=8, **zero_3), 0.38, 2),
    "256 A10, ZeRO-3, 100G": ("A10", 32, hundred, Plan(dp=256, micro_batch=4, **zero_3), 0.38, 2),
    "192 A10, PP 6, 100G": ("A10", 24, hundred, Plan(dp=32, pp=6, zero_stage=1, recompute="full"), 0.38, 4),
    "256 A10, TP 2 PP 8, 100G": ("A10", 32, hundred, Plan(dp=16, tp=2, pp=8, zero_stage=1), 0.38, 5),
}
signed = export(thirteen, Cluster(gpu="A100-80GB", nodes=8), ways["64 A100, 3D"][3], train_batch)
print(f"# written to build/lesson-17: {len(signed.write(here.root / 'build' / 'lesson-17'))} files for 64 A100")


def found(card, nodes, network, plan, claimed, weeks, usd=None):
    fast = {} if network is None else {"network_bytes_per_second": network.link_bytes_per_second, "network_kind": network.kind}
    machines = Cluster(gpu=card, nodes=nodes, usd_per_gpu_hour=usd or hourly[card], **fast)
    row = estimate(thirteen, machines, plan, train_batch)
    return row, row.mfu / min(row.mfu, claimed), weeks  # how many times slower than predicted


# %%
reached = {}  # MFU, the lower of claimed and predicted; goodput


def matrix(a10_usd=None):
    rows = []
    for name, way in ways.items():
        row, slower, weeks = found(*way, usd=a10_usd if way[0] == "A10" else None)
        if not row.fits:
            full = f"states of {row.peak.state_bytes / 1e9:.0f} GB on a card of 24"
            rows.append(Option(name, {}, obstacle=full))
            continue
        left = goodput(row.cluster, checkpoint_seconds=10)
        bill = cost(row, tokens, left)  # over the middle of the range
        reached[name] = {"MFU": f"{row.mfu / slower:.0%}", "goodput": f"{sum(left.share) / 2:.1%}"}
        rows.append(Option(name, {"usd": bill.usd * slower, "days": bill.days * slower, "weeks": weeks}))
    return rows


# %%
weights, limits = {"usd": 3, "days": 1, "weeks": 1}, {"days": deadline}
ranked = decide(matrix(), weights, limits)
rows = [{"": row.option.name, **reached.get(row.option.name, {}), **row.option.values, "marks": row.score,
         "out, because": row.struck} for row in ranked]
display(pd.DataFrame(rows).style.format({"usd": "{:,.0f}", "days": "{:.1f}", "weeks": "{:.0f}", "marks": "{:.2f}"}, na_rep="")
        .hide().set_caption(f"13B on {tokens / 1e9:.0f}B tokens in {deadline} days, weights 3 : 1 : 1 ({Evidence.PREDICTED})"))
a100s = found(*ways["64 A100, 3D"])[0]
print(f"64 A100 meet the deadline from an MFU of {a100s.mfu * cost(a100s, tokens).days / deadline:.1%} on: 45% is claimed, "
      f"{llama_2_mfu:.1%} was Llama 2's, {a100s.mfu:.0%} is predicted")

# %%
prices = [hourly["A10"] * k / 20 for k in range(4, 27)]
shares = [k / 24 for k in range(25)]
grid = winners(matrix, prices, lambda usd: {"usd": usd, "days": (1 - usd) / 2, "weeks": (1 - usd) / 2}, shares, limits)
even = hourly["A100-80GB"] * device("A10").bf16_tflops * 0.38 / (device("A100-80GB").bf16_tflops * 0.45)
print(f"per useful FLOP an A10 breaks even at ${even:.2f} an hour, {even / hourly['A10'] - 1:.0%}")
a10 = [[bool(name) and "A100" not in name for name in row] for row in grid]
print(f"where dollars weigh 0.6, A10s win up to ${max(usd for usd, row in zip(prices, a10, strict=True) if row[14]):.2f} an hour; "
      f"at today's price, up to a weight of {max(share for share, won in zip(shares, a10[prices.index(hourly['A10'])], strict=True) if won):.2f}")
alt = f"Left: {ranked[0].option.name} leads; plain DP is out for memory, others for the deadline. Right: A10s win at low prices, "
figure = draw_decision(ranked, grid, shares, prices, title=f"13B on {tokens / 1e9:.0f}B tokens in {deadline} days: the lower of claimed and predicted MFU",
                       weight_label="weight of dollars (rest: days and weeks alike)",
                       price_label="A10, $ an hour", now=(0.6, hourly["A10"]))
show(figure, alt=alt + "or where dollars weigh little.")

# %% [markdown]
# **Read it.** Memory and deadline come first: no weight makes up for a run that cannot start or comes too late. The A100s lead
# by their claim, and at Llama 2's MFU still, with half a day to spare; a little below that they are late, and A10s win. At today's price A10s win, too, where
# dollars weigh less than a fifth; and the weeks are a judgement. So ask for a measured MFU before anything else. ZeRO-3 loses MFU from 128 to 256 cards:
# each has half the tokens to hide its gathers behind.
#
# And ask which card is missing from the question:

# %%
best, claimed = search(thirteen, h100, train_batch).best, llama_3_mfu
bill, slower = cost(best, tokens), best.mfu / min(best.mfu, claimed)
asked_for = Option("32 H100, nobody's offer", {"usd": bill.usd * slower, "days": bill.days * slower, "weeks": 3})
print(f"32 H100: MFU {best.mfu:.0%} ({Evidence.PREDICTED}), {claimed:.0%} for Llama 3 405B ({Evidence.PUBLISHED}); "
      f"by the lower {bill.days * slower:.1f} days, ${bill.usd * slower:,.0f} ({firm.origin()})")
for row in decide([*matrix(), asked_for], weights, limits):
    print(f"{row.option.name:<26}", f"marks {row.score:.2f}" if row.score else f"out: {row.struck}")

# %% [markdown]
# **Read it.** The H100s, at the lowest MFU of Llama 3's table (a far larger run) and another provider's price, beat every offer in dollars
# and days. With them in, two of the others change places: marks are shares of the best, so read the order of losers with care.
# Failures cost about 1% of so few nodes; on spot, put the goodput of section 3 in.

# %% [markdown]
# ## Recap
#
# - Compare runs by MFU, offers by dollars per useful FLOP, and both by the deadline. Memory comes before any weight.
# - A law predicts near its data. Its valley is flat: over-training is cheap, and pays where many tokens are served.
# - Spot is paid by goodput, and by the days that it adds.
#
# ### Test yourself
#
# An offer has half the price an hour and 40% of the useful FLOP/s. Take it?
#
# <details><summary>Answer</summary>
#
# No: a useful FLOP costs 1.25 times as much. Only if memory and deadline leave nothing else.
#
# </details>
#
# Do exercises 2 and 3 of the [lab](../../labs/advanced/17_cluster_and_budget.ipynb), in a copy (`make my-labs`), then compare with the
# [solution](../../solutions/advanced/17_cluster_and_budget.ipynb). The [capstone](99_capstone.ipynb) asks for all of it. Daly's paper
# stands in lesson 16.

# %% [markdown]
# ## On Monday
#
# Price your run from its tokens per second, of all cards together. `peak_flops` is the dense peak of your data type; `model` is yours,
# before it is sharded, and its config has `layers` and `hidden`.
#
# ```python
# parameters = sum(p.numel() for p in model.parameters())
# flop_per_token = 6 * parameters + 12 * layers * hidden * sequence_length  # forward and backward, attention's last
# mfu = flop_per_token * tokens_per_second / (cards * peak_flops)
# usd_per_million_tokens = 1e6 / tokens_per_second / 3600 * cards * usd_per_card_hour
# days = tokens_wanted / tokens_per_second / 86_400
# ```
#
# Compare offers by `usd_per_card_hour / (peak_flops * mfu)`, with an MFU that somebody measured, and divide days and dollars by the
# goodput. Then ask what the money buys: twenty tokens a parameter of the best size, more where many tokens are served.
#
# ```python
# flop = budget_usd / usd_per_card_hour * 3600 * peak_flops * mfu
# best_parameters = (flop / (6 * 20)) ** 0.5
# best_tokens = 20 * best_parameters
# ```
