"""Steps, blocks of rows and tiles of scores that both passes loop over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.visibility import Visibility, within
from rewriter.kernels.attention.xla.config import DEFAULT
from rewriter.kernels.attention.xla.sizes import Sizes, number, sizes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array

AXES = {
    "q": "btnh", "k": "bskh", "v": "bske", "bias": "bnts", "mask": "bnts",
    "dropout": "bnts", "q_segments": "bt", "kv_segments": "bs",
    "kv_positions": "bs", "first_position": "bt", "last_position": "bt",
    "kv_lengths": "b", "offset": "b", "prefix": "b", "alibi": "n", "sinks": "n",
    "scale_factor": "", "out": "btne", "cotangent": "btne", "lse": "bnt",
}  # fmt: skip
"""Every array's axes. All but t and s of k, v, out and lse may have size 1."""


@dataclass(frozen=True)
class Problem:
    """The operands and parameters of one call."""

    arrays: dict[str, Array]
    sizes: Sizes
    zero: Array
    scale: float
    window: tuple[int | None, int | None]
    shift: int
    softcap: float | None
    empty_rows: str
    out_dtype: Any
    wide: Any

    @property
    def visibility(self) -> Visibility:
        """What is seen, without numbers that are known at run time."""
        return Visibility(self.sizes.t, self.sizes.s, *self.window)

    def full(self, shape: tuple[int, ...], dtype: Any, value: float = 0) -> Array:
        """Returns a constant array that can start a loop's carry."""
        return jnp.full(shape, value, dtype) + self.zero.astype(dtype)

    def cut(self, name: str, at: dict[str, tuple[Any, int]]) -> Array:
        """Returns an operand's slice at (start, size) by axis letter."""
        x = self.arrays[name]
        starts, sizes = self.place(AXES[name], x.shape, at)
        return x if sizes == x.shape else lax.dynamic_slice(x, starts, sizes)

    def place(
        self, axes: str, shape: tuple[int, ...], at: dict[str, tuple[Any, int]]
    ) -> tuple[list[Any], tuple[int, ...]]:
        """Returns the starts and sizes of a slice; axes of size 1 stay whole."""
        whole = [size == 1 or x not in at for x, size in zip(axes, shape, strict=True)]
        starts = [
            jnp.int32(0 if w else at[x][0]) for w, x in zip(whole, axes, strict=True)
        ]
        sizes = [
            size if w else at[x][1]
            for w, x, size in zip(whole, axes, shape, strict=True)
        ]
        return starts, tuple(sizes)

    def factor(self) -> Array | float:
        """Returns the factor of q kᵀ."""
        if "scale_factor" not in self.arrays:
            return self.scale
        return self.arrays["scale_factor"].astype(self.wide) * self.scale

    def over_steps(self, body: Callable[[Step, Any], Any], carry: Any) -> Any:
        """Runs ``carry = body(step, carry)`` for each part of batch and heads."""
        return _loop(0, self.sizes.steps, lambda i, c: body(Step(self, i), c), carry)


def _loop(start: Any, end: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    if isinstance(start, int) and isinstance(end, int):
        if start >= end:
            return carry
        if end == start + 1:
            return body(start, carry)
    start, end = jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32)
    return lax.fori_loop(start, end, body, carry)


