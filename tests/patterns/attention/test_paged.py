"""Paged attention: what is found of it, how exact it is, and what is left alone."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention import KERNELS
from rewriter.kernels.attention import PAGED as OP
from rewriter.kernels.attention.pages import AXES
from rewriter.ops.registry import registry
from rewriter.patterns.attention import paged, paged_latent

pytestmark = pytest.mark.once

B, N, K, H, SIZE, PAGES, POOL = 3, 8, 2, 16, 8, 4, 20
FORCED = {"paged_attention": "gathered"}


def inputs(heads_axis: int = 2, t: int = 1, dtype: Any = "float32") -> tuple[Any, ...]:
    """Queries, pools of keys and values, a table and lengths."""
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = {"p": POOL, "z": SIZE, "k": K, "h": H}
    pool = [sizes[x] for x in AXES[heads_axis]]
    q = jax.random.normal(keys[0], (B, t, N, H), dtype)
    k, v = (jax.random.normal(x, pool, dtype) for x in keys[1:3])
    table = jax.random.permutation(keys[3], POOL)[: B * PAGES].reshape(B, PAGES)
    return q, k, v, table, jnp.array([5, 32, 17])


def attend(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    """Attention of grouped heads over [b, s, k, h], up to a length."""
    b, t, n, h = q.shape
    queries = q.reshape(b, t, k.shape[2], -1, h)
    s = jnp.einsum("btkgh,bskh->bkgts", queries, k) * h**-0.5
    keep = jnp.arange(k.shape[1]) < lengths[:, None]
    s = jnp.where(keep[:, None, None, None], s, -jnp.inf)
    out = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(s), v)
    return out.reshape(b, t, n, h)


def joined(x: Any) -> Any:
    """[b, p, z, ...] as [b, s, ...]."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def one_page(pool: Any, page: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(pool, page, 0, keepdims=False)


SPELLINGS = {
    "index": lambda x, t: joined(x[t]),
    "take": lambda x, t: joined(jnp.take(x, t, axis=0)),
    "clip": lambda x, t: joined(jnp.take(x, t, axis=0, mode="clip")),
    "get": lambda x, t: joined(x.at[t].get(mode="promise_in_bounds")),
    "flat table": lambda x, t: x[t.reshape(-1)].reshape(B, -1, K, H),
    "page by page": lambda x, t: joined(
        jax.vmap(jax.vmap(functools.partial(one_page, x)))(t)
    ),
    "sequence by sequence": lambda x, t: jax.vmap(lambda r: x[r].reshape(-1, K, H))(t),
}
TURNED = {
    "heads first": (0, lambda x, t: joined(x[:, t].transpose(1, 2, 3, 0, 4))),
    "heads first, by heads": (
        0,
        lambda x, t: joined(jax.vmap(lambda head: head[t], out_axes=3)(x)),
    ),
    "heads second": (1, lambda x, t: joined(x[t].transpose(0, 1, 3, 2, 4))),
}


