"""The losses over classes, as sites, under every transformation against float64."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.linear_cross_entropy import chunks as of_chunks
from rewriter.kernels.linear_cross_entropy import xla
from rewriter.ops.registry import registry
from rewriter.site import site
from tests import slow
from tests.support import transforms

KERNELS = (("default", "memory_bounded"),)
LINEAR = {"x": (6, 4), "w": (4, 11), "labels": (6,)}
BIASED = {**LINEAR, "bias": (11,)}
GIVEN = {"logits": (2, 3, 11), "labels": (2, 3)}
ALL = {"label_smoothing": 0.1, "z_loss": 0.01}
FEW = ("jit_grad", "jvp", "hessian", "vmap_of_grad", "grad_of_vmap_first")
NOT_FLOAT = {"vmap_one_operand", "vmap_last_axis"}


def _both(
    name: str,
    shapes: dict[str, tuple[int, ...]],
    params: dict[str, Any],
    dtype: str = "float32",
) -> tuple[Any, Any, list[jax.Array]]:
    op = registry().op(name)
    specs = {
        n: jax.ShapeDtypeStruct(s, "int32" if n == "labels" else dtype)
        for n, s in shapes.items()
    }
    params = {"out_dtype": None if dtype == "float32" else dtype, **params}
    operands = op.sample(jax.random.key(2), specs, params)

    def bound(*args: jax.Array) -> jax.Array:
        return site.bind(op, dict(zip(shapes, args, strict=True)), params, KERNELS)

    def plain(*args: jax.Array) -> jax.Array:
        wide = any(a.dtype == np.float64 for a in args)
        own = {**params, "out_dtype": None} if wide else params
        return op.reference(**dict(zip(shapes, args, strict=True)), **own)

    return bound, plain, [operands[n] for n in shapes]


BLOCKS = {
    "four rows": of_chunks.Chunk(4 * 4 * 11, least=4),
    "all rows": of_chunks.Chunk(),
    "four rows, padded": of_chunks.Chunk(4 * 4 * 16, 4, True, 8, True),
    "all rows, padded": of_chunks.Chunk(1 << 20, 4, True, 8, True),
    "classes, padded": of_chunks.Chunk(4 * 4 * 8, 4, False, 8, True),
    "in place": of_chunks.Chunk(9 * 4 * 4, least=4, beside=2),
    "by classes": of_chunks.Chunk(9 * 4 * 4, 4, beside=0, passing=3 * 4 * 4),
    "in place, one by one": of_chunks.Chunk(11 * 4, least=4, beside=0),
    "in place, all": of_chunks.Chunk(least=4, beside=9),
}
PADDED = ("four rows, padded", "classes, padded")


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four classes, and blocks of four rows."""
    monkeypatch.setattr(of_chunks, "DEFAULT", of_chunks.Chunk(4 * 4 * 4, least=4))


@pytest.mark.parametrize("transform", transforms.EACH)
def test_every_transform_of_a_linear_loss(transform: str, chunks: None) -> None:
    transforms.check(transform, *_both("linear_cross_entropy", BIASED, ALL))


@pytest.mark.parametrize("transform", slow.first(4, FEW))
def test_transforms_of_a_loss_of_logits(transform: str) -> None:
    transforms.check(transform, *_both("cross_entropy", GIVEN, ALL))


@pytest.mark.parametrize("outside", ["nan", "zero", "clip"])
def test_given_logits_of_fewer_classes(outside: str) -> None:
    """Others pick the fill, and have no gradients."""
    params = {**FEWER, "outside": outside}
    bound, plain, (logits, _) = _both("cross_entropy", GIVEN, params)
    labels = jnp.asarray([[0, 7, 8], [10, 11, -1]], jnp.int32)
    for f, g in ((bound, plain), (_gradient(bound), _gradient(plain))):
        np.testing.assert_allclose(f(logits, labels), g(logits, labels), rtol=2e-5)


def _gradient(loss: Any) -> Any:
    return jax.jit(jax.grad(lambda y, labels: jnp.nansum(loss(y, labels))))


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap_of_grad"])
def test_bfloat16_is_as_accurate_as_the_reference(transform: str, chunks: None) -> None:
    transforms.check(transform, *_both("linear_cross_entropy", LINEAR, {}, "bfloat16"))


