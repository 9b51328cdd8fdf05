"""The example for Claude Code and Codex, with a program of the same command line in their place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROW = {
    "prompt": [{"role": "user", "content": "Mend sums.py."}],
    "metadata": {"files": {"sums.py": "SUM = 3\n"}, "test": "from sums import SUM\n\nassert SUM == 4\n"},
}
# the model's address and key are there, by the names or the option that the agent reads; the prompt and options are too
AGENT = """#!{python}
import os, pathlib, sys
assert "SECRET" not in os.environ and pathlib.Path.home() == pathlib.Path.cwd().parent
assert "Mend sums.py." in sys.argv and sys.argv[sys.argv.index("--mine") + 1] == "x y"
if sys.argv[1] == "exec":
    assert any('base_url="http://model/v1"' in word for word in sys.argv) and os.environ["OPENAI_API_KEY"] == "key"
else:
    assert os.environ["ANTHROPIC_BASE_URL"] == "http://model" and os.environ["ANTHROPIC_API_KEY"] == "key"
{work}
"""


@pytest.mark.parametrize(
    ("agent", "work", "label", "reward"),
    [
        ("claude", "pathlib.Path('sums.py').write_text('SUM = 4')", "", 1.0),
        ("codex", "pathlib.Path('sums.py').write_text('SUM = 4')", "SUM = 4", 1.0),
        ("claude", "print('I do nothing.')", "", 0.0),
        ("codex", "pathlib.Path('test.py').write_text('')", "", 0.0),
        ("claude", "print('SUM = 5', end='')", "SUM = 4", 0.5 * 12 / 14),
        ("claude", "sys.exit('the model is gone')", "", None),
    ],
    ids=["claude-mends", "codex-mends", "does-nothing", "changes-the-test", "says-nearly-what-to-do", "fails"],
)
def test_the_reward_is_what_the_test_says_of_the_agents_work(
    agent: str, work: str, label: str, reward: float | None, tmp_path: Path
) -> None:
    program = tmp_path / "agent"
    program.write_text(AGENT.format(python=sys.executable, work=work))
    program.chmod(0o755)
    model = {"OPENAI_BASE_URL": "http://model/v1", "ANTHROPIC_BASE_URL": "http://model"}
    env = {**model, "OPENAI_API_KEY": "key", "ANTHROPIC_API_KEY": "key", "SECRET": "1", "PATH": "/usr/bin:/bin"}
    example = ROOT / "docs/examples/agent_program/repository.py"
    done = subprocess.run(
        [sys.executable, example, agent, program, "--mine", "x y"],
        input=json.dumps({**ROW, "label": label}) + "\n", env=env, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if reward is None:
        assert (done.returncode, "the model is gone" in done.stderr) == (1, True)
    else:
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["reward"] == pytest.approx(reward)
