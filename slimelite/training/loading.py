"""Reads models from Hugging Face folders, checks them before a run starts, and shards them.

A run on Ray checks the models in the process of its first trainer, which needs torch anyway. So the process of train.py
does not have to import torch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import init_empty_weights
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from slimelite.arguments import Args, LoraArgs, ModelArgs
from slimelite.base.heap import return_freed_memory
from slimelite.base.registry import function
from slimelite.engines.registry import ENGINES
from slimelite.models.checkpoints import STATE_FILE
from slimelite.models.files import (
    check_weights,
    has_weights,
    hub_folder,
    load_config,
    load_weights,
    restore_weights,
    saved_buffers,
    weight_bytes,
    weight_sources,
)
from slimelite.models.sources import everything
from slimelite.training.attention import ATTENTION, register_attention
from slimelite.training.lora import (
    adapters,
    add_adapters,
    check_quantizable,
    check_ranks,
    check_readable,
    quantize_frozen,
)
from slimelite.training.model import ForwardFlops, LanguageModel, PolicyModel, ScoringModel
from slimelite.training.packing import NoSmallModel, NotTrainable, Packing, may_pack, one_line
from slimelite.training.parallel import World, shard_model
from slimelite.training.quantized import SOURCE
from slimelite.training.recurrent import stateless_kernel

logger = logging.getLogger(__name__)

LM_HEAD = ("lm_head.weight",)
# reading speed of a slow disk [bytes/s]
SLOW_DISK = 50e6
# weight of a reward model's head; a language model does not have this weight
SCORE = "score.weight"
# operators whose results selective recomputation keeps
KEPT = {
    *("aten::mm", "aten::addmm", "aten::bmm", "torch_attn::_varlen_attn"),
    *(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn", "fused")),
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}


Model = TypeVar("Model", bound=LanguageModel)


def build_policy(args: Args, world: World, path: str | None, *, trainable: bool) -> PolicyModel:
    """The policy at ``path``; see `build_model`."""
    return build_model(args, world, path, lambda hf: PolicyModel(hf, args.log_probs_chunk_size), trainable=trainable)


def build_scorer(args: Args, world: World, path: str | None, *, trainable: bool) -> ScoringModel:
    """The reward model at ``path``. If the model at ``path`` is a language model, it gets a new score head; see
    `build_model`."""
    return build_model(args, world, path, ScoringModel, trainable=trainable)


def build_model(
    args: Args,
    world: World,
    path: str | None,
    wrap: Callable[[PreTrainedModel], Model],
    *,
    trainable: bool,
    new_head: bool = False,
) -> Model:
    """The causal LM at ``path``, on the device, sharded over the ranks. ``wrap``: a function that makes a
    `LanguageModel` of this causal LM.

    A trainable model has fp32 weights. With ``--gradient-checkpointing``, the backward pass recomputes its layers. With
    ``--recompute-granularity selective``, the backward pass recomputes all operations except matrix products and
    attention. Frozen weights have the dtype that the model computes in. With adapters (``--lora-rank``), most weights
    of a trainable model are frozen. With ``--load-in-4bit``, the weights of its frozen linear layers have 4 bits.

    Raises:
        ValueError: see `read_config`, `may_pack`, `load_model` and `add_adapters`.
    """
    config = read_config(path)
    attention = _attention(args, config)
    packing = _may_pack(args, config, world)
    if args.loss.scores:
        config = scoring_config(config)
    load = partial(load_model, str(path), config, seed=args.seed, attention=attention, scores=args.loss.scores)
    hf = load(empty=world.ranks > 1, new_head=new_head)
    if world.ranks > 1 and not _has_sources(hf, _folder(str(path), world), new_head=new_head) and world.rank == 0:
        hf = load(empty=False, new_head=new_head)
    if not trainable:
        hf.requires_grad_(False)
    elif args.lora_rank:
        add_adapters(hf, args, args.seed, "cpu" if world.rank == 0 else "meta")
        for _, adapter in adapters(hf):
            adapter.in_place = not args.recomputes_selectively
        if args.load_in_4bit:
            quantize_frozen(hf)
    model = wrap(hf)
    model.flops = ForwardFlops.of(model)
    if world.device.type == "cuda" and (kernel := next(filter(None, map(stateless_kernel, hf.modules())), "")):
        logger.warning(
            "%s: each forward pass computes only one sequence, because the GPU kernel %s cannot start from a state",
            config.model_type,
            kernel,
        )
        packing = Packing.ALONE
    model.packed = packing >= Packing.PACKED
    model.shares = args.share_prefixes and packing is Packing.SHARED
    # buffers are not cast: with rotary frequencies in bf16, the angles at position 1,000 would be wrong by radians
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():  # others have 4 bits
            parameter.data = parameter.data.to(world.compute_dtype)
    shard_model(model, model.layers, world, cpu_offload=trainable and args.fsdp_cpu_offload)
    if args.compile:
        model.compile_layers()
    if trainable and args.gradient_checkpointing:
        kept = (partial(create_selective_checkpoint_contexts, _keeps),) if args.recomputes_selectively else ()
        model.recompute_layers(*kept)
    if world.device.type == "cpu":  # building the model needed twice its memory
        return_freed_memory(above=0)
    return model


def _folder(path: str, world: World) -> str:
    """If ``path`` is a name on the hub, and every rank has its files: their folder. Otherwise ``path``."""
    if Path(path).is_dir():
        return path
    folder = hub_folder(path)
    missing = world.all_reduce(torch.tensor([float(folder is None)]))
    return path if missing.item() or folder is None else folder


@torch.no_grad()
def _has_sources(hf: PreTrainedModel, path: str, *, new_head: bool) -> bool:
    """Set the attribute ``SOURCE`` of each parameter of the empty model ``hf``: the position of its data in the files
    at ``path``. `shard_model` reads it. Also read the buffers.

    The result is False if the files cannot be read in parts, or if a new head needs random values. Then rank 0 reads
    all files, and sends the other ranks their parts. ``new_head``: see `build_model`.
    """
    sources = weight_sources(path, hf, unread=(*LM_HEAD * new_head, SCORE))
    if sources is None or (hasattr(hf, "score") and SCORE not in sources):
        return False
    for name, parameter in hf.named_parameters():
        setattr(parameter, SOURCE, sources.get(name))
    for name, buffer in saved_buffers(hf).items():
        buffer.copy_(everything(sources[name]))
    return True


def loading_minutes(args: Args) -> float:
    """How many minutes a rank waits for another rank that loads models: long enough to read the files from a slow
    disk."""
    paths = [path for _, path in _models(args)]
    if args.use_reference and args.hf_checkpoint is not None:
        paths.append(args.hf_checkpoint)
    return args.distributed_timeout_minutes + sum(map(weight_bytes, paths)) / SLOW_DISK / 60


def _keeps(_: SelectiveCheckpointContext, operator: OpOverload, *__: object, **___: object) -> CheckpointPolicy:
    """Select the results of a layer that ``--recompute-granularity selective`` keeps: those that are slow to compute
    again."""
    kept = operator.name().split(".")[0] in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def read_config(path: str | None) -> PretrainedConfig:
    """The config of the causal LM at ``path``, a Hugging Face folder or hub id.

    Raises:
        ValueError: there is no model at ``path``, or the model needs Python code from its folder.
    """
    if path is None:
        raise ValueError("there is no model to train; set --hf-checkpoint")
    try:
        config = load_config(path)
    except OSError as error:
        raise ValueError(f"no model at {path}: {error}") from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{path} needs Python files of its own (auto_map in its config.json), and slimelite never runs such "
                "files"
            ) from error
        raise
    if method := restore_weights(config):
        raise ValueError(
            f"{path} is quantized with {method}, and transformers cannot restore its weights for training; use the "
            "unquantized model (--lora-rank with --load-in-4bit saves as much memory)"
        )
    return config


def scoring_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a reward model, made from ``config``. The model has one output, the score, at the last token that
    is not padding.

    If the padding token is also an end-of-sequence token, the padding token is removed from the config. Otherwise
    transformers would take the score from the token before the end-of-sequence token.
    """
    config = copy.deepcopy(config)
    config.num_labels = 1
    text = config.get_text_config()
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    if text.pad_token_id in ends:
        text.pad_token_id = None
    return config


