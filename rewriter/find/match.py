"""Searches a graph for patterns: verified matches, and ranked near misses."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from jax.extend.core import InconclusiveDimensionOperation

from rewriter.algebra.canonicalize import interval, within
from rewriter.algebra.normal_form import Algebra
from rewriter.algebra.template import Step as Way
from rewriter.algebra.template import Template, apply, same_makers, template, way
from rewriter.find.check import check
from rewriter.find.finder import Finder
from rewriter.find.nested import (
    body_values,
    is_in_loop_of,
    is_read_elsewhere,
)
from rewriter.find.precision import with_precision
from rewriter.find.reading import Reading, Refused, leaves_of
from rewriter.find.region import Place, Regions, region_values
from rewriter.find.search_cache import Proved, SearchCache
from rewriter.find.sieve import Step
from rewriter.find.sliced_operands import pieces
from rewriter.find.width import require_width
from rewriter.ops.kernel import Kernel, Spec
from rewriter.ops.op import Op
from rewriter.ops.registry import registry
from rewriter.program.counted_loops import LOOPS
from rewriter.program.graph import Graph, Node
from rewriter.program.lines import users_line_of
from rewriter.support.dtypes import number_kind
from rewriter.support.verdict import Reason

log = logging.getLogger("rewriter.match")


class Pattern(Protocol):
    """The interface of a pattern."""

    name: str
    op: Op
    anchors: frozenset[str]
    needs: frozenset[str]
    either: frozenset[str]
    dtypes: frozenset[Any]
    steps: tuple[Step, ...]
    above: frozenset[str]
    looks_above: bool
    kernels: tuple[Kernel, ...]

    def propose(self, find: Finder, anchor: Node) -> Iterator[Reading]:
        """Readings of the regions around an anchor, best first."""
        ...


@dataclass(frozen=True, eq=False)
class ReaderPattern:
    """A pattern whose parameters are read off the form by a function.

    Attributes:
        name: The pattern's name, which is its op's name too.
        anchors: Primitives at which a search begins.
        propose: Yields readings of the regions around an anchor.
        steps: The steps of a path through every site, in order; see `sieve`.
        other_steps: Those of another path; a site has one of both.
        needs: Primitives that every program with a site has.
        either: If not empty, primitives; such a program has at least one of them.
        dtypes: If not empty, dtypes; such a program has an array of one of them.
        above: Primitives above a leaf that may belong to a larger site. A region with
            such a leaf is read anew, although it equals another one.
        looks_above: Whether its sites reach above the leaves of another pattern's at
            the same anchors. It is tried where regions are equal up to those leaves.
        of_rows: Whether its sites are values of rows, such as losses. Sums over rows
            too are then read as sums of such values.
    """

    name: str
    anchors: frozenset[str]
    propose: Callable[[Finder, Node], Iterator[Reading]]
    steps: tuple[Step, ...] = ()
    needs: frozenset[str] = frozenset()
    either: frozenset[str] = frozenset()
    dtypes: frozenset[Any] = frozenset()
    above: frozenset[str] = frozenset()
    of_rows: bool = False
    looks_above: bool = False
    other_steps: tuple[Step, ...] = ()

    @functools.cached_property
    def op(self) -> Op:
        """The op of the same name."""
        return registry().op(self.name)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The op's kernels."""
        return registry().kernels(self.name)


@dataclass(frozen=True, eq=False)
class Match:
    """A region proved equal to an op.

    Attributes:
        pattern: The pattern that read it.
        reading: The op's operands and parameters, as forms over leaves.
        spec: The shapes and dtypes the op will see.
        anchor: The equation at which it was found.
        node: The equation whose result the op computes.
        where: The user's line.
        value: The result here; the reading may be of an equal region elsewhere.
        place: Where the replacement stands.
        leaves: Pairs of a leaf of the reading and the value it is here.
        inner: Values between the leaves and the result, the result too.
        copies: How often the region is computed again in the same body.
        parts: The matches in it that it is made of, if its op is made of others.
        not_chosen: (kernel, reason) for those of special forms of the op that the
            region has too.
    """

    pattern: Pattern
    reading: Reading
    spec: Spec
    anchor: Node
    node: Node
    where: str
    value: int
    place: Place
    leaves: tuple[tuple[int, int], ...]
    inner: frozenset[int] = frozenset()
    copies: int = 0
    parts: tuple[Match, ...] = ()
    not_chosen: tuple[tuple[str, str], ...] = ()

    @property
    def op(self) -> Op:
        """The op."""
        return self.pattern.op


