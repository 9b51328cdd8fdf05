from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from slimelite.arguments import Args, ArgumentError, make_args
from slimelite.data.conversations import ChatReader, Messages, Piece, Tools
from slimelite.data.prompts import DataSource
from slimelite.models.families import LOSS_MASKS, LossMask
from slimelite.samples.sample import Sample, Status
from slimelite.samples.table import SampleTable

from . import chat_templates
from .tokenizers import CHATML, byte_tokenizer

RECORDED = json.loads((Path(__file__).parent / "chat_cases.json").read_text())
CALL = [{"type": "function", "function": {"name": "ls", "arguments": {"d": "."}}}]
MARKED_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def reply(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def segments(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any
) -> list[list[Any]]:
    ids, mask = ChatReader(tokenizer, **kwargs).tokens(messages, tools)
    assert len(ids) == len(mask)
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [[tokenizer.decode([i for i, _ in run]), value] for value, run in runs]


def shown(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return "".join(f"⟦{text}⟧" if value else text for text, value in segments(tokenizer, messages, **kwargs))


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["id"])
def test_recorded_masks_of_slime_and_trl(case: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(RECORDED["templates"][case["template"]])
    found = segments(tokenizer, case["messages"], case["tools"], loss_mask_type=case["loss_mask_type"])
    assert found == case["segments"]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            chat_templates.LLAMA3,
            [user("list"), reply("", tool_calls=CALL), {"role": "tool", "content": "a.py"}, reply(" one file ")],
            "<s><|h|>user<|/h|>\n\nlist<|eot_id|><|h|>assistant<|/h|>\n\n"
            '⟦{"name": "ls", "parameters": {"d": "."}}<|eom_id|>⟧'
            "<|h|>ipython<|/h|>\n\na.py<|eot_id|><|h|>assistant<|/h|>\n\n⟦one file<|eot_id|>⟧",
        ),
        (
            chat_templates.GEMMA,
            [user("hi"), reply("hi"), user("hi"), reply("")],
            "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n⟦hi<end_of_turn>\n⟧"
            "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n⟦<end_of_turn>\n⟧",
        ),
        (
            chat_templates.MISTRAL,
            [
                user("list"),
                reply("", tool_calls=CALL),
                {"role": "tool", "content": "a.py"},
                reply("one file"),
                user("ok"),
                reply("ok"),
            ],
            '<s>[INST] list[/INST]⟦[TOOL_CALLS] [{"name": "ls", "arguments": {"d": "."}}]</s>⟧'
            "[TOOL_RESULTS] a.py[/TOOL_RESULTS]⟦ one file</s>⟧[INST] ok[/INST]⟦ ok</s>⟧",
        ),
        (
            chat_templates.R1,
            [user("2+2?"), reply("<think>\nadd\n</think>\n\n4"), user("sure?"), reply("yes")],
            "<s><|User|>2+2?<|Assistant|>⟦\n\n4<|end|>⟧<|User|>sure?<|Assistant|>⟦yes<|end|>⟧",
        ),
        (
            chat_templates.HARMONY,
            [user("q"), reply("4", thinking="gone"), user("r"), reply("5", thinking="hm")],
            "<|start|>user<|message|>q<|end|><|start|>assistant⟦<|channel|>final<|message|>4<|end|>⟧"
            "<|start|>user<|message|>r<|end|><|start|>assistant"
            "⟦<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>5<|return|>⟧",
        ),
        (
            chat_templates.PARTS,
            [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in [("user", "hi"), ("assistant", "yo")]],
            "<|user|>\nhi</s>\n<|assistant|>⟦\nyo</s>\n⟧",
        ),
    ],
    ids=["llama3", "gemma", "mistral", "r1", "harmony", "parts"],
)
def test_replies_are_found_in_any_template(template: str, messages: list[dict[str, Any]], expected: str) -> None:
    assert shown(byte_tokenizer(template), messages) == expected


