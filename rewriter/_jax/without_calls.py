"""Programs without the calls of `jax.jit` in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax._src import config, core, source_info_util
from jax._src.interpreters.partial_eval import DynamicJaxprTrace, TracebackScope

from rewriter._jax.calls import CALLS, call_body
from rewriter._jax.meshes import trace_flat
from rewriter._jax.values import consts_of, is_literal


class _Trace(DynamicJaxprTrace):
    """A trace in which equations are typed as outside of `jax.disable_jit`.

    JAX keeps the types of results apart for each setting. The user's program, which is
    traced before, often has equations of the same types.
    """

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        with config.disable_jit(False):
            return super().process_primitive(primitive, tracers, params)


def trace_without_calls(fn: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The closed jaxpr of a function, traced without the calls in it.

    Each call is traced by itself otherwise, which takes longer than its equations.
    Loops of `jax.lax` are unrolled.

    Args:
        fn: A function of arrays, with one result.
        avals: The types of its arguments.
    """
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    info = core.DebugInfo("rewriter", fn.__name__, ("",) * len(structs), ("",))
    trace = _Trace(info, parent_trace=core.trace_ctx.trace)
    with (
        core.ensure_no_leaks(trace),
        source_info_util.reset_name_stack(),
        TracebackScope(),
    ):
        here = source_info_util.current()
        ins = [trace.new_arg(jax.typeof(s), source_info=here) for s in structs]
        with core.set_current_trace(trace), jax.disable_jit():
            result = fn(*ins)
        outs = [trace.to_jaxpr_tracer(result, source_info=here)]
        jaxpr, consts = trace.frame.to_jaxpr(trace, outs, info, here)
        del trace, ins, result, outs
    return jex_core.ClosedJaxpr(jaxpr, consts)


def without_calls(closed: Any) -> Any:
    """The closed jaxpr with the bodies of its calls in their places."""
    if not any(e.primitive.name in CALLS for e in closed.jaxpr.eqns):
        return closed
    code = lambda *given: _evaluated(closed.jaxpr, given)
    return trace_flat(code, closed.in_avals)


def _evaluated(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, with the calls in it inlined."""
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    env = dict(zip(inputs, (*consts_of(jaxpr), *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(a) for a in eqn.invars]
        if eqn.primitive.name in CALLS and (body := call_body(eqn)) is not None:
            outs = _evaluated(body, ins)
        else:
            outs = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
            outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]
