"""Finds the argument entries that only one side of a differing site reads.

Of attention's values these are pairs of a query and a key that one mask keeps and the
other does not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.rewrite.replacements import Pair
from rewriter.support.dtypes import is_float

log = logging.getLogger("rewriter.reached")

SHOWN = 3
"""The most entries to name."""


def inputs_of_one_side(
    pair: Pair, entry: int | None, inputs: Sequence[Any], names: Sequence[str]
) -> str:
    """Returns in words the argument rows that one entry reads on one side only.

    Args:
        pair: The site.
        entry: A position in its flattened result, or None.
        inputs: The program's arguments.
        names: The names of the arguments.
    """
    if entry is None:
        return ""
    try:
        return _reached(pair, entry, inputs, names)
    except Exception as error:  # some equation cannot be differentiated
        log.debug("what it reads is not known", exc_info=error)
        return ""


def _reached(
    pair: Pair, entry: int, inputs: Sequence[Any], names: Sequence[str]
) -> str:
    moving = [k for k, x in enumerate(inputs) if is_float(x)]
    sides = []
    for side in (pair.written, pair.replaced):
        found, at = jax.jit(_gradient(side, entry, moving))(list(inputs))
        sides.append([_rows(g) for g in found])
    place = [int(n) for n in np.unravel_index(entry, at.shape)]
    for k, old, new in zip(moving, *sides, strict=True):
        if (old != new).any() and (old.any() or new.any()):
            name = names[k] if k < len(names) else f"argument {k}"
            texts = [_text(name, old & ~new, "no longer")]
            texts.append(_text(name, new & ~old, "now"))
            return f"; entry {place} {' and '.join(filter(None, texts))}"
    return ""


def _gradient(side: Any, entry: int, moving: Sequence[int]) -> Any:
    def run(inputs: list[Any]) -> Any:
        def of(chosen: list[Any]) -> Any:
            full = list(inputs)
            for k, x in zip(moving, chosen, strict=True):
                full[k] = x
            out = side(full)
            return out.reshape(-1)[entry].astype(jnp.float32), out

        chosen = [jnp.asarray(inputs[k]) for k in moving]
        grads, out = jax.grad(of, has_aux=True)(chosen)
        return grads, out

    return run


def _text(name: str, rows: np.ndarray, how: str) -> str:
    places = [list(map(int, p)) for p in np.argwhere(rows)]
    if not places:
        return ""
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    shown = ", ".join(f"{name}{p}" for p in places[:SHOWN])
    return f"reads {how} {shown}{more}"


def _rows(x: Any) -> np.ndarray:
    """Indices of the rows along the last axis that are not zero."""
    return np.asarray(x.astype(jnp.float32) != 0).any(axis=-1) if x.ndim else x != 0
