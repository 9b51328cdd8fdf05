"""Hugging Face causal LMs as policies: tokens in, log-probs of the response out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slimelite.arguments import Args
from slimelite.training.attention import ATTENTION, register_attention
from slimelite.training.batch import MicroBatch
from slimelite.training.lm_head import chunked_log_probs
from slimelite.training.parallel import World, shard_model

# config attributes with which the logits are more than hidden·weightᵀ -> the value that is harmless
LOGIT_TRANSFORMS: dict[str, Any] = {"final_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1}


class LanguageModel(nn.Module):
    """A causal LM of transformers with a forward of its own.

    Heads are applied inside `forward`, so that FSDP's hooks on this module cover their weights, tied or not.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers: what is sharded and recomputed as one."""
        names = set(self.hf._no_split_modules or ())
        return [m for m in self.hf.modules() if type(m).__name__ in names]

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[R, d] the states that predict the response tokens of ``batch``."""
        states = self.hf.get_decoder()(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, sequences=batch.sequences
        )
        return states.last_hidden_state[0].index_select(0, batch.response_index)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(Hugging Face name, parameter, sharded or not); tied weights once."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix("hf."), parameter


Model = TypeVar("Model", bound=LanguageModel)


class PolicyModel(LanguageModel):
    """A causal LM whose forward ends in log-probs of chosen tokens instead of logits."""

    def __init__(self, hf: PreTrainedModel, chunk_size: int = -1) -> None:
        super().__init__(hf)
        self.chunk_size = chunk_size

    def forward(self, batch: MicroBatch, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [R] at the response tokens of ``batch``, at least fp32; logits are divided by
        ``temperature``; ``entropy_grad``: whether the entropies carry a gradient.
        """
        weight = self.hf.get_output_embeddings().weight
        return chunked_log_probs(
            self.hidden(batch),
            weight,
            batch.targets,
            temperature,
            entropy_grad=entropy_grad,
            chunk_size=self.chunk_size,
        )


def build_policy(args: Args, world: World, path: str | None, *, trainable: bool) -> PolicyModel:
    """The policy at ``path``; see `build_model`."""
    return build_model(args, world, path, lambda hf: PolicyModel(hf, args.log_probs_chunk_size), trainable=trainable)


def build_model(
    args: Args, world: World, path: str | None, wrap: Callable[[PreTrainedModel], Model], *, trainable: bool
) -> Model:
    """The causal LM at ``path`` in what ``wrap`` makes of it, sharded over the ranks and on the device.

    A trainable one has fp32 weights and, by ``--gradient-checkpointing``, recomputes its layers in the backward pass.
    Others are held in the dtype they compute in.

    Raises:
        ValueError: see `load_model`.
    """
    attention = ATTENTION if args.attn_implementation == "auto" else args.attn_implementation
    hf = load_model(path, seed=args.seed, attention=attention, empty=world.rank > 0)
    if trainable and args.gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    model = wrap(hf).train()
    if not trainable:
        # parameters alone: rotary frequencies rounded to bf16 turn by radians at position 1,000
        for parameter in model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(world.compute_dtype)
    shard_model(model, model.layers, world, cpu_offload=trainable and args.fsdp_cpu_offload)
    return model


def load_model(path: str | None, *, seed: int, attention: str, empty: bool) -> PreTrainedModel:
    """The causal LM at ``path`` in fp32 on the CPU.

    Args:
        path: a Hugging Face folder or hub id; a folder with a config and no weights gives a new model.
        seed: of a new model's weights.
        attention: a transformers attention name.
        empty: leave the parameters on the meta device (the weights come from another rank).

    Raises:
        ValueError: no model at ``path``, or one whose logits are not plain hidden·weightᵀ.
    """
    register_attention()
    config = _read_config(path)
    _check_logits(config)
    config.attention_dropout = 0.0
    options = {"attn_implementation": attention, "dtype": torch.float32}
    if empty:
        with init_empty_weights(include_buffers=False):
            hf = AutoModelForCausalLM.from_config(config, **options)
        hf.tie_weights()  # the context gave each of a tied pair a parameter of its own
        return hf
    if _has_weights(str(path)):
        return AutoModelForCausalLM.from_pretrained(path, config=config, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, **options)


def _read_config(path: str | None) -> PretrainedConfig:
    if path is None:
        raise ValueError("no model to train; give --hf-checkpoint")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
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
            raise ValueError(f"{config.model_type} with {name}={value} is not supported: the LM head here is linear")
