"""The table of the TPU attention kernels: what compiles where, and how exact it is.

  python3 -m tests.bench.tpu_attention [--json PATH] [--generations v4,v5e,...]

No TPU is needed: programs of a forward and all gradients are compiled by libtpu, and
run by Pallas's interpreter on the CPU, against a calculation in float64. Of a record
that exists, only what is missing is made. Errors are relative to the largest entry.
"""

# ruff: noqa: E501  (one case per line reads best)

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.kernels.attention import OP
from rewriter.kernels.attention import tpu as kernel
from rewriter.kernels.attention.tpu.config import BackwardBlocks, Blocks
from rewriter.ops import device
from rewriter.ops.kernel import spec_of
from rewriter.ops.tpu import GENERATIONS
from tests.bench import record
from tests.kernels.attention.test_memory_bounded import (
    CASES,
    Shape,
    exact,
    lengths,
    make,
)
from tests.support.kernels import tpu

CAUSAL = {"window": (None, 0)}
DTYPES = ("bfloat16", "float32")

REAL: dict[str, tuple[Shape, dict[str, Any], dict[str, Any]]] = {
    "causal 8k": ((1, 8192, 8192, 2, 2, 128, 128), {}, CAUSAL),
    "full 4k": ((1, 4096, 4096, 2, 2, 128, 128), {}, {}),
    "causal 32k": ((1, 32768, 32768, 1, 1, 128, 128), {}, CAUSAL),
    "grouped 4k": ((1, 4096, 4096, 8, 2, 128, 128), {}, CAUSAL),
    "one key head": ((1, 2048, 2048, 8, 1, 256, 256), {}, CAUSAL),
    "window 1k of 8k": ((1, 8192, 8192, 2, 2, 128, 128), {}, {"window": (1023, 0)}),
    "heads of 64": ((1, 2048, 2048, 2, 2, 64, 64), {}, CAUSAL),
    "heads of 80": ((1, 2048, 2048, 2, 2, 80, 80), {}, {}),
    "heads of 96": ((1, 2048, 2048, 2, 2, 96, 96), {}, CAUSAL),
    "heads of 256": ((1, 4096, 4096, 1, 1, 256, 256), {}, CAUSAL),
    "192 and 128": ((1, 2048, 2048, 2, 2, 192, 128), {}, CAUSAL),
    "577 patches": ((2, 577, 577, 2, 2, 64, 64), {}, {}),
    "soft cap": ((1, 4096, 4096, 2, 1, 256, 256), {}, {**CAUSAL, "softcap": 50.0}),
    "sinks": ((1, 4096, 4096, 4, 1, 64, 64), {"sinks": (4,)}, {"window": (127, 0)}),
    "pair bias": ((1, 1024, 1024, 4, 4, 32, 32), {"bias": (1, 4, 1024, 1024)}, {}),
    "mask": ((2, 1024, 1024, 2, 2, 64, 64), {"mask": (2, 1, 1024, 1024)}, {}),
    "mask of keys": ((2, 512, 512, 2, 2, 64, 64), {"mask": (2, 1, 1, 512)}, {}),
    "documents": ((2, 2048, 2048, 2, 2, 128, 128), {"q_segments": (2, 2048), "kv_segments": (2, 2048)}, CAUSAL),
    "lengths": ((2, 2048, 2048, 2, 2, 128, 128), {"kv_lengths": lengths(900, 2048)}, {}),
    "slopes": ((1, 2048, 2048, 4, 4, 64, 64), {"alibi": (4,)}, CAUSAL),
    "prefix": ((2, 1024, 1024, 2, 2, 128, 128), {"prefix": lengths(100, 700)}, CAUSAL),
    "decode": ((4, 1, 8192, 32, 8, 128, 128), {"kv_lengths": lengths(1, 8192, 4000, 77)}, {}),
    "decode window": ((4, 1, 8192, 8, 2, 128, 128), {"offset": lengths(8191, 100, 5000, 0)}, {"window": (1023, 0)}),
}  # fmt: skip
"""Compiled only, as interpreting them takes long: with the blocks of the rule."""


def left_out(case: tuple[Shape, dict[str, Any], dict[str, Any]]) -> bool:
    """Whether the kernels refuse a case."""
    return "dropout" in case[1] and case[2].get("empty_rows") == "mean"


