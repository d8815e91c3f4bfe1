"""Runs a kernel: a thread for each warpgroup, and memory that is poisoned first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.support.kernels.simulated_gpu import machine


def run_kernel(
    body: Callable[..., None], name: str, out: Any, scratch: Any, programs: int,
    warpgroups: int, cluster: int = 1, cluster_name: str = "", together: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Blocks run one after the other, or all `together`."""

    def call(*given: Any) -> list[np.ndarray]:
        results = [_poison(x.shape, x.dtype) for x in out]
        references = [machine.Reference(np.asarray(x)) for x in (*given, *results)]
        running = []
        for program, part in np.ndindex(programs, cluster):
            memory = {name: _allocated(kind) for name, kind in scratch.items()}
            run = functools.partial(body, *references, **memory)
            block = machine.Block(warpgroups)
            threads = [
                threading.Thread(
                    target=_warpgroup,
                    args=(block, (program, programs, part), w, run),
                )
                for w in range(warpgroups)
            ]
            for thread in threads:
                thread.start()
            running.append((block, threads))
            if not together:
                _end(*running.pop())
        for block, threads in running:
            _end(block, threads)
        return results

    del name, cluster_name
    return call


def _end(block: machine.Block, threads: list[threading.Thread]) -> None:
    """Waits for a block's warpgroups."""
    for thread in threads:
        thread.join()
    if block.failure is not None:
        raise block.failure


def _warpgroup(
    block: machine.Block, program: tuple[int, int, int], warpgroup: int,
    run: Callable[[], None],
) -> None:  # fmt: skip
    machine.HERE.block, machine.HERE.warpgroup = block, warpgroup
    machine.HERE.program, machine.HERE.programs, machine.HERE.part = program
    try:
        with np.errstate(all="ignore"):
            run()
        assert not machine.HERE.begun, "a store was not committed"
        assert not machine.HERE.stores, "a store was not waited for"
        assert not machine.HERE.products, "a product was not waited for"
    except BaseException as problem:
        with block.changed:
            block.failure = block.failure or problem
            block.changed.notify_all()
    block.ended(warpgroup)


def _poison(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if np.issubdtype(dtype, np.integer):
        return np.full(shape, np.iinfo(dtype).max, dtype)
    return np.full(shape, np.nan, dtype)


def _allocated(kind: Any) -> Any:
    if isinstance(kind, list):
        return [_allocated(part) for part in kind]
    if isinstance(kind, dict):
        return {name: _allocated(part) for name, part in kind.items()}
    if isinstance(kind, plgpu.Barrier):
        return machine.Barriers(int(np.prod(kind.num_barriers)), kind.num_arrivals)
    if isinstance(kind, plgpu.RefUnion):
        size = max(sum(map(_nbytes, jax.tree.leaves(part))) for part in kind.refs)
        flat = np.full(size, 255, np.uint8)  # NaN in every float
        return tuple(_views(flat, part) for part in kind.refs)
    return machine.Reference(_poison(kind.shape, kind.dtype))


def _nbytes(kind: Any) -> int:
    return int(np.prod(kind.shape)) * np.dtype(kind.dtype).itemsize


def _views(flat: np.ndarray, part: Any) -> Any:
    """References to memory that is laid out as a tree of kinds, one after another."""
    kinds, tree = jax.tree.flatten(part)
    ends = np.cumsum([_nbytes(kind) for kind in kinds])
    views = [
        flat[end - _nbytes(kind) : end].view(kind.dtype).reshape(kind.shape)
        for kind, end in zip(kinds, ends, strict=True)
    ]
    return tree.unflatten([machine.Reference(x) for x in views])
