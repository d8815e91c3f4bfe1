"""Activations on Hopper GPUs: what the kernel takes, and where it pays."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax

from rewriter.kernels.shared import elementwise
from rewriter.kernels.shared.hopper import importable, runs_on
from rewriter.ops.elementwise_program import ElementwiseKernel, ElementwiseProgram
from rewriter.ops.kernel import Kernel, Limits, Traits
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.device import Device

WIDTH = 1024
"""Columns of a warpgroup: 16 bytes of 16-bit numbers in each of 128 lanes."""

WARPGROUPS = 4
"""Warpgroups of a block."""

DTYPES = ("bfloat16",)

MOST = 1 << 31
"""Arrays with as many elements overflow the kernel's indices."""

LEAST_BYTES = 8 << 20
"""The fewest bytes of an array: smaller ones stay in the chip's cache."""

LEAST_COST = 10
"""Instructions for each number from which XLA is slower than memory. Where it is as
fast, a kernel gains nothing."""


def supports(program: ElementwiseProgram, m: int, d: int) -> Verdict:
    """Returns whether the kernel takes a function of arrays [m, d] of 16 bits."""
    dtypes = {program.out, *(dtype for _, dtype in program.inputs)}
    if not dtypes <= set(DTYPES):
        return no("dtype", f"{', '.join(sorted(dtypes))}, not all of 16 bits")
    if m * d >= MOST or not m * d or m * d % WIDTH:
        return no("size", f"{m * d} numbers, not a multiple of {WIDTH} below 2^31")
    if program.sums and not sums(m, d):
        return no("sums", f"rows of {d}, whose sums are not supported")
    verdict = elementwise.program(program.scalars).supports()
    module = "rewriter.kernels.activations.hopper_kernel"
    return all_of(verdict, importable(module))


def sums(m: int, d: int) -> bool:
    """Returns whether sums over rows are computed: blocks of rows, and columns."""
    return d % WIDTH == 0 and m % WARPGROUPS == 0


def pays(program: ElementwiseProgram, m: int, d: int, device: Device) -> Verdict:
    """Returns whether XLA is bound by arithmetic, and the array is large.

    A function that reads its one array once, such as a tanh, XLA appends to the product
    in front.
    """
    del device
    if 2 * m * d < LEAST_BYTES:
        return no("small", f"{m * d} numbers are so few that XLA is as fast")
    cost = elementwise.program(program.scalars).cost
    if cost < LEAST_COST:
        return no("cheap", f"{cost} instructions, which XLA computes as fast")
    if len(program.inputs) == 1 and _reads(program) < 2:
        return no("one read", "XLA computes it at the end of the product in front")
    return YES


def _reads(program: ElementwiseProgram) -> int:
    """How often the function reads its first number."""
    (first, *_), eqns = program.scalars.jaxpr.invars, program.scalars.jaxpr.eqns
    return sum(v is first for eqn in eqns for v in eqn.invars)


def forward(*arrays: Array, program: ElementwiseProgram) -> list[Array]:
    """Returns the function of arrays [m, d], and its sums [d] if they are asked for."""
    return _jitted(program)(*arrays)


@functools.lru_cache(maxsize=1024)
def _jitted(program: ElementwiseProgram) -> Any:
    """One function for equal programs, so that layers of a model are lowered once."""
    from rewriter.kernels.activations import hopper_kernel

    def activation(*arrays: Array) -> list[Array]:
        return hopper_kernel.computed(program, arrays)

    return jax.jit(activation)


KERNEL = ElementwiseKernel(
    Kernel(
        "hopper", "activations", ("cuda",), 1, forward=forward,
        limits=Limits(runs_on=runs_on), traits=Traits(memory_bounded=True),
    ),
    supports,
    sums,
    pays,
)  # fmt: skip
"""The kernel of activations."""
