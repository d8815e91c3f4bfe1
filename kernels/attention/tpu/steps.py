"""How many steps the kernels take, where run-time values decide it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention.tpu.config import (
    ANY,
    backward_clipped,
    backward_default,
    clipped,
    default,
)
from rewriter.kernels.attention.tpu.sizes import extent, kinds, listed, together

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec


def steps(
    spec: Spec, config: Any, backward_config: Any, passes: str
) -> Mapping[str, float]:
    """Returns steps by kernel: of all batch entries and heads together.

    If code for whole blocks and for partly seen ones is compiled, each step runs one of
    them, and counts as half of all the code.

    Keys that arrays hide are counted as seen; an offset puts the last query at the
    last key.

    Args:
        spec: The use.
        config: The forward's blocks; None for the default ones.
        backward_config: The backward's.
        passes: Unused.
    """
    del passes
    (b, t, n, _), (_, s, heads, _) = spec.shape("q"), spec.shape("k")
    kind = together(spec)
    lines = {"all": 1, "group": heads, "": n}[kind]
    size = extent(spec)
    blocks = clipped(config or default(spec, ANY), *size)
    count = listed(spec, size, blocks) / kinds(spec, size, blocks)
    made = {"attention": b * lines * count}
    backward = backward_clipped(backward_config or backward_default(spec, ANY), t, s)
    each = b * n * listed(spec, (t, s), backward) / kinds(spec, (t, s), backward)
    for name in ("fused", "by_keys", "by_rows"):
        made[f"attention_backward_{name}"] = each
    return made
