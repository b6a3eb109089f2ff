"""The models that the lessons train: ResNets, a readable transformer, a small U-Net."""

from utils.checked import check_public
from utils.models.config import TransformerConfig
from utils.models.pretrained import BaseModelError, llama_config, load_base
from utils.models.resnets import resnet, small_resnet
from utils.models.transformer import Transformer
from utils.models.unet import UNet

__all__ = [
    "BaseModelError",
    "Transformer",
    "TransformerConfig",
    "UNet",
    "llama_config",
    "load_base",
    "resnet",
    "small_resnet",
]

check_public(globals())
