"""Forward passes of any causal LM of transformers, with the model's own cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from slimelite.engines.embedded.caches import COLUMNS, LayerCache, tensors

# names of the cache in the arguments and results of models; the first name is used since transformers 5.24
CACHES = ("cache", "past_key_values", "cache_params")
# attributes of modules that keep their state in the module and not in a cache, as in RecurrentGemma
KEPT = ("conv1d_state", "recurrent_states")


class Passes:
    """The forward pass of ``model`` over rows of token ids. Logits are fp32."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._device = model.device
        self._takes = inspect.signature(model.forward).parameters
        self._cache = next((name for name in CACHES if name in self._takes), "")
        modules = model.modules()
        self._keepers = [(module, name) for module in modules for name in KEPT if name in vars(module)]
        # DeepSeek-V4 returns a cache only if it gets one, and MiniMax accepts only a cache that it made itself
        self._gives_cache = bool(self._keepers)

    def whole(self, ids: Tensor, last: int = 0) -> Tensor:
        """[n, tokens, vocab] logits of ``ids`` [n, tokens]. ``last``: how many tokens at the end of a row get logits;
        0: all tokens."""
        options = {"logits_to_keep": last} if "logits_to_keep" in self._takes else {}
        logits: Tensor = self.model(input_ids=ids, use_cache=False, **options).logits
        return logits[:, -last:].float()

    def extend(self, ids: Tensor, cache: Any, start: int) -> tuple[Tensor, Any]:
        """Compute ``ids`` [n, tokens] after the ``start`` tokens that each row has in ``cache``. ``cache`` is None if
        ``start`` is 0.

        Returns:
            [n, vocab] logits after the last token, and the cache with all tokens (None if the model has no cache).
        """
        return self._pass(ids, cache, None, start)

    def decode(self, ids: Tensor, cache: Any, lengths: Tensor, width: int) -> tuple[Tensor, Any]:
        """Compute one more token for each row of ``cache``: ``ids`` [n, 1]. In the cache, shorter rows have padding in
        front.

        Args:
            lengths: [n] tokens of each row in the cache. width: tokens of the longest row.
        """
        if bool((lengths == width).all()) or not any(name in COLUMNS for name, _ in tensors(cache)):
            return self._pass(ids, cache, None, width)
        return self._pass(ids, cache, lengths, width)

    def _pass(self, ids: Tensor, cache: Any, lengths: Tensor | None, width: int) -> tuple[Tensor, Any]:
        count = ids.shape[1]
        # positions are passed explicitly, because Bamba would count from 0 even after cached tokens
        positions = torch.arange(width, width + count).expand(len(ids), -1)
        options: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
        if lengths is not None:
            options["attention_mask"] = (
                (torch.arange(width + count) >= width - lengths[:, None]).long().to(self._device)
            )
            positions = lengths[:, None]
        options["position_ids"] = positions.to(self._device)
        if cache is None and self._gives_cache:
            cache = DynamicCache(config=self.model.config)
        if self._keepers:
            cache = self._given_back(cache)
        if cache is not None:
            options[self._cache] = cache
        options = {name: value for name, value in options.items() if name in self._takes}
        output = self.model(input_ids=ids, **options)
        result = next((output[name] for name in CACHES if output.get(name) is not None), None)
        if result is None and self._cache == "past_key_values" and not self._gives_cache:
            self._gives_cache = True
            return self._pass(ids, cache, lengths, width)
        if self._keepers:
            result = _Kept(cache, [getattr(module, name) for module, name in self._keepers])
        return output.logits[:, -1].float(), result

    def _given_back(self, cache: Any) -> Any:
        """Put the states of a `_Kept` back into the modules; if ``cache`` is new, clear their states. Returns the
        model's cache."""
        states = cache.states if isinstance(cache, _Kept) else [None] * len(self._keepers)
        for (module, name), state in zip(self._keepers, states, strict=True):
            setattr(module, name, state)
        return cache.cache if isinstance(cache, _Kept) else cache


class _Kept(LayerCache):
    """The cache of a model, and the states that its modules keep themselves."""

    def __init__(self, cache: Any, states: list[Tensor]) -> None:
        self.cache, self.states = cache, states
