"""Attention to a latent cache on Hopper GPUs: what the kernel supports.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention.empty_rows import PASSES
from rewriter.kernels.attention.hopper.dtypes import takes_dtypes
from rewriter.kernels.attention.hopper_latent.config import Programs as Programs
from rewriter.kernels.attention.hopper_latent.config import configs as configs
from rewriter.kernels.attention.hopper_latent.config import default as default
from rewriter.kernels.attention.hopper_latent.config import fits as fits
from rewriter.kernels.attention.hopper_latent.config import fits_widths
from rewriter.kernels.attention.hopper_latent.time_model import estimate, modelled
from rewriter.kernels.attention.latent_form import OWN, as_attention
from rewriter.kernels.attention.op import LATENT
from rewriter.kernels.attention.weights import PARAM
from rewriter.kernels.shared.hopper import by_estimate, importable
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.ops.device import Device
from rewriter.ops.kernel import Space, Speed, spec_of
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

OPERANDS = frozenset({*OWN, "kv_lengths", "offset"})
"""Supported operands."""

MOST_ROWS = 1024
"""The most query rows of a sequence; more are prefill, for other kernels."""

MOST_BLOCKS = 1 << 30
"""Keys of all sequences: their blocks are counted in int32."""

ANY = Device("", "cuda")
"""A GPU of unknown kind."""


def supports(spec: Spec) -> Verdict:
    """Returns whether it supports a use: few queries of 16 bits."""
    if spec.symbolic or any(0 in shape for _, shape in spec.shapes):
        return no("sizes", "the Hopper latent kernel needs known sizes above 0")
    found = [takes_dtypes(as_attention(spec)), *_dtypes(spec)]
    if more := ", ".join(sorted(set(spec.operands) - OPERANDS)):
        found.append(no("operands", f"the Hopper latent kernel does not take {more}"))
    if (scale := spec.param("scale", 1.0)) <= 0:
        found.append(no("scale", f"scale is {scale}, not positive"))
    for name in ("softcap", PARAM):
        if (value := spec.param(name)) is not None:
            found.append(no(name, f"no kernel for {name} {value}"))
    if spec.param("window", (None, None))[0] is not None:
        found.append(no("window", "a window that hides the first keys"))
    if spec.param("empty_rows") in PASSES:
        found.append(no("empty_rows", "gradients pass through rows without keys"))
    found += _sizes(spec)
    verdict = all_of(*found)
    module = "rewriter.kernels.attention.hopper_latent.decode"
    return importable(module) if verdict.ok else verdict


def _dtypes(spec: Spec) -> list[Verdict]:
    """What hinders the dtypes of rotary parts, beside those of queries and latent."""
    own = spec.dtype("q")
    return [
        no("dtype", f"{name} is {spec.dtype(name)}, and q is {own}")
        for name in ("q_rope", "k_rope")
        if spec.has(name) and spec.dtype(name) != own
    ]


def _sizes(spec: Spec) -> list[Verdict]:
    (b, t, n, c), (_, s, _) = spec.shape("q"), spec.shape("latent")
    found = [fits_widths(c, rotary(spec))]
    if t * n > MOST_ROWS:
        text = f"{t * n} query rows of a sequence, more than {MOST_ROWS}"
        found.append(no("queries", text))
    if b * s > MOST_BLOCKS:
        text = f"{b * s} keys of all sequences, more than {MOST_BLOCKS}"
        found.append(no("keys", text))
    return found


def rotary(spec: Spec) -> int:
    """Returns the width of the rotary keys; 0 if there are none."""
    return spec.shape("q_rope")[3] if spec.has("q_rope") else 0


def forward(*, config: Programs | None = None, **given: Any) -> Array:
    """Returns attention [b, t, n, e] to a latent, as `reference` does.

    Args:
        config: How the work is split; the default config if absent.
        **given: Operands and parameters of attention to a latent.
    """
    operands = {n: x for n, x in given.items() if n in LATENT.names}
    params = {n: x for n, x in given.items() if n not in operands}
    config = config or default(spec_of(LATENT, operands, params), ANY)
    return attend(config, **given)


def attend(
    config: Programs,
    *,
    q: Array,
    latent: Array,
    q_rope: Array | None = None,
    k_rope: Array | None = None,
    softcap: None = None,
    weights: None = None,
    **given: Any,
) -> Array:
    """Returns attention to a latent, in order or in pages; see `decode.attend`.

    Args:
        config: How the work is split.
        q: As there; also the next three.
        latent: As there.
        q_rope: As there.
        k_rope: As there.
        softcap: Absent in supported uses.
        weights: Absent in supported uses.
        **given: The other arguments.
    """
    from rewriter.kernels.attention.hopper_latent import decode

    assert softcap is None
    assert weights is None
    return decode.attend(q, q_rope, latent, k_rope, config, **given)


KERNEL = HOPPER.kernel(
    LATENT.name, forward, None, supports,
    Speed(by_estimate, by_rule=False, estimate=estimate, modelled=modelled),
    Space(Programs, default, configs, fits), name="hopper_latent",
)  # fmt: skip
