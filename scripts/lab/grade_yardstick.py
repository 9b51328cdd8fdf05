#!/usr/bin/env python
"""Grade other projects' own test cases with our rules, and print how often the verdicts agree.

    python scripts/lab/grade_yardstick.py grading_cases.jsonl

A line of the file is one case: ``grader`` (whose function), ``kind``, ``response``, ``label``, ``expected``, and
perhaps ``params``, ``metadata`` and ``source``. docs/rewards.md shows the table that this prints. math-verify's own
cases are not in the total, because they go to the installed math-verify and not to our rules. It needs ``pip install -e
'.[ifbench]'``.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimelite.base.registry import function
from slimelite.base.version import answer_version
from slimelite.rewards import math, text
from slimelite.rewards.rules import RULES, Answer

Case = dict[str, Any]


def grade(name: str, case: Case) -> Any:
    """The verdict of a run: the quick one, or else the slow one."""
    label = "" if case["label"] is None else str(case["label"])
    answer = Answer(case["response"] or "", label, case.get("metadata") or {})
    rule = RULES[name]
    assert rule.quick is not None
    reward = function(rule.quick)(answer)
    if reward is None:
        assert rule.slow is not None, f"{name} has no second step"
        return function(rule.slow)(answer)
    return reward


def math_equal(case: Case) -> bool:
    """The math rule on two bare answers."""
    return math.compare(case["response"], case["label"]) or (
        math.compare(case["response"], case["label"]) is None and math.equal_by_algebra(case["response"], case["label"])
    )


def math_verify_direct(case: Case) -> bool:
    """math-verify with the settings of a case. Our rule uses only its LaTeX half."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    params = case.get("params", {})
    kinds = {"latex": LatexExtractionConfig(), "expr": ExprExtractionConfig()}
    targets = [kinds[name] for name in params.get("match_types", ["latex", "expr"])]
    given, truth = parse(case["response"], targets), parse(case["label"], targets)
    options = {"float_rounding": params["precision"]} if "precision" in params else {}
    options |= {name: params[name] for name in ("strict", "allow_set_relation_comp") if name in params}
    return bool(verify(truth, given, **options))


def with_marker(case: Case) -> Case:
    """The case with the data set's marker: OpenAI's recorded GSM8K outputs end in 'A: 4' instead of '#### 4'."""
    head, marker, tail = case["response"].rpartition("A: ")
    return {**case, "response": f"{head}#### {tail}" if marker else case["response"]}


def strict_box(case: Case) -> bool:
    """Whether the case asks dapo for the strict form."""
    return bool(case.get("params", {}).get("strict_box_verify"))


def dapo_verify(case: Case) -> tuple[bool, str | None]:
    """dapo's (correct, prediction)."""
    return (math.verify_strict_box if strict_box(case) else math.verify_minerva)(case["response"], case["label"])


IFBENCH = "slime.ifbench (allenai/IFBench strict)"
# IFBench's tests name some checkers by ids that its registry does not have, or has for another
REGISTERED = {
    "CharacterReverseOrderChecker": "custom:character_reverse",
    "ConjunctionCountChecker": "count:conjunctions",
    "PersonNameCountChecker": "count:person_names",
    "PrintMultiplesChecker": "custom:multiples",
    "RepeatChangeChecker": "repeat:repeat_change",
}


def followed(case: Case) -> bool:
    """Strict IFBench, under the id that the case's checker is registered with."""
    name = REGISTERED.get(case["source"]["function"])
    metadata = case["metadata"] | ({"instruction_id_list": [name]} if name else {})
    return bool(grade("ifbench", {**case, "metadata": metadata}))


LIBRARY = "math_verify"

