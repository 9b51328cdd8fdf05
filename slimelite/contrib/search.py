"""The environment ``search:FOLDER_OR_FILE``, with a tool that finds passages of a local corpus by BM25.

The index is 40 lines of numpy instead of a library. Scores are computed when the corpus is read: one number for each
term of each passage. So a query only sums the stored scores of its terms. A million passages fit in memory.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from slimelite.data.reader import READERS, read_rows
from slimelite.environments.tools import ToolEnvironment

# parameters of BM25 (Robertson and Zaragoza 2009): the saturation of a term's count, and the penalty for long passages
K1, B = 1.2, 0.75
FOUND = 3
COLUMNS = ("text", "contents", "passage", "content")
TEXTS = (".txt", ".md", ".rst")


class Index:
    """The passages and their scores: score(t, d) = idf(t)·f·(k1 + 1) / (f + k1·(1 − b + b·|d| / mean |d|)).

    ``f``: the number of times that term t occurs in passage d. idf(t) = ln(1 + (N − n + 0.5) / (n + 0.5)), if n of N
    passages contain t.
    """

    def __init__(self, passages: Sequence[str]) -> None:
        self.passages = list(passages)
        counts = [Counter(terms(passage)) for passage in passages]
        lengths = np.array([count.total() for count in counts], np.float64)
        norms = K1 * (1 - B + B * lengths / max(lengths.mean(), 1.0))
        where: dict[str, list[int]] = {}
        for number, count in enumerate(counts):
            for term in count:
                where.setdefault(term, []).append(number)
        self._scores: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for term, numbers in where.items():
            indices = np.array(numbers, np.int64)
            f = np.array([counts[n][term] for n in numbers], np.float64)
            idf = np.log1p((len(passages) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            self._scores[term] = indices, (idf * f * (K1 + 1) / (f + norms[indices])).astype(np.float32)

    def best(self, query: str) -> list[str]:
        """The passages with the highest scores above 0, in descending order."""
        total = np.zeros(len(self.passages), np.float32)
        for term in set(terms(query)) & self._scores.keys():
            indices, scores = self._scores[term]
            total[indices] += scores
        order = np.argsort(-total, kind="stable")[:FOUND]
        return [self.passages[n] for n in order if total[n] > 0]


class Search(ToolEnvironment):
    """The environment. The run's reward, such as ``--rm-type f1``, scores the episode."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def search(self, query: str) -> str:
        """Find passages about the words of a query."""
        return "\n\n".join(self._index.best(query)) or "Nothing was found; try other words."

    def tools(self) -> Sequence[Callable[..., str]]:
        """The search tool."""
        return [self.search]


def make(spec: str) -> Callable[[], Search]:
    """Read the corpus at the path ``spec``, and index it.

    Raises:
        ValueError: there is no corpus.
    """
    path = Path(spec)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    passages = [passage for file in files for passage in passages_of(file)] if spec and path.exists() else []
    if not passages:
        raise ValueError(
            f"--environment search:{spec}: there are no passages; name a folder or a file: "
            f"{', '.join((*TEXTS, *READERS))}"
        )
    return partial(Search, Index(passages))


def passages_of(file: Path) -> Iterator[str]:
    """Yield the paragraphs of a text, or the rows of a table. The table needs a column ``text``, and may have a column
    ``title``."""
    if file.suffix in READERS:
        for _, row in read_rows(str(file)):
            text = next((str(row[column]) for column in COLUMNS if row.get(column)), json.dumps(row, default=str))
            yield f"{row['title']}: {text}" if row.get("title") else text
    elif file.suffix in TEXTS:
        yield from filter(None, map(str.strip, re.split(r"\n\s*\n", file.read_text("utf-8", "replace"))))


def terms(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"\w+", text.lower())
