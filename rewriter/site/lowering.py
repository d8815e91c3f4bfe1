"""Lowers sites: each platform gets its kernel, or plain JAX where that has none.

A kernel that cannot be lowered costs its site, and not the program. What failed is
remembered, so that a report can say so.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from rewriter import _jax, errors
from rewriter.ops.kernel import PLATFORMS
from rewriter.site import stored_lowering
from rewriter.site.uses import Use
from rewriter.support import garbage

log = logging.getLogger("rewriter.site")

NOWHERE = "several devices"
"""Stands for a platform where the reference runs instead of any kernel."""

FunctionOf = Callable[..., Callable[..., Any]]
"""``made(kernel, **params)`` returns the function that an equation computes."""

_FUNCTIONS: dict[Primitive, FunctionOf] = {}

_DECIDING: dict[Primitive, Callable[..., Mapping[str, Any]]] = {}
"""By primitive, which values of its parameters decide what its kernels compute."""


@functools.lru_cache(maxsize=1024)
def _implementation(
    primitive: Primitive, platform: str, params: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """Returns a jitted function, the same for equal sites: lowered only once."""
    values = dict(params)
    use: Use = values["use"]
    kernel = None if platform == NOWHERE else use.kernel(platform)
    function = _FUNCTIONS[primitive](kernel, **values)

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


@dataclass(frozen=True)
class Failure:
    """Why a kernel could not be lowered.

    Attributes:
        primitive: What was lowered: the site, or its gradients.
        why: The error, in one line.
    """

    primitive: Primitive
    why: str


FAILED: dict[tuple[Use, str], Failure] = {}
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
        with _jax.rolled_back_on_failure(ctx):
            return _lowered(primitive, platform, ctx, args, params)
    except errors.RewriterError:
        raise
    except Exception as error:
        log.debug("lowering %s failed", use.op.name, exc_info=error)
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        FAILED[use, platform] = Failure(primitive, text)
        _warn_of_failure(use, platform, text)
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
    with garbage.paused(), _jax.on_one_device(), _jax.in_mesh_of(ctx.avals_in):
        if platform == stored_lowering.PLATFORM:
            deciding = _DECIDING[primitive](**params)
            function = stored_lowering.as_stored(function, primitive, ctx, deciding)
        rule = mlir.lower_fun(function, multiple_results=primitive.multiple_results)
        return rule(ctx, *args)


def _warn_of_failure(use: Use, platform: str, why: str) -> None:
    kernel = use.kernel(platform)
    assert kernel is not None
    warnings.warn(
        f"{use.op.name}: {kernel.name!r} cannot be lowered for {platform}, and gives "
        f"way to plain JAX: {why}",
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


def register(
    primitive: Primitive,
    aval: Any,
    batched: Any,
    made: FunctionOf,
    deciding: Callable[..., Mapping[str, Any]] = dict,
) -> None:
    """Sets the rules of a primitive of sites, except those of differentiation.

    Args:
        primitive: A primitive with a parameter ``use``.
        aval: Returns the types of its results.
        batched: Its rule for `jax.vmap`.
        made: Builds the function that it computes.
        deciding: ``deciding(**params)`` gives what of its parameters decides that
            function where it has a kernel: the ``use``, and more.
    """
    _FUNCTIONS[primitive] = made
    _DECIDING[primitive] = deciding
    primitive.def_impl(functools.partial(_evaluate, primitive))
    primitive.def_abstract_eval(aval)
    batching.primitive_batchers[primitive] = batched
    _jax.check_as_written(primitive, functools.partial(made, None))
    for platform in (None, *PLATFORMS):
        rule = functools.partial(_lower, primitive, platform or "default")
        mlir.register_lowering(primitive, rule, platform=platform)


def failure(eqn: Any, platform: str, attempt: bool) -> Failure | None:
    """Returns why the kernel of a site could not be lowered, if that is known.

    Args:
        eqn: The site's equation, or that of its gradients.
        platform: The platform.
        attempt: Whether to lower it now, if its kernel is for some platforms only. A
            kernel for every platform is plain JAX, which always can be lowered.
    """
    use: Use = eqn.params["use"]
    kernel = use.kernel(platform)
    if kernel is None or not use.falls_back:
        return None
    if attempt and set(kernel.platforms) < set(PLATFORMS):
        avals = tuple((v.aval.shape, v.aval.dtype) for v in eqn.invars)
        _attempted(eqn.primitive, platform, tuple(sorted(eqn.params.items())), avals)
    return FAILED.get((use, platform))


@functools.lru_cache(maxsize=1024)
def _attempted(
    primitive: Primitive,
    platform: str,
    params: tuple[tuple[str, Any], ...],
    avals: tuple[tuple[tuple[int, ...], Any], ...],
) -> None:
    """Lowers a site by itself, as it would be in a program on one device."""
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals]
    site = jax.jit(functools.partial(primitive.bind, **dict(params)))
    try:
        site.trace(*structs).lower(lowering_platforms=(platform,))
    except Exception as error:  # a limit of lowering it alone says nothing of it
        log.debug("lowering %s alone failed", primitive.name, exc_info=error)
