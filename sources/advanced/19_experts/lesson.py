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
# **Promise.** You route tokens by hand, in one process and in four; predict what ranks hold and send; and steer a router back into
# balance.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 80 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# For a token Mixtral computes what a dense model of 13B computes. Train both with Adam. How many times the dense model's bytes of
# parameters, gradients and [states](../00_glossary.ipynb) does Mixtral need?

# %%
my_bet_times = 1.0

# %% tags=["setup"]
here = setup("advanced/19")

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F

from utils import check, run_ranks, show, traffic

# %% jupyter={"source_hidden": true}
from functools import partial

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DeepseekV3Config

from utils.catalog import link
from utils.fitting.model_configs import model_config
from utils.lessons.lesson_19.at_size import qwen3_30b_a3b, qwen3_flops
from utils.lessons.lesson_19.exchange import gathered_counts
from utils.lessons.lesson_19.figures import draw_crossing, draw_exchange, draw_held_and_used, draw_load, draw_mesh
from utils.lessons.lesson_19.layers import Biased, Experts, Mixture, dense, experts_held, keep_my_experts, small_model
from utils.lessons.lesson_19.published import PARAMETERS
from utils.lessons.lesson_19.small import adam_bytes, forward_flops, kept_bytes
from utils.lessons.lesson_19.training import first_come, held_out, rows_sent, train, train_on_text
from utils.simulation.devices import simulated_device
from utils.views.breakdown import draw_breakdown, predicted

# %% [markdown]
# ## 1. Held, and used
#
# A mixture of experts has $E$ feed-forward layers in place of one, the *experts*, and a *router*, a small matrix that sends
# each token to $k$ of them. Every token uses all the rest, also the *shared expert* that DeepSeek adds.

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
    embedding = config.vocab_size * config.hidden_size / 1e9
    print(f"{name:<14} {k} of {E:>3} experts: {models[name][0]:6.2f}B held, {models[name][1]:5.2f}B used ({embedding:.2f}B embedding);",
          "published: {:g}B and {:g}B ({})".format(*PARAMETERS[name]))

# %%
show(draw_held_and_used(models),
     alt="Billions of parameters used, and held: Mixtral 12.9 and 46.7, Qwen3-30B-A3B 3.4 and 30.5, DeepSeek-V3 37.6 and 671.")
held, used = models["Mixtral-8x7B"]
print(f"states at 16 bytes a parameter: {16 * held:.0f} GB, and {16 * used:.0f} GB of a dense model; "
      f"{held / used:.1f} times as many, and your bet was {my_bet_times}")

# %% [markdown]
# **Read it.** **Arithmetic follows what is used, states what is held.** Adam keeps states for every expert, also for one that
# got no token. (The embedding is only looked up: it is used without a product.)
#
# **Question.** Qwen3-30B-A3B, 16 bytes a parameter. How many GB ($10^9$) of parameters, gradients and states have all ranks
# together, if nothing is held twice?

# %%
states_gb = ...
check("19.states_gb", states_gb)

# %% [markdown]
# ## 2. Router, top-k, dispatch
#
# The router gives each token a probability for each expert. The token goes to the $k$ largest, and their outputs are
# added, weighted by those probabilities, scaled to sum to 1. (Not with $k = 1$: the one weight would always be 1, and the router
# would get no gradient.) An expert is the feed-forward layer of a Llama.

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
# By definition every expert computes every token, times a weight that is mostly zero. Does dispatch give the same? And does
# `grouped_mm`, one call in place of the loop? (`Mixture` holds the matrices: `sources/advanced/19_experts/layers.py`.)

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
# **Read it.** FLOPs are the small layer's, but for the router, and states are the large layer's. What is kept for backward follows $k$:
# beside the small layer's, $k$ copies of each vector as experts got it, as they gave it, and weighted. **At
# equal FLOPs a mixture costs states and copies of vectors, here 36% more activations. At equal states it saves FLOPs
# and activations.** (Losses are not compared here.)
#
# ## 3. Experts on four ranks
#
# **Expert parallelism (EP)**: each rank holds $E/4$ experts and reads its own tokens. Rows travel to their experts and back by an
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
# How many rows will come? Each rank first tells all others its counts, by an all-gather (`gathered_counts`, in `exchange.py`).

