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
# The words of the course, by the question that brings them up; the last column leads to the place that shows the thing. The
# course begins with [00 Start here](00_start_here.ipynb). GiB means 2^30 bytes and GB means 10^9 bytes, everywhere.
#
# ## Where do the bytes go?
#
# A step holds tensors of a few kinds. Name the kind before you shrink anything: what helps one kind leaves the others as
# they are.
#
# | term | meaning | shown in |
# |---|---|---|
# | parameters, gradients | the weights that training changes; the derivative of the loss by each of them | [01, section 3](beginner/01_where_memory_goes.ipynb) |
# | optimizer state, moments | what the optimizer keeps for each parameter between steps; Adam's: running means of the gradient and of its square | [01, section 3](beginner/01_where_memory_goes.ipynb) and [06, section 1](intermediate/06_seven_billion.ipynb) |
# | states, model states | parameters, gradients and optimizer state together | [01, section 3](beginner/01_where_memory_goes.ipynb) |
# | activations | what forward keeps because backward will need it | [01, section 4](beginner/01_where_memory_goes.ipynb) |
# | autograd | the part of PyTorch that records forward, and computes gradients from the record | [01, section 4](beginner/01_where_memory_goes.ipynb) |
# | token, vocabulary | a piece of text, as a language model reads it; all pieces that it knows | [01, section 6](beginner/01_where_memory_goes.ipynb) |
# | logits | the scores that the last layer gives to each class or token | [01, section 6](beginner/01_where_memory_goes.ipynb) |
# | buffers | tensors of the model that are not trained, such as running statistics | [01, section 1](beginner/01_where_memory_goes.ipynb) |
# | batch norm | a layer that scales each channel by mean and variance of the batch that it sees, and keeps running ones for evaluation | [04, section 4](beginner/04_four_ranks.ipynb) |
# | temporaries | memory that an operation takes and gives back within one phase | [01, section 3](beginner/01_where_memory_goes.ipynb) |
# | fused kernel, foreach | one kernel for several operations, without memory for what lies between them; an optimizer's operation over all tensors at once, with temporaries as large as all parameters | [10, section 3](intermediate/10_oom_clinic.ipynb) and [01, section 3](beginner/01_where_memory_goes.ipynb) |
# | step, phase | one round of training; its parts: forward, loss, backward, optimizer step | [01, section 1](beginner/01_where_memory_goes.ipynb) |
# | peak | the largest sum of allocations alive at one moment of a step; of a chip, the most FLOP/s that its data sheet promises | [01, section 5](beginner/01_where_memory_goes.ipynb) |

# %% [markdown]
# ## The card is full: of what, and who counts it?
#
# Between a tensor and the card stand PyTorch's allocator and NVIDIA's driver, and each counts other bytes. A simulation
# counts those of a card that you do not have.
#
# | term | meaning | shown in |
# |---|---|---|
# | host, device | the CPU with its memory, or the machine that it is in; the GPU with its own | [07, section 2](intermediate/07_offload.ipynb) |
# | HBM | the large memory of a GPU, where tensors live | [01, section 2](beginner/01_where_memory_goes.ipynb) |
# | GB, GiB | 10^9 and 2^30 bytes; so MB and MiB are 10^6 and 2^20, KB and KiB 10^3 and 2^10 | [01, section 2](beginner/01_where_memory_goes.ipynb) |
# | dtype | the type of a tensor's numbers, such as fp32 | [02, section 2](beginner/02_mixed_precision.ipynb) |
# | storage | the allocation behind a tensor; several tensors (views) can share one | [01, section 4](beginner/01_where_memory_goes.ipynb) |
# | allocator, allocation | the part of PyTorch that hands out device memory to tensors and takes it back; a block of memory from the one moment to the other | [10, section 4](intermediate/10_oom_clinic.ipynb) and [01, section 1](beginner/01_where_memory_goes.ipynb) |
# | reserved | memory that PyTorch holds for reuse, whether or not a tensor uses it | [01, section 2](beginner/01_where_memory_goes.ipynb) |
# | segment | of memory: what the allocator takes from the driver at once, and cuts into blocks for tensors; of a model: several blocks that are checkpointed as one | [10, section 4](intermediate/10_oom_clinic.ipynb) and [05, section 2](intermediate/05_checkpointing.ipynb) |
# | fragmentation | reserved memory that is free in pieces too small for the next request, in segments that cannot be given back | [10, section 4](intermediate/10_oom_clinic.ipynb) |
# | CUDA context | what NVIDIA's driver and the code of the kernels take on the GPU | [01, section 2](beginner/01_where_memory_goes.ipynb) |
# | workspace | memory that a library of kernels, such as cuBLAS or cuDNN, takes to compute in | [02, section 4](beginner/02_mixed_precision.ipynb) |
# | kernel | a program that runs on a GPU; also the Python process behind a notebook | [05a, section 3](intermediate/05a_trusting_simulation.ipynb) |
# | leak | memory that something keeps from step to step, though nothing will use it | [10, section 6](intermediate/10_oom_clinic.ipynb) |
# | hook | a function of yours that PyTorch calls at a set point, such as after a module's forward | [02, section 2](beginner/02_mixed_precision.ipynb) |
# | snapshot, trace | a record of the allocator's blocks, segments and history; a record of what ran when; viewers show either | [10, section 5](intermediate/10_oom_clinic.ipynb) |
# | simulation, dispatch mode | the model's own code on tensors that have shapes and lifetimes, and no data: the bytes of a device that is not there; PyTorch's way to see each operation before its kernel, and so to count | [02, section 1](beginner/02_mixed_precision.ipynb) and [05a, section 2](intermediate/05a_trusting_simulation.ipynb) |

