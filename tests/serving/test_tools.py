"""Tool calls and thinking of each family: what its template writes is read back, and no text is too odd to be read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimelite.serving.format import ChatFormat
from slimelite.serving.tools import REASONING_FORMATS, TOOL_FORMATS, read_reasoning, read_tools
from tests.serving.chat import MARKS, TEMPLATES, TOOL, tokenizer

FAMILIES = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3.5": "qwen3_coder",
    "llama3": "llama3",
    "mistral": "mistral",
    "glm": "glm",
    "deepseek": "deepseek",
}
FORMATS = {family: ChatFormat(tokenizer(family)) for family in FAMILIES}
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# pieces that the readers look for, so that random texts get far into them
PIECES = [*MARKS, "[ARGS]", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=f>", "</function>"]
PIECES += [
    "<parameter=p>",
    "</parameter>",
    '{"name": "f", ',
    '"arguments": ',
    '"parameters": ',
    "{}",
    "}",
    "[",
    "]",
    ";",
]
PIECES += ["```json\n", "\n```", "function", "[THINK]", "[/THINK]", '{"name": "f", "arguments": {"a": 1}}', "9" * 5000]
odd = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join)
plain = st.text(st.characters(exclude_characters="<>[]{}｜", exclude_categories=["Cs", "Cc"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
calls = st.lists(
    st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3, unique_by=lambda c: c[0]
)


def test_the_template_says_how_calls_and_thinking_are_written() -> None:
    for family, chat_format in FORMATS.items():
        assert chat_format.tools is not None
        assert chat_format.tools.name == FAMILIES[family], family
        thinks = None if chat_format.reasoning is None else chat_format.reasoning.name
        assert thinks == ("think" if family.startswith("qwen3") else None), family
    forced = ChatFormat(tokenizer(), tool_parser="mistral", reasoning_parser="seed")
    assert forced.tools is TOOL_FORMATS["mistral"]
    assert forced.reasoning is REASONING_FORMATS["seed"]
    with pytest.raises(ValueError, match=r"--tool-call-parser hermis: .* did you mean hermes"):
        ChatFormat(tokenizer(), tool_parser="hermis")


@pytest.mark.parametrize("family", FAMILIES)
@few
@given(called=calls, content=plain.map(str.strip))
def test_what_a_template_writes_is_read_back(family: str, called: list[tuple[str, Any]], content: str) -> None:
    chat_format = FORMATS[family]
    if family == "llama3":  # one call, and nothing beside it
        called, content = called[:1], ""
    if family == "mistral":
        content = ""
    asked = [{"role": "user", "content": "x"}]
    written = [
        {"id": "call00000", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in called
    ]
    schemas = [
        {"function": {"name": name, "parameters": {"properties": {k: {"type": "string"} for k in texts}}}}
        for name, arguments in called
        if (texts := [k for k, v in arguments.items() if isinstance(v, str)])
    ]
    reply = {"role": "assistant", "content": content, "tool_calls": written}
    prompt = chat_format.render(asked)
    text = chat_format.render([*asked, reply], add_generation_prompt=False)
    assert text.startswith(prompt) or family == "mistral"
    text = text.removeprefix(prompt)
    read = chat_format.reply(chat_format.encode(text.removesuffix("\n")), [TOOL, *schemas])
    assert read.malformed == ()
    assert [(call.name, json.loads(call.arguments)) for call in read.tool_calls] == called
    assert read.content == content
    assert len({call.id for call in read.tool_calls}) == len(called)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@few
@given(text=odd, opened=st.booleans())
def test_any_text_is_read(name: str, text: str, opened: bool) -> None:
    schemas = {"f": {"p": {"type": "integer"}}}
    for form in [*REASONING_FORMATS.values(), None]:
        _, rest = read_reasoning(text, form, opened=opened)
        content, found, malformed = read_tools(rest, TOOL_FORMATS[name], schemas, "")
        assert all(isinstance(json.loads(call.arguments), dict) for call in found)
        assert all(sentence.endswith(".") for sentence in malformed)
        assert found or content == rest, "nothing is lost of a reply without calls"


@pytest.mark.parametrize(
    ("family", "text", "why"),
    [
        ("qwen2.5", "<tool_call>{'name': 'f'}</tool_call>", "it is not JSON"),
        ("qwen2.5", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "its arguments are not a JSON object"),
        ("qwen2.5", '<tool_call>{"arguments": {}}</tool_call>', 'an object with a "name"'),
        ("qwen2.5", '<tool_call>{"name": "f", "arguments": {}}', "it is not closed by </tool_call>"),
        ("qwen2.5", '<tool_call>{"name": "f"} and so on</tool_call>', "text follows its JSON: 'and so on'"),
        ("qwen2.5", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>', "half of a character"),
        ("qwen2.5", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
        ("qwen2.5", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "a number that is too large"),
        ("qwen2.5", '<tool_call>{"name": "\\ud83d"}</tool_call>', 'an object with a "name"'),
        (
            "qwen2.5",
            f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 101}1{"]" * 101}}}}}</tool_call>',
            "too deep",
        ),
        ("qwen3.5", "<tool_call>f(x)</tool_call>", "it is not <function=name>"),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}} or so', "text follows its JSON: 'or so'"),
        ("mistral", "[TOOL_CALLS] f and g", "neither a list of calls nor a name"),
        ("glm", "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "it has no name"),
        ("deepseek", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "it is not a name"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(family: str, text: str, why: str) -> None:
    chat_format = FORMATS[family]
    reply = chat_format.reply(chat_format.encode(text), [TOOL])
    assert reply.tool_calls == ()
    assert reply.content == text
    (sentence,) = reply.malformed
    assert why in sentence


def test_forms_of_older_and_newer_models_of_a_family() -> None:
    newer = FORMATS["mistral"]
    text = '[TOOL_CALLS]search[ARGS]{"query": "a"}[TOOL_CALLS]search[CALL_ID]x1[ARGS]{"query": "b"}'
    reply = newer.reply(newer.encode(text), [TOOL])
    assert [json.loads(call.arguments)["query"] for call in reply.tool_calls] == ["a", "b"]
    older = FORMATS["deepseek"]
    begin, sep, end = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    )
    text = f'Let me look.{begin}function{sep}search\n```json\n{{"query": "a"}}\n```{end}'
    reply = older.reply(older.encode(text), [TOOL])
    assert reply.content == "Let me look."
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("search", '{"query": "a"}')]
    text = "<tool_call>search<arg_key>top</arg_key><arg_value>NaN</arg_value></tool_call>"
    (call,) = FORMATS["glm"].reply(FORMATS["glm"].encode(text), [TOOL]).tool_calls
    assert json.loads(call.arguments) == {"top": "NaN"}, "what is no JSON stays text"
    tagged = FORMATS["llama3"]
    text = '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}'
    assert [call.name for call in tagged.reply(tagged.encode(text), [TOOL]).tool_calls] == ["f", "g"]
    # an answer in JSON that names nothing is no call
    assert tagged.reply(tagged.encode('{"answer": 5}'), [TOOL]).content == '{"answer": 5}'
    # without tools only a parser that was named reads calls, of a system prompt's for example
    named = ChatFormat(tokenizer("llama3"), tool_parser="llama3")
    assert [len(form.reply(form.encode(text)).tool_calls) for form in (tagged, named)] == [0, 2]


def test_thinking_is_apart_from_what_is_said() -> None:
    chat_format = FORMATS["qwen3"]

    def read(text: str, **how: Any) -> tuple[str | None, str]:
        reply = chat_format.reply(chat_format.encode(text), **how)
        return reply.reasoning, reply.content

    assert read("<think>\nso\n</think>\n\nyes<|im_end|>") == ("so", "yes")
    assert read("<think>\n\n</think>\n\nyes") == (None, "yes")
    assert read("yes") == (None, "yes")
    # the prompt opened it, as that of DeepSeek R1 does; one that is cut off has said nothing yet
    assert read("so\n</think>\n\nyes") == ("so", "yes")
    assert read("so and", opened=True) == ("so and", "")
    assert read("<think>\nso and") == ("so and", "")
    assert set(TEMPLATES) == set(FAMILIES)
