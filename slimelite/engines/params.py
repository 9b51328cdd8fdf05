"""The sampling parameters, defined once.

Flags, evaluation datasets, engines and the request bodies of every HTTP dialect use these definitions. A parameter may
have another name in each of these places, see `parameter`. To add a parameter, add a field to `SamplingParams`.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

# the most ids that are kept for a trained token if only top-p or min-p limits them; 1024 ids take 4 KiB
MOST_KEPT = 1024
# places with their own names for sampling parameters: the --rollout-* and --eval-* flags, the settings of an evaluation
# dataset, and the HTTP dialects. "sglang" is /generate, and also the dict that slime's generate functions receive
Place = Literal["rollout", "eval", "dataset", "openai", "responses", "anthropic", "sglang"]
PREFIXED: tuple[Place, ...] = ("rollout", "eval")
# SHIFTS: the parameters that change logits. GRAMMARS: the parameters that make a response follow a grammar
SHIFTS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "calls")


def parameter(
    default: object = MISSING,
    help: str = "",  # flags use the same name; the builtin help() is not used here
    own: str = "",
    *,
    truncates: str = "",
    bounds: dict[str, float] | None = None,
    **names: str,
) -> Any:
    """A field of `SamplingParams`.

    Args:
        default: the value if a source gives no value.
        help: the text for flags and settings.
        own: the places at which the parameter has the field's name.
        truncates: which values of the parameter exclude likely tokens, in words.
        bounds: for flags and settings, as `slimelite.arguments.flags.flag` takes them.
        names: place -> the parameter's names at this place, if they differ from the field's name.
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
        "a token is not sampled if its probability is below this fraction of the highest probability",
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
    # the stop string stays in the output (slime's no_stop_trim); the token that completes the stop string is the last
    # token
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
    # the next four parameters change the logits that a token is drawn from; the log-probs are still the model's
    repetition_penalty: float = parameter(
        1.0,
        "for tokens in the prompt or the response, positive logits are divided by this number, and negative logits "
        "are multiplied by it",
        "openai responses sglang",
        bounds={"above": 0, "at_most": 2},
    )
    presence_penalty: float = parameter(
        0.0,
        "the logit of each token that the response already contains is lowered by this number",
        "openai responses sglang",
        bounds={"at_least": -2, "at_most": 2},
    )
    frequency_penalty: float = parameter(
        0.0,
        "the logit of a token is lowered by this number times the count of the token in the response so far",
        "openai responses sglang",
        bounds={"at_least": -2, "at_most": 2},
    )
    logit_bias: dict[str, float] | None = parameter(
        None, "token id -> the number that is added to the logit of this token", "openai responses sglang"
    )
    # the next five parameters each give a grammar that the text must follow. At most one of them may be set, and the
    # engine must support grammars (`EngineInfo.schemas`)
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
        None, "JSON in SGLang's form: the text after each trigger fits the schema of a structure", "sglang"
    )
    # like structural_tag, but for calls of strict tools; an engine that cannot switch between free text and JSON
    # ignores this parameter
    calls: str | None = parameter(None)
    # grammar_after: the grammar applies only after this text, such as the end of the thinking. begun: the text that a
    # response begins with
    grammar_after: str = parameter("")
    begun: str = parameter("")
    # if top-p, top-k, min-p or a grammar excluded ids, the result has the ids that each token was drawn from, see
    # `telling`
    kept: bool = parameter(False)

    @classmethod
    def of(cls, source: object, place: Place) -> SamplingParams:
        """Read the parameters from the attributes of ``source``: the flags of a run, or the settings of a dataset."""
        prefix = f"{place}_" if place in PREFIXED else ""
        values: dict[str, Any] = {}
        for name, names in names_at(place).items():
            value = getattr(source, prefix + names[0])
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    def after(self, count: int, room: int | None = None) -> SamplingParams:
        """The parameters for the rest of a response that has ``count`` tokens so far.

        ``room``: the number of tokens that still fit into the context; None: no limit. In the result,
        ``max_new_tokens`` is 0 or less if no token is left.
        """
        left = self.max_new_tokens - count
        left = left if room is None else min(left, room)
        fewest = min(max(0, self.min_new_tokens - count), max(0, left))
        return replace(self, max_new_tokens=left, min_new_tokens=fewest)

    def telling(self, *, constrained: bool = False) -> SamplingParams:
        """The same parameters for a response that is trained on. The engine then returns the ids that each token was
        drawn from.

        If only top-p, min-p or a grammar limits these ids, top_k becomes `MOST_KEPT`, so that there are at most that
        many. ``constrained``: whether tokens that a grammar restricted are trained on too; if not, a grammar alone does
        not change top_k.
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
        """Names of the parameters that change logits. If one of them is set, tokens are drawn from another distribution
        than that of the reported log-probs."""
        defaults = {f.name: f.default for f in fields(self)}
        return [name for name in SHIFTS if (getattr(self, name) or defaults[name]) != defaults[name]]

    def truncation(self) -> dict[str, float]:
        """Name -> value of the parameters that exclude likely tokens."""
        values = {f: getattr(self, f.name) for f in fields(self) if f.metadata["truncates"]}
        return {f.name: value for f, value in values.items() if value != f.default}


@cache
def names_at(place: Place) -> dict[str, tuple[str, ...]]:
    """Field of `SamplingParams` -> its names at ``place``. The first name is the preferred name."""
    known = {f.name: f.metadata["names"] for f in fields(SamplingParams)}
    return {name: names[place] or (name,) for name, names in known.items() if place in names}
