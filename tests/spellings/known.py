"""Spellings that are not read, or not as the corpus asks; each is reported.

Some are read with one version of JAX and not with another.
"""

from __future__ import annotations

MISSED = frozenset({
    # several axes without scale are read as a group norm
    "layer/all_but_batch", "layer/instance_norm",
    # over the reals these are equal by cases that the normal form does not join
    "glu/act_gelu_normal_cdf", "glu/act_relu_times_predicate",
})  # fmt: skip

OTHERWISE: frozenset[str] = frozenset()

NOT_IN_BFLOAT16 = frozenset({
    "layer/two_norms", "mask/padding_moderate", "fill/additive_moderate",
})  # fmt: skip
