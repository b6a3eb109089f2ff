"""Every constant that was set by looking at measurements, and nothing else.

Each has a physical meaning, the rows that it was set on, and its value. Never one per row or table;
`evidence.validation` reports on all rows, and on those that were not used apart.
"""

from __future__ import annotations

from utils.units import GB, MIB

# Gaps between blocks, as a share of what the allocator hands out and takes back within a step
# (activations, logits, temporaries). Lasting bytes are allocated once and leave no gaps.
# Set on the even lines of the Ultra-Scale sweep (reserved over predicted bytes).
FRAGMENTATION = 0.13

# The same on one GPU alone, where no collective's stream holds a block longer than its tensor lives.
# Set on the even lines of PEFT's method comparison.
FRAGMENTATION_ALONE = 0.02

# Buffers of one NCCL communicator. CUDA's context is 0.6 GB (not fitted: between the catalog's 500
# and 768 MiB, since bytes are asked without a device); together they are what nvidia-smi shows
# beyond the allocator. Set on the BLOOM prequel rows of 2022-02-17 to 02-20, which run eight
# communicators: world, tensor, data, model and pipeline groups, embedding, and a pair with each
# neighbouring stage.
COMMUNICATOR_BYTES = 0.67 * GB
CUDA_CONTEXT_BYTES = 0.6 * GB

# Not fitted: two workspaces of cuBLAS, PyTorch's and Transformer Engine's, of 32 MiB each
# (PyTorch documentation, CUBLAS_WORKSPACE_CONFIG=:4096:8).
WORKSPACE_BYTES = 2 * 32 * MIB

# Time. All of what follows was set on Korthikanti's Table 5 and on the even lines of the Ultra-Scale
# sweep with 15% MFU or more, of the BLOOM prequel's seconds, of llm-foundry (A100 and H100) and of
# SimuMax's B200. BESIDE_TRAINING, CALL_SECONDS, CONTENTION and the three shares of matrix products
# were set together: the least mean of the six sources' mean errors on these lines, none of which may
# be above what it was with the collectives' former formulas. The objective is flat: searches from
# other starts end within 1% of its value here, with CONTENTION up to 0.43 and CALL_SECONDS up to
# 41e-6. Of these ends the one was kept at which layouts of the whole sweep are also chosen best.

# Matrix products inside a training step, beside the fastest product ever measured on the device:
# clocks fall under the power limit, most of all on Hopper and Blackwell.
AMPERE_SUSTAINED = 0.95
HOPPER_SUSTAINED = 0.735
BLACKWELL_SUSTAINED = 0.61

# The same in fp8, beside 16 bits: a product of half the width takes less than half the energy, so that
# the power limit lowers clocks less. One share for Hopper and Blackwell. Set on the even lines of
# NVIDIA's rates of Llama 3 in fp8 (Megatron-Bridge).
FP8_SUSTAINED = 1.15

# Products whose shapes tensor cores refuse, beside the peak of the vector units.
VECTOR_SUSTAINED = 0.5

# Kernels that only move data, beside the memory's peak bandwidth.
MEMORY_SUSTAINED = 0.84

# Collectives and sends inside a training step, beside what the same collective reaches alone
# (`catalog.SUSTAINED`, which has a published source for each kind of link): ranks do not arrive
# together, messages are of tens of megabytes, and other kernels hold multiprocessors and memory.
BESIDE_TRAINING = 0.705

# To start one collective: launching its kernels and meeting the other ranks.
CALL_SECONDS = 32e-6

# Compute loses this share of the seconds of collectives that run behind it: their kernels hold
# multiprocessors and memory bandwidth.
CONTENTION = 0.38

# Host time to launch one block's forward and backward pass in a framework of plain Python: the
# least that a block takes in the sweep's layouts with one stage.
HOST_SECONDS = 4.5e-3

# What each rank of a tensor-parallel group adds to that where stages on several nodes make the host
# wait for the device, so that it has no lead in which to hide that ranks arrive one after another.
ARRIVAL_SECONDS = 2.0e-3
