"""The generic decoder computes any causal LM of transformers with the modules and caches of transformers. The generic
decoder runs the models for which there is no fast decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from slimelite.engines.embedded.caches import token_bytes
from slimelite.engines.embedded.gated_delta import HybridPasses, is_fast_hybrid
from slimelite.engines.embedded.model import Linear
from slimelite.engines.embedded.passes import Passes
from slimelite.engines.embedded.ways import NotComputed, Rows, Ways, ways_of
from slimelite.engines.embedded.weights import Weights, load_model
from slimelite.models.files import as_filed, saved_buffers

# number of tokens in the pass that measures the memory per token
TRIAL = 4
# the most prompt tokens in one pass, if tokens may follow cached tokens or several prompts have the same length
PREFILL_TOKENS = 1024
# the same limit, and the most tokens of a chunk, for layers of Mamba-2 on a CPU. For each chunk of each row,
# transformers' scan makes tensors of chunk x chunk x heads x width numbers, and new memory is slow. With 16 rows of 64
# tokens it took half of all seconds of Mamba-2, and 6/7 of Bamba's, whose chunks have 256 tokens
SCAN_TOKENS, SCAN_CHUNK = 128, 64


class GenericDecoder(Weights):
    """A model, its forward ``passes``, and ``ways``: how these passes may be computed.

    ``vocab_size``: the number of rows of the model's embedding. ``context``: the largest length of a sequence [tokens];
    None if the config has no limit. ``prefill_tokens``: the largest number of prompt tokens that several rows may have
    together in one pass.
    """

    def __init__(
        self, model_path: str, config: PretrainedConfig, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__(device)
        self.ways: Ways = ways_of(config)
        self.dtype = dtype
        model = load_model(model_path, config, dtype, seed, self.ways.attention)
        self.model = model.eval().requires_grad_(False).to(device)
        # the passes are made first, because this step merges some weights into larger weights
        self.passes = HybridPasses(model) if is_fast_hybrid(config, device, dtype) else Passes(model)
        text = config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        own = {**dict(model.named_parameters()), **saved_buffers(model)}
        self._storage = list(own.values())
        with _Views():
            self._targets = as_filed(model, own)
        storages = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
        if apart := [name for name, part in self._targets.items() if part.untyped_storage().data_ptr() not in storages]:
            raise NotComputed(
                config.model_type,
                f"the weight {apart[0]} of its files is converted when it is loaded, so weight updates cannot write it",
            )
        names = {tensor.data_ptr(): name for name, tensor in own.items() if name in self._targets}
        tied = ((name, names.get(tensor.data_ptr())) for name, tensor in model.state_dict().items())
        self._complete({name: first for name, first in tied if first not in (None, name) and name not in own})
        self.prefill_tokens = SCAN_TOKENS if device.type == "cpu" and _in_small_chunks(model) else PREFILL_TOKENS
        if device.type == "cpu" and dtype == torch.float32:
            _pack(model)

    @torch.inference_mode()
    def cache_tokens(self, free: int) -> tuple[int, int]:
        """(number of tokens that fit into ``free`` bytes, memory of the states of one row counted in tokens)."""
        if self.ways.rows is Rows.WHOLE:
            # no cache is kept, because the cache of this family may be wrong; but each step has the logits of all
            # tokens in memory
            return free // (4 * self.vocab_size), 1
        _, cache = self.passes.extend(torch.zeros(1, TRIAL, dtype=torch.long, device=self.model.device), None, 0)
        each, row = (0, 0) if cache is None else token_bytes(cache, TRIAL)
        # if a token takes no memory, the unit of memory is the states of one row
        return (free // each, math.ceil(row / each)) if each else (free // max(row, 1), 1)


class _Views(TorchFunctionMode):
    """Keeps parts of a tensor as views of the tensor. Without this, transformers 5.23 copies each half of a layer's
    experts."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _in_small_chunks(model: nn.Module) -> bool:
    """Let Mamba-2's layers compute at most ``SCAN_CHUNK`` tokens at once. False if there are no such layers."""
    mixers: list[Any] = [part for part in model.modules() if hasattr(part, "A_log") and hasattr(part, "chunk_size")]
    for mixer in mixers:
        mixer.chunk_size = min(mixer.chunk_size, SCAN_CHUNK)
    return bool(mixers)


def _pack(model: nn.Module) -> None:
    """Replace large plain layers by `Linear`, which multiplies faster."""
    for module in chain(model.modules()):
        if type(module) is nn.Linear:
            packed = Linear(module.weight, module.bias)
            if packed.packs:
                module.forward = packed  # type: ignore[method-assign,assignment]
