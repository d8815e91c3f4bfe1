"""Few queries against many keys on Hopper GPUs: what the kernel supports.

Pallas takes half a second to import, so the kernels themselves are imported where they
are first traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention.by_entry import by_entry
from rewriter.kernels.attention.hopper.dtypes import takes_dtypes
from rewriter.kernels.attention.hopper_decode.config import ROWS
from rewriter.kernels.attention.hopper_decode.config import Split as Split
from rewriter.kernels.attention.hopper_decode.config import configs as configs
from rewriter.kernels.attention.hopper_decode.config import default as default
from rewriter.kernels.attention.hopper_decode.config import fits as fits
from rewriter.kernels.attention.hopper_decode.time_model import estimate, modelled
from rewriter.kernels.attention.op import OP
from rewriter.kernels.shared.hopper import by_estimate, importable
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.ops.device import Device
from rewriter.ops.kernel import Space, Speed, spec_of
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

IN_PAGES = frozenset({"q", "k", "v", "kv_lengths", "offset"})
"""Supported operands, also with keys in pages."""

OPERANDS = IN_PAGES | {"mask"}
WIDEST = 256
"""Columns of a tensor core's product, and so the widest head."""

ANY = Device("", "cuda")
"""A GPU of unknown kind."""

MOST_BLOCKS = 1 << 30
"""Blocks of keys of all pairs: they are counted in int32."""


def supports(spec: Spec, operands: frozenset[str] = OPERANDS) -> Verdict:
    """Returns whether it supports a use: few queries of 16 bits.

    Keys are hidden by position, and by a mask that all queries and heads share.

    Args:
        spec: A use.
        operands: The supported operands.
    """
    if spec.symbolic:
        return no("symbolic", "the Hopper decode kernel needs known sizes")
    verdict = all_of(
        *_operands(spec, operands), takes_dtypes(spec), *_numbers(spec), *_empty(spec)
    )
    if verdict.ok:
        verdict = all_of(*_sizes(spec))
    return (
        importable("rewriter.kernels.attention.hopper_decode.decode")
        if verdict.ok
        else verdict
    )


def _operands(spec: Spec, operands: frozenset[str]) -> list[Verdict]:
    more = ", ".join(sorted(set(spec.operands) - operands))
    text = f"the Hopper decode kernel does not take {more}"
    return [no("operands", text)] if more else []


def _numbers(spec: Spec) -> list[Verdict]:
    given = {"scale": spec.param("scale", 1.0), "softcap": spec.param("softcap") or 1.0}
    return [
        no(name, f"{name} is {x}, not positive") for name, x in given.items() if x <= 0
    ]


def _empty(spec: Spec) -> list[Verdict]:
    return [
        no("empty", f"{name} has shape {shape}, and an axis of size 0")
        for name, shape in spec.shapes
        if 0 in shape
    ]


def _sizes(spec: Spec) -> list[Verdict]:
    (b, t, n, h), (_, s, heads, _) = spec.shape("q"), spec.shape("k")
    found = []
    for name, width in (("q", h), ("v", spec.shape("v")[3])):
        if width % 16 or width > WIDEST:
            text = f"heads of {name} are {width} wide, not 16, 32, ... {WIDEST}"
            found.append(no("width", text))
    if (rows := t * (n // heads)) > ROWS:
        text = f"{rows} queries of a key head, more than the {ROWS} of a product"
        found.append(no("queries", text))
    if b * s * heads > MOST_BLOCKS:
        text = f"{b * s * heads} keys of all heads, more than {MOST_BLOCKS}"
        found.append(no("keys", text))
    if spec.has("mask") and spec.shape("mask")[1:] != (1, 1, s):
        text = f"a mask of shape {spec.shape('mask')}, not of keys alone"
        found.append(no("mask", f"{text}: [{b} or 1, 1, 1, {s}]"))
    return found


def forward(
    *, config: Split | None = None, swapped: tuple[str, ...] = (), **given: Any
) -> Array:
    """Returns attention; see `rewriter.kernels.attention.hopper_decode.decode`.

    Args:
        config: How the work is split; the default config if absent.
        swapped: Operands whose heads lie before positions in memory.
        **given: Operands and parameters of attention.
    """
    from rewriter.kernels.attention.hopper_decode import decode

    operands = {n: x for n, x in given.items() if n in OP.names}
    params = {n: x for n, x in given.items() if n not in operands}
    config = config or default(spec_of(OP, operands, params), ANY)
    return decode.forward(**given, config=config, swapped=swapped)


KERNEL = by_entry(
    HOPPER.kernel(
        "attention", forward, None, supports,
        Speed(by_estimate, by_rule=False, estimate=estimate, modelled=modelled),
        Space(Split, default, configs, fits),
        name="hopper_decode", swaps=(("k", 1, 2), ("v", 1, 2)),
    )
)  # fmt: skip
