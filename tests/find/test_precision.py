"""A site multiplies as exactly as the program that it replaces."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from rewriter.errors import KernelError

pytestmark = pytest.mark.once

RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.normal(size=(1, 64, 2, 16)).astype(np.float32) for _ in range(3))
X, W, U = (
    RANDOM.normal(size=s).astype(np.float32) for s in ((32, 16), (16, 24), (16, 24))
)
FORCED = {"attention": "memory_bounded", "gated_linear_unit": "memory_bounded"}


def scores(q: Any, k: Any, precision: Any) -> Any:
    products = jnp.einsum("bthd,bshd->bhts", q, k, precision=precision) * 0.25
    keep = jnp.tril(jnp.ones(products.shape[-2:], bool))
    return jnp.where(keep, products, -1e30)


def attention(first: Any, second: Any) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(scores(q, k, first))
        return jnp.einsum("bhts,bshd->bthd", weights, v, precision=second)

    return run


def matmuls(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    weights = jax.nn.softmax(jnp.matmul(q, k.mT, precision="highest"))
    return jnp.matmul(weights, v, precision="highest").swapaxes(1, 2)


def in_a_context(q: Any, k: Any, v: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return attention(None, None)(q, k, v)


def mixed(q: Any, k: Any, v: Any) -> Any:
    return attention("highest", "highest")(q, k.astype("bfloat16"), v)


def chunked(q: Any, k: Any, v: Any) -> Any:
    """Attention with running sums over blocks of keys."""
    b, t, n, d = q.shape
    blocks = [x.reshape(b, 4, 16, n, d).swapaxes(0, 1) for x in (k, v)]

    def step(carry: Any, block: Any) -> Any:
        top, total, out = carry
        s = jnp.einsum("bthd,bshd->bhts", q, block[0], precision="highest")
        new = jnp.maximum(top, s.max(-1))
        p, old = jnp.exp(s - new[..., None]), jnp.exp(top - new)
        more = jnp.einsum("bhts,bshd->bhtd", p, block[1], precision="highest")
        return (new, total * old + p.sum(-1), out * old[..., None] + more), None

    zero = jnp.zeros((b, n, t))
    first = (zero - jnp.inf, zero, jnp.zeros((b, n, t, d)))
    (_, total, out), _ = lax.scan(step, first, tuple(blocks))
    return (out / total[..., None]).swapaxes(1, 2)


def per_operand(q: Any, k: Any, v: Any) -> Any:
    pair = (lax.Precision.DEFAULT, lax.Precision.HIGHEST)
    return attention(pair, pair)(q, k, v)


ATTENTION: dict[str, tuple[Callable[..., Any], str | None]] = {
    "default": (attention(None, None), None),
    "default by name": (attention("default", "default"), None),
    "high": (attention("high", "high"), "high"),
    "highest": (attention("highest", "highest"), "highest"),
    "highest scores": (attention("highest", None), "highest"),
    "highest weights": (attention(None, "highest"), "highest"),
    "high and highest": (attention("high", "highest"), "highest"),
    "one operand": (per_operand, "highest"),
    "matmul": (matmuls, "highest"),
    "context": (in_a_context, "highest"),
    "mixed": (mixed, "highest"),
    "chunks": (chunked, "highest"),
    "under jit": (jax.jit(attention("highest", "highest")), "highest"),
    "under checkpoint": (jax.checkpoint(attention("highest", "highest")), "highest"),
}


def of_products(fn: Callable[..., Any], *given: Any) -> set[str]:
    """The precisions of the products in a lowered program."""
    text = jax.jit(fn).lower(*given).as_text()
    lines = [line for line in text.splitlines() if "dot_general" in line]
    named = [re.search(r"precision = \[(\w+)", line) for line in lines]
    return {"none" if n is None else n.group(1).lower() for n in named}


def grads(fn: Callable[..., Any], count: int = 3) -> Callable[..., Any]:
    return jax.grad(lambda *given: fn(*given).sum(), tuple(range(count)))


def optimized(fn: Callable[..., Any]) -> Callable[..., Any]:
    return rewriter.optimize(fn, implementation=FORCED)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    fn, want = ATTENTION[name]
    (site,) = rewriter.explain(fn)(Q, K, V).sites
    assert site.params.get("precision") == want
    assert of_products(optimized(fn), Q, K, V) == {want or "default"}


@pytest.mark.parametrize("name", ["default", "high and highest", "under checkpoint"])
def test_gradients(name: str) -> None:
    fn, want = ATTENTION[name]
    for differentiated in (grads(optimized(fn)), optimized(grads(fn))):
        assert of_products(differentiated, Q, K, V) == {want or "default"}


def test_gradients_that_are_products_at_a_higher_precision_stay() -> None:
    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any) -> Any:
        return attention(None, None)(q, k, v)

    def backward(saved: Any, up: Any) -> Any:
        return jax.vjp(attention("highest", "highest"), *saved)[1](up)

    attend.defvjp(lambda *given: (attend(*given), given), backward)
    assert "highest" in of_products(optimized(grads(attend)), Q, K, V)
    sites = rewriter.explain(grads(attend))(Q, K, V).sites
    assert {s.params.get("precision") for s in sites if s.backward} == {"highest"}


def test_16_bits_are_exact_at_every_precision() -> None:
    given = [jnp.asarray(x, jnp.bfloat16) for x in (Q, K, V)]
    (site,) = rewriter.explain(attention("highest", "highest"))(*given).sites
    assert "precision" not in site.params


def test_a_context_around_the_call_counts() -> None:
    fast = optimized(attention(None, None))
    assert of_products(fast, Q, K, V) == {"default"}
    with jax.default_matmul_precision("highest"):
        assert of_products(fast, Q, K, V) == {"highest"}
    assert of_products(fast, Q, K, V) == {"default"}


def unit(gate: Any, up: Any) -> Callable[..., Any]:
    def run(x: Any, w: Any, u: Any) -> Any:
        inner = jnp.dot(x, w, precision=gate)
        return jax.nn.silu(inner) * jnp.dot(x, u, precision=up)

    return run


@pytest.mark.parametrize(
    ("gate", "up", "want"),
    [
        (None, None, None), ("high", None, "high"), ("highest", "highest", "highest"),
        (None, "highest", "highest"),
    ],
)  # fmt: skip
def test_gated_linear_unit(gate: Any, up: Any, want: str | None) -> None:
    fn = unit(gate, up)
    (site,) = rewriter.explain(fn)(X, W, U).sites
    assert site.params.get("precision") == want
    assert of_products(optimized(fn), X, W, U) == {want or "default"}
    assert of_products(grads(optimized(fn)), X, W, U) == {want or "default"}


def test_ragged_dots() -> None:
    def run(x: Any, w: Any, u: Any, sizes: Any) -> Any:
        first = lax.ragged_dot(x, w, sizes, precision="highest")
        return first, lax.ragged_dot(x, u, sizes)

    given = X, np.stack([W, W]), np.stack([U, U]), np.array([20, 12], np.int32)
    sites = rewriter.explain(run)(*given).sites
    assert [site.params.get("precision") for site in sites] == ["highest", None]


def test_loss_over_a_vocabulary() -> None:
    labels = np.arange(32, dtype=np.int32) % 24

    def run(x: Any, w: Any) -> Any:
        logits = jnp.dot(x, w, precision="highest")
        return -jnp.take_along_axis(
            jax.nn.log_softmax(logits), labels[:, None], 1
        ).mean()

    (site,) = rewriter.explain(run)(X, W).sites
    assert site.op == "linear_cross_entropy"
    assert site.params["precision"] == "highest"


@rewriter.pattern(dims="x: m k, w: k n -> m n")
def squared(x, w):
    return jnp.square(jnp.dot(x, w))


@squared.kernel()
def by_product(x, w):
    return jnp.dot(x, w) ** 2


@squared.kernel()
def by_exact_product(x, w, *, precision=None):
    return jnp.dot(x, w, precision=precision) ** 2


def test_patterns_of_users() -> None:
    """A kernel that does not take the precision is not for programs that ask for it."""

    def run(x: Any, w: Any) -> Any:
        return jnp.square(jnp.dot(x, w, precision="highest"))

    def forced(name: str) -> Any:
        return rewriter.optimize(
            run, patterns=[squared], implementation={"squared": name}
        )

    fast = forced("by_exact_product")
    (site,) = fast.report(X, W).sites
    assert site.params["precision"] == "highest"
    assert of_products(fast, X, W) == {"highest"}
    with pytest.raises(KernelError, match="does not take precision"):
        forced("by_product")(X, W)


def test_an_algorithm_is_kept() -> None:
    fn = attention("TF32_TF32_F32", "TF32_TF32_F32")
    (site,) = rewriter.explain(fn)(Q, K, V).sites
    assert site.params["precision"] == "TF32_TF32_F32"
    fn = attention("TF32_TF32_F32", "highest")
    (site,) = rewriter.explain(fn)(Q, K, V).sites
    assert site.params["precision"] == "highest"


@pytest.mark.gpu
def test_digits_on_a_gpu() -> None:
    """The default keeps 11 digits of a product of float32; the highest all 24."""
    q, k, v = (np.tile(x, (1, 4, 1, 4)) for x in (Q, K, V))
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v)]
        want = np.asarray(attention("highest", "highest")(*wide))
    got = optimized(attention("highest", "highest"))(q, k, v)
    assert np.abs(np.asarray(got) - want).max() < 2e-5
