"""Predicts a training step of Qwen2.5-0.5B on one H100, plain and with --compile. Nothing of it has run on an H100.

    python scripts/lab/predict_mfu.py [--tokens 9216] [--length 1024] [--prompt 128]

The graphs that torch.compile makes of a decoder layer and of a chunk of the LM head, forward and backward, are recorded
on a CPU for two small numbers of tokens. All values are extrapolated linearly. The time of matrix products and
attention is their operations at rates that H100s reach. The time of every other kernel is the bytes that it reads and
writes. Plain, each operator is one kernel. Compiled, connected operators without a matrix product between them are one
kernel. Loss, optimizer and embedding are left out.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from slimelite.base.version import add_version
from slimelite.training.model import _chunk_gradient, _chunk_scores

# an H100 SXM: dense bf16 by its data sheet; what matrix products, flash attention and memory reach
PEAK = 989e12
PRODUCTS, FLASH, FLASH_BACKWARD, BYTES = 0.65 * PEAK, 330e12, 260e12, 0.85 * 3.35e12
# seconds of a kernel's start on the GPU, of its launch by Python, and of a call of a compiled graph
START, LAUNCH, CALL = 2e-6, 5.5e-6, 40e-6
# FSDP at one rank, each pass: fp32 weights are read and written in bf16, and copied; gradients go the way back [bytes]
FSDP_BYTES = 30
LAYERS, HIDDEN, INNER, HEADS, GROUPS, VOCAB = 24, 896, 4864, 14, 2, 151936
CHUNK = 2**27
SMALL = (64, 128)
EXTERN = {"mm", "addmm", "bmm"}
VIEWS = {
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "expand",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "alias",
}


@dataclass
class Cost:
    """The work on the GPU: ``operations`` of matrix products, ``bytes`` of other kernels, and the number of
    ``kernels``."""

    operations: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0

    def plus(self, other: Cost, times: float = 1.0) -> Cost:
        """The sum with ``times`` times ``other``."""
        mine, theirs = vars(self), vars(other)
        return Cost(**{name: mine[name] + times * theirs[name] for name in mine})

    @property
    def seconds(self) -> float:
        """Predicted seconds on the GPU."""
        return self.operations / PRODUCTS + self.bytes / BYTES + self.kernels * START


@dataclass
class Recorder:
    """A backend of torch.compile that records the graphs and runs them unchanged."""

    graphs: list[fx.Graph] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, _: Any) -> Any:
        self.graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its graphs recorded."""
        return torch.compile(function, dynamic=False, backend=aot_autograd(fw_compiler=self))


def size(node: fx.Node) -> int:
    """Bytes of a node's result."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else [value]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def source(node: fx.Node) -> fx.Node:
    """The node that a view is a view of."""
    while node.op == "call_function" and name(node) in VIEWS:
        node = node.all_input_nodes[0]
    return node


def name(node: fx.Node) -> str:
    """The name of a node's operator."""
    return str(getattr(node.target, "overloadpacket", node.target)).split(".")[-1]


