"""Attention with any function of its scores, as the program computes it.

Formula    out[b,t,n,e] = Σ_s p v[b,s,k,e], with p the softmax over s of
           f(Σ_h q[b,t,n,h] k[b,s,k,h], t, s, arrays)
Looks like attention, with other equations between the first contraction and the
           exponential than attention knows.
Must hold  these equations compute each number from the contraction at its own place,
           from positions and from arrays. What is above them is a softmax of their
           result: that is proved. They themselves are taken over as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from rewriter.algebra.canonicalize import (
    LAYOUT_PRIMITIVES,
    LOCAL,
    TRANSPARENT,
    is_local,
    is_lossless,
)
from rewriter.algebra.normal_form import TRUE, Index, OverBudget, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Operand,
    Reading,
    Refused,
    leaves_of,
    operand,
    split_digits,
)
from rewriter.find.sieve import Step
from rewriter.ops.score import ELEMENTWISE, NAMED
from rewriter.patterns.attention.assembly import NAME as GENERAL
from rewriter.patterns.attention.assembly import assembled
from rewriter.patterns.attention.axes import name_axes
from rewriter.patterns.attention.read import ANCHORS, DOT, later_forms
from rewriter.patterns.attention.score_of import Function, ScoreReader
from rewriter.patterns.attention.score_place import product_place
from rewriter.patterns.attention.softmax import (
    Scores,
    Softmax,
    contracted,
    softmax_parts,
)
from rewriter.program.graph import Node

NAME = "scored_attention"

FILLS = 1e3
"""Numbers from here on, below zero, hide a score where a choice takes them."""

SUMS = frozenset({"reduce_sum", "dot_general"})
"""What may add up weights."""

ATTEMPTS = 8
"""Products that are read in vain in one program; reading one is slow."""

NEAR = 60
"""The most values above what is added to scores that are looked at."""

WALK = 400
"""The most values between products and a softmax."""

BETWEEN = LOCAL | ELEMENTWISE | NAMED.keys()
"""What may lie between products and the softmax."""

GUARDS = frozenset({"is_finite", "select_n", "clamp"})
"""What may give a row of nothing but -inf a number after all."""

STEEP = frozenset({
    "log", "log1p", "pow", "rsqrt", "exp", "exp2", "expm1", "atanh", "tan", "lgamma",
    "digamma", "erf_inv", "sinh", "cosh", "acosh",
})  # fmt: skip
"""Functions that may be infinite where what they are of is not."""


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the softmax around an exponential."""
    products = _products(find, anchor.ins[0])
    if not products or find.known_empty(NAME, anchor):
        return
    if not any(True for _ in find.regions.below(anchor.outs[0], SUMS, NEAR)):
        return  # nothing divides by a sum of weights
    below = [
        (pv, side)
        for pv, side in find.regions.below(anchor.outs[0], DOT)
        if pv.params["dimension_numbers"][0][0]
        and pv not in products
        and find.number(pv.ins[1 - side]) is None
    ]
    known = [
        (pv, side)
        for pv, side in below
        if any(find.done(GENERAL, v) for v in later_forms(find, pv))
    ]
    if known and len(below) > 1:
        return  # differentiated: its gradients are found as attention's
    below.sort(key=lambda found: found[0].outs[0])  # the program's order
    for pv, side in known or below:
        failed = find.cache.get(NAME, 0)
        if failed >= ATTEMPTS:
            return
        find.cache[NAME] = failed + 1
        before = len(find.found)
        yield from _around(find, anchor, products, pv, side)
        if len(find.found) > before:
            find.cache[NAME] = failed
            return


def _products(find: Finder, value: int) -> list[Node]:
    """Contractions of which an exponent is computed, nearest first."""
    found: list[Node] = []
    seen, queue = {value}, [value]
    while queue and len(seen) < WALK:
        node = find.graph.node_of(queue.pop(0))
        if node is None:
            continue
        if node.prim == "dot_general" and not is_local(node):
            if node not in found:
                found.append(node)
        elif node.prim in BETWEEN:
            new = [i for i in node.ins if i not in seen]
            seen.update(new)
            queue += [i for i in new if i not in find.graph.constants]
    return found


