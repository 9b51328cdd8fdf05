"""The model, its checkpoints, and where training ranks and engines run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from slimelite.arguments.conditions import (
    CHECKPOINT,
    GPUS,
    LOAD,
    OWN_ENGINES,
    REFERENCE,
    SAVE,
    SCORES,
    SYNC,
    TRAINING,
    OfJob,
    use_of,
    when,
)
from slimelite.arguments.flags import ALWAYS, flag, resolved
from slimelite.models.families import FAMILIES


class EnginePlace(NamedTuple):
    """The place of one engine: ``width`` GPUs, starting at number ``first_gpu`` of the engines' GPUs, and its own
    SGLang options."""

    first_gpu: int
    width: int
    overrides: dict[str, Any]


@dataclass(frozen=True)
class ClusterArgs(OfJob):
    """Cluster.

    On a machine without GPUs, a "GPU" in these flags means a training rank or an engine, and every count defaults to 1.
    """

    train_backend: Literal["fsdp", "megatron"] = flag(
        "fsdp",
        "both values mean that FSDP2 trains a Hugging Face model; megatron is the name in slime's scripts",
        ALWAYS,
    )
    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "training and inference run on this device", ALWAYS, auto="cuda if a GPU is found, else cpu"
    )
    launcher: Literal["ray", "local", "torchrun"] = flag(
        None,
        "with ray, workers are Ray actors. With local, all workers run in one process, for debugging. With torchrun, "
        "the processes of `torchrun --nproc-per-node 8 train.py ...` are the training ranks, and no engine runs",
        ALWAYS,
        auto="torchrun under torchrun, else ray",
    )
    actor_num_nodes: int = flag(1, "training runs on this many nodes", ALWAYS, at_least=1)
    actor_num_gpus_per_node: int = flag(
        None,
        "each training node has this many ranks",
        ALWAYS,
        at_least=1,
        auto="the GPUs of this machine, at most 8; 1 on a CPU",
    )
    rollout_num_gpus: int = flag(
        None,
        "inference runs on this many GPUs",
        OWN_ENGINES,
        at_least=0,
        auto="with --colocate, as many as for training; on a CPU, as many as --rollout-num-gpus-per-engine; "
        "else required",
    )
    rollout_num_gpus_per_engine: int = flag(
        1, "one engine uses this many GPUs (tensor parallelism in SGLang)", OWN_ENGINES
    )
    colocate: bool = flag(
        False,
        "training and inference share the GPUs and take turns. On GPUs, --offload-train and --offload-rollout are then "
        "on by default",
        SYNC,
    )
    offload: bool = flag(False, "this flag turns on --offload-train and --offload-rollout", SYNC & GPUS)
    offload_train: bool = flag(
        None,
        "the trainer's state moves to host memory while responses are generated",
        SYNC & GPUS,
        auto="on with --colocate on GPUs",
    )
    offload_rollout: bool = flag(
        None, "engines release their memory while training runs", SYNC & GPUS, auto="on with --colocate on GPUs"
    )
    distributed_backend: Literal["nccl", "gloo"] = flag(
        None, "the trainer's collectives use this library", TRAINING, auto="nccl on GPUs, else gloo"
    )
    distributed_timeout_minutes: int = flag(
        10, "a collective that takes longer than this fails [min]", TRAINING, at_least=1, at_most=525_600
    )
    hang_timeout: float = flag(
        60.0,
        "if a worker is stopped (SIGSTOP) or all ranks hang for this long [s], the run ends with an error that names "
        "the worker. 0 turns this check off (docs/reliability.md)",
        ALWAYS,
        at_least=0,
    )
    max_restarts: int = flag(
        0,
        "a run that ends because of a dead or frozen worker, a failure of Ray or a lost machine is restarted, at most "
        "this many times. A restart resumes from the newest checkpoint in --save (docs/reliability.md)",
        SAVE.strictly()
        & when("a run without torchrun, which has its own --max-restarts", lambda a: a.launcher != "torchrun"),
        at_least=0,
    )
    restart_wait: float = flag(
        600.0,
        "a restart waits at most this long for Ray and for the devices that it needs [s]",
        use_of("--max-restarts"),
        at_least=0,
    )
    elastic: bool = flag(
        False,
        "a restart may use fewer nodes than the run asked for. After a restart with fewer nodes, ranks and engines are "
        "assigned to the nodes that answer (docs/reliability.md)",
        use_of("--max-restarts")
        & when("--launcher ray", lambda a: a.launcher == "ray")
        & when("a run without --sglang-config, which fixes the place of each engine", lambda a: not a.sglang_config),
    )
    cpu_threads: int = flag(
        1,
        "each rank and engine computes with this many threads; more than 1 helps only on idle cores",
        ALWAYS,
        at_least=1,
        at_most=4096,
    )
    train_env_vars: dict[str, Any] = flag(
        {},
        'training actors get these environment variables, as JSON: {"NAME": "value"}. Do not give a secret here, '
        "because everyone on the machine can read a command line. Export it before Ray starts instead",
        TRAINING & when("--launcher ray (with another launcher, export the variables)", lambda a: a.launcher == "ray"),
    )

    # rollout_num_gpus / rollout_num_gpus_per_engine
    num_engines: int = resolved(1)
    # the place of each engine of --sglang-config; if empty, engines of equal width take the GPUs one after the other
    engine_places: tuple[EnginePlace, ...] = resolved(())

    @property
    def training_ranks(self) -> int:
        """The number of training ranks on all nodes."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    def engine_place(self, index: int) -> EnginePlace:
        """Where engine number ``index`` runs."""
        width = self.rollout_num_gpus_per_engine
        return self.engine_places[index] if self.engine_places else EnginePlace(index * width, width, {})


