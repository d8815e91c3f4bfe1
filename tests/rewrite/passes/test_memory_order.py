"""Caches that lie otherwise than an op has them: what kernels are told of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter import _jax

BATCH, HEADS, KEYS, WIDTH, LAYERS = 2, 8, 1024, 64, 3
FORCED = {"attention": "hopper_decode"}


def shaped(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


Q, ONE = shaped(BATCH, HEADS, 1, WIDTH), shaped(BATCH, HEADS, 1, WIDTH)
CACHE = shaped(BATCH, HEADS, KEYS, WIDTH)
STACKED = shaped(LAYERS, BATCH, HEADS, KEYS, WIDTH)


def heads_first(q: Any, k: Any, v: Any) -> jax.Array:
    """Attention of [b, n, t, h]."""
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) * WIDTH**-0.5
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    return jnp.einsum("bnts,bnsh->bnth", weights, v)


def heads_last(q: Any, k: Any, v: Any) -> jax.Array:
    """Attention of [b, t, n, h]."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * WIDTH**-0.5
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def updated(q: Any, k: Any, v: Any, k_new: Any, v_new: Any, at: Any) -> Any:
    """A step that writes its key and value into the caches first."""
    k, v = (
        jax.lax.dynamic_update_slice_in_dim(cache, new, at, 2)
        for cache, new in ((k, k_new), (v, v_new))
    )
    return heads_first(q, k, v), k, v


def every_layer(q: Any, k: Any, v: Any) -> jax.Array:
    turn = lambda q, cache: (heads_first(q, *cache), None)
    return jax.lax.scan(turn, q, (k, v))[0]


def one_layer(q: Any, k: Any, v: Any) -> jax.Array:
    return heads_first(q, k[1], v[1])


def projected(x: Any, w_k: Any, w_v: Any) -> jax.Array:
    """Keys and values that are made here, in the order of heads last."""
    k, v = (
        (x @ w).reshape(BATCH, KEYS, HEADS, WIDTH).transpose(0, 2, 1, 3)
        for w in (w_k, w_v)
    )
    return heads_first(k[:, :, :1], k, v)


def transposed_by_hand(q: Any, k: Any, v: Any) -> jax.Array:
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    return heads_last(q.transpose(0, 2, 1, 3), k, v)


def found(
    fn: Callable[..., Any], *args: Any, forced: Any = FORCED
) -> list[tuple[str, ...]]:
    """What the kernel of each site is told, in order."""
    program = jax.make_jaxpr(rewriter.optimize(fn, implementation=forced))(*args)
    told = []

    def walk(body: Any) -> None:
        for eqn in body.eqns:
            if eqn.primitive.name == "rewriter_site":
                forward = eqn.params["use"].kernel("cuda").forward
                told.append(getattr(forward, "keywords", {}).get("swapped", ()))
            elif _jax.call_kind(eqn):
                walk(_jax.call_body(eqn))

    walk(program.jaxpr)
    return told


def test_many_queries_are_read_so_too() -> None:
    forced = {"attention": "hopper"}
    every = found(heads_first, CACHE, CACHE, CACHE, forced=forced)
    assert every == [("q", "k", "v")]
    some = lambda x, w, k, v: heads_first(
        (x @ w).reshape(BATCH, KEYS, HEADS, WIDTH).transpose(0, 2, 1, 3), k, v
    )
    assert found(some, WIDE, PROJECTION, CACHE, CACHE, forced=forced) == [("k", "v")]


AT = jax.ShapeDtypeStruct((), jnp.int32)
WIDE, PROJECTION = shaped(BATCH, KEYS, 256), shaped(256, HEADS * WIDTH)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (heads_first, (Q, CACHE, CACHE)),
        (transposed_by_hand, (Q, CACHE, CACHE)),
        (updated, (Q, CACHE, CACHE, ONE, ONE, AT)),
        (every_layer, (Q, STACKED, STACKED)),
        (one_layer, (Q, STACKED, STACKED)),
    ],
)
def test_caches_with_heads_first_are_read_as_they_lie(
    fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    assert found(fn, *args) == [("k", "v")]


def test_what_has_the_order_of_the_op_stays() -> None:
    cache = shaped(BATCH, KEYS, HEADS, WIDTH)
    assert found(heads_last, shaped(BATCH, 1, HEADS, WIDTH), cache, cache) == [()]


def test_what_is_made_here_may_lie_as_the_kernel_likes() -> None:
    assert found(projected, WIDE, PROJECTION, PROJECTION) == [()]


HIDDEN, TABLE = shaped(2048, 256), shaped(50257, 256)
LABELS = jax.ShapeDtypeStruct((2048,), jnp.int32)


def loss(x: Any, w: Any, labels: Any) -> jax.Array:
    logs = jax.nn.log_softmax((x @ w).astype(jnp.float32))
    return -jnp.take_along_axis(logs, labels[:, None], -1).mean()


def tied(x: Any, table: Any, labels: Any) -> jax.Array:
    return loss(x, table.T, labels)


@pytest.mark.parametrize(
    ("fn", "w", "lies"),
    [
        (tied, TABLE, ("w",)),
        (loss, shaped(256, 50257), ()),
        (lambda x, w, n: tied(x, jnp.sin(w), n), TABLE, ()),
    ],
)
def test_losses_read_a_table_of_embeddings_as_it_lies(
    fn: Callable[..., Any], w: Any, lies: tuple[str, ...]
) -> None:
    """Also where the loss and its gradients are one equation."""
    forced = {"linear_cross_entropy": ["hopper", "xla"]}
    with rewriter.config(target="h100", implementation=forced):
        for which in (fn, jax.value_and_grad(fn, (0, 1))):
            program = rewriter.optimize(which).jaxpr(HIDDEN, w, LABELS)
            (site,) = [e for e in program.eqns if "rewriter_site" in e.primitive.name]
            kernel = site.params["use"].kernel("cuda")
            for code in filter(None, (kernel.forward, kernel.together)):
                assert getattr(code, "keywords", {}).get("swapped", ()) == lies


def test_other_kernels_are_told_nothing() -> None:
    fn = rewriter.optimize(heads_first, implementation={"attention": "memory_bounded"})
    q, k, v = (
        jax.random.normal(jax.random.key(i), x.shape)
        for i, x in enumerate((Q, CACHE, CACHE))
    )
    gap = jnp.abs(fn(q, k, v) - heads_first(q, k, v)).max()
    assert gap < 1e-5


def test_transposes_stand_back_to_back() -> None:
    """So that XLA cancels them: no copy of the cache is left for a GPU."""
    fast = rewriter.optimize(heads_first, implementation=FORCED)
    text = jax.export.export(fast, platforms=["cuda"])(Q, CACHE, CACHE).mlir_module()
    kernel = next(line for line in text.splitlines() if "attention_decode" in line)
    order = f"{BATCH}x{HEADS}x{KEYS}x{WIDTH}xbf16"
    assert kernel.count(order) >= 2
