"""Attention written out: scores, a mask or an addend on them, weights, and values."""

from __future__ import annotations

from dataclasses import dataclass

from tests.soundness.masks import Sizes
from tests.soundness.writer import Writer

FILLS = (
    "-jnp.inf", "-jnp.inf", "jnp.finfo(jnp.float32).min", "-1e9", "-1e4", "-1e30",
    "-2.0 ** 31", "0.5 * jnp.finfo(jnp.float32).min",
)  # fmt: skip
FINITE = FILLS[2:]
"""What zero times is zero."""
ODD_FILLS = ("-30.0", "0.0", "-100.0", "1e4", "-1.0")
WHERE = (
    "jnp.where({m}, {s}, {f})", "jnp.where({m}, {s}, {f})",
    "jnp.where(~({m}), {f}, {s})", "{s} + jnp.where({m}, 0.0, {f})",
    "{s} + (1.0 - ({m}).astype(jnp.float32)) * {f}",
)  # fmt: skip
ODD_WHERE = (
    "jnp.minimum({s}, jnp.where({m}, jnp.inf, {f}))",
    "{s} * ({m}) + (1.0 - ({m}).astype(jnp.float32)) * {f}",
    "jnp.maximum({s} + jnp.where({m}, 0.0, {f}), {f})", "{s} * ({m})",
    "{s} - (1.0 - ({m}).astype(jnp.float32)) * 1e9",
)  # fmt: skip
EXP = "jnp.exp({s} - {s}.max(-1, keepdims=True))"
WEIGHTS = (
    "jax.nn.softmax({s}, -1)", "jax.nn.softmax({s}, -1)", "jax.nn.softmax({s}, -1)",
    "jnp.exp({s} - jax.nn.logsumexp({s}, -1, keepdims=True))",
    "jnp.exp(jax.nn.log_softmax({s}, -1))",
    f"(lambda e: e / e.sum(-1, keepdims=True))({EXP})",
    "(lambda e: e / e.sum(-1, keepdims=True))(jnp.exp({s}))",
    "(lambda e: e / (1.0 + e.sum(-1, keepdims=True)))(jnp.exp({s}))",
)  # fmt: skip
ODD_WEIGHTS = (
    f"(lambda e: e / (e.sum(-1, keepdims=True) + 1e-6))({EXP})",
    "(lambda e: e / jnp.maximum(e.sum(-1, keepdims=True), 1e-3))(jnp.exp({s}))",
    f"(lambda e: e / jnp.maximum(e.sum(-1, keepdims=True), 1e-6))({EXP})",
    "jax.nn.softmax({s}, -2)", "jax.nn.sigmoid({s})",
    f"(lambda e: e / (jnp.exp(-{{s}}.max(-1, keepdims=True))"
    f" + e.sum(-1, keepdims=True)))({EXP})",
    *(
        f"(lambda e: e / e.sum(-1, keepdims=True))(jnp.exp({{s}} - {shift}))"
        for shift in (
            "abs({s}).max(-1, keepdims=True)", "{s}.max(-1, keepdims=True) / 2",
            "{s}[..., :8].max(-1, keepdims=True)", "{s}.mean(-1, keepdims=True)",
            "jnp.maximum({s}.max(-1, keepdims=True), 0.0)",
            "lax.stop_gradient({s}.max((-2, -1), keepdims=True))",
        )
    ),
)  # fmt: skip
AFTER = (
    "jnp.where({m}, {w}, 0.0)", "jnp.where(({m}).any(-1, keepdims=True), {w}, 0.0)",
    "jnp.nan_to_num({w})", "{w} * ({m})", "jnp.where(jnp.isfinite({w}), {w}, 0.0)",
    "{w} * ({m}) / ({w} * ({m})).sum(-1, keepdims=True)",
    "{w} * ({m}) / (({w} * ({m})).sum(-1, keepdims=True) + 1e-6)",
)  # fmt: skip
SELF = (
    "jnp.where({w} > 1e-3, {w}, 0.0)", "jnp.where({w} > 0.02, {w}, 0.0)",
    "jnp.where({w} > 1e-3, {w}, 0.0) / jnp.where({w} > 1e-3, {w}, 0.0)"
    ".sum(-1, keepdims=True)", "jnp.nan_to_num({w})", "lax.stop_gradient({w})",
    "{w} / {w}.sum(-1, keepdims=True)", "jnp.maximum({w}, 1e-3)",
    "{w}.astype(jnp.bfloat16).astype(jnp.float32)", "jnp.where({w} == {w}, {w}, 0.0)",
)  # fmt: skip
GUARDS = (
    "jnp.where(jnp.isfinite({s}), {s}, -1e9)", "jnp.nan_to_num({s})",
    "jnp.clip({s}, -10.0, 10.0)", "jnp.minimum({s}, 5.0)", "30.0 * jnp.tanh({s} / 30)",
    "jnp.where({s} >= lax.top_k({s}, 4)[0][..., -1:], {s}, -jnp.inf)",
    "{s} - {s}.max(-1, keepdims=True)", "{s} - lax.stop_gradient({s}.max())",
    "jnp.where({s} > 0.0, {s}, 0.0)", "{s} - {s}.mean(-1, keepdims=True)",
    "jnp.where({s} > -1.0, {s}, -jnp.inf)", "{s} + {s}", "{s} * abs({s})",
    "jnp.log(jnp.exp({s}) + 1e-6)", "(lambda x: x + 1e6 - 1e6)({s})",
)  # fmt: skip


