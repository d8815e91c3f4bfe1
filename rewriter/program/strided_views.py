"""Reads a value as a strided view of the array that it is a part of.

    a = slice[0:8, 0:64, 768:1536] x          a[i, j, k] = x[i, j, 768 + k]
    v = reshape[8, 64, 12, 64] a              v[i, j, n, k] = x[i, j, 768 + 64 n + k]

Slices, splits, transposes, and reshapes move no numbers: each result is an offset into
the array and a stride for each axis.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewriter import _jax


@dataclass(frozen=True)
class View:
    """A part of an array, in its row-major order.

    Attributes:
        source: The array's variable.
        offset: The place of the part's first element.
        shape: The part's shape.
        strides: How far the elements along each axis are apart.
    """

    source: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def view_of(atom: Any, makers: Mapping[Any, Any], repeats: bool = False) -> View | None:
    """Returns a value as a view of an array; None for literals and symbolic sizes.

    Args:
        atom: A variable.
        makers: The equation that makes a variable, for all of a body but its inputs.
        repeats: Whether an axis may repeat the others: its stride is then 0.
    """
    if _jax.is_literal(atom) or not _has_numbers(atom.aval.shape):
        return None
    maker = makers.get(atom)
    rule = None if maker is None else _RULES.get(maker.primitive.name)
    if repeats and maker is not None:
        rule = _REPEATING.get(maker.primitive.name, rule)
    before = view_of(maker.invars[0], makers, repeats) if rule else None
    found = rule(maker, before, atom) if rule and before else None
    return found or whole(atom)


def _has_numbers(shape: Sequence[Any]) -> bool:
    kinds = set(map(type, shape))
    return kinds <= {int} or all(issubclass(kind, int) for kind in kinds)


def whole(atom: Any) -> View:
    """Returns an array as a view of itself."""
    shape = tuple(atom.aval.shape)
    return View(atom, 0, shape, row_major(shape))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of an array."""
    steps = itertools.accumulate(shape[:0:-1], operator.mul, initial=1)
    return tuple(steps)[::-1] if shape else ()


# ------------------------------------------------------------- of each primitive
def _sliced(eqn: Any, x: View, out: Any) -> View:
    starts, steps = eqn.params["start_indices"], eqn.params["strides"]
    return sliced(x, starts, steps or (1,) * len(starts), tuple(out.aval.shape))


def sliced(
    x: View, starts: Sequence[int], steps: Sequence[int], shape: tuple[int, ...]
) -> View:
    """Returns a part of a view.

    Args:
        x: The view.
        starts: The first place along each axis.
        steps: The distance of places along each axis.
        shape: The part's shape.
    """
    offset = x.offset + sum(a * b for a, b in zip(starts, x.strides, strict=True))
    strides = tuple(a * b for a, b in zip(steps, x.strides, strict=True))
    return View(x.source, offset, shape, strides)


def _split(eqn: Any, x: View, out: Any) -> View:
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    before = sum(sizes[: list(eqn.outvars).index(out)])
    offset = x.offset + before * x.strides[axis]
    return View(x.source, offset, tuple(out.aval.shape), x.strides)


def _unstacked(eqn: Any, x: View, out: Any) -> View:
    axis, place = eqn.params["axis"], list(eqn.outvars).index(out)
    offset = x.offset + place * x.strides[axis]
    strides = (*x.strides[:axis], *x.strides[axis + 1 :])
    return View(x.source, offset, tuple(out.aval.shape), strides)


def _transposed(eqn: Any, x: View, out: Any) -> View:
    order = eqn.params["permutation"]
    return View(
        x.source, x.offset, tuple(out.aval.shape), tuple(x.strides[i] for i in order)
    )


def _squeezed(eqn: Any, x: View, out: Any) -> View:
    gone = eqn.params["dimensions"]
    kept = [s for i, s in enumerate(x.strides) if i not in gone]
    return View(x.source, x.offset, tuple(out.aval.shape), tuple(kept))


def _broadcast(eqn: Any, x: View, out: Any) -> View | None:
    """Only new axes of size 1 are a view that a kernel can read."""
    shape, places = tuple(out.aval.shape), eqn.params["broadcast_dimensions"]
    if math.prod(shape) != math.prod(x.shape):
        return None
    strides = [1] * len(shape)
    for place, stride in zip(places, x.strides, strict=True):
        strides[place] = stride
    return View(x.source, x.offset, shape, tuple(strides))


def _repeated(eqn: Any, x: View, out: Any) -> View:
    shape, places = tuple(out.aval.shape), eqn.params["broadcast_dimensions"]
    strides = [0] * len(shape)
    for place, stride, size in zip(places, x.strides, x.shape, strict=True):
        strides[place] = stride if size == shape[place] else 0
    return View(x.source, x.offset, shape, tuple(strides))


def _tiled(eqn: Any, x: View, out: Any) -> View | None:
    """Only an axis of size 1 is repeated without a second axis."""
    reps = eqn.params["reps"]
    if any(n != 1 and d != 1 for n, d in zip(reps, x.shape, strict=True)):
        return None
    pairs = zip(reps, x.strides, strict=True)
    strides = tuple(0 if n > 1 else s for n, s in pairs)
    return View(x.source, x.offset, tuple(out.aval.shape), strides)


def _reshaped(eqn: Any, x: View, out: Any) -> View | None:
    if eqn.params.get("dimensions") is not None:
        return None
    return reshaped(x, tuple(out.aval.shape))


def reshaped(x: View, shape: tuple[int, ...]) -> View | None:
    """Returns a view with axes split, and merged if their elements follow each other.

    Args:
        x: The view.
        shape: A shape of as many elements.

    Returns:
        None if it is no strided view.
    """
    old = [(d, s) for d, s in zip(x.shape, x.strides, strict=True) if d != 1]
    strides, size, stride = [], 1, 1
    for d in reversed(shape):
        if size == 1 and d != 1:
            if not old:
                return None
            size, stride = old.pop()
        while d > size:  # merges with the axis before
            if not old or old[-1][1] != stride * size:
                return None
            size *= old.pop()[0]
        if size % d:
            return None
        strides.append(stride)
        size, stride = size // d, stride * d
    return View(x.source, x.offset, shape, tuple(reversed(strides)))


def _same(eqn: Any, x: View, out: Any) -> View:
    del eqn, out
    return x


_RULES: dict[str, Callable[[Any, View, Any], View | None]] = {
    "slice": _sliced, "split": _split, "transpose": _transposed, "squeeze": _squeezed,
    "broadcast_in_dim": _broadcast, "reshape": _reshaped, "copy": _same, "name": _same,
    "unstack": _unstacked,
}  # fmt: skip

_REPEATING = {"broadcast_in_dim": _repeated, "tile": _tiled}
"""Those of primitives that may repeat an array, in place of the ones above."""
