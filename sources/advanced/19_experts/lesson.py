# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 19 Experts
#
# {{badges}}
#
# **The question.** Mixtral-8x7B has 47B parameters and uses 13B of them for a token. What does that save, and what does
# it cost?
#
# **Promise.** You route tokens by hand, in one process and on four ranks, with equal losses; predict what ranks hold and send; and
# steer a router back into balance.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 80 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# For a token Mixtral computes what a dense model of 13B computes. Train both with Adam. How many times the bytes of the
# dense model's parameters, gradients and [states](../00_glossary.ipynb) do Mixtral's take?

# %%
my_bet_times = 1.0

# %% tags=["setup"]
here = setup("advanced/19")

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from utils import check, run_ranks, show, traffic

# %% jupyter={"source_hidden": true}
from functools import partial

from transformers import AutoModelForCausalLM, DeepseekV3Config

from utils.catalog import link
from utils.fitting.model_configs import model_config
from utils.lessons.lesson_19.at_size import qwen3_30b_a3b
from utils.lessons.lesson_19.exchange import gathered_counts
from utils.lessons.lesson_19.figures import draw_exchange, draw_held_and_used, draw_load, draw_mesh
from utils.lessons.lesson_19.layers import Biased, Mixture, dense, experts_held, keep_my_experts, small_model
from utils.lessons.lesson_19.published import LAYOUTS, LAYOUTS_SOURCE, PARAMETERS
from utils.lessons.lesson_19.small import adam_bytes, forward_flops, kept_bytes
from utils.lessons.lesson_19.training import counting, first_come, held_out, train, train_on_text
from utils.simulation.devices import simulated_device

# %% [markdown]
# ## 1. Held, and used
#
# A mixture of experts has $E$ feed-forward layers in place of one, the *experts*, and a *router*, a small matrix that sends
# each token to $k$ of them. All else is used by every token, also the *shared expert* that DeepSeek adds. So $E$ and $k$ say
# what is used:

# %%
CONFIGS = {"Mixtral-8x7B": model_config("mistralai/Mixtral-8x7B-v0.1"),
           "Qwen3-30B-A3B": model_config("Qwen/Qwen3-30B-A3B"), "DeepSeek-V3": DeepseekV3Config()}
models = {}
for name, config in CONFIGS.items():
    with torch.device("meta"):  # shapes alone
        model = AutoModelForCausalLM.from_config(config)
    E, k = config.num_local_experts, config.num_experts_per_tok
    held = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for at, p in model.named_parameters() if ".experts." in at)
    models[name] = held / 1e9, (held - experts * (E - k) / E) / 1e9
    print(f"{name:<14} {k} of {E:>3} experts: {models[name][0]:6.2f}B held, {models[name][1]:5.2f}B used;",
          "published: {:g}B and {:g}B ({})".format(*PARAMETERS[name]))

# %%
show(draw_held_and_used(models),
     alt="Billions of parameters that a token uses, and that are held: Mixtral 12.9 and 46.7, Qwen3-30B-A3B 3.4 and 30.5, "
     "DeepSeek-V3 37.6 and 671.")
held, used = models["Mixtral-8x7B"]
print(f"states at 16 bytes a parameter: {16 * held:.0f} GB, and {16 * used:.0f} GB of a dense model; "
      f"{held / used:.1f} times as many, and your bet was {my_bet_times}")

# %% [markdown]
# **Read it.** **Arithmetic follows what is used, states what is held.** Adam keeps states for every expert, also for one that
# got no token.
#
# **Question.** Qwen3-30B-A3B, Adam in mixed precision, 16 bytes a parameter. How many GB ($10^9$) of parameters,
# gradients and states have all ranks together, if nothing is held twice?

# %%
states_gb = ...
check("19.states_gb", states_gb)

# %% [markdown]
# ## 2. Router, top-k, dispatch
#
# The router gives each token a probability for each expert. The token goes to the $k$ largest, and their outputs are
# added, weighted by those probabilities, scaled to sum to 1. An expert is the feed-forward layer of a Llama.

# %%
def route(x, router, k, bias=0.0):  # the bias comes in section 4
    p = (x @ router).softmax(-1)  # (tokens, E)
    choice = (p + bias).topk(k, -1).indices
    weight = p.gather(-1, choice)
    return choice, weight / weight.sum(-1, keepdim=True), p


def one_expert(rows, w_in, w_out):
    gate, up = (rows @ w_in).chunk(2, -1)
    return (F.silu(gate) * up) @ w_out


