"""A pattern's reading of a region: the op's operands as forms, and its parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.algebra.canonicalize import values_named
from rewriter.algebra.emit import FAR, Emitter, ordered, shaped, typed
from rewriter.algebra.normal_form import Algebra, Index, OverBudget, Poly
from rewriter.find.region import Place

Group = tuple[int, ...]


class Refused(Exception):
    """A pattern's refusal of a region, with what is different about it.

    Attributes:
        code: A short stable name.
        text: The reason, as of `rewriter.support.verdict.Reason`.
        difference: The part of the form that differs.
        score: How near it is to the op, from 0 to 1.
        suggestion: What the user may change.
        explains: Other ops of which the program has far-off look-alikes for the same
            reason; those are not reported.
    """

    def __init__(
        self,
        code: str,
        text: str,
        *,
        difference: str = "",
        score: float = 0.5,
        suggestion: str = "",
        explains: frozenset[str] = frozenset(),
    ):
        super().__init__(text)
        self.code, self.text, self.difference = code, text, difference
        self.score, self.suggestion, self.explains = score, suggestion, explains


def unproved(error: OverBudget, score: float) -> Refused:
    """Returns the refusal of a region whose proof stopped.

    Args:
        error: What it stopped at.
        score: How near the region is to the op, from 0 to 1.
    """
    return Refused("budget", f"not proved: {error}", score=score)


@dataclass(frozen=True)
class Operand:
    """One operand of an op, as a form over the region's leaves.

    Attributes:
        parts: Polynomials and the groups of indices that are the operand's axes;
            several parts are concatenated along the last axis.
        full: Whether axes on which the value does not depend have their size.
        flag: For a boolean operand, the boolean function instead of polynomials.
        dtype: What the array is cast to; None leaves it.
        near: Integers beyond this number may be taken for it, since what they are
            compared with is not beyond it; 0 if none may.
    """

    parts: tuple[tuple[Poly, tuple[Group, ...]], ...]
    full: bool = True
    flag: int | None = None
    dtype: Any = None
    near: int = 0

    def leaves(self, alg: Algebra) -> set[int]:
        """The leaf atoms that it is made of."""
        found: set[int] = set()
        for poly, _ in self.parts:
            found |= alg.poly_leaves(poly)
        if self.flag is not None:
            found |= alg.poly_leaves(alg.of_bool(self.flag))
        return found

    def array(self, emitter: Emitter) -> jax.Array:
        """The operand's array."""
        if self.flag is not None:
            return emitter.flag(self.flag, self.parts[0][1], full=self.full)
        arrays = [
            emitter.array(p, groups, full=self.full, dtype=self.dtype, near=self.near)
            for p, groups in self.parts
        ]
        if len(arrays) == 1:
            return arrays[0]
        return jnp.concatenate(arrays, axis=-1)


@dataclass(frozen=True)
class Joined:
    """An array that the region holds in pieces, such as the keys of two caches.

    Attributes:
        pieces: One operand for each piece.
        axis: The axis along which they follow each other.
    """

    pieces: tuple[Operand, ...]
    axis: int

    def array(self, emitter: Emitter) -> jax.Array:
        """The whole array."""
        return jnp.concatenate([p.array(emitter) for p in self.pieces], self.axis)


def operand(poly: Poly, *groups: Any, full: bool = True, dtype: Any = None) -> Operand:
    """An operand with one part."""
    return Operand(((poly, tuple(map(tuple, groups))),), full, None, dtype)


def position_operand(poly: Poly, *groups: Any) -> Operand:
    """Integers that are compared with positions alone; kernels add positions to it."""
    parts = ((poly, tuple(map(tuple, groups))),)
    return Operand(parts, False, None, "int32", near=FAR)


def flag_operand(flag: int, *groups: Any) -> Operand:
    """A boolean operand; axes on which it does not depend have size one."""
    return Operand((({}, tuple(map(tuple, groups))),), False, flag)


@dataclass(frozen=True)
class ProvedWith:
    """A parameter's value for gradients that are proved with it.

    Attributes:
        value: The value.
        operands: The operands whose gradients depend on it. If none of these is
            replaced, the parameter stays.
    """

    value: Any
    operands: frozenset[str]


