"""Attention on Hopper: results and weights that keep more digits than the operands."""

# ruff: noqa: E501  (one case per line reads best)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention import hopper, hopper_decode
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.ops.kernel import Spec
from rewriter.ops.registry import registry
from tests.kernels.attention.test_hopper import (
    CAUSAL,
    H200,
    error,
    exact,
    exact_gradients,
    needs_hopper,
    operands,
    spec,
)
from tests.support.kernels import simulator

QK, PV = "btnh,bsnh->bnts", "bnts,bsnh->btnh"
F32 = jnp.float32
ROUNDED, KEPT = {"out_dtype": "float32"}, {"out_dtype": "float32", "weights": "default"}
LIMITS = {"rounded": 2e-3, "kept": 5e-6, "gradients": 4e-3}
"""Relative errors of results whose weights are rounded or kept, and of gradients."""


# ------------------------------------------------------------- what programs write
def scores(q: Any, k: Any, wide: bool = True) -> Any:
    found = jnp.einsum(QK, q, k, preferred_element_type=F32 if wide else None)
    return found * q.shape[-1] ** -0.5


def causal(x: Any) -> Any:
    return jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -jnp.inf)


def late(q: Any, k: Any, v: Any) -> Any:
    """Divided by the sums behind the product."""
    x = scores(q, k)
    weights = jnp.exp(x - x.max(-1, keepdims=True))
    made = jnp.einsum(PV, weights.astype(v.dtype), v, preferred_element_type=F32)
    return made / weights.sum(-1).swapaxes(1, 2)[..., None]


def plain(
    rounds: bool, out: Any = None, first: Any = scores, **more: Any
) -> Callable[..., Any]:
    """Attention that rounds its weights to v's dtype or not, and casts its result."""

    def run(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(first(q, k).astype(F32))
        made = jnp.einsum(PV, weights.astype(v.dtype) if rounds else weights, v, **more)
        return made if out is None else made.astype(out)

    return run


def wide(out: Any = None, cast: tuple[int, ...] = (0, 1, 2)) -> Callable[..., Any]:
    """Attention of operands of which some are cast to float32."""

    def run(*given: Any) -> Any:
        q, k, v = (x.astype(F32) if i in cast else x for i, x in enumerate(given))
        return plain(False, out)(q, k, v)

    return run


BF16, PREFERRED = jnp.bfloat16, {"preferred_element_type": F32}
SPELLINGS: dict[str, tuple[Callable[..., Any], str, str | None]] = {
    "16 bits": (plain(True, first=lambda q, k: scores(q, k, False)), "bfloat16", None),
    "float32 softmax": (plain(True), "bfloat16", None),
    "float32 result": (plain(True, **PREFERRED), "float32", None),
    "float32 result, cast": (plain(True, BF16, **PREFERRED), "bfloat16", None),
    "float32 result, cast to float16": (plain(True, jnp.float16, **PREFERRED), "float16", None),
    "float32 weights": (plain(False), "float32", "default"),
    "float32 weights, preferred": (plain(False, **PREFERRED), "float32", "default"),
    "float32 weights, high": (plain(False, precision="high"), "float32", "high"),
    "float32 weights, highest": (plain(False, precision="highest"), "float32", "highest"),
    "float32 weights, highest, cast": (plain(False, BF16, precision="highest"), "bfloat16", None),
    "float32 weights, cast": (plain(False, BF16), "bfloat16", None),
    "all cast to float32": (wide(), "float32", "default"),
    "all cast to float32 and back": (wide(BF16), "bfloat16", None),
    "q and k cast": (wide(None, (0, 1)), "float32", "default"),
    "v cast": (wide(None, (2,)), "float32", "default"),
    "causal": (plain(False, first=lambda q, k: causal(scores(q, k))), "float32", "default"),
    "divided late": (late, "float32", None),
    "divided late, cast": (lambda *x: late(*x).astype(BF16), "bfloat16", None),
    "transposed before the cast": (
        lambda *x: wide()(*x).swapaxes(1, 2).reshape(2, 4, -1).astype(BF16), "bfloat16", None,
    ),
    "cast, and used before": (
        lambda *x: (lambda y: (y, y.astype(BF16)))(wide()(*x)), "float32", "default",
    ),
    "cast twice": (
        lambda *x: (lambda y: (y.astype(BF16), y.astype(jnp.float16)))(wide()(*x)), "float32", "default",
    ),
}  # fmt: skip
X = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)


