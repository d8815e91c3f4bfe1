"""Kernels: one way to compute an op, and what it supports.

What a kernel's author needs beside it, `Spec` and `Space`, can be imported from here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rewriter.ops.device import Device
from rewriter.ops.op import Op
from rewriter.ops.space import Space as Space
from rewriter.ops.space import fits_anywhere as fits_anywhere
from rewriter.ops.space import worth_measuring as worth_measuring
from rewriter.ops.spec import Spec as Spec
from rewriter.ops.spec import of_least_sizes as of_least_sizes
from rewriter.ops.spec import spec_of as spec_of
from rewriter.support.sizes import size_text
from rewriter.support.source_line import source_line
from rewriter.support.verdict import YES, Verdict, no

if TYPE_CHECKING:
    import jax

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def takes_all(spec: Spec) -> Verdict:
    """Returns yes: the `supports` of a kernel without limits."""
    del spec
    return YES


def runs_anywhere(device: Device) -> Verdict:
    """Returns yes: the `runs_on` of a kernel for every device of its platforms."""
    del device
    return YES


def always_the_same(config: Any) -> Verdict:
    """Returns yes: the `deterministic` of a kernel that adds up in a fixed order."""
    del config
    return YES


def always_pays(spec: Spec, platform: str) -> Verdict:
    """Returns yes: the `profitable` of a kernel that is chosen wherever it runs."""
    del spec, platform
    return YES


def always_modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns yes: the `modelled` of a kernel whose model holds for every use."""
    del spec, device, passes
    return YES


def pays_on_cpu(spec: Spec, platform: str) -> Verdict:
    """Returns yes on a CPU for operands of a MiB and more.

    Smaller ones stay in the caches, where norms take XLA's time
    (``tests/bench/results/small.json``). On other platforms nothing shows that the
    kernel beats XLA's fusion.
    """
    if platform == "cpu":
        size = 0 if spec.symbolic else sum(map(spec.nbytes, spec.operands))
        if spec.symbolic or size >= 1 << 20:
            return YES
        return no(
            "small", f"operands of {size_text(size)} are so small that XLA is as fast"
        )
    return no("platform", f"not measured to be faster than XLA on {platform}")


def saves_nothing(spec: Spec) -> tuple[()]:
    """Returns no residuals: the `saves` of a kernel that keeps none."""
    del spec
    return ()


@dataclass(frozen=True)
class Limits:
    """Limits of a kernel: uses, devices, and whether its bits repeat.

    Attributes:
        supports: Says, with reasons, whether it supports a `Spec`. It also sees the
            shapes that `jax.vmap` makes.
        runs_on: Says, with reasons, whether it runs on a device of its platforms. In a
            program exported for a platform, the device's kind is unknown.
        supports_on: ``supports_on(spec, device)`` says the same of a device that is not
            attached, by what is known of it. It is for kernels that JAX traces only on
            their device. It is asked in place of `supports` where a program is only
            described, by `rewriter.explain`, and never runs here.
        deterministic: ``deterministic(config)`` says, with reasons, whether `backward`
            gives the same bits for the same operands in every run. Without a config,
            the default one counts.
    """

    supports: Callable[[Spec], Verdict] = field(default=takes_all, repr=False)
    runs_on: Callable[[Device], Verdict] = field(default=runs_anywhere, repr=False)
    deterministic: Callable[[Any], Verdict] = field(default=always_the_same, repr=False)
    supports_on: Callable[[Spec, Device], Verdict] | None = field(
        default=None, repr=False
    )


