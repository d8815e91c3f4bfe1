"""Queries, keys and values of one product: what kernels are told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import rewriter
from rewriter import _jax
from rewriter.ops.kernel import Heads
from rewriter.ops.registry import registry
from rewriter.rewrite.passes.joined_gradients import join_gradients
from rewriter.site import packed, site

B, T, N, M, H, D = 2, 16, 4, 2, 8, 32
"""Batch, positions, heads, heads of keys, their width, and the model's."""

HOPPER = {"attention": "hopper"}
X = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)


def weights(count: int) -> jax.ShapeDtypeStruct:
    """Those of a product that gives some heads."""
    return jax.ShapeDtypeStruct((D, count * H), jnp.bfloat16)


def attention(q: Any, k: Any, v: Any) -> jax.Array:
    """Of [b, t, n, h]."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    seen = jnp.tril(jnp.ones((T, T), bool))
    scores = jnp.where(seen, scores.astype(jnp.float32), -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores).astype(v.dtype), v)


def heads_first(q: Any, k: Any, v: Any) -> jax.Array:
    """Of [b, n, t, h]."""
    return attention(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)))


def heads(x: Any) -> Any:
    return x.reshape(B, T, -1, H)


def split_in_three(x: Any, w: Any) -> Any:
    return attention(*map(heads, jnp.split(x @ w, 3, -1)))


def sliced(x: Any, w: Any) -> Any:
    qkv = x @ w
    n = N * H
    return attention(heads(qkv[..., :n]), heads(qkv[..., n : 2 * n]),
                     heads(qkv[..., 2 * n :]))  # fmt: skip


def indexed(x: Any, w: Any) -> Any:
    qkv = (x @ w).reshape(B, T, 3, N, H)
    return attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])


def unstacked(x: Any, w: Any) -> Any:
    return attention(*jnp.unstack((x @ w).reshape(B, T, 3, N, H), axis=2))


def unpacked_after_transposing(x: Any, w: Any) -> Any:
    q, k, v = (x @ w).reshape(B, T, 3, N, H).transpose(2, 0, 3, 1, 4)
    return heads_first(q, k, v)


def flattened_rows(x: Any, w: Any) -> Any:
    qkv = (x.reshape(B * T, D) @ w).reshape(B, T, 3, N, H)
    return attention(*(qkv[:, :, i] for i in range(3)))


def with_bias(x: Any, w: Any) -> Any:
    return attention(*map(heads, jnp.split(x @ w + w[0], 3, -1)))


def with_a_name(x: Any, w: Any) -> Any:
    made = jax.ad_checkpoint.checkpoint_name(x @ w, "qkv")
    return attention(*map(heads, jnp.split(made, 3, -1)))


def by_einsum(x: Any, w: Any) -> Any:
    qkv = jnp.einsum("btd,dcnh->btcnh", x, w.reshape(D, 3, N, H))
    return attention(*(qkv[:, :, i] for i in range(3)))


def head_by_head(x: Any, w: Any) -> Any:
    return attention(*jnp.split((x @ w).reshape(B, T, N, 3 * H), 3, -1))


def every_third_head(x: Any, w: Any) -> Any:
    qkv = heads(x @ w)
    return attention(qkv[:, :, ::3], qkv[:, :, 1::3], qkv[:, :, 2::3])


def grouped(x: Any, w: Any) -> Any:
    parts = jnp.split(heads(x @ w), [N, N + M], 2)
    return attention(*parts)


def keys_in_one(x: Any, w: Any) -> Any:
    q = heads(x @ w[:, : N * H])
    k, v = jnp.split(heads(x @ w[:, N * H :]), 2, 2)
    return attention(q, k, v)


def checkpointed(x: Any, w: Any) -> Any:
    return jax.checkpoint(split_in_three)(x, w)


def layers(x: Any, w: Any) -> Any:
    def layer(x: Any, _: None) -> Any:
        return split_in_three(x, w).reshape(B, T, D), None

    return jax.lax.scan(layer, x, None, length=2)[0]


THIRDS = tuple(Heads(i * N, 1, N, 3 * N) for i in range(3))
EVERY_THIRD = tuple(Heads(i, 3, N, 3 * N) for i in range(3))
IN_ONE = (None, Heads(0, 1, M, 2 * M), Heads(M, 1, M, 2 * M))
GROUPED = (
    Heads(0, 1, N, N + 2 * M), Heads(N, 1, M, N + 2 * M), Heads(N + M, 1, M, N + 2 * M)
)  # fmt: skip

SPELLINGS: dict[Callable[..., Any], tuple[int, tuple[Heads | None, ...]]] = {
    split_in_three: (3 * N, THIRDS),
    sliced: (3 * N, THIRDS),
    indexed: (3 * N, THIRDS),
    unstacked: (3 * N, THIRDS),
    unpacked_after_transposing: (3 * N, THIRDS),
    flattened_rows: (3 * N, THIRDS),
    with_bias: (3 * N, THIRDS),
    with_a_name: (3 * N, THIRDS),
    by_einsum: (3 * N, THIRDS),
    head_by_head: (3 * N, EVERY_THIRD),
    every_third_head: (3 * N, EVERY_THIRD),
    grouped: (N + 2 * M, GROUPED),
    keys_in_one: (N + 2 * M, IN_ONE),
    checkpointed: (3 * N, THIRDS),
    layers: (3 * N, THIRDS),
}


def read(program: Any) -> Iterator[tuple[str, dict[str, Heads]]]:
    """Each site that reads packed operands, and their heads, at any depth."""
    body = getattr(program, "jaxpr", program)
    for eqn in body.eqns:
        if eqn.params.get("parts"):
            yield eqn.primitive.name, {n: at for n, _, at in eqn.params["parts"]}
        elif _jax.call_kind(eqn):
            yield from read(_jax.call_body(eqn))


def written(program: Any) -> Iterator[dict[str, Heads]]:
    """The heads of the gradients that are written into one array, at any depth."""
    body = getattr(program, "jaxpr", program)
    for eqn in body.eqns:
        if eqn.params.get("joined"):
            yield dict(eqn.params["joined"])
        elif _jax.call_kind(eqn):
            yield from written(_jax.call_body(eqn))


def drawn(*shapes: Any) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        (0.3 * jax.random.normal(k, s.shape)).astype(s.dtype)
        for k, s in zip(keys, shapes, strict=True)
    ]


@pytest.mark.parametrize("fn", SPELLINGS, ids=lambda fn: fn.__name__)
def test_parts_of_one_product_are_read_in_place(fn: Callable[..., Any]) -> None:
    """Forward and in gradients: the same heads, and the same numbers."""
    count, places = SPELLINGS[fn]
    want = {n: at for n, at in zip("qkv", places, strict=True) if at}
    args = X, weights(count)
    loss = lambda x, w: fn(x, w).astype(jnp.float32).sum()
    fast = rewriter.optimize(jax.grad(loss, (0, 1)), implementation=HOPPER)
    found = list(read(fast.jaxpr(*args)))
    names = [name for name, _ in found]
    assert names.count("rewriter_site_backward") == 1 or fn is layers
    assert found
    assert all(at == want for _, at in found)
    assert list(written(fast.jaxpr(*args))) == [want]
    given = drawn(*args)
    for x, y in zip(fast(*given), jax.grad(loss, (0, 1))(*given), strict=True):
        gap = jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)).max()
        assert gap <= 0.02 * jnp.abs(y.astype(jnp.float32)).max()


@pytest.mark.parametrize(
    "fn", [unpacked_after_transposing, head_by_head, grouped], ids=lambda f: f.__name__
)
def test_the_heads_named_are_the_operands(fn: Callable[..., Any]) -> None:
    args = X, weights(SPELLINGS[fn][0])
    program = rewriter.optimize(fn, implementation=HOPPER).jaxpr(*args)
    (at,) = [i for i, e in enumerate(program.eqns) if e.primitive in packed.OF.values()]
    site = program.eqns[at]
    names, parts = site.params["use"].names, site.params["parts"]
    every = site.invars
    before = _jax.with_equations(program, program.eqns[:at], every)
    values = jaxpr_as_fun(before)(*drawn(*args))
    operands = dict(zip(names, values[: len(names)], strict=True))
    for name, number, place in parts:
        array = values[len(names) + number].reshape(B, T, place.all, H)
        np.testing.assert_array_equal(array[:, :, place.indices], operands[name])


def rotated(x: Any, w: Any) -> Any:
    """q and k are computed from parts: only v lies in the product."""
    q, k, v = map(heads, jnp.split(x @ w, 3, -1))
    return attention(jnp.sin(q), jnp.cos(k), v)


def left_out(x: Any, w: Any) -> Any:
    """A part that attention does not read."""
    q, k, v, _ = map(heads, jnp.split(x @ w, 4, -1))
    return attention(q, k, v)


def from_later_positions(x: Any, w: Any) -> Any:
    """Positions of one array are no heads of the same positions."""
    both = jnp.concatenate([x @ w, x @ w], 1).reshape(B, 2 * T, N, H)
    return attention(both[:, :T], both[:, T:], both[:, T:])


def thirds_first(x: Any, w: Any) -> Any:
    """Each part is a whole array already."""
    qkv = jnp.einsum("btd,dcnh->cbtnh", x, w.reshape(D, 3, N, H))
    return attention(*qkv)


def reversed_heads(x: Any, w: Any) -> Any:
    return attention(*(heads(p)[:, :, ::-1] for p in jnp.split(x @ w, 3, -1)))


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (rotated, 3 * N), (left_out, 4 * N), (from_later_positions, N),
        (thirds_first, 3 * N), (reversed_heads, 3 * N),
    ],
)  # fmt: skip
def test_other_operands_are_copied(fn: Callable[..., Any], count: int) -> None:
    fast = rewriter.optimize(fn, implementation=HOPPER)
    assert fast.report(X, weights(count)).counts()["attention"] == 1
    assert not list(read(fast.jaxpr(X, weights(count))))


def test_a_kernel_that_reads_none_is_told_nothing() -> None:
    fast = rewriter.optimize(
        split_in_three, implementation={"attention": "memory_bounded"}
    )
    assert not list(read(fast.jaxpr(X, weights(3 * N))))


def test_it_can_be_left_out() -> None:
    fast = rewriter.optimize(
        split_in_three, implementation=HOPPER, disable=("packed_operands",)
    )
    assert not list(read(fast.jaxpr(X, weights(3 * N))))


@pytest.mark.parametrize(
    "fn", [split_in_three, keys_in_one, checkpointed, layers], ids=lambda f: f.__name__
)
def test_derivatives_of_sites_read_and_write_in_place(fn: Callable[..., Any]) -> None:
    """In the gradient of what is optimized, the array's is that of its parts."""
    count, places = SPELLINGS[fn]
    want = {n: at for n, at in zip("qkv", places, strict=True) if at}
    args = X, weights(count)
    fast = rewriter.optimize(fn, implementation=HOPPER)
    loss, own = (
        lambda x, w, f=f: jnp.square(f(x, w).astype(jnp.float32)).sum()
        for f in (fn, fast)
    )
    program = jax.make_jaxpr(jax.grad(own, (0, 1)))(*args)
    assert list(written(program)) == [want]
    assert all(at == want for _, at in read(program))
    given = drawn(*args)
    for x, y in zip(
        jax.grad(own, (0, 1))(*given), jax.grad(loss, (0, 1))(*given), strict=True
    ):
        gap = jnp.linalg.norm((x.astype(jnp.float32) - y.astype(jnp.float32)).ravel())
        assert gap <= 0.02 * jnp.linalg.norm(y.astype(jnp.float32).ravel())


