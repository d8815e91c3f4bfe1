"""The index of ops: each op's name, and its folder below ``rewriter.kernels``.

An op is loaded when its name is first looked up. A new op is one line here. A folder
may hold several: ops of one family, and special forms. Reports, configurations and keys
of measurements have the names of this table.
"""

OPS = {
    "attention": "attention",
    "paged_attention": "attention",
    "scored_attention": "attention",
    "quantized_attention": "attention",
    "latent_attention": "attention",
    "expanded_latent_attention": "attention",
    "paged_latent_attention": "attention",
    "group_norm": "group_norm",
    "layer_norm": "norms",
    "rms_norm": "norms",
    "gated_linear_unit": "gated_linear_unit",
    "quantized_gated_linear_unit": "gated_linear_unit",
    "ragged_dot": "ragged.dot",
    "quantized_ragged_dot": "ragged.dot",
    "ragged_gated_linear_unit": "ragged.gated_linear_unit",
    "quantized_ragged_gated_linear_unit": "ragged.gated_linear_unit",
    "quantized_dot": "quantized_dot",
    "packed_dot": "quantized_dot",
    "block_scaled_dot": "quantized_dot",
    "cross_entropy": "cross_entropy",
    "linear_cross_entropy": "linear_cross_entropy",
    "embedding": "embedding",
    "embedding_lookup": "embedding",
}

ROWS = "quantized_rows"
"""The folder of the kernel that computes programs of rows, which are no op."""

ELEMENTWISE = "activations"
"""The folder of the kernel that computes elementwise functions, which are no op."""
