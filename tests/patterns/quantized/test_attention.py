"""Attention to keys and values of few bits: spellings, look-alikes, gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests.patterns.quantized.spelled import Spelled
from tests.support.arrays import stored

NAME = "quantized_attention"
FORCED = {NAME: ["memory_bounded", "xla"]}
B, S, N, K, H = 2, 24, 4, 2, 8
PAGE = 4
R = np.random.default_rng(0)
BF, F32 = jnp.bfloat16, jnp.float32


drawn = functools.partial(stored, R)


def scales(*shape: int) -> np.ndarray:
    return R.uniform(0.01, 0.03, shape).astype("float32")


GIVEN = {
    "q": R.standard_normal((B, 1, N, H)).astype("float32"),
    "qs": R.standard_normal((B, S, N, H)).astype("float32"),
    "k": drawn((B, S, K, H), "int8"),
    "v": drawn((B, S, K, H), "int8"),
    "kn": drawn((B, K, S, H), "int8"),
    "vn": drawn((B, K, S, H), "int8"),
    "ku": drawn((B, S, K, H), "uint8"),
    "vu": drawn((B, S, K, H), "uint8"),
    "k4": drawn((B, S, K, H), "int4"),
    "v4": drawn((B, S, K, H), "int4"),
    "ke": drawn((B, S, K, H), "float8_e4m3fn"),
    "ve": drawn((B, S, K, H), "float8_e4m3fn"),
    "k5": drawn((B, S, K, H), "float8_e5m2"),
    "v5": drawn((B, S, K, H), "float8_e5m2"),
    "vf": R.standard_normal((B, S, K, H)).astype("float32"),
    "ks": scales(B, S, K),
    "vs": scales(B, S, K),
    "kt": scales(B, S),
    "vt": scales(B, S),
    "kh": scales(K),
    "vh": scales(K),
    "kc": scales(K, H),
    "kz": R.integers(100, 140, (B, S, K)).astype("uint8"),
    "one": np.float32(0.017),
    "other": np.float32(0.013),
    "lengths": np.array([17, 24], "int32"),
    "pool": drawn((9, PAGE, K, H), "int8"),
    "pool_v": drawn((9, PAGE, K, H), "int8"),
    "pool_s": scales(9, PAGE, K),
    "table": R.permutation(9)[:6].reshape(2, 3).astype("int32"),
    "new": R.standard_normal((B, 1, K, H)).astype("float32"),
    "layers_k": drawn((2, B, S, N, H), "int8"),
    "layers_v": drawn((2, B, S, N, H), "int8"),
    "layers_s": scales(2, B, S, N),
}
"""Arguments by their names in spellings."""

SPELLED = Spelled(GIVEN)
SPELLINGS, ALIKE = SPELLED.spellings, SPELLED.alike
alike, args_of = SPELLED.look_alike, SPELLED.args_of
ONCE = "float32 *scale"


def spelling(k: str | None = ONCE, v: str | None = ONCE) -> Callable[..., Any]:
    """Keeps a program, and the steps to be read off it."""
    steps = {"widen_k": k, "widen_v": v}
    return SPELLED.spelling({n: x for n, x in steps.items() if x is not None})


def attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Grouped attention with a softmax in float32."""
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k).astype(F32) * H**-0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    out = jnp.einsum("bkgts,bske->btkge", weights, v)
    return out.reshape(*out.shape[:2], -1, out.shape[4])


def before(lengths: Any) -> Any:
    return jnp.arange(S) < lengths[:, None, None, None, None]


CAUSAL = np.tril(np.ones((S, S), bool))


# --------------------------------------------------------- a scale for each of what
@spelling()
def of_tokens_and_heads(q, k, v, ks, vs):
    return attend(q, k.astype(F32) * ks[..., None], v.astype(F32) * vs[..., None])


@spelling()
def of_tokens(q, k, v, kt, vt):
    kt, vt = kt[..., None, None], vt[..., None, None]
    return attend(q, k.astype(F32) * kt, v.astype(F32) * vt)


@spelling()
def of_heads(q, k, v, kh, vh):
    return attend(q, k.astype(F32) * kh[:, None], v.astype(F32) * vh[:, None])


@spelling()
def of_channels(q, k, v, kc, vt):
    return attend(q, k.astype(F32) * kc, v.astype(F32) * vt[..., None, None])


@spelling()
def of_all(q, k, v, one, other):
    return attend(q, k.astype(F32) * one, v.astype(F32) * other)


