"""Operands that change scores: biases, masks, segments, positions that are data.

Biases and masks come in three forms. One varies along rows and columns, and is read in
tiles. One varies along columns alone: a number for each key. One varies along rows
alone. Biases and masks of the last two forms become one array, which is -inf where a
mask hides. A mask alone has inf elsewhere, so that a minimum hides. Scores and all that
is added to them are natural logarithms. So a bias of the lowest float stays finite, as
it is in the formula.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rewriter.kernels.attention.hopper import pallas
from rewriter.kernels.attention.hopper.extra_operands import (
    COLUMNS,
    NUMBER,
    ROWS,
    TABLE,
    form_of,
    table_type,
)
from rewriter.kernels.attention.hopper.functions import (
    Function,
    function_of,
    is_table,
)
from rewriter.kernels.attention.hopper.score_tiles import Read, applied

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.score import Score

LOOKED_UP = "looked up"
"""The form of a table that a function reads by index, in global memory."""

THERE = (NUMBER, LOOKED_UP)
"""Forms that are read from global memory, without a copy."""


CONDITIONS = {
    "row_segments": (operator.eq, "column_segments"),
    "row_first": (operator.le, "column_places"),
    "row_last": (operator.ge, "column_places"),
    "column_first": (operator.le, "row_places"),
    "column_last": (operator.ge, "row_places"),
}
"""Comparisons that hold where a row sees a column: names of the integers of both. A
segment equals the key's, and the key's position is between a first and a last one."""


@dataclass(frozen=True)
class Part:
    """An array with a part for every block of scores.

    Attributes:
        form: `TABLE` for [b|1, n|1, rows, columns], `ROWS` for [b|1, n|1, rows],
            `COLUMNS` for [b|1, n|1, columns], `NUMBER` for [b|1, n|1], and `LOOKED_UP`
            for [b|1 * n|1 * size].
        dtype: The elements' type.
        batches: Whether batch entries differ.
        heads: Whether query heads do.
        lead: The numbers of batch entries and of heads that differ.
        size: Numbers of a table that is looked up.
    """

    form: str
    dtype: str
    batches: bool
    heads: bool
    lead: tuple[int, int] = (1, 1)
    size: int = 0


@dataclass(frozen=True)
class Terms:
    """The operands that are present, as known while tracing.

    Attributes:
        parts: By name: "bias" and "mask" are tables, "row_terms" and "column_terms" are
            addends, and those of `CONDITIONS` are integers. Others are what the
            function reads.
        slopes: Whether each head has a slope, which is multiplied with distances.
        sinks: Whether each head has a score that joins its rows' sums.
        hiding: Names of parts whose -inf hides.
        adding: Names of parts that are added.
        function: What scores go through before all that, if anything.
        fill_passes: Whether hidden scores that are smaller than a fill stay.
    """

    parts: tuple[tuple[str, Part], ...] = ()
    slopes: bool = False
    sinks: bool = False
    hiding: frozenset[str] = frozenset()
    adding: frozenset[str] = frozenset()
    function: Function | None = None
    fill_passes: bool = False

    @property
    def natural(self) -> bool:
        """Whether scores are scaled before they are compared."""
        return self.unbounded or self.slopes

    @property
    def unbounded(self) -> bool:
        """Whether scores may be so large that they absorb the log of a row's sum."""
        return bool(self.adding) or self.function is not None

    @property
    def compares(self) -> bool:
        """Whether there are segments, or positions that are data."""
        return any(name in CONDITIONS for name, _ in self.parts)

    @property
    def hides(self) -> bool:
        """Whether rows may be left without keys."""
        return bool(self.parts) or self.function is not None

    @property
    def masks(self) -> bool:
        """Whether something hides keys: not biases alone."""
        return bool(self.hiding) or self.compares or "mask" in dict(self.parts)

    @property
    def only_reads(self) -> bool:
        """Whether all operands are what a function reads."""
        changes = self.adding or self.slopes or self.masks
        return not changes and "bias" not in dict(self.parts)

    @property
    def whole_rows(self) -> bool:
        """Whether masks hide only whole rows, the same ones in all heads."""
        thin = dict(self.parts).get("row_terms")
        alone = self.hiding == {"row_terms"} and not self.compares
        return alone and "mask" not in dict(self.parts) and not (thin and thin.heads)

    def copies(self, warpgroups: int) -> int:
        """Returns the number of copies for a block's parts."""
        return sum(1 if x.form == COLUMNS else warpgroups for _, x in self.copied)

    @property
    def copied(self) -> tuple[tuple[str, Part], ...]:
        """The parts that are copied into shared memory."""
        return tuple((name, x) for name, x in self.parts if x.form not in THERE)

    def scratch(self, stages: int, warpgroups: int, block: int) -> dict[str, Any]:
        """Returns shared memory for blocks of so many columns, by name."""
        made = {}
        for name, part in self.copied:
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
        for name, part in self.copied:
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

    def computed(
        self,
        products: Array,
        place: Place,
        memory: Mapping[str, Any],
        given: Mapping[str, Any],
        warpgroup: Any,
        *,
        scale: float,
        turned: bool = False,
        slope: bool = False,
        rows: tuple[Array, Array] | None = None,
    ) -> tuple[Array, ...]:
        """Returns the function's values, and its derivatives on request.

        Args:
            products: float32 [64, columns].
            place: That of the tile.
            memory: References to `scratch`.
            given: References to arrays in global memory.
            warpgroup: The index of the 64 rows within the tile.
            scale: What the products are multiplied with first.
            turned: Whether rows are keys.
            slope: Whether to return derivatives by the scaled products.
            rows: The log-sum-exps in two terms, as wide as the products. Then results
                are weights, and weights times derivatives.
        """
        assert self.function is not None
        parts, shape = dict(self.parts), products.shape
        tables = [look.table for look in self.function.lookups]
        starts = [pallas.rows(_start(parts[name], place)) for name in tables]
        arrays = [
            _of_tile(parts[name], memory.get(name), given.get(name), place, warpgroup,
                     shape)
            for name in self.function.arrays
        ]  # fmt: skip
        first = pallas.row_positions(64) + (place.row + 64 * warpgroup)
        same = [parts[name].form == NUMBER for name in self.function.arrays]
        read = Read(arrays, same, [given[name] for name in tables], starts)
        return applied(
            self.function, products, first, pallas.rows(place.column), read,
            scale=scale, most=place.most, turned=turned, slope=slope, sums=rows,
        )  # fmt: skip

    def added(
        self,
        scores: Array,
        memory: Mapping[str, Any],
        slot: Any,
        warpgroup: Any,
        part: bool,
        fill: Any = None,
    ) -> Array:
        """Returns scores with addends, -inf where masks and segments hide.

        Args:
            scores: float32 [64, columns], in natural logarithms if `natural`.
            memory: References to `scratch`.
            slot: The stage.
            warpgroup: The index of the 64 rows within a tile.
            part: Whether masks and segments may hide some keys.
            fill: A number instead of -inf, or None.
        """
        parts, shape = dict(self.parts), scores.shape
        if "bias" in parts:
            tile = memory["bias"].at[slot, warpgroup][...]
            narrow = parts["bias"].dtype == "bfloat16"
            tile = pallas.widened(tile) if narrow else tile.astype(jnp.float32)
            scores = scores + tile
        lines = {
            "column_terms": ((slot,), pallas.COLUMNS, pallas.across),
            "row_terms": ((slot, warpgroup), pallas.ROWS, pallas.along),
        }
        hiding = self.hiding if part else frozenset()
        for name in sorted(self.adding | hiding, key=self._is_after):
            if name not in lines:
                continue
            at, layout, spread = lines[name]
            wide = spread(pallas.loaded(memory[name].at[at], layout), shape)
            if name in self.adding:
                scores = scores + wide
            if name in self.adding and name in hiding:
                scores = jnp.where(wide == -jnp.inf, -jnp.inf, scores)
            elif name in hiding and (fill is None or self.fill_passes):
                scores = pallas.least(scores, wide)
            elif name in hiding:
                scores = jnp.where(wide == jnp.inf, scores, wide)
        if part and "mask" in parts:
            tile = memory["mask"].at[slot, warpgroup][...]
            scores = jnp.where(tile != 0, scores, self._hidden(scores, fill))
        if part and self.compares:
            scores = self._where_conditions_hold(scores, memory, slot, warpgroup, fill)
        return scores

    def _is_after(self, name: str) -> tuple[bool, str]:
        """The order of addends and masks: what only hides comes last."""
        return name not in self.adding, name

    def _hidden(self, scores: Array, fill: Any) -> Array | float:
        """The scores of hidden keys."""
        if fill is None:
            return -jnp.inf
        every = pallas.zeros(scores.shape) + fill
        return pallas.least(scores, every) if self.fill_passes else every

    def _where_conditions_hold(
        self,
        scores: Array,
        memory: Mapping[str, Any],
        slot: Any,
        warpgroup: Any,
        fill: Any,
    ) -> Array:
        """Returns scores with -inf where segments or positions hide a column."""
        given, shape = dict(self.parts), scores.shape

        def spread(name: str) -> Array:
            if given[name].form == ROWS:
                line = pallas.loaded(memory[name].at[slot, warpgroup], pallas.ROWS)
                return pallas.along(line, shape)
            line = pallas.loaded(memory[name].at[slot], pallas.COLUMNS)
            return pallas.across(line, shape)

        for name, (holds, of_keys) in CONDITIONS.items():
            if name in given:
                sees = holds(spread(name), spread(of_keys))
                scores = jnp.where(sees, scores, self._hidden(scores, fill))
        return scores


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
    most: int | None = None
    """No row and no column has a larger number, if that is known."""


