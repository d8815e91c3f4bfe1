"""Run by test_sharding.py on eight devices: programs as written and rewritten.

``python -m tests.support.sharded_programs [--only OP] [--write FILE]`` prints a line
for each case: an op or a model, a mesh, a pass. It fails if a rewritten program gives
other numbers, or needs more memory, or collectives that the original does not. Keys
that go around a ring are sent from device to device instead of gathered and summed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter
from rewriter.program.collectives import collectives_in

FORCED = {
    "attention": "memory_bounded", "rms_norm": "memory_bounded",
    "layer_norm": "memory_bounded", "group_norm": "memory_bounded",
    "gated_linear_unit": "memory_bounded", "ragged_dot": "memory_bounded",
}  # fmt: skip


# ------------------------------------------------------------------ programs
def attention(q: Any, k: Any, v: Any) -> jax.Array:
    """Causal attention with grouped heads."""
    b, t, n, h = q.shape
    group = n // k.shape[2]
    q = q.reshape(b, t, k.shape[2], group, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) / h**0.5
    keep = jnp.tril(jnp.ones((t, k.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)


def rms_norm(x: Any, scale: Any) -> jax.Array:
    """RMSNorm."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def layer_norm(x: Any, scale: Any, bias: Any) -> jax.Array:
    """LayerNorm."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-6) * scale + bias


def group_norm(x: Any, scale: Any, bias: Any) -> jax.Array:
    """GroupNorm of images, channels last."""
    y = x.reshape(*x.shape[:-1], 16, -1)
    mean, var = y.mean((1, 2, 4), keepdims=True), y.var((1, 2, 4), keepdims=True)
    y = (y - mean) * jax.lax.rsqrt(var + 1e-6)
    return y.reshape(x.shape) * scale + bias


def swiglu(x: Any, gate: Any, up: Any) -> jax.Array:
    """A gated linear unit."""
    return jax.nn.silu(x @ gate) * (x @ up)


def ragged_dot(x: Any, w: Any, sizes: Any) -> jax.Array:
    """Every group of rows times its own matrix."""
    return jax.lax.ragged_dot(x, w, sizes)


def decoder(params: Any, x: Any) -> jax.Array:
    """Layers of a transformer in a scan."""

    def layer(x: Any, w: Any) -> Any:
        y = rms_norm(x, w["norm1"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, w[n]) for n in "qkv")
        x = x + jnp.einsum("btnh,nhd->btd", attention(q, k, v), w["o"])
        y = rms_norm(x, w["norm2"])
        return x + swiglu(y, w["gate"], w["up"]) @ w["down"], None

    return jax.lax.scan(layer, x, params)[0]


# --------------------------------------------------------------------- cases
@dataclasses.dataclass(frozen=True)
class Case:
    """A program on a mesh.

    Attributes:
        name: Of the program.
        mesh: Axis names and sizes.
        specs: How its arguments are split.
        refused: Whether it has to be left to XLA.
        brief: Whether its training step is part of every run of the tests.
        ring: Whether keys of attention go around a ring.
    """

    name: str
    mesh: tuple[tuple[str, int], ...]
    specs: Any
    refused: bool = False
    brief: bool = False
    ring: bool = False

    @property
    def text(self) -> str:
        """The mesh in words."""
        return " × ".join(f"{n} {name}" for name, n in self.mesh)


DATA, MODEL, SEQ = (("data", 8),), (("model", 8),), (("seq", 8),)
BOTH = (("data", 4), ("model", 2))
WITH_SEQ = (("data", 2), ("seq", 4))
ALL = (("data", 2), ("seq", 2), ("model", 2))
EXPERT = (("expert", 8),)
WITH_EXPERT = (("data", 2), ("expert", 4))
NONE = P()


def three(spec: Any) -> Any:
    """The same for queries, keys and values."""
    return (spec,) * 3


def of_layers(**axes: Any) -> Any:
    """How a decoder's parameters are split; ``fsdp`` and ``model`` are mesh axes."""
    fsdp, model = axes.get("fsdp"), axes.get("model")
    heads = P(None, fsdp, model)
    return {
        "norm1": NONE, "norm2": NONE, "q": heads, "k": heads, "v": heads,
        "o": P(None, model, None, fsdp), "gate": P(None, fsdp, model),
        "up": P(None, fsdp, model), "down": P(None, model, fsdp),
    }  # fmt: skip


