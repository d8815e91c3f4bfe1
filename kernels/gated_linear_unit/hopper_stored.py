"""Units of stored matrices on Hopper: both branches in one pass over the rows.

The kernel is that of units of experts, with one group. Numbers are scaled while they
are widened in shared memory, and rounded as the program rounds them. Scales behind the
products are applied to the finished sums.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.gated_linear_unit import stored
from rewriter.kernels.gated_linear_unit.branches import combine, refused_addends
from rewriter.kernels.gated_linear_unit.op import STORED
from rewriter.kernels.gated_linear_unit.stored_form import ADDED
from rewriter.kernels.ragged.dot.hopper import stored as ragged_dot
from rewriter.kernels.ragged.dot.hopper.config import STEP
from rewriter.kernels.ragged.dot.hopper.stored import Tiles as Tiles
from rewriter.kernels.shared import gated_tiles
from rewriter.kernels.shared.activations_hopper import ON_HOPPER
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.kernels.shared.rounding import InFloat32, in_float32
from rewriter.ops.kernel import Speed
from rewriter.ops.stored import usual_steps
from rewriter.ops.widening import JOINS, all_columns
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.ragged.dot.hopper.branches import Branch
    from rewriter.ops.kernel import Spec

NAME = STORED.name
"""The name of the kernel in profiles."""

BEHIND = "float32 *scale"
"""The last steps of scales that may be applied to the sums."""


def part_of(spec: Spec) -> Spec:
    """Returns an array of matrices as a use of a ragged dot with one group."""
    *rows, k = spec.shape("x")
    return type(spec)(
        ragged_dot.NAME,
        (("lhs", (math.prod(rows), k)), ("rhs", (1, *spec.shape("w_gate"))),
         ("group_sizes", (1,))),
        (("lhs", spec.dtype("x")), ("rhs", spec.dtype("w_gate")),
         ("group_sizes", "int32")),
        (("mode", "forward"), ("out_dtype", spec.param("out_dtype"))),
    )  # fmt: skip


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: 16-bit rows, 8-bit numbers."""
    if spec.symbolic:
        return SYMBOLIC
    found = [
        stored.supports(spec),
        ragged_dot.supports(part_of(spec)),
        gated_tiles.computes(str(spec.param("activation"))),
    ]
    if not all_of(YES, *found).ok:
        return all_of(YES, *found)
    if (f := stored.columns_of(spec)) % STEP:
        found.append(no("f", f"a branch has {f} columns, not a multiple of {STEP}"))
    if spec.has("w_up") and spec.dtype("w_up") != spec.dtype("w_gate"):
        text = f"w_up is {spec.dtype('w_up')}, and w_gate {spec.dtype('w_gate')}"
        found.append(no("dtype", text))
    found += refused_addends(spec)
    groups = {_groups(spec, w, what) for w in ("w_gate", "w_up") for what in ADDED}
    for z in groups - {1}:
        if (size := spec.shape("x")[-1] // z) % STEP:
            text = f"groups of {size} numbers, not a multiple of {STEP}"
            found.append(no("groups", text))
    kinds = spec.dtype("x"), spec.dtype("w_gate")
    how = steps_of(spec.param("widen"), *_added(spec), *kinds)
    if how is None or (how.behind and max(groups) > 1):
        text = f"it does not compute the steps {spec.param('widen')!r}"
        found.append(no("widen", text))
    return all_of(YES, *found)


def _groups(spec: Spec, matrix: str, what: str) -> int:
    name = f"{matrix}_{what}"
    return spec.shape(name)[0] if spec.has(name) else 1


def _added(spec: Spec) -> tuple[bool, bool]:
    scale, zero = (spec.has(f"w_gate_{what}") for what in ADDED)
    return scale, zero


@dataclass(frozen=True)
class Steps:
    """The steps of both matrices, as the kernel computes them.

    Attributes:
        within: What it computes while it widens numbers.
        behind: Whether the scale multiplies the sums.
    """

    within: InFloat32
    behind: bool


def steps_of(
    widen: str | None, scale: Any, zero: Any, dtype: str, kind: str
) -> Steps | None:
    """Returns how the kernel computes some steps; None if it cannot.

    Args:
        widen: The steps; the usual ones if None.
        scale: The scales, or whether there are some.
        zero: The same for zero points.
        dtype: The dtype of the rows.
        kind: The dtype of the numbers.
    """
    if widen is None:
        widen = usual_steps(scale, zero, dtype)
    before = widen.removesuffix(BEHIND)
    behind = before != widen and not any(s[0] in JOINS for s in before.split())
    made = in_float32(before.strip() if behind else widen, dtype, kind)
    if made is None or _adds_to_a_product([sign for sign, _ in made.steps]):
        return None
    return Steps(made, behind)


def _adds_to_a_product(signs: list[str]) -> bool:
    """Whether something is added to scaled numbers: a compiler may round that once."""
    scaled = signs.index("*") if "*" in signs else len(signs)
    return any(sign in "+-" for sign in signs[scaled:])


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: it was not measured."""
    del spec, platform
    return no("measure", "not measured: chosen only by name")


SPACE = gated_tiles.of_product(ragged_dot.SPACE, part_of)


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
    precision: str | None = None,
    out_dtype: str | None = None,
    residuals: bool = False,
    config: Tiles | None = None,
    **joining: Any,
) -> Any:
    """Returns the result, as the reference does; there are no residuals.

    Products of 16-bit numbers are exact in the float32 that they are summed in, so
    that `precision` changes nothing.

    Operands are those of the op, and parameters are as in `stored_form.computed`.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The tiles; their columns are those of both branches.
        **joining: How `combine` joins the branches.
    """
    from rewriter.kernels.ragged.dot.hopper.by_rows import combined
    from rewriter.kernels.ragged.dot.hopper.widen import side

    del precision
    how = steps_of(widen, w_gate_scale, w_gate_zero, x.dtype.name, w_gate.dtype.name)
    assert how is not None
    names = [name for name, _ in how.within.dtypes]
    steps = [(s, names.index(v) if v in names else v) for s, v in how.within.steps]
    gate = w_gate, w_gate_scale, w_gate_zero
    f, arrays = arrays_of(gate, (w_up, w_up_scale, w_up_zero), halves)
    branches = [
        _branch(how, f, *own, bias)
        for own, bias in zip(arrays, (b_gate, b_up), strict=True)
    ]
    joining |= {"slopes": (), "slopes_up": ()}  # of derivatives
    join = functools.partial(combine, **joining, activations=ON_HOPPER)
    rows = math.prod(x.shape[:-1])
    (out,) = combined(
        NAME, x.reshape(rows, -1), branches, f, None, [join],
        jnp.dtype(out_dtype or x.dtype), config or Tiles(),
        matrices=functools.partial(side, steps=steps),
    )  # fmt: skip
    out = out.reshape(*x.shape[:-1], f)
    return (out, ()) if residuals else out


Stored = tuple[Any, Any, Any]
"""A stored matrix, its scales and its zero points; None for what there is not."""


def arrays_of(
    gate: Stored, up: Stored, halves: str | None
) -> tuple[int, list[tuple[int, Any, Any, Any]]]:
    """Returns the columns of a branch, and the arrays of both branches.

    Args:
        gate: The gate's; those of both branches if `halves` says so.
        up: Those of the other branch.
        halves: The order of branches in the gate's matrix, or None.

    Returns:
        The columns, and for each branch the first of them and its arrays.
    """
    f = gate[0].shape[1] // (1 if halves is None else 2)
    firsts = {None: (0, 0), "gate_up": (0, f), "up_gate": (f, 0)}[halves]
    both = gate, gate if up[0] is None else up
    return f, [(first, *own) for first, own in zip(firsts, both, strict=True)]


def _branch(
    how: Steps, f: int, first: int, matrix: Array, scale: Any, zero: Any, bias: Any
) -> Branch:
    """A branch of f columns of a matrix, with what is joined to its numbers and sums.

    Args:
        how: Its steps.
        f: Its columns.
        first: The first of them in the matrix.
        matrix: [k, n].
        scale: The scales, [groups, n | 1], or None.
        zero: Zero points, likewise.
        bias: [f], or None.
    """
    from rewriter.kernels.ragged.dot.hopper.branches import Branch

    arrays, own = {"scale": scale, "zero": zero}, slice(first, first + f)
    columns = lambda x, dtype: all_columns(x, dtype, matrix.shape[1])[:, own]
    within = tuple(columns(arrays[name], dtype) for name, dtype in how.within.dtypes)
    behind = columns(scale, "float32") if how.behind else None
    matrix = matrix[None]
    bias = None if bias is None else bias.astype(jnp.float32)
    return Branch(matrix, first, bias, behind, within)


backward = stored.backward
"""The cotangent of x by XLA, block by block."""


KERNEL = HOPPER.kernel(
    NAME, forward, backward, supports, Speed(profitable),
    SPACE, stored.KERNEL.backward_space,
)  # fmt: skip
