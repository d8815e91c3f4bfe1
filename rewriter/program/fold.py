"""Shortens a program of many equal layers to one of a few.

`fold` leaves most turns of a program's runs out. Values that a removed turn reads from
the rest become results; values that the rest reads from it become inputs. The short
program is a program of its own, so that whatever is proved of it holds for all values
of those inputs. It is rewritten like any other. `unfold` then writes the missing turns
like one that was left in, if that one and the one before it were rewritten alike. Their
equations, down to the inputs, equal those of every missing turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rewriter import _jax
from rewriter.program.alike import written_alike
from rewriter.program.repeats import Numbered, Run, ends_alike, runs, turns_read

WORTH = 300
"""The fewest equations that are worth leaving out."""
BEHIND = 4
"""The number of turns kept after those left out: two to compare, and their
neighbours."""
FEWEST = 2
"""The same without the neighbours. Results of the one in front are inputs to the first
of the two; results of the second are read by what follows the run. If both turns are
rewritten alike nevertheless, it does not matter who makes values and who reads them. So
it is unless sites lie across two turns."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The turns of a run that are left out.

    Attributes:
        run: The run.
        out: Those turns, in order.
        like: The model that they are written like; it is compared with the turn before
            it.
    """

    run: Run
    out: range
    like: int

    @property
    def end(self) -> int:
        """The position after the last equation that is left out."""
        return self.run.start + self.run.period * self.out.stop


@dataclass(frozen=True, eq=False)
class Folded:
    """A program with turns left out.

    Attributes:
        whole: The program.
        short: The program without those turns, with inputs and results in their place.
        program: The whole program's variables as numbers.
        cuts: The turns that are left out.
        kept: By position in the short program, that
            in the whole one.
        results: The results of the whole program that the short one has, in order.
        behind: How many turns of each run are kept after those left out.
    """

    whole: Any
    short: Any
    program: Numbered
    cuts: tuple[Cut, ...]
    kept: tuple[int, ...]
    results: tuple[int, ...]
    behind: int = BEHIND

    def turn(self, position: int) -> tuple[int, int] | None:
        """(cut, turn) of an equation of the short program, if it belongs to a run."""
        at = self.kept[position]
        for k, cut in enumerate(self.cuts):
            if cut.run.start <= at < cut.run.end:
                return k, (at - cut.run.start) // cut.run.period
        return None

    def times(self, position: int) -> int:
        """How many equations of the whole program one of the short one represents."""
        place = self.turn(position)
        if place is None or place[1] != self.cuts[place[0]].like:
            return 1
        return 1 + len(self.cuts[place[0]].out)

    def where(
        self,
        position: int,
        turns: int,
        index: int,
        here: str,
        source: Callable[[Any], str] = _jax.source_of,
    ) -> str:
        """The user's line of an equation some turns away from one of the short program.

        Args:
            position: The equation in the short program.
            turns: How many turns away.
            index: The cut whose turns they are.
            here: The user's line of the equation itself.
            source: Returns the line of an equation.
        """
        at = self.kept[position]
        eqn = self.program.eqns[at]
        twin = self.program.eqns[at + turns * self.cuts[index].run.period]
        same = eqn.source_info.traceback == twin.source_info.traceback
        return here if same or _jax.call_kind(eqn) else source(twin)


def fold(closed_jaxpr: Any, behind: int = BEHIND) -> Folded | None:
    """Removes most turns of a program; None if it has too few.

    Args:
        closed_jaxpr: The program.
        behind: How many turns to keep after those left out, at least `FEWEST`. It is
            `BEHIND` where a run reads another one, as gradients do.
    """
    if len(closed_jaxpr.eqns) < WORTH:
        return None
    closed_jaxpr = written_alike(closed_jaxpr)
    program = Numbered(closed_jaxpr)
    found = runs(program)
    if any(o is not None for run in found for o in run.others):
        behind = BEHIND
    if behind == FEWEST and not all(ends_alike(program, run) for run in found):
        behind = FEWEST + 1
    cuts = _cuts(found, behind)
    if sum(len(c.out) * c.run.period for c in cuts) < WORTH:
        return None
    eqns, first = program.eqns, [*program.first, len(program.results)]
    gone = np.zeros(len(eqns), bool)
    made = np.ones(len(program.results), bool)  # in the short program
    read: list[np.ndarray] = []
    for cut in cuts:
        run, out = cut.run, cut.out
        lo, hi = (run.start + k * run.period for k in (out.start, out.stop))
        gone[lo:hi] = True
        made[first[lo] : first[hi]] = False
        read.append(run.reads[out.start : out.stop].reshape(-1))
    kept = tuple(np.flatnonzero(~gone).tolist())
    numbers = np.concatenate(read)
    given = np.zeros(len(program.results), bool)  # to the turns that are left out
    given[numbers[numbers >= 0]] = True
    variable, number = _jax.Var, program.number
    more = dict.fromkeys(
        a
        for k in kept
        for a in eqns[k].invars
        if a.__class__ is variable and number[a] >= 0 and not made[number[a]]
    )
    handed = [program.results[n] for n in np.flatnonzero(given & made).tolist()]
    outs = closed_jaxpr.outvars
    results = tuple(
        k
        for k, v in enumerate(outs)
        if _jax.is_literal(v) or number[v] < 0 or made[number[v]]
    )
    short = _jax.with_equations(
        closed_jaxpr,
        [eqns[k] for k in kept],
        [*(outs[k] for k in results), *handed],
        tuple(more),
    )
    return Folded(closed_jaxpr, short, program, tuple(cuts), kept, results, behind)


def _cuts(found: Sequence[Run], behind: int) -> list[Cut]:
    """The turns to leave out of runs, and the same turns of runs that read them."""
    cuts: dict[int, Cut] = {}  # by run
    mirrored: set[int] = set()
    for index, run in enumerate(found):
        read = {o[0] for o in run.others if o is not None}
        if not read:
            like = run.count - (1 if behind == FEWEST else 2)
            cut = Cut(run, range(1, run.count - behind), like)
        else:
            cut = _mirrored(run, found, cuts, read)
            if cut is None:
                continue
            (other,) = read
            if other not in mirrored:
                cuts[other] = _covered(cuts[other], cut)
            mirrored.add(other)
        cuts[index] = cut
    return list(cuts.values())


def _covered(read: Cut, cut: Cut) -> Cut:
    """A cut without turns that are read, at its ends, by turns that are left in."""
    of = turns_read(cut.run, read.run)[:, 0].tolist()
    turns = [of[k] for k in cut.out]
    return replace(read, out=range(min(turns), max(turns) + 1))


def _mirrored(
    run: Run, found: Sequence[Run], cuts: Mapping[int, Cut], read: set[int]
) -> Cut | None:
    """The turns of a run that read left-out turns of another run."""
    if len(read) > 1 or not read <= cuts.keys():
        return None
    other = cuts[next(iter(read))]
    turns = turns_read(run, other.run)
    if (turns[1:-1] != turns[1:-1, :1]).any():
        return None
    of = turns[:, 0].tolist()
    out = [k for k in range(1, run.count - 1) if of[k] in other.out]
    like = [k for k in range(1, run.count - 1) if of[k] in (other.like - 1, other.like)]
    if not out or len(like) != 2 or out != list(range(out[0], out[-1] + 1)):
        return None
    if like[1] != like[0] + 1 or {like[0] - 1, like[1] + 1} & set(out):
        return None
    return Cut(run, range(out[0], out[-1] + 1), like[1])
