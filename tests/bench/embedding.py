"""Sums of rows by their ids, the gradient of a lookup: XLA as written and other ways.

  python3 -m tests.bench.embedding [--repeats N] [--only NAME] [--small] [--write]

Each way of each case is compiled, compared with float64 on a few columns, and timed,
in one run on one device. A way that fails is reported, and the rest go on. With
``--write`` the figures go to ``results/embedding_<device>.json``, after every case.

Words are drawn with Zipf's law; positions count up in each sequence; token types are
two; nodes of a graph are drawn with equal odds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.kernels.embedding import sums
from tests.bench import record

Way = Callable[[jax.Array, jax.Array, int], jax.Array]

COLUMNS = 8
"""How many columns are compared with float64."""


@dataclass(frozen=True)
class Case:
    """Rows [m, d] for a table of v, and how their ids are drawn."""

    name: str
    m: int
    d: int
    v: int
    ids: str

    def drawn(self) -> np.ndarray:
        """Returns ids [m]."""
        draw = np.random.default_rng(0)
        if self.ids == "words":
            odds = 1 / (np.arange(self.v) + 2.7)
            chosen = draw.choice(self.v, self.m, p=odds / odds.sum())
            return draw.permutation(self.v)[chosen].astype(np.int32)
        if self.ids == "positions":
            return (np.arange(self.m) % self.v).astype(np.int32)
        return draw.integers(0, self.v, self.m).astype(np.int32)


CASES = (
    Case("words", 16384, 768, 30522, "words"),
    Case("positions", 16384, 768, 512, "positions"),
    Case("types", 16384, 768, 2, "any"),
    Case("types, all the same", 16384, 768, 2, "same"),
    Case("GPT-2 words", 8192, 768, 50257, "words"),
    Case("large vocabulary", 32768, 4096, 128256, "words"),
    Case("graph", 1_000_000, 64, 100_000, "any"),
    Case("combine experts", 65536, 2048, 32768, "any"),
    Case("small table", 16384, 768, 64, "any"),
)
SMALL = (
    Case("words", 512, 64, 1000, "words"),
    Case("positions", 512, 64, 32, "positions"),
    Case("types", 512, 64, 2, "any"),
    Case("types, all the same", 512, 64, 2, "same"),
)


def ways_of(case: Case) -> dict[str, Way]:
    """Returns the ways that suit a case, by name."""
    part = functools.partial
    ways: dict[str, Way] = {
        "as_written": sums.as_written,
        "in_float32": sums.in_float32,
        "by_owner": sums.by_owner,
        "sorted_as_written": sums.sorted_as_written,
        "sorted_in_float32": sums.sorted_in_float32,
        "by_rank": sums.by_rank,
        "by_scan": sums.by_scan,
        "by_tiles 64": part(sums.by_tiles, tile=64),
        "by_tiles 128": part(sums.by_tiles, tile=128),
        "by_tiles 256": part(sums.by_tiles, tile=256),
        "by_tiles 128 if finite": part(sums.if_finite, way=sums.by_tiles),
    }
    if case.v <= 2048:
        ways["by_product"] = part(sums.by_product, chunk=case.m)
        ways["by_product in 4"] = part(sums.by_product, chunk=-(-case.m // 4))
        ways["by_product if finite"] = sums.if_finite
        for parts in (8, 32, 128):
            if parts * case.v * case.d * 4 <= 1 << 28:
                ways[f"in_parts {parts}"] = part(sums.in_parts, parts=parts)
    if case.v <= 64:
        ways["by_mask"] = sums.by_mask
    if case.v <= 8:
        ways["by_masks"] = sums.by_masks
    if case.ids == "positions":
        ways["over_batch"] = lambda rows, ids, v: sums.over_batch(
            rows.reshape(-1, v, rows.shape[-1]), v
        )
    return ways


def exact(rows: jax.Array, ids: np.ndarray, v: int) -> np.ndarray:
    """The first columns of the sums, in float64."""
    out = np.zeros((v, COLUMNS))
    np.add.at(out, ids, np.asarray(rows[:, :COLUMNS].astype(jnp.float32), np.float64))
    return out


def milliseconds(run: Callable[[], Any], repeats: int) -> list[float]:
    """Times of single calls; many calls at once where one takes little time."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    once = time.perf_counter() - start
    calls = max(1, min(50, int(0.02 / max(once, 1e-6))))
    found = []
    for _ in range(repeats if once < 0.5 else 2):
        start = time.perf_counter()
        made = [run() for _ in range(calls)][-1]
        jax.block_until_ready(made)
        found.append(1e3 * (time.perf_counter() - start) / calls)
    return found


def measured(
    way: Way, rows: jax.Array, ids: jax.Array, v: int, wanted: np.ndarray, repeats: int
) -> dict[str, Any]:
    """Time, memory and error of a way."""
    start = time.perf_counter()
    compiled = jax.jit(way, static_argnums=2).lower(rows, ids, v).compile()
    seconds = time.perf_counter() - start
    made = compiled(rows, ids)
    columns = np.asarray(made[:, :COLUMNS].astype(jnp.float32), np.float64)
    error = np.abs(columns - wanted).max() / np.abs(wanted).max()
    del made
    times = milliseconds(lambda: compiled(rows, ids), repeats)
    memory = compiled.memory_analysis()
    return {
        "ms": statistics.median(times),
        "least_ms": min(times),
        "error": float(error),
        "temporary_mib": memory.temp_size_in_bytes / 2**20 if memory else None,
        "compile_s": seconds,
    }


def measure(case: Case, dtype: str, repeats: int) -> dict[str, Any]:
    """All ways of a case."""
    ids = np.zeros(case.m, np.int32) if case.ids == "same" else case.drawn()
    rows = jax.random.normal(jax.random.key(0), (case.m, case.d), jnp.dtype(dtype))
    wanted = exact(rows, ids, case.v)
    there = jnp.asarray(ids)
    found: dict[str, Any] = {}
    print(f"\n{case.name}: {dtype} {case.m}x{case.d} into {case.v}", flush=True)
    for name, way in ways_of(case).items():
        try:
            row = measured(way, rows, there, case.v, wanted, repeats)
            print(
                f"  {name:24} {row['ms']:9.3f} ms (least {row['least_ms']:.3f})"
                f"  error {row['error']:.1e}"
                f"  temporary {row['temporary_mib'] or 0:8.1f} MiB"
                f"  compiled in {row['compile_s']:.1f} s",
                flush=True,
            )
        except Exception as problem:
            lines = traceback.format_exception_only(problem)
            row = {"failed": "".join(lines).strip()[:500]}
            print(f"  {name:24} failed: {row['failed'][:200]}", flush=True)
        found[name] = row
    about = {"m": case.m, "d": case.d, "v": case.v, "dtype": dtype}
    return {"case": case.name, **about, "ways": found}


def main() -> None:
    """Measures all cases in both dtypes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--small", action="store_true", help="small cases")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    words = jax.devices()[0].device_kind.lower().removeprefix("nvidia ").split()
    path = record.named(f"embedding_{words[0]}")
    rows = []
    for dtype in ("bfloat16", "float32"):
        for case in SMALL if given.small else CASES:
            if given.only not in case.name:
                continue
            try:
                rows.append(measure(case, dtype, given.repeats))
            except Exception:
                traceback.print_exc()
                continue
            if given.write:
                command = "python3 -m tests.bench.embedding --write"
                record.write(path, command, rows=rows)


if __name__ == "__main__":
    main()
