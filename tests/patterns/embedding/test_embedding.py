"""Sums of rows by their ids in programs: how they are written, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests import slow

B, T, V, D = 2, 6, 9, 4
KERNELS = {"embedding": ["counted", "in_float32"]}
LOOKUPS = {"embedding_lookup": ["counted", "in_float32"]}
RNG = np.random.default_rng(5)
TABLE = RNG.normal(size=(V, D)).astype(np.float32)
IDS = RNG.integers(0, V, (B, T)).astype(np.int32)
ODD = np.array([[0, -1, 8, 9, 3, 3], [-9, -10, 100, 3, 5, 0]], np.int32)
WEIGHTS = RNG.normal(size=(B, T, D)).astype(np.float32)
NARROW = jnp.bfloat16


@dataclass(frozen=True)
class Spelling:
    """A program of a table [v, d], ids and weights, which holds a sum of rows.

    Attributes:
        fn: The program; a lookup [b, t, d] unless `plain`.
        ids: Its ids.
        plain: Whether it is the sum itself, and not differentiated.
        params: What is read off it, but for the size.
        count: How many sums it holds.
    """

    fn: Callable[..., Any]
    ids: np.ndarray = field(default_factory=lambda: ODD)
    plain: bool = False
    params: dict[str, Any] = field(default_factory=dict)
    count: int = 1

    @property
    def program(self) -> Callable[..., Any]:
        """The sum of rows, of a table, ids and weights."""
        if self.plain:
            return self.fn

        def loss(table: jax.Array, ids: jax.Array, w: jax.Array) -> jax.Array:
            rows = self.fn(table, ids)
            return (jnp.nan_to_num(rows) * w[: len(rows)]).sum()

        return jax.grad(loss)


def _scanned(t: jax.Array, ids: jax.Array) -> jax.Array:
    return lax.scan(lambda c, i: (c, jnp.tanh(t[i])), 0, ids)[1]


@jax.custom_vjp
def _with_rule(t: jax.Array, ids: jax.Array) -> jax.Array:
    return t[ids]


_with_rule.defvjp(
    lambda t, ids: (t[ids], ids),
    lambda ids, ct: (jnp.zeros((V, D), ct.dtype).at[ids].add(ct), None),
)


def _haiku(t: jax.Array, ids: jax.Array) -> jax.Array:
    net = hk.without_apply_rng(hk.transform(lambda i: hk.Embed(V, D)(i)))
    return net.apply({"embed": {"embeddings": t}}, ids)


def _equinox(t: jax.Array, ids: jax.Array) -> jax.Array:
    return jax.vmap(jax.vmap(eqx.nn.Embedding(weight=t)))(ids)


def _flax(t: jax.Array, ids: jax.Array) -> jax.Array:
    return nn.Embed(V, D, dtype=t.dtype).apply({"params": {"embedding": t}}, ids)


def _combined(t: jax.Array, ids: jax.Array, w: jax.Array) -> jax.Array:
    rows, gates = w.reshape(B * T, D), jnp.abs(w[..., :1]).reshape(B * T, 1)
    return jnp.zeros_like(t).at[ids.reshape(-1)].add(rows * gates)


def _messages(t: jax.Array, ids: jax.Array, w: jax.Array) -> jax.Array:
    sent = t[ids[0]] * w[0]
    return jax.ops.segment_sum(sent, ids[1], num_segments=V)


def _positions(t: jax.Array, ids: jax.Array) -> jax.Array:
    return t[jnp.broadcast_to(jnp.arange(T), ids.shape)]


def _first_axis(t: jax.Array, ids: jax.Array) -> jax.Array:
    return t[jnp.broadcast_to(jnp.arange(T)[:, None], (T, B))].transpose(1, 0, 2)


CLIP = {"outside": "clip"}
PROMISE = {"outside": "promise"}
"""Of the gradient of a lookup that says so, as `t[i]` does."""
FIRST = {"start": 0, "period": T}
SPELLINGS = {
    "index": Spelling(lambda t, i: t[i]),
    "take": Spelling(lambda t, i: jnp.take(t, i, axis=0)),
    "take_clip": Spelling(lambda t, i: jnp.take(t, i, 0, mode="clip"), params=CLIP),
    "take_fill": Spelling(lambda t, i: jnp.take(t, i, axis=0, mode="fill")),
    "take_wrap": Spelling(lambda t, i: jnp.take(t, i, axis=0, mode="wrap")),
    "promise": Spelling(lambda t, i: t.at[i].get(mode="promise_in_bounds"), IDS),
    "zero": Spelling(lambda t, i: t.at[i].get(mode="fill", fill_value=0)),
    "take_along": Spelling(
        lambda t, i: jnp.take_along_axis(t, i.reshape(-1, 1), 0).reshape(B, T, D)
    ),
    "other_axis": Spelling(lambda t, i: jnp.take(t.T, i, 1).transpose(1, 2, 0)),
    "flat_ids": Spelling(lambda t, i: t[i.reshape(-1)].reshape(B, T, D)),
    "more_axes": Spelling(lambda t, i: t[i.reshape(B, 2, 1, 3)].reshape(B, T, D)),
    "wide_rows": Spelling(lambda t, i: t.reshape(V, 2, 2)[i].reshape(B, T, D)),
    "small_ids": Spelling(lambda t, i: t[i], IDS.astype(np.uint8)),
    "offset": Spelling(lambda t, i: jnp.take(t, i + 1, axis=0)),
    "slices": Spelling(
        lambda t, i: jax.vmap(
            jax.vmap(lambda k: lax.dynamic_index_in_dim(t, k, keepdims=False))
        )(i),
        params=CLIP,
    ),
    "flax": Spelling(_flax),
    "haiku": Spelling(_haiku),
    "equinox": Spelling(_equinox, params=CLIP),
    "counted_slices": Spelling(
        lambda t, i: jnp.tile(
            jax.vmap(lambda k: lax.dynamic_index_in_dim(t, k, keepdims=False))(
                jnp.arange(T)
            )[None],
            (B, 1, 1),
        ),
        params=FIRST,
    ),
    "vmap": Spelling(jax.vmap(lambda t, i: t[i], (None, 0))),
    "jit": Spelling(jax.jit(lambda t, i: jnp.tanh(t[i]))),
    "checkpoint": Spelling(jax.checkpoint(lambda t, i: jnp.tanh(t[i]))),
    "rule": Spelling(_with_rule),
    "scan": Spelling(_scanned, count=B),
    "cond": Spelling(
        lambda t, i: lax.cond(i[0, 0] < 9, lambda: t[i], lambda: 2 * t[i[::-1]]),
        count=2,
    ),
    "twice": Spelling(lambda t, i: t[i] + t[i[::-1] + 1], count=2),
    "tied": Spelling(lambda t, i: (t[i] @ t.T) @ t),
    "segment_sum": Spelling(
        lambda t, i, w: jax.ops.segment_sum(w[0], i[0], num_segments=V), plain=True
    ),
    "onto_zeros": Spelling(
        lambda t, i, w: jnp.zeros_like(t).at[i].add(w, mode="drop"), plain=True
    ),
    "onto_table": Spelling(lambda t, i, w: t.at[i].add(w), plain=True),
    "onto_columns": Spelling(
        lambda t, i, w: t.T.at[:, i].add(w.transpose(2, 0, 1), mode="clip"),
        plain=True, params=CLIP,
    ),
    "experts": Spelling(_combined, plain=True),
    "messages": Spelling(_messages, plain=True),
    "many_tables": Spelling(
        jax.vmap(lambda t, i, w: jnp.zeros_like(t).at[i].add(w), (None, 0, 0)),
        plain=True,
    ),
    "positions": Spelling(_positions, params=FIRST),
    "positions_of_rows": Spelling(_first_axis, params=FIRST),
    "later_positions": Spelling(
        lambda t, i: t[jnp.tile(jnp.arange(2, T + 2), (B, 1))],
        params={"start": 2, "period": T},
    ),
    "zeros": Spelling(
        lambda t, i: jnp.take(t, jnp.zeros_like(i), 0, mode="clip"),
        params={"start": 0, "period": 1},
    ),
}  # fmt: skip


FEW = (
    "index", "take_clip", "take_fill", "other_axis", "wide_rows", "slices", "scan",
    "twice", "onto_table", "onto_columns", "many_tables", "positions_of_rows", "zeros",
)  # fmt: skip
"""Spellings that are compared with float64 by default; with ``-m slow``, all."""


def _args(spelling: Spelling, dtype: Any) -> tuple[jax.Array, ...]:
    return (
        jnp.asarray(TABLE, dtype),
        jnp.asarray(spelling.ids),
        jnp.asarray(WEIGHTS, dtype),
    )


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    spelling = SPELLINGS[name]
    fast = rewriter.optimize(spelling.program, implementation=KERNELS)
    report = fast.report(*_args(spelling, NARROW))
    assert report.counts(replaced=True)["embedding"] == spelling.count, report
    for site in (s for s in report.sites if s.op == "embedding"):
        wanted = {"size": V, **spelling.params}
        assert dict(site.params) in (wanted, {**wanted, **PROMISE})
        assert site.kernel == (
            "counted" if "period" in spelling.params else "in_float32"
        )


@pytest.mark.once
@pytest.mark.parametrize("dtype", slow.first(1, [NARROW, jnp.float32]))
def test_spellings_are_as_near_to_float64(dtype: Any) -> None:
    names = FEW if dtype == NARROW else SPELLINGS

    def all_of(wrap: Callable[..., Any], dtype: Any) -> dict[str, jax.Array]:
        arrays = {name: _args(SPELLINGS[name], dtype) for name in names}
        return jax.jit(
            lambda given: {n: wrap(SPELLINGS[n].program)(*x) for n, x in given.items()}
        )(arrays)

    fast = lambda fn: rewriter.optimize(fn, implementation=KERNELS)
    got, own = all_of(fast, dtype), all_of(lambda fn: fn, dtype)
    with jax.enable_x64(True):
        true = all_of(lambda fn: fn, jnp.float64)
    for name, exact in true.items():
        exact, scale = np.asarray(exact), np.abs(exact).max()
        error = lambda x, exact=exact: np.abs(np.asarray(x, np.float64) - exact).max()
        allowed = error(own[name]) + 2 * float(jnp.finfo(dtype).eps) * scale
        assert got[name].dtype == own[name].dtype
        assert error(got[name]) <= allowed, name


def _windows(t: jax.Array, i: jax.Array, w: jax.Array) -> jax.Array:
    """Two rows at each place: they overlap."""
    take = lambda t: jax.vmap(lambda k: lax.dynamic_slice(t, (k, 0), (2, D)))(i[0])
    return jax.grad(lambda t: (take(t) * w[0, :, None]).sum())(t)


def _parts(t: jax.Array, i: jax.Array, w: jax.Array) -> jax.Array:
    """Half of each row."""
    take = lambda t: jax.vmap(lambda k: lax.dynamic_slice(t, (k, 0), (1, 2)))(i[0])
    return jax.grad(lambda t: (take(t) * w[0, :, None, :2]).sum())(t)


LOOK_ALIKES = {
    "segment_max": lambda t, i, w: jax.ops.segment_max(w[0], i[0], num_segments=V),
    "segment_prod": lambda t, i, w: jax.ops.segment_prod(w[0], i[0], num_segments=V),
    "set": lambda t, i, w: t.at[i].set(w),
    "largest": lambda t, i, w: t.at[i].max(w),
    "counts": lambda t, i, w: jnp.zeros(V, t.dtype).at[i].add(1),
    "numbers": lambda t, i, w: jnp.zeros(V, t.dtype).at[i].add(w[..., 0]),
    "two_ids": lambda t, i, w: jnp.zeros((V, V, D), t.dtype).at[i[0], i[1]].add(w[0]),
    "entries": lambda t, i, w: jnp.zeros_like(t).at[i, i % D].add(w[..., 0]),
    "windows": _windows,
    "parts_of_rows": _parts,
    "unique": lambda t, i, w: t.at[i[0]].add(w[0], unique_indices=True),
    "integers": lambda t, i, w: jnp.zeros((V, D), int).at[i].add((w > 0).astype(int)),
    "slice": lambda t, i, w: jax.grad(lambda t: (t[2:5] * w[0, :3]).sum())(t),
    "one_row": lambda t, i, w: jax.grad(lambda t: (t[i[0, 0]] * w[0, 0]).sum())(t),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(name: str) -> None:
    fn = LOOK_ALIKES[name]
    fast = rewriter.optimize(fn, implementation=KERNELS)
    report = fast.report(jnp.asarray(TABLE), jnp.asarray(IDS), jnp.asarray(WEIGHTS))
    assert not report.failures
    assert report.counts().get("embedding", 0) == 0, report


LOOKED_UP = [n for n, s in SPELLINGS.items() if not s.plain and n != "rule"]


@pytest.mark.once
@pytest.mark.parametrize("name", LOOKED_UP)
def test_lookups_have_the_gradient(name: str) -> None:
    """`jax.grad` of the rewritten lookup holds no sum of 16-bit rows."""
    spelling = SPELLINGS[name]
    table, ids, w = _args(spelling, NARROW)
    fast = rewriter.optimize(spelling.fn, implementation=LOOKUPS)
    program = jax.make_jaxpr(
        jax.grad(lambda t: (jnp.nan_to_num(fast(t, ids)) * w[: len(ids)]).sum())
    )
    text = str(program(table))
    assert "embedding_lookup" in text
    assert "scatter-add" not in text


@pytest.mark.once
def test_gradients_of_lookups() -> None:
    names = ("take", "take_clip", "positions", "zeros", "twice", "checkpoint")
    arrays = {n: _args(SPELLINGS[n], NARROW) for n in names}

    def all_of(wrap: Callable[..., Any]) -> Any:
        def one(name: str, given: Any) -> Any:
            table, ids, w = given
            fn = wrap(SPELLINGS[name].fn)
            loss = lambda t: (jnp.nan_to_num(fn(t, ids)) * w).sum().astype("float32")
            return jax.value_and_grad(loss)(table)

        return jax.jit(lambda given: {n: one(n, given[n]) for n in names})(arrays)

    got = all_of(lambda fn: rewriter.optimize(fn, implementation=LOOKUPS))
    want = all_of(lambda fn: fn)
    for name in names:
        for g, w in zip(got[name], want[name], strict=True):
            scale = np.abs(np.asarray(w, np.float32)).max()
            np.testing.assert_allclose(
                np.asarray(g, np.float32), np.asarray(w, np.float32), atol=0.02 * scale
            )


def test_lookups_in_what_is_computed_stay() -> None:
    """Blocks of keys are gathered as they lie, from what the program transposes."""

    def blocks(x: jax.Array, w: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        heads = (x @ w).reshape(B, V, 3, 2, D).transpose(0, 3, 1, 2, 4)
        return jax.vmap(jax.vmap(lambda x, i: x[i]))(heads, ids), heads

    def given(x: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
        return (x.reshape(-1, 2 * D).T.astype(NARROW).T)[ids] * w[0]

    x, w = (RNG.normal(size=s) for s in ((B, V * 3, 2 * D), (2 * D, 2 * D)))
    ids = jnp.asarray(RNG.integers(0, V, (B, 2, T)), jnp.int32)
    args = (jnp.asarray(x, NARROW), jnp.asarray(w, NARROW), ids)
    count = lambda f: rewriter.explain(f, implementation=LOOKUPS)(*args).counts()
    assert "embedding_lookup" not in count(blocks)
    assert count(given)["embedding_lookup"] == 1
    fast = rewriter.optimize(blocks, implementation=LOOKUPS)
    assert str(fast.jaxpr(*args)) == str(jax.make_jaxpr(blocks)(*args))


def test_a_table_of_biases_reads_the_gradient_of_attention() -> None:
    """A table looked up by distance, added to scores: no product is computed twice."""
    b, t, n, h = 2, 7, 3, 5
    places = jnp.arange(t)[:, None] - jnp.arange(t) + t - 1

    def loss(table: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        bias = table[places].transpose(2, 0, 1)[None]
        s = jnp.einsum("btnh,bsnh->bnts", q, k) * h**-0.5 + bias
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)
        return (out * out).sum()

    shapes = ((2 * t - 1, n), *[(b, t, n, h)] * 3)
    args = [jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes]
    step = jax.grad(loss, (0, 1, 2, 3))
    forced = {"attention": "memory_bounded", **KERNELS}
    fast = rewriter.optimize(step, implementation=forced)
    assert all(s.replaced for s in fast.report(*args).sites)
    assert fast.report(*args).counts()["embedding"] == 1
    scores = f"f32[{b},{n},{t},{t}] = dot_general"
    assert scores in str(jax.make_jaxpr(step)(*args))
    assert "= dot_general" not in str(fast.jaxpr(*args))
    with jax.enable_x64(True):
        exact = step(*(jnp.asarray(x, jnp.float64) for x in args))
    for got, want in zip(fast(*args), exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_biases_by_relative_positions_leave_attention_its_gradient() -> None:
    """The rows that are added up are the bias's gradient, transposed: its result.

    Read from before the transpose, they kept attention's products in the program.
    """
    b, t, n, h = 2, 9, 3, 8

    def loss(q: Any, k: Any, v: Any, table: Any, ids: Any) -> Any:
        bias = table[ids.reshape(-1)].reshape(t, t, n).transpose(2, 0, 1)
        x = jnp.einsum("btnh,bsnh->bnts", q, k) * h**-0.5 + bias[None]
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x, -1), v)
        return out.astype(jnp.float32).sum()

    def step(*given: Any) -> Any:
        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*given)

    large = [jax.ShapeDtypeStruct((1 << 15, t, n, h), jnp.bfloat16)] * 3
    large += [jax.ShapeDtypeStruct((17, n), jnp.bfloat16)]
    large += [jax.ShapeDtypeStruct((t, t), jnp.int32)]
    sites = rewriter.explain(step, target="h200")(*large).sites
    site = next(s for s in sites if s.op == "attention")
    assert (site.kernel, site.backward) == ("hopper", True)
    draws = np.random.default_rng(0)
    given = [draws.standard_normal((b, t, n, h), np.float32) for _ in range(3)]
    given += [draws.standard_normal((17, n), np.float32)]
    given += [draws.integers(0, 17, (t, t), np.int32)]
    fast = rewriter.optimize(step, implementation={"attention": "memory_bounded"})
    assert fast.report(*given).sites[0].replaced
    pair = (jax.tree.leaves(run(*given)) for run in (fast, jax.jit(step)))
    for got, want in zip(*pair, strict=True):
        np.testing.assert_allclose(got, want, 2e-5, 2e-5)


def test_where_lookups_are_looked_for() -> None:
    """On GPUs, for tables of 16 bits, if no gradient is in the program already."""
    table, ids, w = _args(SPELLINGS["index"], NARROW)
    fn, step = SPELLINGS["index"].fn, SPELLINGS["index"].program
    count = lambda r: r.counts().get("embedding_lookup", 0)
    assert count(rewriter.explain(fn, target="h100")(table, ids)) == 1
    assert count(rewriter.explain(fn)(table, ids)) == 0
    wide = table.astype("float32")
    assert count(rewriter.explain(fn, target="h100")(wide, ids)) == 0
    assert count(rewriter.explain(step, target="h100")(table, ids, w)) == 0


def test_what_is_chosen() -> None:
    """On a CPU XLA's own; on a GPU float32 sums of 16 bits, and counted rows."""

    def step(words, places, kinds, ids, w):
        loss = lambda words, places, kinds: (
            (
                words[ids]
                + places[jnp.broadcast_to(jnp.arange(512), (32, 512))]
                + kinds[jnp.zeros_like(ids)]
            )
            * w
        ).sum()
        return jax.grad(loss, (0, 1, 2))(words, places, kinds)

    shape = jax.ShapeDtypeStruct
    for dtype, words in (("bfloat16", "in_float32"), ("float32", "xla")):
        args = (
            *(shape((n, 768), dtype) for n in (30522, 512, 2)),
            shape((32, 512), "int32"), shape((32, 512, 768), dtype),
        )  # fmt: skip
        here = rewriter.explain(step)(*args)
        assert {s.kernel for s in here.sites} == {"xla"}
        there = rewriter.explain(step, target="h100")(*args)
        by_size = {s.params["size"]: s.kernel for s in there.sites}
        assert by_size == {30522: words, 512: "counted", 2: "counted"}, there
