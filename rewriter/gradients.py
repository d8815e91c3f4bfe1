"""The gradients of a match, where the program computes them itself.

A differentiated program holds an op's forward and, further down, equations that
turn a cotangent of its result into cotangents of its operands. Those are found
from the equations that read the region's values, and each one is verified: its
normal form must be that of `jax.vjp` of the op's reference.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax
from rewriter.addends import read_as_a_sum, returned, sums, widest
from rewriter.canonicalize import (
    LAYOUT_PRIMITIVES,
    TRANSPARENT,
    Evaluator,
    NeedSplit,
    is_local,
    is_lossless,
    pieces,
)
from rewriter.graph import Graph
from rewriter.match import Match, leaves_of, traced_forms
from rewriter.normal_form import OverBudget
from rewriter.template import Template, go, same_cone, way
from rewriter.verdict import Reason

log = logging.getLogger("rewriter.gradients")

ATTEMPTS = 3
"""After how many regions of one kind without gradients no more are looked at."""
REACH = 240
"""How many values below a cotangent are looked at."""
SHARED = 40
"""What more equations read is a mask or a table of all layers."""
MEETS = frozenset({
    "dot_general", "mul", "div", "select_n", "ragged_dot_general", "ragged_dot",
    "reduce_sum",
})  # fmt: skip
CONTRACTIONS = frozenset({"dot_general", "ragged_dot_general", "ragged_dot"})
LINEAR = LAYOUT_PRIMITIVES | TRANSPARENT | {"convert_element_type", "mul", "div", "neg"}


@dataclass(frozen=True, eq=False)
class Backward:
    """Gradients found for a match.

    Attributes:
        cotangent: The value that is the cotangent of the match's result; its dtype
            may be a wider one, where the program casts the result and adds up the
            cotangents of the casts.
        grads: Leaf (a value of the program) to the value that is its gradient.
        inner: Values between the leaves, the cotangent and the gradients.
        zeros: Leaf to what becomes zero with its gradient, where that exists only as
            terms of a sum; the term among `grads` becomes all of it.
    """

    cotangent: int
    grads: Mapping[int, int]
    inner: frozenset[int]
    zeros: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def others(self) -> tuple[int, ...]:
        """All values that become zero."""
        return tuple(itertools.chain.from_iterable(self.zeros.values()))

    @property
    def results(self) -> tuple[int, ...]:
        """All values that are replaced."""
        return (*self.grads.values(), *self.others)


@dataclass(eq=False)
class Memory:
    """What was verified before, for regions that are the same again.

    Attributes:
        expected: By the id of a reading, its reference's gradients, traced.
        proved: By the id of a reading, gradients that were found.
        failed: How many regions of a reading had none.
        unproved: Why gradients of a reading could not be told from others.
        returned: What bodies return.
    """

    returned: set[int]

    expected: dict[int, Any] = field(default_factory=dict)
    proved: dict[int, list[_Known]] = field(default_factory=dict)
    failed: collections.Counter[int] = field(default_factory=collections.Counter)
    unproved: dict[int, str] = field(default_factory=dict)


def search_gradients(
    graph: Graph, matches: Sequence[Match]
) -> tuple[dict[int, Backward], dict[int, str], list[Reason]]:
    """By the id of a match, its gradients; why there are none; and what went wrong."""
    memory = Memory(returned(graph))
    found: dict[int, Backward] = {}
    failures: list[Reason] = []
    for match in reversed(matches):  # the last one lacks no gradient of its input
        try:
            backward = find_backward(graph, match, memory)
        except Exception as error:
            log.debug("gradients of %s failed", match.op.name, exc_info=error)
            text = f"{match.op.name}: {type(error).__name__}: {error}"
            failures.append(Reason("internal", text, match.where))
            continue
        if backward is not None:
            found[id(match)] = backward
    why = {
        id(m): memory.unproved[id(m.reading)]
        for m in matches
        if id(m) not in found and id(m.reading) in memory.unproved
    }
    return _each_once(found, matches), why, failures


def _each_once(
    found: Mapping[int, Backward], matches: Sequence[Match]
) -> dict[int, Backward]:
    """Those that share no gradient with one that has more of them, or comes first.

    The same op of a value and of its copy, as one that was offloaded, have the same
    gradient of a bias. The forward of a ragged dot is the gradient of its gradient.
    """
    taken: set[int] = set()
    forwards: set[int] = set()
    kept: dict[int, Backward] = {}
    those = [m for m in matches if id(m) in found]
    for match in sorted(those, key=lambda m: -len(found[id(m)].grads)):
        results = found[id(match)].results
        if match.value not in taken and (taken | forwards).isdisjoint(results):
            taken.update(results)
            forwards.add(match.value)
            kept[id(match)] = found[id(match)]
    return kept


def find_backward(graph: Graph, match: Match, memory: Memory) -> Backward | None:
    """The gradients of a match in its program, or None if there are none."""
    candidates = list(_cotangents(graph, match))
    dtype = graph.dtype(match.value)
    candidates.sort(key=lambda v: graph.dtype(v) != dtype)
    if not candidates:
        return None
    best = _proved_before(graph, match, memory, candidates)
    if best is not None and not _read_beside(graph, match, best):
        return best
    if memory.failed[id(match.reading)] >= ATTEMPTS:
        return best
    before = best
    for cotangent in candidates[:6]:
        try:
            found = _verified(graph, match, cotangent, memory)
        except (OverBudget, NotImplementedError) as error:
            # A form that is too large, or a reference without a rule, such as that
            # of a ragged contraction.
            large = isinstance(error, OverBudget)
            text = f"too large to compare ({error})" if large else str(error)
            memory.unproved[id(match.reading)] = text.splitlines()[0]
            continue
        if found and (best is None or len(found.grads) > len(best.grads)):
            best = found
            if _has_all(graph, match, best):
                break
    if best is before:
        memory.failed[id(match.reading)] += 1
    elif best is not None:
        proved = memory.proved.setdefault(id(match.reading), [])
        proved.append(_known(graph, match, best))
        proved.sort(key=lambda known: -len(known.parts))
    return best


def _proved_before(
    graph: Graph, match: Match, memory: Memory, candidates: list[int]
) -> Backward | None:
    """The gradients of a match, if they are those of one proved before, again."""
    proved = memory.proved.get(id(match.reading), ())
    for known in proved:
        for look in (_at_its_place, _anywhere_below):
            found = _again(graph, known, match, candidates, look, memory.returned)
            if found is not None:
                return found
    return None


def _has_all(graph: Graph, match: Match, backward: Backward) -> bool:
    """Whether there is a gradient of every operand that has one."""
    return len(backward.grads) == sum(
        _is_float(graph.dtype(v)) for _, v in match.leaves
    )


def _read_beside(graph: Graph, match: Match, backward: Backward) -> bool:
    """Whether more is computed from a region's values: perhaps another gradient."""
    if _has_all(graph, match, backward):
        return False
    inside = match.inner | backward.inner
    parts = inside.difference((match.value, *backward.results))
    return any(inside.isdisjoint(node.outs) for v in parts for node in graph.users(v))


