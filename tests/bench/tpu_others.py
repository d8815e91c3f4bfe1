"""Which uses of ragged dots, gated linear units and norms compile for TPUs, and agree.

``python3 -m tests.bench.tpu_others`` fills a table for the installed jax, and goes on
where it was stopped. Each use is compiled with its gradients for every generation, with
the config of the rule of thumb. It is compared with float64 in the interpreter.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from rewriter.ops.tpu import GENERATIONS
from tests.bench import record
from tests.support.kernels import tpu

Use = tuple[str, dict[str, Any], dict[str, Any]]
"""An op, shapes by operand, and parameters."""

MODES = ("forward", "transposed", "contracting")
RAGGED = (
    (700, 200, 330, 5),
    (9, 128, 640, 3),
    (256, 512, 384, 64),
    (1024, 1024, 768, 8),
)
UNITS = ((100, 330, 200), (7, 64, 128), (512, 512, 1024), (300, 1024, 640))
ROWS = ((3, 5, 7), (150, 200), (19, 33000), (512, 4096), (1, 128), (1000, 768))
TOLERANCE = {"float32": 3e-5, "bfloat16": 2e-2}


def uses() -> Iterator[Use]:
    """Every op over its shapes and parameters."""
    for (m, k, n, g), mode in itertools.product(RAGGED, MODES):
        right = {"forward": (g, k, n), "transposed": (g, n, k), "contracting": (m, n)}
        shapes = {"lhs": (m, k), "rhs": right[mode], "group_sizes": (g,)}
        yield "ragged_dot", shapes, {"mode": mode}
    for (m, k, f), act in itertools.product(UNITS, ("silu", "gelu_tanh", "gelu_erf")):
        shapes = {"x": (m, k), "w_gate": (k, f), "w_up": (k, f)}
        yield "gated_linear_unit", shapes, {"activation": act}
    for shape, op in itertools.product(ROWS, ("rms_norm", "layer_norm")):
        wide = ("scale",) if op == "rms_norm" else ("scale", "bias")
        some = dict.fromkeys(wide, shape[-1:])
        for extra in ({}, some, {**some, "epsilon": ()}):
            yield op, {"x": shape, **extra}, {"eps": 1e-3}


def structs(use: Use, dtype: str) -> dict[str, Any]:
    """Types of a use's operands."""
    kind = {"group_sizes": "int32"}
    return {n: jax.ShapeDtypeStruct(s, kind.get(n, dtype)) for n, s in use[1].items()}


def both(use: Use, configs: Any, operands: Any, up: Any) -> dict[str, Any]:
    """The result as "out", and all gradients."""
    op, _, params = use
    kernel = next(k for k in registry().kernels(op) if k.name == "mosaic_tpu")
    first, second = configs
    out, kept = kernel.forward(**operands, **params, config=first, residuals=True)
    grads = kernel.backward(
        **operands, **params, config=second, out=None, residuals=kept, cotangent=up
    )
    return {"out": out, **grads}


def compiled(use: Use, dtype: str, generation: str) -> str:
    """Returns ``"ok"``, or what the compiler says."""
    op, _, params = use
    operands = structs(use, dtype)
    reference = functools.partial(registry().op(op).reference, **params)
    up = jax.eval_shape(lambda x: reference(**x), operands)
    made, here = spec_of(registry().op(op), operands, params), tpu.KINDS[generation]
    kernel = next(k for k in registry().kernels(op) if k.name == "mosaic_tpu")
    configs = [s.default(made, here) for s in (kernel.space, kernel.backward_space)]
    try:
        tpu.compiled(generation, functools.partial(both, use, configs), operands, up)
    except Exception as problem:  # of many kinds: each is a row of the table
        return str(problem).strip().splitlines()[0][:300]
    return "ok"


def error(use: Use, dtype: str) -> float:
    """Returns the worst error of the result and of all gradients, against float64."""
    op, _, params = use
    if op != "rms_norm" and op != "layer_norm":
        params = {**params, "precision": "highest"}
    given = registry().op(op).sample(jax.random.key(0), structs(use, dtype), params)
    plain = registry().op(op).general or registry().op(op).reference
    with jax.enable_x64(True):
        wide = {
            n: jnp.asarray(np.asarray(x), x.dtype if n == "group_sizes" else "float64")
            for n, x in given.items()
        }
        sizes = {n: wide.pop(n) for n in ("group_sizes",) if n in wide}
        out, back = jax.vjp(lambda x: plain(**x, **sizes, **params), wide)
        up = np.random.default_rng(0).standard_normal(out.shape).astype(dtype)
        (grads,) = back(jnp.asarray(up, "float64"))
        want = {n: np.asarray(x) for n, x in {"out": out, **grads}.items()}
    with tpu.interpreted():
        made = both((op, use[1], params), (None, None), given, jnp.asarray(up))
    assert set(made) == set(want)
    return max(
        np.abs(np.asarray(made[n], np.float64) - x).max() / max(1.0, np.abs(x).max())
        for n, x in want.items()
    )


def main() -> None:
    """Fills the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--generations", default=",".join(g.name for g in GENERATIONS))
    asked = parser.parse_args()
    path = asked.json or record.named(f"tpu_others_jax_{jax.__version__}")
    cases: dict[str, Any] = {}
    if path.is_file():
        cases = json.loads(path.read_text())["cases"]
    for use, dtype in itertools.product(uses(), ("bfloat16", "float32")):
        row = cases.setdefault(f"{use[0]} {use[1]} {use[2]} {dtype}", {})
        for generation in asked.generations.split(","):
            if row.get(generation) != "ok":
                row[generation] = compiled(use, dtype, generation)
        if "error" not in row:
            row["error"] = float(f"{error(use, dtype):.2g}")
        row["agrees"] = row["error"] <= TOLERANCE[dtype]
        record.write(path, "python3 -m tests.bench.tpu_others", cases=cases)
    bad = [
        n
        for n, row in cases.items()
        if set(row.values()) - {"ok", row["error"]} - {True}
    ]
    print(f"{len(cases)} cases, {len(bad)} bad", *bad, sep="\n")


if __name__ == "__main__":
    main()
