"""Dots of packed numbers of four bits and few rows on Hopper: read as they are packed.

The kernel is that of few rows, `few_rows`. Elements of several numbers of the last axis
lie as numbers of four bits do. A word of eight numbers of the summed axis is what a
thread widens at once anyway. The order of numbers in an element is that of the rows'
columns, or of the product's: these are few, and are put into order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.quantized_dot import few_rows
from rewriter.kernels.quantized_dot.estimate import (
    RATE,
    as_written,
    of_few_rows,
)
from rewriter.kernels.quantized_dot.estimate import numbers as count_of
from rewriter.kernels.quantized_dot.few_rows.config import (
    Tiles,
    configs,
    fits,
    of_warpgroups,
    padded,
    sizes,
)
from rewriter.kernels.quantized_dot.op import OP, PACKED
from rewriter.kernels.quantized_dot.packed_form import axis_of
from rewriter.kernels.quantized_dot.use import Use
from rewriter.kernels.shared.hopper import by_estimate, with_stages
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.ops.estimate import LAUNCH_S
from rewriter.ops.kernel import Space, Spec, Speed
from rewriter.ops.packing import EACH, Packing, packing_of
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

    from rewriter.ops.device import Device

PLACES = {"low": "01", "high": "10"}
"""The halves of a byte, in the order of numbers that follow each other."""

OWN = ("packing", "codebook")
"""Parameters of packed dots alone."""

BY_WARPS = 16
"""The most rows for tensor cores of warps."""

LEAST = 32
"""The fewest numbers of a group, where a thread reads words of the summed axis."""


def places(packing: Packing) -> str:
    """Returns the place of each number in an element; empty if they lie apart."""
    if packing.order == "halves":
        return ""
    return packing.first if packing.order == "words" else PLACES[packing.first]


def packed_along(packing: Packing, mode: str) -> str:
    """Returns ``"last"`` or ``"first"``: the axis of the matrix that is packed."""
    return "last" if axis_of(str(packing), mode) else "first"


def of_numbers(spec: Spec) -> Spec:
    """Returns the use of a quantized dot, from one whose numbers are packed."""
    packing, mode = packing_of(str(spec.param("packing"))), str(spec.param("mode"))
    shape = list(spec.shape("w"))
    shape[axis_of(str(packing), mode)] *= packing.count
    kind = "int4" if packing.sign == "signed" else "uint4"
    return dataclasses.replace(
        spec,
        op=OP.name,
        shapes=tuple((n, tuple(shape) if n == "w" else s) for n, s in spec.shapes),
        dtypes=tuple((n, kind if n == "w" else d) for n, d in spec.dtypes),
        params=tuple((n, x) for n, x in spec.params if n not in OWN),
    )


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: as few rows, of numbers in turns."""
    packing, mode = packing_of(str(spec.param("packing"))), str(spec.param("mode"))
    found = []
    if not places(packing):
        found.append(no("packing", "numbers of a byte lie half of an axis apart"))
    if packing.sign == "signed" and packing.dtype == "uint8":
        found.append(no("packing", "numbers with a sign in uint8"))
    words = packed_along(packing, mode) == "first" or mode == "transposed"
    if spec.param("codebook") is not None and not words:
        found.append(no("codebook", "a codebook, and columns in an element"))
    first = packed_along(packing, mode) == "first"
    if first and (packing.count != EACH or mode == "transposed"):
        text = f"{packing.count} numbers of each {packing.axis} in an element"
        found.append(no("packing", f"{text}, of matrices that lie so"))
    if words:
        k = spec.shape("x")[-1]
        arrays = [spec.shape(n)[0] for n in ("w_scale", "w_zero") if spec.has(n)]
        if any(k // z < LEAST for z in arrays):
            text = f"groups of fewer than {LEAST} numbers, which are words of a thread"
            found.append(no("groups", text))
    if spec.has("bias") or spec.has("x_scale"):
        found.append(no("operands", "it takes no bias, and no scales of rows"))
    return all_of(few_rows.supports(of_numbers(spec)), *found)


def forward(
    *,
    x: Array,
    w: Array,
    packing: str,
    mode: str = "forward",
    w_scale: Array | None = None,
    w_zero: Array | None = None,
    residuals: bool = False,
    codebook: tuple[float, ...] | None = None,
    config: Tiles,
    **given: Any,
) -> Any:
    """Returns the result, as the reference does, for supported uses.

    Operands are those of the op, and parameters are as in the reference.

    Args:
        residuals: Whether to return ``(result, ())``.
        codebook: 16 floats that numbers stand for, or None.
        config: The tiles.
    """
    how = packing_of(packing)
    own = tuple(map(int, places(how)))  # of number j
    kind = "int4" if how.sign == "signed" else "uint4"
    moved = own != tuple(range(how.count))
    known = moved and finds_places(config, how, kind)
    if moved and not known:
        inverse = sorted(range(how.count), key=own.__getitem__)  # the number at place p
        if how.axis == "k":
            x = _in_order(x, inverse)
        else:
            w_scale, w_zero = (_in_order(a, inverse) for a in (w_scale, w_zero))
    columns = w.shape[int(mode != "transposed")]
    columns *= how.count if how.axis == "n" else 1
    along = packed_along(how, mode)
    use = Use(x=x, w=w, w_scale=w_scale, w_zero=w_zero, mode=mode, **given)
    stored = few_rows.Stored(
        kind, columns, along, how.count, codebook or (), own if known else ()
    )
    out = few_rows.product(use, w, stored, config)
    if how.axis == "n" and moved and not known:
        out = _in_order(out, list(own))
    return (out, ()) if residuals else out


def finds_places(config: Tiles, packing: Packing, kind: str) -> bool:
    """Returns whether threads take numbers of an element from where they lie.

    Args:
        config: The tiles.
        packing: How numbers lie in elements.
        kind: The dtype of the numbers.
    """
    if packing.axis == "k":
        return config.by_warps
    return config.width(kind) // 32 >= packing.count


def own_default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config: tensor cores of warps where rows are few.

    On an H200, 4096 x 14336, µs by rows
    (``tests/bench/results/packed_dot_h200.json``)::

                                       gptq         awq          nf4
                                       1     16     1     16     1     16
        three warpgroups in turns      18.3  20.3   16.8  18.7   21.0  23.0
        two, by warps                  17.0  19.7   16.4  18.5   18.6  23.0
        three, by warps                17.2  19.8   16.7  18.6   18.8  21.9
    """
    use = of_numbers(spec)
    found = of_warpgroups(use, device)
    if found.across > 1:
        return found
    three = replace(found, turns=3, stages=6)
    warps = replace(three if spec.param("codebook") else found, by_warps=True)
    few = padded(sizes(use)[0]) <= BY_WARPS
    for wanted in (warps, three) if few else (three,):
        config = with_stages(wanted, use)
        if config.stages % config.turns == 0 and fits(config, use, device).ok:
            return config
    return found


def own_configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first."""
    found = [own_default(spec, device), *configs(of_numbers(spec), device)]
    return list(dict.fromkeys(found))


def _in_order(x: Any, order: list[int]) -> Any:
    """Returns an array with another order within parts of its last axis."""
    if x is None or x.shape[-1] == 1:
        return x
    parts = x.reshape(*x.shape[:-1], -1, len(order))
    return jnp.take(parts, jnp.array(order), axis=-1).reshape(x.shape)


def fits_packed(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run."""
    return fits(config, of_numbers(spec), device)


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and of the kernel, as of numbers of four bits.

    The gradient of rows is XLA's, whatever the kernel.
    """
    numbers = of_numbers(spec)
    once = as_written(numbers, device)
    rest = 0.0 if passes == "forward" else once
    own = of_few_rows(numbers, device)
    if spec.param("codebook") is not None:
        own = max(own, count_of(numbers) / RATE + LAUNCH_S)
    return {"xla": once + rest, "hopper_few_rows": own + rest}


KERNEL = HOPPER.kernel(
    PACKED.name, forward, None, supports, Speed(by_estimate, estimate=estimate),
    Space(Tiles, own_default, own_configs, fits_packed),
    name="hopper_few_rows", version=2,
)  # fmt: skip
