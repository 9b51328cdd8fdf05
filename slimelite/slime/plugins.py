"""Functions of the user, by path: ``pkg.module.fn``, ``path/to/file.py:fn``, or slime's name of a function here."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from slimelite.base.guard import PACKAGE, guarded, import_failure, nearest
from slimelite.slime import compat

# files that `run_file` has run in this process; its child processes run them too
files_run: list[str] = []


def load_function(path: str, flag: str | None = None) -> Callable[..., Any]:
    """The function (or class) at ``path``.

    ``sys.exit`` in the function becomes a `PluginError`, because it would end the run as if it had succeeded. With
    ``flag``, the option that named the function, every error becomes a `PluginError`; without it, errors are raised
    unchanged, so that the caller can count them or retry.

    Known ``slime.…`` names give our own functions, also in the imports of a plugin (see `compat`).
    A file is loaded once however often it is named; its folder is appended to ``sys.path``, so that it can import
    its neighbours.

    Raises:
        ValueError: there is no such file, module or function (the nearest name is given), or its import fails.
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if not module_name or not name:
        raise ValueError(f"{path!r} is not a plugin path; write package.module.function or path/to/file.py:function")
    if name == "py" and Path(path).is_file():
        raise ValueError(f"{path!r} names a file and nothing in it; write {path}:name")
    if path in compat.SLIME_NAMES:
        return compat.resolve(path)
    compat.install_finder()
    try:
        module = _load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
        function = getattr(module, name, None)
    except ImportError as error:
        raise ValueError(f"cannot load {path!r}: {error}{_nearest_module(module_name, error)}") from error
    except SystemExit as error:
        raise ValueError(f"cannot load {path!r}: it calls sys.exit({error.code!r}) while it is imported") from error
    if function is None:
        raise ValueError(f"{module_name} has no {name!r}{nearest(name, vars(module))}")
    if not callable(function):
        raise ValueError(f"{path!r} is a {type(function).__name__}, not a function")
    is_ours = str(getattr(function, "__module__", "")).partition(".")[0] == PACKAGE.name
    return function if is_ours or isinstance(function, type) else guarded(function, path, flag)


def run_file(path: str, option: str) -> None:
    """Run the user's file at ``path``, which ``option`` names; only once in a process, even if it is named again.

    Raises:
        ValueError: the file is missing or fails; one message, with the line in the file.
    """
    compat.install_finder()
    try:
        _load_file(path)
    except (Exception, SystemExit) as error:
        raise ValueError(import_failure(option, path, error)) from error
    if (file := str(Path(path).resolve())) not in files_run:
        files_run.append(file)


def _load_file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        neighbours = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ValueError(f"no plugin file {file}{nearest(file.name, neighbours)}")
    name = f"{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as Python's import does: dataclasses and pickle look the module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _nearest_module(name: str, error: ImportError) -> str:
    missing = error.name or ""
    if not isinstance(error, ModuleNotFoundError) or not name.startswith(missing):
        return ""  # something that the plugin imports is missing, not the plugin
    parent, _, leaf = missing.rpartition(".")
    if not parent:  # of all that is installed hardly anything is meant
        return "; write path/to/file.py:function, or put the folder that holds it into PYTHONPATH"
    paths = getattr(sys.modules.get(parent), "__path__", None)
    return nearest(leaf, [m.name for m in pkgutil.iter_modules(paths)]) if paths is not None else ""
