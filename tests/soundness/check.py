"""Finds which programs of a list the rewriter changes.

Programs are compiled together, and compared with what rounding usually changes. Only
those that differ are compiled alone, to see what rounding changes in them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rewriter.errors import RewriterWarning
from tests.soundness import allowed, compare, passes, tolerance, values
from tests.soundness.passes import Joined
from tests.soundness.program import Program

Pass = Callable[[Joined, Sequence[Program]], Joined]

ATTENTION = (
    "mask", "operand", "score", "difference", "computed", "merge", "cache", "latent",
    "triangle",
)  # fmt: skip
"""Kinds of programs that are attention."""


@dataclass(frozen=True)
class Way:
    """A way to compute programs, as they are and rewritten.

    Attributes:
        name: What it is called.
        original: The original, of what programs compute.
        rewritten: The same of the rewritten programs.
    """

    name: str
    original: Callable[[Sequence[Program]], Joined]
    rewritten: Callable[[Sequence[Program]], Any]


def _plain(of: Pass) -> Callable[[Sequence[Program]], Joined]:
    return lambda programs: of(passes.joined(programs), programs)


FORWARD = Way(
    "forward",
    _plain(passes.forward),
    lambda programs: passes.rewritten(
        passes.forward(passes.joined(programs), programs)
    ),
)
GRAD_OF_REWRITTEN = Way(
    "grad(optimize(f))",
    _plain(passes.gradients),
    lambda programs: passes.gradients(
        passes.rewritten(passes.joined(programs)), programs
    ),
)
REWRITTEN_GRAD = Way(
    "optimize(grad(f))",
    _plain(passes.gradients),
    lambda programs: passes.rewritten(
        passes.gradients(passes.joined(programs), programs)
    ),
)
WAYS = (FORWARD, GRAD_OF_REWRITTEN, REWRITTEN_GRAD)


@dataclass(frozen=True)
class Finding:
    """A program that is computed otherwise.

    Attributes:
        program: Which.
        way: In which way of computing it.
        what: What differs, or what was raised.
    """

    program: Program
    way: str
    what: str

    def __str__(self) -> str:
        head = f"{self.program.kind} {self.program.seed}, {self.way}: {self.what}"
        return f"{head}\n{self.program.text}\n"


@dataclass(frozen=True)
class Outcome:
    """What comes of some programs.

    Attributes:
        findings: Those that are computed otherwise.
        replaced: Files of programs of which the forward pass has a kernel in it.
    """

    findings: tuple[Finding, ...]
    replaced: frozenset[str]


def check(programs: Sequence[Program], ways: Sequence[Way] = WAYS) -> Outcome:
    """Whether programs are computed the same in some ways."""
    given = [values.arguments(p) for p in programs]
    findings: list[Finding] = []
    replaced: frozenset[str] = frozenset()
    originals: dict[Any, Any] = {}
    alone: dict[Any, Original] = {}
    for way in ways:
        try:
            results, fast = _both(way, programs, given, originals)
        except Exception:
            findings += _each(way, programs, given, alone)
            continue
        replaced |= _replaced(fast) if way is FORWARD else frozenset()
        for p, own, before, after in zip(programs, given, *results, strict=True):
            if any(_differences(p, own, way, before, after)):
                findings += _alone(way, p, own, alone)
    return Outcome(tuple(findings), replaced)


def _both(
    way: Way, programs: Sequence[Program], given: Any, originals: dict[Any, Any]
) -> tuple[tuple[Any, Any], Any]:
    """Results of both, and the rewritten function."""
    kind = way is FORWARD
    if kind not in originals:
        originals[kind] = passes.compiled(way.original(programs))(given)
    fast = way.rewritten(programs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RewriterWarning)
        return (originals[kind], passes.compiled(fast)(given)), fast


def _replaced(fast: Any) -> frozenset[str]:
    sites = fast.report().sites
    return frozenset(s.where.split(":")[0] for s in sites if s.replaced)


@dataclass
class Original:
    """A program as written, compiled alone: both ways to take gradients share it.

    Attributes:
        of: Gives the run of a program.
        program: Which.
        own: Its arguments.
    """

    of: tolerance.RunOf
    program: Program
    own: Sequence[Any]

    @functools.cached_property
    def result(self) -> Sequence[Any] | None:
        """What it gives, or None if XLA cannot compile it as it was written."""
        try:
            run = self.of(self.program)
            return passes.compiled(run, as_usual=True)(self.own)
        except jax.errors.JaxRuntimeError:
            return None

    @functools.cached_property
    def others(self) -> tolerance.Variants:
        """What it gives when it is computed in other ways."""
        return tolerance.variants(self.of, self.program, self.own)

    @functools.cached_property
    def rounded(self) -> tolerance.Variants:
        """The same, also with every result off by its last bits."""
        return tolerance.with_rounding(self.others, self.of, self.program, self.own)

    @functools.cached_property
    def of_fixed_top(self) -> tolerance.Variants:
        """The same, also without gradients of maxima that are subtracted."""
        other = allowed.of_fixed_top(self.program)
        return tolerance.with_rounding(self.rounded, self.of, other, self.own)

    @functools.cached_property
    def by_total(self) -> tolerance.Variants:
        """The same, also with weights of attention by each row's log-sum-exp."""
        before = self.of_fixed_top
        other = allowed.by_total(self.program)
        if self.program.kind not in ATTENTION or other == self.program:
            return before
        return tolerance.with_rounding(before, self.of, other, self.own)

    @functools.cached_property
    def of_own_group(self) -> Sequence[Any]:
        """What it gives if no row meets the matrices of other groups."""
        return passes.compiled(self.of(allowed.of_own_group(self.program)))(self.own)

    @functools.cached_property
    def filled(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """What it gives for two fillings of the arguments that are not finite."""
        run = passes.compiled(self.of(self.program))
        a, b = (run(_filled(self.program, self.own, seed)) for seed in (1, 2))
        return a, b


def _each(
    way: Way, programs: Sequence[Program], given: Any, alone: dict[Any, Original]
) -> Iterator[Finding]:
    """Findings of programs that cannot be computed together."""
    for p, own in zip(programs, given, strict=True):
        yield from _alone(way, p, own, alone)


def _alone(
    way: Way, program: Program, own: Sequence[Any], alone: dict[Any, Original]
) -> Iterator[Finding]:
    """Findings of one program, which is compared by what rounding changes in it."""
    of = lambda p: lambda v: way.original([p])([v])[0]
    original = alone.setdefault((way is FORWARD, program), Original(of, program, own))
    before = original.result
    if before is None:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RewriterWarning)
            after = passes.compiled(way.rewritten([program]), as_usual=True)([own])[0]
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        yield Finding(program, way.name, f"{type(error).__name__}: {text[:300]}")
        return
    if not any(_differences(program, own, way, before, after)):
        return
    if way is not FORWARD and allowed.stable(program) != program:
        before = _nan_where_rows_overflow(before, after)
    ignored = _behind_masks(original, before, after)
    kinds = ("others", "rounded", "of_fixed_top", "by_total")  # each takes longer
    for variants in kinds[: 3 if way is FORWARD else 4]:
        others = getattr(original, variants)
        found = _differences(program, own, way, before, after, others, ignored)
        if not any(found):
            return
    names = [program.arguments[i].name for i in program.operands]
    for name, one in zip(names, found, strict=False):
        if one is not None:
            of = "" if way is FORWARD else f"gradient of {name} "
            yield Finding(program, way.name, f"{of}{one}")
            return


