"""A jaxpr as one graph of values: every equation at any depth.

One value has one number, however often the program computes it: calls are inlined, and
equal equations and constants are merged. Operands of scan, while and cond bodies that
do not change in the loop are the values outside. The original equations stay where they
are: a `Scope` remembers which variable carries which value in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rewriter import _jax
from rewriter.program.inner_bodies import add_cond, add_scan, add_shard_map, add_while
from rewriter.program.shard_places import devices_around
from rewriter.program.signatures import ROUNDING
from rewriter.program.values import Node as Node
from rewriter.program.values import Scope, Values
from rewriter.program.values import variable as variable

BODIES = {
    "scan": add_scan,
    "while": add_while,
    "cond": add_cond,
    "shard_map": add_shard_map,
}


class Graph(Values):
    """Values and the equations that make them; see the module's docstring.

    Args:
        closed_jaxpr: The program.
        proved: By id, bodies whose rules of derivatives are the derivatives.
    """

    def __init__(self, closed_jaxpr: Any, proved: Iterable[int] = ()):
        super().__init__(closed_jaxpr)
        self._user_rules: dict[Any, bool] = dict.fromkeys(proved, True)
        self.add_body(self.top, [self.new(v.aval) for v in closed_jaxpr.invars])

    def add_body(self, scope: Scope, args: Sequence[int]) -> list[int]:
        """Adds a body's equations, given its arguments, and returns its results."""
        jaxpr = scope.jaxpr
        for var, const in zip(jaxpr.constvars, _jax.consts_of(jaxpr), strict=True):
            number = self.constant(const, var.aval)
            self.bind(scope, var, number, -1)
        for var, value in zip(jaxpr.invars, args, strict=True):
            self.bind(scope, var, value, -1)
        env, first_var = scope.env, scope.first_var
        variable = _jax.Var
        signatures = self.signatures.of_body(jaxpr.eqns)
        for position, eqn in enumerate(jaxpr.eqns):
            ins = [
                env[a] if a.__class__ is variable else self.read(scope, a)
                for a in eqn.invars
            ]
            signature = signatures[position]
            if signature >= 0:
                outs = self.merged(scope, position, eqn, ins, signature)
            else:
                outs = self._add_equation(scope, position, eqn, ins)
            for var, value in zip(eqn.outvars, outs):  # noqa: B905 (a hot loop)
                if var.__class__ is variable:
                    env[var] = value
                    if value not in first_var:
                        first_var[value] = (position, var)
        return [self.read(scope, a) for a in jaxpr.outvars]

    def _add_equation(self, scope: Scope, position: int, eqn: Any, ins: list[int]):
        name = eqn.primitive.name
        if name == ROUNDING:
            if _jax.keeps_precision(eqn):  # a checkpoint saves the same value
                return (ins[0],)
            signature = self.signatures.of_call(f"{name} {eqn.params}")
            return self.merged(scope, position, eqn, ins, signature)
        if name == "axis_index" and (mesh := devices_around(scope, eqn)) is not None:
            signature = self.signatures.of_call((name, mesh, eqn.params["axis_name"]))
            return self.merged(scope, position, eqn, ins, signature)
        kind = _jax.call_kind(eqn)
        if kind == "call":
            whole = _jax.integer_division(eqn)
            if whole:
                signature = self.signatures.of_call(whole)
                return self.merged(scope, position, eqn, ins, signature, whole)
            return self.child(
                scope, position, _jax.call_body(eqn), ins, kind="call",
                rules=scope.rules,
            )  # fmt: skip
        if kind == "remat":
            return self.child(scope, position, _jax.call_body(eqn), ins, kind="remat")
        if kind == "custom":
            if self._library_rule(eqn):
                whole = _jax.named_rule(eqn)
                if whole:
                    signature = self.signatures.of_call(whole)
                    return self.merged(scope, position, eqn, ins, signature, whole)
                return self.child(
                    scope, position, _jax.call_body(eqn), ins, kind="call",
                    rules=(*scope.rules, _jax.function_name(eqn)),
                )  # fmt: skip
            what = "custom_jvp" if "jvp" in name else "custom_vjp"
            self.child(
                scope, position, _jax.call_body(eqn), ins, kind=what, open_out=False
            )
        elif kind in BODIES:
            return BODIES[kind](self, scope, position, eqn, ins)
        return self.opaque(scope, position, eqn, ins)

    def _library_rule(self, eqn: Any) -> bool:
        key = id(eqn.params.get("call_jaxpr"))
        if key not in self._user_rules:
            self._user_rules[key] = _jax.is_library_rule(eqn)
        return self._user_rules[key]
