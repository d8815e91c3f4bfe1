"""Lists a program's replacements, each with the equations from the inputs to it.

A site is compared with all the equations that lead to it, operands included. So a mask
or a bias that is computed in another way is compared, too. In a loop the operands are
those of its first turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from rewriter import _jax
from rewriter.find.reading import leaves_of
from rewriter.program.graph import Graph, Scope
from rewriter.rewrite.splice import Splice

LARGEST = 4000
"""The most equations that may lead to a compared site."""

Step = tuple[Any, tuple[int, ...], tuple[int, ...]]
"""An equation or a function of arrays, its input values and its output values."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A site as written and replaced, both functions of the program's inputs.

    Attributes:
        op: The op's name.
        where: The user's line.
        written: The equations as written; None if they cannot run on their own.
        replaced: The same equations up to the site's operands, then the replacement.
        why: Why they cannot run on their own.
    """

    op: str
    where: str
    written: Callable[[Sequence[Any]], Any] | None = None
    replaced: Callable[[Sequence[Any]], Any] | None = None
    why: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Its identity among sites: the op and the user's line."""
        return self.op, self.where


class _NotAlone(Exception):
    """Says why the equations before a site cannot run on their own."""


def pairs_of(graph: Graph, splices: Sequence[Splice], inputs: int) -> tuple[Pair, ...]:
    """Returns one pair for each kind of site: an op and its shapes on a line.

    Args:
        graph: The program; the pairs do not keep it alive.
        splices: Its replacements.
        inputs: The number of its inputs that are arguments.
    """
    found: dict[Any, Pair] = {}
    around = _Around(graph, inputs)
    for splice in splices:
        match = splice.match
        key = match.op.name, match.where, str(match.spec)
        if key not in found or found[key].written is None:
            found[key] = _pair(around, splice)
    return tuple(found.values())


def _pair(around: _Around, splice: Splice) -> Pair:
    match, graph = splice.match, around.graph
    reading, here = match.reading, dict(match.leaves)
    names, op = leaves_of(reading), match.op.name
    shape, dtype = graph.shape(reading.value), graph.dtype(reading.value)
    operands = [here[name] for name in names]
    try:
        whole = around.leading_to([match.value])
        front = around.leading_to(operands)
    except _NotAlone as why:
        return Pair(op, match.where, why=str(why))

    def replaced(inputs: Sequence[Any]) -> Any:
        arrays = dict(zip(names, front(inputs), strict=True))
        return reading.build(splice.call, arrays, shape, dtype)

    return Pair(op, match.where, lambda inputs: whole(inputs)[0], replaced)


class _Around:
    """Traces values back to the program's inputs, across bodies."""

    def __init__(self, graph: Graph, inputs: int) -> None:
        self.graph = graph
        self.inputs = [graph.top.env[v] for v in graph.top.jaxpr.invars][:inputs]
        self.made: dict[int, Step] = {}
        self.consts: dict[int, Any] = dict(graph.constants)
        scopes = [graph.top]
        while scopes:
            scope = scopes.pop()
            self._note(scope)
            for children in scope.children.values():
                scopes += children

    def _note(self, scope: Scope) -> None:
        """Notes a body's constants, and the values of its inputs in the first turn."""
        body = scope.jaxpr
        for var, const in zip(body.constvars, _jax.consts_of(body), strict=True):
            self.consts.setdefault(scope.env[var], const)
        if scope.parent is None or scope.kind not in ("scan", "while"):
            return
        eqn = scope.parent.jaxpr.eqns[scope.call]
        inputs = [self.graph.read(scope.parent, a) for a in eqn.invars]
        if scope.kind == "while":
            inputs = inputs[_jax.while_parts(eqn)[1] :]
            first = len(inputs)
        else:
            _, n_consts, n_carry, _ = _jax.scan_parts(eqn)
            first = n_consts + n_carry
        at = -1 if eqn.params.get("reverse") else 0
        for k, var in enumerate(body.invars):
            value = scope.env[var]
            if value == inputs[k] or self.graph.node_of(value) is not None:
                continue
            turn = (lambda x: [x]) if k < first else (lambda x: [x[at]])
            self.made.setdefault(value, (turn, (inputs[k],), (value,)))

    def leading_to(self, values: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
        """Returns a function of the program's inputs to some values.

        Raises:
            _NotAlone: If an equation before them cannot run on its own.
        """
        steps, consts = self._steps(values)
        inputs = tuple(self.inputs)

        def run(given: Sequence[Any]) -> list[Any]:
            env: dict[int, Any] = dict(consts)
            env.update(zip(inputs, given, strict=True))
            for what, ins, outs in steps:
                results = _applied(what, [env[i] for i in ins])
                env.update(zip(outs, results, strict=True))
            return [env[v] for v in values]

        return run

    def _steps(self, values: Sequence[int]) -> tuple[list[Step], Mapping[int, Any]]:
        """The steps to some values, in order, and the constants that they read."""
        steps: list[Step] = []
        known, consts = set(self.inputs), {}
        waiting: list[tuple[int, Step | None]] = [(v, None) for v in reversed(values)]
        while waiting:
            value, step = waiting.pop()
            if step is not None:
                steps.append(step)
                continue
            if value in known:
                continue
            if value in self.consts:
                consts[value] = self.consts[value]
                known.add(value)
                continue
            step = self._step(value)
            known.update(step[2])
            waiting.append((value, step))
            waiting += [(i, None) for i in step[1] if i not in known]
            if len(steps) + len(waiting) > LARGEST:
                raise _NotAlone(f"more than {LARGEST} equations lead to it")
        return steps, consts

    def _step(self, value: int) -> Step:
        if value in self.made:
            return self.made[value]
        node = self.graph.node_of(value)
        if node is None:
            raise _NotAlone("it reads a value of one device, or of a turn left out")
        if node.eqn.effects:
            raise _NotAlone(f"{node.eqn.primitive.name} has effects")
        return node.eqn, tuple(node.ins), tuple(node.outs)


def _applied(what: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Applies an equation, or a function, to some values."""
    if not hasattr(what, "primitive"):
        return what(*values)
    avals = [a.aval for a in what.invars]
    base = _jax.trace_flat(lambda *x: x, avals)
    outs = [_jax.new_var(v.aval) for v in what.outvars]
    eqn = what.replace(invars=list(base.jaxpr.invars), outvars=outs)
    run = jaxpr_as_fun(_jax.with_equations(base, [eqn], outs))
    return run(*(_typed(x, a) for x, a in zip(values, avals, strict=True)))


def _typed(x: Any, aval: Any) -> Any:
    """A constant of the program as an array of its type."""
    if isinstance(x, jax.Array) or _jax.is_opaque(x):
        return x
    return jnp.asarray(x, aval.dtype)