# ------------------------------------------------------------------ candidates
def _cotangents(graph: Graph, match: Match) -> Iterator[int]:
    """Values that meet the region in a product and could be its cotangent."""
    region = match.inner | {v for _, v in match.leaves}
    shape, dtype = graph.shape(match.value), graph.dtype(match.value)
    given: set[int] = set()
    for value in sorted(region, reverse=True):
        users = graph.users(value)
        for node in users if len(users) <= SHARED else ():
            if node.prim not in MEETS or not region.isdisjoint(node.outs):
                continue
            for i in node.ins:
                if i in region or i in graph.constants:
                    continue
                for x in _under_layout(graph, i):
                    if x in region or x in given or graph.shape(x) != shape:
                        continue
                    # Casts of one result add up their cotangents before its dtype.
                    if graph.dtype(x) == dtype or _is_wider(graph.dtype(x), dtype):
                        given.add(x)
                        yield x


def _under_layout(graph: Graph, value: int) -> Iterator[int]:
    for _ in range(10):
        yield value
        node = graph.node_of(value)
        if node is None or node.prim not in LINEAR:
            return
        moving = [i for i in node.ins if i not in graph.constants]
        if not moving:
            return
        value = moving[-1] if node.prim == "mul" else moving[0]


def _below(graph: Graph, value: int) -> list[int]:
    seen, queue = {value}, collections.deque([value])
    while queue and len(seen) < REACH:
        for node in graph.users(queue.popleft()):
            for out in node.outs:
                if out not in seen:
                    seen.add(out)
                    queue.append(out)
    return sorted(seen)


