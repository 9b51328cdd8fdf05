"""Stand-in for torchvision: SGLang and transformers import it for image models, which the tests do not use."""

from torchvision import io, transforms

__all__ = ["io", "transforms"]
__version__ = "0.28.0"
