"""The values of a program, the equations that make them, and the bodies they are in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rewriter import _jax
from rewriter.program.counters import Counters
from rewriter.program.equal_constants import Constants
from rewriter.program.equal_loops import Loops
from rewriter.program.signatures import Signatures
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
        arms: The branches of conds that it is in, outermost first: what chooses, and
            which branch.
    """

    kind: str
    parent: Scope | None
    call: int
    branch: int
    jaxpr: Any
    length: int = 1
    open_out: bool = True
    rules: tuple[str, ...] = ()
    arms: tuple[tuple[int, int], ...] = ()
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
_LAYOUT = {"squeeze", "reshape", "broadcast_in_dim", "expand_dims"}


class Values(ABC):
    """A program's values by number, and facts about them.

    Attributes:
        avals: By value, its shape and dtype.
        producer: By value, the equation that makes it, and which of its results it is.
        consumers: By value, the equations that read it.
        constants: By value, the number or array that it is.
        nodes: The equations, in the order of the program.
        slice_of: The array that such a step is of.
        counters: The carries of loops to which each step adds the same number.
        per_device: By array and sharding, its part on a device.
        in_branch: By choice, branch and value, what the value is in that branch.
        stacked: By the id of a loop's body, the arrays that its results are stacked to.
        numbers: By an equation's signature and operands, its results; in a branch of a
            cond, by the branch as well.
        signatures: The signatures of equations.
        loops: The loops, to find those that compute the same.
        step_reads: What loops read of arrays step by step.
        top: The program's own body.
    """

    def __init__(self, closed_jaxpr: Any):
        self.avals: list[Any] = []
        self.producer: dict[int, tuple[Node, int]] = {}
        self.consumers: dict[int, list[Node]] = {}
        self.constants: dict[int, Any] = {}
        self.nodes: list[Node] = []
        self.slice_of: dict[int, int] = {}
        self.counters = Counters()
        self.per_device: dict[Any, int] = {}
        self.in_branch: dict[tuple[int, int, int], int] = {}
        self.stacked: dict[int, tuple[int | None, ...]] = {}
        self.numbers: dict[Any, tuple[int, ...]] = {}
        self.signatures, self.loops = Signatures(), Loops()
        self.step_reads = StepReads()
        self.top = Scope("top", None, -1, 0, closed_jaxpr)
        self._equal = Constants()
        self._known: dict[Any, Any] = {}
        self._literals: dict[Any, int] = {}

    # ------------------------------------------------------------- building
    @abstractmethod
    def add_body(self, scope: Scope, args: Sequence[int]) -> list[int]:
        """Adds a body's equations, given its arguments, and returns its results."""

    def new(self, aval: Any) -> int:
        """The number of a new value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def fresh(self, body: Any, count: slice) -> list[int]:
        """New values for some arguments of a body."""
        return [self.new(v.aval) for v in body.invars[count]]

    def literal(self, val: Any, aval: Any) -> int:
        """The value number of a literal."""
        if _jax.is_opaque(val):
            return self.constant(val, aval)
        if np.shape(val):
            number = self.new(aval)
            self.constants[number] = val
            return number
        key = (aval.dtype, np.asarray(val).tobytes())
        number = self._literals.get(key)
        if number is None:
            number = self._literals[key] = self.new(aval)
            self.constants[number] = val
        return number

    def constant(self, const: Any, aval: Any) -> int:
        """The value number of an array or number that the program holds."""
        opaque = _jax.is_opaque(const)
        if not opaque and np.shape(const) == ():
            return self.literal(const, aval)
        const = self._equal.one(const)
        key = ("const", id(const))
        if key not in self._literals:
            self._literals[key] = self.new(aval)
            if not opaque:
                self.constants[self._literals[key]] = const
        return self._literals[key]

    def bind(self, scope: Scope, var: Any, value: int, position: int) -> None:
        """Notes that a variable of a body is a value."""
        scope.env[var] = value
        scope.first_var.setdefault(value, (position, var))

    def read(self, scope: Scope, atom: Any) -> int:
        """The value of a variable or literal in a scope."""
        if _jax.is_literal(atom):
            return self.literal(atom.val, atom.aval)
        return scope.env[atom]

    def child(
        self, scope: Scope, position: int, body: Any, args: Sequence[int], **kw: Any
    ) -> list[int]:
        """Adds a body that an equation holds, and returns its results."""
        siblings = scope.children.setdefault(position, [])
        kw.setdefault("arms", scope.arms)
        child = Scope(
            parent=scope, call=position, branch=len(siblings), jaxpr=body, **kw
        )
        siblings.append(child)
        return self.add_body(child, args)

    def opaque(
        self, scope: Scope, position: int, eqn: Any, ins: list[int]
    ) -> tuple[int, ...]:
        """Adds an equation that is never merged, and returns its results."""
        outs = tuple(self.new(v.aval) for v in eqn.outvars)
        signature = self.signatures.one(eqn)
        self._record(Node(eqn.primitive.name, eqn.params, tuple(ins), outs, eqn,
                          scope, position, signature))  # fmt: skip
        return outs

    def merged(
        self, scope: Scope, position: int, eqn: Any, ins: list[int], signature: int,
        name: str = "",
    ) -> tuple[int, ...]:  # fmt: skip
        """Adds an equation, unless an equal one is there, and returns its results."""
        key = (signature, *ins)
        found = self.numbers.get(key)
        if found is None and scope.arms:
            found = self._in_arms(scope, key)
        if found is not None:
            first = self.producer[found[0]][0]
            first.copies = (*first.copies, (scope, position, eqn))
            return found
        avals = self.avals
        start = len(avals)
        for var in eqn.outvars:
            avals.append(var.aval)
        outs = tuple(range(start, len(avals)))
        self.numbers[(scope.arms[-1], key) if scope.arms else key] = outs
        self._record(
            Node(name or eqn.primitive.name, eqn.params, key[1:], outs, eqn, scope,
                 position, signature)
        )  # fmt: skip
        return outs

    def _in_arms(self, scope: Scope, key: Any) -> tuple[int, ...] | None:
        """The results of an equal equation in the branches around; None without one.

        Another branch does not run if this one does, so its values are not here.
        """
        found = (self.numbers.get((arm, key)) for arm in scope.arms)
        return next((outs for outs in found if outs is not None), None)

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
    def shape(self, value: int) -> tuple[int, ...]:
        """Shape of a value."""
        return self.avals[value].shape

    def dtype(self, value: int) -> np.dtype:
        """Dtype of a value."""
        return self.avals[value].dtype

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
