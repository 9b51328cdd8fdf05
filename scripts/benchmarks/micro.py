"""The questions about single parts: engine, trainer, path, start, cores, weight sync, quickstart."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import materials
from harness import HERE, Answer, Figures, Side
from questions import Plan, Say, question
from sides import ANY, GRPO_TINY, Setting, ours, prompts, quickstart_model, read_marks, smollm2, step_figures


def worker(
    s: Setting,
    name: str,
    script: str,
    flags: str,
    figures: Callable[[dict[str, Any]], Figures],
    python: str = sys.executable,
) -> list[Side]:
    """A script of this folder as a side for each checkout. If another interpreter runs it, there is one side."""
    found = []
    for at, checkout in s.checkouts.items():
        marks = s.work / "runs" / f"{name}{at}" / "marks.jsonl"
        command = [python, str(HERE / script), *flags.split(), "--marks", str(marks)]
        path = f"{checkout}:{checkout / 'tests/support/sglang_cpu'}" if python == sys.executable else ""
        found.append(Side(name + at, command, figures, checkout, {"PYTHONPATH": path}, marks, ANY))
        if python != sys.executable:
            break
    return found


def once(sides: Callable[[], Sequence[Side]]) -> Callable[[int], Sequence[Side]]:
    """Sides that are the same in every round."""
    return lambda _: sides()


def engine_plan(s: Setting, model: Path, cases: dict[str, float], rounds: int, batch: str = "") -> Plan:
    """generate() divided by the engine in each case, with its target."""
    flags = f"{' '.join(cases)} --model {model} --rounds {rounds}{batch}"
    answers = []
    for case, target in cases.items():
        for at in s.checkouts:
            side = f"engine{at}"
            asked = (side, f"generate {case}"), (side, f"engine {case}")
            answers.append(Answer(f"{case}: generate() / engine{at}", *asked, None if at else target))
            if batch:
                asked = (side, f"generate_batch {case}"), (side, f"engine {case}")
                answers.append(Answer(f"{case}: generate_batch() / engine{at}", *asked, None if at else 1.0))
    return Plan(once(lambda: worker(s, "engine", "engine_side.py", flags, read_marks("round"))), answers, 1)


@question(
    "engine-tiny", "the embedded engine against generate(), tiny model: batch 1 to 256, prompts 40 to 2,048", 6, True
)
def engine_tiny(s: Setting, say: Say) -> Plan:  # noqa: ARG001
    """Each sequence has its own prompt, or 8 share one. 256 x 2,048 is left out, because generate() takes minutes."""
    model = materials.model(s.work / "tiny", "tiny")
    if s.quick:
        return engine_plan(s, model, {"1x40x16": 1.2, "64x40x16x8": 2.5}, 1)
    cases = {f"{rows}x{prompt}x32": 1.5 for rows in (8, 64, 256) for prompt in (40, 512)}
    shared = {"64x40x32x8": 2.5, "256x40x32x8": 2.5, "64x512x32x8": 2.5}
    return engine_plan(s, model, {"1x40x64": 1.2, **cases, "8x2048x32": 1.5, **shared}, s.rounds or 3)


@question("engine-135m", "the same with SmolLM2-135M's shape: batch 1 to 64, prompts 40 and 512", 20)
def engine_135m(s: Setting, say: Say) -> Plan:  # noqa: ARG001
    """The cases that take a CPU minutes."""
    cases = {"1x40x32": 1.2, "8x40x32": 1.5, "64x40x32": 1.5, "64x40x32x8": 2.5, "8x512x16": 1.5, "8x512x16x8": 2.5}
    return engine_plan(s, smollm2(s), cases, s.rounds or 2)


@question(
    "engine-rivals", "CPU-seconds of 64 x (40 + 32) tokens: generate_batch, vLLM, SGLang, llama.cpp over the engine", 15
)
def engine_rivals(s: Setting, say: Say) -> Plan:  # noqa: ARG001
    """SmolLM2-135M's shape in fp32. Every engine has its own process. Loading and a first batch are left out."""
    model, calls = smollm2(s), 2

    def figures(used: dict[str, Any]) -> Figures:
        spent = [mark["cpu"] for mark in used["marks"]]
        return {"batch_cpu": [b - a for a, b in itertools.pairwise(spent)]}

    rivals = {"sglang": sys.executable, "vllm": s.vllm, "llama": s.llama}

    def sides() -> list[Side]:
        found = worker(s, "embedded", "rival_engine.py", f"embedded --model {model} --calls {calls}", figures)
        for name, python in rivals.items():
            weights = model / "model.gguf" if name == "llama" else model
            if python:
                flags = f"{name} --model {weights} --calls {calls}"
                found += worker(s, name, "rival_engine.py", flags, figures, python)[:1]
        return found

    answers = []
    for name in rivals:
        for at in s.checkouts:
            bound = None if at else 1.0
            answers.append(Answer(f"{name} / engine{at}", (name, "batch_cpu"), (f"embedded{at}", "batch_cpu"), bound))
    pair = engine_plan(s, model, {"64x40x32": 1.5}, 1, " --batch")
    both: Callable[[int], Sequence[Side]] = lambda turn: [*sides(), *pair.sides(turn)]  # noqa: E731
    return Plan(both, [*answers, *pair.answers], s.rounds or 1)


