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
# **Promise.** You route tokens by hand, in one process and on four ranks, with equal losses; account for every byte held and
# sent; and steer a router back into balance.
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
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from utils import check, run_ranks, score, show, traffic
from utils.lessons.lesson_19.exchange import gathered_counts
from utils.lessons.lesson_19.layers import Mixture, dense, experts_held, keep_my_experts, small_model
from utils.lessons.lesson_19.training import held_out, train, train_on_text

RANKS, H = 4, 32  # of section 3: ranks, channels

# %% jupyter={"source_hidden": true}
from transformers import AutoModelForCausalLM, DeepseekV3Config

from utils.catalog import link
from utils.fitting.model_configs import model_config
from utils.lessons.lesson_19.at_size import qwen3_30b_a3b
from utils.lessons.lesson_19.figures import draw_exchange, draw_held_and_used, draw_load
from utils.lessons.lesson_19.published import PARAMETERS
from utils.lessons.lesson_19.small import adam_bytes, forward_flops, kept_bytes

# %% [markdown]
# ## 1. Held, and used
#
# A mixture of experts has $E$ feed-forward layers in place of one, the *experts*, and a *router*, a small matrix that sends
# each token to $k$ of them. All else is used by every token. So three numbers of a configuration say what is used:

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
     alt="Shares of parameters that a token uses: Mixtral 12.9 of 46.7 billion, Qwen3-30B-A3B 3.4 of 30.5, DeepSeek-V3 37.6 of 671.")
held, used = models["Mixtral-8x7B"]
print(f"states at 16 bytes a parameter: {16 * held:.0f} GB, and {16 * used:.0f} GB of a dense model; "
      f"{held / used:.1f} times as many, and your bet was {my_bet_times}")

# %% [markdown]
# **Read it.** **Arithmetic follows what is used, states what is held.** Over a batch every expert gets tokens, so each has
# gradients, and Adam keeps states for all.
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
# (`bias` comes in section 4.)

# %%
def route(x, router, k, bias=0.0):
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
def by_expert(rows, counts, w_in, w_out):  # a product for each expert, also for those without rows
    return torch.cat([one_expert(part, a, b) for part, a, b in zip(rows.split(counts), w_in, w_out, strict=True)])


def mixture(x, router, w_in, w_out, k):
    choice, weight, _ = route(x, router, k)
    order = choice.flatten().argsort(stable=True)  # rows by expert
    token = order // k  # whose row it is
    counts = choice.flatten().bincount(minlength=len(w_in)).tolist()
    rows = by_expert(x[token], counts, w_in, w_out)
    return torch.zeros_like(x).index_add(0, token, weight.flatten()[order, None] * rows)


# %% [markdown]
# Is it what the definition says: every expert on every token, times a weight that is mostly zero? And one call does what the
# loop does, `grouped_mm`: rows of all experts, and where each expert's end. With Qwen3's 128 experts a loop would start
# 256 small products a layer. On a CPU this shows equality, not speed. (`Mixture` holds the matrices: `layers.py`, in
# `sources/advanced/19_experts`.)

# %%
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
    score("19", name, peak_bytes=states + kept)

# %% [markdown]
# **Read it.** FLOPs are those of the small layer, but for the router; states those of the large one. What is kept for
# backward follows $k$, not $E$: 46 MiB, beside 130 in the layer with the same states. It is 12 more than the small layer's:
# $k$ copies of a token's vector (4 MiB) on the way to the experts, on the way back, and once weighted. **At equal FLOPs a
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
# the same folder). Bad news travels there, too: if one router gives NaN, every rank raises the same sentence, and none waits.

# %%
def mixture_on_ranks(x, router, w_in, w_out, k, group=None):
    choice, weight, p = route(x, router, k)
    order = choice.flatten().argsort(stable=True)
    token, held = order // k, len(w_in)
    everyone = gathered_counts(choice, p, held, group)  # (ranks, E): rows of each rank for each expert
    place = dist.get_rank(group)
    mine = everyone[:, place * held : (place + 1) * held]  # what each rank sends to each of my experts
    out, into = everyone[place].view(-1, held).sum(1).tolist(), mine.sum(1).tolist()
    rows = Send.apply(x[token], out, into, group)
    expert = torch.arange(held).repeat(len(mine)).repeat_interleave(mine.flatten())  # rows came by sender
    by = expert.argsort(stable=True)
    done = by_expert(rows[by], mine.sum(0).tolist(), w_in, w_out)
    back = Send.apply(done[by.argsort()], into, out, group)
    return torch.zeros_like(x).index_add(0, token, weight.flatten()[order, None] * back)


