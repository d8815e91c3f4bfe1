"""Programs of rows: equations whose values are rows, or one number for each of them.

    x [m, d]   scale [d]        a row, and a number for each column
    s = sum x² over d           a number for each row
    y = x · rsqrt(s / d + eps) · scale
    a = max |y| over d
    q = int8(round(y / a))      results: q, and a for each row

They are the program's own equations, with its dtypes, in its order. So a kernel that
takes one row after the other rounds as the program does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel
from rewriter.support.verdict import Verdict

FULL, ROW, COLUMN, ONE = "full", "row", "column", "one"
"""Kinds of values: of each row and column, of each row, of each column, a number."""

SUMS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
"""Primitives that join the numbers of a row."""


@dataclass(frozen=True)
class Number:
    """A number that is known while tracing.

    Attributes:
        value: The number.
        dtype: Its dtype.
    """

    value: float | bool
    dtype: str


@dataclass(frozen=True)
class Input:
    """The number of an array that is given.

    Attributes:
        index: Its position among those.
    """

    index: int


@dataclass(frozen=True)
class Result:
    """The result of an earlier step.

    Attributes:
        index: The number of the step.
    """

    index: int


Place = Number | Input | Result


@dataclass(frozen=True)
class Step:
    """One equation.

    Attributes:
        name: Its primitive.
        ins: What it reads.
        kind: The kind of its result.
        dtype: The dtype of its result.
        params: Those of the primitive's parameters that matter, in order.
    """

    name: str
    ins: tuple[Place, ...]
    kind: str
    dtype: str
    params: tuple[Any, ...] = ()

    @property
    def joins(self) -> bool:
        """Whether it joins the numbers of a row."""
        return self.name in SUMS


@dataclass(frozen=True)
class RowProgram:
    """Equations of rows.

    Attributes:
        inputs: Kind and dtype of each array that is given.
        steps: The equations, in order; all are needed.
        outs: The results.
    """

    inputs: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]
    outs: tuple[Place, ...]

    def kind(self, place: Place) -> str:
        """Returns the kind of a value."""
        if isinstance(place, Number):
            return ONE
        if isinstance(place, Input):
            return self.inputs[place.index][0]
        return self.steps[place.index].kind

    def dtype(self, place: Place) -> str:
        """Returns the dtype of a value."""
        if isinstance(place, Number):
            return place.dtype
        if isinstance(place, Input):
            return self.inputs[place.index][1]
        return self.steps[place.index].dtype

    @property
    def depth(self) -> int:
        """How many sums follow one another, each of values that need the one before."""
        depths: list[int] = []
        for step in self.steps:
            before = [depths[x.index] for x in step.ins if isinstance(x, Result)]
            depths.append(max(before, default=0) + step.joins)
        return max(depths, default=0)


@dataclass(frozen=True)
class RowKernel:
    """A kernel of programs of rows.

    Attributes:
        kernel: ``forward(*arrays, program=...)`` gives the results as rows: [m, d] or,
            for a number of each row, [m]. Arrays are [m, d], [m], [d] or [1].
        supports: ``supports(program, m, d)`` says, with reasons, whether it takes one.
        pays: ``pays(program, m, d, device)`` says whether it is likely to be faster
            than XLA.
    """

    kernel: Kernel
    supports: Callable[[RowProgram, int, int], Verdict]
    pays: Callable[[RowProgram, int, int, Device], Verdict]
