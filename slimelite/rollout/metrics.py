"""Metrics of a rollout and of an evaluation, under slime's names."""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from slimelite.arguments import TrackingArgs
from slimelite.environments.registry import FACTS
from slimelite.rollout.filters import rollout_rewards
from slimelite.samples.sample import CONSTRAINED_TOKENS, Generated, Sample, Status
from slimelite.samples.table import SampleTable

# a response counts as repetitive if its last REPETITION_TAIL characters compress by more than this ratio
REPETITION_TAIL = 10_000
REPETITION_RATIO = 10


# metrics of episodes that are totals; all other metrics are means
TOTALS = ("timeouts", "errors", "context_full")


def rollout_metrics(
    args: TrackingArgs,
    groups: Sequence[Sequence[Sample]],
    reward_key: str | None,
    version: int | None,
    table: SampleTable,
) -> dict[str, float]:
    """The metrics ``rollout/*`` and ``passrate/*`` of a training batch.

    ``version``: the trainer's weight version when it trains on this batch, or None if the run has no engines.
    ``table``: the samples of ``groups`` as a table.
    """
    samples = [s for group in groups for s in group]
    metrics = prefixed("rollout/", sample_metrics(samples))
    if not args.job.sampled:
        return metrics
    metrics |= prefixed("rollout/", _conversations(samples, table))
    if any(CONSTRAINED_TOKENS in s.metadata for s in samples):
        constrained = sum(s.metadata.get(CONSTRAINED_TOKENS, 0) for s in samples)
        metrics["rollout/constrained_token_ratio"] = constrained / sum(s.response_length for s in samples)
    metrics |= prefixed("rollout/environment/", episode_metrics(samples, reward_key))
    raw = [s.metadata.get("raw_reward", s.reward_value(reward_key)) for s in samples]
    metrics["rollout/raw_reward"] = mean_of_rollouts(raw, table.rollout_id)
    rewards = [rollout_rewards(group, reward_key) for group in groups]
    equal = Counter(str(round(r[0], 1)) for r in rewards if min(r) == max(r))
    metrics |= {f"rollout/zero_std/count_{reward}": float(number) for reward, number in equal.items()}
    if version is not None:
        metrics |= _staleness(table, version)
    if table.kept_counts is not None and (counts := table.kept_counts[table.loss_mask]).any():
        metrics["rollout/top_p_kept_vocab_per_token"] = float(counts[counts > 0].mean())
    if args.log_reward_category:
        categories = Counter(str(s.reward[args.log_reward_category]) for s in samples if isinstance(s.reward, dict))
        metrics |= {f"rollout/error_cat/{c}": number / len(samples) for c, number in categories.items()}
    if args.log_multi_turn:
        metrics |= _multi_turn(samples)
    if args.log_passrate:
        metrics |= prefixed("passrate/", pass_at_k(rewards))
    return metrics


def eval_metrics(
    name: str,
    results: Mapping[str, Any],
    reward_key: str | None,
    table: SampleTable | None,
    more_k: Sequence[int] = (),
) -> dict[str, float]:
    """Metrics of the eval dataset ``name``. Among them are the mean reward ``eval/{name}``, the lengths
    ``eval/{name}/response_len/…``, the pass rates ``eval/{name}-pass@k``, and the standard errors
    ``eval/{name}-stderr`` and ``eval/{name}-pass@k-stderr``.

    ``results``: a dict with ``rewards``, and with ``truncated`` and ``samples`` if the evaluation function returned
    them. ``table``: the samples as a table, or None without samples. ``more_k``: see `pass_at_k`. If ``results`` has no
    samples, the prompt of each reward is unknown, so standard errors and pass@k are left out.
    """
    samples: list[Sample] | None = results.get("samples")
    if not samples or table is None:
        metrics = {f"eval/{name}": statistics.fmean(results["rewards"])}
        if "truncated" in results:
            metrics[f"eval/{name}-truncated_ratio"] = statistics.fmean(results["truncated"])
        return metrics
    prompts: dict[int | None, list[Sample]] = {}
    for sample in samples:
        prompts.setdefault(sample.group_index, []).append(sample)
    rewards = [rollout_rewards(of_prompt, reward_key) for of_prompt in prompts.values()]
    lengths = sample_metrics(samples)
    truncated = lengths.pop("truncated_ratio")
    return {
        **prefixed(f"eval/{name}", mean_and_error(rewards)),
        **prefixed(f"eval/{name}/", lengths),
        f"eval/{name}-truncated_ratio": truncated,
        **prefixed(f"eval/{name}-", centred(samples, rewards)),
        **prefixed(f"eval/{name}-", pass_at_k(rewards, more_k)),
        **prefixed(f"eval/{name}/", component_means(table)),
        **prefixed(f"eval/{name}/environment/", episode_metrics(samples, reward_key)),
    }


