"""The model and how its layers are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slimelite.arguments.architecture import ArchitectureArgs
from slimelite.arguments.base import flag, resolved


@dataclass(frozen=True)
class ModelArgs(ArchitectureArgs):
    """Model."""

    hf_checkpoint: str | None = flag(
        None, "Hugging Face model folder or hub id: weights, config and tokenizer", metavar="PATH"
    )
    tokenizer: str = flag(None, "tokenizer folder or hub id", metavar="PATH", auto="--hf-checkpoint")
    ref_load: str | None = flag(
        None, "weights of the reference model (Hugging Face format)", metavar="PATH", auto="--hf-checkpoint"
    )
    ref_update_interval: int | None = flag(None, "copy the policy into the reference every this many rollouts")
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = flag(
        "auto", "attention kernel of training", auto="the fastest that works here"
    )

    # config of a new model that the architecture flags define; None: --hf-checkpoint has its own
    model_config: dict[str, Any] | None = resolved(None)
