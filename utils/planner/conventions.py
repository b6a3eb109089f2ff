"""Conventions of precision and buffers: the same plan holds other bytes in other frameworks."""

from __future__ import annotations

from dataclasses import dataclass, fields

from utils.planner.launches import Launches
from utils.rules import one_of, positive, whole

SHARDS = ("bucket", "block", "tensor")


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How one framework stores a parameter's states and a block's activations.

    Attributes:
        name: What `framework` finds it by.
        parameter_bytes: The copy that computes.
        gradient_bytes: Kept from the first backward to the step. Gradients that are only alive
            inside one backward pass are `backward_gradient_bytes`.
        master_bytes: Second, finer copy of the parameters; 0 where there is none.
        moment_bytes: Adam's two moments together.
        bucket_bytes: Per parameter, a lasting communication copy of gradients with dp above 1.
        fixed_buffer_bytes: Reduce and gather buckets of a fixed size, with dp above 1.
        offloaded_gradient_bytes: Per parameter, gradients that go to the host with the optimizer as
            they are reduced, from ZeRO-2 on; 0 where they stay on the device.
        backward_gradient_bytes: Per parameter, gradients that pile up during one backward pass
            before they are added to the lasting ones.
        frees_gradients: Each step ends by freeing the gradients, as `zero_grad()` does.
        dummy_gradients: Gradients are added up inside the products, and one stand-in for each shape
            of a matrix is kept for autograd.
        deferred_heads: Micro-batches for which the gradient of the head's weights is put off; the
            gradients of their logits are kept for it, in 16 bits.
        step_gradient_bytes: Per parameter of the rank's optimizer shard, what the optimizer's step
            takes besides: a finer copy of the gradient, or the square roots of the second moments,
            which PyTorch's AdamW makes for all parameters at once (torch/optim/adam.py, foreach).
        gathered_bytes: Per parameter of a block gathered by ZeRO-3 (its compute type).
        gathered_blocks: Blocks alive at once under ZeRO-3: the one computing and those prefetched.
        keeps_ends: Under ZeRO-3, embedding and head stay gathered from forward to backward, and a
            block's gradients are whole until they are reduced.
        residual_bytes: Width of one element of the residual stream and of block inputs.
        eager_norm: RMSNorm is plain PyTorch, which keeps more than a fused kernel does.
        flash_generation: Of the flash attention that it calls, see `kernels.FLASH`; None for the
            newest that the device runs.
        fused_gate: SwiGLU keeps its two inputs alone; unfused it also keeps silu(gate).
        gathered_inputs: Under sequence parallelism, the share (0 to 1) of inputs of
            column-parallel matrices that are kept gathered instead of gathered again in backward.
        loss_bytes: Per logit on the rank at the peak of the loss, with the logits themselves.
        reduce_bytes: Per parameter, what the data-parallel reduction of gradients sends.
        bucket_size_bytes: Gradients in 16 bits that are reduced in one call.
        shards: What ZeRO shards and gathers in one call: a "bucket", or a "block" or "tensor" whole.
        overlap_gradients, overlap_parameters: Their collectives run behind the last backward pass
            and the first forward pass.
        overlap_tensor: In backward, tensor-parallel collectives run beside the products of weight
            gradients.
        whole_gradients: ZeRO-1 and ZeRO-2 all-reduce the gradients over all replicas, whole, and each
            rank takes its share of them; others reduce-scatter them within the group that shards.
        broadcasts: ZeRO-1 brings parameters back by one broadcast from each rank that holds some,
            a block's at least; others all-gather them.
        one_port: Data-parallel collectives between nodes run at one of the node's network ports'
            rate, whatever the number of ports.
        hides_sends: Interleaved stages send one chunk's activations while they compute the next.
        scattered_sends: Stages send each rank a share and gather it there (Narayanan et al. 2021,
            section 4.1).
        host_seconds: To launch one block's forward and backward pass; the device waits for it
            where its own work is shorter.
        launches: Operations that its eager code launches, in place of `host_seconds`; None where
            kernels are fused, or one call launches many.
        host_exposed: The host waits for the device at every block, so that launching adds to the
            device's time instead of hiding behind it.
        host_meets_stages: Stages send shapes before tensors, and the host reads them before it goes
            on.
        recompute_stops_early: Recomputation of a block ends where its last kept tensor is made
            again, before the last product and the collective that sums it
            (torch/utils/checkpoint.py, early_stop).
        accumulate_bytes: Per parameter and micro-batch, moved to add new gradients to the old.
        fp8_parameters: In a plan of fp8, matrices of blocks are kept and gathered in fp8 alone; where
            it is False, their 16-bit copies stay beside those in fp8.
        vocabulary_multiple: The vocabulary is padded to a multiple of this times tp.
        source: Where this was read.
    """

    name: str
    parameter_bytes: float = 2
    gradient_bytes: float = 4
    master_bytes: float = 4
    moment_bytes: float = 8
    bucket_bytes: float = 0
    fixed_buffer_bytes: float = 0
    offloaded_gradient_bytes: float = 0.0
    backward_gradient_bytes: float = 0
    frees_gradients: bool = False
    dummy_gradients: bool = False
    deferred_heads: int = 0
    step_gradient_bytes: float = 0
    gathered_bytes: float = 2
    gathered_blocks: int = 2
    keeps_ends: bool = False
    residual_bytes: int = 2
    eager_norm: bool = False
    flash_generation: int | None = None
    fused_gate: bool = True
    gathered_inputs: float = 0
    loss_bytes: float = 6
    reduce_bytes: float = 4
    bucket_size_bytes: float = 80e6
    shards: str = "bucket"
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tensor: bool = False
    whole_gradients: bool = False
    broadcasts: bool = False
    one_port: bool = False
    hides_sends: bool = False
    scattered_sends: bool = True
    host_seconds: float = 0.0
    launches: Launches | None = None
    host_exposed: bool = False
    host_meets_stages: bool = False
    recompute_stops_early: bool = False
    accumulate_bytes: float = 0.0
    fp8_parameters: bool = False
    vocabulary_multiple: int = 128
    source: str = ""

    def __hash__(self) -> int:
        """By name: a search asks for the same conventions thousands of times."""
        return hash(self.name)

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown unit of sharding, or fewer bytes or seconds than none."""
        one_of("shards", self.shards, SHARDS)
        sizes = [row.name for row in fields(self) if row.type in ("int", "float")]
        where = f"framework {self.name}"
        positive(where, least=0, **{name: getattr(self, name) for name in sizes})
        whole(
            where,
            gathered_blocks=self.gathered_blocks,
            residual_bytes=self.residual_bytes,
            vocabulary_multiple=self.vocabulary_multiple,
        )

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter of an unsharded rank: 16 for the ZeRO paper's mixed precision."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def optimizer_bytes(self) -> float:
        """Master copy and moments, what ZeRO-1 shards."""
        return self.master_bytes + self.moment_bytes
