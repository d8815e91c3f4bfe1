"""Copies between global and shared memory, done at the worst time."""

from __future__ import annotations

from typing import Any

from tests.support.kernels.simulated_gpu import machine


def copy_in(
    source: machine.Reference,
    target: machine.Reference,
    barrier: tuple[machine.Barriers, int],
    oob_mode: Any = None,
) -> None:
    place = target.view()
    if oob_mode is not None:
        assert place.shape == source.view().shape, "a copy reaches over the edge"
    place[...] = 0
    got = source.view()
    place[tuple(slice(0, size) for size in got.shape)] = got
    machine.arrive_at_barrier(barrier)


def begin_store(
    source: machine.Reference,
    target: machine.Reference,
    reduction_op: str | None = None,
    commit_group: bool = True,
) -> None:
    def run() -> None:
        place = target.view()
        assert list(source.shape) == target.sizes()
        new = source.view()[tuple(slice(0, size) for size in place.shape)]
        with machine.HERE.block.changed:
            place[...] = new if reduction_op is None else place + new

    machine.HERE.begun.append(run)
    if commit_group:
        commit_stores()


def commit_stores() -> None:
    """Makes one of the stores since the last time, to be waited for together."""
    together, machine.HERE.begun = machine.HERE.begun, []
    machine.HERE.stores.append(lambda: [run() for run in together] and None)


def wait_for_stores(left: int, wait_read_only: bool = False) -> None:
    del wait_read_only
    while len(machine.HERE.stores) > left:
        machine.HERE.stores.pop(0)()
