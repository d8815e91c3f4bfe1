"""Turns, their order, rotation of inputs, the deadline; with programs that count."""

from __future__ import annotations

import time

import jax.numpy as jnp
import pytest

from rewriter import _jax
from rewriter.hardware import conditions, profile, timing


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


PROFILE = """
planes { name: "/host:CPU" lines { name: "python"
  events { metadata_id: 1 duration_ps: 9000000000 } }
  event_metadata { key: 1 value { id: 1 name: "main" } } }
planes { name: "/device:TPU:0"
  lines { name: "Steps" events { metadata_id: 1 duration_ps: 8000000000 } }
  lines { name: "XLA Modules"
    events { metadata_id: 1 duration_ps: 3000000000 }
    events { metadata_id: 2 offset_ps: 4000000000 duration_ps: 1000000000 } }
  lines { name: "XLA Ops"
    events { metadata_id: 3 duration_ps: 2500000000 } }
  event_metadata { key: 1 value { id: 1 name: "jit_a(123)" } }
  event_metadata { key: 2 value { id: 2 name: "jit_b(456)" } }
  event_metadata { key: 3 value { id: 3 name: "fusion.1" } } }
planes { name: "/device:TPU:1"
  lines { name: "XLA Modules" events { metadata_id: 1 duration_ps: 3500000000 } }
  event_metadata { key: 1 value { id: 1 name: "jit_a(123)" } } }
"""


def test_a_tpus_time_is_read_from_its_profile():
    """By hand after the profiler's form: nobody ran it on a TPU yet."""
    from jax.profiler import ProfileData

    read = lambda text: profile.of_profile(ProfileData.from_text_proto(text))
    seconds, names = read(PROFILE)
    assert seconds == pytest.approx(4e-3)  # of the core that worked longer
    assert names == ("jit_a(123)", "jit_b(456)")
    seconds, names = read(PROFILE.replace("XLA Modules", "Something Else"))
    assert seconds == pytest.approx(2.5e-3)  # of operations, without programs
    assert names == ("fusion.1",)
    with pytest.raises(_jax.NothingSeen, match="no plane of a TPU"):
        read(PROFILE.replace("/device:TPU:", "/device:GPU:"))


def test_what_the_profiler_does_not_see_the_clock_measures(monkeypatch):
    monkeypatch.setattr(timing, "method", lambda: "profiler")
    log = []
    program = Counting("a", log)
    (found,) = timing.measure([program], [(jnp.int32(0),)], 2, turn_s=0)
    assert found.method == "wall clock"  # this profile has no TPU
    seen = lambda run: (run(), (2.0, ("jit_a",)))[1]
    monkeypatch.setattr(profile, "seconds", seen)
    (found,) = timing.measure([program], [(jnp.int32(0),)], 2)
    assert (found.seconds, found.method) == ((2.0, 2.0), "profiler")
    assert found.kernels == ("jit_a",)


def test_clock_and_driver(monkeypatch, tmp_path):
    assert (
        conditions.parsed("") == conditions.parsed("error\n") == conditions.Conditions()
    )
    fake = tmp_path / "nvidia-smi"
    fake.write_text('#!/bin/sh\necho "$1" >&2\necho "1755, 570.86.15"\necho "0, 1"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(conditions, "_program", lambda: str(fake))
    assert conditions.now() == conditions.Conditions(1755, "570.86.15")
    monkeypatch.setattr(conditions, "_program", lambda: None)
    assert conditions.now() == conditions.Conditions()
    monkeypatch.setattr(conditions, "_program", lambda: str(tmp_path))  # not a program
    assert conditions.now() == conditions.Conditions()
