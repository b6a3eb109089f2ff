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
# **Promise.** You route tokens by hand, also on four ranks; predict what ranks hold and send; and balance a router.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 80 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# For a token Mixtral computes what a dense model of 13B computes. How many times its
# [model states](../00_glossary.ipynb) (parameters, gradients and Adam's two moments, in bytes) does Mixtral need?

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
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DeepseekV3Config

from utils.catalog import link
from utils.fitting.model_configs import model_config
from utils.lessons.lesson_19.at_size import qwen3_30b_a3b, qwen3_flops
from utils.lessons.lesson_19.exchange import gathered_counts
from utils.lessons.lesson_19.figures import draw_crossing, draw_exchange, draw_held_and_used, draw_load, draw_mesh
from utils.lessons.lesson_19.layers import Biased, Mixture, dense, experts_held, keep_my_experts, small_model
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
    print(f"{name:<14} {k} of {E:>3} experts: {models[name][0]:6.2f}B held, {models[name][1]:5.2f}B used;",
          "published: {:g}B and {:g}B ({})".format(*PARAMETERS[name]))

# %%
show(draw_held_and_used(models),
     alt="Billions of parameters used, and held: Mixtral 12.9 and 46.7, Qwen3-30B-A3B 3.4 and 30.5, DeepSeek-V3 37.6 and 671.")
held, used = models["Mixtral-8x7B"]
print(f"model states at 16 bytes a parameter: {16 * held:.0f} GB, and {16 * used:.0f} GB of a dense model; "
      f"{held / used:.1f} times as many, and your bet was {my_bet_times}")

# %% [markdown]
# **Read it.** **Arithmetic follows what is used, model states follow what is held**: Adam keeps moments for every expert.
#
# **Question.** Qwen3-30B-A3B, 16 bytes a parameter. How many GB ($10^9$) of model states have all ranks together, if nothing is
# held twice?

# %%
states_gb = ...
check("19.states_gb", states_gb)

# %% [markdown]
# ## 2. Router, top-k, dispatch
#
# The router gives each token a probability for each expert. The token goes to the $k$ largest, and their outputs are
# added, weighted by those probabilities, scaled to sum to 1. (DeepSeek-V3 scores by a sigmoid.) An expert is
# the feed-forward layer of a Llama.

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
# A token's vector is copied $k$ times. These **rows** are sorted by expert, so that each expert has its rows in one piece. That is
# *dispatch*. *Combine* brings the results back into the tokens' order, and adds the $k$ of each token:

# %%
def by_expert(rows, counts, w_in, w_out):  # also for experts without rows: their gradients are 0, not missing
    return torch.cat([one_expert(part, a, b) for part, a, b in zip(rows.split(counts), w_in, w_out, strict=True)])


def combine(rows, weight):  # (tokens * k, H) in the tokens' order -> (tokens, H)
    return (weight[..., None] * rows.view(*weight.shape, -1)).sum(1)


