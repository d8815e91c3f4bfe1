"""Ragged dot as one product of many tiles, in plain XLA, for GPUs.

XLA's own lowering on a GPU multiplies every row by every group's matrix; a loop over
the groups launches a few kernels for each. Here the rows of each group are laid into
tiles of equal size, and the last tile is padded with zeros: at most m / rows + g tiles.
A tile's matrix is that of its group. All tiles are multiplied at once, or in parts so
that the copies of the matrices stay within bounds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.ragged.dot import estimate, xla
from rewriter.kernels.ragged.dot.ranges import bounds
from rewriter.kernels.ragged.dot.rows import anywhere
from rewriter.kernels.ragged.dot.use import Use
from rewriter.kernels.ragged.dot.use import forward as forward_of
from rewriter.kernels.shared.kinds import XLA
from rewriter.kernels.shared.loops import zero_after
from rewriter.kernels.shared.products import unturned
from rewriter.ops.kernel import Space, Speed
from rewriter.support.verdict import no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec
    from rewriter.support.verdict import Verdict


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` supports a use: sizes of `xla.supports`, all known."""
    if spec.symbolic:
        return no("symbolic", "the number of tiles depends on rows, which are symbolic")
    return xla.supports(spec)


@dataclass(frozen=True)
class Tiles:
    """The config of both passes.

    Attributes:
        rows: Rows of a tile.
        entries: Entries of copied matrices (of products, if contracting) held at once.
    """

    rows: int = 256
    entries: int = 1 << 28


DEFAULT = Tiles()


def default(spec: Spec, device: Device) -> Tiles:
    """Returns tiles of 256 rows, the usual tile of a GPU's products."""
    del spec, device
    return DEFAULT


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns tiles worth measuring, of fewer rows than there are."""
    del device
    return [Tiles(n) for n in (128, 512) if n <= spec.shape("lhs")[0]]


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes on a GPU where `estimate` says it beats XLA and the loop."""
    return estimate.best(spec, platform, "tiled")


def _product(use: Use, config: Tiles | None) -> Array:
    """The result, by tiles of rows."""
    tiles = _Layout(use.lhs.shape[0], use.group_sizes, config or DEFAULT)
    run = _contracted if use.contracting else _ragged
    return run(use, tiles).astype(use.dtype)


forward = functools.partial(forward_of, _product)
"""Returns the ragged dot, as `reference` does."""


backward = functools.partial(xla.backward, product=forward)
"""The cotangents of lhs and rhs, each a ragged dot itself."""


class _Layout:
    """The rows of each tile, and the group that it belongs to."""

    def __init__(self, m: int, group_sizes: Array, config: Tiles):
        self.m, self.groups = m, group_sizes.shape[0]
        self.size, self.entries = min(config.rows, m), config.entries
        self.count = m // self.size + min(m, self.groups)
        self.starts, self.ends = bounds(group_sizes, m)
        own = -(-(self.ends - self.starts) // self.size)
        self.last = jnp.cumsum(own)
        self.first = self.last - own
        tile = jnp.arange(self.count, dtype=jnp.int32)
        found = jnp.searchsorted(self.last, tile, side="right")
        self.group = jnp.minimum(found, self.groups - 1).astype(jnp.int32)
        begin = self.starts[self.group] + (tile - self.first[self.group]) * self.size
        row = begin[:, None] + jnp.arange(self.size, dtype=jnp.int32)
        inside = (row < self.ends[self.group][:, None]) & (tile < self.last[-1])[
            :, None
        ]
        self.row = jnp.where(inside, row, m)

    def laid(self, x: Array) -> Array:
        """Returns [m, k] as tiles [tiles, rows, k], zero where there is no row."""
        return x.at[self.row].get(mode="fill", fill_value=0)

    def taken(self, tiles: Array) -> Array:
        """Returns [tiles, rows, n] as [m, n], zero for rows of no group."""
        row = jnp.arange(self.m, dtype=jnp.int32)
        group = jnp.searchsorted(self.ends, row, side="right")
        inside = group < self.groups
        group = jnp.minimum(group, self.groups - 1)
        at = self.first[group] * self.size + row - self.starts[group]
        flat = tiles.reshape(-1, tiles.shape[-1])
        place = jnp.where(inside, at, len(flat))
        return flat.at[place].get(mode="fill", fill_value=0)

    def parts(self, each: int) -> tuple[int, int]:
        """The number of parts, and of tiles in each, for a tile's number of entries."""
        most = max(1, self.entries // max(1, each))
        parts = -(-self.count // most)
        return parts, -(-self.count // parts)


def _ragged(use: Use, tiles: _Layout) -> Array:
    form = "tsk,tnk->tsn" if use.transposed else "tsk,tkn->tsn"
    lhs, rhs = use.lhs, use.rhs

    def product(part: tuple[Array, Array]) -> Array:
        rows, group = part
        return jnp.einsum(
            form, unturned(rows), rhs[group], precision=use.precision,
            preferred_element_type=use.dtype,
        )  # fmt: skip

    parts, each = tiles.parts(rhs.shape[1] * rhs.shape[2])
    rows, group = tiles.laid(lhs), tiles.group
    if parts == 1:
        return tiles.taken(product((rows, group)))
    out = lax.map(product, (_cut(rows, parts, each), _cut(group, parts, each)))
    return tiles.taken(out.reshape(-1, *out.shape[2:])[: tiles.count])


def _contracted(use: Use, tiles: _Layout) -> Array:
    lhs, rhs = use.lhs, use.rhs
    wide = jnp.promote_types(jnp.result_type(lhs, rhs), jnp.float32)
    k, n = lhs.shape[1], rhs.shape[1]
    start = jnp.zeros((tiles.groups, k, n), wide)
    start = start + zero_after(lhs, rhs, tiles.ends).astype(wide)

    def add(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        left, right, group = part
        new = jnp.einsum(
            "tsk,tsn->tkn", left, right, precision=use.precision,
            preferred_element_type=wide,
        )  # fmt: skip
        return total.at[group].add(new, indices_are_sorted=True), None

    parts, each = tiles.parts(k * n)
    given = (tiles.laid(lhs), tiles.laid(rhs), tiles.group)
    if parts == 1:
        return add(start, given)[0]
    cut = tuple(_cut(x, parts, each) for x in given)
    return lax.scan(add, start, cut)[0]


def _cut(x: Array, parts: int, each: int) -> Array:
    """Returns [tiles, ...] as [parts, each, ...].

    Padding tiles hold zeros and belong to the last tile's group.
    """
    more = parts * each - x.shape[0]
    if more and x.ndim == 1:
        x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (more,))])
    elif more:
        x = jnp.pad(x, ((0, more), (0, 0), (0, 0)))
    return x.reshape(parts, each, *x.shape[1:])


KERNEL = anywhere(
    XLA.kernel(
        "ragged_dot", forward, backward, supports,
        Speed(profitable, estimate=estimate.estimate), Space(Tiles, default, configs),
        name="tiled", saves=None,
    )
)  # fmt: skip
