"""Tells derivative rules of JAX's own functions from those of a user."""

from __future__ import annotations

import functools
import os
import types
from typing import Any

from jax._src.linear_util import WrappedFun

from rewriter._jax.calls import call_body

RULE = "jvp_jaxpr_fun"
"""The parameter of a custom_jvp call that holds its rule."""

WITHIN = f"{os.sep}jax{os.sep}_src{os.sep}"
"""What the path of JAX's own code has in it."""

DEPTH = 16
"""The most functions that close over one another."""

FUNCTIONS = (types.FunctionType, functools.partial, WrappedFun)


def is_library_rule(eqn: Any) -> bool:
    """Whether a custom_jvp call is one of JAX's own with the derivative of its body.

    A user's rule may differ from the derivative of the body, so its body is a scope of
    its own. JAX's own rules (relu, softmax, logsumexp and the like) only state that
    derivative in a better way. They are recognised by the functions that define the
    body and the rule: a user may give a function of JAX a rule of their own.
    """
    if "jvp" not in eqn.primitive.name:
        return False
    info = getattr(call_body(eqn), "debug_info", None)
    source = (getattr(info, "func_src_info", "") or "").replace(os.sep, "/")
    places = ("nn/", "numpy/", "lax/")
    if not any(f"/jax/_src/{place}" in source for place in places):
        return False
    return _is_jax_code(eqn.params.get(RULE))


def rule_function(eqn: Any) -> Any:
    """The function that states the rule of a custom_jvp call, if it is JAX's own.

    Calls with the same such function and equal bodies have the same rule. None where
    that is not known, as of a rule with static arguments.
    """
    if not is_library_rule(eqn):
        return None
    rule = _inner(eqn.params[RULE])
    if rule is None or [f.__name__ for f, _ in rule.transforms] != ["_flatten_jvp"]:
        return None
    return rule.f


def _inner(rule: Any, depth: int = 0) -> WrappedFun | None:
    """The function with transformations that a rule closes over."""
    function = rule.f if isinstance(rule, WrappedFun) else rule
    if not isinstance(function, types.FunctionType) or depth > DEPTH:
        return None
    parts = [part for cell in function.__closure__ or () for part in _held(cell)]
    wrapped = [part for part in parts if isinstance(part, WrappedFun)]
    if len(wrapped) == 1:
        return wrapped[0]
    inner = [found for part in parts if (found := _inner(part, depth + 1)) is not None]
    return inner[0] if len(inner) == 1 else None


def _is_jax_code(rule: Any, depth: int = 0) -> bool:
    """Whether a rule is of JAX's functions alone, also of those that they close over.

    A derivative that `defjvps` is told to be zero, by None, is the user's.
    """
    if isinstance(rule, functools.partial):
        return _is_jax_code(rule.func, depth)
    if isinstance(rule, WrappedFun):
        return _is_jax_code(rule.f, depth)
    if not isinstance(rule, types.FunctionType) or depth > DEPTH:
        return False
    if WITHIN not in rule.__code__.co_filename:
        return False
    parts = [part for cell in rule.__closure__ or () for part in _held(cell)]
    return all(_is_jax_code(part, depth + 1) for part in parts)


def _held(cell: types.CellType) -> tuple[Any, ...]:
    """The functions that a function closes over; of `defjvps` one for each operand."""
    try:
        held = cell.cell_contents
    except ValueError:  # not filled yet
        return ()
    if isinstance(held, FUNCTIONS):
        return (held,)
    several = isinstance(held, tuple) and any(isinstance(h, FUNCTIONS) for h in held)
    nothing = isinstance(held, tuple) and held and not any(h is not None for h in held)
    return held if several or nothing else ()