# %% [markdown]
# **The rule of gradients.** The loss is the mean over all ranks' tokens. Everything but the experts stands on every rank,
# and each rank has a part of its gradient: sum over the ranks, then divide by 4. An expert stands on *one* rank, and has
# worked on all ranks' rows: its gradient is summed already. Only divide it by 4.

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
    torch.manual_seed(dist.get_rank())
    x, layer = torch.randn(128, H).double(), small_model(mixture).blocks[0].feedforward
    choice, _, p = route(x, layer.router, 2)
    return gathered_counts(choice, p, 2).view(RANKS, RANKS, 2).sum(-1)


show(draw_exchange(run_ranks(rows_sent, RANKS)[0]),
     alt="A table of four by four: rows that each rank sends to each. Each row sums to 256; columns differ.")

# %% [markdown]
# **Question.** DeepSeek-V3: $k = 8$, $h = 7168$. How many MB ($10^6$ bytes) does a rank put into *one* exchange for 4,096 tokens
# in bf16?

# %%
mb_an_exchange = ...
check("19.mb_an_exchange", mb_an_exchange)

# %% [markdown]
# ### With FSDP: experts have a group of their own
#
# With more ranks than experts are to be shared over, several hold the same experts: *replicas*. The library's way: FSDP shards
# experts over **their replicas** and the rest over all ranks. FSDP divides gradients by the size of its group,
# here 2; the loss is a mean over 4. `set_gradient_divide_factor` says so. FSDP gathers where the experts' `forward` is *called*.

# %%
def with_fsdp(divide=True, make=torch.optim.AdamW):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    whole, model = init_device_mesh("cpu", (RANKS,)), small_model(mixture)
    exchange = partial(mixture_on_ranks, group=mesh.get_group("experts"))
    keep_my_experts(model, mesh.get_local_rank("experts"), 2, exchange)
    for block in model.blocks:
        experts = block.feedforward.experts
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
# **Why not FSDP alone?** It would gather *all* experts of a layer on every rank. Weights against rows, for a layer and step
# in bf16 on 64 ranks. Mixtral's 8 experts allow 8 parts, so 8 replicas, which shard them:

# %%
tokens, ranks = 4096, 64
for name, c in CONFIGS.items():
    width = getattr(c, "moe_intermediate_size", c.intermediate_size)
    parts, held = min(ranks, c.num_local_experts), c.num_local_experts * 3 * c.hidden_size * width * 2
    replicas = ranks // parts
    alone = 3 * (1 - 1 / ranks) * held  # twice gathered, once reduced
    within = 3 * (1 - 1 / replicas) * held / parts
    rows = 4 * (1 - 1 / parts) * c.num_experts_per_tok * tokens * c.hidden_size * 2
    print(f"{name:<14} FSDP moves {alone / 1e9:5.2f} GB; EP {parts} x {replicas}: {rows / 1e9:.2f} of rows for {tokens:,} tokens and",
          f"{within / 1e9:.2f} of weights, as much from {tokens * (alone - within) / rows:,.0f} tokens on (predicted)")

# %% [markdown]
# With fewer tokens a rank than that, rows are fewer bytes. One sequence of 32k is more than Qwen3's.
#
# Now **Qwen3-30B-A3B**, laid out as above on 16 simulated H100: experts over 8, two replicas, a sequence of 4,096
# tokens a rank, fp32 states. First with even rows; then on a rank that gets 1.5 times the mean:

# %%
qwen, busy = qwen3_30b_a3b(), qwen3_30b_a3b(load=1.5)

# %% jupyter={"source_hidden": true}
print(f"peak {qwen.peak_bytes / 2**30:.1f} GiB (simulated):", ", ".join(
    f"{size / 2**30:.1f} of {kind}" for kind, size in qwen.breakdown.items() if size > 2**29))
share = models["Qwen3-30B-A3B"][0] * 4e9 / 16 / 2**30
print(f"predicted {share:.1f} GiB of parameters, {2 * share:.1f} of Adam's moments: each number on one of 16 ranks")
more = 0.5 * 48 * 8 * 4096 * (2048 + 4 * 768) * 2
print(f"with 1.5 times the rows {busy.peak_bytes / 2**30:.1f} GiB (simulated), {(busy.peak_bytes - qwen.peak_bytes) / 2**30:.1f} more,",
      f"predicted {more / 2**30:.1f}")

