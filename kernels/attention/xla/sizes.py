"""Sizes of blocks of rows and keys, and of the steps over batch entries and heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import min_dim

from rewriter.kernels.attention.xla.config import Blocks

if TYPE_CHECKING:
    from jax import Array


@dataclass(frozen=True)
class Sizes:
    """Block sizes, and batch entries and heads per step.

    The sizes b, t, s, heads, rows and keys may be symbolic.
    """

    b: int
    t: int
    s: int
    heads: int
    group: int
    rows: int
    keys: int
    some_b: int
    some_heads: int

    @property
    def blocks(self) -> int:
        """Blocks of rows."""
        return -(-self.t // self.rows)

    @property
    def steps(self) -> int:
        """Steps over batch entries and heads."""
        return (self.b // self.some_b) * (self.heads // self.some_heads)

    @property
    def rows_overlap(self) -> bool:
        """Whether the last block of rows may repeat rows of the one before."""
        return _may_be_ragged(self.t, self.rows)

    @property
    def keys_overlap(self) -> bool:
        """Whether the last block of keys may repeat keys of the one before."""
        return _may_be_ragged(self.s, self.keys)


def _may_be_ragged(n: int, size: int) -> bool:
    known = isinstance(n, int) and isinstance(size, int)
    return n % size != 0 if known else True


def number(x: Any) -> Any:
    """Returns a symbolic size as an array; other numbers unchanged."""
    known = isinstance(x, (int, jax.Array))
    return x if known else jnp.asarray(x, jnp.int32)


def _divisor(n: int, most: int) -> int:
    if not isinstance(n, int):
        return 1  # of a symbolic size
    return next(d for d in range(max(1, min(n, most)), 0, -1) if n % d == 0)


def _even(n: int, most: int) -> int:
    """Returns a block size up to `most` that divides n into nearly equal blocks.

    That of a symbolic size is symbolic too: at most `most`, and no larger than n.
    """
    if not isinstance(n, int):
        return min_dim(n, most)
    blocks = -(-n // most)
    size = -(-n // blocks)
    return min(n, (size + 7) // 8 * 8)


def sizes_of(q: Array, k: Array, blocks: Blocks) -> Sizes:
    """Returns the sizes for q [b, t, n, h] and k [b, s, k, h]."""
    b, t, n, _ = q.shape
    s, heads = k.shape[1:3]
    group = n // heads
    most, lines = blocks.rows, blocks.lines
    rows = _even(t, max(most // 8, min(most, 2 * most // group)))
    keys = _even(s, blocks.keys)
    few = isinstance(t, int) and t * group < most // 2
    if few and isinstance(heads, int):
        # Few rows, as in decoding: longer blocks, up to a number of keys of all heads.
        width = heads * k.shape[3]
        longest = min(lines // width, most * blocks.keys // (t * group))
        keys = _even(s, max(blocks.keys, longest))
    tall, wide = (n if isinstance(n, int) else blocks.rows for n in (rows, keys))
    pairs = max(1, min(blocks.tile // (tall * group), lines // k.shape[3]) // wide)
    some_heads = _divisor(heads, pairs)
    some_b = _divisor(b, pairs // heads) if some_heads == heads else 1
    return Sizes(b, t, s, heads, group, rows, keys, some_b, some_heads)
