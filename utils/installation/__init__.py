"""The set-up behind `utils/install.py`: Python's standard library alone, nothing of `utils`.

It runs before anything is installed. `uv` installs the packages, `pip` only `uv`; what is ours is
the choice of PyTorch's build, the checks, and a sentence for whatever goes wrong.
"""
