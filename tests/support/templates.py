"""Chat templates of real models, and conversations to render with them.

The templates are read from the TRL that ``scripts/setup.sh --dev`` installs; nothing of them is copied here. TRL writes
down beside many of them a *twin*: the same template with ``{% generation %}`` around what the model says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slimelite.data.messages import read_messages, render

Messages = list[dict[str, Any]]
VERSION = re.findall(r"(?m)^trl==(\S+)$", (Path(__file__).parents[2] / "constraints.txt").read_text())[0]
TWIN = "_training"
# marks that these models have as one token: those between bars, and some of the others
SPECIAL = re.compile(r"<\|[^<>|\s]+\|?>|<[^<>|\s｜]+\|>|<｜[^｜<>]+｜>|</?[a-z]+_of_[a-z]+>|\[/?INST\]|\[gMASK\]|<sop>")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# template -> end of a sequence, where that is not the first of `ENDS` that it has
EOS = {"phi3": "<|endoftext|>", "phi3_5": "<|endoftext|>", "llava_next": "</s>", "glm4moe": "<|endoftext|>"}
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>"),
    *("<｜end▁of▁sentence｜>", "<|return|>", "<|eot|>"),
)


@cache
def folder() -> Path:
    """Where the templates are."""
    try:
        found = metadata.distribution("trl")
    except metadata.PackageNotFoundError:
        found = None
    if found is None or found.version != VERSION:
        raise AssertionError(
            f"these tests read chat templates from TRL {VERSION}, and here is {found.version if found else 'none'}: "
            "bash scripts/setup.sh --dev"
        )
    return Path(str(found.locate_file("trl/chat_templates")))


@cache
def source(name: str) -> str:
    """The text of the template ``name``."""
    return (folder() / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def names() -> list[str]:
    """The templates as models have them, without the twins."""
    return sorted(path.stem for path in folder().glob("*.jinja") if not path.stem.endswith(TWIN))


def twin(name: str) -> str | None:
    """The template with the marks of TRL, whose text may differ from the model's; None: there is none."""
    marked = folder() / f"{name}{TWIN}.jinja"
    return marked.read_text(encoding="utf-8") if marked.exists() else None


@cache
def tokenizer(name: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose special tokens are the marks in the template ``name``; it has some longer tokens.

    ``template``: the chat template that it gets; default: that one.
    """
    text = source(name)
    special = sorted({*SPECIAL.findall(text), "<s>", "</s>", "<|endoftext|>"})
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("s", "a"), ("sa", "y"), (">", "Ċ"), ("Ġ", "s"), ('"', "}")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    words = Tokenizer(models.BPE(vocabulary, merges))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken(mark, normalized=False) for mark in special])
    words.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in PLAIN if mark in text])
    eos = EOS.get(name) or next((end for end in ENDS if end in text), "</s>")
    settings = {"bos_token": "<s>", "eos_token": eos, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template or text, **settings)


def user(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"ask{number} of a user"}


def reply(number: int, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": f"say{number} of the model", **more}


def thought(number: int) -> dict[str, Any]:
    return {"reasoning_content": f"thought{number} of the model"}


def answer(number: int, call: int) -> dict[str, Any]:
    return {"role": "tool", "content": f"found{number} by a tool", "tool_call_id": f"call{call:05d}"}


def calls(*numbers: int) -> dict[str, Any]:
    """The part of a reply that calls the tool, once for each of ``numbers``."""
    made = [
        {
            "id": f"call{number:05d}",
            "type": "function",
            "function": {"name": "search", "arguments": {"query": f"seek{number}", "top": number}},
        }
        for number in numbers
    ]
    return {"tool_calls": made}


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Shown by a tool's description.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "shown by a parameter's description"},
                    "top": {"type": "integer", "description": "shown as well"},
                },
                "required": ["query"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "rule of the system"}
SAME = "the same words"
# name -> messages; those with calls are rendered with `TOOLS`
TALKS: dict[str, Messages] = {
    "turns": [user(1), reply(1), user(2), reply(2)],
    "system": [SYSTEM, user(1), reply(1), user(2), reply(2)],
    "same": [{**user(1), "content": SAME}, {**reply(1), "content": SAME}] * 2,
    "open": [user(1), reply(1), user(2)],
    "thinking": [user(1), reply(1, **thought(1)), user(2), reply(2, **thought(2))],
    "call": [user(1), {**reply(1), "content": "", **calls(1)}, answer(1, 1), reply(2), user(3), reply(3)],
    "words and call": [SYSTEM, user(1), reply(1, **calls(1)), answer(1, 1), reply(2)],
    "two calls": [user(1), {**reply(1), "content": "", **calls(1, 2)}, answer(1, 1), answer(2, 2), reply(2)],
    "calls in a row": [
        user(1),
        {**reply(1), "content": "", **calls(1), **thought(1)},
        answer(1, 1),
        {**reply(2), "content": "", **calls(2), **thought(2)},
        answer(2, 2),
        reply(3, **thought(3)),
    ],
    "call at the end": [user(1), reply(1), user(2), {**reply(2), "content": "", **calls(1)}],
    "answer at the end": [user(1), {**reply(1), "content": "", **calls(1)}, answer(1, 1)],
}
# (template, conversation) in which a reply does not follow its own prompt, so that SFT refuses it
REFUSED = {("deepseekv3", "calls in a row"): "the second call drops the mark that its prompt ends with"}


def tools(messages: Messages) -> list[dict[str, Any]] | None:
    """What a conversation of `TALKS` is rendered with."""
    return TOOLS if any("tool_calls" in message for message in messages) else None


def talk(spoken: PreTrainedTokenizerFast, name: str) -> Messages | None:
    """The conversation ``name`` in the form that the template shows; None: it refuses it, or hides some of it.

    Thinking may be left out, and is by many.
    """
    for form in (str, lambda content: [{"type": "text", "text": content}]):
        messages = [{**message, "content": form(message["content"])} for message in read_messages(TALKS[name])]
        try:
            text = render(spoken, messages, tools(messages), {})
        except (TemplateError, TypeError, ValueError):
            continue
        if all(said in text for said in texts(TALKS[name])) and "'type': 'text'" not in text:
            return messages
    return None


def shows_tools(name: str) -> bool:
    """Whether the template shows the model the tools that it is given."""
    spoken = tokenizer(name)
    for content in ("x", [{"type": "text", "text": "x"}]):
        with suppress(TemplateError, TypeError):  # it wants the other form
            asked = [{"role": "user", "content": content}]
            if TOOLS[0]["function"]["description"] in render(spoken, asked, TOOLS, {}):
                return True
    return False


def texts(messages: Messages, roles: Sequence[str] = ("system", "user", "tool", "assistant")) -> list[str]:
    """What the messages of these roles say and call, without thinking."""
    said = [message["content"] for message in messages if message["role"] in roles and message["content"]]
    made = [call for message in messages if message["role"] in roles for call in message.get("tool_calls", ())]
    return said + [call["function"]["arguments"]["query"] for call in made]
