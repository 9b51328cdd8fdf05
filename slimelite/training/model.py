"""Hugging Face causal LMs as policies: the input is tokens, and the output is log-probs of the response tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from slimelite.models import files as model_files
from slimelite.training.attention import ATTENTION, varlen_attention
from slimelite.training.batch import MicroBatch, PackedSequences, laid_out, sequences_of_pass
from slimelite.training.lora import PARTS, Weight, adapters, head_weight
from slimelite.training.quantized import FrozenLinear
from slimelite.training.recurrent import take_over
from slimelite.training.replay import KeptIds

# largest number of logits in memory at a time: 64 MiB in fp32 on a CPU, 512 MiB on a GPU
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**27}


@dataclass(frozen=True, slots=True)
class Logits:
    """The formula of logits: ``cap``·tanh(``scale``·z / ``cap``) / ``temperature`` with z = hidden·weightᵀ + bias. If
    ``cap`` is None, it is ``scale``·z / ``temperature``.
    """

    temperature: float = 1.0
    scale: float = 1.0
    cap: float | None = None

    def of(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[rows, V] logits in at least fp32."""
        logits = _product(hidden, weight.T)
        if bias is not None:
            logits.add_(bias)
        if self.cap is not None:
            return logits.mul_(self.scale / self.cap).tanh_().mul_(self.cap / self.temperature)
        divisor = self.temperature / self.scale
        return logits if divisor == 1.0 else logits.div_(divisor)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative d logits / dz at these logits: [rows, V], or one number if the derivative is the same
        everywhere."""
        if self.cap is None:
            return self.scale / self.temperature
        return (logits * (self.temperature / self.cap)).square_().neg_().add_(1).mul_(self.scale / self.temperature)


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    entropy_grad: bool = False,
    chunk_size: int = -1,
    compiled: bool = False,
    kept: KeptIds | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden·weightᵀ / temperature) at the targets, and the entropy of each distribution.

    Only the logits of one chunk of rows are in memory at a time, and the backward pass recomputes them. Logits are fp32
    even if ``hidden`` and ``weight`` are bf16, because bf16 would round a logit of 20 by up to 0.06. float64 inputs
    give float64 logits.

    Args:
        hidden: [T, d]; ``weight``: [V, d], same dtype; ``targets``: [T] int64.
        temperature: the divisor of the logits.
        bias: [V], the bias of the head; ``scale``, ``cap``: see `Logits`.
        entropy_grad: whether the entropy has a gradient, which needs a little more memory and time.
        chunk_size: number of rows of a chunk; -1: a size that fits the vocabulary and the device.
        compiled: whether torch.compile fuses the operations before and after the matrix products of a chunk.
        kept: the kept ids. If a token has kept ids, its log-prob is over these ids. Entropies are always over the whole
            vocabulary.

    Returns:
        log-probs [T] and entropies [T] in nats, at least fp32.
    """
    if chunk_size <= 0:
        chunk_size = max(16, CHUNK_ELEMENTS[hidden.device.type] // len(weight))
    log_probs, entropy = _ChunkedLogProbs.apply(
        hidden, weight, bias, targets, Logits(temperature, scale, cap), entropy_grad, chunk_size, compiled, kept
    )
    return log_probs, entropy


class _Context(FunctionCtx):
    """The values that the forward pass saves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    form: Logits
    chunk_size: int
    compiled: bool
    kept: KeptIds | None


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        form: Logits,
        entropy_grad: bool,
        chunk_size: int,
        compiled: bool,
        kept: KeptIds | None,
    ) -> tuple[Tensor, Tensor]:
        scores = _compiled(_chunk_scores) if compiled else _chunk_scores
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(len(hidden), dtype=dtype)
        entropy, log_z = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = form.of(hidden[rows], weight, bias)
            log_probs[rows], entropy[rows], log_z[rows] = scores(logits, targets[rows])
            if kept is not None and (left := kept.chunk(rows)) is not None:
                left.replace(log_probs[rows], logits, targets[rows])
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy, *([] if bias is None else [bias]))
        ctx.form, ctx.chunk_size = form, chunk_size
        ctx.compiled, ctx.kept = compiled, kept
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)  # an output that the loss does not read then needs no gradient
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_z, entropy, *rest = ctx.saved_tensors
        bias = rest[0] if rest else None
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        gradient = _compiled(_chunk_gradient) if ctx.compiled else _chunk_gradient
        # the contributions of the chunks are added in fp32
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = log_z.new_zeros(len(weight)) if ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            logits = ctx.form.of(hidden[rows], weight, bias)
            slope = ctx.form.slope(logits)
            of_entropy = None if grad_entropy is None else (entropy[rows], grad_entropy[rows])
            whole, left = grad_log_probs[rows], None if ctx.kept is None else ctx.kept.chunk(rows)
            if left is not None:  # only the logits of kept ids change the log-probs of such tokens
                added, whole = left.gradient(logits, whole.where(left.some, 0.0)), whole.where(~left.some, 0.0)
            grad = gradient(logits, log_z[rows], targets[rows], whole, of_entropy)
            if left is not None:
                grad.scatter_add_(1, left.ids, added)
                grad.scatter_add_(1, targets[rows, None], grad_log_probs[rows, None].where(left.some[:, None], 0.0))
            grad = grad.mul_(slope)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None and grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.T, hidden[rows])
            elif grad_weight is not None:
                # the whole product would be as large as grad_weight, so it is computed for parts of the vocabulary
                size = max(1, CHUNK_ELEMENTS[weight.device.type] // weight.shape[1])
                for total, part in zip(grad_weight.split(size), grad.split(size, dim=1), strict=True):
                    total += _product(part.T, hidden[rows])
        of_head = (None if x is None else x.to(weight.dtype) for x in (grad_weight, grad_bias))
        return grad_hidden, *of_head, *[None] * 6


def _chunk_scores(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of ``targets`` [rows], entropies [rows], and log-sum-exps [rows] of ``logits`` [rows, V]."""
    top = logits.amax(-1, keepdim=True)
    exps = (logits - top).exp_()
    z = exps.sum(-1)
    log_z = top[:, 0] + z.log()
    entropy = log_z - torch.linalg.vecdot(exps, logits) / z
    return logits.gather(1, targets[:, None])[:, 0] - log_z, entropy, log_z


def _chunk_gradient(
    logits: Tensor, log_z: Tensor, targets: Tensor, grad: Tensor, of_entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """[rows, V] the gradient of ``logits``. The function may overwrite the memory of ``logits``.

    ``grad``: [rows], the gradient of the log-probs. ``of_entropy``: the entropies and their gradients, each [rows].
    """
    g = grad[:, None]
    # not in place if compiled, because compiled code would have to write the changed input back to memory
    log_p = logits - log_z[:, None] if torch.compiler.is_compiling() else logits.sub_(log_z[:, None])
    p = log_p.exp()
    # d log p_y / d logit_j = [j = y] - p_j;  dH / d logit_j = -p_j (log p_j + H)
    factor = g
    if of_entropy is not None:
        factor = log_p.add_(of_entropy[0][:, None]).mul_(of_entropy[1][:, None]).add_(g)
    return p.mul_(factor).neg_().scatter_add_(1, targets[:, None], g)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, compiled for any number of rows."""
    return torch.compile(function, dynamic=True)


@cache
def _never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``function`` that torch.compile does not compile. All models share one wrapper. With a wrapper of
    its own, each model would compile its layers again."""
    return torch.compiler.disable(function)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left`` @ ``right`` in at least fp32. Tensor cores sum in fp32, and their sums are not rounded to bf16."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)  # `out_dtype` only works on GPUs


def _recomputed(forward: Callable[..., Any], context_fn: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """The result of ``forward``. The backward pass computes it again, with the layout of the current forward pass."""
    again = partial(_in_pass, sequences_of_pass(), forward)
    return checkpoint(again, *args, use_reentrant=False, context_fn=context_fn, **kwargs)


def _in_pass(sequences: PackedSequences, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with laid_out(sequences):
        return forward(*args, **kwargs)


class LanguageModel(nn.Module):
    """A causal LM of transformers. The `forward` of this class replaces that of transformers, and applies the LM head
    too.

    So FSDP's hooks on this module also gather the head's weight, even if it is tied to the embedding.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        # the decoder layers; each layer is sharded as one unit. They must be found before FSDP changes their classes
        names = set(hf._no_split_modules or ())
        blocks = [m for m in hf.modules() if type(m).__name__ in names or isinstance(m, GradientCheckpointingLayer)]
        inner = {id(part) for module in blocks for part in module.modules() if part is not module}
        self.layers = [module for module in blocks if id(module) not in inner]
        self._recurrent = take_over(hf)
        # whether sequences are packed into one row, see `packing.may_pack`; else each sequence has its own row
        self.packed = True
        # whether a prefix that rows of a micro-batch share is computed once, see `packing.may_pack`
        self.shares = False
        self.compiled = False
        # the floating-point operations of a forward pass; None: they are not counted
        self.flops: ForwardFlops | None = None
        # eval(), as in engines: in train() a model may select random experts or drop layers, which changes log-probs
        self.eval()

    @property
    def head(self) -> nn.Linear:
        """The last layer. It computes logits or scores from hidden states."""
        head: nn.Linear = self.hf.get_output_embeddings()
        return head

    def compile_layers(self) -> None:
        """Let torch.compile fuse the operations between the layers' matrix products and attention (``--compile``).

        Attention is not compiled, because its buckets would be compiled again for every micro-batch. Only ``forward``
        is compiled, so FSDP's hooks still run before and after the compiled code. Call this method after FSDP, because
        FSDP changes the class of a layer.
        """
        AttentionInterface.register(ATTENTION, _never_compiled(varlen_attention))
        for module in self._recurrent:
            module.forward = _never_compiled(module.forward)
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        self.compiled = True

    def recompute_layers(self, context_fn: Callable[[], Any] = noop_context_fn) -> None:
        """Let the backward pass recompute each layer from its input (``--gradient-checkpointing``).

        transformers' own recomputation works only in train(). Call this method after FSDP and `compile_layers`, so that
        the recomputation includes the compiled code, but not FSDP's hooks. ``context_fn``: see
        `torch.utils.checkpoint.checkpoint`.
        """
        for layer in self.layers:
            layer.forward = partial(_recomputed, layer.forward, context_fn)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[R, d] the hidden states that predict the response tokens of ``batch``."""
        rows = batch if self.packed or len(batch.lengths) < 2 else batch.padded()
        decoder = self.hf.get_decoder()
        # get_decoder() is wrong in two families. In Llama 4 it names a part that the text model does not have. In
        # ModernBERT it returns the head
        if decoder is self.hf or not isinstance(decoder, PreTrainedModel):
            decoder = self.hf.model
        with laid_out(rows.sequences):
            states = decoder(input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False)
        hidden: Tensor = states.last_hidden_state.flatten(0, 1).index_select(0, rows.response_index)
        # ModernBERT's decoder has a layer and a norm before the head
        before = getattr(self.hf, "lm_head", None)
        if before is None or any(part is self.head for part in before.modules()):
            return hidden
        return before(hidden)

    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """(Hugging Face name, weight) of each weight that the engines have. Tied weights appear once.

        A weight is a parameter (sharded or not), or a module that computes the weight, see `lora.gathered`.
        """
        merged: dict[int, Weight] = {id(module.weight): module for _, module in adapters(self)}
        for module in self.modules():
            if isinstance(module, FrozenLinear) and module.is_quantized:
                merged[id(module.weight)] = module
        for name, parameter in self.named_parameters():
            if name.rpartition(".")[2] not in PARTS:
                yield name.removeprefix("hf."), merged.get(id(parameter), parameter)

    def saved_buffers(self) -> dict[str, Tensor]:
        """The buffers in a model's files, by their names in the files; see `model_files.saved_buffers`."""
        return model_files.as_filed(self.hf, model_files.saved_buffers(self.hf))

    def as_filed(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """The tensors of a whole weight, by their names in a model's files; see `model_files.as_filed`."""
        return model_files.as_filed(self.hf, {name: weight})

    def trained(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name: all weights, or the adapters. Checkpoints contain them."""
        parameters = self.named_parameters()
        return {name.removeprefix("hf."): parameter for name, parameter in parameters if parameter.requires_grad}


class PolicyModel(LanguageModel):
    """A causal LM whose forward pass returns log-probs of given tokens instead of logits."""

    def __init__(self, hf: PreTrainedModel, chunk_size: int = -1) -> None:
        super().__init__(hf)
        self.chunk_size = chunk_size
        self.scale, self.cap = model_files.logit_transform(hf.config)

    def forward(self, batch: MicroBatch, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [R] at the response tokens of ``batch``, at least fp32. Logits are divided by
        ``temperature``. ``entropy_grad``: whether the entropies have a gradient.
        """
        weight = head_weight(self.head)
        return chunked_log_probs(
            self.hidden(batch),
            weight,
            batch.targets,
            temperature,
            bias=self.head.bias,
            scale=self.scale,
            cap=self.cap,
            entropy_grad=entropy_grad,
            chunk_size=self.chunk_size,
            compiled=self.compiled,
            kept=batch.kept,
        )


class ScoringModel(PolicyModel):
    """A reward model: a sequence-classification model with one output, the score. `forward` returns scores in place of
    log-probs."""

    @property
    def head(self) -> nn.Linear:
        """The layer that computes a score from a hidden state."""
        head = self.hf.score
        assert isinstance(head, nn.Linear)
        return head

    def forward(self, batch: MicroBatch, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Scores [R] of the text before each response token of ``batch``, at least fp32, and zeros [R] as entropies."""
        hidden = self.hidden(batch)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        scores = hidden.to(dtype) @ self.head.weight[0].to(dtype)
        return scores, torch.zeros_like(scores)


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """The number of floating-point operations of a forward pass, computed from the shapes of the weights.

    Each element of a weight matrix needs one multiplication and one addition for each token.

    ``per_token``: the operations of the matrices between embedding and head. ``per_target``: the operations of the
    head, which is applied only at response positions. ``per_pair``: the operations of attention, for each pair of a
    token and a token that it attends to. Norms, activations and rotary embeddings are not counted, as is usual
    (arXiv:2001.08361, section 2.1). A backward pass has twice the operations of a forward pass. Recomputation is not
    counted. ``frozen_per_token``, ``frozen_per_target``: the parts of ``per_token`` and ``per_target`` that belong to
    frozen weights. (The gradients of these weights are not computed.)
    """

    per_token: float
    per_target: float
    per_pair: float
    frozen_per_token: float = 0.0
    frozen_per_target: float = 0.0

    @classmethod
    def of(cls, model: LanguageModel) -> ForwardFlops | None:
        """The operations of a dense model. The result is None for a mixture of experts, because a token uses only some
        of the weights. It is also None for BLT: some of its parts process bytes, and other parts process patches."""
        config = model.hf.config.get_text_config()
        if model_files.has_experts(model.hf) or not hasattr(config, "hidden_size"):
            return None
        head = model.head.weight
        outer = {id(head), id(model.hf.get_input_embeddings().weight)}
        matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in outer]
        trains = bool(model.trained())
        # a byte contains two 4-bit weights
        counts = {p: p.numel() * (1 if p.is_floating_point() else 2) for p in matrices}
        frozen = sum(counts[p] for p in matrices if trains and not p.requires_grad)
        heads = getattr(config, "num_attention_heads", None) or 0  # a model without attention has no heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        width = config.num_hidden_layers * heads * head_dim
        return cls(
            2.0 * sum(counts.values()),
            2.0 * head.numel(),
            4.0 * width,
            2.0 * frozen,
            2.0 * head.numel() if trains and not head.requires_grad else 0.0,
        )

    def total(self, lengths: np.ndarray, targets: np.ndarray, shared: np.ndarray) -> float:
        """The operations for n rows with causal attention. ``lengths``: [n], the number of tokens of each row.
        ``targets``: [n], the number of response tokens. ``shared``: [n], the length of each row's prefix that is
        computed for another row.
        """
        ends, starts = lengths.astype(np.float64), shared.astype(np.float64)
        pairs = (ends * (ends + 1) - starts * (starts + 1)) / 2
        return float((self.per_token * (ends - starts) + self.per_target * targets + self.per_pair * pairs).sum())

    def step(self, lengths: np.ndarray, targets: np.ndarray, shared: np.ndarray) -> float:
        """The operations of the forward and backward passes for n rows; see `total` for the arguments."""
        frozen = self.frozen_per_token * float((lengths - shared).sum()) + self.frozen_per_target * float(targets.sum())
        return 3 * self.total(lengths, targets, shared) - frozen