# %% [markdown]
# A token's vector is copied $k$ times. These **rows** are sorted by expert, so that each expert has its rows in one piece.
# That is *dispatch*; *combine* adds what comes back to the tokens:

# %%
def by_expert(rows, counts, w_in, w_out):  # also for experts without rows: their gradients are 0, not missing
    return torch.cat([one_expert(part, a, b) for part, a, b in zip(rows.split(counts), w_in, w_out, strict=True)])


def dispatch_and_combine(x, choice, weight, w_in, w_out):
    order = choice.flatten().argsort(stable=True)  # rows by expert
    token = order // choice.shape[1]  # whose row it is
    counts = choice.flatten().bincount(minlength=len(w_in)).tolist()
    rows = by_expert(x[token], counts, w_in, w_out)
    return torch.zeros_like(x).index_add(0, token, weight.flatten()[order, None] * rows)


def mixture(x, router, w_in, w_out, k, bias=0.0):
    return dispatch_and_combine(x, *route(x, router, k, bias)[:2], w_in, w_out)


# %% [markdown]
# Is it what the definition says: every expert on every token, times a weight that is mostly zero? And one call does what the
# loop does, `grouped_mm`: rows of all experts, and where each expert's end. With Qwen3's 128 experts a loop would start
# 256 small products a layer. (`Mixture` holds the matrices: `layers.py`, in
# `sources/advanced/19_experts`.)

# %%
RANKS, H = 4, 32  # of section 3; channels
torch.manual_seed(0)
layer, x = Mixture(H, 48, 8, 2, mixture), torch.randn(200, H)
choice, weight, _ = route(x, layer.router, 2)
w_in, w_out = layer.experts.w_in, layer.experts.w_out
defined = sum(((choice == e) * weight).sum(-1, keepdim=True) * one_expert(x, w_in[e], w_out[e]) for e in range(8))

