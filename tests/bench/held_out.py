"""What is chosen for uses that nobody tuned for, against each kernel and XLA.

  python3 -m tests.bench.held_out [--seed N] [--rows N] [--processes N] [--json PATH]

Rows are drawn by the seed: odd lengths, widths of heads, ratios of heads, masks, norms
of odd widths, ragged dots with uneven groups. What is measured is that of
`tests.bench.choices`. Processes compile side by side, and measure one by one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.bench import in_turns, record
from tests.bench.choices import (
    BF16,
    F16,
    F32,
    Row,
    attending,
    compiling,
    norming,
    of_pass,
    printed,
)

WORK = 4e11  # operations of a forward, at most
"""The most operations of a drawn attention, forward."""


def drawn_rows(seed: int, count: int) -> Iterator[Row]:
    """Yields rows: of five, three are attentions, one is a norm, and one ragged."""
    draws = np.random.default_rng(seed)
    kinds = (
        _drawn_attention, _drawn_norm, _drawn_attention, _drawn_ragged,
        _drawn_attention,
    )  # fmt: skip
    for i in range(count):
        yield kinds[i % len(kinds)](draws)


def _drawn_attention(draws: Any) -> Row:
    h = int(draws.choice([32, 48, 64, 80, 96, 112, 128, 160]))
    k = int(draws.choice([1, 2, 3, 4, 8]))
    n = k * int(draws.choice([1, 1, 2, 4, 6, 8]))
    t = int(draws.integers(100, 3000))
    s = t if draws.random() < 0.8 else int(draws.integers(50, 3000))
    most = max(1, int(WORK / (4 * n * t * s * h)))
    b = int(min(most, draws.choice([1, 2, 4, 8, 16, 32, 64])))
    kind = draws.choice(["full", "causal", "causal", "window", "lengths", "bias"])
    kind, more = (kind if s == t else "full"), ()
    window = {"causal": (None, 0), "window": (t // 4, 0)}.get(kind, (None, None))
    if kind == "lengths":
        more = (((b,), jnp.int32),)
    elif kind == "bias":
        more = (((1, n, t, s), BF16),)
    name = f"{kind} {b}x{t}{f'x{s}' * (s != t)}x{n}/{k}x{h}"
    return attending(name, b, t, s, n, k, h, window=window, more=more)


def _drawn_norm(draws: Any) -> Row:
    columns = int(draws.choice(
        [96, 192, 300, 384, 500, 576, 640, 896, 1100, 1280, 1536, 2880, 3584, 5120]
    ))  # fmt: skip
    rows = int(draws.integers(1000, (64 << 20) // (2 * columns)))
    kind, dtype = draws.choice(["layer", "rms"]), (BF16, F16, F32)[draws.integers(3)]
    return norming(str(kind), rows, columns, dtype)


def _drawn_ragged(draws: Any) -> Row:
    m, g = int(draws.integers(500, 20000)), int(draws.choice([4, 8, 16, 48, 64]))
    k, n = (int(128 * draws.integers(3, 32)) for _ in range(2))
    weights = draws.gamma(0.7, size=g)
    share = np.floor(m * weights / weights.sum()).astype(np.int32)
    share[0] += m - share.sum()

    def uneven(x: Any, w: Any) -> Any:
        return jax.lax.ragged_dot(x, w, jnp.asarray(share))

    given = (((m, k), BF16), ((g, k, n), BF16))
    name = f"ragged {m}x{k}x{n} g{g}, uneven"
    scores = 2.0 * m * k * g  # XLA widens rows to groups
    return Row(name, "ragged_dot", uneven, given, ("hopper",), scores=scores)


def measure_all(given: argparse.Namespace, names: Sequence[str]) -> None:
    """Measures the drawn rows of these names."""
    measure(drawn_rows(given.seed, given.rows), given, names)


def measure(
    every: Iterable[Row], given: argparse.Namespace, names: Sequence[str]
) -> None:
    """Compiles the rows of these names, and measures each when the device is free."""
    rows = {row.name: row for row in every}
    done: list[dict[str, Any]] = []
    with ThreadPoolExecutor(2) as pool:
        ready = []
        for name in names:
            for passes in (x for x in rows[name].passes if x in given.passes):
                row = of_pass(rows[name], passes)
                try:
                    ready.append((row, passes, compiling(row, passes, pool)))
                except Exception as problem:
                    print(name, passes, repr(problem)[:200], flush=True)
    with in_turns.turn():
        for row, passes, arms in ready:
            done.append({"model": row.name, **printed(row, passes, arms)})
            in_turns.write(given.json, done)


def main() -> None:
    """Prints a line per row and pass, and writes all of them."""
    parser = in_turns.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=40)
    parser.set_defaults(passes="forward,both")
    given = parser.parse_args()
    names = list({row.name: None for row in drawn_rows(given.seed, given.rows)})
    found = in_turns.rows_of("tests.bench.held_out", names, given, measure_all)
    if found is not None and given.json:
        command = f"python3 -m tests.bench.held_out --seed {given.seed}"
        command += f" --rows {given.rows}"
        record.write(given.json, command, rows=found)


if __name__ == "__main__":
    main()
