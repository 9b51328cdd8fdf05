"""The rules that are string work: what each one says of a response."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import RewardArgs
from slimelite.arguments.flags import all_flags
from slimelite.base.registry import function
from slimelite.rewards import math, text
from slimelite.rewards.grader import Grader, overlong_penalty
from slimelite.rewards.rules import RULES, Answer, Rule
from slimelite.rewards.text import is_think_answer
from slimelite.samples.sample import Sample


def quick(rule: Rule, answer: Answer) -> Any:
    assert rule.quick is not None
    return function(rule.quick)(answer)


def reward(name: str, response: str, label: Any, **metadata: Any) -> Any:
    return quick(RULES[name], Answer(response, str(label), metadata))


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


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("2 * 9 = 18. So the answer is 18.<|im_end|>", "18", 1.0),
        ("She has $1,018.00 left, of 2,000.", "2000", 1.0),
        ("so \\boxed{18} eggs, in 2 days", "eggs\n#### 18", 1.0),
        ("it falls from 10 to -3", "-3", 1.0),
        ("10-3", "3", 1.0),
        ("**18**", "18", 1.0),
        ("18, or 21", "18", 0.0),
        ("a third, 6/18", "18", 0.0),
        ("x18", "18", 0.0),
        ("in \\boxed{}: 18", "18", 1.0),
        ("18 in \\boxed{17}", "18", 0.0),
        ("eighteen", "18", 0.0),
    ],
)
def test_last_number(response: str, label: str, expected: float) -> None:
    assert reward("last_number", response, label) == expected


def test_gsm8k_refuses_a_label_without_a_number() -> None:
    with pytest.raises(ValueError, match="last_number needs a number as label"):
        reward("last_number", "1", "unknown")
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
    assert {given: math.normalize_final_answer(given) for given in spelled} == spelled
    nested = ("\\text{\\textbf{3}}", "\\textbf{\\text{3}}", "\\overline{\\text{3}}", "\\text{\\overline{\\textbf{3}}}")
    assert [math.normalize_final_answer(given) for given in nested] == ["3"] * len(nested)


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    assert text.f1_score("the brown fox", "a quick brown fox") == pytest.approx((0.8, 1.0, 2 / 3))
    assert reward("f1", "Paris, France!", "paris france") == 1.0
    assert reward("f1", "apple apple", "apple") == pytest.approx(2 / 3)
    assert reward("f1", "yes it is", "yes") == 0.0
    assert reward("f1", "yes.", "Yes") == 1.0
    assert reward("f1", "", "word") == 0.0


@pytest.mark.parametrize(
    ("given", "letter"),
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
def test_gpqa_reads_the_letter_a_response_settles_on(given: str, letter: str | None) -> None:
    assert text.extract_letter(given, text.LETTERS) == letter


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
    assert text.multiple_choice(Answer("\\boxed{12}", "B")) == 0.0


def test_random_is_a_fair_coin_that_falls_the_same_way_again() -> None:
    tosses = [text.coin(Answer("same response", "", key=f"0/{i}")) for i in range(2000)]
    assert tosses == [text.coin(Answer("same response", "", key=f"0/{i}")) for i in range(2000)]
    assert set(tosses) == {0.0, 1.0}
    assert 900 < sum(t for t in tosses if isinstance(t, float)) < 1100


def test_help_and_docs_name_every_rule() -> None:
    help_text = all_flags(RewardArgs)["rm_type"].help
    docs = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text("utf-8")
    for name in RULES:
        assert re.search(rf"\b{name}\b", help_text), name
        assert re.search(rf"^\|[^|]*`{name}`", docs, re.MULTILINE), name


def test_names() -> None:
    assert RULES["boxed_f1"] == replace(RULES["f1"], name="boxed_f1", boxed=True)
    assert [name for name in RULES if name.startswith("boxed_")] == [name for name in RULES if RULES[name].boxed]
    with pytest.raises(ValueError, match=r"--rm-type maths: there is no such reward rule; did you mean math\?"):
        RULES["maths"]
    with pytest.raises(ValueError, match=r"--rm-type xyz: there is no such reward rule; the known names are math.*rm"):
        RULES["xyz"]
    with pytest.raises(ValueError, match="opencua_click is not supported"):
        RULES["opencua_click"]
    with pytest.raises(ValueError, match="boxed_reward_model would score every"):
        RULES["boxed_reward_model"]
    with pytest.raises(ValueError, match="boxed_math would score every response as wrong"):
        RULES["boxed_math"]


OWN = """
from slimelite.rewards.rules import RULES, Answer, Rule

def quick(answer: Answer) -> float | None:
    return None if answer.label in answer.response else 0.0

def slow(answer: Answer) -> float:
    return len(answer.label) / 2

RULES.add(Rule("contains", quick, slow, boxable=True))
RULES.add(Rule("only_slow", slow=slow))
RULES.add(Rule("undecided", quick))
"""
GRADE = """
import asyncio, sys
from slimelite.arguments import RewardArgs
from slimelite.slime.plugins import run_file
from slimelite.rewards.grader import Grader
from slimelite.samples.sample import Sample

run_file(sys.argv[1], "--import-file")
for name in ("contains", "boxed_contains", "only_slow", "undecided"):
    grader = Grader(RewardArgs(rm_type=name, reward_error="zero" if name == "undecided" else "fail"), workers=1)
    samples = [Sample(index=i, response=r, label="7") for i, r in enumerate(["7: \\\\boxed{8}", "\\\\boxed{17}", ""])]
    asyncio.run(grader.grade(samples))
    grader.close()
    print([sample.reward for sample in samples])
    print(*{report.failure.message for report in grader.error_reports}, sep="")
