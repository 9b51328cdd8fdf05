"""The dry run shows what the model sees, and says where a run would start and not learn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.algorithms.losses import LOSSES
from slimelite.arguments import make_args
from slimelite.plan.devices import Machine
from slimelite.preflight import preflight

FLAGS = (
    "--input-key prompt --label-key label --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 "
    "--rollout-max-response-len 16 --launcher local --dry-run"
)
Report = Callable[..., str]


@pytest.fixture
def report(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """``report(flags, own)``: a dry run's report; OWN in ``flags`` is a file with the text ``own``."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(8)))

    def text(flags: str, own: str = "") -> str:
        file = tmp_path / "own.py"
        file.write_text(own)
        words = f"--hf-checkpoint {model} --prompt-data {rows} {FLAGS} {flags.replace('OWN', str(file))}"
        preflight(make_args(words.split(), machine=Machine(gpus=0)))
        return capsys.readouterr().out

    return text


def test_the_first_prompt_is_shown_as_the_model_sees_it(report: Report) -> None:
    shown = report("--rm-type math --apply-chat-template")
    (line,) = [line for line in shown.splitlines() if "the first prompt as the model sees it" in line]
    assert "'<|im_start|>user\\n0+1=<|im_end|>\\n<|im_start|>assistant\\n'" in line
    assert "tokens: '<|im_start|>' 'u'" in line
    assert "template is not used" not in shown


def test_a_template_that_is_not_used_is_a_warning(report: Report) -> None:
    assert "--prompt-data: the prompts are text, and the model's chat template is not used" in report("--rm-type math")


def test_texts_that_the_tokenizer_does_not_know_are_a_warning(report: Report, model: Path) -> None:
    settings = model / "tokenizer_config.json"
    told = r"the first {} are \+: the tokenizer does not know these texts, so the model cannot read them"
    assert "does not know these texts" not in report("--rm-type math")
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"unk_token": "+"}))
    assert re.search(f"--prompt-data: 25% of the tokens of {told.format('8 prompts')}", report("--rm-type math"))
    pairs = model.parent / "pairs.jsonl"
    pairs.write_text(json.dumps(PAIR))
    shown = report(f"--loss-type dpo_loss --prompt-data {pairs} --n-samples-per-prompt 1 --label-key prompt")
    assert re.search(f"--prompt-data: 17% of the tokens of {told.format('pair')}", shown)


PAIR = {"prompt": "2+3=", "chosen": "5", "rejected": "6"}
TURN = "<|im_start|>user\n2+3=<|im_end|>\n<|im_start|>assistant\n"
WHOLE = f"{TURN}5<|im_end|>\n"
PAIRS = "--num-rollout 1 --rollout-batch-size 1 --launcher local --dry-run"


