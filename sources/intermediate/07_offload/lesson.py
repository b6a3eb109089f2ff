# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 Offload: memory that lies behind a link
#
# {{badges}}
#
# **Promise.** A full fine-tune of Llama-2-7B has 107.8 GB of states, and your card has 24. You move them to host
# memory, one kind after the other: by hand, then with DeepSpeed, FSDP2 (PyTorch's own sharding) and `Trainer`, with
# losses that stay the same. 2 bytes per parameter stay. Then you compute when the link costs nothing.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 75, and 75 for the lab | any laptop (Linux, macOS, WSL2); beyond Binder's 1 GB | about a minute on two CPU cores |

# %% [markdown]
# ## A bet
#
# DeepSpeed's ZeRO-2 on **one** GPU, in bf16, with the optimizer offloaded. Of the 16 bytes of states per parameter,
# how many stay on the device between backward and the step? Write your guess. Section 4 counts.

# %%
my_bet_bytes = 4

# %% tags=["setup"]
here = setup("intermediate/07")

# %%
import contextlib
import copy
import io
import pathlib
import warnings

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import functional_call

# %%
from utils import GB, Evidence, Span, Transformer, TransformerConfig, check, draw_breakdown, draw_lanes, draw_validation
from utils import llama_config, measure, model_shape, predicted, recorded_table, run_ranks, score, scoreboard, scratch, show
from utils import simulate, text_batches, text_tokens
from utils.catalog import device as gpu
from utils.memory import host_memory
from utils.models.finetune import TARGETS, finetune_step
from utils.models.pretrained import enable_checkpointing
from utils.planner import Batch, Cluster, Lora, Plan, estimate
from utils.planner.offload import SCHEMES
from utils.techniques import OffloadedOptimizer, measure_disk, op_problem
from utils.techniques.deepspeed import deepspeed_problem, load_deepspeed
from utils.techniques.fsdp import shard
from utils.techniques.zero import resident, zero_config, zero_engine
from utils.lessons.lesson_07.cpu_ranks import fsdp_on_cpu
from utils.lessons.lesson_07.link import Link
from utils.lessons.lesson_07.peak import allocated_peak
from utils.lessons.lesson_07.streaming import stream_blocks
from evidence.validation import compare_all, summarize

# %%
# peft asks transformers for something by a name that transformers has replaced.
warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
import peft
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging
transformers_logging.disable_progress_bar()
zero_problem, adam_problem, file_problem = deepspeed_problem(), op_problem("cpu-adam"), op_problem("async-io")
print(zero_problem or f"DeepSpeed {load_deepspeed().__version__} is here.")
for problem in filter(None, (adam_problem, file_problem)):
    print(problem)

# %% [markdown]
# ## What you will be able to do
#
# - Say what each kind of offload leaves on the card, and what it sends over the link in a step.
# - Write an offloaded optimizer, offloaded activations and streamed weights, each equal to the plain run.
# - Compute the batch from which compute hides the link.
# - Configure DeepSpeed and `Trainer`, and decide between QLoRA and a full fine-tune with offload.
#
# Words that are new to you stand in the [glossary](../00_glossary.ipynb).
#
# ## 1. What can leave
#
# A step needs the *weights* in forward and backward, all the time. It needs a *gradient* from the moment
# backward makes it until the optimizer uses it. It needs the *optimizer's states* (fp32 master copy, two
# moments) once a step. What is needed least often leaves first
# ([Ren and others 2021](https://arxiv.org/abs/2101.06840), ZeRO-Offload).

# %%
shape = model_shape("llama-2-7b")
P = shape.parameter_count
kept = {
    "nothing leaves": {"parameters": 2 * P, "gradients": 2 * P, "optimizer state": 12 * P},
    "the optimizer leaves": {"parameters": 2 * P, "gradients": 2 * P},
    "gradients leave, too": {"parameters": 2 * P}}
bars = [predicted(name, parts) for name, parts in kept.items()]
show(draw_breakdown(bars, limit="24GB", unit="GB", title="States of Llama-2-7B on the card, bf16 training"),
     alt="; ".join(f"{name}: {sum(parts.values()) / GB:.1f} GB" for name, parts in kept.items()))

# %% [markdown]
# **Read it.** For 24 GB it is not enough that the optimizer leaves. If each gradient leaves as it is made, bf16 weights
# stay, and there is room for activations. Weights can leave as well, layer by layer.
#
# ## 2. By hand
#
# `Link` copies a tensor `down` to the host or `up` to the device, and counts the bytes. On a CPU both are
# the same memory: the meter then counts by *placement*. What is made inside of `host_memory()` is the host's.
#
# **The optimizer.** Master copies and moments live in host memory; gradients go down, weights come up.

# %%
class HostAdamW:
    def __init__(self, parameters, link, **settings):
        self.here, self.link = list(parameters), link
        with host_memory():
            self.there = [p.detach().to("cpu", torch.float32, copy=True).requires_grad_() for p in self.here]
        self.inner = torch.optim.AdamW(self.there, **settings)

    @torch.no_grad()
    def step(self):
        with host_memory():
            for here, there in zip(self.here, self.there, strict=True):
                there.grad = self.link.down(here.grad).float()
                here.grad = None
            self.inner.step()  # computed by the CPU
            for here, there in zip(self.here, self.there, strict=True):
                here.copy_(self.link.up(there.to(here.dtype)))