def program(params: dict[str, Any], blocks: Any, backward_blocks: Any) -> Any:
    """A forward and all gradients."""

    def both(operands: dict[str, Any], up: Any) -> Any:
        out, kept = kernel.forward(**operands, **params, config=blocks, residuals=True)
        return out, kernel.backward(
            **operands, **params, out=out, residuals=kept, cotangent=up,
            config=backward_blocks,
        )  # fmt: skip

    return both


def shaped(case: Any, dtype: str) -> tuple[dict[str, Any], Any]:
    """Types of a case's operands, and of the cotangent."""
    (b, t, s, n, k, h, e), extra, _ = case
    sizes = {"q": (b, t, n, h), "k": (b, s, k, h), "v": (b, s, k, e)}
    sizes |= {x: g if isinstance(g, tuple) else np.shape(g) for x, g in extra.items()}

    def kind(name: str) -> Any:
        given = extra.get(name)
        if isinstance(given, np.ndarray) and given.dtype.kind in "iu":
            return given.dtype
        if name == "mask":
            return bool
        return "int32" if name.endswith("segments") else dtype

    operands = {x: jax.ShapeDtypeStruct(z, kind(x)) for x, z in sizes.items()}
    return operands, jax.ShapeDtypeStruct((b, t, n, e), dtype)


def compiled(name: str, case: Any, dtype: str, generation: str) -> str:
    """Returns ``"ok"``, or what the compiler says."""
    operands, up = shaped(case, dtype)
    there = device.of(tpu.KINDS[generation].kind, "tpu")
    made = spec_of(OP, operands, case[2])
    fused = len(name) % 2 == 0
    blocks = Blocks(128, 128, 128, 128), BackwardBlocks(128, 128, 128, 128, fused)
    if name in REAL:
        blocks = kernel.default(made, there), kernel.backward_default(made, there)
    try:
        tpu.compiled(generation, program(case[2], *blocks), operands, up)
    except Exception as problem:  # of many kinds: each is a row of the table
        return str(problem).strip().splitlines()[0][:300]
    return "ok"


def error(name: str, case: Any, dtype: str) -> float:
    """Returns the worst error of the result and of all gradients."""
    shape, extra, params = case
    arrays = {n: jnp.asarray(x) for n, x in make(shape, extra, dtype).items()}
    up = make(shape, {"up": (*shape[:2], shape[3], shape[6])}, dtype)["up"]
    want, grads = exact(arrays, up, params)
    fused = len(name) % 2 == 0
    blocks = Blocks(16, 128, 16, 128), BackwardBlocks(128, 128, 128, 128, fused)
    with tpu.interpreted():
        out, got = program(params, *blocks)(arrays, jnp.asarray(up))
    pairs = [(out, want), *((got[n], grads[n]) for n in got)]
    return max(_error(x, y) for x, y in pairs)


def _error(got: Any, want: Any) -> float:
    got = np.asarray(got, np.float64)
    if (np.isnan(got) != np.isnan(want)).any():
        return float("inf")
    size = max(1.0, np.nanmax(np.abs(want), initial=0.0))
    return float(np.nanmax(np.abs(got - want), initial=0.0) / size)


def main() -> None:
    """Fills the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--generations", default=",".join(g.name for g in GENERATIONS))
    parser.add_argument("--cases", default="", help="those with this in their name")
    asked = parser.parse_args()
    path = asked.json or record.named(f"tpu_attention_jax_{jax.__version__}")
    cases: dict[str, Any] = {}
    if path.is_file():
        cases = json.loads(path.read_text())["cases"]
    for name, case in {**CASES, **REAL}.items():
        if left_out(case) or asked.cases not in name:
            continue
        for dtype in DTYPES if name in CASES else DTYPES[:1]:
            row = cases.setdefault(f"{name}, {dtype}", {})
            if "error" not in row and name in CASES:
                row["error"] = float(f"{error(name, case, dtype):.2g}")
            for generation in asked.generations.split(","):
                if row.get(generation) != "ok":
                    row[generation] = compiled(name, case, dtype, generation)
            print(name, dtype, row, flush=True)
            command = "python3 -m tests.bench.tpu_attention"
            record.write(path, command, cases=cases)


if __name__ == "__main__":
    main()
