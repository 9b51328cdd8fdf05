"""Evaluation datasets with all their settings. The datasets and settings come from ``--eval-*`` flags, files and
tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from slimelite.arguments.conditions import EVALUATION, MEASURED, SCORES, TASKS, TRAINING, when
from slimelite.arguments.flags import (
    ALWAYS,
    flag,
    group_flags,
    plugin,
    resolved,
    sampling_setting,
    sampling_values,
    with_sampling,
)
from slimelite.arguments.model import CheckpointArgs, ClusterArgs
from slimelite.arguments.rollout import EPISODE, PROGRAM, RewardArgs
from slimelite.arguments.sources import Settings, known_tables, load_yaml, read_entry
from slimelite.rewards.rules import RULES

SHIPPED = Path(__file__).parents[1] / "data" / "tasks"
# suffixes of files with rows, as in `slimelite.data.prompts`
SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".csv", ".tsv", ".arrow")
# generate functions that score the choices of a row, and the text that follows a prompt
CHOOSE, CONTINUE = "slimelite.rollout.evaluation.choose", "slimelite.rollout.evaluation.go_on"


@dataclass(frozen=True)
class Task:
    """The content of a task file.

    Templates and expressions are written in Jinja. The variables in both are the columns of a row, and ``chat``, which
    is true if the chat template is applied.
    """

    name: str = flag(None, "the score of the task is called `eval/<name>`", ALWAYS)
    about: str = flag("", "one-line description for the table of tasks", ALWAYS)
    kind: Literal["generate", "multiple-choice", "continuation"] = flag(
        "generate",
        "generate: the model writes a response, and the scorer reads it; multiple-choice: the likeliest choice is the "
        "answer; continuation: each token of the label must be the likeliest next token",
        ALWAYS,
    )
    data: str | None = flag(
        None, "source of the rows: a hub dataset `owner/name[:config][:split]`, or a file next to the task file", ALWAYS
    )
    files: list[str] = flag(
        [],
        "patterns of file names in the folder of the data, tried in this order; the rows come from the first file that "
        "matches",
        ALWAYS,
    )
    examples: str | None = flag(
        None,
        "source of the few-shot examples, written as for `data`; the default is the first rows of the data",
        ALWAYS,
    )
    example_files: list[str] = flag(
        [], "patterns of file names for the few-shot examples, written as for `files`", ALWAYS
    )
    same: str | None = flag(
        None,
        "expression such as `subject`; an example is used for a question only if the expression has the same value "
        "for both",
        ALWAYS,
    )
    prompt: str = flag(None, "template of the question", ALWAYS)
    answer: str | None = flag(
        None, "template of the answer in a few-shot example; the default is the right answer", ALWAYS
    )
    delimiter: str = flag(" ", "text between question and answer if no chat template is applied", ALWAYS)
    label: str | None = flag(
        None, "expression for the label; in a multiple-choice task, the label is the index of the right choice", ALWAYS
    )
    choices: str | None = flag(None, "expression for the list of choices; each choice is a text", ALWAYS)
    shared: str | None = flag(
        None,
        "expression for a text that follows every choice; the answer is the choice that makes this text likeliest",
        ALWAYS,
    )
    metadata: dict[str, Any] = flag({}, "other values for the scorer: a mapping from names to expressions", ALWAYS)
    scorer: str | None = flag(None, "a rule of --rm-type, or a function like that of --custom-rm-path", ALWAYS)
    metric: Literal["acc", "acc_norm", "acc_token"] = flag(
        "acc",
        "how the likelihoods of the choices are compared. acc: unchanged; acc_norm: per character; acc_token: per "
        "token, as in CORE",
        ALWAYS,
    )
    stop: list[str] = flag([], "these texts end a response if no chat template is applied", ALWAYS)
    max_tokens: int = flag(512, "a response has at most this length [tokens]", ALWAYS, at_least=1)

    @property
    def chooses(self) -> bool:
        """Whether the task scores given choices, so that no response is generated."""
        return self.kind == "multiple-choice"

    @property
    def plugin(self) -> str | None:
        """The generate function that scores texts instead of sampling; None if the task samples."""
        return {"multiple-choice": CHOOSE, "continuation": CONTINUE}.get(self.kind)

    def problem(self) -> str | None:
        """The error in the file, or None if there is no error."""
        if not self.name or not self.prompt:
            return "needs a name and a prompt"
        if self.data is None and not self.files:
            return "needs `data` (a hub dataset, or a file next to the task file), or `files` (in a folder of data)"
        if self.chooses and (self.choices is None or self.label is None):
            return "a task of kind multiple-choice needs `choices`, and as `label` the index of the right choice"
        if self.kind == "continuation" and self.label is None:
            return "a task of kind continuation needs a `label`: the text that follows the prompt"
        if self.shared is not None and not self.chooses:
            return "`shared` is the text after each choice, so the task must have the kind multiple-choice"
        if self.kind == "generate" and self.scorer is None:
            return f"needs a scorer: one of {', '.join(RULES)}, or a function"
        if self.scorer is not None and self.scorer not in RULES and not {".", ":"} & set(self.scorer):
            near = get_close_matches(self.scorer, RULES, 1) or [", ".join(RULES)]
            return f"scorer {self.scorer} is not a rule ({near[0]}?), and not the path of a function"
        return None

    def settings(self, spec: str, folder: str | None, shots: int, *, chat: bool) -> dict[str, Any]:
        """The settings of the `EvalDataset` for the task ``spec``, with rows from ``folder`` (None: from the hub).

        Raises:
            ValueError: no file in the folder has the rows or the examples.
        """
        ruled, apart = self.scorer in RULES, bool(self.examples or self.example_files)
        return {
            "name": self.name,
            "task": spec,
            "path": self._rows(spec, folder, self.data, self.files),
            "fewshot": shots,
            "examples": self._rows(spec, folder, self.examples, self.example_files) if shots and apart else None,
            "input_key": "prompt",
            "label_key": None if self.label is None else "label",
            "tool_key": "tools",
            "metadata_key": "metadata",
            "metadata_overrides": {"metric": self.metric} if self.chooses else {},
            "rm_type": self.scorer if ruled else None,
            "custom_rm_path": None if ruled else self.scorer,
            "custom_generate_function_path": self.plugin,
            "stop": [] if chat else self.stop,
            "stop_token_ids": [],
            "temperature": 0.0,
            "max_response_len": 1 if self.plugin else self.max_tokens,
        }

    def _rows(self, spec: str, folder: str | None, data: str | None, files: list[str]) -> str:
        if data is not None and data.endswith(SUFFIXES):
            return str(Path(spec).parent / data)
        if folder is None:
            if data is None:
                raise ValueError(f"task {self.name} has no hub dataset; give the folder of its data")
            return data
        if not Path(folder).is_dir():
            raise ValueError(f"{folder}: this folder of data does not exist")
        for pattern in files:
            matches = sorted(str(path) for path in Path(folder).glob(pattern) if path.name.endswith(SUFFIXES))
            if len(matches) > 1:
                raise ValueError(f"task {self.name}: only one file may match {pattern}, not {', '.join(matches)}")
            if matches:
                return matches[0]
        raise ValueError(f"task {self.name}: no file in {folder} matches {', '.join(files)}")


def shipped_tasks() -> list[str]:
    """The names of the tasks that come with slimelite."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_task(spec: str) -> Task:
    """The task called ``spec``, or the task in the YAML file ``spec``.

    Raises:
        ValueError: there is no such task, or its file is wrong.
    """
    path = spec
    if not spec.endswith((".yaml", ".yml")):
        if spec not in (known := shipped_tasks()):
            near = get_close_matches(spec, known, 1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else f"the tasks are {', '.join(known)}; your own tasks are YAML files"
            )
            raise ValueError(f"{spec}: there is no such task; {hint}")
        path = str(SHIPPED / f"{spec}.yaml")
    settings = Settings()
    content = load_yaml(path, "task", settings)
    values = {} if settings.problems else read_entry(Task, content, "task", path, settings)
    if settings.problems:
        raise ValueError("; ".join(settings.problems))
    task = Task(**values)
    wrong = next((f"{f.name} {w}" for f in group_flags(Task) if (w := f.wrong_number(getattr(task, f.name)))), None)
    if wrong := wrong or task.problem():
        raise ValueError(f"task {path}: {wrong}")
    return task


