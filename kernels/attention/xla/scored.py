"""Attention with a function of scores in plain XLA: computed tile by tile.

The derivative of the function is JAX's own, for one tile at a time. No array
of all queries and keys is made, forward or backward, unless the function reads one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.empty_rows import NAN_PASSING, ZERO_NAN_PASSING
from rewriter.kernels.attention.nonzero_window import narrowed, reach
from rewriter.kernels.attention.op import SCORED
from rewriter.kernels.attention.scored_form import as_attention
from rewriter.kernels.shared.kinds import XLA
from rewriter.ops.kernel import Space, Speed
from rewriter.ops.score import NONE, SOFTMAX
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec


TOO_MANY = 32 << 30
"""Bytes of scores from which on a device has no memory for them, whatever the time."""


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` supports a use: those of bounded attention."""
    checks = []
    if spec.param("empty_rows") in (NAN_PASSING, ZERO_NAN_PASSING):
        checks.append(no("rows", "rows without keys pass NaN to a function of scores"))
    if spec.param("normalisation") != SOFTMAX:
        checks += [
            no("weights", f"{name} belongs to a softmax, and the weights are none")
            for name in ("bias", "sinks")
            if spec.has(name)
        ]
    return all_of(xla.supports(as_attention(spec)), *checks)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns whether `forward` is likely to beat the program: as bounded attention.

    On a GPU, only where half of the tiles are hidden. On an H100, 16 heads of 4096
    queries and keys in float32 take this share of XLA's time, forward | with gradients
    (``tests/bench/results/scored_h100.json``):

    a decay, causal       0.9 | 0.6
    softplus of scores    1.3 | 1.3
    T5's buckets          1.2 | 4.2
    """
    verdict = xla.profitable(as_attention(spec), platform)
    b, t, n, _ = spec.shape("q")
    if platform == "cpu" or not verdict.ok or spec.symbolic:
        return verdict
    if 4 * b * n * t * spec.shape("k")[1] >= TOO_MANY:
        return verdict
    if any(name.startswith("table_") for name in spec.operands):
        text = "numbers of a table are picked tile by tile, which takes longer than XLA"
        return no("tables", text)
    if tuple(spec.param("window")) == (None, None):
        return no("platform", "XLA is faster where no window hides some tiles")
    return verdict


def default(spec: Spec, device: Device) -> xla.Blocks:
    """Returns blocks for a device."""
    return xla.default(as_attention(spec), device)


def configs(spec: Spec, device: Device) -> list[xla.Blocks]:
    """Returns a few blocks worth measuring."""
    return xla.configs(as_attention(spec), device)


def forward(q: Array, k: Array, v: Array, **given: Any) -> Any:
    """Returns attention, as `rewriter.kernels.attention.xla.forward`."""
    return xla.forward(q, k, v, **_within_reach(q, k, given))


def backward(q: Array, k: Array, v: Array, **given: Any) -> dict[str, Array]:
    """Returns cotangents, as `rewriter.kernels.attention.xla.backward`."""
    return xla.backward(q, k, v, **_within_reach(q, k, given))


def _within_reach(q: Array, k: Array, given: dict[str, Any]) -> dict[str, Any]:
    """What is given, with the window outside of which the weights are 0."""
    moved = given.get("shift", 0) or given.get("offset") is not None
    if given.get("normalisation", SOFTMAX) == SOFTMAX or moved:
        return given
    whole = given.get("window", (None, None))
    own = reach(given["score"], q.shape[1], k.shape[1])
    return {**given, "window": narrowed(whole, own)}


def _saves(spec: Spec) -> list[Any]:
    """The log-sum-exp of each row, or its sum of weights if that divides."""
    saves = xla.KERNEL.traits.saves
    assert saves is not None
    count = {NONE: 0, SOFTMAX: 2}.get(spec.param("normalisation"), 1)
    return saves(as_attention(spec))[:count]


KERNEL = XLA.kernel(
    SCORED.name, forward, backward, supports, Speed(profitable),
    Space(xla.Blocks, default, configs),
    saves_out=True, merges=True, saves=_saves,
)  # fmt: skip
