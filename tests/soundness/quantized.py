"""Products with matrices of few bits, or nearly: numbers, steps to floats, groups."""

from __future__ import annotations

from tests.soundness.program import Program
from tests.soundness.writer import Writer

VALUES = (
    "normal", "normal", "times 60", "some zeros", "rows of other magnitudes",
    "some 1e30 or 1e-30", "some inf or -inf", "some nan", "times 1e-3", "identity rows",
)  # fmt: skip
SCALES = (
    "positive", "positive", "normal", "times 1e-3", "some zeros", "times 60",
    "some 1e30 or 1e-30", "some inf", "some nan",
)  # fmt: skip
FEW_BITS = ("uint8", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "int16", "bool")
WIDE = (
    "{q}.astype({x}.dtype)", "{q}.astype(jnp.float32)", "{q}.astype(jnp.bfloat16)",
    "lax.convert_element_type({q}, jnp.float32)", "{q}.astype(jnp.float16)",
)  # fmt: skip
ODD_WIDE = (
    "abs({q}.astype(jnp.float32))", "jnp.maximum({q}.astype(jnp.float32), -100.0)",
    "({q} >> 1).astype(jnp.float32)", "({q} & 15).astype(jnp.float32)",
    "(({q} & 15) - 8).astype(jnp.float32)", "({q} + {q}).astype(jnp.float32)",
    "(-{q}).astype(jnp.float32)", "{q}.astype(jnp.int8).astype(jnp.float32)",
    "{q}.astype(jnp.uint8).astype(jnp.float32)", "jnp.square({q}.astype(jnp.float32))",
    "({q}.astype(jnp.int32) * 3).astype(jnp.float32)",
    "({q}.astype(jnp.int32) - 200).astype(jnp.int8).astype(jnp.float32)",
    "lax.bitcast_convert_type({q}, jnp.uint8).astype(jnp.float32)",
)  # fmt: skip
JOINED = (
    "{w} * {c}", "{w} * {c}", "{c} * {w}", "{w} / {c}", "{w} - {c}", "{w} + {c}",
    "{w} * {c}.astype({w}.dtype)", "{w} - {c}.astype({w}.dtype)", "({w} - 8) * {c}",
    "({w} * {c}).astype(jnp.bfloat16)", "({w} * {c}).astype({x}.dtype)", "{w} * 0.0173",
    "{w}.astype(jnp.bfloat16)", "{w}.astype(jnp.float32)", "-{w}", "{w} * 0.125",
)  # fmt: skip
ODD_JOINED = (
    "{c} - {w}", "{c} / {w}", "{w} * {w}", "jnp.tanh({w} * {c})", "{w} * {c} + 1.0",
    "jnp.clip({w} * {c}, -1.0, 1.0)", "jnp.where({w} > 0, {w} * {c}, 0.0)",
    "jnp.maximum({w} * {c}, 0.0)", "jnp.round({w} * {c})", "{w} * {c} * {c}",
    "{w} * abs({c})", "jnp.nan_to_num({w} * {c})", "{w} * jnp.exp({c})",
    "{w}[::-1] * {c}", "({w} - {c}) * {c}", "lax.stop_gradient({w}) * {c}",
    "lax.stop_gradient({w} * {c})",
)  # fmt: skip
PRODUCTS = (
    "{x} @ {w}", "{x} @ {w}", "jnp.dot({x}, {w})", "jnp.einsum('mk,kn->mn', {x}, {w})",
    "jnp.einsum('mk,kn->nm', {x}, {w})", "({w}.T @ {x}.T).T",
    "lax.dot_general({x}, {w}.astype({x}.dtype), (((1,), (0,)), ((), ())))",
    "lax.dot_general({w}, {x}, (((0,), (1,)), ((), ())))",
    "jnp.matmul({x}, {w}, precision='highest')", "{x} @ {w}.astype({x}.dtype)",
    "({x} * 0.5) @ {w}", "{x}[:, None] @ {w}", "jax.vmap(lambda r: r @ {w})({x})",
    "({x} @ {w}).astype({x}.dtype)", "{x}.astype(jnp.bfloat16) @ {w}",
)  # fmt: skip
ODD_PRODUCTS = (
    "{x}[:, ::-1] @ {w}", "{x} @ {w}[::-1]", "{x}[:, :8] @ {w}[:8]", "{x} @ {w}[:, 1:]",
    "({x}[:, :, None] * {w}).sum(1)", "jnp.cumsum({x} @ {w}, -1)", "{x} @ abs({w})",
    "{x} @ ({w} - {w}.mean(0))", "{x} @ ({w} + jnp.eye(*{w}.shape))",
    "jnp.einsum('mk,kn,kn->mn', {x}, {w}, {w})", "({x} @ {w}) @ {w}.T",
    "{x} @ jnp.concatenate([{w}, {w}], 1)", "jnp.round({x}) @ {w}",
)  # fmt: skip
AFTER = (
    "{o} * {b}", "{o} + {b}", "{o} * 2.0", "jnp.tanh({o})", "{o}.astype(jnp.float32)",
    "({o} * {b}).astype({x}.dtype)", "{o}.astype(jnp.bfloat16) * {b}", "{o} / {b}",
)  # fmt: skip


