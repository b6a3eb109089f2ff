"""Published figures of mixtures of experts that the planner's tables do not hold, each with its source."""

from __future__ import annotations

# Parameters in units of 1e9, held and used for a token, as their authors print them.
PARAMETERS = {
    "Mixtral-8x7B": (47.0, 13.0, "arXiv:2401.04088, abstract"),
    "Qwen3-30B-A3B": (30.5, 3.3, "model card of Qwen/Qwen3-30B-A3B"),
    "DeepSeek-V3": (671.0, 37.0, "arXiv:2412.19437, abstract"),
}
