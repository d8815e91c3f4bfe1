"""The form of gated linear units whose matrices are stored in few bits.

Both branches may lie in one array, [k, 2f]: a program then multiplies once, and takes
the result apart. Such an array is `w_gate`, and there is no `w_up`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rewriter.ops.op import Op, Operand, Sharding
from rewriter.ops.stored import GROUPS, stored_form, usual_steps
from rewriter.ops.widening import by_steps

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.cost import Cost, Dtypes, Shapes

HALVES = ("gate_up", "up_gate")
"""The orders of both branches in one array."""

ADDED = ("scale", "zero")
"""What an array of numbers may have beside it."""


def unit_of_stored(op: Op, name: str, about: str) -> Op:
    """Returns the form of a gated linear unit whose matrices are stored in few bits.

    Args:
        op: The unit.
        name: The form's name, in reports and measurements.
        about: What it computes, in one line.
    """
    form = stored_form(op, name, about)
    assert form.cost is not None
    assert form.sharding is not None
    return dataclasses.replace(
        form,
        operands=tuple(map(_described, form.operands)),
        reference=functools.partial(computed, op.reference),
        flat=True,
        usual=None,
        defaults={**op.defaults, "widen": None, "halves": None},
        cost=functools.partial(_cost, form.cost),
        sharding=functools.partial(_sharding, form.sharding),
    )


def _described(operand: Operand) -> Operand:
    if operand.name == "w_gate":
        doc = f"{operand.doc} [k, 2f] with both, if `halves` is set."
        return dataclasses.replace(operand, doc=doc)
    if operand.name == "w_up":
        return dataclasses.replace(operand, required=False)
    return operand


def computed(
    unit: Any,
    /,
    *,
    widen: str | None = None,
    halves: str | None = None,
    **given: Any,
) -> Array:
    """Returns a unit of matrices of few bits, with the program's rounding of both.

    Operands are documented where the op is declared.

    Args:
        unit: Computes the unit of float matrices.
        widen: The steps from the stored numbers to the matrices, see
            `rewriter.ops.widening`. By default they are scaled in float32, and rounded
            to the dtype of x.
        halves: The order of branches in `w_gate`, if it holds both: "gate_up" or
            "up_gate".
        **given: The other operands and parameters.
    """
    gate = matrix_of(given, "w_gate", widen)
    up = matrix_of(given, "w_up", widen)
    if halves is not None:
        f = gate.shape[1] // 2
        parts = gate[:, :f], gate[:, f:]
        gate, up = parts if halves == "gate_up" else parts[::-1]
    return unit(w_gate=gate, w_up=up, **given)


def matrix_of(given: dict[str, Any], name: str, widen: str | None) -> Any:
    """Takes a stored matrix out of operands, and returns it widened; None if absent."""
    numbers = given.pop(name, None)
    scale, zero = (given.pop(f"{name}_{what}", None) for what in ADDED)
    if numbers is None:
        return None
    if widen is None:
        widen = usual_steps(scale, zero, given["x"].dtype)
    return by_steps(numbers, widen, scale, zero, 0)


# ------------------------------------------------------------ what a form declares
def _sharding(rule: Any, params: Mapping[str, Any]) -> Sharding:
    """How a use is split. An array of both branches is not, along its columns."""
    found = rule(params)
    if params.get("halves") is None:
        return found
    dims = {**found.dims, "w_gate": "k c"}
    dims |= {f"w_gate_{what}": f"{GROUPS}|1 c|1" for what in ADDED}
    return dataclasses.replace(found, along=frozenset({"..."}), dims=dims)


def _cost(
    cost: Any,
    shapes: Shapes,
    dtypes: Dtypes,
    params: Mapping[str, Any],
    mode: str = "forward",
) -> Cost:
    """That of the unit, with bytes of the stored numbers."""
    shapes, dtypes = dict(shapes), dict(dtypes)
    if params.get("halves") is not None:
        k, both = shapes["w_gate"]
        shapes |= dict.fromkeys(("w_gate", "w_up"), (k, both // 2))
        dtypes["w_up"] = dtypes["w_gate"]
    return cost(shapes, dtypes, params, mode)
