"""Conversations by the templates of several families: where they go on, where they branch, and what is then sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slimelite.engines.protocol import SamplingParams
from slimelite.samples.sample import Sample
from slimelite.serving.format import ChatFormat
from slimelite.serving.sessions import ContextFullError, Session, Sessions, Turn
from tests.serving.chat import TEMPLATES, TOOL, Scripted, scripted, tokenizer

ASK = {"role": "user", "content": "abc?"}
MORE = {"role": "user", "content": "and abc?"}
ANSWER = {"role": "tool", "content": "a b c", "tool_call_id": "0"}
CALL = {"type": "function", "id": "123456789", "function": {"name": "search", "arguments": {"query": "abc", "top": 3}}}
FORMATS = {family: ChatFormat(tokenizer(family)) for family in TEMPLATES}
END = {"mistral": "</s>", "deepseek": "<｜end▁of▁sentence｜>", "llama3": "<|eot_id|>", "glm": "<|user|>"}


def written(family: str, reply: dict[str, Any], after: str) -> str:
    """What a model of this family writes to say ``reply``, with the token that ends it."""
    chat_format = FORMATS[family]
    text = chat_format.render([ASK, reply], add_generation_prompt=False)
    text = text.removeprefix(chat_format.render([ASK])).rstrip("\n")
    # GLM ends a reply with the mark of whoever speaks next
    return text.removesuffix(END.get(family, "<|im_end|>")) + (
        after if family == "glm" else END.get(family, "<|im_end|>")
    )


def talk(session: Session, *after: dict[str, Any], tools: Any = None) -> list[Turn]:
    """Turns of a conversation: each reply is followed by one of ``after``."""

    async def run() -> list[Turn]:
        messages: list[dict[str, Any]] = [ASK]
        turns = []
        for message in (*after, None):
            turns.append(await session.chat(messages, tools))
            messages += [turns[-1].reply.message(), message] if message else []
        return turns

    return asyncio.run(run())


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_call_its_answer_and_a_question_go_on_from_what_was_sampled(family: str) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    said = {"role": "assistant", "content": "abc abc"}
    replies = [written(family, call, "<|observation|>"), written(family, said, "<|user|>"), written(family, said, "")]
    sessions, sampler = scripted(family, *replies)
    session = sessions.open()
    turns = talk(session, ANSWER, MORE, tools=[TOOL])
    assert [call.name for call in turns[0].reply.tool_calls] == ["search"]
    # Mistral's template moves the tools to the last question, and Qwen3.5's prompt has a thought that history has not
    whole = {"mistral": [None, 0, None], "qwen3.5": [None, 0, None]}.get(family, [None, 0, 1])
    assert [turn.parent for turn in turns] == whole
    for turn, request in zip(turns, sampler.requests, strict=True):
        assert list(request.input_ids) == turn.prompt_ids
        # the text is the template's, but for a thought of nothing that the model wrote: it is the tokens that are kept
        texts = [text.replace("\n", "") for text in (session.format.decode(turn.prompt_ids), turn.rendered)]
        assert texts[0].replace("<think></think>", "") == texts[1].replace("<think></think>", "")
    again = session.format.encode(session.format.decode(turns[0].output_ids))
    assert again != turns[0].output_ids, "encoding the reply again would give other tokens"


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_beginning_of_a_forced_call_is_given_and_not_trained_on(family: str) -> None:
    """The model's tokens follow it, and the conversation goes on after both."""
    whole = written(family, {"role": "assistant", "content": "", "tool_calls": [CALL]}, "<|observation|>")
    sessions, sampler = scripted(family)
    other = {"type": "function", "function": {**TOOL["function"], "name": "seek"}}

    async def run(session: Session, tools: list[dict[str, Any]], *forced: str) -> tuple[Turn, str]:
        turn = session.turn([ASK], tools, forced)
        given = session.format.decode(turn.given_ids)
        assert whole.startswith(given)
        sampler.replies.append(whole[len(given) :])
        return await session.sample(turn), given

    free, _ = asyncio.run(run(sessions.open(), [TOOL]))
    open_, before_name = asyncio.run(run(sessions.open(), [TOOL, other], "search", "seek"))
    session = sessions.open()
    turn, before_arguments = asyncio.run(run(session, [TOOL], "search"))
    assert (free.given_ids, before_name[-2:], "search" in before_arguments) == ([], "se", True)
    assert before_arguments.startswith(before_name)
    assert free.reply.tool_calls[0].name == open_.reply.tool_calls[0].name == turn.reply.tool_calls[0].name
    assert (turn.reply.content, turn.reply.tool_calls[0].arguments) == ("", free.reply.tool_calls[0].arguments)
    assert list(sampler.requests[-1].input_ids) == turn.added_ids + turn.given_ids
    sampler.replies.append("abc" + END.get(family, "<|im_end|>"))
    after = asyncio.run(session.chat([ASK, turn.reply.message(), ANSWER], [TOOL]))
    assert after.parent == turn.number
    sample = session.samples(Sample(index=0))[-1]
    answered = len(after.added_ids)
    assert sample.tokens == after.token_ids
    assert sample.tokens[: sample.prompt_length] == turn.added_ids
    mask = [0] * len(turn.given_ids) + [1] * len(turn.output_ids) + [0] * answered + [1] * len(after.output_ids)
    assert sample.loss_mask == mask


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "glm", "deepseek"])
def test_a_reply_of_at_most_one_call_ends_with_it_and_goes_on(family: str) -> None:
    two = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    both = written(family, two, END.get(family, "<|im_end|>"))
    sessions, sampler = scripted(family, both, both, "abc" + END.get(family, "<|im_end|>"))
    session = sessions.open()
    free = asyncio.run(session.sample(session.turn([ASK], [TOOL])))
    one = asyncio.run(session.sample(session.turn([ASK], [TOOL], one_call=True)))
    assert [len(turn.reply.tool_calls) for turn in (free, one)] == [2, 1]
    assert (one.reply.content, one.reply.malformed, one.finish_reason) == ("", (), "stop")
    assert one.reply.tool_calls[0].arguments == free.reply.tool_calls[0].arguments
    assert one.output_ids == free.output_ids[: len(one.output_ids)]
    assert session.defaults.stop == ()
    after = asyncio.run(session.chat([ASK, one.reply.message(), ANSWER], [TOOL]))
    assert after.parent == one.number
    assert list(sampler.requests[-1].input_ids) == one.token_ids + after.added_ids
    assert session.format.decode(after.added_ids).startswith(
        {**END, "glm": "<|observation|>"}.get(family, "<|im_end|>")
    )


