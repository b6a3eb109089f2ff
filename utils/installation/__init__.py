"""The set-up behind `utils/install.py`: Python's standard library alone, nothing of `utils`.

pip installs `uv`, and `uv` the rest. Ours are the choice of PyTorch's build and a sentence for what goes wrong.
"""
