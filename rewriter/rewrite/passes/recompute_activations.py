"""Computes activations again in the backward pass, so that the forward saves fewer.

    forward                               backward
    x = h·w + b   t = tanh x   a = f(x, t)      reads x and t
    saves x, a and t                      →     computes t from x again; t is not saved

Differentiation reads what activations compute on their way: `tanh` of a GELU, the
sigmoid of a SiLU. XLA fuses a cheap value with its readers, but computes an expensive
one, such as an exponential, once. So the forward pass writes it, and the backward pass
reads it. Both are bound by memory, and the expensive function takes no time beside it.
On an H200 forward and gradient together are 1.05 to 1.9 times as fast that way
(`python3 -m tests.bench.activations`). Only XLA's own `erfc` of 16 bits, which strict
numerics keeps, takes a seventh longer.

A value is read late if at least two products lie between it and its reader. Values that
are read late are those that are saved. The fewest bytes from which all of them can be
computed by elementwise functions are a minimum cut, as in `recompute`. Where an
expensive value is behind the cut, late readers get it computed again from the cut. A
barrier keeps XLA from merging both computations, as under `jax.checkpoint`.

Values that late products read are saved in any case, and cost nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax

from rewriter import _jax
from rewriter.ops.device import Device
from rewriter.program.contents import Contents, contents_of
from rewriter.program.equations import Equations
from rewriter.program.loops import inserted
from rewriter.rewrite.beside_sites import BodyPass, Change, Changed
from rewriter.rewrite.passes.flops import is_sized, size
from rewriter.rewrite.passes.recompute import CHEAP, NEW, is_elementwise
from rewriter.support.sizes import size_text

EXPENSIVE = frozenset({
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh",
    "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow",
    "sin", "sinh", "tan", "tanh",
})  # fmt: skip
"""Elementwise functions that XLA does not compute twice of its own accord."""

PRODUCTS = frozenset({
    "dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated",
})  # fmt: skip
"""Primitives that no elementwise function is fused over."""

LATE = 2
"""The number of products between a value and its late reader."""

LEAST = 4 << 20
"""The bytes of the smallest array that is worth it."""

MOST = 4
"""The number of expensive functions of an element that are computed again."""


@dataclass(frozen=True)
class Recomputed(Change):
    """Values of an expensive function that the backward pass computes again.

    Attributes:
        bytes: The bytes that the forward pass no longer saves.
    """

    by: ClassVar[str] = "recompute_activations"
    bytes: int

    @classmethod
    def row(cls, same: Sequence[Self]) -> tuple[str, ...]:
        """Returns how many values, and their bytes."""
        memory = size_text(sum(r.bytes for r in same))
        return f"×{len(same)}", f"{memory} not saved for gradients, but computed again"


def _is_expensive(eqn: Any) -> bool:
    """Whether an equation is a function that XLA computes once, of a large array."""
    if not _may_be_expensive(eqn.primitive):
        return False
    large = is_sized(eqn.outvars) and max(map(size, eqn.outvars), default=0) >= LEAST
    return large and bool(_function_of(eqn))


def _may_be_expensive(primitive: Any) -> bool:
    return primitive.name in EXPENSIVE or primitive.name in _jax.BODIES


def _function_of(eqn: Any) -> str:
    """The expensive function of an equation, or of an elementwise call; else empty."""
    if eqn.primitive.name in EXPENSIVE:
        return str(eqn.primitive.name)
    if _jax.call_kind(eqn) not in ("call", "custom") or not is_elementwise(eqn):
        return ""
    return next(filter(None, map(_function_of, _jax.call_body(eqn).eqns)), "")


# ------------------------------------------------------------------- what is read late
@dataclass(frozen=True, eq=False)
class _Late:
    """The values of a body that are read late.

    Attributes:
        around: The body's equations.
        readers: By value, the positions of its late readers.
        saved: Those that are saved in any case.
        early: Values that the forward pass needs too. XLA computes others late anyway.
        depth: By value, the most products that one after the other lead to it, if any
            does.
        makers: By value that XLA fuses with what is read late, the equation that makes
            it.
    """

    around: Equations
    readers: Mapping[Any, list[int]]
    saved: Set[Any]
    early: Set[Any]
    depth: Mapping[Any, int]
    makers: Mapping[Any, Any]

    @classmethod
    def of(cls, body: Any) -> _Late | None:
        """What a body reads late; None if none of it is computed expensively."""
        held = contents_of(body)
        saved = {a for a in _outs(body) if not _jax.is_literal(a)}
        costly = _costly(held, saved)
        if not costly:
            return None
        depth, late = _depths(held)
        readers: dict[Any, list[int]] = {}
        for k, after, fused in late:
            for value in _vars(body.eqns[k]):
                if after - depth.get(value, 0) >= LATE and fused:
                    readers.setdefault(value, []).append(k)
                elif after - depth.get(value, 0) >= LATE:
                    saved.add(value)
        if costly.isdisjoint(readers):
            return None
        makers = _fused_above(held.makers, readers)
        around = Equations(body)
        return cls(around, readers, saved, _early(around, readers), depth, makers)


def _depths(held: Contents) -> tuple[dict[Any, int], list[tuple[int, int, bool]]]:
    """By value, the most products that lead to it, if any; and what reads late.

    That is the position of an equation, its most products, and whether it is fused.
    """
    depth: dict[Any, int] = {}
    late: list[tuple[int, int, bool]] = []
    get, variable = depth.get, _jax.Var
    cheap = {p for p in held.primitives if p.name in CHEAP}
    for k, eqn in enumerate(held.eqns):
        fused = eqn.primitive in cheap or is_elementwise(eqn)
        given = [get(a, 0) for a in eqn.invars if a.__class__ is variable]
        after = max(given) if given else 0
        here = after if fused else after + _is_product(eqn)
        if here:
            for v in eqn.outvars:
                depth[v] = here
        if len(given) > 1 and after - min(given) >= LATE:
            late.append((k, after, fused))
    return depth, late


def _costly(held: Contents, outs: Set[Any]) -> set[Any]:
    """The values that elementwise functions, an expensive one among them, make.

    None if each of them has one reader: then nothing that the forward pass needs is
    read late.
    """
    may = set(filter(_may_be_expensive, held.primitives))
    places = held.positions(may)
    first = next((k for k in places if _is_expensive(held.eqns[k])), None)
    found, read, forks = set[Any](), set[Any](), False
    variable = _jax.Var
    for eqn in held.eqns[first:] if first is not None else ():
        above = [a for a in eqn.invars if a.__class__ is variable and a in found]
        if above:
            forks = forks or not read.isdisjoint(above)
            read.update(above)
        if (above or eqn.primitive in may) and _makes_costly(eqn, above):
            found.update(eqn.outvars)
            forks = forks or len(eqn.outvars) > 1
    return found if forks or not read.isdisjoint(outs) else set()


def _makes_costly(eqn: Any, above: Sequence[Any]) -> bool:
    """Whether an equation is elementwise, and expensive if what it reads is not."""
    if not above and not _is_expensive(eqn):
        return False
    return is_elementwise(eqn) and is_sized(eqn.outvars)


def _fused_above(made: Mapping[Any, Any], late: Iterable[Any]) -> dict[Any, Any]:
    """By value that is fused with one that is read late, the equation that makes it."""
    found: dict[Any, Any] = {}
    todo, seen = list(late), set(late)
    while todo:
        value = todo.pop()
        maker = made.get(value)
        if maker is None or not (is_elementwise(maker) and is_sized(maker.outvars)):
            continue
        found[value] = maker
        new = [v for v in _vars(maker) if v not in seen]
        seen.update(new)
        todo += new
    return found


def _early(around: Equations, late: Mapping[Any, list[int]]) -> set[Any]:
    """The values that are read, but not only late, or for a value that is."""
    early = {a for a in around.outs if not _jax.is_literal(a)}
    places = {(k, v) for v, ks in late.items() for k in ks}
    for k in reversed(range(around.end)):
        eqn = around.eqns[k]
        if not early.isdisjoint(eqn.outvars) or not is_elementwise(eqn):
            early.update(v for v in _vars(eqn) if (k, v) not in places)
    return early


def _is_product(eqn: Any) -> bool:
    """Whether an equation multiplies matrices, or may do so in a body."""
    return eqn.primitive.name in PRODUCTS or bool(_jax.call_kind(eqn))


# ----------------------------------------------------------------- what is saved of it
@dataclass(frozen=True, eq=False)
class _Region:
    """Values that are read late, with all that they are cheaply computed from.

    Attributes:
        wanted: Those that are read late.
        makers: By value, the cheap equation that makes it, in the body's order.
    """

    wanted: Sequence[Any]
    makers: Mapping[Any, Any]


def _regions(late: _Late) -> Iterable[_Region]:
    """Yields the regions that share no equation; only those that are expensive."""
    around, order = late.around, {v: k for k, v in enumerate(late.readers)}
    for values in _connected(late.makers):
        makers = {v: late.makers[v] for v in sorted(values, key=around.made_at)}
        if any(map(_is_expensive, makers.values())):
            read = {v for e in makers.values() for v in _vars(e)}.union(values)
            wanted = sorted(read & order.keys(), key=order.__getitem__)
            yield _Region(wanted, makers)


def _connected(makers: Mapping[Any, Any]) -> Iterable[list[Any]]:
    """Groups values of which one is computed from another."""
    parent = {v: v for v in makers}

    def first(value: Any) -> Any:
        while parent[value] is not value:
            parent[value] = value = parent[parent[value]]
        return value

    for value, maker in makers.items():
        for operand in _vars(maker):
            if operand in makers:
                parent[first(operand)] = first(value)
    groups: dict[Any, list[Any]] = {}
    for value in makers:
        groups.setdefault(first(value), []).append(value)
    return groups.values()


def _vars(eqn: Any) -> list[Any]:
    variable = _jax.Var
    return [a for a in eqn.invars if a.__class__ is variable]


def _outs(body: Any) -> list[Any]:
    return getattr(body, "jaxpr", body).outvars


Node = tuple[int, tuple[int, ...] | None]
"""A value's weight, and the numbers of its operands; None if it is not computed."""


