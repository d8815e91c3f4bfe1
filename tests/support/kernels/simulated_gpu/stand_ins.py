"""What stands in for functions of JAX and of shared kernel code."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from rewriter.kernels.attention.hopper import pallas
from rewriter.kernels.quantized_dot.few_rows import kernel as few_rows
from tests.support.kernels import lines
from tests.support.kernels.simulated_gpu import machine


def for_loop(start: Any, end: Any, body: Callable[[int, Any], Any], carry: Any) -> Any:
    for i in range(int(start), int(end)):
        carry = body(i, carry)
    return carry


def while_loop(
    condition: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any
) -> Any:
    while condition(carry):
        carry = body(carry)
    return carry


def axis_index(name: str) -> int:
    if name == few_rows.PART:
        return machine.HERE.part
    return machine.HERE.warpgroup if name == pallas.WARPGROUP else machine.HERE.program


def broadcast(x: np.ndarray, shape: tuple[int, ...], axes: list[int]) -> np.ndarray:
    return np.broadcast_to(x[:, None] if axes == [0] else x[None], shape)


def einsum(form: str, *arrays: Any, preferred_element_type: Any = None) -> np.ndarray:
    dtype = preferred_element_type or np.float32
    return np.einsum(form, *(np.asarray(x, dtype) for x in arrays))


def hidden(
    scores: np.ndarray,
    first: Any,
    last: Any,
    fill: Any = None,
    end: Any = None,
    passes: bool = False,
) -> np.ndarray:
    column = np.arange(scores.shape[1])[None]
    keep = np.ones(scores.shape, bool) if last is None else column <= last[:, None]
    if first is not None:
        keep = keep & (column >= first[:, None])
    other = np.full(scores.shape, -np.inf, np.float32)
    if fill is not None:
        number = fill[:, None]
        number = np.fmin(scores, number) if passes else number
        there = True if end is None else column <= end[:, None]
        other = np.where(there, number, other)
    return np.where(keep, scores, other)


LATE_S = 0.0
"""How long the first warpgroup of a team takes to read the sums of all."""


def row_sums(
    values: Sequence[Any], shared: machine.Reference, warpgroups: int
) -> list[Any]:
    return _joined(np.sum, values, shared, warpgroups)


def row_maxima(
    values: Sequence[Any], shared: machine.Reference, warpgroups: int
) -> list[Any]:
    return _joined(np.max, values, shared, warpgroups)


def _joined(
    join: Any, values: Sequence[Any], shared: machine.Reference, warpgroups: int
) -> list[Any]:
    team, part = divmod(machine.HERE.warpgroup, warpgroups)
    place = shared.view()
    assert place.shape == (len(values), 4 * warpgroups)
    for row, value in zip(place, values, strict=True):
        row[4 * part : 4 * part + 4] = join(value.reshape(4, -1), 1)
    machine.HERE.block.meet(range(team * warpgroups, (team + 1) * warpgroups))
    if part == 0:
        time.sleep(LATE_S)
    return list(join(place, 1))


def write(reference: machine.Reference, value: np.ndarray, skipped: int = 0) -> None:
    assert value.dtype == reference.dtype
    if skipped:
        assert skipped * 128 % len(value) == 0
        reference.view()[skipped:] = value[skipped:]
    else:
        reference[...] = value


def without_first(value: np.ndarray, skipped: int) -> np.ndarray:
    assert skipped * 128 % len(value) == 0
    return np.where(np.arange(len(value)) < skipped, np.float32(0), value)


def write_floats(reference: machine.Reference, value: np.ndarray) -> None:
    assert value.dtype == np.float32
    most = np.float32(ml_dtypes.finfo(reference.dtype).max)
    reference[...] = np.clip(value, -most, most).astype(reference.dtype)


def write_integers(
    reference: machine.Reference, value: np.ndarray, nearest: bool,
    ends: tuple[int, int] = (-128, 127),
) -> None:  # fmt: skip
    assert value.dtype == np.float32
    value = (np.rint if nearest else np.trunc)(np.nan_to_num(value, nan=0.0))
    reference[...] = np.clip(value, *ends).astype(np.int8)


def write_number(reference: machine.Reference, value: Any) -> None:
    assert np.ndim(value) == 0
    reference[...] = np.full(1, value, np.float32)


def applied(
    function: Any, products: np.ndarray, rows: np.ndarray, column: np.ndarray,
    read: Any, *, scale: float, most: int, turned: bool, slope: bool,
    sums: Any = None,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """The program of a function, line by line, by JAX for all numbers of a tile."""
    shape, of = products.shape, dict(function.dtypes)
    assert most is not None
    assert max(rows.max(), column[0] + shape[1] - 1) <= most
    columns = np.broadcast_to(column[0] + np.arange(shape[1], dtype=np.int32), shape)
    rows = np.broadcast_to(rows[:, None], shape)
    products = products * np.float32(scale)
    given = [products, *((columns, rows) if turned else (rows, columns))]
    for x, name in zip(read.arrays, function.arrays, strict=True):
        given.append(np.asarray(x).astype(of[name]))
    for look, table, start in zip(
        function.lookups, read.tables, read.starts, strict=True
    ):
        place, index = lines.evaluated(look.place, given)
        found = np.asarray(table.view())[start[0] + np.asarray(place)]
        given += lines.evaluated(look.found, [found.astype(of[look.table]), index])
    made = lines.evaluated(function.value_and_slope if slope else function.value, given)
    if sums is not None:
        lse, rest = sums
        weights = np.exp2((made[0] - lse) * np.float32(math.log2(math.e)) - rest)
        made = [weights, weights * made[1]]
    return tuple(np.broadcast_to(np.asarray(x, np.float32), shape) for x in made)


def sloped(scores: np.ndarray, first: np.ndarray, slope: np.ndarray) -> np.ndarray:
    columns = np.arange(scores.shape[1], dtype=np.float32)[None]
    return scores + (first[:, None] + slope[:, None] * columns)


def wait_for_turn(warpgroups: int) -> None:
    del warpgroups
    block, mine = machine.HERE.block, machine.HERE.warpgroup
    block.wait(lambda: block.turns[mine] > 0, "its turn")
    block.turns[mine] -= 1


def pass_turn(warpgroups: int) -> None:
    with machine.HERE.block.changed:
        machine.HERE.block.turns[(machine.HERE.warpgroup + 1) % warpgroups] += 1
        machine.HERE.block.changed.notify_all()


class Instead:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
