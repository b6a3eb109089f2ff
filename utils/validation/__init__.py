"""Predicted against published: what the planner and the simulator say beside what was measured."""