def test_it_can_be_transformed() -> None:
    """Under vmap, in both modes and twice, it is the site of separate operands."""
    x, w = drawn(X, weights(3 * N))
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    fast = rewriter.optimize(split_in_three, implementation=HOPPER)
    assert list(read(fast.jaxpr(X, weights(3 * N))))
    wide = lambda f: lambda x: f(x.astype("bfloat16"), w.astype("bfloat16"))
    own, plain = (lambda x, f=f: wide(f)(x).astype("float32").sum() for f in (
        fast, split_in_three))  # fmt: skip
    for change, given in (
        (jax.vmap, jnp.stack([x, 2 * x])),
        (jax.grad, x),
        (lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()), x),
        (lambda f: jax.vmap(jax.grad(f)), jnp.stack([x, 2 * x])),
    ):
        got, want = change(own)(given), change(plain)(given)
        assert jnp.abs(got - want).max() <= 0.05 * jnp.abs(want).max()
    _, along = jax.jvp(own, (x,), (x,))
    _, wanted = jax.jvp(plain, (x,), (x,))
    assert jnp.abs(along - wanted) <= 0.05 * jnp.abs(wanted) + 0.05


def beside_another_use(x: Any, w: Any) -> Any:
    """Queries have a gradient from elsewhere too."""
    q, k, v = map(heads, jnp.split(x @ w, 3, -1))
    return attention(q, k, v) + q


