"""Products of 8-bit rows and 8-bit matrices on Hopper: numbers, roundings, choice."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.quantized_dot import OP, eight_bits, eight_bits_estimate
from rewriter.kernels.quantized_dot.eight_bits import FEW, KERNEL, MIXED, Tiles
from rewriter.kernels.quantized_dot.reference import computed
from rewriter.kernels.shared.rounding import behind_in_float32
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from tests import slow
from tests.kernels.ragged.test_hopper_dot import on_hopper
from tests.support.arrays import stored
from tests.support.kernels import simulator

E4, E5, I8 = "float8_e4m3fn", "float8_e5m2", "int8"
HERE = device.named("h100")
EPILOGUE = "float32 *scale *rows +bias bfloat16"


@dataclasses.dataclass(frozen=True)
class Case:
    """A use of the kernel."""

    x: str = I8
    w: str = I8
    behind: str = EPILOGUE
    mode: str = "transposed"
    sums: str = "int32"
    joined: str = "float32"
    precision: str | None = None
    widen: str = ""

    @property
    def params(self) -> dict[str, Any]:
        names = ("widen", "mode", "behind", "sums", "precision")
        return {name: getattr(self, name) for name in names}

    def given(self, m: int = 200, k: int = 512, n: int = 192) -> dict[str, Any]:
        r = np.random.default_rng(0)
        made = {
            "x": stored(r, (m, k), self.x),
            "w": stored(r, (n, k) if self.mode == "transposed" else (k, n), self.w),
        }
        places = {"scale": ("w_scale", (1, n)), "rows": ("x_scale", (m,)),
                  "bias": ("bias", (n,))}  # fmt: skip
        for name, (operand, shape) in places.items():
            if name in self.behind:
                made[operand] = r.uniform(0.5, 1.5, shape).astype(self.joined)
        return made

    def spec(self, **sizes: int) -> Any:
        return spec_of(OP, self.given(**sizes), self.params)


def wanted(case: Case, given: dict[str, Any]) -> np.ndarray:
    """The result with the program's roundings, of sums on a CPU: in float32, or exact.

    XLA has no algorithm for all of the precisions.
    """
    how = {**case.params, "precision": None}
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(
            computed(**{n: jnp.asarray(x) for n, x in given.items()}, **how)
        )


FP8 = functools.partial(Case, E4, E4, sums="float32")
TAKEN = [
    Case(),
    Case(mode="forward", behind="float32 *rows *scale"),
    Case(behind=""),
    Case(behind="float32 *scale*rows bfloat16"),
    Case(behind="float32 *scale bfloat16 *rows", joined="bfloat16"),
    FP8(behind="*scale *rows +bias"),
    FP8(behind="*rows", precision="highest"),
    FP8(behind="", sums="bfloat16", precision="ANY_F8_ANY_F8_F32_FAST_ACCUM"),
    Case(E5, E5, "*scale", sums="float16", joined="float16"),
]
REFUSED = [
    (Case(I8, E4), "not both int8"),
    (Case("bfloat16", I8), "x is bfloat16"),
    (Case(sums="int8", behind=""), "sums are int8"),
    (Case(behind="bfloat16 *scale"), "does not compute the steps"),
    (Case(behind="float32 bfloat16 *scale*rows"), "does not compute the steps"),
    (Case(behind="float32 /scale"), "does not compute the steps"),
    (Case(behind="float32 *scale bfloat16 *rows +bias"), "leaves out the rounding"),
    (Case(widen="int8"), "widened by"),
    (FP8(precision="F32_F32_F32"), "at precision 'F32_F32_F32'"),
]


# ----------------------------------------------------------------- what it takes
def test_supports() -> None:
    for case in TAKEN:
        assert eight_bits.supports(case.spec()).ok, case
    for case, why in REFUSED:
        verdict = eight_bits.supports(case.spec())
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok
    assert not eight_bits.supports(Case().spec(k=192)).ok
    assert not eight_bits.supports(Case().spec(n=96)).ok
    assert eight_bits.supports(Case(E4, E5, sums="float32").spec()).ok is MIXED


@pytest.mark.once
@pytest.mark.parametrize("m", [1, 64, 256, 8192])
@pytest.mark.parametrize("precision", [None, "highest", eight_bits_estimate.FAST])
def test_configs(m: int, precision: str | None) -> None:
    sizes = (("x", (m, 4096)), ("w", (14336, 4096)))
    case = FP8(behind="", precision=precision)
    use = dataclasses.replace(case.spec(), shapes=sizes)
    found, _ = worth_measuring(KERNEL.space, use, HERE, 24)
    assert eight_bits.default(use, HERE) in found
    most = {None: 2, "highest": 1}.get(precision, 0)
    assert all(min(most, 1) <= c.promoted <= most for c in found)
    assert not eight_bits.fits(Tiles(splits=5), use, HERE).ok


@pytest.mark.once
def test_steps_behind_a_product() -> None:
    for text, dtype in (("float32 *scale bfloat16 *rows", "int32"), ("", "bfloat16")):
        how = behind_in_float32(text, dtype)
        assert how is not None
        assert how.dtype == "bfloat16"
    for text in ("bfloat16", "*scale", "float32 *scale bfloat16 *scale"):
        assert behind_in_float32(text, "int32") is None


# ------------------------------------------------------------------------ numbers
PROMOTED, SHORT = Tiles(128, 128, 3, promoted=4), Tiles(stages=2)
SIMULATED = [
    (Case(mode="forward"), Tiles(), 200),
    (FP8(behind="*scale *rows +bias"), dataclasses.replace(FEW, splits=2), 50),
    (Case(behind=""), Tiles(256, 128), 300),
    (FP8(behind="*rows *scale", precision="highest"), PROMOTED, 130),
    (Case(behind="float32 *scale bfloat16 *rows", joined="bfloat16"), SHORT, 65),
    (Case(behind="float32 *scale*rows"), dataclasses.replace(FEW, splits=4), 1),
    (Case(behind="float32 *scale*rows bfloat16"), Tiles(), 65),
    (FP8(), Tiles(128, 128, 6, apart=True), 129),
    (Case(E5, E5, "", sums="bfloat16"), Tiles(64, 128, 4, promoted=1), 64),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "config", "m"), slow.first(4, SIMULATED, several=True), ids=str
)
def test_simulated(case: Case, config: Tiles, m: int) -> None:
    """The kernel's own code, a Python thread per warpgroup, few blocks: many turns."""
    given = case.given(m)
    with simulator.simulated_ragged_dot():
        few = dataclasses.replace(config, programs=2)
        got = np.asarray(KERNEL.forward(**given, **case.params, config=few))
    want = wanted(case, given)
    assert got.dtype == want.dtype
    if case.x == I8 and "bias" not in case.behind:
        np.testing.assert_array_equal(got, want)  # sums are exact, roundings the same
    limit = 2.0**-7 if got.dtype.itemsize == 2 else 1e-6
    got, want = got.astype("f8"), want.astype("f8")
    np.testing.assert_allclose(got, want, rtol=0, atol=limit * np.abs(want).max())