def groups(graph: fx.Graph, *, fused: bool) -> Iterator[set[fx.Node]]:
    """The nodes of each kernel that is not a matrix product."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and name(n) not in VIEWS | EXTERN | {"getitem"}]
    group = {n: {n} for n in nodes}
    for node in nodes if fused else []:
        for other in map(source, node.all_input_nodes):
            if other in group and group[other] is not group[node]:
                together = group[other] | group[node]
                group |= dict.fromkeys(together, together)
    yield from {id(g): g for g in group.values()}.values()


def cost(graphs: list[fx.Graph], *, fused: bool) -> Cost:
    """The cost of all graphs."""
    found = Cost()
    for graph in graphs:
        for node in graph.nodes:
            if node.op == "call_function" and name(node) in EXTERN:
                left = node.all_input_nodes[-2].meta["val"]
                found = found.plus(Cost(2.0 * node.meta["val"].numel() * left.shape[-1], 0, 1))
        for group in groups(graph, fused=fused):
            read = {source(i) for n in group for i in n.all_input_nodes} - group
            written = {n for n in group if not fused or any(user_of(n, group))}
            found = found.plus(Cost(0, sum(map(size, read)) + sum(map(size, written)), 1))
    return found


def user_of(node: fx.Node, group: set[fx.Node]) -> Iterator[bool]:
    """For each user of ``node``, through views, whether it is outside its kernel."""
    for user in node.users:
        if user.op == "call_function" and name(user) in VIEWS:
            yield from user_of(user, group)
        else:
            yield user not in group


def layer_graphs(tokens: int) -> list[fx.Graph]:
    """The graphs of one decoder layer without attention, which is not compiled."""
    config = AutoConfig.for_model(
        "qwen2", hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=GROUPS
    )
    config.num_hidden_layers, config.vocab_size, config._attn_implementation = 1, 8, "outside"
    AttentionInterface.register("outside", torch.compiler.disable(lambda _, q, *__, **___: (q.transpose(1, 2), None)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="outside").model
    layer, record = model.layers[0], Recorder()
    states = torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    angles = model.rotary_emb(states, torch.arange(tokens)[None])
    out = record.compiled(layer.forward)(states, position_embeddings=angles)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    return record.graphs


def head_graphs(rows: int) -> list[fx.Graph]:
    """The graphs of the LM head between its matrix products, for each row of logits in fp32."""
    record = Recorder()
    logits, targets = torch.randn(rows, VOCAB), torch.zeros(rows, dtype=torch.int64)
    with torch.no_grad():
        log_probs, _, log_z = record.compiled(_chunk_scores)(logits, targets)
        record.compiled(_chunk_gradient)(logits, log_z, targets, log_probs, None)
    return record.graphs


def at(tokens: float, few: Cost, more: Cost) -> Cost:
    """The cost for ``tokens``, extrapolated from the costs for the numbers in `SMALL`."""
    slope = more.plus(few, -1.0)
    return few.plus(slope, (tokens - SMALL[0]) / (SMALL[1] - SMALL[0]))


def main() -> None:
    """Print the prediction, plain and compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    for flag, default in (("--tokens", 9216), ("--length", 1024), ("--prompt", 128)):
        parser.add_argument(flag, type=int, default=default)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    tokens, rows = options.tokens, options.tokens // options.length
    targets = rows * (options.length - options.prompt)
    recorded = [(layer_graphs(n), head_graphs(n)) for n in SMALL]
    # operations of attention in a layer, forward
    pairs = 4.0 * rows * options.length * (options.length + 1) / 2 * HIDDEN
    matrices = HIDDEN * (2 * HIDDEN + 2 * GROUPS * HIDDEN // HEADS + 3 * INNER)
    useful = 3 * (2.0 * LAYERS * matrices * tokens + 2.0 * VOCAB * HIDDEN * targets + LAYERS * pairs)
    attention = LAYERS * (pairs / FLASH + 2 * pairs / FLASH_BACKWARD)
    chunks = -(-targets * VOCAB // CHUNK)
    # logits twice, fp32 results; both gradients; the weight's gradient is added up in fp32 and cast to bf16 at the end
    head_products = Cost(8.0 * VOCAB * HIDDEN * targets, 4.0 * VOCAB * (2 * targets + 3 * HIDDEN * chunks), 5 * chunks)
    gradient = Cost(0, 6.0 * VOCAB * targets, 2 * chunks)  # scaled and cast to bf16 for its products
    fsdp = Cost(0, FSDP_BYTES * (LAYERS * matrices + VOCAB * HIDDEN), 30 * LAYERS)
    for title, fused in (("plain", False), ("--compile", True)):
        (few, few_head), (more, more_head) = [[cost(graphs, fused=fused) for graphs in pair] for pair in recorded]
        layers, head = Cost().plus(at(tokens, few, more), LAYERS), at(targets, few_head, more_head)
        head.kernels *= chunks
        head = head.plus(head_products).plus(gradient)
        all_ = layers.plus(head).plus(fsdp)
        on_gpu = all_.seconds + attention
        by_host = all_.kernels * LAUNCH + (8 * LAYERS + 2 * chunks) * CALL * fused
        took = max(on_gpu, by_host)
        print(
            f"{title:10s} predicted: {1e3 * took:6.1f} ms for {tokens} tokens, MFU {useful / took / PEAK:.1%}; on the "
            f"GPU {1e3 * on_gpu:.1f} ms (layers {1e3 * layers.seconds:.1f}, attention {1e3 * attention:.1f}, head "
            f"{1e3 * head.seconds:.1f}, FSDP {1e3 * fsdp.seconds:.1f}), by Python {1e3 * by_host:.1f} ms"
        )


if __name__ == "__main__":
    main()