# %% [markdown]
# ## Why did my loss turn to NaN, or stand still?
#
# A number has few bits, and training asks for range and for digits. Look for the first number that broke.
#
# | term | meaning | shown in |
# |---|---|---|
# | fp32, fp16, bf16 | numbers of 4, 2 and 2 bytes; bf16 has the range of fp32 and fewer digits | [03, section 1](beginner/03_when_numbers_break.ipynb) |
# | exponent, mantissa | the bits of a number that give its range, and those that give its digits | [03, section 1](beginner/03_when_numbers_break.ipynb) |
# | overflow, underflow | too large for the format: infinity; too small: zero | [03, section 2](beginner/03_when_numbers_break.ipynb) |
# | NaN | "not a number", the result of infinity minus infinity or 0 times infinity; it spreads | [03, section 2](beginner/03_when_numbers_break.ipynb) |
# | TF32 | products of fp32 tensors whose factors are rounded to 10 binary digits behind the point, on NVIDIA's GPUs from the A100 on; no memory saved | [03, section 1](beginner/03_when_numbers_break.ipynb) and [02, section 4](beginner/02_mixed_precision.ipynb) |
# | mixed precision | most arithmetic in 16-bit numbers, with fp32 where it matters | [02, section 1](beginner/02_mixed_precision.ipynb) |
# | autocast | the part of PyTorch that casts inputs to 16 bits or to fp32, operation by operation | [02, section 2](beginner/02_mixed_precision.ipynb) |
# | master weights, master copy | the fp32 weights that the optimizer updates, where the model computes with 16-bit copies | [02, section 2](beginner/02_mixed_precision.ipynb) and [09, section 1](intermediate/09_sharding.ipynb) |
# | loss scaling, GradScaler | multiply the loss, so that small fp16 gradients do not become 0, and divide before the step; PyTorch's own, which skips steps with infinite gradients and adapts the scale | [02, section 2](beginner/02_mixed_precision.ipynb) and [03, section 3](beginner/03_when_numbers_break.ipynb) |
# | clipping | scaling all gradients down together when their norm exceeds a bound; of weights, cutting off the largest before rounding | [03, section 5](beginner/03_when_numbers_break.ipynb) and [08, *Two methods that look at the inputs*](intermediate/08_smaller_weights.ipynb) |
# | warm-up | first steps that are not yet like the rest: a learning rate that climbs, a pipeline that fills, a run before the clock starts | [03, *Recap*](beginner/03_when_numbers_break.ipynb) and [13, section 4](advanced/13_pipelines.ipynb) |

