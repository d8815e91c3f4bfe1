"""Latent attention before its weights are absorbed: what is found, and what is not."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.ops.registry import registry
from tests import slow
from tests.patterns.attention.test_latent import exact, normal

B, S, N, C, R, D, E = 2, 24, 4, 32, 8, 20, 12
"""Sequences, keys, heads, columns: of the latent, rotary, of keys and of values."""

NAME = "expanded_latent_attention"
FAST = {"numerics": "fast", "implementation": {NAME: "absorbed"}}
ARRAYS = {
    "q": normal(B, 1, N, D, seed=1), "qr": normal(B, 1, N, R, seed=2),
    "c": normal(B, S, C, seed=3), "kr": normal(B, S, R, seed=4),
    "wk": normal(C, N, D, seed=5), "wv": normal(C, N, E, seed=6),
    "wkv": normal(C, N * (D + E), seed=7), "lengths": jnp.array([5, S]),
    "own": normal(B, S, N, R, seed=8), "other": normal(B, S, C, seed=9),
    "qs": normal(B, 3, N, D, seed=10), "grouped": normal(B, 1, 2 * N, D, seed=11),
    "wo": normal(N, E, 20, seed=12),
}  # fmt: skip
"""Arguments by their names in programs."""


def weights(scores: Any, lengths: Any) -> Any:
    keep = jnp.arange(S) < lengths[:, None, None, None]
    return jax.nn.softmax(jnp.where(keep, scores * 0.2, -1e30))


def attend(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    p = weights(jnp.einsum("btnd,bsnd->bnts", q, k), lengths)
    return jnp.einsum("bnts,bsne->btne", p, v)


def made(c: Any, wk: Any, wv: Any) -> tuple[Any, Any]:
    return jnp.einsum("bsc,cnd->bsnd", c, wk), jnp.einsum("bsc,cne->bsne", c, wv)


def both(q: Any, qr: Any, k: Any, kr: Any) -> tuple[Any, Any]:
    wide = jnp.broadcast_to(kr[:, :, None], (*k.shape[:3], R))
    return jnp.concatenate([q, qr], -1), jnp.concatenate([k, wide], -1)


# ------------------------------------------------------------------- what is found
def two_products(q, qr, c, kr, wk, wv, lengths):
    k, v = made(c, wk, wv)
    s = jnp.einsum("btnd,bsnd->bnts", q, k) + jnp.einsum("btnr,bsr->bnts", qr, kr)
    return jnp.einsum("bnts,bsne->btne", weights(s, lengths), v)


def one_matrix_for_both(q, qr, c, kr, wkv, lengths):
    kv = (c @ wkv).reshape(B, S, N, D + E)
    q, k = both(q, qr, kv[..., :D], kr)
    return attend(q, k, kv[..., D:], lengths)


def split_keys(q, qr, c, kr, wkv, lengths):
    k, v = jnp.split((c @ wkv).reshape(B, S, N, D + E), [D], -1)
    q, k = both(q, qr, k, kr)
    return attend(q, k, v, lengths)


def without_rotary_keys(q, c, wk, wv, lengths):
    return attend(q, *made(c, wk, wv), lengths)


def heads_first(q, c, wk, wv, lengths):
    k = jnp.einsum("bsc,cnd->bnsd", c, wk)
    v = jnp.einsum("bsc,cne->bnse", c, wv)
    p = weights(q.swapaxes(1, 2) @ k.swapaxes(2, 3), lengths)
    return (p @ v).swapaxes(1, 2)


def rotary_keys_first(q, qr, c, kr, wk, wv, lengths):
    k, v = made(c, wk, wv)
    wide = jnp.repeat(kr[:, :, None], N, 2)
    q, k = jnp.concatenate([qr, q], -1), jnp.concatenate([wide, k], -1)
    return attend(q, k, v, lengths)


def normed_latent(q, c, wk, wv, lengths):
    c = c * jax.lax.rsqrt(jnp.mean(c * c, -1, keepdims=True) + 1e-6)
    return attend(q, *made(c, wk, wv), lengths)


def matrices_of_heads_first(q, c, wk, wv, lengths):
    wk, wv = wk.transpose(1, 2, 0), wv.transpose(1, 2, 0)
    k, v = jnp.einsum("ndc,bsc->bsnd", wk, c), jnp.einsum("nec,bsc->bsne", wv, c)
    return attend(q, k, v, lengths)


def flat_matrices(q, c, wk, wv, lengths):
    k = (c @ wk.reshape(C, -1)).reshape(B, S, N, D)
    v = (c @ wv.reshape(C, -1)).reshape(B, S, N, E)
    return attend(q, k, v, lengths)


def several_queries(qs, c, wk, wv, lengths):
    return attend(qs, *made(c, wk, wv), lengths)


def sequence_by_sequence(q, c, wk, wv, lengths):
    def one(q, c, length):
        k, v = jnp.einsum("sc,cnd->snd", c, wk), jnp.einsum("sc,cne->sne", c, wv)
        s = jnp.einsum("tnd,snd->nts", q, k)
        p = jax.nn.softmax(jnp.where(jnp.arange(S) < length, s * 0.2, -1e30))
        return jnp.einsum("nts,sne->tne", p, v)

    return jax.vmap(one)(q, c, lengths)


def with_a_projection_behind(q, c, wk, wv, wo, lengths):
    out = attend(q, *made(c, wk, wv), lengths)
    return jnp.einsum("btne,nef->btf", out, wo)


def layers(q, c, wk, wv, lengths):
    def layer(x, one):
        out = attend(x, *made(one, wk, wv), lengths)
        return x.at[..., :E].add(out), None

    return jax.lax.scan(layer, q, jnp.stack([c, c[:, ::-1]]))[0]


def repeated_heads(grouped, c, wk, wv, lengths):
    k, v = (jnp.repeat(x, 2, 2) for x in made(c, wk, wv))
    return attend(grouped, k, v, lengths)


def grouped_heads(grouped, c, wk, wv, lengths):
    k, v = made(c, wk, wv)
    q = grouped.reshape(B, 1, N, 2, D)
    s = jnp.einsum("btngd,bsnd->bngts", q, k)
    keep = jnp.arange(S) < lengths[:, None, None, None, None]
    p = jax.nn.softmax(jnp.where(keep, s * 0.2, -1e30))
    return jnp.einsum("bngts,bsne->btnge", p, v)


def as_in_maxtext(q, qr, c, kr, wkv, lengths):
    """Groups of one head, an added mask, and weights divided behind their product."""
    kv = jnp.einsum("bsc,cnh->bsnh", c, wkv.reshape(C, N, D + E))
    k, v = jnp.split(kv, [D], -1)
    q, k = both(q, qr, k, kr)
    s = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, 1, N, 1, D + R) * 0.2, k)
    s += jnp.where(jnp.arange(S) < lengths[:, None, None, None, None], 0.0, -2e38)
    p = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    out = jnp.einsum("bkgts,bskd->btkgd", p, v)
    return out / jnp.moveaxis(jnp.sum(p, -1), (1, 2, 3), (2, 3, 1))[..., None]


def tiled_rotary_keys(q, qr, c, kr, wk, wv, lengths):
    k, v = (x.swapaxes(1, 2) for x in made(c, wk, wv))
    k = jnp.concatenate([k, jnp.tile(kr[:, None], (1, N, 1, 1))], -1)
    p = weights(jnp.concatenate([q, qr], -1).swapaxes(1, 2) @ k.mT, lengths)
    return (p @ v).swapaxes(1, 2)


def jax_nn(q, c, wk, wv):
    k, v = made(c, wk, jnp.concatenate([wv, wv[..., : D - E]], -1))
    return jax.nn.dot_product_attention(q, k, v, scale=0.2)


FOUND = (
    two_products, one_matrix_for_both, split_keys, without_rotary_keys, heads_first,
    rotary_keys_first, normed_latent, matrices_of_heads_first, flat_matrices,
    several_queries, sequence_by_sequence, with_a_projection_behind, layers, jax_nn,
    repeated_heads, grouped_heads, as_in_maxtext, tiled_rotary_keys,
)  # fmt: skip


def args_of(f: Any) -> list[Any]:
    return [ARRAYS[n] for n in f.__code__.co_varnames[: f.__code__.co_argcount]]


@pytest.mark.once
@pytest.mark.parametrize("f", FOUND, ids=lambda f: f.__name__)
def test_found(f: Any) -> None:
    args = args_of(f)
    fast = rewriter.optimize(f, **FAST)
    (site,) = (s for s in fast.report(*args).sites if s.op == "attention")
    assert (site.form, site.kernel) == (NAME, "absorbed")
    assert f"latent f32[{B},{S},{C}]" in site.shapes
    assert ("k_rope" in site.shapes) == ("kr" in f.__code__.co_varnames)
    np.testing.assert_allclose(fast(*args), exact(f, args), rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("f", slow.first(2, FOUND), ids=lambda f: f.__name__)
def test_keys_of_heads_are_not_made(f: Any) -> None:
    """Nothing of the size of all keys or values is left in the compiled program."""
    args = args_of(f)
    text = jax.jit(rewriter.optimize(f, **FAST)).lower(*args).compile().as_text()
    sizes = {
        int(np.prod([int(n) for n in shape.split(",")]))
        for shape in re.findall(r"f32\[([\d,]+)\]", text)
    }
    assert sizes.isdisjoint({B * S * N * D, B * S * N * E, B * S * N * (D + E)})


# --------------------------------------------------------------- what is not found
def values_of_other_rows(q, c, other, wk, wv, lengths):
    return attend(q, made(c, wk, wv)[0], made(other, wk, wv)[1], lengths)


def values_of_turned_rows(q, c, wk, wv, lengths):
    return attend(q, made(c, wk, wv)[0], made(c[:, ::-1], wk, wv)[1], lengths)


def keys_are_returned(q, c, wk, wv, lengths):
    k, v = made(c, wk, wv)
    return attend(q, k, v, lengths), k


def keys_are_summed_too(q, c, wk, wv, lengths):
    k, v = made(c, wk, wv)
    return attend(q, k, v, lengths) + k.sum()


def keys_with_a_bias(q, c, wk, wv, lengths):
    k, v = made(c, wk, wv)
    return attend(q, k + jnp.arange(D), v, lengths)


def normed_keys(q, c, wk, wv, lengths):
    k, v = made(c, wk, wv)
    k = k * jax.lax.rsqrt(jnp.mean(k * k, -1, keepdims=True) + 1e-6)
    return attend(q, k, v, lengths)


def rotary_keys_of_heads(q, qr, c, own, wk, wv, lengths):
    k, v = made(c, wk, wv)
    q, k = jnp.concatenate([q, qr], -1), jnp.concatenate([k, own], -1)
    return attend(q, k, v, lengths)


def values_that_are_no_product(q, c, own, wk, wv, lengths):
    return attend(q, made(c, wk, wv)[0], own, lengths)


def keys_of_two_arrays(q, c, other, wk, wv, lengths):
    k = made(c, wk, wv)[0] + made(other, wk, wv)[0]
    return attend(q, k, made(c, wk, wv)[1], lengths)


def a_matrix_of_each_sequence(q, c, wk, wv, lengths):
    wk = wk[None] * lengths[:, None, None, None]
    k = jnp.einsum("bsc,bcnd->bsnd", c, wk)
    return attend(q, k, made(c, wk[0], wv)[1], lengths)


def keys_in_8_bits(q, c, wk, wv, lengths):
    k, v = made(c, wk, wv)
    return attend(q, k.astype(jnp.float8_e4m3fn).astype(k.dtype), v, lengths)


def values_in_8_bits(q, c, wk, wv, lengths):
    k, v = made(c, wk, wv)
    return attend(q, k, v.astype(jnp.float8_e5m2).astype(v.dtype), lengths)


def rolled_values(q, c, wk, wv, lengths):
    k, v = made(c, wk, wv)
    return attend(q, k, jnp.roll(v, 1, -1), lengths)


def values_of_a_rolled_latent(q, c, wk, lengths):
    k = jnp.einsum("bsc,cnd->bsnd", c, wk)
    rows = jnp.broadcast_to(jnp.roll(c, 1, -1)[:, :, None], (B, S, N, C))
    return attend(q, k, rows, lengths)


def joined_values(q, c, kr, wk, wv, lengths):
    k, v = made(c, wk, wv)
    wide = jnp.broadcast_to(kr[:, :, None], (B, S, N, R))
    return attend(q, k, jnp.concatenate([v, wide], -1), lengths)


def keys_of_whole_numbers(q, c, wk, wv, lengths):
    k, v = made(c, wk, wv)
    return attend(q, k.astype(jnp.int8).astype(k.dtype), v, lengths)


REFUSED = (
    values_of_other_rows, values_of_turned_rows, keys_are_returned,
    keys_are_summed_too, keys_with_a_bias, normed_keys, rotary_keys_of_heads,
    values_that_are_no_product, keys_of_two_arrays, a_matrix_of_each_sequence,
    keys_in_8_bits, values_in_8_bits, keys_of_whole_numbers, rolled_values,
    values_of_a_rolled_latent, joined_values,
)  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize("f", REFUSED, ids=lambda f: f.__name__)
def test_not_found(f: Any) -> None:
    args = args_of(f)
    fast = rewriter.optimize(f, **FAST)
    report = fast.report(*args)
    assert not report.failures
    assert all(site.form != NAME for site in report.sites)
    got, want = jax.tree.leaves(fast(*args)), jax.tree.leaves(f(*args))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


def test_products_are_reassociated_only_if_numerics_are_fast() -> None:
    for how in ({}, {"numerics": "strict"}):
        report = rewriter.explain(two_products, **how)(*args_of(two_products))
        assert all(site.form != NAME for site in report.sites)
        if not how:
            assert "numerics='fast'" in str(report.sites[0].not_chosen)


@pytest.mark.once
def test_as_many_queries_as_keys_are_no_near_miss() -> None:
    """Ordinary attention to oneself, whose keys and values are products as well."""

    def f(c, wk, wv):
        k, v = made(c, wk, wv)
        return jax.nn.dot_product_attention(
            k, k, jnp.pad(v, [(0, 0)] * 3 + [(0, D - E)])
        )

    (site,) = rewriter.explain(f)(*args_of(f)).sites
    assert NAME not in str(site.not_chosen)


# ---------------------------------------------------------------------- the choice
def shapes(t: int, s: int, b: int = 64, n: int = 128) -> list[Any]:
    """Of a decode step of DeepSeek-V3."""
    sizes = {
        "q": (b, t, n, 128), "qr": (b, t, n, 64), "c": (b, s, 512), "kr": (b, s, 64),
        "wk": (512, n, 128), "wv": (512, n, 128),
    }  # fmt: skip
    return [jax.ShapeDtypeStruct(x, "bfloat16") for x in sizes.values()]


def of_any_size(q, qr, c, kr, wk, wv):
    k, v = made(c, wk, wv)
    s = jnp.einsum("btnd,bsnd->bnts", q, k) + jnp.einsum("btnr,bsr->bnts", qr, kr)
    return jnp.einsum("bnts,bsne->btne", jax.nn.softmax(s * 0.07), v)


@pytest.mark.once
@pytest.mark.parametrize(
    ("t", "target", "kernel"),
    [
        (1, "h100", "hopper_absorbed"),
        (2, "h200", "hopper_absorbed"),
        (1, "cpu", "absorbed"),
    ],
)
def test_decoding_absorbs(t: int, target: str, kernel: str) -> None:
    how = {"numerics": "fast", "target": target}
    (site,) = rewriter.explain(of_any_size, **how)(*shapes(t, 4096)).sites
    assert (site.form, site.kernel) == (NAME, kernel)


@pytest.mark.once
def test_prefill_does_not() -> None:
    how = {"numerics": "fast", "target": "h100"}
    (site,) = rewriter.explain(of_any_size, **how)(*shapes(2048, 2048, 1)).sites
    assert site.form != NAME


@pytest.mark.once
def test_gradients_are_the_programs() -> None:
    args = args_of(two_products)
    loss = lambda f: lambda *x: jnp.square(f(*x)).sum()
    fast = rewriter.optimize(two_products, **FAST)
    got, want = (jax.grad(loss(f), range(6))(*args) for f in (fast, two_products))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.once
def test_lowered_for_hopper() -> None:
    (kernel,) = (k for k in registry().kernels(NAME) if k.name == "hopper_absorbed")
    names = ("q", "q_rope", "latent", "k_rope", "w_k", "w_v")
    given = dict(zip(names, shapes(1, 1024, 4), strict=True))
    how = {"scale": 0.07, "empty_rows": "nan", "window": (None, None), "shift": 0}
    call = jax.jit(lambda given: kernel.forward(**given, **how))
    exported = jax.export.export(call, platforms=["cuda"])(given)
    assert exported.mlir_module().count("mosaic_gpu_v2") >= 1
    assert [x.shape for x in exported.out_avals] == [(4, 1, 128, 128)]
