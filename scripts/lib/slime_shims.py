"""Replaces `ray`, `pkill`, `ssh`, `python3` and others for a script under scripts/run_slime_script.sh. Each call of
this program is one call of one of them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(os.environ["SLIME_ROOT"])
SHIMS = os.environ["SLIME_SHIMS"]
# slime's entry points, and what train.py is told for each
ENTRIES = {"train.py": [], "train_async.py": ["--async-rollout"]}
# commands that run others on other machines
REMOTE = ("ssh", "pdsh", "pssh", "parallel-ssh", "clush", "srun", "mpirun", "mpiexec")
# sudo's options with a value
SUDO_VALUES = ("-u", "-g", "-h", "-p", "-C", "-D", "-R", "-T", "-U", "-r", "-t")
CONVERSIONS = ("convert_hf_to_torch_dist.py", "convert_torch_dist_to_hf.py")


def say(text: str) -> None:
    """Tell the user that something differs from what the script says."""
    # one write, because commands in the background write too
    os.write(sys.stderr.fileno(), f"run_slime_script: {text}\n".encode())


def mapped(word: str) -> str:
    """``word`` after --map. A flag's value may follow an equals sign."""
    for line in os.environ["SLIME_MAP"].splitlines():
        source, _, target = line.partition("=")
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if value == source or value.startswith(source + "/"):
            return option + equals + target + value.removeprefix(source)
    return word


def python(words: list[str]) -> None:
    """Call the real Python, unless it is called on one of slime's entry points or conversions."""
    # the wrapper's folder is no longer first: what train.py starts finds the real commands
    os.environ["PATH"] = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if p != SHIMS)
    script = next((Path(word).name for word in words if not word.startswith("-")), "")
    if script in CONVERSIONS:
        say(f"{script} is left out: Hugging Face folders are read and written as they are")
        return
    if script in ENTRIES and "-c" not in words and "-m" not in words:
        own = words[[Path(word).name for word in words].index(script) + 1 :]
        extra = (Path(SHIMS) / "flags").read_text().split("\0")[:-1]
        changed = {word: mapped(word) for word in own if mapped(word) != word}
        for word, target in changed.items():
            say(f"{word} is {target}")
        say(f"{script} is {ROOT / 'train.py'}" + "".join(f" {flag}" for flag in ENTRIES[script]))
        words = [str(ROOT / "train.py"), *map(mapped, own), *ENTRIES[script], *filter(None, extra)]
    os.execv(sys.executable, [sys.executable, *words])


def ray(words: list[str]) -> None:
    """`ray job submit -- COMMAND` runs the command here with its environment. Other calls do nothing."""
    if words[:2] != ["job", "submit"] or "--" not in words:
        say(f"ray {' '.join(words[:2])} does nothing: train.py starts a Ray of its own, or uses that of RAY_ADDRESS")
        return
    options, command = words[: words.index("--")], words[words.index("--") + 1 :]
    given = {name: str(value) for name, value in _environment(options).items()}
    if "PYTHONPATH" in given:
        folders = [mapped(folder) for folder in given["PYTHONPATH"].split(os.pathsep)]
        here = [folder for folder in folders if folder and Path(folder).is_dir()]
        given["PYTHONPATH"] = os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])
    # train.py gives them to its workers, which Ray may start on other nodes (slimelite.cluster.ray_cluster)
    os.environ.update(given, SLIMELITE_WORKER_ENV=json.dumps(given))
    say("ray job submit: the job runs here, in this process")
    if Path(command[0]).name in ("python", "python3"):
        python(command[1:])
    else:
        os.execvp(command[0], command)


def _environment(options: list[str]) -> dict[str, object]:
    """``env_vars`` of --runtime-env-json."""
    for i, word in enumerate(options):
        if word.startswith("--runtime-env-json"):
            text = word.partition("=")[2] or options[i + 1]
            return dict(json.loads(text).get("env_vars", {}))
    return {}


def remote(name: str, words: list[str]) -> None:
    """Say what does not run on another machine. Its standard input is not read, so a loop over a host file goes on."""
    command = " ".join(shlex.join([name, *words]).split())
    command = command if len(command) <= 200 else f"{command[:200]}…"
    say(f"left out: {command} (nothing runs on another machine; join the nodes by hand, see docs/cluster.md)")


def sudo(words: list[str]) -> None:
    """The replacement of a command that is replaced, because sudo would find the real one; else the real sudo."""
    rest = list(words)
    while rest and (rest[0].startswith("-") or "=" in rest[0]):
        option = rest.pop(0)
        if option in SUDO_VALUES and rest:
            rest.pop(0)
    if rest and (Path(SHIMS) / Path(rest[0]).name).is_file():
        act(Path(rest[0]).name, rest[1:])
        return
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != SHIMS]
    if (real := shutil.which("sudo", path=os.pathsep.join(folders))) is None:
        raise SystemExit("sudo: command not found")
    os.execv(real, [real, *words])


def act(name: str, words: list[str]) -> None:
    """Act as the command ``name``."""
    if name in ("pkill", "killall"):
        say(f"{name} {' '.join(words)} ends nothing")
    elif name in REMOTE:
        remote(name, words)
    elif name == "sudo":
        sudo(words)
    elif name == "ray":
        ray(words)
    else:
        python(words)


def main() -> None:
    """Act as the command that the first argument names."""
    act(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
