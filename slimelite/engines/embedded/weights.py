"""The weights of a model in this process: loading and updating them, and releasing their GPU memory temporarily."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slimelite.engines.checks import WeightUpdate
from slimelite.models.files import has_weights, load_weights

logger = logging.getLogger(__name__)


def load_model(
    model_path: str, config: PretrainedConfig, dtype: torch.dtype, seed: int, attention: str | None = None
) -> PreTrainedModel:
    """Load the checkpoint at ``model_path``. If the folder has no weights, the weights are random, with seed ``seed``.

    ``attention``: transformers' name of the attention to use; None: its default.
    """
    if has_weights(model_path):
        return load_weights(AutoModelForCausalLM, model_path, config, dtype=dtype, attn_implementation=attention)
    # not a warning, because the pre-flight check has warned already, and the first weight sync replaces these weights
    logger.info("no weight files in %s: the weights are random (seed %d) until a trainer sends some", model_path, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model


class Weights:
    """All weights of a model. A subclass fills ``_storage`` and ``_targets``, then calls `_complete`.

    ``_storage``: the tensors that have the values. ``_targets``: Hugging Face name -> the part of the storage that has
    this weight. ``incoming``: the current update.
    """

    incoming: WeightUpdate

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storage: list[torch.Tensor] = []
        self._parked: list[torch.Tensor] = []
        self._targets: dict[str, torch.Tensor] = {}

    def _complete(self, aliases: Mapping[str, str]) -> None:
        shapes = {name: tuple(target.shape) for name, target in self._targets.items()}
        self.incoming = WeightUpdate(shapes, aliases)

    @torch.no_grad()
    def update(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Copy (Hugging Face name, tensor) pairs into the model: either all of them, or none if there is an error. An
        update must be open in ``incoming``.

        A tied head may be sent under either of its names, or under both.

        Raises:
            ValueError: see `WeightUpdate.taking`.
        """
        if self._parked:
            raise ValueError("the weights are released; call resume_memory(['weights']) before a weight update")
        with self.incoming.taking((name, tensor.shape) for name, tensor in tensors):
            for name, tensor in tensors:
                self._targets[self.incoming.aliases.get(name, name)].copy_(tensor)

    def release(self) -> None:
        """Move the weights to host memory and free the device's memory; on a CPU this does nothing."""
        if self._device.type == "cpu" or self._parked:
            return
        self._parked = [weight.cpu() for weight in self._storage]
        for weight in self._storage:
            weight.untyped_storage().resize_(0)

    @torch.no_grad()
    def resume(self) -> None:
        """The inverse of `release`; views of the weights stay valid."""
        for weight, parked in zip(self._storage, self._parked, strict=False):  # on a CPU `_parked` is empty
            weight.untyped_storage().resize_(parked.untyped_storage().nbytes())
            weight.copy_(parked)
        self._parked = []
