"""The contract of engines, kept by vLLM. Needs vLLM: see docs/install.md for the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.engines.contract import EngineContract
from tests.engines.tiny_models import EOS


@pytest.mark.vllm
class TestVllm(EngineContract):
    tells_kept = False
    # vLLM's CPU attention has no heads smaller than 32
    shape: ClassVar[dict[str, int]] = {"hidden_size": 128}

    @classmethod
    def make_engine(cls, folder: Path, decode: Any, encode: Any, **limits: int) -> Any:
        from slimelite.contrib.vllm import VllmEngine

        return VllmEngine(str(folder), decode=decode, encode=encode, eos_token_ids=[EOS], **limits)
