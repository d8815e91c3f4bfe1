"""A function of scores, as a program computes it: its own equations, one by one.

Attention multiplies queries by keys. What a program does with the products before the
softmax is a function of each of them, of its position and of small arrays. It is kept
here as the program's own equations: the same primitives and dtypes in the same order.
So it may be computed for a tile of products at a time, and rounds as in the program::

    value[b, n, t, s] = f(product[b, n, t, s], t, s, arrays[b|1, n|1, t|1, s|1], ...)
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter import _jax

PRODUCT, ROW, COLUMN = "product", "row", "column"
"""What every function may read: the product, and the numbers of query and key."""

SOFTMAX, NONE, SUM = "softmax", "none", "sum"
"""How weights are made of a function's values: exponentials over their sum, the values
themselves, or the values over a function of their sum."""

ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
    "atanh", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh",
    "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
    "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or",
    "population_count", "pow", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})  # fmt: skip
"""Primitives that compute each number of a result from those at its place."""

NAMED: Mapping[str, Callable[..., Any]] = {
    "floor_divide": jnp.floor_divide,
    "logaddexp": jnp.logaddexp,
    "relu": jax.nn.relu,
    "remainder": jnp.remainder,
}
"""Functions of JAX that count as one equation: their rules of derivatives are kept."""

POSITIONS: Mapping[str, Callable[..., Any]] = {
    "position_add": jnp.add,
    "position_and": jnp.logical_and,
    "position_clip": lambda x, most: jnp.clip(x, 0, most),
    "position_inside": lambda x, size: (x >= 0) & (x < size),
    "position_multiply": jnp.multiply,
    "position_or_none": lambda inside, x: jnp.where(inside, x, -1),
    "position_or_beside": lambda inside, x: jnp.where(inside, x, -1 - x),
    "position_quotient": jnp.floor_divide,
    "position_remainder": jnp.remainder,
}
"""What is computed anew of positions and of places in tables: integers of 32 bits."""

BESIDE = "beside"
"""The fill of places outside of a table that have the nearest number, while a gradient
there is dropped: so XLA computes a gather that promises to stay inside."""

LOOKUP = "lookup"
"""An equation that reads a number of a table, by its place on the table's last axis."""


@dataclass(frozen=True)
class Ref:
    """An operand of an equation: an earlier result, an input or a number.

    Attributes:
        kind: ``"step"``, ``"array"``, ``"number"``, or one of the names above.
        name: The number of an earlier equation, the name of an array, or the number's
            text.
        value: The number, of its dtype.
    """

    kind: str
    name: Any = ""
    value: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}{self.name}"


