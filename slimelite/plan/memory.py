"""Memory of a training rank and of an engine, by part and by phase. The memory is computed from the shapes in the
model's config.json, without torch.

The activations that layers of transformers keep for the backward pass were counted on fake tensors. tests/gpu_sim
compares these formulas with simulated steps. docs/planner.md compares predictions with measurements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimelite.models.families import EXPERTS, family_of, is_true, text_config

if TYPE_CHECKING:
    from slimelite.arguments.args import Args
    from slimelite.arguments.model import ModelArgs
    from slimelite.arguments.rollout import RolloutArgs

# config keys of layers of other kinds: linear attention, Mamba, and attention with compressed keys (DeepSeek)
OTHER_LAYERS = ("linear_num_value_heads", "mamba_num_heads", "kv_lora_rank")


@dataclass(frozen=True)
class Shapes:
    """Sizes of a decoder with gated MLPs. ``query`` and ``key`` are the widths of all heads together. ``biases`` and
    ``norms``: the numbers of such parameters in a layer.

    ``context``: the largest number of positions, if the config has it. ``mlp``: the number of parameters in a layer's
    MLP. In a mixture of experts, ``mlp`` includes all experts, and ``inner`` is the total width of the experts that
    compute one token. ``router``: the number of parameters that choose between experts.
    """

    layers: int
    hidden: int
    inner: int
    query: int
    key: int
    vocab: int
    tied: bool
    qk_norm: bool
    biases: int
    norms: int
    mlp: int
    router: int = 0
    context: int | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shapes | None:
        """Sizes from a parsed config.json. None if a size is missing, or if the model has ``OTHER_LAYERS``."""
        config = text_config(config)
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        sizes = [int(config.get(name) or 0) for name in names]
        if any(config.get(name) for name in OTHER_LAYERS) or not all(sizes):
            return None
        layers, hidden, inner, heads, vocab = sizes
        head = int(config.get("head_dim") or hidden // heads)
        query, key = heads * head, int(config.get("num_key_value_heads") or heads) * head
        family = family_of(str(config.get("model_type")))
        tied, qk_norm = bool(config.get("tie_word_embeddings")), family is not None and family.qk_norm
        norms, biases = 2 * hidden + (2 * head if qk_norm else 0), 0
        if family is not None:
            biases = is_true(family.qkv_bias, config) * (query + 2 * key) + is_true(family.out_bias, config) * hidden
        count, router = next((int(config[name]) for name in EXPERTS if config.get(name)), 0), 0
        mlp = 3 * hidden * inner
        if count:
            if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step") or 1) > 1:
                return None  # layers of two kinds
            if not config.get("num_experts_per_tok"):
                return None  # Aria and Ernie have their own names in the config, and shared experts or dense layers
            width = int(config.get("moe_intermediate_size") or inner)
            shared = int(config.get("shared_expert_intermediate_size") or 0)
            inner = int(config["num_experts_per_tok"]) * width + shared
            router = hidden * (count + bool(shared))
            mlp = 3 * hidden * (count * width + shared) + router
        elif family is not None:
            biases += is_true(family.mlp_bias, config) * (2 * inner + hidden)
        context = int(config.get("max_position_embeddings") or 0) or None
        return cls(layers, hidden, inner, query, key, vocab, tied, qk_norm, biases, norms, mlp, router, context)

    @property
    def attention(self) -> int:
        """The number of parameters in a layer's attention matrices."""
        return self.hidden * (2 * self.query + 2 * self.key)

    @property
    def active(self) -> int:
        """The number of parameters in a layer's matrices that are used for one token."""
        return self.attention + 3 * self.hidden * self.inner + self.router

    @property
    def layer(self) -> int:
        """The number of parameters in a layer, without norms and biases, which are too few to matter for memory."""
        return self.attention + self.mlp

    @property
    def head(self) -> int:
        """The number of parameters in the LM head."""
        return self.vocab * self.hidden

    @property
    def outer(self) -> int:
        """The number of parameters in the embedding and the LM head."""
        return self.head * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * (self.layer + self.norms + self.biases) + self.outer + self.hidden

    def adapter(self, rank: int) -> int:
        """The number of parameters of LoRA adapters of rank ``rank`` on all seven matrices of every layer. With fewer
        target matrices, the number is lower."""
        widths = 4 * self.hidden + 2 * self.query + 2 * self.key + 3 * (self.hidden + self.inner)
        return rank * self.layers * widths