"""


def test_a_rule_of_a_users_file_is_a_rule_like_any_other_in_worker_processes_too(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    command = [sys.executable, "-c", GRADE, str(tmp_path / "own.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        *("[0.5, 0.5, 0.0]", "", "[0.0, 0.5, 0.0]", "", "[0.5, 0.5, 0.5]", ""),
        *(
            "[0.0, 0.0, 0.0]",
            "the rule undecided cannot decide, because its quick() returned None and it has no slow()",
        ),
    ], done.stderr
    with pytest.raises(
        ValueError, match="the rule 'nothing' cannot score; give it at least one of quick=, slow= and scorer="
    ):
        Rule("nothing")


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rules_example_deserves_one(name: str) -> None:
    rule = RULES[name]
    if rule.example is None or rule.boxed:
        assert rule.boxed or rule.scorer or name in ("random", "zero", "format", "code", "ifbench", "ifbench_loose")
        return
    for label in {"gpqa": ["B", "3"], "multiple_choice": ["C", "0"], "gsm8k": ["72", "so\n#### 1,072"]}.get(
        name, ["42"]
    ):
        answer = Answer("", label)
        given = quick(rule, Answer(function(rule.example)(answer), label))
        assert (given["score"] if isinstance(given, dict) else given) == 1.0


LONG = 50_000
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


@pytest.mark.parametrize("name", sorted(name for name, rule in RULES.items() if rule.quick))
def test_the_quick_step_is_linear_in_whatever_a_model_writes(name: str, alone: Callable[[], float]) -> None:
    """It runs without a time limit: a quadratic pattern would take a minute on these."""
    row = {"test_list": ["assert x"], "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    for hostile in HOSTILE:
        for response in (hostile, "</think>" + hostile):
            start = alone()
            quick(RULES[name], Answer(response, "7", row))
            assert alone() - start < 2.0, response[:20]


def test_gsm8k_numbers_are_bounded() -> None:
    assert math.gsm8k_number("9" * 5000) is None


GOOD = "<think>two and two</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (GOOD, True),
        (f"  {GOOD}\n", True),
        ("<think>a</think><answer>b</answer>", True),
        (f"Sure! {GOOD}", False),
        (f"{GOOD} I hope this helps", False),
        ("<think>a</think> so <answer>b</answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think></think><answer>b</answer>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think>a<think>b</think><answer>c</answer>", False),
        ("<think>a</think><answer>c", False),
        ("", False),
    ],
)
def test_think_and_answer(response: str, expected: bool) -> None:
    assert is_think_answer(response) is expected


def graded(args: RewardArgs, *responses: str) -> tuple[list[Any], dict[str, float]]:
    grader = Grader(args, workers=1)
    samples = [Sample(index=i, group_index=0, response=r) for i, r in enumerate(responses)]
    asyncio.run(grader.grade(samples))
    metrics = grader.metrics()
    grader.close()
    return [s.reward for s in samples], metrics


def test_the_format_rule_reads_the_default_or_a_regex_of_the_whole_response() -> None:
    assert graded(RewardArgs(rm_type="format"), GOOD, "4")[0] == [1.0, 0.0]
    regex = RewardArgs(rm_type="format", format_regex=r"Reason:.+Answer: \d+")
    assert graded(regex, "Reason: two\nAnswer: 4\n", GOOD, "Reason: x Answer: 4 apples")[0] == [1.0, 0.0, 0.0]


def test_the_overlong_penalty_is_dapos_line() -> None:
    """Eq. 13 of the paper and verl's reward manager: 0, then (L_max − L_cache − |y|) / L_cache, then −1."""
    limit, buffer = 20480, 4096
    for length in (0, 100, 16384, 16385, 18432, 20479, 20480):
        paper = 0.0 if length <= limit - buffer else (limit - buffer - length) / buffer
        verl = min(-(length - (limit - buffer)) / buffer * 1.0, 0)
        assert overlong_penalty(length, limit, buffer, 1.0) == pytest.approx(paper) == pytest.approx(verl)
        assert overlong_penalty(length, limit, buffer, 0.5) == pytest.approx(0.5 * verl)
    assert overlong_penalty(18432, limit, buffer, 1.0) == -0.5
    assert overlong_penalty(30000, limit, buffer, 1.0) == -1.0


def shaping(args: RewardArgs, samples: list[Sample], max_length: int = 100) -> tuple[list[float], dict[str, float]]:
    grader = Grader(args, workers=1)
    result = asyncio.run(grader.shaping(samples, max_length))
    grader.close()
    return result


def test_what_training_adds_to_rewards() -> None:
    lengths = {60: GOOD, 90: GOOD, 100: "4"}
    samples = [
        Sample(index=i, group_index=0, response=r, response_length=n, tokens=[0] * n, reward=1.0)
        for i, (n, r) in enumerate(lengths.items())
    ]
    assert shaping(RewardArgs(), samples) == ([0.0, 0.0, 0.0], {})
    added, metrics = shaping(RewardArgs(overlong_buffer_len=20, overlong_penalty_factor=2.0), samples)
    assert added == pytest.approx([0.0, -1.0, -2.0])
    assert metrics == {"rollout/overlong_penalty": pytest.approx(-1.0)}
    added, metrics = shaping(RewardArgs(format_reward_coef=0.25), samples)
    assert added == [0.25, 0.25, 0.0]
    assert metrics == {"rollout/format_reward": pytest.approx(2 / 3)}
    added, metrics = shaping(RewardArgs(format_reward_coef=0.25, overlong_buffer_len=20), samples)
    assert added == pytest.approx([0.25, -0.25, -1.0])
    assert set(metrics) == {"rollout/format_reward", "rollout/overlong_penalty"}
    assert [s.reward for s in samples] == [1.0] * 3
