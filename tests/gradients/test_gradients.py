"""Programs that are differentiated already: forward and backward are replaced."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.algebra.normal_form import OverBudget
from rewriter.gradients import search
from tests import slow
from tests.support.arrays import normal
from tests.support.programs import attention

D, N, T, LAYERS = 32, 4, 16, 2
OPS = ("attention", "rms_norm", "layer_norm", "gated_linear_unit")
FORCED = dict.fromkeys((*OPS, "ragged_dot"), "reference")


def weights(seed: int) -> dict[str, jax.Array]:
    shapes = {
        "scale1": (D,), "scale2": (D,), "bias2": (D,), "q": (D, D), "k": (D, D),
        "v": (D, D), "o": (D, D), "gate": (D, 2 * D), "up": (D, 2 * D),
        "down": (2 * D, D),
    }  # fmt: skip
    return {
        n: normal(*s, seed=97 * seed + i, size=0.1 if len(s) > 1 else 1)
        for i, (n, s) in enumerate(shapes.items())
    }


PARAMS = [weights(i) for i in range(LAYERS)]
X = normal(2, T, D, seed=1)


def block(p, x):
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale1"]
    q, k, v = ((h @ p[w]).reshape(2, T, N, D // N) for w in "qkv")
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(D // N)
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e9)
    y = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, -1), v)
    x = x + y.reshape(2, T, D) @ p["o"]
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    h = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    h = h * p["scale2"] + p["bias2"]
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def unrolled(layer: Callable) -> Callable:
    def loss(params, x):
        for p in params:
            x = layer(p, x)
        return (x**2).mean()

    return loss


def scanned(layer: Callable) -> Callable:
    def loss(params, x):
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *params)
        x, _ = jax.lax.scan(lambda c, p: (layer(p, c), None), x, stacked)
        return (x**2).mean()

    return loss


CONTEXTS = {
    "unrolled": (unrolled(block), LAYERS),
    "jit": (unrolled(jax.jit(block)), LAYERS),
    "remat": (unrolled(jax.checkpoint(block)), LAYERS),
    "scan": (scanned(block), 1),
    "scan_of_remat": (scanned(jax.checkpoint(block)), 1),
    "jit_of_scan": (jax.jit(scanned(block)), 1),
    "scan_of_jit": (scanned(jax.jit(block)), 1),
}


def equal(new, old, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def agree(fast, step, *args, tolerance: float = 1e-5) -> None:
    """Compares two functions, which are compiled together."""
    equal(*jax.jit(lambda *given: (fast(*given), step(*given)))(*args), tolerance)


@pytest.mark.parametrize("name", slow.first(5, CONTEXTS))
def test_forward_and_backward_are_replaced(name: str) -> None:
    loss, count = CONTEXTS[name]
    step = jax.value_and_grad(loss)
    report = rewriter.explain(step)(PARAMS, X)
    assert not report.failures
    counts = report.counts(repeats=False, backward=True)
    assert {op: counts[op] for op in OPS} == dict.fromkeys(OPS, count)
    fast = rewriter.optimize(step, implementation=FORCED)
    text = str(fast.jaxpr(PARAMS, X))
    assert text.count("rewriter_site_backward[") == len(OPS) * count
    assert " exp " not in text  # no weights are computed outside the ops
    agree(fast, step, PARAMS, X)


def test_a_loop_no_longer_stacks_weights() -> None:
    """Of T x T numbers a layer, none are kept for the backward loop."""
    step = jax.value_and_grad(scanned(block))
    fast = rewriter.optimize(step, implementation=FORCED)

    def stacked(closed) -> list[tuple[int, ...]]:
        loops = [e for e in closed.eqns if e.primitive.name == "scan"]
        return [v.aval.shape for e in loops for v in e.outvars]

    assert (LAYERS, 2, N, T, T) in stacked(jax.make_jaxpr(step)(PARAMS, X))
    assert (LAYERS, 2, N, T, T) not in stacked(fast.jaxpr(PARAMS, X))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="chosen for a CPU")
def test_left_over_equations_do_not_keep_the_original() -> None:
    """Differentiation leaves equations of the row's maximum that nobody reads."""

    def loss(q, k, v):
        s = jnp.einsum("btnh,bsnh->bnts", q, k)
        s = jnp.where(jnp.tril(jnp.ones((1024, 1024), bool)), s, -1e30)
        y = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)
        return jnp.sin(y).sum()

    large = [jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.float32)] * 3
    report = rewriter.explain(jax.grad(loss, argnums=(0, 1, 2)))(*large)
    (site,) = report.sites
    assert site.kernel == "memory_bounded"
    assert site.backward