# share of a GPU's memory that tensors can use; CUDA, NCCL and fragmentation take the rest
USABLE = 0.88
# share of the usable memory for a trainer, if engines keep their memory on the same GPU
BESIDE_ENGINES = 0.35
# how many logits the LM head computes at once, and the size of a part of its gradient (`training/model.py`). The key is
# the size of a number [bytes]: 2 on a GPU, 4 on a CPU
CHUNK = {2: 2**27, 4: 2**24}

# CUDA graphs and work space of a server's engine [bytes]; an assumption
GRAPHS = 1.5e9
# memory that a process keeps on a GPU while another process computes there [bytes]: CUDA's context and kernels, and
# buffers of NCCL if it has neighbours. These are assumptions. Users of colocated trainers report 1 to 3 GB
CONTEXT, NCCL = 0.6e9, 1.2e9
# the embedded engine's cache takes at most this share of a GPU's free memory (GPU_CACHE_SHARE of that engine)
EMBEDDED_CACHE = 0.6
# SGLang 0.5.20 (memory_hook.py). Each row: GPUs below this memory [MiB], tokens of a prompt's chunk, the largest batch
# of a CUDA graph on fewer than four GPUs, and the same on four or more GPUs
SGLANG = (
    (20480, 2048, 8, 8),
    (35840, 4096, 48, 160),
    (61440, 4096, 32, 160),
    (163840, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)
# bytes of a 4-bit weight: 64 weights share an 8-bit scale, and 256 scales share a 32-bit one (`training/quantized.py`)
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# resident memory of a process with Python, torch and transformers [bytes]
BASE = 0.47e9

Parts = dict[str, float]


@dataclass(frozen=True)
class Load:
    """The work of one training rank.

    Args:
        shapes: sizes of the model.
        tokens: number of tokens of a micro-batch.
        shards: number of ranks that share one copy of the model.
        plain: training does not use FSDP (which copies weights and gradients), for example with one rank on a CPU.
        checkpointing: layers keep only their input, and are recomputed in the backward pass.
        selective: with ``checkpointing``, layers also keep the results of matrix products and attention.
        whole_grads: every rank keeps whole gradients until the step's last micro-batch.
        single: a step has one micro-batch, so there is no gradient of an earlier micro-batch.
        on_host: weights and optimizer state stay in host memory (``--fsdp-cpu-offload``).
        lora: parameters of adapters, if only these are trained; 0: all parameters are trained.
        four_bit: the frozen linear layers have 4 bits (``--load-in-4bit``).
        critic: ``lora`` of the critic; None: there is no critic. The critic has the policy's size, and the two are
            trained in turn.
        values: this is the load of a critic, whose head has one value for each token instead of logits.
        width: bytes of a number in the forward and backward pass: 2 on a GPU, 4 on a CPU.
        others: number of frozen models, such as a reference model, that use the device in turn.
        targets: response tokens of the micro-batch; 0: all its tokens count.
        compiled: layers and LM head are compiled, which changes their speed.
    """

    shapes: Shapes
    tokens: int
    shards: int = 1
    plain: bool = False
    checkpointing: bool = False
    selective: bool = False
    whole_grads: bool = False
    single: bool = False
    on_host: bool = False
    lora: int = 0
    four_bit: bool = False
    critic: int | None = None
    values: bool = False
    width: int = 2
    others: int = 0
    targets: int = 0
    compiled: bool = False

    @property
    def learners(self) -> list[Load]:
        """One load for the policy and, if there is a critic, a second load for the critic."""
        policy = replace(self, critic=None)
        if self.critic is None:
            return [policy]
        # the critic's embedding is as large as the policy's, and its head has one row
        return [policy, replace(policy, lora=self.critic, values=True, shapes=replace(self.shapes, tied=True))]

    @property
    def trained(self) -> int:
        """The number of parameters that have gradients and optimizer state."""
        return sum(each.lora or each.shapes.parameters for each in self.learners)

    def adapted(self, rank: int) -> Load:
        """The same load with adapters of ``rank`` for policy and critic."""
        adapter = self.shapes.adapter(rank)
        return replace(self, lora=adapter, critic=None if self.critic is None else adapter)

    def state(self) -> Parts:
        """Memory that stays between steps: fp32 weights and AdamW's moments. Frozen weights have ``width`` bytes for a
        number."""
        share = 0 if self.on_host else 1 / self.shards
        frozen = sum(each._frozen for each in self.learners if each.lora)
        return {"weights": share * (frozen + 4 * self.trained), "optimizer": share * 8 * self.trained}

    def reading(self) -> float:
        """Host memory of a rank while it reads the model [bytes].

        A single rank reads the whole model in fp32. With several ranks, each rank needs memory for its rows of the
        largest weight, in the file's dtype, and for its part of the model if that part stays on the host.
        """
        if self.shards == 1:
            return 4 * self.shapes.parameters
        part = 4 * self.shapes.parameters / self.shards if self.on_host or self.width == 4 else 0
        whole = (
            4 * self.shapes.hidden * self.shapes.inner if self.four_bit else 0
        )  # a whole matrix is needed to find its scales
        return part + max(2 * self.shapes.head / self.shards, whole)

    def process(self) -> float:
        """Memory of a trainer's process on a CPU besides tensors: its libraries, and the holes of its heap.

        Tensors are aligned, so glibc's heap seldom puts one into the hole of a freed tensor of the same size. A layer's
        forward pass leaves such holes, which stay empty until the backward pass frees the tensors around them. With
        checkpointing, large tensors are not in the heap (`slimelite.base.heap.keep_freed_memory`).
        """
        s = self.shapes
        # results of o_proj and down_proj, squares in two norms, and queries and keys before and in the rotary embedding
        freed = 4 * s.hidden + 3 * (s.query + s.key)
        if self.lora:  # the terms that adapters add to the results of the seven products
            freed += s.query + 2 * s.key + 2 * s.hidden + 2 * s.inner
        return BASE + (0 if self.checkpointing else s.layers * self.tokens * self.width * freed)

    def train(self) -> Parts:
        """Memory at the peak of an optimizer step."""
        return self.state() | max((moment for each in self.learners for moment in each._moments()), key=total)

    def log_probs(self) -> Parts:
        """Memory at the peak of a pass without gradients. If there is a frozen model, its weights are in memory beside
        the trainer's."""
        s, w, g = self.shapes, self.width, self._copied
        states = w * self.tokens * s.hidden
        one, two = g * s.outer + self._of_layer, g * s.outer + 2 * self._of_layer
        in_head: Parts = {"activations": 2 * states, "logits": 12 * self._logits, "gathered": one}
        in_layers: Parts = {"activations": self.tokens * self.layer_bytes(), "gathered": two}
        moment = max(in_head, in_layers, self._gather(), key=total)
        frozen = w * s.parameters / self.shards if self.others else 0
        return self.state() | moment | {"reference": frozen}

    def pushed(self, *, alone: bool) -> float:
        """The number of bytes that a weight sync sends. Without LoRA, it sends all weights. With LoRA, it merges the
        adapters into the matrices of the layers and sends these matrices. ``alone``: it sends only the adapters, in
        fp32.
        """
        s = self.shapes
        return 4 * self.lora if alone else self.width * (s.layers * s.layer if self.lora else s.parameters)

    def sync(self, bucket: float, *, alone: bool) -> Parts:
        """Memory of a weight sync at its peak, without the trainer's state: a bucket of about ``bucket`` bytes, and the
        tensor that is being gathered. The first sync sends all weights. ``alone``: the sync sends only the adapters, in
        one bucket.
        """
        s, w = self.shapes, self.width
        if alone:
            return {"buffers": self.pushed(alone=True)}
        largest_one = w * s.head
        size = max(bucket, largest_one) if s.tied else bucket + largest_one  # a separate LM head comes last
        gathering = 6 * s.head / self.shards + (2 * largest_one if self.shards > 1 else 0)
        return {"buffers": min(size, w * s.parameters), "gathered": gathering}

    def _gather(self) -> Parts:
        """The memory at the beginning of a pass. With several ranks, each rank then has embedding and head twice: in
        the buffer of the gather, and in the copy for the pass.
        """
        s, buffers = self.shapes, 2 if self.shards > 1 else 1
        states = self.width * self.tokens * s.hidden
        return {"activations": states, "gathered": buffers * (self._copied * s.outer + self._of_layer)}

    @property
    def _frozen(self) -> float:
        """Bytes of the weights of a model if only its adapters are trained."""
        s = self.shapes
        inner = s.layers * s.layer if self.four_bit else 0
        return self.width * (s.parameters - inner) + NF4 * inner

    @property
    def _of_layer(self) -> float:
        """Bytes of a layer's weights for a pass. If the layer has 4 bits, several ranks gather it in 4 bits, and its
        largest matrix is dequantized in addition.
        """
        s = self.shapes
        if not self.four_bit:
            return self._copied * s.layer
        return (NF4 * s.layer if self.shards > 1 else 0) + self.width * s.hidden * s.inner

    @property
    def _copied(self) -> int:
        """The number of bytes per number in the copies of weights for a pass; see `parallel.shard_model`."""
        return 0 if self.plain or (self.four_bit and self.shards == 1) else self.width

    @property
    def _logits(self) -> int:
        return 0 if self.values else min(CHUNK[self.width], (self.targets or self.tokens) * self.shapes.vocab)

    def layer_bytes(self) -> float:
        """Bytes that a layer keeps for each token: activations, fp32 copies in norms, and queries and keys before
        norms."""
        s, w = self.shapes, self.width
        normed = (w + 4) * (s.query + s.key) if s.qk_norm else 0
        return 4 * w * s.inner + (4 * w + 8) * s.hidden + 2 * w * (s.query + s.key) + normed

    def _moments(self) -> list[Parts]:
        s, w, g, tokens = self.shapes, self.width, self._copied, self.tokens
        states, kept = w * tokens * s.hidden, tokens * self.layer_bytes()
        if self.checkpointing:
            # the states before each layer, and one layer's activations with their gradients
            again = kept + w * tokens * (3 * s.inner + 2 * s.hidden)
            # outputs of the seven matrix products and of attention, which has the width of its queries
            products = 2 * s.inner + 2 * s.hidden + 2 * s.query + 2 * s.key
            kept = states + (w * tokens * products if self.selective else 0)
        else:
            again = 0
        full = 0 if self.lora else 1  # whether the matrices have gradients
        head = 0 if self.values else s.head
        sharded = 4 * self.trained / self.shards
        # gradients of earlier micro-batches, and of the layers above
        accumulated = 0 if self.single else 4 * self.trained if self.whole_grads else sharded
        so_far = sharded * (1 - full * s.outer / s.parameters)
        work = g * s.outer + 2 * self._of_layer  # gathered, and the next layer with it
        of_layer = full * ((4 + w) * s.layer + w * head)
        in_head = {
            "activations": s.layers * kept + 5 * states,
            # a frozen head needs most in the forward pass, like in a pass for log-probs
            "logits": (4 + w if full else 12) * self._logits,
            "gathered": g * s.outer + self._of_layer,
            "gradients": accumulated + full * 4 * (head + min(CHUNK[w], head)),
        }
        first_layers = {
            "activations": s.layers * kept + 5 * states + again,
            "gathered": work,
            "gradients": accumulated + of_layer,
        }
        last_layers = {
            "activations": kept + states + again,
            "gathered": work,
            "gradients": of_layer + (so_far if self.single or self.whole_grads else sharded),
        }
        end = {"activations": states, "gathered": 0, "gradients": full * (4 + w) * s.outer + sharded}
        begin = self._gather() | {"gradients": accumulated}
        return [begin, in_head, first_layers, last_layers, end]


def left_behind(group: int) -> float:
    """Bytes that a process keeps on a GPU while another process uses the GPU. ``group``: the number of GPUs in the
    process's group."""
    return CONTEXT + (NCCL if group > 1 else 0)


# SGLang's max_prefill_tokens, the limit for prompts that are not computed in chunks
PREFILL = 16384


def sglang_usual(memory: float, gpus: int) -> tuple[int, int]:
    """SGLang's defaults on GPUs of ``memory`` bytes: tokens of a prompt's chunk, largest batch of a CUDA graph."""
    _, chunk, few, many = next(row for row in SGLANG if memory / 2**20 < row[0])
    return chunk, few if gpus < 4 else many


@dataclass(frozen=True)
class Sglang:
    """The settings on which SGLang's reserve depends. ``chunk``: prompt tokens that are computed at once. ``batch``,
    ``prompts``: the largest batch and the most tokens of a CUDA graph; 0: no graph is recorded.
    """

    chunk: int
    batch: int
    prompts: int

    @classmethod
    def of(cls, memory: float, gpus: int, options: Mapping[str, Any], *, releases: bool) -> Sglang:
        """The settings from the ``--sglang-*`` options and SGLang's defaults for such a GPU. ``releases``: the engine
        releases its memory for training. By default, such an engine records no CUDA graphs of prompts
        (`slimelite.engines.sglang.server`).
        """
        size, (usual, most) = options.get("chunked_prefill_size"), sglang_usual(memory, gpus)
        pieces = usual if size is None else int(size)  # -1: prompts are computed whole
        graphs = options.get("cuda_graph_config")
        phases = {name: cls._graphs(name, options, graphs) for name in ("decode", "prefill")}
        phases["prefill"].setdefault("backend", "disabled" if releases else None)
        for phase in phases.values():
            if phase.get("bs"):
                phase["max_bs"] = max(phase["bs"])
        batch, prompts = (
            0 if phase.get("backend") == "disabled" else phase.get("max_bs") or default
            for phase, default in zip(phases.values(), (most, max(pieces, 0)), strict=True)
        )
        chunk = pieces if pieces > 0 else int(options.get("max_prefill_tokens") or PREFILL)
        return cls(chunk, batch, prompts)

    @staticmethod
    def _graphs(name: str, options: Mapping[str, Any], config: object) -> dict[str, Any]:
        """The settings for the graphs of a phase. They come from the flag for both phases, the flag of the phase, and
        the JSON. The JSON overrides the flags."""
        off = options.get("disable_cuda_graph") or options.get(f"disable_{name}_cuda_graph")
        settings = {"backend": "disabled"} if off else {}
        keys = ("backend", "max_bs", "bs")
        settings |= {key: value for key in keys if (value := options.get(f"cuda_graph_{key}_{name}")) is not None}
        if name == "decode":  # SGLang also has flags without the name of the phase
            settings = {
                key: value for key in keys if (value := options.get(f"cuda_graph_{key}")) is not None
            } | settings
        own = config.get(name) if isinstance(config, dict) else None
        return settings | (own if isinstance(own, dict) else {})

    def share(self, memory: float, gpus: int) -> float:
        """The share of a GPU's memory that SGLang takes for weights and cache if no flag sets it. The rest of the
        memory is for activations and CUDA graphs.
        """
        mib = memory / 2**20
        steps = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256))
        last = (4608, self.prompts, 512)
        recorded = sum(at <= self.prompts for first, end, step in (*steps, last) for at in range(first, end + 1, step))
        reserve = 512 + 1.5 * max(self.chunk, 2048) + 128 * gpus + 2 * self.batch + 8 * recorded
        return round(1 - (max(reserve, 10240) if mib > 61440 else reserve) / mib, 3)