def test_thinking_of_qwen3_as_the_template_shows_it() -> None:
    """History loses its thinking, the last turn has it: `auto` trains on what a rollout would have seen."""
    tokenizer = byte_tokenizer(RECORDED["templates"]["qwen3"])
    first = [
        user("2+2?"),
        reply("<think>\nadd\n</think>\n\n", tool_calls=CALL),
        {"role": "tool", "content": "4"},
        reply("4"),
    ]
    assert shown(tokenizer, [*first, user("+1?"), reply("<think>\none\n</think>\n\n5")]) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<tool_call>\n{"name": "ls", "arguments": {"d": "."}}\n</tool_call><|im_end|>\n⟧'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>\n⟧"
        "<|im_start|>user\n+1?<|im_end|>\n<|im_start|>assistant\n⟦<think>\none\n</think>\n\n5<|im_end|>\n⟧"
    )


texts = st.one_of(
    st.text(alphabet="ab \n<|é😀", max_size=8),
    st.sampled_from(["<|im_end|>", "<|im_start|>assistant\n", "assistant\n", "</think>", " x ", "{{ role }}"]),
)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(texts, texts, st.booleans()), min_size=1, max_size=4), ends_with_user=st.booleans())
def test_comparing_finds_what_generation_marks_say(turns: list[tuple[str, str, bool]], ends_with_user: bool) -> None:
    messages = [m for question, answer, on in turns for m in (user(question), reply(answer, step_loss_mask=int(on)))]
    messages += [user("more")] if ends_with_user else []
    compared = ChatReader(byte_tokenizer(CHATML)).tokens(messages)
    assert compared == ChatReader(byte_tokenizer(MARKED_CHATML)).tokens(messages)
    # ChatML messages do not influence each other: rendering them one by one finds the same
    assert compared == ChatReader(byte_tokenizer(CHATML), "qwen").tokens(messages)


pieces = st.sampled_from(
    ["a", " ", "\n", "<", "<think>\n", "</think>\n\n", "<think>\n\n</think>\n\n", "<|im_start|>assistant\n"]
)
tricky = st.lists(pieces, max_size=4).map("".join)
replies = st.builds(
    lambda content, thought, calls: reply(content, **thought, **calls),
    tricky,
    st.just({}) | st.builds(lambda t: {"reasoning_content": t}, tricky),
    st.sampled_from([{}, {"tool_calls": CALL}]),
)
results = st.builds(lambda content: {"role": "tool", "content": content}, tricky)
turns = st.builds(lambda q, rest: [user("q" + q), *rest], tricky, st.lists(replies | results, max_size=4))


def with_visible_borders(template: str, opened_think: bool) -> str:
    """The same template with private-use characters where the model's own words begin and end."""
    head, branch, tail = re.split(
        r"(?s)(elif message\.role == \"assistant\" %\}.*?)(?=\{%- elif message\.role == \"tool\")", template
    )
    think = ("\\n<think>\\n\ue100'" if opened_think else "\\n\ue100<think>\\n'") + " + reasoning_content"
    branch = branch.replace("\\n<think>\\n' + reasoning_content", think)
    branch = branch.replace("message.role + '\\n' + content", "message.role + '\\n\ue100' + content")
    return head + branch.replace("'<|im_end|>\\n'", "'<|im_end|>\\n\ue101'") + tail


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think"])
@settings(max_examples=60, deadline=None)
@given(conversation=st.lists(turns, min_size=1, max_size=3))
def test_comparing_is_exact_on_templates_that_rewrite_thinking(
    name: str, conversation: list[list[dict[str, Any]]]
) -> None:
    messages = [message for turn in conversation for message in turn]
    template = RECORDED["templates"][name]
    bordered = byte_tokenizer(with_visible_borders(template, opened_think=name == "qwen3_5_think"))
    expected = bordered.apply_chat_template(messages, tokenize=False).replace("\ue100", "⟦").replace("\ue101", "⟧")
    assert expected.count("⟦") == sum(m["role"] == "assistant" for m in messages)
    assert shown(byte_tokenizer(template), messages) == expected


