"""The embedded engine's speed with a JSON schema, as a share of its speed without one. Both run in turn in one process.

    python scripts/benchmarks/grammar_speed.py data/SmolLM2-135M-Instruct

The schema is a list of 200 people with a name, an age and three tags, so no response ends before its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

from slimelite.base.version import add_version
from slimelite.data.tokenizer import load_tokenizer
from slimelite.engines.embedded.engine import EmbeddedEngine
from slimelite.engines.params import SamplingParams
from slimelite.engines.protocol import GenerateRequest

TAGS = {"type": "array", "items": {"enum": ["red", "green", "blue", "large", "small"]}, "minItems": 3, "maxItems": 3}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0}, "tags": TAGS},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = json.dumps({"type": "array", "items": PERSON, "minItems": 200})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96, help="of each response")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    engine = EmbeddedEngine(args.model, tokenizer=tokenizer, max_context_len=1024)
    messages = [{"role": "user", "content": "List two hundred people as JSON, with name, age and tags."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tuple(tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def seconds(schema: str | None, turn: int) -> tuple[float, float]:
        """(wall seconds, processor seconds). Other work on the machine affects processor seconds less."""
        params = SamplingParams(args.tokens, temperature=0.7, ignore_eos=True, json_schema=schema)
        requests = [GenerateRequest(f"{turn} {n}", ids, params) for n in range(args.batch)]
        begin, used = time.perf_counter(), time.process_time()
        results = asyncio.run(engine.generate(requests))
        assert all(result.length == args.tokens for result in results)
        return time.perf_counter() - begin, time.process_time() - used

    seconds(SCHEMA, -1), seconds(None, -1)  # the first compiles the grammar and reads the tokenizer
    times = [(seconds(None, turn), seconds(SCHEMA, turn)) for turn in range(args.repeats)]
    count = args.batch * args.tokens
    for number, what in enumerate(("clock", "processors")):
        free, held = ([turn[side][number] for turn in times] for side in (0, 1))
        ratios = sorted(one / other for one, other in zip(free, held, strict=True))
        speeds = (
            f"{count / statistics.median(free):.0f} tokens/s free, {count / statistics.median(held):.0f} under a schema"
        )
        print(f"{what}: {speeds}, ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    asyncio.run(engine.close())


if __name__ == "__main__":
    main()
