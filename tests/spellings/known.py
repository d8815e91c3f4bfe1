"""Spellings that are not read, or not as the corpus asks; each is reported.

Some are read with one version of JAX and not with another.
"""

from __future__ import annotations

MISSED: frozenset[str] = frozenset()

OTHERWISE: frozenset[str] = frozenset()

NOT_IN_BFLOAT16 = frozenset({
    "layer/two_norms", "mask/padding_moderate", "fill/additive_moderate",
})  # fmt: skip
