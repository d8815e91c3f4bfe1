"""Calls the kernels of norms and of their gradients on a Hopper GPU.

Each passes once over memory. What happens within a block is in `hopper_team`. A block
writes its own sums over rows, which are cotangents of scale and bias, and XLA adds
those of all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.norms.hopper_config import (
    LANES,
    Norm,
    Teams,
    programs_of,
    rows_of,
    steps_of,
)
from rewriter.kernels.norms.hopper_team import Team
from rewriter.kernels.shared import pallas_gpu

if TYPE_CHECKING:
    from jax import Array


def normalized(
    norm: Norm,
    x: Array,
    given: dict[str, Array],
    config: Teams,
    addend: Array | None = None,
) -> tuple[Array, ...]:
    """Returns the norm of rows and, with an addend, the sums that it normalises.

    Args:
        norm: What is computed.
        x: [m, d].
        given: scale [d], bias [d] and epsilon [], if present.
        config: The teams.
        addend: [m, d], of x's dtype, if ``norm.addend``.

    Returns:
        [m, d], of the dtype ``norm.out``; and x + addend, of x's.
    """
    arrays = {"x": x}
    out = [jax.ShapeDtypeStruct(x.shape, norm.out)]
    if addend is not None:
        arrays["addend"] = addend
        out.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
    kept = [n for n in ("scale", "bias") if n in given]
    return _call("norm", norm, config, arrays, kept, given, out, Team.normalize)


def cotangents(
    norm: Norm,
    x: Array,
    cotangent: Array,
    given: dict[str, Array],
    config: Teams,
    addend: Array | None = None,
) -> dict[str, Array]:
    """Returns the cotangents of x [m, d] and, in float32, of `given`.

    Args:
        norm: What is computed.
        x: [m, d].
        cotangent: [m, d].
        given: scale [d], bias [d] and epsilon [], if present.
        config: The teams.
        addend: [m, d], added to x's cotangent, if ``norm.addend``.
    """
    blocks = programs_of(steps_of(norm.m, config, True), config)
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    out += [jax.ShapeDtypeStruct((blocks, norm.d), jnp.float32) for _ in norm.summed]
    if "epsilon" in given:
        shape = (blocks * config.teams, LANES)
        out.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    kept = [n for n in ("scale",) if n in given]
    arrays = {"x": x, "cotangent": cotangent}
    if addend is not None:
        arrays["addend"] = addend
    made = _call(
        "norm_backward", norm, config, arrays, kept, given, out, Team.differentiate
    )
    grads = {"x": made[0]}
    for name, parts in zip(norm.summed, made[1:], strict=False):
        grads[name] = parts.sum(0)
    if "epsilon" in given:
        grads["epsilon"] = made[-1][:, 0].sum()
    return grads


def _call(
    name: str,
    norm: Norm,
    config: Teams,
    arrays: dict[str, Array],
    kept: Sequence[str],
    given: dict[str, Array],
    out: Sequence[jax.ShapeDtypeStruct],
    body: Callable[[Team], None],
) -> Any:
    """Runs `body` in each warpgroup.

    Args:
        name: The kernel's name.
        norm: What is computed.
        config: The teams.
        arrays: [m, d] each, streamed through shared memory.
        kept: The names in `given` that are kept in shared memory.
        given: As for `normalized`.
        out: Shapes and dtypes of the results.
        body: What a warpgroup does.
    """
    backward = "cotangent" in arrays
    rows = rows_of(norm.m, config, backward)
    slots = config.teams * config.stages
    rings = [plgpu.SMEM((slots, rows, norm.d), x.dtype) for x in arrays.values()]
    added = [plgpu.SMEM((norm.d,), jnp.float32) for _ in norm.summed]
    scratch: dict[str, Any] = {
        # Sums over rows are added up once all rows were read.
        "rows": plgpu.RefUnion(rings, added if backward and config.teams > 1 else []),
        "sums": plgpu.SMEM(
            (config.teams, 2, (1 + backward) * rows, 4 * config.warpgroups), jnp.float32
        ),
        "ready": pallas_gpu.barriers(slots, len(arrays)),
    }
    operands = dict(arrays)
    for n in kept:
        operands[n] = given[n]
        scratch[f"kept_{n}"] = plgpu.SMEM((norm.d,), given[n].dtype)
    if kept:
        scratch["kept"] = pallas_gpu.barriers(1, len(kept))
    if "epsilon" in given:
        operands["epsilon"] = given["epsilon"].astype(jnp.float32).reshape(1)

    def run(*references: Any, **shared: Any) -> None:
        named = dict(zip(operands, references, strict=False))
        place = (
            lax.axis_index(pallas_gpu.WARPGROUP), lax.axis_index(pallas_gpu.PROGRAM),
            lax.axis_size(pallas_gpu.PROGRAM),
        )  # fmt: skip
        body(Team(norm, config, named, shared, references[len(operands) :], *place))

    programs = programs_of(steps_of(norm.m, config, backward), config)
    together = config.teams * config.warpgroups
    return pallas_gpu.kernel(run, name, out, scratch, programs, together)(
        *operands.values()
    )
