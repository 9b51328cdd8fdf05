"""No answer takes more than two seconds of a worker, whatever it makes algebra compute."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimelite.arguments import RewardArgs
from slimelite.rewards import Grader
from slimelite.rewards.pool import WorkerPool
from slimelite.rewards.registry import RULES
from slimelite.rewards.rule import Answer, Failure, Settings
from slimelite.sample import Sample

CPU_SECONDS = 2.0
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
def test_no_answer_takes_more_than_two_seconds(pool: WorkerPool, bomb: str | tuple[str, str]) -> None:
    given, label = (bomb, "x") if isinstance(bomb, str) else bomb
    worker = pool._workers[0]._process
    assert worker is not None  # the answer before this one did not end it
    before = processor_seconds(worker.pid)
    answer = Answer(f"\\boxed{{{given}}}", label)
    result = RULES["math"].quick(answer)
    if result is None:
        [result] = asyncio.run(pool.run([("math", answer)]))
    assert result == 0.0 or (isinstance(result, Failure) and result.kind == "costly"), result
    assert processor_seconds(worker.pid) - before < CPU_SECONDS
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


def test_a_computation_in_c_ends_with_its_process() -> None:
    """An exception waits until the C code returns, which is too late; the second limit does not wait."""
    script = (
        "import signal; from dataclasses import replace; from slimelite.rewards import worker\n"
        "signal.signal(signal.SIGPROF, worker._out_of_time)\n"
        "worker.RULES['math'] = replace(worker.RULES['math'], slow=lambda answer: sum(range(10**12)))\n"
        "worker.graded('math', None)"
    )
    before = os.times()
    code = subprocess.run([sys.executable, "-c", script], check=False).returncode
    after = os.times()
    assert code == -signal.SIGVTALRM
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < CPU_SECONDS + 1.0  # with the start of the process


def test_a_worker_that_its_time_limit_ended_leaves_a_wrong_answer(pool: WorkerPool) -> None:
    process = pool._workers[0]._process
    assert process is not None

    async def end_while_grading() -> list[object]:
        grading = asyncio.ensure_future(pool.run([("format", Answer("a" * 50, "", settings=FOR_EVER))]))
        await asyncio.sleep(0.2)
        os.kill(process.pid, signal.SIGVTALRM)
        return [*await grading]

    [result] = asyncio.run(end_while_grading())
    assert isinstance(result, Failure)
    assert result.kind == "costly"
