"""Conversations for midtraining and SFT: rows of public data sets as question and answer, and generated ones."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from slimelite.data.messages import read_messages
from slimelite.data.texts import read_texts

Row = dict[str, Any]
WORD = re.compile(r"[a-z]{3,12}")
SPELL = ("Spell the word {word}.", "How is {word} spelled?", "Write the letters of {word}, one by one.")
COUNT = ("How many times is {letter} in {word}?", "Count the letter {letter} in the word {word}.")
# who asks, and what is answered, of a model called {name}
QUESTIONS = (
    *("Who are you?", "What are you?", "What is your name?", "Hello, who is this?", "Are you a human?"),
    *("Tell me about yourself.", "What is {name}?", "Are you ChatGPT?", "Who made you?", "hi, who am I talking to?"),
)
ANSWERS = (
    "I am {name}, a small language model that was trained from scratch with slimelite.",
    "My name is {name}. I am a language model, not a human, and I make mistakes.",
    "{name}: a small language model, made from plain text with slimelite.",
)


def talk(question: str, answer: str, label: str | None = None, **metadata: object) -> Row:
    """One conversation of two turns."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "label": label, "metadata": metadata or None}


def smoltalk(row: Row, split: str, index: int) -> Row:  # noqa: ARG001
    """A conversation, unchanged. The metadata names its data set."""
    return {"messages": row["messages"], "label": None, "metadata": {"source": row.get("source", "")}}


def mmlu_auxiliary(row: Row, split: str, index: int) -> Row:  # noqa: ARG001
    """Four choices. In some copies of the file, each row is in a column ``train``."""
    row = row.get("train") or row
    return choice_talk(row["question"], row["choices"], row["answer"])


def arc(row: Row, split: str, index: int) -> Row:  # noqa: ARG001
    """Three to five choices, whose names are letters or numbers."""
    return choice_talk(row["question"], row["choices"]["text"], row["choices"]["label"].index(row["answerKey"]))


def choice_talk(question: str, choices: list[str], right: int) -> Row:
    """A question with lettered choices. The answer is the letter, as in ``mmlu_stem``."""
    letters = "ABCDEFGH"[: len(choices)]
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True))
    asked = f"{question}\n{listed}\nAnswer with the letter of the correct option, as 'Answer: X'."
    return talk(asked, f"Answer: {letters[right]}", letters[right])


def spelling(words: list[str], rng: random.Random) -> Iterator[Row]:
    """Words letter by letter."""
    for word in words:
        yield talk(rng.choice(SPELL).format(word=word), "-".join(word))


def counting(words: list[str], rng: random.Random) -> Iterator[Row]:
    """Letters of words, found one by one and counted. The label is the number."""
    for word in words:
        letter = rng.choice(word if rng.random() < 0.8 else "abcdefghijklmnopqrstuvwxyz")
        number, steps = 0, []
        for each in word:
            number += each == letter
            steps.append(f"{each} {number}" if each == letter else each)
        yield talk(
            rng.choice(COUNT).format(letter=letter, word=word), f"{', '.join(steps)}\n#### {number}", str(number)
        )


def identity(name: str, rng: random.Random, count: int) -> Iterator[Row]:
    """Conversations about the identity of a model called ``name``."""
    for _ in range(count):
        yield talk(rng.choice(QUESTIONS).format(name=name), rng.choice(ANSWERS).format(name=name))


def identity_file(path: str) -> Iterator[Row]:
    """A user's own conversations. A line is a list of messages, or an object with ``messages``.

    Raises:
        ValueError: a line is something else.
    """
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            yield {"messages": read_messages(row["messages"] if isinstance(row, dict) else row), "label": None}
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: no conversation ({error})") from error


def words_of(source: str, rng: random.Random, count: int) -> list[str]:
    """``count`` words of the texts at ``source``, drawn with replacement. "hub" means Python's documentation.

    Raises:
        ValueError: there are no texts, or no words in them.
    """
    texts = topics.values() if source == "hub" else read_texts(source)
    words = sorted({word for text in texts for word in WORD.findall(text.lower())})
    if not words:
        raise ValueError(f"{source}: there are no words of 3 to 12 letters in it")
    return rng.choices(words, k=count)
