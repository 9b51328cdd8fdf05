"""The sandboxes ``podman`` and ``docker``. Each program has its own container. A supervisor process starts and removes
the container."""

from __future__ import annotations

import marshal
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar
from urllib.parse import urlsplit

from slimelite.base.lifecycle import MARK
from slimelite.sandbox.boxes import ROOT, SYSTEM, is_within
from slimelite.sandbox.container_supervisor import VARIABLE
from slimelite.sandbox.registry import OPTION, ContainerPlan, Launch, SandboxSettings
from slimelite.sandbox.supervisor import OPEN_FILES

RUN = f"import sys; sys.path.insert(0, {ROOT!r}); from slimelite.sandbox.container_supervisor import main; main()"
# a shell command that waits until the supervisor has connected the container to the model, and then starts the program
WAIT = 'read -r _ && exec "$@"'
USER = "1000:1000"
# a folder that no image has, because a folder of the image would keep its owner
HOME = "/home/slimelite-agent"
# the filter of system calls, as in the other sandboxes; podman's own filter would allow programs to make user
# namespaces
FILTER = os.path.join(os.path.dirname(__file__), "containers_seccomp.json")
# capabilities that root in a container needs for its files, packages and users
OWN_FILES = [
    word
    for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE")
    for word in ("--cap-add", name)
]
# variables that a program gets from the run's environment; paths of certificates come from the image
KEPT = ("LANG", "LC_ALL", "TZ")
# maximum number of processes of all containers together; the kernel's usual limit minus podman's own processes
MOST_PROCESSES = 32768
# time limit for the start of a container [s]
PROBE_SECONDS = 60.0


