"""Merges constants that hold equal arrays.

Layers often close over an array each, such as a causal mask, and all of them are equal.
As one constant they are one value: work on it is done once, and the layers repeat each
other.

Little is read. An array alone of its type and shape is not read at all. Of others some
numbers are compared first, so that weights are neither hashed nor copied from a device.
What a device holds is copied once.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from rewriter import _jax

SOME = 4
"""About this many numbers of each axis are compared first."""


class Constants:
    """The constants of a program seen so far."""

    def __init__(self) -> None:
        self._first: dict[Hashable, Any] = {}
        self._known: dict[tuple[int, int], tuple[Any, Hashable]] = {}

    def one(self, value: Any) -> Any:
        """Returns the first constant with equal content; it may be this one.

        Example:
            >>> found = Constants()
            >>> first, second, other = np.eye(3), np.eye(3), np.ones((3, 3))
            >>> found.one(first) is found.one(second) is first
            True
            >>> found.one(other) is other
            True
        """
        if not _is_readable(value):
            return value
        key: tuple[Hashable, ...] = ()
        other = value
        for level in range(len(LOOKS)):
            if level:  # the first constant moves down as deep as it was compared
                self._first.setdefault((*key, self._look(level, other)), other)
            key = (*key, self._look(level, value))
            other = self._first.setdefault(key, value)
            if other is value:
                return value
        return other

    def _look(self, level: int, value: Any) -> Hashable:
        place = id(value), level
        if place not in self._known:  # the value is kept alive, so its id stays valid
            self._known[place] = value, LOOKS[level](value)
        return self._known[place][1]


def once(program: Any) -> Any:
    """Returns a closed jaxpr with equal constants merged."""
    jaxpr = program.jaxpr
    if program.effects or len(program.consts) < 2:  # effects count inputs
        return program
    found, first = Constants(), {}
    same: dict[Any, Any] = {}
    for var, value in zip(jaxpr.constvars, program.consts, strict=True):
        kept = first.setdefault((id(found.one(value)), var.aval), var)
        if kept is not var:
            same[var] = kept
    return _jax.with_one_variable(program, same) if same else program


# ------------------------------------------------------------------------ looks
def _is_readable(value: Any) -> bool:
    """Whether a constant is an immutable array that this process can read."""
    if _jax.is_opaque(value) or not hasattr(value, "dtype"):
        return False
    if not isinstance(jax.typeof(value), jax.core.ShapedArray):  # a reference
        return False
    if isinstance(value, jax.Array):
        return value.is_fully_replicated and not value.is_deleted()
    return np.dtype(value.dtype) != object


def _type(value: Any) -> Hashable:
    at = (value.sharding, value.committed) if isinstance(value, jax.Array) else None
    return np.dtype(value.dtype), jax.typeof(value), at


def _sample(value: Any) -> Hashable:
    """A sample of its numbers."""
    steps = tuple(slice(None, None, max(1, n // SOME)) for n in value.shape)
    if not isinstance(value, jax.Array) or _is_near(value):
        return _host(value)[steps].tobytes()
    with jax.ensure_compile_time_eval():  # the program around is being traced
        return np.asarray(value.addressable_data(0)[steps]).tobytes()


def _sums(value: Any) -> Hashable:
    """A sum of each row's bytes, if the host has them.

    They tell most arrays apart in a tenth of the time that a digest takes.
    """
    if isinstance(value, jax.Array) and not _is_near(value):
        return None
    flat = np.ascontiguousarray(_host(value))
    if not flat.ndim or not flat.size:
        return None
    words = flat.view(np.uint8).reshape(flat.shape[0], -1)
    if words.shape[1] % 8 == 0:
        words = words.view(np.uint64)
    return words.sum(1, dtype=np.uint64).tobytes()


def _all(value: Any) -> Hashable:
    """A digest of all of its bytes."""
    if not isinstance(value, jax.Array):
        return _digest(value)
    known = _DIGESTS.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    digest = _digest(value)
    place = id(value)
    gone: Callable[[Any], Any] = lambda _: _DIGESTS.pop(place, None)
    _DIGESTS[place] = weakref.ref(value, gone), digest
    return digest


LOOKS: tuple[Callable[[Any], Hashable], ...] = (_type, _sample, _sums, _all)
"""Comparisons, cheapest first; each runs only where the ones before are equal."""

_DIGESTS: dict[int, tuple[weakref.ref[Any], bytes]] = {}
"""Digests of JAX's immutable arrays, so that each is copied from its device once."""


def _is_near(value: jax.Array) -> bool:
    return all(d.platform == "cpu" for d in value.devices())


def _host(value: Any) -> np.ndarray:
    """Its numbers, copied outside JAX's cache, which lives as long as the array."""
    return np.asarray(
        value.addressable_data(0) if isinstance(value, jax.Array) else value
    )


def _digest(value: Any) -> bytes:
    flat = np.ascontiguousarray(_host(value)).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8)).digest()