# %% [markdown]
# **Activations.** Autograd hands each tensor that it saves to a *pack* hook, and asks for it in backward by *unpack*.
# Weights are among them: they stay. PyTorch's own form is `torch.autograd.graph.save_on_cpu(pin_memory=True)`.

# %%
def activations_on_host(model, link):
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        stays = tensor.untyped_storage().data_ptr() in weights
        return (stays, tensor if stays else link.down(tensor))

    def unpack(packed):
        stays, tensor = packed
        return tensor if stays else link.up(tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# %% [markdown]
# **Weights, layer by layer.** They live on the host. `fetch` waits for one block's and asks for the next one's.
# Forward keeps only the block's input, so backward fetches the block again and computes it again.

# %%
class Stream:
    def __init__(self, blocks, link):
        with host_memory():
            self.blocks = [copy.deepcopy(block) for block in blocks]
        self.shape = copy.deepcopy(blocks[0]).to("meta")  # stands for any block, without memory
        self.link, self.coming = link, {}

    def ask(self, number):
        if number in range(len(self.blocks)):
            named = self.blocks[number].named_parameters()
            self.coming[number] = {name: self.link.send_up(weight) for name, weight in named}

    def fetch(self, number, following):
        if number not in self.coming:
            self.ask(number)
        here = {name: one.result() for name, one in self.coming.pop(number).items()}  # waits
        self.ask(following)  # on its way while this block computes
        return here


# %%
class Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rotation, number, stream):
        ctx.save_for_backward(x)
        ctx.others = rotation, number, stream
        return functional_call(stream.shape, stream.fetch(number, number + 1), (x, rotation))

    @staticmethod
    def backward(ctx, gradient):
        rotation, number, stream = ctx.others
        x = ctx.saved_tensors[0].detach().requires_grad_()
        weights = {name: w.requires_grad_() for name, w in stream.fetch(number, number - 1).items()}
        with torch.enable_grad():
            y = functional_call(stream.shape, weights, (x, rotation))
        first, *rest = torch.autograd.grad(y, [x, *weights.values()], gradient)
        for parameter, one in zip(stream.blocks[number].parameters(), rest, strict=True):
            parameter.grad = stream.link.down(one)
        return first, None, None, None


# %%
class StreamedBlock(torch.nn.Module):
    def __init__(self, stream, number):
        super().__init__()
        self.block, self.number, self.stream = stream.blocks[number], number, stream

    def forward(self, x, rotation):
        return Streamed.apply(x, rotation, self.number, self.stream)


# %% [markdown]
# Each form trains the same model for 20 steps, in fp32 and in bf16. (In bf16 `HostAdamW` keeps fp32 copies, which the
# plain run has not: there it is set beside the course's `OffloadedOptimizer`.)

# %%
SMALL = TransformerConfig(vocabulary=256, hidden=128, layers=4, heads=4, feedforward=352)
batches = list(text_batches(text_tokens(20 * 4 * 32 + 1), batch=4, sequence=32))


