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
# **Promise.** You choose between offers for a training run: strike out what does not fit or is late, then let dollars decide. The
# question is: *13B parameters on 260B tokens within 30 days: A100s at 45% MFU with 3D parallelism, or cheaper A10s at 38% with
# data parallelism and checkpointing?*
#
# **MFU** (model FLOP utilization) is the share of a card's peak that goes into what the model needs. *3D* splits three things over
# the cards: the batch (data parallelism), each matrix (tensor parallelism) and the layers (pipeline parallelism).
#
# | minutes | hardware | runs |
# |---|---|---|
# | 60 | any laptop | under a minute on two CPU cores |
#
# ## A bet
#
# In bf16 an A100-80GB computes up to 312 TFLOP/s and an A10 up to 125 (NVIDIA's data sheets). An A10 rents for less than half of
# the A100's price. At the claimed MFUs, how many percent more does a FLOP that the model needs cost on A10s? (Negative: less.)

# %%
my_bet_percent = 0

# %% tags=["setup"]
here = setup("advanced/17a")

# %%
import pandas as pd

from evidence.validation import table
from utils import Batch, Cluster, Evidence, Plan, check, estimate, export, show
from utils.catalog import device, link, model_shape, price
from utils.lessons.lesson_17.offer_figures import draw_offers, draw_same_loss, draw_spot_price, verdict
from utils.lessons.lesson_17.scaling import CHINCHILLA, REPLICATION, UNROUNDED
from utils.planner.flops import model_flops
from utils.planner.goodput import DAY, best_interval_seconds, working_share

# %% [markdown]
# ## 1. Scaling laws disagree on the best size, but nearly agree on the price of missing it
#
# Before the offers, the size. The loss of a model with $N$ parameters after $D$ tokens follows a *scaling law*, fitted to many
# runs ([Hoffmann and others 2022](https://arxiv.org/abs/2203.15556)):
#
# $$L(N, D) = E + \frac{A}{N^\alpha} + \frac{B}{D^\beta}, \qquad C = 6 N D$$
#
# $E$ is the loss that no model gets below. $C$ is the FLOP of the training: for each parameter and token, 2 forward and 4 backward.
# Attention is left out.
#
# Three sets of constants are published: the paper's, rounded and not rounded, and a replication's, fitted to runs that it read
# from the paper's figure ([Besiroglu and others 2024](https://arxiv.org/abs/2404.10102)). The cell asks each set which size a
# million dollars should train, and what other sizes cost for the same loss. New words stand in the
# [glossary](../00_glossary.ipynb).

# %%
a100 = price("A100-80GB", "Lambda")
budget_usd, mfu = 1_000_000, 0.45
flop = budget_usd / a100.usd_per_gpu_hour * 3600 * device("A100-80GB").peak_flops_per_second("bf16") * mfu
laws = {"replication 2024": REPLICATION, "as printed 2022": CHINCHILLA, "not rounded 2022": UNROUNDED}
for name, law in laws.items():
    n, d = law.best_parameters(flop), law.best_tokens(flop)
    bill = {k: k * law.tokens_for(law.loss(n, d), k * n) / d for k in (0.25, 0.5, 2)}  # over the best size's
    print(f"{name:<17} {d / n:3.0f} tokens a parameter; the same loss at half the size {bill[0.5] - 1:+.0%}, at twice "
          f"{bill[2] - 1:+.0%}, at a quarter {bill[0.25]:.1f} times the bill ({Evidence.PREDICTED})")
figure = draw_same_loss(laws, flop, budget_usd, [1e9, 1e10, 1e11, 1e12], REPLICATION.loss(13e9, 260e9),
                        title=f"What ${budget_usd:,} of A100s buys at {mfu:.0%} MFU, and the bill at other sizes")
alt = "Left: three U-shaped bills with floors at different sizes; half the best size costs a fifth to a quarter more. "
show(figure, alt=alt + "Right: the more tokens are served, the smaller the size of fewest FLOP.")

