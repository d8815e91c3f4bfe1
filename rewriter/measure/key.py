"""Keys of measurements: one use of an op on one device, and which keys are near."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import jax

from rewriter.ops.kernel import Spec

Found = TypeVar("Found")

FORWARD, BOTH = "forward", "forward_and_vjp"
"""The passes that are measured: the result alone, or the result and all gradients."""

PROGRAM, WHOLE = "program", "whole"
"""The op and pass under which whole programs are measured."""

UNTIMED = (
    "of_squares", "unshifted", "fill", "fill_passes", "open_bias", "slopes",
    "slopes_up",
)  # fmt: skip
"""Parameters that change a few operations of a row, but not the time."""

FAR = 2.0
"""The largest distance of near shapes: the sum over axes of |log2 of the ratio|."""


@dataclass(frozen=True)
class Key:
    """The key of a measurement: an op, its shapes, and the device.

    Floating parameters (a scale, an epsilon) only count as present or absent, since
    they do not change the time. Everything else does: shapes, dtypes, windows. Leading
    axes count as one axis, if an operand may have any. A result without a dtype has
    that of the first operand.

    Attributes:
        op: The op's name.
        passes: ``"forward"`` or ``"forward_and_vjp"``.
        shapes: (operand, shape) pairs.
        dtypes: (operand, dtype) pairs.
        params: (name, value) pairs, values as JSON has them.
        device: The device kind.
        precision: `jax.default_matmul_precision`, or ``""``.
    """

    op: str
    passes: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtypes: tuple[tuple[str, str], ...]
    params: tuple[tuple[str, Any], ...]
    device: str
    precision: str = ""

    @property
    def text(self) -> str:
        """The key in words."""
        if self.op == PROGRAM:
            return f"whole program {dict(self.params)['digest']}"
        dtypes = dict(self.dtypes)
        operands = " ".join(
            f"{n} {dtypes[n]}[{','.join(map(str, s))}]" for n, s in self.shapes
        )
        return f"{self.op} {self.passes} {operands}"


def key_of(spec: Spec, passes: str, device: str) -> Key:
    """Returns the key of a use of an op; its shapes must be known.

    Example:
        >>> spec = Spec("f", (("x", (2, 3)),), (("x", "float32"),), (("eps", 1e-6),))
        >>> key_of(spec, "forward", "cpu").params
        (('eps', 'float'),)
    """
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    params = tuple(
        (n, spec.dtypes[0][1] if n == "out_dtype" and v is None else _plain(v))
        for n, v in spec.params
        if n not in UNTIMED
    )
    tails = dict(spec.tails)
    shapes = tuple((n, _merged(s, tails.get(n))) for n, s in spec.shapes)
    return Key(spec.op, passes, shapes, spec.dtypes, params, device, precision or "")


def _merged(shape: tuple[Any, ...], tail: int | None) -> tuple[int, ...]:
    if tail is None or len(shape) <= tail:
        return shape
    first = len(shape) - tail
    return (math.prod(shape[:first]), *shape[first:])


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return "float"
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return str(value)


def nearest(
    entries: Iterable[tuple[Key, tuple[Found, ...]]],
    key: Key,
    equal: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> tuple[Found, ...]:
    """Returns the entry for the nearest shapes; () if none is near.

    Args:
        entries: Keys and their entries.
        key: The key to be near to.
        equal: Axes by operand whose sizes must be equal.

    A near key has the same op, passes, operands, dtypes, parameters and device. The
    ratios of its axes multiply to a factor of at most four.
    """
    best: tuple[float, tuple[Found, ...]] = (FAR, ())
    alike = _but_shapes(key)
    for other, found in entries:
        if other.dtypes != key.dtypes or _but_shapes(other) != alike:
            continue
        distance = _distance(other, key)
        if distance < math.inf and _sizes(other, equal) != _sizes(key, equal):
            continue
        if distance < best[0] or (distance == best[0] and not best[1]):
            best = distance, found
    return best[1]


def _distance(a: Key, b: Key) -> float:
    """How far shapes of the same operands are apart."""
    total, seen = 0.0, set()
    for (name, first), (other, second) in zip(a.shapes, b.shapes, strict=True):
        if name != other or len(first) != len(second):
            return math.inf
        for x, y in zip(first, second, strict=True):
            if 0 in (x, y):
                return math.inf
            if x != y and (x, y) not in seen:  # an axis that operands share
                seen.add((x, y))
                total += abs(math.log2(x / y))
    return total


def _sizes(key: Key, axes: Mapping[str, Sequence[int]]) -> list[int]:
    """The sizes of some axes of a use's operands."""
    shapes = dict(key.shapes)
    return [shapes[name][i] for name in axes if name in shapes for i in axes[name]]


def _but_shapes(key: Key) -> tuple[Any, ...]:
    names = tuple([n for n, _ in key.shapes])
    more = (key.dtypes, key.params, key.device, key.precision)
    return key.op, key.passes, names, *more