def test_checkpointed_attention_without_its_result() -> None:
    """The backward makes the weights again and never the result: no forward there."""

    def loss(q, k, v):
        return dot_product_attention(*(jax.checkpoint(jnp.sin)(x) for x in (q, k, v)))

    def alone(q, k, v):
        y = jax.checkpoint(jax.nn.dot_product_attention)(q, k, v)
        return (y * jnp.cos(jnp.arange(8.0))).sum()

    for fn in (loss, alone):
        step = jax.grad(fn, argnums=(0, 1, 2))
        report = rewriter.explain(step)(*QKV)
        assert not report.failures
        fast = rewriter.optimize(step, implementation=FORCED, strict=True)
        agree(fast, step, *QKV)


def test_gradients_in_a_call_that_holds_an_array() -> None:
    table = np.linspace(0, 1, 8, dtype=np.float32)

    @jax.jit
    def inner(q, k, v):
        return jax.nn.dot_product_attention(q * table, k, v)

    step = jax.grad(lambda q, k, v: jnp.sin(inner(q, k, v)).sum(), argnums=(0, 1, 2))
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    agree(fast, step, *QKV)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.checkpoint(jax.jit(f))])
def test_layers_that_hold_an_array(wrap: Callable) -> None:
    """Their calls are dissolved, and what they hold is read where they were."""
    mask = jnp.tril(jnp.ones((T, T), bool), 2)

    def layer(w, x):
        q, k, v = (jnp.einsum("btnh,hg->btng", x, w[i]) for i in range(3))
        s = jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", q, k), -1e30)
        return x + jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    step = jax.value_and_grad(unrolled(wrap(layer)))
    args = [normal(3, 8, 8, seed=i) for i in range(LAYERS)], QKV[0]
    report = rewriter.explain(step)(*args)
    assert report.counts(backward=True)["attention"] == LAYERS
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    assert str(fast.jaxpr(*args)).count("rewriter_site_backward[") == LAYERS
    loss, gradient = jax.jit(step)(*args)
    equal(jax.jit(fast)(*args), (loss, gradient))
    equal(jax.grad(lambda w: fast(w, args[1])[0])(args[0]), gradient)


def packed(qkv):
    q, k, v = (qkv.reshape(2, T, 3, N, 8)[:, :, i] for i in range(3))
    return dot_product_attention(q, k, v)


def split(qkv):
    q, k, v = (x.reshape(2, T, N, 8) for x in jnp.split(qkv, 3, -1))
    return dot_product_attention(q, k, v)


@pytest.mark.parametrize("fn", [packed, split])
def test_gradient_of_packed_heads(fn) -> None:
    qkv = normal(2, T, 3 * N * 8)
    fast = rewriter.optimize(jax.grad(fn), implementation=FORCED)
    assert str(fast.jaxpr(qkv)).count("rewriter_site_backward[") == 1
    agree(fast, jax.grad(fn), qkv)


def ragged(x, w):
    return jnp.sin(jax.lax.ragged_dot(x, w, jnp.array([3, 5], jnp.int32))).sum()


def dot_product_attention(q, k, v):
    return jnp.sin(jax.nn.dot_product_attention(q, k, v, is_causal=True)).sum()


