"""Responses of the embedded engine that are held to a grammar."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

from slimelite.engines.embedded.engine import EmbeddedEngine
from slimelite.engines.embedded.grammars import Grammars
from slimelite.engines.params import SamplingParams
from slimelite.engines.protocol import GenerateRequest, GenerateResult
from tests.serving.chat import build, tokenizer

WORDS = tokenizer()
PROMPT = tuple(WORDS("abc", add_special_tokens=False)["input_ids"])
SCHEMA = {
    "type": "object",
    "properties": {"right": {"type": "boolean"}, "count": {"type": "integer", "minimum": 3, "maximum": 70}},
    "required": ["right", "count"],
    "additionalProperties": False,
}
TAG = {
    "structures": [
        {"begin": '<tool_call>{"name": "a", "arguments": ', "schema": SCHEMA, "end": "}</tool_call>"},
        {"begin": '<tool_call>{"name": "b", "arguments": ', "schema": {"type": "null"}, "end": "}</tool_call>"},
    ],
    "triggers": ["<tool_call>"],
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": "(ab|c){2}[0-9]{1,3}"},
    "lark": {"ebnf": 'start: "a" (B | "c")+\nB: /[b-d]{2}x/'},
    "gbnf": {"ebnf": 'root ::= "a" ("b" | "c")* "d"'},
    "greedy": {"regex": "[0-9]{3}", "temperature": 0.0},
    "cut": {"regex": "[^a]{5}", "top_p": 0.7, "top_k": 30, "min_p": 0.01},
}
FULL = {
    "regex": "(ab|c){2}[0-9]{1,3}",
    "lark": "a([b-d]{2}x|c)+",
    "gbnf": "a[bc]*d",
    "greedy": "[0-9]{3}",
    "cut": "[^a]{5}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("grammars") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(str(folder), decode=WORDS.decode, tokenizer=WORDS, max_context_len=600, seed=1)
    yield engine
    asyncio.run(engine.close())


def ask(engine: EmbeddedEngine, *all_params: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> list[GenerateResult]:
    requests = [GenerateRequest(f"{n}", prompt, params) for n, params in enumerate(all_params)]
    return asyncio.run(engine.generate(requests))


def text(result: GenerateResult) -> str:
    ids = result.output_ids
    return str(WORDS.decode(ids[:-1] if ids[-1] == WORDS.eos_token_id else ids))


def test_each_row_of_a_batch_is_in_its_own_grammar_and_others_are_as_without_any(engine: EmbeddedEngine) -> None:
    free = [SamplingParams(12, seed=n, temperature=0.9) for n in range(3)]
    alone = ask(engine, *free)
    held = [SamplingParams(200, seed=n, **values) for n in range(3) for values in GRAMMARS.values()]
    results = ask(engine, *held, *free)
    for params, result in zip(held, results, strict=False):
        kind, said = (
            next(name for name, values in GRAMMARS.items() if values.items() <= vars_of(params).items()),
            text(result),
        )
        assert result.finish_reason == "stop", (kind, said)
        if kind == "json_schema":
            value = json.loads(said)
            assert value.keys() == {"right", "count"}
            assert type(value["right"]) is bool
            assert 3 <= value["count"] <= 70
        else:
            assert re.fullmatch(FULL[kind], said, re.DOTALL), (kind, said)
        assert result.constrained is not None
        assert result.constrained.tolist() == [True] * result.length
    for one, other in zip(alone, results[-3:], strict=True):
        assert (one.output_ids, one.constrained) == (other.output_ids, None)


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {
        name: getattr(params, name)
        for name in ("json_schema", "regex", "ebnf", "temperature", "top_p", "top_k", "min_p")
    }


def test_a_token_is_drawn_from_the_allowed_ones_renormalised(engine: EmbeddedEngine, folder: Path) -> None:
    """Against logits of transformers, over the ids that the engine tells."""
    params = SamplingParams(40, temperature=0.8, seed=5, regex="[a-e]{12}x?").telling(constrained=True)
    (told,) = ask(engine, params)
    (plain,) = ask(engine, replace(params, kept=False, top_k=-1))
    assert told.kept is not None
    model = AutoModelForCausalLM.from_pretrained(folder)

    @torch.no_grad()
    def over_all(output: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([[*PROMPT, *output]])).logits[0, len(PROMPT) - 1 : -1]
        return (logits / 0.8).log_softmax(-1)

    whole = over_all(plain.output_ids).gather(-1, torch.tensor(plain.output_ids)[:, None])[:, 0]
    assert (torch.tensor(plain.log_probs) - whole).abs().max() < 1e-4
    log_p = over_all(told.output_ids)
    letters = {i for i in range(len(WORDS)) if re.fullmatch("[a-e]+", WORDS.decode([i]))}
    for at, (token, kept) in enumerate(zip(told.output_ids, told.kept.rows(), strict=True)):
        if at < 10:
            assert set(kept) == letters
        over = log_p[at, token] - log_p[at, kept].logsumexp(-1)
        assert abs(told.log_probs[at] - float(over)) < 1e-5
    assert told.kept.rows()[-1] == [WORDS.eos_token_id] or told.output_ids[-2] != WORDS.convert_tokens_to_ids("x")


def test_min_tokens_and_own_stops_end_a_response_where_its_grammar_may_end(engine: EmbeddedEngine) -> None:
    stop = WORDS.convert_tokens_to_ids("!")
    longer, short, none, own = ask(
        engine,
        *(
            SamplingParams(60, seed=3, **values)
            for values in (
                {"regex": "[ab]{1,50}", "min_new_tokens": 12},
                {"regex": "ab?", "min_new_tokens": 12},  # it has nothing else
                {"regex": "[0-9]{2}", "ignore_eos": True},
                {"regex": "[0-9]{2}", "ignore_eos": True, "stop_token_ids": (stop,)},
            )
        ),
    )
    assert len(longer.output_ids) >= 12
    assert (short.finish_reason, short.output_ids[-1]) == ("stop", WORDS.eos_token_id)
    assert (none.finish_reason, len(none.output_ids)) == ("stop", 2)
    assert (own.finish_reason, own.output_ids[-1], len(own.output_ids)) == ("stop", stop, 3)


def test_a_response_goes_on_in_the_middle_of_its_grammar(engine: EmbeddedEngine) -> None:
    params = SamplingParams(40, seed=2, json_schema=json.dumps(SCHEMA))
    (whole,) = ask(engine, params)
    for done in (1, 5):
        request = GenerateRequest("x", (*PROMPT, *whole.output_ids[:done]), params, position=done)
        (rest,) = asyncio.run(engine.generate([request]))
        assert rest.output_ids == whole.output_ids[done:]
    wrong = GenerateRequest("x", (*PROMPT, *PROMPT), params, position=len(PROMPT))
    with pytest.raises(ValueError, match="does not follow its grammar"):
        asyncio.run(engine.generate([wrong]))


def test_the_grammar_of_a_tag_begins_at_its_trigger_and_ends_with_the_structure(engine: EmbeddedEngine) -> None:
    """The text before is a response's own, here that of a continued one; the end is what the model makes of it."""
    said = WORDS("ab, <tool_call>", add_special_tokens=False)["input_ids"]
    params = SamplingParams(150, structural_tag=json.dumps(TAG))
    requests = [
        GenerateRequest(f"{n}", (*PROMPT, *said), replace(params, seed=n), position=len(said)) for n in range(3)
    ]
    names = set()
    for result in asyncio.run(engine.generate(requests)):
        assert result.constrained is not None
        held = int(result.constrained.argmin())  # it may call again later
        call = str(WORDS.decode(result.output_ids[:held])).removesuffix("</tool_call>")
        value = json.loads(call)
        names.add(value["name"])
        assert value["name"] in "ab"
        assert (value["arguments"] is None) == (value["name"] == "b")
    (free,) = ask(engine, SamplingParams(20, seed=1, structural_tag=json.dumps(TAG)))
    (same,) = ask(engine, SamplingParams(20, seed=1))
    assert free.output_ids == same.output_ids
    assert free.constrained is not None
    assert not free.constrained.any()
    # what the prompt has begun already is part of the response's text, and the thinking is free
    begin, null = '<tool_call>{"name": "b", "arg', 'uments": null}</tool_call>'
    begun, either, after = ask(
        engine,
        SamplingParams(90, seed=1, calls=json.dumps(TAG), begun=begin),
        SamplingParams(90, seed=1, json_schema=json.dumps(SCHEMA), calls=json.dumps(TAG), begun=begin),
        SamplingParams(9, seed=1, regex="x", grammar_after="</think>", begun="hm</think>"),
    )
    assert [str(WORDS.decode(result.output_ids)).startswith(null) for result in (begun, either)] == [True, True]
    assert text(after) == "x"


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        ({"regex": "<think>x"}, "<think>x"),
        ({"ebnf": 'start: "a<|im_end|>b<tool_call>"'}, r"a<\|im_end\|>b<tool_call>"),
        ({"json_schema": '{"enum": ["<think>a", "<think>b"]}'}, '"<think>[ab]"'),
    ],
)
def test_a_grammar_may_have_the_text_of_a_mark_of_the_chat(
    engine: EmbeddedEngine, grammar: dict[str, str], fits: str
) -> None:
    """The response spells it: the mark itself is no text in a grammar."""
    marks = WORDS.convert_tokens_to_ids(["<think>", "<tool_call>"])
    for result in ask(engine, *(SamplingParams(60, seed=n, **grammar) for n in range(3))):
        assert re.fullmatch(fits, text(result))
        assert result.finish_reason == "stop"
        assert not set(marks) & set(result.output_ids)


