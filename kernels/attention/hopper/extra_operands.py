"""Costs of the operands beside q, k and v: bytes of memory, and registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

READ = "score_"
"""What the names of arrays begin with that a function of scores reads."""

ROWS, COLUMNS, TABLE, NUMBER = "rows", "columns", "table", "number"
"""Forms of arrays: with a number for each row, each column, each pair, or for all."""


@dataclass(frozen=True)
class Extra:
    """The operands of scores beside q, k and v.

    Attributes:
        tables: Element sizes in bytes of the operands that vary along rows and columns.
        rows: The number of operands with a number for each row.
        columns: The number of operands with a number for each column.
        slopes: Whether distances are added.
        computed: Whether scores go through a function.
    """

    tables: tuple[int, ...] = ()
    rows: int = 0
    columns: int = 0
    slopes: bool = False
    computed: bool = False

    @property
    def copied(self) -> bool:
        """Whether any operand is copied beside blocks of keys."""
        return bool(self.tables or self.rows or self.columns)

    def nbytes(self, stages: int, rows: int, columns: int) -> int:
        """Returns bytes of shared memory for so many blocks of rows and columns.

        Example:
            >>> Extra(tables=(2,), columns=1).nbytes(2, 128, 64)
            33280
        """
        each = sum(self.tables) * rows * columns
        return stages * (each + 4 * (self.rows * rows + self.columns * columns))

    @property
    def transposed(self) -> Extra:
        """The same where rows are columns."""
        return replace(self, rows=self.columns, columns=self.rows)

    def registers(self, columns: int) -> int:
        """Returns registers per lane, where ptxas 12.9 was seen to run out of them.

        For blocks of 144 keys and heads of 128, slopes spilled 16 bytes; for blocks of
        128 keys, heads of 64 and 3 warpgroups, tables of masks 20 bytes.
        """
        wide = columns > 128 and (self.copied or self.slopes or self.computed)
        return len(self.tables) * columns // 8 + 64 * wide + COMPUTED * self.computed


NONE = Extra()

COMPUTED = 24
"""Registers per lane for what a function computes of eight columns at a time."""


def extra_of(operands: Mapping[str, Any]) -> Extra:
    """Returns the operands of scores beside q, k and v.

    Args:
        operands: Arrays, or anything with ``shape`` and ``dtype``, by name; also the
            function of scores as ``score``, if there is one.

    Example:
        >>> mask = jax.ShapeDtypeStruct((2, 1, 1, 300), jnp.bool_)
        >>> extra_of({"mask": mask}).columns, extra_of({"mask": mask}).tables
        (1, ())
    """
    tables, lines, more = [], set(), {"rows": 0, "columns": 0}
    for name in ("bias", "mask"):
        if name in operands:
            _, _, t, s = operands[name].shape
            if 1 not in (t, s):
                tables.append(table_type(operands[name].dtype).itemsize)
            else:
                lines.add("columns" if t == 1 else "rows")
    for name in (x for x in operands if x.startswith(READ)):
        form = form_of(operands[name].shape)
        if form == TABLE:
            tables.append(table_type(operands[name].dtype).itemsize)
        elif form != NUMBER:
            more[form] += 1
    segments = int("q_segments" in operands and "kv_segments" in operands)
    ends = sum(name in operands for name in ("first_position", "last_position"))
    rows = ("rows" in lines) + segments + ends
    columns = ("columns" in lines) + segments + ("kv_positions" in operands)
    return Extra(
        tuple(tables), rows + more[ROWS], columns + more[COLUMNS],
        "alibi" in operands, operands.get("score") is not None,
    )  # fmt: skip


def form_of(shape: tuple[int, ...]) -> str:
    """Returns along which axes an array of shape [b|1, n|1, t|1, s|1] varies."""
    t, s = shape[2:]
    if t == 1:
        return NUMBER if s == 1 else COLUMNS
    return ROWS if s == 1 else TABLE


def extra_in(spec: Spec) -> Extra:
    """Returns the same for a use of attention."""
    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(shape, spec.dtype(name))
        for name, shape in spec.shapes
    }
    return extra_of(arrays | {"score": spec.param("score")})


def table_type(dtype: Any) -> Any:
    """Returns the dtype in which kernels read a table of this one: 8 to 32 bits."""
    if dtype == jnp.bool_:
        return jnp.dtype(jnp.int8)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(jnp.int32)
    narrow = str(jnp.dtype(dtype)) in ("bfloat16", "float16")
    return jnp.dtype(dtype if narrow else jnp.float32)
