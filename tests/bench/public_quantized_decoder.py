"""A token of a public decoder whose weights a public library stores in few bits.

  python3 -m tests.bench.public_quantized_decoder [--kinds "int8;int4;fp8"]
      [--batches "1;16;64"] [--layers N] [--cache N] [--turns N] [--small] [--json PATH]

`tunix.models.llama3` of the sizes of Llama 3.1 8B, unmodified but for the number of
layers. `qwix.quantize_model` stores its weights, with a scale for each column, and
leaves activations in bfloat16. Each step reads the model's own cache in bfloat16.

Times are device time of all kernels of a step. `share` is the part of the GPU's memory
bandwidth that reading weights and cache once would take; of the embedding it is one
row for each token. Needs google-tunix, qwix and flax.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from tunix.models.llama3 import model as llama

import rewriter
from rewriter.hardware import timing
from rewriter.ops import device
from tests.bench import record
from tests.bench.quantized_decoder import bytes_of

COMMAND = "python3 -m tests.bench.public_quantized_decoder"
BF = jnp.bfloat16
KINDS = {"int8": "int8", "int4": "int4", "fp8": "float8_e4m3fn"}


def config_of(layers: int, small: bool) -> Any:
    """The sizes of the model."""
    found = dataclasses.replace(llama.ModelConfig.llama3p1_8b(), num_layers=layers)
    if not small:
        return found
    return dataclasses.replace(
        found, vocab_size=1024, embed_dim=512, hidden_dim=1024, num_heads=8,
        num_kv_heads=2, head_dim=64,
    )  # fmt: skip


def quantized(config: Any, kind: str) -> tuple[Callable[..., Any], Any]:
    """The step of a model whose weights are stored, and its weights."""
    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    model = nnx.merge(graph, jax.tree.map(lambda x: x.astype(BF), state))
    rules = [qwix.QuantizationRule(module_path=".*", weight_qtype=KINDS[kind])]
    inputs = model.get_model_input()
    model = qwix.quantize_model(model, qwix.PtqProvider(rules), **inputs)
    graph, weights = nnx.split(model)

    def step(weights: Any, tokens: Any, positions: Any, cache: Any, mask: Any) -> Any:
        return nnx.merge(graph, weights)(tokens, positions, cache, mask)

    return step, weights


def inputs_of(config: Any, b: int, length: int) -> list[Any]:
    """Tokens, their positions, the cache and its mask."""
    shape = b, length, config.num_kv_heads, config.head_dim
    place = length - 3
    cache = {}
    for i in range(config.num_layers):
        keys = jax.random.split(jax.random.key(i))
        k, v = (jax.random.normal(key, shape, BF) for key in keys)
        end = jnp.full((b,), place, jnp.int32)
        cache[f"layer_{i}"] = {"k": k, "v": v, "end_index": end}
    tokens = jnp.arange(b, dtype=jnp.int32)[:, None]
    mask = jnp.broadcast_to(jnp.arange(length) <= place, (b, 1, length))
    return [tokens, jnp.full((b, 1), place, jnp.int32), cache, mask]


def measured(
    config: Any, kind: str, batches: Sequence[int], length: int, turns: int
) -> list[dict[str, Any]]:
    """Returns a row for each way to run a step."""
    step, weights = quantized(config, kind)
    fast = rewriter.optimize(step)
    inputs = [[weights, *inputs_of(config, b, length)] for b in batches]
    compiled = lambda f, args: jax.jit(f).lower(*args).compile()
    with ThreadPoolExecutor(8) as pool:
        futures = [[pool.submit(compiled, f, x) for f in (step, fast)] for x in inputs]
        programs = [[f.result() for f in both] for both in futures]
    rows: list[dict[str, Any]] = []
    for b, args, both in zip(batches, inputs, programs, strict=True):
        base = {"kind": kind, "batch": b, "cache": length, "layers": config.num_layers}
        found = [{**base, **row} for row in described(fast, both, args)]
        times = timing.measure(both, [args], turns)
        moved = bytes_of((weights, args[3])) - bytes_of(weights["embedder"])
        peak = device.attached().bandwidth
        for row, t in zip(found, times, strict=True):
            row["share"] = round(moved / t.median / peak, 2) if peak else None
        found = record.with_times(found, times)
        print(*map(json.dumps, found), sep="\n", flush=True)
        rows += found
    return rows


def described(fast: Any, programs: Sequence[Any], args: list[Any]) -> list[Any]:
    """How far apart results are, and which kernels the rewritten step has."""
    want, got = (run(*args)[0].astype("float32") for run in programs)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    sites = fast.report(*args).sites
    chosen = Counter(
        f"{s.form or s.op} {s.kernel}" for s in sites for _ in range(s.repeats)
    )
    rewritten = {"differs": float(f"{error:.2g}"), "kernels": dict(chosen)}
    return [{"by": "as written", "differs": 0.0}, {"by": "rewritten", **rewritten}]


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=";".join(KINDS))
    parser.add_argument("--batches", default="1;16;64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cache", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    batches = [int(b) for b in given.batches.split(";")]
    config = config_of(given.layers, given.small)
    rows = []
    for kind in given.kinds.split(";"):
        length = 64 if given.small else given.cache
        rows += measured(config, kind, batches, length, given.turns)
    if given.json:
        record.write(given.json, COMMAND + " --small" * given.small, results=rows)


if __name__ == "__main__":
    main()
