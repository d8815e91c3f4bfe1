"""Programs of ragged dots: rows in groups, some of no rows, not always all of them."""

from __future__ import annotations

from tests.soundness import operands, units
from tests.soundness.program import Program
from tests.soundness.writer import Writer

DOTS = (
    "lax.ragged_dot({x}, {m}, {n})", "lax.ragged_dot({x}, {m}, {n})",
    "lax.ragged_dot({x}, {m}, {n}) * 0.5", "-lax.ragged_dot({x}, {m}, {n})",
    "jnp.nan_to_num(lax.ragged_dot({x}, {m}, {n}))",
    "lax.ragged_dot({x} * 2.0, {m}, {n})", "lax.ragged_dot({x}, {m} * 2.0, {n})",
)  # fmt: skip
SIZES = (
    "{n}", "{n}", "{n}", "{n} // 2", "jnp.maximum({n} - 1, 0)", "{n}[::-1]",
    "jnp.where({n} > 3, {n}, 0)", "{n} >> 1", "jnp.minimum({n}, 5)",
)  # fmt: skip
GROUP_OF_ROW = (
    "jnp.repeat(jnp.arange({g}), {n}, total_repeat_length={r})",
    "(jnp.arange({r})[:, None] >= jnp.cumsum({n})[None, :]).sum(-1)",
    "jnp.searchsorted(jnp.cumsum({n}), jnp.arange({r}), side='right')",
)  # fmt: skip
DENSE = (
    "jnp.einsum('mk,mkf->mf', {x}, {m}[{i}])",
    "jnp.einsum('mk,gkf,mg->mf', {x}, {m}, jax.nn.one_hot({i}, {g}))",
    "jnp.where(({i} == 0)[:, None], {x} @ {m}[0], {x} @ {m}[1])",
)  # fmt: skip
VALUES = (
    "normal", "normal", "times 60", "zero rows", "some 1e30 or 1e-30", "some nan",
    "nan rows", "some inf", "rows of other magnitudes",
)  # fmt: skip


def program(seed: int) -> Program:
    """Ragged dots, alone or as a gated linear unit."""
    w = Writer("ragged", seed)
    rows, width, out = w.one((16, 32)), w.one((8, 16)), w.one((8, 16))
    groups = w.one((2, 3, 5, 8))
    x = w.argument("x", (rows, width), w.one(VALUES), operand=True)
    x = operands.changed(w, x) if w.chance(0.2) else x
    total = w.mostly(rows, (16, rows), 0.5)
    n = w.argument("n", (groups,), f"group sizes of about {total}", "int32")
    n = w.let(w.one(SIZES).format(n=n), "n")
    shape = groups, width, out
    if w.chance(0.3):
        a, u = (_dot(w, x, shape, n, rows) for _ in range(2))
        return w.program(units.gated(w, a, u))
    return w.program(_dot(w, x, shape, n, rows))


def _dot(w: Writer, x: str, shape: tuple[int, int, int], n: str, rows: int) -> str:
    """Rows by their groups' matrices."""
    values = w.mostly("normal", ("some nan", "times 1e30", "some zeros"), 0.85)
    matrices = w.argument("w", shape, values, operand=True)
    groups = shape[0]
    if w.chance(0.8):
        text = w.one(DOTS)
        if "nan_to_num" in text and values == "some nan":
            text = DOTS[0]  # 0 * NaN of other groups would be a number
        return w.let(text.format(x=x, m=matrices, n=n), "a")
    group = w.one(GROUP_OF_ROW).format(n=n, r=rows, g=groups)
    index = w.let(group, "i")
    text = w.one(DENSE).format(x=x, m=matrices, i=index, g=groups)
    return w.let(text, "a")
