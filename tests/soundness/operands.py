"""Operands: arrays by arithmetic that is stable, guarded or rounded as written."""

from __future__ import annotations

from tests.soundness.writer import Writer

ROUNDED = ("{x}.astype(jnp.bfloat16).astype(jnp.float32)", "({x} + 1e4) - 1e4")
STABLE = (
    "jax.nn.softmax({x}, {a})", "jax.nn.log_softmax({x}, {a})",
    "{x} - jax.nn.logsumexp({x}, {a}, keepdims=True)",
    "jnp.exp({x} - {x}.max({a}, keepdims=True))",
    "jnp.exp({x} - jax.nn.logsumexp({x}, {a}, keepdims=True))",
    "jnp.log(jax.nn.softmax({x}, {a}) + 1e-6)", "jax.nn.log_sigmoid({x})",
    "jax.nn.softplus({x})", "-jax.nn.softplus(-{x})", "jax.nn.sigmoid({x})",
    "jnp.tanh({x})", "jnp.logaddexp({x}, 0.0)", "jnp.log1p(jnp.exp(-abs({x})))",
    "jnp.expm1(-abs({x}))", "{x} * jax.nn.sigmoid({x})", "jax.nn.gelu({x})",
    "jax.nn.elu({x})", "jnp.hypot({x}, 1.0)",
    "jnp.cumsum(jax.nn.log_sigmoid({x}), {a})",
    "jnp.exp(-abs({x}))", "1.0 / (1.0 + jnp.exp(-{x}))",
)  # fmt: skip
DIVIDED = (
    "{x} / (1.0 + abs({x}))", "{x} / ({x}.std({a}, keepdims=True) + 1e-3)",
    "({x} - {x}.mean({a}, keepdims=True))"
    " / jnp.sqrt({x}.var({a}, keepdims=True) + 1e-6)",
    "{x} * lax.rsqrt(({x} * {x}).mean({a}, keepdims=True) + 1e-6)",
    "{x} / jnp.sqrt(({x} * {x}).sum({a}, keepdims=True) + 1e-30)",
    "{x} / jnp.maximum(jnp.sqrt(({x} * {x}).sum({a}, keepdims=True)), 1e-12)",
    "{x} / abs({x}).max({a}, keepdims=True)", "1.0 / ({x} * {x} + 1.0)",
    "{x} / 3.0", "{x} * ({x}.shape[{a}] ** -0.5)", "{x} / {x}.sum({a}, keepdims=True)",
)  # fmt: skip
GUARDED = (
    "jnp.where(jnp.isfinite({x}), {x}, 0.0)", "jnp.nan_to_num({x})",
    "jnp.where({x} > 0.0, {x}, 1.0)", "jnp.clip({x}, -3.0, 3.0)",
    "jnp.clip({x}, -1e4, 1e4)", "jnp.maximum({x}, 0.0)", "jnp.minimum({x}, 10.0)",
    "jnp.where({x} == {x}, {x}, 0.0)", "jnp.where({x} > 0.0, {x}, 0.0)",
    "jnp.log(jnp.where({x} > 0.0, {x}, 1.0))", "jnp.sqrt(jnp.where({x} > 0, {x}, 0))",
    "jnp.where(abs({x}) > 1e-3, {x}, 0.0)", "jnp.maximum({x}, -1e9)",
    "jnp.where(abs({x}) < 1e20, {x}, 0.0)",
)  # fmt: skip
ORDERED = (
    "jnp.sort({x}, {a})", "jnp.cumsum({x}, {a})", "jnp.where({x} >= lax.top_k({x}, 4)"
    "[0][..., -1:], {x}, 0.0)", "jnp.cumsum({x}, {a})[..., ::-1]", "jnp.round({x})",
    "lax.stop_gradient({x})", "jnp.sign({x})", "jnp.flip({x}, {a})",
)  # fmt: skip
ALGEBRA = (
    "{x} - {x}", "({x} * 1e-20) * 1e20", "({x} * 1e30) * 1e-30", "{x} * {x}",
    "{x} * 60.0", "0.0 * {x}", "{x} * 1.0", "{x} - {x}.max({a}, keepdims=True)",
    "{x} - {x}.mean({a}, keepdims=True)", "({x} + 1.0) - 1.0", "jnp.sqrt({x} * {x})",
    "jnp.exp({x})", "jnp.log(jnp.exp({x}))", "abs({x})", "{x} ** 3", "{x} * 1e-30",
    "jnp.sin({x})", "-{x}", "{x} + 0.5", "({x} * {x}) / {x}",
)  # fmt: skip
GROUPS = (STABLE, STABLE, DIVIDED, GUARDED, ORDERED, ROUNDED, ALGEBRA)
VALUES = (
    "normal", "normal", "times 60", "times 60", "constant rows", "some zeros",
    "rows of other means", "times 1e-3",
)  # fmt: skip
EXTREME = (
    "some 1e30 or 1e-30", "some inf", "some nan", "some nan or inf", "denormal",
    "times 1e-30", "rows of other magnitudes", "constant or extreme rows",
)  # fmt: skip


def values(w: Writer, extreme: float = 0.25) -> str:
    """Which values an operand has, extreme ones as often as that."""
    return w.one(EXTREME) if w.chance(extreme) else w.one(VALUES)


def changed(w: Writer, x: str, steps: int = 2, axes: tuple[int, ...] = (-1,)) -> str:
    """An array of the same shape by up to so many operations."""
    for _ in range(w.draw.randint(1, steps)):
        text = w.one(w.one(GROUPS)).format(x=x, a=w.one(axes))
        x = w.let(text, "x")
    return x
