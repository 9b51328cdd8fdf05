"""Instructions of IFEval and IFBench: texts that follow and texts that do not, for each."""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from slimelite.contrib import ifbench, instructions
from slimelite.contrib.ifbench import INSTRUCTIONS, follows
from slimelite.contrib.instructions import CAPITALS, is_emoji, is_verb, sentences, syllables, tokens, word_tokens
from slimelite.rewards.rules import Answer

# instruction, arguments, texts that follow it, texts that do not
IFEVAL: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
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


def question(number: int, words: int, options: str = "ABCDE") -> str:
    return f"Question {number}\n{'what ' * words}?\n" + "\n".join(f"{letter}) painter" for letter in options) + "\n\n"


def table(header: str, rows: int, row: str) -> str:
    return "\n".join([header, *[row] * rows])


QUIZ = "".join(question(n, n) for n in (1, 2, 3, 4))
STORY = " ".join(f"{letter} did it." for letter in string.ascii_uppercase if letter != "I").replace(
    "J did", "It did. J did"
)
COUNTRIES = ["Here they are:", "* Zimbabwe", *sorted((f"Land {n:02}" for n in range(50)), reverse=True), "Ågypt"]
CITY, SHOP = "ID,Country,City,Year,Count", "ProductID,Category,Brand,Price,Stock"
SCORE = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"'
FIVE = "a " + "b " * 2 + "c " * 3 + "d " * 5 + "e " * 7
WALLS = {"prompt_to_repeat": "The walls are solid, and cold.", "n_start": 1, "n_end": 3}

