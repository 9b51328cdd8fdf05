"""Evaluation datasets: a dataset's own settings > eval.defaults > --eval-* > --rollout-*."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments.evaluation import EvalDataset
from slimelite.arguments.flags import group_flags
from tests.arguments.conftest import Make, Problems

FLAGS = (
    "--eval-interval 1 --eval-temperature 0.5 --eval-max-response-len 32 --rollout-stop X --input-key q --label-key a "
    "--rm-type math"
)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Text of an eval config -> the words that name it."""

    def write(text: str) -> str:
        path = tmp_path / "eval.yaml"
        path.write_text(text)
        return f"--eval-config {path}"

    return write


def test_pairs_of_name_and_path(make: Make) -> None:
    args = make("--eval-interval 1 --eval-prompt-data one a.jsonl two b.parquet@[0:10] --rollout-temperature 0.7")
    one, two = args.eval_datasets
    assert (one.name, one.path, two.name, two.path) == ("one", "a.jsonl", "two", "b.parquet@[0:10]")
    assert (one.temperature, one.top_p, one.top_k, one.max_response_len, one.min_new_tokens) == (0.7, 1.0, -1, 16, 0)


def test_a_single_path_is_named_by_its_file(make: Make) -> None:
    (dataset,) = make("--eval-interval 1 --eval-prompt-data data/aime.jsonl@[:5]").eval_datasets
    assert (dataset.name, dataset.path) == ("aime", "data/aime.jsonl@[:5]")


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
def test_precedence(make: Make, config: Any, root: bool, by_name: bool) -> None:
    entries = (
        {"sums": {"path": "s.jsonl", "temperature": 0, "n_samples_per_eval_prompt": 4}, "words": {"path": "w.jsonl"}}
        if by_name
        else [
            {"name": "sums", "path": "s.jsonl", "temperature": 0, "n_samples_per_eval_prompt": 4},
            {"name": "words", "path": "w.jsonl"},
        ]
    )
    content: dict[str, Any] = {"defaults": {"top-k": 1, "temperature": 0.25, "rm_type": "f1"}, "datasets": entries}
    import yaml

    args = make(f"{FLAGS} {config(yaml.safe_dump({'eval': content} if root else content))}")
    sums, words = args.eval_datasets
    assert (sums.name, sums.temperature, sums.top_k, sums.n_samples_per_eval_prompt) == ("sums", 0.0, 1, 4)
    assert (words.name, words.temperature, words.top_k, words.n_samples_per_eval_prompt) == ("words", 0.25, 1, 1)
    for dataset in (sums, words):
        assert (dataset.rm_type, dataset.max_response_len, dataset.stop) == ("f1", 32, ["X"])
        assert (dataset.input_key, dataset.label_key) == ("q", "a")


