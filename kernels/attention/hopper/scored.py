"""Attention with a function of scores on Hopper GPUs: what the kernel supports.

The kernels are those of attention. They apply the function to each tile of products in
registers, and multiply changes of scores by its derivative, which is JAX's own.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention import hopper, xla
from rewriter.kernels.attention.empty_rows import PASSES
from rewriter.kernels.attention.estimate import of_xla
from rewriter.kernels.attention.fills import REACHES
from rewriter.kernels.attention.hopper import short
from rewriter.kernels.attention.hopper.backward_config import (
    first_fitting_backward,
    fits_backward_widths,
)
from rewriter.kernels.attention.hopper.distance_tables import of_distances
from rewriter.kernels.attention.hopper.dtypes import takes_dtypes
from rewriter.kernels.attention.hopper.extra_operands import extra_of
from rewriter.kernels.attention.hopper.functions import Function, function_of
from rewriter.kernels.attention.hopper.hoisting import hoisted
from rewriter.kernels.attention.hopper.time_model import estimate as of_attention
from rewriter.kernels.attention.hopper.time_model import modelled as as_measured
from rewriter.kernels.attention.hopper.widths import filled_backward
from rewriter.kernels.attention.op import SCORED
from rewriter.kernels.attention.scored_form import ARRAYS, OWN, TABLES, as_attention
from rewriter.kernels.attention.visibility import Visibility
from rewriter.kernels.attention.weights import PARAM
from rewriter.kernels.attention.xla.scored import TOO_MANY
from rewriter.kernels.shared.hopper import by_estimate, processors
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.ops.kernel import Space, Speed
from rewriter.ops.score import SOFTMAX
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec
    from rewriter.ops.score import Score

RATE = 2.2e11
"""Simple instructions a second that one processor's lanes complete.

With 8 x 4096 x 16 heads of 128, measured on an H100 | modelled for it; milliseconds
(``tests/bench/results/scored_gpu_h100.json``)::

                                forward      with gradients
    a decay, causal             1.5  1.3       6.9   5.1
    a cap of each head, causal  1.5  1.9       6.2   7.5
    softplus                    3.1  3.7      18.8  16.4
    T5's buckets, capped        3.6  4.0      14.0  14.4

