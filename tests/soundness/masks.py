"""Masks: booleans of queries and keys, from positions, lengths, data and logic."""

from __future__ import annotations

from dataclasses import dataclass

from tests.soundness.positions import Vector, number, vector
from tests.soundness.writer import INTEGERS, Writer, literal

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
NAMED = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
DIFFERENCES = (
    "{r} - {c}", "{c} - {r}", "abs({r} - {c})", "{r} + {c}", "{r} * {c}",
    "jnp.maximum({r}, {c}) - {c}", "jnp.sign({r} - {c})", "({r} - {c}) * ({r} - {c})",
)  # fmt: skip
GATES = (
    "jax.nn.softmax({g}) > 1e-6", "jax.nn.log_softmax({g}) > -20.0",
    "jax.nn.sigmoid(3 * {g}) > 0.3", "jnp.tanh(3 * {g}) > 0.3",
    "jax.nn.softplus(3 * {g}) > 0.3", "jnp.cumsum(jax.nn.softmax({g}), -1) < 0.9",
    "jnp.exp({g}) > 0.5", "{g} >= lax.top_k({g}, 5)[0][..., -1:]",
    "{g} >= jnp.sort({g}, -1)[..., -6:-5]", "jnp.cumsum({g}, -1) > 0.0",
    "{g} > {g}.mean(-1, keepdims=True)", "jnp.isfinite({g})", "{g} == {g}",
    "{g} - jax.nn.logsumexp({g}, -1, keepdims=True) > -15.0", "abs({g}) < 1e20",
    "jnp.exp({g} - {g}.max(-1, keepdims=True)) > 1e-3", "1.0 / {g} > 0.0",
    "jnp.argsort(jnp.argsort({g}, -1), -1) > 4", "{g} * {g} > 0.0",
    "jnp.nan_to_num({g}) != 0.0", "{g} / (1.0 + abs({g})) > -0.9",
    "({g} - {g}) == 0.0", "jnp.log(jax.nn.softmax({g}) + 1e-6) > -10.0",
)  # fmt: skip
GATE_VALUES = (
    "normal", "times 60", "ties", "some inf", "some nan or inf", "some 1e30 or 1e-30",
    "some zeros", "denormal",
)  # fmt: skip
LOGIC = (
    "{a} & {b}", "{a} | {b}", "{a} ^ {b}", "~{a} | {b}", "{a} & ~{b}", "{a} == {b}",
    "jnp.logical_and({a}, {b})", "{a} * {b}", "jnp.where({a}, {b}, ~{b})",
    "({a}.astype(jnp.float32) * {b}.astype(jnp.float32)) > 0.0", "{a} >= {b}",
    "({a}.astype(jnp.int8) + {b}.astype(jnp.int8)) > 0", "jnp.maximum({a}, {b})",
    "({a}.astype(jnp.int32) + {b}.astype(jnp.int32)) == 2",
    "({a}.astype(jnp.float32) - {b}.astype(jnp.float32)) <= 0.0",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sequences, queries, keys and heads."""

    batch: int
    queries: int
    keys: int
    heads: int


def mask(w: Writer, sizes: Sizes, depth: int = 2) -> str:
    """A mask that broadcasts to (batch, heads, queries, keys)."""
    if depth == 0 or w.chance(0.25):
        return _plain(w, sizes)
    a = mask(w, sizes, depth - 1)
    if w.chance(0.1):
        return w.let(f"~{a}", "m")
    return w.let(w.one(LOGIC).format(a=a, b=mask(w, sizes, depth - 1)), "m")


def causal(w: Writer, sizes: Sizes) -> str:
    """The mask that most programs have."""
    rows, columns = f"jnp.arange({sizes.queries})", f"jnp.arange({sizes.keys})"
    return w.let(f"{rows}[:, None] >= {columns}[None, :]", "m")


def _plain(w: Writer, sizes: Sizes) -> str:
    return w.branch(
        lambda: _compared(w, sizes),
        lambda: _compared(w, sizes),
        lambda: _difference(w, sizes),
        lambda: _difference(w, sizes),
        lambda: causal(w, sizes),
        lambda: _lengths(w, sizes),
        lambda: _gated(w, sizes),
        lambda: _gated(w, sizes),
        lambda: _data(w, sizes),
        lambda: _one_side(w, sizes),
    )


def _pair(w: Writer, sizes: Sizes) -> tuple[Vector, Vector]:
    """Positions of queries and of keys, mostly the same."""
    rows = vector(w, sizes.queries)
    if sizes.queries == sizes.keys and w.chance(0.7):
        return rows, rows
    columns = vector(w, sizes.keys)
    same = w.let(f"{columns.name}.astype({rows.name}.dtype)", "t")
    return rows, Vector(same, rows.dtype)


def _compare(w: Writer, left: str, right: str) -> str:
    """One of six comparisons, spelled in one of three ways."""
    which = w.draw.randrange(6)
    infix = f"{left} {COMPARISONS[which]} {right}"
    text = w.one((infix, infix, f"jnp.{NAMED[which]}({left}, {right})", f"~({infix})"))
    return w.let(text, "m")


def _compared(w: Writer, sizes: Sizes) -> str:
    """Queries' positions against keys'."""
    rows, columns = _pair(w, sizes)
    left, right = f"{rows.name}[:, None]", f"{columns.name}[None, :]"
    if w.chance(0.35):
        left = f"{left} {w.one('+-*')} {number(w, rows.dtype)}"
    if w.chance(0.35):
        right = f"{right} {w.one('+-*')} {number(w, rows.dtype)}"
    if w.chance(0.15) and rows.floating:
        scale = w.argument("s", (), w.one(("positive", "normal")), rows.dtype)
        left, right = f"({left}) * {scale}", f"({right}) * {scale}"
    return _compare(w, left, right)


def _difference(w: Writer, sizes: Sizes) -> str:
    """Distances against a number."""
    rows, columns = _pair(w, sizes)
    text = w.one(DIFFERENCES[:3] + DIFFERENCES).format(
        r=f"{rows.name}[:, None]", c=f"{columns.name}[None, :]"
    )
    distance = w.let(text, "d")
    if w.chance(0.3):
        text = w.one(("{d} // {c}", "{d} % {c}", "{d} * {c}", "{d} + {c}"))
        small = literal(w.one((1, 2, 3, 7)), rows.dtype)
        distance = w.let(text.format(d=distance, c=small), "d")
    window = _compare(w, distance, number(w, rows.dtype))
    if w.chance(0.4):
        return window
    return w.let(f"{window} & {_compare(w, distance, number(w, rows.dtype))}", "m")


def _one_side(w: Writer, sizes: Sizes) -> str:
    """Positions of one side against a number."""
    if w.chance(0.5):
        rows = vector(w, sizes.queries)
        return _compare(w, f"{rows.name}[:, None]", number(w, rows.dtype))
    columns = vector(w, sizes.keys)
    return _compare(w, f"{columns.name}[None, :]", number(w, columns.dtype))


def _lengths(w: Writer, sizes: Sizes) -> str:
    """Keys before a length that is given, per program or per sequence."""
    dtype = w.one(INTEGERS)
    each = w.chance(0.5)
    shape = (sizes.batch,) if each else ()
    length = w.argument("n", shape, "lengths", dtype)
    if w.chance(0.5):
        one = literal(1, dtype)
        text = w.one(("{n} - {one}", "{n} + {one}", "{n} // 2", "-{n}", "{n} - 8"))
        length = w.let(text.format(n=length, one=one), "n")
    if each:
        length = f"{length}[:, None, None, None]"
    keys = f"jnp.arange({sizes.keys}, dtype=jnp.{w.one((dtype, dtype, 'int32'))})"
    columns = w.let(keys, "t")
    return _compare(w, columns, length)


def _gated(w: Writer, sizes: Sizes) -> str:
    """Keys that a gate lets through."""
    shape = (sizes.batch, sizes.keys)
    gate = w.argument("g", shape, w.one(GATE_VALUES))
    keep = w.let(w.one(GATES).format(g=gate), "m")
    axis = w.mostly(":, None, None, :", (":, None, None, :", ":, None, :, None"))
    if sizes.queries != sizes.keys:
        axis = ":, None, None, :"
    return w.let(f"{keep}[{axis}]", "m")


def _data(w: Writer, sizes: Sizes) -> str:
    """Masks that are given, and numbers at random."""
    table, keys = (sizes.queries, sizes.keys), (sizes.batch, 1, 1, sizes.keys)
    bits = lambda: _compare(
        w,
        w.argument("r", table, "all numbers", w.one(("uint32", "uint8", "int32"))),
        w.one(("100", "7", "64")),
    )
    large = lambda: _compare(
        w,
        w.argument("r", table, "all numbers", "uint32"),
        literal(w.one((1_000_000_000, 3_000_000_000, 2**31)), "uint32"),
    )
    scores = lambda: _compare(
        w,
        w.argument("r", table, w.one(("normal", "ties", "some nan or inf"))),
        literal(w.one((0.0, 0.5, 1.0)), "float32"),
    )
    return w.branch(
        lambda: w.argument("keep", table, w.one(("most", "half")), "bool"),
        lambda: w.argument("keep", keys, w.one(("most", "half")), "bool"),
        bits,
        large,
        scores,
    )