# %%
def mixture_on_ranks(x, router, w_in, w_out, k, bias=0.0, group=None, work=by_expert):
    choice, weight, p = route(x, router, k, bias)
    order = choice.flatten().argsort(stable=True)
    token, held = order // k, len(w_in)
    everyone = gathered_counts(choice, p, held, group)  # (ranks, E): each rank's rows for each expert; a GPU's host waits here
    place = dist.get_rank(group)
    mine = everyone[:, place * held : (place + 1) * held]  # what each rank sends to each of my experts
    out, into = everyone[place].view(-1, held).sum(1).tolist(), mine.sum(1).tolist()
    rows = Send.apply(x[token], out, into, group)
    expert = torch.arange(held, device=mine.device).repeat(len(mine)).repeat_interleave(mine.flatten())  # rows came by sender
    by = expert.argsort(stable=True)
    done = work(rows[by], mine.sum(0).tolist(), w_in, w_out)
    back = Send.apply(done[by.argsort()], into, out, group)
    return torch.zeros_like(x).index_add(0, token, weight.flatten()[order, None] * back)


# %% [markdown]
# **The rule of gradients.** The loss is the mean over all ranks' tokens, equally many on each. All but the experts stands on
# every rank, and each rank has a part of its gradient: sum over the ranks, then divide by 4. An expert stands on *one* rank and has
# worked on all ranks' rows: its gradient is summed already, and only divided by 4. (The model has two blocks of 32
# channels, with 8 experts of width 48 and a shared one.)

# %%
def by_the_rule(model):
    for name, p in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def on_ranks(exchange=mixture_on_ranks):
    model = small_model(mixture)
    keep_my_experts(model, dist.get_rank(), RANKS, exchange)
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
sent, expected = sum(r[2] for r in results), RANKS * 4 * 2 * 32 * H * 8 * 2 * 10
held, everything = results[0][1], experts_held(small_model(mixture))
print(f"10 losses {gap:.0e} from one process, in fp64; a rank holds {held:,} of {everything:,} numbers of the experts")
print(f"put into exchanges: {sent:,} bytes by all ranks, predicted {expected:,}")
assert gap < 1e-12, "fp64 sums in another order: more than 1e-12 in ten steps is another gradient"
assert sent == expected and held == everything / RANKS, "over all ranks k T rows each, four times"