def dispatch_and_combine(x, choice, weight, w_in, w_out):
    order = choice.flatten().argsort(stable=True)  # place i by expert was place order[i] by token
    counts = choice.flatten().bincount(minlength=len(w_in)).tolist()
    rows = by_expert(x[order // choice.shape[1]], counts, w_in, w_out)
    return combine(rows[order.argsort()], weight)


def mixture(x, router, w_in, w_out, k, bias=0.0):
    return dispatch_and_combine(x, *route(x, router, k, bias)[:2], w_in, w_out)


# %% [markdown]
# By definition every expert computes every token, times a weight that is mostly zero. Does dispatch give the same? (`Mixture` is a
# module that holds the matrices and calls the function it is given. On a GPU `F.grouped_mm` does the loop's products in one call.)

# %%
RANKS, H = 4, 32  # of section 3; channels
torch.manual_seed(0)
layer, x = Mixture(hidden=H, width=48, experts=8, k=2, compute=mixture), torch.randn(200, H)
choice, weight, _ = route(x, layer.router, 2)
w_in, w_out = layer.experts.w_in, layer.experts.w_out
defined = sum(((choice == e) * weight).sum(-1, keepdim=True) * one_expert(x, w_in[e], w_out[e]) for e in range(8))
gap = ((layer(x) - defined).norm() / defined.norm()).item()
print(f"dispatched: {gap:.0e} from the definition, in fp32")
assert gap < 1e-6, "dispatch computes something else: fp32 rounds at 6e-8, and sums have few terms"

# %% [markdown]
# **Predict.** Beside a mixture ($E = 8$, $k = 2$, experts of width 512) stand a dense layer of width 1,024, which computes as much,
# and one of width 4,096, which holds as many parameters. Which columns are alike?

# %%
layers = {"dense, the same FLOPs": dense(256, 1024), "8 experts, 2 a token": Mixture(256, 512, 8, 2, mixture),
          "dense, the same states": dense(256, 4096)}
for name, layer in layers.items():
    x = torch.randn(2048, 256, requires_grad=True)
    flops, kept = forward_flops(layer, x), kept_bytes(layer, x)
    states = adam_bytes(layer, lambda layer=layer, x=x: layer(x).sum().backward())
    print(f"{name:<24} {flops / 1e9:5.2f} GFLOP forward, {states / 2**20:5.1f} MiB of model states,",
          f"{kept / 2**20:5.1f} MiB kept for backward (measured)")

# %% [markdown]
# **Read it.** For backward the mixture keeps what the small layer keeps, and copies of each vector: $k$ as experts got it, $k$ as
# they gave it. **At equal FLOPs a mixture costs model states and copies of vectors. At equal model states it saves FLOPs and
# activations.**
#
# ## 3. Experts on four ranks
#
# **Expert parallelism (EP)**: each rank holds $E/4$ experts and reads its own tokens. Rows travel to their experts and back by an
# all-to-all. Gradients go the same way:

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
# How many rows will come? Each rank first tells all others its counts, by an all-gather. (`gathered_counts` also stops all ranks if
# a router gave NaN.) Rows are sorted twice, before and after they travel:

# %%
def mixture_on_ranks(x, router, w_in, w_out, k, bias=0.0, group=None, work=by_expert):
    choice, weight, p = route(x, router, k, bias)
    order, held, place = choice.flatten().argsort(stable=True), len(w_in), dist.get_rank(group)
    everyone = gathered_counts(choice, p, held, group)  # (ranks, E): each rank's rows for each expert; a GPU's host waits here
    mine = everyone[:, place * held : (place + 1) * held]  # (ranks, held): what each rank sends to each of my experts
    out, into = everyone[place].view(-1, held).sum(1).tolist(), mine.sum(1).tolist()  # rows for each rank, and from each
    rows = Send.apply(x[order // k], out, into, group)  # these lie by sender, and within a sender by expert
    expert = torch.arange(held, device=mine.device).repeat(len(mine)).repeat_interleave(mine.flatten())  # of each row
    by = expert.argsort(stable=True)  # the second sort: all senders' rows for one expert in one piece
    done = work(rows[by], mine.sum(0).tolist(), w_in, w_out)
    back = Send.apply(done[by.argsort()], into, out, group)
    return combine(back[order.argsort()], weight)


# %% [markdown]
# **The rule of gradients.** The loss is the mean over all ranks' tokens, equally many on each. All but the experts is on
# every rank, and each rank has a part of its gradient: sum over the ranks, then divide by 4. An expert is on *one* rank and has
# worked on all ranks' rows: its gradient is summed already, and is only divided by 4.
#
# The model has two blocks of 32 channels, with 8 experts of width 48 and a shared one. `keep_my_experts` leaves a rank its quarter of
# the experts. `train` takes ten steps, each rank on its quarter of the batch, and returns losses over all tokens.

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
# many as *came*, in forward and in backward. Over all ranks that makes $R \cdot 4 k T h$ numbers a layer and step, of 8 bytes in
# fp64. There are two layers and 10 steps.

# %%
def in_one_process(make=torch.optim.AdamW):
    return train(small_model(mixture), make=make)


one = run_ranks(in_one_process, 1)[0]
results = run_ranks(lambda: (*on_ranks(), rows_sent(mixture, route)), RANKS)
gap = max(abs(a / b - 1) for a, b in zip(results[0][0], one, strict=True))
sent, expected = sum(r[2] for r in results), RANKS * 4 * 2 * 32 * H * 8 * 2 * 10
held, everything = results[0][1], experts_held(small_model(mixture))
print(f"10 losses {gap:.0e} from one process, in fp64; a rank holds {held:,} of {everything:,} numbers of the experts")
print(f"put into exchanges: {sent:,} bytes by all ranks, predicted {expected:,}")
assert gap < 1e-12, "fp64 sums in another order: more than 1e-12 in ten steps is another gradient"
assert sent == expected and held == everything / RANKS, "over all ranks k T rows each, four times"

# %% jupyter={"source_hidden": true}
first_step = results[0][3]
show(draw_exchange(first_step, 32, 2),
     alt="Four ranks put rows in for four ranks that hold two experts each, and get as many back. Each rank puts in 64 rows: "
     + "; ".join(f"rank {r} gets {n}" for r, n in enumerate(first_step.sum(0).tolist())) + ".")

# %% [markdown]
# **Read it.** Ranks put in equally many rows, and get unequally many. **Load** is a rank's rows over the mean rank's.
#
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
# **Why not FSDP alone?** It gathers *all* experts of a layer on every rank. Here is what a rank then has of them in backward, beside
# its share of the model states:

# %%
for name, c in CONFIGS.items():
    width = getattr(c, "moe_intermediate_size", c.intermediate_size)
    all_of_them = (2 + 2 + 2 + 4) * c.num_local_experts * 3 * c.hidden_size * width / 1e9  # two layers' weights, gradients, these in fp32
    print(f"{name:<14} {all_of_them:6.1f} GB with FSDP alone, {all_of_them / 8:5.1f} GB with EP 8 (predicted)")

# %% [markdown]
# **Read it.** DeepSeek-V3's experts need more than an H100 has. (EP 8 means that 8 ranks share them.)
#
# ### Does it fit one node?
#
# **Qwen3-30B-A3B**, EP 8, 4,096 tokens a rank, fp32 model states. The worst load that there can be is 8: all rows come
# to one rank, in every layer. *Simulated*: operations run without values, and every allocation is counted.

# %% jupyter={"source_hidden": true}
kept, again, all_here = qwen3_30b_a3b(), qwen3_30b_a3b(layers_again=True), qwen3_30b_a3b(layers_again=True, load=8.0)
inside = 48 * 8 * 4096 * 2 * 4 * 768  # bytes of gate, up and two tensors made of these, for each row
part = {kind: size - inside * (kind == "activations") for kind, size in kept.breakdown.items()}
bars, card = [kept, predicted("experts recomputed, load 1", part), again, all_here], simulated_device("H100").usable_bytes
show(draw_breakdown(bars, title="Qwen3-30B-A3B: one of 8 H100 at its peak", limit=f"{card / 2**30:.1f} GiB"),
     alt="; ".join(f"{bar.name}: {bar.breakdown.total_bytes / 2**30:.1f} GiB" for bar in bars))
(exchanged,) = (row.payload_bytes for row in kept.traffic if row.collective == "all-to-all")  # k rows a token, four times

# %% [markdown]
# **Read it.** With all kept one node is too small; with the experts alone recomputed there is no room left. **With whole layers
# recomputed any load fits**, because the rows of one layer at a time are alive. (Load still costs time: section 4.) What is wrapped
# decides whether rows travel again:

# %%
WRAPPED = {"experts alone": partial(mixture_on_ranks, work=partial(checkpoint, by_expert, use_reentrant=False)),
           "the whole layer": partial(checkpoint, mixture_on_ranks, use_reentrant=False)}
found = run_ranks(lambda: {name: on_ranks(exchange) for name, exchange in WRAPPED.items()}, RANKS)
for name in WRAPPED:
    gap = max(abs(a / b - 1) for a, b in zip(found[0][name][0], one, strict=True))
    print(f"recomputed {name:<16} losses {gap:.0e} from one process; exchanged {sum(r[name][2] for r in found) / sent:.1f} times the bytes")
    assert gap < 1e-12, "what is computed again is the same"

# %% [markdown]
# **Read it.** transformers recomputes whole layers, so rows travel six times in place of four. torchtitan's selective checkpointing
# keeps what came.
#
# ## 4. Balance
#
# Nothing makes a router treat experts alike, and a layer ends when its busiest rank is done. An **auxiliary
# loss** $E \sum_e f_e P_e$, with $f_e$ the share of rows that $e$ got and $P_e$ its mean probability, moves the router by its
# gradient. Or a **bias** is added to probabilities, for the *choice* alone: after each step it rises for an expert with too few
# rows and falls for one with too many.

# %%
def auxiliary_loss(p, load):
    return p.shape[1] * (load / load.sum() * p.mean(0)).sum()


class Steered(Biased):  # a mixture with a `bias` of the choice: a buffer, so saved, and without a gradient
    def forward(self, x):
        choice, _, p = route(x.flatten(0, -2), self.router, self.k, self.bias)
        self.load = choice.flatten().bincount(minlength=p.shape[1])
        self.auxiliary = auxiliary_loss(p, self.load)
        return super().forward(x)  # routes once more: the same choice


# %%
def added_loss(way, layer):  # 0.01, and 0.004 below, were not varied
    return 0.01 * layer.auxiliary if way == "auxiliary loss" else 0.0


def after_step(way, layer):
    if way == "bias":
        layer.bias += 0.004 * (layer.load.float().mean() - layer.load).sign()


WAYS, SEEDS = ("left alone", "auxiliary loss", "bias"), range(2)
trained = {way: [train_on_text(partial(Steered, 64, 64, 8, 2, mixture), partial(added_loss, way), partial(after_step, way), seed)
                 for seed in SEEDS] for way in WAYS}  # 70 steps of 8 x 64 bytes of Python's own library, one block
show(draw_load({way: [loads for _, loads in runs] for way, runs in trained.items()}),
     alt="Rows of the busiest expert, and rank, over the mean, by step: soon near the worst; left alone they fall less than with a cure.")

# %% [markdown]
# **Read it.** At first nearly every token chooses the same two experts. Then both cures bring the load down further. A rank that holds
# one of the two favourites has load 2, and one that held both would have load 4. The mean rank waits $1 - 1/\text{load}$ of the
# experts' time: a third at load 1.5. On several ranks the bias must follow *all* ranks' rows, by an all-reduce of $E$ numbers, or
# biases drift apart.
#
# **One loss for each layer.** Some libraries pool all layers' rows in one loss. Let four layers each send *every* token to two
# experts of their own:

# %%
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

favourites = torch.arange(8).view(4, 2)  # layer 0 takes experts 0 and 1, layer 1 takes 2 and 3, ...
logits = tuple((4.0 * F.one_hot(two, 8).sum(0)).repeat(100, 1).requires_grad_() for two in favourites)
pooled = load_balancing_loss_func(logits, num_experts=8, top_k=2) / 2  # its shares sum to k, not to 1
apart = sum(auxiliary_loss(r.softmax(-1), r.topk(2).indices.flatten().bincount(minlength=8)) for r in logits) / 4
for name, loss in (("all layers pooled, as in transformers", pooled), ("a loss for each layer, their mean", apart)):
    gradient = torch.cat(torch.autograd.grad(loss, logits)).norm().item()
    print(f"{name:<38} {loss.item():.2f} (the least is 1), its gradient's norm {gradient:.0e}; the load of every layer is 4")
    assert (gradient < 1e-6) == (loss is pooled), "pooled shares are even, so nothing moves; a layer's own are not"

# %% [markdown]
# **Read it.** The layers' favourites cancel: the pooled loss sees even shares and moves nothing, whatever its coefficient. The last
# cell adds a loss for each layer.
#
# **Capacity.** Some implementations give each expert room for a multiple of the mean and **drop** rows beyond. Others are
# *dropless*, as here. Let room be 1.25 times the mean, on unseen text:

# %% jupyter={"source_hidden": true}
def with_room(capacity, dropped, x, router, w_in, w_out, k, bias):
    choice, weight, _ = route(x, router, k, bias)
    kept = first_come(choice, len(w_in), capacity * choice.numel() / len(w_in))  # (T, k): does the row find room?
    dropped.append(1 - kept.float().mean().item())
    return dispatch_and_combine(x, choice, weight * kept, w_in, w_out)


for way, runs in trained.items():
    dropped = []
    more = [held_out(model, partial(with_room, 1.25, dropped)) - held_out(model) for model, _ in runs]
    print(f"{way:<15} {sum(dropped) / 2:3.0%} of rows dropped, loss +{sum(more) / 2:.2f} (means of two seeds)")

# %% [markdown]
# **Read it.** Where room is limited, load is lost rows.
#
# ## 5. Inside a node, or across nodes?
#
# Take Qwen3-30B-A3B to two nodes of 8 H100. With EP 8 weights and gradients of two replicas cross between nodes, with
# EP 16 rows do. A plain all-to-all sends a row for each of a token's 8 experts, of which 4 are in the other node. A *dispatcher*
# such as DeepEP sends the vector **once per node**, and a rank there passes it on.

# %%
NVLINK, NDR = (link(name).sustained_bytes_per_second for name in ("NVLink 4", "InfiniBand NDR"))
weights = 48 * 128 * 3 * 2048 * 768 / 16 * (2 + 2 + 4)  # half of the experts of two replicas: two gathers in bf16, one sum in fp32
LAYOUTS = {"EP 8": (exchanged * 7 / 8, 0, weights), "EP 16, plain all-to-all": (exchanged * 7 / 16, exchanged / 2, 0),
           "EP 16, once per node": (exchanged * 7 / 8, exchanged / 8, 0)}  # bytes of rows inside, rows across, weights across
show(draw_crossing({name: tuple(size / 1e9 for size in sizes) for name, sizes in LAYOUTS.items()}, NDR / 1e9),
     alt="; ".join(f"{name}: {b / 1e9:.1f} GB of rows and {c / 1e9:.1f} of weights cross" for name, (_, b, c) in LAYOUTS.items()))

# %% [markdown]
# Weights are the same bytes for any number of tokens, and FSDP can move them *while* products run. Rows grow with tokens, and
# products wait for them. So EP 16 wins where a rank has too few tokens to hide the weights:

# %%
near, plain, once = (max(inside / NVLINK, across / NDR) for inside, across, _ in LAYOUTS.values())  # seconds; networks work at once
print(f"a rank sends {NVLINK / 1e9:.0f} GB/s in its node and {NDR / 1e9:.0f} across (sustained, published); load 1, four exchanges a layer")
print("predicted: EP 16 is faster than EP 8 with fewer tokens a rank than")
for speed in (100, 200, 400):
    least = [4096 * weights / NDR / (qwen3_flops() / speed / 1e12 + rows) for rows in (plain, once)]
    print(f"  {speed} TFLOP/s, weights hidden:    plain {least[0]:7,.0f}   once per node {least[1]:7,.0f}")
least = [4096 * weights / NDR / (rows - near) for rows in (plain, once)]
print(f"  any speed, weights not hidden: plain {least[0]:7,.0f}   once per node {least[1]:7,.0f}")

# %% [markdown]
# **Read it.** **With more tokens a rank than that, stay in the node; with fewer, spread the experts.** If weights are not hidden, a
# dispatcher wins at any usual length. They are not hidden by themselves: the host waits for counts in each layer, so FSDP starts the
# next gather late, unless it is told what to prefetch, as in the last cell. EP 16 has fewer experts a rank, so expect more load.
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
    if fault == "wrong divisor":
        return with_fsdp(divide=False, make=make)[0]
    model = small_model(mixture)
    keep_my_experts(model, dist.get_rank(), RANKS, mixture_on_ranks)
    return train(model, over_all_ranks if fault == "wrong group" else by_the_rule, make=make)


# %%
MAKES, FAULTS = (torch.optim.AdamW, torch.optim.SGD), ("none", "wrong group", "wrong divisor")
right = {torch.optim.AdamW: one, torch.optim.SGD: run_ranks(in_one_process, 1, torch.optim.SGD)[0]}
found = run_ranks(lambda: {(make, fault): averaged(fault, make) for make in MAKES for fault in FAULTS}, RANKS)[0]
for (make, fault), losses in found.items():
    gaps = [abs(a / b - 1) for a, b in zip(losses, right[make], strict=True)]
    print(f"{make.__name__:<5} fault: {fault:<14} first loss {gaps[0]:.0e}, tenth {gaps[-1]:.0e} from one process")
    assert (max(gaps) < 1e-12) == (fault == "none"), "a wrong group or divisor is found by the tenth loss in fp64"

# %% [markdown]
# **Diagnose it.** First losses are right: no gradient is in them. In the wrong group an expert learns from other experts'
# rows. With the wrong divisor gradients are twice too large, and AdamW, which divides by their size, nearly hides it. Compare
# *gradients* with one process.
#
# ## Recap
#
# - Arithmetic and activations follow the $k$ experts that a token uses; model states follow all $E$.
# - Expert parallelism moves rows: a mean rank puts in $4kTh$ numbers a layer and step, whatever $E$ is.
# - Experts' gradients are summed already: their group is their replicas, their divisor is the number of all ranks.
# - Imbalance is waiting, dropped rows, or one rank's memory. Count it by ranks, and cure it in each layer.
#
# Do the [lab](../../labs/advanced/19_experts.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/19_experts.ipynb).
#
# **References.** [Mixtures](https://arxiv.org/abs/1701.06538), [GShard](https://arxiv.org/abs/2006.16668),
# [DeepSeek-V3](https://arxiv.org/abs/2412.19437), [DeepEP](https://github.com/deepseek-ai/DeepEP),
# [torchtitan](https://github.com/pytorch/torchtitan).

# %% [markdown]
# ## On Monday
#
# Train Qwen3-30B-A3B on one node of 8 H100 with transformers (5.23 here), layers recomputed as in section 3, under
# `torchrun --nproc-per-node 8`:
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
# model.activation_checkpointing_enable()  # whole layers
# model.router_aux_loss_coef = 0.0  # its own loss pools all layers; model.config is no longer read once the model is made
# meshes, k = {}, model.config.num_experts_per_tok
# for p in model.parameters():  # experts lie on a mesh of their own, and a norm or a fused step is of one mesh
#     meshes.setdefault(p.device_mesh, []).append(p)
# # Not fused, the step would make temporary copies as large as the parameters.
# optimizer = torch.optim.AdamW([{"params": part} for part in meshes.values()], lr=1e-5, fused=True)
#
# for batch in batches:
#     out = model(input_ids=batch, labels=batch, output_router_logits=True)
#     rows = torch.stack([r.topk(k).indices.flatten().bincount(minlength=r.shape[-1]) for r in out.router_logits])  # (layers, E)
#     likely = torch.stack([r.float().softmax(-1).mean(0) for r in out.router_logits])
#     balance = rows.shape[1] * (rows / rows.sum(1, keepdim=True) * likely).sum()  # section 4's loss, for each layer; own tokens
#     (out.loss + 0.001 * balance).backward()
#     norm = torch.stack([get_total_norm([p.grad for p in part]).full_tensor() for part in meshes.values()]).norm()
#     for part in meshes.values():
#         clip_grads_with_norm_(part, 1.0, norm)
#     optimizer.step()
#     optimizer.zero_grad()
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
# **Look at** the mean load: experts take that many times as long as even ones. If that costs too much, raise 0.001. On four CPU
# ranks, ten steps with SGD in fp32 give one process's parameters, to rounding, and what is saved reloads equal.
#
# In plain PyTorch, with layers that exchange rows as in section 3:
#
# ```python
# # Before: device = torch.device("cuda"); `model` with `layers`, each with `experts` that hold this rank's share and exchange rows over
# # mesh["experts"]; world_size ranks, expert_ranks of which share the experts; a loss that is the mean of the rank's own batch.
# import torch
# import torch.distributed as dist
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from torch.distributed.tensor import Shard
# from torch.nn.utils import clip_grads_with_norm_, get_total_norm
#
# replicas = world_size // expert_ranks
# mesh = init_device_mesh(device.type, (replicas, expert_ranks), mesh_dim_names=("replicas", "experts"))
# whole = init_device_mesh(device.type, (world_size,))
# for layer in model.layers:
#     # FSDP splits experts over their replicas. With more replicas than experts it splits dimension 1, which they must divide.
#     few = replicas > next(layer.experts.parameters()).shape[0]
#     fully_shard(layer.experts, mesh=mesh["replicas"], shard_placement_fn=(lambda p: Shard(1)) if few else None)
#     layer.experts.set_gradient_divide_factor(world_size)  # with one replica, too; but sum in bf16 or fp32, as fp16 is divided twice
#     # Sums first and divides after: dividing on the way, NCCL gives 0 in bf16 for powers of two up to PyTorch 2.13 (issue 190745).
#     layer.experts.set_force_sum_reduction_for_comms(replicas > 1)
#     fully_shard(layer, mesh=whole)
# fully_shard(model, mesh=whole)
# for layer, following in zip(model.layers, list(model.layers)[1:]):  # else the host's wait for counts delays each gather
#     layer.set_modules_to_forward_prefetch([following, following.experts])
#     following.set_modules_to_backward_prefetch([layer, layer.experts])
#
#
# def clip(limit):  # after backward
#     experts = [p for layer in model.layers for p in layer.experts.parameters()]
#     of_experts = {id(p) for p in experts}
#     rest = [p for p in model.parameters() if id(p) not in of_experts]
#     squares = get_total_norm([p.grad for p in experts]).full_tensor() ** 2  # of this rank's experts, over their replicas
#     dist.all_reduce(squares, group=mesh.get_group("experts"))  # and of the other ranks' experts
#     norm = (squares + get_total_norm([p.grad for p in rest]).full_tensor() ** 2).sqrt()
#     for part in (experts, rest):
#         clip_grads_with_norm_(part, limit, norm)
#     return norm
# ```
#
# **Look at** an expert's gradient beside one process's, in fp32: equal to rounding.