# limit for a dataset's name: file names have at most 255 bytes and also contain the rollout's number
NAME_BYTES = 200


def seeks_best(args: Any) -> bool:
    """Whether the run looks for its best evaluation."""
    return args.early_stop_patience is not None or args.save_best


BEST_EVALUATION = SCORES & when("--early-stop-patience or --save-best", seeks_best)


@dataclass(frozen=True)
@with_sampling("dataset")
class EvalDataset:
    """One evaluation dataset.

    A setting comes from the first of these sources that has it: the dataset, ``eval.defaults`` of --eval-config, the
    --eval-* flags, the --rollout-* flags.
    """

    name: str = flag(None, "the metrics of the dataset are called eval/<name>", ALWAYS)
    path: str = flag(
        None,
        "the rows come from this file (jsonl or parquet) or hub dataset; path@[a:b] selects a slice of the rows",
        ALWAYS,
    )
    task: str | None = flag(None, "prompts, labels and the settings below come from this task", ALWAYS)
    fewshot: int = flag(0, "each prompt of the task begins with this many examples", ALWAYS, at_least=0)
    examples: str | None = flag(None, "the few-shot examples of the task come from this file or hub dataset", ALWAYS)
    input_key: str = flag("input", "this column contains the prompt", ALWAYS)
    label_key: str | None = flag(None, "this column contains the label", ALWAYS)
    tool_key: str = flag("tools", "this column contains the tools", ALWAYS)
    metadata_key: str = flag("metadata", "this column contains a dict that the reward and plugins can read", ALWAYS)
    metadata_overrides: dict[str, Any] = flag({}, "these entries are set in the metadata of every sample", ALWAYS)
    apply_chat_template: bool = flag(False, "the tokenizer's chat template turns messages into a prompt", ALWAYS)
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "the chat template gets these arguments", ALWAYS)
    rm_type: str | None = flag(None, "this rule computes the reward", ALWAYS)
    custom_rm_path: str | None = flag(None, "this plugin computes the reward", ALWAYS)
    custom_generate_function_path: str | None = flag(None, "this plugin generates one response", ALWAYS)
    n_samples_per_eval_prompt: int = flag(1, "each prompt gets this many responses", ALWAYS, at_least=1)
    pass_at_k: list[int] = flag(
        [], "pass@k is measured for these values of k, and for 1, 2, 4 and so on", ALWAYS, at_least=1
    )
    temperature: float = sampling_setting("temperature")
    max_response_len: int = sampling_setting("max_new_tokens")
    max_prompt_len: int | None = flag(None, "prompts with more than this many tokens are left out", ALWAYS, at_least=1)
    max_context_len: int | None = flag(
        None, "prompt and response together have at most this length [tokens]", ALWAYS, at_least=1
    )

    def problems(self) -> Iterator[str]:
        """A message for each invalid setting, whichever flag or file set it."""
        if len(self.name.encode()) > NAME_BYTES:
            name = f"{self.name[:40]}..."
            yield f"eval dataset {name}: the name is part of file names, so it may have at most {NAME_BYTES} bytes"
        if re.search(r"/|-pass@|-stderr$|-truncated_ratio$|-centred$|^(step|reward_errors)$", self.name):
            yield (
                f"eval dataset {self.name}: eval/{self.name} would not be recognized as a score, because other metrics "
                "have such names; choose another name, such as math_500 for math/500"
            )
        if self.max_response_len is None:
            yield f"eval dataset {self.name}: the maximum length of a response is missing: give --eval-max-response-len"
        if self.task is not None and self.temperature == 0 and self.n_samples_per_eval_prompt > 1:
            yield (
                f"eval dataset {self.name}: {self.n_samples_per_eval_prompt} greedy responses to a prompt are all "
                "equal: give an --eval-temperature above 0"
            )
        for setting in group_flags(EvalDataset):
            value = getattr(self, setting.name)
            if wrong := setting.wrong_number(value):
                yield f"eval dataset {self.name}: {setting.name} {value}: {wrong}"
        if (most := max(self.pass_at_k, default=0)) > self.n_samples_per_eval_prompt:
            yield (
                f"eval dataset {self.name}: pass@{most} needs {most} responses to a prompt, but only "
                f"{self.n_samples_per_eval_prompt} are sampled: raise n_samples_per_eval_prompt, or lower pass_at_k"
            )

    def metrics(self) -> list[str]:
        """Names of the metrics of an evaluation, without the parts of a reward and without standard errors."""
        name, most = f"eval/{self.name}", self.n_samples_per_eval_prompt
        powers = {2**i for i in range(most.bit_length()) if most > 1}
        return [
            name,
            *(f"{name}-pass@{k}" for k in sorted(powers.union(self.pass_at_k))),
            f"{name}-truncated_ratio",
            f"{name}/repetition_frac",
            *(f"{name}/response_len/{each}" for each in ("mean", "median", "max", "min")),
        ]


