"""Programs that add, subtract and round several softmaxes, and multiply by values."""

from __future__ import annotations

from tests.soundness import operands, scores
from tests.soundness.program import Program
from tests.soundness.writer import Writer

SUMS = (
    "{a} - {l} * {b}", "{a} - {b} * {l}", "{a} - {b}", "{a} + {b}",
    "0.8 * {a} - 0.2 * {b}",
    "{a} - lax.stop_gradient({l}) * {b}", "-{b} + {a}", "{l} * {a} + {b}",
)  # fmt: skip
ODD_SUMS = (
    "{a} * {b}", "{a} - {b} * {b}", "jnp.maximum({a} - {b}, 0.0)", "({a} - {b}) ** 2",
    "{a} - jnp.roll({b}, 1, -1)", "{a} / (1.0 + {b})", "{a} - {l} * {b} - {a} * {b}",
    "jnp.where({a} > {b}, {a}, {b})", "{a} - lax.stop_gradient({b})",
)  # fmt: skip
ROUNDED = (
    "{w}.astype(jnp.float8_e4m3fn).astype(jnp.float32)",
    "({w} > 0.0).astype(jnp.float32)",
    "({w} * 60.0).astype(jnp.int8).astype(jnp.float32)", "jnp.round({w} * 16.0) / 16.0",
    "{w}.astype(jnp.float8_e5m2).astype(jnp.float32)", "jnp.clip({w}, -0.1, 0.3)",
    "{w}.astype(bool).astype(jnp.float32)", "lax.reduce_precision({w}, 5, 2)",
)  # fmt: skip


def program(seed: int) -> Program:
    """Attention by a sum of two softmaxes, beside one by the first alone."""
    w = Writer("difference", seed)
    size = scores.sizes(w)
    given = scores.given(w, size, (8, 8), {n: operands.values(w, 0.1) for n in "qkv"})
    first = scores.weights(w, scores.scores(w, given), None)
    shape = (size.batch, size.queries, size.heads, 8)
    q = w.argument("q", shape, "normal", operand=True)
    other = scores.Operands(q, given.k, given.v)
    second = scores.weights(w, scores.scores(w, other), None)
    lead = w.one(((), (size.heads, 1, 1), (size.heads, size.queries, 1)))
    text = w.usually(SUMS, ODD_SUMS, 0.2)
    factor = w.argument("l", lead, "normal", operand=True) if "{l}" in text else ""
    total = w.let(text.format(a=first, b=second, l=factor), "w")
    if w.chance(0.3):
        total = w.let(w.one(ROUNDED).format(w=total), "w")
    out = scores.weighed(w, total, given)
    if w.chance(0.7):
        alone = scores.weighed(w, first, given)
        out = w.let(f"jnp.concatenate([{out}, {alone}], -1)", "o")
    return w.program(out)
