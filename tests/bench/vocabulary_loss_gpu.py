"""The loss over a vocabulary and its gradients on a GPU: as written, and in blocks.

  python3 -m tests.bench.vocabulary_loss --gpu [--small] [--parts] [--write]

For each shape: the program as XLA has it, a scan over checkpointed rows by hand, our
kernel with several configs, and what `optimize` makes of the program. Figures are
milliseconds of a call (median of calls in turns, by the wall clock, with the device
waited for) and XLA's temporary memory. The others are the distance of the gradients
from those as written, and the kernels that take most time. With ``--parts`` its parts
are timed, too: products with aligned and unaligned classes, and log-sum-exps in two
passes or one.
"""

from __future__ import annotations

import functools
import re
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import rewriter
from rewriter import _jax
from rewriter.kernels.linear_cross_entropy import chunks, hopper, xla
from rewriter.kernels.linear_cross_entropy.chunks import Chunk
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from tests.bench import record

Shape = tuple[int, int, int]
Program = Callable[..., Any]

SHAPES: tuple[Shape, ...] = (
    (8192, 768, 50257),
    (8192, 4096, 128256),
    (32768, 2560, 128256),
)
SMALL: tuple[Shape, ...] = ((256, 64, 2049), (256, 64, 1024))
SHOWN = 7
"""How many kernels of a profile are kept."""