def terms_of(
    t: int,
    s: int,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    q_segments: Array | None = None,
    kv_segments: Array | None = None,
    kv_positions: Array | None = None,
    first_position: Array | None = None,
    last_position: Array | None = None,
    alibi: Array | None = None,
    sinks: Array | None = None,
    score: Score | None = None,
    hidden: Any = -jnp.inf,
    fill_passes: bool = False,
    **read: Array,
) -> tuple[Terms, dict[str, Array]]:
    """Returns the present terms, and arrays by name, with "slopes" and "sinks".

    Args:
        t: Queries.
        s: Keys.
        bias: float [b|1, n|1, t|1, s|1].
        mask: bool [b|1, n|1, t|1, s|1].
        q_segments: int [b|1, t].
        kv_segments: int [b|1, s]; segments count if both are there.
        kv_positions: int [b|1, s].
        first_position: int [b|1, t]; a query sees keys at positions from it on.
        last_position: int [b|1, t]; it sees those up to this one.
        alibi: float [n].
        sinks: float [n].
        score: A function of scores.
        hidden: The scores of keys that masks hide.
        fill_passes: Whether smaller scores than that stay.
        **read: What it reads: arrays [b|1, n|1, t|1, s|1], and tables [b|1, n|1, r].
    """
    arrays, hiding, adding = _added(t, s, bias, mask, hidden, fill_passes)
    pairs = [("row_segments", q_segments), ("column_segments", kv_segments)]
    if q_segments is None or kv_segments is None:
        pairs = []
    pairs += [
        ("column_places", kv_positions),
        ("row_first", first_position),
        ("row_last", last_position),
    ]
    for name, x in pairs:
        if x is not None:
            arrays[name] = x.astype(jnp.int32)[:, None]
    parts = tuple((name, _part(name, x)) for name, x in arrays.items())
    parts += tuple((name, _read_part(name, x)) for name, x in read.items())
    arrays |= {name: _as_read(x, dict(parts)[name].form) for name, x in read.items()}
    arrays = {name: whole(x, dict(parts)[name].form) for name, x in arrays.items()}
    for name, x in (("slopes", alibi), ("sinks", sinks)):
        if x is not None:
            arrays[name] = x.astype(jnp.float32)
    present = alibi is not None, sinks is not None
    function = function_of(score, read)
    return Terms(parts, *present, hiding, adding, function, fill_passes), arrays


