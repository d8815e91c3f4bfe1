"""Makes arguments that show where two programs differ.

Each probe changes one argument, or all floats, and keeps shapes and dtypes. Probes hold
equal values, zeros, huge, tiny, infinite and NaN values, masks that are all true or all
false, and the ends of integer types. Equal arguments give equal probes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.support.dtypes import is_float

MOST = 24
"""Probes of one program."""

SCALED = ("x60", "x1e4", "x1e-20", "far from 0")
INFINITE = ("one infinity", "one NaN")
ALL_FLOATS = ("rows of zeros", "constant rows", "x60")
"""Changes that are applied to all floats together."""

Change = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Probe:
    """Arguments of a program.

    Attributes:
        name: The change, such as ``"t: inf at the end"``.
        changed: The new arguments by position.
        scaled: Whether they are of unusual size.
        infinite: Whether a number is infinite or NaN that no comparison reads.
    """

    name: str
    changed: Mapping[int, Any]
    scaled: bool = False
    infinite: bool = False

    def of(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the arguments with the changes made, placed as they were."""
        return [
            _like(self.changed[k], x) if k in self.changed else x
            for k, x in enumerate(leaves)
        ]


def probes(
    leaves: Sequence[Any], deciding: Sequence[bool], names: Sequence[str] = ()
) -> list[Probe]:
    """Returns the probes of some arguments, at most `MOST`, the likeliest first.

    Args:
        leaves: Arrays; random keys stay as they are.
        deciding: For each, whether comparisons read it.
        names: Their names; numbers by default.

    Example:
        >>> [p.name for p in probes([np.ones(2, bool)], [True], ["mask"])][:2]
        ['mask: all false', 'mask: all true']
    """
    called = [names[k] if k < len(names) else str(k) for k in range(len(leaves))]
    hosts = {k: _host(x) for k, x in enumerate(leaves) if _can_change(x)}
    floats = [k for k, x in hosts.items() if is_float(x) and not deciding[k]]
    turns = [
        [
            Probe(
                f"{called[k]}: {name}",
                {k: change(hosts[k])},
                name in SCALED,
                name in INFINITE,
            )
            for name, change in _changes(hosts[k], deciding[k])
        ]
        for k in sorted(hosts, key=lambda k: _rank(hosts[k], deciding[k]))[:MOST]
    ]
    together = [
        Probe(
            f"all floats: {name}",
            {k: FLOATS[name](hosts[k]) for k in floats},
            name in SCALED,
        )
        for name in ALL_FLOATS
        if len(floats) > 1
    ]
    return list(itertools.islice([*together, *_in_turns(turns)], MOST))


def _in_turns(queues: Sequence[Sequence[Probe]]) -> Iterator[Probe]:
    for some in itertools.zip_longest(*queues):
        yield from (p for p in some if p is not None)


def _rank(x: np.ndarray, decides: bool) -> tuple[bool, bool, int]:
    """The sort key: masks and positions first, then the largest arrays."""
    return is_float(x) and not decides, is_float(x), -x.size


def _changes(x: np.ndarray, decides: bool) -> list[tuple[str, Change]]:
    if x.dtype == bool:
        return list(BOOLS.items())
    if not is_float(x):
        return list(INTEGERS.items())
    return [(name, FLOATS[name]) for name in (DECIDING if decides else OTHERS)]


# ------------------------------------------------------------------- changes
def _filled(value: Any) -> Change:
    return lambda x: np.full_like(x, value)


