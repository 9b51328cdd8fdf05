"""The model, its checkpoints, and where training ranks and engines run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from slimelite.arguments.flags import flag, resolved
from slimelite.families import FAMILIES


class EnginePlace(NamedTuple):
    """One engine: ``width`` GPUs from number ``first_gpu`` of the engines' GPUs on, with SGLang options of its own."""

    first_gpu: int
    width: int
    overrides: dict[str, Any]


@dataclass(frozen=True)
class ClusterArgs:
    """Cluster.

    A "GPU" here is a training rank or an engine on a machine without GPUs, where every count defaults to 1.
    """

    train_backend: Literal["fsdp", "megatron"] = flag(
        "fsdp", "the trainer is FSDP2 over Hugging Face models; megatron, as slime's scripts say, means it too"
    )
    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "what to compute on", auto="cuda where a GPU is found, else cpu"
    )
    launcher: Literal["ray", "local"] = flag("ray", "Ray actors, or the same classes in this one process (debugging)")
    actor_num_nodes: int = flag(1, "training nodes")
    actor_num_gpus_per_node: int = flag(
        None, "training ranks on each node", auto="the GPUs of this machine, at most 8; 1 on a CPU"
    )
    rollout_num_gpus: int = flag(
        None, "GPUs for inference", auto="those of training with --colocate, one engine on a CPU, else required"
    )
    rollout_num_gpus_per_engine: int = flag(1, "GPUs of one engine (tensor parallel in SGLang)")
    colocate: bool = flag(False, "training and inference share the GPUs and take turns; turns both offloads on")
    offload: bool = flag(False, "--offload-train and --offload-rollout")
    offload_train: bool = flag(
        None, "move the trainer to host memory during rollout", auto="on with --colocate on GPUs"
    )
    offload_rollout: bool = flag(None, "release the engines' memory while training", auto="on with --colocate on GPUs")
    distributed_backend: Literal["nccl", "gloo"] = flag(None, "collectives of training", auto="nccl on GPUs, else gloo")
    distributed_timeout_minutes: int = flag(10, "a collective that takes longer than this fails [min]")
    cpu_threads: int = flag(1, "compute threads of each rank and engine; more than 1 pays on idle cores only")
    train_env_vars: dict[str, Any] = flag(
        {},
        'environment of the training actors, JSON: {"NAME": "value"}; a secret is better exported before Ray starts: '
        "everyone on the machine can read a command line",
    )

    # rollout_num_gpus / rollout_num_gpus_per_engine
    num_engines: int = resolved(1)
    # of each engine, where --sglang-config makes them differ; else they stand side by side, alike
    engine_places: tuple[EnginePlace, ...] = resolved(())

    def engine_place(self, index: int) -> EnginePlace:
        """Where engine number ``index`` runs."""
        width = self.rollout_num_gpus_per_engine
        return self.engine_places[index] if self.engine_places else EnginePlace(index * width, width, {})


@dataclass(frozen=True)
class ArchitectureArgs:
    """Model architecture (Megatron's names).

    With a checkpoint they are checked against its config.json, and a mismatch is an error; with a tokenizer and no
    weights they define a new Qwen2, Qwen3 or Llama model.
    """

    num_layers: int | None = flag(None, "transformer layers")
    hidden_size: int | None = flag(None, "width of the residual stream")
    ffn_hidden_size: int | None = flag(None, "width of the MLP")
    num_attention_heads: int | None = flag(None, "query heads")
    group_query_attention: bool = flag(False, "--num-query-groups key/value heads instead of one for each query head")
    num_query_groups: int | None = flag(None, "key/value heads")
    kv_channels: int | None = flag(None, "width of one head")
    vocab_size: int | None = flag(None, "rows of the embedding")
    max_position_embeddings: int | None = flag(None, "longest context the model was built for [tokens]")
    normalization: Literal["RMSNorm", "LayerNorm"] | None = flag(None, "kind of norm; the models here use RMSNorm")
    norm_epsilon: float | None = flag(None, "epsilon of the norms")
    rotary_base: float | None = flag(None, "base of the rotary embedding")
    rotary_percent: float | None = flag(None, "share of a head that is rotated")
    use_rotary_position_embeddings: bool = flag(False, "rotary position embedding")
    position_embedding_type: Literal["rope", "learned_absolute", "none"] | None = flag(
        None, "kind of position embedding"
    )
    use_rope_scaling: bool = flag(False, "stretched rotary embedding (Llama 3.1 and later)")
    rotary_scaling_factor: float | None = flag(None, "factor of that stretch")
    swiglu: bool = flag(False, "SwiGLU MLP")
    qk_layernorm: bool = flag(False, "norm of queries and keys (Qwen3)")
    add_qkv_bias: bool = flag(False, "bias of the query, key and value projections (Qwen2)")
    disable_bias_linear: bool = flag(False, "no bias in the other linear layers")
    untie_embeddings_and_output_weights: bool = flag(False, "an LM head of its own, not the embedding")

    @property
    def describes_model(self) -> bool:
        """Whether a model's flags (a ``models/*.sh`` array) were given at all."""
        return self.num_layers is not None


