"""Cycles of experts' gate and up branches on TPUs that are not there: whole, by parts.

  python3 -m tests.bench.tpu_experts_cycles [--json PATH] [--seconds 300]

bfloat16, four groups of equally many rows, in tiles of 512 rows. The kernels read the
table of their steps from memory for scalars, which the simulator takes as 0. So they
are simulated with steps that are calculated, of tiles that are all one group's.

"unit" is both branches and their product in one pass, and "dot" one ragged dot of ours.
"joined" is what XLA makes of two of them, silu(gate) * up. The simulator does not see
that it waits for memory. It does not take XLA's own ragged dot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rewriter.kernels.ragged.dot import tpu as ragged_dot
from rewriter.kernels.ragged.dot.tpu import by_rows, schedule
from rewriter.kernels.ragged.dot.tpu.config import Tiles
from rewriter.kernels.ragged.gated_linear_unit import tpu as unit
from rewriter.kernels.shared import pallas_tpu
from tests.bench import estimates

GROUPS, ROWS = 4, 512
GENERATIONS = ("v5e", "v5p", "v6e")

WANTED = tuple(
    ("cycles", generation, name)
    for generation in GENERATIONS
    for name in (
        "unit 4096 2048 1024 2048", "dot 4096 2048 1024 2048",
        "joined 4096 2048 1024 0", "unit 4096 4096 2048 4096",
        "dot 4096 4096 2048 4096", "dot 4096 4096 2048 2048",
        "dot 4096 4096 2048 1024",
    )
)  # fmt: skip
"""Mode, generation, and what of which m k f, with how much of k summed at once."""


def program(name: str, generation: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what a name stands for, and its arguments."""
    what, *sizes = name.split()
    m, k, f, step = map(int, sizes)
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    x, w = shape(m, k), shape(GROUPS, k, f)
    n = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)
    if what == "joined":
        return lambda gate, up: jax.nn.silu(gate) * up, (shape(m, f),) * 2
    columns = 512 if what == "unit" else 1024
    tiles = Tiles(ROWS, k, columns, step, 128)
    _calculate_steps(m // GROUPS)
    if what == "dot":
        return lambda x, w, n: ragged_dot.forward(x, w, n, config=tiles), (x, w, n)

    def whole(x: Any, w: Any, u: Any, n: Any) -> Any:
        return unit.forward(x=x, w=w, w_up=u, group_sizes=n, config=tiles)

    return whole, (x, w, w, n)


def _calculate_steps(rows: int) -> None:
    """Has kernels calculate their steps, for this child process alone."""
    real = pallas_tpu.call

    def of_rows(sizes: Any, m: int, tile: int) -> tuple[Any, int]:
        del sizes
        return jnp.zeros(schedule.FIELDS * (m // tile), jnp.int32), m // tile

    def field(step: by_rows.Step, name: int) -> Any:
        known = {
            schedule.GROUP: step.step // (rows // ROWS), schedule.TILE: step.step,
            schedule.READ: step.step, schedule.LOW: jnp.int32(0),
            schedule.HIGH: jnp.int32(ROWS), schedule.FIRST: jnp.int32(1),
        }  # fmt: skip
        return known[name]

    def without_table(body: Any, name: str, grid: Any, inputs: Any, outputs: Any,
                      *rest: Any, prefetched: int, **more: Any) -> Any:  # fmt: skip
        del prefetched
        bare = lambda spec: pl.BlockSpec(
            spec.block_shape, lambda *at, of=spec.index_map: of(*at, None)
        )
        made = real(
            lambda *refs: body(None, *refs), name, grid, [*map(bare, inputs)],
            [*map(bare, outputs)], *rest, **more,
        )  # fmt: skip
        return lambda table, *arrays: made(*arrays)

    schedule.of_rows, by_rows.Step.__call__ = of_rows, field
    pallas_tpu.call = without_table


if __name__ == "__main__":
    estimates.run("tpu_experts_cycles", WANTED, 300.0)
