"""slimelite: slime's command line for reinforcement learning of language models, in plain PyTorch."""

__version__ = "0.1.0"
