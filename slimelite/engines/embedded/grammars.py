"""Grammars for responses. llguidance computes which tokens may come next in each row.

A grammar applies from the first token on, or after a given text, such as the end of the thinking. A structural tag
applies after each of its triggers, up to the end of the structure that the model chose. All other text is free.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from slimelite.engines.params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# longest grammar [characters]; llguidance takes up to half a second to compile this length
LONGEST = 1 << 16
# the most compiled grammars that an engine keeps
MOST_COMPILED = 64
# white space between two tokens of JSON: long enough to indent, but limited, because a small model might never stop
# writing white space
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}


@dataclass(frozen=True)
class Structure:
    """The text that a structural tag allows after a trigger: ``begin``, then JSON of ``schema``, then ``end``."""

    begin: str
    schema: Any
    end: str


class Grammars:
    """The grammars of an engine.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: the size of the model's vocabulary; its last tokens may have no text.
        end_ids: tokens that end a response.

    Raises:
        ValueError: llguidance cannot read the texts of this tokenizer's tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Collection[int]) -> None:
        from llguidance import LLParserLimits
        from llguidance.hf import from_tokenizer

        self.end_ids = sorted(i for i in end_ids if i < vocab_size) or [tokenizer.eos_token_id or 0]
        try:
            self.tokens: LLTokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=self.end_ids)
        except Exception as error:  # a slow tokenizer, or a tokenizer of another kind
            raise ValueError(f"grammars cannot be enforced with this tokenizer: {error!s:.200}") from error
        # a grammar refers to special tokens by id, not by text
        added = tokenizer.added_tokens_decoder
        self.special = {token.content: i for i, token in added.items() if self.tokens.is_special_token(i)}
        self._special_texts = {i: text.encode() for text, i in self.special.items()}
        # _marks: all special tokens; _inner_marks: the special tokens that do not end a response
        self._marks = _bits(self._special_texts, vocab_size)
        self._inner_marks = _bits(self._special_texts.keys() - set(self.end_ids), vocab_size)
        self._limits = LLParserLimits(verbose_errors=False, max_grammar_size=100_000)
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def guide(self, params: SamplingParams) -> Held | None:
        """The state of the grammar for the response to a request; None if the response is free.

        Raises:
            ValueError: the grammar is malformed, or too large.
        """
        grammar = params.grammar
        if grammar is None:
            return None
        kind, text = grammar
        if kind in ("structural_tag", "calls"):
            triggers, structures = read_tag(text)
            written = {trigger: (kind, self._alternatives(trigger, structures)) for trigger in triggers}
        elif kind == "json_schema" and params.calls is not None:
            _, structures = read_tag(params.calls)
            written = {params.grammar_after: ("calls", self._alternatives("", structures, schema=_parsed(text)))}
        else:
            written = {params.grammar_after: grammar}
        for one in written.values():
            self.compiled(*one)
        return Held(self, written, repeats=kind in ("structural_tag", "calls"))

    def text(self, token: int) -> bytes:
        """The text of a token. Special tokens have a text too."""
        return self._special_texts.get(token) or self.tokens.decode_bytes([token])

    @cached_property
    def _spellings(self) -> dict[bytes, list[int]]:
        """Text -> the tokens with this text. Special tokens are left out."""
        spellings: dict[bytes, list[int]] = {}
        for token in range(self.tokens.vocab_size):
            if token not in self._special_texts:
                spellings.setdefault(self.tokens.decode_bytes([token]), []).append(token)
        return spellings

    def spell(self, matcher: LLMatcher, allowed: np.ndarray) -> None:
        """If ``allowed`` has a special token that the matcher refuses, allow only the tokens with which the required
        text can begin.

        llguidance splits the required text like the tokenizer, which may produce a special token. llguidance then
        refuses this token, because a special token is not text.
        """
        special = allowed & (self._inner_marks if matcher.is_accepting() else self._marks)
        if not special.any() or all(matcher.validate_tokens([token]) for token in _set_bits(special)):
            return
        text = matcher.compute_ff_bytes()
        begins = [token for size in range(1, len(text) + 1) for token in self._spellings.get(text[:size], ())]
        allowed[:] = _bits(begins, self.tokens.vocab_size)

    def compiled(self, kind: str, text: str) -> LLMatcher:
        """A new matcher, which has read no token yet. llguidance compiles the grammar without the GIL, and its compile
        time is limited."""
        from llguidance import LLMatcher

        key = f"{kind} {text}"
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key].deep_copy()
        if len(text) > LONGEST:
            raise ValueError(f"{kind}: the grammar has {len(text)} characters; the limit is {LONGEST}")
        matcher = LLMatcher(self.tokens, _written(kind, text), log_level=0, limits=self._limits)
        if matcher.is_error():
            name = "the schema of a strict tool" if kind == "calls" else kind
            raise ValueError(f"{name}: not a valid grammar: {_short(matcher.get_error())}")
        with self._lock:
            self._known[key] = matcher
            while len(self._known) > MOST_COMPILED:
                self._known.popitem(last=False)
        return matcher.deep_copy()

    def _alternatives(self, trigger: str, structures: Sequence[Structure], schema: Any = None) -> str:
        """The grammar of the text after a trigger: the rest of any structure that begins with the trigger.

        ``schema``: also allow JSON of this schema in place of the structures; then several structures may follow each
        other.
        """
        known = [s for s in structures if s.begin.startswith(trigger)]
        parts = ((self._literal(s.begin[len(trigger) :]), _with_options(s.schema), self._literal(s.end)) for s in known)
        rules = [f"structure_{n}: {begin} %json {schema} {end}" for n, (begin, schema, end) in enumerate(parts)]
        one = " | ".join(f"structure_{n}" for n in range(len(rules)))
        if schema is None:
            return "\n".join([f"start: {one}", *rules, ""])
        answer = f"answer: %json {_with_options(schema)}"
        return "\n".join([f"start: answer | one (SPACE? one)*\none: {one}\nSPACE: /[ \\n]{{1,2}}/", answer, *rules, ""])

    def _literal(self, text: str) -> str:
        parts = re.split(f"({'|'.join(map(re.escape, self.special))})", text) if self.special else [text]
        named = {part: f"<[{self.special[part]}]>" for part in parts if part in self.special}
        return " ".join(named.get(part, json.dumps(part, ensure_ascii=False)) for part in parts if part)


