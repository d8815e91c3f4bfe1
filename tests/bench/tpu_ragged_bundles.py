"""Bundles of ragged dots on TPUs that are not there: ours, and JAX's megablox.

  python3 -m tests.bench.tpu_ragged_bundles [--json PATH] [--seconds 600]

bfloat16, groups of equal sizes that tiles of 512 rows divide. The sizes of groups are
read from memory, so that the compiler's simulator sees neither kernel. Counted are the
instruction bundles of a kernel's code, times the steps that run it. Ours has code of
its own for tiles that groups share: there are none here, and it is left out. Megablox
has its product twice where it sums over several tiles of k, so that its tiles here have
all of k. Its own limit on memory refuses larger ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rewriter.kernels.ragged.dot.products import products
from rewriter.kernels.ragged.dot.tpu import config
from rewriter.kernels.shared import pallas_tpu
from rewriter.ops.device import named
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from tests.bench import estimates

SIZES = ((4096, 2048, 2048, 4), (8192, 2048, 1024, 8))
"""m, k, n and groups: of what is multiplied; of rows, if they are what is summed."""

MODES = ("forward", "transposed", "contracting")
TILES = {
    "forward": ((512, 2048, 512), (256, 2048, 1024), (256, 2048, 512)),
    "transposed": ((512, 2048, 512), (256, 2048, 1024), (256, 2048, 512)),
    "contracting": ((512, 1024, 1024), (1024, 1024, 512), (512, 2048, 512)),
}
"""Megablox's, of m, k and n."""

OURS: dict[str, tuple[tuple[int, ...], ...]] = {
    "forward": ((), (512, 2048, 512), (1024, 2048, 512)),
    "transposed": ((), (512, 2048, 512), (1024, 2048, 512)),
    "contracting": ((), (512, 1024, 1024), (256, 2048, 1024)),
}
"""Our own, first those of the rule of thumb."""

CHIPS = ("v5e", "v5p", "v6e")


def names(whose: str, mode: str, sizes: tuple[int, ...]) -> list[str]:
    """Returns the names of a product's programs, one for each of its tiles.

    Example:
        >>> names("ours", "contracting", (8192, 2048, 1024, 8))[1]
        'ours contracting 8192 2048 1024 8 by 256 1024 1024'
    """
    first = " ".join(map(str, (whose, mode, *sizes)))
    tilings = OURS[mode] if whose == "ours" else TILES[mode]
    return [f"{first} by {' '.join(map(str, t))}" if t else first for t in tilings]


WANTED = tuple(
    ("bundles", chip, name)
    for sizes in SIZES
    for mode in MODES
    for chip in CHIPS
    for whose in ("ours", "megablox")
    for name in names(whose, mode, sizes)
)


def _read(name: str) -> tuple[str, str, tuple[int, ...], tuple[int, ...]]:
    first, _, tiles = name.partition(" by ")
    whose, mode, *sizes = first.split()
    return whose, mode, tuple(map(int, sizes)), tuple(map(int, tiles.split()))


def program(name: str, generation: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what a name stands for, and its arguments."""
    whose, mode, (m, k, n, groups), tiles = _read(name)
    right = {"forward": (groups, k, n), "transposed": (groups, n, k)}
    shapes = (m, k), right.get(mode, (m, n))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    arrays.append(jax.ShapeDtypeStruct((groups,), jnp.int32))
    if whose == "megablox":
        return _megablox(mode, tiles), tuple(arrays)
    kernel = next(k for k in registry().kernels("ragged_dot") if k.name == "mosaic_tpu")
    _leave_out_shared_tiles()
    used = _tiles(_spec(mode, tuple(arrays)), generation, tiles)
    return lambda *x: kernel.forward(*x, mode=mode, config=used), tuple(arrays)


def _leave_out_shared_tiles() -> None:
    """Changes the kernels, for this child process alone."""
    from rewriter.kernels.ragged.dot.tpu import by_groups, by_rows

    def whole_tile(
        b: Any, precision: Any, step: Any, x: Any, y: Any, sums: Any
    ) -> None:
        sums[...] += pallas_tpu.dot(x[...], y[...], (0, 0), precision)

    by_groups._add = whole_tile
    by_rows._Tile.run = lambda self: self.multiply(pl.ds(0, self.blocks.m), whole=True)


def _tiles(spec: Any, generation: str, tiles: tuple[int, ...]) -> config.Tiles:
    default = config.default(spec, named(f"tpu_{generation}"))
    return config.Tiles(*tiles, default.step_k, default.chunk) if tiles else default


def _spec(mode: str, arrays: tuple[Any, ...]) -> Any:
    operands = dict(zip(("lhs", "rhs", "group_sizes"), arrays, strict=True))
    return spec_of(registry().op("ragged_dot"), operands, {"mode": mode})


def _megablox(mode: str, tiles: tuple[int, ...]) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    more: Any = {"preferred_element_type": jnp.bfloat16, "tiling": tiles}
    if mode == "contracting":  # it takes lhs with its rows last, and turns it back
        return lambda x, y, sizes: tgmm(x.T, y, sizes, **more)
    return lambda *x: gmm(*x, transpose_rhs=mode == "transposed", **more)


def steps(name: str, generation: str) -> int:
    """Returns how often a kernel's code is run.

    Example:
        >>> steps("megablox forward 8192 2048 1024 8 by 512 1024 1024", "v5e")
        32
        >>> steps("ours forward 8192 2048 1024 8", "v5e")
        32
    """
    whose, mode, (m, k, n, _), tiles = _read(name)
    if whose == "megablox":
        rows, columns, width = tiles
        return -(-m // rows) * -(-k // columns) * -(-n // width)
    _, arrays = program(name, generation)
    spec = _spec(mode, arrays)
    (product,) = products(spec)
    b = config.blocks(product, _tiles(spec, generation, tiles))
    return -(-m // b.m) * -(-k // b.step) * -(-n // b.n)


if __name__ == "__main__":
    estimates.run("tpu_ragged_bundles", WANTED, 600.0, ("ragged_dot", "gmm", "tgmm"))
