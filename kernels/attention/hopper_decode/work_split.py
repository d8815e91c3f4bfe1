"""Splits the blocks of keys of all sequences evenly among readers.

The blocks to read, of all pairs of a sequence and a key head, form one line. Each
reader takes equally many neighbouring blocks of it, so that sequences of any lengths
are balanced. A reader's share of one pair is a piece. The numbers of readers and of
pairs only grow along the line. So their sum numbers the pieces, and the pieces of a
pair follow each other. Everything here is arithmetic on scalars of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class WorkQueue:
    """The work queue: all blocks of all pairs, in a line.

    Attributes:
        readers: The number of readers that share it.
        b: Sequences.
        heads: Key heads.
        ends: int32 [b], or a reference to it: the blocks of one head of each sequence
            and of all before it. Each has one at least.

    Example:
        >>> queue = WorkQueue(2, 2, 1, [3, 4])  # a sequence of three blocks, one of one
        >>> [tuple(map(int, queue.share(reader))) for reader in range(2)]
        [(0, 2), (2, 4)]
        >>> [tuple(map(int, queue.readers_of(pair))) for pair in range(2)]
        [(0, 1), (1, 1)]
    """

    readers: int
    b: int
    heads: int
    ends: Any

    @property
    def pieces(self) -> int:
        """The number of possible pieces."""
        return self.readers + self.b * self.heads

    def _shares(self) -> tuple[Any, Any]:
        """The blocks of each reader, and the number of readers with one more."""
        total = self.ends[self.b - 1] * self.heads
        each = _div(total, self.readers)
        return each, total - each * self.readers

    def share(self, reader: Any) -> tuple[Any, Any]:
        """Returns the first block of a reader, and one past its last."""
        each, more = self._shares()
        first = reader * each + jnp.minimum(reader, more)
        return first, first + each + jnp.where(reader < more, 1, 0)

    def begin(self, sequence: Any) -> Any:
        """Returns the blocks of one head of all sequences before one."""
        before = self.ends[jnp.maximum(sequence - 1, 0)]
        return jnp.where(sequence == 0, 0, before)

    def sequence_of(self, block: Any) -> Any:
        """Returns the sequence of a block; the last sequence past the end."""
        low, high = jnp.int32(0), jnp.int32(self.b - 1)
        for _ in range((self.b - 1).bit_length()):
            middle = _div(low + high, 2)
            within = block < self.ends[middle] * self.heads
            low = jnp.where(within, low, jnp.minimum(middle + 1, self.b - 1))
            high = jnp.where(within, middle, high)
        return low

    def readers_of(self, pair: Any) -> tuple[Any, Any]:
        """Returns the first and the last reader that take blocks of a pair."""
        sequence = _div(pair, self.heads)
        begin = self.begin(sequence)
        count = self.ends[sequence] - begin
        first = begin * self.heads + (pair - sequence * self.heads) * count
        return self._reader_of(first), self._reader_of(first + count - 1)

    def _reader_of(self, block: Any) -> Any:
        each, more = self._shares()
        larger = more * (each + 1)
        of_larger = _div(block, each + 1)
        rest = more + _div(jnp.maximum(block - larger, 0), jnp.maximum(each, 1))
        return jnp.where(block < larger, of_larger, rest)


def _div(x: Any, y: Any) -> Any:
    """Returns x // y for x that is not negative."""
    return lax.div(jnp.int32(x), jnp.int32(y))
