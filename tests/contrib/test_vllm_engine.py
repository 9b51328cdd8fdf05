"""The contract of engines, kept by vLLM. Needs vLLM: see docs/install.md for the command."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slimelite.engines.params import SamplingParams
from slimelite.engines.protocol import GenerateRequest
from tests.engines.contract import EngineContract
from tests.engines.tiny_models import EOS
from tests.serving.chat import build, tokenizer


@pytest.mark.vllm
class TestVllm(EngineContract):
    tells_kept = False
    # vLLM's CPU attention has no heads smaller than 32
    shape: ClassVar[dict[str, int]] = {"hidden_size": 128}

    @classmethod
    def make_engine(cls, folder: Path, decode: Any, encode: Any, **limits: int) -> Any:
        from slimelite.contrib.vllm import VllmEngine

        return VllmEngine(str(folder), decode=decode, encode=encode, eos_token_ids=[EOS], **limits)


@pytest.mark.vllm
def test_grammars_are_passed_on(tmp_path: Path) -> None:
    """vLLM has one model in a process at a time, so one engine answers all."""
    from slimelite.contrib.vllm import VllmEngine, sampling_params

    words = tokenizer()
    schema = {"type": "object", "properties": {"right": {"type": "boolean"}}, "required": ["right"]}
    schema["additionalProperties"] = False
    tag = {"structures": [{"begin": "x", "schema": schema, "end": "y"}], "triggers": ["x"]}
    verdict = r'\s*\{\s*"right"\s*:\s*(true|false)\s*\}\s*'
    x = words.convert_tokens_to_ids("x")
    # parameters, their name in vLLM, what the text fits; a bias makes the random model write the tag's trigger
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"json_schema": json.dumps(schema)}, "json", verdict),
        ({"regex": "(ab|c){2}[0-9]{1,3}"}, "regex", "(ab|c){2}[0-9]{1,3}"),
        ({"ebnf": 'root ::= "a" ("b" | "c")* "d"'}, "grammar", "a[bc]*d"),
        ({"structural_tag": json.dumps(tag), "logit_bias": {str(x): 50.0}}, "structural_tag", f"x{verdict}y.*"),
    ]
    end, vocabulary = words.eos_token_id, len(words)
    requests = [GenerateRequest(str(n), (1, 2, 3), SamplingParams(300, **one)) for n, (one, _, _) in enumerate(cases)]
    for request, (one, name, _) in zip(requests, cases, strict=True):
        passed = sampling_params(request, [end], vocabulary).structured_outputs
        assert getattr(passed, name) == next(iter(one.values()))
    folder = build(tmp_path / "model", hidden_size=128)
    given: dict[str, Any] = {"decode": words.decode, "encode": words.encode, "eos_token_ids": [end]}
    engine = VllmEngine(str(folder), tokenizer_path=str(folder), **given)

    async def scenario() -> None:
        assert (await engine.info()).schemas
        for result, (_, _, fits) in zip(await engine.generate(requests), cases, strict=True):
            text = words.decode(result.output_ids).removesuffix("<|im_end|>")
            assert re.fullmatch(fits, text, re.DOTALL), text
            assert result.constrained is not None
            assert result.constrained.tolist() == [True] * result.length
        (free,) = await engine.generate([GenerateRequest("free", (1, 2, 3), SamplingParams(5))])
        assert free.constrained is None
        begun = GenerateRequest("begun", (1, 2, 3), SamplingParams(5, regex="ab"), position=1)
        with pytest.raises(ValueError, match="regex: the vllm engine cannot enforce a grammar in a reply that has"):
            await engine.generate([begun])
        await engine.close()

    asyncio.run(scenario())
