"""Counters in global memory, by which blocks of threads of a GPU wait for each other.

Whoever waits keeps its multiprocessor. So all blocks that are waited for must run at
the same time, or have been started before.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def count(cell: Any) -> None:
    """Adds one to a counter, once for this warpgroup, after what it did before.

    Args:
        cell: Global memory, int32 [1].
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(context: Any, cell: Any) -> None:
        del context
        mgpu.warpgroup_barrier()
        _by_one_lane(cell, COUNT, [], "")

    emit(cell)


def wait_for(cell: Any, least: int) -> None:
    """Waits until a counter has reached a number; what is done after it is not earlier.

    Args:
        cell: Global memory, int32 [1].
        least: The number.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(context: Any, cell: Any) -> None:
        del context
        i32 = ir.IntegerType.get_signless(32)
        number = arith.constant(i32, ir.IntegerAttr.get(i32, least))
        _by_one_lane(cell, WAIT, [number], ",r")
        mgpu.warpgroup_barrier()

    emit(cell)


def _by_one_lane(cell: Any, text: str, more: list[Any], letters: str) -> None:
    place = mgpu.utils.memref_ptr(mgpu.memref_slice(cell, (0,)))
    lane = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARPGROUP)
    void = ir.Type.parse("!llvm.void")
    given, letters = [place, lane, *more], f"l,b{letters},~{{memory}}"
    llvm.inline_asm(void, given, text, letters, has_side_effects=True)


COUNT = "@$1 red.release.gpu.global.add.u32 [$0], 1;"

WAIT = """{
    .reg .u32 now;
    .reg .pred less;
    @!$1 bra DONE;
    AGAIN:
    ld.acquire.gpu.global.u32 now, [$0];
    setp.lt.u32 less, now, $2;
    @less bra AGAIN;
    DONE:
}"""
