"""Turns a block's product of queries and keys into scores: scale, softcap, masks.

Scores are [rows, keys], or transposed, [keys, rows]. They are in base 2, multiplied
with log2(e), since a TPU's exponential is one of base 2. With a bias they stay in base
e, since a large bias times log2(e) overflows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.empty_rows import AVERAGED
from rewriter.kernels.attention.tpu.schedule import Cut
from rewriter.kernels.attention.visibility import FAR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax import Array

    from rewriter.kernels.attention.tpu.config import BackwardBlocks, Blocks

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Problem:
    """One use of attention.

    Attributes:
        cut: Queries and keys, in blocks, and the positions that are seen.
        b: Batch entries.
        n: Query heads.
        heads: Key heads.
        h: Width of q and k.
        e: Width of v.
        scale: Multiplies the scores.
        softcap: ``c * tanh(scores / c)``.
        empty_rows: The result of a row without keys, as in `reference`.
        names: The operands that are present.
    """

    cut: Cut
    b: int
    n: int
    heads: int
    h: int
    e: int
    scale: float
    softcap: float | None
    empty_rows: str
    names: frozenset[str]

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.n // self.heads

    @property
    def unit(self) -> float:
        """The factor of scores: log2(e), or 1 with a bias."""
        return 1.0 if "bias" in self.names else LOG2E

    @property
    def precision(self) -> str:
        """The precision of float32 products: never less than the source asked for."""
        return "highest"

    @property
    def may_be_empty(self) -> bool:
        """Whether there may be rows that see no key."""
        if "sinks" in self.names:
            return False
        if self.names & {"mask", "q_segments", "kv_lengths", "bias"}:
            return True
        seen = self.cut.visibility
        if not seen.is_windowed or "prefix" in self.names:
            return seen.is_windowed
        return "offset" in self.names or seen.may_be_empty

    @property
    def averages(self) -> bool:
        """Whether there may be rows without keys whose result is a mean."""
        return self.may_be_empty and self.empty_rows in AVERAGED

    def blocks(self, rows: int, keys: int, edges: bool = False) -> Problem:
        """Returns the same in blocks of so many queries and keys."""
        return replace(self, cut=replace(self.cut, rows=rows, keys=keys, edges=edges))

    def power(self, x: Any) -> Array:
        """Returns the exponential of scores."""
        return jnp.exp(x) if self.unit == 1.0 else jnp.exp2(x)

    def log(self, x: Any) -> Array:
        """Returns the logarithm that `power` undoes."""
        return jnp.log(x) * self.unit


@dataclass(frozen=True)
class Tile:
    """The place of a block of scores, and the operands read with it.

    Attributes:
        problem: The use.
        refs: References to blocks of operands, by name, axes of size 1 in front.
        numbers: Scalars ``offset``, ``kv_lengths`` and ``prefix`` of the batch entry.
        row: The first query of the blocks in `refs`.
        key: The first key of the blocks in `refs`.
        rows: Number of queries.
        keys: Number of keys.
        first: The first query within its block.
        start: The first key within its block.
        turned: Whether scores are [keys, rows].
    """

    problem: Problem
    refs: Mapping[str, Any]
    numbers: Mapping[str, Any]
    row: Any
    key: Any
    rows: int
    keys: int
    first: int = 0
    start: int = 0
    turned: bool = False

    @classmethod
    def of_block(
        cls,
        problem: Problem,
        refs: Mapping[str, Any],
        numbers: Mapping[str, Any],
        row: Any,
        key: Any,
        config: Blocks | BackwardBlocks,
        turned: bool = False,
    ) -> Iterator[Tile]:
        """Yields the parts of a block that are computed at a time, by keys."""
        rows, keys = config.inner_rows, config.inner_keys
        for start in range(0, config.keys, keys):
            for first in range(0, config.rows, rows):
                yield cls(
                    problem, refs, numbers, row * config.rows, key * config.keys,
                    rows, keys, first, start, turned,
                )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the scores."""
        return (self.keys, self.rows) if self.turned else (self.rows, self.keys)

    @property
    def row_slice(self) -> slice:
        """Its queries within their block."""
        return slice(self.first, self.first + self.rows)

    @property
    def key_slice(self) -> slice:
        """Its keys within their block."""
        return slice(self.start, self.start + self.keys)

    def iota(self, keys: bool) -> Array:
        """Returns each score's key or query, minus the first one here."""
        return lax.broadcasted_iota(jnp.int32, self.shape, int(keys != self.turned))

    def relative(self) -> Array:
        """Returns each key's position minus the query's, int32, times a step.

        Divided by `Cut.step` and rounded down it is the distance.
        """
        cut = self.problem.cut
        offset = self.numbers.get("offset", 0) + cut.shift
        rows, row, key = self.iota(False), self.row + self.first, self.key + self.start
        if cut.repeat:
            rows = lax.rem(rows + row, jnp.int32(cut.repeat))
            row = 0
        rows = rows if cut.step == 1 else rows * cut.step
        return self.iota(True) - rows + (key - (row + offset) * cut.step)

    def part(self, name: str) -> Array:
        """Returns this block of a table [rows|1, keys|1], transposed if scores are."""
        ref = self.refs[name]
        of_rows = self.row_slice if ref.shape[2] > 1 else slice(None)
        of_keys = self.key_slice if ref.shape[3] > 1 else slice(None)
        x = ref[0, 0, of_rows, of_keys]
        if x.dtype == jnp.int8:
            x = x.astype(jnp.int32)
        elif jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(jnp.float32)
        if not self.turned:
            return x
        return x.T if 1 not in x.shape else self._thin(x)

    def _thin(self, x: Array) -> Array:
        """Transposes a row or a column."""
        return jnp.broadcast_to(x, self.shape[::-1]).T

    def scores(self, product: Array, part: bool) -> tuple[Array, Array | None]:
        """Returns scores, and with a soft cap the tanh.

        Args:
            product: The product of queries and keys.
            part: Whether keys may be hidden.
        """
        p, x, bent = self.problem, product, None
        factor = p.scale * (p.unit if p.softcap is None else 1 / p.softcap)
        if "scale_factor" in self.refs:
            x = x * (self.refs["scale_factor"][0] * factor)
        elif factor != 1.0:
            x = x * factor
        if p.softcap is not None:
            bent = jnp.tanh(x)
            x = bent * (p.softcap * p.unit)
        if "bias" in self.refs:
            x = x + self.part("bias")
        if "alibi" in self.refs:
            slopes = self.refs["alibi"]
            slope = slopes[0, self.row_slice if slopes.shape[1] > 1 else slice(None)]
            slope = slope * p.unit
            relative = self.relative()
            if p.cut.step > 1:  # a power of two
                relative = relative >> (p.cut.step.bit_length() - 1)
            x = x + slope * relative.astype(jnp.float32)
        if part:
            keep = self.keep()
            x = x if keep is None else jnp.where(keep, x, -jnp.inf)
        return x, bent

    def dropout(self, part: bool) -> Array:
        """Returns the factors of the weights; 0 beyond the edges."""
        x, inside = self.part("dropout"), self._inside() if part else None
        return x if inside is None else jnp.where(inside, x, 0.0)

    def _inside(self) -> Array | None:
        """Whether scores belong to existing queries and keys; None for all."""
        cut, keep = self.problem.cut, None
        if cut.s % cut.keys:
            keep = self.iota(True) < cut.s - self.key - self.start
        if cut.edges and cut.t % cut.rows:
            rows = self.iota(False) < cut.t - self.row - self.first
            keep = rows if keep is None else keep & rows
        return keep

    def keep(self) -> Array | None:
        """Returns whether keys are seen, bool; None for all."""
        found = []
        window = self._window()
        if window is not None:
            found.append(window)
        inside = self._inside()
        if inside is not None:
            found.append(inside)
        if "kv_lengths" in self.numbers:
            last = self.numbers["kv_lengths"] * self.problem.cut.step
            found.append(self.iota(True) < last - self.key - self.start)
        if "q_segments" in self.refs:
            q, k = self.refs["q_segments"], self.refs["kv_segments"]
            rows, keys = self.row_slice, self.key_slice
            if self.turned:
                found.append(q[0, :, rows] == k[0, keys, :])
            else:
                found.append(q[0, rows, :] == k[0, :, keys])
        if "mask" in self.refs:
            found.append(self.part("mask") != 0)
        if "row_heads" in self.refs:
            found.append(self._own_head())
        keep = None
        for one in found:
            keep = one if keep is None else keep & one
        return keep

    def _own_head(self) -> Array:
        """Whether a key is of the query's head: keys of all heads take turns."""
        shape = (1, self.keys)
        key = lax.broadcasted_iota(jnp.int32, shape, 1) & (self.problem.cut.step - 1)
        return self.refs["row_heads"][0, self.row_slice, :] == key

    def _window(self) -> Array | None:
        cut = self.problem.cut
        if not cut.visibility.is_windowed:
            return None
        relative, keep = self.relative(), None
        if cut.right is not None:
            keep = relative < (min(cut.right, FAR // cut.step - 1) + 1) * cut.step
        if cut.left is not None:
            inside = relative >= -min(cut.left, FAR // cut.step) * cut.step
            keep = inside if keep is None else keep & inside
        if "prefix" in self.numbers:
            assert keep is not None
            before = self.numbers["prefix"] * cut.step - self.key - self.start
            keep = keep | (self.iota(True) < before)
        return keep
