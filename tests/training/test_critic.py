"""PPO's critic through the trainer (`test_oracle.py` has its values, advantages and steps against plain loops), and
the frozen reference: the policy at step 0, whose log-probs are equal to the bit in the same compute dtype.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import VOCAB, exact_norms, on_ranks, one_rank, random_table, save_tiny_model, tiny_args, weights_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.arguments import Args
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.training import trainer as trainer_module
from slimelite.training.columns import TokenColumns
from slimelite.training.critic import Critic, ValueModel
from slimelite.training.learner import MetricSums, table_scores
from slimelite.training.parallel import World, local, whole
from slimelite.training.planning import Step, split_steps
from slimelite.training.trainer import Trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def ppo_args(model: Path, **changes: Any) -> Args:
    given = {"advantage_estimator": "ppo", "use_critic": True, "critic_lr": 1e-2, "loss_aggregation": "rollout"}
    return tiny_args(model, **(given | changes))


def ppo_table(seed: int = 3) -> SampleTable:
    """Fan-out siblings, a removed sample, tool tokens, a fully masked response; the advantage column is the reward."""
    table = random_table(seed=seed, groups=5, group_size=4, masked=0.3)
    table.rollout_id[1] = table.rollout_id[0]
    table.removed[5] = True
    table.loss_mask[table.response_offsets[9] : table.response_offsets[10]] = False
    table.advantage = table.reward.astype(np.float32).astype(np.float64)
    return table


def critic_of(trainer: Trainer) -> Critic:
    assert trainer.critic is not None
    return trainer.critic


def make_exact(trainer: Trainer) -> None:
    """Everything in float64, and a head that has learnt something."""
    critic = critic_of(trainer)
    for model in (trainer.model, critic.model, *([trainer.reference.model] if trainer.reference else [])):
        model.double()
        exact_norms(model)
    for name, weight in critic.model.named_weights():
        if name.startswith("lm_head"):  # its one row is on the first rank
            part = local(weight.detach())
            part.copy_(0.1 * torch.arange(1, part.numel() + 1).double().sin().view_as(part))


def critic_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {n: whole(p.detach()).clone() for n, p in critic_of(trainer).model.named_weights()}


def critic_gradient(trainer: Trainer, table: SampleTable) -> tuple[dict[str, Tensor], dict[str, float], TokenColumns]:
    """Of one optimizer step over the table in float64, with old values that the clip has something to do with."""
    make_exact(trainer)
    critic = critic_of(trainer)
    (rows,) = split_steps(table.rollout_id, table.unit_id, 1000)
    columns = trainer._columns(table, [rows])
    assert columns.values is not None
    columns.values = columns.values + 0.3 * torch.from_numpy(table.response_tokens.astype(np.float64)).sin()
    sums = MetricSums(trainer.world)
    step = Step(rows, trainer._deal(table, rows[table.mask_sums[rows] > 0]))
    critic.gradient(columns, step, sums)
    found = {n: whole(p.grad).clone() for n, p in critic.model.named_weights()}
    critic.model.zero_grad()
    return found, sums.means()[0], columns


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor], limit: float = 1e-9) -> None:
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert theirs[name].norm() > 0, name
        assert (mine[name] - theirs[name]).norm() / theirs[name].norm() < limit, name


@pytest.mark.parametrize("aggregation", ["rollout", "token", "constant"])
def test_micro_batches_and_order_do_not_matter(model: Path, aggregation: str) -> None:
    found = []
    table = ppo_table()
    order = np.random.default_rng(0).permutation(len(table))
    for packing, rows in (
        ({"max_tokens_per_gpu": 10_000}, None),
        ({"max_tokens_per_gpu": 40}, order),
        ({"use_dynamic_batch_size": False, "gradient_checkpointing": True}, None),
    ):
        args = ppo_args(model, loss_aggregation=aggregation, normalize_advantages=True, **packing)
        with one_rank(args) as trainer:
            found.append(critic_gradient(trainer, table if rows is None else table.select(rows)))
    for gradient, means, _ in found[1:]:
        assert_same(gradient, found[0][0])
        assert means == pytest.approx(found[0][1], rel=1e-9, abs=1e-12)


def rollouts_on_ranks(trainer: Trainer, table: SampleTable, folder: str) -> dict[str, Any]:
    history = [trainer.train(i, table) for i in range(4)]
    trainer.save(f"{folder}/checkpoint", 3)
    rank, size = trainer.world.rank, trainer.world.ranks
    gradient, means, _ = critic_gradient(
        Trainer(trainer.args, rank=rank, world_size=size, store=dist.HashStore()), table
    )
    return {"history": history, "weights": critic_weights(trainer), "gradient": gradient, "means": means}


def test_ranks_do_not_matter(model: Path, tmp_path: Path) -> None:
    table = ppo_table()
    args = ppo_args(model, global_batch_size=8, max_tokens_per_gpu=60, critic_lr=1e-3, lr=1e-3, num_critic_only_steps=1)
    many = on_ranks(2, rollouts_on_ranks, args, table, str(tmp_path))
    with one_rank(args) as trainer:
        for i, theirs in enumerate(many["history"]):
            mine = trainer.train(i, table)
            assert mine.keys() == theirs.keys()
            for name in mine.keys() - {n for n in mine if n.startswith("perf/")}:
                assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-5), name
        for name, weight in critic_weights(trainer).items():
            torch.testing.assert_close(many["weights"][name], weight, rtol=1e-3, atol=1e-4)
        trainer.load(str(tmp_path / "checkpoint"))  # what two ranks saved
        for name, weight in critic_weights(trainer).items():
            assert torch.equal(many["weights"][name], weight), name
    with one_rank(args) as trainer:
        gradient, means, _ = critic_gradient(trainer, table)
    assert_same(many["gradient"], gradient)
    assert many["means"] == pytest.approx(means, rel=1e-9, abs=1e-12)


def test_the_critic_learns_and_its_values_are_those_before_the_step(model: Path) -> None:
    table = ppo_table()
    with one_rank(ppo_args(model, lr=0.0)) as trainer:
        first = trainer.train(0, table)
        assert first["rollout/values"] == 0, "a new critic says nothing"
        trained = table.mask_sums > 0
        # with gamma and lambda 1 every token's return is the reward of its response
        assert first["rollout/returns"] == pytest.approx(table.advantage[trained].mean(), rel=1e-6)
        assert first["rollout/advantages"] == pytest.approx(first["rollout/returns"], rel=1e-6)
        assert first["train/critic-explained_variance"] == pytest.approx(0, abs=1e-12)
        for i in range(1, 25):
            last = trainer.train(i, table)
    assert last["rollout/values"] + last["rollout/advantages"] == pytest.approx(last["rollout/returns"], rel=1e-5)
    assert last["train/critic-value_loss"] < 0.1 * first["train/critic-value_loss"]
    assert last["train/critic-explained_variance"] > 0.5
    assert last["train/critic-value_clipfrac"] == 0, "in a rollout's only step nothing has moved yet"


def test_whitening_leaves_the_returns_alone(model: Path) -> None:
    table, found = ppo_table(), []
    for whitened in (False, True):
        with one_rank(ppo_args(model, normalize_advantages=whitened)) as trainer:
            columns = trainer._columns(table, [np.arange(len(table))])
            found.append((columns.returns, columns.advantages[columns.mask]))
    assert torch.equal(found[0][0], found[1][0])
    assert float(found[1][1].mean()) == pytest.approx(0, abs=1e-6)
    assert float(found[1][1].std()) == pytest.approx(1, rel=1e-4)
    assert float(found[0][1].mean()) > 0.1


def returns_of_one(args: Args, table: SampleTable, columns: TokenColumns) -> None:
    assert columns.values is not None
    columns.advantages = torch.zeros_like(columns.values)
    columns.returns = torch.ones_like(columns.values)


def no_returns(args: Args, table: SampleTable, columns: TokenColumns) -> None:
    """Sets nothing."""


def test_the_critic_trains_on_rows_that_the_policy_skips(model: Path) -> None:
    table, here = random_table(groups=8, masked=0.0), str(Path(__file__))
    with one_rank(ppo_args(model, custom_advantage_function_path=f"{here}:returns_of_one")) as trainer:
        metrics = trainer.train(0, table)
    assert metrics["perf/computed_rows_ratio"] == 8 / 32, "without an advantage a few are measured"
    assert metrics["train/critic-value_loss"] == pytest.approx(1, rel=1e-6), "the whole table: (0 - 1)²"
    with (
        one_rank(ppo_args(model, custom_advantage_function_path=f"{here}:no_returns")) as trainer,
        pytest.raises(ValueError, match=r"did not set columns\.returns"),
    ):
        trainer.train(0, table)


def test_the_policy_waits_for_the_critic(model: Path) -> None:
    args = ppo_args(model, num_critic_only_steps=2, num_rollout=4, lr_decay_style="linear", global_batch_size=10)
    with one_rank(replace(args, num_steps_per_rollout=2)) as trainer:
        start, critic_start = weights_of(trainer), critic_weights(trainer)
        history = [(trainer.train(i, ppo_table(seed=i)), weights_of(trainer), trainer.step_metrics) for i in range(4)]
        assert any(not torch.equal(w, critic_start[n]) for n, w in critic_weights(trainer).items())
        assert (trainer.progress.steps, critic_of(trainer).progress.steps) == (4, 8)
    for metrics, weights, steps in history[:2]:
        assert all(torch.equal(weights[name], start[name]) for name in start)
        assert not {"train/loss", "train/grad_norm", "train/lr-pg_0", "perf/actor_train_time"} & metrics.keys()
        assert [step["train/critic-grad_norm"] > 0 for step in steps] == [True, True]
    assert any(not torch.equal(history[2][1][name], start[name]) for name in start)
    # each schedule ends with the run: the policy's has fewer steps
    assert [s["train/lr-pg_0"] for s in history[2][2] + history[3][2]] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert history[3][2][1]["train/critic-lr-pg_0"] == pytest.approx(1e-2 / 8)


def test_the_critic_has_a_rate_and_a_warm_up_of_its_own(model: Path) -> None:
    args = ppo_args(model, lr=1e-3, lr_warmup_iters=4, critic_lr=8e-3, critic_lr_warmup_iters=2, optimizer="muon")
    with one_rank(args) as trainer:
        found = [trainer.train(i, ppo_table()) for i in range(3)]
        assert [type(o).__name__ for o in critic_of(trainer).optimizers.all] == ["AdamW"]
    assert [m["train/lr-pg_0"] for m in found] == pytest.approx([2.5e-4, 5e-4, 7.5e-4])
    assert [m["train/critic-lr-pg_0"] for m in found] == pytest.approx([4e-3, 8e-3, 8e-3])


@pytest.mark.parametrize("saved_after", [1, 2])
def test_resuming_goes_on_bit_for_bit(model: Path, tmp_path: Path, saved_after: int) -> None:
    """After rollout 1 the policy has not begun, nor has its optimizer."""
    schedule = {"lr_decay_style": "cosine", "num_rollout": 6, "num_critic_only_steps": 2, "global_batch_size": 10}
    args = ppo_args(model, deterministic_mode=True, normalize_advantages=True, num_steps_per_rollout=2, **schedule)
    tables = [ppo_table(seed=i) for i in range(6)]
    try:
        with one_rank(args) as trainer:
            straight = [trainer.train(i, table) for i, table in enumerate(tables)]
            expected = weights_of(trainer), critic_weights(trainer)
        with one_rank(args) as trainer:
            for i in range(saved_after + 1):
                trainer.train(i, tables[i])
            trainer.save(str(tmp_path), saved_after)
        with one_rank(args) as trainer:
            assert trainer.load(str(tmp_path)) == saved_after
            resumed = [trainer.train(i, tables[i]) for i in range(saved_after + 1, 6)]
            found = weights_of(trainer), critic_weights(trainer)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(straight[saved_after + 1 :], resumed, strict=True):
        same = {k: v for k, v in a.items() if not k.startswith("perf/")}
        assert same == {k: v for k, v in b.items() if not k.startswith("perf/")}
    for one, other in zip(expected, found, strict=True):
        for name, weight in one.items():
            assert torch.equal(weight, other[name]), name


def test_a_critic_starts_from_a_model_or_from_a_saved_one(model: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1, num_hidden_layers=3)
    with one_rank(ppo_args(model)) as trainer:
        for i in range(3):
            trainer.train(i, ppo_table())
        trainer.save(str(tmp_path / "saved"), 2)
        saved = critic_weights(trainer)
    with one_rank(ppo_args(model, critic_load=str(tmp_path / "saved" / "critic"))) as trainer:
        critic = critic_of(trainer)
        assert critic.progress.steps == 0
        assert not critic.optimizers.all[0].state
        for name, weight in critic_weights(trainer).items():
            assert torch.equal(weight, saved[name]), name
    with one_rank(ppo_args(model, critic_load=str(other))) as trainer:
        assert critic_of(trainer).model.hf.config.num_hidden_layers == 3
        assert trainer.model.hf.config.num_hidden_layers == 2
        with pytest.raises(ValueError, match="another model"):
            trainer.load(str(tmp_path / "saved"))
    with one_rank(tiny_args(model)) as trainer:
        trainer.save(str(tmp_path / "alone"), 0)
    with one_rank(ppo_args(model)) as trainer, pytest.raises(ValueError, match="saved without a critic"):
        trainer.load(str(tmp_path / "alone"))


def test_another_rate_on_resume_is_named_by_the_critics_flag(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with one_rank(ppo_args(model)) as trainer:
        trainer.save(str(tmp_path), 0)
    with one_rank(ppo_args(model, critic_lr=5e-3)) as trainer:
        trainer.load(str(tmp_path))
        assert trainer.train(1, ppo_table())["train/critic-lr-pg_0"] == pytest.approx(1e-2)
    assert "--critic-lr 0.01 (not 0.005)" in caplog.text


def test_nothing_to_train_on_is_no_crash(model: Path) -> None:
    table = ppo_table()
    table.loss_mask[:] = False
    with one_rank(ppo_args(model, normalize_advantages=True)) as trainer:
        start = critic_weights(trainer)
        metrics = trainer.train(0, table)
        for name, weight in critic_weights(trainer).items():
            assert torch.equal(weight, start[name]), name
    assert metrics["train/critic-value_loss"] == metrics["train/critic-grad_norm"] == 0
    assert "rollout/values" not in metrics


def test_first_step_truths_hold_and_their_breach_is_fatal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = ppo_table()
    with one_rank(ppo_args(model)) as trainer:
        table.rollout_log_probs = trainer.log_probs(table).astype(np.float32)
    args = ppo_args(model, ci_test=True, normalize_advantages=True, kl_coef=0.1, use_reference=True)
    with one_rank(args) as trainer:
        metrics = trainer.train(0, table)
    assert metrics["train/pg_clipfrac"] == metrics["train/critic-value_clipfrac"] == 0
    scores = trainer_module.table_scores

    def shifted(model: Any, *rest: Any) -> Any:
        found = scores(model, *rest)
        return (found[0] + 0.01,) if isinstance(model, ValueModel) else found

    monkeypatch.setattr(trainer_module, "table_scores", shifted)
    with one_rank(args) as trainer, pytest.raises(AssertionError, match="old value"):
        trainer.train(0, table)


# what matters of each family at positions around 1,000: its rope base, its scaling, its head width
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": 32},
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "smollm2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},  # a llama
}


def save_model(family: str, folder: Path) -> Path:
    config = AutoConfig.for_model(
        "llama" if family == "smollm2" else family,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def long_row() -> SampleTable:
    """One row whose response ends at position 1,100."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 1101).tolist()
    sample = Sample(group_index=0, index=0, tokens=tokens[:900], reward=1.0)
    sample.append_response_tokens(tokens[900:], log_probs=[-1.0] * 201)
    return SampleTable.from_samples([[sample]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_policy_at_step_0(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "compute_dtype", dtype)  # bf16 is what a GPU's world computes in
    table = long_row()
    args = tiny_args(save_model(family, tmp_path), use_kl_loss=True, kl_loss_coef=0.1, use_reference=True)
    with one_rank(args) as trainer:
        assert trainer.reference is not None
        columns, dealt = TokenColumns.from_table(table), [[np.array([0])]]
        policy, _ = table_scores(trainer.model, columns, dealt, trainer.world, 1.0)
        with trainer.reference.weights() as model:
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert {b.dtype for b in model.buffers()} == {torch.float32}
            reference, _ = table_scores(model, columns, dealt, trainer.world, 1.0)
    assert torch.isfinite(policy).all()
    assert torch.equal(policy, reference)