def test_a_reply_of_at_most_one_call_needs_a_mark_where_calls_end() -> None:
    for family in ("mistral", "llama3"):
        session = scripted(family, "abc")[0].open()
        with pytest.raises(ValueError, match=f"parallel_tool_calls: a call in the {family} format has no closing"):
            session.turn([ASK], [TOOL], one_call=True)
        assert session.turn([ASK], one_call=True).ends == ()


def test_what_is_given_of_a_call_is_how_every_call_is_encoded() -> None:
    """Also by a vocabulary with a token that only calls with an argument have."""
    spoken = tokenizer()
    spoken.add_tokens(['", "arguments": {"query": '])
    chat_format = ChatFormat(spoken)
    rendered = chat_format.render([ASK], [TOOL])
    given = chat_format.opening([ASK], rendered, ["search"], [TOOL])
    assert chat_format.decode(given).endswith('{"name": "search')
    for arguments in ({}, {"query": "a"}, {"top": 3}):
        call = {"function": {"name": "search", "arguments": arguments}}
        whole = chat_format.render([ASK, {"role": "assistant", "tool_calls": [call]}], [TOOL])
        assert chat_format.encode(whole.removeprefix(rendered))[: len(given)] == given


def test_a_reply_whose_json_the_template_writes_otherwise_goes_on() -> None:
    odd = '<tool_call>{"arguments":{"top":3,"query":"abc"},"name":"search"}</tool_call><|im_end|>'
    sessions, _ = scripted("qwen2.5", odd, "abc<|im_end|>")
    first, second = talk(sessions.open(), ANSWER, tools=[TOOL])
    assert second.parent == 0
    assert sessions.format.decode(second.prompt_ids[len(first.prompt_ids) :]).startswith(
        odd + "\n<|im_start|>user\n<tool"
    )


def test_a_reply_that_was_cut_off_is_ended_by_the_template() -> None:
    sessions, _ = scripted("qwen2.5", "abc ab", "abc<|im_end|>")
    session = sessions.open()
    first, second = talk(session, MORE)
    assert (first.finish_reason, second.parent) == ("length", 0)
    (sample,) = session.samples(Sample(index=0))
    added = sessions.format.decode(second.prompt_ids[len(first.token_ids) :])
    assert added.startswith("<|im_end|>\n<|im_start|>user\n")
    # the end of the turn that the model did not write is not trained on
    assert sample.loss_mask == [1] * len(first.output_ids) + [0] * len(second.prompt_ids[len(first.token_ids) :]) + [
        1
    ] * len(second.output_ids)
    assert sample.status == "completed"


