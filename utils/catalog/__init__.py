"""Published facts: model shapes, devices, links and dated prices, every figure with its source.

Pure Python: nothing here needs torch or numpy.
"""

from utils.catalog.devices import DEVICES, Device, device
from utils.catalog.links import LINKS, SUSTAINED, Link, Sustained, link
from utils.catalog.models import MODELS, RESNET_PARAMETER_COUNTS, model_shape
from utils.catalog.prices import Price, old_prices, price, price_table, read_prices
from utils.catalog.shapes import ModelShape
from utils.checked import check_public

__all__ = [
    "DEVICES",
    "LINKS",
    "MODELS",
    "RESNET_PARAMETER_COUNTS",
    "SUSTAINED",
    "Device",
    "Link",
    "ModelShape",
    "Price",
    "Sustained",
    "device",
    "link",
    "model_shape",
    "old_prices",
    "price",
    "price_table",
    "read_prices",
]

check_public(globals())
