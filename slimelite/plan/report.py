"""What a dry run says of memory, time and traffic: the verdict first, then tables. All of it is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from slimelite.arguments.machine import Machine
from slimelite.arguments.memory import training_load
from slimelite.plan import time
from slimelite.plan.devices import Device, host_bytes
from slimelite.plan.memory import BASE, USABLE, Load, Parts, Serving, largest, peak, total
from slimelite.plan.time import Cost, Work

if TYPE_CHECKING:
    from slimelite.arguments import Args

PARTS = ("weights", "optimizer", "gradients", "activations", "logits", "gathered", "reference")
COLUMNS = (*PARTS, "KV pool", "graphs", "buffers", "processes")  # of engines: their pool and CUDA graphs
# phases whose memory the size of an engine decides
OF_ENGINES = ("generate", "sync")
LORA_RANK = 16
# sequences that an engine decodes at once, unless a flag says it: the embedded engine's default, and about SGLang's
SEQUENCES = {False: 64, True: 256}
WORLDS = (1, 8, 64, 256, 1024)
# what is not known of a run -> what makes it known
UNKNOWN = {
    "the model's shapes are": "give a folder with a config.json, of a decoder with attention in each layer",
    "the longest micro-batch is": "--rollout-max-prompt-len or --use-dynamic-batch-size bounds it",
    "the GPUs' memory is": "--plan-gpu h100:8 names GPUs",
}
# prompt tokens, where no flag bounds them
PROMPT = 512


@dataclass(frozen=True)
class Plan:
    """A run on its devices.

    ``ranks`` that train and ``engines`` that generate; ``device``: each has one, or all share this machine's memory
    (``shared``); ``usable``: bytes of it that tensors can take.
    """

    args: Args
    load: Load
    serving: Serving
    work: Work
    ranks: int
    engines: int
    device: Device | None
    usable: float
    shared: bool

    @classmethod
    def of(cls, args: Args, machine: Machine) -> Plan | str:
        """The plan of a run; or what is not known of it, as the subject and verb of a sentence."""
        load = training_load(args)
        if isinstance(load, str):
            return load
        shared = args.device != "cuda"
        device = time.measured_cpu(args.cpu_threads) if shared and args.dry_run else machine.device
        memory = host_bytes() if shared else machine.gpu_bytes
        if not memory:
            return "the GPUs' memory is"
        ranks = 0 if args.debug_rollout_only else args.training_ranks
        engines = 0 if args.debug_train_only or args.rollout_external_engine_addrs else args.num_engines
        prompt = min(args.rollout_max_prompt_len or PROMPT, PROMPT)
        response = args.rollout_max_response_len or 0
        rows = (args.rollout_batch_size or 1, args.n_samples_per_prompt)
        server = bool(args.engine_kind.server)
        sequences = args.sglang_max_running_requests or SEQUENCES[server]
        context = args.sglang_context_length or prompt + response
        width = 1 if shared else args.rollout_num_gpus_per_engine
        serving = Serving(
            load.shapes, width, min(sequences, rows[0] * rows[1]), context, load.width, server and not shared
        )
        work = Work(*rows, prompt, response, args.num_steps_per_rollout or 1, args.share_prefixes)
        return cls(args, load, serving, work, ranks, engines, device, memory * (1 if shared else USABLE), shared)

    def phases(self) -> dict[str, Parts]:
        """Memory of the device that holds most, by phase: that of a rank, an engine or both; or of this machine."""
        args, load, together = self.args, self.load, self.args.colocate or self.shared
        state = _sum(*[load.state()] * self.summed)
        resting: Parts = {} if args.offload_train or not (together and self.ranks) else state
        serving = self.serving.generate(self.usable - total(resting)) if self.engines else {}
        kept = {} if args.offload_rollout or not together else serving
        found = {"generate": _sum(serving, resting)} if self.engines else {}
        if self.ranks:
            if load.others or (args.num_steps_per_rollout or 1) > 1:
                found["log-probs"] = _sum(*[load.log_probs()] * self.summed, kept)
            found["train"] = _sum(*[load.train()] * self.summed, kept)
        if self.ranks and self.engines:
            weights = {"weights": serving["weights"]} if together else {}
            sending = load.sync(args.update_weight_buffer_size, alone=args.sends_adapter)
            found["sync"] = _sum({} if args.offload_train else state, *[sending] * self.summed, kept or weights)
        if self.shared:
            others = 0 if args.launcher == "local" else 2 + self.engines
            processes = {"processes": BASE * others + (self.ranks * load.process() or BASE)}
            found = {name: _sum(parts, processes) for name, parts in found.items()}
        return found

    def costs(self) -> dict[str, Cost]:
        """Work of each phase on each of its devices."""
        assert self.device is not None
        found = {}
        if self.engines:
            found["generate"] = time.generate(self.serving, self.work, self.engines)
        return found | (time.training(self.load, self.work, self.ranks, self.device) if self.ranks else {})

    @property
    def lora_flags(self) -> str:
        """The flags of a run that `Load.adapted` is the load of."""
        return f"--lora-rank {LORA_RANK}" + ("" if self.load.critic is None else f" --critic-lora-rank {LORA_RANK}")

    @property
    def summed(self) -> int:
        """Ranks whose memory is counted together: all that share this machine's, or the one of a GPU."""
        return self.ranks if self.shared else 1

    def beside_training(self) -> float:
        """Bytes that other things than trainers hold while they train."""
        trainer = total(self.load.train()) + (self.load.process() if self.shared else 0)
        return total(self.phases()["train"]) - self.summed * trainer

    def remedies(self, room: float | None = None) -> list[str]:
        """At most two changes of the command line with which training fits ``room`` [bytes], the least costly first."""
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
        found = []
        for words, tried in tries:
            fitting = largest(tried, room) // 256 * 256
            if peak(tried) <= room:
                found.append(words)
            elif longest <= fitting < load.tokens:
                found.append(f"{words} --max-tokens-per-gpu {fitting}")
        return [words.strip() for words in dict.fromkeys(found) if words.strip()][:2]


