"""Rows with tools in OpenAI's form and its relatives: one meaning, and the loss on what a model would have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from slimelite.arguments import Args
from slimelite.data.conversations import ChatReader
from slimelite.data.messages import read_messages
from slimelite.data.prompts import DataSource, deal, load_prompts

from . import chat_templates
from .tokenizers import CHATML, byte_tokenizer

QWEN = json.loads((Path(__file__).parent / "chat_cases.json").read_text())["templates"]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}}}]


class Family(NamedTuple):
    """A chat template, what it writes before a reply and what it ends one with, and how many calls a reply may have."""

    template: str
    header: str
    ends: tuple[str, ...]
    calls: int = 3


CHATML_TURN = ("<|im_start|>assistant\n", ("<|im_end|>\n",))
FAMILIES = {
    "qwen2_5": Family(QWEN["qwen2_5"], *CHATML_TURN),
    "qwen3": Family(QWEN["qwen3"], *CHATML_TURN),
    "hermes": Family(chat_templates.HERMES, *CHATML_TURN),
    "llama3": Family(chat_templates.LLAMA3, "<|h|>assistant<|/h|>\n\n", ("<|eot_id|>", "<|eom_id|>"), calls=1),
}


def call(arguments: Any, number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def what_the_model_writes(tokenizer: PreTrainedTokenizerFast, ids: list[int], family: Family) -> list[int]:
    """The naive oracle, token by token: a model writes from the end of a reply's header to the end of its turn."""
    text, writing, mask = "", False, []
    for token in ids:
        mask.append(int(writing))
        text += tokenizer.decode([token])
        if writing:
            writing = not text.endswith(family.ends)
        elif text.endswith(family.header):
            writing = True
    return mask


words = st.text(alphabet='ab "\\{}\n', max_size=6)
arguments = st.dictionaries(words, st.none() | st.booleans() | st.integers() | words | st.lists(words), max_size=2)
spelled = st.tuples(arguments, st.booleans()).map(lambda drawn: json.dumps(drawn[0]) if drawn[1] else drawn[0])


@st.composite
def conversations(draw: st.DrawFn, calls: int) -> list[dict[str, Any]]:
    """Turns of question, calls, answers of the tools and reply; absent values are null, empty or not there at all."""
    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": "q" + draw(words)})
        for _ in range(draw(st.integers(0, 2))):
            asked = [
                call(args, number) for number, args in enumerate(draw(st.lists(spelled, min_size=1, max_size=calls)))
            ]
            content = draw(st.sampled_from([{}, {"content": None}, {"content": ""}, {"content": "so: "}]))
            messages.append({"role": "assistant", "tool_calls": asked, **content})
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": draw(words)} for c in asked]
        reasoning = draw(st.sampled_from([{}, {"reasoning_content": None}, {"reasoning_content": "hm"}]))
        messages.append({"role": "assistant", "content": draw(words), "tool_calls": None, **reasoning})
    return messages


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_loss_is_on_what_the_model_would_have_written(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family.template)
    messages = read_messages(data.draw(conversations(family.calls)))
    ids, mask = ChatReader(tokenizer).tokens(messages, TOOLS)
    assert mask == what_the_model_writes(tokenizer, ids, family)
    # neither a null nor a text quoted once more reaches the text, and every object of arguments does
    text = tokenizer.decode(ids)
    assert "None" not in text
    for message in messages:
        for given_call in message.get("tool_calls", []):
            assert json.dumps(given_call["function"]["arguments"]) in text