# %% [markdown]
# ## How does more fit onto one card?
#
# Keep less, compute it again, train fewer weights, or move what is not needed now. Each is paid for in another coin:
# arithmetic, freedom, or bytes over a link.
#
# | term | meaning | shown in |
# |---|---|---|
# | checkpointing, recomputation, selective | keep fewer activations, compute the others again in backward; *selective* keeps the results of expensive operations, and repeats the cheap ones | [05, section 2](intermediate/05_checkpointing.ipynb) |
# | micro-batch, accumulation | a part of the batch; gradients of several parts are added up before the one optimizer step | [04, section 3](beginner/04_four_ranks.ipynb) |
# | chunked loss | logits and loss computed for a part of the tokens at a time | [05, section 5](intermediate/05_checkpointing.ipynb) and [18, section 1](advanced/18_long_contexts.ipynb) |
# | adapter, LoRA, QLoRA | a small trained difference of low rank beside a frozen weight, one that training does not change; in QLoRA the frozen weight is in NF4 | [06, section 2](intermediate/06_seven_billion.ipynb) and [06, section 3](intermediate/06_seven_billion.ipynb) |
# | merging | adding an adapter's product to the weight, so that one plain layer is left | [06, section 4](intermediate/06_seven_billion.ipynb) |
# | offload | keep what is not needed now in the CPU's memory or on disk | [07, section 2](intermediate/07_offload.ipynb) |
# | link | the way between host and device, such as PCI Express; or between devices | [07, section 3](intermediate/07_offload.ipynb) |
# | pinned | host memory that the system never moves, so that the GPU copies it at the link's rate | [07, section 5](intermediate/07_offload.ipynb) |
# | ZeRO-Offload, ZeRO-Infinity | ZeRO with states in host memory; with weights there as well, or on NVMe | [07, section 1](intermediate/07_offload.ipynb) and [07, section 4](intermediate/07_offload.ipynb) |

# %% [markdown]
# ## How few bits may a number have?
#
# Weights that are only read bear four bits, factors of a training step's products eight, sums neither. All hangs on which
# numbers share a scale.
#
# | term | meaning | shown in |
# |---|---|---|
# | quantization | store numbers in 8 bits or fewer, as codes and the scales that turn them back | [06, section 3](intermediate/06_seven_billion.ipynb) |
# | group | of weights: neighbours in a row that share a scale and a zero point, the code that stands for 0; of ranks: those that call a collective together | [08, *Round to nearest*](intermediate/08_smaller_weights.ipynb) and [14, section 1](advanced/14_three_dimensions.ipynb) |
# | block scale | the scale that a few neighbouring numbers share; it takes the largest of them to the format's largest | [20, section 2](advanced/20_eight_bits.ipynb) |
# | outlier | a number or channel many times larger than those that share its scale | [08, *Two methods that look at the inputs*](intermediate/08_smaller_weights.ipynb) and [20, section 2](advanced/20_eight_bits.ipynb) |
# | NF4, double quantization | sixteen levels for weights, the quantiles of a normal distribution, and a scale for each block of 64; these scales in 8 bits as well | [06, section 3](intermediate/06_seven_billion.ipynb) |
# | calibration text | what a method reads to learn which weights matter | [08, *Two methods that look at the inputs*](intermediate/08_smaller_weights.ipynb) |
# | GPTQ, AWQ | ways to round weights: column by column, where the columns to come make up for each error; with the columns of large inputs widened before | [08, *Two methods that look at the inputs*](intermediate/08_smaller_weights.ipynb) |
# | perplexity | e to the mean loss of a token: among how many it is in doubt | [08, *Round to nearest*](intermediate/08_smaller_weights.ipynb) |
# | quantization-aware training | rounding in forward, so that weights learn to stand on the grid | [06, section 3](intermediate/06_seven_billion.ipynb) and [99, section 4](advanced/99_capstone.ipynb) |
# | fp8, E4M3, E5M2 | numbers of 1 byte; E4M3 has one binary digit more, E5M2 more range | [20, section 1](advanced/20_eight_bits.ipynb) |
# | E2M1, E8M0 | a number of 4 bits, with one binary digit behind the point; a scale of 8 bits that can only be a power of two | [20, section 1](advanced/20_eight_bits.ipynb) |
# | MXFP8, NVFP4 | formats whose blocks have scales of their own: 32 numbers of 8 bits under an E8M0; 16 E2M1 under an E4M3, and one fp32 scale for the tensor | [20, section 2](advanced/20_eight_bits.ipynb) |
# | delayed scaling | the scale comes from the largest numbers of past steps, so no extra pass is needed; what has grown since is cut off | [20, *Break it, diagnose it*](advanced/20_eight_bits.ipynb) |