def _sum(*parts: Parts) -> Parts:
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: sum(each.get(name, 0) for each in parts) for name in names}


def verdict(plan: Plan) -> str:
    """One sentence: whether it fits, and what would."""
    phases = plan.phases()
    needed = {name: total(parts) for name, parts in phases.items()}
    if plan.engines:  # the pool takes what is free, and needs room for one sequence
        needed["generate"] += total(plan.serving.least()) - total(plan.serving.generate(plan.usable))
    worst = max(needed, key=lambda name: needed[name])
    needs, has = needed[worst] / 1e9, plan.usable / 1e9
    where = "this machine has" if plan.shared else "tensors can use on a GPU"
    if needs <= has:
        return f"fits: {worst} needs most, {needs:.1f} of the {has:.1f} GB that {where}"
    said = f"does not fit: {worst} needs {needs:.1f} of the {has:.1f} GB that {where}; {_remedy(plan, worst)}"
    # a trainer and an engine that both do not fit need a change each
    rest = [name for name in needed if (name in OF_ENGINES) != (worst in OF_ENGINES) and needed[name] > plan.usable]
    if not rest:
        return said
    second = max(rest, key=lambda name: needed[name])
    return f"{said}; and {second} needs {needed[second] / 1e9:.1f} GB; {_remedy(plan, second)}"


def _remedy(plan: Plan, phase: str) -> str:
    """What would make ``phase`` fit."""
    if phase not in OF_ENGINES:
        return (" or ".join(plan.remedies()) or "no flag that is known here is enough") + " would fit"
    sizes = [n for n in (2, 4, 8) if total(replace(plan.serving, gpus=n).least()) <= plan.usable]
    if plan.shared or not sizes:
        return "a smaller model would"
    wider = next((n for n in sizes if plan.engines * plan.serving.gpus % n == 0), None)
    more = "" if wider else f" on {sizes[0]} GPUs"
    return f"--rollout-num-gpus-per-engine {wider or sizes[0]}{more} would fit"


