"""KTO, ORPO and reward models: TRL's values and gradients, the same however a step is cut, and reward models that
``--rm-type`` reads with the scores of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import Gradient, assert_same_gradient, exact_step
from test_pairs import pair_table
from tiny import gradients, on_ranks, one_rank, random_table, save_tiny_model, tiny_args, weights_of
from transformers import AutoModelForSequenceClassification
from trl_numbers import FILE, KTO, ORPO_LAMBDA, digest, folders

from slimelite.arguments import Args
from slimelite.data.conversations import ChatReader
from slimelite.data.prompts import PAIR
from slimelite.rewards.reward_model import RewardModel
from slimelite.rewards.rules import Exchange
from slimelite.samples.sample import Sample, Status
from slimelite.samples.table import SampleTable
from slimelite.training.learner import MetricSums
from slimelite.training.trainer import Trainer
from tests.data.tokenizers import byte_tokenizer

NUMBERS: dict[str, Any] = json.loads(FILE.read_text())
KTO_FLAGS = {"dpo_beta": KTO["beta"], "kto_desirable_weight": 1.3, "kto_undesirable_weight": 0.7}


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models of TRL's numbers."""
    return folders(tmp_path_factory.mktemp("trl"))


def row(tokens: dict[str, list[int]], index: int, unit: int, reward: float) -> Sample:
    sample = Sample(
        group_index=unit, index=index, rollout_id=unit, unit_id=unit, tokens=tokens["prompt"] + tokens["response"]
    )
    sample.response_length = len(tokens["response"])
    sample.reward, sample.status = reward, Status.COMPLETED
    return sample


def step_of(trainer: Trainer, table: SampleTable) -> tuple[Gradient, dict[str, float]]:
    """The gradient of one optimizer step over the whole table, and its metrics."""
    rows = np.arange(len(table))
    columns, sums = trainer._columns(table, [rows]), MetricSums(trainer.world)
    (step,) = trainer._schedule(columns, np.ones(len(table), bool))
    trainer.gradient(columns, step, sums)
    return gradients(trainer), sums.means()[0]


