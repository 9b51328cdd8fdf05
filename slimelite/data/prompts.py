"""Reads the prompts of a run. Each row of a data file becomes a sample without a response. All samples are checked and
filtered before the run starts. During the run, `DataSource` returns the samples group by group. Checkpoints contain the
position of `DataSource`, so a resumed run continues there.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from slimelite.arguments import Args, DataArgs
from slimelite.data.conversion import Wanted, advice
from slimelite.data.messages import A_TOOL, BadCell, Messages, TooCostly, Tools, parsed, read_messages, render, sound
from slimelite.data.reader import ENVIRONMENT, BadRows, Row, column_names, first_row, read_rows, split_path
from slimelite.data.shapes import SYSTEM, SYSTEM_ROLES, read_prompts, shape_of
from slimelite.data.tokenizer import encode_text, load_tokenizer
from slimelite.samples.sample import Sample, label_text, plain
from slimelite.slime.plugins import load_function

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from slimelite.arguments import EvalDataset

    # the names of a row's columns, and whether the chat template is applied to its messages
    Columns = DataArgs | EvalDataset

logger = logging.getLogger(__name__)

# number of rows that the tokenizer encodes in one call
BATCH = 1024
# metadata key of a preference pair [chosen, rejected]: two whole conversations, or two texts after a text prompt
PAIR = "pair"
# columns that may be missing if their flags have these default values
DEFAULT_COLUMNS: dict[str, Any] = {"metadata_key": "metadata", "tool_key": "tools"}


def deal(prompt: Sample, group_index: int, index: int) -> Sample:
    """A copy of ``prompt`` that will get one response. The copy has the group number ``group_index`` and the sample
    number ``index``."""
    sample = copy.copy(prompt)
    sample.group_index, sample.index = group_index, index
    sample.prompt, sample.label = copy.deepcopy(prompt.prompt), copy.deepcopy(prompt.label)
    sample.metadata = copy.deepcopy(prompt.metadata)
    sample.tokens, sample.weight_versions = list(prompt.tokens), []
    return sample


def load_prompts(
    columns: Columns,
    tokenizer: PreTrainedTokenizerBase | None,
    paths: Sequence[str],
    *,
    replies: tuple[str, str] | None = None,
    max_prompt_len: int | None = None,
    skip_bad_rows: bool = False,
    keep_messages: bool = False,
    warn: Callable[[str], None] = logger.warning,
    note: Callable[[str], None] = logger.info,
    first: int | None = None,
) -> list[Sample]:
    """The prompts of all ``paths``, in file order, as samples that `deal` copies for each response.

    A prompt is either text with token ids, or, as in SFT, a list of messages without token ids.

    ``replies``: for preference pairs, the columns of the preferred reply and of the other reply. Both replies are
    stored in ``metadata["pair"]``. A reply may be a text, the messages after the prompt, or the whole conversation
    including the prompt. If no column contains only the prompt, ``input_key`` is the column of the preferred
    conversation. Then the prompt is the messages before the first assistant message of this conversation.

    Args:
        tokenizer: if None, the files are only checked: no chat template is applied, and the samples have no token ids.
        max_prompt_len: prompts with more tokens than this are left out. If the last message is the assistant's, only
            the messages before the first assistant message are measured.
        keep_messages: also store a prompt's messages in ``metadata["messages"]``, for a chat template of a reward
            model.
        warn: called with a message about rows and prompts that are left out. ``note``: called with the shape of the
            rows (see `shapes`) if no flag named the columns.
        first: if a number, read only this number of rows of each path that has no slice. These rows may lack a column
            of metadata or tools, because the column may appear later. In parquet files, a missing column is an error.

    Raises:
        ValueError: files, columns or the chat template are missing; rows are malformed (unless ``skip_bad_rows``); or
            no prompt is left after all rows of ``paths`` were read.
    """
    if tokenizer is not None and columns.apply_chat_template and not tokenizer.chat_template:
        raise ValueError(
            "--apply-chat-template: the tokenizer has no chat template; put a chat_template.jinja into the "
            "--hf-checkpoint folder, or, if the prompts are plain text, leave the flag out"
        )
    prompts, measured = list[Sample](), list[str]()
    problems, left_out, shapes = list[str](), list[str](), list[str]()
    files = [path for path in paths if not path.startswith(ENVIRONMENT)]
    # rows of a parquet file all have the same columns
    whole = bool(files) and (first is None or all(split_path(path)[0].endswith(".parquet") for path in files))
    unseen = {k: name for k, usual in DEFAULT_COLUMNS.items() if (name := getattr(columns, k)) != usual and whole}
    for path in paths:
        bad, named = BadRows(skip_bad_rows, left_out.append), columns
        try:
            named, rows = _open(columns, path, replies, bad, shapes, first)
            for place, row in rows:
                unseen = {key: name for key, name in unseen.items() if name not in row} if unseen else unseen
                try:
                    prompt = _read_prompt(row, named, tokenizer, replies, keep_messages=keep_messages)
                    measured.append(_measured(prompt, row, named, None if max_prompt_len is None else tokenizer))
                    prompts.append(prompt)
                except BadCell as error:
                    bad.add(place, str(error))
                except TooCostly as error:
                    raise ValueError(f"{path}: {place}: {error}") from error
        except ValueError as error:
            problems.append(f"{error}{_advice(named, path, replies)}")
    problems += [f"no row has a column {name!r} (--{key.replace('_', '-')})" for key, name in unseen.items()]
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))
    lengths = [0] * len(prompts) if tokenizer is None else _encode(prompts, measured, tokenizer, columns)
    kept = [p for p, length in zip(prompts, lengths, strict=True) if max_prompt_len is None or length <= max_prompt_len]
    if dropped := len(prompts) - len(kept):
        left_out.append(
            f"left out {dropped} of {len(prompts)} prompts: they have more than {max_prompt_len} tokens "
            "(--rollout-max-prompt-len, --eval-max-prompt-len)"
        )
    if not kept and first is None:
        raise ValueError(f"no prompts left of {list(paths)}: {'; '.join(left_out)}")
    for say, texts in ((note, shapes), (warn, left_out)):
        for what in texts if kept else ():
            say(what)
    return kept


def _open(
    columns: Columns,
    path: str,
    replies: tuple[str, str] | None,
    bad: BadRows,
    notes: list[str],
    first: int | None,
) -> tuple[Columns, Iterator[tuple[str, Row]]]:
    """The column names of a file, and its rows. For an evaluation task, the rows are those that the task makes from the
    file. The shape of the rows is appended to ``notes``."""
    if (spec := getattr(columns, "task", None)) is not None:
        from slimelite.data.rendering import TaskRows  # imports Jinja

        dataset = cast("EvalDataset", columns)
        task = TaskRows(spec, chat=dataset.apply_chat_template)
        return columns, task.read(path, dataset.fewshot, dataset.examples, bad, first)
    shape = None
    if path.startswith(ENVIRONMENT):
        columns = replace(columns, input_key="input", label_key="label", **DEFAULT_COLUMNS)
    elif columns.input_key == DataArgs.input_key:
        job = getattr(columns, "job", None)
        answers = job is not None and job.loss == "supervised"
        shape = shape_of(column_names(path), columns.input_key, answers=answers, chosen=replies and replies[0])
    optional: tuple[str, ...] = (columns.metadata_key, columns.tool_key, *SYSTEM)
    prompt: tuple[str, ...] = (columns.input_key,)
    if shape is not None:
        pairs = () if replies is None or replies[0] in shape.columns else (*shape.columns, *replies)
        name = f"pairs: {', '.join(pairs)}" if pairs else shape.name
        notes.append(f"{path}: read as {name}")
        optional, prompt = (*optional, *shape.optional), shape.columns
        columns = replace(columns, input_key=prompt[0])
    required = dict.fromkeys(name for name in (*prompt, columns.label_key, *(replies or ())) if name is not None)
    rows = read_rows(path, [*required], optional, bad, first)
    template, keys = columns.apply_chat_template, (columns.input_key, columns.label_key)
    return columns, read_prompts(rows, shape, *keys, template=template, warn=lambda text: bad.warn(f"{path}: {text}"))


def _advice(columns: Columns, path: str, replies: tuple[str, str] | None) -> str:
    """Advice on how to read the file, if its first row does not have the columns that the flags name."""
    if path.startswith(ENVIRONMENT) or getattr(columns, "task", None) is not None:
        return ""
    try:
        row = first_row(path)
        if {*row} >= {name for name in (columns.input_key, columns.label_key, *(replies or ())) if name is not None}:
            content = row[columns.input_key]
            if isinstance(content, list):
                read_messages(content, columns.input_key)
            if isinstance(content, list) or columns.input_key not in (replies or ()):
                return ""
            columns = replace(columns, input_key=DataArgs.input_key)  # the prompt is in another column
    except BadCell:
        pass  # the fields of its messages have other names
    except ValueError:
        return ""
    return f"; {how_to_convert(columns, path, replies)}" if row else ""


def how_to_convert(columns: Columns, path: str, replies: tuple[str, str] | None = None) -> str:
    """Advice for the user on how a run can read the rows of the file ``path``: flags, or a line of Python that converts
    the file."""
    job, loss = getattr(columns, "job", None), getattr(columns, "loss", None)
    prefix = "--eval-" if job is None else "--"
    family = "policy" if job is None else job.loss
    wanted = Wanted(columns.input_key, columns.label_key, family, bool(loss and loss.judged), replies, prefix)
    return advice(path, first_row(path), wanted)


def _measured(prompt: Sample, row: Row, columns: Columns, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The text whose tokens ``max_prompt_len`` limits. If the prompt is messages and ``tokenizer`` is None, the text is
    empty."""
    if isinstance(prompt.prompt, str):
        return prompt.prompt
    if tokenizer is None:
        return ""
    if not tokenizer.chat_template:
        raise ValueError("--rollout-max-prompt-len cannot measure messages: the tokenizer has no chat template")
    return _render(tokenizer, before_answers(prompt.prompt), _tools(row, columns), columns)


