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
# **Promise.** You route tokens to experts by hand, decide whether weights or tokens should travel, and balance a router.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 120, and 80 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |
#
# ## A bet
#
# Eight GPUs train Qwen3-30B-A3B in bf16, with 4,096 tokens each. Backward recomputes every layer, and gradients are summed in fp32.
# With [FSDP](../intermediate/09_sharding.ipynb) alone, each GPU gathers all experts' weights, layer by layer. With *expert
# parallelism*, each keeps an eighth of the experts, and a token's vector travels to each of its eight. How many times as many bytes
# does a GPU send for its experts with FSDP alone?

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
from math import comb

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from utils.catalog import link
from utils.fitting.model_configs import model_config
from utils.lessons.lesson_19.at_size import qwen3_30b_a3b, step_parts
from utils.lessons.lesson_19.exchange import gathered_counts
from utils.lessons.lesson_19.figures import draw_dispatch, draw_exchange, draw_held_and_used, draw_load, draw_mesh
from utils.lessons.lesson_19.figures_at_size import draw_crossing, draw_loads, draw_peaks, peak_parts
from utils.lessons.lesson_19.layers import Biased, Mixture, dense, experts_held, keep_my_experts, small_model
from utils.lessons.lesson_19.published import LLAMA_3_TFLOPS, PARAMETERS, STEP_MICRO_BATCH
from utils.lessons.lesson_19.small import adam_bytes, forward_flops, kept_bytes
from utils.lessons.lesson_19.tables import print_across, print_choice, print_seconds, print_step
from utils.lessons.lesson_19.training import held_out, rows_sent, train, train_on_text
from utils.simulation.devices import simulated_device

# %% [markdown]
#
# ## 1. Arithmetic follows what is used, model states what is held
#
# A mixture of experts has $E$ feed-forward layers in place of one: the *experts*. A *router*, a small matrix, sends each token
# to $k$ of them. Every token uses everything else, in DeepSeek-V3 also a *shared* expert.

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

# %% jupyter={"source_hidden": true}
show(draw_held_and_used(models),
     alt="Billions of parameters: " + "; ".join(f"{name} uses {b:.1f} and holds {a:.1f}" for name, (a, b) in models.items()))
held, used = models["Mixtral-8x7B"]
print(f"Mixtral-8x7B, model states at 16 bytes a parameter: {16 * held:.0f} GB; a dense model of what it uses: {16 * used:.0f} GB; "
      f"{held / used:.1f} times as many (predicted)")

# %% [markdown]
# **Read it.** A token is computed with the parameters at the circle (the input embedding is looked up).
# [Model states](../00_glossary.ipynb) exist for all those at the square. **So Mixtral computes like a model of 13B, and has the
# model states of one of 47B.**
#
# **Question.** Qwen3-30B-A3B, 16 bytes a parameter. How many GB ($10^9$) of model states is that, if nothing is held twice?

# %%
states_gb = ...
check("19.states_gb", states_gb)

# %% [markdown]
#
# ## 2. A router sends each token to its experts
#
# The router gives each token a probability for each expert. The token goes to the $k$ most probable
# experts, the *top-k*. Their outputs are added, weighted by these probabilities, which are scaled to sum to 1. An expert is a feed-forward layer, here Llama's.

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
# Each token's vector is copied $k$ times, into **rows**. *Dispatch* sorts the rows by expert. *Combine* brings the
# results back into the tokens' order, and adds up the $k$ of each token. Follow the ten rows of five tokens:

# %% jupyter={"source_hidden": true}
five = torch.tensor([[1, 3], [0, 1], [3, 1], [2, 0], [1, 2]])  # the experts of each token
order = five.flatten().argsort(stable=True)
show(draw_dispatch(five, experts=4), alt=f"Ten rows by token, then sorted by expert, then by token again; places by expert: {order.tolist()}.")
print("order: the row at each place by expert ", order.tolist())
print("order // 2: that row's token           ", (order // 2).tolist())
print("counts: rows of each expert            ", five.flatten().bincount(minlength=4).tolist())
print("order.argsort(): where each row went   ", order.argsort().tolist())

# %%
def by_expert(rows, counts, w_in, w_out):  # `F.grouped_mm` does one matmul of all experts in a call
    return torch.cat([one_expert(part, a, b) for part, a, b in zip(rows.split(counts), w_in, w_out, strict=True)])


def combine(rows, weight):  # (tokens * k, H) in the tokens' order -> (tokens, H)
    return (weight[..., None] * rows.view(*weight.shape, -1)).sum(1)


def dispatch_and_combine(x, choice, weight, w_in, w_out):
    order = choice.flatten().argsort(stable=True)
    counts = choice.flatten().bincount(minlength=len(w_in)).tolist()
    rows = by_expert(x[order // choice.shape[1]], counts, w_in, w_out)
    return combine(rows[order.argsort()], weight)


def mixture(x, router, w_in, w_out, k, bias=0.0):
    return dispatch_and_combine(x, *route(x, router, k, bias)[:2], w_in, w_out)


# %% [markdown]
# By definition, every expert computes every token, most with weight zero. Is dispatch the same?

# %%
RANKS, H = 4, 32  # ranks of section 3; numbers in a token's vector
torch.manual_seed(0)
layer, x = Mixture(hidden=H, width=48, experts=8, k=2, compute=mixture), torch.randn(200, H)
choice, weight, _ = route(x, layer.router, 2)
w_in, w_out = layer.experts.w_in, layer.experts.w_out
defined = sum(((choice == e) * weight).sum(-1, keepdim=True) * one_expert(x, w_in[e], w_out[e]) for e in range(8))
gap = ((layer(x) - defined).norm() / defined.norm()).item()
print("dispatched:", "equal bit for bit" if gap == 0 else f"{gap:.0e} from the definition", "in fp32")
assert gap < 1e-6, "dispatch computes something else: fp32 rounds at 6e-8, and sums have few terms"

# %% [markdown]
# **What does it save?** Beside a mixture of 8 experts, 2 for a token, stand a dense layer that computes as much, and one that holds as
# much:

# %%
layers = {"dense, the same FLOPs": partial(dense, 256, 1024), "8 experts, 2 a token": partial(Mixture, 256, 512, 8, 2, mixture),
          "dense, the same states": partial(dense, 256, 4096)}
for name, make in layers.items():
    layer, x = make(), torch.randn(2048, 256, requires_grad=True)
    flops, kept = forward_flops(layer, x), kept_bytes(layer, x)
    states = adam_bytes(layer, lambda layer=layer, x=x: layer(x).sum().backward())
    print(f"{name:<24} {flops / 1e9:5.2f} GFLOP forward, {states / 2**20:5.1f} MiB of model states,",
          f"{kept / 2**20:5.1f} MiB kept for backward")
print(f"FLOPs are counted, bytes measured; 2 k copies of 2,048 vectors of 256 numbers: {2 * 2 * 2048 * 256 * 4 / 2**20:.1f} MiB (predicted)")

# %% [markdown]
# **Read it.** **At equal arithmetic the mixture costs four times the model states**, and 8 MiB of copies of vectors. **At equal model
# states it saves arithmetic and activations.**
#
# ## 3. On several ranks, rows travel to their experts
#
# **Expert parallelism (EP)** shares a layer's experts among the ranks of a group, eight in *EP 8*. Rows travel to their experts and
# back by an [all-to-all](11_links.ipynb), and gradients in backward take the same ways:

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
# An all-gather first tells all ranks everyone's counts, and so how many rows will come:

# %%
def mixture_on_ranks(x, router, w_in, w_out, k, bias=0.0, group=None):
    choice, weight, p = route(x, router, k, bias)
    order, held, place = choice.flatten().argsort(stable=True), len(w_in), dist.get_rank(group)
    counts = gathered_counts(choice, p, held, group)  # (ranks, E): the rows of each rank for each expert
    mine = counts[:, place * held : (place + 1) * held]  # (ranks, held): what each rank sends to each of my experts
    out = counts[place].view(-1, held).sum(1).tolist()  # my rows for each rank: with tolist() the host waits for the GPU
    into = mine.sum(1).tolist()  # rows that come from each rank
    rows = Send.apply(x[order // k], out, into, group)  # they lie by sender, and within a sender by expert
    expert = torch.arange(held, device=mine.device).repeat(len(mine)).repeat_interleave(mine.flatten())  # of each row
    by = expert.argsort(stable=True)  # the second sort: all senders' rows for one expert in one piece
    done = by_expert(rows[by], mine.sum(0).tolist(), w_in, w_out)
    back = Send.apply(done[by.argsort()], into, out, group)
    return combine(back[order.argsort()], weight)


# %% [markdown]
# **Which gradients are summed?** The loss is the mean over all ranks' tokens, equally many on each. All but the experts is on every
# rank, and sees that rank's tokens alone. So its gradients are summed over the ranks and divided by 4. An expert is on *one* rank,
# and has worked on all ranks' rows. **Its gradient is summed already, and is only divided by 4.**
#
# Each rank keeps a quarter of a small model's experts, and takes ten steps on its quarter of the batch:

# %%
def by_the_rule(model, summed=".experts."):  # these gradients are summed already
    for name, p in model.named_parameters():
        if summed not in name:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def on_ranks():
    model = small_model(mixture)
    keep_my_experts(model, dist.get_rank(), RANKS, mixture_on_ranks)
    with traffic() as sent:
        losses = train(model, by_the_rule)
    return losses, experts_held(model), sum(row.payload_bytes for row in sent.rows if row.collective == "all-to-all")


# %% [markdown]
# **How many bytes go into the exchanges?** A rank with $T$ tokens puts $kT$ rows of $h$ numbers into the first exchange, and as many as *came* into
# the second. Backward repeats both. Over all $R$ ranks that makes $R \cdot 4 k T h$ numbers a layer and step.

# %%
def in_one_process(make=torch.optim.AdamW):
    return train(small_model(mixture), make=make)


one = run_ranks(in_one_process, 1)[0]
results = run_ranks(lambda: (*on_ranks(), rows_sent(mixture, route)), RANKS)
gap = max(abs(a / b - 1) for a, b in zip(results[0][0], one, strict=True))
K, TOKENS, LAYERS, STEP_COUNT, FP64_BYTES = 2, 32, 2, 10, 8
sent, expected = sum(r[2] for r in results), RANKS * 4 * K * TOKENS * H * LAYERS * STEP_COUNT * FP64_BYTES
held, everything = results[0][1], experts_held(small_model(mixture))
print(f"10 losses {gap:.0e} from one process, in fp64; a rank holds {held:,} of {everything:,} numbers of the experts")
print(f"put into exchanges by all ranks: {sent:,} bytes (measured), {expected:,} (predicted)")
assert gap < 1e-12, "fp64 sums in another order: more than 1e-12 in ten steps is another gradient"
assert sent == expected and held == everything / RANKS, "over all ranks k T rows each, four times"

# %% [markdown]
# Four ranks train as one. In red, rank 1's rows in the first layer and step:

# %% jupyter={"source_hidden": true}
first_step = results[0][3]
show(draw_exchange(first_step, 32, 2),
     alt="Four ranks put rows in for four ranks that hold two experts each, and get as many back. Each rank puts in 64 rows: "
     + "; ".join(f"rank {r} gets {n}" for r, n in enumerate(first_step.sum(0).tolist())) + ".")
print("rows of each rank (down) for each rank (across):")
print(*(" ".join(f"{n:4}" for n in row) for row in first_step.tolist()), sep="\n")

# %% [markdown]
# **Read it.** Each rank puts in 64 rows, but unequally many come to the experts. **Load** is the rows that come to a rank over those of
# the mean rank. A layer's load is its busiest rank's, for which all others wait.
#
# **Question.** DeepSeek-V3: $k = 8$, $h = 7168$. How many MB ($10^6$ bytes) does a rank put into *one* exchange for 4,096 tokens
# in bf16?

# %%
mb_an_exchange = ...
check("19.mb_an_exchange", mb_an_exchange)

# %% [markdown]
#
# ### With FSDP: experts have a group of their own
#
# Now two of four ranks share the experts, so each expert has two *replicas*. FSDP shards experts over **their replicas**, and the rest
# over all ranks. By itself it divides a gradient by the size of its group, 2 for experts. The loss is a mean over 4 ranks, so
# `set_gradient_divide_factor` must say 4.

# %% jupyter={"source_hidden": true}
show(draw_mesh(),
     alt="Rows travel by all-to-all between ranks 0 and 1, and 2 and 3; the experts' weights and gradients by FSDP between ranks 0 and 2, "
     "and 1 and 3; all else by FSDP over all four. Each rank has its own batch.")

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
#
# ### Qwen3 fits one node, if layers are recomputed
#
# We *simulate* one of eight H100s: a step runs without values, and every allocation is counted. At load 8, the worst, all rows come to
# this rank.

# %% jupyter={"source_hidden": true}
runs = {"EP 8, all kept": qwen3_30b_a3b(), "EP 8, layers\nrecomputed": qwen3_30b_a3b(layers_again=True),
        "the same,\nload 8": qwen3_30b_a3b(layers_again=True, load=8.0),
        "FSDP alone, layers\nrecomputed": qwen3_30b_a3b(1, layers_again=True)}
copies, inside = 48 * 8 * 4096 * 2 * 2048 * 2, 48 * 8 * 4096 * 4 * 768 * 2  # in and out; gate, up and two tensors made of these
bars = {name: peak_parts(run.breakdown, copies, inside) for name, run in runs.items()}
limit = simulated_device("H100").usable_bytes / 2**30
show(draw_peaks(bars, limit), alt="; ".join(f"{name}: {sum(parts):.1f} GiB" for name, parts in bars.items()).replace("\n", " "))
for count in (3, 4):
    peak = qwen3_30b_a3b(layers_again=True, sequences=count).peak_bytes / 2**30
    print(f"EP 8, layers recomputed, {count} sequences of 4,096 tokens a rank: {peak:.1f} GiB (simulated)")

# %% [markdown]
# **Read it.** The upper bar passes the dashed line: one node cannot keep all activations. **With layers recomputed they fit at any
# load**, since only one layer's rows are alive at a time. A fourth sequence needs a
# [loss in chunks](../intermediate/05_checkpointing.ipynb).
#
# ### Rows or weights: by tokens, by overlap, by load
#
# FSDP alone gathers the experts twice a step and sums their gradients. EP moves rows, in six exchanges a layer: by our
# layer one for each of a token's experts, by a *dispatcher* such as
# [DeepEP](https://github.com/deepseek-ai/DeepEP) **once** to each rank that holds any of them. Your bet:

# %%
def reached(others, held):  # of so many other ranks, those that hold one of a token's 8 experts, if all 128 are equally likely
    return others * (1 - comb(128 - held, 8) / comb(128, 8))


NVLINK, NDR = (link(name).sustained_bytes_per_second for name in ("NVLink 4", "InfiniBand NDR"))
EXPERTS = 48 * 128 * 3 * 2048 * 768  # numbers in Qwen3-30B-A3B's experts: layers, experts, three matrices
VECTORS = 6 * 48 * 4096 * 2048 * 2  # bytes: a vector of each of 4,096 tokens in bf16, in six exchanges of every layer
weights, rows, once = EXPERTS * (2 + 2 + 4) * 7 / 8, 8 * 7 / 8 * VECTORS, reached(7, 16) * VECTORS  # an eighth stays here
print(f"for its experts a rank sends {weights / 1e9:.0f} GB a step with FSDP alone (bf16 weights twice, fp32 gradients once)")
for name, size in (("a row for each expert", rows), ("a vector once a rank", once)):
    print(f"and {size / 1e9:.1f} GB with EP 8, {name} (predicted): {weights / size:.1f} times as many, {weights / size / 4:.1f} with 16,384 tokens; your bet was {my_bet_times}")

# %% [markdown]
# But time decides. Our model adds computing and what is **exposed**, moved while nothing is computed. Weights overlap computing, or
# computing waits for them. Rows are exposed in full; [DeepSeek-V3](https://arxiv.org/abs/2412.19437) hides some behind a second
# micro-batch, so the table also halves them. How near is a published step of 16,384 tokens a rank? We assume 380 TFLOP/s, which
# Llama 3 405B reached over whole steps (published), then half and twice as much:

# %%
def rate(speed, seconds):  # tokens/s, at so many TFLOP/s, if a token's rows take so many seconds
    return STEP_MICRO_BATCH / (sum(step_parts(STEP_MICRO_BATCH, speed)) + STEP_MICRO_BATCH * seconds)


SPEED, EP_8, ONCE, ALONE = LLAMA_3_TFLOPS, rows / NVLINK / 4096, once / NVLINK / 4096, weights / NVLINK  # EP: for each token
one_rank = 7 / 8 * VECTORS / NVLINK / 4096  # a false router deals rows in turn, so a token's 8 experts lie on one rank
print_step({speed: rate(speed, one_rank) for speed in (SPEED / 2, SPEED, 2 * SPEED)}, evenly=rate(SPEED, ONCE))

# %% [markdown]
# **Read it.** 380 TFLOP/s meets that step, which sent few rows: **one number met by one constant.** It tests neither the experts' part of
# computing, nor the price of rows, nor FSDP alone. That has **an eighth of EP 8's rows for an expert**, and small matmuls are slow.
#
# Only EP pays for load. Up to which is EP 8 faster? In the picture, that is below a line:

# %%
def break_even(tokens, overlap=True, speed=SPEED, slower=1, rows=EP_8, weights=ALONE, theirs=0.0):
    """Up to this load, moving `rows` is faster than moving `weights` (and `theirs`), with experts `slower` times as slow."""
    rest, experts = step_parts(tokens, speed)  # seconds, with forward once more
    busy = rest + slower * experts + theirs * tokens
    exposed = max(0, weights - busy) if overlap else weights
    return (busy + exposed - rest) / (experts + rows * tokens)


print_seconds(COUNTS := (1024, 4096, 16_384), SPEED, EP_8, ALONE)
print_choice(break_even, COUNTS, EP_8, ONCE, SPEED)

# %% jupyter={"source_hidden": true}
lines = {"weights overlap computing": {}, "the same, FSDP's experts at half speed": {"slower": 2}, "computing waits for weights": {"overlap": False}}
show(draw_loads(break_even, lines, (SPEED / 2, 2 * SPEED), NVLINK / 1e9),
     alt="Load at which both take equally long, by tokens: all lines fall; if weights overlap below 1, at half speed to 1.3, if computing waits to 1.2.")

# %% [markdown]
# **Read it. If weights overlap computing: EP 8 with few tokens, FSDP alone with many. If computing waits for weights: EP 8, up to a
# load that falls with tokens.** At 4,096 tokens 0.22 s of overlapping weights stay exposed, and load and speed decide. With many, it
# hangs on FSDP's grouped matmuls: at half speed EP 8 stays ahead up to load 1.3. Memory alone forces nearly that only with few tokens.
#
# **Which case is yours?** In a [trace](11_links.ipynb) of FSDP alone, add up the seconds in which experts' weights or gradients travel
# and nothing is computed. Compare them with the lines *exposed*, at your TFLOP/s. Near the upper, they overlap. Near the lower, computing
# waits: prefetch, as in the last cell.
#
# What makes load large, and what lowers it?
#
# ## 4. Balance: a layer ends when its busiest rank is done
#
# Nothing makes a router treat experts alike. An **auxiliary loss** $E \sum_e f_e P_e$ is added to the loss, with
# $f_e$ the share of rows that expert $e$ got and $P_e$ its mean probability. Its gradient makes busy experts less probable. Or a **bias**
# is added to the probabilities, for the *choice* alone. After each step it rises for experts with too few rows, and falls for the others.

# %%
def auxiliary_loss(p, load):
    return p.shape[1] * (load / load.sum() * p.mean(0)).sum()


class Steered(Biased):  # a mixture with a `bias` of the choice: a buffer, so saved, and without a gradient
    whose = staticmethod(lambda load: load)  # the tokens that the loss counts: here a rank's own

    def forward(self, x):
        choice, _, p = route(x.flatten(0, -2), self.router, self.k, self.bias)
        self.load = choice.flatten().bincount(minlength=p.shape[1])
        self.auxiliary = auxiliary_loss(p, self.whose(self.load))
        return super().forward(x)  # routes once more: the same choice


# %% [markdown]
# One process trains a small model on text, and counts rows as if four ranks held two experts each:

# %%
def added_loss(way, layer):  # 0.01, and 0.004 below, were not varied
    return 0.01 * layer.auxiliary if way == "auxiliary loss" else 0.0


def after_step(way, layer):
    if way == "bias":
        layer.bias += 0.004 * (layer.load.float().mean() - layer.load).sign()  # on ranks: by all ranks' rows, or biases drift apart


WAYS, SEEDS = ("left alone", "auxiliary loss", "bias"), range(5)
trained = {way: [train_on_text(partial(Steered, 64, 64, 8, 2, mixture), partial(added_loss, way), partial(after_step, way), seed)
                 for seed in SEEDS] for way in WAYS}  # 70 steps of 8 x 64 bytes of Python's own library, one block
show(draw_load({way: [loads for _, loads in runs] for way, runs in trained.items()}),
     alt="Rows of the busiest expert, and rank, over the mean, by step: experts are soon near the worst; left alone both fall less than with a cure.")
for way, found in trained.items():
    late = torch.stack([loads[-20:].view(20, RANKS, 2).sum(-1).amax(-1) / loads[0].sum() * RANKS for _, loads in found]).mean(1)
    loss = torch.tensor([held_out(model) for model, _ in found])
    more = loss - (kept := loss if way == WAYS[0] else kept)
    print(f"{way:<15} load of four ranks, last 20 steps: {late.mean():.2f} ({late.min():.2f} to {late.max():.2f}); nats a byte of unseen",
          f"text: {loss.mean():.2f}; over the same seed left alone {more.mean():+.3f} ({more.min():+.3f} to {more.max():+.3f})")

# %% [markdown]
# **Read it.** Within ten steps nearly every token has one expert in common (left). Left alone, the busiest of four ranks ends at twice
# the mean (right). **Both cures bring load down.** In each seed the loss moves by less than 0.05 nats.
#
# **Over whose tokens?** A rank's own tokens may all be code, and rightly need the same experts. So
# [Qwen3](https://arxiv.org/abs/2505.09388) balances the [whole batch](https://arxiv.org/abs/2501.11873):

# %%
def all_ranks(load):
    dist.all_reduce(total := load.clone())  # counts have no gradient
    return total


def balanced(whose):
    model = small_model(mixture, layer=Steered)
    for block in model.blocks:
        block.feedforward.whose = whose
    if dist.get_world_size() > 1:
        keep_my_experts(model, dist.get_rank(), RANKS, mixture_on_ranks)
    return train(model, by_the_rule, added_loss=lambda model: 0.3 * sum(block.feedforward.auxiliary for block in model.blocks))


alone = run_ranks(balanced, 1, all_ranks)[0]
for name, whose in (("all ranks' tokens", all_ranks), ("a rank's own tokens", Steered.whose)):
    gap = max(abs(a / b - 1) for a, b in zip(run_ranks(balanced, RANKS, whose)[0], alone, strict=True))
    print(f"balance of {name:<20} ten losses {gap:.0e} from one process with the whole batch")
    assert (gap < 1e-12) == (whose is all_ranks), "a product of means is no mean of products"

# %% [markdown]
# **Over which layers?** Some libraries pool all layers' rows in one loss. Let each of four layers send *every* token to two
# experts of its own:

# %%
favourites = torch.arange(8).view(4, 2)  # layer 0 takes experts 0 and 1, layer 1 takes 2 and 3, ...
logits = tuple((4.0 * F.one_hot(two, 8).sum(0)).repeat(100, 1).requires_grad_() for two in favourites)
pooled = load_balancing_loss_func(logits, num_experts=8, top_k=2) / 2  # its shares sum to k, not to 1
apart = sum(auxiliary_loss(r.softmax(-1), r.topk(2).indices.flatten().bincount(minlength=8)) for r in logits) / 4
for name, loss in (("all layers pooled, as in transformers", pooled), ("a loss for each layer, their mean", apart)):
    gradient = torch.cat(torch.autograd.grad(loss, logits)).norm().item()
    print(f"{name:<38} {loss.item():.2f} (1 where shares are even), its gradient's norm {gradient:.0e}; the load of every layer is 4")
    assert (gradient < 1e-6) == (loss is pooled), "pooled shares are even, so nothing moves; a layer's own are not"

# %% [markdown]
# **The pooled loss sees even shares and moves nothing. So balance each layer, over the whole batch.**
#
# Some implementations **drop** rows beyond an expert's **capacity** instead. Ours is *dropless*.
#
# ## 5. Across nodes: stay inside, or send each vector once
#
# Now two nodes of 8 H100. With EP 8 the weights and gradients of experts' replicas cross. With EP 16 rows cross: by a plain all-to-all
# one for each of a token's experts over there, on average 4. A dispatcher sends the vector once to each *node*, and a rank there
# passes it on. Compare what crosses, then up to which load EP 16 is faster:

# %% jupyter={"source_hidden": true}
half = EXPERTS / 16 * (2 + 2 + 4)  # a rank has half of its experts, and its replica the other half
LAYOUTS = {"EP 8, once a rank": (once, 0, half), "EP 16, plain all-to-all": (8 * 7 / 16 * VECTORS, 8 / 2 * VECTORS, 0),
           "EP 16, once a node": (2 * reached(7, 8) * VECTORS, reached(1, 64) * VECTORS, 0)}  # bytes of rows inside, across, of weights
show(draw_crossing({name: tuple(size / 1e9 for size in sizes) for name, sizes in LAYOUTS.items()}, NVLINK / 1e9, NDR / 1e9),
     alt="; ".join(f"{name}: {b / 1e9:.1f} GB of rows and {c / 1e9:.1f} of weights cross" for name, (_, b, c) in LAYOUTS.items()))

# %%
def across_nodes(tokens, layout="EP 16, once a node", load=1.0, ndr=NDR, **case):  # the load, over EP 8's
    rows = max(LAYOUTS[layout][0] / NVLINK, LAYOUTS[layout][1] / ndr) / 4096  # both networks work at once: the slower counts
    return break_even(tokens, rows=rows, weights=half / ndr, slower=load, theirs=load * ONCE, **case) / load


print_across(across_nodes, COUNTS, SPEED, NDR, plain="EP 16, plain all-to-all")

# %% [markdown]
# **Read it. EP 16 with a dispatcher is to EP 8 as EP 8 to FSDP alone, at fewer tokens.**
#
# ## Break it, diagnose it
#
# Experts' gradients are averaged over the wrong group, all ranks. Or they are divided by the wrong number, as FSDP was not told 4.

# %%
def averaged(fault, make):
    if fault == "wrong divisor":
        return with_fsdp(divide=False, make=make)[0]
    model = small_model(mixture)
    keep_my_experts(model, dist.get_rank(), RANKS, mixture_on_ranks)
    return train(model, partial(by_the_rule, summed="none") if fault == "wrong group" else by_the_rule, make=make)


# %%
MAKES, FAULTS = (torch.optim.AdamW, torch.optim.SGD), ("none", "wrong group", "wrong divisor")
right = {make: run_ranks(in_one_process, 1, make)[0] for make in MAKES}
found = run_ranks(lambda: {(make, fault): averaged(fault, make) for make in MAKES for fault in FAULTS}, RANKS)[0]
for (make, fault), losses in found.items():
    gaps = [abs(a / b - 1) for a, b in zip(losses, right[make], strict=True)]
    ours, theirs = losses.first_gradient, right[make].first_gradient
    print(f"{make.__name__:<5} fault: {fault:<14} first loss {gaps[0]:.0e}, tenth {gaps[-1]:.0e} from one process; experts' first gradient",
          f"{(ours.norm() / theirs.norm()).item():.2f} times as large, cosine {F.cosine_similarity(ours, theirs, 0).item():.2f}")
    assert (max(gaps) < 1e-12) == (fault == "none"), "a wrong group or divisor is found by the tenth loss in fp64"

# %% [markdown]
# **Diagnose it.** First losses are right: no gradient is in them. A wrong group mixes in other experts' gradients and turns the
# direction. A wrong divisor doubles the size, which AdamW nearly hides. So compare both, of experts' first gradient, with one process's.
#
# ## Recap
#
# **What does a mixture save?** Arithmetic: Mixtral computes like a model of 13B.
#
# **What does it cost?** Model states like those of 47B, copies of vectors, and on several ranks either weights or rows that travel.
#
# - If weights overlap computing: EP 8 with few tokens, FSDP alone with many (if its grouped matmuls run at half speed, EP 8 up to
#   load 1.3). If computing waits for weights: EP 8, up to a load that falls with tokens. Across nodes, EP 16 with a dispatcher is to
#   EP 8 as EP 8 to FSDP alone, at fewer tokens.
# - Experts' gradients are summed already. FSDP shards experts over their replicas, and divides by the number of all ranks.
# - Balance each layer, over the whole batch.
#
# Do the [lab](../../labs/advanced/19_experts.ipynb), in a copy: `make my-labs`. Then compare with the
# [solution](../../solutions/advanced/19_experts.ipynb).
#
# **References.** [GShard](https://arxiv.org/abs/2006.16668), [NeMo AutoModel](https://github.com/NVIDIA-NeMo/Automodel).

# %% [markdown]
# ## On Monday
#
# Train Qwen3-30B-A3B on one node of 8 H100 with transformers (5.23 here), layers recomputed, under `torchrun --nproc-per-node 8`:
#
# ```python
# # Before: name = "Qwen/Qwen3-30B-A3B"; batches of this rank on its GPU, token numbers (1, 4096); a folder that all nodes see;
# # ep_size = 8, the ranks of a node; world_size = int(os.environ["WORLD_SIZE"]), a multiple of ep_size, and at most
# # the number of experts: this library splits dimension 0, and further replicas would hold nothing.
# import torch
# import torch.distributed as dist
# from torch.nn.utils import clip_grads_with_norm_, get_total_norm
# from transformers import AutoModelForCausalLM
# from transformers.distributed import DistributedConfig
# from transformers.distributed.checkpoint import save_optimizer_distributed
#
# layout = DistributedConfig(fsdp_size=world_size, ep_size=ep_size, fsdp_mixed_precision=True)  # computes in bf16
# model = AutoModelForCausalLM.from_pretrained(name, distributed_config=layout, dtype=torch.float32)
# model.train()  # from_pretrained leaves evaluation mode, and there nothing is recomputed
# model.activation_checkpointing_enable()  # whole layers
# model.router_aux_loss_coef = 0.0  # its own loss pools all layers; model.config is no longer read
# meshes, k = {}, model.config.num_experts_per_tok
# for p in model.parameters():  # experts lie on a mesh of their own, and a norm or a fused step is of one mesh
#     meshes.setdefault(p.device_mesh, []).append(p)
# # Not fused, the step would make temporary copies as large as the parameters.
# optimizer = torch.optim.AdamW([{"params": part} for part in meshes.values()], lr=1e-5, fused=True)
#
# for batch in batches:
#     out = model(input_ids=batch, labels=batch, output_router_logits=True)
#     rows = torch.stack([r.topk(k).indices.flatten().bincount(minlength=r.shape[-1]) for r in out.router_logits])
#     everyone = rows.new_empty(world_size * len(rows), rows.shape[1])  # rows of each rank and layer for each expert
#     dist.all_gather_into_tensor(everyone, rows)
#     total = everyone.view(-1, *rows.shape).sum(0)  # (layers, experts): the whole batch's, as in section 4
#     likely = torch.stack([r.float().softmax(-1).mean(0) for r in out.router_logits])
#     # The library's scale: shares sum to k, and a mean over layers. 0.001 is this model's own coefficient, in its config.
#     balance = k * rows.shape[1] * (total / total.sum(1, keepdim=True) * likely).sum(1).mean()
#     (out.loss + 0.001 * balance).backward()
#     norm = torch.stack([get_total_norm([p.grad for p in part]).full_tensor() for part in meshes.values()]).norm()
#     for part in meshes.values():
#         clip_grads_with_norm_(part, 1.0, norm)
#     optimizer.step()
#     optimizer.zero_grad()
#     by_rank = everyone.view(-1, ep_size, len(rows), ep_size, rows.shape[1] // ep_size).sum((1, 4))
#     load = (by_rank.amax(-1) / by_rank.float().mean(-1)).amax(0)  # of each layer: all wait for the slowest group
#     if dist.get_rank() == 0:
#         print(f"busiest EP rank over the mean: {load.mean():.2f}, in the worst layer {load.max():.2f}")
#
# model.save_pretrained(folder, distributed_checkpoint=True)  # from_pretrained, as above, reads it
# save_optimizer_distributed(model, optimizer, f"{folder}/optimizer")  # load_optimizer_distributed reads it
# ```
#
# **Look at** the mean load, beside the table of section 3: experts take that many times as long as at load 1. If it is too high,
# raise 0.001. Across nodes, Megatron's dispatcher is `--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep`.
#
# In plain PyTorch, with layers that exchange rows as in section 3:
#
# ```python
# # Before: device = torch.device("cuda"); `model` with `layers`, each with `experts` that hold this rank's share and
# # exchange rows over mesh["experts"], made below; world_size ranks, expert_ranks of which share the experts; batches of this rank;
# # loss_of(model, batch), the mean over a batch; a folder that all nodes see.
# import torch
# import torch.distributed as dist
# import torch.distributed.checkpoint as dcp
# from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
# from torch.distributed.tensor import DTensor, Shard
# from torch.nn.utils import clip_grads_with_norm_, get_total_norm
#
# replicas = world_size // expert_ranks
# mesh = init_device_mesh(device.type, (replicas, expert_ranks), mesh_dim_names=("replicas", "experts"))
# whole = init_device_mesh(device.type, (world_size,))
# low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # so rows travel in bf16
# for layer in model.layers:
#     # Replicas split the experts. Where there are more replicas than experts they split dimension 1.
#     split = Shard(0 if replicas <= next(layer.experts.parameters()).shape[0] else 1)
#     fully_shard(layer.experts, mesh=mesh["replicas"], mp_policy=low, shard_placement_fn=lambda p, split=split: split)
#     layer.experts.set_gradient_divide_factor(world_size)  # with one replica, too
#     layer.experts.set_force_sum_reduction_for_comms(replicas > 1)  # sum, then divide, which all backends can
#     fully_shard(layer, mesh=whole, mp_policy=low)
# fully_shard(model, mesh=whole, mp_policy=low)
# for layer, following in zip(model.layers, list(model.layers)[1:]):  # else the wait for counts delays each gather
#     layer.set_modules_to_forward_prefetch([following, following.experts])
#     following.set_modules_to_backward_prefetch([layer, layer.experts])
# experts = [p for layer in model.layers for p in layer.experts.parameters()]
# of_experts = {id(p) for p in experts}
# rest = [p for p in model.parameters() if id(p) not in of_experts]
# optimizer = torch.optim.AdamW([{"params": experts}, {"params": rest}], lr=1e-5, fused=True)
#
#
# def clip(limit):  # after backward
#     squares = get_total_norm([p.grad for p in experts]).full_tensor() ** 2  # of this rank's experts, over their replicas
#     dist.all_reduce(squares, group=mesh.get_group("experts"))  # and of the other ranks' experts
#     norm = (squares + get_total_norm([p.grad for p in rest]).full_tensor() ** 2).sqrt()
#     for part in (experts, rest):
#         clip_grads_with_norm_(part, limit, norm)
#     return norm
#
#
# # FSDP's tensors know their replicas. Saved so, all expert ranks' experts have one name, and all but one rank's are lost.
# owners = DeviceMesh(device.type, mesh.mesh.T, mesh_dim_names=("experts", "replicas"))
#
#
# def state():  # what to save, or to load into; the optimizer has a state after its first step
#     found = {}
#     for name, p in model.named_parameters():
#         for key, part in {"parameter": p.detach(), **optimizer.state[p]}.items():
#             if id(p) in of_experts and isinstance(part, DTensor):
#                 part = DTensor.from_local(part.to_local(), owners, [Shard(0), *part.placements])
#             found[f"{name}.{key}"] = part
#     return found
#
#
# for batch in batches:
#     loss_of(model, batch).backward()
#     clip(1.0)
#     optimizer.step()
#     optimizer.zero_grad()
# dcp.save(state(), checkpoint_id=folder)  # dcp.load(state(), checkpoint_id=folder) fills the same tensors
# ```
#
# **Look at** an expert's gradient beside one process's, in fp32: equal to rounding. What you load equals what you saved.