ASKED = {"role": "user", "content": "2+2?"}
FOUR = {"role": "tool", "tool_call_id": "call_0", "content": "4"}
ANSWER = {"role": "assistant", "content": "It is 4."}
PLAIN = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call({"a": 2, "b": 2})]}, FOUR, ANSWER]
SPELLINGS = {
    "arguments as JSON text, content null": {"content": None, "tool_calls": [call('{"a":2,"b":2}')]},
    "no content": {"tool_calls": [call({"a": 2, "b": 2})]},
    "a call without function": {"content": None, "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 2}}]},
    "calls as JSON text": {"tool_calls": json.dumps([call('{"a": 2, "b": 2}')])},
    "nulls everywhere": {"content": None, "refusal": None, "tool_calls": [{**call({"a": 2, "b": 2}), "index": None}]},
}


@pytest.mark.parametrize("name", [*FAMILIES, "deepseek"])
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_every_spelling_of_a_row_gives_the_same_tokens(
    name: str, spelling: dict[str, Any], suffix: str, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer(chat_templates.DEEPSEEK if name == "deepseek" else FAMILIES[name].template)
    file = tmp_path / f"rows.{suffix}"
    row = {"messages": [ASKED, {"role": "assistant", **spelling}, FOUR, {**ANSWER, "tool_calls": None}]}
    row["tools"] = json.dumps(TOOLS)
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps(row))
    ((sample,),) = DataSource(Args(prompt_data=[str(file)], input_key="messages"), tokenizer).get_samples(1)
    ChatReader(tokenizer).fill(sample)
    ids, mask = ChatReader(tokenizer).tokens([*PLAIN[:2], {**FOUR, "name": "add"}, ANSWER], TOOLS)
    assert (sample.tokens, [0] * sample.prompt_length + sample.loss_mask) == (ids, mask)
    assert '{"a": 2, "b": 2}' in sample.response
    assert sample.response.endswith("It is 4." + tokenizer.decode(ids).rpartition("It is 4.")[2])


MISTAKES = {
    "arguments that are no JSON": (
        [call("{a: 2}")],
        r"tool_calls\[0\] \(add\): arguments are not JSON .* '{a: 2}'; write",
    ),
    "arguments that are a list": (
        [call([2, 2])],
        r"tool_calls\[0\] \(add\): arguments are not an object: \[2, 2\]; write",
    ),
    "half a character": ([call('{"a": "\\ud800"}')], "incomplete character"),
    "an id that is a list": ([{**call("{}"), "id": ["call_0"]}], r"tool_calls\[0\] \(add\): its id must be text"),
    "no name": ([{"type": "function", "function": {}}], r"tool_calls\[0\] needs a function with a name"),
    "text": ("add(2, 2)", "tool_calls are not JSON .* write a list or its JSON text"),
    "nothing": ([], r"message 1 \(assistant\) is empty"),
}


@pytest.mark.parametrize(("calls", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_call_that_cannot_be_read_is_named_with_its_row(calls: Any, says: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    bad = {"messages": [ASKED, {"role": "assistant", "tool_calls": calls}, FOUR, ANSWER]}
    file.write_text("".join(json.dumps(row) + "\n" for row in ({"messages": PLAIN}, bad)))
    with pytest.raises(ValueError, match=rf"row 1 \(line 2\): column 'messages': .*{says}"):
        load_prompts(Args(input_key="messages"), None, [str(file)])
    assert len(load_prompts(Args(input_key="messages"), None, [str(file)], skip_bad_rows=True)) == 1


@pytest.mark.parametrize("arguments", [None, "", [], {}])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    messages = read_messages([ASKED, {"role": "assistant", "tool_calls": [call(arguments)]}])
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_tools_answers_get_the_names_of_their_calls() -> None:
    calls = [{"name": name, "arguments": {}, "id": name * 2} for name in "ab"]
    answers = [{"role": "tool", "content": "x", **more} for more in ({"tool_call_id": "bb"}, {}, {"name": "own"})]
    messages = read_messages([ASKED, {"role": "assistant", "tool_calls": calls}, *answers])
    assert [m["name"] for m in messages if m["role"] == "tool"] == ["b", "b", "own"]


def test_what_a_template_does_not_show_is_known() -> None:
    thought = [ASKED, {**PLAIN[1], "content": "Let me.", "reasoning_content": "hm"}, {**FOUR, "name": "add"}, ANSWER]
    hidden = {
        "qwen2_5": ["reasoning_content"],
        "qwen3": [],
        "hermes": ["content", "reasoning_content"],
        "llama3": ["tools", "content", "reasoning_content"],
    }
    for name, expected in hidden.items():
        chat = ChatReader(byte_tokenizer(FAMILIES[name].template))
        assert chat.left_out(thought, TOOLS) == expected
        # what is not trained on, or taken out of the history on purpose, is not missed
        assert chat.left_out([{**m, "step_loss_mask": 0} for m in thought]) == []
        assert "reasoning_content" not in chat.left_out([*thought, ASKED])
    assert ChatReader(byte_tokenizer(CHATML)).left_out(thought) == ["tool_calls", "reasoning_content"]


@pytest.mark.parametrize("name", FAMILIES)
def test_pairs_with_calls(name: str, tmp_path: Path) -> None:
    """The calls that both sides share are not trained on; what differs is, with the answers of tools left out."""
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family.template)
    first = {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}', 1)]}
    shared = [ASKED, first, {**FOUR, "tool_call_id": "call_1"}]
    good = [{"role": "assistant", "content": None, "tool_calls": [call('{"a": 2}')]}, FOUR, ANSWER]
    bad = [{"role": "assistant", "tool_calls": [call({"a": 3})]}, {**FOUR, "content": "5"}, {**ANSWER, "content": "5"}]
    file = tmp_path / "pairs.jsonl"
    row = {"prompt": shared, "chosen": good, "rejected": [*shared, *bad], "tools": TOOLS}
    file.write_text(json.dumps(row))
    (prompt,) = load_prompts(Args(input_key="prompt"), tokenizer, [str(file)], replies=("chosen", "rejected"))
    for side, reply in zip(ChatReader(tokenizer).pair(deal(prompt, 0, 0)), (good, bad), strict=True):
        ids, _ = ChatReader(tokenizer).tokens(read_messages([*shared, *reply]), TOOLS)
        mask = what_the_model_writes(tokenizer, ids, family)
        shared_end = mask.index(0, mask.index(1))  # the first reply is in the prompt of both
        assert side.tokens == ids
        assert [0] * side.prompt_length + side.loss_mask == [0] * shared_end + mask[shared_end:]
        assert '"a": 1' not in side.response
