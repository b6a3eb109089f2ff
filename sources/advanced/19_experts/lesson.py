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
# **The answer.** It saves arithmetic: Mixtral computes like a model of 13B. It costs the model states of one of 47B. On several GPUs
# something travels. We predict for Qwen3 on 8 H100s: **With few tokens in a GPU's micro-batch (1,024), move the tokens. With many (16,384), move the weights, if they
# overlap computing and matmuls stay fast. In between (4,096), load decides.**
#
# **Promise.** You route tokens by hand, decide what should travel, and balance a router.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 120, and 80 for the lab | any laptop (Windows: WSL2); beyond Binder's 1 GB | about a minute of computing on two CPU cores |
#
# ## A bet
#
# Eight GPUs train Qwen3-30B-A3B in bf16, sum gradients in fp32 and recompute layers. A micro-batch has 4,096 tokens a GPU.
# With [FSDP](../intermediate/09_sharding.ipynb) alone, each GPU gathers all experts' weights. With *expert parallelism*, each keeps an
# eighth of the experts, and a token's vector travels to each of its eight. In a micro-batch, how many times as many
# bytes does a GPU send for its experts with FSDP alone?

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
from utils.lessons.lesson_19.at_size import qwen3_30b_a3b, token_flops
from utils.lessons.lesson_19.exchange import gathered_counts
from utils.lessons.lesson_19.figures import draw_dispatch, draw_exchange, draw_held_and_used, draw_load, draw_mesh
from utils.lessons.lesson_19.figures_at_size import draw_crossing, draw_loads, draw_peaks, peak_parts
from utils.lessons.lesson_19.layers import Biased, Mixture, dense, experts_held, keep_my_experts, small_model
from utils.lessons.lesson_19.published import LLAMA_3_TFLOPS, PARAMETERS
from utils.lessons.lesson_19.small import adam_bytes, forward_flops, kept_bytes
from utils.lessons.lesson_19.small_run import printed_by_script
from utils.lessons.lesson_19.tables import print_break_even, print_seconds, print_step
from utils.lessons.lesson_19.training import held_out, rows_sent, train, train_on_text
from utils.simulation.devices import simulated_device

# %% [markdown]
# ## 1. Arithmetic follows what is used, model states what is held
#
# A mixture of experts has $E$ feed-forward layers in place of one: the *experts*. A *router*, a small matrix, sends each token
# to $k$ of them. How far apart are what a token uses and what is held?

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
print(f"Mixtral-8x7B, model states at 16 bytes a parameter: {16 * held:.0f} GB; a dense model of what it uses: {16 * used:.0f} GB (predicted)")

# %% [markdown]
# **Read it.** A token is computed with what it uses, but [model states](../00_glossary.ipynb) exist for all that is held.
#
# ## 2. A router sends each token to its experts
#
# The router gives each token a probability for each expert. The token goes to the $k$ most probable ones, the *top-k*. Their
# outputs are added, weighted by these probabilities, scaled to sum to 1. An expert is a feed-forward layer:

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
# results back into the tokens' order, and adds up each token's $k$. Follow the ten rows of five tokens:

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


