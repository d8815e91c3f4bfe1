"""Programs that are norms, or nearly: what people write, and small changes of it."""

from __future__ import annotations

from tests.soundness import operands
from tests.soundness.program import Program
from tests.soundness.writer import Writer

VALUES = (
    "normal", "times 60", "constant rows", "zero rows", "rows of other means",
    "rows of other magnitudes", "constant or extreme rows", "some 1e30 or 1e-30",
    "some nan", "nan rows", "times 1e-30", "denormal", "some zeros", "times 1e-3",
)  # fmt: skip
EPSILONS = ("1e-6", "1e-5", "1e-6", "1e-12", "0.0", "1e-3", "1e-30", "1.0")
CENTERS = (
    "{x} - {x}.mean(-1, keepdims=True)", "{x} - {x}.mean(-1, keepdims=True)",
    "{x} - {x}.sum(-1, keepdims=True) / {n}",
    "{x} - jnp.sum({x} / {n}, -1, keepdims=True)",
    "{x} - {x}.sum(-1, keepdims=True) * {i}",
)  # fmt: skip
ODD_CENTERS = (
    "{x} - {x}.mean(0, keepdims=True)", "{x} - {x}.mean()", "{x} - {x}[..., :1]",
    "{x} - {x}.max(-1, keepdims=True)", "{x} - {x}.sum(-1, keepdims=True)",
    "{x} - jnp.median({x}, -1, keepdims=True)",
    "{x} - lax.stop_gradient({x}.mean(-1, keepdims=True))",
)  # fmt: skip
SQUARES = (
    "({y} * {y}).mean(-1, keepdims=True)", "jnp.square({y}).mean(-1, keepdims=True)",
    "({y} ** 2).mean(-1, keepdims=True)", "({y} * {y}).sum(-1, keepdims=True) / {n}",
    "{y}.var(-1, keepdims=True)", "{x}.var(-1, keepdims=True)",
    "({x} * {x}).mean(-1, keepdims=True) - {x}.mean(-1, keepdims=True) ** 2",
    "jnp.maximum(({x} * {x}).mean(-1, keepdims=True)"
    " - {x}.mean(-1, keepdims=True) ** 2, 0.0)",
    "jnp.einsum('...n,...n->...', {y}, {y})[..., None] / {n}",
    "abs({y} * {y}).mean(-1, keepdims=True)",
    "({y} * {y} / {n}).sum(-1, keepdims=True)",
)  # fmt: skip
ODD_SQUARES = (
    "{x}.var(-1, ddof=1, keepdims=True)", "({y} * {y}).sum(-1, keepdims=True)",
    "({y} * {y}).mean(0, keepdims=True)", "({y} * {y}).mean()",
    "abs({y}).mean(-1, keepdims=True)", "({y} * {y}).max(-1, keepdims=True)",
    "({y} * {y}).sum(-1, keepdims=True) / ({n} - 1)",
    "({y} * {x}).mean(-1, keepdims=True)",
    "lax.stop_gradient(({y} * {y}).mean(-1, keepdims=True))",
    "({y}.astype(jnp.bfloat16).astype(jnp.float32) ** 2).mean(-1, keepdims=True)",
)  # fmt: skip
ROOTS = (
    "{y} * lax.rsqrt({v} + {e})", "{y} / jnp.sqrt({v} + {e})",
    "{y} * (1.0 / jnp.sqrt({v} + {e}))", "{y} * ({v} + {e}) ** -0.5",
    "{y} * lax.rsqrt({v} + {e})", "lax.rsqrt({v} + {e}) * {y}",
    "{y} / ({v} + {e}) ** 0.5",
)  # fmt: skip
ODD_ROOTS = (
    "{y} / (jnp.sqrt({v}) + {e})", "{y} * lax.rsqrt(jnp.maximum({v}, {e}))",
    "{y} / jnp.maximum(jnp.sqrt({v}), {e})",
    "jnp.where({v} > 0.0, {y} * lax.rsqrt(jnp.where({v} > 0.0, {v}, 1.0)), 0.0)",
    "{y} * jnp.where({v} > 0.0, lax.rsqrt({v}), 1.0)",
    "jnp.where({v} > {e}, {y} * lax.rsqrt({v} + {e}), 0.0)",
    "{y} * jnp.exp(-0.5 * jnp.log({v} + {e}))", "{y} * lax.rsqrt({v}) + {e}",
    "{y} * lax.rsqrt(abs({v}) + {e})", "{y} * lax.rsqrt({v} - {e})",
    "{y} * jnp.where(jnp.isfinite({v}), lax.rsqrt({v} + {e}), 0.0)",
    "({y} / jnp.sqrt({v} + {e})) / jnp.sqrt({v} + {e})", "{y} / ({v} + {e})",
    "{y} * lax.rsqrt(jnp.nan_to_num({v}) + {e})", "{y} * lax.rsqrt({v} * 4.0 + {e})",
    "{y} * lax.rsqrt(jnp.where({v} == 0.0, 1.0, {v}) + {e})",
    "{x} * lax.rsqrt({v} + {e})", "{y} * jnp.sqrt(1.0 / ({v} + {e}))",
    "{y} * jnp.minimum(lax.rsqrt({v} + {e}), 1e3)",
    "{y} * lax.stop_gradient(lax.rsqrt({v} + {e}))",
)  # fmt: skip
SCALED = (
    "{o} * {g}", "{o} * {g}", "{o} * (1.0 + {g})", "{g} * {o}", "{o} * {g} * {g}",
    "{o} * {g} + {b}", "{b} + {g} * {o}", "{o} * abs({g})", "{o} / {g}",
    "({o} * {g}).astype(jnp.bfloat16).astype(jnp.float32)", "{o} * {g} - {b}",
    "{o} * jnp.where({g} > 0.0, {g}, 1.0)",
)  # fmt: skip
AFTER = (
    "jnp.nan_to_num({o})", "jnp.where(jnp.isfinite({o}), {o}, 0.0)",
    "jnp.clip({o}, -2.0, 2.0)", "jnp.where({o} == {o}, {o}, 0.0)", "{o} + {x}",
    "jnp.where(abs({x}).max(-1, keepdims=True) > 0.0, {o}, 0.0)", "{o} * 0.5",
)  # fmt: skip