def load_model(
    path: str,
    config: PretrainedConfig,
    *,
    seed: int,
    attention: str,
    empty: bool,
    new_head: bool = False,
    scores: bool = False,
) -> PreTrainedModel:
    """The causal LM at ``path`` in fp32 on the CPU. If a folder has a config but no weights, the model gets random
    weights.

    Args:
        path, config: see `read_config`.
        seed: the seed of a new model's weights.
        attention: the name of an attention implementation of transformers.
        empty: whether the parameters stay on the meta device, because they are filled later.
        new_head: whether the caller replaces the LM head, so the files need not contain it.
        scores: whether to load a reward model. If the files do not contain a score head, a new head is added.

    Raises:
        ValueError: see `load_weights`.
    """
    register_attention()
    options = {"attn_implementation": attention, "dtype": torch.float32}
    kind, unread = (AutoModelForSequenceClassification, (SCORE,)) if scores else (AutoModelForCausalLM, ())
    if empty:
        with init_empty_weights(include_buffers=False):
            hf = kind.from_config(config, **options)
        hf.tie_weights()  # init_empty_weights has made two parameters of two tied weights
        return hf
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if has_weights(path):
            return load_weights(kind, path, config, unread=LM_HEAD if new_head else unread, **options)
        return kind.from_config(config, **options)