SETTINGS = [
    dict(zip(("outside", "of_log_probabilities", *ALL), one, strict=True))
    for one in itertools.product(
        ("nan", "zero", "clip", "promise"), (False, True), (0.0, 0.2), (0.0, 0.03)
    )
]
HOT = {"outside": "zero", "of_log_probabilities": True, "whole_slopes": True}
SETTINGS += [{**HOT, "z_loss": z} for z in (0.0, 0.03)]
FEWER = {"used": 8, "fill": -1e4, "z_loss": 0.03}
SETTINGS += [
    {**FEWER, "outside": o, "of_log_probabilities": o == "zero"}
    for o in ("nan", "zero", "clip", "promise")
]
RNG = np.random.default_rng(3)
ROWS, K, V = 7, 5, 11
W, BIAS = RNG.normal(size=(K, V)), RNG.normal(size=V)
LABELS = np.array([0, 10, 3, 7, 4, 9, 1])
ODD = np.array([0, -1, 3, 11, -100, 9, 1000])
DRAWS = [
    (
        RNG.normal(size=(ROWS, K)) * size,
        labels if odd else RNG.integers(0, V, ROWS),
        RNG.normal(size=ROWS) if odd else np.full(ROWS, 1 / ROWS),
    )
    for size in (0.1, 1.0, 10.0)
    for odd, labels in ((False, LABELS), (True, ODD), (True, np.roll(ODD, 1)))
]


def _all_settings(of: Any, dtype: Any) -> Any:
    """A program that gives values and gradients of all settings."""

    def run(x, labels, cotangent):
        found = []
        arrays = x, jnp.asarray(W, dtype), jnp.asarray(BIAS, dtype)
        for k, params in enumerate(SETTINGS):
            more = {**params, "scale": 0.5, "soft_cap": 2.0 if k % 2 else 0.0}
            out, back = jax.vjp(
                lambda x, w, bias, more=more: of(
                    x=x, w=w, labels=labels, bias=bias, **more
                ),
                *arrays,
            )
            found.append((out, *back(cotangent)))
        return found

    return jax.jit(run)


@pytest.mark.parametrize(
    "config", ["", *(pytest.param(n, marks=pytest.mark.slow) for n in PADDED)]
)
def test_every_setting_is_as_near_to_float64(
    config: str, chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients; labels that are no class give NaN where they should."""
    if config:
        monkeypatch.setattr(of_chunks, "DEFAULT", BLOCKS[config])
    op = registry().op("linear_cross_entropy")

    def bound(**given: Any) -> jax.Array:
        own = {n: given.pop(n) for n in op.names if n in given}
        return site.bind(op, own, given, KERNELS)

    kernel = _all_settings(bound, jnp.float32)
    got = [
        kernel(jnp.asarray(x, "float32"), jnp.asarray(t, "int32"), jnp.asarray(g, "f"))
        for x, t, g in DRAWS
    ]
    with jax.enable_x64(True):
        exact = _all_settings(op.reference, jnp.float64)
        true = [exact(*map(jnp.asarray, draw)) for draw in DRAWS]
    cases = 0
    for one, other in zip(got, true, strict=True):
        for params, ours, theirs in zip(SETTINGS, one, other, strict=True):
            for g, t in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(g, t, rtol=5e-5, atol=5e-5, err_msg=params)
            cases += 1
    assert cases >= 200


@pytest.mark.parametrize("columns", [[3], list(range(4)), list(range(11))])
@pytest.mark.parametrize("fill", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("config", ["", PADDED[0]])
def test_what_is_finite_stays_so(
    fill: float,
    columns: list[int],
    config: str,
    chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Biases of -inf hide classes; inf and NaN are seen in the loss."""
    if config:
        monkeypatch.setattr(of_chunks, "DEFAULT", BLOCKS[config])
    op = registry().op("linear_cross_entropy")
    bias = BIAS.copy()
    bias[columns] = fill
    given = {"x": DRAWS[3][0], "w": W, "bias": bias}
    operands = {n: jnp.asarray(a, jnp.float32) for n, a in given.items()}
    operands["labels"] = jnp.asarray(LABELS, jnp.int32)
    got = site.bind(op, operands, {"nan_at": "none"}, KERNELS)
    y = operands["x"] @ operands["w"] + operands["bias"]
    want = jax.nn.logsumexp(y, -1) - y[np.arange(7), LABELS]
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_gradients_hold_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_chunks, "DEFAULT", of_chunks.Chunk(1 << 23))
    op = registry().op("linear_cross_entropy")
    shapes = {"x": (512, 8), "w": (8, 32768), "labels": (512,)}
    args = {
        n: jax.ShapeDtypeStruct(s, "int32" if n == "labels" else "float32")
        for n, s in shapes.items()
    }

    def memory(f: Any) -> int:
        total = lambda x, w, labels: f(x=x, w=w, labels=labels).mean()
        run = jax.jit(jax.value_and_grad(total, (0, 1))).lower(*args.values())
        return run.compile().memory_analysis().temp_size_in_bytes

    bound = lambda **given: site.bind(op, given, {}, KERNELS)
    logits = 512 * 32768 * 4
    assert memory(op.reference) >= logits
    assert memory(bound) < 0.6 * logits


