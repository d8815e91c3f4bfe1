"""Attention of rows of pairs, with a bias that is made of pairs and a gate."""

from __future__ import annotations

from tests.soundness import operands, scores
from tests.soundness.program import Program
from tests.soundness.writer import Writer

HIDDEN = (
    "1e9 * ({m} - 1.0)", "-1e9 * (1.0 - {m})", "jnp.where({m} > 0.5, 0.0, -1e9)",
    "jnp.where({m} > 0.5, 0.0, -jnp.inf)", "1e4 * ({m} - 1.0)", "jnp.log({m})",
    "jnp.where({m} > 0.5, 0.0, jnp.finfo(jnp.float32).min)", "{m} - 1.0",
    "jnp.log({m} + 1e-9)", "1e9 * (jnp.round({m}) - 1.0)",
)  # fmt: skip
MADE = (
    "jnp.einsum('ijc,ch->hij', {z}, {w})", "jnp.einsum('ijc,ch->hji', {z}, {w})",
    "jnp.moveaxis({z} @ {w}, -1, 0)", "jnp.tanh(jnp.moveaxis({z} @ {w}, -1, 0))",
    "jax.nn.log_softmax(jnp.moveaxis({z} @ {w}, -1, 0), -1)",
    "jnp.maximum(jnp.moveaxis({z} @ {w}, -1, 0), -1e9)",
    "lax.stop_gradient(jnp.moveaxis({z} @ {w}, -1, 0))",
)  # fmt: skip
GATED = (
    "{o} * jax.nn.sigmoid({g})", "{o} * jax.nn.sigmoid({g} + 1.0)", "{o} * {g}",
    "{o} / (1.0 + jnp.exp(-{g}))", "{o} + {g}", "jnp.where({g} > 0.0, {o}, 0.0)",
)  # fmt: skip


def program(seed: int) -> Program:
    """Triangle attention, or what looks like it."""
    w = Writer("triangle", seed)
    size, n = w.one((8, 12)), w.one((1, 2))
    z = w.argument("z", (size, size, 8), operands.values(w, 0.1), operand=True)
    z = operands.changed(w, z, 1) if w.chance(0.2) else z
    if w.chance(0.3):
        z = w.let(f"{z}.swapaxes(0, 1)", "z")
    matrix = lambda name, *shape: w.argument(name, shape, "normal", operand=True)
    q, k, v, g = (
        w.let(f"jnp.einsum('rtc,cnh->rtnh', {z}, {matrix(x, 8, n, 8)})", x)
        for x in "qkvg"
    )
    bias = w.let(w.one(MADE).format(z=z, w=matrix("w", 8, n)), "b")
    score = w.let(f"jnp.einsum('rtnh,rsnh->rnts', {q}, {k}) * 0.35", "s")
    if w.chance(0.7):
        m = w.argument("m", (size, size), "none", "bool")
        m = w.let(f"{m}.astype(jnp.float32)", "m")
        hidden = w.let(w.one(HIDDEN).format(m=m), "h")
        score = w.let(f"{score} + {hidden}[:, None, None, :]", "s")
    score = w.let(f"{score} + {bias}", "s")
    weights = w.let(w.usually(scores.WEIGHTS[:6], scores.ODD_WEIGHTS).format(s=score))
    out = w.let(f"jnp.einsum('rnts,rsnh->rtnh', {weights}, {v})", "o")
    if w.chance(0.6):
        out = w.let(w.one(GATED).format(o=out, g=g), "o")
    return w.program(out)
