"""Steps and blocks of rows that both passes loop over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.xla.problem import Problem, loop
from rewriter.kernels.attention.xla.sizes import number
from rewriter.kernels.attention.xla.tile import Tile, least, plus
from rewriter.kernels.shared.slices import part, quotient, remainder, with_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array


def over_steps(p: Problem, body: Callable[[Step, Any], Any], carry: Any) -> Any:
    """Runs ``carry = body(step, carry)`` for each part of batch and heads."""
    return loop(0, p.sizes.steps, lambda i, c: body(Step(p, i), c), carry)


class Step:
    """Some batch entries and heads, with their keys and values ready for dots.

    Arrays for dots have two joined axes. Axis c has the batch entries and key heads.
    Axis r has the query heads of a key head and the queries of a block. XLA:CPU copies
    the operands of a dot with more axes than [c, r, h] [c, s, h].
    """

    def __init__(self, p: Problem, at: Any):
        z = p.sizes
        per_b = number(z.heads // z.some_heads)
        n = z.some_heads * z.group
        self.p = p
        entry, heads = quotient(at, per_b), remainder(at, per_b)
        self.here = {
            "b": (entry * z.some_b, z.some_b),
            "k": (heads * z.some_heads, z.some_heads),
            "n": (heads * n, n),
        }
        # Turned once for all blocks of rows, or tile by tile if there is but one.
        self.turned = None
        if not isinstance(z.blocks, int) or z.blocks > 1:
            self.turned = {x: self.turn(p.cut(x, self.here)) for x in "kv"}
        self.places = self._ends_of_blocks() if "kv_positions" in p.arrays else None
        self.offset = p.shift
        if "offset" in p.arrays:
            self.offset = plus(self.per_batch("offset"), self.offset)

    def _ends_of_blocks(self) -> tuple[Array, Array] | None:
        """Returns the least and the greatest position of each block of keys.

        None if the number of blocks is not known.
        """
        z = self.p.sizes
        if not isinstance(z.s, int):
            return None
        x = self.p.cut("kv_positions", self.here).astype(jnp.int32)
        beyond = ((0, 0), (0, -z.s % z.keys))
        blocks = (x.shape[0], -1, z.keys)
        ends = jnp.iinfo(jnp.int32)
        return (
            jnp.pad(x, beyond, constant_values=ends.max).reshape(blocks).min((0, 2)),
            jnp.pad(x, beyond, constant_values=ends.min).reshape(blocks).max((0, 2)),
        )

    def turn(self, x: Array) -> Array:
        """Returns [b, s, k, h] as [c, s, h]."""
        x = x.swapaxes(1, 2)
        return x.reshape(-1, *x.shape[2:])

    def mean(self) -> Array:
        """Returns the mean of v over all keys, [c, e]."""
        mean = self.p.cut("v", self.here).astype(self.p.wide).mean(1)
        return mean.reshape(-1, mean.shape[-1])

    def columns(self, into: Array) -> Array:
        """Returns an accumulator for a cotangent of k or v: [c, h, s], or `into`.

        With one block of rows a tile is visited once, and needs no sum.
        """
        if self.turned is None:
            return into
        z = self.p.sizes
        shape = (z.some_b * z.some_heads, into.shape[3], z.s)
        return self.p.full(shape, self.p.wide)

    def add_columns(self, into: Array, columns: Array) -> Array:
        """Returns `into` [b, s, k, h] plus this step's sums."""
        if self.turned is None:
            return columns
        z = self.p.sizes
        x = columns.reshape(z.some_b, z.some_heads, -1, z.s).transpose(0, 3, 1, 2)
        starts, sizes = self.p.place("bskh", into.shape, self.here)
        x = x.astype(into.dtype) + part(into, starts, sizes)
        return with_part(into, x, starts)

    def per_batch(self, name: str) -> Array:
        """Returns an operand [b] as int32 [b, 1, 1, 1, 1]."""
        x = self.p.cut(name, self.here).astype(jnp.int32)
        return x[:, None, None, None, None]

    def per_head(self, name: str) -> Array:
        """Returns an operand [n] as [1, k, g, 1, 1]."""
        x = self.p.cut(name, self.here).astype(self.p.wide)
        return self.split_heads(x, at=0)[None, :, :, None, None]

    def split_heads(self, x: Array, *, at: int) -> Array:
        """Returns x with its head axis, of size n or 1, split into (k, g)."""
        z = self.p.sizes
        apart = (1, 1) if x.shape[at] == 1 else (z.some_heads, z.group)
        return x.reshape(x.shape[:at] + apart + x.shape[at + 1 :])

    def over_blocks(self, body: Callable[[Block, Any], Any], carry: Any) -> Any:
        """Runs ``carry = body(block, carry)`` for each block of rows."""
        blocks = self.p.sizes.blocks
        return loop(0, blocks, lambda i, c: body(Block(self, i), c), carry)


