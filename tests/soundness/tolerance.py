"""How far two results of a program may differ, by rounding alone.

What a program computes is rounded where XLA or a kernel rounds it. How much that
matters is told by the original itself. It is computed op by op, in float64, of operands
that differ in their last bit, and with every result off by its last bits. Operands of
masks stay as they are, since what a mask lets through is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.soundness import allowed, passes, rounding
from tests.soundness.program import Program

TINY = 1e-36
"""What is smaller may be zero: denormal numbers are flushed, by some instructions."""
ROUNDINGS = 64
"""Roundings of the largest of a row, for sums of up to as many numbers."""
FACTOR = 16
"""How much larger than what the original differs by a difference may be."""

DRAWS = 12
"""How many runs tell what rounding decides."""
OFF = 4
"""How much larger than what differs between them a difference may be."""
OFF_OF_GRADIENTS = 20
"""The same of gradients of attention by queries and keys: kernels subtract the sum of a
row's rounded result times its cotangent, the program a sum of the same products."""

NEAR = 1e-2
"""How far from float64 the original is by rounding. If it is further off, float64 does
something else: it does not absorb a score in a fill of -1e9."""

LOST = 0.25
"""The part of a row that rounding changes in one of which it leaves nothing."""
RIGHT = 1e-2
"""How far from float64 one may be that is right, beside one that has lost its row."""

Run = Callable[[Sequence[Any]], list[Any]]
RunOf = Callable[[Program], Run]


@dataclass(frozen=True)
class Variants:
    """Results of the original, computed in other ways.

    Attributes:
        eager: Op by op.
        exact: With operands in float64; arithmetic on masks stays as it is.
        right: The same of programs that may be computed instead, see `allowed`, and
            those in the program's own precision: float64 may not round a number to 0.
        unseen: Entries of rows of which every key that is kept has a score of -inf, in
            float64 or in the program's own precision, or one so low that a fused
            multiply-add takes it for its own maximum no more.
        nudged: With operands that differ in their last bit, by several draws.
        perturbed: With those that differ in their last three bits.
        rounded: With every result off by its last bits, by several draws; none at
            first.
        unrounded: Without roundings to 16 bits that a kernel may leave out.
        beside: With fills that hide all scores, in the program's own precision.
        shifted: With exponentials without their maximum made smaller.
        lowered: The same where only an overflow changes the weights.
        wide: With every number of a norm in float64.
        of_chosen_zeros: With derivatives of limits that are chosen.
    """

    eager: list[np.ndarray]
    exact: list[np.ndarray]
    right: list[list[np.ndarray]]
    unseen: list[np.ndarray]
    nudged: list[list[np.ndarray]]
    perturbed: list[list[np.ndarray]]
    rounded: list[list[np.ndarray]]
    unrounded: list[np.ndarray]
    beside: list[np.ndarray]
    shifted: list[np.ndarray]
    lowered: list[np.ndarray]
    wide: list[np.ndarray]
    of_chosen_zeros: list[np.ndarray]


def numbers(array: Any) -> np.ndarray:
    """An array as float64, for comparisons."""
    return np.asarray(jnp.asarray(array).astype(jnp.float32), np.float64)


def variants(of: RunOf, program: Program, values: Sequence[Any]) -> Variants:
    """Results of a run of the original, computed in other ways.

    Args:
        of: Gives the run of a program.
        program: The original.
        values: Its arguments.
    """
    run = of(program)
    with jax.disable_jit():  # of JAX's arrays: numpy indexes otherwise
        eager = [numbers(x) for x in run([jnp.asarray(v) for v in values])]
    exactly = functools.cache(lambda p: _exact(of(p), program, values))
    others = (
        allowed.stable(program), allowed.deep(program), allowed.wide(program),
        allowed.unrounded(program),
    )  # fmt: skip
    exact, *right = map(exactly, (program, *others))
    compiled = passes.compiled(run)
    nudged, perturbed = (
        [
            [numbers(x) for x in compiled(_nudged(program, values, seed, bits))]
            for seed in range(draws)
        ]
        for draws, bits in ((3, 1), (6, 8))
    )
    as_is = functools.cache(
        lambda p: [
            numbers(x)
            for x in (compiled if p == program else passes.compiled(of(p)))(values)
        ]
    )
    bottomless = allowed.bottomless(program)
    own = program.operands
    bare = [exactly(bottomless), as_is(bottomless)]
    bare += [rounding.rounded(of(bottomless), values, own, seed) for seed in (1, 3)]
    unseen = [np.isnan(x).any(0) for x in map(np.array, zip(*bare, strict=True))]
    if any(map(np.any, unseen)):
        usual = _exact(of(bottomless), program, _usual(program, values))
        unseen = [x & ~np.isnan(y) for x, y in zip(unseen, usual, strict=True)]
    beside, shifted, lowered, zeros = (
        as_is(made(program))
        for made in (
            allowed.hiding, allowed.shifted, allowed.lowered,
            allowed.of_chosen_zeros,
        )
    )  # fmt: skip
    whole = allowed.unrounded(program)
    right += map(as_is, {allowed.stable(program), whole} - {program})
    right += map(as_is, allowed.partly_stable(program))
    unrounded = as_is(whole)
    return Variants(
        eager, exact, right, unseen, nudged, perturbed, [], unrounded, beside, shifted,
        lowered, exactly(allowed.wide(program)), zeros,
    )  # fmt: skip