def _encode(prompts: list[Sample], texts: list[str], tokenizer: PreTrainedTokenizerBase, columns: Columns) -> list[int]:
    """Set the token ids of text prompts. Returns the number of tokens of each of ``texts``.

    In an evaluation task, the ids begin with the tokens that the tokenizer adds, as in lm-evaluation-harness.
    """
    begins = getattr(columns, "task", None) is not None and not columns.apply_chat_template
    lengths = []
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        encoded = encode_text(tokenizer, batch) if begins else tokenizer(batch, add_special_tokens=False)["input_ids"]
        for prompt, ids in zip(prompts[start : start + BATCH], encoded, strict=True):
            prompt.tokens = ids if isinstance(prompt.prompt, str) else []
            lengths.append(len(ids))
    return lengths


def before_answers(messages: Messages) -> Messages:
    """The part of ``messages`` that is the prompt. If the last message is the assistant's (as in SFT data), the prompt
    is the messages before the first assistant message. Otherwise the prompt is all messages."""
    if messages[-1]["role"] != "assistant":
        return messages
    return messages[: next(i for i, m in enumerate(messages) if m["role"] == "assistant")]


def _read_prompt(
    row: Row,
    columns: Columns,
    tokenizer: PreTrainedTokenizerBase | None,
    replies: tuple[str, str] | None,
    *,
    keep_messages: bool,
) -> Sample:
    """Read the prompt of one row, without token ids. The parameters are the same as in `load_prompts`.

    Raises:
        BadCell: the value in a column has a wrong type.
    """
    tools = _tools(row, columns)
    metadata = parsed(row.get(columns.metadata_key), dict, columns.metadata_key)
    metadata = {**metadata, "tools": tools} if tools else {**metadata}
    label = None
    if columns.label_key is not None:
        label = plain(sound(row[columns.label_key], columns.label_key))  # JSON has no dates and no decimals
        if row[columns.label_key] is None:
            raise BadCell(columns.label_key, "the label is null")
    content = sound(row[columns.input_key], columns.input_key)
    messages: Messages | None = None
    if not isinstance(content, str):
        messages = content = read_messages(content, columns.input_key)
    elif not content:
        raise BadCell(columns.input_key, "the prompt is empty")
    elif content.lstrip().startswith(('[{"role"', "[{'role'")):
        raise BadCell(columns.input_key, "the messages are text; write them as a list of objects")
    elif columns.apply_chat_template:
        messages = [{"role": "user", "content": content}]
    if columns.apply_chat_template and tokenizer is not None:
        assert messages is not None
        content = _render(tokenizer, messages, tools, columns)
    prompt = Sample(prompt=content, label=label, metadata=metadata)
    if replies is not None:
        messages = _add_pair(prompt, messages, row, columns.input_key, replies)
    if keep_messages and messages is not None:
        metadata["messages"] = messages
    return prompt