def plan_lines(args: Args, machine: Machine) -> list[str]:
    """The lines of a dry run about memory, time and traffic."""
    plan = Plan.of(args, machine)
    if isinstance(plan, str):
        return ["will it fit (predicted)", f"  unknown: {plan} not known here; {UNKNOWN[plan]}"]
    if not plan.phases():
        return []
    lines = [f"will it fit (predicted)\n  {verdict(plan)}", *_memory(plan)]
    if plan.ranks:
        lines += _settings(plan)
    if plan.device is not None:
        lines += ["how fast (predicted, with every response as long as is allowed)", *_time(plan)]
        if plan.ranks and not plan.shared:
            lines += ["what ranks send for one optimizer step (predicted)", *_traffic(plan)]
    return lines


def _memory(plan: Plan) -> Iterator[str]:
    phases = plan.phases()
    shown = [name for name in COLUMNS if any(parts.get(name) for parts in phases.values())]
    yield f"  {'GB':9}" + "".join(f" {name}" for name in shown) + f"{'total':>7}"
    for phase, parts in phases.items():
        cells = "".join(f"{parts.get(name, 0) / 1e9:>{len(name) + 1}.1f}" for name in shown)
        yield f"  {phase:9}{cells}{total(parts) / 1e9:>7.1f}"
    if not plan.shared:
        rest = plan.usable * (1 / USABLE - 1) / 1e9
        yield f"  {rest:.1f} GB more of each GPU are left to CUDA, NCCL and the allocator's fragmentation"
        frozen = plan.load.width * plan.load.shapes.parameters * plan.load.others / plan.load.shards
        state = total(replace(plan.load, on_host=False).state())
        host = (state if plan.args.offload_train or plan.load.on_host else 0) + frozen
        if host:
            yield f"  host memory for each rank: {host / 1e9:.1f} GB of weights, moments and reference"


def _settings(plan: Plan) -> Iterator[str]:
    """The largest micro-batch, and so the longest sample, under other settings."""
    load, kept, ranks = plan.load, plan.beside_training(), plan.summed
    variants = {
        "--no-gradient-checkpointing": replace(load, checkpointing=False),
        "--gradient-checkpointing": replace(load, checkpointing=True),
    }
    other = "--no-fsdp-cpu-offload" if load.on_host else "--fsdp-cpu-offload"
    variants[f"{other} --gradient-checkpointing"] = replace(load, checkpointing=True, on_host=not load.on_host)
    if not load.lora:
        adapted = replace(load, checkpointing=True).adapted(LORA_RANK)
        variants[f"{plan.lora_flags} --gradient-checkpointing"] = adapted
    yield f"  {'with':45}{'needs GB':>10}{'largest --max-tokens-per-gpu':>30}{'response':>12}"
    for words, tried in variants.items():
        if plan.shared and tried.on_host != load.on_host:
            continue
        most = largest(tried, (plan.usable - kept) / ranks)
        mark = " (as given)" if tried == load else ""
        response = max(0, most - plan.work.prompt)
        yield f"  {words + mark:45}{(ranks * peak(tried) + kept) / 1e9:>10.1f}{most:>30,}{response:>12,}"


