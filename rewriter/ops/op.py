"""What an op is: its operands, their axes, its parameters and its reference.

An op says nothing about how it is computed fast; that is `rewriter.ops.kernel`.
"""

from __future__ import annotations

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
    """Which of the equal parts of an axis a device has.

    Attributes:
        index: Its number from 0; usually traced.
        count: How many there are.
    """

    index: Any
    count: int


@dataclass(frozen=True, eq=False)
class Ring:
    """How an op is computed while parts of its operands go from device to device.

    Attributes:
        letter: The letter along which these operands are split; the result lacks it.
        beside: The letter of the result that is split over the same devices.
        passed: The operands that are passed on.
        moving: The operands whose gradients `backward` gives.
        supports: ``supports(spec, count)`` says, with reasons, whether it takes a use
            of which each of so many devices has this part.
        uses: ``uses(spec, count)`` gives the parameters of the uses of the op that one
            device computes.
        pays: ``pays(spec, count, kept)`` says, with reasons, whether it is worth more
            than gathering what would be passed on; `kept` is how often that would be
            kept for gradients, 0 without.
        forward: ``forward(operands, params, axes, count, compute)`` gives, on one
            device, the result and the log-sum-exps of its rows, from
            ``compute(operands, params)``, which gives both for one part.
        backward: ``backward(operands, params, out, lse, cotangent, axes, count,
            compute)`` gives cotangents by operand, from ``compute(operands, params,
            out, lse, cotangent)``, which gives what one part adds to them.
    """

    letter: str
    beside: str
    passed: tuple[str, ...]
    moving: tuple[str, ...]
    supports: Callable[..., Verdict] = field(repr=False)
    uses: Callable[..., tuple[Mapping[str, Any], ...]] = field(repr=False)
    pays: Callable[..., Verdict] = field(repr=False)
    forward: Callable[..., Any] = field(repr=False)
    backward: Callable[..., Any] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Sharding:
    """How a use of an op may be spread over devices.

    Attributes:
        along: Letters along which operands and result may be split: a part of the
            result reads only that part of the operands. ``...`` stands for all
            leading axes.
        sums: Letters along which operands may be split where the result lacks them:
            it is the sum of what the parts give.
        follows: By letter, the one it is split with: key heads with the query heads
            that read them.
        local: ``local(operands, params, parts)`` gives operands and parameters with
            which a part of the result is what it is in the whole, where that depends
            on its position. ``parts`` has a `Part` for each letter that is split.
        finish: ``finish(out, operands, params, parts)`` gives the part's result from
            what comes of that; the operands are as they were before.
        dims: As `Op.dims`, where this use has others.
        ring: How what is split along another letter may be passed from device to
            device instead of gathered; None if it may not.
        unseen: Operands that ``local`` adds and by which no kernel is chosen.
    """

    along: frozenset[str]
    sums: frozenset[str] = frozenset()
    follows: Mapping[str, str] = field(default_factory=dict)
    local: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]] | None = None
    finish: Callable[..., Any] | None = None
    dims: Mapping[str, str] | None = None
    ring: Ring | None = None
    unseen: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Op:
    """An operation that patterns find and kernels compute.

    Two ops are equal only if they are the same object, so that an op can be a
    parameter of an equation.

    Attributes:
        name: The op's name, such as ``"attention"``.
        operands: Every operand's name in order, optional ones included.
        required: The operands that are always there.
        dims: Axis letters by operand, and of the result under ``"out"``, such
            as ``{"q": "b t n h", "bias": "b|1 n|1 t|1 s|1", "out": "b t n e"}``.
            ``...`` in front stands for any leading axes, and ``|1`` says that
            the axis may have size 1 and is then broadcast.
        reference: ``reference(*, <operands present>, **params)`` gives the
            result, in plain `jax.numpy` without derivative rules of its own.
        sample: ``sample(key, operands, params)`` gives realistic operands for
            ``operands``, a mapping of names to `jax.ShapeDtypeStruct`.
        defaults: The parameters with their default values.
        parallel: A letter that an axis made by `jax.vmap` may be merged into:
            no result reads across it and no operand without it varies along
            it. ``"..."`` for ops that take any leading axes, ``""`` for none.
        general: The reference in a form that every transformation takes, where
            `reference` calls something that lacks some. Derivatives and
            vmapped references use it.
        usual: The op as programs usually write it, if that is faster than
            `reference`, such as in the operands' own 16 bits: what a kernel has to
            beat when it is measured.
        cost: ``cost(shapes, dtypes, params, mode)`` gives the `Cost` of one use:
            shapes and dtype names by operand, the parameters with their defaults,
            and ``"forward"``, ``"vjp"`` or ``"forward_and_vjp"``. All sizes must
            be numbers.
        distributions: ``distributions(operands)`` gives several samples by
            name, where times depend on values such as lengths and group sizes: all
            are measured, and the mean counts.
        sharding: ``sharding(params)`` says how a use with these parameters may be
            spread over devices, None if it may not; by default along `parallel`.
        parts: The op that it is made of, if it is of several uses of another: it is
            taken where a kernel is chosen for it, and counts as those; elsewhere they
            are looked at by themselves.
        form_of: The more general op of which every use is one of that op as well; it
            is chosen where one of its kernels is, and counted as that op.
    """

    name: str
    operands: tuple[str, ...]
    required: tuple[str, ...]
    dims: Mapping[str, str]
    reference: Reference = field(repr=False)
    sample: Sample | None = field(default=None, repr=False)
    defaults: Mapping[str, object] = field(default_factory=dict)
    parallel: str = ""
    general: Reference | None = field(default=None, repr=False)
    usual: Reference | None = field(default=None, repr=False)
    cost: CostOf | None = field(default=None, repr=False)
    distributions: Callable[..., Mapping[str, Sample]] | None = field(
        default=None, repr=False
    )
    sharding: Callable[[Mapping[str, Any]], Sharding | None] | None = field(
        default=None, repr=False
    )
    parts: str = ""
    form_of: str = ""

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def spread(self, params: Mapping[str, Any]) -> Sharding | None:
        """Returns how a use may be spread over devices; None if it may not."""
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

    def ordered(self, given: Iterable[str]) -> tuple[str, ...]:
        """Returns the given operand names in the op's order.

        Args:
            given: Names of operands.

        Raises:
            KernelError: If a name is unknown or a required one is missing.
        """
        present = set(given)
        if unknown := sorted(present - set(self.operands)):
            raise errors.KernelError(
                f"{self.name} has no operand {unknown[0]!r}",
                next_step=errors.known(unknown[0], self.operands),
                where=errors.caller(),
            )
        if missing := [n for n in self.required if n not in present]:
            raise errors.KernelError(
                f"{self.name} was given {', '.join(sorted(present)) or 'no operands'}",
                wanted=f"also {', '.join(missing)}",
                where=errors.caller(),
            )
        return tuple(n for n in self.operands if n in present)
