# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Glossary
#
# The words of the course, by subject. The course begins with [00 Start here](00_start_here.ipynb).
# GiB means 2^30 bytes and GB means 10^9 bytes, everywhere.
#
# ## What the bytes are there for
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
# ## Memory and its counters
#
# | term | meaning |
# |---|---|
# | allocator | the part of PyTorch that hands out device memory to tensors and takes it back |
# | allocation | a block of device memory, from the moment it is handed out until it is given back |
# | storage | the allocation behind a tensor; several tensors (views) can share one |
# | peak | the largest sum of allocations alive at one moment of a step |
# | simulation | the model's own code on tensors that have shapes and lifetimes, and no data: the bytes of a device that is not there |
# | step, phase | one round of training; its parts: forward, loss, backward, optimizer step |
# | HBM | the large memory of a GPU, where tensors live |
# | reserved | memory that PyTorch holds for reuse, whether or not a tensor uses it |
# | CUDA context | what NVIDIA's driver and the code of the kernels take on the GPU |
# | kernel | a program that runs on a GPU; also the Python process behind a notebook |
# | fp32, fp16, bf16 | numbers of 4, 2 and 2 bytes; bf16 has the range of fp32 and fewer digits |
# | KB, MB, GB | 10^3, 10^6, 10^9 bytes |
# | KiB, MiB, GiB | 2^10, 2^20, 2^30 bytes |

# %% [markdown]
# ## Several ranks
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
# ## Numbers and techniques
#
# | term | meaning |
# |---|---|
# | mixed precision | most arithmetic in 16-bit numbers, with fp32 where it matters |
# | autocast | the part of PyTorch that casts inputs to 16 bits, operation by operation |
# | cast weights | the 16-bit copies of weights that autocast makes and keeps until backward has used them |
# | swallowed update | an update so small beside its weight that their sum rounds to the old weight |
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
# ## Layouts over many devices
#
# | term | meaning |
# |---|---|
# | data parallel (DP) | replicas of the model, each on its part of the batch |
# | tensor parallel (TP) | ranks share each matrix and exchange results inside every block |
# | sequence parallel | norms and residuals split over the tensor-parallel ranks as well |
# | pipeline parallel (PP) | ranks, the stages, hold different layers and pass activations on |
# | context parallel (CP) | ranks share each sequence, and gather keys and values for attention |
# | axis, mesh | one of the ways in which ranks are divided; the box of ranks with a side for each axis |
# | HSDP | states sharded inside a group, such as a node, and replicated between groups |
# | tied embedding | embedding and head are one matrix; with stages, two copies whose gradients are added up |
# | bubble | the time in which a pipeline stage waits |
# | 1F1B, GPipe | schedules: one forward and one backward in turn; all forwards, then all backwards |
# | interleaving | each stage holds several chunks of layers, which shortens the bubble |
# | MFU, HFU | useful FLOP/s over the peak; with recomputation counted as well |
# | goodput | the share of wall time that is training |
# | Pareto front | the plans that no other beats in both time and memory |
