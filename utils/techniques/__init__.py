"""Techniques that save memory or time, one per file, in the form that lessons and simulations share."""

from utils.techniques.data_parallel import (
    DataParallel,
    accumulated_backward,
    average_gradients,
    buckets_of,
    share_start,
)
from utils.techniques.lora import LoraLinear, add_lora
from utils.techniques.quantization import NF4Linear, quantize_linears
from utils.techniques.sharding import shard_batch, sharded_loader

__all__ = [
    "DataParallel",
    "LoraLinear",
    "NF4Linear",
    "accumulated_backward",
    "add_lora",
    "average_gradients",
    "buckets_of",
    "quantize_linears",
    "shard_batch",
    "share_start",
    "sharded_loader",
]
