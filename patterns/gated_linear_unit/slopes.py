"""Finds the derivatives of a branch where its activation or its bounds have a kink.

There a derivative is a convention, in which spellings of one function differ. At 0 that
of `jax.nn.relu` is 0, that of ``max(y, 0)`` is 1/2, and that of ``where(y < 0, 0, y)``
is 1. Rows of zeros are exactly there. So the program's own derivative is computed, and
compared with that of the named function.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.algebra.normal_form import TRUE, Poly
from rewriter.find.derivative import (
    Derivatives,
    NotKnown,
    derivatives_at,
    derivatives_of,
    values_at,
)
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import ProvedWith, Reading, Refused
from rewriter.ops.activations import (
    ACTIVATIONS,
    BY_PRODUCT,
    KINKS,
    Bounds,
    clipped,
)
from rewriter.ops.slopes import Slopes
from rewriter.patterns.gated_linear_unit.branches import Branch
from rewriter.patterns.gated_linear_unit.kink import Kink
from rewriter.program.subprogram import NotTaken, Region, has_one_rule, rules_around
from rewriter.program.walk import equations_above
from rewriter.support.assumptions import FINITE

BENT = frozenset({
    "max", "min", "clamp", "abs", "sign", "select_n", "gt", "ge", "lt", "le",
})  # fmt: skip
"""Primitives with which a smooth function is written in parts that meet at 0."""

TWICE = "the program has its activation twice, with and without a rule for derivatives"
"""Why a unit is left alone: JAX may differentiate it by either."""

NO_GRADIENTS = f"{TWICE}, and does not compute the gradients itself"
"""The same where a checkpoint computes the activation again, without its rule."""

AWAY = 1.25
"""How far from the kinks derivatives are compared that must agree."""

SIGNS = frozenset({"abs", "sign"})
"""Primitives by which a relu is NaN for -inf in compiled programs, too.

