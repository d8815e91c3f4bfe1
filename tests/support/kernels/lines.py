"""Evaluates programs of scalars for whole arrays, by JAX's own primitives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.shared.elementwise import Number, Program


def evaluated(program: Program, given: Sequence[Any]) -> list[Any]:
    """Returns what a program gives for each number of some arrays."""
    known = [jnp.asarray(x) for x in given]

    def read(place: int | Number) -> Any:
        if isinstance(place, Number):
            return jnp.asarray(place.value, place.dtype)
        return known[place]

    for at, line in enumerate(program.lines):
        made = None
        if at in program.needed:
            ins = jnp.broadcast_arrays(*map(read, line.ins))
            made = (OPS.get(line.name) or _named(line.name))(*ins, **_kept(line))
            assert made.dtype == line.out, (line.name, made.dtype, line.out)
        known.append(made)
    return [read(x) for x in program.outs]


def _kept(line: Any) -> dict[str, Any]:
    names = {
        "integer_pow": ("y",), "convert_element_type": ("new_dtype",),
        "round": ("rounding_method",),
        "reduce_precision": ("exponent_bits", "mantissa_bits"),
    }  # fmt: skip
    return {n: line.params[n] for n in names.get(line.name, ())}


def _named(name: str) -> Callable[..., Any]:
    return getattr(lax, name, None) or getattr(jax.numpy, name)


OPS: Mapping[str, Callable[..., Any]] = {
    "add_any": lax.add, "one_minus_square": lambda x: 1 - x * x,
    "and": lax.bitwise_and, "or": lax.bitwise_or, "not": lax.bitwise_not,
    "xor": lax.bitwise_xor, "pow": lax.pow,
    "convert_element_type": lambda x, new_dtype: lax.convert_element_type(x, new_dtype),
}  # fmt: skip
