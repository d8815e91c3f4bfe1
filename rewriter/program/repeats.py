"""Finds where a program repeats itself: layers written one after the other.

A `Run` is a stretch of equations that occurs several times in a row: equal primitives
and parameters, and operands wired alike. In each turn, an equation reads a value of
this turn or of the turn before, or one that all turns share. Or it reads something of
its own, such as a layer's weights.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewriter import _jax

LEAST = 8
"""The fewest repetitions that are worth examining."""
SHORTEST = 12
"""The fewest equations of one turn."""
DEEP = 6
"""How many equations outside a run are compared to see that its turns' inputs are made
alike."""


class Numbered:
    """A jaxpr's variables as numbers: inputs below zero, results in order.

    Attributes:
        eqns: The equations.
        inputs: The inputs: number -1 is the first.
        results: The variables with numbers from zero on.
        number: Variable to number.
        first: For each equation, the number of its first result.
        maker: For each result, the position of its equation.
        constants: The number of inputs that are constants.
        codes: For each equation a number, equal if primitives and shapes are equal, and
            by chance for others.
        effects: Positions of equations with effects.
    """

    def __init__(self, jaxpr: Any):
        self.eqns = jaxpr.eqns
        self.inputs = [*jaxpr.constvars, *jaxpr.invars]
        self.constants = len(jaxpr.constvars)
        outs = [eqn.outvars for eqn in self.eqns]
        self.results: list[Any] = list(itertools.chain.from_iterable(outs))
        sizes = np.fromiter(map(len, outs), np.int64, len(outs))
        self.first = (np.cumsum(sizes) - sizes).tolist()
        self.maker = np.repeat(np.arange(len(outs)), sizes).tolist()
        shapes = [vs[0].aval.shape if vs else None for vs in outs]
        primitives = [eqn.primitive for eqn in self.eqns]
        hashes = map(hash, zip(primitives, shapes, strict=True))
        self.codes = np.fromiter(hashes, np.int64, len(outs))
        self.effects = [k for k, eqn in enumerate(self.eqns) if eqn.effects]
        self.codes[self.effects] = self.effects  # no run goes through them
        self.number = dict(zip(self.results, range(len(self.results)), strict=True))
        self.number.update((v, -1 - k) for k, v in enumerate(self.inputs))

    def variable(self, number: int) -> Any:
        """The variable of a number."""
        return self.results[number] if number >= 0 else self.inputs[-1 - number]


@dataclass(frozen=True, eq=False)
class Run:
    """A stretch of equations that occurs several times; each occurrence is a turn.

    Attributes:
        start: Position of the first equation.
        period: Equations of one turn.
        count: The number of turns.
        first: The number of the first result.
        outs: Results of one turn.
        reads: For each turn, the numbers that its equations read, in order.
        reader: For each column of ``reads``, the equation of a turn that it belongs to.
        own: Columns of ``reads`` with a different value in each turn, made neither by
            this turn nor by the one before.
        shared: Numbers that every turn reads.
        others: For each such column, the run and the position in its turns that make
            the values; None for inputs and values computed from inputs alike.
    """

    start: int
    period: int
    count: int
    first: int
    outs: int
    reads: np.ndarray
    reader: np.ndarray
    own: tuple[int, ...] = ()
    shared: frozenset[int] = frozenset()
    others: tuple[tuple[int, int] | None, ...] = ()

    @property
    def end(self) -> int:
        """The position after the last equation."""
        return self.start + self.period * self.count

    def turn_of(self, number: int) -> int:
        """The turn that makes a result; out of range for values outside the run."""
        return (number - self.first) // self.outs


def runs(program: Numbered) -> list[Run]:
    """Finds the runs of a program, in order, with checked references between them."""
    found: list[Run] = []
    aligned: set[int] = set()  # those whose turns stay as they are
    for start, period, count in sorted(_stretches(program.codes)):
        run = _run(program, start, period, count)
        run = run and _wired(program, run, found)
        if run is None:
            continue
        read = {o[0] for o in run.others if o is not None}
        if len(read) == 1:
            index = min(read)
            pair = _aligned_turns(
                program, found[index], run, found[:index], index in aligned
            )
            if pair is None:
                continue
            found[index], run = pair
            aligned |= {index, len(found)}
        found.append(run)
    return found


def ends_alike(program: Numbered, run: Run) -> bool:
    """Whether the last turn of a run is wired like those in the middle.

    Args:
        program: The program.
        run: A run that reads no other one.
    """
    own = list(run.own)
    steps = np.diff(run.reads[-3:], axis=0)
    same = steps[0] == steps[1]
    same[own] = True
    if not same.all():
        return False
    pairs = run.reads[-2:, own].T.tolist()
    return all(
        _alike(program, pair, DEEP) and pair[1] < run.first and pair[0] != pair[1]
        for pair in pairs
    )


def turns_read(run: Run, other: Run) -> np.ndarray:
    """By turn and column, the turn of another run that a run reads."""
    columns = [c for c, o in zip(run.own, run.others, strict=True) if o is not None]
    return (run.reads[:, columns] - other.first) // other.outs


def _aligned_turns(
    program: Numbered, first: Run, second: Run, before: Sequence[Run], fixed: bool
) -> tuple[Run, Run] | None:
    """Shifts the turns of two runs, so that each turn reads one turn of the other.

    Prefers the shift with the fewest values passed from turn to turn: not in the middle
    of what one kernel may compute. Among these it prefers turns that read neighbouring
    inputs, as the weights of one layer are.

    Args:
        program: The program.
        first: The run that is read.
        second: The run that reads it.
        before: The runs before the first.
        fixed: Whether the turns of the first stay as they are.
    """
    columns = [
        c for c, o in zip(second.own, second.others, strict=True) if o is not None
    ]
    turns = turns_read(second, first)[1]
    where = second.reads[1, columns] - first.first - turns * first.outs
    makers = np.array(program.maker[first.first : first.first + first.outs])
    step = makers[where] - first.start
    read = second.reader[columns]
    passed = _passed(program, first), _passed(program, second)
    leads = [0] if fixed else _shifts(passed[0], step)
    lates = np.array(_shifts(passed[1], read))
    later = read < lates[:, None]
    spread = lambda lead, late: _spread(first, lead) + _spread(second, late)
    ways: list[tuple[int, int, int, int]] = []
    for lead in leads:
        shifted = turns - (step < lead) - later
        alike = (shifted == shifted[:, :1]).all(1)
        ways += [
            (int(passed[0][lead] + passed[1][late]), spread(lead, late), lead, late)
            for late in lates[alike].tolist()
        ]
    for *_, lead, late in sorted(ways):
        wired = _wired(program, _rotated(program, first, lead), before)
        if wired is None:
            continue
        after = _wired(program, _rotated(program, second, late), [*before, wired])
        if after is not None:
            return wired, after
    return None


def _shifts(passed: np.ndarray, places: np.ndarray) -> list[int]:
    """Shifts of a run's turns: the best before, between and after some equations.

    Args:
        passed: By shift, the number of values that are passed.
        places: Positions of equations in a turn.
    """
    bounds = [0, *sorted({*(places + 1).tolist()} - {len(passed)}), len(passed)]
    return [
        lo + int(passed[lo:hi].argmin())
        for lo, hi in itertools.pairwise(bounds)
        if lo < hi
    ]


def _spread(run: Run, shift: int) -> int:
    """How far apart the inputs are that only one of the shifted turns reads."""
    columns = int((run.reader < shift).sum())
    one, other = (np.roll(run.reads[k : k + 2], -columns).reshape(-1) for k in (1, 2))
    size = run.reads.shape[1]
    own = one[:size][(one[:size] < 0) & (one[:size] != other[:size])]
    return int(np.ptp(own)) if own.size else 0


def _passed(program: Numbered, run: Run) -> np.ndarray:
    """By shift of the turns, how many values a turn reads from the one before."""
    last: dict[int, int] = {}
    for turn in (1, 2):  # a value is read in its turn or the next
        places = run.reader + (turn - 1) * run.period
        read = zip(run.reads[turn].tolist(), places.tolist(), strict=True)
        last |= {n: place for n, place in read if run.turn_of(n) == 1}
    passed = np.zeros(2 * run.period, np.int64)
    begin = run.start + run.period
    for number, place in last.items():
        passed[program.maker[number] - begin + 1 : place + 1] += 1
    return passed[: run.period] + passed[run.period :]


def _rotated(program: Numbered, run: Run, by: int) -> Run:
    """The run, with turns that begin some equations later."""
    if not by:
        return run
    columns = int((run.reader < by).sum())
    count, slots = run.count - 1, run.reads.shape[1]
    flat = run.reads.reshape(-1)[columns : columns + count * slots]
    start = run.start + by
    reader = (np.roll(run.reader, -columns) - by) % run.period
    return Run(
        start, run.period, count, program.first[start], run.outs,
        flat.reshape(count, slots), reader,
    )  # fmt: skip


def _stretches(codes: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(start, period, count) of stretches whose codes repeat, the largest first."""
    pending = [(0, len(codes))]
    while pending:
        lo, hi = pending.pop()
        best = _largest(codes[lo:hi])
        if best is None:
            continue
        start, period, count = best
        yield lo + start, period, count
        pending += [(lo, lo + start), (lo + start + period * count, hi)]


