"""Techniques that save memory, one per file, in the form that lessons and simulations share."""

from utils.techniques.finetune import METHODS, build_finetune, finetune_step
from utils.techniques.library import has_bitsandbytes
from utils.techniques.lora import LoraLinear, add_lora, merge_lora
from utils.techniques.nf4 import DoubleQuantized, dequantize_nf4, nf4_levels, quantize_nf4
from utils.techniques.optimizers import adam_state_bytes, adamw_8bit, optimizer_bytes
from utils.techniques.quantization import NF4Linear, quantize_linears

__all__ = [
    "METHODS",
    "DoubleQuantized",
    "LoraLinear",
    "NF4Linear",
    "adam_state_bytes",
    "adamw_8bit",
    "add_lora",
    "build_finetune",
    "dequantize_nf4",
    "finetune_step",
    "has_bitsandbytes",
    "merge_lora",
    "nf4_levels",
    "optimizer_bytes",
    "quantize_linears",
    "quantize_nf4",
]
