"""Tool calls and thinking of each family: what its template writes is read back, and no text is too odd to be read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimelite.serving.calls import between, first_json
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
# templates of real models
REAL = {"gemma4_v5": "gemma4", "gptoss": "harmony", "lfm2_v2": "lfm2", "lfm2": "lfm2", "muse_glimmer": "muse"}
FAMILIES |= REAL
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
PIECES += [
    "<|start|>assistant",
    "<|channel|>analysis",
    " to=f",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<atem:invoke",
    ">",
]
PIECES += [
    "<|tool_call>",
    "<tool_call|>",
    "call:f{",
    '<|"|>',
    "a:",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "f(",
    "a=",
]
PIECES += [
    "'",
    '"',
    "\\",
    ")",
    ",",
    "<|channel>thought",
    "<channel|>",
    "<atem:function_calls>",
    "</atem:function_calls>",
]
PIECES += ["```json\n", "\n```", "function", "[THINK]", "[/THINK]", '{"name": "f", "arguments": {"a": 1}}', "9" * 5000]
odd = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join)
plain = st.text(st.characters(exclude_characters="<>[]{}｜", exclude_categories=["Cs", "Cc"]), max_size=12)
names = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)


def calls(keys: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[str, dict[str, Any]]]]:
    """Calls with objects that have such ``keys`` among their arguments."""
    leaves = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | plain
    values = st.recursive(
        leaves | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )
    one = st.tuples(names, st.dictionaries(names, values, max_size=3))
    return st.lists(one, min_size=1, max_size=3, unique_by=lambda call: call[0])


some = {True: calls(names), False: calls(plain)}


def test_the_template_says_how_calls_and_thinking_are_written() -> None:
    for family, chat_format in FORMATS.items():
        assert chat_format.tools is not None
        assert chat_format.tools.name == FAMILIES[family], family
        thinks = None if chat_format.reasoning is None else chat_format.reasoning.name
        think = {"gemma4_v5": "gemma4", "gptoss": "harmony", "muse_glimmer": "muse"}
        assert thinks == ("think" if family.startswith("qwen3") else think.get(family)), family
    forced = ChatFormat(tokenizer(), tool_parser="mistral", reasoning_parser="seed")
    assert forced.tools is TOOL_FORMATS["mistral"]
    assert forced.reasoning is REASONING_FORMATS["seed"]
    with pytest.raises(ValueError, match=r"--tool-call-parser hermis: .* did you mean hermes"):
        ChatFormat(tokenizer(), tool_parser="hermis")


@pytest.mark.parametrize("family", FAMILIES)
@few
@given(data=st.data(), content=plain.map(str.strip))
def test_what_a_template_writes_is_read_back(family: str, data: st.DataObject, content: str) -> None:
    chat_format = FORMATS[family]
    called = data.draw(some[family.startswith("gemma")])  # Gemma 4 writes keys without quotes
    if family in ("llama3", "gptoss"):  # one call, and nothing beside it
        called, content = called[:1], ""
    if family in ("mistral", "muse_glimmer") or content == "null":  # LFM2's template takes that word for nothing
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
        # as a reply ends that may have one call, whose argument has the closing mark
        ("qwen2.5", '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>', "it is not JSON"),
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
        ("deepseek", "<｜tool▁calls▁begin｜>f{}<｜tool▁calls▁end｜>", "has <｜tool▁call, but no tool call"),
        ("qwen3.5", "<function=f>\n</function>\n</tool_call>", "has <function=, but no tool call"),
        ("qwen2.5", "[TOOL_CALLS] [f]", "has [TOOL_CALLS], but no tool call"),
        ("gemma4_v5", "<|tool_call>call:f{a:Rome}<tool_call|>", "it is not JSON"),
        ("gemma4_v5", "<|tool_call>call:f{a:NaN}<tool_call|>", "NaN is not JSON"),
        ("gemma4_v5", '<|tool_call>call:f{a:<|"|>b}<tool_call|>', "<|\"|> is missing after 'b}'"),
        ("gemma4_v5", "<|tool_call>call:f{a:1 b:2}<tool_call|>", ", is missing before 'b:2}'"),
        ("gemma4_v5", "<|tool_call>call:f{}{}<tool_call|>", "text follows it: '{}'"),
        ("gemma4_v5", "<|tool_call>f{}<tool_call|>", "call: is missing before 'f{}'"),
        ("gemma4_v5", f"<|tool_call>call:f{{a:{'[' * 5000}}}<tool_call|>", "nested too deep"),
        ("gemma4_v5", "<|tool_call>call:f{a:1}", "it is not closed by <tool_call|>"),
        ("lfm2_v2", "<|tool_call_start|>[f('a')]<|tool_call_end|>", "a name is missing before"),
        ("lfm2_v2", "<|tool_call_start|>[f(a=b)]<|tool_call_end|>", "it is not JSON"),
        ("lfm2_v2", "<|tool_call_start|>[f(a='b]<|tool_call_end|>", "' is missing after"),
        ("lfm2_v2", "<|tool_call_start|>[f(a=1)<|tool_call_end|>", "] is missing before its end"),
        ("lfm2_v2", "<|tool_call_start|>[f(a='\\ud83d')]<|tool_call_end|>", "half of a character"),
        ("lfm2_v2", "<|tool_call_start|>[]<|tool_call_end|>", "a name is missing"),
        ("gptoss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{a}", "it is not JSON"),
        ("gptoss", "<|channel|>analysis to=python code<|message|>1+1", "text follows its JSON: '+1'"),
        ("gptoss", "<|channel|>commentary to=functions.f", "it is not closed by <|message|>"),
        ("muse_glimmer", " to=f<|message|>{}", "it is not <atem:function_calls>"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(family: str, text: str, why: str) -> None:
    chat_format = FORMATS[family]
    reply = chat_format.reply(chat_format.encode(text), [TOOL])
    assert reply.tool_calls == ()
    assert reply.content.removeprefix("<|start|>assistant") == text
    (sentence,) = reply.malformed
    assert why in sentence


@pytest.mark.parametrize(
    "call", ['<tool_call>\n{"name": ', '<tool_call>["', '<tool_call>\n{"name": "f"}\n</tool_call>\n']
)
def test_no_part_of_a_reply_is_read_as_json_more_than_twice(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the rest of the reply were read at each mark, a reply of some 100,000 characters would take seconds."""
    lengths = []

    def counted(text: str, start: int) -> tuple[object, int]:
        lengths.append(len(text))
        return first_json(text, start)

    monkeypatch.setattr("slimelite.serving.calls.first_json", counted)
    assert len(list(between("<tool_call>", "</tool_call>", call * 50, holds_json=True))) == 50
    assert 0 < sum(lengths) <= 2 * len(call * 50)


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