# %%
def prepared(form, dtype):
    torch.manual_seed(0)
    model, link, host, around = Transformer(SMALL).to(dtype), Link(), {}, contextlib.nullcontext()
    if form == "weights":
        stream = Stream(model.blocks, link)
        model.blocks = torch.nn.ModuleList(StreamedBlock(stream, i) for i in range(len(stream.blocks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if form == "weights":
        there = [weight for block in stream.blocks for weight in block.parameters()]
        host = {"parameters": there, "optimizer state": [optimizer.state[weight] for weight in there]}
    if form == "the course's":
        optimizer = OffloadedOptimizer(optimizer, master_dtype=torch.float32)
    if form == "optimizer":
        optimizer = HostAdamW(model.parameters(), link, lr=1e-3)
        host = {"optimizer state": optimizer.inner}

    def step(tokens, targets):
        model.zero_grad()
        with activations_on_host(model, link) if form == "activations" else around:
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, getattr(optimizer, "inner", optimizer), step, link, host


# %%
FORMS = ("plain", "optimizer", "activations", "weights", "the course's")
losses, link_bytes, runs = {}, {}, {}
for dtype in (torch.float32, torch.bfloat16):
    for form in FORMS:
        model, inner, step, link, host = prepared(form, dtype)
        losses[form, dtype] = [step(*batch) for batch in batches]
        if dtype is torch.float32 and form != "the course's":
            link_bytes[form] = {way: link.bytes(way) / len(batches) for way in ("down", "up")}
            runs[form] = measure(lambda: step(*batches[0]), model=model, optimizer=inner, timed_steps=0, host=host, name=form)
        link.close()

# %%
for dtype, within in ((torch.float32, 1e-6), (torch.bfloat16, 5e-4)):
    for form in FORMS[1:4]:
        beside = "the course's" if (form, dtype) == ("optimizer", torch.bfloat16) else "plain"
        apart = max(abs(a / b - 1) for a, b in zip(losses[form, dtype], losses[beside, dtype], strict=True))
        print(f"{dtype!s:<16}{form:<12}{apart:.0e} from {beside}, {len(batches)} steps")
        assert apart <= within, f"{form} changes numbers: is a copy stale?"

# %%
show(draw_breakdown(list(runs.values()), unit="MB", title="On the device, fp32, one step (host apart by placement)"),
     alt="; ".join(f"{form}: {run.peak_bytes / 1e6:.1f} MB" for form, run in runs.items()))
table = {form: {"device peak, MB": run.peak_bytes / 1e6, "host peak, MB": (run.host_bytes or 0) / 1e6,
                "down a step, MB": link_bytes[form]["down"] / 1e6, "up a step, MB": link_bytes[form]["up"] / 1e6}
         for form, run in runs.items()}
pd.DataFrame(table).T.style.format("{:.2f}").set_caption("measured; device and host are one memory here, told apart by placement")

# %% [markdown]
# **Read it.** The losses are equal: offload moves numbers, it does not change them. Each form takes away what its name
# says, and each has its own traffic: the optimizer sends all gradients down and all weights up, activations go both
# ways, and streamed weights come up twice. Two blocks of them at most are on the device (among the *temporaries*).
# Their gradients and optimizer state are on the host as well, and only the inputs of blocks are kept.
#
# ## 3. When does the link cost nothing?
#
# With $b$ bytes a parameter to send one way, $P$ parameters, and $8P$ operations a token (checkpointed), a micro-batch
# computes at least as long as it sends from $T = b F / (8 B)$ tokens on. $F$ is the card's speed, $B$ the link's; $P$
# cancels.

# %%
rows = []
for scheme in SCHEMES.values():
    down, up = scheme.link_bytes(P)
    row = {"what leaves": scheme.name, "card, GB": scheme.device_bytes * P / GB, "host, GB": scheme.host_bytes * P / GB,
           "down, GB": down / GB, "up, GB": up / GB}
    for name in ("RTX 4090", "A100 80GB", "H100"):
        card = gpu(name)
        row[f"hidden from, tokens ({name})"] = scheme.tokens_that_hide_the_link(
            card.peak_flops_per_second("bf16") / 2, card.pcie.link_bytes_per_second)
    rows.append(row)
pd.DataFrame(rows).set_index("what leaves").style.format(precision=0, thousands=",").set_caption(
    "Llama-2-7B, one step, predicted: half of the peak FLOP/s, the link's full rate, both directions at once")

# %% [markdown]
# **Read it.** The tokens are those of one micro-batch, and a lower bound: transfers are spread over its forward and
# backward as if they could run at any time. One text of 2,048 tokens is enough for gradients on each of these cards;
# streamed weights need one or two. A faster card needs *more* tokens, unless its link is faster by the same factor.
# Sending the states to and fro, so that the GPU can do the step, costs seven times as much: that is why ZeRO-Offload
# steps on the CPU. A block's input is small beside its compute, and both grow with the tokens: checkpointed activations
# are free at any batch.
#
# Two things no batch hides. What moves around the optimizer's step (row two: all) finds no compute beside it. And the step
# itself takes the CPU's time: 2.57 s for 10 billion parameters (published, Ren and others, Table 4). Larger batches
# only make both rarer. A real link gives less than its full rate; `make record` measures it on a GPU:

# %%
recorded_table("device_speed", where={"quantity": "host to device"})

# %% [markdown]
# Now the plan as a timeline, forward alone: a block's weights come up once the block before begins to compute. Forward
# has a quarter of the compute and half of the transfers up, so it needs twice the tokens of the table.

# %%
def planned(compute, transfer, blocks, ahead):
    link, device, done, begun = [], [], 0.0, 0.0
    for _ in range(blocks):
        asked = begun if ahead else done
        arrives = max(asked, link[-1].end_seconds if link else 0.0) + transfer
        link.append(Span("transfer", arrives - transfer, arrives))
        begun = max(arrives, done)
        done = begun + compute
        device.append(Span("compute", begun, done))
    return link, device


# %%
card, layers = gpu("RTX 4090"), 8
transfer = 2 * P / shape.layers / card.pcie.link_bytes_per_second
lanes = {}
for name, tokens, ahead in (("512 tokens", 512, True), ("3,072 tokens", 3072, True), ("3,072, not ahead", 3072, False)):
    compute = 2 * P / shape.layers * tokens / (card.peak_flops_per_second("bf16") / 2)
    link_lane, device_lane = planned(compute, transfer, layers, ahead)
    lanes |= {f"{name}: link": link_lane, f"{name}: GPU": device_lane}
show(draw_lanes(lanes, title="Forward through 8 blocks of 7B, weights streamed", evidence=Evidence.PREDICTED, device="RTX 4090"),
     alt="512 tokens: the GPU waits for the link; 3,072 tokens: the link waits for the GPU; without prefetch both wait")

# %% [markdown]
# **Read it.** At 512 tokens the GPU mostly waits for the link. At 3,072 the link waits for the GPU. Without prefetch each waits for the other.
#
# And for real: a link made slow on purpose. It lets a copy through when enough time for its bytes has passed, and the
# program computes on. `stream_blocks` is the course's version of your `Stream`; its gradients leave while backward
# goes on. At the link's rate a block comes up in the time that one computes, on average over forward and backward.

# %%
WIDE = TransformerConfig(vocabulary=256, hidden=256, layers=5, heads=4, feedforward=704)
tokens, targets = next(iter(text_batches(text_tokens(16 * 128 + 1), batch=16, sequence=128)))


def slow_run(rate, ahead):
    torch.manual_seed(0)
    model, link = Transformer(WIDE), Link(rate)
    model.blocks, stream = stream_blocks(model.blocks, link, ahead=ahead)
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    stream.finish()
    link.close()
    work = [Span(one.kind, one.start_seconds, one.end_seconds) for one in stream.log]
    moved = {way: [Span(f"transfer {way}", s, e) for w, _, s, e in link.log if w == way] for way in ("up", "down")}
    zero = min(span.start_seconds for span in [*work, *moved["up"]])
    shifted = lambda spans: [Span(k, s - zero, e - zero) for k, s, e in spans]  # noqa: E731
    return {"up": shifted(moved["up"]), "compute": shifted(work), "down": shifted(moved["down"])}


# %%
block_bytes = 4 * sum(p.numel() for p in Transformer(WIDE).blocks[0].parameters())
work = slow_run(None, True)["compute"]
rate = block_bytes / (sum(e - s for _, s, e in work) / len(work))
arms = {"one by one": slow_run(rate, ahead=False), "one ahead": slow_run(rate, ahead=True)}
lanes = {f"{name}: {lane}": spans for name, arm in arms.items() for lane, spans in arm.items()}
show(draw_lanes(lanes, title=f"A real step behind a link of {rate / 1e6:.0f} MB/s", device="this CPU, a slowed link"),
     alt="one by one, compute waits for each transfer; one ahead, transfers run behind compute")
for name, arm in arms.items():
    behind = [up for up in arm["up"] if any(begin < up.end_seconds and up.start_seconds < end for _, begin, end in arm["compute"])]
    print(f"{name}: {len(behind)} of {len(arm['up'])} tensors came up while a block computed (measured)")
    assert bool(behind) == (name == "one ahead"), "only what is asked for ahead can travel behind compute"

# %% [markdown]
# **Read it.** One by one, nothing comes up while a block computes. One ahead, tensors do. How many, and how much of
# their time is hidden, depends on this machine's speed at this moment; the formula above says it for a card.
#
# **A disk** is one more link behind the host's. ZeRO-Infinity keeps states there. Its paper counts 16 bytes a parameter
# (copy, moments and gradient in fp32) that are read, and as many that are written, in each step.

# %%
with scratch("lesson-07") as folder:
    try:
        disk = measure_disk(folder)
    except OSError as problem:  # a file system that refuses direct I/O
        print(problem)
        disk = measure_disk(folder, direct=False)
seconds = 16 * P / disk.read_bytes_per_second + 16 * P / disk.write_bytes_per_second
print(f"this disk writes {disk.write_bytes_per_second / GB:.2f} and reads {disk.read_bytes_per_second / GB:.2f} GB/s (measured): "
      f"{seconds:.0f} s a step for the states of 7B (predicted)")

# %% [markdown]
# **Read it.** This is once a step, whatever the batch: a disk wants large ones.
#
# ## 4. DeepSpeed and FSDP2
#
# ZeRO-2 *partitions* gradients and optimizer state over ranks. Here is one rank. The calls at work:
#
# ```python
# engine, *_ = deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-3), config={
#     "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True},
#     "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}})
# # ZeRO-3: also "offload_param": {"device": "cpu"}. ZeRO-Infinity: "device": "nvme", "nvme_path": "/local_nvme"
# fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=True))  # FSDP2, for each block and the model
# ```
#
# `DeepSpeedCPUAdam` is compiled, once, by `make offload`; `nvme` needs the library for asynchronous I/O.

# %%
ARMS = {"ZeRO-2": (2, None, False), "ZeRO-2, offloaded": (2, "cpu", False), "ZeRO-3, offloaded": (3, "cpu", False)}
if not adam_problem:
    ARMS["ZeRO-2, offloaded, DeepSpeedCPUAdam"] = (2, "cpu", True)
if not file_problem:
    ARMS["ZeRO-Infinity, a file"] = (3, "nvme", False)


def placed(stage, place, folder):
    if place is None:
        return {}
    there = {"device": place} | ({"nvme_path": folder} if place == "nvme" else {})
    weights = there | ({"buffer_size": 1_000_000} if place == "nvme" else {})  # elements; by default 1e8
    return {"offload_optimizer": there} | ({"offload_param": weights} if stage == 3 else {})


def adamw(own, from_deepspeed):
    if not from_deepspeed:
        return torch.optim.AdamW(own, lr=1e-3)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(own, lr=1e-3, weight_decay=0.01)  # torch's default


# %%
def trained(make_model, loss_of, stage, place, own_adam, folder, precision="bf16"):
    torch.manual_seed(0)
    model = make_model()
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count, losses = sum(parameter.numel() for parameter in own), []
    settings = zero_config(stage, count, world_size=1, micro_batch=4, precision=precision, **placed(stage, place, folder))
    engine = zero_engine(model, adamw(own, own_adam), settings | {"zero_force_ds_cpu_optimizer": False})
    for batch in batches:
        loss = loss_of(engine, *batch)
        engine.backward(loss)
        losses.append(loss.item())
        rows = [(row.path.removeprefix("optimizer."), row.dtype, row.bytes / count) for row in resident(engine)]
        engine.step()
    on_disk = sum(file.stat().st_size for file in pathlib.Path(folder).rglob("*") if file.is_file())
    return losses, rows, on_disk / count


# %%
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                     num_attention_heads=4, use_cache=False)


def small_lora():
    warnings.simplefilter("ignore", FutureWarning)  # as above, in every rank
    torch.manual_seed(0)
    return peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(
        r=8, target_modules=list(TARGETS), task_type="CAUSAL_LM"))


def lora_loss(engine, tokens, _):
    return engine(input_ids=tokens, labels=tokens, use_cache=False).loss


def whole_loss(engine, tokens, targets):
    return F.cross_entropy(engine(tokens).flatten(0, 1).float(), targets.flatten())


# %%
def on_one_rank(arms, folder):
    found = {}
    if arms:
        load_deepspeed()  # for the CPU, as here
        found = {name: trained(lambda: Transformer(SMALL), whole_loss, *arm, folder) for name, arm in arms.items()}
        for place in (None, "cpu"):
            found["LoRA", place] = trained(small_lora, lora_loss, 2, place, False, folder, "fp32")
    torch.manual_seed(0)
    model = shard(Transformer(SMALL), precision="fp32", offload=True)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for batch in batches:
        optimizer.zero_grad()
        loss = whole_loss(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return found | {"FSDP2, CPUOffloadPolicy": (losses, [], 0)}


# %%
with scratch("lesson-07") as folder:
    found = run_ranks(on_one_rank, 1, {} if zero_problem else ARMS, str(folder), timeout_seconds=250)[0]
DEVICE = ("bit16_groups_flat", "for_gpu_offload", "ipg_bucket")  # DeepSpeed's names of what stays when the rest leaves
rows = []
for name, (_, place, own_adam) in ({} if zero_problem else ARMS).items():
    found_losses, held, on_disk = found[name]
    apart = max(abs(a / b - 1) for a, b in zip(found_losses, found["ZeRO-2"][0], strict=True))
    device = sum(each for path, _, each in held if place is None or any(part in path for part in DEVICE))
    there = sum(each for *_, each in held) - device
    rows.append({"": name, "device": device, "host": there, "file": on_disk, "losses apart from ZeRO-2": f"{apart:.0e}"})
    within = torch.finfo(torch.bfloat16).eps / 4 if own_adam else 5e-4  # rounded in another order
    assert apart <= within, f"{name} trains another model than ZeRO-2: same seed?"
if rows:
    display(pd.DataFrame(rows).set_index("").round(2))
    print(f"bytes per parameter, between backward and step ({Evidence.MEASURED}); your bet: {my_bet_bytes}")

# %%
sharded_losses = found["FSDP2, CPUOffloadPolicy"][0]
apart = max(abs(a / b - 1) for a, b in zip(sharded_losses, losses["plain", torch.float32], strict=True))
print(f"FSDP2 with CPUOffloadPolicy, fp32: {apart:.0e} from the plain run, {len(batches)} steps")
assert apart <= 1e-6, "FSDP2 trains another model: same seed?"

# %% [markdown]
# **Read it.** The second row keeps 2 bytes, the bf16 weights, as gradients leave, too, and a buffer as large as the
# largest tensor. Its host has fp32
# gradients, copies and moments, 16 bytes, and 2 more: a bf16 copy for the way up. ZeRO-3 takes the weights as well; its bucket
# stays. Where built: `DeepSpeedCPUAdam` rounds in another order than torch, and a bf16 number of size 1 has its next
# neighbour `torch.finfo(torch.bfloat16).eps` away; the last column says what that does to losses;
# ZeRO-Infinity puts the 12 bytes of copies and moments into a file; the host's buffers that it reads and writes through do not shrink with
# the model.
#
# **Question.** What does ZeRO-2 save on one GPU *without* offload, in bytes per parameter?

# %%
saved_without_offload = ...
check("07.without_offload", saved_without_offload)

# %% [markdown]
# **Around adapters there is little to gain.** Adapters with 20 million fp32 parameters train with AdamW. How many GB
# does it free to offload the optimizer state to the CPU? (The cell after your answer counts DeepSpeed's master copy of
# the adapters as well.)

# %%
freed_gb = ...
check("07.offloaded_gigabytes", freed_gb)

# %%
if not zero_problem:
    assert found["LoRA", None][0] == found["LoRA", "cpu"][0], "offload moves states and changes no number: same seed?"
    print("LoRA with ZeRO-2 and offload: the same losses, to the last bit")
per_block = {"two": 4 * shape.hidden, "all seven": 8 * shape.hidden + 3 * (shape.hidden + shape.feedforward)}
for targets_of, ends in per_block.items():
    moving = 12 * 8 * shape.layers * ends  # master copy and two moments
    print(f"7B, rank 8 on {targets_of} matrices of a block: {moving / GB:.2f} GB can move ({Evidence.PREDICTED})")

# %% [markdown]
# ## 5. `Trainer`: `deepspeed=` and `fsdp=`
#
# One argument more, and `Trainer` offloads or shards. The batch sizes are `"auto"`: Trainer writes those of its other
# arguments into DeepSpeed's configuration, so that they agree. FSDP must know what to gather at a time: the class of a
# block. Two ranks and two steps each, beside one plain process. (accelerate, which `Trainer` calls, takes up FSDP on GPUs alone;
# `fsdp_on_cpu` turns it on here.)

# %%
DEEPSPEED = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto"}
MORE = {"deepspeed=": {"deepspeed": DEEPSPEED}, "fsdp=": {"fsdp": True, "fsdp_config": {
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True}}}


# %%
def on_ranks(more):
    if "deepspeed" in more:
        load_deepspeed()
    arguments = TrainingArguments(
        "build/trainer", max_steps=2, per_device_train_batch_size=4 // dist.get_world_size(), learning_rate=1e-2,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, **more)
    rows = [{"input_ids": row, "labels": row} for tokens, _ in batches[:8] for row in tokens]
    trainer = Trainer(model=small_lora(), args=arguments, train_dataset=rows)
    if arguments.fsdp:
        fsdp_on_cpu(trainer)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every loss
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], type(trainer.model_wrapped).__name__


# %%
plain_losses, _ = run_ranks(on_ranks, 1, {"ddp_find_unused_parameters": False}, timeout_seconds=200)[0]
for name in ["fsdp="] if zero_problem else MORE:
    sharded, wrapper = run_ranks(on_ranks, 2, MORE[name], timeout_seconds=200)[0]
    apart = max(abs(a / b - 1) for a, b in zip(sharded, plain_losses, strict=True))
    print(f"{name:<11}{wrapper} on 2 ranks: losses {apart:.0e} from those of one process")
    assert apart < 1e-5, f"{name} trains another model: same seed, same batches on every rank?"

# %% [markdown]
# ## 6. Seven billion, simulated
#
# A full fine-tune on one text of 2,048 tokens, every block checkpointed, with bf16 weights. First the formula:
# 2 bytes a parameter, a buffer for the largest gradient, a block input for each block, and logits in bf16 and fp32.

# %%
LENGTH = 2048
expected = 2 * P + 2 * shape.vocabulary * shape.hidden + 2 * LENGTH * shape.hidden * shape.layers + 6 * LENGTH * shape.vocabulary


def full(gradients_leave):
    model = AutoModelForCausalLM.from_config(llama_config(shape), dtype=torch.bfloat16).train()
    enable_checkpointing(model)
    adam = torch.optim.AdamW(model.parameters())
    return model, OffloadedOptimizer(adam, master_dtype=torch.float32, gradients_leave=gradients_leave)


# %%
names = {"optimizer offloaded": False, "gradients leave, too": True}
big = {name: simulate(lambda: full(leave), lambda m, o: finetune_step(m, o, 1, LENGTH), device="RTX 4090", name=name)
       for name, leave in names.items()}
show(draw_breakdown(list(big.values()), limit="24GB", unit="GB", title="Llama-2-7B, every weight trained"),
     alt="; ".join(f"{name}: {run.peak_bytes / GB:.1f} GB" for name, run in big.items()))
least = big["gradients leave, too"]
print(f"device: {expected / GB:.2f} GB predicted, {least.peak_bytes / GB:.2f} simulated; host: {least.host_bytes / GB:.1f} GB simulated")
assert abs(least.peak_bytes / expected - 1) < 0.03, "2 bytes a parameter, buffers and activations: what else stays?"

# %% [markdown]
# **Read it.** With gradients that leave, a full fine-tune of 7B peaks below 24 GB. DeepSpeed holds the same on the card,
# and buckets: 5e8 elements each by [default](https://www.deepspeed.ai/docs/config-json/), 1 GB in bf16. The host pays: 16 bytes a parameter and what is on its way,
# 18 with DeepSpeed (section 4).
#
# ### Traps
#
# - **Pageable memory.** The system may move ordinary host memory to disk; *pinned* memory stays, and only it is copied
#   at the link's rate. With pinned memory DeepSpeed's copies up became
#   [6 times faster](https://github.com/deepspeedai/DeepSpeed/pull/5301) on one GPU (published).
# - **NUMA.** Each processor of a host reads its own memory faster than the others'. Binding cores to ranks took
#   Qwen2.5-3B on two A100 from 3.08 to [2.38 s a step](https://github.com/deepspeedai/DeepSpeed/pull/7474) (published).
# - **foreach.** PyTorch's AdamW on a GPU works on all tensors at once, and takes one more copy of them; `fused=True`
#   takes none; one tensor after the other takes the temporaries of one, here of 16.
# - **Loading.** A checkpoint read into a built model is there twice. Build on `meta`, map the file, assign. Older code
#   says `low_cpu_mem_usage=True`; transformers 5 always does so.

# %%
def step_extra(**how):
    """The most that a step takes beside weights, gradients and moments, per parameter."""
    own = [torch.nn.Parameter(torch.ones(1 << 16)) for _ in range(16)]
    optimizer = torch.optim.AdamW(own, **how)
    for _ in range(2):
        for parameter in own:
            parameter.grad = torch.ones_like(parameter)
        peak = allocated_peak(optimizer.step)
    return peak / (16 << 16)


extra = {name: step_extra(**{name: True}) if name else step_extra(foreach=False) for name in ("foreach", "fused", "")}
for name, each in extra.items():
    print(f"{name or 'one tensor after the other':<28}{each:.2f} bytes a parameter (measured)")

# %%
def read_into_a_built_model():
    model = Transformer(WIDE)
    model.load_state_dict(torch.load(path))
    return model


def assigned_on_meta():
    with torch.device("meta"):
        model = Transformer(WIDE)
    model.load_state_dict(torch.load(path, mmap=True), assign=True)
    return model


with scratch("lesson-07") as folder:
    path = pathlib.Path(folder) / "model.pt"
    torch.save(Transformer(WIDE).state_dict(), path)
    size = sum(p.nbytes for p in Transformer(WIDE).parameters())
    for way in (read_into_a_built_model, assigned_on_meta):
        print(f"{way.__name__:<24}{allocated_peak(way) / size:5.2f} times the model (measured; a mapped file's pages are not counted)")

# %% [markdown]
# ## 7. Beside what was published
#
# Predictions from published rates: 39 TFLOP/s for a V100 without offload (Megatron-LM), or 70 with ZeRO-Infinity's
# wider models and no transfers; 12 GB/s of PCIe; for a node's 16 GPUs 25 GB/s of NVMe and 48 of CPU
# memory; for CPU-Adam the bandwidth of one socket's memory. No row's own figure goes in.

# %%
summaries = summarize(compare_all(("offload",)))
for row in summaries:
    print(f"{row.source:<26}{row.quantity:<24}{row.rows:>2} rows, mean error {row.mean:.1%}, bias {row.bias:+.1%}")
    assert row.mean <= 0.15, f"{row.source}: the prediction is off; which rate is not the published one?"
show(draw_validation(summaries, title="Offload, predicted beside published"),
     alt="; ".join(f"{row.source}: mean error {row.mean:.0%}" for row in summaries))

# %% [markdown]
# **Read it.** ZeRO-Offload trained 13 billion parameters on one V100 of 32 GB, at 34.5 TFLOP/s (published, Figure 8). Each
# micro-batch sends its gradients, predicted here as unhidden, and small ones (4 texts at 13B) pay most: hidden as in
# section 3, the rows would not fall so. ZeRO-Infinity's states come from NVMe, unhidden. The naive rule, a constant fitted to the rows
# themselves, is nearer in the first two, and farther off in the third, where the link decides.
#
# ## 8. The scenario as asked
#
# *"A 7B model on our 24 GB card, by PEFT and with offload."* One RTX 4090, steps of 16 texts of 2,048 tokens, 50 million
# tokens in all. The planner predicts all of it.
# For the full fine-tune it counts DeepSpeed's two buckets of 1 GB on the card, without which section 6 simulated, and 16
# bytes a parameter on the host, where section 4 measured 18.

# %%
box = Cluster(gpu="RTX 4090", nodes=1, gpus_per_node=1, host_memory_bytes=128 * GB)
batch, base = Batch(sequences=16, sequence_length=2048), {"recompute": "full"}
ways = {"QLoRA": Plan(lora=Lora(base="nf4-dq"), framework="peft", **base),
        "LoRA + offload": Plan(lora=Lora(), offload="optimizer", framework="peft", **base),
        "full + offload": Plan(offload="optimizer", framework="deepspeed", zero_stage=2, **base)}
sheet = {}
for name, plan in ways.items():
    told = estimate(shape, box, plan, batch)
    sheet[name] = {"card, GB": told.peak.allocated_bytes / GB, "host, GB": told.host_bytes / GB,
                   "step, s": told.step_seconds, "days": 50e6 / batch.tokens * told.step_seconds / 86_400}
print(f"18 bytes a parameter on the host: {18 * P / GB:.0f} GB")
pd.DataFrame(sheet).T.style.format(precision=2).set_caption(f"{Evidence.PREDICTED}")

# %% [markdown]
# | way | gives up |
# |---|---|
# | QLoRA | weights are rounded to 4 bits, only adapters learn |
# | LoRA + offload | only adapters learn; all that leaves the card is their moments |
# | full + offload | 108 GB of host memory, 121 with DeepSpeed's 18 bytes, and seconds of CPU a step: large batches, or the GPU waits |
#
# Packed weights are unpacked in each pass: most of a second a step. Activations do not leave with the states:
# checkpoint them first (lesson 05). For adapters, lesson 06 writes the script. Here is that of the full fine-tune, with
# pinned memory and DeepSpeed's own Adam. On one card it is ZeRO-2, and gradients leave; where the weights do not fit, say
# `"stage": 3` and `"offload_param"`.

# %%
IMPORTS = """# pip install torch transformers accelerate deepspeed      texts.txt: one text a line
# torchrun --nproc-per-node 1 offload.py [model]
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator
"""


def zero_offload(on_gpu):
    """DeepSpeed compiles its Adam for the CPU at the first start: that needs a compiler. Elsewhere PyTorch's goes on."""
    adam = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    return {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_force_ds_cpu_optimizer": on_gpu,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000_000,  # elements: 0.2 GB a bucket
                                  "offload_optimizer": {"device": "cpu", "pin_memory": on_gpu}},
            "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto"} | ({"optimizer": adam} if on_gpu else {})


# %%
def packed(tokenizer, texts, length):
    """Texts one after the other, cut into pieces of one length: no padding."""
    ids = [token for text in texts for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


MAIN = """if __name__ == "__main__":
    base, on_gpu = (sys.argv[1:] or ["meta-llama/Llama-2-7b-hf"])[0], torch.cuda.is_available()
    pieces = packed(AutoTokenizer.from_pretrained(base), Path("texts.txt").read_text().splitlines(), LENGTH)
    arguments = TrainingArguments(  # first: what is loaded after it knows of DeepSpeed
        "tuned", deepspeed=zero_offload(on_gpu), bf16=True, use_cpu=not on_gpu, learning_rate=1e-5, num_train_epochs=1,
        per_device_train_batch_size=1, gradient_accumulation_steps=16, gradient_checkpointing=True, logging_steps=1,
        save_strategy="epoch", save_only_model=True, report_to="none")  # False: to resume, 12 bytes a parameter more
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    Trainer(model, arguments, default_data_collator, pieces).train()
    print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB (allocated); simulated for Llama-2-7B: PEAK GB, buckets apart")
"""
MAIN = MAIN.replace("LENGTH", str(LENGTH)).replace("PEAK", f"{least.peak_bytes / GB:.1f}")
here.write_script("offload.py", IMPORTS, zero_offload, packed, MAIN)

# %% [markdown]
# **Read it.** Measured here: 2 bytes a parameter stay, and losses do not change (section 4, in small). Simulated: the
# peak at 7B. Predicted: seconds and days. Published: ZeRO-Offload's rates on one V100 (section 7). Not shown: this script
# on a card; it prints the card's own peak beside the simulated one. Nor that all weights learn *more* than adapters:
# that depends on your task.

# %%
for run in big.values():
    score("07", f"7B, {run.name}", peak_bytes=run.peak_bytes, evidence=run.evidence)
scoreboard("07")

# %% [markdown]
# ## Break it, diagnose it
#
# A loop clips its gradients before each step, as always. Here gradients leave in backward. Predict the norm.

# %%
torch.manual_seed(0)
model = Transformer(SMALL)
optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), gradients_leave=True)
whole_loss(model, *batches[0]).backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
there = torch.nn.utils.get_total_norm([copy.grad for group in optimizer.inner.param_groups for copy in group["params"]])
print(f"norm that the loop clips by: {norm:.3f}; norm of the gradients on the host: {there:.3f}")
assert norm == 0 < there, "gradients should have left the device"

