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
# **Promise.** You route tokens to experts by hand, in one process and on four ranks, with equal losses, and account for
# every byte that is held and sent. You see a router go out of balance, and two ways to steer it back.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 80, and 80 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# For a token Mixtral computes what a dense model of 13B computes. Train both with Adam. How many times the bytes of the
# dense model's parameters, gradients and states do Mixtral's take?

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

from utils import Batch, Cluster, check, estimate, model_shape, run_ranks, score, show, traffic
from utils.lessons.lesson_19.exchange import gathered_counts
from utils.lessons.lesson_19.layers import Mixture, dense, experts_held, keep_my_experts, small_model
from utils.lessons.lesson_19.training import held_out, train, train_on_text

RANKS, H = 4, 32  # of section 3: ranks, channels

# %% jupyter={"source_hidden": true}
import math

from transformers import AutoModelForCausalLM, DeepseekV3Config

from utils.catalog import link
from utils.fitting.model_configs import model_config
from utils.lessons.lesson_19.at_size import deepseek_v3_stage, qwen3_30b_a3b
from utils.lessons.lesson_19.figures import draw_exchange, draw_held_and_used, draw_load
from utils.lessons.lesson_19.published import OVERLAPPED_SECONDS, PARAMETERS, QWEN3_235B
from utils.lessons.lesson_19.small import adam_bytes, forward_flops, kept_bytes, waiting_share
from evidence.validation.megatron_experts import comparisons

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
# **Read it.** **Arithmetic follows what is used, memory what is held.** Over a batch every expert gets tokens, so each has
# gradients, and Adam keeps states for all. "A 47B model at the price of a 13B one" is true of FLOPs alone. (DeepSeek-V3 also
# has a *shared* expert, which every token uses.)
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
# 256 small products a layer.

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
# and one of width 4,096, which holds as much. Which columns are alike?

# %%
layers = {"dense, the same FLOPs": dense(256, 1024), "8 experts, 2 a token": Mixture(256, 512, 8, 2, mixture),
          "dense, the same memory": dense(256, 4096)}
for name, layer in layers.items():
    x = torch.randn(2048, 256, requires_grad=True)
    flops, kept = forward_flops(layer, x), kept_bytes(layer, x)
    states = adam_bytes(layer, lambda layer=layer, x=x: layer(x).sum().backward())
    print(f"{name:<24} {flops / 1e9:5.2f} GFLOP forward, {states / 2**20:5.1f} MiB of parameters, gradients and states,",
          f"{kept / 2**20:5.1f} MiB kept for backward (measured)")
    score("19", name, peak_bytes=states + kept)

# %% [markdown]
# **Read it.** FLOPs are those of the small layer, but for the router; states those of the large one. What is
# kept for backward is *more* than the small layer's: a token's vector is there $k$ times on its way to the experts and
# $k$ times on its way back, before the weights. At equal FLOPs a mixture costs memory; it saves FLOPs at equal memory.
#
# ## 3. Experts on four ranks
#
# So the experts are shared out. **Expert parallelism**: each rank holds $E/4$ of them and reads its own tokens. Rows
# travel to their experts and back, by an all-to-all. Backward sends gradients the same way, which is another
# all-to-all with the sizes exchanged:

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
# How many rows will come? Each rank first tells all others its counts (`gathered_counts`, in
# `sources/advanced/19_experts/exchange.py`). Bad news travels there, too: if one router gives NaN, or sends a rank more rows than it
# has room for, every rank raises the same sentence, and none waits.

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
# **Predict the bytes.** A rank has $T = 32$ tokens here. All its rows of $h$ numbers go into an exchange and as many come
# back, in two layers, 10 steps, 8 bytes a number. Forward's two exchanges and the two of backward: over the four ranks
# together $4 \cdot 4 k T h \cdot 8$ bytes a layer and step.

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
assert sent == predicted and held == everything / RANKS, "rows are k T a rank, each way, forward and backward"

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
# here 2; the loss is a mean over 4. `set_gradient_divide_factor` says so.

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
# in bf16 on 64 ranks, 63 of 64 parts of either being elsewhere:

# %%
tokens, far = 4096, 63 / 64
for name, c in CONFIGS.items():
    width = getattr(c, "moe_intermediate_size", c.intermediate_size)
    gathered = 3 * far * c.num_local_experts * 3 * c.hidden_size * width * 2  # twice gathered, once reduced
    sent = 4 * far * c.num_experts_per_tok * tokens * c.hidden_size * 2
    print(f"{name:<14} FSDP moves {gathered / 1e9:5.2f} GB, EP {sent / 1e9:.2f} GB for {tokens:,} tokens,",
          f"as much from {tokens * gathered / sent:,.0f} tokens on (predicted)")

# %% [markdown]
# Few ranks have that many tokens at once: rows are cheaper to move than experts. Now **Qwen3-30B-A3B**, at real size, laid
# out as above on 16 simulated H100: experts over 8, two replicas, one sequence of 4,096 tokens a rank, fp32 states:

