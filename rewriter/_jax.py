"""The only file that touches JAX internals.

One function per need, one comment per difference between the supported
versions (0.10.2, 0.11.2, 0.12). They are in this order:

- values: sizes, literals, tracers;
- calls: their kinds and bodies, keys, loops, the user's lines;
- jit: functions under it, and their programs;
- types: varying axes, weak types, shardings;
- meshes: tracing where values are placed;
- programs: equations and variables written anew;
- names: scopes, rules, functions;
- lowering: its rules, and devices;
- shard_map: its axes and parts;
- failures: what undoes a lowering;
- timing: CUPTI.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax._src import (
    checkify,
    config,
    core,
    dispatch,
    dtypes,
    hardware_utils,
    linear_util,
    traceback_util,
)
from jax._src import source_info_util as _source_info_util
from jax._src.export import shape_poly
from jax._src.interpreters.partial_eval import DynamicJaxprTrace, DynamicJaxprTracer
from jax.extend.mlir import ir
from jax.interpreters import partial_eval

from rewriter.errors import is_users_own

# remat_opt is the forward rule of a custom_vjp that may be made again.
CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_lin", "remat_opt"}
REMAT = {"remat2", "checkpoint", "remat"}
BODY_NAMES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call")
CUSTOM = {
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call",
}  # fmt: skip
BODIES = CALLS | REMAT | CUSTOM | {"scan", "while", "cond", "shard_map"}
Var = core.Var

# Files through which the user's function is called: JAX names none of them as the line
# of an equation, nor in the tracebacks of errors that it hands on.
_BETWEEN = (
    "_jax", "config", "program/trace", "program/placement", "frameworks/nnx_state",
    "frameworks/equinox_modules", "run/analysis", "run/called", "run/optimize",
)  # fmt: skip
for _name in _BETWEEN:
    _file = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{_name}.py")
    _file = os.path.normpath(_file)
    traceback_util.register_exclusion(_file)
    _source_info_util.register_exclusion(_file)


# -------------------------------------------------------------------- values
def size_range(size: Any) -> tuple[int, int]:
    """The least and the greatest value of an axis' size, which may be symbolic.

    Without 64-bit numbers JAX computes sizes as int32, which bounds them.
    """
    if isinstance(size, int):
        return size, size
    try:  # jax 0.11.2 has `symbolic_dim_bounds`, jax 0.10.2 only the inner function
        least, most = shape_poly._bounds_decision(size, shape_poly.BoundsPrecision.BEST)
    except Exception:  # it may raise on quotients that it cannot prove defined
        least, most = 0, math.inf
    largest = (1 << (62 if jax.config.jax_enable_x64 else 31)) - 1  # pyright: ignore
    return int(max(least, 0)), int(min(most, largest))


def is_literal(atom: Any) -> bool:
    """Whether an equation's operand is a literal."""
    return isinstance(atom, core.Literal)


def same_literal(a: Any, b: Any) -> bool:
    """Whether two literals are the same number, to the bit, of the same type."""
    if a is b or (a.val is b.val and a.aval == b.aval):
        return True
    if a.aval != b.aval or is_opaque(a.val):
        return False
    return np.asarray(a.val).tobytes() == np.asarray(b.val).tobytes()


def reading(eqn: Any, env: Any) -> Any:
    """The equation with its operands replaced by an environment's."""
    for atom in eqn.invars:
        if atom.__class__ is Var and atom in env:
            changed = [a if is_literal(a) else env.get(a, a) for a in eqn.invars]
            return eqn.replace(invars=changed)
    return eqn


def is_drop(var: Any) -> bool:
    """Whether a variable is the placeholder of an unused result."""
    return isinstance(var, core.DropVar)


def is_tracer(value: Any) -> bool:
    """Whether a value is being traced."""
    return isinstance(value, core.Tracer)


def is_tracing() -> bool:
    """Whether JAX is tracing, so that calls are recorded."""
    return not core.trace_state_clean()


def is_staging() -> bool:
    """Whether what is called is written down as a program, and nothing is run."""
    return isinstance(core.trace_ctx.trace, DynamicJaxprTrace)


def tpu_is_attached() -> bool:
    """Whether JAX sees a TPU on this machine's bus; starts no backend."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0


def is_opaque(value: Any) -> bool:
    """Whether a value's numbers cannot be read: it is traced, or a random key."""
    return is_tracer(value) or (
        isinstance(value, jax.Array)
        and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    )


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """Constants of a jaxpr; an open one of jax 0.10 has none."""
    return getattr(jaxpr, "consts", ()) if jaxpr.constvars else ()


