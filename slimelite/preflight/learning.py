"""Finds runs that would start, but would not learn. This module shows the prompts as the model sees them, and tries a
user's estimator and loss on made-up rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slimelite.algorithms.estimators import ESTIMATORS, Estimator
from slimelite.algorithms.groups import group_advantages
from slimelite.base.registry import function
from slimelite.preflight.findings import one_line

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from slimelite.arguments import AlgorithmArgs, Args
    from slimelite.samples.sample import Sample
    from slimelite.training.batch import MicroBatch

# a larger advantage on made-up rows is a warning; GRPO's are at most the square root of the group size
LARGE = 100.0
# a dry run prints this many tokens at each end of the first prompt, and this many characters
EDGE, CHARACTERS = 4, 600
# a larger share of unknown tokens is a warning
UNKNOWN = 0.05


def first_prompt(prompt: Sample, tokenizer: PreTrainedTokenizerBase, what: str = "prompt") -> str:
    """The first prompt as the model sees it, with its first and last tokens, where errors of templates are visible."""
    seen = _as_seen(str(prompt.prompt), prompt.tokens[: prompt.prompt_length], tokenizer)
    return f"the first {what} as the model sees it: {seen}"


def conversations_as_seen(samples: list[Sample], tokenizer: PreTrainedTokenizerBase) -> str:
    """The first conversation to train on, shown like `first_prompt`, and the lengths of all conversations."""
    seen = _as_seen(tokenizer.decode(samples[0].tokens), samples[0].tokens, tokenizer)
    trained, lengths = sum(samples[0].loss_mask or ()), [len(sample.tokens) for sample in samples]
    return (
        f"the first conversation as the model sees it: {seen}; {trained} of these tokens are trained on; the first "
        f"{len(samples)} conversations have {min(lengths)} to {max(lengths)} tokens"
    )


def unknown_tokens(samples: list[Sample], tokenizer: PreTrainedTokenizerBase, what: str) -> str | None:
    """A warning if the tokenizer has no tokens for a large part of the texts. ``what``: such as "2 prompts"."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return None  # GPT-2's <|endoftext|> is all of them, and every text has it
    counted = Counter(token for sample in samples for token in sample.tokens)
    share = counted[unknown] / max(1, counted.total())
    if share <= UNKNOWN:
        return None
    return (
        f"{share:.0%} of the tokens of the first {what} are {tokenizer.unk_token}: the tokenizer does not know these "
        "texts, so the model cannot read them or learn them; use another --tokenizer, or train a tokenizer on "
        "your texts with scripts/train_tokenizer.py"
    )


