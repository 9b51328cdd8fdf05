"""The environment ``harbor:<folder>`` runs tasks in Harbor's format (terminal-bench uses this format too). The model
has a shell in its own box, which is a container or a sandbox.

The folder is a task, or contains task folders. A task has task.toml, instruction.md, environment/ and tests/. Commands
run in a container of the task's image, with podman or docker. A task whose Dockerfile runs no commands can also use
bubblewrap, with the programs of this machine. When the model sends a reply without a tool call, tests/test.sh decides
the reward.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import parse_qsl

from slimelite.environments.protocol import Row, Start, Step
from slimelite.environments.tools import MOST_CHARACTERS, ToolEnvironment
from slimelite.sandbox.boxes import HOME
from slimelite.sandbox.containers import HOME as CONTAINER_HOME
from slimelite.sandbox.registry import NO_WISHES, OPTION, Sandbox, SandboxSettings, is_container, open_sandbox

PLAIN = "bwrap"
# folders in a box: the files of Harbor's tests, and the file with the reward
TESTS, LOGS = "/tests", "/logs/verifier"
# Dockerfile instructions that a box does not need, and Dockerfile instructions that bubblewrap can also carry out
NEUTRAL, POSSIBLE = ("FROM", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "SHELL"), ("WORKDIR", "ENV", "COPY")
# system folders; bubblewrap cannot create folders in them
SYSTEM = ("bin", "dev", "etc", "home", "lib", "lib32", "lib64", "opt", "proc", "sbin", "sys", "tmp", "usr")
# time limits [s] for one command, and for the tests if the task has no limit
COMMAND_SECONDS, TEST_SECONDS = 30.0, 600.0
# time limit for a box to end itself [s]
END_SECONDS = 2.0
# time limits [s] for the box's shell in addition to a command's limit, for packing a box's files, for building an image
MORE_SECONDS, PACK_SECONDS, BUILD_SECONDS = 60.0, 300.0, 3600.0
# largest size of an output, including the mark at its end [bytes]
MOST_BYTES = 1 << 20
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class Task:
    """A task folder. ``problem``: the part of the task that is not supported here, or "".

    ``files``: pairs (file on this machine, path in the box) of the files that the Dockerfile copies. ``plain``: why
    bubblewrap cannot run the task, or "". ``lost``: why only a box with the task's image can run the task, or "".
    ``variables``: environment variables, including those of the image. ``own_variables``: environment variables without
    those of the image.
    """

    name: str
    folder: Path
    instruction: str
    image: str | None
    memory_mb: int
    internet: bool
    workdir: str
    variables: dict[str, str]
    own_variables: dict[str, str]
    test_variables: dict[str, str]
    test_seconds: float
    files: tuple[tuple[Path, str], ...]
    plain: str
    lost: str
    problem: str


def read_task(folder: Path) -> Task:
    """Read the task in ``folder``.

    Raises:
        ValueError: task.toml or instruction.md cannot be read.
    """
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is not a Harbor task: {error}") from error
    box, tests = config.get("environment", {}), config.get("verifier", {})
    image = _dockerfile(folder / "environment")
    own = _resolved(box.get("env", {}))
    memory = box.get("memory_mb") or _megabytes(str(box.get("memory", "0")))
    return Task(
        name=folder.name,
        folder=folder,
        instruction=instruction,
        image=box.get("docker_image"),
        memory_mb=int(memory),
        internet=box.get("network_mode", "public") == "public" and box.get("allow_internet") is not False,
        workdir=box.get("workdir") or image.workdir,
        variables={**image.variables, **own},
        own_variables=own,
        test_variables=_resolved(tests.get("env", {})),
        test_seconds=float(tests.get("timeout_sec", TEST_SECONDS)),
        files=tuple(image.files),
        plain=image.lost or image.plain or _outside({**image.variables, **own}),
        lost=image.lost,
        problem=_problem(folder, config, box, tests),
    )


def _problem(folder: Path, config: Mapping[str, Any], box: Mapping[str, Any], tests: Mapping[str, Any]) -> str:
    """The part of a task that is not supported. Returns "" if all parts are supported."""
    separate = tests.get("environment_mode") == "separate" or tests.get("environment")
    checks = {
        "it has no tests/test.sh": not (folder / "tests" / "test.sh").is_file(),
        "it has several containers (docker-compose.yaml)": any((folder / "environment").glob("docker-compose.y*ml")),
        "it has several steps": config.get("steps"),
        "it is for Windows": str(box.get("os", "linux")).lower() != "linux",
        "it needs accelerators": box.get("gpus") or box.get("tpu"),
        "it brings MCP servers": box.get("mcp_servers"),
        "its tests run in a separate container": separate,
        "it collects files (verifier.collect)": tests.get("collect"),
        "it defines its own users": config.get("agent", {}).get("user") or tests.get("user"),
        "it waits for a health check": box.get("healthcheck"),
        "its network is limited to some hosts": box.get("network_mode") == "allowlist",
    }
    return next((what for what, holds in checks.items() if holds), "")


def _outside(variables: Mapping[str, str]) -> str:
    """A text that names a variable which would change bubblewrap itself. Returns "" if there is no such variable.
    Bubblewrap runs outside the box, so these variables are not allowed."""
    named = [name for name in variables if name in ("PATH", "HOME", "TMPDIR") or name.startswith(("LD_", "GCONV_"))]
    return f"it sets {named[0]}" if named else ""


def _megabytes(text: str) -> int:
    """Convert a size such as 2G to MiB."""
    units = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    return int(float(text[:-1]) * units[text[-1].upper()]) if text[-1:].upper() in units else 0


def _resolved(variables: Mapping[str, str]) -> dict[str, str]:
    """The ``variables``. ``${NAME}`` and ``${NAME:-default}`` in their values are replaced by the value of the
    environment variable NAME of this process."""
    return {
        name: VARIABLE.sub(lambda match: os.environ.get(match[1], match[2] or ""), str(value))
        for name, value in variables.items()
    }


@dataclass
class _Dockerfile:
    """The parts of a Dockerfile that a box without the task's image needs.

    ``plain``: an instruction that bubblewrap cannot carry out. ``lost``: an instruction that no box can carry out
    without the image, for example because a file is unknown.
    """

    workdir: str = "/app"
    variables: dict[str, str] = field(default_factory=dict)
    files: list[tuple[Path, str]] = field(default_factory=list)
    plain: str = ""
    lost: str = ""


def _dockerfile(folder: Path) -> _Dockerfile:
    """Read the Dockerfile of ``folder``."""
    read, file = _Dockerfile(), folder / "Dockerfile"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        verb, _, rest = line.strip().partition(" ")
        verb, words = verb.upper(), rest.split()
        if not verb or verb.startswith("#") or verb in NEUTRAL:
            continue
        what = f"its Dockerfile has {line.strip()[:60]}"
        if verb == "WORKDIR":
            read.workdir = str(PurePosixPath(read.workdir, rest.strip()))
        elif verb == "ENV" and words and all("=" in word for word in shlex.split(rest)):
            read.variables |= {word.partition("=")[0]: word.partition("=")[2] for word in shlex.split(rest)}
            read.lost = read.lost or (f"{what}, but the value of $ is unknown" if "$" in rest else "")
        elif verb == "COPY" and len(words) >= 2 and not rest.startswith(("--", "[")):
            try:
                read.files += _copies(folder, words[:-1], words[-1], read.workdir)
            except ValueError as error:
                read.lost = read.lost or f"{what}, but {error}"
        else:
            read.plain = read.plain or what
    top = [PurePosixPath(path).parts[1:2] for path in (read.workdir, *(there for _, there in read.files))]
    if inner := [parts[0] for parts in top if parts and parts[0] in SYSTEM]:
        read.plain = read.plain or f"it writes to the system folder /{inner[0]}"
    return read


def _copies(folder: Path, sources: Sequence[str], target: str, workdir: str) -> Iterator[tuple[Path, str]]:
    """Yield pairs (file on this machine, path in the box) for one COPY instruction.

    Raises:
        ValueError: a source is not a file or folder in ``folder``.
    """
    there = os.path.normpath(PurePosixPath(workdir, target))
    into = target.endswith(("/", "/.")) or target == "." or there == workdir or len(sources) > 1
    for source in sources:
        place = folder / source.lstrip("/")  # paths of a COPY start in the folder
        if not place.resolve().is_relative_to(folder.resolve()) or not place.exists():
            raise ValueError(f"{source} is not a file or folder of {folder.name}/")
        paths = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
        for path in paths:
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{path.relative_to(folder)} is a link to a file outside of {folder.name}/")
            inner = path.relative_to(place) if place.is_dir() else path.name if into else ""
            yield path, str(PurePosixPath(there, inner))


class Box:
    """A shell in a sandbox. It runs commands one after the other, each in a new child shell."""

    def __init__(self, process: asyncio.subprocess.Process, container: str) -> None:
        self._process, self.container = process, container

    @classmethod
    async def begin(cls, sandbox: Sandbox, variables: Mapping[str, str]) -> Box:
        """Start a box. ``variables``: the environment variables of the box."""
        launch = sandbox.launch(["sh"], variables, None)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *launch.words,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT,
            env=launch.environment,
            start_new_session=True,
            limit=MOST_BYTES,
        )
        box = cls(process, launch.container)
        await box._tell('S=$(command -v bash || command -v sh); D="${TMPDIR:-/tmp}"')
        return box

    async def _tell(self, line: str) -> None:
        """Send ``line`` to the box's shell."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # `_answer` reports the last output of the box
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()

    async def _answer(self, line: str, seconds: float) -> tuple[int, str]:
        """Run ``line`` in the box's shell. Returns the exit status and at most `MOST_BYTES` of the output.

        Raises:
            OSError: the box has ended, or does not answer.
        """
        mark = secrets.token_hex(12)  # a new mark that no program in the box knows
        await self._tell(f"{line}\nprintf '\\n%s %s\\n' {mark} $?")
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds + MORE_SECONDS):
                text = await self._process.stdout.readuntil(f"\n{mark} ".encode())
                status = await self._process.stdout.readline()
        except asyncio.IncompleteReadError as error:
            lines = error.partial.decode("utf-8", "replace").strip().splitlines() or ["without a word"]
            raise OSError(f"the container has ended: {lines[-1]}") from error
        except (TimeoutError, asyncio.LimitOverrunError) as error:
            raise OSError("the shell of the container does not answer") from error
        return int(status), text[: -len(mark) - 2].decode("utf-8", "replace")

    async def run(self, command: str, folder: str, seconds: float, most: int = MOST_CHARACTERS) -> tuple[int, str]:
        """Run a command. Returns the exit status and the first ``most`` bytes of the output. The status is 137 if the
        command takes too long.

        Raises:
            OSError: the box has ended, or does not answer.
        """
        line = f"cd {shlex.quote(folder)} && {command}".replace("\0", "")
        file = f'"$D"/.{secrets.token_hex(12)}'  # a new name that no command can know
        return await self._answer(
            f'timeout -s KILL {seconds:g} "$S" -c {shlex.quote(line)} </dev/null >{file} 2>&1; s=$?; '
            f"head -c {most} {file}; rm -f {file}; (exit $s)",
            seconds,
        )

    async def make(self, folders: Sequence[str], files: Sequence[tuple[Path, str]]) -> None:
        """Create folders in the box, and copy files of this machine into the box. Executable files stay executable.

        Raises:
            OSError: the box cannot write a folder or a file.
        """
        await self._tell("W=")
        for folder in map(shlex.quote, folders):
            await self._tell(f'mkdir -p {folder} || W="$W "{folder}')
        for here, there in files:
            target, parent = shlex.quote(there), shlex.quote(str(PurePosixPath(there).parent))
            mode, mark = "755" if os.access(here, os.X_OK) else "644", secrets.token_hex(12)
            content = base64.encodebytes(here.read_bytes()).decode()
            line = f"{{ mkdir -p {parent} && base64 -d >{target} && chmod {mode} {target}; }}"
            await self._tell(f"{line} <<'{mark}' || W=\"$W \"{target}\n{content}{mark}")
        status, text = await self._answer('printf %s "$W"; [ -z "$W" ]', COMMAND_SECONDS)
        if status:
            raise OSError(f"the container cannot write{text.splitlines()[-1]}: {text[:200]}")

    async def pack(self, folders: Sequence[str], into: IO[bytes], most: int) -> None:
        """Pack the files of ``folders``, and write them to ``into`` as base64 text of at most ``most`` bytes.

        Raises:
            OSError: the text is longer than ``most``, or the box does not answer.
        """
        mark = secrets.token_hex(12)
        places = " ".join(shlex.quote(folder.strip("/")) for folder in folders)
        await self._tell(f"echo; echo {mark}; tar -C / -cf - {places} 2>/dev/null | base64; echo {mark}")
        assert self._process.stdout is not None
        end, written, begun = f"{mark}\n".encode(), 0, False
        try:
            async with asyncio.timeout(PACK_SECONDS):
                while (line := await self._process.stdout.readline()) != end or not begun:
                    if not line or written > most:
                        raise OSError("the container has ended, or its output is too large")
                    if begun:
                        written += into.write(re.sub(rb"[^A-Za-z0-9+/=\n]", b"", line))
                    begun = begun or line == end
        except (TimeoutError, ValueError) as error:
            raise OSError("the shell of the container does not answer") from error

    async def unpack(self, packed: IO[bytes]) -> None:
        """Write into the box the files that `pack` has packed.

        Raises:
            OSError: the box cannot write the files.
        """
        packed.seek(0)
        mark = secrets.token_hex(12)
        await self._tell(f'P="$D/.{mark}"')
        while lines := packed.readlines(1 << 20):  # each line can be decoded separately
            await self._tell(f"base64 -d >>\"$P\" <<'{mark}'\n{b''.join(lines).decode()}{mark}")
        line = '{ [ ! -s "$P" ] || tar -C / -xf "$P"; } 2>&1; s=$?; rm -f "$P"; (exit $s)'
        status, text = await self._answer(line, PACK_SECONDS)
        if status:
            raise OSError(f"the files of the model cannot be copied into the container: {text:.300}")

    async def close(self) -> None:
        """End the box and all its processes."""
        if self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        with suppress(TimeoutError):
            async with asyncio.timeout(MORE_SECONDS if self.container else END_SECONDS):
                await self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Harbor(ToolEnvironment):
    """An episode of one task."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        boxes: Mapping[str, Sandbox],
        settings: Mapping[str, SandboxSettings],
        seconds: float,
        *,
        bare: bool,
    ) -> None:
        """``bare``: whether the boxes lack the files that a Dockerfile copies."""
        self._all, self._boxes, self._settings, self._seconds, self._bare = tasks, boxes, settings, seconds, bare
        self._box: Box | None = None

    async def bash(self, command: str) -> str:
        """Run a command in a shell of the task's machine, and read what it prints."""
        assert self._box is not None
        status, output = await self._box.run(command, self._task.workdir, self._seconds)
        more = "" if status == 0 else f"\n(exit status {status}{', it took too long' if status == 137 else ''})"
        return (output + more).strip() or "(no output)"

    def tools(self) -> Sequence[Callable[..., Any]]:
        """See `ToolEnvironment`."""
        return [self.bash]

    async def reset(self, row: Row) -> Start:  # type: ignore[override]  # the driver accepts async methods too
        """Start the task's box."""
        name = str(row.metadata.get("task"))
        if name not in self._all:
            raise ValueError("this row does not belong to a Harbor task; leave out --prompt-data")
        start, self._task = super().reset(row), self._all[name]
        task = self._task
        self._variables = task.variables if self._bare else task.own_variables
        self._box = await Box.begin(self._boxes[name], self._variables)
        await self._box.make([task.workdir, TESTS, LOGS], task.files if self._bare else ())
        return start

    async def step(self, reply: Mapping[str, Any]) -> Step:
        """Run the commands. After a reply without commands, the tests decide the reward."""
        step = await super().step(reply)
        if not step.done:
            return replace(step, reward=0.0)
        reward = await self._verdict()
        return replace(
            step, reward=reward or 0.0, metrics={**step.metrics, "tests_without_reward": float(reward is None)}
        )

    async def _verdict(self) -> float | None:
        """Run tests/test.sh in a new box with the model's files. Returns the reward that the tests write, or None if
        the tests write no reward.

        The model's own box is not used. A program that the model has left running there could change the input and the
        output of the box's shell.
        """
        box, task = self._box, self._task
        assert box is not None
        sandbox, settings, image = self._boxes[task.name], self._settings[task.name], ""
        with tempfile.TemporaryFile() as packed:
            try:
                await box.pack(_kept(settings), packed, 2 * settings.disk_mb << 20)
            except OSError:
                return None
            try:
                if box.container:
                    image = f"localhost/slimelite-harbor-tests:{secrets.token_hex(8)}"
                    words = [str(settings.name), "commit", box.container, image]
                    await asyncio.to_thread(_engine, words, "keep the model's files for the tests", PACK_SECONDS)
                    sandbox = _opened(replace(settings, image=image))
                await box.close()
                self._box = box = await Box.begin(sandbox, self._variables)
                try:
                    await box.unpack(packed)
                except OSError:
                    return None
                return await self._tested(box)
            finally:
                if image:
                    await box.close()
                    words = [str(settings.name), "rmi", "--force", image]
                    await asyncio.to_thread(_engine, words, f"remove the image {image}", PACK_SECONDS)

    async def _tested(self, box: Box) -> float | None:
        """Run the tests in ``box``, and return their reward."""
        task = self._task
        await box.run(f"rm -rf {TESTS} {LOGS}", "/", self._seconds)
        tests = task.folder / "tests"
        files = [path for path in sorted(tests.rglob("*")) if path.is_file()]
        await box.make([TESTS, LOGS], [(path, f"{TESTS}/{path.relative_to(tests)}") for path in files])
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in task.test_variables.items())
        command = f'env {variables} "$(command -v bash || command -v sh)" {TESTS}/test.sh'
        await box.run(command, task.workdir, task.test_seconds)
        reward = await box.run(f"cat {LOGS}/reward.json 2>/dev/null || cat {LOGS}/reward.txt", "/", self._seconds)
        try:
            number = json.loads(reward[1])
            return float(number["reward"] if isinstance(number, dict) else number)
        except (ValueError, TypeError, KeyError):
            return None

    async def close(self) -> None:
        """End the box."""
        if self._box is not None:
            await self._box.close()