def program(seed: int) -> Program:
    """Rows times a matrix of few bits, in steps that round."""
    w = Writer("quantized", seed)
    m, k, n = w.one((8, 16)), w.one((32, 64, 96)), w.one((8, 24, 32))
    dtype = w.mostly("float32", ("bfloat16", "float16"), 0.5)
    values = w.one(VALUES)
    if values == "identity rows":
        x = w.argument("x", (m, k), "some zeros", dtype, operand=True)
        x = w.let(f"jnp.eye({m}, {k}, dtype={x}.dtype) + 0 * {x}", "x")
    else:
        x = w.argument("x", (m, k), values, dtype, operand=True)
    matrix = _matrix(w, x, k, n)
    text = w.usually(PRODUCTS, ODD_PRODUCTS)
    out = w.let(text.format(x=x, w=matrix), "o")
    if w.chance(0.3):
        text = w.one(AFTER)
        b = w.argument("b", (1,), w.one(SCALES), operand=True) if "{b}" in text else ""
        out = w.let(text.format(o=out, b=b, x=x), "o")
    return w.program(out)


def _matrix(w: Writer, x: str, k: int, n: int) -> str:
    """The matrix of floats, [k, n], by the steps from its numbers."""
    bits = w.mostly("int8", FEW_BITS, 0.5)
    groups = w.one((1, 1, 2, 4, k // 8))
    turned = w.chance(0.25)
    shape = (n, groups, k // groups) if turned else (groups, k // groups, n)
    whole = (n, k) if turned else (k, n)
    stored = shape if groups > 1 and w.chance(0.3) else whole
    values = "normal" if bits.startswith("float8") else "all numbers"
    q = w.argument(
        "q", stored, w.mostly(values, _OTHERS.get(bits, ("small",)), 0.8), bits
    )
    odd = 0.0 if bits.startswith("float8") or bits == "bool" else 0.12
    of = w.let(w.usually(WIDE, ODD_WIDE, odd).format(q=q, x=x), "w")
    if groups > 1 and stored == whole:
        of = w.let(f"{of}.reshape{shape}", "w")
    for _ in range(w.one((0, 1, 1, 2, 2, 3))):
        text = w.usually(JOINED, ODD_JOINED, 0.12)
        c = _constant(w, n, groups, turned) if "{c}" in text else ""
        of = w.let(text.format(w=of, c=c, x=x), "w")
    if groups > 1:
        of = w.let(f"{of}.reshape{whole}", "w")
    return w.let(f"{of}.T", "w") if turned else of


_OTHERS = {
    "float8_e4m3fn": ("times 60", "some nan", "some inf"),
    "float8_e5m2": ("times 60", "some nan", "some inf"),
    "bool": ("most",),
    "int8": ("small", "near ends"),
    "uint8": ("small", "near ends"),
    "int16": ("small", "near ends"),
    "int4": ("all numbers",),
    "uint4": ("all numbers",),
}


def _constant(w: Writer, n: int, groups: int, turned: bool) -> str:
    """A scale or a zero point: of a column, of a group of one, or of all numbers."""
    by_column = (n, 1) if turned else (n,)
    by_group = (n, groups, 1) if turned else (groups, 1, n)
    grouped = groups > 1
    columns = ((n, 1, 1) if turned else (n,)) if grouped else by_column
    some = (by_group, by_group, columns, ()) if grouped else (columns, columns, ())
    shape = w.one(some)
    if w.chance(0.15):
        bits = w.one(("int8", "uint8", "int32"))
        return w.let(
            f"{w.argument('z', shape, 'small', bits)}.astype(jnp.float32)", "z"
        )
    dtype = w.mostly("float32", ("bfloat16", "float16"), 0.7)
    return w.argument("c", shape, w.one(SCALES), dtype, operand=True)
