"""Log-probs over the token ids that an engine kept: values and gradients against naive loops, in every arrangement."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import assert_same_gradient, awkward_table, exact_step
from test_model import TOKENS, VOCAB, full, inputs
from tiny import VOCAB as WORDS
from tiny import exact_norms, on_ranks, one_rank, random_table, save_tiny_model, tiny_args
from torch import Tensor
from transformers import AutoModelForCausalLM

from slimelite.engines.embedded.engine import EmbeddedEngine
from slimelite.engines.params import SamplingParams
from slimelite.engines.protocol import GenerateRequest
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.training.model import chunked_log_probs
from slimelite.training.replay import KeptIds
from slimelite.training.trainer import Trainer
from tests.serving.chat import build, tokenizer

TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_reference": True, "entropy_coef": 0.01}
TRUNCATED = {"rollout_top_p": 0.9, "rollout_temperature": 0.8, **TERMS}


def with_kept(table: SampleTable, seed: int = 0) -> SampleTable:
    """``table`` with 1 to 9 kept ids for each trained token, itself among them, and none for a tool's."""
    rng, rows = np.random.default_rng(seed), []
    for token, trained in zip(table.response_tokens.tolist(), table.loss_mask.tolist(), strict=True):
        others = rng.permutation(np.delete(np.arange(WORDS), token))[: rng.integers(0, 9)]
        rows.append(rng.permutation([token, *others]) if trained else [])
    table.kept_counts = np.array([len(row) for row in rows], np.int32)
    table.kept_ids = np.concatenate([np.asarray(row, np.int32) for row in rows])
    ends = np.concatenate([[0], np.cumsum(table.kept_counts)])
    table.kept_offsets = ends[table.response_offsets].astype(np.int64)
    return table


def kept_rows(table: SampleTable, row: int) -> list[list[int]]:
    """The kept ids of each response token of a row."""
    parts = np.split(table.row_slice("kept_ids", row), np.cumsum(table.row_slice("kept_counts", row))[:-1])
    return [part.tolist() for part in parts]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, kept: list[list[int]]) -> Tensor:
    """One token after the other, over a vocabulary of its kept ids alone."""
    found = []
    for state, target, ids in zip(hidden, targets.tolist(), kept, strict=True):
        ids = ids or list(range(len(weight)))
        found.append(torch.log_softmax(weight[ids] @ state / temperature, 0)[ids.index(target)])
    return torch.stack(found)


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_values_and_gradients_are_those_of_a_loop_over_small_vocabularies(chunk: int, compiled: bool) -> None:
    hidden, weight, targets = inputs()
    rng = np.random.default_rng(1)
    kept = [[int(t), *rng.permutation(np.delete(np.arange(VOCAB), t))[: rng.integers(0, 12)]] for t in targets]
    kept[3] = kept[11] = []  # drawn from the whole vocabulary
    kept[5] = kept[5][:1]  # a single choice, which has no gradient
    ids = KeptIds(np.concatenate(kept), np.array([len(row) for row in kept]), "cpu")
    settings = {"entropy_grad": True, "chunk_size": chunk, "compiled": compiled}
    mine = chunked_log_probs(hidden, weight, targets, 0.7, kept=ids, **settings)
    theirs = naive(hidden, weight, targets, 0.7, kept), full(hidden, weight, targets, 0.7)[1]
    probes = torch.randn(2, TOKENS, dtype=torch.float64)
    grads = [
        torch.autograd.grad((log_probs * probes[0]).sum() + (entropy * probes[1]).sum(), (hidden, weight))
        for log_probs, entropy in (mine, theirs)
    ]
    assert mine[0][5] == 0
    for a, b in zip((*mine, *grads[0]), (*theirs, *grads[1]), strict=True):
        assert (a - b).abs().max() < 1e-12 * max(1, float(b.abs().max()))


