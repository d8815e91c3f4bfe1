"""Computes parts of a function of scores before the kernel, where they repeat.

A function is applied to each pair of a query and a key. Often a part of it depends on
the distance of both alone, as a table of buckets does, or on one of them. Such a part
has few different values. XLA computes these, and the kernel reads them: a number for
each distance is looked up, and one for each query or key is copied beside the blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.hopper.extra_operands import (
    COLUMNS,
    NUMBER,
    ROWS,
    TABLE,
    form_of,
)
from rewriter.kernels.attention.hopper.functions import AWAY, function_of
from rewriter.kernels.attention.scored_form import TABLES
from rewriter.kernels.shared import elementwise
from rewriter.ops.score import (
    COLUMN,
    PRODUCT,
    ROW,
    Ref,
    Score,
    Step,
    lookup_step,
    number,
    primitive_step,
)

if TYPE_CHECKING:
    from jax import Array

DISTANCE = "distance"

PAYS = {DISTANCE: elementwise.LOOKUP + 4, ROWS: 4, COLUMNS: 6, NUMBER: 4}
"""The fewest instructions for each number from which reading it is faster."""

MOST = 4
"""The most parts that are hoisted of one kind: each needs memory."""

SUBTRACT, ADD = lax.sub_p, lax.add_p


@dataclass(frozen=True)
class Part:
    """One part that is computed before.

    Attributes:
        name: The array that the kernel reads instead.
        kind: `DISTANCE`, or the form of that array.
        part: The part as a function of its own.
    """

    name: str
    kind: str
    part: Score


@dataclass(frozen=True)
class Hoisted:
    """A function whose repeating parts are read.

    Attributes:
        score: The function that remains.
        parts: What is computed before.
    """

    score: Score
    parts: tuple[Part, ...]

    def structs(self, arrays: Mapping[str, Any], t: int, s: int) -> dict[str, Any]:
        """Returns shapes and dtypes of what the function that remains reads."""
        named = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays.items()}
        return jax.eval_shape(lambda given: self.read(given, t, s), named)

    def read(self, arrays: Mapping[str, Array], t: int, s: int) -> dict[str, Array]:
        """Returns what the function that remains reads, by name.

        Args:
            arrays: What the whole function reads.
            t: Queries.
            s: Keys.
        """
        made = {part.name: _values(part, arrays, t, s) for part in self.parts}
        return {n: made[n] if n in made else arrays[n] for n in self.score.arrays}


def hoisted(score: Score, arrays: Mapping[str, Any], t: int, s: int) -> Hoisted:
    """Returns a function with its repeating parts apart.

    Args:
        score: The function.
        arrays: What it reads, or anything with ``shape`` and ``dtype``, by name.
        t: Queries.
        s: Keys.
    """
    shapes = tuple(
        (n, tuple(arrays[n].shape), str(jnp.dtype(arrays[n].dtype)))
        for n in score.arrays
    )
    return _hoisted(score, shapes, t)


@functools.lru_cache(maxsize=256)
def _hoisted(score: Score, shapes: Any, t: int) -> Hoisted:
    arrays = {n: jax.ShapeDtypeStruct(shape, dtype) for n, shape, dtype in shapes}
    kinds = _kinds(score, arrays)
    count = dict.fromkeys(PAYS, 0)
    parts: list[Part] = []
    instead: dict[int, Ref] = {}
    steps: list[Step] = list(score.steps)
    for at in sorted(_roots(score, kinds)):
        kind = kinds[at]
        assert kind is not None
        part = _alone(score, at)
        function = function_of(part, arrays)
        assert function is not None
        if count[kind] >= MOST or function.cost(False) < PAYS[kind]:
            continue
        count[kind] += 1
        name = f"{AWAY if kind == DISTANCE else 'score_of_' + kind}_{count[kind]}"
        parts.append(Part(name, kind, part))
        instead[at] = Ref("array", name)
    for at, ref in instead.items():
        steps[at] = Step("copy", (ref,), steps[at].dtype, run=lambda x: x)
    remains = pruned(replace(score, steps=tuple(steps)))
    used = set(remains.arrays)
    parts = [part for part in parts if part.name in used]
    return Hoisted(_with_lookups(remains, t), tuple(parts))


# ------------------------------------------------------------------ what repeats
def _kinds(score: Score, arrays: Mapping[str, Any]) -> list[str | None]:
    """What each step depends on: a form, `DISTANCE`, or None for more."""
    forms = {
        n: (NUMBER if n in TABLES else form_of(x.shape)) for n, x in arrays.items()
    }
    kinds: list[str | None] = []

    def of(ref: Ref) -> str | None:
        if ref.kind == "step":
            return kinds[ref.name]
        if ref.kind == "array":
            return None if forms[ref.name] == TABLE else forms[ref.name]
        return {ROW: ROWS, COLUMN: COLUMNS, PRODUCT: None}.get(ref.kind, NUMBER)

    for step in score.steps:
        found = [of(ref) for ref in step.ins]
        if _is_distance(step):
            kinds.append(DISTANCE)
        elif None in found:
            kinds.append(None)
        else:
            varying = {x for x in found if x != NUMBER}
            kinds.append(None if len(varying) > 1 else next(iter(varying), NUMBER))
    return kinds


def _is_distance(step: Step) -> bool:
    """Whether a step is the difference of the numbers of query and key."""
    return step.name == "sub" and {ref.kind for ref in step.ins} == {ROW, COLUMN}


def _roots(score: Score, kinds: list[str | None]) -> set[int]:
    """Steps of a kind that steps of another kind read, or that are the result."""
    read = {score.out.name} if score.out.kind == "step" else set()
    for at, step in enumerate(score.steps):
        for ref in step.ins:
            if ref.kind == "step" and kinds[ref.name] != kinds[at]:
                read.add(ref.name)
    return {at for at in read if kinds[at] is not None}


def _needed(score: Score) -> set[int]:
    """The steps that the result depends on."""
    needed: set[int] = set()
    queue = [score.out]
    while queue:
        ref = queue.pop()
        if ref.kind == "step" and ref.name not in needed:
            needed.add(ref.name)
            queue += score.steps[ref.name].ins
    return needed


def pruned(score: Score) -> Score:
    """Returns a function without steps that its result does not depend on."""
    needed, new = sorted(_needed(score)), {}
    for at in needed:
        new[at] = len(new)
    moved = lambda ref: replace(ref, name=new[ref.name]) if ref.kind == "step" else ref
    steps = tuple(
        replace(score.steps[at], ins=tuple(map(moved, score.steps[at].ins)))
        for at in needed
    )
    return Score(steps, moved(score.out), score.product_dtype)


def _alone(score: Score, at: int) -> Score:
    """The part of a function that gives one step."""
    return pruned(replace(score, out=Ref("step", at)))


def _with_lookups(score: Score, t: int) -> Score:
    """Reads numbers of distances by ``column - row + t - 1``."""
    if not any(name.startswith(AWAY) for name in score.arrays):
        return score
    away = primitive_step(SUBTRACT, {}, (Ref(COLUMN), Ref(ROW)), "int32")
    given = (Ref("step", 0), number(t - 1, "int32"))
    steps = [away, primitive_step(ADD, {}, given, "int32")]
    moved = lambda ref: replace(ref, name=ref.name + 2) if ref.kind == "step" else ref
    for step in score.steps:
        ins = tuple(map(moved, step.ins))
        if step.name == "copy" and str(ins[0].name).startswith(AWAY):
            steps.append(lookup_step(ins[0], Ref("step", 1), step.dtype))
        else:
            steps.append(replace(step, ins=ins))
    return Score(tuple(steps), moved(score.out), score.product_dtype)


# ------------------------------------------------------------------- their values
def _values(part: Part, arrays: Mapping[str, Array], t: int, s: int) -> Array:
    """The numbers of one part: [b|1, n|1, r] of distances, otherwise with four axes."""
    names = part.part.arrays
    lead = jnp.broadcast_shapes((1, 1), *(arrays[n].shape[:2] for n in names))
    row, column = jnp.zeros((1, 1, 1, 1), jnp.int32), jnp.zeros((1, 1, 1, 1), jnp.int32)
    if part.kind == DISTANCE:
        column = jnp.arange(1 - t, s, dtype=jnp.int32)[None, None, None]
    if part.kind == ROWS:
        row = jnp.arange(t, dtype=jnp.int32)[None, None, :, None]
    if part.kind == COLUMNS:
        column = jnp.arange(s, dtype=jnp.int32)[None, None, None]
    sizes = {ROWS: (t, 1), COLUMNS: (1, s), NUMBER: (1, 1), DISTANCE: (1, t + s - 1)}
    nothing = jnp.zeros((*lead, *sizes[part.kind]), jnp.float32)
    made = part.part(nothing, row, column, {n: arrays[n] for n in names})
    return made[:, :, 0] if part.kind == DISTANCE else made
