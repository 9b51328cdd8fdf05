"""A sequence-classification model as the reward: a real, tiny, untrained one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from slimelite.arguments import RewardArgs
from slimelite.rewards.grader import Grader, ModelReward, check_reward, exchange_of
from slimelite.rewards.reward_model import RewardModel
from slimelite.rewards.rules import Exchange, Failure
from slimelite.samples.sample import Sample

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
RESPONSES = ["yes", "a much longer answer, in many words", "", "no", "perhaps"]


def save_model(folder: Path, *, pad: int | None = 0, template: str | None = TEMPLATE, labels: int = 1) -> str:
    """A byte-level tokenizer and a random model; returns the folder's path."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<pad>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=257, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=pad, num_labels=labels, **sizes
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def direct(path: str, texts: list[str]) -> list[float]:
    """Each text alone through transformers."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(**tokenizer(t, add_special_tokens=False, return_tensors="pt")).logits[0, 0]) for t in texts]


def rewards(args: RewardArgs, samples: list[Sample]) -> tuple[list[float], dict[str, float]]:
    grader = Grader(args)
    asyncio.run(grader.grade(samples))
    scorer = grader._scorers["reward_model"]
    assert isinstance(scorer, ModelReward)
    process = scorer._pool._workers[0]._process
    assert process is not None
    assert process.pid != os.getpid()
    metrics = grader.metrics()
    grader.close()
    assert process.poll() is not None
    return [s.reward_value(None) for s in samples], metrics


def asked() -> tuple[list[Sample], list[str]]:
    """Samples, and the conversation of each in the reward model's template."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "is it?"}]
    samples = [
        Sample(index=i, group_index=0, prompt="<policy>is it?", response=r, metadata={"messages": messages})
        for i, r in enumerate(RESPONSES)
    ]
    # without messages the prompt is what the user said
    samples.append(Sample(index=9, group_index=1, prompt="is it?", response="yes"))
    texts = [f"<system>be brief\n<user>is it?\n<assistant>{r}\n" for r in RESPONSES]
    return samples, [*texts, "<user>is it?\n<assistant>yes\n"]


def test_the_reward_is_the_models_logit_for_the_templated_conversation(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    samples, texts = asked()
    args = RewardArgs(rm_type="reward_model", reward_model_path=path, reward_model_batch_size=3)
    given, metrics = rewards(args, samples)
    assert given == pytest.approx(direct(path, texts), abs=1e-6)
    assert len(set(given)) == len(given)
    assert metrics == {"rollout/reward_errors": 0.0}


def test_a_model_without_a_padding_token_scores_the_same(tmp_path: Path) -> None:
    path = save_model(tmp_path, pad=None)
    samples, texts = asked()
    scores = RewardModel(path, "cpu").scores([exchange_of(sample, sample.response) for sample in samples])
    assert scores == pytest.approx(direct(path, texts), abs=1e-6)


def test_without_a_chat_template_the_text_goes_in_as_it_is_and_too_long_a_text_is_an_error(tmp_path: Path) -> None:
    path = save_model(tmp_path, template=None)
    score, failure = RewardModel(path, "cpu").scores([Exchange("Q: ", "yes"), Exchange("Q: ", "x" * 200)])
    assert score == pytest.approx(direct(path, ["Q: yes"])[0], abs=1e-6)
    assert failure == Failure(
        "invalid", "prompt and response have 203 tokens, but the reward model accepts at most 128"
    )


def test_what_cannot_be_a_reward_model_is_said_at_start(tmp_path: Path) -> None:
    row = Sample(index=0, group_index=0, prompt="q", label="a")
    with pytest.raises(ValueError, match="needs --reward-model-path"):
        check_reward(RewardArgs(rm_type="reward_model"), row)
    path = save_model(tmp_path, labels=2)
    with pytest.raises(ValueError, match="has 2 outputs, but a reward model must have one"):
        RewardModel(path, "cpu")
    path = save_model(tmp_path / "headless")
    weights = load_file(file := f"{path}/model.safetensors")
    weights.pop("score.weight")  # as in a folder of a causal language model
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: score\.weight"):
        RewardModel(path, "cpu")
    # the process of the model says it to the one that asks
    missing = str(tmp_path / "none")
    with pytest.raises(ValueError, match=f"--reward-model-path {missing}: "):
        check_reward(RewardArgs(rm_type="reward_model", reward_model_path=missing), row)
