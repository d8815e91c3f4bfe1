"""Products with scales of blocks: the kernels' numbers, roundings, what they take."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.quantized_dot import (
    BLOCKS,
    by_blocks_few_rows,
    by_blocks_hopper,
    by_blocks_xla,
)
from rewriter.kernels.quantized_dot.by_blocks_hopper import FEW, KERNEL, MORE
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from tests import slow
from tests.kernels.ragged.test_hopper_dot import on_hopper
from tests.support.arrays import stored
from tests.support.kernels import simulator

E4, E5, I8 = "float8_e4m3fn", "float8_e5m2", "int8"
HERE = device.named("h100")


@dataclasses.dataclass(frozen=True)
class Case:
    """A use: 128 numbers of a row share a scale, and 128 x `wide` of the matrix."""

    x: str = E4
    w: str = E4
    inside: str = "*rows *scale"
    behind: str = "bfloat16"
    mode: str = "transposed"
    sums: str = "float32"
    wide: int = 128
    parts: int = 4
    widen: str = ""

    @property
    def params(self) -> dict[str, Any]:
        names = ("inside", "behind", "mode", "sums", "widen")
        return {"groups": self.parts, **{name: getattr(self, name) for name in names}}

    def given(self, m: int = 200, k: int = 512, n: int = 384) -> dict[str, Any]:
        r = np.random.default_rng(0)
        made = {
            "x": stored(r, (m, k), self.x),
            "w": stored(r, (n, k) if self.mode == "transposed" else (k, n), self.w),
        }
        places = {"rows": ("x_scale", (m, self.parts)),
                  "scale": ("w_scale", (self.parts, n // self.wide))}  # fmt: skip
        for name, (operand, shape) in places.items():
            if name in self.inside:
                made[operand] = r.uniform(0.5, 1.5, shape).astype("float32")
        return made

    def spec(self, **sizes: int) -> Any:
        return spec_of(BLOCKS, self.given(**sizes), self.params)


INT8 = functools.partial(Case, I8, I8, inside="float32 *rows *scale", sums="int32")
TAKEN = [
    Case(),
    Case(mode="forward", wide=1),
    Case(inside="*scale*rows", behind=""),
    Case(inside="*scale", wide=384),
    Case(inside="*rows", parts=2),
    INT8(),
    INT8(parts=1, behind=""),
    INT8(inside="float32 *scale bfloat16 *rows float32", wide=64),
]
REFUSED = [
    (Case("bfloat16", I8), "x is bfloat16"),
    (Case(parts=8), "parts of 64 numbers"),
    (Case(parts=1), "sums of 512 products in 14 bits"),
    (Case(sums="bfloat16"), "sums are bfloat16"),
    (Case(inside="*rows /scale"), "does not compute the steps"),
    (Case(inside="*rows *scale bfloat16"), "added up in bfloat16"),
]


def test_supports() -> None:
    for case in TAKEN:
        assert by_blocks_hopper.supports(case.spec()).ok, case
    for case, why in REFUSED:
        verdict = by_blocks_hopper.supports(case.spec())
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok
    use = Case().spec()
    found, _ = worth_measuring(KERNEL.space, use, HERE, 24)
    assert by_blocks_hopper.default(use, HERE) in found


def wanted(case: Case, given: dict[str, Any]) -> np.ndarray:
    """The result of the stored numbers, in float64."""
    x, w = (np.asarray(given[name], "f8") for name in "xw")
    w = w.T if case.mode == "transposed" else w
    z = case.parts
    parts = np.einsum(
        "mzk,zkn->zmn", x.reshape(len(x), z, -1), w.reshape(z, -1, w.shape[1])
    )
    if "x_scale" in given:
        parts = parts * given["x_scale"].T[..., None]
    if "w_scale" in given:
        parts = parts * np.repeat(given["w_scale"], case.wide, 1)[:, None]
    return parts.sum(0)


def assert_close(got: Any, want: np.ndarray, digits: float = 2.0**-7) -> None:
    got = np.asarray(got, "f8")
    np.testing.assert_allclose(got, want, rtol=0, atol=digits * np.abs(want).max())


@pytest.mark.parametrize(
    ("case", "config", "m"),
    slow.first(3, [
        (Case(), MORE, 200),
        (INT8(), FEW, 40),
        (Case(mode="forward", wide=1), dataclasses.replace(MORE, block_n=192), 130),
        *[(case, MORE, 70) for case in TAKEN[2:]],
    ], several=True),
    ids=str,
)  # fmt: skip
def test_simulated(case: Case, config: Any, m: int) -> None:
    """The kernel's own code, a Python thread per warpgroup, few blocks: many turns."""
    given = case.given(m)
    with simulator.simulated_ragged_dot():
        few = dataclasses.replace(config, programs=2)
        got = KERNEL.forward(**given, **case.params, config=few)
    assert got.dtype == jnp.dtype(case.behind or "float32")
    assert_close(got, wanted(case, given), 2.0**-7 if case.behind else 1e-6)


