"""Code of a replacement whose operands are leaves, unchanged: the op's reference.

Where each operand is a leaf, and the result is the op's own, emitted code holds no
equation beside the reference's. The cached trace of the reference is that code then,
and nothing is traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewriter import _jax
from rewriter.algebra.normal_form import TRUE, Algebra
from rewriter.find.reading import Operand, Reading
from rewriter.find.reference import reference_program
from rewriter.ops.op import Op
from rewriter.program.graph import Graph


@dataclass(frozen=True, eq=False)
class _Stand:
    """What emitted code asks of an array; any operation on it is an error."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


def plain_code(
    graph: Graph,
    op: Op,
    reading: Reading,
    names: Sequence[int],
    params: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]] | None:
    """Returns a reading's code and what operands are like; None if it emits more.

    Args:
        graph: The program.
        op: The op.
        reading: The reading.
        names: What its code reads, in order.
        params: The op's parameters.
    """
    beside = reading.joined or reading.times or reading.plus
    if beside or not all(
        is_leaf(reading.algebra, o) for o in reading.operands.values()
    ):
        return None
    arrays = {v: _Stand(graph.shape(v), graph.dtype(v)) for v in names}
    called: list[tuple[Any, dict[str, Any], _Stand]] = []

    def reference(**given: Any) -> Any:
        operands = {k: v for k, v in given.items() if k in op.names}
        program = reference_program(op, operands, params)
        if program is None:
            raise TypeError("the reference is not kept")
        out = program.out_avals[0]
        result = _Stand(out.shape, out.dtype, out.weak_type)
        called.append((program, operands, result))
        return result

    value = reading.value
    shape, dtype = graph.shape(value), graph.dtype(value)
    try:
        found = reading.build(reference, arrays, shape, dtype, params)
    except (TypeError, AttributeError):  # an operation on what is no array
        return None
    program, operands, result = called[0]
    given = list(operands.values())
    if found is not result or len(given) != len(names):
        return None
    if not all(any(x is a for x in given) for a in arrays.values()):
        return None
    inputs = dict(zip(map(id, given), program.jaxpr.invars, strict=True))
    order = [inputs[id(arrays[v])] for v in names]
    jaxpr = program.jaxpr
    code = _jax.part_of(jaxpr, order, jaxpr.eqns, jaxpr.outvars)
    return code, operands


def is_leaf(alg: Algebra, operand: Operand) -> bool:
    """Whether an operand is one leaf with an index for each axis, perhaps moved."""
    if operand.flag is not None or operand.near or len(operand.parts) != 1:
        return False
    ((form, _),) = operand.parts
    if len(form) != 1:
        return False
    (((flag, mono), c),) = form.items()
    if flag != TRUE or c != 1 or len(mono) != 1 or mono[0][1] != 1:
        return False
    definition = alg.defs[mono[0][0]]
    return definition[0] == "leaf" and all(isinstance(a, int) for a in definition[2])
