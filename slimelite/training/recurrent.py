"""Runs recurrent layers, such as Mamba's, on sequences that are packed as a tree of shared prefixes.

In transformers, linear attention, state-space layers and short convolutions treat their whole input as one sequence. If
rows were packed one after the other, the second row would start from the first row's state, without an error. This file
does not change the projections, norms and gates of these layers, which run over all tokens at once. It replaces the
part that goes from token to token. The replacement computes one level of the tree after the other
(`PackedSequences.levels`). The nodes of a level are a batch, and each node starts from the last state of its parent.

The table `KINDS` lists the kinds of such modules: the attributes that identify a kind, and the function that makes the
replacement. The name of the module does not matter. Before a run, `slimelite.training.packing` checks that the results
equal those of transformers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from slimelite.models.scans import (
    decayed_attention,
    forgetting_average,
    gated_delta_rule,
    matrix_memory,
    selective_scan,
    state_space_duality,
)
from slimelite.training.batch import sequences_of_pass

# (inputs [n, L, ...], state [n, ...] or None) -> (result [n, L, ...], last state)
Scan = Callable[..., tuple[Tensor, Tensor]]
Kernel = Callable[..., Any]


def over_tree(scan: Scan, *inputs: Tensor) -> Tensor:
    """[rows, L, ...] the result of ``scan`` for ``inputs`` [rows, L, ...], computed over the tree of the current
    forward pass."""
    sequences, shape = sequences_of_pass(), inputs[0].shape[:2]
    flat = [_and_zero(x.flatten(0, 1)) for x in inputs]
    results: list[Tensor] = []
    above: Tensor | None = None
    for level in sequences.levels:
        states = []
        for part in level:
            batch = (x.index_select(0, part.positions).unflatten(0, (part.count, -1)) for x in flat)
            first = None if above is None or part.parents is None else above.index_select(0, part.parents)
            result, state = scan(*batch, first)
            result = result.flatten(0, 1)
            results.append(result if part.real is None else result.index_select(0, part.real))
            states.append(state)
        above = torch.cat(states)
    return torch.cat(results).index_select(0, sequences.from_levels).unflatten(0, shape)


def causal_convolution(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """[rows, channels, L] the convolution of ``x`` [rows, channels, L]. The kernel of the convolution covers a token
    and the tokens before it on its path in the tree."""
    return _convolution(x, conv.weight, conv.bias)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`causal_convolution` with a ``weight`` of [channels, 1, kernel]."""
    positions, ends = sequences_of_pass().with_tokens_before(weight.shape[-1] - 1)
    tokens = _and_zero(x.transpose(1, 2).flatten(0, 1)).index_select(0, positions)
    out = F.conv1d(tokens.T[None], weight, bias, groups=len(weight))[0].T
    return out.index_select(0, ends).unflatten(0, (len(x), -1)).transpose(1, 2)


def _and_zero(x: Tensor) -> Tensor:
    """[T + 1, ...] ``x`` followed by zeros for one token, which is used as padding."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _gated_delta(mixer: Any) -> None:
    """Replace parts of a module of Qwen3-Next, Qwen3.5 or OLMo Hybrid: the attribute with its kernel, and its one or
    three convolutions."""
    mixer.chunk_gated_delta_rule = partial(_gated_delta_kernel, mixer.chunk_gated_delta_rule)
    mixer.causal_conv1d_fn = None
    parts: list[Any] = [part for part in mixer.children() if isinstance(part, nn.Conv1d)]
    for conv in parts:
        # a subclass of Conv1d takes [tokens, channels], has an activation, and also returns a state, which is not used
        own = type(conv) is not nn.Conv1d
        conv.forward = partial(_activated if own else causal_convolution, conv)


def _gated_delta_of_file(mixer: Any) -> None:
    """Do the same as `_gated_delta` for transformers 5.23, where the module calls functions of its file. Its forward
    method gets a copy with other functions."""
    forward = inspect.unwrap(type(mixer).forward)
    functions = {
        CHUNKED_RULE: partial(_gated_delta_kernel, forward.__globals__[CHUNKED_RULE]),
        "causal_conv1d_fn": _activated_convolution,
    }
    own = FunctionType(forward.__code__, forward.__globals__ | functions, closure=forward.__closure__)
    own.__defaults__, own.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    mixer.forward = partial(own, mixer)


def _activated_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: object
) -> Tensor:
    out = _convolution(x, weight[:, None], bias)
    return out if activation is None else ACT2FN[activation](out)


def _gated_delta_kernel(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: object
) -> tuple[Tensor, None]:
    # fla's kernel takes a state for each sequence, and computes the gradient of the state. It does not support fp32
    fused = query.is_cuda and query.dtype != torch.float32 and not kernel.__module__.startswith("transformers")
    return over_tree(partial(_by_kernel, kernel) if fused else gated_delta_rule, query, key, value, g, beta), None


def _by_kernel(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule`, computed by a kernel of fla or by transformers' function. Both have the same arguments."""
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    result, last = kernel(query, key, value, g=g, beta=beta, **options)
    return result, last