def test_policy_and_reference_are_those_of_transformers_over_the_kept_ids(model: Path) -> None:
    """Packed, with shared prompts, at a temperature, in float64; the entropy is over the whole vocabulary."""
    table = with_kept(awkward_table())
    hf = AutoModelForCausalLM.from_pretrained(model).double()
    exact_norms(hf)
    with one_rank(tiny_args(model, **TRUNCATED)) as trainer:
        assert trainer.model.shares
        assert trainer.reference is not None
        for part in (trainer, trainer.reference):
            part.model.double()
            exact_norms(part.model)
        columns = trainer._columns(table, [np.arange(len(table))])
        trainer._pass("log_probs", columns, trainer._deal(table, np.flatnonzero(table.mask_sums)))
    for row in np.flatnonzero(table.mask_sums):
        prompt, response = (table.row_slice(f"{part}_tokens", row) for part in ("prompt", "response"))
        with torch.no_grad():
            logits = hf(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / 0.8
        log_p = logits.log_softmax(-1)
        tokens = slice(*table.response_offsets[row : row + 2])
        for i, ids in enumerate(kept_rows(table, row)):
            expected = log_p[i, response[i]] - (log_p[i, ids].logsumexp(-1) if ids else 0.0)
            for found in (columns.old, columns.ref):
                assert abs(found[tokens][i] - expected) < 1e-12
        entropy = -(log_p.exp() * log_p).sum(-1)
        assert (columns.entropy[tokens] - entropy).abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("correction", [{}, {"correction": "tis", "tis_clip": 1.05}])
def test_a_step_is_the_same_packed_shared_and_a_row_at_a_time(
    model: Path, estimator: str, correction: dict[str, Any]
) -> None:
    found = []
    for packing in ({}, {"share_prefixes": False}, {"use_dynamic_batch_size": False}):
        args = tiny_args(model, advantage_estimator=estimator, **TRUNCATED, **correction, **packing)
        with one_rank(args) as trainer:
            found.append(exact_step(trainer, with_kept(awkward_table())))
    for gradient, means in found[1:]:
        assert_same_gradient(gradient, found[0][0])
        assert means == pytest.approx(found[0][1], rel=1e-9, abs=1e-12)
    with one_rank(tiny_args(model, advantage_estimator=estimator, **TERMS, **correction)) as trainer:
        (other, _) = exact_step(trainer, awkward_table())
    name = "model.layers.0.mlp.up_proj.weight"
    assert (other[name] - found[0][0][name]).norm() > 0.05 * other[name].norm()  # the ids matter


def _gradient(trainer: Trainer, table: SampleTable) -> Any:
    return exact_step(trainer, table)


def test_two_ranks_compute_the_gradient_of_one(model: Path) -> None:
    table = with_kept(awkward_table())
    args = tiny_args(model, **TRUNCATED)
    with one_rank(args) as trainer:
        alone, means = exact_step(trainer, table)
    both, means_of_both = on_ranks(2, _gradient, args, table)
    assert_same_gradient(both, alone)
    assert means_of_both == pytest.approx(means, rel=1e-9, abs=1e-12)


def test_training_follows_the_gradient_over_the_kept_ids(model: Path) -> None:
    """The engine's log-probs are over the kept ids too, so that ratio and mismatch of a first step are those of 1."""
    table = with_kept(random_table(masked=0.0))
    with one_rank(tiny_args(model, rollout_top_p=0.9)) as trainer:
        table.rollout_log_probs = trainer.log_probs(table)
        metrics = trainer.train(0, table)
        assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-6
        assert metrics["train/grad_norm"] > 0
    with one_rank(tiny_args(model)) as trainer:  # the ids of a saved rollout count, whatever the flags are now
        assert trainer.train(0, table)["train/train_rollout_logprob_abs_diff"] < 1e-6
        assert trainer.train(1, table.without_kept())["train/train_rollout_logprob_abs_diff"] > 0.1


def test_fine_tuning_learns_the_model_and_no_part_of_it(model: Path) -> None:
    table, losses = with_kept(random_table()), []
    for each in (table, table.without_kept()):
        with one_rank(tiny_args(model, loss_type="sft_loss")) as trainer:
            losses.append(trainer.train(0, each)["train/loss"])
    assert losses[0] == losses[1]


def test_tokens_without_their_ids_are_refused_unless_it_is_insisted(model: Path) -> None:
    table = with_kept(random_table(masked=0.0))
    start = table.response_offsets[2]
    none = table.without_kept()
    with one_rank(tiny_args(model, rollout_top_p=0.9)) as trainer:
        with pytest.raises(ValueError, match=r"samples \[0, 1, .* kept ids are missing; with --rollout-top-p, "):
            trainer.train(0, none)
        table.kept_ids[table.kept_offsets[2]] = WORDS - 1
        table.kept_ids[table.kept_offsets[2] : table.kept_offsets[2] + table.kept_counts[start]] = (
            table.response_tokens[start] + 1
        ) % WORDS
        with pytest.raises(ValueError, match=r"samples \[2\] have sampled tokens that are not among their kept ids"):
            trainer.train(0, table)
    with one_rank(tiny_args(model, rollout_top_k=WORDS)) as trainer:  # limits nothing
        assert trainer.train(0, none)["train/grad_norm"] > 0
    with one_rank(tiny_args(model, rollout_top_p=0.9, allow_truncated_sampling=True)) as trainer:
        assert trainer.train(0, none)["train/grad_norm"] > 0


def test_tokens_of_a_grammar_are_trained_over_the_ids_that_it_allowed(tmp_path: Path) -> None:
    """``--train-constrained``, from the engine to the trainer's log-probs, against a naive softmax over these ids."""
    words = tokenizer()
    folder = build(tmp_path / "model", max_position_embeddings=512)
    engine = EmbeddedEngine(str(folder), tokenizer=words, max_context_len=300)
    params = SamplingParams(60, temperature=0.8, regex='[a-z ]{20}(yes|no)"?').telling(constrained=True)
    prompts = [tuple(words(text, add_special_tokens=False)["input_ids"]) for text in ("ab", "abc def")]
    requests = [GenerateRequest(f"{n}", prompt, replace(params, seed=n)) for n, prompt in enumerate(prompts)]
    results = asyncio.run(engine.generate(requests))
    asyncio.run(engine.close())
    samples = []
    for n, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert result.constrained is not None
        assert result.constrained.all()
        sample = Sample(index=n, group_index=n, tokens=list(prompt), reward=float(n))
        sample.append_response_tokens(
            result.output_ids, result.log_probs, weight_versions=result.weight_versions, kept=result.kept
        )
        samples.append(sample)
    table = SampleTable.from_samples([[sample] for sample in samples], None)
    with one_rank(tiny_args(folder, **{**TRUNCATED, "rollout_top_p": 1.0})) as trainer:
        found = trainer.log_probs(table)
    hf = AutoModelForCausalLM.from_pretrained(folder)
    for row, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert result.kept is not None
        with torch.no_grad():
            logits = hf(torch.tensor([[*prompt, *result.output_ids]])).logits[0, len(prompt) - 1 : -1] / 0.8
        naive = [
            float(logits[at, ids].log_softmax(0)[ids.index(token)])
            for at, (token, ids) in enumerate(zip(result.output_ids, result.kept.rows(), strict=True))
        ]
        mine = found[slice(*table.response_offsets[row : row + 2])]
        assert np.abs(mine - naive).max() < 1e-5
        assert np.abs(np.array(result.log_probs) - naive).max() < 1e-5
