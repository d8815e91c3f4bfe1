"""Losses on Hopper GPUs: what is taken, what it lowers to, numbers on a simulator."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.cross_entropy import hopper_rows
from rewriter.kernels.cross_entropy.hopper_rows import Form
from rewriter.kernels.linear_cross_entropy.chunks import Chunk
from rewriter.kernels.shared import hopper, work_stealing
from rewriter.ops import device
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from rewriter.site import site
from tests.support.kernels import simulator

INF = float("inf")
ONE_AT_A_TIME = threading.Lock()
"""XLA may call two independent kernels at once, and the simulator takes one."""
HOPPER = (("default", "hopper"),)
LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "log probabilities": {"of_log_probabilities": True},
    "all terms": {"scale": 0.5, "label_smoothing": 0.1, "z_loss": 0.01},
    "fewer classes": {"used": 1001, "outside": "zero"},
    "clipped labels": {"outside": "clip"},
    "zero outside": {"outside": "zero", "of_log_probabilities": True},
}


# ------------------------------------------------------------------ what it takes
def spec(
    shape: Any = (8, 16, 2048),
    dtype: str = "bfloat16",
    bias: str | None = None,
    **params: Any,
) -> Any:
    n, k, v = shape
    given = {
        "x": jax.ShapeDtypeStruct((n, k), dtype),
        "w": jax.ShapeDtypeStruct((k, v), dtype),
        "labels": jax.ShapeDtypeStruct((n,), "int32"),
    }
    if bias:
        given["bias"] = jax.ShapeDtypeStruct((v,), bias)
    return spec_of(registry().op("linear_cross_entropy"), given, params)


def test_supports() -> None:
    kernel = registry().kernel("linear_cross_entropy", "hopper")
    for given in (
        spec(), spec((3, 5, 50257)), spec(dtype="float32", z_loss=0.1),
        spec(bias="bfloat16"),
    ):  # fmt: skip
        assert kernel.supports(given).ok
    for given, why in (
        (spec((8, 16, 1000)), "1000 classes, fewer than 1024"),
        (spec(dtype="float64"), "x is float64"),
        (spec(soft_cap=30.0), "a soft cap is not supported"),
        (spec(reduced=True), "a vocabulary split over devices"),
        (spec(bias="float32"), "one dtype of 16 bits, got bfloat16, float32"),
        (spec(dtype="float32", bias="float32"), "one dtype of 16 bits, got float32"),
        (spec(bias="bfloat16", scale=0.5), "beside a scale of the product"),
    ):
        verdict = kernel.supports(given)
        assert not verdict.ok
        assert why in "; ".join(r.text for r in verdict.reasons)


@pytest.mark.parametrize("n", [256, 0])
def test_lowers_on_a_cpu(n: int) -> None:
    """A kernel for each block; none where there are no rows."""
    given = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((n, 64), (64, 2057))]
    labels = jax.ShapeDtypeStruct((n,), "int32")

    def loss(x, w, labels):
        logs = jax.nn.log_softmax((x @ w).astype(jnp.float32))
        return -jnp.take_along_axis(logs, labels[:, None], -1).mean()

    artifact = rewriter.export(
        jax.value_and_grad(loss, (0, 1)),
        platforms=("cuda",),
        implementation={"linear_cross_entropy": ["hopper", "xla"]},
    )(*given, labels)
    assert ("mosaic_gpu_v2" in artifact.manifest["custom_calls"]) == (n > 0)


@pytest.mark.skipif(not work_stealing.AVAILABLE, reason="jax has no such references")
def test_cotangents_take_the_place_of_logits() -> None:
    """The kernel has its input for a result, and XLA needs no copy of it."""
    shapes = {"x": (1024, 256), "w": (256, 5008), "labels": (1024,)}
    dtypes = {"labels": "int32"}
    given = {
        n: jax.ShapeDtypeStruct(s, dtypes.get(n, "bfloat16")) for n, s in shapes.items()
    }
    config = Chunk(1 << 20, 64, True, 128, True, 256)
    kernel = registry().kernel("linear_cross_entropy", "hopper")
    run = lambda given: kernel.together(
        **given, cotangent=jnp.ones(1024), config=config
    )
    text = jax.export.export(jax.jit(run), platforms=("cuda",))(given).mlir_module()
    calls = [line for line in text.splitlines() if "mosaic_gpu_v2" in line]
    assert sum("output_operand_alias" in line for line in calls) == 2


# ----------------------------------------------------------------------- numbers
def rows(v: int, end: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Rows of logits: usual, half of them -inf, all -inf, and one inf. Then NaN."""
    y = np.random.default_rng(seed).normal(size=(4, v)) * 3
    y[1, : end // 2], y[2], y[3, 7] = -INF, -INF, INF
    y[:, end:] = np.nan
    return y.astype(jnp.dtype(dtype))


SIZES = [
    (1024, 1000, 1),
    (2056, 2050, 1),
    (4104, 4100, 2),
    (9000, 8990, 8),
    (8192, 8192, 2),
]
LIMITS = {"float32": 2e-6, "bfloat16": 6e-3, "float16": 1e-3}


def check_rows(y: Any, form: Form, totals: Any, both: Any) -> None:
    """Both functions against float64; padding has no gradient."""
    first = np.array([1, 0.5, 1, 1], np.float32)
    by_total = np.array([0.1, 0, 0, 0], np.float32)
    each = np.array([0, 0.25, 0, 0.5], np.float32)
    top, weight, d = both(y, first, by_total, each)
    for again, once in zip(totals(y), (top, weight), strict=True):
        np.testing.assert_array_equal(np.asarray(again), np.asarray(once))
    wide = np.asarray(y, np.float64)[:, : form.end] * form.scale
    with np.errstate(all="ignore"):
        top = wide.max(1)
        shift = np.where(np.isfinite(top), top, 0)
        want = np.log(np.exp(wide - shift[:, None]).sum(1)) + shift
        lse = np.log(np.asarray(weight, "f8")) + np.asarray(top, "f8")
        np.testing.assert_allclose(lse, want, rtol=2e-6)
        share = first + by_total * want
        wanted = np.exp(wide - want[:, None]) * share[:, None] + each[:, None]
    d = np.asarray(d, np.float64)
    assert not d[:, form.end :].any()
    limit = LIMITS[str(y.dtype)]
    np.testing.assert_allclose(d[:2, : form.end], wanted[:2], limit, limit * 0.1)
    assert np.isnan(d[2, : form.end]).all()
    np.testing.assert_array_equal(d[3, : form.end] == 0.5, np.arange(form.end) != 7)


@pytest.mark.parametrize(("v", "end", "warpgroups"), SIZES)
def test_rows_simulated(v: int, end: int, warpgroups: int) -> None:
    for dtype, scale in (("bfloat16", 1.0), ("float32", 0.5), ("float16", 2.0)):
        form = Form(end, scale, (), warpgroups)
        with simulator.simulated_rows_of_logits():
            check_rows(
                rows(v, end, dtype),
                form,
                lambda y, form=form: hopper_rows.totals(y, form),
                lambda *y, form=form: hopper_rows.totals_and_gradients(*y, form),
            )
            check_in_place(rows(v, end, dtype), form)


def check_in_place(y: Any, form: Form) -> None:
    """The same numbers as in an array of their own."""
    given = [np.full(4, a, np.float32) for a in (0.5, 0.1, 0.25)]
    call = functools.partial(hopper_rows.totals_and_gradients, form=form)
    for own, other in zip(call(y, *given, in_place=True), call(y, *given), strict=True):
        np.testing.assert_array_equal(own.astype("f4"), other.astype("f4"))


def on_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels by callbacks, in programs that JAX traces."""

    def called(kernel: Any) -> Any:
        def host(form: Form, how: Any, *arrays: Any) -> Any:
            with ONE_AT_A_TIME, simulator.simulated_rows_of_logits():
                made = kernel(*map(np.asarray, arrays), form, **how)
            return jax.tree.map(np.ascontiguousarray, made)

        def call(y: jax.Array, *more: Any, **how: Any) -> Any:
            *given, form = more
            out = jax.ShapeDtypeStruct(y.shape[:1], jnp.float32)
            d = jax.ShapeDtypeStruct(y.shape, y.dtype)
            like = (out, out, d) if given else (out, out)
            return jax.pure_callback(lambda *a: host(form, how, *a), like, y, *given)

        return call

    for name in ("totals", "totals_and_gradients"):
        monkeypatch.setattr(hopper_rows, name, called(getattr(hopper_rows, name)))


def drawn(n: int, k: int, v: int, dtype: str) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(v), 3)
    return {
        "x": jax.random.normal(keys[0], (n, k)).astype(dtype),
        "w": (jax.random.normal(keys[1], (k, v)) * 2 * k**-0.5).astype(dtype),
        "labels": jax.random.randint(keys[2], (n,), -1, v).at[0].set(v + 3),
    }


def check_loss(how: dict[str, Any], given: Any, config: Chunk, limit: float) -> None:
    """Losses and gradients, together and one after the other, against float64."""
    kernel = registry().kernel("linear_cross_entropy", "hopper")
    op, up = kernel_op(), jnp.linspace(0.1, 1, given["labels"].size)
    floats = {n: a for n, a in given.items() if n in ("x", "w", "bias")}
    rest = {n: a for n, a in given.items() if n not in floats}
    more = {"config": config, **how}
    made = jax.jit(
        lambda floats: kernel.together(**floats, **rest, cotangent=up, **more)
    )(floats)
    alone, saved = kernel.forward(**given, residuals=True, **more)
    later = kernel.backward(
        **given, out=None, residuals=saved, cotangent=up, **more
    )  # the plain kernel's, from the sums
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(a, jnp.float64) for n, a in floats.items()}
        of = lambda floats: op.reference(**floats, **rest, **how)
        want, back = jax.vjp(of, wide)
        (wanted,) = back(jnp.asarray(up, jnp.float64))
        want, wanted = np.asarray(want), {n: np.asarray(g) for n, g in wanted.items()}
    np.testing.assert_allclose(made[0], want, limit, limit)
    np.testing.assert_allclose(alone, want, limit, limit)
    if np.isnan(want).any():
        return
    for name, exact in wanted.items():
        for found in (made[1], later):
            assert found[name].shape == exact.shape
            error = np.linalg.norm(np.asarray(found[name], np.float64) - exact)
            assert error <= limit * np.linalg.norm(exact), name


def kernel_op() -> Any:
    return registry().op("linear_cross_entropy")


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_simulated(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows in blocks of four; classes are padded to 1152."""
    on_the_simulator(monkeypatch)
    given = drawn(8, 4, 1037, "float32")
    config = Chunk(4 * 1152 * 4, 4, True, 128, True)
    check_loss(LOSSES[loss], given, config, 2e-5)


@pytest.mark.parametrize(
    ("loss", "blocks"),
    [("plain", 1), ("plain", 2), ("fewer classes", 2), ("zero outside", 2),
     ("label_smoothing", 2)],
)  # fmt: skip
def test_biases_simulated(
    loss: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bias is a row of weights, also where it is -inf; its gradient is a sum."""
    on_the_simulator(monkeypatch)
    given = with_bias(drawn(8, 4, 1037, "bfloat16"))
    config = Chunk(8 // blocks * 1152 * 2, 4, True, 128, True)
    check_loss(LOSSES.get(loss, {loss: 0.1}), given, config, 2e-2)


def with_bias(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The same with a bias, which hides the class of a number that is no label."""
    x, v = given["x"], given["w"].shape[1]
    bias = jax.random.normal(jax.random.key(3), (v,)).astype(x.dtype)
    hidden = jnp.setdiff1d(jnp.arange(v), given["labels"])[5]
    return {**given, "bias": bias.at[hidden].set(-INF)}


@pytest.mark.parametrize("loss", ["plain", "all terms", "zero outside"])
def test_two_labels_simulated(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows have one class twice, and some a label that is no class."""
    on_the_simulator(monkeypatch)
    given = with_another_label(drawn(8, 4, 1037, "float32"))
    outside = {"outside": "zero", **LOSSES[loss]}
    config = Chunk(4 * 1152 * 4, 4, True, 128, True)
    check_loss(outside, given, config, 2e-5)


def with_another_label(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
    labels = given["labels"]
    other = jnp.roll(labels, 1).at[3:5].set(labels[3:5])
    share = jnp.linspace(0, 1, labels.size, dtype=jnp.float32)
    return given | {"other": other, "share": share}


@pytest.mark.parametrize("beside", [0, 2])
@pytest.mark.parametrize("loss", ["plain", "all terms", "clipped labels"])
def test_cotangents_in_place_of_logits_simulated(
    loss: str, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_simulator(monkeypatch)
    given = drawn(8, 4, 1040, "float32")
    config = Chunk(3 * 1040 * 4, 4, True, 128, True, beside)
    check_loss(LOSSES[loss], given, config, 2e-5)


# ------------------------------------------------------------------------ on a GPU
on_hopper = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not hopper.runs_on(device.attached()).ok,
    reason="needs a Hopper GPU",
)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("warpgroups", [4, 8])
@pytest.mark.parametrize("size", [(1024, 1000), (50304, 50257), (128256, 128256)])
def test_rows(size: tuple[int, int], warpgroups: int, dtype: str) -> None:
    form = Form(size[1], 0.5, (), warpgroups)
    check_rows(
        jnp.asarray(rows(*size, dtype)),
        form,
        jax.jit(lambda y: hopper_rows.totals(y, form)),
        jax.jit(lambda *y: hopper_rows.totals_and_gradients(*y, form)),
    )
    y = jnp.asarray(rows(*size, dtype))
    given = [jnp.full(4, a, jnp.float32) for a in (0.5, 0.1, 0.25)]
    call = functools.partial(hopper_rows.totals_and_gradients, form=form)
    of = lambda in_place: jax.jit(functools.partial(call, in_place=in_place))(y, *given)
    for own, other in zip(of(True), of(False), strict=True):
        np.testing.assert_array_equal(own.astype("f4"), other.astype("f4"))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str, dtype: str) -> None:
    given = drawn(1024, 256, 5003, dtype)
    config = Chunk(256 * 5120 * 4, 64, True, 128, True)
    limit = 2e-2 if dtype == "bfloat16" else 2e-3
    with jax.default_matmul_precision("highest"):
        check_loss(LOSSES[loss], given, config, limit)
        check_loss(LOSSES[loss], with_another_label(given), config, limit)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("loss", ["plain", "fewer classes", "clipped labels"])
@pytest.mark.parametrize("size", [(1024, 256, 5003), (512, 768, 30522)])
def test_biases(size: tuple[int, int, int], loss: str) -> None:
    given = with_bias(drawn(*size, "bfloat16"))
    config = Chunk(256 * -(-size[2] // 128) * 128 * 2, 64, True, 128, True)
    check_loss(LOSSES[loss], given, config, 2e-2)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("beside", [0, 256, 704, 768])
@pytest.mark.parametrize("one_kernel", [False, True])
@pytest.mark.parametrize("v", [5056, 36864])
def test_logits_in_place_of_gradients(v: int, one_kernel: bool, beside: int) -> None:
    given = drawn(1024, 256, v, "bfloat16")
    config = Chunk(1 << 20, 64, True, 128, True, beside, one_kernel=one_kernel)
    check_loss({"z_loss": 0.01, "outside": "clip"}, given, config, 2e-2)


@pytest.mark.gpu
@on_hopper
def test_many_rows_are_the_same_each_time() -> None:
    given = drawn(4096, 512, 50257, "bfloat16")
    call = jax.jit(
        jax.value_and_grad(
            lambda x, w: site.bind(
                kernel_op(), {"x": x, "w": w, "labels": given["labels"]},
                {"outside": "clip"}, HOPPER,
            ).mean(),
            (0, 1),
        )
    )  # fmt: skip
    first = jax.tree.map(np.asarray, call(given["x"], given["w"]))
    for _ in range(5):
        again = jax.tree.map(np.asarray, call(given["x"], given["w"]))
        jax.tree.map(np.testing.assert_array_equal, first, again)
