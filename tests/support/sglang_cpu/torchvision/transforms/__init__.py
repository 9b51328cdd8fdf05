from enum import Enum

from torchvision.transforms import functional, v2

__all__ = ["InterpolationMode", "functional", "v2"]

class InterpolationMode(Enum):
    """torchvision's names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise RuntimeError(f"torchvision.transforms.{name} is not here")

    return missing
