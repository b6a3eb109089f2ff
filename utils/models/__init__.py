"""The models that the lessons train: ResNets and a readable transformer."""

from utils.models.config import TransformerConfig
from utils.models.resnet import resnet, small_resnet
from utils.models.transformer import Transformer

__all__ = ["Transformer", "TransformerConfig", "resnet", "small_resnet"]
