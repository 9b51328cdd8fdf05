"""Text that the console shows besides the table of rollouts: first lines, evaluations, samples and the summary."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from slimelite.arguments import AlgorithmArgs, Args, DataArgs, RolloutArgs
from slimelite.arguments.derive import OFFLINE_ROLLOUT
from slimelite.arguments.evaluation import CHOOSE
from slimelite.arguments.parse import FILE, GROUP, plugin_paths
from slimelite.arguments.rollout import EPISODE, PROGRAM
from slimelite.samples.sample import label_text
from slimelite.samples.table import SampleTable
from slimelite.tracking.metrics_file import Record, eval_metrics, series

logger = logging.getLogger("slimelite.console")

SHOWN_SAMPLES = 4
PROMPT_CHARS = 160
RESPONSE_CHARS = 360


def run_facts(args: Args) -> dict[str, str]:
    """Name -> value of the first lines, in order; ``args`` must be complete (see `complete_args`)."""
    facts = {
        "model": args.hf_checkpoint or "new, random weights",
        "data": ", ".join(args.prompt_data) or str(args.job.saved or args.data_source_path or "none"),
        "eval": ", ".join(f"{d.name} ({d.path})" for d in args.eval_datasets),
        "method": method(args),
        "plugins": ", ".join(_plugins(args)),
        "device": _device(args),
        "batch": batch_identity(args),
        "rollouts": f"{args.num_rollout}"
        + (f", numbered 0 to {args.num_rollout - 1}" if args.num_rollout else "")
        + (f", going on at {args.start_rollout_id}" if args.start_rollout_id else ""),
    }
    of_rollouts = ("data", "method", "batch", "rollouts") if args.num_rollout == 0 else ()
    return {name: value for name, value in facts.items() if value and name not in of_rollouts}


def progress(done: int | None, num_rollout: int | None) -> str:
    """How far a run came, whose rollouts below ``done`` are done: ``after rollout 6 of 0 to 39``."""
    if done is None:
        return f"before the end of its {'evaluation' if num_rollout == 0 else 'first rollout'}"
    return f"after rollout {done - 1}" + (f" of 0 to {num_rollout - 1}" if num_rollout else "")


def when(rollout_id: float) -> str:
    """The moment of an evaluation in words."""
    return "before training" if rollout_id < 0 else f"after rollout {rollout_id:.0f}"


def batch_identity(args: DataArgs) -> str:
    """The batch as text, such as ``32 prompts x 8 samples = 256 = 2 steps of 100 + 1 of 56``."""
    total = args.rollout_batch_size * args.n_samples_per_prompt
    full, rest = divmod(total, args.global_batch_size)
    steps = [f"{full} step{'s' if full > 1 else ''} of {args.global_batch_size}"] if full else []
    steps += [f"1 of {rest}" if full else f"1 step of {rest}"] if rest else []
    samples = f"{args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples = {total}"
    counted = f"{total} pairs" if args.job.loss == "paired" else samples
    return f"{counted} = {' + '.join(steps)}"


def _device(args: RolloutArgs) -> str:
    ranks = args.training_ranks
    parts: list[str] = [args.device]
    if args.job.trains:
        parts.append(f"{ranks} training rank{'s' if ranks > 1 else ''}")
    if args.job.engines:
        engines = args.num_engines
        parts.append(f"{engines} {args.rollout_backend} engine{'s' if engines > 1 else ''}")
    parts.append("in one process" if args.job.local else "Ray")
    return ", ".join(parts)


def _plugins(args: Args) -> Iterator[str]:
    """The code that flags name, ours too where the user chose it; not the rollout that a supervised loss implies."""
    yield from (f"{FILE} {path}" for path in args.import_file)
    yield from (f"{GROUP} {path}" for path in args.args_group)
    implied = (OFFLINE_ROLLOUT, CHOOSE, EPISODE, PROGRAM)
    yield from (f"{flag} {path}" for flag, path in plugin_paths(args) if path not in implied)


def method(args: Args) -> str:
    """Estimator or loss, optimizer and KL as text, such as ``grpo, adam lr 1e-06, KL loss 0.001 (low_var_kl)``."""
    name = args.advantage_estimator if args.job.sampled else args.loss_type.removesuffix("_loss")
    critic = f", critic lr {args.critic_lr:g}" if args.use_critic else ""
    return f"{name}, {args.optimizer} lr {args.lr:g}{critic}{_kl(args)}"


def _kl(args: AlgorithmArgs) -> str:
    if not args.job.sampled:
        return ""
    if args.use_kl_loss and args.kl_loss_coef:
        return f", KL loss {args.kl_loss_coef:g} ({args.kl_loss_type})"
    return f", KL reward {args.kl_coef:g}" if args.kl_coef else ""


def eval_text(metrics: Mapping[str, float]) -> str:
    """Scores as text, such as ``gsm8k 0.412 ±0.014 (length 120, truncated 2%, pass@4 0.710 ±0.012), svamp 0.300``."""
    parts = []
    for name in eval_metrics([metrics]):
        details = []
        if (length := metrics.get(f"{name}/response_len/mean")) is not None:
            details.append(f"length {length:.0f}")
        if truncated := metrics.get(f"{name}-truncated_ratio"):
            details.append(f"truncated {truncated:.0%}")
        if at_k := [int(k) for key in metrics if (k := key.removeprefix(f"{name}-pass@")).isdigit()]:
            most = f"{name}-pass@{max(at_k)}"
            details.append(f"pass@{max(at_k)} {_score(metrics[most], metrics.get(f'{most}-stderr'))}")
        score = f"{name.removeprefix('eval/')} {_score(metrics[name], metrics.get(f'{name}-stderr'))}"
        parts.append(score + (f" ({', '.join(details)})" if details else ""))
    return ", ".join(parts)


def summary(records: Sequence[Record]) -> dict[str, str]:
    """Eval dataset (without any: "reward") -> its first, best and last score of all ``records``, ± standard error."""
    lines = {}
    for name in eval_metrics(records) or ["rollout/raw_reward"]:
        steps, values = series(records, name)
        errors = dict(zip(*series(records, f"{name}-stderr"), strict=True))
        shown = [_score(value, errors.get(step)) for step, value in zip(steps, values, strict=True)]
        if values:
            best = max(range(len(values)), key=values.__getitem__)
            at = when(steps[best]) if name.startswith("eval/") else f"in rollout {steps[best]:.0f}"
            title = name.replace("rollout/raw_reward", "reward")
            lines[title] = f"first {shown[0]}, best {shown[best]} {at}, last {shown[-1]}"
    return lines


def _score(value: float, error: float | None) -> str:
    """``0.412 ±0.014``, with the standard error behind the ± if there is one."""
    return f"{value:.3f}" + ("" if error is None else f" ±{error:.3f}")


def spread(rewards: np.ndarray, count: int) -> list[int]:
    """``count`` row indices from the highest reward to the lowest, evenly spaced by rank. ``rewards``: [rows]."""
    order = np.argsort(-rewards, kind="stable")
    picks = np.linspace(0, len(order) - 1, min(count, len(order)))
    return [int(order[round(p)]) for p in picks]


def samples_table(title: str, table: SampleTable) -> Table:
    """A table of some rows: reward and components, label, end of the prompt, response. Also logs the rows."""
    shown = Table(title="\n" + title, box=box.SIMPLE, title_justify="left", title_style="bold", show_edge=False)
    shown.add_column("reward", justify="right", no_wrap=True)
    shown.add_column("label", max_width=20)
    shown.add_column("prompt", ratio=2, style="dim")
    shown.add_column("response", ratio=3)
    components = table.numeric_components()
    for row in spread(table.reward, SHOWN_SAMPLES):
        prompt, response = tail(one_line(table.prompt[row])), middle_out(one_line(table.response[row]))
        label = one_line(label_text(table.label[row]))
        parts = "".join(f"\n{one_line(name)[:16]} {value:.3g}" for name, value in list(components[row].items())[:8])
        shown.add_row(Text(f"{table.reward[row]:.3g}{parts}"), Text(label[:60]), Text(prompt), Text(response))
        named = f"{table.reward[row]:.4g}" + "".join(f", {one_line(n)} {v:.4g}" for n, v in components[row].items())
        logger.info("%s: reward %s, label %s\n  %s\n  -> %s", title, named, label, prompt, response)
    return shown


def one_line(text: str) -> str:
    """``text`` with line breaks as ↵ and other control characters, such as terminal escapes, as Python escapes."""
    return "".join(c if c.isprintable() else "↵" if c == "\n" else repr(c)[1:-1] for c in text.strip())


def tail(text: str) -> str:
    """The end of a prompt, where the question usually is."""
    return text if len(text) <= PROMPT_CHARS else "…" + text[-PROMPT_CHARS:]


def middle_out(text: str) -> str:
    """A response without its middle, if it is long."""
    half = RESPONSE_CHARS // 2
    return text if len(text) <= RESPONSE_CHARS else f"{text[:half]} … {text[-half:]}"
