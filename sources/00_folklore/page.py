# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Folklore
#
# What people pass on about training memory and clusters, what is right, and the cell that shows it: the pointer over a link
# names that cell. The course begins with [00 Start here](00_start_here.ipynb); the [capstone](advanced/99_capstone.ipynb) asks
# its questions without this page at hand.
#
# ## Memory
#
# | often said | what is right | shown in |
# |---|---|---|
# | memory = 18 x parameters x bytes per parameter | fp32 Adam 16 bytes, mixed 16, or 18 with fp32 gradients | [01](beginner/01_where_memory_goes.ipynb#A-folklore-formula "the folklore, 18 x 4") |
# | mixed precision halves training memory | states stay; activations halve in a large batch; at batch 1 Adam's step decides, and the peak does not move | [02 §3](beginner/02_mixed_precision.ipynb#3.-What-halves,-and-which-moment-decides "ResNet-50 with Adam, one image and several") |
# | checkpoint everything | tiny layers can raise the peak; batch norm's statistics move twice | [05 §3](intermediate/05_checkpointing.ipynb#3.-Where-it-costs-memory "each tiny layer"), [05 §4](intermediate/05_checkpointing.ipynb#4.-What-it-can-break "plain checkpoint") |
# | checkpointing costs 33% | 1.3B on an H200, 4 sequences a step: all blocks take 26% more time, selective 21% (eager PyTorch 2.11) | [05 §6](intermediate/05_checkpointing.ipynb#6.-Scale-up:-1.3-billion-parameters-on-40-GB "gpt1b_recompute") |
# | LoRA trains 0.1% of parameters, so saves 99.9% of memory | of states, yes; weights and activations stay | [06 §2](intermediate/06_seven_billion.ipynb#2.-LoRA-by-hand "LoRA trains") |
# | QLoRA 7B takes 3.5 GB | its weights take 3.9, a step's peak more than three times that | [06](intermediate/06_seven_billion.ipynb#Double-quantization "half a byte a weight"), [06 §5](intermediate/06_seven_billion.ipynb#5.-Seven-billion,-simulated "draw_budget_map") |
# | bitsandbytes is quantization-aware training | the base is frozen | [99](advanced/99_capstone.ipynb#Quantization-aware-training,-or-not "packed weights") |
# | with QLoRA, offload the optimizer | only 0.05 to 0.24 GB can move | [07 §4](intermediate/07_offload.ipynb#4.-DeepSpeed-and-FSDP2 "can move") |
# | `torch.cuda.amp`, `Pipe`, FairScale, Apex amp, AutoGPTQ, AutoAWQ | `torch.amp`, `torch.distributed.pipelining`, FSDP2 and their successors | [02](beginner/02_mixed_precision.ipynb#2.-The-conversion,-by-hand "by_library"), [13](advanced/13_pipelines.ipynb#Seven-schedules-of-PyTorch-compute-the-same "train_pytorch") |
#
# ## Sharding
#
# | often said | what is right | shown in |
# |---|---|---|
# | ZeRO-2 on a single GPU saves memory | a partition by one saves nothing | [09](intermediate/09_sharding.ipynb#1.-The-staircase "textbook") |
# | ZeRO-2 does nothing on one GPU | with optimizer offload the gradients leave too, and 2 bytes a parameter stay | [07 §5](intermediate/07_offload.ipynb#5.-The-scenario-as-asked "gradients leave") |
# | ZeRO-3 partitions activations | states alone | [99](advanced/99_capstone.ipynb#Sharding-and-activations "Category.ACTIVATIONS") |
# | ZeRO-3 needs 16P/N | and gathered layers, prefetch, buckets | [09 §4](intermediate/09_sharding.ipynb#4.-What-each-really-holds "textbook") |
# | a 1B model does not fit an A100 | its states are below 20 GB; activations or logits overflow 80 | [14 §6](advanced/14_three_dimensions.ipynb#6.-One-billion-on-64-GPUs "16 x") |
# | a checkpoint saved over the last one is a checkpoint | a kill destroys both: new folder, verify, rename | [16 §3](advanced/16_runs_that_survive.ipynb#3.-A-save-that-is-cut-off:-what-is-whole-gets-its-name-last "saves_twice") |
#
# ## Clusters
#
# | often said | what is right | shown in |
# |---|---|---|
# | TP 8 x PP 8 x DP 8 on 64 GPUs | that is 512 | [99](advanced/99_capstone.ipynb#4.-Six-more-sayings "dp=8") |
# | each pipeline rank with TP 8 x PP 8 needs ZeRO-1 | on 64 GPUs DP is 1: nothing to partition | [99](advanced/99_capstone.ipynb#4.-Six-more-sayings "DP 1") |
# | 600 GB of states over 64 leave 9.4 GB a GPU, plus parameters | 18 x 175B is 3.15 TB, parameters included: 49 GB | [15 §2](advanced/15_design_studio.ipynb#2.-On-paper "rule * P") |
# | TP = 8 always | BLOOM, 178B, one day: TP 4 151.2 TFLOP/s, TP 8 141.8 | [12 §5](advanced/12_tensor_parallel.ipynb#5.-What-it-costs-in-time "bloom_prequel") |
# | a larger micro-batch is faster | BLOOM: 2 took 207.9 s, 8 took 229.7 | [99](advanced/99_capstone.ipynb#Micro-batch-and-speed "noted") |
# | every stage holds p micro-batches | stage i holds min(m, p - i); the last has the logits | [13 §3](advanced/13_pipelines.ipynb#3.-A-rank-holds-what-is-in-flight "in_flight"), [15 §3](advanced/15_design_studio.ipynb#3.-The-first-layout,-stage-by-stage "by_rules.stages") |
# | stages send little, so the network does not matter | TP 4 x PP 16: every second hop leaves its node | [13](advanced/13_pipelines.ipynb#A-message-between-nodes "hops leave a node") |
# | 52% of peak at 1T is MFU | it counts recomputation; MFU is 39% | [15](advanced/15_design_studio.ipynb#How-far-to-trust-it "one_t") |
# | hidden size is free to choose | BLOOM, one layout: 14400 wide 100 TFLOP/s, 13824 wide 127 | [15](advanced/15_design_studio.ipynb#The-shape-of-the-model "bloom_prequel") |
# | flash attention runs at the matmul rate | a fraction of it, older kernels a smaller | [99](advanced/99_capstone.ipynb#Flash-attention's-rate "flash_flops_per_second") |
# | datasheet TFLOP/s and NVLink 600 GB/s are usable | 87% is an A100's ceiling; 300 GB/s a direction | [15](advanced/15_design_studio.ipynb#The-machines,-without-the-brochure "matmul_ceiling_tflops") |
