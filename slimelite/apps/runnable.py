"""Finds the model for the argument MODEL|RUN|CHECKPOINT of a command. An adapter or a checkpoint is merged with its
base model."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import Any, NamedTuple

from slimelite.arguments.training import ADAPTER_CONFIG
from slimelite.base.files import write_text
from slimelite.models.checkpoints import (
    BASE,
    HUB_ID,
    MARKER,
    STATE_FILE,
    DamagedCheckpoint,
    find_checkpoint,
    may_be_hub_id,
    read_config,
    read_json,
    read_state,
    whats_wrong,
)

# the file in the folder of a merged model that describes its sources; see `merged`
MADE_OF = "merged_from.json"


class Source(NamedTuple):
    """The model that a command runs. Without ``base``, ``path`` is the model, a Hugging Face folder or hub id. With
    ``base``, ``path`` is an adapter or a checkpoint of ``--save``, and changes the weights of the model ``base``.
    """

    path: str
    base: str | None = None


def resolve_models(paths: Sequence[str], base: str | None) -> list[Source]:
    """The source of each of ``paths``; see `resolve_model`.

    Raises:
        ValueError: there is no model; or ``base`` is given, but no path is an adapter or a checkpoint.
    """
    sources = [resolve_model(path, base) for path in paths]
    if base is not None and all(source.base is None for source in sources):
        raise ValueError(f"--base {base} is for adapters and checkpoints, but {sources[0].path} is a whole model")
    return sources


def resolve_model(path: str, base: str | None = None) -> Source:
    """The model that ``path`` leads to. ``path`` may be a model, an adapter, a checkpoint of ``--save``, a folder of
    checkpoints, or a run folder. A folder of checkpoints leads to its newest checkpoint. A run folder leads to the
    newest model or adapter of ``--save-hf``, or to the newest checkpoint if there is none.

    ``base``: the model from which an adapter or a checkpoint was trained. ``base`` replaces the base model that the
    adapter or the checkpoint names.

    Raises:
        ValueError: ``path`` leads to no model. The error message explains how to get a model.
    """
    folder = Path(path)
    if not folder.exists() and HUB_ID.fullmatch(path):
        try:  # if the hub does not answer, each request for a file takes half a minute
            read_config(path)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return Source(path)
    if not folder.is_dir():
        raise ValueError(f"{path}: no such folder; a model is a Hugging Face folder, a hub id or a run folder")
    if (folder / MARKER).is_file() or (folder / STATE_FILE).is_file():
        return _resolve_checkpoint(folder, base)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        named = base or read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if not named:
            raise ValueError(f"{path} is an adapter that does not name its base model: name the model with --base")
        return _changes(path, str(named))
    config = read_json(folder / "config.json")
    return _resolve_run(path, config, base) if "hf_checkpoint" in config else Source(path)


def _resolve_checkpoint(folder: Path, base: str | None) -> Source:
    directory = folder
    if (folder / MARKER).is_file():
        try:
            directory = find_checkpoint(folder)[0] or folder
        except DamagedCheckpoint as error:
            other = error.whole or "the folder of a whole checkpoint"
            raise ValueError(f"{error.wrong}: name {other} in place of {folder}") from error
    elif wrong := whats_wrong(folder):
        raise ValueError(f"{wrong}: name the folder of another checkpoint")
    named = base or read_state(directory).get(BASE)
    if named is None:
        raise ValueError(f"{directory} does not name its base model: name the model with --base")
    return _changes(str(directory), str(named))


def _changes(path: str, base: str) -> Source:
    if not Path(base).is_dir() and not may_be_hub_id(base):
        raise ValueError(f"{path} belongs to the base model {base}, which does not exist: name the base with --base")
    return Source(path, base)


def _resolve_run(path: str, config: dict[str, Any], base: str | None) -> Source:
    base, template, save = base or config["hf_checkpoint"], config.get("save_hf"), config.get("save")
    if template is not None:
        parts = re.split(r"\{rollout_id[^{}]*\}", template)
        places = map(Path, glob("*".join(map(escape, parts))))
        written = [place / name for place in places for name in ("config.json", ADAPTER_CONFIG)]
        if models := [file for file in written if file.is_file()]:
            return resolve_model(str(max(models, key=lambda file: file.stat().st_mtime).parent), base)
    if save is not None and (Path(save) / MARKER).is_file():
        return _resolve_checkpoint(Path(save), base)
    if template is None:
        raise ValueError(
            f"{path} is a run that wrote no model, because it had no --save-hf and no checkpoint; it started from "
            f"{base}"
        )
    raise ValueError(
        f"{path}: its --save-hf {template} contains no model yet (relative paths start from the current folder)"
    )


@contextmanager
def runnable(source: Source, dtype: str) -> Iterator[str]:
    """The Hugging Face folder or hub id of a source. The folder exists until the block ends; see `merged`."""
    if source.base is None:
        yield source.path
        return
    with tempfile.TemporaryDirectory(prefix="slimelite-merged-") as folder:
        yield merged(source, Path(folder), dtype)


def merged(source: Source, folder: Path, dtype: str) -> str:
    """Merge an adapter or a checkpoint with its base into ``folder``, unless the merged model is already there.

    ``dtype``: the type of the written weights, "float32" or "bfloat16". Returns the folder.

    Raises:
        ValueError: the base is not a model, the adapter or checkpoint does not belong to the base, or ``folder``
            contains the model of another source.
    """
    assert source.base is not None
    files = [file for place in (source.path, source.base) if Path(place).is_dir() for file in Path(place).iterdir()]
    times = {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files) if file.is_file()}
    made_of = {**source._asdict(), "dtype": dtype, "files": times}
    there = read_json(folder / MADE_OF) if (folder / MADE_OF).is_file() else {}
    if there.get("path", source.path) != source.path:
        raise ValueError(
            f"the model in {folder} was made from {there['path']}, not from {source.path}: "
            "name another folder with --output"
        )
    if there != made_of:
        from slimelite.apps.merging import write_merged

        print(f"merging {source.path} into {source.base}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_merged(Path(source.path), source.base, folder, dtype)
        write_text(folder / MADE_OF, json.dumps(made_of))
    return str(folder)
