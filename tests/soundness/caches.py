"""Attention to keys and values of few bits with scales, or nearly."""

from __future__ import annotations

from tests.soundness import quantized, scores
from tests.soundness.masks import Sizes
from tests.soundness.program import Program
from tests.soundness.writer import Writer

BITS = ("int8", "int8", "uint8", "int4", "float8_e4m3fn", "float8_e5m2", "int16")
SCALED = (
    "{w} * {c}", "{w} * {c}", "{c} * {w}", "{w} / {c}", "({w} - 8) * {c}",
    "({w} * {c}).astype(jnp.bfloat16)", "{w} * {c}.astype({w}.dtype)", "{w} * 0.017",
)  # fmt: skip
ODD_SCALED = (
    "{w} * {c} + 1e-3", "jnp.maximum({w} * {c}, 0.0)", "{w} * {c} * {c}", "{c} - {w}",
    "jnp.round({w} * {c})", "jnp.clip({w} * {c}, -1.0, 1.0)", "{w}[:, ::-1] * {c}",
    "jnp.where({w} > 0, {w} * {c}, 0.0)", "lax.stop_gradient({w} * {c})",
    "jnp.nan_to_num({w} * {c})", "({w} - {w}.mean(1, keepdims=True)) * {c}",
)  # fmt: skip
SCALES = ("times 1e-3", "times 1e-3", "positive", "normal", "some zeros", "some nan")
MASKS = (
    "{c} < {n}[:, None, None, None]", "{c} <= {n}[:, None, None, None]",
    "{c} < jnp.maximum({n}, 1)[:, None, None, None]",
    "{r} + {n}[:, None, None, None] >= {c}",
    "({c} < {n}[:, None, None, None]) & ({c} % 2 == 0)",
    "({c} < {n}[:, None, None, None]) & ({c} >= {n}[:, None, None, None] - 4)",
    "{c} < {n}.astype(jnp.int8)[:, None, None, None]",
    "{c} - {n}[:, None, None, None] < 0",
)  # fmt: skip


def program(seed: int) -> Program:
    """Attention of few queries, or of as many, to such keys and values."""
    w = Writer("cache", seed)
    keys, heads, group = w.one((16, 24)), w.one((1, 2)), w.one((1, 1, 2, 4))
    size = Sizes(w.one((1, 2)), w.one((1, 1, 2, keys)), keys, heads)
    dtype = w.mostly("float32", ("bfloat16",), 0.7)
    shape = (size.batch, size.queries, heads * group, 8)
    q = w.argument("q", shape, w.one(quantized.VALUES[:3]), dtype, operand=True)
    k, of_scores = _side(w, size, q)
    v, of_weights = _side(w, size, q)
    if group > 1:
        repeated = "jnp.repeat({x}, {g}, 2)"
        k, v = (w.let(repeated.format(x=x, g=group), "k") for x in (k, v))
    score = w.let(f"jnp.einsum('btnh,bsnh->bnts', {q}, {k}) * 0.35", "s")
    score = _times(w, score, of_scores, group)
    if w.chance(0.6):
        n = w.argument("n", (size.batch,), "lengths", "int32")
        rows, columns = (f"jnp.arange({x})" for x in (size.queries, keys))
        text = w.one(MASKS).format(n=n, c=columns, r=f"{rows}[:, None]")
        score = scores.masked(w, score, w.let(text, "m"))
    weights = w.let(w.usually(scores.WEIGHTS[:6], scores.ODD_WEIGHTS).format(s=score))
    weights = _times(w, weights, of_weights, group)
    if w.chance(0.3):
        weights = w.let(f"{weights}.astype({v}.dtype)", "w")
    return w.program(w.let(f"jnp.einsum('bnts,bsnh->btnh', {weights}, {v})", "o"))


def _side(w: Writer, size: Sizes, q: str) -> tuple[str, str | None]:
    """Keys or values as floats, and scales that are still to be multiplied with."""
    shape = (size.batch, size.keys, size.heads, 8)
    bits = w.one(BITS)
    values = "normal" if bits.startswith("float8") else w.one(("all numbers", "small"))
    stored = w.argument("k", shape, "all numbers" if bits == "int4" else values, bits)
    odd = 0.1 if bits in ("int8", "uint8") else 0.0
    wide = w.usually(quantized.WIDE, quantized.ODD_WIDE, odd)
    made = w.let(wide.format(q=stored, x=q), "k")
    whose = ((*shape[:3], 1), (*shape[:3], 1), (shape[2], 1), (), shape[2:], (8,))
    if w.chance(0.25):
        return made, w.argument("c", shape[:3], w.one(SCALES), operand=True)
    text = w.usually(SCALED, ODD_SCALED)
    c = ""
    if "{c}" in text:
        dtype = w.mostly("float32", ("bfloat16",), 0.8)
        c = w.argument("c", w.one(whose), w.one(SCALES), dtype, operand=True)
    return w.let(text.format(w=made, c=c), "k"), None


def _times(w: Writer, x: str, scale: str | None, group: int) -> str:
    """Scores or weights by the scales of keys or values."""
    if scale is None:
        return x
    whole = f"jnp.repeat({scale}, {group}, 2)" if group > 1 else scale
    return w.let(f"{x} * {whole}.transpose(0, 2, 1)[:, :, None, :]", "s")
