"""Custom generate functions that need no HTTP."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

from slimelite.engines.protocol import GenerateRequest, SamplingParams
from slimelite.samples.sample import FINISH_STATUS, Sample, Status


async def twins(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two samples of one rollout; the second has another prompt."""
    first, second = Sample.from_dict(sample.to_dict()), Sample.from_dict(sample.to_dict())
    second.tokens = [*second.tokens, 11]
    for made, length in ((first, 2), (second, 3)):
        made.append_response_tokens([40 + (sample.index or 0)] * length, [-0.5] * length, text="x")
        made.status = Status.COMPLETED
    return [first, second]


async def sees_params(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    sample.append_response_tokens([50], [-1.0], text="5")
    sample.metadata |= {"params": sampling_params, "evaluation": evaluation, "session": sample.session_id}
    return sample


async def uses_a_tool(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Says nothing of weights: two tokens of its own, two of a tool, one of its own."""
    made = Sample.from_dict(sample.to_dict()) if (sample.index or 0) % 2 else sample
    made.append_response_tokens([50, 51], [-1.0, -1.0], text="5")
    made.append_response_tokens([60, 61], trainable=False, text="6")
    made.append_response_tokens([52], [-1.0], text="7")
    return made


async def tool_speaks_first(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The tool's tokens are stamped with weights that are long gone."""
    sample.append_response_tokens([60, 61], trainable=False, text="6", weight_version=0)
    sample.append_response_tokens([52], [-1.0], text="7")
    return sample


async def answers_with_meta_info(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Sample:
    """What the engine answered knows which weights wrote which token; odd samples get SGLang's one version a call."""
    meta: dict[str, Any] = {"finish_reason": {"type": "stop"}, "weight_version": "3"}
    if sample.index % 2 == 0:
        meta["weight_versions"] = [{"version": "2", "start": 0}, {"version": "3", "start": 1}]
    if sample.index == 3:
        meta["weight_version"] = "default"
    sample.append_response_tokens(args, tokens=[50, 51], log_probs=[-1.0, -1.0], meta_info=meta, text="5")
    return sample


async def spoils_then_fails(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Odd samples leave a mess behind on the first attempt."""
    attempts = args.rollout_context.__class__.__name__  # plugins can reach the context
    assert attempts == "RolloutContext"
    if (sample.index or 0) % 2 and sample.index not in SPOILED:
        SPOILED.add(sample.index)
        sample.metadata["mess"] = True
        sample.append_response_tokens([99], [-9.0])
        await asyncio.sleep(0)
        raise KeyError("tool broke")
    sample.append_response_tokens([50], [-1.0], text="5")
    return sample


SPOILED: set[int | None] = set()


async def returns_nonsense(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> str:
    return "text"


async def asks_the_engine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One request of its own; what an abort cuts off comes back as it is."""
    params = SamplingParams(max_new_tokens=sampling_params["max_new_tokens"])
    request = GenerateRequest(
        f"train-{sample.index}-0", tuple(sample.tokens), params, f"train-{sample.group_index}", sample.response_length
    )
    (result,) = await args.rollout_context.engines.engines[0].generate([request])
    sample.append_response_tokens(result.output_ids, result.log_probs, weight_versions=result.weight_versions)
    sample.status = FINISH_STATUS[result.finish_reason]
    return sample


async def fails_in_group_5(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.group_index == 5:
        raise KeyError("tool broke")
    sample.append_response_tokens([50], [-1.0], text="5")
    return sample


async def hangs(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await asyncio.Event().wait()
    return sample


async def hangs_in_group_1(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.group_index == 1:
        await asyncio.Event().wait()
    sample.append_response_tokens([50], [-1.0], text="5")
    return sample


HUNG: set[str] = set()


async def hangs_once(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.index == 5 and "once" not in HUNG:
        HUNG.add("once")
        await asyncio.Event().wait()
    sample.append_response_tokens([50], [-1.0], text="5")
    return sample


async def hangs_once_and_ignores_cancelling(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.index == 5 and "ignores" not in HUNG:
        HUNG.add("ignores")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(3)
    sample.append_response_tokens([50], [-1.0], text="5")
    return sample


async def notes_its_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Later samples are faster; notes in which order samples began and ended, and fails once."""
    begin, index = next(TURNS), sample.index or 0
    await asyncio.sleep(0.002 if index < 6 else 0)
    if index == 1 and not FAILED:
        FAILED.append(index)
        raise RuntimeError("once")
    sample.append_response_tokens([50], [-1.0], text="5")
    sample.metadata["turn"] = [begin, next(TURNS)]
    return sample


async def notes_its_hook(args: Any, sample: Sample) -> None:
    sample.metadata["turn"].append(next(TURNS))


TURNS = count()
FAILED: list[int] = []
