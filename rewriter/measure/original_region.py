"""Extracts a match's region as a program of its own: what the user wrote.

XLA's candidate for a site is what the user wrote, since spellings of one op differ in
time. The region's equations are copied unchanged, with calls of `jax.custom_jvp` whole.
Where the program computes the gradients of all leaves itself, those equations are
copied too. Otherwise the gradients are `jax.vjp` of the region.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.find.match import Match
from rewriter.find.reading import leaves_of
from rewriter.gradients.backward import Backward
from rewriter.program.graph import Graph
from rewriter.program.subprogram import NotTaken, Region
from rewriter.support.dtypes import is_inexact

WORDS = frozenset({
    "axes", "axis", "dimension", "dimensions", "dimension_numbers", "permutation",
    "broadcast_dimensions", "reverse", "index_dtype", "is_stable", "num_keys",
})  # fmt: skip
"""Parameters of equations whose numbers distinguish spellings; others are sizes."""


@dataclass(frozen=True)
class Written:
    """A region of the user's program, to run as written.

    Two are equal if they are spelled alike.

    Attributes:
        spelling: A digest of its equations without sizes and numbers.
        leaves: Shapes and dtypes of its inputs by name.
        forward: A function of leaves by name to the result.
        both: A function of leaves by name and a cotangent to the result and the
            gradients by name, if the program itself computes all of them.
        replaced: ``replaced(call)`` gives a function of leaves by name that computes
            the same by ``call(**operands, **params)``.
        result: The result's shape and dtype.
    """

    spelling: str
    leaves: tuple[tuple[str, jax.ShapeDtypeStruct], ...] = field(compare=False)
    forward: Callable[..., Any] = field(compare=False, repr=False)
    both: Callable[..., Any] | None = field(compare=False, repr=False)
    replaced: Callable[..., Any] = field(compare=False, repr=False)
    result: jax.ShapeDtypeStruct = field(compare=False)


def as_written(graph: Graph, match: Match, backward: Backward | None) -> Written:
    """Returns a match's region.

    Args:
        graph: The program.
        match: The match.
        backward: Its gradients in the program, if there are any.

    Raises:
        NotTaken: If it cannot be extracted.
    """
    names = leaves_of(match.reading)
    here = dict(match.leaves)
    values = [here[v] for v in names]
    labels = [str(k) for k in range(len(values))]
    structs = [_struct(graph, v) for v in values]
    result = _struct(graph, match.value)
    region = Region(graph, values, [match.value])
    own = _gradients(graph, match, backward, values)
    try:
        forward, both = region.function(), own and own.function()
        got = [jax.eval_shape(forward, *structs)[0]]
        got += jax.eval_shape(both, *structs, result)[1:] if both else []
    except Exception as problem:  # equations that depend on the bodies around them
        raise NotTaken(f"cannot be run on their own: {problem}") from problem
    moving = [k for k, s in enumerate(structs) if is_inexact(s)]
    if got != [result, *(structs[k] for k in moving if both)]:
        raise NotTaken("give other types on their own")
    reading = match.reading

    def replaced(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(leaves: Mapping[str, Any]) -> Any:
            arrays = dict(zip(names, (leaves[n] for n in labels), strict=True))
            return reading.build(call, arrays, result.shape, result.dtype)

        return run

    def with_gradients(leaves: Mapping[str, Any], cotangent: Any) -> Any:
        assert both is not None
        out, *cotangents = both(*(leaves[n] for n in labels), cotangent)
        return out, dict(zip((labels[k] for k in moving), cotangents, strict=True))

    return Written(
        _digest(own or region),
        tuple(zip(labels, structs, strict=True)),
        lambda leaves: forward(*(leaves[n] for n in labels))[0],
        with_gradients if both else None,
        replaced,
        result,
    )


def spelling_of(graph: Graph, match: Match, backward: Backward | None) -> str:
    """Returns the digest of a match's region; ``""`` if it cannot be extracted."""
    here = dict(match.leaves)
    values = [here[v] for v in leaves_of(match.reading)]
    try:
        own = _gradients(graph, match, backward, values)
        return _digest(own or Region(graph, values, [match.value]))
    except NotTaken:
        return ""


def _gradients(
    graph: Graph, match: Match, backward: Backward | None, values: Sequence[int]
) -> Region | None:
    """The program's own equations for the gradients of all floating leaves."""
    moving = [v for v in values if jnp.issubdtype(graph.dtype(v), jnp.inexact)]
    if backward is None or set(moving) != set(backward.grads):
        return None
    if backward.others:  # no value of the program is the whole gradient
        return None
    if graph.dtype(backward.cotangent) != graph.dtype(match.value):
        return None
    grads = [backward.grads[v] for v in moving]
    if any(_struct(graph, g) != _struct(graph, v) for v, g in backward.grads.items()):
        return None
    return Region(graph, [*values, backward.cotangent], [match.value, *grads])


def _struct(graph: Graph, value: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(graph.shape(value), graph.dtype(value))


# ------------------------------------------------------------------- spellings
def _digest(region: Region) -> str:
    """A digest of the spelling: equations, not sizes or numbers."""
    numbers: dict[int, int] = {v: -1 - k for k, v in enumerate(region.inputs)}
    words = []
    for eqn, ins, outs in region.steps:
        read = [numbers.get(i, "c") for i in ins]
        for o in outs:
            if o is not None:
                numbers.setdefault(o, len(numbers))
        words.append((_equation(eqn), read))
    text = repr((words, [numbers.get(o, "c") for o in region.outputs]))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _equation(eqn: Any) -> tuple[Any, ...]:
    types = [(str(v.aval.dtype), v.aval.ndim) for v in eqn.outvars]
    return eqn.primitive.name, types, _words(eqn.params)


def _words(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(k, _word(v, k in WORDS)) for k, v in sorted(params.items())]


def _word(value: Any, numbers: bool) -> Any:
    """A parameter as text, without sizes and process-dependent parts."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value if numbers else "n"
    if isinstance(value, (tuple, list)):
        return [_word(v, numbers) for v in value] if numbers or value else []
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.dtype) or hasattr(value, "itemsize"):
        return str(value)
    body = getattr(value, "jaxpr", value)
    if hasattr(body, "eqns"):
        return [_equation(e) for e in body.eqns]
    text = str(value)
    named = numbers and "0x" not in text
    return text if named else type(value).__name__
