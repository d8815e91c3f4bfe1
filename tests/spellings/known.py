"""Spellings that are not read yet, or not as the corpus asks; each is reported.

Some are read with one version of JAX and not with another.
"""

from __future__ import annotations

MISSED = frozenset({
    # several axes without scale are read as a group norm
    "layer/all_but_batch", "layer/instance_norm",
    "glu/act_gelu_normal_cdf", "glu/act_relu_times_predicate",
    "glu/clipped_both_sides",
})  # fmt: skip

OTHERWISE = frozenset({
    # found, with a dense bias or mask where the corpus asks for less
    "mask/padding_additive", "fill/additive_one_minus", "library/alphafold_gated",
    "decode/paged",
})  # fmt: skip

NOT_IN_BFLOAT16 = frozenset({
    "layer/two_norms", "mask/padding_moderate", "fill/additive_moderate",
})  # fmt: skip
