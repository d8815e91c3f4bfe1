"""One use of an op without its values: shapes, dtypes and parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from rewriter import _jax
from rewriter.ops.op import Op


@dataclass(frozen=True)
class Spec:
    """One use of an op without its values, for choosing a kernel.

    Attributes:
        op: The op's name.
        shapes: (operand, shape) for each operand present, in the op's order.
        dtypes: (operand, dtype name) for each operand present.
        params: (name, value) for each parameter, sorted by name.
        tails: (operand, number of axes after its leading ones) for operands that
            take any number of leading axes.
    """

    op: str
    shapes: tuple[tuple[str, tuple[Any, ...]], ...]
    dtypes: tuple[tuple[str, str], ...]
    params: tuple[tuple[str, Any], ...]
    tails: tuple[tuple[str, int], ...] = ()

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands that are there."""
        return tuple(name for name, _ in self.shapes)

    def has(self, name: str) -> bool:
        """Whether an operand is there."""
        return name in self.operands

    def shape(self, name: str) -> tuple[Any, ...]:
        """Returns an operand's shape; a size may be symbolic under export."""
        return dict(self.shapes)[name]

    def dtype(self, name: str) -> str:
        """Returns the name of an operand's dtype, such as ``"bfloat16"``."""
        return dict(self.dtypes)[name]

    def nbytes(self, name: str) -> int:
        """Returns an operand's size in bytes; its shape must be known."""
        return math.prod(self.shape(name)) * jnp.dtype(self.dtype(name)).itemsize

    def param(self, name: str, default: Any = None) -> Any:
        """Returns a parameter's value."""
        return dict(self.params).get(name, default)

    def with_params(self, params: Mapping[str, Any]) -> Spec:
        """Returns the same with other values of some parameters."""
        return replace(
            self, params=tuple(sorted({**dict(self.params), **params}.items()))
        )

    @property
    def symbolic(self) -> bool:
        """Whether any size is symbolic."""
        return any(not isinstance(d, int) for _, shape in self.shapes for d in shape)


def of_least_sizes(spec: Spec) -> Spec:
    """Returns a use with each symbolic size as the least that it can be, 1 or more."""
    if not spec.symbolic:
        return spec
    shapes = tuple(
        (name, tuple(max(_jax.size_range(d)[0], 1) for d in shape))
        for name, shape in spec.shapes
    )
    return replace(spec, shapes=shapes)


def spec_of(op: Op, operands: Mapping[str, Any], params: Mapping[str, Any]) -> Spec:
    """Returns the `Spec` of an op on given operands.

    Args:
        op: The op.
        operands: Arrays, or anything with ``shape`` and ``dtype``, by name.
        params: Parameters; the op's defaults fill in what is missing.
    """
    names = op.ordered(operands)
    return Spec(
        op.name,
        tuple((n, tuple(operands[n].shape)) for n in names),
        tuple((n, str(operands[n].dtype)) for n in names),
        tuple(sorted({**op.defaults, **params}.items())),
        tuple((n, len(d[1:])) for n in names if (d := _letters(op, n))[:1] == ["..."]),
    )


def _letters(op: Op, name: str) -> list[str]:
    return op.dims.get(name, "").split()
