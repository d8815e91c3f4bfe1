"""Attention and ragged dots of float32 on Hopper GPUs, and forms of attention.

  python3 -m tests.bench.hopper_float32 [--small] [--only NAMES] [--processes 8]
      [--json PATH]

Each case runs as XLA computes it, as the package chooses, with its kernel forced, and
with other configs; cases in bfloat16 by cuDNN too. `both` has the gradients as well.
Results and gradients of a part are first compared with float64: the figure is the
largest error, as a share of the largest number. Times are microseconds of all kernels
by CUPTI (medians of turns), taken when nothing compiles.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from rewriter import _jax
from rewriter.hardware import timing
from rewriter.kernels.attention import hopper, hopper_decode
from rewriter.kernels.attention.hopper import BackwardTiles, Tiles
from rewriter.kernels.attention.hopper_decode.config import Split
from tests.bench import in_turns, record

BF16, F32 = jnp.bfloat16, jnp.float32
REPEATS = 5


@dataclass(frozen=True)
class Case:
    """One use of attention, and the configs to try.

    Attributes:
        sizes: Batch, positions of queries and of keys, heads of both, width.
        dtype: The operands' dtype.
        causal: Whether later keys are hidden.
        forward: Configs of the forward.
        backward: Configs of the gradients.
        passes: ``"forward"``, ``"both"``, with commas.
        cudnn: Whether cuDNN runs, for which positions are added up to an even number.
    """

    sizes: tuple[int, int, int, int, int, int]
    dtype: Any = F32
    causal: bool = False
    forward: tuple[Any, ...] = ()
    backward: tuple[Any, ...] = ()
    passes: str = "forward,both"
    cudnn: bool = False


NARROW = (
    Tiles(128, 2, 2, turns=False, held=True, claimed=True),
    Tiles(64, 3, 2, claimed=True),
    Tiles(64, 2, 3, turns=False, claimed=True),
    Tiles(96, 2, 2, claimed=True),
)
WIDE = (
    Tiles(64, 2, 2, claimed=True),
    Tiles(32, 4, 2, turns=False, claimed=True),
    Tiles(80, 2, 2, turns=False, claimed=True),
)
NARROW_BACK = (
    BackwardTiles(64, 64, claimed=True),
    BackwardTiles(64, 64, 3, claimed=True),
    BackwardTiles(64, 64, ahead=2, claimed=True),
    BackwardTiles(32, 64, 3, claimed=True),
)
AHEAD = (
    BackwardTiles(128, 128),
    BackwardTiles(128, 128, ahead=2),
    BackwardTiles(64, 128, 3, ahead=2),
    BackwardTiles(64, 64, 3, ahead=2),
    BackwardTiles(64, 64, 2, ahead=2),
)
CLAIMED = tuple(
    BackwardTiles(**{**vars(x), "claimed": True})
    for x in (*AHEAD, BackwardTiles(64, 128, 2), BackwardTiles(64, 64, 3, 3))
)

SHORT = (
    Tiles(128, 4, 3, turns=False, held=True, claimed=True),
    Tiles(128, 2, 2, turns=False, held=True, claimed=True),
)

CASES: dict[str, Case] = {
    "float32 causal 2x2048x16x64": Case(
        (2, 2048, 2048, 16, 16, 64), causal=True, forward=NARROW, backward=NARROW_BACK
    ),
    "float32 causal 4x2048x16x128": Case(
        (4, 2048, 2048, 16, 16, 128),
        causal=True,
        forward=WIDE,
        backward=(BackwardTiles(32, 32), BackwardTiles(32, 32, claimed=True)),
    ),
    "float32 8x577x16x64": Case((8, 577, 577, 16, 16, 64), forward=NARROW[:2]),
    "float32 64x197x12x64": Case((64, 197, 197, 12, 12, 64), forward=NARROW[:2]),
    "float32 4x1024x16x128": Case((4, 1024, 1024, 16, 16, 128)),
    "float32 causal groups 2x2048x32/8x64": Case(
        (2, 2048, 2048, 32, 8, 64), causal=True
    ),
    "float32 32x512x12x64": Case((32, 512, 512, 12, 12, 64)),
    "ViT-B 64x197x12x64": Case(
        (64, 197, 197, 12, 12, 64),
        BF16,
        cudnn=True,
        backward=AHEAD,
        forward=(
            Tiles(224, 2, 2, turns=False, held=True),
            Tiles(128, 4, 3, turns=False),
            Tiles(128, 2, 2, turns=False, held=True),
            Tiles(64, 4, 3, turns=False),
        ),
    ),
    "ViT-L 16x577x16x64": Case(
        (16, 577, 577, 16, 16, 64),
        BF16,
        cudnn=True,
        backward=AHEAD,
        forward=(
            Tiles(128, 4, 3, turns=False),
            Tiles(64, 6, 3, turns=False, held=True),
        ),
    ),
    "causal d64 8x2048x32": Case(
        (8, 2048, 2048, 32, 32, 64),
        BF16,
        True,
        backward=CLAIMED,
        passes="both",
        cudnn=True,
    ),
    "causal d128 4x4096x16": Case(
        (4, 4096, 4096, 16, 16, 128),
        BF16,
        True,
        passes="both",
        cudnn=True,
        backward=(
            BackwardTiles(64, 128, claimed=True),
            BackwardTiles(64, 64, 2, ahead=2, claimed=True),
            BackwardTiles(64, 64, 3, claimed=True),
            BackwardTiles(fused=True),
        ),
    ),
    "causal d256 2x4096x16": Case(
        (2, 4096, 4096, 16, 16, 256),
        BF16,
        True,
        passes="both",
        cudnn=True,
    ),
    "causal d128 1x16384x64/8": Case(
        (1, 16384, 16384, 64, 8, 128),
        BF16,
        True,
        passes="both",
        cudnn=True,
        backward=(BackwardTiles(64, 128, claimed=True), BackwardTiles(fused=True)),
    ),
    "window d64 1x16384x16": Case(
        (1, 16384, 16384, 16, 16, 64),
        BF16,
        True,
        passes="both",
        cudnn=True,
        backward=CLAIMED[:5],
    ),
    "short 64x160x12x64": Case((64, 160, 160, 12, 12, 64), BF16, forward=SHORT),
    "short 64x192x12x64": Case((64, 192, 192, 12, 12, 64), BF16, forward=SHORT),
    "short 128x224x16x32": Case((128, 224, 224, 16, 16, 32), BF16, forward=SHORT),
    "full d128 4x4096x16": Case(
        (4, 4096, 4096, 16, 16, 128),
        BF16,
        passes="both",
        cudnn=True,
        backward=(BackwardTiles(64, 64, 3), BackwardTiles(64, 64, 2, ahead=2)),
    ),
    "causal groups d128 4x2048x32/8": Case(
        (4, 2048, 2048, 32, 8, 128),
        BF16,
        True,
        passes="both",
        cudnn=True,
        backward=(
            BackwardTiles(64, 128, claimed=True),
            BackwardTiles(64, 64, 2, ahead=2, claimed=True),
        ),
    ),
    "BERT 32x512x12x64": Case(
        (32, 512, 512, 12, 12, 64),
        BF16,
        cudnn=True,
        backward=AHEAD[:2],
        passes="both",
    ),
    "decode 1x1 of 32768x32/8x128": Case(
        (1, 1, 32768, 32, 8, 128),
        BF16,
        passes="forward",
        cudnn=True,
        forward=(Split(128, 2, 1), Split(112, 3, 1), Split(80, 4, 1), Split(64, 5, 1)),
    ),
}

RAGGED = {
    "float32 ragged 4097x1408x2048 of 64": (4097, 1408, 2048, 64),
    "float32 ragged 8192x4096x4096 of 16": (8192, 4096, 4096, 16),
    "float32 ragged 32768x2048x1536 of 128": (32768, 2048, 1536, 128),
    "float32 ragged 256x2048x1536 of 128": (256, 2048, 1536, 128),
}
"""Rows, summed numbers, columns, groups."""

SMALL = {"small": Case((1, 96, 96, 2, 1, 32), causal=True)}
SMALL_RAGGED = {"ragged": (128, 64, 64, 4)}
WINDOW, MOST, LONG = 1023, 4 << 30, 16384
Program = Callable[..., Any]


def window_of(name: str, case: Case) -> tuple[int | None, int | None]:
    """The window of a case."""
    return (WINDOW if "window" in name else None, 0 if case.causal else None)


def attention(window: tuple[int | None, int | None]) -> Program:
    """Returns attention as programs write it."""

    def run(q: Any, k: Any, v: Any) -> Any:
        t, s, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, group, 2) for x in (k, v))
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k, preferred_element_type=F32)
        scores = scores * q.shape[-1] ** -0.5
        rows, keys = jnp.arange(t)[:, None], jnp.arange(s)[None]
        if window[1] is not None:
            scores = jnp.where(keys <= rows, scores, -jnp.inf)
        if window[0] is not None:
            scores = jnp.where(keys >= rows - window[0], scores, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(q.dtype)
        return jnp.einsum("bnqk,bknh->bqnh", weights, v)

    return run


def with_gradients(fn: Program) -> Program:
    """Returns a program that also has the gradients by the first arguments."""

    def run(*args: Any) -> Any:
        *given, up = args
        out, back = jax.vjp(fn, *given)
        return out, back(up)

    return run


def by_cudnn(causal: bool, window: Any) -> Program:
    """Returns attention by cuDNN, with positions made even, as it wants them."""

    def run(q: Any, k: Any, v: Any) -> Any:
        t, s = q.shape[1], k.shape[1]
        q, k, v = (
            jnp.pad(x, ((0, 0), (0, x.shape[1] % 2 and 1), (0, 0), (0, 0)))
            for x in (q, k, v)
        )
        more = {} if s == k.shape[1] else {
            "key_value_seq_lengths": jnp.full((q.shape[0],), s, jnp.int32),
            "query_seq_lengths": jnp.full((q.shape[0],), t, jnp.int32),
        }  # fmt: skip
        if window[0] is not None:
            more["local_window_size"] = (window[0], 0)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, implementation="cudnn", **more
        )[:, :t]

    return run


def programs(name: str, case: Case) -> Iterator[tuple[str, str, Program]]:
    """Yields passes, a label and a program."""
    window = window_of(name, case)
    written = attention(window)
    params = {"window": window, "scale": case.sizes[-1] ** -0.5}
    params["out_dtype"] = str(jnp.dtype(case.dtype))
    decodes = case.sizes[1] == 1
    for passes in case.passes.split(","):
        wrap = with_gradients if passes == "both" else (lambda fn: fn)
        if case.passes != "both":  # XLA takes ten times as long, and much memory
            yield passes, "written", wrap(written)
        yield passes, "chosen", rewriter.optimize(wrap(written))
        kernel = {"attention": "hopper_decode" if decodes else "hopper"}
        yield passes, "forced", rewriter.optimize(wrap(written), implementation=kernel)
        if case.cudnn:
            yield passes, "cudnn", wrap(by_cudnn(case.causal, window))
        if passes == "forward":
            of = hopper_decode.forward if decodes else hopper.forward
            for config in case.forward:
                run = functools.partial(forwards, of, config, params)
                yield passes, str(config), run
        else:
            for config in case.backward:
                yield passes, str(config), functools.partial(gradients, config, params)


def forwards(of: Any, config: Any, params: Any, q: Any, k: Any, v: Any) -> Any:
    """The result by a config."""
    return of(q=q, k=k, v=v, config=config, **params)


def gradients(config: Any, params: Any, q: Any, k: Any, v: Any, up: Any) -> Any:
    """The result by the default config, and gradients by another."""
    given = {"q": q, "k": k, "v": v, **params}
    spec = rewriter_spec(given, params)
    tiles = hopper.default(spec, device())
    out, kept = hopper.forward(**given, residuals=True, config=tiles)
    more = {"out": out, "residuals": kept, "cotangent": up, "config": config}
    made = hopper.backward(**given, **more)
    return out, tuple(made[n] for n in "qkv")


def rewriter_spec(given: Any, params: Any) -> Any:
    """The use of attention that these operands are."""
    from rewriter.ops.kernel import spec_of
    from rewriter.ops.registry import registry

    arrays = {n: given[n] for n in "qkv"}
    return spec_of(registry().op("attention"), arrays, params)


def device() -> Any:
    """The GPU that is there, or an H100."""
    from rewriter.ops import device as devices

    return devices.named("h100")


def drawn(case: Case, passes: str) -> tuple[Any, ...]:
    """Normal operands, with a cotangent for gradients."""
    b, t, s, n, heads, h = case.sizes
    sizes = ((b, t, n, h), (b, s, heads, h), (b, s, heads, h), (b, t, n, h))
    keys = jax.random.split(jax.random.key(3), 4)
    made = [
        jax.random.normal(k, x, F32).astype(case.dtype)
        for k, x in zip(keys, sizes, strict=True)
    ]
    return tuple(made if passes == "both" else made[:3])


def exact(case: Case, window: Any, args: tuple[Any, ...]) -> list[np.ndarray]:
    """The result of the first sequence and key head, and gradients, in float64."""
    group = case.sizes[3] // case.sizes[4]
    heads = (group, 1, 1, group)
    with jax.enable_x64():
        few = [
            jnp.asarray(np.asarray(x[:1, :, :n].astype(F32)), jnp.float64)
            for x, n in zip(args, heads, strict=False)
        ]
        fn = functools.partial(in_float64, window)
        if len(few) == 4:
            out, back = jax.vjp(fn, *few[:3])
            return [np.asarray(x) for x in (out, *back(few[3]))]
        return [np.asarray(fn(*few))]


def in_float64(window: Any, q: Any, k: Any, v: Any) -> Any:
    """Attention of one sequence and key head."""
    scores = jnp.einsum("bqnh,bkmh->bnqk", q, k, precision="highest")
    scores = scores * q.shape[-1] ** -0.5
    rows, keys = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    if window[1] is not None:
        scores = jnp.where(keys <= rows, scores, -jnp.inf)
    if window[0] is not None:
        scores = jnp.where(keys >= rows - window[0], scores, -jnp.inf)
    return jnp.einsum("bnqk,bkmh->bqnh", jax.nn.softmax(scores), v, precision="highest")


def errors(got: Any, want: list[np.ndarray]) -> list[float]:
    """The largest error of each, as a share of the largest number."""
    made = []
    for x, y in zip(jax.tree.leaves(got), want, strict=True):
        x = np.asarray(x[:1, :, : y.shape[2]].astype(F32), np.float64)
        made.append(float(f"{np.abs(x - y).max() / np.abs(y).max():.2e}"))
    return made


# ---------------------------------------------------------------------- ragged dots
def ragged_programs(
    sizes: tuple[int, ...],
) -> Iterator[tuple[str, str, Program]]:
    """Yields passes, a label and a program."""

    def dot(x: Any, w: Any, groups: Any) -> Any:
        return jax.lax.ragged_dot(x, w, groups)

    def both(x: Any, w: Any, groups: Any, up: Any) -> Any:
        out, back = jax.vjp(lambda x, w: dot(x, w, groups), x, w)
        return out, back(up)

    for passes, fn in (("forward", dot), ("both", both)):
        m, k, _, g = sizes
        if 4 * m * k * g < MOST:
            yield passes, "written", fn
        yield passes, "chosen", rewriter.optimize(fn)
        for kernel in ("hopper", "memory_bounded", "tiled"):
            forced = rewriter.optimize(fn, implementation={"ragged_dot": kernel})
            yield passes, kernel, forced


def drawn_ragged(sizes: tuple[int, ...], passes: str) -> tuple[Any, ...]:
    """Rows, matrices, uneven sizes of groups, and a cotangent for gradients."""
    m, k, n, g = sizes
    keys = jax.random.split(jax.random.key(4), 3)
    x, w, up = (
        jax.random.normal(key, shape, F32)
        for key, shape in zip(keys, ((m, k), (g, k, n), (m, n)), strict=True)
    )
    ends = np.sort(np.random.default_rng(5).integers(0, m + 1, g - 1))
    groups = np.diff([0, *ends, m]).astype(np.int32)
    made = (x / k**0.5, w, jnp.asarray(groups), up)
    return made if passes == "both" else made[:3]


def exact_ragged(args: tuple[Any, ...]) -> list[np.ndarray]:
    """The result and gradients of the first rows that have one group, in float64."""
    groups = np.asarray(args[2])
    g = int(np.argmax(groups > 0))
    rows = int(groups[g])
    x, w = (np.asarray(y, np.float64) for y in (args[0][:rows], args[1][g]))
    if len(args) < 4:
        return [x @ w]
    up = np.asarray(args[3][:rows], np.float64)
    return [x @ w, up @ w.T, x.T @ up]


def errors_ragged(got: Any, want: list[np.ndarray], args: Any) -> list[float]:
    """The largest error of each, as a share of the largest number."""
    g = int(np.argmax(np.asarray(args[2]) > 0))
    made = []
    for x, y in zip(jax.tree.leaves(got), want, strict=True):
        part = x[g] if x.ndim == 3 else x[: y.shape[0]]
        part = np.asarray(part, np.float64)
        made.append(float(f"{np.abs(part - y).max() / np.abs(y).max():.2e}"))
    return made


# ------------------------------------------------------------------------ measuring
@dataclass
class Made:
    """A compiled program with its arguments."""

    row: dict[str, Any]
    run: Any = None
    args: Any = None


def made_of(name: str, small: bool) -> list[Made]:
    """Compiles all programs of a case, and compares each with float64."""
    ragged = (SMALL_RAGGED if small else RAGGED).get(name)
    case = (SMALL if small else CASES).get(name)
    found = list(ragged_programs(ragged) if ragged else programs(name, case))
    args = {
        passes: drawn_ragged(ragged, passes) if ragged else drawn(case, passes)
        for passes in {x[0] for x in found}
    }
    lowered: list[tuple[Made, Any]] = []
    for passes, label, fn in found:
        one = Made({"model": name, "passes": passes, "by": label}, args=args[passes])
        begun = time.perf_counter()
        try:
            jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
            low = jitted.lower(*args[passes])
            if label == "chosen":
                sites = fn.report(*args[passes]).sites
                one.row["sites"] = [f"{x.kernel} [{x.origin}]" for x in sites]
        except Exception as problem:
            one.row["failed"], low = repr(problem)[:300], None
        lowered.append((one, low))
        one.row["lowering_s"] = round(time.perf_counter() - begun, 1)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: compiled(*pair), lowered))
    wanted = {}
    for passes, given in args.items():
        if ragged:
            wanted[passes] = exact_ragged(given)
        elif max(case.sizes[1:3]) < LONG:
            wanted[passes] = exact(case, window_of(name, case), given)
    for one, _ in lowered:
        check(one, wanted, case)
    return [one for one, _ in lowered]


def check(one: Made, wanted: dict[str, Any], case: Case | None) -> None:
    """Adds errors to a program's row, or why there are none."""
    if one.run is not None:
        try:
            one.row["errors"] = compared(one, wanted, case)
        except Exception as problem:
            one.row["failed"], one.run = repr(problem)[:300], None
    if one.run is None:
        print(one.row, flush=True)


