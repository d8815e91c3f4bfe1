"""Lookups as JAX has them, with a gradient that is one of our sums of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from rewriter.kernels.embedding import limits
from rewriter.kernels.embedding.estimate import pays_in_16_bits
from rewriter.kernels.embedding.reference import looked_up
from rewriter.ops.kernel import Kernel, Limits, Speed, Traits
from rewriter.support.verdict import Verdict, all_of

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

NAME = "embedding_lookup"


def forward(*, residuals: bool = False, **given: Any) -> Any:
    """Returns the rows, as `looked_up` does; with `residuals`, that nothing is saved.

    Operands are those of the op, and parameters are as in `looked_up`.
    """
    out = looked_up(**given)
    return (out, ()) if residuals else out


def backward(
    sums: Callable[..., Any],
    *,
    table: jax.Array,
    ids: jax.Array | None = None,
    out: None = None,
    residuals: tuple[()] = (),
    cotangent: jax.Array,
    outside: str = "nan",
    start: int = 0,
    period: int = 0,
    count: int = 0,
) -> dict[str, jax.Array]:
    """Returns the cotangent of the table: the sums of those of its rows.

    Operands are those of the op, and parameters are as in `looked_up`.

    Args:
        sums: The `forward` of a kernel that adds rows to a table.
    """
    del out, residuals, count
    given = {"start": start, "period": period} if ids is None else {"ids": ids}
    kept = outside if outside in ("clip", "promise") else "drop"
    added = sums(rows=cotangent, size=table.shape[-2], outside=kept, **given)
    return {"table": added.astype(table.dtype)}


def with_sums(kernel: Kernel, takes: Callable[[Spec], Verdict]) -> Kernel:
    """Returns the kernel of lookups whose gradient is that of a kernel of sums.

    Args:
        kernel: Adds rows to a table.
        takes: Says of which ids it does so.
    """
    return Kernel(
        name=kernel.name,
        op=NAME,
        platforms=kernel.platforms,
        version=kernel.version,
        forward=forward,
        backward=functools.partial(backward, kernel.forward),
        limits=Limits(
            lambda spec: all_of(limits.table_to_read(spec), takes(spec)),
            deterministic=kernel.limits.deterministic,
        ),
        speed=Speed(functools.partial(pays_in_16_bits, "table")),
        traits=Traits(memory_bounded=True, saves_out=False),
    )