class _Cuts:
    """Minimum cuts of regions; layers of a model have equal ones."""

    def __init__(self, late: _Late) -> None:
        self.late = late
        self.known: dict[tuple[int, tuple[Node, ...]], frozenset[int]] = {}

    def of(self, region: _Region) -> frozenset[Any]:
        """The values with the fewest bytes from which all wanted ones are computed."""
        values = list(region.wanted)
        number = {v: k for k, v in enumerate(values)}
        nodes: list[Node] = []
        for value in values:  # it grows
            maker = region.makers.get(value)
            operands = None if maker is None else _vars(maker)
            for operand in operands or ():
                if operand not in number:
                    number[operand] = len(values)
                    values.append(operand)
            numbers = None if operands is None else tuple(map(number.get, operands))
            nodes.append((self._weight(value), numbers))
        key = len(region.wanted), tuple(nodes)
        if key not in self.known:
            self.known[key] = _minimum_cut(*key)
        return frozenset(values[k] for k in self.known[key])

    def _weight(self, value: Any) -> int:
        """The bytes of a value in hundredths, more of one that is not saved yet."""
        if value in self.late.saved:
            return 0
        weight = 100 * size(value)
        return weight if value in self.late.readers else int(NEW * weight)


def _minimum_cut(wanted: int, nodes: Sequence[Node]) -> frozenset[int]:
    """The numbers of the lightest nodes through which all paths to wanted ones lead.

    Args:
        wanted: How many nodes are wanted, the first ones.
        nodes: All of them.
    """
    first = [k for k, (_, operands) in enumerate(nodes) if operands is None]
    if len(first) == 1 and _is_lightest(first[0], nodes):
        return frozenset(first)
    import networkx  # slow to import, and seldom needed

    graph = networkx.DiGraph()
    for k in range(wanted):
        graph.add_edge((k, "out"), "end")
    for k, (weight, operands) in enumerate(nodes):
        graph.add_edge((k, "in"), (k, "out"), capacity=weight)
        if operands is None:
            graph.add_edge("start", (k, "in"))
        for operand in operands or ():
            graph.add_edge((operand, "out"), (k, "in"))
    if "start" not in graph:
        return frozenset()
    _, (near, _) = networkx.minimum_cut(graph, "start", "end")
    every = range(len(nodes))
    return frozenset(k for k in every if (k, "in") in near and (k, "out") not in near)


