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

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np

from rewriter import _jax, kernel
from rewriter.canonicalize import NeedSplit
from rewriter.errors import PatternError, caller
from rewriter.finder import Finder
from rewriter.graph import Node
from rewriter.normal_form import OverBudget
from rewriter.op import OUT, Op
from rewriter.reading import Operand, Reading, Refused, operand
from rewriter.registry import registry
from rewriter.sieve import Step
from rewriter.verdict import YES, Verdict

TRIALS = 400
FAMILIES = (
    {"sin", "cos"}, {"erf", "erfc"}, {"exp", "exp2", "logistic", "tanh"},
    {"log", "log1p"}, {"rsqrt", "sqrt", "pow"}, {"concatenate", "stack", "pad"},
    {"reduce_max"},
    {"dot_general"}, {"abs"}, {"select_n", "max", "min", "clamp"}, {"reduce_sum"},
    {"div"}, {"mul"}, {"add", "sub"},
)  # fmt: skip


@dataclass(frozen=True)
class Scalar:
    """A parameter that is a number written in the program."""


def scalar() -> Scalar:
    """Returns the declaration of a numeric parameter, read off the program."""
    return Scalar()


@dataclass(frozen=True)
class Candidate:
    """What a `Pattern.requires` check sees: a proved place.

    Attributes:
        shapes: Shape by operand name.
        dtypes: Dtype by operand name.
        params: The parameters read off.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, Any]
    params: Mapping[str, Any]


@dataclass(eq=False)
class Pattern:
    """A function to find, its kernels and its checks; made by `pattern`.

    Attributes:
        op: The op it stands for; the function is its reference.
        params: Declared parameters.
        anchors: Primitives at which a search begins.
        needs: Primitives that every program with a place has as well.
    """

    op: Op
    params: Mapping[str, Scalar]
    anchors: frozenset[str]
    kernels: tuple[kernel.Kernel, ...] = ()
    checks: tuple[Callable[[Candidate], Verdict], ...] = ()
    where: str = ""
    needs: frozenset[str] = frozenset()
    steps: ClassVar[tuple[Step, ...]] = ()
    _forms: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The pattern's name, which is the op's."""
        return self.op.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.op.reference(
            **dict(zip(self.op.operands, args, strict=False)), **kwargs
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
        steps: Callable[..., Mapping[str, int]] | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Adds a kernel: a function of the operands, and of the params it names.

        Args:
            platform: Where it runs: ``cpu``, ``cuda``, ``rocm``, ``tpu``, or several.
            version: Raised whenever its results or speed may change.
            supports: Says which shapes and dtypes it takes.
            backward: As `rewriter.kernel.Kernel.backward`; the gradient of the
                pattern's function if absent.
            space: The configs to choose from by measuring; the function then takes
                ``config=``, one of them or None.
            backward_space: The same for `backward`.
            saves_out: Whether `backward` reads ``out``; otherwise it gets None, and
                the result is not kept for it.
            steps: As `rewriter.kernel.Kernel.steps`.
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
            made = kernel.from_function(
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
            self.kernels = (*self.kernels, made)
            return function

        return add

    # -------------------------------------------------------------- matching
    def propose(self, find: Finder, anchor: Node) -> Iterator[Reading]:
        """Readings whose operands and parameters fit; the search proves them."""
        trials = itertools.count()
        for value in self._results(find, anchor):
            if find.done(self.name, value):
                return
            for reading in self._readings(find, value):
                if next(trials) > TRIALS:
                    return
                yield reading
                if find.done(self.name, value):
                    return

    def _results(self, find: Finder, anchor: Node) -> list[int]:
        seen, queue = dict.fromkeys(anchor.outs), list(anchor.outs)
        while queue and len(seen) < 40:
            for node in find.graph.users(queue.pop(0)):
                if find.local(node) or node.prim == "dot_general":
                    for out in node.outs:
                        if out not in seen:
                            seen[out] = None
                            queue.append(out)
        rank = len(_letters(self.op.dims[OUT]))
        return [v for v in sorted(seen) if len(find.graph.shape(v)) >= rank][:24]

    def _readings(self, find: Finder, value: int) -> Iterator[Reading]:
        region, numbers = _region(find, value)
        shape = find.graph.shape(value)
        for sizes in _bound_sizes(self.op.dims[OUT], shape):
            for names in self._operands(find, region, sizes):
                yield from self._read(find, value, names, numbers)

    def _operands(self, find: Finder, region: list[int], sizes: dict[str, Any]):
        """Assignments of region values to operands with sizes that agree."""
        order = self.op.required

        def extend(k: int, chosen: dict[str, int], sizes: dict[str, Any]):
            if k == len(order):
                yield dict(chosen)
                return
            for v in region:
                if v in chosen.values():
                    continue
                for more in _bound_sizes(
                    self.op.dims[order[k]], find.graph.shape(v), sizes
                ):
                    yield from extend(k + 1, {**chosen, order[k]: v}, more)

        yield from itertools.islice(extend(0, {}, sizes), TRIALS)

    def _read(
        self, find: Finder, value: int, names: dict[str, int], numbers: list[float]
    ) -> Iterator[Reading]:
        alg = find.algebra
        inside = frozenset(
            out
            for node in _between(find, value, set(names.values()))
            if node.prim == "dot_general"
            for out in node.outs
        )
        sides = frozenset((v, k) for v in inside for k in (0, 1))
        ev = find.evaluator(
            value, inside=inside, full_sides=sides, names={v: v for v in names.values()}
        )
        args = ev.indices(value)
        try:
            form = ev.poly(value, args)
        except NeedSplit:  # a result in pieces; the search compares each
            form = None
        except OverBudget:
            return
        if form is not None:
            leaves = {alg.defs[a][1] for a in alg.poly_leaves(form)}
            if leaves - set(names.values()):
                return
        operands: dict[str, Operand] = {}
        for name, v in names.items():
            at = ev.indices(v)
            operands[name] = operand(
                alg.of_atom(alg.atom("leaf", v, at)),
                *((() if i is None else (i,)) for i in at),
            )
        groups = tuple(() if i is None else (i,) for i in args)
        for values in itertools.product(numbers, repeat=len(self.params)):
            params = dict(zip(self.params, values, strict=True))
            candidate = Candidate(
                {n: find.graph.shape(v) for n, v in names.items()},
                {n: find.graph.dtype(v) for n, v in names.items()},
                params,
            )
            if not all(check(candidate).ok for check in self.checks):
                continue
            yield Reading(
                self.name,
                alg,
                ev.place,
                value,
                args,
                form,
                groups,
                operands,
                params,
                evaluator=ev,
            )


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

    Raises:
        PatternError: If dims and function do not fit together; the message names
            the function's line.
    """
    if fn is None:
        return lambda fn: pattern(
            fn, dims=dims, params=params, name=name, sample=sample
        )
    label, where = name or fn.__name__, kernel.source_line(fn)
    operands, letters = _parsed(fn, label, dims, where)
    holes = dict(params or {})
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

    def reference(**given: Any) -> jax.Array:
        return fn(*(given[n] for n in operands), **{k: given[k] for k in holes})

    reference.__wrapped__ = fn  # type: ignore[attr-defined]
    op = Op(label, operands, operands, letters, reference, sample)
    anchors = _checked(op, fn, holes, where)
    return Pattern(op, holes, anchors, where=where)


def _parsed(fn: Any, label: str, dims: str, where: str):
    arguments = [
        p.name
        for p in inspect.signature(fn).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if "->" not in dims:
        raise PatternError(
            f"{label}: dims={dims!r}",
            wanted='operands and result, "x: ... d -> ... d"',
            where=where,
        )
    left, right = dims.split("->")
    parts = [p.strip() for p in left.split(",")]
    named: dict[str, str] = {}
    for k, part in enumerate(parts):
        has_name = ":" in part
        key, text = (
            part.split(":")
            if has_name
            else (arguments[k] if k < len(arguments) else f"operand {k}", part)
        )
        named[key.strip()] = " ".join(text.split())
    for key in named:
        if key not in arguments:
            raise PatternError(
                f"{label}: dims name {key!r}, function has no argument {key}",
                wanted=f"the arguments {', '.join(arguments)}",
                where=where,
            )
    missing = [a for a in arguments if a not in named]
    if missing:
        raise PatternError(
            f"{label}: argument {missing[0]} has no axes in dims",
            wanted=f'"{missing[0]}: ..." in dims',
            where=where,
        )
    return tuple(arguments), {**named, OUT: " ".join(right.split())}


def _checked(
    op: Op, fn: Any, holes: Mapping[str, Scalar], where: str
) -> frozenset[str]:
    """Traces the function at small sizes; returns where its search begins."""
    sizes: dict[str, Any] = {"...": (2, 3)}
    primes = iter((6, 10, 14, 22, 26, 34, 38, 46, 58, 62))
    for text in op.dims.values():
        for letter in _letters(text):
            if letter not in sizes:
                sizes[letter] = next(primes)
    shapes = {n: _shape(op.dims[n], sizes) for n in op.dims}
    structs = [jax.ShapeDtypeStruct(shapes[n], np.float32) for n in op.operands]
    numbers = {k: 0.5 + 0.25 * i for i, k in enumerate(holes)}
    try:
        traced = jax.make_jaxpr(lambda *a: fn(*a, **numbers))(*structs)
    except Exception as error:
        raise PatternError(
            f"{op.name}: the function does not take operands of these axes: {error}",
            wanted=", ".join(f"{n}: {op.dims[n]}" for n in op.operands),
            where=where,
        ) from error
    if len(traced.out_avals) != 1 or traced.out_avals[0].shape != shapes[OUT]:
        got = [a.shape for a in traced.out_avals]
        raise PatternError(
            f"{op.name}: the function gives {got}",
            where=where,
            wanted=f"one array {op.dims[OUT]!r}, here {shapes[OUT]}",
        )
    if traced.effects:
        raise PatternError(
            f"{op.name}: the function has effects {sorted(map(str, traced.effects))}",
            wanted="a pure function",
            where=where,
        )
    present = Counter(_primitives(traced))
    for family in FAMILIES:
        if any(p in present for p in family):
            return frozenset(family)
    raise PatternError(
        f"{op.name}: the function computes nothing",
        wanted="arithmetic to look for",
        where=where,
    )


def _primitives(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        body = _jax.call_body(eqn)
        if body is not None:
            yield from _primitives(body)
        else:
            yield eqn.primitive.name


def _letters(text: str) -> list[str]:
    return [x for x in text.split() if x != "..."]


def _shape(text: str, sizes: Mapping[str, Any]) -> tuple[int, ...]:
    out: list[int] = []
    for x in text.split():
        out.extend(sizes[x] if x == "..." else (sizes[x],))
    return tuple(out)


def _bound_sizes(
    text: str, shape: tuple[int, ...], sizes: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """The sizes of letters that a shape fixes; nothing if they disagree."""
    words = text.split()
    letters = _letters(text)
    lead = len(shape) - len(letters)
    if lead < 0 or (lead and "..." not in words):
        return
    out = dict(sizes or {})
    named: list[tuple[str, Any]] = list(zip(letters, shape[lead:], strict=True))
    if "..." in words:
        named.append(("...", tuple(shape[:lead])))
    for letter, n in named:  # a letter may be there twice
        if out.setdefault(letter, n) != n:
            return
    yield out


def _region(find: Finder, value: int) -> tuple[list[int], list[float]]:
    """Values above a result, nearest first, and the numbers written there."""
    g = find.graph
    seen, queue, numbers = [], [value], {}
    while queue and len(seen) < 60:
        node = g.node_of(queue.pop(0))
        if node is None or not (find.local(node) or node.prim == "dot_general"):
            continue
        for i in node.ins:
            c = g.scalar(i)
            if c is not None:
                numbers.setdefault(float(c))
            elif i not in seen:
                seen.append(i)
                queue.append(i)
    return seen, [x for x in numbers if math.isfinite(x)][:12]


def _between(find: Finder, value: int, leaves: set[int]) -> Iterator[Node]:
    seen, queue = {value}, [value]
    while queue and len(seen) < 100:
        current = queue.pop()
        node = find.graph.node_of(current)
        if node is None or current in leaves:
            continue
        yield node
        for i in node.ins:
            if i not in seen:
                seen.add(i)
                queue.append(i)


def register(pattern: Pattern, *, default: bool = False) -> Pattern:
    """Makes a pattern known by its name, for ``patterns="name"``.

    Args:
        pattern: Made with `rewriter.pattern`.
        default: Whether it joins the default set, for later traces.

    Raises:
        PatternError: If it is not a pattern.
        DuplicateName: If another pattern has its name.
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


__all__ = ["YES", "Candidate", "Pattern", "Refused", "pattern", "scalar"]