def standardized(x, scale):
    """The variance is kept from being negative, which its gradient sees."""
    var = jnp.maximum(0, jnp.mean(x * x, -1) - jnp.mean(x, -1) ** 2)[..., None]
    y = (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(var + 1e-5)
    return jnp.sin(y * scale).sum()


QKV = [normal(2, T, N, 8, seed=i) for i in range(3)]
ALONE = {
    "ragged_dot": (ragged, [normal(8, 8), normal(2, 8, 4)]),
    "attention": (dot_product_attention, QKV),
    "layer_norm": (standardized, [normal(4, T), normal(T)]),
}


@pytest.mark.parametrize("op", ALONE)
def test_every_gradient_of_an_op(op: str) -> None:
    fn, args = ALONE[op]
    step = jax.grad(fn, argnums=tuple(range(len(args))))
    assert rewriter.explain(step)(*args).counts(backward=True)[op] == 1
    fast = rewriter.optimize(step, implementation=FORCED)
    assert str(fast.jaxpr(*args)).count("rewriter_site_backward[") == 1
    agree(fast, step, *args)


def by_groups(x, w):
    return jax.lax.ragged_dot(x, w, jnp.array([3, 5], jnp.int32))


@pytest.mark.parametrize("argument", [0, 1, None])
def test_ragged_gradients_of_a_cotangent_that_is_given(argument: int | None) -> None:
    """Forward and gradients are ragged dots of each other's operands."""
    args = [normal(8, 8), normal(2, 8, 4)]

    def step(x, w, ct):
        fn, given = {
            0: (lambda x: by_groups(x, w), (x,)),
            1: (lambda w: by_groups(x, w), (w,)),
            None: (by_groups, (x, w)),
        }[argument]
        y, back = jax.vjp(fn, *given)
        return y, back(ct)

    args.append(normal(8, 4, seed=2))
    report = rewriter.explain(step)(*args)
    assert report.counts()["ragged_dot"] == 1
    assert report.counts(backward=True)["ragged_dot"] == 1
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    text = str(fast.jaxpr(*args))
    assert text.count("rewriter_site_backward[") == 1
    agree(fast, step, *args)
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in args]
        agree(fast, step, *wide, tolerance=1e-12)


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_some_gradients_only(argument: int) -> None:
    step = jax.grad(dot_product_attention, argnums=argument)
    fast = rewriter.optimize(step, implementation=FORCED)
    assert rewriter.explain(step)(*QKV).counts(backward=True)["attention"] == 1
    assert " exp " not in str(fast.jaxpr(*QKV))
    agree(fast, step, *QKV)


def test_weights_that_are_returned_stay() -> None:
    def loss(q, k, v):
        s = jnp.einsum("btnh,bsnh->bnts", q, k)
        p = jax.nn.softmax(s)
        return jnp.sin(jnp.einsum("bnts,bsnh->btnh", p, v)).sum(), p

    step = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    fast = rewriter.optimize(step)
    assert "rewriter_site" not in str(fast.jaxpr(*QKV))
    agree(fast, step, *QKV)


def test_a_wrong_gradient_is_not_taken_for_one() -> None:
    """The program's own rule drops the derivative of the softmax's sum."""

    def loss(q, k, v):
        s = jnp.einsum("btnh,bsnh->bnts", q, k)
        e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
        p = e / jax.lax.stop_gradient(e.sum(-1, keepdims=True))
        return jnp.sin(jnp.einsum("bnts,bsnh->btnh", p, v)).sum()

    step = jax.grad(loss, argnums=(0, 1, 2))
    fast = rewriter.optimize(step, implementation=FORCED)
    agree(fast, step, *QKV)


def guarded(fill: float, of_mask: bool = True):
    """Weights that are zero in rows without keys; the first query has none."""
    mask = jnp.tril(jnp.ones((T, T), bool), -1)
    rows = mask if of_mask else jnp.roll(mask, 3, 0)

    def fn(q, k, v):
        s = jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", q, k) / 3, fill)
        p = jnp.where(rows.any(-1, keepdims=True), jax.nn.softmax(s, -1), 0)
        return jnp.sin(jnp.einsum("bnts,bsnh->btnh", p, v)).sum()

    return fn


@pytest.mark.parametrize("fill", [-1e30, -jnp.inf])
def test_weights_that_are_guarded(fill: float) -> None:
    step = jax.value_and_grad(guarded(fill), argnums=(0, 1, 2))
    assert rewriter.explain(step)(*QKV).counts(backward=True)["attention"] == 1
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    assert str(fast.jaxpr(*QKV)).count("rewriter_site_backward[") == 1
    assert all(np.isfinite(g).all() for g in step(*QKV)[1])
    agree(fast, step, *QKV)


