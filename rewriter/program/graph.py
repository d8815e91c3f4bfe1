"""A jaxpr as one graph of values: every equation at any depth.

One value has one number, however often the program computes it: calls are inlined, and
equal equations and constants are merged. Operands of scan, while and cond bodies that
do not change in the loop are the values outside. The original equations stay where they
are: a `Scope` remembers which variable carries which value in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from rewriter import _jax
from rewriter.program.counters import Counters
from rewriter.program.equal_conds import of_equal_cond
from rewriter.program.equal_constants import Constants
from rewriter.program.equal_loops import Loops
from rewriter.program.step_reads import StepReads


@dataclass(slots=True, eq=False)
class Node:
    """One distinct equation: primitive, parameters, operand and result values.

    Equal equations elsewhere are its copies, as (scope, position, equation). Two nodes
    have the same signature exactly if their primitives and parameters are equal.
    """

    prim: str
    params: dict[str, Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    eqn: Any
    scope: Scope
    position: int
    signature: int
    copies: tuple[tuple[Scope, int, Any], ...] = ()


@dataclass(slots=True, eq=False)
class Scope:
    """One jaxpr body at one place of the program.

    Attributes:
        kind: ``"top"``, or the primitive of the equation that owns the body.
        parent: The scope around it; None at the top.
        call: The position of the owning equation in the parent.
        branch: The index of this body among the equation's bodies.
        jaxpr: The body.
        env: Variable to value number.
        length: How often the body runs for one run of the parent (scan length;
            1 for a while loop, whose count is unknown).
        open_out: Whether a region may cross from the results to equations outside.
        rules: The calls with derivative rules that it is inlined from, by name.
    """

    kind: str
    parent: Scope | None
    call: int
    branch: int
    jaxpr: Any
    length: int = 1
    open_out: bool = True
    rules: tuple[str, ...] = ()
    env: dict[Any, int] = field(default_factory=dict)
    first_var: dict[int, tuple[int, Any]] = field(default_factory=dict)
    children: dict[int, list[Scope]] = field(default_factory=dict)

    @property
    def repeats(self) -> int:
        """How often the body runs in one call of the program."""
        outer = self.parent.repeats if self.parent else 1
        return outer * self.length

    @property
    def path(self) -> tuple[str, ...]:
        """The kinds of the loops and remat bodies around, outermost first."""
        outer = self.parent.path if self.parent else ()
        return (*outer, self.kind) if self.kind in _SHOWN else outer

    @property
    def runs_again(self) -> bool:
        """Whether it, or a body around it, is a checkpoint's recomputation."""
        if self.parent is None:
            return False
        eqn = self.parent.jaxpr.eqns[self.call]
        here = self.kind == "remat" and _jax.is_recomputation(eqn)
        return here or self.parent.runs_again


_SHOWN = {"scan", "while", "cond", "remat", "shard_map", "custom_vjp", "custom_jvp"}
_NEVER_MERGED = {"optimization_barrier"}
_ROUNDING = "reduce_precision"
_LAYOUT = {"squeeze", "reshape", "broadcast_in_dim", "expand_dims"}


