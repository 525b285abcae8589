"""The KV that belongs to one sequence alone: its answer, and what of its prompt it is cheaper to keep close.

One arena holds the tails of up to `length` tokens of some sequences, as one rectangle that a single attention call
reads. Arenas of 32, 64, 128 … tokens are the buckets: a short answer does not pay for a long one beside it. Rows are
dense: when a sequence leaves, the last row takes its place.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from agentlightning.trainer.engine.sequence import Sequence

__all__ = ["Arena", "Arenas"]

SHORTEST = 32


class Arena:
    """Rows of `length` tokens: KV (layers, 2, rows, heads, length, head_dim)."""

    def __init__(
        self, length: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = length
        self.rows: list[Sequence] = []
        layers, heads, width = shape
        # Zeros and not garbage: masked positions are multiplied by a probability of 0, and 0 × NaN is NaN.
        self.kv = torch.zeros(layers, 2, 4, heads, length, width, dtype=dtype, device=device)

    def add(self, tail: "Sequence") -> None:
        if len(self.rows) == self.kv.shape[2]:
            grown = torch.zeros_like(self.kv)
            self.kv = torch.cat([self.kv, grown], dim=2)
        tail.arena, tail.row = self, len(self.rows)
        self.rows.append(tail)

    def remove(self, tail: "Sequence") -> None:
        last = self.rows.pop()
        if last is not tail:
            n = last.tail_length
            self.kv[:, :, tail.row, :, :n] = self.kv[:, :, last.row, :, :n]
            last.row = tail.row
            self.rows[last.row] = last
        tail.arena = None

    def tokens(self, tail: "Sequence", start: int, end: int) -> torch.Tensor:
        """A view of a row's KV (layers, 2, heads, tokens, head_dim)."""
        return self.kv[:, :, tail.row, :, start:end]


class Arenas:
    """All buckets; each is made when first needed."""

    def __init__(self, shape: tuple[int, int, int], *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._buckets: dict[int, Arena] = {}

    def __iter__(self) -> Iterator[Arena]:
        """Those that hold rows, shortest first."""
        return (arena for _, arena in sorted(self._buckets.items()) if arena.rows)

    def place(self, tail: "Sequence", length: int) -> None:
        """Give a sequence without a row one of at least `length` tokens."""
        size = SHORTEST
        while size < length:
            size *= 2
        if size not in self._buckets:
            self._buckets[size] = Arena(size, self.shape, self.dtype, self.device)
        self._buckets[size].add(tail)

    def prepend(self, tail: "Sequence", blocks: list[torch.Tensor], room: int = 1) -> None:
        """Move a row to where `blocks`, its tokens and `room` more fit, with `blocks` before its tokens."""
        arena = tail.arena
        assert arena is not None, "only a placed sequence can move"
        own = arena.tokens(tail, 0, tail.tail_length).clone()
        arena.remove(tail)
        pieces = [*blocks, own]
        length = sum(piece.shape[-2] for piece in pieces)
        self.place(tail, length + room)
        arena, at = tail.arena, 0
        assert arena is not None, "place() gave it a row"
        for piece in pieces:
            arena.tokens(tail, at, at + piece.shape[-2]).copy_(piece)
            at += piece.shape[-2]
        tail.tail_length = length

    def release_memory(self) -> None:
        """Drop the buckets that hold no row."""
        self._buckets = {size: arena for size, arena in self._buckets.items() if arena.rows}
