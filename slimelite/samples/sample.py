"""The class of a sample, which grows during generation, and the columns of the table of samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, asdict, dataclass, field, fields
from enum import StrEnum
from functools import cache, partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, overload

import numpy as np

from slimelite.base.registry import Registry

# type of an attribute when it is read: list[int] or list[float], with or without None
L = TypeVar("L")
# type of a stored attribute: engines set arrays, plugins and JSON set lists
PerToken = Sequence[Any] | np.ndarray


class Listed(Generic[L]):
    """An attribute that stores an array or a list. When the attribute is read, a stored array is replaced by an equal
    list.

    So ``sample.tokens += [5]`` and ``sample.loss_mask[0] = 0`` work as with any list. An array that is never read stays
    an array and saves memory: in a list, each token takes at least 32 bytes. ``vars(sample)`` returns the array or list
    as it is stored, without this conversion. ``default``: the default value of the dataclass field.
    """

    def __init__(self, default: tuple[()] | None = None) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> Any: ...
    @overload
    def __get__(self, owner: object, kind: type) -> L: ...
    def __get__(self, owner: object | None, kind: type) -> Any:
        if owner is None:
            return self._default
        values = vars(owner)
        value = values[self._name]
        if isinstance(value, np.ndarray):
            value = values[self._name] = value.tolist()
        return value

    def __set__(self, owner: object, value: PerToken | None) -> None:
        vars(owner)[self._name] = list(value) if isinstance(value, tuple) else value


def joined(before: PerToken | None, added: PerToken) -> PerToken:
    """The values of ``before``, then the values of ``added``. The result is an array if ``added`` is an array and
    ``before`` is an array or empty; otherwise the result is a new list."""
    if isinstance(added, np.ndarray) and (isinstance(before, np.ndarray) or not before):
        return np.concatenate([before, added]) if isinstance(before, np.ndarray) else added.copy()
    return [*_plain([] if before is None else before), *_plain(added)]


def _plain(values: PerToken) -> Sequence[object]:
    return values.tolist() if isinstance(values, np.ndarray) else values


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Kept ids: for each token of a response, the token ids that top-p, top-k and min-p did not exclude when the engine
    sampled it. A trainer renormalises log-probs over the kept ids.

    ``ids``: [sum of counts] int32, the kept ids of the first token, then those of the second, and so on. ``counts``:
    [tokens] int32, the number of kept ids of each token. A count of 0 means that the token was sampled from the whole
    vocabulary, or was not sampled (a token of a tool or an environment).
    """

    ids: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | np.ndarray]) -> Kept:
        """Build a `Kept` from the kept ids of each token."""
        counts = np.array([len(row) for row in rows], np.int32)
        ids = np.concatenate([np.asarray(row, np.int32) for row in rows]) if len(rows) else np.zeros(0, np.int32)
        return cls(ids, counts)

    @classmethod
    def nothing(cls, tokens: int) -> Kept:
        """A `Kept` for ``tokens`` tokens without kept ids."""
        return cls(np.zeros(0, np.int32), np.zeros(tokens, np.int32))

    @property
    def offsets(self) -> np.ndarray:
        """[tokens + 1] int64: where each token's ids start in ``ids``, and where the last token's ids end."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def rows(self) -> list[list[int]]:
        """The kept ids of each token."""
        ends = self.offsets.tolist()
        ids = self.ids.tolist()
        return [ids[begin:end] for begin, end in pairwise(ends)]

    def first(self, tokens: int) -> Kept:
        """The kept ids of the first ``tokens`` tokens."""
        counts = self.counts[:tokens]
        return Kept(self.ids[: int(counts.sum())], counts)


def together(before: Kept | None, tokens: int, added: Kept | None, more: int) -> Kept | None:
    """Join two sets of kept ids: ``before`` belongs to the first ``tokens`` tokens, ``added`` to the next ``more``
    tokens. Returns None if both are None."""
    if before is None and added is None:
        return None
    first, second = before or Kept.nothing(tokens), added or Kept.nothing(more)
    return Kept(np.concatenate([first.ids, second.ids]), np.concatenate([first.counts, second.counts]))


class Status(StrEnum):
    """The status of a sample, under slime's names."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_Status = Status  # an alias, because in the body of `Sample` the name ``Status`` is an attribute

