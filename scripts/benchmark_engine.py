"""Tokens per CPU-second of the embedded engine against transformers' generate() and the GEMM roofline.

    OMP_NUM_THREADS=1 python scripts/benchmark_engine.py --model smollm2
    OMP_NUM_THREADS=1 python scripts/benchmark_engine.py --model tiny --samples 32

The weights are random (speed does not depend on them); prompts come in groups, as in a rollout. A CPU-second is
process time, prefill included; the roofline is the time that the same matrix products take alone.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.protocol import GenerateRequest, SamplingParams

CONFIGS: dict[str, PretrainedConfig] = {
    "smollm2": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "tiny": Qwen2Config(
        vocab_size=168,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    ),
}


def cpu_seconds(work: Callable[[], object]) -> float:
    """Process time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def roofline(model: torch.nn.Module, rows: int, steps: int, prompt_tokens: int) -> float:
    """CPU-seconds of the matrix products of ``steps`` decoding steps and of prefilling ``prompt_tokens``."""
    total = 0.0
    shapes: dict[torch.Size, int] = {}
    for weight in model.parameters():
        if weight.dim() == 2:
            shapes[weight.shape] = shapes.get(weight.shape, 0) + 1
    for shape, count in shapes.items():
        weight = torch.randn(shape)
        for tokens, times in ((rows, steps), (prompt_tokens, 1)):
            x = torch.randn(tokens, shape[1])
            if times == 1 and shape[0] == model.config.vocab_size:
                continue
            torch.nn.functional.linear(x, weight)
            repeats = max(3, int(1e8 / (tokens * weight.numel())))
            each = cpu_seconds(lambda x=x, w=weight, n=repeats: [torch.nn.functional.linear(x, w) for _ in range(n)])
            total += times * count * each / repeats
    return total


def make_requests(args: argparse.Namespace, vocab: int, call: int) -> list[GenerateRequest]:
    """``prompts`` groups of ``samples`` requests that share a random prompt."""
    rng = np.random.default_rng(call)
    requests = []
    for group in range(args.prompts):
        prompt = tuple(rng.integers(0, vocab, args.prompt_tokens).tolist())
        for sample in range(args.samples):
            params = SamplingParams(args.new_tokens, ignore_eos=True, seed=group * args.samples + sample)
            requests.append(GenerateRequest(f"{call}-{group}-{sample}", prompt, params, prefix_key=f"{call}-{group}"))
    return requests


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="smollm2")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="each is measured this often, in turn; the best counts")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[args.model]).eval()
    rows = args.prompts * args.samples
    vocab = model.config.vocab_size
    sampling = GenerationConfig(
        max_new_tokens=args.new_tokens, do_sample=True, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0
    )
    times: dict[str, list[float]] = {"embedded engine": [], "transformers generate()": []}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        engine = EmbeddedEngine(folder, max_running_requests=rows)
        for call in range(args.rounds + 1):
            requests = make_requests(args, vocab, call)
            ids = torch.tensor([request.input_ids for request in requests])
            own = cpu_seconds(lambda r=requests: asyncio.run(engine.generate(r)))
            theirs = cpu_seconds(lambda i=ids: model.generate(i, generation_config=sampling))
            if call:  # the first is the warm-up
                times["embedded engine"].append(own)
                times["transformers generate()"].append(theirs)
        asyncio.run(engine.close())
    times["GEMM roofline"] = [roofline(model, rows, args.new_tokens, args.prompts * args.prompt_tokens)]
    baseline = min(times["transformers generate()"])
    print(
        f"{args.model}: {model.num_parameters():,} parameters, {rows} sequences ({args.prompts} prompts x "
        f"{args.samples}), {args.prompt_tokens} prompt + {args.new_tokens} new tokens, {args.threads} thread(s)"
    )
    print(f"{'':26}{'CPU-s':>9}{'tokens per CPU-s':>18}{'vs generate()':>15}")
    for name, measured in times.items():
        best = min(measured)
        print(f"{name:26}{best:9.3f}{rows * args.new_tokens / best:18,.0f}{baseline / best:14.2f}x")


if __name__ == "__main__":
    main()
