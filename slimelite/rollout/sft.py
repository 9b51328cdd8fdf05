"""Supervised fine-tuning as a rollout function: conversations in, samples with loss masks out, no engine needed."""

from __future__ import annotations

import logging
from typing import Any

from slimelite.data.sft import fill_conversation
from slimelite.rollout import generate
from slimelite.rollout.context import PluginArgs
from slimelite.rollout.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput

logger = logging.getLogger(__name__)


def generate_rollout(
    args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """``--rollout-batch-size`` conversations; evaluation is that of RL.

    Raises:
        ValueError: a prompt is not a list of messages, or the chat template does not fit it.
    """
    if evaluation:
        return generate.generate_rollout(args, rollout_id, data_source, evaluation=True)
    groups = data_source.get_samples(args.rollout_batch_size)
    samples = [s for group in groups for s in group]
    for sample in samples:
        fill_conversation(
            sample,
            args.rollout_context.tokenizer,
            loss_mask_type=args.loss_mask_type,
            template_kwargs=args.apply_chat_template_kwargs,
            max_context_len=args.rollout_max_context_len,
        )
    untrained = sum(s.remove_sample for s in samples)
    if untrained:
        logger.warning("%d of %d conversations have no token to train on", untrained, len(samples))
    return RolloutFnTrainOutput(groups, {"rollout/untrained_samples": float(untrained)})
