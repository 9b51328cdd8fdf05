"""Tool calls by the chat templates of real models: each that one writes is read back, and sessions keep the tokens."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import pytest

from slimelite.engines.protocol import GenerateRequest, GenerateResult, OnTokens
from slimelite.samples.sample import Sample
from slimelite.serving.format import ChatFormat
from slimelite.serving.sessions import Session, Sessions
from tests.support import templates

ASK = {"role": "user", "content": "ask of a user"}
KINDS = {"query": "string", "top": "integer", "list": "array", "object": "object", "flag": "boolean", "ratio": "number"}
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "x",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind, "description": "x"} for name, kind in KINDS.items()},
            "required": ["query"],
        },
    },
}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"query": "He said: \"it's 5 o'clock\".\nA tab\tand an end\n"},
    {"query": "naïve 你好 😀 {[(,;:)]} 'b', (d) <b> & </i>", "top": 3},
    {"query": "75001", "top": 75001, "ratio": 1e-07},
    {"query": "", "flag": True, "top": None, "ratio": -2.5, "unknown": 2**60},
    {"list": ["a", 2, None, ["it's"], {"c": False}], "object": {"x": {"y": ['"']}, "z": ""}},
    *(UNESCAPED := [{"query": "C:\\new\\table"}, {"query": "f('b', c=d)"}]),
    *(TAGS := [{"query": "a</tool_call>b"}, {"query": 'a</tool_call>\n<tool_call>{"b"', "top": 3}]),
]
# arguments that are not read back, because the format marks nothing in a text. LFM2.5's first templates put quotes
# around a text: a backslash, which begins an escape, and what looks like the next parameter are ambiguous. The formats
# glm and qwen3_coder put tags around a text
UNMARKED = {"lfm2_2_5": UNESCAPED, "lfm2_2_5_v2": UNESCAPED, "glm": TAGS, "qwen3_coder": TAGS}


USED = [name for name in templates.names() if templates.shows_tools(name)]
FORMATS = {name: ChatFormat(templates.tokenizer(name)) for name in templates.names()}


def called(arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps(arguments)}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def written(chat_format: ChatFormat, reply: dict[str, Any]) -> str:
    """What the template writes of a reply, from the end of the generation prompt on."""
    prompt = chat_format.render([ASK], [TOOL])
    text = chat_format.render([ASK, reply], [TOOL], add_generation_prompt=False)
    same = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False)))
    return text[len(re.sub(r"<[^<>]*\Z", "", same)) :]  # a thought that the prompt begins may not be there


def test_each_template_that_shows_tools_can_be_used_with_them_and_the_others_say_so() -> None:
    assert len(USED) == 28
    for name, chat_format in FORMATS.items():
        if name in USED:
            assert chat_format.prompt([ASK], [TOOL])
        else:
            with pytest.raises(ValueError, match="shows the model no tools"):
                chat_format.prompt([ASK], [TOOL])


@pytest.mark.parametrize("name", USED)
def test_every_call_that_a_template_writes_is_read_back(name: str) -> None:
    marked = templates.twin(name)
    for template in (None, marked) if marked else (None,):
        chat_format = ChatFormat(templates.tokenizer(name, template))
        for arguments in ARGUMENTS:
            if arguments in [*UNMARKED.get(name, ()), *UNMARKED.get(FORMATS[name].tools.name, ())]:
                continue
            text = written(chat_format, {"role": "assistant", "content": "", "tool_calls": [called(arguments)]})
            read = chat_format.reply(chat_format.encode(text.rstrip("\n")), [TOOL])
            assert [(call.name, json.loads(call.arguments)) for call in read.tool_calls] == [("search", arguments)], (
                text
            )
            assert (read.content, read.malformed) == ("", ()), text


@pytest.mark.parametrize("name", USED)
def test_several_calls_and_what_is_said_with_them_are_read_back(name: str) -> None:
    chat_format = FORMATS[name]
    calls = [called({"query": f"seek{number}", "top": number}, number) for number in range(3)]
    for count, content, thinking in (
        (3, "", ""),
        (1, "Words.", ""),
        (2, "", "A thought."),
        (2, "Words.", "A thought."),
    ):
        reply = {"role": "assistant", "content": content, "tool_calls": calls[:count]}
        try:
            text = written(chat_format, {**reply, "reasoning_content": thinking} if thinking else reply)
        except ValueError:  # Llama's templates have one call a reply
            assert count > 1
            continue
        read = chat_format.reply(chat_format.encode(text.rstrip("\n")), [TOOL])
        shown = [number for number in range(3) if f"seek{number}" in text]
        assert [json.loads(call.arguments)["top"] for call in read.tool_calls] == shown
        assert shown
        assert read.malformed == ()
        said = [content] if content in text else []
        if name == "gptoss" and content:  # written as a thought, and a thought beside it is left out
            said, thinking = [""], content
        assert [read.content] == (said or [""])
        if thinking and chat_format.reasoning is not None:
            assert read.reasoning == (thinking if thinking in text else None)


@pytest.mark.parametrize("name", USED)
def test_a_call_that_is_asked_for_begins_as_the_template_writes_one(name: str) -> None:
    chat_format, prompt = FORMATS[name], FORMATS[name].render([ASK], [TOOL])
    if name.startswith("nemotron"):  # its prompts open a thought
        with pytest.raises(ValueError, match="cannot continue the prompt with a call"):
            chat_format.opening([ASK], prompt, ["search"], [TOOL])
        return
    given = chat_format.decode(chat_format.opening([ASK], prompt, ["search"], [TOOL]))
    reply = {"role": "assistant", "content": "", "tool_calls": [called({"query": "a", "top": 3})]}
    whole = chat_format.render([ASK, reply], [TOOL], add_generation_prompt=False)
    assert whole.startswith(prompt + given)
    assert "search" in given


@dataclass(frozen=True)
class Family:
    """How models of a family write, with ``{}`` for what they say; ``ends``: the tokens after a call and a reply."""

    call: str
    ends: tuple[str, str]
    think: str = "<think>\n{}\n</think>\n\n"
    say: str = "{}"


CHATML = ("<|im_end|>", "<|im_end|>")
GEMMA = Family(
    '<|tool_call>call:search{query:<|"|>{}<|"|>,top:1}<tool_call|>',
    ("<|tool_response>", "<turn|>"),
    "<|channel>thought\n{}\n<channel|>",
)
CODER = Family(
    "<tool_call>\n<function=search>\n<parameter=query>\n{}\n</parameter>\n<parameter=top>\n1\n</parameter>\n"
    "</function>\n</tool_call>",
    CHATML,
)
# how a template's name begins -> its family; the first that fits
FAMILIES = {
    "gemma4_v2": replace(GEMMA, ends=("<turn|>", "<turn|>")),
    "gemma4": GEMMA,
    "diffusion_gemma": GEMMA,
    "glm4moe": Family(
        "\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>top</arg_key>\n"
        "<arg_value>1</arg_value>\n</tool_call>",
        ("<|observation|>", "<|user|>"),
        "\n<think>{}</think>\n",
    ),
    "gptoss": Family(
        '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query":"{}","top":1}',
        ("<|call|>", "<|return|>"),
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        "<|channel|>final<|message|>{}",
    ),
    "lfm2": Family('<|tool_call_start|>[search(query="{}", top=1)]<|tool_call_end|>', CHATML, "<think>{}</think>"),
    "llama3": Family('{"name": "search", "parameters": {"query": "{}", "top": 1}}', ("<|eot_id|>", "<|eot_id|>")),
    "muse_glimmer": Family(
        ' to=search<|message|><atem:function_calls>\n<atem:invoke name="search">\n<atem:parameter name="query">{}'
        '</atem:parameter>\n<atem:parameter name="top">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        ("<|eot|>", "<|eot|>"),
        " to=self<|message|>{}<|eom|><|start|>assistant",
        " to=user<|message|>{}",
    ),
    "nemotron": replace(CODER, think="<think>\n{}\n</think>\n"),
    **dict.fromkeys(("qwen3_5", "qwen3_6", "qwen3_8"), CODER),
    "qwen": Family('<tool_call>\n{"name": "search", "arguments": {"query": "{}", "top": 1}}\n</tool_call>', CHATML),
}
# which turn each of two calls, a reply, and another one after a question goes on from
APPENDS, KEEPS_THOUGHTS_WHILE_CALLING = [None, 0, 1, 2], [None, 0, 1, None]
PLAIN = {
    "gptoss": [None, 0, 1, 1],  # the mark at the end of a reply is another one in the history
    "diffusion_gemma": [None, 0, None, None],  # begins another turn after a tool's answer, and its prompts do not
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), KEEPS_THOUGHTS_WHILE_CALLING),
    # its prompts open a thought, which is another text in a history without one
    **dict.fromkeys([name for name in USED if name.startswith("nemotron")], [None] * 4),
}
THINKING = {
    **dict.fromkeys(("muse_glimmer", "qwen3_8"), APPENDS),
    "diffusion_gemma": PLAIN["diffusion_gemma"],
    "gemma4_v2": [None] * 4,  # shows no thoughts
    "qwen3_5_nothink": [None] * 4,  # its prompts end an empty thought
}


class Told:
    """A sampler that says ``texts``, a character or a mark a token, as no encoder would spell them."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self.format, self.texts, self.requests = chat_format, list[str](), list[GenerateRequest]()

    async def __call__(self, request: GenerateRequest, _: OnTokens | None) -> GenerateResult:
        self.requests.append(request)
        marks = sorted((t.content for t in self.format.tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", self.texts.pop(0))
        pieces = [piece for part in parts for piece in ([part] if part in marks else part)]
        ids = [token for piece in pieces for token in self.format.encode(piece)]
        return GenerateResult(request.request_id, ids, [-0.5] * len(ids), [1] * len(ids), "stop")


async def talk(session: Session, sampler: Told, family: Family, *, think: bool) -> None:
    """Two calls with their answers, a reply, a question, and a reply; each is read as it was meant."""
    messages = [ASK]
    for number, (says, end) in enumerate(zip((family.call, family.call, family.say, family.say), "0011", strict=True)):
        opened = session.format.opens_thinking(session.format.render(messages, [TOOL]))
        thought = family.think.replace("{}", f"thought {number}") if think else "\n</think>\n\n" if opened else ""
        thought = thought.removeprefix("<think>\n") if opened else thought
        sampler.texts.append(thought + says.replace("{}", f"said {number}") + family.ends[int(end)])
        reply = (await session.chat(messages, [TOOL])).reply
        made = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
        assert reply.reasoning == (f"thought {number}" if think else None)
        assert (made, reply.content) == (
            ([], f"said {number}") if end == "1" else ([("search", {"query": f"said {number}", "top": 1})], "")
        )
        answers = [{"role": "tool", "content": f"found {number}", "tool_call_id": call.id} for call in reply.tool_calls]
        messages += [reply.message(), *(answers or [ASK])]


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("name", USED)
def test_sessions_go_on_from_the_sampled_tokens_or_branch_as_documented(name: str, think: bool) -> None:
    chat_format = FORMATS[name]
    if think and chat_format.reasoning is None:
        return
    family = next(family for begin, family in FAMILIES.items() if name.startswith(begin))
    sampler = Told(chat_format)
    session = Sessions(chat_format, sampler, 100_000).open()
    asyncio.run(talk(session, sampler, family, think=think))
    documented = THINKING.get(name, KEEPS_THOUGHTS_WHILE_CALLING) if think else PLAIN.get(name, APPENDS)
    assert [turn.parent for turn in session.turns] == documented
    for turn, request in zip(session.turns, sampler.requests, strict=True):
        assert list(request.input_ids) == turn.prompt_ids
        if turn.before is None:
            assert turn.prompt_ids == chat_format.encode(turn.rendered)
        else:  # what the template puts after the reply follows on its tokens
            assert turn.prompt_ids[: len(turn.before.token_ids)] == turn.before.token_ids
            shown = [re.sub(r"\s", "", text) for text in (chat_format.decode(turn.prompt_ids), turn.rendered)]
            assert shown[0][-20:] == shown[1][-20:]
    samples = session.samples(Sample(index=0))
    trained = sum(sum(sample.loss_mask or []) for sample in samples)
    assert trained == sum(len(turn.output_ids) for turn in session.turns), "every sampled token is trained once"