@question("trainer", "useful operations of a training step at 135M over the best of its own matrix products", 6)
def trainer(s: Setting, say: Say) -> Plan:  # noqa: ARG001
    """A group of 8 with a prompt of 512 tokens and 64 of response."""
    flags = f"--model {smollm2(s)} --rounds {s.rounds or 3}"
    answers = []
    for at in s.checkouts:
        asked = (f"trainer{at}", "gflops"), (f"trainer{at}", "gemm_gflops")
        answers.append(Answer(f"useful operations a second / best product{at}", *asked, None if at else 0.8))
    return Plan(once(lambda: worker(s, "trainer", "trainer_side.py", flags, read_marks("round"))), answers, 1)


@question("path", "planning 65,536 samples; 2,048 samples x 512 tokens from engine to micro-batches", 3, quick=True)
def path(s: Setting, say: Say) -> Plan:  # noqa: ARG001
    """16,384 x 4,000 tokens would take gigabytes. path_side.py has sizes as flags, and the cost grows with the
    tokens."""
    model = materials.model(s.work / "tiny", "tiny")
    data = materials.rows(s.work / "tiny-questions.parquet", 256, (40, 220), (60, 200), 168)
    count = s.few(65536, 2048)
    size = f"--samples {s.few(2048, 64)} --tokens {s.few(512, 32)} --model {model} --data {data}"

    def sides() -> list[Side]:
        found = worker(s, "plan", "path_side.py", f"plan --samples {count}", read_marks("round", 0))
        return [*found, *worker(s, "carry", "path_side.py", f"carry {size}", read_marks("round", 0))]

    answers = []
    for at in s.checkouts:
        now = not at
        for name in ("short", "long"):
            asked = (f"plan{at}", f"plan_{name}_cpu")
            title = f"CPU-seconds to plan {count:,} {name} samples{at}"
            answers.append(Answer(title, asked, None, 1.0 if now and not s.quick else None, False))
        asked = (f"carry{at}", "us_per_token")
        # 16,384 x 4,000 tokens in 20 CPU-seconds are 0.31 microseconds a token
        bound = 0.31 if now and not s.quick else None
        answers.append(Answer(f"microseconds a token from engine to micro-batch{at}", asked, None, bound, False))
        asked = (f"carry{at}", "peak_over_table")
        bound = 2.0 if now and not s.quick else None
        answers.append(Answer(f"peak memory / bytes of the table{at}", asked, None, bound, False))
    return Plan(once(sides), answers, s.rounds or s.few(2, 1))


SFT_135M = (
    "--input-key conversation --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss "
    "--calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only --rollout-batch-size 8 "
    "--global-batch-size 8 --optimizer adam --lr 1e-5 --use-dynamic-batch-size --max-tokens-per-gpu 2048"
)


@question("two-ranks", "two ranks on two cores against one rank on one thread, SmolLM2-135M (wall time)", 8)
def two_ranks(s: Setting, say: Say) -> Plan:  # noqa: ARG001
    """SFT of 8 rows of 100 to 420 tokens in each step. The model is sharded, or has two replicas, which gather no
    weights. It needs two cores without other work.
    """
    model, data = smollm2(s), prompts(s, "questions", (40, 220))
    flags = f"--hf-checkpoint {model} --prompt-data {data} {SFT_135M} --num-rollout {s.steps or 4}"

    def sides() -> list[Side]:
        found = []
        for at in s.checkouts:
            for name, more in (("ranks-1", "1"), ("ranks-2", "2"), ("replicas-2", "2 --dp-replicate-size 2")):
                own = f"{flags} --actor-num-gpus-per-node {more}".split()
                found.append(ours(s, at, name, own, step_figures(1)))
        return found

    answers = []
    for at in s.checkouts:
        for two, target in (("ranks-2", None), ("replicas-2", 1.7)):
            asked = (f"ranks-1{at}", "step_wall"), (f"{two}{at}", "step_wall")
            answers.append(Answer(f"wall time of a step: one rank / {two}{at}", *asked, None if at else target))
    return Plan(once(sides), answers, s.rounds or 1)


