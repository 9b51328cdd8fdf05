"""Turns conversations from the data into training samples, without generating text. The assistant's messages are the
response.

The loss covers the tokens that the model itself would generate. ``--loss-mask-type auto`` detects these tokens with any
chat template. If the template has ``{% generation %}`` marks, ``auto`` uses them. Otherwise ``auto`` renders the
conversation again with one reply replaced, and compares the two texts. A reply extends from the end of the generation
prompt to the end of the turn, including the end-of-turn token. An assistant message with ``step_loss_mask: 0`` is not
trained on.

The other values of ``--loss-mask-type`` select exactly the same tokens as slime's masks of the same name. Each of these
masks is named after a model, and fits this model's ChatML template. ``qwen`` and ``qwen3`` render each message on its
own. But some templates render a message differently inside a conversation. For example, they remove the thinking from
earlier turns, or join tool answers in one turn. With such a template, the token ids of ``qwen`` and ``qwen3`` may
differ from those of a rollout. ``auto`` renders whole conversations, so it does not have this limitation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import TemplateError

from slimelite.base.registry import function
from slimelite.data.messages import Message, Messages, Tools, bounded, render, with_arguments
from slimelite.data.prompts import PAIR
from slimelite.data.replies import PROBE, Finder, Span, renamed
from slimelite.models.families import LOSS_MASKS
from slimelite.samples.sample import Sample, Status

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

MARKS = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")
# the error if the data has text prompts, but the run needs conversations
TEXT_PROMPT = (
    "SFT reads whole conversations, but the prompt is text: name the column of the messages with --input-key, and "
    "leave --apply-chat-template out (an evaluation gets it from --eval-config)"
)
# the name and the reward of the two samples of a pair, in this order
SIDES = (("chosen", 1.0), ("rejected", 0.0))
# label of a reply -> its reward
JUDGEMENTS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}


class Piece(NamedTuple):
    """A text that is tokenized on its own, and the spans of this text that are trained on."""

    text: str
    trained: list[Span]


@dataclass(frozen=True)
class ChatReader:
    """Converts conversations to token ids and loss masks.

    Args:
        loss_mask_type: the name in `LOSS_MASKS` of the function that finds the tokens to train on.
        template_kwargs: extra variables for the chat template.
        max_context_len: a longer conversation is cut off at this length [tokens].
    """

    tokenizer: PreTrainedTokenizerBase
    loss_mask_type: str = "auto"
    template_kwargs: dict[str, object] = field(default_factory=dict)
    max_context_len: int | None = None

    def render(self, messages: Messages, tools: Tools = None, *, generation_prompt: bool = False) -> str:
        """The text of a conversation, rendered with the chat template."""
        settings = {**self.template_kwargs, "add_generation_prompt": generation_prompt}
        return render(self.tokenizer, messages, tools, settings)

    def tokens(self, messages: Messages, tools: Tools = None) -> tuple[list[int], list[int]]:
        """The pair (token ids, loss mask) for a whole conversation. The mask has one entry (0 or 1) for each token.

        A token that is only partly inside a trained span is trained on, with two exceptions: (1) a special token, if
        its text (without the white space around it) is not completely inside the span; (2) a token that ends after the
        span, if the token's part inside the span is only white space.

        Raises:
            ValueError: the tokenizer has no chat template or gives no offsets, the template refuses the messages, or
                the rendered text does not contain the content of an assistant message.
        """
        tokenizer = self.tokenizer
        if not tokenizer.is_fast or not tokenizer.chat_template:
            raise ValueError(
                "loss masks need a tokenizer with a chat template and a tokenizer.json in the --hf-checkpoint folder"
            )
        try:
            find = function(LOSS_MASKS[self.loss_mask_type].find, LOSS_MASKS.option, self.loss_mask_type)
            pieces = find(self, messages, tools)
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template refuses this conversation ({error}); fix or remove the row, or put another "
                "chat_template.jinja into the --hf-checkpoint folder"
            ) from error
        token_ids: list[int] = []
        loss_mask: list[int] = []
        for piece in pieces:
            ids, mask = _tokenize(self, piece)
            token_ids += ids
            loss_mask += mask
        return token_ids, loss_mask

    def left_out(self, messages: Messages, tools: Tools = None) -> list[str]:
        """The parts of a row that the chat template does not write into the rendered text: ``tools``, or fields of
        replies such as ``tool_calls``.

        Reasoning before the last user message is not checked, because templates remove it on purpose.
        """
        last_question = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        hidden = ["tools"] if tools and PROBE not in self.render(messages, renamed(tools)) else []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or not is_trained(message):
                continue
            calls = message.get("tool_calls")
            probes = (
                {"tool_calls": renamed(calls), "content": PROBE if message.get("content") else None} if calls else {}
            )
            probes["reasoning_content"] = PROBE if message.get("reasoning_content") and i > last_question else None
            for key, probe in probes.items():
                changed = [*messages[:i], {**message, key: probe}, *messages[i + 1 :]]
                if probe and key not in hidden and PROBE not in self.render(changed, tools):
                    hidden.append(key)
        return hidden

    def fill(self, sample: Sample) -> None:
        """Turn a sample whose ``prompt`` is a conversation (messages) into a training sample, in place.

        If the text of a reply already ends with the end-of-turn token (as in saved rollouts), no second one is added.
        ``sample.prompt`` becomes the text before the first trained token. The response is the rest of the text, with a
        loss mask. The sample's reward is 0. If the conversation was cut off at ``max_context_len``, the sample's status
        is TRUNCATED. If no token is trained on, ``response_length`` is 0 and ``remove_sample`` is true.

        Raises:
            ValueError: the prompt is not a list of messages, or `tokens` raises an error.
        """
        if isinstance(sample.prompt, str):
            raise ValueError(TEXT_PROMPT)
        messages = [self._without_end(m) if m.get("role") == "assistant" else m for m in sample.prompt]
        try:
            ids, mask = self.tokens(messages, sample.metadata.get("tools"))
        except ValueError as error:
            first = sample.prompt[0].get("content")
            raise ValueError(f"conversation {sample.index} ({first!r:.60}): {error}") from error
        self._put(sample, ids, mask)
        sample.prompt = self.tokenizer.decode(sample.tokens[: sample.prompt_length])
        sample.reward = 0.0

    def judge(self, sample: Sample) -> None:
        """Like `fill`, for a conversation with a label (KTO). The sample's reward is 1 if the label marks the last
        reply as desirable, else 0. Only the last reply is trained on.

        Raises:
            ValueError: the label is neither true nor false (see `JUDGEMENTS`), or `fill` raises an error.
        """
        desirable = JUDGEMENTS.get(str(sample.label).lower())
        if desirable is None:
            raise ValueError(
                f"conversation {sample.index}: the label {sample.label!r:.60} (--label-key) must be true if the "
                "reply is desirable, else false"
            )
        if not isinstance(sample.prompt, str):
            sample.prompt = _untrained_start(sample.prompt, len(sample.prompt) - 1)
        self.fill(sample)
        sample.reward = desirable

    def scored_pair(self, sample: Sample) -> list[Sample]:
        """Like `pair`, for training a reward model. Each conversation is rendered as a whole, in the same way as for
        `--rm-type reward_model`. The rendered conversation is the sample's prompt, and the sample's response is one
        end-of-sequence token. The model's score is taken at the position of this token.

        If one of the two conversations is longer than ``max_context_len``, both samples are marked ``remove_sample``.

        Raises:
            ValueError: the sample has no `PAIR` in its metadata.
        """
        sides = self._sides(sample)
        for side, reply in zip(sides, sample.metadata[PAIR], strict=True):
            if isinstance(reply, str) and self.tokenizer.chat_template:
                reply = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": reply}]
            text = f"{sample.prompt}{reply}" if isinstance(reply, str) else render(self.tokenizer, reply, None, {})
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            side.prompt, side.tokens, side.response_length = text, [*ids, self.tokenizer.eos_token_id or 0], 1
            side.loss_mask, side.status = [1], Status.COMPLETED
            side.remove_sample = self.max_context_len is not None and len(ids) > self.max_context_len
        return _together(sides)

    def _sides(self, sample: Sample) -> list[Sample]:
        """Empty samples for the two replies of a sample's `PAIR`."""
        if PAIR not in sample.metadata or sample.index is None:
            raise ValueError(
                "for a loss on preference pairs, each sample of the data source needs an index, and two replies in "
                f"metadata[{PAIR!r}]"
            )
        metadata = {key: value for key, value in sample.metadata.items() if key != PAIR}
        sides = []
        for number, (label, reward) in enumerate(SIDES):
            side = Sample(sample.group_index, 2 * sample.index + number, sample.index, sample.index, metadata=metadata)
            side.label, side.reward = label, reward
            sides.append(side)
        return sides

    def pair(self, sample: Sample) -> list[Sample]:
        """The two training samples [chosen, rejected], made from a sample whose metadata contains a `PAIR` of replies.
        Both have the same ``unit_id`` and the same ``rollout_id``. The chosen sample has reward 1, and the rejected
        sample has reward 0.

        If the replies are conversations, the prompt consists of the messages with which both conversations begin.
        Assistant messages in the prompt are not trained on. The cut at ``max_context_len`` may remove all trained
        tokens of a reply. Then both samples are marked ``remove_sample``.

        Raises:
            ValueError: the sample has no `PAIR` in its metadata, or `fill` raises an error.
        """
        sides = self._sides(sample)
        replies = sample.metadata[PAIR]
        for side, reply in zip(sides, replies, strict=True):
            label, reward = side.label, side.reward
            if isinstance(reply, str):
                self._fill_text(side, sample, reply)
            else:
                side.prompt = _untrained_start(reply, _shared(*replies))
                self.fill(side)
            side.label, side.reward = label, reward
        return _together(sides)

    def _fill_text(self, side: Sample, prompt: Sample, reply: str) -> None:
        """Join the prompt's ids (as in generation), the reply's ids and the end-of-sequence token.

        If a reply already ends with an end token (as in saved rollouts), it does not get a second end token.
        """
        ids = self.tokenizer(reply, add_special_tokens=False)["input_ids"]
        ended = reply.endswith(self._turn_ends)
        ids += [] if ended or self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        prompt_length = len(prompt.tokens)
        self._put(side, [*prompt.tokens, *ids], [0] * prompt_length + [1] * len(ids), kept=prompt_length)
        side.prompt = prompt.prompt

    def _put(self, sample: Sample, ids: list[int], mask: list[int], kept: int = 0) -> None:
        """Fill ``sample``. The response starts at the first trained token. The first ``kept`` tokens are never cut."""
        room = len(ids) if self.max_context_len is None else max(self.max_context_len, kept)
        sample.status = Status.TRUNCATED if room < len(ids) else Status.COMPLETED
        ids, mask = ids[:room], mask[:room]
        start = mask.index(1) if 1 in mask else len(ids)
        sample.tokens, sample.response_length, sample.loss_mask = ids, len(ids) - start, mask[start:]
        sample.response = self.tokenizer.decode(ids[start:])
        sample.remove_sample = start == len(ids)

    @cached_property
    def special(self) -> re.Pattern[str]:
        """A regular expression that matches every special token of the tokenizer except the beginning-of-text token."""
        begin = {self.tokenizer.bos_token} - {self.tokenizer.eos_token}
        tokens = [token for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        texts = [token.content for token in tokens if token.content not in begin]
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")

    @cached_property
    def _turn_ends(self) -> tuple[str, ...]:
        """Tokens that end an answer: the end-of-sequence token, and the special tokens that the chat template writes
        after an answer."""
        ends = {str(self.tokenizer.eos_token)} if self.tokenizer.eos_token else set()
        question, reply = ({"role": role, "content": PROBE} for role in ("user", "assistant"))
        for turns in ([question, reply], [question, reply, question]):  # the last turn may have another end
            try:
                after = self.render(turns).split(PROBE)[2].strip()
            except (TemplateError, ValueError, TypeError, IndexError):  # no template, or it refuses or hides the probe
                continue
            mark = self.special.match(after)
            ends |= {after} & self.tokenizer.get_added_vocab().keys() | ({mark[0]} if mark else set())
        return tuple(ends)

    def _without_end(self, message: Message) -> Message:
        content, ends = message.get("content"), self._turn_ends
        if not isinstance(content, str) or not content.rstrip().endswith(ends):
            return message
        while content.rstrip().endswith(ends):
            content = content.rstrip()
            content = content[: -max(len(end) for end in ends if content.endswith(end))]
        return {**message, "content": content}


def _together(sides: list[Sample]) -> list[Sample]:
    """The samples of a pair. If one sample is not trained on, neither is the other."""
    if any(side.remove_sample for side in sides):
        for side in sides:
            side.remove_sample = True
    return sides


def is_trained(message: Message) -> bool:
    """Whether a reply is trained on: true unless the message has a ``step_loss_mask`` other than 1."""
    return message.get("step_loss_mask", 1) == 1


def _shared(chosen: Messages, rejected: Messages) -> int:
    """The number of equal messages at the start of both conversations. The last message of each conversation never
    counts."""
    both = zip(chosen[:-1], rejected[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda messages: messages[0] == messages[1], both))


def _untrained_start(conversation: Messages, count: int) -> Messages:
    """A copy of the conversation. The assistant's messages among its first ``count`` messages have ``step_loss_mask``
    0."""
    start = [{**m, "step_loss_mask": 0} if m["role"] == "assistant" else m for m in conversation[:count]]
    return [*start, *conversation[count:]]


def _tokenize(chat: ChatReader, piece: Piece) -> tuple[list[int], list[int]]:
    encoded = chat.tokenizer(piece.text, add_special_tokens=False, return_offsets_mapping=True)
    spans = iter(sorted((start, end) for start, end in piece.trained if start < end))
    start, end = next(spans, (len(piece.text), len(piece.text)))
    mask, last = [], 0
    for left, right in encoded["offset_mapping"]:
        text = piece.text[left:right]
        # a tokenizer may cut characters (such as a leading space) off an offset; they still belong to the token
        left, last = min(left, last), right
        while end <= left and end < len(piece.text):
            start, end = next(spans, (len(piece.text), len(piece.text)))
        trained = left < end and right > start
        if trained and chat.special.fullmatch(text.strip()):
            # Phi-3's special tokens include the white space around them, even white space of a reply
            begin = right - len(text.lstrip())
            trained = start <= begin and begin + len(text.strip()) <= end
        elif trained and right > end:
            trained = not piece.text[max(left, start) : end].isspace()
        mask.append(int(trained))
    return encoded["input_ids"], mask


def auto_mask(chat: ChatReader, messages: Messages, tools: Tools) -> list[Piece]:
    """The rendered conversation with its trained spans. The spans come from the template's ``{% generation %}`` marks.
    If the template has no marks, the spans come from a comparison of renderings.

    Both methods give the exact spans for every template that copies a reply's content unchanged.
    """
    if MARKS.search(chat.tokenizer.get_chat_template(None, tools)):
        return [_marked(chat, messages, tools)]
    text = chat.render(messages, tools)
    chosen = [i for i, m in enumerate(messages) if m["role"] == "assistant" and is_trained(m)]
    finder = Finder(messages, text, lambda m, prompt: chat.render(m, tools, generation_prompt=prompt), chat.special)
    spans = [span for i in chosen for span in finder.spans(i)]
    if chosen and chosen[-1] == len(messages) - 1 and (mark := finder.next_mark()):
        spans.append((len(text), len(text + mark)))
        text += mark
    return [Piece(text, spans)]


def _marked(chat: ChatReader, messages: Messages, tools: Tools) -> Piece:
    """The spans of the template's own ``{% generation %}`` marks."""
    tokenizer = chat.tokenizer
    chat.render(messages, tools)  # limits the whole text; with marks, transformers itself joins the parts of the text
    from transformers.utils.chat_template_utils import render_jinja_template

    settings = {**tokenizer.special_tokens_map, **chat.template_kwargs}
    template = tokenizer.get_chat_template(None, tools)
    with bounded(tokenizer):
        texts, marks = with_arguments(
            lambda messages: render_jinja_template(
                [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **settings
            ),
            messages,
        )
    spans: list[Span] = marks[0]
    replies = [m for m in messages if m["role"] == "assistant"]
    if all(is_trained(m) for m in replies):
        return Piece(texts[0], spans)
    if len(spans) != len(replies):
        raise ValueError(
            f"the chat template marks {len(spans)} generations for {len(replies)} assistant messages, so "
            "step_loss_mask cannot be applied; put one {% generation %} block around each assistant message"
        )
    return Piece(texts[0], [span for span, message in zip(spans, replies, strict=True) if is_trained(message)])


def _unit(chat: ChatReader, text: str, message: Message) -> Piece:
    """A message that is rendered alone. If it is a reply, everything after the generation prompt is trained on."""
    if message["role"] != "assistant" or not is_trained(message):
        return Piece(text, [])
    user = {"role": "user", "content": "x"}
    header = len(chat.render([user], generation_prompt=True)) - len(chat.render([user]))
    return Piece(text, [(header, len(text))])


def qwen_mask(chat: ChatReader, messages: Messages, tools: Tools) -> list[Piece]:
    """slime's mask ``qwen``. Each message is rendered separately, and the system prompt that the template adds is cut
    off."""
    user = {"role": "user", "content": "x"}
    added = 2 * len(chat.render([user])) - len(chat.render([user, user]))
    pieces = [_unit(chat, chat.render(messages[:1], tools), messages[0])]
    for message in messages[1:]:
        text = chat.render([message])
        pieces.append(_unit(chat, text if message["role"] == "system" else text[added:], message))
    return pieces


def qwen3_mask(chat: ChatReader, messages: Messages, tools: Tools) -> list[Piece]:
    """slime's mask ``qwen3``. Each message except the first is rendered after a dummy user message, so the template
    keeps the thinking of every reply.

    Consecutive tool answers are rendered together, because the template writes them as one turn.
    """
    question = {"role": "user", "content": "x"}
    length = len(chat.render([question]))
    pieces = [_unit(chat, chat.render([messages[0], question], tools)[:-length], messages[0])]
    tool_runs = groupby(enumerate(messages[1:]), key=lambda item: -1 if item[1]["role"] == "tool" else item[0])
    for _, run in tool_runs:
        unit = [message for _, message in run]
        pieces.append(_unit(chat, chat.render([question, *unit])[length:], unit[0]))
    return pieces


def qwen3_5_mask(chat: ChatReader, messages: Messages, tools: Tools) -> list[Piece]:
    """slime's mask ``qwen3_5``. The conversation is rendered as a whole. The trained span of a reply starts after the
    turn's header. If the header is followed by an opening ``<think>``, the span starts after this tag."""
    text = chat.render(messages, tools)
    replies = re.finditer(r"<\|im_start\|>assistant\n(?:<think>\n)?(.*?<\|im_end\|>\n?)", text, re.DOTALL)
    flags = [is_trained(m) for m in messages if m["role"] == "assistant"]
    spans = [reply.span(1) for reply in replies]
    if len(spans) != len(flags):
        raise ValueError(
            f"--loss-mask-type qwen3_5 found {len(spans)} replies in a conversation with {len(flags)} replies; "
            "use --loss-mask-type auto"
        )
    return [Piece(text, [span for span, flag in zip(spans, flags, strict=True) if flag])]


def distill_qwen_mask(chat: ChatReader, messages: Messages, tools: Tools) -> list[Piece]:
    """slime's mask ``distill_qwen``. Only the first message is the prompt, and the content of the last message is the
    response."""
    reply = messages[-1]["content"] or ""
    trained = [(0, len(reply))] if is_trained(messages[-1]) else []
    return [Piece(chat.render(messages[:1], tools, generation_prompt=True), []), Piece(reply, trained)]
