"""Keys at positions that are data, for kernels that compare none: a mask of them.

Positions and their bounds are a few numbers for each key and query. A kernel that reads
no such numbers gets an array of booleans in their place, made just before it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention.visibility import within
from rewriter.ops.space import Space

if TYPE_CHECKING:
    from collections.abc import Callable

    from rewriter.ops.kernel import Kernel, Spec

ENDS = ("first_position", "last_position")
OPERANDS = frozenset({"kv_positions", *ENDS})


def as_mask(spec: Spec) -> Spec:
    """Returns a use with a mask in place of positions."""
    if not spec.has("kv_positions"):
        return spec
    shapes = dict(spec.shapes)
    t, s = shapes["q"][1], shapes["k"][1]
    batch = [shapes[n][0] for n in OPERANDS & shapes.keys()]
    mask = (_larger(batch), 1, t, s)
    if "mask" in shapes:
        mask = tuple(map(_larger, zip(mask, shapes["mask"], strict=True)))
    sizes = {**shapes, "mask": mask}
    dtypes = {**dict(spec.dtypes), "mask": "bool"}
    names = sorted(
        (n for n in sizes if n not in OPERANDS),
        key=lambda n: _ORDER.index(n) if n in _ORDER else len(_ORDER),
    )
    return replace(
        spec,
        shapes=tuple((n, sizes[n]) for n in names),
        dtypes=tuple((n, dtypes[n]) for n in names),
    )


_ORDER = ("q", "k", "v", "bias", "mask")


def _larger(sizes: Any) -> Any:
    """The one size that is not 1, if any."""
    return next((n for n in sizes if not isinstance(n, int) or n != 1), 1)


def with_positions(kernel: Kernel) -> Kernel:
    """Returns a kernel that gets positions as a mask."""
    limits, speed, traits = kernel.limits, kernel.speed, kernel.traits
    return replace(
        kernel,
        forward=_masked(kernel.forward),
        backward=kernel.backward and _masked(kernel.backward),
        limits=replace(
            limits,
            supports=_seen(limits.supports),
            supports_on=limits.supports_on and _seen(limits.supports_on),
        ),
        speed=replace(
            speed,
            profitable=_seen(speed.profitable),
            profitable_backward=speed.profitable_backward
            and _seen(speed.profitable_backward),
            estimate=speed.estimate and _seen(speed.estimate),
            modelled=_seen(speed.modelled),
            steps=speed.steps and _seen(speed.steps),
        ),
        traits=replace(traits, saves=traits.saves and _seen(traits.saves)),
        space=_space(kernel.space),
        backward_space=_space(kernel.backward_space),
    )


def _seen(asked: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(asked)
    def of_mask(spec: Spec, *rest: Any) -> Any:
        return asked(as_mask(spec), *rest)

    return of_mask


def _space(space: Space | None) -> Space | None:
    if space is None:
        return None
    fits = space.fits
    return Space(
        space.config,
        _seen(space.default),
        _seen(space.configs),
        lambda config, spec, device: fits(config, as_mask(spec), device),
    )


def _masked(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def of_mask(*operands: Any, **given: Any) -> Any:
        positions, *ends = (given.pop(n, None) for n in ("kv_positions", *ENDS))
        if positions is not None:
            given["mask"] = _mask(positions, ends, given.get("mask"))
        return run(*operands, **given)

    return of_mask


def _mask(positions: Any, ends: list[Any], mask: Any) -> Any:
    """Which keys are seen, bool [b|1, n|1, t, s]."""
    rows = (x if x is None else x[:, None, :, None] for x in ends)
    seen = within(positions[:, None, None, :], *rows)
    for more in [] if mask is None else [mask]:
        seen = [*seen, more]
    return functools.reduce(lambda a, b: a & b, seen)
