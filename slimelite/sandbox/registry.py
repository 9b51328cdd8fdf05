"""The sandboxes that ``--agent-sandbox`` knows by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

from slimelite.base.registry import Function, Registry, function

# what a program may connect to: nothing, the address of its model, or everything
NETWORKS = ("none", "loopback", "full")
# flag -> what it is for, where a message names it
OPTION = "--agent-sandbox"


@dataclass(frozen=True)
class SandboxSettings:
    """The settings that are the same for every program of a run.

    Args:
        name: the name of a `SandboxKind`, or the path of a class. None: ``process`` for programs that a model writes,
            else ``none``.
        network: one of `NETWORKS`.
        read: files and folders that a program may read, in addition to the system's and its own.
        memory_mb: limit for all its processes together if the kernel can count that, else for each process [MiB].
        processes: the most processes, threads included.
        disk_mb: limit for all its files together, and for each file [MiB].
        image: the name of a container image, as its engine knows it.
        folders: empty folders in memory that a program gets. ``process`` cannot make them.
        whole: the program is root in a container of its own for one episode, and may change everything in it.
    """

    name: str | None = None
    network: str = "loopback"
    read: tuple[str, ...] = ()
    memory_mb: int = 4096
    processes: int = 256
    disk_mb: int = 1024
    image: str | None = None
    folders: tuple[str, ...] = ()
    whole: bool = False


NO_WISHES = SandboxSettings()


@dataclass(frozen=True)
class Launch:
    """How to start a program: with these ``words`` in this ``environment``. SIGINT ends it and everything that it
    started.

    ``container``: the name of its container; "" if it has none.
    """

    words: list[str]
    environment: dict[str, str]
    container: str = ""


class Plan(TypedDict):
    """``words``: the program. ``prefix``: words before it, if another program makes the sandbox.

    ``confined``: the program restricts itself. ``read``: what it may read then. ``filter``: the filter of system calls.
    ``endpoint``: host and port of the model. ``cgroups``: folders of controllers, with the files for the limits.
    """

    words: list[str]
    prefix: list[str]
    environment: dict[str, str]
    confined: bool
    read: list[str]
    filter: bytes
    network: str
    endpoint: tuple[str, int] | None
    memory: int
    processes: int
    disk: int
    cgroups: dict[str, dict[str, str]]


class ContainerPlan(TypedDict):
    """``words``: the engine's command line, without the container's ``name``, which follows ``run``.

    ``variables``: for the program. They appear neither in a list of processes nor in the engine. ``endpoint``: host and
    port of the model. The container reaches it on its own loopback.
    """

    words: list[str]
    name: str
    variables: dict[str, str]
    endpoint: tuple[str, int] | None
    memory_mb: int


class Sandbox(Protocol):
    """A sandbox. It is made once for a run, from `SandboxSettings`."""

    def check(self) -> list[str]:
        """What the sandbox cannot do on this machine, in sentences.

        Raises:
            ValueError: the sandbox cannot be used. The message has the remedy.
        """
        ...

    def launch(self, words: Sequence[str], variables: Mapping[str, str], endpoint: str | None) -> Launch:
        """How to start ``words`` for one episode.

        ``variables``: environment variables from the run. ``endpoint``: the URL of its model on loopback, which it may
        reach.
        """
        ...


@dataclass(frozen=True)
class SandboxKind:
    """One kind of sandbox.

    Args:
        name: the value of ``--agent-sandbox``.
        summary: the text for the help.
        make: ``fn(settings) -> Sandbox``. None: programs run without a sandbox, as the user who trains.
        answers: ``fn(folder, readable, memory_bytes) -> words``, which precede the words of a program that a model
            wrote. The code reward and the python tool start such programs in ``folder``. None: they use ``process``.
        container: whether it needs an image.
    """

    name: str
    summary: str
    make: Function | None = None
    answers: Function | None = None
    container: bool = False


_BOXES, _CONTAINERS = "slimelite.sandbox.boxes", "slimelite.sandbox.containers"
SANDBOXES: Registry[SandboxKind] = Registry(
    "sandbox",
    OPTION,
    (
        SandboxKind("none", "no sandbox, as the user who trains"),
        SandboxKind("process", "Landlock, seccomp and limits, without privileges", f"{_BOXES}:ProcessSandbox"),
        SandboxKind(
            "bwrap", "namespaces by bubblewrap", f"{_BOXES}:BubblewrapSandbox", f"{_BOXES}:bubblewrap_of_answer"
        ),
        SandboxKind("podman", "containers by podman", f"{_CONTAINERS}:PodmanSandbox", container=True),
        SandboxKind("docker", "containers by docker", f"{_CONTAINERS}:DockerSandbox", container=True),
    ),
    instead="; a class of your own is path/to/file.py:Class",
)


def open_sandbox(settings: SandboxSettings) -> Sandbox | None:
    """The sandbox for programs; None for ``none``.

    Raises:
        ValueError: there is no such sandbox.
    """
    name = settings.name or "none"
    if name not in SANDBOXES and "." in name:
        from slimelite.slime.plugins import load_function

        made: Sandbox = load_function(name)(settings)
        return made
    kind = SANDBOXES[name]
    return None if kind.make is None else function(kind.make, OPTION, name)(settings)


def answers_of(name: str) -> Callable[[str, Sequence[str], int], Sequence[str]] | None:
    """How code that a model writes is started in this sandbox, as ``answers`` of `SandboxKind`. None: in ``process``.

    A class of the user's own may have it as a static method.
    """
    if name not in SANDBOXES and "." in name:
        from slimelite.slime.plugins import load_function

        own: Callable[[str, Sequence[str], int], Sequence[str]] | None = getattr(load_function(name), "answers", None)
        return own
    kind = SANDBOXES.get(name)
    return None if kind is None or kind.answers is None else function(kind.answers)


def is_container(name: str | None) -> bool:
    """Whether ``name``, a value of ``--agent-sandbox``, is a sandbox that needs an image."""
    return name is not None and name in SANDBOXES and SANDBOXES[name].container


def cautions(settings: SandboxSettings, *, programs: bool) -> list[str]:
    """What a user should know about the sandbox before a run, in sentences. ``programs``: whether the sandbox will run
    programs.

    Raises:
        ValueError: the sandbox cannot be used on this machine.
    """
    if is_container(settings.name) and settings.image is None and not programs:
        return []  # an environment may bring its images, or `Sandbox.launch` says that one is missing
    sandbox = open_sandbox(settings)
    if sandbox is not None:
        return [f"{OPTION} {settings.name}: {what}" for what in sandbox.check()]
    return [f"programs run as your user, with your files and network; {OPTION} process limits them"] if programs else []
