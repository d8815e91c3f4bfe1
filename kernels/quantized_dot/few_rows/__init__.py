"""Quantized dots of few rows on Hopper: numbers are widened in registers.

Such a product takes the time of reading its matrix. So each number is read once, and
few instructions are spent on it.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.quantized_dot import xla
from rewriter.kernels.quantized_dot.estimate import estimate
from rewriter.kernels.quantized_dot.few_rows.config import (
    CHUNK,
    LINE_BYTES,
    MOST,
    Tiles,
    configs,
    default,
    fits,
    sizes,
    transposed,
)
from rewriter.kernels.quantized_dot.use import Use
from rewriter.kernels.shared.hopper import by_estimate, importable
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.kernels.shared.rounding import (
    SIXTEEN,
    Behind,
    behind_in_float32,
    in_float32,
)
from rewriter.ops.cost import FOUR_BITS
from rewriter.ops.kernel import Space, Speed
from rewriter.ops.stored import FEW_BITS, usual_steps
from rewriter.ops.widening import all_columns
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array

    from rewriter.ops.kernel import Spec

NAME = "quantized_dot_of_few_rows"
"""The name of the kernel in profiles."""

WIDE = 128
"""The fewest columns of a block."""

FLOATS = "float4_e2m1fn"
"""The dtype of floats of four bits."""

WORD = 8
"""The numbers of four bits in a word."""

TAKEN = FEW_BITS
"""Dtypes of the matrix's numbers."""


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: few 16-bit rows, whole tiles."""
    if spec.symbolic:
        return SYMBOLIC
    found, (m, k, n) = [importable("jax.experimental.pallas.mosaic_gpu")], sizes(spec)
    stored, dtype = spec.dtype("w"), spec.dtype("x")
    if dtype not in SIXTEEN:
        found.append(no("dtype", f"x is {dtype}, not bfloat16 or float16"))
    if stored not in TAKEN:
        found.append(no("dtype", f"w is {stored}, not {', '.join(TAKEN)}"))
    if not 0 < m <= MOST:
        found.append(no("rows", f"{m} rows, not 1 to {MOST}"))
    deep = 128 if transposed(spec) and stored in FOUR_BITS else CHUNK
    if k % deep or not k:
        found.append(no("alignment", f"k is {k}, not a multiple of {deep}"))
    if n % WIDE or not n:
        found.append(no("alignment", f"n is {n}, not a multiple of {WIDE}"))
    if in_float32(_steps(spec), dtype, stored) is None:
        text = f"it does not compute the steps {spec.param('widen')!r}"
        found.append(no("widen", text))
    for name in ("w_scale", "w_zero"):
        group = k // spec.shape(name)[0] if spec.has(name) else CHUNK
        if (group % CHUNK and CHUNK % group) or group < 8:
            text = f"groups of {group} numbers, not 8, 16, 32 or a multiple of {CHUNK}"
            found.append(no("groups", text))
    return all_of(*found)


def _steps(spec: Spec) -> str:
    """The steps of a use."""
    widen = spec.param("widen")
    if widen is not None:
        return widen
    return usual_steps(spec.has("w_scale"), spec.has("w_zero"), spec.dtype("x"))


def forward(*, residuals: bool = False, config: Tiles, **given: Any) -> Any:
    """Returns the result, as `computed` does, for supported uses.

    Products of 16-bit numbers are exact in the float32 that they are summed in, so
    that `precision` changes nothing.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The tiles.
        **given: The fields of `Use`.
    """
    use = Use(**given)
    matrix = use.w
    if matrix.dtype.name == FLOATS:
        matrix = lax.bitcast_convert_type(matrix, jnp.uint4)  # as the hardware knows it
    out = product(use, matrix, Stored(use.w.dtype.name, use.columns), config)
    return (out, ()) if residuals else out


@dataclass(frozen=True)
class Stored:
    """How a matrix is stored.

    Attributes:
        dtype: The numbers' dtype.
        columns: How many columns it has.
        packed: As `kernel.Use.packed`.
        each: The numbers of an element.
        codebook: As `kernel.Use.codebook`.
        places: As `kernel.Use.places`.
    """

    dtype: str
    columns: int
    packed: str = ""
    each: int = 1
    codebook: tuple[float, ...] = ()
    places: tuple[int, ...] = ()


def product(use: Use, matrix: Array, stored: Stored, config: Tiles) -> Array:
    """Returns the result of a use.

    Args:
        use: The use. Its matrix is not read.
        matrix: The matrix, as the kernel reads it.
        stored: How it is stored.
        config: The tiles.
    """
    from rewriter.kernels.quantized_dot.few_rows import kernel
    from rewriter.kernels.quantized_dot.few_rows.registers import Steps

    x, n = use.x, stored.columns
    rows, k = math.prod(x.shape[:-1]), x.shape[-1]
    how = in_float32(use.steps, x.dtype.name, stored.dtype)
    assert how is not None
    arrays = {"scale": use.w_scale, "zero": use.w_zero}
    names = [name for name, _ in how.dtypes]
    joined = [all_columns(arrays[name], dtype, n) for name, dtype in how.dtypes]
    steps = tuple((s, names.index(x) if x in names else x) for s, x in how.steps)
    dtype = jnp.dtype(use.sums or x.dtype)
    after = _after(use) if dtype in (jnp.float32, x.dtype) else None
    finished, out_dtype, rows_behind = (), "float32", []
    if after is not None:
        out_dtype = after.dtype
        finished = tuple((s, 0 if x == "scale" else x) for s, x in after.steps)
    for _, scale_dtype in after.dtypes if after is not None else ():
        assert use.w_scale is not None
        row = use.w_scale[0].astype(scale_dtype).astype("float32")
        rows_behind.append(jnp.broadcast_to(row, (n,)))
    dtypes = tuple(dtype for _, dtype in how.dtypes)
    first = stored.packed == "first"
    words = first or (stored.packed == "last" and use.transposed)
    turned = _turned(use, stored, joined, config)
    joined = [a.T for a in joined] if turned else joined
    plan = kernel.Use(
        Steps(steps, dtypes, x.dtype.name), finished, stored.dtype, out_dtype,
        config, use.transposed or first, alternating=words, packed=stored.packed,
        each=stored.each, codebook=stored.codebook, places=stored.places, turned=turned,
    )  # fmt: skip
    flat = x.reshape(rows, k)
    if words and not config.by_warps:
        flat = kernel.alternating(flat, WORD)
    out = kernel.rows_times_matrix(NAME, flat, matrix, joined, rows_behind, plan)
    if after is None:
        out = use.finished(out.astype(dtype))
    return out.reshape(*x.shape[:-1], n)


def _turned(use: Use, stored: Stored, joined: Sequence[Array], config: Tiles) -> bool:
    """Whether the kernel reads scales of groups as [n, z].

    They lie so beside most transposed matrices. Elsewhere XLA transposes them.
    """
    if not use.transposed or stored.packed == "first" or not joined:
        return False
    k, fits = use.x.shape[-1], True
    for values in joined:
        line, z = LINE_BYTES // values.dtype.itemsize, values.shape[0]
        step = max(1, config.depth * z // k)
        fits &= z > 1 and z % line == 0 and line % step == 0
    return fits


def _after(use: Use) -> Behind | None:
    """What follows the sums in float32; None if the kernel does not compute it."""
    made = behind_in_float32(use.behind, jnp.dtype(use.sums or use.x.dtype).name)
    signs = {sign for sign, _ in made.steps} if made is not None else {"/"}
    return None if "/" in signs else made


KERNEL = HOPPER.kernel(
    "quantized_dot", forward, xla.backward, supports,
    Speed(by_estimate, estimate=estimate), Space(Tiles, default, configs, fits),
    xla.KERNEL.backward_space, name="hopper_few_rows", version=3,
)  # fmt: skip
