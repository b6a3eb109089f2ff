"""Simulated devices and worlds: the same model code on tensors without data."""

from utils.checked import check_public
from utils.simulation.errors import SimulationError
from utils.simulation.extrapolate import extrapolate
from utils.simulation.simulate import simulate
from utils.simulation.sweep import sweep

__all__ = ["SimulationError", "extrapolate", "simulate", "sweep"]

check_public(globals())