@dataclass(frozen=True)
class Speed:
    """Knowledge of a kernel's speed before it is measured.

    Attributes:
        profitable: Says, with reasons, whether it is likely to beat the program
            as written on a platform; asked when nothing was measured.
        profitable_backward: ``profitable_backward(spec, platform, count)`` says the
            same for a site whose gradient is in the same program. Its residuals are
            kept ``count`` times, once per layer. `profitable` by default.
        by_rule: Whether these may say yes. If not, `supports` is not asked for a device
            of unknown kind: it may import what builds the kernel.
        estimate: ``estimate(spec, device, passes)`` gives modelled seconds by name, for
            it and other implementations, including ``"xla"``. It replaces `profitable`
            where the device's figures are known.
        margin: ``margin(spec, device, passes)`` gives the share of XLA's estimated time
            that it may take: 1 where the memory that it saves is worth as much time.
            None for the platform's, see `rewriter.choose.estimated`, which also counts
            where nothing was measured on the platform.
        modelled: ``modelled(spec, device, passes)`` says, with reasons, whether the
            model holds for a use. Where not, its own seconds are infinite.
        temporary: ``temporary(spec, device, passes)`` gives modelled bytes of temporary
            memory by name, where they are known.
        steps: ``steps(spec, config, backward_config, passes)`` gives, by the names of
            its Pallas TPU kernels, how often all of their code runs. That is the number
            of grid steps that run, if values decide it. Code of which each step runs
            one of n parts counts as 1 / n. Without the device, its time is estimated
            from that.
    """

    profitable: Callable[[Spec, str], Verdict] = field(default=always_pays, repr=False)
    profitable_backward: Callable[[Spec, str, int], Verdict] | None = field(
        default=None, repr=False
    )
    by_rule: bool = True
    estimate: Callable[[Spec, Device, str], Mapping[str, float]] | None = field(
        default=None, repr=False
    )
    margin: Callable[[Spec, Device, str], float | None] | None = field(
        default=None, repr=False
    )
    modelled: Callable[[Spec, Device, str], Verdict] = field(
        default=always_modelled, repr=False
    )
    temporary: Callable[[Spec, Device, str], Mapping[str, float]] | None = field(
        default=None, repr=False
    )
    steps: Callable[[Spec, Any, Any, str], Mapping[str, float]] | None = field(
        default=None, repr=False
    )


@dataclass(frozen=True)
class Heads:
    """The heads of an array [b, t, heads, h] that are an operand's.

    Attributes:
        first: The first one.
        step: From each to the next.
        count: How many the operand has.
        all: How many the array has.

    Example:
        >>> Heads(first=12, step=1, count=12, all=36).indices
        slice(12, 24, 1)
    """

    first: int
    step: int
    count: int
    all: int

    @property
    def indices(self) -> slice:
        """The operand's heads, as an index of the array's."""
        return slice(self.first, self.first + self.count * self.step, self.step)


@dataclass(frozen=True)
class Traits:
    """Properties of a kernel that let the engine use it in more ways.

    Attributes:
        memory_bounded: Whether it needs far less memory than the reference.
        saves_out: Whether `backward` reads ``out``; otherwise it gets None
            and the result is not kept for it.
        saves: The shapes and dtypes of `forward`'s residuals for a `Spec` with static
            sizes. They are then known without tracing it, and compared when it is
            traced. If None, it is traced to find them.
        merges: Whether its only residual is the log-sum-exp of each row of scores (-inf
            without scores), and `backward` reads only that and the result. Results of
            parts can then be merged by it, and `backward` gets the merged ones.
        adds_to: The operand for which both passes accept an ``addend=``, an array like
            it, or ``""``. `forward` first adds it to the operand and returns ``(sum,
            result)``. `backward` gets the sum as the operand, and adds the addend to
            that operand's cotangent.
        swaps: Operands that it also reads with two axes swapped in memory: ``(name,
            axis, axis)``. `forward` and `together` get the names of such operands as
            ``swapped=``. The operands still have the op's order; it swaps their axes
            itself, at no cost.
        packs: Operands [b, t, n, h] that both passes also read from an array [b, t,
            heads, h] that has more heads. They get ``packed=``, for names of such
            operands the array and the operand's `Heads` in it. Whether they read the
            operand or the array, they compute the same.
        shares: Operands [b, s, n, h] that `forward` also reads as two arrays, joined
            along the last axis, of which one is [b, s, 1, …] for all heads. It gets
            ``shared=``, for names of such operands both arrays in their order. Whether
            it reads the operand or these, it computes the same.
        joins: Operands whose cotangents `backward` also writes into one array [b, t,
            heads, h]. It gets ``joined=``, for names of such operands the `Heads` of
            the cotangent in it, which are all of the array's. It returns the array
            under the name ``joined``, in place of those cotangents.
        assumes: What it takes for granted of a use's numbers, in words; "" for nothing.
            Reports say so of a site.
        exportable: Whether its lowered code may be part of an exported program.
        needs_devices: Whether its code contains `custom_partitioning`, which JAX lowers
            only where it knows the devices.
        tried: Whether its current code has run on its devices. If not, tuning tries it
            only with ``isolate=True``, and benchmarks only by its name.
        comparison_only: Whether it computes a composite op by kernels of its parts, as
            the program would without it. It is measured, and never chosen.
        flat: Whether it is traced without the calls of `jax.jit` in it, which takes
            less time. Most functions of `jax.numpy` are such calls. Loops of `jax.lax`
            would be unrolled.
    """

    memory_bounded: bool = False
    saves_out: bool = True
    saves: Callable[[Spec], Sequence[tuple[tuple[int, ...], Any]]] | None = field(
        default=None, repr=False
    )
    merges: bool = False
    adds_to: str = ""
    swaps: tuple[tuple[str, int, int], ...] = ()
    packs: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    joins: tuple[str, ...] = ()
    assumes: Callable[[Spec], str] | None = field(default=None, repr=False)
    exportable: bool = True
    needs_devices: bool = False
    tried: bool = True
    comparison_only: bool = False
    flat: bool = False


