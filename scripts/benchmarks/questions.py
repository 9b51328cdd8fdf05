"""The questions that need a whole training run: ours in one process and with Ray, compared with TRL.

A question is a function of the `Setting` that returns a `Plan`. `micro.py` has the questions about single parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import Answer, Side
from sides import (
    GRPO_TINY,
    SFT_TINY,
    Setting,
    fastest,
    ours,
    prompts,
    quickstart_model,
    smollm2,
    step_figures,
    token_figures,
    trl,
)

Say = Callable[[str], None]
LAUNCHERS = ("local", "ray")


@dataclass(frozen=True)
class Plan:
    """``sides(round)`` run in turn ``rounds`` times. ``answers`` are computed from their figures."""

    sides: Callable[[int], Sequence[Side]]
    answers: Sequence[Answer]
    rounds: int = 3


@dataclass(frozen=True)
class Question:
    """``minutes``: roughly how long it takes on two quiet cores. ``quick``: it is a part of the tests' short run."""

    text: str
    plan: Callable[[Setting, Say], Plan]
    minutes: float
    quick: bool = False


QUESTIONS: dict[str, Question] = {}


def question(
    name: str, text: str, minutes: float, quick: bool = False
) -> Callable[[Callable[[Setting, Say], Plan]], Callable[[Setting, Say], Plan]]:
    """Register a question. With ``quick`` it is in the short run of continuous integration."""

    def register(plan: Callable[[Setting, Say], Plan]) -> Callable[[Setting, Say], Plan]:
        QUESTIONS[name] = Question(text, plan, minutes, quick)
        return plan

    return register


def against_trl(s: Setting, title: str, figure: str, targets: dict[str, float | None]) -> list[Answer]:
    """TRL's figure divided by ours, for each launcher with a target and each checkout. Also ours divided by the earlier
    checkout's."""
    found = []
    for launcher, target in targets.items():
        for at in s.checkouts:
            bound = None if at else target
            if s.trl:
                found.append(Answer(f"{title}: TRL / {launcher}{at}", ("TRL", figure), (launcher + at, figure), bound))
        if "@before" in s.checkouts:
            found.append(
                Answer(f"{title}: {launcher}, before / now", (f"{launcher}@before", figure), (launcher, figure))
            )
    return found


def trl_grpo(s: Setting, say: Say, name: str, flags: list[str], rows: int, probe: int, skip: int) -> list[str]:
    """TRL's flags with the fastest of its batch sizes. A try has ``probe`` steps, of which ``skip`` and the first are
    warm-up."""
    sizes = [s.trl_batch] if s.trl_batch else sorted({b for b in (8, 16, 64, rows) if b <= rows})
    tries = {str(b): [*flags, "--rows", str(rows), "--batch", str(b)] for b in sizes}
    if len(tries) == 1 or not s.trl:
        return next(iter(tries.values()))
    sides = {b: trl(s, "grpo", [*f, "--steps", str(probe)], step_figures(skip)) for b, f in tries.items()}
    return tries[fastest(s, f"TRL's batch size for {name}", sides, "step_cpu", say)]


def grpo_plan(
    s: Setting,
    model: Path,
    data: Path,
    ours_flags: str,
    trl_flags: list[str],
    steps: int,
    skip: int,
    launchers: Sequence[str],
) -> Callable[[int], list[Side]]:
    """Ours with each launcher in each checkout, and TRL. Each round has another seed."""

    def sides(turn: int) -> list[Side]:
        found = []
        for launcher in launchers:
            for at in s.checkouts:
                own = f"--hf-checkpoint {model} --prompt-data {data} {ours_flags} --num-rollout {steps}"
                own += f" --launcher {launcher} --seed {turn} --rollout-seed {turn}"
                found.append(ours(s, at, launcher, own.split(), step_figures(skip)))
        if s.trl:
            theirs = [*trl_flags, "--steps", str(steps), "--seed", str(turn)]
            found.append(trl(s, "grpo", theirs, step_figures(skip)))
        return found

    return sides


