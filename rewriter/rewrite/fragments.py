"""Traces the code of replacements: a forward, and gradients from its residuals.

Equal sites share one fragment. It is a jaxpr without constants, whose inputs are the
site's leaves, or the residuals and the cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax
from rewriter.algebra.emit import typed
from rewriter.find.reading import leaves_of
from rewriter.find.reference import gradient_function
from rewriter.gradients.insertion_point import Instead
from rewriter.program.graph import Graph
from rewriter.rewrite.splice import Splice


class Fragments:
    """Traced code, by what it computes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[Any, Any] = {}

    def forward(
        self, splice: Splice, read: Sequence[Instead], avals: Sequence[Any]
    ) -> tuple[Any, Any]:
        """The traced code of a replacement.

        With gradients, its results are followed by residuals.

        Args:
            splice: The replacement.
            read: What it reads, by leaf.
            avals: The types of that in the body where it stands. A value from outside
                of a `jax.shard_map` has another type there.

        Returns:
            The jaxpr, and what makes gradients of the residuals, or None.
        """
        reading, graph = splice.match.reading, self.graph
        moving, here = in_order(splice), leaves_here(splice)
        order = tuple(k for k, v in enumerate(here) if v in moving)
        names = leaves_of(reading)
        result = graph.avals[splice.match.value]
        stated = _jax.stated([*avals, result]), tuple(r.key for r in read)
        key = (id(reading), splice.key, order, result.weak_type, stated)
        if splice.key is not None and key in self.known:
            return self.known[key]

        def code(*arrays: jax.Array) -> jax.Array:
            out = reading.build(
                splice.call,
                dict(zip(names, arrays, strict=True)),
                graph.shape(reading.value),
                graph.dtype(reading.value),
            )
            return _typed_as(out, result)

        def placed(*given: jax.Array) -> jax.Array:
            return code(*(r.back(x) for r, x in zip(read, given, strict=True)))

        if not order:
            traced, kept = _jax.trace_placed(lambda *x: [placed(*x)], avals), None
        else:
            traced, kept = _with_residuals(placed, avals, order)
            if any(read[k].steps for k in order):
                kept = _InOtherLayouts(kept, tuple(read[k] for k in order))
        if traced.constvars:
            raise ValueError("the replacement holds constants")
        self.known[key] = traced, kept
        return self.known[key]

    def gradients(self, splice: Splice, avals: Sequence[Any], kept: Any) -> Any:
        """The traced gradients: residuals and cotangent to what they replace.

        Args:
            splice: The replacement, with gradients.
            avals: The types of the forward's residuals.
            kept: What makes gradients of them, as `forward` returns it.
        """
        backward, graph = splice.backward, self.graph
        values = in_order(splice)
        dtypes = tuple(graph.dtype(backward.grads[v]) for v in values)
        own = graph.avals[splice.match.value]
        zeros = tuple((graph.shape(v), graph.dtype(v)) for v in backward.others)

        def code(*given: jax.Array) -> list[jax.Array]:
            *saved, cotangent = given
            cotangent = typed(_jax.placed_as(cotangent, own), own.dtype)
            grads = kept.gradients(saved, cotangent)
            found = list(map(typed, grads, dtypes))
            found += [jnp.zeros(*like) for like in zeros]
            return [_typed_as(x, a) for x, a in zip(found, wanted, strict=True)]

        places = tuple(k for k, v in enumerate(leaves_here(splice)) if v in values)
        result = graph.avals[backward.cotangent]
        results = (*(backward.grads[v] for v in values), *backward.others)
        wanted = [graph.avals[v] for v in results]
        weak = tuple(a.weak_type for a in wanted)
        like = kept, places, dtypes, zeros, weak, result.dtype, _jax.stated(wanted)
        key = ("backward", id(splice.match.reading), splice.key, *like)
        if key not in self.known:
            self.known[key] = _jax.trace_placed(code, [*avals, result])
        if self.known[key].constvars:
            raise ValueError("the gradients hold constants")
        return self.known[key]


def leaves_here(splice: Splice) -> list[int]:
    """What a replacement reads in its place, in the order of the reading's leaves."""
    here = dict(splice.match.leaves)
    return [here[v] for v in leaves_of(splice.match.reading)]


def in_order(splice: Splice) -> list[int]:
    """Leaves whose gradients are replaced, in the order of the reading's leaves."""
    if splice.backward is None:
        return []
    return [v for v in leaves_here(splice) if v in splice.backward.grads]


def _with_residuals(
    code: Callable[..., jax.Array], avals: Sequence[Any], order: Sequence[int]
) -> tuple[Any, Any]:
    """The traced code with its residuals, and what makes gradients of these.

    Args:
        code: The replacement.
        avals: The types of what it reads.
        order: The positions of that whose gradients are wanted.
    """
    if not _jax.is_on_mesh(avals):
        parts = _jax.linearized(code, avals, order)
        if parts is not None and all(a.shape for a in parts.known.out_avals[1:]):
            return parts.known, parts
    kept: list[_Pullback] = []

    def with_residuals(*given: jax.Array) -> list[jax.Array]:
        # Each device has its own part of a gradient; the program adds them up.
        arrays = _jax.with_common_varying(given)
        out, function = gradient_function(code, arrays, list(order))
        saved, tree = jax.tree.flatten(function)
        kept.append(_Pullback(tree, tuple(jnp.ndim(x) == 0 for x in saved)))
        return [out, *(x if jnp.ndim(x) else x.reshape(1) for x in saved)]

    return _jax.trace_placed(with_residuals, avals), kept[-1]


@dataclass(frozen=True)
class _Pullback:
    """A function of `jax.vjp`, without its arrays.

    Attributes:
        tree: Its structure.
        numbers: Whether each array is a number. It is kept with an axis, for stacking.
    """

    tree: Any
    numbers: tuple[bool, ...]

    def gradients(self, saved: Sequence[Any], cotangent: Any) -> Sequence[Any]:
        """Returns the cotangents of the arguments."""
        pairs = zip(saved, self.numbers, strict=True)
        arrays = [x.reshape(()) if n else x for x, n in pairs]
        return jax.tree.unflatten(self.tree, arrays)(cotangent)


@dataclass(frozen=True, eq=False)
class _InOtherLayouts:
    """The function to gradients, where a replacement reads leaves in other layouts.

    Attributes:
        of_read: Makes cotangents of what is read.
        read: What is read instead of each leaf.
    """

    of_read: Any
    read: tuple[Instead, ...]

    def gradients(self, saved: Sequence[Any], cotangent: Any) -> Sequence[Any]:
        """Returns the cotangents of the leaves."""
        found = self.of_read.gradients(saved, cotangent)
        return [r.back(x) for r, x in zip(self.read, found, strict=True)]


def _typed_as(x: jax.Array, aval: Any) -> jax.Array:
    """The array with the sharding and weak type of an aval."""
    x = _jax.placed_as(x, aval)
    return _jax.weakly_typed(x) if aval.weak_type else x