# %% jupyter={"source_hidden": true}
(exchanged,) = (row.payload_bytes for row in qwen.traffic if row.collective == "all-to-all")
predicted = 48 * 4 * 8 * 4096 * 2048 * 2
print(f"put into exchanges: {exchanged / 1e9:.1f} GB a step, predicted {predicted / 1e9:.1f}")
assert exchanged == predicted, "48 layers, four exchanges of k rows a token, two bytes a number"
score("19", qwen)

# %% [markdown]
# **Read it.** The peak is at the loss, before gradients. A row that came keeps 5,120 numbers a layer: the vector, gate and up, and two
# tensors made of these. Even rows fit an H100 (79.2 GiB); the busy rank's do not.
#
# ## 4. Balance
#
# Nothing makes a router treat experts alike, and a step ends when its busiest rank is done. Two cures. An **auxiliary loss**
# $E \sum_e f_e P_e$, with $f_e$ the share of rows that $e$ got and $P_e$ its mean probability: its gradient
# moves the router. Or a **bias**: added to probabilities for the *choice* alone, raised after each step for an
# expert with too few rows and lowered for one with too many. No gradient is touched. (DeepSeek-V3 adds it to sigmoid scores, beside
# a small loss.) The loss weighs 0.01, a step of the bias is 0.004; neither was varied.

# %%
class Steered(Mixture):
    bias, capacity = 0.0, None  # of the choice; rows that an expert takes, over the mean

    def forward(self, x):
        rows, (experts, k) = x.flatten(0, -2), (len(self.experts.w_in), self.k)
        choice, weight, p = route(rows, self.router, k, self.bias)
        self.load = choice.flatten().bincount(minlength=experts)
        self.auxiliary = experts * (self.load / self.load.sum() * p.mean(0)).sum()
        order = choice.flatten().argsort(stable=True)
        weight, token = weight.flatten()[order, None], order // k
        if self.capacity is not None:
            place = torch.cat([torch.arange(n) for n in self.load.tolist()])  # in the expert's queue
            kept = place < self.capacity * len(order) / experts
            self.dropped, weight = 1 - kept.float().mean().item(), weight * kept[:, None]
        done = by_expert(rows[token], self.load.tolist(), self.experts.w_in, self.experts.w_out)
        return torch.zeros_like(rows).index_add(0, token, weight * done).view_as(x)


# %%
def added_loss(way, layer):
    return 0.01 * layer.auxiliary if way == "auxiliary loss" else 0.0


def after_step(way, layer):
    if way == "bias":
        layer.bias += 0.004 * (layer.load.float().mean() - layer.load).sign()


WAYS, SEEDS = ("left alone", "auxiliary loss", "bias"), range(2)
trained = {way: [train_on_text(partial(Steered, 64, 64, 8, 2, mixture), partial(added_loss, way), partial(after_step, way), seed)
                 for seed in SEEDS] for way in WAYS}  # one block, 100 steps on the bytes of Python's own library
show(draw_load({way: [loads for _, loads in runs] for way, runs in trained.items()}),
     alt="Rows of the busiest of eight experts over the mean, by step, two seeds: left alone it stays above three; an auxiliary loss "
     "and a bias bring it down to about two or less.")

# %% [markdown]
# **Read it.** All three collapse first: nearly every token chooses one expert. Left alone, the mean of two seeds stays above 3,
# of 4 that are possible; cures bring it to 2 or less.
#
# **Capacity.** Some implementations give each expert room for a fixed multiple of the mean and **drop** rows beyond: these add
# nothing to their token. Others, as in section 3, are *dropless*. So these models were trained; room is limited only here, on
# unseen text:

# %%
for way, runs in trained.items():
    losses = torch.tensor([held_out(model) for model, _ in runs])
    print(f"{way:<15} dropless {losses.mean():.3f} ({losses.min():.3f} to {losses.max():.3f})", end="")
    for capacity in (2.0, 1.25, 1.0):
        rises = [held_out(model, capacity) - held_out(model) for model, _ in runs]
        drops = [held_out(model, capacity) and model.blocks[0].feedforward.dropped for model, _ in runs]
        print(f";  {capacity:g}: {sum(drops) / len(runs):3.0%} dropped, loss +{sum(rises) / len(runs):.2f}", end="")
    print()

# %% [markdown]
# **Read it.** Dropless, ways differ by 0.04, seeds by up to 0.03: this does not tell which trains better. What a cure decides is
# *load*: with room for 1.25 times the mean, the router left alone drops 34% of rows.
#
# **Imbalance is waiting.** Of the experts' part of a step the mean rank waits $1 - \text{mean}/\text{busiest}$. Two experts on each
# of four ranks, one seed:

