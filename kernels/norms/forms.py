"""The norms by name, the property that tells them apart, and what kernels share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rewriter.ops.kernel import Kernel, Spec
from rewriter.support.verdict import Verdict, no

CENTRED = {"layer_norm": True, "rms_norm": False}
"""Whether a norm subtracts the mean of each row. Such a norm also takes a bias."""


def is_centred(spec: Spec) -> bool:
    """Returns whether a use is of a norm that subtracts the mean."""
    return CENTRED[spec.op]


def kernels(
    forward: Callable[..., Any], backward: Callable[..., Any], **fields: Any
) -> tuple[Kernel, ...]:
    """Returns a kernel for each norm.

    Args:
        forward: As `Kernel.forward`, with ``centred=`` beside.
        backward: As `Kernel.backward`, with ``centred=`` beside.
        **fields: The other fields of `Kernel`, the same for both.
    """
    return tuple(
        Kernel(
            op=op,
            forward=functools.partial(forward, centred=centred),
            backward=functools.partial(backward, centred=centred),
            **fields,
        )
        for op, centred in CENTRED.items()
    )


def refusals(spec: Spec, dtypes: Sequence[str]) -> list[Verdict]:
    """Returns what stands against a kernel of rows, of known sizes and some dtypes.

    It takes rows that are not empty, and operands for each column.
    """
    shape, found = spec.shape("x"), []
    given = {n: spec.dtype(n) for n in spec.operands}
    given["the result"] = spec.param("out_dtype") or spec.dtype("x")
    *others, last = dtypes
    for name, dtype in given.items():
        if dtype not in dtypes:
            text = f"{name} is {dtype}, not {', '.join(others)} or {last}"
            found.append(no("dtype", text))
    for name in spec.operands:
        wanted = {"x": shape, "epsilon": ()}.get(name, shape[-1:])
        if spec.shape(name) != wanted:
            found.append(no("shape", f"{name} is {spec.shape(name)}, not {wanted}"))
    if not shape or 0 in shape:
        found.append(no("empty", f"x has shape {shape}: it holds no numbers"))
    return found
