"""Inputs for the user's own equations that give the op these operands.

Floats come from the transpose of the region's layout, other values by trying the
operands themselves. The operands computed from these inputs must be like those of the
measurement. Otherwise the region is not run, since its inputs are not known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.measure.original_region import NotTaken, Written
from rewriter.support.dtypes import is_inexact

ALIKE = 64.0
"""The largest ratio in size between operands made from leaves and the measured ones."""

Arrays = Mapping[str, Any]


def leaves_like(written: Written, out: Any) -> Callable[[Arrays], dict[str, Any]]:
    """Returns a function from operands to leaves that give similar operands.

    The function raises `NotTaken`, with the offending leaf or operand, if there are no
    such leaves.

    Args:
        written: The region.
        out: Shape and dtype of the op's result.
    """
    run = jax.jit(functools.partial(_operands, written, out))
    of_floats = jax.jit(functools.partial(_of_floats, written, out))

    def leaves(operands: Arrays) -> dict[str, Any]:
        arrays = {n: jnp.zeros(s.shape, s.dtype) for n, s in written.leaves}
        for name, struct in written.leaves:
            if not is_inexact(struct):
                arrays[name] = _of_whole(run, arrays, name, struct, operands)
        arrays |= of_floats(arrays, operands)
        found = run(arrays)
        for name, problem in _unlike(found, {n: operands[n] for n in found}).items():
            if problem:
                raise NotTaken(f"would be run on an unusual {name}: {problem}")
        return arrays

    return leaves


def _operands(written: Written, out: Any, leaves: Arrays) -> dict[str, Any]:
    """The op's operands for some leaves."""
    seen: dict[str, Any] = {}

    def call(**given: Any) -> Any:
        seen.update(given)
        return jnp.zeros(out.shape, out.dtype)

    written.replaced(call)(leaves)
    return {n: x for n, x in seen.items() if isinstance(x, jax.Array)}


def _of_whole(
    run: Callable[..., Arrays],
    leaves: Arrays,
    name: str,
    struct: jax.ShapeDtypeStruct,
    operands: Arrays,
) -> Any:
    """An integer or boolean leaf that gives one of the operands exactly."""
    for other, sample in operands.items():
        if sample.size != struct.size or is_inexact(sample):
            continue
        tries = [sample.reshape(struct.shape).astype(struct.dtype)]
        if struct.dtype == bool:
            tries.append(~tries[0])
        for value in tries:
            array = run({**leaves, name: value}).get(other)
            if (
                array is not None
                and not _unlike({other: array}, {other: sample})[other]
            ):
                return value
    what = f"{struct.dtype}[{','.join(map(str, struct.shape))}]"
    raise NotTaken(f"read {what}, and nothing says what that looks like")


def _of_floats(
    written: Written, out: Any, leaves: Arrays, operands: Arrays
) -> dict[str, Any]:
    """Leaves by the transpose of the layout; normal where no operand reads them."""
    floats = [(n, s) for n, s in written.leaves if is_inexact(s)]
    keys = jax.random.split(jax.random.key(0), max(1, len(floats)))
    normal = {
        n: jax.random.normal(k, s.shape).astype(s.dtype)
        for k, (n, s) in zip(keys, floats, strict=False)
    }

    def layout(some: Arrays) -> dict[str, Any]:
        found = _operands(written, out, {**leaves, **some})
        return {n: x for n, x in found.items() if is_inexact(x)}

    laid_out, back = jax.vjp(layout, normal)
    (sums,) = back({n: operands[n].astype(x.dtype) for n, x in laid_out.items()})
    ones = {n: jnp.ones_like(x) for n, x in normal.items()}
    (weights,) = back(jax.jvp(layout, (normal,), (ones,))[1])
    read = {n: w != 0 for n, w in weights.items()}
    return {
        n: jnp.where(read[n], sums[n] / jnp.where(read[n], weights[n], 1), x)
        for n, x in normal.items()
    }


def _unlike(arrays: Arrays, samples: Arrays) -> dict[str, str]:
    """The difference of each operand, or ``""``."""
    if any(arrays[n].shape != samples[n].shape for n in arrays):
        return dict.fromkeys(arrays, "another shape")
    facts = jax.device_get(_facts(dict(arrays), dict(samples)))
    return {n: _in_words(is_inexact(samples[n]), *facts[n]) for n in arrays}


@jax.jit
def _facts(operands: dict[str, Any], samples: dict[str, Any]) -> dict[str, Any]:
    """By operand: whether both are equal, and their sizes."""
    size = lambda x: jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
    return {
        n: (jnp.all(x == samples[n]), size(x), size(samples[n]))
        for n, x in operands.items()
    }


def _in_words(floats: bool, same: bool, size: float, usual: float) -> str:
    if not floats:
        return "" if same else "other values"
    if not size or not np.isfinite(size):
        return f"its size is {size:g}"
    ratio = size / (usual or 1.0)
    if not 1 / ALIKE <= ratio <= ALIKE:
        return f"{ratio:.1e} times as large as usual"
    return ""
