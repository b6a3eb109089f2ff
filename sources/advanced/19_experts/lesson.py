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
# **Promise.** You route tokens by hand, also on four ranks; choose to move weights or tokens; and balance a router.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 120, and 80 for the lab | any laptop (Windows: WSL2) | about a minute of computing on two CPU cores |
#
# ## A bet
#
# Eight GPUs train Qwen3-30B-A3B in bf16, with 4,096 tokens each; gradients are summed in fp32, and backward recomputes every layer.
# Either each GPU gathers all experts' weights, layer by layer ([FSDP](../intermediate/09_sharding.ipynb) alone); or it keeps an eighth
# of the experts, and tokens' vectors travel. For its experts, how many times as many bytes does it send with FSDP alone?

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
from transformers import AutoModelForCausalLM, DeepseekV3Config

from utils.catalog import link
from utils.fitting.model_configs import model_config
from utils.lessons.lesson_19.at_size import qwen3_30b_a3b, qwen3_flops
from utils.lessons.lesson_19.exchange import gathered_counts
from utils.lessons.lesson_19.figures import draw_dispatch, draw_exchange, draw_held_and_used, draw_load, draw_mesh
from utils.lessons.lesson_19.figures_at_size import draw_choice, draw_crossing, draw_peaks, peak_parts
from utils.lessons.lesson_19.layers import Biased, Mixture, dense, experts_held, keep_my_experts, small_model
from utils.lessons.lesson_19.published import PARAMETERS
from utils.lessons.lesson_19.small import adam_bytes, forward_flops, kept_bytes
from utils.lessons.lesson_19.tables import print_published, print_tokens
from utils.lessons.lesson_19.training import held_out, rows_sent, train, train_on_text
from utils.simulation.devices import simulated_device

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
    models[name] = held / 1e9, (held - experts * (E - k) / E) / 1e9  # with the input embedding, which is read without a matmul
    print(f"{name:<14} {k} of {E:>3} experts: {models[name][0]:6.2f}B held, {models[name][1]:5.2f}B used;",
          "published: {:g}B and {:g}B ({})".format(*PARAMETERS[name]))

# %% jupyter={"source_hidden": true}
show(draw_held_and_used(models),
     alt="Billions of parameters: " + "; ".join(f"{name} uses {b:.1f} and holds {a:.1f}" for name, (a, b) in models.items()))
held, used = models["Mixtral-8x7B"]
print(f"Mixtral-8x7B, model states at 16 bytes a parameter: {16 * held:.0f} GB; a dense model of what it uses: {16 * used:.0f} GB; "
      f"{held / used:.1f} times as many (predicted)")

# %% [markdown]
# **Read it.** **Arithmetic follows what is used; [model states](../00_glossary.ipynb) follow what is held.**
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
# A token's vector is copied $k$ times. These **rows** are sorted, so that each expert's lie in one piece. That is
# *dispatch*. *Combine* brings the results back into the tokens' order, and adds the $k$ of each token. With five tokens:

