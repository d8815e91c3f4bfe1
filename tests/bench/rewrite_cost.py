"""What rewriting costs: its time as a share of JAX's own trace and lower time.

    python3 -m tests.bench.rewrite_cost [--layers 48] [--json PATH]

Measures an unrolled decoder of flax linen's modules, and one written by hand (causal
attention, RMS norms, SwiGLU), also for an H100. Then come programs without sites,
reports of attention with masks that are arrays, `jax.grad` around an optimized
function, and dispatch with a tree of 100 arrays. Seconds are of the processor, the
least of several runs. Each run has a sequence length of its own, so that nothing is
known of its shapes. ``again_s`` is for shapes that are known, and ``first_rewrite_s``
the first one in a process. Tracing and lowering as a whole is compared too, with the
kernels in it.

Bars are judged by `share`: shapes are new, and the process has rewritten programs. Rows
"in a new process" are of its first program. Modules are loaded then, JAX's too, and the
bar of half a second is theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import rewriter
from rewriter.config import Config, resolve
from rewriter.run.rewriting import rewrite
from tests.bench import record

CONFIG = resolve({"implementation": {"gated_linear_unit": "memory_bounded"}})
"""Every site replaced, those too that are too small to pay."""

HOPPER = resolve({"target": "NVIDIA H100 80GB HBM3"})
"""What is chosen for a GPU: a site may stay as written."""

MANY = 76
"""Layers of the network without sites, for 2000 equations."""


def decoder(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """A decoder with every layer written out."""
    for p in params:
        x = x + attention(p, norm(x, p["n1"]))
        h = norm(x, p["n2"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return x


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attention(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Causal attention with rotary positions."""
    b, t, d = x.shape
    q, k, v = ((x @ p[w]).reshape(b, t, 4, d // 4) for w in ("q", "k", "v"))
    q, k = rotary(q), rotary(k)
    s = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(d // 4)
    s = jnp.where(jnp.tril(jnp.ones((t, t), bool)), s, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v).reshape(b, t, d) @ p["o"]


def rotary(x: jax.Array) -> jax.Array:
    """Rotary positions, half rotation."""
    h = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(h) / h)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :h], x[..., h:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def plain(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """A program of the same size without a site."""
    for p in params:
        for w in ("q", "k", "v", "o"):
            x = x + jnp.tanh(x @ p[w]) * p["n1"] + jnp.cos(x) * p["n2"]
            x = x - jnp.abs(x) * 0.5 + jnp.square(x) * jnp.sign(x)
            x = jnp.where(x > 3, 3.0, x)
        h = jnp.sin(x @ p["gate"]) + x @ p["up"]
        x = x + h @ p["down"]
    return x


class Layer(nn.Module):
    """One decoder layer of flax linen's own modules."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies attention and a gated MLP."""
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
        h = nn.RMSNorm()(x)
        return x + nn.Dense(256)(nn.silu(nn.Dense(512)(h)) * nn.Dense(512)(h))


class Decoder(nn.Module):
    """Layers one after the other, unrolled."""

    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layers."""
        for _ in range(self.layers):
            x = Layer()(x)
        return x


def weights(layers: int, d: int = 256) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of weights."""
    shape = {
        "q": (d, d),
        "k": (d, d),
        "v": (d, d),
        "o": (d, d),
        "gate": (d, 2 * d),
        "up": (d, 2 * d),
        "down": (2 * d, d),
        "n1": (d,),
        "n2": (d,),
    }
    return [
        {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shape.items()}
        for _ in range(layers)
    ]


def no_gates(params: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of a residual network that is no gated one: nothing is replaced."""
    for w in params:
        x = x + jax.nn.gelu(x @ w)
    return -(jax.nn.log_softmax(x) * y).sum(-1).mean()


def masked(length: int, layers: int) -> dict[str, object]:
    """Seconds of a report on attention whose masks are arrays of numbers."""
    draw = np.random.default_rng(0)
    causal = np.tril(np.ones((length, length), bool))
    documents = np.sort(draw.integers(0, 7, length))
    masks = [
        causal,
        causal & (documents[:, None] == documents),
        draw.random((length, length)) < 0.5,
        np.where(causal, 0, -1e9).astype(np.float32),
        draw.standard_normal((length, length)).astype(np.float32),
    ]

    def model(x: jax.Array) -> jax.Array:
        for i in range(layers):
            mask = masks[i % len(masks)].copy()
            s = jnp.einsum("bthd,bshd->bhts", x, x) * 0.125
            s = jnp.where(mask, s, -1e9) if mask.dtype == bool else s + mask
            x = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), x)
        return x

    x = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.float32)
    start = time.process_time()
    report = rewriter.explain(model)(x)
    result = {
        "program": f"report, {layers} layers of {length} tokens, masks that are arrays",
        "sites": len(report.sites),
        "report_s": round(time.process_time() - start, 3),
    }
    print(json.dumps(result))
    return result


def cost(
    name: str, fn, args_of, start: int, repeats: int = 4, config: Config = CONFIG
) -> dict[str, object]:
    """Rewriting seconds against trace and lower seconds.

    Args:
        name: The program's name.
        fn: The program.
        args_of: Its arguments, given how much longer sequences are.
        start: How much longer they are at first.
        repeats: The number of runs.
        config: What to rewrite, and for what device.
    """
    own, ours, again = [], [], []
    for run in range(repeats):
        args = args_of(start + 8 * run)
        jax.clear_caches()
        began = time.process_time()
        jax.jit(lambda *a: fn(*a)).lower(*args)
        own.append(time.process_time() - began)
        closed = jax.make_jaxpr(fn)(*args)
        for seconds in (ours, again):
            began = time.process_time()
            out = rewrite(closed, config)
            seconds.append(time.process_time() - began)
    result = {
        "program": name,
        "equations": equations(closed.jaxpr),
        "sites": len(out.sites),
        "replaced": sum(s.replaced for s in out.sites),
        "trace_and_lower_s": round(min(own), 3),
        "rewrite_s": round(min(ours), 3),
        "again_s": round(min(again), 3),
        "first_rewrite_s": round(ours[0], 3),
        "share": round(min(ours) / min(own), 4),
        "share_again": round(min(again) / min(own), 4),
        "stages_s": {k: round(v, 3) for k, v in out.seconds.items()},
    }
    print(json.dumps(result))
    return result


def around(layers: int, start: int, repeats: int = 12) -> dict[str, object]:
    """Seconds that `jax.grad` of an optimized function takes longer to trace.

    Args:
        layers: The number of layers of the hand-written decoder.
        start: How much longer its sequences are at first.
        repeats: The number of runs.
    """
    params, options = weights(layers), {"gated_linear_unit": "memory_bounded"}
    loss = lambda p, x: jnp.mean(decoder(p, x) ** 2)

    def seconds(call: Callable[[], object]) -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    def optimized() -> Callable[..., jax.Array]:
        return rewriter.optimize(lambda *a: loss(*a), implementation=options)

    runs = []
    for run in range(repeats):
        x = jax.ShapeDtypeStruct((2, 1024 + start + 8 * run, 256), jnp.float32)
        jax.clear_caches()
        grad = jax.jit(lambda *a: jax.value_and_grad(loss)(*a))
        own = seconds(lambda: grad.lower(params, x))  # noqa: B023
        functions = lambda *a: loss(*a), optimized(), optimized()
        traces = (
            seconds(lambda: jax.make_jaxpr(jax.value_and_grad(f))(params, x))  # noqa: B023
            for f in functions
        )
        runs.append((own, *traces))
    own, plain, new, again = map(min, zip(*runs, strict=True))
    result = {
        "program": f"jax.grad of the optimized hand-written decoder, {layers} layers",
        "trace_and_lower_s": round(own, 3),
        "rewrite_s": round(new - plain, 3),
        "again_s": round(again - plain, 3),
        "share": round((new - plain) / own, 4),
        "share_again": round((again - plain) / own, 4),
    }
    print(json.dumps(result))
    return result


def lowered(name: str, fn, args_of, start: int, repeats: int = 8) -> dict[str, object]:
    """Seconds to trace and lower a program, by `jax.jit` and as it is rewritten.

    Arguments are those of `cost`.
    """
    seconds: dict[str, list[float]] = {}
    for run in range(repeats):
        args = args_of(start + 8 * run)
        for way, jit in {"jit": jax.jit, "optimize": rewriter.optimize}.items():
            jax.clear_caches()
            began = time.process_time()
            traced = jit(lambda *a: fn(*a)).trace(*args)
            between = time.process_time()
            traced.lower()
            ended = time.process_time()
            seconds.setdefault(f"{way}_trace_s", []).append(between - began)
            seconds.setdefault(f"{way}_lower_s", []).append(ended - between)
    result: dict[str, object] = {"program": f"tracing and lowering: {name}"}
    result |= {key: round(min(runs), 3) for key, runs in seconds.items()}
    print(json.dumps(result))
    return result


def equations(jaxpr) -> int:
    """The number of equations of a program, at any depth."""
    bodies = (
        getattr(part, "jaxpr", part)
        for eqn in jaxpr.eqns
        for value in eqn.params.values()
        for part in (value if isinstance(value, (tuple, list)) else [value])
    )
    return len(jaxpr.eqns) + sum(equations(b) for b in bodies if hasattr(b, "eqns"))


def dispatch(repeats: int = 2000) -> dict[str, object]:
    """Microseconds per call with a tree of 100 arrays, against jax.jit."""
    tree = {f"x{i}": jnp.ones(()) for i in range(100)}

    def fn(tree):
        return jax.tree.map(lambda x: x + 1, tree)

    both = {"jit": jax.jit(fn), "optimize": rewriter.optimize(fn)}
    for f in both.values():
        jax.block_until_ready(f(tree))
    times: dict[str, list[float]] = {"jit": [], "optimize": []}
    for _ in range(15):
        for name, f in both.items():
            start = time.perf_counter()
            for _ in range(repeats // 15):
                out = f(tree)
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / (repeats // 15) * 1e6)
    jit, ours = (statistics.median(times[n]) for n in ("jit", "optimize"))
    result = {
        "program": "dispatch, 100 leaves",
        "jit_us": round(jit, 1),
        "optimize_us": round(ours, 1),
        "ratio": round(ours / jit, 4),
    }
    print(json.dumps(result))
    return result


def decoders(layers: int, start: int) -> list[dict[str, object]]:
    """The costs of decoders of some layers; sequences are longer by `start`."""
    params = weights(layers)
    model = Decoder(layers)
    size = f"{layers} layers"
    repeats = 12 if layers < 10 else 8

    def rows(more: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, 1024 + more, 256), jnp.float32)

    variables = jax.eval_shape(model.init, jax.random.key(0), rows(0))
    by_hand = lambda more: (params, rows(more))
    loss = lambda p, x: jnp.mean(decoder(p, x) ** 2)
    return [
        cost(
            f"flax linen decoder, {size}",
            model.apply,
            lambda more: (variables, rows(more)),
            start,
            repeats,
        ),
        cost(f"hand-written decoder, {size}", decoder, by_hand, start + 100, repeats),
        cost(
            f"gradient of the hand-written decoder, {size}",
            jax.value_and_grad(loss),
            by_hand,
            start + 200,
            repeats,
        ),
        cost(
            f"hand-written decoder, {size}, for an H100",
            decoder,
            by_hand,
            start + 400,
            repeats,
            HOPPER,
        ),
        cost(
            f"gradient of the hand-written decoder, {size}, for an H100",
            jax.value_and_grad(loss),
            by_hand,
            start + 450,
            repeats,
            HOPPER,
        ),
        cost(f"no sites, {size}", plain, by_hand, start),
        *(
            lowered(f"{what}, {size}", fn, args_of, start + 300)
            for what, fn, args_of in (
                ("flax", model.apply, lambda more: (variables, rows(more))),
                ("by hand", decoder, by_hand),
                ("gradient", jax.value_and_grad(loss), by_hand),
            )
            if layers < 10
        ),
    ]


def in_new_process(kind: str, layers: int, repeats: int = 5) -> dict[str, object]:
    """Seconds of the first program in a process: JAX's own, and of rewriting.

    Args:
        kind: The program, as in `first`.
        layers: The number of its layers.
        repeats: The number of processes; the least seconds count.
    """
    code = f"from tests.bench.rewrite_cost import first; first({kind!r}, {layers})"
    runs, command = [], [sys.executable, "-c", code]
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:  # bytecode, from the second run on
        env = kept | {"PYTHONPYCACHEPREFIX": folder}
        for _ in range(repeats):
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, env=env
            )
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    result = {
        "program": f"{kind}, {layers} layers, in a new process",
        **{name: min(run[name] for run in runs) for name in runs[0]},
    }
    print(json.dumps(result))
    return result


def first(kind: str, layers: int) -> None:
    """Prints the seconds of one program, after the imports of JAX and the rewriter.

    Args:
        kind: ``"layers written by hand"`` or ``"the gradient of those"``.
        layers: The number of layers.
    """
    loss = lambda p, x: jnp.mean(decoder(p, x) ** 2)
    fn = decoder if kind == "layers written by hand" else jax.value_and_grad(loss)
    args = weights(layers), jax.ShapeDtypeStruct((2, 1024, 256), jnp.float32)
    began = time.process_time()
    jax.jit(lambda *a: fn(*a)).lower(*args)
    between = time.process_time()
    closed, modules = jax.make_jaxpr(fn)(*args), len(sys.modules)
    start = time.process_time()
    rewrite(closed, CONFIG)
    row = {
        "trace_and_lower_s": round(between - began, 3),
        "rewrite_s": round(time.process_time() - start, 3),
        "modules_loaded": len(sys.modules) - modules,
    }
    print(json.dumps(row))


def without_sites(layers: int) -> dict[str, object]:
    """The cost of a program that has activations and a softmax, and no site."""
    name = f"gradient of a residual network without sites, {layers} layers"

    def args_of(more: int) -> tuple[object, ...]:
        x = jax.ShapeDtypeStruct((64 + more, 64), jnp.float32)
        w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        return [w] * layers, x, x

    return cost(name, jax.value_and_grad(no_gates), args_of, 0)


def main() -> None:
    """Runs the measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    results = []
    for turn, layers in enumerate(sorted({2, 4, options.layers})):
        results += decoders(layers, 500 * turn)
    results += [around(2, 1500), around(4, 1600)]
    kinds = "layers written by hand", "the gradient of those"
    results += [in_new_process(kind, 2) for kind in kinds]
    results += [without_sites(MANY), masked(2048, 1), masked(2048, 5)]
    results.append(dispatch())
    if options.json:
        command = f"python3 -m tests.bench.rewrite_cost --layers {options.layers}"
        python = platform.python_version()
        record.write(options.json, command, python=python, results=results)


if __name__ == "__main__":
    main()