# %% [markdown]
# **Read it.** On the left, the floors of the three curves lie apart: the laws disagree on the best size, 19B to 40B parameters
# for the same money. Beside its floor each law says nearly the same: half of the best size costs 21% to 26% more for the same
# loss, and twice the size 13% to 15% more.
#
# The right side adds service. Each served token costs another $2N$ FLOP, so a model with many users should be smaller and be
# trained for longer (*over-training*, [Sardana and others 2023](https://arxiv.org/abs/2401.00448)). The curve is the size of
# fewest FLOP in its whole life, at the loss of 13B after 260B tokens.
#
# The question's 13B reads 20 tokens a parameter: near the best by the replication, too large by the other two. Take it as given.
# Its bill now depends on speed.
#
# **Question.** A model reads as many tokens in service as it was trained on. What share of its life's FLOP was training?

# %%
training_share = ...
check("17.training_share", training_share)

# %% [markdown]
# ## 2. Ask for tokens per second: MFU depends on who counts
#
# $$\text{MFU} = \frac{\text{FLOP that the model needs}}{\text{seconds} \times \text{GPUs} \times \text{peak}}$$
#
# A token needs 6 FLOP for each parameter, forward and backward together. The input embedding does not count, since it is a
# look-up. Attention needs 12 x layers x width x length more, as counted by [PaLM](https://arxiv.org/abs/2204.02311), appendix B.
# Some reports leave attention out, so the table shows both. It reads four published runs
# ([LLaMA](https://arxiv.org/abs/2302.13971), [Llama 2](https://arxiv.org/abs/2307.09288)).

# %%
peak = device("A100-80GB").peak_flops_per_second("bf16")
published, rows = {row["model"]: row for row in table("gpu_hours")}, []
for name, shape, length in (("LLaMA-65B", "llama-65b", 2048), ("Llama2-7B", "llama-2-7b", 4096),
                            ("Llama2-70B", "llama-2-70b", 4096), ("Llama2-13B", "llama-2-13b", 4096)):
    model, hours = model_shape(shape), float(published[name]["gpu_hours"])
    rate = float(published[name]["tokens"].rstrip("T")) * 1e12 / hours / 3600  # tokens a second of one GPU
    needed = model_flops(model, Batch(sequences=1, sequence_length=length)) / length
    attention = 12 * model.layers * model.hidden * length
    rows.append({"run on A100-80GB": name, "GPU hours (published)": f"{hours:,.0f}",
                 "tokens/s a GPU": f"{rate:,.0f}", "MFU": f"{rate * needed / peak:.1%}",
                 "MFU without attention": f"{rate * (needed - attention) / peak:.1%}",
                 "$ a million tokens": f"{1e6 / rate / 3600 * a100.usd_per_gpu_hour:.2f}"})
llama_2_rate, llama_2_mfu = rate, rate * needed / peak  # of the 13B
display(pd.DataFrame(rows).style.hide().set_caption(f"Published GPU hours at ${a100.usd_per_gpu_hour} ({a100.origin()})"))

# %% [markdown]
# **Read it.** One run, Llama 2's 13B, reads as 42% or 37% by the counting rule alone. So ask a vendor for **tokens per second**
# at your length, which need no rule.
#
# The next cell reads such speeds for another 13B (MPT) at length 2,048
# ([llm-foundry](https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md)). It ran with FSDP,
# PyTorch's sharding of all states over the cards. **HFU** (hardware FLOP utilization) also counts what checkpointing computes a
# second time. These A100s recomputed every block, these H100s nothing. Compare runs by MFU, since recomputing is no progress.

# %%
fsdp_rate = {}  # tokens a second of one GPU
for row in table("llm_foundry"):
    as_here = row["model"] == "13b" and row["seq_len"] == "2048"
    if as_here and (row["n_gpus"], row["gpu"]) in (("64", "a100_40gb"), ("32", "h100_80gb")):
        fsdp_rate[row["gpu"]] = float(row["throughput_tok_s_gpu"])
        print(f"{row['n_gpus']} x {row['gpu']}: {row['throughput_tok_s_gpu']} tokens/s a GPU, MFU {row['mfu_pct']}%, "
              f"HFU {row['hfu_pct']}%, {row['global_batch_size']} sequences a step ({Evidence.PUBLISHED})")

