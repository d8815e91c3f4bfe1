"""Lookups as JAX has them, with a gradient that is one of our sums of rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from rewriter.kernels.embedding.forms import DTYPES, MOST
from rewriter.kernels.embedding.reference import looked_up
from rewriter.ops.kernel import Kernel, Limits, Speed, Traits
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

NAME = "embedding_lookup"


def supports(spec: Spec) -> Verdict:
    """Returns whether a use has rows of real numbers, of sizes that are known."""
    if spec.symbolic:
        return no("symbolic", "sizes must be known, but some are symbolic")
    shape, found = spec.shape("table"), [YES]
    if spec.dtype("table") not in DTYPES:
        text = f"the table is {spec.dtype('table')}, not {', '.join(DTYPES)}"
        found.append(no("dtype", text))
    if 0 in shape or (spec.has("ids") and 0 in spec.shape("ids")):
        found.append(no("empty", f"nothing is taken from a table of shape {shape}"))
    if (rows := math.prod(shape[:-1])) >= MOST:
        found.append(no("size", f"{rows} rows of a table, of at most 2^31 - 1"))
    return all_of(*found)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes for tables of 16 bits on a GPU, for the sake of the gradient."""
    if platform not in ("cuda", "rocm"):
        return no("platform", f"not measured to be faster than XLA on {platform}")
    if spec.dtype("table") == "float32":
        return no("dtype", "XLA adds float32 as fast")
    return YES


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
    added = sums(
        rows=cotangent, size=table.shape[-2],
        outside="clip" if outside == "clip" else "drop", **given,
    )  # fmt: skip
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
            lambda spec: all_of(supports(spec), takes(spec)),
            deterministic=kernel.limits.deterministic,
        ),
        speed=Speed(profitable),
        traits=Traits(memory_bounded=True, saves_out=False),
    )