# %% [markdown]
# ## What do several GPUs send each other?
#
# Ranks train one model by a handful of operations that all of them call. What crosses a link depends on the way in which
# they pass the parts on.
#
# | term | meaning | shown in |
# |---|---|---|
# | rank, world size | one process of a group that trains together; how many there are | [04, section 1](beginner/04_four_ranks.ipynb) |
# | node | one machine of a cluster, mostly with 4 or 8 GPUs; also *host* | [12, section 5](advanced/12_tensor_parallel.ipynb) |
# | replica | a whole copy of the model, on one rank or divided over a few | [04, section 1](beginner/04_four_ranks.ipynb) and [14, section 1](advanced/14_three_dimensions.ipynb) |
# | DDP | PyTorch's data parallelism: every rank has the whole model and its share of each batch | [04, section 3](beginner/04_four_ranks.ipynb) |
# | sampler | what deals the items of the data out to the ranks | [04, section 4](beginner/04_four_ranks.ipynb) |
# | collective | an operation that all ranks of a group call together | [04, section 1](beginner/04_four_ranks.ipynb) |
# | all-reduce, broadcast | everyone gets the sum; everyone gets what one rank has | [04, section 1](beginner/04_four_ranks.ipynb) |
# | reduce-scatter, all-gather, all-to-all | everyone gets its part of the sum; everyone gets all parts; part i of everyone's tensor goes to rank i | [11, section 1](advanced/11_links.ipynb) and [19, section 3](advanced/19_experts.ipynb) |
# | payload | the bytes that a rank puts into a collective; what crosses a link depends on the algorithm | [04, section 1](beginner/04_four_ranks.ipynb) |
# | ring, tree | ways to do a collective: parts passed from neighbour to neighbour; whole tensors up and down a tree of pairs | [11, section 1](advanced/11_links.ipynb) |
# | hierarchical | first inside each host, then between hosts | [11, section 3](advanced/11_links.ipynb) |
# | bucket | a flat tensor of many gradients, sent in one call | [04, section 3](beginner/04_four_ranks.ipynb) |
# | no_sync | DDP's way to send nothing in a backward, for all micro-batches but the last | [04, section 3](beginner/04_four_ranks.ipynb) |
# | NCCL, gloo | what PyTorch's collectives run on: between GPUs, and between CPUs | [04, section 1](beginner/04_four_ranks.ipynb) |
# | NVLink, PCIe, NVMe | links between GPUs, and between a GPU and its host; a fast disk on PCIe | [11, section 5](advanced/11_links.ipynb) and [07, section 4](intermediate/07_offload.ipynb) |
# | InfiniBand, RoCE, RDMA | a network between hosts; RDMA over Ethernet; writing into another host's memory without its CPU | [11, section 5](advanced/11_links.ipynb) |
# | NUMA | a machine whose processors each have memory of their own, and slower ways to the others' | [11, section 5](advanced/11_links.ipynb) |

# %% [markdown]
# ## How fast is it, how long does it take, what does it cost?
#
# Eight nodes are seldom eight times as fast as one. First find who waits for what; then seconds become days and dollars.
#
# | term | meaning | shown in |
# |---|---|---|
# | speed-up, efficiency | samples a second of N ranks over those of one; that over N | [04, section 5](beginner/04_four_ranks.ipynb) |
# | bandwidth | bytes a second that a memory or a link carries | [08, *What it buys*](intermediate/08_smaller_weights.ipynb) |
# | alpha, beta, latency-bound, bandwidth-bound | seconds that a message takes to start, and seconds per byte; most of the time is the start; most of it is the bytes | [11, section 2](advanced/11_links.ipynb) |
# | algbw, busbw | bytes of a collective per second; the same in what a link carried | [11, section 5](advanced/11_links.ipynb) |
# | overlap | sending or copying while something else computes | [04, section 3](beginner/04_four_ranks.ipynb) and [11, section 4](advanced/11_links.ipynb) |
# | straggler | the rank that all others wait for | [11, section 6](advanced/11_links.ipynb) |
# | FLOP, FLOP/s | one addition or multiplication of floating-point numbers; how many of them a second | [17a, section 1](advanced/17a_what_a_run_costs.ipynb) and [15, section 3](advanced/15_design_studio.ipynb) |
# | MFU, HFU | useful FLOP/s over the peak; with recomputation counted as well | [15, section 3](advanced/15_design_studio.ipynb) and [17a, section 2](advanced/17a_what_a_run_costs.ipynb) |
# | goodput | the share of wall time that is training, and is not lost again | [16, section 1](advanced/16_runs_that_survive.ipynb) |
# | scaling law, over-training | the loss as a function of parameters and tokens, fitted to many runs; more tokens than give the lowest loss for the training's cost, so that a smaller model serves for less | [17a, section 1](advanced/17a_what_a_run_costs.ipynb) |
# | spot | machines at a lower price, which the provider takes back when it likes | [17a, section 3](advanced/17a_what_a_run_costs.ipynb) |

