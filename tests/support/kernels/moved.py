"""What a rewritten program moves in memory beside the kernels for Hopper GPUs.

XLA compiles the program around the kernels for the CPU, each kernel being an opaque
call of arrays in their usual order, as it is on a GPU. So no GPU and no compiler for
one is needed. XLA removes what cancels; what is left over is what a GPU would do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import rewriter
from rewriter.kernels.attention.hopper import pallas
from rewriter.kernels.shared import pallas_gpu
from rewriter.site import lowering

LARGE = 1 << 20
"""Bytes from which on an argument is large."""

MOVES = ("copy", "pad", "slice", "transpose", "concatenate", "dynamic-slice", "gather")
LINE = re.compile(
    r"(%[\w.-]+) = [a-z]+(\d*)\w*\[([\d,]*)\](?:\{([\d,]*))?\S* ([\w-]+)\((%[\w.-]+)?"
)
"""A result's name, bits, sizes and order in memory; what computes it, of what first."""


@contextmanager
def opaque_kernels() -> Iterator[None]:
    """Within, each Pallas kernel is traced as a call of unknown code."""

    def kernel(body: Any, name: str, out: Any, *rest: Any) -> Callable[..., Any]:
        del body, rest
        made = lambda *_: tuple(np.zeros(x.shape, x.dtype) for x in out)
        is_counter = lambda x: "Ref" in type(jax.typeof(x)).__name__  # of tiles

        def call(*given: Any) -> Any:
            arrays = [x for x in given if not is_counter(x)]
            return jax.pure_callback(made, tuple(out), *arrays)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module in (pallas, pallas_gpu):
            patch.setattr(module, "kernel", kernel)
        yield


def around_kernels(
    fn: Callable[..., Any], forced: Mapping[str, str], *specs: Any
) -> Callable[..., Any]:
    """Returns the rewritten program, with its sites computed as on an NVIDIA GPU.

    Args:
        fn: The program.
        forced: A kernel for Hopper GPUs for each op.
        *specs: Its arguments' shapes.
    """
    closed = rewriter.optimize(fn, implementation=forced).trace(*specs).jaxpr

    def run(*args: Any) -> Any:
        values = dict(zip(closed.jaxpr.invars, args, strict=True))
        values |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        read = lambda x: x.val if hasattr(x, "val") else values[x]
        for eqn in closed.jaxpr.eqns:
            given = [read(x) for x in eqn.invars]
            outvars = [x for x in eqn.outvars if type(x).__name__ != "DropVar"]
            if eqn.primitive.name.startswith("rewriter_site"):
                params = tuple(sorted(eqn.params.items()))
                outs = lowering._implementation(eqn.primitive, "cuda", params)(*given)
                outs = outs if eqn.primitive.multiple_results else [outs]
                outs = [
                    y for x, y in zip(eqn.outvars, outs, strict=True) if x in outvars
                ]
            else:
                names = [x for x in eqn.invars if not hasattr(x, "val")]
                one = closed.jaxpr.replace(
                    constvars=[], invars=names, outvars=outvars, eqns=[eqn]
                )
                given = [values[x] for x in names]
                outs = jaxpr_as_fun(ClosedJaxpr(one, []))(*given)
            values |= dict(zip(outvars, outs, strict=True))
        return [read(x) for x in closed.jaxpr.outvars]

    return run


def moves(fn: Callable[..., Any], *specs: Any) -> dict[str, int]:
    """Returns what a compiled program moves, in XLA's words, and how often.

    Arrays count that have a fourth of the numbers of the smallest argument of `LARGE`
    bytes, or more: parts of it do, and numbers of its rows do not. Those of less than
    a fourth of `LARGE` bytes do not count.
    """
    text = jax.jit(fn).lower(*specs).compile().as_text()
    least = min(
        math.prod(x.shape)
        for x in specs
        if math.prod(x.shape) * x.dtype.itemsize >= LARGE
    )
    found: dict[str, int] = {}
    orders: dict[str, list[int]] = {}
    for result, bits, sizes, order, what, operand in LINE.findall(text):
        shape = [int(x) for x in sizes.split(",") if x]
        orders[result] = [int(x) for x in order.split(",") if x and shape[int(x)] > 1]
        count = math.prod(shape)
        if what not in MOVES or count < least / 4 or count * int(bits or 8) < 2 * LARGE:
            continue
        if what == "copy" and orders.get(operand) == orders[result]:
            continue  # axes of size 1 alone are elsewhere
        name = f"{what} [{sizes}]"
        found[name] = found.get(name, 0) + 1
    return found
