"""Evaluation tasks: each is a YAML file that says where its rows are, how one becomes a prompt, and what scores it.

Shipped ones are in ``slimelite/data/tasks``; ``--eval-tasks`` and ``slimelite eval --tasks`` take their names, or paths
of files. `docs/evaluation.md` says how to write one, and `slimelite.data.rendering` makes prompts of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from slimelite.arguments.flags import ALWAYS, flag, group_flags
from slimelite.arguments.sources import load_yaml, read_entry
from slimelite.arguments.vocabulary import Settings
from slimelite.rewards.rules import RULES

SHIPPED = Path(__file__).parents[1] / "data" / "tasks"
# suffixes of files with rows, as in `slimelite.data.reader`
SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz")
# scores the choices of a row
CHOOSE = "slimelite.rollout.evaluation.choose"


@dataclass(frozen=True)
class Task:
    """One task file.

    Templates and expressions are Jinja's. They see the columns of a row, and ``chat``: whether the chat template is
    applied.
    """

    name: str = flag(None, "its score is called `eval/<name>`", ALWAYS)
    about: str = flag("", "one line for the table of tasks", ALWAYS)
    kind: Literal["generate", "multiple-choice"] = flag(
        "generate", "the model writes and the scorer reads, or the likeliest of the choices is taken", ALWAYS
    )
    data: str | None = flag(
        None, "the rows: a hub dataset `owner/name[:config][:split]`, or a file beside the task file", ALWAYS
    )
    files: list[str] = flag(
        [], "patterns of the file with the rows in a folder of data; the first that matches counts", ALWAYS
    )
    examples: str | None = flag(None, "few-shot examples, as data; by default the first rows of the data", ALWAYS)
    example_files: list[str] = flag([], "few-shot examples, as files", ALWAYS)
    same: str | None = flag(
        None, "expression of what a question and its examples have in common, such as subject", ALWAYS
    )
    prompt: str = flag(None, "template of the question", ALWAYS)
    answer: str | None = flag(
        None, "template of the answer that an example shows; by default it is the right one", ALWAYS
    )
    delimiter: str = flag(" ", "what stands between question and answer where no chat template does", ALWAYS)
    label: str | None = flag(None, "expression of the label; of several choices, the index of the right one", ALWAYS)
    choices: str | None = flag(None, "expression of the list of choices, each a text", ALWAYS)
    metadata: dict[str, Any] = flag({}, "expressions of what else the scorer reads, by name", ALWAYS)
    scorer: str | None = flag(None, "a rule of --rm-type, or a function as of --custom-rm-path", ALWAYS)
    metric: Literal["acc", "acc_norm"] = flag(
        "acc", "acc: the likeliest choice counts; acc_norm: the likeliest for its number of characters", ALWAYS
    )
    stop: list[str] = flag([], "these texts end a response where no chat template is applied", ALWAYS)
    max_tokens: int = flag(512, "a response has at most this length [tokens]", ALWAYS, at_least=1)

    @property
    def chooses(self) -> bool:
        """Whether choices are scored, and nothing is generated."""
        return self.kind == "multiple-choice"

    def problem(self) -> str | None:
        """What is wrong with the file, or None."""
        if not self.name or not self.prompt:
            return "needs a name and a prompt"
        if self.data is None and not self.files:
            return "needs data (a hub dataset, or a file beside it), or files in a folder of data"
        if self.chooses and (self.choices is None or self.label is None):
            return "a task of kind multiple-choice needs choices, and the index of the right one as label"
        if not self.chooses and self.scorer is None:
            return f"needs a scorer: one of {', '.join(RULES)}, or a function"
        if self.scorer is not None and self.scorer not in RULES and not {".", ":"} & set(self.scorer):
            near = get_close_matches(self.scorer, RULES, 1) or [", ".join(RULES)]
            return f"scorer {self.scorer}: there is no such rule ({near[0]}?), and it is no path of a function"
        return None

    def settings(self, spec: str, folder: str | None, shots: int, *, chat: bool) -> dict[str, Any]:
        """The settings of the `EvalDataset` that asks the task ``spec`` with rows of ``folder`` (None: of the hub).

        Raises:
            ValueError: the folder has no file with the rows or the examples.
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
            "custom_generate_function_path": CHOOSE if self.chooses else None,
            "stop": [] if chat else self.stop,
            "stop_token_ids": [],
            "temperature": 0.0,
            "max_response_len": 1 if self.chooses else self.max_tokens,
        }

    def _rows(self, spec: str, folder: str | None, data: str | None, files: list[str]) -> str:
        if data is not None and data.endswith(SUFFIXES):
            return str(Path(spec).parent / data)
        if folder is None:
            if data is None:
                raise ValueError(f"task {self.name}: it has no hub dataset; give the folder of its data")
            return data
        if not Path(folder).is_dir():
            raise ValueError(f"{folder}: no such folder of data")
        for pattern in files:
            files = sorted(str(path) for path in Path(folder).glob(pattern) if path.name.endswith(SUFFIXES))
            if len(files) > 1:
                raise ValueError(f"task {self.name}: its rows are one file, and {pattern} matches {', '.join(files)}")
            if files:
                return files[0]
        raise ValueError(f"task {self.name}: {folder} has none of {', '.join(files)}")


def shipped_tasks() -> list[str]:
    """The names of the tasks that come with slimelite."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_task(spec: str) -> Task:
    """The task called ``spec``, or that of the YAML file ``spec``.

    Raises:
        ValueError: there is no such task, or its file is wrong.
    """
    path = spec
    if not spec.endswith((".yaml", ".yml")):
        if spec not in (known := shipped_tasks()):
            near = get_close_matches(spec, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}; others are YAML files"
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
