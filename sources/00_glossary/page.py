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
# | token, vocabulary | a piece of text, as a language model reads it; all pieces that it knows |
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
# | segment of memory, block | what the caching allocator takes from the driver at once; the part of it that one tensor gets |
# | fragmentation | reserved memory that is free in pieces too small for the next request, in segments that cannot be given back |
# | leak | memory that something keeps from step to step, though nothing will use it |
# | snapshot | a record of the allocator's blocks, segments and history, which PyTorch's memory viewer shows |
# | trace | a record of what ran when, which a trace viewer shows |
# | CUDA context | what NVIDIA's driver and the code of the kernels take on the GPU |
# | autograd | the part of PyTorch that records forward, and computes gradients from the record |
# | hook | a function of yours that PyTorch calls at a set point, such as after a module's forward |
# | dtype | the type of a tensor's numbers, such as fp32 |
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
# | reduce-scatter, all-gather | everyone gets its part of the sum; everyone gets all parts |
# | all-to-all | part i of everyone's tensor goes to rank i |
# | ring, tree | ways to do a collective: parts passed from neighbour to neighbour; whole tensors up and down a tree of pairs |
# | hierarchical | first inside each host, then between hosts |
# | alpha, beta | seconds that a message takes to start, and seconds per byte; latency-bound and bandwidth-bound: which of them is most of it |
# | algbw, busbw | bytes of a collective per second; the same in what a link carried |
# | straggler | the rank that all others wait for |
# | NCCL, gloo | what PyTorch's collectives run on: between GPUs, and between CPUs |
# | NVLink, PCIe | links between GPUs, and between a GPU and its host |
# | InfiniBand, RoCE, RDMA | a network between hosts; its way of sending over Ethernet; writing into another host's memory without its CPU |
# | network namespace | a host's network, made by Linux inside of one machine |
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
# | gradient accumulation | several micro-batches, one after the other, and one optimizer step for all |
# | master weights | the fp32 weights that the optimizer updates, where the model computes with 16-bit copies |
# | flash attention | attention in one kernel that never stores the scores of all pairs of tokens |
# | quantization | store numbers in 8 bits or fewer |
# | 8-bit states | an optimizer state that is quantized |
# | adapter, LoRA | a small trained difference of low rank beside a frozen weight |
# | NF4 | sixteen levels for weights, the quantiles of a normal distribution; a block of 64 shares a scale |
# | double quantization | the scales of blocks are quantized as well, to 8 bits |
# | QLoRA | adapters on weights that are frozen in NF4 |
# | group | neighbouring weights of a row that share a scale and a zero point |
# | zero point | the code that stands for 0 on a grid |
# | absmax | rounding on a grid that the largest magnitude of a row sets |
# | outlier channel | an input of a layer that is many times larger than the others |
# | calibration text | what a method reads to learn which weights matter |
# | GPTQ | round column by column; the columns to come make up for each error |
# | AWQ | widen the columns with large inputs before rounding |
# | perplexity | e to the mean loss of a token: among how many it is in doubt |
# | cache of keys and values, KV cache | what each token leaves in every layer, so that later ones need not compute it again |
# | grouped queries | several query heads share the keys and values of one head |
# | paged cache | a cache that is given out in blocks, as sequences grow |
# | decoding | writing one token after the other |
# | quantization-aware training | rounding in forward, so that weights learn to stand on the grid |
# | merging | adding an adapter's product to the weight, so that one plain layer is left |
# | paged optimizer | a state that the GPU's driver moves to the CPU's memory when the GPU is full |
# | sharding | each device keeps only its part, and fetches the others' parts when it needs them |
# | ZeRO-1, 2, 3 | sharding of the optimizer state, of the gradients too, of the parameters too |
# | FSDP, FSDP2 | PyTorch's sharding of all three, gathered block by block |
# | offload | keep what is not needed now in the CPU's memory or on disk |
# | host, device | the CPU with its memory; the GPU with its own |
# | placement | whether the program puts a tensor in device or host memory |
# | link | the way between host and device, such as PCI Express; or between devices |
# | streaming, prefetch | weights come to the device block by block; the next block comes while this one computes |
# | pinned memory | host memory that the system never moves, so that the GPU copies it at the link's rate |
# | ZeRO-Offload, ZeRO-Infinity | ZeRO with states in host memory; with weights there as well, or on NVMe |
# | NVMe | a fast disk on PCI Express |
# | direct I/O | reading and writing a file past the system's cache |
# | token bucket | a rule that lets bytes through at a steady rate |
# | NUMA | a machine whose processors each have memory of their own, and slower ways to the others' |
# | chunked loss | compute logits and loss for a part of the tokens at a time |
# | fused kernel | one kernel for several operations, without memory for what lies between them |

