"""Supervised fine-tuning as a rollout function: conversations in, samples with loss masks out, no engine needed."""

from __future__ import annotations

import logging
from typing import Any

from slimelite.data.masks import conversation_tokens
from slimelite.rollout import generate
from slimelite.rollout.context import PluginArgs
from slimelite.rollout.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput
from slimelite.sample import Sample, Status

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
        tokenize_conversation(args, sample)
    untrained = sum(s.remove_sample for s in samples)
    if untrained:
        logger.warning("%d of %d conversations have no token to train on", untrained, len(samples))
    return RolloutFnTrainOutput(groups, {"rollout/untrained_samples": float(untrained)})


def tokenize_conversation(args: PluginArgs, sample: Sample) -> None:
    """Set tokens and loss mask; the response begins at the first token that is trained on.

    What is beyond ``--rollout-max-context-len`` is cut off. A sample without a token to train on is marked as removed.
    """
    messages = sample.prompt
    if isinstance(messages, str):
        raise ValueError(
            f"SFT needs messages in --input-key {args.input_key}, and no --apply-chat-template; "
            f"this is text: {messages!r:.60}"
        )
    tokenizer = args.rollout_context.tokenizer
    token_ids, mask = conversation_tokens(
        tokenizer,
        messages,
        tools=sample.metadata.get("tools"),
        template_kwargs=args.apply_chat_template_kwargs,
        loss_mask_type=args.loss_mask_type,
    )
    longest = args.rollout_max_context_len or len(token_ids)
    sample.status = Status.TRUNCATED if len(token_ids) > longest else Status.COMPLETED
    token_ids, mask = token_ids[:longest], mask[:longest]
    sample.remove_sample = 1 not in mask
    # a response has a token, even one that nobody trains on
    start = len(mask) - 1 if sample.remove_sample else mask.index(1)
    sample.tokens = token_ids
    sample.response_length = len(token_ids) - start
    sample.loss_mask = mask[start:]
    sample.response = str(tokenizer.decode(token_ids[start:]))
    sample.reward = 0.0
