"""YAML files: below the command line, above the defaults, just as strict."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimelite.arguments import Args, make_args
from slimelite.arguments.flags import all_flags
from slimelite.arguments.sources import Settings, load_yaml
from tests.arguments.conftest import COMPLETE, CPU, Make, Problems


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Text -> the words that name a file with it."""

    def write(text: str, option: str = "--config") -> str:
        path = tmp_path / f"{option[2:]}.yaml"
        path.write_text(text)
        return f"{option} {path}"

    return write


def test_precedence(make: Make, config: Any) -> None:
    words = (
        config("lr: 1e-4\nseed: 7\ngamma: 0.5") + " " + config("lr: 3\nseed: 3\nlambd: 0.25", "--custom-config-path")
    )
    args = make(f"--lr 2 {words}")
    assert (args.lr, args.seed, args.gamma, args.lambd, args.eps_clip) == (2.0, 7, 0.5, 0.25, 0.2)


def test_every_kind_of_value(make: Make, config: Any) -> None:
    args = make(
        config(
            "lr: 1e-4\n"
            "eps-clip: 2.0e-1\n"
            "colocate: true\n"
            "rollout_shuffle: false\n"
            "disable-grpo-std-normalization: true\n"
            "rewards_normalization: true\n"
            "offload_train: null\n"
            "prompt_data: one.jsonl\n"
            'rollout_stop: ["\\n", "--"]\n'
            "rollout_stop_token_ids: []\n"
            "train_env_vars: {A: 1}\n"
            "wandb_group: 42\n"
            "tensor_model_parallel_size: 1\n"
            "sequence_parallel: true\n"
            "sglang_chunked_prefill_size: 4096\n"
            "moe_grouped_gemm: false\n"
        )
    )
    assert (args.lr, args.eps_clip, args.colocate, args.rollout_shuffle) == (1e-4, 0.2, True, False)
    assert (args.grpo_std_normalization, args.rewards_normalization) == (False, True)
    assert args.rollout_stop == ["\n", "--"]
    assert args.train_env_vars == {"A": 1}
    assert args.wandb_group == "42"
    assert args.sglang_overrides == {"chunked_prefill_size": 4096}
    assert "--sequence-parallel" in dict(args.no_effect)
    assert "--moe-grouped-gemm" not in dict(args.no_effect)
    assert args.prompt_data == ["p.jsonl"]  # the command line's


def test_a_switch_of_the_file_is_turned_off_on_the_command_line(make: Make, config: Any) -> None:
    words = config("colocate: true\ndisable_grpo_std_normalization: true")
    args = make(f"{words} --no-colocate --grpo-std-normalization")
    assert (args.colocate, args.grpo_std_normalization) == (False, True)


def test_derivations_see_the_file(make: Make, config: Any) -> None:
    """slime applies its custom config after them, so that this had no effect there."""
    assert make(config("num_steps_per_rollout: 4", "--custom-config-path")).global_batch_size == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr: fast", "--lr takes a number, not 'fast'"),
        ("lr: .nan", "--lr takes a number, not nan"),
        ("colocate: maybe", "--colocate must be true or false, not 'maybe'"),
        ("mtp_num_layers: 1", "--mtp-num-layers is not supported"),
        ("- lr", "must be a mapping of arguments"),
        ("# lr: 1", "is empty"),
        ("lr: [1", "is not YAML"),
        ("lr: 1\nseed: 1\nlr: 2", "line 3: lr is given a second time"),
        ("train_env_vars: {A: 1, B: 2, A: 3}", "line 1: A is given a second time"),
        ("num-rollout: 1\nnum_rollout: 2", "--num-rollout is given twice, once with - and once with _"),
        ("config: other.yaml", "--config can only be given on the command line, not in a file of arguments"),
        ("custom_config_path: other.yaml", "--custom-config-path can only be given on the command line"),
        ("lr: &a [*a]", "--lr maximum recursion depth"),
        ("# of your own\nmine: &a [*a]", "--mine"),
        ("# of your own\nmine: {2020-01-01: b}", "--mine"),
        ("lr: " + "[" * 1000, "maximum recursion depth"),
        ("apply_chat_template_kwargs: {day: 2020-01-01}\nlr: fast", "--lr takes a number, not 'fast'"),
    ],
)
def test_mistakes_in_a_file(problems: Problems, config: Any, text: str, says: str) -> None:
    for option in ("--config", "--custom-config-path"):
        (problem,) = problems(config(text, option))
        assert ".yaml" in problem
        assert says in problem


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rollout_batchsize: 3", "did you mean --rollout-batch-size?"),
        ("esp_clip: false", "did you mean --eps-clip?"),
        ("data: {input_key: x}", "--data is a section, not a flag; a file of arguments has no sections: move its keys"),
    ],
)
def test_unknown_keys_are_mistakes_in_config_alone(problems: Problems, config: Any, text: str, says: str) -> None:
    (problem,) = problems(config(text))
    assert says in problem
    assert problems(config(text, "--custom-config-path")) == []