def _time(plan: Plan) -> Iterator[str]:
    device, costs = plan.device, plan.costs()
    assert device is not None
    yield f"  {'phase':12}{'seconds':>9}{'MFU':>6}   limited by"
    for name, cost in costs.items():
        seconds = cost.seconds(device)
        if cost.sending >= seconds:
            limit = "the links between ranks"
        else:
            limit = "products" if cost.operations / device.rate > cost.moved / device.bandwidth else "memory bandwidth"
        yield f"  {name:12}{seconds:>9.1f}{cost.mfu(device):>6.0%}   {limit}"
    if plan.engines and plan.ranks:
        speed = device.bandwidth if plan.shared else device.link if plan.args.colocate else device.net
        pushed, alone = plan.load.pushed(alone=plan.args.sends_adapter), plan.args.sends_adapter
        what = "an adapter" if alone else "matrices, with the adapter merged into them" if plan.load.lora else "weights"
        yield f"  {'sync':12}{pushed / (speed * time.BYTES):>9.2f}{'':6}   {pushed / 1e9:.1f} GB of {what}"
    if not plan.shared:
        yield from _placement(plan, device)


def _placement(plan: Plan, device: Device) -> Iterator[str]:
    """The size of an engine, and whether to colocate."""
    sizes = [n for n in (1, 2, 4, 8) if total(replace(plan.serving, gpus=n).least()) <= plan.usable]
    gpus = plan.ranks if plan.args.colocate else plan.ranks + plan.engines * plan.serving.gpus
    if not sizes or not plan.engines or not plan.ranks or gpus < 2:
        return
    width = sizes[0]
    serving = replace(plan.serving, gpus=width)

    def generating(count: int) -> float:
        return time.generate(serving, plan.work, count // width).seconds(device)

    def training(count: int) -> float:
        load = replace(plan.load, shards=min(plan.load.shards, count))
        return sum(cost.seconds(device) for cost in time.training(load, plan.work, count, device).values())

    turns = generating(gpus) + training(gpus) + time.offloading(plan.load, device)
    split = {count: max(generating(count), training(gpus - count)) for count in range(width, gpus, width)}
    yield (
        f"  an engine needs {width} GPU(s); with --colocate there are {gpus // width} engines, and a rollout takes "
        f"{turns:.0f} s"
    )
    if split:
        best = min(split, key=lambda count: split[count])
        yield (
            f"  apart, with --async-rollout and --rollout-num-gpus {best} of {gpus}: {split[best]:.0f} s, with weights "
            "one version old"
        )


def _traffic(plan: Plan) -> Iterator[str]:
    load, device, work = plan.load, plan.device, plan.work
    assert device is not None
    passes = max(1.0, work.tokens / plan.ranks / work.steps / load.tokens)
    node, replicas = device.node, []
    yield f"  {'GPUs':>6}{'GB a rank':>11}{'seconds':>9}   {'with --dp-replicate-size':>26}{'GB':>8}{'seconds':>9}"
    for ranks in WORLDS:
        sent = time.traffic(replace(load, shards=ranks), passes=passes, steps=1)
        seconds, nodes = time.sending(device, sent, ranks), ceil(ranks / node)
        row = f"  {ranks:>6}{sent / 1e9:>11.1f}{seconds:>9.2f}"
        if nodes > 1:
            inside = time.traffic(replace(load, shards=node), passes=passes, steps=1)
            across = 8 * load.trained / node * (1 - 1 / nodes)
            apart = time.sending(device, inside, node) + time.sending(device, across, ranks)
            row += f"   {nodes:>26}{(inside + across) / 1e9:>8.1f}{apart:>9.2f}"
            if apart < seconds:
                replicas.append(ranks)
        yield row
    if replicas and peak(replace(load, shards=node)) <= plan.usable:
        yield f"  from {replicas[0]} GPUs on, --dp-replicate-size NODES is faster: weights are gathered within a node"
    elif replicas:
        yield f"  a replica in each node would be faster, but it does not fit a node's {node} GPU(s)"
    alone = plan.args.sends_adapter
    buckets = 1 if alone else ceil(load.pushed(alone=False) / plan.args.update_weight_buffer_size)
    yield f"  a weight sync sends {buckets} bucket(s) of --update-weight-buffer-size" + (
        "; 2147483648 would do with fewer waits" if buckets > 32 else ""
    )
