"""Calls each op where a mesh has axes of several kinds, on 8 virtual CPUs.

    python3 -m tests.support.mixed_meshes [every N-th case] [words that a case has]

Axes are automatic, explicit, or manual by a `jax.shard_map` over some of them. Results
are compared with those of float64, and each site must be a kernel's or say why not.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

import rewriter
from rewriter.errors import RewriterWarning
from tests.support.mesh_grid import attention, gated_linear_unit, ragged_dot, rms_norm

P = jax.P
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
NAMES = (
    "attention", "rms_norm", "ragged_dot", "gated_linear_unit", "embedding",
    "linear_cross_entropy",
)  # fmt: skip
KERNELS = {**dict.fromkeys(NAMES, "memory_bounded"), "embedding": ["in_float32", "xla"]}
MESHES = {
    "explicit and automatic": (EXPLICIT, AUTO),
    "automatic and explicit": (AUTO, EXPLICIT),
    "explicit": (EXPLICIT, EXPLICIT),
    "automatic": (AUTO, AUTO),
}
WAYS = ("jit", "shard_map", "untyped", "inside", "auto_axes", "nested")
IN_PARTS = ("shard_map", "untyped", "inside", "nested")
PASSES = ("forward", "grad(optimize)", "optimize(grad)")


def embedding(table: Any, ids: Any) -> Any:
    """Rows of a table."""
    return table[ids]


def loss(x: Any, w: Any, labels: Any) -> Any:
    """The cross entropy of each row."""
    logits = x @ w
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jax.nn.logsumexp(logits, -1) - picked


@dataclass(frozen=True)
class Case:
    """An op as it is called.

    Attributes:
        call: The op.
        shapes: The shapes of its operands; a pair's second is a limit of integers.
        specs: How they are split over both axes.
        out: How its result is split.
    """

    call: Callable[..., Any]
    shapes: Sequence[Any]
    specs: Sequence[Any]
    out: Any


HEADS = P("x", None, "y", None)
CASES = {
    "attention": Case(attention, [(8, 16, 4, 8)] * 3, [HEADS] * 3, HEADS),
    "rms_norm": Case(
        rms_norm, [(8, 16, 32), (32,)], [P("x", "y", None), P(None)], P("x", "y", None)
    ),
    "gated_linear_unit": Case(
        gated_linear_unit, [(16, 8), (8, 16), (8, 16)],
        [P("x", None), P(None, "y"), P(None, "y")], P("x", "y"),
    ),
    "ragged_dot": Case(
        ragged_dot, [(32, 8), (4, 8, 16)],
        [P("x", None), P(None, None, "y")], P("x", "y"),
    ),
    "loss": Case(
        loss, [(16, 8), (8, 32), ((16,), 32)],
        [P("x", None), P(None, "y"), P("x")], P("x"),
    ),
    "embedding": Case(
        embedding, [(32, 16), ((16,), 32)], [P(None, "y"), P("x")], P("x", "y")
    ),
}  # fmt: skip


def cases() -> Iterator[tuple[str, str, bool, str, str]]:
    """The meaningful cases: those with axes of more than one kind around the op."""
    every = itertools.product(MESHES, WAYS, (True, False), CASES, PASSES)
    for mesh, way, is_set, op, what in every:
        kinds = set(MESHES[mesh])
        if way == "jit" and len(kinds) == 1:
            continue
        if way == "auto_axes" and not (mesh == "explicit" and is_set):
            continue
        yield mesh, way, is_set, op, what


def over(spec: Any, axis: str) -> Any:
    """A split over one axis of the mesh alone."""
    return P(*(axis if a == axis else None for a in spec))


def called(case: Case, way: str, mesh: Any, optimize: Any) -> Callable[..., Any]:
    """The optimized op as it is called in a program."""
    f, out = case.call, over(case.out, "x")
    if way == "auto_axes":
        return optimize(jax.sharding.auto_axes(f, axes="y", out_sharding=out))
    if way not in IN_PARTS:
        return optimize(f)
    bodies = {"nested": lambda *a: jax.jit(f)(*a), "inside": optimize(f)}
    mapped = jax.shard_map(
        bodies.get(way, f),
        mesh=mesh,
        in_specs=tuple(over(s, "x") for s in case.specs),
        out_specs=out,
        axis_names={"x"},
        check_vma=way != "untyped",
    )
    if way == "inside":
        return mapped
    return optimize((lambda *a: jax.jit(mapped)(*a)) if way == "nested" else mapped)


def operands(case: Case) -> list[np.ndarray]:
    """Arrays of float32, and integers below their limits."""
    draw, found = np.random.default_rng(0), []
    for shape in case.shapes:
        if isinstance(shape[0], tuple):
            found.append(draw.integers(0, shape[1], shape[0]).astype(np.int32))
        else:
            found.append(draw.standard_normal(shape).astype(np.float32))
    return found


def true(case: Case, way: str, what: str, arrays: Sequence[np.ndarray]) -> Any:
    """The result in float64, on one device.

    Inside of a shard_map over the first axis, it is that of each part of the rows.
    """
    parts = 4 if way in IN_PARTS else 1

    def by_parts(*given: Any) -> Any:
        split = [
            jnp.split(a, parts) if s and s[0] == "x" else [a] * parts
            for a, s in zip(given, case.specs, strict=True)
        ]
        return jnp.concatenate([case.call(*part) for part in zip(*split, strict=True)])

    with jax.enable_x64(True):
        wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in arrays]
        found = of_pass(case, what, by_parts, same)(*wide)
        return jax.tree.map(np.asarray, found)


def same(f: Any) -> Any:
    """The function itself: what `optimize` is where nothing is optimized."""
    return f


def of_pass(case: Case, what: str, f: Any, optimize: Any) -> Callable[..., Any]:
    """A function, or its gradients by its arrays of floats."""
    floats = tuple(i for i, s in enumerate(case.shapes) if not isinstance(s[0], tuple))
    if what == "forward":
        return f
    step = jax.grad(lambda *a: (f(*a) ** 2).sum(), floats)
    return optimize(step) if what == "optimize(grad)" else jax.jit(step)


def run(mesh_name: str, way: str, is_set: bool, op: str, what: str) -> tuple[str, str]:
    """(what is wrong with a case, or ""; how sites are split, or why they are not)."""
    case = CASES[op]
    arrays = operands(case)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=MESHES[mesh_name])
    around = jax.set_mesh(mesh) if is_set else contextlib.nullcontext()
    optimize = lambda f: rewriter.optimize(f, implementation=KERNELS)
    outer = optimize if what == "optimize(grad)" else same
    inner = same if what == "optimize(grad)" else optimize
    with around:
        places = [NamedSharding(mesh, s) for s in case.specs]
        args = [jax.device_put(a, p) for a, p in zip(arrays, places, strict=True)]
        try:
            jax.jit(of_pass(case, what, called(case, way, mesh, same), same))(*args)
        except Exception as error:  # JAX cannot do it either
            return "", f"JAX refuses: {type(error).__name__}: {str(error)[:90]!r}"
        fast = of_pass(case, what, called(case, way, mesh, inner), outer)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RewriterWarning)
            try:
                got = jax.jit(fast)(*args) if way == "inside" else fast(*args)
                reports = what == "optimize(grad)" or (
                    what == "forward" and way != "inside"
                )
                how = promised(fast, args, reports)
            except Exception as error:
                return f"{type(error).__name__}: {str(error)[:160]!r}", ""
    want = true(case, way, what, arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not np.allclose(a, b, rtol=2e-4, atol=2e-5 * max(1, np.abs(b).max())):
            return f"differs by {np.abs(a - b).max()}", how
    return "", how


def promised(fast: Any, args: Sequence[Any], reports: bool) -> str:
    """How sites are split, in a report or, where there is none, in the program.

    A kernel that a report promises is in the lowered program.
    """
    if not reports:
        return (
            "a site" if "rewriter_" in str(jax.make_jaxpr(fast)(*args)) else "no site"
        )
    sites = fast.report(*args).sites
    replaced = [s for s in sites if s.replaced]
    if replaced:
        assert "rewriter_site" in fast.lower(*args).as_text(), "no kernel is lowered"
    left = [f"left: {s.not_chosen[:1]}" for s in sites if not s.replaced]
    split = [f"split: {s.sharding}{' both ways' * s.backward}" for s in replaced]
    return "; ".join([*split, *left]) or "no site"


def main() -> None:
    """Runs every N-th case."""
    step = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    words = sys.argv[2:]
    chosen = [c for c in cases() if all(w in map(str, c) for w in words)]
    wrong = 0
    for case in chosen[::step]:
        problem, how = run(*case)
        wrong += bool(problem)
        print(*case, "|", problem or "right", "|", how, flush=True)
    print(f"{len(chosen[::step])} cases, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