@pytest.mark.parametrize("template", [CHATML, MARKED_CHATML], ids=["compared", "marked"])
def test_step_loss_mask_switches_one_reply_off(template: str) -> None:
    messages = [user("a"), reply("b", step_loss_mask=0), user("c"), reply("d", step_loss_mask=1)]
    assert [text for text, value in segments(byte_tokenizer(template), messages) if value] == ["d<|im_end|>\n"]


def test_a_loss_mask_of_a_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(chat: ChatReader, messages: Messages, tools: Tools) -> list[Piece]:
        text = chat.render(messages, tools)
        return [Piece(text, [(text.index("b"), len(text))])]

    monkeypatch.setitem(LOSS_MASKS, "from_b", LossMask("from_b", find))
    with pytest.raises(ArgumentError, match=r"--loss-mask-type.*from_b"):
        make_args(["--loss-mask-type", "from_c"])
    found = shown(byte_tokenizer(CHATML), [user("abc"), reply("d")], loss_mask_type="from_b")
    assert found.startswith("<|im_start|>user\na⟦bc<|im_end|>")


def test_offsets_that_leave_spaces_out_change_nothing() -> None:
    merges = [("Ġ", "Ġ"), ("Ġ", "b"), ("Ċ", "Ċ")]
    messages = [user("  b  b"), reply("  b  \n\nb"), user("  "), reply("  ")]
    exact, trimmed = (byte_tokenizer(CHATML, merges, trim_offsets=trim) for trim in (False, True))
    assert ChatReader(trimmed).tokens(messages) == ChatReader(exact).tokens(messages)


def test_a_token_across_the_border_is_trained_on() -> None:
    tokenizer = byte_tokenizer(CHATML, [("Ċ", "Ċ")])
    assert (
        shown(tokenizer, [user("q"), reply("\n")])
        == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant⟦\n\n<|im_end|>\n⟧"
    )


def test_a_special_token_is_trained_on_as_a_whole_or_not_at_all() -> None:
    """Phi-3's tokens take the line end after them, which may be the reply's; its last turn ends with a token more."""
    tokenizer = byte_tokenizer(chat_templates.PHI3)
    tokenizer.add_tokens([AddedToken(f"<|{n}|>", rstrip=True, special=True) for n in ("user", "assistant", "end")])
    messages = [user("q"), reply("\nfirst"), user("r"), reply("second")]
    assert shown(tokenizer, messages) == (
        "<|user|>q<|end|><|assistant|>⟦first<|end|>⟧<|user|>r<|end|><|assistant|>⟦second<|end|></s>⟧"
    )


def test_a_space_that_belongs_to_the_next_turn_is_not_trained_on() -> None:
    template = (
        "{% for m in messages %}{{ 'USER: ' + m.content + ' MODEL: ' if m.role == 'user' else m.content + '</s> ' }}"
        "{% endfor %}"
    )
    tokenizer = byte_tokenizer(template, [("Ġ", "U"), ("ĠU", "S")])
    assert shown(tokenizer, [user("q"), reply("a"), user("r"), reply("b")]) == (
        "USER: q MODEL: ⟦a</s>⟧ USER: r MODEL: ⟦b</s>⟧ "
    )


def test_a_turn_without_an_end_ends_with_the_mark_of_the_next_one() -> None:
    """As GLM's do: without the mark the model would never learn to stop, after the last reply either."""
    tokenizer = byte_tokenizer(chat_templates.GLM)
    assert shown(tokenizer, [user("q"), reply("a"), user("r"), reply("", tool_calls=CALL)]) == (
        "<|start|>user\nq<|end|>⟦\na<|start|>⟧user\nr<|end|>⟦\nls{'d': '.'}<|return|>⟧"
    )
    assert shown(tokenizer, [user("q"), reply("a")]) == "<|start|>user\nq<|end|>⟦\na<|start|>⟧"


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (chat_templates.PHI3, "<|end|>"), (chat_templates.GLM, "<|start|>")]
)
def test_an_answer_that_has_its_end_gets_no_second_one(template: str, end: str) -> None:
    """As the responses of saved rollouts do, whatever ends a reply."""
    tokenizer, samples = byte_tokenizer(template), []
    for answer in ("a", "a" + end):
        samples.append(Sample(index=0, prompt=[user("q"), reply(answer), user("r"), reply(answer)]))
        ChatReader(tokenizer).fill(samples[-1])
    assert samples[0].tokens == samples[1].tokens
    assert samples[0].loss_mask == samples[1].loss_mask


