"""Builds an op from a user's function and the names of its axes, or says why not."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from rewriter import _jax
from rewriter.errors import PatternError
from rewriter.ops.op import OUT, Op

FAMILIES = (
    {"sin", "cos"}, {"erf", "erfc"}, {"exp", "exp2", "logistic", "tanh"},
    {"log", "log1p"}, {"rsqrt", "sqrt", "pow"}, {"concatenate", "stack", "pad"},
    {"reduce_max"},
    {"dot_general"}, {"abs"}, {"select_n", "max", "min", "clamp"}, {"reduce_sum"},
    {"div"}, {"mul"}, {"add", "sub"},
)  # fmt: skip
"""Primitives that may replace each other, rarest first: a search begins there."""


def parsed(
    fn: Any, label: str, dims: str, where: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """A function's operand names, and axis letters by name, including ``"out"``.

    Raises:
        PatternError: If the letters are not those of the function's arguments.
    """
    arguments = [
        p.name
        for p in inspect.signature(fn).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if "->" not in dims:
        raise PatternError(
            f"{label}: dims={dims!r}",
            wanted='operands and result, "x: ... d -> ... d"',
            where=where,
        )
    left, right = dims.split("->")
    parts = [p.strip() for p in left.split(",")]
    named: dict[str, str] = {}
    for k, part in enumerate(parts):
        has_name = ":" in part
        key, text = (
            part.split(":")
            if has_name
            else (arguments[k] if k < len(arguments) else f"operand {k}", part)
        )
        named[key.strip()] = " ".join(text.split())
    for key in named:
        if key not in arguments:
            raise PatternError(
                f"{label}: dims name {key!r}, function has no argument {key}",
                wanted=f"the arguments {', '.join(arguments)}",
                where=where,
            )
    missing = [a for a in arguments if a not in named]
    if missing:
        raise PatternError(
            f"{label}: argument {missing[0]} has no axes in dims",
            wanted=f'"{missing[0]}: ..." in dims',
            where=where,
        )
    return tuple(arguments), {**named, OUT: " ".join(right.split())}


def checked(op: Op, fn: Any, holes: Iterable[str], where: str) -> frozenset[str]:
    """Traces the function at small sizes; returns the primitives where a search begins.

    Args:
        op: The op whose reference it becomes.
        fn: The function.
        holes: Names of its parameters.
        where: Its line.

    Raises:
        PatternError: If it does not accept such operands, or returns another shape.
    """
    sizes: dict[str, Any] = {"...": (2, 3)}
    primes = iter((6, 10, 14, 22, 26, 34, 38, 46, 58, 62))
    for text in op.dims.values():
        for letter in letters(text):
            if letter not in sizes:
                sizes[letter] = next(primes)
    shapes = {n: _shape(op.dims[n], sizes) for n in op.dims}
    structs = [jax.ShapeDtypeStruct(shapes[n], np.float32) for n in op.names]
    numbers = {k: 0.5 + 0.25 * i for i, k in enumerate(holes)}
    try:
        traced = jax.make_jaxpr(lambda *a: fn(*a, **numbers))(*structs)
    except Exception as error:
        raise PatternError(
            f"{op.name}: the function does not take operands of these axes: {error}",
            wanted=", ".join(f"{n}: {op.dims[n]}" for n in op.names),
            where=where,
        ) from error
    if len(traced.out_avals) != 1 or traced.out_avals[0].shape != shapes[OUT]:
        got = [a.shape for a in traced.out_avals]
        raise PatternError(
            f"{op.name}: the function gives {got}",
            where=where,
            wanted=f"one array {op.dims[OUT]!r}, here {shapes[OUT]}",
        )
    if traced.effects:
        raise PatternError(
            f"{op.name}: the function has effects {sorted(map(str, traced.effects))}",
            wanted="a pure function",
            where=where,
        )
    present = Counter(_primitives(traced))
    for family in FAMILIES:
        if any(p in present for p in family):
            return frozenset(family)
    raise PatternError(
        f"{op.name}: the function computes nothing",
        wanted="arithmetic to look for",
        where=where,
    )


def _primitives(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        body = _jax.call_body(eqn)
        if body is not None:
            yield from _primitives(body)
        else:
            yield eqn.primitive.name


def letters(text: str) -> list[str]:
    """The axes' letters, without ``...``."""
    return [x for x in text.split() if x != "..."]


def _shape(text: str, sizes: Mapping[str, Any]) -> tuple[int, ...]:
    out: list[int] = []
    for x in text.split():
        out.extend(sizes[x] if x == "..." else (sizes[x],))
    return tuple(out)


def bound_sizes(
    text: str, shape: tuple[int, ...], sizes: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """The sizes of letters that a shape fixes; nothing if they disagree."""
    words = text.split()
    names = letters(text)
    lead = len(shape) - len(names)
    if lead < 0 or (lead and "..." not in words):
        return
    out = dict(sizes or {})
    named: list[tuple[str, Any]] = list(zip(names, shape[lead:], strict=True))
    if "..." in words:
        named.append(("...", tuple(shape[:lead])))
    for letter, n in named:  # a letter may occur twice
        if out.setdefault(letter, n) != n:
            return
    yield out
