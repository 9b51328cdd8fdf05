"""What runs in vLLM's worker process: the sampler's log-probs, and weights by name. Called by collective_rpc."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler


class TemperedLogProbs(Sampler):
    """vLLM's sampler, reporting log softmax(logits / temperature) before bans, top-k and top-p.

    vLLM itself offers the log-probs of the untempered logits, or those after top-k and top-p. It also takes top-p of
    what top-k left; here both cut the whole distribution, and a token has to survive both.
    """

    def __init__(self) -> None:
        super().__init__("raw_logprobs")
        draw = self.topk_topp_sampler.forward

        def cut_and_draw(logits: torch.Tensor, generators: Any, k: torch.Tensor | None, p: torch.Tensor | None) -> Any:
            if k is not None and p is not None:
                logits, p = apply_top_k_top_p(logits, None, p), None
            return draw(logits, generators, k, p)

        self.topk_topp_sampler.forward = cut_and_draw

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample [requests, vocab] logits; a temperature of 0 is read as 1 in the log-probs."""
        temperature = sampling_metadata.temperature
        self.temperature = None if sampling_metadata.all_greedy else temperature.where(temperature > 0, 1.0)[:, None]
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """What vLLM calls on the logits as the model gave them (``logprobs_mode`` raw_logprobs)."""
        tempered = logits.float() if self.temperature is None else logits.float() / self.temperature
        return tempered.log_softmax(-1)


def install_sampler(worker: Any) -> None:
    """Put `TemperedLogProbs` in the place of vLLM's sampler."""
    runner = worker.model_runner
    if type(runner.sampler) is not Sampler:
        raise ValueError(f"no log-probs from the sampler {type(runner.sampler)}; set VLLM_USE_V2_MODEL_RUNNER=0")
    runner.sampler = TemperedLogProbs()


def begin_reload(worker: Any) -> None:
    """From now on each layer takes its weights when the last of them is there."""
    initialize_layerwise_reload(worker.model_runner.get_model())


def reload(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Some of the model's weights, under their Hugging Face names."""
    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.get_model().load_weights(iter(tensors))


def end_reload(worker: Any) -> None:
    """The last layers are completed, and packed as their kernels want them."""
    model, config = worker.model_runner.get_model(), worker.model_runner.model_config
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, config)
        if config.hf_config.tie_word_embeddings:
            # vLLM 0.31 renews the embedding, but not the head's packed copy of it
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
