"""The gated linear unit on TPUs, in Pallas Mosaic TPU: what the kernel supports.

Pallas takes half a second to import, so the kernels themselves are imported where they
are first traced.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.gated_linear_unit import xla
from rewriter.kernels.gated_linear_unit.branches import Use, combine, refused_addends
from rewriter.kernels.gated_linear_unit.tpu.config import (
    SMALLEST,
    Sizes,
    Tiles,
)
from rewriter.kernels.gated_linear_unit.tpu.config import configs as configs
from rewriter.kernels.gated_linear_unit.tpu.config import default as default
from rewriter.kernels.gated_linear_unit.tpu.config import (
    default_backward as default_backward,
)
from rewriter.kernels.gated_linear_unit.tpu.config import fits as fits
from rewriter.kernels.gated_linear_unit.tpu.config import fits_backward as fits_backward
from rewriter.kernels.shared.activations_tpu import ON_TPU, WITHOUT
from rewriter.kernels.shared.kinds import TPU
from rewriter.kernels.shared.limits import known_sizes
from rewriter.kernels.shared.tpu import refused_dtypes, refused_precision
from rewriter.ops.device import Device
from rewriter.ops.kernel import Space, Spec, Speed
from rewriter.support.verdict import Verdict, all_of, no


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: bfloat16 and float32, any sizes."""
    base = known_sizes(spec, xla.supports)
    if not base.ok:
        return base
    found = refused_dtypes({**dict(spec.dtypes), "the result": spec.param("out_dtype")})
    if spec.param("activation") in WITHOUT:
        text = f"{spec.param('activation')} needs expm1, which the compiler lacks"
        found.append(no("activation", text))
    found += refused_addends(spec)
    if any(0 in shape for _, shape in spec.shapes):
        found.append(no("empty", "an axis has size 0"))
    found += refused_precision(spec)
    if found:
        return all_of(*found)
    anywhere = Device("", "tpu")
    return all_of(*(f(SMALLEST, spec, anywhere) for f in (fits, fits_backward)))


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: XLA fuses the combination of branches into the second product.

    On v5e, rows, k and f of 2048, 2048 and 4096 in bfloat16 take 537k cycles by XLA. By
    the kernel, which writes no branch to memory, they take 613k. The peak is 523k
    (``tests/bench/results/tuned_tpu_v5e.json``, libtpu 0.0.50, in time at 1.5 GHz).
    Users may ask for the kernel by name.
    """
    del spec, platform
    return no("estimate", "XLA takes fewer cycles, by its own simulation for a TPU")


def forward(
    *, residuals: bool = False, config: Tiles | None = None, **given: Any
) -> Any:
    """Returns the result, as `reference` does; there are no residuals.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The tiles.
        **given: As for `reference`.
    """
    from rewriter.kernels.gated_linear_unit.tpu.kernel import combined

    use = Use.of(given).without_slopes()
    operands, join = _operands(use), _join(use)
    sizes = _sizes(operands, 0, use.dtype.itemsize)
    made = combined(operands, sizes, use.dtype, use.precision, config or SMALLEST, join)
    out = made.reshape(*use.x.shape[:-1], -1)
    return (out, ()) if residuals else out


def backward(
    *,
    out: None,
    residuals: tuple[()],
    cotangent: jax.Array,
    config: Tiles | None = None,
    **given: Any,
) -> dict[str, jax.Array]:
    """Returns the cotangents of every operand.

    The kernel computes the branches again, and their cotangents; products with those
    are left to XLA.

    Args:
        out: Not needed.
        residuals: Empty.
        cotangent: [..., f].
        config: The tiles.
        **given: As in `forward`.
    """
    from rewriter.kernels.gated_linear_unit.tpu.kernel import cotangents_of_branches

    del out, residuals
    use = Use.of(given)
    operands = _operands(use)
    narrow = jnp.result_type(use.x, use.w_gate, use.w_up)
    sizes = _sizes(operands, cotangent.dtype.itemsize, 2 * narrow.itemsize)
    d_gate, d_up, *sums = cotangents_of_branches(
        operands, cotangent.reshape(sizes.m, sizes.n), sizes, narrow, use.precision,
        config or SMALLEST, _join(use),
    )  # fmt: skip

    dot = functools.partial(
        xla.product, precision=use.precision, narrow=narrow, wide=jnp.float32
    )
    dx = dot(d_gate, use.w_gate, (1, 1)) + dot(d_up, use.w_up, (1, 1))
    grads = {"x": dx.astype(use.x.dtype).reshape(use.x.shape)}
    rows = operands["x"]
    grads["w_gate"] = dot(rows, d_gate, (0, 0)).astype(use.w_gate.dtype)
    grads["w_up"] = dot(rows, d_up, (0, 0)).astype(use.w_up.dtype)
    for name, total in zip(("b_gate", "b_up"), sums, strict=True):
        if total is not None:
            grads[name] = total.astype(operands[name].dtype)
    return grads


def _operands(use: Use) -> dict[str, jax.Array]:
    """The present operands, with x as rows."""
    rows = use.x.reshape(math.prod(use.x.shape[:-1]), use.x.shape[-1])
    return {"x": rows, **use.shared}


def _join(use: Use) -> Callable[..., jax.Array]:
    """The function that joins branches."""
    return functools.partial(combine, **use.joining, activations=ON_TPU)


def _sizes(operands: dict[str, jax.Array], read: int, made: int) -> Sizes:
    m, k = operands["x"].shape
    weights = [operands[n] for n in ("w_gate", "w_up")]
    wide = max(w.dtype.itemsize for w in weights)
    items = operands["x"].dtype.itemsize, wide, read, made
    return Sizes(m, k, weights[0].shape[1], items)


KERNEL = TPU.kernel(
    "gated_linear_unit", forward, backward, supports, Speed(profitable),
    Space(Tiles, default, configs, fits),
    Space(Tiles, default_backward, configs, fits_backward),
)  # fmt: skip