def problem_of(q: Array, k: Array, v: Array, given: dict[str, Any]) -> Problem:
    """Returns the problem of one call, from arrays and parameters by name."""
    params: dict[str, Any] = {
        "scale": 1.0, "window": (None, None), "shift": 0, "softcap": None,
        "empty_rows": "nan", "out_dtype": None,
    }  # fmt: skip
    arrays = {"q": q, "k": k, "v": v}
    sizes = sizes_of(q, k, given.pop("config", None) or DEFAULT)
    for name, value in given.items():
        if name in params:
            params[name] = value
        elif value is not None:
            arrays[name] = value
    params["out_dtype"] = jnp.dtype(params["out_dtype"] or q.dtype)
    wide = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    # A zero that varies over the same mesh axes as the operands: inside
    # jax.shard_map a loop's first carry must vary as its last.
    zero = jnp.zeros((), wide)
    for x in arrays.values():
        first = x[(0,) * x.ndim]
        zero = zero + jnp.where(first == first, jnp.zeros((), wide), 0)
    return Problem(arrays=arrays, sizes=sizes, zero=zero, wide=wide, **params)


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
        self.here = {
            "b": (at // per_b * z.some_b, z.some_b),
            "k": (at % per_b * z.some_heads, z.some_heads),
            "n": (at % per_b * n, n),
        }
        # Turned once for all blocks of rows, or tile by tile if there is but one.
        self.turned = None
        if not isinstance(z.blocks, int) or z.blocks > 1:
            self.turned = {x: self.turn(p.cut(x, self.here)) for x in "kv"}
        self.places = self._ends_of_blocks() if "kv_positions" in p.arrays else None
        self.offset = p.shift
        if "offset" in p.arrays:
            self.offset = self.offset + self.per_batch("offset")

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
        x = x.astype(into.dtype) + lax.dynamic_slice(into, starts, sizes)
        return lax.dynamic_update_slice(into, x, starts)

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
        return _loop(0, blocks, lambda i, c: body(Block(self, i), c), carry)


class Block:
    """Some rows of a step: a block of queries against all its keys."""

    def __init__(self, step: Step, i: Any):
        self.step, self.p = step, step.p
        z = self.p.sizes
        self.nominal = i * number(z.rows)
        # The last block is moved up to stay inside: its first rows are computed twice.
        self.start = _least(self.nominal, z.t - z.rows)
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

    def lse(self) -> Array:
        """Returns the rows' log-sum-exp [c, r]."""
        z = self.p.sizes
        lse = self.p.cut("lse", self.here)
        return lse.reshape(z.some_b * z.some_heads, z.group * z.rows)

    def store(self, into: Array, rows: Array, axes: str = "btne") -> Array:
        """Returns `into` with rows [c, r(, e)] written to their place."""
        z = self.p.sizes
        shape = (z.some_b, z.some_heads * z.group, z.rows)
        rows = rows.reshape(shape + rows.shape[2:])
        if axes == "btne":
            rows = rows.swapaxes(1, 2)
        starts, _ = self.p.place(axes, into.shape, self.here)
        return lax.dynamic_update_slice(into, rows.astype(into.dtype), starts)

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
            whole = seen.last(self.start + lowest) + 1
            high = seen.last(self.start + number(z.rows) + highest)
        if left is not None:
            low = seen.first(self.start + lowest)
        if "prefix" in p.arrays and p.window != (None, None):
            low, high = 0, jnp.maximum(high, jnp.max(step.per_batch("prefix")))
        if "kv_lengths" in p.arrays:
            lengths = step.per_batch("kv_lengths")
            whole = jnp.minimum(whole, jnp.min(lengths))
            high = jnp.minimum(high, jnp.max(lengths))
        s, keys = number(z.s), number(z.keys)
        low = _clip(low, s) // keys
        high = (_clip(high, s) + keys - 1) // keys
        whole = _least(_clip(whole, s) // keys, high)
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
        if every:
            low, whole, high = 0, 0, -(-self.p.sizes.s // self.p.sizes.keys)

        def run(start: Any, end: Any, edge: bool, carry: Any) -> Any:
            return _loop(start, end, lambda j, c: body(Tile(self, j, edge), c), carry)

        if low is not whole:
            carry = run(low, whole, False, carry)
        return run(whole, high, True, carry)


def _clip(x: Any, high: Any) -> Any:
    static = isinstance(x, int) and isinstance(high, int)
    return max(0, min(x, high)) if static else jnp.clip(x, 0, high)


def _least(x: Any, y: Any) -> Any:
    static = isinstance(x, int) and isinstance(y, int)
    return min(x, y) if static else jnp.minimum(number(x), number(y))


class Tile:
    """One block of rows against one block of keys: scores [c, r, s].

    Masks and biases are [b|1, k|1, g|1, t|1, s|1].
    """

    def __init__(self, block: Block, j: Any, edge: bool):
        self.block, self.p, self.edge = block, block.p, edge
        z = self.p.sizes
        self.nominal = j * number(z.keys)
        ragged = edge and z.keys_overlap
        self.start = _least(self.nominal, z.s - z.keys) if ragged else self.nominal
        self.here = {**block.here, "s": (self.start, z.keys)}
        self.s = self.start + lax.broadcasted_iota(jnp.int32, (1, z.keys), 1)

    def columns(self, x: Array, axis: int = 1) -> Array:
        """Returns this block of keys of an array."""
        return lax.dynamic_slice_in_dim(x, self.start, self.p.sizes.keys, axis)

    def keys(self) -> Array:
        """Returns this block of k, [c, s, h]."""
        return self.turned("k")

    def values(self) -> Array:
        """Returns this block of v, [c, s, e], wide."""
        return self.turned("v").astype(self.p.wide)

    def turned(self, name: str) -> Array:
        """Returns this block of k or v as [c, s, h]."""
        step = self.block.step
        if step.turned is None:
            return step.turn(self.p.cut(name, self.here))
        return self.columns(step.turned[name])

    def part(self, name: str) -> Array:
        """Returns this tile of an operand [b|1, n|1, t|1, s|1]."""
        return self.block.step.split_heads(self.p.cut(name, self.here), at=1)

    def add(self, name: str, into: Array, x: Array) -> Array:
        """Returns `into`, shaped as the operand, plus x [c, r, s] on its tile."""
        x = self.by_head(x)
        starts, sizes = self.p.place(AXES[name], into.shape, self.here)
        old = lax.dynamic_slice(into, starts, sizes)
        apart = self.block.step.split_heads(old, at=1).shape
        over = tuple(i for i in range(5) if apart[i] == 1 and x.shape[i] > 1)
        new = x.sum(over, keepdims=True).reshape(sizes)
        return lax.dynamic_update_slice(into, old + new, starts)

    def add_columns(self, into: Array, x: Array) -> Array:
        """Returns `into`, as `Step.columns` made it, plus x [c, h, s] here."""
        if self.block.step.turned is not None:
            return lax.dynamic_update_slice_in_dim(
                into, self.columns(into, 2) + x, self.start, 2
            )
        starts, sizes = self.p.place("bskh", into.shape, self.here)
        z = self.p.sizes
        x = x.reshape(z.some_b, z.some_heads, -1, z.keys).transpose(0, 3, 1, 2)
        x = x.astype(into.dtype) + lax.dynamic_slice(into, starts, sizes)
        return lax.dynamic_update_slice(into, x, starts)

    def by_head(self, x: Array) -> Array:
        """Returns [c, r, s] as [b, k, g, t, s]."""
        z = self.p.sizes
        return x.reshape(z.some_b, z.some_heads, z.group, z.rows, z.keys)

    def relative(self) -> Array:
        """Returns key position less query position, [b|1, 1, 1, t, s]."""
        return self.s - self.block.t - self.block.step.offset

    def fresh(self) -> list[Array]:
        """Returns whether keys are new, not in the block before; None if all are."""
        z = self.p.sizes
        return [self.s >= self.nominal] if self.edge and z.keys_overlap else []

    def only_fresh(self, x: Array) -> Array:
        """Returns x [c, r, s] with 0 for keys that the block before has too."""
        for fresh in self.fresh():
            x = jnp.where(fresh, x, 0)
        return x

    def seen(self) -> list[Array]:
        """Returns the masks, bool, broadcastable to the tile."""
        p, step = self.p, self.block.step
        masks = [self.part("mask")] if "mask" in p.arrays else []
        if "q_segments" in p.arrays:
            q = p.cut("q_segments", self.here)[:, None, None, :, None]
            k = p.cut("kv_segments", self.here)[:, None, None, None, :]
            masks.append(q == k)
        if "kv_positions" in p.arrays:
            masks += within(*self.places())
        if not self.edge:
            return masks
        window = []
        if p.visibility.left is not None:
            window.append(self.s >= p.visibility.first(self.block.t + step.offset))
        if p.visibility.right is not None:
            window.append(self.s <= p.visibility.last(self.block.t + step.offset))
        if window:
            inside = window[0] & window[-1]
            if "prefix" in p.arrays:
                inside = inside | (self.s < step.per_batch("prefix"))
            masks.append(inside)
        if "kv_lengths" in p.arrays:
            masks.append(self.s < step.per_batch("kv_lengths"))
        return masks + self.fresh()

    def places(self) -> tuple[Array | None, ...]:
        """Returns the keys' positions, and the first and the last that rows see."""
        ends = ("first_position", "last_position")
        given = self.p.arrays
        rows = (self.p.cut(n, self.here) if n in given else None for n in ends)
        keys = self.p.cut("kv_positions", self.here)[:, None, None, None, :]
        return keys, *(x if x is None else x[:, None, None, :, None] for x in rows)

    def scores(self, queries: Array) -> tuple[Array, Array | None]:
        """Returns the masked scores and, with a soft cap, tanh(scores / cap)."""
        p, step = self.p, self.block.step
        x = jnp.einsum(
            "crh,csh->crs", queries, self.keys(), preferred_element_type=p.wide
        )
        if queries.dtype != p.wide:
            x = x * p.factor()
        bent = None
        if p.softcap is not None:
            bent = jnp.tanh(x / p.softcap)
            x = bent * p.softcap
        flat, x = x.shape, self.by_head(x)
        if "bias" in p.arrays:
            x = x + self.part("bias").astype(p.wide)
        if "alibi" in p.arrays:
            x = x + step.per_head("alibi") * self.relative().astype(p.wide)
        hidden = self.seen()
        for seen in hidden:
            x = jnp.where(seen, x, -jnp.inf)
        plain = bent is None and not hidden and not {"bias", "alibi"} & p.arrays.keys()
        if queries.dtype != p.wide and plain:
            # Or a fused multiply-add takes the largest off before the product is
            # rounded, as that is: of scores of 1e10 the difference may be any.
            x = lax.optimization_barrier(x)
        return x.reshape(flat), bent

    def only_seen(self, x: Array) -> Array:
        """Returns x [c, r, s] with 0 for hidden keys, even instead of NaN."""
        apart = self.by_head(x)
        for seen in self.seen():
            apart = jnp.where(seen, apart, 0)
        return apart.reshape(x.shape)

    def dropout(self) -> Array:
        """Returns the dropout factors at full size, [c, r, s]."""
        z = self.p.sizes
        shape = (z.some_b, z.some_heads, z.group, z.rows, z.keys)
        full = jnp.broadcast_to(self.part("dropout").astype(self.p.wide), shape)
        return full.reshape(-1, z.group * z.rows, z.keys)