def literals_of(jaxpr: Any) -> dict[Any, Any]:
    """The constants of a jaxpr as literals, which its equations can read anywhere."""
    pairs = zip(jaxpr.constvars, consts_of(jaxpr), strict=True)
    return {var: core.Literal(const, var.aval) for var, const in pairs}


def holds_tracers(jaxpr: Any) -> bool:
    """Whether constants of a jaxpr are tracers of an outer trace."""
    return any(map(is_tracer, consts_of(jaxpr)))


# --------------------------------------------------------------------- calls
def call_kind(eqn: Any) -> str:
    """The kind of body that an equation holds; empty for an ordinary equation."""
    name = eqn.primitive.name
    if name not in BODIES:  # nearly all equations
        return ""
    if name in CALLS:
        return "call" if _plain_call(eqn) else "opaque"
    if name in REMAT:  # a rule's forward, which is chosen later, has no one body
        return "remat" if call_body(eqn) is not None else ""
    if name in CUSTOM:
        return "custom" if call_body(eqn) is not None else "opaque"
    return name


def _plain_call(eqn: Any) -> bool:
    return call_body(eqn) is not None


def call_body(eqn: Any) -> Any:
    """The jaxpr of a call-like equation."""
    name = _body_name(eqn)
    return eqn.params[name] if name else None


def as_function(eqn: Any) -> Callable[..., list[Any]]:
    """An equation as a function of its operands."""
    ins = [core.Var(a.aval) for a in eqn.invars]
    outs = [core.Var(v.aval) for v in eqn.outvars]
    made = eqn.replace(invars=ins, outvars=outs)
    info = core.DebugInfo("rewriter", eqn.primitive.name, None, None)
    jaxpr = core.Jaxpr([], ins, outs, [made], eqn.effects, debug_info=info)
    return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(jaxpr, []))


def call_body_name(eqn: Any) -> str:
    """The parameter that holds the body."""
    name = _body_name(eqn)
    if not name:
        raise KeyError(eqn.primitive.name)
    return name


def _body_name(eqn: Any) -> str:
    bodies = (n for n in BODY_NAMES if hasattr(eqn.params.get(n), "eqns"))
    return next(bodies, "")


def counts_inputs(jaxpr: Any) -> bool:
    """Whether effects of a body name its inputs by their positions."""
    return any(hasattr(e, "input_index") for e in jaxpr.effects)


def is_key(aval: Any) -> bool:
    """Whether values of a type are random keys, which have no bytes of their own."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def is_recomputation(eqn: Any) -> bool:
    """Whether a checkpoint's equation recomputes its body for gradients."""
    return bool(eqn.params.get("differentiated"))


def scan_parts(eqn: Any) -> tuple[Any, int, int, int]:
    """(body, number of constants, number of carries, length) of a scan."""
    params = eqn.params
    if "num_consts" in params:  # jax 0.10
        n_consts, n_carry = params["num_consts"], params["num_carry"]
    else:  # jax 0.11: flat trees of consts, carry, xs
        first, second, _ = params["ft_in"].unpack()
        n_consts, n_carry = len(list(first)), len(list(second))
    return params["jaxpr"], n_consts, n_carry, params["length"]


def with_constants_first(eqn: Any, bodies: Sequence[Any], atoms: Sequence[Any]) -> Any:
    """A while or cond whose bodies are given some more values in front of theirs.

    Args:
        eqn: The equation.
        bodies: The while's body, or the branches.
        atoms: What they are given.
    """
    if call_kind(eqn) == "cond":
        which, *rest = eqn.invars
        params = {**eqn.params, "branches": tuple(bodies)}
        return eqn.replace(invars=[which, *atoms, *rest], params=params)
    _, start, count = while_parts(eqn)
    more = {"body_jaxpr": bodies[0], "body_nconsts": count + len(atoms)}
    ins = [*eqn.invars[:start], *atoms, *eqn.invars[start:]]
    return eqn.replace(invars=ins, params={**eqn.params, **more})


def while_parts(eqn: Any) -> tuple[Any, int, int]:
    """(body, number of the condition's constants, of the body's) of a while."""
    params = eqn.params
    return params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"]


def while_test(eqn: Any) -> Any:
    """The jaxpr of a while's condition: its constants and the carries to a boolean."""
    closed = eqn.params["cond_jaxpr"]
    return getattr(closed, "jaxpr", closed)


