"""Hugging Face causal LMs as policies: tokens in, log-probs of the response out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slimelite.training.attention import ATTENTION, PackedSequences, register_attention
from slimelite.training.lm_head import chunked_log_probs

# config attributes with which the logits are more than hidden·weightᵀ -> the value that is harmless
LOGIT_TRANSFORMS: dict[str, Any] = {"final_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1}


class PolicyModel(nn.Module):
    """A causal LM whose forward ends in log-probs of chosen tokens instead of logits.

    The LM head is applied inside `forward`, so that FSDP's hooks on this module cover its weight, tied or not.
    """

    def __init__(self, hf: PreTrainedModel, chunk_size: int = -1) -> None:
        super().__init__()
        self.hf = hf
        self.chunk_size = chunk_size

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers: what is sharded and recomputed as one."""
        names = set(self.hf._no_split_modules or ())
        return [m for m in self.hf.modules() if type(m).__name__ in names]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        sequences: PackedSequences,
        response_index: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies at the response tokens of one packed row.

        Args:
            input_ids, position_ids: [1, T] int64.
            sequences: layout of the row.
            response_index: [R] int64, the positions whose hidden states predict the response tokens.
            targets: [R] int64, the response tokens.
            temperature: divides the logits.
            entropy_grad: whether the entropies carry a gradient.

        Returns:
            log-probs [R] and entropies [R], at least fp32.
        """
        backbone = self.hf.get_decoder()
        states = backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, sequences=sequences)
        hidden = states.last_hidden_state[0].index_select(0, response_index)
        weight = self.hf.get_output_embeddings().weight
        return chunked_log_probs(
            hidden, weight, targets, temperature, entropy_grad=entropy_grad, chunk_size=self.chunk_size
        )

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(Hugging Face name, parameter, sharded or not); tied weights once."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix("hf."), parameter


def load_policy(
    path: str | None,
    config: dict[str, Any] | None,
    *,
    seed: int,
    empty: bool,
    attention: str = "auto",
    gradient_checkpointing: bool = False,
    chunk_size: int = -1,
) -> PolicyModel:
    """The policy at ``path``, in fp32 on the CPU.

    Args:
        path: a Hugging Face folder or hub id; a folder without weights gives a new model of its config.
        config: a config as a dict with ``model_type``, for a new model; wins over ``path``.
        seed: of a new model's weights.
        empty: leave the parameters on the meta device (the weights come from another rank).
        attention: a transformers attention name; auto is ours.
        gradient_checkpointing: recompute each layer in the backward pass.
        chunk_size: rows the LM head takes at a time.

    Raises:
        ValueError: no model at ``path``, or one whose logits are not plain hidden·weightᵀ.
    """
    register_attention()
    hf_config = _read_config(path, config)
    _check_logits(hf_config)
    hf_config.attention_dropout = 0.0
    options = {"attn_implementation": ATTENTION if attention == "auto" else attention, "dtype": torch.float32}
    if empty:
        with init_empty_weights(include_buffers=False):
            hf = AutoModelForCausalLM.from_config(hf_config, **options)
    elif config is not None or not _has_weights(str(path)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            hf = AutoModelForCausalLM.from_config(hf_config, **options)
    else:
        hf = AutoModelForCausalLM.from_pretrained(path, config=hf_config, **options)
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(hf, chunk_size).train()


def _read_config(path: str | None, config: dict[str, Any] | None) -> PretrainedConfig:
    if config is not None:
        return AutoConfig.for_model(**config)
    if path is None:
        raise ValueError("no model: give --hf-checkpoint, or the architecture of a new one (--num-layers ...)")
    try:
        return AutoConfig.from_pretrained(path)
    except OSError as error:
        raise ValueError(f"no model at {path}: {error}") from error


def _has_weights(path: str) -> bool:
    folder = Path(path)
    if not folder.is_dir():
        return True  # a hub id
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def _check_logits(config: PretrainedConfig) -> None:
    for name, harmless in LOGIT_TRANSFORMS.items():
        value = getattr(config, name, harmless)
        if value != harmless:
            raise ValueError(f"{config.model_type} models with {name}={value} are not supported: the LM head here is linear")
