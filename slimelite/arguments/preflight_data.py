"""The part of the pre-flight check that reads rows: prompts, pairs, conversations, their lengths, one reward."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slimelite.arguments.args import Args
from slimelite.arguments.dry_run import Findings, one_line
from slimelite.arguments.model import text_config

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from slimelite.arguments.rollout import EvalDataset
    from slimelite.data.prompts import Prompt

# rows of each file that a real start looks at; its data source reads the rest
ROWS_AT_START = 64


def check_data(
    args: Args, tokenizer: PreTrainedTokenizerBase | None, config: dict[str, Any], broken: set[str], findings: Findings
) -> None:
    """Prompts and rewards of training and of every evaluation dataset; without a tokenizer, all but their lengths.

    ``broken``: plugins and rules that are not tried again.
    """
    from slimelite.data.prompts import load_pairs, load_prompts

    sources: list[tuple[str, Args | EvalDataset, list[str], int | None]] = []
    if args.rollout_global_dataset and args.prompt_data and not args.load_debug_rollout_data:
        sources.append(("--prompt-data", args, args.prompt_data, args.rollout_max_prompt_len))
    if args.eval_interval is not None and not args.debug_train_only:
        sources += [(f"eval dataset {d.name}", d, [d.path], d.max_prompt_len) for d in args.eval_datasets]
    for name, columns, paths, limit in sources:
        rows = paths if args.dry_run else [path if "@[" in path else f"{path}@[:{ROWS_AT_START}]" for path in paths]
        kept: dict[str, Any] = {"max_prompt_len": limit, "skip_bad_rows": args.skip_bad_rows, "whole": rows == paths}
        kept["warn"] = lambda text, name=name: findings.warnings.append(f"{name}: {text}")
        pairs = columns is args and args.loss_type == "dpo_loss"
        try:
            prompts = (
                load_pairs(args, tokenizer, rows, **kept) if pairs else load_prompts(columns, tokenizer, rows, **kept)
            )
        except (OSError, ValueError) as error:
            findings.problems.append(f"{name}: {one_line(error)}")
            continue
        if tokenizer and _generates(args, columns) and any(prompt.messages and not prompt.text for prompt in prompts):
            findings.problems.append(
                f"{name}: column {columns.input_key!r} holds messages: add --apply-chat-template, which makes text of "
                "them, or name a column of text with --input-key"
            )
            continue
        if _generates(args, columns) and any(p.messages and p.messages[-1]["role"] == "assistant" for p in prompts):
            findings.warnings.append(
                f"{name}: conversations in column {columns.input_key!r} end with an answer of the assistant, which the "
                "model sees before it writes its own: leave it out of the prompts"
            )
        longest = max(len(prompt.token_ids) for prompt in prompts)
        measured = f", the longest of {longest} tokens" if longest else ""
        findings.facts.append(f"{name}: {len(prompts)} {'pairs' if pairs else 'prompts'}{measured}")
        if pairs and tokenizer is not None:
            _check_pair(args, tokenizer, name, prompts[0], findings)
        if pairs:
            continue
        if args.loss_type == "sft_loss" and columns is args:
            if tokenizer is not None and str(args.rollout_function_path).startswith(("slime.", "miles.", "slimelite.")):
                _check_conversations(args, tokenizer, name, prompts[:ROWS_AT_START], findings)
        else:
            dataset = None if isinstance(columns, Args) else columns
            _check_lengths(args, dataset, name, longest, config, findings)
            rewarded = args if dataset is None else dataset
            if not broken & {rewarded.custom_rm_path, rewarded.rm_type}:
                _check_reward(args, dataset, name, prompts[0], findings)


def _generates(args: Args, columns: Args | EvalDataset) -> bool:
    """Whether our own loop sends the prompts to an engine, so that they must be text."""
    if columns is args:
        own = args.rollout_function_path or args.custom_generate_function_path
    else:
        own = args.eval_function_path or columns.custom_generate_function_path
    return not own and not (columns is args and args.debug_train_only)


def _check_pair(args: Args, tokenizer: PreTrainedTokenizerBase, name: str, prompt: Prompt, findings: Findings) -> None:
    """Make the two samples of one pair."""
    from slimelite.data.conversations import pair_samples
    from slimelite.sample import Sample

    sample = Sample(group_index=0, index=0, prompt=prompt.text, tokens=list(prompt.token_ids), metadata=prompt.metadata)
    settings: dict[str, Any] = {
        "loss_mask_type": args.loss_mask_type,
        "template_kwargs": args.apply_chat_template_kwargs,
    }
    try:
        pair = pair_samples(sample, tokenizer, max_context_len=args.rollout_max_context_len, **settings)
    except ValueError as error:
        findings.problems.append(f"{name}: {one_line(error)}")
        return
    shown = (f"{side.label} {side.response!r:.60} ({side.effective_response_length} tokens)" for side in pair)
    findings.facts.append(f"{name}: the first pair: {', '.join(shown)}")


def _check_conversations(
    args: Args, tokenizer: PreTrainedTokenizerBase, name: str, prompts: list[Prompt], findings: Findings
) -> None:
    """Make the samples of some conversations."""
    from slimelite.data.conversations import fill_conversation
    from slimelite.sample import Sample

    samples = [Sample(group_index=i, index=i, prompt=p.text or p.messages or "") for i, p in enumerate(prompts)]
    settings: dict[str, Any] = {"loss_mask_type": args.loss_mask_type}
    settings |= {"template_kwargs": args.apply_chat_template_kwargs, "max_context_len": args.rollout_max_context_len}
    try:
        for sample, prompt in zip(samples, prompts, strict=True):
            sample.metadata = prompt.sample_metadata(keep_messages=False)
            fill_conversation(sample, tokenizer, **settings)
    except ValueError as error:
        findings.problems.append(f"{name}: {one_line(error)}")
        return
    empty = sum(sample.remove_sample for sample in samples)
    message = f"{name}: {empty} of the first {len(samples)} conversations have no token of an assistant to train on"
    if empty == len(samples):
        findings.problems.append(f"{message}; --input-key names the column of whole conversations")
    elif empty:
        findings.warnings.append(message)


def _check_lengths(
    args: Args, dataset: EvalDataset | None, name: str, longest: int, config: dict[str, Any], findings: Findings
) -> None:
    """Whether prompt and response fit the context and the micro-batch."""
    response = args.rollout_max_response_len if dataset is None else dataset.max_response_len
    context = args.rollout_max_context_len if dataset is None else dataset.max_context_len
    response = response or 0
    whole = longest + response if context is None else min(longest + response, context)
    limit = text_config(config).get("max_position_embeddings")
    if limit is not None and longest >= limit:
        findings.problems.append(f"{name}: a prompt of {longest} tokens fills the model's context of {limit}")
    elif limit is not None and whole > limit:
        findings.warnings.append(
            f"{name}: {longest} prompt and {response} response tokens exceed the model's context of {limit}"
        )
    if dataset is None and args.max_tokens_per_gpu is not None and whole > args.max_tokens_per_gpu:
        findings.warnings.append(
            f"{name}: a sample may have {whole} tokens, more than --max-tokens-per-gpu {args.max_tokens_per_gpu}; "
            "such a one is trained in a pass of its own"
        )


def _check_reward(args: Args, dataset: EvalDataset | None, name: str, prompt: Prompt, findings: Findings) -> None:
    """Score one real row, with the right answer where the rule knows what that looks like."""
    from slimelite.rewards import check_reward
    from slimelite.sample import Sample

    settings, group_size = args, args.n_samples_per_prompt
    if dataset is not None:
        rule, path, group_size = dataset.rm_type, dataset.custom_rm_path, dataset.n_samples_per_eval_prompt
        settings = replace(args, rm_type=rule, custom_rm_path=path, reward_key=args.eval_reward_key)
    own_rollout = args.rollout_function_path if dataset is None else args.eval_function_path
    scored = settings.custom_rm_path or settings.rm_type or prompt.metadata.get("rm_type")
    if own_rollout or args.debug_train_only or (args.custom_generate_function_path and not scored):
        return  # that code brings rewards of its own
    text = prompt.text or prompt.messages or ""
    sample = Sample(group_index=0, index=0, prompt=text, tokens=list(prompt.token_ids), label=prompt.label)
    sample.metadata = prompt.sample_metadata(keep_messages=settings.reward_model_path is not None)
    sample.status = Sample.Status.COMPLETED
    log = logging.getLogger("slimelite.rewards")
    if settings.custom_rm_path is None:  # the author of a plugin wants the lines as well
        log.setLevel(logging.CRITICAL)
    try:
        reward, response = check_reward(settings, sample, group_size)
    except ValueError as error:
        findings.problems.append(f"{name}: {one_line(error)}")
    else:
        findings.facts.append(
            f"{name}: {response} as the response to the first prompt gets {reward} (label {prompt.label!r:.60})"
        )
    finally:
        log.setLevel(logging.NOTSET)
