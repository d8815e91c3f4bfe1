"""Spellings that are not read yet, or not as the corpus asks; each is reported.

Some are read with one version of JAX and not with another.
"""

from __future__ import annotations

MISSED = frozenset({
    # softmax written so that its weights are not one quotient
    "softmax/sink_by_logaddexp",
    # a region across remat; a user's derivative rule
    "library/rematerialised_parts", "library/custom_jvp_softmax",
    # several axes without scale are read as a group norm; means by contractions
    "layer/mean_by_ones", "layer/all_but_batch", "layer/instance_norm",
    "glu/act_gelu_normal_cdf", "glu/act_relu_times_predicate",
    "glu/clipped_both_sides",
})  # fmt: skip

OTHERWISE = frozenset({
    # found, with a dense bias or mask where the corpus asks for less
    "mask/padding_additive", "fill/additive_one_minus", "library/alphafold_gated",
    "mask/padding_product", "decode/paged",
})  # fmt: skip

NOT_IN_BFLOAT16 = frozenset({
    "layer/two_norms", "mask/padding_moderate", "fill/additive_moderate",
})  # fmt: skip