def _nan_where_rows_overflow(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Gradients in which NaN counts as equal, if some number of the original is NaN.

    A row of a softmax that overflows makes gradients of all its keys NaN in a kernel,
    and those of some in the original.
    """
    if all(np.isfinite(tolerance.numbers(x)).all() for x in before):
        return list(before)
    pairs = zip(before, after, strict=True)
    return [np.where(np.isnan(y), y, x).astype(x.dtype) for x, y in pairs]


def _differences(
    program: Program,
    own: Sequence[Any],
    way: Way,
    before: Sequence[Any],
    after: Sequence[Any],
    others: tolerance.Variants | None = None,
    ignored: Sequence[np.ndarray] | None = None,
) -> list[compare.Difference | None]:
    """What differs in each array of a result."""
    entries = program.entries and way is FORWARD
    found = []
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        floor = 0.0 if way is FORWARD else _floor(program, own, i)
        if others is None or ignored is None:
            allowed = tolerance.basic(a, program.eps, entries, floor)
            skipped = None
        else:
            allowed = tolerance.sensitive(a, program.eps, entries, floor, others, i)
            skipped = compare.borderline(a, others, i) | ignored[i]
            strict = way is FORWARD and program.kind in ATTENTION
            skipped |= tolerance.undetermined(a, others, i)
            skipped |= compare.in_range(a, b, others, i, program.eps, strict, floor)
        found.append(compare.difference(a, b, allowed, skipped))
    return found


def _floor(program: Program, own: Sequence[Any], which: int) -> float:
    """The magnitude of what cancels in gradients of queries and keys.

    Gradients of values are sums of weights times cotangents, which do not cancel where
    no weights are: they have no floor.
    """
    names = [program.arguments[i].name for i in program.operands]
    if program.kind not in ATTENTION or names[which] == "v":
        return 0.0
    sizes = [np.asarray(own[i], np.float64) for i in program.operands]
    largest = [np.max(abs(s[np.isfinite(s)]), initial=1.0) for s in sizes]
    return float(np.prod(np.minimum(largest, 1e60)))


def _behind_masks(original: Original, before: Any, after: Any) -> list[np.ndarray]:
    """Entries that differ only because zero times what is no number is none.

    The one exception: a kernel may skip a key that a mask hides, or matrices of other
    groups, and with it 0 * NaN. So entries may differ, if the original gives what the
    rewritten program does for any numbers in place of those that are not finite.
    """
    nothing = [np.zeros(np.shape(a), bool) for a in before]
    finite = all(np.isfinite(tolerance.numbers(v)).all() for v in original.own)
    if finite or original.program.kind not in (*ATTENTION, "ragged"):
        return nothing
    hidden = [
        _skipped(*(tolerance.numbers(x) for x in of))
        for of in zip(after, *original.filled, strict=True)
    ]
    if original.program.kind != "ragged":
        return hidden
    return [
        skipped | _near(tolerance.numbers(x), tolerance.numbers(y), 1e-3)
        for skipped, x, y in zip(hidden, after, original.of_own_group, strict=True)
    ]


def _skipped(after: np.ndarray, one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Entries that fillings do not change, and that are as they are with those."""
    return _near(one, two, 1e-4) & _near(after, two, 1e-3)


def _near(a: np.ndarray, b: np.ndarray, share: float) -> np.ndarray:
    """Where two are near each other, or neither is finite."""
    with np.errstate(invalid="ignore"):
        near = abs(a - b) <= share * abs(b) + 1e-5
    return near | ~(np.isfinite(a) | np.isfinite(b))


def _filled(program: Program, own: Sequence[Any], seed: int) -> list[Any]:
    """Arguments with numbers in place of what is not finite."""
    draw = np.random.default_rng(seed)

    def fill(v: Any) -> Any:
        finite = np.isfinite(np.asarray(v, np.float32))
        return v if finite.all() else np.where(finite, v, numbers(v))

    numbers = lambda v: draw.normal(size=v.shape).astype(v.dtype)
    return [fill(v) if i in program.operands else v for i, v in enumerate(own)]
