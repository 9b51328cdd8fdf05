"""Claude Code or Codex mends a small repository. The reward is 1 if its test passes afterwards, else 0.

    repository.py claude|codex PROGRAM [OPTION ...]

PROGRAM is the path of the agent's program. Options go to the agent, such as ``--tools Bash`` to Claude Code. A row's
metadata has ``files``, name -> text, and ``test``, the text of test.py. A row may have a label, such as the mended
file's text. Then work that fails the test earns up to 0.5, by how alike the agent's last words and the label are. The
script needs only the standard library.
"""

import difflib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# the agent sees nothing else of the run's environment
KEPT = ("PATH", "NO_PROXY", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
QUIET = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER")


def command(agent, program, options, prompt):
    """The command of the agent without its screen. It runs each command that the model calls, without asking."""
    if agent == "claude":
        return [program, "-p", prompt, "--allowedTools", "Bash,Edit,Read,Write", *options]
    provider = (
        f'{{name="run",base_url="{os.environ["OPENAI_BASE_URL"]}",env_key="OPENAI_API_KEY",wire_api="responses"}}'
    )
    words = [program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "mine"]
    return [*words, "-c", f"model_providers.run={provider}", "-c", "model_provider=run", *options, prompt]


agent, program, *options = sys.argv[1:]
row = json.loads(sys.stdin.readline())
with tempfile.TemporaryDirectory() as home:
    work = Path(home, "work")
    work.mkdir()
    for name, text in {**row["metadata"]["files"], "test.py": row["metadata"]["test"]}.items():
        (work / name).write_text(text)
    env = {name: os.environ[name] for name in KEPT if name in os.environ} | dict.fromkeys(QUIET, "1") | {"HOME": home}
    words = command(agent, program, options, row["prompt"][-1]["content"])
    done = subprocess.run(words, cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    if done.returncode:
        sys.exit(f"{agent} ended with status {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    # once more, because the agent may have changed it
    (work / "test.py").write_text(row["metadata"]["test"])
    test = subprocess.run([sys.executable, "test.py"], cwd=work, capture_output=True, timeout=20)
alike = difflib.SequenceMatcher(None, done.stdout, row["label"]).ratio() if row.get("label") else 0.0
print(json.dumps({"reward": 1.0 if test.returncode == 0 else alike / 2}))
