"""The program that runs a reward model in its own process: ``python -m slimelite.rewards.reward_model PATH DEVICE FD
SECONDS``.

In the package ``rewards``, only this file imports torch. The process receives lists of `Exchange` (prompt and response)
over the connection on file descriptor FD. It scores each list as one batch, and sends back one score or `Failure` for
each `Exchange`.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForSequenceClassification

from slimelite.data.messages import render
from slimelite.data.tokenizer import load_tokenizer
from slimelite.models.files import load_config, load_weights
from slimelite.rewards.rules import Exchange, Failure
from slimelite.rewards.workers import serve

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class RewardModel:
    """A reward model: a sequence-classification model with one output."""

    def __init__(self, path: str, device: str) -> None:
        """``device``: auto, cpu or cuda.

        Raises:
            ValueError: the model does not have exactly one output, weights are missing, or the device does not exist.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--reward-model-device cuda: this process sees no GPU; use cpu, or auto")
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(path)
        config = load_config(path)
        if config.num_labels != 1:
            raise ValueError(
                f"--reward-model-path {path} has {config.num_labels} outputs, but a reward model must have one"
            )
        # load_weights raises an error for missing weights; otherwise a folder without a reward head would get a random
        # head
        model = load_weights(AutoModelForSequenceClassification, path, config, dtype=dtype)
        self.model = model.to(self.device).eval()
        self.pad = config.get_text_config().pad_token_id
        self.longest = getattr(config.get_text_config(), "max_position_embeddings", None)

    def text(self, exchange: Exchange) -> str:
        """Prompt and response as one text, rendered with the reward model's own chat template. If the model has no chat
        template, the response simply follows the prompt."""
        if not self.tokenizer.chat_template:
            return exchange.prompt + exchange.response
        messages = exchange.messages or [{"role": "user", "content": exchange.prompt}]
        answered = [*messages, {"role": "assistant", "content": exchange.response}]
        return render(self.tokenizer, answered, None, {})

    @torch.inference_mode()
    def scores(self, exchanges: list[Exchange]) -> list[float | Failure]:
        """One score for each pair of prompt and response. For a pair that is longer than the model's context, the
        result is a `Failure`."""
        ids = [self.tokenizer(self.text(e), add_special_tokens=False)["input_ids"] for e in exchanges]
        results: list[float | Failure] = [
            Failure(
                "invalid",
                f"prompt and response have {len(row)} tokens, but the reward model accepts at most {self.longest}",
            )
            for row in ids
        ]
        fitting = [i for i, row in enumerate(ids) if self.longest is None or len(row) <= self.longest]
        # without a padding token in its config, the model would score a padded row at the padding, so score rows one by
        # one
        batches = [fitting] if self.pad is not None else [[i] for i in fitting]
        for batch in filter(None, batches):
            width = max(len(ids[i]) for i in batch)
            padded = [ids[i] + [self.pad or 0] * (width - len(ids[i])) for i in batch]
            mask = [[1] * len(ids[i]) + [0] * (width - len(ids[i])) for i in batch]
            inputs = torch.tensor(padded, device=self.device), torch.tensor(mask, device=self.device)
            logits = self.model(input_ids=inputs[0], attention_mask=inputs[1]).logits.float()
            for i, score in zip(batch, logits[:, 0].tolist(), strict=True):
                results[i] = score
        return results


def main(path: str, device: str, descriptor: int, seconds: float) -> None:
    """Load the model, then score the batches that arrive, until the parent process closes its end of the connection. If
    the model cannot be loaded, send the error message to the parent and end."""
    try:
        model = RewardModel(path, device)
    except (OSError, ValueError) as error:
        Connection(descriptor).send(f"--reward-model-path {path}: {error}")
        return

    def scored(exchanges: list[Exchange]) -> list[float | Failure]:
        try:
            return model.scores(exchanges)
        except Exception as error:
            failure = Failure("exception", f"{type(error).__name__}: {error}", traceback.format_exc())
            return [failure] * len(exchanges)

    serve(descriptor, seconds, scored)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
