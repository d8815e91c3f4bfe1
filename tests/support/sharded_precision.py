"""Run by test_sharding.py on eight devices: the precision of split products."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter

AUTO, EXPLICIT = (
    jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    for kind in (AxisType.Auto, AxisType.Explicit)
)
FORCED = {"attention": "memory_bounded", "gated_linear_unit": "memory_bounded"}
R = np.random.default_rng(0)
Q, K, V = R.normal(size=(3, 4, 16, 4, 8)).astype("f4")
X, W, U = (R.normal(size=s).astype("f4") for s in ((8, 16), (16, 24), (16, 24)))
EXACT = "F32_F32_F32"
"""An algorithm that a CPU has."""

Function = Callable[..., Any]


def attention(precision: Any) -> Function:
    def run(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("bthd,bshd->bhts", q, k, precision=precision) * 0.35
        s = jnp.where(np.tri(16, dtype=bool), s, -1e30)
        weights = jax.nn.softmax(s)
        return jnp.einsum("bhts,bshd->bthd", weights, v, precision=precision)

    return run


def unit(precision: Any) -> Function:
    def run(x: Any, w: Any, u: Any) -> Any:
        gate, up = (jnp.dot(x, m, precision=precision) for m in (w, u))
        return jax.nn.silu(gate) * up

    return run


HEADS = P("data", None, "model")
ROWS, COLUMNS = P("data"), P(None, "model")
SITES: dict[str, tuple[Callable[[Any], Function], Any, Any, Any]] = {
    "attention": (attention, (Q, K, V), (HEADS,) * 3, HEADS),
    "unit": (unit, (X, W, U), (ROWS, COLUMNS, COLUMNS), P("data", "model")),
}
"""A program that takes a precision, its arguments, and how these and the result lie."""


def under(name: str) -> Function:
    """What makes a program multiply so, by the context around its products."""

    def wrap(f: Function) -> Function:
        def run(*args: Any) -> Any:
            with jax.default_matmul_precision(name):
                return f(*args)

        return run

    return wrap


ASKED: dict[str, tuple[Any, Function, str]] = {
    "nothing": (None, lambda f: f, "default"),
    "high": ("high", lambda f: f, "high"),
    "highest": ("highest", lambda f: f, "highest"),
    "one operand": (("default", "highest"), lambda f: f, "highest"),
    "a context": (None, under("highest"), "highest"),
    "an algorithm": (jax.lax.DotAlgorithmPreset[EXACT], lambda f: f, "algorithm"),
    "an algorithm by context": (None, under(EXACT), "algorithm"),
}
"""How a program asks: the argument of its products, what is around it, and the text of
its lowered products."""


def gradient(f: Function) -> Function:
    def of(*args: Any) -> Any:
        out, back = jax.vjp(f, *args)
        return back(jnp.cos(out))

    return of


def optimized(f: Function, options: Any) -> Function:
    return rewriter.optimize(f, implementation=FORCED, strict=True, **options)


PASSES: dict[str, tuple[Function, Function]] = {
    "forward": (optimized, lambda f: f),
    "grad(optimize)": (lambda f, o: jax.jit(gradient(optimized(f, o))), gradient),
    "optimize(grad)": (lambda f, o: optimized(gradient(f), {}), gradient),
}
FEW = ("forward", "optimize(grad)")


def asked_by(lowered: Any) -> set[str]:
    """How the products of a lowered program multiply: by the name that sorts last."""
    found = set()
    for line in lowered.as_text().splitlines():
        if "stablehlo.dot_general" in line:
            named = re.search(r"precision = \[(\w+), (\w+)\]", line)
            plain = max(named.groups()).lower() if named else "default"
            found.add("algorithm" if "algorithm" in line else plain)
    return found


def placed(mesh: Any, args: Any, specs: Any) -> list[Any]:
    pairs = zip(args, specs, strict=True)
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in pairs]


def meshes(f: Function, args: Any, specs: Any, out: Any) -> dict[str, Any]:
    """The function with arguments, on each kind of mesh."""
    mapped = jax.shard_map(f, mesh=AUTO, in_specs=specs, out_specs=out)
    return {
        "auto": (f, placed(AUTO, args, specs)),
        "explicit": (f, placed(EXPLICIT, args, specs)),
        "by hand": (mapped, placed(AUTO, args, specs)),
    }


def main() -> None:
    """Each site on each mesh, each way to ask, forward and with gradients."""
    for site, how in itertools.product(SITES, ASKED):
        make, args, specs, out = SITES[site]
        precision, around, want = ASKED[how]
        plain = around(make(precision))
        for kind, (f, given) in meshes(plain, args, specs, out).items():
            typed, options = kind == "explicit", {}
            if kind == "auto":  # under `jax.grad` nothing else says it
                options = {"in_shardings": tuple(a.sharding for a in given)}
            with jax.set_mesh(EXPLICIT) if typed else contextlib.nullcontext():
                sites = rewriter.explain(f, implementation=FORCED)(*given).sites
                assert sites, f"{site}, {how}, {kind}"
                assert all(s.replaced for s in sites), f"{site}, {how}, {kind}"
                for way in PASSES if how in ("highest", "an algorithm") else FEW:
                    where = f"{site}, {how}, {kind}, {way}"
                    fast, slow = PASSES[way]
                    lowered = fast(f, options).lower(*given)
                    assert asked_by(lowered) == {want}, where
                    if how == "highest":
                        right = slow(plain)(*args)
                        close(lowered.compile()(*given), right, where)


def close(got: Any, want: Any, where: str) -> None:
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-4, err_msg=where)


if __name__ == "__main__":
    main()
