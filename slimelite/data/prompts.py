"""Prompts: rows made into text and token ids, checked and filtered before anything expensive starts."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from slimelite.data.reader import BadRows, Row, read_rows, split_path
from slimelite.sample import plain

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from slimelite.arguments import Args

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
# rows that the tokenizer encodes in one call
BATCH = 1024
# what is nested deeper than this cannot be copied and written everywhere
DEPTH = 100
# where a prompt's metadata keeps [chosen, rejected]: two whole conversations, or the texts that follow a plain prompt
PAIR = "pair"
# columns that need not be there, unless they are named otherwise
DEFAULT_COLUMNS = {"metadata_key": "metadata", "tool_key": "tools"}


class Columns(Protocol):
    """Where a row keeps what, and whether its messages go through the chat template: `DataArgs` or `EvalDataset`."""

    @property
    def input_key(self) -> str: ...
    @property
    def label_key(self) -> str | None: ...
    @property
    def metadata_key(self) -> str: ...
    @property
    def tool_key(self) -> str: ...
    @property
    def apply_chat_template(self) -> bool: ...
    @property
    def apply_chat_template_kwargs(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class Prompt:
    """One prompt. Messages that are not templated (SFT) have ``text`` "" and no ids."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    messages: Messages | None = None

    def sample_metadata(self, *, keep_messages: bool) -> dict[str, Any]:
        """A copy of the metadata, with ``messages`` where a reward model puts them in its own chat template."""
        kept = {"messages": self.messages} if keep_messages and self.messages is not None else {}
        return copy.deepcopy({**self.metadata, **kept})


class BadCell(ValueError):
    """What is wrong in one column of a row."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(f"column {column!r}: {problem}")


def load_prompts(
    columns: Columns,
    tokenizer: PreTrainedTokenizerBase | None,
    paths: Sequence[str],
    *,
    max_prompt_len: int | None = None,
    skip_bad_rows: bool = False,
    warn: Callable[[str], None] = logger.warning,
    whole: bool = True,
    also: Sequence[str] = (),
    read: Callable[[Row, Columns, PreTrainedTokenizerBase | None], Prompt] | None = None,
) -> list[Prompt]:
    """The prompts of ``paths`` one after the other, in file order.

    ``tokenizer`` None: without chat template and token ids, to check files. ``also``: further columns that every row
    must have; ``read``: makes a prompt of a row in place of `read_prompt`. ``max_prompt_len`` [tokens]: longer prompts
    are left out. ``warn`` is told what is left out. ``whole`` False: ``paths`` are the first rows of more, so a column
    that none of them has may come later. The prompt of messages that end with an answer is what stands
    before their first answer.

    Raises:
        ValueError: files, columns or the chat template are missing, rows are malformed (unless ``skip_bad_rows``), or
            no prompt is left.
    """
    if tokenizer is not None and columns.apply_chat_template and not tokenizer.chat_template:
        raise ValueError(
            "--apply-chat-template: the tokenizer has no chat template; put a chat_template.jinja into the "
            "--hf-checkpoint folder, or leave the flag out when the prompts are plain text"
        )
    required = list(dict.fromkeys(c for c in (columns.input_key, columns.label_key, *also) if c is not None))
    prompts: list[Prompt] = []
    measured: list[str] = []
    problems: list[str] = []
    left_out: list[str] = []
    # rows of a parquet file all have the same columns
    whole = whole or all(split_path(path)[0].endswith(".parquet") for path in paths)
    unseen = {k: name for k, usual in DEFAULT_COLUMNS.items() if (name := getattr(columns, k)) != usual and whole}
    for path in paths:
        bad = BadRows(skip_bad_rows, left_out.append)
        try:
            for row in read_rows(path, required, (columns.metadata_key, columns.tool_key), bad):
                unseen = {key: name for key, name in unseen.items() if name not in row.values} if unseen else unseen
                try:
                    prompt = (read or read_prompt)(row, columns, tokenizer)
                    measured.append(prompt.text if max_prompt_len is None else _asked_text(prompt, columns, tokenizer))
                    prompts.append(prompt)
                except BadCell as error:
                    bad.add(row.place, str(error))
        except ValueError as error:
            problems.append(str(error))
    problems += [f"no row has a column {name!r} (--{key.replace('_', '-')})" for key, name in unseen.items()]
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))
    lengths = [0] * len(prompts) if tokenizer is None else _encode(prompts, measured, tokenizer)
    kept = [p for p, length in zip(prompts, lengths, strict=True) if max_prompt_len is None or length <= max_prompt_len]
    if dropped := len(prompts) - len(kept):
        left_out.append(
            f"left out {dropped} of {len(prompts)} prompts longer than {max_prompt_len} tokens "
            "(--rollout-max-prompt-len, --eval-max-prompt-len)"
        )
    if not kept:
        raise ValueError(f"no prompts left of {list(paths)}: {'; '.join(left_out)}")
    for what in left_out:
        warn(what)
    return kept


def _encode(prompts: list[Prompt], texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Set the ids of the prompts that have text; returns how many tokens each of ``texts`` has."""
    lengths = []
    for start in range(0, len(texts), BATCH):
        encoded = tokenizer(texts[start : start + BATCH], add_special_tokens=False)["input_ids"]
        for prompt, ids in zip(prompts[start : start + BATCH], encoded, strict=True):
            prompt.token_ids = ids if prompt.text else []
            lengths.append(len(ids))
    return lengths


