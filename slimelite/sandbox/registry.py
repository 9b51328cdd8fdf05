"""The sandboxes that ``--agent-sandbox`` knows by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

from slimelite.base.registry import Function, Registry, function

# the network access of a program: none, only the address of its model, or everything
NETWORKS = ("none", "loopback", "full")
# the flag in error messages
OPTION = "--agent-sandbox"


@dataclass(frozen=True)
class SandboxSettings:
    """The settings that are the same for every program of a run.

    Args:
        name: the name of a `SandboxKind`, or the path of a class. None: ``process`` for programs that a model writes,
            and ``none`` for other programs.
        network: one of `NETWORKS`.
        read: files and folders that a program may read, in addition to the system's files and its own files.
        memory_mb: the memory limit for all processes of a program together [MiB]. If the kernel cannot count the memory
            of several processes together, the limit applies to each process.
        processes: the maximum number of processes and threads.
        disk_mb: the size limit for all files of a program together, and for each file [MiB].
        image: the name of a container image in podman or docker.
        folders: empty folders in memory that a program gets. The sandbox ``process`` cannot create such folders.
        whole: whether the program is root in its own container for one episode, and may change everything in the
            container.
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
    """The command to start a program: its ``words`` and its ``environment``. SIGINT ends the program and all processes
    that it started.

    ``container``: the name of the program's container, or "" if there is no container.
    """

    words: list[str]
    environment: dict[str, str]
    container: str = ""


class Plan(TypedDict):
    """The plan for a supervisor. ``words``: the command line of the program. ``prefix``: words before this command
    line, if another program sets up the sandbox.

    ``confined``: whether the process restricts itself before it becomes the program. ``read``: the paths that the
    restricted process may read. ``filter``: the filter of system calls. ``endpoint``: host and port of the model.
    ``cgroups``: folder of a controller -> file -> limit.
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
    """The plan for a container supervisor. ``words``: the command line of podman or docker without the container's
    ``name``. The supervisor inserts the container's name after the word ``run``.

    ``variables``: the environment variables of the program. The variables do not appear in a list of processes.
    ``endpoint``: host and port of the model. The container reaches the model at this port on its own loopback.
    """

    words: list[str]
    name: str
    variables: dict[str, str]
    endpoint: tuple[str, int] | None
    memory_mb: int


class Sandbox(Protocol):
    """A sandbox. The object is created once for a run, from `SandboxSettings`."""

    def check(self) -> list[str]:
        """Sentences about the limits of the sandbox on this machine.

        Raises:
            ValueError: the sandbox cannot be used. The message contains the remedy.
        """
        ...

    def launch(self, words: Sequence[str], variables: Mapping[str, str], endpoint: str | None) -> Launch:
        """The command that starts ``words`` for one episode.

        ``variables``: environment variables from the run. ``endpoint``: the URL of the program's model on loopback. The
        program may connect to this URL.
        """
        ...


@dataclass(frozen=True)
class SandboxKind:
    """One kind of sandbox.

    Args:
        name: the value of ``--agent-sandbox``.
        summary: the text for the help.
        make: function ``fn(settings) -> Sandbox``. If ``make`` is None, programs run without a sandbox, as the user of
            the training run.
        answers: function ``fn(folder, readable, disk_bytes) -> words``. The returned words are put before the command
            line of a program that a model wrote. The code reward and the python tool start such programs in ``folder``.
            If ``answers`` is None, programs that a model wrote run in the sandbox ``process``.
        container: whether the sandbox needs a container image.
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
        SandboxKind("none", "no sandbox: programs run as the user who trains"),
        SandboxKind("process", "Landlock, seccomp and limits, without privileges", f"{_BOXES}:ProcessSandbox"),
        SandboxKind(
            "bwrap", "namespaces by bubblewrap", f"{_BOXES}:BubblewrapSandbox", f"{_BOXES}:bubblewrap_of_answer"
        ),
        SandboxKind("podman", "containers by podman", f"{_CONTAINERS}:PodmanSandbox", container=True),
        SandboxKind("docker", "containers by docker", f"{_CONTAINERS}:DockerSandbox", container=True),
    ),
    instead="; for your own class, give path/to/file.py:Class",
)


def open_sandbox(settings: SandboxSettings) -> Sandbox | None:
    """Create the sandbox for programs. Returns None for ``none``.

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
    """The function ``answers`` of this sandbox (see `SandboxKind`), for programs that a model wrote; None if such
    programs run in the sandbox ``process``. A user's own class may have a static method ``answers``.
    """
    if name not in SANDBOXES and "." in name:
        from slimelite.slime.plugins import load_function

        own: Callable[[str, Sequence[str], int], Sequence[str]] | None = getattr(load_function(name), "answers", None)
        return own
    kind = SANDBOXES.get(name)
    return None if kind is None or kind.answers is None else function(kind.answers)


def is_container(name: str | None) -> bool:
    """Whether the sandbox ``name`` (a value of ``--agent-sandbox``) needs a container image."""
    return name is not None and name in SANDBOXES and SANDBOXES[name].container


def cautions(settings: SandboxSettings, *, programs: bool) -> list[str]:
    """Sentences that a user should read about the sandbox before a run. ``programs``: whether the sandbox will run
    programs.

    Raises:
        ValueError: the sandbox cannot be used on this machine.
    """
    if is_container(settings.name) and settings.image is None and not programs:
        return []  # an environment may set its images; `Sandbox.launch` reports a missing image
    sandbox = open_sandbox(settings)
    if sandbox is not None:
        return [f"{OPTION} {settings.name}: {what}" for what in sandbox.check()]
    return [f"programs run as your user, with your files and network; {OPTION} process limits them"] if programs else []
