"""Hugging Face causal LMs as policies: tokens in, log-probs of the response out."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

from slimelite.training.batch import MicroBatch
from slimelite.training.lm_head import chunked_log_probs


class LanguageModel(nn.Module):
    """A causal LM of transformers with a forward of its own.

    Heads are applied inside `forward`, so that FSDP's hooks on this module cover their weights, tied or not.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        # whether sequences are laid end to end, see `packing.may_pack`; else each is a row of its own
        self.packed = True

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers: what is sharded and recomputed as one."""
        names = set(self.hf._no_split_modules or ())
        return [m for m in self.hf.modules() if type(m).__name__ in names]

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[R, d] the states that predict the response tokens of ``batch``."""
        rows = batch if self.packed or len(batch.lengths) < 2 else batch.padded()
        states = self.hf.get_decoder()(
            input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False, sequences=rows.sequences
        )
        return states.last_hidden_state.flatten(0, 1).index_select(0, rows.response_index)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(Hugging Face name, parameter, sharded or not); tied weights once."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix("hf."), parameter


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