FEW_ROWS = [
    Case("bfloat16", I8, "*scale float32", sums="bfloat16", wide=1, widen="bfloat16"),
    Case("bfloat16", I8, "*scale", widen="bfloat16", mode="forward"),
    Case("bfloat16", E4, "*scale", "", widen="bfloat16", mode="forward", parts=8),
    Case("bfloat16", "int4", "*scale float32", sums="bfloat16", mode="forward", wide=1,
         widen="bfloat16"),
    Case("bfloat16", "int4", "*scale", widen="int8 bfloat16", wide=384),
]  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize("case", FEW_ROWS, ids=str)
def test_few_rows_simulated(case: Case) -> None:
    """Rows of floats, whose matrix is widened in registers."""
    given = case.given(20)
    use = spec_of(BLOCKS, given, case.params)
    assert by_blocks_few_rows.supports(use).ok
    config = by_blocks_few_rows.default(use, HERE)
    assert by_blocks_few_rows.fits(config, use, HERE).ok
    with simulator.simulated_few_rows():
        got = by_blocks_few_rows.KERNEL.forward(**given, **case.params, config=config)
    assert got.dtype == jnp.dtype(case.behind or "float32")
    assert_close(got, wanted(case, given))


@pytest.mark.once
@pytest.mark.parametrize("case", FEW_ROWS, ids=str)
def test_few_rows_lower_on_a_cpu(case: Case) -> None:
    given = case.given(20)
    config = by_blocks_few_rows.default(spec_of(BLOCKS, given, case.params), HERE)
    run = functools.partial(by_blocks_few_rows.KERNEL.forward, config=config)
    call = jax.jit(functools.partial(run, **case.params))
    exported = jax.export.export(call, platforms=["cuda"])(**given)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 1


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", FEW_ROWS, ids=str)
def test_few_rows(case: Case) -> None:
    kernel = by_blocks_few_rows.KERNEL
    for m in (1, 20, 64):
        given = case.given(m)
        use = spec_of(BLOCKS, given, case.params)
        for config in worth_measuring(kernel.space, use, HERE, 24)[0]:
            call = functools.partial(kernel.forward, **case.params, config=config)
            assert_close(jax.jit(call)(**given), wanted(case, given))


@pytest.mark.parametrize("case", slow.first(2, TAKEN), ids=str)
def test_part_by_part(case: Case) -> None:
    """The loop, and the reference."""
    given = case.given(9)
    run = functools.partial(by_blocks_xla.KERNEL.forward, **case.params)
    for f in (run, functools.partial(BLOCKS.reference, **case.params)):
        got = jax.jit(f)(**given)
        assert got.dtype == jnp.dtype(case.behind or "float32")
        digits = 2.0**-7 if "bfloat16" in case.behind + case.inside else 1e-5
        assert_close(got, wanted(case, given), digits)


@pytest.mark.once
@pytest.mark.parametrize("case", [Case(), INT8()], ids=str)
def test_lowers_on_a_cpu(case: Case) -> None:
    call = jax.jit(functools.partial(KERNEL.forward, **case.params))
    exported = jax.export.export(call, platforms=["cuda"])(**case.given())
    assert exported.mlir_module().count("mosaic_gpu_v2") == 1


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_numbers(case: Case) -> None:
    for m in (1, 64, 300):
        given = case.given(m, 512, 384)
        use = spec_of(BLOCKS, given, case.params)
        for config in worth_measuring(KERNEL.space, use, HERE, 24)[0]:
            call = functools.partial(KERNEL.forward, **case.params, config=config)
            got = jax.jit(call)(**given)
            assert_close(got, wanted(case, given))
