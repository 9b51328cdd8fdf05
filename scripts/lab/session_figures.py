"""Figures of sessions on a real model: exact tokens over ten turns, and an engine's work while tools sleep.

python scripts/fetch_smollm2.py data/SmolLM2-135M-Instruct
python scripts/lab/session_figures.py data/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from itertools import pairwise

import numpy as np

from slimelite.arguments import Args
from slimelite.base.version import add_version
from slimelite.data.tokenizer import load_tokenizer, stop_token_ids
from slimelite.engines.embedded.engine import EmbeddedEngine
from slimelite.engines.protocol import SamplingParams
from slimelite.engines.sampling import engine_sampler
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.serving.format import ChatFormat
from slimelite.serving.sessions import Session, Sessions
from slimelite.training.trainer import Trainer

CONTEXT = 2048
ASKED = [
    *("Tell me about the sea in two sentences.", "And about mountains?", "Now a haiku.", "Translate it to French."),
    *("Write it as JSON.", "Count to ten.", "Which of these are odd?", "Show me a loop in Python.", "Explain it."),
    "Say goodbye with an emoji 😀.",
]


class Timed(EmbeddedEngine):
    """An engine that adds up the time of its steps [s]."""

    busy = 0.0

    def _step(self) -> None:
        begin = time.monotonic()
        super()._step()
        self.busy += time.monotonic() - begin


async def talk(session: Session, turns: int, params: SamplingParams, sleep_s: float) -> Session:
    """``turns`` questions and answers; a tool sleeps up to ``sleep_s`` between them."""
    messages = []
    for number in range(turns):
        messages.append({"role": "user", "content": ASKED[number % len(ASKED)]})
        turn = await session.chat(messages, params=params)
        messages.append(turn.reply.message())
        if number + 1 < turns:
            await asyncio.sleep(random.uniform(0, sleep_s))
    return session


async def exactness(sessions: Sessions, model: str, count: int) -> None:
    """Print what is kept over ten turns, what encoding again would lose, and the distance to the trainer."""
    params = SamplingParams(max_new_tokens=64)
    talks = (talk(sessions.open(seed=number), 10, params, 0.0) for number in range(count))
    done = await asyncio.gather(*talks)
    again = sessions.format
    pairs = [pair for session in done for pair in pairwise(session.turns)]
    changed = sum(after.prompt_ids[: len(before.token_ids)] != before.token_ids for before, after in pairs)
    spelled = sum(again.encode(again.decode(before.output_ids)) != before.output_ids for before, _ in pairs)
    samples = [s for number, session in enumerate(done) for s in session.samples(Sample(0, number, reward=0.0))]
    table = SampleTable.from_samples([samples])
    trainer = Trainer(Args(hf_checkpoint=model, device="cpu", use_dynamic_batch_size=True, max_tokens_per_gpu=CONTEXT))
    distance = np.abs(trainer.log_probs(table) - table.rollout_log_probs)[table.loss_mask]
    trainer.close()
    print(f"{count} conversations of ten turns: {len(samples)} samples, {distance.size} sampled tokens")
    print(f"  replies whose tokens changed in the next prompt: {changed} of {len(pairs)}")
    print(f"  replies that encoding again would change: {spelled} of {len(pairs)}")
    print(f"  |trainer - engine|: mean {distance.mean():.1e}, largest {distance.max():.1e}")


async def concurrency(sessions: Sessions, engine: Timed, count: int, turns: int, sleep_s: float) -> None:
    """Print how busy the engine is while ``count`` sessions wait for tools that sleep."""
    begin, before = time.monotonic(), engine.busy
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    done = await asyncio.gather(*(talk(sessions.open(), turns, params, sleep_s) for _ in range(count)))
    seconds, tokens = time.monotonic() - begin, sum(len(turn.output_ids) for s in done for turn in s.turns)
    busy = (engine.busy - before) / seconds
    print(
        f"{count} sessions, tools that sleep up to {sleep_s:g} s: {tokens} tokens in {seconds:.0f} s, busy {busy:.0%}"
    )


async def measure(args: argparse.Namespace) -> None:
    """Both figures on one engine."""
    tokenizer = load_tokenizer(args.model)
    engine = Timed(args.model, max_running_requests=args.sessions, max_context_len=CONTEXT)
    chat_format = ChatFormat(tokenizer, end_ids=stop_token_ids(args.model, tokenizer))
    sessions = Sessions(chat_format, engine_sampler(engine), CONTEXT)
    await concurrency(sessions, engine, args.sessions, args.turns, args.sleep)
    await exactness(sessions, args.model, args.conversations)
    await engine.close()


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("--conversations", type=int, default=8, help="of ten turns")
    parser.add_argument("--sessions", type=int, default=256, help="sessions with tools that sleep")
    parser.add_argument("--turns", type=int, default=3, help="turns of each session with tools")
    parser.add_argument("--sleep", type=float, default=2.0, help="longest sleep of a tool [s]")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