def _as_seen(text: str, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    if len(text) > CHARACTERS:
        text = f"{text[: CHARACTERS // 2]} [... {len(text) - CHARACTERS} characters ...] {text[-CHARACTERS // 2 :]}"
    shown = [repr(tokenizer.decode([token])) for token in tokens]
    ends = " ".join(shown) if len(shown) <= 2 * EDGE else f"{' '.join(shown[:EDGE])} ... {' '.join(shown[-EDGE:])}"
    return f"{text!r}; its {len(shown)} tokens: {ends}"


def without_template(prompt: Sample, tokenizer: PreTrainedTokenizerBase, remedy: str) -> str | None:
    """A warning if a chat model would see text without its chat template. ``remedy``: how to apply the template."""
    marks = [mark for mark in tokenizer.all_special_tokens if mark in str(prompt.prompt)]
    if not tokenizer.chat_template or marks:
        return None
    return (
        f"the prompts are text, and the model's chat template is not used: {remedy} if this is a chat model. For "
        "a base model, ignore this warning"
    )


def try_estimator(args: Args) -> tuple[str, str | None] | None:
    """Call the functions and the loss of a user's estimator on made-up groups. Two groups have four responses each; in
    one of the two, all rewards are equal. Two more groups have eight responses each, with rewards of 0 and 1.

    Returns:
        A line for the dry run's report, and a warning if the advantages look wrong in one of three ways: (1) an
        advantage is large; (2) a higher reward gets a lower advantage; (3) if seven rewards are 0 and one is 1, all
        seven advantages are 0. None if the whole estimator is part of slimelite.

    Raises:
        ValueError: a function fails, or does not return one finite number for each response or token.
    """
    record = ESTIMATORS[args.advantage_estimator]
    if not any(_is_own(each) for each in (record.group, record.token, record.loss)):
        return None
    of_rows, _ = _tried(record, args, [0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0], 4)
    spread = ", ".join(f"{value:.3g}" for value in of_rows[:4])
    # one right answer among wrong ones, and the reverse: a median, or a deviation from it, ignores that answer
    binary = [0.0] * 7 + [1.0] + [1.0] * 7 + [0.0]
    _, of_tokens = _tried(record, args, binary, 8)
    name, of_binary = f"--advantage-estimator {record.name}", of_tokens.reshape(16, 3).mean(1)
    fact = (
        f"{name}: rewards 0, 1, 0.5, 1 of one prompt give {spread}; seven rewards of 0 and one of 1 give "
        f"{of_binary[0]:.3g} and {of_binary[7]:.3g}; equal rewards are fine"
    )
    (largest, token) = of_tokens.abs().max(0)
    group = int(token) // (3 * 8)
    if largest > LARGE:
        return fact, (
            f"{name}: rewards {', '.join(f'{r:g}' for r in binary[8 * group :][:8])} of one prompt give an advantage "
            f"of {of_tokens[token].item():.3g}: one such response outweighs all others. Maybe the divisor vanishes "
            "when most rewards are equal: use another divisor, or clamp the advantages"
        )
    if of_binary[7] < of_binary[0]:
        return fact, f"{name}: the higher reward gets the lower advantage. Is the sign right?"
    if not of_binary[:7].any():
        return fact, (
            f"{name}: if seven rewards are 0 and one is 1, the advantage of all seven is 0, so training ignores the "
            "wrong answers of a hard prompt. A median has this effect on rewards of 0 and 1; a mean does not"
        )
    return fact, None


def _tried(record: Estimator, args: Args, made_up: list[float], size: int) -> tuple[np.ndarray, Any]:
    """The advantages, [N] of responses and [3 N] of tokens, for groups of ``size`` responses of three tokens."""
    import torch

    from slimelite.algorithms.advantages import RolloutTokens, token_advantages

    rewards, index = np.array(made_up), np.arange(len(made_up))
    try:
        of_rows, _ = group_advantages(rewards, index // size, index, record.name)
        advantages = torch.from_numpy(of_rows).float()
        rows = torch.from_numpy(index)
        segments = rows.repeat_interleave(3)
        tokens = RolloutTokens(
            advantages,
            torch.zeros(len(segments)),
            torch.ones(len(segments), dtype=torch.bool),
            segments,
            values=torch.zeros(len(segments)) if record.needs_critic else None,
            groups=rows // size,
            rollouts=rows,
            kl_coef=args.kl_coef,
            gamma=args.gamma,
            lambd=args.lambd,
        )
        of_tokens, _ = token_advantages(record.name, tokens)
        losses = _losses(record, args, of_tokens)
    except Exception as error:  # a user's code may raise anything
        raise ValueError(
            f"--advantage-estimator {record.name} fails on groups of {size} made-up responses with rewards "
            f"{rewards.tolist()}: {type(error).__name__}: {error}"
        ) from error
    for name, values in (("advantages", of_tokens), ("losses", losses)):
        if not bool(values.isfinite().all()):
            raise ValueError(
                f"--advantage-estimator {record.name}: {name} are not finite for rewards {rewards.tolist()}, with "
                f"{size} responses to each prompt: divide by a number that is never 0"
            )
    return of_rows, of_tokens


def try_loss(args: Args) -> str | None:
    """Call a user's loss on eight made-up responses of three tokens, each with a masked token.

    Returns:
        A line for the dry run's report. Returns None if the loss is part of slimelite, or if it is a loss of pairs.

    Raises:
        ValueError: the loss fails, has a wrong shape or no gradient, or is not finite.
    """
    own = args.custom_loss_function_path if args.loss_type == "custom_loss" else args.loss.function
    if args.job.loss == "paired" or not (args.loss_type == "custom_loss" or _is_own(own)):
        return None
    import torch

    from slimelite.training.loss import micro_batch_loss

    name = f"--custom-loss-function-path {own}" if args.loss_type == "custom_loss" else f"--loss-type {args.loss_type}"
    batch = _made_up_batch(args)
    new = (batch.old + torch.linspace(-0.3, 0.3, len(batch.old))).requires_grad_()
    entropy = torch.ones_like(new, requires_grad=True)
    try:
        total = micro_batch_loss(args, batch, new, entropy).total
        total.backward()
    except Exception as error:  # of a user's code: anything
        raise ValueError(
            f"{name}, tried on eight made-up responses: {one_line(error).removeprefix(f'{name} ')}; ignore this "
            "warning if the loss only lacks data that your real rows have, such as metadata"
        ) from error
    gradients = torch.stack([torch.zeros_like(each) if each.grad is None else each.grad for each in (new, entropy)])
    if not bool(total.isfinite()) or not bool(gradients.isfinite().all()):
        raise ValueError(f"{name}: the loss or its gradient is not finite for eight made-up responses")
    if not bool(gradients.any()):
        raise ValueError(f"{name}: the gradient is 0 for eight made-up responses, so nothing will be learned")
    return f"{name}: eight made-up responses give a loss of {total.item():.3g}, with a finite gradient"


def _made_up_batch(args: Args) -> MicroBatch:
    """Two groups of four responses with rewards from 0 to 1, advantages, and log-probs of -1."""
    import torch

    from slimelite.samples.sample import Sample, Status
    from slimelite.samples.table import SampleTable
    from slimelite.training.batch import MicroBatch
    from slimelite.training.columns import TokenColumns

    rewards, groups = (0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0), [list[Sample](), list[Sample]()]
    for index, reward in enumerate(rewards):
        group = index // 4
        sample = Sample(group_index=group, index=index, prompt="?", label="1", tokens=[1, 2], reward=reward)
        sample.append_response_tokens([1, 2, 3], log_probs=[-1.0, -1.0, -1.0])
        sample.response, sample.loss_mask, sample.status = "made up", [1, 1, 0], Status.COMPLETED
        groups[group].append(sample)
    table = SampleTable.from_samples(groups)
    table.advantage = np.array([reward - 0.625 for reward in rewards[:4]] + [0.0] * 4)
    columns = TokenColumns.from_table(table)
    columns.set_weights(args)
    columns.advantages = torch.tensor(table.advantage, dtype=torch.float32)[columns.segments]
    for passed in ("old", "entropy", "ref", "teacher", "values"):
        setattr(columns, passed, torch.full((len(columns.mask),), 1.0 if passed == "entropy" else -1.0))
    return MicroBatch(columns, np.arange(len(table))).fetch()


def _losses(record: Estimator, args: AlgorithmArgs, advantages: Any) -> Any:
    """The estimator's loss of each token [T], for a policy that has changed a little."""
    import torch

    old = torch.full_like(advantages, -1.0)
    new = (old + torch.linspace(-0.3, 0.3, len(old))).requires_grad_()
    call = function(record.loss, ESTIMATORS.option, record.name)
    clip = {"eps_clip": args.eps_clip, "eps_clip_high": args.eps_clip_high, "eps_clip_c": args.eps_clip_c}
    losses, _ = call(new, new - old, advantages, **clip)
    losses.sum().backward()
    return losses.detach()


def _is_own(what: object) -> bool:
    module = what.partition(":")[0] if isinstance(what, str) else getattr(what, "__module__", "")
    return what is not None and not str(module).startswith("slimelite.")
