"""Losses over classes, or nearly: logits, their logarithms, labels, and what counts."""

from __future__ import annotations

from tests.soundness import operands
from tests.soundness.program import Program
from tests.soundness.writer import Writer

VALUES = (
    "normal", "normal", "times 60", "constant rows", "zero rows", "some zeros",
    "rows of other magnitudes", "some 1e30 or 1e-30", "some inf or -inf", "some nan",
    "times 1e-3", "rows of other means",
)  # fmt: skip
PRODUCTS = (
    "{x} @ {w}", "jnp.einsum('mk,kv->mv', {x}, {w})", "jnp.dot({x}, {w})",
    "({w}.T @ {x}.T).T", "({x} * 0.5) @ {w}", "({x} @ {w}) * 0.25",
    "lax.dot_general({x}, {w}, (((1,), (0,)), ((), ())),"
    " preferred_element_type=jnp.float32)",
    "jnp.einsum('vk,mk->mv', {w}.T, {x})",
)  # fmt: skip
SHAPED = (
    "{y} + {b}", "{b} + {y}", "30.0 * jnp.tanh({y} / 30.0)", "{y} / 2.0",
    "jnp.tanh({y} / 5.0) * 5.0", "{y} - {b}", "{y}.astype(jnp.bfloat16)",
    "{y}.astype(jnp.float32)",
)  # fmt: skip
ODD_SHAPED = (
    "jnp.where(jnp.arange({v}) < {v} - 2, {y}, -jnp.inf)",
    "jnp.where(jnp.arange({v}) < {v} - 2, {y}, -1e9)",
    "jnp.where({b} > 0.0, {y}, -1e30)", "jnp.clip({y}, -10.0, 10.0)",
    "jnp.nan_to_num({y})", "{y} * {b}", "{y} * abs({b})", "jnp.maximum({y}, -1e4)",
    "lax.stop_gradient({y})", "{y} - {y}.max(-1, keepdims=True)", "{y} * {y}",
    "{y} - {y}.mean(-1, keepdims=True)", "20.0 * jnp.tanh({y} / 30.0)",
    "jnp.where(jnp.isfinite({y}), {y}, -1e30)", "jnp.log(abs({y}) + 1.0)",
)  # fmt: skip
LOGS = (
    "jax.nn.log_softmax({y}, -1)", "jax.nn.log_softmax({y})",
    "{y} - jax.nn.logsumexp({y}, -1, keepdims=True)",
    "{y} - jax.scipy.special.logsumexp({y}, axis=-1)[:, None]",
    "(lambda s: s - jnp.log(jnp.exp(s).sum(-1, keepdims=True)))"
    "({y} - {y}.max(-1, keepdims=True))",
    "(lambda s: s - jnp.log(jnp.exp(s).sum(-1, keepdims=True)))"
    "({y} - lax.stop_gradient({y}.max(-1, keepdims=True)))",
    "jnp.log(jax.nn.softmax({y}, -1))",
)  # fmt: skip
ODD_LOGS = (
    "jnp.log(jax.nn.softmax({y}, -1) + 1e-9)", "jax.nn.log_softmax({y}, 0)",
    "jnp.log(jnp.clip(jax.nn.softmax({y}, -1), 1e-7, 1.0))", "jax.nn.log_sigmoid({y})",
    "jnp.maximum(jax.nn.log_softmax({y}, -1), -100.0)",
    "jax.nn.log_softmax({y}, -1) * jax.nn.softmax({y}, -1)",
    "{y} - jnp.log(jnp.exp({y}).sum(-1, keepdims=True))",
    "jax.nn.log_softmax({y}, -1, where=jnp.arange({v}) < {v} - 1)",
    "{y} - jax.nn.logsumexp({y}, -1, b=2.0, keepdims=True)",
    "{y} - jnp.log(1.0 + jnp.exp({y}).sum(-1, keepdims=True))",
    "jax.nn.log_softmax({y} * 1.0, -1) / 2.0",
)  # fmt: skip
PICKED = (
    "jnp.take_along_axis({l}, {i}[:, None], -1)[:, 0]",
    "jnp.take_along_axis({l}, {i}[:, None], axis=1).squeeze(-1)",
    "(jax.nn.one_hot({i}, {v}) * {l}).sum(-1)", "{l}[jnp.arange({m}), {i}]",
    "jnp.einsum('mv,mv->m', jax.nn.one_hot({i}, {v}), {l})",
    "jnp.where(jnp.arange({v}) == {i}[:, None], {l}, 0.0).sum(-1)",
    "jax.vmap(lambda r, j: r[j])({l}, {i})",
)  # fmt: skip
ODD_PICKED = (
    "jnp.take_along_axis({l}, {i}[:, None], -1, mode='clip')[:, 0]",
    "jnp.take_along_axis({l}, {i}[:, None], -1, mode='fill')[:, 0]",
    "jnp.take_along_axis({l}, {i}[:, None], -1, mode='fill', fill_value=0)[:, 0]",
    "(jax.nn.one_hot({i}, {v}) * {l}).max(-1)", "{l}.max(-1)", "{l}.mean(-1)",
    "(jnp.eye({v})[{i}] * {l}).sum(-1)", "{l}[:, 1]", "{l}[jnp.arange({m})[::-1], {i}]",
    "jnp.where(jnp.arange({v}) <= {i}[:, None], {l}, 0.0).sum(-1)",
    "(jax.nn.one_hot({i}, {v}) * {l}).mean(-1)",
    "((0.9 * jax.nn.one_hot({i}, {v}) + 0.1 / {v}) * {l}).sum(-1)",
    "(jax.nn.softmax({l}, -1) * {l}).sum(-1)",
)  # fmt: skip
LABELS = (
    "{i}", "{i}", "{i} % {v}", "jnp.clip({i}, 0, {v} - 1)", "jnp.maximum({i}, 0)",
    "jnp.where({i} < 0, 0, {i})", "jnp.where({i} >= {v}, 1, {i})", "{i} + 1",
    "{i} - 2", "{i}.astype(jnp.int8)", "{i}.astype(jnp.uint8)", "abs({i})",
    "jnp.roll({i}, -1)",
)  # fmt: skip
COUNTED = (
    "jnp.where({i} >= 0, {o}, 0.0)", "jnp.where({i} != -1, {o}, 0.0)",
    "{o} * ({i} > 0)", "jnp.where({i} < {v}, {o}, 0.0)", "{o} * {c}",
    "{o} + 1e-3 * jax.nn.logsumexp({y}, -1) ** 2", "0.9 * {o} - 0.1 * {l}.mean(-1)",
    "{o} + 1e-2 * ({y} ** 2).mean(-1)", "jnp.nan_to_num({o})", "jnp.exp(-{o})",
    "(1.0 - jnp.exp(-{o})) ** 2 * {o}", "{o}[::-1]", "jnp.minimum({o}, 5.0)",
    "jnp.cumsum({o})", "{o} + {y}.max(-1)", "jnp.where({o} > 1.0, {o}, 0.0)",
)  # fmt: skip
MEANS = (
    "{o}.mean()", "{o}.sum()", "({o} * {c}).sum() / {c}.sum()", "{o}.max()",
    "jnp.where({i} >= 0, {o}, 0.0).sum() / jnp.maximum(({i} >= 0).sum(), 1)",
    "{o}.mean() + 1e-3 * jax.nn.logsumexp({y}, -1).mean()",
    "{o}.mean() + 1e-3 * (jax.nn.logsumexp({y}, -1) ** 2).mean()",
    "{o}.mean() + 0.1 * {y}.mean()", "jnp.median({o})", "jnp.mean({o}, where={i} > 0)",
)  # fmt: skip


