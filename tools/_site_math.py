"""A Sphinx extension: formulas as MathML, which browsers draw themselves, with no script."""

from __future__ import annotations

import importlib
from typing import Any

from docutils import nodes

convert = importlib.import_module("latex2mathml.converter").convert


def inline(translator: Any, node: nodes.math) -> None:
    """A formula within a line."""
    translator.body.append(f'<span class="math">{convert(node.astext())}</span>')
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    """A formula of its own line."""
    formula = convert(node.astext(), display="block")
    translator.body.append(f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
