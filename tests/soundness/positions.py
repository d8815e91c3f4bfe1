"""Positions: vectors of integers or floats, made by arithmetic that has edges.

Integers wrap around, floats round; both may be given, and lie at the ends of what their
dtype holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.soundness.writer import FLOATS, INTEGERS, Writer, literal

BITS = {"int8": 8, "int16": 16, "int32": 32, "uint8": 8, "uint16": 16, "uint32": 32}
GIVEN_INTEGERS = ("small", "near ends", "segments", "all numbers")
GIVEN_FLOATS = (
    "ties", "rising", "normal", "some 1e30 or 1e-30", "some inf", "some nan or inf",
    "times 60", "times 1e30", "times 1e-30",
)  # fmt: skip
FRACTIONS = (2.999999, 3.0000002, 3.0, 0.5, 1.0, 7.0, -2.5, 0.1, 1e30, 16777217.0, 0.0)

INTEGER_STEPS = (
    "{x} + {c}", "{x} - {c}", "{c} - {x}", "{x} * {c}", "{x} // {d}", "{x} % {d}",
    "lax.div({x}, jnp.full_like({x}, {d}))", "lax.rem({x}, jnp.full_like({x}, {d}))",
    "lax.div({x} - {c}, jnp.full_like({x}, {d}))", "({x} - {c}) // {d}",
    "{x} >> {s}", "{x} << {s}", "({x} - {c}) >> {s}", "{x} & {c}", "{x} | {c}",
    "{x} ^ {c}", "~{x}", "-{x}", "abs({x})", "jnp.minimum({x}, {c})",
    "jnp.maximum({x}, {c})", "{x}[::-1]", "jnp.sign({x} - {c})", "{x} * {x}",
    "jnp.where({x} > {c}, {x}, {d})", "lax.shift_right_logical({x}, {s})",
)  # fmt: skip
FLOAT_STEPS = (
    "{x} + {f}", "{x} - {f}", "{f} - {x}", "{x} * {f}", "{x} / {g}", "jnp.floor({x})",
    "jnp.round({x})", "-{x}", "abs({x})", "jnp.sqrt(abs({x}))", "{x} * {x}",
    "jnp.exp({x})", "jnp.cumsum({x})", "{x} - {x}[0]", "({x} + {g}) - {g}",
    "{x} // {g}", "{x} % {g}", "jnp.maximum({x}, {f})", "{x}[::-1]",
    "jnp.where(jnp.isfinite({x}), {x}, {f})", "jnp.log1p(abs({x}))",
)  # fmt: skip


@dataclass(frozen=True)
class Vector:
    """A vector that the program holds."""

    name: str
    dtype: str

    @property
    def floating(self) -> bool:
        """Whether it is of floats."""
        return self.dtype in FLOATS


def vector(w: Writer, size: int) -> Vector:
    """Positions of so many tokens."""
    found = w.branch(
        lambda: _iota(w, size, w.one(("int32", *INTEGERS))),
        lambda: _iota(w, size, w.one(FLOATS)),
        lambda: _given_integers(w, size),
        lambda: _given_floats(w, size),
    )
    for _ in range(w.one((0, 0, 1, 1, 2, 3))):
        found = _step(w, found)
    return found


def number(w: Writer, dtype: str) -> str:
    """A number that is compared with positions of a dtype."""
    if dtype in FLOATS:
        return literal(w.one(FRACTIONS), dtype)
    return literal(w.one(_numbers(dtype)), dtype)


def _numbers(dtype: str) -> tuple[int, ...]:
    """Small numbers, and some near the ends of a dtype."""
    top = 2 ** (BITS[dtype] - (not dtype.startswith("u"))) - 1
    common = (0, 1, 2, 3, 5, 8, 13, 100, top, top - 1, top - 7)
    return common if dtype.startswith("u") else (*common, -1, -2, -3, -8, -100, -top)


def _iota(w: Writer, size: int, dtype: str) -> Vector:
    return Vector(w.let(f"jnp.arange({size}, dtype=jnp.{dtype})", "t"), dtype)


def _given_integers(w: Writer, size: int) -> Vector:
    dtype = w.one(("int32", *INTEGERS))
    return Vector(w.argument("t", (size,), w.one(GIVEN_INTEGERS), dtype), dtype)


def _given_floats(w: Writer, size: int) -> Vector:
    dtype = w.mostly("float32", FLOATS)
    return Vector(w.argument("t", (size,), w.one(GIVEN_FLOATS), dtype), dtype)


def _step(w: Writer, x: Vector) -> Vector:
    """One operation more."""
    if w.chance(0.25):
        return _cast(w, x)
    if not x.floating:
        text = w.one(INTEGER_STEPS).format(
            x=x.name,
            c=number(w, x.dtype),
            d=literal(w.one(_divisors(x.dtype)), x.dtype),
            s=literal(w.one((0, 1, 2, 3, 5)), x.dtype),
        )
        return Vector(w.let(text, "t"), x.dtype)
    if w.chance(0.15):
        return Vector(w.let(f"{x.name} * {_factor(w, x.dtype)}", "t"), x.dtype)
    text = w.one(FLOAT_STEPS).format(
        x=x.name,
        f=literal(w.one(FRACTIONS), x.dtype),
        g=literal(w.one((3.0, 0.1, 1e4, 7.0, -2.0)), x.dtype),
    )
    return Vector(w.let(text, "t"), x.dtype)


def _factor(w: Writer, dtype: str) -> str:
    """A factor that is given."""
    return w.argument("s", (), w.one(("positive", "normal", "times 1e-30")), dtype)


def _divisors(dtype: str) -> tuple[int, ...]:
    return (1, 2, 3, 4, 7) if dtype.startswith("u") else (1, 2, 3, 4, 7, -1, -2, -3)


def _cast(w: Writer, x: Vector) -> Vector:
    """The same numbers in another dtype, as far as it holds them."""
    dtype = w.one((*INTEGERS, *FLOATS, "int32", "float32"))
    return Vector(w.let(f"{x.name}.astype(jnp.{dtype})", "t"), dtype)