def _some_rows(values_of: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Every third row of the last axis; a single row whole."""

    def change(x: np.ndarray) -> np.ndarray:
        rows = x.reshape(-1, x.shape[-1] if x.ndim else 1).copy()
        rows[::3] = values_of(rows[::3])
        return rows.reshape(x.shape)

    return change


def _every_fifth(values: Callable[[np.ndarray], Sequence[Any]]) -> Change:
    """Every fifth entry, and the last one, one of some values."""

    def change(x: np.ndarray) -> np.ndarray:
        flat, new = x.reshape(-1).copy(), values(x)
        places = np.unique([*range(0, flat.size, 5), flat.size - 1])
        flat[places] = np.resize(np.asarray(new, x.dtype), places.size)
        return flat.reshape(x.shape)

    return change


def _last(value: float) -> Change:
    """The last entry."""

    def change(x: np.ndarray) -> np.ndarray:
        flat = x.reshape(-1).copy()
        flat[-1] = value
        return flat.reshape(x.shape)

    return change


def _from(start: float, stop: float, value: Any) -> Change:
    """A part of the last axis."""

    def change(x: np.ndarray) -> np.ndarray:
        flat = x.reshape(-1, x.shape[-1] if x.ndim else 1).copy()
        size = flat.shape[1]
        flat[:, int(start * size) : max(1, int(stop * size))] = value
        return flat.reshape(x.shape)

    return change


def _times(factor: float) -> Change:
    def change(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore"):
            return (x.astype(np.float64) * factor).astype(x.dtype)

    return change


def _far(x: np.ndarray) -> np.ndarray:
    """All numbers moved by a thousand times the largest."""
    size = np.abs(x.astype(np.float64)).max(initial=0, where=np.isfinite(x))
    return (x.astype(np.float64) + 1e3 * size).astype(x.dtype)


def _one_hot(x: np.ndarray) -> np.ndarray:
    """Rows of the identity along the largest of the axes before the last."""
    if x.ndim < 2:
        return np.eye(1, x.size).reshape(x.shape).astype(x.dtype)
    axis = int(np.argmax(x.shape[:-1]))
    place = np.arange(x.shape[axis]).reshape([-1] + [1] * (x.ndim - 1 - axis))
    hot = place % x.shape[-1] == np.arange(x.shape[-1])
    return np.broadcast_to(hot, x.shape).astype(x.dtype)


def _counted(x: np.ndarray) -> np.ndarray:
    last = x.shape[-1] if x.ndim else 1
    count = np.arange(last) % 120  # fits in 8 bits
    return np.broadcast_to(count, x.shape or (1,)).reshape(x.shape).astype(x.dtype)


def _ends(x: np.ndarray) -> Sequence[Any]:
    kind = jnp.iinfo(x.dtype)
    below = kind.max if kind.min == 0 else -1  # what 0 - 1 gives
    return [kind.min, kind.max, 0, below, 1]


FLOATS: dict[str, Change] = {
    "rows of zeros": _some_rows(np.zeros_like),
    "constant rows": _some_rows(lambda rows: np.repeat(rows[:, :1], rows.shape[1], 1)),
    "one-hot": _one_hot,
    "x60": _times(60.0),
    "x1e4": _times(1e4),
    "x1e-20": _times(1e-20),
    "far from 0": _far,
    "inf at the end": _from(0.75, 1, np.inf),
    "-inf at the start": _from(0, 0.25, -np.inf),
    "some not a number": _every_fifth(lambda x: [np.nan]),
    "one infinity": _last(np.inf),
    "one NaN": _last(np.nan),
    "all equal": _filled(1),
    "counted": _counted,
}
OTHERS = (
    "one-hot", "rows of zeros", "constant rows", "x60", "one infinity", "far from 0",
    "x1e4", "x1e-20", "one NaN",
)  # fmt: skip
DECIDING = (
    "inf at the end", "-inf at the start", "some not a number", "all equal", "x60",
    "counted", "rows of zeros", "x1e4", "constant rows", "x1e-20", "one-hot",
)  # fmt: skip
INTEGERS: dict[str, Change] = {
    "ends of its type": _every_fifth(_ends),
    "all 0": _filled(0),
    "counted": _counted,
    "all 1": _filled(1),
    "all least": lambda x: np.full_like(x, jnp.iinfo(x.dtype).min),
    "all largest": lambda x: np.full_like(x, jnp.iinfo(x.dtype).max),
    "all -1": lambda x: np.full_like(x, _ends(x)[3]),
}
BOOLS: dict[str, Change] = {
    "all false": _filled(False),
    "all true": _filled(True),
    "some rows false": _some_rows(np.zeros_like),
    "inverted": lambda x: ~x,
}


# -------------------------------------------------------------------- arrays
def drawn(avals: Sequence[Any]) -> list[Any] | None:
    """Returns plausible arguments of some types, or None for unsupported types.

    Floats are normally distributed, integers count along the last axis, most booleans
    are true.
    """
    random, arrays = np.random.default_rng(0), []
    for aval in avals:
        if not all(isinstance(n, int) for n in getattr(aval, "shape", (None,))):
            return None
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            key = jax.random.key(0)
            if key.dtype != aval.dtype:
                return None
            arrays.append(jnp.broadcast_to(key, aval.shape))
        else:
            arrays.append(jnp.asarray(_drawn(random, aval.shape, np.dtype(aval.dtype))))
    return arrays


def with_numbers(leaves: Sequence[Any], seed: int = 0) -> list[Any]:
    """Returns arguments with an array in place of each `jax.ShapeDtypeStruct`.

    Floats are normally distributed, and smaller where they may be summed over long
    axes. Integers count along the last axis. They stay below the size of every axis of
    the floats, as they may be indices. Most booleans are true.

    Example:
        >>> shape = jax.ShapeDtypeStruct((2, 3), "int32")
        >>> with_numbers([shape, 1.0])[0].tolist()
        [[0, 1, 2], [0, 1, 2]]
    """
    random, arrays = np.random.default_rng(seed), []
    shaped = [x for x in leaves if hasattr(x, "dtype")]
    sizes = [n for x in shaped if is_float(x) for n in x.shape[-2:] if n > 1]
    for x in leaves:
        if not isinstance(x, jax.ShapeDtypeStruct):
            arrays.append(x)
        elif jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            arrays.append(jnp.broadcast_to(jax.random.key(seed), x.shape))
        else:
            made = _drawn(random, x.shape, np.dtype(x.dtype))
            if is_float(x):
                around = np.mean(x.shape[-2:]) if len(x.shape) > 1 else 1
                made = (made * min(1.0, 2 * around**-0.5)).astype(x.dtype)
            elif made.dtype != bool:
                made %= min(sizes, default=120)
            arrays.append(jax.device_put(made, x.sharding))
    return arrays


def draws(leaves: Sequence[Any], deciding: Sequence[bool], count: int) -> list[Probe]:
    """Returns arguments with the same numbers in other places.

    Arrays that comparisons read stay, and those with infinities, as masks may have.
    """
    moving = {
        k: _host(x)
        for k, x in enumerate(leaves)
        if _can_change(x) and is_float(x) and np.ndim(x) and not deciding[k]
    }
    fine = {k: x for k, x in moving.items() if np.isfinite(x.astype("f8")).all()}
    return [
        Probe(
            f"draw {n}",
            {
                k: np.random.default_rng((n, k)).permutation(x.ravel()).reshape(x.shape)
                for k, x in fine.items()
            },
        )
        for n in range(1, count + 1)
        if fine
    ]


def _drawn(random: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "b":
        return random.random(shape) < 0.8
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(random.standard_normal(shape)).astype(dtype)
    return _counted(np.zeros(shape, dtype))


def perturbed(x: Any, decides: bool, coarse: str, seed: int) -> Any:
    """Returns an array with every float moved by a rounding or two.

    Arrays that comparisons read move by their own type's roundings, equal values alike.
    They do not move if they hold only whole numbers.

    Args:
        x: The array.
        decides: Whether comparisons read it.
        coarse: The coarsest dtype that the program computes in.
        seed: The seed of the random signs.
    """
    host = _host(x) if _can_change(x) else None
    if host is None or not is_float(host) or not host.size:
        return x
    wide = host.astype(np.float64)
    fine = np.isfinite(wide)
    if decides and np.all(wide[fine] == np.round(wide[fine])):
        return x
    own = float(jnp.finfo(host.dtype).eps)
    size = own if decides or not coarse else max(own, float(jnp.finfo(coarse).eps))
    if decides:  # a bit of a product of its bits: equal values have equal signs
        bits = np.ascontiguousarray(wide).view(np.uint64).reshape(wide.shape)
        mixed = (bits ^ (bits >> np.uint64(29))) * np.uint64(2 * seed + 0x9E3779B97F4A7)
        signs = 1.0 - 2.0 * ((mixed >> np.uint64(47)) & np.uint64(1))
    else:
        signs = 1.0 - 2.0 * np.random.default_rng(seed).integers(0, 2, wide.shape)
    with np.errstate(all="ignore"):
        moved = np.where(fine, wide * (1 + signs * size), wide)
    return _like(moved.astype(host.dtype), x)


def _can_change(x: Any) -> bool:
    kinds = jnp.bool_, jnp.integer, jnp.floating
    dtype = jnp.result_type(x)
    return np.size(x) > 0 and any(jnp.issubdtype(dtype, k) for k in kinds)


def _host(x: Any) -> np.ndarray:
    return np.asarray(x).astype(jnp.result_type(x), copy=False)


def _like(array: np.ndarray, x: Any) -> Any:
    if isinstance(x, (bool, int, float)):
        return type(x)(array.item())
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        return jax.device_put(array, x.sharding)
    return jnp.asarray(array)
