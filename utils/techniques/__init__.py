"""Techniques that save memory, one per file, in the form that lessons and simulations share."""

from utils.techniques.flight_recorder import FlightRecorder, NonFinite, Shares, StepRecord
from utils.techniques.lora import LoraLinear, add_lora
from utils.techniques.quantization import NF4Linear, quantize_linears

__all__ = [
    "FlightRecorder", "LoraLinear", "NF4Linear", "NonFinite", "Shares", "StepRecord", "add_lora",
    "quantize_linears",
]  # fmt: skip