@pytest.mark.parametrize("shape", [(512, 1024, 32000), (1024, 64, 32000)])
def test_a_cpu_needs_a_tenth_of_the_memory(shape: tuple[int, int, int]) -> None:
    """Few rows have their logits where the gradient of the weights will be."""
    n, k, v = shape
    floats = [jax.ShapeDtypeStruct(s, "float32") for s in ((n, k), (k, v))]
    labels = jax.ShapeDtypeStruct((n,), "int32")

    def loss(x, w, labels):
        logs = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(logs, labels[:, None], -1).mean()

    def memory(f: Any) -> int:
        run = jax.jit(f).lower(*floats, labels).compile()
        return run.memory_analysis().temp_size_in_bytes

    forced = {"linear_cross_entropy": "memory_bounded"}
    for program in (loss, jax.value_and_grad(loss, (0, 1))):
        fast = rewriter.optimize(program, implementation=forced)
        assert 10 * memory(fast) <= memory(program)


@pytest.mark.parametrize("config", BLOCKS)
@pytest.mark.parametrize(
    ("rows", "swapped"), [(3, ()), (8, ()), (9, ()), (3, ("w",)), (9, ("w",))]
)
def test_results_and_gradients_together(
    rows: int, swapped: tuple[str, ...], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of four rows and a rest, or all at once; eleven classes, padded to 16."""
    monkeypatch.setattr(of_chunks, "NARROW", 4)
    monkeypatch.setattr(of_chunks, "DEFAULT", BLOCKS[config])
    op = registry().op("linear_cross_entropy")
    shapes = {**BIASED, "x": (rows, 4), "labels": (rows,)}
    _, plain, args = _both(op.name, shapes, {**ALL, "soft_cap": 3.0})
    x, w, labels, bias = args
    cotangent = jnp.cos(jnp.arange(rows, dtype=jnp.float32))
    more = {"label_smoothing": 0.1, "z_loss": 0.01, "soft_cap": 3.0}
    given = {"labels": labels, "swapped": swapped, **more}
    both = lambda **own: xla.together(**own, cotangent=cotangent, **given)
    out, grads = jax.jit(lambda x, w, bias: both(x=x, w=w, bias=bias))(x, w, bias)
    alone = jax.jit(lambda x, w, bias: xla.forward(x=x, w=w, bias=bias, **given))
    np.testing.assert_allclose(out, alone(x, w, bias), rtol=1e-6)
    want, back = jax.vjp(lambda x, w, bias: plain(x, w, labels, bias), x, w, bias)
    np.testing.assert_allclose(out, want, rtol=1e-5)
    for name, wanted in zip(("x", "w", "bias"), back(cotangent), strict=True):
        np.testing.assert_allclose(grads[name], wanted, rtol=2e-4, atol=2e-5)


def test_no_rows() -> None:
    shapes = {"x": (0, 4), "w": (4, 11), "labels": (0,)}
    bound, _, args = _both("linear_cross_entropy", shapes, {})
    grads = jax.grad(lambda x, w: bound(x, w, args[2]).sum(), (0, 1))(*args[:2])
    assert bound(*args).shape == (0,)
    assert [g.shape for g in grads] == [(0, 4), (4, 11)]