@pytest.mark.parametrize("name", SPELLINGS)
def test_what_programs_keep_is_read(name: str) -> None:
    """The result's dtype, once it is rounded, and how exactly v is multiplied."""
    run, out, weights = SPELLINGS[name]
    (site,) = rewriter.explain(run)(X, X, X).sites
    assert (site.params["out_dtype"], site.params.get("weights")) == (out, weights)


@pytest.mark.parametrize("name", ["all cast to float32 and back", "divided late, cast"])
def test_gradients_of_what_is_cast_are_found(name: str) -> None:
    run = SPELLINGS[name][0]
    loss = lambda *x: run(*x).astype(F32).sum()
    (site,) = rewriter.explain(jax.grad(loss, (0, 1, 2)))(X, X, X).sites
    assert site.backward
    assert site.params["out_dtype"] == "bfloat16"


def test_each_spelling_gets_a_kernel_on_a_hopper_gpu() -> None:
    """But for weights at the highest precision, and for a result of another 16 bits."""
    x = jax.ShapeDtypeStruct((2, 2048, 16, 64), jnp.bfloat16)
    for name, (run, out, weights) in SPELLINGS.items():
        if "transposed" in name:
            continue  # of a fixed size
        (site,) = rewriter.explain(run, target="h100")(x, x, x).sites
        refused = weights == "highest" or out == "float16"
        assert (site.kernel in ("cudnn", "hopper")) != refused, (name, site.kernel)


# ------------------------------------------------------------------ what it takes
MIXED = {"q": BF16, "k": F32, "v": BF16}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(jnp.float16, out_dtype="float32"), "cotangents are rounded to float16"),
        (spec(out_dtype="float16"), "a result of float16"),
        (spec(out_dtype="float32", weights="highest"), "highest precision"),
        (
            Spec(
                "attention", tuple((n, (2, 8, 4, 64)) for n in MIXED),
                tuple((n, str(jnp.dtype(x))) for n, x in MIXED.items()), (),
            ),
            "not q bfloat16, k float32, v bfloat16",
        ),
    ],
)  # fmt: skip
def test_what_it_refuses(given: Spec, why: str) -> None:
    for kernel in (hopper, hopper_decode):
        (reason,) = kernel.supports(given).reasons[:1]
        assert why in reason.text


@pytest.mark.parametrize("h", [16, 64, 128, 192, 256])
def test_two_parts_of_weights_fit(h: int) -> None:
    for window in ((None, None), CAUSAL):
        given = spec(shape=(1, 4096, 2, h), window=window, **KEPT)
        assert hopper.supports(given).ok
        tiles = hopper.default(given, H200)
        assert hopper.fits(tiles, given, H200).ok, tiles
    assert not hopper.fits(Tiles(128, 2, 3), spec(**KEPT), H200).ok  # registers
    assert hopper.fits(Tiles(128, 2, 3), spec(), H200).ok


# -------------------------------------------------------------------- its numbers
@pytest.mark.parametrize("more", [ROUNDED, KEPT], ids=["rounded", "kept"])
@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ((1, 203, 181, 2, 1, 32, 16), {"window": CAUSAL}),
        ((1, 130, 140, 2, 1, 72, 72), {}),
    ],
)
def test_its_code_run_by_threads(
    shape: tuple[int, ...], given: dict[str, Any], more: dict[str, str]
) -> None:
    q, k, v, _ = (np.asarray(x) for x in operands(shape, "bfloat16"))
    up = np.asarray(operands(shape, "float32")[3])
    given = {**given, "scale": shape[5] ** -0.5}
    both = {"q": q, "k": k, "v": v, **given, **more}
    with simulator.simulated():
        out, kept = hopper.forward(**both, residuals=True)
        grads = hopper.backward(**both, out=out, residuals=kept, cotangent=up)
    assert out.dtype == np.float32
    want = exact_gradients(q, k, v, up, **given)
    assert error(out, want[0]) <= LIMITS["kept" if "weights" in more else "rounded"]
    for name, x in zip("qkv", want[1:], strict=True):
        assert grads[name].dtype == q.dtype
        assert error(grads[name], x) <= LIMITS["gradients"]


