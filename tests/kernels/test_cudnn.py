"""cuDNN's attention: what it is given, and its numbers where there is an NVIDIA GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernel import Spec, spec_of
from rewriter.kernels.attention import cudnn
from rewriter.kernels.attention.reference import reference
from rewriter.registry import registry


def spec(dtype: Any = jnp.bfloat16, more: tuple[str, ...] = (), **params: Any) -> Spec:
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), dtype)
    operands = {"q": x, "k": x, "v": x}
    operands |= {n: jax.ShapeDtypeStruct((4,), jnp.float32) for n in more}
    return spec_of(registry().op("attention"), operands, params)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(jnp.float32), "16-bit"),
        (spec(more=("alibi",)), "not given alibi"),
        (spec(more=("sinks",)), "not given sinks"),
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
        assert "without keys" in cudnn.supports(given).reasons[0].text
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
    with jax.enable_x64(True):
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
        fast = rewriter.optimize(fn)
        (site,) = fast.report(*args).sites
        assert site.kernel == "cudnn"
        assert "cudnn" in fast.lower(*args).as_text().lower()
        for a, b in zip(
            jax.tree.leaves(fast(*args)), jax.tree.leaves(fn(*args)), strict=True
        ):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)
