# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 Start here
#
# {{badges}}
#
# **Promise.** In ten minutes you know what this machine can do, how to read the two figures that
# every lesson uses, and where the bytes of your first training step went: measured here, not quoted.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 10 | any laptop; a GPU if you have one | about 10 seconds of computing |

# %% [markdown]
# ## What this course is
#
# Many models need more memory than the device that should train them has. This course teaches
# where the memory goes and what you can do about it, from one GPU to clusters. Every technique runs
# on the machine you have, and every number says where it comes from. You need Python and the basics
# of PyTorch: a model, a loss, `backward`, an optimizer.

# %% [markdown]
# ## 1. Check this machine
#
# Run the next two cells (Shift and Enter). The first is folded away and finds the course's folder.
# The second says which device was found, how much memory it has, which 16-bit number type (dtype)
# suits it and why, and the *scale* at which the notebooks run here.

# %% tags=["setup"]
here = setup("00")

# %% [markdown]
# **Read it.** With `tiny`, models and batches are small enough for a laptop's CPU. With `small`
# (a GPU of up to 16 GB) and `full` they grow. The lessons are the same, the effects are the same,
# and each figure says where its numbers were taken. The *meter* is the part of the course that
# counts bytes. The line about 16-bit types matters in later lessons; you can pass over it now.

# %% [markdown]
# ## 2. Five kinds of numbers
#
# Numbers about memory are often quoted without their origin. Here each one carries its **evidence**.
# The *allocator* in the first row is the part of PyTorch that hands out memory to tensors and takes
# it back.
#
# | evidence | where it comes from |
# |---|---|
# | measured | the allocator of the device that ran the step, here and now |
# | simulated | the same model code on tensors without data |
# | predicted | a formula |
# | recorded | measured once on a named GPU, kept in `results/` with date and versions |
# | published | a paper's or project's table, with its source |

# %% [markdown]
# ## 3. Your first measurement
#
# A small network, two optimizers. `measure` needs one function that runs one training step, the model
# and the optimizer. It runs the step once to warm up, once with every allocation recorded, and a few
# times for the clock.

# %%
import torch
import torch.nn.functional as F
from torch import nn

from utils import compare, draw_timeline, measure, score, scoreboard, show

device = here.meter_device  # where the meter can count: CUDA or CPU
inputs = torch.randn(256, 512, device=device)
labels = torch.randint(0, 10, (256,), device=device)


def small_network():
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers).to(device)


# %%
def one_step_of(model, optimizer):
    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    return step


def run(name, build_optimizer):
    model = small_network()
    optimizer = build_optimizer(model.parameters())
    return measure(one_step_of(model, optimizer), model=model, optimizer=optimizer,
                   items=256, unit="rows", name=name)  # fmt: skip


