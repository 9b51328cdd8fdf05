"""Turns the data rows of an evaluation task into prompts, with the templates and expressions in the task's file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import StrictUndefined, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slimelite.arguments.evaluation import load_task
from slimelite.data.messages import Messages
from slimelite.data.reader import BadRows, Row, read_rows
from slimelite.samples.sample import ROW

# separates the examples in a text prompt
SEPARATOR = "\n\n"


class TaskRows:
    """Turns the data rows of an evaluation task into rows with the columns of a prompt dataset.

    Each resulting row has ``prompt``, ``label`` and ``metadata``. The prompt is text. If the task has few-shot examples
    and a chat template is applied, the prompt is a list of messages.

    ``metadata`` contains the place of the data row in its file. So the answers of two models to the same row can be
    matched even if the models' chat templates give different prompts. For a task with choices, ``metadata`` also
    contains ``choices``, and ``right``, the index of the right choice.
    """

    def __init__(self, spec: str, *, chat: bool) -> None:
        """Compile the templates and expressions of the task ``spec``. ``chat``: whether the chat template is applied.

        Raises:
            ValueError: the task file is wrong, or a template or expression is not valid Jinja.
        """
        self.task = task = load_task(spec)
        self._chat = chat
        self._jinja = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        self._prompt = self._template("prompt", task.prompt)
        self._answer = None if task.answer is None else self._template("answer", task.answer)
        self._same = self._expression("same", "none" if task.same is None else task.same)
        templates = {"label": task.label, "choices": task.choices, "shared": task.shared, **task.metadata}
        self._values = {name: self._expression(name, text) for name, text in templates.items() if text is not None}

    def read(
        self, path: str, shots: int, examples: str | None, bad: BadRows, first: int | None = None
    ) -> Iterator[tuple[str, Row]]:
        """Yield (place, row) for each row of the file or hub dataset ``path``, or only for its ``first`` rows (see
        `read_rows`).

        In each prompt, ``shots`` examples come before the question. The examples are the first rows of the file
        ``examples``. If ``examples`` is None, the examples are the first rows of ``path``, and these rows are not used
        as questions. If the task has an expression ``same``, the examples are the first rows whose value of ``same``
        equals that of the question's row.

        Raises:
            ValueError: the rows cannot be read.
        """
        shown: dict[object, list[tuple[str, str]]] = {}
        for _, row in read_rows(examples) if examples else ():
            self._show(row, shots, shown)
        for place, row in read_rows(path, bad=bad, first=first):
            try:
                if examples is None and self._show(row, shots, shown):
                    continue
                pairs = shown.get(self._same(row), [])
                if len(pairs) < shots:
                    raise ValueError(f"{examples} has {len(pairs)} examples for this row, but {shots} are needed")
                yield place, self._prompt_row(row, place, pairs)
            except ValueError as error:
                bad.add(place, str(error))

    def _show(self, row: Row, shots: int, shown: dict[object, list[tuple[str, str]]]) -> bool:
        """Keep ``row`` as an example, unless there are enough examples that match it. Returns whether the row was
        kept."""
        pairs = shown.setdefault(self._same(row), [])
        if len(pairs) >= shots:
            return False
        pairs.append(self._pair(row))
        return True

    def _prompt_row(self, row: Row, place: str, pairs: list[tuple[str, str]]) -> Row:
        question, values = self._prompt(row), {name: value(row) for name, value in self._values.items()}
        prompt: str | Messages = question
        if pairs and self._chat:
            prompt = [
                {"role": role, "content": text}
                for pair in pairs
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ] + [{"role": "user", "content": question}]
        elif pairs:
            prompt = SEPARATOR.join([*(self.task.delimiter.join(pair) for pair in pairs), question])
        metadata = {**values, ROW: place}
        label = metadata.pop("label", None)
        if self.task.chooses:
            choices = metadata["choices"] = self._choices(values)
            metadata["right"], label = label, choices[label]
        if self.task.plugin:
            metadata["delimiter"] = "" if self._chat else self.task.delimiter
        return {"prompt": prompt, "label": label, "metadata": metadata}

    def _pair(self, row: Row) -> tuple[str, str]:
        """The question and the answer of an example."""
        if self._answer is not None:
            return self._prompt(row), self._answer(row)
        needed = ("label", "choices", "shared")
        values = {name: value(row) for name, value in self._values.items() if name in needed}
        if self.task.chooses:
            return self._prompt(row), self._choices(values)[values["label"]] + values.get("shared", "")
        if "label" not in values:
            raise ValueError(f"examples need an answer or a label, but the task {self.task.name} has neither")
        return self._prompt(row), str(values["label"])

    def _choices(self, values: dict[str, Any]) -> list[str]:
        choices, right = [str(choice) for choice in values["choices"]], values["label"]
        if not isinstance(right, int) or not 0 <= right < len(choices) or not all(choices):
            raise ValueError(f"label {right!r:.60} is not an index of the choices {choices!r:.200}")
        return choices

    def _template(self, name: str, text: str) -> Callable[[Row], str]:
        try:
            template = self._jinja.from_string(text)
        except TemplateError as error:
            raise ValueError(f"task {self.task.name}: {name} is not a valid template: {error}") from error
        return lambda row: self._evaluated(name, lambda: template.render(row, chat=self._chat))

    def _expression(self, name: str, text: object) -> Callable[[Row], Any]:
        try:
            expression = self._jinja.compile_expression(str(text), undefined_to_none=False)
        except TemplateError as error:
            raise ValueError(f"task {self.task.name}: {name} is not a valid expression: {error}") from error

        def evaluated(row: Row) -> object:
            value = expression(row, chat=self._chat)
            if isinstance(value, Undefined):
                str(value)  # raises an error if a name is undefined
            return value

        return lambda row: self._evaluated(name, lambda: evaluated(row))

    def _evaluated(self, name: str, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        except Exception as error:  # an expression is a program and may raise anything, such as ZeroDivisionError
            raise ValueError(f"{name} of the task {self.task.name}: {error}") from error