order = choice.flatten().argsort(stable=True)
ends = choice.flatten().bincount(minlength=8).cumsum(0).int()
gate, up = F.grouped_mm(x[order // 2], w_in, offs=ends).chunk(2, -1)
rows = F.grouped_mm(F.silu(gate) * up, w_out, offs=ends)
grouped = torch.zeros_like(x).index_add(0, order // 2, weight.flatten()[order, None] * rows)
for way, found in (("dispatched", layer(x)), ("grouped_mm", grouped)):
    gap = ((found - defined).norm() / defined.norm()).item()
    print(f"{way}: {gap:.0e} from the definition, in fp32")
    assert gap < 1e-6, f"{way} computes something else: fp32 rounds at 6e-8, and sums have few terms"

# %% [markdown]
# Equal to the bit here: the same terms, in the same order.
#
# **Predict.** A mixture ($E = 8$, $k = 2$, experts of width 512) beside a dense layer of width 1,024, which computes as much,
# and one of width 4,096, which holds as many parameters. Which columns are alike?

# %%
layers = {"dense, the same FLOPs": dense(256, 1024), "8 experts, 2 a token": Mixture(256, 512, 8, 2, mixture),
          "dense, the same states": dense(256, 4096)}
for name, layer in layers.items():
    x = torch.randn(2048, 256, requires_grad=True)
    flops, kept = forward_flops(layer, x), kept_bytes(layer, x)
    states = adam_bytes(layer, lambda layer=layer, x=x: layer(x).sum().backward())
    print(f"{name:<24} {flops / 1e9:5.2f} GFLOP forward, {states / 2**20:5.1f} MiB of parameters, gradients and states,",
          f"{kept / 2**20:5.1f} MiB kept for backward (measured)")

# %% [markdown]
# **Read it.** FLOPs are the small layer's, but for the router; states the large one's. What is kept for backward follows $k$, not
# $E$: 46 MiB, beside 130. Its 12 beyond the small layer's are three times $k$ copies of a token's
# vector (4 MiB): as experts got it, as they gave it, and weighted, which `index_add` keeps. **At equal FLOPs a
# mixture costs states; at equal states it saves FLOPs and activations.**
#
# ## 3. Experts on four ranks
#
# **Expert parallelism**: each rank holds $E/4$ experts and reads its own tokens. Rows travel to their experts and back by an
# all-to-all; gradients go the same way, with sizes exchanged:

# %%
class Send(torch.autograd.Function):
    """out[r] rows go to rank r, into[r] rows come from it."""

    @staticmethod
    def forward(ctx, rows, out, into, group):
        ctx.back = into, out, group
        got = rows.new_empty(sum(into), rows.shape[1])
        dist.all_to_all_single(got, rows, into, out, group=group)
        return got

    @staticmethod
    def backward(ctx, gradient):
        return Send.apply(gradient.contiguous(), *ctx.back), None, None, None


# %% [markdown]
# How many rows will come? Each rank first tells all others its counts: an all-gather (`gathered_counts`, in `exchange.py` of
# the same folder).

# %%
def mixture_on_ranks(x, router, w_in, w_out, k, bias=0.0, group=None):
    choice, weight, p = route(x, router, k, bias)
    order = choice.flatten().argsort(stable=True)
    token, held = order // k, len(w_in)
    everyone = gathered_counts(choice, p, held, group)  # (ranks, E): rows of each rank for each expert
    place = dist.get_rank(group)
    mine = everyone[:, place * held : (place + 1) * held]  # what each rank sends to each of my experts
    out, into = everyone[place].view(-1, held).sum(1).tolist(), mine.sum(1).tolist()  # a GPU's host waits here
    rows = Send.apply(x[token], out, into, group)
    expert = torch.arange(held).repeat(len(mine)).repeat_interleave(mine.flatten())  # rows came by sender
    by = expert.argsort(stable=True)
    done = by_expert(rows[by], mine.sum(0).tolist(), w_in, w_out)
    back = Send.apply(done[by.argsort()], into, out, group)
    return torch.zeros_like(x).index_add(0, token, weight.flatten()[order, None] * back)


# %% [markdown]
# **The rule of gradients.** The loss is the mean over all ranks' tokens, equally many on each. Everything but the experts stands on
# every rank, and each rank has a part of its gradient: sum over the ranks, then divide by 4. An expert stands on *one* rank, and has
# worked on all ranks' rows: its gradient is summed already, and only divided by 4.

# %%
def by_the_rule(model):
    for name, p in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def on_ranks():
    model = small_model(mixture)
    keep_my_experts(model, dist.get_rank(), RANKS, mixture_on_ranks)
    with traffic() as sent:
        losses = train(model, by_the_rule)
    return losses, experts_held(model), sum(row.payload_bytes for row in sent.rows if row.collective == "all-to-all")


# %% [markdown]
# **Predict the bytes.** Each of $R = 4$ ranks has $T = 32$ tokens. It puts in $kT$ rows of $h$ numbers, and sends back as
# many as *came*, in forward and in backward. A rank's bytes depend on the router; over all ranks they are
# $R \cdot 4 k T h \cdot 8$ a layer and step, with rows that stay and without the counts. Two layers, 10 steps.

# %%
def in_one_process(make=torch.optim.AdamW):
    return train(small_model(mixture), make=make)


one = run_ranks(in_one_process, 1)[0]
results = run_ranks(on_ranks, RANKS)
gap = max(abs(a / b - 1) for a, b in zip(results[0][0], one, strict=True))
sent, predicted = sum(r[2] for r in results), RANKS * 4 * 2 * 32 * H * 8 * 2 * 10
held, everything = results[0][1], experts_held(small_model(mixture))
print(f"10 losses {gap:.0e} from one process, in fp64; a rank holds {held:,} of {everything:,} numbers of the experts")
print(f"put into exchanges: {sent:,} bytes by all ranks, predicted {predicted:,}")
assert gap < 1e-12, "fp64 sums in another order: more than 1e-12 in ten steps is another gradient"
assert sent == predicted and held == everything / RANKS, "over all ranks k T rows each, four times"

# %% jupyter={"source_hidden": true}
def rows_sent():
    model, given = small_model(mixture), []
    model.blocks[0].feedforward.experts.register_forward_pre_hook(lambda module, inputs: given.append(inputs))
    model(counting(0).chunk(RANKS)[dist.get_rank()][:, :-1])
    x, router, k = given[0]
    choice, _, p = route(x, router, k)
    return gathered_counts(choice, p, 2).view(RANKS, RANKS, 2).sum(-1)


first_step = run_ranks(rows_sent, RANKS)[0]
show(draw_exchange(first_step),
     alt="Four ranks send rows to four ranks that hold two experts each, and get as many back. From each rank 64 rows leave: "
     + "; ".join(f"rank {r} gets {n}" for r, n in enumerate(first_step.sum(0).tolist())) + ".")

# %% [markdown]
# **Question.** DeepSeek-V3: $k = 8$, $h = 7168$. How many MB ($10^6$ bytes) does a rank put into *one* exchange for 4,096 tokens
# in bf16?

# %%
mb_an_exchange = ...
check("19.mb_an_exchange", mb_an_exchange)

# %% [markdown]
# ### With FSDP: experts have a group of their own
#
# Let two ranks share the experts, and have four: each expert has two *replicas*. FSDP shards experts over **their replicas**
# and the rest over all ranks. It divides gradients by the size of its group, here 2; the loss is a mean over 4:
# `set_gradient_divide_factor` says so.

# %% jupyter={"source_hidden": true}
show(draw_mesh(),
     alt="Ranks 0 and 1 are replica 0, ranks 2 and 3 replica 1. Rows travel by all-to-all between ranks 0 and 1, and 2 and 3; the "
     "experts' weights and gradients by FSDP between ranks 0 and 2, and 1 and 3; all else by FSDP over all four.")

# %%
def with_fsdp(divide=True, make=torch.optim.AdamW):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    whole, model = init_device_mesh("cpu", (RANKS,)), small_model(mixture)
    exchange = partial(mixture_on_ranks, group=mesh.get_group("experts"))
    keep_my_experts(model, mesh.get_local_rank("experts"), 2, exchange)
    for block in model.blocks:
        experts = block.feedforward.experts  # a module of its own: FSDP gathers where its forward is called
        fully_shard(experts, mesh=mesh["replicas"])
        if divide:
            experts.set_gradient_divide_factor(RANKS)
        fully_shard(block, mesh=whole)
    fully_shard(model, mesh=whole)
    return train(model, make=make), experts_held(model)


losses, held = run_ranks(with_fsdp, RANKS)[0]
gap = max(abs(a / b - 1) for a, b in zip(losses, one, strict=True))
print(f"2 expert ranks x 2 replicas: losses {gap:.0e} from one process; a rank keeps {held:,} numbers of the experts")
assert gap < 1e-12 and held == everything / RANKS, "each number of the experts once, on one of four ranks"

# %% [markdown]
# **Why not FSDP alone?** It gathers *all* experts of a layer on every rank. For a layer and step on 64 ranks (weights gathered
# twice in bf16, gradients summed in fp32; Mixtral's 8 experts allow 8 parts, so 8 replicas):

# %%
tokens, ranks, moved = 4096, 64, 2 + 2 + 4  # bytes a number: two gathers, one sum
for name, c in CONFIGS.items():
    width = getattr(c, "moe_intermediate_size", c.intermediate_size)
    parts, held = min(ranks, c.num_local_experts), c.num_local_experts * 3 * c.hidden_size * width
    replicas = ranks // parts
    alone, within = moved * (1 - 1 / ranks) * held, moved * (1 - 1 / replicas) * held / parts
    rows = 4 * (1 - 1 / parts) * c.num_experts_per_tok * tokens * c.hidden_size * 2
    print(f"{name:<14} FSDP gathers {2 * held / 1e9:5.2f} GB at once and moves {alone / 1e9:5.1f}; EP {parts} x {replicas} moves",
          f"{rows / 1e9:.2f} of rows and {within / 1e9:.2f} of weights, as much from {tokens * (alone - within) / rows:,.0f} tokens on (predicted)")

# %% [markdown]
# FSDP alone holds a layer whole and the next one, gathered ahead: 45 GB for DeepSeek-V3. It moves more, up to the last column's
# tokens.
#
# Now **Qwen3-30B-A3B** on 16 H100: experts over 8, two replicas, 4,096 tokens a rank, fp32 states. *Simulated*: operations
# run without values, every allocation is counted. Memory adds up a rank's rows of all layers, and who is busy in one may rest in
# the next; so loads, rows over the mean, hold **in every layer**:

# %% jupyter={"source_hidden": true}
qwen, busy, again = (qwen3_30b_a3b(load=load, recompute=recompute) for load, recompute in ((1.0, False), (1.5, False), (1.5, True)))
card = simulated_device("H100").usable_bytes
a_row = 5120 * 2  # bytes that a row that came keeps, a layer
peaks = {"1.0, all kept (simulated)": qwen.peak_bytes, "1.2, all kept (predicted)": qwen.peak_bytes + 0.2 * 48 * 8 * tokens * a_row,
         "1.5, all kept (simulated)": busy.peak_bytes, "1.5, experts recomputed (simulated)": again.peak_bytes}
print("load 1.0:", ", ".join(f"{size / 2**30:.1f} GiB of {kind}" for kind, size in qwen.breakdown.items() if size > 2**29))
for case, peak in peaks.items():
    print(f"load {case:<35} peak {peak / 2**30:.1f} GiB, {'fits' if peak < card else 'does not fit'} the H100's {card / 2**30:.1f}")
c, active = CONFIGS["Qwen3-30B-A3B"], models["Qwen3-30B-A3B"][1] * 1e9
attention = 48 * tokens * 32 * 128  # scores and sums, half of them by causality; a token's numbers, as parameters count
flops = 6 * tokens * (active - c.vocab_size * c.hidden_size + attention)  # no product reads the embedding
print(f"experts once more: {2 * 48 * 8 * 3 * 2048 * 768 * tokens / flops:.0%} of the step's products (predicted)")
(exchanged,) = (row.payload_bytes for row in qwen.traffic if row.collective == "all-to-all")
assert exchanged == 48 * 4 * 8 * tokens * 2048 * 2, "48 layers, four exchanges of k rows a token, two bytes a number"
print(f"put into exchanges at load 1.0: {exchanged / 1e9:.1f} GB a step, as predicted")

# %% [markdown]
# **Read it.** The peak is at the loss, before gradients. A row that came keeps 5,120 numbers a layer: the vector, gate and up, and two
# tensors made of these. At 1.2 the rank fits; at 1.5 it does not. **Recompute the experts** and a row keeps its vector alone: 1.5 fits,
# and no row travels twice. Else: fewer tokens a rank, or a capacity (section 4).
#
# ## 4. Balance
#
# Nothing makes a router treat experts alike, and a layer ends when its busiest rank is done. Two cures. An **auxiliary loss**
# $E \sum_e f_e P_e$, with $f_e$ the share of rows that $e$ got and $P_e$ its mean probability: its gradient
# moves the router. Or a **bias**: added to probabilities for the *choice* alone, raised after each step for an
# expert with too few rows and lowered for one with too many. (DeepSeek-V3 adds it to sigmoid scores, beside
# a small loss.)

# %%
class Steered(Biased):  # a mixture with a `bias` of the choice: a buffer, so saved, and without a gradient
    all_ranks = True  # whose rows count

    def forward(self, x):
        choice, _, p = route(x.flatten(0, -2), self.router, self.k, self.bias)
        self.load = choice.flatten().bincount(minlength=p.shape[1])
        if dist.is_initialized() and self.all_ranks:
            dist.all_reduce(self.load)
        self.auxiliary = p.shape[1] * (self.load / self.load.sum() * p.mean(0)).sum()
        return super().forward(x)  # routes once more: the same choice


# %%
def added_loss(way, layer):  # 0.01, and 0.004 below, were not varied
    return 0.01 * layer.auxiliary if way == "auxiliary loss" else 0.0


def after_step(way, layer):
    if way == "bias":
        layer.bias += 0.004 * (layer.load.float().mean() - layer.load).sign()


WAYS, SEEDS = ("left alone", "auxiliary loss", "bias"), range(2)
trained = {way: [train_on_text(partial(Steered, 64, 64, 8, 2, mixture), partial(added_loss, way), partial(after_step, way), seed)
                 for seed in SEEDS] for way in WAYS}  # one block, 100 steps on the bytes of Python's own library
show(draw_load({way: [loads for _, loads in runs] for way, runs in trained.items()}),
     alt="Rows of the busiest of eight experts over the mean, by step, two seeds: near four of four at first; left alone it falls "
     "little, with an auxiliary loss or a bias to less than two.")

# %% [markdown]
# **Read it.** All three collapse: nearly every token chooses one expert. Left alone, that falls little; cures bring
# the mean below 2 by step 100.
#
# **On ranks** the load must be that of *all* ranks: an all-reduce of $E$ numbers. ($P_e$ needs none: the loss is linear in it.)
# Section 3's ten steps, steered by all ranks' load, and by a rank's own:

# %%
def with_cure(way, all_ranks):
    model, ranks = small_model(mixture, kind=Steered), dist.get_world_size()
    keep_my_experts(model, dist.get_rank(), ranks, mixture_on_ranks if ranks > 1 else mixture)
    for block in model.blocks:
        block.feedforward.all_ranks = all_ranks
    return train(model, by_the_rule, added_loss=partial(added_loss, way), after_step=partial(after_step, way))


# %%
CASES = [(way, all_ranks) for way in WAYS[1:] for all_ranks in (True, False)]
right, found = (run_ranks(lambda: {case: with_cure(*case) for case in CASES}, ranks)[0] for ranks in (1, RANKS))
for (way, every), losses in found.items():
    gap = max(abs(a / b - 1) for a, b in zip(losses, right[way, every], strict=True))
    print(f"{way:<15} by the load of {'all ranks' if every else 'its own rank'}: losses {gap:.0e} from one process")
    assert (gap < 1e-12) == every, "a load of one rank's tokens steers to another router"

# %% [markdown]
# **Read it.** By its own load each rank balances its own batch; biases drift apart.
#
# **Capacity.** Some implementations give each expert room for a multiple of the mean and **drop** rows beyond, which add
# nothing to their token. Others are *dropless*, as here; room is limited only now, on unseen text:

# %%
def with_room(capacity, dropped, x, router, w_in, w_out, k, bias):
    choice, weight, _ = route(x, router, k, bias)
    kept = first_come(choice, len(w_in), capacity * choice.numel() / len(w_in))  # (T, k): does the row find room?
    dropped.append(1 - kept.float().mean().item())
    return dispatch_and_combine(x, choice, weight * kept, w_in, w_out)


for way, runs in trained.items():
    losses = torch.tensor([held_out(model) for model, _ in runs])
    print(f"{way:<15} dropless {losses.mean():.3f} ({losses.min():.3f} to {losses.max():.3f})", end="")
    for capacity in (2.0, 1.25, 1.0):
        dropped = []
        limited = [held_out(model, partial(with_room, capacity, dropped)) for model, _ in runs]
        print(f";  {capacity:g}: {sum(dropped) / 2:3.0%} dropped, loss +{sum(limited) / 2 - losses.mean():.2f}", end="")
    print()

# %% [markdown]
# **Read it.** Dropless, ways differ by 0.04, seeds by up to 0.03: this does not tell which trains better. What a cure decides is
# *load*: with room for 1.25 times the mean, the router left alone drops 34% of rows.
#
# **Imbalance is waiting.** Of the experts' part of a layer the mean rank waits $1 - \text{mean}/\text{busiest}$. Two experts on each
# of four ranks, one seed:

# %%
for way, runs in trained.items():
    load = runs[0][0].blocks[0].feedforward.load.float()  # on the unseen text
    busiest, rank = (x.max() / x.mean() for x in (load, load.view(RANKS, 2).sum(1)))
    print(f"{way:<15} busiest expert {busiest:.1f} times the mean, busiest rank {rank:.2f} times: {1 - 1 / rank:.0%} waiting (predicted)")

# %% [markdown]
# **Read it.** Experts that share a rank average out. Time adds up the *busiest* rank's share of every layer, whoever that is.
#
# ## 5. Inside a node, or across nodes?
#
# Qwen3-30B-A3B on two nodes of 8 H100. EP 8 keeps rows in a node, and its two replicas' weights cross; EP 16 has no replicas,
# and half of its rows cross. (All else is alike, and left out.) Cards compute at 200 or 400 TFLOP/s:

# %% jupyter={"source_hidden": true}
NVLINK, NDR = (link(name).sustained_bytes_per_second for name in ("NVLink 4", "InfiniBand NDR"))
print(f"a rank sends {NVLINK / 1e9:.0f} GB/s in its node, {NDR / 1e9:.0f} across (sustained, published); seconds are predicted")
crossing = 48 * 128 * 3 * 2048 * 768 / 16 * (2 + 2 + 4)  # half of the experts that two replicas share: two gathers, fp32 sums
LAID = {"EP 8 in each node": (exchanged * 7 / 8 / NVLINK, crossing / NDR),
        "EP 16 across both": (max(exchanged * 7 / 16 / NVLINK, exchanged / 2 / NDR), 0.0)}
for speed in (200, 400):
    products = flops / speed / 1e12
    for name, (rows, weights) in LAID.items():
        print(f"{speed} TFLOP/s, {name}: products {products:.2f}, rows {rows:.2f} ({1.5 * rows:.2f} at load 1.5), weights {weights:.2f};",
              f"in all {products + rows + weights:.2f}, with weights hidden {max(products + rows, weights):.2f},",
              f"with both hidden {max(products, rows, weights):.2f}")

# %% jupyter={"source_hidden": true}
print(f"Qwen3-235B-A22B on 256 H100 (published: {LAYOUTS_SOURCE})")
print("EP  PP  TP  FSDP  dispatcher  recomputed                             seconds  TFLOP/s")
for ep, pp, tp, fsdp, dispatcher, recomputed, seconds, speed in LAYOUTS:
    print(f"{ep:<3} {pp:<3} {tp:<3} {fsdp:<5} {dispatcher:<11} {recomputed:<38} {seconds:<8} {speed}")

# %% [markdown]
# **Read it.** One after the other, EP 16 is faster. But FSDP gathers weights while products run, and rows are waited for. With
# weights hidden, **EP in a node and FSDP over replicas** wins, at either speed, and more so at load 1.5. Rows hidden, too, behind
# another micro-batch's products, draw level.
#
# Published rows agree: 17.6 s in a node with FSDP; across four nodes 19.7, or 17.6 with rows hidden. But EP 8 without
# FSDP is slowest: layouts differ in more than EP. DeepEP sends a token once to each *node*: exercise 2 of the lab.
#
# ## Break it, diagnose it
#
# **One.** Someone sets $k = 1$ and leaves the weights scaled to sum to 1. The loss falls. What never learns?

# %%
def as_they_are(x, router, w_in, w_out, k):
    return mixture(x, router, w_in, w_out, k) * route(x, router, k)[2].amax(-1, keepdim=True)  # for k = 1


def router_gradient(k, scaled):
    model = small_model(mixture if scaled else as_they_are, k)
    losses = train(model)
    return losses[-1] < losses[0], [block.feedforward.router.grad.norm().item() for block in model.blocks]


# %%
CASES = (2, True), (1, True), (1, False)
for (k, scaled), (falls, norms) in run_ranks(lambda: {case: router_gradient(*case) for case in CASES}, 1)[0].items():
    print(f"k = {k}, weights {'sum to 1' if scaled else 'as they are'}: the loss {'falls' if falls else 'stays'}, norms of router gradients",
          ", ".join(f"{norm:.0e}" for norm in norms))
    assert (max(norms) < 1e-12) == (k == 1 and scaled), "one weight divided by itself is 1, whatever the router says"

# %% [markdown]
# **Diagnose it.** A weight divided by itself is 1: no gradient reaches the router. Models with $k = 1$ use the probability
# as it is. Look at the router's gradient, without the auxiliary loss's.
#
# **Two.** The experts' gradients are averaged over the wrong group: over all ranks; or, with replicas, only over
# these, where FSDP is not told to divide by 4. AdamW, then SGD.

# %%
def over_all_ranks(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def averaged(fault, make):
    if fault == "replicas alone":
        return with_fsdp(divide=False, make=make)[0]
    model = small_model(mixture)
    keep_my_experts(model, dist.get_rank(), RANKS, mixture_on_ranks)
    return train(model, over_all_ranks if fault == "all ranks" else by_the_rule, make=make)


# %%
MAKES, FAULTS = (torch.optim.AdamW, torch.optim.SGD), ("none", "all ranks", "replicas alone")
right = run_ranks(lambda: {make: in_one_process(make) for make in MAKES}, 1)[0]
found = run_ranks(lambda: {(make, fault): averaged(fault, make) for make in MAKES for fault in FAULTS}, RANKS)[0]
for (make, fault), losses in found.items():
    gaps = [abs(a / b - 1) for a, b in zip(losses, right[make], strict=True)]
    print(f"{make.__name__:<5} fault: {fault:<14} first loss {gaps[0]:.0e}, tenth {gaps[-1]:.0e} from one process")
    assert (max(gaps) < 1e-12) == (fault == "none"), "a wrong group is found by the tenth loss in fp64"

# %% [markdown]
# **Diagnose it.** First losses are right: no gradient is in them. Averaged over all, each
# expert learns from others' rows. With the wrong divisor gradients are twice too large, and AdamW, which divides by their size,
# nearly hides it; clipping by norm would not. Compare *gradients* with one process, in fp64.
#
# ## Recap
#
# - Arithmetic and activations follow the $k$ experts that a token uses; parameters, gradients and states follow all $E$.
# - Expert parallelism moves rows: a mean rank puts in $4kTh$ numbers a layer and step, whatever $E$ is.
# - Experts' gradients are summed already: their group is their replicas, their divisor all ranks.
# - Imbalance is waiting, dropped rows, or one rank's memory. Steer by the load of all ranks.
#
# **Test yourself.** You double $E$, on twice the ranks, each with as many tokens. What happens to states and to bytes sent, on a rank?
#
# <details><summary>Answer</summary>
#
# States of experts stay; so do the rows that a mean rank puts in. A larger part of them leaves the rank, or the node.
#
# </details>
#
# Do the [lab](../../labs/advanced/19_experts.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/19_experts.ipynb).
#
# **References.** Shazeer and others, [arXiv:1701.06538](https://arxiv.org/abs/1701.06538). Lepikhin and others, *GShard*,
# [arXiv:2006.16668](https://arxiv.org/abs/2006.16668). DeepSeek-AI, [arXiv:2412.19437](https://arxiv.org/abs/2412.19437).

# %% [markdown]
# ## On Monday
#
# For a mixture whose experts do not fit beside each other on a GPU. In transformers (5.23 here), under `torchrun
# --nproc-per-node 8`:
#
# ```python
# # Before: name = "Qwen/Qwen3-30B-A3B"; batches of this rank, equally many tokens on each; a folder that all nodes see;
# # world_size = int(os.environ["WORLD_SIZE"]); ep_size = 8, the ranks of a node: it divides the experts and world_size.
# import torch
# import torch.distributed as dist
# from torch.nn.utils import clip_grads_with_norm_, get_total_norm
# from transformers import AutoModelForCausalLM
# from transformers.distributed import DistributedConfig
# from transformers.distributed.checkpoint import save_optimizer_distributed
#
# layout = DistributedConfig(fsdp_size=world_size, ep_size=ep_size, fsdp_mixed_precision=True)  # computes in bf16, sums in fp32
# model = AutoModelForCausalLM.from_pretrained(name, distributed_config=layout, dtype=torch.float32)  # else bf16, as saved
# model.router_aux_loss_coef = 0.001  # changing model.config does nothing once the model is made
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
# meshes, k = {}, model.config.num_experts_per_tok  # experts lie on a mesh of their own
# for p in model.parameters():
#     meshes.setdefault(p.device_mesh, []).append(p)
#
# for batch in batches:
#     out = model(input_ids=batch, labels=batch, output_router_logits=True)  # adds the auxiliary loss
#     out.loss.backward()
#     norm = torch.stack([get_total_norm([p.grad for p in part]).full_tensor() for part in meshes.values()]).norm()
#     for part in meshes.values():
#         clip_grads_with_norm_(part, 1.0, norm)
#     optimizer.step()
#     optimizer.zero_grad()
#     load = torch.stack([r.topk(k).indices.flatten().bincount(minlength=r.shape[-1]) for r in out.router_logits]).float()
#     dist.all_reduce(load)  # rows of all ranks, (layers, experts)
#     if dist.get_rank() == 0:
#         print("busiest expert over the mean, by layer:", *(f"{x:.1f}" for x in (load.amax(1) / load.mean(1)).tolist()))
#
# model.save_pretrained(folder, distributed_checkpoint=True)  # each rank its part; from_pretrained(folder, ...) as above reads it
# save_optimizer_distributed(model, optimizer, f"{folder}/optimizer")  # load_optimizer_distributed reads it
# ```
#
# **Look at** the load, from the first step on: past twice the mean, raise the coefficient. It is not section 4's: here $f$ sums to
# $k$, and layers are pooled. (DeepSeek-V3's choice has a bias that this `load` leaves out.) Tried on four
# CPU ranks: one process's loss, and reloads equal. In plain PyTorch, with layers that exchange rows as in section 3:
#
# ```python
# # Before: `model` with `layers`, each with `experts` that hold this rank's share and exchange rows over mesh["experts"];
# # world_size ranks, expert_ranks of which share the experts; a loss that is the mean of the rank's own batch.
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# replicas = world_size // expert_ranks
# mesh = init_device_mesh(device.type, (replicas, expert_ranks), mesh_dim_names=("replicas", "experts"))
# whole = init_device_mesh(device.type, (world_size,))
# for layer in model.layers:
#     fully_shard(layer.experts, mesh=mesh["replicas"])
#     layer.experts.set_gradient_divide_factor(world_size)  # holds for one replica, too; there fp16 is divided twice
#     layer.experts.set_force_sum_reduction_for_comms(replicas > 1)  # else bf16 sums are 0 to PyTorch 2.13 (issue 190745)
#     fully_shard(layer, mesh=whole)
# fully_shard(model, mesh=whole)
# ```
#
# **Look at** an expert's gradient beside that of one process on the same tokens, in fp32: equal to rounding, not twice.
# Parameters lie on two meshes, and one name means other experts on other ranks: clip by a norm summed over both, and save
# each rank's share under its own name.
#
# Megatron-LM, Qwen3-30B-A3B: `--num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8
# --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --expert-model-parallel-size 8 --moe-grouped-gemm`
