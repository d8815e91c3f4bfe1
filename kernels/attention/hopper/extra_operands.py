"""Costs of the operands beside q, k and v: bytes of memory, and registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec


@dataclass(frozen=True)
class Extra:
    """The operands of scores beside q, k and v.

    Attributes:
        tables: Element sizes in bytes of the operands that vary along rows and columns.
        rows: The number of operands with a number for each row.
        columns: The number of operands with a number for each column.
        slopes: Whether distances are added.
    """

    tables: tuple[int, ...] = ()
    rows: int = 0
    columns: int = 0
    slopes: bool = False

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
        wide = columns > 128 and (self.copied or self.slopes)
        return len(self.tables) * columns // 8 + 64 * wide


NONE = Extra()


def extra_of(operands: Mapping[str, Any]) -> Extra:
    """Returns the operands of scores beside q, k and v.

    Args:
        operands: Arrays, or anything with ``shape`` and ``dtype``, by name.

    Example:
        >>> mask = jax.ShapeDtypeStruct((2, 1, 1, 300), jnp.bool_)
        >>> extra_of({"mask": mask})
        Extra(tables=(), rows=0, columns=1, slopes=False)
    """
    tables, lines = [], set()
    for name in ("bias", "mask"):
        if name in operands:
            _, _, t, s = operands[name].shape
            if 1 not in (t, s):
                tables.append(table_type(operands[name].dtype).itemsize)
            else:
                lines.add("columns" if t == 1 else "rows")
    segments = int("q_segments" in operands and "kv_segments" in operands)
    return Extra(
        tuple(tables), ("rows" in lines) + segments, ("columns" in lines) + segments,
        "alibi" in operands,
    )  # fmt: skip


def extra_in(spec: Spec) -> Extra:
    """Returns the same for a use of attention."""
    return extra_of(
        {
            name: jax.ShapeDtypeStruct(shape, spec.dtype(name))
            for name, shape in spec.shapes
        }
    )


def table_type(dtype: Any) -> Any:
    """Returns the dtype in which kernels read a table of this one: 8 to 32 bits."""
    if dtype == jnp.bool_:
        return jnp.dtype(jnp.int8)
    narrow = str(jnp.dtype(dtype)) in ("bfloat16", "float16")
    return jnp.dtype(dtype if narrow else jnp.float32)