# %% jupyter={"source_hidden": true}
first_step = run_ranks(rows_sent, RANKS, mixture, route)[0]
show(draw_exchange(first_step, 32, 2),
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
# Let two of four ranks share the experts: each expert has two *replicas*. FSDP shards experts over **their replicas**
# and the rest over all ranks. It divides gradients by the size of its group, which is 2 for experts. The loss is a mean over 4, so
# `set_gradient_divide_factor` must say 4.

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
# FSDP splits dimension 0, which counts experts. Where a rank computes fewer experts than there are replicas, some replicas hold
# nothing, and others too much. `shard_placement_fn` splits another dimension. Here four replicas share one expert:

# %%
def numbers_kept(placement=None):
    experts, mesh = Experts(H, 48, 1, mixture), init_device_mesh("cpu", (RANKS,))
    fully_shard(experts, mesh=mesh, shard_placement_fn=placement)
    return sum(p.to_local().numel() for p in experts.parameters())


by_expert_index, by_channel = zip(*run_ranks(lambda: (numbers_kept(), numbers_kept(lambda p: Shard(1))), RANKS), strict=True)
print("numbers that each replica keeps, split in dimension 0:", *by_expert_index, "  in dimension 1:", *by_channel)
assert len(set(by_channel)) == 1 and sum(by_channel) == sum(by_expert_index), "each replica keeps as much"

# %% [markdown]
# **Why not FSDP alone?** It gathers *all* experts of a layer on every rank. In GB, for a layer and step on 256 ranks with 4,096
# tokens each, states aside:

# %%
# Bytes a number. Moved: two gathers in bf16, a sum in fp32. At the peak: weights of two layers, gradients, and these in fp32.
tokens, ranks, moved, at_peak = 4096, 256, 2 + 2 + 4, 2 + 2 + 2 + 4
print("predicted       FSDP alone: in backward    moved    EP x replicas: rows moved  weights moved    equal from tokens a rank")
for name, c in CONFIGS.items():
    width = getattr(c, "moe_intermediate_size", c.intermediate_size)
    parts, held = min(ranks, c.num_local_experts), c.num_local_experts * 3 * c.hidden_size * width
    alone, within = moved * (1 - 1 / ranks) * held, moved * (1 - parts / ranks) * held / parts  # over ranks / parts replicas
    rows = 4 * (1 - 1 / parts) * c.num_experts_per_tok * tokens * c.hidden_size * 2
    print(f"{name:<20}{at_peak * held / 1e9:17.1f} {alone / 1e9:11.1f} {f'{parts} x {ranks // parts}':>12} {rows / 1e9:14.2f} {within / 1e9:14.2f}",
          f"{tokens * (alone - within) / rows:20,.0f}")

# %% [markdown]
# **Read it.** In backward FSDP alone holds two layers' weights, and one layer's gradients in bf16 and in fp32: 113 GB for DeepSeek-V3.
# It also moves more bytes, below the last column's tokens. (Mixtral's 8 x 32 needs `Shard(1)`.)
#
# Now **Qwen3-30B-A3B** on H100s, EP 8, 4,096 tokens a rank, fp32 states. *Load* is a rank's rows over the mean rank's. The worst is
# assumed: one rank is busy in every layer. *Simulated*: operations run without values, and every allocation is counted.

# %% jupyter={"source_hidden": true}
even, busy, cured = (qwen3_30b_a3b(load=load, recompute=again) for load, again in ((1.0, False), (1.5, False), (1.5, True)))
one_node = predicted("8 ranks, load 1, all kept", {k: n * (2 if k in ("parameters", "optimizer state") else 1) for k, n in even.breakdown.items()})
bars, card = [even, busy, cured, one_node, qwen3_30b_a3b(ranks=8, load=3.0, layers_again=True)], simulated_device("H100").usable_bytes
show(draw_breakdown(bars, title="One rank at its peak, Qwen3-30B-A3B, EP 8", limit=f"{card / 2**30:.1f} GiB"),
     alt="; ".join(f"{bar.name}: {bar.breakdown.total_bytes / 2**30:.1f} GiB" for bar in bars))
(exchanged,) = (row.payload_bytes for row in even.traffic if row.collective == "all-to-all")  # k rows a token, four times
limit = 1 + 0.5 * (card - even.peak_bytes) / (busy.peak_bytes - even.peak_bytes)
print(f"16 ranks, all kept: fits the H100's {card / 2**30:.1f} GiB up to load {limit:.1f} (predicted)")

# %% [markdown]
# **Read it.** On 16 ranks even rows fit, and load 1.5 does not: a row keeps its vector, gate and up, and two tensors made of these.
# (Leave room for fragmentation.) **Recompute the experts**, and a row keeps its vector alone. What is wrapped
# decides whether rows travel again:

# %%
WRAPPED = {"experts alone": partial(mixture_on_ranks, work=partial(checkpoint, by_expert, use_reentrant=False)),
           "the whole layer": partial(checkpoint, mixture_on_ranks, use_reentrant=False)}
found = run_ranks(lambda: {name: on_ranks(exchange) for name, exchange in WRAPPED.items()}, RANKS)
for name in WRAPPED:
    gap = max(abs(a / b - 1) for a, b in zip(found[0][name][0], one, strict=True))
    print(f"recomputed {name:<16} losses {gap:.0e} from one process; exchanged {sum(r[name][2] for r in found) / sent:.1f} times the bytes")
    assert gap < 1e-12, "what is computed again is the same"
print(f"Qwen3's experts once more are {qwen3_flops(experts_alone=True) / 3 / qwen3_flops():.0%} of a step's products (predicted)")

# %% [markdown]
# **Read it.** Wrap the experts alone where the network is slow. transformers recomputes whole layers: rows travel six times in place of
# four, and one node fits at load 3.
#
# ## 4. Balance
#
# Nothing makes a router treat experts alike, and a layer ends when its busiest rank is done. There are two cures. An **auxiliary
# loss** $E \sum_e f_e P_e$, with $f_e$ the share of rows that $e$ got and $P_e$ its mean probability, moves the router by its
# gradient. A **bias** is added to probabilities for the *choice* alone. After each step it rises for an expert with too few
# rows and falls for one with too many.

# %%
class Steered(Biased):  # a mixture with a `bias` of the choice: a buffer, so saved, and without a gradient
    all_ranks = True  # whose rows count

    def forward(self, x):
        vectors = x.detach().flatten(0, -2)
        self.alike = (vectors.mean(0).square().sum() / vectors.square().sum(-1).mean()).item()  # 1: all vectors are one
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
                 for seed in SEEDS] for way in WAYS}  # 100 steps on the bytes of Python's own library