def _around(
    find: Finder, anchor: Node, products: list[Node], pv: Node, side: int
) -> Iterator[Reading]:
    """Readings of one product of weights and values, by each product of scores."""
    miss: Refused | None = None
    for product in products:
        candidates = _candidates(find, anchor, product)
        for scored in candidates:
            for value in later_forms(find, pv):
                known = find.done(GENERAL, value)
                if known and not _adds_of_places(find, scored, product):
                    return
                for how in ("full", "soft"):
                    given = (scored, candidates[-1])
                    region = Region(find, value, *given, product, (pv, side), how)
                    try:
                        yield region.reading(known)
                    except Refused as refusal:
                        if miss is None or refusal.score > miss.score:
                            miss = refusal.with_traceback(None)
                    except (OverBudget, RecursionError) as error:
                        miss = miss or Refused("budget", str(error), score=0.3)
                    if find.done(NAME, value):
                        return
    if miss is not None and miss.score > 0.5:
        find.missed(NAME, anchor, miss)


def _adds_of_places(find: Finder, scored: int, product: Node) -> bool:
    """Whether numbers are added to scores that are computed of positions, or picked.

    Attention takes them as an array with a number for each query and key.
    """
    graph = find.graph
    core = find.below(frozenset(product.outs), scored)
    queue, seen = [scored], {scored}
    while queue:
        node = graph.node_of(queue.pop())
        if node is None or node is product:
            continue
        for i in node.ins:
            if i in core:
                if i not in seen:
                    seen.add(i)
                    queue.append(i)
            elif node.prim in ("add", "sub") and _is_of_places(find, i):
                return True
    return False


def _is_of_places(find: Finder, value: int) -> bool:
    """Whether a value with two axes is made of positions or of a table's numbers."""
    graph = find.graph
    if sum(n != 1 for n in graph.shape(value)) < 2:
        return False
    queue, seen = [value], {value}
    while queue and len(seen) < NEAR:
        node = graph.node_of(queue.pop(0))
        if node is None:
            continue
        if node.prim in ("iota", "gather"):
            return True
        new = [i for i in node.ins if i not in seen]
        seen.update(new)
        queue += new
    return False


def _candidates(find: Finder, anchor: Node, product: Node) -> list[int]:
    """Values that may be the function's result: without what hides it, then with.

    Empty if nothing is computed of the products but what attention knows.
    """
    graph = find.graph
    core = find.below(frozenset(product.outs), anchor.outs[0])
    value = anchor.ins[0]
    if value not in core:
        return []
    value = _unshifted(find, value, core)
    whole = value
    while True:
        inner = _unhidden(find, value, core)
        if inner is None:
            break
        value = inner
    if graph.node_of(value) is product:
        return []
    return list(dict.fromkeys((value, whole)))


def _unshifted(find: Finder, value: int, core: frozenset[int]) -> int:
    """The value of which an exponent takes the largest of its row."""
    while True:
        node = find.graph.node_of(value)
        if node is None or node.ins[0] not in core:
            return value
        if node.prim == "sub" and find.graph.shape(node.ins[0]) == find.graph.shape(
            value
        ):
            shift = node.ins[1]
            if shift in core and _is_maximum(find, shift):
                return node.ins[0]
            return value
        if node.prim not in TRANSPARENT | LAYOUT_PRIMITIVES and not _is_widening(
            find, node
        ):
            return value
        value = node.ins[0]


def _is_maximum(find: Finder, value: int) -> bool:
    """Whether a value is made of a maximum of a row, near above it."""
    queue, seen = [value], {value}
    while queue and len(seen) < 24:
        node = find.graph.node_of(queue.pop(0))
        if node is None:
            continue
        if node.prim in ("reduce_max", "argmax"):
            return True
        new = [i for i in node.ins if i not in seen]
        seen.update(new)
        queue += new
    return False


def _is_widening(find: Finder, node: Node) -> bool:
    graph = find.graph
    return node.prim == "convert_element_type" and is_lossless(
        graph.dtype(node.ins[0]), graph.dtype(node.outs[0])
    )