def test_exact_sums_of_the_largest_numbers() -> None:
    """Sums beyond 2^24, which float32 would round."""
    x, w = np.full((64, 4096), -128, "int8"), np.full((64, 4096), 127, "int8")
    w[::2, 0] = 126
    with simulator.simulated_ragged_dot():
        config = dataclasses.replace(FEW, programs=2)
        got = KERNEL.forward(x=x, w=w, **Case(behind="").params, config=config)
    want = x.astype("int64") @ w.T.astype("int64")
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_numbers(case: Case) -> None:
    for m in (1, 64, 300):
        given = case.given(m, 1024, 384)
        use = spec_of(OP, given, case.params)
        want = wanted(case, given).astype("f8")
        for config in worth_measuring(KERNEL.space, use, HERE, 24)[0]:
            call = functools.partial(KERNEL.forward, **case.params, config=config)
            got = np.asarray(jax.jit(call)(**given))
            if case.x == I8 and "bias" not in case.behind:
                np.testing.assert_array_equal(got.astype("f8"), want)
            digits = {E4: 2.0**-8, E5: 2.0**-8, I8: 1e-6}[case.x]
            last = 2.0**-7 if got.dtype.itemsize == 2 else 0.0  # sums may round apart
            limit = (digits + last) * np.abs(want).max()
            np.testing.assert_allclose(got.astype("f8"), want, rtol=0, atol=limit)