@spelling("float32", "float32")
def of_nothing(q, ke, ve):
    return attend(q, ke.astype(F32), ve.astype(F32))


@spelling(v=None)
def keys_alone(q, k, vf, ks):
    return attend(q, k.astype(F32) * ks[..., None], vf)


@spelling("float32 /scale", "float32 /scale")
def divided(q, k, v, ks, vs):
    ks, vs = 2000 * ks, 2000 * vs
    return attend(q, k.astype(F32) / ks[..., None], v.astype(F32) / vs[..., None])


@spelling("float32 -zero *scale", "float32 -128.0 *scale")
def with_zero_points(q, ku, vu, ks, vs, kz):
    k = (ku.astype(F32) - kz[..., None].astype(F32)) * ks[..., None]
    return attend(q, k, (vu.astype(F32) - 128) * vs[..., None])


# ------------------------------------------------------------------ casts and dtypes
@spelling("bfloat16 *scale", "bfloat16 *scale")
def in_16_bits(q, k, v, ks, vs):
    q, ks, vs = (x.astype(BF) for x in (q, ks, vs))
    return attend(q, k.astype(BF) * ks[..., None], v.astype(BF) * vs[..., None])


@spelling("float32 *scale bfloat16", "float32 *scale bfloat16")
def rounded_once(q, k, v, ks, vs):
    k = (k.astype(F32) * ks[..., None]).astype(BF)
    return attend(q.astype(BF), k, (v.astype(F32) * vs[..., None]).astype(BF))


@spelling()
def of_fp8(q, ke, ve, ks, vs):
    return attend(q, ke.astype(F32) * ks[..., None], ve.astype(F32) * vs[..., None])


@spelling("bfloat16 *scale", "bfloat16 *scale")
def of_e5m2(q, k5, v5, one, other):
    one, other = one.astype(BF), other.astype(BF)
    return attend(q.astype(BF), k5.astype(BF) * one, v5.astype(BF) * other)


@spelling()
def of_int4(q, k4, v4, ks, vs):
    return attend(q, k4.astype(F32) * ks[..., None], v4.astype(F32) * vs[..., None])


# ------------------------------------------------------ scales behind the products
@spelling()
def behind(q, k, v, kt, vt):
    scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, 2, 2).astype(F32))
    weights = jax.nn.softmax(scores * (H**-0.5 * kt[:, None, None]))
    return jnp.einsum(
        "bnts,bsnh->btnh", weights * vt[:, None, None], jnp.repeat(v, 2, 2).astype(F32)
    )


@spelling()
def behind_of_heads(q, kn, vn, ks, vs, lengths):
    q = q.reshape(B, K, N // K, H)
    scores = jnp.einsum("bkgh,bksh->bkgs", q, kn.astype(F32)) * H**-0.5
    scores = scores * ks.swapaxes(1, 2)[:, :, None]
    keep = jnp.arange(S) < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(keep, scores, -1e30))
    weights = weights * vs.swapaxes(1, 2)[:, :, None]
    return jnp.einsum("bkgs,bkse->bkge", weights, vn.astype(F32))


@spelling()
def keys_behind_values_before(q, k, v, ks, vs):
    q = q.reshape(B, 1, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k.astype(F32)) * H**-0.5
    scores = scores * ks.swapaxes(1, 2)[:, :, None, None]
    values = v.astype(F32) * vs[..., None]
    return jnp.einsum("bkgts,bske->btkge", jax.nn.softmax(scores), values)


