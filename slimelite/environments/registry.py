"""The environments that ``--environment`` knows by name.

::

    from slimelite.environments.registry import ENVIRONMENTS, EnvironmentKind

    ENVIRONMENTS.add(EnvironmentKind("guess", "a number to guess", lambda spec: Guess))

The lines above add an environment. Put these lines into a file, and name the file with ``--import-file``.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from slimelite.base.registry import Function, Registry

# key of the sum of the parts, in a reward with named parts
TOTAL = "total"
# metadata key of the facts about a sample's episode
FACTS = "episode"


@dataclass(frozen=True)
class EnvironmentKind:
    """One kind of environment.

    Args:
        name: the value of ``--environment``. With ``name:spec``, the environment also gets a spec.
        summary: a text for the help, about the model's task in the environment.
        make: function ``fn(spec) -> factory``. ``make`` is called once in each process, and may load data. The factory
            makes the environment of one episode. The factory may be the environment's class. ``spec`` is "" if no spec
            is given.
        boxed: whether ``make`` is called as ``make(spec, settings)``. The settings are the run's `SandboxSettings`, for
            the programs that the environment starts.
        package: a module that must be installed. slimelite's extra with the environment's name installs it.
        rows: function ``fn(spec) -> rows``. Rows are dicts with ``input`` (text or messages), and optionally ``label``
            and ``metadata``. Each call must return the same rows. A run without ``--prompt-data`` uses these rows as
            prompts. In flags that take a file, ``environment:name:spec`` stands for these rows.
    """

    name: str
    summary: str
    make: Function
    package: str | None = None
    rows: Function | None = None
    boxed: bool = False


_HERE, _CONTRIB = "slimelite.environments", "slimelite.contrib"
ENVIRONMENTS: Registry[EnvironmentKind] = Registry(
    "environment",
    "--environment",
    (
        EnvironmentKind(
            "calculator", "arithmetic with a tool", f"{_HERE}.calculator:make", rows=f"{_HERE}.calculator:rows"
        ),
        EnvironmentKind("python", "a tool that runs Python in a sandbox", f"{_HERE}.python:make", boxed=True),
        EnvironmentKind("search", "a tool that searches the folder or file after the colon", f"{_CONTRIB}.search:make"),
        EnvironmentKind("nim", "a game; the model plays both sides", f"{_HERE}.nim:make", rows=f"{_HERE}.nim:rows"),
        EnvironmentKind(
            "reasoning-gym",
            "puzzles, from the tasks after the colon",
            f"{_CONTRIB}.reasoning_gym:make",
            package="reasoning_gym",
            rows=f"{_CONTRIB}.reasoning_gym:rows",
        ),
        EnvironmentKind(
            "textarena",
            "the game after the colon; the model plays all sides",
            f"{_CONTRIB}.textarena:make",
            package="textarena",
            rows=f"{_CONTRIB}.textarena:rows",
        ),
        EnvironmentKind(
            "mcp",
            "the tools of the MCP server whose command or address follows",
            f"{_CONTRIB}.mcp:make",
            package="mcp",
            boxed=True,
        ),
        EnvironmentKind(
            "openenv",
            "the environment of the OpenEnv server at the address",
            f"{_CONTRIB}.openenv:make",
            rows=f"{_CONTRIB}.openenv:rows",
        ),
        EnvironmentKind(
            "harbor",
            "the Harbor tasks of the folder, with a shell in a container",
            f"{_CONTRIB}.harbor:make",
            rows=f"{_CONTRIB}.harbor:rows",
            boxed=True,
        ),
    ),
    instead="; for your own class, give path/to/file.py:Class, and for a server, http://host:port",
)


def known(environment: str) -> tuple[EnvironmentKind, str] | None:
    """The kind and the spec of ``name`` or ``name:spec``. Returns None for a user's class or an address.

    Raises:
        ValueError: there is no environment of this name, or its package is not installed.
    """
    name, _, spec = environment.partition(":")
    if name not in ENVIRONMENTS and (is_address(environment) or "." in name):
        return None
    kind = ENVIRONMENTS[name]
    if kind.package is not None and importlib.util.find_spec(kind.package) is None:
        remedy = f"in slimelite's folder: pip install -c constraints.txt -e '.[{name}]'"
        raise ValueError(f"--environment {name} needs the package {kind.package}, which is not installed; {remedy}")
    return kind, spec


def is_address(environment: str) -> bool:
    """Whether ``environment`` is the address of a server."""
    return environment.startswith(("http://", "https://"))
