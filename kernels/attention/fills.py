"""Rows that weigh the keys which a mask hides, since a bias of -inf hides all others.

A mask with a finite fill (-1e9, the lowest float) leaves hidden keys a score. If all
other scores of a row are -inf, the program weighs the hidden keys. Kernels drop them,
and would give another number. A site whose bias is an argument has the parameter
``fill`` therefore. Its numbers are looked at when the program runs. If none is as low
as the fill, no such row can be, and kernels drop hidden keys. Else attention by tiles
computes the site with the fill as the score of hidden keys.

A condition around a kernel makes a GPU wait for its host. The kernel of Hopper GPUs
does without one: it gets what was found as an operand.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.scored_form import ARRAYS, TABLES
from rewriter.kernels.attention.xla.sizes import number
from rewriter.ops.joined import join
from rewriter.support.assumptions import FINITE
from rewriter.support.verdict import Verdict, no

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Kernel, Spec

FILL = "fill"
"""The op's parameter: the score of hidden keys, or None if no row can weigh them."""

PASSES = "fill_passes"
"""The op's parameter: whether it is added to their scores, and not chosen."""

REACHES = "reaches"
"""Given to kernels that weigh hidden keys: whether they are to, bool [1]."""

ADDED = ("bias", "alibi", *ARRAYS, *TABLES)
"""Operands that may make scores infinite."""

LAYOUT = ("config", "swapped", "packed", "shared", "joined")
"""What kernels get beside operands and parameters: the same numbers elsewhere."""


def with_fills(kernel: Kernel, by_tiles: Kernel | None, weighs: bool = False) -> Kernel:
    """Returns an attention kernel that weighs hidden keys where no others are left.

    One whose residual is not the log-sum-exp refuses such uses.

    Args:
        kernel: The kernel.
        by_tiles: One of the same op that takes the parameter; None if there is none.
        weighs: Whether it takes the parameter too; else it drops hidden keys.
    """
    if by_tiles is None or (kernel.backward and not kernel.traits.merges):
        limits = kernel.limits
        return replace(
            kernel,
            supports=_refusing(limits.supports),
            supports_on=limits.supports_on and _refusing(limits.supports_on),
        )
    first, second = kernel.forward, kernel.backward

    @functools.wraps(first)
    def forward(**given: Any) -> Any:
        own = {FILL: given.pop(FILL, None), PASSES: given.pop(PASSES, False)}
        if (fill := own[FILL]) is None:
            return first(**given)
        if weighs:
            return first(**given, **own, **{REACHES: may_reach(given, fill)[None]})
        again = functools.partial(by_tiles.forward, **_plain(given), **own)
        return either(may_reach(given, fill), lambda: first(**given), again)

    def backward(**given: Any) -> Mapping[str, Array]:
        assert second is not None
        assert by_tiles.backward is not None
        own = {FILL: given.pop(FILL, None), PASSES: given.pop(PASSES, False)}
        if (fill := own[FILL]) is None:
            return second(**given)
        saved = tuple(_as_sums(x) for x in given["residuals"])
        rest = {**_plain(given), **own, "residuals": saved}
        joined = given.get("joined")

        def again() -> dict[str, Array]:
            grads = dict(by_tiles.backward(**rest))
            return grads | ({"joined": join(grads, joined)} if joined else {})

        if weighs:
            low = jnp.isfinite(saved[0]) & (saved[0] <= fill / 2)
            return second(**given, **own, **{REACHES: jnp.any(low)[None]})
        return either(may_reach(given, fill), lambda: second(**given), again)

    backward = functools.wraps(second)(backward) if second else None
    return replace(kernel, forward=forward, backward=backward)


def may_reach(given: Mapping[str, Any], fill: float) -> Array:
    """Returns whether some number that is added to scores is as low as the fill.

    Args:
        given: The operands by name, and more.
        fill: The score of hidden keys.
    """
    # A function of scores multiplies by distances, perhaps with a few numbers beside.
    places = (jnp.asarray(number(given[n].shape[1]), jnp.float32) for n in "qk")
    farthest = 4 * sum(places)
    found = []
    for name in ADDED:
        x = given.get(name)
        if x is None or not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        most = jnp.asarray(abs(fill) / (2 if name == "bias" else farthest))
        found.append(jnp.any(~(jnp.abs(x) < most.astype(x.dtype))))
    return functools.reduce(operator.or_, found, jnp.asarray(False))


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in given.items() if name not in LAYOUT}


def either(reaches: Array, usual: Callable[[], Any], again: Callable[[], Any]) -> Any:
    """Returns what one of two functions gives, which need not have the same form."""
    made: list[Any] = []

    def first() -> Any:
        made.append(usual())
        return made[0]

    # JAX traces the first function first: the second one's result is as the first's.
    return lax.cond(~reaches, first, lambda: _like(made[0], again()))


def _like(wanted: Any, found: Any) -> Any:
    """Returns results, residuals or cotangents by name, in the form of others."""
    if isinstance(wanted, tuple):
        return tuple(_like(x, y) for x, y in zip(wanted, found, strict=True))
    if isinstance(wanted, dict):
        return {name: _like(x, found[name]) for name, x in wanted.items()}
    if wanted.shape != found.shape:  # a sum of two numbers for each row
        more = jnp.zeros((*wanted.shape[:2], wanted.shape[2] - 1, *wanted.shape[3:]))
        found = jnp.concatenate([found[:, :, None], more.astype(found.dtype)], 2)
    return found.astype(wanted.dtype)


def _as_sums(saved: Array) -> Array:
    """Returns a log-sum-exp [b, n, t] of one that may be a sum [b, n, 2, t]."""
    return saved if saved.ndim == 3 else saved.sum(2)


def _refusing(supports: Callable[..., Verdict]) -> Callable[..., Verdict]:
    @functools.wraps(supports)
    def checked(spec: Spec, *device: Device) -> Verdict:
        if spec.param(FILL) is not None:
            return no(
                FILL,
                "a bias may be -inf, and it cannot weigh the keys that a mask hides. "
                f"If the bias is finite, assume=({FINITE!r},)",
            )
        return supports(spec, *device)

    return checked
