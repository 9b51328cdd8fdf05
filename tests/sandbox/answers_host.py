"""Runs a program in the sandbox, as a grading process does: ``python answers_host.py USER LAYERS < program``.

USER is ``root``, or ``plain``: root's capabilities are given up first. LAYERS is ``all``, or the one that is left on:
``seccomp`` or ``landlock``. Prints what the program printed. It finds in ``HOST`` the id of this process, which has a
secret in its environment and is the one to attack.
"""

from __future__ import annotations

import ctypes
import os
import sys

from slimelite.rewards.code import run_code
from slimelite.sandbox import confine

user, layers = sys.argv[1:]
if user == "plain":
    confine.KEPT_CAPABILITIES = 0
    confine.drop_capabilities(ctypes.CDLL(None, use_errno=True), 0)
if layers == "seccomp":
    confine.landlock_abi = lambda: 0
if layers == "landlock":
    confine.has_seccomp = lambda: False
print(run_code(f"HOST = {os.getpid()}\n{sys.stdin.read()}", None, "", seconds=20, memory_mb=1024).output)