def test_weights_that_another_mask_guards() -> None:
    """That a row of another mask has a key does not hold in rows with keys."""
    step = jax.value_and_grad(guarded(-1e30, of_mask=False), argnums=(0, 1, 2))
    fast = rewriter.optimize(step, implementation=FORCED)
    assert "rewriter_site_backward[" not in str(fast.jaxpr(*QKV))
    agree(fast, step, *QKV)


def bare_rms(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


NORMS = {"layer_norm": jax.nn.standardize, "rms_norm": bare_rms}


@pytest.mark.parametrize("op", NORMS)
def test_a_norm_that_only_a_loss_reads(op: str) -> None:
    """The cotangent is a multiple of the result, which is no norm with a scale."""
    step = jax.value_and_grad(lambda x: jnp.mean(NORMS[op](x) ** 2))
    report = rewriter.explain(step)(X)
    assert report.counts()[op] == report.counts(backward=True)[op] == 1
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    assert str(fast.jaxpr(X)).count("rewriter_site_backward[") == 1
    (_, new), (_, old) = fast(X), step(X)
    np.testing.assert_allclose(new, old, atol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="chosen for a CPU")
def test_gradients_that_residuals_do_not_reach_are_named() -> None:
    def gradients(x, cotangents):
        attend = lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True)
        _, pull = jax.vjp(attend, x)
        return jax.lax.map(lambda ct: pull(ct)[0], cotangents)

    large = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.float32)
    several = jax.ShapeDtypeStruct((3, 1, 1024, 4, 64), jnp.float32)
    report = rewriter.explain(gradients)(large, several)
    assert report.counts(backward=True)["attention"] == 0
    assert "another loop, branch or checkpoint" in str(report)


def rms(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_cotangent_out_of_a_checkpoint(jitted: bool) -> None:
    """Norms are outside, what reads them is recomputed."""
    around = jax.jit if jitted else lambda f: f

    @around
    @jax.checkpoint
    def mix(x, w):
        return jnp.tanh(x @ w["q"]) @ w["o"]

    loss = unrolled(lambda p, x: x + mix(rms(x, p["scale1"]), p))
    step = jax.value_and_grad(loss)
    report = rewriter.explain(step)(PARAMS, X)
    assert report.counts(backward=True)["rms_norm"] == LAYERS
    fast = rewriter.optimize(step, implementation=FORCED)
    text = str(fast.jaxpr(PARAMS, X))
    assert text.count("rewriter_site_backward[") == LAYERS
    assert "rsqrt" not in text
    agree(fast, step, PARAMS, X)


def test_a_cotangent_that_stays_in_a_checkpoint() -> None:
    """A norm's own dx is added up in the recomputation: no op outside can have it."""

    def layer(p, x):
        h = rms(x, p["scale1"])
        return x + jax.checkpoint(lambda h, x, w: jnp.tanh(h @ w) * x)(h, x, p["q"])

    step = jax.value_and_grad(unrolled(layer))
    fast = rewriter.optimize(step, implementation=FORCED)
    agree(fast, step, PARAMS, X)


def test_layers_that_share_their_scale() -> None:
    """What all layers share meets the cotangents of all of them."""

    def loss(params, x):
        for p in params * 2:
            x = x + jnp.tanh(rms(x, params[0]["scale1"]) @ p["q"]) @ p["o"]
        return (x**2).mean()

    step = jax.value_and_grad(loss, argnums=(0, 1))
    report = rewriter.explain(step)(PARAMS, X)
    assert report.counts(backward=True)["rms_norm"] == 2 * LAYERS
    fast = rewriter.optimize(step, implementation=FORCED)
    agree(fast, step, PARAMS, X)


@pytest.mark.parametrize("after", [lambda y: y, jax.nn.relu], ids=["", "relu"])
@pytest.mark.parametrize("centred", [False, True])
def test_norm_of_one_row(centred: bool, after: Callable) -> None:
    """The gradient of the scale looks like a norm with the cotangent as its scale."""

    def loss(x, scale, bias, w):
        mean = x.mean(-1, keepdims=True) if centred else 0.0
        x = x - mean
        y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale
        return ((after(y + bias if centred else y) @ w) ** 2).mean()

    p = PARAMS[0]
    step = jax.value_and_grad(loss, (0, 1, 2, 3) if centred else (0, 1, 3))
    args = X[0, 0], p["scale1"], p["bias2"], p["q"]
    report = rewriter.explain(step)(*args)
    name = "layer_norm" if centred else "rms_norm"
    counts = report.counts(), report.counts(backward=True)
    assert [{k: v for k, v in c.items() if v} for c in counts] == [{name: 1}] * 2
    fast = rewriter.optimize(step, implementation=FORCED)
    agree(fast, step, *args)


def test_gradients_too_large_to_compare_are_a_reason(monkeypatch) -> None:
    """The forward is left alone, and the report says what was in the way."""

    def large(*args, **how):
        raise OverBudget("more than 9 terms")

    monkeypatch.setattr(search, "proved_gradients", large)
    q = jax.ShapeDtypeStruct((1, 2048, 4, 64), jnp.float32)
    step = jax.grad(lambda q: (attention(q, q, q) ** 2).sum())
    (site,) = rewriter.explain(step)(q).sites
    assert not site.replaced
    why = dict(site.not_chosen)["memory_bounded"]
    assert "too large to compare: more than 9 terms" in why


def test_scores_with_an_addend_of_each_head() -> None:
    """It cancels in the weights; the exponentials that gradients read have it."""

    def loss(weights, x, pairs):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, weights[w]) for w in "qkv")
        bias = (pairs @ weights["pairs"] + weights["heads"]).transpose(0, 3, 1, 2)
        s = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(8) + bias
        return jnp.sin(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)).sum()

    projections = {w: normal(D, N, 8, seed=i) * 0.2 for i, w in enumerate("qkv")}
    beside = {"pairs": normal(6, N, seed=4), "heads": normal(N, seed=5)}
    args = projections | beside, normal(2, T, D), normal(2, T, T, 6, seed=6)
    step = jax.value_and_grad(loss)
    assert rewriter.explain(step)(*args).counts(backward=True)["attention"] == 1
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    assert " exp " not in str(fast.jaxpr(*args))
    new, old = fast(*args), step(*args)
    for _, grads in (new, old):
        assert np.abs(grads.pop("heads")).max() < 1e-4
    equal(new, old, 1e-4)


