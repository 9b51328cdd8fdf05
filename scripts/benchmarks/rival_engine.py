"""One engine, run by its own interpreter and measured by `tree.py`. It writes a line to ``--marks`` after each whole
batch.

    python scripts/benchmarks/rival_engine.py embedded --model M --marks F
    $VLLM_PYTHON scripts/benchmarks/rival_engine.py vllm --model M --marks F

SGLang runs as a server. Without a GPU, tests/support/sglang_cpu on PYTHONPATH replaces its compiled kernels. llama.cpp
reads ``--model`` as a GGUF file. All compute in fp32, with random tokens and no end token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# takes the prompts of a batch, returns the number of tokens generated
Generate = Callable[[list[list[int]]], int]


@contextmanager
def embedded(given: argparse.Namespace) -> Iterator[Generate]:
    """Our embedded engine."""
    import torch

    from slimelite.engines.embedded import EmbeddedEngine
    from slimelite.engines.protocol import GenerateRequest, SamplingParams

    torch.set_num_threads(1)
    limits = {"max_running_requests": given.rows, "max_context_len": given.prompt + given.new}
    engine = EmbeddedEngine(given.model, **limits)
    calls = iter(range(10**9))

    def generate(prompts: list[list[int]]) -> int:
        def params(seed: int) -> SamplingParams:
            return SamplingParams(given.new, ignore_eos=True, seed=seed)

        asked = [GenerateRequest(f"{next(calls)}", tuple(p), params(i)) for i, p in enumerate(prompts)]
        return sum(len(result.output_ids) for result in asyncio.run(engine.generate(asked)))

    yield generate
    asyncio.run(engine.close())


@contextmanager
def vllm(given: argparse.Namespace) -> Iterator[Generate]:
    """vLLM's offline engine, without log-probs."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # as slimelite runs it: compiling takes minutes of one core before the first token
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from vllm import LLM, SamplingParams

    sizes = {"max_num_seqs": given.rows, "max_model_len": given.prompt + given.new}
    engine = LLM(given.model, dtype="float32", seed=0, enforce_eager=True, disable_log_stats=True, **sizes)
    params = SamplingParams(max_tokens=given.new, ignore_eos=True, temperature=1.0, detokenize=False)

    def generate(prompts: list[list[int]]) -> int:
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        return sum(len(x.outputs[0].token_ids) for x in engine.generate(asked, params, use_tqdm=False))

    yield generate


@contextmanager
def sglang(given: argparse.Namespace) -> Iterator[Generate]:
    """SGLang's server on the CPU. It gets all prompts in one request, as its own offline engine sends them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --dtype "
    flags += "float32 --disable-overlap-schedule --disable-cuda-graph --skip-server-warmup --host 127.0.0.1 "
    flags += f"--max-running-requests {given.rows} --max-total-tokens {2 * given.rows * (given.prompt + given.new)}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", given.model, "--port", str(port)]
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "1", "TORCHDYNAMO_DISABLE": "1"}
    server = subprocess.Popen([*command, *flags.split()], env={**os.environ, **cpu})
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                if server.poll() is not None:
                    sys.exit("SGLang's server ended")
                time.sleep(1)

        def generate(prompts: list[list[int]]) -> int:
            params = {"max_new_tokens": given.new, "ignore_eos": True, "temperature": 1.0}
            body = json.dumps({"input_ids": prompts, "sampling_params": params}).encode()
            request = urllib.request.Request(f"{address}/generate", body, {"Content-Type": "application/json"})
            return sum(x["meta_info"]["completion_tokens"] for x in json.load(urllib.request.urlopen(request)))

        yield generate
    finally:
        server.terminate()
        server.wait()


@contextmanager
def llama(given: argparse.Namespace) -> Iterator[Generate]:
    """llama.cpp's batched decoding: all sequences in one batch, one token for each in every step, with its own
    sampler."""
    import llama_cpp as c

    c.llama_backend_init()
    model = c.llama_model_load_from_file(given.model.encode(), c.llama_model_default_params())
    settings = c.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = given.rows * (given.prompt + given.new), given.rows
    settings.n_batch = settings.n_ubatch = 2048
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = c.GGML_TYPE_F32
    context = c.llama_init_from_model(model, settings)
    sampler = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
    c.llama_sampler_chain_add(sampler, c.llama_sampler_init_dist(0))
    batch = c.llama_batch_init(settings.n_batch, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if c.llama_decode(context, batch):
            sys.exit("llama_decode failed")

    def generate(prompts: list[list[int]]) -> int:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        last: list[int] = []
        for sequence, prompt in enumerate(prompts):
            decode([(t, i, sequence, i == len(prompt) - 1) for i, t in enumerate(prompt)])
            last.append(c.llama_sampler_sample(sampler, context, len(prompt) - 1))
        for step in range(1, given.new):
            decode([(token, given.prompt + step - 1, sequence, True) for sequence, token in enumerate(last)])
            last = [c.llama_sampler_sample(sampler, context, i) for i in range(len(last))]
        return len(prompts) * given.new

    yield generate


ENGINES = {"embedded": embedded, "vllm": vllm, "sglang": sglang, "llama": llama}


def main() -> None:
    """Load, warm up, generate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=40)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--calls", type=int, default=3)
    given = parser.parse_args()
    rng = random.Random(0)
    with ENGINES[given.engine](given) as generate:
        for _ in range(given.calls + 1):
            prompts = [[rng.randrange(6, given.vocab) for _ in range(given.prompt)] for _ in range(given.rows)]
            tokens = generate(prompts)
            with given.marks.open("a") as file:
                file.write(json.dumps({"kind": "call", "tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()
