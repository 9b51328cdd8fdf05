"""The sampling parameters, defined once.

Flags, evaluation datasets, engines and the request bodies of every HTTP dialect use these definitions. `parameter`
gives the names that a parameter has in each of these places. To add a parameter, add a field to `SamplingParams`.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

# most ids that top-p and min-p alone keep for a token that is trained on, so that a token has at most 4 KiB of ids
MOST_KEPT = 1024
# who takes sampling parameters under names of its own: --rollout-* and --eval-* flags, the settings of an evaluation
# dataset, and the dialects; "sglang" is /generate and what slime's generate functions get
Place = Literal["rollout", "eval", "dataset", "openai", "responses", "anthropic", "sglang"]
PREFIXED: tuple[Place, ...] = ("rollout", "eval")
# the parameters that change logits, and those that hold a response to a grammar
SHIFTS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "calls")


def parameter(
    default: object = MISSING,
    help: str = "",  # the word of the flags; nothing here needs the builtin
    own: str = "",
    *,
    truncates: str = "",
    bounds: dict[str, float] | None = None,
    **names: str,
) -> Any:
    """A field of `SamplingParams`.

    Args:
        default: the value if nobody gives one.
        help: the text for flags and settings.
        own: the places where the parameter has its own name.
        truncates: the values that exclude likely tokens, in words.
        bounds: for flags and settings, as `slimelite.arguments.flags.flag` takes them.
        names: place -> its names there, if they differ.
    """
    known = {**dict.fromkeys(own.split(), ()), **{place: tuple(text.split()) for place, text in names.items()}}
    metadata = {"help": help, "truncates": truncates, "bounds": bounds or {}, "names": known}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one response. Temperature 0 or top_k 1 is greedy."""

    max_new_tokens: int = parameter(
        help="a response has at most this length [tokens]",
        own="sglang",
        bounds={"at_least": 1},
        rollout="max_response_len",
        eval="max_response_len",
        dataset="max_response_len",
        openai="max_tokens max_completion_tokens",
        responses="max_output_tokens",
        anthropic="max_tokens",
    )
    temperature: float = parameter(
        1.0,
        "responses are sampled at this temperature; 0 is greedy",
        "rollout eval dataset openai responses anthropic sglang",
        bounds={"at_least": 0},
    )
    top_p: float = parameter(
        1.0,
        "nucleus sampling keeps the most likely tokens up to this total probability",
        "rollout eval dataset openai responses anthropic sglang",
        truncates="below 1",
        bounds={"above": 0, "at_most": 1},
    )
    top_k: int = parameter(
        -1,
        "only the k most likely tokens are sampled; -1 means all",
        "rollout eval dataset openai responses anthropic sglang",
        truncates="another number",
        bounds={"at_least": 1, "except_for": -1},
    )
    min_p: float = parameter(
        0.0,
        "a token is not sampled if its probability is below this fraction of the largest probability",
        "rollout eval dataset openai responses sglang",
        truncates="above 0",
        bounds={"at_least": 0, "at_most": 1},
    )
    min_new_tokens: int = parameter(
        0,
        "a response has at least this length [tokens]",
        "eval dataset sglang",
        bounds={"at_least": 0},
        openai="min_tokens",
        responses="min_tokens",
    )
    # the stop string stays in the output (slime's no_stop_trim); the token that completes it is the last one
    stop: tuple[str, ...] = parameter(
        (), "these texts end a response", "rollout dataset openai responses sglang", anthropic="stop_sequences"
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (), "these token ids end a response", "rollout dataset openai responses sglang"
    )
    ignore_eos: bool = parameter(False, own="openai responses sglang")
    skip_special_tokens: bool = parameter(
        False, "special tokens are left out of the text of a response", "rollout dataset sglang"
    )
    # seed of this request's random stream: the draw of token t depends only on (seed, t); None: not repeatable
    seed: int | None = parameter(None, own="openai responses", sglang="sampling_seed")
    # these change the logits before a token is drawn by them; log-probs stay those of the model
    repetition_penalty: float = parameter(
        1.0,
        "positive logits of tokens that occur in prompt or response are divided by this, negative ones are "
        "multiplied by it",
        "openai responses sglang",
        bounds={"above": 0, "at_most": 2},
    )
    presence_penalty: float = parameter(
        0.0,
        "logits of tokens of the response are lowered by this",
        "openai responses sglang",
        bounds={"at_least": -2, "at_most": 2},
    )
    frequency_penalty: float = parameter(
        0.0,
        "logits of tokens of the response are lowered by this for each occurrence",
        "openai responses sglang",
        bounds={"at_least": -2, "at_most": 2},
    )
    logit_bias: dict[str, float] | None = parameter(
        None, "token id -> number that is added to its logit", "openai responses sglang"
    )
    # the grammar that the text is held to, at most one of these, where the engine can (`EngineInfo.schemas`)
    json_schema: str | None = parameter(None, "the response is JSON that fits this schema", "sglang")
    regex: str | None = parameter(
        None,
        "the response matches this regular expression",
        "sglang",
        openai="guided_regex regex",
        responses="guided_regex regex",
    )
    ebnf: str | None = parameter(
        None,
        "the response fits this grammar, in Lark's or llama.cpp's notation",
        "sglang",
        openai="guided_grammar ebnf",
        responses="guided_grammar ebnf",
    )
    structural_tag: str | None = parameter(
        None, "JSON in SGLang's form: what follows each trigger fits the schema of a structure", "sglang"
    )
    # like structural_tag, for calls of strict tools; an engine that cannot change between free text and JSON ignores it
    calls: str | None = parameter(None)
    # the grammar holds after this text, such as the end of the thinking; and the text that a response begins with
    grammar_after: str = parameter("")
    begun: str = parameter("")
    # if top-p, top-k, min-p or a grammar excluded ids, the result has those that each token was drawn from: `telling`
    kept: bool = parameter(False)

    @classmethod
    def of(cls, source: object, place: Place) -> SamplingParams:
        """The parameters that ``source`` has as attributes: the flags of a run, or the settings of a dataset."""
        prefix = f"{place}_" if place in PREFIXED else ""
        values: dict[str, Any] = {}
        for name, names in names_at(place).items():
            value = getattr(source, prefix + names[0])
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    def after(self, count: int, room: int | None = None) -> SamplingParams:
        """The parameters for the rest of a response that has ``count`` tokens, in a context with ``room`` for more.

        ``room`` None means no limit. ``max_new_tokens`` is 0 or less if no token is left.
        """
        left = self.max_new_tokens - count
        left = left if room is None else min(left, room)
        fewest = min(max(0, self.min_new_tokens - count), max(0, left))
        return replace(self, max_new_tokens=left, min_new_tokens=fewest)

    def telling(self, *, constrained: bool = False) -> SamplingParams:
        """The same parameters for a response that is trained on. The engine then returns the ids that each token was
        drawn from.

        If only top-p, min-p or a grammar limits these ids, there are at most `MOST_KEPT` of them. ``constrained``:
        tokens that a grammar constrained are trained on too.
        """
        unlimited = self.top_k < 1 and (self.truncation() or (constrained and self.grammar is not None))
        return replace(self, kept=True, top_k=MOST_KEPT if unlimited else self.top_k)

    @property
    def tells(self) -> bool:
        """Whether a result has the ids that its tokens were drawn from."""
        return self.kept and bool(self.truncation())

    @property
    def grammar(self) -> tuple[str, str] | None:
        """(parameter, text) of the grammar that the response must follow; None without one."""
        named = ((name, getattr(self, name)) for name in GRAMMARS)
        return next(((name, text) for name, text in named if text is not None), None)

    @property
    def guided(self) -> bool:
        """Whether the response must follow a grammar that every engine with grammars can enforce."""
        return any(getattr(self, name) is not None for name in GRAMMARS[:-1])

    def shifts(self) -> list[str]:
        """Names of the parameters that change logits. Log-probs are then not those of the distribution that is drawn
        from."""
        defaults = {f.name: f.default for f in fields(self)}
        return [name for name in SHIFTS if (getattr(self, name) or defaults[name]) != defaults[name]]

    def truncation(self) -> dict[str, float]:
        """Name -> value of the parameters that exclude likely tokens."""
        values = {f: getattr(self, f.name) for f in fields(self) if f.metadata["truncates"]}
        return {f.name: value for f, value in values.items() if value != f.default}


@cache
def names_at(place: Place) -> dict[str, tuple[str, ...]]:
    """Field of `SamplingParams` -> its names at ``place``. The first name is the usual one."""
    known = {f.name: f.metadata["names"] for f in fields(SamplingParams)}
    return {name: names[place] or (name,) for name, names in known.items() if place in names}
