"""Where each op of the package is: its name, and its folder below ``rewriter.kernels``.

An op is loaded when its name is first looked up. A new op is one line here.
"""

OPS = {
    "attention": "attention",
    "gated_linear_unit": "gated_linear_unit",
    "layer_norm": "layer_norm",
    "paged_attention": "paged_attention",
    "quantized_ragged_dot": "quantized_ragged_dot",
    "quantized_ragged_gated_linear_unit": "quantized_ragged_gated_linear_unit",
    "ragged_dot": "ragged_dot",
    "ragged_gated_linear_unit": "ragged_gated_linear_unit",
    "rms_norm": "rms_norm",
}