@dataclass(frozen=True)
class NearMiss:
    """A part of the program that almost was an op.

    Attributes:
        op: The nearest op.
        where: The user's line, such as ``"model.py:88 (Attention.__call__)"``.
        reasons: Everything that stands in the way.
        difference: The algebraic difference in words, or ``""``.
        score: How near it is, between 0 and 1.
        suggestion: What to do about it, or ``""``.
        called_from: As in `Site`.
    """

    op: str
    where: str
    reasons: tuple[Reason, ...]
    difference: str
    score: float
    suggestion: str
    called_from: str = ""


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        matches: What was found.
        misses: What almost was, outside of that.
        failures: What went wrong.
        refused: (op, result of an anchor) to why the region there is not that op.
    """

    matches: tuple[Match, ...]
    misses: tuple[NearMiss, ...]
    failures: tuple[Reason, ...]
    refused: Mapping[tuple[str, int], str]


def search(
    regions: Regions,
    patterns: Sequence[Pattern],
    numerics: str = "default",
    assume: Iterable[str] = (),
) -> Found:
    """Returns all verified matches of the patterns in a graph, and near misses.

    An exception inside a pattern becomes a failure with the user's line; the
    other sites are not affected.
    """
    graph = regions.graph
    find = Finder(graph, Algebra(), regions, numerics == "fast", frozenset(assume))
    by_anchor: dict[str, list[Pattern]] = {}
    for pattern in patterns:
        for name in pattern.anchors:
            by_anchor.setdefault(name, []).append(pattern)
    matches: list[Match] = []
    failures: list[Reason] = []
    memory = SearchCache(graph)
    for node in graph.nodes:
        patterns_here = by_anchor.get(node.prim)
        if patterns_here is None or not _of_numbers(graph, node):
            continue
        again: dict[str, tuple[Template, list[Match]] | None] = {}
        for pattern in patterns_here:
            here = find, pattern, node, memory
            again[pattern.name] = _isolated(_matches_like, here, failures)
        like = next((known for known, _ in filter(None, again.values())), None)
        for pattern in patterns_here:
            repeated = again.get(pattern.name)
            if repeated is not None:
                matches += repeated[1]
                continue
            if like is not None and memory.is_empty(pattern, like.anchor):
                continue
            here = find, pattern, node, memory
            matches += _isolated(_at, here, failures) or ()
    refused = {at: why.text for at, (_, why) in find.misses.items() if why.score >= 0.5}
    misses = tuple(_misses(find, matches))
    return Found(tuple(matches), misses, tuple(failures), refused)


def _of_numbers(graph: Graph, node: Node) -> bool:
    """Whether an equation gives numbers, neither complex nor of 8 bits."""
    return all(
        0 not in graph.shape(v) and _may_be_matched(graph.dtype(v)) for v in node.outs
    )


@functools.cache
def _may_be_matched(dtype: Any) -> bool:
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 2
    return not narrow and not jnp.issubdtype(dtype, jnp.complexfloating)


def _isolated(step: Callable[..., Any], here: Any, failures: list[Reason]) -> Any:
    """Turns an exception at one anchor into a failure; the other sites go on."""
    find, pattern, node, _ = here
    try:
        return step(*here)
    except RecursionError:
        deep = Refused("budget", "the region is too deep", score=0.3)
        find.missed(pattern.name, node, deep)
    except InconclusiveDimensionOperation as error:
        text = f"a proof needs sizes that are numbers: {str(error).splitlines()[0]}"
        find.missed(pattern.name, node, Refused("symbolic", text, score=0.3))
    except Exception as error:
        log.debug("matching %s failed", pattern.name, exc_info=error)
        text = f"{pattern.name}: {type(error).__name__}: {error}"
        failures.append(Reason("internal", text, find.where(node)))
    return None


def _at(
    find: Finder, pattern: Pattern, anchor: Node, memory: SearchCache
) -> list[Match]:
    found: list[Match] = []
    known: list[Template | None] = []
    inside: list[tuple[Reading, bool]] = []
    for reading in pattern.propose(find, anchor):
        done = find.done(pattern.name, reading.value)
        if done or _is_inside_general(find, pattern, reading, memory):
            continue
        covered = memory.covered.setdefault(pattern.name, set())
        if reading.value in covered:
            elsewhere = reading.may_be_inside and is_read_elsewhere(
                find.graph, reading.value, covered, memory.out
            )
            inside.append((reading, elsewhere))
            if not elsewhere:
                continue
        spec, problem = check(find.graph, pattern.op, reading)
        if problem is not None:
            find.missed(pattern.name, anchor, problem)
            continue
        reading, spec = _of_pieces(find, pattern, anchor, reading, spec)
        leaves = leaves_of(reading)
        inner = frozenset(region_values(find.graph, reading.value, set(leaves)))
        if any((pattern.name, v) in find.found for v in inner):
            continue  # one holds the other: the first stays
        try:
            require_width(find.graph, pattern.op, reading, spec, inner)
            read = with_precision(find.graph, pattern.op, reading, spec, inner)
        except Refused as refusal:
            find.missed(pattern.name, anchor, refusal)
            continue
        reading, spec = read
        covered |= inner
        pairs = tuple((v, v) for v in leaves)
        read = reading, spec, reading.value, pairs, inner
        match = _match(find, pattern, anchor, *read, found)
        found.append(match)
        known.append(
            template(find.graph, anchor, reading.value, frozenset(leaves), match)
        )
    if known and None not in known:
        one = Proved(tuple(known), tuple(_ways(find.graph, anchor, inside)))
        memory.proved.setdefault(pattern.name, []).insert(0, one)
    if not found:
        memory.nothing.add((pattern.name, anchor))
    find.remember_outcome(pattern.name, anchor, bool(found))
    return _inside_first(found)


def _of_pieces(
    find: Finder, pattern: Pattern, anchor: Node, reading: Reading, spec: Spec
) -> tuple[Reading, Spec]:
    """The reading with pieces as its leaves, if other pieces are read beside it."""
    leaves = leaves_of(reading)
    inner = region_values(find.graph, reading.value, set(leaves))
    cut = pieces(find.graph, leaves, inner)
    if cut:
        for other in pattern.propose(find.at_pieces(cut), anchor):
            if other.value == reading.value:
                found, problem = check(find.graph, pattern.op, other)
                if problem is None and found == spec:
                    return other, found
    return reading, spec


def _is_inside_general(
    find: Finder, pattern: Pattern, reading: Reading, memory: SearchCache
) -> bool:
    """Whether a special form is read of a part of what is its general op as a whole."""
    general = pattern.op.form_of
    covered = memory.covered.get(general)
    if not covered or find.done(general, reading.value):
        return False
    if reading.value in covered:
        return not is_read_elsewhere(find.graph, reading.value, covered, memory.out)
    return is_in_loop_of(find.graph, reading.value, covered)


def _inside_first(found: list[Match]) -> list[Match]:
    """Matches in the order of the program, as far as one is inside another."""
    return sorted(
        found, key=lambda m: not any(m.value in o.inner - {o.value} for o in found)
    )


def _ways(
    graph: Graph, anchor: Node, inside: Iterable[tuple[Reading, bool]]
) -> Iterator[tuple[tuple[Way, ...], bool]]:
    """The ways to results inside of matches, and whether each is read elsewhere."""
    for reading, elsewhere in inside:
        path = way(graph, anchor.outs, reading.value)
        if reading.may_be_inside and path is not None:
            yield path, elsewhere


def _match(find, pattern, anchor, reading, spec, value, leaves, inner, found) -> Match:
    find.found[pattern.name, value] = reading
    node = find.graph.node_of(value)
    where = find.where(anchor) or find.where(node)
    place = find.regions.place(node.scope)
    copies = 0
    if anchor.copies and node.copies:
        copies = min(
            sum(scope is node.scope for scope, _, _ in n.copies) for n in (anchor, node)
        )
    holding = (1 + m.copies for m in found if value in m.inner)
    copies = max(0, copies - sum(holding))
    return Match(
        pattern, reading, spec, anchor, node, where, value, place, leaves, inner, copies
    )


def _matches_like(
    find: Finder, pattern: Pattern, anchor: Node, memory: SearchCache
) -> tuple[Template, list[Match]] | None:
    """The matches at an anchor whose regions equal those proved at another one."""
    for proved in memory.proved.get(pattern.name, [])[:8]:
        applied = []
        for known in proved.templates:
            found = apply(find.graph, known, anchor)
            if found is None or _may_be_larger(find, pattern, found[1]):
                break
            applied.append((known, *found))
        else:
            inner = frozenset().union(*(values for *_, values in applied))
            if not proved.is_like(find.graph, anchor, inner, memory.out):
                continue
            matches = _instances(find, pattern, anchor, applied, memory)
            if matches is not None:
                return proved.templates[0], matches
    return None


def _may_be_larger(find: Finder, pattern: Pattern, leaves: Mapping[int, int]) -> bool:
    """Whether a leaf here is made as a leaf of a larger site's part may be."""

    def made_above(value: int) -> bool:
        node = find.graph.node_of(find.uncast(value))
        return node is not None and node.prim in pattern.above

    return any(made_above(b) and not made_above(a) for a, b in leaves.items())