show(draw_load({way: [loads for _, loads, _ in runs] for way, runs in trained.items()}),
     alt="Rows of the busiest expert, and rank, over the mean, by step: soon near the worst; left alone they fall less than with a cure.")
print("left alone: part of a token's vector that is the mean vector,", *(f"step {n}: {trained['left alone'][0][2][n - 1]:.2f}" for n in (1, 10, 100)))

# %% [markdown]
# **Read it.** All three collapse at first: nearly every token chooses the same experts, while tokens' vectors become alike. Left
# alone, the load falls least. Experts that share a rank average out. In the experts' part of a layer the mean rank waits
# $1 - 1/\text{load}$, a third at load 1.5. (One block of 64 channels, 8 experts of width 64, batches of 8 x 64 bytes.)
#
# **Whose load?** For the bias it must be that of *all* ranks, by an all-reduce of $E$ numbers, or biases drift apart. For the
# auxiliary loss it is a choice: a rank's own load balances its own batch, and all ranks' load gives one process's losses.
# Section 3's ten steps:

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
# **Capacity.** Some implementations give each expert room for a multiple of the mean and **drop** rows beyond, which add
# nothing to their token. Others are *dropless*, as here. Room is limited only now, on unseen text:

# %% jupyter={"source_hidden": true}
def with_room(capacity, dropped, x, router, w_in, w_out, k, bias):
    choice, weight, _ = route(x, router, k, bias)
    kept = first_come(choice, len(w_in), capacity * choice.numel() / len(w_in))  # (T, k): does the row find room?
    dropped.append(1 - kept.float().mean().item())
    return dispatch_and_combine(x, choice, weight * kept, w_in, w_out)


for way, runs in trained.items():
    losses = torch.tensor([held_out(model) for model, *_ in runs])
    print(f"{way:<15} dropless {losses.mean():.3f} ({losses.min():.3f} to {losses.max():.3f})", end="")
    for capacity in (2.0, 1.25):
        dropped = []
        limited = [held_out(model, partial(with_room, capacity, dropped)) for model, *_ in runs]
        print(f";  room {capacity:g}: {sum(dropped) / 2:3.0%} dropped, loss +{sum(limited) / 2 - losses.mean():.2f}", end="")
    print()

# %% [markdown]
# **Read it.** Two seeds decide little between dropless losses. A cure decides the *load*: with room for 1.25 times the
# mean, the router left alone drops 34% of rows.
#
# ## 5. Inside a node, or across nodes?
#
# Qwen3-30B-A3B on two nodes of 8 H100. With EP 8 rows stay in a node, and the weights and gradients of two replicas cross. With
# EP 16 rows cross. A plain all-to-all sends a row for each of a token's 8 experts, of which 4 lie in the other node. A *dispatcher*
# such as DeepEP sends the vector **once per node**, which passes it on: one row crosses in place of four.

# %%
NVLINK, NDR = (link(name).sustained_bytes_per_second for name in ("NVLink 4", "InfiniBand NDR"))
weights = 48 * 128 * 3 * 2048 * 768 / 16 * (2 + 2 + 4)  # half of the experts of two replicas: two gathers in bf16, one sum in fp32
LAYOUTS = {"EP 8": (7 / 8, 0, weights), "EP 16": (7 / 16, 1 / 2, 0), "EP 16, once": (7 / 8, 1 / 8, 0)}  # shares of rows: inside, across


def step_seconds(layout, tokens, speed, hidden):
    inside, across, gathered = LAYOUTS[layout]
    rows, products = exchanged * tokens / 4096, qwen3_flops() * tokens / 4096 / speed / 1e12
    busy = products + max(rows * inside / NVLINK, rows * across / NDR)  # rows are waited for; the two networks overlap
    return max(busy, gathered / NDR) if hidden else busy + gathered / NDR


show(draw_crossing({name: (exchanged * a / 1e9, exchanged * b / 1e9, c / 1e9) for name, (a, b, c) in LAYOUTS.items()}),
     alt="; ".join(f"{name}: {exchanged * b / 1e9:.1f} GB of rows and {c / 1e9:.1f} of weights cross" for name, (_, b, c) in LAYOUTS.items()))

