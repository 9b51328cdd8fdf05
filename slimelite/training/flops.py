"""Floating-point operations of a model's forward pass, counted from its weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slimelite.training.model import LanguageModel


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """A multiply and an add for each element of a weight matrix and each token it meets.

    ``per_token``: of the matrices between embedding and head; ``per_target``: of the head, which only positions of the
    response reach; ``per_pair``: of scores and values, for each token and each that it attends to. Norms, activations
    and rotary embeddings are left out, as is usual (arXiv:2001.08361, section 2.1). A backward pass costs twice a
    forward pass; what is recomputed for it is not counted.
    """

    per_token: float
    per_target: float
    per_pair: float

    @classmethod
    def of(cls, model: LanguageModel) -> ForwardFlops | None:
        """Of a dense model; None for a mixture of experts, of which a token meets a part."""
        config = model.hf.config.get_text_config()
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        head = model.hf.get_output_embeddings().weight
        outer = {id(head), id(model.hf.get_input_embeddings().weight)}
        matrices = sum(p.numel() for _, p in model.named_weights() if p.ndim == 2 and id(p) not in outer)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_hidden_layers * config.num_attention_heads * head_dim
        return cls(2.0 * matrices, 2.0 * head.numel(), 4.0 * width)

    def total(self, lengths: np.ndarray, targets: np.ndarray) -> float:
        """Of rows with ``lengths`` [n] tokens, ``targets`` [n] of them in the response; attention is causal."""
        lengths = lengths.astype(np.float64)
        pairs = lengths * (lengths + 1) / 2
        return float((self.per_token * lengths + self.per_target * targets + self.per_pair * pairs).sum())