def _cone(graph: Graph, value: int, stops: frozenset[int]) -> set[int] | None:
    """Values above one, down to the stops; None if it is made of anything else."""
    seen, stack = set(), [value]
    while stack:
        current = stack.pop()
        if current in seen or current in stops or current in graph.constants:
            continue
        node = graph.node_of(current)
        if node is None or len(seen) > 400:
            return None
        if not is_local(node) and node.prim not in CONTRACTIONS:
            return None
        seen.add(current)
        stack += node.ins
    return seen


# ------------------------------------------------------------------ verification
def _verified(
    graph: Graph, match: Match, cotangent: int, memory: Memory
) -> Backward | None:
    """The gradients below one candidate for the cotangent."""
    stops = frozenset([*(v for _, v in match.leaves), cotangent])
    below = _below(graph, cotangent)
    cones = _cones(graph, match, below, stops)
    if not cones:
        return None
    wanted, outs = _expected(graph, match, memory)(cotangent)
    parts = frozenset().union(*cones.values(), match.inner)
    forms = _Forms(_evaluator(graph, match, stops, parts), wanted, outs)
    grads: dict[int, int] = {}
    for value in cones:
        leaf = forms.leaf_of((value,), grads)
        if leaf is not None:
            grads[leaf] = value
    zeros: dict[int, tuple[int, ...]] = {}
    taken = set(grads.values())
    for terms in sums(graph, below, cones, memory.returned):
        leaf = forms.leaf_of(terms, grads) if taken.isdisjoint(terms) else None
        if leaf is not None:
            grads[leaf] = widest(graph, terms)
            zeros[leaf] = tuple(v for v in terms if v != grads[leaf])
            taken.update(terms)
    if not grads:
        return None
    found = (*grads.values(), *itertools.chain.from_iterable(zeros.values()))
    inner = frozenset().union(*(cones[v] for v in found))
    return Backward(cotangent, grads, inner - match.inner, zeros)


def _cones(
    graph: Graph, match: Match, below: Sequence[int], stops: frozenset[int]
) -> dict[int, set[int]]:
    """By the values that have a leaf's shape and are made of the stops, their cones."""
    shapes = {graph.shape(v) for _, v in match.leaves}
    cones: dict[int, set[int]] = {}
    for value in below:
        if value not in stops and graph.shape(value) in shapes:
            cone = _cone(graph, value, stops)
            if cone is not None:
                cones[value] = cone
    return cones


class _Forms:
    """Forms of the program's values, to be compared with those of gradients.

    Args:
        ev: Evaluates the program's values.
        wanted: Evaluates the gradients.
        outs: Leaf to its gradient.
    """

    def __init__(self, ev: Evaluator, wanted: Evaluator, outs: Mapping[int, int]):
        self.ev, self.wanted, self.outs = ev, wanted, outs
        self.args: dict[Any, tuple[Any, ...]] = {}

    def leaf_of(self, values: tuple[int, ...], known: Mapping[int, int]) -> int | None:
        """The leaf, of those not known, whose gradient is the sum of some values."""
        ev = self.ev
        shape = ev.g.shape(values[0])
        key = shape, _digits(ev.g, values[0])
        at = self.args.setdefault(key, _arguments(ev, *key))
        ev.alg.work = 0
        with contextlib.suppress(OverBudget):
            for leaf, out in self.outs.items():
                if leaf in known or ev.g.shape(leaf) != shape:
                    continue
                if _equal(ev, values, self.wanted, out, at):
                    return leaf
        return None


