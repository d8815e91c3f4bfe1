"""Forms of blocks: positions in them, sums over their steps, shared denominators."""

from __future__ import annotations

import pytest

from rewriter.algebra.normal_form import TRUE, Algebra

pytestmark = pytest.mark.once


def test_a_position_in_a_block_does_not_decide() -> None:
    """64 i + r < 64 x + 64 says i <= x; 64 i + r < 64 x + 63 says more."""
    alg = Algebra()
    i, r, x = alg.new_index(4), alg.new_index(64), alg.new_index(4)
    blocks = alg.add(alg.iota(x), alg.iota(i), -1.0)
    form = alg.add(alg.scale(blocks, 64.0), alg.iota(r), -1.0)
    known = alg.compare("ge", blocks, True)
    assert alg.compare("ge", alg.add(form, alg.const(63)), True) == known
    assert alg.compare("ge", alg.add(form, alg.const(62)), True) != known


def test_a_step_that_is_known_is_not_summed_over() -> None:
    """Σ_i [a = i] y_i is y_a, and [a < 2] y_a where there are two steps."""
    alg = Algebra()
    a = alg.new_index(4)
    for size in (4, 2):
        i = alg.new_index(size)
        term = {(alg.same_index(a, i), ((alg.atom("leaf", 1, (i,)), 1),)): 1.0}
        inside = alg.compare(
            "ge", alg.add(alg.const(size - 1), alg.iota(a), -1.0), True
        )
        assert (inside == TRUE) == (size == 4)
        wanted = {(inside, ((alg.atom("leaf", 1, (a,)), 1),)): 1.0}
        assert alg.summed_where_equal(term, i) == wanted


def test_numerators_add_up_to_their_denominator() -> None:
    """x z / (x + y) + y z / (x + y) is z; with 2 y z instead of y z it is not."""
    alg = Algebra()
    x, y, z = (alg.of_atom(alg.atom("leaf", k, ())) for k in range(3))
    below = alg.power(alg.add(x, y), -1)
    over = lambda p: alg.mul(alg.mul(p, z), below)
    assert alg.cancelled(alg.add(over(x), over(y))) == z
    other = alg.add(over(x), alg.scale(over(y), 2.0))
    assert alg.cancelled(other) == other


def test_a_sum_implies_a_condition_beside_it() -> None:
    """[i <= 2] Σ_j [j + 8 i < 24] y_j is the sum alone, for blocks of 8."""
    alg = Algebra()
    i, j = alg.new_index(4), alg.new_index(8)
    position = alg.add(alg.scale(alg.iota(i), 8.0), alg.iota(j))
    inner = alg.compare("ge", alg.add(alg.const(23), position, -1.0), True)
    beside = alg.compare("ge", alg.add(alg.const(2), alg.iota(i), -1.0), True)
    narrow = alg.compare("ge", alg.add(alg.const(1), alg.iota(i), -1.0), True)
    total = alg.sum_over({(inner, ((alg.atom("leaf", 1, (j,)), 1),)): 1.0}, [j])
    for flag in (beside, narrow):
        form = alg.mul(alg.of_bool(flag), total)
        assert (alg.without_implied(form) == total) == (flag == beside)
