"""Layers that carry a state from token to token, on a tree of shared prefixes.

Linear attention, state-space layers and short convolutions of transformers compute a row from its first token on: of
rows end to end the second would start from the first one's state, in silence. Here their projections, norms and gates
stay what they are, over all tokens at once, and what goes from token to token is computed level by level of the tree
(`PackedSequences.levels`): the nodes of a level are a batch, and each starts from the last state of its parent.

`KINDS` is the table: by which attributes such a module is known, and what of it is exchanged. Whether the result is
transformers' own is seen before a run starts, whatever the module's name (`slimelite.training.packing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimelite.training.batch import sequences_of_pass
from slimelite.training.scans import gated_delta_rule

# (inputs [n, L, ...] and a state [n, ...] or None) -> result [n, L, ...] and the last state
Scan = Callable[..., tuple[Tensor, Tensor]]


def over_tree(scan: Scan, *inputs: Tensor) -> Tensor:
    """[rows, L, ...] what ``scan`` makes of ``inputs`` [rows, L, ...] of the forward pass that is running."""
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
    """[rows, channels, L] from [rows, channels, L]: each token with the kernel's other tokens before it on its path."""
    positions, ends = sequences_of_pass().with_tokens_before(conv.kernel_size[0] - 1)
    tokens = _and_zero(x.transpose(1, 2).flatten(0, 1)).index_select(0, positions)
    out = F.conv1d(tokens.T[None], conv.weight, conv.bias, groups=conv.groups)[0].T
    return out.index_select(0, ends).unflatten(0, (len(x), -1)).transpose(1, 2)


def _and_zero(x: Tensor) -> Tensor:
    """[T + 1, ...]: after the tokens one of zeros, which is what padding is."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _gated_delta(mixer: Any) -> None:
    """Qwen3-Next, Qwen3.5, OLMo Hybrid: the module calls a kernel that it holds, and one or three convolutions."""
    mixer.chunk_gated_delta_rule = partial(_gated_delta_kernel, mixer.chunk_gated_delta_rule)
    mixer.causal_conv1d_fn = None
    parts: list[Any] = [part for part in mixer.children() if isinstance(part, nn.Conv1d)]
    for conv in parts:
        # a class of its own has tokens before channels, an activation, and a state that nobody reads here
        own = type(conv) is not nn.Conv1d
        conv.forward = partial(_activated if own else causal_convolution, conv)


def _gated_delta_kernel(
    kernel: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: object
) -> tuple[Tensor, None]:
    # fla's takes a state for each sequence and gives its gradient; it has no fp32
    fused = query.is_cuda and query.dtype != torch.float32 and not kernel.__module__.startswith("transformers")
    return over_tree(partial(_by_kernel, kernel) if fused else gated_delta_rule, query, key, value, g, beta), None


def _by_kernel(
    kernel: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` by a kernel of fla, or by transformers' function, which has the same arguments."""
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    result, last = kernel(query, key, value, g=g, beta=beta, **options)
    return result, last


def _activated(conv: nn.Conv1d, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
    return F.silu(causal_convolution(conv, hidden_states.mT)).mT, None


@dataclass(frozen=True)
class Kind:
    """Modules with a state.

    Args:
        name: for people.
        attributes: those that tell such a module from others.
        take_over: exchanges what of it goes from token to token.
    """

    name: str
    attributes: tuple[str, ...]
    take_over: Callable[[Any], None]


KINDS = (Kind("gated delta rule", ("chunk_gated_delta_rule",), _gated_delta),)


def take_over(model: nn.Module) -> list[nn.Module]:
    """Let the layers of ``model`` that carry a state follow the layout of the forward pass; the modules."""
    modules = []
    for module in list(model.modules()):
        kind = next((kind for kind in KINDS if all(hasattr(module, name) for name in kind.attributes)), None)
        if kind is not None:
            kind.take_over(module)
            modules.append(module)
    return modules
