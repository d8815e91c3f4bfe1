"""Our attention on a Hopper GPU against cuDNN's and XLA's.

  python3 -m tests.bench.hopper_attention [--configs] [--cases "A;B"] [--json PATH]
  python3 -m tests.bench.hopper_attention --beside [...]   # with other operands alone

Milliseconds are the device's by CUPTI, medians of runs that take turns on three sets of
normal operands, compiling and first runs left out; a gradient returns the result too.
TF/s count 2·b·n·pairs·(h + e) operations, pairs being what window and segments leave,
and 3.5 times that with gradients, which are those of q, k and v. The error is the
result's against cuDNN's, or that of XLA (over blocks, where that runs) where cuDNN has
none: both rounded to 16 bits. `jax.nn.dot_product_attention` by XLA, whose softmax is
in float32, is there for biases of pairs. cuDNN is given segments and prefixes as a
table of masks and slopes as one of biases.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.hardware import timing
from rewriter.kernels.attention.hopper import BackwardTiles
from rewriter.kernels.attention.reference import relative_position, usual, visible
from rewriter.kernels.attention.visibility import Visibility
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.registry import registry
from tests.bench import record

NONE, CAUSAL = (None, None), (None, 0)
Window = tuple[int | None, int | None]
CASES: dict[str, tuple[tuple[int, ...], Window, tuple[str, ...]]] = {
    "full, 128 wide, 4k": ((4, 4096, 16, 16, 128), NONE, ()),
    "causal, 128 wide, 4k": ((4, 4096, 16, 16, 128), CAUSAL, ()),
    "causal, 128 wide, 16k": ((1, 16384, 16, 16, 128), CAUSAL, ()),
    "causal, 8 key heads of 32, 4k": ((4, 4096, 32, 8, 128), CAUSAL, ()),
    "full, 128 wide, 1k": ((16, 1024, 16, 16, 128), NONE, ()),
    "full, 128 wide, 512": ((32, 512, 16, 16, 128), NONE, ()),
    "causal, 64 wide, 2k": ((8, 2048, 32, 32, 64), CAUSAL, ()),
    "full, 64 wide, 16k": ((1, 16384, 16, 16, 64), NONE, ()),
    "causal, 64 wide, 16k": ((1, 16384, 16, 16, 64), CAUSAL, ()),
    "window of 1024, 64 wide, 8k": ((2, 8192, 16, 16, 64), (1023, 0), ()),
    "window of 1024, 64 wide, 16k": ((1, 16384, 16, 16, 64), (1023, 0), ()),
    "window of 1024, 128 wide, 16k": ((1, 16384, 16, 16, 128), (1023, 0), ()),
    "causal, 256 wide, 4k": ((2, 4096, 16, 16, 256), CAUSAL, ()),
    "full, 256 wide, 4k": ((2, 4096, 16, 16, 256), NONE, ()),
    "causal, 256 wide, 16k": ((1, 16384, 8, 8, 256), CAUSAL, ()),
    "full, 256 wide, 16k": ((1, 16384, 8, 8, 256), NONE, ()),
    "causal, 192 wide, values of 128, 1k": ((16, 1024, 16, 16, 192, 128), CAUSAL, ()),
    "causal, 192 wide, values of 128, 8k": ((1, 8192, 16, 16, 192, 128), CAUSAL, ()),
    "causal, 192 wide, values of 128, 4k": ((2, 4096, 16, 16, 192, 128), CAUSAL, ()),
    "soft cap, causal, 128 wide, 4k": ((2, 4096, 16, 16, 128), CAUSAL, ("softcap",)),
    "soft cap, causal, 256 wide, 4 key heads of 8, 4k": (
        (4, 4096, 8, 4, 256), CAUSAL, ("softcap",),
    ),
    "soft cap, window of 4096, 256 wide, 4 key heads of 8, 8k": (
        (2, 8192, 8, 4, 256), (4095, 0), ("softcap",),
    ),
    "pair bias and mask, 4 heads of 32, 384": (
        (512, 384, 4, 4, 32), NONE, ("bias", "mask"),
    ),
    "pair bias and mask, 4 heads of 32, 512": (
        (256, 512, 4, 4, 32), NONE, ("bias", "mask"),
    ),
    "pair bias, its gradient, and mask, 4 heads of 32, 384": (
        (512, 384, 4, 4, 32), NONE, ("bias", "mask", "dbias"),
    ),
    "bias of heads and its gradient, 128 wide, 4k": (
        (2, 4096, 16, 16, 128), NONE, ("bias", "dbias"),
    ),
    "segments, causal, 128 wide, 8k": ((2, 8192, 16, 16, 128), CAUSAL, ("segments",)),
    "slopes, causal, 128 wide, 4k": ((4, 4096, 16, 16, 128), CAUSAL, ("alibi",)),
    "slopes, their gradient, causal, 128 wide, 4k": (
        (4, 4096, 16, 16, 128), CAUSAL, ("alibi", "dalibi"),
    ),
    "bias of keys and its gradient, 128 wide, 4k": (
        (4, 4096, 16, 16, 128), NONE, ("key_bias", "dbias"),
    ),
    "sinks, window of 1024, 64 wide, 8k": (
        (1, 8192, 32, 4, 64), (1023, 0), ("sinks",),
    ),
    "prefix, causal, 128 wide, 4k": ((4, 4096, 16, 16, 128), CAUSAL, ("prefix",)),
    "prefix, causal, 256 wide, 1 key head of 8, 1k": (
        (16, 1024, 8, 1, 256), CAUSAL, ("prefix",),
    ),
    "full, 80 wide, 1k": ((16, 1024, 16, 16, 80), NONE, ()),
    "causal, 96 wide, 4k": ((4, 4096, 32, 32, 96), CAUSAL, ()),
    "full, 40 wide, 4k": ((4, 4096, 8, 8, 40), NONE, ()),
    "full, 64 wide, 512": ((32, 512, 16, 16, 64), NONE, ()),
    "full, 64 wide, 1k": ((16, 1024, 16, 16, 64), NONE, ()),
    "full, 64 wide, 197": ((64, 197, 12, 12, 64), NONE, ()),
    "full, 64 wide, 577": ((16, 577, 16, 16, 64), NONE, ()),
    "causal, 128 wide, 1023": ((4, 1023, 16, 16, 128), CAUSAL, ()),
    "causal, 128 wide, 2047": ((4, 2047, 16, 16, 128), CAUSAL, ()),
    "causal, 256 wide, 1023": ((2, 1023, 8, 8, 256), CAUSAL, ()),
    "full, 80 wide, 257": ((64, 257, 16, 16, 80), NONE, ()),
    "full, 72 wide, 729": ((32, 729, 16, 16, 72), NONE, ()),
    "full, 72 wide, 1536": ((1, 1536, 24, 24, 72), NONE, ()),
    "causal, 112 wide, 2047": ((2, 2047, 32, 32, 112), CAUSAL, ()),
    "full, 64 wide, 1500": ((16, 1500, 12, 12, 64), NONE, ()),
    "causal, 64 wide, 1023": ((8, 1023, 16, 16, 64), CAUSAL, ()),
    "full, 32 wide, 49": ((4096, 49, 6, 6, 32), NONE, ()),
}  # fmt: skip
"""By name: sizes, the window, and other operands. Sizes are b, t, heads, heads of k,
width, and the width of v if it is another. "softcap" is a parameter, and "key_bias" a
bias of keys alone. "dbias" and "dalibi" are cotangents."""

SOFTCAP = 50.0
"""That of Gemma 2."""

SETS, TURNS = 3, 20


def operands(shape: tuple[int, ...], seed: int) -> list[jax.Array]:
    """Returns normal q, k, v and a cotangent, bfloat16."""
    (b, t, n, heads, h), e = shape[:5], shape[-1]
    sizes = ((n, h), (heads, h), (heads, e), (n, e))
    return [
        jax.random.normal(jax.random.key(4 * seed + i), (b, t, *x), jnp.bfloat16)
        for i, x in enumerate(sizes)
    ]


def beside(
    shape: tuple[int, ...], names: tuple[str, ...], seed: int
) -> dict[str, jax.Array]:
    """Returns other operands by the op's names.

    A bias is of all pairs for each head in bfloat16, or of keys. A mask of keys shows
    nine in ten. Packed documents have 100 to 3000 tokens, and prefixes an eighth of the
    tokens to a half. Slopes go from 1/2 to 1/256, and sinks are normal numbers.
    """
    b, t, n = shape[:3]
    made: dict[str, jax.Array] = {}
    key = jax.random.key(seed)
    if "bias" in names:
        made["bias"] = jax.random.normal(key, (1, n, t, t), jnp.bfloat16)
    if "key_bias" in names:
        made["bias"] = jax.random.normal(key, (1, n, 1, t))
    if "mask" in names:
        made["mask"] = jax.random.bernoulli(key, 0.9, (b, 1, 1, t))
    if "segments" in names:
        ends = np.cumsum(np.random.default_rng(seed).integers(100, 3000, (b, t)), 1)
        ids = [np.searchsorted(x, np.arange(t), side="right") for x in ends]
        made["q_segments"] = made["kv_segments"] = jnp.asarray(np.stack(ids), jnp.int32)
    if "alibi" in names:
        made["alibi"] = 2.0 ** -jnp.linspace(1, 8, n)
    if "sinks" in names:
        made["sinks"] = jax.random.normal(key, (n,))
    if "prefix" in names:
        made["prefix"] = jax.random.randint(key, (b,), t // 8, t // 2)
    return made


def pairs(shape: tuple[int, ...], window: Window, other: dict[str, jax.Array]) -> float:
    """Returns how many keys the queries of a batch entry see, all together."""
    b, t = shape[:2]
    found, _ = Visibility(t, t, *window).count()
    if "prefix" in other:
        length = other["prefix"].astype(jnp.float32)
        return found + float(jnp.mean(length * (length - 1) / 2))
    if "q_segments" not in other:
        return found
    rows = (other["q_segments"][i : i + 1] for i in range(b))
    count = lambda x: visible(t, t, q_segments=x, kv_segments=x, window=window).sum()
    return float(np.mean([int(jax.jit(count)(x)) for x in rows]))


def cudnn(scale: float, window: Window) -> Callable[..., Any]:
    """Returns cuDNN's attention of q, k, v, and of biases, masks, segments, slopes."""

    def run(
        q: Any,
        k: Any,
        v: Any,
        bias: Any = None,
        mask: Any = None,
        q_segments: Any = None,
        kv_segments: Any = None,
        alibi: Any = None,
        prefix: Any = None,
    ) -> Any:
        t, s = q.shape[1], k.shape[1]
        whole = lambda x: jnp.broadcast_to(x, (*x.shape[:2], t, s))
        if q_segments is not None:
            mask = (q_segments[:, :, None] == kv_segments[:, None])[:, None]
        if alibi is not None:
            away = relative_position(t, s, None, 0).astype(q.dtype)
            bias = alibi.astype(q.dtype)[:, None, None] * away
        if prefix is not None:
            mask = visible(t, s, prefix=prefix, window=window)
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=window[1] is not None and prefix is None,
            bias=None if bias is None else whole(bias),
            mask=None if mask is None else whole(mask),
            local_window_size=None if window[0] is None else (window[0], 0),
            implementation="cudnn",
        )

    return run  # fmt: skip