def loss(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over rows x [n, k], with weights [k, v]; in float32 from logits on."""
    logs = jax.nn.log_softmax((x @ w).astype(jnp.float32))
    return -jnp.take_along_axis(logs, labels[:, None], -1).mean()


def tied(x: jax.Array, table: jax.Array, labels: jax.Array) -> jax.Array:
    """The same, of a table [v, k]."""
    return loss(x, table.T, labels)


def spec_of_loss(shape: Shape) -> Any:
    """The use of the op that the loss is."""
    n, k, v = shape
    like = {
        "x": jax.ShapeDtypeStruct((n, k), "bfloat16"),
        "w": jax.ShapeDtypeStruct((k, v), "bfloat16"),
        "labels": jax.ShapeDtypeStruct((n,), "int32"),
    }
    return spec_of(registry().op("linear_cross_entropy"), like, {})


def by_hand(rows: int) -> Program:
    """The same over checkpointed blocks of rows."""

    def of_blocks(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        @jax.checkpoint
        def step(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
            return total + loss(part[0], w, part[1]), None

        parts = x.reshape(-1, rows, x.shape[1]), labels.reshape(-1, rows)
        total, _ = lax.scan(step, jnp.zeros(()), parts)
        return total / parts[1].shape[0]

    return of_blocks


def ours(config: Chunk, kernel: Any = xla) -> Program:
    """Our kernel, as `optimize` puts it into a program with gradients."""

    def both(x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
        each = jnp.full(labels.shape, 1 / labels.size, jnp.float32)
        of = {"x": x, "w": w, "labels": labels, "of_log_probabilities": True}
        out, grads = kernel.together(**of, cotangent=each, config=config)
        return out.mean(), (grads["x"], grads["w"])

    return both


def ways(shape: Shape) -> Iterator[tuple[str, Program]]:
    """Programs that give the loss and both gradients."""
    n, k, v = shape
    taken = functools.partial(jax.value_and_grad, argnums=(0, 1))
    yield "as written", taken(loss)
    yield "optimize", rewriter.optimize(taken(loss))
    rows = max(n // (8 if v < 100000 else 16), 1)
    yield f"by hand, {rows} rows", taken(by_hand(rows))
    config = Chunk(1 << (30 if v < 100000 else 29), 1024, True, 128, True)
    name = f"{config.budget >> 20} MiB"
    yield f"ours, {name}", ours(config)
    yield f"hopper, {name}", ours(config, hopper)
    if v % 8 == 0 and n >= k and 4 * k > n:
        spec = spec_of_loss(shape)
        least = chunks.least_memory(spec, config)
        one = chunks.least_memory(spec, replace(config, one_kernel=True))
        yield f"in place, {least.beside} rows beside", ours(least)
        for some in (least, one, replace(one, beside=n - k)):
            name = f"in place, {some.beside} rows beside"
            name += ", one kernel" * some.one_kernel
            yield f"hopper, {name}", ours(some, hopper)


def forward_ways(shape: Shape) -> Iterator[tuple[str, Program]]:
    """Programs that give the losses alone."""
    del shape
    yield "forward as written", loss
    for name in ("memory_bounded", "hopper"):
        forced = {"linear_cross_entropy": name}
        yield f"forward, {name}", rewriter.optimize(loss, implementation=forced)


def tied_ways(shape: Shape) -> Iterator[tuple[str, Program]]:
    """The same of a table [v, k], as models with tied embeddings have it."""
    del shape
    taken = jax.value_and_grad(tied, argnums=(0, 1))
    yield "tied, as written", taken
    forced = {"linear_cross_entropy": "memory_bounded"}
    yield "tied, ours", rewriter.optimize(taken, implementation=forced)


def of_logits(y: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over rows of given logits [n, v]."""
    logs = jax.nn.log_softmax(y.astype(jnp.float32))
    return -jnp.take_along_axis(logs, labels[:, None], -1).mean()


def given_ways(shape: Shape) -> Iterator[tuple[str, Program, tuple[Any, ...]]]:
    """The loss of given logits and their gradient."""
    n, _, v = shape
    labels = jax.ShapeDtypeStruct((n,), jnp.int32)
    taken = jax.value_and_grad(of_logits)
    forced = {"cross_entropy": "memory_bounded"}
    fast = rewriter.optimize(taken, implementation=forced)
    for dtype in ("bfloat16", "float32"):
        args = jax.ShapeDtypeStruct((n, v), dtype), labels
        yield f"{dtype} logits, as written", taken, args
        yield f"{dtype} logits, ours", fast, args


def one_pass(y: jax.Array) -> jax.Array:
    """Log-sum-exps of rows, with one reduction of pairs."""

    def join(a: Any, b: Any) -> Any:
        top = jnp.maximum(a[0], b[0])
        shift = jnp.where(jnp.isfinite(top), top, 0)
        return top, a[1] * jnp.exp(a[0] - shift) + b[1] * jnp.exp(b[0] - shift)

    y = y.astype(jnp.float32)
    start = jnp.float32(-jnp.inf), jnp.float32(0)
    top, weight = lax.reduce((y, jnp.ones_like(y)), start, join, (1,))
    return jnp.log(weight) + top


def parts(shape: Shape) -> Iterator[tuple[str, Program, tuple[Any, ...]]]:
    """Products with classes as they are and padded, and log-sum-exps."""
    n, k, v = shape
    sizes = sorted({v, -(-v // 128) * 128})
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    for c in sizes:
        yield f"x w, {c}", lambda x, w: x @ w, (like(n, k), like(k, c))
        yield f"d wT, {c}", lambda d, w: d @ w.T, (like(n, c), like(k, c))
        yield f"xT d, {c}", lambda x, d: x.T @ d, (like(n, k), like(n, c))
    pad = lambda w: jnp.pad(w, ((0, 0), (0, sizes[-1] - v)))
    yield "pad", pad, (like(k, v),)
    two = lambda y: jax.nn.logsumexp(y.astype(jnp.float32), axis=1)
    yield "log-sum-exp, two passes", two, (like(n, sizes[-1]),)
    yield "log-sum-exp, one pass", one_pass, (like(n, sizes[-1]),)


def drawn(shape: Shape) -> tuple[jax.Array, ...]:
    """Normal rows and weights in bfloat16, and labels."""
    n, k, v = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (n, k), jnp.bfloat16)
    w = jax.random.normal(keys[1], (k, v), jnp.bfloat16) * k**-0.5
    return x, w.astype(jnp.bfloat16), jax.random.randint(keys[2], (n,), 0, v)


def compiled(program: Program, args: Any) -> tuple[Any, float]:
    """A compiled program, and the seconds that took."""
    start = time.perf_counter()
    return jax.jit(program).lower(*args).compile(), time.perf_counter() - start


def first_call(run: Program, args: Any) -> tuple[dict[str, Any], Any]:
    """Memory and kernels of a compiled program, and its results."""
    out = jax.block_until_ready(run(*args))
    memory = run.memory_analysis()
    row: dict[str, Any] = {"temporary_mib": round(memory.temp_size_in_bytes / 2**20, 1)}
    if jax.default_backend() == "gpu":
        row["kernels"] = profile(lambda: run(*args))
    return row, out


def times_in_turns(
    runs: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of programs, each called once in every turn.

    Large products lower the clock of a GPU, so that the later of two programs would
    seem to be slower.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: {"ms": round(statistics.median(t), 3), "least_ms": round(min(t), 3)}
        for name, t in times.items()
    }


def profile(run: Callable[[], Any]) -> dict[str, float] | str:
    """Milliseconds of the kernels that take most time, by name without numbers."""
    found: Counter[str] = Counter()
    try:
        for name, seconds in _jax.kernel_seconds(run):
            found[re.sub(r"[_.]?\d+", "", name)[:60]] += 1e3 * seconds
    except Exception as problem:  # times by the wall clock remain
        return str(problem)[:200]
    most = {name: round(ms, 3) for name, ms in found.most_common(SHOWN)}
    return {"all": round(sum(found.values()), 3), **most}


@jax.jit
def distance(ours: Any, theirs: Any) -> jax.Array:
    """The largest relative distance of two gradients, by their norms."""
    wide = lambda a: a.astype(jnp.float32)
    off = [
        jnp.linalg.norm(wide(a) - wide(b)) / jnp.linalg.norm(wide(b))
        for a, b in zip(ours, theirs, strict=True)
    ]
    return jnp.stack(off).max()


def measured(
    shape: Shape, repeats: int, workers: int, of_parts: bool
) -> dict[str, Any]:
    """All ways of a shape, by name; those of its parts if asked for."""
    args = jax.block_until_ready(jax.jit(lambda: drawn(shape))())
    turned = args[0], jax.block_until_ready(args[1].T.copy()), args[2]
    plan: list[tuple[str, Program, Any]] = [(n, p, args) for n, p in ways(shape)]
    plan += [(n, p, args) for n, p in forward_ways(shape)]
    if shape[2] % 8 and of_parts:
        plan += [(n, p, turned) for n, p in tied_ways(shape)]
        plan += [*parts(shape), *given_ways(shape)]
    found: dict[str, Any] = {}
    runs: dict[str, Callable[[], Any]] = {}
    with ThreadPoolExecutor(workers) as pool:
        making = [pool.submit(compiled, p, given) for _, p, given in plan]
        first: Any = None
        for (name, _, given), future in zip(plan, making, strict=True):
            try:
                run, seconds = future.result()
                while any(not f.done() for f in making):
                    time.sleep(0.1)  # nothing is timed while others are compiled
                real = [filled(a) for a in given]
                row, out = first_call(run, real)
                row["compile_s"] = round(seconds, 1)
                if isinstance(out, tuple) and given is args:
                    first = out[1] if first is None else first
                    row["loss"] = float(out[0])
                    row["distance"] = float(distance(out[1], first))
                runs[name] = functools.partial(run, *real)
                del out, real
            except Exception as problem:
                lines = traceback.format_exception_only(problem)
                row = {"failed": "".join(lines).strip()[:400]}
            found[name] = row
    for name, times in times_in_turns(runs, repeats).items():
        found[name] = times | found[name]
    for name, row in found.items():
        print(f"  {name:28} {row}", flush=True)
    return found


def filled(value: Any) -> Any:
    """An array; of a shape alone, one of small numbers."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return (jnp.ones(value.shape) * 0.01).astype(value.dtype)
    return value


def main(
    small: bool, seconds: float, write: bool, repeats: int, of_parts: bool = False
) -> None:
    """Measures all shapes for which there is time."""
    start, rows = time.perf_counter(), []
    words = jax.devices()[0].device_kind.lower().removeprefix("nvidia ").split()
    path = record.named(f"vocabulary_loss_{words[0]}")
    for shape in SMALL if small else SHAPES:
        if time.perf_counter() - start > seconds:
            print(f"no time for {shape}", flush=True)
            continue
        print(f"\nrows, k, v: {shape}", flush=True)
        default = chunks.LARGE
        begun = time.perf_counter()
        workers = 2 if shape[0] * shape[2] > 1e9 else 4
        found = measured(shape, repeats, workers, of_parts)
        print(f"  took {time.perf_counter() - begun:.0f} s", flush=True)
        rows.append({"rows, k, v": shape, "dtype": "bfloat16", "ways": found})
        if write:
            command = "python3 -m tests.bench.vocabulary_loss --gpu --write"
            record.write(path, command, default=str(default), rows=rows)