@pytest.mark.parametrize(
    ("row", "flags", "seen", "warns"),
    [
        (PAIR, "dpo_loss", "prompt as the model sees it: '2+3='; its 4 tokens: '2' '+' '3' '='", True),
        (PAIR, "orpo_loss", "prompt as the model sees it: '2+3='", True),
        (PAIR, "dpo_loss --apply-chat-template", f"prompt as the model sees it: {TURN!r}", False),
        (PAIR | {"prompt": TURN}, "dpo_loss", f"prompt as the model sees it: {TURN!r}", False),  # as make-pairs writes
        (PAIR, "reward_model_loss", f"preferred conversation as the model sees it: {WHOLE!r}", False),
    ],
)
def test_the_first_pair_is_shown_as_the_model_sees_it(
    row: dict[str, str],
    flags: str,
    seen: str,
    warns: bool,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = tmp_path / "pairs.jsonl"
    rows.write_text(json.dumps(row))
    words = f"--hf-checkpoint {model} --prompt-data {rows} --loss-type {flags} {PAIRS}"
    preflight(make_args(words.split(), machine=Machine(gpus=0)))
    shown = capsys.readouterr().out
    assert f"--prompt-data: the first {seen}" in shown
    told = "--prompt-data: the prompts are text, and the model's chat template is not used: add --apply-chat-template"
    assert (told in shown) == warns


def test_a_learning_rate_that_no_model_survives_is_a_warning(report: Report) -> None:
    told = "is very high: each optimizer step of AdamW changes each weight by about the learning rate"
    assert f"--lr 3 {told}" in report("--rm-type math --lr 3")
    assert "is very high" not in report("--rm-type math --lr 0.1")
    critic = report("--rm-type math --advantage-estimator ppo --lr 1e-3 --critic-lr 1")
    assert f"--critic-lr 1 {told}" in critic
    assert f"--lr 0.001 {told}" not in critic


@pytest.mark.parametrize(
    ("reward", "flags", "gave"),
    [
        ("-1", "", "-1"),
        ("{'a': 0.0, 'b': 1.0}", "--reward-key a", "0"),
        ("{'a': 0.0, 'b': 1.0}", "--reward-key b", ""),
        ("{'a': -0.5}", "--reward-key a", "-0.5"),
    ],
)
def test_a_right_label_that_earns_nothing_in_the_trained_number_is_a_warning(
    report: Report, reward: str, flags: str, gave: str
) -> None:
    shown = report(f"--custom-rm-path OWN:reward {flags}", REWARD.format(reward))
    assert ("the reward function is wrong" in shown) == bool(gave)
    assert f"the custom reward gave {gave} to this response" in shown or not gave


REWARD = "async def reward(args, sample, **kwargs):\n    return {}"


@pytest.mark.parametrize(
    ("value", "warns"),
    [
        ("0", True),
        ("float(sample.response == sample.label)", True),
        ("float(sample.response.removesuffix('<|im_end|>') == sample.label)", False),
    ],
)
def test_a_right_label_that_earns_nothing_is_a_warning(report: Report, value: str, warns: bool) -> None:
    shown = report("--custom-rm-path OWN:reward", REWARD.format(value))
    assert ("the run cannot learn right answers" in shown) == warns
    assert ("gave 0 to this response: the first prompt's label followed by <|im_end|>, as in a run" in shown) == warns


OWN = """
import torch
from slimelite.algorithms.estimators import ESTIMATORS, Estimator

def group(rewards):
    {group}

def loss(log_probs, log_ratio, advantages, *, eps_clip, eps_clip_high, eps_clip_c):
    {loss}

ESTIMATORS.add(Estimator("own-{name}", "mine", group=group, loss=loss))
"""
RIGHT = {"group": "return rewards.centered", "loss": "return -log_ratio.exp() * advantages, {}"}


@pytest.mark.parametrize(
    ("name", "parts", "expected"),
    [
        ("right", {}, "rewards 0, 1, 0.5, 1 of one prompt give -0.625, 0.375, -0.125, 0.375"),
        ("binary", {}, "seven rewards of 0 and one of 1 give -0.125 and 0.875"),
        ("fails", {"group": "return rewards.nothing"}, "AttributeError: 'GroupedRewards' object has no attribute"),
        ("short", {"group": "return rewards.centered[:3]"}, "own-short"),
        ("nan", {"group": "return rewards.centered / rewards.std[rewards.group]"}, "are not finite"),
        ("loss", {"loss": "return log_probs.missing, {}"}, "AttributeError"),
    ],
)
def test_an_estimator_of_ones_own_is_tried(report: Report, name: str, parts: dict[str, str], expected: str) -> None:
    own = OWN.format(name=name, **{**RIGHT, **parts})
    try:
        shown = report(f"--rm-type math --import-file OWN --advantage-estimator own-{name}", own)
    finally:
        ESTIMATORS.pop(f"own-{name}", None)
    assert expected in shown
    assert "give an advantage of" not in shown
    assert shown.endswith("ready to start\n" if not parts else "1 problem(s) found\n")


MEDIAN = "d = rewards.rewards; g = rewards.group; return d - torch.stack([d[g == i].median() for i in g.unique()])[g]"


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ("return -rewards.centered", "the higher reward gets the lower advantage. Is the sign right?"),
        (MEDIAN, "training ignores the wrong answers of a hard prompt"),
    ],
)
def test_a_wrong_sign_and_a_median_of_binary_rewards_are_warnings(report: Report, group: str, says: str) -> None:
    own = OWN.format(name="doubtful", group=group, loss=RIGHT["loss"])
    try:
        shown = report("--rm-type math --import-file OWN --advantage-estimator own-doubtful", own)
    finally:
        ESTIMATORS.pop("own-doubtful", None)
    assert says in " ".join(shown.split())
    assert shown.endswith("ready to start\n"), "a warning, because it may be meant"


def test_a_scale_that_vanishes_for_binary_rewards_is_a_warning(report: Report) -> None:
    mad = "d = rewards.rewards; g = rewards.group; m = torch.stack([d[g == i].median() for i in g.unique()]); "
    mad += "s = torch.stack([(d - m[g])[g == i].abs().median() for i in g.unique()]); "
    own = OWN.format(name="mad", group=mad + "return rewards.centered / (s[g] + 1e-6)", loss=RIGHT["loss"])
    try:
        shown = report("--rm-type math --import-file OWN --advantage-estimator own-mad", own)
    finally:
        ESTIMATORS.pop("own-mad", None)
    warnings = shown.partition("\nwarnings")[2]
    assert "rewards 0, 0, 0, 0, 0, 0, 0, 1 of one prompt give an advantage of 8.75e+05" in warnings
    assert shown.endswith("ready to start\n")


LOSS = """
from slimelite.algorithms.losses import LOSSES, LossType

def loss(args, batch, log_probs, entropy):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return -batch.advantages * log_probs, {}", "eight made-up responses give a loss of"),
        ("return -batch.nothing * log_probs, {}", "AttributeError: 'MicroBatch' object has no attribute 'nothing'"),
        ("return -log_probs[1:], {}", "must return a loss for each of the 24 tokens"),
        ("return -log_probs.detach(), {}", "without a gradient"),
        ("return log_probs / batch.advantages, {}", "is not finite"),
        ("return 0 * log_probs, {}", "the gradient is 0 for eight made-up responses"),
    ],
)
def test_a_loss_of_ones_own_is_tried(report: Report, body: str, expected: str) -> None:
    shown = report(
        "--rm-type math --loss-type custom_loss --custom-loss-function-path OWN:loss", LOSS.format(body=body)
    )
    (line,) = [line for line in shown.splitlines() if expected in line]
    assert "own.py:loss" in line
    assert (line in shown.partition("\nwarnings")[2]) == ("give a loss" not in expected)
    assert shown.endswith("ready to start\n")


def test_a_registered_loss_of_ones_own_is_tried(report: Report) -> None:
    own = LOSS.format(body="return log_probs.nothing, {}")
    own += 'LOSSES.add(LossType("own-loss", "mine", loss, policy=True))'
    try:
        shown = report("--rm-type math --import-file OWN --loss-type own-loss", own)
    finally:
        LOSSES.pop("own-loss", None)
    assert "--loss-type own-loss, tried on eight made-up responses: raised AttributeError" in shown