class ContainerSandbox:
    """A container of the image in ``--agent-image``."""

    name: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings

    def check(self) -> list[str]:
        """See `Sandbox`."""
        image = self.settings.image
        if shutil.which(self.name) is None:
            raise ValueError(f"{OPTION} {self.name} needs {self.name}: {self.remedy}; or use process or bwrap")
        if image is None:
            raise ValueError(self._without_image())
        if missing := [path for path in self.settings.read if not os.path.exists(path)]:
            raise ValueError(f"--agent-sandbox-read: there is no {', '.join(missing)}")
        self._ask("info", f"{OPTION} {self.name} does not answer", self.remedy)
        self._ask(
            f"image inspect {image}", f"--agent-image {image} is not on this machine", f"{self.name} pull {image}"
        )
        launch = self.launch(["true"], {}, "http://127.0.0.1:9")
        try:
            run = subprocess.run(
                launch.words, env=launch.environment, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            what = f"{OPTION} {self.name} did not start a container of {image} in {PROBE_SECONDS:g} seconds"
            raise ValueError(f"{what}; try `{self.name} run --rm {image} true`") from error
        lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        if run.returncode:
            raise ValueError(f"{OPTION} {self.name} does not start a container of {image}: {lines[-1]}")
        return lines if run.stderr.strip() else []

    def _without_image(self) -> str:
        return f"{OPTION} {self.name} needs --agent-image, an image with a shell and the program"

    def _ask(self, command: str, what: str, remedy: str) -> None:
        """Run a command of podman or docker.

        Raises:
            ValueError: the command fails. The message begins with ``what``.
        """
        words = [self.name, *command.split()]
        try:
            run = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            late = f"no answer in {PROBE_SECONDS:g} seconds; try `{' '.join(words)}`"
            raise ValueError(f"{what}: {late}; {remedy}") from error
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
            raise ValueError(f"{what}: {reason}; {remedy}")

    def launch(self, words: Sequence[str], variables: Mapping[str, str], endpoint: str | None) -> Launch:
        """See `Sandbox`. Raises ValueError if there is no image."""
        if self.settings.image is None:
            raise ValueError(self._without_image())
        url, kept = urlsplit(endpoint or ""), {name: os.environ[name] for name in KEPT if name in os.environ}
        if MARK in os.environ:  # the watchdog finds the program by this variable; it is not a secret
            kept[MARK] = os.environ[MARK]
        values, name = {**kept, **variables}, f"slimelite-{os.urandom(8).hex()}"
        for variable, value in values.items():
            if "\n" in value or not variable or "=" in variable or variable[0] == "#" or variable.split() != [variable]:
                raise ValueError(
                    f"the variable {variable!r} cannot be given to a container: its value has several lines, or its "
                    "name is not allowed (empty, with # at the start, or with = or white space in it)"
                )
        words, mounts = self._placed(words)
        command = [self.name, "run", *self._limits(), *mounts, *self._environment(values)]
        # start a shell, because an image may have its own entry point
        command += ["--entrypoint", "/bin/sh", self.settings.image, "-c", WAIT, "sh", *words]
        plan = ContainerPlan(
            words=command,
            name=name,
            variables=values,
            endpoint=(url.hostname or "", url.port or 80) if endpoint and self.settings.network == "loopback" else None,
            memory_mb=self.settings.memory_mb,
        )
        # the environment of podman or docker has only its own settings; the program's variables are in the plan
        environment = {**os.environ, VARIABLE: marshal.dumps(dict(plan)).hex()}
        return Launch([sys.executable, "-I", "-S", "-c", RUN], environment, name)

    def _limits(self) -> list[str]:
        settings = self.settings
        disk, memory = f"{settings.disk_mb}m", f"{settings.memory_mb}m"
        network = "host" if settings.network == "full" else "none"
        words = ["--rm", "--interactive", "--pull", "never", "--log-driver", "none", "--network", network]
        words += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(settings.processes)]
        words += ["--shm-size", disk, "--workdir", HOME]
        words += ["--user", "0:0", *OWN_FILES] if settings.whole else ["--user", USER, "--read-only"]
        for place in (HOME, "/tmp"):
            words += ["--tmpfs", f"{place}:rw,exec,nosuid,nodev,size={disk},mode=1777"]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--security-opt", f"seccomp={FILTER}"]
        for name, limit in (("core", 0), ("nofile", OPEN_FILES), ("fsize", settings.disk_mb << 20)):
            words += ["--ulimit", f"{name}={limit}:{limit}"]
        return words

    def _placed(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Replace files of this machine in ``words`` by their full paths. Returns the new words, and the options that
        mount these files."""
        placed, there = list[str](), list[str]()
        for word in words:
            named = (os.sep in word or os.path.isfile(word)) and not word.startswith("-") and os.path.exists(word)
            path = os.path.abspath(word)
            named = named and path != "/" and not is_within(path, SYSTEM)  # system files come from the image
            there += [path] if named else []
            placed.append(path if named else word)
        places = dict.fromkeys([*there, *map(os.path.abspath, self.settings.read)])
        if commas := [path for path in places if "," in path]:
            raise ValueError(f"{OPTION} {self.name} cannot mount a path with a comma: {commas[0]}; rename it")
        mounts = [word for path in places for word in ("--mount", f"type=bind,source={path},target={path},readonly")]
        return placed, mounts

    def _environment(self, _values: Mapping[str, str]) -> Iterator[str]:
        """The options for variables that are the same for every program. The supervisor adds a file with the other
        variables."""
        for name, value in (("HOME", HOME), ("TMPDIR", "/tmp"), ("USER", "agent"), ("LOGNAME", "agent")):
            yield from ("--env", f"{name}={value}")


class PodmanSandbox(ContainerSandbox):
    """Containers of podman, which needs no daemon."""

    name = "podman"
    remedy = "apt-get install podman"

    def _limits(self) -> list[str]:
        # by default, podman requests a process limit that a user without CAP_SYS_RESOURCE may not set; the cgroup of a
        # container limits its processes
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        most = MOST_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, MOST_PROCESSES)
        return [*super()._limits(), "--http-proxy=false", "--ulimit", f"nproc={most}:{most}"]


class DockerSandbox(ContainerSandbox):
    """Containers of a docker daemon on this machine."""

    name = "docker"
    remedy = "install it, start its daemon, and add this user to the group docker"

    def _environment(self, values: Mapping[str, str]) -> Iterator[str]:
        yield from super()._environment(values)
        # otherwise docker would use the proxies of the client's settings, and their addresses may have passwords; these
        # options override the file
        for name in ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy"):
            for written in sorted({name, name.upper()} - {*values}):
                yield from ("--env", f"{written}=")
        for name in ("no_proxy", "NO_PROXY"):
            yield from ("--env", f"{name}={values.get(name, '')}")