def gradients(
    function: Callable[..., Any], more: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Returns a function of q, k, v, a cotangent and others: result and gradients.

    Args:
        function: Of q, k, v and others by name.
        more: Others of which there are gradients too.
    """

    def both(q: Any, k: Any, v: Any, up: Any, other: Any) -> Any:
        rest = {x: y for x, y in other.items() if x not in more}
        moving = {"q": q, "k": k, "v": v, **{x: other[x] for x in more}}
        out, back = jax.vjp(lambda x: function(**x, **rest), moving)
        return out, *back(up)[0].values()

    return both


def parameters(name: str) -> dict[str, Any]:
    """Returns the op's parameters in a case."""
    shape, window, names = CASES[name]
    capped = {"softcap": SOFTCAP} if "softcap" in names else {}
    return {"scale": shape[4] ** -0.5, "window": window, **capped}


def others(name: str) -> dict[str, Callable[..., Any]]:
    """Returns what is not ours of a case: functions of q, k, v and others, by name."""
    shape, window, names = CASES[name]
    params = parameters(name)
    plain: dict[str, Callable[..., Any]] = {}
    if not {"sinks", "softcap"} & set(names):
        plain["cudnn"] = cudnn(params["scale"], window)
    if names:
        blocks = registry().kernel("attention", "memory_bounded").forward
        plain["memory_bounded"] = lambda q, k, v, **other: blocks(
            q=q, k=k, v=v, **other, **params
        )
    if {"bias", "mask"} <= set(names):
        plain["jax_nn"] = lambda q, k, v, **other: jax.nn.dot_product_attention(
            q, k, v, **other, scale=params["scale"], implementation="xla"
        )
    if shape[0] * shape[2] * shape[1] ** 2 <= 1 << 31:  # scores of 8 GiB in float32
        plain["xla"] = lambda q, k, v, **other: usual(q, k, v, **other, **params)
    return plain


def candidates(name: str, every: bool) -> dict[tuple[str, str], Callable[..., Any]]:
    """Returns functions of q, k, v, a cotangent and others by (pass, name).

    Args:
        name: Of `CASES`.
        every: Whether to take every config, and not the rules of thumb alone.
    """
    shape, _, names = CASES[name]
    params = parameters(name)
    moving = tuple(x for x in ("bias", "alibi") if f"d{x}" in names)
    ours = registry().kernel("attention", "hopper")
    q, k, v, _ = jax.eval_shape(lambda: operands(shape, 0))
    other = beside(shape, names, 0)
    named = {"q": q, "k": k, "v": v, **other}
    spec = spec_of(registry().op("attention"), named, params)
    found, _ = worth_measuring(ours.space, spec, device.attached(), 24 if every else 1)
    backward, _ = worth_measuring(
        ours.backward_space,
        spec,
        device.attached(),
        24 if every else 1 + len(moving),
    )
    fused = BackwardTiles(fused=True)
    if not names and ours.backward_space.fits(fused, spec, device.attached()).ok:
        backward = (*backward, fused)
    plain = others(name)
    made: dict[tuple[str, str], Callable[..., Any]] = {}
    for by, run in plain.items():
        made["forward", by] = lambda q, k, v, up, other, run=run: run(q, k, v, **other)
        if by != "memory_bounded":
            made["forward_and_vjp", by] = gradients(run, moving)
    for config in found:
        made["forward", str(config)] = lambda q, k, v, up, other, config=config: (
            ours.forward(q=q, k=k, v=v, **other, config=config, **params)
        )
    for config in backward:

        def both(
            q: Any, k: Any, v: Any, up: Any, other: Any, config: Any = config
        ) -> Any:
            named = {"q": q, "k": k, "v": v, **other, **params}
            out, kept = ours.forward(**named, config=found[0], residuals=True)
            assert ours.backward is not None
            grads = ours.backward(
                **named, out=out, residuals=kept, cotangent=up, config=config
            )
            return out, *(grads[x] for x in ("q", "k", "v", *moving))

        made["forward_and_vjp", str(config)] = both
    return made


def measured(name: str, every: bool) -> list[dict[str, Any]]:
    """Returns a row for each pass and candidate of a case."""
    shape, window, names = CASES[name]
    sets = [
        [*operands(shape, seed), beside(shape, names, seed)] for seed in range(SETS)
    ]
    programs, results, rows = {}, {}, []
    for key, run in candidates(name, every).items():
        try:
            program = jax.jit(run).lower(*sets[0]).compile()
            out = jax.block_until_ready(program(*sets[0]))
        except Exception as problem:
            text = repr(problem).splitlines()[0]  # some have no text
            rows.append({"case": name, "pass": key[0], "by": key[1], "error": text})
            continue
        first = out[0] if isinstance(out, tuple) else out
        programs[key] = program
        results[key] = np.asarray(first, np.float32)
    (b, _, n, _, h), e = shape[:5], shape[-1]
    known = ("cudnn", "memory_bounded", "xla")
    by = next(x for x in known if ("forward", x) in results)
    exact, each = results["forward", by], pairs(shape, window, sets[0][-1])
    times = timing.measure(list(programs.values()), sets, TURNS)
    for (passes, what), samples in zip(programs, times, strict=True):
        flops = 2 * b * n * each * (h + e) * (1 if passes == "forward" else 3.5)
        gap = np.linalg.norm(results[passes, what] - exact) / np.linalg.norm(exact)
        rows.append({
            "case": name, "pass": passes, "by": what,
            "ms": round(samples.median * 1e3, 4),
            "sigma_percent": round(100 * samples.sigma / samples.median, 1),
            "tflops": round(flops / samples.median / 1e12),
            f"against_{by}": float(f"{gap:.1e}"),
        })  # fmt: skip
    return rows


def main() -> None:
    """Prints a line per measurement; writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--cases", default="")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    chosen = (
        given.cases.split(";")
        if given.cases
        else [
            name for name, (_, _, names) in CASES.items() if names or not given.beside
        ]
    )
    for name in chosen:
        for row in measured(name, given.configs):
            print(*row.values(), sep="   ", flush=True)
            rows.append(row)
    if given.json:
        command = "python3 -m tests.bench.hopper_attention --configs"
        record.write(
            given.json, command, cases={n: CASES[n] for n in chosen}, rows=rows
        )


if __name__ == "__main__":
    main()
