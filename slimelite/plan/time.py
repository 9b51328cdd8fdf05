"""Seconds and traffic of each phase of a rollout, from the shapes of the model and the rates of a device (roofline)."""

from __future__ import annotations

import time as clock
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slimelite.plan.devices import Device, host_bytes
from slimelite.plan.memory import Load, Serving, Shapes, total

if TYPE_CHECKING:
    from slimelite.training.model import ForwardFlops

# the attained shares of a data sheet's rates: for products, and for bandwidths. No GPU was measured here. With these
# shares, FSDP of Llama-3.1-8B on eight H100 takes 0.9 of the seconds in torchtitan's benchmarks/llama3_h100_202412
PRODUCTS, BYTES = 0.5, 0.7
# bytes of AdamW for each parameter: it reads gradient, weight and two moments, and writes weight and moments
ADAM = 28
# bytes that a pass reads and writes for each logit: on a CPU, and on a GPU, where each operator is a separate kernel
# (scripts/lab/predict_mfu.py)
LOGIT = {4: 16, 2: 36}
# share of a trainer's memory traffic that remains with --compile (scripts/lab/predict_mfu.py, and torchtitan's gain)
COMPILED = 0.4
# least seconds of a decode step for each layer: for an engine's scheduler, and for kernels that wait for one another.
# Qwen3-0.6B in SGLang 0.4.6 takes 2.4 ms; its weights take 0.4 ms of them (qwen.readthedocs.io, speed benchmark, H20).
# Without CUDA graphs, Python launches 20 kernels of a layer (LAUNCH in scripts/lab/predict_mfu.py) and runs its modules
LAYER, EAGER_LAYER = 70e-6, 200e-6
# seconds for each bucket of a weight sync into a server: slime takes 7 s for the 122 buckets of Qwen3-30B-A3B
# (hebiao064.github.io/rl-weight-sync)
BUCKET = 0.055
# Both numbers are fitted to two published steps (tests/plan/published.toml). HOST: seconds of an engine's host for each
# decoded token (sampling, log-probs, detokenizing, HTTP). BETWEEN: seconds of a rollout between its phases (engines
# release and resume memory, rewards, the table)
HOST, BETWEEN = 75e-6, 15.0


@dataclass(frozen=True)
class Work:
    """A rollout: ``prompts`` prompts of ``prompt`` tokens, with ``samples`` responses of ``response`` tokens each.
    ``steps``: the number of optimizer steps per rollout. ``shares``: training computes a prompt once for all its
    responses. ``longest``: tokens of the longest response, for which generation waits (0: all responses are equally
    long).
    """

    prompts: int
    samples: int
    prompt: int
    response: int
    steps: int
    shares: bool
    longest: int = 0

    @property
    def rows(self) -> int:
        """The number of responses in the rollout."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """The number of tokens that training computes."""
        return (self.prompts if self.shares else self.rows) * self.prompt + self.rows * self.response

    def forward(self, shapes: Shapes) -> float:
        """Operations of one forward pass over the rollout."""
        lengths = np.full(self.rows, self.prompt + self.response)
        repeated = self.shares & (np.arange(self.rows) % self.samples > 0)
        return forward_flops(shapes).total(lengths, np.full(self.rows, self.response), repeated * self.prompt)


@dataclass(frozen=True)
class Cost:
    """The cost of a phase on each of its devices.

    ``operations``: their number. ``moved``: bytes of memory read and written. ``sent``: bytes sent. ``sending``:
    seconds of sending. ``waits``: seconds in which a GPU waits for the host.

    The seconds of matrix products and of memory traffic are added, because the two alternate on a CPU and in small
    kernels of a GPU. Data is sent during this computation, so only the longer of the two times counts.
    """

    operations: float
    moved: float
    sent: float = 0.0
    sending: float = 0.0
    waits: float = 0.0

    def seconds(self, device: Device) -> float:
        """Seconds on ``device``."""
        products, bandwidth = (1.0, 1.0) if device.measured else (PRODUCTS, BYTES)
        busy = self.operations / (device.rate * products) + self.moved / (device.bandwidth * bandwidth)
        return max(busy, self.sending) + (0.0 if device.measured else self.waits)

    def mfu(self, device: Device) -> float:
        """Model FLOPs utilisation, 0 to 1: the operations of the phase, divided by the operations that ``device`` could
        do in the same time."""
        return self.operations / (self.seconds(device) * device.rate)


def measured_cpu(threads: int, seconds: float = 0.25) -> Device:
    """This machine's CPU: the rates of fp32 products and of copies with ``threads`` threads. Each rate is measured for
    ``seconds``.

    The rates are computed from the CPU time of the threads, because other programs would make the elapsed time longer.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    left, right, big = torch.ones(512, 1024), torch.ones(1024, 1024), torch.ones(2**25)
    rates = []
    for work, amount in ((lambda: left @ right, 2 * 512 * 1024 * 1024), (lambda: big.mul(2), 8 * 2**25)):
        work()
        count, began = 0, clock.process_time()
        while (spent := clock.process_time() - began) < seconds * threads:
            work()
            count += 1
        rates.append(count * amount * threads / spent)
    torch.set_num_threads(before)
    rate, bandwidth = rates
    return Device("cpu", host_bytes(), rate, bandwidth, bandwidth, bandwidth, 1e9, 1, "measured here", measured=True)


def forward_flops(shapes: Shapes) -> ForwardFlops:
    """The number of operations of a forward pass. The result is the same as the number computed from a loaded model's
    weights."""
    from slimelite.training.model import ForwardFlops  # it needs torch, which is not imported when a run starts

    matrices = shapes.layers * shapes.active
    return ForwardFlops(2.0 * matrices, 2.0 * shapes.head, 4.0 * shapes.layers * shapes.query)


