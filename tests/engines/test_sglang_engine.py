"""The contract of engines, kept by a real SGLang server, and what only it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimelite.engines.sglang.client import SglangEngine
from slimelite.engines.sglang.weights import weight_shapes
from tests.engines.contract import EngineContract

pytestmark = pytest.mark.sglang


class TestSglang(EngineContract):
    bans_are_in_the_log_probs = True

    @classmethod
    def make_engine(cls, folder: Path, decode: Any, encode: Any, **limits: int) -> SglangEngine:
        weight_shapes(str(folder))  # the imports, which the first weight update would wait for
        return SglangEngine("http://127.0.0.1:32000", model_path=str(folder), decode=decode)