@pytest.mark.parametrize("more", [ROUNDED, KEPT], ids=["rounded", "kept"])
def test_few_queries_run_by_threads(more: dict[str, str]) -> None:
    q, k, v, _ = (
        np.asarray(x) for x in operands((2, 1, 200, 8, 2, 64, 64), "bfloat16")
    )
    given = {"scale": 0.125, **more}
    config = hopper_decode.Split(64, 2, 2, 3)
    with simulator.simulated_decode():
        out = hopper_decode.forward(q=q, k=k, v=v, config=config, **given)
    assert out.dtype == np.float32
    want = exact(*map(jnp.asarray, (q, k, v)), **given)
    assert error(out, want) <= LIMITS["kept" if "weights" in more else "rounded"]


@pytest.mark.parametrize("more", [ROUNDED, KEPT], ids=["rounded", "kept"])
@pytest.mark.parametrize(("t", "h"), [(257, 64), (256, 256), (200, 72)])
def test_it_is_lowered_without_a_gpu(t: int, h: int, more: dict[str, str]) -> None:
    x = jax.ShapeDtypeStruct((2, t, 4, h), jnp.bfloat16)
    tiles = hopper.default(spec(shape=x.shape, **more), H200)
    run = lambda x: hopper.forward(q=x, k=x, v=x, residuals=True, config=tiles, **more)
    made = jax.export.export(jax.jit(run), platforms=["cuda"])(x)
    assert [(a.shape, a.dtype) for a in made.out_avals] == [
        (x.shape, F32), ((2, 4, t), F32),
    ]  # fmt: skip


def test_others_multiply_weights_as_exactly_as_the_program() -> None:
    """The precision is JAX's while they are traced."""
    blocks = registry().kernel("attention", "memory_bounded").forward
    x = jnp.zeros(X.shape, X.dtype)
    for weights in (None, "default", "highest"):
        more = {} if weights is None else {"weights": weights}
        text = str(
            jax.make_jaxpr(lambda x, more=more: blocks(q=x, k=x, v=x, **more))(x)
        )
        assert ("HIGHEST" in text) == (weights == "highest")


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", SPELLINGS)
def test_programs_are_as_exact_as_written(name: str) -> None:
    """Of results, and of gradients, against float64: at most twice the error."""
    run = SPELLINGS[name][0]
    q, k, v, _ = operands((2, 512, 512, 4, 4, 64, 64), "bfloat16")
    if name == "transposed before the cast":
        pytest.skip("of a fixed size")
    up = jax.random.normal(jax.random.key(9), q.shape)

    def both(q: Any, k: Any, v: Any) -> Any:
        first = lambda *x: jax.tree.leaves(run(*x))[0]
        out, back = jax.vjp(first, q, k, v)
        return out, *back(up.astype(out.dtype))

    fast = rewriter.optimize(both, implementation={"attention": "hopper"})
    if SPELLINGS[name][1:] in (("float32", "highest"), ("float16", None)):
        with pytest.raises(rewriter.KernelError, match=r"digits|cotangents"):
            fast.report(q, k, v)
        return
    assert {s.kernel for s in fast.report(q, k, v).sites} == {"hopper"}
    window = {"window": CAUSAL} if name == "causal" else {}
    want = exact_gradients(q, k, v, up, scale=0.125, **window)
    written, got = jax.jit(both)(q, k, v), fast(q, k, v)
    for before, after, x in zip(written, got, want, strict=True):
        assert before.dtype == after.dtype
        assert error(after, x) <= 2 * error(before, x) + 1e-6