def sending(device: Device, sent: float, ranks: int) -> float:
    """Seconds in which a rank sends ``sent`` bytes around a ring of ``ranks``. The slowest link of the ring determines
    the speed."""
    speed = device.link if ranks <= device.node else device.net
    return sent / (speed * BYTES) if ranks > 1 else 0.0


def activations(load: Load, tokens: float) -> float:
    """Bytes that a forward pass over ``tokens`` writes and reads. Each activation is written once and read once. Logits
    are in fp32."""
    layer = 2 * load.layer_bytes() * load.shapes.layers
    return tokens * (layer + LOGIT[load.width] * load.shapes.vocab) * (COMPILED if load.compiled else 1)


def log_probs(load: Load, work: Work, ranks: int, device: Device, share: float = 1.0) -> Cost:
    """A forward pass over a ``share`` of the rollout."""
    forward, tokens = share * work.forward(load.shapes) / ranks, share * work.tokens / ranks
    passes = max(1.0, tokens / load.tokens)
    sent = passes * load.width * load.shapes.parameters * (1 - 1 / load.shards)
    return Cost(forward, activations(load, tokens), sent, sending(device, sent, load.shards))


def train(load: Load, work: Work, ranks: int, device: Device) -> Cost:
    """The cost of the forward and backward passes and the optimizer's steps. Recomputation takes time, but does not
    count as useful work."""
    s, tokens = load.shapes, work.tokens / ranks
    backward = 2 * work.forward(s) - (2 * s.layers * s.active * work.tokens if load.lora else 0)
    operations = (work.forward(s) * (2 if load.checkpointing else 1) + backward) / ranks
    moved = (4 if load.checkpointing else 3) * activations(load, tokens)
    moved += work.steps * ADAM * load.trained / load.shards
    sent = traffic(load, passes=max(work.steps, tokens / load.tokens), steps=work.steps)
    sends = sending(device, sent, load.shards)
    if (
        load.on_host and not device.measured
    ):  # for each pass and step, shards come from the host, and gradients go to the host
        shard = (load.width * load.shapes.parameters + 4 * load.trained) / load.shards
        sends += shard * max(work.steps, tokens / load.tokens) / (device.pcie * BYTES)
    return Cost(operations, moved, sent, sends)


def training(load: Load, work: Work, ranks: int, device: Device, before: float = 0.0) -> dict[str, Cost]:
    """The trainers' work on a rollout, by phase. The head of a critic counts as if it were the policy's head.

    ``before``: the share of the rows that need old log-probs, because they are trained in later steps. A forward pass
    computes these log-probs before the first step.
    """
    policy, *critics = load.learners
    costs = {"old log-probs": log_probs(policy, work, ranks, device, before)} if before else {}
    costs |= {"log-probs": log_probs(policy, work, ranks, device)} if load.others else {}
    costs["train"] = train(policy, work, ranks, device)
    for critic in critics:
        costs |= {"values": log_probs(critic, work, ranks, device), "critic": train(critic, work, ranks, device)}
    return costs


def traffic(load: Load, *, passes: float, steps: int) -> float:
    """Bytes that a rank receives in training. Weights arrive twice in each pass, and gradients once in each pass (with
    `Load.whole_grads`: once in each step)."""
    others = 1 - 1 / load.shards
    weights = 2 * load.width * load.shapes.parameters * passes * len(load.learners)
    gradients = 4 * load.trained * (steps if load.whole_grads else passes)
    return float((weights + gradients) * others)


def decode_steps(work: Work, rows: float, at_once: float) -> float:
    """The number of decoding steps in which an engine generates ``rows`` responses. It decodes ``at_once`` responses
    together until no response waits any more. Then it goes on until the longest response ends."""
    longest = max(work.longest, work.response)
    return longest + max(0.0, rows - at_once) * work.response / at_once


def generate(serving: Serving, work: Work, engines: int, pool: float) -> Cost:
    """The cost of generation: each prompt is prefilled once, and the responses are decoded. The KV ``pool`` [bytes]
    limits the number of sequences at a time."""
    s, rows = serving.shapes, work.rows / engines
    flops = forward_flops(s)
    fitting = pool / (serving.kv_token() * (work.prompt + work.response))
    at_once = max(1.0, min(serving.sequences, rows, fitting))
    steps, decoding = decode_steps(work, rows, at_once), rows * work.response
    pairs = flops.per_pair * rows * work.response * (work.prompt + work.response / 2)
    products = flops.per_token * (work.prompts / engines * work.prompt + decoding) + flops.per_target * decoding + pairs
    weights = serving.width * (s.layers * s.layer + s.head) / serving.gpus
    cached = serving.kv_token() * (work.prompt + work.response / 2)
    moved = steps * weights + decoding * cached
    layer = LAYER if serving.graphs else EAGER_LAYER
    return Cost(products / serving.gpus, moved, waits=steps * s.layers * layer + decoding * HOST)


def offloading(load: Load, device: Device) -> float:
    """Seconds to move a trainer's state to the host and back."""
    return 2 * total(load.state()) / (device.pcie * BYTES)


def sync(pushed: float, buckets: int, load: Load, device: Device, apart: bool) -> float:
    """Seconds of a weight sync of ``pushed`` bytes. Ranks gather the weights. Engines on other GPUs (``apart``) receive
    the weights over the network. An engine's server loads the weights bucket by bucket.
    """
    if device.measured:
        return pushed / device.bandwidth
    sent = pushed / (device.net * BYTES) if apart else sending(device, pushed, load.shards)
    return sent + buckets * BUCKET