def mixture(x, router, w_in, w_out, k, bias=0.0):
    choice, weight, _ = route(x, router, k, bias)
    order = choice.flatten().argsort(stable=True)
    counts = choice.flatten().bincount(minlength=len(w_in)).tolist()
    rows = by_expert(x[order // k], counts, w_in, w_out)
    return combine(rows[order.argsort()], weight)


# %%
RANKS, H = 4, 32  # ranks of section 3; numbers in a token's vector
torch.manual_seed(0)
layer, x = Mixture(hidden=H, width=48, experts=8, k=2, compute=mixture), torch.randn(200, H)
choice, weight, _ = route(x, layer.router, 2)
w_in, w_out = layer.experts.w_in, layer.experts.w_out  # by definition every expert computes every token, most with weight 0:
defined = sum(((choice == e) * weight).sum(-1, keepdim=True) * one_expert(x, w_in[e], w_out[e]) for e in range(8))
gap = ((layer(x) - defined).norm() / defined.norm()).item()
print("dispatched:", "equal bit for bit" if gap == 0 else f"{gap:.0e} from the definition", "in fp32")
assert gap < 1e-6, "dispatch computes something else: fp32 rounds at 6e-8, and sums have few terms"

# %% [markdown]
# **What does it save?** Compare a mixture of 8 experts, 2 for a token, with two dense layers:

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
# **Read it. At equal arithmetic the mixture costs four times the model states**, and 8 MiB of copied vectors. **At equal model
# states it saves arithmetic and activations.** Such states soon need several ranks.
#
# ## 3. On several ranks, rows travel to their experts
#
# **Expert parallelism (EP)** shares a layer's experts among a group of ranks, eight in *EP 8*. Rows travel to their experts and
# back by an [all-to-all](11_links.ipynb). First an all-gather tells every rank how many will come:

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
# **Which gradients are summed?** The loss is the mean over all ranks' tokens. All but the experts is on every rank, and sees that
# rank's tokens alone. So its gradients are summed and divided by 4. An expert is on *one* rank, and has worked on all ranks' rows. **Its
# gradient is summed already, and is only divided by 4.**
#
# **How many bytes travel?** A rank with $T$ tokens puts $kT$ rows of $h$ numbers into the first exchange, and as many as *came* into
# the second. Backward repeats both. Over $R$ ranks that is $R \cdot 4 k T h$ numbers a layer.
#
# Four ranks take ten steps with a small model. Follow rank 1's red rows:

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


# %%
one = run_ranks(lambda: train(small_model(mixture)), 1)[0]
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
show(draw_exchange(first_step := results[0][3], 32, 2),
     alt="Four ranks put rows in for four ranks that hold two experts each, and get as many back. Each rank puts in 64 rows: "
     + "; ".join(f"rank {r} gets {n}" for r, n in enumerate(first_step.sum(0).tolist())) + ".")

# %% [markdown]
# **Read it.** Four ranks train as one. Each puts in 64 rows, but unequally many come to the experts. **Load** is the rows that come to
# a rank over those of the mean rank. A layer's load is its busiest rank's, for which all others wait.
#
# **Question.** DeepSeek-V3: $k = 8$, $h = 7168$. How many MB ($10^6$ bytes) does a rank put into *one* exchange for 4,096 tokens
# in bf16?

# %%
mb_an_exchange = ...
check("19.mb_an_exchange", mb_an_exchange)

# %% [markdown]
# ### With FSDP: experts have a group of their own
#
# Now two of four ranks share the experts, so each expert has two *replicas*. FSDP shards experts over **their replicas**, and the
# rest over all ranks. It divides a gradient by the size of its group, 2 for experts. The loss is a mean over 4 ranks, so
# `set_gradient_divide_factor` must say 4. Each colour is a group:

# %% jupyter={"source_hidden": true}
show(draw_mesh(),
     alt="Rows travel by all-to-all between ranks 0 and 1, and 2 and 3; the experts' weights and gradients by FSDP between ranks 0 and 2, "
     "and 1 and 3; all else by FSDP over all four. Each rank has its own batch.")

# %%
def with_fsdp(divide=True):
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
    return train(model), experts_held(model)


losses, held = run_ranks(with_fsdp, RANKS)[0]
gap = max(abs(a / b - 1) for a, b in zip(losses, one, strict=True))
print(f"2 expert ranks x 2 replicas: losses {gap:.0e} from one process; a rank keeps {held:,} numbers of the experts")
assert gap < 1e-12 and held == everything / RANKS, "each number of the experts once, on one of four ranks"

# %% [markdown]
# ### Qwen3 fits one node, if layers are recomputed
#
# We *simulate* one of eight H100s: every allocation is counted. At load 8 all rows come to this rank. Which bar passes the dashed line?

# %% jupyter={"source_hidden": true}
runs = {"EP 8, all kept": qwen3_30b_a3b(), "EP 8, layers\nrecomputed": qwen3_30b_a3b(layers_again=True),
        "the same,\nload 8": qwen3_30b_a3b(layers_again=True, load=8.0), "FSDP alone, layers\nrecomputed": qwen3_30b_a3b(1, layers_again=True)}
copies, inside = 48 * 8 * 4096 * 2 * 2048 * 2, 48 * 8 * 4096 * 4 * 768 * 2  # in and out; gate, up and two tensors made of these
bars = {name: peak_parts(run.breakdown, copies, inside) for name, run in runs.items()}
limit = simulated_device("H100").usable_bytes / 2**30
show(draw_peaks(bars, limit), alt="; ".join(f"{name}: {sum(parts):.1f} GiB" for name, parts in bars.items()).replace("\n", " "))
four = partial(qwen3_30b_a3b, layers_again=True, sequences=4)
many = {"EP 8": four(), "EP 8, loss in chunks": four(chunk=1024), "the same, load 8": four(chunk=1024, load=8.0), "FSDP alone, loss in chunks": four(1, chunk=1024)}
print(f"layers recomputed, four sequences (16,384 tokens) a rank; an H100 has {limit:.1f} GiB usable (simulated):")
print("; ".join(f"{name} {run.peak_bytes / 2**30:.1f} GiB" for name, run in many.items()))

# %% [markdown]
# **Read it.** One node cannot keep all activations of 4,096 tokens. **With layers recomputed they fit at any load**, as only one
# layer's rows are alive. With 16,384 and a [loss in chunks](../intermediate/05_checkpointing.ipynb) both layouts fit at load 1, and EP 8
# at load 8 does not.
#
# ### Rows or weights
#
# In a micro-batch FSDP alone gathers the experts twice and sums their gradients. EP moves rows, in six exchanges a layer:
# recomputing repeats two. Ours sends a row for each expert. A *dispatcher* such as [DeepEP](https://github.com/deepseek-ai/DeepEP) sends a vector **once** to
# each rank:

# %%
def reached(others, held):  # of so many other ranks, those that hold one of a token's 8 experts, if all 128 are equally likely
    return others * (1 - comb(128 - held, 8) / comb(128, 8))


NVLINK, NDR = (link(name).sustained_bytes_per_second for name in ("NVLink 4", "InfiniBand NDR"))
EXPERTS = 48 * 128 * 3 * 2048 * 768  # numbers in Qwen3-30B-A3B's experts: layers, experts, three matrices
VECTOR = 6 * 48 * 2048 * 2  # bytes of a token's vector in bf16, in six exchanges of every layer
weights, row, once = EXPERTS * (2 + 2 + 4) * 7 / 8, VECTOR * 7 / 8, VECTOR * reached(7, 16)  # an eighth stays here
print(f"FSDP alone sends {weights / 1e9:.0f} GB for experts in a micro-batch of any number of tokens: bf16 weights twice, fp32 gradients once (predicted)")
for tokens in (COUNTS := (1024, 4096, 16_384)):
    print(f"{tokens:>6,} tokens a rank: EP 8 {8 * row * tokens / 1e9:5.1f} GB, FSDP alone {weights / (8 * row * tokens):4.1f} times as many;",
          f"once a rank {once * tokens / 1e9:4.1f} GB, FSDP alone {weights / (once * tokens):4.1f} times")
print(f"your bet, for 4,096 tokens: {my_bet_times} times")

# %% [markdown]
# **Read it.** EP's bytes grow with tokens, FSDP's do not. But time decides. Our model adds up computing and what is **exposed**,
# moved while nothing is computed. All rows are exposed. Weights overlap computing, as far as it lasts, or computing waits for them.
# Computing runs at 380 TFLOP/s, the least of three that Llama 3 405B reached over whole steps
# ([380, 400 and 430](https://arxiv.org/abs/2407.21783), table 4). How near is a published step?

# %%
def parts(tokens, layout, speed=LLAMA_3_TFLOPS, nvlink=NVLINK, ndr=NDR):  # seconds; that speed holds waiting of its own
    inside, across, weights, weights_across = LAYOUTS[layout]  # bytes: of a token's rows, and of weights
    rest, experts = (tokens * flops / (speed * 1e12) for flops in token_flops(min(tokens, 4096), forwards=2))
    return rest, experts, tokens * max(inside / nvlink, across / ndr), max(weights / nvlink, weights_across / ndr)


def seconds(tokens, layout, load=1, overlap=True, slower=1, **constants):
    rest, experts, rows, weights = parts(tokens, layout, **constants)
    busy = rest + load * (slower * experts + rows)
    return busy + (max(0, weights - busy) if overlap else weights)


LAYOUTS = {"EP 8": (8 * row, 0, 0, 0), "EP 8, half the rows": (4 * row, 0, 0, 0), "FSDP alone": (0, 0, weights, 0),
           "once a rank": (once, 0, 0, 0), "one rank": (row, 0, 0, 0)}  # a false router sends a token's 8 rows to one rank
print("a token's products in GFLOP, forward twice: {:.1f}, and {:.1f} of its experts".format(*(n / 1e9 for n in token_flops(4096, 2))))
print_seconds(parts, seconds, COUNTS, ASSUMED := f"{LLAMA_3_TFLOPS} TFLOP/s, NVLink at {NVLINK / 1e9:.0f} GB/s")
print_step({speed: 16_384 / seconds(16_384, "one rank", speed=speed) for speed in (190, 380, 400, 430, 760)}, LLAMA_3_TFLOPS, evenly=16_384 / seconds(16_384, "once a rank"))

# %% [markdown]
# **Read it.** If weights overlap computing, most of their 0.55 s is exposed at 1,024 tokens, and nothing at 16,384.
#
# The published step is **one number, nearest to one of three constants**. It sent few rows and no experts' weights, so it tests neither. FSDP
# alone has an eighth of EP 8's rows for an expert, which may slow its matmuls.
#
# Only EP pays for load. **Up to which load is EP 8 faster?** Brackets hold the least and most with speed or link halved or
# doubled. In the picture they are the band:

# %%
def break_even(tokens, mine="EP 8", other="FSDP alone", overlap=True, slower=1, theirs=1, **constants):  # the load of `mine` that takes as long
    idle, full = (seconds(tokens, mine, load, **constants) for load in (0, 1))
    return (seconds(tokens, other, theirs, overlap=overlap, slower=slower, **constants) - idle) / (full - idle)


CONSTANTS = [{name: value * by} for name, value in (("speed", LLAMA_3_TFLOPS), ("nvlink", NVLINK), ("ndr", NDR)) for by in (0.5, 2)]
CASES = {"as assumed": {}, "half the rows (hidden, or sent once)": {"mine": "EP 8, half the rows"}, "FSDP's experts at half speed": {"slower": 2}}
BRANCHES = {"weights overlap computing": True, "computing waits for weights": False}
for said, overlap in BRANCHES.items():
    print_break_even(f"the load up to which EP 8 is faster than FSDP alone, if {said}", partial(break_even, overlap=overlap), COUNTS, CASES, CONSTANTS, worst=8)
show(draw_loads(break_even, CONSTANTS, ASSUMED),
     alt="Load at which both take equally long, by tokens: lines fall; at 16k below 1 if weights overlap, 1.3 at half speed, 1.2 if computing waits.")

# %% [markdown]
# **Read it. With few tokens (1,024), move the tokens**: EP 8 is ahead in every row, up to load 4.8. **With many (16,384), move the
# weights, if they overlap computing and matmuls stay fast**: FSDP alone is ahead at any load, at half and twice the speed or link. If
# its matmuls run at half speed, or computing waits, load decides. **In between (4,096), load decides**: EP 8 is ahead up to 1.5, or up
# to 2.8 if computing waits.
#
# **Which case is yours?** On Monday, find the exposed seconds of FSDP alone in a trace. Compare the gap found with the gap predicted, the
# two lines *exposed*, at your TFLOP/s. Near the first weights overlap, near the second computing waits.
#
# What makes load large, and what lowers it?
#
# ## 4. Balance: a layer ends when its busiest rank is done
#
# Nothing makes a router treat experts alike. An **auxiliary loss** $E \sum_e f_e P_e$ makes busy experts less probable: $f_e$ is the
# share of rows that expert $e$ got, and $P_e$ its mean probability. Or a **[bias](https://arxiv.org/abs/2408.15664)** is added to the probabilities, for the *choice* alone.
# It rises for experts with too few rows. A small model trains on text, as if four ranks held two experts each:

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
    more = loss - (kept := loss if way == WAYS[0] else kept)
    print(f"{way:<15} load of four ranks, last 20 steps: {late.mean():.2f} ({late.min():.2f} to {late.max():.2f}); nats a byte of unseen",
          f"text: {loss.mean():.2f}; over the same seed left alone {more.mean():+.3f} ({more.min():+.3f} to {more.max():+.3f})")

# %% [markdown]
# **Read it.** Left alone, the busiest of four ranks ends at twice the mean. **Both cures bring load down**, and no seed's
# loss moves by 0.05 nats.
#
# **Over whose tokens, and which layers?** A rank's own tokens may all be code, and rightly need the same experts. So
# [Qwen3](https://arxiv.org/abs/2505.09388) balances the [whole batch](https://arxiv.org/abs/2501.11873). Some libraries pool all layers.
# In the second cell, each of four layers sends *every* token to two experts of its own:

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
# **The pooled loss sees even shares and moves nothing. So balance each layer, over the whole batch.** Some implementations **drop**
# rows beyond an expert's **capacity**. Ours is *dropless*.
#
# ## 5. Across nodes: stay inside, or send each vector once
#
# Now two nodes of 8 H100. With EP 8 the weights and gradients of experts' replicas cross. With EP 16 rows cross: by a plain all-to-all
# one for each expert, by a dispatcher one for each *node*. Weights that overlap computing here overlap rows, too: these move inside
# the node.

# %% jupyter={"source_hidden": true}
half = EXPERTS / 16 * (2 + 2 + 4)  # a rank has half of its experts, and its replica the other half
ACROSS = {"EP 8, once a rank": (once, 0, 0, half), "EP 16, plain all-to-all": (8 * 7 / 16 * VECTOR, 8 / 2 * VECTOR, 0, 0),
          "EP 16, once a node": (2 * reached(7, 8) * VECTOR, reached(1, 64) * VECTOR, 0, 0)}
LAYOUTS |= ACROSS
show(draw_crossing({name: tuple(size / 1e9 for size in (a * 4096, b * 4096, d)) for name, (a, b, _, d) in ACROSS.items()}, NVLINK / 1e9, NDR / 1e9),
     alt="; ".join(f"{name}: {b * 4096 / 1e9:.1f} GB of rows and {d / 1e9:.1f} of weights cross" for name, (_, b, _, d) in ACROSS.items()))
for said, overlap in BRANCHES.items():
    print_break_even(f"the load up to which EP 16 is faster than EP 8, if {said}", partial(break_even, other="EP 8, once a rank", overlap=overlap), COUNTS,
                     {f"{mine}; EP 8 at load {n}": {"mine": mine, "theirs": n} for mine in list(ACROSS)[:0:-1] for n in (1, 2)}, CONSTANTS, worst=16)

# %% [markdown]
# **Read it.** At equal loads, 1 or 2: **with few tokens (1,024), move the tokens**, once to each node. **With many (16,384), move the
# weights, if they overlap computing. In between (4,096), this overlap decides**: EP 16 is ahead if computing waits. A plain
# all-to-all is ahead at 1,024 alone, and at load 2 only if computing waits.
#
# ## Break it, diagnose it
#
# Experts' gradients are averaged over the wrong group, all ranks. Or they are divided by the wrong number, as FSDP was not told 4.

# %%
def averaged(fault):
    if fault == "wrong divisor":
        return with_fsdp(divide=False)[0]
    model = small_model(mixture)
    keep_my_experts(model, dist.get_rank(), RANKS, mixture_on_ranks)
    return train(model, partial(by_the_rule, summed="none") if fault == "wrong group" else by_the_rule)


found = run_ranks(lambda: {fault: averaged(fault) for fault in ("none", "wrong group", "wrong divisor")}, RANKS)[0]
for fault, losses in found.items():
    gaps = [abs(a / b - 1) for a, b in zip(losses, one, strict=True)]
    ours, theirs = losses.first_gradient, one.first_gradient
    print(f"fault: {fault:<14} first loss {gaps[0]:.0e}, tenth {gaps[-1]:.0e} from one process; experts' first gradient",
          f"{(ours.norm() / theirs.norm()).item():.2f} times as large, cosine {F.cosine_similarity(ours, theirs, 0).item():.2f}")
    assert (max(gaps) < 1e-12) == (fault == "none"), "a wrong group or divisor is found by the tenth loss in fp64"

# %% [markdown]
# **Diagnose it.** First losses are right: no gradient is in them. A wrong group turns the direction of experts' first gradient. A wrong
# divisor doubles its size, which AdamW without clipping nearly hides.
#
# ## Recap
#
# A mixture saves arithmetic: Mixtral computes like a model of 13B. It costs the model states of one of 47B. On several GPUs something
# travels.
#
# - We predict for Qwen3 on 8 H100s: **With few tokens in a GPU's micro-batch (1,024), move the tokens. With many (16,384), move the weights, if they
#   overlap computing and matmuls stay fast. In between (4,096), load decides.**
# - Experts' gradients are summed already. FSDP shards experts over their replicas, and must be told to divide by the number of all ranks.
# - Balance each layer, over the whole batch.
#
# Do the [lab](../../labs/advanced/19_experts.ipynb) in a copy (`make my-labs`), then see the
# [solution](../../solutions/advanced/19_experts.ipynb).
#
# **References.** [GShard](https://arxiv.org/abs/2006.16668), [NeMo AutoModel](https://github.com/NVIDIA-NeMo/Automodel).
#
# The last cell's script prints, on four CPU ranks with a small model:

# %%
print(printed_by_script(ranks=4, ep_size=2, steps=3))

# %% [markdown]
# ## On Monday
#
# Train Qwen3-30B-A3B on one node of 8 H100 with transformers (5.23 here), layers recomputed, under `torchrun --nproc-per-node 8`:
#
# ```python
# # Before: name = "Qwen/Qwen3-30B-A3B"; batches of this rank on its GPU, token numbers (1, 4096); a folder that all nodes see;
# # ep_size = 8, the ranks of a node, or 1 for FSDP alone; world_size = int(os.environ["WORLD_SIZE"]), a multiple of ep_size, and at most
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
#     assert any((r < 0).any() for r in out.router_logits), "these are probabilities: take the softmax below out"
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
#         print(f"loss {out.loss:.3f}, busiest EP rank over the mean: {load.mean():.2f}, in the worst layer {load.max():.2f}")
#
# model.save_pretrained(folder, distributed_checkpoint=True)  # from_pretrained, as above, reads it
# save_optimizer_distributed(model, optimizer, f"{folder}/optimizer")  # load_optimizer_distributed reads it
# ```
#
# If the mean load is too high, raise 0.001. Across nodes, Megatron's dispatcher is
# `--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep`.
#
# Rows or weights? Set `ep_size = 1`, and find the exposed seconds of FSDP alone:
#
# ```python
# # Before: trace = "trace.json", of the third step on this rank: torch.profiler.profile(activities=[ProfilerActivity.CUDA])
# # around it, torch.cuda.synchronize() at its end, then export_chrome_trace(trace).
# import json
# from pathlib import Path
#
# edges, running, gap, before = [], {True: 0, False: 0}, 0.0, 0.0
# for event in json.loads(Path(trace).read_text())["traceEvents"]:
#     if event.get("cat") == "kernel":
#         moves = event["name"].startswith("nccl")
#         edges += [(event["ts"], 1, moves), (event["ts"] + event["dur"], -1, moves)]
# for time, change, moves in sorted(edges):
#     gap += (time - before) * (running[True] > 0 and running[False] == 0)  # microseconds
#     running[moves] += change
#     before = time
# print(f"something travels and nothing is computed: {gap / 1e6:.2f} s")
# ```
#
# **Look at** the least of all ranks: faster ranks wait inside NCCL. If computing waits for weights, call
# `layer.set_modules_to_forward_prefetch([following])` on each of `model.model.layers`.
