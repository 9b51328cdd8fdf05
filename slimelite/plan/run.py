"""A run on its devices: the memory, work and time of each phase, from the run's arguments. After an out-of-memory
error, this module predicts the needed memory, the available memory, and the flags with which the run would fit.

    python -m slimelite.plan.run ARGUMENTS OF train.py, such as --config RUN/config.yaml

This command prints the prediction for a run that was killed.
"""

from __future__ import annotations

import errno
import re
import sys
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import TYPE_CHECKING

from slimelite.plan import time
from slimelite.plan.devices import Device, Machine, host_bytes, this_machine
from slimelite.plan.memory import (
    BASE,
    CONTEXT,
    EMBEDDED_CACHE,
    USABLE,
    Load,
    Parts,
    Serving,
    Sglang,
    Shapes,
    largest,
    left_behind,
    peak,
    total,
    training_load,
)
from slimelite.plan.time import Cost, Work

if TYPE_CHECKING:
    from slimelite.arguments import Args, SglangArgs

LORA_RANK = 16
# sequences that an engine decodes at once, if no flag sets it: the embedded engine's default, and SGLang's limit
SEQUENCES = {False: 64, True: 4096}
WORLDS = (1, 8, 64, 256, 1024)
# prompt tokens, if no flag limits them
PROMPT = 512
# torch's error messages if memory of the host or of a GPU is missing
HOST, GPU = "can't allocate memory", "out of memory"
CAPACITY = re.compile(r"total capacity of ([\d.]+) GiB")


