"""Advises the user if the flags do not fit the columns of a data file. The advice is other flags that fit, or one line
of Python that converts the file.

The names of the columns suggest which column is the prompt, the reply or the label. The advice states this guess, for
example "if 'question' is the prompt". `docs/data_formats.md` shows every format that slimelite reads.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slimelite.data.shapes import SPEAKERS as KNOWN_SPEAKERS
from slimelite.data.shapes import SYSTEM

PAGE = "docs/data_formats.md"
# usual column names of each role; the most reliable names come first
QUESTIONS = ("question", "problem", "query", "prompt", "instruction", "input", "task", "q", "user", "human", "text")
ANSWERS = (
    *("answer", "solution", "response", "completion", "output", "reply", "target", "label", "right", "correct"),
    *("gold", "ground_truth", "final_answer", "a", "assistant", "gpt"),
)
CHOSEN = ("chosen", "preferred", "accepted", "better", "winner", "good", "best", "positive")
REJECTED = ("rejected", "dispreferred", "refused", "worse", "loser", "bad", "worst", "negative")
# last words of the names of columns that rarely contain the prompt
UNLIKELY = ("id", "uuid", "source", "category", "type", "model", "dataset", "subset", "split", "language", "lang")
JUDGED = ("label", "liked", "desirable", "good", "ok", "thumbs_up", "accepted")
SPEAKERS, SPEECH = ("role", "from", "speaker", "author", "name"), ("content", "value", "text", "message", "utterance")
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Wanted:
    """The columns that a run needs. ``judged``: whether the run is a KTO run, in which the label tells whether the
    reply is good. ``prefix``: the start of the data flags' names, ``--`` or ``--eval-``."""

    input_key: str
    label_key: str | None
    loss: str
    judged: bool
    replies: tuple[str, str] | None
    prefix: str

    def flags(self, **columns: str) -> str:
        """The command-line flags that select ``columns`` (keyword: name of the flag, value: name of the column)."""
        return " ".join(f"{self.prefix}{key.replace('_', '-')} {shlex.quote(name)}" for key, name in columns.items())


def advice(path: str, row: Mapping[str, object], wanted: Wanted) -> str:
    """One sentence that tells the user how a run can read the rows of the file ``path``. ``row`` is an example row of
    the file."""
    plain = {name: cell for name, cell in row.items() if not isinstance(cell, dict | list)}
    if wanted.loss == "paired":
        return _pairs(path, row, wanted)
    question = wanted.input_key if wanted.input_key in plain else _pick(plain, QUESTIONS)
    turns = None if question else _turns(row)
    if turns is not None:
        return _conversation(path, row, wanted, turns)
    question = question or next(iter(_texts(row)), None)
    if question is None:
        return f"name the prompt's column with {wanted.prefix}input-key: see {PAGE}"
    label = wanted.label_key if wanted.label_key in row else None
    answer = label if label and not wanted.judged else _pick(plain, ANSWERS, {question})
    choices = _choices(row, {question, answer})
    if answer is None:
        rest = [name for name in plain if name != question]
        answer = next(iter(rest), None) if wanted.label_key or wanted.loss == "supervised" or choices else None
    if wanted.loss == "supervised":
        return _replies(path, row, wanted, question, answer, choices)
    if answer and choices and (place := _place(row, choices, answer)):
        cells = {"prompt": _listed(row, question, choices), "answer": f"chr(65 + {place})"}
        guess = f"{question!r} is the prompt, {choices!r} the options and {answer!r} the right one (counted from 0)"
        return _convert(path, wanted, guess, cells, wanted.flags(label_key="answer"))
    columns = {"input_key": question} if question != wanted.input_key else {}
    if answer and answer != wanted.label_key:
        columns["label_key"] = answer
    guess = f"{question!r} is the prompt" + (f" and {answer!r} the right answer" if answer else "")
    return f"if {guess}, add {wanted.flags(**columns)}: see {PAGE}"


