"""What the rewriter found in a function, and whether its numbers stayed.

Compiling is the slow part, so many functions are compiled as one program.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from rewriter.measure.oracle import in_float64
from tests.spellings.contexts import Context
from tests.spellings.oracle import ORACLES
from tests.spellings.spelling import Spelling

TOGETHER = 16
"""Functions compiled as one: 80 forward and gradient pairs took 106 s on two
CPU cores one by one and 16 s in groups of 16; larger groups are slower."""

FORWARD = 2e-5
GRADIENT = 2e-4
"""Largest float32 error, relative to the largest entry of the array."""


@dataclass(frozen=True)
class Case:
    """A function and its arguments, with the op forced into it.

    Attributes:
        name: What a failure is reported under.
        fn: The function.
        args: Its arguments.
        op: The operation to be swapped for its reference.
        gradients: Whether gradients are compared too.
        tolerance: Factor on the tolerances.
        spelling: If given, the original is also held against the oracle.
    """

    name: str
    fn: Callable
    args: tuple
    op: str
    gradients: bool = True
    tolerance: float = 1.0
    spelling: Spelling | None = None


def cases_of(spelling: Spelling) -> list[Case]:
    """The spelling with gradients, and once more with rows fully masked.

    Gradients are not compared where rows are empty: those of the original are
    often not numbers there.
    """
    name, fn, op = spelling.name, spelling.fn, spelling.op
    found = [Case(name, fn, spelling.args(), op, spelling.gradients, spelling=spelling)]
    if spelling.masked_rows is not None:
        args = spelling.args(empty=True)
        found.append(Case(f"{name} (empty)", fn, args, op, False, spelling=spelling))
    return found


def explain(fn: Callable, args: Sequence[jax.Array], op: str) -> list:
    """The sites of `op`; a failure inside the rewriter is an error."""
    report = rewriter.explain(fn)(*args)
    assert not report.failures, [str(f) for f in report.failures]
    sites = [s for s in report.sites if s.op == op]
    assert len(sites) == report.counts(repeats=False)[op]
    return sites


def operand_names(site) -> list[str]:
    """The operands that a site has, from its shapes."""
    return [word for word in site.shapes.split() if "[" not in word]


def wrong(spelling: Spelling) -> list[str]:
    """What is wrong with the sites found in a spelling; nothing if all is well."""
    with rewriter.config(assume=spelling.assume):
        sites = explain(spelling.fn, spelling.args(), spelling.op)
    if not spelling.count and not sites:
        return []
    if spelling.count is not None and len(sites) != spelling.count:
        return [f"found {len(sites)}, expected {spelling.count}"]
    if spelling.count is None and sites[-1].form == "scored_attention":
        return []  # read as a function of scores, whose parameters are others
    # Of several sites the last one gives the output that the entry describes.
    return spelling.differences(dict(sites[-1].params), operand_names(sites[-1]))


def loss(fn: Callable, args: Sequence[jax.Array]) -> tuple[Callable, list[jax.Array]]:
    """A weighted sum of all float outputs, as a function of the float arguments."""
    where = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]

    def weighted(*floats: jax.Array) -> jax.Array:
        full = list(args)
        for i, a in zip(where, floats, strict=True):
            full[i] = a
        total = jnp.float32(0)
        for leaf in jax.tree.leaves(fn(*full)):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                weights = jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape)
                total += jnp.sum(leaf.astype(jnp.float32) * weights)
        return total

    return weighted, [args[i] for i in where]


def results(case: Case, fn: Callable) -> tuple:
    """Outputs and, where asked for, gradients."""
    out = fn(*case.args)
    if not case.gradients:
        return out, ()
    weighted, floats = loss(fn, case.args)
    return out, jax.grad(weighted, argnums=tuple(range(len(floats))))(*floats)


def forced(case: Case) -> Callable:
    """The function with every site of the op replaced by the op's reference."""
    assume = case.spelling.assume if case.spelling else ()
    return rewriter.optimize(
        case.fn, implementation={case.op: "reference"}, strict=True, assume=assume
    )


NOT_FINITE = "the original gives no finite numbers"


def disagreements(cases: Sequence[Case], finite: bool = False) -> dict[str, str]:
    """Case name to how the rewritten function differs from the original.

    Args:
        cases: What to compare.
        finite: Report originals with other than finite numbers as such.
    """
    found: dict[str, str] = {}
    for start in range(0, len(cases), TOGETHER):
        found.update(_compare(cases[start : start + TOGETHER], finite))
    return found