@dataclass(frozen=True)
class ArchitectureArgs:
    """Model architecture (Megatron's names).

    If --hf-checkpoint has a config.json, these flags are compared with it, and a difference is an error. Without a
    config.json, these flags define a new Qwen2, Qwen3 or Llama model, which needs a tokenizer.
    """

    num_layers: int | None = flag(None, "the model has this many transformer layers", ALWAYS, at_least=1)
    hidden_size: int | None = flag(None, "width of the residual stream", ALWAYS, at_least=1)
    ffn_hidden_size: int | None = flag(None, "width of the MLP", ALWAYS, at_least=1)
    num_attention_heads: int | None = flag(None, "attention has this many query heads", ALWAYS, at_least=1)
    group_query_attention: bool = flag(
        False,
        "attention has only --num-query-groups key/value heads, instead of one for each query head",
        use_of("--num-query-groups"),
    )
    num_query_groups: int | None = flag(None, "attention has this many key/value heads", ALWAYS, at_least=1)
    kv_channels: int | None = flag(None, "width of one attention head", ALWAYS, at_least=1)
    vocab_size: int | None = flag(None, "the embedding has this many rows", ALWAYS, at_least=1)
    max_position_embeddings: int | None = flag(
        None, "the model was built for contexts up to this length [tokens]", ALWAYS, at_least=1
    )
    normalization: Literal["RMSNorm", "LayerNorm"] | None = flag(
        None, "type of the normalization layers; a new model has RMSNorm", ALWAYS
    )
    norm_epsilon: float | None = flag(None, "epsilon of the normalization layers", ALWAYS)
    rotary_base: float | None = flag(None, "base of the rotary embedding", ALWAYS)
    rotary_percent: float | None = flag(None, "this fraction of each head is rotated", ALWAYS)
    use_rotary_position_embeddings: bool = flag(False, "the model uses rotary position embeddings", ALWAYS)
    position_embedding_type: Literal["rope", "learned_absolute", "none"] | None = flag(
        None, "type of the position embedding", ALWAYS
    )
    use_rope_scaling: bool = flag(
        False, "the rotary embedding is scaled for long contexts, as in Llama 3.1 and later", ALWAYS
    )
    rotary_scaling_factor: float | None = flag(
        None,
        "the rotary embedding is scaled by this factor",
        when("--use-rope-scaling if the model is new", lambda a: a.use_rope_scaling or a.model_config is None),
    )
    swiglu: bool = flag(False, "the MLP is a SwiGLU", ALWAYS)
    qk_layernorm: bool = flag(False, "queries and keys have a norm (Qwen3)", ALWAYS)
    add_qkv_bias: bool = flag(False, "the query, key and value projections have a bias (Qwen2)", ALWAYS)
    disable_bias_linear: bool = flag(
        False, "linear layers other than the query, key and value projections have no bias", ALWAYS
    )
    untie_embeddings_and_output_weights: bool = flag(
        False, "the LM head has its own weights, and does not share those of the embedding", ALWAYS
    )

    @property
    def describes_model(self) -> bool:
        """Whether the flags describe a whole model, as the array of a ``models/*.sh`` file does. This is the case if
        ``--num-layers`` is given."""
        return self.num_layers is not None


