"""The norms by name, and the property that tells them apart."""

from __future__ import annotations

from rewriter.ops.kernel import Spec

CENTRED = {"layer_norm": True, "rms_norm": False}
"""Whether a norm subtracts the mean of each row. Such a norm also takes a bias."""


def is_centred(spec: Spec) -> bool:
    """Returns whether a use is of a norm that subtracts the mean."""
    return CENTRED[spec.op]
