"""Claude Code and Codex train on a small repository, with a scripted or a real model. The result is a table.

    python scripts/fetch_smollm2.py data/SmolLM2-135M-Instruct
    python scripts/lab/client_agents.py data/SmolLM2-135M-Instruct OUT claude=PATH codex=PATH
    python scripts/lab/client_agents.py data/SmolLM2-135M-Instruct OUT claude=PATH --real --rollouts 2

Distance is the mean |trainer's - engine's log-prob| of sampled tokens. The table has the largest of all rollouts. PATH
is the agent's program; `scripts/test_clients.sh` installs both. The scripted model has random weights and the real
model's tokenizer. It replies by a script (`scripts/lib/scripted_engine.py`), with the log-probs of its weights.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "lib")]

from scripted_engine import END, REPLIES, TASK  # noqa: E402

from slimelite.base.version import add_version  # noqa: E402
from slimelite.samples.sample import Sample  # noqa: E402
from slimelite.samples.table import SampleTable  # noqa: E402

ROW = {
    "messages": [{"role": "user", "content": TASK}],
    "label": "def add(a, b):\n    return a + b\n",
    "metadata": {
        "files": {"sums.py": "def add(a, b):\n    return a - b\n"},
        "test": "from sums import add\n\nassert (add(2, 3), add(2, 2)) == (5, 4)\n",
    },
}
CONTEXT = {"scripted": 40960, "real": 8192}
# tokens of a reply; the agents fail when one is cut off
LONGEST = {"scripted": 64, "real": 256}
# the real model ends a reply with its first paragraph; it would often go on until it is cut off
STOP = "\n\n"
INSTRUCTIONS = "You mend code."
COLUMNS = ("episodes", "failed", "turns", "branches", "trained tokens", "reward 1", "prompt tokens", "distance")


def short(agent: str, out: Path) -> list[str]:
    """The options that make an agent's prompt short: the real model's context is 8,192 tokens."""
    if agent == "claude":
        return ["--tools", "Read,Edit", "--system-prompt", INSTRUCTIONS]
    (out / "instructions.md").write_text(INSTRUCTIONS)
    off = ["features.multi_agent", "features.goals", "features.view_image", "features.unified_exec"]
    off += ["skills.include_instructions", "skills.bundled.enabled", "include_permissions_instructions"]
    off += ["include_environment_context", "tools.experimental_request_user_input.enabled"]
    values = [
        f"model_instructions_file={out}/instructions.md",
        "web_search=disabled",
        *(f"{name}=false" for name in off),
    ]
    return [word for value in values for word in ("-c", value)]


def prepare(model: str, out: Path, kind: str) -> None:
    """Write the rows, and the model with a chat template that has tools."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = json.loads((ROOT / "tests/data/chat_cases.json").read_text())["templates"]["qwen2_5"]
    tokenizer.save_pretrained(out / kind)
    if kind == "real":
        AutoModelForCausalLM.from_pretrained(model).save_pretrained(out / kind)
        return
    sizes = {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT[kind]}
    config = AutoConfig.from_pretrained(model)
    config.update(sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(out / kind)


def train(agent: str, program: str, out: Path, kind: str, rollouts: int) -> Path:
    """Train, and return the run folder."""
    run = out / f"run-{kind}-{agent}"
    options = short(agent, out) if kind == "real" else []
    words = [sys.executable, "docs/examples/agent_program/repository.py", agent, program, *options]
    flags: dict[str, object] = {
        "hf-checkpoint": out / kind,
        "prompt-data": out / "rows.jsonl",
        "input-key": "messages",
        "label-key": "label",
        "metadata-key": "metadata",
        "agent-command": shlex.join(words),
        "agent-programs": 1,
        "agent-timeout": 900,
        "num-rollout": rollouts,
        "rollout-batch-size": 1,
        "n-samples-per-prompt": 2,
        "rollout-max-response-len": LONGEST[kind],
        "rollout-max-context-len": CONTEXT[kind],
        "max-tokens-per-gpu": CONTEXT[kind],
        "lr": 1e-4,
        "run-dir": run,
        "dump-details": run / "details",
    }
    if kind == "scripted":
        flags |= {"import-file": "scripts/lib/scripted_engine.py", "rollout-backend": "scripted"}
    else:
        flags["rollout-stop"] = STOP
    command = [sys.executable, "train.py", "--launcher", "local", "--use-dynamic-batch-size"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    subprocess.run(command, cwd=ROOT, check=True)
    return run


def look(run: Path, tokenizer: Any, scripted: bool) -> dict[str, object]:
    """The values of `COLUMNS`. Each sample is first compared with the turns of its episode.

    Raises:
        AssertionError: a branch or a sampled token is missing, or something else is trained on.
    """
    episodes: dict[int | None, list[Sample]] = defaultdict(list)
    for file in sorted((run / "details").rglob("*.parquet")):
        for group in SampleTable.from_parquet(file).to_samples():
            for sample in group:
                episodes[sample.index].append(sample)
    found: Counter[str] = Counter()
    prompts = []
    for branches in episodes.values():
        facts = branches[0].metadata["episode"]
        turns, trained = facts["timeline"], sum(sum(sample.loss_mask) for sample in branches)
        leaves = {turn["turn"] for turn in turns} - {turn["parent"] for turn in turns}
        assert len(branches) == max(1, len(leaves)), "each branch is a sample"
        assert trained == sum(turn["tokens"] for turn in turns), "each sampled token is trained on once"
        said = [said_in(sample, tokenizer) for sample in branches]
        if scripted:
            replies = "".join(said).split(END)
            assert replies.pop() == "", "each reply ends"
            assert len(replies) == len(turns), "each reply is there"
            assert set(replies) <= REPLIES, "nothing but the script is trained on"
        prompts += [len(sample.tokens) - sample.response_length for sample in branches]
        found.update({"episodes": 1, "failed": facts["errors"] + facts["timeouts"], "turns": len(turns)})
        found.update({"branches": len(branches), "trained tokens": trained, "reward 1": int(branches[0].reward == 1)})
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    distances = [line[name] for line in lines if (name := "train/train_rollout_logprob_abs_diff") in line]
    largest = f"{max(distances):.1e}"
    return {**found, "prompt tokens": f"{min(prompts):,} to {max(prompts):,}", "distance": largest}


def said_in(sample: Sample, tokenizer: Any) -> str:
    """The text of the trained tokens."""
    ids = sample.tokens[len(sample.tokens) - sample.response_length :]
    return str(tokenizer.decode([token for token, mask in zip(ids, sample.loss_mask, strict=True) if mask]))


def main() -> None:
    """Train each agent, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("model", help="Hugging Face folder of the real model")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("agents", nargs="+", metavar="claude=PATH, codex=PATH")
    parser.add_argument("--real", action="store_true", help="train the real model instead of the scripted one")
    parser.add_argument("--rollouts", type=int, default=10)
    args = parser.parse_args()
    out, kind = args.out.resolve(), "real" if args.real else "scripted"
    prepare(args.model, out, kind)
    tokenizer = AutoTokenizer.from_pretrained(out / kind)
    rows = [f"| agent, model | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * len(COLUMNS)]
    for agent, _, program in (each.partition("=") for each in args.agents):
        run = train(agent, str(Path(program).absolute()), out, kind, args.rollouts)
        found = look(run, tokenizer, not args.real)
        rows.append(f"| {agent}, {kind} | {' | '.join(str(found[column]) for column in COLUMNS)} |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
