"""Forward passes of any causal LM of transformers, with the model's own cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slimelite.engines.embedded.caches import COLUMNS, tensors

# names of the cache among the arguments and results of models; the first one since transformers 5.24
CACHES = ("cache", "past_key_values", "cache_params")


class Passes:
    """The forward pass of ``model`` over rows of token ids. Logits are fp32."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._device = model.device
        self._takes = inspect.signature(model.forward).parameters
        self._cache = next((name for name in CACHES if name in self._takes), "")

    def whole(self, ids: Tensor, last: int = 0) -> Tensor:
        """[n, tokens, vocab] logits of ``ids`` [n, tokens]. ``last``: only of this many last tokens; 0 for all."""
        options = {"logits_to_keep": last} if "logits_to_keep" in self._takes else {}
        logits: Tensor = self.model(input_ids=ids, use_cache=False, **options).logits
        return logits[:, -last:].float()

    def extend(self, ids: Tensor, cache: Any, start: int) -> tuple[Tensor, Any]:
        """Compute ``ids`` [n, tokens] after the ``start`` tokens that each row has in ``cache``. ``cache`` is None if
        there are none.

        Returns:
            [n, vocab] logits after the last token, and the cache with all tokens (None if the model has no cache).
        """
        return self._pass(ids, cache, None, start)

    def decode(self, ids: Tensor, cache: Any, lengths: Tensor, width: int) -> tuple[Tensor, Any]:
        """Compute one more token for each row of ``cache``: ``ids`` [n, 1]. Shorter rows have padding in front in the
        cache.

        Args:
            lengths: [n] tokens of each row in the cache. width: tokens of the longest row.
        """
        if bool((lengths == width).all()) or not any(name in COLUMNS for name, _ in tensors(cache)):
            return self._pass(ids, cache, None, width)
        return self._pass(ids, cache, lengths, width)

    def _pass(self, ids: Tensor, cache: Any, lengths: Tensor | None, width: int) -> tuple[Tensor, Any]:
        options: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
        if cache is not None:
            options[self._cache] = cache
        if lengths is not None:
            columns = torch.arange(width + ids.shape[1])
            options["attention_mask"] = (columns >= width - lengths[:, None]).long().to(self._device)
            options["position_ids"] = lengths[:, None].to(self._device)
        options = {name: value for name, value in options.items() if name in self._takes}
        output = self.model(input_ids=ids, **options)
        return output.logits[:, -1].float(), next(
            (output[name] for name in CACHES if output.get(name) is not None), None
        )
