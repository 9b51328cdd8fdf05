"""The kind of a run, and the conditions under which flags have an effect.

Only this module derives the kind of a run from its flags; other modules read this kind as ``args.job``. A condition is
a test of the complete arguments, with words for messages ("needs ...").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.algorithms.losses import CORRECTIONS, LOSSES
from slimelite.arguments.flags import Condition, Needs, Words
from slimelite.base.registry import R, Registry
from slimelite.engines.registry import ENGINES
from slimelite.rewards.rules import RULES


@dataclass(frozen=True)
class Job:
    """The kind of a run.

    ``trains``: the run has training ranks. ``engines``: who owns the inference engines ("own" or "external"); None: the
    run has no engines. ``servers``: engines are HTTP servers. ``syncs``: trained weights are sent to engines.
    ``evaluates``: the run has evaluations. ``sampled``: the run learns from responses that were sampled, in this run or
    an earlier one. If False, the responses are in the data, so they have no temperature and no old policy. ``saved``:
    the files of rollouts to replay, with ``{rollout_id}``; None: rollouts are generated. ``documents``: the run learns
    from documents, which are packed into sequences. ``loss``: the family of the loss. ``gpus``: the run computes on
    GPUs. ``local``: the run is one process, without Ray. ``revives``: an engine that dies is restarted.
    """

    trains: bool
    engines: Literal["own", "external"] | None
    servers: bool
    syncs: bool
    evaluates: bool
    sampled: bool
    saved: str | None
    documents: bool
    loss: Literal["policy", "paired", "supervised", "custom"]
    gpus: bool
    local: bool
    revives: bool

    @classmethod
    def of(cls, args: Any) -> Job:
        """The kind of run that the flags ``args`` ask for."""
        loss, trains = LOSSES[args.loss_type], not args.debug_rollout_only
        engines: Literal["own", "external"] = "external" if args.rollout_external_engine_addrs else "own"
        family: Literal["policy", "paired", "supervised", "custom"] = (
            "paired" if loss.paired else "policy" if loss.policy else "supervised" if loss.supervised else "custom"
        )
        runs_engines = not args.debug_train_only
        # until `derive` has chosen one, the engine is "auto"
        servers = args.rollout_backend in ENGINES and ENGINES[args.rollout_backend].server is not None
        return cls(
            trains=trains,
            engines=engines if runs_engines else None,
            servers=servers,
            syncs=trains and runs_engines,
            evaluates=bool(args.eval_interval) and bool(runs_engines or args.eval_bpb),
            sampled=not loss.supervised,
            saved=args.load_debug_rollout_data,
            documents=loss.documents,
            loss=family,
            gpus=args.device == "cuda",
            local=args.launcher == "local",
            revives=(servers and args.use_fault_tolerance)
            or (runs_engines and engines == "own" and args.launcher == "ray"),
        )


class OfJob:
    """Base class of the flag groups. The property ``job`` tells each group the kind of the run."""

    @cached_property
    def job(self) -> Job:
        """The kind of the run."""
        return Job.of(self)


def gpus_of(config: Mapping[str, Any]) -> int:
    """The number of GPUs of a run with the resolved arguments ``config`` (config.json); 0 on a CPU."""
    if config.get("device") != "cuda":
        return 0
    ranks = 0 if config["debug_rollout_only"] else config["actor_num_nodes"] * config["actor_num_gpus_per_node"]
    engines = 0 if config["debug_train_only"] else config["rollout_num_gpus"]
    return max(ranks, engines) if config["colocate"] else ranks + engines


def when(words: Words, holds: Callable[[Any], object], why_not: str = "") -> Needs:
    """One condition. ``holds`` tests the arguments. Messages describe the condition by ``words``, followed by
    ``why_not``."""
    return Needs((Condition(words, holds, why_not),))


def use_of(option: str) -> Needs:
    """The condition that ``option`` has a value or is on."""
    name = option.removeprefix("--").replace("-", "_")
    return when(option, lambda args: getattr(args, name))


def rule_reads(flag: str) -> Needs:
    """The condition that the run may use a reward rule whose result depends on ``flag``. Without --rm-type, the
    condition holds, because any sample may name such a rule."""

    def reads(name: str) -> bool:
        return name in RULES and flag in (RULES[name].needs, *RULES[name].reads)

    def holds(args: Any) -> bool:
        chosen = [args.rm_type, *(dataset.rm_type for dataset in args.eval_datasets)]
        return any(name is None or reads(name) for name in chosen)

    return when(lambda: f"--rm-type {' or '.join(filter(reads, RULES))}", holds)


def named(registry: Registry[R], fact: Callable[[R], object]) -> Callable[[], str]:
    """A function that returns a text: the option of ``registry``, and the names of the records with this ``fact``."""

    def words() -> str:
        names = [name for name, record in registry.items() if fact(record)]
        return f"{registry.option} " + " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))

    return words


def chosen(registry: Registry[R], fact: Callable[[R], object]) -> Needs:
    """The condition that the option of ``registry`` names a record that satisfies ``fact``."""
    name = registry.option.removeprefix("--").replace("-", "_")
    return when(named(registry, fact), lambda args: fact(registry[getattr(args, name)]))


# which parts of the loop run
TRAINING = when("training", lambda a: a.job.trains, ", which --debug-rollout-only turns off")
INFERENCE = when("engines", lambda a: a.job.engines, ", which --debug-train-only turns off")
SYNC = TRAINING & INFERENCE
NEW_ROLLOUTS = when("new rollouts", lambda a: not a.job.saved, ", but --load-debug-rollout-data replays saved rollouts")
# --loss-type sft_loss without evaluation runs no engine; a user's rollout function may sample without an engine
SAMPLING = when("a run that samples responses", lambda a: a.job.engines or (a.rollout_function_path and a.job.sampled))
EVALUATION = INFERENCE & use_of("--eval-interval")
MEASURED = when("engines or --eval-bpb", lambda a: a.job.engines or a.eval_bpb)
SCORES = MEASURED & use_of("--eval-interval")
TASKS = EVALUATION & when("--eval-tasks", lambda a: a.eval_tasks or any(d.task for d in a.eval_datasets))

# where it runs
GPUS = when("GPUs", lambda a: a.job.gpus)
OWN_ENGINES = INFERENCE & when("a run without --rollout-external-engine-addrs", lambda a: a.job.engines == "own")
EMBEDDED = INFERENCE & when("--rollout-backend embedded", lambda a: a.rollout_backend == "embedded")
SGLANG = INFERENCE & when("--rollout-backend sglang", lambda a: a.job.servers)

# losses
POLICY = chosen(LOSSES, lambda loss: not loss.supervised)
POLICY_TRAINING = TRAINING & POLICY
POLICY_SAMPLING = SAMPLING & POLICY
POLICY_LOSS = TRAINING & chosen(LOSSES, lambda loss: loss.policy)
SUPERVISED = chosen(LOSSES, lambda loss: loss.supervised)
PAIRS = chosen(LOSSES, lambda loss: loss.paired)
COMPARED = chosen(LOSSES, lambda loss: loss.compares)
DPO = chosen(LOSSES, lambda loss: "dpo_loss" in loss.reads)
KTO = chosen(LOSSES, lambda loss: "kto_desirable_weight" in loss.reads)
ORPO = chosen(LOSSES, lambda loss: "orpo_lambda" in loss.reads)
DOCUMENTS = chosen(LOSSES, lambda loss: loss.documents)
TEXTS = DOCUMENTS | use_of("--eval-bpb")
ADVANTAGES = when("a loss with advantages", lambda a: a.job.sampled and a.compute_advantages_and_returns)
# REFERENCE, for flags that need a policy loss
POLICY_KL = POLICY_TRAINING & when("a KL coefficient above 0 or --log-ref-kl", lambda a: a.use_reference)
REFERENCE = TRAINING & when(
    "a KL coefficient above 0, --log-ref-kl, or --loss-type dpo_loss or kto_loss", lambda a: a.use_reference
)
CRITIC = TRAINING & when(named(ESTIMATORS, lambda e: e.needs_critic), lambda a: a.use_critic)
TIS = POLICY_LOSS & chosen(CORRECTIONS, lambda correction: "tis_clip" in correction.reads)
MIS = POLICY_LOSS & when("--correction mis", lambda a: a.correction == "mis")
REJECTION = MIS & use_of("--mis-rejection-level")
DISTILLATION = use_of("--use-opd")

# one flag needs another
DRY_RUN = use_of("--dry-run")
LOAD = use_of("--load")
CHECKPOINT = TRAINING & when("a checkpoint in --load", lambda a: a.load and a.load != a.hf_checkpoint)
SAVE = TRAINING & use_of("--save")
LORA = TRAINING & when("--lora-rank", lambda a: a.lora_rank or a.critic_lora_rank)
DYNAMIC_BATCH = TRAINING & use_of("--use-dynamic-batch-size")
MUON = TRAINING & when("--optimizer muon", lambda a: a.optimizer == "muon")
WSD = TRAINING & when("--lr-decay-style WSD", lambda a: a.lr_decay_style == "WSD")
DECAY = TRAINING & when("a --lr-decay-style other than constant", lambda a: a.lr_decay_style != "constant")
END_OF_DECAY = TRAINING & when(
    "a --lr-decay-style other than constant and inverse-square-root",
    lambda a: a.lr_decay_style not in ("constant", "inverse-square-root"),
)
WARMUP_SHARE = TRAINING & use_of("--lr-warmup-fraction")
WARMUP = TRAINING & when(
    "--lr-warmup-iters or --lr-warmup-fraction",
    lambda a: a.lr_warmup_iters or a.lr_warmup_fraction or a.critic_lr_warmup_iters,
)
WANDB = use_of("--use-wandb")
TENSORBOARD = use_of("--use-tensorboard")
PROMETHEUS = use_of("--use-prometheus")
PROFILER = use_of("--use-pytorch-profiler")
PROFILED_STEPS = (
    TRAINING
    & PROFILER
    & when("a run without --profile-rollouts (which overrides this flag)", lambda a: not a.profile_rollouts)
)
MEMORY_HISTORY = TRAINING & use_of("--record-memory-history")
CI = TRAINING & use_of("--ci-test")
