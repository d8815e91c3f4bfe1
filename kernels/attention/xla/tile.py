"""One tile of scores: a block of rows against a block of keys."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.scored_form import ARRAYS, TABLES
from rewriter.kernels.attention.visibility import within
from rewriter.kernels.attention.xla.problem import AXES
from rewriter.kernels.attention.xla.sizes import number
from rewriter.kernels.shared.contraction import contraction
from rewriter.kernels.shared.products import unturned
from rewriter.kernels.shared.slices import part, starts_along, with_part
from rewriter.ops.score import SOFTMAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

    from rewriter.kernels.attention.xla.tiles import Block


def least(x: Any, y: Any) -> Any:
    """Returns the smaller of two sizes, either of which may be symbolic."""
    static = isinstance(x, int) and isinstance(y, int)
    return min(x, y) if static else jnp.minimum(number(x), number(y))


def plus(x: Any, y: Any) -> Any:
    """Returns a sum, without an equation if the second number is 0."""
    return x if isinstance(y, int) and y == 0 else x + y


def is_float(x: Array) -> bool:
    """Returns whether an array has a cotangent."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


class Tile:
    """One block of rows against one block of keys: scores [c, r, s].

    Masks and biases are [b|1, k|1, g|1, t|1, s|1].
    """

    def __init__(self, block: Block, j: Any, edge: bool):
        self.block, self.p, self.edge = block, block.p, edge
        z = self.p.sizes
        self.nominal = j * number(z.keys)
        ragged = edge and z.keys_overlap
        self.start = least(self.nominal, z.s - z.keys) if ragged else self.nominal
        self.here = {**block.here, "s": (self.start, z.keys)}
        self.s = self.start + lax.broadcasted_iota(jnp.int32, (1, z.keys), 1)

    def columns(self, x: Array, axis: int = 1) -> Array:
        """Returns this block of keys of an array."""
        sizes = list(x.shape)
        sizes[axis] = self.p.sizes.keys
        return part(x, starts_along(x.ndim, axis, self.start), sizes)

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
        old = part(into, starts, sizes)
        apart = self.block.step.split_heads(old, at=1).shape
        over = tuple(i for i in range(5) if apart[i] == 1 and x.shape[i] > 1)
        new = x.sum(over, keepdims=True).reshape(sizes)
        return with_part(into, old + new, starts)

    def add_part(self, name: str, into: Array, more: Array) -> Array:
        """Returns `into`, shaped as the operand, plus a sum shaped as its `part`."""
        return self.p.added(name, into, more, self.here)

    def add_columns(self, into: Array, x: Array) -> Array:
        """Returns `into`, as `Step.columns` made it, plus x [c, h, s] here."""
        if self.block.step.turned is not None:
            starts = starts_along(into.ndim, 2, self.start)
            return with_part(into, self.columns(into, 2) + x, starts)
        starts, sizes = self.p.place("bskh", into.shape, self.here)
        z = self.p.sizes
        x = x.reshape(z.some_b, z.some_heads, -1, z.keys).transpose(0, 3, 1, 2)
        x = x.astype(into.dtype) + part(into, starts, sizes)
        return with_part(into, x, starts)

    def by_head(self, x: Array) -> Array:
        """Returns [c, r, s] as [b, k, g, t, s]."""
        z = self.p.sizes
        return x.reshape(z.some_b, z.some_heads, z.group, z.rows, z.keys)

    def relative(self) -> Array:
        """Returns key position less query position, [b|1, 1, 1, t, s]."""
        return self.s - plus(self.block.t, self.block.step.offset)

    def fresh(self) -> list[Array]:
        """Returns whether keys are new, not in the block before; None if all are."""
        z = self.p.sizes
        return [self.s >= self.nominal] if self.edge and z.keys_overlap else []

    def only_new_keys(self, x: Array) -> Array:
        """Returns x [c, r, s] with 0 for keys that the block before has too."""
        for fresh in self.fresh():
            x = jnp.where(fresh, x, 0)
        return x

    def seen(self) -> list[Array]:
        """Returns which keys are seen and new, bool, broadcastable to the tile."""
        return self.shown() + self.fresh()

    def shown(self) -> list[Array]:
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
            window.append(self.s >= p.visibility.first(plus(self.block.t, step.offset)))
        if p.visibility.right is not None:
            window.append(self.s <= p.visibility.last(plus(self.block.t, step.offset)))
        if window:
            inside = functools.reduce(operator.and_, window)
            if "prefix" in p.arrays:
                inside = inside | (self.s < step.per_batch("prefix"))
            masks.append(inside)
        if "kv_lengths" in p.arrays:
            masks.append(self.s < step.per_batch("kv_lengths"))
        return masks

    def places(self) -> tuple[Array | None, ...]:
        """Returns the keys' positions, and the first and the last that rows see."""
        ends = ("first_position", "last_position")
        given = self.p.arrays
        rows = (self.p.cut(n, self.here) if n in given else None for n in ends)
        keys = self.p.cut("kv_positions", self.here)[:, None, None, None, :]
        return keys, *(x if x is None else x[:, None, None, :, None] for x in rows)

    def products(self, queries: Array) -> Array:
        """Returns the scaled products of queries and keys, [c, r, s]."""
        p = self.p
        x = contraction(
            "crh,csh->crs",
            unturned(queries),
            self.keys(),
            preferred_element_type=p.wide,
        )
        return x if queries.dtype == p.wide else x * p.factor()

    def computed(self, x: Array, arrays: Mapping[str, Array]) -> Array:
        """Returns the program's function of scores [c, r, s].

        Args:
            x: Products.
            arrays: What else it reads, as `read_by_score` gives it.
        """
        assert self.p.score is not None
        apart = self.by_head(x)
        apart = self.p.score(apart, self.block.t, self.s, arrays)
        return apart.astype(self.p.wide).reshape(x.shape)

    def read_by_score(self) -> dict[str, Array]:
        """Returns this tile of what the function of scores reads, by name."""
        return {n: self.part(n) for n in (*ARRAYS, *TABLES) if n in self.p.arrays}

    def through_score(self, queries: Array, d: Array) -> tuple[Array, dict[str, Array]]:
        """Returns the cotangents of products, and of float arrays read beside them.

        Args:
            queries: As scores are made of them.
            d: The cotangent of the function's values, [c, r, s].
        """
        every = self.read_by_score()
        floats = {n: x for n, x in every.items() if is_float(x)}

        def of(x: Array, moving: Mapping[str, Array]) -> Array:
            return self.computed(x, {**every, **moving})

        _, back = jax.vjp(of, self.products(queries), floats)
        return back(d)

    def scores(self, queries: Array) -> tuple[Array, Array | None]:
        """Returns the masked scores and, with a soft cap, tanh(scores / cap).

        A function's values that are the weights themselves are 0 where a mask hides.
        """
        p, step = self.p, self.block.step
        x = self.products(queries)
        bent = None
        if p.softcap is not None:
            bent = jnp.tanh(x / p.softcap)
            x = bent * p.softcap
        if p.score is not None:
            x = self.computed(x, self.read_by_score())
        flat, x = x.shape, self.by_head(x)
        if "bias" in p.arrays:
            x = x + self.part("bias").astype(p.wide)
        if "alibi" in p.arrays:
            x = x + step.per_head("alibi") * self.relative().astype(p.wide)
        hidden = self.seen()
        x = self.hide(x)
        plain = bent is None and not hidden and not {"bias", "alibi"} & p.arrays.keys()
        plain = plain and p.score is None
        if queries.dtype != p.wide and plain:
            # Or a fused multiply-add takes the largest off before the product is
            # rounded, as that is: of scores of 1e10 the difference may be any.
            x = lax.optimization_barrier(x)
        return x.reshape(flat), bent

    def hide(self, x: Array) -> Array:
        """Returns scores [b, k, g, t, s] with what hidden keys have in their place."""
        p, shown = self.p, self.shown()
        instead: Any = -jnp.inf if p.normalisation == SOFTMAX else 0
        if p.fill is not None and shown:
            fill = x + p.fill if p.fill_passes else jnp.asarray(p.fill, x.dtype)
            instead = jnp.where(p.reaches, fill, instead)
        for seen in shown:
            x = jnp.where(seen, x, instead)
        for fresh in self.fresh():
            x = jnp.where(fresh, x, -jnp.inf if p.normalisation == SOFTMAX else 0)
        return x

    def only_seen(self, x: Array) -> Array:
        """Returns x [c, r, s] with 0 for hidden keys, even instead of NaN."""
        apart, passes = self.by_head(x), self.p.fill is not None and self.p.fill_passes
        for seen in self.shown():
            apart = jnp.where(seen | self.p.reaches if passes else seen, apart, 0)
        for fresh in self.fresh():
            apart = jnp.where(fresh, apart, 0)
        return apart.reshape(x.shape)

    def dropout(self) -> Array:
        """Returns the dropout factors at full size, [c, r, s]."""
        z = self.p.sizes
        shape = (z.some_b, z.some_heads, z.group, z.rows, z.keys)
        full = jnp.broadcast_to(self.part("dropout").astype(self.p.wide), shape)
        return full.reshape(-1, z.group * z.rows, z.keys)
