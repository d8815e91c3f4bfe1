"""Layers of flax whose products qwix and AQT quantize: each is found, unmodified.

Both libraries are optional: the tests are skipped without them. Install qwix and aqtp.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # those of the libraries
]

ROWS, WIDTHS = 16, (256, 512, 256)
DOT, BY_BLOCKS = "quantized_dot", "block_scaled_dot"


def rows() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (ROWS, WIDTHS[0]), jnp.bfloat16)


def model_of(**how: Any) -> Any:
    """Two layers with an activation between them."""
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(WIDTHS[1], dtype=jnp.bfloat16, use_bias=False, **how)(x)
            return nn.Dense(WIDTHS[2], dtype=jnp.bfloat16, **how)(nn.gelu(x))

    return Model()


def assert_found(f: Any, args: tuple[Any, ...], forms: list[str]) -> None:
    """Both products are sites, and results are those of the program."""
    fast = rewriter.optimize(f)
    sites = fast.report(*args).sites
    assert [s.op for s in sites for _ in range(s.repeats)] == forms
    given = jax.tree.leaves(jax.jit(f)(*args))
    for got, want in zip(jax.tree.leaves(fast(*args)), given, strict=True):
        np.testing.assert_array_equal(np.asarray(got, "f4"), np.asarray(want, "f4"))


RULES = [
    ({"weight_qtype": "int8"}, DOT),
    ({"weight_qtype": "int4", "tile_size": 64}, DOT),
    ({"weight_qtype": "int3"}, DOT),
    ({"weight_qtype": "float8_e4m3fn"}, DOT),
    ({"weight_qtype": "float8_e5m2", "tile_size": 128}, DOT),
    ({"weight_qtype": "mxfp8", "tile_size": 32}, DOT),
    ({"weight_qtype": "mxfp4", "tile_size": 32}, DOT),
    ({"weight_qtype": "nvfp4", "tile_size": 16}, DOT),
    ({"weight_qtype": "int8", "act_qtype": "int8"}, DOT),
    ({"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": True}, DOT),
    ({"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"}, DOT),
    ({"weight_qtype": "int4", "act_qtype": "int8", "tile_size": 128}, BY_BLOCKS),
]


@pytest.mark.parametrize(("rule", "form"), RULES, ids=str)
def test_stored_by_qwix(rule: dict[str, Any], form: str) -> None:
    qwix = pytest.importorskip("qwix")
    rules = [qwix.QuantizationRule(module_path=".*", **rule)]
    model = qwix.quantize_model(model_of(), qwix.PtqProvider(rules))
    x = rows()
    weights = model.init(jax.random.key(1), x)
    assert_found(model.apply, (weights, x), [form] * 2)


@pytest.mark.parametrize("tile", [None, 64])
@pytest.mark.parametrize("method", ["absmax", "minmax"])
@pytest.mark.parametrize("stored", ["int8", "int4"])
@pytest.mark.parametrize("name", ["dot", "dot_general", "einsum", "dequantize"])
def test_functions_of_qwix(
    name: str, stored: str, method: str, tile: int | None
) -> None:
    """Of its arrays, with zero points where their range is not symmetric."""
    qwix = pytest.importorskip("qwix")
    w = jax.random.normal(jax.random.key(2), WIDTHS[:2], jnp.bfloat16)
    matrix = qwix.quantize(
        w, stored, channelwise_axes=[1], tiled_axes={0: tile} if tile else {},
        calibration_method=method,
    )  # fmt: skip
    program = {
        "dot": qwix.dot,
        "dot_general": lambda x, w: qwix.dot_general(x, w, (((1,), (0,)), ((), ()))),
        "einsum": lambda x, w: qwix.einsum("bk,kn->bn", x, w),
        "dequantize": lambda x, w: x @ qwix.dequantize(w),
    }[name]
    assert_found(program, (rows(), matrix), [DOT])


@pytest.mark.parametrize("of_rows", [None, 8])
@pytest.mark.parametrize("bits", [4, 8])
def test_served_by_aqt(bits: int, of_rows: int | None) -> None:
    """Weights are stored by one call, and read by others."""
    config = pytest.importorskip("aqt.jax.v2.config")
    aqt = pytest.importorskip("aqt.jax.v2.flax.aqt_flax")
    x, keys = rows(), {"params": jax.random.key(1), "aqt": jax.random.key(2)}

    def model(mode: Any) -> Any:
        product = functools.partial(
            aqt.AqtDotGeneral, config.dot_general_make(of_rows, bits),
            rhs_quant_mode=mode, rhs_freeze_mode=aqt.FreezerMode.CALIBRATION_AND_VALUE,
        )  # fmt: skip
        return model_of(dot_general_cls=product)

    weights = model(aqt.QuantMode.TRAIN).init(keys, x)
    _, stored = model(aqt.QuantMode.CONVERT).apply(weights, x, mutable=True, rngs=keys)
    frozen = {"params": weights["params"], "aqt": stored["aqt"]}
    serve = functools.partial(model(aqt.QuantMode.SERVE).apply, rngs=keys)
    assert_found(serve, (frozen, x), [DOT] * 2)
