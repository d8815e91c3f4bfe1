"""Traces code where values are placed on a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax._src import config, core, linear_util
from jax._src.state.types import AbstractRef
from jax.interpreters import partial_eval

from rewriter._jax.types import explicit_mesh, partly_manual_mesh, weakly_typed


def trace_flat(fn: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The closed jaxpr of a function of arrays, at the given avals.

    `jax.make_jaxpr` prepares a `jax.jit`, which takes ten times as long as a small
    trace. Code that is traced once does not need that.
    """
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return _traced(fn, structs, avals)


def _traced(
    fn: Callable[..., Any], structs: Sequence[Any], avals: Sequence[Any]
) -> Any:
    """The closed jaxpr of a function of arrays and references.

    Args:
        fn: The function.
        structs: What the arrays are like.
        avals: The types of all arguments; a loop may read and write a reference.
    """
    info = core.DebugInfo("rewriter", fn.__name__, ("",) * len(avals), None)
    flat = linear_util.wrap_init(lambda *a: jax.tree.leaves(fn(*a)), debug_info=info)
    pairs = zip(avals, structs, strict=True)
    ins = [a if isinstance(a, AbstractRef) else jax.typeof(s) for a, s in pairs]
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(flat, ins)
    return jex_core.ClosedJaxpr(jaxpr, consts)


def without_mesh() -> Any:
    """A context in which the mesh around the code, as of ``jax.set_mesh``, is not.

    What is traced for a site is of arrays of one device, and may stand in another mesh
    than the code around. Inside of `jax.shard_map` the mesh stays: types need it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def in_mesh_of(avals: Sequence[Any]) -> Any:
    """A context whose mesh is the one that values of these types are in.

    JAX lowers an equation in the mesh of the code that made it. That may be the mesh
    around a `jax.shard_map`, while the equation stands inside of it.
    """
    meshes = (a.sharding.mesh for a in avals if hasattr(a, "sharding"))
    mine = next((m for m in meshes if not m.empty), None)
    around = jax.sharding.get_abstract_mesh()
    if mine is None or around.empty or mine == around:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mine)


def _struct_in_place(aval: Any) -> jax.ShapeDtypeStruct:
    if aval.sharding.mesh.empty:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    more = {"manual_axis_type": aval.mat} if aval.mat.varying else {}
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding, **more)


def is_on_mesh(avals: Sequence[Any]) -> bool:
    """Whether types state where values are placed, or the code is one device's part."""
    return (
        explicit_mesh(avals) is not None
        or partly_manual_mesh(avals) is not None
        or bool(jax.sharding.get_abstract_mesh().manual_axes)
        or any(a.mat.varying for a in avals)
    )


def trace_placed(fn: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """Like `trace_flat`, for arrays that are placed as their types state.

    Inside `jax.shard_map` they vary over the same mesh axes.
    """
    if not is_on_mesh(avals):
        return trace_flat(fn, avals)
    stated = explicit_mesh(avals) or partly_manual_mesh(avals)
    around = jax.sharding.get_abstract_mesh()
    if stated is None and around.manual_axes:
        here = contextlib.nullcontext()
    elif stated is None:
        parts = next(a.sharding.mesh for a in avals if a.mat.varying)
        here = _in_parts(parts)
    elif stated == around:
        here = contextlib.nullcontext()
    elif stated.manual_axes:
        here = _in_parts(stated, any(a.mat.varying for a in avals))
    else:
        here = jax.sharding.use_abstract_mesh(stated)
    with here:
        return _placed(fn, list(map(_struct_in_place, avals)), avals)


def _placed(
    fn: Callable[..., Any], structs: Sequence[Any], avals: Sequence[Any]
) -> Any:
    """The closed jaxpr of a function in the mesh around; it may take references."""
    if any(isinstance(a, AbstractRef) for a in avals):
        return _traced(fn, structs, avals)
    return jax.make_jaxpr(fn)(*structs)


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """The array in another shape, placed as its axes are on explicit axes of a mesh.

    JAX before 0.11 does not say where axes are that are joined or split.
    """
    if explicit_mesh([core.typeof(x)]) is None:
        return x.reshape(shape)
    try:
        return x.reshape(shape)
    except core.ShardingTypeError:
        sharding = core.typeof(x).sharding
        spec = _joined_spec(x.shape, sharding.spec, shape)
        if spec is None:
            raise
        return jax.lax.reshape(x, shape, out_sharding=sharding.update(spec=spec))


def _joined_spec(
    shape: Sequence[int], spec: Sequence[Any], wanted: Sequence[int]
) -> Any:
    """The placement after a reshape that joins or splits axes; None if it is another.

    Of axes that are joined only the first may be split over devices. The first of the
    new ones is placed as it was.
    """
    old = [(n, s) for n, s in zip(shape, spec, strict=True) if n != 1 or s is not None]
    found: list[Any] = [None] * len(wanted)
    new = [k for k, n in enumerate(wanted) if n != 1]
    while old and new:
        (have, place), first = old.pop(0), new.pop(0)
        found[first], size = place, wanted[first]
        while have != size:
            if have < size and old and old[0][1] is None:
                have *= old.pop(0)[0]
            elif have > size and new:
                size *= wanted[new.pop(0)]
            else:
                return None
    return None if old or new else jax.P(*found)


@contextlib.contextmanager
def _in_parts(mesh: Any, typed: bool = True) -> Iterator[None]:
    """A context as inside of the `jax.shard_map` whose mesh types of values state.

    Args:
        mesh: The mesh.
        typed: Whether types say what values vary over.
    """
    manual = [(a, mesh.shape[a]) for a in mesh.manual_axes]
    with (
        jax.sharding.use_abstract_mesh(mesh),
        core.extend_axis_env_nd(manual),
        config._check_vma(typed),
    ):
        yield


def placed_as(value: Any, aval: Any) -> Any:
    """The array, placed and varying as an abstract value states, if it states that."""
    more = aval.mat.varying - core.typeof(value).mat.varying
    value = jax.lax.pcast(value, tuple(sorted(more)), to="varying") if more else value
    if explicit_mesh([aval]) is None or core.typeof(value).sharding == aval.sharding:
        return value
    return jax.sharding.reshard(value, aval.sharding)


def zeros(avals: Sequence[Any]) -> Any:
    """The jaxpr of zeros of exactly these types: placed, varying and weak alike."""

    def code() -> list[Any]:
        return [_zero(a) for a in avals]

    meshes = (a.sharding.mesh for a in avals if hasattr(a, "sharding"))
    mesh = next((m for m in meshes if not m.empty), None)
    if mesh is None:
        return jax.make_jaxpr(code)()
    with _in_parts(mesh):
        return jax.make_jaxpr(code)()


def _zero(aval: Any) -> Any:
    value = placed_as(jax.numpy.zeros(aval.shape, aval.dtype), aval)
    return weakly_typed(value) if aval.weak_type else value


def separate_trace(key: Hashable) -> Any:
    """A context in which JAX uses no trace made outside it, or for another key.

    JAX 0.11 keeps the trace of a Pallas kernel's body by its function and its blocks,
    and not by its grid: `pl.num_programs` would be that of an earlier call. The names
    in this context are part of the key of every trace. JAX takes them out of the axes
    of a mesh, and this one is in none.
    """
    add_names = getattr(core, "add_explicit_mesh_axis_names", None)
    return contextlib.nullcontext() if add_names is None else add_names((key,))


def on_one_device() -> Any:
    """A context in which code need not state the manual axes that it varies over.

    Inside `jax.shard_map` with ``check_vma=True`` a Pallas call would have to state
    them.
    """
    return config._check_vma(False)