def _add_pair(
    prompt: Sample, messages: Messages | None, row: Row, input_key: str, keys: tuple[str, str]
) -> Messages | None:
    """Put the replies of a row into the metadata. If the prompt or one reply is messages, the prompt and both replies
    become messages."""
    cells = {key: sound([row[key]] if isinstance(row[key], dict) else row[key], key) for key in keys}
    if empty := [key for key, cell in cells.items() if cell is None or cell == ""]:
        raise BadCell(empty[0], "the reply is empty")
    pair = list(cells.values())
    inside = input_key in keys
    if inside and not isinstance(row[input_key], list):
        raise BadCell(
            input_key, "the replies are text, and do not contain the prompt; name the prompt's column with --input-key"
        )
    if messages is not None or not all(isinstance(cell, str) for cell in pair):
        messages = messages or [{"role": "user", "content": prompt.prompt}]
        messages = before_answers(messages) if inside else messages
        if not messages:
            raise BadCell(input_key, "there is no message before the first assistant message")
        prompt.prompt = messages
        pair = [_conversation(messages, cell, key, input_key) for key, cell in cells.items()]
    if pair[0] == pair[1]:
        raise BadCell(keys[1], f"the reply equals {keys[0]!r}, so neither reply is preferred")
    prompt.metadata[PAIR] = pair
    return messages


