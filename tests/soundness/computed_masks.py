"""Attention under masks that models compute: sums, orders, bits, searches and draws.

Their weights take steps that models have, too: dropped keys, sinks beside the scores,
spans, choices behind the softmax.
"""

from __future__ import annotations

import dataclasses

from tests.soundness import masks, scores
from tests.soundness.masks import Sizes
from tests.soundness.program import Program
from tests.soundness.writer import INTEGERS, Writer

SAME = "(lambda g: (g[:, :, None] == g[:, None, :])[:, None])"
LATER = "(lambda g: (g[:, :, None] >= g[:, None, :])[:, None])"
LINE = "(lambda p: p[:, None] >= p[None, :])"
NEAR = "(lambda p: (p[:, None] >= p[None, :]) & (p[:, None] - p[None, :] < 5))"
OF_INTEGERS = (
    "(jnp.cumprod(({t} != 3).astype(jnp.uint8), -1) > 0)[:, None, None, :]",
    f"{SAME}(jnp.cumsum({{t}} % 5 == 0, -1))",
    f"{SAME}(jnp.cumsum({{t}} % 5 == 0, -1, dtype=jnp.int8))",
    f"{LATER}(jnp.cumsum({{t}}.astype(jnp.uint8), -1, dtype=jnp.uint8))",
    f"{LATER}(jnp.cumsum({{t}}.astype(jnp.int8), -1, dtype=jnp.int8))",
    f"{LATER}(jnp.cumsum(abs({{t}}).astype(jnp.int32), -1))",
    f"{SAME}(jnp.cumsum({{t}} == 0, -1) - jnp.cumsum({{t}} == 1, -1))",
    f"{SAME}(jax.vmap(lambda e: jnp.searchsorted(jnp.sort(e), jnp.arange({{n}})))"
    "({t}.astype(jnp.int32)))",
    "jnp.isin({t}, jnp.array([1, 2, 7]))[:, None, None, :]",
    f"{SAME}({{t}} // 4)", f"{SAME}(lax.cummax({{t}}, 1))",
    "({t} == {t}.max(-1, keepdims=True))[:, None, None, :]",
    "(jnp.arange({n}) < jnp.argmax({t} == 2, -1)[:, None])[:, None, None, :]",
    "(jnp.arange({n}) < ({t} != 0).sum(-1, dtype=jnp.uint8)[:, None])"
    "[:, None, None, :]",
    f"{SAME}({{t}}) & ({{t}} >= 0)[:, None, None, :] & ({{t}} >= 0)[:, None, :, None]",
)  # fmt: skip
OF_FLOATS = (
    f"{LATER}(jnp.argsort(jnp.argsort({{f}}, -1), -1))", f"{LATER}({{f}})",
    f"{SAME}(jnp.argsort({{f}}, -1) // 4)", f"{SAME}(jnp.round({{f}}))",
    "(lambda d, w: (d >= 0) & (d <= w[:, None, None, None]))"
    "(jnp.arange({n})[:, None] - jnp.arange({n}), jnp.argmax({f}, -1))",
    "(jnp.isclose({f}[:, :, None], {f}[:, None, :], atol=0.5))[:, None]",
    "jnp.put_along_axis(jnp.zeros(({b}, 1, {n}, {n}), bool),"
    " lax.top_k({f}[:, None, :, None] * {f}[:, None, None, :], 3)[1], True, axis=-1,"
    " inplace=False)",
    "(jnp.cumsum(jax.nn.softmax(jnp.sort({f}, -1)), -1) < 0.9)[:, None, None, :]",
    "(jnp.zeros(({b}, {n}), bool).at[jnp.arange({b})[:, None],"
    " lax.top_k({f}, 5)[1]].set(True))[:, None, None, :]",
    "({f}[:, None, :, None] * {f}[:, None, None, :] > 0.0)",
    "jnp.triu(jnp.ones(({n}, {n})), -2)[None, None] * {f}[:, None, None, :] != 0.0",
)  # fmt: skip
OF_PLACES = (
    f"{LINE}((jnp.arange({{n}}) * 20).astype(jnp.uint8))",
    f"{LINE}((jnp.arange({{n}}) * 9).astype(jnp.int8))",
    f"{NEAR}(jnp.arange({{n}}, dtype=jnp.float16) * 100 + 1000)",
    f"{NEAR}(jnp.arange({{n}}, dtype=jnp.float32) * (1 / 3))",
    f"{NEAR}(jnp.arange({{n}}, dtype=jnp.uint8) * jnp.uint8(11))",
    f"{LINE}(jnp.cumsum(jnp.full({{n}}, 11, jnp.int8), dtype=jnp.int8))",
    "jnp.kron(jnp.eye({n} // 4), jnp.ones((4, 4))) > 0",
    "jnp.roll(jnp.tri({n}), {k}, 1) > 0", "jnp.tri({n}, k={k}) > 0",
    "jnp.tri({n}, dtype=jnp.float16) * 2 - jnp.tri({n}, k=-{k}, dtype=jnp.float16) > 1",
    "(jnp.arange({n}) < {k}) | (jnp.arange({n})[:, None] - jnp.arange({n}) < {k})",
    "jnp.flip(jnp.tri({n}), 0) > 0", "jnp.tri({n})[::-1, ::-1] > 0",
    "jax.random.bernoulli(jax.random.key({k}), 0.7, ({b}, 1, {n}, {n}))",
    "jax.random.permutation(jax.random.key({k}), jnp.tri({n}) > 0, independent=True)",
    "(({w}[:, None] >> jnp.arange({n}, dtype=jnp.uint32)) & 1) == 1",
    "jnp.unpackbits({u}, axis=-1, count={n}).astype(bool)",
    "(jnp.arange({n})[:, None] ^ jnp.arange({n})) < 2 ** {k}",
    "(jnp.arange({n})[:, None] & jnp.arange({n})) == jnp.arange({n})",
)  # fmt: skip
BENT = (
    "jnp.where(jnp.isinf(h := ({s} * 3e4).astype(jnp.float16)),"
    " jnp.float16(65504), h).astype(jnp.float32) / 3e4",
    "{s} * jnp.log(jnp.arange(1, {n} + 1, dtype=jnp.float32))[:, None]",
    "{s} + jax.random.bernoulli(jax.random.key(5), 0.2, {s}.shape) * -1e12",
    "{s} + jax.random.gumbel(jax.random.key(5), {s}.shape)",
    "20.0 * jnp.tanh({s} / 20.0)", "{s} - 0.5 * abs(jnp.arange({n})[:, None]"
    " - jnp.arange({n}))", "{s} + jnp.log1p({m})",
    "{s} - 0.1 * (jnp.arange({n}, dtype=jnp.int8)[:, None]"
    " * jnp.int8(5)).astype(jnp.float32)",
)  # fmt: skip
BEHIND = (
    "jax.nn.softmax({s}, -1, where={m})",
    "jnp.where({m}, jax.nn.softmax(jnp.where({m}, {s}, -jnp.inf), -1), 0.0)",
    "jnp.where({m}, jax.nn.softmax(jnp.where({m}, {s}, -1e9), -1), 0.0)",
    "jnp.where(({m}).any(-1, keepdims=True), jax.nn.softmax(jnp.where({m} |"
    " ~({m}).any(-1, keepdims=True), {s}, -jnp.inf), -1), 0.0)",
    "(lambda s: jax.nn.softmax(jnp.concatenate([s, jnp.zeros((*s.shape[:-1], 1))],"
    " -1), -1)[..., :-1])(jnp.where({m}, {s}, -jnp.inf))",
    "(lambda s: jax.nn.softmax(jnp.concatenate([s, jnp.zeros((*s.shape[:-1], 1))],"
    " -1), -1)[..., :-1])(jnp.where({m}, {s}, -1e9))",
    "jnp.where(jax.random.bernoulli(jax.random.key(7), 0.8, {s}.shape),"
    " jax.nn.softmax(jnp.where({m}, {s}, -1e9), -1) / 0.8, 0.0)",
    "(lambda w: w / (w.sum(-1, keepdims=True) + 1e-8))(jax.nn.softmax({s}, -1) *"
    " jnp.clip((6.5 - abs(jnp.arange({n})[:, None] - jnp.arange({n}))) / 3, 0, 1))",
    "(lambda w: w + lax.stop_gradient(jax.nn.one_hot(w.argmax(-1), {n}) - w))"
    "(jax.nn.softmax(jnp.where({m}, {s}, -1e9), -1))",
    "(lambda w: w * (w > 1 / {n}) / jnp.maximum((w > 1 / {n}).sum(-1, keepdims=True),"
    " 1))(jax.nn.softmax(jnp.where({m}, {s}, -1e9), -1))",
)  # fmt: skip
BAD = ("some nan", "some inf", "some nan or inf")


