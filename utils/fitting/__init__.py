"""Your own model on a card: does it fit, where do the bytes go, what would make it fit, and the script."""

from utils.fitting.model_configs import (
    ModelConfigError,
    auto_class,
    model_config,
    model_names,
    published_parameters,
)
from utils.fitting.model_fit import Fit, fit_model
from utils.fitting.recipe import Recipe, mixed_precision
from utils.fitting.step_fit import fit
from utils.fitting.train_script import script
from utils.fitting.trials import Trials
from utils.fitting.verdict import FitVerdict

__all__ = [
    "Fit",
    "FitVerdict",
    "ModelConfigError",
    "Recipe",
    "Trials",
    "auto_class",
    "fit",
    "fit_model",
    "mixed_precision",
    "model_config",
    "model_names",
    "published_parameters",
    "script",
]