# weight version of a token whose version is not known yet; -1 is the version of the weights at an engine's start
UNSTAMPED = -2

# finish reason of an engine -> status of the sample
FINISH_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}

# CONSTRAINED is a key of an answer's meta_info: for each token, 1 if a grammar excluded other tokens, else 0.
# CONSTRAINED_TOKENS is a key of a sample's metadata: the number of such tokens
CONSTRAINED, CONSTRAINED_TOKENS = "output_token_constrained", "constrained_tokens"

# fields of slime's Sample that are not supported -> their contents; None and empty values are accepted
NOT_HERE = {
    "multimodal_inputs": "images, video or audio",
    "multimodal_train_inputs": "images, video or audio",
    "multimodal_train_input_id": "images, video or audio",
    "apply_chat_template_kwargs": "chat template settings of a single sample",
    "rollout_routed_experts": "routing replay",
    "mopd_teacher_log_probs": "several teachers",
}


class Generated(NamedTuple):
    """How much a response grew in a rollout. ``tokens``: the number of added tokens. ``effective``: the number of added
    tokens that are trained on. ``waited``: the seconds that tools or the environment took."""

    tokens: int
    effective: int
    waited: float = 0.0


@dataclass
class Sample:
    """A prompt and its response, which grows during generation. A plugin that imports `slime.utils.types.Sample` gets
    this class.

    Plugins may set their own attributes, which are copied, saved and loaded with the sample.

    ``tokens`` contains the token ids of the prompt and of the response. The per-token lists cover only the response, so
    they have ``response_length`` entries. They are ``loss_mask``, ``rollout_log_probs``, ``weight_versions``, a user's
    own columns, and ``teacher_log_probs`` if a teacher scored the response. To add tokens, call
    `append_response_tokens`, which also extends ``loss_mask``, ``rollout_log_probs`` and ``weight_versions``. An
    attribute such as ``tokens`` may store an array from the engine. The first read of the attribute replaces the array
    by a Python list (`Listed`).
    """

    Status: ClassVar[type[_Status]] = _Status

    group_index: int | None = None
    index: int | None = None
    # equal for all samples of one fan-out; None: the sample is a rollout of its own
    rollout_id: int | None = None
    # equal for samples that must be trained together, such as a preference pair; None: the sample is not in such a unit
    unit_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: Listed[list[int]] = Listed(())
    response: str = ""
    response_length: int = 0
    # the correct answer, from the data: any JSON value
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: Listed[list[int] | None] = Listed()
    rollout_log_probs: Listed[list[float] | None] = Listed()
    weight_versions: Listed[list[int]] = Listed(())
    teacher_log_probs: Listed[list[float] | None] = Listed()
    # True: the sample is masked out of the loss, but is still counted in its group's statistics
    remove_sample: bool = False
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    # seconds spent waiting for tools and environments
    non_generation_time: float = 0.0
    # slime's names for `kept.ids` and `kept.offsets`
    rollout_top_p_token_ids: Listed[list[int] | None] = Listed()
    rollout_top_p_token_offsets: Listed[list[int] | None] = Listed()

    multimodal_inputs: InitVar[object] = None
    multimodal_train_inputs: InitVar[object] = None
    multimodal_train_input_id: InitVar[object] = None
    apply_chat_template_kwargs: InitVar[object] = None
    rollout_routed_experts: InitVar[object] = None
    mopd_teacher_log_probs: InitVar[object] = None

    def __post_init__(self, *not_here: object) -> None:
        """Refuse values of slime's constructor that slimelite does not support."""
        _refuse(dict(zip(NOT_HERE, not_here, strict=True)))

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return self.total_length - self.response_length

    @property
    def total_length(self) -> int:
        """Number of prompt and response tokens."""
        return len(vars(self)["tokens"])

    @property
    def prompt_ids(self) -> PerToken:
        """The token ids of the prompt, as an array or a list, depending on how ``tokens`` is stored."""
        ids: PerToken = vars(self)["tokens"]
        return ids[: self.prompt_length]

    @property
    def response_ids(self) -> PerToken:
        """The token ids of the response, as an array or a list, depending on how ``tokens`` is stored."""
        ids: PerToken = vars(self)["tokens"]
        return ids[self.prompt_length :]

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        mask = vars(self)["loss_mask"]
        if mask is None:
            return self.response_length
        return int(np.count_nonzero(mask)) if isinstance(mask, np.ndarray) else sum(mask)

    @property
    def kept(self) -> Kept | None:
        """The kept ids of the response tokens; None if top-p, top-k and min-p did not exclude any ids."""
        ids, offsets = (vars(self)[f"rollout_top_p_token_{part}"] for part in ("ids", "offsets"))
        if ids is None or offsets is None:
            return None
        return Kept(np.asarray(ids, np.int32), np.diff(np.asarray(offsets, np.int64)).astype(np.int32))

    @kept.setter
    def kept(self, kept: Kept | None) -> None:
        self.rollout_top_p_token_ids = None if kept is None else kept.ids
        self.rollout_top_p_token_offsets = None if kept is None else kept.offsets

    def generated_since(self, before: Sample | None = None) -> Generated:
        """How much the response grew since ``before``, an earlier copy of this sample. If ``before`` is None, the whole
        response counts."""
        if before is None:
            return Generated(self.response_length, self.effective_response_length, self.non_generation_time)
        return Generated(
            self.response_length - before.response_length,
            self.effective_response_length - before.effective_response_length,
            self.non_generation_time - before.non_generation_time,
        )

    def append_response_tokens(
        self,
        first: Any = None,
        log_probs: PerToken | None = None,
        *,
        tokens: PerToken | None = None,
        text: str | None = None,
        trainable: bool = True,
        weight_version: int | None = None,
        weight_versions: PerToken | None = None,
        kept: Kept | None = None,
        constrained: PerToken | None = None,
        meta_info: dict[str, Any] | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response, and keep every per-token list aligned.

        Call this method with ``(tokens, log_probs)``, or as in slime with ``(args, tokens=…, log_probs=…,
        meta_info=…)``.

        ``log_probs``: the engine's log-probs, one for each token. Tokens of a tool or environment (``trainable=False``)
        get mask 0 and log-prob 0. ``weight_version``: the version of the weights that sampled the tokens.
        ``weight_versions``: the version of each token. If ``weight_version``, ``weight_versions`` and ``meta_info`` are
        None, the tokens get the version that the engines have when the generate function returns. ``kept``: the kept
        ids of each token. If ``kept`` is passed, ``log_probs`` must be normalised over the kept ids. ``constrained``:
        for each token, whether a grammar excluded other tokens. A constrained token gets mask 0 and is counted in
        ``metadata``. ``meta_info``: the field ``meta_info`` of the engine's answer, which contains the weight versions
        and the finish reason. The finish reason sets the sample's status, unless ``update_terminal_info`` is False. If
        the request set ``return_sampling_mask``, ``meta_info`` also contains the kept ids and the log-probs over them.
        These log-probs replace ``log_probs``.

        Raises:
            ValueError: trainable tokens have no log-probs, or the lists have different lengths.
        """
        ids = first if tokens is None else tokens
        added: Any = ids if isinstance(ids, np.ndarray) else [] if ids is None else list(ids)
        count = len(added)
        if log_probs is None:
            if trainable and count:
                raise ValueError(f"{count} trainable tokens have no log-probs; pass log_probs, or trainable=False")
            log_probs = [0.0] * count
        if meta_info is not None and weight_version is None and weight_versions is None:
            weight_versions = versions_of(meta_info, count)
        if meta_info is not None and kept is None and trainable and "output_token_sampling_mask" in meta_info:
            kept, log_probs = kept_of(meta_info, count, log_probs)
        if meta_info is not None and constrained is None and trainable:
            constrained = meta_info.get(CONSTRAINED)
        version = UNSTAMPED if weight_version is None else weight_version
        versions = [version] * count if weight_versions is None else weight_versions
        every = {"log_probs": log_probs, "weight_versions": versions} | ({} if kept is None else {"kept": kept.counts})
        every |= {} if constrained is None else {"constrained": constrained}
        for name, values in every.items():
            if len(values) != count:
                raise ValueError(f"{count} response tokens but {len(values)} {name}; each token needs one")
        now, packed = vars(self), isinstance(added, np.ndarray)
        before, mask = now["tokens"], now["loss_mask"]
        if mask is None:
            mask = np.ones(self.response_length, np.int8) if packed else [1] * self.response_length
            self.loss_mask = mask
        self.check_aligned()
        self.tokens = joined(np.asarray(before, added.dtype) if packed else before, added)
        trained = np.full(count, int(trainable), np.int8)
        if constrained is not None:
            trained[np.asarray(constrained, bool)] = 0
            self.count_constrained(constrained)
        if isinstance(mask, np.ndarray):
            self.loss_mask = joined(mask, trained)
        else:  # in place, as in slime: slime's retool example keeps a reference to the list, and assigns it at the end
            mask.extend(trained.tolist())
        self.rollout_log_probs = joined(now["rollout_log_probs"], log_probs)
        self.weight_versions = joined(now["weight_versions"], versions)
        self.kept = together(self.kept, self.response_length, kept, count)
        self.response_length += count
        self.response += text or ""
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(None, meta_info)

    def count_constrained(self, constrained: PerToken) -> None:
        """Increase a counter in ``metadata`` by the number of constrained tokens. A metric reports this counter."""
        count = self.metadata.get(CONSTRAINED_TOKENS, 0) + int(np.count_nonzero(constrained))
        self.metadata = {**self.metadata, CONSTRAINED_TOKENS: count}

    def update_from_meta_info(self, args: object, meta_info: dict[str, Any]) -> None:  # noqa: ARG002
        """Set the status from the engine's finish reason; the signature is slime's."""
        self.status = FINISH_STATUS.get(meta_info["finish_reason"]["type"], Status.COMPLETED)

    @property
    def trained_versions(self) -> np.ndarray:
        """Weight versions of the response tokens that are trained on. Tokens of a tool are not included, because an
        engine did not sample them."""
        versions, mask = np.asarray(vars(self)["weight_versions"], np.int64), vars(self)["loss_mask"]
        return versions if mask is None else versions[: len(mask)][np.asarray(mask[: len(versions)], bool)]

    def check_aligned(self) -> None:
        """Raise ValueError if a per-token list does not have one entry for each response token, or if an unsupported
        field is set."""
        if not NOT_HERE.keys().isdisjoint(vars(self)):
            _refuse({name: getattr(self, name) for name in NOT_HERE})
        if self.response_length > self.total_length:
            raise ValueError(
                f"response_length {self.response_length} exceeds the {self.total_length} tokens of the sample"
            )
        if (kept := self.kept) is not None and (kept.counts.min(initial=0) < 0 or kept.counts.sum() != len(kept.ids)):
            raise ValueError(
                f"sample {self.index}: rollout_top_p_token_offsets must rise from 0 to {len(kept.ids)}, the number of "
                "ids"
            )
        for column in _token_columns(len(COLUMNS)):
            values = column.read(self)
            count = None if values is None else len(values)
            # an empty mask is an error, because its meaning is unclear. Other empty lists mean that there are no values
            if count != self.response_length and (count or (count == 0 and column.name == "loss_mask")):
                raise ValueError(
                    f"sample {self.index}: {column.name} has {count} entries but the response has "
                    f"{self.response_length} tokens; add tokens with append_response_tokens only"
                )

    def reward_value(self, key: str | None) -> float:
        """The reward as a number. If the reward is a dict, ``key`` selects the value.

        Raises:
            ValueError: the sample has no reward, or the reward is a dict without the entry ``key``.
        """
        reward = self.reward
        if isinstance(reward, dict):
            if key is None or key not in reward:
                raise ValueError(
                    f"the reward is a dict with keys {sorted(reward)}; name one with --reward-key (got {key!r})"
                )
            reward = reward[key]
        if reward is None:
            raise ValueError(f"sample {self.index} of group {self.group_index} has no reward")
        return float(reward)

    def get_reward_value(self, args: Any) -> float:
        """slime's name for `reward_value`."""
        return self.reward_value(args.reward_key)

    def to_dict(self) -> dict[str, Any]:
        """A dict with all fields, and with the attributes that plugins have set. Only the fields are copied."""
        return {**vars(self), **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        """Build a sample from the result of `to_dict`. Keys that are not fields become attributes, like those that
        plugins set."""
        known = {f.name for f in fields(cls)} & values.keys()
        sample = cls(**{name: values[name] for name in known})
        sample.status = _Status(sample.status)
        vars(sample).update({name: value for name, value in values.items() if name not in known})
        return sample


# the lists of a sample with a value for each token
PER_TOKEN = tuple(name for name, value in vars(Sample).items() if isinstance(value, Listed))


@dataclass(frozen=True)
class Column:
    """A column of the table of samples. Saved rollouts contain the column, and a loss can read it.

    ::

        COLUMNS.add(Column("difficulty", "float32", per="token"))

    In a file that ``--import-file`` names, this line adds the column ``difficulty``. A generate function then sets
    ``sample.difficulty`` to a list with one value for each response token. A loss reads the values with
    ``batch.column("difficulty")``. If no sample has a value for an added column, the table omits this column.
    """

    name: str
    dtype: str  # the name of a numpy dtype, or "str"
    # one value for each sample, prompt token, response token or kept id
    per: Literal["sample", "prompt", "token", "kept"] = "sample"
    of: Callable[[Sample], object] | None = None  # returns a sample's value; None: the attribute ``name`` is the value
    absent: object = math.nan  # used for a missing value; in a per-token column also for an empty list
    required: bool = False  # whether every table and file has this column

    def read(self, sample: Sample) -> Any:
        """The value (or the per-token values) of ``sample`` in this column; None if missing."""
        if self.of is not None:
            return self.of(sample)
        values = vars(sample)
        return values[self.name] if self.name in values else getattr(sample, self.name, None)


_every = partial(Column, required=True)
COLUMNS = Registry(
    "column of the table of samples",
    "column",
    (
        _every("sample_id", "int64", of=attrgetter("index")),
        # equal for all samples of one fan-out
        _every("rollout_id", "int64", of=lambda s: s.index if s.rollout_id is None else s.rollout_id),
        _every("group_id", "int64", of=attrgetter("group_index")),  # equal for all samples of one prompt
        # equal for rows that must be in the same micro-batch on the same rank, such as a DPO pair
        _every("unit_id", "int64", of=lambda s: s.index if s.unit_id is None else s.unit_id),
        _every("reward", "float64"),
        _every("advantage", "float64", of=lambda _: 0.0),  # from groups.py, before rows are distributed to ranks
        # True: the row is masked out of the loss, but is still counted in its group's statistics
        _every("removed", "bool", of=attrgetter("remove_sample")),
        _every("prompt_tokens", "int32", "prompt", attrgetter("prompt_ids")),
        _every("response_tokens", "int32", "token", attrgetter("response_ids")),
        _every("loss_mask", "bool", "token", absent=True),
        _every("rollout_log_probs", "float32", "token"),
        _every("weight_versions", "int32", "token", absent=0),
        _every("teacher_log_probs", "float32", "token"),  # NaN where no teacher scored the token
        # at the last token of each reply of an episode: the reward of the reply. NaN at other tokens
        Column("turn_rewards", "float32", "token"),
        # number of the player in an episode with several players. Rows are compared only with rows of the same role
        Column("role", "int32", absent=0),
        _every("status", "str", of=lambda s: str(s.status)),
        _every("label", "str", of=lambda s: plain(s.label)),  # any JSON value
        _every("prompt", "str", of=lambda s: s.prompt if isinstance(s.prompt, str) else json.dumps(s.prompt)),
        _every("response", "str"),
        _every("metadata", "str", of=lambda s: json.dumps(plain(s.metadata)) if s.metadata else "{}"),
        # JSON of a reward that is a dict; the column ``reward`` has one of its entries
        Column(
            "reward_components", "str", of=lambda s: json.dumps(plain(s.reward)) if isinstance(s.reward, dict) else "{}"
        ),
        # the number of kept ids of each token, and these ids (see `Kept`)
        Column("kept_counts", "int32", "token", lambda s: None if s.kept is None else s.kept.counts, absent=0),
        Column("kept_ids", "int32", "kept", lambda s: None if s.kept is None else s.kept.ids),
        # the trained advantages, if they differ between the tokens of a row; then ``advantage`` is not used
        Column("advantages", "float32", "token", of=lambda _: None),
        # each token's weight in the policy loss, if flags such as --correction changed it; NaN: not computed
        Column("loss_weights", "float32", "token", of=lambda _: None),
    ),
)


@cache
def _token_columns(_known: int) -> list[Column]:
    """The per-token columns whose length a plugin can get wrong. ``_known``: the current number of columns, the key of
    the cache."""
    return [column for column in COLUMNS.values() if column.per == "token" and column.name != "response_tokens"]


def versions_of(meta_info: dict[str, Any], count: int) -> list[int]:
    """The weight versions of the first ``count`` tokens of an engine's answer, from the answer's ``meta_info``."""
    spans = meta_info.get("weight_versions") or [{"version": meta_info.get("weight_version", ""), "start": 0}]
    ends = [*(span["start"] for span in spans[1:]), count]
    versions: list[int] = []
    for span, end in zip(spans, ends, strict=True):
        # until the first update, the version of SGLang is "default"
        version = int(span["version"]) if str(span["version"]).isdecimal() else UNSTAMPED
        versions += [version] * (end - span["start"])
    return versions[:count]  # a plugin may have shortened the response


def kept_of(meta_info: dict[str, Any], count: int, log_probs: PerToken) -> tuple[Kept, PerToken]:
    """The kept ids of the first ``count`` tokens of an engine's answer, and the log-probs over these ids, from the
    answer's ``meta_info``. For a token that was sampled from the whole vocabulary, the log-prob in ``log_probs`` is
    returned.
    """
    masks = [mask or () for mask in meta_info["output_token_sampling_mask"][:count]]
    over = meta_info["output_token_sampling_logprobs"][:count]
    each = zip(masks, over, log_probs, strict=True)
    return Kept.of(masks), [now if mask else before for mask, now, before in each]


# metadata key: the row of the data file from which a task made the prompt, such as "row 3"
ROW = "row"


def label_text(label: object) -> str:
    """A label as text for reward rules: numbers as Python prints them, lists and dicts as JSON, None as ""."""
    if isinstance(label, list | dict):
        return json.dumps(plain(label), ensure_ascii=False)
    return "" if label is None else str(label)


def _refuse(values: dict[str, object]) -> None:
    for name, value in values.items():
        carried = value.values() if isinstance(value, dict) else [value]
        if any(entry is not None and not (hasattr(entry, "__len__") and len(entry) == 0) for entry in carried):
            raise ValueError(f"Sample.{name} is not empty, but {NOT_HERE[name]} are not supported here")


def plain(value: object) -> object:
    """``value``, converted to JSON values: numpy values become numbers and lists, other objects become text."""
    if isinstance(value, dict):
        return {str(plain(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # numpy's scalars and arrays, tensors
        return plain(value.tolist())
    return value if value is None or isinstance(value, str | int | float) else str(value)