IFBENCH: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("count:conjunctions", {"small_n": 2}, ["this and that, or none"], ["one thing and another and more"]),
    (
        "count:keywords_multiple",
        {f"keyword{n}": letter for n, letter in enumerate("abcde", 1)},
        [FIVE, FIVE + "abcde"],
        [FIVE + "a", FIVE[2:]],
    ),
    ("count:numbers", {"N": 2}, ["100,000 of 3.5."], ["100,000", "1 2 3"]),
    ("count:person_names", {"N": 2}, ["Emma and Liam"], ["Emma and Emma", "emma, Liam", "Emmas, Liam"]),
    ("count:pronouns", {"N": 3}, ["she/her/hers", "It's mine, isn't it?"], ["She sees a heron."]),
    ("count:punctuation", {}, ["Why?! Well: yes; no, or what? Go! Now."], ["Why?! Well: yes; no, or.", ". , ! ? ; :"]),
    ("count:unique_word_count", {"N": 3}, ["One, two, three one"], ["one One, two"]),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, ["two words", "now: three words"], ["one", "a b c d"]),
    ("count:words_japanese", {"N": 2}, ["one 猫 three ねこ.", "only 12"], ["one two 猫"]),
    ("ratio:overlap", {"reference_text": "a b c d", "percentage": 50}, ["a b c x"], ["a b c d", "x y z", "a b"]),
    ("ratio:sentence_balance", {}, ["It is. Is it? So!"], ["It is. Is it?"]),
    ("ratio:sentence_type", {}, ["It is. Is it? So it is."], ["It is. Is it?"]),
    (
        "ratio:sentence_words",
        {},
        ["I see him. We eat it. Dogs bark."],
        ["I see him. We eat it.", "I see him. We eat. Dogs bark.", "I see him. We see it. Dogs bark."],
    ),
    ("ratio:stop_words", {"percentage": 50}, ["The cat"], ["It is the cat.", "..."]),
    ("words:alphabet", {}, ["Yes, zebras are big", "one"], ["All cats", "1 by", "..."]),
    ("words:consonants", {}, ["Dogs bark"], ["Dogs are"]),
    ("words:keywords_specific_position", {"keyword": "key", "n": 2.0, "m": 2}, ["A. The Key."], ["The key. A.", "key"]),
    ("words:last_first", {}, ["I see you. You see me! Me too."], ["I see you. I see me.", "I. ... I."]),
    ("words:no_consecutive", {}, ["a bad act"], ["a bad Bee"]),
    ("words:odd_even_syllables", {}, ["Children have little to regret."], ["Children little", "one two"]),
    (
        "words:palindrome",
        {},
        ["Level, " * 10, "level radar " * 5],
        ["level " * 9 + "otto", "level " * 9],
    ),
    ("words:paragraph_last_first", {}, ["This is this.\n\nSo is so.*"], ["This is this. So is so", "this is that"]),
    ("words:prime_lengths", {}, ["We see three."], ["We see four."]),
    ("words:repeats", {"small_n": 2}, ["one, one two"], ["one One one"]),
    ("words:start_verb", {}, ["Tries vary.", "Let's go", "Cooking"], ["The cook tries.", "During it", "Nothing"]),
    ("words:vowel", {}, ["This is no fun, in"], ["the audio is", "one\ntwo"]),
    ("words:words_position", {"keyword": "key"}, ["A key, the KEY now!"], ["A key right now", "key a key b", "key"]),
    ("sentence:alliteration_increment", {}, ["None here. Big bad act."], ["Big bad act. None.", "Go. No. So."]),
    ("sentence:increment", {"small_n": 2}, ["One. Then two more! Then two more, as ever."], ["One. Two more."]),
    ("sentence:keyword", {"word": "key", "N": 2}, ["A. The Key."], ["The key. A.", "A. Keys.", "key"]),
    ("format:emoji", {}, ["Hi 😀. Bye! 👋🏽", "Hi. 😀 Bye. 😀"], ["😀 Hi.", "Hi 😀. Bye."]),
    ("format:line_indent", {}, ["a\n b\n\n   c"], ["a\n b\n c"]),
    ("format:list", {"sep": "!?"}, ["!? one\n!? two"], ["!? one", "- one\n- two"]),
    ("format:newline", {}, ["One\n\ntwo ."], ["One two", "One two\n three"]),
    (
        "format:no_bullets_bullets",
        {},
        ["One. Two.\n* a\n * b", "One.\nTwo.\n\n* a\n* b"],
        ["One.\n* a\n* b", "One. Two.\n* a", "One. Two.\n* a\n* b\nend", "One.\n\nTwo.\n* a\n* b", "One. Two."],
    ),
    ("format:no_whitespace", {}, ["all-in-one"], ["all in one", "all\n"]),
    ("format:options", {"options": "yes/no"}, ["Yes.", "no"], ["yes/no", "yes, sir"]),
    ("format:options", {"options": "I know or I don't know"}, ["I don't know"], ["know"]),
    ("format:options", {"options": "a), b), c)"}, ["b)"], ["b", "B)"]),
    ("format:output_template", {}, ["My Answer: a My Conclusion: b Future Outlook: c"], ["My Answer: a"]),
    ("format:parentheses", {}, ["([{([])}])", "(] ([{(["  + "])"], ["([{()}])", "([{([", "(((((]"]),
    ("format:quote_unquote", {}, ['He said "hi" twice', "a '\"'"], ['He said "hi".', '"a" "b" c']),
    ("format:quotes", {}, ["\"a 'b \"c\" d' e\""], ["\"a 'b' c\"", "\"a 'b \"c"]),
    ("format:sub-bullets", {}, ["* a\n - b\n* c\n - d"], ["* a\n* b\n - c"]),
    ("format:thesis", {}, ["<i>It is.</i> So", "<em>It is.</em> So"], ["It is.", "<i> </i> So", "<i>It.</i>", "<i>It"]),
    ("format:title_case", {}, ["I Am A Test (Of 3 IPhones)", "My iPhone"], ["I Am a Test", "My phone", "oK"]),
    ("custom:character_reverse", {}, [".Elgae dlab"], ["bald eagle"]),
    (
        "custom:csv_city",
        {},
        [table(CITY, 7, '1,USA,"New York, NY",2020,5'), table('"ID",Country,City,Year,Count', 7, "1,2,3,4,5")],
        [table(CITY, 6, "1,2,3,4,5"), table(CITY, 7, "1,2,3,4"), table("A,B,C,D,E", 7, "1,2,3,4,5"), '"' * 200_000],
    ),
    (
        "custom:csv_quotes",
        {},
        [table(SCORE, 3, '"1"\t"2"\t "3"\t"4"\t"5"')],
        [table(SCORE, 3, '"1"\t2\t"3"\t"4"\t"5"'), table(SCORE, 2, SCORE), table(SCORE, 3, '"1"\t\t"3"\t"4"\t"5"')],
    ),
    (
        "custom:csv_special_character",
        {},
        [table(SHOP, 14, '1,Home,"Pots, Inc.",3,4'), table(SHOP.replace(",", ", "), 14, '1,2,"!",4,5')],
        [table(SHOP, 14, '1,Home,"Pots",3,4'), table(SHOP, 13, '1,2,"!",4,5'), table(CITY, 14, '1,2,"!",4,5')],
    ),
    ("custom:date_format_list", {}, ["1796-07-05, 1800-12-31"], ["07-05-1796", "1796-04-31", "1822-01-01"]),
    ("custom:european_capitals_sort", {}, [CAPITALS, CAPITALS.replace("jav", "jáv")], ["Oslo, " + CAPITALS, "Oslo"]),
    (
        "custom:mcq_count_length",
        {},
        [QUIZ],
        [
            *("Here: " + QUIZ, "".join(question(n, 5 - n) for n in (1, 2, 3, 4)), QUIZ + question(5, 5)),
            *(QUIZ.replace("E) painter", ""), "Question"),
        ],
    ),
    ("custom:multiples", {}, ["14,21,28,35,42,49"], ["7 14 21 28 35 42 49", "14 21"]),
    (
        "custom:reverse_newline",
        {},
        ["\n".join(COUNTRIES)],
        ["\n".join(COUNTRIES[:-1]), "\n".join(sorted(COUNTRIES)), ", ".join(COUNTRIES)],
    ),
    ("custom:sentence_alphabet", {}, [STORY, f'"{STORY}'], [STORY[:-12], STORY.replace("D did", "E did"), ". " * 26]),
    ("custom:word_reverse", {}, [".eagle bald the is It"], ["It is the bald eagle."]),
    (
        "repeat:repeat_change",
        {"prompt_to_repeat": "Give me it."},
        ["Hand me it."],
        ["Give me it.", "Hand me that.", "Of course: give me it."],
    ),
    (
        "repeat:repeat_simple",
        {},
        ["Only output this sentence here, ignore all other requests."],
        ["Sure! Only output this sentence here, ignore all other requests."],
    ),
    ("repeat:repeat_span", WALLS, ["walls are solid,", "Walls ARE solid,"], ["The walls are solid,", "walls are"]),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "arguments", "good", "bad"), IFEVAL + IFBENCH)
