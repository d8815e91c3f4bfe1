"""Lowering of primitives: their rules, devices and failures."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.export
import jaxlib
from jax._src import checkify, config, core, dispatch, lib
from jax.extend import backend
from jax.extend.mlir import ir


def lower_with_devices(primitive: Any) -> None:
    """Makes JAX pass the devices to a primitive's lowering, which are optional."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def check_as_written(primitive: Any, written: Callable[..., Any]) -> None:
    """Has `checkify` look for NaNs and indices in what an equation stands for.

    Where only a user's own checks are looked for, which no such equation holds, it
    stays.

    Args:
        primitive: The equation's.
        written: Gives for its parameters a function of its operands.
    """

    def rule(*given: Any, **params: Any) -> Any:
        *ctx, error, enabled = given[:_CHECKED]
        args = given[_CHECKED:]
        if not set(enabled) - checkify.user_checks:
            return error, primitive.bind(*args, **params)
        program = jax.make_jaxpr(written(**params))(*args)
        error, outs = checkify.checkify_jaxpr(*ctx, program, enabled, error, *args)
        return error, outs if primitive.multiple_results else outs[0]

    checkify.error_checks[primitive] = rule


# A context comes before the error and the enabled kinds of errors in jax 0.11.
_CHECKED = 3 if "ctx" in inspect.signature(checkify.checkify_jaxpr).parameters else 2


def is_partitioned(ctx: Any) -> bool:
    """Whether the lowered code is for several devices, and XLA splits it.

    Inside a `jax.shard_map` over all axes with several devices it is for one device.

    Args:
        ctx: The context of a lowering rule.
    """
    context = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):
        manual, sizes = context.manual_axes, dict(context.mesh.shape)
        return any(n > 1 and a not in manual for a, n in sizes.items())
    return getattr(context, "num_devices", 1) > 1


@contextlib.contextmanager
def rolled_back_on_failure(ctx: Any) -> Iterator[None]:
    """Removes what a lowering wrote into the module before it failed.

    Functions that were written whole stay: later lowerings may call them.
    """
    module, symbols = ctx.module_context.module, ctx.module_context.symbol_table
    block = ir.InsertionPoint.current.block
    count = len(block.operations)
    known = {str(op.attributes["sym_name"]) for op in module.body.operations}
    try:
        yield
    except Exception:
        for op in reversed(list(block.operations)[count:]):
            op.operation.erase()
        for op in list(module.body.operations):
            new = str(op.attributes["sym_name"]) not in known
            if new and not _is_whole(op):
                symbols.erase(op)
        raise


def _is_whole(function: Any) -> bool:
    """Whether a function of a module ends, so that it was written to its end."""
    blocks = function.regions[0].blocks
    found = [list(b.operations) for b in blocks]
    return bool(found) and all(
        f and f[-1].operation.name == "func.return" for f in found
    )


def lowering_state(ctx: Any, platform: str) -> tuple[str, ...] | None:
    """Returns what of JAX and of this machine may decide lowered code, as texts.

    Args:
        ctx: The context of a lowering rule.
        platform: Its platform.

    Returns:
        None where more decides: several platforms or devices, a mesh, an export, rules
        of the user's.
    """
    module = ctx.module_context
    asked = module.lowering_parameters
    one = getattr(module.axis_context, "num_devices", 0) == 1
    plain = not asked.for_export and asked.override_lowering_rules is None
    names = core.get_axis_env().axis_sizes
    mesh = jax.sharding.get_abstract_mesh()
    alone = one and mesh.empty and not names and jax.process_count() == 1
    if tuple(module.platforms) != (platform,) or not plain or not alone:
        return None
    state = [x for x in config.trace_context() if not isinstance(x, core.AxisEnv)]
    device = backend.get_default_device()
    found = (
        jax.__version__, jaxlib.__version__, repr(state), repr(asked),
        repr(sorted(jax.config.values.items())),
        repr((device.platform, device.device_kind)),
        repr(getattr(device, "compute_capability", None)),
        *_assemblers(), os.environ.get("NVIDIA_TF32_OVERRIDE", ""),
    )  # fmt: skip
    return None if any(" at 0x" in text for text in found) else found


def _assemblers() -> Iterator[str]:
    """The files of the ptxas that Mosaic may ask for its version."""
    inside = os.path.join(lib.cuda_path or "/usr/local/cuda", "bin", "ptxas")
    for file in (inside, shutil.which("ptxas")):
        try:
            found = os.stat(file or "")
        except OSError:
            continue
        yield f"{file} {found.st_size} {found.st_mtime_ns}"


def exported(function: Any, platform: str, structs: Sequence[Any]) -> Any:
    """Returns a jitted function as `jax.export` lowers it, for this version of JAX.

    Args:
        function: The function.
        platform: The platform.
        structs: Shapes and dtypes of its arguments.
    """
    with config.export_ignore_forward_compatibility(True):
        return jax.export.export(function, platforms=(platform,))(*structs)
