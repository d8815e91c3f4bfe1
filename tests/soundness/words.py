"""Products with numbers of four bits in bytes or words, or nearly; with codebooks."""

from __future__ import annotations

from tests.soundness.program import Program
from tests.soundness.quantized import SCALES, VALUES
from tests.soundness.writer import Writer

SHIFTS = ("jnp.arange(0, 32, 4)", "jnp.arange(8) * 4", "28 - 4 * jnp.arange(8)")
ODD_SHIFTS = (
    "jnp.arange(8) * 3", "jnp.arange(8) * 4 + 1", "jnp.arange(8)",
    "jnp.array([0, 4, 8, 8, 16, 20, 24, 28])", "jnp.arange(8) // 2 * 4",
    "jnp.arange(8) * 4 % 28",
)  # fmt: skip
ORDERS = ([0, 4, 1, 5, 2, 6, 3, 7], [0, 2, 4, 6, 1, 3, 5, 7], [7, 6, 5, 4, 3, 2, 1, 0])
ODD_ORDERS = ([0, 0, 1, 1, 2, 2, 3, 3], [1, 2, 3, 4, 5, 6, 7, 7])
MASKS = (15, 15, 15, "0xF", 7, 31, 255, 14)
SIGNED = ("({w} << (28 - {s})) >> 28", "(({w} >> {s}) & 15 ^ 8) - 8")
AFTER = (
    "{q} - 8", "{q} + 1", "{q}", "{q}", "{q} * 2", "jnp.maximum({q}, 1)", "-{q}",
    "{q}.astype(jnp.int8)", "{q}.astype(jnp.uint8)", "({q} - 8).astype(jnp.int8)",
)  # fmt: skip
WIDE = ("{q}.astype({x}.dtype)", "{q}.astype(jnp.float32)", "{q}.astype(jnp.bfloat16)")
TABLES = (
    "jnp.linspace(-1.0, 1.0, 16)", "jnp.arange(16.0) ** 2", "jnp.sin(jnp.arange(16.0))",
)  # fmt: skip
GIVEN = (
    "jnp.array([-1, -.7, -.5, -.4, -.3, -.2, -.1, 0, .1, .2, .25, .3, .4, .6, .7, 1])"
)
LOOKED_UP = (
    "{t}[{q}]", "{t}[{q}]", "jnp.take({t}, {q}, axis=0)", "{t}[{q}.astype(jnp.int32)]",
    "{t}[jnp.clip({q}, 0, 15)]", "{t}[15 - {q}]", "{t}[{q} ^ 1]", "{t}[{q} % 8]",
    "{t}[jnp.where({q} > 3, {q}, 3)]",
)  # fmt: skip


def program(seed: int) -> Program:
    """Rows times a matrix of packed numbers."""
    w = Writer("words", seed)
    m, k, n = w.one((8, 16)), w.one((32, 64)), w.one((8, 24, 32))
    dtype = w.mostly("float32", ("bfloat16", "float16"), 0.5)
    x = w.argument("x", (m, k), w.one(VALUES[:3]), dtype, operand=True)
    groups = w.one((1, 2, 4))
    q = w.branch(lambda: _of_words(w, k, n), lambda: _of_bytes(w, k, n))
    if w.chance(0.3):
        t = w.let(f"jnp.asarray({w.one((GIVEN, *TABLES))}, jnp.float32)", "t")
        of = w.let(w.one(LOOKED_UP).format(t=t, q=q), "w")
        if w.chance(0.3):
            of = w.let(f"{of}.astype({x}.dtype)", "w")
    else:
        q = w.let(w.one(AFTER).format(q=q), "q")
        if w.chance(0.4):
            zeros = _zeros(w, groups, n)
            q = w.let(f"{q}.reshape({groups}, -1, {n}) - {zeros}[:, None]", "q")
            q = w.let(f"{q}.reshape({k}, {n})", "q")
        of = w.let(w.one(WIDE).format(q=q, x=x), "w")
    if w.chance(0.8):
        c = w.argument("c", (groups, n), w.one(SCALES), "float32", operand=True)
        of = w.let(f"{of}.reshape({groups}, -1, {n}) * {c}[:, None]", "w")
        of = w.let(f"{of}.reshape({k}, {n})", "w")
    if w.chance(0.5):
        of = w.let(f"{of}.astype({x}.dtype)", "w")
    return w.program(w.let(f"{x} @ {of}", "o"))


def _of_words(w: Writer, k: int, n: int) -> str:
    """Numbers [k, n] of words of rows, of columns, or of transposed rows."""
    way = w.one(("rows", "rows", "columns", "transposed", "behind"))
    shape = {"columns": (k, n // 8), "transposed": (n, k // 8)}.get(way, (k // 8, n))
    dtype = w.mostly("int32", ("uint32", "int16"), 0.85)
    words = w.argument("q", shape, "all numbers", dtype)
    wide = f"{words}[:, None]" if way == "rows" else f"{words}[:, :, None]"
    wide = f"{words}[None]" if way == "behind" else wide
    shifts = f"({w.usually(SHIFTS, ODD_SHIFTS)}).astype({words}.dtype)"
    tail = {"rows": "[:, None]", "behind": "[:, None, None]"}.get(way, "")
    s = w.let(f"{shifts}{tail}", "s")
    if w.chance(0.2):
        q = w.let(w.one(SIGNED).format(w=wide, s=s), "q")
    else:
        q = w.let(f"({wide} >> {s}) & {w.mostly(15, MASKS, 0.8)}", "q")
    q = w.let(f"{q}.reshape({n if way == 'transposed' else k}, -1)", "q")
    if way == "columns" and w.chance(0.5):
        order = w.mostly(w.one(ORDERS), ODD_ORDERS, 0.8)
        at = w.let(f"jnp.arange({n}).reshape(-1, 8)[:, jnp.array({order})]", "r")
        q = w.let(f"{q}[:, {at}.reshape(-1)]", "q")
    return w.let(f"{q}.T", "q") if way == "transposed" else q


def _of_bytes(w: Writer, k: int, n: int) -> str:
    """Numbers [k, n] of bytes, in turns or in halves."""
    p = w.argument("q", (k // 2, n), "all numbers", w.mostly("uint8", ("int8",)))
    low, high = f"{p} & 15", w.one((f"{p} >> 4", f"({p} >> 4) & 15", f"{p} >> 5"))
    both = w.one((f"[{low}, {high}]", f"[{high}, {low}]", f"[{low}, {low}]"))
    if w.chance(0.5):
        return w.let(f"jnp.stack({both}, 1).reshape({k}, {n})", "q")
    return w.let(f"jnp.concatenate({both})", "q")


def _zeros(w: Writer, groups: int, n: int) -> str:
    """Zero points: packed, too, or given."""
    if w.chance(0.3):
        return w.argument("z", (groups, n), "small", w.one(("int32", "int8")))
    z = w.argument("z", (groups, n // 8), "all numbers", "int32")
    made = f"({z}[:, :, None] >> (jnp.arange(8) * 4)) & 15"
    return w.let(f"({made}).reshape({groups}, {n}) + {w.one((0, 1))}", "z")
