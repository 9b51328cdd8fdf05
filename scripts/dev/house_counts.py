"""Counts facts about the code: files, lines, functions, import circles, `Any`.

    python scripts/dev/house_counts.py                        # this tree
    python scripts/dev/house_counts.py --before COMMIT        # a commit and this tree side by side
    python scripts/dev/house_counts.py --rooms                # lines and files of each package

The table is Markdown. A line of code is not blank, not a comment, not an import, and not part of a docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from slimelite.base.version import add_version

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "slimelite"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# bounds of docs/design.md
LONGEST_FILE, LONGEST_FUNCTION = 600, 80


class Source(NamedTuple):
    """One file of the package. It is read once."""

    name: str  # from the root: slimelite/samples/table.py
    module: str
    text: str
    tree: ast.Module


def read_sources(root: Path) -> list[Source]:
    """Every Python file of the package below ``root``."""
    return [_read(file, root) for file in sorted((root / PACKAGE).rglob("*.py"))]


def _read(file: Path, root: Path) -> Source:
    name = file.relative_to(root)
    module = ".".join(name.with_suffix("").parts).removesuffix(".__init__")
    text = file.read_text(encoding="utf-8")
    return Source(str(name), module, text, ast.parse(text))


def imported_modules(source: Source, known: Mapping[str, object]) -> set[str]:
    """Modules of ``known`` that the file imports. Imports inside functions and for types count too."""
    names: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in names if name in known and name != source.module}


def import_circles(sources: list[Source]) -> list[list[str]]:
    """Sets of modules that import each other, directly or through others (Tarjan's strongly connected components)."""
    modules = {source.module: source for source in sources}
    graph = {module: imported_modules(source, modules) for module, source in modules.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            position = stack.index(module)
            circle = stack[position:]
            del stack[position:]
            if len(circle) > 1:
                circles.append(sorted(circle))

    for module in graph:
        if module not in index:
            visit(module)
    return circles


def functions(source: Source) -> Iterator[tuple[str, int]]:
    """(``file:line name``, lines) of each function of a file, without decorators."""
    for node in ast.walk(source.tree):
        if isinstance(node, FUNCTIONS):
            assert node.end_lineno is not None
            yield f"{source.name}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def code_lines(source: Source) -> set[int]:
    """Numbers of the lines that are not blank, comments, imports or docstrings."""
    skipped: set[int] = set()
    for node in ast.walk(source.tree):
        first: ast.AST | None = node if isinstance(node, (ast.Import, ast.ImportFrom)) else None
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node, clean=False):
            first = node.body[0]
        if isinstance(first, ast.stmt):
            assert first.end_lineno is not None
            skipped.update(range(first.lineno, first.end_lineno + 1))
    lines: set[int] = set()
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - skipped


def uses_of_any(source: Source) -> int:
    """How often a file uses the annotation ``Any``."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(source.tree))


def counts(root: Path) -> dict[str, str]:
    """Description of each count -> its value."""
    sources = read_sources(root)
    lengths = [len(source.text.splitlines()) for source in sources]
    sizes = [length for source in sources for _, length in functions(source)]
    circles = import_circles(sources)
    return {
        "files": str(len(sources)),
        "lines": f"{sum(lengths):,}",
        "lines of code": f"{sum(len(code_lines(source)) for source in sources):,}",
        "median file": f"{statistics.median(lengths):.0f}",
        "longest file": str(max(lengths)),
        f"files above {LONGEST_FILE}": str(sum(length > LONGEST_FILE for length in lengths)),
        "functions": f"{len(sizes):,}",
        "longest function": str(max(sizes)),
        f"functions above {LONGEST_FUNCTION}": str(sum(size > LONGEST_FUNCTION for size in sizes)),
        "import circles": str(len(circles)),
        "files in them": str(sum(map(len, circles))),
        "`Any`": str(sum(map(uses_of_any, sources))),
        "`train.py`": str(len((root / "train.py").read_text(encoding="utf-8").splitlines())),
    }


def rooms(root: Path) -> dict[str, str]:
    """Each package -> its files and lines."""
    found: dict[str, list[int]] = {}
    for source in read_sources(root):
        parts = source.name.split("/")
        found.setdefault(parts[1] if len(parts) > 2 else "top", []).append(len(source.text.splitlines()))
    return {f"`{room}`": f"{len(lengths)} files, {sum(lengths):,} lines" for room, lengths in sorted(found.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("--before", metavar="COMMIT", help="a commit to compare with")
    parser.add_argument("--rooms", action="store_true", help="count each package separately")
    options = parser.parse_args()
    count = rooms if options.rooms else counts
    columns = {"now": count(ROOT)}
    if options.before:
        with tempfile.TemporaryDirectory() as folder:
            command = ["git", "-C", str(ROOT), "archive", options.before, PACKAGE, "train.py"]
            archive = subprocess.run(command, check=True, capture_output=True).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
            columns = {options.before: count(Path(folder)), **columns}
    print(f"| | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|")
    for what in dict.fromkeys(key for column in columns.values() for key in column):
        print(f"| {what} | {' | '.join(column.get(what, '–') for column in columns.values())} |")


if __name__ == "__main__":
    main()
