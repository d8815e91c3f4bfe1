"""Adds loops, branches and shard_maps to a graph, and says what their bodies read."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rewriter import _jax
from rewriter.program.equal_conds import of_equal_cond
from rewriter.program.values import Scope, Values


def add_scan(
    graph: Values, scope: Scope, position: int, eqn: Any, ins: list[int]
) -> tuple[int, ...]:
    """A loop. Slices that its backward loop reads are values that it stacked."""
    body, n_consts, n_carry, length = _jax.scan_parts(eqn)
    first = n_consts + n_carry
    arrays, steps = ins[first:], []
    known = graph.step_reads.known(scope, eqn, arrays, graph.node_of)
    for value, step, var in zip(arrays, known, body.invars[first:], strict=True):
        if step is None:
            step = graph.new(var.aval)
            graph.slice_of[step] = value
        steps.append(step)
    carries = graph.fresh(body, slice(n_consts, first))
    carries = graph.counters.shared(scope, eqn, ins, carries)
    args = [*ins[:n_consts], *carries, *steps]
    graph.child(scope, position, body, args, kind="scan", length=length, open_out=False)
    outs = graph.opaque(scope, position, eqn, ins)
    child = scope.children[position][-1]
    for k in range(n_carry):
        _note_counter(graph, child, n_consts + k, k, ins[n_consts + k], length)
    made = [graph.read(child, var) for var in body.outvars[n_carry:]]
    stacked = dict(zip(outs[n_carry:], made, strict=True))
    read = dict(zip(arrays, steps, strict=True))
    graph.step_reads.note(scope, eqn, read, outs, stacked)
    same = graph.loops.first(graph, eqn, ins, outs, scope.runs_again)
    same = _with_saved_carries(graph, eqn, child, read, same)
    if same != outs:
        graph.producer[outs[-1]][0].outs = outs = same
    graph.stacked[id(child)] = (None,) * n_carry + tuple(outs[n_carry:])
    return outs


def _with_saved_carries(
    graph: Values, eqn: Any, body: Scope, read: dict[int, int], outs: tuple[int, ...]
) -> tuple[int, ...]:
    """The results of a loop, where it only repeats the carries that another one saved.

    A checkpoint that saves everything runs such a loop: each step returns the carry
    that the first run stacked. So its last one is that of the first run.

    Args:
        graph: The graph.
        eqn: The loop.
        body: Its body.
        read: The arrays that it reads step by step, to what it has of them.
        outs: Its results.
    """
    inner, _, n_carry, length = _jax.scan_parts(eqn)
    arrays, how = {step: v for v, step in read.items()}, (length, eqn.params["reverse"])
    same = list(outs)
    for k, var in enumerate(inner.outvars[:n_carry]):
        array = arrays.get(graph.read(body, var))
        first = None if array is None else graph.node_of(array)
        if first is None or first.prim != "scan":
            continue
        other, _, n, its_length = _jax.scan_parts(first.eqn)
        if how != (its_length, first.params["reverse"]):
            continue
        (its_body,) = first.scope.children[first.position]
        after = [graph.read(its_body, v) for v in other.outvars]
        saved = after[first.outs.index(array)]
        if saved in after[:n]:
            same[k] = first.outs[after.index(saved)]
    return tuple(same)


def _note_counter(graph: Values, body: Scope, at: int, k: int, first: int, length: Any):
    """Notes a carry to which each step adds the same number."""
    jaxpr = body.jaxpr
    carry = body.env[getattr(jaxpr, "jaxpr", jaxpr).invars[at]]
    if graph.shape(carry) or not jnp.issubdtype(graph.dtype(carry), jnp.integer):
        return
    node = graph.node_of(graph.read(body, jaxpr.outvars[k]))
    if node is None or node.prim != "add" or carry not in node.ins:
        return
    step = graph.scalar(node.ins[1 - node.ins.index(carry)])
    if isinstance(step, int) and isinstance(length, int):
        graph.counters.known[carry] = first, step, length


def add_shard_map(
    graph: Values, scope: Scope, position: int, eqn: Any, ins: list[int]
) -> tuple[int, ...]:
    """Parts on each device: a value split the same way again keeps its parts."""
    body = eqn.params["jaxpr"]
    args = graph.fresh(body, slice(None))
    into, out_of, around = _jax.parts_of(eqn)
    for k, (value, spec) in enumerate(zip(ins, into, strict=True)):
        if not any(spec) and not jnp.issubdtype(graph.dtype(value), jnp.inexact):
            args[k] = value  # whole on every device, and without a gradient
        args[k] = graph.per_device.setdefault((value, spec, around), args[k])
    graph.child(scope, position, body, args, kind="shard_map", open_out=False)
    outs = graph.opaque(scope, position, eqn, ins)
    child = scope.children[position][-1]
    for value, var, spec in zip(outs, body.outvars, out_of, strict=True):
        if _jax.is_parts(spec, var.aval, around):
            graph.per_device[value, spec, around] = graph.read(child, var)
    return outs


def add_cond(
    graph: Values, scope: Scope, position: int, eqn: Any, ins: list[int]
) -> tuple[int, ...]:
    """Branches: where the choice is the same, one reads what it returned before."""
    choice, operands = graph.one_number(ins[0]), ins[1:]
    for k, body in enumerate(eqn.params["branches"]):
        args = [graph.in_branch.get((choice, k, v), v) for v in operands]
        graph.child(
            scope, position, body, args, kind="cond", open_out=False,
            arms=(*scope.arms, (choice, k)),
        )  # fmt: skip
    outs = graph.opaque(scope, position, eqn, ins)
    returned = [
        [graph.read(child, var) for var in child.jaxpr.outvars]
        for child in scope.children[position]
    ]
    if outs and not eqn.effects:
        same = of_equal_cond(graph.numbers, (scope.arms, choice), returned, outs)
        graph.producer[outs[-1]][0].outs = outs = same
    for k, values in enumerate(returned):
        for value, arm in zip(outs, values, strict=True):
            graph.in_branch[choice, k, value] = arm
    return outs


def add_while(
    graph: Values, scope: Scope, position: int, eqn: Any, ins: list[int]
) -> tuple[int, ...]:
    """A loop whose steps nobody has counted: its carries are values of their own."""
    body, n_cond, n_body = _jax.while_parts(eqn)
    args = ins[n_cond : n_cond + n_body] + graph.fresh(body, slice(n_body, None))
    graph.child(scope, position, body, args, kind="while", open_out=False)
    return graph.opaque(scope, position, eqn, ins)