def table_metrics(table: SampleTable) -> dict[str, float]:
    """Means over a batch: those that slime's trainer also logs, such as ``rollout/rewards``, and those of the reward
    components."""
    if not len(table):
        return {}
    return {
        "rollout/rewards": float(table.advantage.mean()),
        "rollout/response_lengths": float(table.response_lengths.mean()),
        "rollout/total_lengths": float(table.total_lengths.mean()),
        "rollout/truncated": float(np.mean([status == Status.TRUNCATED for status in table.status])),
        **prefixed("rollout/", component_means(table)),
    }


def component_means(table: SampleTable) -> dict[str, float]:
    """The metrics ``reward/{component}``, for rewards that are dicts. For each key with a numeric value, the metric is
    the mean over the rollouts whose reward has this key."""
    values: dict[str, list[float]] = {}
    rollouts: dict[str, list[int]] = {}
    for row, rollout in zip(table.numeric_components(), table.rollout_id.tolist(), strict=False):
        for name, value in row.items():
            values.setdefault(name, []).append(value)
            rollouts.setdefault(name, []).append(rollout)
    return {f"reward/{name}": mean_of_rollouts(numbers, rollouts[name]) for name, numbers in values.items()}


def mean_of_rollouts(values: Sequence[float], rollout_ids: Iterable[int | None]) -> float:
    """The mean of the samples' ``values``. A rollout with several samples (branches) has the same weight in the mean as
    a rollout with one sample."""
    rollouts: dict[int | None, list[float]] = {}
    for value, rollout in zip(values, rollout_ids, strict=True):
        rollouts.setdefault(rollout, []).append(value)
    return statistics.fmean(map(statistics.fmean, rollouts.values()))


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """The lengths of responses, the share of truncated responses and the share of repetitive responses. A length is the
    number of response tokens in the loss.

    The lengths leave out responses that failed before their first token, unless all responses failed in this way.
    """
    begun = [s for s in samples if s.response_length or s.status != Status.FAILED] or samples
    return {
        **prefixed("response_len/", summary([s.effective_response_length for s in begun])),
        "truncated_ratio": sum(s.status == Status.TRUNCATED for s in samples) / len(samples),
        "repetition_frac": sum(is_repetitive(s.response) for s in samples) / len(samples),
    }


def _conversations(samples: Sequence[Sample], table: SampleTable) -> dict[str, float]:
    """Metrics of samples from sessions: turns, branches and unreadable tool calls (see `Session.samples`)."""
    turns = [s.metadata["turns"] for s in samples if "turns" in s.metadata]
    if not turns:
        return {}
    episodes = len(np.unique(table.rollout_id))
    return {
        "turns_per_episode": sum(turns) / episodes,
        "branches_per_episode": len(samples) / episodes,
        "malformed_tool_calls": float(sum(s.metadata.get("malformed_tool_calls", 0) for s in samples)),
    }