def _setting(name: str, auto: str | None = None) -> Any:
    """A flag that sets ``name`` for every dataset that does not set it. The bounds are checked on the datasets."""
    help = next(setting.help for setting in group_flags(EvalDataset) if setting.name == name)
    return flag(None, help, EVALUATION, auto=auto)


@dataclass(frozen=True)
@with_sampling("eval", EVALUATION)
class EvalArgs(RewardArgs, CheckpointArgs, ClusterArgs):
    """Evaluation."""

    eval_interval: int | None = flag(
        None,
        "evaluation runs after every N rollouts, and also before the first rollout and after the last one",
        MEASURED,
        at_least=1,
    )
    eval_prompt_data: list[str] = flag(
        [],
        "evaluation datasets, each as a name and a path, such as gsm8k test.parquet; path@[a:b] selects a slice of the "
        "rows",
        EVALUATION,
        metavar="NAME PATH",
    )
    eval_config: str | None = flag(
        None,
        "this YAML file lists the evaluation datasets and their settings; it replaces --eval-prompt-data",
        EVALUATION,
        metavar="FILE",
    )
    eval_tasks: list[str] = flag(
        [],
        "the run is also evaluated on these tasks: names from docs/evaluation.md, such as gsm8k, or task files",
        EVALUATION,
        metavar="TASK",
    )
    eval_task_data: str | None = flag(
        None, "the rows of --eval-tasks are read from files in this folder", TASKS, metavar="DIR", auto="the hub"
    )
    eval_fewshot: int = flag(0, "each prompt of --eval-tasks begins with this many examples", TASKS, at_least=0)
    eval_limit: int | None = flag(
        None, "at most this many rows of each task of --eval-tasks are used", TASKS, at_least=1
    )
    skip_eval_before_train: bool = flag(False, "the run does not evaluate before the first rollout", SCORES)
    n_samples_per_eval_prompt: int = flag(1, "each prompt gets this many responses, for pass@k", EVALUATION)
    eval_pass_at_k: list[int] | None = _setting("pass_at_k")
    eval_input_key: str | None = _setting("input_key", auto="--input-key")
    eval_label_key: str | None = _setting("label_key", auto="--label-key")
    eval_tool_key: str | None = _setting("tool_key", auto="--tool-key")
    eval_reward_key: str | None = flag(
        None, "if a reward is a dict, this entry is the score", EVALUATION, auto="--reward-key"
    )
    eval_temperature: float | None = _setting("temperature", auto="--rollout-temperature")
    eval_max_prompt_len: int | None = _setting("max_prompt_len")
    eval_max_context_len: int | None = _setting("max_context_len", auto="--rollout-max-context-len")
    eval_function_path: str | None = plugin(
        "generates the rollout of an evaluation, like --rollout-function-path in training", EVALUATION
    )
    early_stop_patience: int | None = flag(
        None,
        "the run ends after this many evaluations in a row without a new best --early-stop-metric",
        TRAINING.strictly() & SCORES.strictly(),
        at_least=1,
    )
    early_stop_metric: str | None = flag(
        None,
        "this metric, such as eval/gsm8k-pass@4, decides which evaluation is best",
        BEST_EVALUATION,
        auto="the score of the first dataset",
    )
    early_stop_mode: Literal["max", "min"] = flag(
        "max",
        "the best evaluation has the highest (max) or the lowest (min) --early-stop-metric",
        BEST_EVALUATION,
    )
    custom_eval_rollout_log_function_path: str | None = plugin(
        "logs an evaluation: fn(rollout_id, args, data, metrics). If the function returns true, the default log is "
        "skipped",
        EVALUATION,
    )

    # every dataset with all its settings, whichever flag or file they came from
    eval_datasets: tuple[EvalDataset, ...] = resolved(())


