"""The models that the lessons train: ResNets, a readable transformer, a small U-Net."""

from utils.models.config import TransformerConfig
from utils.models.resnet import resnet, small_resnet
from utils.models.transformer import Transformer
from utils.models.unet import UNet

__all__ = ["Transformer", "TransformerConfig", "UNet", "resnet", "small_resnet"]
