"""Calls each op under each kind of mesh, on 8 virtual CPUs; prints what differs.

    python3 -m tests.support.mesh_grid [every N-th case] [only this way to call]

A case is a mesh, how the op is called, `jax.set_mesh` or not, an op, and a pass. What
means nothing is left out. Without a mesh there is nothing to set and nothing to map
over. `auto_axes` is for explicit axes, and a manual mesh is one inside `shard_map`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

import rewriter
from rewriter.errors import RewriterWarning

KERNELS = dict.fromkeys(
    ("attention", "rms_norm", "ragged_dot", "gated_linear_unit"), "memory_bounded"
)
MESHES = ("none", "auto", "explicit")
WAYS = ("jit", "shard_map", "auto_axes", "nested")
PASSES = ("forward", "grad(optimize)", "optimize(grad)")
P = jax.P


def attention(q: Any, k: Any, v: Any) -> Any:
    """Attention over [b, t, n, h]."""
    w = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * 0.25, -1)
    return jnp.einsum("bhts,bshd->bthd", w, v)


def rms_norm(x: Any, scale: Any) -> Any:
    """RMS norm over the last axis."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def gated_linear_unit(x: Any, gate: Any, up: Any) -> Any:
    """SwiGLU without its last product."""
    return jax.nn.silu(x @ gate) * (x @ up)


def ragged_dot(x: Any, w: Any) -> Any:
    """Rows of equal groups times their group's matrix."""
    sizes = jnp.full((w.shape[0],), x.shape[0] // w.shape[0], jnp.int32)
    return jax.lax.ragged_dot(x, w, sizes)


CASES = {
    "attention": (attention, [(8, 16, 2, 8)] * 3, [P("x", None, None, None)] * 3),
    "rms_norm": (rms_norm, [(16, 32), (32,)], [P("x", None), P(None)]),
    "gated_linear_unit": (
        gated_linear_unit, [(16, 8), (8, 16), (8, 16)], [P("x", None), P(), P()],
    ),
    "ragged_dot": (ragged_dot, [(32, 8), (4, 8, 16)], [P("x", None), P()]),
}  # fmt: skip


def cases() -> Iterator[tuple[str, str, bool, str, str]]:
    """The meaningful cases."""
    every = itertools.product(MESHES, WAYS, (True, False), CASES, PASSES)
    for mesh, way, is_set, op, what in every:
        if mesh == "none" and (is_set or way != "jit"):
            continue
        if way == "auto_axes" and (mesh != "explicit" or not is_set):
            continue
        if op == "ragged_dot" and mesh == "explicit" and way == "jit":
            continue  # JAX has no rule for its sharding in types
        yield mesh, way, is_set, op, what


def called(f: Callable[..., Any], way: str, mesh: Any, specs: Any) -> Any:
    """The op as it is called in a program."""
    if way == "auto_axes":
        return jax.sharding.auto_axes(f, out_sharding=specs[0])
    if way in ("shard_map", "nested"):
        mapped = jax.shard_map(
            f, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False
        )
        return jax.jit(lambda *a: jax.jit(mapped)(*a)) if way == "nested" else mapped
    return f


def without_warnings(fast: Callable[..., Any], args: Any) -> Any:
    """The result of a call; an error if a site is lost, of which there is a warning."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RewriterWarning)
        got = fast(*args)
    for warning in said:
        if issubclass(warning.category, RewriterWarning):
            raise warning.message  # type: ignore[misc]
    return got


def run(mesh_kind: str, way: str, is_set: bool, op: str, what: str) -> str:
    """What is wrong with a case; empty if nothing is."""
    f, shapes, specs = CASES[op]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    args = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    mesh, around = None, contextlib.nullcontext()
    if mesh_kind != "none":
        kind = AxisType.Auto if mesh_kind == "auto" else AxisType.Explicit
        mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
        around = jax.set_mesh(mesh) if is_set else around
    with around:
        if mesh is not None:
            places = [NamedSharding(mesh, s) for s in specs]
            args = [jax.device_put(a, p) for a, p in zip(args, places, strict=True)]
        g = called(f, way, mesh, specs)
        loss = lambda fn: lambda *a: (fn(*a) ** 2).sum()
        numbers = tuple(range(len(args)))
        optimize = lambda fn: rewriter.optimize(fn, implementation=KERNELS)
        if what == "forward":
            fast, slow = optimize(g), jax.jit(g)
        elif what == "optimize(grad)":
            fast = optimize(jax.grad(loss(g), numbers))
            slow = jax.jit(jax.grad(loss(g), numbers))
        else:
            fast = jax.jit(jax.grad(loss(optimize(g)), numbers))
            slow = jax.jit(jax.grad(loss(g), numbers))
        try:
            want = slow(*args)
        except Exception as error:  # JAX cannot do it either
            return f"skipped: {type(error).__name__}"
        try:
            got = without_warnings(fast, args)
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not np.allclose(a, b, rtol=2e-3, atol=2e-4):
            return f"differs by {float(jnp.abs(a - b).max())}"
    return ""


def main() -> None:
    """Runs every N-th case, perhaps of one way to call."""
    step = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    chosen = [case for case in cases() if case[1] in (sys.argv[2:] or WAYS)]
    wrong, count, skipped = [], 0, []
    for case in chosen[::step]:
        found = run(*case)
        count += 1
        if found.startswith("skipped"):
            skipped.append((case, found))
        elif found:
            wrong.append((case, found))
            print(*case, found, flush=True)
    print(f"{count} cases, {len(skipped)} that JAX refuses, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
