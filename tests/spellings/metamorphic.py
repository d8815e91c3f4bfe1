"""Random mutations of all spellings, against the rewriter.

A mutation that keeps the meaning must keep the match. After one that changes
it, either nothing is found, or the rewritten program still gives the numbers
of the mutated one. With ``--gradients`` the mutated programs are those of results
and gradients, and a match is one with its backward. In full, with the result stored:

    python -m tests.spellings.metamorphic --count 2000 \\
        --out tests/bench/results/metamorphic.json
    python -m tests.spellings.metamorphic --count 2000 --gradients \\
        --out tests/bench/results/metamorphic_gradients.json

One of them alone, by its number, with its program and what the report says of it:

    python -m tests.spellings.metamorphic --number 467 --only keeping
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from tests.spellings import check, mutate
from tests.spellings.check import Case
from tests.spellings.corpus import SPELLINGS
from tests.spellings.spelling import Spelling

TOLERANCE = 10.0
"""Mutated programs are worse conditioned than what people write."""


@dataclass
class Outcome:
    """What came of many mutations.

    Attributes:
        tried: How many mutations were made.
        kept: Still found.
        lost: No longer found.
        agreed: Found after a change of meaning, with the right numbers.
        skipped: Numbers not compared: the mutated program gives none, or sums that
            overflow.
        failures: Mutation to what went wrong.
    """

    tried: int = 0
    kept: int = 0
    lost: int = 0
    agreed: int = 0
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Mutant:
    """A mutated spelling.

    Attributes:
        name: The spelling and the edits.
        spelling: What was mutated.
        case: The mutant.
        original: The function without the edits.
        backward: Whether a site counts only with its backward.
        results: With `backward`, how many outputs are results and not gradients.
    """

    name: str
    spelling: Spelling
    case: Case
    original: Callable
    backward: bool
    results: int = 0

    def without_gradients(self) -> Case:
        """The case whose gradients are not compared."""
        if not self.backward:
            return replace(self.case, gradients=False)
        fn, count = self.case.fn, self.results
        return replace(self.case, fn=lambda *args: fn(*args)[:count])


def with_gradients(spelling: Spelling) -> tuple[Callable, tuple]:
    """Results and gradients of a spelling, and arguments: floats and cotangents."""
    args = spelling.args()
    where = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]

    def outputs(*floats: jax.Array) -> list[jax.Array]:
        full = list(args)
        for i, a in zip(where, floats, strict=True):
            full[i] = a
        leaves = jax.tree.leaves(spelling.fn(*full))
        return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

    def step(*given: jax.Array) -> tuple:
        floats, cotangents = given[: len(where)], given[len(where) :]
        out, back = jax.vjp(outputs, *floats)
        return out, back(list(cotangents))

    floats = [args[i] for i in where]
    rng = np.random.default_rng(0)
    cotangents = [
        jnp.asarray(rng.normal(size=x.shape), x.dtype)
        for x in jax.eval_shape(outputs, *floats)
    ]
    return step, (*floats, *cotangents)


def mutants(
    kind: str, numbers: Iterable[int], seed: int = 0, gradients: bool = False
) -> Iterator[Mutant]:
    """The random mutants of some numbers; `kind` is "keeping" or "changing".

    With `gradients` they are mutants of programs that return gradients too.
    """
    usable = [s for s in SPELLINGS if s.count and (s.gradients or not gradients)]
    programs: dict[str, tuple] = {}
    for i in numbers:
        rng = np.random.default_rng([seed, i])
        spelling = usable[int(rng.integers(len(usable)))]
        if spelling.name not in programs:
            fn, args = spelling.fn, spelling.args()
            if gradients:
                fn, args = with_gradients(spelling)
            closed = mutate.program(fn, args)
            results = jax.eval_shape(fn, *args)
            first = len(results[0]) if gradients else 0
            programs[spelling.name] = fn, args, closed, first
        original, args, closed, first = programs[spelling.name]
        texts = []
        # Meaning is kept through any number of edits; one change is enough.
        for _ in range(int(rng.integers(1, 4)) if kind == "keeping" else 1):
            edit, text = (
                mutate.keeping(closed, rng, first)
                if kind == "keeping"
                else mutate.changing(closed, rng)
            )
            closed = mutate.edited(closed, edit)
            texts.append(text)
        fn, text = mutate.as_function(closed), "; ".join(texts)
        name = f"{i} {spelling.name}: {text}"
        tolerance = TOLERANCE * check.GRADIENT / check.FORWARD
        case = Case(name, fn, args, spelling.op, spelling.gradients, TOLERANCE)
        if gradients:
            case = replace(case, gradients=False, tolerance=tolerance)
        yield Mutant(name, spelling, case, original, gradients, first)


def found(mutant: Mutant, fn: Callable) -> tuple[list, str]:
    """The sites there are, and what went wrong inside the rewriter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rewriter.RewriterWarning)
        report = rewriter.explain(fn)(*mutant.case.args)
    sites = [
        s
        for s in report.sites
        if s.op == mutant.case.op and (s.backward or not mutant.backward)
    ]
    return sites, "; ".join(map(str, report.failures))