def compared(one: Made, wanted: dict[str, Any], case: Case | None) -> list[float]:
    """The errors of a program's results; of long ones, against the first program."""
    got, passes = one.run(*one.args), one.row["passes"]
    if case is None:
        return errors_ragged(got, wanted[passes], one.args)
    if passes not in wanted:
        group = case.sizes[3] // case.sizes[4]
        wanted[passes] = [
            np.asarray(x[:1, :, :n].astype(F32), np.float64)
            for x, n in zip(jax.tree.leaves(got), (group, group, 1, 1), strict=False)
        ]
    return errors(got, wanted[passes])


def compiled(one: Made, lowered: Any) -> None:
    """Compiles a program; says why it cannot."""
    if lowered is None:
        return
    try:
        one.run = lowered.compile()
        one.row["kib"] = one.run.memory_analysis().temp_size_in_bytes >> 10
    except Exception as problem:
        one.row["failed"] = repr(problem)[:300]


def seconds(one: Made) -> float:
    """The time of a call."""
    if timing.method() == "cupti":
        return sum(x for _, x in _jax.kernel_seconds(lambda: one.run(*one.args)))
    start = time.perf_counter()
    jax.block_until_ready(one.run(*one.args))
    return time.perf_counter() - start


def measure(given: argparse.Namespace, names: Sequence[str]) -> None:
    """Prepares some cases, and measures them in this process's turn."""
    made = []
    for name in names:
        try:
            made.append(made_of(name, given.small))
        except Exception as problem:
            print(name, "failed:", repr(problem)[:500], flush=True)
    print(f"{names} are prepared", flush=True)
    with in_turns.turn():
        for case in made:
            running = [one for one in case if one.run is not None]
            times: dict[int, list[float]] = {id(one): [] for one in running}
            for _ in range(given.repeats):
                for one in running:
                    times[id(one)].append(seconds(one))
            for one in running:
                us = 1e6 * statistics.median(times[id(one)])
                one.row["us"] = round(us, 1)
                print(one.row, flush=True)
    in_turns.write(given.json, [one.row for case in made for one in case])


def main() -> None:
    """Runs all cases in some processes."""
    parser = in_turns.parser(__doc__)
    parser.set_defaults(processes=8, repeats=REPEATS)
    given = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", None)
    names = [*SMALL, *SMALL_RAGGED] if given.small else [*CASES, *RAGGED]
    rows = in_turns.rows_of("tests.bench.hopper_float32", names, given, measure)
    if rows is not None and given.json:
        command = "python3 -m tests.bench.hopper_float32"
        record.write(given.json, command, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
