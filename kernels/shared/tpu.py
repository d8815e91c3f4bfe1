"""Limits that kernels for TPUs share: dtypes, and precisions of products."""

from __future__ import annotations

from collections.abc import Mapping

from rewriter.ops.kernel import Spec
from rewriter.support.verdict import Verdict, no

DTYPES = ("bfloat16", "float32")
"""Dtypes that the kernels read and write."""

PRECISIONS = (None, "default", "high", "highest")
"""Precisions of products that Pallas lowers."""


def refused_dtypes(given: Mapping[str, str | None]) -> list[Verdict]:
    """Returns what stands against some dtypes.

    Args:
        given: Dtypes by what has them; None for one that is not asked for.

    Example:
        >>> [r.text for v in refused_dtypes({"x": "float16"}) for r in v.reasons]
        ['x is float16, not bfloat16 or float32']
    """
    wanted = " or ".join(DTYPES)
    return [
        no("dtype", f"{name} is {dtype}, not {wanted}")
        for name, dtype in given.items()
        if dtype not in (*DTYPES, None)
    ]


def refused_precision(spec: Spec) -> list[Verdict]:
    """Returns what stands against the precision of a use."""
    if spec.param("precision") in PRECISIONS:
        return []
    text = f"precision {spec.param('precision')!r} is no choice of the compiler"
    return [no("precision", text)]


def by_device(spec: Spec, platform: str) -> Verdict:
    """Returns no: the gain depends on the generation, which the estimate knows."""
    del spec, platform
    return no("device", "which TPU it is decides, and that is not known")
