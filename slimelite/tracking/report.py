"""Sentences about a run: its evaluations, its end, and what looks wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slimelite.tracking.metrics_file import Record, eval_metrics, series

MISMATCH = "train/train_rollout_logprob_abs_diff"
MISMATCH_LIMIT = 0.02
MISMATCH_WARNING = (
    "trainer and engine disagree about the same tokens: mean |log-prob difference| {:.3f}, above {:g}.\n"
    "  The gradient then belongs to another policy than the one that wrote the samples; training can collapse.\n"
    "  Usual causes: weights that did not reach the engine; tokens of older weights (partial rollouts, kept surplus);\n"
    "  lower precision or quantised weights or cache in the engine; top-p, top-k or penalties in sampling; a custom\n"
    "  generate function that tokenises text again instead of keeping the engine's tokens; experts routed otherwise.\n"
    "  --correction tis corrects small differences; --check-weight-update-equal tells whether the weights arrived."
)

SKIPPED_WARNING = (
    "rollout {}: {:.0%} of its optimizer steps changed nothing, for their loss or gradient was not finite ({}); "
    "--nonfinite-grad fail stops at the first"
)


def eval_text(metrics: Mapping[str, float]) -> str:
    """``gsm8k 0.412 (length 120, truncated 2%, pass@4 0.710), svamp 0.300``."""
    parts = []
    for name in eval_metrics([metrics]):
        details = []
        if (length := metrics.get(f"{name}/response_len/mean")) is not None:
            details.append(f"length {length:.0f}")
        if truncated := metrics.get(f"{name}-truncated_ratio"):
            details.append(f"truncated {truncated:.0%}")
        if at_k := [key for key in metrics if key.startswith(f"{name}-pass@")]:
            most = max(at_k, key=lambda key: int(key.rpartition("@")[2]))
            details.append(f"{most.rpartition('-')[2]} {metrics[most]:.3f}")
        score = f"{name.removeprefix('eval/')} {metrics[name]:.3f}"
        parts.append(score + (f" ({', '.join(details)})" if details else ""))
    return ", ".join(parts)


def summary(records: Sequence[Record]) -> dict[str, str]:
    """Eval dataset (the reward, where there is none) -> its first, best and last score in the whole run folder."""
    lines = {}
    for name in eval_metrics(records) or ["rollout/raw_reward"]:
        steps, values = series(records, name)
        if values:
            best = max(range(len(values)), key=values.__getitem__)
            trained = steps[best] + (not name.startswith("eval/"))
            title = name.replace("rollout/raw_reward", "reward")
            lines[title] = (
                f"first {values[0]:.3f}, best {values[best]:.3f} at {trained:.0f} rollouts, last {values[-1]:.3f}"
            )
    return lines