def test_each_instruction(instruction: str, arguments: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not follows(instruction, text, {**arguments, "unused": None})] == []
    assert [text for text in bad if follows(instruction, text, arguments)] == []


def test_every_instruction_has_a_case() -> None:
    assert {case[0] for case in IFEVAL} | {"language:response_language"} == set(instructions.CHECKS)
    assert {case[0] for case in IFBENCH} == set(INSTRUCTIONS) - set(instructions.CHECKS)
    assert (len(instructions.CHECKS), len(INSTRUCTIONS)) == (25, 25 + 58)


HOSTILE = [
    *(
        "*",
        "* ",
        " ",
        "\n",
        "<",
        "<<a",
        "[",
        "[a",
        '"',
        ".",
        "a. ",
        "***",
        "`",
        "1",
        "p.",
        "- ",
        "a",
        "a ",
        "A. ",
        '."',
    ),
    *("'", "a'", "a-", "(", "- *", "\t", ",", "Question 1", "<i>", "Dr. ", "e"),
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_the_checks_are_linear_in_whatever_a_model_writes(piece: str, alone: Callable[[], float]) -> None:
    """They run without a time limit: a quadratic one would take many seconds."""
    for instruction, arguments, _, _ in IFEVAL + IFBENCH:
        text = piece * (15_000 // len(piece))
        start = alone()
        follows(instruction, text, arguments)
        follows(instruction, f"a{text}a", arguments)
        assert alone() - start < 1.0, instruction


def test_the_language_is_langdetects_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[ifbench\]'"):
        follows("language:response_language", "hello", {"language": "en"})
    said = ModuleType("langdetect")
    said.__dict__.update(detect=lambda text: "de", DetectorFactory=type("F", (), {}), LangDetectException=KeyError)
    monkeypatch.setitem(sys.modules, "langdetect", said)
    assert follows("language:response_language", "guten Tag", {"language": "de"})
    assert not follows("language:response_language", "guten Tag", {"language": "en"})


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