# %% [markdown]
# ## Which layout is this?
#
# A layout says what is divided: the states, the batch, each matrix, the layers. Read it axis by axis, and ask of each what
# it sends, how often, and over which link.
#
# | term | meaning | shown in |
# |---|---|---|
# | sharding | each device keeps only its part, and fetches the others' parts when it needs them | [09, section 1](intermediate/09_sharding.ipynb) |
# | ZeRO-1, ZeRO-2, ZeRO-3 | sharding of the optimizer state, of the gradients too, of the parameters too | [09, section 1](intermediate/09_sharding.ipynb) |
# | FSDP, FSDP2 | PyTorch's sharding of all three, gathered block by block | [09, section 3](intermediate/09_sharding.ipynb) |
# | HSDP | states sharded inside a group, such as a node, and replicated between groups | [14, section 6](advanced/14_three_dimensions.ipynb) |
# | data parallelism, DP | replicas of the model, each on its part of the batch | [04, section 1](beginner/04_four_ranks.ipynb) and [14, section 1](advanced/14_three_dimensions.ipynb) |
# | tensor parallelism, TP | ranks share each matrix and exchange results inside every block | [12, *Two matrices, one sum*](advanced/12_tensor_parallel.ipynb) and [15, section 1](advanced/15_design_studio.ipynb) |
# | sequence parallel, sequence parallelism | norms and residuals split over the tensor-parallel ranks as well | [12, section 3](advanced/12_tensor_parallel.ipynb) |
# | loss parallel | cross-entropy of logits that are divided by words over ranks, and never gathered | [12, section 4](advanced/12_tensor_parallel.ipynb) |
# | DTensor | a tensor whose parts lie on the ranks of a mesh, with the placements that say how | [12, section 4](advanced/12_tensor_parallel.ipynb) |
# | axis, mesh | one of the ways in which ranks are divided; the box of ranks with a side for each axis | [14, section 1](advanced/14_three_dimensions.ipynb) and [14, section 2](advanced/14_three_dimensions.ipynb) |
# | tied embedding | embedding and head are one matrix; with stages, two copies whose gradients are added up | [14, section 3](advanced/14_three_dimensions.ipynb) |
# | pipeline parallelism, PP, stage | ranks, the stages, hold different layers and pass activations on | [13, section 1](advanced/13_pipelines.ipynb) and [15, section 1](advanced/15_design_studio.ipynb) |
# | schedule, action | the passes that each rank of a pipeline runs, in order (of a learning rate: its value at each step); one such pass: 2F0 is stage 2, forward, micro-batch 0 | [13, section 1](advanced/13_pipelines.ipynb) |
# | bubble | the time in which a pipeline stage waits | [13, section 1](advanced/13_pipelines.ipynb) |
# | in flight | micro-batches whose activations a stage holds, from their forward to their backward | [13, section 3](advanced/13_pipelines.ipynb) |
# | 1F1B, GPipe | schedules: one forward and one backward in turn; all forwards, then all backwards | [13, section 1](advanced/13_pipelines.ipynb) |
# | interleaving, interleaved | each rank holds several chunks of layers, which shortens the bubble and sends more often | [13, section 1](advanced/13_pipelines.ipynb) |
# | zero bubble, ZB-H1 | schedules that run the weights' part of a backward later, in place of waiting | [13, section 1](advanced/13_pipelines.ipynb) |
# | deadlock | ranks that wait for each other in a circle, for ever | [13, *an order that never ends*](advanced/13_pipelines.ipynb) |

