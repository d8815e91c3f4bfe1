"""The loss over a vocabulary on Hopper GPUs: products by XLA, rows by one kernel.

XLA's products run at the speed of the tensor cores. Between them it reads all logits
three times: for the maximum, for the sum of exponentials and for the gradient. Here
`rewriter.kernels.cross_entropy.hopper_rows` reads them once or twice. Blocks of rows
and chunks of classes are those of the plain kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.cross_entropy.rows import Loss, Slopes, Sum
from rewriter.kernels.linear_cross_entropy import chunks, in_place, xla
from rewriter.kernels.linear_cross_entropy.chunks import Chunk, Rows
from rewriter.kernels.linear_cross_entropy.estimate import (
    WORTH,
    estimate_hopper,
    margin,
)
from rewriter.kernels.linear_cross_entropy.head import Head
from rewriter.kernels.linear_cross_entropy.row_statistics import Reduced, of_product
from rewriter.kernels.linear_cross_entropy.steps import Steps
from rewriter.kernels.shared.hopper import BY_ESTIMATE, importable, is_whole
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import known_sizes
from rewriter.ops.device import Device
from rewriter.ops.kernel import Space, Spec, Speed
from rewriter.support.sizes import size_text
from rewriter.support.verdict import YES, Verdict, all_of, no

DTYPES = ("bfloat16", "float16", "float32")

LEAST = 1024
"""The fewest classes: a warpgroup takes so many numbers of 16 bits at once."""

WARPGROUPS = 8
"""Warpgroups that share a row. With so many, one row at a time is in each
multiprocessor, and the L2 cache holds the rows of all."""


def supports(spec: Spec) -> Verdict:
    """Takes plain logits of known sizes: without a soft cap, maybe with a bias."""
    base = known_sizes(spec, xla.supports)
    if not base.ok:
        return base
    found = [YES]
    for name in ("x", "w"):
        if spec.dtype(name) not in DTYPES:
            text = f"{name} is {spec.dtype(name)}, expected one of {', '.join(DTYPES)}"
            found.append(no("dtype", text))
    found.append(_bias(spec))
    if spec.param("soft_cap", 0.0):
        found.append(no("soft_cap", "a soft cap is not supported"))
    if spec.param("reduced", False):
        found.append(no("reduced", "a vocabulary split over devices is not supported"))
    if (v := spec.shape("w")[1]) < LEAST:
        found.append(no("classes", f"{v} classes, fewer than {LEAST}"))
    verdict = all_of(*found)
    module = "rewriter.kernels.cross_entropy.hopper_rows"
    return importable(module) if verdict.ok else verdict


def _bias(spec: Spec) -> Verdict:
    """Takes a bias that is one more row of the weights: of their dtype, unscaled.

    Products of 32 bits may round what they are given, and would round the bias.
    """
    if not spec.has("bias"):
        return YES
    dtypes = {spec.dtype(name) for name in ("x", "w", "bias")}
    if len(dtypes) > 1 or jnp.dtype(spec.dtype("bias")).itemsize != 2:
        text = "a bias is supported if it, x and w have one dtype of 16 bits"
        return no("bias", f"{text}, got {', '.join(sorted(dtypes))}")
    if spec.param("scale", 1.0) != 1:
        return no("bias", "a bias is not supported beside a scale of the product")
    return YES


def _form(head: Head, loss: Loss | None = None) -> Any:
    """What the kernel knows of rows; without a loss, for sums alone."""
    from rewriter.kernels.cross_entropy.hopper_rows import Form

    nan_at: tuple[float, ...] = ()
    if loss is not None and loss.nan_at != "none":
        both = (math.inf, -math.inf)
        nan_at = both if loss.nan_at == "both" else (float(loss.nan_at),)
    end = head.classes if head.end is None else head.end
    return Form(int(end), float(head.scale), nan_at, WARPGROUPS)


def reduced(head: Head, product: jax.Array, labels: jax.Array) -> Reduced:
    """Returns what is reduced over the classes of a product [n, v]."""
    from rewriter.kernels.cross_entropy.hopper_rows import totals

    if product.shape[1] % chunks.EVEN:
        return of_product(head, product, labels)
    row = Sum(*totals(product, _form(head)))
    return row, picked(head, product, labels), _below(head, product, row)


def _below(head: Head, product: jax.Array, row: Sum) -> jax.Array:
    """Returns sums of logits less the top of their row."""
    return head.total(head.logits(product) - row.top[:, None])


def picked(head: Head, product: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the logits of the labels, 0 where there is none."""
    end = head.classes if head.end is None else head.end
    place = jnp.atleast_2d(jnp.clip(labels, 0, end - 1)).T
    found = jnp.take_along_axis(product, place, 1, mode="clip").T.reshape(labels.shape)
    inside = (labels >= 0) & (labels < end)
    return jnp.where(inside, found.astype(head.wide) * head.scale, 0)


