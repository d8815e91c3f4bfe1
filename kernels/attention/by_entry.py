"""Attention of a symbolic batch by kernels that need known sizes: one entry at a time.

A Pallas kernel's grid is fixed when it is lowered. A loop around it is not: its body
takes one entry of the batch, whose sizes are known, and the number of turns is computed
where the program runs. The results are those of the kernel, entry by entry.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Kernel, Spec

SHARED = frozenset({"alibi", "sinks", "scale_factor"})
"""Operands without a batch axis."""


LENGTHS = (
    "its grid of blocks needs lengths that are numbers: JAX lowers Pallas kernels of "
    "symbolic shapes for TPUs alone, behind an experimental switch"
)
"""Why only the batch may be symbolic; so in jax 0.10.2, 0.11.2 and 0.12."""


def one_entry(spec: Spec) -> Spec:
    """Returns a use with a symbolic batch as one of a single entry."""
    if not spec.symbolic:
        return spec
    shapes = tuple(
        (n, shape if n in SHARED else (1, *shape[1:])) for n, shape in spec.shapes
    )
    return replace(spec, shapes=shapes)


def by_entry(kernel: Kernel) -> Kernel:
    """Returns a kernel of known sizes that also takes a symbolic batch, in a loop."""
    first, second, estimate = kernel.forward, kernel.backward, kernel.estimate

    def supports(spec: Spec) -> Verdict:
        single = one_entry(spec)
        if single.symbolic:
            return no("symbolic", LENGTHS)
        return all_of(kernel.supports(single), _batches(spec))

    def profitable(spec: Spec, platform: str) -> Verdict:
        return kernel.profitable(one_entry(spec), platform)

    def seconds(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
        assert estimate is not None
        return estimate(one_entry(spec), device, passes)

    def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
        return kernel.modelled(one_entry(spec), device, passes)

    @functools.wraps(first)
    def forward(**given: Any) -> Any:
        if isinstance(given["q"].shape[0], int):
            return first(**given)
        return forward_by_entry(first, given)

    @functools.wraps(second or first)
    def backward(**given: Any) -> Mapping[str, Array]:
        assert second is not None
        if isinstance(given["q"].shape[0], int):
            return second(**given)
        return backward_by_entry(second, given)

    return replace(
        kernel,
        supports=supports,
        profitable=profitable,
        estimate=estimate and seconds,
        modelled=modelled,
        forward=forward,
        backward=second and backward,
    )


def _batches(spec: Spec) -> Verdict:
    """Whether every operand has the whole batch, or one entry for all."""
    batch = spec.shape("q")[0]
    return all_of(
        *(
            no("symbolic", f"{n} has a batch of {shape[0]}, and q one of {batch}")
            for n, shape in spec.shapes
            if n not in SHARED and shape[0] not in (1, batch)
        )
    )


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _entries(given: Mapping[str, Any]) -> list[str]:
    """The operands that have an entry for each of the batch."""
    batch = given["q"].shape[0]
    return [
        n
        for n, x in given.items()
        if _is_array(x) and n not in SHARED and x.shape[0] == batch
    ]


def _entry(given: Mapping[str, Any], names: list[str], i: Any) -> dict[str, Any]:
    cut = {n: lax.dynamic_slice_in_dim(given[n], i, 1, 0) for n in names}
    return {**given, **cut}


def forward_by_entry(first: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The kernel's result, and its residuals, which have the batch in front."""
    names = _entries(given)

    def turn(i: Any) -> Any:
        made = first(**_entry(given, names, i))
        if not given.get("residuals"):
            return made[0]
        out, saved = made
        return out[0], tuple(r[0] for r in saved)

    return lax.map(turn, jnp.arange(given["q"].shape[0], dtype=jnp.int32))


def backward_by_entry(
    second: Callable[..., Mapping[str, Array]], given: dict[str, Any]
) -> dict[str, Array]:
    """The kernel's gradients; those of what all entries share are added up."""
    names, saved = _entries(given), given["residuals"]
    sums = {
        n: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
        for n, x in given.items()
        if _is_array(x) and n not in names and jnp.issubdtype(x.dtype, jnp.floating)
    }
    computed: set[str] = set()

    def turn(sums: dict[str, Array], i: Any) -> Any:
        cut = [lax.dynamic_slice_in_dim(r, i, 1, 0) for r in saved]
        grads = second(**_entry(given, names, i) | {"residuals": tuple(cut)})
        grads = {n: g for n, g in grads.items() if g is not None}
        computed.update(grads)
        new = {n: x + grads[n].astype(x.dtype) for n, x in sums.items() if n in grads}
        return {**sums, **new}, {n: g[0] for n, g in grads.items() if n in names}

    turns = jnp.arange(given["q"].shape[0], dtype=jnp.int32)
    sums, apart = lax.scan(turn, sums, turns)
    whole = {n: x.astype(given[n].dtype) for n, x in sums.items() if n in computed}
    return {**whole, **apart}
