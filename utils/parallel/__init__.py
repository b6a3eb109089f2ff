"""Parallel training, one file per axis: real code, which lessons import and `export` copies.

Names are imported when they are first used, so that `dims` needs no torch.
"""