def program(seed: int) -> Program:
    """Attention whose result is its weights, under a mask that is computed."""
    w = Writer("computed", seed)
    size = dataclasses.replace(scores.sizes(w), queries=(keys := w.one((16, 24, 40))),
                               keys=keys)  # fmt: skip
    recipes = {"v": "identity"}
    if w.chance(0.15):
        recipes[w.one("qkv")] = w.one(BAD)
    given = scores.given(w, size, (8, size.keys), recipes)
    mask = _mask(w, size)
    if w.chance(0.3):
        mask = w.let(w.one(("{a} & {b}", "{a} | {b}", "~({a}) | {b}")).format(
            a=f"({mask})", b=masks.causal(w, size)), "m")  # fmt: skip
    score = scores.scores(w, given)
    names = {"n": size.keys, "m": mask}
    if w.chance(0.25):
        score = w.let(w.one(BENT).format(s=score, **names), "s")
    if w.chance(0.4):
        weights = w.let(w.one(BEHIND).format(s=score, **names), "w")
    else:
        weights = scores.weights(w, scores.masked(w, score, mask), mask)
    return w.program(scores.weighed(w, weights, given), entries=True)


def _mask(w: Writer, size: Sizes) -> str:
    """A mask of integers, of floats or of places alone."""
    shape = (size.batch, size.keys)
    names = {"b": size.batch, "n": size.keys, "k": w.one((1, 2, 3, 5))}
    text = w.one(w.one((OF_INTEGERS, OF_FLOATS, OF_PLACES)))
    if "{t}" in text:
        values = w.one(("small", "segments", "all numbers"))
        names["t"] = w.argument("t", shape, values, w.one(("int32", *INTEGERS)))
    if "{f}" in text:
        names["f"] = w.argument("f", shape, w.one(("normal", "ties", "some zeros")))
    if "{w}" in text:
        names["w"] = w.argument("b", (size.keys,), "all numbers", "uint32")
    if "{u}" in text:
        names["u"] = w.argument("u", (size.keys, size.keys), "all numbers", "uint8")
    return w.let(text.format(**names), "m")