@dataclass(frozen=True)
class Plan:
    """A run on its devices.

    ``ranks``: the number of training ranks. ``engines``: the number of inference engines. ``device``: the GPU that each
    rank or engine has. ``shared``: all ranks and engines share this machine's memory, and have no GPU. ``memory``: the
    memory of the GPU or of this machine [bytes].
    """

    args: Args
    load: Load
    serving: Serving
    work: Work
    ranks: int
    engines: int
    device: Device | None
    memory: float
    shared: bool

    @classmethod
    def of(cls, args: Args, machine: Machine) -> Plan | str:
        """The plan of a run. If too little is known about the run, returns a text with the reason."""
        load = training_load(args)
        if isinstance(load, str):
            return load
        shared = not args.job.gpus
        device = time.measured_cpu(args.cpu_threads) if shared and args.dry_run else machine.device
        memory = host_bytes() if shared else machine.gpu_bytes
        if not memory:
            return "the GPUs' memory is not known here"
        ranks = args.training_ranks if args.job.trains else 0
        engines = args.num_engines if args.job.engines == "own" else 0
        prompt = min(args.rollout_max_prompt_len or PROMPT, PROMPT)
        response = args.rollout_max_response_len or 0
        if args.job.documents:
            prompt, response = 1, args.seq_length - 1
        rows = (args.rollout_batch_size or 1, args.n_samples_per_prompt)
        work = Work(*rows, prompt, response, args.num_steps_per_rollout or 1, args.share_prefixes)
        serving = _serving(args, load.shapes, work, memory)
        return cls(args, load, serving, work, ranks, engines, device, memory, shared)

    @property
    def usable(self) -> float:
        """Bytes of a device's memory that tensors can use."""
        return self.memory * (1 if self.shared else USABLE)

    @property
    def together(self) -> bool:
        """Whether trainer and engine share a GPU."""
        return self.args.colocate and not self.shared and bool(self.ranks and self.engines)

    @property
    def keeps_engine(self) -> bool:
        """Whether an engine keeps its memory on a GPU while a rank of the trainer computes there."""
        return self.together and not self.args.offload_rollout

    def phases(self) -> dict[str, Parts]:
        """Memory by phase. On a GPU, this is the memory of a rank, of an engine, or of both if they share the GPU.
        Without GPUs, it is the memory of the whole run on this machine."""
        args, load, together = self.args, self.load, self.args.colocate or self.shared
        state = _sum(*[load.state()] * self.summed)
        resting: Parts = {} if args.offload_train or not (together and self.ranks) else state
        trainer, engine = self._left(self.ranks), self._left(self.serving.gpus)
        serving = self.serving.generate(self.usable - total(resting) - total(trainer)) if self.engines else {}
        kept = {} if args.offload_rollout or not together else serving
        phases = {"generate": _sum(serving, resting, trainer)} if self.engines else {}
        if self.ranks:
            if load.others or (args.num_steps_per_rollout or 1) > 1:
                phases["log-probs"] = _sum(*[load.log_probs()] * self.summed, kept, engine)
            phases["train"] = _sum(*[load.train()] * self.summed, kept, engine)
        if self.ranks and self.engines:
            weights = {"weights": serving["weights"]} if together else {}
            sending = load.sync(args.update_weight_buffer_size, alone=args.sends_adapter)
            sent = _sum({} if args.offload_train else state, *[sending] * self.summed, kept or weights)
            phases["sync"] = _sum(sent, engine)
        if self.shared:
            others = 0 if args.job.local else 2 + self.engines
            processes = {"processes": BASE * others + (self.ranks * load.process() or BASE)}
            phases = {name: _sum(parts, processes) for name, parts in phases.items()}
        return phases

    def _left(self, group: int) -> Parts:
        """Memory that the other process keeps on a GPU that trainer and engine share. ``group``: the number of GPUs in
        the other process's group."""
        if not self.together or not self.args.job.servers:
            return {}
        return {"others": left_behind(group)}

    def needs(self) -> dict[str, tuple[float, float]]:
        """For each phase: the bytes that it needs at least, and the bytes that are available."""
        phases = self.phases()
        needs = {name: (total(parts), self.usable) for name, parts in phases.items()}
        if not self.engines:
            return needs
        serving, full = self.serving, total(phases["generate"])
        least = full - total(serving.generate(self.usable)) + total(serving.least())
        if not serving.static:  # the pool takes all free memory, and needs room for one sequence
            return needs | {"generate": (least, self.usable)}
        if not serving.holds_one():
            return needs | {"generate": (serving.one(), serving.static)}
        # SGLang's share of a GPU leaves room for memory that is not in tensors
        return needs | {"generate": (full if full > self.memory - CONTEXT else least, self.memory - CONTEXT)}

    def costs(self) -> dict[str, Cost]:
        """The work of each phase on each of its devices."""
        assert self.device is not None
        costs = {}
        if self.engines:
            pool = self.phases()["generate"]["KV pool"]
            costs["generate"] = time.generate(self.serving, self.work, self.engines, pool)
        return costs | (self.training(self.load, self.ranks) if self.ranks else {})

    def training(self, load: Load, ranks: int) -> dict[str, Cost]:
        """The work of the trainer's phases with ``ranks`` ranks."""
        from slimelite.training.columns import pass_begins  # it needs torch

        assert self.device is not None
        begins, steps = pass_begins(self.args, self.work.steps, False), self.work.steps
        before = 0.0 if begins is None else 1 - begins / steps
        return time.training(load, self.work, ranks, self.device, before)

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase of a rollout, of the weight sync, and of the work between the phases."""
        assert self.device is not None
        seconds = {name: cost.seconds(self.device) for name, cost in self.costs().items()}
        if self.engines and self.ranks:
            server = self.args.job.servers and not self.shared
            seconds["sync"] = time.sync(self.pushed, self.buckets if server else 0, self.load, self.device, self.apart)
            if not self.shared:
                moving = time.offloading(self.load, self.device) if self.args.offload_train else 0.0
                seconds["between"] = moving + (time.BETWEEN if server else 0.0)
        return seconds

    def rollout_seconds(self) -> float:
        """Seconds from one rollout to the next. With --async-rollout, training overlaps with the next generation."""
        seconds = self.seconds()
        if not self.args.async_rollout:
            return sum(seconds.values())
        generating = seconds.pop("generate") + seconds.pop("between", 0.0)
        pushing = seconds.pop("sync")
        return max(generating, sum(seconds.values())) + pushing

    @property
    def rows(self) -> int:
        """The number of responses that an engine generates in a rollout."""
        return ceil(self.work.rows / self.engines)

    def largest_share(self) -> float:
        """The largest --sglang-mem-fraction-static that is advisable and leaves room for all else on the GPU."""
        beside = total(self.phases()["generate"]) - total(self.serving.generate(0)) + total(self.serving.work())
        return floor(100 * min(self.serving.advised, 1 - beside / (self.memory - CONTEXT))) / 100

    @property
    def apart(self) -> bool:
        """Whether engines have GPUs of their own."""
        return not self.args.colocate and not self.shared

    @property
    def pushed(self) -> float:
        """The number of bytes that a weight sync sends."""
        return self.load.pushed(alone=self.args.sends_adapter)

    @property
    def buckets(self) -> int:
        """The number of buckets of a weight sync."""
        return 1 if self.args.sends_adapter else ceil(self.pushed / self.args.update_weight_buffer_size)

    @property
    def lora_flags(self) -> str:
        """The flags with which a run trains the adapters of `Load.adapted`."""
        return f"--lora-rank {LORA_RANK}" + ("" if self.load.critic is None else f" --critic-lora-rank {LORA_RANK}")

    @property
    def summed(self) -> int:
        """The number of ranks whose memory is added up: all ranks if they share this machine's memory; 1 on a GPU."""
        return self.ranks if self.shared else 1

    def beside_training(self) -> float:
        """Bytes that are in use during training by anything but the trainers."""
        trainer = total(self.load.train()) + (self.load.process() if self.shared else 0)
        return total(self.phases()["train"]) - self.summed * trainer

    def remedies(self, room: float | None = None) -> list[str]:
        """At most two changes of the command line with which training fits ``room`` [bytes]. The least costly change
        comes first."""
        load = self.load
        room = ((self.usable if room is None else room) - self.beside_training()) / self.summed
        longest = self.work.prompt + self.work.response
        saving = replace(load, checkpointing=True)
        changed = "" if load.checkpointing else " --gradient-checkpointing"
        tries = [("", load), (changed, saving)]
        if not load.lora:
            tries.append((f" {self.lora_flags}{changed}", saving.adapted(LORA_RANK)))
        if not self.shared:
            tries.append((f" --fsdp-cpu-offload{changed}", replace(saving, on_host=True)))
            more = [n for n in WORLDS if n > load.shards]
            tries += [(f" {n} training GPUs{changed and f' with{changed}'}", replace(saving, shards=n)) for n in more]
        flags = []
        for words, tried in tries:
            fitting = largest(tried, room) // 256 * 256
            if peak(tried) <= room:
                flags.append(words)
            elif longest <= fitting < load.tokens:
                flags.append(f"{words} --max-tokens-per-gpu {fitting}")
        return [words.strip() for words in dict.fromkeys(flags) if words.strip()][:2]