def test_a_rule_of_its_own_beats_the_custom_reward(make: Make, config: Any) -> None:
    args = make(
        f"{FLAGS} --custom-rm-path my.rm "
        + config("datasets: {a: {path: p, rm_type: f1}, b: {path: p}, c: {path: p, rm_type: f1, custom_rm_path: x.y}}")
    )
    assert [(d.rm_type, d.custom_rm_path) for d in args.eval_datasets] == [
        ("f1", None),
        ("math", "my.rm"),
        ("f1", "x.y"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "datasets: {a: {path: p, temprature: 1}}",
            "dataset a: temprature is not a known key; did you mean temperature?",
        ),
        ("datasets: {a: {path: p}}\ndefaults: {topp: 1}", "defaults: topp is not a known key; did you mean top_p?"),
        ("datasets: {a: {path: p, stamp: 1}}", "stamp is not a known key; known keys are name, path, task"),
        ("datasets: {a: {path: p, app_service: x}}", "app_service is not supported: slime only passes this key"),
        ("datasets: {a: {path: p, top_k: many}}", "top_k takes a whole number"),
        ("datasets: {a: {temperature: 1}}", "a dataset needs a name and a path"),
        ("datasets: [p.jsonl]", "every dataset is a mapping"),
        *(
            (f"datasets: [{{name: {name}, path: p}}]", f"{name}: eval/{name} would not be recognized as a score")
            for name in ("math/500", "step", "a-stderr", "a-pass@1")
        ),
        (f"datasets: [{{name: {'n' * 300}, path: p}}]", "part of file names, so it may have at most 200 bytes"),
        ("datasets: {a: {path: p}}\ndefaults: [temperature]", "defaults: is not a mapping of settings"),
        ("datasets: {a: {path: p}, a: {path: q}}", "line 1: a is given a second time"),
        ("", "is empty"),
        ("datasets: []", "needs the key datasets, with a list or a mapping by name"),
        ("datasets: 3", "needs the key datasets, with a list or a mapping by name"),
        ("dataset: {}\ndatasets: {a: {path: p}}", "unknown keys dataset"),
        ("datasets: [{name: a, path: p}, {name: a, path: q}]", "names two datasets 'a'"),
    ],
)
def test_mistakes(problems: Problems, config: Any, text: str, says: str) -> None:
    found = problems(f"{FLAGS} {config(text)}")
    assert says in found[0]
    assert "eval" in found[0]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("temperature: -1", "temperature -1.0: must be at least 0"),
        ("top_k: 0", "top_k 0: must be -1 or at least 1"),
        ("top_p: 0", "top_p 0.0: must be above 0 and at most 1"),
        ("max_response_len: 0", "max_response_len 0: must be at least 1"),
        ("max_prompt_len: -3", "max_prompt_len -3: must be at least 1"),
        ("n_samples_per_eval_prompt: 0", "n_samples_per_eval_prompt 0: must be at least 1"),
        ("min_new_tokens: -1", "min_new_tokens -1: must be at least 0"),
    ],
)
def test_values_that_mean_nothing(problems: Problems, config: Any, setting: str, says: str) -> None:
    own = config(f"{{datasets: {{a: {{path: p, {setting}}}, b: {{path: p}}}}}}")
    assert problems(f"{FLAGS} {own}") == [f"eval dataset a: {says}"]
    flag = "--" + ("" if setting[:2] == "n_" else "eval-") + setting.replace("_", "-").replace(":", "")
    assert says in problems(f"{FLAGS} --eval-prompt-data a p {flag}")[0]


def test_pass_at_k_needs_as_many_responses(make: Make, problems: Problems, config: Any) -> None:
    flags = f"{FLAGS} --eval-pass-at-k 3 16 --n-samples-per-eval-prompt"
    sums, words = make(
        f"{flags} 16 {config('datasets: {sums: {path: p}, words: {path: p, pass_at_k: [5]}}')}"
    ).eval_datasets
    assert (sums.pass_at_k, words.pass_at_k) == ([3, 16], [5])
    says = "eval dataset a: pass@16 needs 16 responses to a prompt, but only 8 are sampled: raise n_samples_per_eval"
    assert says in problems(f"{flags} 8 --eval-prompt-data a p")[0]
    assert "pass_at_k [0]: must be at least 1" in problems(f"{FLAGS} --eval-prompt-data a p --eval-pass-at-k 0")[0]


def test_odd_number_of_words(problems: Problems) -> None:
    assert "takes pairs of a name and a path, not 3 words" in problems("--eval-interval 1 --eval-prompt-data a b c")[0]


def test_every_key_has_help() -> None:
    assert {f.name for f in group_flags(EvalDataset)} == set(EvalDataset.__dataclass_fields__)


@pytest.fixture
def sums(tmp_path: Path) -> str:
    """A task file with settings of its own."""
    path = tmp_path / "sums.yaml"
    path.write_text("name: sums\nfiles: [sums.*]\nprompt: '{{ q }}'\nscorer: f1\nstop: [Q]\nmax_tokens: 7\n")
    (tmp_path / "sums.jsonl").write_text('{"q": "1+1"}\n')
    return f"--eval-interval 1 --eval-task-data {tmp_path} --eval-tasks {path}"


