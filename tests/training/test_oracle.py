"""Whole runs of the trainer in float64 against `oracle.Oracle`: gradients of every step, losses, weights at the end.

Gradients are compared before clipping and Adam, which hide a wrong factor: both divide by the gradient's size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Oracle, Tensors
from tiny import exact_norms, one_rank, random_table, save_tiny_model, tiny_args

from slimelite.samples.table import SampleTable
from slimelite.training.model import LanguageModel
from slimelite.training.optimizer import Optimizers
from slimelite.training.parallel import local, whole

# a few steps a rollout, each of several micro-batches, the last one smaller; Adam and clipping that matter
RUN = {"global_batch_size": 6, "max_tokens_per_gpu": 60, "lr": 3e-3, "adam_beta1": 0.8, "adam_beta2": 0.9}
RUN |= {"adam_eps": 1e-6, "weight_decay": 0.1, "clip_grad": 0.3, "rollout_temperature": 0.7}

GRPO = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01, "use_reference": True, "eps_clip_high": 0.3}
DPO = {"loss_type": "dpo_loss", "use_reference": True, "dpo_beta": 0.3}
PPO = {"advantage_estimator": "ppo", "use_critic": True, "critic_lr": 1e-3, "value_clip": 0.02, "gamma": 0.95}

MIS = {"correction": "mis", "mis_upper_bound": 1.1, "mis_batch_normalize": True}

CASES: dict[str, dict[str, Any]] = {
    "grpo, every term": {**GRPO, "correction": "tis", "tis_clip": 1.1},
    "grpo, token mean": {**GRPO, "loss_aggregation": "token"},
    "grpo, constant": {"loss_aggregation": "constant"},
    "grpo, veto": {"correction": "mis", "mis_mode": "none", "mis_veto_threshold": 0.85},
    "grpo, normalized token weights": MIS,
    "grpo, normalized sequence weights": {**MIS, "mis_level": "sequence", "global_batch_size": 100},
    "grpo, normalized masked token weights": {**MIS, "mis_mode": "mask", "mis_veto_threshold": 0.85},
    "grpo, normalized masked sequence weights": {
        **MIS,
        "mis_mode": "mask",
        "mis_level": "sequence",
        "global_batch_size": 100,
    },
    "sft": {"loss_type": "sft_loss"},
    "sft, token mean": {"loss_type": "sft_loss", "loss_aggregation": "token"},
    "dpo": {**DPO, "dpo_label_smoothing": 0.1},
    "ipo": {**DPO, "dpo_loss": "ipo"},
    "ppo": {**PPO, "lambd": 0.9, "normalize_advantages": True, "kl_coef": 0.1, "use_reference": True},
}
# metrics of what must have something to do for a case to mean anything
ACTS = {
    "grpo, every term": ["tis_clipfrac", "pg_clipfrac"],
    "grpo, veto": ["veto_response_frac"],
    "grpo, normalized token weights": ["tis_clipfrac"],
    "grpo, normalized sequence weights": ["tis_clipfrac"],
    "grpo, normalized masked token weights": ["tis_clipfrac", "veto_response_frac"],
    "grpo, normalized masked sequence weights": ["tis_clipfrac"],
    "ppo": ["critic-value_clipfrac", "pg_clipfrac"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Policy and reference."""
    folder = tmp_path_factory.mktemp("models")
    return save_tiny_model(folder / "policy"), save_tiny_model(folder / "reference", seed=1)


def rollout(seed: int) -> SampleTable:
    """Fan-out siblings of which one is removed, a removed sample, a fully masked one and masked tools."""
    table = random_table(seed=seed, groups=4, group_size=4)
    table.rollout_id[1] = table.rollout_id[2] = table.rollout_id[0]
    table.removed[[2, 5]] = True
    table.loss_mask[table.response_offsets[9] : table.response_offsets[10]] = False
    return table


def pairs(seed: int) -> SampleTable:
    """The rows of a pair apart from each other; one pair is removed."""
    table = random_table(seed=seed, groups=8, group_size=2)
    table.loss_mask[table.response_offsets[:-1]] = True
    table.rollout_id = table.unit_id = table.group_id.copy()
    table.reward = np.tile([1.0, 0.0], 8)
    table.removed[2:4] = True
    return table.select(np.random.default_rng(seed).permutation(len(table)))


