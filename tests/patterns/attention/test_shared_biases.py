"""A bias that a program adds up once, of a table and of padding, for all its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

B, T, N, H, LAYERS = 2, 8, 2, 4, 2
D = N * H
FORCED = {"attention": "memory_bounded"}
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(2 * T - 1, N)).astype(np.float32)
WEIGHTS = RANDOM.normal(size=(LAYERS, 3, D, N, H)).astype(np.float32) / 3
X = RANDOM.normal(size=(B, T, D)).astype(np.float32)
PLACES = (np.arange(T)[:, None] - np.arange(T) + T - 1).astype(np.int32)
LENGTHS = np.array([T, 5], np.int32)


def padding(lengths: Any, fill: float = -1e9) -> Any:
    keep = (jnp.arange(T) < lengths[:, None])[:, None, None]
    return jnp.where(keep, 0.0, fill)


def table(t: Any) -> Any:
    return t[PLACES].transpose(2, 0, 1)[None]


def attend(x: Any, w: Any, bias: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[i]) for i in range(3))
    s = jnp.einsum("btnh,bsnh->bnts", q, k) + bias
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)
    return x + out.reshape(x.shape)


def each(t: Any, w: Any, x: Any, bias: Any) -> Any:
    for one in w:
        x = attend(x, one, bias)
    return x


def usual(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    return each(t, w, x, table(t) + padding(lengths))


def lowest(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    fill = float(np.finfo(np.float32).min)
    return each(t, w, x, padding(lengths, fill) + table(t))


def causal(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    later = jnp.where(jnp.tri(T, dtype=bool), 0.0, -1e9)
    return each(t, w, x, table(t) + padding(lengths) + later)


def by_a_product(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    keep = (jnp.arange(T) < lengths[:, None]).astype(x.dtype)[:, None, None]
    return each(t, w, x, table(t) + (1 - keep) * -1e9)


def narrow(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    bias = (table(t) + padding(lengths)).astype(jnp.bfloat16)
    return each(t, w, x, bias.astype(x.dtype))


def checkpointed(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    bias = table(t) + padding(lengths)
    for one in w:
        x = jax.checkpoint(attend)(x, one, bias)
    return x


def in_a_scan(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    bias = table(t) + padding(lengths)
    return jax.lax.scan(lambda x, one: (attend(x, one, bias), None), x, w)[0]


def lowest_in_a_scan(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    bias = table(t) + padding(lengths, float(np.finfo(np.float32).min))
    return jax.lax.scan(lambda x, one: (attend(x, one, bias), None), x, w)[0]


def first_before_a_scan(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    """The first layer makes the bias, and a loop has the others."""
    bias = table(t) + padding(lengths, float(np.finfo(np.float32).min))
    layer = lambda x, one: (attend(x, one, bias), None)
    return jax.lax.scan(layer, attend(x, w[0], bias), w[1:])[0]


def first_before_checkpoints(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    bias = table(t) + padding(lengths, float(np.finfo(np.float32).min))
    layer = jax.checkpoint(lambda x, one: (attend(x, one, bias), None))
    return jax.lax.scan(layer, attend(x, w[0], bias), w[1:])[0]


def apart_in_a_scan(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    """The table and the padding are added in each layer."""
    places, fill = table(t), padding(lengths, float(np.finfo(np.float32).min))
    layer = lambda x, one: (attend(x, one, places + fill), None)
    return jax.lax.scan(layer, x, w)[0]


def of_a_call(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    made = jax.jit(lambda t, lengths: table(t) + padding(lengths))
    return each(t, w, x, made(t, lengths))


def two_tables(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    return each(t, w, x, table(t) + jnp.sin(table(t[::-1])) + padding(lengths))


def scaled(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    return each(t, w, x, 0.5 * (table(t) + padding(lengths)))


def first_layer_alone(t: Any, w: Any, x: Any, lengths: Any) -> Any:
    x = attend(x, w[0], table(t))
    return attend(x, w[1], table(t) + padding(lengths))


PROGRAMS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        usual, lowest, causal, by_a_product, narrow, checkpointed, in_a_scan,
        lowest_in_a_scan, first_before_a_scan, first_before_checkpoints,
        apart_in_a_scan, of_a_call, two_tables, scaled, first_layer_alone,
    )
}  # fmt: skip


def stepped(fn: Callable[..., Any]) -> Callable[..., Any]:
    weights = np.cos(np.arange(X.size)).reshape(X.shape).astype(np.float32)
    loss = lambda *args: (fn(*args) * weights).sum()
    return jax.value_and_grad(loss, (0, 1, 2))


def in_float64(step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a step gives in float64, where -1e9 beside a score keeps its digits."""
    with jax.enable_x64(True):
        wide = (a.astype(np.float64) for a in args[:3])
        return jax.jit(step)(*wide, args[3])


@pytest.mark.parametrize("lengths", [LENGTHS, np.array([3, 0], np.int32)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gradient_of_the_bias_is_the_sites(name: str, lengths: Any) -> None:
    step = stepped(PROGRAMS[name])
    fast = rewriter.optimize(step, implementation=FORCED)
    args = TABLE, WEIGHTS, X, lengths
    sites = [s for s in fast.report(*args).sites if s.op == "attention"]
    assert sum(s.repeats for s in sites) == LAYERS
    assert all(s.replaced and s.backward for s in sites)
    want = in_float64(step, args) if lengths.all() else jax.jit(step)(*args)
    digits = 2e-2 if name == "narrow" else 3e-5
    for a, b in zip(*map(jax.tree.leaves, (fast(*args), want)), strict=True):
        np.testing.assert_allclose(a, b, atol=digits * max(np.abs(b).max(), 0.1))


SCORES_ONCE = [
    "usual", "lowest", "causal", "of_a_call", "lowest_in_a_scan", "first_before_a_scan",
    "first_before_checkpoints",
]  # fmt: skip


@pytest.mark.parametrize("name", SCORES_ONCE)
def test_scores_are_not_computed_twice(name: str) -> None:
    """The program has no product of its scores' shape left."""
    step, args = stepped(PROGRAMS[name]), (TABLE, WEIGHTS, X, LENGTHS)
    scores = f"f32[{B},{N},{T},{T}] = dot_general"
    assert scores in str(jax.make_jaxpr(step)(*args))
    fast = rewriter.optimize(step, implementation=FORCED)
    assert scores not in str(fast.jaxpr(*args))


def test_a_gpu_gets_its_kernel() -> None:
    """A step of T5's size: attention was left to XLA, since its scores were read."""
    shape = jax.ShapeDtypeStruct
    b, t, n, h = 16, 512, 12, 64

    def loss(bias: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
        whole = bias + jnp.where(keep[:, None, None], 0.0, -1e9).astype(bias.dtype)
        for _ in range(2):
            s = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) + whole
            w = jax.nn.softmax(s).astype(v.dtype)
            q = q + jnp.einsum("bnts,bsnh->btnh", w, v)
        return q.astype(jnp.float32).sum()

    args = (
        shape((1, n, t, t), "bfloat16"), *[shape((b, t, n, h), "bfloat16")] * 3,
        shape((b, t), "bool"),
    )  # fmt: skip
    step = jax.grad(loss, (0, 1, 2, 3))
    sites = rewriter.explain(step, target="h200")(*args).sites
    found = [(s.kernel, s.backward) for s in sites if s.op == "attention"]
    assert set(found) == {("hopper", True)}