def test_tasks_are_datasets_with_their_own_settings(make: Make, sums: str) -> None:
    (task,) = make(
        f"{sums} --rollout-stop X --rm-type math --custom-rm-path a.b --rollout-temperature 0.7"
    ).eval_datasets
    assert (task.name, task.rm_type, task.custom_rm_path) == ("sums", "f1", None)
    assert (task.temperature, task.max_response_len, task.stop, task.label_key) == (0.0, 7, ["Q"], None)
    words = (
        "--eval-temperature 0.5 --eval-max-response-len 9 --n-samples-per-eval-prompt 4 --eval-limit 3 --eval-fewshot 2"
    )
    (task,) = make(f"{sums} {words} --apply-chat-template").eval_datasets
    assert (task.temperature, task.max_response_len, task.n_samples_per_eval_prompt) == (0.5, 9, 4)
    assert (task.path[-5:], task.fewshot, task.stop) == ("@[:3]", 2, [])


@pytest.mark.parametrize("agents", ["--environment calculator", "--agent-command true"])
def test_tasks_of_a_run_of_agents_are_asked_as_elsewhere(make: Make, sums: str, agents: str) -> None:
    args = make(f"{sums} {agents} --apply-chat-template")
    (task,) = args.eval_datasets
    assert not args.apply_chat_template  # agents get messages
    assert (task.apply_chat_template, task.custom_generate_function_path, task.stop) == (True, None, [])


def test_choices_are_scored_once_by_our_generate_function(make: Make, problems: Problems) -> None:
    words = "--eval-interval 1 --eval-tasks mmlu,arc --n-samples-per-eval-prompt 4 --eval-temperature 1"
    mmlu, arc = make(words).eval_datasets
    assert (mmlu.path, arc.path) == ("cais/mmlu:all:test", "allenai/ai2_arc:ARC-Challenge:test")
    assert (mmlu.n_samples_per_eval_prompt, arc.n_samples_per_eval_prompt) == (1, 1)
    assert (mmlu.metadata_overrides, arc.metadata_overrides) == ({"metric": "acc"}, {"metric": "acc_norm"})
    assert mmlu.custom_generate_function_path == "slimelite.rollout.evaluation.choose"
    assert problems(f"{words} --rollout-backend vllm") == [
        "eval dataset mmlu: choices are scored by their likelihoods, but --rollout-backend vllm does not return "
        "likelihoods; use --rollout-backend embedded",
        "eval dataset arc: choices are scored by their likelihoods, but --rollout-backend vllm does not return "
        "likelihoods; use --rollout-backend embedded",
    ]


def test_a_dataset_of_the_config_may_be_a_task(make: Make, config: Any, sums: str) -> None:
    flags, _, path = sums.partition("--eval-tasks")
    words = f"{flags} {config(f'datasets: [{{task: {path.strip()}, name: more, max_response_len: 5, fewshot: 1}}]')}"
    (task,) = make(words).eval_datasets
    assert (task.name, task.rm_type, task.max_response_len, task.fewshot) == ("more", "f1", 5, 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--eval-config gone.yaml", "--eval-config gone.yaml: cannot be read: No such file or directory"),
        ("--eval-prompt-data a b c", "--eval-prompt-data takes pairs of a name and a path, not 3 words: a b c"),
    ],
)
def test_what_was_asked_for_wrongly_is_not_missing_as_well(problems: Problems, words: str, says: str) -> None:
    assert problems(f"--eval-interval 1 {words}") == [says]


def test_a_wrong_task_is_a_problem(problems: Problems, sums: str) -> None:
    (none,) = problems("--eval-interval 1 --eval-tasks ,")
    assert none.startswith("--eval-interval needs")
    assert problems("--eval-interval 1 --eval-tasks gsm9k")[0] == (
        "--eval-tasks gsm9k: there is no such task; did you mean gsm8k?"
    )
    assert problems(f"{sums} --n-samples-per-eval-prompt 2") == [
        "eval dataset sums: 2 greedy responses to a prompt are all equal: give an --eval-temperature above 0"
    ]
