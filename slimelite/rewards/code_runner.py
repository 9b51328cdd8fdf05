"""Runs a program and perhaps its tests: ``python -I code_runner.py PAYLOAD_FD VERDICT_FD``, started by `sandbox`.

The payload is JSON: ``code``, ``tests`` (None: the code is a program that reads stdin) and ``token``, which is written
to VERDICT_FD when the tests have run to their end. Exit status 0 proves nothing: the code may call ``sys.exit``.
"""

import json
import os
import sys


def main(payload_fd: int, verdict_fd: int) -> None:
    """Run code, then tests, in one namespace."""
    with os.fdopen(payload_fd) as file:
        payload = json.load(file)
    # a function's demonstration under `if __name__ == "__main__"` is not run
    namespace = {"__name__": "answer" if payload["tests"] else "__main__"}
    exec(compile(payload["code"], "answer.py", "exec"), namespace)
    if payload["tests"]:
        exec(compile(payload["tests"], "tests.py", "exec"), namespace)
    os.write(verdict_fd, payload["token"].encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
