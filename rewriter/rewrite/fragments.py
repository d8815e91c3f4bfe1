"""The traced code of replacements: of a site's result, and of its gradients.

Equal replacements are traced once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax
from rewriter.errors import RewriterError
from rewriter.find.match import Match
from rewriter.find.reading import leaves_of
from rewriter.find.reference import gradient_function
from rewriter.gradients.insertion_point import Instead
from rewriter.program.graph import Graph
from rewriter.rewrite.splice import Splice


class NotPlaced(Exception):
    """A replacement cannot be traced where it stands; the cause is chained.

    Attributes:
        match: What was to be replaced.
    """

    def __init__(self, match: Match, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.match = match


@contextlib.contextmanager
def _placing(splice: Splice) -> Iterator[None]:
    """Says of an error which replacement it is about."""
    try:
        yield
    except (NotPlaced, RewriterError):
        raise
    except Exception as error:
        raise NotPlaced(splice.match, error) from error


class Fragments:
    """Traces replacements.

    Args:
        graph: The program.
        instead: By the id of a splice, what it reads for a leaf that it cannot have.
    """

    def __init__(self, graph: Graph, instead: Mapping[int, Mapping[int, Instead]]):
        self.graph, self.instead = graph, instead
        self._known: dict[Any, Any] = {}

    def read_for(self, splice: Splice, leaf: int) -> Instead:
        """What a splice reads for a leaf."""
        return self.instead[id(splice)].get(leaf, Instead(leaf))

    def forward(self, splice: Splice) -> tuple[Any, tuple[int, ...], Any]:
        """The traced code of a replacement, and the leaves that it takes.

        With gradients, its results are followed by residuals; the last item is the
        structure in which `jax.vjp` keeps those.

        Raises:
            NotPlaced: If it cannot be traced where it stands.
        """
        with _placing(splice):
            return self._forward(splice)

    def _forward(self, splice: Splice) -> tuple[Any, tuple[int, ...], Any]:
        reading, graph = splice.match.reading, self.graph
        moving = in_order(splice)
        here = dict(splice.match.leaves)
        order = tuple(k for k, v in enumerate(leaves_of(reading)) if here[v] in moving)
        names = leaves_of(reading)
        read = [self.read_for(splice, here[v]) for v in names]
        avals = [graph.avals[r.value] for r in read]
        result = graph.avals[splice.match.value]
        stated = _jax.stated([*avals, result]), tuple(r.key for r in read)
        key = (id(reading), splice.key, order, result.weak_type, stated)
        if splice.key is not None and key in self._known:
            return self._known[key]

        def code(*arrays: jax.Array) -> jax.Array:
            out = reading.build(
                splice.call,
                dict(zip(names, arrays, strict=True)),
                graph.shape(reading.value),
                graph.dtype(reading.value),
            )
            return _typed_as(out, result)

        trees: list[Any] = []

        def with_residuals(*given: jax.Array) -> list[jax.Array]:
            arrays = [r.back(x) for r, x in zip(read, given, strict=True)]
            if not order:
                return [code(*arrays)]
            out, function = gradient_function(code, arrays, list(order))
            residuals, tree = _saved(function)
            trees.append(tree)
            return [out, *residuals]

        traced = _jax.trace_placed(with_residuals, avals)
        if traced.constvars:
            raise ValueError("the replacement holds constants")
        self._known[key] = (traced, names, trees[-1] if trees else None)
        return self._known[key]

    def gradients(
        self, splice: Splice, avals: list[Any], tree: Any
    ) -> tuple[Any, tuple[int, ...]]:
        """The traced code of gradients, and the values that its results are.

        Args:
            splice: A replacement with gradients.
            avals: The types of the residuals, which it takes before the cotangent.
            tree: The structure in which `jax.vjp` keeps those.

        Raises:
            NotPlaced: If it cannot be traced where it stands.
        """
        backward, graph = splice.backward, self.graph
        values = in_order(splice)
        dtypes = tuple(graph.dtype(backward.grads[v]) for v in values)
        dtype = graph.dtype(splice.match.value)
        zeros = tuple((graph.shape(v), graph.dtype(v)) for v in backward.others)

        def code(*given: jax.Array) -> list[jax.Array]:
            *saved, cotangent = given
            function = _unsaved(tree, saved)
            grads = function(_jax.placed_as(cotangent, own).astype(dtype))
            found = [g.astype(d) for g, d in zip(grads, dtypes, strict=True)]
            found += [jnp.zeros(*like) for like in zeros]
            return [_typed_as(x, a) for x, a in zip(found, wanted, strict=True)]

        here = dict(splice.match.leaves)
        names = leaves_of(splice.match.reading)
        places = tuple(k for k, v in enumerate(names) if here[v] in values)
        result = graph.avals[backward.cotangent]
        own = graph.avals[splice.match.value]
        results = (*(backward.grads[v] for v in values), *backward.others)
        wanted = [graph.avals[v] for v in results]
        weak = tuple(a.weak_type for a in wanted)
        like = tree, places, dtypes, zeros, weak, result.dtype, _jax.stated(wanted)
        key = ("backward", id(splice.match.reading), splice.key, *like)
        if key not in self._known:
            with _placing(splice):
                self._known[key] = _jax.trace_placed(code, [*avals, result])
        fragment = self._known[key]
        if fragment.constvars:
            raise ValueError("the gradients hold constants")
        return fragment, results


def _saved(function: Any) -> tuple[list[jax.Array], Any]:
    """A function's arrays, with at least one axis for stacking, and their structure."""
    kept, tree = jax.tree.flatten(function)
    numbers = tuple(jnp.ndim(x) == 0 for x in kept)
    arrays = [x.reshape(1) if n else x for x, n in zip(kept, numbers, strict=True)]
    return arrays, (tree, numbers)


def _unsaved(saved: Any, arrays: Sequence[jax.Array]) -> Any:
    """Restores a function from its saved arrays."""
    tree, numbers = saved
    kept = [x.reshape(()) if n else x for x, n in zip(arrays, numbers, strict=True)]
    return jax.tree.unflatten(tree, kept)


def _typed_as(x: jax.Array, aval: Any) -> jax.Array:
    """The array with the sharding and weak type of an aval."""
    x = _jax.placed_as(x, aval)
    return _jax.weakly_typed(x) if aval.weak_type else x


def in_order(splice: Splice) -> list[int]:
    """Leaves whose gradients are replaced, in the order of the reading's leaves."""
    if splice.backward is None:
        return []
    here = dict(splice.match.leaves)
    names = leaves_of(splice.match.reading)
    return [here[v] for v in names if here[v] in splice.backward.grads]