@dataclass(frozen=True)
class Serving:
    """The memory of one engine on each of its ``gpus``.

    Args:
        shapes: sizes of the model.
        gpus: number of GPUs that share the weights and the cache.
        sequences: number of sequences that the engine decodes at once.
        context: tokens of the longest sequence.
        width: bytes of a number: 2 on a GPU, 4 on a CPU.
        graphs: whether the engine is a server that records CUDA graphs.
        static: bytes of weights and cache together (SGLang); 0: all free memory.
        advised: the largest advisable share of a GPU for weights and cache. This share leaves half of SGLang's reserve
            free.
        chunk: prompt tokens that a server computes at once.
        cache: the cache takes at most this share of the free memory.
    """

    shapes: Shapes
    gpus: int
    sequences: int
    context: int
    width: int = 2
    graphs: bool = False
    static: float = 0.0
    advised: float = 1.0
    chunk: int = 0
    cache: float = 1.0

    def kv_token(self) -> float:
        """Bytes of the keys and values of one token."""
        return 2 * self.shapes.layers * self.shapes.key * self.width / self.gpus

    def work(self) -> Parts:
        """Memory that an engine uses in addition to weights and cache."""
        s, width = self.shapes, self.width * self.chunk / self.gpus
        parts: Parts = {"activations": width * (3 * s.inner + 4 * s.hidden), "logits": self._sampled * s.vocab * 4 * 2}
        return parts | ({"graphs": GRAPHS} if self.graphs else {})

    @property
    def _sampled(self) -> int:
        return min(self.sequences, 256)

    def least(self) -> Parts:
        """Memory with a cache for a single sequence."""
        # on a CPU the embedded engine has a packed copy of its matrices
        copies = 2 if self.width == 4 else 1
        parts: Parts = {"weights": copies * self.width * self.shapes.parameters / self.gpus}
        return parts | {"KV pool": self.kv_token() * self.context} | self.work()

    def one(self) -> float:
        """Bytes of the weights and a single sequence."""
        return total(self.least()) - total(self.work())

    def holds_one(self) -> bool:
        """Whether ``static`` has room for the weights and a single sequence."""
        return not self.static or self.one() <= self.static

    def fits(self, room: float) -> bool:
        """Whether a single sequence can be generated in ``room`` [bytes]."""
        return total(self.least()) <= room and self.holds_one()

    def generate(self, available: float) -> Parts:
        """Memory with the largest cache that is useful and fits into ``available`` [bytes]. SGLang always takes its
        whole share of the memory."""
        parts = self.least()
        if self.static:
            return parts | {"KV pool": max(parts["KV pool"], self.static - parts["weights"])}
        free = available - total(parts) + parts["KV pool"]
        useful = self.kv_token() * self.context * self.sequences
        return parts | {"KV pool": max(parts["KV pool"], min(useful, self.cache * free))}