ROWS = P("data")
CASES = (
    Case("attention", DATA, three(ROWS)),
    Case("attention", MODEL, three(P(None, None, "model"))),
    Case("attention", SEQ, three(P(None, "seq"))),
    Case("attention", BOTH, three(P("data", None, "model")), brief=True),
    Case("attention", WITH_SEQ, three(P("data", "seq")), brief=True),
    Case("attention", ALL, three(P("data", "seq", "model"))),
    Case("attention", SEQ, three(P(None, "seq")), ring=True),
    Case("attention", WITH_SEQ, three(P("data", "seq")), brief=True, ring=True),
    Case("attention", SEQ, (NONE, P(None, "seq"), P(None, "seq")), refused=True),
    Case("attention", MODEL, three(P(None, None, None, "model")), refused=True),
    Case("rms_norm", DATA, (ROWS, NONE)),
    Case("rms_norm", SEQ, (P(None, "seq"), NONE)),
    Case("rms_norm", WITH_SEQ, (P("data", "seq"), NONE), brief=True),
    Case("rms_norm", MODEL, (P(None, None, "model"), P("model")), refused=True,
         brief=True),
    Case("layer_norm", DATA, (ROWS, NONE, NONE), brief=True),
    Case("layer_norm", WITH_SEQ, (P("data", "seq"), NONE, NONE)),
    Case("group_norm", DATA, (ROWS, NONE, NONE), brief=True),
    Case("group_norm", BOTH, (P("data", None, None, "model"), P("model"), P("model")),
         brief=True),
    Case("group_norm", SEQ, (P(None, "seq"), NONE, NONE), refused=True),
    Case("swiglu", DATA, (ROWS, NONE, NONE)),
    Case("swiglu", MODEL, (NONE, P(None, "model"), P(None, "model"))),
    Case("swiglu", BOTH, (ROWS, P(None, "model"), P(None, "model")), brief=True),
    Case("swiglu", DATA, (ROWS, P("data"), P("data"))),
    Case("swiglu", MODEL, (P(None, None, "model"), P("model"), P("model")),
         refused=True),
    Case("ragged_dot", DATA, (ROWS, NONE, NONE)),
    Case("ragged_dot", MODEL, (NONE, P(None, None, "model"), NONE)),
    Case("ragged_dot", BOTH, (ROWS, P(None, None, "model"), NONE), brief=True),
    Case("ragged_dot", MODEL, (P(None, "model"), P(None, "model"), NONE)),
    Case("ragged_dot", EXPERT, (NONE, P("expert"), NONE)),
    Case("ragged_dot", WITH_EXPERT, (ROWS, P("expert"), NONE), brief=True),
    Case("decoder", DATA, (of_layers(), ROWS)),
    Case("decoder", DATA, (of_layers(fsdp="data"), ROWS)),
    Case("decoder", MODEL, (of_layers(model="model"), NONE)),
    Case("decoder", BOTH, (of_layers(fsdp="data", model="model"), ROWS)),
    Case("decoder", ALL, (of_layers(fsdp="data", model="model"), P("data", "seq")),
         brief=True),
    Case("decoder", ALL, (of_layers(fsdp="data", model="model"), P("data", "seq")),
         ring=True),
)  # fmt: skip

PROGRAMS = {f.__name__: f for f in
            (attention, rms_norm, layer_norm, group_norm, swiglu, ragged_dot,
             decoder)}  # fmt: skip


def operands(name: str) -> tuple[Any, ...]:
    """Arguments of a program, with values of a model's size."""
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    if name == "attention":
        return normal(8, 512, 16, 16), normal(8, 512, 8, 16), normal(8, 512, 8, 16)
    if name in ("rms_norm", "layer_norm"):
        x, weights = normal(8, 128, 256), [normal(256) for _ in range(2)]
        return (x, *weights[: 1 + (name == "layer_norm")])
    if name == "group_norm":
        return normal(8, 16, 16, 64), normal(64), normal(64)
    if name == "swiglu":
        return normal(8, 256, 128), normal(128, 512) / 11, normal(128, 512) / 11
    if name == "ragged_dot":
        sizes = jnp.array([40, 0, 100, 61, 1, 150, 0, 0, 96, *[4] * 15, 4], jnp.int32)
        return normal(512, 64), normal(32, 64, 128) / 8, jnp.pad(sizes, (0, 7))
    d, n, h, f, layers = 128, 8, 16, 256, 3
    projection = functools.partial(normal, layers, d, n, h, scale=d**-0.5)
    params = {
        "norm1": jnp.ones((layers, d)), "norm2": jnp.ones((layers, d)),
        "q": projection(), "k": projection(), "v": projection(),
        "o": normal(layers, n, h, d, scale=d**-0.5),
        "gate": normal(layers, d, f, scale=d**-0.5),
        "up": normal(layers, d, f, scale=d**-0.5),
        "down": normal(layers, f, d, scale=f**-0.5),
    }  # fmt: skip
    return params, normal(8, 512, d)


