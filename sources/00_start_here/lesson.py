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
# **Promise.** In a quarter of an hour you know what this machine can do, how to read the course's
# two basic figures, and where the bytes of your first training step went: measured here, not quoted.
#
# | minutes | hardware | runs |
# |---|---|---|
# | 15 | any laptop; a GPU if you have one | about 10 seconds of computing |
#
# ## What this course is
#
# Many models need more memory than the device that should train them has. This course teaches
# where the memory goes and what you can do about it, from one GPU to clusters. Every technique runs
# on the machine you have, and every number says where it comes from. You need Python and the basics
# of PyTorch: a model, a loss, `backward`, an optimizer.
#
# Only want to know whether *your* model fits your card? [Your own model](00a_your_model.ipynb) answers, with what would make it
# fit and the script. [Which technique for my model?](00b_which_technique.ipynb) shows it in one picture for 1B, 7B and 70B.
#
# ## 1. Check this machine
#
# Run the next two cells (Shift and Enter). The first is folded away and finds the course's folder.
# The second says which device was found, how much memory it has, which 16-bit number type (dtype)
# suits it, and the *scale* of the lessons' models here: `tiny` for a CPU, `small` or `full` for a GPU.

# %% tags=["setup"]
here = setup("00")

# %% [markdown]
# **Read it.** The lessons and their effects are the same at every scale, and each figure says where its
# numbers were taken. The *meter* is the part of the course that counts bytes. Pass over the rest now.
#
# ## 2. Five kinds of numbers
#
# Numbers about memory are often quoted without their origin. Here each one carries its **evidence**.
#
# | evidence | where it comes from |
# |---|---|
# | measured | the device that ran the step, here and now: its memory is counted as PyTorch hands it out |
# | simulated | the same model code on tensors that have shapes and no data, for a device that is not here |
# | predicted | a formula |
# | recorded | measured once on a named machine, kept in `evidence/results/` with date and versions |
# | published | a paper's or project's table, with its source |
#
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
                   items=256, unit="rows", name=name)


