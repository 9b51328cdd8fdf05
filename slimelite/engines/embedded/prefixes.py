"""The radix tree of cached token sequences. The samples of a group, the turns of a conversation and later rollouts
share their prefixes through this tree."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch

from slimelite.engines.embedded.memory import KVMemory, Place


class Node:
    """The tokens [start, end) of every sequence that passes through this node.

    ``kv``: the keys and values of these tokens [layers, 2, kv heads, end - start, head dim]; None if only the row at
    ``holder`` has them. ``users``: the number of running or filling sequences that pass through this node. A node with
    users is not evicted.
    """

    __slots__ = ("children", "end", "holder", "kv", "parent", "start", "tokens", "users")

    def __init__(self, parent: Node | None, tokens: np.ndarray, kv: torch.Tensor | None) -> None:
        self.parent, self.tokens, self.kv = parent, tokens, kv
        self.start: int = parent.end if parent else 0
        self.end: int = self.start + len(tokens)
        self.children: dict[int, Node] = {}
        self.users = 0
        self.holder: Place | None = None

    def path(self) -> list[Node]:
        """The nodes from the root's child to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def at(self, layer: int) -> torch.Tensor:
        """The keys and values of a layer [2, kv heads, end - start, head dim], read from the segment or from the
        row."""
        if self.kv is not None:
            return self.kv[layer]
        assert self.holder is not None
        return self.holder.at(layer)[:, :, self.start - self.holder.base : self.end - self.holder.base]


class PrefixTree:
    """Finds the longest cached prefix of a sequence. Prefixes without users are evicted, the least recently used first.

    ``idle_tokens``: the number of tokens in segments without users. ``splits``: the number of nodes that were split so
    far. After a split, an earlier result of `Node.path` is incomplete.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory, self.splits = memory, 0
        self.clear()

    def clear(self) -> None:
        """Remove all nodes, for example after a weight update. No sequence may be using a node."""
        self.root = Node(None, np.zeros(0, np.int64), None)
        # nodes with a segment; a node is always younger than its descendants, so leaves are evicted first
        self._by_age: OrderedDict[Node, None] = OrderedDict()
        self.idle_tokens = 0

    def match(self, tokens: np.ndarray, node: Node | None = None) -> Node:
        """The last node of the longest cached prefix of ``tokens``. The search starts at ``node``.

        If the prefix ends inside a node, the node is split there.
        """
        node = node or self.root
        while node.end < len(tokens):
            child = node.children.get(int(tokens[node.end]))
            if child is None:
                break
            count = min(len(child.tokens), len(tokens) - node.end)
            differs = child.tokens[:count] != tokens[node.end : node.end + count]
            common = int(differs.argmax()) if differs.any() else count
            if common < len(child.tokens):
                return self._split(child, common)
            node = child
        return node

    def add(self, tokens: np.ndarray, kv: torch.Tensor, start: int, node: Node) -> Node:
        """Cache all ``tokens``. The nodes up to ``node`` already contain the beginning of ``tokens``. Returns the last
        node.

        ``kv``: a segment with the keys and values of ``tokens[start:]``. The tree copies the keys and values that it
        does not have yet.
        """
        node = self.match(tokens, node)
        self._memory.give_back(kv)
        if node.end == len(tokens):
            return node
        if node.end > start:
            kv = kv[:, :, :, node.end - start :].clone()
        child = Node(node, tokens[node.end :], None)
        node.children[int(child.tokens[0])] = child
        self._memory.segment_tokens += len(child.tokens)
        self.idle_tokens += len(child.tokens)
        child.kv = kv
        self._touch(child)
        return child

    def use(self, leaf: Node) -> None:
        """Count one more user for each node up to ``leaf``."""
        for node in leaf.path():
            node.users += 1
            if node.users == 1 and node.kv is not None:
                self.idle_tokens -= len(node.tokens)
        self._touch(leaf)

    def leave(self, leaf: Node) -> None:
        """The inverse of `use`."""
        for node in reversed(leaf.path()):
            node.users -= 1
            if node.users == 0 and node.kv is not None:
                self.idle_tokens += len(node.tokens)
            elif node.users == 0:
                self._unlink(node)

    def lend(self, node: Node, holder: Place) -> None:
        """Free the segment of a node that sequences use. The row at ``holder`` has a copy of the keys and values."""
        assert node.users
        assert node.kv is not None
        self._memory.give_back(node.kv)
        node.kv, node.holder = None, holder
        del self._by_age[node]

    def own(self, node: Node) -> None:
        """The inverse of `lend`: copy the row's keys and values into a segment."""
        if node.kv is None:
            kv = self._memory.segment(len(node.tokens))
            for layer in range(self._memory.num_layers):
                kv[layer] = node.at(layer)
            node.kv, node.holder = kv, None
            self._touch(node)

    def evict(self) -> bool:
        """Free the segment that was unused for the longest time. Returns False if all segments are in use."""
        for node in self._by_age:
            if not node.users and not node.children:
                assert node.kv is not None
                self._memory.give_back(node.kv)
                self.idle_tokens -= len(node.tokens)
                del self._by_age[node]
                self._unlink(node)
                return True
        return False

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[int(node.tokens[0])]

    def _touch(self, leaf: Node) -> None:
        node: Node | None = leaf
        while node is not None:
            if node.kv is not None:
                self._by_age[node] = None
                self._by_age.move_to_end(node)
            node = node.parent

    def _split(self, node: Node, count: int) -> Node:
        """Insert a node above ``node`` for its first ``count`` tokens. ``node`` keeps the rest."""
        assert node.parent is not None
        self.splits += 1
        front = Node(node.parent, node.tokens[:count], None)
        front.users, front.holder = node.users, node.holder
        front.parent.children[int(front.tokens[0])] = front  # type: ignore[union-attr]
        front.children[int(node.tokens[count])] = node
        node.parent, node.tokens, node.start = front, node.tokens[count:], front.end
        if node.kv is not None:
            # copies, so that each part can be freed separately
            front.kv, node.kv = node.kv[:, :, :, :count].clone(), node.kv[:, :, :, count:].clone()
            self._touch(front)
        return front