@dataclass(frozen=True)
class Step:
    """One equation.

    Attributes:
        name: Its primitive, a name of `NAMED` or `POSITIONS`, or `LOOKUP`.
        ins: What it reads.
        dtype: The result's.
        params: The primitive's parameters, as text.
        run: Computes it from arrays that broadcast against each other.
    """

    name: str
    ins: tuple[Ref, ...]
    dtype: str
    params: str = ""
    run: Callable[..., Any] = field(default=lambda *x: x, compare=False, repr=False)

    def __str__(self) -> str:
        return (
            f"{self.name}[{self.params}]({', '.join(map(str, self.ins))}):{self.dtype}"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Score:
    """A function of a product, its position and arrays.

    Functions are equal if their equations are.

    Attributes:
        steps: The equations, in order.
        out: The result.
        product_dtype: The dtype in which the program has the product.

    Example:
        >>> steps = Step("tanh", (Ref("product"),), "float32", run=jnp.tanh),
        >>> bent = Score(steps, Ref("step", 0), "float32")
        >>> float(bent(jnp.float32(0.0), 0, 0, {})), str(bent)
        (0.0, 'tanh')
    """

    steps: tuple[Step, ...]
    out: Ref
    product_dtype: str

    def __call__(
        self,
        product: Any,
        row: Any,
        column: Any,
        arrays: Mapping[str, Any],
        seen: Callable[[Any, Any], Any] = lambda name, x: x,
    ) -> Any:
        """Returns the function's values, shaped as the product.

        Args:
            product: Products of queries and keys; the last two axes are theirs.
            row: Numbers of queries, int32.
            column: Numbers of keys, int32. All that is given must broadcast.
            arrays: What else it reads, by name. The last axis of a table is the one
                that is read by index; the others are those before the last two.
            seen: Is given the products as `PRODUCT`, and each equation's number and
                result. Returns the result.
        """
        known = {
            PRODUCT: seen(PRODUCT, product.astype(self.product_dtype)),
            ROW: jnp.asarray(row, jnp.int32),
            COLUMN: jnp.asarray(column, jnp.int32),
        }
        made: list[Any] = []

        def read(ref: Ref) -> Any:
            match ref.kind:
                case "step":
                    return made[ref.name]
                case "array":
                    return arrays[ref.name]
                case "number":
                    return ref.value
            return known[ref.kind]

        for i, step in enumerate(self.steps):
            made.append(seen(i, step.run(*map(read, step.ins))))
        return jnp.broadcast_to(read(self.out), product.shape)

    @functools.cached_property
    def text(self) -> str:
        """All equations as text, the same in every run."""
        lines = (f"{i} = {step}" for i, step in enumerate(self.steps))
        return "\n".join((self.product_dtype, *lines, str(self.out)))

    @functools.cached_property
    def primitives(self) -> frozenset[str]:
        """The names of its equations: what a kernel must be able to compute."""
        return frozenset(step.name for step in self.steps)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that it reads."""
        refs = (*(ref for step in self.steps for ref in step.ins), self.out)
        return tuple(sorted({ref.name for ref in refs if ref.kind == "array"}))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __lt__(self, other: Score) -> bool:
        return self.text < other.text

    def __repr__(self) -> str:
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        return f"Score({self}, {digest})"

    def __str__(self) -> str:
        """The names of its equations, without casts and layout."""
        plain = ("convert_element_type", "copy")
        count = Counter(s.name for s in self.steps if s.name not in plain)
        return " ".join(count) or "cast"


def primitive_step(
    primitive: Any, params: Mapping[str, Any], ins: tuple[Ref, ...], dtype: Any
) -> Step:
    """Returns the step that is one equation of a primitive of `ELEMENTWISE`."""
    shown = " ".join(
        f"{k}={v}"
        for k, v in sorted(params.items())
        if v is not None and k != "sharding"
    )
    run = functools.partial(_bound, primitive, dict(params))
    return Step(primitive.name, ins, str(dtype), shown, run)


def named_step(name: str, ins: tuple[Ref, ...], dtype: Any) -> Step:
    """Returns the step that is one call of a function of `NAMED`."""
    return Step(name, ins, str(dtype), "", NAMED[name])


def position_step(name: str, *ins: Ref) -> Step:
    """Returns the step that is a function of `POSITIONS`, without its first word."""
    name = f"position_{name}"
    kind = "bool" if name in ("position_and", "position_inside") else "int32"
    return Step(name, ins, kind, "", POSITIONS[name])


def cast_step(ref: Ref, dtype: Any) -> Step:
    """Returns the step that is a position or an index in another dtype."""
    name = str(jnp.dtype(dtype))
    run = lambda x: jnp.asarray(x).astype(name)
    return Step("convert_element_type", (ref,), name, f"to {name}", run)


def inverse_step(ref: Ref, dtype: Any) -> Step:
    """Returns the step that is one divided by a number of a dtype."""
    one = number(1, dtype)
    return Step("div", (one, ref), str(dtype), "", jnp.divide)


def lookup_step(table: Ref, index: Ref, dtype: Any, fill: Any = None) -> Step:
    """Returns the step that reads a table.

    Args:
        table: The table, [..., r].
        index: Places from 0 to r - 1.
        dtype: The table's.
        fill: The number that an index below 0 gives; None if there is none. With
            `BESIDE`, index -1 - i gives number i, which gets no gradient.
    """
    run = functools.partial(_looked_up, fill=fill)
    shown = "" if fill is None else f"fill={fill}"
    return Step(LOOKUP, (table, index), str(dtype), shown, run)


def fill_of(step: Step) -> Any:
    """Returns the fill of a `lookup_step`."""
    return step.run.keywords["fill"]  # type: ignore[attr-defined]


def number(value: Any, dtype: Any) -> Ref:
    """Returns a number of a dtype, as an equation reads it."""
    scalar = jnp.dtype(dtype).type(value)
    return Ref("number", f" {scalar} {jnp.dtype(dtype)}", scalar)


def _bound(primitive: Any, params: dict[str, Any], *given: Any) -> Any:
    """One equation, of arrays that broadcast against each other."""
    arrays = [jnp.asarray(x) for x in given]
    if len(arrays) > 1:
        arrays = _jax.with_common_varying(jnp.broadcast_arrays(*arrays))
    return primitive.bind(*arrays, **params)


def _looked_up(table: Any, index: Any, fill: Any = None) -> Any:
    """Numbers of a table [..., r] at places [..., t, s]; a place below 0 has the fill.

    With `BESIDE` it has a number of the table, which gets no gradient.

    The table's axes before r, and the index's before the last two, broadcast.
    """
    outer = table.ndim - 1
    index = jnp.asarray(index)
    index = index.reshape((1,) * (outer + 2 - index.ndim) + index.shape)
    at = index
    if fill is not None:
        at = jnp.where(index < 0, -1 - index, index)
    if all(n == 1 for n in index.shape[:outer]):
        places = at.reshape(index.shape[outer:])
        found = jnp.take(table, places, axis=-1, mode="clip")
    else:
        lead = jnp.broadcast_shapes(table.shape[:-1], index.shape[:outer])
        whole = jnp.broadcast_to(table, (*lead, table.shape[-1]))
        places = jnp.broadcast_to(at, (*lead, *index.shape[outer:]))
        flat = places.reshape(*lead, -1)
        found = jnp.take_along_axis(whole, flat, axis=-1, mode="clip")
        found = found.reshape(places.shape)
    if fill is None:
        return found
    nearest = lax.stop_gradient(found)
    other = nearest if fill == BESIDE else jnp.asarray(fill, found.dtype)
    return jnp.where(index < 0, other, found)
