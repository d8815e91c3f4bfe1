"""Computes cheap values again in backward loops, so that forward loops stack less.

    forward loop                           backward loop
    g = x·w   s = silu g   h = s · u       reads g, s, u, h
    stacks g, s, u, h                  →   stacks g, u, and s and h are computed again

Differentiation makes a loop stack every value that the loop of its gradients reads. XLA
would compute a cheap value again where it is read, but does not look across two loops.
So this pass decides which values are stacked: those of a minimum cut. On one side are
inputs and expensive values, such as products; on the other, what the gradients read. An
edge through a value is as wide as its bytes. Values behind the cut are computed again
by the same equations, in the loop that reads them.

Source: reverse mode with values computed again is Griewank's and Walther's (Algorithm
799, 2000); PyTorch's AOTAutograd shows that the fewest saved bytes are a minimum cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from jax.extend.core import jaxpr_as_fun

from rewriter import _jax
from rewriter.ops.device import Device
from rewriter.program.equations import live
from rewriter.program.loops import Loop, loops_in, traced
from rewriter.rewrite.beside_sites import BodyPass, Change, Changed
from rewriter.rewrite.passes.flops import SITES, flops_of, is_sized, size
from rewriter.support.sizes import size_text

CHEAP = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
    "atanh", "broadcast_in_dim", "cbrt", "ceil", "clamp", "concatenate", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "exp_neg_sq", "expand_dims", "expm1", "floor",
    "ge", "gt", "imag", "integer_pow", "iota", "is_finite", "le", "log", "log1p",
    "logaddexp", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg",
    "nextafter", "not", "one_minus_square", "or", "pad", "pow", "real",
    "reduce_precision", "rem", "reshape", "rev", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
    "sinh", "slice", "split", "sqrt", "square", "squeeze", "stop_gradient", "sub",
    "tan", "tanh", "transpose", "xor",
})  # fmt: skip
"""Primitives that XLA fuses with the readers of their results."""

LIGHT, MOVED = 16.0, 3.0
"""The most operations per byte, and bytes moved per byte of the result, of a site that
costs about as much as reading its operands, as norms do."""

NEW, GIVEN = 1.02, 0.25
"""The weight of a byte of two kinds of values. NEW: not stacked yet; slightly more than
1, so that no value replaces another of equal size. GIVEN: an input of the forward loop
for each turn, which is only read again."""

LEAST = 1 << 20
"""Programs that stack fewer bytes stay as they are."""


@dataclass(frozen=True)
class Stacks(Change):
    """The values that a loop stacks for the loop of its gradients.

    Attributes:
        turns: The number of turns.
        before: Bytes of all turns, as written.
        after: Bytes as rewritten.
        again: The number of values that are computed again.
    """

    by: ClassVar[str] = "recompute"
    turns: int
    before: int
    after: int
    again: int

    @classmethod
    def row(cls, same: Sequence[Self]) -> tuple[str, ...]:
        """Returns the turns, both sizes, and how many values are computed again."""
        after, before = (
            size_text(sum(sizes))
            for sizes in ([s.after for s in same], [s.before for s in same])
        )
        return (
            f"×{sum(s.turns for s in same)} in scan",
            f"{after} stacked for gradients, not {before}",
            f"{sum(s.again for s in same)} values of a turn are computed again where "
            "they are read",
        )


def _changed(body: Any, device: Device) -> Changed:
    """Computes cheap values again instead of stacking them for gradients."""
    loops = loops_in(body)
    for pair in _pairs(body, loops) if len(loops) > 1 else ():
        cut = _cut(pair)
        if cut is not None:
            after, more = _changed(_with_cut(body, pair, cut.values), device)
            return after, (cut.stacks, *more)
    return body, ()


@dataclass(frozen=True, eq=False)
class _Pair:
    """A loop, and the loop that reads its stacks.

    Attributes:
        forward: The first loop.
        backward: The other one.
        read: By the place of a value among the forward's results, the places of its
            stack among the backward's operands.
        anyway: Places of results whose stacks other equations read too.
    """

    forward: Loop
    backward: Loop
    read: Mapping[int, tuple[int, ...]]
    anyway: frozenset[int]


# ------------------------------------------------------------------ what is stacked
def _pairs(body: Any, loops: Sequence[Loop]) -> Iterable[_Pair]:
    """Loops, each with the only one that reads its stacks turn by turn."""
    results = getattr(body, "jaxpr", body).outvars
    for first in loops:
        stacks = {
            v: k
            for k, v in enumerate(first.eqn.outvars)
            if k >= first.n_carry and not _jax.is_drop(v)
        }
        reading = [
            loop
            for loop in loops
            if loop is not first and not stacks.keys().isdisjoint(_vars(loop.xs))
        ]
        for second in reading:
            if second.length != first.length or _jax.consts_of(first.body):
                continue
            read: dict[int, list[int]] = {}
            for at, atom in enumerate(second.eqn.invars):
                if at < second.first or _jax.is_literal(atom) or atom not in stacks:
                    continue
                if not _jax.is_literal(first.outs[stacks[atom]]):
                    read.setdefault(stacks[atom], []).append(at)
            elsewhere = {a for a in results if not _jax.is_literal(a)}
            for k, eqn in enumerate(body.eqns):
                inputs = eqn.invars
                if k == second.position:
                    inputs = inputs[: second.first]
                elsewhere.update(_vars(inputs))
            anyway = frozenset(stacks[v] for v in elsewhere & stacks.keys())
            places = {k: tuple(at) for k, at in read.items()}
            yield _Pair(first, second, places, anyway)


def _vars(atoms: Iterable[Any]) -> list[Any]:
    return [a for a in atoms if not _jax.is_literal(a)]


# ---------------------------------------------------------------------- what to stack
@dataclass(frozen=True)
class _Cut:
    """Variables of the forward's body to stack or pass on, and the bytes saved."""

    values: tuple[Any, ...]
    stacks: Stacks