@question("grpo-tiny", "a GRPO step of a tiny model with a gradient in every row, and the start", 5, quick=True)
def grpo_tiny(s: Setting, say: Say) -> Plan:
    """Rewards are random, so that no group drops out. The learning rate changes nothing, so that responses keep their
    first length, about 10 tokens on both sides.
    """
    model, data = quickstart_model(s)
    steps, skip = s.steps or s.few(24, 3), s.few(3, 0)
    flags = f"--model {model} --data {data}/train.parquet --reward random --new-tokens 32 --lr 1e-7".split()
    best = trl_grpo(s, say, "tiny", flags, 256, 8, 2)
    launchers = ("local",) if s.quick else LAUNCHERS
    ours_flags = f"{GRPO_TINY} --rm-type random --lr 1e-7"
    sides = grpo_plan(s, model, data / "train.parquet", ours_flags, best, steps, skip, launchers)
    answers = against_trl(s, "step", "step_cpu", {"local": 1.6, "ray": 1.3})
    answers += against_trl(s, "to the end of the first step", "start_cpu", {"local": None, "ray": None})
    for launcher, bound in (("local", None), ("ray", 20.0)):
        answers.append(
            Answer(f"CPU-seconds to the end of the first step, {launcher}", (launcher, "start_cpu"), None, bound, False)
        )
    answers.append(Answer("CPU-seconds of a step, local", ("local", "step_cpu"), None, None, False))
    return Plan(sides, answers, s.rounds or s.few(3, 1))


@question("grpo-tiny-learn", "the quickstart's task as users run it: a step after warm-up, CPU-seconds to 0.9", 7)
def grpo_tiny_learn(s: Setting, say: Say) -> Plan:
    """Groups become all right after some steps, and then have no gradient. Ours leaves their rows out."""
    model, data = quickstart_model(s)
    steps, skip, heldout = s.steps or 40, 19, data / "heldout-250.parquet"
    flags = f"--model {model} --data {data}/train.parquet --reward answer --new-tokens 32".split()
    best = trl_grpo(s, say, "tiny", flags, 256, 8, 2)
    goal = 0.9

    def sides(turn: int) -> list[Side]:
        found = []
        for launcher in LAUNCHERS:
            for at in s.checkouts:
                own = f"--hf-checkpoint {model} --prompt-data {data}/train.parquet {GRPO_TINY} --rm-type gsm8k"
                own += f" --num-rollout {steps} --launcher {launcher} --seed {turn} --rollout-seed {turn}"
                own += f" --eval-interval 2 --eval-prompt-data heldout {heldout} --eval-top-k 1"
                found.append(ours(s, at, launcher, own.split(), step_figures(skip, goal, "eval/heldout")))
        if s.trl:
            own = f"--steps {steps} --seed {turn} --evaluate {heldout} --eval-every 2"
            found.append(trl(s, "grpo", [*best, *own.split()], step_figures(skip, goal)))
        return found

    answers = against_trl(s, "step after warm-up", "step_cpu", {"local": 2.2, "ray": 1.8})
    answers += against_trl(s, "CPU-seconds to greedy 0.9", "to_goal_cpu", {"local": 2.0, "ray": 2.0})
    for side in ("local", *(["TRL"] if s.trl else [])):
        answers.append(Answer(f"reached 0.9 within {steps} steps, {side}", (side, "reached"), None, None))
    answers.append(Answer("computed_rows_ratio, local", ("local", "rows_computed"), None, None, False))
    return Plan(sides, answers, s.rounds or 3)


def grpo_135m(s: Setting, say: Say, name: str, lengths: tuple[int, int], target: float) -> Plan:
    """8 prompts (``--prompts``) x 8 samples x 64 tokens. The run has three steps, which include start-up and the first
    step."""
    model, data = smollm2(s), prompts(s, name, lengths)
    steps, groups = s.steps or 3, s.prompts or 8
    flags = f"--model {model} --data {data} --reward random --new-tokens 64 --lr 1e-5".split()
    best = trl_grpo(s, say, f"SmolLM2, {name}", flags, groups * 8, 2, 0)
    own = "--input-key messages --label-key label --apply-chat-template --rm-type random --n-samples-per-prompt 8 "
    own += f"--rollout-batch-size {groups} --global-batch-size {groups * 8} --rollout-max-response-len 64 "
    own += "--optimizer adam --lr 1e-5 --lr-warmup-iters 5 --eps-clip 0.2 --eps-clip-high 0.28 "
    own += "--use-dynamic-batch-size --max-tokens-per-gpu 1024"
    sides = grpo_plan(s, model, data, own, best, steps, 0, ("local",))
    answers = against_trl(s, f"{steps} steps from the start", "ends_cpu", {"local": target})
    answers += against_trl(s, "a step after the first", "step_cpu", {"local": None})
    if s.trl:
        for at in s.checkouts:
            asked = (f"local{at}", "peak_pss_gb"), ("TRL", "peak_pss_gb")
            answers.append(Answer(f"peak memory: local{at} / TRL", *asked, None if at else 0.8, False))
    return Plan(sides, answers, s.rounds or 1)


