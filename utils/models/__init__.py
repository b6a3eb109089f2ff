"""The models that the lessons train: ResNets and a readable transformer."""

from utils.models.config import TransformerConfig
from utils.models.pretrained import BaseModelError, llama_config, load_base
from utils.models.resnet import resnet
from utils.models.transformer import Transformer

__all__ = [
    "BaseModelError",
    "Transformer",
    "TransformerConfig",
    "llama_config",
    "load_base",
    "resnet",
]