XLA compiles a product with a comparison as a choice, which gives 0 for -inf.
"""

NOT_FINITE = (math.inf, -math.inf, math.nan)

CLOSE = 1e-3
"""The relative difference of derivatives that counts as rounding."""


@dataclass(frozen=True)
class Side:
    """One branch, and its value in the program.

    Attributes:
        value: What the branch gives, with its activation, times any factor.
        branch: The branch.
        operands: The operands that it depends on.
        activation: The activation's name; ``"identity"`` for none.
        beta: Its number.
    """

    value: int
    branch: Branch
    operands: frozenset[str]
    activation: str = "identity"
    beta: float = 1.0


@dataclass(frozen=True)
class OfBranch:
    """The derivatives of a branch in the program.

    Attributes:
        activation: The activation's name; one that gives for infinities what the
            program gives.
        slopes: Its derivatives where they are not those of the named function.
        beside_gradients: The same, where gradients that the program computes are
            replaced too: these are proved to be those of the named function.
        one_rule: Whether the program has one rule for them. A program that JAX has
            differentiated may compute a value again without the rule that it had.
    """

    activation: str
    slopes: Slopes = ()
    beside_gradients: Slopes = ()
    one_rule: bool = True


def with_slopes(
    find: Finder,
    ev: RegionEvaluator,
    roots: frozenset[int],
    sides: Mapping[str, Side],
    reading: Reading,
) -> Reading:
    """A reading with the parameters of derivatives that differ from the named ones.

    The proof of the site leaves them out: forms do not tell single numbers apart. If
    gradients that the program computes are proved too, they have the named function's
    derivatives at its kinks. NaN and infinities are no numbers of forms. The program
    may be differentiated again, and then its value has its own derivatives.

    Args:
        find: The search.
        ev: The evaluator of its form.
        roots: Results of the contractions.
        sides: Its branches, by the parameter of their derivatives.
        reading: The reading.

    Raises:
        Refused: If the program's derivatives cannot be computed.
    """
    args = reading.args
    every = {n: slopes_of(find, ev, args, roots, s) for n, s in sides.items()}
    found = {n: d.slopes for n, d in every.items() if d.slopes}
    one_rule = all(d.one_rule for d in every.values())
    gate = every["slopes"].activation
    named = {} if gate == reading.params["activation"] else {"activation": gate}
    if one_rule and not found and not named:
        return reading
    return dataclasses.replace(
        reading,
        needs_backward="" if one_rule else NO_GRADIENTS,
        params={**reading.params, **named, **found},
        check_params={**reading.check_params, **dict.fromkeys(found, ())},
        backward_params={
            n: ProvedWith(every[n].beside_gradients, sides[n].operands) for n in found
        },
    )


def slopes_of(
    find: Finder, ev: RegionEvaluator, args: Any, roots: frozenset[int], side: Side
) -> OfBranch:
    """Returns derivatives of a branch where they differ from the named function's.

    Args:
        find: The search.
        ev: The evaluator of the site's form.
        args: The index arguments of the site's value.
        roots: Results of the contractions.
        side: The branch.

    Raises:
        Refused: If the program's derivatives cannot be computed, or infinities give
            what they give in no named function.
    """
    kinks = _kinks(find, roots, side)
    if not kinks:
        return OfBranch(side.activation)
    start, scale = _argument(find, ev, args, roots, side)
    dtype, result = (find.graph.dtype(v) for v in (start, side.value))
    with np.errstate(all="ignore"):
        every = (*kinks, *NOT_FINITE)
        at = [k for k in every if _is_at(k, scale, dtype)]
        points = np.array([y * scale for y in (*at, *_away(kinks))]).astype(dtype)
        own, one_rule = _own(find, start, side.value, points)
        branch = side.branch.clip, str(dtype), scale, points.tobytes()
        usual = _named_derivatives(side.activation, side.beta, *branch)
        near = max(CLOSE, *(4 * float(jnp.finfo(d).eps) for d in (dtype, result)))
        factor = _factor(own.slope[len(at) :], usual.slope[len(at) :], near)
        ends = np.array([y * scale for y in NOT_FINITE]).astype(dtype)
        if not _same_values(find, start, side, ends, (scale, factor)):
            other = BY_PRODUCT.get(side.activation)
            by_sign = _between_has(find, roots, side.value, SIGNS)
            if other is not None and not by_sign and FINITE not in ev.assumed:
                side = dataclasses.replace(side, activation=other)
                return slopes_of(find, ev, args, roots, side)
            ev.assume(FINITE, "infinities give what they do not in the activation")
            find.require_proved(ev)
        own, usual = _by_branch(own, factor, scale), _by_branch(usual, 1.0, scale)
    kinks = [Kink(*numbers, near) for numbers in zip(at, own, usual, strict=False)]
    alone, beside = (
        [f(k) for k in kinks] for f in (Kink.entry, Kink.entry_beside_gradients)
    )
    return OfBranch(
        side.activation,
        tuple(entry for entry in alone if entry),
        tuple(entry for entry in beside if entry),
        one_rule,
    )


def _by_branch(
    found: Derivatives, factor: float, scale: float
) -> list[tuple[float, float, float]]:
    """Derivatives of the activation by the branch, for each point.

    Args:
        found: Those of the program's value by its argument.
        factor: How often the value is the activation.
        scale: How often the argument is the branch.
    """
    first = np.stack([found.slope, found.again]) * (scale / factor)
    bend = found.bend * (scale * scale / factor)
    return [(*map(float, x),) for x in np.stack([*first, bend], -1)]


def _kinks(find: Finder, roots: frozenset[int], side: Side) -> tuple[float, ...]:
    """Where the named function, or the program's way to write it, may have a kink."""
    low, high = (
        default if bound is None else bound
        for bound, default in zip(side.branch.clip, (-math.inf, math.inf), strict=True)
    )
    own = KINKS.get(side.activation, ())
    if not own and side.activation != "identity" and _is_bent(find, roots, side.value):
        own = (0.0,)
    points = [k for k in own if low < k < high]
    points += [k for k in (low, high) if math.isfinite(k)]
    return tuple(sorted(set(points)))


def _is_bent(find: Finder, roots: frozenset[int], value: int) -> bool:
    """Whether an equation between contractions and a value has a kink."""
    return _between_has(find, roots, value, BENT)


def _between_has(
    find: Finder, roots: frozenset[int], value: int, prims: Collection[str]
) -> bool:
    """Whether an equation between contractions and a value has some primitive."""
    inside = find.below(roots, value) - roots
    between = equations_above(find.graph, {value} - roots, lambda _: True, inside)
    return any(node.prim in prims for node in between)


def _is_at(kink: float, scale: float, dtype: Any) -> bool:
    """Whether the program's value at a kink is one of its dtype."""
    if not kink or not math.isfinite(kink):
        return True
    here = kink * scale
    return _is_exact(scale) and float(np.asarray(here).astype(dtype)) == here


def _is_exact(scale: float) -> bool:
    """Whether products with a number are not rounded: it is a power of two."""
    return math.frexp(abs(scale))[0] == 0.5


def _away(kinks: tuple[float, ...]) -> list[float]:
    middles = [(a + b) / 2 for a, b in itertools.pairwise(kinks)]
    return [kinks[0] - AWAY, *middles, kinks[-1] + AWAY]


def _same_values(
    find: Finder, start: int, side: Side, ends: np.ndarray, factors: tuple[float, float]
) -> bool:
    """Whether infinities and NaN give what they give in the named activation.

    ``a * (a > 0)`` is NaN for -inf, for instance, and a relu is 0.

    Args:
        find: The search.
        start: The program's argument of the activation.
        side: The branch.
        ends: Numbers of the argument, [p].
        factors: How often the argument is the branch, and the value the activation.
    """
    scale, factor = factors
    named = _named_values(
        side.activation, side.beta, side.branch.clip, str(ends.dtype), scale,
        ends.tobytes(),
    )  # fmt: skip
    try:
        own = values_at(_between(find, start, side.value), ends, find.number)
    except (NotKnown, NotTaken) as why:
        raise Refused("slopes", f"values at its kinks: {why}", score=0.6) from why
    here, there = (np.asarray(x, np.float64) for x in (own, factor * scale * named))
    finite = np.isfinite(here) & np.isfinite(there)
    return bool(np.all(finite | np.isclose(here, there, equal_nan=True)))


