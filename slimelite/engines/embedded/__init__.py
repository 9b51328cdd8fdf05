"""The embedded engine: continuous batching in this process, with Hugging Face weights."""

from slimelite.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
