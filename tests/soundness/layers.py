"""Residuals, norms, products of few bits, activations, and rows that are quantized."""

from __future__ import annotations

from tests.soundness import norms, operands, quantized, units
from tests.soundness.program import Program
from tests.soundness.writer import Writer

RESIDUALS = (
    "{x} + {r}", "{x} + {r}", "{r} + {x}", "{x} + 0.5 * {r}", "{x} - {r}",
    "({x} + {r}).astype(jnp.bfloat16).astype(jnp.float32)", "{x} + jnp.tanh({r})",
)  # fmt: skip
NORMS = (
    "{h} * lax.rsqrt(({h} * {h}).mean(-1, keepdims=True) + {e})",
    "({h} - {h}.mean(-1, keepdims=True)) * lax.rsqrt({h}.var(-1, keepdims=True) + {e})",
    "{h} / jnp.sqrt(jnp.square({h}).mean(-1, keepdims=True) + {e})",
)  # fmt: skip
ROWS = (
    "jnp.clip(jnp.round({n} / {a} * 127.0), -127, 127).astype(jnp.int8)",
    "jnp.round({n} * (127.0 / {a})).astype(jnp.int8)",
    "jnp.clip(jnp.round({n} / {a} * 127.0), -128, 127).astype(jnp.int8)",
    "jnp.clip({n} / {a} * 448.0, -448.0, 448.0).astype(jnp.float8_e4m3fn)",
    "({n} / {a} * 448.0).astype(jnp.float8_e4m3fn)",
    "jnp.floor({n} / {a} * 127.0 + 0.5).astype(jnp.int8)",
    "jnp.round({n} / {a} * 255.0).astype(jnp.uint8)",
    "jnp.round({n} / {a} * 200.0).astype(jnp.int8)",
)  # fmt: skip
LARGEST = (
    "abs({n}).max(-1, keepdims=True)", "abs({n}).max(-1, keepdims=True) + 1e-6",
    "jnp.maximum(abs({n}).max(-1, keepdims=True), 1e-6)",
    "jnp.maximum({n}.max(-1, keepdims=True), -{n}.min(-1, keepdims=True))",
    "{n}.max(-1, keepdims=True)", "abs({n}).max()", "abs({n}).max(0)",
)  # fmt: skip
SCALES = ("{w} * {c}", "{w} * {c}", "{w} / {c}", "{w} * 0.0173", "({w} - 8) * {c}")


def program(seed: int) -> Program:
    """A part of a layer, from the stream of rows."""
    w = Writer("layer", seed)
    rows, width, hidden = w.one((8, 16)), w.one((16, 32)), w.one((16, 32))
    dtype = w.mostly("float32", ("bfloat16",), 0.7)
    x = w.argument("x", (rows, width), w.one(norms.VALUES), dtype, operand=True)
    if w.chance(0.6):
        r = w.argument("r", (rows, width), operands.values(w, 0.1), dtype, operand=True)
        x = w.let(w.one(RESIDUALS).format(x=x, r=r), "h")
    normed = w.let(w.one(NORMS).format(h=x, e=w.one(norms.EPSILONS)), "n")
    g = w.argument("g", (width,), operands.values(w, 0.1), operand=True)
    normed = w.let(w.one(norms.SCALED[:4]).format(o=normed, g=g), "n")
    if w.chance(0.3):
        return w.program(_rows(w, normed, width, hidden))
    a = _product(w, normed, width, hidden)
    if w.chance(0.5):
        out = units.gated(w, a, _product(w, normed, width, hidden))
    else:
        out = w.let(w.one(w.one(units.GATES)).format(a=a), "h")
    if w.chance(0.5):
        out = _product(w, out, hidden, width)
        out = w.let(f"{out} + {x}", "o")
    return w.program(out)


def _rows(w: Writer, normed: str, width: int, hidden: int) -> str:
    """Rows in 8 bits times a matrix of few bits, scaled back."""
    a = w.let(w.one(LARGEST).format(n=normed), "a")
    if w.chance(0.4):
        a = w.let(f"lax.stop_gradient({a})", "a")
    q = w.let(w.one(ROWS).format(n=normed, a=a), "q")
    matrix = w.argument("w", (width, hidden), "all numbers", "int8")
    if w.chance(0.5):
        out = f"lax.dot({q}.astype(jnp.int32), {matrix}.astype(jnp.int32))"
    else:
        out = f"{q}.astype(jnp.float32) @ {matrix}.astype(jnp.float32)"
    out = w.let(f"({out}).astype(jnp.float32) * {a}.mean() / 127.0", "o")
    return w.let(f"{out} + {normed}.mean(-1, keepdims=True)", "o")


def _product(w: Writer, x: str, width: int, hidden: int) -> str:
    """Rows by a matrix, of floats or of few bits, perhaps with a bias."""
    if w.chance(0.5):
        matrix = w.argument("w", (width, hidden), "normal", operand=True)
    else:
        bits = w.one(("int8", "int8", "uint8", "int4", "float8_e4m3fn"))
        values = "normal" if bits.startswith("float8") else "all numbers"
        stored = w.argument("q", (width, hidden), values, bits)
        made = w.let(w.one(quantized.WIDE).format(q=stored, x=x), "w")
        text = w.one(SCALES)
        shape = w.one(((hidden,), (), (1, hidden)))
        c = "{c}" in text and w.argument("c", shape, "times 1e-3", operand=True)
        matrix = w.let(text.format(w=made, c=c), "w")
    out = w.let(f"{x} @ {matrix}", "a")
    if not w.chance(0.35):
        return out
    bias = w.argument("b", (hidden,), operands.values(w, 0.1), operand=True)
    return w.let(f"{out} + {bias}", "a")
