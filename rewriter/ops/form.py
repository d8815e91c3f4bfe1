"""Special forms of an op: other operands, from which those of the op are made.

A form says how its operands become the op's. Everything else follows from the op: its
reference, its work, and the samples that are drawn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from rewriter.ops.cost import Cost, Dtypes, Shapes
from rewriter.ops.op import Op, Operand, Sharding


@dataclasses.dataclass(frozen=True)
class Form:
    """The fields of a special form that replace those of its op.

    Attributes:
        operands: Its operands, in order.
        compute: ``compute(function, **given)`` calls a function of the op's operands
            and parameters, and returns its result. It is given those of the form.
        sizes: ``sizes(shapes, dtypes, params)`` gives the shapes and the dtypes of the
            op's operands, of which the work is counted.
        sharding: As `Op.sharding`.
        sample: ``sample(draw, key, operands, params)`` gives operands of the form.
            `draw` is the op's own `Op.sample`, or one of its distributions.
        distributions: As `Op.distributions`.
        defaults: The parameters with their defaults; the op's own if None.
    """

    operands: tuple[Operand, ...]
    compute: Callable[..., Any]
    sizes: Callable[[Shapes, Dtypes, Mapping[str, Any]], tuple[Shapes, Dtypes]]
    sharding: Callable[[Mapping[str, Any]], Sharding | None]
    sample: Callable[..., Any]
    distributions: Callable[..., Any] | None = None
    defaults: Mapping[str, object] | None = None


def special_form(op: Op, name: str, about: str, form: Form) -> Op:
    """Returns a special form of an op, which is an op itself.

    Args:
        op: The op.
        name: The form's name, in reports and measurements.
        about: What it computes, in one line.
        form: What it has in place of the op's.
    """
    return dataclasses.replace(
        op,
        name=name,
        form_of=op.name,
        about=about,
        operands=form.operands,
        defaults=op.defaults if form.defaults is None else form.defaults,
        reference=functools.partial(form.compute, op.reference),
        flat=False,
        general=op.general and functools.partial(form.compute, op.general),
        usual=None,
        cost=op.cost and functools.partial(_cost, op.cost, form),
        sharding=form.sharding,
        sample=op.sample and functools.partial(form.sample, op.sample),
        distributions=form.distributions,
    )


def _cost(
    of_op: Callable[..., Cost],
    form: Form,
    shapes: Shapes,
    dtypes: Dtypes,
    params: Mapping[str, Any],
    mode: str = "forward",
) -> Cost:
    """The work of a use of the form, as `Op.cost`."""
    return of_op(*form.sizes(shapes, dtypes, params), params, mode)
