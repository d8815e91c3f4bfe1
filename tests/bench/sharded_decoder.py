"""A training step of Hugging Face's Llama on several GPUs, as written and rewritten.

  python3 -m tests.bench.sharded_decoder [--small] [--repeats N] [--layers N]
      [--mesh DATA,MODEL ...] [--implementation OP=NAME ...] [--json PATH]

The model of `tests.bench.public_decoder` with AdamW, on every mesh of data × model
axes that the devices here allow, and on one of them alone. Rows of the batch are split
over "data". Heads and hidden columns are split over "model", as Megatron does
(arXiv:1909.08053). Each device has two rows of 4096 tokens for every part of "data".
Times are wall-clock medians of whole steps, memory is XLA's temporary memory of each
device, and collectives are those of the compiled programs. Needs flax, optax and
transformers before 5.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax
import jax
import optax
import transformers
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter
from rewriter.program.collectives import collectives_in
from tests.bench import decoder, passes, public_decoder, record

ROWS = 2
"""Rows of the batch for every part of "data"."""

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
"""Layers whose columns are split over "model"; rows of those that follow them."""

ROWS_OF = ("o_proj", "down_proj")


def meshes(count: int) -> list[tuple[int, int]]:
    """Sizes of (data, model) to measure on `count` devices, one device first.

    Example:
        >>> meshes(4)
        [(1, 1), (4, 1), (1, 4), (2, 2)]
    """
    found = [(1, 1), (count, 1), (1, count), (count // 2, 2)]
    return list(dict.fromkeys(m for m in found if m[0] * m[1] in (1, count)))


def place_of(path: tuple[Any, ...], leaf: Any) -> P:
    """How a parameter, or what an optimizer keeps of it, is split."""
    names = {str(getattr(part, "key", part)) for part in path}
    if getattr(leaf, "ndim", 0) != 2:
        return P()
    if names & set(COLUMNS):
        return P(None, "model")
    return P("model", None) if names & set(ROWS_OF) else P()


def placed(tree: Any, mesh: Mesh) -> Any:
    """Puts a tree of parameters onto a mesh."""
    put = lambda path, x: jax.device_put(x, NamedSharding(mesh, place_of(path, x)))
    return jax.tree_util.tree_map_with_path(put, tree)


def step_of(loss: Callable[..., jax.Array], optimizer: Any) -> Callable[..., Any]:
    """Returns a training step: (weights, state, ids) to the loss and both, updated."""

    def step(weights: Any, state: Any, ids: jax.Array) -> tuple[Any, ...]:
        value, gradients = jax.value_and_grad(loss)(weights, ids)
        updates, state = optimizer.update(gradients, state, weights)
        return value, optax.apply_updates(weights, updates), state

    return step


def measured(program: Any, args: tuple, repeats: int) -> dict[str, Any]:
    """Figures of a program, or why it did not run."""
    try:
        compiled = program.lower(*args).compile()
        out = jax.block_until_ready(compiled(*args))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            times.append(1e3 * (time.perf_counter() - start))
    except jax.errors.JaxRuntimeError as problem:
        return {"failed": (str(problem).splitlines() or [repr(problem)])[0][:200]}
    moved = collectives_in(compiled.as_text())
    return {
        "ms": round(statistics.median(times), 2),
        "least_ms": round(min(times), 2),
        "bytes": compiled.memory_analysis().temp_size_in_bytes,
        "collectives": {kind: list(figures) for kind, figures in moved.items()},
        "loss": float(out[0]),
        "norm": float(passes.figures((out[0], out[1]))["norm"]),
    }


def main() -> None:
    """Measures every mesh."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="to try it on CPUs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=decoder.LAYERS)
    parser.add_argument("--mesh", nargs="+", metavar="DATA,MODEL")
    parser.add_argument("--implementation", nargs="+", default=[], metavar="OP=NAME")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    forced = dict(part.split("=") for part in given.implementation)
    chosen = [tuple(map(int, part.split(","))) for part in given.mesh or ()]
    size = (given.layers, decoder.WIDTH, decoder.HEADS, decoder.HIDDEN, decoder.TOKENS)
    tokens = 4096
    if given.small:
        size, tokens = (2, 128, 4, 256, 512), 256
    model = public_decoder.model_of(*size, positions=tokens)
    optimizer = optax.adamw(1e-4)
    step = step_of(public_decoder.loss_of(model, False), optimizer)
    weights = public_decoder.weights_of(model)
    rows = []
    for data, parts in chosen or meshes(jax.device_count()):
        devices = jax.devices()[: data * parts]
        mesh = jax.make_mesh(
            (data, parts), ("data", "model"), (AxisType.Auto,) * 2, devices=devices
        )
        shape = (ROWS * data, tokens + 1)
        ids = jax.random.randint(jax.random.key(1), shape, 0, size[-1])
        ids = jax.device_put(ids, NamedSharding(mesh, P("data")))
        on = placed(weights, mesh)
        args = (on, placed(optimizer.init(on), mesh), ids)
        fast = rewriter.optimize(step, implementation=forced)
        row = {
            "data, model": (data, parts),
            "batch_and_tokens": list(ids.shape),
            "sites": passes.sites(fast.report(*args)),
            "written": measured(jax.jit(step), args, given.repeats),
            "rewritten": measured(fast, args, given.repeats),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    if given.json:
        command = f"python3 -m tests.bench.sharded_decoder --repeats {given.repeats}"
        command += f" --layers {given.layers}" * (given.layers != decoder.LAYERS)
        command += " --small" * given.small
        for flag in ("mesh", "implementation"):
            if parts := getattr(given, flag):
                command += f" --{flag} " + " ".join(parts)
        versions = {"transformers": transformers.__version__, "flax": flax.__version__}
        record.write(given.json, command, **versions, results=rows)


if __name__ == "__main__":
    main()
