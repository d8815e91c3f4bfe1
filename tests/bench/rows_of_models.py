"""The default against each other kernel and XLA, for rows that models and serving have.

  python3 -m tests.bench.rows_of_models [--only PARTS] [--passes forward,both]
      [--processes N] [--json PATH]

The rows are long and short attention, decoding from caches and pages, norms, gated
units and ragged dots. What is measured is that of `tests.bench.choices`: microseconds
of the device by CUPTI, by arms that take turns in one process. Rows of the record that
were not measured again stay in it, with their date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tests.bench import choices, held_out, in_turns, record
from tests.bench.choices import BF16, CAUSAL, F32, PV, QK, Row, attending, norming

COMMAND = "python3 -m tests.bench.rows_of_models"
PAGE = 64
"""Tokens of a page."""

BOUNDARY = 2048
"""Of so many drawn integers one begins a sequence."""


def every() -> Iterator[Row]:
    """Yields all rows."""
    yield from choices.of_attention()
    yield attending(
        "GQA 64/8 16k", 1, 16384, 16384, 64, 8, 128, window=CAUSAL, forced=("cudnn",)
    )
    yield packed()
    yield from choices.of_decode()
    yield paged("paged b16 s8k 32/8", 16, 8192, 32, 8)
    yield paged("paged b32 s4k 32/8", 32, 4096, 32, 8)
    for kind, rows, columns in (
        ("rms", 8192, 2880), ("rms", 262144, 128), ("layer", 18464, 768),
        ("layer", 9850, 1024),
    ):  # fmt: skip
        yield norming(kind, rows, columns, BF16)
    yield from choices.of_products()
    yield eight_bit_unit()


def packed() -> Row:
    """Causal attention in sequences that are packed into one."""

    def run(q: Any, k: Any, v: Any, drawn: Any) -> Any:
        numbers = jnp.cumsum(drawn == 1, -1)
        x = jnp.einsum(QK, q, k, preferred_element_type=F32) * q.shape[-1] ** -0.5
        t = q.shape[1]
        keep = numbers[:, :, None] == numbers[:, None, :]
        keep &= jnp.tril(jnp.ones((t, t), bool))
        x = jnp.where(keep[:, None], x, jnp.finfo(F32).min)
        return jnp.einsum(PV, jax.nn.softmax(x, -1).astype(v.dtype), v)

    row = attending("packed causal 2x8k", 2, 8192, 8192, 16, 16, 128, forced=())
    shapes = (*row.shapes, ((2, 8192), jnp.int32))
    given = {"shapes": shapes, "passes": ("forward",), "most": BOUNDARY}
    return replace(row, fn=run, scores=0.0, **given)  # XLA's 8.6 GB fit


def paged(name: str, b: int, s: int, n: int, k: int) -> Row:
    """Decoding from pages of a cache, of sequences of drawn lengths."""
    h, count = 128, b * s // PAGE

    def run(q: Any, k_pages: Any, v_pages: Any, table: Any, part: Any) -> Any:
        keys, values = (x[table].reshape(b, s, k, h) for x in (k_pages, v_pages))
        return choices.attention()(q, keys, values, part * (s // count))

    pages = ((count + 1, PAGE, k, h), BF16)
    numbers = ((b, s // PAGE), jnp.int32), ((b,), jnp.int32)
    given = (((b, 1, n, h), BF16), pages, pages, *numbers)
    return Row(name, "attention", run, given, (), ("forward",), most=count)


def eight_bit_unit() -> Row:
    """A gated unit of few rows, whose matrices are int8 with a scale per column."""
    m, k, f = 64, 4096, 14336

    def run(x: Any, gate: Any, of_gate: Any, up: Any, of_up: Any) -> Any:
        wide = lambda w, scale: (w.astype(F32) * scale).astype(x.dtype)
        return jax.nn.silu(x @ wide(gate, of_gate)) * (x @ wide(up, of_up))

    matrix, scale = ((k, f), jnp.int8), ((f,), F32)
    given = (((m, k), BF16), matrix, scale, matrix, scale)
    name = f"int8 swiglu {m}x{k}x{f}"
    return Row(name, "gated_linear_unit", run, given, (), ("forward",), most=100)


def measure(given: argparse.Namespace, names: Sequence[str]) -> None:
    """Measures the rows of these names."""
    held_out.measure(every(), given, names)


def main() -> None:
    """Prints a line per row and pass, and writes all of them."""
    parser = in_turns.parser(__doc__)
    parser.set_defaults(passes="forward,both")
    given = parser.parse_args()
    names = list({row.name: None for row in every()})
    found = in_turns.rows_of("tests.bench.rows_of_models", names, given, measure)
    if found is not None and given.json:
        record.write(given.json, COMMAND, rows=joined(found, given.json, names))


def joined(
    found: Sequence[Any], path: pathlib.Path, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns the new rows, and those of a record that were not measured again.

    Args:
        found: The new rows.
        path: The record, if there is one.
        names: All rows, in order.
    """
    today = datetime.date.today().isoformat()
    data = json.loads(path.read_text()) if path.exists() else {"rows": []}
    every = {
        (row["row"], row["pass"]): {"date": data.get("date"), **row}
        for row in data["rows"]
    }
    every |= {(row["row"], row["pass"]): {**row, "date": today} for row in found}
    kept = [row for (name, _), row in every.items() if name in names]
    return sorted(
        kept, key=lambda row: (names.index(row["row"]), row["pass"] == "both")
    )


if __name__ == "__main__":
    main()
