"""The search interface of patterns: the graph, walks, forms, and a log of misses."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from rewriter.algebra.canonicalize import (
    LAYOUT,
    TRANSPARENT,
    Evaluator,
    is_local,
    is_lossless,
)
from rewriter.algebra.normal_form import TRUE, Algebra, OverBudget, Poly
from rewriter.algebra.template import neighbourhood
from rewriter.find.reading import Refused
from rewriter.find.recomputable import is_allowed
from rewriter.find.region import Place, Regions
from rewriter.find.sliced_operands import layers
from rewriter.program.counted_loops import LOOPS, counted
from rewriter.program.graph import Graph, Node, Scope
from rewriter.program.lines import is_of_gradient, line_of
from rewriter.support.assumptions import ASSUMPTIONS


class RegionEvaluator(Evaluator):
    """Evaluates a region whose replacement will stand at a place."""

    place: Place


@dataclass(eq=False)
class Finder:
    """The state of one search over one program.

    With ``fast``, attention's result in rows without keys may change. ``assumed`` names
    facts that need no proof, see `rewriter.support.assumptions`. Gathers in ``gathers``
    are read as pages of the gathered array. ``pieces`` are values that are always
    leaves.
    """

    graph: Graph
    algebra: Algebra
    regions: Regions
    fast: bool = False
    assumed: frozenset[str] = frozenset()
    gathers: frozenset[int] = frozenset()
    pieces: frozenset[int] = frozenset()
    misses: dict[tuple[str, int], tuple[Node, Refused]] = field(default_factory=dict)
    found: dict[tuple[str, int], Any] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict)
    _known_empty: dict[str, set[int]] = field(default_factory=dict)
    _around: dict[int, int] = field(default_factory=dict)
    _asked: dict[Any, Any] = field(default_factory=dict)
    _names: dict[int, dict[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = Evaluator(self.graph, self.algebra)
        self._layers = (*layers(self.graph), *self.pieces)

    def evaluator(
        self,
        value: int,
        *,
        names: Mapping[int, Any] | None = None,
        inside: frozenset[int] = frozenset(),
        roots: Iterable[int] | None = None,
        **options: Any,
    ) -> RegionEvaluator:
        """An evaluator whose leaves are available where a value is computed.

        Args:
            value: The value.
            names: Leaf values, and their names.
            inside: Contractions that are expanded.
            roots: Values that the op computes first, such as scores. Any value that
                does not depend on them is a side value. None: there are no side values.
            **options: More options of `Evaluator`.
        """
        node = self.graph.node_of(value)
        place = self.regions.place(node.scope)
        self.algebra.work = 0
        self.algebra.set_precision(self.graph.dtype(value))
        if roots is not None:
            options["core"] = self.below(frozenset(roots), value).__contains__
        ev = RegionEvaluator(
            self.graph,
            self.algebra,
            usable=self.regions.usable(place),
            names={**self._leaves_at(place), **(names or {})},
            inside=inside | self.gathers,
            at_hand=place.defined.__contains__,
            assumed=self.assumed,
            **options,
        )
        ev.place = place
        return ev

    def below(self, roots: frozenset[int], last: int) -> frozenset[int]:
        """The roots and all values computed from them, up to a last one.

        Values are numbered in the order of the program.
        """
        key = ("below", roots, last)
        if key not in self.cache:
            found, queue = set(roots), list(roots)
            while queue:
                for node in self.graph.users(queue.pop()):
                    new = [v for v in node.outs if v <= last and v not in found]
                    found.update(new)
                    queue += new
            self.cache[key] = frozenset(found)
        return self.cache[key]

    def float_carries(self, results: Iterable[int]) -> frozenset[int]:
        """Non-integer carries of the scans that make the results."""
        found: set[int] = set()
        for node in map(self.graph.node_of, results):
            parts = counted(node)
            (scope,) = node.scope.children[node.position]
            last = parts.n_consts + parts.n_carry
            carried = parts.body.invars[parts.n_consts : last]
            found |= {scope.env[v] for v in carried}
        floating = (
            v for v in found if jnp.issubdtype(self.graph.dtype(v), np.floating)
        )
        return frozenset(floating)

    def _leaves_at(self, place: Place) -> dict[int, int]:
        """Values that are always leaves at a place: layers of a stack, pieces."""
        key = id(place.scope)
        if key not in self._names:
            here = (v for v in self._layers if v in place.defined)
            self._names[key] = {v: v for v in here}
        return self._names[key]

    def at_pieces(self, pieces: frozenset[int]) -> Finder:
        """The same search, with more values that are always leaves."""
        return dataclasses.replace(self, pieces=pieces, _names={})

    def layout_leaves(self, ev: RegionEvaluator, *values: int) -> set[int]:
        """Leaves of an evaluation that looks through layout and scale only."""
        names = self._leaves_at(ev.place)
        probe = RegionEvaluator(
            self.graph,
            self.algebra,
            usable=ev.usable,
            names=names,
            inside=self.gathers,
        )
        probe.loops = ev.loops
        for value in values:
            try:
                probe.poly(value, probe.indices(value), LAYOUT)
            except OverBudget:
                continue
        return probe.leaf_values

    def number(self, value: int) -> float | None:
        """The number that a value holds at every position, or None."""
        return self._numbers.number(value)

    def local(self, node: Node) -> bool:
        """Whether an equation can be inside a region."""
        return is_local(node)

    def least(self, value: int) -> float:
        """A lower bound of an integer, such as a loop counter; or -inf."""
        try:
            around = self.evaluator_around(value)
            return self.algebra.bounds(around.poly(value, ()))[0]
        except OverBudget:
            return -math.inf

    def evaluator_around(self, value: int) -> Evaluator:
        """An evaluator of a value and what it is made of, at steps of loops around it.

        Raises:
            OverBudget: If a loop around it has no forms.
        """
        node = self.graph.node_of(value)
        entered = (s for s in self.loops if value in s.env.values())
        scope = node.scope if node is not None else next(entered, None)
        ev = Evaluator(self.graph, self.algebra)
        while scope is not None and scope.parent is not None:
            if scope in self.loops:
                ev.enter(self.loops[scope])
            scope = scope.parent
        return ev

    @functools.cached_property
    def loops(self) -> dict[Scope, Node]:
        """The bodies of loops that count their steps, and the loops."""
        loops = [n for n in self.graph.nodes if n.prim in LOOPS and counted(n)]
        return {n.scope.children[n.position][0]: n for n in loops}

    @functools.cached_property
    def steps(self) -> frozenset[int]:
        """Values that scans slice from arrays, one at each step."""
        found: set[int] = set()
        for scope, node in self.loops.items():
            parts = counted(node)
            given = parts.body.invars[parts.n_consts + parts.n_carry :]
            found |= {scope.env[v] for v in given}
        return frozenset(found)

    def require_proved(self, ev: Evaluator) -> None:
        """Refuses a form that holds only under an assumption that is not allowed.

        Raises:
            Refused: With the option that allows it.
        """
        for name, text in ev.unproved.items():
            raise Refused(
                "assumption",
                f"{text}, which is not proved",
                score=0.85,
                suggestion=f"if {ASSUMPTIONS[name]}: assume=({name!r},)",
            )

    def own_form(self, ev: RegionEvaluator, p: Poly, axes: Sequence[int]) -> Poly:
        """A form whose choices use the program's own booleans."""
        alg, out = self.algebra, {}
        for (flag, mono), c in p.items():
            factors = [
                (alg.atom("ind", self.own_flag(ev, alg.defs[a][1], axes)), e)
                if alg.kind(a) == "ind"
                else (a, e)
                for a, e in mono
            ]
            own = self.own_flag(ev, flag, axes) if flag != TRUE else flag
            out = alg.add(out, {(own, alg.monomial(factors)): c})
        return out

    def own_flag(self, ev: RegionEvaluator, flag: int, axes: Iterable[int]) -> int:
        """A boolean function in terms of the program's own booleans, where possible.

        Args:
            ev: The evaluator of the form.
            flag: The boolean function.
            axes: The indices that the booleans may have.

        Returns:
            The same function. It is one value of the program, if one equals it or its
            negation. Otherwise each literal is replaced by a value of the program.
        """
        alg = self.algebra

        def own(b: int) -> int | None:
            free = frozenset().union(*map(alg.free, alg.bools[b][0]))
            found = []
            for value, args in alg.own.get(b, ()):
                used = frozenset().union(*map(alg.index_ids, args))
                if value in ev.place.defined and used <= known:
                    # Along an axis on which it does not depend, one position is it.
                    at = dict.fromkeys(used - free, ("k", 0))
                    found.append((len(at), value, args, at))
            if not found:
                return None
            _, value, args, at = min(found, key=lambda f: f[0])
            first = tuple(alg.subst_index(a, at) for a in args) if at else args
            return alg.literal(alg.atom("leaf", value, first))

        known = frozenset(axes)
        whole, negated = own(flag), own(alg.negate(flag))
        if whole is not None or negated is not None:
            return alg.negate(negated) if whole is None else whole
        literals = []
        for atom in alg.bools[flag][0]:
            literal = alg.literal(atom)
            yes, no = own(literal), own(alg.negate(literal))
            literals.append(
                yes if yes is not None else literal if no is None else alg.negate(no)
            )
        made = alg.of_literals(flag, literals)
        anew = not all(is_allowed(alg, a) for a in alg.bools[made][0])
        if anew and self._learns_own(flag):
            return self.own_flag(ev, flag, known)
        return made

    def _learns_own(self, flag: int) -> bool:
        """Whether a boolean of the program is found that equals a function.

        It has it under other indices. A part of a mask that depends on no key stands
        before the sum over the keys, which renames those of the rest alone.
        """
        alg, before = self.algebra, len(self.algebra.own.get(flag, ()))
        ids = frozenset().union(*map(alg.free, alg.bools[flag][0]))
        for other in list(alg.own):
            if len(alg.bools[other][0]) != len(alg.bools[flag][0]):
                continue
            theirs = frozenset().union(*map(alg.free, alg.bools[other][0]))
            old, new = sorted(theirs - ids), sorted(ids - theirs)
            if len(old) != 1 or [alg.sizes[i] for i in old] != [
                alg.sizes[i] for i in new
            ]:
                continue
            if alg.subst_bool(other, dict(zip(old, new, strict=True))) == flag:
                break  # the substitution has noted it
        return len(alg.own.get(flag, ())) > before

    def uncast(self, value: int) -> int:
        """The value below lossless float casts."""
        node = self.graph.node_of(value)
        while node is not None and (
            node.prim == "copy"
            or (
                node.prim == "convert_element_type"
                and is_lossless(self.graph.dtype(node.ins[0]), self.graph.dtype(value))
            )
        ):
            value = node.ins[0]
            node = self.graph.node_of(value)
        return value

    def unscaled(self, value: int) -> int:
        """The value below lossless casts, layout, products with numbers and zeros."""
        for _ in range(12):
            value = self.uncast(value)
            node = self.graph.node_of(value)
            if node is None or not node.ins:
                return value
            if node.prim in ("mul", "add", "div"):
                numbers = [self.number(i) for i in node.ins]
                known = [n is not None for n in numbers]
                if node.prim == "mul" and any(known):
                    value = node.ins[1 if known[0] else 0]
                elif node.prim == "add" and 0 in numbers:
                    value = node.ins[1 if numbers[0] == 0 else 0]
                elif node.prim == "div" and known[1]:
                    value = node.ins[0]
                else:
                    return value
            elif node.prim in ("neg", "transpose", "reshape", "squeeze", "rev") or (
                node.prim in TRANSPARENT and len(node.ins) == 1
            ):
                value = node.ins[0]
            else:
                return value
        return value

    def largest_number(self, value: int, limit: int = 60) -> float:
        """The largest number in a value's computation, perhaps infinity."""
        find = functools.partial(self._largest_number, value, limit)
        return self.graph.known(f"largest of {limit}", value, find)

    def _largest_number(self, value: int, limit: int) -> float:
        found, seen, queue = 0.0, {value}, [value]
        while queue and len(seen) < limit:
            current = queue.pop(0)
            const = self.graph.constants.get(current)
            if const is not None and np.issubdtype(
                self.graph.dtype(current), np.floating
            ):
                found = max(found, _largest(const))
            node = self.graph.node_of(current)
            for i in node.ins if node is not None and self.local(node) else ():
                if i not in seen:
                    seen.add(i)
                    queue.append(i)
        return found

    def known_empty(self, op: str, anchor: Node) -> bool:
        """Whether equal surroundings held no match before. Ask before evaluating."""
        self._asked[op, anchor.outs[0]] = anchor
        known = self._known_empty.get(op)
        return bool(known) and self._surroundings(anchor) in known

    def remember_outcome(self, op: str, anchor: Node, found: bool) -> None:
        """Remembers surroundings that held no match."""
        asked = self._asked.pop((op, anchor.outs[0]), None)
        if asked is not None and not found:
            known = self._known_empty.setdefault(op, set())
            known.add(self._surroundings(anchor))

    def _surroundings(self, anchor: Node) -> int:
        """A number that equal surroundings share; several ops ask for one anchor."""
        around = self._around.get(anchor.outs[0])
        if around is None:
            around = self._around[anchor.outs[0]] = neighbourhood(self.graph, anchor)
        return around

    def done(self, op: str, value: int) -> bool:
        """Whether a value is already part of a verified match of an op."""
        return (op, value) in self.found

    def missed(
        self, op: str, anchor: Node, refusal: Refused, value: int | None = None
    ) -> None:
        """Notes the best attempt at an anchor.

        Attempts at equations of a gradient are not noted: nobody wrote them.

        Args:
            op: The op's name.
            anchor: The equation where the attempt began.
            refusal: Why it failed.
            value: What was to be the op's result, if known.
        """
        result = None if value is None else self.graph.node_of(value)
        if any(n is not None and is_of_gradient(n) for n in (anchor, result)):
            return
        refusal.__traceback__ = refusal.__context__ = None  # they hold the graph
        key = (op, anchor.outs[0])
        old = self.misses.get(key)
        if old is None or refusal.score > old[1].score:
            self.misses[key] = (anchor, refusal)

    def where(self, node: Node) -> str:
        """The line of an equation, or of the call around it."""
        return line_of(node)


def _largest(const: Any) -> float:
    """The largest of some numbers without their signs; 0 for NaN."""
    if np.shape(const) == ():  # most are one number
        number = abs(float(np.asarray(const)))
        return number if number >= 0 else 0.0
    sizes = np.abs(np.asarray(const, np.float64))
    return float(np.max(sizes, initial=0.0, where=~np.isnan(sizes)))