GRADERS: dict[str, Callable[[Case], Any]] = {
    "slime.math.last_boxed_only_string": lambda c: math.last_boxed_only_string(c["response"]),
    "slime.math.remove_boxed": lambda c: math.remove_boxed(c["response"]),
    "slime.math.extract_boxed_answer": lambda c: math.extract_boxed_answer(c["response"]),
    "slime.math.extract_answer": lambda c: math.extract_boxed_answer(c["response"]),
    "slime.math._strip_string": lambda c: math.strip_string(c["response"]),
    "slime.math.mathd_normalize_answer": lambda c: c["response"] and math.normalize_answer(c["response"]),
    "slime.math.grade_answer_mathd": math_equal,
    "slime.math.grade_answer_sympy": math_equal,
    "slime.math.grade_answer_verl": lambda c: grade("math", c),
    "slime.deepscaler.get_deepscaler_rule_based_reward": lambda c: grade("deepscaler", c),
    "slime.dapo.last_boxed_only_string": lambda c: math.last_boxed_only_string(c["response"]),
    "slime.dapo.remove_boxed": lambda c: math.remove_boxed(c["response"]),
    "slime.dapo.normalize_final_answer": lambda c: math.normalize_final_answer(c["response"]),
    "slime.dapo.is_correct_minerva": lambda c: math.verify_minerva(c["response"], c["label"]),
    "slime.dapo.is_correct_strict_box": lambda c: math.verify_strict_box(c["response"], c["label"]),
    "slime.dapo.verify": dapo_verify,
    "slime.dapo.compute_score": lambda c: math.compute_score(
        c["response"], c["label"], strict_box_verify=strict_box(c)
    ),
    "slime.f1.normalize_answer": lambda c: text.normalize_answer(c["response"]),
    "slime.f1.f1_score": lambda c: text.f1_score(c["response"], c["label"]),
    "slime.gpqa._extract_letter_from_response": lambda c: text.extract_letter(c["response"], c["params"]["args"][0]),
    "slime.gpqa.compute_gpqa_reward": lambda c: grade("gpqa", c),
    IFBENCH: followed,
    "gsm8k.is_correct": lambda c: grade("gsm8k", with_marker(c)),
    "hendrycks.is_equiv": lambda c: math.strip_string(c["response"]) == math.strip_string(c["label"]),
    "open_instruct.strip_string": lambda c: math.strip_string(c["response"].strip()),
    LIBRARY: math_verify_direct,
}


def bare(text: str) -> str | None:
    """The answer in ``text``, if the text is exactly one answer."""
    text = math.extract_boxed_answer(text) or text.strip().removeprefix("$").removesuffix("$").strip()
    return text if text and "$" not in text and len(text.split()) < 12 else None


NOT_OURS = {
    "open_instruct.PuzzleMatcherVerifier": "no such rule in slime or here",
    "open_instruct.GSM8KVerifier": "takes the last number anywhere; ours wants ####",
}


def same(ours: Any, theirs: Any) -> bool:
    """Whether two verdicts agree. Lists are compared by element. slime's strict box returns -1 for wrong, and an
    exception there corresponds to None here."""
    if isinstance(theirs, dict) and "raises" in theirs:
        return ours is None
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, bool) and theirs == -1:
        return not ours
    if isinstance(theirs, float):
        return abs(float(ours) - theirs) < 1e-12
    return bool(ours == theirs)


def main(path: str) -> int:
    """Print the table and every case that differs. Returns 1 if more than 2 % of the graded cases differ, else 0."""
    logging.disable(logging.CRITICAL)
    total, agreed, skipped = Counter[str](), Counter[str](), Counter[str]()
    differing: list[tuple[Case, Any]] = []
    for line in Path(path).read_text("utf-8").splitlines():
        case = json.loads(line)
        name = case["grader"]
        reason = NOT_OURS.get(name)
        if reason is not None:
            skipped[f"{name} | %d | not graded: {reason}"] += 1
            continue
        total[name] += 1
        verdict = GRADERS[name](case)
        if same(verdict, case["expected"]):
            agreed[name] += 1
        else:
            differing.append((case, verdict))
    library, library_agreed = total.pop(LIBRARY, 0), agreed.pop(LIBRARY, 0)
    print("| grader | cases | same verdict |\n|---|---|---|")
    for name in sorted(total):
        print(f"| {name} | {total[name]} | {agreed[name]} |")
    print(f"| all | {total.total()} | {agreed.total()} ({agreed.total() / total.total():.1%}) |")
    print(f"| apart: {LIBRARY}, by the installed library | {library} | {library_agreed} |")
    for row, count in sorted(skipped.items()):
        print(f"| {row % count} |")
    for case, verdict in differing:
        print(f"\n{case['id']} {case['grader']}: ours {verdict!r}, theirs {case['expected']!r}; {case.get('note', '')}")
        print(f"  response {case['response'][-160:]!r}\n  label    {str(case['label'])[-80:]!r} {case.get('metadata')}")
    compare_rule([json.loads(line) for line in Path(path).read_text("utf-8").splitlines()])
    return int(len(differing) > 0.02 * total.total())


def compare_rule(cases: list[Case]) -> None:
    """Print the verdicts of our whole math rule, which is stricter, on those cases of math-verify that are bare
    answers."""
    print("\n| bare answers of math_verify: response | label | theirs | `math` |\n|---|---|---|---|")
    agreed = count = 0
    for case in (c for c in cases if c["grader"] == LIBRARY):
        given, truth = bare(case["response"]), bare(case["label"])
        if given is None or truth is None:
            continue
        count += 1
        verdict = math_equal({"response": given, "label": truth})
        agreed += verdict == case["expected"]
        if verdict != case["expected"]:
            print(f"| {case['id']}: `{' '.join(given.split())}` | `{truth}` | {case['expected']} | {verdict} |")
    print(f"\nour math rule: same verdict in {agreed} of {count}")


if __name__ == "__main__":
    answer_version()
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