def _added(
    t: int,
    s: int,
    bias: Array | None,
    mask: Array | None,
    hidden: Any,
    fill_passes: bool,
) -> tuple[dict[str, Array], frozenset[str], frozenset[str]]:
    """A bias and a mask as arrays by name, the names that hide keys, and that add."""
    arrays: dict[str, Array] = {}
    hiding, adding = set[str](), set[str]()
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
            own = arrays.get(thin, jnp.inf)
            least = jnp.minimum(own, hidden) if fill_passes else hidden
            shown = jnp.where(line, own, least)
            arrays[thin] = shown.astype(jnp.float32)
    return arrays, frozenset(hiding), frozenset(adding)


def _read_part(name: str, x: Array) -> Part:
    """The part of what a function reads."""
    form = LOOKED_UP if is_table(name) else form_of(x.shape)
    dtype = _read_type(x.dtype, form)
    b, n = x.shape[:2]
    size = x.shape[2] if form == LOOKED_UP else 0
    return Part(form, str(dtype), b > 1, n > 1, (b, n), size)


def _read_type(dtype: Any, form: str) -> Any:
    """The dtype in memory: tables of pairs are narrow, other numbers have 32 bits."""
    if form == TABLE:
        return table_type(dtype)
    return jnp.dtype("float32" if jnp.issubdtype(dtype, jnp.floating) else "int32")


