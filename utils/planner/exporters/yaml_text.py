"""YAML as people write it: keys in their order, several lines as a block."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """SafeDumper quotes whatever another reader could take for something else."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(found: dict[str, Any]) -> str:
    """One YAML document."""
    return yaml.dump(found, Dumper=_Dumper, sort_keys=False, width=100)
