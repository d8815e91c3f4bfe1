"""Computes programs of rows on a Hopper GPU, by the teams of a block.

A team takes one row after the other from a ring in shared memory, as that of a norm
does. It computes the program's equations of all columns, up to the first sum. All lanes
of the team join what they have, and go on to the next sum. What was computed stays in
registers, so that a row is read from memory once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.norms.hopper_config import (
    Teams,
    programs_of,
    rows_of,
    steps_of,
)
from rewriter.kernels.norms.hopper_team import Team
from rewriter.kernels.quantized_rows.config import Rows, fits, likely
from rewriter.kernels.shared import pallas_gpu, pallas_gpu_rows
from rewriter.ops.row_program import (
    COLUMN,
    FULL,
    ONE,
    ROW,
    Input,
    Number,
    Place,
    Result,
    RowProgram,
    Step,
)

if TYPE_CHECKING:
    from jax import Array

SIXTEEN = ("bfloat16", "float16")
FLOATS = ("float32", *SIXTEEN)
BY_COLUMNS = (FULL, COLUMN)
KEPT = "kept_"


def computed(
    program: RowProgram, config: Teams | None, arrays: Sequence[Array]
) -> list[Array]:
    """Returns the results of a program; see `hopper.forward`."""
    kinds = [kind for kind, _ in program.inputs]
    m, d = arrays[kinds.index(FULL)].shape
    rows = Rows(program, m, d)
    if config is None or not fits(config, rows):
        config = likely(rows)[0]
    names = [f"{kind}{i}" for i, kind in enumerate(kinds)]
    order = sorted(range(len(kinds)), key=lambda i: kinds[i] != FULL)
    operands = {
        names[i]: arrays[i]
        if kinds[i] in (FULL, COLUMN)
        else arrays[i].astype(jnp.float32)
        for i in order
    }
    out = [
        jax.ShapeDtypeStruct((m, d), program.dtype(x))
        if program.kind(x) == FULL
        else jax.ShapeDtypeStruct((m,), jnp.float32)
        for x in program.outs
    ]
    return list(_call(rows, config, operands, out))


def _call(
    rows: Rows, config: Teams, operands: Mapping[str, Array], out: Sequence[Any]
) -> Any:
    streamed = [x for n, x in operands.items() if n.startswith(FULL)]
    kept = {n: x for n, x in operands.items() if n.startswith(COLUMN)}
    each, slots = rows_of(rows.m, config), config.teams * config.stages
    rings = [plgpu.SMEM((slots, each, rows.d), x.dtype) for x in streamed]
    sums = (config.teams, max(rows.sums, 2), each, 4 * config.warpgroups)
    scratch: dict[str, Any] = {
        "rows": plgpu.RefUnion(rings, []),
        "sums": plgpu.SMEM(sums, jnp.float32),
        "ready": pallas_gpu.barriers(slots, len(rings)),
    }
    scratch |= {f"{KEPT}{n}": plgpu.SMEM((rows.d,), x.dtype) for n, x in kept.items()}
    if kept:
        scratch["kept"] = pallas_gpu.barriers(1, len(kept))

    def body(*references: Any, **shared: Any) -> None:
        named = dict(zip(operands, references, strict=False))
        place = (
            lax.axis_index(pallas_gpu.WARPGROUP), lax.axis_index(pallas_gpu.PROGRAM),
            lax.axis_size(pallas_gpu.PROGRAM),
        )  # fmt: skip
        outs = references[len(operands) :]
        _Team(rows, config, named, shared, outs, *place).run()

    programs = programs_of(steps_of(rows.m, config), config)
    together = config.teams * config.warpgroups
    run = pallas_gpu.kernel(body, "quantized_rows", out, scratch, programs, together)
    return run(*operands.values())


class _Team(Team):
    """The work of one warpgroup of a team: `norm` holds the `Rows`."""

    def run(self) -> None:
        """Computes this team's rows."""

        def one(turn: Any, slot: Any, carry: Any) -> Any:
            values = [_Values(self, turn, slot, row) for row in range(self.rows)]
            self.join(turn, values)
            for chunk in range(self.chunks):
                for row in values:
                    row.write(chunk)
            for row in values:
                row.write_numbers()
            return carry

        self.over_steps(one, jnp.int32(0))

    @property
    def equations(self) -> RowProgram:
        """What is computed of each row."""
        return self.norm.program

    def join(self, turn: Any, values: Sequence[_Values]) -> None:
        """Computes all sums of a step's rows, one after the other."""
        sums = [i for i, step in enumerate(self.equations.steps) if step.joins]
        for count, index in enumerate(sums):
            step = self.equations.steps[index]
            parts = [row.part(step) for row in values]
            half = count if len(sums) > 1 else lax.rem(turn, jnp.int32(2))
            shared = self.shared["sums"].at[self.team, half]
            join = JOINED[step.name]
            totals = join(parts, shared, self.config.warpgroups)
            if count == 0:
                self.refill(turn)
            for row, total in zip(values, totals, strict=True):
                row.known[index] = _rounded(total, step.dtype)


