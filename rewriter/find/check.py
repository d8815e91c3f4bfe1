"""Proves that a region equals its op, or says where they differ.

Both the region and its replacement are brought into normal form. The replacement is
emitted code around the op's reference. Equal forms mean the same function of real
numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.dtypes import TypePromotionError

from rewriter import _jax
from rewriter.algebra.canonicalize import Evaluator, NeedSplit, kind_of
from rewriter.algebra.emit import Emitter
from rewriter.algebra.normal_form import OverBudget
from rewriter.find.plain_code import plain_code
from rewriter.find.reading import Operand, Reading, Refused, leaves_of, unproved
from rewriter.find.recomputable import require_own
from rewriter.find.reference import referenced
from rewriter.find.rounded_result import require_own_rounding
from rewriter.ops.kernel import Spec, spec_of
from rewriter.ops.op import Op
from rewriter.ops.registry import registry
from rewriter.program.graph import Graph


def check(graph: Graph, op: Op, reading: Reading) -> tuple[Spec | None, Refused | None]:
    """Returns the op's shapes in a reading's code, and why the proof fails, or None.

    Args:
        graph: The program.
        op: The op that the reading claims.
        reading: The region, with operands and parameters.
    """
    reading.algebra.work = 0
    try:
        require_own(reading)
        require_own_rounding(graph, reading)
        spec, want = replacement_forms(graph, op, reading)
        proof = reading.proof
        if proof is not None:
            require_own(proof)
            _, want = replacement_forms(graph, registry().op(proof.op), proof)
        difference = _difference(proof or reading, want, reading.args)
    except Refused as refusal:
        return None, refusal.with_traceback(None)
    except OverBudget as error:
        return None, unproved(error, 0.7)
    except TypePromotionError:
        text = (
            f"{op.name} does not take such operands: JAX widens no 8-bit floats itself"
        )
        advice = "cast them to 16 bits"
        return None, Refused("dtype", text, score=0.6, suggestion=advice)
    if not difference:
        return spec, None
    return None, Refused(
        "unequal",
        reading.unequal or f"{op.name} of these operands gives something else",
        difference=difference,
        score=0.8,
    )


def _difference(reading: Reading, want: Any, args: tuple[Any, ...]) -> str:
    """How the region differs from its replacement, or ''; piece by piece."""
    alg = reading.algebra
    try:
        if reading.form is not None and args == reading.args:
            have = reading.form
        else:
            have = reading.evaluator.poly(reading.value, args)
        new = want(args)
    except NeedSplit as need:
        edges = [0, *need.cuts, alg.sizes[need.index]]
        for lo, hi in itertools.pairwise(edges):
            at = alg.affine(alg.new_index(hi - lo), 1, lo)
            part = tuple(alg.subst_index(a, {need.index: at}) for a in args)
            found = _difference(reading, want, part)
            if found:
                return found
        return ""
    if not alg.difference(have, new):
        return ""
    return f"{alg.show(have)}  is not  {alg.show(new)}"


def replacement_forms(
    graph: Graph, op: Op, reading: Reading
) -> tuple[Spec, Callable[[tuple[Any, ...]], Any]]:
    """The op's shapes, and a function from index arguments to the emitted code's form.

    The code, with the op's reference, is traced like any program, so that its
    operands' layout, the op and the result's layout are all part of the check.
    """
    names = leaves_of(reading)
    params = {**reading.params, **reading.check_params}
    reading.code, operands = plain_code(
        graph, op, reading, names, params
    ) or _traced_code(graph, op, reading, names, params)
    ev, (out,) = traced_forms(Graph(reading.code), reading, names, reading.evaluator)
    spec = spec_of(op, operands, dict(reading.params))
    return spec, lambda args: ev.poly(out, args)


def _traced_code(
    graph: Graph,
    op: Op,
    reading: Reading,
    names: Sequence[int],
    params: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """The traced code of a reading, and what the op's operands are like in it."""
    avals = [graph.avals[v] for v in names]
    seen: dict[str, Any] = {}

    def reference(**given: Any) -> jax.Array:
        operands = {k: v for k, v in given.items() if k in op.names}
        for name, x in operands.items():
            seen[name] = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return referenced(op, operands, params)

    def code(*arrays: jax.Array) -> jax.Array:
        operands = dict(zip(names, arrays, strict=True))
        return reading.build(
            reference,
            operands,
            graph.shape(reading.value),
            graph.dtype(reading.value),
            params,
        )

    return _jax.trace_flat(code, avals), seen


def traced_forms(
    graph: Graph, reading: Reading, names: Sequence[int], known: Evaluator | None
) -> tuple[Evaluator, tuple[int, ...]]:
    """An evaluator of code traced for a reading, and the code's results.

    Args:
        graph: The code's graph.
        reading: The reading that the code implements; forms are made in its algebra.
        names: Leaf names of the code's inputs: the program's values.
        known: The evaluator of the region's form. Booleans keep their form from it, so
            that an opaque mask equals its analysed form.
    """
    top = graph.top
    inputs = [top.env[v] for v in top.jaxpr.invars]
    ev = Evaluator(
        graph,
        reading.algebra,
        expand_all=True,
        names=dict(zip(inputs, names, strict=True)),
        **reading.check_options,
    )
    ev.private = True
    for value, name in zip(inputs, names, strict=True):
        if known is not None and kind_of(graph.dtype(value)) == "b":
            ev.given[value] = functools.partial(known.flag, name)
    return ev, graph.results


def form_of_code(
    graph: Graph,
    reading: Reading,
    operands: Mapping[str, Operand],
    code: Callable[..., jax.Array],
    known: Evaluator,
) -> Callable[[tuple[Any, ...]], Any]:
    """A function from index arguments to the form of code of some operands.

    Args:
        graph: The program.
        reading: A reading in whose algebra the operands are.
        operands: The operands by name.
        code: A function of their arrays, by name.
        known: The evaluator of their forms.
    """
    probe = dataclasses.replace(
        reading, operands=operands, joined={}, times=None, plus=None, check_options={}
    )
    names = leaves_of(probe)

    def run(*given: jax.Array) -> jax.Array:
        emitter = Emitter(reading.algebra, dict(zip(names, given, strict=True)))
        return code(**{n: o.array(emitter) for n, o in operands.items()})

    traced = Graph(_jax.trace_flat(run, [graph.avals[v] for v in names]))
    ev, (out,) = traced_forms(traced, probe, names, known)
    return lambda args: ev.poly(out, args)
