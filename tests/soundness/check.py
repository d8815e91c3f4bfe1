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
import jax.numpy as jnp
import numpy as np

from rewriter.errors import RewriterWarning
from tests.soundness import allowed, compare, passes, tolerance, values
from tests.soundness.passes import Joined
from tests.soundness.program import Program

Pass = Callable[[Joined, Sequence[Program]], Joined]
Filling = Callable[[np.ndarray, np.random.Generator], np.ndarray]

NORMS = ("norm", "group")
"""Kinds of programs that are norms."""
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


def _of_gradients(size: float) -> tuple[Way, Way]:
    """Both ways to take gradients, with cotangents that are multiplied by a number."""

    def gradients(run: Joined, programs: Sequence[Program]) -> Joined:
        return passes.gradients(run, programs, size)

    return (
        Way(
            "grad(optimize(f))",
            _plain(gradients),
            lambda programs: gradients(
                passes.rewritten(passes.joined(programs)), programs
            ),
        ),
        Way(
            "optimize(grad(f))",
            _plain(gradients),
            lambda programs: passes.rewritten(
                gradients(passes.joined(programs), programs)
            ),
        ),
    )


GRAD_OF_REWRITTEN, REWRITTEN_GRAD = _of_gradients(1.0)
LARGER = {way.name: way for way in _of_gradients(2.0**64)}
"""The same with cotangents so large that no product of small numbers vanishes."""
SMALL = 1e-30
"""Gradients below this may be made of products that vanish."""
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
    kind = way.name == FORWARD.name
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
    def of_chosen_fills(self) -> list[np.ndarray]:
        """What it gives if it chooses the fills that it adds; NaN where it does not.

        Only where that changes nothing for arguments that are finite: a row without
        keys has other gradients.
        """
        other = allowed.chosen(self.program)
        if other == self.program:
            return [np.full(np.shape(x), np.nan) for x in self.result or ()]
        run, finite = passes.compiled(self.of(other)), self.filled[0][0]
        given = _filled(self.program, self.own, fillings_at_random, 1)
        some = zip(run(self.own), run(given), finite, strict=True)
        return [
            np.where(_near(y, z, 1e-3), x, np.nan)
            for x, y, z in (map(tolerance.numbers, of) for of in some)
        ]

    @functools.cached_property
    def filled(self) -> list[tuple[Sequence[Any], Sequence[Any]]]:
        """What it gives for two fillings of the arguments that are not finite.

        Where numbers are sorted, there are two more that keep their order.
        """
        run = passes.compiled(self.of(self.program))
        fillings = [fillings_at_random, fillings_in_order]
        if not any("jnp.sort(" in line for line in self.program.lines):
            fillings.pop()
        both = lambda fill: tuple(
            run(_filled(self.program, self.own, fill, seed)) for seed in (1, 2)
        )
        return [both(fill) for fill in fillings]


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
    original = alone.setdefault(
        (way.name == FORWARD.name, program), Original(of, program, own)
    )
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
    if way.name != FORWARD.name and allowed.has_rows_that_overflow(program):
        before = _nan_where_rows_overflow(before, after)
    ignored = _behind_masks(original, before, after)
    kinds = ("others", "rounded", "of_fixed_top", "by_total")  # each takes longer
    for variants in kinds[: 3 if way.name == FORWARD.name else 4]:
        others = getattr(original, variants)
        found = _differences(program, own, way, before, after, others, ignored)
        if not any(found):
            return
    if _vanish(way, original, before, after, ignored):
        return
    names = [program.arguments[i].name for i in program.operands]
    for name, one in zip(names, found, strict=False):
        if one is not None:
            of = "" if way.name == FORWARD.name else f"gradient of {name} "
            yield Finding(program, way.name, f"{of}{one}")
            return


def _vanish(
    way: Way, original: Original, before: Any, after: Any, ignored: Any
) -> bool:
    """Whether gradients differ only since products on the way to them vanish.

    Numbers below 1e-38 are 0 in XLA's programs. Gradients are multiples of their
    cotangents: with one that is 2^64 times as large they are the same.
    """
    larger = LARGER.get(way.name)
    if larger is None:
        return False
    program, own, others = original.program, original.own, original.others
    small = [
        (abs(tolerance.numbers(a)) < SMALL) & (abs(tolerance.numbers(b)) < SMALL)
        for a, b in zip(before, after, strict=True)
    ]
    skipped = [x | y for x, y in zip(ignored, small, strict=True)]
    if any(_differences(program, own, way, before, after, others, skipped)):
        return False
    of = lambda p: lambda v: larger.original([p])([v])[0]
    again = Original(of, program, own)
    fast = passes.compiled(larger.rewritten([program]), as_usual=True)([own])[0]
    rest = [~x for x in small]
    results = again.result, fast
    return not any(_differences(program, own, larger, *results, again.others, rest))


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
    entries = program.entries and way.name == FORWARD.name
    found = []
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        floor = 0.0 if way.name == FORWARD.name else _floor(program, own, i)
        if others is None or ignored is None:
            allowed = tolerance.basic(a, program.eps, entries, floor)
            skipped = None
        else:
            allowed = tolerance.sensitive(a, program.eps, entries, floor, others, i)
            skipped = compare.borderline(a, others, i) | ignored[i]
            strict = way.name == FORWARD.name and program.kind in ATTENTION
            skipped |= tolerance.undetermined(a, others, i)
            if program.kind in NORMS:
                skipped |= tolerance.lost(a, b, others, i)
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
    rewritten program does for any numbers in place of those that are not finite; or if
    it does so where it chooses its fills, instead of adding them to hidden scores.
    """
    nothing = [np.zeros(np.shape(a), bool) for a in before]
    finite = all(np.isfinite(tolerance.numbers(v)).all() for v in original.own)
    if finite or original.program.kind not in (*ATTENTION, "ragged"):
        return nothing
    hidden = [
        np.logical_or.reduce([_skipped(*map(tolerance.numbers, (x, *y))) for y in of])
        for x, of in zip(after, _by_array(original.filled), strict=True)
    ]
    if original.program.kind != "ragged":
        return [
            skipped | (_near(tolerance.numbers(x), y, 1e-3) & np.isfinite(y))
            for skipped, x, y in zip(
                hidden, after, original.of_chosen_fills, strict=True
            )
        ]
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


def _by_array(fillings: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
    """Results of fillings, two of each, by the array that they are."""
    return [
        [(one[i], two[i]) for one, two in fillings] for i in range(len(fillings[0][0]))
    ]


def _filled(
    program: Program, own: Sequence[Any], fill: Filling, seed: int
) -> list[Any]:
    """Arguments with numbers in place of what is not finite."""
    draw = np.random.default_rng(seed)
    found = []
    for i, v in enumerate(own):
        x = np.asarray(jnp.asarray(v).astype(jnp.float32))
        finite = np.isfinite(x)
        filled = i in program.operands and not finite.all()
        found.append(
            np.where(finite, v, fill(x, draw).astype(v.dtype)) if filled else v
        )
    return found


def fillings_at_random(x: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Normal numbers."""
    return draw.normal(size=x.shape)


def fillings_in_order(x: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Numbers that sort as what is not finite does: equal ones by their place."""
    finite = x[np.isfinite(x)]
    least, most = finite.min(initial=0), finite.max(initial=0)
    step = draw.uniform(1, 4) / x.size
    up = step * np.arange(1, x.size + 1).reshape(x.shape)
    above = most + up + np.where(np.isnan(x), 5.0, 0.0)
    return np.where(x == -np.inf, least - 5.0 + up, above)
