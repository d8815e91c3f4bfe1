"""One use of an op, and the types of its results: everything but the arrays.

A batch *level* is one `jax.vmap` around the use, outermost first. An argument that has
a level's axis has it in front, in the order of the levels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax
from rewriter.find.reference import result_of
from rewriter.ops.kernel import Kernel, Spec
from rewriter.ops.op import Op
from rewriter.support import promotion

Mask = tuple[bool, ...]
"""Which arguments (or results) have the axis of one batch level."""

Shaped = tuple[tuple[Any, ...], Any]
"""A shape and a dtype."""


@dataclass(frozen=True)
class Use:
    """One use of an op: everything but the arrays, and hashable.

    Attributes:
        op: The op.
        names: The operands present, in the op's order.
        params: (name, value), sorted by name.
        kernels: (platform or ``"default"``, kernel; None for the reference).
        falls_back: Whether the reference runs where a kernel cannot be lowered.
    """

    op: Op
    names: tuple[str, ...]
    params: tuple[tuple[str, Any], ...]
    kernels: tuple[tuple[str, Kernel | None], ...]
    falls_back: bool = False

    @property
    def keeps_out(self) -> bool:
        """Whether some kernel's backward reads the result."""
        return any(k and k.backward and k.traits.saves_out for _, k in self.kernels)

    @property
    def needs_devices(self) -> bool:
        """Whether some kernel is lowered differently for different devices."""
        return any(k and k.traits.needs_devices for _, k in self.kernels)

    @property
    def adds_to(self) -> str:
        """The operand for which some kernel takes an addend; empty if none does."""
        operands = (k.traits.adds_to for _, k in self.kernels if k)
        return next(filter(None, operands), "")

    def kernel(self, platform: str) -> Kernel | None:
        """Returns the kernel for a platform, ``None`` for the reference."""
        table = dict(self.kernels)
        both = "gpu" if platform in ("cuda", "rocm") else platform
        for key in (platform, both, "default"):
            if key in table:
                return table[key]
        return None

    def reference(self, *operands: jax.Array) -> jax.Array:
        """The op's reference on the operands in order."""
        named = dict(zip(self.names, operands, strict=True))
        with promotion.as_usual():
            return self.op.reference(**named, **dict(self.params))

    def general(self, *operands: jax.Array) -> jax.Array:
        """The reference in a form that supports every transformation."""
        named = dict(zip(self.names, operands, strict=True))
        with promotion.as_usual():
            return (self.op.general or self.op.reference)(**named, **dict(self.params))

    @property
    def differentiated(self) -> Use:
        """The use that computes the value beside a derivative."""
        if self.op.differentiated is None:
            return self
        params = tuple(sorted(self.op.differentiated(dict(self.params)).items()))
        return self if params == self.params else replace(self, params=params)

    def spec(self, operands: Sequence[Shaped]) -> Spec:
        """Returns the `Spec` by which kernels are chosen."""
        pairs = list(zip(self.names, operands, strict=True))
        return Spec(
            self.op.name,
            tuple((n, tuple(s)) for n, (s, _) in pairs),
            tuple((n, str(d)) for n, (_, d) in pairs),
            self.params,
        )


def shaped(value: Any) -> Shaped:
    """Returns the shape and dtype of an array or an abstract value."""
    return tuple(value.shape), jnp.dtype(value.dtype)


def without_levels(values: Sequence[Shaped], batch: Sequence[Mask]) -> list[Shaped]:
    """Returns the shapes of arguments as the innermost function sees them."""
    counts = [sum(mask[i] for mask in batch) for i in range(len(values))]
    return [(s[c:], d) for (s, d), c in zip(values, counts, strict=True)]


def level_sizes(values: Sequence[Shaped], batch: Sequence[Mask]) -> list[Any]:
    """Returns the size of each level's axis."""
    sizes = []
    for level, mask in enumerate(batch):
        at = mask.index(True)
        axis = sum(other[at] for other in batch[:level])
        sizes.append(values[at][0][axis])
    return sizes


def result(use: Use, operands: Sequence[Shaped]) -> Shaped:
    """Returns the result's shape and dtype, from the reference."""
    return memoised(_result, operands)(use, tuple(operands), wide_numbers())


def is_symbolic(operands: Sequence[Shaped]) -> bool:
    """Whether some size is symbolic."""
    return any(not isinstance(d, int) for shape, _ in operands for d in shape)


def memoised(function: Any, operands: Sequence[Shaped]) -> Callable[..., Any]:
    """A memoised function, or the function itself for symbolic sizes.

    Symbolic sizes of different scopes cannot be compared, so they are no cache keys.
    """
    return function.__wrapped__ if is_symbolic(operands) else function


def wide_numbers() -> bool:
    """Whether 64-bit numbers are enabled, which decides dtypes."""
    return bool(jax.config.jax_enable_x64)  # pyright: ignore


def structs(operands: Sequence[Shaped]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes as JAX takes them."""
    return [jax.ShapeDtypeStruct(s, d) for s, d in operands]


@functools.lru_cache(maxsize=4096)
def _result(use: Use, operands: tuple[Shaped, ...], x64: bool) -> Shaped:
    del x64
    if is_symbolic(operands):
        with _jax.on_one_device():
            return shaped(jax.eval_shape(use.reference, *structs(operands)))
    given = dict(zip(use.names, structs(operands), strict=True))
    with _jax.on_one_device(), promotion.as_usual():
        return shaped(result_of(use.op, given, dict(use.params)))