# %% [markdown]
# ## 3. Spot is cheap in dollars if saves are fast, and long in days
#
# A spot node is cheap, but its provider may take it back at any time. Each loss costs a restart and the work since the last
# checkpoint. **Goodput** is the share of paid time that becomes lasting work. A useful hour costs the price over the goodput.
# Daly's formula gives the goodput from the rate of losses and the seconds of a save and a restart ([lesson
# 16](16_runs_that_survive.ipynb)).
#
# Look where the curves cross the line of 1. The cell takes four nodes of H100. Its dotted lines are rates seen elsewhere, on four
# AWS nodes of one V100 in three zones of 2023 ([SkyPilot's
# traces](https://github.com/skypilot-org/spot-traces/tree/main/preemption/4-node/aws-08-03-2023)).

# %%
firm, spot = price("H100", "Nebius", kind="on demand"), price("H100", "Nebius", kind="spot")
# SkyPilot's traces at 221da1a (published): node-days up, nodes lost, share of the time with all four nodes up.
zones = {"us-east-2a": (52.1, 75, 0.71), "us-west-2c": (58.2, 330, 0.79), "us-east-1f": (17.5, 195, 0.30)}
taken = {name: lost / node_days for name, (node_days, lost, _) in zones.items()}  # times a day, of one node


def goodput(nodes, taken_a_day=0.0, save_seconds=10.0, restart_seconds=300.0):
    """Share of paid time that is lasting work, by Daly's formula at the best checkpoint interval."""
    broken_a_day = 6.5e-3  # of a node: Meta's RSC-1 cluster, Kokolis and others 2024, arXiv:2410.21680
    mean = DAY / (nodes * (broken_a_day + taken_a_day))
    return working_share(best_interval_seconds(save_seconds, mean), save_seconds, restart_seconds, mean)


# %%
ratio = spot.usd_per_gpu_hour / firm.usd_per_gpu_hour
rates = [0.1 * 300 ** (k / 100) for k in range(101)]
lines = {f"a checkpoint stops training for {save} s": [(rate, goodput(4, rate, save)) for rate in rates]
         for save in (10, 60, 600)}
title = f"4 nodes of H100, all needed: spot at {ratio:.0%} of the price, restarts of 300 s"
alt = "Spot costs less than half while nodes stay; with checkpoints of ten minutes it crosses 1 before each node is lost ten times a day."
show(draw_spot_price(lines, ratio, taken, title=title), alt=alt)
print(f"on demand ${firm.usd_per_gpu_hour}, spot ${spot.usd_per_gpu_hour} ({spot.origin()})")
for name, rate in taken.items():
    print(f"{name}: a node taken back {rate:.1f} times a day, all four there {zones[name][2]:.0%} of the time ({Evidence.PUBLISHED}); "
          f"goodput {goodput(4, rate):.0%} with saves of 10 s, {goodput(4, rate, 600):.0%} with 600 s ({Evidence.PREDICTED})")

# %% [markdown]
# **Read it.** With saves of 10 s spot is cheaper at all three rates. With saves of 600 s it is dearer than on demand in
# us-east-1f.
#
# Spot also takes longer. The right axis shows one over the goodput. Divide that by the share of time with all four nodes there:
# in us-east-1f it makes 1 / (0.77 x 0.30) = 4.3 times the days. The dollars assume that you give the other nodes back while one
# is missing.

# %% [markdown]
# ## The scenario as asked: A100s or A10s
#
# First price the useful FLOP, and check that plain data parallelism can start on A10s.

# %%
thirteen, tokens, deadline = model_shape("llama-2-13b"), 260e9, 30
train_batch = Batch(sequences=1024, sequence_length=2048)
a10, usd_each = price("A10", "Lambda"), {}
for row, share in ((a100, 0.45), (a10, 0.38)):
    useful = device(row.gpu).bf16_tflops * share
    usd_each[row.gpu] = row.usd_per_gpu_hour / useful
    print(f"{row.gpu:<10} ${row.usd_per_gpu_hour:.2f} for {useful:.0f} useful TFLOP/s; sold by {row.instance_gpus} a node, "
          f"network between nodes {row.fabric} ({row.origin()})")
