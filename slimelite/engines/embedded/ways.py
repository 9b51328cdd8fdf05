"""Finds out how the generic decoder may compute the models of a family, by tests on a small copy of a model.

Some caches of transformers give wrong results without an error: with rows of different lengths, or when several tokens
follow the cached tokens. So a small random model computes a few sequences in each way. The log-probs are compared with
the log-probs of a plain forward pass.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slimelite.engines.embedded.caches import joined, with_rows
from slimelite.engines.embedded.model import not_fast
from slimelite.engines.embedded.passes import Passes
from slimelite.models.files import CAPS as LOGIT_CAPS
from slimelite.models.files import restore_weights
from slimelite.models.small import VOCABULARY, small_config

# the largest difference of log-probs that counts as rounding [nats]: rounding gave 1.2e-3 with 48 layers, and an error
# gave 4e-2
TOLERANCE = 2e-3
# std of the noise on the weights, so that the effects of the layers are similar to those of trained layers
SPREAD = 0.1
# lengths of the test sequences [tokens]: longer than the small model's window and context, and two are equal
LENGTHS = (19, 14, 14)
# CAPS: config fields with a cap of attention scores or logits. LOW_CAP: their value in the small model
CAPS = ("attn_logit_softcapping", *LOGIT_CAPS, "gate_soft_cap")
LOW_CAP = 1.0
ELSEWHERE = "use --rollout-backend sglang"


class Rows(IntEnum):
    """Which rows may share a decoding step."""

    WHOLE = 0  # rows of one length; each step computes all their tokens, because the family has no correct cache
    ALIKE = 1  # rows of one length
    PADDED = 2  # all rows; shorter rows are padded in front


@dataclass(frozen=True)
class Ways:
    """How the models of a family are computed. ``extends``: whether one pass may compute several tokens after cached
    tokens.

    ``attention``: transformers' name of the fastest attention that gives correct results.
    """

    rows: Rows
    extends: bool
    attention: str


class NotComputed(ValueError):
    """The engine cannot compute a family, for this ``reason``."""

    def __init__(self, family: str, reason: str) -> None:
        super().__init__(f"the embedded engine cannot compute {family}: {reason}; {ELSEWHERE}")
        self.reason = reason


def check_config(config: PretrainedConfig) -> None:
    """Raise ValueError for a model that the embedded engine cannot compute; see `ways_of`."""
    if method := restore_weights(config):
        raise NotComputed(config.model_type, f"its weights are quantized by {method} and cannot be restored")
    if not_fast(config):
        ways_of(config)


def ways_of(config: PretrainedConfig) -> Ways:
    """How the generic decoder computes models with ``config``. The result is cached.

    Raises:
        NotComputed: the model is an encoder or an encoder–decoder, or its plain forward pass gives other results when
            it is repeated.
    """
    return _ways_of(pickle.dumps(config))


@lru_cache(maxsize=16)
def _ways_of(pickled: bytes) -> Ways:
    config = pickle.loads(pickled)
    if config.is_encoder_decoder:
        raise NotComputed(config.model_type, "it is an encoder–decoder")
    problem: Exception | None = None
    # kernels that are installed only for GPUs fail on a CPU
    for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        try:
            # not in the engine's inference mode, because the trial counts in-place changes of parameters
            with torch.inference_mode(False), torch.no_grad():
                return _Trial(config, device).ways()
        except NotComputed:
            raise
        except Exception as error:  # models raise errors of any type
            problem = error
    text = " ".join(str(problem).split())[:200]
    raise NotComputed(config.model_type, f"a small copy of the model fails ({text})") from problem


class _Trial:
    """A small copy of a model, some sequences, and the log-probs [tokens, vocab] of each sequence from a plain forward
    pass."""

    def __init__(self, config: PretrainedConfig, device: str) -> None:
        self._config, self._device = _with_caps(small_config(config)), device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._build("eager")
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * SPREAD)
            self._ids = [torch.randint(1, VOCABULARY, (1, length)).to(device) for length in LENGTHS]
        self._weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self._passes = Passes(model.to(device))
        self._right = [self._plain(ids) for ids in self._ids]

    def ways(self) -> Ways:
        """Find out how the models may be computed. Raises the same errors as `ways_of`."""
        if problem := self._problem():
            raise NotComputed(self._config.model_type, problem)
        attention = "sdpa" if self._holds(self._with_sdpa) else "eager"
        rows = Rows.PADDED if self._holds(self._pads) else Rows.ALIKE if self._holds(self._batches) else Rows.WHOLE
        return Ways(rows, rows > Rows.WHOLE and self._holds(self._extends), attention)

    def _build(self, attention: str) -> PreTrainedModel:
        # transformers keeps the attention in the config
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(self._config), attn_implementation=attention, dtype=torch.float32
        )
        return model.eval()

    def _plain(self, ids: Tensor) -> Tensor:
        return self._passes.whole(ids).log_softmax(-1)[0]

    def _problem(self) -> str:
        """The reason why not even plain forward passes can sample from the model; empty if they can."""
        ids = self._ids[0].clone()
        if not _alike(self._plain(ids), self._right[0]):
            return "its log-probs change from call to call"
        ids[:, -1] = 1 + ids[:, -1] % (VOCABULARY - 1)
        if not _alike(self._plain(ids)[:-1], self._right[0][:-1]):
            return "its tokens attend to later tokens"
        weights = self._passes.model.state_dict()
        if any(not torch.equal(weights[name].cpu(), tensor) for name, tensor in self._weights.items()):
            return "its forward pass changes its weights"
        return ""

    def _holds(self, way: Callable[[], bool]) -> bool:
        try:
            return way()
        except Exception:  # models raise errors of any type when they are called in an unsupported way
            return False

    def _with_sdpa(self) -> bool:
        model = self._build("sdpa")
        model.load_state_dict(self._weights)
        eager, self._passes = self._passes, Passes(model.to(self._device))
        right = all(_alike(self._plain(ids), right) for ids, right in zip(self._ids, self._right, strict=True))
        if not right:
            self._passes = eager
        return right

    def _pads(self) -> bool:
        """Whether rows of different lengths give correct results when they join and leave a batch."""
        first = 6
        caches = [self._prefilled(0, first + 5), self._prefilled(1, first)]
        right = all(right for right, _ in caches)
        cache, lengths = joined([cache for _, cache in caches]), [first + 5, first]
        for _ in range(3):
            right &= self._decode([0, 1], lengths, cache)
            cache, lengths = self._cache, [length + 1 for length in lengths]
        # the longer row leaves the batch, and its extra columns are removed
        cache, lengths = with_rows(cache, torch.tensor([1], device=self._device), lengths[1]), lengths[1:]
        right &= self._decode([1], lengths, cache)
        cache, lengths = self._cache, [lengths[0] + 1]
        alone, one = self._prefilled(2, 1)
        cache, lengths = joined([cache, one]), [*lengths, 1]
        for _ in range(4):
            right &= self._decode([1, 2], lengths, cache)
            cache, lengths = self._cache, [length + 1 for length in lengths]
        return right and alone

    def _batches(self) -> bool:
        """Whether rows of one length that were prefilled separately give correct results."""
        first = 7
        caches = [self._prefilled(1, first), self._prefilled(2, first)]
        cache, right = joined([cache for _, cache in caches]), all(right for right, _ in caches)
        twice = with_rows(cache, torch.tensor([1, 0, 1], device=self._device))
        for length in range(first, LENGTHS[1]):
            right &= self._decode([1, 2], [length] * 2, cache)
            cache = self._cache
        return right and self._decode([2, 1, 2], [first] * 3, twice)

    def _extends(self) -> bool:
        right, cache = self._prefilled(0, 6)
        for start, end in ((6, 9), (9, LENGTHS[0])):
            logits, cache = self._passes.extend(self._ids[0][:, start:end], cache, start)
            right &= _alike(logits.log_softmax(-1), self._right[0][end - 1][None])
        return right

    def _prefilled(self, index: int, count: int) -> tuple[bool, object]:
        logits, cache = self._passes.extend(self._ids[index][:, :count], None, 0)
        assert cache is not None, "no cache"
        return _alike(logits.log_softmax(-1), self._right[index][count - 1][None]), cache

    def _decode(self, numbers: list[int], lengths: list[int], cache: object) -> bool:
        """Whether one more token for each of these sequences has the right log-probs. Keeps the cache."""
        fed = torch.cat([self._ids[i][:, length : length + 1] for i, length in zip(numbers, lengths, strict=True)])
        logits, self._cache = self._passes.decode(fed, cache, torch.tensor(lengths), max(lengths))
        right = torch.stack([self._right[number][length] for number, length in zip(numbers, lengths, strict=True)])
        return _alike(logits.log_softmax(-1), right)


def _with_caps(config: PretrainedConfig) -> PretrainedConfig:
    """The same config, but with low caps of scores and logits, so that a small model reaches the caps."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name in [name for name, value in vars(part).items() if name in CAPS and value]:
            setattr(part, name, LOW_CAP)
    return config


def _alike(one: Tensor, two: Tensor) -> bool:
    return float((one - two).abs().nan_to_num(nan=torch.inf).max()) < TOLERANCE
