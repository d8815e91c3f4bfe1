"""The gated linear unit of experts by ragged dots: all of it, or its gradients.

Both branches are kept for the gradients, as in a program written without this op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.ragged.gated_linear_unit.reference import branches
from rewriter.kernels.ragged.gated_linear_unit.use import Use
from rewriter.ops.activations import ACTIVATIONS
from rewriter.ops.kernel import Kernel, Space, Spec
from rewriter.ops.slopes import with_slopes
from rewriter.support.verdict import Verdict, no

if TYPE_CHECKING:
    from jax import Array

Product = Callable[..., Any]
"""A ragged dot, as `rewriter.kernels.ragged.dot.reference.reference`."""


def forward(
    *, product: Product, residuals: bool = False, config: Any = None, **given: Any
) -> Any:
    """Returns the result, as `reference` does, by a kernel of ragged dots.

    Args:
        product: The kernel.
        residuals: Whether to return ``(result, (gate, up))``.
        config: The product's.
        **given: The fields of `Use`.
    """
    use = Use(**given)
    gate, up = branches(
        use.x, use.w, use.group_sizes, use.w_up, use.halves, product, config=config,
        precision=use.precision, out_dtype=str(saved_dtype(use)),
    )  # fmt: skip
    wide = [y.astype(jnp.promote_types(y.dtype, jnp.float32)) for y in (gate, up)]
    out = ACTIVATIONS[use.activation](wide[0], use.beta) * wide[1]
    out = out.astype(use.out_dtype or use.x.dtype)
    return (out, (gate, up)) if residuals else out


def backward(
    *,
    product_backward: Callable[..., dict[str, Array]],
    out: None = None,
    residuals: tuple[Array, Array],
    cotangent: Array,
    config: Any = None,
    **given: Any,
) -> dict[str, Array]:
    """Returns the cotangents of x and the matrices, by the ragged dots' own backward.

    Args:
        product_backward: As the backward of a kernel of ragged dots.
        out: Not needed.
        residuals: Both branches.
        cotangent: [m, f].
        config: The product's.
        **given: The fields of `Use`.
    """
    del out
    use, (gate, up) = Use(**given), residuals
    wide = jnp.promote_types(gate.dtype, jnp.float32)

    chosen = ACTIVATIONS[use.activation]
    act = with_slopes(lambda y: chosen(y, use.beta), use.slopes)

    def joined(gate: Array, up: Array) -> Array:
        return act(gate) * up

    _, back = jax.vjp(joined, gate.astype(wide), up.astype(wide))
    of_branches = [d.astype(gate.dtype) for d in back(cotangent.astype(wide))]

    def of(matrices: Array, cotangent: Array) -> dict[str, Array]:
        return product_backward(
            lhs=use.x, rhs=matrices, group_sizes=use.group_sizes, cotangent=cotangent,
            precision=use.precision, config=config,
        )  # fmt: skip

    if use.w_up is None:
        order = of_branches if use.halves == "gate_up" else of_branches[::-1]
        both = of(use.w, jnp.concatenate(order, axis=1))
        return {"x": both["lhs"], "w": both["rhs"]}
    first, second = of(use.w, of_branches[0]), of(use.w_up, of_branches[1])
    rows = first["lhs"].astype(wide) + second["lhs"].astype(wide)
    return {"x": rows.astype(use.x.dtype), "w": first["rhs"], "w_up": second["rhs"]}


@dataclass(frozen=True)
class ByParts:
    """The unit by a kernel of ragged dots.

    Attributes:
        forward: The forward pass, as of `Kernel`.
        backward: The backward pass.
        space: The configs of the forward pass, those of a ragged dot.
        backward_space: Those of the backward pass.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    space: Space
    backward_space: Space

    @classmethod
    def of(cls, dot: Kernel) -> ByParts:
        """Returns the unit by a kernel of ragged dots that has configs."""
        assert dot.space is not None
        assert dot.backward_space is not None
        return cls(
            functools.partial(forward, product=dot.forward),
            functools.partial(backward, product_backward=dot.backward),
            _of_part(dot.space),
            _of_part(dot.backward_space),
        )


def _of_part(space: Space) -> Space:
    """The configs of a ragged dot, for a use of the unit."""
    return Space(
        space.config,
        lambda spec, device: space.default(part_of(spec), device),
        lambda spec, device: space.configs(part_of(spec), device),
        lambda config, spec, device: space.fits(config, part_of(spec), device),
    )


def refused_halves(spec: Spec, step: int) -> list[Verdict]:
    """Returns what stands against two branches in one array, for a kernel's step."""
    columns = spec.shape("w")[2]
    if not spec.param("halves") or columns % (2 * step) == 0:
        return []
    return [no("halves", f"half of {columns} columns is not a multiple of {step}")]


def saved_dtype(use: Use) -> Any:
    """Returns the dtype of the saved branches: that of a product of the operands."""
    return jnp.result_type(*(a for a in (use.x, use.w, use.w_up) if a is not None))


def part_of(spec: Spec) -> Spec:
    """Returns a part as a use of a ragged dot."""
    names = {"lhs": "x", "rhs": "w", "group_sizes": "group_sizes"}
    return Spec(
        "ragged_dot",
        tuple((name, spec.shape(own)) for name, own in names.items()),
        tuple((name, spec.dtype(own)) for name, own in names.items()),
        (("mode", "forward"), ("out_dtype", None), ("precision", None)),
    )