print(f"a useful FLOP costs {usd_each['A10'] / usd_each['A100-80GB'] - 1:+.0%} on A10s; your bet was {my_bet_percent:+d}%")

# %%
every_state = Plan(dp=128, recompute="full", framework="zero-paper")  # 16 bytes a parameter on each card
states = estimate(thirteen, Cluster(gpu="A10", nodes=16), every_state, train_batch).peak.state_bytes
full = f"{states / 1e9:.0f} GB of states on a card of 24"
print(f"plain data parallelism: {2 * thirteen.parameter_count / 1e9:.0f} GB of weights alone, {full}")

# %% [markdown]
# **Read it.** The A10 is cheaper by the hour and dearer by the FLOP.
#
# Plain data parallelism cannot start on it. Every card would hold all states (parameters, gradients, optimizer), and checkpointing
# shrinks only activations. Two other ways may fit. ZeRO-3 shards the states over all cards, as FSDP does. TP 2 PP 8 cuts each matrix
# in two and the layers into eight stages.
#
# The A10s below have the price of single cards, as Lambda sells them.
#
# Now the deadline. Each offer gets a low and a high speed, from other runs or from the planner. They are no bounds:
#
# | offer | low end | high end |
# |---|---|---|
# | A100, 3D | Llama 2's speed on 13B | the claim, 45% |
# | A100, FSDP | Llama 2's speed on 13B | llm-foundry's speed |
# | A10 | the high end divided by the planner's largest miss | the claim, 38%, or the prediction if that is lower |
# | H100 | the lowest MFU in Table 4 of Llama 3's paper | llm-foundry's speed |
#
# For A10s no speed of a 13B is at hand, so the planner (`estimate`, [lesson 15](15_design_studio.ipynb)) predicts it. Its *miss*
# is the predicted MFU over a published one. The next cells find three on A100s. Llama 2's plan and number of cards for 13B are
# not published, so two of the three rest on a guess.

# %%
needed = model_flops(thirteen, Batch(sequences=1, sequence_length=2048)) / 2048  # FLOP a token


def mfu_of(rate, card):
    """MFU of a card that trains so many tokens a second of this model."""
    return rate * needed / device(card).peak_flops_per_second("bf16")


def predicted(card, nodes, plan, batch=train_batch):
    """The planner's estimate; A10 nodes share one port of 100 Gb/s each."""
    port = link("Ethernet 100G")
    slower = {"network_bytes_per_second": port.link_bytes_per_second, "network_kind": port.kind}
    cluster = Cluster(gpu=card, nodes=nodes, **(slower if card == "A10" else {}))
    return estimate(thirteen, cluster, plan, batch)


# %%
zero_3 = {"zero_stage": 3, "recompute": "full", "framework": "fsdp"}
slow = mfu_of(llama_2_rate, "A100-80GB")
quick = mfu_of(fsdp_rate["a100_40gb"], "A100-80GB")  # the card of 40 GB has the same peak
as_llama_2, misses = Batch(sequences=1024, sequence_length=4096), []  # its length, and its 4M tokens a step
for nodes in (8, 128):  # Llama 2's plan and number of cards are not published for the 13B
    found = predicted("A100-80GB", nodes, Plan(dp=nodes, tp=4, pp=2, zero_stage=1, sequence_parallel=True), as_llama_2)
    misses.append(found.mfu / llama_2_mfu)
    print(f"{8 * nodes:,} A100 in 3D: {found.mfu:.0%} predicted, Llama 2 had {llama_2_mfu:.0%}: {misses[-1]:.2f} times too high; "
          f"{found.peak.needed_bytes / 1e9:.0f} of 80 GB")
miss = max(misses)
sharded = predicted("A100-80GB", 8, Plan(dp=64, micro_batch=16, **zero_3))
print(f"64 A100 with FSDP: {sharded.mfu:.0%} predicted, {quick:.0%} published: {sharded.mfu / quick:.2f} times too high; "
      f"{sharded.peak.needed_bytes / 1e9:.0f} of 80 GB")