@pytest.mark.parametrize("name", ["kto", "orpo", "reward"])
def test_values_and_gradients_are_trls(of_trl: dict[str, Path], name: str) -> None:
    theirs, rows = NUMBERS[name], NUMBERS[name]["rows"]
    if name == "kto":
        judged = zip(rows, theirs["labels"], strict=True)
        groups = [[row(tokens, i, i, float(label))] for i, (tokens, label) in enumerate(judged)]
    else:
        ends = [{"prompt": r["prompt"], "response": r["response"] or [0]} for side in rows for r in side]
        groups = [[row(ends[i], 2 * i, i, 1.0), row(ends[4 + i], 2 * i + 1, i, 0.0)] for i in range(4)]
    flags = {
        "kto": {"loss_type": "kto_loss", "use_reference": True, "ref_load": str(of_trl["reference"]), **KTO_FLAGS},
        "orpo": {"loss_type": "orpo_loss", "orpo_lambda": ORPO_LAMBDA},
        "reward": {"loss_type": "reward_model_loss"},
    }[name]
    model = of_trl["scorer" if name == "reward" else "policy"]
    with one_rank(tiny_args(model, **flags, rollout_temperature=0.5)) as trainer:
        gradient, metrics = step_of(trainer, SampleTable.from_samples(groups))
    assert metrics["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    if name == "kto":
        assert metrics["mismatch_kl"] == pytest.approx(theirs["kl"], rel=1e-3)  # of sums of 200 nats in fp32
        assert theirs["kl"] > 0.01, "a KL below 0 counts as 0"
    mine = digest(gradient)
    assert mine.keys() == theirs["gradients"].keys()
    scale = max(norm for norm, _ in theirs["gradients"].values())
    for weight, numbers in theirs["gradients"].items():
        assert mine[weight] == pytest.approx(numbers, rel=1e-5, abs=1e-6 * scale), weight


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Policy and reference."""
    root = tmp_path_factory.mktemp("models")
    return save_tiny_model(root / "policy"), save_tiny_model(root / "reference", seed=1)


def loss_args(models: tuple[Path, Path], loss: str, **changes: Any) -> Args:
    flags: dict[str, Any] = {"loss_type": loss, "max_tokens_per_gpu": 10_000}
    if loss == "kto_loss":
        flags |= {"use_reference": True, "ref_load": str(models[1]), "dpo_beta": 0.3}
    return tiny_args(models[0], **flags | changes)


def table_for(loss: str) -> SampleTable:
    """Rows with masked tokens and, shuffled among the others, removed ones."""
    if loss == "kto_loss":
        table = random_table(seed=3, groups=7, group_size=1, longest=12, prompt=(16, 25))
        table.reward, table.removed[3] = np.array([1.0, 0, 0, 1, 1, 0, 1]), True
        return table
    table = pair_table()
    if loss == "reward_model_loss":  # a row has one token, in whose place its score stands
        ends = table.response_offsets[1:] - 1
        samples = []
        for number in range(len(table)):
            tokens = [*table.row_slice("prompt_tokens", number), *table.row_slice("response_tokens", number)[:-1]]
            last = {"prompt": list(map(int, tokens)), "response": [int(table.response_tokens[ends[number]])]}
            sample = row(last, int(table.sample_id[number]), int(table.unit_id[number]), float(table.reward[number]))
            sample.remove_sample = bool(table.removed[number])
            samples.append([sample])
        table = SampleTable.from_samples(samples)
    return table


def step_on_ranks(trainer: Trainer, table: SampleTable) -> tuple[Gradient, dict[str, float]]:
    return exact_step(trainer, table)


@pytest.mark.parametrize("loss", ["kto_loss", "orpo_loss", "reward_model_loss"])
def test_micro_batches_and_ranks_do_not_matter(models: tuple[Path, Path], loss: str) -> None:
    table = table_for(loss)
    with one_rank(loss_args(models, loss)) as trainer:
        whole = exact_step(trainer, table)
    with one_rank(loss_args(models, loss, max_tokens_per_gpu=40)) as trainer:
        assert len(trainer._deal(table, np.arange(len(table)))[0]) > 2
        parts = exact_step(trainer, table)
    cut = loss_args(models, loss, max_tokens_per_gpu=40)
    for gradient, metrics in (parts, *([on_ranks(2, step_on_ranks, cut, table)] if loss == "kto_loss" else [])):
        assert_same_gradient(gradient, whole[0])
        assert metrics == pytest.approx(whole[1], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss", ["kto_loss", "orpo_loss", "reward_model_loss"])
def test_training_tells_them_apart(models: tuple[Path, Path], loss: str) -> None:
    with one_rank(loss_args(models, loss, lr=3e-3)) as trainer:
        history = [trainer.train(i, table_for(loss)) for i in range(12)]
    first, last = history[0], history[-1]
    assert last["train/loss"] < first["train/loss"]
    if loss == "kto_loss":
        margins = [each["train/rewards/chosen"] - each["train/rewards/rejected"] for each in (first, last)]
    else:
        margins = [each["train/rewards/margins"] for each in (first, last)]
        assert last["train/rewards/accuracies"] > 0.7
    assert margins[1] > margins[0] + 0.1


def test_a_step_that_has_one_reply_left_trains_without_its_kl(
    models: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    table = table_for("kto_loss").select([0])
    with one_rank(loss_args(models, "kto_loss")) as trainer:
        metrics = trainer.train(0, table)
    assert metrics["train/mismatch_kl"] == 0
    assert metrics["train/grad_norm"] > 0
    assert "has only one reply" in caplog.text


CHAT = [{"role": "user", "content": "Is it good?"}]


@pytest.mark.parametrize("template", ["chat", None])
def test_a_trained_reward_model_is_read_with_the_scores_of_training(tmp_path: Path, template: str | None) -> None:
    """The model that --save-hf writes gives, in --rm-type's process, the margin that training computes."""
    tokenizer = byte_tokenizer(**({} if template else {"template": None}))
    tokenizer.pad_token = "</s>"  # it ends replies, too, where transformers would look for padding
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    path = save_tiny_model(tmp_path / "model", vocab_size=len(tokenizer), **ids)
    tokenizer.save_pretrained(path)
    replies = ["Yes </s>", "no"] if template is None else [[*CHAT, {"role": "assistant", "content": c}] for c in "yn"]
    sample = Sample(group_index=0, index=0, prompt="Is it good?", metadata={PAIR: replies})
    table = SampleTable.from_samples([ChatReader(tokenizer).scored_pair(sample)])
    args = tiny_args(path, loss_type="reward_model_loss", tokenizer=str(path), num_rollout=4)
    with one_rank(args) as trainer:
        for i in range(3):
            trainer.train(i, table)
        trainer.save_hf(str(tmp_path / "saved"))
        trainer.save(str(tmp_path / "checkpoint"), 2)
        margin = trainer.train(3, table)["train/rewards/margins"]
        straight = weights_of(trainer)
    with one_rank(args) as trainer:  # resumed
        trainer.load(str(tmp_path / "checkpoint"))
        trainer.train(3, table)
        assert all(torch.equal(straight[name], weight) for name, weight in weights_of(trainer).items())
    model = RewardModel(str(tmp_path / "saved"), "cpu")
    messages = None if template is None else CHAT
    answers = ["Yes </s>", "no"] if template is None else ["y", "n"]
    scores = model.scores([Exchange("Is it good?", answer, messages) for answer in answers])
    assert scores[0] - scores[1] == pytest.approx(margin, rel=1e-4)
    assert margin > 0.01
    with one_rank(tiny_args(tmp_path / "saved", loss_type="reward_model_loss")) as trainer:  # goes on from it
        assert trainer.train(0, table)["train/rewards/margins"] == pytest.approx(margin, rel=1e-4)
    kept = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert type(kept).__name__ == "Qwen2ForSequenceClassification"


def test_labels_of_replies_are_read(tmp_path: Path) -> None:
    chat = ChatReader(byte_tokenizer())
    talk = [*CHAT, {"role": "assistant", "content": "first"}, *CHAT, {"role": "assistant", "content": "last"}]
    for label, reward in ((True, 1.0), (False, 0.0), ("false", 0.0), (1, 1.0)):
        sample = Sample(group_index=0, index=0, prompt=list(talk), label=label)
        chat.judge(sample)
        trained = [t for t, own in zip(sample.response_ids, sample.loss_mask, strict=True) if own]
        assert chat.tokenizer.decode(trained).startswith("last")
        assert sample.reward == reward
    with pytest.raises(ValueError, match=r"the label 'maybe' \(--label-key\)"):
        chat.judge(Sample(group_index=0, index=0, prompt=list(talk), label="maybe"))
