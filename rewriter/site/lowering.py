"""How a primitive of sites is evaluated, lowered and batched.

A function of a kernel, or of the reference, is made for each platform. Where XLA splits
a program, or a kernel cannot be lowered, it is the reference's.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from rewriter import _jax, errors
from rewriter.ops.kernel import PLATFORMS
from rewriter.site.uses import Use

log = logging.getLogger("rewriter.site")

NOWHERE = "several devices"
"""Stands for a platform where the reference runs instead of any kernel."""


def batch_rule(primitive: Primitive) -> Callable[..., Any]:
    """Returns a rule for `jax.vmap` that adds a level to the parameters."""

    def rule(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        moved = [
            a if d is None else jnp.moveaxis(a, d, 0)
            for a, d in zip(args, dims, strict=True)
        ]
        level = tuple(d is not None for d in dims)
        params["batch"] = (level, *params["batch"])
        if "summed" in params:
            never = (False,) * len(params["wrt"])
            params["summed"] = (never, *params["summed"])
        out = primitive.bind(*moved, **params)
        return (out, [0] * len(out)) if primitive.multiple_results else (out, 0)

    return rule


Made = Callable[..., Callable[..., Any]]
"""``made(kernel, **params)`` returns the function that an equation computes."""

_MADE: dict[Primitive, Made] = {}


@functools.lru_cache(maxsize=1024)
def _implementation(
    primitive: Primitive, platform: str, params: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """Returns a jitted function, the same for equal sites: lowered only once."""
    values = dict(params)
    use: Use = values["use"]
    kernel = None if platform == NOWHERE else use.kernel(platform)
    function = _MADE[primitive](kernel, **values)

    def run(*args: Any) -> Any:
        return function(*args)

    run.__name__ = f"{primitive.name}_{use.op.name}"
    return jax.jit(run)


def _warn(use: Use, platform: str) -> None:
    if (kernel := use.kernel(platform)) is not None:
        warnings.warn(
            f"{use.op.name}: this program runs on several devices, which its trace did "
            f"not show; {kernel.name!r} gives way to plain JAX. Optimize the outermost "
            "function, or give in_shardings",
            errors.RewriterWarning,
            stacklevel=2,
        )


FAILED: set[tuple[Use, str]] = set()
"""Uses whose kernel could not be lowered for a platform: gradients must not read the
residuals that it would have saved."""


def _lower(primitive: Primitive, platform: str, ctx: Any, *args: Any, **params: Any):
    use: Use = params["use"]
    if _jax.is_partitioned(ctx):  # XLA would gather a kernel's operands, or refuse it
        _warn(use, platform)
        platform = NOWHERE
    elif (use, platform) in FAILED:
        platform = NOWHERE
    if platform == NOWHERE or use.kernel(platform) is None or not use.falls_back:
        return _lowered(primitive, platform, ctx, args, params)
    try:
        with _jax.undone_if_it_fails(ctx):
            return _lowered(primitive, platform, ctx, args, params)
    except errors.RewriterError:
        raise
    except Exception as error:
        _warn_of_failure(use, platform, error)
    FAILED.add((use, platform))
    return _lowered(primitive, NOWHERE, ctx, args, params)


def _lowered(
    primitive: Primitive,
    platform: str,
    ctx: Any,
    args: Sequence[Any],
    params: Mapping[str, Any],
) -> Any:
    function = _implementation(primitive, platform, tuple(sorted(params.items())))
    ctx = ctx.replace(avals_in=[_jax.without_varying(a) for a in ctx.avals_in])
    rule = mlir.lower_fun(function, multiple_results=primitive.multiple_results)
    with _jax.on_one_device(), _jax.in_mesh_of(ctx.avals_in):
        return rule(ctx, *args)


def _warn_of_failure(use: Use, platform: str, error: Exception) -> None:
    kernel = use.kernel(platform)
    assert kernel is not None
    log.debug("lowering %s failed", kernel.name, exc_info=error)
    why = (str(error).splitlines() or [""])[0]
    warnings.warn(
        f"{use.op.name}: {kernel.name!r} cannot be lowered for {platform}, and gives "
        f"way to plain JAX: {type(error).__name__}: {why}",
        errors.RewriterWarning,
        stacklevel=2,
    )


@functools.lru_cache(maxsize=1024)
def _eager(
    primitive: Primitive, params: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def _evaluate(primitive: Primitive, *args: Any, **params: Any) -> Any:
    key = tuple(sorted(params.items()))
    if jax.config.jax_disable_jit:  # pyright: ignore
        backend = jax.default_backend()
        platform = "cuda" if backend == "gpu" else backend
        return _implementation(primitive, platform, key)(*args)
    return _eager(primitive, key)(*args)


def register(primitive: Primitive, aval: Any, batched: Any, made: Made) -> None:
    """Sets the rules of a primitive of sites, except those of differentiation.

    Args:
        primitive: A primitive with a parameter ``use``.
        aval: Returns the types of its results.
        batched: Its rule for `jax.vmap`.
        made: Builds the function that it computes.
    """
    _MADE[primitive] = made
    primitive.def_impl(functools.partial(_evaluate, primitive))
    primitive.def_abstract_eval(aval)
    batching.primitive_batchers[primitive] = batched
    _jax.check_as_written(primitive, functools.partial(made, None))
    for platform in (None, *PLATFORMS):
        rule = functools.partial(_lower, primitive, platform or "default")
        mlir.register_lowering(primitive, rule, platform=platform)
