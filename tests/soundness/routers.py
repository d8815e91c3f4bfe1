"""Routers: tokens sorted or dispatched to experts, and what comes back added up."""

from __future__ import annotations

from tests.soundness import operands
from tests.soundness.program import Program
from tests.soundness.writer import Writer

GATES = (
    "jax.nn.softmax({y}, -1)", "jax.nn.sigmoid({y})", "jax.nn.softmax({y} / 0.5, -1)",
    "jax.nn.softmax({y} + 0.1 * jax.random.normal(jax.random.key(1), {y}.shape), -1)",
    "jax.nn.softmax(jnp.clip({y}, -3.0, 3.0), -1)", "jnp.exp({y})", "{y}",
    "jax.nn.softmax(30.0 * jnp.tanh({y} / 30.0), -1)",
)  # fmt: skip
SHARED = (
    "{p}", "{p} / {p}.sum(-1, keepdims=True)", "jax.nn.softmax({p}, -1)",
    "{p} / ({p}.sum(-1, keepdims=True) + 1e-20)", "lax.stop_gradient({p})",
    "{p} / jnp.maximum({p}.sum(-1, keepdims=True), 1e-3)", "{p} * 2.5",
)  # fmt: skip
SIZES = (
    "jnp.bincount({f}, length=4).astype(jnp.int32)",
    "jax.nn.one_hot({f}, 4, dtype=jnp.int32).sum(0)",
    "jnp.zeros(4, jnp.int32).at[{f}].add(1)",
    "jax.ops.segment_sum(jnp.ones_like({f}), {f}, 4)",
    "jnp.minimum(jnp.bincount({f}, length=4), 5).astype(jnp.int32)",
    "jnp.diff(jnp.searchsorted(jnp.sort({f}), jnp.arange(5))).astype(jnp.int32)",
    "jnp.bincount({f}, length=4).astype(jnp.uint8)",
)  # fmt: skip
BACK = (
    "jax.ops.segment_sum({y}, {r}, {m})", "jnp.zeros(({m}, {d})).at[{r}].add({y})",
    "jnp.zeros(({m}, {d})).at[{r}].add({y}, mode='drop')",
    "{y}[jnp.argsort({o})].reshape({m}, {k}, {d}).sum(1)",
    "jnp.zeros_like({y}).at[{o}].set({y}).reshape({m}, {k}, {d}).sum(1)",
    "jnp.einsum('rm,rd->md', jax.nn.one_hot({r}, {m}), {y})",
)  # fmt: skip
UNITS = (
    "lax.ragged_dot({x}, {a}, {n})", "lax.ragged_dot({x}, {a}, {n})",
    "jax.nn.silu(lax.ragged_dot({x}, {a}, {n})) * lax.ragged_dot({x}, {b}, {n})",
    "jax.nn.relu(lax.ragged_dot({x}, {a}, {n})) ** 2",
    "(lambda g, u: (jnp.clip(u, -7, 7) + 1) * jnp.minimum(g, 7) * "
    "jax.nn.sigmoid(1.702 * jnp.minimum(g, 7)))(lax.ragged_dot({x}, {a}, {n}),"
    " lax.ragged_dot({x}, {b}, {n}))",
)  # fmt: skip
DENSE = (
    "jnp.einsum('me,ekf,mk->mf', {g}, {a}, {x})",
    "(jnp.einsum('mk,ekf->mef', {x}, {a}) * {g}[..., None]).sum(1)",
    "jnp.einsum('mef,me->mf', jax.nn.silu(jnp.einsum('mk,ekf->mef', {x}, {a}))"
    " * jnp.einsum('mk,ekf->mef', {x}, {b}), {g})",
    "jnp.take_along_axis(jnp.einsum('mk,ekf->mef', {x}, {a}),"
    " {g}.argmax(-1)[:, None, None], 1)[:, 0]",
)  # fmt: skip


def program(seed: int) -> Program:
    """Tokens, by the experts that a router names."""
    w = Writer("router", seed)
    m, k, d, most = w.one((12, 24)), 8, w.one((8, 16)), w.one((1, 2))
    x = w.argument("x", (m, k), operands.values(w, 0.1), operand=True)
    r = w.argument("r", (k, 4), w.one(("normal", "ties", "times 60")), operand=True)
    gates = w.let(w.one(GATES).format(y=w.let(f"{x} @ {r}", "y")), "g")
    a = w.argument("a", (4, k, d), "normal", operand=True)
    names = {"m": m, "d": d, "k": most, "x": x, "a": a}
    dense = w.chance(0.3)
    text = w.one(DENSE if dense else UNITS)
    if "{b}" in text:
        names["b"] = w.argument("b", (4, k, d), "normal", operand=True)
    p = w.let(f"lax.top_k({gates}, {most})[0]", "p")
    e = w.let(f"lax.top_k({gates}, {most})[1]", "e")
    p = w.let(w.one(SHARED).format(p=p), "p")
    if dense:
        g = w.let(f"(jax.nn.one_hot({e}, 4) * {p}[..., None]).sum(1)", "g")
        return w.program(w.let(text.format(g=g, **names), "o"))
    flat = w.let(f"{e}.reshape(-1)", "f")
    order = w.let(f"jnp.argsort({flat}, stable=True)", "o")
    rows = w.let(f"{order} // {most}", "r")
    sizes = w.let(w.one(SIZES).format(f=flat), "n")
    names |= {"n": sizes, "x": w.let(f"{x}[{rows}]", "x")}
    y = w.let(text.format(**names), "y")
    if w.chance(0.8):
        y = w.let(f"{y} * {p}.reshape(-1)[{order}][:, None]", "y")
    return w.program(w.let(w.one(BACK).format(y=y, r=rows, o=order, **names), "o"))