def _activated(conv: nn.Conv1d, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
    return F.silu(causal_convolution(conv, hidden_states.mT)).mT, None


def _mamba_2(mixer: Any) -> None:
    """Replace the forward method of a Mamba-2 layer: Mamba-2, Bamba, Granite-4, Nemotron-H, Falcon-H1, Zamba2."""
    kernel = _kernel_of(mixer, "mamba_chunk_scan_combined")
    mixer.forward = partial(_mamba_2_forward, mixer, kernel)


def _mamba_2_forward(mixer: Any, kernel: Kernel | None, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    """[rows, L, d] the layer's output for ``hidden_states`` [rows, L, d]."""
    states = mixer.n_groups * mixer.ssm_state_size
    projected = mixer.in_proj(hidden_states * getattr(mixer, "ssm_in_multiplier", 1))
    if hasattr(mixer, "mup_vector"):  # Falcon-H1
        projected = projected * mixer.mup_vector
    gate, mixed, steps = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], -1)
    mixed = mixer.act(causal_convolution(mixer.conv1d, mixed.mT)).mT
    x, b, c = mixed.split([mixer.intermediate_size, states, states], -1)
    x, b, c = x.unflatten(-1, (mixer.num_heads, -1)), *(z.unflatten(-1, (mixer.n_groups, -1)) for z in (b, c))
    fused = kernel if hidden_states.is_cuda else None
    steps = F.softplus(steps + mixer.dt_bias).clamp(*_step_limits(mixer, fused))
    a = -_exact(mixer.A_log).exp()
    scan = state_space_duality if fused is None else partial(_duality_by_kernel, fused, mixer.chunk_size)
    y = over_tree(lambda x, dt, b, c, state: scan(x, dt, a, b, c, state), x, steps, b, c)
    y = (y + mixer.D[:, None] * x).flatten(2)
    y = mixer.norm(y, gate) if getattr(mixer, "mamba_rms_norm", True) else y * F.silu(gate)
    result: Tensor = mixer.out_proj(y.to(hidden_states.dtype))
    return result


def _step_limits(mixer: Any, kernel: Kernel | None) -> tuple[float, float]:
    """The lower and upper limit of a step size. In transformers 5.12, Nemotron-H and Zamba2 take the limit from another
    field if they run without kernels."""
    if kernel is None and hasattr(mixer, "use_mem_eff_path") and hasattr(mixer, "time_step_min"):
        return mixer.time_step_min, torch.inf
    return mixer.time_step_limit or (0.0, torch.inf)


