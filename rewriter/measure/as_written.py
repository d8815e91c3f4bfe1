"""Extracts a match's region as a program of its own: what the user wrote.

XLA's candidate for a site is what the user wrote, since spellings of one op differ in
time. The region's equations are copied unchanged, with calls of `jax.custom_jvp` whole.
Where the program computes the gradients of all leaves itself, those equations are
copied too. Otherwise the gradients are `jax.vjp` of the region.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from rewriter import _jax
from rewriter.find.match import Match
from rewriter.find.reading import leaves_of
from rewriter.gradients.backward import Backward
from rewriter.program.graph import Graph, Scope

LARGEST = 2000
"""The most equations of an extracted region."""

WORDS = frozenset({
    "axes", "axis", "dimension", "dimensions", "dimension_numbers", "permutation",
    "broadcast_dimensions", "reverse", "index_dtype", "is_stable", "num_keys",
})  # fmt: skip
"""Parameters of equations whose numbers distinguish spellings; others are sizes."""


class NotTaken(Exception):
    """Says why a region's equations cannot run on their own."""


@dataclass(frozen=True)
class Written:
    """A region of the user's program, to run as written.

    Two are equal if they are spelled alike.

    Attributes:
        spelling: A digest of its equations without sizes and numbers.
        leaves: Shapes and dtypes of its inputs by name.
        forward: A function of leaves by name to the result.
        both: A function of leaves by name and a cotangent to the result and the
            gradients by name, if the program itself computes all of them.
        replaced: ``replaced(call)`` gives a function of leaves by name that computes
            the same by ``call(**operands, **params)``.
        result: The result's shape and dtype.
    """

    spelling: str
    leaves: tuple[tuple[str, jax.ShapeDtypeStruct], ...] = field(compare=False)
    forward: Callable[..., Any] = field(compare=False, repr=False)
    both: Callable[..., Any] | None = field(compare=False, repr=False)
    replaced: Callable[..., Any] = field(compare=False, repr=False)
    result: jax.ShapeDtypeStruct = field(compare=False)


def as_written(graph: Graph, match: Match, backward: Backward | None) -> Written:
    """Returns a match's region.

    Args:
        graph: The program.
        match: The match.
        backward: Its gradients in the program, if there are any.

    Raises:
        NotTaken: If it cannot be extracted.
    """
    names = leaves_of(match.reading)
    here = dict(match.leaves)
    values = [here[v] for v in names]
    labels = [str(k) for k in range(len(values))]
    structs = [_struct(graph, v) for v in values]
    result = _struct(graph, match.value)
    region = _Region(graph, values, [match.value])
    own = _gradients(graph, match, backward, values)
    try:
        forward, both = region.function(), own and own.function()
        got = [jax.eval_shape(forward, *structs)[0]]
        got += jax.eval_shape(both, *structs, result)[1:] if both else []
    except Exception as problem:  # equations that depend on the bodies around them
        raise NotTaken(f"cannot be run on their own: {problem}") from problem
    moving = [k for k, s in enumerate(structs) if _is_float(s)]
    if got != [result, *(structs[k] for k in moving if both)]:
        raise NotTaken("give other types on their own")
    reading = match.reading

    def replaced(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(leaves: Mapping[str, Any]) -> Any:
            arrays = dict(zip(names, (leaves[n] for n in labels), strict=True))
            return reading.build(call, arrays, result.shape, result.dtype)

        return run

    def with_gradients(leaves: Mapping[str, Any], cotangent: Any) -> Any:
        assert both is not None
        out, *cotangents = both(*(leaves[n] for n in labels), cotangent)
        return out, dict(zip((labels[k] for k in moving), cotangents, strict=True))

    return Written(
        (own or region).digest(),
        tuple(zip(labels, structs, strict=True)),
        lambda leaves: forward(*(leaves[n] for n in labels))[0],
        with_gradients if both else None,
        replaced,
        result,
    )


def spelling_of(graph: Graph, match: Match, backward: Backward | None) -> str:
    """Returns the digest of a match's region; ``""`` if it cannot be extracted."""
    here = dict(match.leaves)
    values = [here[v] for v in leaves_of(match.reading)]
    try:
        own = _gradients(graph, match, backward, values)
        return (own or _Region(graph, values, [match.value])).digest()
    except NotTaken:
        return ""


def _gradients(
    graph: Graph, match: Match, backward: Backward | None, values: Sequence[int]
) -> _Region | None:
    """The program's own equations for the gradients of all floating leaves."""
    moving = [v for v in values if jnp.issubdtype(graph.dtype(v), jnp.inexact)]
    if backward is None or set(moving) != set(backward.grads):
        return None
    if backward.others:  # no value of the program is the whole gradient
        return None
    if graph.dtype(backward.cotangent) != graph.dtype(match.value):
        return None
    grads = [backward.grads[v] for v in moving]
    if any(_struct(graph, g) != _struct(graph, v) for v, g in backward.grads.items()):
        return None
    return _Region(graph, [*values, backward.cotangent], [match.value, *grads])


def _struct(graph: Graph, value: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(graph.shape(value), graph.dtype(value))


# ------------------------------------------------------------------ equations
class _Region:
    """The equations between some values and others, in order."""

    def __init__(self, graph: Graph, inputs: Sequence[int], outputs: Sequence[int]):
        self.graph = graph
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
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

    def digest(self) -> str:
        """Returns a digest of the spelling: equations, not sizes or numbers."""
        numbers: dict[int, int] = {v: -1 - k for k, v in enumerate(self.inputs)}
        words = []
        for eqn, ins, outs in self.steps:
            read = [numbers.get(i, "c") for i in ins]
            for o in outs:
                if o is not None:
                    numbers.setdefault(o, len(numbers))
            words.append((_equation(eqn), read))
        text = repr((words, [numbers.get(o, "c") for o in self.outputs]))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _equation(eqn: Any) -> tuple[Any, ...]:
    types = [(str(v.aval.dtype), v.aval.ndim) for v in eqn.outvars]
    return eqn.primitive.name, types, _words(eqn.params)


def _words(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(k, _word(v, k in WORDS)) for k, v in sorted(params.items())]


def _word(value: Any, numbers: bool) -> Any:
    """A parameter as text, without sizes and process-dependent parts."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value if numbers else "n"
    if isinstance(value, (tuple, list)):
        return [_word(v, numbers) for v in value] if numbers or value else []
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.dtype) or hasattr(value, "itemsize"):
        return str(value)
    body = getattr(value, "jaxpr", value)
    if hasattr(body, "eqns"):
        return [_equation(e) for e in body.eqns]
    text = str(value)
    named = numbers and "0x" not in text
    return text if named else type(value).__name__


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