def _least(parts: Sequence[Array], shared: Any, warpgroups: int) -> list[Array]:
    made = pallas_gpu_rows.row_maxima([-x for x in parts], shared, warpgroups)
    return [-x for x in made]


JOINED: Mapping[str, Callable[..., list[Array]]] = {
    "reduce_sum": lambda *x: pallas_gpu_rows.row_sums(*x),
    "reduce_max": lambda *x: pallas_gpu_rows.row_maxima(*x),
    "reduce_min": _least,
}
"""How the parts of all lanes are joined."""

BESIDE: Mapping[str, Callable[[Array, Array], Array]] = {
    "reduce_sum": lambda x, y: x + y,
    "reduce_max": lambda x, y: jnp.maximum(x, y),
    "reduce_min": lambda x, y: jnp.minimum(x, y),
}
"""How those of chunks are joined before."""


@dataclass(frozen=True)
class _Values:
    """The values of a row in a warpgroup's registers.

    Attributes:
        team: The warpgroup.
        turn: The step.
        slot: The step's place in the ring.
        row: The row's index in the step.
        known: The results of steps that are numbers of the row.
        parts: By step and chunk, those that are of columns too.
    """

    team: _Team
    turn: Any
    slot: Any
    row: int
    known: dict[int, Any] = field(default_factory=dict)
    parts: dict[tuple[int, int], Any] = field(default_factory=dict)

    @property
    def index(self) -> Any:
        """The row's index among all."""
        return self.team.row(self.turn) + self.row

    def part(self, step: Step) -> Array:
        """What a sum joins, of this lane's numbers: joined over chunks."""
        (place,) = step.ins
        made = None
        for chunk in range(self.team.chunks):
            x = self.value(place, chunk)
            made = x if made is None else BESIDE[step.name](made, x)
        return made

    def value(self, place: Place, chunk: int) -> Any:
        """A value: float32, or flags, of a chunk's columns or of the row."""
        if isinstance(place, Number):
            whole = isinstance(place.value, bool)
            return np.bool_(place.value) if whole else np.float32(place.value)
        if isinstance(place, Input):
            return self.given(place, chunk)
        index = place.index
        step = self.team.equations.steps[index]
        if step.kind not in BY_COLUMNS:
            if index not in self.known:
                self.known[index] = self.computed(step, chunk)
            return self.known[index]
        if (index, chunk) not in self.parts:
            self.parts[index, chunk] = self.computed(step, chunk)
        return self.parts[index, chunk]

    def given(self, place: Input, chunk: int) -> Any:
        """An input. Rows are read again from shared memory."""
        team, kind = self.team, self.team.equations.inputs[place.index][0]
        name = f"{kind}{place.index}"
        if kind == FULL:
            return team.streamed(name, self.slot, self.row, chunk)
        if kind == COLUMN:
            kept = team.shared[f"{KEPT}{name}"]
            return pallas_gpu_rows.loaded(kept.at[team.columns(chunk)])
        return team.refs[name][self.index if kind == ROW else 0]

    def computed(self, step: Step, chunk: int) -> Any:
        """The result of a step, rounded to its dtype."""
        values, program = [self.value(x, chunk) for x in step.ins], self.team.equations
        by_one = step.kind == FULL and program.kind(step.ins[-1]) in (ROW, ONE)
        if step.name == "div" and by_one and program.kind(step.ins[0]) in BY_COLUMNS:
            made = pallas_gpu_rows.quotient(*values)
        else:
            made = COMPUTE[step.name](values, step)
        return _rounded(made, step.dtype)

    def write(self, chunk: int) -> None:
        """Writes the results of a chunk's columns."""
        program = self.team.equations
        for out, place in zip(self.team.out, program.outs, strict=True):
            if program.kind(place) != FULL:
                continue
            target = out.at[self.index, self.team.columns(chunk)]
            if program.dtype(place) in FLOATS:
                value = self.value(place, chunk).astype(out.dtype)
                pallas_gpu_rows.store(target, value)
                continue
            step = program.steps[place.index]
            if step.dtype != "int8":
                pallas_gpu_rows.store_floats(target, self.value(place, chunk))
                continue
            first, nearest, ends = whole(program, step)
            value = self.value(first, chunk)
            pallas_gpu_rows.store_integers(target, value, nearest, ends)

    def write_numbers(self) -> None:
        """Writes the results that are a number of the row."""
        program = self.team.equations
        numbers = [
            (out, self.value(place, 0))
            for out, place in zip(self.team.out, program.outs, strict=True)
            if program.kind(place) != FULL
        ]

        @pallas_gpu.when(self.team.part == 0)
        def _() -> None:
            for out, value in numbers:
                pallas_gpu_rows.store_number(out.at[pl.ds(self.index, 1)], value)


