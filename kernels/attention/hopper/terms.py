"""Operands that change scores beside positions: biases, masks, segments.

Biases and masks come in three forms. One varies along rows and columns, and is read in
tiles. One varies along columns alone: a number for each key. One varies along rows
alone. Biases and masks of the last two forms become one array, which is -inf where a
mask hides. A mask alone has inf elsewhere, so that a minimum hides. Scores and all that
is added to them are natural logarithms. So a bias of the lowest float stays finite, as
it is in the formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from rewriter.kernels.attention.hopper import pallas
from rewriter.kernels.attention.hopper.extra_operands import table_type

if TYPE_CHECKING:
    from jax import Array

ROWS, COLUMNS, TABLE = "rows", "columns", "table"


@dataclass(frozen=True)
class Part:
    """An array with a part for every block of scores.

    Attributes:
        form: `TABLE` for [b|1, n|1, rows, columns], `ROWS` for [b|1, n|1, rows],
            `COLUMNS` for [b|1, n|1, columns].
        dtype: The elements' type.
        batches: Whether batch entries differ.
        heads: Whether query heads do.
    """

    form: str
    dtype: str
    batches: bool
    heads: bool


@dataclass(frozen=True)
class Terms:
    """The operands that are present, as known while tracing.

    Attributes:
        parts: By name: "bias" and "mask" are tables, "row_terms" and "column_terms" are
            addends, "row_segments" and "column_segments" are integers: equal ones see
            each other.
        slopes: Whether each head has a slope, which is multiplied with distances.
        sinks: Whether each head has a score that joins its rows' sums.
        hiding: Names of parts whose -inf hides.
        adding: Names of parts that are added.
    """

    parts: tuple[tuple[str, Part], ...] = ()
    slopes: bool = False
    sinks: bool = False
    hiding: frozenset[str] = frozenset()
    adding: frozenset[str] = frozenset()

    @property
    def natural(self) -> bool:
        """Whether scores are scaled before they are compared."""
        return bool(self.adding) or self.slopes

    @property
    def segments(self) -> bool:
        """Whether there are segments."""
        return "row_segments" in dict(self.parts)

    @property
    def hides(self) -> bool:
        """Whether rows may be left without keys."""
        return bool(self.parts)

    @property
    def masks(self) -> bool:
        """Whether there are masks or segments, and not biases alone."""
        return bool(self.hiding) or self.segments or "mask" in dict(self.parts)

    @property
    def whole_rows(self) -> bool:
        """Whether masks hide only whole rows, the same ones in all heads."""
        thin = dict(self.parts).get("row_terms")
        alone = self.hiding == {"row_terms"} and not self.segments
        return alone and "mask" not in dict(self.parts) and not (thin and thin.heads)

    def copies(self, warpgroups: int) -> int:
        """Returns the number of copies for a block's parts."""
        return sum(1 if x.form == COLUMNS else warpgroups for _, x in self.parts)

    def scratch(self, stages: int, warpgroups: int, block: int) -> dict[str, Any]:
        """Returns shared memory for blocks of so many columns, by name."""
        made = {}
        for name, part in self.parts:
            dtype = jnp.dtype(part.dtype)
            if part.form == TABLE:
                shape = (stages, warpgroups, 64, block)
                made[name] = pallas.table_tiles(shape, dtype)
            else:
                shape = (block,) if part.form == COLUMNS else (warpgroups, 64)
                made[name] = pallas.lines((stages, *shape), dtype)
        return made

    def copy(self, place: Place, given: Mapping[str, Any], send: Any) -> None:
        """Copies a block's parts: ``send(source, name, place in shared memory)``."""
        for name, part in self.parts:
            source = given[name]
            lead = (place.b if part.batches else 0, place.n if part.heads else 0)
            columns = pl.ds(place.column, place.columns)
            if part.form == COLUMNS:
                send(source.at[(*lead, columns)], name, (place.slot,))
                continue
            for w in range(place.warpgroups):
                at = (*lead, pl.ds(place.row + 64 * w, 64))
                at = (*at, columns) if part.form == TABLE else at
                send(source.at[at], name, (place.slot, w))

    def added(
        self,
        scores: Array,
        memory: Mapping[str, Any],
        slot: Any,
        warpgroup: Any,
        part: bool,
    ) -> Array:
        """Returns scores with addends, -inf where masks and segments hide.

        Args:
            scores: float32 [64, columns], in natural logarithms if `natural`.
            memory: References to `scratch`.
            slot: The stage.
            warpgroup: The index of the 64 rows within a tile.
            part: Whether masks and segments may hide some keys.
        """
        parts, shape = dict(self.parts), scores.shape
        if "bias" in parts:
            tile = memory["bias"].at[slot, warpgroup][...]
            narrow = parts["bias"].dtype == "bfloat16"
            tile = pallas.widened(tile) if narrow else tile.astype(jnp.float32)
            scores = scores + tile
        if part and "mask" in parts:
            tile = memory["mask"].at[slot, warpgroup][...]
            scores = jnp.where(tile != 0, scores, -jnp.inf)
        for name, at, layout, spread in (
            ("column_terms", (slot,), pallas.COLUMNS, pallas.across),
            ("row_terms", (slot, warpgroup), pallas.ROWS, pallas.along),
        ):
            hides = part and name in self.hiding
            if not (hides or name in self.adding):
                continue
            wide = spread(pallas.loaded(memory[name].at[at], layout), shape)
            if name not in self.adding:
                scores = pallas.least(scores, wide)
                continue
            scores = scores + wide
            if hides:
                scores = jnp.where(wide == -jnp.inf, -jnp.inf, scores)
        if part and self.segments:
            scores = self._within_segments(scores, memory, slot, warpgroup)
        return scores

    def _within_segments(
        self, scores: Array, memory: Mapping[str, Any], slot: Any, warpgroup: Any
    ) -> Array:
        """Returns scores with -inf where row and column differ in segment."""
        rows = pallas.loaded(memory["row_segments"].at[slot, warpgroup], pallas.ROWS)
        columns = pallas.loaded(memory["column_segments"].at[slot], pallas.COLUMNS)
        rows, columns = (
            pallas.along(rows, scores.shape), pallas.across(columns, scores.shape)
        )  # fmt: skip
        return jnp.where(rows == columns, scores, -jnp.inf)