def inspect_model(
    args: LoraArgs, path: str, *, new_head: bool = False, trained: bool = False, scores: bool = False
) -> tuple[PretrainedConfig, bool]:
    """Build the model at ``path`` without its weights, to find the errors of `build_model` before a run starts.

    Returns the model's config, and whether its sequences are packed.

    Raises:
        ValueError: transformers cannot build the model; also the errors of `build_model`.
    """
    try:
        config = read_config(path)
        config = scoring_config(config) if scores else config
        empty = load_model(path, config, seed=0, attention="eager", empty=True, scores=scores)
    except Exception as error:  # transformers may raise anything for an inconsistent config
        raise ValueError(
            "the installed transformers cannot build a causal language model from its config.json "
            f"({one_line(error)}); compare it with the original, or use another model"
        ) from error
    check_weights(path, empty, unread=LM_HEAD if new_head else (SCORE,) if scores else ())
    if trained and (args.lora_rank or args.critic_lora_rank):
        check_ranks(empty, args)
    if trained and args.lora_rank:
        if args.load_in_4bit:
            check_quantizable(empty)
        add_adapters(empty, args, seed=0)
        if args.save_hf and not args.lora_merge:
            check_readable(empty)
        odd = {name.rpartition(".")[2] for name, _ in adapters(empty)} - {*args.lora_modules}
        if args.sends_adapter and odd:
            raise ValueError(
                f"--lora-sync adapter: the servers only support adapters of {', '.join(args.lora_modules)}, but "
                f"{', '.join(sorted(odd))} has an adapter too; use --lora-sync merged"
            )
    try:
        return config, bool(may_pack(config, _attention(args, config), pairs=args.job.loss == "paired"))
    except NoSmallModel:  # the trainer logs a warning
        return config, False


def _may_pack(args: ModelArgs, config: PretrainedConfig, world: World) -> Packing:
    """The lowest `Packing` that `may_pack` returns on any rank; `Packing.ALONE` if a rank cannot test the model."""
    try:
        packing = may_pack(config, _attention(args, config), pairs=args.job.loss == "paired")
    except NoSmallModel as error:
        packing = Packing.ALONE
        logger.warning("%s", error)
    refused = world.all_reduce(torch.tensor([float(packing < wanted) for wanted in Packing]))
    return max(wanted for wanted, ranks in zip(Packing, refused.tolist(), strict=True) if not ranks)


def _attention(args: ModelArgs, config: PretrainedConfig) -> str:
    """The attention implementation for training. It is "eager" if only transformers' eager attention, which needs mask
    tensors, gives correct results."""
    if args.attn_implementation != "auto":
        return args.attn_implementation
    try:
        may_pack(config, ATTENTION, pairs=args.job.loss == "paired")
    except NotTrainable as error:
        if error.eager:
            logger.warning("%s is trained with --attn-implementation eager: %s", config.model_type, error.reason)
            return "eager"
    except NoSmallModel:
        pass
    return ATTENTION


def inspect_models(args: Args, broken: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Build the policy, critic, reference and teacher without their weights.

    ``broken``: flags whose models are skipped, because a problem with them is already known. Returns two lists of
    messages: problems, and facts about the models.
    """
    problems, facts = list[str](), list[str]()
    check_config = args.engine_kind.check_config
    if not (args.job.trains or check_config):
        return problems, facts
    for option, path in _models(args):
        if option in broken:
            continue
        try:
            trained = option == "--hf-checkpoint" and args.job.trains
            new_head, scores = option == "--critic-load", args.loss.scores and trained
            model, packed = inspect_model(args, path, new_head=new_head, trained=trained, scores=scores)
            if not packed:
                facts.append(f"{option}: {model.model_type} is trained on one sequence per forward pass")
            if option == "--hf-checkpoint" and args.job.engines and check_config:
                function(check_config, ENGINES.option, args.rollout_backend)(model)
        except (OSError, ValueError) as error:
            problems.append(f"{option} {path}: {' '.join(str(error).split())}")
    return problems, facts


def check_models(args: Args) -> None:
    """Raise ValueError if `inspect_models` finds problems."""
    problems, _ = inspect_models(args)
    if problems:
        raise ValueError("\ntrain.py: ".join(problems))


def _models(args: Args) -> Iterator[tuple[str, str]]:
    if args.model_config is None and args.hf_checkpoint is not None:
        yield "--hf-checkpoint", args.hf_checkpoint
    if args.use_critic and args.critic_load and not (Path(args.critic_load) / STATE_FILE).is_file():
        yield "--critic-load", args.critic_load
    if args.use_reference and args.ref_load and args.ref_load != args.hf_checkpoint:
        yield "--ref-load", args.ref_load
    if args.use_opd and args.opd_type == "trainer" and args.opd_teacher_load:
        yield "--opd-teacher-load", args.opd_teacher_load