@dataclass(frozen=True)
class ComputedValues:
    """Values that a region computes by equations which the op's parameter holds.

    Attributes:
        param: The parameter, a callable. It gives its names for them, and what it
            computes, to the function ``seen``.
        results: By the parameter's names for them, the values as operands.
    """

    param: str
    results: Mapping[Any, Operand]


@dataclass(eq=False)
class Reading:
    """A region read as an op; `rewriter.find.match` checks it.

    Attributes:
        op: The op's name.
        value: The value that the op will compute.
        args: The value's index arguments in `form`.
        form: The region's normal form.
        out_groups: The op's result axes, as groups of indices.
        operands: Name to operand.
        params: The op's parameters.
        check_params: Parameters for the check, where they differ.
        check_options: Options of the evaluator that checks.
        backward_params: Parameters, where they differ, if gradients that the program
            computes are replaced with the value: what they are proved with.
        needs_backward: Why the value is replaced only together with gradients that the
            program computes; ``""`` if it needs none.
        other_gradients: Further parameters, with which the op has the same values and
            the gradients of a user's own rule. They are tried if gradients in the
            program are not proved without.
        ruled: Whether its gradients are such ones.
        leaves: Leaf name to value.
        notes: What floats will see.
        evaluator: For a form in pieces (None), what evaluates the region.
        times: What the op's result is multiplied by, if anything.
        plus: What is added to it after that, if anything.
        in_blocks: Whether the program computes it block by block, in little memory.
        joined: Arrays that are leaves of the operands, made of those of the region;
            later ones may be made of earlier ones.
        may_be_inside: Whether it is a site inside another one of the same op too, if
            it is read beside that.
        unequal: What a reader is told if it differs from the op; a general text if "".
        proof: A reading of the same region with one of its values given, which is
            proved in place of this one. The equations of that value are the op's own
            parameter: they are taken over, and need no proof.
        taken: What these equations compute, if gradients are to be proved with their
            results given.
        code: The traced code of the replacement, with the op's reference, once the
            reading is checked. A changed copy has none.
        read: What its code reads, once it was asked for; see `leaves_of`.
    """

    op: str
    algebra: Algebra
    place: Place
    value: int
    args: tuple[Index, ...]
    form: Poly | None
    out_groups: tuple[Group, ...]
    operands: Mapping[str, Operand]
    params: Mapping[str, Any]
    leaves: tuple[int, ...] = ()
    check_params: Mapping[str, Any] = field(default_factory=dict)
    check_options: Mapping[str, Any] = field(default_factory=dict)
    backward_params: Mapping[str, ProvedWith] = field(default_factory=dict)
    needs_backward: str = ""
    other_gradients: tuple[Mapping[str, Any], ...] = ()
    ruled: bool = False
    notes: tuple[str, ...] = ()
    evaluator: Any = None
    times: Poly | None = None
    plus: Poly | None = None
    in_blocks: bool = False
    joined: Mapping[Any, Joined] = field(default_factory=dict)
    may_be_inside: bool = False
    unequal: str = ""
    proof: Reading | None = None
    taken: ComputedValues | None = None
    code: Any = field(default=None, init=False, repr=False)
    read: tuple[int, ...] | None = field(default=None, init=False, repr=False)

    def build(
        self,
        call: Callable[..., jax.Array],
        arrays: Mapping[Any, jax.Array],
        shape: tuple[int, ...],
        dtype: Any,
        params: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """The code of the replacement: operands, the op, the result's layout."""
        wide = any(np.dtype(x.dtype) == np.float64 for x in arrays.values())
        emitter = Emitter(
            self.algebra, dict(arrays), np.float64 if wide else np.float32
        )
        for name, joined in self.joined.items():
            emitter.arrays[name] = joined.array(emitter)
        operands = {name: o.array(emitter) for name, o in self.operands.items()}
        out = call(**operands, **(self.params if params is None else params))
        order = [i for a in self.args for i in flat_indices(a)]
        if not set(order) <= {i for group in self.out_groups for i in group}:
            raise OverBudget("the result is broadcast along an axis")
        runs = _runs(self.out_groups, order)  # XLA cancels transposes of whole axes
        first = sorted(runs, key=[i for g in self.out_groups for i in g].index)
        out = shaped(out, [size(self.algebra, runs[i]) for i in first])
        out = _in_order(out, [first.index(i) for i in runs], shape)
        for poly, join in ((self.times, jnp.multiply), (self.plus, jnp.add)):
            if poly is not None:
                out = shaped(out, [self.algebra.sizes[i] for i in order])
                factor = emitter.array(poly, [(i,) for i in order], full=False)
                wide = jnp.promote_types(out.dtype, emitter.dtype)
                out = join(out.astype(wide), factor.astype(wide))
        return typed(shaped(out, shape), dtype)


def _in_order(x: jax.Array, axes: Sequence[int], shape: Sequence[int]) -> jax.Array:
    """The transposed array, with the axes of size 1 of a shape if they fit in.

    XLA cancels a transpose and one behind it, but not with a reshape between them.
    """
    long = [n for n in shape if n != 1]
    alike = len(long) < len(shape) and [x.shape[i] for i in axes] == long
    if not alike or list(axes) == sorted(axes):
        return ordered(x, axes)
    places, units = iter(axes), itertools.count(x.ndim)
    x = shaped(x, (*x.shape, *(1,) * (len(shape) - len(long))))
    return ordered(x, [next(units) if n == 1 else next(places) for n in shape])


def _runs(groups: Sequence[Group], order: Sequence[int]) -> dict[int, Group]:
    """Indices that follow each other in a group and in an order, by the first one."""
    after = {i: j for group in groups for i, j in itertools.pairwise(group)}
    runs: dict[int, Group] = {}
    first: int | None = None
    for before, i in zip((None, *order), order, strict=False):
        if first is None or before is None or after.get(before) != i:
            first = i
        runs[first] = (*runs.get(first, ()), i)
    return runs


def flat_indices(a: Index) -> list[int]:
    """Indices of an output axis, most significant first."""
    if a is None:
        return []
    if isinstance(a, int):
        return [a]
    if a[0] == "cat":
        return flat_indices(a[1]) + flat_indices(a[2])
    raise OverBudget("an axis of the result mixes axes in a way that is not known")


def split_digits(
    alg: Algebra, form: Poly, args: tuple[Index, ...]
) -> tuple[Poly, tuple[Index, ...]]:
    """Splits free indices that are read by digits, such as grouped heads."""
    for _ in range(6):
        found = None
        for flag, mono in form:
            atoms = [a for a, _ in mono] + list(alg.bools[flag][0])
            for atom in atoms:
                for a in alg._index_arguments(atom):
                    found = found or _digit(alg, a)
        if found is None:
            return form, args
        i, n = found
        to = {i: alg.cat(alg.new_index(alg.sizes[i] // n), alg.new_index(n), n)}
        form = alg.subst(form, to)
        args = tuple(alg.subst_index(a, to) for a in args)
    return form, args


def _digit(alg: Algebra, a: Index) -> tuple[int, int] | None:
    while isinstance(a, tuple) and a[0] != "k":
        if a[0] in ("div", "mod") and isinstance(a[1], int) and a[1] > 0:
            return (a[1], a[2]) if alg.sizes[a[1]] % a[2] == 0 else None
        if a[0] == "cat":
            inner = _digit(alg, a[2])
            if inner:
                return inner
        a = a[1]
    return None


def size(alg: Algebra, group: Group) -> int:
    """Number of positions of a group of indices."""
    return math.prod(alg.sizes[i] for i in group)


def leaves_of_operands(reading: Reading, names: Iterable[str]) -> set[int]:
    """Returns the values that the code of a reading reads for some operands."""
    alg = reading.algebra
    operands = [reading.operands[n] for n in names if n in reading.operands]
    atoms = {a for operand in operands for a in operand.leaves(alg)}
    return {name for a in atoms for name in values_named(alg.defs[a][1])}


def leaves_of(reading: Reading) -> tuple[int, ...]:
    """Returns the values that the code of a reading reads, in a fixed order."""
    if reading.read is None:
        reading.read = _read_by(reading)
    return reading.read


def _read_by(reading: Reading) -> tuple[int, ...]:
    alg = reading.algebra
    atoms: set[int] = set()
    pieces = (p for joined in reading.joined.values() for p in joined.pieces)
    for operand in (*reading.operands.values(), *pieces):
        atoms |= operand.leaves(alg)
    for poly in (reading.times, reading.plus):
        atoms |= alg.poly_leaves(poly or {})
    names = {name for a in atoms for name in values_named(alg.defs[a][1])}
    return tuple(sorted(names - reading.joined.keys()))
