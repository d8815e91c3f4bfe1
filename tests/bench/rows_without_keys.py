"""What rows without keys cost in the gradients of attention, on a Hopper GPU.

  python3 -m tests.bench.rows_without_keys [--small] [--only NAME] [--ways WAYS]
      [--json PATH]

Masks of data may leave rows without keys. Three ways to compute gradients: without the
share of such rows ("none", which is wrong where there are some), with the kernels'
share, and with one behind a condition, whose flag the host reads. Each with masks that
leave no such row ("full") and that do ("empty"). Figures are microseconds of all
kernels by CUPTI, and of a call by the wall clock (medians). Errors of dq, dk and dv are
against float32, as a share of the norm.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter import _jax
from rewriter.hardware import timing
from rewriter.kernels.attention import hopper, xla
from rewriter.kernels.attention.empty_rows import complete_if_any_empty
from rewriter.kernels.attention.hopper.backward_config import backward_default
from rewriter.kernels.attention.hopper.config import default
from rewriter.kernels.attention.reference import reference
from rewriter.ops import device
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from tests.bench import record

SHAPES: dict[str, tuple[tuple[int, ...], str, Any]] = {
    "BERT, padded": ((32, 512, 12, 12, 64), "right", (None, None)),
    "padding on the left": ((8, 1024, 16, 16, 128), "left", (None, 0)),
    "lengths, groups": ((4, 2048, 32, 8, 128), "lengths", (None, 0)),
    "256 wide": ((4, 1024, 8, 8, 256), "right", (None, None)),
    "odd": ((8, 577, 12, 12, 64), "lengths", (None, None)),
}
SMALL = {"small": ((2, 96, 2, 1, 32), "left", (None, 0))}
REPEATS, CALLS = 7, 20
FILL = "mean_passing"


def drawn(shape: tuple[int, ...], kind: str, empty: bool) -> dict[str, Any]:
    """Operands, with sequences that are cut off or whole."""
    b, t, n, m, h = shape
    keys = jax.random.split(jax.random.key(1), 3)
    sizes = ((b, t, n, h), (b, t, m, h), (b, t, m, h))
    made = {
        name: jax.random.normal(k, s, jnp.bfloat16)
        for name, k, s in zip("qkv", keys, sizes, strict=True)
    }
    kept = np.linspace(t // 3, t, b).astype(np.int32)
    if empty and kind != "left":
        kept[0] = 0
    places = np.arange(t)[None, None, None]
    if kind == "lengths":
        return made | {"kv_lengths": jnp.asarray(kept)}
    if kind == "right":
        return made | {"mask": jnp.asarray(places < kept[:, None, None, None])}
    ends = t - kept if empty else 0 * kept
    return made | {"mask": jnp.asarray(places >= ends[:, None, None, None])}


def ways(params: dict[str, Any], config: Any) -> dict[str, Callable[..., Any]]:
    """The ways to compute gradients."""

    def gradients(fill: str) -> Callable[..., Any]:
        def of(given: Any, out: Any, kept: Any, up: Any) -> Any:
            more = {"out": out, "residuals": kept, "cotangent": up, "config": config}
            made = hopper.backward(**given, **more, **params, empty_rows=fill)
            return {n: made[n] for n in "qkv"}

        return of

    def conditional(given: Any, out: Any, kept: Any, up: Any) -> Any:
        (lse,), own = kept, {**params, "empty_rows": FILL}

        def completed(grads: Any) -> Any:
            rows = (lse == -jnp.inf).swapaxes(1, 2)[..., None]
            share = jnp.where(rows, up.astype(jnp.float32), 0).sum(1) / up.shape[1]
            b, _, heads, e = grads["v"].shape
            share = share.reshape(b, 1, heads, -1, e).sum(3)
            grads = grads | {"v": grads["v"] + share}
            return xla.with_passed(grads, given, own, out=out, lse=lse, cotangent=up)

        grads = gradients("zero")(given, out, kept, up)
        return complete_if_any_empty(lse == -jnp.inf, grads, completed)

    return {
        "none": gradients("zero"), "in kernels": gradients(FILL),
        "conditional": conditional,
    }  # fmt: skip


def measured(program: Any, args: Any) -> tuple[Any, dict[str, float]]:
    """The results of a compiled program, and its times."""
    out = jax.block_until_ready(program(*args))
    own, wall = [], []
    for _ in range(REPEATS):
        if timing.method() == "cupti":
            kernels = _jax.kernel_seconds(lambda: program(*args))
            own.append(sum(seconds for _, seconds in kernels))
        start = time.perf_counter()
        for _ in range(CALLS):
            last = program(*args)
        jax.block_until_ready(last)
        wall.append((time.perf_counter() - start) / CALLS)
    times = {"wall": wall} | ({"kernels": own} if own else {})
    return out, {n: round(1e6 * statistics.median(x), 1) for n, x in times.items()}


def errors(got: Any, given: Any, up: Any, params: Any) -> dict[str, float]:
    """Errors of the first two sequences, against float32."""
    few = {n: x[:2] for n, x in given.items()}
    moving = {n: few.pop(n).astype(jnp.float32) for n in "qkv"}

    def of(moving: Any) -> Any:
        return reference(**moving, **few, **params, empty_rows=FILL)

    with jax.default_matmul_precision("highest"):
        _, back = jax.vjp(of, moving)
        want = jax.jit(back)(up[:2].astype(jnp.float32))[0]
    gap = lambda n: jnp.linalg.norm((got[n][:2] - want[n]).ravel())
    return {n: float(gap(n) / jnp.linalg.norm(want[n].ravel())) for n in "qkv"}


def compared(
    name: str, use: tuple[Any, ...], empty: bool, chosen: list[str]
) -> dict[str, Any]:
    """The figures of a use, by the ways to compute gradients; lowers it if no GPU."""
    (shape, kind, window), h100 = use, device.named("h100")
    given = drawn(shape, kind, empty)
    params = {"scale": shape[-1] ** -0.5, "window": window}
    spec = spec_of(registry().op("attention"), given, params)
    tiles, own = default(spec, h100), {**params, "empty_rows": FILL}
    forward = jax.jit(
        lambda given: hopper.forward(**given, **own, residuals=True, config=tiles)
    )
    up = jax.random.normal(jax.random.key(2), given["q"].shape, jnp.bfloat16)
    of = ways(params, backward_default(spec, h100))
    of = {way: fn for way, fn in of.items() if way in chosen}
    if jax.default_backend() == "cpu":
        return _lowered(forward, of, given, up)
    args = given, *forward(given), up
    row: dict[str, Any] = {"use": name, "rows": "empty" if empty else "full"}
    row["errors"] = {}
    for way, fn in of.items():
        start = time.perf_counter()
        program = jax.jit(fn).lower(*args).compile()
        took = round(time.perf_counter() - start, 1)
        got, times = measured(program, args)
        again = program(*args)
        same = all(bool((again[n] == got[n]).all()) for n in "qkv")
        row[way] = times | {"compiled s": took, "repeats": same}
        if way != "none":
            found = errors(got, given, up, params)
            row["errors"][way] = {n: f"{x:.1e}" for n, x in found.items()}
    return row


def main() -> None:
    """Measures every shape in all ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="to see it lower")
    parser.add_argument("--only", help="the name of a use")
    parser.add_argument("--ways", default="none,in kernels,conditional")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for name, use in (SMALL if given.small else SHAPES).items():
        for empty in (False, True) if given.only in (None, name) else ():
            rows.append(compared(name, use, empty, given.ways.split(",")))
            print(rows[-1], flush=True)
    if given.json:
        record.write(given.json, "python3 -m tests.bench.rows_without_keys", rows=rows)


def _lowered(forward: Any, of: dict[str, Any], given: Any, up: Any) -> dict[str, Any]:
    """Lowers all for a GPU that is not there."""
    jax.export.export(forward, platforms=["cuda"])(given)
    out, kept = jax.eval_shape(forward, given)
    for fn in of.values():
        jax.export.export(jax.jit(fn), platforms=["cuda"])(given, out, kept, up)
    return {"lowers": list(of)}


if __name__ == "__main__":
    main()