def _compare(group: Sequence[Case], finite: bool) -> dict[str, str]:
    swapped = [forced(c) for c in group]
    traced = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rewriter.RewriterWarning)
        for case, fn in zip(group, swapped, strict=True):
            try:
                jax.eval_shape(lambda c=case, fn=fn: results(c, fn))
            except Exception as error:  # reported with the name, others go on
                traced[case.name] = f"{type(error).__name__}: {str(error)[:300]}"
    kept = [(c, f) for c, f in zip(group, swapped, strict=True) if c.name not in traced]

    @jax.jit
    def both():
        return [(results(c, c.fn), results(c, f)) for c, f in kept]

    for (case, _), (before, after) in zip(kept, both(), strict=True):
        text = _unlike_oracle(case, before[0])
        text = text or differs(before, after, case.tolerance)
        if text and finite and not _finite(before):
            text = NOT_FINITE
        if text:
            traced[case.name] = text
    return traced


def right(case: Case) -> bool:
    """Whether what the rewritten function gives otherwise is what float64 gives.

    Then a sum of the original overflowed.
    """
    leaves = lambda fn: jax.tree.leaves(results(case, fn))
    want, _ = in_float64(jax.make_jaxpr(lambda: leaves(case.fn))(), ())
    before, after = jax.jit(lambda: (leaves(case.fn), leaves(forced(case))))()
    return all(
        not differs(((), old), ((), new), case.tolerance)
        or not differs(((), np.asarray(wide, new.dtype)), ((), new), case.tolerance)
        for wide, old, new in zip(want, before, after, strict=True)
    )


def _unlike_oracle(case: Case, out: object) -> str:
    if case.spelling is None:
        return ""
    spelling = case.spelling
    operands = spelling.operands(case.args)
    if set(operands) != set(str(spelling.expect["operands"]).split()):
        return f"the entry binds {sorted(operands)}"
    truth = ORACLES[spelling.op](**operands, **spelling.params)
    text = _differ(truth, spelling.output(out), spelling.spread, 0.0)
    return text and f"original against the oracle: {text}"


def differs(before: tuple, after: tuple, tolerance: float = 1.0) -> str:
    """How outputs and gradients differ beyond the tolerance; empty if they do not."""
    limits = zip(("output", "gradient"), (FORWARD, GRADIENT), strict=True)
    for (kind, limit), a, b in zip(limits, before, after, strict=True):
        a, b = jax.tree.leaves(a), jax.tree.leaves(b)
        if len(a) != len(b):
            return f"{kind}s are {len(b)}, expected {len(a)}"
        # A gradient that is zero but for rounding is measured against the others.
        floor = 0.01 * max((_largest(np.asarray(x)) for x in a), default=0.0)
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            text = _differ(np.asarray(x), np.asarray(y), limit * tolerance, floor)
            if text:
                return f"{kind} {i}: {text}"
    return ""


def _finite(results: tuple) -> bool:
    floats = [
        np.asarray(x, np.float64)
        for x in jax.tree.leaves(results)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return all(np.isfinite(x).all() for x in floats)


def _largest(x: np.ndarray) -> float:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return 0.0
    return float(np.abs(np.nan_to_num(x.astype(np.float64))).max(initial=0.0))


def _differ(x: np.ndarray, y: np.ndarray, limit: float, floor: float) -> str:
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{y.dtype}{list(y.shape)}, expected {x.dtype}{list(x.shape)}"
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return "" if (x == y).all() else "integers differ"
    x, y = x.astype(np.float64), y.astype(np.float64)
    if not (np.isnan(x) == np.isnan(y)).all():
        return f"{np.isnan(y).sum()} are not numbers, expected {np.isnan(x).sum()}"
    error = np.abs(np.nan_to_num(x) - np.nan_to_num(y)).max(initial=0.0)
    largest = max(_largest(x), floor, 1e-6)
    return f"off by {error / largest:.2g} of the largest" * bool(
        error > limit * largest
    )


def lost(spelling: Spelling, dtype: object) -> str:
    """How many sites are missing with arguments of this dtype; empty if none."""
    if spelling.count is None:
        return ""
    with rewriter.config(assume=spelling.assume):
        count = len(explain(spelling.fn, spelling.args(dtype), spelling.op))
    return f"found {count}, expected {spelling.count}" * (count != spelling.count)


def lost_in(context: Context, spelling: Spelling) -> str:
    """How many sites are missing in this context; empty if none."""
    fn, args = context.wrap(spelling.fn, spelling.args())
    with rewriter.config(assume=spelling.assume):
        count = len(explain(fn, args, spelling.op))
    missing = context.exact and count != spelling.count
    return f"found {count}, expected {spelling.count}" * missing


def case_in(context: Context, spelling: Spelling) -> Case:
    """The spelling in this context."""
    fn, args = context.wrap(spelling.fn, spelling.args())
    gradients = spelling.gradients and context.gradients
    return Case(f"{spelling.name} in {context.name}", fn, args, spelling.op, gradients)