@dataclass(frozen=True)
class Place:
    """The place of a block of scores, and of its parts in shared memory."""

    b: Any
    n: Any
    row: Any
    column: Any
    columns: int
    warpgroups: int
    slot: Any


def terms_of(
    t: int,
    s: int,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    q_segments: Array | None = None,
    kv_segments: Array | None = None,
    alibi: Array | None = None,
    sinks: Array | None = None,
) -> tuple[Terms, dict[str, Array]]:
    """Returns the present terms, and arrays by name, with "slopes" and "sinks".

    Args:
        t: Queries.
        s: Keys.
        bias: float [b|1, n|1, t|1, s|1].
        mask: bool [b|1, n|1, t|1, s|1].
        q_segments: int [b|1, t].
        kv_segments: int [b|1, s]; segments count if both are there.
        alibi: float [n].
        sinks: float [n].
    """
    arrays: dict[str, Array] = {}
    hiding, adding = set(), set()
    for name, x in (("bias", bias), ("mask", mask)):
        if x is None:
            continue
        if 1 not in x.shape[2:]:
            arrays[name] = x.astype(table_type(x.dtype))
            adding |= {name} - {"mask"}
            continue
        thin, line = ("column_terms", x[:, :, 0]) if x.shape[2] == 1 else (
            "row_terms", x[..., 0]
        )  # fmt: skip
        size = s if x.shape[2] == 1 else t
        line = jnp.broadcast_to(line, (*line.shape[:2], size))
        if name == "bias":
            adding.add(thin)
            arrays[thin] = line.astype(jnp.float32)
        else:
            hiding.add(thin)
            shown = jnp.where(line, arrays.get(thin, jnp.inf), -jnp.inf)
            arrays[thin] = shown.astype(jnp.float32)
    if q_segments is not None and kv_segments is not None:
        for name, x in (("row_segments", q_segments), ("column_segments", kv_segments)):
            arrays[name] = x.astype(jnp.int32)[:, None]
    parts = tuple((name, _part(name, x)) for name, x in arrays.items())
    arrays = {name: _whole(x, dict(parts)[name].form) for name, x in arrays.items()}
    for name, x in (("slopes", alibi), ("sinks", sinks)):
        if x is not None:
            arrays[name] = x.astype(jnp.float32)
    terms = Terms(
        parts,
        alibi is not None,
        sinks is not None,
        frozenset(hiding),
        frozenset(adding),
    )  # fmt: skip
    return terms, arrays


def _part(name: str, x: Array) -> Part:
    form = TABLE if x.ndim == 4 else ROWS if name.startswith("row") else COLUMNS
    return Part(form, str(x.dtype), x.shape[0] > 1, x.shape[1] > 1)


def _whole(x: Array, form: str) -> Array:
    """Adds rows up to a multiple of 8, columns up to one of 128 bytes."""
    more = [0] * x.ndim
    more[-1] = -x.shape[-1] % (128 // x.dtype.itemsize)
    if form == TABLE:
        more[-2] = -x.shape[-2] % 8
    return jnp.pad(x, [(0, m) for m in more]) if any(more) else x


def transposed(
    terms: Terms, arrays: Mapping[str, Array]
) -> tuple[Terms, dict[str, Array]]:
    """Returns the same for transposed scores: rows are keys, columns queries."""
    names = {x: y for x, y in _TURNED.items() if x in arrays}
    turned = {
        names.get(name, name): _whole(x.swapaxes(2, 3), TABLE) if x.ndim == 4 else x
        for name, x in arrays.items()
    }
    parts = tuple(
        (names.get(name, name), replace(part, form=_TURNED.get(part.form, part.form)))
        for name, part in terms.parts
    )
    hiding, adding = (
        frozenset(names.get(x, x) for x in given)
        for given in (terms.hiding, terms.adding)
    )
    return replace(terms, parts=parts, hiding=hiding, adding=adding), turned


_TURNED = {
    ROWS: COLUMNS, COLUMNS: ROWS,
    "row_terms": "column_terms", "column_terms": "row_terms",
    "row_segments": "column_segments", "column_segments": "row_segments",
}  # fmt: skip