def _kept(settings: SandboxSettings) -> list[str]:
    """The folders that the model can write to. Folders that a commit of the model's container contains are left out."""
    if is_container(settings.name):
        return ["/tmp", CONTAINER_HOME]
    return [*(folder for folder in settings.folders if folder not in ("/tests", "/logs")), "/tmp", HOME]


def _engine(words: Sequence[str], what: str, seconds: float) -> None:
    """Run a command of podman or docker. ``what``: the purpose of the command, for the error message.

    Raises:
        ValueError: the command fails, or takes longer than ``seconds``.
    """
    try:
        made = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{words[0]} did not {what} in {seconds:g} seconds; try `{shlex.join(words)}`") from error
    if made.returncode:
        reason = (made.stderr.strip().splitlines() or ["without a word"])[-1]
        raise ValueError(f"{words[0]} cannot {what}: {reason:.300}")


def _tasks(spec: str) -> tuple[dict[str, Task], float]:
    """The tasks of ``spec``, and the time limit of a command [s].

    Raises:
        ValueError: there are no tasks, or one of them cannot run here.
    """
    path, _, query = spec.partition("?")
    options = dict(parse_qsl(query))
    wanted, seconds = options.pop("tasks", ""), options.pop("command_seconds", str(COMMAND_SECONDS))
    if options or not re.fullmatch(r"\d+(\.\d+)?", seconds):
        raise ValueError(f"--environment harbor:{spec}: write FOLDER?tasks=one,two&command_seconds=30")
    top = Path(path)
    folders = [top] if (top / "task.toml").is_file() else sorted(file.parent for file in top.glob("*/task.toml"))
    tasks = {task.name: task for task in map(read_task, folders)}
    if missing := [name for name in filter(None, wanted.split(",")) if name not in tasks]:
        raise ValueError(f"--environment harbor:{spec}: there is no task {', '.join(missing)}")
    tasks = {name: task for name, task in tasks.items() if not wanted or name in wanted.split(",")}
    if not tasks:
        raise ValueError(f"--environment harbor:{spec}: there is no task.toml in {path} or in its subfolders")
    return tasks, float(seconds)