XLA took 1.1 to 2.1 of what is estimated for it.
"""

IN_TILES = 2.5
"""How much longer up to 64 queries and keys take than `time_model` says of the kernels
that compute a head at once: these apply no function. In tiles, windows of 49 positions
took 369 µs on an H200, and 88 a head at once
(``tests/bench/results/choices_small_h200.json``)."""


def supports(spec: Spec) -> Verdict:
    """Returns whether it supports a use: that of attention, and a known function."""
    if spec.symbolic:
        return no("symbolic", "the Hopper kernel needs known sizes")
    verdict = all_of(takes_dtypes(spec), hopper.supports(as_attention(spec)))
    if spec.has("bias"):
        verdict = all_of(verdict, no("bias", "a bias is added behind the function"))
    if spec.param("empty_rows") in PASSES:
        text = "gradients pass through rows without keys to the function"
        verdict = all_of(verdict, no("empty_rows", text))
    if spec.param("normalisation") != SOFTMAX:
        text = "the weights are no softmax, which this kernel takes of all functions"
        verdict = all_of(verdict, no("weights", text))
    function = _function(spec)
    if not verdict.ok or function is None:
        return verdict
    return all_of(hopper.room(as_applied(spec)), function.supports())


def _read(spec: Spec) -> dict[str, Any]:
    """Shapes and dtypes of what the function of a use reads."""
    return {
        name: jax.ShapeDtypeStruct(shape, spec.dtype(name))
        for name, shape in spec.shapes
        if name in OWN
    }


@functools.lru_cache(maxsize=64)
def _applied_function(spec: Spec) -> tuple[Score, dict[str, Any]] | None:
    """The function as the kernel applies it, and what it reads then."""
    score = spec.param("score")
    if score is None:
        return None
    (t, s), read = (spec.shape(x)[1] for x in "qk"), _read(spec)
    apart = hoisted(score, read, t, s)
    return apart.score, apart.structs(read, t, s)


def _function(spec: Spec) -> Function | None:
    """The function as the kernel applies it."""
    apart = _applied_function(spec)
    return None if apart is None else function_of(*apart)


def as_applied(spec: Spec) -> Spec:
    """Returns a use with the operands that the kernel reads."""
    apart = _applied_function(spec)
    if apart is None:
        return spec
    score, read = apart
    kept = {n: x for n, x in spec.shapes if n not in OWN}
    dtypes = {n: x for n, x in spec.dtypes if n not in OWN}
    kept |= {n: x.shape for n, x in read.items()}
    dtypes |= {n: str(x.dtype) for n, x in read.items()}
    made = replace(spec, shapes=tuple(kept.items()), dtypes=tuple(dtypes.items()))
    return made.with_params({"score": score})


def _given(given: Mapping[str, Any]) -> dict[str, Any]:
    """Operands and parameters with what the kernel reads as ``read``."""
    read = {n: x for n, x in given.items() if n in OWN}
    softmax = {"normalisation", "divisor"}  # it has no others
    rest = {n: x for n, x in given.items() if n not in OWN | softmax}
    if given.get("score") is None:
        return rest
    t, s = given["q"].shape[1], given["k"].shape[1]
    apart = hoisted(given["score"], read, t, s)
    return rest | {"score": apart.score, "read": apart.read(read, t, s)}


def forward(**given: Any) -> Any:
    """Returns attention; see `rewriter.kernels.attention.hopper.forward_kernel`."""
    return hopper.forward(**_given(given))


def backward(**given: Any) -> dict[str, Array]:
    """Returns cotangents of float operands. XLA computes those of what is read.

    Those of arrays are added up tile by tile, those of tables as in `of_distances`,
    or as in `of_tables`.
    Compilers drop gradients that nobody asks for.
    """
    as_written = {n: x for n, x in given.items() if n not in ("config", PARAM, REACHES)}
    sizes = [filled_backward(given[x].shape[3]) for x in "qv"]
    applied = _given(given)
    extra = extra_of(hopper.flat(applied))
    config = given.get("config") or first_fitting_backward(*sizes, extra)
    if config is None or not fits_backward_widths(config, *sizes, extra).ok:
        return xla.backward(**as_written)
    grads = hopper.backward(**applied | {"config": config})
    left = [n for n in OWN & given.keys() if _is_float(given[n])]
    if left:
        by_xla = xla.backward(**as_written)
        grads |= {n: by_xla[n] for n in left}
        grads |= of_distances(given) or of_tables(as_written)
    return grads


def of_tables(given: Mapping[str, Any]) -> dict[str, Array]:
    """Returns cotangents of tables by those of all scores, as the program has them.

    On an H100, T5's buckets with all gradients took XLA 30 ms so, and 124 ms tile by
    tile (``tests/bench/results/scored_h100.json``). Where a device has no memory for
    all scores, it returns nothing.

    Args:
        given: Operands and parameters, and the result's ``cotangent``.
    """
    (b, t, n, _), s = given["q"].shape, given["k"].shape[1]
    tables = {x: given[x] for x in TABLES if x in given and _is_float(given[x])}
    if not tables or 4 * b * n * t * s >= TOO_MANY:
        return {}
    beside = (*tables, "out", "residuals", "cotangent")
    rest = {x: value for x, value in given.items() if x not in beside}
    _, back = jax.vjp(lambda moving: SCORED.reference(**rest, **moving), tables)
    return back(given["cotangent"])[0]


def _is_float(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and of ``"hopper"``.

    Those of attention, and the instructions of the function for every number.
    """
    plain = as_attention(spec)
    own = of_attention(plain, device, passes)["hopper"]
    own *= IN_TILES if short.takes(plain).ok else 1.0
    function = _function(spec)
    if function is not None and math.isfinite(own):
        both = passes != "forward"
        each = function.cost(False) + (2 * function.cost(True) if both else 0)
        own += _scores(spec) * each / (RATE * processors(device))
    by_xla = of_xla(plain, device, passes, changed=True)
    if passes != "forward" and _reads_pairs(spec):
        own += by_xla  # it computes that array's cotangent
    return {"xla": by_xla, "hopper": own}


def _reads_pairs(spec: Spec) -> bool:
    """Whether the function reads a float for each query and key from an array."""
    return any(
        name in ARRAYS
        and jnp.issubdtype(spec.dtype(name), jnp.floating)
        and min(shape[2:]) > 1
        for name, shape in spec.shapes
    )


def _scores(spec: Spec) -> float:
    """The number of scores within the window."""
    (b, t, n, _), s = spec.shape("q"), spec.shape("k")[1]
    seen = Visibility(t, s, *spec.param("window", (None, None)), spec.param("shift", 0))
    return float(b * n * seen.count()[0])


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether as many scores were measured, as for attention."""
    return as_measured(as_attention(spec), device, passes)


def default(spec: Spec, device: Device) -> hopper.Tiles:
    """Returns the default config, by the widths of heads and by what is read."""
    return hopper.default(as_applied(spec), device)


def configs(spec: Spec, device: Device) -> list[hopper.Tiles]:
    """Returns configs worth measuring, most promising first."""
    return hopper.configs(as_applied(spec), device)


def fits(config: hopper.Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run."""
    return hopper.fits(config, as_applied(spec), device)


def backward_default(spec: Spec, device: Device) -> hopper.BackwardTiles:
    """Returns the default config of the backward."""
    return hopper.backward_default(as_applied(spec), device)


def backward_configs(spec: Spec, device: Device) -> list[hopper.BackwardTiles]:
    """Returns configs of it worth measuring, most promising first."""
    return hopper.backward_configs(as_applied(spec), device)


def fits_backward(config: hopper.BackwardTiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config of the backward can run."""
    return hopper.fits_backward(config, as_applied(spec), device)


KERNEL = HOPPER.kernel(
    SCORED.name, forward, backward, supports,
    Speed(by_estimate, by_rule=False, estimate=estimate, modelled=modelled),
    Space(hopper.Tiles, default, configs, fits),
    Space(hopper.BackwardTiles, backward_default, backward_configs, fits_backward),
    version=2, deterministic=hopper.deterministic, saves_out=True, merges=True,
    saves=hopper.saves,
    swaps=(("q", 1, 2), ("k", 1, 2), ("v", 1, 2)),
)  # fmt: skip