# %% [markdown]
# ## Layouts over many devices
#
# | term | meaning |
# |---|---|
# | data parallel (DP) | replicas of the model, each on its part of the batch |
# | tensor parallel (TP) | ranks share each matrix and exchange results inside every block |
# | column-parallel, row-parallel | a matrix cut by its outputs; by its inputs, so that each rank's product is a term of a sum |
# | f, g | Megatron's pair at a split layer's edges: a sum over ranks backward only; forward only |
# | sequence parallel | norms and residuals split over the tensor-parallel ranks as well |
# | loss parallel | cross-entropy of logits that are divided by words over ranks, and never gathered |
# | DTensor | a tensor whose parts lie on the ranks of a mesh, with the placements that say how |
# | asynchronous TP | a gather and its product cut into pieces, so that one piece travels while another is multiplied |
# | pipeline parallel (PP) | ranks, the stages, hold different layers and pass activations on |
# | context parallel (CP) | ranks share each sequence; for attention keys and values go around a ring or are gathered, or heads are exchanged (Ulysses) |
# | axis, mesh | one of the ways in which ranks are divided; the box of ranks with a side for each axis |
# | HSDP | states sharded inside a group, such as a node, and replicated between groups |
# | tied embedding | embedding and head are one matrix; with stages, two copies whose gradients are added up |
# | bubble | the time in which a pipeline stage waits |
# | action | one pass of one micro-batch through one stage: 2F0 is stage 2, forward, micro-batch 0 |
# | schedule | the lists of actions that the ranks of a pipeline run, in order |
# | 1F1B, GPipe | schedules: one forward and one backward in turn; all forwards, then all backwards |
# | in flight | micro-batches whose activations a stage holds, from their forward to their backward |
# | zero bubble, ZB-H1 | schedules that run the weights' part of a backward later, in place of waiting |
# | DualPipeV | a schedule in which each rank holds a stage and its mirror, and data goes down and up again |
# | deadlock | ranks that wait for each other in a circle, for ever |
# | interleaving | each stage holds several chunks of layers, which shortens the bubble |
# | FLOP, FLOP/s | one addition or multiplication of floating-point numbers; how many of them a second |
# | MFU, HFU | useful FLOP/s over the peak; with recomputation counted as well |
# | goodput | the share of wall time that is training |
# | scaling law | the loss as a function of parameters and tokens, fitted to many runs |
# | compute-optimal | the size and the tokens that give the lowest loss for so much training |
# | over-training | more tokens than compute-optimal, so that a smaller model serves at less cost |
# | PUE | power of the whole building over that of its machines |
# | board power | the most that a card may draw, by its data sheet |
# | launcher | what starts the ranks on all nodes and tells each its number: torchrun, Slurm, Ray, Kubernetes |
# | rendezvous | how ranks find each other: the address that all of them call first |
# | job, queue | a script with the nodes that it wants; jobs that wait for theirs |
# | requeue | to put a job back into the queue, as after a dead node; it starts anew under its old number |
# | job array | one script as many tasks that differ by a number alone |
# | spot | machines at a lower price, which the provider takes back when it likes |
# | manifest | a file that tells Kubernetes what is to be there |
# | pod | what Kubernetes starts on a node: one container or several; on TPUs, all chips that share one network |
# | container, image | processes with a file system of their own; the file that this file system comes from |
# | par | what the course's own solution or search reaches, beside your score |
# | Pareto front | the plans that no other beats in both time and memory |

# %% [markdown]
# ## Runs that survive
#
# | term | meaning |
# |---|---|
# | failure | what stops a synchronous job: a lost GPU, node or link, or an error of its own |
# | mean time between failures (MTBF) | wall time over the number of failures; falls as the number of nodes grows |
# | saved checkpoint | the state of a run in files; not the activation checkpoints of lesson 05 |
# | safe save | new folder, checksums, to the disk, rename, then remove what is old |
# | resharding | loading on one number of ranks what another number saved |
# | exact resume | going on so that every later loss is the same to the last bit |
# | spare | a node that stands by, and is paid for, until another fails |
# | Young's, Daly's interval | the work between two checkpoints that costs least: about the root of 2 x save time x MTBF |
# | agent | the process of torchrun that starts and watches the ranks of a host |
# | elastic job | one that restarts by itself, also with fewer or more hosts |
# | flight recorder of collectives | the last collectives of each rank, with sizes and lines, for a job that hangs |
# | silent fault | wrong numbers without an error, such as a flipped bit |
# | exporter, alert rule | what serves a host's numbers to Prometheus; when a number is to wake somebody |