@question("async", "a step with --async-rollout over the longer of its halves, SmolLM2-135M (wall time)", 8)
def async_rollout(s: Setting, say: Say) -> Plan:  # noqa: ARG001
    """Generation and training are also timed alone, each in a run in which it has the machine for itself."""
    model, data = smollm2(s), prompts(s, "questions", (40, 220))
    flags = (
        f"--hf-checkpoint {model} --prompt-data {data} --input-key messages --label-key label --apply-chat-template "
    )
    flags += "--rm-type random --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 64 "
    flags += "--global-batch-size 16 --lr 1e-6 --use-dynamic-batch-size "
    flags += f"--max-tokens-per-gpu 2048 --num-rollout {s.steps or 5}"

    def halves(used: dict[str, Any]) -> Figures:
        lines = [mark["line"] for mark in used["marks"]]
        longer = []
        for name in ("perf/rollout_time", "perf/train_time"):
            values = [line[name] for line in lines if name in line][1:]
            longer.append(sum(values) / len(values))
        return {**step_figures(1)(used), "longer_half": [max(longer)], "shorter_half": [min(longer)]}

    def sides() -> list[Side]:
        found = []
        for at in s.checkouts:
            found.append(ours(s, at, "sync", flags.split(), halves))
            found.append(ours(s, at, "async", [*flags.split(), "--async-rollout"], step_figures(1)))
        return found

    answers = []
    for at in s.checkouts:
        asked = (f"async{at}", "step_wall"), (f"sync{at}", "longer_half")
        answers.append(Answer(f"async step / longer half{at}", *asked, None if at else 1.15, False))
    return Plan(once(sides), answers, s.rounds or 1)


# frames of a stack that are the model, its optimizer, the engine, or the grading of answers
WORK = re.compile(r"torch/(nn|autograd|optim)/|torch/_tensor.py|transformers/models|engines/embedded|slimelite/rewards")
# frames under which a run's steps happen: the loop of train.py, the rollout's and the engine's threads
STEPS = re.compile(r"\btrain \(.*train\.py|threading\.py")
# a thread that waits: py-spy takes it for a busy one where the machine is busy
IDLE = re.compile(r"(^|;)(\w+\.)*(wait|_worker|select|_wait_for_tstate_lock) \([^;]*$")


def overhead(samples: Path) -> Figures:
    """Shares of a py-spy file's samples (lines "frame;frame;… count") within the steps that belong to none of
    `WORK`."""
    total = own = 0
    for line in samples.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        if STEPS.search(stack) and "_find_and_load" not in stack and not IDLE.search(stack):
            total += int(count)
            own += int(count) * (not WORK.search(stack))
    return {"own_share": [own / total], "samples": [float(total)]}


def overhead_plan(s: Setting, flags: str, target: float, steps: int) -> Plan:
    """Runs of ours under py-spy, 50 samples a second."""

    def sides() -> list[Side]:
        found = []
        for at in s.checkouts:
            stacks = s.work / f"stacks{at}.txt"
            plain = ours(s, at, "profiled", f"{flags} --launcher local --num-rollout {steps}".split(), step_figures(1))
            spy = [
                "py-spy",
                "record",
                "--rate",
                "50",
                "--format",
                "raw",
                "--full-filenames",
                "--output",
                str(stacks),
                "--",
            ]

            def figures(used: dict[str, Any], stacks: Path = stacks) -> Figures:
                return {**overhead(stacks), **step_figures(1)(used)}

            command = [
                shutil.which("py-spy", path=str(Path(sys.executable).parent)) or spy[0],
                *spy[1:],
                *plain.command,
            ]
            found.append(Side(plain.name, command, figures, plain.cwd, plain.env, plain.watch, plain.marks))
        return found

    answers = []
    for at in s.checkouts:
        asked = (f"profiled{at}", "own_share")
        answers.append(Answer(f"own share of a step{at}", asked, None, None if at else target, False))
    return Plan(once(sides), answers, s.rounds or 2)