def test_what_the_models_write_that_their_templates_do_not() -> None:
    def read(family: str, text: str) -> list[tuple[str, object]]:
        reply = FORMATS[family].reply(FORMATS[family].encode(text), [TOOL])
        assert reply.malformed == ()
        return [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]

    begin, end = "<|tool_call_start|>", "<|tool_call_end|>"
    python = """[a.b-c(from="it's", x = ('y', 1,), z={'k': None, "l": true},), g()]"""
    assert read("lfm2_v2", begin + python + end) == [
        ("a.b-c", {"from": "it's", "x": ["y", 1], "z": {"k": None, "l": True}}),
        ("g", {}),
    ]
    assert read("lfm2_v2", rf"{begin}f(a='\x41\u00e9\ud83d\ude00\t\d')" + end) == [("f", {"a": "Aé😀\t\\d"})]
    listed = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    assert read("lfm2_v2", begin + listed + end) == [("f", {"a": 1}), ("g", {})]
    assert read("gemma4_v5", '<|tool_call>call:f{ "a": "b", c : [1, <|"|>d<|"|>] }<tool_call|>') == [
        ("f", {"a": "b", "c": [1, "d"]})
    ]
    for head in ("to=functions.f<|channel|>commentary", "<|channel|>commentary to=functions.f <|constrain|>json"):
        assert read("gptoss", f'{head}<|message|>{{"a": 1}}<|call|>') == [("f", {"a": 1})]


@pytest.mark.parametrize("family", ["glm", "qwen3.5", "muse_glimmer"])
def test_a_parameter_that_may_be_a_text_is_no_number(family: str) -> None:
    """As Optional[str] is in a schema of pydantic's or an MCP server's. Nothing tells "5" from 5 where a schema allows
    both, and the text is safest: SGLang's parsers take it too.
    """
    text, null = {"type": "string"}, {"type": "null"}
    kinds = {"a": {"anyOf": [text, null]}, "b": {"type": ["string", "null"]}, "c": {"enum": ["1", "2"]}}
    kinds |= {"d": {"anyOf": [text, {"type": "integer"}]}, "e": {"anyOf": [text, null]}, "f": {"enum": [1, 2]}}
    kinds |= {"g": {"type": ["integer", "boolean", "string"]}, "h": {"type": ["integer", "null"]}, "i": {}}
    kinds |= {"j": {"oneOf": [text, {"type": "array"}]}, "k": {"anyOf": [text, {"type": "object"}]}}
    kinds |= {name: {"anyOf": [text, {"type": "array"}, null]} for name in "lmn"}
    tool = {"function": {"name": "f", "parameters": {"properties": kinds}}}
    given = {"a": "75001", "b": "1e3", "c": "1", "d": "5", "e": None, "f": 1}
    given |= {"g": "true", "h": 5, "i": 5, "j": ["x", 1], "k": {"x": 1}, "l": "[1", "m": '{"x": 1}', "n": None}
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": given}}
    asked, chat_format = [{"role": "user", "content": "x"}], FORMATS[family]
    text_of_call = chat_format.render(
        [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], add_generation_prompt=False
    ).removeprefix(chat_format.render(asked))
    (read,) = chat_format.reply(chat_format.encode(text_of_call.removesuffix("\n")), [tool]).tool_calls
    assert json.loads(read.arguments) == given


def test_channels_are_apart() -> None:
    def read(family: str, text: str) -> tuple[str | None, str]:
        reply = FORMATS[family].reply(FORMATS[family].encode(text), [TOOL])
        assert reply.malformed == ()
        return reply.reasoning, reply.content

    next_one = "<|end|><|start|>assistant<|channel|>"
    text = f"<|channel|>analysis<|message|>so{next_one}commentary<|message|>first. {next_one}final<|message|>yes"
    assert read("gptoss", text + "<|return|>") == ("so", "first. yes")
    assert read("gptoss", f"<|channel|>analysis<|message|>so{next_one}analysis<|message|>and") == ("so\nand", "")
    assert read("gptoss", "<|channel|>analysis<|message|>so<|channel|>final<|message|>yes") == ("so", "yes")
    assert read("gptoss", "yes") == (None, "yes")
    assert read("muse_glimmer", " to=self<|message|>so<|eom|><|start|>assistant to=user<|message|>yes") == ("so", "yes")
    assert read("gemma4_v5", "<|channel>thought\nso\n<channel|>yes<turn|>") == ("so", "yes")
    assert read("gemma4_v5", "<|channel>thought\n<channel|>yes<turn|>") == (None, "yes")


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
    assert set(TEMPLATES) == FAMILIES.keys() - REAL.keys()