def _duality_by_kernel(
    kernel: Kernel, size: int, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`state_space_duality`, computed by the kernel of mamba-ssm. Its states have another layout."""
    result, last = kernel(x, dt, a, b, c, chunk_size=size, initial_states=state, return_final_states=True)
    return result, last


def _mamba_1(mixer: Any) -> None:
    """Replace the forward method of a Mamba-1 layer: Mamba, Falcon Mamba, Jamba."""
    mixer.forward = partial(_mamba_1_forward, mixer, mixer.forward)


def _mamba_1_forward(
    mixer: Any, own: Callable[..., Tensor], hidden_states: Tensor, *args: object, **kwargs: object
) -> Tensor:
    """[rows, L, d] the layer's output for ``hidden_states`` [rows, L, d]."""
    if hidden_states.is_cuda and stateless_kernel(mixer):
        return own(hidden_states, *args, **kwargs)
    x, gate = mixer.in_proj(hidden_states).chunk(2, -1)
    x = mixer.act(causal_convolution(mixer.conv1d, x.mT)).mT
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    steps, b, c = mixer.x_proj(x).split(sizes, -1)
    if hasattr(mixer, "dt_layernorm"):  # Jamba, Falcon Mamba
        steps, b, c = mixer.dt_layernorm(steps), mixer.b_layernorm(b), mixer.c_layernorm(c)
    elif hasattr(mixer, "rms_eps"):  # Falcon Mamba of transformers 5.12
        steps, b, c = (F.rms_norm(_exact(z), z.shape[-1:], eps=mixer.rms_eps).to(z.dtype) for z in (steps, b, c))
    steps, a = F.softplus(mixer.dt_proj(steps)), -_exact(mixer.A_log).exp()
    y = over_tree(lambda x, dt, b, c, state: selective_scan(x, dt, a, b, c, state), x, steps, b, c)
    result: Tensor = mixer.out_proj((y + mixer.D * x) * mixer.act(gate))
    return result


def _mamba_1_of_heads(mixer: Any) -> None:
    """Replace the forward method of a Mamba-1 layer with heads: Zamba."""
    mixer.forward = partial(_mamba_1_of_heads_forward, mixer, mixer.forward)


def _mamba_1_of_heads_forward(
    mixer: Any, own: Callable[..., Tensor], hidden_states: Tensor, *args: object, **kwargs: object
) -> Tensor:
    """[rows, L, d] the layer's output for ``hidden_states`` [rows, L, d]."""
    if hidden_states.is_cuda and stateless_kernel(mixer):
        return own(hidden_states, *args, **kwargs)
    x, gate = mixer.in_proj(hidden_states).unflatten(-1, (-1, 2)).unbind(-1)
    x = mixer.act(causal_convolution(mixer.conv1d, x.mT)).mT
    x, gate = (z.unflatten(-1, (mixer.n_mamba_heads, -1)) for z in (x, gate))
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    steps, b, c = torch.einsum("rlhd,hpd->rlhp", x, mixer.x_proj_weight).split(sizes, -1)
    steps = F.softplus(torch.einsum("rlht,hdt->rlhd", steps, mixer.dt_proj_weight) + mixer.dt_proj_bias)
    a = -_exact(mixer.A_log).exp()
    y = over_tree(lambda x, dt, b, c, state: selective_scan(x, dt, a, b, c, state), x, steps, b, c)
    result: Tensor = mixer.out_proj(((y + mixer.D * x) * mixer.act(gate)).flatten(2))
    return result


def _real_gated_unit(block: Any) -> None:
    """Replace the convolution and the scan of a recurrent block of RecurrentGemma."""
    block.conv_1d.forward = partial(causal_convolution, block.conv_1d)
    block.rg_lru._rnn_scan = _real_gated_scan


def _real_gated_scan(hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: object) -> tuple[Tensor, None]:
    return over_tree(forgetting_average, hidden_states, 1 - recurrent_gate * ~reset), None


def _matrix_memory(backend: Any) -> None:
    """Replace the forward method of an mLSTM layer of xLSTM."""
    backend.forward = partial(_matrix_memory_forward, backend.config.eps)


def _matrix_memory_forward(
    eps: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """[rows, heads, L, V] the output of mLSTM for queries and keys [rows, heads, L, K], values [rows, heads, L, V] and
    gates [rows, heads, L]."""
    if c_initial is not None:
        raise ValueError(
            "without gradients, xlstm cannot compute more tokens at once than max_inference_chunksize of its "
            "config.json; use a smaller --max-tokens-per-gpu"
        )
    parts = (query, key, value, F.logsigmoid(_exact(fgate)), _exact(igate).exp())
    return over_tree(partial(_read_memory, eps), *(x.transpose(1, 2) for x in parts)).transpose(1, 2), None


def _read_memory(eps: float, *inputs: Any) -> tuple[Tensor, Tensor]:
    return matrix_memory(*inputs, eps=eps)


def _short_convolution(mixer: Any) -> None:
    """Replace the forward method of a short convolution of LFM2."""
    mixer.forward = partial(_short_convolution_forward, mixer)


def _short_convolution_forward(mixer: Any, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    """[rows, L, d] the layer's output for ``hidden_states`` [rows, L, d]."""
    before, after, x = mixer.in_proj(hidden_states).chunk(3, -1)
    result: Tensor = mixer.out_proj(after * causal_convolution(mixer.conv, (before * x).mT).mT)
    return result


def _lightning_attention(mixer: Any) -> None:
    """Replace the forward method of a lightning attention layer of MiniMax."""
    mixer.forward = partial(_lightning_attention_forward, mixer)


def _lightning_attention_forward(mixer: Any, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
    """[rows, L, d] the layer's output for ``hidden_states`` [rows, L, d]."""
    mixed = mixer.act_fn(mixer.qkv_proj(hidden_states)).unflatten(-1, (mixer.num_attention_heads, -1))
    query, key, value = mixed.chunk(3, -1)
    g = -_exact(mixer.slope_rate[:, 0, 0]).expand(*mixed.shape[:3])
    y = mixer.norm(over_tree(decayed_attention, query, key, value, g).flatten(2))
    return mixer.out_proj(mixer.output_gate(hidden_states).sigmoid() * y), None


def stateless_kernel(module: nn.Module) -> str:
    """The name of this module's GPU kernel if the kernel cannot start from a state, else ""."""
    one = any(all(hasattr(module, name) for name in names) for names in (MAMBA_1, MAMBA_1_OF_HEADS))
    return "selective_scan_fn of mamba-ssm" if one and _kernel_of(module, "selective_scan_fn") is not None else ""


def _kernel_of(module: nn.Module, name: str) -> Kernel | None:
    """The kernel ``name`` for GPUs that transformers has loaded for this module; None if it is not installed."""
    return getattr(sys.modules.get(type(module).__module__), name, None)


def _exact(x: Tensor) -> Tensor:
    """``x`` in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Kind:
    """A kind of module with a state.

    Args:
        name: the usual name of such layers.
        attributes: attributes that only modules of this kind have.
        take_over: function (module) that replaces the module's part that goes from token to token.
        function: the module's forward method must also call a function of this name; "": no such condition.
    """

    name: str
    attributes: tuple[str, ...]
    take_over: Callable[[Any], None]
    function: str = ""

    def is_of(self, module: nn.Module) -> bool:
        """Whether ``module`` is of this kind."""
        if not all(hasattr(module, name) for name in self.attributes):
            return False
        return not self.function or self.function in inspect.unwrap(type(module).forward).__code__.co_names


CHUNKED_RULE = "torch_chunk_gated_delta_rule"
MAMBA_1_OF_HEADS = ("in_proj", "conv1d", "x_proj_weight", "dt_proj_weight", "A_log", "D")
MAMBA_1 = ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D")
KINDS = (
    Kind("gated delta rule", ("chunk_gated_delta_rule",), _gated_delta),
    Kind("gated delta rule", ("conv1d", "dt_bias", "A_log"), _gated_delta_of_file, CHUNKED_RULE),
    Kind("Mamba-1", MAMBA_1, _mamba_1),
    Kind("Mamba-1", MAMBA_1_OF_HEADS, _mamba_1_of_heads),
    Kind("RG-LRU", ("conv_1d", "rg_lru"), _real_gated_unit),
    Kind("mLSTM", ("chunkwise_kernel_fn", "sequence_kernel_fn", "step_kernel_fn"), _matrix_memory),
    Kind("Mamba-2", ("in_proj", "conv1d", "dt_bias", "A_log", "D"), _mamba_2),
    Kind("short convolution", ("in_proj", "conv", "L_cache"), _short_convolution),
    Kind("short convolution", ("in_proj", "conv", "conv_kernel_size"), _short_convolution),  # transformers 5.23
    Kind("lightning attention", ("qkv_proj", "slope_rate", "output_gate"), _lightning_attention),
)


def take_over(model: nn.Module) -> list[nn.Module]:
    """Let the layers of ``model`` that have a state follow the layout of the forward pass. Returns these layers."""
    modules = []
    for module in list(model.modules()):
        kind = next((kind for kind in KINDS if kind.is_of(module)), None)
        if kind is not None:
            kind.take_over(module)
            modules.append(module)
    return modules