def _largest(codes: np.ndarray) -> tuple[int, int, int] | None:
    if len(codes) < LEAST * SHORTEST:
        return None
    order = np.argsort(codes, kind="stable")
    gaps = (order[1:] - order[:-1])[codes[order[1:]] == codes[order[:-1]]]
    periods, often = np.unique(gaps[gaps >= SHORTEST], return_counts=True)
    best, covered = None, 0
    for period in sorted(periods[np.argsort(-often)][:8].tolist()):
        differ = np.flatnonzero(codes[:-period] != codes[period:])
        edges = np.concatenate([[-1], differ, [len(codes) - period]])
        longest = int(np.argmax(np.diff(edges)))
        start, length = int(edges[longest]) + 1, int(np.diff(edges)[longest]) - 1
        count = length // period + 1
        if count >= LEAST and count * period > 1.02 * covered:
            best, covered = (start, period, count), count * period
    return best


def _run(program: Numbered, start: int, period: int, count: int) -> Run | None:
    """The part of a stretch whose turns equal the middle one, as a run."""
    eqns, middle = program.eqns, count // 2
    if any(start <= at < start + period * count for at in program.effects):
        return None
    good = [True] * count
    columns: list[list[int]] = []
    reader: list[int] = []
    for k in range(start, start + period):
        turns = eqns[k : k + period * count : period]
        found = _columns(program.number, turns, turns[middle], good)
        columns += found
        reader += [k - start] * len(found)
    low = middle - _length(good[middle::-1]) + 1
    high = middle + _length(good[middle:])
    if high - low < LEAST:
        return None
    begin = start + low * period
    first = program.first[begin]
    outs = program.first[begin + period] - first
    reads = np.array(columns, np.int64).T[low:high]
    return Run(begin, period, high - low, first, outs, reads, np.array(reader))


