"""What proves the engine: published tables beside it, records of named devices, speeds.

It imports `utils`, and `utils` never imports it, except by name where a lesson asks for a table.
"""
