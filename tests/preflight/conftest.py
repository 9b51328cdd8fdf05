"""The model and the data that the arguments' tests have."""

from arguments.conftest import data, model

__all__ = ["data", "model"]