# %%
qwen = qwen3_30b_a3b()

# %% jupyter={"source_hidden": true}
print(f"peak {qwen.peak_bytes / 2**30:.1f} GiB (simulated):", ", ".join(
    f"{size / 2**30:.1f} of {kind}" for kind, size in qwen.breakdown.items() if size > 2**29))
share = models["Qwen3-30B-A3B"][0] * 4e9 / 16 / 2**30
print(f"predicted {share:.1f} GiB of parameters, {2 * share:.1f} of Adam's moments: each number on one of 16 ranks")
for row in qwen.traffic:
    if row.collective == "all-to-all":
        exchanged, predicted = row.payload_bytes, 48 * 4 * 8 * 4096 * 2048 * 2
        print(f"put into exchanges: {exchanged / 1e9:.1f} GB a step, predicted {predicted / 1e9:.1f}")
assert exchanged == predicted, "48 layers, four exchanges of k rows a token, two bytes a number"
score("19", qwen)

# %% [markdown]
# NVIDIA trains it on 16 H100 at this length and one sequence a rank (EP 16, FP8; Megatron-Bridge's performance summary 26.06):
# that it fits is published, its bytes are not.
#
# ## 4. Balance
#
# Nothing makes a router treat experts alike, and a step ends when its busiest rank is done. Two cures. An **auxiliary loss**
# $E \sum_e f_e P_e$, with $f_e$ the share of rows that $e$ got and $P_e$ its mean probability: its gradient
# moves the router. Or a **bias** (DeepSeek-V3): added to probabilities for the *choice* alone, raised after each step for an
# expert with too few rows and lowered for one with too many. No gradient is touched. Here the loss weighs 0.01, and a step of the
# bias is 0.004.

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


WAYS, SEEDS = ("left alone", "auxiliary loss", "bias"), range(3)
trained = {way: [train_on_text(partial(Steered, 64, 64, 8, 2, mixture), partial(added_loss, way), partial(after_step, way), seed)
                 for seed in SEEDS] for way in WAYS}  # one block, 100 steps on the bytes of Python's own library
show(draw_load({way: [loads for _, loads in runs] for way, runs in trained.items()}),
     alt="Rows of the busiest of eight experts over the mean, by step, three seeds: left alone it stays near three; with an "
     "auxiliary loss and with a bias it falls below two.")

# %% [markdown]
# **Capacity.** Some implementations give each expert room for a fixed multiple of the mean and **drop** the rows beyond: a
# dropped row adds nothing to its token. Others are *dropless*, as section 3 was: the busiest rank gets all its rows.
# The trained models, on text that they have not seen:

# %%
for way, runs in trained.items():
    losses = torch.tensor([held_out(model) for model, _ in runs])
    print(f"{way:<15} dropless {losses.mean():.3f} ({losses.min():.3f} to {losses.max():.3f})", end="")
    for capacity in (2.0, 1.25, 1.0):
        rises = [held_out(model, capacity) - held_out(model) for model, _ in runs]
        drops = [held_out(model, capacity) and model.blocks[0].feedforward.dropped for model, _ in runs]
        print(f";  {capacity:g}: {sum(drops) / 3:3.0%} dropped, loss +{sum(rises) / 3:.2f}", end="")
    print()

# %% [markdown]
# **Read it.** Dropless, ways differ by about as much as seeds: 100 steps of a tiny model do not tell which trains better. What
# a cure decides is *load*. With room for 1.25 times the mean, the router that was left alone drops a third of its rows or more.
#
# **Imbalance is waiting.** Dropless, two experts on each of four ranks. Ranks that sleep 50 µs a row stand for devices at
# work. **Predict:** of a step, the mean rank waits $1 - \text{mean}/\text{busiest}$.

# %%
for way, runs in trained.items():
    held_out(runs[0][0])  # which notes the rows of each expert
    rows = runs[0][0].blocks[0].feedforward.load.view(RANKS, 2).sum(1)
    print(f"{way:<15} rows by rank {rows.tolist()}: waiting {waiting_share(rows.tolist(), 50e-6):.0%} of the step (measured),",
          f"predicted {1 - (rows.float().mean() / rows.max()).item():.0%}")

# %% [markdown]
# The busiest rank also *keeps* its rows for backward, more than others: a dropless run can end out of memory on one rank.
#
# ## 5. Inside a node, or across nodes?
#
# An exchange needs the fast link, so "keep experts inside a node" is common advice. Here are measured layouts of Qwen3-235B-A22B
# on 256 H100 (Megatron-MoE-ModelZoo, `best_practice/Qwen3` at c1ad0b5). Beside them the planner, which assumes even loads, an
# exchange of all rows with no product beside it, and no recomputation; the first two recompute norms and activations:

