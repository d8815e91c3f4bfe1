"""Group norms as sites: every transformation, large means, and kernels for Hopper."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.group_norm import hopper, hopper_config, xla
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from rewriter.site import site
from tests import slow
from tests.support import transforms
from tests.support.kernels import extreme_rows, simulator

OP = registry().op("group_norm")

CASES: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "last": (
        {"x": (3, 16, 2, 3, 1), "scale": (2, 3), "bias": (2, 3)}, {"eps": 1e-3},
    ),
    "first": ({"x": (3, 1, 2, 3, 8), "scale": (2, 3)}, {"eps": 1e-3}),
    "few positions": ({"x": (3, 3, 2, 3, 2), "bias": (2, 3)}, {"eps": 1e-3}),
    "traced": ({"x": (3, 16, 2, 1, 1), "scale": (2, 1), "epsilon": ()}, {}),
    "one sample": ({"x": (8, 2, 3, 1)}, {"eps": 1e-3}),
}  # fmt: skip

FEW = ("jit_grad", "jvp", "vmap_of_grad", "grad_of_vmap_first")


def bound(case: str, dtype: str) -> tuple[Any, Any, list[jax.Array]]:
    shapes, params = CASES[case]
    specs = {n: jax.ShapeDtypeStruct(s, dtype) for n, s in shapes.items()}
    operands = OP.sample(jax.random.key(1), specs, params)
    kernels = (("default", "memory_bounded"),)

    def ours(*args: jax.Array) -> jax.Array:
        return site.bind(OP, dict(zip(shapes, args, strict=True)), params, kernels)

    def plain(*args: jax.Array) -> jax.Array:
        return OP.reference(**dict(zip(shapes, args, strict=True)), **params)

    return ours, plain, [operands[n] for n in shapes]


@pytest.mark.once
@pytest.mark.parametrize("transform", transforms.EACH)
def test_every_transform_agrees_with_float64(transform: str) -> None:
    transforms.check(transform, *bound("last", "float32"))


@pytest.mark.parametrize("transform", FEW)
@pytest.mark.parametrize("case", slow.first(2, [c for c in CASES if c != "last"]))
def test_layouts_and_operands_agree_with_float64(case: str, transform: str) -> None:
    transforms.check(transform, *bound(case, "float32"))


@pytest.mark.once
@pytest.mark.parametrize("transform", FEW)
def test_bfloat16_is_as_accurate_as_the_reference(transform: str) -> None:
    transforms.check(transform, *bound("last", "bfloat16"))


# ----------------------------------------------------------------- exact numbers
def drawn(
    shape: tuple[int, ...], dtype: str, mean: float = 0.5
) -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(0)
    made = {
        "x": rng.normal(mean, 1.0, shape), "scale": rng.normal(1.0, 0.2, shape[-3:-1]),
        "bias": rng.normal(0.0, 0.2, shape[-3:-1]), "epsilon": np.array(1e-3),
    }  # fmt: skip
    given = {n: jnp.asarray(v, dtype) for n, v in made.items()}
    return given, jnp.asarray(rng.normal(size=shape), dtype)


def exact(given: dict[str, Any], up: Any) -> dict[str, np.ndarray]:
    """The result and all cotangents in float64, from their definitions."""
    x, scale, bias, epsilon, up = (np.asarray(v, "f8") for v in (*given.values(), up))
    axes, size = (-4, -2, -1), x.shape[-4] * x.shape[-2] * x.shape[-1]
    mean = lambda y: y.mean(axes, keepdims=True)
    r = 1 / np.sqrt(mean((x - mean(x)) ** 2) + epsilon)
    n = (x - mean(x)) * r
    g = up * scale[..., None]
    samples = (*range(x.ndim - 4), x.ndim - 4, x.ndim - 1)
    return {
        "out": n * scale[..., None] + bias[..., None],
        "x": r * (g - mean(g) - n * mean(g * n)),
        "scale": (up * n).sum(samples),
        "bias": up.sum(samples),
        "epsilon": -0.5 * size * (mean(g * n) * r * r).sum(),
    }


def made_by(kernel: Any, given: dict[str, Any], up: Any) -> dict[str, Any]:
    out, kept = kernel.forward(**given, residuals=True)
    grads = kernel.backward(**given, out=None, residuals=kept, cotangent=up)
    return {"out": out, **grads}


def compare(made: dict[str, Any], given: Any, up: Any, tolerance: float) -> None:
    for name, want in exact(given, up).items():
        size = max(1.0, np.abs(want).max())
        error = np.abs(np.asarray(made[name], "f8") - want).max()
        assert error <= tolerance * size, name


@pytest.mark.parametrize("shape", [(2, 512, 2, 3, 1), (2, 1, 2, 3, 512)])
def test_digits_stay_where_the_mean_is_large(shape: tuple[int, ...]) -> None:
    given, up = drawn(shape, "float32", mean=2000.0)
    made = jax.jit(lambda given, up: made_by(xla.KERNEL, given, up))(given, up)
    compare(made, given, up, 2e-4)
    mean, square = (
        jnp.mean(y, (-4, -2, -1)) for y in (given["x"], given["x"] * given["x"])
    )
    lost = jnp.abs(square - mean * mean - 1)
    assert float(lost.max()) > 0.05  # as flax computes it


def test_one_number_far_from_all_others_takes_few_digits() -> None:
    x = np.random.default_rng(1).normal(size=(1, 4096, 1, 1, 1)).astype("f4")
    x[0, 0] = 1e4
    _, variance = xla.statistics(jnp.asarray(x))
    assert abs(float(variance.item()) / x.astype("f8").var() - 1) < 2e-5


def test_extreme_numbers_are_as_exact_as_the_formula() -> None:
    @functools.partial(jax.jit, static_argnums=2)
    def run(given: Any, up: Any, eps: float) -> Any:
        x, up = (y[:, :, None, None, None] for y in (given["x"], up * given["scale"]))
        out, kept = xla.KERNEL.forward(x=x, eps=eps, residuals=True)
        grads = xla.backward(x=x, out=None, residuals=kept, cotangent=up)
        both = {"out": out[..., 0, 0, 0] * given["scale"], "x": grads["x"]}
        return {n: y.reshape(given["x"].shape) for n, y in both.items()}

    extreme_rows.check("layer_norm", 256, run)


def test_instance_norm_of_known_numbers() -> None:
    x = jnp.array([[1.0, 5.0], [3.0, 5.0]])[None, :, :, None, None]
    out = site.bind(OP, {"x": x}, {"eps": 3.0}, (("default", "memory_bounded"),))
    assert jnp.allclose(out[0, :, :, 0, 0], jnp.array([[-0.5, 0.0], [0.5, 0.0]]))


# ---------------------------------------------------------------- on Hopper GPUs
def spec(shape: tuple[int, ...], dtype: str = "bfloat16", **params: Any) -> Any:
    given = {
        "x": jax.ShapeDtypeStruct(shape, dtype),
        "scale": jax.ShapeDtypeStruct(shape[-3:-1], "float32"),
    }
    return spec_of(OP, given, params)


def test_what_the_hopper_kernel_takes() -> None:
    for taken in ((8, 4096, 32, 10, 1), (64, 32, 4, 1), (2, 3, 256, 1, 64, 1)):
        assert hopper.KERNEL.supports(spec(taken)).ok
    for given, why in (
        (spec((8, 1, 32, 10, 4096)), "positions stand behind the channels"),
        (spec((8, 49, 32, 10, 1)), "49 positions of 320 channels"),
        (spec((8, 64, 32, 4, 1), "float64"), "x is float64"),
        (spec((0, 64, 32, 4, 1)), "holds no numbers"),
        (spec((1 << 9, 1 << 12, 32, 32, 1)), "2^31"),
    ):
        verdict = hopper.KERNEL.supports(given)
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok


SIMULATED = {
    "several teams": ((2, 64, 4, 8, 1), "float32"),
    "channels that are not 128": ((2, 32, 32, 10, 1), "float32"),
    "one channel in a group": ((1, 2, 48, 64, 1, 1), "bfloat16"),
    "many steps": ((1, 704, 1, 128, 1), "float16"),
}


@pytest.mark.parametrize("case", SIMULATED)
def test_simulated(case: str) -> None:
    """The kernel's own code, a Python thread per warpgroup."""
    shape, dtype = SIMULATED[case]
    given, up = drawn(shape, dtype)
    with simulator.simulated_norms():
        made = made_by(hopper.KERNEL, given, up)
    compare(
        made, given, up, {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    )


def test_work_is_shared_evenly() -> None:
    for shape in ((8, 4096, 32, 10, 1), (2, 1 << 18, 32, 4, 1), (300, 64, 8, 16, 1)):
        work = hopper_config.work_of(shape, ["bfloat16"])
        assert work is not None
        assert work.rows == work.steps * work.teams * work.blocks
        assert work.chunks * work.vector <= hopper_config.COLUMNS


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lowers_on_a_cpu(dtype: str) -> None:
    given, up = jax.eval_shape(lambda: drawn((8, 256, 32, 10, 1), dtype))
    call = jax.jit(lambda given, up: made_by(hopper.KERNEL, given, up))
    exported = jax.export.export(call, platforms=["cuda"])(given, up)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 2


@pytest.mark.parametrize(
    ("shape", "forward", "both"),
    [
        ((8, 64, 64, 320), "hopper", "hopper"),
        ((2, 512, 512, 128), "xla", "xla"),
        ((2, 32, 32, 640), "xla", "xla"),
    ],
)
def test_what_is_chosen_on_hopper_gpus(
    shape: tuple[int, ...], forward: str, both: str
) -> None:
    channels = jax.ShapeDtypeStruct(shape[-1:], "float32")
    given = jax.ShapeDtypeStruct(shape, "bfloat16"), channels, channels
    gradient = jax.grad(lambda *a: jnp.sum(norm(*a).astype("float32") ** 2), (0, 1, 2))
    for program, kernel in ((norm, forward), (gradient, both)):
        (site,) = rewriter.explain(program, target="h200", tune="off")(*given).sites
        assert (site.op, site.kernel) == ("group_norm", kernel)
    (site,) = rewriter.explain(norm, target="a100", tune="off")(*given).sites
    assert site.kernel == "xla"


# ------------------------------------------------------------- in whole programs
def norm(x: Any, scale: Any, bias: Any) -> Any:
    y = x.astype("float32").reshape(*x.shape[:-1], 4, -1)
    mean, var = y.mean((1, 2, 4), keepdims=True), y.var((1, 2, 4), keepdims=True)
    y = (y - mean) * jax.lax.rsqrt(var + 1e-5)
    return jax.nn.silu((y.reshape(x.shape) * scale + bias).astype(x.dtype))


def test_exported_with_gradients() -> None:
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=s), "f4") for s in ((2, 4, 4, 8), 8, 8)]
    both = jax.value_and_grad(lambda *a: jnp.sum(norm(*a) ** 2), (0, 1, 2))
    forced = {"group_norm": "memory_bounded"}
    artifact = rewriter.export(both, platforms=("cpu", "tpu"), implementation=forced)(
        *given
    )
    assert [s["op"] for s in artifact.manifest["sites"]] == ["group_norm"]
    made, want = artifact.call(*given), jax.jit(both)(*given)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_symbolic_batch_is_exported() -> None:
    (batch,) = jax.export.symbolic_shape("b")
    given = [jax.ShapeDtypeStruct(s, "f4") for s in ((batch, 4, 4, 8), (8,), (8,))]
    forced = {"group_norm": "memory_bounded"}
    artifact = rewriter.export(norm, platforms=("cpu",), implementation=forced)(*given)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 4, 8)), "f4")
    scale = jnp.arange(8.0)
    made = artifact.call(x, scale, scale)
    np.testing.assert_allclose(made, norm(x, scale, scale), rtol=2e-5, atol=2e-5)
