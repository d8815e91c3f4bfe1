"""The gated linear unit of experts by ragged dots: all of it, or its gradients.

Both branches are kept for the gradients, as in a program written without this op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.ragged.gated_linear_unit.reference import branches
from rewriter.ops.activations import ACTIVATIONS, Slopes, with_slopes
from rewriter.ops.kernel import Spec

if TYPE_CHECKING:
    from jax import Array

Product = Callable[..., Any]
"""A ragged dot, as `rewriter.kernels.ragged.dot.reference.reference`."""


def forward(
    *,
    x: Array,
    w: Array,
    group_sizes: Array,
    w_up: Array | None = None,
    activation: str = "silu",
    beta: float = 1.0,
    halves: str | None = None,
    slopes: Slopes = (),
    precision: str | None = None,
    out_dtype: str | None = None,
    residuals: bool = False,
    config: Any = None,
    product: Product,
) -> Any:
    """Returns the result, as `reference` does, by a kernel of ragged dots.

    Operands are those of the op, and parameters are as in `reference`.

    Args:
        residuals: Whether to return ``(result, (gate, up))``.
        config: The product's.
        product: The kernel.
    """
    del slopes  # of derivatives
    given = {"precision": precision, "out_dtype": str(saved_dtype(x, w, w_up))}
    gate, up = branches(
        x, w, group_sizes, w_up, halves, product, config=config, **given
    )
    wide = [y.astype(jnp.promote_types(y.dtype, jnp.float32)) for y in (gate, up)]
    out = ACTIVATIONS[activation](wide[0], beta) * wide[1]
    out = out.astype(out_dtype or x.dtype)
    return (out, (gate, up)) if residuals else out


def backward(
    *,
    x: Array,
    w: Array,
    group_sizes: Array,
    w_up: Array | None = None,
    out: None = None,
    residuals: tuple[Array, Array],
    cotangent: Array,
    activation: str = "silu",
    beta: float = 1.0,
    halves: str | None = None,
    slopes: Slopes = (),
    precision: str | None = None,
    out_dtype: str | None = None,
    config: Any = None,
    product_backward: Callable[..., dict[str, Array]],
) -> dict[str, Array]:
    """Returns the cotangents of x and the matrices, by the ragged dots' own backward.

    Operands are those of the op, and parameters are as in `reference`.

    Args:
        out: Not needed.
        residuals: Both branches.
        cotangent: [m, f].
        config: The product's.
        product_backward: As the backward of a kernel of ragged dots.
    """
    del out, out_dtype
    gate, up = residuals
    wide = jnp.promote_types(gate.dtype, jnp.float32)

    act = with_slopes(lambda y: ACTIVATIONS[activation](y, beta), slopes)

    def joined(gate: Array, up: Array) -> Array:
        return act(gate) * up

    _, back = jax.vjp(joined, gate.astype(wide), up.astype(wide))
    of_branches = [d.astype(gate.dtype) for d in back(cotangent.astype(wide))]

    def of(matrices: Array, cotangent: Array) -> dict[str, Array]:
        return product_backward(
            lhs=x, rhs=matrices, group_sizes=group_sizes, cotangent=cotangent,
            precision=precision, config=config,
        )  # fmt: skip

    if w_up is None:
        order = of_branches if halves == "gate_up" else of_branches[::-1]
        both = of(w, jnp.concatenate(order, axis=1))
        return {"x": both["lhs"], "w": both["rhs"]}
    first, second = of(w, of_branches[0]), of(w_up, of_branches[1])
    rows = first["lhs"].astype(wide) + second["lhs"].astype(wide)
    return {"x": rows.astype(x.dtype), "w": first["rhs"], "w_up": second["rhs"]}


def saved_dtype(x: Array, w: Array, w_up: Array | None) -> Any:
    """Returns the dtype of the saved branches: that of a product of the operands."""
    return jnp.result_type(*(a for a in (x, w, w_up) if a is not None))


def part_of(spec: Spec) -> Spec:
    """Returns a part as a use of a ragged dot."""
    names = {"lhs": "x", "rhs": "w", "group_sizes": "group_sizes"}
    return Spec(
        "ragged_dot",
        tuple((name, spec.shape(own)) for name, own in names.items()),
        tuple((name, spec.dtype(own)) for name, own in names.items()),
        (("mode", "forward"), ("out_dtype", None), ("precision", None)),
    )