def _unhidden(find: Finder, value: int, core: frozenset[int]) -> int | None:
    """What a choice by a mask hides, or the same value in another layout, or None."""
    node = find.graph.node_of(value)
    if node is None:
        return None
    if node.prim in TRANSPARENT | LAYOUT_PRIMITIVES or _is_widening(find, node):
        return node.ins[0] if node.ins[0] in core else None
    if node.prim == "concatenate":  # with scores of sinks
        pieces = [i for i in node.ins if i in core]
        return pieces[0] if len(pieces) == 1 else None
    if node.prim != "select_n" or len(node.ins) != 3 or node.ins[0] in core:
        return None
    inside = [i for i in node.ins[1:] if i in core]
    fills = [find.number(i) for i in node.ins[1:] if i not in core]
    if len(inside) != 1 or None in fills or fills[0] > -FILLS:
        return None
    return inside[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """One candidate: a result, the function's value, and the contractions.

    Attributes:
        find: The search.
        value: The result.
        scored: The function's value, of which there is a softmax.
        hidden: The same where masks around it have hidden some.
        product: The contraction of queries with keys.
        weighed: The contraction of weights with values, and the side of the weights.
        how: ``"full"``; ``"soft"`` keeps finite fills that are added as a bias.
    """

    find: Finder
    value: int
    scored: int
    hidden: int
    product: Node
    weighed: tuple[Node, int]
    how: str

    def reading(self, known: bool) -> Reading:
        """Returns the reading.

        Args:
            known: Whether the result is attention with a bias. Then only a function
                that needs no array of all queries and keys is worth more.

        Raises:
            Refused: If the region is no softmax of a function of products.
            OverBudget: If a form grows too large.
        """
        find, alg = self.find, self.find.algebra
        ev = self._evaluator()
        args = ev.indices(self.value)
        form = ev.poly(self.value, args)
        whole = args
        form, args = split_digits(alg, form, args)
        ev.outer = frozenset().union(*map(alg.index_ids, (*whole, *args)))
        softmax, leaf = self._softmax(ev, form, args)
        function, softmax = self._function(softmax, alg.defs[leaf][2])
        if known and (function.dense or not function.places):
            raise Refused("bias", "its bias is an array of the program", score=0.1)
        self._require_one_meaning(softmax, function)
        general = assembled(softmax)
        reading = self._with_function(general, function, leaf)
        if any(ev.varies(value) for value in leaves_of(reading)):
            raise Refused("loop", "a value of one step of a loop is read", score=0.4)
        find.require_proved(ev)
        return reading

    def _evaluator(self) -> RegionEvaluator:
        """What puts the result into its normal form, the function's value given."""
        find, (pv, side) = self.find, self.weighed
        product = self.product.outs[0]
        made = frozenset((product, self.scored))

        def from_scores(v: int) -> bool:
            return find.regions.depends(v, self.scored, 120)

        return find.evaluator(
            self.value,
            names={self.scored: self.scored},
            inside=made | frozenset(pv.outs),
            roots=made,
            full_sides=frozenset({(pv.outs[0], side)}),
            soft_fills=self.how == "soft",
            in_pieces=from_scores,
            filled_rows=True,
        )

    def _softmax(
        self, ev: RegionEvaluator, form: Poly, args: tuple[Index, ...]
    ) -> tuple[Softmax, int]:
        """The softmax, and the function's value in it; the contraction is not read."""
        find, alg, (pv, side) = self.find, self.find.algebra, self.weighed
        values = find.layout_leaves(ev, pv.ins[1 - side])
        parts = softmax_parts(alg, form, values, self.how == "soft")
        leaf, bias = None, {}
        for atom, c in parts.exps:
            mono = alg.defs[atom][1] if alg.kind(atom) == "exp" else ()
            names = {alg.defs[a][1] for a in alg.leaves(atom)}
            if self.scored not in names:
                if alg.kind(atom) != "exp":
                    text = "the weights are multiplied by another factor"
                    raise Refused("weights", text)
                bias = alg.add(bias, {(TRUE, mono): float(c)})
            elif len(mono) == 1 and mono[0][1] == 1 and alg.kind(mono[0][0]) == "leaf":
                if c != 1 or leaf is not None:
                    raise Refused("scores", "exponents are a multiple of the scores")
                leaf = mono[0][0]
            else:
                raise Refused("scores", "there is no softmax of the scores alone")
        if leaf is None:
            raise Refused("scores", "there is no softmax of the scores", score=0.3)
        softmax = Softmax(
            find=find,
            ev=ev,
            value=self.value,
            args=args,
            form=form,
            parts=parts,
            qk=(),
            bias=bias,
            scores=frozenset((self.scored, self.product.outs[0])),
            products=(self.weighed,),
            joined={},
            some=None,
        )
        return softmax, leaf

    def _function(
        self, softmax: Softmax, args: tuple[Index, ...]
    ) -> tuple[Function, Softmax]:
        """The function of scores, and the softmax with its contraction."""
        find, ev = self.find, softmax.ev
        product = self.product.outs[0]
        core = find.below(frozenset((product,)), self.scored)
        at = product_place(ev, self.scored, args, product, core)
        sides = find.layout_leaves(ev, *self.product.ins[:2])
        softmax = dataclasses.replace(
            softmax, qk=(self._contraction(softmax, product, at, sides),)
        )
        axes = name_axes(softmax)
        reader = ScoreReader(ev, axes, product, at, core)
        return reader.function(self.scored, args), softmax

    def _contraction(
        self, softmax: Softmax, product: int, at: tuple[Index, ...], sides: set[int]
    ) -> Scores:
        """The contraction of queries with keys."""
        form = softmax.ev.poly(product, at)
        if len(form) == 1:
            ((flag, mono), c) = next(iter(form.items()))
            keys = softmax.parts.s
            if flag == TRUE:
                found = contracted(softmax.alg, mono, float(c), sides, keys)
                if found is not None and not found.softcap:
                    return found
        raise Refused("scores", "no contraction of queries and keys is read", score=0.4)

    def _require_one_meaning(self, softmax: Softmax, function: Function) -> None:
        """Refuses a row of nothing but -inf, where the program may give a number.

        A kernel gives NaN there. So does a softmax, unless something behind the
        function guards it.

        Raises:
            Refused: If the function may be infinite, and there is a guard.
        """
        parts = softmax.parts
        guarded = parts.sink or parts.drop_flag != TRUE or parts.zero_rows
        guarded = guarded or any(map(self._guards, self._behind()))
        if not guarded:
            return
        steep = function.score.primitives & STEEP
        if steep or math.isinf(self._loudest(function)):
            text = "a row of -inf alone may be guarded behind a function of scores"
            raise Refused("rows", text, score=0.7)

    def _behind(self) -> list[Node]:
        """The equations behind the function's value and its masks."""
        graph = self.find.graph
        later = self.find.below(frozenset((self.hidden,)), self.value)
        found: dict[int, Node] = {}
        queue = [self.value]
        while queue:
            value = queue.pop()
            node = graph.node_of(value)
            if value != self.hidden and value not in found and node is not None:
                found[value] = node
                queue += [i for i in node.ins if i in later]
        return list(found.values())

    def _guards(self, node: Node) -> bool:
        """Whether an equation behind the function may replace NaN or zero."""
        if node.prim == "max":
            return -math.inf not in map(self.find.number, node.ins)
        return node.prim in GUARDS

    def _loudest(self, function: Function) -> float:
        """The largest number among those of a function; infinite if it divides."""
        found = 0.0
        for step in function.score.steps:
            for k, ref in enumerate(step.ins):
                if ref.kind == "number":
                    found = max(found, abs(float(ref.value)))
                elif step.name == "div" and k == 1:
                    return math.inf
        return found

    def _with_function(
        self, general: Reading, function: Function, leaf: int
    ) -> Reading:
        """The reading by the function, proved with the function's value given."""
        alg, groups = general.algebra, general.operands["q"].parts[0][1]
        if "alibi" in general.operands:
            raise Refused("bias", "a slope is added behind the function of scores")
        (_, (_, s, _, _)) = general.operands["k"].parts[0]
        b, t, n, _ = groups
        value = operand(alg.of_atom(leaf), b, n, t, s, full=False)
        nothing = {
            name: Operand((({}, general.operands[name].parts[0][1]),), dtype="float32")
            for name in "qk"
        }
        if "bias" in general.operands:
            raise Refused("bias", "a bias is added behind the function of scores")
        shared = {n: x for n, x in general.operands.items() if n != "scale_factor"}
        proof = dataclasses.replace(
            general, operands={**shared, **nothing, "bias": value}
        )
        return dataclasses.replace(
            general,
            op=NAME,
            operands={**general.operands, **function.operands},
            params={**general.params, "score": function.score},
            proof=proof,
        )


PATTERN = ReaderPattern(
    NAME, ANCHORS, propose, (Step(DOT, BETWEEN), Step(ANCHORS), Step(DOT))
)