def _asked_text(prompt: Prompt, columns: Columns, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The text whose tokens ``max_prompt_len`` limits."""
    if prompt.text or prompt.messages is None or tokenizer is None:
        return prompt.text
    if not tokenizer.chat_template:
        raise ValueError("--rollout-max-prompt-len cannot measure messages: the tokenizer has no chat template")
    return _render(tokenizer, before_answers(prompt.messages), prompt.tools, columns)


def before_answers(messages: Messages) -> Messages:
    """What a model is asked: all messages, or, when the last one is an answer, those before the first answer."""
    if messages[-1]["role"] != "assistant":
        return messages
    return messages[: next(i for i, m in enumerate(messages) if m["role"] == "assistant")]


def read_prompt(row: Row, columns: Columns, tokenizer: PreTrainedTokenizerBase | None) -> Prompt:
    """The prompt of one row, its ids still to be filled in; ``tokenizer`` None: without the chat template.

    Raises:
        BadCell: a column does not hold what it should.
    """
    values = row.values
    tools = _parsed(values.get(columns.tool_key), columns.tool_key, list) or None
    metadata = _parsed(values.get(columns.metadata_key), columns.metadata_key, dict) or {}
    if tools is not None:
        metadata = {**metadata, "tools": tools}
    label = None if columns.label_key is None else _label(values[columns.label_key], columns.label_key)
    prompt = Prompt(label=label, metadata=metadata, tools=tools)
    content = sound(values[columns.input_key], columns.input_key)
    if isinstance(content, str):
        if not content:
            raise BadCell(columns.input_key, "the prompt is empty")
        if content.lstrip().startswith(('[{"role"', "[{'role'")):
            raise BadCell(columns.input_key, "messages written as text; keep them as a list of objects")
        prompt.text = content
        prompt.messages = [{"role": "user", "content": content}] if columns.apply_chat_template else None
    else:
        prompt.messages = checked_messages(content, columns.input_key)
    if columns.apply_chat_template and tokenizer is not None:
        assert prompt.messages is not None
        prompt.text = _render(tokenizer, prompt.messages, tools, columns)
    return prompt


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: list[Any] | None, columns: Columns) -> str:
    settings = columns.apply_chat_template_kwargs
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, **{"add_generation_prompt": True, **settings}
        )
    except Exception as error:  # a template is a program: it may divide by zero, or never end
        what = str(error) or type(error).__name__
        raise BadCell(columns.input_key, f"the chat template refuses these messages ({what})") from error


def checked_messages(content: Any, column: str) -> Messages:
    """``content`` if it is a list of messages; `BadCell` otherwise."""
    if not isinstance(content, list) or not content:
        raise BadCell(column, f"text or a list of messages is expected, not {content!r:.60}")
    for number, message in enumerate(content):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadCell(column, f"message {number} needs a role and a content, got {message!r:.60}")
        if not any(message.get(key) is not None for key in ("content", "tool_calls", "reasoning_content")):
            raise BadCell(column, f"message {number} ({message['role']}) says nothing: content is missing")
    return content


def sound(value: Any, column: str, depth: int = 0) -> Any:
    """``value`` if it can be written as text again; `BadCell` otherwise."""
    if depth > DEPTH:
        raise BadCell(column, f"is nested more than {DEPTH} deep")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start : error.start + 1]
            raise BadCell(column, f"half a character ({half!r}, a lone surrogate) at {error.start}") from error
    elif isinstance(value, dict):
        for key, item in value.items():
            sound(key, column)
            sound(item, column, depth + 1)
    elif isinstance(value, list):
        for item in value:
            sound(item, column, depth + 1)
    return value


def _label(value: Any, column: str) -> Any:
    """A label keeps its type; what JSON does not know (dates, decimals) becomes text."""
    sound(value, column)
    if value is None:
        raise BadCell(column, "the label is null")
    return plain(value)


def _parsed(value: Any, column: str, kind: type) -> Any:
    """``value``, or the ``kind`` (list or dict) that its JSON text stands for; None for nothing."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadCell(column, f"not JSON ({error})") from error
    if value is not None and not isinstance(value, kind):
        raise BadCell(column, f"a {kind.__name__} or its JSON is expected, not {value!r:.60}")
    return sound(value, column)


def load_pairs(
    args: Args, tokenizer: PreTrainedTokenizerBase | None, paths: Sequence[str], **settings: Any
) -> list[Prompt]:
    """As `load_prompts`, with the replies of ``--chosen-key`` and ``--rejected-key`` in ``metadata["pair"]``.

    A reply is text, the turns that follow the prompt, or the whole conversation from the prompt's first message on.
    Without a column for the prompt alone ``--input-key`` names that of the chosen conversation, and the prompt is what
    stands before its first answer. ``settings``: those of `load_prompts`.
    """
    keys = (args.chosen_key, args.rejected_key)
    return load_prompts(args, tokenizer, paths, also=keys, read=partial(_read_pair, keys=keys), **settings)


def _read_pair(row: Row, columns: Columns, tokenizer: PreTrainedTokenizerBase | None, keys: tuple[str, str]) -> Prompt:
    """One row; a pair is a chat as soon as its prompt or one of its replies is."""
    prompt = read_prompt(row, columns, tokenizer)
    cells = {key: row.values[key] for key in keys}
    for key, cell in cells.items():
        sound(cell, key)
        if cell is None or cell == "":
            raise BadCell(key, "the reply is empty")
    pair: list[Any] = list(cells.values())
    inside = columns.input_key in keys
    if inside and not isinstance(row.values[columns.input_key], list):
        raise BadCell(columns.input_key, "a reply that is text holds no prompt; name the prompt's column: --input-key")
    if prompt.messages is not None or not all(isinstance(cell, str) for cell in pair):
        asked = prompt.messages or [{"role": "user", "content": prompt.text}]
        if inside:
            asked = before_answers(asked)
        if not asked:
            raise BadCell(columns.input_key, "nothing stands before the first answer")
        prompt.text, prompt.messages = "", asked
        pair = [_conversation(asked, cell, key, columns.input_key) for key, cell in cells.items()]
    if pair[0] == pair[1]:
        raise BadCell(keys[1], f"the same as {keys[0]!r}: neither is preferred")
    prompt.metadata = {**prompt.metadata, PAIR: pair}
    return prompt


def _conversation(asked: Messages, cell: Any, key: str, input_key: str) -> Messages:
    """The prompt's messages and the reply's."""
    reply = [{"role": "assistant", "content": cell}] if isinstance(cell, str) else checked_messages(cell, key)
    whole = reply[: len(asked)] == asked
    if not whole and reply[0]["role"] != "assistant":
        raise BadCell(
            key,
            f"starts with a {reply[0]['role']} message that is not the first of {input_key!r}; a reply is the "
            "assistant's turns, or the whole conversation from the prompt on (--input-key "
            f"{key} where no column has the prompt alone)",
        )
    conversation = reply if whole else [*asked, *reply]
    if len(conversation) == len(asked) or conversation[-1]["role"] != "assistant":
        raise BadCell(key, "does not end with a message of the assistant")
    return conversation
