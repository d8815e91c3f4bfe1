"""Attention to latents that all heads share, before and after weights are absorbed."""

from __future__ import annotations

from tests.soundness import operands, scores
from tests.soundness.program import Program
from tests.soundness.writer import Writer

ODD_LATENTS = (
    "{c} + 1e-3", "2.0 * {c}", "{c}[:, ::-1]", "abs({c})", "jnp.tanh({c})", "-{c}",
    "{c}.astype(jnp.bfloat16).astype(jnp.float32)", "jnp.where({c} > 0.0, {c}, 0.0)",
    "lax.stop_gradient({c})", "jnp.nan_to_num({c})", "jnp.roll({c}, 1, -1)",
)  # fmt: skip
MASKS = (
    "{c} < {n}[:, None, None, None]", "{c} < {n}.max()",
    "{c} < jnp.maximum({n}, 1)[:, None, None, None]", "{r} >= {c}",
    "{r} + {n}[:, None, None, None] >= {c}", "{c} >= {n}[:, None, None, None]",
)  # fmt: skip


def program(seed: int) -> Program:
    """Latent attention, or what looks like it."""
    w = Writer("latent", seed)
    b, t, s, n = w.one((1, 2)), w.one((1, 1, 3, 16)), 16, w.one((1, 2, 4))
    dtype = w.mostly("float32", ("bfloat16",), 0.8)
    given = lambda name, *shape: w.argument(
        name, shape, operands.values(w, 0.1), dtype, operand=True
    )
    c, rope = given("c", b, s, 16), given("r", b, s, 8)
    if w.chance(0.3):
        one = w.let(f"jnp.concatenate([{c}, {rope}], -1)", "cache")
        c, rope = f"{one}[..., :16]", f"{one}[..., 16:]"
    c, other = w.let(c, "c"), c
    if w.chance(0.2):
        other = w.let(w.one(ODD_LATENTS).format(c=c), "c")
    queries = given("q", b, t, n, 8), given("p", b, t, n, 8)
    score, value = _expanded(w, (c, other, rope), queries, n)
    rows, columns = f"jnp.arange({t})[:, None]", f"jnp.arange({s})"
    if w.chance(0.7):
        lengths = w.argument("n", (b,), "lengths", "int32")
        text = w.one(MASKS).format(r=rows, c=columns, n=lengths)
        score = scores.masked(w, score, w.let(text, "m"))
    weights = w.let(w.usually(scores.WEIGHTS[:6], scores.ODD_WEIGHTS).format(s=score))
    return w.program(w.let(value.format(w=weights), "o"))


def _expanded(
    w: Writer, made: tuple[str, str, str], queries: tuple[str, str], n: int
) -> tuple[str, str]:
    """Scores, and the text of what weights make of values."""
    (c, other, rope), (q, p) = made, queries
    up = w.argument("u", (16, n, 8), "normal", operand=True)
    down = w.argument("d", (16, n, 8), "normal", operand=True)
    turned = w.let(f"jnp.einsum('btnr,bsr->bnts', {p}, {rope})", "s")
    if w.chance(0.5):
        wide = w.let(f"jnp.einsum('btnh,cnh->btnc', {q}, {up})", "q")
        if w.chance(0.3):
            both = w.let(f"jnp.concatenate([{wide}, {p}], -1)", "q")
            all_keys = w.let(f"jnp.concatenate([{c}, {rope}], -1)", "k")
            score = f"jnp.einsum('btnc,bsc->bnts', {both}, {all_keys}) * 0.25"
        else:
            score = f"(jnp.einsum('btnc,bsc->bnts', {wide}, {c}) + {turned}) * 0.25"
        value = f"jnp.einsum('bnts,bsc->btnc', {{w}}, {other})"
        if w.chance(0.6):
            value = f"jnp.einsum('btnc,cnh->btnh', {value}, {down})"
        return w.let(score, "s"), value
    keys = w.let(f"jnp.einsum('bsc,cnh->bsnh', {c}, {up})", "k")
    values = w.let(f"jnp.einsum('bsc,cnh->bsnh', {other}, {down})", "v")
    if w.chance(0.4):
        shape = f"(*{keys}.shape[:3], 8)"
        wide = f"jnp.broadcast_to({rope}[:, :, None], {shape})"
        keys = w.let(f"jnp.concatenate([{keys}, {wide}], -1)", "k")
        q = w.let(f"jnp.concatenate([{q}, {p}], -1)", "q")
        score = f"jnp.einsum('btnh,bsnh->bnts', {q}, {keys}) * 0.25"
    else:
        score = f"(jnp.einsum('btnh,bsnh->bnts', {q}, {keys}) + {turned}) * 0.25"
    return w.let(score, "s"), f"jnp.einsum('bnts,bsnh->btnh', {{w}}, {values})"
