"""The commands of `train.py` and of TRL for the same work, and the meaning of their marks."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import materials
import pyarrow.parquet as pq
from harness import HERE, ONE_THREAD, ROOT, Figures, Side, SideFailed, measure

ANY = ('"kind"',)
# the lines that end a step: of metrics.jsonl, and of trl_side.py
STEP_ENDS = ("perf", "step")
PACKED = ["--use-dynamic-batch-size", "--max-tokens-per-gpu"]


@dataclass
class Setting:
    """The settings of a benchmark run.

    ``checkouts``: name -> folder of the measured slimelite. "" is this one, "@before" an earlier one. ``trl``,
    ``vllm``, ``llama``: interpreters of the rivals' environments; None leaves the rival out.
    """

    work: Path
    checkouts: dict[str, Path] = field(default_factory=lambda: {"": ROOT})
    trl: str | None = None
    vllm: str | None = None
    llama: str | None = None
    smollm2: Path | None = None
    data: Path | None = None
    rounds: int | None = None
    steps: int | None = None
    prompts: int | None = None
    trl_batch: int | None = None
    quick: bool = False
    # what was tried to find a rival's best setting
    notes: dict[str, Any] = field(default_factory=dict)

    def few(self, usual: int, quick: int) -> int:
        """``usual``, or ``quick`` in the short run of continuous integration."""
        return quick if self.quick else usual


def worked(marks: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Every mark's line with the CPU-seconds until then. The time between an evaluation and the mark before it does not
    count.

    In steps with an evaluation, the weight sync is left out too. That is 0.02 s of a tiny model's step.
    """
    found, evaluating, before = [], 0.0, 0.0
    for mark in marks:
        if mark["line"]["kind"] == "eval":
            evaluating += mark["cpu"] - before
        found.append((mark["line"], mark["cpu"] - evaluating))
        before = mark["cpu"]
    return found


def step_figures(skip: int, goal: float | None = None, score: str = "score") -> Callable[[dict[str, Any]], Figures]:
    """Figures of a run of steps: CPU-seconds to the end of the first step, and of a step after the first ``skip``.

    If the lines have them, also generated tokens and the share of computed rows in those steps. Also the CPU-seconds to
    the first evaluation that reaches ``goal``. If none does, they are those of the whole run, and ``reached`` is 0.
    """

    def figures(used: dict[str, Any]) -> Figures:
        lines = worked(used["marks"])
        ends = [cpu for line, cpu in lines if line["kind"] in STEP_ENDS]
        walls = [mark["wall"] for mark in used["marks"] if mark["line"]["kind"] in STEP_ENDS]
        counted = len(ends) - 1 - skip
        if counted < 1:
            raise LookupError(f"{len(ends)} steps are too few to leave out {skip} and the first")
        found: Figures = {"start_cpu": [ends[0]], "start_wall": [walls[0]]}
        found["step_cpu"] = [(ends[-1] - ends[skip]) / counted]
        found["step_wall"] = [(walls[-1] - walls[skip]) / counted]
        found["ends_cpu"] = [ends[-1]]
        for name, key in (("rows_computed", "perf/computed_rows_ratio"), ("tokens", "perf/generated_tokens")):
            values = [line[key] for line, _ in lines if key in line][skip + 1 :]
            if values:
                found[name] = [statistics.fmean(values)]
        lengths = [line["completions/mean_length"] for line, _ in lines if "completions/mean_length" in line]
        if lengths[skip + 1 :]:
            found["mean_length"] = [statistics.fmean(lengths[skip + 1 :])]
        if goal is not None:
            reached = [cpu for line, cpu in lines if line["kind"] == "eval" and line.get(score, 0) >= goal]
            found |= {"to_goal_cpu": [reached[0] if reached else lines[-1][1]], "reached": [float(bool(reached))]}
        return found

    return figures


def token_figures(skip: int) -> Callable[[dict[str, Any]], Figures]:
    """CPU-seconds for 1,000 trained tokens (prompts and replies), after the first ``skip`` steps or rollouts."""

    def figures(used: dict[str, Any]) -> Figures:
        found, total, seen = step_figures(skip)(used), 0.0, list[tuple[float, float]]()
        for line, cpu in worked(used["marks"]):
            if "perf/actor_train_tok_per_s" in line:
                total += line["perf/actor_train_tok_per_s"] * line["perf/actor_train_time"]
            total = max(total, line.get("num_tokens", 0.0))
            # TRL logs a step's tokens after the step's end
            if line["kind"] == "perf" or "num_tokens" in line:
                seen.append((total, cpu))
        (tokens, cpu), (last_tokens, last_cpu) = seen[skip], seen[-1]
        return {**found, "cpu_per_1000_tokens": [1000 * (last_cpu - cpu) / (last_tokens - tokens)]}

    return figures