def source_of(eqn: Any) -> str:
    """The user's line of an equation, such as ``"model.py:88 (Block.__call__)"``."""
    frame = _source_info_util.user_frame(eqn.source_info.traceback)
    return "" if frame is None else _line(frame)


def users_source_of(eqn: Any) -> str:
    """The innermost line of an equation that is outside of installed packages."""
    frames = _source_info_util.user_frames(eqn.source_info.traceback)
    return next((_line(f) for f in frames if _is_users(f.file_name)), "")


_DEMO = os.sep + os.path.join("rewriter", "tools", "demo.py")


def _is_users(file: str) -> bool:
    """Whether a file is the user's own; the demo's model stands for one."""
    return is_users_own(file) or file.endswith(_DEMO)


def _line(frame: Any) -> str:
    """A frame in words."""
    file = str(frame.file_name).replace("\\", "/").rsplit("/", 1)[-1]
    return f"{file}:{frame.start_line} ({frame.function_name.split('.<locals>')[0]})"


def is_library_rule(eqn: Any) -> bool:
    """Whether a custom_jvp call is one of JAX's own with the derivative of its body.

    A user's rule may differ from the derivative of the body, so its body is a scope of
    its own. JAX's own rules (relu, softmax, logsumexp and the like) only state that
    derivative in a better way. They are recognised by the function that defines the
    body.
    """
    if "jvp" not in eqn.primitive.name:
        return False
    body = call_body(eqn)
    info = getattr(body, "debug_info", None)
    source = getattr(info, "func_src_info", "") or ""
    return any(f"/jax/_src/{place}" in source for place in ("nn/", "numpy/", "lax/"))


# ----------------------------------------------------------------------- jit
def is_jitted(fn: Any) -> bool:
    """Whether a callable came out of ``jax.jit``."""
    return hasattr(fn, "_jit_info") and hasattr(fn, "trace")


def jitted_function(jitted: Any) -> Any:
    """The function that ``jax.jit`` was given."""
    return jitted._fun


def static_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the static positions and names of a jitted function."""
    info = jitted._jit_info
    return tuple(info.static_argnums), tuple(info.static_argnames)


def jit_options(jitted: Any) -> dict[str, Any]:
    """Returns the keyword arguments that would make the same ``jax.jit`` again."""
    info, options = jitted._jit_info, {}
    for name in (
        "static_argnums", "static_argnames", "donate_argnums", "donate_argnames",
        "device", "backend", "keep_unused",
    ):  # fmt: skip
        if value := getattr(info, name, None):
            options[name] = value
    # True became one of several ways in jax 0.11; what is not said has no public name.
    if info.inline != jax.jit(lambda: 0)._jit_info.inline:
        options["inline"] = info.inline
    # donate_argnames is derived from donate_argnums and the other way round.
    if "donate_argnums" in options:
        options.pop("donate_argnames", None)
    if info.compiler_options_kvs:
        options["compiler_options"] = dict(info.compiler_options_kvs)
    for side in ("in", "out"):
        leaves = getattr(info, f"{side}_shardings_leaves")
        layouts = getattr(info, f"{side}_layouts_leaves")
        if all(type(s).__name__ == "UnspecifiedValue" for s in leaves):
            continue
        both = [
            s if x is None else jax.experimental.layout.Format(x, s)
            for s, x in zip(leaves, layouts, strict=True)
        ]
        tree = getattr(info, f"{side}_shardings_treedef")
        options[f"{side}_shardings"] = jax.tree.unflatten(tree, both)
    return options


def asking(jitted: Any, other: Callable[[Any, Any], Any]) -> Any:
    """Returns the jitted function, in which something else is asked for some calls.

    It is asked where JAX's own dispatch does not know a call: at the first for a
    signature, inside of another transformation, and for arguments that are no arrays.

    Args:
        jitted: A function out of ``jax.jit``.
        other: Gives a function of no arguments for a call's arguments, whose result is
            the call's, or None for a call that is JAX's.
    """
    state = jitted.__getstate__()  # what it is pickled by
    state["cache_miss"] = traceback_util.api_boundary(
        functools.partial(_asked, state["cache_miss"], other)
    )
    made = type(jitted).__new__(type(jitted))
    made.__setstate__(state)
    made.__dict__.update(jitted.__dict__)
    return made


def _asked(theirs: Any, other: Any, /, *args: Any, **kwargs: Any) -> Any:
    mine = other(args, kwargs)
    if mine is None:
        return theirs(*args, **kwargs)
    return mine(), None, False  # nothing is remembered for a faster dispatch


def program_of(traced: Any) -> tuple[Any, Any]:
    """Returns the closed jaxpr of JAX's own ``Traced``, and what JAX keeps of it.

    They differ where values of a trace around it are closed over: JAX has them as
    leading inputs, and the closed jaxpr as constants.
    """
    program, consts = traced._params["jaxpr"], list(traced._consts)
    if not consts:
        return program, program
    invars, count = program.jaxpr.invars, len(consts)
    both = [*program.consts, *consts]
    return with_constants(program, invars[:count], invars[count:], both), program


def inlined(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the results of a program, whose equations become those of the trace.

    Nothing in an equation is traced again, and each keeps its line and names.

    Args:
        closed: The program, without constants.
        args: Its inputs.
    """
    trace, jaxpr = core.trace_ctx.trace, closed.jaxpr
    if not is_staging() or getattr(jaxpr, "is_high", False):
        return list(jex_core.jaxpr_as_fun(closed)(*args))
    here = _source_info_util.current()
    args = [_of_trace(trace, x, here) for x in args]
    env = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any, info: Any) -> Any:
        literal = is_literal(atom)
        return (
            DynamicJaxprTracer(trace, atom.aval, atom, info) if literal else env[atom]
        )

    for eqn in jaxpr.eqns:
        stack = here.name_stack + eqn.source_info.name_stack
        info = eqn.source_info.replace(name_stack=stack)
        effects = {
            e.replace(env[e.input].val) if hasattr(e, "input") else e
            for e in eqn.effects
        }
        outs = trace.emit_eqn(
            [read(x, info) for x in eqn.invars], [v.aval for v in eqn.outvars],
            eqn.primitive, eqn.params, effects or eqn.effects, info, eqn.ctx,
        )  # fmt: skip
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(x, here) for x in jaxpr.outvars]