def _digits(graph: Graph, value: int) -> tuple[int, ...]:
    """The sizes of which a value's axes are made, if it is reshaped."""
    at, node = value, graph.node_of(value)
    while node is not None and (
        node.prim in TRANSPARENT or node.prim in ("add_any", "convert_element_type")
    ):
        at, node = node.ins[-1], graph.node_of(node.ins[-1])
    if node is not None and node.prim == "reshape":
        at = node.ins[0]
    return graph.shape(at)


def _arguments(
    ev: Evaluator, shape: tuple[int, ...], digits: tuple[int, ...]
) -> tuple[Any, ...]:
    """Index arguments of a value, digit by digit where axes were joined."""
    alg, rest, out = ev.alg, list(digits), []
    for size in shape:
        argument, have = None, 1
        while have < size and rest:
            n = rest.pop(0)
            argument, have = alg.cat(argument, alg.new_index(n), n), have * n
        if have != size:  # an axis was split
            return tuple(map(alg.new_index, shape))
        out.append(argument)
    return tuple(out)


def _equal(
    ev: Evaluator,
    values: tuple[int, ...],
    wanted: Evaluator,
    out: int,
    at: tuple[Any, ...],
) -> bool:
    """Whether a sum has a value's form; piece by piece, where values are joined.

    Of forms that are zero nothing is learnt.
    """
    alg = ev.alg
    try:
        form = functools.reduce(alg.add, (ev.poly(v, at) for v in values))
        return bool(form) and not alg.add(form, wanted.poly(out, at), -1.0)
    except NeedSplit as need:
        return all(
            _equal(
                ev,
                values,
                wanted,
                out,
                tuple(alg.subst_index(a, {need.index: part}) for a in at),
            )
            for _, part in pieces(alg, need)
        )


def _evaluator(
    graph: Graph, match: Match, stops: frozenset[int], parts: frozenset[int]
) -> Evaluator:
    """An evaluator that expands everything down to the leaves and the cotangent."""
    dots = frozenset(
        v
        for v in parts
        if (node := graph.node_of(v)) is not None and node.prim in CONTRACTIONS
    )
    ev = Evaluator(
        graph,
        match.reading.algebra,
        names={v: v for v in stops},
        inside=dots,
        full_sides=frozenset((v, k) for v in dots for k in (0, 1)),
        filled_rows=True,
        **match.reading.check_options,
    )
    ev.strided = True
    return ev


def _expected(
    graph: Graph, match: Match, memory: Memory
) -> Callable[[int], tuple[Evaluator, dict[int, int]]]:
    """Cotangent to an evaluator of the reference's gradients, and those by leaf."""
    reading, op = match.reading, match.op
    names = leaves_of(reading)
    traced = memory.expected.get(id(reading))
    moving = [k for k, v in enumerate(names) if _is_float(graph.dtype(v))]
    if traced is None:
        shape, dtype = graph.shape(reading.value), graph.dtype(reading.value)
        params = {**reading.params, **reading.check_params}

        def code(*arrays: jax.Array) -> jax.Array:
            given = dict(zip(names, arrays, strict=True))
            return reading.build(op.reference, given, shape, dtype, params)

        def gradients(*given: jax.Array) -> tuple[jax.Array, ...]:
            *arrays, cotangent = given
            return gradient_function(code, arrays, moving)[1](cotangent)

        avals = [graph.avals[v] for v in names]
        result = jax.ShapeDtypeStruct(shape, dtype)
        traced = _jax.trace_flat(gradients, [*avals, result])
        memory.expected[id(reading)] = traced
    inner = Graph(traced)
    here = dict(match.leaves)

    def at(cotangent: int) -> tuple[Evaluator, dict[int, int]]:
        values = [*(here[v] for v in names), cotangent]
        ev, outs = traced_forms(inner, reading, values)
        ev.strided = True
        by_leaf = zip((here[names[k]] for k in moving), outs, strict=True)
        return ev, dict(by_leaf)

    return at