@question("grpo-135m", "SmolLM2-135M, 8 x 8 x 64, questions as long as GSM8K's: three steps, and peak memory", 25)
def grpo_135m_short(s: Setting, say: Say) -> Plan:
    """See `grpo_135m`."""
    return grpo_135m(s, say, "questions", (40, 220), 2.5)


@question("grpo-135m-512", "the same with prompts of 512 tokens", 60)
def grpo_135m_long(s: Setting, say: Say) -> Plan:
    """See `grpo_135m`."""
    return grpo_135m(s, say, "long", (512, 512), 4.5)


def supervised(
    s: Setting, say: Say, task: str, own: str, tries: dict[str, str], target: float, skips: tuple[int, int]
) -> Plan:
    """Ours compared with the fastest of TRL's ``tries``. ``skips``: our rollouts and TRL's steps that are warm-up."""
    found = {label: flags.split() for label, flags in tries.items()}
    best = next(iter(found.values()))
    if s.trl and len(found) > 1:
        candidates = {label: trl(s, task, f, token_figures(skips[1])) for label, f in found.items()}
        best = found[fastest(s, f"TRL's {task}", candidates, "cpu_per_1000_tokens", say)]

    def sides(turn: int) -> list[Side]:
        sides = [ours(s, at, "local", own.split(), token_figures(skips[0])) for at in s.checkouts]
        return [*sides, *([trl(s, task, [*best, "--seed", str(turn)], token_figures(skips[1]))] if s.trl else [])]

    answers = against_trl(s, "CPU-seconds a token", "cpu_per_1000_tokens", {"local": target})
    answers.append(Answer("CPU-seconds of 1,000 tokens", ("local", "cpu_per_1000_tokens"), None, None, False))
    return Plan(sides, answers, s.rounds or s.few(3, 1))


@question("sft-tiny", "SFT of the quickstart's model, 64 rows a step, packed", 3, quick=True)
def sft_tiny(s: Setting, say: Say) -> Plan:
    """Ten steps are one rollout of ours. TRL packs into 512 tokens or pads 64 rows, whichever is faster."""
    model, data = quickstart_model(s)
    rollouts = s.few(8, 3)
    own = f"--hf-checkpoint {model} --prompt-data {data}/sft.parquet {SFT_TINY} --num-rollout {rollouts}"
    own += " --rollout-batch-size 640 --optimizer adam --lr 5e-3 --launcher local"
    base = f"--model {model} --data {data}/sft.parquet --steps {rollouts * 10} --rows 64 --lr 5e-3"
    tries = {"packed": f"{base} --packed 512 --batch 4", "padded": f"{base} --batch 64"}
    return supervised(s, say, "sft", own, tries, 1.2, (1, 10))


@question("sft-135m", "SFT of SmolLM2-135M, 8 rows of 100 to 420 tokens a step, packed", 8)
def sft_135m(s: Setting, say: Say) -> Plan:
    """About 2,000 tokens for each step on both sides."""
    model, data = smollm2(s), prompts(s, "questions", (40, 220))
    steps = s.steps or 4
    own = f"--hf-checkpoint {model} --prompt-data {data} {SFT_TINY} --input-key conversation --num-rollout {steps}"
    own += " --rollout-batch-size 8 --global-batch-size 8 --optimizer adam --lr 1e-5 --launcher local"
    own += " --max-tokens-per-gpu 2048"
    base = f"--model {model} --data {data} --steps {steps} --rows 8 --lr 1e-5"
    tries = {"packed": f"{base} --packed 1024 --batch 2", "padded": f"{base} --batch 8"}
    return supervised(s, say, "sft", own, tries, 1.0, (1, 1))


@question("dpo-tiny", "DPO of the quickstart's model, 64 pairs a step", 3)
def dpo_tiny(s: Setting, say: Say) -> Plan:
    """Both compute the reference's log-probs in every step."""
    model, data = quickstart_model(s)
    own = f"--hf-checkpoint {model} --prompt-data {data}/pairs.parquet --input-key messages --apply-chat-template "
    own += "--rollout-shuffle --num-rollout 5 --rollout-batch-size 640 --global-batch-size 64 --loss-type dpo_loss "
    own += "--dpo-beta 0.5 --dpo-label-smoothing 0.1 --optimizer adam --lr 1e-4 --use-dynamic-batch-size "
    own += "--max-tokens-per-gpu 16384 --launcher local"
    base = f"--model {model} --data {data}/pairs.parquet --steps 50 --rows 64 --lr 1e-4"
    tries = {str(batch): f"{base} --batch {batch}" for batch in (16, 64)}
    return supervised(s, say, "dpo", own, tries, 1.5, (1, 10))