def program(seed: int) -> Program:
    """A loss of rows, or what looks like one."""
    w = Writer("loss", seed)
    m, k, v = w.one((8, 16, 48)), w.one((8, 16)), w.one((5, 16, 33, 64))
    names = {"m": m, "v": v}
    y = _logits(w, m, k, v)
    dtype = w.mostly("int32", ("int8", "int16", "uint8", "uint32"), 0.7)
    values = w.mostly(f"classes of {v}", ("small", "near ends"), 0.8)
    i = w.argument("i", (m,), values, dtype)
    at = w.let(w.one(LABELS).format(i=i, v=v), "j")
    names |= {"y": y, "i": at}
    if w.chance(0.6):
        names["l"] = w.let(w.usually(LOGS, ODD_LOGS, 0.2).format(**names), "l")
        out = w.let("-" + w.usually(PICKED, ODD_PICKED, 0.2).format(**names), "o")
    else:
        names["l"] = y
        picked = w.let(w.usually(PICKED, ODD_PICKED, 0.2).format(**names), "p")
        total = w.let(f"jax.nn.logsumexp({y}, -1)", "t")
        out = w.let(w.one((f"{total} - {picked}", f"-({picked} - {total})")), "o")
    steps = [COUNTED] * w.one((0, 0, 1, 2)) + [MEANS] * w.chance(0.4)
    for text in map(w.one, steps):
        if "{c}" in text and "c" not in names:
            names["c"] = w.argument("c", (m,), w.one(("positive", "some zeros")))
        out = w.let(text.format(o=out, **names), "o")
    return w.program(out)


def _logits(w: Writer, m: int, k: int, v: int) -> str:
    """Logits of rows, as a product or given."""
    dtype = w.mostly("float32", ("bfloat16", "float16"), 0.8)
    if w.chance(0.3):
        y = w.argument("y", (m, v), w.one(VALUES), dtype, operand=True)
    else:
        x = w.argument("x", (m, k), w.one(VALUES), dtype, operand=True)
        x = operands.changed(w, x, 1) if w.chance(0.1) else x
        values = w.mostly("normal", VALUES, 0.8)
        weights = w.argument("w", (k, v), values, dtype, operand=True)
        y = w.let(w.one(PRODUCTS).format(x=x, w=weights), "y")
    for _ in range(w.draw.randint(0, 2)):
        text = w.usually(SHAPED, ODD_SHAPED, 0.3)
        b = w.argument("b", (v,), "normal", operand=True) if "{b}" in text else ""
        y = w.let(text.format(y=y, b=b, v=v), "y")
    return y