def program(take: Any, q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    return attend(q, take(k, table), take(v, table), lengths)


def check(f: Any, args: tuple[Any, ...]) -> Any:
    """The report of a program whose paged site agrees with float64."""
    fast = rewriter.optimize(f, implementation=FORCED, require={"attention": 1})
    (site,) = fast.report(*args).sites
    assert (site.op, site.form, site.kernel) == (
        "attention",
        "paged_attention",
        "gathered",
    )
    with jax.enable_x64(True):
        wide = [np.asarray(x, "float64") if x.dtype.kind == "f" else x for x in args]
        exact = f(*map(jnp.asarray, wide))
    np.testing.assert_allclose(fast(*args), exact, rtol=2e-5, atol=2e-5)
    return fast.report(*args)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    report = check(functools.partial(program, SPELLINGS[name]), inputs())
    params = report.sites[0].params
    assert params["heads_axis"] == 2
    assert params["fills"] == (name == "take")
    assert params["wraps"] == (name != "clip")
    assert report.counts()["attention"] == 1
    assert "paged_attention gathered [forced]" in str(report)


@pytest.mark.parametrize("name", TURNED)
def test_pools_with_other_axes(name: str) -> None:
    heads_axis, take = TURNED[name]
    report = check(functools.partial(program, take), inputs(heads_axis))
    assert report.sites[0].params["heads_axis"] == heads_axis


def test_several_queries_and_repeated_heads() -> None:
    def f(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        k, v = (jnp.repeat(joined(x[table]), N // K, axis=2) for x in (k, v))
        s = jnp.einsum("btnh,bsnh->bnts", q, k)
        first = jnp.maximum(lengths - q.shape[1], 0)  # so that no position wraps around
        at = first[:, None, None] + jnp.arange(q.shape[1])[:, None]
        s = jnp.where((jnp.arange(k.shape[1]) <= at)[:, None], s, -1e30)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    report = check(f, inputs(t=3))
    assert "offset" in report.sites[0].shapes


def test_keys_are_not_joined_and_pools_are_written_before() -> None:
    def f(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        k, v = (x.at[table[:, 0], lengths % SIZE].add(1.0) for x in (k, v))
        k, v = k[table], v[table]
        s = jnp.einsum("btkgh,bpzkh->btkgpz", q.reshape(B, 1, K, -1, H), k)
        at = jnp.arange(PAGES)[:, None] * SIZE + jnp.arange(SIZE)
        s = jnp.where(at < lengths[:, None, None, None, None, None], s, -jnp.inf)
        w = jax.nn.softmax(s, axis=(-1, -2))
        return jnp.einsum("btkgpz,bpzkh->btkgh", w, v).reshape(q.shape)

    check(f, inputs())


def test_every_page_is_full() -> None:
    def f(q: Any, k: Any, v: Any, table: Any) -> Any:
        return jax.nn.dot_product_attention(q, joined(k[table]), joined(v[table]))

    report = check(f, inputs()[:4])
    assert "kv_lengths" not in report.sites[0].shapes


@pytest.mark.parametrize("table", [[-1, -2], [POOL, 1], [3, POOL + 5], [-POOL - 1, 0]])
@pytest.mark.parametrize("name", ["index", "take", "clip"])
def test_numbers_beyond_the_pool(name: str, table: list[int]) -> None:
    q, k, v, whole, lengths = inputs()
    args = q, k, v, whole.at[1, :2].set(jnp.array(table)), lengths
    f = functools.partial(program, SPELLINGS[name])
    fast = rewriter.optimize(f, implementation=FORCED)
    np.testing.assert_allclose(fast(*args), f(*args), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["index", "get", "clip"])
def test_gradients_beyond_the_pool(name: str) -> None:
    """The nearest page has a gradient where indices are clipped, and none else."""
    q, k, v, table, lengths = inputs()
    args = q, k, v, table.at[:, 1].set(POOL + 5), lengths
    f = functools.partial(program, SPELLINGS[name])
    fast = rewriter.optimize(f, implementation=FORCED, require={"attention": 1})
    loss = lambda g: lambda *given: jnp.sin(g(*given, *args[3:])).sum()
    got, wanted = (jax.grad(loss(g), (0, 1, 2))(*args[:3]) for g in (fast, f))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_gradients() -> None:
    f = functools.partial(program, SPELLINGS["index"])
    fast = rewriter.optimize(f, implementation=FORCED)
    q, k, v, *rest = inputs()

    def loss(g: Any, *given: Any) -> Any:
        return jnp.sin(g(*given, *rest)).sum()

    got = jax.grad(functools.partial(loss, fast), (0, 1, 2))(q, k, v)
    wanted = jax.grad(functools.partial(loss, f), (0, 1, 2))(q, k, v)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------- look-alikes
def two_tables(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    return attend(q, joined(k[table]), joined(v[table[::-1]]), lengths)


def positions(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    """Gathers one position of all pages, and not pages."""
    k, v = (x[:, table % SIZE].transpose(1, 0, 2, 3, 4) for x in (k, v))
    return attend(q, *(x.reshape(B, -1, K, H)[:, :32] for x in (k, v)), lengths)


def unpaged(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    """Positions before pages: not the order of the table."""
    k, v = (joined(x[table].swapaxes(1, 2)) for x in (k, v))
    return attend(q, k, v, lengths)


def only_keys(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    return attend(q, joined(k[table]), v[: PAGES * B].reshape(B, -1, K, H), lengths)


def scaled(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    """Quantised keys, each position with its scale."""
    scales = jnp.abs(v[..., :1])
    k = joined(k[table]) * joined(scales[table])
    return attend(q, k, joined(v[table]), lengths)


def layer(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    """Pages of a part of the pool, which would have to be copied."""
    return attend(q, joined(k[4:][table % 16]), joined(v[4:][table % 16]), lengths)


def arithmetic(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    """Pages behind those that the table names."""
    return attend(q, joined(k[table // 2 + 1]), joined(v[table // 2 + 2]), lengths)


@pytest.mark.parametrize(
    "f", [two_tables, positions, unpaged, only_keys, scaled, layer, arithmetic]
)
def test_look_alikes(f: Any) -> None:
    args = inputs()
    report = rewriter.explain(f, implementation=FORCED)(*args)
    assert not [s for s in report.sites if s.form]
    plain = rewriter.explain(f, patterns="-paged_attention")(*args)
    assert report.counts() == plain.counts()
    assert not report.failures
    np.testing.assert_allclose(
        rewriter.optimize(f, implementation=FORCED)(*args), f(*args), rtol=2e-5,
        atol=2e-5,
    )  # fmt: skip


def test_the_report_says_why_it_is_not_paged() -> None:
    def layers(q: Any, *rest: Any) -> Any:
        for _ in range(3):
            q = jnp.sin(two_tables(q, *rest))
        return q

    report = rewriter.explain(layers)(*inputs())
    for site in report.sites:
        assert "by different tables" in dict(site.not_chosen)["paged_attention"]
    assert len(report.sites) == 3
    assert not report.misses
    assert "by different tables" in report.why_not("attention")


def test_a_mask_not_by_length_is_an_operand() -> None:
    def f(q: Any, k: Any, v: Any, table: Any, mask: Any) -> Any:
        k, v = joined(k[table]), joined(v[table])
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None])

    mask = jax.random.bernoulli(jax.random.key(5), 0.5, (B, PAGES * SIZE))
    args = (*inputs()[:4], mask)
    report = check(f, args)
    assert "mask" in report.sites[0].shapes


# -------------------------------------------------------------------------- choice
def test_attention_is_chosen_unless_the_form_is() -> None:
    f, args = functools.partial(program, SPELLINGS["index"]), inputs()
    (site,) = rewriter.explain(f)(*args).sites
    assert (site.op, site.form, site.replaced) == ("attention", "", False)
    reasons = dict(site.not_chosen)
    assert "gathers pages as the program does" in reasons["paged_attention gathered"]
    forced = rewriter.explain(f, implementation={"attention": "memory_bounded"})(*args)
    assert forced.sites[0].kernel == "memory_bounded"
    assert not forced.sites[0].form
    (site,) = rewriter.explain(f, numerics="strict")(*args).sites
    assert not site.replaced


def test_patterns() -> None:
    f, args = functools.partial(program, SPELLINGS["index"]), inputs()
    assert not rewriter.explain(f, patterns="-attention")(*args).sites
    (site,) = rewriter.explain(
        f, patterns="-paged_attention", implementation={"attention": "memory_bounded"}
    )(*args).sites
    assert not site.form
    (site,) = rewriter.explain(f, patterns="paged_attention")(*args).sites
    assert (site.op, site.form) == ("attention", "paged_attention")


def test_layers_share_one_proof() -> None:
    def f(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        for _ in range(4):
            q = jnp.sin(program(SPELLINGS["index"], q, k, v, table, lengths))
        return q

    report = rewriter.explain(f, implementation=FORCED)(*inputs())
    assert report.counts()["attention"] == 4
    assert {s.form for s in report.sites} == {"paged_attention"}


def test_only_attention_over_pages_is_read_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention beside a loss, or beside pages, is not looked at once more."""
    tried: list[str] = []
    for module in (paged, paged_latent):
        made = module.read.propose

        def propose(find: Any, anchor: Any, made: Any = made) -> Any:
            if find.gathers:
                tried.append(anchor.prim)
            return made(find, anchor)

        monkeypatch.setattr(module, "read", SimpleNamespace(propose=propose))
    q, k, v, table, lengths = inputs()

    def loss(q: Any, labels: Any) -> Any:
        k = jnp.repeat(q[:, :, :K], 2, axis=1)
        logits = attend(q, k, k, lengths)[:, :, 0]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
        return jnp.sum(picked)

    labels = jnp.ones((B, 3), "int32")
    assert rewriter.explain(loss)(inputs(t=3)[0], labels).counts()["attention"] == 1
    assert tried == []

    def both(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        own = jnp.concatenate([q[:, :, :K]] * 2, 1)
        first = attend(q, own, own, lengths)
        return program(SPELLINGS["index"], jnp.sin(first), k, v, table, lengths)

    report = rewriter.explain(both, implementation=FORCED)(q, k, v, table, lengths)
    assert [s.form for s in report.sites] == ["", "paged_attention"]
    assert tried == ["exp"]


def in_scan(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    def layer(q: Any, pools: Any) -> Any:
        own = pools or (k, v)
        out = program(SPELLINGS["index"], q, *own, table, lengths)
        return jnp.sin(out), None

    stacked = (k, v) if k.ndim == 5 else None
    return jax.lax.scan(layer, q, stacked, length=3)[0]


def test_pools_that_a_scan_reads() -> None:
    q, k, v, *rest = inputs()
    report = check(in_scan, (q, k, v, *rest))
    assert report.counts()["attention"] == 3
    stacks = [jnp.stack([x, x + 1, -x]) for x in (k, v)]  # a layer would be copied
    (site,) = rewriter.explain(in_scan, implementation=FORCED)(q, *stacks, *rest).sites
    assert (site.op, site.form) == ("attention", "")
    assert "a kernel would copy" in dict(site.not_chosen)["paged_attention"]


# -------------------------------------------------------------------------- the op
def test_the_op() -> None:
    assert registry().op("paged_attention") is OP
    assert OP.form_of == "attention"
    own = tuple(k for k in KERNELS if k.op == OP.name)
    assert own == registry().kernels(OP.name)


@pytest.mark.parametrize("heads_axis", [0, 1, 2])
def test_vmapped(heads_axis: int) -> None:
    from rewriter.site import site

    q, k, v, table, lengths = inputs(heads_axis)

    def one(q: Any, table: Any, lengths: Any) -> Any:
        given = {"q": q, "k_pages": k, "v_pages": v, "table": table}
        return site.bind(
            OP, {**given, "kv_lengths": lengths}, {"heads_axis": heads_axis},
            (("default", "gathered"),),
        )  # fmt: skip

    several = [jnp.stack([x, jnp.roll(x, 1, 0)]) for x in (q, table, lengths)]
    got = jax.vmap(one)(*several)
    wanted = jnp.stack([one(*(x[i] for x in several)) for i in range(2)])
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", list(OP.distributions({"kv_lengths": 0})))
def test_samples(lengths: str) -> None:
    args = dict(zip(("q", "k_pages", "v_pages", "table", "kv_lengths"), inputs(),
                    strict=True))  # fmt: skip
    structs = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in args.items()}
    draw = OP.distributions(structs)[lengths]
    made = draw(jax.random.key(0), structs, {"heads_axis": 2})
    assert {n: (x.shape, x.dtype) for n, x in made.items()} == {
        n: (x.shape, x.dtype) for n, x in structs.items()
    }
    assert 0 <= int(made["table"].min()) <= int(made["table"].max()) < POOL
    assert 1 <= int(made["kv_lengths"].min()) <= PAGES * SIZE
    assert jnp.isfinite(OP.reference(**made)).all()


def test_cost() -> None:
    shapes = {"q": (B, 1, N, H), "k_pages": (POOL, SIZE, K, H), "table": (B, PAGES),
              "v_pages": (POOL, SIZE, K, H)}  # fmt: skip
    dtypes = {n: "int32" if n == "table" else "float32" for n in shapes}
    s = PAGES * SIZE
    plain = {"q": (B, 1, N, H), "k": (B, s, K, H), "v": (B, s, K, H)}
    wanted = (
        registry()
        .op("attention")
        .cost(plain, dict.fromkeys(plain, "float32"), {}, "forward")
    )
    assert OP.cost(shapes, dtypes, {}, "forward") == wanted