def _of_trace(trace: Any, value: Any, info: Any) -> Any:
    if not is_tracer(value):
        value = dtypes.canonicalize_value(value)
    return trace.to_jaxpr_tracer(value, info)


def with_constants(
    closed: Any, constvars: Sequence[Any], invars: Sequence[Any], consts: Sequence[Any]
) -> Any:
    """Returns the closed jaxpr with some of its inputs turned into constants.

    Since 0.12 a closed jaxpr is a jaxpr whose leading inputs carry values;
    before, constvars and invars are two lists. This spelling suits both.
    """
    jaxpr = closed.jaxpr
    both = [*jaxpr.constvars, *constvars]
    return jex_core.ClosedJaxpr(
        jaxpr.replace(constvars=both, invars=list(invars)), consts
    )


def without_constants(closed: Any) -> Any:
    """Returns the closed jaxpr with its constants turned into leading inputs."""
    jaxpr = closed.jaxpr
    if not closed.consts:
        return closed
    both = [*jaxpr.constvars, *jaxpr.invars]
    return jex_core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=both), [])


# --------------------------------------------------------------------- types
def vary_alike(values: Sequence[Any]) -> list[Any]:
    """Returns the arrays, each varying over the manual mesh axes of all of them.

    Inside `jax.shard_map` with ``check_vma=True`` the operands of one equation
    must agree; the casts transpose to the sums that gradients need.
    """
    axes = [core.typeof(v).mat.varying for v in values]
    union = frozenset().union(*axes)
    return [
        jax.lax.pcast(v, tuple(sorted(union - own)), to="varying") if union - own else v
        for v, own in zip(values, axes, strict=True)
    ]


def shaped_like(shape: Sequence[Any], dtype: Any, avals: Sequence[Any]) -> Any:
    """Returns the abstract value of a result of operands with these avals.

    Args:
        shape: The result's shape.
        dtype: The result's dtype.
        avals: The operands' abstract values; the result varies over the manual
            axes that any of them varies over.
    """
    varying = frozenset().union(*(a.mat.varying for a in avals))
    like = next((a for a in avals if a.mat.varying == varying), avals[0])
    meshes = [a.sharding.mesh for a in avals if not a.sharding.mesh.empty]
    if not meshes:
        return core.ShapedArray(tuple(shape), dtype)
    unsharded = jax.P(*[None] * len(shape))
    sharding = jax.sharding.NamedSharding(meshes[0], unsharded)
    return core.ShapedArray(
        tuple(shape), dtype, sharding=sharding, manual_axis_type=like.mat
    )


def weakly_typed(value: Any) -> Any:
    """Returns the array with a weak type, which yields to other types."""
    return jax.lax.convert_element_type_p.bind(
        value, new_dtype=value.dtype, weak_type=True, sharding=None
    )


