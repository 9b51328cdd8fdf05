"""The data source of a run: ours, or a plugin's class."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from slimelite.arguments import Args
from slimelite.data.source import DataSource
from slimelite.data.tokenizer import load_tokenizer
from slimelite.plugins import guarded, load_function
from slimelite.rollout.context import PluginArgs

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


FLAG = "--data-source-path"
# the methods that a run calls
CALLED = ("get_samples", "add_samples", "state_dict", "load_state_dict")


class PluginDataSource(DataSource):
    """`DataSource` for subclasses written for slime, which are built from ``args`` alone."""

    def __init__(self, args: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(args, load_tokenizer(args.tokenizer) if tokenizer is None else tokenizer)


def build_source(args: Args, plugin_args: PluginArgs, tokenizer: PreTrainedTokenizerBase) -> Any:
    """What ``--data-source-path`` names, called with (args, tokenizer) or slime's (args); else a `DataSource`.

    Raises:
        ValueError: the class lacks a method that a rollout calls.
    """
    if args.data_source_path is None:
        return DataSource(args, tokenizer)
    kind = load_function(args.data_source_path, FLAG)
    if missing := [m for m in ("get_samples", "add_samples", "__len__") if not hasattr(kind, m)]:
        raise ValueError(f"{FLAG} {args.data_source_path}: a data source needs {', '.join(missing)}")
    wants_tokenizer = len(inspect.signature(kind).parameters) > 1
    make = guarded(kind, args.data_source_path, FLAG)
    source = make(plugin_args, tokenizer) if wants_tokenizer else make(plugin_args)
    for name in CALLED:
        if hasattr(source, name):
            setattr(source, name, guarded(getattr(source, name), f"{args.data_source_path}.{name}", FLAG))
    return source
