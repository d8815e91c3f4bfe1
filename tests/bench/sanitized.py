"""A small case of every kernel for Hopper GPUs, to be run under compute-sanitizer.

  compute-sanitizer --tool memcheck python3 -m tests.bench.sanitized [--ops NAME,NAME]

Sizes are no multiples of tiles, so that every kernel has tiles that are left over.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.ops.registry import registry

SIZES = jnp.array([5, 0, 130, 60], jnp.int32)
"""Rows of four groups, of 200."""


def drawn(*shape: int) -> jax.Array:
    """Normal numbers in bfloat16."""
    return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.bfloat16)


def queries(t: int, s: int, n: int, k: int, h: int, e: int = 0) -> dict[str, Any]:
    """Queries [1, t, n, h], and s keys and values of k heads."""
    return {"q": drawn(1, t, n, h), "k": drawn(1, s, k, h), "v": drawn(1, s, k, e or h)}


def cases() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Op, kernel, operands, perhaps with an addend, and parameters."""
    x, scale = drawn(37, 1024), drawn(1024)
    yield "rms_norm", "hopper", {"x": x, "scale": scale}, {}
    layer = {"x": x, "scale": scale, "bias": scale}
    yield "layer_norm", "hopper", layer, {}
    yield "layer_norm", "hopper", {**layer, "addend": x}, {}
    rows, matrices = drawn(200, 128), drawn(4, 128, 192)
    groups = {"group_sizes": SIZES}
    yield "ragged_dot", "hopper", {"lhs": rows, "rhs": matrices, **groups}, {}
    narrow = (40 * drawn(4, 128, 256)).astype(jnp.int8)
    scales = {"rhs_scale": jnp.full((4, 256), 0.02)}
    stored = {"lhs": rows, "rhs": narrow, **groups, **scales}
    yield "quantized_ragged_dot", "hopper", stored, {}
    both = {"w": narrow, "w_up": narrow, "w_scale": scales["rhs_scale"]}
    yield (
        "quantized_ragged_gated_linear_unit",
        "hopper",
        {"x": rows, **both, **groups},
        {},
    )
    for numbers in (narrow[0], (narrow[0] // 16).astype(jnp.int4)):
        scaled = {"w": numbers, "w_scale": jnp.full((2, 256), 0.02)}
        yield "quantized_dot", "hopper", {"x": rows[:20], **scaled}, {}
    unit = {"x": rows, "w": matrices, "w_up": matrices, **groups}
    yield "ragged_gated_linear_unit", "hopper", unit, {}
    dense = {"x": rows, "w_gate": drawn(128, 192), "w_up": drawn(128, 192)}
    yield "gated_linear_unit", "hopper", dense, {}
    causal = {"scale": 0.1, "window": (None, 0)}
    yield "attention", "hopper", queries(150, 150, 4, 2, 64), causal
    capped = {"scale": 0.1, "softcap": 20.0}
    yield "attention", "hopper", queries(150, 170, 2, 2, 256), capped
    yield "attention", "hopper", queries(150, 170, 2, 2, 192, 128), {"scale": 0.1}
    tables = {"bias": drawn(1, 2, 150, 170), "mask": drawn(1, 1, 150, 170) > -1}
    wide = {**queries(150, 170, 2, 2, 128), **tables}
    yield "attention", "hopper", wide, {"scale": 0.1}
    documents = jnp.arange(150, dtype=jnp.int32)[None] // 40
    segments = {"q_segments": documents, "kv_segments": documents}
    packed = {**queries(150, 150, 2, 2, 64), **segments, "alibi": jnp.ones(2) / 8}
    yield "attention", "hopper", packed, causal
    few = queries(1, 300, 8, 2, 128)
    yield "attention", "hopper_decode", few, {"scale": 0.1}
    few = {**few, "mask": drawn(1, 1, 1, 300) > -1}
    yield "attention", "hopper_decode", few, {"scale": 0.1, "empty_rows": "mean"}


def program(op: str, name: str, params: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a function of operands by name: the result, and gradients if any."""
    kernel = registry().kernel(op, name)
    more = {**registry().op(op).defaults, **params}

    def run(operands: dict[str, jax.Array]) -> Any:
        if kernel.backward is None:
            return kernel.forward(**operands, **more)
        out, kept = kernel.forward(**operands, **more, residuals=True)
        if "addend" in operands:  # which the gradient of x is added to, too
            _, out = out
        whole = out if kernel.saves_out else None
        grads = kernel.backward(
            **operands, **more, out=whole, residuals=kept, cotangent=jnp.ones_like(out)
        )
        return out, grads

    return run


def main() -> None:
    """Runs all of them, or those of some ops, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default=",".join(registry().ops()))
    ops = parser.parse_args().ops.split(",")
    for op, name, operands, params in cases():
        if op not in ops:
            continue
        jax.block_until_ready(jax.jit(program(op, name, params))(operands))
        shapes = {n: x.shape for n, x in operands.items()}
        print(op, name, shapes, params, flush=True)


if __name__ == "__main__":
    main()
