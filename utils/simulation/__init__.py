"""Simulated devices and worlds: the same model code on tensors without data."""

from utils.checked import check_public
from utils.simulation.errors import SimulationError
from utils.simulation.extrapolation import extrapolate
from utils.simulation.simulator import simulate
from utils.simulation.sweeps import sweep

__all__ = ["SimulationError", "extrapolate", "simulate", "sweep"]

check_public(globals())