def without_varying(aval: Any) -> Any:
    """Returns the abstract value without its manual mesh axes, for lowering."""
    return aval.update(manual_axis_type=core.empty_mat) if aval.mat.varying else aval


def sharding_in_type(value: Any) -> Any:
    """Returns the sharding that an array's type states; None if it states none."""
    sharding = core.typeof(value).sharding
    return sharding if any(p is not None for p in sharding.spec) else None


def check_types(closed: Any) -> None:
    """Raises an error if equations of a program do not fit together."""
    core.check_jaxpr(closed.jaxpr)


def same_types(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether abstract values agree, ignoring meshes that shard none of their axes."""
    return len(first) == len(second) and all(
        a == b
        or (
            a.shape == b.shape
            and a.dtype == b.dtype
            and a.weak_type == b.weak_type
            and a.mat == b.mat
            and tuple(a.sharding.spec) == tuple(b.sharding.spec)
        )
        for a, b in zip(first, second, strict=True)
    )


# -------------------------------------------------------------------- meshes
def trace_flat(fn: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The closed jaxpr of a function of arrays, at the given avals.

    `jax.make_jaxpr` prepares a `jax.jit`, which takes ten times as long as a small
    trace. Code that is traced once does not need that.
    """
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    info = core.DebugInfo("rewriter", fn.__name__, ("",) * len(structs), None)
    flat = linear_util.wrap_init(lambda *a: jax.tree.leaves(fn(*a)), debug_info=info)
    ins = list(map(jax.typeof, structs))
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(flat, ins)
    return jex_core.ClosedJaxpr(jaxpr, consts)


def explicit_mesh(avals: Sequence[Any]) -> Any:
    """The mesh on whose explicit axes values are placed by their types, or None."""
    explicit = jax.sharding.AxisType.Explicit
    meshes = (a.sharding.mesh for a in avals if hasattr(a, "sharding"))
    return next((m for m in meshes if explicit in m.axis_types), None)


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

    JAX lowers an equation in the mesh of the code that made it, which may be around
    the part of a program, as a `jax.shard_map`, in which the equation stands.
    """
    meshes = (a.sharding.mesh for a in avals if hasattr(a, "sharding"))
    mine = next((m for m in meshes if not m.empty), None)
    around = jax.sharding.get_abstract_mesh()
    if mine is None or around.empty or mine == around:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mine)


def in_one_mesh(first: Any, second: Any) -> bool:
    """Whether two types are of one mesh, its axes of the same kinds."""
    meshes = [a.sharding.mesh for a in (first, second) if hasattr(a, "sharding")]
    meshes = [m for m in meshes if not m.empty]
    return len(set(meshes)) < 2


def _struct_in_part(aval: Any) -> jax.ShapeDtypeStruct:
    if not aval.mat.varying:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.mat
    )


def trace_placed(fn: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """Like `trace_flat`, for arrays that are placed as their types state.

    Inside `jax.shard_map` they vary over the same mesh axes.
    """
    mesh = explicit_mesh(avals)
    if mesh is None and jax.sharding.get_abstract_mesh().manual_axes:
        return jax.make_jaxpr(fn)(*map(_struct_in_part, avals))
    parts = next((a.sharding.mesh for a in avals if a.mat.varying), None)
    if mesh is None and parts is not None:
        with _in_parts(parts):
            return jax.make_jaxpr(fn)(*map(_struct_in_part, avals))
    if mesh is None:
        return trace_flat(fn, avals)
    structs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype)
        if a.sharding.mesh.empty
        else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
        for a in avals
    ]
    with jax.sharding.use_abstract_mesh(mesh):
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
def _in_parts(mesh: Any) -> Iterator[None]:
    """A context as inside of the `jax.shard_map` whose mesh types of values state."""
    manual = [(a, mesh.shape[a]) for a in mesh.manual_axes]
    with (
        jax.sharding.use_abstract_mesh(mesh),
        core.extend_axis_env_nd(manual),
        config._check_vma(True),  # types say what values vary over
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


def stated(avals: Sequence[Any]) -> tuple[Any, ...]:
    """A key of how types place values, and of what they vary over; () if not at all."""
    varying = tuple(a.mat.varying for a in avals)
    varying = varying if any(varying) else ()
    if explicit_mesh(avals) is None:
        return varying
    return (*varying, *(tuple(a.sharding.spec) for a in avals))


# ------------------------------------------------------------------ programs
def new_var(aval: Any) -> Any:
    """A new variable."""
    return core.Var(aval)


def with_equations(
    jaxpr: Any,
    eqns: Sequence[Any],
    outvars: Sequence[Any],
    more: Sequence[Any] = (),
    first: Sequence[Any] = (),
) -> Any:
    """A jaxpr with other equations; inputs, constants and effects stay.

    Args:
        jaxpr: The jaxpr.
        eqns: Its new equations.
        outvars: Its new results.
        more: Inputs that are added after its own.
        first: Inputs that are added before its own.
    """
    if _wraps(jaxpr):
        inner = with_equations(jaxpr.jaxpr, eqns, outvars, more, first)
        return jex_core.ClosedJaxpr(inner, jaxpr.consts)
    inputs = {"invars": [*first, *jaxpr.invars, *more]} if more or first else {}
    return jaxpr.replace(eqns=list(eqns), outvars=list(outvars), **inputs)


def with_signature(
    jaxpr: Any, invars: Sequence[Any], eqns: Sequence[Any], outvars: Sequence[Any]
) -> Any:
    """A jaxpr with other inputs, equations and results; constants and effects stay."""
    if _wraps(jaxpr):
        inner = with_signature(jaxpr.jaxpr, invars, eqns, outvars)
        return jex_core.ClosedJaxpr(inner, jaxpr.consts)
    return jaxpr.replace(invars=list(invars), eqns=list(eqns), outvars=list(outvars))


def with_one_variable(closed: Any, same: Mapping[Any, Any]) -> Any:
    """A closed jaxpr without some of its constants.

    Args:
        closed: The closed jaxpr; it has no effects, which count constants.
        same: Maps the variable of each dropped constant to that of a kept one.
    """

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [same.get(a, a) if a.__class__ is Var else a for a in atoms]

    jaxpr = closed.jaxpr
    pairs = zip(jaxpr.constvars, closed.consts, strict=True)
    kept = [(v, c) for v, c in pairs if v not in same]
    eqns = [
        e.replace(invars=renamed(e.invars))
        if any(a.__class__ is Var and a in same for a in e.invars)
        else e
        for e in jaxpr.eqns
    ]
    new = jaxpr.replace(
        constvars=[v for v, _ in kept], eqns=eqns, outvars=renamed(jaxpr.outvars)
    )
    return jex_core.ClosedJaxpr(new, [c for _, c in kept])


def part_of(
    jaxpr: Any, invars: Sequence[Any], eqns: Sequence[Any], outvars: Sequence[Any]
) -> Any:
    """The closed jaxpr of some equations of a jaxpr without constants."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    names = {"arg_names": ("",) * len(invars), "result_paths": ("",) * len(outvars)}
    new = inner.replace(
        invars=list(invars),
        eqns=list(eqns),
        outvars=list(outvars),
        debug_info=inner.debug_info._replace(**names),
    )
    return jex_core.ClosedJaxpr(new, [])


def pruned(closed: Any) -> Any:
    """The closed jaxpr without unread equations, also in its loops."""
    jaxpr = closed.jaxpr
    used = [True] * len(jaxpr.outvars)
    new, _ = partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)
    return jex_core.ClosedJaxpr(new, closed.consts)


