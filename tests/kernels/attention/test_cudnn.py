"""cuDNN's attention: what it is given, and its numbers where there is an NVIDIA GPU."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention import cudnn
from rewriter.kernels.attention.empty_rows import AVERAGED
from rewriter.kernels.attention.reference import reference
from rewriter.ops.kernel import Spec, spec_of
from rewriter.ops.registry import registry
from tests import slow
from tests.support.kernels.float64 import float64

pytestmark = pytest.mark.once


def spec(dtype: Any = jnp.bfloat16, more: tuple[str, ...] = (), **params: Any) -> Spec:
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), dtype)
    operands = {"q": x, "k": x, "v": x}
    operands |= {n: jax.ShapeDtypeStruct((4,), jnp.float32) for n in more}
    return spec_of(registry().op("attention"), operands, params)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(jnp.float32), "16-bit"),
        (spec(more=("alibi",)), "not support alibi"),
        (spec(more=("sinks",)), "not support sinks"),
        (spec(softcap=30.0), "soft cap"),
        (spec(window=(None, 3)), "window"),
        (spec(window=(None, 0), shift=5), "window"),
        (spec(out_dtype="float32"), "16-bit"),
    ],
)
def test_what_cudnn_is_not_given(given: Spec, why: str) -> None:
    verdict = cudnn.supports(given)
    assert not verdict.ok
    assert why in verdict.reasons[0].text


def causal(q, k, v):
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.125
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


def test_it_is_never_exported() -> None:
    """JAX does not promise that its call stays as it is."""
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    artifact = rewriter.export(causal, platforms=("cuda",))(x, x, x)
    assert not [c for c in artifact.manifest["custom_calls"] if "cudnn" in c.lower()]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN is there")
def test_without_cudnn_the_reason_is_told() -> None:
    assert "cuDNN" in cudnn.supports(spec()).reasons[0].text
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    fast = rewriter.optimize(causal, implementation={"attention": "cudnn"})
    with pytest.raises(rewriter.KernelError, match=r"cudnn: .*cuDNN"):
        fast.report(x, x, x)
    either = {"attention": ["cudnn", "xla"]}
    (site,) = rewriter.explain(causal, implementation=either)(x, x, x).sites
    assert not site.replaced
    assert "cuDNN" in str(site.not_chosen)


def by_xla(q, k, v, **more):
    """What JAX's own XLA implementation makes of what cuDNN would be given."""
    (b, t, n, h), s = q.shape, k.shape[1]
    assert k.shape == v.shape == (b, s, k.shape[2], h)
    assert t % 2 == s % 2 == 0  # or cuDNN has no gradients
    assert n % k.shape[2] == 0
    for name in ("bias", "mask"):
        if (x := more.get(name)) is not None:
            assert x.shape[2:] == (t, s)  # cuDNN broadcasts the first two axes alone
            assert x.shape[0] in (1, b)
            assert x.shape[1] in (1, n)
            assert x.dtype == (bool if name == "mask" else q.dtype)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if (x := more.get(name)) is not None:
            assert (x.shape, x.dtype) == ((b,), jnp.int32)
    return jax.nn.dot_product_attention(q, k, v, **more, implementation="xla")