def resolve_eval_datasets(args: EvalArgs, settings: Settings) -> tuple[EvalDataset, ...]:
    """Every evaluation dataset with all its settings. Errors become problems of ``settings``."""
    if args.eval_config:
        defaults, entries = _read_eval_config(args.eval_config, settings)
    else:
        defaults, entries = {}, _read_prompt_data(args.eval_prompt_data, settings)
    for words in args.eval_tasks:
        entries += [{"task": task} for task in words.split(",") if task]
    if not entries:
        return ()
    base = _flag_values(args)
    datasets = [_dataset(args, base, defaults, entry, settings) for entry in entries]
    complete = [d for d in datasets if d is not None]
    names = [d.name for d in complete]
    for name in sorted({n for n in names if names.count(n) > 1}):
        settings.complain("--eval-config" if args.eval_config else "--eval-prompt-data", f"names two datasets {name!r}")
    return tuple(complete)


def _flag_values(args: EvalArgs) -> dict[str, Any]:
    """Settings of every dataset: the ``--eval-*`` flags, or ``--rollout-*`` where no ``--eval-*`` flag was given."""

    def first(value: object, fallback: object) -> object:
        return fallback if value is None else value

    return {
        "input_key": first(args.eval_input_key, args.input_key),
        "label_key": first(args.eval_label_key, args.label_key),
        "tool_key": first(args.eval_tool_key, args.tool_key),
        "metadata_key": args.metadata_key,
        "apply_chat_template": args.apply_chat_template,
        "apply_chat_template_kwargs": args.apply_chat_template_kwargs,
        "rm_type": args.rm_type,
        "custom_rm_path": args.custom_rm_path,
        "custom_generate_function_path": args.custom_generate_function_path,
        "n_samples_per_eval_prompt": args.n_samples_per_eval_prompt,
        "pass_at_k": first(args.eval_pass_at_k, []),
        "max_prompt_len": args.eval_max_prompt_len,
        "max_context_len": first(args.eval_max_context_len, args.rollout_max_context_len),
        **sampling_values(args),
    }


