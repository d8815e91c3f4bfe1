"""What is chosen for programs on this GPU, against each kernel that could be forced.

  python3 -m tests.bench.choices [--seconds N] [--spills] [--json PATH]
      [--sets attention,sizes,decode,dtypes,narrow,norms,small_norms,
      products]

A row is a program as users write it, forward or with all gradients; its arms are what
`rewriter.optimize` chooses, and each kernel of the op forced. Microseconds are the
device's by CUPTI, medians of runs that take turns on sets of normal inputs; compiling
is left out. A row says by how many percent the choice is slower than the fastest arm:
above two is a wrong choice. XLA is an arm where its scores take less than `XLA_BYTES`.

Each arm may fail alone. After `--seconds` no further row begins.
`tests.bench.held_out` does the same for uses that are drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from rewriter.hardware import timing
from tests.bench import record

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
QK, PV = "btnh,bsnh->bnts", "bnts,bsnh->btnh"

XLA_BYTES = 1 << 30
SETS, TURNS = 2, 11
SOME = 1 << 22
"""Numbers of each result and gradient that are compared; the worst is shown."""

ALLOWED = 2.0
"""Percent by which a choice may be slower."""


@dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        name: What it is, in words.
        op: The op in it.
        fn: The function of arrays.
        shapes: (shape, dtype) of its arguments; integers are drawn up to `most`.
        forced: Kernels to force beside the choice.
        passes: ``forward``, and ``both`` with gradients.
        scores: Bytes of what XLA writes in between.
        most: The largest integer.
    """

    name: str
    op: str
    fn: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], Any], ...]
    forced: tuple[str, ...]
    passes: tuple[str, ...] = ("forward", "both")
    scores: float = 0.0
    most: int = field(default=1)