@pytest.mark.parametrize("sent_back", ["abc ", "abc STOP"])
def test_a_reply_goes_on_whether_its_stop_string_is_sent_back_or_not(sent_back: str) -> None:
    sessions, _ = scripted("qwen2.5", "abc STOP", "ab STOP", "abc<|im_end|>")
    session, messages = sessions.open(), [ASK]

    async def run() -> list[Turn]:
        for _ in range(3):
            await session.chat(messages, params=SamplingParams(max_new_tokens=99, stop=("STOP",)))
            text = session.turns[-1].reply.content
            shown = text if sent_back.endswith("STOP") else text.removesuffix("STOP")
            messages.extend([{"role": "assistant", "content": shown}, MORE])
        return session.turns

    turns = asyncio.run(run())
    assert [turn.parent for turn in turns] == [None, 0, 1]
    # each token and each character is kept once
    assert sum(len(turn.own_ids) for turn in turns) == len(turns[-1].token_ids)
    assert sum(len(turn.added_text) for turn in turns) == len(turns[-1].rendered)


def test_qwen3_keeps_its_thinking_while_tools_answer_and_loses_it_to_a_question() -> None:
    call = '<think>\nab\n</think>\n\n<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call><|im_end|>'
    final = "<think>\nabc\n</think>\n\nabc<|im_end|>"
    sessions, sampler = scripted("qwen3", call, final, final)
    session = sessions.open()
    turns = talk(session, ANSWER, MORE)
    assert [turn.parent for turn in turns] == [None, 0, None]
    assert turns[1].reply.reasoning == "abc"
    assert "<think>\nab\n" in sessions.format.decode(turns[1].prompt_ids)
    assert "<think>" not in sessions.format.decode(turns[2].prompt_ids)
    branches = session.samples(Sample(index=7))
    assert [(s.rollout_id, s.index, sum(s.loss_mask or [])) for s in branches] == [
        (7, 7, len(turns[0].output_ids) + len(turns[1].output_ids)),
        (7, 7, len(turns[2].output_ids)),
    ]
    assert sampler.requests[2].input_ids == tuple(branches[1].tokens[: branches[1].prompt_length])


def test_a_client_may_forget_the_thinking_and_rename_the_calls() -> None:
    call = (
        '<think>\nab\n</think>\n\nabc\n<tool_call>\n{"name": "search", "arguments": {"top": 1}}\n</tool_call><|im_end|>'
    )
    sessions, _ = scripted("qwen3", call, "abc<|im_end|>", "abc<|im_end|>", "abc<|im_end|>")

    async def run(**changes: Any) -> Turn:
        session = sessions.open()
        first = await session.chat([ASK], [TOOL])
        reply = {"role": "assistant", "content": [{"type": "text", "text": "abc "}], "refusal": None, **changes}
        called = first.reply.message()["tool_calls"][0]["function"]
        reply["tool_calls"] = [{"id": "x", "function": {"name": called["name"], "arguments": '{ "top" : 1 }'}}]
        return await session.chat([ASK, reply, ANSWER], [TOOL])

    turn = asyncio.run(run())
    assert turn.parent == 0
    assert "<think>\nab\n" in sessions.format.decode(turn.prompt_ids)
    sessions, _ = scripted("qwen3", call, "abc<|im_end|>")
    assert asyncio.run(run(reasoning_content="ab")).parent == 0
    for changes in ({"content": "cba"}, {"reasoning_content": "otherwise"}):
        sessions, _ = scripted("qwen3", call, "abc<|im_end|>")
        assert asyncio.run(run(**changes)).parent is None, changes


def test_sub_agents_compaction_and_second_answers_are_branches() -> None:
    sessions, _ = scripted("qwen2.5", *[f"abc {i}<|im_end|>" for i in range(8)])
    session = sessions.open()

    async def run() -> list[int | None]:
        first = await session.chat([ASK])
        told = [ASK, first.reply.message(), MORE]
        again = await asyncio.gather(session.chat(told), session.chat(told))
        deeper = await session.chat([*told, again[1].reply.message(), MORE])
        agent = await session.chat([{"role": "system", "content": "help"}, ASK])
        short = await session.chat([{"role": "user", "content": "so far: abc"}])
        other = await session.chat([ASK], [TOOL])
        raw = await session.sample(session.raw_turn([*deeper.token_ids, 5, 6]))
        return [turn.parent for turn in (first, *again, deeper, agent, short, other, raw)]

    assert asyncio.run(run()) == [None, 0, 0, 2, None, None, None, 3]
    assert [[turn.number for turn in path] for path in session.paths] == [[0, 1], [4], [5], [6], [0, 2, 3, 7]]
    made = session.samples(Sample(index=3))
    sampled = sum(len(turn.output_ids) for turn in session.turns)
    assert sum(sum(s.loss_mask or []) for s in made) == sampled, "every sampled token is trained on once"
    for sample in made:
        sample.check_aligned()
        assert {v for v, m in zip(sample.weight_versions, sample.loss_mask or [], strict=True) if m} <= {3}
    shared = session.turns[0]
    first, last = made[0], made[-1]
    assert first.tokens[: len(shared.token_ids)] == last.tokens[: len(shared.token_ids)]
    assert (first.loss_mask or [])[0] == 1
    assert (last.loss_mask or [])[0] == 0


