"""Finds the exact piece of a response's text for each of its tokens, so that the page can show the tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slimelite.apps.runs import Run
from slimelite.samples.table import SampleTable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in a vocabulary with byte fallback


class Pieces:
    """A vocabulary. Each entry is a token id and its piece, as bytes. `encode` adds the entries for the responses of a
    table.

    Pieces are bytes, because a token may be a part of a UTF-8 character. The pieces of a response, joined and decoded,
    give the response. Decoding replaces invalid bytes by U+FFFD. A token id may have several pieces. For example, the
    first token of a response may lack the space that the same token has elsewhere.
    """

    def __init__(self, file: Path) -> None:
        """``file``: a tokenizer.json.

        Raises:
            ValueError: the file is not a tokenizer.json.
        """
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare exceptions
            raise ValueError(f"{file} is not a tokenizer: {error}") from error
        decoder = json.dumps(json.loads(file.read_text(encoding="utf-8")).get("decoder"), ensure_ascii=False)
        self._byte_level, self._spaced = '"ByteLevel"' in decoder, "▁" in decoder
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._pieces: dict[int, bytes] = {}
        self._bytes: set[int] = set()
        self._entries: dict[tuple[int, bytes], int] = {}

    @classmethod
    def of_run(cls, run: Run) -> tuple[Pieces | None, str | None]:
        """The vocabulary of the run's tokenizer, or None and a sentence with the reason."""
        name = run.config.get("tokenizer") or run.config.get("hf_checkpoint")
        without = "responses are shown without their tokens and without numbers for each token"
        if not name:
            return None, f"The run's configuration does not name a tokenizer: {without}."
        file = _find(run, str(name))
        if file is None:
            return None, f"The run's tokenizer does not exist any more (no {FILE} in {name}): {without}."
        try:
            return cls(file), None
        except ValueError as error:
            return None, f"The run's tokenizer cannot be read ({error}): {without}."

    def encode(self, table: SampleTable) -> tuple[np.ndarray, list[bool]]:
        """Returns two things: the number of each token's entry in the vocabulary [response tokens]; and for each row
        whether its joined pieces equal its response [rows]."""
        used, inverse = np.unique(table.response_tokens, return_inverse=True)
        pieces = [self._piece(int(i)) for i in used]
        own = np.array([self._entry(int(i), piece) for i, piece in zip(used, pieces, strict=True)], np.int64)
        entries, fits = own[inverse], []
        offsets, places = table.response_offsets.tolist(), inverse.tolist()
        for row, response in enumerate(table.response):
            start, end = offsets[row], offsets[row + 1]
            row_pieces = [pieces[place] for place in places[start:end]]
            fitted = row_pieces
            if b"".join(row_pieces).decode(errors="replace") != response:
                ids = table.response_tokens[start:end].tolist()
                fitted = self._fitted(ids, row_pieces, response)
                entries[start : start + len(fitted)] = [*map(self._entry, ids, fitted)]
            fits.append(len(fitted) == end - start)
        return entries, fits

    def columns(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The arguments of `view_samples.pack`: a header with the names of added tokens, and columns with the token ids
        and with the lengths and bytes of the pieces."""
        pieces = [piece for _, piece in self._entries]
        header = {"names": {str(i): token.content for i, token in self._added.items()}}
        return header, {
            "ids": np.array([i for i, _ in self._entries], np.int32),
            "lengths": np.array([len(piece) for piece in pieces], np.int32),
            "bytes": np.frombuffer(b"".join(pieces), np.uint8),
        }

    def _fitted(self, ids: Sequence[int], pieces: list[bytes], response: str) -> list[bytes]:
        """Other pieces that together give ``response``, or [] if no known reason explains the difference.

        The known reasons: special tokens were left out, the first space was removed, or the end was cut off (for
        example by a stop string).
        """
        named = [b"" if i in self._added and self._added[i].special else p for i, p in zip(ids, pieces, strict=True)]
        for candidate in (pieces, named, self._marked(ids, pieces), self._marked(ids, named)):
            joined = b"".join(candidate).decode(errors="replace")
            cut = 1 if joined.startswith(" ") and not response.startswith(" ") else 0
            fitted = _part(candidate, cut, cut + len(response.encode()))
            if b"".join(fitted).decode(errors="replace") == response:
                return fitted
        return []

    def _marked(self, ids: Sequence[int], pieces: list[bytes]) -> list[bytes]:
        """The pieces of the tokens. If neighbouring byte tokens are not valid UTF-8, each of them becomes U+FFFD, as in
        the decoder."""
        marked = []
        for is_byte, run in groupby(zip(ids, pieces, strict=True), lambda pair: pair[0] in self._bytes):
            run_pieces = [piece for _, piece in run]
            broken = is_byte and "\ufffd" in b"".join(run_pieces).decode(errors="replace")
            marked += ["\ufffd".encode()] * len(run_pieces) if broken else run_pieces
        return marked

    def _entry(self, token: int, piece: bytes) -> int:
        return self._entries.setdefault((token, piece), len(self._entries))

    def _piece(self, token: int) -> bytes:
        if token not in self._pieces:
            self._pieces[token] = self._spell(token)
        return self._pieces[token]

    def _spell(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if token in self._added or name is None:
            return self._added[token].content.encode() if token in self._added else b""
        if self._byte_level and all(char in BYTES for char in name):
            return bytes(BYTES[char] for char in name)
        if self._spaced:
            if byte := BYTE.fullmatch(name):
                self._bytes.add(token)
                return bytes([int(byte[1], 16)])
            return str(name).replace("▁", " ").encode()
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text.encode()


def _part(pieces: Sequence[bytes], start: int, end: int) -> list[bytes]:
    """The bytes from ``start`` to ``end`` of the joined pieces, still divided into pieces."""
    kept, at = [], 0
    for piece in pieces:
        kept.append(piece[max(start - at, 0) : max(end - at, 0)])
        at += len(piece)
    return kept


def _find(run: Run, name: str) -> Path | None:
    """The tokenizer.json of a folder or hub id. A relative path may start from any folder above the run folder."""
    for base in (Path(), *run.folder.resolve().parents):
        if (base / name / FILE).is_file():
            return base / name / FILE
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        cached: object = try_to_load_from_cache(name, FILE)
    except ValueError:  # not a valid name on the hub
        return None
    return Path(cached) if isinstance(cached, str) else None


def _byte_chars() -> dict[str, int]:
    """Character of a byte-level tokenizer -> byte. Printable Latin-1 bytes are written as themselves, and the other
    bytes as characters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_chars()
