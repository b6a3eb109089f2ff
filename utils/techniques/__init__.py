"""Techniques that save memory, one per file, in the form that lessons and simulations share."""

from utils.techniques.lora import LoraLinear, add_lora
from utils.techniques.quantization import NF4Linear, quantize_linears

__all__ = ["LoraLinear", "NF4Linear", "add_lora", "quantize_linears"]
