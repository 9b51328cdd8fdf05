"""Which tokens of a conversation the model is trained on: what it would have written itself.

``auto`` fits any chat template. Where the template marks its replies with ``{% generation %}``, the marks are taken;
elsewhere each reply is found by rendering the conversation with the reply replaced and comparing. A reply runs from the
end of the generation prompt to the end of the turn, its end-of-turn token included. The other kinds are slime's, in
`mask_types`. An assistant message with ``step_loss_mask: 0`` is not trained on, whatever the kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from slimelite.data.mask_types import SLIME_MASKS, Message, Piece, Renderer, Span, is_trained

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

MARKS = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")
# stands in for what an assistant says; private-use characters, which no trim, split or escape touches
PROBE = "\ue0f0\ue0f1\ue0f2"


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    loss_mask_type: str = "auto",
) -> tuple[list[int], list[int]]:
    """(token ids, loss mask) of a whole conversation, one mask entry (0 or 1) a token.

    A token that is partly inside a trained stretch of text is trained on.

    Raises:
        ValueError: the tokenizer has no chat template or gives no offsets, the template refuses the messages, or it
            does not show what an assistant message says.
    """
    if not tokenizer.is_fast or not tokenizer.chat_template:
        raise ValueError(
            "loss masks need a tokenizer with a chat template and a tokenizer.json in the --hf-checkpoint folder"
        )
    render = Renderer(tokenizer, template_kwargs or {})
    try:
        if loss_mask_type != "auto":
            pieces = SLIME_MASKS[loss_mask_type](render, messages, tools)
        elif MARKS.search(tokenizer.get_chat_template(None, tools)):
            pieces = [_marked(render, messages, tools)]
        else:
            pieces = [_compared(render, messages, tools)]
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses this conversation ({error})") from error
    token_ids: list[int] = []
    loss_mask: list[int] = []
    for piece in pieces:
        ids, mask = _tokenize(tokenizer, piece)
        token_ids += ids
        loss_mask += mask
    return token_ids, loss_mask


def _tokenize(tokenizer: PreTrainedTokenizerBase, piece: Piece) -> tuple[list[int], list[int]]:
    encoded = tokenizer(piece.text, add_special_tokens=False, return_offsets_mapping=True)
    spans = iter(sorted((start, end) for start, end in piece.trained if start < end))
    start, end = next(spans, (len(piece.text), len(piece.text)))
    mask, last = [], 0
    for left, right in encoded["offset_mapping"]:
        # tokens tile the text: what a tokenizer trims off an offset (a leading space) belongs to the token all the same
        left = min(left, last)
        while end <= left and end < len(piece.text):
            start, end = next(spans, (len(piece.text), len(piece.text)))
        mask.append(int(left < end and right > start))
        last = right
    return encoded["input_ids"], mask


def _marked(render: Renderer, messages: list[Message], tools: list[Any] | None) -> Piece:
    """The template's own ``{% generation %}`` marks."""
    tokenizer = render.tokenizer
    texts, marks = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=tokenizer.get_chat_template(None, tools),
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **render.settings},
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


def _compared(render: Renderer, messages: list[Message], tools: list[Any] | None) -> Piece:
    """Spans found by comparing renderings; exact for every template that shows a reply's content as it is."""
    text = render(messages, tools)
    chosen = [i for i, m in enumerate(messages) if m["role"] == "assistant" and is_trained(m)]
    return Piece(text, [_reply_span(render, messages, tools, i, text) for i in chosen])


def _reply_span(render: Renderer, messages: list[Message], tools: list[Any] | None, i: int, text: str) -> Span:
    """Where the reply ``messages[i]`` stands in ``text``, the rendering of all messages.

    The conversation is rendered again with a probe in place of the reply. The text before the probe then ends with the
    header of the turn, and with whatever the template puts in front of a reply, such as an empty thinking block. To
    tell the header from that, the question alone is rendered twice: answered by the probe, and with its generation
    prompt. The first of these also shows how a turn ends.
    """
    probe, before, after = _probed(render, messages, tools, i)
    shared = _common(before, text)
    asked = messages[:i]
    while asked and asked[-1]["role"] == "assistant":
        asked = asked[:-1]
    answered, _, turn_end = render([*asked, probe], tools).partition(PROBE)
    start = len(before)
    if asked:
        header_end = _common(answered, render(asked, tools, generation_prompt=True))
        if header_end < len(render(asked, tools)):
            raise _hidden(i)
        opening = answered[header_end:]
        start -= len(opening) if before.endswith(opening) else 0
    else:
        start = min(start, shared)
    if start > shared:
        raise _hidden(i)
    end = max(start, len(text) - _common(after[::-1], text[::-1]))
    return start, end + _common(text[end:], turn_end)


def _probed(render: Renderer, messages: list[Message], tools: list[Any] | None, i: int) -> tuple[Message, str, str]:
    """(the reply with a probe in it, the text before the probe, the text after it)."""
    for probe in _probes(messages[i]):
        try:
            before, found, after = render([*messages[:i], probe, *messages[i + 1 :]], tools).partition(PROBE)
        except TemplateError:
            continue  # some templates insist that a tool's answer follows a call: the next probe is one
        if found and PROBE not in after:
            return probe, before, after
    raise _hidden(i)


def _hidden(i: int) -> ValueError:
    return ValueError(
        f"the chat template does not show what assistant message {i} says, so its tokens cannot be found; "
        "mark replies with {% generation %} … {% endgeneration %} in the template"
    )


def _probes(message: Message) -> Iterator[Message]:
    parts = isinstance(message.get("content"), list)
    yield {"role": "assistant", "content": [{"type": "text", "text": PROBE}] if parts else PROBE}
    if message.get("tool_calls"):
        first, *others = message["tool_calls"]
        called = first.get("function", first)
        renamed = {**called, "name": PROBE}
        yield {**message, "tool_calls": [{**first, "function": renamed} if "function" in first else renamed, *others]}


def _common(a: str, b: str) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is faster than comparing characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