class Graph:
    """Values and the equations that make them; see the module's docstring.

    Args:
        closed_jaxpr: The program.
        proved: By id, bodies whose rules of derivatives are the derivatives.
    """

    def __init__(self, closed_jaxpr: Any, proved: Iterable[int] = ()):
        self.avals: list[Any] = []
        self.producer: dict[int, tuple[Node, int]] = {}
        self.consumers: dict[int, list[Node]] = {}
        self.constants: dict[int, Any] = {}
        self.nodes: list[Node] = []
        self.fresh_in: dict[int, Scope] = {}
        self.slice_of: dict[int, int] = {}
        self.counters = Counters()
        self.per_device: dict[Any, int] = {}
        self.in_branch: dict[tuple[int, int, int], int] = {}
        self.stacked: dict[int, tuple[int | None, ...]] = {}
        self._numbers: dict[Any, tuple[int, ...]] = {}
        self._known: dict[Any, Any] = {}
        self._signatures: dict[Any, int] = {}
        self._signatures_in: dict[int, list[int]] = {}
        self._equal, self._loops, self._reads = Constants(), Loops(), StepReads()
        self._literals: dict[Any, int] = {}
        self._user_rules: dict[Any, bool] = dict.fromkeys(proved, True)
        self.top = Scope("top", None, -1, 0, closed_jaxpr)
        self._add_body(self.top, [self._new(v.aval) for v in closed_jaxpr.invars])

    # ------------------------------------------------------------- values
    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def shape(self, value: int) -> tuple[int, ...]:
        """Shape of a value."""
        return self.avals[value].shape

    def dtype(self, value: int) -> np.dtype:
        """Dtype of a value."""
        return self.avals[value].dtype

    def literal(self, val: Any, aval: Any) -> int:
        """The value number of a literal."""
        if _jax.is_opaque(val):
            return self._constant(val, aval)
        if np.shape(val):
            number = self._new(aval)
            self.constants[number] = val
            return number
        key = (aval.dtype, np.asarray(val).tobytes())
        number = self._literals.get(key)
        if number is None:
            number = self._literals[key] = self._new(aval)
            self.constants[number] = val
        return number

    # ------------------------------------------------------------- building
    def _bind(self, scope: Scope, var: Any, value: int, position: int) -> None:
        scope.env[var] = value
        scope.first_var.setdefault(value, (position, var))

    def read(self, scope: Scope, atom: Any) -> int:
        """The value of a variable or literal in a scope."""
        if _jax.is_literal(atom):
            return self.literal(atom.val, atom.aval)
        return scope.env[atom]

    def _add_body(self, scope: Scope, args: Sequence[int]) -> list[int]:
        jaxpr = scope.jaxpr
        for var, const in zip(jaxpr.constvars, _jax.consts_of(jaxpr), strict=True):
            number = self._constant(const, var.aval)
            self._bind(scope, var, number, -1)
        for var, value in zip(jaxpr.invars, args, strict=True):
            self._bind(scope, var, value, -1)
        env, first_var = scope.env, scope.first_var
        variable = _jax.Var
        signatures = self.signatures_of(jaxpr.eqns)
        for position, eqn in enumerate(jaxpr.eqns):
            ins = [
                env[a] if a.__class__ is variable else self.read(scope, a)
                for a in eqn.invars
            ]
            signature = signatures[position]
            if signature >= 0:
                outs = self._merged(scope, position, eqn, ins, signature)
            else:
                outs = self._add_equation(scope, position, eqn, ins)
            for var, value in zip(eqn.outvars, outs):  # noqa: B905 (a hot loop)
                if var.__class__ is variable:
                    env[var] = value
                    if value not in first_var:
                        first_var[value] = (position, var)
        return [self.read(scope, a) for a in jaxpr.outvars]

    def signatures_of(self, eqns: Sequence[Any]) -> list[int]:
        """A number per equation, equal for equal primitive and parameters.

        Equations that are never merged have numbers of their own, below zero.
        """
        known = self._signatures_in.get(id(eqns))
        if known is None:
            known = [self._signature(e) for e in eqns]
            self._signatures_in[id(eqns)] = known
        return known

    def _signature(self, eqn: Any) -> int:
        params, signatures = eqn.params, self._signatures
        name = eqn.primitive.name
        key: Any = object()  # equal to nothing else
        number = -len(signatures) - 1
        if not (
            eqn.effects
            or name in _jax.BODIES
            or name in _NEVER_MERGED
            or name == _ROUNDING
            or "jaxpr" in params
        ):
            key = (name, *params.items())
            number = len(signatures)
        try:
            return signatures.setdefault(key, number)
        except TypeError:  # a parameter without a hash
            return signatures.setdefault(object(), -len(signatures) - 1)

    def _number_of(self, call: str) -> int:
        """The signature of a call that counts as one equation."""
        return self._signatures.setdefault(call, len(self._signatures))

    def _constant(self, const: Any, aval: Any) -> int:
        opaque = _jax.is_opaque(const)
        if not opaque and np.shape(const) == ():
            return self.literal(const, aval)
        const = self._equal.one(const)
        key = ("const", id(const))
        if key not in self._literals:
            self._literals[key] = self._new(aval)
            if not opaque:
                self.constants[self._literals[key]] = const
        return self._literals[key]

    def _child(
        self, scope: Scope, position: int, body: Any, args: Sequence[int], **kw: Any
    ) -> list[int]:
        siblings = scope.children.setdefault(position, [])
        child = Scope(
            parent=scope, call=position, branch=len(siblings), jaxpr=body, **kw
        )
        siblings.append(child)
        return self._add_body(child, args)

    def _fresh(self, body: Any, count: slice) -> list[int]:
        return [self._new(v.aval) for v in body.invars[count]]

    def _opaque(self, scope: Scope, position: int, eqn: Any, ins: list[int]):
        outs = tuple(self._new(v.aval) for v in eqn.outvars)
        signature = self._signature(eqn)
        self._record(Node(eqn.primitive.name, eqn.params, tuple(ins), outs, eqn,
                          scope, position, signature))  # fmt: skip
        return outs

    def _add_equation(self, scope: Scope, position: int, eqn: Any, ins: list[int]):
        name = eqn.primitive.name
        if name == _ROUNDING:
            if _jax.keeps_precision(eqn):  # a checkpoint saves the same value
                return (ins[0],)
            signature = self._number_of(f"{name} {eqn.params}")
            return self._merged(scope, position, eqn, ins, signature)
        kind = _jax.call_kind(eqn)
        if kind == "call":
            whole = _jax.integer_division(eqn)
            if whole:
                signature = self._number_of(whole)
                return self._merged(scope, position, eqn, ins, signature, whole)
            return self._child(
                scope, position, _jax.call_body(eqn), ins, kind="call",
                rules=scope.rules,
            )  # fmt: skip
        if kind == "remat":
            return self._child(scope, position, _jax.call_body(eqn), ins, kind="remat")
        if kind == "custom":
            if self._library_rule(eqn):
                whole = _jax.named_rule(eqn)
                if whole:
                    signature = self._number_of(whole)
                    return self._merged(scope, position, eqn, ins, signature, whole)
                return self._child(
                    scope, position, _jax.call_body(eqn), ins, kind="call",
                    rules=(*scope.rules, _jax.function_name(eqn)),
                )  # fmt: skip
            what = "custom_jvp" if "jvp" in name else "custom_vjp"
            self._child(
                scope, position, _jax.call_body(eqn), ins, kind=what, open_out=False
            )
        elif kind == "scan":
            return self._scan(scope, position, eqn, ins)
        elif kind == "while":
            body, n_cond, n_body = _jax.while_parts(eqn)
            args = ins[n_cond : n_cond + n_body]
            args = args + self._fresh(body, slice(n_body, None))
            self._child(scope, position, body, args, kind="while", open_out=False)
        elif kind == "cond":
            return self._cond(scope, position, eqn, ins)
        elif kind == "shard_map":
            return self._shard_map(scope, position, eqn, ins)
        return self._opaque(scope, position, eqn, ins)

    def _scan(self, scope: Scope, position: int, eqn: Any, ins: list[int]):
        """A loop. Slices that its backward loop reads are values that it stacked."""
        body, n_consts, n_carry, length = _jax.scan_parts(eqn)
        first = n_consts + n_carry
        arrays, steps = ins[first:], []
        known = self._reads.known(scope, eqn, arrays, self.node_of)
        for value, step, var in zip(arrays, known, body.invars[first:], strict=True):
            if step is None:
                step = self._new(var.aval)
                self.slice_of[step] = value
            steps.append(step)
        carries = self._fresh(body, slice(n_consts, first))
        carries = self.counters.shared(scope, eqn, ins, carries)
        args = [*ins[:n_consts], *carries, *steps]
        self._child(
            scope, position, body, args, kind="scan", length=length, open_out=False
        )
        outs = self._opaque(scope, position, eqn, ins)
        child = scope.children[position][-1]
        for k in range(n_carry):
            self._note_counter(child, n_consts + k, k, ins[n_consts + k], length)
        made = [self.read(child, var) for var in body.outvars[n_carry:]]
        stacked = dict(zip(outs[n_carry:], made, strict=True))
        read = dict(zip(arrays, steps, strict=True))
        self._reads.note(scope, eqn, read, outs, stacked)
        same = self._loops.first(self, eqn, ins, outs, scope.runs_again)
        if same != outs:
            self.producer[outs[-1]][0].outs = outs = same
        self.stacked[id(child)] = (None,) * n_carry + tuple(outs[n_carry:])
        return outs

    def _note_counter(self, body: Scope, at: int, k: int, first: int, length: Any):
        """Notes a carry to which each step adds the same number."""
        jaxpr = body.jaxpr
        carry = body.env[getattr(jaxpr, "jaxpr", jaxpr).invars[at]]
        if self.shape(carry) or not jnp.issubdtype(self.dtype(carry), jnp.integer):
            return
        node = self.node_of(self.read(body, jaxpr.outvars[k]))
        if node is None or node.prim != "add" or carry not in node.ins:
            return
        step = self.scalar(node.ins[1 - node.ins.index(carry)])
        if isinstance(step, int) and isinstance(length, int):
            self.counters.known[carry] = first, step, length

    def _shard_map(self, scope: Scope, position: int, eqn: Any, ins: list[int]):
        """Parts on each device: a value split the same way again keeps its parts."""
        body = eqn.params["jaxpr"]
        args = self._fresh(body, slice(None))
        into, out_of, around = _jax.parts_of(eqn)
        for k, (value, spec) in enumerate(zip(ins, into, strict=True)):
            if not any(spec) and not jnp.issubdtype(self.dtype(value), jnp.inexact):
                args[k] = value  # whole on every device, and without a gradient
            args[k] = self.per_device.setdefault((value, spec, around), args[k])
        self._child(scope, position, body, args, kind="shard_map", open_out=False)
        outs = self._opaque(scope, position, eqn, ins)
        child = scope.children[position][-1]
        for value, var, spec in zip(outs, body.outvars, out_of, strict=True):
            if _jax.is_parts(spec, var.aval, around):
                self.per_device[value, spec, around] = self.read(child, var)
        return outs

    def _cond(self, scope: Scope, position: int, eqn: Any, ins: list[int]):
        """Branches: where the choice is the same, one reads what it returned before."""
        choice, operands = self.one_number(ins[0]), ins[1:]
        for k, body in enumerate(eqn.params["branches"]):
            args = [self.in_branch.get((choice, k, v), v) for v in operands]
            self._child(scope, position, body, args, kind="cond", open_out=False)
        outs = self._opaque(scope, position, eqn, ins)
        returned = [
            [self.read(child, var) for var in child.jaxpr.outvars]
            for child in scope.children[position]
        ]
        if outs and not eqn.effects:
            same = of_equal_cond(self._numbers, choice, returned, outs)
            self.producer[outs[-1]][0].outs = outs = same
        for k, values in enumerate(returned):
            for value, arm in zip(outs, values, strict=True):
                self.in_branch[choice, k, value] = arm
        return outs

    def _library_rule(self, eqn: Any) -> bool:
        key = id(eqn.params.get("call_jaxpr"))
        if key not in self._user_rules:
            self._user_rules[key] = _jax.is_library_rule(eqn)
        return self._user_rules[key]

    def _merged(
        self, scope: Scope, position: int, eqn: Any, ins: list[int], signature: int,
        name: str = "",
    ) -> tuple[int, ...]:  # fmt: skip
        key = (signature, *ins)
        found = self._numbers.get(key)
        if found is not None:
            first = self.producer[found[0]][0]
            first.copies = (*first.copies, (scope, position, eqn))
            return found
        avals = self.avals
        start = len(avals)
        for var in eqn.outvars:
            avals.append(var.aval)
        outs = self._numbers[key] = tuple(range(start, len(avals)))
        self._record(
            Node(name or eqn.primitive.name, eqn.params, key[1:], outs, eqn, scope,
                 position, signature)
        )  # fmt: skip
        return outs

    def _record(self, node: Node) -> None:
        self.nodes.append(node)
        for k, out in enumerate(node.outs):
            self.producer[out] = (node, k)
        consumers = self.consumers
        ins = node.ins
        for value in ins if len(ins) < 2 else dict.fromkeys(ins):
            readers = consumers.get(value)
            if readers is None:
                consumers[value] = [node]
            else:
                readers.append(node)

    def release(self) -> None:
        """Breaks the cycles, so that a used graph is freed without a collection."""
        for node in self.nodes:
            node.copies = ()
        scopes = [self.top]
        while scopes:
            scope = scopes.pop()
            for children in scope.children.values():
                scopes += children
            scope.parent = None
            scope.children.clear()

    # ------------------------------------------------------------- queries
    @property
    def results(self) -> tuple[int, ...]:
        """The values that the program returns, numbers of its own among them."""
        return tuple(self.read(self.top, atom) for atom in self.top.jaxpr.outvars)

    def node_of(self, value: int) -> Node | None:
        """The equation that makes a value; None for inputs and constants."""
        found = self.producer.get(value)
        return found[0] if found else None

    def users(self, value: int) -> list[Node]:
        """Equations that read a value."""
        return self.consumers.get(value, [])

    def one_number(self, value: int) -> int:
        """The value that has the same single number as its only element.

        A shard_map returns numbers as arrays of one element.
        """
        node = self.node_of(value)
        while node is not None and node.prim in _LAYOUT and len(node.ins) == 1:
            if any(d != 1 for d in self.shape(node.ins[0])):
                break
            value = node.ins[0]
            node = self.node_of(value)
        return value

    def known(self, what: str, value: int, find: Callable[[], Any]) -> Any:
        """What is known of a value; found once, however many forms are made of it.

        Args:
            what: The question.
            value: The value.
            find: Returns the answer, which follows from the program alone.
        """
        key = what, value
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def scalar(self, value: int) -> float | int | bool | None:
        """The Python number of a constant scalar, or None."""
        const = self.constants.get(value)
        if const is None or np.shape(const):
            return None
        return np.asarray(const).item()


def variable(scope: Scope, value: int) -> tuple[int, Any] | None:
    """The (position, variable) that holds a value in a scope, or None."""
    return scope.first_var.get(value)