def _wraps(jaxpr: Any) -> bool:
    """Whether a jaxpr is a pair of an open one and constants (jax 0.10)."""
    return getattr(jaxpr, "jaxpr", jaxpr) is not jaxpr


# --------------------------------------------------------------------- names
def scoped(source_info: Any, label: str) -> Any:
    """Source info under one more name, as profiles show it."""
    if not label:
        return source_info
    stack = source_info.name_stack.extend(label)
    return source_info.replace(name_stack=stack)


def function_name(eqn: Any) -> str:
    """The name of the function that the body of a call-like equation is traced of."""
    info = getattr(call_body(eqn), "debug_info", None)
    return getattr(info, "func_name", "") or ""


NAMED_RULES = ("logaddexp", "exp_neg_sq")


def named_rule(eqn: Any) -> str:
    """The name of a JAX function, if it is more informative than its body.

    The body of ``"logaddexp"`` has cases. That of ``"exp_neg_sq"``, exp(-x²) in the
    derivative of the error function, splits the bits of numbers.
    """
    name = function_name(eqn)
    return name if name in NAMED_RULES else ""


def integer_division(eqn: Any) -> str:
    """``"floor_divide"`` or ``"remainder"`` for JAX's own call of them on integers."""
    name = eqn.params.get("name")
    if name not in ("floor_divide", "remainder") or len(eqn.invars) != 2:
        return ""
    info = getattr(call_body(eqn), "debug_info", None)
    source = getattr(info, "func_src_info", "") or ""
    whole = all(np.issubdtype(v.aval.dtype, np.integer) for v in eqn.invars)
    return name if whole and "/jax/_src/numpy/" in source.replace("\\", "/") else ""