def _length(good: Sequence[bool]) -> int:
    """The number of good entries before the first bad one."""
    return good.index(False) if False in good else len(good)


def _columns(
    number: Mapping[Any, int], turns: Sequence[Any], like: Any, good: list[bool]
) -> list[list[int]]:
    """The operands of one equation in all turns; notes turns unlike the middle one."""
    operands = like.invars
    lists = [eqn.invars for eqn in turns]
    if not _all_alike(turns, lists, like):
        for turn, eqn in enumerate(turns):
            if not _all_alike((eqn,), (eqn.invars,), like):
                good[turn], lists[turn] = False, operands
    columns = []
    for atom, atoms in zip(operands, zip(*lists, strict=True), strict=True):
        if atom.__class__ is _jax.Var:
            try:
                column = list(map(number.get, atoms))
            except TypeError:  # literals have no hash
                column = [_number(number, a) for a in atoms]
            if None in column:
                good[:] = [g and n is not None for g, n in zip(good, column)]  # noqa: B905
                column = [0 if n is None else n for n in column]
            columns.append(column)
        else:
            for turn, other in enumerate(atoms):
                if other is not atom and not _same_literal(other, atom):
                    good[turn] = False
    return columns


def _all_alike(turns: Sequence[Any], lists: Sequence[Sequence[Any]], like: Any) -> bool:
    """Whether equations surely have one primitive and equal parameters."""
    try:
        same = [eqn.params for eqn in turns].count(like.params)
    except (TypeError, ValueError):  # arrays, of which nobody asks equality
        return False
    primitives = [eqn.primitive for eqn in turns].count(like.primitive)
    sizes = set(map(len, lists))
    return same == primitives == len(turns) and sizes == {len(like.invars)}


