"""Patterns of your own: an ordinary JAX function, found however it is spelled.

A pattern is the function itself, with the names of its axes. It is found where
a program computes the same thing, whatever the spelling, and a kernel takes its
place. Every place is proved: the function, traced at the program's own shapes,
must have the same normal form as the program's equations.

Example:
    >>> import jax, jax.numpy as jnp, rewriter
    >>> holes = {"eps": rewriter.scalar()}
    >>> @rewriter.pattern(dims="x: ... d, w: d -> ... d", params=holes)
    ... def unit(x, w, *, eps):
    ...     return w * x / (jnp.abs(x).sum(-1, keepdims=True) + eps)
    >>> @unit.kernel(version=1)
    ... def one_pass(x, w, *, eps):
    ...     return x * (w / (jnp.abs(x).sum(-1, keepdims=True) + eps))
    >>> def model(x, w):
    ...     total = jnp.sum(jnp.abs(x), axis=-1, keepdims=True)
    ...     return jnp.sin((x / (1e-3 + total)) * w)
    >>> fast = rewriter.optimize(model, patterns=[unit])
    >>> [site.kernel for site in fast.report(jnp.ones((4, 8)), jnp.ones(8)).sites]
    ['one_pass']
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from rewriter.errors import PatternError, caller
from rewriter.find.bindings import Candidate, Wanted
from rewriter.find.declared import checked, parsed
from rewriter.find.finder import Finder
from rewriter.find.reading import Reading
from rewriter.find.sieve import Step
from rewriter.ops import kernel
from rewriter.ops.op import OUT, Op, Operand, Sharding
from rewriter.ops.registry import registry
from rewriter.ops.splittable import sharding_of
from rewriter.program.graph import Node
from rewriter.support.source_line import source_line
from rewriter.support.verdict import Verdict


@dataclass(frozen=True)
class Scalar:
    """A parameter that is a number written in the program."""


def scalar() -> Scalar:
    """Returns the declaration of a numeric parameter, read off the program.

    Example:
        >>> import jax.numpy as jnp, rewriter
        >>> holes = {"more": rewriter.scalar()}
        >>> @rewriter.pattern(dims="x: ... d -> ... d", params=holes)
        ... def shares(x, *, more):
        ...     return x / (jnp.abs(x).sum(-1, keepdims=True) + more)
        >>> def model(x):
        ...     return x * (1 / (2 + jnp.sum(jnp.abs(x), axis=-1, keepdims=True)))
        >>> fast = rewriter.optimize(model, patterns=[shares])
        >>> fast.report(jnp.ones((4, 8))).sites[0].params["more"]
        2.0
    """
    return Scalar()


@dataclass(eq=False)
class Pattern:
    """A function to find, its kernels and its checks; made by `pattern`.

    Attributes:
        op: The op it stands for; the function is its reference.
        params: Declared parameters.
        anchors: Primitives at which a search begins.
        needs: Primitives that every program with a place has as well.
        either: If not empty, primitives; such a program has at least one of them.
    """

    op: Op
    params: Mapping[str, Scalar]
    anchors: frozenset[str]
    kernels: tuple[kernel.Kernel, ...] = ()
    checks: tuple[Callable[[Candidate], Verdict], ...] = ()
    where: str = ""
    needs: frozenset[str] = frozenset()
    either: frozenset[str] = frozenset()
    steps: ClassVar[tuple[Step, ...]] = ()
    above: ClassVar[frozenset[str]] = frozenset()
    dtypes: ClassVar[frozenset[str]] = frozenset()
    of_rows: ClassVar[bool] = False
    looks_above: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The pattern's name, which is the op's."""
        return self.op.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.op.reference(
            **dict(zip(self.op.names, args, strict=False)), **kwargs
        )

    def requires(self, check: Callable[[Candidate], Verdict]) -> Callable[..., Verdict]:
        """Adds a check: a function of a `Candidate` that returns a `Verdict`."""
        self.checks = (*self.checks, check)
        return check

    def kernel(
        self,
        platform: str | tuple[str, ...] = kernel.PLATFORMS,
        version: int = 1,
        supports: Callable[[kernel.Spec], Verdict] = kernel.takes_all,
        backward: Callable[..., Any] | None = None,
        space: kernel.Space | None = None,
        backward_space: kernel.Space | None = None,
        saves_out: bool = True,
        steps: Callable[..., Mapping[str, float]] | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Adds a kernel: a function of the operands, and of the params it names.

        Args:
            platform: Where it runs: ``cpu``, ``cuda``, ``rocm``, ``tpu``, or several.
            version: Raised whenever its results or speed may change.
            supports: Says which shapes and dtypes it takes.
            backward: As `rewriter.ops.kernel.Kernel.backward`; the gradient of the
                pattern's function if absent.
            space: The configs to choose from by measuring; the function then takes
                ``config=``, one of them or None.
            backward_space: The same for `backward`.
            saves_out: Whether `backward` reads ``out``; otherwise it gets None, and
                the result is not kept for it.
            steps: As `rewriter.ops.kernel.Speed.steps`.
        """
        platforms = (platform,) if isinstance(platform, str) else tuple(platform)
        unknown = [p for p in platforms if p not in kernel.PLATFORMS]
        if unknown:
            raise PatternError(
                f"platform={unknown[0]!r}",
                wanted=", ".join(kernel.PLATFORMS),
                where=caller(),
            )

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            added = kernel.from_function(
                function,
                self.op,
                platforms=platforms,
                version=version,
                supports=supports,
                backward=backward,
                space=space,
                backward_space=backward_space,
                saves_out=saves_out,
                steps=steps,
            )
            self.kernels = (*self.kernels, added)
            return function

        return add

    # -------------------------------------------------------------- matching
    def propose(self, find: Finder, anchor: Node) -> Iterator[Reading]:
        """Readings whose operands and parameters fit; the search proves them."""
        wanted = Wanted(self.op, tuple(self.params), self.checks)
        return wanted.readings(find, anchor)


def pattern(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    dims: str = "",
    params: Mapping[str, Scalar] | None = None,
    name: str | None = None,
    sample: Callable[..., Any] | None = None,
) -> Any:
    """Turns a function into a `Pattern`.

    Args:
        fn: The function; its positional arguments are the operands. It is the
            formula, the fallback and, differentiated, the gradient.
        dims: Axis letters of every operand and of the result, such as
            ``"x: ... d, w: d -> ... d"``; ``...`` stands for any leading axes.
        params: The keyword-only arguments, each `scalar()`.
        name: The pattern's name; the function's by default.
        sample: ``sample(key, operands, params)`` gives realistic arrays by name for
            `jax.ShapeDtypeStruct` by name, on which kernels are measured; by default
            normal numbers, which will not do for operands of integers.

    Returns:
        The pattern; without ``fn`` a decorator that makes it.

    Raises:
        PatternError: If dims and function do not fit together; the message names
            the function's line.

    Example:
        >>> import jax.numpy as jnp, rewriter
        >>> @rewriter.pattern(dims="x: ... d -> ... d")
        ... def shares(x):
        ...     return x / jnp.abs(x).sum(-1, keepdims=True)
        >>> def model(x):
        ...     return x * (1 / jnp.sum(jnp.abs(x), axis=-1, keepdims=True))
        >>> fast = rewriter.optimize(model, patterns=[shares])
        >>> [site.op for site in fast.report(jnp.ones((4, 8))).sites]
        ['shares']
    """
    if fn is None:
        return lambda fn: pattern(
            fn, dims=dims, params=params, name=name, sample=sample
        )
    if not callable(fn):
        wanted = "a function of the operands"
        raise PatternError(f"pattern got {fn!r}", wanted=wanted, where=caller())
    label, where = name or fn.__name__, source_line(fn)
    operands, letters = parsed(fn, label, dims, where)
    holes = dict(params or {})
    _require_same_names(fn, holes, label, where)
    op = _op_of(fn, operands, letters, holes, label, sample)
    anchors = checked(op, fn, holes, where)
    return Pattern(op, holes, anchors, where=where)


def _require_same_names(
    fn: Callable[..., Any], holes: Mapping[str, Scalar], label: str, where: str
) -> None:
    """Refuses a function whose keyword-only arguments are not the params."""
    keywords = [
        p.name
        for p in inspect.signature(fn).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    ]
    if set(keywords) != set(holes):
        raise PatternError(
            f"{label}: keyword arguments {keywords}, params {sorted(holes)}",
            wanted="the same names in both",
            where=where,
        )


def _op_of(
    fn: Callable[..., Any],
    operands: Sequence[str],
    letters: Mapping[str, str],
    holes: Mapping[str, Scalar],
    label: str,
    sample: Callable[..., Any] | None,
) -> Op:
    """The op that a function defines.

    Args:
        fn: The function.
        operands: Its operands, in order.
        letters: The axes of each, and of the result.
        holes: Its parameters.
        label: The op's name.
        sample: As in `pattern`.
    """

    def reference(*, precision: str | None = None, **given: Any) -> jax.Array:
        """The function, its products at the precision of those in the program."""
        run = functools.partial(fn, **{k: given[k] for k in holes})
        if precision is None:
            return run(*(given[n] for n in operands))
        with jax.default_matmul_precision(precision):
            return run(*(given[n] for n in operands))

    reference.__wrapped__ = fn  # type: ignore[attr-defined]

    @functools.cache
    def sharding(params: tuple[tuple[str, Any], ...]) -> Sharding:
        return sharding_of(reference, letters, dict(params))

    return Op(
        label, tuple(Operand(n, letters[n], True) for n in operands), letters[OUT],
        reference, sample,
        sharding=lambda params: sharding(tuple(sorted(params.items()))),
    )  # fmt: skip


def register(pattern: Pattern, *, default: bool = False) -> Pattern:
    """Makes a pattern known by its name, for ``patterns="name"``.

    Args:
        pattern: Made with `rewriter.pattern`.
        default: Whether it joins the default set, for later traces.

    Raises:
        PatternError: If it is not a pattern.
        DuplicateName: If another pattern has its name.

    Example:
        >>> import rewriter
        >>> try:
        ...     rewriter.register("shares")
        ... except rewriter.PatternError as error:
        ...     print("register got a str" in str(error))
        True
    """
    if not isinstance(pattern, Pattern):
        raise PatternError(
            f"register got a {type(pattern).__name__}",
            wanted="a function decorated with @rewriter.pattern",
            where=caller(),
        )
    registry().add_op(pattern.op)
    registry().add_pattern(pattern.name, pattern)
    for made in pattern.kernels:
        registry().add_kernel(made)
    if default:
        registry().add_default(pattern.name)
    return pattern
