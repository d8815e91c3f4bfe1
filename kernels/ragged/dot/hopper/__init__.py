"""Ragged dot on NVIDIA Hopper GPUs, in Pallas Mosaic GPU: what the kernels support.

Pallas takes half a second to import, so the kernels themselves are imported where
they are first traced.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.ragged.dot import tiled, xla
from rewriter.kernels.ragged.dot.estimate import estimate
from rewriter.kernels.ragged.dot.hopper.config import STEP, Tiles
from rewriter.kernels.ragged.dot.hopper.config import configs as configs
from rewriter.kernels.ragged.dot.hopper.config import default as default
from rewriter.kernels.ragged.dot.hopper.config import fits as fits
from rewriter.kernels.ragged.dot.memory import temporary
from rewriter.kernels.ragged.dot.rows import anywhere
from rewriter.kernels.ragged.dot.use import Use
from rewriter.kernels.ragged.dot.use import forward as forward_of
from rewriter.kernels.shared import halves
from rewriter.kernels.shared.halves import Halves
from rewriter.kernels.shared.hopper import by_estimate, importable
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import known_sizes
from rewriter.ops.kernel import Space, Speed
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

MOST = 1 << 30
"""Sizes from this on overflow the kernels' indices."""


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernels support a use: 16 bits, k and n multiples of 64."""
    return _supports(spec, ("bfloat16", "float16"))


def supports_halves(spec: Spec) -> Verdict:
    """Returns the same, and takes float32 at a precision that halves reach."""
    wide = "float32" in (spec.dtype("lhs"), spec.dtype("rhs"))
    verdict = halves.reach(spec.param("precision")) if wide else YES
    if not verdict.ok:
        return verdict
    return _supports(spec, ("bfloat16", "float16", "float32"))


def _supports(spec: Spec, dtypes: tuple[str, ...]) -> Verdict:
    base = known_sizes(spec, xla.supports)
    if not base.ok:
        return base
    found = [YES]
    left, right = spec.dtype("lhs"), spec.dtype("rhs")
    if left not in dtypes or left != right:
        text = f"lhs is {left} and rhs {right}, not both {' or both '.join(dtypes)}"
        found.append(no("dtype", text))
    out = spec.param("out_dtype") or left
    if out not in (left, "float32"):
        found.append(no("out_dtype", f"the result is {out}, not {left} or float32"))
    k = spec.shape("lhs")[1]
    n = spec.shape("rhs")[1 if spec.param("mode") == "transposed" else -1]
    for name, size in (("k", k), ("n", n)):
        if size % STEP:  # copies are 128 bytes wide
            found.append(no("alignment", f"{name} is {size}, not a multiple of {STEP}"))
    if (most := max(*spec.shape("lhs"), n)) >= MOST:
        found.append(no("size", f"a size of {most}, of at most 2^30 - 1"))
    verdict = all_of(*found)
    return (
        importable("rewriter.kernels.ragged.dot.hopper.by_rows")
        if verdict.ok
        else verdict
    )


def _product(use: Use, config: Tiles | None) -> Array:
    """The result, by the kernel for its mode.

    Products of 16-bit numbers are exact in the float32 that they are summed in, so
    that `precision` changes nothing.
    """
    from rewriter.kernels.ragged.dot.hopper.by_groups import product_of_groups
    from rewriter.kernels.ragged.dot.hopper.by_rows import rows_times_matrices

    if use.lhs.dtype == jnp.float32:
        return _product_of_halves(use, config)
    given, tiles = (use.lhs, use.rhs, use.group_sizes), config or Tiles()
    if use.contracting:
        return product_of_groups(*given, use.dtype, tiles)
    return rows_times_matrices(*given, use.transposed, use.dtype, tiles)


def _product_of_halves(use: Use, config: Tiles | None) -> Array:
    """The result for float32 operands, by three products of their halves.

    Halves lie one after another along the summed axis, so that one product adds up all
    three. If rows are summed, groups would be cut apart: those are three products.
    """
    use = replace(use, out_dtype=use.out_dtype or "float32")
    left, right = (Halves(*halves.split(x)) for x in (use.lhs, use.rhs))
    pairs = list(halves.pairs(left, right))
    if use.contracting:
        of = [_product(replace(use, lhs=x, rhs=y), config) for x, y in pairs]
        return functools.reduce(operator.add, of)
    axis = 2 if use.transposed else 1
    lhs = jnp.concatenate([x for x, _ in pairs], 1)
    rhs = jnp.concatenate([y for _, y in pairs], axis)
    return _product(replace(use, lhs=lhs, rhs=rhs), config)


forward = functools.partial(forward_of, _product)
"""Returns the ragged dot, as `reference` does, for supported uses."""


def backward(
    *,
    cotangent: Array,
    config: Tiles | None = None,
    **given: Any,
) -> dict[str, Array]:
    """Returns the cotangents of lhs and rhs, each a ragged dot itself.

    Args:
        cotangent: As the result of `forward`. If it is wider than the operands, tensor
            cores cannot multiply it, and XLA computes both as in `tiled`.
        config: The tiles.
        **given: As for `rewriter.kernels.ragged.dot.xla.backward`.
    """
    if cotangent.dtype != given["lhs"].dtype:
        return tiled.backward(cotangent=cotangent, **given)
    return xla.backward(cotangent=cotangent, config=config, product=forward, **given)


SPACE = Space(Tiles, default, configs, fits)

KERNEL = anywhere(
    HOPPER.kernel(
        "ragged_dot", forward, backward, supports_halves,
        Speed(by_estimate, by_rule=False, estimate=estimate, temporary=temporary),
        SPACE, SPACE,
    )
)  # fmt: skip