def _number(number: Mapping[Any, int], atom: Any) -> int | None:
    return number.get(atom) if atom.__class__ is _jax.Var else None


def _same_literal(a: Any, b: Any) -> bool:
    return a.__class__ is b.__class__ and _jax.same_literal(a, b)


def _equal(a: Any, b: Any) -> bool:
    """Whether two equations are equal up to their variables."""
    variable = _jax.Var
    if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
        return False
    for x, y in zip(a.invars, b.invars):  # noqa: B905 (a hot loop)
        if (x.__class__ is not variable or y.__class__ is not variable) and (
            not _same_literal(x, y)
        ):
            return False
    return same_params(a.params, b.params)


def same_params(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether parameters are known to be equal."""
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # arrays, of which nobody asks equality
        return False


def _wired(program: Numbered, run: Run, before: Sequence[Run]) -> Run | None:
    """The run with its columns classified; None if its turns are not wired alike.

    The first and last turns may be wired differently, since they have a neighbour that
    is no turn.
    """
    middle = run.reads[1:-1]
    steps = np.diff(middle, axis=0)
    moving = (steps == run.outs).all(0)
    still = (steps == 0).all(0)
    turns = (middle - run.first) // run.outs
    behind = np.arange(1, run.count - 1)[:, None] - turns
    near = ((behind == 0) | (behind == 1)).all(0) & (middle >= run.first).all(0)
    if (moving & ~near).any():
        return None  # reads a value of two turns before
    within = run.first + run.outs
    shared = {int(n) for n in middle[0, still]}
    if any(n >= within for n in shared):
        return None
    own = tuple(np.flatnonzero(~moving & ~still).tolist())
    others = []
    for column in own:
        found = _other(program, run.reads[1:-1, column], before)
        if found is False:
            return None
        others.append(found)
    carried = np.flatnonzero(moving & (behind == 1).all(0))
    for column in carried.tolist():  # types are the same again by induction
        types = [program.variable(n).aval for n in run.reads[1:3, column].tolist()]
        if types[0] != types[1]:
            return None
    return dataclasses.replace(
        run, own=own, shared=frozenset(shared), others=tuple(others)
    )


def _other(
    program: Numbered, numbers: np.ndarray, before: Sequence[Run]
) -> tuple[int, int] | bool | None:
    """The origin of a column's values; False if they are not made alike."""
    for k, run in enumerate(before):
        end = run.first + run.outs * run.count
        if (numbers >= run.first).all() and (numbers < end).all():
            places = (numbers - run.first) % run.outs
            return (k, int(places[0])) if (places == places[0]).all() else False
    return None if _alike(program, numbers.tolist(), DEEP) else False


def _alike(program: Numbered, numbers: Sequence[int], depth: int) -> bool:
    """Whether values are inputs, or computed from inputs by equal equations."""
    if all(n == numbers[0] for n in numbers):
        return True
    like = program.variable(numbers[0]).aval
    if any(program.variable(n).aval != like for n in numbers):
        return False
    if all(n < 0 for n in numbers):  # a constant's numbers may have been used
        return all(-1 - n >= program.constants for n in numbers)
    if depth == 0 or any(n < 0 for n in numbers):
        return False
    makers = [program.maker[n] for n in numbers]
    eqns = [program.eqns[m] for m in makers]
    if len({n - program.first[m] for n, m in zip(numbers, makers, strict=True)}) > 1:
        return False
    if any(e.effects or not _equal(eqns[0], e) for e in eqns):
        return False
    operands = zip(*(e.invars for e in eqns), strict=True)
    return all(
        _alike(program, [program.number[a] for a in atoms], depth - 1)
        for atoms in operands
        if atoms[0].__class__ is _jax.Var
    )