def _refuse(spec: str, tasks: Mapping[str, Task], problems: Mapping[str, str]) -> None:
    """If a task cannot run, raise an error. The error names the tasks that can run.

    Raises:
        ValueError: a task cannot run.
    """
    if problems:
        name, what = next(iter(problems.items()))
        rest = ",".join(other for other in tasks if other not in problems)
        remedy = f"; the other tasks can: harbor:{spec.partition('?')[0]}?tasks={rest}" if rest else ""
        raise ValueError(f"--environment harbor:{spec}: the task {name} cannot be run: {what}{remedy}")


def make(spec: str, sandbox: SandboxSettings = NO_WISHES) -> Callable[[], Harbor]:
    """The factory of episodes. Each episode has its own box.

    Raises:
        ValueError: there is no task, or a task cannot run in this sandbox.
    """
    tasks, seconds = _tasks(spec)
    name = sandbox.name or "none"
    if name != PLAIN and not is_container(name):
        more = "or bwrap for tasks with a Dockerfile that runs no commands"
        raise ValueError(f"--environment harbor:{spec} needs {OPTION} podman or docker, {more}")
    bare = name == PLAIN or sandbox.image is not None
    problems = {
        task.name: task.problem or (task.plain if name == PLAIN else task.lost if bare else "")
        for task in tasks.values()
    }
    for task in tasks.values():
        if task.memory_mb > sandbox.memory_mb:
            problems[task.name] = problems[task.name] or f"it needs --agent-memory-mb {task.memory_mb}"
    _refuse(spec, tasks, {name: what for name, what in problems.items() if what})
    settings = {task.name: _of_task(task, sandbox) for task in tasks.values()}
    boxes = {name: _opened(own) for name, own in settings.items()}
    for box in boxes.values():
        box.check()
    return lambda: Harbor(tasks, boxes, settings, seconds, bare=bare)