@dataclass(frozen=True)
class ModelArgs(ArchitectureArgs):
    """Model."""

    hf_checkpoint: str | None = flag(
        None, "Hugging Face model folder or hub id: weights, config and tokenizer", metavar="PATH"
    )
    tokenizer: str = flag(None, "tokenizer folder or hub id", metavar="PATH", auto="--hf-checkpoint")
    ref_load: str | None = flag(
        None, "weights of the reference model (Hugging Face format)", metavar="PATH", auto="--hf-checkpoint"
    )
    ref_update_interval: int | None = flag(None, "copy the policy into the reference every this many rollouts")
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = flag(
        "auto", "attention kernel of training", auto="the fastest that works here"
    )

    # config of a new model that the architecture flags define; None: --hf-checkpoint has its own
    model_config: dict[str, Any] | None = resolved(None)


@dataclass(frozen=True)
class CheckpointArgs:
    """Checkpoints."""

    load: str | None = flag(
        None,
        "resume from the newest checkpoint in this folder; without one start afresh, in a Hugging Face folder with its "
        "weights",
        metavar="DIR",
    )
    save: str | None = flag(None, "folder for checkpoints", metavar="DIR")
    save_interval: int | None = flag(None, "save every this many rollouts, and after the last one")
    save_retain_interval: int | None = flag(
        None,
        "keep the checkpoints of every this many rollouts; any other is deleted when the next one is complete",
    )
    save_hf: str | None = flag(
        None, "also write the model in Hugging Face format here; {rollout_id} is replaced", metavar="TEMPLATE"
    )
    ckpt_step: int | None = flag(None, "resume from the checkpoint of this rollout instead of the newest")
    load_fallback: bool = flag(
        False, "when a file of the checkpoint is damaged or missing, take the newest whole checkpoint before it"
    )
    no_save_optim: bool = flag(False, "leave the optimizer state out of checkpoints")
    no_load_optim: bool = flag(False, "resume the weights only, with a fresh optimizer")
    no_load_rng: bool = flag(False, "resume without the random state")
    finetune: bool = flag(False, "take the weights of --load only: fresh optimizer, random state and rollout count")
    start_rollout_id: int = flag(None, "number of the first rollout", auto="one after the checkpoint's, else 0")
    override_lr_scheduler: bool = flag(False, "on resume the flags win over the checkpoint's schedule")

    # the checkpoint under --load to resume from; None: a fresh start
    resume_directory: str | None = resolved(None)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """What ``config`` (the content of config.json) says of the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def model_config_from_flags(args: ArchitectureArgs) -> dict[str, Any]:
    """The Hugging Face config of the new model that the architecture flags describe.

    ``--add-qkv-bias`` makes it a Qwen2, ``--qk-layernorm`` a Qwen3, neither a Llama.

    Raises:
        ValueError: flags are missing, or ask for what these three families do not have.
    """
    needed = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
    if missing := ["--" + name.replace("_", "-") for name in needed if getattr(args, name) is None]:
        raise ValueError(
            f"a new model needs {', '.join(missing)} as well (or name an existing one with --hf-checkpoint)"
        )
    if args.normalization == "LayerNorm" or args.position_embedding_type in ("learned_absolute", "none"):
        raise ValueError(
            "a new model is a Qwen2, Qwen3 or Llama: RMSNorm and rotary positions, not --normalization "
            f"{args.normalization} --position-embedding-type {args.position_embedding_type}"
        )
    kinds = [f for f in FAMILIES.values() if f.embedded and (f.qkv_bias is True) == args.add_qkv_bias]
    family = next((f for f in kinds if f.qk_norm == args.qk_layernorm), None)
    if family is None:
        raise ValueError("a new model has --add-qkv-bias (Qwen2) or --qk-layernorm (Qwen3), not both")
    if args.rotary_percent not in (None, 1.0):
        raise ValueError(f"a new model rotates whole heads, not --rotary-percent {args.rotary_percent}")
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