def _conversation(prompt: Messages, cell: object, key: str, input_key: str) -> Messages:
    """The messages of ``prompt``, followed by the messages of the reply in ``cell``."""
    reply = [{"role": "assistant", "content": cell}] if isinstance(cell, str) else read_messages(cell, key)
    added = [prompt[0]] if prompt[0]["role"] in SYSTEM_ROLES and reply[0]["role"] == "user" else []
    whole = [*added, *reply][: len(prompt)] == prompt
    if not whole and reply[0]["role"] != "assistant":
        raise BadCell(
            key,
            f"the reply starts with a {reply[0]['role']} message that is not the first message of {input_key!r}; a "
            f"reply must be the assistant's turns, or the whole conversation including the prompt (if no column has "
            f"only the prompt, give --input-key {key})",
        )
    conversation = [*added, *reply] if whole else [*prompt, *reply]
    if len(conversation) == len(prompt) or conversation[-1]["role"] != "assistant":
        raise BadCell(key, "the conversation does not end with a message of the assistant")
    return conversation


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools, columns: Columns) -> str:
    try:
        return render(tokenizer, messages, tools, {"add_generation_prompt": True, **columns.apply_chat_template_kwargs})
    except TooCostly:
        raise
    except Exception as error:  # a template may raise any error, such as ZeroDivisionError
        what = str(error) or type(error).__name__
        raise BadCell(columns.input_key, f"the chat template refuses these messages ({what})") from error


def _tools(row: Row, columns: Columns) -> Tools:
    tools = parsed(row.get(columns.tool_key), list, columns.tool_key)
    if wrong := [number for number, tool in enumerate(tools) if not isinstance(tool, dict)]:
        raise BadCell(
            columns.tool_key,
            f"tool {wrong[0]} must be an object such as {A_TOOL}, not {tools[wrong[0]]!r:.60}",
        )
    for number, tool in enumerate(tools):
        named = tool.get("function", tool)
        own = tool.get("type", "function") == "function"  # other types belong to one model, such as web_search
        if own and not (isinstance(named, dict) and isinstance(named.get("name"), str) and named["name"]):
            raise BadCell(columns.tool_key, f"tool {number} has no name: {tool!r:.60}")
    return tools or None


