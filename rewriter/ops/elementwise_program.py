"""Elementwise functions of large arrays, as one kernel computes them.

    u [m, d]   dy [m, d]          arrays of one shape
    d = dy * gelu'(u)             a function of scalars, for each number
    s = sum of d over m           maybe its sums over rows, for each column

The function is a jaxpr of float32 scalars: what the program rounds in between is not
rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel
from rewriter.support.verdict import Verdict


@dataclass(frozen=True)
class ElementwiseProgram:
    """A function of the numbers of some arrays.

    Attributes:
        inputs: Kind and dtype of each array; all are `row_program.FULL`.
        out: The dtype of the result.
        sums: Whether sums of the rounded result over rows are a second result.
        text: The function, in words that differ where functions do.
        scalars: The function, a closed jaxpr from float32 scalars to one.
    """

    inputs: tuple[tuple[str, str], ...]
    out: str
    sums: bool
    text: str
    scalars: Any = field(compare=False, repr=False)


@dataclass(frozen=True)
class ElementwiseKernel:
    """A kernel of elementwise functions.

    Attributes:
        kernel: ``forward(*arrays, program=...)`` takes arrays [m, d] and gives
            [m, d], and float32 [d] if sums are asked for.
        supports: ``supports(program, m, d)`` says, with reasons, whether it takes one.
        sums: ``sums(m, d)`` says whether it adds up rows of such arrays.
        pays: ``pays(program, m, d, device)`` says whether it is likely to be faster
            than XLA.
    """

    kernel: Kernel
    supports: Callable[[ElementwiseProgram, int, int], Verdict]
    sums: Callable[[int, int], bool]
    pays: Callable[[ElementwiseProgram, int, int, Device], Verdict]
