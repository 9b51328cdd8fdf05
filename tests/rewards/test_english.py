"""What instruction checks take for sentences, tokens, syllables, verbs and emoji."""

from __future__ import annotations

import pytest

from slimelite.rewards.english import is_emoji, is_verb, sentences, syllables, tokens, word_tokens


@pytest.mark.parametrize(
    "parts",
    [
        ["It is.", "Is it?", "So!"],
        ['He said "Hi."', "(Really.)", "Then he left."],
        ["“Hi.”", "And so on"],
        ["Dr. Li met J. Li.", "They talked, e.g. about 3.14."],
        ["She lives in the U.S.", "The end."],
        ["Plan B.", "Then what?!", "Go."],
        ["Well... perhaps.", "So...", "Then"],
        ["no capital.", "here either"],
    ],
)
def test_sentences_end_at_stops_but_not_at_abbreviations(parts: list[str]) -> None:
    assert sentences(" ".join(parts)) == parts
    assert sentences("\n\n".join(parts)) == parts


def test_markup_behind_a_stop_begins_the_next_sentence() -> None:
    assert sentences("**It is.** So") == ["**It is.", "** So"]
    assert sentences("  \n ") == []


def test_tokens_part_contractions_and_keep_numbers_and_compounds() -> None:
    text = "Don't say it's 1,000.5 or well-known/O'Neil's, please."
    assert " ".join(tokens(text)) == "Do n't say it 's 1,000.5 or well-known/O'Neil 's , please ."
    assert word_tokens("(no, *no*!)") == ["no", "no"]


def test_syllables() -> None:
    counts = {
        "cat": 1,
        "little": 2,
        "have": 1,
        "regret": 2,
        "rated": 2,
        "jumped": 1,
        "being": 2,
        "video": 3,
        "hmm": 1,
        "4th": 0,
    }
    assert {word: syllables(word) for word in counts} == counts


def test_verbs() -> None:
    assert all(map(is_verb, ["Does", "Tries", "Uses", "Makes", "imagine", "Running", "Embarked", "Is"]))
    assert not any(map(is_verb, ["This", "Sure", "Nothing", "Cats", "ing", "Yes", "during", "", "."]))


def test_emoji() -> None:
    assert all(map(is_emoji, "😀❤⭐✨🇩👋"))
    assert not any(map(is_emoji, ["a", "!", "あ", "3", "", "—", "“"]))
