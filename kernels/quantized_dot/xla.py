"""A quantized dot that widens one block of columns at a time.

XLA writes the whole matrix in the dtype of the rows, and reads it again. This one loops
over blocks of columns. A widened block stays in the caches until it is multiplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.quantized_dot.estimate import estimate
from rewriter.kernels.quantized_dot.use import Use
from rewriter.kernels.shared.kinds import XLA
from rewriter.kernels.shared.products import unturned
from rewriter.ops.device import Device
from rewriter.ops.kernel import Space, Spec, Speed
from rewriter.ops.stored import FEW_BITS
from rewriter.support.verdict import YES, Verdict, no


@dataclass(frozen=True)
class Block:
    """The config of both passes.

    Attributes:
        columns: Columns of the matrix that are widened at once.
    """

    columns: int = 256


DEFAULT = Block()


def default(spec: Spec, device: Device) -> Block:
    """Returns 256 columns, or fewer if more than a Mi numbers would be widened."""
    del device
    k = spec.shape("x")[-1]
    if not isinstance(k, int):
        return DEFAULT
    return Block(min(DEFAULT.columns, max(64, MOST // max(k, 1) // 64 * 64)))


MOST = 1 << 20
"""The most numbers of a block, unless it has 64 columns."""


def configs(spec: Spec, device: Device) -> list[Block]:
    """Returns blocks worth measuring, of fewer columns than there are."""
    n = _columns(spec)
    own = default(spec, device)
    return [Block(c) for c in (64, 256, 1024, 4096) if c < n and c != own.columns]


def _columns(spec: Spec) -> int:
    return spec.shape("w")[0 if spec.param("mode") == "transposed" else 1]


def supports(spec: Spec) -> Verdict:
    """Takes rows of floats, and a matrix of known sizes."""
    if (kind := spec.dtype("x")) in FEW_BITS:
        name = "int8_dot" if jnp.issubdtype(kind, jnp.integer) else "fp8_dot"
        return no(name, f"{name}: XLA multiplies {kind} by {spec.dtype('w')} itself")
    if not jnp.issubdtype(spec.dtype("x"), jnp.floating):
        return no("dtype", f"x is {spec.dtype('x')}, not a float")
    if any(not isinstance(d, int) for d in spec.shape("w")):
        return no("symbolic", "sizes of the matrix must be known, but some are not")
    return YES


PAYS_FROM = 1 << 23
"""The fewest numbers of a matrix whose widened copy leaves the caches of a CPU."""

ROWS = 64
"""The most rows for which a CPU spends its time on the matrix, not on products."""


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes on a CPU for few rows and a large matrix.

    On other platforms XLA widens the matrix within the product, or as fast.
    """
    if platform != "cpu":
        return no("platform", f"not measured to be faster than XLA on {platform}")
    size = math.prod(spec.shape("w"))
    if size < PAYS_FROM:
        text = f"a matrix of {size >> 10} Ki numbers is so small that XLA is as fast"
        return no("small", text)
    rows = spec.shape("x")[:-1]
    if any(not isinstance(d, int) for d in rows) or math.prod(rows) > ROWS:
        return no("rows", f"more than {ROWS} rows, for which XLA is as fast")
    return YES


def forward(
    *, residuals: bool = False, config: Block | None = None, **given: Any
) -> Any:
    """Returns the result, rounded as by `computed`; there are no residuals.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The block.
        **given: The fields of `Use`.
    """
    use = Use(**given)
    parts = _Parts.of(use, config)

    def block(_: None, i: Any) -> tuple[None, jax.Array]:
        return None, _computed(parts.block(i))

    if parts.count:
        _, out = jax.lax.scan(block, None, jnp.arange(parts.count))
        out = jnp.moveaxis(out, 0, -2).reshape(*use.x.shape[:-1], -1)
        if parts.rest:
            out = jnp.concatenate([out, _computed(parts.last())], -1)
    else:
        out = _computed(parts.last())
    return (out, ()) if residuals else out


def _computed(use: Use) -> jax.Array:
    use = replace(use, x=unturned(use.x))
    return use.finished(use.times(use.matrix()))


def backward(
    *,
    out: None = None,
    residuals: tuple[()] = (),
    cotangent: jax.Array,
    config: Block | None = None,
    **given: Any,
) -> dict[str, jax.Array]:
    """Returns the cotangent of x; the reference computes those of scales.

    Args:
        out: Not needed.
        residuals: Empty.
        cotangent: [..., n].
        config: The block.
        **given: The fields of `Use`.
    """
    del out, residuals
    use = Use(**given)
    parts, x = _Parts.of(use, config), use.x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dims = (((cotangent.ndim - 1,), (0 if use.transposed else 1,)), ((), ()))

    def of_block(part: Use, g: jax.Array) -> jax.Array:
        matrix = part.matrix()
        sums = use.sums or jnp.promote_types(x.dtype, matrix.dtype)
        _, back = jax.vjp(part.finished, jnp.zeros(g.shape, sums))
        (g,) = back(g)
        kind = jnp.promote_types(
            g.dtype, matrix.dtype
        )  # no narrower than the program's
        return jax.lax.dot_general(
            unturned(g.astype(kind)), matrix.astype(kind), dims,
            precision=use.precision, preferred_element_type=wide,
        )  # fmt: skip

    def block(total: jax.Array, i: Any) -> tuple[jax.Array, None]:
        first = i * parts.size
        g = jax.lax.dynamic_slice_in_dim(cotangent, first, parts.size, -1)
        return total + of_block(parts.block(i), g), None

    total = jnp.zeros(x.shape, wide)
    if parts.count:
        total, _ = jax.lax.scan(block, total, jnp.arange(parts.count))
    if parts.rest:
        g = cotangent[..., parts.count * parts.size :]
        total = total + of_block(parts.last(), g)
    return {"x": total.astype(x.dtype)}


@dataclass(frozen=True)
class _Parts:
    """Blocks of columns of a use.

    Attributes:
        use: The use.
        axes: The axis of columns of each stored operand that is present.
        size: Columns of a block.
        count: The number of whole blocks.
        rest: Columns behind them.
    """

    use: Use
    axes: dict[str, int]
    size: int
    count: int
    rest: int

    @classmethod
    def of(cls, use: Use, config: Block | None) -> _Parts:
        """Divides a use. A matrix of two blocks and less stays whole."""
        axes = {"w": 0 if use.transposed else 1, "w_scale": 1, "w_zero": 1}
        size, n = (config or DEFAULT).columns, use.columns
        count = n // size if n > 2 * size else 0
        present = {k: i for k, i in axes.items() if getattr(use, k) is not None}
        return cls(use, present, size, count, n - count * size)

    def block(self, i: Any) -> Use:
        """The columns of a whole block."""
        return self._taken(
            lambda x, axis: jax.lax.dynamic_slice_in_dim(
                x, i * self.size, self.size, axis
            )
        )

    def last(self) -> Use:
        """The columns behind the whole blocks."""
        first = self.count * self.size
        return self._taken(
            lambda x, axis: jax.lax.slice_in_dim(x, first, x.shape[axis], axis=axis)
        )

    def _taken(self, take: Any) -> Use:
        arrays = {name: getattr(self.use, name) for name in self.axes}
        return replace(
            self.use,
            **{
                name: x if x.shape[self.axes[name]] == 1 else take(x, self.axes[name])
                for name, x in arrays.items()
            },
        )


KERNEL = XLA.kernel(
    "quantized_dot", forward, backward, supports,
    Speed(profitable, estimate=estimate), Space(Block, default, configs),
)  # fmt: skip
