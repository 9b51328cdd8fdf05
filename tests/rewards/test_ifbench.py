"""Instructions whose following can be checked: a text that does and one that does not, for each."""

from __future__ import annotations

import json
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from slimelite.rewards import ifbench, ifeval
from slimelite.rewards.rule import Answer

# instruction, arguments, texts that follow it, texts that do not
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, ["A Cat and dogs."], ["a cat"]),
    ("keywords:frequency", {"keyword": "no", "frequency": 2, "relation": "at least"}, ["No, no!"], ["no"]),
    ("keywords:frequency", {"keyword": "no", "frequency": 2, "relation": "less than"}, ["no"], ["No, no!"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["concatenate"], ["a Cat."]),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "at least"}, ["Zz"], ["z"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, ["One. Two!"], ["One, two."]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["3.14."], ["One. Two!"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "a\n***\nb\n***"], ["a\n\nb"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["***a***b"], ["a\n***\n***\nb", "a"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one, two: three"], ["one two"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        ["First.\n\nthen more", "a\n\n\"Then,\" he said"],
        ["First.\n\nSo then", "then", "a\n\nThen\n\nb"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] at [place]"], ["[name]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["P.S. more", "p. s. more"], ["Bye", "tips"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S more"], ["P.S. more"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n - b"], ["- a\n- b\n- c", "**a**\n- b"]),
    ("detectable_format:constrained_response", {}, ["My answer is no."], ["no"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and **b**"], ["*a*", "* * **b**"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        ["Part 1\na\nPart 2"],
        ["Part 1", "Part one, Part two"],
    ),
    ("detectable_format:json_format", {}, ['{"a": [1]}', '```json\n{"a": 1}\n```'], ["a", "{'a': 1}"]),
    ("detectable_format:title", {}, ["<<Poem>>\nline"], ["<Poem>", "<< >>"]),
    ("combination:two_responses", {}, ["one\n******\ntwo"], ["one", "one******one", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, ["say hi. Hi!"], ["Hi!"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ['It was so. "the end."'], ["The end. Really."]),
    ("startend:quotation", {}, ['"all of it"'], ['"half" of it', '"']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NO, NO no"],
        ["NO no"],
    ),
    ("change_case:english_capital", {}, ["ALL OF 7."], ["All"]),
    ("change_case:english_lowercase", {}, ["all of 7."], ["All"]),
    ("punctuation:no_comma", {}, ["none; at all"], ["one, here"]),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "arguments", "good", "bad"), CASES)
def test_each_instruction(instruction: str, arguments: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [ifbench.follows(instruction, text, {**arguments, "unused": None}) for text in good] == [True] * len(good)
    assert [ifbench.follows(instruction, text, arguments) for text in bad] == [False] * len(bad)


LONG = 200_000
HOSTILE = ["*", "* ", " ", "\n", "<", "<<a", "[", "[a", '"', ".", "a. ", "***", "`", "1", "p.", "- ", "a"]


@pytest.mark.parametrize("piece", HOSTILE)
def test_the_checks_are_linear_in_whatever_a_model_writes(piece: str) -> None:
    """They run without a time limit: a quadratic pattern would take minutes."""
    for text in (piece * (LONG // len(piece)), f"a{piece * (LONG // len(piece))}a"):
        start = time.perf_counter()
        for instruction, arguments, _, _ in CASES:
            ifbench.follows(instruction, text, arguments)
        assert time.perf_counter() - start < 4.0


def test_every_instruction_has_a_case() -> None:
    assert {case[0] for case in CASES} | {"language:response_language"} == set(ifeval.CHECKS)


def test_the_language_is_langdetects_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[ifbench\]'"):
        ifbench.follows("language:response_language", "hello", {"language": "en"})
    said = ModuleType("langdetect")
    said.__dict__.update(detect=lambda text: "de", DetectorFactory=type("F", (), {}), LangDetectException=KeyError)
    monkeypatch.setitem(sys.modules, "langdetect", said)
    assert ifbench.follows("language:response_language", "guten Tag", {"language": "de"})
    assert not ifbench.follows("language:response_language", "guten Tag", {"language": "en"})


ROW = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words", "startend:end_checker"],
    "kwargs": [{}, {"num_words": 3, "relation": "at least", "end_phrase": None}, {"end_phrase": "done."}],
}


def test_all_instructions_of_a_row_must_be_followed() -> None:
    for response, expected in (("all is now done.", 1.0), ("now, all is done.", 0.0), ("done.", 0.0), ("", 0.0)):
        assert ifbench.strict(Answer(response, "", ROW)) == expected
        assert ifbench.strict(Answer(response, json.dumps(ROW))) == expected


def test_loose_forgives_stars_and_a_line_at_either_end() -> None:
    for response in ("all is now done.*", "Sure, here:\nall is now done.", "all is now done.\nAnything else?"):
        assert ifbench.strict(Answer(response, "", ROW)) == 0.0
        assert ifbench.loose(Answer(response, "", ROW)) == 1.0
    assert ifbench.loose(Answer("Sure!\nnothing, and not\nended", "", ROW)) == 0.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"instruction_id_list": ["words:rhyme"], "kwargs": [{}]}, "no check for words:rhyme"),
        ({}, "needs instruction_id_list and kwargs"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "1 instructions and 2 kwargs"),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{"phrase": "x"}]}, "do not fit"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 1, "relation": "about"}],
            },
            "'at least' or 'less than'",
        ),
    ],
)
def test_what_cannot_be_checked_is_a_reward_error(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ifbench.strict(Answer("text", "", metadata))