def total(parts: Parts) -> float:
    """The sum of all parts [bytes]."""
    return sum(parts.values())


def largest(load: Load, available: float) -> int:
    """The most tokens of a micro-batch with which training and log-probs fit ``available`` bytes; 0 if none fits."""
    low, high = 0, 2**24
    while high - low > 1:
        middle = (low + high) // 2
        if peak(replace(load, tokens=middle)) <= available:
            low = middle
        else:
            high = middle
    return low


def peak(load: Load) -> float:
    """The largest memory that training or a pass for log-probs takes. On a CPU, the process of the rank is included."""
    return max(total(load.train()), total(load.log_probs())) + (load.process() if load.width == 4 else 0)


def training_load(args: Args) -> Load | str:
    """The load of a training rank. If the load is not known, returns a text with the reason."""
    shapes, tokens = model_shapes(args), _longest_micro_batch(args)
    if shapes is None or tokens is None:
        longest = "the longest micro-batch is not known before the prompts are read"
        return "the model's shapes are not known here" if shapes is None else longest
    ranks = args.training_ranks
    return Load(
        shapes,
        tokens,
        shards=max(1, ranks // args.dp_replicate_size),
        plain=ranks == 1 and not args.job.gpus,
        checkpointing=bool(args.gradient_checkpointing),
        selective=args.recomputes_selectively,
        whole_grads=args.reduce_once_a_step and ranks > 1,
        on_host=args.fsdp_cpu_offload,
        width=2 if args.job.gpus else 4,
        lora=shapes.adapter(args.lora_rank),
        four_bit=args.load_in_4bit and args.lora_rank > 0,
        critic=shapes.adapter(args.critic_lora_rank) if args.use_critic else None,
        # with adapters, the reference model is the policy without the adapters
        compiled=args.compile,
        others=int(args.use_reference and not args.lora_rank) + int(args.use_opd and args.opd_type == "trainer"),
    )


def model_shapes(args: ModelArgs) -> Shapes | None:
    """Shapes of the model, if its config.json can be read."""
    if args.model_config is not None:
        return Shapes.of(args.model_config)
    try:
        config = json.loads((Path(str(args.hf_checkpoint)) / "config.json").read_text())
        return Shapes.of(config)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # for example a hub id; the pre-flight check reports a damaged folder


def _longest_micro_batch(args: RolloutArgs) -> int | None:
    """Tokens of the longest micro-batch. A sample longer than the limit is a micro-batch by itself."""
    longest = args.rollout_max_context_len
    if longest is None and args.rollout_max_prompt_len and args.rollout_max_response_len:
        longest = args.rollout_max_prompt_len + args.rollout_max_response_len
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu:
        return max(args.max_tokens_per_gpu, longest or 0)
    return longest and args.micro_batch_size * longest