@dataclass(frozen=True)
class ModelArgs(ArchitectureArgs, OfJob):
    """Model."""

    hf_checkpoint: str | None = flag(
        None, "weights, config and tokenizer come from this Hugging Face folder or hub id", ALWAYS, metavar="PATH"
    )
    tokenizer: str = flag(
        None, "the tokenizer comes from this folder or hub id", ALWAYS, metavar="PATH", auto="--hf-checkpoint"
    )
    ref_load: str | None = flag(
        None,
        "the reference model has the weights in this folder or of this hub id (Hugging Face format)",
        REFERENCE,
        metavar="PATH",
        auto="--hf-checkpoint",
    )
    ref_update_interval: int | None = flag(
        None, "the policy's weights are copied into the reference model after every N rollouts", REFERENCE, at_least=1
    )
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = flag(
        "auto", "training uses this attention kernel", TRAINING, auto="the fastest kernel that works on this machine"
    )

    # config of a new model that the architecture flags define; None: --hf-checkpoint has its own
    model_config: dict[str, Any] | None = resolved(None)


@dataclass(frozen=True)
class CheckpointArgs(OfJob):
    """Checkpoints."""

    load: str | None = flag(
        None,
        "the run resumes from the newest checkpoint in this folder. If there is no checkpoint yet, a new run starts. "
        "If the folder is a Hugging Face model, a new run starts with its weights",
        ALWAYS,
        metavar="DIR",
    )
    save: str | None = flag(
        None,
        "checkpoints are written to this folder",
        TRAINING
        & when(
            "--save-interval",
            lambda a: a.save_interval or a.save_interval_minutes,
            ": the number of rollouts from one checkpoint to the next",
        ).strictly(),
        metavar="DIR",
    )
    save_interval: int | None = flag(
        None,
        "a checkpoint is saved after every N rollouts, and after the last one",
        TRAINING & when("--save", lambda a: a.save, ": the folder for checkpoints").strictly(),
        at_least=1,
    )
    save_interval_minutes: float | None = flag(
        None,
        "a checkpoint is also saved after a rollout if the last checkpoint is at least this old [min]",
        TRAINING & when("--save", lambda a: a.save, ": the folder for checkpoints").strictly(),
        above=0,
    )
    async_save: bool = flag(
        False,
        "training continues while a checkpoint is written. The training state is first copied to host memory, which "
        "must have room for the copy",
        SAVE,
    )
    save_retain_interval: int | None = flag(
        None,
        "the checkpoint of every N-th rollout is kept. Any other checkpoint is deleted when a newer checkpoint is "
        "complete",
        SAVE,
        at_least=1,
    )
    save_hf: str | None = flag(
        None,
        "the model is also written to this folder in Hugging Face format. {rollout_id} in the path is replaced by the "
        "number of the rollout",
        TRAINING,
        metavar="TEMPLATE",
    )
    save_hf_dtype: Literal["fp32", "bf16", "fp16"] | None = flag(
        None,
        "the weights of --save-hf are written in this dtype",
        TRAINING
        & when("--save-hf", lambda a: a.save_hf)
        & when("a whole model, because adapters are saved in fp32", lambda a: a.lora_rank == 0 or a.lora_merge),
        auto="the dtype of --hf-checkpoint; for a new model, the dtype of training",
    )
    push_to_hub: str | None = flag(
        None,
        "when the run ends, its last --save-hf model is uploaded to this repository of the Hugging Face hub. With "
        "--save-best, the best model is uploaded. If the repository does not exist, it is created",
        TRAINING.strictly() & when("--save-hf", lambda a: a.save_hf).strictly(),
        metavar="ORG/NAME",
    )
    hub_private: bool = flag(
        False,
        "if --push-to-hub creates a repository, the repository is private",
        when("--push-to-hub", lambda a: a.push_to_hub),
    )
    save_best: bool = flag(
        False,
        "the model with the best evaluation so far is kept. With --save, the checkpoint of this model is kept, and "
        "best_checkpointed_iteration.txt names this checkpoint. With --save-hf, the model is also written to a folder "
        "whose name ends with -best",
        TRAINING.strictly()
        & SCORES.strictly()
        & when("--save or --save-hf", lambda a: a.save or a.save_hf, ": the folder for the best model").strictly(),
    )
    ckpt_step: int | None = flag(
        None, "the run resumes from the checkpoint of this rollout instead of the newest checkpoint", LOAD.strictly()
    )
    load_fallback: bool = flag(
        False,
        "if a file of the newest checkpoint is damaged or missing, the run resumes from the newest complete "
        "checkpoint before it",
        CHECKPOINT,
    )
    no_save_optim: bool = flag(False, "checkpoints do not contain the optimizer state", SAVE)
    no_load_optim: bool = flag(False, "the run resumes the weights, but starts with a fresh optimizer", CHECKPOINT)
    no_load_rng: bool = flag(False, "the run starts with a fresh random state", CHECKPOINT)
    finetune: bool = flag(
        False,
        "the run loads only the weights from --load. Optimizer, random state and rollout count start fresh",
        LOAD.strictly(),
    )
    start_rollout_id: int = flag(
        None,
        "the first rollout has this number",
        ALWAYS,
        at_least=0,
        auto="the rollout after the checkpoint's, or 0 without a checkpoint",
    )
    override_lr_scheduler: bool = flag(
        False, "on resume, the learning-rate flags override the checkpoint's schedule", CHECKPOINT
    )

    # the checkpoint under --load to resume from; None: a fresh start
    resume_directory: str | None = resolved(None)