def run_keeping(
    count: int, seed: int = 0, numbers: int = 10, gradients: bool = False
) -> Outcome:
    """Mutations that keep the meaning; the numbers of one in `numbers` as well.

    Spellings that are not found without a mutation are not held against it.
    """
    outcome = Outcome()
    before: dict[str, int] = {}
    compared = []
    for i, mutant in enumerate(mutants("keeping", range(count), seed, gradients)):
        spelling, case = mutant.spelling, mutant.case
        if spelling.name not in before:
            sites, _ = found(mutant, mutant.original)
            before[spelling.name] = len(sites)
        outcome.tried += 1
        sites, failure = found(mutant, case.fn)
        if failure or len(sites) < before[spelling.name]:
            outcome.lost += 1
            lost = f"found {len(sites)}, was {before[spelling.name]}"
            outcome.failures[mutant.name] = failure or lost
        else:
            outcome.kept += 1
            if i % numbers == 0 and sites:
                compared.append(case)
    outcome.agreed = len(compared)
    for name, text in check.disagreements(compared).items():
        outcome.agreed -= 1
        outcome.failures[name] = text
    return outcome


def run_changing(count: int, seed: int = 0, gradients: bool = False) -> Outcome:
    """Mutations that change the meaning."""
    outcome = Outcome()
    compared = []
    for mutant in mutants("changing", range(count), seed, gradients):
        outcome.tried += 1
        sites, failure = found(mutant, mutant.case.fn)
        if failure:
            outcome.failures[mutant.name] = failure
        elif not sites:
            outcome.lost += 1
        else:
            outcome.kept += 1
            # In rows without a key a large finite fill absorbs the scores, whose
            # gradient then is an artefact of rounding.
            empty = any("empty_rows" in dict(s.params) for s in sites)
            compared.append(mutant.without_gradients() if empty else mutant.case)
    outcome.agreed = len(compared)
    cases = {case.name: case for case in compared}
    for name, text in check.disagreements(compared, finite=True).items():
        outcome.agreed -= 1
        if text == check.NOT_FINITE or check.right(cases[name]):
            outcome.skipped += 1
        else:
            outcome.failures[name] = text
    return outcome


def summary(keep: Outcome, change: Outcome) -> str:
    """One line."""
    return (
        f"keeping: {keep.kept} of {keep.tried} still found; "
        f"changing: {change.lost} of {change.tried} no longer found, "
        f"{change.agreed} found with the right numbers, "
        f"{change.skipped} give no finite numbers; "
        f"{len(keep.failures) + len(change.failures)} failures"
    )


def kinds(failures: dict[str, str]) -> Counter:
    """How many failures each kind of mutation has."""
    return Counter(name.split(": ")[1].split(" at ")[0] for name in failures)


def show(kind: str, number: int, seed: int, gradients: bool) -> None:
    """Prints one mutant, its program, and the report of it."""
    (mutant,) = mutants(kind, [number], seed, gradients)
    fn, args = mutant.case.fn, mutant.case.args
    print(mutant.name, jax.make_jaxpr(fn)(*args), sep="\n")
    for what in (mutant.original, fn):
        report = rewriter.explain(what)(*args)
        print(report, *report.sites, sep="\n")


def main() -> int:
    """Runs both, prints a summary, stores the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--only", choices=["keeping", "changing"])
    parser.add_argument("--number", type=int, help="show this one alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    if options.number is not None:
        kind = options.only or "keeping"
        show(kind, options.number, options.seed, options.gradients)
        return 0
    start = time.perf_counter()
    keep, change = Outcome(), Outcome()
    if options.only != "changing":
        keep = run_keeping(options.count, options.seed, gradients=options.gradients)
    if options.only != "keeping":
        change = run_changing(options.count, options.seed, options.gradients)
    seconds = time.perf_counter() - start
    for name, text in {**keep.failures, **change.failures}.items():
        print(f"{name}\n    {text}")
    print(f"jax {jax.__version__}, {seconds:.0f} s. {summary(keep, change)}")
    if options.out:
        record = {
            "command": "python3 -m tests.spellings.metamorphic"
            f" --count {options.count} --seed {options.seed}"
            + " --gradients"
            * options.gradients,
            "date": time.strftime("%Y-%m-%d"),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "seed": options.seed,
            "seconds": round(seconds),
            "summary": summary(keep, change),
            "keeping": asdict(keep),
            "changing": asdict(change),
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if keep.failures or change.failures else 0


if __name__ == "__main__":
    sys.exit(main())
