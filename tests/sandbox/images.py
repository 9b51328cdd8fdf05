"""An image with Python for the tests of containers, from files of this machine: no registry is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# what the attacks, the bombs and the tests of sandboxes call
PROGRAMS = (
    *("sh", "cat", "sleep", "setsid", "true", "env", "ls"),
    *("base64", "chmod", "cp", "head", "ln", "mkdir", "rm", "tar", "timeout", "tr"),  # and a shell of Harbor's tasks
)
LEFT_OUT = ("site-packages", "test", "tests", "__pycache__", "idlelib", "ensurepip", "lib2to3", "tkinter", "config-*")


def build_tree(folder: Path) -> None:
    """Fill ``folder`` with a root file system: some programs, this Python, and the libraries that they need."""
    for name in ("tmp", "proc", "sys", "dev", "run", "etc", "home", "usr/bin", "usr/lib", "usr/local/bin"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    (folder / "usr/lib64").mkdir()
    (folder / "tmp").chmod(0o1777)
    python, library = Path(os.path.realpath(sys.executable)), Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, folder / str(library)[1:], ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    programs = [Path(os.path.realpath(found)) for name in PROGRAMS if (found := shutil.which(name))]
    for path, name in ((python, "python3"), *zip(programs, PROGRAMS, strict=True)):
        target = folder / str(path)[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
        if not (folder / "usr/bin" / name).exists():
            (folder / "usr/bin" / name).symlink_to(path)
    for path in (python, *programs, *(library / "lib-dynload").glob("*.so")):
        for needed in libraries(path):
            target = folder / str(needed)[1:]
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(needed, target)
    (folder / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home:/bin/sh\n")
    (folder / "etc/shadow").write_text("root:*:::::::\n")
    (folder / "etc/shadow").chmod(0o600)


def libraries(path: Path) -> list[Path]:
    """The shared libraries that a program or library is linked with."""
    said = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
    return [Path(word) for line in said.splitlines() for word in line.split() if word.startswith("/")]
