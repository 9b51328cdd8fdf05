"""From a sample to an engine's request, and from its result back into the sample."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slimelite.arguments import EvalDataset, RewardArgs, RolloutArgs
from slimelite.engines.protocol import GenerateResult, SamplingParams
from slimelite.sample import FINISH_STATUS, UNSTAMPED, Sample, Status

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

FINISHED = (Status.COMPLETED, Status.TRUNCATED, Status.FAILED)


def rollout_params(args: RolloutArgs) -> SamplingParams:
    """How training samples are drawn."""
    return SamplingParams(
        max_new_tokens=args.rollout_max_response_len,
        temperature=args.rollout_temperature,
        top_p=args.rollout_top_p,
        top_k=args.rollout_top_k,
        stop=tuple(args.rollout_stop),
        stop_token_ids=tuple(args.rollout_stop_token_ids),
        skip_special_tokens=args.rollout_skip_special_tokens,
    )


def eval_params(dataset: EvalDataset) -> SamplingParams:
    """How the responses to an evaluation dataset are drawn."""
    return SamplingParams(
        max_new_tokens=dataset.max_response_len,
        temperature=dataset.temperature,
        top_p=dataset.top_p,
        top_k=dataset.top_k,
        min_new_tokens=dataset.min_new_tokens,
        stop=tuple(dataset.stop),
        stop_token_ids=tuple(dataset.stop_token_ids),
        skip_special_tokens=dataset.skip_special_tokens,
    )


def slime_params(params: SamplingParams, seed: int | None) -> dict[str, Any]:
    """The dict that custom generate functions get, in SGLang's words."""
    values: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": params.min_new_tokens,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "skip_special_tokens": params.skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    return values if seed is None else {**values, "sampling_seed": seed}


def sample_seed(seed: int, stream: str, index: int) -> int:
    """A 31-bit seed of one sample's random stream; unrelated for every (seed, stream, index)."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def remaining_params(sample: Sample, params: SamplingParams, max_context_len: int) -> SamplingParams:
    """``params`` with what is left for this response [tokens], which is 0 or less when nothing is."""
    left = min(params.max_new_tokens - sample.response_length, max_context_len - len(sample.tokens))
    fewest = max(0, params.min_new_tokens - sample.response_length)
    return replace(params, max_new_tokens=left, min_new_tokens=min(fewest, max(left, 0)))


def add_result(sample: Sample, result: GenerateResult, tokenizer: PreTrainedTokenizerBase, skip_special: bool) -> None:
    """Append an engine's tokens; the text is decoded from all response tokens, for a token may be half a character."""
    sample.append_response_tokens(result.output_ids, result.log_probs, weight_versions=result.weight_versions)
    response = sample.tokens[sample.prompt_length :]
    sample.response = str(tokenizer.decode(response, skip_special_tokens=skip_special))
    sample.status = FINISH_STATUS[result.finish_reason]


def mask_off_policy(sample: Sample, version: int) -> None:
    """Take the tokens of older weights than ``version`` out of the loss."""
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    sample.loss_mask = [m if v == version else 0 for m, v in zip(mask, sample.weight_versions, strict=True)]


def stamp_versions(sample: Sample, version: int, before: Sample | None = None) -> None:
    """Give the tokens without a weight version that of the engine, ``version``.

    A generate function may have kept none, or one a call as slime's do; ``before``: the sample that it went on with,
    whose tokens keep theirs.
    """
    stamps = sample.weight_versions
    if len(stamps) != sample.response_length:
        goes_on = before is not None and sample.tokens[: len(before.tokens)] == before.tokens
        known = before.weight_versions if before is not None and goes_on else []
        stamps = [*known, *[UNSTAMPED] * (sample.response_length - len(known))]
    sample.weight_versions = [version if v == UNSTAMPED else int(v) for v in stamps]


def staleness(samples: Sequence[Sample], version: int) -> int:
    """How many weight updates the oldest token of ``samples`` is behind ``version``."""
    return max((version - oldest for s in samples for oldest in s.trained_versions), default=0)


def is_finished(samples: Sequence[Sample]) -> bool:
    """Whether every sample of a group has its whole response."""
    return all(s.status in FINISHED for s in samples)


def without_dropped(samples: Sequence[Sample], args: RewardArgs) -> list[Sample]:
    """The samples less those whose reward failed, under ``--reward-error drop``."""
    return [s for s in samples if args.reward_error != "drop" or "reward_error" not in s.metadata]


def check_scored(samples: Sequence[Sample], what: str) -> None:
    """Whatever --reward-error says, a mean over failed rewards alone says nothing, and trains nothing.

    Raises:
        ValueError: the reward of every sample failed.
    """
    errors = [s.metadata["reward_error"] for s in samples if "reward_error" in s.metadata]
    if len(errors) == len(samples):
        raise ValueError(f"{what}: the reward of every sample failed ({len(errors)}), the last one with {errors[-1]}")


def restart(sample: Sample) -> Sample:
    """The sample as it was before its first response token."""
    return replace(
        sample,
        tokens=sample.tokens[: sample.prompt_length],
        response="",
        response_length=0,
        reward=None,
        loss_mask=None,
        rollout_log_probs=None,
        weight_versions=[],
        teacher_log_probs=None,
        remove_sample=False,
        status=Status.PENDING,
        metadata={k: v for k, v in sample.metadata.items() if k != "reward_error"},
    )
