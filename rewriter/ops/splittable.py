"""Finds the axis letters along which a function may be split.

It tries the function on random numbers. A letter passes if the function of parts of the
operands along it gives that part of the result, for every part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rewriter.ops.op import OUT, Sharding

log = logging.getLogger("rewriter.splittable")
TOLERANCE = 1e-4
LEAD = (2, 3)
"""Trial sizes of the leading axes that ``...`` stands for."""


def sharding_of(
    function: Callable[..., Any], dims: Mapping[str, str], params: Mapping[str, Any]
) -> Sharding:
    """Returns how a function may be split over devices.

    Args:
        function: ``function(*, <operands>, **params)``.
        dims: As `rewriter.ops.op.Op.dims`.
        params: Its parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> dims = {"x": "... t d", "w": "d", "out": "... t d"}
        >>> found = sharding_of(lambda x, w: w * jnp.cumsum(x, -2), dims, {})
        >>> sorted(found.along)
        ['...', 'd']
    """
    letters = [x.split("|")[0] for x in dims[OUT].split()]
    names = sorted({x.split("|")[0] for text in dims.values() for x in text.split()})
    sizes = {x: 2 * k + 4 for k, x in enumerate(names)}
    kept = frozenset(x for x in letters if _splits(x, function, dims, params, sizes))
    return Sharding(kept)


def _splits(
    letter: str,
    function: Callable[..., Any],
    dims: Mapping[str, str],
    params: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> bool:
    if sum(text.split().count(letter) > 1 for text in dims.values()):
        return False
    rng = np.random.default_rng(0)
    operands = {
        name: rng.standard_normal(_shape(text, sizes)).astype(np.float32)
        for name, text in dims.items()
        if name != OUT
    }
    try:
        with jax.ensure_compile_time_eval():
            return all(
                _agrees(function, operands, params, axes)
                for axes in _axes(letter, dims)
            )
    except Exception as problem:  # it does not accept such parts
        log.debug("not along %s: %s", letter, problem)
        return False


def _agrees(
    function: Callable[..., Any],
    operands: Mapping[str, Any],
    params: Mapping[str, Any],
    axes: Mapping[str, int],
) -> bool:
    whole = np.asarray(function(**operands, **params))
    count = 3 if whole.shape[axes[OUT]] == LEAD[1] else 2
    for k in range(count):
        parts = {
            name: np.split(x, count, axes[name])[k] if name in axes else x
            for name, x in operands.items()
        }
        want = np.split(whole, count, axes[OUT])[k]
        got = np.asarray(function(**parts, **params))
        if not np.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE):
            return False
    return True


def _axes(letter: str, dims: Mapping[str, str]) -> list[dict[str, int]]:
    """The axes with a letter in each array; for ``...``, one entry per leading axis."""
    if letter == "...":
        with_lead = [n for n, text in dims.items() if text.split()[:1] == ["..."]]
        return [dict.fromkeys(with_lead, axis) for axis in range(len(LEAD))]
    found = {}
    for name, text in dims.items():
        letters = [x.split("|")[0] for x in text.split()]
        if letter in letters:
            found[name] = letters.index(letter) - len(letters)
    return [found]


def _shape(text: str, sizes: Mapping[str, int]) -> Sequence[int]:
    shape: list[int] = []
    for letter in text.split():
        shape += LEAD if letter == "..." else [sizes[letter.split("|")[0]]]
    return tuple(shape)
