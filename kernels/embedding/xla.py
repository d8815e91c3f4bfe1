"""Sums of rows by their ids, added up in float32 with instructions of the GPU.

XLA adds 16-bit numbers with a loop of compare-and-swap, which takes a round for each
row that collides. It adds numbers of 32 bits with one instruction. If the table has
more rows than are given, there is one row of float32 sums for each given row. The last
row of each id owns its sum, and the others are added to the owner's. If the table has
very few rows, there are several tables of sums, so that fewer collide.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from rewriter.kernels.embedding import builder, sums
from rewriter.kernels.embedding.estimate import pays_in_16_bits
from rewriter.support.verdict import Verdict, no


def deterministic(config: Any) -> Verdict:
    """Returns no: rows of one id are added in the order in which they come."""
    del config
    return no("order", "rows of one id are added up in any order")


def add(
    rows: jax.Array, ids: jax.Array, table: jax.Array | None, size: int
) -> jax.Array:
    """Returns a table [size, d], with rows [m, d] added to those that ids [m] name."""
    if table is not None:
        return sums.into(table, rows, ids)
    if size > len(rows):
        return sums.by_owner(rows, ids, size)
    return sums.in_parts(rows, ids, size)


PAYS = functools.partial(pays_in_16_bits, "rows")

KERNELS = BY_ID, _ = builder.by_id("in_float32", add, PAYS, deterministic)