def with_rounding(
    others: Variants, of: RunOf, program: Program, values: Sequence[Any]
) -> Variants:
    """Returns the variants with those in which each result is off; these take long."""
    run, which = of(program), program.operands
    off = [rounding.rounded(run, values, which, seed) for seed in range(DRAWS)]
    return replace(others, rounded=[*others.rounded, *off])


def _exact(run: Run, program: Program, values: Sequence[Any]) -> list[np.ndarray]:
    with jax.enable_x64(True):
        return [np.asarray(x, np.float64) for x in run(_widened(program, values))]


def _usual(program: Program, values: Sequence[Any]) -> list[Any]:
    """Arguments of which no score is infinite."""
    draw = np.random.default_rng(0)
    return [
        draw.normal(size=v.shape).astype(v.dtype) if i in program.operands else v
        for i, v in enumerate(values)
    ]


def _widened(program: Program, values: Sequence[Any]) -> list[Any]:
    return [
        jnp.asarray(v, jnp.float64) if i in program.operands else v
        for i, v in enumerate(values)
    ]


def _nudged(program: Program, values: Sequence[Any], seed: int, last: int) -> list[Any]:
    draw = np.random.default_rng(seed)

    def nudge(v: Any) -> Any:
        step = last * float(jnp.finfo(v.dtype).eps) * draw.uniform(-1, 1, size=v.shape)
        with np.errstate(all="ignore"):
            return (np.asarray(v, np.float64) * (1 + step)).astype(v.dtype)

    return [nudge(v) if i in program.operands else v for i, v in enumerate(values)]


def basic(original: Any, eps: float, entries: bool, floor: float) -> np.ndarray:
    """What rounding to some `eps` may change, of a result as it is."""
    return rounding_of(eps) * (scale(numbers(original), entries) + floor) + TINY


def rounding_of(eps: float) -> float:
    """What rounding to some `eps` may change, as a share of what is rounded."""
    return (ROUNDINGS if eps < 1e-5 else ROUNDINGS / 4) * eps


def sensitive(
    original: Any,
    eps: float,
    entries: bool,
    floor: float,
    others: Variants,
    which: int,
) -> np.ndarray:
    """What rounding may change, by what it changes in the original."""
    mine = numbers(original)
    apart = lambda other: _apart(mine, other[which], entries)
    by_last_bit = np.maximum.reduce([apart(n) for n in others.nudged])
    inexact = apart(others.exact)
    changes = FACTOR * (apart(others.eager) + np.minimum(inexact, by_last_bit))
    near = np.where(inexact <= NEAR * scale(mine, entries), 4 * inexact, 0.0)
    most = OFF_OF_GRADIENTS if floor else OFF  # what cancels has a floor
    off = most * np.max([np.zeros_like(mine), *map(apart, others.rounded)], axis=0)
    return basic(original, eps, entries, floor) + changes + near + off


def undetermined(original: Any, others: Variants, which: int) -> np.ndarray:
    """Entries of rows that rounding changes by as much as they are."""
    mine = numbers(original)
    if not others.rounded:
        return np.zeros(mine.shape, bool)
    runs = (*others.rounded, others.unrounded)
    off = np.maximum.reduce([_apart(mine, r[which], False) for r in runs])
    return off >= LOST * scale(mine, False)


def lost(original: Any, rewritten: Any, others: Variants, which: int) -> np.ndarray:
    """Entries of a norm's rows that the original has lost, and that are right now.

    A variance by a difference of squares may be rounding alone, or 0. One that is
    centred has its row to the last bits of what is subtracted from it.
    """
    a, b, exact = numbers(original), numbers(rewritten), others.wide[which]
    size = scale(exact, False)
    off = np.isfinite(a) & (_apart(a, exact, False) >= LOST * size)
    return off & np.isfinite(b) & (_apart(b, exact, False) <= RIGHT * size)


def scale(x: np.ndarray, entries: bool) -> np.ndarray:
    """The magnitude that errors of each entry are relative to."""
    sizes = np.where(np.isfinite(x), abs(x), 0.0)
    if entries or x.ndim == 0:
        return sizes
    return np.broadcast_to(sizes.max(-1, keepdims=True, initial=0.0), x.shape)


def _apart(a: np.ndarray, b: np.ndarray, entries: bool) -> np.ndarray:
    """How far two results differ: by the row, or relative to each entry by the row."""
    both = np.isfinite(a) & np.isfinite(b)
    with np.errstate(all="ignore"):
        difference = np.where(both, abs(np.where(both, a - b, 0.0)), 0.0)
        if not entries or a.ndim == 0:
            return scale(difference, entries)
        ratio = np.where(abs(a) > TINY, difference / np.maximum(abs(a), TINY), 0.0)
    relative = np.minimum(ratio, 1e6).max(-1, keepdims=True)
    return np.maximum(difference, relative * abs(np.where(both, a, 0.0)))
