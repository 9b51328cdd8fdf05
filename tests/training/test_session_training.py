"""What training makes of conversations: the engine's log-probs, and the gradient of episodes with branches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import assert_same_gradient
from oracle import load
from tiny import exact_norms, gradients, one_rank, tiny_args
from transformers import AutoModelForCausalLM

from slimelite.algorithms.groups import group_advantages
from slimelite.engines.embedded.engine import EmbeddedEngine
from slimelite.engines.protocol import GenerateRequest, GenerateResult, OnTokens, SamplingParams, WeightBucket
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.serving.format import ChatFormat
from slimelite.serving.sessions import Session, Sessions
from slimelite.training.learner import MetricSums
from slimelite.training.planning import Step, split_steps
from tests.serving.chat import build, engine_sampler, tokenizer

USER = {"role": "user", "content": "abc"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("episodes") / "model", tie_word_embeddings=True)


async def new_weights(engine: EmbeddedEngine, folder: Path, version: int) -> None:
    """Give the engine the weights in ``folder``."""
    await engine.begin_weight_update(version)
    for name, weight in AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters():
        await engine.load_weights(WeightBucket([name], [tuple(weight.shape)], weight.detach().flatten()))
    await engine.end_weight_update()


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.7}], ids=["whole", "nucleus"])
def test_ten_turns_have_the_trainers_log_probs_across_an_update_inside_a_turn(
    model: Path, tmp_path: Path, cut: dict[str, float]
) -> None:
    folders = [model, build(tmp_path / "next", seed=1, tie_word_embeddings=True)]
    engine, chat_format = EmbeddedEngine(str(model)), ChatFormat(tokenizer())

    async def talk() -> Session:
        session = Sessions(chat_format, engine_sampler(engine), 8192).open(seed=1)
        messages: list[dict[str, Any]] = [USER]
        begun = asyncio.Event()
        await new_weights(engine, folders[0], 0)
        for number in range(10):
            params = SamplingParams(max_new_tokens=200 if number == 5 else 24, ignore_eos=number == 5, **cut).telling()
            if number == 5:
                answer = asyncio.create_task(session.sample(session.turn(messages), params, lambda *_: begun.set()))
                await begun.wait()
                session.pause()
                await engine.abort()
                await asyncio.sleep(0.05)
                assert not answer.done()
                await new_weights(engine, folders[1], 1)
                session.resume()
                turn = await answer
                assert len(turn.output_ids) == 200
            else:
                turn = await session.chat(messages, params=params)
            messages += [turn.reply.message(), USER]
        await engine.close()
        return session

    session = asyncio.run(talk())
    (sample,) = session.samples(Sample(index=0, group_index=0, reward=0.0))
    (turn,) = session.turns[5:6]
    assert set(turn.weight_versions) == {0, 1}
    assert turn.weight_versions == sorted(turn.weight_versions)
    table = SampleTable.from_samples([[sample]])
    assert table.loss_mask.sum() == sum(len(turn.output_ids) for turn in session.turns)
    assert (table.kept_counts is None) == (not cut)
    if table.kept_counts is not None:
        np.testing.assert_array_equal(table.kept_counts > 0, table.loss_mask)
    for version, folder in enumerate(folders):
        with one_rank(tiny_args(folder, max_tokens_per_gpu=8192)) as trainer:
            trained = trainer.log_probs(table)
        seen = table.loss_mask & (table.weight_versions == version)
        assert seen.sum() > 40
        assert np.abs(trained - table.rollout_log_probs)[seen].mean() <= 1e-5


class Dice:
    """A sampler of random tokens; every third reply ends its turn."""

    def __init__(self, chat_format: ChatFormat, seed: int) -> None:
        self.rng, self.end = np.random.default_rng(seed), min(chat_format.end_ids)
        self.asked = 0

    async def __call__(self, request: GenerateRequest, _: OnTokens | None) -> GenerateResult:
        self.asked += 1
        ids = self.rng.integers(0, 256, self.rng.integers(3, 20)).tolist() + [self.end] * (self.asked % 3 > 0)
        return GenerateResult(request.request_id, ids, [-1.0] * len(ids), [0] * len(ids), "stop")


async def episode(number: int) -> Session:
    """A straight line, a tree, a compaction with a sub-agent, and one turn alone."""
    chat_format = ChatFormat(tokenizer())
    session = Sessions(chat_format, Dice(chat_format, number), 8192).open()
    first = await session.chat([USER])
    told = [USER, first.reply.message(), {"role": "user", "content": f"and {number}?"}]
    if number == 3:
        return session
    for _ in range(3 if number == 1 else 1):  # the same question, asked three times over
        turn = await session.chat(told)
    told += [turn.reply.message(), USER]
    await session.chat(told)
    if number == 2:
        await session.chat([{"role": "system", "content": "help"}, USER])
        await session.chat([USER, {"role": "assistant", "content": "in short"}, USER])
    return session


@pytest.mark.parametrize("aggregation", ["rollout", "token", "constant"])
@pytest.mark.parametrize("shares", [True, False])
def test_an_episode_with_branches_counts_once(model: Path, aggregation: str, shares: bool) -> None:
    sessions = [asyncio.run(episode(number)) for number in range(4)]
    rewards = [0.0, 3.0, 1.0, 0.5]
    samples = []
    for number, session in enumerate(sessions):
        made = session.samples(Sample(index=number, group_index=0))
        for sample in made:
            sample.reward = rewards[number]
        samples.append(made)
    assert [len(made) for made in samples] == [1, 3, 3, 1]
    table = SampleTable.from_samples([[s for made in samples for s in made]])
    table.advantage = group_advantages(table.reward, table.group_id, table.rollout_id, "grpo")[0]
    settings = {"loss_aggregation": aggregation, "share_prefixes": shares, "max_tokens_per_gpu": 400}
    with one_rank(tiny_args(model, **settings)) as trainer:
        trainer.model.double()
        exact_norms(trainer.model)
        (rows,) = split_steps(table.rollout_id, table.unit_id, 4)
        columns = trainer._columns(table, [rows])
        columns.old = torch.from_numpy(trainer.log_probs(table))
        trainer.gradient(columns, Step(rows, trainer._deal(table, rows)), MetricSums(trainer.world))
        mine = gradients(trainer)

    # every turn by itself, once, whatever the tree looks like
    naive, spread = load(model), np.std(rewards, ddof=1) + 1e-6
    every = sum(len(turn.output_ids) for session in sessions for turn in session.turns)
    for number, session in enumerate(sessions):
        advantage = float(np.float32((rewards[number] - np.mean(rewards)) / spread))
        sampled = sum(len(turn.output_ids) for turn in session.turns)
        divisor = {"rollout": sampled * 4, "token": every, "constant": 4 * 16}[aggregation]
        for turn in session.turns:
            scores = naive(torch.tensor([turn.token_ids])).logits[0, len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
            log_probs = scores.gather(1, torch.tensor(turn.output_ids)[:, None])
            (-advantage * log_probs.sum() / divisor).backward()
    theirs = {name: weight.grad for name, weight in naive.named_parameters()}
    assert_same_gradient(mine, {name: theirs[name] for name in mine})