def episode_metrics(samples: Sequence[Sample], reward_key: str | None) -> dict[str, float]:
    """Metrics of ``--environment``: the totals of the counters in ``TOTALS``, the means of other numbers over the
    episodes, and the mean reward of each role."""
    by_episode = {(s.group_index, s.index): facts for s in samples if (facts := s.metadata.get(FACTS))}
    trained = {(s.group_index, s.index) for s in samples if not s.remove_sample and _has_trained_token(s)}
    episodes = by_episode.values()
    if not episodes:
        return {}
    totals: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for facts in episodes:
        own = facts["metrics"]
        seen.update(own.keys())
        totals.update({name: value for name, value in facts.items() if isinstance(value, int | float)} | own)
    counts: dict[str, float] = {name: totals[name] for name in TOTALS}
    means = {name: total / (seen[name] or len(episodes)) for name, total in totals.items() if name not in counts}
    roles: dict[str, list[Sample]] = {}
    for sample in samples:
        if "role" in sample.metadata and FACTS in sample.metadata:
            roles.setdefault(sample.metadata["role"], []).append(sample)
    rewards = {
        f"reward/{name}": mean_of_rollouts([s.reward_value(reward_key) for s in played], [s.index for s in played])
        for name, played in roles.items()
    }
    number = {"episodes": len(episodes), "untrained": len(by_episode.keys() - trained)}
    return {**counts, **number, **means, **rewards}


def _has_trained_token(sample: Sample) -> bool:
    mask = vars(sample).get("loss_mask")
    return sample.response_length > 0 and (mask is None or bool(np.any(np.asarray(mask))))


def perf_metrics(gpus: int, generated: Sequence[Generated], seconds: float) -> dict[str, float]:
    """The metrics ``perf/*``: among others, the generated tokens per second and GPU, and the tokens per second of the
    longest response. ``gpus``: the number of the engines' GPUs; on a CPU, the number of engines. For external engines
    ``gpus`` is 0, and tokens per second are not divided by it.

    ``generated``: one entry for each response of this rollout. ``seconds``: the time that the rollout took. If no token
    was generated, the metrics in tokens per second are left out. Metrics with ``effective`` in their names count only
    the tokens in the loss.
    """
    metrics = {"rollout_time": seconds, "generated_tokens": float(sum(g.tokens for g in generated))}
    waits = [g.waited for g in generated]
    if any(waits):
        metrics |= prefixed("non_generation_time/", summary(waits))
    if not metrics["generated_tokens"]:
        return prefixed("perf/", metrics)
    for key, lengths in {"": [g.tokens for g in generated], "effective_": [g.effective for g in generated]}.items():
        metrics[f"{key}tokens_per_gpu_per_sec"] = sum(lengths) / seconds / (gpus or 1)
        metrics[f"longest_{key}sample_tokens_per_sec"] = max(lengths) / seconds
        if any(waits):
            of_longest = [w for w, length in zip(waits, lengths, strict=True) if length == max(lengths)]
            metrics[f"longest_{key}sample_non_generation_time"] = statistics.fmean(of_longest)
    return prefixed("perf/", metrics)


def pass_at_k(rewards: Sequence[Sequence[float]], more_k: Sequence[int] = ()) -> dict[str, float]:
    """The metrics ``pass@k`` and ``pass@k-stderr``, computed from ``rewards``, the rewards of each prompt's responses.
    A response with a reward of exactly 1 is a success.

    k is 1, 2, 4 … if a prompt has more than one response. The values in ``more_k`` are added. For c successes in n
    responses, the unbiased estimate is 1 − C(n − c, k) / C(n, k) (Chen et al., arXiv:2107.03374). The estimates are
    averaged over the prompts with at least k responses. If no prompt has at least k responses, pass@k is left out.
    """
    most = max((len(r) for r in rewards), default=0)
    powers = [2**i for i in range(most.bit_length())] if most > 1 else []
    metrics: dict[str, float] = {}
    for k in sorted({*powers, *more_k}):
        tried = [(len(r), sum(value == 1 for value in r)) for r in rewards if len(r) >= k]
        if tried:
            chances = [[1 - math.comb(n - c, k) / math.comb(n, k)] for n, c in tried]
            metrics |= prefixed(f"pass@{k}", mean_and_error(chances))
    return metrics