def table(name: str, b: int, t: int, s: int, n: int, dtype: Any = jnp.float32):
    """Operands beyond q, k and v, with queries that see no key where there may be."""
    key = jax.random.key(7)
    keep = jax.random.bernoulli(key, 0.7, (b, 1, t, s)).at[0, 0, 1].set(False)
    bias = jax.random.normal(key, (1, n, t, s)).astype(dtype)
    return {
        "lengths": {"kv_lengths": jnp.array([s, 1, 0, s + 9][:b], jnp.int32)},
        "one_length": {"kv_lengths": jnp.array([s // 2], jnp.int32)},
        "bias": {"bias": bias},
        "bias_per_batch": {"bias": jnp.broadcast_to(bias[:, :1], (b, 1, t, s)) + 1},
        "row_bias": {"bias": bias[:, :, :1]},
        "infinite_bias": {"bias": jnp.where(keep, bias, -jnp.inf)},
        "mask": {"mask": keep},
        "padding": {"mask": keep[:, :, 2:3]},
        "bias_and_mask": {"bias": bias, "mask": keep},
        "bias_and_lengths": {"bias": bias, "kv_lengths": jnp.full((b,), 5, jnp.int32)},
    }[name]


TABLES = (
    "lengths", "one_length", "bias", "bias_per_batch", "row_bias", "infinite_bias",
    "mask", "padding", "bias_and_mask", "bias_and_lengths",
)  # fmt: skip


def compared(operands, cotangent, params, limit: float) -> None:
    """Our forward and backward against the reference in float64, seen rows alone."""
    given = dict(operands)

    def ours(given, cotangent):
        out, kept = cudnn.forward(**given, residuals=True, **params)
        alone = cudnn.forward(**given, **params)
        grads = cudnn.backward(
            **given, out=None, residuals=kept, cotangent=cotangent, **params
        )
        return out, alone, grads

    out, alone, grads = jax.jit(ours)(given, cotangent)
    floats = {n for n, x in given.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    assert set(grads) == floats
    seen = np.broadcast_to(
        np.asarray(cudnn._seen(cudnn._keep(given, params["window"])))
        if set(given) - {"q", "k", "v"} else True, out.shape,
    )  # fmt: skip
    with float64():
        wide = {
            n: np.asarray(x, np.float64) if n in floats else np.asarray(x)
            for n, x in given.items()
        }
        exact = jnp.asarray(reference(**wide, **params))

        # Where rows are empty the reference's gradient is of a finite stand-in.
        stays = params.get("empty_rows") in AVERAGED
        finite = params if stays else {**params, "empty_rows": "zero"}
        run = lambda some: reference(**{**wide, **some}, **finite)
        _, pull = jax.vjp(run, {n: wide[n] for n in floats})
        wide_cotangent = np.asarray(cotangent, np.float64)
        (want,) = pull(jnp.where(seen | stays, wide_cotangent, 0))
    for got in (out, alone):
        got, exact = np.asarray(got, np.float64), np.asarray(exact)
        assert (np.isnan(got) == np.isnan(exact)).all()
        fine = ~np.isnan(exact)
        gap = np.linalg.norm(np.where(fine, got - exact, 0))
        assert gap <= limit * np.linalg.norm(np.where(fine, exact, 0))
    for name in floats:
        got = np.asarray(grads[name], np.float64)
        if name == "v" and params.get("empty_rows", "nan") == "nan":
            heads = got.shape[2]
            bad = (~seen).any((1, 3)).reshape(len(seen), heads, -1).any(-1)
            bad = np.broadcast_to(bad[:, None, :, None], got.shape)
            assert (np.isnan(got) == bad).all()
            got = np.where(bad, np.asarray(want[name]), got)
        assert np.isfinite(got).all(), name
        gap = np.linalg.norm(got - np.asarray(want[name]))
        assert gap <= limit * max(np.linalg.norm(want[name]), 1e-3), name


@pytest.mark.parametrize(
    "window", slow.first(1, [(None, 0), (None, None), (5, 0)]), ids=str
)
@pytest.mark.parametrize(
    ("name", "empty_rows"),
    slow.unless(
        lambda name, empty_rows: (
            empty_rows == "mean" or name in ("mask", "lengths", "bias_and_mask")
        ),
        itertools.product(TABLES, ["nan", "zero", "mean", "mean_passing"]),
        several=True,
    ),
)
def test_what_cudnn_is_given_computes_the_op(
    name: str, empty_rows: str, window: tuple, monkeypatch
) -> None:
    """On any device: the same call by XLA, as cuDNN's rules are asserted by hand."""
    monkeypatch.setattr(cudnn, "_call", by_xla)
    b, t, s, n, h = 4, 9, 12, 4, 8
    if "lengths" in name and window[0] is not None:
        pytest.skip("refused: lengths and a window")
    more = table(name, b, t, s, n)
    sizes = {"q": (b, t, n, h), "k": (b, s, 2, h), "v": (b, s, 2, h)}
    q, k, v, g = (
        jax.random.normal(jax.random.key(i), size)
        for i, size in enumerate((*sizes.values(), sizes["q"]))
    )
    params = {"scale": 0.3, "window": window, "empty_rows": empty_rows}
    compared({"q": q, "k": k, "v": v, **more}, g, params, 1e-5)


def test_keys_that_no_query_sees_may_be_anything(monkeypatch) -> None:
    """To their scores a number is added, which does not hide what is none."""
    monkeypatch.setattr(cudnn, "_call", by_xla)
    q, k, v, g = (
        jax.random.normal(jax.random.key(i), size)
        for i, size in enumerate(
            [(2, 8, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8), (2, 8, 4, 8)]
        )
    )
    bias = jax.random.normal(jax.random.key(9), (1, 4, 8, 12))
    given = {"bias": bias, "mask": jnp.broadcast_to(jnp.arange(12) < 7, (2, 1, 8, 12))}
    made = []
    for keys in (k, k.at[:, 7:].set(jnp.nan)):
        call = {"q": q, "k": keys, "v": v, **given, "scale": 0.3}
        out, kept = cudnn.forward(**call, residuals=True)
        grads = cudnn.backward(**call, out=None, residuals=kept, cotangent=g)
        assert not np.asarray(grads["k"])[:, 7:].any()
        made.append((out, grads))
    jax.tree.map(np.testing.assert_array_equal, *made)


@pytest.mark.parametrize("window", [(None, None), (None, 0), (5, 0)], ids=str)
@pytest.mark.parametrize(("t", "s"), [(9, 9), (9, 12), (8, 11)])
def test_odd_lengths_are_made_even(t: int, s: int, window: tuple, monkeypatch) -> None:
    """Of q, k and v alone too: `by_xla` asserts that cuDNN sees no odd ones."""
    monkeypatch.setattr(cudnn, "_call", by_xla)
    sizes = ((2, t, 4, 72), (2, s, 2, 72), (2, s, 2, 72), (2, t, 4, 72))
    q, k, v, g = (
        jax.random.normal(jax.random.key(i), size) for i, size in enumerate(sizes)
    )
    params = {"scale": 0.3, "window": window}
    compared({"q": q, "k": k, "v": v}, g, params, 1e-5)
    given = spec_of(registry().op("attention"), {"q": q, "k": k, "v": v}, params)
    assert cudnn._asked.__wrapped__(given).ok


def test_what_cudnn_refuses_of_gradients_alone_is_told(monkeypatch) -> None:
    """As it does those of odd lengths, whose forward it takes (jax 0.11.2)."""

    @jax.custom_vjp
    def only_forward(q, k, v):
        return by_xla(q, k, v)

    def refused(*_: Any) -> Any:
        raise NotImplementedError("Unsupported sequence length Q 729, KV 729.")

    only_forward.defvjp(lambda *x: (only_forward(*x), x), refused)
    monkeypatch.setattr(cudnn, "_call", lambda q, k, v, **_: only_forward(q, k, v))
    verdict = cudnn._asked.__wrapped__(spec(scale=0.1, window=(None, None)))
    assert "Unsupported sequence length" in verdict.reasons[0].text


@pytest.mark.parametrize(
    ("more", "params", "why"),
    [
        ({"bias": ((1, 4, 256, 256), jnp.float32)}, {}, "16-bit"),
        ({"kv_lengths": ((2,), jnp.int32)}, {"window": (8, 0)}, "without keys"),
        ({"offset": ((2,), jnp.int32)}, {}, "not support offset"),
    ],
)
def test_tables_and_lengths_it_is_not_given(more, params, why) -> None:
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    given = {n: jax.ShapeDtypeStruct(s, d) for n, (s, d) in more.items()}
    op = registry().op("attention")
    verdict = cudnn.supports(spec_of(op, {"q": x, "k": x, "v": x, **given}, params))
    assert not verdict.ok
    assert why in verdict.reasons[0].text


def test_what_was_not_tried_on_a_gpu_is_chosen_only_if_measured(monkeypatch) -> None:
    """A mask: neither the rule of thumb nor the estimate takes cuDNN for it."""
    from rewriter.choose.choose import choose
    from rewriter.config import Config
    from rewriter.ops import device
    from rewriter.support.verdict import YES

    monkeypatch.setattr(cudnn, "_asked", lambda spec: YES)
    x = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((4, 1, 4096, 4096), bool)
    op, kernels = registry().op("attention"), registry().kernels("attention")
    plain = spec_of(op, {"q": x, "k": x, "v": x}, {})
    masked = spec_of(op, {"q": x, "k": x, "v": x, "mask": mask}, {})
    for on in (device.named("a100"), device.Device("NVIDIA Z80", "cuda")):
        assert choose(plain, Config(), kernels, on).kernel == "cudnn"
        choice = choose(masked, Config(), kernels, on)
        assert choice.kernel != "cudnn"
        reason = dict(choice.not_chosen)["cudnn"]
        assert "nothing of this size was measured" in reason or (
            "measure it with tune" in reason
        )
    forced = Config(implementation=(("attention", ("cudnn",), ()),))
    assert choose(masked, forced, kernels, device.named("a100")).kernel == "cudnn"


SHAPES = {  # b, t, s, n, heads of k, h
    "square": (2, 256, 256, 4, 4, 64),
    "odd": (1, 333, 333, 3, 3, 128),
    "cross": (2, 129, 384, 4, 4, 64),
    "grouped": (2, 256, 256, 8, 2, 128),
    "one_key_head": (1, 200, 200, 8, 1, 64),
    "width_80": (2, 256, 256, 4, 4, 80),
    "width_96": (1, 256, 256, 4, 4, 96),
    "width_256": (1, 512, 512, 2, 2, 256),
    "few": (3, 8, 40, 2, 2, 64),
    "more_queries": (2, 301, 150, 2, 2, 64),
    "odd_queries": (2, 201, 200, 2, 2, 64),
    "long": (1, 4096, 4096, 2, 2, 128),
}


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs cuDNN")
@pytest.mark.parametrize("window", [(None, None), (None, 0), (100, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_against_float64(shape: str, dtype: str, window: tuple) -> None:
    b, t, s, n, heads, h = SHAPES[shape]
    sizes = ((b, t, n, h), (b, s, heads, h), (b, s, heads, h), (b, t, n, h))
    q, k, v, g = (
        jax.random.normal(jax.random.key(i), size).astype(dtype)
        for i, size in enumerate(sizes)
    )
    params = {"scale": h**-0.5, "window": window}
    given = spec_of(registry().op("attention"), {"q": q, "k": k, "v": v}, params)
    if (shape, window) == ("more_queries", (100, 0)):
        assert cudnn.supports(given).reasons[0].code == "window"
        return
    assert cudnn.supports(given).ok, cudnn.supports(given)

    def ours(q, k, v, g):
        out, kept = cudnn.forward(q=q, k=k, v=v, residuals=True, **params)
        alone = cudnn.forward(q=q, k=k, v=v, **params)
        back = cudnn.backward(
            q=q, k=k, v=v, out=None, residuals=kept, cotangent=g, **params
        )
        return out, alone, back

    out, alone, back = jax.jit(ours)(q, k, v, g)
    assert out.dtype == q.dtype
    with float64():
        wide = [np.asarray(x, np.float64) for x in (q, k, v, g)]
        want, pull = jax.vjp(lambda *x: reference(*x, **params), *wide[:3])
        grads = pull(wide[3])
    limit = {"bfloat16": 2e-2, "float16": 3e-3}[dtype]
    pairs = [
        (out, want),
        (alone, want),
        *zip((back[x] for x in "qkv"), grads, strict=True),
    ]
    for got, exact in pairs:
        exact = np.asarray(exact)
        gap = np.linalg.norm(np.asarray(got, np.float64) - exact)
        assert gap <= limit * np.linalg.norm(exact)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs cuDNN")
def test_an_ordinary_program_runs_on_it() -> None:
    q, k, v = (
        jax.random.normal(jax.random.key(i), (4, 1024, 4, 64)).astype(jnp.bfloat16)
        for i in range(3)
    )
    step = jax.value_and_grad(
        lambda *x: causal(*x).astype(jnp.float32).sum(), (0, 1, 2)
    )
    for fn in (causal, step, jax.vmap(causal)):
        args = [x[None] for x in (q, k, v)] if fn not in (causal, step) else (q, k, v)
        fast = rewriter.optimize(fn, implementation={"attention": "cudnn"})
        (site,) = fast.report(*args).sites
        assert site.kernel == "cudnn"
        assert "cudnn" in fast.lower(*args).as_text().lower()
        for a, b in zip(
            jax.tree.leaves(fast(*args)), jax.tree.leaves(fn(*args)), strict=True
        ):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)


EMPTY = ("nan", "zero", "mean")


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs cuDNN")
@pytest.mark.parametrize("window", [(None, None), (None, 0), (100, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", ["odd", "grouped", "more_queries"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_and_lengths_against_float64(
    name: str, shape: str, dtype: str, window: tuple
) -> None:
    b, t, s, n, heads, h = SHAPES[shape]
    b = 4
    sizes = ((b, t, n, h), (b, s, heads, h), (b, s, heads, h), (b, t, n, h))
    q, k, v, g = (
        jax.random.normal(jax.random.key(i), size).astype(dtype)
        for i, size in enumerate(sizes)
    )
    operands = {"q": q, "k": k, "v": v, **table(name, b, t, s, n, dtype)}
    for empty_rows in EMPTY:
        params = {"scale": h**-0.5, "window": window, "empty_rows": empty_rows}
        given = spec_of(registry().op("attention"), operands, params)
        verdict = cudnn.supports(given)
        if not verdict.ok:
            assert verdict.reasons[0].code == "window"
            return
        compared(operands, g, params, {"bfloat16": 2e-2, "float16": 3e-3}[dtype])
