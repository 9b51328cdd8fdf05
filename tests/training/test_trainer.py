"""What one rollout of training does, against Hugging Face and against the long way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import ESTIMATORS
from tiny import gradients, one_rank, random_table, save_tiny_model, tiny_args, weights_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.training.columns import TokenColumns
from slimelite.training.parallel import whole
from slimelite.training.trainer import Trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def row_log_probs(hf: Any, table: SampleTable, row: int, temperature: float) -> Tensor:
    """Log-probs of a row's response, by transformers, one row at a time, from full logits."""
    prompt, response = table.row_slice("prompt_tokens", row), table.row_slice("response_tokens", row)
    ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)[None]
    log_p = torch.log_softmax(hf(ids).logits[0].double() / temperature, -1)
    return log_p[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]


def test_log_probs_are_those_of_transformers(model: Path) -> None:
    table = random_table()
    hf = AutoModelForCausalLM.from_pretrained(model)
    with one_rank(tiny_args(model, rollout_temperature=0.7)) as trainer:
        mine = trainer.log_probs(table)
    with torch.no_grad():
        theirs = torch.cat([row_log_probs(hf, table, row, 0.7) for row in range(len(table))])
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_shortcut_equals_the_long_way(model: Path, monkeypatch: pytest.MonkeyPatch, estimator: str) -> None:
    given = {"advantage_estimator": estimator, "correction": "tis", "normalize_advantages": estimator[0] == "r"}
    given |= {"use_critic": estimator.startswith("ppo"), "critic_lr": 1e-2}
    table, found = random_table(), []
    for long_way in (False, True):
        if long_way:
            monkeypatch.setattr("slimelite.training.columns.pass_begins", lambda *_: 0)
        with one_rank(tiny_args(model, **given)) as trainer:
            metrics = [trainer.train(i, table) for i in range(3)]
            found.append((metrics, weights_of(trainer)))
        assert ("perf/log_probs_time" in metrics[0]) == long_way
        assert {"rollout/log_probs", "rollout/entropy", "rollout/returns"} <= metrics[0].keys()
    (short, short_weights), (long, long_weights) = found
    for a, b in zip(short, long, strict=True):
        for name in a.keys() - {n for n in a if n.startswith("perf/")}:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), name
    for name, weight in short_weights.items():
        assert torch.equal(weight, long_weights[name]), name