# %%
for way, runs in trained.items():
    held_out(runs[0][0])  # which notes the rows of each expert
    load = runs[0][0].blocks[0].feedforward.load.float()
    by_rank = load.view(RANKS, 2).sum(1)
    busiest, rank = (x.max() / x.mean() for x in (load, by_rank))
    print(f"{way:<15} busiest expert {busiest:.1f} times the mean, busiest rank {rank:.2f} times: {1 - 1 / rank:.0%} waiting (predicted)")

# %% [markdown]
# **Read it.** Experts that share a rank average out: a rank is never busier than its busiest expert. It *keeps* its rows,
# too, and can end out of memory, as above.
#
# ## 5. Inside a node, or across nodes?
#
# Qwen3-30B-A3B again, on two nodes of 8 H100: bytes that leave a rank in a step, and seconds at what links sustain, for the
# busiest rank's load. For scale: the arithmetic, at an assumed 400 TFLOP/s.

# %% jupyter={"source_hidden": true}
NVLINK, NDR = (link(name).sustained_bytes_per_second for name in ("NVLink 4", "InfiniBand NDR"))
share = 48 * 128 * 3 * 2048 * 768 / 8  # numbers of the experts that two replicas of EP 8 hold together
for name, inside, across, weights in (("EP 8, a group in each node", 7 / 8, 0, share / 2 * (2 + 2 + 4)),  # two gathers, fp32 sums
                                      ("EP 16 over both nodes", 7 / 16, 1 / 2, 0)):
    seconds = max(exchanged * inside / NVLINK, exchanged * across / NDR)
    print(f"{name:<26} exchanges: {exchanged * inside / 1e9:.1f} GB inside, {exchanged * across / 1e9:.1f} across,",
          ", ".join(f"{seconds * load:.2f} s at load {load}" for load in (1.0, 1.2, 1.5)),
          f"; weights across: {weights / 1e9:.1f} GB, {weights / NDR:.2f} s (predicted)")

# %%
print(f"arithmetic: {6 * models['Qwen3-30B-A3B'][1] * 1e9 * tokens / 4e14:.2f} s (predicted)")

# %% [markdown]
# **Read it.** In a node exchanges take less than arithmetic, across more; and products wait for them. The experts' weights that
# EP 8's replicas gather and sum are no fewer bytes across. But FSDP can move them beside products, and they do
# not grow with tokens or load. **In a node, while experts fit there.**
#
# Not always: of published layouts of Qwen3-235B-A22B on 256 H100 the fastest has EP 32 over four nodes (19.7 s; EP 8 in a node, with
# a deeper pipeline or wider tensor parallelism: 24.2 and 29.0; Megatron-MoE-ModelZoo, `best_practice/Qwen3`
# at c1ad0b5). It uses DeepEP, which sends a token once to a *node* that passes it on inside: exercise 2 of the lab.
#
# ## Break it, diagnose it
#
# **One.** Someone sets $k = 1$ and leaves the weights scaled to sum to 1. Losses fall. What never learns?

# %%
def as_they_are(x, router, w_in, w_out, k):
    return mixture(x, router, w_in, w_out, k) * route(x, router, k)[2].amax(-1, keepdim=True)


def router_gradient(k, scaled):
    model = small_model(mixture if scaled else as_they_are, k)
    losses = train(model)
    norms = [block.feedforward.router.grad.norm().item() for block in model.blocks]
    return losses[0], losses[-1], norms


for k, scaled in ((2, True), (1, True), (1, False)):
    first, last, norms = run_ranks(router_gradient, 1, k, scaled)[0]
    print(f"k = {k}, weights {'sum to 1' if scaled else 'as they are'}: loss {first:.3f} to {last:.3f}, norms of router gradients",
          ", ".join(f"{norm:.0e}" for norm in norms))
    assert (max(norms) < 1e-12) == (k == 1 and scaled), "one weight divided by itself is 1, whatever the router says"

# %% [markdown]
# **Diagnose it.** A weight divided by itself is 1: no gradient reaches the router. Models with $k = 1$ use the probability
# as it is. Look at the router's gradient, without the auxiliary loss, which has one of its own.
#
# **Two.** The experts' gradients are averaged over the wrong group: over all ranks; or, with replicas, only over
# these, where FSDP is not told to divide by 4. AdamW, then SGD.