# %%
a10_ways = {  # name: nodes of 8, plan, weeks of work
    "128 A10, ZeRO-3": (16, Plan(dp=128, micro_batch=8, **zero_3), 2),
    "256 A10, TP 2 PP 8": (32, Plan(dp=16, tp=2, pp=8, zero_stage=1), 5),
}
a10_offers = {}
for name, (nodes, plan, weeks) in a10_ways.items():
    found = predicted("A10", nodes, plan)
    high = min(0.38, found.mfu)
    print(f"{name}: {found.mfu:.0%} predicted, {found.peak.needed_bytes / 1e9:.0f} of 24 GB")
    a10_offers[name] = ("A10", nodes, a10.usd_per_gpu_hour, (high / miss, high), weeks, goodput(nodes), 1)
llama_3_mfu = min(float(row["bf16_mfu_pct"]) for row in table("llama3_table4")) / 100
h100_mfu = (llama_3_mfu, mfu_of(fsdp_rate["h100_80gb"], "H100"))

# %% [markdown]
# **Read it.** By the planner's count of a whole step, both sharded plans fit on an A10.
#
# The miss is 1.10 with FSDP. With 3D it is 1.49 or 1.20, for 64 or 1,024 guessed cards. On the A10s' slower network, assumed to
# be 100 Gb/s a node, it may be larger still.
#
# The question forgets the H100, so the next cells add it. Its low end is of Llama 3 405B on 16,384 cards, at length 131,072. The
# weeks of work are a judgement. In the picture, look at the line of 30 days.

# %%
there = zones["us-west-2c"][2]
offers = {  # card, nodes of 8, $ an hour, MFU from low to high, weeks of work, goodput, share of time that all nodes are there
    "64 A100, 3D": ("A100-80GB", 8, a100.usd_per_gpu_hour, (slow, 0.45), 3, goodput(8), 1),
    "64 A100, FSDP": ("A100-80GB", 8, a100.usd_per_gpu_hour, (slow, quick), 2, goodput(8), 1),
    "72 A100, FSDP": ("A100-80GB", 9, a100.usd_per_gpu_hour, (slow, quick), 2, goodput(9), 1),
    **a10_offers,
    "32 H100": ("H100", 4, firm.usd_per_gpu_hour, h100_mfu, 2, goodput(4), 1),
    "32 H100, spot": ("H100", 4, spot.usd_per_gpu_hour, h100_mfu, 3, goodput(4, taken["us-west-2c"]), there),
}


def run_cost(card, nodes, usd_per_hour, mfu, kept, there=1):
    """Days on the calendar and dollars of rent, for all tokens."""
    useful_flops = 8 * nodes * device(card).peak_flops_per_second("bf16") * mfu * kept  # a second
    paid_seconds = needed * tokens / useful_flops
    return paid_seconds / DAY / there, paid_seconds / 3600 * 8 * nodes * usd_per_hour


# %%
days, usd, rows = {}, {}, []
for name, (card, nodes, hourly, mfus, weeks, kept, there) in offers.items():
    ends = [run_cost(card, nodes, hourly, mfu, kept, there) for mfu in reversed(mfus)]
    days[name], usd[name] = zip(*ends, strict=True)
    rows.append({"offer": name, "MFU": f"{mfus[0]:.0%} to {mfus[1]:.0%}", "goodput": f"{kept:.1%}",
                 "weeks of work": weeks, "in 30 days": verdict(days[name], deadline)})
display(pd.DataFrame(rows).style.hide().set_caption(f"13B on 260B tokens ({Evidence.PREDICTED} from the MFUs)"))

# %%
same_mfu, _ = run_cost("A100-80GB", 8, a100.usd_per_gpu_hour, llama_2_mfu, goodput(8))
print(f"64 A100 at Llama 2's MFU of {llama_2_mfu:.1%} in place of its tokens/s: {same_mfu:.1f} days ({Evidence.PREDICTED})")
spare = deadline / min(days["256 A10, TP 2 PP 8"])
print(f"256 A10, TP 2 PP 8 are in time if the planner's miss is at most {spare:.2f} ({Evidence.PREDICTED})")
for name in ("72 A100, FSDP", "32 H100"):
    lowest = offers[name][3][0] * max(days[name]) / deadline
    print(f"{name} are in time down to an MFU of {lowest:.1%} ({Evidence.PREDICTED})")