def _replies(
    path: str, row: Mapping[str, object], wanted: Wanted, question: str, answer: str | None, choices: str | None
) -> str:
    """Rows for SFT and KTO, with the prompt and the reply in two separate columns."""
    if answer is None:
        return (
            f"a row needs a prompt and a reply; if {question!r} is plain text, train on it with --loss-type "
            f"pretrain_loss --text-key {shlex.quote(question)}: see {PAGE}"
        )
    cells, flags = {"prompt": _text(row, question), "completion": _text(row, answer)}, ""
    guess = f"{question!r} is the prompt and {answer!r} the reply"
    if choices and (place := _place(row, choices, answer)):
        cells = {"prompt": _listed(row, question, choices), "completion": f"{_cell(choices)}[{place}]"}
        guess = f"{question!r} is the prompt, {choices!r} the options and {answer!r} the right one (counted from 0)"
    if wanted.judged:
        taken = {question, answer}
        judged = wanted.label_key if wanted.label_key in row else _pick(row, JUDGED, taken)
        judged = judged or next((name for name, cell in row.items() if isinstance(cell, bool)), None)
        if judged is None or judged in taken:
            return f"a row needs a prompt, a reply and a label that is true for a good reply: see {PAGE}"
        guess = f"{question!r} is the prompt, {answer!r} the reply and {judged!r} true for a good reply"
        cells["label"], flags = _cell(judged), wanted.flags(label_key="label")
    return _convert(path, wanted, guess, cells, flags)


def _pairs(path: str, row: Mapping[str, object], wanted: Wanted) -> str:
    """Rows of preference pairs."""
    question = wanted.input_key if wanted.input_key in row else _pick(row, QUESTIONS)
    chosen, rejected = _pick(row, CHOSEN, {question}), _pick(row, REJECTED, {question})
    answer = _pick(row, ANSWERS, {question})
    choices = _choices(row, {question, answer})
    if question and choices and answer and (place := _place(row, choices, answer)):
        cells = {"prompt": _cell(question), "chosen": f"{_cell(choices)}[{place}]"}
        cells["rejected"] = f"{_cell(choices)}[{place} - 1]"
        guess = f"{question!r} is the prompt, {choices!r} the options and {answer!r} the right one (counted from 0)"
        return _convert(path, wanted, guess, cells, "")
    if not (chosen and rejected):
        return (
            "a pair needs two replies to one prompt; name their columns with --chosen-key and --rejected-key: see "
            f"{PAGE}"
        )
    assert wanted.replies is not None
    if question is None and isinstance(row[chosen], str):
        texts = [name for name in _texts(row) if name not in (chosen, rejected)]
        if len(texts) != 1:
            any_text = " or ".join(map(repr, texts))
            remedy = f"; if {any_text} is the prompt, name it with {wanted.prefix}input-key" if texts else ""
            return f"a pair of texts needs a column with the prompt{remedy}: see {PAGE}"
        question = texts[0]
    names = {"input_key": question or chosen, "chosen_key": chosen, "rejected_key": rejected}
    known = (wanted.input_key, *wanted.replies)
    columns = {key: name for (key, name), old in zip(names.items(), known, strict=True) if name != old}
    prompt = f"{question!r} is the prompt, " if question else ""
    guess = f"{prompt}{chosen!r} the better reply and {rejected!r} the worse one"
    return f"if {guess}, add {wanted.flags(**columns)}: see {PAGE}"


def _conversation(path: str, row: Mapping[str, object], wanted: Wanted, turns: str) -> str:
    """Rows with a list of turns."""
    cell = row[turns]
    assert isinstance(cell, list)
    label = wanted.label_key if wanted.label_key in row else None
    answer = label or (_pick(row, ANSWERS, {turns}) if wanted.label_key or wanted.judged else None)
    flags = wanted.flags(label_key=answer) if answer and answer != wanted.label_key else ""
    if isinstance(cell[0], str):
        messages = f'[{{"role": ("user", "assistant")[i % 2], "content": t}} for i, t in enumerate({_cell(turns)})]'
        guess = f"the texts in {turns!r} are from the user and the assistant in turn"
    else:
        speaker, speech = _pick(cell[0], SPEAKERS), _pick(cell[0], SPEECH)
        if speaker is None or speech is None:
            return f"a message needs a role and a content: see {PAGE}"
        if (speaker, speech) in (("role", "content"), ("from", "value")):
            if turns != wanted.input_key or not flags:
                flags = f"{wanted.flags(input_key=turns)} {flags}".strip()
            return f"if {turns!r} is the conversation, add {flags}: see {PAGE}"
        names = list(dict.fromkeys(str(turn.get(speaker)) for turn in cell))
        role = f"m[{_literal(speaker)}]"
        guess = f"{turns!r} is the conversation"
        if not {*names} <= {*ROLES}:
            known = {name: KNOWN_SPEAKERS.get(name.lower(), "") for name in names}
            free = iter([each for each in ("user", "assistant") if each not in known.values()])
            roles = {name: each or next(free, "") for name, each in known.items()}
            if unclear := [name for name, each in roles.items() if not each]:
                roles_text = f"{', '.join(ROLES[:-1])} and {ROLES[-1]}"
                return f"a message needs one of the roles {roles_text}, not {unclear[0]!r}: see {PAGE}"
            role = f"{_literal(roles)}[{role}]"
            guess += ", and " + " and ".join(f"{name!r} is the {role}" for name, role in roles.items())
        messages = f'[{{"role": {role}, "content": m[{_literal(speech)}]}} for m in {_cell(turns)}]'
    cells = {"messages": messages} | ({answer: _cell(answer)} if answer else {})
    return _convert(path, wanted, guess, cells, flags)


