"""Real text on a machine with the tested versions: docstrings and reference texts of its Python packages.

A document is a module or a page. A module has its name and docstring, then each class and function with its docstring.
A page is a package's description, a ``.md`` or ``.rst`` file of it, or a topic of ``pydoc``. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from pydoc_data.topics import topics

STANDARD = "python"  # the standard library as a package
# tests have few docstrings, and copies of other packages would put held-out texts among those that are trained on
SKIPPED = {"tests", "test", "_vendor", "vendor", "_vendored", "third_party", "site-packages", "idlelib", "lib2to3"}
# a distribution's own records, and what is outside of the folder of packages
APART = re.compile(r"\.dist-info|\.egg-info|\.\./")
# larger files are tables
LARGEST = 1 << 20
Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A package: ``files`` that may have text, and its ``description``."""

    name: str
    version: str
    licence: str
    files: list[Path]
    roots: list[Path]  # module names begin below one of these
    description: str = ""


@dataclass(frozen=True)
class Entry:
    """A class or function, or a module or page. ``title``: its line above the text, such as ``def name(a, b)``."""

    module: str
    name: str
    title: str
    text: str


@dataclass
class Document:
    """One text for pretraining."""

    package: str
    entries: list[Entry] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text that the model reads."""
        return "\n\n".join(f"{entry.title}\n{entry.text}" for entry in self.entries) + "\n"


def sources() -> list[Source]:
    """The standard library, then the installed packages. Their names alone decide the order."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for file in library.rglob("*.py") if not SKIPPED & {*file.relative_to(library).parts}]
    version = ".".join(map(str, sys.version_info[:3]))
    found = {STANDARD: Source(STANDARD, version, "PSF-2.0", sorted(files), [library])}
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name and name not in found:
            found[name] = _source(distribution, name)
    first, *others = found.values()
    return [first, *sorted(others, key=lambda source: hashlib.sha256(source.name.encode()).digest())]


def _source(distribution: Distribution, name: str) -> Source:
    root = Path(str(distribution.locate_file("")))
    listed = [file for file in distribution.files or () if not SKIPPED & {*file.parts} and ".." not in file.parts]
    files = sorted(
        root / file for file in listed if file.suffix in (".py", ".md", ".rst") and ".dist-info" not in str(file)
    )
    facts = distribution.metadata  # read anew each time
    classifiers = [each for each in facts.get_all("Classifier") or () if each.startswith("License ::")]
    named = str(facts["License-Expression"] or "") or str(facts["License"] or "")
    named = named if 0 < len(named) < 60 and "\n" not in named else ""
    licence = named or ", ".join(each.split(" :: ")[-1] for each in classifiers) or "see its files"
    body = facts.get_payload()  # type: ignore[attr-defined]
    return Source(name, distribution.version, licence, files, [root], body if isinstance(body, str) else "")


def documents(source: Source, most: int) -> list[Document]:
    """The documents of a package. Reading stops after ``most`` bytes."""
    found, size = list[Document](), 0
    for document in _documents(source):
        found.append(document)
        size += len(document.text.encode())
        if size >= most:
            break
    return found


def documents_of(several: Iterable[Source], most: int, workers: int) -> Iterator[tuple[Source, list[Document]]]:
    """`documents` of each package, in order. ``workers`` processes read them."""
    several = list(several)
    with ProcessPoolExecutor(workers) as pool:
        try:
            yield from zip(several, pool.map(documents, several, [most] * len(several)), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)  # who stops reading wants no more of them


def _documents(source: Source) -> Iterator[Document]:
    if source.name == STANDARD:
        for name, text in sorted(topics.items()):
            yield from _page(source, name, text)
    yield from _page(source, source.name, source.description)
    # in an order that is no folder's: of a large package, a part of everything is read
    for file in sorted(source.files, key=lambda file: hashlib.sha256(str(_below(file, source)).encode()).digest()):
        if not file.is_file() or file.stat().st_size > LARGEST:
            continue
        try:
            content = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if file.suffix != ".py":
            yield from _page(source, str(_below(file, source)), content)
        elif '"""' in content or "'''" in content:
            yield from _module(source, file, content)


def _below(file: Path, source: Source) -> Path:
    return next((file.relative_to(root) for root in source.roots if file.is_relative_to(root)), file)


def _page(source: Source, name: str, text: str) -> Iterator[Document]:
    if text := _clean(text):
        yield Document(source.name, [Entry("", "", f"page {name}", text)])


def _clean(text: str) -> str:
    return text.replace("\0", "").encode(errors="ignore").decode().strip()


def _module(source: Source, file: Path, content: str) -> Iterator[Document]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):
        return
    module = ".".join(_below(file, source).with_suffix("").parts).removesuffix(".__init__")
    document = Document(source.name)
    if text := _clean(ast.get_docstring(tree) or ""):
        document.entries.append(Entry(module, "", f"module {module}", text))
    else:
        document.entries.append(Entry(module, "", f"module {module}", ""))
    document.entries += _entries(tree, module, "")
    if len(document.entries) > 1 or document.entries[0].text:
        yield document


def _entries(tree: ast.AST, module: str, prefix: str) -> Iterator[Entry]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, Documented):
            continue
        name = f"{prefix}{node.name}"
        if text := _clean(ast.get_docstring(node) or ""):
            kind = "class " if isinstance(node, ast.ClassDef) else "def "
            arguments = "" if isinstance(node, ast.ClassDef) else f"({_arguments(node.args)})"
            yield Entry(module, name, f"{kind}{name}{arguments}", text)
        if isinstance(node, ast.ClassDef):
            yield from _entries(node, module, f"{name}.")


def _arguments(args: ast.arguments) -> str:
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [arg.arg for arg in args.kwonlyargs]
    names += [f"**{args.kwarg.arg}"] if args.kwarg else []
    return ", ".join(name for name in names if name not in ("self", "cls"))