def scaled_later(x: Any, w: Any) -> Any:
    """The gradient of values is doubled before it is put beside the others."""
    q, k, v = map(heads, jnp.split(x @ w, 3, -1))
    return attention(q, k, 2 * v)


def of_parts_that_overlap(x: Any, w: Any) -> Any:
    """Keys are values too."""
    q, k = map(heads, jnp.split(x @ w, 2, -1))
    return attention(q, k, k)


def of_three_products(x: Any, w: Any) -> Any:
    return attention(*(heads(x @ part) for part in jnp.split(w, 3, -1)))


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (beside_another_use, 3 * N), (scaled_later, 3 * N), (left_out, 4 * N),
        (of_parts_that_overlap, 2 * N), (of_three_products, 3 * N),
        (from_later_positions, N),
    ],
)  # fmt: skip
def test_gradients_that_are_read_elsewhere_stay_apart(
    fn: Callable[..., Any], count: int
) -> None:
    loss = lambda x, w: jnp.square(fn(x, w).astype(jnp.float32)).sum()
    fast = rewriter.optimize(jax.grad(loss, (0, 1)), implementation=HOPPER)
    program = fast.jaxpr(X, weights(count))
    assert "rewriter_site_backward" in str(program)
    assert not list(written(program))


@pytest.mark.parametrize(
    ("put_together", "joined"),
    [
        (lambda q, k, v: jnp.concatenate([q, k, v], 2), THIRDS),
        (lambda q, k, v: jnp.concatenate([q, k, v], 3), EVERY_THIRD),
        (lambda q, k, v: jnp.stack([q, k, v], 3), EVERY_THIRD),
        (lambda q, k, v: jnp.concatenate([q.reshape(B * T, -1) for q in (q, k, v)], 1),
         THIRDS),
        (lambda q, k, v: jnp.concatenate([q, k, v, q], 2), None),
        (lambda q, k, v: (jnp.concatenate([q, k, v], 2), q), None),
        (lambda q, k, v: jnp.concatenate([q, k, jnp.sin(v)], 2), None),
        (lambda q, k, v: jnp.concatenate([q, k, v], 1), None),
        (lambda q, k, v: jnp.concatenate([q, k, v], 0), None),
        (lambda q, k, v: jnp.concatenate([q, k, v[:, ::-1]], 2), None),
        (lambda q, k, v: jnp.concatenate([q, k, jnp.zeros_like(v)], 2), None),
        (lambda q, k, v: q + k + v, None),
        (lambda q, k, v: jnp.pad(q, [(0, 0), (0, 0), (0, N), (0, 0)])
         + jnp.pad(k, [(0, 0), (0, 0), (N - 1, 1), (0, 0)]), None),
    ],
)  # fmt: skip
def test_what_is_put_together(put_together: Any, joined: Any) -> None:
    """Arrays of all heads of three gradients, and of nothing else."""

    def fn(q: Any, k: Any, v: Any, up: Any) -> Any:
        kernels = (("cuda", "hopper"),)
        op = registry().op("attention")
        of = lambda *x: site.bind(op, dict(zip("qkv", x, strict=True)), {}, kernels)
        return put_together(*jax.vjp(of, q, k, v)[1](up))

    x = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    before = jax.make_jaxpr(fn)(x, x, x, x)
    after = join_gradients(before)
    want = [] if joined is None else [dict(zip("qkv", joined, strict=True))]
    assert list(written(after)) == want
    assert (after is before) == (joined is None)
    given = drawn(x, x, x, x)
    for got, wanted in zip(
        jaxpr_as_fun(after)(*given), jaxpr_as_fun(before)(*given), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("passes", ["forward", "gradient"])
def test_it_is_lowered_for_gpus(passes: str) -> None:
    """The kernel's operand is the product itself."""
    loss = lambda x, w: split_in_three(x, w).astype(jnp.float32).sum()
    fn = split_in_three if passes == "forward" else jax.grad(loss)
    fast = rewriter.optimize(fn, implementation=HOPPER, strict=True)
    lowered = fast.trace(X, weights(3 * N)).lower(lowering_platforms=("cuda",))
    calls = [x for x in lowered.as_text().splitlines() if "mosaic_gpu" in x]
    assert calls
    whole = f"tensor<{B}x{T}x{3 * N}x{H}xbf16>"
    assert all(whole in x for x in calls)
    if jax.__version_info__ >= (0, 11):  # kernels may change what they are given
        assert [x.endswith(f"-> {whole}") for x in calls[1:]] == [True] * len(calls[1:])


@pytest.mark.parametrize("number", [jnp.inf, jnp.nan, 1e4])
def test_the_same_entries_stay_finite(number: float) -> None:
    x, w = drawn(X, weights(3 * N))
    x = x.at[1, 5, 1].set(number)
    loss = lambda x, w: jnp.square(split_in_three(x, w).astype(jnp.float32)).sum()
    fast = rewriter.optimize(jax.grad(loss, (0, 1)), implementation=HOPPER)
    assert list(read(fast.jaxpr(x, w)))
    for got, want in zip(fast(x, w), jax.grad(loss, (0, 1))(x, w), strict=True):
        np.testing.assert_array_equal(jnp.isfinite(got), jnp.isfinite(want))


def test_parts_on_each_device_are_read_in_place() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.sharding.PartitionSpec("x")
    every = jax.sharding.PartitionSpec()
    fn = jax.shard_map(
        split_in_three, mesh=mesh, in_specs=(part, every), out_specs=part
    )
    fast = rewriter.optimize(fn, implementation=HOPPER)
    assert len(list(read(fast.jaxpr(X, weights(3 * N))))) == 1
    given = drawn(X, weights(3 * N))
    gap = jnp.abs(fast(*given).astype(jnp.float32) - fn(*given).astype(jnp.float32))
    assert gap.max() <= 0.02
