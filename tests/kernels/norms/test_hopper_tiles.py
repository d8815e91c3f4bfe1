"""Norms of narrow rows on Hopper GPUs, by tiles: numbers and choices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter.kernels.norms.hopper_config import Norm, Teams, columns_of_panel, usual
from rewriter.ops.registry import registry
from tests.kernels.norms.test_hopper import both, check, check_addends, with_addends
from tests.kernels.norms.test_tpu import ALL, OPS, layer, loss, make, rms
from tests.support.kernels import addends, extreme_rows, simulator

TILED = [
    ((262144, 128), "bfloat16", ("scale", "bias"), Teams(64, 1, 2, 3, tiled=True)),
    ((1000, 96), "float16", ALL, None),
    ((77, 112), "float32", ("scale",), None),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("shape", "dtype", "wanted", "config"), TILED)
def test_narrow_rows_are_lowered(
    shape: Any, dtype: str, wanted: Any, config: Any, op: str
) -> None:
    given, up = jax.eval_shape(lambda: make(op, shape, wanted, dtype))
    call = jax.jit(lambda x, up: both(op, x, up, config=config))
    text = jax.export.export(call, platforms=["cuda"])(given, up).mlir_module()
    assert text.count("mosaic_gpu_v2") == 2
    assert "norm_tiles_backward" in text


def tiles(teams: int = 2, stages: int = 2, programs: int = 2) -> Teams:
    """A config of tiles."""
    return Teams(64, 1, teams, stages, programs, tiled=True)


CASES = {
    "one panel": ((64, 16), ("scale", "bias"), tiles(1, 2, 3)),
    "rows that are left over": ((130, 96), ALL, tiles()),
    "one row": ((1, 128), (), tiles()),
    "two panels": ((70, 128), (), tiles(1, 3, 3)),
    "many turns": ((900, 192), ALL, tiles(3, 3, 2)),
    "a multiple of 16 alone": ((777, 48), ("scale",), tiles(4, 2, 1)),
    "usual": ((5, 7, 48), ("scale", "bias"), None),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES)
def test_tiles_simulated(case: str, op: str) -> None:
    shape, wanted, config = CASES[case]
    given, up = make(op, shape, wanted)
    added = addends.beside(given)
    with simulator.simulated_norms():
        check(op, given, up, both(op, given, up, config=config))
        made = with_addends(op, given, up, added, config=config)
    check_addends(op, given, up, added, made)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("dtype", "out"),
    [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "bfloat16")],
)
def test_tiles_in_other_dtypes(dtype: str, out: str, op: str) -> None:
    """Also where results take more or less memory than rows."""
    given, up = make(op, (130, 96), ALL, dtype)
    up = up.astype(out)
    with simulator.simulated_norms():
        check(op, given, up, both(op, given, up, out, config=tiles(2, 2, 1)))


@pytest.mark.parametrize("op", OPS)
def test_extreme_rows_are_as_exact_as_the_formula(op: str) -> None:
    its, config = registry().kernel(op, "hopper"), tiles()

    def run(given: Any, up: Any, eps: float) -> Any:
        with simulator.simulated_norms():
            out, kept = its.forward(**given, eps=eps, residuals=True, config=config)
            return {"out": out} | its.backward(
                **given, eps=eps, out=None, residuals=kept, cotangent=up, config=config
            )

    extreme_rows.check(op, 192, run)


def test_configs() -> None:
    """One warpgroup alone is taken only where rows are no whole lines."""
    for d, dtype, wanted in (
        (96, "bfloat16", True), (128, "bfloat16", True), (192, "bfloat16", True),
        (128, "float32", False), (256, "bfloat16", False), (384, "bfloat16", False),
    ):  # fmt: skip
        given = (("scale", "float32"), ("bias", "float32"))
        norm = Norm(True, 0.0, 4096, d, dtype, dtype, given)
        assert usual(norm, True).tiled == wanted
        assert d % columns_of_panel(norm) == 0


@pytest.mark.parametrize("norm", [rms, layer])
def test_they_are_chosen_for_gradients(norm: Any) -> None:
    both = jax.grad(loss(lambda x, s: norm(x, s).astype(x.dtype)), (0, 1))
    chosen = {64: "hopper", 96: "hopper", 128: "hopper", 192: "hopper", 300: "xla"}
    for columns, kernel in chosen.items():
        rows = jax.ShapeDtypeStruct((200704, columns), jnp.bfloat16)
        scale = jax.ShapeDtypeStruct((columns,), jnp.bfloat16)
        (site,) = rewriter.explain(both, target="h200", tune="off")(rows, scale).sites
        assert site.kernel == kernel
        assert ("tiled=True" in site.config) == (kernel == "hopper")