# ------------------------------------------------------------------ lowering
def lower_with_devices(primitive: Any) -> None:
    """Makes JAX pass the devices to a primitive's lowering, which are optional."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def check_as_written(primitive: Any, written: Callable[..., Any]) -> None:
    """Has `checkify` look for NaNs and indices in what an equation stands for.

    Where only a user's own checks are looked for, which no such equation holds, it
    stays.

    Args:
        primitive: The equation's.
        written: Gives for its parameters a function of its operands.
    """

    def rule(*given: Any, **params: Any) -> Any:
        *ctx, error, enabled = given[:_CHECKED]
        args = given[_CHECKED:]
        if not set(enabled) - checkify.user_checks:
            return error, primitive.bind(*args, **params)
        program = jax.make_jaxpr(written(**params))(*args)
        error, outs = checkify.checkify_jaxpr(*ctx, program, enabled, error, *args)
        return error, outs if primitive.multiple_results else outs[0]

    checkify.error_checks[primitive] = rule


# A context comes before the error and the enabled kinds of errors in jax 0.11.
_CHECKED = 3 if "ctx" in inspect.signature(checkify.checkify_jaxpr).parameters else 2


def on_one_device() -> Any:
    """A context in which code need not state the manual axes that it varies over.

    Inside `jax.shard_map` with ``check_vma=True`` a Pallas call would have to state
    them.
    """
    return config._check_vma(False)


def traced_apart(key: Hashable) -> Any:
    """A context in which JAX uses no trace made outside it, or for another key.

    JAX 0.11 keeps the trace of a Pallas kernel's body by its function and its blocks,
    and not by its grid: `pl.num_programs` would be that of an earlier call. The names
    in this context are part of the key of every trace. JAX takes them out of the axes
    of a mesh, and this one is in none.
    """
    apart = getattr(core, "add_explicit_mesh_axis_names", None)
    return contextlib.nullcontext() if apart is None else apart((key,))


def is_partitioned(ctx: Any) -> bool:
    """Whether the lowered code is for several devices, and XLA splits it.

    Inside a `jax.shard_map` over all axes with several devices it is for one device.

    Args:
        ctx: The context of a lowering rule.
    """
    context = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):
        manual, sizes = context.manual_axes, dict(context.mesh.shape)
        return any(n > 1 and a not in manual for a, n in sizes.items())
    return getattr(context, "num_devices", 1) > 1


# ----------------------------------------------------------------- shard_map
def manual_axes(eqn: Any) -> tuple[frozenset[str], dict[str, int]]:
    """The axes that a shard_map makes manual, and the sizes of all of the mesh."""
    params = eqn.params
    axes = params.get("manual_axes", params.get("newly_manual_axes"))  # new in 0.12
    return frozenset(axes), dict(params["mesh"].shape)


def parts_of(eqn: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """(specs of operands, of results, other parameters of the split) of a shard_map."""
    params = eqn.params
    around = params["mesh"], manual_axes(eqn)[0], params["check_vma"]
    return tuple(params["in_specs"]), tuple(params["out_specs"]), around


def _axes_of(aval: Any, around: Any) -> tuple[str, ...]:
    """The manual axes over which a value may vary, in the mesh's order.

    These are all manual axes if types do not state them.
    """
    mesh, manual, typed = around
    varying = aval.mat.varying if typed else manual
    return tuple(a for a in mesh.axis_names if a in varying)


def is_parts(spec: Any, aval: Any, around: Any) -> bool:
    """Whether a shard_map returns each device's own value, and chooses none."""
    mesh, _, typed = around
    named = {a for p in spec for a in (p if isinstance(p, tuple) else (p,))} - {None}
    axes = _axes_of(aval, around)
    if typed:  # what it is split into would be of another type
        return named == set(axes)
    return all(a in named or mesh.shape[a] == 1 for a in axes)


