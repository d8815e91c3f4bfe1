"""Rows that weigh the keys which a mask hides, since their other scores are as low.

A mask with a finite fill (-1e4, the lowest float) leaves hidden keys a score. If all
other scores of a row are lower, the program weighs the hidden keys. So it does if the
fill is added, and a hidden score is large enough. Kernels drop hidden keys, and would
give another number. A site whose mask has one such fill has the parameter ``fill``.

Attention by tiles honours it. If a bound of all scores is as large as half of the fill,
it takes the fill as the score of hidden keys, or adds it to theirs. Other kernels are
left for it then, if the fill is near: see `reach`. Farther fills are taken to be out of
reach of scores, but not of a bias that is an argument, which may be -inf. The site has
the parameter ``open_bias`` for that. Its numbers are looked at when the program runs.

A condition around a kernel makes a GPU wait for its host. The kernel of Hopper GPUs
does without one for biases: it gets what was found as an operand.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.reach import added_reach, is_near, reached
from rewriter.ops.joined import join
from rewriter.support.assumptions import FINITE
from rewriter.support.verdict import Verdict, no

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Kernel, Spec

FILL = "fill"
"""The op's parameter: the score of hidden keys; None if no row can weigh them, or if
the program is not known to weigh them by one number."""

PASSES = "fill_passes"
"""The op's parameter: whether it is added to their scores, and not chosen."""

OPEN = "open_bias"
"""The op's parameter: whether a bias may be as low as the fill, by its numbers."""

REACHES = "reaches"
"""Given to kernels that weigh hidden keys: whether they are to, bool [1]."""

LAYOUT = ("config", "swapped", "packed", "shared", "joined")
"""What kernels get beside operands and parameters: the same numbers elsewhere."""


def must_compare(spec: Spec) -> bool:
    """Returns whether kernels must look whether rows of a use weigh hidden keys."""
    fill = spec.param(FILL)
    return fill is not None and (is_near(fill) or bool(spec.param(OPEN)))


def with_fills(kernel: Kernel, by_tiles: Kernel | None, weighs: bool = False) -> Kernel:
    """Returns an attention kernel that weighs hidden keys where a row does.

    One whose residual is not the log-sum-exp refuses such uses.

    Args:
        kernel: The kernel, which drops hidden keys.
        by_tiles: One of the same op that takes the parameters; None if there is none.
        weighs: Whether it weighs them for biases, too, in place of `by_tiles`.
    """
    if by_tiles is None or (kernel.backward and not kernel.traits.merges):
        return _dropping(kernel)
    first, second = kernel.forward, kernel.backward

    @functools.wraps(first)
    def forward(**given: Any) -> Any:
        fills = _Fills.popped(given)
        found, more = fills.looked_for(given, weighs)
        usual = functools.partial(first, **given, **more)
        if found is None:
            return usual()
        again = functools.partial(by_tiles.forward, **fills.weighed(given))
        return either(found, usual, again)

    def backward(**given: Any) -> Mapping[str, Array]:
        assert second is not None
        fills = _Fills.popped(given)
        saved = tuple(_as_sums(x) for x in given["residuals"])
        found, more = fills.looked_for(given, weighs, saved[0] if saved else None)
        if found is None:
            return second(**given, **more)
        joined = given.get("joined")
        rest = {**fills.weighed(given), "residuals": saved}

        def again() -> dict[str, Array]:
            assert by_tiles.backward is not None
            grads = dict(by_tiles.backward(**rest))
            return grads | ({"joined": join(grads, joined)} if joined else {})

        return either(found, lambda: second(**given), again)

    backward = functools.wraps(second)(backward) if second else None
    made = replace(kernel, forward=forward, backward=backward, assumes=_assumed)
    # A function of scores may give any number: then only tiles compare.
    near = lambda spec: is_near(spec.param(FILL)) and spec.param("score") is not None
    return _refusing(made, near)


@dataclass(frozen=True)
class _Fills:
    """The parameters of a use that say what hidden keys score."""

    fill: float | None
    passes: bool
    is_open: bool

    @classmethod
    def popped(cls, given: dict[str, Any]) -> _Fills:
        """Returns them, and takes them off what a kernel is given."""
        plain = (FILL, None), (PASSES, False), (OPEN, False)
        return cls(*(given.pop(name, default) for name, default in plain))

    @property
    def own(self) -> dict[str, Any]:
        """The parameters by name, as kernels that weigh hidden keys take them."""
        return {FILL: self.fill, PASSES: self.passes}

    def looked_for(
        self, given: Mapping[str, Any], weighs: bool, lse: Array | None = None
    ) -> tuple[Array | None, dict[str, Any]]:
        """Returns whether rows weigh hidden keys, and what else a kernel is given.

        Args:
            given: The operands and parameters.
            weighs: As for `with_fills`.
            lse: The log-sum-exp of each row in a backward pass, [b, n, t].

        Returns:
            Whether `by_tiles` is needed, bool; None if it never is.
        """
        fill = self.fill
        if fill is None:
            return None, {}
        if is_near(fill):
            return reached(given, fill), {}
        if not self.is_open:
            return None, {}
        if not weighs:
            return added_reach(given, fill), {}
        if lse is None:
            low = added_reach(given, fill)
        else:
            low = jnp.any(jnp.isfinite(lse) & (lse <= fill / 2))
        return None, {**self.own, REACHES: low[None]}

    def weighed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns operands and parameters of `by_tiles`, where hidden keys count."""
        plain = {name: x for name, x in given.items() if name not in LAYOUT}
        return {**plain, **self.own, REACHES: jnp.asarray(True)}


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
        *found, last = found
        if isinstance(last, tuple) and len(last) == 2:  # two terms of a log-sum-exp
            last = (last[0] + last[1],)
        found = (*found, last)
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


def _dropping(kernel: Kernel) -> Kernel:
    """Returns a kernel that drops hidden keys, and refuses uses that may weigh them."""
    made = replace(
        _refusing(kernel, must_compare),
        forward=_without_fills(kernel.forward),
        assumes=_assumed,
    )
    second = kernel.backward
    return replace(made, backward=_without_fills(second)) if second else made


def _assumed(spec: Spec) -> str:
    """What a kernel that drops hidden keys takes for granted of a use."""
    fill = spec.param(FILL)
    if fill is None or is_near(fill):
        return ""
    return f"scores assumed to be above a mask's fill of {fill:.4g}"


def _without_fills(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def plain(**given: Any) -> Any:
        _Fills.popped(given)
        return run(**given)

    return plain


def _refusing(kernel: Kernel, refused: Callable[[Spec], bool]) -> Kernel:
    """Returns a kernel that refuses some uses by their fill."""

    def with_reason(supports: Callable[..., Verdict]) -> Callable[..., Verdict]:
        @functools.wraps(supports)
        def checked(spec: Spec, *device: Device) -> Verdict:
            if not refused(spec):
                return supports(spec, *device)
            return no(
                FILL,
                "scores or a bias may be as low as a mask's fill of "
                f"{spec.param(FILL):.4g}, and it cannot weigh hidden keys. "
                f"If they are not, assume=({FINITE!r},)",
            )

        return checked

    limits = kernel.limits
    return replace(
        kernel,
        supports=with_reason(limits.supports),
        supports_on=limits.supports_on and with_reason(limits.supports_on),
    )
