"""--depth makes a model and its settings from one number; budgets say how long a run is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slimelite.arguments import Args, ArgumentError, make_args
from slimelite.arguments.documents import matrices
from slimelite.plan.memory import Shapes
from tests.arguments.conftest import CPU


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with a tokenizer.json of 65,000 tokens, three of them special."""
    vocabulary = {f"t{i}": i for i in range(64_997)}
    added = [{"id": i, "content": f"<{i}>"} for i in range(64_997, 65_000)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    return str(tmp_path)


def pretrain(words: str) -> Args:
    return make_args(["--loss-type", "pretrain_loss", "--prompt-data", "x.jsonl", *words.split()], machine=CPU)


def shapes(args: Args) -> Shapes:
    assert args.model_config is not None
    found = Shapes.of(args.model_config)
    assert found is not None
    return found


def test_depth_20_is_of_nanochats_class(tokenizer: str) -> None:
    args = pretrain(f"--depth 20 --tokenizer {tokenizer}")
    model = shapes(args)
    assert (model.layers, model.hidden, model.inner, model.vocab) == (20, 1280, 3456, 65_024)
    assert 5.5e8 < model.parameters < 5.7e8
    assert not model.tied
    assert args.num_rollout * args.rollout_batch_size * args.seq_length == pytest.approx(20 * matrices(model), rel=1e-3)
    assert args.optimizer == "muon"
    assert args.lr_decay_style == "WSD"
    assert args.lr_wsd_decay_iters == pytest.approx(0.4 * args.num_rollout, abs=1)


def test_settings_follow_from_the_depth_by_the_documented_rules(tokenizer: str) -> None:
    runs = {depth: pretrain(f"--depth {depth} --tokenizer {tokenizer}") for depth in (6, 12, 24)}
    reference = runs[12]
    assert reference.global_batch_size * reference.seq_length == 2**19
    assert (reference.muon_lr, reference.lr, reference.weight_decay) == (0.02, 3e-3, 0.1)
    for args in runs.values():
        model, other = shapes(args), shapes(reference)
        longer = matrices(model) / matrices(other)
        batch = args.global_batch_size * args.seq_length
        assert batch == 2 ** round(math.log2(2**19 * longer**0.383))
        scale = math.sqrt(batch / 2**19)
        assert args.muon_lr == pytest.approx(0.02 * scale)
        assert args.lr == pytest.approx(3e-3 * scale * math.sqrt(other.hidden / model.hidden))
        assert args.weight_decay == pytest.approx(0.1 * scale / longer)


def test_explicit_flags_win_over_the_depth(tokenizer: str) -> None:
    args = pretrain(
        f"--depth 4 --tokenizer {tokenizer} --hidden-size 128 --global-batch-size 6 --lr 1e-3 --optimizer adam "
        "--seq-length 256 --train-tokens 1e6 --num-steps-per-rollout 3"
    )
    assert (shapes(args).layers, shapes(args).hidden) == (4, 128)
    assert (args.lr, args.optimizer, args.global_batch_size, args.rollout_batch_size) == (1e-3, "adam", 6, 18)
    assert args.num_rollout == math.ceil(1e6 / (18 * 256))
    assert args.lr_wsd_decay_iters == round(0.4 * math.ceil(1e6 / (6 * 256)))


@pytest.mark.parametrize(
    ("batch", "steps"),
    [
        ("--global-batch-size 8", 400),
        ("--rollout-batch-size 8", 400),
        ("--rollout-batch-size 16 --num-steps-per-rollout 2", 800),
        ("--rollout-batch-size 16 --global-batch-size 8", 800),
    ],
)
def test_settings_are_those_of_the_batch_and_the_length_that_were_given(tokenizer: str, batch: str, steps: int) -> None:
    args = pretrain(f"--depth 4 --tokenizer {tokenizer} --seq-length 2048 --num-rollout 400 {batch}")
    scale = math.sqrt(8 * 2048 / 2**19)
    assert (args.optimizer, args.lr_decay_style, args.global_batch_size) == ("muon", "WSD", 8)
    assert args.muon_lr == pytest.approx(0.02 * scale)
    assert (args.lr_warmup_iters, args.lr_wsd_decay_iters) == (min(40, steps // 50), round(0.4 * steps))
    longer = steps * 8 * 2048 / (20 * matrices(shapes(pretrain(f"--depth 12 --tokenizer {tokenizer}"))))
    assert args.weight_decay == pytest.approx(0.1 * scale / longer)
    budget = pretrain(f"--depth 4 --tokenizer {tokenizer} --seq-length 2048 --train-tokens {steps * 8 * 2048} {batch}")
    assert (budget.weight_decay, budget.lr_wsd_decay_iters) == (args.weight_decay, args.lr_wsd_decay_iters)
    assert budget.num_rollout == 400


def test_the_weights_of_a_short_run_do_not_change_sign(tokenizer: str) -> None:
    args = pretrain(f"--depth 4 --tokenizer {tokenizer} --num-rollout 2 --global-batch-size 8")
    assert args.muon_lr * args.weight_decay == pytest.approx(0.1)


def test_the_best_model_has_the_fewest_bits_per_byte() -> None:
    words = "--hf-checkpoint owner/model --rollout-batch-size 4 --num-rollout 2 --eval-bpb e.jsonl --eval-interval 1"
    args = pretrain(f"{words} --save-best --save-hf model")
    assert (args.early_stop_metric, args.early_stop_mode) == ("eval/bpb", "min")
    rollouts = f"{words} --prompt-data p.jsonl --rollout-max-response-len 8 --n-samples-per-prompt 2"
    tasks = make_args(f"{rollouts} --eval-prompt-data e e.jsonl".split(), machine=CPU)
    assert tasks.early_stop_mode == "max"


def test_a_budget_of_operations_is_one_of_tokens(tokenizer: str) -> None:
    model = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 65000"
    words = f"{model} --tokenizer {tokenizer} --seq-length 128 --rollout-batch-size 4"
    tokens = pretrain(f"{words} --train-tokens 1e6").num_rollout
    parameters = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 65_000 * 64
    each = 6 * parameters + 3 * 4 * 2 * 64 * 128 / 2  # of a pair of tokens 4 for each channel, forward and twice back
    assert pretrain(f"{words} --train-flops {1e6 * each}").num_rollout == tokens == math.ceil(1e6 / 512)
    assert pretrain(f"{words} --tokens-per-parameter {1e6 / parameters}").num_rollout == tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--train-tokens 1e6 --num-rollout 3", "--train-tokens sets the length of the run; leave --num-rollout"),
        ("--train-tokens 1e6 --train-flops 1e9", "leave --num-rollout, --num-epoch and other budgets out"),
        ("--depth 4 --hf-checkpoint model --num-rollout 1", "--depth defines a new model: leave --hf-checkpoint out"),
        ("--depth 4 --num-epoch 1", "--num-epoch does not give the number of tokens.*replace it by --num-rollout"),
        ("--depth 4 --tokenizer nowhere --num-rollout 1", "--depth needs --tokenizer, a folder with a tokenizer.json"),
    ],
)
def test_contradictions_are_refused(tokenizer: str, words: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        pretrain(f"--rollout-batch-size 4 --tokenizer {tokenizer} {words}")