# %%
alt = "Days and dollars of each offer as bars. 64 A100 straddle 30 days; 72 A100 and 32 H100 on demand are in time; "
alt += "spot straddles, and the A10s straddle or are late."
title = "13B on 260B tokens (A10s at the price of single cards)"
show(draw_offers(days, usd, {"128 A10, plain DP": full}, deadline, title=title), alt=alt)

# %% [markdown]
# **Read it.** *Too close to call* means that only the high end is in time.
#
# **A100s.** 64 are too close to call. Llama 2's tokens per second, reached at length 4,096, give 31.3 days. Its MFU, carried to
# length 2,048, gives 29.5. 72 cost the same dollars and are in time by either reading, down to an MFU of 37%.
#
# **A10s.** They cost more at their high end than the A100s at their low one. 128 are late. 256 in TP 2 PP 8 are in time if the
# miss is at most 1.44. With 3D it was 1.20 or 1.49: too close as well.
#
# **H100s.** 32 are in time down to an MFU of 26%, for less than half of the A100s' dollars. Spot halves that again, but its lost
# work and its gaps bring it to the deadline.
#
# Now price the weeks of work, take the least total in time, and change the assumptions.

# %%
week_usd = 5_000  # an assumption


def cheapest(without="", week_usd=week_usd, end=0, price_times=None):
    """The offer that is in time at this end of its MFU range (0: low) and costs least, its weeks of work included."""
    totals = []
    for name, (card, nodes, hourly, mfus, weeks, kept, there) in offers.items():
        hourly *= (price_times or {}).get(card, 1)
        took, paid = run_cost(card, nodes, hourly, mfus[end], kept, there)
        if took <= deadline and card != without:
            totals.append((paid + weeks * week_usd, name))
    total, name = min(totals)
    return f"{name}: ${total:,.0f}"


# %%
changes = {
    f"low MFUs, ${week_usd:,} a week of work": {},
    "half the price of a week": {"week_usd": week_usd / 2},
    "twice the price of a week": {"week_usd": 2 * week_usd},
    "high MFUs": {"end": 1},
    "A10s at half their price": {"price_times": {"A10": 0.5}},
    "A10s at half their price, high MFUs": {"price_times": {"A10": 0.5}, "end": 1},
    "H100s at twice their price": {"price_times": {"H100": 2}},
    "A100s at half their price": {"price_times": {"A100-80GB": 0.5}},
}
rows = [{"assumption": name, "as asked": cheapest("H100", **change), "with H100s": cheapest(**change)}
        for name, change in changes.items()]
display(pd.DataFrame(rows).style.hide().set_caption(f"The cheapest offer in time, rent and work ({Evidence.PREDICTED})"))

# %%
today, first = min((max(days[name]) + 7 * offer[4], name) for name, offer in offers.items())
print(f"counted from today, with the weeks of work: the first, {first}, takes {today:.1f} days ({Evidence.PREDICTED})")
for card, nodes, hourly, low in (("H100", 6, firm.usd_per_gpu_hour, h100_mfu[0]),
                                 ("A100-80GB", 16, a100.usd_per_gpu_hour, slow)):
    more_days, more_usd = run_cost(card, nodes, hourly, low, goodput(nodes))
    print(f"{8 * nodes} {card}: {more_days + 14:.1f} days with two weeks of work, ${more_usd:,.0f} of rent ({Evidence.PREDICTED})")

# %%
nine_nodes, fsdp_plan = Cluster(gpu="A100-80GB", nodes=9), Plan(dp=72, micro_batch=14, **zero_3)
job = export(thirteen, nine_nodes, fsdp_plan, Batch(sequences=1008, sequence_length=2048))
print(f"72 A100 with FSDP, 1,008 sequences a step: {len(job.write(here.root / 'build' / 'lesson-17'))} files in build/lesson-17")