def model_config_from_flags(args: ArchitectureArgs) -> dict[str, Any]:
    """The Hugging Face config of the new model that the architecture flags define.

    With ``--add-qkv-bias`` the model is a Qwen2, with ``--qk-layernorm`` a Qwen3, and without these flags a Llama.

    Raises:
        ValueError: flags are missing, or ask for a feature that these three families do not have.
    """
    needed = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
    if missing := ["--" + name.replace("_", "-") for name in needed if getattr(args, name) is None]:
        raise ValueError(
            f"a new model needs {', '.join(missing)} as well (or name an existing model with --hf-checkpoint)"
        )
    if args.normalization == "LayerNorm" or args.position_embedding_type in ("learned_absolute", "none"):
        raise ValueError(
            "a new model is a Qwen2, Qwen3 or Llama. It has RMSNorm and rotary positions, not --normalization "
            f"{args.normalization} --position-embedding-type {args.position_embedding_type}"
        )
    kinds = [f for f in FAMILIES.values() if f.embedded and (f.qkv_bias is True) == args.add_qkv_bias]
    family = next((f for f in kinds if f.qk_norm == args.qk_layernorm), None)
    if family is None:
        raise ValueError("a new model has --add-qkv-bias (Qwen2) or --qk-layernorm (Qwen3), not both")
    if args.rotary_percent not in (None, 1.0):
        raise ValueError(f"a new model rotates whole heads; leave out --rotary-percent {args.rotary_percent}")
    assert args.hidden_size is not None
    assert args.num_attention_heads is not None
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rotary_base or 10000.0}
    if args.use_rope_scaling:  # Megatron's constants for Llama 3.1 and later
        rope |= {"rope_type": "llama3", "factor": args.rotary_scaling_factor or 8.0}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {
        "model_type": family.name,
        "architectures": [family.architecture],
        "num_hidden_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": args.num_query_groups or args.num_attention_heads,
        "head_dim": args.kv_channels or args.hidden_size // args.num_attention_heads,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_position_embeddings or 32768,
        "rms_norm_eps": args.norm_epsilon or 1e-6,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
    }