def _is_lightest(node: int, nodes: Sequence[Node]) -> bool:
    """Whether a node is lighter than every other one."""
    weight = nodes[node][0]
    return all(k == node or weight < w for k, (w, _) in enumerate(nodes))


# ------------------------------------------------------------------ what is read again
@dataclass(frozen=True, eq=False)
class _Again:
    """Equations to repeat before the first late reader.

    Attributes:
        given: The values that they read, and that are saved.
        eqns: The equations.
        readers: By value that is computed again, the positions of its late readers.
    """

    given: tuple[Any, ...]
    eqns: tuple[Any, ...]
    readers: Mapping[Any, list[int]]


def _again(late: _Late, region: _Region, cut: Set[Any]) -> _Again | None:
    """Returns what to compute again behind a cut; None if that saves nothing."""
    costly: set[Any] = set()
    for value, maker in region.makers.items():
        behind = value not in cut and value not in late.saved
        first = _is_expensive(maker) and not late.early.isdisjoint(maker.outvars)
        if behind and (first or not costly.isdisjoint(_vars(maker))):
            costly.add(value)
    readers = {v: late.readers[v] for v in region.wanted if v in costly}
    needed, given, positions = set(readers), dict[Any, None](), set[int]()
    for value, maker in reversed(region.makers.items()):
        if value not in needed or value in cut:
            continue
        positions.add(late.around.made_at(value))
        needed.update(_vars(maker))
        given |= {a: None for a in _vars(maker) if a in cut or a not in region.makers}
    eqns = tuple(late.around.eqns[k] for k in sorted(positions))
    if not 0 < sum(map(_is_expensive, eqns)) <= MOST:
        return None
    if not any(late.depth.get(v) and size(v) >= LEAST for v in given):
        return None  # a table, such as that of a rotary embedding
    return _Again(tuple(given), eqns, readers)


