"""Preference pairs as a rollout function: rows in, two samples each, no engine needed."""

from __future__ import annotations

import logging
from typing import Any

from slimelite.data.preferences import pair_samples
from slimelite.rollout import generate
from slimelite.rollout.context import PluginArgs
from slimelite.rollout.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput

logger = logging.getLogger(__name__)


def generate_rollout(
    args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """``--rollout-batch-size`` pairs; evaluation is that of RL.

    Raises:
        ValueError: the chat template does not fit a conversation, or the data source gives no pairs.
    """
    if evaluation:
        return generate.generate_rollout(args, rollout_id, data_source, evaluation=True)
    pairs = [
        pair_samples(
            sample,
            args.rollout_context.tokenizer,
            loss_mask_type=args.loss_mask_type,
            template_kwargs=args.apply_chat_template_kwargs,
            max_context_len=args.rollout_max_context_len,
        )
        for group in data_source.get_samples(args.rollout_batch_size)
        for sample in group
    ]
    untrained = sum(chosen.remove_sample for chosen, _ in pairs)
    if untrained:
        logger.warning("%d of %d pairs have a reply without a token to train on", untrained, len(pairs))
    return RolloutFnTrainOutput(pairs, {"rollout/untrained_pairs": float(untrained)})