def _instances(find, pattern, anchor, applied, memory) -> list[Match] | None:
    """Matches of proved regions here; None if an operand cannot be had."""
    matches = []
    for known, value, leaves, inner in applied:
        if find.done(pattern.name, value):
            continue
        place = find.regions.place(find.graph.node_of(value).scope)
        if any(v not in place.defined for v in leaves.values()):
            return None
        first, pairs = known.source, tuple(leaves.items())
        if not _as_bounded(find, first.reading, leaves):
            return None
        if not _made_alike(find, leaves):
            return None
        read = first.reading, first.spec, value, pairs, inner
        memory.covered.setdefault(pattern.name, set()).update(inner)
        matches.append(_match(find, pattern, anchor, *read, matches))
    return _inside_first(matches)


def _as_bounded(find: Finder, reading: Reading, leaves: Mapping[int, int]) -> bool:
    """Whether integers have the bounds here with which a reading was proved."""
    known = reading.algebra.leaf_range
    return all(
        name == value
        or name not in reading.algebra.integers
        or within(interval(find.graph, value), known[name])
        for name, value in leaves.items()
    )


def _made_alike(find: Finder, leaves: Mapping[int, int]) -> bool:
    """Whether what a reading found above its leaves also holds for those here.

    Such facts are what a mask leaves of a row, how large numbers in a bias are, and
    the least length.
    """
    graph = find.graph
    for known, value in leaves.items():
        if known == value:
            continue
        kind = number_kind(graph.dtype(known))
        alike = kind != "boolean" or same_makers(graph, known, value)
        larger = kind == "float" and (
            find.largest_number(value) > find.largest_number(known)
        )
        scalar = kind == "integer" and graph.shape(value) == ()
        smaller = scalar and find.least(value) < find.least(known)
        if larger or smaller or not alike:
            return False
    return True


def _misses(find: Finder, matches: Sequence[Match]) -> Iterator[NearMiss]:
    used: set[int] = set()
    for match in matches:
        used |= match.inner
    for node in map(find.graph.node_of, tuple(used)):
        if node is not None and node.prim in LOOPS:  # a loop that is replaced
            used |= body_values(node)
    explained = {op for _, refusal in find.misses.values() for op in refusal.explains}
    for (op, value), (anchor, refusal) in find.misses.items():
        if value in used or refusal.score < 0.3:
            continue
        if op in explained and refusal.score < 0.5:
            continue
        where = find.where(anchor)
        yield NearMiss(
            op,
            where,
            (Reason(refusal.code, refusal.text, where),),
            refusal.difference,
            refusal.score,
            refusal.suggestion,
            users_line_of(anchor),
        )