def _changed(body: Any, _: Device) -> Changed:
    """Computes activations again instead of saving what their gradients read."""
    late, found = _Late.of(body), list[Recomputed]()
    if late is None:
        return body, ()
    before: dict[int, list[Any]] = {}
    instead: dict[int, dict[Any, Any]] = {}
    cuts, barriers = _Cuts(late), dict[Any, Any]()
    for region in _regions(late):
        again = _again(late, region, cuts.of(region))
        if again is None:
            continue
        made, results = _repeated(again, barriers)
        known = 1 + max(map(late.around.made_at, again.given))
        places = [(k, v) for v, ks in again.readers.items() for k in ks if k >= known]
        if not places:
            continue
        before.setdefault(min(k for k, _ in places), []).extend(made)
        for k, value in places:
            instead.setdefault(k, {})[value] = results[value]
        found += [
            Recomputed(_function_of(e), _jax.source_of(e), size(e.outvars[0]))
            for e in again.eqns
            if _is_expensive(e) and not late.early.isdisjoint(e.outvars)
        ]
    if not before:
        return body, ()
    eqns = []
    for k, eqn in enumerate(body.eqns):
        eqns += before.get(k, ())
        eqns.append(_jax.reading(eqn, instead.get(k, {})))
    return _jax.with_equations(body, eqns, late.around.outs), found


def _repeated(
    again: _Again, barriers: dict[Any, Any]
) -> tuple[list[Any], dict[Any, Any]]:
    """New equations that repeat others behind a barrier, and the values they make.

    Args:
        again: What to repeat.
        barriers: Traced barriers by the types of their operands; it grows.
    """
    avals = tuple(a.aval for a in again.given)
    if avals not in barriers:
        barriers[avals] = _jax.trace_placed(
            lambda *given: jax.lax.optimization_barrier(given), avals
        )
    source = again.eqns[0].source_info
    eqns, behind = inserted(barriers[avals], again.given, source)
    values = dict(zip(again.given, behind, strict=True))
    for eqn in again.eqns:
        ins = [a if _jax.is_literal(a) else values[a] for a in eqn.invars]
        outs = [_jax.new_var(v.aval) for v in eqn.outvars]
        values.update(zip(eqn.outvars, outs, strict=True))
        eqns.append(eqn.replace(invars=ins, outvars=outs))
    return eqns, values


PASS = BodyPass(Recomputed, _changed, frozenset({"cuda"}))