def sampled_by(oracle: Oracle, table: SampleTable, seed: int) -> SampleTable:
    """``table`` with engine log-probs a little off the policy's; far off, both ways, where the loss must not look."""
    oracle.table, rng = table, np.random.default_rng(seed)
    with torch.no_grad():
        now = torch.cat([oracle.score(oracle.policy, row)[0] for row in range(len(table))]).numpy()
    hidden = ~table.loss_mask | np.repeat(table.removed, table.response_lengths)
    table.rollout_log_probs = (now + rng.normal(0, np.where(hidden, 5.0, 0.1))).astype(np.float32)
    return table


def watch(optimizers: Optimizers, model: LanguageModel) -> tuple[list[Tensors], list[float]]:
    """Gradients and loss of every step from now on, as the optimizer is given them."""
    gradients, losses, step = list[Tensors](), list[float](), optimizers.step

    def watched(lr: float, peak: float, loss: torch.Tensor) -> tuple[float, bool]:
        gradients.append({n: whole(p.grad).clone() for n, p in model.named_weights() if p.grad is not None})
        losses.append(float(loss))
        return step(lr, peak, loss)

    optimizers.step = watched  # type: ignore[method-assign]
    return gradients, losses


def assert_equal(mine: Tensors, theirs: Tensors, limit: float = 1e-12) -> None:
    """All tensors together, next to their length."""
    assert mine.keys() == theirs.keys()
    gap = sum(float((mine[n] - theirs[n]).square().sum()) for n in mine) ** 0.5
    length = sum(float(tensor.square().sum()) for tensor in theirs.values()) ** 0.5
    assert gap < limit * length, f"{gap / length:.1e} of the length"


def assert_saved(saved: np.ndarray | None, oracle: Oracle, table: SampleTable) -> None:
    """What the run folder gets is what trained: None says that the rows' advantages are it."""
    if oracle.args.loss_type != "policy_loss":
        assert saved is None
        return
    if saved is None:
        saved = table.advantage.repeat(table.response_lengths)
    seen = torch.cat([oracle.mask(row) for row in range(len(table))])
    np.testing.assert_allclose(saved[seen], torch.cat(oracle.advantages)[seen], rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_the_plain_loop(models: tuple[Path, Path], name: str) -> None:
    args = tiny_args(models[0], ref_load=str(models[1]), **RUN | CASES[name])
    with one_rank(args) as trainer:
        critic, head = trainer.critic, None
        learners = [(trainer.model, trainer.optimizers)] + ([(critic.model, critic.optimizers)] if critic else [])
        for model in [model for model, _ in learners] + ([trainer.reference.model] if trainer.reference else []):
            model.double()
            exact_norms(model)
        if critic is not None:  # one that has something to say
            head = [local(w.detach()) for n, w in critic.model.named_weights() if n.startswith("lm_head")]
            for part in head:
                part.copy_(0.1 * torch.arange(1, part.numel() + 1).double().sin().view_as(part))
        oracle = Oracle(args, head)
        starts = [{n: weight.detach().clone() for n, weight in adam.weights.items()} for adam in oracle.learners]
        watched = [watch(optimizers, model) for model, optimizers in learners]
        for i in range(2):
            table = pairs(i) if args.loss_type == "dpo_loss" else sampled_by(oracle, rollout(i), i)
            metrics = trainer.train(i, table)
            oracle.train(table)
            assert_saved(trainer.trained_columns.get("advantages"), oracle, table)
            for metric in ACTS.get(name, ()):
                assert 0 < metrics[f"train/{metric}"] < 1, f"{metric} does nothing, or everything"
        ends = [{n: whole(weight.detach()) for n, weight in model.named_weights()} for model, _ in learners]
    for adam, (gradients, losses), start, end in zip(oracle.learners, watched, starts, ends, strict=True):
        for mine, theirs in zip(gradients, adam.gradients, strict=True):
            assert_equal(mine, theirs)
        assert losses == pytest.approx(adam.losses, rel=1e-12, abs=1e-14)
        assert_equal(*({n: weights[n].detach() - start[n] for n in start} for weights in (end, adam.weights)))
