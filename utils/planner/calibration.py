"""Every constant that was set by looking at measurements, and nothing else.

Each has a physical meaning, the rows that it was set on, and its value. Never one per row or table;
`utils.validation` reports on all rows, and on those that were not used apart.
"""

from __future__ import annotations

from utils.units import GB, MIB

# Gaps between blocks, as a share of what the allocator hands out and takes back within a step
# (activations, logits, temporaries). Lasting bytes are allocated once and leave no gaps.
# Set on the even lines of the Ultra-Scale sweep (reserved over predicted bytes).
FRAGMENTATION = 0.13

# CUDA's context, loaded kernels and NCCL's buffers: what nvidia-smi shows beyond the allocator.
# Set on the BLOOM prequel rows of 2022-02-17 to 02-20 (A100, CUDA 11, many NCCL communicators).
CONTEXT_BYTES = 6 * GB

# Not fitted: two workspaces of cuBLAS, PyTorch's and Transformer Engine's, of 32 MiB each
# (PyTorch documentation, CUBLAS_WORKSPACE_CONFIG=:4096:8).
WORKSPACE_BYTES = 2 * 32 * MIB