def _read_prompt_data(words: list[str], settings: Settings) -> list[dict[str, Any]]:
    if len(words) == 1:  # slime always names such a dataset "aime"
        return [{"name": Path(words[0].partition("@[")[0]).stem, "path": words[0]}]
    if len(words) % 2:
        settings.complain(
            "--eval-prompt-data", f"takes pairs of a name and a path, not {len(words)} words: {' '.join(words)}"
        )
        return []
    return [{"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)]


def _read_eval_config(path: str, settings: Settings) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(defaults, datasets) of an eval config. The root key ``eval`` is optional, and datasets are a list or a mapping
    by name."""
    content = load_yaml(path, "--eval-config", settings)
    if content is None:
        return {}, []
    root = content.get("eval", content) if isinstance(content, dict) else None
    if not isinstance(root, dict) or not isinstance(root.get("datasets"), list | dict) or not root["datasets"]:
        settings.complain("--eval-config", f"{path}: needs the key datasets, with a list or a mapping by name")
        return {}, []
    if unknown := sorted(set(root) - {"defaults", "datasets"}):
        settings.complain(
            "--eval-config", f"{path}: unknown keys {', '.join(unknown)}; known keys are defaults and datasets"
        )
    entries = root["datasets"]
    if isinstance(entries, dict):
        entries = [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in entries.items()]
    if not all(isinstance(entry, dict) for entry in entries):
        settings.complain("--eval-config", f"{path}: every dataset is a mapping with a name and a path")
        return {}, []

    def read(entry: object, what: str) -> dict[str, Any]:
        refused = known_tables()["eval_config"]
        return read_entry(EvalDataset, entry, "--eval-config", f"{path}: {what}", settings, refused)

    defaults = read(root.get("defaults") or {}, "defaults")
    return defaults, [read(entry, f"dataset {entry.get('name', entry.get('task'))}") for entry in entries]


def _dataset(
    args: EvalArgs, base: dict[str, Any], defaults: dict[str, Any], entry: dict[str, Any], settings: Settings
) -> EvalDataset | None:
    own = {**defaults, **entry}
    values = {**base, **own}
    if "rm_type" in own and "custom_rm_path" not in own:
        values["custom_rm_path"] = None  # a dataset's own rule overrides the run's --custom-rm-path
    if (spec := own.get("task")) is not None:
        if args.custom_generate_function_path in (EPISODE, PROGRAM):
            # agents use the chat template; the flag is off only because their prompts must stay messages
            base = {**base, "apply_chat_template": True}
        try:
            values = {**base, **_task_settings(args, spec, {**base, **own}), **own}
        except ValueError as error:
            settings.complain("--eval-tasks" if entry == {"task": spec} else "--eval-config", str(error))
            return None
    dataset = EvalDataset(**values)
    if not dataset.name or not dataset.path:
        settings.complain("--eval-config", f"a dataset needs a name and a path, or a task, not {entry}")
        return None
    return dataset


def _task_settings(args: EvalArgs, spec: str, values: dict[str, Any]) -> dict[str, Any]:
    """The settings of the dataset from the task file ``spec``. --eval-* flags of the command line override them.

    A task that scores texts takes one sample of each row, because its score does not depend on sampling.
    """
    task = load_task(spec)
    shots = values.get("fewshot", args.eval_fewshot)
    settings = task.settings(spec, args.eval_task_data, shots, chat=values["apply_chat_template"])
    if args.eval_limit is not None:
        settings["path"] += f"@[:{args.eval_limit}]"
    if task.plugin:
        return {**settings, "n_samples_per_eval_prompt": 1, "pass_at_k": []}
    flags = {name: getattr(args, f"eval_{name}") for name in ("temperature", "max_response_len")}
    return settings | {name: value for name, value in flags.items() if value is not None}
