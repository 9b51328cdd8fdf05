"""A conversation as a training sample: nothing is generated, the assistant's own words are the response."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from slimelite.data.masks import PROBE, conversation_tokens
from slimelite.sample import Sample, Status

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def fill_conversation(
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    *,
    loss_mask_type: str = "auto",
    template_kwargs: dict[str, Any] | None = None,
    max_context_len: int | None = None,
) -> None:
    """Turn a sample whose ``prompt`` is a conversation (messages) into one to train on, in place.

    An answer that brings its end token along, as the responses of saved rollouts do, does not get it twice. The prompt
    becomes the text before the first trained token, the response all that follows, with its loss mask; the
    reward is 0. A conversation of more than ``max_context_len`` tokens loses its end, and its status is TRUNCATED. One
    in which no token is left to train on keeps ``response_length`` 0 and is marked ``remove_sample``.

    Raises:
        ValueError: the prompt is not a list of messages, or what `conversation_tokens` raises.
    """
    if isinstance(sample.prompt, str):
        raise ValueError(
            "SFT reads whole conversations, but the prompt is text: name the column of the messages with --input-key, "
            "and leave --apply-chat-template out"
        )
    tools = sample.metadata.get("tools")
    ends = turn_ends(tokenizer)
    messages = [_without_end(m, ends) if m.get("role") == "assistant" else m for m in sample.prompt]
    try:
        ids, mask = conversation_tokens(tokenizer, messages, tools, template_kwargs, loss_mask_type)
    except ValueError as error:
        raise ValueError(f"conversation {sample.index} ({sample.prompt[0].get('content')!r:.60}): {error}") from error
    sample.status = Status.COMPLETED
    if max_context_len is not None and len(ids) > max_context_len:
        ids, mask = ids[:max_context_len], mask[:max_context_len]
        sample.status = Status.TRUNCATED
    start = mask.index(1) if 1 in mask else len(ids)
    sample.tokens = ids
    sample.response_length = len(ids) - start
    sample.loss_mask = mask[start:]
    sample.prompt = tokenizer.decode(ids[:start])
    sample.response = tokenizer.decode(ids[start:])
    sample.remove_sample = start == len(ids)
    sample.reward = 0.0


@lru_cache(maxsize=8)
def turn_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Tokens that end an answer: the end of sequence, and the one that the chat template writes after an answer."""
    ends = {str(tokenizer.eos_token)} if tokenizer.eos_token else set()
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    try:
        after = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(PROBE)[2].strip()
    except (TemplateError, ValueError, TypeError):  # no template, or one for other conversations
        after = ""
    return tuple(ends | ({after} & tokenizer.get_added_vocab().keys()))


def _without_end(message: dict[str, Any], ends: tuple[str, ...]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or not content.rstrip().endswith(ends):
        return message
    while content.rstrip().endswith(ends):
        content = content.rstrip()
        content = content[: -max(len(end) for end in ends if content.endswith(end))]
    return {**message, "content": content}
