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
# **Promise.** In ten minutes you know what this machine can do, how to read every figure of the course,
# and where the bytes of your first training step went: measured here, not quoted.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 10 | any laptop; a GPU if you have one | about 10 seconds of computing |

# %% [markdown]
# ## What this course is
#
# Models grow faster than the memory of the devices that train them. This course teaches where the
# memory goes and what can be done about it, from mixed precision on one GPU to clusters. Every
# technique runs, and every number is measured, on whatever machine you have.

# %% [markdown]
# ## 1. Check this machine
#
# Run the next cell. It says which device was found, how much memory it has, which 16-bit type suits
# it and why, and the *scale* at which the notebooks run here.

# %% tags=["setup"]
here = setup("00")

# %% [markdown]
# **Read it.** With `tiny`, models and batches are small enough for a laptop's CPU. With `small`
# (a GPU of up to 16 GB) and `full` they grow. The lessons are the same, the effects are the same,
# and each figure says where its numbers were taken.

# %% [markdown]
# ## 2. Five kinds of numbers
#
# Numbers about memory are often quoted without their origin. Here each one carries its **evidence**:
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
# and the optimizer. It runs the step a few times: to warm up, with every allocation recorded, and
# for the clock.

# %%
import torch
import torch.nn.functional as F
from torch import nn

from utils import compare, draw_timeline, format_bytes, measure, score, scoreboard, show

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
# **Bars** show one moment: the peak of the step, split into what the bytes are there for. The
# label under each name says how the number came about; the corner says on which device.

# %%
comparison = compare([sgd, adam], title="The same network, two optimizers")
comparison

# %% [markdown]
# **Read it.** The networks are equal, so are their parameters and gradients. Adam keeps two more
# numbers for each parameter: the block *optimizer state*. The next cell checks that claim
# against the measurement, to the byte.

# %%
parameters = [p.numel() for p in small_network().parameters()]
state = {str(category): adam.breakdown[category] for category in adam.breakdown}["optimizer state"]
step_counters = 4 * len(parameters)  # Adam counts its steps once for each tensor
print(f"predicted {2 * 4 * sum(parameters) + step_counters:,} bytes, measured {state:,} bytes")
assert state == 2 * 4 * sum(parameters) + step_counters

# %% [markdown]
# **The timeline** shows the whole step. The colours are the same as in the bars. The background
# names the phase: forward builds activations up, backward takes them down and makes gradients, the
# optimizer step comes last. The triangle marks the peak.

# %%
figure = draw_timeline(adam)
show(figure, alt="Stacked memory by category over one training step with Adam, phases shaded, peak marked.")

# %% [markdown]
# **Read it.** The largest block decides what to do. Here it is the states: a smaller batch would
# change almost nothing. With a large batch of images it would be the activations, and another
# technique would help. This is the question of lesson 01.

# %%
print(adam)

# %% [markdown]
# ## 5. The scoreboard
#
# Each lesson adds rows, so that you see what each technique brings on your machine.

# %%
score("00", adam)
scoreboard()

# %% [markdown]
# ## 6. The lessons
#
# | lesson | what you learn | minutes |
# |---|---|---|
# | [01 Where does the memory go?](beginner/01_where_memory_goes.ipynb) | account for every byte of a training step | 30 |
#
# Each lesson has a lab of the same number in `labs/`, and a solution in `solutions/`. Work in a
# copy: `make my-labs` puts the labs into `my_labs/`, which is yours and which no update touches.

# %% [markdown]
# ## 7. Glossary
#
# | term | meaning |
# |---|---|
# | allocation | a block of device memory, from the moment it is handed out until it is given back |
# | peak | the largest sum of allocations alive at one moment of a step |
# | parameters | the weights that training changes |
# | gradients | the derivative of the loss by each parameter |
# | optimizer state | what the optimizer keeps for each parameter between steps |
# | buffers | tensors of the model that are not trained, such as running statistics |
# | activations | what forward keeps because backward will need it |
# | logits | the scores that the last layer gives to each class or token |

# %% [markdown]
# | term | meaning |
# |---|---|
# | temporaries | memory that an operation takes and gives back within one phase |
# | phase | forward, loss, backward, optimizer step |
# | HBM | the large memory of a GPU, where tensors live |
# | reserved | memory that PyTorch holds for reuse, whether or not a tensor uses it |
# | fp32, fp16, bf16 | numbers of 4, 2 and 2 bytes |
# | GB, GiB | 10^9 bytes, 2^30 bytes |