def _serving(args: SglangArgs, shapes: Shapes, work: Work, memory: float) -> Serving:
    """The memory of an engine of the run."""
    server, shared = args.job.servers, not args.job.gpus
    most = args.sglang_max_running_requests or SEQUENCES[server]
    sequences = min(most, args.sglang_server_concurrency if server else most, work.rows)
    width = 1 if shared else args.rollout_num_gpus_per_engine
    context = args.sglang_context_length or work.prompt + work.response
    serving = Serving(shapes, width, sequences, context, 4 if shared else 2, server and not shared)
    if args.engine_kind.name != "sglang" or shared:
        return serving if server or shared else replace(serving, cache=EMBEDDED_CACHE)
    reserved = Sglang.of(memory, width, args.sglang_overrides, releases=args.offload_rollout)
    usual, recorded = reserved.share(memory, width), bool(reserved.batch or reserved.prompts)
    share = args.sglang_mem_fraction_static or usual
    static, advised = share * (memory - CONTEXT), (1 + usual) / 2
    return replace(serving, static=static, advised=advised, chunk=reserved.chunk, graphs=recorded)


def _sum(*parts: Parts) -> Parts:
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: sum(each.get(name, 0) for each in parts) for name in names}


def is_shortage(error: BaseException) -> bool:
    """Whether ``error`` means that memory ran out, on the host or on a GPU."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and (HOST in str(error) or GPU in str(error))
    )


def shortage(error: BaseException, args: Args) -> str:
    """The message to a user when memory runs out: the first sentence of ``error``, the run's needs, and flags with
    which the run would fit (`needs_and_remedies`).
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else "there is no memory left"
    first = (first.partition("DefaultCPUAllocator: ")[2] or first).partition(". ")[0]
    capacity = CAPACITY.search(str(error))
    advice = needs_and_remedies(args, int(float(capacity[1]) * 2**30) if capacity else None)
    return f"out of memory: {first}. {advice}"


def needs_and_remedies(args: Args, gpu_bytes: int | None = None) -> str:
    """The predicted memory that the run needs, the available memory, and at most two changes with which the run would
    fit, as text.

    ``gpu_bytes``: memory of a GPU, if a more exact number than nvidia-smi's is known.
    """
    machine = this_machine()
    plan = Plan.of(args, replace(machine, gpu_bytes=gpu_bytes or machine.gpu_bytes))
    if isinstance(plan, str) or not plan.phases():
        return "A lower --max-tokens-per-gpu or --sglang-mem-fraction-static takes less memory"
    phases, needs = plan.phases(), plan.needs()
    worst = max(needs, key=lambda name: needs[name][0] / needs[name][1])
    needed, there = needs[worst]
    parts = sorted(((size, name) for name, size in phases[worst].items()), reverse=True)[:3]
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for size, name in parts)
    where = "that the machine and its limits allow" if plan.shared else "that tensors can use on a GPU"
    sentence = f"Predicted: {worst} needs {needed / 1e9:.1f} GB ({listed}) of the {there / 1e9:.1f} GB {where}"
    if needed <= there:
        sentence += "; other programs, or a longer sample, took the rest"
    # changes that fit the prediction and the shortage that just happened
    remedies = plan.remedies(min(plan.usable, 0.8 * needed)) if plan.ranks else []
    return f"{sentence}. {' or '.join(remedies) or 'More memory, or a smaller model,'} would fit (predicted)"


if __name__ == "__main__":
    from slimelite.arguments import make_args

    print(needs_and_remedies(make_args(sys.argv[1:])))