@pytest.mark.parametrize("zeros", [0.5, 1.0])
def test_rows_without_gradient_are_not_computed_and_nothing_changes(
    model: Path, monkeypatch: pytest.MonkeyPatch, zeros: float
) -> None:
    first, table, found = random_table(), random_table(seed=9, zero_advantage=zeros), []
    for skip in (True, False):
        if not skip:
            monkeypatch.setattr(TokenColumns, "rows_with_gradient", lambda self, args: self._rows_with(self.mask))
        with one_rank(tiny_args(model, weight_decay=0.1)) as trainer:
            # Adam's momentum moves the weights on, also when a whole step has no gradient
            trainer.train(0, first)
            metrics = [trainer.train(i, table) for i in (1, 2)]
            found.append((metrics, weights_of(trainer)))
    (skipped, with_skip), (computed, without) = found
    assert skipped[0]["perf/computed_rows_ratio"] < 0.7 * computed[0]["perf/computed_rows_ratio"]
    for a, b in zip(skipped, computed, strict=True):
        for name in ("train/loss", "train/pg_loss", "train/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), name
        assert a.keys() == b.keys(), "mismatch and entropy are measured every step"
    assert {"train/train_rollout_logprob_abs_diff", "train/mismatch_ess", "train/entropy_loss"} <= skipped[0].keys()
    for name, weight in with_skip.items():
        torch.testing.assert_close(weight, without[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        {"entropy_coef": 0.01},
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_reference": True},
        {"loss_type": "sft_loss"},
    ],
)
def test_rows_without_advantage_are_computed_when_another_term_needs_them(model: Path, given: dict[str, Any]) -> None:
    table = random_table(zero_advantage=1.0, masked=0.0)
    with one_rank(tiny_args(model, **given)) as trainer:
        trainer.train(0, random_table())
        metrics = trainer.train(1, table)
    assert metrics["perf/computed_rows_ratio"] == 1.0
    assert metrics["train/grad_norm"] > 1e-4


def test_sft_loss_is_that_of_transformers(model: Path) -> None:
    """Whatever the rollout temperature; with the token mean, as transformers reduces."""
    table = random_table(masked=0.4)
    hf = AutoModelForCausalLM.from_pretrained(model)
    rows = range(len(table))
    ids = [np.concatenate([table.row_slice("prompt_tokens", r), table.row_slice("response_tokens", r)]) for r in rows]
    labels = [
        np.concatenate(
            [
                np.full(len(table.row_slice("prompt_tokens", r)), -100),
                np.where(table.row_slice("loss_mask", r), table.row_slice("response_tokens", r), -100),
            ]
        )
        for r in rows
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    padded = pad([torch.tensor(i, dtype=torch.int64) for i in ids], batch_first=True)
    attended = pad([torch.ones(len(i), dtype=torch.int64) for i in ids], batch_first=True)
    targets = pad([torch.tensor(t) for t in labels], batch_first=True, padding_value=-100)
    expected = hf(padded, attention_mask=attended, labels=targets).loss.item()
    given = {"loss_type": "sft_loss", "loss_aggregation": "token", "rollout_temperature": 0.5}
    with one_rank(tiny_args(model, **given, compute_advantages_and_returns=False)) as trainer:
        metrics = trainer.train(0, table)
        assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)
        for i in range(20):
            metrics = trainer.train(i, table)
    assert metrics["train/loss"] < 0.8 * expected


def test_what_does_not_fill_a_step_is_a_smaller_step(model: Path) -> None:
    table = random_table(groups=5, group_size=2)
    with one_rank(tiny_args(model, global_batch_size=4, lr=1e-3)) as trainer:
        metrics = trainer.train(0, table)
        assert trainer.progress.steps == 3
        together = weights_of(trainer)
    assert metrics["train/global_batch_size"] == pytest.approx(10 / 3)
    assert metrics["perf/log_probs_time"] > 0
    with one_rank(tiny_args(model, global_batch_size=4, lr=1e-3)) as trainer:
        old = torch.from_numpy(trainer.log_probs(table))
        steps = [np.arange(0, 4), np.arange(4, 8), np.arange(8, 10)]
        for rows in steps:
            part = table.select(rows)
            columns = trainer._columns(part, [np.arange(len(rows))])
            columns.old = old[table.response_offsets[rows[0]] : table.response_offsets[rows[-1] + 1]]
            trainer._columns = lambda *_, c=columns: c
            trainer.train(0, part)
            del trainer._columns
        for name, weight in weights_of(trainer).items():
            torch.testing.assert_close(together[name], weight, rtol=1e-5, atol=1e-6)


def test_the_reference_is_the_initial_policy_until_it_is_updated(model: Path) -> None:
    given = {"use_kl_loss": True, "kl_loss_coef": 0.01, "use_reference": True, "ref_update_interval": 3}
    with one_rank(tiny_args(model, **given)) as trainer:
        kl = [trainer.train(i, random_table(seed=i))["train/kl_loss"] for i in range(4)]
    assert abs(kl[0]) < 1e-8
    assert kl[2] > kl[1] > 1e-5
    assert abs(kl[3]) < 1e-8


def test_weights_are_not_those_of_a_file_that_is_written_to_meanwhile(tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path / "model") / "model.safetensors"
    given = {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_reference": True}
    with one_rank(tiny_args(file.parent, **given)) as trainer:
        assert trainer.reference is not None
        models = trainer.model, trainer.reference.model
        before = [{name: weight.clone() for name, weight in model.state_dict().items()} for model in models]
        with file.open("r+b") as written:
            written.seek(file.stat().st_size // 2)
            written.write(bytes(file.stat().st_size // 2))
        for model, weights in zip(models, before, strict=True):
            assert all(torch.equal(whole(weight), weights[name]) for name, weight in model.state_dict().items())


def test_a_step_without_finite_gradient_is_left_out_or_fatal(model: Path) -> None:
    table = random_table()
    table.advantage[0] = 1e38  # finite, and its gradient's norm is not
    with one_rank(tiny_args(model)) as trainer:
        before = weights_of(trainer)
        metrics = trainer.train(0, table)
        assert metrics["train/skipped_steps"] == 1
        assert "train/grad_norm" not in metrics
        assert trainer.progress.steps == 0
        for name, weight in weights_of(trainer).items():
            assert torch.equal(weight, before[name]), name
        assert trainer.train(1, random_table())["train/skipped_steps"] == 0
    with one_rank(tiny_args(model, nonfinite_grad="fail")) as trainer, pytest.raises(FloatingPointError, match="skip"):
        trainer.train(0, table)


def test_a_loss_that_is_no_number_is_left_out_or_fatal(model: Path) -> None:
    """Also where its gradient is finite, so that nothing but the loss tells."""
    plugin = f"{Path(__file__).parent / 'plugins.py'}:nan_without_a_gradient"
    given = {"loss_type": "custom_loss", "custom_loss_function_path": plugin, "max_tokens_per_gpu": 70}
    with one_rank(tiny_args(model, **given)) as trainer:
        before = weights_of(trainer)
        metrics = trainer.train(0, random_table())
        assert metrics["train/skipped_steps"] == 1
        assert trainer.progress.steps == 0
        for name, weight in weights_of(trainer).items():
            assert torch.equal(weight, before[name]), name
    with (
        one_rank(tiny_args(model, **given, nonfinite_grad="fail")) as trainer,
        pytest.raises(FloatingPointError, match="the step's loss is nan"),
    ):
        trainer.train(0, random_table())


@pytest.mark.parametrize("name", ["without_gradient", "one_number"])
def test_a_custom_loss_that_cannot_be_trained_on_is_refused(model: Path, name: str) -> None:
    plugin = f"{Path(__file__).parent / 'plugins.py'}:{name}"
    with (
        one_rank(tiny_args(model, loss_type="custom_loss", custom_loss_function_path=plugin)) as trainer,
        pytest.raises(ValueError, match=rf"{name} must return a loss for each of the \d+ tokens"),
    ):
        trainer.train(0, random_table())


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({}, "rewards"),
        ({"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}, "rewards"),
        (
            {"custom_reward_post_process_path": "my.process"},
            "the result of --custom-reward-post-process-path my.process",
        ),
        ({"advantage_estimator": "ppo", "use_critic": True, "critic_lr": 1e-2}, "rewards"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_advantage_that_is_not_finite_is_refused(
    model: Path, given: dict[str, Any], source: str, value: float
) -> None:
    table = random_table(masked=0.0)
    table.advantage[[2, 5]] = value
    with one_rank(tiny_args(model, **given)) as trainer:
        with pytest.raises(ValueError, match=rf"samples \[2, 5\] have advantages that are not finite; check {source}"):
            trainer.train(0, table)
        table.removed[[2, 5]] = True  # what is not trained on does no harm
        assert trainer.train(0, table)["train/skipped_steps"] == 0


def test_mismatch_is_measured_against_the_engine(model: Path) -> None:
    table = random_table()
    with one_rank(tiny_args(model, use_rollout_logprobs=True)) as trainer:
        table.rollout_log_probs = trainer.log_probs(table).astype(np.float32)
        metrics = trainer.train(0, table)
        assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert metrics["train/mismatch_ess"] == pytest.approx(1, abs=1e-5)
        table.rollout_log_probs = table.rollout_log_probs - np.float32(0.1)
        metrics = trainer.train(1, table)
    assert metrics["train/mismatch_ratio"] > 1.05
    assert metrics["train/mismatch_k3"] > 0
    assert metrics["train/ois"] != pytest.approx(1, abs=1e-3), "the loss is relative to the engine's log-probs"


def test_kl_in_the_reward_moves_the_advantages(model: Path) -> None:
    given = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "use_reference": True}
    table = random_table(zero_advantage=1.0)
    with one_rank(tiny_args(model, **given, kl_coef=0.5)) as trainer:
        assert trainer.train(0, table)["train/grad_norm"] == 0, "equal rewards, no KL yet"
        trainer.train(1, random_table())
        metrics = trainer.train(2, table)
    assert metrics["train/grad_norm"] > 0
    assert metrics["rollout/kl"] != 0


def test_first_step_truths_hold_and_their_breach_is_fatal(model: Path, tmp_path: Path) -> None:
    given = {"ci_test": True, "use_kl_loss": True, "kl_loss_coef": 0.1, "use_reference": True}
    table = random_table()
    with one_rank(tiny_args(model)) as trainer:
        table.rollout_log_probs = trainer.log_probs(table).astype(np.float32)
    with one_rank(tiny_args(model, **given)) as trainer:
        metrics = trainer.train(0, table)
        assert "perf/log_probs_time" in metrics, "the shortcut proves nothing"
        assert "perf/log_probs_time" not in trainer.train(1, table)
    other = save_tiny_model(tmp_path / "other", seed=1)
    with one_rank(tiny_args(model, **given)) as trainer:
        trainer.reference = type(trainer.reference)(tiny_args(other), trainer.world, str(other))
        with pytest.raises(AssertionError, match="KL to the initial policy"):
            trainer.train(0, table)
    for excused in ({"ci_disable_kl_checker": True}, {"ref_load": str(other)}):
        with one_rank(tiny_args(model, **given | excused)) as trainer:
            trainer.reference = type(trainer.reference)(tiny_args(other), trainer.world, str(other))
            assert trainer.train(0, table)["train/kl_loss"] > 0.1
    with one_rank(tiny_args(model, **given)) as trainer, pytest.raises(AssertionError, match="trainer and engine"):
        trainer.train(0, random_table())


@pytest.mark.parametrize(
    "given",
    [
        {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "use_reference": True},
        {"custom_advantage_function_path": f"{Path(__file__).parent / 'plugins.py'}:all_ones"},
        {"use_opd": True, "opd_type": "sglang"},
        {},
    ],
)
def test_the_check_compares_equal_micro_batches_whatever_reads_the_old_log_probs(
    model: Path, given: dict[str, Any]
) -> None:
    args = tiny_args(model, ci_test=True, log_probs_max_tokens_per_gpu=30, max_tokens_per_gpu=200, **given)
    table = random_table(masked=0.0)
    with one_rank(args) as trainer:
        table.rollout_log_probs = trainer.log_probs(table).astype(np.float32)
        table.teacher_log_probs = table.rollout_log_probs - np.float32(1)
        assert trainer.train(0, table)["train/logprob_abs_diff"] == 0


def test_what_has_no_gradient_is_checked_all_the_same(model: Path) -> None:
    """Nothing to learn, nothing to train on: neither excuses an engine that disagrees."""
    table = random_table(zero_advantage=1.0)
    with one_rank(tiny_args(model, ci_test=True)) as trainer:
        nothing = random_table(masked=2.0)
        assert trainer.train(0, nothing)["perf/computed_rows_ratio"] == 0
        table.rollout_log_probs = trainer.log_probs(table).astype(np.float32)
        last = table.response_tokens[table.response_offsets[-2] :]
        table.rollout_log_probs[-len(last) :] -= 0.1
        with pytest.raises(AssertionError, match=r"more than 0\.001"):
            trainer.train(1, table)
        table.rollout_log_probs[-len(last) :] += 0.1
        assert trainer.train(1, table)["perf/computed_rows_ratio"] == table.mask_sums.astype(bool).mean()
        assert trainer.train(2, table)["perf/computed_rows_ratio"] <= 8 / 16
    given = {"ci_test": True, "ci_train_rollout_logprob_abs_diff_threshold": 0.5}
    table.rollout_log_probs -= 0.1
    with one_rank(tiny_args(model, **given, debug_train_only=True)) as trainer:
        trainer.train(0, table)  # of another engine: the flag alone counts


def test_steps_of_a_rollout_are_told_apart(model: Path) -> None:
    args = tiny_args(model, global_batch_size=8, lr_warmup_iters=4)
    table = random_table(masked=0.0)
    with one_rank(args) as trainer:
        table.rollout_log_probs = trainer.log_probs(table).astype(np.float32)
        metrics = trainer.train(0, table)
        first, second = trainer.step_metrics
        train = {name for name in metrics if name.startswith("train/")}
        assert first.keys() == second.keys() == train
        assert first["train/ois"] == pytest.approx(1, abs=1e-5)
        assert second["train/ois"] != pytest.approx(1, abs=1e-3)
        for name in ("train/loss", "train/grad_norm"):
            assert metrics[name] == pytest.approx((first[name] + second[name]) / 2), name
        assert (first["train/lr-pg_0"], second["train/lr-pg_0"]) == pytest.approx((2.5e-3, 5e-3))
        # against the weights before the first step, which are the engine's
        assert second["train/train_rollout_logprob_abs_diff"] < 1e-5
        trainer.train(1, table.select(np.arange(8)))
        assert len(trainer.step_metrics) == 1


def test_old_log_probs_keep_to_their_own_cap(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caps: list[int | None] = []
    deal = Trainer._deal
    monkeypatch.setattr(Trainer, "_deal", lambda self, *a: (caps.append((*a, None)[2]), deal(self, *a))[1])
    for ci_test, used in ((False, True), (True, False)):
        caps.clear()
        args = tiny_args(model, global_batch_size=8, log_probs_max_tokens_per_gpu=30, ci_test=ci_test)
        table = random_table()
        with one_rank(args) as trainer:
            table.rollout_log_probs = trainer.log_probs(table).astype(np.float32)
            del caps[:]
            trainer.train(0, table)
        assert (30 in caps) == used


def test_plugins(model: Path) -> None:
    table, here = random_table(), Path(__file__).parent / "plugins.py"

    def norm(**given: Any) -> float:
        with one_rank(tiny_args(model, **given)) as trainer:
            return trainer.train(0, table)["train/grad_norm"]

    sft = norm(loss_type="sft_loss")
    assert norm(loss_type="custom_loss", custom_loss_function_path=f"{here}:twice_the_likelihood") == pytest.approx(
        2 * sft
    )
    with one_rank(tiny_args(model, custom_advantage_function_path=f"{here}:all_ones")) as trainer:
        trainer.train(0, table)
        assert trainer.trained_columns["advantages"].tolist() == [1.0] * len(table.response_tokens)
    # with advantages of 1 the policy gradient is that of the likelihood
    ones = {"custom_advantage_function_path": f"{here}:all_ones"}
    assert norm(**ones) == pytest.approx(sft, rel=1e-5)
    with pytest.raises(
        ValueError, match="have advantages that are not finite; check the columns that --custom-advantage-function"
    ):
        norm(custom_advantage_function_path=f"{here}:no_number")
    assert norm(**ones, normalize_advantages=True) == 0, "equal advantages are whitened to nothing"


def test_a_custom_loss_has_the_reference_and_adds_the_kl_itself(model: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    table, kl = random_table(zero_advantage=1.0), {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2"}
    plugin = f"{Path(__file__).parent / 'plugins.py'}:half_squared_log_ratio"
    found = []
    for given in ({}, {"loss_type": "custom_loss", "custom_loss_function_path": plugin}):
        with one_rank(tiny_args(model, use_reference=True, ref_load=str(other), **kl, **given)) as trainer:
            found.append(trainer.train(0, table))
    ours, custom = found
    assert custom["train/grad_norm"] == pytest.approx(ours["train/grad_norm"], rel=1e-5)
    assert custom["rollout/kl"] == pytest.approx(ours["rollout/kl"], rel=1e-5)


def test_a_term_of_ones_own_may_be_a_function_of_the_entropy(model: Path) -> None:
    plugins, norms = Path(__file__).parent / "plugins.py", []
    own = {"loss_type": "custom_loss", "custom_loss_function_path": f"{plugins}:entropy_bonus"}
    for flags in ({"entropy_coef": 0.5}, own, {}):
        with one_rank(tiny_args(model, **flags)) as trainer:
            norms.append(trainer.train(0, random_table())["train/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] != pytest.approx(norms[2], rel=1e-3)


def test_a_whole_loss_without_a_gradient_is_refused(model: Path) -> None:
    plugin = f"{Path(__file__).parent / 'plugins.py'}:whole_without_gradient"
    with (
        one_rank(tiny_args(model, loss_type="custom_loss", custom_loss_function_path=plugin)) as trainer,
        pytest.raises(ValueError, match=f"path {plugin} must return a Loss whose total is computed from log_probs"),
    ):
        trainer.train(0, random_table())


def test_sft_has_no_kl(model: Path) -> None:
    found = []
    for kl in ({}, {"use_kl_loss": True, "kl_loss_coef": 0.1}, {"kl_coef": 0.1}):
        with one_rank(tiny_args(model, loss_type="sft_loss", **kl)) as trainer:
            found.append(trainer.train(0, random_table()))
    assert found[0]["train/loss"] == found[1]["train/loss"] == found[2]["train/loss"]
    assert found[0].keys() == found[1].keys() == found[2].keys(), "no pass for log-probs that nothing reads"


def test_what_cannot_be_trained_on_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="need a store"):
        Trainer(tiny_args(model), world_size=2)
    with pytest.raises(ValueError, match="no model at"):
        Trainer(tiny_args("/nowhere/model"))
    table = random_table()
    table.rollout_log_probs[3] = np.nan
    table.loss_mask[:] = True
    with one_rank(tiny_args(model, correction="tis")) as trainer:
        with pytest.raises(ValueError, match=r"samples \[0\] have no engine log-probs"):
            trainer.train(0, table)
        table.response_tokens[4] = 61
        with pytest.raises(ValueError, match="token 61 is outside the model's vocabulary of 61"):
            trainer.train(0, table)
        empty_prompt = Sample(group_index=0, index=7, tokens=[1, 2], response_length=2, reward=1.0)
        empty_prompt.rollout_log_probs = [-1.0, -1.0]
        table = SampleTable.from_samples([[empty_prompt]])
        table.advantage[:] = 1.0
        with pytest.raises(ValueError, match=r"samples \[7\] have no prompt"):
            trainer.train(0, table)


def test_a_rollout_of_one_step_is_the_same_in_two_verbs(model: Path) -> None:
    """Bit for bit, metrics too; a second table adds its gradient, and what does not fit is refused."""
    table, other = random_table(), random_table(seed=1)
    with one_rank(tiny_args(model, lr_warmup_iters=4)) as trainer:
        whole = [trainer.train(rollout_id, table) for rollout_id in range(2)]
        expected = trainer.log_probs(table)
    # a table is one step whatever the flag says
    with one_rank(tiny_args(model, lr_warmup_iters=4, global_batch_size=2)) as trainer:
        for before in whole:
            metrics = trainer.forward_backward(table)
            with pytest.raises(ValueError, match="train: the gradient of forward_backward would be lost"):
                trainer.train(0, table)
            metrics |= trainer.optim_step()
            assert {name: value for name, value in metrics.items() if not name.startswith("perf/")} == {
                name: value for name, value in before.items() if not name.startswith("perf/")
            }
        assert (trainer.log_probs(table) == expected).all()
        with pytest.raises(ValueError, match="there is no gradient"):
            trainer.optim_step()
        trainer.forward_backward(table)
        one = gradients(trainer)
        trainer.forward_backward(other)
        both = gradients(trainer)
        trainer.model.zero_grad()
        trainer.forward_backward(other)
        for name, gradient in gradients(trainer).items():
            torch.testing.assert_close(both[name] - one[name], gradient, rtol=1e-4, atol=1e-6)
    wrong = pytest.raises(ValueError, match="--reset-optimizer-states needs whole rollouts")
    with one_rank(tiny_args(model, reset_optimizer_states=True)) as trainer, wrong:
        trainer.forward_backward(table)