def _convert(path: str, wanted: Wanted, guess: str, cells: Mapping[str, str], flags: str) -> str:
    """The advice to run a line of Python. This line writes ``cells`` (column -> expression) for each row."""
    name = Path(path.partition("@[")[0].replace(":", "/"))
    new = f"{name.name.partition('.')[0]}.converted.jsonl"
    columns = ", ".join(f"{_literal(column)}: {expression}" for column, expression in cells.items())
    code = (
        "import json; from slimelite.data.reader import read_rows; "
        f'open({_literal(new)}, "w").writelines(json.dumps({{{columns}}}) + "\\n" '
        f"for _, r in read_rows({_literal(path)}))"
    )
    data = f", leave out {wanted.prefix}input-key" if wanted.input_key != "input" else ""
    data += ", then give --prompt-data" if wanted.prefix == "--" else ", then give --eval-prompt-data NAME"
    return (
        f"if {guess}, convert the file with this line{data} {shlex.quote(new)}{' ' if flags else ''}"
        f"{flags} (see {PAGE}): python -c {shlex.quote(code)}"
    )


def _pick(names: Iterable[str], known: Sequence[str], taken: Iterable[str | None] = ()) -> str | None:
    """The column whose name comes first in ``known``. Upper and lower case do not matter."""
    free = {name.lower(): name for name in names if name not in {*taken}}
    return next((free[name] for name in known if name in free), None)


def _texts(row: Mapping[str, object]) -> list[str]:
    """The columns with a text that may be the prompt."""
    texts = (name for name, cell in row.items() if isinstance(cell, str) and name not in SYSTEM)
    return [name for name in texts if name.lower().rpartition("_")[2] not in UNLIKELY]


def _choices(row: Mapping[str, object], taken: Iterable[str | None]) -> str | None:
    """The column with a list of texts to choose from."""
    lists = (name for name, cell in row.items() if name not in {*taken} and isinstance(cell, list) and len(cell) > 1)
    return next((name for name in lists if all(isinstance(each, str) for each in _list(row[name]))), None)


def _turns(row: Mapping[str, object]) -> str | None:
    """The column with the turns of a conversation. The turns are objects or texts."""
    lists = {name: cell for name, cell in row.items() if isinstance(cell, list) and cell}
    objects = (name for name, cell in lists.items() if all(isinstance(each, dict) for each in cell))
    texts = (name for name, cell in lists.items() if all(isinstance(each, str) for each in cell))
    return next(objects, None) or next(texts, None)


def _place(row: Mapping[str, object], choices: str, answer: str) -> str:
    """A Python expression for the index of the right option, counted from 0; empty if ``answer`` names none."""
    cell, options = row[answer], _list(row[choices])
    if cell in options:
        return f"{_cell(choices)}.index({_cell(answer)})"
    if isinstance(cell, str) and len(cell) == 1 and cell.isalpha():
        return f"ord({_cell(answer)}.upper()) - 65"
    if not (isinstance(cell, int | float) or (isinstance(cell, str) and cell.strip().isdecimal())):
        return ""
    number = _cell(answer) if isinstance(cell, int) else f"int({_cell(answer)})"
    return f"{number} - 1" if str(cell) == str(len(options)) else number  # this index can only be counted from 1


def _listed(row: Mapping[str, object], question: str, choices: str) -> str:
    return f'{_text(row, question)} + "".join(f"\\n{{chr(65 + i)}}. {{o}}" for i, o in enumerate({_cell(choices)}))'


def _text(row: Mapping[str, object], name: str) -> str:
    return _cell(name) if isinstance(row[name], str) else f"str({_cell(name)})"


def _cell(name: str) -> str:
    return f"r[{_literal(name)}]"


def _literal(value: object) -> str:
    """Python code for texts, in double quotes. 💬 is not escaped: Python would read JSON's escape as two characters."""
    return json.dumps(value, ensure_ascii=False)


def _list(cell: object) -> list[object]:
    return cell if isinstance(cell, list) else []
