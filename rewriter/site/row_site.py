"""A primitive for equations of rows that one kernel computes in a pass over memory.

It takes arrays and returns the results of a `RowProgram` or an `ElementwiseProgram`.
Under `jax.vmap`, in derivatives, on several devices and on other platforms it is the
program's own equations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad

from rewriter.ops.elementwise_program import ElementwiseKernel, ElementwiseProgram
from rewriter.ops.kernel import Kernel
from rewriter.ops.op import Op
from rewriter.ops.row_program import COLUMN, FULL, ROW, RowKernel, RowProgram
from rewriter.site.composed import batch_rule, jvp_rule
from rewriter.site.lowering import register
from rewriter.site.uses import Use

rows_p = Primitive("rewriter_rows")
rows_p.multiple_results = True


Program = RowProgram | ElementwiseProgram


def use_of(kernel: RowKernel | ElementwiseKernel, program: Program) -> Use:
    """Returns the use of a kernel for a program of rows."""
    return Use(
        _op(kernel.kernel.op),
        (),
        (("program", program),),
        tuple((platform, kernel.kernel) for platform in kernel.kernel.platforms),
        falls_back=True,
    )


def _as_written(**given: Any) -> Any:
    raise NotImplementedError(f"equations of rows have no reference: {sorted(given)}")


@functools.cache
def _op(name: str) -> Op:
    return Op(name, (), "... d", _as_written)


def _composed(*, use: Use, equations: ClosedJaxpr) -> Callable[..., Sequence[Any]]:
    del use
    return jaxpr_as_fun(equations)


def _aval(*avals: Any, use: Use, equations: ClosedJaxpr) -> list[Any]:
    del avals, use
    return list(equations.out_avals)


def _made(
    kernel: Kernel | None, *, use: Use, equations: ClosedJaxpr
) -> Callable[..., Sequence[Any]]:
    if kernel is None:
        return jaxpr_as_fun(equations)
    program: Program = dict(use.params)["program"]
    outs, kinds = equations.out_avals, [kind for kind, _ in program.inputs]

    def run(*args: Any) -> list[Any]:
        given = list(zip(args, kinds, strict=False))  # others are for XLA alone
        d = next(x.shape[-1] for x, kind in given if kind == FULL)
        shapes = {FULL: (-1, d), ROW: (-1,), COLUMN: (d,)}
        rows = [x.reshape(shapes.get(kind, (1,))) for x, kind in given]
        made = kernel.forward(*rows, program=program)
        return [
            x.astype(out.dtype).reshape(out.shape)
            for x, out in zip(made, outs, strict=True)
        ]

    return run


def _deciding(*, use: Use, equations: ClosedJaxpr) -> dict[str, Any]:
    """A kernel computes the use's program: of the equations it gives results' types."""
    return {"use": use, "outs": [(x.shape, x.dtype) for x in equations.out_avals]}


register(rows_p, _aval, batch_rule(_composed), _made, _deciding)
ad.primitive_jvps[rows_p] = jvp_rule(_composed)
