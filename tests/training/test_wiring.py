"""Every flag of the loss reaches its formula: the gradient of a whole step in float64 is that of the pure function with
the same value, and another one than without the flag.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import Gradient, assert_same_gradient, awkward_table, exact_step, noise
from tiny import gradients, one_rank, save_tiny_model, tiny_args
from torch import Tensor

from slimelite.algorithms import advantages as adv
from slimelite.algorithms import corrections as cor
from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.algorithms.packed import row_weights, weighted_sum
from slimelite.algorithms.policy import kl_estimate, policy_loss
from slimelite.arguments import Args
from slimelite.samples.table import SampleTable
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.parallel import local
from slimelite.training.trainer import Trainer

TRAINING = Path(__file__).parents[2] / "slimelite" / "training"
PLUGINS = Path(__file__).parent / "plugins.py"
Flags = dict[str, Any]
Found = tuple[Gradient, dict[str, float]]


class Known:
    """What the formulas read of a trainer and a table; ``log_probs`` and ``entropy`` have a graph to the weights."""

    def __init__(self, trainer: Trainer, table: SampleTable) -> None:
        batch = MicroBatch(TokenColumns.from_table(table), np.arange(len(table)), torch.device("cpu"))
        self.table, self.segments, self.rows = table, batch.segments, len(table)
        self.mask = torch.from_numpy(table.loss_mask & ~np.repeat(table.removed, table.response_lengths))
        self.log_probs, self.entropy = trainer.model(batch, 1.0, entropy_grad=True)
        self.now = self.log_probs.detach()
        self.old = self.now + noise(table, 0.1, salt=1)
        self.roll = self.old + noise(table, 0.1, salt=2)
        assert trainer.reference is not None
        assert trainer.critic is not None
        with torch.no_grad(), trainer.reference.weights() as reference:
            self.ref = reference(batch, 1.0)[0]
        with torch.no_grad():
            self.values = trainer.critic.model(batch)
        self.teacher = torch.from_numpy(table.teacher_log_probs)
        self.rewards = torch.tensor(table.advantage, dtype=torch.float32)
        self.where = (self.mask, self.segments, self.rows)
        self.reduce()

    def reduce(self, mode: str = "rollout", max_response_len: int = 16) -> Known:
        """By another aggregation from now on."""
        table = self.table
        sums, rollouts = torch.from_numpy(table.mask_sums), torch.from_numpy(table.rollout_id)
        of_rows = row_weights(sums, rollouts, mode, max_response_len=max_response_len)
        self.weights = torch.where(self.mask, of_rows[self.segments], 0.0)
        return self

    def mean(self, losses: Tensor) -> Tensor:
        """0-d; of per-token losses."""
        return weighted_sum(losses, self.weights)

    def pg(
        self,
        old: Tensor | None = None,
        advantages: Tensor | None = None,
        weight: Tensor | float = 1.0,
        estimator: str = "grpo",
        **clip: float,
    ) -> Tensor:
        """The policy loss of an estimator; ``weight`` [T] of a correction."""
        advantages = self.rewards[self.segments] if advantages is None else advantages
        old = self.old if old is None else old
        losses, _ = policy_loss(self.log_probs, old, advantages, *self.where, estimator, **CLIP | clip)
        return self.mean(weight * losses)

    def kl(self, args: Args) -> Tensor:
        """[T] of the loss."""
        old = self.roll if args.use_rollout_logprobs else self.old
        return kl_estimate(
            self.log_probs, self.ref, self.mask, args.kl_loss_type, old=old if args.use_unbiased_kl else None
        )

    def with_kl(self, args: Args) -> Tensor:
        return self.pg(old=self.roll if args.use_rollout_logprobs else None) + args.kl_loss_coef * self.mean(
            self.kl(args)
        )

    def weighed(self, by: Callable[..., tuple[Tensor, Any]], **bounds: Any) -> Tensor:
        """The loss with the weights, or the kept tokens, of a correction."""
        return self.pg(weight=by(self.old, self.roll, *self.where, **bounds)[0])

    def mis(self, level: str = "token", mode: str = "clip", upper: float = 1.1, lower: float | None = 0.95) -> Tensor:
        return self.weighed(cor.mis_weights, level=level, mode=mode, upper=upper, lower=lower)

    def rejected(self, level: str = "sequence", upper: float = 1.2, lower: float | None = None) -> Tensor:
        return self.weighed(cor.rejection_keep, level=level, upper=upper, lower=lower)

    def opsm(self, old: Tensor, delta: float) -> Tensor:
        keep, _ = cor.opsm_keep(self.now, old, self.rewards[self.segments], *self.where, delta=delta)
        return self.pg(old=old, weight=keep)

    def penalty(self, kl_coef: float, kind: str) -> Tensor:
        """[T] KL of the reward, of what sampled: the policy before the step."""
        return kl_estimate(self.now, self.ref, self.mask, kind) if kl_coef else torch.zeros(len(self.mask))

    def token_rewards(self, kl_coef: float, kind: str) -> Tensor:
        return adv.token_rewards(self.rewards, self.penalty(kl_coef, kind), *self.where, kl_coef=kl_coef)

    def reinforce(self, gamma: float = 0.9, kl_coef: float = 0.1, kind: str = "k1") -> Tensor:
        returns = adv.discounted_returns(self.token_rewards(kl_coef, kind), self.segments, gamma=gamma)
        return self.pg(advantages=adv.whiten(returns, self.mask))

    def baseline(self, kl_coef: float = 0.1, kind: str = "k1") -> Tensor:
        kl = self.penalty(kl_coef, kind)
        advantages = adv.reinforce_plus_plus_baseline(
            adv.RolloutTokens(self.rewards, kl, self.mask, self.segments, kl_coef=kl_coef)
        )
        return self.pg(advantages=adv.whiten(advantages, self.mask))

    def ppo(self, gamma: float = 0.9, lambd: float = 0.8, kl_coef: float = 0.1, kind: str = "k1") -> Tensor:
        rewards = self.token_rewards(kl_coef, kind)
        return self.pg(advantages=adv.gae(rewards, self.values, self.mask, self.segments, gamma=gamma, lambd=lambd)[0])

    def ppo_turns(self, kl_coef: float) -> Tensor:
        """A row without rewards of turns is one turn: its rewards less the value before its first trained token."""
        rewards, advantages = self.token_rewards(kl_coef, "k1"), torch.zeros(len(self.mask), dtype=torch.float64)
        for row in range(self.rows):
            tokens = (self.mask & (self.segments == row)).nonzero()[:, 0]
            if len(tokens):
                advantages[tokens] = rewards[tokens].double().sum() - self.values[tokens[0]].double()
        return self.pg(advantages=advantages.float())

    def distilled(self, opd_kl_coef: float) -> Tensor:
        """[T] advantages."""
        rewards = self.rewards[self.segments]
        return adv.add_distillation(rewards, self.now, self.teacher, self.mask, opd_kl_coef=opd_kl_coef)


CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.2}
GSPO = {"advantage_estimator": "gspo", "eps_clip": 0.02}
CISPO = {"advantage_estimator": "cispo", "eps_clip": 0.1}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
TIS = {"correction": "tis", "tis_clip": 1.1, "tis_clip_low": 0.9}
ICEPOP = TIS | {"correction": "icepop"}
MIS = {"correction": "mis", "mis_mode": "clip", "mis_upper_bound": 1.1, "mis_lower_bound": 0.95}
REJECT = {"correction": "mis", "mis_mode": "none", "mis_rejection_level": "sequence", "mis_upper_bound": 1.2}
VETO = {"correction": "mis", "mis_mode": "none", "mis_veto_threshold": 0.8}
REINFORCE = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "gamma": 0.9, "kl_coef": 0.1}
BASELINE = {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True, "kl_coef": 0.1}
PPO = {"advantage_estimator": "ppo", "gamma": 0.9, "lambd": 0.8, "kl_coef": 0.1}
OPD = {"use_opd": True, "opd_type": "sglang"}

# flags that are given anyway, those that are tested, and the loss with both
CASES: list[tuple[Flags, Flags, Callable[[Known], Tensor]]] = [
    ({}, {"eps_clip": 0.05}, lambda k: k.pg(eps_clip=0.05, eps_clip_high=0.05)),
    ({}, {"eps_clip_high": 0.05}, lambda k: k.pg(eps_clip_high=0.05)),
    ({}, {"eps_clip_c": 1.05}, lambda k: k.pg(eps_clip_c=1.05)),
    ({}, {"advantage_estimator": "gspo"}, lambda k: k.pg(estimator="gspo")),
    (GSPO, {"eps_clip": 0.01}, lambda k: k.pg(estimator="gspo", eps_clip=0.01, eps_clip_high=0.01)),
    (GSPO, {"eps_clip_high": 0.005}, lambda k: k.pg(estimator="gspo", eps_clip=0.02, eps_clip_high=0.005)),
    (GSPO, {"eps_clip_c": 1.01}, lambda k: k.pg(estimator="gspo", eps_clip=0.02, eps_clip_high=0.02, eps_clip_c=1.01)),
    ({}, {"advantage_estimator": "cispo"}, lambda k: k.pg(estimator="cispo")),
    (CISPO, {"eps_clip": 0.05}, lambda k: k.pg(estimator="cispo", eps_clip=0.05, eps_clip_high=0.05)),
    (CISPO, {"eps_clip_high": 0.05}, lambda k: k.pg(estimator="cispo", eps_clip=0.1, eps_clip_high=0.05)),
    ({}, {"use_rollout_logprobs": True}, lambda k: k.pg(old=k.roll)),
    ({}, {"entropy_coef": 0.03}, lambda k: k.pg() - 0.03 * k.mean(k.entropy)),
    ({"kl_loss_coef": 0.1}, {"use_kl_loss": True}, lambda k: k.with_kl(Args(**KL))),
    (KL, {"kl_loss_coef": 0.3}, lambda k: k.with_kl(Args(kl_loss_coef=0.3))),
    *(
        (KL, {"kl_loss_type": kind}, lambda k, kind=kind: k.with_kl(Args(**KL, kl_loss_type=kind)))
        for kind in ("k1", "k2", "k3")
    ),
    (KL | {"kl_loss_type": "k3"}, {"kl_loss_type": "low_var_kl"}, lambda k: k.with_kl(Args(**KL))),
    (KL, {"use_unbiased_kl": True}, lambda k: k.with_kl(Args(**KL, use_unbiased_kl=True))),
    (
        KL | {"use_unbiased_kl": True},
        {"use_rollout_logprobs": True},
        lambda k: k.with_kl(Args(**KL, use_unbiased_kl=True, use_rollout_logprobs=True)),
    ),
    (TIS, {"correction": "icepop"}, lambda k: k.mis(mode="mask", upper=1.1, lower=0.9)),
    (TIS, {"tis_clip": 1.05}, lambda k: k.mis(upper=1.05, lower=0.9)),
    (TIS, {"tis_clip_low": 0.97}, lambda k: k.mis(upper=1.1, lower=0.97)),
    (ICEPOP, {"tis_clip": 1.05}, lambda k: k.mis(mode="mask", upper=1.05, lower=0.9)),
    (ICEPOP, {"tis_clip_low": 0.97}, lambda k: k.mis(mode="mask", upper=1.1, lower=0.97)),
    (TIS, {"correction": "mis", "mis_upper_bound": 1.2}, lambda k: k.mis(mode="truncate", upper=1.2)),
    (MIS, {"mis_level": "sequence"}, lambda k: k.mis("sequence")),
    (MIS, {"mis_level": "geometric"}, lambda k: k.mis("geometric")),
    (MIS, {"mis_mode": "truncate"}, lambda k: k.mis(mode="truncate")),
    (MIS, {"mis_mode": "mask"}, lambda k: k.mis(mode="mask")),
    (MIS, {"mis_upper_bound": 1.05}, lambda k: k.mis(upper=1.05)),
    (MIS, {"mis_lower_bound": 0.98}, lambda k: k.mis(lower=0.98)),
    (MIS, {"mis_lower_bound": None}, lambda k: k.mis(lower=1 / 1.1)),
    (REJECT, {"mis_rejection_level": "token"}, lambda k: k.rejected("token")),
    (REJECT, {"mis_rejection_level": "geometric", "mis_upper_bound": 1.03}, lambda k: k.rejected("geometric", 1.03)),
    (REJECT, {"mis_rejection_upper_bound": 1.1}, lambda k: k.rejected(upper=1.1)),
    (REJECT, {"mis_rejection_lower_bound": 0.9}, lambda k: k.rejected(lower=0.9)),
    (VETO, {"mis_veto_threshold": 0.85}, lambda k: k.weighed(cor.veto_keep, threshold=0.85)),
    ({}, {"use_opsm": True}, lambda k: k.opsm(k.old, 1e-4)),
    ({"use_opsm": True}, {"opsm_delta": 0.03}, lambda k: k.opsm(k.old, 0.03)),
    ({"use_opsm": True}, {"use_rollout_logprobs": True}, lambda k: k.opsm(k.roll, 1e-4)),
    ({}, {"loss_aggregation": "token"}, lambda k: k.reduce("token").pg()),
    (
        {"loss_aggregation": "constant"},
        {"rollout_max_response_len": 23},
        lambda k: k.reduce("constant", 23).pg(),
    ),
    (KL, {"loss_aggregation": "token"}, lambda k: k.reduce("token").with_kl(Args(**KL))),
    ({}, {"normalize_advantages": True}, lambda k: k.pg(advantages=adv.whiten(k.rewards[k.segments], k.mask))),
    ({}, REINFORCE | {"kl_coef": 0.0}, lambda k: k.reinforce(kl_coef=0.0)),
    (REINFORCE, {"gamma": 0.7}, lambda k: k.reinforce(gamma=0.7)),
    (REINFORCE, {"kl_coef": 0.3}, lambda k: k.reinforce(kl_coef=0.3)),
    *((REINFORCE, {"kl_reward_type": kind}, lambda k, kind=kind: k.reinforce(kind=kind)) for kind in ("k2", "k3")),
    (BASELINE, {"kl_coef": 0.3}, lambda k: k.baseline(0.3)),
    (BASELINE, {"kl_reward_type": "k2"}, lambda k: k.baseline(kind="k2")),
    ({}, PPO | {"kl_coef": 0.0}, lambda k: k.ppo(kl_coef=0.0)),
    (PPO, {"gamma": 0.7}, lambda k: k.ppo(gamma=0.7)),
    (PPO, {"lambd": 0.6}, lambda k: k.ppo(lambd=0.6)),
    (PPO, {"kl_coef": 0.3}, lambda k: k.ppo(kl_coef=0.3)),
    (PPO, {"kl_reward_type": "k2"}, lambda k: k.ppo(kind="k2")),
    (PPO, {"advantage_estimator": "ppo_turns", "kl_coef": 0.3}, lambda k: k.ppo_turns(kl_coef=0.3)),
    (OPD, {"opd_kl_coef": 0.3}, lambda k: k.pg(advantages=k.distilled(0.3))),
    (OPD, {"normalize_advantages": True}, lambda k: k.pg(advantages=adv.whiten(k.distilled(1.0), k.mask))),
    (
        {},
        {"custom_advantage_function_path": f"{PLUGINS}:all_ones"},
        lambda k: k.pg(advantages=torch.ones(len(k.mask))),
    ),
    ({}, {"loss_type": "sft_loss"}, lambda k: k.mean(-k.log_probs)),
    (
        {"loss_type": "sft_loss"},
        {"loss_type": "custom_loss", "custom_loss_function_path": f"{PLUGINS}:twice_the_likelihood"},
        lambda k: k.mean(-2 * k.log_probs),
    ),
]
# flags of the loss that other tests have
ELSEWHERE = {
    "allow_truncated_sampling": "test_sampling_replay.py",
    "kto_desirable_weight": "test_preference_losses.py",
    "kto_undesirable_weight": "test_preference_losses.py",
    "orpo_lambda": "test_preference_losses.py",
    "dpo_beta": "test_oracle.py",
    "dpo_loss": "test_oracle.py",
    "dpo_label_smoothing": "test_oracle.py",
    "mis_batch_normalize": "test_passes.py, whether old log-probs are computed",
    "custom_tis_function_path": "test_loss.py",
    "custom_pg_loss_reducer_function_path": "test_loss.py",
    "use_opd": "test_distillation.py",
    "opd_type": "test_distillation.py",
    "use_reference": "in every case with a KL",
    "custom_reward_post_process_path": "named by an error alone; tests/rollout/test_manager.py",
}
# functions of --ci-test and of what is computed when, whose flags are no part of the loss
OTHERS = ("check_first_step", "engine_threshold", "passes")


def case_id(case: tuple[Flags, Flags, Any]) -> str:
    flags = " ".join(f"{name}={Path(str(value)).name}" for name, value in case[1].items())
    return f"{flags} with {' '.join(str(value) for value in case[0].values())}"


@pytest.fixture(scope="module")
def table() -> SampleTable:
    table = awkward_table()
    table.teacher_log_probs = -3.5 + noise(table, 1.0, salt=3).numpy()
    return table


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """With another reference than the initial policy, and a critic that has something to say."""
    model = save_tiny_model(tmp_path_factory.mktemp("model"))
    reference = save_tiny_model(tmp_path_factory.mktemp("reference"), seed=1)
    given = {"use_reference": True, "ref_load": str(reference), "use_critic": True, "critic_lr": 1e-2}
    with one_rank(tiny_args(model, **given, max_tokens_per_gpu=10_000)) as trainer:
        assert trainer.critic is not None
        for name, weight in trainer.critic.model.named_weights():
            if name.startswith("lm_head"):
                local(weight.detach()).fill_(0.05)
        yield trainer


@pytest.fixture(scope="module")
def step(trainer: Trainer, table: SampleTable) -> Callable[[Flags], Found]:
    """The exact step with some flags, done once; the trainer keeps the flags."""
    args, known = trainer.args, dict[str, Found]()

    def with_flags(given: Flags) -> Found:
        trainer.args = replace(args, **given)
        if str(given) not in known:
            known[str(given)] = exact_step(trainer, table)
        return known[str(given)]

    return with_flags


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_flag_reaches_its_formula(
    trainer: Trainer,
    table: SampleTable,
    step: Callable[[Flags], Found],
    case: tuple[Flags, Flags, Callable[[Known], Tensor]],
) -> None:
    base, flags, formula = case
    without, _ = step(base)
    found, means = step(base | flags)
    known = Known(trainer, table)
    loss = formula(known)
    loss.backward()
    expected = gradients(trainer)
    trainer.model.zero_grad()
    assert_same_gradient(found, expected)
    assert means["loss"] == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    assert max(float((found[n] - without[n]).norm() / without[n].norm()) for n in found) > 1e-3, "no effect"
    measured = {"entropy_loss": (known.mean(known.entropy), known.weights.sum())}
    args = trainer.args
    if args.loss_type == "policy_loss":
        measured["kl_loss"] = (known.mean(known.kl(args)), known.weights.sum())
        bounds = {"clip": args.tis_clip, "clip_low": args.tis_clip_low}
        measured |= cor.mismatch_metrics(known.old, known.roll, known.mask, **bounds)
        del measured["mismatch_ratio_sq"]  # which the effective sample size is made of
    for name, (total, weight) in measured.items():
        assert means[name] == pytest.approx((total / weight).item(), rel=1e-9, abs=1e-12), name


def test_a_kl_in_the_reward_reaches_every_estimator_that_takes_it() -> None:
    """The others refuse --kl-coef (tests/arguments/test_problems.py)."""
    reached = {(base | flags).get("advantage_estimator") for base, flags, _ in CASES if flags.get("kl_coef")}
    assert reached == {name for name, estimator in ESTIMATORS.items() if estimator.takes_kl}


def test_every_flag_of_the_loss_has_a_case() -> None:
    names = {field.name for field in fields(Args)}
    read = {
        node.attr
        for file in ("batch.py", "columns.py", "loss.py")
        for part in ast.parse((TRAINING / file).read_text()).body
        if getattr(part, "name", None) not in OTHERS
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
    }
    tested = {name for _, flags, _ in CASES for name in flags}
    assert sorted((read & names) - tested) == sorted(ELSEWHERE)
