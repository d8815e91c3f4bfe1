"""Programs that are gated linear units, or nearly."""

from __future__ import annotations

from tests.soundness import operands
from tests.soundness.program import Program
from tests.soundness.writer import Writer

SILU = (
    "jax.nn.silu({a})", "jax.nn.silu({a})", "{a} * jax.nn.sigmoid({a})",
    "{a} / (1.0 + jnp.exp(-{a}))", "0.5 * {a} * (1.0 + jnp.tanh(0.5 * {a}))",
    "{a} * (jnp.exp({a}) / (1.0 + jnp.exp({a})))",
    "jnp.where({a} > 0.0, {a} / (1.0 + jnp.exp(-{a})),"
    " {a} * jnp.exp({a}) / (1.0 + jnp.exp({a})))",
    "{a} * jnp.exp(-jax.nn.softplus(-{a}))",
    "{a} * jax.nn.sigmoid(1.702 * {a})", "{a} * jax.nn.sigmoid(1.7 * {a})",
    "{a} * jnp.exp(jax.nn.log_sigmoid({a}))", "{a} - {a} * jax.nn.sigmoid(-{a})",
)  # fmt: skip
GELU = (
    "jax.nn.gelu({a})", "jax.nn.gelu({a}, approximate=False)",
    "0.5 * {a} * (1.0 + lax.erf({a} / 2 ** 0.5))",
    "0.5 * {a} * (1.0 + jnp.tanh(0.7978845608 * ({a} + 0.044715 * {a} ** 3)))",
    "0.5 * {a} * (1.0 + jnp.tanh(0.7979 * ({a} + 0.0447 * {a} ** 3)))",
    "0.5 * {a} * lax.erfc(-{a} / 2 ** 0.5)",
)  # fmt: skip
RELU = (
    "jnp.maximum({a}, 0.0)", "jax.nn.relu({a})", "jnp.where({a} > 0.0, {a}, 0.0)",
    "jnp.where({a} >= 0.0, {a}, 0.0)", "{a} * ({a} > 0.0)", "({a} + abs({a})) / 2",
    "jnp.where({a} < 0.0, 0.0, {a})", "jnp.where(~({a} > 0.0), 0.0, {a})",
    "jax.nn.relu({a}) ** 2", "jnp.clip({a}, 0.0, 6.0)", "jax.nn.leaky_relu({a})",
    "jnp.where({a} > 0.0, {a}, 0.01 * {a})", "jnp.maximum({a}, 0.01 * {a})",
    "jnp.fmax({a}, 0.0)", "{a} * jnp.heaviside({a}, 0.0)", "lax.max({a}, 0.0 * {a})",
)  # fmt: skip
OTHERS = (
    "jax.nn.sigmoid({a})", "jnp.tanh({a})", "jax.nn.softplus({a})",
    "jnp.log(1.0 + jnp.exp({a}))", "jnp.log1p(jnp.exp({a}))", "jax.nn.mish({a})",
    "{a} * jnp.tanh(jnp.log1p(jnp.exp({a})))", "jax.nn.elu({a})",
    "jnp.where({a} > 0.0, {a}, jnp.exp({a}) - 1.0)", "jax.nn.selu({a})",
    "jax.nn.hard_swish({a})", "jax.nn.celu({a})", "jnp.exp({a}) / (1.0 + jnp.exp({a}))",
    "1.0 / (1.0 + jnp.exp(-{a}))", "jnp.exp(-jax.nn.softplus(-{a}))",
    "(jnp.exp({a}) - jnp.exp(-{a})) / (jnp.exp({a}) + jnp.exp(-{a}))",
    "{a} / jnp.sqrt(1.0 + {a} * {a})", "jax.nn.soft_sign({a})", "jnp.exp({a})",
    "jnp.maximum({a}, 0.0) + jnp.log1p(jnp.exp(-abs({a})))",
)  # fmt: skip
GATES = (SILU, SILU, GELU, RELU, RELU, OTHERS)
PRODUCTS = (
    "{h} * {u}", "{h} * {u}", "{u} * {h}", "{h} * ({u})", "{h} * {u} * 0.5",
)  # fmt: skip
ODD_PRODUCTS = (
    "{h} * {a}", "{h} * {h}", "{h} * {u} * {a}", "{h} * abs({u})", "{h} + {u}",
    "{h} * ({u} + 1.0)", "{h} * jnp.clip({u}, -7.0, 7.0)",
    "{h} * jnp.nan_to_num({u})",
    "{h} * jnp.where(jnp.isfinite({u}), {u}, 0.0)", "{h} * {u} - {h}",
    "{h} * {u} * {u}", "jnp.where({a} > 0.0, {h} * {u}, 0.0)",
    "{h} * lax.stop_gradient({u})",
)  # fmt: skip
GUARDED = (
    "jnp.minimum({a}, 7.0)", "jnp.clip({a}, -7.0, 7.0)", "jnp.nan_to_num({a})",
    "jnp.where(jnp.isfinite({a}), {a}, 0.0)", "{a} * 1.0", "{a} * 40.0",
    "jnp.where({a} > 1e4, 1e4, {a})", "{a}.astype(jnp.bfloat16).astype(jnp.float32)",
)  # fmt: skip
VALUES = (
    "normal", "normal", "times 60", "some zeros", "zero rows", "constant rows",
    "some 1e30 or 1e-30", "some inf", "some nan", "nan rows", "times 1e-30",
    "rows of other magnitudes", "denormal",
)  # fmt: skip


def program(seed: int) -> Program:
    """A gated linear unit, or what looks like one."""
    w = Writer("unit", seed)
    rows, width, hidden = w.one((8, 32)), w.one((8, 16)), w.one((16, 32))
    dtype = w.mostly("float32", ("bfloat16",), 0.85)
    x = w.argument("x", (rows, width), w.one(VALUES), dtype, operand=True)
    x = operands.changed(w, x) if w.chance(0.2) else x
    if w.chance(0.2):
        both = w.argument("w", (width, 2 * hidden), "normal", dtype, operand=True)
        joined = w.let(f"{x} @ {both}", "h")
        a, u = (w.let(f"{joined}[:, {half}]", "a") for half in _halves(w, hidden))
    else:
        a, u = (_branch(w, x, width, hidden, dtype) for _ in range(2))
    return w.program(gated(w, a, u))


def gated(w: Writer, a: str, u: str) -> str:
    """An activation of one branch times the other."""
    if w.chance(0.2):
        a = w.let(w.one(GUARDED).format(a=a), "a")
    h = w.let(w.one(w.one(GATES)).format(a=a), "h")
    text = w.usually(PRODUCTS, ODD_PRODUCTS)
    return w.let(text.format(h=h, u=u, a=a), "o")


def _halves(w: Writer, hidden: int) -> tuple[str, str]:
    halves = (f":{hidden}", f"{hidden}:")
    if w.chance(0.2):
        halves = ("::2", "1::2")
    return halves if w.chance(0.6) else halves[::-1]


def _branch(w: Writer, x: str, width: int, hidden: int, dtype: str) -> str:
    """Rows by a matrix, perhaps with a bias."""
    values = w.mostly("normal", ("times 60", "some zeros", "some nan or inf"), 0.85)
    matrix = w.argument("w", (width, hidden), values, dtype, operand=True)
    out = w.let(f"{x} @ {matrix}", "a")
    if not w.chance(0.35):
        return out
    bias = w.argument("b", (hidden,), operands.values(w, 0.1), dtype, operand=True)
    bias = operands.changed(w, bias) if w.chance(0.5) else bias
    return w.let(f"{out} + {bias}", "a")