sgd = run("SGD", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
adam = run("Adam", torch.optim.Adam)

# %% [markdown]
# ## 4. How to read the figures
#
# **Bars** show one moment: the *peak*, when the step holds the most memory. Each bar is split into
# what the bytes are there for; the section "Glossary" below explains the words. The word in brackets
# under each name is the evidence, and the corner names the device. The table repeats the numbers;
# its *states* are parameters, gradients and optimizer state together.

# %%
comparison = compare([sgd, adam], title="The same network, two optimizers")
comparison

# %% [markdown]
# **Read it.** The networks are the same, and so are their parameters and gradients. Adam keeps two
# more numbers for each parameter: the block *optimizer state*. It also borrows memory while it
# computes, the grey *temporaries*. At that moment no activations are alive; the timeline below shows
# when they are. The next cell checks the optimizer state against a formula, to the byte.

# %%
parameters = [p.numel() for p in small_network().parameters()]
state = adam.breakdown["optimizer state"]
step_counters = 4 * len(parameters)  # Adam counts its steps once for each tensor
print(f"predicted {2 * 4 * sum(parameters) + step_counters:,} bytes, measured {state:,} bytes")
assert state == 2 * 4 * sum(parameters) + step_counters, (
    "Adam keeps two fp32 moments a parameter. Run the notebook again from its first cell.")  # fmt: skip

# %% [markdown]
# **The timeline** shows the whole step. The colours are the same as in the bars. The background
# names the phase: forward builds activations up, backward takes them down and makes gradients, the
# optimizer step comes last. The narrow band without a name is the loss. The triangle marks the peak.
# The thin spike at the left edge is the gradients of the step before, which `zero_grad` frees.

# %%
figure = draw_timeline(adam)
show(figure, alt="Stacked memory by category over one training step with Adam, phases shaded, peak marked.")

# %% [markdown]
# **Read it.** The largest block decides what to do. Here it is the states, and none of them depends
# on the batch: a smaller batch would change almost nothing. With a large batch of images it would be
# the activations, and another technique would help. This is the question of lesson 01. The next
# cell prints the same peak as a list.

# %%
print(adam)

# %% [markdown]
# ## 5. The scoreboard
#
# Each lesson adds rows, so that you see what each technique brings on your machine. The rows are
# kept when you close the notebook.

# %%
score("00", adam)
scoreboard()

# %% [markdown]
# ## 6. The lessons
#
# | lesson | what you learn | minutes | then |
# |---|---|---|---|
# | [01 Where does the memory go?](beginner/01_where_memory_goes.ipynb) | account for every byte of a training step | 30 | [lab](../labs/beginner/01_where_memory_goes.ipynb), [solution](../solutions/beginner/01_where_memory_goes.ipynb) |
# | [02 Mixed precision on a vision model](beginner/02_mixed_precision.ipynb) | put twice the batch on a 16 GB card, and keep the accuracy | 40 | [lab](../labs/beginner/02_mixed_precision.ipynb), [solution](../solutions/beginner/02_mixed_precision.ipynb) |
# | [03 When numbers break](beginner/03_when_numbers_break.ipynb) | find five faults of a mixed-precision run from its record | 45 | [lab](../labs/beginner/03_when_numbers_break.ipynb), [solution](../solutions/beginner/03_when_numbers_break.ipynb) |
# | [04 One model, four ranks](beginner/04_four_ranks.ipynb) | train on four processes, and get the same losses | 40 | [lab](../labs/beginner/04_four_ranks.ipynb), [solution](../solutions/beginner/04_four_ranks.ipynb) |
# | [05 Trading compute for memory](intermediate/05_checkpointing.ipynb) | forget activations and compute them again, and know the price | 45 | [lab](../labs/intermediate/05_checkpointing.ipynb), [solution](../solutions/intermediate/05_checkpointing.ipynb) |
# | [05a How far to trust a simulated number](intermediate/05a_trusting_simulation.ipynb) | simulate a 7B step on a card you do not have | 20 | |
# | [06 Seven billion parameters on 24 GB](intermediate/06_seven_billion.ipynb) | adapters and four-bit weights: which fine-tunes of a 7B model fit | 45 | [lab](../labs/intermediate/06_seven_billion.ipynb), [solution](../solutions/intermediate/06_seven_billion.ipynb) |
# | [09 Sharding: ZeRO-1, 2, 3 and FSDP](intermediate/09_sharding.ipynb) | train one model in five ways on four ranks, and account for what each holds and sends | 45 | [lab](../labs/intermediate/09_sharding.ipynb), [solution](../solutions/intermediate/09_sharding.ipynb) |
# | [15 The design studio](advanced/15_design_studio.ipynb) | lay out 175B on 64 GPUs, and defend a design in days and dollars | 60 | [lab](../labs/advanced/15_design_studio.ipynb), [solution](../solutions/advanced/15_design_studio.ipynb) |
#
# A lab holds exercises that check your answers. Work in a copy: `make my-labs`, typed in a terminal
# in the course's folder, puts the labs into `my_labs/`, which is yours and which no update touches.

# %% [markdown]
# ## 7. Glossary
#
# What the bytes are there for:
#
# | term | meaning |
# |---|---|
# | parameters | the weights that training changes |
# | gradients | the derivative of the loss by each parameter |
# | optimizer state | what the optimizer keeps for each parameter between steps |
# | states, model states | parameters, gradients and optimizer state together |
# | buffers | tensors of the model that are not trained, such as running statistics |
# | inputs | the batch that the step works on |
# | activations | what forward keeps because backward will need it |
# | logits | the scores that the last layer gives to each class or token |
# | temporaries | memory that an operation takes and gives back within one phase |
# | other | alive, and none of the above: often something left by an earlier step |

# %% [markdown]
# Memory and its counters:
#
# | term | meaning |
# |---|---|
# | allocator | the part of PyTorch that hands out device memory to tensors and takes it back |
# | allocation | a block of device memory, from the moment it is handed out until it is given back |
# | storage | the allocation behind a tensor; several tensors (views) can share one |
# | peak | the largest sum of allocations alive at one moment of a step |
# | step, phase | one round of training; its parts: forward, loss, backward, optimizer step |
# | HBM | the large memory of a GPU, where tensors live |
# | reserved | memory that PyTorch holds for reuse, whether or not a tensor uses it |
# | CUDA context | what NVIDIA's driver and the code of the kernels take on the GPU |
# | kernel | a program that runs on a GPU; also the Python process behind a notebook |
# | fp32, fp16, bf16 | numbers of 4, 2 and 2 bytes; bf16 has the range of fp32 and fewer digits |
# | KB, MB, GB | 10^3, 10^6, 10^9 bytes |
# | KiB, MiB, GiB | 2^10, 2^20, 2^30 bytes |

# %% [markdown]
# Several ranks:
#
# | term | meaning |
# |---|---|
# | rank, world size | one process of a group that trains together; how many there are |
# | replica | a rank's own whole copy of the model |
# | collective | an operation that all ranks of a group call together |
# | all-reduce, broadcast | everyone gets the sum; everyone gets what one rank has |
# | payload | the bytes that a rank puts into a collective; what crosses a link depends on the algorithm |
# | bucket | a flat tensor of many gradients, sent in one call |
# | DDP | data parallelism: every rank has the whole model and its share of each batch |

# %% [markdown]
# Techniques that later lessons build:
#
# | term | meaning |
# |---|---|
# | mixed precision | most arithmetic in 16-bit numbers, with fp32 where it matters |
# | autocast | the part of PyTorch that casts inputs to 16 bits, operation by operation |
# | cast weights | the 16-bit copies of weights that autocast makes and keeps until backward has used them |
# | loss scaling | multiply the loss, so that small fp16 gradients do not become 0, and divide before the step |
# | GradScaler | PyTorch's loss scaling; it skips steps with infinite gradients and adapts the scale |
# | TF32 | products of fp32 tensors with 10 binary digits behind the point, on newer GPUs; no memory saved |
# | channels_last | a memory layout with the colours of a pixel next to each other |
# | overflow, underflow | too large for the format: infinity; too small: zero |
# | NaN | "not a number", the result of infinity minus infinity or 0 times infinity; it spreads |
# | exponent, mantissa | the bits of a number that give its range, and those that give its digits |
# | subnormal | a number near zero that has fewer digits than the others |
# | fp8 | numbers of 1 byte; e4m3 has one more digit, e5m2 more range |
# | checkpointing | keep fewer activations, compute the others again in backward; also *recomputation* |
# | selective checkpointing | keep the results of expensive operations, compute the cheap ones again |
# | segment | several blocks that are checkpointed as one |
# | micro-batch | a part of the batch; gradients of several parts are added up before the step |
# | quantization | store numbers in 8 bits or fewer |
# | 8-bit states | an optimizer state that is quantized |
# | adapter, LoRA | a small trained difference of low rank beside a frozen weight |
# | NF4 | sixteen levels for weights, the quantiles of a normal distribution; a block of 64 shares a scale |
# | double quantization | the scales of blocks are quantized as well, to 8 bits |
# | QLoRA | adapters on weights that are frozen in NF4 |
# | merging | adding an adapter's product to the weight, so that one plain layer is left |
# | paged optimizer | a state that the GPU's driver moves to the CPU's memory when the GPU is full |
# | sharding | each device keeps only its part, and fetches the others' parts when it needs them |
# | ZeRO-1, 2, 3 | sharding of the optimizer state, of the gradients too, of the parameters too |
# | FSDP, FSDP2 | PyTorch's sharding of all three, gathered block by block |
# | all-gather, reduce-scatter | everyone gets all parts; everyone gets its part of the sum |
# | offload | keep what is not needed now in the CPU's memory or on disk |
# | chunked loss | compute logits and loss for a part of the tokens at a time |
# | fused kernel | one kernel for several operations, without memory for what lies between them |

# %% [markdown]
# Layouts over many devices, and how they are judged:
#
# | term | meaning |
# |---|---|
# | data parallel (DP) | replicas of the model, each on its part of the batch |
# | tensor parallel (TP) | ranks share each matrix and exchange results inside every block |
# | sequence parallel | norms and residuals split over the tensor-parallel ranks as well |
# | pipeline parallel (PP) | ranks, the stages, hold different layers and pass activations on |
# | bubble | the time in which a pipeline stage waits |
# | 1F1B, GPipe | schedules: one forward and one backward in turn; all forwards, then all backwards |
# | interleaving | each stage holds several chunks of layers, which shortens the bubble |
# | ZeRO-1, 2, 3 | sharding of optimizer state, then gradients, then parameters over replicas |
# | MFU, HFU | useful FLOP/s over the peak; with recomputation counted as well |
# | goodput | the share of wall time that is training |
# | Pareto front | the plans that no other beats in both time and memory |
