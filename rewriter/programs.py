"""A use of an op in, the programs and inputs to be measured out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import site
from rewriter.device import Device
from rewriter.implementation import XLA, Implementation, build
from rewriter.kernel import Kernel, Spec
from rewriter.key import FORWARD, Key, key_of
from rewriter.op import Op


@dataclass(frozen=True)
class Task:
    """A use of an op to be measured in one pass; equal sites are one task.

    Attributes:
        op: The op.
        spec: Shapes, dtypes and parameters.
        kernels: The op's kernels, best first.
        passes: ``"forward"`` or ``"forward_and_vjp"``.
    """

    op: Op
    spec: Spec
    kernels: tuple[Kernel, ...]
    passes: str

    def key(self, on: Device) -> Key:
        """Returns the key of its measurements."""
        return key_of(self.spec, self.passes, on.kind)


def function(task: Task, made: Implementation) -> Callable[..., Any]:
    """Returns what is timed: a function of the operands, and of the cotangent.

    It returns the result; with gradients the result and the gradients of all floating
    operands, so that no part of the work can be left out. For ``"xla"`` it is the op
    as programs usually write it.

    Args:
        task: The task.
        made: The kernels.
    """
    names, params = task.spec.operands, dict(task.spec.params)
    if made.forward == XLA:
        return _plain(task, task.op.usual or task.op.reference)
    kernels = (("default", build(made, task.op, task.kernels)),)

    def result(*operands: Any) -> Any:
        named = dict(zip(names, operands, strict=True))
        return site.bind(task.op, named, params, kernels)

    return _in_passes(task, result)


def reference(task: Task) -> Callable[..., Any]:
    """Returns the same of the op's reference."""
    return _plain(task, task.op.reference)


def _plain(task: Task, form: Callable[..., Any]) -> Callable[..., Any]:
    names, params = task.spec.operands, dict(task.spec.params)

    def calling(form: Callable[..., Any]) -> Callable[..., Any]:
        named = lambda operands: dict(zip(names, operands, strict=True))
        return _in_passes(task, lambda *operands: form(**named(operands), **params))

    if task.passes == FORWARD or task.op.general is None:
        return calling(form)
    specs = [
        jax.ShapeDtypeStruct(task.spec.shape(n), task.spec.dtype(n)) for n in names
    ]
    try:
        out = jax.eval_shape(
            lambda *x: form(**dict(zip(names, x, strict=True)), **params), *specs
        )
        jax.eval_shape(calling(form), *specs, out)
    except Exception:  # what JAX says of a derivative it lacks has many kinds
        return calling(task.op.general)
    return calling(form)


def _in_passes(task: Task, result: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or one of the cotangent too that gives gradients too."""
    if task.passes == FORWARD:
        return result
    moving = [
        i
        for i, name in enumerate(task.spec.operands)
        if jnp.issubdtype(task.spec.dtype(name), jnp.inexact)
    ]

    def both(*args: Any) -> Any:
        operands, cotangent = list(args[:-1]), args[-1]

        def of(*chosen: Any) -> Any:
            full = list(operands)
            for i, value in zip(moving, chosen, strict=True):
                full[i] = value
            return result(*full)

        out, back = jax.vjp(of, *(operands[i] for i in moving))
        return out, back(cotangent.astype(out.dtype))

    return both


def inputs(task: Task, on: Device) -> list[list[Any]]:
    """Returns sets of realistic operands, and a normal cotangent for gradients.

    They come from the op's `sample`, which states how lengths, masks and group sizes
    are drawn. On a GPU there are as many sets as exceed its cache twice, from three to
    eight, so that none is found there by the next run; elsewhere there is one.

    Raises:
        ValueError: If the op has integer operands and no `sample`.
    """
    spec = task.spec
    specs = {
        n: jax.ShapeDtypeStruct(spec.shape(n), spec.dtype(n)) for n in spec.operands
    }
    sample = task.op.sample or _normal
    params = dict(spec.params)
    out = jax.eval_shape(lambda **x: task.op.reference(**x, **params), **specs)

    def one(key: Any) -> list[Any]:
        made = sample(key, specs, params)
        values = [made[n] for n in spec.operands]
        if task.passes == FORWARD:
            return values
        own = jax.random.fold_in(key, 1)
        return [*values, jax.random.normal(own, out.shape).astype(out.dtype)]

    make = jax.jit(one)
    first = make(jax.random.key(0))
    count = 1
    if on.platform == "cuda":
        size = max(1, sum(x.nbytes for x in first))
        count = max(3, min(8, math.ceil(2 * (on.cache or 64 << 20) / size)))
        if count * size > (on.memory or 16 << 30) / 8:
            count = 3
    return [first, *(make(jax.random.key(i)) for i in range(1, count))]


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