def _cut(pair: _Pair) -> _Cut | None:
    """The values to stack, or to pass to the backward; None if that saves nothing."""
    import networkx  # slow to import; most programs stack nothing

    forward = pair.forward
    if not isinstance(forward.length, int) or not is_sized(forward.inputs):
        return None
    makers = {v: e for e in forward.eqns for v in e.outvars}
    position = dict(zip(forward.inputs, range(len(forward.inputs)), strict=True))
    wanted = {forward.outs[k] for k in pair.read}
    stacked = set(_vars(forward.outs[k] for k in pair.anyway))
    graph = networkx.DiGraph()
    todo, seen = list(wanted), set(wanted)
    for value in wanted:
        graph.add_edge((value, "out"), "end")
    while todo:
        value = todo.pop()
        weight = _weight(pair, value, position.get(value), wanted, stacked)
        graph.add_edge((value, "in"), (value, "out"), capacity=weight)
        maker = makers.get(value)
        if maker is None or not _cheap(maker):
            graph.add_edge("start", (value, "in"))
            continue
        for operand in _vars(maker.invars):
            graph.add_edge((operand, "out"), (value, "in"))
            if operand not in seen:
                seen.add(operand)
                todo.append(operand)
    if "start" not in graph:  # no value is costly or an input
        return None
    _, (near, _) = networkx.minimum_cut(graph, "start", "end")
    cut = [v for v in seen if (v, "in") in near and (v, "out") not in near]
    recomputed = [
        v for v in cut if v not in stacked and not _is_given(forward, position.get(v))
    ]
    turns = forward.length
    before, after = (turns * sum(map(size, x)) for x in (wanted - stacked, recomputed))
    if before - after < LEAST:
        return None
    order = {v: k for k, v in enumerate([*forward.inputs, *makers])}
    values = tuple(sorted(cut, key=order.__getitem__))
    where, again = _jax.source_of(forward.eqn), len(wanted.difference(cut))
    return _Cut(values, Stacks("residuals", where, turns, before, after, again))


def _is_given(loop: Loop, place: int | None) -> bool:
    """Whether an operand of a loop is read in each turn, and no carry."""
    return place is not None and not loop.n_consts <= place < loop.first


def _weight(
    pair: _Pair,
    value: Any,
    place: int | None,
    wanted: set[Any],
    stacked: set[Any],
) -> int:
    """The cost of passing a value of the forward's body to the backward's."""
    forward, weight = pair.forward, 100 * size(value)
    if value in stacked:
        return 0
    if value in wanted:
        return weight
    if place is None or not _is_given(forward, place):
        return int(NEW * weight)
    if place < forward.n_consts or forward.eqn.invars[place] in pair.backward.xs:
        return 0
    return int(GIVEN * weight)


