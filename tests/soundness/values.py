"""Values of an argument: normal ones, and those at which arithmetic ends."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.soundness.program import Argument, Program

Draw = np.random.Generator
Shape = tuple[int, ...]

EXTREMES = (1e30, -1e30, 1e-30, -1e-30, 0.0, 1.0, 1e-40)


def arguments(program: Program) -> tuple[np.ndarray, ...]:
    """The values of a program's arguments."""
    return tuple(_of(program, a) for a in program.arguments)


def _of(program: Program, argument: Argument) -> np.ndarray:
    name = f"{program.kind} {program.seed} {argument.name}"
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    dtype = jnp.dtype(argument.dtype)
    if argument.dtype == "bool":
        return _booleans(draw, argument)
    if jnp.issubdtype(dtype, jnp.integer):
        return INTEGERS[argument.values](draw, argument.shape, dtype)
    with np.errstate(over="ignore"):
        return FLOATS[argument.values](draw, argument.shape).astype(dtype)


def _booleans(draw: Draw, argument: Argument) -> np.ndarray:
    return draw.random(argument.shape) < (0.9 if argument.values == "most" else 0.5)


def _normal(draw: Draw, shape: Shape) -> np.ndarray:
    return draw.normal(size=shape)


def _times(factor: float) -> Callable[[Draw, Shape], np.ndarray]:
    return lambda draw, shape: draw.normal(size=shape) * factor


def _some(*numbers: float, share: float = 0.08) -> Callable[[Draw, Shape], np.ndarray]:
    """Normal numbers, some of which are others."""

    def make(draw: Draw, shape: Shape) -> np.ndarray:
        others = draw.choice(numbers, size=shape)
        return np.where(draw.random(shape) < share, others, draw.normal(size=shape))

    return make


def _rows(*numbers: float) -> Callable[[Draw, Shape], np.ndarray]:
    """Normal numbers, but that some rows are of one number each."""

    def make(draw: Draw, shape: Shape) -> np.ndarray:
        rows = (*shape[:-1], 1) if shape else ()
        chosen = draw.random(rows) < 0.3
        return np.where(chosen, draw.choice(numbers, size=rows), _normal(draw, shape))

    return make


def _scaled_rows(draw: Draw, shape: Shape) -> np.ndarray:
    """Rows of other magnitudes."""
    rows = (*shape[:-1], 1) if shape else ()
    return draw.normal(size=shape) * draw.choice((1.0, 1e30, 1e-30, 1e10), size=rows)


def _offset_rows(draw: Draw, shape: Shape) -> np.ndarray:
    """Rows of other means, some of small spread."""
    rows = (*shape[:-1], 1) if shape else ()
    spread = draw.choice((1.0, 1e-3), size=rows)
    return draw.normal(size=shape) * spread + draw.choice((0, 100.0), size=rows)


def _ties(draw: Draw, shape: Shape) -> np.ndarray:
    return np.round(draw.normal(size=shape) * 2)


def _rising(draw: Draw, shape: Shape) -> np.ndarray:
    return np.cumsum(draw.choice((0.0, 0.1, 1.0, 0.7), size=shape), -1)


def _identity(draw: Draw, shape: Shape) -> np.ndarray:
    """Values that tell keys apart: (batch, keys, heads, keys)."""
    eye = np.eye(shape[1], shape[3])[None, :, None]
    return np.broadcast_to(eye, shape).copy()


def _positive(draw: Draw, shape: Shape) -> np.ndarray:
    return np.abs(draw.normal(size=shape)) + 0.1


FLOATS: dict[str, Callable[[Draw, Shape], np.ndarray]] = {
    "normal": _normal,
    "positive": _positive,
    "times 60": _times(60.0),
    "times 1e-3": _times(1e-3),
    "times 1e30": _times(1e30),
    "times 1e-30": _times(1e-30),
    "denormal": _times(1e-39),
    "some 1e30 or 1e-30": _some(*EXTREMES),
    "some inf": _some(np.inf),
    "some inf or -inf": _some(np.inf, -np.inf),
    "some nan": _some(np.nan),
    "some nan or inf": _some(np.nan, np.inf, -np.inf),
    "some zeros": _some(0.0, -0.0, share=0.4),
    "constant rows": _rows(0.0, 3.0, -0.5, 1024.0),
    "zero rows": _rows(0.0),
    "constant or extreme rows": _rows(0.0, 1e30, 1e-30, 1.0),
    "nan rows": _rows(np.nan, np.inf),
    "rows of other magnitudes": _scaled_rows,
    "rows of other means": _offset_rows,
    "ties": _ties,
    "rising": _rising,
    "identity": _identity,
}


def _small(draw: Draw, shape: Shape, dtype: Any) -> np.ndarray:
    low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -20
    return draw.integers(low, 60, size=shape).astype(dtype)


def _ends(draw: Draw, shape: Shape, dtype: Any) -> np.ndarray:
    """Numbers near the ends of their dtype, and around zero."""
    ends = jnp.iinfo(dtype)
    low = draw.integers(int(ends.min), int(ends.min) + 9, size=shape)
    high = draw.integers(int(ends.max) - 9, int(ends.max) + 1, size=shape)
    middle = _small(draw, shape, dtype).astype(np.int64)
    which = draw.integers(0, 3, size=shape)
    return np.choose(which, (low, middle, high)).astype(dtype)


def _every(draw: Draw, shape: Shape, dtype: Any) -> np.ndarray:
    ends = jnp.iinfo(dtype)
    return draw.integers(int(ends.min), int(ends.max) + 1, size=shape).astype(dtype)


def _segments(draw: Draw, shape: Shape, dtype: Any) -> np.ndarray:
    return np.sort(draw.integers(0, 4, size=shape), -1).astype(dtype)


def _lengths(draw: Draw, shape: Shape, dtype: Any) -> np.ndarray:
    """Lengths of keys, often none, up to sixteen."""
    return draw.choice((0, 0, 1, 2, 7, 16), size=shape).astype(dtype)


def _group_sizes(total: int) -> Callable[[Draw, Shape, Any], np.ndarray]:
    def make(draw: Draw, shape: Shape, dtype: Any) -> np.ndarray:
        shares = draw.random(shape) * (draw.random(shape) < 0.7)
        sizes = np.floor(total * shares / max(float(shares.sum()), 1e-9))
        return sizes.astype(dtype)

    return make


def _classes(count: int) -> Callable[[Draw, Shape, Any], np.ndarray]:
    """Classes, a few of which are none."""

    def make(draw: Draw, shape: Shape, dtype: Any) -> np.ndarray:
        own = draw.integers(0, count, size=shape)
        none = draw.choice((-1, -100, count, count + 3, 1 - count), size=shape)
        return np.where(draw.random(shape) < 0.1, none, own).astype(dtype)

    return make


INTEGERS: dict[str, Callable[[Draw, Shape, Any], np.ndarray]] = {
    "small": _small,
    "near ends": _ends,
    "all numbers": _every,
    "segments": _segments,
    "lengths": _lengths,
    **{f"classes of {n}": _classes(n) for n in (5, 16, 33, 64)},
    **{f"group sizes of about {n}": _group_sizes(n) for n in (16, 24, 32, 48)},
}
