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
"""The least and the most sets of inputs that take turns, but on a CPU."""

CACHE = 64 << 20
"""Bytes of a cache whose size is not known."""


@dataclass(frozen=True)
class Inputs:
    """Sets of inputs of one distribution, which take turns.

    Attributes:
        drawn: The distribution's name; ``""`` where times do not depend on it.
        sets: The sets.
        leaves: Each set as the leaves of the user's own equations, where XLA's
            candidate are those.
    """

    drawn: str
    sets: tuple[Args, ...]
    leaves: tuple[Args, ...] = ()


def inputs(task: Task, on: Device, once: bool = False) -> tuple[Inputs, ...]:
    """Returns realistic operands of each distribution, and normal cotangents.

    The distributions are the task's own, else the op's: where times depend on the
    values of lengths or group sizes, an op names several. There are as many sets as
    `input_sets` says, at least two of each distribution but on a CPU.

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
    made = []
    for name, make in zip(samples, makers, strict=True):
        sets = [make(_key(i)) for i in range(count)]
        made.append(Inputs(name, tuple(jax.block_until_ready(sets))))
    return tuple(made)


def _key(seed: int) -> Any:
    """A key of the device's own generator."""
    return jax.random.key(seed, impl="rbg")


def _compiled(draws: Sequence[Callable[[Any], Args]]) -> list[Callable[[Any], Args]]:
    """The compiled programs that draw, side by side; what one raises is raised."""
    key = _key(0)
    jobs = [lambda draw=draw: jax.jit(draw).lower(key).compile() for draw in draws]
    forever = time.monotonic() + 1e6
    found = side_by_side(jobs, forever, forever)
    return [
        jax.jit(draw) if isinstance(made, str) else made
        for draw, made in zip(draws, found, strict=True)
    ]


def with_leaves(task: Task, drawn: Sequence[Inputs]) -> tuple[Inputs, ...]:
    """Returns the same inputs, also as leaves of the user's own equations.

    Raises:
        NotTaken: If nothing says what they look like.
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
    """Returns how a task's operands are drawn, by name: all are measured."""
    if task.samples:
        return dict(task.samples)
    if task.op.distributions is not None:
        return dict(task.op.distributions(task.structs))
    return {"": task.op.sample or _normal}


def input_sets(nbytes: int, on: Device) -> int:
    """Returns how many sets of inputs take turns.

    One on a CPU. Elsewhere at least three, and so many that they take twice the
    cache, so that no set is found in it; sixteen at most.

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
    """Normal operands, for ops without a `sample` of their own."""
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