def ours(
    s: Setting,
    at: str,
    name: str,
    flags: Sequence[str],
    figures: Callable[[dict[str, Any]], Figures],
    env: dict[str, str] | None = None,
) -> Side:
    """``python train.py`` of the checkout ``at``, in its own run folder."""
    run = s.work / "runs" / (name + at)
    shutil.rmtree(run, ignore_errors=True)
    checkout = s.checkouts[at]
    command = [sys.executable, str(checkout / "train.py"), *flags, "--run-dir", str(run)]
    environment = {"PYTHONPATH": str(checkout), **(env or {})}
    return Side(name + at, command, figures, checkout, environment, run / "metrics.jsonl", ANY)


def trl(s: Setting, task: str, flags: Sequence[str], figures: Callable[[dict[str, Any]], Figures]) -> Side:
    """TRL's side."""
    marks = s.work / "runs" / f"trl-{task}" / "marks.jsonl"
    command = [str(s.trl), str(HERE / "trl_side.py"), task, *flags, "--marks", str(marks)]
    return Side("TRL", command, figures, s.work, {"PYTHONPATH": ""}, marks, ANY)


def fastest(s: Setting, name: str, candidates: dict[str, Side], figure: str, say: Callable[[str], None]) -> str:
    """Run each candidate once, and return the name of the one with the smallest figure. `Setting.notes` keeps all
    figures."""
    found: dict[str, float] = {}
    for label, side in candidates.items():
        try:
            used = measure(side, s.work / "sides" / "fastest")
            found[label] = round(side.figures(used)[figure][0], 4)
        except (SideFailed, LookupError) as error:
            s.notes.setdefault("failed", {})[f"{name} {label}"] = str(error)[:800]
        say(f"  {name} with {label}: {found.get(label, 'failed')}")
    s.notes[name] = found
    if not found:
        raise SideFailed(f"no setting of {name} ran: {s.notes['failed']}")
    return min(found, key=lambda label: found[label])


def quickstart_model(s: Setting) -> tuple[Path, Path]:
    """The quickstart's SFT model and its data, made once in the work folder with this checkout."""
    data, model = s.work / "quickstart", s.work / "quickstart-sft"
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def run(*command: str) -> None:
        subprocess.run([sys.executable, *command], check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    if not (data / "pairs.parquet").is_file():
        run("scripts/prepare_data.py", "quickstart", "--out", str(data))
    if not (data / "heldout-250.parquet").is_file():
        rows = pq.read_table(data / "heldout.parquet").slice(0, 250)
        pq.write_table(rows, data / "heldout-250.parquet")
    if s.quick:
        model = s.work / "quickstart-quick"
    if not (model / "model.safetensors").is_file():
        sft = f"--hf-checkpoint {data}/model --prompt-data {data}/sft.parquet {SFT_TINY} --lr-decay-style linear"
        sft += f" --num-rollout {s.few(10, 1)} --rollout-batch-size {s.few(3200, 640)} --save-hf {model}"
        run("train.py", *sft.split(), "--launcher", "local", "--run-dir", str(s.work / "runs" / "sft-model"))
    return model, data


# the quickstart's own flags, on every side of its questions
SFT_TINY = (
    "--input-key messages --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss "
    "--calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only --rollout-shuffle "
    "--global-batch-size 64 --optimizer muon --muon-lr 0.02 --lr 5e-3 --use-dynamic-batch-size "
    "--max-tokens-per-gpu 16384"
)
GRPO_TINY = (
    "--input-key messages --label-key label --apply-chat-template --rollout-shuffle --rollout-batch-size 32 "
    "--n-samples-per-prompt 8 --rollout-max-response-len 32 --global-batch-size 256 --advantage-estimator grpo "
    "--eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-3 --lr-warmup-iters 5 --use-dynamic-batch-size "
    "--max-tokens-per-gpu 16384"
)


def smollm2(s: Setting) -> Path:
    """SmolLM2-135M: the folder of ``--smollm2``, or random weights of its shape."""
    return s.smollm2 or materials.model(s.work / "smollm2", "smollm2")


def prompts(s: Setting, name: str, lengths: tuple[int, int]) -> Path:
    """A parquet file of 256 prompts: ``--data``, or made with these lengths. Replies have 60 to 200 tokens."""
    vocabulary = materials.SHAPES["smollm2"]["vocab_size"]
    return s.data or materials.rows(s.work / f"smollm2-{name}.parquet", 256, lengths, (60, 200), vocabulary)


def read_marks(kind: str, skip: int = 1) -> Callable[[dict[str, Any]], Figures]:
    """The figures that a worker script writes itself: the numbers in its lines of this kind, after ``skip`` warm-up
    lines."""

    def figures(used: dict[str, Any]) -> Figures:
        lines = [mark["line"] for mark in used["marks"] if mark["line"]["kind"] == kind][skip:]
        if not lines:
            raise LookupError(f"no lines of kind {kind!r}: {json.dumps(used['marks'])[:300]}")
        names = [name for name in lines[0] if name != "kind"]
        return {name: [line[name] for line in lines] for name in names if isinstance(lines[0][name], int | float)}

    return figures
