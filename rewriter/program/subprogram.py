"""Extracts the equations between some values and others, as a program of their own.

Equations are copied unchanged, with calls that have a derivative rule whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import jaxpr_as_fun

from rewriter import _jax
from rewriter.program.graph import Graph, Scope

LARGEST = 2000
"""The most equations of an extracted region."""


class NotTaken(Exception):
    """Says why a region's equations cannot run on their own."""


def rules_around(graph: Graph, value: int) -> list[Any]:
    """Calls with a derivative rule in which a value is computed, and not returned."""
    node = graph.node_of(value)
    scope = graph.top if node is None else node.scope
    return [eqn for eqn, outs in _rules(scope) if value not in outs]


def has_one_rule(graph: Graph, value: int, *, recomputed: bool = True) -> bool:
    """Whether the same derivative rule, or none, is for each copy of an equation.

    The graph merges `jax.nn.relu(x)` and `jnp.maximum(x, 0)`, which JAX does not
    differentiate alike.

    Args:
        graph: The program.
        value: A result of the equation.
        recomputed: Whether copies count that a checkpoint computes again.
    """
    node = graph.node_of(value)
    if node is None or not node.copies:
        return True
    scopes = (node.scope, *(scope for scope, _, _ in node.copies))
    return len({s.rules for s in scopes if recomputed or not s.runs_again}) <= 1


def _rules(scope: Scope) -> Iterator[tuple[Any, list[int | None]]]:
    """Calls with a derivative rule around a body, and their results."""
    while scope.kind == "call" and scope.parent is not None:
        eqn, parent = scope.parent.jaxpr.eqns[scope.call], scope.parent
        if eqn.primitive.name in _jax.CUSTOM:
            yield eqn, [parent.env.get(v) for v in eqn.outvars]
        scope = parent


class Region:
    """The equations between some values and others, in order.

    Args:
        graph: The program.
        inputs: The values that the equations begin with.
        outputs: The values that they compute.
        also_input: Says which other values are inputs too, once they are met.

    Raises:
        NotTaken: If they cannot be extracted.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[int],
        outputs: Sequence[int],
        also_input: Callable[[int], bool] = lambda value: False,
    ):
        self.graph = graph
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._is_input = also_input
        self.steps: list[tuple[Any, tuple[Any, ...], tuple[int | None, ...]]] = []
        self.consts: dict[int, Any] = {}
        self._known = set(inputs)
        for value in outputs:
            self._need(value)

    def _need(self, value: int) -> None:
        """Adds the equations that compute a value, unless they are there already."""
        if value in self._known:
            return
        self._known.add(value)
        if self._is_input(value):
            self.inputs = (*self.inputs, value)
            return
        if value in self.graph.constants:
            self.consts[value] = self.graph.constants[value]
            return
        node = self.graph.node_of(value)
        if node is None:
            raise NotTaken("read a value that is not an operand")
        eqn, ins, outs = self._rule(node.scope, value) or (
            node.eqn, node.ins, node.outs,
        )  # fmt: skip
        if eqn.effects:
            raise NotTaken(f"have effects: {eqn.primitive.name}")
        for i in ins:
            self._need(i)
        self._known.update(o for o in outs if o is not None)
        self.steps.append((eqn, tuple(ins), tuple(outs)))
        if len(self.steps) > LARGEST:
            raise NotTaken(f"are more than {LARGEST}")

    def _rule(
        self, scope: Scope, value: int
    ) -> tuple[Any, list[int], list[int | None]] | None:
        """The outermost call with a derivative rule that returns a value, whole."""
        found = None
        while scope.kind == "call" and scope.parent is not None:
            parent = scope.parent
            eqn = parent.jaxpr.eqns[scope.call]
            outs = [parent.env.get(v) for v in eqn.outvars]
            if eqn.primitive.name in _jax.CUSTOM and value in outs:
                ins = [self.graph.read(parent, a) for a in eqn.invars]
                if not self._holds_inputs(scope):
                    found = eqn, ins, outs
            scope = parent
        return found

    def _holds_inputs(self, body: Scope) -> bool:
        """Whether one of the region's inputs is computed inside of a body."""
        for value in self.inputs:
            node = self.graph.node_of(value)
            scope = node.scope if node else None
            while scope is not None:
                if scope is body:
                    return True
                scope = scope.parent
        return False

    def function(self) -> Callable[..., list[Any]]:
        """Returns a function of the inputs to the outputs."""
        avals = [self.graph.avals[v] for v in (*self.consts, *self.inputs)]
        base = _jax.trace_flat(lambda *x: x, avals)
        atoms = dict(zip((*self.consts, *self.inputs), base.jaxpr.invars, strict=True))
        eqns = []
        for eqn, ins, outs in self.steps:
            new = [_jax.new_var(v.aval) for v in eqn.outvars]
            for value, var in zip(outs, new, strict=True):
                if value is not None:
                    atoms.setdefault(value, var)
            eqns.append(eqn.replace(invars=[atoms[i] for i in ins], outvars=new))
        program = _jax.with_equations(base, eqns, [atoms[o] for o in self.outputs])
        run, consts = jaxpr_as_fun(program), list(self.consts.values())
        return lambda *given: run(*consts, *given)