# %% [markdown]
# Weights are the same bytes for any number of tokens, and FSDP can move them *while* products run. Rows grow with tokens, and
# products wait for them. So tokens a rank are halved and doubled:

# %% jupyter={"source_hidden": true}
print(f"a rank sends {NVLINK / 1e9:.0f} GB/s in its node, {NDR / 1e9:.0f} across (sustained, published); seconds a step (predicted)")
names = "".join(f"{name:<13}" for name in LAYOUTS)
print(f"{'':<25}with weights hidden{'':<20} one after the other\n{'tokens':<8}{'TFLOP/s':<17}{names} {names}")
for tokens in (2048, 4096, 8192):
    for speed in (200, 400):
        for hidden in (True, False):
            seconds = [step_seconds(name, tokens, speed, hidden) for name in LAYOUTS]
            marks = "".join(f"{f'{x:.2f}' + '*' * (x < 1.03 * min(seconds)):<13}" for x in seconds)
            print(f"{tokens:<8,}{speed:<17}{marks}" if hidden else f" {marks}\n", end="")
print("* the fastest, or within 3% of it")

# %% [markdown]
# **Read it.** **The dispatcher decides, then the tokens. Sent once per node, EP 16 is never more than 3% behind, and it is ahead at
# 2,048 tokens, too few to hide 0.30 s of weights. With a plain all-to-all EP 8 wins if its weights are hidden, except at 2,048
# tokens and 400 TFLOP/s.**
#
# ## Break it, diagnose it
#
# The experts' gradients are averaged over the wrong group, all ranks; or over the right one, the replicas, by the wrong divisor, as
# FSDP was not told to divide by 4.

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
    assert (max(gaps) < 1e-12) == (fault == "none"), "a wrong group or divisor is found by the tenth loss in fp64"

# %% [markdown]
# **Diagnose it.** First losses are right: no gradient is in them. Averaged over all ranks, an expert learns from other experts'
# rows. With the wrong divisor gradients are twice too large, and AdamW, which divides by their size, nearly hides it. Compare
# *gradients* with one process, in fp64.
#
# ## Recap
#
# - Arithmetic and activations follow the $k$ experts that a token uses; parameters, gradients and states follow all $E$.
# - Expert parallelism moves rows: a mean rank puts in $4kTh$ numbers a layer and step, whatever $E$ is.
# - Experts' gradients are summed already: their group is their replicas, their divisor is the number of all ranks.
# - Imbalance is waiting, dropped rows, or one rank's memory. Count it by ranks.
# - Across nodes send a token once.
#
# **Test yourself.** You double $E$, on twice the ranks, each with as many tokens. What happens to states and to bytes sent, on a rank?
#
# <details><summary>Answer</summary>
#
# A rank's states of experts stay as they are, and so do the rows that a mean rank puts in. More of these leave the rank, or the node.
#
# </details>
#
# Do the [lab](../../labs/advanced/19_experts.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/19_experts.ipynb).
#
# **References.** [Mixtures](https://arxiv.org/abs/1701.06538), [GShard](https://arxiv.org/abs/2006.16668),
# [DeepSeek-V3](https://arxiv.org/abs/2412.19437), [DeepEP](https://github.com/deepseek-ai/DeepEP).