# %% jupyter={"source_hidden": true}
five = torch.tensor([[1, 3], [0, 1], [3, 1], [2, 0], [1, 2]])  # the experts of each token
order = five.flatten().argsort(stable=True)
show(draw_dispatch(five, experts=4), alt=f"Ten rows by token, then sorted by expert, then by token again; places by expert: {order.tolist()}.")
print("order: the row at each place by expert ", order.tolist())
print("order // 2: that row's token           ", (order // 2).tolist())
print("counts: rows of each expert            ", five.flatten().bincount(minlength=4).tolist())
print("order.argsort(): where each row went   ", order.argsort().tolist())

# %% [markdown]
# For any number of tokens, with the experts' work between:

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
# By definition every expert computes every token, times a weight that is mostly zero. Does dispatch give the same?

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
# **What does it save?** Beside a mixture of 8 experts of width 512, $k = 2$, stand dense layers that compute as much (width 1,024)
# and that hold as much (4,096):

# %%
layers = {"dense, the same FLOPs": dense(256, 1024), "8 experts, 2 a token": Mixture(256, 512, 8, 2, mixture),
          "dense, the same states": dense(256, 4096)}
for name, layer in layers.items():
    x = torch.randn(2048, 256, requires_grad=True)
    flops, kept = forward_flops(layer, x), kept_bytes(layer, x)
    states = adam_bytes(layer, lambda layer=layer, x=x: layer(x).sum().backward())
    print(f"{name:<24} {flops / 1e9:5.2f} GFLOP forward, {states / 2**20:5.1f} MiB of model states,",
          f"{kept / 2**20:5.1f} MiB kept for backward")
print(f"FLOPs are counted, bytes measured; 2 k copies of 2,048 vectors of 256 numbers: {2 * 2 * 2048 * 256 * 4 / 2**20:.1f} MiB (predicted)")

# %% [markdown]
# **Read it.** The mixture keeps what the small layer keeps, and copies of each vector: $k$ that experts get, $k$ that they give.
# **At equal FLOPs a mixture costs model states and copies of vectors. At equal model states it saves FLOPs and activations.**
#
# ## 3. Experts on four ranks
#
# **Expert parallelism (EP)**: the ranks of a group, eight in *EP 8*, share a layer's experts, and each reads its own tokens. Rows
# travel to their experts and back by an [all-to-all](11_links.ipynb). Gradients take the same ways:

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
# First each rank tells all others, by an all-gather, how many rows it has for each expert:

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
# **The rule of gradients.** The loss is the mean over all ranks' tokens, equally many on each. All but the experts is on
# every rank, which has a part of its gradient: sum over the ranks, then divide by 4. An expert is on *one* rank and has
# worked on all ranks' rows: its gradient is summed already, and is only divided by 4.
#
# `keep_my_experts` leaves a rank `whole.chunk(4)[rank]` of each matrix of a small model's experts. `train` takes ten steps, each rank on
# its quarter of the batch.

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
# **Predict the bytes.** A rank with $T$ tokens puts in $kT$ rows of $h$ numbers, and sends back as many as *came*, in forward and in
# backward. Over all $R$ ranks that makes $R \cdot 4 k T h$ numbers a layer and step.

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

# %% jupyter={"source_hidden": true}
first_step = results[0][3]
show(draw_exchange(first_step, 32, 2),
     alt="Four ranks put rows in for four ranks that hold two experts each, and get as many back. Each rank puts in 64 rows: "
     + "; ".join(f"rank {r} gets {n}" for r, n in enumerate(first_step.sum(0).tolist())) + ".")
print("rows of each rank (down) for each rank (across):")
print(*(" ".join(f"{n:4}" for n in row) for row in first_step.tolist()), sep="\n")

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
# Let two of four ranks share the experts: each expert has two *replicas*. FSDP then shards experts over **their replicas**
# and the rest over all ranks. It divides gradients by the size of its group, which is 2 for experts. The loss is a mean over 4
# ranks, so `set_gradient_divide_factor` must say 4.

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
# ### Weights, or rows?
#
# FSDP alone gathers a layer's experts on every rank, twice a step, and sums their gradients: the same bytes for any number of
# tokens, which can move *while* the GPU computes. Rows grow with tokens, and here experts wait for them. (Layers recomputed make
# a third more FLOPs, and six exchanges. All else moves by FSDP either way.)
# FSDP alone also takes memory, for two layers' experts and gradients:

# %%
NVLINK, NDR = (link(name).sustained_bytes_per_second for name in ("NVLink 4", "InfiniBand NDR"))
EXPERTS = 48 * 128 * 3 * 2048 * 768  # numbers in Qwen3-30B-A3B's experts: layers, experts, three matrices
EXCHANGE = 48 * 8 * 4096 * 2048 * 2  # bytes of one exchange in every layer: k rows for each of 4,096 tokens, in bf16
weights, rows = EXPERTS * (2 + 2 + 4) * 7 / 8, 6 * EXCHANGE * 7 / 8  # two gathers in bf16, one sum in fp32; an eighth stays here
print(f"for experts FSDP alone sends {weights / 1e9:.0f} GB a rank and step, EP 8 {rows / 1e9:.1f} GB with 4,096 tokens (predicted):",
      f"{weights / rows:.1f} times as many; your bet was {my_bet_times}")

for name, c in CONFIGS.items():
    width = getattr(c, "moe_intermediate_size", c.intermediate_size)
    gathered = (2 + 2 + 2 + 4) * c.num_local_experts * 3 * c.hidden_size * width / 1e9  # two layers' weights, gradients, these in fp32
    print(f"{name:<14} {gathered:6.1f} GB with FSDP alone, {gathered / 8:5.1f} GB with EP 8 (predicted)")

# %% [markdown]
# **Read it.** DeepSeek-V3's experts need more than an H100 has. Qwen3's fit, so time decides. Rows are faster where weights take
# longer than compute and rows together, at three assumed speeds, at load 1, in sequences of 4,096 tokens:

# %%
SPEEDS = (70, 200, 400)  # TFLOP/s of a GPU while it computes; what is recomputed counts
compute = {speed: 4 / 3 * qwen3_flops() / speed / 1e12 for speed in SPEEDS}  # seconds of 4,096 tokens


def tokens_below(weights, rows, near=0.0):  # seconds: of weights, of rows for 4,096 tokens, of rows that the other layout sends, too
    return [4096 * weights / wait for wait in (*(s + rows for s in compute.values()), max(rows - near, 1e-9))]  # the last: not hidden


print_tokens("EP 8 is faster than FSDP alone", SPEEDS, {
    f"NVLink at {NVLINK * s / 1e9:.0f} GB/s": tokens_below(weights / NVLINK / s, rows / NVLINK / s) for s in (0.5, 1, 2)})
print_published()

# %% jupyter={"source_hidden": true}
each = {speed: seconds / 4096 for speed, seconds in compute.items()}
show(draw_choice(each, rows / NVLINK / 4096, weights / NVLINK, tokens_below(weights / NVLINK, rows / NVLINK)[:-1], NVLINK / 1e9),
     alt="Seconds for 1,000 tokens: EP 8 is level; FSDP alone falls with tokens, and crosses it at the numbers printed above.")

# %% [markdown]
# **Read it.** **With few tokens a rank, move rows; with many, move weights.** Right of a circle weights soon hide wholly, and EP 8
# still waits for its rows. Weights that do not hide (dotted) win from the last column on. (In one sequence of that length,
# with less attention, 1,185 is 1,366.)
#
# **The number hangs on load**: with EP alone, rows and experts take load times as long. Predicted alike, at 371 GB/s and 70 to 400
# TFLOP/s, weights win from
#
# | each layer's load | hidden | not hidden |
# |---|---|---|
# | 1.2 | 1,078 to 4,935 | 8,032 to 16,111 |
# | 1.42 (section 4, cured) | 980 to 4,421 | 4,615 to 11,684 |
# | 2.08 (left alone) | 771 to 3,370 | 2,027 to 6,404 |
#
# Left out, for EP: its experts get eight times the rows in a matmul.
#
# In the first published line all GPUs get the same tokens, and compute 39 or 310 TFLOP/s, by how tokens were counted, not 72. The
# others are of [NousResearch's fork](https://github.com/NousResearch/torchtitan/pull/19), whose recipe forces balance; from EP 1
# (FSDP alone) to EP 8 it reports "almost no throughput degradation".
#
# ### Does it fit one node?
#
# The worst load is 8: all rows come to one rank. *Simulated*: a run without values, of which every allocation is
# counted.

# %% jupyter={"source_hidden": true}
runs = {"EP 8, all kept": qwen3_30b_a3b(), "EP 8, layers\nrecomputed": qwen3_30b_a3b(layers_again=True),
        "the same,\nload 8": qwen3_30b_a3b(layers_again=True, load=8.0),
        "FSDP alone, layers\nrecomputed": qwen3_30b_a3b(1, layers_again=True)}
copies, inside = 48 * 8 * 4096 * 2 * 2048 * 2, 48 * 8 * 4096 * 4 * 768 * 2  # in and out; gate, up and two tensors made of these
bars = {name: peak_parts(run.breakdown, copies, inside) for name, run in runs.items()}
limit = simulated_device("H100").usable_bytes / 2**30
show(draw_peaks(bars, limit), alt="; ".join(f"{name}: {sum(parts):.1f} GiB" for name, parts in bars.items()).replace("\n", " "))
all_kept = bars["EP 8, all kept"]
print(f"all kept but the inside of the experts: {sum(all_kept) - inside / 2**30:.1f} GiB (predicted)")
print(f"all kept on 16 ranks, EP 8 or EP 16, with half of the states a rank: {sum(all_kept) - sum(all_kept[:2]) / 2:.1f} GiB (predicted)")
for name in ("EP 8, all kept", "EP 8, layers\nrecomputed"):
    (sends,) = (row.payload_bytes for row in runs[name].traffic if row.collective == "all-to-all")
    print(f"{' '.join(name.split())}: {sends / EXCHANGE:.0f} exchanges a layer and step (simulated)")

# %% [markdown]
# **Read it.** With 4,096 tokens a rank and all kept, one node is too small. To recompute the inside of the experts alone misses by
# 0.3 GiB, which a chunked loss would close. **With whole layers recomputed, as transformers does it, any load fits**: one layer's rows
# at a time are alive. torchtitan's [selective checkpointing](../intermediate/05_checkpointing.ipynb) keeps what came. FSDP alone
# peaks 1.7 GiB higher: EP 8 peaks elsewhere.
#
# But 24,576 tokens need a chunked loss: states, layers' inputs, logits and their gradients take about 82 GiB.
#
# ## 4. Balance
#
# Nothing makes a router treat experts alike, and a layer ends when its busiest rank is done. An **auxiliary
# loss** $E \sum_e f_e P_e$, with $f_e$ the share of rows that $e$ got and $P_e$ its mean probability, moves the router by its
# gradient. Or a **bias** is added to probabilities, for the *choice* alone: after each step it rises for experts with too few
# rows and falls for others.

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
    print(f"{way:<15} last 20 steps, busiest rank: load {late.mean():.2f} ({late.min():.2f} to {late.max():.2f}), the mean rank waits",
          f"{1 - 1 / late.mean():.0%} of the experts' time; nats a byte of unseen text {loss.mean():.2f} ({loss.min():.2f} to {loss.max():.2f})")

# %% [markdown]
# **Read it.** After ten steps nearly every token has one expert in common: its load is 4, its rank's 2 to 4. (One process trains;
# rows are counted as if four ranks held two experts each, and time as rows.) Both cures bring load down, and losses stay within the
# seeds' spread.
#
# **Whose tokens?** A rank's own tokens may all be code, and need the same experts. So
# [Qwen3](https://arxiv.org/abs/2505.09388) balances the [whole batch](https://arxiv.org/abs/2501.11873): $f_e$ is the same on all
# ranks, and the mean of their losses is one process's.

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
    print(f"{name:<38} {loss.item():.2f} (1 where shares are even), its gradient's norm {gradient:.0e}; the load of every layer is 4")
    assert (gradient < 1e-6) == (loss is pooled), "pooled shares are even, so nothing moves; a layer's own are not"

# %% [markdown]
# **Read it.** The layers' favourites cancel: the pooled loss sees even shares and moves nothing, whatever its coefficient.
#
# **Capacity.** Some implementations give each expert room for a multiple of the mean and **drop** rows beyond; *dropless* ones,
# as here, wait.
#
# ## 5. Inside a node, or across nodes?
#
# On two nodes of 8 H100, EP 8 moves two replicas' weights and gradients between nodes, EP 16 moves rows. A plain all-to-all sends
# a row for each of a token's 8 experts, of which 4 are in the other node where all are chosen alike. A *dispatcher* such as
# DeepEP sends the vector **once per node**, and a rank there passes it on. On the way back the node adds its experts' outputs
# first, so a token's weights travel with it.

# %% jupyter={"source_hidden": true}
half, six = EXPERTS / 16 * (2 + 2 + 4), 6 * EXCHANGE  # a rank has half of its experts, and its replica the other half
LAYOUTS = {"EP 8": (six * 7 / 8, 0, half), "EP 16, plain all-to-all": (six * 7 / 16, six / 2, 0),
           "EP 16, once per node": (six * 7 / 8, six / 8, 0)}  # bytes of rows inside, rows across, weights across
show(draw_crossing({name: tuple(size / 1e9 for size in sizes) for name, sizes in LAYOUTS.items()}, NVLINK / 1e9, NDR / 1e9),
     alt="; ".join(f"{name}: {b / 1e9:.1f} GB of rows and {c / 1e9:.1f} of weights cross" for name, (_, b, c) in LAYOUTS.items()))

# %%
table = {}
for name in list(LAYOUTS)[1:]:
    for s in (0.5, 1, 2):
        near, far = (max(LAYOUTS[n][0] / NVLINK, LAYOUTS[n][1] / NDR / s) for n in ("EP 8", name))  # both networks work at once
        table[f"{name[7:]}, InfiniBand at {NDR * s / 1e9:.0f} GB/s"] = tokens_below(half / NDR / s, far, near)
print_tokens("EP 16 is faster than EP 8", SPEEDS, table)

# %% [markdown]
# **Read it.** **With more tokens a rank than that, stay in the node; with fewer, spread the experts.** If weights do not hide, a
# dispatcher wins up to 22,467 tokens at load 1, even at 24 GB/s. (Left out: in a node DeepEP sends once per rank, 5.3 vectors a token
# with EP 8, not 8.)
#
# Weights do not hide by themselves: the host waits for each layer's counts, and FSDP starts the next gather late, unless told
# what to prefetch (the last cell's PyTorch lines do). Rows can hide, too, behind another micro-batch (DeepSeek-V3) or the shared
# expert (Megatron).
#
# ## Break it, diagnose it
#
# Experts' gradients are averaged over the wrong group, all ranks; or by the wrong divisor, as FSDP was not told 4.

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
right = {make: run_ranks(in_one_process, 1, make)[0] for make in MAKES}
found = run_ranks(lambda: {(make, fault): averaged(fault, make) for make in MAKES for fault in FAULTS}, RANKS)[0]
for (make, fault), losses in found.items():
    gaps = [abs(a / b - 1) for a, b in zip(losses, right[make], strict=True)]
    print(f"{make.__name__:<5} fault: {fault:<14} first loss {gaps[0]:.0e}, tenth {gaps[-1]:.0e} from one process;",
          f"experts' first gradient {losses.first_norm / right[make].first_norm:.2f} times as large")
    assert (max(gaps) < 1e-12) == (fault == "none"), "a wrong group or divisor is found by the tenth loss in fp64"

# %% [markdown]
# **Diagnose it.** First losses are right: no gradient is in them. In the wrong group an expert learns from other experts'
# rows. With the wrong divisor experts' gradients are twice too large, which AdamW, dividing by their size, nearly hides. Norms beside
# one process's warn at the first step, but not of which: 1.97 is near $\sqrt 4$, of four ranks. *Elements* tell: a wrong divisor
# leaves one ratio.
#
# ## Recap
#
# - Arithmetic follows $k$, model states $E$.
# - FSDP moves weights, as many for any number of tokens. EP moves rows, $4kTh$ numbers a mean rank, layer and step, $6kTh$ with
#   layers recomputed, and waits for the busiest rank.
# - Experts' gradients are summed already: their group is their replicas, their divisor the number of all ranks.
# - Count load by ranks; cure it in each layer, over the whole batch.
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
#     # A sum over layers, of shares that sum to 1: 0.001 pulls on a layer 48 / 8 = 6 times as hard as in the library's loss.
#     balance = rows.shape[1] * (total / total.sum(1, keepdim=True) * likely).sum()
#     (out.loss + 0.001 * balance).backward()
#     norm = torch.stack([get_total_norm([p.grad for p in part]).full_tensor() for part in meshes.values()]).norm()
#     for part in meshes.values():
#         clip_grads_with_norm_(part, 1.0, norm)
#     optimizer.step()
#     optimizer.zero_grad()
#     by_rank = everyone.view(-1, ep_size, len(rows), ep_size, rows.shape[1] // ep_size).sum((1, 4))
#     load = by_rank.amax(-1) / by_rank.float().mean(-1)  # (groups, layers)
#     if dist.get_rank() == 0:
#         print(f"busiest EP rank over the mean: {load.mean():.2f}, in the worst layer {load.max():.2f}")
#
# model.save_pretrained(folder, distributed_checkpoint=True)  # from_pretrained, as above, reads it
# save_optimizer_distributed(model, optimizer, f"{folder}/optimizer")  # load_optimizer_distributed reads it
# ```
#
# **Look at** the mean load: experts take that many times as long as at load 1. If that costs too much, raise 0.001. Ten SGD steps in
# fp32 on four CPU ranks end at one process's parameters, to rounding, and what is saved reloads equal. Across nodes, Megatron's
# dispatcher is `--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep`.
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
#     layer.experts.set_force_sum_reduction_for_comms(replicas > 1)  # sum, then divide: gloo does not scale while it sums
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
# **Look at** an expert's gradient beside one process's, in fp32: equal to rounding. And load what you saved: equal on every rank.