sgd = run("SGD", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
adam = run("Adam", torch.optim.Adam)

# %% [markdown]
# ## 4. How to read the figures
#
# **Bars** show one moment: the *peak*, when the step holds the most memory. Each bar is split into
# what the bytes are there for; the [glossary](00_glossary.ipynb) explains the words. The word in brackets
# under each name is the evidence, and the corner names the device. The table repeats the numbers;
# its *states* are parameters, gradients and optimizer state together.

# %%
comparison = compare([sgd, adam], title="The same network, two optimizers")
comparison

# %% [markdown]
# **Read it.** The networks are the same, and so are their parameters and gradients. Adam keeps two
# more numbers for each parameter: the block *optimizer state*. Its step also borrows memory, the grey
# *temporaries*. At neither peak are activations alive; the timeline below shows
# when they are. The next cell checks the optimizer state against a formula, to the byte.

# %%
parameters = [p.numel() for p in small_network().parameters()]
state = adam.breakdown["optimizer state"]
step_counters = 4 * len(parameters)  # Adam counts its steps once for each tensor
print(f"predicted {2 * 4 * sum(parameters) + step_counters:,} bytes, measured {state:,} bytes")
assert state == 2 * 4 * sum(parameters) + step_counters, (
    "Adam keeps two float32 means a parameter. Run the notebook again from its first cell.")

# %% [markdown]
# **The timeline** shows the whole step. The colours are the same as in the bars. The background
# names the phase: forward builds activations up, backward takes them down and makes gradients, the
# optimizer step comes last. (A phase that is too short, such as the loss, goes without its name.) The
# triangle marks the peak. The thin spike at the left edge is the gradients of the step before, which
# `zero_grad` frees.

# %%
figure = draw_timeline(adam)
show(figure, alt="Stacked memory by category over one training step with Adam, phases shaded, peak marked.")

# %% [markdown]
# **Read it.** The largest share decides what to do. Here it is the states, and none of them depends
# on the batch: a smaller batch would change almost nothing. With a large batch of images it would be
# the activations, and another technique would help. This is the question of lesson 01. The next
# cell prints the same peak as a list (*logits* are the network's ten scores).

# %%
print(adam)

# %% [markdown]
# ## 5. The scoreboard, and your progress
#
# Some lessons add rows and show their own; `scoreboard()` shows all. Rows stay when you close the notebook.

# %%
score("00", adam)
scoreboard("00")

# %% [markdown]
# What the labs' checks say of your answers is kept there too. Come back to the next cell whenever you want to see how far
# you are: a filled box is solved, a pale one was tried.

# %%
from utils.lessons.lesson_00.progress import draw_progress, progress

mine = progress()
show(draw_progress(mine), alt=mine.sentence)
mine

# %% [markdown]
# ## 6. The lessons
#
# Nobody needs all of them at once. Four ways through, in hours of lessons, and of their labs:
#
# | you want to | lessons | hours | labs |
# |---|---|---|---|
# | fine-tune 7B on your card | 01, 05, 06 | 3.0 | 2.8 |
# | train on several GPUs | 01, 04, 09, 11, 12, 13, 14 | 8.7 | 7.4 |
# | plan a cluster's run | 01, 09, 14, 15, 16, 17, 17a | 7.6 | 6.6 |
# | know what runs of 2026 use | 18, 19, 20 | 5.1 | 3.8 |
#
# Minutes below are those of a learner who reads, predicts and runs; the lab comes on top.
#
# | lesson | what you learn | lesson, min | lab, min | files |
# |---|---|---|---|---|
# | [01 Where does the memory go?](beginner/01_where_memory_goes.ipynb) | account for every byte of a training step | 45 | 60 | [lab](../labs/beginner/01_where_memory_goes.ipynb), [solution](../solutions/beginner/01_where_memory_goes.ipynb) |
# | [02 Mixed precision on a vision model](beginner/02_mixed_precision.ipynb) | put twice the batch on a 16 GB card, and know which moment decides | 50 | 90 | [lab](../labs/beginner/02_mixed_precision.ipynb), [solution](../solutions/beginner/02_mixed_precision.ipynb) |
# | [03 When numbers break](beginner/03_when_numbers_break.ipynb) | find five faults of a mixed-precision run from its record, and cure them | 65 | 80 | [lab](../labs/beginner/03_when_numbers_break.ipynb), [solution](../solutions/beginner/03_when_numbers_break.ipynb) |
# | [04 One model, four ranks](beginner/04_four_ranks.ipynb) | train on four processes, and get the same losses | 80 | 45 | [lab](../labs/beginner/04_four_ranks.ipynb), [solution](../solutions/beginner/04_four_ranks.ipynb) |
# | [05 Trading compute for memory](intermediate/05_checkpointing.ipynb) | forget activations and compute them again, and know the price | 75 | 60 | [lab](../labs/intermediate/05_checkpointing.ipynb), [solution](../solutions/intermediate/05_checkpointing.ipynb) |
# | [05a How far to trust a simulated number](intermediate/05a_trusting_simulation.ipynb) | simulate a 7B step on a card you do not have | 25 | | |
# | [06 Seven billion parameters on 24 GB](intermediate/06_seven_billion.ipynb) | adapters and four-bit weights: which fine-tunes of a 7B model fit | 60 | 50 | [lab](../labs/intermediate/06_seven_billion.ipynb), [solution](../solutions/intermediate/06_seven_billion.ipynb) |
# | [07 Offload: memory that lies behind a link](intermediate/07_offload.ipynb) | full fine-tuning of 7B on 24 GB: what leaves the card, what crosses the link, when it is free | 75 | 75 | [lab](../labs/intermediate/07_offload.ipynb), [solution](../solutions/intermediate/07_offload.ipynb) |
# | [08 Smaller weights for inference](intermediate/08_smaller_weights.ipynb) | round a trained model to 8, 4, 3 and 2 bits, and say which card serves what, how fast | 60 | 70 | [lab](../labs/intermediate/08_smaller_weights.ipynb), [solution](../solutions/intermediate/08_smaller_weights.ipynb) |
# | [09 Sharding: ZeRO-1, 2, 3 and FSDP](intermediate/09_sharding.ipynb) | train one model in five ways on four ranks, and account for what each holds and sends | 75 | 60 | [lab](../labs/intermediate/09_sharding.ipynb), [solution](../solutions/intermediate/09_sharding.ipynb) |
# | [10 The out-of-memory clinic](intermediate/10_oom_clinic.ipynb) | find why a run dies of memory, from evidence, and cure it without changing a loss | 80 | 75 | [lab](../labs/intermediate/10_oom_clinic.ipynb), [solution](../solutions/intermediate/10_oom_clinic.ipynb) |
# | [11 Links and collectives](advanced/11_links.ipynb) | write a ring all-reduce, build two hosts, and find what slows a job on eight nodes | 80 | 75 | [lab](../labs/advanced/11_links.ipynb), [solution](../solutions/advanced/11_links.ipynb) |
# | [12 Tensor and sequence parallelism](advanced/12_tensor_parallel.ipynb) | split every matrix over four ranks, and count what a layer sends and keeps | 80 | 70 | [lab](../labs/advanced/12_tensor_parallel.ipynb), [solution](../solutions/advanced/12_tensor_parallel.ipynb) |
# | [13 Pipelines](advanced/13_pipelines.ipynb) | run any schedule on four ranks, and predict its bubble, memory and messages | 80 | 75 | [lab](../labs/advanced/13_pipelines.ipynb), [solution](../solutions/advanced/13_pipelines.ipynb) |
# | [14 Three dimensions at once](advanced/14_three_dimensions.ipynb) | compose tensor, pipeline and data parallelism, and count the bytes on every link | 80 | 60 | [lab](../labs/advanced/14_three_dimensions.ipynb), [solution](../solutions/advanced/14_three_dimensions.ipynb) |
# | [15 The design studio](advanced/15_design_studio.ipynb) | say what 130B takes on 64 GPUs, and defend a design in days and dollars | 80 | 60 | [lab](../labs/advanced/15_design_studio.ipynb), [solution](../solutions/advanced/15_design_studio.ipynb) |
# | [16 Runs that survive](advanced/16_runs_that_survive.ipynb) | kill real training at chosen moments, lose nothing, and resume to the last bit | 55 | 80 | [lab](../labs/advanced/16_runs_that_survive.ipynb), [solution](../solutions/advanced/16_runs_that_survive.ipynb) |
# | [16a When a run breaks](advanced/16a_when_a_run_breaks.ipynb) | kill ranks, a host and a link; see who notices, who is to blame, and what it costs | 50 | | lab 16 |
# | [17 On a real cluster](advanced/17_cluster_and_budget.ipynb) | start one script by torchrun and Slurm, and lose a node | 60 | 75 | [lab](../labs/advanced/17_cluster_and_budget.ipynb), [solution](../solutions/advanced/17_cluster_and_budget.ipynb) |
# | [17a What a run costs, and which offer to take](advanced/17a_what_a_run_costs.ipynb) | price a run by the token, and decide between offers | 60 | | |
# | [18 Long contexts](advanced/18_long_contexts.ipynb) | share one sequence of 128k tokens among ranks, and say where its bytes go | 110 | 75 | [lab](../labs/advanced/18_long_contexts.ipynb), [solution](../solutions/advanced/18_long_contexts.ipynb) |
# | [19 Experts](advanced/19_experts.ipynb) | say what a mixture of experts saves and costs, and deal its experts over ranks | 120 | 80 | [lab](../labs/advanced/19_experts.ipynb), [solution](../solutions/advanced/19_experts.ipynb) |
# | [20 Eight bits, and four](advanced/20_eight_bits.ipynb) | say which numbers of a step may take eight bits or four, with which scales | 75 | 70 | [lab](../labs/advanced/20_eight_bits.ipynb), [solution](../solutions/advanced/20_eight_bits.ipynb) |
# | [99 Capstone](advanced/99_capstone.ipynb) | answer nine interview questions, each sentence with its cell, and sit fourteen timed cases | 60 | 280 | [lab](../labs/advanced/99_capstone.ipynb), [solution](../solutions/advanced/99_capstone.ipynb) |
#
# A lab holds exercises that check your answers. Work in a copy: `make my-labs`, typed in a terminal
# in the course's folder, puts the labs into `my_labs/`, which is yours and which no update touches.
#
# ## 7. Glossary
#
# The words of the course stand on a page of their own, the [glossary](00_glossary.ipynb); sayings that are wrong, each with
# the cell that shows it, in the [folklore](00_folklore.ipynb).
