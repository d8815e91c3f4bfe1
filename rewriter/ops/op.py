"""Ops: their operands, axes, parameters and references.

An op says nothing about how it is computed fast; that is `rewriter.ops.kernel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rewriter import errors

if TYPE_CHECKING:
    import jax

    from rewriter.ops.cost import CostOf
    from rewriter.support.verdict import Verdict

    Reference = Callable[..., jax.Array]

Sample = Callable[..., Any]
"""``sample(key, operands, params)`` gives arrays by operand name."""

OUT = "out"
"""The name under which `Op.dims` holds the axes of the result."""


@dataclass(frozen=True)
class Part:
    """One device's part of an axis that is split into equal parts.

    Attributes:
        index: The number of the part, from 0; usually traced.
        count: The number of parts.
        axes: The mesh axes over which it is split.
    """

    index: Any
    count: int
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Ring:
    """Functions by which an op is computed while devices pass parts of operands around.

    Attributes:
        letter: The letter along which these operands are split; the result lacks it.
        rows: The letter of the result that is split over the same devices.
        passed: The operands that are passed on.
        moving: The operands whose gradients `backward` returns.
        supports: ``supports(spec, count)`` says, with reasons, whether it supports a
            use split over so many devices; `spec` is one device's part.
        uses: ``uses(spec, count)`` gives the parameters of the uses of the op that one
            device computes.
        pays: ``pays(spec, count, kept)`` says, with reasons, whether it is better than
            gathering. `kept` is how often the gathered operands would be kept for
            gradients, 0 without.
        forward: ``forward(operands, params, axes, count, compute)`` gives, on one
            device, the result and the log-sum-exps of its rows, from
            ``compute(operands, params)``, which returns both for one part.
        backward: ``backward(operands, params, out, lse, cotangent, axes, count,
            compute)`` gives cotangents by operand, from ``compute(operands, params,
            out, lse, cotangent)``, which returns one part's contribution.
    """

    letter: str
    rows: str
    passed: tuple[str, ...]
    moving: tuple[str, ...]
    supports: Callable[..., Verdict] = field(repr=False)
    uses: Callable[..., tuple[Mapping[str, Any], ...]] = field(repr=False)
    pays: Callable[..., Verdict] = field(repr=False)
    forward: Callable[..., Any] = field(repr=False)
    backward: Callable[..., Any] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Sharding:
    """The axes along which a use of an op may be split over devices.

    Attributes:
        along: Letters along which operands and result may be split: a part of the
            result reads only that part of the operands. ``...`` stands for all
            leading axes.
        sums: Letters that the result lacks, along which operands may be split: the
            result is the sum over the parts.
        merges: Letters that the result lacks, along which operands may be split:
            `finish` makes the result of the parts' results, by collectives over
            `Part.axes`.
        follows: By letter, another letter that it is split with: key heads with the
            query heads that read them.
        local: ``local(operands, params, parts)`` adjusts operands and parameters for
            one part, if its result depends on its position. ``parts`` has a `Part` for
            each split letter.
        finish: ``finish(out, operands, params, parts)`` turns that result into the
            part's; operands and parameters are the ones before `local`. An operand
            varies over the mesh axes over which it is split, and over no others.
        dims: Like `Op.dims`, if this use has different ones.
        ring: How operands that are split along another letter may be passed around
            instead of gathered; None if not possible.
        unseen: Operands that ``local`` adds, and that the choice of kernels ignores.
    """

    along: frozenset[str]
    sums: frozenset[str] = frozenset()
    merges: frozenset[str] = frozenset()
    follows: Mapping[str, str] = field(default_factory=dict)
    local: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]] | None = None
    finish: Callable[..., Any] | None = None
    dims: Mapping[str, str] | None = None
    ring: Ring | None = None
    unseen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stored:
    """Dtypes in which matrices may be stored; see `rewriter.ops.stored`.

    Attributes:
        dtypes: The dtypes of the stored numbers.
        summed: The letter of the axis that the op sums over, along which numbers share
            a scale.
        by_steps: Whether the form also takes zero points, both by groups along that
            axis, and the steps in which a program widens the numbers; see
            `rewriter.ops.widening`.
    """

    dtypes: tuple[str, ...]
    summed: str
    by_steps: bool = False


@dataclass(frozen=True)
class Operand:
    """An array that an op takes. It is documented here, and nowhere else.

    Attributes:
        name: Its name, by which kernels get it.
        axes: A letter for each axis, such as ``"b t n h"``. ``...`` in front stands for
            any leading axes, and ``|1`` says that the axis may have size 1 and is then
            broadcast.
        required: Whether every use has it.
        doc: What it holds, and its dtype if that is not any float.
        stored: How it may be stored in few bits, if the op has a form that takes that.
        summary: What a report says of a use that has it.
        instead: What a report advises where it varies along both of its last axes, and
            so is as large as a matrix.
    """

    name: str
    axes: str
    required: bool = False
    doc: str = ""
    stored: Stored | None = None
    summary: str = ""
    instead: str = ""


def unsaid(value: Any) -> str:
    """Returns no words: reports do not mention the parameter."""
    del value
    return ""


@dataclass(frozen=True, eq=False)
class Op:
    """A computation with named operands and parameters.

    Attributes:
        name: The op's name, such as ``"attention"``.
        operands: What it takes, in order.
        out: The axes of the result; see `Operand.axes`.
        about: What it computes, in one line; what its package says, by default.
        reference: ``reference(*, <operands present>, **params)`` gives the
            result, in plain `jax.numpy` without derivative rules of its own.
        sample: ``sample(key, operands, params)`` gives realistic operands for
            ``operands``, a mapping of names to `jax.ShapeDtypeStruct`.
        defaults: The parameters with their default values.
        parallel: A letter that an axis made by `jax.vmap` may be merged into:
            no result reads across it and no operand without it varies along
            it. ``"..."`` for ops that take any leading axes, ``""`` for none.
        flat: Whether the reference is traced without the calls of `jax.jit` in it,
            which takes a third of the time. Loops of `jax.lax` would be unrolled, and
            integer quotients of arrays lose their name: leave it out with either.
        general: A form of the reference that supports every transformation, if
            `reference` itself does not. Derivatives and vmapped references use it.
        usual: The op as programs usually write it, if that is faster than `reference`,
            such as in the operands' own 16 bits. Measured kernels must beat it.
        cost: ``cost(shapes, dtypes, params, mode)`` gives the `Cost` of one use:
            shapes and dtype names by operand, the parameters with their defaults,
            and ``"forward"``, ``"vjp"`` or ``"forward_and_vjp"``. All sizes must
            be numbers.
        distributions: ``distributions(operands)`` gives several samples by
            name, where times depend on values such as lengths and group sizes: all
            are measured, and the mean counts.
        sharding: ``sharding(params)`` returns how a use with these parameters may be
            split over devices, or None; by default along `parallel`.
        parts: The op of its parts, if it is a composite. It becomes one site where a
            kernel is chosen for it, and counts as its parts. Elsewhere each part is a
            site of its own.
        form_of: The general op of a special form: every use of this op is also a use of
            that one. This op is used where one of its kernels is chosen, and counts as
            the general one.
        stays: Whether a site of it stays one inside of a larger site, once a kernel is
            chosen for it: the larger one is then left as written.
        found_on: The platforms for which it is looked for; on others, only where one of
            its kernels is forced. All if empty.
        differentiated: ``differentiated(params)`` gives the parameters of the value
            that a derivative computes, if it is differentiated in another way.
        words: By parameter, a function from its value to words for reports; without
            words it is not mentioned. Others are named with their values.
        note: ``note(params)`` gives what a comparison of numbers says of a use.
        has_zero_rows: ``has_zero_rows(params)`` says whether rows in which a mask hides
            all are 0, whatever the definition gives there. Proofs are of other rows.
        tiled: Letters of axes that a kernel's tile holds whole, as the width of heads:
            measurements of other sizes of them say nothing about a use.
    """

    name: str
    operands: tuple[Operand, ...]
    out: str
    reference: Reference = field(repr=False)
    sample: Sample | None = field(default=None, repr=False)
    defaults: Mapping[str, object] = field(default_factory=dict)
    parallel: str = ""
    flat: bool = False
    general: Reference | None = field(default=None, repr=False)
    usual: Reference | None = field(default=None, repr=False)
    cost: CostOf | None = field(default=None, repr=False)
    distributions: Callable[..., Mapping[str, Sample]] | None = field(
        default=None, repr=False
    )
    sharding: Callable[[Mapping[str, Any]], Sharding | None] | None = field(
        default=None, repr=False
    )
    about: str = field(default="", repr=False)
    parts: str = ""
    form_of: str = ""
    stays: bool = False
    found_on: tuple[str, ...] = ()
    differentiated: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = field(
        default=None, repr=False
    )
    words: Mapping[str, Callable[[Any], str]] = field(default_factory=dict, repr=False)
    note: Callable[[Mapping[str, Any]], str] | None = field(default=None, repr=False)
    has_zero_rows: Callable[[Mapping[str, Any]], bool] | None = field(
        default=None, repr=False
    )
    tiled: str = ""

    def __repr__(self) -> str:
        return f"Op({self.name})"

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The operands' names."""
        return tuple(o.name for o in self.operands)

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        """The names of the operands that every use has."""
        return tuple(o.name for o in self.operands if o.required)

    @functools.cached_property
    def dims(self) -> Mapping[str, str]:
        """The axes of each operand, and of the result as `OUT`."""
        return {o.name: o.axes for o in self.operands} | {OUT: self.out}

    def operand(self, name: str) -> Operand:
        """Returns an operand by its name."""
        return self.operands[self.names.index(name)]

    def spread(self, params: Mapping[str, Any]) -> Sharding | None:
        """Returns how a use may be split over devices, or None."""
        if self.sharding is not None:
            return self.sharding(params)
        return Sharding(frozenset({self.parallel})) if self.parallel else None

    def axis(self, name: str) -> tuple[int | None, bool]:
        """Returns where an operand has the parallel letter.

        Args:
            name: An operand's name, or ``"out"``.

        Returns:
            The axis (negative if counted from the end, ``None`` if the operand
            lacks the letter) and whether it may have size 1. For ``"..."`` the
            axis is 0.
        """
        letters = self.dims.get(name, "").split()
        if not self.parallel or self.parallel not in {x.split("|")[0] for x in letters}:
            return None, False
        if self.parallel == "...":
            return 0, False
        at = [x.split("|")[0] for x in letters].index(self.parallel)
        broadcast = letters[at].endswith("|1")
        return (at - len(letters) if letters[0] == "..." else at), broadcast

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the given operand names in the op's order.

        Args:
            names: Names of operands.

        Raises:
            KernelError: If a name is unknown or a required one is missing.
        """
        present = set(names)
        if unknown := sorted(present - set(self.names)):
            raise errors.KernelError(
                f"{self.name} has no operand {unknown[0]!r}",
                next_step=errors.known(unknown[0], self.names),
                where=errors.caller(),
            )
        if missing := [n for n in self.required if n not in present]:
            raise errors.KernelError(
                f"{self.name} was given {', '.join(sorted(present)) or 'no operands'}",
                wanted=f"also {', '.join(missing)}",
                where=errors.caller(),
            )
        return tuple(n for n in self.names if n in present)
