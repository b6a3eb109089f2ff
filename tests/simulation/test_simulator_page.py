"""The page about the simulator: its blocks run as one script, and show what the page says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/simulator.md"


def test_its_blocks_are_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"  # a file, as the simulator reads the line that asks for a value
    script.write_text("\n\n".join(blocks), encoding="utf-8")
    names, printed = runpy.run_path(str(script)), capsys.readouterr().out
    assert "kept beside the model" in str(names["script"]), "the copy is in the peak"
    images = 4 * 60_000 * 784
    assert images <= names["script"].host_bytes < 1.01 * images, "the data set is on the host"
    assert "asks for the value of a tensor" in printed and "values={'loss': 1.0}" in printed
    assert "loss = 1, as values= says" in printed
    told = "a printed loss takes no memory"
    assert names["assumed"].peak_bytes == names["script"].peak_bytes, told
