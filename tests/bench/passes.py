"""Measures a model's passes as written, rewritten, and written by hand.

Programs are compiled side by side before the first is timed; there is no row for one
with other results than the original's. Times are wall-clock medians, memory is XLA's
temporary memory; on a GPU the device's time is split by what its kernels do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import rewriter
from rewriter import _jax
from rewriter.hardware import timing

Loss = Callable[..., jax.Array]

LOSS, NORM = 2e-3, 2e-2
"""Largest relative differences of the loss, and of all gradients' norm, in bfloat16."""

KINDS = {
    "attention": ("sdpa", "fmha", "flash", "cudnn6fusion"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "dot"),
}
"""What a GPU kernel does, by what its name holds; the rest is ``"other"``."""


class Disagreement(Exception):
    """The rewritten program's results are not the original's, up to rounding."""


@dataclass(frozen=True)
class Case:
    """One pass to compare.

    Attributes:
        what: The pass, in words.
        fn: The function as written: the loss, or the loss and the weights' gradients.
        manual: The same with a kernel called by hand, where there is one.
        memory: Bytes in which what checkpoints compute again may be kept.
    """

    what: str
    fn: Callable[..., Any]
    manual: Callable[..., Any] | None = None
    memory: int = 0


def cases(
    loss: Callable[[bool], Loss],
    manual: Callable[[bool], Loss] | None = None,
    memory: int = 0,
) -> list[Case]:
    """The passes of a loss.

    Args:
        loss: Makes the loss, given whether layers are checkpointed.
        manual: The same with a kernel called by hand.
        memory: Bytes in which, in one more pass, what checkpoints compute again may be
            kept.
    """

    def case(what: str, of: Callable[[Any], Any], checkpointed: bool) -> Case:
        by_hand = None if manual is None else of(manual(checkpointed))
        return Case(what, of(loss(checkpointed)), by_hand)

    made = [
        case("forward", lambda fn: fn, False),
        case("gradient", jax.value_and_grad, False),
        case("gradient, layers checkpointed", jax.value_and_grad, True),
    ]
    if memory:
        what = f"{made[-1].what}, {memory / 2**30:.3g} GiB to keep"
        made.append(dataclasses.replace(made[-1], what=what, memory=memory))
    return made


