"""Draws the operands of a measurement from stated distributions."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.measure.key import FORWARD
from rewriter.measure.programs import Task, result
from rewriter.measure.region_inputs import leaves_like
from rewriter.ops.device import Device
from rewriter.ops.op import Sample
from rewriter.support.threads import side_by_side

Args = tuple[Any, ...]
"""Operands by name; with gradients the result's cotangent as well."""

SETS_ON_DEVICE = (3, 16)
"""The least and most sets of inputs that take turns, except on a CPU."""

CACHE = 64 << 20
"""The assumed size of a cache in bytes, if unknown."""


@dataclass(frozen=True)
class Inputs:
    """Sets of inputs of one distribution, which take turns.

    Attributes:
        drawn: The distribution's name; ``""`` where times do not depend on it.
        sets: The sets.
        leaves: Each set as leaves of the user's own equations, if those are XLA's
            candidate.
    """

    drawn: str
    sets: tuple[Args, ...]
    leaves: tuple[Args, ...] = ()


def inputs(task: Task, on: Device, once: bool = False) -> tuple[Inputs, ...]:
    """Returns realistic operands of each distribution, and normal cotangents.

    The distributions are the task's own, else the op's. An op names several where times
    depend on values, such as lengths or group sizes. `input_sets` gives the number of
    sets: at least two of each distribution, except on a CPU.

    Args:
        task: The task.
        on: The device.
        once: One set of each distribution is enough.

    Raises:
        ValueError: If the op has integer operands and no `sample`.
    """
    structs, params = task.structs, dict(task.spec.params)
    samples, out = distributions(task), result(task)

    def draw(sample: Sample, key: Any) -> Args:
        first, second = jax.random.split(key)
        operands = dict(sample(first, structs, params))
        if task.passes == FORWARD:
            return (operands,)
        cotangent = jax.random.normal(second, out.shape).astype(out.dtype)
        return operands, cotangent

    count = input_sets(sum(map(task.spec.nbytes, task.spec.operands)), on)
    if once or on.platform == "cpu":
        count = 1
    else:
        count = max(2, math.ceil(count / len(samples)))
    makers = _compiled([functools.partial(draw, sample) for sample in samples.values()])
    drawn = []
    for name, make in zip(samples, makers, strict=True):
        sets = [make(_key(i)) for i in range(count)]
        drawn.append(Inputs(name, tuple(jax.block_until_ready(sets))))
    return tuple(drawn)


def _key(seed: int) -> Any:
    """A key of the device's own generator."""
    return jax.random.key(seed, impl="rbg")


def _compiled(draws: Sequence[Callable[[Any], Args]]) -> list[Callable[[Any], Args]]:
    """Compiles the drawing programs in parallel; raises what any of them raises."""
    key = _key(0)
    jobs = [lambda draw=draw: jax.jit(draw).lower(key).compile() for draw in draws]
    forever = time.monotonic() + 1e6
    found = side_by_side(jobs, forever, forever)
    return [
        jax.jit(draw) if isinstance(compiled, str) else compiled
        for draw, compiled in zip(draws, found, strict=True)
    ]


def with_leaves(task: Task, drawn: Sequence[Inputs]) -> tuple[Inputs, ...]:
    """Returns the same inputs, also as leaves of the user's own equations.

    Raises:
        NotTaken: If the leaves cannot be derived from the operands.
    """
    written = task.written
    assert written is not None
    make = leaves_like(written, result(task))

    def of(args: Args, key: Any) -> Args:
        leaves = make(args[0])
        if task.passes == FORWARD:
            return (leaves,)
        shape, dtype = written.result.shape, written.result.dtype
        return leaves, jax.random.normal(key, shape).astype(dtype)

    return tuple(
        replace(
            d,
            leaves=tuple(of(x, jax.random.key(i)) for i, x in enumerate(d.sets)),
        )
        for d in drawn
    )


def distributions(task: Task) -> dict[str, Sample]:
    """Returns the ways to draw a task's operands, by name; each is measured."""
    if task.samples:
        return dict(task.samples)
    if task.op.distributions is not None:
        return dict(task.op.distributions(task.structs))
    return {"": task.op.sample or _normal}


def input_sets(nbytes: int, on: Device) -> int:
    """Returns how many sets of inputs take turns.

    One on a CPU. Elsewhere at least three, and enough to fill twice the cache, so that
    no set stays in it; sixteen at most.

    Example:
        >>> from rewriter.ops import device
        >>> h200 = device.named("h200")
        >>> [input_sets(n, h200) for n in (1 << 30, 20 << 20, 1 << 10)]
        [3, 6, 16]
    """
    if on.platform == "cpu":
        return 1
    least, most = SETS_ON_DEVICE
    return max(least, min(most, math.ceil(2 * (on.cache or CACHE) / max(1, nbytes))))


def _normal(key: Any, operands: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """Normally distributed operands, for ops without `sample`."""
    del params
    for name, x in operands.items():
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ValueError(
                f"operand {name} is {x.dtype} and the op has no sample=: what its "
                "values look like is not known"
            )
    keys = jax.random.split(key, len(operands))
    return {
        n: jax.random.normal(k, x.shape).astype(x.dtype)
        for k, (n, x) in zip(keys, operands.items(), strict=True)
    }
