"""The rules of docs/design.md, read from the code itself."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "slimelite"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "dev" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house_counts, machine_bounds = script("house_counts"), script("machine_bounds")
FILES = sorted(PACKAGE.rglob("*.py"))
BANNED_NAMES = {"found", "given", "said", "told", "asked", "held", "Home", "Parked", "let_go", "heard"}
SOURCES = house_counts.read_sources(ROOT)


@cache
def imports(path: Path, *, module_level: bool = False) -> list[str]:
    tree = ast.parse(path.read_text())
    found: list[str] = []
    for node in tree.body if module_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def offenders(room: str | None, forbidden: tuple[str, ...], *, module_level: bool = False) -> list[str]:
    files = [f for f in FILES if room is None or (PACKAGE / room) in f.parents]
    assert files, f"no files in {room}"
    return [
        f"{f.relative_to(ROOT)} imports {name}"
        for f in files
        for name in imports(f, module_level=module_level)
        if any(name == bad or name.startswith(bad + ".") for bad in forbidden)
    ]


def test_ray_is_imported_in_cluster_alone() -> None:
    found = [o for o in offenders(None, ("ray",)) if not o.startswith("slimelite/cluster/")]
    assert found == []
    assert offenders("cluster", ("ray",))


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("algorithms", ("slimelite.arguments", "slimelite.training", "slimelite.rollout", "slimelite.samples.table")),
        ("training", ("slimelite.rollout", "slimelite.rewards", "slimelite.cluster", "slimelite.data.prompts")),
        ("rollout", ("slimelite.training", "slimelite.cluster", "torch")),
        (
            "engines",
            ("slimelite.rollout", "slimelite.rewards", "slimelite.training", "slimelite.arguments", "slimelite.data"),
        ),
        (
            "environments",
            ("slimelite.rollout", "slimelite.training", "slimelite.cluster", "slimelite.arguments", "torch"),
        ),
        ("rewards", ("slimelite.rollout", "slimelite.training", "slimelite.engines")),
        (
            "sandbox",
            ("slimelite.rollout", "slimelite.arguments", "slimelite.rewards", "slimelite.environments", "torch"),
        ),
        ("serving", ("slimelite.rollout", "slimelite.training", "slimelite.cluster", "slimelite.rewards", "torch")),
        ("plan", ("slimelite.rollout", "slimelite.cluster", "slimelite.rewards", "slimelite.preflight", "torch.nn")),
        ("data", ("slimelite.rollout", "slimelite.training", "slimelite.engines", "slimelite.rewards")),
        ("tracking", ("slimelite.rollout", "slimelite.training", "slimelite.engines", "slimelite.cluster")),
        ("samples", ("slimelite.rollout", "slimelite.training", "slimelite.engines", "slimelite.cluster", "torch.nn")),
        ("models", ("slimelite.rollout", "slimelite.training", "slimelite.engines", "slimelite.cluster", "ray")),
    ],
)
def test_rooms_do_not_know_each_other(room: str, forbidden: tuple[str, ...]) -> None:
    assert offenders(room, forbidden) == []


def test_rewards_import_torch_in_the_reward_models_process_alone() -> None:
    found = offenders("rewards", ("torch", "transformers"))
    assert {o.split()[0] for o in found} == {"slimelite/rewards/reward_model.py"}


def test_arguments_need_only_the_standard_library() -> None:
    heavy = ("torch", "ray", "transformers", "sglang", "numpy", "pyarrow", "yaml")
    assert offenders("arguments", heavy, module_level=True) == []


def test_arguments_know_records_and_no_room() -> None:
    records = {
        "slimelite.algorithms.estimators",
        "slimelite.algorithms.losses",
        "slimelite.base.guard",
        "slimelite.base.registry",
        "slimelite.base.version",
        "slimelite.engines.registry",
        "slimelite.engines.params",
        "slimelite.environments.registry",
        "slimelite.models.checkpoints",
        "slimelite.models.families",
        "slimelite.plan.devices",
        "slimelite.plan.memory",
        "slimelite.rewards.rules",
        "slimelite.sandbox.registry",
        "slimelite.serving.tools",
        "slimelite.slime.plugins",
    }
    rooms = [f"slimelite.{path.name}" for path in PACKAGE.iterdir() if path.is_dir() and path.name != "arguments"]
    found = {o.split()[-1] for o in offenders("arguments", (*rooms, "slimelite.models.files", *records))}
    assert found == records


def test_what_kind_of_run_it_is_is_read_as_args_job() -> None:
    flags = re.compile(r"debug_train_only|debug_rollout_only|load_debug_rollout_data\b")
    asking = {f for f in [ROOT / "train.py", *FILES] if flags.search(f.read_text())}
    assert {f.relative_to(ROOT).parts[:2] for f in asking} == {("slimelite", "arguments")}


def test_only_what_starts_a_run_asks_the_pre_flight() -> None:
    found = {
        o.split()[0] for o in offenders(None, ("slimelite.preflight",)) if not o.startswith("slimelite/preflight/")
    }
    assert found == {"slimelite/apps/eval.py", "slimelite/apps/env_model.py"}


def test_nothing_in_the_core_imports_programs_or_adapters() -> None:
    """An adapter is found through the record of a registry that names it as text."""
    outside = ("slimelite.apps", "slimelite.contrib")
    core = [o for o in offenders(None, outside) if not o.startswith(("slimelite/apps/", "slimelite/contrib/"))]
    assert core == []
    assert [name for name in imports(ROOT / "train.py") if name.startswith(outside)] == []
    assert offenders("contrib", ("slimelite.apps",)) == []


def test_the_base_knows_nothing_of_the_rest() -> None:
    rooms = [f"slimelite.{path.name}" for path in PACKAGE.iterdir() if path.is_dir() and path.name != "base"]
    assert offenders("base", tuple(rooms)) == []


def test_what_shows_runs_imports_nothing_that_makes_them() -> None:
    heavy = ("torch", "ray", "transformers", "slimelite.rollout", "slimelite.training", "slimelite.cluster")
    shows = (
        "command",
        "compare",
        "groups",
        "pieces",
        "plot",
        "runs",
        "tables",
        "view",
        "view_samples",
        "html",
        "make_pairs",
    )
    files = {f"slimelite/apps/{name}.py" for name in shows}
    assert [o for o in offenders("apps", heavy) if o.split()[0] in files] == []


def test_few_files_lie_loose() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "loop.py", "stages.py"}


def test_there_is_one_http_client() -> None:
    found = offenders(None, ("aiohttp", "urllib.request", "http.client", "requests"))  # the fronts are servers
    fronts = {
        "slimelite/engines/http_front.py",
        "slimelite/base/http_body.py",
        "slimelite/base/http_server.py",
        "slimelite/engines/sglang/front.py",
        "slimelite/environments/serve.py",
        "slimelite/serving/front.py",
        "slimelite/slime/agents.py",
    }
    doctor = "slimelite/apps/doctor.py"  # asks the hub by way of the environment's proxies, which the client leaves out
    assert {o.split()[0] for o in found} == {"slimelite/base/http_client.py", doctor, *fronts}


def test_workers_methods_are_passed_not_named() -> None:
    """A type checker sees nothing of ``start("fetch", batch)``."""
    calls = [
        f"{source.name}:{node.lineno}"
        for source in SOURCES
        if source.name.startswith("slimelite/cluster/")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
        if node.func.attr in ("start", "submit", "ask", "_ask") and isinstance(node.args[0], ast.Constant)
    ]
    assert calls == []


def test_the_loop_fits_on_a_screen() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) <= 120


def test_files_and_functions_are_short() -> None:
    long_files = {s.name for s in SOURCES if len(s.text.splitlines()) > house_counts.LONGEST_FILE}
    functions = [function for source in SOURCES for function in house_counts.functions(source)]
    assert long_files == set()
    assert [name for name, lines in functions if lines > house_counts.LONGEST_FUNCTION] == []
    assert len(functions) > 1000


def test_no_files_import_each_other_in_a_circle() -> None:
    assert house_counts.import_circles(SOURCES) == []


def test_circles_are_found_inside_functions_and_imports_for_types(tmp_path: Path) -> None:
    folder = tmp_path / "slimelite" / "room"
    folder.mkdir(parents=True)
    (folder / "first.py").write_text("from slimelite.room import second\n")
    (folder / "second.py").write_text("def later():\n    from slimelite.room.third import x\n")
    (folder / "third.py").write_text("import slimelite.room.first\n")
    (folder / "typed.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import slimelite.room.own\n"
    )
    (folder / "own.py").write_text("import slimelite.room.typed\n")
    circle = ["slimelite.room.first", "slimelite.room.second", "slimelite.room.third"]
    sources = house_counts.read_sources(tmp_path)
    typed = ["slimelite.room.own", "slimelite.room.typed"]
    assert house_counts.import_circles(sources) == [circle, typed]


def test_no_test_compares_a_time_or_a_memory_of_the_machine_with_a_number() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert [line for file in files for line in machine_bounds.bounds(file)] == []


@pytest.mark.parametrize(
    ("line", "listed"),
    [
        ("assert time.monotonic() - begin < 5", True),
        ("assert used < LIMIT", True),
        ("assert ended.seconds < LIMIT", True),
        ("assert 1 < used < control", True),
        ("assert used < control / 2", False),
        ("assert used > 0", False),
        ("while time.monotonic() < begin + 5: pass", False),
    ],
)
def test_bounds_of_the_machine_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, listed: bool
) -> None:
    monkeypatch.setattr(machine_bounds, "ROOT", tmp_path)
    file = tmp_path / "test_it.py"
    file.write_text(f"used = process.memory_info().rss\ncontrol = process.memory_info().rss\n{line}\n")
    assert bool(list(machine_bounds.bounds(file))) == listed


def test_test_files_outside_packages_have_names_of_their_own() -> None:
    """pytest refuses the second of two modules of one name, when it collects all."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    names = [path.name for path in files]
    assert sorted(set(names)) == sorted(names)


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every variable and attribute that is set, every parameter, function and class."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name


def banned(source: str) -> list[str]:
    return [f"{line}: {name}" for line, name in bound_names(ast.parse(source)) if name.strip("_") in BANNED_NAMES]


def test_names_are_nouns() -> None:
    """Names that say how a value came here and not what it is, such as ``found`` for a list of problems."""
    names = [f"{file.relative_to(PACKAGE)}:{name}" for file in FILES for name in banned(file.read_text())]
    assert names == []


@pytest.mark.parametrize(
    ("source", "listed"),
    [
        ("found = [1]", True),
        ("for i, (a, found) in pairs: pass", True),
        ("x = [said for said in texts]", True),
        ("if asked := f(): pass", True),
        ("with f() as told: pass", True),
        ("self._held = 1", True),
        ("given: int = 1", True),
        ("def f(*, given): pass", True),
        ("async def _heard(): pass", True),
        ("class Home: pass", True),
        ("x = answer.found", False),
        ("print('found')  # said", False),
        ("founder = 1", False),
    ],
)
def test_banned_names_are_seen_wherever_a_name_is_bound(source: str, listed: bool) -> None:
    assert bool(banned(source)) == listed
