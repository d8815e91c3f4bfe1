"""Spellings that are not read yet, or not as the corpus asks; each is reported.

Some are read with one version of JAX and not with another.
"""

from __future__ import annotations

MISSED = frozenset({
    # softmax written so that its weights are not one quotient
    "softmax/max_clamped", "softmax/sum_by_ones", "softmax/values_with_ones_column",
    "softmax/guarded_division", "softmax/guard_total", "softmax/sink_column_first",
    "softmax/sink_by_logaddexp",
    # the gather of a page table; a region across remat; a user's derivative rule
    "decode/paged", "library/rematerialised_parts", "library/custom_jvp_softmax",
    # no epsilon is read as an L2 norm; several axes without scale as a group norm
    "rms/absolute_square", "rms/no_eps", "rms/two_axes", "layer/mean_by_ones",
    "layer/no_eps", "layer/two_axes", "layer/all_but_batch", "layer/instance_norm",
    "glu/act_gelu_normal_cdf", "glu/act_relu_times_predicate", "glu/weights_stacked",
    "glu/clipped_both_sides", "ragged/rhs_transposed_before",
})  # fmt: skip

OTHERWISE = frozenset({
    # found, with a dense bias or mask where the corpus asks for less
    "mask/padding_additive", "fill/additive_one_minus", "library/alphafold_gated",
    "mask/padding_product",
})  # fmt: skip

NOT_IN_BFLOAT16 = frozenset({
    "layer/two_norms", "mask/padding_moderate", "fill/additive_moderate",
})  # fmt: skip