@functools.lru_cache(maxsize=256)
def _named_values(
    activation: str, beta: float, clip: Bounds, dtype: str, scale: float, points: bytes
) -> np.ndarray:
    """What the named function gives for the branch, at multiples of it."""
    y = np.frombuffer(points, jnp.dtype(dtype)).astype(np.float32) / scale
    with jax.ensure_compile_time_eval():
        named = ACTIVATIONS[activation](clipped(jnp.asarray(y), clip), beta)
    return np.asarray(named, np.float64)


@functools.lru_cache(maxsize=256)
def _named_derivatives(
    activation: str, beta: float, clip: Bounds, dtype: str, scale: float, points: bytes
) -> Derivatives:
    """Those of the named function of a branch by `scale` times the branch."""

    def named(x: Any) -> Any:
        return ACTIVATIONS[activation](clipped(x / scale, clip), beta)

    return _wide(derivatives_of(named, np.frombuffer(points, jnp.dtype(dtype))))


def _own(
    find: Finder, start: int, value: int, points: np.ndarray
) -> tuple[Derivatives, bool]:
    """The derivatives of a value of the program by another one, at some numbers.

    Also says whether one rule gives it.

    Raises:
        Refused: If it is not known.
    """
    try:
        region = _between(find, start, value)
        own = _wide(derivatives_at(region, points, find.number))
    except (NotKnown, NotTaken) as why:
        raise Refused("slopes", f"derivatives at its kinks: {why}", score=0.6) from why
    made = [v for _, _, outs in region.steps for v in outs if v is not None]
    if not all(has_one_rule(find.graph, v, recomputed=False) for v in made):
        raise Refused("slopes", TWICE, score=0.6)
    return own, all(has_one_rule(find.graph, v) for v in made)


def _wide(found: Derivatives) -> Derivatives:
    numbers = found.slope, found.again, found.bend
    return Derivatives(*(x.astype(np.float64) for x in numbers))


def _factor(own: np.ndarray, usual: np.ndarray, near: float) -> float:
    """The number that makes all derivatives of one function those of another.

    Raises:
        Refused: If there is none.
    """
    k = int(np.argmax(np.abs(usual)))
    factor = float(own[k] / usual[k])
    most = near * abs(own[k])
    if factor and np.allclose(own, factor * usual, near, most):
        return factor
    text = "away from its kinks, derivatives are not those of the activation"
    raise Refused("slopes", text, score=0.6)


# ---------------------------------------------------------------------- the argument
def _argument(
    find: Finder, ev: RegionEvaluator, args: Any, roots: frozenset[int], side: Side
) -> tuple[int, float]:
    """The program's argument of an activation, and its factor beside the branch.

    Raises:
        Refused: If no value of the program is it.
    """
    alg, branch = find.algebra, side.branch
    term: Poly = {(TRUE, branch.term): 1.0}
    candidates = [alg.add(term, branch.bias), *([term] if branch.bias else [])]
    if rules_around(find.graph, side.value):
        text = "a custom rule for derivatives covers more than the activation"
        raise Refused("slopes", text, score=0.6)
    nearest: tuple[int, float] | None = None
    for value in _dominators(find, roots, side.value):
        form = ev.poly(value, ev.aligned(value, args))
        factor = form.get((TRUE, branch.term))
        if factor is None or rules_around(find.graph, value):
            continue
        if any(not alg.add(form, whole, -factor) for whole in candidates):
            found = value, factor / branch.scale
            if _is_exact(found[1]):
                return found
            nearest = nearest or found
    if nearest is not None:
        return nearest
    text = "no value of the program is the argument of the activation alone"
    raise Refused("slopes", text, score=0.6)


def _dominators(find: Finder, roots: frozenset[int], value: int) -> Iterator[int]:
    """Values through which alone a value depends on contractions, nearest first."""
    inside, seen, heap = find.below(roots, value), {value}, [-value]
    while heap:
        latest = -heapq.heappop(heap)
        if not heap:
            yield latest
        node = find.graph.node_of(latest)
        if node is None or latest in roots:
            return
        for i in node.ins:
            if i in inside and i not in seen:
                seen.add(i)
                heapq.heappush(heap, -i)


def _between(find: Finder, start: int, value: int) -> Region:
    """The equations from one value to another; others that they read are inputs."""
    inside = find.below(frozenset({start}), value)
    return Region(
        find.graph, [start], [value],
        lambda v: v not in inside and find.graph.scalar(v) is None,
    )  # fmt: skip
