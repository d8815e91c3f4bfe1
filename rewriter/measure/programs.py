"""Builds the functions to measure from one use of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from rewriter.measure.key import BOTH, FORWARD, Key, key_of
from rewriter.measure.measurement import version_of
from rewriter.measure.original_region import Written
from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel, Spec
from rewriter.ops.op import Op, Sample
from rewriter.site import site
from rewriter.site.implementation import XLA, Implementation, build
from rewriter.support.dtypes import is_inexact


@dataclass(frozen=True)
class Task:
    """A use of an op to be measured in one pass; equal sites are one task.

    Attributes:
        op: The op.
        spec: Shapes, dtypes and parameters.
        kernels: The op's kernels, best first.
        passes: ``"forward"``, ``"vjp"`` (the gradients alone) or
            ``"forward_and_vjp"``.
        samples: Ways to draw operands, by name, instead of the op's own.
        written: The user's own equations, which are then XLA's candidate.
        unwritten: Why there are none, if extracting them failed.
    """

    op: Op
    spec: Spec
    kernels: tuple[Kernel, ...]
    passes: str
    samples: tuple[tuple[str, Sample], ...] = ()
    written: Written | None = None
    unwritten: str = field(default="", compare=False)

    def key(self, on: Device) -> Key:
        """Returns the key of its measurements."""
        return key_of(self.spec, self.passes, on.kind)

    @property
    def spelling(self) -> str:
        """The digest of the user's own equations; ``""`` if there are none."""
        return self.written.spelling if self.written else ""

    def version_of(self, implementation: Implementation) -> str:
        """Returns the version under which an implementation is measured."""
        return version_of(
            implementation, {k.name: k for k in self.kernels}, self.spelling
        )

    @property
    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes by operand name."""
        spec = self.spec
        return {n: jax.ShapeDtypeStruct(s, spec.dtype(n)) for n, s in spec.shapes}


def function(task: Task, implementation: Implementation) -> Callable[..., Any]:
    """Returns the function to time: of operands by name, and of the cotangent.

    It returns the result, the gradients of all floating operands by name, or a pair of
    both: the compiler can drop no part of the work. For ``"xla"`` it is the op as
    programs usually write it.

    Args:
        task: The task.
        implementation: The kernels.
    """
    params = dict(task.spec.params)
    if implementation.forward == XLA:
        return _plain(task, task.op.usual or task.op.reference)
    kernels = (("default", build(implementation, task.op, task.kernels)),)
    run = lambda operands: site.bind(task.op, operands, params, kernels)
    return in_passes(run, task.passes)


def reference(task: Task) -> Callable[..., Any]:
    """Returns the same for the op's reference."""
    return _plain(task, task.op.reference)


def arguments(task: Task) -> tuple[Any, ...]:
    """Returns shapes and dtypes of the functions' arguments: operands, a cotangent."""
    if task.passes == FORWARD:
        return (task.structs,)
    return task.structs, result(task)


def result(task: Task) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the op's result."""
    params = dict(task.spec.params)
    return jax.eval_shape(lambda x: task.op.reference(**x, **params), task.structs)


def general(task: Task) -> Callable[..., Any] | None:
    """Returns the same for the op's general form; None if it has none."""
    return _plain(task, task.op.general) if task.op.general else None


def own_equations(task: Task) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the user's own equations as a function of leaves, and the reference's.

    Both take leaves by name, and the cotangent of the region's result.
    """
    written = task.written
    assert written is not None
    run = in_passes(written.forward, task.passes)
    if task.passes == BOTH and written.both is not None:
        run = written.both
    of = lambda form: written.replaced(form)
    exact = _differentiable(task, of, task.op.reference, dict(written.leaves))
    return run, exact


def _plain(task: Task, form: Callable[..., Any]) -> Callable[..., Any]:
    params = dict(task.spec.params)
    of = lambda form: lambda operands: form(**operands, **params)
    return _differentiable(task, of, form, task.structs)


def _differentiable(
    task: Task,
    of: Callable[..., Any],
    form: Callable[..., Any],
    structs: Mapping[str, Any],
) -> Callable[..., Any]:
    """A plain form in passes; the op's general one if that has no derivative."""
    run = in_passes(of(form), task.passes)
    if task.passes == FORWARD or task.op.general is None:
        return run
    try:
        jax.eval_shape(run, structs, jax.eval_shape(of(form), structs))
    except Exception:  # JAX raises many kinds of errors for missing derivatives
        return in_passes(of(task.op.general), task.passes)
    return run


def in_passes(result: Callable[..., Any], passes: str) -> Callable[..., Any]:
    """Returns a function of operands by name in the form that passes need.

    Args:
        result: Computes the result.
        passes: Selects the result, the gradients by name, or both. Gradients need the
            cotangent as a second argument.
    """
    if passes == FORWARD:
        return result

    def run(operands: Mapping[str, Any], cotangent: Any) -> Any:
        moving = {n: x for n, x in operands.items() if is_inexact(x)}
        out, back = jax.vjp(lambda some: result({**operands, **some}), moving)
        (gradients,) = back(cotangent.astype(out.dtype))
        return gradients if passes == "vjp" else (out, gradients)

    return run
