"""What the ranges of positions say about comparisons, checked at every position."""

from __future__ import annotations

import itertools
import random

import pytest

from rewriter.algebra.normal_form import FALSE, TRUE, Algebra, OverBudget, Poly
from rewriter.algebra.normal_form.boolean import _cofactors, _expand

N = 6


class Positions:
    """A number x that is read, and positions i and j of axes of size `N`."""

    def __init__(self) -> None:
        self.alg = Algebra()
        self.x = self.alg.of_atom(self.alg.atom("leaf", "x", ()))
        self.index = self.alg.new_index(N)
        self.i, self.j = self.alg.iota(self.index), self.alg.iota(self.alg.new_index(N))

    def form(self, x: int, i: int, j: int, c: int) -> Poly:
        out = self.alg.const(c)
        for k, p in ((x, self.x), (i, self.i), (j, self.j)):
            out = self.alg.add(out, p, k)
        return out

    def claim(self, x: int, i: int, j: int, c: int) -> int:
        return self.alg.compare("ge", self.form(x, i, j, c), True)

    def holds(self, b: int, x: int, i: int, j: int) -> bool:
        """A boolean function where the number and the positions are known."""
        alg, values = self.alg, ((self.x, x), (self.i, i), (self.j, j))
        alg.work = 0
        support, table = alg.bools[b]
        row = 0
        for k, atom in enumerate(support):
            rest = alg.thaw(alg.defs[atom][1])
            for p, value in values:
                (term,) = p
                rest = alg.add(rest, alg.const(value), rest.pop(term, 0.0))
            row |= (alg.as_constant(rest) >= 0) << k
        return bool(table >> row & 1)


def test_a_key_before_a_number_says_that_it_is_positive():
    p = Positions()
    before, positive = p.claim(1, 0, -1, 0), p.claim(1, 0, 0, 0)
    assert p.alg.both(before, positive) == before
    assert p.alg.either(before, positive) == positive


def test_a_key_after_every_position_is_none():
    p = Positions()
    first, last = p.claim(0, 0, -1, 0), p.claim(1, 0, 0, -N)
    assert p.claim(0, 0, -1, N - 1) == TRUE
    assert p.alg.both(first, p.claim(0, 0, 1, -1)) == FALSE
    assert p.alg.both(last, p.claim(-1, 0, 1, 0)) == FALSE  # x >= N and j >= x


def test_one_of_two_claims_holds():
    p = Positions()
    assert p.alg.either(p.claim(1, 0, 0, 0), p.claim(-1, 0, 1, 0)) == TRUE


def test_what_holds_here_holds_anywhere():
    p = Positions()
    here = p.claim(1, 1, -1, 0)
    anywhere = p.alg.any_over(here, [p.index])
    assert anywhere not in (TRUE, here)
    assert p.alg.both(here, anywhere) == here
    assert p.alg.either(here, anywhere) == anywhere
    assert p.alg.both(p.alg.negate(anywhere), here) == FALSE


def test_what_holds_here_may_not_hold_elsewhere():
    p = Positions()
    here, stronger = p.claim(1, 1, -1, 0), p.claim(1, 1, -1, -2)
    few = p.alg.new_index(N - 1)  # of fewer positions
    sides = p.alg.add(p.form(1, 0, -1, 0), p.alg.iota(few))
    among_few = p.alg.any_over(p.alg.compare("ge", sides, True), [few])
    negated = p.alg.any_over(p.alg.negate(here), [p.index])
    for other in (p.alg.any_over(stronger, [p.index]), among_few, negated):
        assert p.alg.both(here, other) not in (here, FALSE)


@pytest.mark.parametrize("steps", [(-1, 0, 0, 1), (-6, -3, -1, 0, 1, 3, 6)])
@pytest.mark.parametrize("seed", range(40))
def test_functions_are_what_their_claims_say(seed: int, steps: tuple[int, ...]):
    p, draw = Positions(), random.Random(seed)
    claims = [
        (*(draw.choice(steps) for _ in range(3)), draw.randint(-8, 8)) for _ in range(5)
    ]
    b, wanted = TRUE, lambda at: True
    for claim in claims:
        join, negated = draw.random() < 0.5, draw.random() < 0.5
        literal = p.claim(*claim)
        literal = p.alg.negate(literal) if negated else literal
        b = (p.alg.both if join else p.alg.either)(b, literal)

        def wanted(at, old=wanted, claim=claim, join=join, negated=negated):
            x, i, j = at
            here = (
                claim[0] * x + claim[1] * i + claim[2] * j + claim[3] >= 0
            ) != negated
            return (old(at) and here) if join else (old(at) or here)

    for at in itertools.product(range(-9, 16), range(N), range(N)):
        assert p.holds(b, *at) == wanted(at), at


def test_a_key_of_a_later_block_is_a_later_key():
    """In blocks of N: query N x + i sees key N b + j, and block x sees block b."""
    p = Positions()
    block = p.alg.iota(p.alg.new_index(3))
    key = p.alg.add(p.form(N, 1, -1, 0), block, -N)
    seen = p.alg.compare("ge", key, True)
    reached = p.alg.compare("ge", p.alg.add(p.form(1, 0, 0, 0), block, -1.0), True)
    assert p.alg.both(seen, reached) == seen
    before = p.alg.compare("ge", p.alg.add(p.form(1, 0, 0, -1), block, -1.0), True)
    assert p.alg.both(seen, before) == before


@pytest.mark.parametrize("x", range(-3, N + 3))
def test_a_position_is_moved_inside(x: int):
    p = Positions()
    mask = p.alg.both(p.claim(0, 1, -1, 0), p.claim(0, -1, 1, 3))  # j <= i <= j + 3
    moved = p.alg.moved_inside(mask, p.index, p.x, N)
    inside = min(max(x, 0), N - 1)
    for j in range(N):
        assert p.holds(moved, x, 0, j) == p.holds(mask, 0, inside, j)


def test_a_position_that_a_value_is_read_at_is_not_moved():
    p = Positions()
    value = p.alg.literal(p.alg.atom("leaf", "mask", (p.index,)))
    with pytest.raises(OverBudget):
        p.alg.moved_inside(value, p.index, p.x, N)


@pytest.mark.parametrize("n", range(1, 6))
def test_tables_of_fewer_and_of_more_literals(n: int):
    draw = random.Random(n)
    table, wider = draw.getrandbits(1 << n), tuple(range(n + 2))
    support = tuple(sorted(draw.sample(wider, n)))
    for k in range(n):
        low, high = _cofactors(table, k, n)
        for row in range(1 << n):
            rest = row & ((1 << k) - 1) | row >> (k + 1) << k
            part = high if row >> k & 1 else low
            assert part >> rest & 1 == table >> row & 1
    more = _expand(support, table, wider)
    for row in range(1 << len(wider)):
        small = sum((row >> a & 1) << k for k, a in enumerate(support))
        assert more >> row & 1 == table >> small & 1
