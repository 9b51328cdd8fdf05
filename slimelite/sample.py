"""One sample while it is being generated: what a rollout function and its plugins read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar


class SampleStatus(StrEnum):
    """Where a sample stands; the names are slime's."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


Status = SampleStatus

# weight version of a token until somebody says it; -1 is that of the weights that an engine was started with
UNSTAMPED = -2

# finish reason of an engine -> status of the sample
FINISH_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(slots=True)
class Sample:
    """A prompt and the response being written to it.

    ``tokens`` is prompt and response together; the four per-token lists (``loss_mask``,
    ``rollout_log_probs``, ``weight_versions`` and, when a teacher scored it, ``teacher_log_probs``)
    cover the response alone and have ``response_length`` entries. `append_response_tokens` is their
    only writer.
    """

    Status: ClassVar[type[SampleStatus]] = SampleStatus

    group_index: int | None = None
    index: int | None = None
    # siblings of one fan-out share it; None: the sample is a rollout of its own
    rollout_id: int | None = None
    # samples that must not be trained apart (the two of a preference pair) share it; None: it stands alone
    unit_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[int] = field(default_factory=list)
    teacher_log_probs: list[float] | None = None
    # masked out of the loss, still counted in its group's statistics
    remove_sample: bool = False
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    # seconds spent waiting for tools and environments
    non_generation_time: float = 0.0

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that the loss sees."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        *,
        text: str = "",
        trainable: bool = True,
        weight_version: int | None = None,
        weight_versions: Sequence[int] | None = None,
    ) -> None:
        """Append ``tokens`` to the response and keep every per-token list aligned.

        ``log_probs``: the engine's, one a token; tokens of a tool or environment (``trainable=False``)
        get mask 0 and log-prob 0. ``weight_version``: of the weights that wrote the tokens (``weight_versions``: one
        a token); without either they get the version that the engine had when the generate function was called.

        Raises:
            ValueError: trainable tokens without log-probs, or lists of different lengths.
        """
        count = len(tokens)
        if log_probs is None:
            if trainable and count:
                raise ValueError(f"{count} trainable tokens came without log-probs; pass log_probs, or trainable=False")
            log_probs = [0.0] * count
        version = UNSTAMPED if weight_version is None else weight_version
        versions = [version] * count if weight_versions is None else list(weight_versions)
        for name, values in (("log_probs", log_probs), ("weight_versions", versions)):
            if len(values) != count:
                raise ValueError(f"{count} response tokens but {len(values)} {name}; they must be one to one")
        self.check_aligned()
        self.loss_mask = self.loss_mask if self.loss_mask is not None else [1] * self.response_length
        self.rollout_log_probs = self.rollout_log_probs if self.rollout_log_probs is not None else []
        self.tokens = [*self.tokens, *tokens]
        self.loss_mask = [*self.loss_mask, *([int(trainable)] * count)]
        self.rollout_log_probs = [*self.rollout_log_probs, *log_probs]
        self.weight_versions = [*self.weight_versions, *versions]
        self.response_length += count
        self.response += text

    @property
    def trained_versions(self) -> list[int]:
        """Weight versions of the response tokens that the loss sees; those of a tool have no age."""
        mask = self.loss_mask if self.loss_mask is not None else [1] * len(self.weight_versions)
        return [version for version, kept in zip(self.weight_versions, mask, strict=False) if kept]

    def check_aligned(self) -> None:
        """Raise ValueError unless every per-token list has ``response_length`` entries."""
        if self.response_length > len(self.tokens):
            raise ValueError(
                f"response_length {self.response_length} exceeds the {len(self.tokens)} tokens of the sample"
            )
        for name in ("loss_mask", "rollout_log_probs", "weight_versions", "teacher_log_probs"):
            values = getattr(self, name)
            if values and len(values) != self.response_length:
                raise ValueError(
                    f"sample {self.index}: {name} has {len(values)} entries but the response has "
                    f"{self.response_length} tokens; add tokens with append_response_tokens only"
                )

    def reward_value(self, key: str | None) -> float:
        """The reward as a number; ``key`` picks it from a dict reward.

        Raises:
            ValueError: there is no reward, or ``key`` does not fit it.
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
        """slime's spelling of `reward_value`."""
        return self.reward_value(args.reward_key)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`; fields it does not know raise ValueError."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"not fields of Sample: {unknown}")
        return cls(**{**values, "status": SampleStatus(values.get("status", SampleStatus.PENDING))})


def plain(value: Any) -> Any:
    """``value`` with nothing in it that JSON does not know: numpy's values are numbers and lists, others their text."""
    if isinstance(value, dict):
        return {str(plain(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # numpy's scalars and arrays, tensors
        return plain(value.tolist())
    return value if value is None or isinstance(value, str | int | float) else str(value)