def handing_parts(
    eqn: Any,
    body: Any,
    invars: Sequence[Any],
    given: int,
    made: int,
    first: Sequence[Any] = (),
) -> Any:
    """A shard_map with another body that reads and returns further per-device parts.

    Args:
        eqn: The shard_map.
        body: Its new body.
        invars: What it reads.
        given: The number of last operands that are parts.
        made: The number of last results that are parts.
        first: How its first operands, which are new, are split.
    """
    into, out_of, around = parts_of(eqn)
    outs = [v if is_drop(v) else new_var(v.aval) for v in eqn.outvars]
    for atom in body.outvars[len(outs) :]:
        count = math.prod(around[0].shape[a] for a in _axes_of(atom.aval, around))
        rows, *rest = atom.aval.shape
        outs.append(new_var(core.ShapedArray((count * rows, *rest), atom.aval.dtype)))

    def specs(atoms: Sequence[Any], last: int) -> list[Any]:
        avals = [a.aval for a in atoms[len(atoms) - last :]]
        return [jax.P(_axes_of(a, around) or None) for a in avals]

    params = {
        **eqn.params,
        "jaxpr": body,
        "in_specs": (*first, *into, *specs(body.invars, given)),
        "out_specs": (*out_of, *specs(body.outvars, made)),
    }
    return eqn.replace(invars=list(invars), outvars=outs, params=params)


def with_parts(eqn: Any, body: Any, into: Sequence[Any], out_of: Sequence[Any]) -> Any:
    """A shard_map with another body, and specs for its operands and results."""
    specs = {"in_specs": tuple(into), "out_specs": tuple(out_of)}
    return eqn.replace(params={**eqn.params, "jaxpr": body, **specs})


# ------------------------------------------------------------------ failures
@contextlib.contextmanager
def undone_if_it_fails(ctx: Any) -> Iterator[None]:
    """Removes what a lowering wrote into the module before it failed.

    Functions that were written whole stay: later lowerings may call them.
    """
    module, symbols = ctx.module_context.module, ctx.module_context.symbol_table
    block = ir.InsertionPoint.current.block
    count = len(block.operations)
    known = {str(op.attributes["sym_name"]) for op in module.body.operations}
    try:
        yield
    except Exception:
        for op in reversed(list(block.operations)[count:]):
            op.operation.erase()
        for op in list(module.body.operations):
            new = str(op.attributes["sym_name"]) not in known
            if new and not _is_whole(op):
                symbols.erase(op)
        raise


def _is_whole(function: Any) -> bool:
    """Whether a function of a module ends, so that it was written to its end."""
    blocks = function.regions[0].blocks
    found = [list(b.operations) for b in blocks]
    return bool(found) and all(
        f and f[-1].operation.name == "func.return" for f in found
    )


# --------------------------------------------------------------------- cuDNN
def refusal_of_cudnn(
    q: Any, k: Any, v: Any, version: int, *, has_bias: bool = False, training: bool
) -> str:
    """Returns what JAX says against attention by cuDNN, or ``""``.

    JAX looks at the compute capability of the GPU that is here. On a machine without
    one it takes what GPUs before Hopper take.

    Args:
        q: Queries [b, t, n, h], of which shape and dtype count.
        k: Keys [b, s, k, h].
        v: Values [b, s, k, h].
        version: cuDNN's, such as 91002 for 9.10.2.
        has_bias: Whether there is a bias or a mask.
        training: Whether gradients are wanted.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    layout = fused.AttentionLayout.BTNH
    try:
        fused.check_layout(q, k, v, *[None] * 7, layout)
        fused.check_is_flash_attention(
            q, k, v, layout.value, version, has_bias, training
        )
    except (ValueError, NotImplementedError) as refused:
        return str(refused)
    return ""


# -------------------------------------------------------------------- timing
class NothingSeen(RuntimeError):
    """A profiler saw nothing of a program."""


def _cupti() -> Any:
    """JAX's own binding of CUPTI, loaded with Mosaic; None where there is none."""
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return None
    found = getattr(mosaic_gpu, "_mosaic_gpu_ext", None)
    return found if hasattr(found, "_cupti_init") else None


def has_cupti() -> bool:
    """Whether kernels can be timed by CUPTI; not while a profiler uses it."""
    cupti = _cupti()
    if cupti is None:
        return False
    try:
        cupti._cupti_init()
        cupti._cupti_get_timings(False)
    except Exception:  # of the kinds that a C++ extension makes
        return False
    return True


def kernel_seconds(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Runs a call to its end; returns name and seconds of every GPU kernel.

    Raises:
        NothingSeen: If CUPTI saw no kernel.
        RuntimeError: If another profiler uses CUPTI.
    """
    cupti = _cupti()
    cupti._cupti_init()
    try:
        jax.block_until_ready(run())
    finally:
        kernels = cupti._cupti_get_timings(False)
    if not kernels:
        raise NothingSeen("CUPTI saw no kernel")
    return [(name, 1e-3 * milliseconds) for name, milliseconds in kernels]
