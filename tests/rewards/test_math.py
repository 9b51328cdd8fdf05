"""math and deepscaler: text, numbers and algebra; nothing is evaluated, and no answer takes more than two seconds."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimelite.arguments import RewardArgs
from slimelite.base.registry import function
from slimelite.rewards import math
from slimelite.rewards.grader import Grader
from slimelite.rewards.rules import RULES, Answer, Failure, Settings
from slimelite.rewards.workers import WorkerPool
from slimelite.samples.sample import Sample
from tests.support.waiting import worked, works


def verdict(response: str, label: str, rule: str = "math") -> float:
    """What a run would give."""
    answer = Answer(response, label)
    quick, slow = RULES[rule].quick, RULES[rule].slow
    assert quick is not None
    assert slow is not None
    reward = function(quick)(answer)
    reward = function(slow)(answer) if reward is None else reward
    assert isinstance(reward, float)
    return reward


def boxed(text: str) -> str:
    return f"so it is \\boxed{{{text}}}."


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("first \\boxed{wrong}, final \\boxed{42}", "\\boxed{42}"),
        ("\\boxed{\\frac{1}{2}} and more }", "\\boxed{\\frac{1}{2}}"),
        ("\\fbox{7}", "\\fbox{7}"),
        ("no box", None),
        ("\\boxed{never closes", None),
    ],
)
def test_the_last_box(text: str, box: str | None) -> None:
    assert math.last_boxed_only_string(text) == box


def test_remove_boxed_wants_exactly_one_box() -> None:
    assert math.remove_boxed("\\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert math.remove_boxed("\\fbox{7}") is None
    assert math.remove_boxed("x") is None
    assert math.remove_boxed(None) is None


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("\\frac12", "\\frac{1}{2}"),
        ("\\dfrac1{72}", "\\frac{1}{72}"),
        ("\\left(1, 2\\right)", "(1,2)"),
        ("45^{\\circ}", "45"),
        (".7", "0.7"),
        ("0.5", "\\frac{1}{2}"),
        ("3/4", "\\frac{3}{4}"),
        ("x = 5", "5"),
        ("\\sqrt 3", "\\sqrt{3}"),
        ("10\\text{ units}", "10"),
        ("\\text{Evelyn}", "Evelyn"),
        ("50\\%", "50"),
        ("", ""),
        ("\\frac", "\\frac"),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert math.normalize_answer(text) == normal


# response's answer, label, reward, is it decided without algebra?
CASES = [
    ("42", "42", 1, True),
    ("43", "42", 0, True),
    ("1,000", "1000", 1, True),
    ("14{,}916", "14916", 1, True),
    ("11,\\! 111,\\!100", "11,111,100", 1, True),
    ("28 percent", "28\\%", 1, True),
    ("\\$5", "5", 1, True),
    ("5 cm", "5", 1, True),
    ("5\\text{cm}", "5", 1, True),
    ("1.50", "1.5", 1, True),
    ("0.25", "\\frac{1}{4}", 1, True),
    ("-\\frac{1}{2}", "\\frac{-1}{2}", 1, True),
    ("0.333", "\\frac13", 0, True),
    ("\\frac{2}{4}", "\\frac{1}{2}", 0, True),  # not reduced
    ("\\frac{4}{2}", "2", 0, True),  # an integer is written as one
    ("2x", "2", 0, True),
    ("East", "east", 1, True),
    ("listen", "silent", 0, True),
    ("Eve", "Evelyn", 0, True),
    ("(1, 2)", "(1,2)", 1, True),
    ("(1.0, 2)", "(1,2)", 1, True),
    ("(2, 1)", "(1,2)", 0, True),
    ("[1,2]", "(1,2)", 0, True),
    ("(1,2,3)", "(1,2)", 0, True),
    ("1 \\text{ or } 2", "1, 2", 1, True),
    ("1/0", "0", 0, True),
    ("x" * 600, "x+1", 0, True),
    ("", "42", 0, True),
    ("1+x", "x+1", 1, False),
    ("(x+1)^2", "x^2+2x+1", 1, False),
    ("(x+1)^2", "x^2+2x+2", 0, False),
    ("2\\sqrt{2}", "\\sqrt{8}", 1, False),
    ("\\frac{\\sqrt3}{3}", "\\frac{1}{\\sqrt{3}}", 1, False),
    ("x^2y^2", "y^{2}x^{2}", 1, False),
    ("7 3/4", "7\\frac{3}{4}", 1, True),
    ("7 3/4", "\\frac{31}{4}", 1, False),
    ("\\{2,1\\}", "\\{1,2\\}", 1, False),
    ("(\\sqrt{4}+x, 1)", "(x+2, 1)", 1, False),
    ("(\\sqrt{4}+x, 2)", "(x+2, 1)", 0, True),
    ("x \\in [-2,7]", "[-2, 7]", 1, False),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}", 1, False),
    ("\\frac{1", "\\frac{1}{x}", 0, True),
    ("+5", "5", 1, True),
    ("1e3", "1000", 1, True),
    ("1.5E-3", "0.0015", 1, True),
    ("5\\ \\mathrm{cm}", "5", 1, True),
    ("5~\\text{cm}", "5", 1, True),
    ("2.5 km", "2.5", 1, True),
    ("\\le 3", "\\leq 3", 1, True),
    ("x <= 3", "x \\leq 3", 1, True),
    ("\\le 3", "\\leq 4", 0, False),
    ("pi/2", "\\frac{\\pi}{2}", 1, False),
    ("\\frac{\\pi}{2}", "pi/2", 1, False),
    ("1+2 sqrt(3)", "1+2\\sqrt{3}", 1, False),
    ("\\sqrt(2)/2", "\\frac{\\sqrt{2}}{2}", 1, False),
    ("\\mathrm{\\frac{1}{x}}", "\\frac{1}{x}", 1, True),
    ("{(1, 2)}", "(1,2)", 1, True),
    ("x+3.", "x+3", 1, True),
    ("x+3\\ ", "x+3", 1, True),
    ("2.5 km.", "2.5", 1, True),
    ("\\{1,2\\}.", "\\{2,1\\}", 1, False),
    ("{1}{2}", "\\frac{1}{2}", 0, False),
    ("1+2sqrt3", "1+2\\sqrt{3}", 1, False),
    ("sin(x)", "\\sin x", 1, False),
    # a number and its base belong together
    ("101_{2}", "101_2", 1, True),
    ("101_{2}", "101_{10}", 0, False),
    ("101_{2}", "101", 0, True),
    ("5_{10}", "101_2", 0, False),
    ("(101)_2", "(101)_3", 0, False),
    ("101_2+1", "101_3+1", 0, False),
    ("1A_{16}", "A_{16}", 0, False),
    ("2x_1", "x_1 \\cdot 2", 1, False),
    # a decimal is the fraction that it says
    ("3.141593", "\\pi", 0, False),
    ("3.14159265358979323846264338327950288", "\\pi", 0, False),
    ("1.41421356", "\\sqrt2", 0, False),
    ("2.718282", "e", 0, False),
    ("0.693147", "\\ln 2", 0, False),
    ("4.123105625617661", "\\sqrt{17}", 0, False),
    ("0.3333333333333333", "\\frac{1}{3}", 0, True),
    ("(3.141593, 1)", "(\\pi, 1)", 0, False),
    ("[0, 3.141593]", "[0, \\pi]", 0, False),
    ("\\{3.141593\\}", "\\{\\pi\\}", 0, False),
    ("x=3.141593", "x=\\pi", 0, False),
    ("3.141593x", "\\pi x", 0, False),
    ("1.5x", "\\frac{3x}{2}", 1, False),
    # a ratio or a time is no quotient
    ("3:5", "3/5", 0, True),
    ("3:5", "\\frac{3}{5}", 0, True),
    ("12:30", "12/30", 0, True),
    ("3:5", "6:10", 0, True),
    ("3:4:5", "3:4", 0, True),
    ("3 : 5", "3:5", 1, True),
    ("V_1:V_2 = 3:5", "3:5", 1, True),
    # a list has the elements that are written down
    ("3,2", "2,3", 1, False),
    ("2,3,3", "2,3", 0, False),
    ("2,2,3", "2,3,3", 0, False),
    ("3,2,3", "2,3,3", 1, False),
    ("\\sqrt2,\\sqrt2", "\\sqrt2", 0, False),
    ("2, \\sqrt{4}, 3", "2, 3", 0, False),
    ("\\{2,3,3\\}", "\\{2,3\\}", 0, False),
    ("\\{1,\\{2,2\\}\\}", "\\{1,\\{2\\}\\}", 0, False),
    ("x \\in \\{2,3,3\\}", "\\{2,3\\}", 0, False),
    ("x \\in \\{2,3\\}", "y \\in \\{2,3\\}", 0, False),
    ("x=2, x=3, x=3", "x=2, x=3", 0, False),
    ("(1,2),(1,2),(3,4)", "(1,2),(3,4)", 0, False),
    ("(3,4),(1,2)", "(1,2),(3,4)", 1, False),
    ("\\pm 2", "2,-2", 1, False),
    ("2,-2,2", "\\pm 2", 0, False),
    ("(1,1,2)", "(1,2)", 0, True),
    ("(1,2)", "2,1", 0, False),
    ("\\{1,2\\}", "(1,2)", 0, False),
    # a letter is not a unit, and a derivative not its function
    ("x+2t", "x+2", 0, False),
    ("\\frac{1}{2}m", "\\frac{1}{2}", 0, False),
    ("f'(x)", "f(x)", 0, False),
    # large, but not too large
    ("x+2^{2023}", "2^{2023}+x", 1, False),
    ("2023^{2022} \\cdot 2023", "2023^{2023}", 1, False),
    ("(1+x)^{50}", "(x+1)^{50}", 1, False),
]


@pytest.mark.parametrize(("given", "label", "reward", "decided"), CASES)
def test_math(given: str, label: str, reward: int, decided: bool) -> None:
    assert (math.quick(Answer(boxed(given), label)) is not None) is decided
    assert verdict(boxed(given), label) == reward
    assert verdict(boxed(given), f"\\boxed{{{label}}}") == reward


def test_math_wants_a_box_and_a_label() -> None:
    assert verdict("just 42", "42") == 0
    assert verdict("\\fbox{42}", "42") == 0
    assert verdict(boxed("42"), "") == 0


def test_math_refuses_a_label_that_no_box_can_equal() -> None:
    with pytest.raises(ValueError, match="use --rm-type gsm8k"):
        verdict(boxed("72"), "48 + 24 = 72\n#### 72")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("\\boxed{99}</think>Final: \\boxed{42}", 1),
        ("\\boxed{wrong}###Response\\boxed{42}", 1),
        ("\\boxed{42}", 0),
        ("\\boxed{42}</think>no box", 0),
        ("</think>\\boxed{43}", 0),
        ("</think>\\boxed{(6 \\cdot 7)^{1}}", 0),
    ],
)
def test_deepscaler_grades_what_follows_the_thinking(response: str, reward: int) -> None:
    assert verdict(response, "42", "deepscaler") == reward


def test_deepscaler_knows_algebra() -> None:
    assert verdict("</think>\\boxed{1+x}", "x+1", "deepscaler") == 1


# strings that sympy's parse_expr, and so slime before its #1587, would run
EXPLOITS = [
    "__import__('os').system('touch {path}')",
    "exec(open('{path}', 'w').write('x'))",
    "().__class__.__base__.__subclasses__()",
    "lambda: open('{path}', 'w')",
    "1 if open('{path}','w') else 2",
]


@pytest.mark.parametrize("exploit", EXPLOITS)
def test_nothing_a_model_writes_is_evaluated(exploit: str, tmp_path: Path) -> None:
    from slimelite.rewards import symbolic

    path = tmp_path / "owned"
    text = exploit.replace("{path}", str(path))
    assert verdict(f"\\boxed{{{text}}}", "x+1") == 0
    assert not symbolic.equivalent(text, "x+1")
    assert not path.exists()


def test_no_rule_calls_an_evaluator() -> None:
    """eval by any of its names; math-verify's plain-expression mode is one of them.

    The program that runs in the sandbox may call them: it is a text in `code`.
    """
    evaluators = {"eval", "exec", "compile", "parse_expr", "sympify", "ExprExtractionConfig"}
    files = sorted(Path(math.__file__).parent.glob("*.py"))
    assert files
    for file in files:
        names = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Name)]
        assert not evaluators & {n.id for n in names}, file.name


LONG = 490
FOR_EVER = Settings(format_regex="(a+)+b")

# answer, and the label where it is not x
BOMBS = [
    # numbers that sympy would compute
    "(10^9)!",
    "1000000000!+x",
    "((5!)!)!x",
    "(10^{9})!!",
    "\\binom{10^8}{5\\cdot10^7}",
    "\\binom{999999999}{4999999}",
    "9^{100\\cdot100\\cdot100\\cdot100}",
    "9^{\\frac{9^{9}}{1}}",
    "\\frac{1}{9^{\\frac{1}{9^{-9}}}}",
    "2^{2^{2^{2^{2^2}}}}",
    "((((((9^{99})^{99})^{99})^{99})^{99})^{99})^{99}",
    "1.0000001^{10000000000}x",
    "2^{1000000000.5}x",
    "1e99999999x",
    "\\Gamma(\\frac{1000000000}{1})",
    "\\sqrt[10^9]{2}x",
    "\\log_{2}{(10^9)!}",
    "\\log(10^{10^{10}})",
    "\\sin(10^{10^{8}})",
    "\\lfloor e^{10^{7}} \\rfloor",
    "\\lfloor \\pi \\cdot 10^{10^{6}} \\rfloor",
    "e^{e^{e^{e^{e}}}}-e^{e^{e^{e^{e}}}}",
    "\\gcd(10^{10^9}, 10^{10^8})",
    "\\sum_{k=1}^{10^{9}} \\frac{1}{k}",
    "\\prod_{k=1}^{10^6} k",
    "\\sum_{k=0}^{999} \\binom{999}{k} x^k",
    ("9^{9^9}, 1", "1, x"),
    ("[0, 9^{9^9}]", "[0, x]"),
    ("\\{9^{9^9}, 1\\}", "\\{1,2\\}"),
    ("x > 9^{9^9}", "x > 3"),
    "\\begin{pmatrix}9^{9^9}&1\\\\1&2\\end{pmatrix}",
    "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}^{10^9}",
    "\\operatorname{eye}(10^9)x",
    # expressions that it would expand, solve or simplify
    "(x+1)^{9999}",
    "(x+y+z+w)^{200}",
    "(x^{999}+1)(x^{998}+1)(x^{997}+1)",
    ("(\\sqrt{2}+\\sqrt{3}+\\sqrt{5}+\\sqrt{7})^{30}", "(\\sqrt{2}+\\sqrt{3}+\\sqrt{5}+\\sqrt{7})^{29}"),
    ("\\sin x+\\cos y^x = \\tan z", "\\sin x+\\cos y^x = \\tan z^2"),
    ("\\cos(\\frac{\\pi}{65537})", "\\sin(\\frac{\\pi}{65539})"),
    "\\int \\sqrt{x^5+\\sqrt{x^3+\\sqrt{x}}} dx",
    "\\lim_{x \\to 0} \\frac{\\sin(\\sin(\\sin(\\sin x)))-x}{x^9}",
    "\\begin{vmatrix}a&b&c&d&1\\\\e&f&g&h&2\\\\i&j&k&l&3\\\\m&n&o&p&4\\\\q&r&s&t&5\\end{vmatrix}",
    ("+".join(f"\\sqrt{{{n}}}" for n in range(2, 45)), "\\pi"),
    ("\\sqrt{" + "7" * 230 + "}\\sqrt{" + "3" * 230 + "}", "\\pi"),
    "+".join(f"\\sin^{{{n}}}(x)" for n in range(2, 35)),
    # texts that are hard to read
    "(" * 200 + "x" + ")" * 200,
    "\\frac{1}{" * 49 + "x" + "}" * 49,
    ("\\sqrt{2+" * 55 + "2" + "}" * 55, "\\pi"),
    ("x^" * 245 + "x", "y"),
    "-" * LONG + "x",
    "5" + "!" * LONG,
    "|x" * 200,
    "[1,2]" + "\\cup [1,x]" * 45,
    ("x+1," * 120 + "1", "x+2," * 120 + "2"),
    "7" * LONG + "x",
    ("0." + "3" * LONG, "\\frac13"),
    "\u0661" * LONG,
    "\\text{ " * 80,
    "(a+b " * 95 + ")_{",
    # longer than any answer
    "x+" * 50_000 + "1",
    "\\frac{1}{" * 10_000 + "x" + "}" * 10_000,
    "9" * 100_000,
    "1" + " " * 100_000 + ",2",
]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1, timeout=60.0)
    asyncio.run(pool.run([("math", Answer("\\boxed{1+x}", "x+1"))]))
    yield pool
    pool.close()


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: str(bomb)[:30])
def test_no_answer_takes_more_than_the_limit(
    pool: WorkerPool, bomb: str | tuple[str, str], endless: tuple[int, float]
) -> None:
    given, label = (bomb, "x") if isinstance(bomb, str) else bomb
    worker = pool._workers[0]._process
    assert worker is not None  # the answer before this one did not end it
    before = processor_seconds(worker.pid)
    answer = Answer(f"\\boxed{{{given}}}", label)
    result = math.quick(answer)
    if result is None:
        [result] = asyncio.run(pool.run([("math", answer)]))
    assert result == 0.0 or (isinstance(result, Failure) and result.kind == "costly"), result
    assert processor_seconds(worker.pid) - before < endless[1]
    assert pool._workers[0]._process is worker  # nothing of this had to be killed


def test_a_costly_answer_is_wrong_and_counted_and_no_reward_error() -> None:
    grader = Grader(RewardArgs(rm_type="math", reward_error="fail"), workers=1)
    texts = ["1+x", "(10^9)!+x", "2+x", "|x" * 200]
    samples = [Sample(index=i, response=f"\\boxed{{{text}}}", label="x+1") for i, text in enumerate(texts)]
    asyncio.run(grader.grade(samples))
    assert [sample.reward for sample in samples] == [1.0, 0.0, 0.0, 0.0]
    assert grader.metrics() == {"rollout/reward_errors": 0.0, "rollout/costly_answers": 2.0}
    assert grader.metrics() == {"rollout/reward_errors": 0.0}
    grader.close()


@pytest.fixture(scope="module")
def endless() -> tuple[int, float]:
    """The exit status and the processor time, start included, of a worker whose answer is a computation in C without
    an end.
    """
    script = (
        "import signal; from slimelite.rewards import workers\n"
        "from slimelite.rewards.rules import RULES, Rule\n"
        "signal.signal(signal.SIGPROF, workers.out_of_time)\n"
        "RULES.add(Rule('endless', slow=lambda answer: sum(range(10**12)), bounded=True))\n"
        "workers.graded('endless', None)"
    )
    before = os.times()
    code = subprocess.run([sys.executable, "-c", script], check=False).returncode
    after = os.times()
    return code, after.children_user + after.children_system - before.children_user - before.children_system


def test_a_computation_in_c_ends_with_its_process(endless: tuple[int, float]) -> None:
    """An exception waits until the C code returns, which is too late; the second limit does not wait."""
    assert endless[0] == -signal.SIGVTALRM


def test_a_worker_that_its_time_limit_ended_leaves_a_wrong_answer() -> None:
    pool = WorkerPool(1, timeout=60.0)
    asyncio.run(pool.run([("math", Answer("\\boxed{1+x}", "x+1"))]))
    process = pool._workers[0]._process
    assert process is not None

    async def end_while_grading() -> list[object]:
        idle = worked(process.pid)
        grading = asyncio.ensure_future(pool.run([("format", Answer("a" * 50, "", settings=FOR_EVER))]))
        await works(process.pid, idle)
        os.kill(process.pid, signal.SIGVTALRM)
        return [*await grading]

    [result] = asyncio.run(end_while_grading())
    assert isinstance(result, Failure)
    assert result.kind == "costly"
    pool.close()