def cross_entropy(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """The mean over tokens, of logits [b, t, v] and token ids [b, t + 1]."""
    chosen = jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
    total = jax.nn.logsumexp(logits.astype(jnp.float32), -1)
    return jnp.mean(total - chosen.astype(jnp.float32))


def compare(given: list[Case], args: tuple, repeats: int) -> list[dict[str, Any]]:
    """One row per case; a row is printed when it is there.

    Raises:
        Disagreement: If a rewritten program's loss or gradients are others.
    """
    rows = []
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        known: dict[int, Future[Any]] = {}
        prepared = [_compiling(case, args, pool, known) for case in given]
        wait(program for _, compiling in prepared for program in compiling.values())
        for case, (report, compiling) in zip(given, prepared, strict=True):
            row = {
                "what": case.what,
                "batch_and_tokens": list(args[1].shape),
                "sites": sites(report),
                "missed": len(report.misses),
                **_row(case.what, compiling, args, repeats),
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
    if timing.method() == "cupti":  # last: a profiler may slow what follows
        for row, (_, compiling) in zip(rows, prepared, strict=True):
            for name in compiling:
                if "ms" in row[name]:
                    row[name]["device_ms"] = _device_ms(compiling[name].result(), args)
            print(json.dumps({n: row[n].get("device_ms") for n in compiling}))
    return rows


def sites(report: rewriter.Report) -> dict[str, int]:
    """How many sites of each op got which kernel, with or without the backward."""
    found: Counter[str] = Counter()
    for s in report.sites:
        found[f"{s.op} {s.kernel}" + " +backward" * s.backward] += s.repeats
    return dict(found)


def _compiling(
    case: Case, args: tuple, pool: ThreadPoolExecutor, known: dict[int, Future[Any]]
) -> tuple[rewriter.Report, dict[str, Future[Any]]]:
    """A case's report and programs; functions that are known are not compiled again."""
    fast = rewriter.optimize(case.fn, checkpoint_memory=case.memory)
    plain: dict[str, Any] = {"written": case.fn}
    if case.manual is not None and jax.default_backend() == "gpu":
        plain["by_hand"] = case.manual
    compiling = {"rewritten": pool.submit(fast.lower(*args).compile)}
    for name, fn in plain.items():
        if id(fn) not in known:
            known[id(fn)] = pool.submit(jax.jit(fn).lower(*args).compile)
        compiling[name] = known[id(fn)]
    order = ("written", "rewritten", "by_hand")
    return fast.report(*args), {n: compiling[n] for n in order if n in compiling}


def _row(
    what: str, compiling: dict[str, Future[Any]], args: tuple, repeats: int
) -> dict[str, Any]:
    row: dict[str, Any] = {}
    results = {}
    for name, program in compiling.items():
        row[name], out = _measured(program, args, repeats)
        if name != "by_hand" and out is not None:
            results[name] = out
    if len(results) == 2:
        written, rewritten = row["written"], row["rewritten"]
        _check(what, written, rewritten)
        row["difference"] = float(difference(*results.values()))
        row["faster"] = round(written["ms"] / rewritten["ms"], 2)
        row["less_memory"] = round(written["bytes"] / rewritten["bytes"], 2)
    return row


def _measured(
    compiling: Future[Any], args: tuple, repeats: int
) -> tuple[dict[str, Any], Any]:
    """Figures of a program, or why it did not run; and its results."""
    try:
        compiled = compiling.result()
        out = jax.block_until_ready(compiled(*args))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            times.append(1e3 * (time.perf_counter() - start))
    except jax.errors.JaxRuntimeError as problem:
        return {"failed": str(problem).splitlines()[0][:100]}, None
    row = {
        "ms": round(statistics.median(times), 2),
        "bytes": compiled.memory_analysis().temp_size_in_bytes,
        **{name: float(x) for name, x in figures(out).items()},
    }
    return row, out


def _device_ms(program: Any, args: tuple) -> dict[str, float]:
    """Milliseconds of a run on the device by what kernels do."""
    found = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, seconds in _jax.kernel_seconds(lambda: program(*args)):
        kinds = (kind for kind, parts in KINDS.items() if any(p in name for p in parts))
        found[next(kinds, "other")] += 1e3 * seconds
    return {kind: round(ms, 2) for kind, ms in found.items()}


@jax.jit
def figures(out: Any) -> dict[str, jax.Array]:
    """The loss, and the norm of all gradients if there are any."""
    loss, gradients = out if isinstance(out, tuple) else (out, None)
    wide = [g.astype(jnp.float32) for g in jax.tree.leaves(gradients)]
    norm = {"norm": jnp.sqrt(sum(jnp.vdot(g, g) for g in wide))} if wide else {}
    return {"loss": loss, **norm}


SMALL = 1e-2
"""Gradients smaller than this share of all of them are compared with that share."""


@jax.jit
def difference(before: Any, after: Any) -> jax.Array:
    """The largest |before - after| / |before| of any result, in Frobenius norms.

    Gradients that are small beside the others are compared with `SMALL` of all. That of
    a key's bias is 0, and what is computed is rounding. So are gradients of queries and
    keys in a new model, where all keys weigh nearly alike.
    """
    wide = lambda tree: [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
    pairs = list(zip(wide(before), wide(after), strict=True))
    least = SMALL**2 * sum(jnp.sum(a**2) for a, _ in pairs if a.ndim)

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        gap, size = jnp.sum((a - b) ** 2), jnp.maximum(jnp.sum(a**2), least)
        return jnp.sqrt(jnp.where(gap == 0, 0.0, gap / size))

    return jnp.max(jnp.stack([one(a, b) for a, b in pairs]))


def _check(what: str, before: dict[str, float], after: dict[str, float]) -> None:
    for name, allowed in (("loss", LOSS), ("norm", NORM)):
        if name in before and not abs(after[name] / before[name] - 1) <= allowed:
            raise Disagreement(f"{what}: {name} {before[name]} became {after[name]}")


def arguments(text: str | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--small", action="store_true", help="to try it on a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    return parser.parse_args()