@dataclass(frozen=True)
class Operands:
    """Queries, keys and values, as (batch, tokens, heads, width)."""

    q: str
    k: str
    v: str


def scores(w: Writer, given: Operands) -> str:
    """Scaled products of queries and keys."""
    scale = w.one(("* 0.35", "/ 8 ** 0.5", "* 0.25", "/ 3.0", "* 1.0"))
    q, k = given.q, given.k
    text = w.one((
        f"jnp.einsum('btnh,bsnh->bnts', {q}, {k}) {scale}",
        f"jnp.einsum('btnh,bsnh->bnts', {q} {scale}, {k})",
        f"({q}.swapaxes(1, 2) @ {k}.transpose(0, 2, 3, 1)) {scale}",
    ))  # fmt: skip
    return w.let(f"({text}).astype(jnp.float32)" if w.chance(0.2) else text, "s")


def masked(w: Writer, score: str, mask: str) -> str:
    """Scores under a mask."""
    text = w.usually(WHERE, ODD_WHERE)
    fill = w.usually(FILLS if "(1.0 -" not in text else FINITE, ODD_FILLS)
    return w.let(text.format(m=mask, s=score, f=fill), "s")


def weights(w: Writer, score: str, mask: str | None = None) -> str:
    """Weights of scores, sometimes changed afterwards."""
    found = w.let(w.usually(WEIGHTS, ODD_WEIGHTS).format(s=score), "w")
    if mask is not None and w.chance(0.15):
        found = w.let(w.one(AFTER).format(w=found, m=mask), "w")
    return found


def weighed(w: Writer, weight: str, given: Operands) -> str:
    """Values by weights."""
    text = w.one((
        f"jnp.einsum('bnts,bsnh->btnh', {weight}, {given.v})",
        f"({weight} @ {given.v}.swapaxes(1, 2)).swapaxes(1, 2)",
    ))  # fmt: skip
    return w.let(text, "o")


def sizes(w: Writer) -> Sizes:
    """Small sizes of attention."""
    keys = w.one((16, 24, 40))
    queries = w.mostly(keys, (16, 24, 1), 0.8)
    return Sizes(w.one((1, 2)), queries, keys, w.one((1, 1, 2)))


def given(
    w: Writer, size: Sizes, widths: tuple[int, int], values: dict[str, str]
) -> Operands:
    """Arguments of widths of keys and of values; normal, or as they are named."""
    recipes = {"q": "normal", "k": "normal", "v": "normal", **values}
    shape = lambda tokens, width: (size.batch, tokens, size.heads, width)
    dtype = w.mostly("float32", ("bfloat16",), 0.85)
    return Operands(
        w.argument(
            "q", shape(size.queries, widths[0]), recipes["q"], dtype, operand=True
        ),
        w.argument("k", shape(size.keys, widths[0]), recipes["k"], dtype, operand=True),
        w.argument("v", shape(size.keys, widths[1]), recipes["v"], dtype, operand=True),
    )
