"""Ops in the branches of a cond: residuals go to the same branch of its gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import rewriter

pytestmark = pytest.mark.once

B, T, N, H, F = 2, 6, 2, 4, 5
D = N * H
RANDOM = np.random.default_rng(0)
FORCED = dict.fromkeys(
    ("attention", "rms_norm", "layer_norm", "gated_linear_unit"), "memory_bounded"
)
MESH = jax.sharding.Mesh(jax.devices()[:1], ("x",))


def normal(*shape: int) -> np.ndarray:
    return 0.5 * RANDOM.normal(size=shape).astype(np.float32)


X, W, G = normal(B, T, D), normal(4, D, D), normal(D)
GATE, UP, DOWN = normal(D, F), normal(D, F), normal(F, D)
YES, KEPT = np.bool_(True), np.arange(T)[None] < np.array([[3], [T]])


def attention(x: Any, w: Any, mask: Any = None) -> Any:
    q, k, v = ((x @ w[i]).reshape(B, -1, N, H) for i in range(3))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    return out.reshape(x.shape) @ w[3]


def rms(x: Any, g: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def centred(x: Any, g: Any) -> Any:
    d = x - x.mean(-1, keepdims=True)
    return d * lax.rsqrt((d * d).mean(-1, keepdims=True) + 1e-6) * g


def block(x: Any, w: Any, g: Any) -> Any:
    return x + attention(rms(x, g), w)


def causal() -> Any:
    return jnp.tril(jnp.ones((T, T), bool))


def band() -> Any:
    return causal() & ~jnp.tril(jnp.ones((T, T), bool), -3)


def same(x: Any, *_: Any) -> Any:
    return x


def skipping(i: Any, c: Any, w: Any, g: Any) -> Any:
    return lax.cond(i % 2 == 0, block, same, c, w, g)


def chosen(kept: Any) -> Any:
    return lambda x, w, local: x + attention(x, w, kept(local))


def local_or_global(x: Any, w: Any, g: Any, p: Any) -> Any:
    """Both branches begin with the same norm, and its products."""
    return lax.cond(
        p,
        lambda: x + attention(rms(x, g), w, band()),
        lambda: x + attention(rms(x, g), w, causal()),
    )


def norms_of(norm: Any) -> Any:
    """The same norm in both branches, of which one needs no more than it."""

    def f(x: Any, w: Any, g: Any, p: Any) -> Any:
        return lax.cond(
            p, lambda: x + jnp.tanh(norm(x, g) @ w[0]), lambda: x + jnp.sin(norm(x, g))
        )

    return jax.checkpoint(f)


def layers_of(kept: Any, wrap: Any = jax.checkpoint) -> Any:
    """Layers one after the other, of which every second one is local."""

    def f(x: Any, w: Any) -> Any:
        layer, local = wrap(chosen(kept)), jnp.arange(2) % 2 == 0
        return layer(layer(x, w, local[0]), w, local[1])

    return f


def on_devices(x: Any, w: Any, g: Any, p: Any) -> Any:
    split = jax.shard_map(
        lambda x, w, g, p: lax.cond(p, block, same, x, w, g),
        mesh=MESH,
        in_specs=(P("x"), P(), P(), P()),
        out_specs=P("x"),
    )
    return split(x, w, g, p)


PROGRAMS = {
    "attention or nothing": (
        lambda x, w, p: lax.cond(p, attention, same, x, w),
        (X, W, YES),
        {"attention": 1},
    ),
    "operands are closed over": (
        lambda x, w, g, p: lax.cond(p, lambda: x, lambda: block(x, w, g)),
        (X, W, G, ~YES),
        {"attention": 1, "rms_norm": 1},
    ),
    "another norm in each branch": (
        lambda x, g, p: lax.cond(p, centred, rms, x, g),
        (X, G, YES),
        {"layer_norm": 1, "rms_norm": 1},
    ),
    "gated linear unit": (
        lambda x, a, b, c, p: lax.cond(
            p, lambda: x + (jax.nn.silu(x @ a) * (x @ b)) @ c, lambda: x
        ),
        (X, GATE, UP, DOWN, YES),
        {"gated_linear_unit": 1},
    ),
    "local or global": (
        lambda x, w, p: lax.cond(
            p, lambda: attention(x, w, causal()), lambda: attention(x, w, band())
        ),
        (X, W, YES),
        {"attention": 2},
    ),
    "a mask from outside": (
        lambda x, w, kept, p: lax.cond(
            p, lambda x: attention(x, w, kept[:, None, None]), same, x
        ),
        (X, W, KEPT, YES),
        {"attention": 1},
    ),
    "a mask from a branch, in a checkpoint": (
        jax.checkpoint(chosen(lambda p: lax.cond(p, band, causal))),
        (X, W, YES),
        {"attention": 1},
    ),
    "a mask from a branch, products are saved": (
        jax.checkpoint(
            chosen(lambda p: lax.cond(p, band, causal)),
            policy=jax.checkpoint_policies.dots_saveable,
        ),
        (X, W, YES),
        {"attention": 1},
    ),
    "masks by a layer's number, in checkpoints": (
        layers_of(lambda p: jnp.where(p, band(), causal())),
        (X, W),
        {"attention": 2},
    ),
    "switch": (
        lambda x, w, g, i: lax.switch(i, [same, block, same], x, w, g),
        (X, W, G, np.int32(1)),
        {"attention": 1, "rms_norm": 1},
    ),
    "in a scan": (
        lambda x, w, g: lax.scan(
            lambda c, i: (skipping(i[0], c, i[1], g), None), x, (jnp.arange(3), w)
        )[0],
        (X, np.stack([W, W, W * 0.5]), G),
        {"attention": 1, "rms_norm": 1},
    ),
    "in a checkpoint in a scan": (
        lambda x, w, g: lax.scan(
            jax.checkpoint(lambda c, i: (skipping(i, c, w, g), None)),
            x,
            jnp.arange(2),
        )[0],
        (X, W, G),
        {"attention": 1, "rms_norm": 1},
    ),
    "equal values in both branches, in a checkpoint in a scan": (
        lambda x, w, g: lax.scan(
            lambda c, i: (jax.checkpoint(local_or_global)(c, w, g, i % 2 == 0), None),
            x,
            jnp.arange(2),
        )[0],
        (X, W, G),
        {"attention": 2, "rms_norm": 2},
    ),
    "the same norm in both branches, in a checkpoint": (
        norms_of(rms),
        (X, W, G, YES),
        {"rms_norm": 2},
    ),
    "the same layer norm in both branches": (
        norms_of(centred),
        (X, W, G, YES),
        {"layer_norm": 2},
    ),
    "the same attention in both branches": (
        lambda x, w, p: lax.cond(
            p, lambda: x + attention(x, w), lambda: 2 * x + attention(x, w) / 2
        ),
        (X, W, YES),
        {"attention": 2},
    ),
    "a cond in a cond": (
        lambda x, w, g, p: lax.cond(
            p, lambda x: lax.cond(x.sum() > -1e9, block, same, x, w, g), same, x
        ),
        (X, W, G, YES),
        {"attention": 1, "rms_norm": 1},
    ),
    "on each device": (on_devices, (X, W, G, YES), {"attention": 1, "rms_norm": 1}),
}


def gradient(f: Any, args: Any) -> Any:
    places = tuple(i for i, a in enumerate(args) if a.dtype == np.float32)
    return jax.value_and_grad(lambda *a: jnp.sin(f(*a)).sum(), places)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_ops_in_branches_are_replaced(name: str) -> None:
    f, args, wanted = PROGRAMS[name]
    both = gradient(f, args)
    fast = rewriter.optimize(both, implementation=FORCED)
    found = fast.report(*args).counts(repeats=False, backward=True)
    assert {op: n for op, n in found.items() if n} == wanted
    got = jax.tree.leaves(fast(*args))
    with jax.enable_x64(True):
        wide = [a.astype(float) if a.dtype == np.float32 else a for a in args]
        exact = jax.tree.leaves(jax.jit(both)(*wide))
    for one, other in zip(got, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_gradients_in_another_conds_branch_are_not_those_of_the_first() -> None:
    """Residuals of a branch that did not run would be zeros."""

    def f(x: Any, g: Any, p: Any, q: Any) -> Any:
        forward = lax.cond(p, lambda: rms(x, g), lambda: x)
        slope = jax.grad(lambda x: jnp.sin(rms(x, g)).sum())
        return forward, lax.cond(q, lambda: slope(x), lambda: x)

    for p, q in ((True, False), (False, True)):
        args = X, G, np.bool_(p), np.bool_(q)
        fast = rewriter.optimize(f, implementation=FORCED)
        for one, other in zip(fast(*args), jax.jit(f)(*args), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: f], ids=["again", "saved"])
def test_what_a_branch_keeps_for_its_gradients_is_not_computed_for_others(wrap: Any):
    """The weights of each branch are read by the same branch of the gradients alone."""
    t = 1024

    def attend(q: Any, k: Any, v: Any, kept: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 8
        shares = jax.nn.softmax(jnp.where(kept, scores, -1e30))
        return jnp.einsum("bnts,bsnh->btnh", shares, v)

    def turn(x: Any, local: Any) -> Any:
        apart = jnp.arange(t)[:, None] - jnp.arange(t)
        near = lambda: attend(x, x, x, (apart >= 0) & (apart < 64))
        return x + lax.cond(local, near, lambda: attend(x, x, x, apart >= 0)), None

    def loss(x: Any, local: Any) -> Any:
        return (lax.scan(wrap(turn), x, local)[0] ** 2).mean()

    shapes = jax.ShapeDtypeStruct((1, t, 4, 64), np.float32), np.array([True, False])
    step = jax.grad(loss)
    report = rewriter.explain(step, target="h200")(*shapes)
    assert [s.replaced and s.backward for s in report.sites] == [True, True]
    fast, plain = (
        f.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        for f in (rewriter.optimize(step, implementation=FORCED), jax.jit(step))
    )
    assert fast < 0.5 * plain
