"""Rows of tables that ids name, taken from them or added to them, or nearly."""

from __future__ import annotations

from tests.soundness.program import Program
from tests.soundness.writer import Writer

VALUES = (
    "normal", "normal", "times 60", "some zeros", "rows of other magnitudes",
    "some 1e30 or 1e-30", "some inf", "some nan", "times 1e-3", "ties",
)  # fmt: skip
IDS = (
    "{i}", "{i}", "{i} % {v}", "jnp.clip({i}, 0, {v} - 1)", "jnp.maximum({i}, 0)",
    "jnp.where({i} < 0, {v}, {i})", "jnp.where({i} < 0, {i} + {v}, {i})", "{i} + 1",
    "{i} - 2", "{i}.astype(jnp.int8)", "{i}.astype(jnp.uint8)", "abs({i})", "-{i}",
    "{i} // 2", "{i} * 2", "jnp.sort({i})", "{i}[::-1]", "{i}.astype(jnp.uint32)",
    "jnp.minimum({i}, 3)", "{i} >> 1", "lax.rem({i}, jnp.asarray({v}, {i}.dtype))",
)  # fmt: skip
PLACES = (
    "jnp.arange({m})", "jnp.arange({m}) % 4", "jnp.arange({m}) // 2",
    "jnp.arange({m}) + 2", "{m} - 1 - jnp.arange({m})", "jnp.arange({m}) - 1",
    "jnp.arange({m}) * 2", "jnp.arange({m}) + {n}", "jnp.arange({m}) % 7 + {n}",
    "jnp.zeros({m}, int)", "jnp.full({m}, 3)",
)  # fmt: skip
TAKEN = (
    "{t}[{i}]", "{t}[{i}]", "jnp.take({t}, {i}, axis=0)",
    "jnp.take({t}, {i}, axis=0, mode='clip')", "{t}.at[{i}].get(mode='clip')",
    "jnp.take({t}, {i}, axis=0, mode='fill')",
    "jnp.take({t}, {i}, axis=0, mode='wrap')",
    "{t}.at[{i}].get(mode='fill', fill_value=0)",
    "{t}.at[{i}].get(mode='fill', fill_value=-1.5)",
    "jax.nn.one_hot({i}, {v}, dtype={t}.dtype) @ {t}",
    "jax.vmap(lambda j: {t}[j])({i})", "jnp.take({t}, {i}[:, None], axis=0)[:, 0]",
    "jnp.take_along_axis({t}, {i}[:, None], axis=0)", "{t}.T[:, {i}].T",
    "{t}.at[{i}].get(indices_are_sorted=False)",
)  # fmt: skip
ADDED = (
    "jnp.zeros(({v}, {d}), {r}.dtype).at[{i}].add({r})",
    "jnp.zeros(({v}, {d}), {r}.dtype).at[{i}].add({r}, mode='drop')",
    "jnp.zeros(({v}, {d}), {r}.dtype).at[{i}].add({r}, mode='clip')",
    "{t}.at[{i}].add({r}.astype({t}.dtype))", "{t}.at[{i}].add(-{r}.astype({t}.dtype))",
    "jax.ops.segment_sum({r}, {i}, {v})", "jax.ops.segment_sum({r}, {i}, {v}) + {t}",
    "jax.nn.one_hot({i}, {v}, dtype={r}.dtype).T @ {r}",
    "jnp.einsum('mv,md->vd', jax.nn.one_hot({i}, {v}, dtype={r}.dtype), {r})",
    "jax.ops.segment_sum({r}, {i}, {v}, indices_are_sorted=False)",
    "jnp.full(({v}, {d}), 0.5, {r}.dtype).at[{i}].add({r})",
    "jnp.zeros(({v}, {d}), jnp.float32).at[{i}].add({r})",
    "{t}.at[{i}].subtract({r}.astype({t}.dtype))",
)  # fmt: skip
ODD_ADDED = (
    "{t}.at[{i}].set({r}.astype({t}.dtype))", "{t}.at[{i}].max({r}.astype({t}.dtype))",
    "{t}.at[{i}].multiply({r}.astype({t}.dtype))", "jax.ops.segment_max({r}, {i}, {v})",
    "{t}.at[{i}, :2].add({r}[:, :2].astype({t}.dtype))",
    "{t}.at[:, jnp.arange({d})].add(1.0)", "jax.ops.segment_prod({r}, {i}, {v})",
    "{t}.at[{i}].add(1.0)", "{t}.at[{i}].apply(jnp.sin)", "{t}.at[{i}].min(0.5)",
    "{t}.at[jnp.arange({m}) % {v}, {i} % {d}].add({r}[:, 0].astype({t}.dtype))",
)  # fmt: skip
AFTER = ("{o} * 2.0", "jnp.tanh({o})", "{o}.astype(jnp.float32)", "-{o}", "{o} + 1.0")


def program(seed: int) -> Program:
    """Rows looked up, or added; gradients of the one are the other."""
    w = Writer("lookup", seed)
    m, v, d = w.one((8, 16, 48)), w.one((5, 16, 33, 64)), w.one((4, 8, 16))
    dtype = w.mostly("float32", ("bfloat16", "float16"), 0.7)
    names = {"m": m, "v": v, "d": d, "i": _ids(w, m, v)}
    names["t"] = w.argument("t", (v, d), w.one(VALUES), dtype, operand=True)
    if w.chance(0.5):
        out = w.let(w.one(TAKEN).format(**names), "o")
    else:
        names["r"] = w.argument("r", (m, d), w.one(VALUES), dtype, operand=True)
        out = w.let(w.usually(ADDED, ODD_ADDED).format(**names), "o")
    if w.chance(0.3):
        out = w.let(w.one(AFTER).format(o=out), "o")
    return w.program(out)


def _ids(w: Writer, m: int, v: int) -> str:
    """Ids of rows, of data or by place."""
    if w.chance(0.25):
        n = w.argument("n", (), w.one(("small", "near ends")), "int32")
        return w.let(w.one(PLACES).format(m=m, n=n), "j")
    dtype = w.mostly("int32", ("int8", "int16", "uint8", "uint32"), 0.7)
    values = w.mostly(f"classes of {v}", ("small", "near ends", "segments"), 0.7)
    i = w.argument("i", (m,), values, dtype)
    return w.let(w.one(IDS).format(i=i, v=v), "j")
