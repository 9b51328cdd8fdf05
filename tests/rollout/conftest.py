"""A tiny model, its prompts, and managers that close themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from scripts.lib.arithmetic import all_questions, prompt_row, write_model_folder
from slimelite.arguments import Args
from slimelite.data.tokenizer import load_tokenizer
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.protocol import Engine
from slimelite.rollout.manager import RolloutManager

PLUGINS = Path(__file__).parent / "plugins"

MakeArgs = Callable[..., Args]
MakeManager = Callable[..., RolloutManager]


def plugin(name: str) -> str:
    """Path of a function in ``plugins/``: ``rewards.py:parity``."""
    return str(PLUGINS / name)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(model_folder))


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt_row(q)) + "\n" for q in all_questions()[1234:9999:150]))
    return str(path)


def start_engine(model_folder: Path, tokenizer: PreTrainedTokenizerBase, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(
        str(model_folder),
        max_running_requests=32,
        **options,
        decode=lambda ids: str(tokenizer.decode(ids)),
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
    )


@pytest.fixture(scope="session")
def engine(model_folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[EmbeddedEngine]:
    engine = start_engine(model_folder, tokenizer)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def repeatable_engine(model_folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[EmbeddedEngine]:
    """An engine as --deterministic-mode builds it."""
    engine = start_engine(model_folder, tokenizer, repeatable=True)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def http_engine(model_folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[EmbeddedEngine]:
    """An engine of this test's own: its HTTP front lives on the event loop of the manager that asked for it."""
    engine = start_engine(model_folder, tokenizer)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def make_args(model_folder: Path, prompt_file: str) -> MakeArgs:
    """Arguments of a small rollout: 3 prompts, 4 samples each, a reward that varies within a group."""

    def make(**given: Any) -> Args:
        defaults: dict[str, Any] = {
            "hf_checkpoint": str(model_folder),
            "tokenizer": str(model_folder),
            "prompt_data": [prompt_file],
            "input_key": "messages",
            "label_key": "label",
            "apply_chat_template": True,
            "custom_rm_path": plugin("rewards.py:parity"),
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 12,
            "rollout_num_gpus": 1,
            "rollout_backend": "embedded",
        }
        values = defaults | given
        values.setdefault("over_sampling_batch_size", values["rollout_batch_size"])
        return Args(**values)

    return make


@pytest.fixture
def make_manager(tokenizer: PreTrainedTokenizerBase, engine: EmbeddedEngine) -> Iterator[MakeManager]:
    """Managers on the embedded engine, or on the given ones."""
    managers: list[RolloutManager] = []

    def make(args: Args, engines: Sequence[Engine] | None = None, **extra: Any) -> RolloutManager:
        managers.append(RolloutManager(args, [engine] if engines is None else engines, tokenizer, **extra))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()