# %%
def over_all_ranks(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def averaged_wrongly(fault, make):
    if fault == "replicas alone":
        return with_fsdp(divide=False, make=make)[0]
    model = small_model(mixture)
    keep_my_experts(model, dist.get_rank(), RANKS, mixture_on_ranks)
    return train(model, over_all_ranks if fault == "all ranks" else by_the_rule, make=make)


for make in (torch.optim.AdamW, torch.optim.SGD):
    right = run_ranks(in_one_process, 1, make)[0]
    for fault in ("none", "all ranks", "replicas alone"):
        found = run_ranks(averaged_wrongly, RANKS, fault, make)[0]
        gaps = [abs(a / b - 1) for a, b in zip(found, right, strict=True)]
        print(f"{make.__name__:<5} fault: {fault:<14} first loss {gaps[0]:.0e}, tenth {gaps[-1]:.0e} from one process")
        assert (max(gaps) < 1e-12) == (fault == "none"), "a wrong group is found by the tenth loss in fp64"

# %% [markdown]
# **Diagnose it.** First losses are right: no gradient is in them. (DDP would copy rank 0's experts to all.) Averaged over all, each
# expert learns from others' rows. With the wrong divisor gradients are twice too large, and AdamW, which divides by their size,
# nearly hides it; clipping by norm would not. Compare *gradients* with one process, in fp64.
#
# ## Recap
#
# - Arithmetic and activations follow the $k$ experts that a token uses; parameters, gradients and states follow all $E$.
# - Expert parallelism moves rows: a mean rank puts in $4kTh$ numbers a layer and step, whatever $E$ is.
# - Experts' gradients are summed already: their group is their replicas, their divisor all ranks.
# - Imbalance is waiting, dropped rows, or one rank's memory. A bias steers the choice and leaves gradients alone.
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
# When you train a mixture whose experts do not fit beside each other on a GPU. In transformers (5.23 here), under
# `torchrun --nproc-per-node 8`; every rank reads its own batches:
#
# ```python
# # Before: `name` of a mixture of experts, `batch` of this rank, world_size = int(os.environ["WORLD_SIZE"]).
# # ep_size divides the experts and world_size: its ranks share the experts, and lie in one node to begin with.
# import torch
# import torch.distributed as dist
# from transformers import AutoModelForCausalLM
# from transformers.distributed import DistributedConfig
#
# layout = DistributedConfig(fsdp_size=world_size, ep_size=ep_size)
# model = AutoModelForCausalLM.from_pretrained(name, distributed_config=layout)
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
#
# out = model(input_ids=batch, labels=batch, output_router_logits=True)  # adds the auxiliary loss, by the model's coefficient
# out.loss.backward()
# optimizer.step()
# optimizer.zero_grad()
#
# k = model.config.num_experts_per_tok
# for layer, logits in enumerate(out.router_logits):
#     load = logits.topk(k, -1).indices.flatten().bincount(minlength=logits.shape[-1]).float()
#     dist.all_reduce(load)  # the rows of all ranks
#     print(f"layer {layer}: the busiest expert has {load.max() / load.mean():.1f} times the mean")
# held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
# print(f"{held:,} of {model.num_parameters():,} parameters on this rank")
# ```
#
# **Look at** the load, from the first step on: past twice the mean, raise `model.config.router_aux_loss_coef`. And at
# what a rank holds: its share, a `world_size`-th. In plain PyTorch, with a model whose layers exchange rows as in section 3:
#
# ```python
# # Before: `model` with `layers`, each with `experts` that hold this rank's share and exchange rows over mesh["experts"];
# # world_size ranks, expert_ranks of which share the experts; a loss that is the mean of the rank's own batch.
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# replicas = world_size // expert_ranks  # 2 or more: FSDP divides nothing in a group of one
# mesh = init_device_mesh(device.type, (replicas, expert_ranks), mesh_dim_names=("replicas", "experts"))
# whole = init_device_mesh(device.type, (world_size,))
# for layer in model.layers:
#     fully_shard(layer.experts, mesh=mesh["replicas"])
#     layer.experts.set_gradient_divide_factor(world_size)
#     fully_shard(layer, mesh=whole)
# fully_shard(model, mesh=whole)
# ```
#
# **Look at** an expert's gradient beside that of one process on the same tokens, in fp32: equal to rounding, not twice.
# Parameters lie on two meshes now, and one name means other experts on other ranks: clip by a norm summed over both meshes, and
# save each expert rank's share under its own name. Neither was run here.
#
# Megatron-LM: `--num-experts 128 --moe-router-topk 8 --expert-model-parallel-size 8 --moe-grouped-gemm --moe-token-dispatcher-type
# alltoall --moe-router-score-function sigmoid --moe-router-enable-expert-bias` (the bias is refused with softmax).
