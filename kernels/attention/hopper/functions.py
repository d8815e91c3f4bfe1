"""A function of scores as the Hopper kernels apply it: to each number of a tile.

The program's own equations are kept, as a jaxpr of scalars. Its derivative by the
product is JAX's own. Numbers of tables are read first, by indices that are functions
too, and then are operands like the others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention.scored_form import TABLES
from rewriter.kernels.shared import elementwise
from rewriter.kernels.shared.elementwise import Program, program
from rewriter.ops.score import BESIDE, LOOKUP, Ref, Step, fill_of
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rewriter.ops.score import Score

NUMBER, INTEGER = "float32", "int32"

AWAY = "away"
"""What the names of tables of distances begin with."""


def is_table(name: str) -> bool:
    """Returns whether a function reads one number of an array for each score."""
    return name in TABLES or name.startswith(AWAY)


@dataclass(frozen=True)
class Lookup:
    """One number that a function reads of a table.

    Attributes:
        table: The table's name.
        place: Where it is read and the index that says so, both int32, from
            what the function reads and from the numbers that were looked up before.
        found: The number as the function has it, from the one that was read
            and from the index.
    """

    table: str
    place: Program
    found: Program


@dataclass(frozen=True)
class Function:
    """A function of a product, the numbers of query and key, and arrays.

    Attributes:
        score: The program's equations.
        dtypes: The dtypes of the arrays and tables that it reads, by name, in order.
        sizes: The sizes of their last axes, by name, in order.
    """

    score: Score
    dtypes: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[str, int], ...]

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that broadcast against the scores."""
        return tuple(n for n, _ in self.dtypes if not is_table(n))

    @functools.cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """What is read of tables, in order."""
        return _lookups(self)

    @functools.cached_property
    def value(self) -> Program:
        """The function of a product, float32, of two int32 and of what is read."""
        inputs = self.inputs(len(self.lookups))
        return program(jax.make_jaxpr(self._apply)(*inputs))

    @functools.cached_property
    def value_and_slope(self) -> Program:
        """The same, with the derivative by the product."""

        def both(product: Any, *rest: Any) -> Any:
            one = jnp.float32(1.0)
            return jax.jvp(lambda x: self._apply(x, *rest), (product,), (one,))

        return program(jax.make_jaxpr(both)(*self.inputs(len(self.lookups))))

    def inputs(self, looked_up: int) -> list[Any]:
        """Returns what programs take: product, positions, arrays, found numbers.

        Args:
            looked_up: How many numbers of tables are found before.
        """
        of = dict(self.dtypes)
        kinds = [NUMBER, INTEGER, INTEGER, *(of[n] for n in self.arrays)]
        kinds += [of[n] for n in _tables(self.score)[:looked_up]]
        return [jax.ShapeDtypeStruct((), kind) for kind in kinds]

    def _apply(self, product: Any, row: Any, column: Any, *read: Any) -> Any:
        names = (*self.arrays, *map(_name, range(len(_tables(self.score)))))
        arrays = dict(zip(names, read, strict=False))
        made = _after_lookups(self.score)(product, row, column, arrays)
        return made.astype(NUMBER)

    def supports(self) -> Verdict:
        """Returns whether the kernels compute it."""
        wrong = [
            no("function", f"{name} is {dtype}")
            for name, dtype in self.dtypes
            if dtype not in elementwise.DTYPES
        ]
        if wrong:
            return all_of(*wrong)
        programs = [self.value, self.value_and_slope]
        programs += [x for look in self.lookups for x in (look.place, look.found)]
        return all_of(YES, *(x.supports() for x in programs))

    def cost(self, gradients: bool) -> int:
        """Returns instructions for each number of a tile.

        Args:
            gradients: Whether the derivative is computed too.
        """
        looked = sum(
            look.place.cost + look.found.cost + elementwise.LOOKUP
            for look in self.lookups
        )
        return looked + (self.value_and_slope if gradients else self.value).cost


def function_of(score: Score | None, arrays: Mapping[str, Any]) -> Function | None:
    """Returns the function of a use; None if there is none.

    Args:
        score: The program's equations.
        arrays: What it reads, or anything with ``shape`` and ``dtype``, by name.
    """
    if score is None:
        return None
    names = score.arrays
    dtypes = tuple((n, str(jnp.dtype(arrays[n].dtype))) for n in names)
    return _function(score, dtypes, tuple((n, arrays[n].shape[-1]) for n in names))


_function = functools.lru_cache(maxsize=256)(Function)


def _name(i: int) -> str:
    """The name of the i-th number that is found in a table."""
    return f"looked_up_{i}"


def _tables(score: Score) -> list[str]:
    """The tables that are read, in order of the equations that do so."""
    return [step.ins[0].name for step in score.steps if step.name == LOOKUP]


def _after_lookups(score: Score) -> Score:
    """The function with found numbers as arrays."""
    steps, count = [], 0
    for step in score.steps:
        if step.name == LOOKUP:
            given = (Ref("array", _name(count)),)
            step = Step("copy", given, step.dtype, run=lambda x: x)
            count += 1
        steps.append(step)
    return replace(score, steps=tuple(steps))


def _lookups(function: Function) -> tuple[Lookup, ...]:
    score, made = function.score, []
    plain = _after_lookups(score)
    for at, step in enumerate(score.steps):
        if step.name != LOOKUP:
            continue
        table, index = step.ins
        before = replace(plain, steps=plain.steps[:at], out=index)
        count = len(made)
        names = (*function.arrays, *map(_name, range(count)))

        fill, most = fill_of(step), dict(function.sizes)[table.name] - 1
        place = functools.partial(_place, before, names, fill, most)
        dtype = dict(function.dtypes)[table.name]
        scalars = [jax.ShapeDtypeStruct((), x) for x in (dtype, INTEGER)]
        made.append(
            Lookup(
                table.name,
                program(jax.make_jaxpr(place)(*function.inputs(count))),
                program(jax.make_jaxpr(functools.partial(_found, fill=fill))(*scalars)),
            )
        )
    return tuple(made)


def _place(
    before: Score, names: tuple[str, ...], fill: Any, most: int,
    product: Any, row: Any, column: Any, *read: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """The place of a number within its table, and the index, which may be below 0."""
    arrays = dict(zip(names, read, strict=True))
    index = before(product, row, column, arrays).astype(INTEGER)
    inside = index if fill is None else jnp.where(index < 0, -1 - index, index)
    return jnp.clip(inside, 0, most), index


def _found(number: Any, index: Any, fill: Any) -> Any:
    """What a lookup gives: the number, or the fill of places below 0."""
    if fill is None or fill == BESIDE:
        return number
    return jnp.where(index < 0, jnp.asarray(fill, number.dtype), number)
