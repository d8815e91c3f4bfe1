"""Finds how the operands of ops are split over devices, from a program's inputs.

Shardy's propagation, the pass that XLA itself runs first, is run alone on the lowered
program: nothing is compiled, and it needs no devices. The values of interest go through
a mark, an identity that the pass knows as one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rewriter import _jax

Axes = tuple[str, ...]
"""The mesh axes over which one axis of an array is split, outermost first."""

Split = tuple[Axes, ...]
"""The mesh axes of every axis of an array."""


@dataclass(frozen=True)
class Placement:
    """The placement of a program's arrays on a mesh.

    Attributes:
        mesh: The devices by named axes; may be abstract.
        inputs: How each input after the constants is split; None where the compiler
            decides.
        outputs: The same for each result; () if nothing is requested.
    """

    mesh: Any
    inputs: tuple[PartitionSpec | None, ...]
    outputs: tuple[PartitionSpec | None, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh's axes."""
        return dict(self.mesh.shape)


class Unreadable(Exception):
    """Says why the placement of an array is unknown."""


# -------------------------------------------------------------------- marks
mark_p = Primitive("rewriter_mark")
MARK = "rewriter.mark"


def mark(x: jax.Array, key: str) -> jax.Array:
    """Returns ``x``, under a name by which `propagated` finds it."""
    return mark_p.bind(x, key=key)


def _mark_lowering(ctx: Any, x: Any, *, key: str) -> Any:
    del ctx
    barrier = stablehlo.OptimizationBarrierOp([x])
    barrier.operation.attributes[MARK] = ir.StringAttr.get(key)
    return barrier.results


def _mark_batched(args: Any, dims: Any, *, key: str) -> Any:
    del key  # under vmap the mark would see another array
    return args[0], dims[0]


mark_p.def_abstract_eval(lambda x, *, key: x)
mark_p.def_impl(lambda x, *, key: x)
mlir.register_lowering(mark_p, _mark_lowering)
ad.deflinear2(mark_p, lambda cotangent, x, *, key: [cotangent])
batching.primitive_batchers[mark_p] = _mark_batched


# -------------------------------------------------------------- propagation
def propagated(program: ClosedJaxpr, placement: Placement) -> dict[str, Split | None]:
    """Returns how every marked value is split, by the key of its mark.

    None stands for a value that is split over only part of a mesh axis, or in different
    ways at different places.

    Args:
        program: The program, marked.
        placement: Where its inputs are. Constants on the mesh keep their placement.

    Raises:
        Unreadable: If the program cannot be lowered, the placement of a constant is
            unknown, or a size is symbolic: XLA's partitioner takes numbers alone.
    """
    sizes = {d for aval in program.in_avals for d in getattr(aval, "shape", ())}
    if not all(isinstance(d, int) for d in sizes):
        raise Unreadable("sizes are symbolic, and XLA propagates only known ones")
    module = lowered(program, placement).compiler_ir("stablehlo")
    with module.context:
        pipeline = "builtin.module(sdy-propagation-pipeline)"
        passmanager.PassManager.parse(pipeline).run(module.operation)
    found: dict[str, Split | None] = {}
    for op in _operations(module.operation):
        if MARK in op.attributes:
            key = ir.StringAttr(op.attributes[MARK]).value
            rank = len(ir.RankedTensorType(op.results[0].type).shape)
            split = _split(op, rank)
            found[key] = split if found.get(key, split) == split else None
    return found


def lowered(program: ClosedJaxpr, placement: Placement) -> Any:
    """Lowers a program whose inputs are placed.

    Args:
        program: The program.
        placement: Where its inputs are.

    Raises:
        Unreadable: As `propagated`.
    """
    shardings = [_of_constant(c, placement.mesh) for c in program.consts]
    shardings += [_named(placement.mesh, spec) for spec in placement.inputs]
    outputs = [_named(placement.mesh, spec) for spec in placement.outputs]
    inner = _jax.without_constants(program)
    typed = AxisType.Explicit in placement.mesh.axis_types
    structs = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=s if typed else None)
        for v, s in zip(inner.invars, shardings, strict=True)
    ]
    run = jax.jit(
        lambda *leaves: jaxpr_as_fun(inner)(*leaves),
        in_shardings=None if typed else tuple(shardings),
        out_shardings=outputs or None,
        keep_unused=True,
    )
    platforms = _platforms(placement.mesh)
    try:
        return run.trace(*structs).lower(lowering_platforms=platforms)
    except Exception as problem:
        text = (str(problem).splitlines() or [""])[0]
        raise Unreadable(f"{type(problem).__name__}: {text}") from problem


def _platforms(mesh: Any) -> tuple[str, ...]:
    """The platform of a mesh; that of the default devices for an abstract one."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        platform = jax.default_backend()
    else:
        platform = mesh.devices.flat[0].platform
    return ("cuda" if platform == "gpu" else platform,)


def _named(mesh: Any, spec: PartitionSpec | None) -> NamedSharding | None:
    return None if spec is None else NamedSharding(mesh, spec)


def _of_constant(value: Any, mesh: Any) -> NamedSharding | None:
    if _jax.is_tracer(value):
        raise Unreadable("a value is closed over whose placement is not known yet")
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.num_devices == 1:
        return None
    if dict(sharding.mesh.shape) != dict(mesh.shape):
        raise Unreadable("arrays are on more than one mesh")
    return NamedSharding(mesh, sharding.spec)


def _operations(top: Any) -> Iterator[Any]:
    for region in top.regions:
        for block in region:
            for op in block:
                yield op.operation
                yield from _operations(op.operation)


def _split(op: Any, rank: int) -> Split | None:
    if "sdy.sharding" not in op.attributes:
        return ((),) * rank
    several = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"])
    return split_of(several.shardings[0])


def split_of(attribute: Any) -> Split | None:
    """Reads a split from ``sdy.sharding``; None if it uses parts of mesh axes.

    Args:
        attribute: The MLIR attribute.
    """
    dims = []
    for dim in sdy.TensorShardingAttr(attribute).dimension_shardings:
        axes = [sdy.AxisRefAttr(a) for a in sdy.DimensionShardingAttr(dim).axes]
        if any(a.sub_axis_info is not None for a in axes):
            return None
        dims.append(tuple(a.name for a in axes))
    return tuple(dims)


@functools.lru_cache(maxsize=4096)
def spec_of(split: Split) -> PartitionSpec:
    """Returns a split as a `PartitionSpec`.

    Example:
        >>> spec_of((("data",), (), ("a", "b")))
        P('data', None, ('a', 'b'))
    """
    return PartitionSpec(*(a[0] if len(a) == 1 else a or None for a in split))


def split_by(spec: Sequence[Any], rank: int) -> Split:
    """Returns a `PartitionSpec` of an array as a split.

    Example:
        >>> split_by(PartitionSpec("data", None, ("a", "b")), 4)
        (('data',), (), ('a', 'b'), ())
    """
    dims = [(a,) if isinstance(a, str) else tuple(a or ()) for a in spec]
    return (*dims, *((),) * (rank - len(dims)))
