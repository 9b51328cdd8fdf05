"""Preference pairs: rows with a preferred and another reply to one prompt, made into two samples each."""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from slimelite.arguments import Args
from slimelite.data.prompts import (
    BadCell,
    Columns,
    Messages,
    Prompt,
    before_answers,
    checked_messages,
    load_prompts,
    read_prompt,
    sound,
)
from slimelite.data.reader import Row
from slimelite.data.sft import fill_conversation, turn_ends
from slimelite.sample import Sample, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# where a prompt's metadata keeps [chosen, rejected]: two whole conversations, or the texts that follow a plain prompt
PAIR = "pair"
# label and reward of its two samples, in this order
SIDES = (("chosen", 1.0), ("rejected", 0.0))


def load_pairs(
    args: Args, tokenizer: PreTrainedTokenizerBase | None, paths: Sequence[str], **settings: Any
) -> list[Prompt]:
    """As `load_prompts`, with the replies of ``--chosen-key`` and ``--rejected-key`` in ``metadata["pair"]``.

    A reply is text, the turns that follow the prompt, or the whole conversation from the prompt's first message on.
    Without a column for the prompt alone ``--input-key`` names that of the chosen conversation, and the prompt is what
    stands before its first answer. ``settings``: those of `load_prompts`.
    """
    keys = (args.chosen_key, args.rejected_key)
    return load_prompts(args, tokenizer, paths, also=keys, read=partial(_read_pair, keys=keys), **settings)


def pair_samples(
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    *,
    loss_mask_type: str = "auto",
    template_kwargs: dict[str, Any] | None = None,
    max_context_len: int | None = None,
) -> list[Sample]:
    """The two samples [chosen, rejected] of a sample with `PAIR` in its metadata: one unit and rollout, rewards 1, 0.

    The messages that both conversations start with are their prompt, and what the assistant says there is not trained
    on. Where a reply has no token left to train on (``max_context_len``), both samples are marked ``remove_sample``.

    Raises:
        ValueError: there is no pair, or what `fill_conversation` raises.
    """
    if PAIR not in sample.metadata or sample.index is None:
        raise ValueError(
            "--loss-type dpo_loss trains on pairs: a sample of the data source has an index, and the two replies in "
            f"metadata[{PAIR!r}]"
        )
    replies = sample.metadata[PAIR]
    metadata = {key: value for key, value in sample.metadata.items() if key != PAIR}
    sides = []
    for number, (reply, (label, reward)) in enumerate(zip(replies, SIDES, strict=True)):
        side = Sample(sample.group_index, 2 * sample.index + number, sample.index, sample.index, metadata=metadata)
        if isinstance(reply, str):
            _fill_text(side, sample, reply, tokenizer, max_context_len)
        else:
            side.prompt = _untrained_start(reply, _shared(*replies))
            fill_conversation(
                side,
                tokenizer,
                loss_mask_type=loss_mask_type,
                template_kwargs=template_kwargs,
                max_context_len=max_context_len,
            )
        side.label, side.reward = label, reward
        sides.append(side)
    if any(side.remove_sample for side in sides):
        for side in sides:
            side.remove_sample = True
    return sides


def _read_pair(row: Row, columns: Columns, tokenizer: PreTrainedTokenizerBase | None, keys: tuple[str, str]) -> Prompt:
    """One row; a pair is a chat as soon as its prompt or one of its replies is."""
    prompt = read_prompt(row, columns, tokenizer)
    cells = {key: row.values[key] for key in keys}
    for key, cell in cells.items():
        sound(cell, key)
        if cell is None or cell == "":
            raise BadCell(key, "the reply is empty")
    pair: list[Any] = list(cells.values())
    inside = columns.input_key in keys
    if inside and not isinstance(row.values[columns.input_key], list):
        raise BadCell(columns.input_key, "a reply that is text holds no prompt; name the prompt's column: --input-key")
    if prompt.messages is not None or not all(isinstance(cell, str) for cell in pair):
        asked = prompt.messages or [{"role": "user", "content": prompt.text}]
        if inside:
            asked = before_answers(asked)
        if not asked:
            raise BadCell(columns.input_key, "nothing stands before the first answer")
        prompt.text, prompt.messages = "", asked
        pair = [_conversation(asked, cell, key, columns.input_key) for key, cell in cells.items()]
    if pair[0] == pair[1]:
        raise BadCell(keys[1], f"the same as {keys[0]!r}: neither is preferred")
    prompt.metadata = {**prompt.metadata, PAIR: pair}
    return prompt


def _conversation(asked: Messages, cell: Any, key: str, input_key: str) -> Messages:
    """The prompt's messages and the reply's."""
    reply = [{"role": "assistant", "content": cell}] if isinstance(cell, str) else checked_messages(cell, key)
    whole = reply[: len(asked)] == asked
    if not whole and reply[0]["role"] != "assistant":
        raise BadCell(
            key,
            f"starts with a {reply[0]['role']} message that is not the first of {input_key!r}; a reply is the "
            "assistant's turns, or the whole conversation from the prompt on (--input-key "
            f"{key} where no column has the prompt alone)",
        )
    conversation = reply if whole else [*asked, *reply]
    if len(conversation) == len(asked) or conversation[-1]["role"] != "assistant":
        raise BadCell(key, "does not end with a message of the assistant")
    return conversation


def _shared(chosen: Messages, rejected: Messages) -> int:
    """How many messages both start with; each keeps at least its last."""
    both = zip(chosen[:-1], rejected[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda messages: messages[0] == messages[1], both))


def _untrained_start(conversation: Messages, count: int) -> Messages:
    """The conversation with ``step_loss_mask`` 0 in the assistant's messages among the first ``count``."""
    start = [{**m, "step_loss_mask": 0} if m["role"] == "assistant" else m for m in conversation[:count]]
    return [*start, *conversation[count:]]


def _fill_text(
    side: Sample, prompt: Sample, reply: str, tokenizer: PreTrainedTokenizerBase, max_context_len: int | None
) -> None:
    """Prompt ids as generation has them, the reply's, and the end-of-sequence token that the model is to write.

    A reply that has its end token already, as the responses of saved rollouts do, gets no other.
    """
    ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    ended = reply.endswith(turn_ends(tokenizer))
    ids += [] if ended or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    room = len(ids) if max_context_len is None else max(0, max_context_len - len(prompt.tokens))
    side.prompt, side.response = prompt.prompt, tokenizer.decode(ids[:room])
    side.tokens, side.response_length = [*prompt.tokens, *ids[:room]], len(ids[:room])
    side.loss_mask = [1] * side.response_length
    side.remove_sample = not side.response_length
    side.status = Status.TRUNCATED if room < len(ids) else Status.COMPLETED