def test_keys_of_a_custom_config_that_are_no_flags(make: Make, config: Any) -> None:
    """slime sets any key on its args: its plugins read their own settings there."""
    text = "lr: 1e-4\nmax_turns: 3\nsearch-url: 'http://x'\nrollout_batchsize: 5\ntools: {a: [1, 2]}\nnothing: null"
    args: Any = make(config(text, "--custom-config-path"))
    own = (args.lr, args.max_turns, args.search_url, args.tools, args.nothing)
    assert own == (1e-4, 3, "http://x", {"a": [1, 2]}, None)
    assert not hasattr(args, "max_turn")
    (note,) = [n for n in args.notes if "--custom-config-path" in n]
    assert "rollout_batchsize (the nearest flag is --rollout-batch-size)" in note
    copy = pickle.loads(pickle.dumps(args))
    assert (copy.max_turns, replace(copy, lr=1.0).max_turns) == (3, 3)


def test_a_key_of_a_custom_config_hides_no_attribute(problems: Problems, config: Any) -> None:
    """``args.job`` is read in many places; plugins get ``rollout_context`` beside the arguments."""
    text = "job: translate\nrollout-context: x\nderivations: []\nqkv_format: thd\nmax_turns: 3"
    rest = "the arguments already have an attribute of this name; choose another name"
    names = ("derivations", "job", "rollout_context")
    assert problems(config(text, "--custom-config-path")) == [f"--custom-config-path {n}: {rest}" for n in names]


def test_one_file_of_each_kind(problems: Problems, config: Any) -> None:
    assert problems(config("lr: 1") + " " + config("lr: 1")) == [
        "--config is given twice: give one file, and override its values by flags on the command line"
    ]


def test_missing_file(problems: Problems) -> None:
    assert problems("--config nowhere.yaml") == ["--config nowhere.yaml: cannot be read: No such file or directory"]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--calculate-per-token-loss --colocate --dump-details d --num-steps-per-rollout 2 --use-wandb",
        "--loss-type sft_loss --rollout-stop a b --disable-rewards-normalization",
        "--debug-rollout-only --rollout-max-context-len 64 --advantage-estimator reinforce_plus_plus",
    ],
)
def test_resolved_arguments_read_back_the_same(make: Make, tmp_path: Path, words: str) -> None:
    """The run folder keeps them as YAML, to be repeated with --config."""
    first = make(words)
    values = {name: getattr(first, name) for name in all_flags(Args)}
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(values))
    again = make_args(["--config", str(path)], machine=CPU)
    changed = [n for n in values if getattr(again, n) != values[n] and n != "config"]
    assert changed == []
    assert COMPLETE.split()[1] == again.hf_checkpoint


def test_what_a_mapping_merges_may_be_said_again(tmp_path: Path) -> None:
    path = tmp_path / "merges.yaml"
    path.write_text("deep: {deeper: {base: &b {<<: {p: 1}, p: 2}}}\nother: {<<: *b}\nself: &s [*s]\n")
    settings = Settings()
    content = load_yaml(str(path), "--config", settings)
    assert settings.problems == []
    assert (content["other"], content["deep"]["deeper"]["base"]) == ({"p": 2}, {"p": 2})


# each line names the one before twice
BOMBS = {
    "lists": ("a0: &a0 [x, x]", "a{i}: &a{i} [*a{before}, *a{before}]"),
    "merges": ("a0: &a0 {{k: 1}}", "a{i}: &a{i} {{<<: [*a{before}, *a{before}]}}"),
    "keys": ("? &a0 [x, x]\n: 1", "? &a{i} [*a{before}, *a{before}]\n: 1"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_file_that_explodes_is_refused(problems: Problems, config: Any, kind: str) -> None:
    first, line = BOMBS[kind]
    lines = [first.format(), *(line.format(i=i, before=i - 1) for i in range(1, 60))]
    (problem,) = problems(config("\n".join(lines)))
    assert problem.endswith("has more than 100,000 values after its aliases are replaced")


def test_a_file_too_long_for_arguments_is_refused(problems: Problems, config: Any) -> None:
    (problem,) = problems(config("# " + "x" * 250_000))
    assert problem.endswith(
        "has more than 250,000 bytes, which is too large for a file of arguments: is it the right file?"
    )


def test_a_file_that_never_ends_is_refused(problems: Problems, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for place in (tmp_path / "pipe.yaml", "/dev/zero"):
        assert problems(f"--config {place}") == [f"--config {place}: is a pipe or a device; give a regular file"]
    assert problems(f"--config {tmp_path}") == [f"--config {tmp_path}: cannot be read: Is a directory"]
