"""Turns, their order, rotation of inputs, the deadline; with programs that count."""

from __future__ import annotations

import time

import jax.numpy as jnp
import pytest

from rewriter import _jax, timing


class Counting:
    """A program that keeps what it was called with."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __call__(self, x):
        self.log.append((self.name, int(x)))
        return x


def calls(turns, sets=1, programs="ab", **options):
    """What was called, as turns of (program, its inputs in order)."""
    log = []
    inputs = [(jnp.int32(i),) for i in range(sets)]
    fakes = [Counting(name, log) for name in programs]
    found = timing.measure(fakes, inputs, turns, by="wall clock", turn_s=0, **options)
    runs = len(log) // (len(fakes) * len(found[0].seconds))
    split = [log[i : i + runs] for i in range(0, len(log), runs)]
    return found, [(turn[0][0], [i for _, i in turn]) for turn in split]


def test_turns_alternate_their_order():
    found, grouped = calls(3)
    assert [name for name, _ in grouped] == list("abbaab")
    assert [len(s.seconds) for s in found] == [3, 3]
    assert {s.method for s in found} == {"wall clock"}


def test_inputs_rotate_within_a_turn_and_between_turns():
    _, grouped = calls(4, sets=3, programs="a")
    for turn, (_, used) in enumerate(grouped):
        assert len(used) > 1
        assert used == [(turn + k) % 3 for k in range(len(used))]


def test_both_programs_get_the_same_inputs_in_a_turn():
    _, grouped = calls(2, sets=2)
    assert grouped[0][1] == grouped[1][1] != grouped[2][1] == grouped[3][1]


def test_no_turn_begins_after_the_deadline_but_the_first():
    found, grouped = calls(50, until=time.monotonic() - 1)
    assert [len(s.seconds) for s in found] == [1, 1]
    assert [name for name, _ in grouped] == ["a", "b"]


def test_a_turn_has_more_runs_while_there_is_time():
    log = []
    short = [Counting("a", log)]
    timing.measure(short, [(jnp.int32(0),)], 1, by="wall clock", turn_s=0)
    assert 1 < len(log) <= timing.IN_A_ROW
    log.clear()
    timing.measure(short, [(jnp.int32(0),)], 1, by="wall clock", turn_s=60)
    assert len(log) == timing.IN_A_ROW


@pytest.mark.parametrize(("inputs", "turns"), [([], 3), ([(1,)], 0)])
def test_nothing_to_measure(inputs, turns):
    with pytest.raises(ValueError, match="want one each"):
        timing.measure([lambda x: x], inputs, turns)


def test_device_time_is_the_sum_over_kernels(monkeypatch):
    def kernel_seconds(run):
        run()
        return [("first", 2.0), ("second", 0.5)]

    monkeypatch.setattr(_jax, "kernel_seconds", kernel_seconds)
    log = []
    inputs = [(jnp.int32(0),), (jnp.int32(1),)]
    (found,) = timing.measure([Counting("a", log)], inputs, 3, by="cupti")
    assert found.seconds == (2.5, 2.5, 2.5)
    assert found.kernels == ("first", "second")
    assert log == [("a", 0), ("a", 1), ("a", 0)]


def test_samples():
    found = timing.Samples((1.0, 2.0, 3.0, 4.0, 100.0), "wall clock")
    assert (found.median, found.minimum) == (3.0, 1.0)
    assert found.sigma == pytest.approx(1.4826)
    assert found.error == pytest.approx(1.2533 * 1.4826 / 5**0.5)
    both = found + timing.Samples((0.5,), "wall clock")
    assert both.minimum == 0.5
    assert len(both.seconds) == 6
