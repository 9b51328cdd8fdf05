"""Evaluation datasets from ``--eval-config`` or ``--eval-prompt-data``."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from slimelite.arguments.args import Args
from slimelite.arguments.evaluation import EvalDataset
from slimelite.arguments.flags import group_flags
from slimelite.arguments.sources import load_yaml
from slimelite.arguments.vocabulary import SIMILAR, Settings, known_tables, read_yaml


def resolve_eval_datasets(args: Args, settings: Settings) -> tuple[EvalDataset, ...]:
    """Every evaluation dataset with all its settings; what is wrong becomes problems of ``settings``."""
    if args.eval_config:
        defaults, entries = _read_eval_config(args.eval_config, settings)
    else:
        defaults, entries = {}, _read_prompt_data(args.eval_prompt_data, settings)
    base = _flag_values(args)
    datasets = [_dataset(base, defaults, entry, settings) for entry in entries]
    found = [d for d in datasets if d is not None]
    names = [d.name for d in found]
    for name in sorted({n for n in names if names.count(n) > 1}):
        settings.complain("--eval-config" if args.eval_config else "--eval-prompt-data", f"names two datasets {name!r}")
    return tuple(found)


def _flag_values(args: Args) -> dict[str, Any]:
    """What ``--eval-*`` and, below them, ``--rollout-*`` say for every dataset."""

    def first(value: Any, fallback: Any) -> Any:
        return fallback if value is None else value

    return {
        "input_key": first(args.eval_input_key, args.input_key),
        "label_key": first(args.eval_label_key, args.label_key),
        "tool_key": first(args.eval_tool_key, args.tool_key),
        "metadata_key": args.metadata_key,
        "apply_chat_template": args.apply_chat_template,
        "apply_chat_template_kwargs": args.apply_chat_template_kwargs,
        "rm_type": args.rm_type,
        "custom_rm_path": args.custom_rm_path,
        "custom_generate_function_path": args.custom_generate_function_path,
        "n_samples_per_eval_prompt": args.n_samples_per_eval_prompt,
        "temperature": first(args.eval_temperature, args.rollout_temperature),
        "top_p": first(args.eval_top_p, args.rollout_top_p),
        "top_k": first(args.eval_top_k, args.rollout_top_k),
        "max_response_len": first(args.eval_max_response_len, args.rollout_max_response_len),
        "max_prompt_len": args.eval_max_prompt_len,
        "max_context_len": first(args.eval_max_context_len, args.rollout_max_context_len),
        "min_new_tokens": first(args.eval_min_new_tokens, 0),
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
    }


def _read_prompt_data(words: list[str], settings: Settings) -> list[dict[str, Any]]:
    if len(words) == 1:  # slime calls it "aime" whatever it is
        return [{"name": Path(words[0].partition("@[")[0]).stem, "path": words[0]}]
    if len(words) % 2:
        settings.complain(
            "--eval-prompt-data", f"takes pairs of a name and a path, not {len(words)} words: {' '.join(words)}"
        )
        return []
    return [{"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)]


def _read_eval_config(path: str, settings: Settings) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(defaults, datasets) of an eval config: with or without the root key ``eval``, datasets as a list or by name."""
    content = load_yaml(path, "--eval-config", settings)
    if content is None:
        return {}, []
    root = content.get("eval", content) if isinstance(content, dict) else None
    if not isinstance(root, dict) or not isinstance(root.get("datasets"), list | dict):
        settings.complain("--eval-config", f"{path}: needs datasets: a list, or a mapping by name")
        return {}, []
    if unknown := sorted(set(root) - {"defaults", "datasets"}):
        settings.complain("--eval-config", f"{path}: unknown keys {', '.join(unknown)}; it takes defaults and datasets")
    entries = root["datasets"]
    if isinstance(entries, dict):
        entries = [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in entries.items()]
    if not all(isinstance(entry, dict) for entry in entries):
        settings.complain("--eval-config", f"{path}: every dataset is a mapping with a name and a path")
        return {}, []
    defaults = _read_entry(root.get("defaults") or {}, f"{path}: defaults", settings)
    return defaults, [_read_entry(entry, f"{path}: dataset {entry.get('name')}", settings) for entry in entries]


def _read_entry(entry: Any, where: str, settings: Settings) -> dict[str, Any]:
    flags = {f.name: f for f in group_flags(EvalDataset)}
    values: dict[str, Any] = {}
    if not isinstance(entry, dict):
        settings.complain("--eval-config", f"{where}: is not a mapping of settings")
        return {}
    for key, value in entry.items():
        name = str(key).replace("-", "_")
        if why := known_tables()["eval_config"].get(name):
            settings.complain("--eval-config", f"{where}: {key} is not supported: {why}")
        elif name not in flags:
            near = difflib.get_close_matches(name, flags, n=1, cutoff=SIMILAR)
            hint = f"; did you mean {near[0]}?" if near else f"; it takes {', '.join(flags)}"
            settings.complain("--eval-config", f"{where}: {key} is not a known key{hint}")
        elif value is not None:
            try:
                values[name] = read_yaml(flags[name], value)
            except (ValueError, RecursionError) as error:
                settings.complain("--eval-config", f"{where}: {key} {error}")
    return values


def _dataset(
    base: dict[str, Any], defaults: dict[str, Any], entry: dict[str, Any], settings: Settings
) -> EvalDataset | None:
    values = {**base, **defaults, **entry}
    own = {**defaults, **entry}
    if "rm_type" in own and "custom_rm_path" not in own:
        values["custom_rm_path"] = None  # a dataset's own rule is nearer than the run's --custom-rm-path
    dataset = EvalDataset(**values)
    if not dataset.name or not dataset.path:
        settings.complain("--eval-config", f"a dataset needs a name and a path, not {entry}")
        return None
    return dataset