def _opened(settings: SandboxSettings) -> Sandbox:
    sandbox = open_sandbox(settings)
    assert sandbox is not None
    return sandbox


def _of_task(task: Task, settings: SandboxSettings) -> SandboxSettings:
    """The sandbox settings of a task's box.

    Raises:
        ValueError: there is no image.
    """
    network = "full" if settings.network == "full" and task.internet else "none"
    folders = {f"/{PurePosixPath(path).parts[1]}" for path in (task.workdir, *(there for _, there in task.files))}
    settings = replace(settings, network=network, whole=True, folders=tuple(sorted({*folders, "/tests", "/logs"})))
    if is_container(settings.name):
        settings = replace(settings, image=settings.image or task.image or _built(task, str(settings.name)))
    return settings


def _built(task: Task, engine: str) -> str:
    """The name of the image of the task's Dockerfile. The image is built if it does not exist yet.

    Raises:
        ValueError: the image cannot be built.
    """
    folder = task.folder / "environment"
    content = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    tag = f"localhost/slimelite-harbor:{content.hexdigest()[:16]}"
    there = [engine, "image", "inspect", tag]
    try:
        _engine(there, "answer", COMMAND_SECONDS)
    except ValueError:  # the image does not exist
        try:
            words = [engine, "build", "--tag", tag, str(folder)]
            _engine(words, f"build the image of the task {task.name}", BUILD_SECONDS)
        except ValueError as error:
            raise ValueError(f"{error}; to use another image, name it with --agent-image") from error
    return tag


def rows(spec: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each task, with the task's instruction.

    Raises:
        ValueError: there is no task, or a task cannot run here.
    """
    tasks, _ = _tasks(spec)
    _refuse(spec, tasks, {task.name: task.problem for task in tasks.values() if task.problem})
    for task in tasks.values():
        yield {"input": task.instruction, "metadata": {"task": task.name}}