def _as_read(x: Array, form: str) -> Array:
    """What a function reads, as it lies in memory."""
    kind = _read_type(x.dtype, form)
    if x.dtype == jnp.uint32:
        x = lax.bitcast_convert_type(x, jnp.int32)
    x = x.astype(kind)
    if form == LOOKED_UP:
        return x.reshape(-1)
    lines = {ROWS: x[..., 0], COLUMNS: x[:, :, 0], NUMBER: x[:, :, 0, 0]}
    return lines.get(form, x)


def _start(part: Part, place: Place) -> Any:
    """The index of the first number of a table that is looked up."""
    entry = place.b if part.batches else 0
    head = place.n if part.heads else 0
    return (entry * part.lead[1] + head) * part.size


def _of_tile(
    part: Part, memory: Any, source: Any, place: Place, warpgroup: Any,
    shape: tuple[int, ...],
) -> Array:  # fmt: skip
    """An array that a function reads, for one tile: float32 or int32 of its shape."""
    slot = place.slot
    if part.form == TABLE:
        tile = memory.at[slot, warpgroup][...]
        if part.dtype == "int8":
            ones = pallas.along(pallas.rows(1), shape)
            return jnp.where(tile != 0, ones, pallas.along(pallas.rows(0), shape))
        if part.dtype == "bfloat16":
            return pallas.widened(tile)
        return tile if part.dtype == "int32" else tile.astype(jnp.float32)
    if part.form == NUMBER:
        at = (place.b if part.batches else 0, place.n if part.heads else 0)
        value = pallas.scalar(source, *at)
        whole = part.dtype == "int32"
        each = pallas.rows(value) if whole else pallas.zeros((64,)) + value
        return pallas.along(each, shape)
    if part.form == ROWS:
        line = pallas.loaded(memory.at[slot, warpgroup], pallas.ROWS)
        return pallas.along(line, shape)
    return pallas.across(pallas.loaded(memory.at[slot], pallas.COLUMNS), shape)


def _part(name: str, x: Array) -> Part:
    form = TABLE if x.ndim == 4 else ROWS if name.startswith("row") else COLUMNS
    return Part(form, str(x.dtype), x.shape[0] > 1, x.shape[1] > 1)


def whole(x: Array, form: str) -> Array:
    """Adds rows up to a multiple of 8, columns up to one of 128 bytes."""
    if form in THERE:
        return x
    more = [0] * x.ndim
    more[-1] = -x.shape[-1] % (128 // x.dtype.itemsize)
    if form == TABLE:
        more[-2] = -x.shape[-2] % 8
    return jnp.pad(x, [(0, m) for m in more]) if any(more) else x
