"""What a look-alike is, and what collects them."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from tests.spellings.attention.pieces import QKV, SCALE, T, dots
from tests.spellings.spelling import SIZES, Draw, Input, floats


@dataclass(frozen=True)
class LookAlike:
    """A function in which `op` must not be found, and why."""

    name: str
    fn: Callable
    inputs: Mapping[str, Input]
    op: str
    reason: str
    sizes: Mapping[str, int]
    gradients: bool = True

    def args(self, dtype: object = jnp.float32) -> tuple:
        """Concrete arguments, floats in `dtype`."""
        draw = Draw(self.name, {**SIZES[self.op], **self.sizes}, False)
        arrays = [i.make(draw, draw.shape(i.dims)) for i in self.inputs.values()]
        return tuple(
            jnp.asarray(a, dtype if a.dtype == np.float32 else a.dtype) for a in arrays
        )


REFUSED: list[LookAlike] = []
CAREFUL: list[LookAlike] = []


def _add(where, op, inputs, sizes):
    def look_alike(name, reason, more=None, gradients=True, **other):
        def add(fn):
            found = {
                k: floats(i) if isinstance(i, str) else i
                for k, i in {**(inputs if not other else {}), **(more or {})}.items()
            }
            found.update(
                {k: floats(i) if isinstance(i, str) else i for k, i in other.items()}
            )
            name_ = f"{op}/{name}"
            assert all(x.name != name_ for x in where), name_
            where.append(LookAlike(name_, fn, found, op, reason, sizes, gradients))
            return fn

        return add

    return look_alike


SQUARE = dict(s=T)
WIDTHS = dict(k=8, f=12)
attention = _add(REFUSED, "attention", QKV, SQUARE)
careful = _add(CAREFUL, "attention", QKV, SQUARE)


def scores(q, k):
    return dots(q, k) * SCALE
