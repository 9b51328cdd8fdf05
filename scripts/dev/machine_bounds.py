"""List the tests that compare a time, a count or an amount of the machine with a number: python
scripts/dev/machine_bounds.py

Seconds, page faults and bytes of a process depend on the other programs on the machine. So a test that compares one of
them with a number fails on a busy day. A test should compare two of them that are measured in the same run. Numbers
alone belong in a benchmark (scripts/benchmarks). This prints each comparison of a measurement with something that is
not measured. A test (tests/test_house_rules.py) requires that there are none. A loop that waits until a deadline is not
such a bound, because it ends by itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from slimelite.base.version import answer_version

ROOT = Path(__file__).resolve().parents[2]
# what measures the machine: functions of `time` and `os`, fields of `getrusage` and of psutil's answers
MEASURES = (
    *("process_time", "perf_counter", "monotonic", "thread_time", "getloadavg", "times()", "/stat"),
    *("getrusage", "ru_minflt", "ru_majflt", "ru_maxrss", "ru_utime", "ru_stime", "ru_nivcsw", "performance.now"),
    *("memory_info", "memory_full_info", "cpu_times", "cpu_percent", "peak_pss", "rss"),
)
# fields of what our functions return: how long a program took
FIELDS = ("seconds",)


def measured(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression reads a measurement, or a name that has one."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in (*MEASURES, *FIELDS):
            return True
        if isinstance(part, ast.Name) and (part.id in names or part.id in MEASURES):
            return True
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and any(m in part.value for m in MEASURES):
            return True
    return False


def targets(node: ast.AST) -> Iterator[str]:
    """The names that a target of an assignment binds."""
    yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def holders(tree: ast.AST, known: set[str]) -> set[str]:
    """``known``, and the names of variables and functions that have or return a measurement."""
    names = set(known)
    while True:
        before = len(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and measured(node.value, names):
                names.update(name for target in node.targets for name in targets(target))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("test"):
                returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
                if any(measured(value, names) for value in returned):
                    names.add(node.name)
        if len(names) == before:
            return names


def is_number(node: ast.AST) -> bool:
    """Whether an expression is a number, or a constant of the file. 0 does not count, because it only asks whether
    anything was measured."""
    names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    computed = any(isinstance(part, ast.Call | ast.Attribute | ast.Subscript) for part in ast.walk(node))
    return not computed and all(name.isupper() for name in names) and ast.unparse(node) != "0"


def bounds(path: Path) -> Iterator[str]:
    """``FILE:LINE: comparison`` for each bound of a test file."""
    tree = ast.parse(path.read_text())
    outside = [
        node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    common = holders(ast.Module(outside, []), set())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    common |= {function.name for function in functions if function.name in holders(function, common)}
    for scope in tree.body:
        names = holders(scope, common)
        for assertion in (node for node in ast.walk(scope) if isinstance(node, ast.Assert)):
            for part in (node for node in ast.walk(assertion.test) if isinstance(node, ast.Compare)):
                for operator, (left, right) in zip(part.ops, pairwise([part.left, *part.comparators]), strict=True):
                    if not isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                        continue
                    if (measured(left, names) and is_number(right)) or (measured(right, names) and is_number(left)):
                        yield f"{path.relative_to(ROOT)}:{assertion.lineno}: {ast.unparse(part)}"


if __name__ == "__main__":
    answer_version()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for line in bounds(file):
            print(line)
