"""Losses of two labels, of smoothed ones, and of logits with a bias, or nearly."""

from __future__ import annotations

from tests.soundness import losses, operands
from tests.soundness.program import Program
from tests.soundness.writer import Writer

TARGETS = (
    "{q} * {a} + (1.0 - {q}) * {b}", "{q} * {a} + (1 - {q}) * {b}",
    "0.3 * {a} + 0.7 * {b}",
    "{b} + {q} * ({a} - {b})", "({a} + {b}) / 2", "{a} * {q} + {b} * (1.0 - {q})",
    "0.9 * {a} + 0.1 / {v}", "{a} * 0.9 + 0.1 / {v}",
)  # fmt: skip
ODD_TARGETS = (
    "{q} * {a} + {q} * {b}", "{a} + {b}", "{a} * {b}", "jnp.maximum({a}, {b})",
    "{a} - 0.5 * {b}", "{q} * {a} + (1.0 - abs({q})) * {b}", "{a} * {q}",
    "({q} * {a} + (1.0 - {q}) * {b}) / ({a} + {b} + 1e-6)",
)  # fmt: skip
SUMS = (
    "{q} * {x} + (1.0 - {q}) * {y}", "{q} * {x} + (1 - {q}) * {y}",
    "0.3 * {x} + 0.7 * {y}", "{x} + 0.5 * {y}", "({x} + {y}) / 2", "{x} + {y}",
)  # fmt: skip
ODD_SUMS = (
    "{x} * {y}", "jnp.maximum({x}, {y})", "{x} - {y}", "jnp.where({q} > 0.5, {x}, {y})",
    "{q} * {x} + (1.0 - {q} * {q}) * {y}", "jnp.logaddexp({x}, {y})",
)  # fmt: skip
SHARES = ("positive", "normal", "some zeros", "some nan", "some 1e30 or 1e-30")


def program(seed: int) -> Program:
    """A loss of rows by two labels of each, or what looks like one."""
    w = Writer("labels", seed)
    m, k, v = w.one((8, 16)), w.one((8, 16)), w.one((5, 16, 33))
    dtype = w.mostly("float32", ("bfloat16",), 0.8)
    x = w.argument("x", (m, k), w.one(losses.VALUES), dtype, operand=True)
    weights = w.argument("w", (k, v), "normal", dtype, operand=True)
    y = w.let(w.one(losses.PRODUCTS[:3]).format(x=x, w=weights), "y")
    if w.chance(0.5):
        bias = w.argument("b", (v,), operands.values(w, 0.2), operand=True)
        bias = operands.changed(w, bias, 1) if w.chance(0.2) else bias
        y = w.let(f"{y} + {bias}", "y")
    i, j = (_label(w, m, v) for _ in range(2))
    if w.chance(0.15):
        j = i
    shape = w.one(((), (), (m,)))
    q = w.argument("q", shape, w.one(SHARES), operand=True)
    out = _mixed(w, y, (i, j), q, v, shape) if w.chance(0.5) else _sum(w, y, (i, j), q)
    if w.chance(0.3):
        out = w.let(w.one(losses.MEANS[:2]).format(o=out), "o")
    return w.program(out)


def _label(w: Writer, m: int, v: int) -> str:
    values = w.mostly(f"classes of {v}", ("small", "near ends"), 0.85)
    i = w.argument("i", (m,), values, w.mostly("int32", ("int8", "uint8"), 0.8))
    text = w.mostly("{i}", losses.LABELS, 0.7)
    return w.let(text.format(i=i, v=v), "j")


def _mixed(
    w: Writer, y: str, of: tuple[str, str], q: str, v: int, shape: tuple[int, ...]
) -> str:
    """A loss of the mixture of two one-hot rows."""
    a, b = (w.let(f"jax.nn.one_hot({i}, {v})", "t") for i in of)
    share = f"{q}[:, None]" if shape else q
    text = w.usually(TARGETS, ODD_TARGETS)
    target = w.let(text.format(a=a, b=b, q=share, v=v), "t")
    logs = w.let(w.usually(losses.LOGS, losses.ODD_LOGS[:6]).format(y=y, v=v), "l")
    return w.let(f"-({target} * {logs}).sum(-1)", "o")


def _sum(w: Writer, y: str, of: tuple[str, str], q: str) -> str:
    """A sum of two losses of the same logits."""
    total = w.let(f"jax.nn.logsumexp({y}, -1)", "t")
    one = "{t} - jnp.take_along_axis({y}, {i}[:, None], -1)[:, 0]"
    first, second = (w.let(one.format(t=total, y=y, i=i), "o") for i in of)
    return w.let(w.usually(SUMS, ODD_SUMS).format(x=first, y=second, q=q), "o")