# %% [markdown]
# **Diagnose it.** Nothing fails, and nothing is clipped: there are no gradients on the device any more. Clip where they
# are. DeepSpeed does so itself, by its setting `gradient_clipping`.
#
# ## Recap
#
# - Needed least often leaves first: optimizer state, then gradients, then weights. 2 bytes per parameter stay, or two layers.
# - The link is not free below $bF/(8B)$ tokens a micro-batch, if transfers overlap at all: $b$ is 2 for gradients, 4 for streamed weights. Prefetch.
# - ZeRO-2 on one GPU partitions nothing. Its offload is what helps.
# - Adapters have almost nothing to offload.
#
# ### Test yourself
#
# A full fine-tune of Llama-2-7B on an H100, with optimizer and gradients offloaded, is much slower than its compute.
# A step has 64 micro-batches of 512 tokens. What do you change first, and what do you look at next?
#
# <details><summary>Answer</summary>
#
# Gradients go down in every micro-batch, and 512 tokens are far below the 1,962 that hide them on this card. Take
# micro-batches of 2,048 tokens, checkpointed: a quarter of the transfers, hidden. What is left no batch hides: the step
# on the CPU (is it a compiled Adam, bound to its processor's memory?) and the weights' way up (is the memory pinned?).
#
# </details>
#
# ### Where next
#
# Do the [lab](../../labs/intermediate/07_offload.ipynb), in a copy: `make my-labs` makes one. Then compare with the
# [solution](../../solutions/intermediate/07_offload.ipynb). Sharding over several GPUs is [lesson 09](09_sharding.ipynb).
#
# **References.** Ren and others 2021, *ZeRO-Offload*, [arXiv:2101.06840](https://arxiv.org/abs/2101.06840).
# Rajbhandari and others 2021, *ZeRO-Infinity*, [arXiv:2104.07857](https://arxiv.org/abs/2104.07857). Shoeybi and others 2019,
# *Megatron-LM*, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053). DeepSpeed,
# [configuration](https://www.deepspeed.ai/docs/config-json/).