class DataSource:
    """Returns prompts as groups of ``--n-samples-per-prompt`` samples. Groups that `add_samples` took back come before
    new groups.

    In each epoch, the prompts come in file order. With ``--rollout-shuffle``, their order in epoch e is a permutation
    that depends only on ``--rollout-seed`` + e. Several paths form one dataset. But with ``--prompt-data-weights`` each
    path is a separate stream, which starts its own next epoch when it ends. The weights set the share of each stream in
    the prompts. The next prompt comes from the stream that is furthest behind its share.
    """

    def __init__(self, args: Args, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """``tokenizer`` None: load the tokenizer that ``args`` name. Subclasses written for slime need this, because
        they are built from ``args`` alone.

        Raises:
            ValueError: --prompt-data is missing, or `load_prompts` raises.
        """
        self.args = args
        if tokenizer is None:
            tokenizer = load_tokenizer(str(args.tokenizer))
        self._weights = list(args.prompt_data_weights)
        assert not self._weights or len(self._weights) == len(args.prompt_data), "parsing has counted the weights"
        if args.rollout_global_dataset and not args.prompt_data:
            raise ValueError("--prompt-data names no file; name a file, or add --disable-rollout-global-dataset")
        parts = [[path] for path in args.prompt_data] if self._weights else [args.prompt_data]
        datasets = [self._load(paths, tokenizer) for paths in parts if args.rollout_global_dataset]
        self._curriculum = (
            None if args.curriculum_threshold is None else Curriculum(args.curriculum_threshold, datasets[0])
        )
        if self._curriculum is not None:
            datasets = self._curriculum.parts
        self._streams = [_Stream(prompts, args) for prompts in datasets]
        self._returned: list[list[Sample]] = []
        self._pick = (
            load_function(args.buffer_filter_path, "--buffer-filter-path")
            if args.buffer_filter_path
            else _first_in_first_out
        )
        self._next_group = 0
        self._next_sample = 0

    def _load(self, paths: list[str], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        args = self.args
        return load_prompts(
            args,
            tokenizer,
            paths,
            replies=(args.chosen_key, args.rejected_key) if args.job.loss == "paired" else None,
            max_prompt_len=args.rollout_max_prompt_len,
            skip_bad_rows=args.skip_bad_rows,
            keep_messages=args.reward_model_path is not None,
        )

    def __len__(self) -> int:
        """The total number of prompts in all paths."""
        return sum(len(stream.prompts) for stream in self._streams)

    def get_samples(self, n: int) -> list[list[Sample]]:
        """Return ``n`` groups. Groups that `add_samples` took back come first. The others are new groups, with prompt
        tokens, label, metadata and indices."""
        groups = self._pick(self.args, None, self._returned, n) if self._returned else []
        return [*groups, *(self._fresh_group() for _ in range(n - len(groups)))]

    def add_samples(self, groups: Sequence[list[Sample]]) -> None:
        """Take back groups that a rollout did not finish or did not use. `get_samples` returns them before new groups
        (see --buffer-filter-path)."""
        self._returned.extend(groups)

    def heed(self, groups: Sequence[list[Sample]], reward_key: str | None) -> dict[str, float]:
        """With ``--curriculum-threshold``, move tasks to their next level if their rewards in a rollout's finished
        ``groups`` are high enough. Returns metrics with the tasks' levels."""
        return {} if self._curriculum is None else self._curriculum.heed(groups, reward_key)

    def _fresh_group(self) -> list[Sample]:
        prompt = self._next_stream().next() if self._streams else Sample()
        first, size = self._next_sample, self.args.n_samples_per_prompt
        group = [deal(prompt, self._next_group, index) for index in range(first, first + size)]
        self._next_sample += size
        self._next_group += 1
        return group

    def _next_stream(self) -> _Stream:
        if self._curriculum is not None:
            return self._streams[self._curriculum.part(self._next_group)]
        if len(self._streams) == 1:
            return self._streams[0]
        dealt = 1 + sum(stream.drawn for stream in self._streams)
        shares = [weight / sum(self._weights) for weight in self._weights]
        behind = [share * dealt - stream.drawn for share, stream in zip(shares, self._streams, strict=True)]
        return self._streams[behind.index(max(behind))]

    def state_dict(self) -> dict[str, object]:
        """The state that a resumed run needs, as plain JSON values, including the groups that `add_samples` took back.

        Attributes that plugins set on a sample are converted to JSON values too: numpy values become numbers and lists,
        other objects become text.
        """
        return {
            "drawn": [stream.drawn for stream in self._streams],
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "returned": [[plain(sample.to_dict()) for sample in group] for group in self._returned],
            "levels": {} if self._curriculum is None else self._curriculum.levels,
            "dataset": self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position that `state_dict` saved.

        Raises:
            ValueError: the prompts, their order or their weights differ from those of the run that saved the state.
        """
        saved, now = state["dataset"], self._identity()
        if changed := [f"{key}: {saved[key]} when saved, {now[key]} now" for key in now if saved.get(key) != now[key]]:
            raise ValueError(
                f"cannot resume the data source, because its data has changed ({'; '.join(changed)}); resume with the "
                "same data flags and files, or start a new run from the saved Hugging Face weights (--hf-checkpoint)"
            )
        for stream, drawn in zip(self._streams, state["drawn"], strict=True):
            stream.drawn = drawn
        if self._curriculum is not None:
            self._curriculum.levels = dict(state["levels"])
        self._next_group = state["next_group"]
        self._next_sample = state["next_sample"]
        self._returned = [[Sample.from_dict(values) for values in group] for group in state["returned"]]

    def _identity(self) -> dict[str, object]:
        """The settings and data that must be the same as in the run that saved the position."""
        return {
            "prompts": [len(stream.prompts) for stream in self._streams],
            "contents": [stream.digest for stream in self._streams],
            "--rollout-seed": self.args.rollout_seed if self.args.rollout_shuffle else None,
            "--rollout-shuffle": self.args.rollout_shuffle,
            "--prompt-data-weights": self._weights,
        }


class Curriculum:
    """The curriculum of ``--curriculum-threshold``: a task moves to its next level of difficulty when its mean reward
    reaches this threshold.

    The metadata of each row must have ``level``, a number, and may have ``task``, a name. At any time a task gives only
    prompts of one level. It starts at its lowest level.

    After each rollout, the mean reward of a task's groups at its current level is compared with the threshold. If the
    mean is at least the threshold, the task moves to its next level. The groups of a rollout get their prompts from the
    tasks in turn.

    Attributes:
        parts: the prompts of each task at each level.
        levels: task -> the index of its current level. The task's lowest level has the index 0.
    """

    def __init__(self, threshold: float, prompts: Sequence[Sample]) -> None:
        """Sort ``prompts`` by task and level.

        Raises:
            ValueError: a prompt has no level.
        """
        self._threshold = threshold
        by_task: dict[str, dict[float, list[Sample]]] = {}
        for prompt in prompts:
            level = prompt.metadata.get("level")
            if not isinstance(level, int | float):
                raise ValueError(
                    "--curriculum-threshold: the metadata of each row needs a number as level, but one row has "
                    f"{level!r}; rows of --environment 'reasoning-gym:gcd?levels=3', for example, have levels"
                )
            by_task.setdefault(str(prompt.metadata.get("task", "")), {}).setdefault(level, []).append(prompt)
        self.parts: list[list[Sample]] = []
        self._places: dict[str, list[tuple[float, int]]] = {}  # task -> (level, index of its part)
        for task, by_level in by_task.items():
            for level in sorted(by_level):
                self._places.setdefault(task, []).append((level, len(self.parts)))
                self.parts.append(by_level[level])
        self.levels = dict.fromkeys(by_task, 0)

    def part(self, group: int) -> int:
        """The index of the part (see ``parts``) that contains the prompt of group number ``group``."""
        task = list(self.levels)[group % len(self.levels)]
        return self._places[task][self.levels[task]][1]

    def heed(self, groups: Sequence[list[Sample]], reward_key: str | None) -> dict[str, float]:
        """Move each task that has reached the threshold to its next level. Returns the metric ``rollout/level/TASK``
        for each task: the index of its level in the next rollout. If the rows name no task, the metric is
        ``rollout/level``.
        """
        for task, at in self.levels.items():
            level, last = self._places[task][at][0], at + 1 == len(self._places[task])
            rewards = [
                sample.reward_value(reward_key)
                for sample in (sample for group in groups for sample in group)
                if (str(sample.metadata.get("task", "")), sample.metadata.get("level")) == (task, level)
                and sample.reward is not None
            ]
            if rewards and not last and statistics.fmean(rewards) >= self._threshold:
                self.levels[task] = at + 1
        return {f"rollout/level/{task}".removesuffix("/"): float(at) for task, at in self.levels.items()}


class _Stream:
    """An endless sequence of prompts. Its only state is ``drawn``, the number of prompts drawn so far."""

    def __init__(self, prompts: list[Sample], args: DataArgs) -> None:
        self.prompts = prompts
        self.drawn = 0
        self.digest = _digest(prompts)
        self._args = args
        self._order: tuple[int, list[int]] = (-1, [])

    def next(self) -> Sample:
        epoch, offset = divmod(self.drawn, len(self.prompts))
        if self._order[0] != epoch:
            order = list(range(len(self.prompts)))
            if self._args.rollout_shuffle:
                random.Random(self._args.rollout_seed + epoch).shuffle(order)
            self._order = (epoch, order)
        self.drawn += 1
        return self.prompts[self._order[1][offset]]


def _digest(prompts: list[Sample]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        text = isinstance(prompt.prompt, str)
        content = prompt.prompt if text else json.dumps(prompt.prompt, sort_keys=True, default=str)
        replies = [prompt.metadata[PAIR]] if PAIR in prompt.metadata else []
        label = None if prompt.label is None else label_text(prompt.label)
        state.update(json.dumps([content, label, *replies], default=str).encode())
    return state.hexdigest()


def _first_in_first_out(args: object, rollout_id: int | None, buffer: list[list[Sample]], n: int) -> list[list[Sample]]:  # noqa: ARG001
    """The default buffer filter, with slime's signature. This filter removes the first ``n`` groups from ``buffer`` and
    returns them."""
    taken = buffer[:n]
    del buffer[:n]
    return taken
