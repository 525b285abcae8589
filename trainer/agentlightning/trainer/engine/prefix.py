"""The prompts' keys and values, shared: a radix tree whose nodes hold the KV of a run of tokens.

A node is computed once, whoever asks first, and read by every sequence whose tokens run through it. Nodes enter the
tree while a step is planned, before the forward that fills them: so sequences of one step share, too. A node that a
sequence uses is locked; the others are forgotten, least recently used first, when the tree grows beyond its budget.
"""

from collections.abc import Iterator, Sequence

import torch

__all__ = ["NOWHERE", "Node", "PrefixTree"]

MIN_SPLIT = 16
"""Tokens. A shorter common run inside a node is computed again: attending to one more node costs more than that."""


class Node:
    """A run of tokens at positions start … end, and their KV (layers, 2, heads, tokens, head_dim)."""

    __slots__ = ("children", "kv", "locks", "parent", "start", "tokens", "used")

    def __init__(self, parent: "Node | None", start: int, tokens: list[int], kv: torch.Tensor) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.kv = kv
        self.children: dict[int, list[Node]] = {}
        self.locks = 0
        """Sequences whose tokens run through this node."""
        self.used = 0
        """Clock of the last use, for eviction."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> Iterator["Node"]:
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


NOWHERE = Node(None, 0, [], torch.empty(0))
"""The place of a sequence that has no prefix yet."""


class PrefixTree:
    """All prefixes at hand, at most `budget` tokens beyond those in use."""

    def __init__(
        self, shape: tuple[int, int, int], *, budget: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`shape` is (layers, KV heads, head_dim)."""
        self.shape = shape
        self.budget = budget
        self.dtype = dtype
        self.device = device
        self.clear()

    def clear(self) -> None:
        """Forget everything. Sequences that hold nodes keep them, outside the tree."""
        self.root = Node(None, 0, [], torch.empty(0))
        self.size = 0
        self._clock = 0

    def match(self, tokens: Sequence[int], limit: int, start: Node = NOWHERE) -> Node:
        """The node that ends the longest known prefix of tokens[:limit]; a node is split where they part.

        `start` is a node that is known to be on the way.
        """
        node = self.root if start is NOWHERE else start
        at = node.end
        self._clock += 1
        while at < limit:
            best, length = None, 0
            for child in node.children.get(tokens[at], ()):
                common = _common(child.tokens, tokens, at, limit)
                if common > length and (common == len(child.tokens) or common >= MIN_SPLIT):
                    best, length = child, common
            if best is None:
                break
            if length < len(best.tokens):
                best = self._split(best, length)
            best.used = self._clock
            node, at = best, at + length
        return node

    def add(self, parent: Node, tokens: list[int], kv: torch.Tensor | None = None) -> Node:
        """A new node under `parent`; without `kv` its memory is taken and the coming forward fills it."""
        if kv is None:
            layers, heads, width = self.shape
            kv = torch.empty(layers, 2, heads, len(tokens), width, dtype=self.dtype, device=self.device)
        node = Node(parent, parent.end, tokens, kv)
        node.used = self._clock
        parent.children.setdefault(tokens[0], []).append(node)
        self.size += len(tokens)
        return node

    def lock(self, node: Node) -> None:
        for each in node.path():
            each.locks += 1

    def unlock(self, node: Node) -> None:
        for each in node.path():
            each.locks -= 1

    def evict(self) -> None:
        """Forget least recently used leaves until the budget is met, or only locked nodes are left."""
        if self.size <= self.budget:
            return
        # Some more than needed, so that a full tree is not searched again at every step.
        goal = self.budget * 3 // 4
        while self.size > goal:
            leaves = sorted(
                (n for n in self._nodes() if not n.children and not n.locks), key=lambda n: n.used
            )
            if not leaves:
                return
            for leaf in leaves:
                if self.size <= goal:
                    return
                self._remove(leaf)

    def _nodes(self) -> Iterator[Node]:
        stack = [child for siblings in self.root.children.values() for child in siblings]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(child for siblings in node.children.values() for child in siblings)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None, "the root is never evicted"
        siblings = parent.children[leaf.tokens[0]]
        siblings.remove(leaf)
        if not siblings:
            del parent.children[leaf.tokens[0]]
        self.size -= len(leaf.tokens)
        if (
            parent.parent is not None
            and parent.kv.untyped_storage().data_ptr() == leaf.kv.untyped_storage().data_ptr()
        ):
            parent.kv = parent.kv.clone()  # they were one node once; let go of the leaf's half of the memory

    def _split(self, node: Node, length: int) -> Node:
        """Cut `node` after `length` tokens. It becomes the lower half, so that sequences which hold it see both.

        The halves are views of one memory: a forward that is about to fill it reaches both.
        """
        parent = node.parent
        assert parent is not None, "the root has no tokens to split"
        upper = Node(parent, node.start, node.tokens[:length], node.kv[..., :length, :])
        upper.locks, upper.used = node.locks, node.used
        siblings = parent.children[node.tokens[0]]
        siblings[siblings.index(node)] = upper
        node.parent, node.start, node.tokens = upper, node.start + length, node.tokens[length:]
        node.kv = node.kv[..., length:, :]
        upper.children[node.tokens[0]] = [node]
        return upper


def _common(run: list[int], tokens: Sequence[int], at: int, limit: int) -> int:
    """How many tokens of `run` continue tokens[at:limit]."""
    length = min(len(run), limit - at)
    if run[:length] == tokens[at : at + length]:
        return length
    return next(i for i in range(length) if run[i] != tokens[at + i])