def train_step(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The step of a gradient descent along all float arguments."""

    def step(*args: Any) -> Any:
        dtypes = [jax.tree.leaves(a)[0].dtype for a in args]
        floats = [i for i, d in enumerate(dtypes) if jnp.issubdtype(d, jnp.floating)]

        def loss(*moving: Any) -> jax.Array:
            full = list(args)
            for i, x in zip(floats, moving, strict=True):
                full[i] = x
            return (f(*full) ** 2).mean()

        moving = tuple(args[i] for i in floats)
        value, grads = jax.value_and_grad(loss, tuple(range(len(moving))))(*moving)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, moving, grads)

    return step


# ------------------------------------------------------------------ measuring
def memory(compiled: Any) -> int:
    """Bytes of one device that a compiled program needs."""
    stats = compiled.memory_analysis()
    return int(stats.temp_size_in_bytes + stats.output_size_in_bytes)


def error(got: Any, want: Any) -> float:
    """The largest relative error of results, by Frobenius norm."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    return worst


def placed(args: Any, specs: Any, mesh: Any) -> Any:
    """Arguments committed to a mesh."""
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P)
    )
    return jax.device_put(args, shardings)


def compared(case: Case, passes: str) -> dict[str, Any]:
    """One line of the table."""
    names, sizes = zip(*case.mesh, strict=True)
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    f = PROGRAMS[case.name]
    f = train_step(f) if passes == "train step" else f
    args = placed(operands(case.name), case.specs, mesh)
    forced = {**FORCED, "attention": "ring"} if case.ring else FORCED
    original, fast = jax.jit(f), rewriter.optimize(f, implementation=forced)
    before, after = (g.lower(*args).compile() for g in (original, fast))
    sites = fast.report(*args).sites
    return {
        "program": case.name,
        "mesh": case.text,
        "pass": passes,
        "specs": _text(case.specs),
        "ring": case.ring,
        "error": error(after(*args), before(*args)),
        "original": collectives_in(before.as_text()),
        "rewritten": collectives_in(after.as_text()),
        "memory_before": memory(before),
        "memory_after": memory(after),
        "sites": sorted(
            f"{s.op}: {s.sharding or 'xla: ' + s.not_chosen[0][1]}" for s in sites
        ),
        "replaced": sum(s.replaced for s in sites),
        "kept": sum(not s.replaced for s in sites),
    }


def _text(specs: Any) -> Any:
    """How arguments are split, as JSON."""
    if isinstance(specs, dict):
        return {name: _text(spec) for name, spec in specs.items()}
    return str(specs) if isinstance(specs, P) else [_text(s) for s in specs]


def faults(line: Mapping[str, Any], case: Case) -> list[str]:
    """What is wrong with a line."""
    wrong = []
    if line["error"] > 2e-5:
        wrong.append(f"error {line['error']:.1e}")
    if bool(line["kept"]) != case.refused or not line["sites"]:
        wrong.append(f"{line['replaced']} replaced, {line['kept']} kept")
    before, after = line["original"], line["rewritten"]
    instead = {"collective-permute"} if case.ring else set()
    if extra := set(after) - set(before) - instead:
        wrong.append(f"also {', '.join(extra)}")
    moved = [received(found) for found in (after, before)]
    if moved[0] > moved[1]:
        wrong.append(f"{moved[0]} B between devices, {moved[1]} B before")
    passed = any("passed around" in text for text in line["sites"])
    if passed != case.ring:
        wrong.append("gathered" if case.ring else "passed around")
    if line["memory_after"] > 1.05 * line["memory_before"] + (64 << 10):
        wrong.append(f"{line['memory_after']} B, {line['memory_before']} B before")
    return wrong


def received(collectives: Mapping[str, tuple[int, int]]) -> int:
    """Bytes that a device is sent, about: a sum is scattered, and then gathered."""
    return sum(
        size * (2 if kind == "all-reduce" else 1)
        for kind, (_, size) in collectives.items()
    )


def main() -> int:
    """Prints the table; the number of wrong lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--write", default="")
    options = parser.parse_args()
    lines, bad = [], 0
    for case in CASES:
        if options.only not in case.name:
            continue
        for passes in ("forward", "train step"):
            if options.brief and not (case.brief and passes == "train step"):
                continue
            line = compared(case, passes)
            wrong = faults(line, case)
            bad += bool(wrong)
            lines.append(line)
            print(f"{'BAD ' if wrong else ''}{case.name} {case.text} {passes}: "
                  f"{line['sites']} {line['original']} -> {line['rewritten']} "
                  f"{line['memory_before']} -> {line['memory_after']} B "
                  f"{line['error']:.0e} {wrong or ''}", flush=True)  # fmt: skip
    if options.write:
        with open(options.write, "w", encoding="utf-8") as file:
            json.dump({"jax": jax.__version__, "lines": lines}, file, indent=1)
    return bad


if __name__ == "__main__":
    sys.exit(main())
