"""The rules that are string work: what each one says of a response."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import RewardArgs
from slimelite.arguments.flags import all_flags
from slimelite.rewards import dapo, f1, gpqa, gsm8k, multiple_choice
from slimelite.rewards.registry import REMOTE, REWARD_MODEL, RULES, find_rule
from slimelite.rewards.rule import Answer


def reward(name: str, response: str, label: Any, **metadata: Any) -> Any:
    return RULES[name].quick(Answer(response, str(label), metadata))


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("so 9 * 8 = 72\n#### 72", "72", 1.0),
        ("#### 72", "He has 48 + 24 = <<48+24=72>>72\n#### 72", 1.0),
        ("#### 71\nno: #### 72", "72", 1.0),
        ("#### 1,000", "1000", 1.0),
        ("#### $1000.00.", "1,000", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### $-3", "-3", 1.0),
        ("#### .5", "0.5", 1.0),
        ("#### 72 apples", "72", 1.0),
        ("#### 3", "-3", 0.0),
        ("#### 5/8", "5", 0.0),
        ("#### 72.5/3", "72", 0.0),
        ("#### 725", "72", 0.0),
        ("the answer is 72", "72", 0.0),
        ("#### none", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_gsm8k(response: str, label: str, expected: float) -> None:
    assert reward("gsm8k", response, label) == expected


def test_gsm8k_refuses_a_label_without_a_number() -> None:
    with pytest.raises(ValueError, match="gsm8k needs a number as label"):
        reward("gsm8k", "#### 1", "unknown")


@pytest.mark.parametrize(
    ("response", "label", "score", "pred"),
    [
        ("Long solution. Answer: 42", "42", 1.0, "42"),
        ("Answer: 41 was a guess.\nanswer : $\\boxed{42}$", "42", 1.0, "42"),
        ("Answer: x = 1,234 dollars", "1234", 1.0, "1234"),
        ("Answer: 42", "42.0", 1.0, "42"),
        ("Answer: 42", "12345678901234567891", -1.0, "42"),
        ("Answer: 12345678901234567891", "12345678901234567891", 1.0, "12345678901234567891"),
        ("just a number 42", "42", -1.0, "[INVALID]"),
        ("Answer: 42" + " filler" * 60, "42", -1.0, "[INVALID]"),
    ],
)
def test_dapo(response: str, label: str, score: float, pred: str) -> None:
    assert reward("dapo", response, label) == {"score": score, "acc": score > 0, "pred": pred}


def test_dapo_strict_box_wants_the_label_verbatim_at_the_end() -> None:
    assert reward("dapo", "\\boxed{42}", 42, strict_box_verify=True)["score"] == 1.0
    assert reward("dapo", "\\boxed{42.0}", 42, strict_box_verify=True) == {"score": -1.0, "acc": False, "pred": "42.0"}
    assert reward("dapo", "\\boxed{42}" + " filler" * 20, 42, strict_box_verify=True)["pred"] is None


def test_dapo_refuses_labels_that_are_no_integers() -> None:
    with pytest.raises(ValueError, match="dapo needs integer labels"):
        reward("dapo", "Answer: 1", "\\frac{1}{2}")


def test_dapo_normalisation() -> None:
    spelled = {"\\frac12": "\\frac{1}{2}", "\\sqrt3": "\\sqrt{3}", "an answer": "answer", "42<|im_end|>": "42"}
    assert {text: dapo.normalize_final_answer(text) for text in spelled} == spelled
    nested = ("\\text{\\textbf{3}}", "\\textbf{\\text{3}}", "\\overline{\\text{3}}", "\\text{\\overline{\\textbf{3}}}")
    assert [dapo.normalize_final_answer(text) for text in nested] == ["3"] * len(nested)


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    assert f1.f1_score("the brown fox", "a quick brown fox") == pytest.approx((0.8, 1.0, 2 / 3))
    assert reward("f1", "Paris, France!", "paris france") == 1.0
    assert reward("f1", "apple apple", "apple") == pytest.approx(2 / 3)
    assert reward("f1", "yes it is", "yes") == 0.0
    assert reward("f1", "yes.", "Yes") == 1.0
    assert reward("f1", "", "word") == 0.0


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is B.", "B"),
        ("Final answer: (C)", "C"),
        ("**Answer: **D**", "D"),
        ("answer: b", "B"),
        ("E is the correct option", "E"),
        ("we ruled out A, then B, settled on C", "C"),
        ("Answer: A is wrong.</think>The answer is B.", "B"),
        # an option in brackets may be one that is turned down
        ("Option (A) is incorrect because it melts. I choose (B).", "B"),
        ("Looking at choice [A], it fails. So **C**.", "C"),
        ("The answer (A) would need x; so B.", "B"),
        ("Final answer **C**, not (A) and not (B).", "C"),
        ("Option (B) is correct. A and C are not.", "B"),
        # a small letter that stands alone
        ("option b is correct", "B"),
        ("The correct answer is b because it is", "B"),
        ("b is correct", "B"),
        ("answer: b because", "B"),
        ("answer: e.g. (C)", "C"),
        ("Answer: I'd say (B)", "B"),
        # slime takes the first letter of any word here
        ("the answer depends", None),
        ("The answer is a gas, so option B", "B"),
        ("no idea, sorry", None),
    ],
)
def test_gpqa_reads_the_letter_a_response_settles_on(text: str, letter: str | None) -> None:
    assert gpqa.extract_letter(text, gpqa.LETTERS) == letter


def test_gpqa_knows_the_right_option_by_letter_text_or_number() -> None:
    choices = ["London", "Paris", "Berlin"]
    assert reward("gpqa", "Answer: B", "b", choices=choices) == 1.0
    assert reward("gpqa", "Answer: B", "Paris", choices=choices) == 1.0
    assert reward("gpqa", "Answer: B", 1, choices=choices) == 1.0
    assert reward("gpqa", "Answer: B", "", correct_letter="b") == 1.0
    assert reward("gpqa", "Answer: B", 1, choices={"a": "x", "b": "y"}) == 1.0
    assert reward("gpqa", "Definitely paris.", "Paris", choices=choices) == 1.0
    assert reward("gpqa", "Answer: A", "Paris", choices=choices) == 0.0
    assert reward("gpqa", "there are 2 of them", 2, choices=choices) == 0.0
    # digits are an option's number, even where they are an option's text too
    assert reward("gpqa", "Answer: C", 2, choices=["1", "2", "3", "4"]) == 1.0
    assert reward("gpqa", "Answer: B", 2, choices=["1", "2", "3", "4"]) == 0.0
    assert reward("gpqa", "Answer: B", 12, choices=["11", "12"]) == 1.0


def test_multiple_choice_reads_the_box_first() -> None:
    for box in ("B", "(B)", "\\text{B}", "\\textbf{(B)}", "b"):
        assert reward("multiple_choice", f"A is correct? no: \\boxed{{{box}}}", "B") == 1.0
    assert reward("multiple_choice", "The answer is B", "B") == 1.0
    assert reward("multiple_choice", "Answer: B, or \\boxed{C}", "B") == 0.0
    assert multiple_choice.quick(Answer("\\boxed{12}", "B")) == 0.0


def test_random_is_a_fair_coin_that_falls_the_same_way_again() -> None:
    tosses = [RULES["random"].quick(Answer("same response", "", key=f"0/{i}")) for i in range(2000)]
    assert tosses == [RULES["random"].quick(Answer("same response", "", key=f"0/{i}")) for i in range(2000)]
    assert set(tosses) == {0.0, 1.0}
    assert 900 < sum(t for t in tosses if isinstance(t, float)) < 1100


def test_help_and_docs_name_every_rule() -> None:
    help_text = all_flags(RewardArgs)["rm_type"].help
    docs = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text("utf-8")
    for name in (*RULES, REMOTE, REWARD_MODEL):
        assert re.search(rf"\b{name}\b", help_text), name
        assert f"| `{name}` |" in docs, name


def test_names() -> None:
    assert find_rule("remote_rm") is None
    assert find_rule("boxed_f1") is RULES["f1"]
    with pytest.raises(ValueError, match=r"no --rm-type 'maths'; there are math, gsm8k.*remote_rm"):
        find_rule("maths")
    assert find_rule("reward_model") is None
    with pytest.raises(ValueError, match="opencua_click is not offered"):
        find_rule("opencua_click")
    with pytest.raises(ValueError, match="no --rm-type 'boxed_reward_model'"):
        find_rule("boxed_reward_model")
    with pytest.raises(ValueError, match="boxed_math would be wrong for every response"):
        find_rule("boxed_math")


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rules_example_deserves_one(name: str) -> None:
    rule = RULES[name]
    if rule.example is None:
        assert name in ("random", "zero", "format", "code", "ifbench", "ifbench_loose")
        return
    for label in {"gpqa": ["B", "3"], "multiple_choice": ["C", "0"], "gsm8k": ["72", "so\n#### 1,072"]}.get(
        name, ["42"]
    ):
        answer = Answer("", label)
        given = rule.quick(Answer(rule.example(answer), label))
        assert (given["score"] if isinstance(given, dict) else given) == 1.0


LONG = 200_000
HOSTILE = [
    "\\boxed{" * (LONG // 7),
    "\\boxed{" + "{" * LONG,
    "\\boxed{" + " " * LONG + "1}",
    "\\boxed{" + "1," * (LONG // 2) + "}",
    "\\boxed{\\text{" + "\\text{" * (LONG // 6) + "}}",
    "\\boxed{" + "\\frac" * (LONG // 5) + "}",
    "####" + " " * LONG,
    "#" * LONG,
    "#### " + "1," * (LONG // 2),
    "A is" + " " * LONG,
    "answer" + " " * LONG + "\n",
    "Answer: " + "$" * LONG,
    "the " * (LONG // 4),
    "</think>" * (LONG // 8),
    "###Response" * (LONG // 11),
    "```\n" * (LONG // 4),
    "<think>" * (LONG // 7) + "</think><answer>",
]


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_quick_step_is_linear_in_whatever_a_model_writes(name: str) -> None:
    """It runs without a time limit: a quadratic pattern would take minutes on these."""
    row = {"test_list": ["assert x"], "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    for text in HOSTILE:
        for response in (text, "</think>" + text):
            start = time.perf_counter()
            RULES[name].quick(Answer(response, "7", row))
            assert time.perf_counter() - start < 2.0, response[:20]


def test_gsm8k_numbers_are_bounded() -> None:
    assert gsm8k.number("9" * 5000) is None
