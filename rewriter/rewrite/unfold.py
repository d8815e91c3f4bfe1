"""Applies one layer's rewrite to its identical layers."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewriter import _jax
from rewriter.program.equations import live
from rewriter.program.fold import Cut, Folded
from rewriter.program.repeats import Run, same_params, turns_read
from rewriter.rewrite.origins import Origins

Labels = Mapping[tuple[int, int], Sequence[str]]
"""The labels of a turn's sites in order, by cut and turn."""
Read = Callable[[int], Any]
"""Maps a turn to the operand that an equation reads there."""


class TurnsDiffer(Exception):
    """The turns that were left in were not rewritten alike."""


def unfold(folded: Folded, short: Any, origins: Origins, labels: Labels) -> Any:
    """Returns the whole program, rewritten.

    Args:
        folded: The program with turns left out.
        short: The rewritten short program.
        origins: The origins of its equations.
        labels: The labels of the sites in all turns.

    Raises:
        TurnsDiffer: If missing turns cannot be written like those that were left in.
    """
    return _Unfolding(folded, short, origins, labels).program()


@dataclass(frozen=True, eq=False)
class _Turns:
    """The turns of one run, and the model that they are written like.

    Attributes:
        index: The index of its cut.
        run: The run.
        like: The turn that is the model.
        start: The first turn that was left out.
        own: Values that only the model reads: number to column of the run.
        others: Other runs that it reads, and which of their turns, by its own turn.
    """

    index: int
    run: Run
    like: int
    start: int
    own: Mapping[int, int]
    others: tuple[tuple[int, list[int]], ...]


@dataclass(frozen=True, eq=False)
class _Plan:
    """One equation of the model, and how other turns' equations are made from it.

    Attributes:
        eqn: The equation.
        reads: How to find its operands in another turn.
        at: Its position in the whole program.
        numbers: The numbers of its results that the whole program has.
        label: The label of the splice it belongs to, if any.
        unchanged: Whether the other turns keep it as the whole program has it.
    """

    eqn: Any
    reads: tuple[Read, ...]
    at: int
    numbers: tuple[int | None, ...]
    label: str | None
    unchanged: bool


@dataclass(eq=False)
class _Stretch:
    """Consecutive equations of the whole program, either all unchanged or all changed.

    Attributes:
        unchanged: Whether the other turns keep them as the whole program has them.
        plans: How to write each of them.
        start: The position of the first.
        stop: The position after the last.
    """

    unchanged: bool
    plans: list[_Plan]
    start: int
    stop: int


def _stretches(plans: Sequence[_Plan]) -> list[_Stretch]:
    out: list[_Stretch] = []
    for plan in plans:
        last = out[-1] if out else None
        if last and last.unchanged == plan.unchanged and last.stop == plan.at:
            last.plans.append(plan)
            last.stop += 1
        else:
            out.append(_Stretch(plan.unchanged, [plan], plan.at, plan.at + 1))
    return out


