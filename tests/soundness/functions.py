"""Attention whose scores are functions of products, positions and small arrays."""

from __future__ import annotations

from tests.soundness import masks, scores
from tests.soundness.program import Program
from tests.soundness.writer import Writer

OF_SCORES = (
    "{s} / (1.0 + abs({s}))", "jax.nn.softplus({s})", "jax.nn.gelu({s})",
    "jnp.sign({s}) * jnp.sqrt(abs({s}) + 1e-3)", "jnp.cos({s})", "{s} * {s} * 0.5",
    "jnp.where({s} > 0.0, {s}, jnp.expm1({s}))", "jnp.maximum({s}, 0.1 * {s})",
    "5.0 * jnp.tanh({s} / 5.0)", "{s} * jax.nn.sigmoid({s})", "jnp.sinh(0.2 * {s})",
    "jnp.clip({s}, -2.0, 3.0)", "{s}.astype(jnp.bfloat16).astype(jnp.float32)",
    "jnp.log1p({s} * {s})", "lax.stop_gradient({s})", "jnp.round({s} * 8.0) / 8.0",
    "{s} ** 3", "1.0 / (1.0 + jnp.exp(-{s}))", "jnp.nan_to_num({s})",
    "jnp.where(jnp.isfinite({s}), {s}, 0.0)", "jnp.log(abs({s}))", "{s} / abs({s})",
)  # fmt: skip
OF_PLACES = (
    "{s} * jnp.exp(-0.1 * abs({r}))", "{s} - 0.05 * {r} * {r}",
    "{s} - jnp.log1p(abs({r}).astype(jnp.float32))",
    "jnp.where({r} > 3, {s} * 0.5, {s})",
    "jnp.where({r} % 2 == 0, {s}, {s} - 1.0)", "{s} * ({r} >= 0)",
    "{s} + jnp.cos(0.3 * {r})", "jnp.where(abs({r}) < 4, {s}, -0.1 * abs({r}))",
    "jnp.where({r} >= 0, {s}, {s} * 1e-3)", "{s} * (1.0 + {r}) ** 2.0",
    "{s} + jnp.where({r} > 0, -jnp.inf, 0.0)", "{s} / (1.0 + abs({r}))",
    "jnp.where({r} < 0, -1e9, jax.nn.softplus({s}))",
)  # fmt: skip
OF_ARRAYS = (
    "{s} * {h}[:, None, None]", "{s} / {h}[:, None, None]", "{s} + {h}[:, None, None]",
    "{h}[:, None, None] * jnp.tanh({s} / {h}[:, None, None])",
    "{s} - abs({h})[:, None, None] * abs({r})",
    "{s} + {t}[:, jnp.clip({r} + 8, 0, 16)]",
    "{s} * {t}[:, {r} % 17]", "{s} + {t}[:, jnp.minimum(abs({r}), 16)]",
    "{s} + jnp.take({t}, jnp.where({r} < 0, 0, 1 + {r} // 4), axis=1, mode='clip')",
    "{s} + {t}[:, {r}]", "{s} + jnp.take({t}, {r} + 8, axis=1)", "{s} * {a}[:, None]",
    "{s} + {b}", "{s} * {b}", "jnp.where({b} > 0.0, {s}, {s} - 2.0)",
    "{s} * jax.nn.softplus({a})[:, None]",
    "{s} - {h}[:, None, None] * jnp.log1p({s} ** 2)",
    "jnp.where({a}[:, None] > {b}, {s}, 0.5 * {s})", "{s} + {a}[:, None] * {b}",
)  # fmt: skip
ODD = (
    "jnp.cumsum({s}, -1)", "{s} - {s}.mean(-1, keepdims=True)", "jnp.sort({s}, -1)",
    "{s}[..., ::-1]", "{s} - {s}.max(-2, keepdims=True)", "jnp.roll({s}, 1, -1)",
    "{s} / {s}.std(-1, keepdims=True)", "{s} + {s}.mean(1, keepdims=True)",
    "jnp.where({s} >= {s}.max(-1, keepdims=True), {s}, 0.5 * {s})",
    "{s} + {s}[:, :, :1]", "{s} * jax.nn.softmax({s}, -1)",
)  # fmt: skip


def program(seed: int) -> Program:
    """Attention with one to three functions of its scores."""
    w = Writer("score", seed)
    size = scores.sizes(w)
    given = scores.given(w, size, (8, w.one((8, 4))), {})
    s = scores.scores(w, given)
    names = {"r": w.let(
        f"jnp.arange({size.queries})[:, None] - jnp.arange({size.keys})", "r"
    )}  # fmt: skip
    mask = masks.mask(w, size) if w.chance(0.3) else None
    if mask and w.chance(0.5):
        s, mask = scores.masked(w, s, mask), None
    for _ in range(w.one((1, 1, 2, 3))):
        kind = w.one((OF_SCORES, OF_SCORES, OF_PLACES, OF_ARRAYS, OF_ARRAYS))
        text = w.one(ODD if w.chance(0.08) else kind)
        s = w.let(text.format(s=s, **_arrays(w, text, size, names)), "s")
    if mask:
        s = scores.masked(w, s, mask)
    return w.program(scores.weighed(w, scores.weights(w, s, None), given))


def _arrays(
    w: Writer, text: str, size: masks.Sizes, names: dict[str, str]
) -> dict[str, str]:
    """The names that a function needs, with arguments for those that are new."""
    shapes = {
        "h": (size.heads,), "t": (size.heads, 17), "a": (size.queries,),
        "b": (size.keys,),
    }  # fmt: skip
    for name, shape in shapes.items():
        if f"{{{name}}}" in text and name not in names:
            values = w.one(("normal", "normal", "positive", "some zeros", "times 60"))
            names[name] = w.argument(name, shape, values, operand=True)
    return names