# ---------------------------------------------------------------- attention
def attention(
    window: tuple[int | None, int | None] = (None, None), spelling: str = "cast"
) -> Callable[..., Any]:
    """Returns attention, as decoders and encoders write it; groups are repeated."""

    def run(q: Any, k: Any, v: Any, *more: Any) -> Any:
        group = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, group, 2) if group > 1 else x for x in (k, v))
        wide = None if spelling == "16 bits" else F32
        if spelling == "all cast":
            q, k, v = (x.astype(F32) for x in (q, k, v))
        x = jnp.einsum(QK, q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
        if more and more[0].ndim == 4:
            x = x + more[0]
        left, right = window
        t, s = x.shape[-2:]
        away = jnp.arange(s)[None] - jnp.arange(t)[:, None]
        if right is not None:
            keep = away <= right
            keep = keep if left is None else keep & (away >= -left)
            x = jnp.where(keep, x, jnp.finfo(x.dtype).min)
        if more and more[0].ndim == 1:
            keep = jnp.arange(s)[None] < more[0][:, None]
            x = jnp.where(keep[:, None, None], x, jnp.finfo(x.dtype).min)
        weights = jax.nn.softmax(x.astype(F32), -1)
        if spelling in ("cast", "16 bits", "float32 result"):
            weights = weights.astype(v.dtype)
        wide = F32 if spelling == "float32 result" else None
        out = jnp.einsum(PV, weights, v, preferred_element_type=wide)
        return out.astype(BF16) if spelling == "weights, cast" else out

    return run


def attending(
    name: str,
    b: int,
    t: int,
    s: int,
    n: int,
    k: int,
    h: int,
    *,
    window: tuple[int | None, int | None] = (None, None),
    forced: tuple[str, ...] = ("cudnn", "hopper"),
    passes: tuple[str, ...] = ("forward", "both"),
    dtype: Any = BF16,
    spelling: str = "cast",
    more: tuple[Any, ...] = (),
) -> Row:
    """Returns a row of attention."""
    sizes = ((b, t, n, h), (b, s, k, h), (b, s, k, h))
    given = (*((x, dtype) for x in sizes), *more)
    fn = attention(window, spelling)
    scores = 4.0 * b * n * t * s
    return Row(name, "attention", fn, given, forced, passes, scores, most=s)


CAUSAL = (None, 0)
DECODE = ("cudnn", "hopper_decode", "hopper")


def of_attention() -> Iterator[Row]:
    """Rows of training and of vision models."""
    yield attending("ViT-B 64x197x12x64", 64, 197, 197, 12, 12, 64)
    yield attending("ViT-L 16x577x16x64", 16, 577, 577, 16, 16, 64)
    yield attending("causal d64 2k", 8, 2048, 2048, 32, 32, 64, window=CAUSAL)
    yield attending("causal d128 4k", 4, 4096, 4096, 16, 16, 128, window=CAUSAL)
    yield attending("full d128 4k", 4, 4096, 4096, 16, 16, 128)
    yield attending("flux 1x1536x24x72", 1, 1536, 1536, 24, 24, 72)
    yield attending("cross attention to 77", 8, 4096, 77, 8, 8, 40)
    yield attending("window d64 16k", 1, 16384, 16384, 16, 16, 64, window=(1023, 0))
    yield attending("window d128 16k", 1, 16384, 16384, 16, 16, 128, window=(1023, 0))
    yield attending("d112 causal 2x2048x32", 2, 2048, 2048, 32, 32, 112, window=CAUSAL)
    yield attending(
        "float32 causal 2x2048x16x64", 2, 2048, 2048, 16, 16, 64, window=CAUSAL,
        dtype=F32, forced=("memory_bounded",),
    )  # fmt: skip
    yield attending("causal d256 4k", 2, 4096, 4096, 16, 16, 256, window=CAUSAL)
    yield attending("GQA 32/8 4k", 4, 4096, 4096, 32, 8, 128, window=CAUSAL)
    yield attending("causal 16k, 8 heads", 1, 16384, 16384, 8, 8, 128, window=CAUSAL)
    bias = (((1, 6, 49, 49), BF16),)
    yield attending("swin 4096x49x6x32", 4096, 49, 49, 6, 6, 32, more=bias)


def of_sizes() -> Iterator[Row]:
    """Lengths and widths that are no multiples of tiles, and short sequences."""
    for t in (512, 1016, 1023, 1024, 2047):
        yield attending(f"causal d128 {t}", 4, t, t, 16, 16, 128, window=CAUSAL)
    yield attending("causal d64 1k", 8, 1024, 1024, 12, 12, 64, window=CAUSAL)
    yield attending("causal d256 1023", 2, 1023, 1023, 8, 8, 256, window=CAUSAL)
    yield attending("ViT-H 64x257x16x80", 64, 257, 257, 16, 16, 80)
    yield attending("SigLIP 32x729x16x72", 32, 729, 729, 16, 16, 72)


def of_decode() -> Iterator[Row]:
    """Rows of one query for each sequence."""
    for name, b, s, n, k, h in (
        ("b1 s32k 32/8", 1, 32768, 32, 8, 128),
        ("b32 s4k 32/8", 32, 4096, 32, 8, 128),
        ("b16 s8k 32/8", 16, 8192, 32, 8, 128),
        ("b64 s1k 32/8", 64, 1024, 32, 8, 128),
        ("b8 s4k d64", 8, 4096, 32, 8, 64),
        ("b4 s16k 64/8", 4, 16384, 64, 8, 128),
    ):
        yield attending(
            f"decode {name}", b, 1, s, n, k, h, forced=DECODE, passes=("forward",)
        )  # fmt: skip
    lengths = (((128,), jnp.int32),)
    yield attending(
        "decode 128x1024 16 heads of 64, lengths", 128, 1, 1024, 16, 16, 64,
        forced=DECODE, passes=("forward",), more=lengths,
    )  # fmt: skip


def of_dtypes() -> Iterator[Row]:
    """Spellings with other dtypes of weights and of the result."""
    for h in (64, 128):
        sizes = (4, 2048, 2048, 16, 16, h)
        for spelling in ("cast", "float32 result", "float32 weights"):
            yield attending(
                f"{spelling}, causal, d{h}", *sizes, window=CAUSAL, spelling=spelling,
                forced=("hopper",),
            )  # fmt: skip
    kept = "float32 weights"
    for name, sizes, spelling in (
        (f"{kept}, full, d128", (4, 2048, 2048, 16, 16, 128), kept),
        (f"{kept}, full, d256", (2, 2048, 2048, 16, 16, 256), kept),
        ("all cast, 8x1023x16x64", (8, 1023, 1023, 16, 16, 64), "all cast"),
        (f"{kept}, decode b16 s8k", (16, 1, 8192, 32, 8, 128), kept),
    ):
        forced = DECODE[1:] if sizes[1] == 1 else ("hopper",)
        yield attending(
            name, *sizes, spelling=spelling, forced=forced, passes=("forward",)
        )


def of_spills() -> Iterator[Row]:
    """What takes most registers: compiled alone, to see what ptxas says of it."""
    for h in (64, 128, 256):
        yield attending(f"d{h}", 2, 2048, 2048, 16, 16, h, forced=("hopper",),
                        spelling="float32 weights")  # fmt: skip


# -------------------------------------------------------------------- norms
def rms(x: Any, scale: Any) -> Any:
    """RMS norm in float32, as decoders write it."""
    wide = x.astype(F32)
    made = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (made * scale.astype(F32)).astype(x.dtype)


def layer(x: Any, scale: Any, bias: Any) -> Any:
    """Layer norm in float32."""
    wide = x.astype(F32)
    mean = wide.mean(-1, keepdims=True)
    var = jnp.mean(jnp.square(wide - mean), -1, keepdims=True)
    made = (wide - mean) * jax.lax.rsqrt(var + 1e-5)
    return (made * scale + bias).astype(x.dtype)


def norming(kind: str, rows: int, columns: int, dtype: Any) -> Row:
    """Returns a row of a norm."""
    given = (((rows, columns), dtype), ((columns,), F32))
    if kind == "layer":
        given = (*given, ((columns,), F32))
    name = f"{kind} {rows}x{columns} {jnp.dtype(dtype).name}"
    fn = rms if kind == "rms" else layer
    return Row(name, f"{kind}_norm", fn, given, ("hopper", "xla"))


def of_narrow() -> Iterator[Row]:
    """Layer norms that XLA computes in several passes, with gradients alone."""
    for rows, columns in ((18464, 768), (65536, 512), (131072, 256), (1024, 4096)):
        yield replace(norming("layer", rows, columns, BF16), passes=("both",))


def of_small_norms() -> Iterator[Row]:
    """Norms of 2 to 16 MiB, which the chip's cache holds."""
    for rows, columns in (
        (2048, 768), (4096, 768), (8192, 768), (8192, 512), (4096, 1024), (8192, 1024),
        (1024, 2048), (2048, 2048), (1024, 4096),
    ):  # fmt: skip
        yield norming("layer", rows, columns, BF16)
        yield norming("rms", rows, columns, BF16)


def of_norms() -> Iterator[Row]:
    """Narrow and wide rows, few and many, of each dtype."""
    for columns in (768, 128, 512):
        yield norming("layer", (32 << 20) // columns, columns, BF16)
        yield norming("rms", (32 << 20) // columns, columns, BF16)
    yield norming("layer", 18464, 768, BF16)
    yield norming("layer", 18464, 768, F32)
    yield norming("layer", 9850, 1024, BF16)
    for rows in (512, 1024, 2048):
        yield norming("layer", rows, 4096, BF16)
        yield norming("rms", rows, 4096, BF16)
    for dtype in (F16, F32):
        yield norming("rms", 8192, 4096, dtype)
        yield norming("rms", 131072, 128, dtype)


# ----------------------------------------------------------------- products
def swiglu(x: Any, gate: Any, up: Any) -> Any:
    """A gated linear unit's branches."""
    return jax.nn.silu(x @ gate) * (x @ up)


def ragged(x: Any, w: Any, sizes: Any) -> Any:
    """A ragged dot whose groups are about equal."""
    count, m = sizes.shape[0], x.shape[0]
    even = jnp.full((count,), m // count, jnp.int32) + sizes * 0
    return jax.lax.ragged_dot(x, w, even.at[0].add(m - even.sum()))


def of_products() -> Iterator[Row]:
    """Gated linear units and ragged dots."""
    for m, k, n in ((8192, 4096, 14336), (16384, 2048, 8192)):
        given = (((m, k), BF16), ((k, n), BF16), ((k, n), BF16))
        yield Row(
            f"swiglu {m}x{k}x{n}", "gated_linear_unit", swiglu, given,
            ("hopper", "xla"),
        )  # fmt: skip
    for m, k, n, g in (
        (4097, 1408, 2048, 64), (65536, 2048, 768, 128), (16384, 7168, 2048, 256),
    ):  # fmt: skip
        given = (((m, k), BF16), ((g, k, n), BF16), ((g,), jnp.int32))
        yield Row(
            f"ragged {m}x{k}x{n} g{g}", "ragged_dot", ragged, given, ("hopper",),
            passes=("forward", "both") if m < 16384 else ("forward",),
        )  # fmt: skip


EVERY: dict[str, Callable[[], Iterator[Row]]] = {
    "attention": of_attention, "sizes": of_sizes, "decode": of_decode,
    "dtypes": of_dtypes,
    "narrow": of_narrow, "norms": of_norms, "small_norms": of_small_norms,
    "products": of_products,
}  # fmt: skip


# ---------------------------------------------------------------- measuring
def drawn(row: Row, seed: int) -> tuple[jax.Array, ...]:
    """Returns normal arguments, integers from 1 to the row's largest."""
    keys = jax.random.split(jax.random.key(seed), len(row.shapes))

    def one(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.random.randint(key, shape, 1, row.most + 1, dtype)
        return jax.random.normal(key, shape, dtype)

    make = jax.jit(lambda keys: tuple(
        one(key, *given) for key, given in zip(keys, row.shapes, strict=True)
    ))  # fmt: skip
    return make(keys)


def of_pass(row: Row, passes: str) -> Row:
    """Returns the row, or one that returns gradients too.

    The cotangent is an argument, as it comes out of another kernel in a program: XLA
    would compute one that is written here within its own kernels.
    """
    if passes == "forward":
        return row
    floats = [jnp.issubdtype(d, jnp.floating) for _, d in row.shapes]

    def both(*given: Any) -> Any:
        *args, up = given
        some = lambda *moving: row.fn(*_merged(args, moving, floats))
        out, back = jax.vjp(some, *(x for x, f in zip(args, floats, strict=True) if f))
        return out, back(up)

    out = jax.eval_shape(row.fn, *(jax.ShapeDtypeStruct(*x) for x in row.shapes))
    return replace(row, fn=both, shapes=(*row.shapes, (out.shape, out.dtype)))


def _merged(args: Any, moving: Any, floats: list[bool]) -> list[Any]:
    rest = iter(moving)
    return [next(rest) if f else x for x, f in zip(args, floats, strict=True)]


def compiled(
    row: Row, passes: str, by: str, shapes: Any
) -> tuple[Any, tuple[str, ...]]:
    """Returns a compiled arm, and the kernels of its sites."""
    fn = row.fn
    if by == "written":
        return jax.jit(fn).lower(*shapes).compile(), ()
    forced = {} if by == "chosen" else {"implementation": {row.op: by}}
    fast = rewriter.optimize(fn, **forced)
    kernels = tuple(
        f"{s.kernel} [{s.origin}]" + ("" if s.backward or passes == "forward" else " f")
        for s in fast.report(*shapes).sites
    )
    return fast.lower(*shapes).compile(), kernels


def arms_of(row: Row, shapes: Any) -> list[str]:
    """Returns the names of a row's arms: the choice, and what else could be forced."""
    sites = rewriter.explain(row.fn)(*shapes).sites
    taken = {site.kernel for site in sites if site.op == row.op}
    forced = [x for x in row.forced if x != "xla" and x not in taken]
    written = row.scores <= XLA_BYTES and taken != {"xla"}
    return ["chosen", *forced, *(["written"] if written else [])]


Arms = dict[str, Future[Any]]


def compiling(row: Row, passes: str, pool: ThreadPoolExecutor) -> Arms:
    """Returns the arms of a row, each a compiled program soon."""
    shapes = tuple(jax.ShapeDtypeStruct(*x) for x in row.shapes)
    names = arms_of(row, shapes)
    return {by: pool.submit(compiled, row, passes, by, shapes) for by in names}


def measured(row: Row, passes: str, arms: Arms) -> dict[str, Any]:
    """Returns a row's figures: microseconds by arm, errors, and what was chosen."""
    sets = [drawn(row, seed) for seed in range(SETS)]
    made: dict[str, Any] = {"row": row.name, "pass": passes, "us": {}, "failed": {}}
    programs: dict[str, Any] = {}
    results: dict[str, list[Any]] = {}
    for by, future in arms.items():
        try:
            program, kernels = future.result()
            if by == "chosen":
                made["chosen"] = kernels
            elif by != "written" and not any(k.startswith(by) for k in kernels):
                made["failed"][by] = f"not taken: {kernels}"
                continue
            out = jax.block_until_ready(program(*sets[0]))
            some = (x.reshape(-1)[:SOME] for x in jax.tree.leaves(out))
            results[by] = [np.asarray(x, np.float32) for x in some]
            programs[by] = program
        except Exception as problem:
            text = str(problem).strip() or repr(problem)
            made["failed"][by] = text.splitlines()[0][:160]
    times = timing.measure(list(programs.values()), sets, TURNS)
    for by, samples in zip(programs, times, strict=True):
        made["us"][by] = round(1e6 * samples.median, 1)
    made["kernels"] = [len(samples.kernels) for samples in times]
    first_of = next((x for x in ("written", "chosen") if x in results), None)
    if first_of:
        exact = results.pop(first_of)
        each = {by: max(map(apart, x, exact)) for by, x in results.items()}
        made[f"apart from {first_of}"] = each
    best = min(made["us"].values(), default=math.nan)
    if "chosen" in made["us"]:
        made["slower_percent"] = round(100 * (made["us"]["chosen"] / best - 1), 1)
    return made


def apart(x: Any, exact: Any) -> float:
    """The norm of a difference, relative to a result's."""
    return float(f"{np.linalg.norm(x - exact) / np.linalg.norm(exact):.1e}")


CHUNK = 10
"""Rows that are compiled together, before the first of them is timed."""


def main() -> None:
    """Prints a line per row, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", default=",".join(EVERY))
    parser.add_argument("--spills", action="store_true", help="compile, and that alone")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    if given.spills:
        for row in of_spills():
            shapes = [jax.ShapeDtypeStruct(*x) for x in row.shapes]
            print(row.name, compiled(row, "forward", "hopper", shapes)[1], flush=True)
        return
    rows = [row for name in given.sets.split(",") for row in EVERY[name]()]
    command = f"python3 -m tests.bench.choices --sets {given.sets}"
    all_measured(rows, given.seconds, given.json, command)


def all_measured(
    rows: Iterable[Row], seconds: float, path: pathlib.Path | None, command: str
) -> None:
    """Prints a line per row and pass, and writes all of them if there is a path.

    Args:
        rows: The programs.
        seconds: After so many no further row begins.
        path: Where figures go.
        command: What is said to have made them.
    """
    begun, done = time.monotonic(), []
    todo = [(of_pass(row, passes), passes) for row in rows for passes in row.passes]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i in range(0, len(todo), CHUNK):
            if time.monotonic() - begun > seconds:
                print(f"no time for {len(todo) - i} rows", flush=True)
                break
            some: list[tuple[Row, str, Arms]] = []
            for row, passes in todo[i : i + CHUNK]:
                try:
                    some.append((row, passes, compiling(row, passes, pool)))
                except Exception as problem:
                    print(row.name, passes, repr(problem)[:200], flush=True)
            wait([x for *_, arms in some for x in arms.values()])
            for row, passes, arms in some:
                done.append(printed(row, passes, arms))
            if path:
                record.write(path, command, rows=done)


def printed(row: Row, passes: str, arms: Arms) -> dict[str, Any]:
    """Returns a row's figures, or what failed, and prints them."""
    try:
        made = measured(row, passes, arms)
    except Exception as problem:
        made = {"row": row.name, "pass": passes, "failed": repr(problem)[:200]}
    wrong = "WRONG " if made.get("slower_percent", 0) > ALLOWED else ""
    print(wrong + json.dumps(made, default=str), flush=True)
    return made


if __name__ == "__main__":
    main()
