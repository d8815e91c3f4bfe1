"""Units of few rows and stored matrices on Hopper: both branches in one launch.

Such a unit takes the time of reading both matrices. The kernel is that of quantized
dots of few rows: a number is read once, and widened in registers.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.gated_linear_unit import stored
from rewriter.kernels.gated_linear_unit.branches import refused_addends
from rewriter.kernels.gated_linear_unit.hopper_stored import Steps, arrays_of, steps_of
from rewriter.kernels.gated_linear_unit.op import STORED
from rewriter.kernels.gated_linear_unit.stored_form import ADDED
from rewriter.kernels.quantized_dot import few_rows
from rewriter.kernels.quantized_dot import op as quantized_dot
from rewriter.kernels.quantized_dot.estimate import as_written, of_few_rows
from rewriter.kernels.quantized_dot.few_rows.config import (
    SPLITS,
    Tiles,
    fits,
    padded,
    sizes,
)
from rewriter.kernels.shared.hopper import (
    BUSY,
    by_estimate,
    importable,
    processors,
    with_stages,
)
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.ops.cost import FOUR_BITS
from rewriter.ops.estimate import LAUNCH_S
from rewriter.ops.kernel import Space, Spec, Speed
from rewriter.ops.widening import all_columns
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

    from rewriter.ops.device import Device

NAME = "quantized_gated_linear_unit_of_few_rows"
"""The name of the kernel in profiles."""

ACTIVATIONS = frozenset({
    "silu", "swish", "gelu_tanh", "gelu_quick", "relu", "identity",
})  # fmt: skip
"""Those that the kernel computes."""

PLAIN = {
    "clip_gate": (None, None), "clip_up": (None, None), "up_shift": 0.0, "slopes": (),
    "slopes_up": (),
}  # fmt: skip
"""Parameters that the kernel does not know, and their defaults. Slopes are those of
derivatives, which XLA computes."""

COLUMNS = 128
"""Columns of either branch in a block."""


def part_of(spec: Spec) -> Spec:
    """Returns a branch as a use of a quantized dot."""
    k = spec.shape("w_gate")[0]
    names = {
        "x": "x",
        "w_gate": "w",
        "w_gate_scale": "w_scale",
        "w_gate_zero": "w_zero",
    }
    shapes = {names[n]: s for n, s in spec.shapes if n in names}
    shapes["w"] = (k, stored.columns_of(spec))
    dtypes = tuple((names[n], d) for n, d in spec.dtypes if n in names)
    widen = ("widen", spec.param("widen"))
    params = (("mode", "forward"), ("behind", ""), ("sums", "float32"), widen)
    return Spec(quantized_dot.OP.name, tuple(shapes.items()), dtypes, params)


def both_of(spec: Spec) -> Spec:
    """Returns both branches as a use of a quantized dot."""
    part = part_of(spec)
    k, f = part.shape("w")
    shapes = tuple((n, (k, 2 * f) if n == "w" else s) for n, s in part.shapes)
    return replace(part, shapes=shapes)


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: few 16-bit rows, whole tiles."""
    if spec.symbolic:
        return SYMBOLIC
    found = [
        importable("jax.experimental.pallas.mosaic_gpu"), stored.supports(spec),
        *refused_addends(spec),
    ]  # fmt: skip
    if not all_of(YES, *found).ok:
        return all_of(YES, *found)
    part, dtype = part_of(spec), spec.dtype("x")
    steps = _steps(spec)
    if steps is None:
        found.append(no("widen", f"it does not compute {spec.param('widen')!r}"))
        return all_of(YES, *found)
    inner = "" if steps.behind else spec.param("widen")
    own = replace(part, params=(*part.params[:3], ("widen", inner)))
    found.append(few_rows.supports(own))
    if (name := spec.param("activation")) not in ACTIVATIONS:
        found.append(no("activation", f"it does not compute {name}"))
    if str(spec.param("out_dtype") or dtype) not in (dtype, "float32"):
        found.append(no("dtype", f"a result of {spec.param('out_dtype')}"))
    for name, usual in PLAIN.items():
        if spec.param(name, usual) != usual and not name.startswith("slopes"):
            found.append(no(name, f"it does not compute {name}"))
    if spec.has("w_up"):
        pairs = ((f"w_gate{x}", f"w_up{x}") for x in ("", *(f"_{a}" for a in ADDED)))
        for a, b in pairs:
            if spec.has(a) != spec.has(b) or (spec.has(a) and not _alike(spec, a, b)):
                found.append(no("branches", f"{a} and {b} are not alike"))
    return all_of(YES, *found)


def _alike(spec: Spec, a: str, b: str) -> bool:
    groups = spec.shape(a)[0] == spec.shape(b)[0]
    return groups and spec.dtype(a) == spec.dtype(b)


