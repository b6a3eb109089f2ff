"""Seconds of a step: products, data in motion and messages, added up as a framework overlaps them."""

from utils.planner.step_seconds.total import StepTime, launch_seconds, step_time, time_of_step

__all__ = ["StepTime", "launch_seconds", "step_time", "time_of_step"]