@spelling()
def mixed_products(q, k, v, ks, vs):
    q = q.reshape(B, K, N // K, H).astype(BF)
    dims = (((3,), (3,)), ((0, 1), (0, 2)))
    scores = lax.dot_general(q, k, dims, preferred_element_type=F32) * H**-0.5
    weights = jax.nn.softmax(scores * ks.swapaxes(1, 2)[:, :, None])
    weights = (weights * vs.swapaxes(1, 2)[:, :, None]).astype(BF)
    dims = (((3,), (1,)), ((0, 1), (0, 2)))
    return lax.dot_general(weights, v, dims, preferred_element_type=F32)


# ---------------------------------------------------------------- masks and layouts
@spelling()
def up_to_lengths(q, k, v, ks, vs, lengths):
    k, v = k.astype(F32) * ks[..., None], v.astype(F32) * vs[..., None]
    return attend(q, k, v, before(lengths))


@spelling()
def prefill(qs, k, v, ks, vs):
    k, v = k.astype(F32) * ks[..., None], v.astype(F32) * vs[..., None]
    return attend(qs, k, v, CAUSAL)


@spelling()
def heads_before_tokens(q, kn, vn, ks, vs):
    k, v = (
        (x.astype(F32) * s.swapaxes(1, 2)[..., None]).swapaxes(1, 2)
        for x, s in ((kn, ks), (vn, vs))
    )
    return attend(q, k, v)


@spelling()
def repeated_heads(q, k, v, ks, vs):
    k, v = (
        jnp.repeat(x.astype(F32) * s[..., None], N // K, axis=2)
        for x, s in ((k, ks), (v, vs))
    )
    return attend(q, k, v)


@spelling()
def by_jax_nn(q, k, v, ks, vs):
    k, v = k.astype(F32) * ks[..., None], v.astype(F32) * vs[..., None]
    return jax.nn.dot_product_attention(q, k, v)


@spelling()
def in_a_jit(q, k, v, ks, vs):
    widened = jax.jit(lambda x, s: x.astype(F32) * s[..., None])
    return attend(q, widened(k, ks), widened(v, vs))


@spelling()
def vmapped(q, k, v, ks, vs):
    def one(q, k, v, ks, vs):
        k, v = k.astype(F32) * ks[..., None], v.astype(F32) * vs[..., None]
        return attend(q[None], k[None], v[None])[0]

    return jax.vmap(one)(q, k, v, ks, vs)


# -------------------------------------------------------------------- pages, caches
@spelling()
def in_pages(q, pool, pool_v, pool_s, table):
    def gathered(pages):
        x = pages[table]
        return x.reshape(2, 3 * PAGE, *x.shape[3:])

    k, v, s = (gathered(x) for x in (pool, pool_v, pool_s))
    return attend(q, k.astype(F32) * s[..., None], v.astype(F32) * s[..., None])


@spelling()
def a_step_of_decoding(q, k, v, ks, vs, new, lengths):
    """The new token is rounded to 8 bits, and read from the cache with the others."""
    s = jnp.abs(new).max(-1) / 127
    rounded = jnp.round(new / s[..., None]).astype(jnp.int8)
    k, v = (lax.dynamic_update_slice(x, rounded, (0, 5, 0, 0)) for x in (k, v))
    ks, vs = (lax.dynamic_update_slice(x, s, (0, 5, 0)) for x in (ks, vs))
    k, v = k.astype(F32) * ks[..., None], v.astype(F32) * vs[..., None]
    return attend(q, k, v, before(lengths))


@spelling()
def layers_in_a_scan(q, layers_k, layers_v, layers_s):
    def layer(q, one):
        k, v, s = one
        return attend(q, k.astype(F32) * s[..., None], v.astype(F32) * s[..., None]), s

    return lax.scan(layer, q, (layers_k, layers_v, layers_s))[0]


@spelling()
def layers_by_index(q, layers_k, layers_v, layers_s):
    for i in range(2):
        k, v, s = layers_k[i], layers_v[i], layers_s[i][..., None]
        q = attend(q, k.astype(F32) * s, v.astype(F32) * s)
    return q


# ---------------------------------------------------------------------- look-alikes
@alike
def floats(q, vf):
    return attend(q, vf, vf)


@alike
def rounded_in_the_program(qs, vf):
    s = jnp.abs(vf).max(-1, keepdims=True) / 127
    k = jnp.round(vf / s).astype(jnp.int8).astype(F32) * s
    return attend(qs, k, vf)


@alike
def straight_through(qs, vf):
    rounded = jnp.round(vf * 50).astype(jnp.int8).astype(F32) / 50
    k = vf + lax.stop_gradient(rounded - vf)
    return attend(qs, k, k)


@alike
def clipped(q, k, vf, ks):
    return attend(q, jnp.clip(k.astype(F32) * ks[..., None], -1, 1), vf)


@alike
def turned_by_position(q, k, vf, ks):
    x = k.astype(F32) * ks[..., None]
    angle = jnp.arange(S, dtype=F32)[:, None, None]
    left, right = x[..., : H // 2], x[..., H // 2 :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)
    return attend(q, turned, vf)


@alike
def of_two_caches(q, k, vf, ks, new):
    keys = jnp.concatenate([k.astype(F32) * ks[..., None], new], 1)
    return attend(q, keys, jnp.concatenate([vf, new], 1))


@alike
def a_scale_of_each_number(q, k, vf):
    return attend(q, k.astype(F32) * jnp.exp(vf), vf)


@alike
def of_integers(k, v):
    scores = jnp.einsum(
        "btnh,bsnh->bnts", k[:, :1], k, preferred_element_type=jnp.int32
    )
    weights = (127 * jax.nn.softmax(scores * 1e-3)).astype(jnp.int8)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, preferred_element_type=jnp.int32)


def last_site(f: Callable[..., Any], args: list[Any]) -> Any:
    report = rewriter.explain(f, implementation=FORCED)(*args)
    assert not report.failures
    assert report.sites, report
    return report.sites[-1]


@pytest.mark.once
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    want, f = SPELLINGS[name]
    site = last_site(f, args_of(f))
    assert (site.form, site.kernel) == (NAME, "memory_bounded"), site
    assert {n: x for n, x in site.params.items() if n.startswith("widen")} == want
    for side in "kv":
        text = want.get(f"widen_{side}", "")
        assert (f"{side}_scale" in site.shapes) == ("scale" in text)
        assert (f"{side}_zero" in site.shapes) == ("zero" in text)


FEW = ("behind_of_heads",)


@pytest.mark.parametrize("names", [FEW, pytest.param(None, marks=pytest.mark.once)])
@pytest.mark.usefixtures("quick_compilation")
def test_numbers_are_those_of_the_stored_numbers(names: Any) -> None:
    """No further from a run in float64 than the program itself, in every spelling."""
    SPELLED.assert_as_near(names, FORCED)


@pytest.mark.once
@pytest.mark.parametrize("name", ALIKE)
def test_look_alike(name: str) -> None:
    f = ALIKE[name]
    report = rewriter.explain(f, implementation=FORCED)(*args_of(f))
    assert not report.failures
    assert not [s for s in report.sites if s.form == NAME]


@pytest.mark.once
@pytest.mark.parametrize("name", ["of_tokens", "prefill"])
def test_gradients_of_queries_and_scales(name: str) -> None:
    SPELLED.assert_same_gradients(name, (0, 3, 4), FORCED)


@pytest.mark.once
def test_a_cache_of_8_bits_is_read_as_it_is_on_a_cpu() -> None:
    given = {
        "q": ((1, 1, 8, 64), F32), "k": ((1, 8192, 8, 64), "int8"),
        "v": ((1, 8192, 8, 64), "int8"), "ks": ((1, 8192, 8), F32),
        "vs": ((1, 8192, 8), F32),
    }  # fmt: skip
    args = [jax.ShapeDtypeStruct(*one) for one in given.values()]
    f = SPELLINGS["of_tokens_and_heads"][1]
    (site,) = rewriter.explain(f)(*args).sites
    assert (site.form, site.kernel) == (NAME, "memory_bounded")
    (site,) = rewriter.explain(f, target="h100")(*args).sites
    assert site.form == ""
    compiled = rewriter.optimize(f).lower(*args).compile()
    widened = 4 * 8192 * 8 * 64
    assert compiled.memory_analysis().temp_size_in_bytes < widened


@pytest.mark.once
@pytest.mark.parametrize("names", [("ke", "ve"), ("k", "v")], ids=str)
def test_numbers_of_8_bits_alone_are_floats_to_other_kernels(names: Any) -> None:
    def f(q, k, v):
        return attend(q, k.astype(F32) * 0.25, v.astype(F32))

    args = [jnp.asarray(GIVEN[n]) for n in ("q", *names)]
    how = {"attention": "memory_bounded"}
    fast = rewriter.optimize(f, implementation=how, strict=True)
    (site,) = fast.report(*args).sites
    assert (site.form, site.kernel) == ("", "memory_bounded")
    np.testing.assert_allclose(fast(*args), f(*args), rtol=1e-5, atol=2e-4)


@pytest.mark.once
def test_layers_of_floats_between_layers_of_few_bits() -> None:
    """Equal attention is proved once: what is above its keys is looked at each time."""

    def f(q, k, v, vf, ks, vs):
        for _ in range(2):
            q = attend(q, vf, vf)
            q = attend(q, k.astype(F32) * ks[..., None], v.astype(F32) * vs[..., None])
        return q

    report = rewriter.explain(f, implementation=FORCED)(*args_of(f))
    assert [s.form for s in report.sites] == ["", NAME, "", NAME]