def test_a_mask_that_is_laid_out_in_windows() -> None:
    """Shifted windows: regions of an image, cut as the image is."""

    def windows(x):
        x = x.reshape(2, 4, 2, 4, *x.shape[2:])
        return jnp.moveaxis(x, 2, 1).reshape(4, 16, *x.shape[4:])

    def loss(qkv, table, regions):
        q, k, v = jnp.moveaxis(windows(qkv).reshape(4, 16, 3, 2, 8), (2, 3), (0, 2))
        s = q / np.sqrt(8) @ k.swapaxes(-1, -2)
        s = s + table[np.arange(256) % 49].reshape(16, 16, 2).transpose(2, 0, 1)
        at = windows(regions)
        same = at[:, None, :] - at[:, :, None] == 0
        s = s + jnp.where(same, 0.0, -100.0)[:, None]
        return jnp.sin(jax.nn.softmax(s) @ v).sum()

    args = normal(8, 8, 48), normal(49, 2, seed=1), jnp.arange(64.0).reshape(8, 8) // 20
    step = jax.value_and_grad(loss, argnums=(0, 1))
    assert rewriter.explain(step)(*args).counts(backward=True)["attention"] == 1
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    agree(fast, step, *args, tolerance=1e-4)


@pytest.mark.parametrize("op", NORMS)
def test_two_norms_of_an_input_without_a_gradient(op: str) -> None:
    """The gradient of a scale does not say which scale it is of."""

    def norm(x, scale):
        centred = x - x.mean(-1, keepdims=True) if op == "layer_norm" else x
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale

    def loss(scales, x):
        a, b = (norm(x, s) for s in scales)
        return (a * jnp.sin(b)).sum()

    args = (normal(D, seed=1), normal(D, seed=2)), normal(8, D)
    step = jax.value_and_grad(loss)
    assert rewriter.explain(step)(*args).counts(backward=True)[op] == 2
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    agree(fast, step, *args, tolerance=1e-4)
