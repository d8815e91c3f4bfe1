"""Equations that hold a body: their kinds, their bodies and the functions in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np
from jax._src import core

# remat_opt is the forward rule of a custom_vjp that may be made again.
CALLS = {
    "jit", "pjit", "closed_call", "eval_jaxpr", "core_call", "custom_lin", "remat_opt",
}  # fmt: skip
REMAT = {"remat2", "checkpoint", "remat"}
BODY_NAMES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call")
CUSTOM = {
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call",
}  # fmt: skip
BODIES = CALLS | REMAT | CUSTOM | {"scan", "while", "cond", "shard_map"}
OF_KIND = {"call": CALLS, "remat": REMAT, "custom": CUSTOM, "opaque": CALLS | CUSTOM}
"""The primitives of those kinds that are no primitive's name."""


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


def of_kind(kind: str, eqns: Sequence[Any]) -> list[tuple[int, Any]]:
    """The equations of a kind, with their positions; the kind is not empty."""
    names = OF_KIND.get(kind, {kind})
    prims = {p for p in {e.primitive for e in eqns} if p.name in names}
    if not prims:  # so it is with nearly all bodies
        return []
    return [
        (k, e)
        for k, e in enumerate(eqns)
        if e.primitive in prims and call_kind(e) == kind
    ]


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
    params = eqn.params
    for name in BODY_NAMES:
        if name in params and hasattr(params[name], "eqns"):
            return name
    return ""


def counts_inputs(jaxpr: Any) -> bool:
    """Whether effects of a body name its inputs by their positions."""
    return any(hasattr(e, "input_index") for e in jaxpr.effects)


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