# %% [markdown]
# **Read it.** *As asked, take A100s, with FSDP and nine nodes.* FSDP's high end was reached with 1,600 Gb/s between nodes, and
# the rented network is not stated. So measure before you take only eight. Half or twice the price of a week changes no choice at
# the low MFUs. In the column as asked, A10s win only at half of their price and their high MFU.
#
# *If you may choose the card, take H100s.* At the low MFUs they win at twice their price, and against A100s at half of theirs.
# But their price is Nebius's and the others' Lambda's: ask one seller for all three.
#
# Counted from today, with the weeks of work, every offer is late. More cards are a way out, if the MFU holds: 48 H100, or 128
# A100 for nearly three times the rent. Failed starts, evaluation and storage come on top.
#
# `build/lesson-17` holds the plan of 72 A100 as a job. Its batch of 1,008 sequences divides by 72.

# %% [markdown]
# ## Recap
#
# - First strike out what does not fit or is late, at a speed that somebody measured. Then dollars decide.
# - So take A100s, 72 of them with FSDP. On A10s plain data parallelism cannot start, and at the claimed MFUs a useful FLOP costs
#   37% more. If you may choose the card, take H100s: at these prices they cost less than half.
# - An offer's price is dollars a useful FLOP, not dollars an hour.
# - More cards of one kind cost the same dollars and fewer days, while the MFU and the goodput hold.
# - By each scaling law, half of its own best size costs a fifth to a quarter more training for the same loss.
#
# ### Test yourself
#
# An offer has half the price an hour and 40% of the useful FLOP/s. Take it?
#
# <details><summary>Answer</summary>
#
# No: a useful FLOP costs 1.25 times as much.
#
# </details>
#
# Do exercises 2 and 3 of the [lab](../../labs/advanced/17_cluster_and_budget.ipynb), then compare with the
# [solution](../../solutions/advanced/17_cluster_and_budget.ipynb).

# %% [markdown]
# ## On Monday
#
# Rent 1, 2 and 4 nodes for an hour. Log the steady tokens per second of all cards, the seconds that a checkpoint stops training, and
# the seconds from a killed rank to the next step. Put into the contract the network between nodes, and how soon a dead node is
# replaced.
#
# Your MFU: `model` is Hugging Face's dense model, not yet sharded. `peak_flops` is one card's, without sparsity. The last term is
# that of full attention.
#
# ```python
# config = model.config
# parameters = sum(p.numel() for p in model.parameters())
# if not config.tie_word_embeddings:  # then the input embedding is a look-up beside the head
#     parameters -= model.get_input_embeddings().weight.numel()
# # Heads times their width: in some models, such as Qwen3-0.6B, that is not the hidden size.
# head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
# width = config.num_attention_heads * head_dim
# flop_per_token = 6 * parameters + 12 * config.num_hidden_layers * width * sequence_length
# mfu = flop_per_token * tokens_per_second / (cards * peak_flops)
# ```
#
# Then choose. `offers` holds those that fit, each as `("64 A100", 64, 2.79, 1500, 0.99, 1.0)`. These are name, cards, dollars a
# card and hour, tokens a card and second, goodput, and the share of time with all nodes there. The dollars are rent: add your
# weeks of work.
#
# ```python
# in_time = []
# for name, cards, usd_per_card_hour, tokens_per_card_second, goodput, there in offers:
#     hours = tokens_wanted / (cards * tokens_per_card_second * goodput) / 3600  # that are paid
#     usd, days = hours * cards * usd_per_card_hour, hours / 24 / there
#     print(f"{name}: {days:.1f} days, ${usd:,.0f}")
#     if days <= deadline_days:
#         in_time.append((usd, name))
# best = min(in_time, default=None)  # None: nothing is in time
# ```
#
# The size that a budget should train, at twenty tokens a parameter (the replication's law says 19):
#
# ```python
# flop = budget_usd / usd_per_card_hour * 3600 * peak_flops * mfu
# best_parameters = (flop / (6 * 20)) ** 0.5
# ```