# %% [markdown]
# ## On Monday
#
# Qwen3-30B-A3B on one node of 8 H100, 4,096 tokens a rank (the last bar of section 3). In transformers (5.23 here), under `torchrun
# --nproc-per-node 8`:
#
# ```python
# # Before: name = "Qwen/Qwen3-30B-A3B"; batches of this rank, token numbers (1, 4096); a folder that all nodes see;
# # ep_size = 8, the ranks of a node; world_size = int(os.environ["WORLD_SIZE"]), a multiple of ep_size. world_size is at most the
# # number of experts: this library splits dimension 0, and further replicas would hold nothing.
# import torch
# import torch.distributed as dist
# from torch.nn.utils import clip_grads_with_norm_, get_total_norm
# from transformers import AutoModelForCausalLM
# from transformers.distributed import DistributedConfig
# from transformers.distributed.checkpoint import save_optimizer_distributed
#
# layout = DistributedConfig(fsdp_size=world_size, ep_size=ep_size, fsdp_mixed_precision=True)  # computes in bf16, sums in fp32
# model = AutoModelForCausalLM.from_pretrained(name, distributed_config=layout, dtype=torch.float32)  # else bf16 rounds updates away
# model.train()  # from_pretrained leaves evaluation mode, and there nothing is recomputed
# model.activation_checkpointing_enable()  # whole layers: rows travel six times a layer in place of four
# model.router_aux_loss_coef = 0.001  # model.config is no longer read once the model is made
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
# meshes, k = {}, model.config.num_experts_per_tok
# for p in model.parameters():  # experts lie on a mesh of their own, and a norm is of one mesh
#     meshes.setdefault(p.device_mesh, []).append(p)
#
# for batch in batches:
#     # The auxiliary loss is added. It counts this rank's tokens alone, over all layers together.
#     out = model(input_ids=batch, labels=batch, output_router_logits=True)
#     out.loss.backward()
#     norm = torch.stack([get_total_norm([p.grad for p in part]).full_tensor() for part in meshes.values()]).norm()
#     for part in meshes.values():
#         clip_grads_with_norm_(part, 1.0, norm)
#     optimizer.step()
#     optimizer.zero_grad()
#     rows = torch.stack([r.topk(k).indices.flatten().bincount(minlength=r.shape[-1]) for r in out.router_logits])
#     everyone = rows.new_empty(world_size * len(rows), rows.shape[1])  # rows of each rank and layer for each expert
#     dist.all_gather_into_tensor(everyone, rows)
#     by_rank = everyone.view(-1, ep_size, len(rows), ep_size, rows.shape[1] // ep_size).sum((1, 4))  # (groups, layers, EP ranks)
#     load = by_rank.amax(-1) / by_rank.float().mean(-1)
#     if dist.get_rank() == 0:
#         print(f"busiest EP rank over the mean: {load.mean():.2f} over layers, {load.max():.2f} in the worst layer")
#
# model.save_pretrained(folder, distributed_checkpoint=True)  # each rank saves its part; from_pretrained, as above, reads it
# save_optimizer_distributed(model, optimizer, f"{folder}/optimizer")  # load_optimizer_distributed reads it
# ```
#
# **Look at** the mean load: experts take that many times as long as even ones. If that costs too much, raise the coefficient. Memory
# allows load 3; with all kept, on two nodes, section 3's limit. Tried for one step on four CPU ranks: the mean loss is that of one
# process that takes the four batches apart, to bf16's rounding, and what is saved reloads equal. In plain PyTorch, with layers
# that exchange rows as in section 3:
#
# ```python
# # Before: device = torch.device("cuda"); `model` with `layers`, each with `experts` that hold this rank's share and exchange rows over
# # mesh["experts"]; world_size ranks, expert_ranks of which share the experts; a loss that is the mean of the rank's own batch.
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from torch.distributed.tensor import Shard
#
# replicas = world_size // expert_ranks
# mesh = init_device_mesh(device.type, (replicas, expert_ranks), mesh_dim_names=("replicas", "experts"))
# whole = init_device_mesh(device.type, (world_size,))
# for layer in model.layers:
#     few = replicas > next(layer.experts.parameters()).shape[0]  # else some replicas would hold nothing
#     fully_shard(layer.experts, mesh=mesh["replicas"], shard_placement_fn=(lambda p: Shard(1)) if few else None)
#     layer.experts.set_gradient_divide_factor(world_size)  # with one replica, too; but sum in bf16 or fp32, as fp16 is divided twice
#     # Sums first and divides after: dividing on the way, NCCL gives 0 in bf16 up to PyTorch 2.13 (issue 190745).
#     layer.experts.set_force_sum_reduction_for_comms(replicas > 1)
#     fully_shard(layer, mesh=whole)
# fully_shard(model, mesh=whole)
# ```
#
# **Look at** an expert's gradient beside one process's, in fp32: equal to rounding. Clip by a norm over both meshes. One name means
# other experts on other ranks: save each rank's share under its own name.
#
# Megatron-LM, flags of the mixture alone: `--num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8
# --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --expert-model-parallel-size 8 --moe-grouped-gemm
# --moe-token-dispatcher-type alltoall --recompute-granularity selective --recompute-modules moe_act`. (The default dispatcher
# gathers all tokens. Across nodes take `flex`, with DeepEP.)