def test_a_full_context_and_a_template_without_tools_are_said() -> None:
    sessions, sampler = scripted("qwen2.5", "abc")
    session = Sessions(sessions.format, sampler, 40).open()
    with pytest.raises(ContextFullError, match=r"maximum context length is 40 tokens\. However, your messages"):
        asyncio.run(session.chat([{"role": "user", "content": "x" * 40}]))
    assert session.turns == []
    with pytest.raises(ValueError, match="there is nothing to train on"):
        session.samples(Sample())
    bare = tokenizer()
    bare.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="shows the model no tools"):
        ChatFormat(bare).prompt([ASK], [TOOL])
    with pytest.raises(ValueError, match="cannot continue the prompt with a call"):
        ChatFormat(bare).opening([ASK], "abc?", ["search"])
    whole = tokenizer()
    whole.add_tokens(["@search", "@find"])
    whole.chat_template = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or () %}@{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    calls = ChatFormat(whole, tool_parser="hermes")
    assert calls.opening([ASK], "abc?", ["search"]) == whole.convert_tokens_to_ids(["@search"])
    with pytest.raises(ValueError, match="calls of search and find begin with different tokens"):
        calls.opening([ASK], "abc?", ["search", "find"])
    with pytest.raises(ValueError, match=r"refuses these messages .one call a turn"):
        FORMATS["llama3"].prompt([ASK, {"role": "assistant", "tool_calls": [CALL, CALL]}])
    with pytest.raises(ValueError, match=r"content\[0\] is of type 'image_url'"):
        FORMATS["llama3"].prompt([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_a_text_that_no_context_holds_is_refused_before_all_of_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    chat_format, encoded = ChatFormat(tokenizer()), list[int]()
    text = "abc? " * 40_000
    tokens = len(chat_format.encode(text))
    assert 0.9 < chat_format.excess(text, tokens // 20) / tokens < 1.1
    assert not chat_format.excess(text, tokens)
    encode = chat_format.encode

    def counted(part: str) -> list[int]:
        encoded.append(len(part))
        return encode(part)

    monkeypatch.setattr(chat_format, "encode", counted)
    session = Session("s", chat_format, None, 512)  # type: ignore[arg-type]  # nobody asks the engine
    message = {"role": "user", "content": "abc? " * 2_400_000}
    with pytest.raises(ContextFullError, match=r"is 512 tokens\. However, your messages resulted in \d{7,8} tokens"):
        asyncio.run(session.chat([message]))
    assert sum(encoded) < 200_000


def test_parts_and_developers_are_rendered_as_text_and_system() -> None:
    asked = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]
    same = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    assert FORMATS["qwen2.5"].prompt(asked) == FORMATS["qwen2.5"].prompt(same)
    parts = tokenizer()
    parts.chat_template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert ChatFormat(parts).render(same) == "be briefa"


def test_a_session_is_opened_by_its_own_key_alone() -> None:
    sessions, sampler = scripted("qwen2.5", "abc")
    mine, other = sessions.open("mine"), sessions.open()
    assert sessions.get("mine", mine.key) is mine
    for key in (other.key, "", None):
        with pytest.raises(PermissionError):
            sessions.get("mine", key)
    with pytest.raises(LookupError):
        sessions.get("nobody", mine.key)
    with pytest.raises(ValueError, match="session 'mine' exists already"):
        sessions.open("mine")
    assert sessions.close("mine") is mine
    with pytest.raises(LookupError):
        sessions.close("mine")
    assert isinstance(sampler, Scripted)


def test_turns_have_seeds_of_their_own() -> None:
    sessions, sampler = scripted("qwen2.5", *["abc<|im_end|>"] * 5)

    async def run() -> None:
        for seed in (1, 1, 2):
            session = sessions.open(seed=seed)
            await session.chat([ASK])
            await session.chat([ASK], params=SamplingParams(9, seed=4) if seed == 2 else None)
            if seed == 2:
                break

    sampler.replies.append("abc<|im_end|>")
    asyncio.run(run())
    seeds = [request.params.seed for request in sampler.requests]
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4
    assert seeds[5] == 4
