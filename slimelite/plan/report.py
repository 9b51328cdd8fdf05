"""The text of a dry run about memory, time and traffic: the verdict first, then tables. All numbers are predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from slimelite.engines.registry import Content
from slimelite.plan import time
from slimelite.plan.devices import Device, Machine
from slimelite.plan.memory import CONTEXT, USABLE, largest, peak, total
from slimelite.plan.run import LORA_RANK, WORLDS, Plan
from slimelite.plan.time import Cost

if TYPE_CHECKING:
    from slimelite.arguments import Args

PARTS = ("weights", "optimizer", "gradients", "activations", "logits", "gathered", "reference")
COLUMNS = (*PARTS, "KV pool", "graphs", "buffers", "others", "processes")  # KV pool and graphs belong to engines
# an unknown fact about a run -> how to make it known
UNKNOWN = {
    "the model's shapes are not known here": (
        "give a folder with the config.json of a decoder that has attention in each layer"
    ),
    "the longest micro-batch is not known before the prompts are read": (
        "give --rollout-max-prompt-len or --use-dynamic-batch-size, which bound its length"
    ),
    "the GPUs' memory is not known here": "name the GPUs, as in --plan-gpu h100:8",
}
# another placement is proposed if a rollout takes so many times as long as with it
SHORTER = 1.05
# --compile is proposed if a step without it takes more than this factor times the time with it
GAIN = 1.15


def verdict(plan: Plan) -> str:
    """One sentence about whether the run fits, and which change would make it fit."""
    needed = plan.needs()
    worst, *rest = sorted(needed, key=lambda name: -needed[name][0] / needed[name][1])
    where = "this machine has" if plan.shared else "tensors can use on a GPU"
    if needed[worst][0] <= needed[worst][1]:
        least = "at least " * (worst == "generate")  # the table has the whole KV pool, which may fill the memory
        return f"fits: {worst} needs most, {least}{_gigabytes(needed[worst])} that {where}"
    sentence = f"does not fit: {worst} needs {_gigabytes(needed[worst])} that {where}; {_remedy(plan, worst)}"
    # if neither a trainer nor an engine fits, each of them needs a change
    rest = [
        name for name in rest if _of_engine(plan, name) != _of_engine(plan, worst) and needed[name][0] > needed[name][1]
    ]
    if not rest:
        return sentence
    remedies = dict.fromkeys(_remedy(plan, name) for name in (worst, rest[0]))
    also = "".join(f"; {remedy}" for remedy in [*remedies][1:])
    return f"{sentence}; and {rest[0]} needs {needed[rest[0]][0] / 1e9:.1f} GB{also}"


def _of_engine(plan: Plan, phase: str) -> bool:
    """Whether the size of an engine determines how much memory ``phase`` needs."""
    return phase == "generate" or (phase == "sync" and (plan.args.colocate or plan.shared))


def _gigabytes(pair: tuple[float, float]) -> str:
    return f"{pair[0] / 1e9:.1f} of the {pair[1] / 1e9:.1f} GB"


def _remedy(plan: Plan, phase: str) -> str:
    """A change that would make ``phase`` fit."""
    if phase != "generate" and plan.keeps_engine:
        released = replace(plan, args=replace(plan.args, offload_rollout=True))
        need, room = released.needs()[phase]
        return (
            "without --no-offload-rollout it would fit"
            if need <= room
            else (
                f"without --no-offload-rollout, which leaves the engine in the GPU's memory, {_remedy(released, phase)}"
            )
        )
    if not _of_engine(plan, phase):
        remedies = " or ".join(plan.remedies())
        return f"{remedies} would fit" if remedies else "no known flag saves enough memory"
    serving = plan.serving
    share = plan.largest_share()
    if phase == "generate" and serving.static and serving.one() <= share * (plan.memory - CONTEXT):
        return f"--sglang-mem-fraction-static {share:.2f} would fit"
    sizes = [n for n in (2, 4, 8) if replace(serving, gpus=n).fits(plan.usable)]
    if plan.shared or not sizes:
        return "a smaller model would fit"
    wider = next((n for n in sizes if plan.engines * serving.gpus % n == 0), None)
    more = "" if wider else f" on {sizes[0]} GPUs"
    return f"--rollout-num-gpus-per-engine {wider or sizes[0]}{more} would fit"


def plan_lines(args: Args, machine: Machine) -> list[str]:
    """The lines of a dry run about memory, time and traffic."""
    plan = Plan.of(args, machine)
    if isinstance(plan, str):
        return ["will it fit (predicted)", f"  unknown: {plan}; {UNKNOWN[plan]}"]
    if not plan.phases():
        return []
    lines = [f"will it fit (predicted)\n  {verdict(plan)}", *_memory(plan)]
    if plan.ranks:
        lines += _settings(plan)
    if plan.device is not None:
        lines += ["how fast (predicted, if every response has the greatest length)", *_time(plan)]
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
    if plan.engines and plan.serving.static:
        yield "  SGLang's KV pool fills the memory that is left: a total of generate near the limit is normal"
    yield from _cache_capacity(plan)
    if not plan.shared:
        rest = plan.usable * (1 / USABLE - 1) / 1e9
        yield f"  on each GPU, {rest:.1f} GB more are left for CUDA, NCCL and the allocator's fragmentation"
        frozen = plan.load.width * plan.load.shapes.parameters * plan.load.others / plan.load.shards
        state = total(replace(plan.load, on_host=False).state())
        host = (state if plan.args.offload_train or plan.load.on_host else 0) + frozen
        reading = max(plan.load.reading() / 1e9, 0.1)
        yield f"  host memory for each rank while it reads the model: {reading:.1f} GB at most"
        if host:
            yield f"  host memory for each rank: {host / 1e9:.1f} GB of weights, moments and reference"
        args, weights = plan.args, plan.load.width * plan.load.shapes.parameters
        copied = args.engine_kind.memory.on_host(args.sglang_overrides, adapter_alone=args.sends_adapter)
        if args.offload_rollout and Content.WEIGHTS in copied:
            yield f"  host memory for each engine: {weights / 1e9:.1f} GB of weights, while its memory is released"
    if plan.ranks and plan.args.save:
        yield _on_disk(plan)


def _on_disk(plan: Plan) -> str:
    """Bytes of a checkpoint, and of all checkpoints that stay (docs/operations.md, "Disk")."""
    args, rollouts = plan.args, plan.args.num_rollout
    each = (4 if args.no_save_optim else 12) * plan.load.trained
    line = f"  disk: {'at most ' if args.optimizer == 'muon' else ''}{each / 1e9:.1f} GB for each checkpoint of --save"
    interval = args.save_retain_interval or args.save_interval
    if not rollouts or not interval or interval >= rollouts:
        return line
    # the last one stays too; those that do not stay are deleted when the next one is complete
    most = ceil(rollouts / interval) + bool(args.save_retain_interval)
    advice = "" if args.save_retain_interval else "; --save-retain-interval keeps fewer"
    return f"{line}, at most {most * each / 1e9:,.1f} GB for {most:,} of them at the same time{advice}"


def _cache_capacity(plan: Plan) -> Iterator[str]:
    """The number of sequences that the KV pool can hold, if it may be too small."""
    if not plan.engines:
        return
    each, wanted = plan.serving.kv_token() * plan.serving.context, min(plan.serving.sequences, plan.rows)
    capacity = int(plan.phases()["generate"]["KV pool"] / each)
    if capacity >= wanted:
        return
    share = plan.largest_share() if plan.serving.static else 0.0
    more = int((share * (plan.memory - CONTEXT) - plan.serving.generate(0)["weights"]) / each)
    remedy = (
        f"; --sglang-mem-fraction-static {share:.2f} would hold {min(more, wanted)}" if more > 1.2 * capacity else ""
    )
    yield f"  an engine's cache holds {capacity} of {wanted} sequences of the greatest length{remedy}"


def _settings(plan: Plan) -> Iterator[str]:
    """The largest micro-batch, and therefore the longest sample, with other settings."""
    load, kept, ranks = plan.load, plan.beside_training(), plan.summed
    contexts = [most for most in (load.shapes.context, plan.args.rollout_max_context_len) if most is not None]
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
        response = max(0, min(most, *contexts) - plan.work.prompt)
        yield f"  {words + mark:45}{(ranks * peak(tried) + kept) / 1e9:>10.1f}{most:>30,}{response:>12,}"


def _time(plan: Plan) -> Iterator[str]:
    device, costs = plan.device, plan.costs()
    assert device is not None
    yield f"  {'phase':14}{'seconds':>9}{'MFU':>6}   limited by"
    for name, seconds in plan.seconds().items():
        cost = costs.get(name)
        mfu, why = (f"{cost.mfu(device):.0%}", _limit(cost, device)) if cost else ("", _meanwhile(plan)[name])
        yield f"  {name:14}{seconds:>9.{1 if cost else 2}f}{mfu:>6}   {why}"
    rollouts = plan.args.num_rollout
    if rollouts and not plan.shared:
        yield f"  a rollout: {plan.rollout_seconds():.1f} s; all {rollouts:,}: {_hours(plan)}"
        yield "  evaluations and checkpoints are not counted"
    if not plan.shared:
        yield from _shorter(plan)
        yield from _compiled(plan)
        yield from _placement(plan, device)


def _limit(cost: Cost, device: Device) -> str:
    """The resource that limits the speed of a phase."""
    times = {
        "products": cost.operations / (device.rate * time.PRODUCTS),
        "memory bandwidth": cost.moved / (device.bandwidth * time.BYTES),
        "the engine's host": cost.waits,
        "the links between ranks": cost.sending if cost.sending >= cost.seconds(device) else 0.0,
    }
    return max(times, key=lambda name: times[name])


def _meanwhile(plan: Plan) -> dict[str, str]:
    """A description of the work between the phases."""
    args, alone = plan.args, plan.args.sends_adapter
    moving = {"release and resume": args.offload_rollout, "offload": args.offload_train}
    between = [*(name for name, happens in moving.items() if happens), "rewards", "the table"]
    what = "an adapter" if alone else "matrices, with the adapter merged into them" if plan.load.lora else "weights"
    return {
        "sync": f"{plan.pushed / 1e9:.1f} GB of {what}",
        "between": ", ".join(between),
    }


def _shorter(plan: Plan) -> Iterator[str]:
    """Seconds of a rollout whose average response is shorter. The engines then still wait for responses of the full
    length."""
    allowed = plan.work.response
    if plan.engines and plan.ranks and allowed > 4:
        shorter = replace(plan, work=replace(plan.work, response=allowed // 4, longest=allowed))
        seconds, rollout = shorter.seconds(), shorter.rollout_seconds()
        parts = f"generate {seconds['generate']:.1f}, train {seconds['train']:.1f}, a rollout {rollout:.1f} s"
        whole = f", all {_hours(shorter)}" if plan.args.num_rollout else ""
        yield f"  if the average length is a quarter of that: {parts}{whole}"


def _hours(plan: Plan) -> str:
    """The time of all rollouts, without evaluations and checkpoints."""
    return f"{(plan.args.num_rollout or 0) * plan.rollout_seconds() / 3600:,.1f} hours"


def _compiled(plan: Plan) -> Iterator[str]:
    """The gain of --compile, if it is large."""
    if not plan.ranks or plan.load.compiled:
        return
    device, plain = plan.device, plan.costs()["train"]
    assert device is not None
    compiled = plan.training(replace(plan.load, compiled=True), plan.ranks)["train"]
    if plain.seconds(device) > GAIN * compiled.seconds(device):
        gain = f"{compiled.seconds(device):.1f} s, at {compiled.mfu(device):.0%} MFU"
        yield f"  with --compile, training would take {gain}; the first step takes about a minute more"


def _placement(plan: Plan, device: Device) -> Iterator[str]:
    """Other placements that would be faster: another size of engines, and engines with and without --colocate."""
    sizes = [n for n in (1, 2, 4, 8) if replace(plan.serving, gpus=n).fits(plan.usable)]
    gpus = plan.ranks if plan.args.colocate else plan.ranks + plan.engines * plan.serving.gpus
    if not sizes or not plan.engines or not plan.ranks or gpus < max(2, sizes[0]):
        return
    width = sizes[0]
    serving = replace(plan.serving, gpus=width)
    pool = serving.generate(plan.usable)["KV pool"]
    beside = sum(seconds for name, seconds in plan.seconds().items() if name in ("sync", "between"))

    def generating(count: int) -> float:
        return time.generate(serving, plan.work, count // width, pool).seconds(device)

    def training(count: int) -> float:
        load = replace(plan.load, shards=min(plan.load.shards, count))
        return sum(cost.seconds(device) for cost in plan.training(load, count).values())

    turns = generating(gpus) + training(gpus) + beside
    between, sync = time.BETWEEN if plan.args.job.servers else 0.0, plan.seconds()["sync"]
    split = {
        count: max(generating(count) + between, training(gpus - count)) + sync for count in range(width, gpus, width)
    }
    now = plan.rollout_seconds()
    if turns < now / SHORTER:
        yield (
            f"  faster with --colocate and {gpus // width} engines of {width} GPU(s): {turns:.0f} s for a rollout "
            f"(--rollout-num-gpus-per-engine {width})"
        )
    best = min(split, key=lambda count: split[count], default=0)
    if best and split[best] < now / SHORTER:
        yield (
            f"  faster on separate GPUs, with --async-rollout and --rollout-num-gpus {best} of {gpus}: "
            f"{split[best]:.0f} s, weights one version old"
        )


def _traffic(plan: Plan) -> Iterator[str]:
    load, device, work = plan.load, plan.device, plan.work
    assert device is not None
    passes = max(1.0, work.tokens / plan.ranks / work.steps / load.tokens)
    node, replicas = device.node, []
    # the run's own number of ranks too
    worlds = sorted({*WORLDS, plan.ranks})
    yield f"  {'GPUs':>6}{'GB a rank':>11}{'seconds':>9}   {'with --dp-replicate-size':>26}{'GB':>8}{'seconds':>9}"
    for ranks in worlds:
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
        yield (
            f"  from {replicas[0]} GPUs on, --dp-replicate-size NODES sends in less time: it gathers weights within "
            "a node"
        )
    elif replicas:
        yield f"  a replica in each node would be faster, but it does not fit a node's {node} GPU(s)"
    yield f"  a weight sync sends {plan.buckets} bucket(s) of --update-weight-buffer-size" + (
        "; with 2147483648 there would be fewer waits" if plan.buckets > 32 else ""
    )