def _steps(spec: Spec) -> Steps | None:
    """The steps of both matrices."""
    scale, zero = (spec.has(f"w_gate_{what}") for what in ADDED)
    kinds = spec.dtype("x"), spec.dtype("w_gate")
    steps = steps_of(spec.param("widen"), scale, zero, *kinds)
    grouped = spec.has("w_gate_scale") and spec.shape("w_gate_scale")[0] > 1
    return None if steps is None or (steps.behind and grouped) else steps


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config: two warpgroups a branch, one for many rows."""
    m, k, n = sizes(part_of(spec))
    depth = 128 if k % 128 == 0 else 64
    turns = 1 if padded(m) > 16 else 2
    stages = 8 if spec.dtype("w_gate") in FOUR_BITS else 4
    base = Tiles(2 * COLUMNS, depth, stages, turns, 2)
    blocks = max(1, n // COLUMNS)
    count = int(processors(device) * BUSY)
    steps = k // depth // base.stages
    splits = max(s for s in SPLITS if s == 1 or s <= min(count // blocks, steps))
    for change in ({}, {"depth": 64}):
        found = with_stages(replace(base, splits=splits, **change), both_of(spec))
        if fits_unit(found, spec, device).ok:
            break
    return found


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first."""
    own = default(spec, device)
    changes = {"turns": 3 - own.turns}, {"depth": 64, "stages": 2 * own.stages}
    found = [own, *(with_stages(replace(own, **c), both_of(spec)) for c in changes)]
    return list(dict.fromkeys(found))


def fits_unit(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: two branches share a block's columns."""
    both = both_of(spec)
    found = [fits(config, both, device)]
    if config.across != 2 or config.block_n != 2 * COLUMNS:
        text = f"{config.block_n} of {config.across}, not 128 of each of two"
        found.append(no("block_n", text))
    return all_of(YES, *found)


def forward(
    *,
    x: Array,
    w_gate: Array,
    w_up: Array | None = None,
    w_gate_scale: Array | None = None,
    w_gate_zero: Array | None = None,
    w_up_scale: Array | None = None,
    w_up_zero: Array | None = None,
    b_gate: Array | None = None,
    b_up: Array | None = None,
    widen: str | None = None,
    halves: str | None = None,
    out_dtype: str | None = None,
    activation: str = "silu",
    beta: float = 1.0,
    residuals: bool = False,
    config: Tiles,
    **others: Any,
) -> Any:
    """Returns the result, as the reference does; there are no residuals.

    Products of 16-bit numbers are exact in the float32 that they are summed in, so
    that `precision` changes nothing.

    Operands are those of the op, and parameters are as in `stored_form.computed`.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The tiles.
        **others: Parameters that supported uses leave at their defaults.
    """
    from rewriter.kernels.quantized_dot.few_rows import kernel, units
    from rewriter.kernels.quantized_dot.few_rows.registers import Steps as InRegisters

    del others
    kind, dtype = w_gate.dtype.name, x.dtype.name
    how = steps_of(widen, w_gate_scale, w_gate_zero, dtype, kind)
    assert how is not None
    names = [name for name, _ in how.within.dtypes]
    steps = tuple((s, names.index(v) if v in names else v) for s, v in how.within.steps)
    gate = w_gate, w_gate_scale, w_gate_zero
    f, arrays = arrays_of(gate, (w_up, w_up_scale, w_up_zero), halves)
    biased = b_gate is not None or b_up is not None
    branches = tuple(
        _branch(how, f, *own, bias, biased)
        for own, bias in zip(arrays, (b_gate, b_up), strict=True)
    )
    behind = [("*", 0)] if how.behind else []
    behind += [("+", len(behind))] if biased else []
    use = kernel.Use(
        InRegisters(steps, tuple(d for _, d in how.within.dtypes), dtype),
        tuple(behind), kind, jnp.dtype(out_dtype or dtype).name, config,
    )  # fmt: skip
    rows = x.reshape(math.prod(x.shape[:-1]), -1)
    out = units.unit(NAME, rows, branches, f, (activation, beta), use)
    out = out.reshape(*x.shape[:-1], f)
    return (out, ()) if residuals else out


def _branch(
    how: Steps,
    f: int,
    first: int,
    matrix: Array,
    scale: Any,
    zero: Any,
    bias: Any,
    biased: bool,
) -> Any:
    """A branch of f columns of a matrix, with what is joined to its numbers and sums.

    Args:
        how: Its steps.
        f: Its columns.
        first: The first of them in the matrix.
        matrix: [k, n].
        scale: The scales, [groups, n | 1], or None.
        zero: Zero points, likewise.
        bias: [f], or None.
        biased: Whether there is a bias in either branch.
    """
    from rewriter.kernels.quantized_dot.few_rows.units import Branch

    arrays, own = {"scale": scale, "zero": zero}, slice(first, first + f)
    columns = lambda x, dtype: all_columns(x, dtype, matrix.shape[1])[:, own]
    within = [columns(arrays[name], dtype) for name, dtype in how.within.dtypes]
    behind = [columns(scale, "float32")[0]] if how.behind else []
    if biased:
        none = jnp.zeros((f,), jnp.float32)
        behind.append(none if bias is None else bias.astype(jnp.float32))
    if matrix.dtype.name == few_rows.FLOATS:
        matrix = lax.bitcast_convert_type(matrix, jnp.uint4)
    return Branch(matrix, first, within, behind)


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and of the kernel.

    XLA computes both products, and joins them in another launch. The kernel reads both
    matrices as a product of few rows does. The gradient of rows is XLA's.
    """
    both = both_of(spec)
    once = as_written(both, device) + LAUNCH_S
    rest = 0.0 if passes == "forward" else once
    return {"xla": once + rest, "hopper_few_rows": of_few_rows(both, device) + rest}


KERNEL = HOPPER.kernel(
    STORED.name, forward, stored.backward, supports,
    Speed(by_estimate, estimate=estimate),
    Space(Tiles, default, configs, fits_unit), stored.KERNEL.backward_space,
    name="hopper_few_rows",
)  # fmt: skip