def test_what_cannot_be_masked_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"does not show assistant message 1 as a reply.*generation"):
        ChatReader(byte_tokenizer(chat_templates.R1)).tokens([user("q"), reply(None), user("r"), reply("x")])
    with pytest.raises(ValueError, match="roles must alternate"):
        ChatReader(byte_tokenizer(chat_templates.GEMMA)).tokens([user("q"), user("r"), reply("x")])
    with pytest.raises(ValueError, match="chat template"):
        ChatReader(byte_tokenizer(None)).tokens([user("q"), reply("x")])


TOKENIZER = byte_tokenizer()
MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def test_the_response_starts_at_the_first_trained_token() -> None:
    sample = Sample(index=0, group_index=0, prompt=MESSAGES)
    ChatReader(TOKENIZER).fill(sample)
    ids, mask = ChatReader(TOKENIZER).tokens(MESSAGES)
    assert sample.tokens == ids
    assert [0] * sample.prompt_length + sample.loss_mask == mask
    assert sample.loss_mask[0] == 1
    assert sample.prompt == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert sample.response == "4<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert (sample.status, sample.reward, sample.remove_sample) == (Status.COMPLETED, 0.0, False)
    sample.check_aligned()


def test_a_long_conversation_loses_its_end() -> None:
    whole = Sample(index=0, prompt=MESSAGES)
    ChatReader(TOKENIZER).fill(whole)
    limit = whole.prompt_length + 4
    cut = Sample(index=0, prompt=MESSAGES)
    ChatReader(TOKENIZER, max_context_len=limit).fill(cut)
    assert cut.tokens == whole.tokens[:limit]
    assert cut.loss_mask == whole.loss_mask[:4]
    assert cut.status == Status.TRUNCATED
    cut.check_aligned()


def test_nothing_left_to_train_on_is_marked() -> None:
    for messages, limit in ((MESSAGES, 5), (MESSAGES[:1], None)):
        sample = Sample(index=0, group_index=0, prompt=messages)
        ChatReader(TOKENIZER, max_context_len=limit).fill(sample)
        assert sample.remove_sample
        assert (sample.response_length, sample.loss_mask, sample.response) == (0, [], "")


def test_rows_become_a_table_to_train_on(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    tool = {"type": "function", "function": {"name": "ls"}}
    path.write_text(
        json.dumps({"messages": MESSAGES, "tools": [tool]}) + "\n" + json.dumps({"messages": MESSAGES[:2]}) + "\n"
    )
    tokenizer = byte_tokenizer("{{ tools[0].function.name if tools }}" + TOKENIZER.chat_template)
    source = DataSource(Args(prompt_data=[str(path)], input_key="messages"), tokenizer)
    groups = source.get_samples(2)
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        ChatReader(tokenizer).fill(sample)
    table = SampleTable.from_samples(groups)
    assert table.response_lengths.tolist() == [s.response_length for s in samples]
    assert samples[0].prompt.startswith("ls<|im_start|>")
    assert table.loss_mask.sum() == sum(map(sum, (s.loss_mask for s in samples)))


def test_errors_name_the_flag_or_the_conversation() -> None:
    with pytest.raises(ValueError, match="--input-key"):
        ChatReader(TOKENIZER).fill(Sample(index=0, prompt="text"))
    with pytest.raises(ValueError, match=r"conversation 3 \('2\+2\?'\)"):
        ChatReader(byte_tokenizer("{{ raise_exception('no') }}")).fill(Sample(index=3, prompt=MESSAGES))