def whole(program: RowProgram, step: Step) -> tuple[Place, bool, tuple[int, int]]:
    """Returns how a conversion to int8 is computed, with steps in front of it.

    The conversion itself rounds to the nearest, and stops at ends: so it does what
    a rounding and limits in front of it do.

    Args:
        program: The program.
        step: The conversion.

    Returns:
        The numbers, whether they are rounded to the nearest, and both ends.
    """
    place, low, high = step.ins[0], -128, 127
    while isinstance(place, Result):
        before = program.steps[place.index]
        if before.name == "round" and low <= 0 <= high:  # NaN becomes 0
            return before.ins[0], True, (low, high)
        limited = _limited(before)
        if limited is None:
            break
        place, least, most = limited
        low, high = max(low, least), min(high, most)
    return step.ins[0], False, (-128, 127)


def _limited(step: Step) -> tuple[Place, int, int] | None:
    """What a step limits by numbers, and both ends as int8; None if it does not."""
    names = {"max": ("low", "x"), "min": ("high", "x"), "clamp": ("low", "x", "high")}
    orders = [names.get(step.name, ()), names.get(step.name, ())[::-1]]
    for order in orders[: 1 + (step.name != "clamp")]:
        given = dict(zip(order, step.ins, strict=True)) if order else {}
        place = given.pop("x", None)
        known = {n: x.value for n, x in given.items() if isinstance(x, Number)}
        if place is None or isinstance(place, Number) or len(known) < len(given):
            continue
        ends = {n: max(-128.0, min(127.0, x)) for n, x in known.items() if x == x}
        if len(ends) == len(known):
            return place, int(ends.get("low", -128)), int(ends.get("high", 127))
    return None


def _rounded(x: Any, dtype: str) -> Any:
    """Numbers rounded to a float of 16 bits, as float32; others stay."""
    return x.astype(dtype).astype("float32") if dtype in SIXTEEN else x


def _power(values: Sequence[Any], step: Step) -> Any:
    (x,), (y,) = values, step.params
    made, left = None, abs(y)
    while left:
        if left & 1:
            made = x if made is None else made * x
        left >>= 1
        x = x * x if left else x
    made = x * 0.0 + 1.0 if made is None else made
    return made if y >= 0 else 1.0 / made


COMPUTE: Mapping[str, Callable[[Sequence[Any], Step], Any]] = {
    "abs": lambda x, _: jnp.abs(x[0]),
    "add": lambda x, _: x[0] + x[1],
    "add_any": lambda x, _: x[0] + x[1],
    "clamp": lambda x, _: jnp.minimum(jnp.maximum(x[1], x[0]), x[2]),
    "convert_element_type": lambda x, _: x[0],
    "div": lambda x, _: x[0] / x[1],
    "eq": lambda x, _: x[0] == x[1],
    "floor": lambda x, _: pallas_gpu_rows.floor(x[0]),
    "ge": lambda x, _: x[0] >= x[1],
    "gt": lambda x, _: x[0] > x[1],
    "integer_pow": _power,
    "le": lambda x, _: x[0] <= x[1],
    "lt": lambda x, _: x[0] < x[1],
    "max": lambda x, _: jnp.maximum(x[0], x[1]),
    "min": lambda x, _: jnp.minimum(x[0], x[1]),
    "mul": lambda x, _: x[0] * x[1],
    "ne": lambda x, _: x[0] != x[1],
    "neg": lambda x, _: -x[0],
    "round": lambda x, _: pallas_gpu_rows.nearest_whole(x[0]),
    "rsqrt": lambda x, _: lax.rsqrt(x[0]),
    "select_n": lambda x, _: jnp.where(x[0], x[2], x[1]),
    "sqrt": lambda x, _: pallas_gpu_rows.square_root(x[0]),
    "square": lambda x, _: x[0] * x[0],
    "sub": lambda x, _: x[0] - x[1],
}
"""How each primitive is computed."""
