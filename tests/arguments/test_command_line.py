"""Words to values: strict, whole, and fast."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slimelite.arguments import Args, ArgumentError, make_args, parse_args
from slimelite.arguments.flags import all_flags
from slimelite.arguments.help import meaning
from slimelite.arguments.sources import Settings, Vocabulary, known_flags, known_tables, recorded
from slimelite.plan.devices import Machine
from tests.arguments.conftest import COMPLETE, Make, Problems

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("--esp-clip 0.3", "--eps-clip"),
        ("--rollout-batchsize 8", "--rollout-batch-size"),
        ("--rollout_batch_size 8", "--rollout-batch-size"),
        ("--use-dynamic-batchsize", "--use-dynamic-batch-size"),
        ("--disable-grpo-std-normalisation", "--disable-grpo-std-normalization"),
        ("--tensor-model-parallel 2", "--tensor-model-parallel-size"),
        ("--sglang-mem-fraction 0.5", "--sglang-mem-fraction-static"),
        ("--sglang-chunked-prefil-size 0.5", "--sglang-chunked-prefill-size"),
        ("--router-polcy random", "--router-policy"),
        ("--num-roll 3", "--num-rollout"),  # no abbreviations
        ("--learning-rate 1e-4", "--lr"),  # TRL's name
        ("--learning_rte 1e-4", "--lr"),
        ("--num-generations 8", "--n-samples-per-prompt"),
        ("--max-prompt-length 8", "--rollout-max-prompt-len"),
    ],
)
def test_unknown_flag_names_the_nearest(problems: Problems, typo: str, meant: str) -> None:
    (problem,) = problems(typo)
    assert problem.startswith(typo.split()[0] + " is not a known flag")
    assert meant + "?" in problem


@pytest.mark.parametrize(
    "option",
    [
        "--no-such-thing",
        "--data",
        "--resume",
        "--learning-rate-schedule",
        "--sglang-nonsense",
        "--router-nonsense",
        "--rollout-engines",
    ],
)
def test_what_is_like_no_flag_gets_no_hint(problems: Problems, option: str) -> None:
    assert problems(option) == [f"{option} is not a known flag; --help-all lists them all"]


def test_every_problem_is_reported_at_once(problems: Problems) -> None:
    found = problems(
        "--esp-clip 0.3 --lr fast --colocate yes --seed 1 2 --kl-coef 0.1 --optimizer sgd --eval-interval 5"
    )
    assert [p.split()[0] for p in found] == [
        "--esp-clip",
        "--lr",
        "--colocate",
        "--seed",
        "--optimizer",
        "--eval-interval",
        "--kl-coef",
    ]


def test_consequences_of_a_misread_flag_are_not_reported(problems: Problems) -> None:
    assert problems("--rollout-batch-size many") == ["--rollout-batch-size takes a whole number, not 'many'"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--lr", "needs a value"),
        ("--num-layers 2.5", "takes a whole number"),
        ("--lr nan", "takes a number, not nan"),
        ("--kl-loss-type k4", "must be one of k1, k2, k3, low_var_kl, not 'k4'"),
        ("--train-env-vars {", "takes JSON"),
        ("--train-env-vars [1]", "takes a JSON object"),
        ("--train-backend deepspeed", "must be one of fsdp, megatron"),
        ("--advantage-estimator mine", "; a file of --import-file adds a name of your own"),
        ("--no-colocate now", "takes no value"),
        ("--spec one", "needs 2 values"),
        ("--vocab-size", "needs a value"),
        ("--sglang-schedule-policy best", "must be one of"),
        ("--sglang-tp-size 2", "--rollout-num-gpus-per-engine"),
    ],
)
def test_words_that_do_not_fit(problems: Problems, words: str, says: str) -> None:
    (problem,) = problems(words)
    assert problem.startswith(words.split()[0])
    assert says in problem


def test_values_of_every_kind(make: Make) -> None:
    args = make(
        "--lr 1e-4 --rollout-top-k -1 --rollout-stop a b --rollout-stop-token-ids 1 2 --no-offload-train "
        '--apply-chat-template-kwargs {"enable_thinking":false} --rollout-sample-hook-path a.f '
        "--rollout-sample-hook-path b.g --disable-grpo-std-normalization --wandb-group=--x"
    )
    assert args.lr == 1e-4
    assert args.rollout_top_k == -1
    assert args.rollout_stop == ["a", "b"]
    assert args.rollout_stop_token_ids == [1, 2]
    assert args.offload_train is False
    assert args.apply_chat_template_kwargs == {"enable_thinking": False}
    assert args.rollout_sample_hook_path == ["a.f", "b.g"]
    assert not args.grpo_std_normalization
    assert args.wandb_group == "--x"


def test_the_last_word_wins(make: Make) -> None:
    args = make("--lr 1 --colocate --prompt-data a b --lr 2 --no-colocate --prompt-data c")
    assert (args.lr, args.colocate, args.prompt_data) == (2.0, False, ["c"])


def test_word_before_the_first_flag() -> None:
    settings = Settings()
    from slimelite.arguments.sources import read_command_line

    settings = read_command_line(["stray", "--lr", "1"], Vocabulary(Args))
    assert settings.problems == ["stray comes before the first flag; flags begin with --"]


@pytest.mark.parametrize("name", sorted(known_flags(refused=True)))
def test_refused_flags_say_why(problems: Problems, name: str) -> None:
    refusal = known_flags()[name]
    option = f"--{name}".replace("*", "page-size")
    words = " ".join(["other"] * abs(refusal.arity or 0))
    (problem,) = problems(f"{option} {words}")
    assert problem == f"{option} is not supported: {refusal.why}"
    if refusal.harmless is not None:
        assert problems(f"{option} {refusal.harmless}") == []


def test_known_flags_without_effect_are_listed(make: Make) -> None:
    flags = known_flags(refused=False)
    assert len(flags) > 200
    words = [" ".join([f"--{name}", *["1"] * abs(flag.arity or 0)]) for name, flag in flags.items()]
    listed = dict(make(" ".join(words)).no_effect)
    assert {f"--{name}": flag.why for name, flag in flags.items()} == listed


def test_no_flag_has_two_meanings() -> None:
    vocabulary = Vocabulary(Args)
    own = [*vocabulary.switches_on, *vocabulary.switches_off]
    assert len(own) == len(set(own))
    assert not set(own) & set(known_flags())
    tables = tomllib.loads(recorded("known_flags.toml"))
    for group in (("no_effect", "refused"), ("harmless",), ("sglang_set_here",), ("eval_config",)):
        names = [usage.split()[0] for table in group for usages in tables[table].values() for usage in usages]
        assert len(names) == len(set(names)), "a flag stands in two places of the file"
    assert set(known_tables()["harmless"]) <= set(known_flags(refused=True))
    elsewhere = known_tables()["elsewhere"]
    assert not set(elsewhere) & {*own, *known_flags()}
    assert set(elsewhere.values()) <= set(own)


def test_a_mistake_is_printed_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse_args([*COMPLETE.split(), "--esp-clip", "0.3", "--lr", "x"])
    assert exit.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("train.py: --") for line in lines)


def test_help_all_is_complete_grouped_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom slimelite.arguments import parse_args\n"
        "try: parse_args(['--help-all'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'numpy', 'pyarrow', 'sglang', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    )
    text = done.stdout
    assert text.splitlines()[-1] == "[]"
    for flag in all_flags(Args).values():
        assert (flag.negative or flag.option) in text
        assert meaning(flag).split()[0] in text
    words = set(text.split())
    assert words >= {f"--{name}" for name in known_flags() if not name.startswith("router-")} | {"--router-..."}
    for title in ("CLUSTER", "MODEL", "DATA", "ROLLOUT", "REWARD", "ALGORITHM", "OPTIMIZER", "EVALUATION", "SGLANG"):
        assert f"\n{title}\n" in text


def test_parsing_imports_nothing_heavy() -> None:
    code = (
        f"import sys\nfrom slimelite.arguments import parse_args\nparse_args({COMPLETE.split()!r})\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'numpy', 'pyarrow', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == "[]"


def test_an_installed_package_has_the_tables() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["slimelite"]
    package = ROOT / "slimelite"
    tables = [path.relative_to(package) for path in package.rglob("*") if path.suffix in (".toml", ".txt", ".json")]
    assert len(tables) >= 3
    assert [table for table in tables if not any(table.match(pattern) for pattern in patterns)] == []


def test_flags_of_megatron_that_scripts_have_are_known() -> None:
    """slime accepts all of Megatron's flags, not only those that it reads."""
    words = (
        "--log-throughput --log-interval 1 --timing-log-level 2 --tensorboard-log-interval 5 --ckpt-format torch_dist "
        "--ckpt-fully-parallel-save --dist-ckpt-strictness log_all --dist-ckpt-optim-fully-reshardable --manual-gc "
        "--manual-gc-interval 10 --exit-duration-in-mins 230 --cross-entropy-loss-fusion --use-tp-pp-dp-mapping "
        "--tp-comm-overlap --ddp-bucket-size 40000000 --apply-query-key-layer-scaling"
    )
    named = dict(make_args([*COMPLETE.split(), *words.split()], machine=Machine(0)).no_effect)
    assert {word for word in words.split() if word.startswith("--")} <= set(named)
    with pytest.raises(ArgumentError) as error:
        make_args(f"{COMPLETE} --rampup-batch-size 16 16 1000 --decoupled-lr 1e-4".split(), machine=Machine(0))
    assert "every optimizer step has the same batch size" in str(error.value.problems)
    assert "all weights have one learning rate: --lr" in str(error.value.problems)