def program(seed: int) -> Program:
    """A norm of rows, or what looks like one."""
    w = Writer("norm", seed)
    rows, size = w.one((8, 16, 48)), w.one((16, 32, 64))
    dtype = w.mostly("float32", ("bfloat16", "float16"), 0.8)
    x = w.argument("x", (rows, size), w.one(VALUES), dtype, operand=True)
    if dtype == "float16" or w.chance(0.3):
        x = w.let(f"{x}.astype(jnp.float32)", "x")
    x = operands.changed(w, x) if w.chance(0.2) else x
    out = _normed(w, x, size)
    out = _scaled(w, out, size) if w.chance(0.85) else out
    if w.chance(0.15):
        out = w.let(w.one(AFTER).format(o=out, x=x), "o")
    return w.program(out)


def _normed(w: Writer, x: str, size: int) -> str:
    """Rows by their root mean square, of what is left when their mean is taken off."""
    names = {"x": x, "n": size, "i": 1 / size, "e": w.one(EPSILONS), "y": x}
    if w.chance(0.1):
        names["e"] = w.argument("e", (), w.one(("times 1e-3", "positive")))
    if w.chance(0.5):
        names["y"] = w.let(w.usually(CENTERS, ODD_CENTERS).format(**names), "y")
    names["v"] = w.let(w.usually(SQUARES, ODD_SQUARES).format(**names), "v")
    return w.let(w.usually(ROOTS, ODD_ROOTS).format(**names), "o")


def _scaled(w: Writer, out: str, size: int) -> str:
    """Rows times a scale, perhaps with an addend."""
    values = operands.values(w, 0.15)
    g = w.argument("g", (size,), values, operand=True)
    if w.chance(0.3):
        g = operands.changed(w, g)
    text = w.one(SCALED)
    b = w.argument("b", (size,), "normal", operand=True) if "{b}" in text else ""
    if b and w.chance(0.2):
        b = operands.changed(w, b)
    return w.let(text.format(o=out, g=g, b=b), "o")