# ------------------------------------------------------------------------ both loops
def _with_cut(body: Any, pair: _Pair, cut: Sequence[Any]) -> Any:
    """The body with loops that stack the cut, and recompute the values behind it.

    Args:
        body: The body, closed or not.
        pair: The loops in it.
        cut: Variables of the forward's body.
    """
    forward, backward = pair.forward, pair.backward
    inputs = dict(zip(forward.inputs, forward.eqn.invars, strict=True))
    place = {v: k for k, v in enumerate(forward.inputs)}
    consts = [v for v in cut if place.get(v, forward.first) < forward.n_consts]
    slices = [v for v in cut if place.get(v, -1) >= forward.first]
    stacked = [v for v in cut if v not in consts and v not in slices]
    first, results, stacks = _stacking(pair, stacked)
    read = {at: forward.outs[k] for k, many in pair.read.items() for at in many}
    turns = range(backward.first, len(backward.eqn.invars))
    others = [k for k in turns if k not in read]
    again = jaxpr_as_fun(
        _recomputation(forward, cut, list(dict.fromkeys(read.values())))
    )
    usual = jaxpr_as_fun(backward.body)

    def step(whole: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> Any:
        own, more = whole[: backward.n_consts], whole[backward.n_consts :]
        known = dict(zip(consts, more, strict=True))
        known.update(zip([*stacked, *slices], x[len(others) :], strict=True))
        recomputed = again(*(known[v] for v in cut))
        values = dict(zip(dict.fromkeys(read.values()), recomputed, strict=True))
        turn = dict(zip(others, x[: len(others)], strict=True))
        turn.update({at: values[v] for at, v in read.items()})
        return usual(*own, *carry, *(turn[k] for k in sorted(turn)))

    ins = backward.eqn.invars
    second, ends = traced(
        backward,
        [*ins[: backward.n_consts], *(inputs[v] for v in consts)],
        ins[backward.n_consts : backward.first],
        [*(ins[k] for k in others), *stacks, *(inputs[v] for v in slices)],
        step,
    )
    results.update(zip(backward.eqn.outvars, ends, strict=True))
    eqns = []
    for k, eqn in enumerate(body.eqns):
        instead = {forward.position: first, backward.position: second}.get(k)
        eqns += [eqn] if instead is None else instead
    eqns = [_jax.reading(e, results) for e in eqns]
    outs = getattr(body, "jaxpr", body).outvars
    outs = [v if _jax.is_literal(v) else results.get(v, v) for v in outs]
    return _jax.with_equations(body, eqns, outs)


def _stacking(
    pair: _Pair, values: Sequence[Any]
) -> tuple[list[Any], dict[Any, Any], list[Any]]:
    """Equations of the forward that stacks other values than before.

    Returns:
        The equations, the replacements of results that are read elsewhere, and the
        stacks.
    """
    loop = pair.forward
    kept = [k for k in range(len(loop.outs)) if k not in pair.read or k in pair.anyway]
    there = [loop.outs[k] for k in kept]
    own = [k for k, at in enumerate(kept) if at >= loop.n_carry]
    anyway = {there[k]: k for k in own if not _jax.is_literal(there[k])}
    new = [v for v in values if v not in anyway]
    outs = [*there, *new]
    eqns, _ = live(loop.eqns, outs)
    body = jaxpr_as_fun(_jax.with_equations(loop.body, eqns, outs))
    ins = loop.eqn.invars
    equations, results = traced(
        loop,
        ins[: loop.n_consts],
        ins[loop.n_consts : loop.first],
        loop.xs,
        lambda consts, carry, x: body(*consts, *carry, *x),
    )
    became = {loop.eqn.outvars[k]: v for k, v in zip(kept, results, strict=False)}
    place = {**anyway, **{v: len(kept) + k for k, v in enumerate(new)}}
    return equations, became, [results[place[v]] for v in values]


def _recomputation(loop: Loop, cut: Sequence[Any], wanted: Sequence[Any]) -> Any:
    """The closed jaxpr that computes values of a loop's turn from those of a cut."""
    missing, eqns = set(wanted) - set(cut), []
    for eqn in reversed(loop.eqns):
        if not missing.isdisjoint(eqn.outvars):
            missing |= set(_vars(eqn.invars)) - set(cut)
            eqns.append(eqn)
    return _jax.part_of(loop.body, cut, eqns[::-1], wanted)


def is_elementwise(eqn: Any) -> bool:
    """Returns whether XLA fuses an equation with the readers of its results.

    Args:
        eqn: An equation; a call is one if all that it calls are.
    """
    if eqn.effects:
        return False
    if _jax.call_kind(eqn) in ("call", "custom"):
        return all(map(is_elementwise, _jax.call_body(eqn).eqns))
    return eqn.primitive.name in CHEAP


def _cheap(eqn: Any) -> bool:
    """Whether an equation costs about as much as reading its results."""
    if eqn.effects:
        return False
    if eqn.primitive in SITES:
        return _reads_only(eqn)
    if _jax.call_kind(eqn) in ("call", "custom"):
        return all(map(_cheap, _jax.call_body(eqn).eqns))
    return eqn.primitive.name in CHEAP


def _reads_only(eqn: Any) -> bool:
    """Whether a site's operations are few for the bytes that it moves."""
    cost = flops_of(eqn)
    if cost is None:
        return False
    return cost.intensity <= LIGHT and cost.bytes <= MOVED * size(eqn.outvars[0])


PASS = BodyPass(Stacks, _changed)