@question("overhead-tiny", "share of a tiny model's step that is neither model, sampler nor grader (py-spy)", 4)
def overhead_tiny(s: Setting, say: Say) -> Plan:  # noqa: ARG001
    """The quickstart's task with random rewards, so that every row is trained on."""
    model, data = quickstart_model(s)
    flags = f"--hf-checkpoint {model} --prompt-data {data}/train.parquet {GRPO_TINY} --rm-type random --lr 1e-7"
    return overhead_plan(s, flags, 0.12, s.steps or 60)


@question("overhead-135m", "the same at 135M, 4 x 8 x 32", 6)
def overhead_135m(s: Setting, say: Say) -> Plan:  # noqa: ARG001
    """SmolLM2's shape."""
    data = prompts(s, "questions", (40, 220))
    flags = f"--hf-checkpoint {smollm2(s)} --prompt-data {data} {GRPO_TINY} --rm-type random --lr 1e-7"
    flags += " --rollout-batch-size 4 --global-batch-size 32 --max-tokens-per-gpu 2048"
    return overhead_plan(s, flags, 0.01, s.steps or 3)


@question("sync", "a whole weight update by every way that a CPU has, and its limits (wall time)", 6)
def sync(s: Setting, say: Say) -> Plan:  # noqa: ARG001
    """SmolLM2's shape, 538 MB."""
    flags = f"--model {smollm2(s)} --rounds {s.rounds or 3}"
    ways = ("embedded", "sglang_nccl", "sglang_disk", "sglang_http")
    answers = []
    for at in s.checkouts:
        for way in ways:
            asked = (f"sync{at}", f"{way}_wall"), (f"sync{at}", "limit_copy_wall")
            answers.append(Answer(f"{way} / a copy in memory{at}", *asked, None, False))
    return Plan(once(lambda: worker(s, "sync", "sync_side.py", flags, read_marks("round", 0))), answers, 1)


@question("quickstart", "bash scripts/quickstart.sh, installed: wall time on two quiet cores", 3)
def quickstart(s: Setting, say: Say) -> Plan:  # noqa: ARG001
    """Seed 0, then 1, … for each round. Threads are as a user has them."""
    _, data = quickstart_model(s)
    fake = s.work / "venv"
    fake.mkdir(exist_ok=True)
    for part in Path(sys.prefix).iterdir():
        if not part.name.startswith(".") and not (fake / part.name).exists():
            (fake / part.name).symlink_to(part)

    def figures(used: dict[str, Any]) -> Figures:
        scores = [mark["line"]["eval/heldout"] for mark in used["marks"] if "eval/heldout" in mark["line"]]
        return {"accuracy": scores[-1:], "reached": [float(scores[-1] >= 0.9)]}

    def sides(turn: int) -> list[Side]:
        found = []
        for at, checkout in s.checkouts.items():
            # setup.sh leaves an environment alone whose stamp lists its packages
            stamp = '.slimelite-$(cat constraints.txt pyproject.toml | cksum | cut -d" " -f1)-gpu-false-dev-false'
            listing = f'(cd "$1" && ls -d lib/python*/site-packages/*.dist-info) > "$1/{stamp}"'
            subprocess.run(["bash", "-c", listing, "-", str(fake)], cwd=checkout, check=True)
            out = s.work / "runs" / f"quickstart{at}"
            env = {"OUT": str(out), "DATA": str(data), "SEED": str(turn), "VENV": os.path.relpath(fake, checkout)}
            env |= {"OMP_NUM_THREADS": "", "MKL_NUM_THREADS": "", "PYTHONPATH": str(checkout)}
            command = ["bash", str(checkout / "scripts/quickstart.sh")]
            metrics = out / "grpo/metrics.jsonl"
            found.append(Side(f"quickstart{at}", command, figures, checkout, env, metrics, ANY))
        return found

    answers = []
    for at in s.checkouts:
        asked = (f"quickstart{at}", "wall")
        answers.append(Answer(f"wall time [s]{at}", asked, None, None if at else 65.0, False))
        answers.append(Answer(f"reached 0.9{at}", (f"quickstart{at}", "reached"), None, None))
    return Plan(sides, answers, s.rounds or 1)