WIDE = [{"anyOf": [{"properties": {f"{i} {j}": {}}} for j in range(8)]} for i in range(7)]
PATTERNS = {f"p{i}": {"type": "string", "pattern": "^(a|b){1,200}[0-9]*$"} for i in range(5000)}
MALFORMED = {
    "type": {"json_schema": '{"type": "objec"}'},
    "no JSON": {"json_schema": "{"},
    "reference": {"json_schema": '{"$ref": "#/x"}'},
    "deep": {"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000},
    "wide": {"json_schema": json.dumps({"allOf": WIDE})},
    "large": {"json_schema": json.dumps({"enum": ["x" * 99] * 900})},
    "patterns": {"json_schema": json.dumps({"properties": PATTERNS})},
    "regex": {"regex": "(a|"},
    "look": {"regex": "(?=a)b"},
    "ebnf": {"ebnf": "root ::= ("},
    "lark": {"ebnf": "start: missing"},
    "tag": {"structural_tag": '{"structures": []}'},
    "trigger": {"structural_tag": json.dumps({**TAG, "triggers": ["<other>"]})},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_or_oversized_grammar_is_refused(engine: EmbeddedEngine, name: str) -> None:
    with pytest.raises(ValueError, match=next(iter(MALFORMED[name]))):
        ask(engine, SamplingParams(5, **MALFORMED[name]))


# 38 kB; each of its properties may come next: too many for one place, which only the first token shows
PROPERTIES = {f"p{i}": {"type": "string", "pattern": "^(a|b){1,200}[0-9]*$"} for i in range(600)}
OPTIONAL = {"json_schema": json.dumps({"type": "object", "properties": PROPERTIES})}


def test_a_malformed_or_oversized_grammar_is_refused_within_a_second(alone: Callable[[], float]) -> None:
    grammars = Grammars(WORDS, len(WORDS), [WORDS.eos_token_id])
    for name, grammar in {**MALFORMED, "optional": OPTIONAL}.items():
        start = alone()
        with pytest.raises(ValueError) as refusal:  # noqa: PT011
            grammars.guide(SamplingParams(5, **grammar)).advance(WORDS("{")["input_ids"])
        assert alone() - start < 1.0, name
    assert str(refusal.value).startswith("the grammar is too large: Current row has 2407 items; max is 2000. Use")


def test_a_grammar_that_becomes_too_complex_ends_its_own_request_alone(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slimelite.engines.embedded.grammars import Held

    fill = Held.fill

    def failing(held: Held, allowed: np.ndarray) -> bool:
        if "[xy]" in str(held._written):
            raise ValueError("the grammar is too complex: here")
        return fill(held, allowed)

    monkeypatch.setattr(Held, "fill", failing)

    async def both() -> list[Any]:
        params = SamplingParams(9, seed=1, regex="[xy]{3}"), SamplingParams(9, seed=1, regex="[xz]{3}")
        calls = [engine.generate([GenerateRequest(f"{n}", PROMPT, one)]) for n, one in enumerate(params)]
        return await asyncio.gather(*calls, return_exceptions=True)

    failed, (other,) = asyncio.run(both())
    assert str(failed) == "the grammar is too complex: here"
    assert re.fullmatch("[xz]{3}", text(other))


def test_penalties_and_biases_change_the_draw_and_not_the_log_probs(engine: EmbeddedEngine, folder: Path) -> None:
    """Greedy, against the processors of transformers where it has them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8, "repetition_penalty": 1.2},
        {"logit_bias": {"70": 4.0, "71": 3.0, str(WORDS.eos_token_id): -100.0}},
    ]
    results = ask(engine, *(SamplingParams(12, temperature=0.0, ignore_eos=True, **each) for each in settings))
    for each, result in zip(settings, results, strict=True):
        output: list[int] = []
        for token, log_prob in zip(result.output_ids, result.log_probs, strict=True):
            with torch.no_grad():
                raw = model(torch.tensor([[*PROMPT, *output]])).logits[0, -1]
            logits = raw.clone()
            for biased, value in each.get("logit_bias", {}).items():
                logits[int(biased)] += value
            if rate := each.get("repetition_penalty"):
                seen = torch.tensor([[*PROMPT, *output]])
                logits = RepetitionPenaltyLogitsProcessor(rate)(seen, logits[None])[0]
            for other in set(output):
                logits[other] -= each.get("presence_penalty", 0.0)
                logits[other] -= each.get("frequency_penalty", 0.0) * output.count(other)
            assert int(logits.argmax()) == token, each
            assert abs(float(raw.log_softmax(-1)[token]) - log_prob) < 1e-4
            output.append(token)
        assert result.constrained is not None
        assert result.constrained.all()
    (plain,) = ask(engine, SamplingParams(12, temperature=0.0, ignore_eos=True))
    assert all(plain.output_ids != result.output_ids for result in results)


def test_an_engine_without_a_tokenizer_says_so(folder: Path) -> None:
    engine = EmbeddedEngine(str(folder))
    try:
        assert not asyncio.run(engine.info()).schemas
        with pytest.raises(ValueError, match="regex: this engine was built without a tokenizer"):
            ask(engine, SamplingParams(5, regex="a"))
        (free,) = ask(engine, SamplingParams(5, calls=json.dumps(TAG)))  # strict tools ask for less
        assert free.constrained is None
    finally:
        asyncio.run(engine.close())
