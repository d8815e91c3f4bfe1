"""Our attention on a Hopper GPU against cuDNN's and XLA's.

  python3 -m tests.bench.hopper_attention [--configs] [--cases "A;B"] [--json PATH]

Milliseconds are the device's by CUPTI, medians of runs that take turns on three sets of
normal operands, compiling and first runs left out; a gradient returns the result too.
TF/s count 4·b·n·pairs·h operations, pairs being what the mask leaves, and 3.5 times
that with gradients. The error is the result's against cuDNN's, both rounded to 16 bits.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter import device, timing
from rewriter.kernel import spec_of, worth_measuring
from rewriter.kernels.attention.cost import seen
from rewriter.kernels.attention.hopper import BackwardTiles
from rewriter.kernels.attention.reference import usual
from rewriter.registry import registry
from tests.bench import record

NONE, CAUSAL = (None, None), (None, 0)
CASES: dict[str, tuple[tuple[int, ...], tuple[int | None, int | None]]] = {
    "full, 128 wide, 4k": ((4, 4096, 16, 16, 128), NONE),
    "causal, 128 wide, 4k": ((4, 4096, 16, 16, 128), CAUSAL),
    "causal, 128 wide, 16k": ((1, 16384, 16, 16, 128), CAUSAL),
    "causal, 8 key heads of 32, 4k": ((4, 4096, 32, 8, 128), CAUSAL),
    "full, 128 wide, 1k": ((16, 1024, 16, 16, 128), NONE),
    "causal, 64 wide, 2k": ((8, 2048, 32, 32, 64), CAUSAL),
    "full, 64 wide, 16k": ((1, 16384, 16, 16, 64), NONE),
    "window of 1024, 64 wide, 8k": ((2, 8192, 16, 16, 64), (1023, 0)),
    "causal, 256 wide, 4k": ((2, 4096, 16, 16, 256), CAUSAL),
}
"""(b, t, heads, heads of k, width) and window, by name."""

SETS, TURNS = 3, 20


def operands(shape: tuple[int, ...], seed: int) -> list[jax.Array]:
    """Returns normal q, k, v and a cotangent, bfloat16."""
    b, t, n, heads, h = shape
    return [
        jax.random.normal(jax.random.key(4 * seed + i), (b, t, m, h), jnp.bfloat16)
        for i, m in enumerate((n, heads, heads, n))
    ]


def cudnn(scale: float, window: tuple[int | None, int | None]) -> Callable[..., Any]:
    """Returns cuDNN's attention."""
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=window[1] is not None,
        local_window_size=None if window[0] is None else (window[0], 0),
        implementation="cudnn",
    )  # fmt: skip


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of q, k, v and a cotangent: the result and gradients."""

    def both(q: Any, k: Any, v: Any, up: Any) -> Any:
        out, back = jax.vjp(function, q, k, v)
        return out, *back(up)

    return both


def candidates(
    shape: tuple[int, ...], window: tuple[int | None, int | None], every: bool
) -> dict[tuple[str, str], Callable[..., Any]]:
    """Returns functions of q, k, v and a cotangent by (pass, name).

    Args:
        shape: As in `CASES`.
        window: As in `CASES`.
        every: Whether to take every config, and not the rules of thumb alone.
    """
    scale = shape[4] ** -0.5
    params = {"scale": scale, "window": window}
    ours = registry().kernel("attention", "hopper")
    q, k, v, _ = jax.eval_shape(lambda: operands(shape, 0))
    spec = spec_of(registry().op("attention"), {"q": q, "k": k, "v": v}, params)
    found, _ = worth_measuring(ours.space, spec, device.attached(), 24 if every else 1)
    backward, _ = worth_measuring(
        ours.backward_space, spec, device.attached(), 24 if every else 1
    )
    fused = BackwardTiles(fused=True)
    if ours.backward_space.fits(fused, spec, device.attached()).ok:
        backward = (*backward, fused)
    plain = {"cudnn": cudnn(scale, window)}
    if shape[0] * shape[2] * shape[1] ** 2 <= 1 << 31:  # scores of 8 GiB in float32
        plain["xla"] = lambda q, k, v: usual(q, k, v, **params)
    made: dict[tuple[str, str], Callable[..., Any]] = {}
    for name, run in plain.items():
        made["forward", name] = lambda q, k, v, up, run=run: run(q, k, v)
        made["forward_and_vjp", name] = gradients(run)
    for config in found:
        made["forward", str(config)] = lambda q, k, v, up, config=config: ours.forward(
            q=q, k=k, v=v, config=config, **params
        )
    for config in backward:

        def both(q: Any, k: Any, v: Any, up: Any, config: Any = config) -> Any:
            named = {"q": q, "k": k, "v": v, **params}
            out, kept = ours.forward(**named, config=found[0], residuals=True)
            assert ours.backward is not None
            grads = ours.backward(
                **named, out=out, residuals=kept, cotangent=up, config=config
            )
            return out, *(grads[x] for x in "qkv")

        made["forward_and_vjp", str(config)] = both
    return made


def measured(name: str, every: bool) -> list[dict[str, Any]]:
    """Returns a row for each pass and candidate of a case."""
    shape, window = CASES[name]
    sets = [operands(shape, seed) for seed in range(SETS)]
    programs, results, rows = {}, {}, []
    for key, run in candidates(shape, window, every).items():
        try:
            program = jax.jit(run).lower(*sets[0]).compile()
            out = jax.block_until_ready(program(*sets[0]))
        except Exception as problem:
            text = str(problem).splitlines()[0]
            rows.append({"case": name, "pass": key[0], "by": key[1], "error": text})
            continue
        first = out[0] if isinstance(out, tuple) else out
        programs[key] = program
        results[key] = np.asarray(first, np.float32)
    (b, t, n, _, h), exact = shape, results["forward", "cudnn"]
    pairs, _ = seen(t, t, window, 0)
    times = timing.measure(list(programs.values()), sets, TURNS)
    for (passes, by), samples in zip(programs, times, strict=True):
        flops = 4 * b * n * pairs * h * (1 if passes == "forward" else 3.5)
        gap = np.linalg.norm(results[passes, by] - exact) / np.linalg.norm(exact)
        rows.append({
            "case": name, "pass": passes, "by": by,
            "ms": round(samples.median * 1e3, 4),
            "sigma_percent": round(100 * samples.sigma / samples.median, 1),
            "tflops": round(flops / samples.median / 1e12),
            "against_cudnn": float(f"{gap:.1e}"),
        })  # fmt: skip
    return rows


def main() -> None:
    """Prints a line per measurement; writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for name in given.cases.split(";"):
        for row in measured(name, given.configs):
            print(*row.values(), sep="   ", flush=True)
            rows.append(row)
    if given.json:
        command = "python3 -m tests.bench.hopper_attention --configs"
        record.write(given.json, command, cases={n: CASES[n] for n in CASES}, rows=rows)


if __name__ == "__main__":
    main()