# ------------------------------------------------------------ the choice, the lowering
LOWERED = [
    (Case(), Tiles()),
    (FP8(behind="*scale *rows"), dataclasses.replace(eight_bits.SHARED, promoted=4)),
    (Case(behind="float32 *scale bfloat16 *rows", joined="bfloat16"), FEW),
    (FP8(mode="forward"), dataclasses.replace(FEW, splits=2)),
]


@pytest.mark.parametrize(
    ("case", "config"), slow.first(1, LOWERED, several=True), ids=str
)
def test_lowered_without_a_gpu(case: Case, config: Tiles) -> None:
    call = functools.partial(KERNEL.forward, **case.params, config=config)
    exported = jax.export.export(jax.jit(call), platforms=["cuda"])(**case.given())
    assert exported.mlir_module().count("mosaic_gpu_v2") == 1


def program(x: Any, w: Any, s: Any) -> Any:
    """A product of rows that are rounded to int8, as programs write it."""
    scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    q = jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)
    y = jax.lax.dot_general(
        q, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    return (y.astype(jnp.float32) * s * scale).astype(jnp.bfloat16)


def arguments(m: int, k: int, n: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = jax.ShapeDtypeStruct
    return shape((m, k), "float32"), shape((n, k), I8), shape((n,), "float32")


def test_the_scales_are_in_the_kernel() -> None:
    how = {"implementation": {"quantized_dot": "hopper_eight_bits"}, "target": "h100"}
    (site,) = rewriter.explain(program, **how)(*arguments(256, 512, 384)).sites
    assert site.kernel == "hopper_eight_bits"
    assert site.params["behind"] == "float32 *scale *rows bfloat16"


def test_parts_of_a_sum_do_not_add_a_bias_each() -> None:
    """Devices may sum parts of the products, unless a bias is behind them."""
    for behind, sums in (("*scale", {"k"}), ("*scale +bias", set())):
        rule = OP.spread({**OP.defaults, "behind": behind})
        assert rule is not None
        assert rule.sums == sums


@pytest.mark.once
def test_precision_is_that_of_the_program() -> None:
    """Tensor cores keep 14 bits of sums unless the program asks for more."""

    def dot(x: Any, w: Any, precision: Any) -> Any:
        return jax.lax.dot_general(
            x.astype(E4), w, (((1,), (0,)), ((), ())), precision=precision,
            preferred_element_type=jnp.float32,
        )  # fmt: skip

    given = Case("float32", E4, "", "forward").given()
    for asked, want in ((None, None), ("highest", "highest")):
        f = functools.partial(dot, precision=asked)
        how = {"implementation": {"quantized_dot": "reference"}}
        (site,) = rewriter.explain(f, **how)(given["x"], given["w"]).sites
        assert site.params.get("precision") == want


@pytest.mark.once
@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        ((8192, 8192, 8192), "hopper_eight_bits"),
        ((16, 8192, 8192), "xla"),  # not measured
        ((8192, 512, 512), "xla"),
    ],
)
def test_choice(sizes: tuple[int, int, int], kernel: str) -> None:
    (site,) = rewriter.explain(program, target="h100")(*arguments(*sizes)).sites
    assert site.kernel == kernel