def mean_and_error(values: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean of all ``values`` (key ``""``) and its standard error (key ``-stderr``). Each inner sequence of
    ``values`` contains the values of one prompt.

    The standard error is clustered by prompt (docs/algorithms.md has the formula), because responses to one prompt are
    similar. If there is only one prompt, the standard error is left out.
    """
    everything = [value for of_prompt in values for value in of_prompt]
    mean = statistics.fmean(everything)
    if len(values) < 2:
        return {"": mean}
    squares = math.fsum(math.fsum(value - mean for value in of_prompt) ** 2 for of_prompt in values)
    return {"": mean, "-stderr": math.sqrt(squares * len(values) / (len(values) - 1)) / len(everything)}


def centred(samples: Sequence[Sample], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """The metrics ``centred`` and ``centred-stderr`` of multiple-choice tasks. If a sample has no choices, the result
    is empty. The centred accuracy is (a − c) / (1 − c), where a is the accuracy, and c is the accuracy of random
    guessing: the mean of 1 / (number of choices) over the samples (CORE, arXiv:2406.11794). So the centred accuracy of
    random guessing is 0, and that of a perfect model is 1.
    """
    counts = [len(sample.metadata.get("choices") or ()) for sample in samples]
    if not counts or min(counts) < 2:
        return {}
    chance = statistics.fmean(1 / count for count in counts)
    accuracy = mean_and_error(rewards)
    scaled = {f"centred{name}": value / (1 - chance) for name, value in accuracy.items()}
    return scaled | {"centred": (accuracy[""] - chance) / (1 - chance)}


def is_repetitive(text: str) -> bool:
    """Whether the last part of a long text compresses so well that this part must be repetitive."""
    if len(text) <= REPETITION_TAIL:
        return False
    tail = text[-REPETITION_TAIL:].encode()
    return len(tail) > REPETITION_RATIO * len(zlib.compress(tail, 9))


def summary(values: Sequence[float]) -> dict[str, float]:
    """The mean, median, maximum and minimum of ``values``."""
    return {
        "mean": statistics.fmean(values),
        "median": float(statistics.median(values)),
        "max": float(max(values)),
        "min": float(min(values)),
    }


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with ``prefix`` added in front of their names."""
    return {prefix + name: value for name, value in metrics.items()}


def _staleness(table: SampleTable, version: int) -> dict[str, float]:
    """Staleness of the response tokens in the loss. This function allocates no array with one entry per token, because
    a rollout may have a billion tokens."""
    versions, mask = table.weight_versions, table.loss_mask
    if not (tokens := int(np.count_nonzero(mask))):
        return {}
    total, oldest = versions.sum(where=mask, dtype=np.int64), versions.min(where=mask, initial=np.iinfo(np.int32).max)
    return {
        "rollout/weight_staleness/max": float(version - int(oldest)),
        "rollout/weight_staleness/mean": (version * tokens - int(total)) / tokens,
    }


def _multi_turn(samples: Sequence[Sample]) -> dict[str, float]:
    """Turns and environment tokens for each sample. A turn is a sequence of consecutive tokens from the model."""
    turns = []
    for sample in samples:
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
        turns.append(sum(m and not before for m, before in zip(mask, [0, *mask], strict=False)))
    own = [s.effective_response_length for s in samples]
    return {
        **prefixed("multi_turn/turns/", summary(turns)),
        "multi_turn/environment_tokens": statistics.fmean(
            s.response_length - n for s, n in zip(samples, own, strict=True)
        ),
    }