# %% jupyter={"source_hidden": true}
PORT = link("InfiniBand NDR").link_bytes_per_second
cluster = Cluster(gpu="H100", nodes=32, network_bytes_per_second=8 * PORT, network_ports=8)
for name, published, plan in QWEN3_235B:
    found = estimate(model_shape("qwen3-235b-a22b"), cluster, plan, Batch(sequences=2048, sequence_length=4096))
    print(f"{name:<28} {published:.1f} s a step (published); planner {found.step_seconds:.1f} s, "
          f"{found.time.tensor_parallel:.1f} s of it exchanges and sums (predicted)")
once = 3 * (1 - math.comb(96, 8) / math.comb(128, 8))
print(f"the first with exchanges beside products: {OVERLAPPED_SECONDS} s (published). Of 8 rows a token 6 leave a node of four,",
      f"if routed at random; sent once a node, {once:.1f} (predicted)")

# %% [markdown]
# **Read it.** The planner's seconds of experts are not calibrated, and here they put the layouts in reverse order: do not choose
# by them. Two causes can be named. DeepEP sends a token once to a *node*, which passes it on inside: less than half of the rows. And
# what keeps experts inside the node, a deeper pipeline or wider tensor parallelism, costs elsewhere.
# The planner's *bytes* are better; beside Megatron-LM's own tests, on which no constant was set:

# %%
for row in comparisons():
    if "release" in row.case and "h100" in row.case:
        print(f"{row.case.partition(' on ')[0]:<40} {row.quantity:<19} {row.published / 1e9:.1f} GB published, "
              f"{row.predicted / 1e9:.1f} predicted ({row.error:+.0%})")

# %% [markdown]
# **DeepSeek-V3**'s published layout: 16 stages, 256 experts over 64 ranks in 8 nodes, so 4 on a rank; states sharded (ZeRO-1) over
# 128 data ranks, an expert's over its 2 replicas; DualPipe, which keeps 17 micro-batches and all parameters twice. No
# tensor parallelism. A stage of 4 layers, one micro-batch of 4,096 tokens in bf16, simulated:

# %%
plain, again = deepseek_v3_stage(), deepseek_v3_stage(recompute=True)

# %% jupyter={"source_hidden": true}
parts, layer = ({str(kind): size for kind, size in found.breakdown.items()} for found in (plain, again))
count, experts = parts["parameters"] / 2, 4 * 4 * 3 * 7168 * 2048
shards = (count - experts) / 128 + experts / 2  # whose master copy and moments are here
print(f"{count / 1e9:.2f}B parameters on the rank, {experts / 1e9:.2f}B of them experts (simulated)")
print(f"GB: weights twice {4 * count / 1e9:.1f}, fp32 gradients {4 * count / 1e9:.1f}, master and bf16 moments {8 * shards / 1e9:.1f} (predicted)")
print(f"GB: activations of 17 micro-batches {17 * parts['activations'] / 1e9:.0f}, nothing recomputed (simulated, times 17); all recomputed:",
      f"{17 * 4 * 4096 * 7168 * 2 / 1e9:.1f} of layers' inputs (predicted), {layer['recomputed activations'] / 1e9:.1f} of a layer at work (simulated)")
for found in (plain, again):
    score("19", found)

# %% [markdown]
# **Read it.** States fit easily: that is what 64 expert ranks are for. Activations do not, in 80 GB, unless some are
# recomputed; the report recomputes norms and up-projections and keeps inputs of experts in FP8. Its bytes are not published.
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
# as it is. Look at the router's gradient, not at the loss.
#
# **Two.** The experts' gradients are averaged over the wrong group: over all ranks, as DDP would do; or, with replicas, only over
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
# **Diagnose it.** First losses are right, as always. Averaged over all, each expert learns from other experts' rows. With the wrong
# divisor gradients are twice too large, and AdamW, which divides by their size, nearly hides it; clipping by norm
# would not. Compare *gradients* with one process, in fp64.
#
# ## Recap
#
# - Arithmetic follows the $k$ experts that a token uses; parameters, gradients and states follow all $E$.
# - Expert parallelism moves rows: $4kTh$ numbers a layer and step put in, whatever $E$ is.
# - Experts' gradients are summed already: their group is their replicas, their divisor all ranks.
# - Imbalance is waiting, dropped rows, or one rank's memory. A bias steers the choice and leaves gradients alone.
#
# **Test yourself.** You double $E$, on twice the ranks, each with as many tokens. What happens to states and to bytes sent, on a rank?
#
# <details><summary>Answer</summary>
#
# States of experts stay; so do the rows that a rank puts in. More of them leave the node.
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
# `torchrun --nproc-per-node 8`; every rank reads its own batch:
#
# ```python
# # Before: `name` of a mixture of experts, `batch` of this rank, world_size = int(os.environ["WORLD_SIZE"]).
# # ep_size divides the experts and world_size: its ranks share the experts, and lie in one node to begin with.
# import torch
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
#
# k = model.config.num_experts_per_tok
# for layer, logits in enumerate(out.router_logits):
#     load = logits.topk(k, -1).indices.flatten().bincount(minlength=logits.shape[-1]).float()
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
# Megatron-LM: `--expert-model-parallel-size 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-enable-expert-bias`.