@dataclass(frozen=True, eq=False, init=False)
class Kernel:
    """One implementation of an op.

    Attributes:
        name: The kernel's name, unique within the op; never ``"reference"``.
        op: The op's name.
        platforms: Where it runs: any of ``cpu``, ``cuda``, ``rocm``, ``tpu``.
        version: Raised whenever results or speed may change.
        forward: ``forward(*, <operands>, **params)`` gives the result; with
            ``residuals=True`` (asked only if there is a `backward`) it gives
            ``(result, residuals)``, residuals a tuple of arrays.
        backward: ``backward(*, <operands>, out, residuals, cotangent,
            **params)`` gives cotangents by operand name for the float
            operands; one left out, or no backward at all, is taken from
            `jax.vjp` of the op's reference.
        together: ``together(*, <operands>, cotangent, **params)`` gives ``(result,
            cotangents)``. It is used where the cotangent is known before the result, as
            that of a mean is, and may save work. It gives all that `backward` gives,
            which may not read the result.
        limits: Where it runs.
        speed: What is known of its speed.
        traits: What the engine may do with it.
        space: The configs of `forward`, which then takes ``config=``.
        backward_space: The configs of `backward`, which then takes ``config=``. So
            does `together`.

    A field of `Limits`, `Speed` or `Traits` may also be given and read by itself.

    Example:
        >>> kernel = Kernel(
        ...     "by_adding", "double", ("cpu",), 1,
        ...     forward=lambda *, x: x + x,
        ...     traits=Traits(memory_bounded=True),
        ...     saves_out=False,
        ... )
        >>> kernel.traits.memory_bounded, kernel.traits.saves_out, kernel.merges
        (True, False, False)
        >>> dataclasses.replace(kernel, exportable=False).traits.memory_bounded
        True
    """

    name: str
    op: str
    platforms: tuple[str, ...]
    version: int
    forward: Callable[..., Any]
    backward: Callable[..., Mapping[str, jax.Array]] | None = None
    together: Callable[..., tuple[jax.Array, Mapping[str, jax.Array]]] | None = None
    limits: Limits = Limits()
    speed: Speed = Speed()
    traits: Traits = Traits()
    space: Space | None = None
    backward_space: Space | None = None

    def __init__(
        self,
        name: str,
        op: str,
        platforms: tuple[str, ...],
        version: int,
        *,
        forward: Callable[..., Any],
        backward: Callable[..., Mapping[str, jax.Array]] | None = None,
        together: Callable[..., tuple[jax.Array, Mapping[str, jax.Array]]]
        | None = None,
        limits: Limits = limits,
        speed: Speed = speed,
        traits: Traits = traits,
        space: Space | None = None,
        backward_space: Space | None = None,
        **single: Any,
    ) -> None:
        fields = {
            "name": name, "op": op, "platforms": platforms, "version": version,
            "forward": forward, "backward": backward, "together": together,
            "space": space, "backward_space": backward_space,
        }  # fmt: skip
        for record, value in (("limits", limits), ("speed", speed), ("traits", traits)):
            inside = [n for n in single if RECORD_OF.get(n) == record]
            changes = {n: single.pop(n) for n in inside}
            fields[record] = dataclasses.replace(value, **changes) if changes else value
        if single:
            raise TypeError(f"a kernel has no field {next(iter(single))!r}")
        for field_name, value in fields.items():
            object.__setattr__(self, field_name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in RECORD_OF:
            raise AttributeError(f"a kernel has no field {name!r}")
        return getattr(getattr(self, RECORD_OF[name]), name)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # pickled before it had records, it has single fields

    def __repr__(self) -> str:
        return f"Kernel({self.name})"

    @property
    def where(self) -> str:
        """The line that defines the forward function, such as ``"fast.py:12"``."""
        return source_line(self.forward)


RECORD_OF = {
    f.name: record
    for record, kind in (("limits", Limits), ("speed", Speed), ("traits", Traits))
    for f in dataclasses.fields(kind)
}
"""The record of `Kernel` that holds a field, by the field's name."""


def from_function(
    function: Callable[..., Any],
    op: Op,
    name: str = "",
    platforms: tuple[str, ...] = PLATFORMS,
    version: int = 1,
    supports: Callable[[Spec], Verdict] = takes_all,
    backward: Callable[..., Mapping[str, jax.Array]] | None = None,
    space: Space | None = None,
    backward_space: Space | None = None,
    saves_out: bool = True,
    steps: Callable[[Spec, Any, Any, str], Mapping[str, float]] | None = None,
) -> Kernel:
    """Returns a kernel from a plain function of the operands.

    The function gets the operands in the op's order, those named like one of
    its keyword-only arguments by keyword, and only the parameters it names.

    Args:
        function: Computes the op's result.
        op: The op it computes.
        name: The kernel's name; the function's own by default.
        platforms: Where it runs.
        version: The kernel's version.
        supports: Which uses it supports; all by default.
        backward: As `Kernel.backward`.
        space: The configs to choose from, if the function takes ``config=``.
        backward_space: The configs to choose from, if `backward` takes ``config=``.
        saves_out: As `Traits.saves_out`.
        steps: As `Speed.steps`.

    Example:
        >>> import jax.numpy as jnp
        >>> from rewriter.ops.op import Op, Operand
        >>> double = Op("double", (Operand("x", "d", True),), "d", lambda x: 2 * x)
        >>> kernel = from_function(lambda x: x + x, double, name="by_adding")
        >>> kernel.forward(x=jnp.ones(2)).tolist()
        [2.0, 2.0]
    """
    arguments = _Arguments.of(function)
    return Kernel(
        name or getattr(function, "__name__", "kernel"),
        op.name,
        platforms,
        version,
        forward=_with_names(function, op, arguments),
        backward=backward,
        limits=Limits(functools.partial(_takes, op, arguments, supports)),
        speed=Speed(steps=steps),
        traits=Traits(saves_out=saves_out),
        space=space,
        backward_space=backward_space,
    )


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a plain function.

    Attributes:
        names: All of them.
        keywords: Those that are given by keyword only.
        any: Whether it takes others too.
    """

    names: frozenset[str]
    keywords: frozenset[str]
    any: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> _Arguments:
        """Reads them from its signature."""
        listed = inspect.signature(function).parameters.values()
        return cls(
            frozenset(a.name for a in listed if a.kind is not a.VAR_KEYWORD),
            frozenset(a.name for a in listed if a.kind is a.KEYWORD_ONLY),
            any(a.kind is a.VAR_KEYWORD for a in listed),
        )


def _with_names(
    function: Callable[..., Any], op: Op, arguments: _Arguments
) -> Callable[..., Any]:
    """The `forward` of a plain function: all operands and parameters by name."""

    @functools.wraps(function)
    def forward(**given: Any) -> Any:
        operands = [n for n in op.names if n in given]
        positional = [given[n] for n in operands if n not in arguments.keywords]
        rest = {n: given[n] for n in operands if n in arguments.keywords}
        params = {
            n: v
            for n, v in given.items()
            if n not in op.names and (arguments.any or n in arguments.names)
        }
        return function(*positional, **rest, **params)

    return forward


def _takes(
    op: Op, arguments: _Arguments, supports: Callable[[Spec], Verdict], spec: Spec
) -> Verdict:
    """Whether it names every parameter that is no usual one of the op."""
    more = {n for n, _ in spec.params} - set(op.defaults)
    unknown = [] if arguments.any else sorted(more - arguments.names)
    if unknown:
        return no("params", f"it does not take {', '.join(unknown)}")
    return supports(spec)
