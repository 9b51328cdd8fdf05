"""Forward passes of any causal LM of transformers, with the cache that it makes itself."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slimelite.engines.embedded.caches import COLUMNS, tensors

# names of the cache among the arguments and results of models
CACHES = ("past_key_values", "cache_params")


class Passes:
    """``model``'s forward pass over rows of token ids; logits are fp32."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._device = model.device
        self._takes = inspect.signature(model.forward).parameters
        self._cache = next((name for name in CACHES if name in self._takes), "")

    def whole(self, ids: Tensor, last: int = 0) -> Tensor:
        """[n, tokens, vocab] of ``ids`` [n, tokens]; ``last``: of the last so many tokens alone, 0 for all."""
        options = {"logits_to_keep": last} if "logits_to_keep" in self._takes else {}
        logits: Tensor = self.model(input_ids=ids, use_cache=False, **options).logits
        return logits[:, -last:].float()

    def extend(self, ids: Tensor, cache: Any, start: int) -> tuple[Tensor, Any]:
        """Compute ``ids`` [n, tokens] after the ``start`` tokens of each row in ``cache``, which is None for none.

        Returns:
            [n, vocab] after the last token, and the cache with all of them (None if the model makes none).
        """
        return self._pass(ids, cache, None, start)

    def decode(self, ids: Tensor, cache: Any, lengths: Tensor, width: int) -> tuple[Tensor, Any]:
        """One token ``ids`` [n, 1] more for each row of ``cache``; shorter rows are padded in front there.

        Args:
            lengths: [n] tokens of each row in the cache. width: those of the longest.
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