def replaces(head: Head, loss: Loss) -> bool:
    """Whether `replaced` takes a loss: aligned classes, no bias, and not their mean."""
    plain = head.bias is None and not loss.label_smoothing
    return plain and head.classes % chunks.EVEN == 0 and _modifies()


def replaced(
    head: Head, loss: Loss, known: Rows
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns what `gradients` does, with cotangents in place of the product."""
    return gradients(head, loss, known, in_place=True)


def gradients(
    head: Head, loss: Loss, known: Rows, in_place: bool = False
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns what a loss results in and cotangents of a product, see `steps.Steps`."""
    from rewriter.kernels.cross_entropy.hopper_rows import totals_and_gradients

    product, labels, up = known["product"], known["classes"], known["cotangent"]
    s = head.scale
    first, by_lse = loss.of_lse(labels, up)
    each, own = loss.of_each(up), picked(head, product, loss.picks(labels))
    if in_place:  # its other readers come first
        product, own = lax.optimization_barrier((product, own))
    top, weight, d = totals_and_gradients(
        product, first * s, by_lse * s, each * s, _form(head, loss), in_place=in_place
    )
    row = loss.total(Sum(top, weight))
    below = jnp.zeros_like(top) if in_place else _below(head, product, row)
    results = loss.results(row, own, below, labels)
    for place, at in _at_labels(head, loss.slopes(row, labels, up), row, own, labels):
        rows = jnp.arange(product.shape[0], dtype=place.dtype)
        d = d.at[rows, place].set(
            at.astype(d.dtype),
            mode="drop",
            unique_indices=True,
            indices_are_sorted=True,
        )
    return results, d.astype(head.narrow)


def _at_labels(
    head: Head, slopes: Slopes, row: Sum, own: jax.Array, labels: jax.Array
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Places of labels, and the cotangents of the product there with the scale.

    A row's two labels may be the same class, which then has what both give.
    """
    end = head.classes if head.end is None else head.end
    places = jnp.where((labels >= 0) & (labels < end), labels, head.classes)
    if labels.ndim == 1:
        p = jnp.exp(own - row.top) * slopes.share
        yield places, (p + slopes.picked) * head.scale
        return
    for place, y in zip(places, own, strict=True):
        more = jnp.where(places == place, slopes.picked, 0).sum(0) + slopes.each
        p = jnp.exp(y - row.top) * slopes.share
        yield place, (p + more) * head.scale


def of_weights(*given: Any) -> jax.Array:
    """Returns what `in_place.of_weights` does, by one kernel that copies nothing."""
    from rewriter.kernels.linear_cross_entropy import hopper_of_weights

    head, *_ = given
    if head.bias is not None:  # logits that are computed again have it, too
        return in_place.of_weights(*given)
    return hopper_of_weights.of_weights(*given)


STEPS = Steps(reduced, gradients, replaced, replaces, of_weights)


def forward(*, config: Chunk | None = None, **given: Any) -> Any:
    """Returns the losses, logits read once; see `xla.forward`."""
    config = config or chunks.LARGE
    return xla.forward(**given, config=config, steps=STEPS, join_bias=True)


def backward(*, config: Chunk | None = None, **given: Any) -> dict[str, jax.Array]:
    """Returns the cotangents, given sums: XLA reads logits once, too."""
    config = (config or chunks.LARGE).of_passing
    return xla.backward(**given, config=config, join_bias=True)


def together(
    *, config: Chunk | None = None, **given: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns losses and cotangents, from logits that are computed once."""
    config = config or chunks.LARGE
    return xla.together(**given, config=config, steps=STEPS, join_bias=True)


MEASURED = {"forward": 32768}
"""The fewest classes from which it was measured to be faster, by pass."""

MEASURED_BOTH = 16384
"""The same with gradients."""


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether such logits were measured: of 16 bits, and 256 MiB or more."""
    del device
    v, size = spec.shape("w")[1], chunks.nbytes(spec) // 4 * chunks.item_of(spec)
    least = MEASURED.get(passes, MEASURED_BOTH)
    if v >= least and size >= WORTH and chunks.item_of(spec) == 2:
        return YES
    text = f"{v} classes and {size_text(size)} of logits: measured from {least}"
    return no("unmeasured", f"{text} and {size_text(WORTH)} on, in 16 bits")


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns modelled seconds by name; infinite ones where nothing was measured."""
    found = dict(estimate_hopper(spec, device, passes, default(spec, device)))
    if not modelled(spec, device, passes).ok:
        found["hopper"] = math.inf
    return found


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: for known Hopper GPUs the estimate decides."""
    del spec, platform
    return no("device", BY_ESTIMATE)


def fits(config: Chunk, spec: Spec, device: Device) -> Verdict:
    """Returns whether rows of a block begin at multiples of 16 bytes.

    Blocks of threads that wait for each other must run at once: not in a part of a GPU.
    """
    found = [YES]
    if chunks.padded(spec.shape("w")[1], config) % chunks.EVEN:
        text = f"{config.aligned} leaves classes that are no multiple of {chunks.EVEN}"
        found.append(no("aligned", text))
    if config.one_kernel and not _one_kernel(spec, device):
        text = "sizes that one kernel for the weights' gradient does not take"
        found.append(no("one_kernel", text))
    return all_of(*found)


def _one_kernel(spec: Spec, device: Device) -> bool:
    """Whether one kernel may put the weights' gradient in its place."""
    return is_whole(device) and chunks.may_be_one_kernel(spec) and _modifies()


def _modifies() -> bool:
    """Whether kernels may modify what they are given."""
    from rewriter.kernels.shared import work_stealing

    return work_stealing.AVAILABLE


def default(spec: Spec, device: Device) -> Chunk:
    """Returns the chunk for a GPU, also where the program is exported elsewhere.

    Logits are in place of the weights' gradient where sums of these take much memory.
    On an H200, 8192 rows of 4096 and 128256 classes took 43.5 ms and 1.0 GiB so. They
    took 42.8 ms and 2.5 GiB with sums, and 44.0 ms and 7.8 GiB by XLA.
    """
    made = chunks.default(spec, device)
    made = made if made.whole else chunks.LARGE
    if _one_kernel(spec, device):
        made = replace(made, one_kernel=True)
    if found := chunks.in_place_of_sums(spec, made):
        return found
    plain = not spec.has("bias") and not spec.param("label_smoothing", 0.0)
    if plain and made.beside is None and _modifies():
        return chunks.of_an_eighth(spec, made, device)
    return made


SPACE = Space(Chunk, default, chunks.configs, fits)

KERNEL = HOPPER.kernel(
    "linear_cross_entropy", forward, backward, supports,
    Speed(
        profitable, by_rule=False, estimate=estimate, margin=margin,
        modelled=modelled,
    ),
    SPACE, SPACE, version=3,
    together=together, saves=xla.KERNEL.traits.saves, swaps=(("w", 0, 1),),
)  # fmt: skip
