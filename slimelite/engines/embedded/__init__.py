"""The embedded engine: continuous batching over Hugging Face weights in this process."""

from slimelite.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