def gradient_function(
    code: Callable[..., jax.Array], arrays: list[jax.Array], moving: list[int]
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
    """`jax.vjp` of a function by some of its arguments."""

    def of(*chosen: jax.Array) -> jax.Array:
        full = list(arrays)
        for k, x in zip(moving, chosen, strict=True):
            full[k] = x
        return code(*full)

    return jax.vjp(of, *(arrays[k] for k in moving))


def _is_wider(dtype: Any, other: Any) -> bool:
    """Whether one float dtype holds every value of another one."""
    return _is_float(dtype) and _is_float(other) and is_lossless(other, dtype)


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


# ------------------------------------------------------------------ the same again
@dataclass(frozen=True, eq=False)
class _Known:
    """Gradients that are proved, ready to be found again elsewhere.

    Attributes:
        match: What they are the gradients of.
        backward: The gradients.
        parts: Of each: its leaf, and its equations and the way to them from the
            cotangent; of what becomes zero with a gradient too.
    """

    match: Match
    backward: Backward
    parts: tuple[tuple[int, Template], ...]


def _known(graph: Graph, match: Match, backward: Backward) -> _Known:
    stops = frozenset([*(v for _, v in match.leaves), backward.cotangent])
    parts = []
    found = list(backward.grads.items())
    found += [(leaf, v) for leaf, others in backward.zeros.items() for v in others]
    for leaf, value in found:
        inside = _cone(graph, value, stops) or ()
        reached = {i for v in inside for i in graph.node_of(v).ins if i in stops}
        path = way(graph, (backward.cotangent,), value) or ()
        cone = Template(match.node, value, frozenset(reached), path, None)
        parts.append((leaf, cone))
    return _Known(match, backward, tuple(parts))


def _again(
    graph: Graph,
    known: _Known,
    match: Match,
    candidates: list[int],
    look: Callable[[Graph, Template, int], Iterator[int]],
    returned: set[int],
) -> Backward | None:
    """The gradients of a match like one whose gradients are proved."""
    mine = dict(match.leaves)
    to = {a: mine[name] for name, a in known.match.leaves}
    for cotangent in candidates:
        to[known.backward.cotangent] = cotangent
        grads: dict[int, int] = {}
        zeros: dict[int, tuple[int, ...]] = {}
        inner: frozenset[int] = frozenset()
        for leaf, part in known.parts:
            found = _like(graph, part, to, look(graph, part, cotangent))
            if found is None:
                break
            if to[leaf] in grads:
                zeros[to[leaf]] = (*zeros.get(to[leaf], ()), found[0])
            else:
                grads[to[leaf]] = found[0]
            inner |= found[1]
        else:
            sums = [(grads[leaf], *others) for leaf, others in zeros.items()]
            if all(read_as_a_sum(graph, parts, returned, inner) for parts in sums):
                return Backward(cotangent, grads, inner - match.inner, zeros)
    return None


def _like(
    graph: Graph, part: Template, to: Mapping[int, int], places: Iterator[int]
) -> tuple[int, frozenset[int]] | None:
    """The value with a gradient's equations over other leaves, and those inside."""
    for value in places:
        found = same_cone(graph, part, value)
        if found and all(to[a] == b for a, b in found[0].items()):
            return value, found[1]
    return None


def _at_its_place(graph: Graph, part: Template, cotangent: int) -> Iterator[int]:
    """Where the gradient is, if the way from the cotangent is the same again."""
    value = go(graph, (cotangent,), part.path) if part.path else None
    return iter(() if value is None else (value,))


def _anywhere_below(graph: Graph, part: Template, cotangent: int) -> Iterator[int]:
    """Values below the cotangent of the gradient's shape."""
    shape = graph.shape(part.value)
    return (v for v in _below(graph, cotangent) if graph.shape(v) == shape)
