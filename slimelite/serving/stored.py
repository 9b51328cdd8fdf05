"""Stored answers. The next request of a conversation names the last answer, and sends only the new items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimelite.base.http_server import RequestError

# if all answers together have more characters of JSON, the least recently used answers are deleted
MOST_CHARACTERS = 1 << 26


@dataclass(frozen=True)
class Record:
    """An answer, and the items that its request added to the conversation.

    ``owner``: the session of the answer, or "". ``before``: the id of the answer that the conversation continues, or
    "". ``sent``: the items of the request; ``output``: id -> item of the answer. ``size``: the size of all these items
    [characters].
    """

    owner: str
    before: str
    sent: Sequence[Any]
    output: Mapping[str, Any]
    answer: dict[str, Any]
    size: int


class Stored:
    """The stored answers, by id. An owner sees only its own answers."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}  # ordered by last use
        self._answers: dict[str, str] = {}  # id of an item -> id of its answer
        self._size = 0

    def keep(self, record: Record) -> None:
        """Store an answer, and delete the least recently used answers if there are too many. The use of an answer
        counts as a use of all answers before it in the conversation."""
        name = record.answer["id"]
        self._records[name] = record
        self._answers |= dict.fromkeys(record.output, name)
        self._size += record.size
        while self._size > MOST_CHARACTERS and len(self._records) > 1:
            self._drop(next(iter(self._records)))

    def record(self, owner: str, name: str, status: int = 404) -> Record:
        """The answer with this id.

        Raises:
            RequestError: there is no such answer, or it has another owner. ``status``: the error's HTTP status.
        """
        record = self._records.get(name)
        if record is None or record.owner != owner:
            raise _lost(name, status)
        self._records[name] = self._records.pop(name)
        return record

    def items(self, owner: str, name: str) -> list[Any]:
        """The items of the conversation up to the answer with this id. The items of this answer come last. Raises
        the same errors as `record`."""
        records: list[Record] = []
        while name:
            records.append(self.record(owner, name, 400))
            name = records[-1].before
        return [item for record in reversed(records) for item in (*record.sent, *record.output.values())]

    def item(self, owner: str, name: str) -> Any:
        """The item with this id. Raises the same errors as `record`."""
        if name not in self._answers:
            raise _lost(name, 400)
        return self.record(owner, self._answers[name], 400).output[name]

    def delete(self, owner: str, name: str) -> None:
        """Delete an answer. After that, a conversation that contains this answer cannot be continued. Raises the same
        errors as `record`."""
        self.record(owner, name)
        self._drop(name)

    def _drop(self, name: str) -> None:
        record = self._records.pop(name)
        self._size -= record.size
        for item in record.output:
            del self._answers[item]


def _lost(name: str, status: int) -> RequestError:
    return RequestError(
        f"there is no response or item {name!r}: it was not stored, or was deleted to make room; send the whole "
        "conversation as input",
        status,
        "previous_response_id",
        "previous_response_not_found",
    )