class Held:
    """The position of a response in its grammar.

    Args:
        written: trigger -> (kind, source) of the grammar that applies after this trigger. An empty trigger means that
            the grammar applies from the beginning.
        repeats: if True, the response is free after the end of the grammar, until one of the triggers comes again. If
            False, the response ends where the grammar ends.
    """

    def __init__(self, grammars: Grammars, written: Mapping[str, tuple[str, str]], *, repeats: bool) -> None:
        self._grammars, self._written, self._repeats = grammars, written, repeats
        self._triggers = {trigger.encode(): trigger for trigger in written}
        self._longest = max(map(len, self._triggers))
        self._matcher: LLMatcher | None = None
        self._text = b""  # the end of the free text
        self._find()

    @property
    def end_ids(self) -> Sequence[int]:
        """The tokens that end a response, according to llguidance."""
        return self._grammars.end_ids

    @property
    def active(self) -> bool:
        """Whether the grammar restricts the next token."""
        return self._matcher is not None

    @property
    def ended(self) -> bool:
        """Whether the response must end at this point."""
        return self._matcher is not None and self._matcher.is_stopped()

    def advance(self, tokens: Iterable[int]) -> None:
        """Advance by the next tokens.

        Raises:
            ValueError: the grammar does not allow these tokens, or is too large at this point.
        """
        for token in tokens:
            if self._matcher is None:
                self._text += self._grammars.text(token)
                self._find()
            elif not self._matcher.consume_token(token):
                raise _failed(self._matcher)
            if self._repeats and self.ended:
                self._matcher, self._text = None, b""

    def fill(self, allowed: np.ndarray) -> bool:
        """Set the bits of the tokens that may come next, in ``allowed`` [words] int32. Returns whether the response may
        end at this point.

        Raises:
            ValueError: the grammar is too large at this point.
        """
        assert self._matcher is not None
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if self._matcher.is_error():
            raise _failed(self._matcher)
        self._grammars.spell(self._matcher, allowed)
        return self._matcher.is_accepting()

    def _find(self) -> None:
        """Look for the first trigger in the free text, and begin to match after it."""
        places = [(at, -len(trigger)) for trigger in self._triggers if (at := self._text.find(trigger)) >= 0]
        if not places:
            self._text = self._text[-self._longest :]
            return
        at, size = min(places)
        trigger, rest = self._text[at : at - size], self._text[at - size :]
        matcher = self._grammars.compiled(*self._written[self._triggers[trigger]])
        # a matcher reads bytes, so the bytes may be split into other tokens than the response has
        if rest and not matcher.consume_tokens(self._grammars.tokens.tokenize_bytes(rest)):
            self._text = rest  # the grammar does not match: the trigger ended in the middle of a token
            return
        self._matcher, self._text = matcher, b""


def read_tag(text: str) -> tuple[list[str], list[Structure]]:
    """The triggers and structures of a structural tag in SGLang's JSON.

    Raises:
        ValueError: the text is not a structural tag.
    """
    try:
        tag = json.loads(text)
        structures = [Structure(str(s["begin"]), s.get("schema", {}), str(s["end"])) for s in tag["structures"]]
        triggers = [str(trigger) for trigger in tag["triggers"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            'structural_tag: must be {"structures": [{"begin", "schema", "end"}], "triggers": [text]} '
            f"({error!r:.100})"
        ) from None
    unused = [t for t in triggers if not t or not any(s.begin.startswith(t) for s in structures)]
    if unused or not triggers:
        raise ValueError(f"structural_tag: no structure begins with the trigger {unused[0] if unused else ''!r:.80}")
    return triggers, structures


def _written(kind: str, text: str) -> str:
    """A grammar in the form that llguidance reads."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        if kind == "json_schema":
            return str(LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(text))
        if kind == "ebnf" and re.search(r"^\s*root\s*::=", text, re.MULTILINE):
            text = gbnf_to_lark(text)
        return str(LLMatcher.grammar_from_lark(text))
    except Exception as error:  # the converter raises errors of all types
        raise ValueError(f"{kind}: not a valid grammar: {_short(str(error))}") from None


def _bits(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """One bit for each token, in words of 32 bits as in `Held.fill`."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _set_bits(words: np.ndarray) -> list[int]:
    """The tokens with a set bit."""
    return [int(token) for token in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json_schema: not JSON: {error!s:.200}") from None


def _with_options(schema: Any) -> str:
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS} if isinstance(schema, dict) else schema)


def _failed(matcher: LLMatcher) -> ValueError:
    """The error of a matcher that cannot continue: its grammar does not allow the text, or exceeds a limit of
    llguidance."""
    why = matcher.get_error().removeprefix("Parser Error: ").partition("; consider")[0].partition("\n<")[0]
    if "doesn't satisfy" in why or "parser stopped" in why:
        return ValueError(f"the response does not follow its grammar: {_short(why)}")
    return ValueError(
        f"the grammar is too large: {_short(why)}. Use fewer optional properties, alternatives or patterns"
    )


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