class _Unfolding:
    """Writes the missing turns of a rewritten program.

    A result of a turn usually exists in the whole program, under a number shifted by as
    many turns. `made` holds the results that exist only in the rewritten program.
    """

    def __init__(self, folded: Folded, short: Any, origins: Origins, labels: Labels):
        self.folded, self.short, self.origins = folded, short, origins
        self.whole = folded.program
        self.labels = labels
        self.label_at = {
            label: (*place, k)
            for place, names in labels.items()
            for k, label in enumerate(names)
            if label
        }
        self.instead = origins.instead
        self.position: dict[Any, int] = {}  # of makers, in the whole
        self.turns: dict[tuple[int, int], list[Any]] = {}
        self.place: dict[Any, tuple[int, int]] = {}
        for eqn in short.eqns:
            at = origins.position[id(eqn)]
            place = folded.turn(at)
            for var in eqn.outvars:
                self.position[var] = folded.kept[at]
                if place is not None:
                    self.place[var] = place
            if place is not None:
                self.turns.setdefault(place, []).append(eqn)
        self.origin: dict[Any, int] = {}
        for var, atom in self.instead.items():
            if atom.__class__ is _jax.Var and var in self.whole.number:
                self.origin.setdefault(atom, self.whole.number[var])
        more = len(short.invars) - len(folded.whole.invars)
        self.given = set(short.invars[len(short.invars) - more :])
        self.like: dict[Any, Any] = {}  # a compared turn's variable to the model's
        self.made: dict[int, dict[int, dict[Any, Any]]] = {}  # by cut and turn
        self.sources: dict[tuple[int, str], Any] = {}  # by position and model's label
        self.read: set[Any] = set()  # by written turns, of variables that are left in
        self.handed: set[Any] = set()  # by those, to variables that are left in

    def program(self) -> Any:
        """The whole program."""
        folded, short = self.folded, self.short
        written: list[tuple[int, list[Any]]] = []
        for index, cut in enumerate(folded.cuts):
            start = cut.run.start + cut.out.start * cut.run.period
            written.append((start, self._turns(index, cut)))
        changed = {}
        for var in self.given:
            atom = self._now(self.whole.number[var])
            if atom is not var:
                changed[var] = atom
        outs = list(folded.whole.outvars)
        for k, atom in zip(folded.results, short.outvars, strict=False):
            literal = _jax.is_literal(atom)
            outs[k] = atom if literal else changed.get(atom, atom)
        for k in set(range(len(outs))) - set(folded.results):
            outs[k] = self._now(self.whole.number[outs[k]])
        left = [_jax.reading(e, changed) for e in short.eqns]
        start_of = {
            id(e): folded.kept[self.origins.position[id(old)]]
            for e, old in zip(left, short.eqns, strict=True)
        }
        eqns, read = live(left, [*outs, *self.read])
        known = folded.whole.constvars, folded.whole.invars, self.handed
        if read.difference(*known):
            raise TurnsDiffer("a variable is read that no equation makes")
        starts = [start_of[id(e)] for e in eqns]
        for start, turns in reversed(written):
            at = bisect.bisect_left(starts, start)
            eqns[at:at] = turns
        return _jax.with_equations(folded.whole, eqns, outs)

    # ------------------------------------------------------------- one run
    def _turns(self, index: int, cut: Cut) -> list[Any]:
        """The equations of a run's turns that were left out."""
        model = self.turns.get((index, cut.like), [])
        before = self.turns.get((index, cut.like - 1), [])
        _check_alike(before, model)
        for a, b in zip(before, model, strict=True):
            for u, v in zip(a.outvars, b.outvars, strict=True):
                self.like[u] = self.like[v] = v
        read = {o[0] for o in cut.run.others if o is not None}
        here = _Turns(
            index, cut.run, cut.like,
            cut.run.start + cut.out.start * cut.run.period,
            self.own_columns(index, cut.like, cut.like - 1),
            tuple((k, self._turns_read(cut, k)) for k in sorted(read)),
        )  # fmt: skip
        self.made[index] = {}
        plans = [self._plan(here, a, b) for a, b in zip(before, model, strict=True)]
        stretches = _stretches(plans)
        eqns: list[Any] = []
        for turn in cut.out:
            self.made[index][turn] = {}
            places = (turn - here.like) * here.run.period
            starts = turn * here.run.period + here.run.start == here.start
            for part in stretches:
                if part.unchanged and not starts:
                    lo, hi = part.start + places, part.stop + places
                    eqns += self.whole.eqns[lo:hi]
                else:
                    eqns += [self._written(here, turn, plan) for plan in part.plans]
        return eqns

    def _written(self, here: _Turns, turn: int, plan: _Plan) -> Any:
        """An equation of the model, written for another turn."""
        by = turn - here.like
        shift, at = by * here.run.outs, plan.at + by * here.run.period
        results, made = self.whole.results, self.made[here.index][turn]
        outs = []
        for n, v in zip(plan.numbers, plan.eqn.outvars, strict=True):
            if n is not None:
                outs.append(results[n + shift])
            else:
                made[v] = v if _jax.is_drop(v) else _jax.new_var(v.aval)
                outs.append(made[v])
        ins = [read(turn) for read in plan.reads]
        if plan.label is not None:
            source = self._source(here, plan, turn, at)
        else:
            source = self.whole.eqns[at].source_info
        return plan.eqn.replace(invars=ins, outvars=outs, source_info=source)

    def _made(self, index: int, var: Any) -> Read:
        """The atom in a written turn for a variable of the run's model."""
        made, number = self.made[index], self.whole.number.get(var)
        if number is None:
            return lambda turn: made[turn][var]
        results, cut = self.whole.results, self.folded.cuts[index]
        outs = cut.run.outs
        first = number - cut.like * outs
        return lambda turn: results[first + turn * outs]

    def _plan(self, here: _Turns, before: Any, eqn: Any) -> _Plan:
        """How to write an equation of the model in other turns."""
        pairs = list(zip(before.invars, eqn.invars, strict=True))
        reads = tuple(self._read(here, u, v) for u, v in pairs)
        at = self.folded.kept[self.origins.position[id(eqn)]]
        number = self.whole.number.get
        unchanged = eqn is self.whole.eqns[at] and all(
            self._reads_own_value(here, v) for _, v in pairs
        )
        return _Plan(
            eqn, reads, at, tuple(map(number, eqn.outvars)),
            self.origins.label.get(id(eqn)), unchanged,
        )  # fmt: skip

    def _reads_own_value(self, here: _Turns, v: Any) -> bool:
        """Whether all turns but the first read the program's own value there."""
        if _jax.is_literal(v):
            return True
        number = self.whole.number.get(v)
        if number is None or self.place.get(v) in (
            (here.index, here.like),
            (here.index, here.like - 1),
        ):
            return number is not None
        column = here.own.get(number)
        return column is None or bool((here.run.reads[:, column] < 0).all())

    def _turns_read(self, cut: Cut, index: int) -> list[int]:
        """The turn of another run that each turn of a run reads."""
        return turns_read(cut.run, self.folded.cuts[index].run)[:, 0].tolist()

    def own_columns(self, index: int, turn: int, before: int) -> dict[int, int]:
        """Values that only one turn of a run reads: number to column.

        Raises:
            TurnsDiffer: If this turn reads one value where others read different ones.
        """
        cut, found = self.folded.cuts[index], {}
        run = cut.run
        for column in run.own:
            number = int(run.reads[turn, column])
            if number == run.reads[before, column] or number in run.shared:
                raise TurnsDiffer(
                    "values that only one turn reads cannot be distinguished"
                )
            known = found.setdefault(number, column)
            if known != column:
                rows = slice(cut.out.start, cut.out.stop)
                if (run.reads[rows, known] != run.reads[rows, column]).any():
                    raise TurnsDiffer("a turn reads one value where others read two")
        return found

    def _read(self, here: _Turns, u: Any, v: Any) -> Read:
        """How to find one operand: `v` in the model, `u` in the turn before it."""
        ways = (
            self._literal, self._inside, self._carried, self._its_own,
            self._input_of_other, self._result_of_other, self._passed_to_other,
            self._shared,
        )  # fmt: skip
        for way in ways:
            read = way(here, u, v)
            if read is not None:
                return read
        raise TurnsDiffer("an operand has no source that all turns share")

    def _literal(self, here: _Turns, u: Any, v: Any) -> Read | None:
        if not (_jax.is_literal(u) and _jax.is_literal(v) and _jax.same_literal(u, v)):
            return None
        return lambda turn: v

    def _inside(self, here: _Turns, u: Any, v: Any) -> Read | None:
        """A result of the same turn."""
        if self.place.get(v) != (here.index, here.like) or self.like.get(u) is not v:
            return None
        return self._made(here.index, v)

    def _carried(self, here: _Turns, u: Any, v: Any) -> Read | None:
        """A result of the turn before."""
        if self.place.get(v) != (here.index, here.like - 1):
            return None
        number, first, outs = self._number(v), self._number(u), here.run.outs
        if number is None or first != number - outs:
            return None
        made, in_turn = self.made[here.index], self._made(here.index, self.like[v])

        def read(turn: int) -> Any:
            if turn - 1 in made:
                return in_turn(turn - 1)
            return self._now(number + (turn - here.like) * outs)

        return read

    def _its_own(self, here: _Turns, u: Any, v: Any) -> Read | None:
        """A value that every turn reads for itself alone."""
        column = here.own.get(self._number(v))
        reads = here.run.reads
        if column is None or self._number(u) != reads[here.like - 1, column]:
            return None
        return lambda turn: self._now(int(reads[turn, column]))

    def _input_of_other(self, here: _Turns, u: Any, v: Any) -> Read | None:
        """A value that a turn of another run reads, such as the layer's weights."""
        number, first = self._number(v), self._number(u)
        for index, of in here.others:
            reads = self.folded.cuts[index].run.reads
            at, before = of[here.like], of[here.like - 1]
            for column in self.folded.cuts[index].run.own:
                if reads[at, column] == number and reads[before, column] == first:
                    column = self.own_columns(index, at, before)[number]
                    return lambda turn: self._now(int(reads[of[turn], column]))
        return None

    def _result_of_other(self, here: _Turns, u: Any, v: Any) -> Read | None:
        """A result of a turn of another run."""
        model = self.like.get(v)
        if model is None or self.like.get(u) is not model:
            return None
        for index, of in here.others:
            if self.place[v] == (index, of[here.like]):
                if self.place[u] != (index, of[here.like - 1]):
                    return None
                made, in_turn = self.made[index], self._made(index, model)
                return lambda turn: in_turn(_known(made, of[turn]))
        return None

    def _passed_to_other(self, here: _Turns, u: Any, v: Any) -> Read | None:
        """A result that a turn of another run reads from the one before it."""
        number, first = self._number(v), self._number(u)
        if number is None or first is None:
            return None
        for index, of in here.others:
            at, before = of[here.like], of[here.like - 1]
            outs = self.folded.cuts[index].run.outs
            places = self.place.get(u), self.place.get(v)
            apart = number - first == (at - before) * outs
            if apart and places == ((index, before - 1), (index, at - 1)):
                return lambda turn: self._now(number + (of[turn] - at) * outs)
        return None

    def _shared(self, here: _Turns, u: Any, v: Any) -> Read | None:
        """A value computed before the turns that were left out."""
        position = self.position.get(v, -1)
        if u is not v or v in self.given or position >= here.start:
            return None
        self.read.add(v)
        return lambda turn: v

    # ------------------------------------------------------------- variables
    def _number(self, var: Any) -> int | None:
        """The number of a variable, or of the variable that it replaces."""
        number = self.whole.number.get(var)
        return self.origin.get(var) if number is None else number

    def _now(self, number: int) -> Any:
        """The atom that now holds a value of the whole program."""
        var = self.whole.variable(number)
        if number < 0:
            return var
        for index, cut in enumerate(self.folded.cuts):
            run = cut.run
            turn = run.turn_of(number)
            if turn in cut.out:
                twin = self.whole.variable(number + (cut.like - turn) * run.outs)
                atom = self.instead.get(twin, twin)
                if _jax.is_literal(atom):
                    return atom
                if self.place.get(atom) == (index, cut.like):
                    atom = self._made(index, atom)(_known(self.made[index], turn))
                    self.handed.add(atom)
                    return atom
                raise TurnsDiffer("a value is no longer computed")
        atom = self.instead.get(var, var)
        if not _jax.is_literal(atom):
            self.read.add(atom)
        return atom

    # ------------------------------------------------------------- equations
    def _source(self, here: _Turns, plan: _Plan, turn: int, at: int) -> Any:
        """The source info of an equation, under the label of its site in that turn."""
        key = at, plan.label
        found = self.sources.get(key)
        if found is None:
            label = self._label(here, plan, turn)
            found = _jax.scoped(self.whole.eqns[at].source_info, label)
            self.sources[key] = found
        return found

    def _label(self, here: _Turns, plan: _Plan, turn: int) -> str:
        """The label of a turn's site that corresponds to a site of the model."""
        index, at, nth = self.label_at[plan.label]
        of = dict(here.others).get(index, range(here.run.count))
        return self.labels[index, at + of[turn] - of[here.like]][nth]


def _known(known: Container[int], turn: int) -> int:
    """The turn, if it is written."""
    if turn not in known:
        raise TurnsDiffer("a turn of another run was left in")
    return turn


def _check_alike(before: Sequence[Any], model: Sequence[Any]) -> None:
    """Refuses two turns with unequal equations."""
    if len(before) != len(model):
        raise TurnsDiffer("a turn has more equations than the one before")
    for a, b in zip(before, model, strict=True):
        if (
            a.primitive is not b.primitive
            or len(a.invars) != len(b.invars)
            or list(map(_jax.is_drop, a.outvars)) != list(map(_jax.is_drop, b.outvars))
            or not same_params(a.params, b.params)
        ):
            raise TurnsDiffer(
                f"a turn has {b.primitive} where the one before has another"
            )