class Block:
    """Some rows of a step: a block of queries against all its keys."""

    def __init__(self, step: Step, i: Any):
        self.step, self.p = step, step.p
        z = self.p.sizes
        self.nominal = i * number(z.rows)
        # The last block is moved up to stay inside: its first rows are computed twice.
        self.start = least(self.nominal, z.t - z.rows)
        self.here = {**step.here, "t": (self.start, z.rows)}
        self.t = self.start + lax.broadcasted_iota(jnp.int32, (z.rows, 1), 0)

    def rows(self, name: str) -> Array:
        """Returns rows of an operand [b, t, n, h] as [c, r, h]."""
        return self.merge(self.p.cut(name, self.here))

    def merge(self, x: Array) -> Array:
        """Returns [b, t, n, h] as [c, r, h]."""
        z = self.p.sizes
        x = self.step.split_heads(x, at=2).transpose(0, 2, 3, 1, 4)
        return x.reshape(z.some_b * z.some_heads, z.group * z.rows, -1)

    def per_row(self, x: Array) -> Array:
        """Returns [1, k, g, 1, 1] at every row: [c, r]."""
        z = self.p.sizes
        x = jnp.broadcast_to(x[..., 0], (z.some_b, z.some_heads, z.group, z.rows))
        return x.reshape(z.some_b * z.some_heads, z.group * z.rows)

    def each_row(self, x: Array) -> Array:
        """Returns [t] repeated for every head of a group: [r]."""
        return jnp.tile(x, self.p.sizes.group)

    def queries(self) -> Array:
        """Returns q [c, r, h], scaled already if scaling does not round."""
        q = self.rows("q")
        if q.dtype == self.p.wide:
            return q * jnp.asarray(self.p.factor(), self.p.wide)
        return q

    def lse(self, name: str = "lse") -> Array:
        """Returns the rows' log-sum-exp [c, r], or a part of it."""
        z = self.p.sizes
        lse = self.p.cut(name, self.here)
        return lse.reshape(z.some_b * z.some_heads, z.group * z.rows)

    def store(self, into: Array, rows: Array, axes: str = "btne") -> Array:
        """Returns `into` with rows [c, r(, e)] written to their place."""
        z = self.p.sizes
        shape = (z.some_b, z.some_heads * z.group, z.rows)
        rows = rows.reshape(shape + rows.shape[2:])
        if axes == "btne":
            rows = rows.swapaxes(1, 2)
        starts, _ = self.p.place(axes, into.shape, self.here)
        return with_part(into, rows.astype(into.dtype), starts)

    def part(self, name: str) -> Array:
        """Returns these rows of an operand [b|1, n|1, t|1, 1]."""
        return self.step.split_heads(self.p.cut(name, self.here), at=1)

    def add_part(self, name: str, into: Array, more: Array) -> Array:
        """Returns `into`, shaped as the operand, plus a sum shaped as its `part`."""
        return self.p.added(name, into, more, self.here)

    def bounds(self) -> tuple[Any, Any, Any]:
        """Returns the range of key blocks: start, end of the whole ones, end.

        Between the last two, positions must be compared one by one. With a left limit
        they must be compared from the start.
        """
        p, z, step = self.p, self.p.sizes, self.step
        left, right = p.window
        seen = p.visibility
        low, whole, high = 0, number(z.s), number(z.s)
        offset = step.offset
        lowest = offset if isinstance(offset, int) else jnp.min(offset)
        highest = offset if isinstance(offset, int) else jnp.max(offset)
        if right is not None:
            whole = plus(seen.last(plus(self.start, lowest)), 1)
            high = seen.last(plus(self.start + number(z.rows), highest))
        if left is not None:
            low = seen.first(plus(self.start, lowest))
        if "prefix" in p.arrays and p.window != (None, None):
            low, high = 0, jnp.maximum(high, jnp.max(step.per_batch("prefix")))
        if "kv_lengths" in p.arrays:
            lengths = step.per_batch("kv_lengths")
            whole = jnp.minimum(whole, jnp.min(lengths))
            high = jnp.minimum(high, jnp.max(lengths))
        s, keys = number(z.s), number(z.keys)
        low = quotient(_clip(low, s), keys)
        high = quotient(_clip(high, s) + (keys - 1), keys)
        whole = least(quotient(_clip(whole, s), keys), high)
        if step.places is not None:
            low, high = self._within_places(*step.places, low, high)
            whole = jnp.clip(whole, low, jnp.maximum(low, high))
        return (low, whole, high) if left is None else (low, low, high)

    def _within_places(
        self, least: Array, most: Array, low: Any, high: Any
    ) -> tuple[Any, Any]:
        """Returns a range of blocks without those at its ends that no row sees."""
        given, numbers = self.p.arrays, jnp.arange(least.shape[0], dtype=jnp.int32)
        if "last_position" in given:
            last = self.p.cut("last_position", self.here).astype(jnp.int32)
            reached = jnp.where(least <= last.max(), numbers + 1, 0)
            high = jnp.minimum(high, reached.max())
        if "first_position" in given:
            first = self.p.cut("first_position", self.here).astype(jnp.int32)
            reached = jnp.where(most >= first.min(), numbers, least.shape[0])
            low = jnp.maximum(low, reached.min())
        return low, high

    def over_keys(
        self, body: Callable[[Tile, Any], Any], carry: Any, every: bool = False
    ) -> Any:
        """Runs ``carry = body(tile, carry)`` for each key block some row sees."""
        low, whole, high = self.bounds()
        blocks = number(-(-self.p.sizes.s // self.p.sizes.keys))
        if every:
            low, whole, high = 0, 0, blocks
        elif self.p.fill is not None:
            alike, some = low is whole, self.p.reaches
            low = low if isinstance(low, int) and low == 0 else jnp.where(some, 0, low)
            whole = low if alike else whole
            known = isinstance(high, int) and high == blocks
            high = high if known else jnp.where(some, blocks, high)

        def run(start: Any, end: Any, edge: bool, carry: Any) -> Any:
            return loop(start, end, lambda j, c: body(Tile(self, j, edge), c), carry)

        if low is not whole:
            carry = run(low, whole, False, carry)
        return run(whole, high, True, carry)


def _clip(x: Any, high: Any) -> Any:
    static = isinstance(x, int) and isinstance(high, int)
    return max(0, min(x, high)) if static else jnp.clip(x, 0, high)