# %% [markdown]
# ## How long a text, how many experts?
#
# A longer text grows the activations and, faster, the work; more experts grow the states and leave the work as it is. Both
# end in a question of who sends what to whom.
#
# | term | meaning | shown in |
# |---|---|---|
# | flash attention | attention in one kernel that never stores the scores of all pairs of tokens | [18, section 1](advanced/18_long_contexts.ipynb) |
# | log-sum-exp | the logarithm of a sum of exponentials: by it the softmax of pieces is put together, one piece after the other (*online softmax*) | [18, section 2](advanced/18_long_contexts.ipynb) |
# | context parallelism, CP | ranks share each sequence, and send keys and values, or heads, for attention | [18, *around a ring*](advanced/18_long_contexts.ipynb) and [14, section 2](advanced/14_three_dimensions.ipynb) |
# | ring attention, zigzag | context parallelism in which keys and values go around a ring of ranks; each rank holds a piece from the front of the text and one from the back, so that all have equal work | [18, section 2](advanced/18_long_contexts.ipynb) |
# | Ulysses | context parallelism in which ranks exchange tokens for heads, attend, and exchange back | [18, section 3](advanced/18_long_contexts.ipynb) |
# | packed documents | several texts in one row, each with a mask and positions of its own | [18, section 4](advanced/18_long_contexts.ipynb) |
# | cache of keys and values, grouped queries | what each token leaves in every layer, so that later ones need not compute it again; several query heads share the keys and values of one, which makes it smaller | [08, *What it buys*](intermediate/08_smaller_weights.ipynb) and [12, section 2](advanced/12_tensor_parallel.ipynb) |
# | mixture of experts, expert | a layer with many feed-forward layers in place of one, of which each token uses a few; one of them | [19, section 1](advanced/19_experts.ipynb) |
# | router, top-k | the small matrix that scores the experts for each token; the choice of the k with the highest scores | [19, section 2](advanced/19_experts.ipynb) |
# | dispatch, combine | sending each token's vector to its experts; adding up what comes back | [19, section 2](advanced/19_experts.ipynb) |
# | capacity, dropless | how many tokens an expert takes in a step, beyond which they are dropped; without such a limit | [19, section 4](advanced/19_experts.ipynb) |
# | auxiliary loss | a term of the loss that grows where a few experts get most of the tokens | [19, section 4](advanced/19_experts.ipynb) |
# | expert parallelism, EP | ranks hold different experts, and tokens travel to theirs and back | [19, section 3](advanced/19_experts.ipynb) and [19, section 5](advanced/19_experts.ipynb) |

# %% [markdown]
# ## What starts a job, and what survives a failure?
#
# On many machines something breaks before a long run ends. It survives by what it saved, by what notices, and by what
# starts it anew.
#
# | term | meaning | shown in |
# |---|---|---|
# | launcher | what starts the ranks on all nodes and tells each its number: torchrun, Slurm, Ray, Kubernetes | [17, section 1](advanced/17_cluster_and_budget.ipynb) |
# | agent, rendezvous | the process of torchrun that starts and watches the ranks of a host; how the agents find each other: the address that all of them call first | [16a, section 1](advanced/16a_when_a_run_breaks.ipynb) |
# | job, queue, requeue | a script with the nodes that it wants; jobs that wait for theirs; to put a job back there, as after a dead node | [17, section 1](advanced/17_cluster_and_budget.ipynb) and [17, section 2](advanced/17_cluster_and_budget.ipynb) |
# | container, pod | processes with a file system of their own; what Kubernetes starts on a node, one container or several (on TPUs, all chips that share one network) | [17, section 5](advanced/17_cluster_and_budget.ipynb) |
# | failure, mean time between failures | what stops a synchronous job: a lost GPU, node or link, or an error of its own; wall time over their number (MTBF), less with more nodes | [16, section 1](advanced/16_runs_that_survive.ipynb) |
# | checkpoint | the state of a run in files; in lesson 05, a block whose activations are computed again | [16, section 2](advanced/16_runs_that_survive.ipynb) and [05, section 1](intermediate/05_checkpointing.ipynb) |
# | DCP | PyTorch's distributed checkpoint: each rank writes its own file, and another number of ranks can read them | [16, section 2](advanced/16_runs_that_survive.ipynb) |
# | checksum | a number made of all bytes of a file or tensor, which tells whether one has changed | [16, section 3](advanced/16_runs_that_survive.ipynb) and [16a, section 4](advanced/16a_when_a_run_breaks.ipynb) |
# | exact resume | going on so that every later loss is the same to the last bit | [16, section 4](advanced/16_runs_that_survive.ipynb) |
# | Daly | whose formula gives the goodput of a save interval; by Young's shorter one the best is about the root of 2 x save time x MTBF | [16, section 1](advanced/16_runs_that_survive.ipynb) |
# | spare | a node that stands by, and is paid for, until another fails | [15, section 5](advanced/15_design_studio.ipynb) |
# | timeout | how long a collective may wait until the job ends with an error | [16a, section 1](advanced/16a_when_a_run_breaks.ipynb) |
# | flight recorder | a record of the last things before a fault: in PyTorch the last collectives of each rank, in lesson 03 each step's loss, scale and norm | [16a, section 3](advanced/16a_when_a_run_breaks.ipynb) and [03, section 3](beginner/03_when_numbers_break.ipynb) |
